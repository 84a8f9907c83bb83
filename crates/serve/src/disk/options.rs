//! A VM's disks on the command line: `IMAGE[,option[=value]]...` for each, with `,,` for a
//! comma, and one cache.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use plimsoll_disk::{CacheMode, Direct, EngineOptions, PAGE_BYTES, WriteErrorAction, WriteMode};
use plimsoll_flow::PageCount;
use plimsoll_hcache::StoreOptions;
use plimsoll_output::bail_usage;
use plimsoll_protocol::size::{ByteSize, Interval, Rate};
use plimsoll_vm::{comma_words, escape_commas};

use crate::host_memory::{check_sizes, host_memory};

/// How far a cache can be resized by default.
const CACHE_MAX: ByteSize = ByteSize(4 << 30);

/// Bytes of a serial number (virtio 1.2 §5.2.6.4).
const SERIAL_BYTES_MAX: usize = 20;

/// A disk to serve.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DiskSpec {
    /// Raw image or block device.
    pub image: PathBuf,
    /// Socket to serve it at.
    pub socket: Option<PathBuf>,
    /// Whether guests are refused to write it.
    pub read_only: bool,
    /// Serial number that the guest reads.
    pub serial: Option<String>,
    /// Queues that a guest may use, at most.
    pub queues: Option<u16>,
    /// Whether I/O bypasses the host's page cache.
    pub direct: Direct,
}

impl DiskSpec {
    /// The image with default options.
    pub fn new(image: PathBuf) -> Self {
        Self {
            image,
            ..Self::default()
        }
    }

    /// The disk as `--disk` reads it, served at `socket`.
    pub fn at(&self, socket: &str) -> String {
        let mut text = format!(
            "{},socket={}",
            escape_commas(&self.image.to_string_lossy()),
            escape_commas(socket)
        );
        if self.read_only {
            text += ",read-only";
        }
        if let Some(serial) = &self.serial {
            text += &format!(",serial={}", escape_commas(serial));
        }
        if let Some(queues) = self.queues {
            text += &format!(",queues={queues}");
        }
        text += match self.direct {
            Direct::Auto => "",
            Direct::On => ",direct=on",
            Direct::Off => ",direct=off",
        };
        text
    }
}

impl FromStr for DiskSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut words = comma_words(text).into_iter();
        let image = words.next().filter(|image| !image.is_empty());
        let mut disk = Self::new(image.ok_or("it names no image")?.into());
        for word in words {
            let (key, value) = match word.split_once('=') {
                Some((key, value)) => (key, Some(value)),
                None => (&*word, None),
            };
            match (key, value) {
                ("read-only", None | Some("on")) => disk.read_only = true,
                ("read-only", Some("off")) => disk.read_only = false,
                ("socket", Some(path)) if !path.is_empty() => disk.socket = Some(path.into()),
                ("serial", Some(serial)) => disk.serial = Some(checked_serial(serial)?),
                ("queues", Some(queues)) => {
                    let queues = queues
                        .parse()
                        .ok()
                        .filter(|queues| (1..=64).contains(queues));
                    disk.queues = Some(queues.ok_or("queues= takes 1 to 64")?);
                }
                ("direct", Some("auto")) => disk.direct = Direct::Auto,
                ("direct", Some("on")) => disk.direct = Direct::On,
                ("direct", Some("off")) => disk.direct = Direct::Off,
                ("direct", _) => return Err("direct= takes auto, on or off".into()),
                _ => {
                    return Err(format!(
                        "'{word}' is not an option of a disk; the options are socket=PATH, read-only, \
                         serial=TEXT, queues=N and direct=auto|on|off (',,' is a comma in a name)"
                    ));
                }
            }
        }
        Ok(disk)
    }
}

fn checked_serial(serial: &str) -> Result<String, String> {
    let fits = (1..=SERIAL_BYTES_MAX).contains(&serial.len());
    if fits && serial.bytes().all(|byte| byte.is_ascii_graphic()) {
        Ok(serial.to_owned())
    } else {
        Err("serial= takes 1 to 20 printable ASCII characters without spaces".into())
    }
}

/// The cache under a VM's disks, and what uses its events.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CacheArgs {
    /// Memory of the cache, including its metadata [default: 64MiB]
    #[arg(long, value_name = "SIZE")]
    pub cache: Option<ByteSize>,
    /// Largest size that `disk resize` can set [default: 4GiB, or --cache if that is larger]
    #[arg(long, value_name = "SIZE")]
    pub cache_max: Option<ByteSize>,
    /// How pages come into the cache [default: exclusive]
    #[arg(long, value_enum, value_name = "MODE")]
    pub cache_mode: Option<Mode>,
    /// When writes reach storage [default: through]
    #[arg(long, value_enum, value_name = "WHEN")]
    pub write: Option<WriteWhen>,
    /// With --write delayed: size of the log of delayed writes, as a share of the cache, and beside it [default: 25%]
    #[arg(long, value_name = "RATE")]
    pub dirty: Option<Rate>,
    /// With --write delayed: how long a page may stay dirty [default: 30s]
    #[arg(long, value_name = "TIME")]
    pub dirty_age: Option<Interval>,
    /// What to do when storage refuses a write [default: report]
    #[arg(long, value_enum, value_name = "WHAT")]
    pub write_error: Option<WriteError>,
    /// QMP socket of the VM, to pause it for --write-error; repeatable: the first that no other client holds is used [default of `run`: those of QEMU's -qmp and -mon]
    #[arg(long = "monitor", value_name = "SOCKET")]
    pub monitors: Vec<PathBuf>,
    /// Directory on tmpfs where delayed writes survive the daemon [default: /run/plimsoll/NAME]
    #[arg(long, value_name = "DIRECTORY")]
    pub state: Option<PathBuf>,
    /// How far the miss-ratio curve extends beyond the cache; 0 for no curve [default: 256MiB]
    #[arg(long, value_name = "SIZE")]
    pub ghost: Option<ByteSize>,
    /// Socket of the hcache server behind the guest's device-mapper target
    #[arg(long, value_name = "SOCKET")]
    pub hcache: Option<PathBuf>,
    /// Record the blocks that the guest reads because they are not in its memory, as a trace for `plimsoll mrc`
    #[arg(long, value_name = "TRACE")]
    pub record: Option<PathBuf>,
    /// Experiment: admit pages without comparing their contents; the cache then serves wrong data
    #[cfg(feature = "ablation")]
    #[arg(long, hide = true)]
    pub no_hash_check: bool,
    /// Experiment: admit pages that are not the newest of their location; the cache then serves wrong data
    #[cfg(feature = "ablation")]
    #[arg(long, hide = true)]
    pub no_newest_check: bool,
    /// Compare each page served from the cache with storage, which costs a read
    #[arg(long, hide = true)]
    pub verify: bool,
}

/// How pages come into the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// From guest memory, as the guest evicts them
    Exclusive,
    /// Read again from storage when the guest evicts them; for comparison
    FromStorage,
    /// No cache
    None,
}

/// When writes reach storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WriteWhen {
    /// Before they complete
    Through,
    /// At a flush, when too much is dirty, or after a while
    Delayed,
}

/// What is done when storage refuses a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WriteError {
    /// The guest gets an error
    Report,
    /// The VM is paused while there is no space; the guest gets other errors
    Enospc,
    /// The VM is paused until the write succeeds
    Stop,
}

impl CacheArgs {
    #[cfg(feature = "ablation")]
    fn leaves_out(&self) -> [(&'static str, bool); 2] {
        [
            ("--no-hash-check", self.no_hash_check),
            ("--no-newest-check", self.no_newest_check),
        ]
    }

    #[cfg(not(feature = "ablation"))]
    fn leaves_out(&self) -> [(&'static str, bool); 2] {
        [("--no-hash-check", false), ("--no-newest-check", false)]
    }

    fn mode(&self) -> CacheMode {
        match self.cache_mode {
            None | Some(Mode::Exclusive) => CacheMode::Exclusive,
            Some(Mode::FromStorage) => CacheMode::FromStorage,
            Some(Mode::None) => CacheMode::None,
        }
    }

    pub(super) fn delayed(&self) -> bool {
        self.write == Some(WriteWhen::Delayed)
    }

    pub(crate) fn write_error(&self) -> WriteError {
        self.write_error.unwrap_or(WriteError::Report)
    }

    /// Checks that a VM that is to be paused can be.
    pub(crate) fn check_monitor(&self) -> anyhow::Result<()> {
        if self.write_error() != WriteError::Report && self.monitors.is_empty() {
            bail_usage!(
                "--write-error pauses the VM by its monitor: name its QMP socket with --monitor"
            );
        }
        Ok(())
    }

    fn cache(&self) -> ByteSize {
        self.cache.unwrap_or(ByteSize(64 << 20))
    }

    pub(super) fn ghost(&self) -> PageCount {
        let bytes = self.ghost.map_or(256 << 20, |size| size.0);
        PageCount(bytes / PAGE_BYTES as u64)
    }

    /// Checks the options, and returns those of the engine.
    ///
    /// # Errors
    ///
    /// [`UsageError`](plimsoll_output::exit::UsageError) for options that contradict each other or are out of
    /// range; or that this machine's memory is unknown.
    pub fn engine(&self) -> anyhow::Result<EngineOptions> {
        let mode = self.mode();
        if mode == CacheMode::None {
            if let Some(cache) = self.cache {
                bail_usage!("--cache {cache} contradicts --cache-mode none");
            }
            if self.delayed() {
                bail_usage!(
                    "--write delayed needs a cache to keep the writes in: not --cache-mode none"
                );
            }
        }
        if !self.delayed() {
            let dirty = self.dirty.map(|_| "--dirty");
            if let Some(option) = dirty.or(self.dirty_age.map(|_| "--dirty-age")) {
                bail_usage!("{option} goes with --write delayed: without it nothing is dirty");
            }
        }
        let (cache, min) = (self.cache(), ByteSize(StoreOptions::MIN_CAPACITY_BYTES));
        if cache < min {
            bail_usage!("--cache {cache}: the minimum is {min}");
        }
        let max = match self.cache_max {
            Some(max) => max,
            None => cache.max(CACHE_MAX.min(host_memory()?)),
        };
        if max < cache {
            bail_usage!("--cache-max {max} is less than --cache {cache}");
        }
        check_sizes([("--cache", cache), ("--cache-max", max)])?;
        let [(_, no_hash_check), (_, no_newest_check)] = self.leaves_out();
        let dirty = self.dirty.map_or(0.25, Rate::get);
        let cache_pages = PageCount(cache.0 / PAGE_BYTES as u64);
        Ok(EngineOptions {
            mode,
            cache_bytes: cache.0,
            cache_bytes_max: max.0,
            write: if self.delayed() {
                WriteMode::Delayed
            } else {
                WriteMode::Through
            },
            dirty_pages_max: cache_pages.scaled(dirty).0.max(1),
            dirty_age_max: self
                .dirty_age
                .map_or(Duration::from_secs(30), Interval::get),
            write_error: match self.write_error() {
                WriteError::Report => WriteErrorAction::Report,
                WriteError::Enospc => WriteErrorAction::NoSpace,
                WriteError::Stop => WriteErrorAction::Stop,
            },
            hash_check: !no_hash_check,
            newest_check: !no_newest_check,
            verify: self.verify,
        })
    }

    /// The options as arguments, for another program of this kind.
    pub fn arguments(&self) -> Vec<OsString> {
        let mut arguments = Vec::new();
        let mut add = |option: &str, value: Option<OsString>| {
            if let Some(value) = value {
                arguments.extend([option.into(), value]);
            }
        };
        let value = |value: &dyn ToString| Some(value.to_string().into());
        add("--cache", self.cache.and_then(|v| value(&v)));
        add("--cache-max", self.cache_max.and_then(|v| value(&v)));
        let possible = |v: clap::builder::PossibleValue| v.get_name().to_owned().into();
        let mode = self.cache_mode.and_then(|v| v.to_possible_value());
        add("--cache-mode", mode.map(possible));
        let write = self.write.and_then(|v| v.to_possible_value());
        add("--write", write.map(possible));
        add("--dirty", self.dirty.and_then(|v| value(&v)));
        add("--dirty-age", self.dirty_age.and_then(|v| value(&v)));
        let write_error = self.write_error.and_then(|v| v.to_possible_value());
        add("--write-error", write_error.map(possible));
        for monitor in &self.monitors {
            add("--monitor", Some(monitor.into()));
        }
        add("--state", self.state.clone().map(Into::into));
        add("--ghost", self.ghost.and_then(|v| value(&v)));
        add("--hcache", self.hcache.clone().map(Into::into));
        add("--record", self.record.clone().map(Into::into));
        for (option, set) in self
            .leaves_out()
            .into_iter()
            .chain([("--verify", self.verify)])
        {
            arguments.extend(set.then(|| option.into()));
        }
        arguments
    }
}

/// Checks the name of a VM.
///
/// # Errors
///
/// The rule that names follow.
pub fn name(text: &str) -> Result<String, String> {
    let allowed = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    let fits = (1..=48).contains(&text.len()) && !text.starts_with(['.', '-']);
    if fits && text.chars().all(allowed) {
        Ok(text.to_owned())
    } else {
        Err(
            "a name has 1 to 48 ASCII letters, digits, '-', '_' and '.', and does not begin with '.' or '-'"
                .into(),
        )
    }
}

/// The default name of a VM: that of its first image, without what names cannot have.
pub fn name_of(image: Option<&Path>) -> String {
    let stem = image.and_then(Path::file_stem);
    name_from(&stem.unwrap_or_default().to_string_lossy())
}

/// A text as a name, with '-' for each character that names cannot have, without those at its beginning.
pub fn name_from(text: &str) -> String {
    let made: String = text
        .chars()
        .take(48)
        .map(|character| {
            if name(&format!("x{character}")).is_ok() {
                character
            } else {
                '-'
            }
        })
        .collect();
    name(made.trim_start_matches('-')).unwrap_or_else(|_| "vm".to_owned())
}

/// Refuses an image that is given twice, unless it is only read, and one that is also the trace to be recorded, which would replace it.
///
/// # Errors
///
/// A [`UsageError`](plimsoll_output::exit::UsageError) that names it.
pub fn check_distinct(disks: &[DiskSpec], record: Option<&Path>) -> anyhow::Result<()> {
    let identity = |path: &Path| {
        let file = fs::metadata(path).ok()?;
        // A block device may have several nodes.
        Some(match file.file_type().is_block_device() {
            true => (None, file.rdev()),
            false => (Some(file.dev()), file.ino()),
        })
    };
    if let Some(trace) = record
        && let Some(file) = identity(trace)
        && let Some(disk) = disks
            .iter()
            .find(|disk| identity(&disk.image) == Some(file))
    {
        bail_usage!(
            "--record {}: it is the image {}, which the trace would replace",
            trace.display(),
            disk.image.display()
        );
    }
    for (number, disk) in disks.iter().enumerate() {
        let same = |other: &&DiskSpec| {
            identity(&disk.image).is_some_and(|file| identity(&other.image) == Some(file))
                && !(disk.read_only && other.read_only)
        };
        if let Some(other) = disks[..number].iter().find(same) {
            if other.image == disk.image {
                bail_usage!("--disk: image {} is given twice", disk.image.display());
            }
            bail_usage!(
                "--disk: {} and {} are the same image, which is given twice",
                other.image.display(),
                disk.image.display()
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use proptest::prelude::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        cache: CacheArgs,
    }

    fn parsed(arguments: Vec<OsString>) -> CacheArgs {
        let line = std::iter::once("x".into()).chain(arguments);
        Line::try_parse_from(line).unwrap().cache
    }

    #[test]
    fn a_disk_is_read_as_documented() {
        let text = "/a,,b.raw,socket=/run/x.sock,read-only,serial=web-1,queues=4,direct=off";
        let disk: DiskSpec = text.parse().unwrap();
        assert_eq!(
            disk,
            DiskSpec {
                image: "/a,b.raw".into(),
                socket: Some("/run/x.sock".into()),
                read_only: true,
                serial: Some("web-1".into()),
                queues: Some(4),
                direct: Direct::Off,
            }
        );
        assert_eq!(disk.at("/run/x.sock"), text);
        let plain = DiskSpec::new("a.raw".into());
        assert_eq!("a.raw,direct=auto,read-only=off".parse(), Ok(plain));
    }

    #[test]
    fn what_is_no_disk_is_refused_with_the_reason() {
        for (text, reason) in [
            ("", "names no image"),
            (",socket=a", "names no image"),
            ("a,", "'' is not an option of a disk"),
            ("a,cache=on", "'cache=on' is not an option of a disk"),
            ("a,read-only=yes", "is not an option"),
            ("a,socket=", "is not an option"),
            ("a,queues=0", "1 to 64"),
            ("a,queues=65", "1 to 64"),
            ("a,queues=many", "1 to 64"),
            ("a,direct=maybe", "auto, on or off"),
            ("a,direct", "auto, on or off"),
            ("a,serial=", "1 to 20"),
            ("a,serial=123456789012345678901", "1 to 20"),
            ("a,serial=a b", "1 to 20"),
        ] {
            let error = text.parse::<DiskSpec>().unwrap_err();
            assert!(error.contains(reason), "{text}: {error}");
        }
    }

    #[test]
    fn arguments_made_from_options_are_read_as_the_same_options() {
        let line = "--cache 96M --cache-max 1G --cache-mode from-storage --write delayed --dirty 1/3 \
                    --dirty-age 1500ms --write-error enospc --monitor /m --monitor /n --state /s --ghost 0 --hcache /h --record /r --verify";
        let given = parsed(line.split_whitespace().map(Into::into).collect());
        let again = parsed(given.arguments());
        assert_eq!(format!("{given:?}"), format!("{again:?}"));
        assert!(again.verify);
        assert_eq!(again.dirty_age.unwrap().get(), Duration::from_millis(1500));
        assert_eq!(CacheArgs::default().arguments(), [""; 0]);
    }

    #[test]
    fn a_vm_is_called_after_its_first_image() {
        let of = |image: &str| name_of(Some(Path::new(image)));
        assert_eq!(of("/srv/web-1.raw"), "web-1");
        assert_eq!(of("/dev/vg0/data"), "data");
        assert_eq!(of("my image (old).img"), "my-image--old-");
        assert_eq!(of("…"), "vm");
        assert_eq!(of("(backup).raw"), "backup-");
        assert_eq!(of(".hidden"), "vm");
        assert_eq!(name_of(None), "vm");
        for wrong in ["", ".x", "-x", "a/b", "a b", &"x".repeat(49)] {
            assert!(name(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn an_image_is_not_also_the_trace() {
        let folder = tempfile::tempdir().unwrap();
        let image = folder.path().join("a.raw");
        let link = folder.path().join("link");
        let trace = folder.path().join("trace");
        fs::write(&image, "Z").unwrap();
        std::os::unix::fs::symlink(&image, &link).unwrap();
        let disks = [DiskSpec::new(image.clone())];
        for same in [&image, &link] {
            let error = check_distinct(&disks, Some(same)).unwrap_err().to_string();
            assert!(error.contains("which the trace would replace"), "{error}");
        }
        check_distinct(&disks, Some(&trace)).unwrap();
        fs::write(&trace, "an earlier one").unwrap();
        check_distinct(&disks, Some(&trace)).unwrap();
    }

    #[cfg(feature = "ablation")]
    #[test]
    fn rules_of_admission_are_left_out_only_with_the_feature() {
        let given = ["--no-hash-check", "--no-newest-check"];
        let args = parsed(given.map(Into::into).to_vec());
        assert_eq!(args.arguments(), given);
        let engine = args.engine().unwrap();
        assert!(!engine.hash_check && !engine.newest_check);
    }

    #[cfg(not(feature = "ablation"))]
    #[test]
    fn no_rule_of_admission_can_be_left_out() {
        for option in ["--no-hash-check", "--no-newest-check"] {
            assert!(Line::try_parse_from(["x", option]).is_err());
        }
        let engine = CacheArgs::default().engine().unwrap();
        assert!(engine.hash_check && engine.newest_check);
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(
            image in "[a-z,=/]{1,9}",
            socket in "[a-z,=/]{1,9}",
            queues in 1_u16..=64,
        ) {
            let mut disk = DiskSpec::new(image.into());
            disk.queues = Some(queues);
            let read: DiskSpec = disk.at(&socket).parse().unwrap();
            disk.socket = Some(socket.into());
            prop_assert_eq!(read, disk);
        }
    }
}
