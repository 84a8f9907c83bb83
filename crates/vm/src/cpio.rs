//! The initial file system of a workload guest: an archive of a program and of kernel modules.
//!
//! Linux unpacks the "newc" form of cpio: for each file a header of 110 ASCII bytes
//! (magic and thirteen numbers of eight hexadecimal digits), its name, its bytes, each
//! padded to four. Source: Linux, Documentation/driver-api/early-userspace/buffer-format.rst.
//! Devices are only described in it, so no privilege is needed.

/// A file of the archive.
struct File<'a> {
    name: &'a str,
    mode: u32,
    /// Major and minor number of a device.
    device: (u32, u32),
    bytes: &'a [u8],
}

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const REGULAR: u32 = 0o100_644;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Returns an uncompressed initrd that holds `init` as `/init`, `/dev/console`, and `modules`, by
/// name, in the folder `/modules` if there are any.
///
/// `None` if one has 4 GiB or more, which the format cannot say.
#[must_use]
pub fn initrd(init: &[u8], modules: &[(String, Vec<u8>)]) -> Option<Vec<u8>> {
    let mut files = vec![
        ("dev", DIRECTORY, (0, 0), &[][..]),
        ("dev/console", CHARACTER_DEVICE, (5, 1), &[]),
        ("proc", DIRECTORY, (0, 0), &[]),
        ("sys", DIRECTORY, (0, 0), &[]),
        ("init", PROGRAM, (0, 0), init),
    ];
    let modules: Vec<_> = modules
        .iter()
        .map(|(name, bytes)| (format!("modules/{name}"), bytes))
        .collect();
    if !modules.is_empty() {
        files.push(("modules", DIRECTORY, (0, 0), &[]));
    }
    for (name, bytes) in &modules {
        files.push((name, REGULAR, (0, 0), bytes));
    }
    files.push(("TRAILER!!!", 0, (0, 0), &[]));
    let mut archive = Vec::with_capacity(init.len() + 1024);
    for (inode, (name, mode, device, bytes)) in (1..).zip(files) {
        let file = File {
            name,
            mode,
            device,
            bytes,
        };
        append(&mut archive, inode, &file)?;
    }
    Some(archive)
}

fn append(archive: &mut Vec<u8>, inode: u32, file: &File) -> Option<()> {
    let links = if file.mode & 0o170_000 == 0o040_000 {
        2
    } else {
        1
    };
    let numbers = [
        inode,
        file.mode,
        0, // owner
        0, // group
        links,
        0, // time of change: none, so that equal programs make equal archives
        u32::try_from(file.bytes.len()).ok()?,
        0, // device the file lies on, major
        0, // and minor
        file.device.0,
        file.device.1,
        u32::try_from(file.name.len() + 1).ok()?,
        0, // checksum: unused in this form
    ];
    archive.extend(b"070701");
    for number in numbers {
        archive.extend(format!("{number:08x}").bytes());
    }
    archive.extend(file.name.bytes());
    archive.push(0);
    pad(archive);
    archive.extend(file.bytes);
    pad(archive);
    Some(())
}

fn pad(archive: &mut Vec<u8>) {
    archive.resize(archive.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Names, modes and contents, read as the format's description says; shares
    /// no code with the writer.
    fn unpack(archive: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let (mut files, mut at) = (Vec::new(), 0);
        loop {
            let header = std::str::from_utf8(&archive[at..at + 110]).unwrap();
            assert_eq!(&header[..6], "070701");
            let number = |nth: usize| u32::from_str_radix(&header[6 + 8 * nth..][..8], 16).unwrap();
            let (mode, bytes_len) = (number(1), number(6) as usize);
            let name_end = at + 110 + number(11) as usize;
            let name = String::from_utf8(archive[at + 110..name_end - 1].to_vec()).unwrap();
            assert_eq!(archive[name_end - 1], 0);
            let bytes_start = name_end.div_ceil(4) * 4;
            let bytes = archive[bytes_start..bytes_start + bytes_len].to_vec();
            at = (bytes_start + bytes_len).div_ceil(4) * 4;
            if name == "TRAILER!!!" {
                assert_eq!(at, archive.len());
                return files;
            }
            files.push((name, mode, bytes));
        }
    }

    #[test]
    fn the_first_header_is_the_known_one() {
        let archive = initrd(b"", &[]).unwrap();
        let expected = concat!(
            "070701",
            "00000001",
            "000041ed",
            "00000000",
            "00000000",
            "00000002",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000000",
            "00000004",
            "00000000",
            "dev\0\0\0"
        );
        assert_eq!(&archive[..expected.len()], expected.as_bytes());
    }

    proptest! {
        #[test]
        fn what_is_packed_is_unpacked(
            init in prop::collection::vec(any::<u8>(), 0..200),
            module in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let files = unpack(&initrd(&init, &[]).unwrap());
            let names: Vec<_> = files.iter().map(|(name, ..)| name.as_str()).collect();
            prop_assert_eq!(names, ["dev", "dev/console", "proc", "sys", "init"]);
            prop_assert_eq!(files[4].1, 0o100_755);
            prop_assert_eq!(&files[4].2, &init);
            let modules = [("a.ko".to_owned(), module.clone()), ("order".to_owned(), vec![7])];
            let more = unpack(&initrd(&init, &modules).unwrap());
            prop_assert_eq!(&more[..5], &files[..]);
            let names: Vec<_> = more[5..].iter().map(|(name, ..)| name.as_str()).collect();
            prop_assert_eq!(names, ["modules", "modules/a.ko", "modules/order"]);
            prop_assert_eq!(&more[6].2, &module);
        }
    }
}
