//! The memory of a QEMU that is to be started: whether other processes can map it, and what its command line lacks for that.

use std::ffi::OsString;

use plimsoll_output::bail_usage;
use plimsoll_protocol::size::ByteSize;
use plimsoll_vm::{CommandLine, OptionValues, qemu_options};

/// What the memory added to QEMU is called.
const MEMORY_ID: &str = "plimsoll-memory";
/// The memory of a VM.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Its command line makes it such that others can map it.
    Shared,
    /// Memory of this size, for which its command line names no backend.
    Plain { bytes: u64 },
}

impl Memory {
    /// Reads QEMU's command line.
    pub(super) fn of(line: &[String]) -> anyhow::Result<Self> {
        let mut backends: Vec<(String, bool)> = Vec::new();
        let mut used = Vec::new();
        for (option, values) in qemu_options(line) {
            match option {
                "object" => backends.extend(backend(&values)),
                "machine" | "M" => used.extend(values.get("memory-backend").map(str::to_owned)),
                "numa" => used.extend(values.get("memdev").map(str::to_owned)),
                "mem-path" => bail_usage!(
                    "-mem-path gives memory that others cannot map: use -object \
                     memory-backend-file,id=ID,size=SIZE,mem-path=PATH,share=on and -machine memory-backend=ID"
                ),
                _ => {}
            }
        }
        for id in &used {
            match backends.iter().find(|(other, _)| other == id) {
                Some((_, true)) => {}
                Some((_, false)) => bail_usage!(
                    "the memory '{id}' cannot be mapped by other processes: it must be a memory-backend-memfd or \
                     memory-backend-file with share=on"
                ),
                None => bail_usage!("there is no -object memory-backend with id={id}"),
            }
        }
        if !used.is_empty() {
            return Ok(Self::Shared);
        }
        let parsed = CommandLine::parse(line);
        let bytes = parsed.memory_bytes.unwrap_or(128 << 20);
        Ok(Self::Plain { bytes })
    }

    /// Adds what is missing, and returns a phrase on the memory that there is then.
    pub(super) fn add_to(&self, added: &mut Vec<OsString>) -> String {
        match self {
            Self::Shared => "shared memory".to_owned(),
            Self::Plain { bytes } => {
                let object = format!("memory-backend-memfd,id={MEMORY_ID},size={bytes},share=on");
                let machine = format!("memory-backend={MEMORY_ID}");
                added.extend(["-object".into(), object.into()]);
                added.extend(["-machine".into(), machine.into()]);
                let size = ByteSize(*bytes).rounded();
                format!("memory of {size} made shared (memory-backend-memfd)")
            }
        }
    }
}

/// Name of a memory backend, and whether others can map what it gives.
fn backend(values: &OptionValues) -> Option<(String, bool)> {
    let share = values.flag("share");
    let shared = match values.get("qom-type").or(values.implied())? {
        "memory-backend-memfd" | "memory-backend-shm" => share.unwrap_or(true),
        "memory-backend-file" => share.unwrap_or(false),
        kind if kind.starts_with("memory-backend-") => false,
        _ => return None,
    };
    Some((values.get("id")?.to_owned(), shared))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn line(text: &str) -> Vec<String> {
        text.split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn memory_that_others_can_map_is_left_alone() {
        for text in [
            "-object memory-backend-memfd,id=m,size=1G -machine q35,memory-backend=m",
            "-object memory-backend-memfd,id=m,size=1G,share=on -M memory-backend=m",
            "-object memory-backend-file,id=a,size=1G,mem-path=/x,share=on -numa node,memdev=a",
            "--machine memory-backend=m --object memory-backend-file,share=off,share=on,id=m,size=1",
            "-object {\"qom-type\":\"memory-backend-memfd\",\"id\":\"m\",\"share\":true} \
             -machine memory-backend=m",
        ] {
            assert_eq!(Memory::of(&line(text)).unwrap(), Memory::Shared, "{text}");
        }
    }

    #[test]
    fn memory_that_others_cannot_map_is_refused_with_what_would_do() {
        for (text, reason) in [
            (
                "-object memory-backend-ram,id=m,size=1G,share=on -machine memory-backend=m",
                "the memory 'm' cannot be mapped by other processes",
            ),
            (
                "-object memory-backend-memfd,id=m,size=1G,share=off -machine memory-backend=m",
                "the memory 'm' cannot be mapped",
            ),
            (
                "-object memory-backend-file,id=m,size=1G,mem-path=/x -numa node,memdev=m",
                "the memory 'm' cannot be mapped",
            ),
            (
                "-machine q35,memory-backend=m",
                "no -object memory-backend with id=m",
            ),
            (
                "-mem-path /dev/hugepages",
                "use -object memory-backend-file",
            ),
        ] {
            let error = Memory::of(&line(text)).unwrap_err();
            assert!(error.to_string().contains(reason), "{text}: {error}");
            assert!(
                error
                    .downcast_ref::<plimsoll_output::exit::UsageError>()
                    .is_some()
            );
        }
    }

    #[test]
    fn plain_memory_is_made_shared_in_its_size() {
        for (text, bytes) in [
            ("-m 512 -machine q35", 512 << 20),
            ("-nodefaults", 128 << 20),
            (
                "-m size=1G,maxmem=4G -object memory-backend-ram,id=hot,size=1G",
                1 << 30,
            ),
        ] {
            let memory = Memory::of(&line(text)).unwrap();
            assert_eq!(memory, Memory::Plain { bytes }, "{text}");
            let mut added = Vec::new();
            memory.add_to(&mut added);
            let added: Vec<_> = added
                .iter()
                .map(|word| word.to_string_lossy().into_owned())
                .collect();
            // What is added is what would be left alone.
            assert_eq!(Memory::of(&added).unwrap(), Memory::Shared);
            assert_eq!(CommandLine::parse(&added).backends[0].size_bytes, bytes);
        }
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(
            arguments in prop::collection::vec(
                "-(object|machine|M|numa|mem-path|m)|memory-backend-[a-z=,]{0,20}|[a-z=,{}\":]{0,30}", 0..12,
            ),
        ) {
            let _ = Memory::of(&arguments);
        }
    }
}
