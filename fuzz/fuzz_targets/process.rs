//! What other processes and guests say of themselves: memory maps, command lines, control groups, consoles.
//!
//! Nothing may panic, guest RAM and the memory of a process must be mappings that the map really lists, and no mapping of a
//! process may be larger than asked for.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_trap::parse_iomem;
use plimsoll_vm::{
    BlockReads, CgroupMount, CommandLine, ConsoleEvent, ControlGroup, FileSystems, MemoryPressure,
    guest_ram, parse_maps, parse_members, process_ram, ram_state,
};

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let arguments: Vec<&str> = text.split('\0').collect();
    let command_line = CommandLine::parse(&arguments);
    let _ = CommandLine::parse_with_files(&["-readconfig", "file"], |_| Some(text.to_string()));
    let file_systems = FileSystems::parse(&text);
    for line in text.lines() {
        let _ = ConsoleEvent::parse(line);
    }
    let _ = (
        ControlGroup::parse(&text),
        MemoryPressure::parse(&text),
        BlockReads::of_virsh(&text),
        CgroupMount::parse(&text, false),
    );
    assert!(parse_members(&text).all(|pid| pid != 0));
    let memory = parse_iomem(&text);
    assert!(memory.windows(2).all(|pair| pair[0].end <= pair[1].start));
    let Ok(entries) = parse_maps(&text) else {
        return;
    };
    let largest_bytes = 1 << 40;
    let memory = process_ram(&entries, &file_systems, largest_bytes).mappings;
    assert!(
        memory
            .iter()
            .all(|mapping| mapping.len_bytes <= largest_bytes)
    );
    let _ = ram_state(&text, &memory);
    let ram = guest_ram(&entries, &file_systems, &command_line);
    for mapping in ram.into_iter().chain(memory) {
        let end = mapping
            .address
            .checked_add(mapping.len_bytes)
            .expect("a range of addresses");
        assert!(mapping.len_bytes > 0);
        assert!(
            entries
                .iter()
                .any(|entry| entry.start <= mapping.address && mapping.address < entry.end)
        );
        assert!(
            entries
                .iter()
                .any(|entry| entry.start < end && end <= entry.end)
        );
        let _ = ram_state(&text, &[mapping]);
    }
});
