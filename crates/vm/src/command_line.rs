//! Parses a VM's QEMU command line.
//!
//! Only options for memory, name, accelerator and monitor are read, in the forms used on the command line and by
//! libvirt (objects as JSON), and those of files that `-readconfig` names, as LXD and Incus start VMs. All others, and
//! invalid ones, are ignored, because QEMU itself has already accepted the command line. Source: qemu-system-x86_64(1).

use std::path::PathBuf;

use serde_json::Value;

use plimsoll_flow::{Accelerator, Whole as _};

/// RAM that QEMU gives a VM without `-m`, in bytes.
const DEFAULT_RAM_BYTES: u64 = 128 << 20;

/// Name of the port that connects to an agent in the guest.
const AGENT_PORT: &str = "org.qemu.guest_agent.0";

/// The options of a QEMU command line that describe the VM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CommandLine {
    /// `-name`.
    pub name: Option<String>,
    /// `-uuid`, or that of `-smbios type=1`, in lower case.
    pub uuid: Option<String>,
    /// `-m`, in bytes; without memory that is hot-plugged later.
    pub memory_bytes: Option<u64>,
    /// `-m maxmem=`: limit of memory after hot-plugging, in bytes.
    pub memory_max_bytes: Option<u64>,
    /// `-accel`, `-machine accel=`, `-enable-kvm`: those supported here, in order of preference.
    pub accelerators: Vec<Accelerator>,
    /// Memory that is mapped, in the order of its objects: `-object memory-backend-*` that the machine, a NUMA node or a device
    /// uses, and first the RAM of `-m` where that has no such object.
    pub backends: Vec<RamBackend>,
    /// Paths of the Unix sockets at which QEMU listens for a client of QMP, as given; relative to QEMU's working directory. In the
    /// order in which they are tried: those of `-qmp`, then those of `-mon`, of each the last one first.
    pub qmp_sockets: Vec<PathBuf>,
    /// Path of the Unix socket that connects to an agent in the guest, as given.
    pub agent_socket: Option<PathBuf>,
    /// Paths of the Unix sockets that its character devices connect to or listen at, as given.
    pub sockets: Vec<PathBuf>,
}

/// A memory backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RamBackend {
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Its type of memory.
    pub kind: BackendKind,
    /// What uses it.
    pub usage: BackendUsage,
}

/// What uses a memory backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendUsage {
    /// The machine or a NUMA node: RAM for as long as the VM runs.
    Machine,
    /// A DIMM or virtio-mem: RAM that can be unplugged.
    Dimm,
    /// Another device: an NVDIMM, persistent memory, or memory that is shared with other VMs.
    Other,
}

/// The type of memory that a backend allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BackendKind {
    /// `memory-backend-memfd`.
    Memfd,
    /// `memory-backend-file`, or `-mem-path`.
    File,
    /// `memory-backend-ram`, `memory-backend-shm`, or plain `-m`.
    Anonymous,
}

impl CommandLine {
    /// Parses the arguments of a QEMU process, with the options in the file of each `-readconfig`. `text_of` reads a file; one that
    /// it cannot is left out.
    pub fn parse_with_files(arguments: &[&str], text_of: impl Fn(&str) -> Option<String>) -> Self {
        Self::parse(&with_files(arguments, text_of))
    }

    /// Parses the arguments of a QEMU process.
    pub fn parse<Argument: AsRef<str>>(arguments: &[Argument]) -> Self {
        let mut line = Self::default();
        let mut sockets: Vec<(String, PathBuf)> = Vec::new();
        let mut servers: Vec<String> = Vec::new();
        let (mut controls, mut agent) = (Vec::new(), None);
        let mut objects: Vec<(String, u64, BackendKind)> = Vec::new();
        let (mut in_machine, mut in_devices) = (Vec::new(), Vec::new());
        let mut main_kind = BackendKind::Anonymous;
        let mut arguments = arguments.iter().map(AsRef::as_ref).peekable();
        while let Some(argument) = arguments.next() {
            let Some(option) = argument.strip_prefix('-') else {
                continue;
            };
            let option = option.strip_prefix('-').unwrap_or(option);
            if option == "enable-kvm" {
                line.accelerators.push(Accelerator::Kvm);
                continue;
            }
            let value = arguments.peek().copied().unwrap_or_default();
            let values = OptionValues::parse(value);
            match option {
                // QEMU merges several.
                "name" => {
                    let name = values.get("guest").or(values.implied());
                    line.name = name.map(Into::into).or(line.name);
                }
                "uuid" => line.uuid = parse_uuid(value).or(line.uuid),
                // As Proxmox VE gives it.
                "smbios" if values.get("type") == Some("1") && line.uuid.is_none() => {
                    line.uuid = values.get("uuid").and_then(parse_uuid);
                }
                "m" => {
                    let bytes =
                        |size: Option<&str>| size.and_then(|size| parse_size(size, 1 << 20));
                    let size = bytes(values.get("size").or(values.implied()));
                    line.memory_bytes = size.or(line.memory_bytes);
                    line.memory_max_bytes = bytes(values.get("maxmem")).or(line.memory_max_bytes);
                }
                "accel" => {
                    let name = values.get("accel").or(values.implied());
                    line.accelerators.extend(name.and_then(accelerator));
                }
                "machine" | "M" => {
                    let choices = values.get("accel").unwrap_or_default().split(':');
                    line.accelerators.extend(choices.filter_map(accelerator));
                    in_machine.extend(values.get("memory-backend").map(str::to_owned));
                }
                "numa" => in_machine.extend(values.get("memdev").map(str::to_owned)),
                "object" => objects.extend(backend(&values)),
                "mem-path" => main_kind = BackendKind::File,
                "qmp" | "qmp-pretty" => {
                    let target = values.implied().unwrap_or_default();
                    if let Some(path) = target.strip_prefix("unix:")
                        && values.listens()
                    {
                        line.qmp_sockets.insert(0, path.into());
                    }
                    controls.extend(target.strip_prefix("chardev:").map(str::to_owned));
                }
                "chardev" if values.get("backend").or(values.implied()) == Some("socket") => {
                    if let (Some(id), Some(path)) = (values.get("id"), values.get("path")) {
                        sockets.push((id.into(), path.into()));
                        servers.extend(values.listens().then(|| id.to_owned()));
                    }
                }
                "device" => {
                    agent = agent.or(agent_chardev(&values));
                    let driver = values.get("driver").or(values.implied());
                    let is_ram = driver.is_some_and(|driver| {
                        driver == "pc-dimm" || driver.starts_with("virtio-mem")
                    });
                    let memory = values.get("memdev").map(str::to_owned);
                    let usage = match is_ram {
                        true => BackendUsage::Dimm,
                        false => BackendUsage::Other,
                    };
                    in_devices.extend(memory.map(|id| (id, usage)));
                }
                "mon" if values.get("mode") == Some("control") => {
                    let chardev = values.get("chardev").or(values.implied());
                    controls.extend(chardev.map(str::to_owned));
                }
                _ => continue,
            }
            arguments.next();
        }
        // A monitor may also be a client of its manager's server, as Proxmox VE's for events is; nobody can connect to that.
        for control in controls.iter().rev().filter(|id| servers.contains(id)) {
            let socket = sockets.iter().find(|(id, _)| id == control);
            line.qmp_sockets
                .extend(socket.map(|(_, path)| path.clone()));
        }
        if let Some(agent) = agent {
            let socket = sockets.iter().find(|(id, _)| *id == agent);
            line.agent_socket = socket.map(|(_, path)| path.clone());
        }
        line.sockets = sockets.into_iter().map(|(_, path)| path).collect();
        if !objects.iter().any(|(id, ..)| in_machine.contains(id)) {
            line.backends.push(RamBackend {
                size_bytes: line.memory_bytes.unwrap_or(DEFAULT_RAM_BYTES),
                kind: main_kind,
                usage: BackendUsage::Machine,
            });
        }
        for (id, size_bytes, kind) in objects {
            let device = in_devices.iter().find(|(memory, _)| *memory == id);
            let usage = match in_machine.contains(&id) {
                true => Some(BackendUsage::Machine),
                false => device.map(|(_, usage)| *usage),
            };
            line.backends.extend(usage.map(|usage| RamBackend {
                size_bytes,
                kind,
                usage,
            }));
        }
        line
    }

    /// The RAM that the VM has at start; at least one backend.
    pub fn ram(&self) -> impl Iterator<Item = &RamBackend> {
        self.backends
            .iter()
            .filter(|backend| backend.usage != BackendUsage::Other)
    }
}

/// The arguments with those in the place of each `-readconfig FILE` that its file stands for.
fn with_files(arguments: &[&str], text_of: impl Fn(&str) -> Option<String>) -> Vec<String> {
    let mut all = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(&argument) = arguments.next() {
        match argument {
            "-readconfig" | "--readconfig" => {
                let text = arguments.next().and_then(|file| text_of(file));
                all.extend(arguments_of(&text.unwrap_or_default()));
            }
            _ => all.push(argument.to_owned()),
        }
    }
    all
}

/// The arguments that a file stands for: groups headed `[GROUP]` or `[GROUP "ID"]`, each with lines `KEY = "VALUE"`.
fn arguments_of(text: &str) -> Vec<String> {
    let mut arguments: Vec<String> = Vec::new();
    for line in text.lines().map(str::trim) {
        if let Some(head) = line
            .strip_prefix('[')
            .and_then(|rest| rest.strip_suffix(']'))
        {
            let (group, id) = head.split_once(' ').unwrap_or((head, ""));
            let id = id.trim().trim_matches('"');
            // The options of -m, by the name that QEMU has for them.
            let option = if group == "memory" { "m" } else { group };
            let value = match id {
                "" => String::new(),
                id => format!("id={}", escape_commas(id)),
            };
            arguments.extend([format!("-{option}"), value]);
        } else if let Some((key, value)) = line.split_once('=')
            && !line.starts_with('#')
            && let Some(values) = arguments.last_mut()
        {
            let value = escape_commas(value.trim().trim_matches('"'));
            let comma = if values.is_empty() { "" } else { "," };
            values.push_str(&format!("{comma}{}={value}", key.trim()));
        }
    }
    arguments
}

/// A UUID in its usual form, in lower case; `None` for other text, and for the all-zero UUID.
pub fn parse_uuid(text: &str) -> Option<String> {
    let groups = text.split('-').map(str::len);
    let is_uuid = groups.eq([8, 4, 4, 4, 12])
        && text
            .chars()
            .all(|character| character == '-' || character.is_ascii_hexdigit());
    let is_none = text.chars().all(|character| matches!(character, '-' | '0'));
    (is_uuid && !is_none).then(|| text.to_ascii_lowercase())
}

fn accelerator(name: &str) -> Option<Accelerator> {
    match name {
        "kvm" => Some(Accelerator::Kvm),
        "tcg" => Some(Accelerator::Tcg),
        _ => None,
    }
}

/// The words between commas; a doubled comma is one within a word, as in QEMU's options.
pub fn comma_words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if character == ',' && characters.next_if_eq(&',').is_none() {
            words.push(String::new());
        } else if let Some(word) = words.last_mut() {
            word.push(character);
        }
    }
    words
}

/// A text with its commas doubled, so that [`comma_words`] and QEMU parse it as one word.
pub fn escape_commas(text: &str) -> String {
    text.replace(',', ",,")
}

/// The options of QEMU's command line, without their hyphens, each with the argument behind it, which may not be its own.
pub fn qemu_options<Argument: AsRef<str>>(
    line: &[Argument],
) -> impl Iterator<Item = (&str, OptionValues)> {
    line.iter().enumerate().filter_map(|(at, argument)| {
        let option = argument.as_ref().strip_prefix('-')?;
        let value = line.get(at + 1).map_or("", AsRef::as_ref);
        let option = option.strip_prefix('-').unwrap_or(option);
        Some((option, OptionValues::parse(value)))
    })
}

/// `implied,key=value,key=value`, with `,,` for a comma within a value, or a JSON object.
pub struct OptionValues(Vec<(String, String)>);

impl OptionValues {
    fn parse(text: &str) -> Self {
        if text.starts_with('{')
            && let Ok(Value::Object(members)) = serde_json::from_str(text)
        {
            let text = |value: Value| match value {
                Value::String(text) => text,
                other => other.to_string(),
            };
            let pairs = members.into_iter().map(|(key, value)| (key, text(value)));
            return Self(pairs.collect());
        }
        let pair = |word: String| match word.split_once('=') {
            Some((key, value)) => (key.to_owned(), value.to_owned()),
            None => (String::new(), word),
        };
        Self(comma_words(text).into_iter().map(pair).collect())
    }

    /// The last value of a key, which holds, as in QEMU.
    pub fn get(&self, key: &str) -> Option<&str> {
        let found = self.0.iter().rfind(|(name, _)| name == key);
        found.map(|(_, value)| value.as_str())
    }

    /// Whether a socket is QEMU's own, at which others connect.
    fn listens(&self) -> bool {
        let word = |(key, value): &(String, String)| match key.as_str() {
            "" => value == "server",
            key => key == "server" && is_on(value),
        };
        self.0.iter().any(word)
    }

    /// Whether a key is on, if it is set.
    pub fn flag(&self, key: &str) -> Option<bool> {
        self.get(key).map(is_on)
    }

    /// The first word, if it has no key.
    pub fn implied(&self) -> Option<&str> {
        let (key, value) = self.0.first()?;
        (key.is_empty() && !value.is_empty()).then_some(value)
    }
}

fn is_on(value: &str) -> bool {
    matches!(value, "on" | "yes" | "true" | "y")
}

/// A size in QEMU's syntax: a number, possibly with a fraction, and a suffix; `None` beyond 2^63.
fn parse_size(text: &str, default_unit: u64) -> Option<u64> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => default_unit,
        "b" => 1,
        "k" => 1 << 10,
        "m" => 1 << 20,
        "g" => 1 << 30,
        "t" => 1 << 40,
        "p" => 1 << 50,
        _ => return None,
    };
    let bytes = match digits.parse::<u64>() {
        Ok(number) => number.checked_mul(unit)?,
        Err(_) => {
            let bytes = digits.parse::<f64>().ok()? * unit as f64;
            if !(0.0..9.2e18).contains(&bytes) {
                return None;
            }
            u64::whole(bytes)
        }
    };
    (bytes < 1 << 63).then_some(bytes)
}

/// The character device of a port for the guest's agent, from the values of `-device`.
fn agent_chardev(values: &OptionValues) -> Option<String> {
    let chardev = values.get("chardev")?;
    (values.get("name")? == AGENT_PORT).then(|| chardev.to_owned())
}

/// The identifier, size in bytes and type of a memory backend, from the values of `-object`.
fn backend(values: &OptionValues) -> Option<(String, u64, BackendKind)> {
    let kind = values.get("qom-type").or(values.implied())?;
    let kind = match kind.strip_prefix("memory-backend-")? {
        "memfd" => BackendKind::Memfd,
        "file" => BackendKind::File,
        "ram" | "shm" => BackendKind::Anonymous,
        _ => return None,
    };
    let size_bytes = parse_size(values.get("size")?, 1)?;
    Some((values.get("id")?.to_owned(), size_bytes, kind))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> CommandLine {
        CommandLine::parse(&text.split(' ').collect::<Vec<_>>())
    }

    #[test]
    fn a_line_written_by_hand_is_read() {
        let line = parse(
            "qemu-system-x86_64 -enable-kvm -name web,debug-threads=on -m 1.5G -smp 2 \
             -qmp unix:/run/a,,b.sock,server=on,wait=off -append -m",
        );
        assert_eq!(line.name.as_deref(), Some("web"));
        assert_eq!(line.memory_bytes, Some(3 << 29), "the last -m has no size");
        assert_eq!(line.accelerators, [Accelerator::Kvm]);
        assert_eq!(line.qmp_sockets, [Path::new("/run/a,b.sock")]);
        let line = parse("qemu-system-x86_64 -m 1.5G -machine q35,accel=kvm:tcg");
        assert_eq!(line.memory_bytes, Some(3 << 29));
        assert_eq!(line.accelerators, [Accelerator::Kvm, Accelerator::Tcg]);
        assert_eq!(line.backends[0].kind, BackendKind::Anonymous);
    }

    #[test]
    fn a_file_of_readconfig_is_part_of_the_line() {
        // As QEMU 7.2 accepts it, and LXD writes it.
        let file = r#"# Machine
[machine]
type = "q35"
accel = "kvm"
[memory]
size = "96M"

[object "mem0"]
qom-type = "memory-backend-memfd"
size = "96M"
share = "on"
[numa]
type = "node"
memdev = "mem0"
[chardev "monitor"]
backend = "socket"
path = "/run/a,b.sock"
server = "on"
wait = "off"
[mon]
chardev = "monitor"
mode = "control"
[name]
guest = "conf,vm"
"#;
        let read = |path: &str| (path == "qemu.conf").then(|| file.to_owned());
        let arguments = ["qemu", "-uuid", "x", "-readconfig", "qemu.conf", "-S"];
        let line = CommandLine::parse_with_files(&arguments, read);
        let written = parse(
            "qemu -m 96M -object memory-backend-memfd,id=mem0,size=96M,share=on -numa node,memdev=mem0 \
             -accel kvm -qmp unix:/run/a,,b.sock,server=on -name conf,,vm",
        );
        let sockets = vec![PathBuf::from("/run/a,b.sock")];
        assert_eq!(line, CommandLine { sockets, ..written });
        let accelerator = arguments_of("[accel]\n  accel=\"kvm\"\n[\n]x=\n");
        assert_eq!(accelerator, ["-accel", "accel=kvm,]x="]);
        for wrong in [
            vec!["-readconfig"],
            vec!["-readconfig", "other", "-m", "96M"],
        ] {
            let line = CommandLine::parse_with_files(&wrong, read);
            assert_eq!(line.name, None, "{wrong:?}");
            assert_eq!(line.memory_bytes.is_some(), wrong.len() > 1, "{wrong:?}");
        }
    }

    #[test]
    fn ram_is_what_the_machine_its_nodes_and_its_dimms_use() {
        let object = |id, mib| format!("-object memory-backend-memfd,id={id},size={mib}M,share=on");
        let ram = |text: &str| -> Vec<_> {
            let line = parse(text);
            line.ram().map(|ram| ram.size_bytes >> 20).collect()
        };
        let (a, b) = (object("a", 256), object("b", 16));
        let json = r#"{"driver":"pc-dimm","node":0,"memdev":"b","id":"dimm0"}"#;
        for device in ["pc-dimm,memdev=b", "virtio-mem-pci,memdev=b,id=x", json] {
            let of_device = format!("{b} -device {device}");
            assert_eq!(ram(&format!("-m 192 {of_device}")), [192, 16], "{device}");
            let whole = format!("{a} {of_device} -machine q35,memory-backend=a");
            assert_eq!(ram(&whole), [256, 16], "{device}");
        }
        for device in [
            "ivshmem-plain,memdev=b",
            "nvdimm,id=n,memdev=b",
            "virtio-pmem-pci,memdev=b",
        ] {
            let line = format!("-m 192 {b} -device {device}");
            assert_eq!(ram(&line), [192], "{device}");
            assert_eq!(parse(&line).backends.len(), 2, "{device}");
        }
        // Plugged later, if at all.
        assert_eq!(ram(&format!("-m 192 {b}")), [192]);
        let nodes = "-numa node,nodeid=0,memdev=a -numa node,nodeid=1,memdev=b";
        assert_eq!(ram(&format!("{a} {b} -m 272 {nodes}")), [256, 16]);
        assert_eq!(ram(&format!("-m 192 -M memory-backend=c {b}")), [192]);
    }

    #[test]
    fn a_line_written_by_libvirt_is_read() {
        let line = CommandLine::parse(&[
            "/usr/bin/qemu-system-x86_64",
            "-name",
            "guest=debian,debug-threads=on",
            "-S",
            "-uuid",
            "C7A5FDBD-edaf-9455-926a-d65c16db1809",
            "-machine",
            "pc-q35-7.2,usb=off,dump-guest-core=off,memory-backend=pc.ram",
            "-accel",
            "tcg",
            "-m",
            "size=524288k,slots=16,maxmem=4194304k",
            "-object",
            r#"{"qom-type":"memory-backend-memfd","id":"pc.ram","share":true,"size":536870912}"#,
            "-chardev",
            "socket,id=charmonitor,path=/var/lib/libvirt/monitor.sock,server=on,wait=off",
            "-mon",
            "chardev=charmonitor,id=monitor,mode=control",
        ]);
        assert_eq!(
            line,
            CommandLine {
                name: Some("debian".into()),
                uuid: Some("c7a5fdbd-edaf-9455-926a-d65c16db1809".into()),
                memory_bytes: Some(512 << 20),
                memory_max_bytes: Some(4 << 30),
                accelerators: vec![Accelerator::Tcg],
                backends: vec![RamBackend {
                    size_bytes: 512 << 20,
                    kind: BackendKind::Memfd,
                    usage: BackendUsage::Machine,
                }],
                qmp_sockets: vec!["/var/lib/libvirt/monitor.sock".into()],
                agent_socket: None,
                sockets: vec!["/var/lib/libvirt/monitor.sock".into()],
            }
        );
    }

    #[test]
    fn a_uuid_of_the_firmware_tables_is_the_vms_unless_it_has_another() {
        let (one, other) = (
            "c7a5fdbd-edaf-9455-926a-d65c16db1809",
            "d7a5fdbd-edaf-9455-926a-d65c16db1809",
        );
        let uuid = |text: &str| parse(text).uuid;
        let smbios = format!("-smbios type=1,manufacturer=x,uuid={one}");
        assert_eq!(uuid(&smbios), Some(one.into()));
        for line in [
            format!("-uuid {other} {smbios}"),
            format!("{smbios} -uuid {other}"),
        ] {
            assert_eq!(uuid(&line), Some(other.into()));
        }
        let table = format!("-smbios type=3,uuid={one}");
        assert_eq!(uuid(&table), None);
    }

    #[test]
    fn a_monitor_for_people_is_no_qmp_socket() {
        let line = parse(
            "-chardev socket,id=a,path=/a,server=on -chardev socket,id=b,path=/b,server \
             -mon chardev=a,mode=readline -mon chardev=b,mode=control -monitor unix:/c,server",
        );
        assert_eq!(line.qmp_sockets, [Path::new("/b")]);
    }

    #[test]
    fn a_monitor_that_is_a_client_is_not_connected_to() {
        let server = "-chardev socket,id=qmp,path=/run/100.qmp,server=on,wait=off";
        let client = "-chardev socket,id=qmp-event,path=/run/qmeventd.sock,reconnect=5";
        let line = parse(&format!(
            "{server} -mon chardev=qmp,mode=control {client} -mon chardev=qmp-event,mode=control"
        ));
        assert_eq!(line.qmp_sockets, [Path::new("/run/100.qmp")]);
        assert_eq!(line.sockets.len(), 2);
        let line = parse(&format!("{client} -mon chardev=qmp-event,mode=control"));
        assert!(line.qmp_sockets.is_empty());
        let by_id = format!("{server} -qmp unix:/run/other,server=off -qmp chardev:qmp");
        assert_eq!(parse(&by_id).qmp_sockets, [Path::new("/run/100.qmp")]);
    }

    #[test]
    fn monitors_are_tried_from_the_last_qmp_to_the_first_mon() {
        let line = parse(
            "-chardev socket,id=c,path=/c,server=on -chardev socket,id=d,path=/d,server=on \
             -mon d,mode=control -mon c,mode=control -qmp unix:/a,server -qmp unix:/b,server=on,wait=off",
        );
        assert_eq!(line.qmp_sockets, ["/b", "/a", "/c", "/d"].map(Path::new));
    }

    #[test]
    fn an_option_that_is_given_again_keeps_what_it_does_not_name() {
        let line = parse("-name web -name debug-threads=on -m 1G -m slots=2,maxmem=4G");
        assert_eq!(line.name.as_deref(), Some("web"));
        assert_eq!(line.memory_bytes, Some(1 << 30));
        assert_eq!(line.memory_max_bytes, Some(4 << 30));
        assert_eq!(line.backends[0].size_bytes, 1 << 30);
    }

    #[test]
    fn an_agents_socket_is_found_by_its_port() {
        let sockets = "-chardev socket,id=a,path=/a -chardev socket,path=/b,id=b";
        let line = parse(&format!(
            "{sockets} -device virtserialport,chardev=a,name=org.other -device \
             virtserialport,chardev=b,name=org.qemu.guest_agent.0"
        ));
        assert_eq!(line.agent_socket, Some("/b".into()));
        let device = r#"{"driver":"virtserialport","chardev":"a","name":"org.qemu.guest_agent.0"}"#;
        let line = parse(&format!("{sockets} -device {device}"));
        assert_eq!(line.agent_socket, Some("/a".into()));
        assert_eq!(parse(sockets).agent_socket, None);
    }

    #[test]
    fn a_repeated_key_has_its_last_value() {
        let line = parse("qemu -machine q35,accel=kvm,accel=tcg -m 1G,maxmem=2G,maxmem=4G");
        assert_eq!(line.accelerators, [Accelerator::Tcg]);
        assert_eq!(line.memory_max_bytes, Some(4 << 30));
    }

    #[test]
    fn a_vm_without_a_size_has_qemus_default() {
        let line = parse("qemu-system-x86_64 -nodefaults");
        assert_eq!(line.backends[0].size_bytes, 128 << 20);
    }

    #[test]
    fn sizes_are_read_as_qemu_reads_them() {
        let size = |text| parse_size(text, 1 << 20);
        assert_eq!(size("512"), Some(512 << 20));
        assert_eq!(size("512b"), Some(512));
        assert_eq!(size("2g"), Some(2 << 30));
        assert_eq!(size("0.5T"), Some(1 << 39));
        for wrong in ["", "G", "1x", "-1", "99999999P", "1e999", "nan"] {
            assert_eq!(size(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn no_line_makes_it_panic(
            arguments in prop::collection::vec(
                "-(m|name|object|machine|accel|qmp|mon|chardev|device)|[a-z=,.0-9{}\":]{0,30}|.{0,10}", 0..12,
            ),
        ) {
            let _ = CommandLine::parse(&arguments).ram().count();
        }

        #[test]
        fn no_file_makes_it_panic(
            lines in prop::collection::vec("\\[(machine|object|mon)( \"[^\"]{0,4})?\"?\\]?|[a-z= \"#,\\[\\]]{0,20}|.{0,10}", 0..12),
        ) {
            let arguments = arguments_of(&lines.join("\n"));
            let _ = CommandLine::parse(&arguments).ram().count();
        }
    }
}
