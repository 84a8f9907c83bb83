//! What other processes and guests say of themselves: memory maps, command lines, control groups, consoles.
//!
//! Nothing may panic, and guest RAM must be a mapping that the map really lists.
#![no_main]

use libfuzzer_sys::fuzz_target;
use plimsoll_vm::{
    BlockReads, CommandLine, ConsoleEvent, ControlGroup, FileSystems, MemoryPressure, guest_ram,
    parse_maps, ram_state,
};

fuzz_target!(|data: &[u8]| {
    let text = String::from_utf8_lossy(data);
    let arguments: Vec<&str> = text.split('\0').collect();
    let command_line = CommandLine::parse(&arguments);
    let file_systems = FileSystems::parse(&text);
    for line in text.lines() {
        let _ = ConsoleEvent::parse(line);
    }
    let _ = (
        ControlGroup::parse(&text),
        MemoryPressure::parse(&text),
        BlockReads::of_virsh(&text),
    );
    let Ok(entries) = parse_maps(&text) else {
        return;
    };
    for mapping in guest_ram(&entries, &file_systems, &command_line) {
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
        let _ = ram_state(&text, &mapping);
    }
});
