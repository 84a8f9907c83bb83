//! Devices, tenants and clients by number, in the order of their first occurrence in a trace.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};

use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Bits of the number of a device.
pub(crate) const DEVICE_BITS: u32 = 16;

/// Maximum number of devices in a trace: as many as these bits can number.
pub(crate) const DEVICES_MAX: usize = 1 << DEVICE_BITS;

/// Maximum length of a device's name in bytes.
const DEVICE_BYTES_MAX: usize = 128;

/// The hash of short names, with a random seed: each line of a trace looks one up, and the standard library's takes three times
/// as long.
#[derive(Debug, Clone, Copy)]
struct NameHash {
    seed: u64,
}

impl BuildHasher for NameHash {
    type Hasher = NameHasher;

    fn build_hasher(&self) -> NameHasher {
        NameHasher(self.seed)
    }
}

/// The hash so far.
struct NameHasher(u64);

impl Hasher for NameHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxh3_64_with_seed(bytes, self.0);
    }

    fn write_usize(&mut self, length: usize) {
        self.0 = self.0.wrapping_add(length as u64);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Numbers devices, and selects one of them.
pub(crate) struct Devices {
    /// The only device that counts.
    only: Option<Vec<u8>>,
    numbers: HashMap<Vec<u8>, u32, NameHash>,
    /// The last device and its number.
    last: (Vec<u8>, u32),
}

impl Devices {
    pub(crate) fn new(only: Option<&str>) -> Self {
        Self {
            only: only.map(|device| device.as_bytes().to_vec()),
            numbers: HashMap::with_hasher(NameHash {
                seed: RandomState::new().hash_one(0),
            }),
            last: (Vec::new(), 0),
        }
    }

    /// Names of the devices so far, by number.
    pub(crate) fn names(&self) -> Vec<String> {
        let name = |device: &[u8]| String::from_utf8_lossy(device).into_owned();
        if let Some(only) = &self.only {
            return vec![name(only)];
        }
        let mut devices: Vec<_> = self.numbers.iter().collect();
        devices.sort_unstable_by_key(|&(_, number)| number);
        devices.iter().map(|(device, _)| name(device)).collect()
    }

    /// Returns the number of a device, or `None` if its requests do not count.
    pub(crate) fn number_of(&mut self, device: &[u8]) -> Result<Option<u32>, String> {
        if let Some(only) = &self.only {
            return Ok((only == device).then_some(0));
        }
        // Lengths are compared first: formats with one device use an empty name, and comparing empty
        // slices by memcmp can cost 100 ns (a masked load from an invalid address).
        let alike =
            device.len() == self.last.0.len() && (device.is_empty() || device == self.last.0);
        if alike && !self.numbers.is_empty() {
            return Ok(Some(self.last.1));
        }
        let number = match self.numbers.get(device) {
            Some(&number) => number,
            None => self.add(device)?,
        };
        self.last.0.clear();
        self.last.0.extend_from_slice(device);
        self.last.1 = number;
        Ok(Some(number))
    }

    fn add(&mut self, device: &[u8]) -> Result<u32, String> {
        if device.len() > DEVICE_BYTES_MAX {
            return Err(format!(
                "the name of a device to have at most {DEVICE_BYTES_MAX} bytes"
            ));
        }
        let number = self.numbers.len();
        if number >= DEVICES_MAX {
            return Err(format!(
                "at most {DEVICES_MAX} devices; read the trace for one of them"
            ));
        }
        let number = u32::try_from(number).expect("at most DEVICES_MAX");
        self.numbers.insert(device.to_vec(), number);
        Ok(number)
    }
}
