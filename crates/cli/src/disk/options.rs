//! A disk as it is written on a command line: `IMAGE[,option[=value]]...`, with `,,` for a comma.

use std::path::PathBuf;
use std::str::FromStr;

use plimsoll_disk::Direct;
use plimsoll_vm::comma_words;

/// Bytes of a serial number (virtio 1.2 §5.2.6.4).
const SERIAL_BYTES_MAX: usize = 20;

/// A disk and how it is to be served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskSpec {
    /// Raw image or block device.
    pub image: PathBuf,
    /// Socket to serve it at.
    pub socket: Option<PathBuf>,
    /// Whether guests cannot write it.
    pub read_only: bool,
    /// What the guest sees as its serial number.
    pub serial: Option<String>,
    /// Most queues a guest may use.
    pub queues: Option<u16>,
    /// Whether the host's page cache is passed by.
    pub direct: Direct,
}

impl DiskSpec {
    /// The image with nothing else said.
    #[must_use]
    pub fn new(image: PathBuf) -> Self {
        Self {
            image,
            socket: None,
            read_only: false,
            serial: None,
            queues: None,
            direct: Direct::Auto,
        }
    }

    /// The same as it is written, served at `socket`.
    #[must_use]
    pub fn at(&self, socket: &str) -> String {
        let mut text = format!(
            "{},socket={}",
            escaped(&self.image.to_string_lossy()),
            escaped(socket)
        );
        if self.read_only {
            text += ",read-only";
        }
        if let Some(serial) = &self.serial {
            text += &format!(",serial={}", escaped(serial));
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
                        "'{word}' is no option of a disk: there are socket=PATH, read-only, \
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

/// A text as one word: commas doubled.
#[must_use]
pub fn escaped(text: &str) -> String {
    text.replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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
            ("a,", "'' is no option of a disk"),
            ("a,cache=on", "'cache=on' is no option of a disk"),
            ("a,read-only=yes", "is no option"),
            ("a,socket=", "is no option"),
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
