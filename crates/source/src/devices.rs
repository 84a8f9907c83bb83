//! Devices, tenants and clients by number, in the order of their first occurrence in a trace.

use std::collections::HashMap;

use foldhash::fast::RandomState;

/// Bits of the number of a device.
pub(crate) const DEVICE_BITS: u32 = 16;

/// Maximum number of devices in a trace: as many as these bits can number.
pub(crate) const DEVICES_MAX: usize = 1 << DEVICE_BITS;

/// Maximum length of a device's name in bytes.
const DEVICE_BYTES_MAX: usize = 128;

/// A name of less than 8 bytes, after its length: compared and hashed in a register, because each line of a trace looks one up.
type ShortName = u64;

fn short_name(device: &[u8]) -> Option<ShortName> {
    let join = |name: ShortName, &byte: &u8| name << 8 | ShortName::from(byte);
    let is_short = device.len() < size_of::<ShortName>();
    is_short.then(|| device.iter().fold(device.len() as ShortName, join))
}

/// Numbers devices, and selects one of them.
#[derive(Default)]
pub(crate) struct Devices {
    /// The only device that counts.
    only: Option<Vec<u8>>,
    /// Whether it has occurred.
    only_occurred: bool,
    /// By number.
    names: Vec<Vec<u8>>,
    short: HashMap<ShortName, u32, RandomState>,
    long: HashMap<Vec<u8>, u32, RandomState>,
    /// The last device with a short name, and its number.
    last: Option<(ShortName, u32)>,
}

impl Devices {
    pub(crate) fn new(only: Option<&str>) -> Self {
        Self {
            only: only.map(|device| device.as_bytes().to_vec()),
            ..Self::default()
        }
    }

    /// Names of the devices so far, by number.
    pub(crate) fn names(&self) -> Vec<String> {
        let names = match &self.only {
            Some(only) if self.only_occurred => std::slice::from_ref(only),
            _ => &self.names,
        };
        let name = |device: &Vec<u8>| String::from_utf8_lossy(device).into_owned();
        names.iter().map(name).collect()
    }

    /// Returns the number of a device, or `None` if its requests do not count.
    pub(crate) fn number_of(&mut self, device: &[u8]) -> Result<Option<u32>, String> {
        if let Some(only) = &self.only {
            let is_only = only == device;
            self.only_occurred |= is_only;
            return Ok(is_only.then_some(0));
        }
        let Some(name) = short_name(device) else {
            let number = match self.long.get(device) {
                Some(&number) => number,
                None => {
                    let number = self.add(device)?;
                    self.long.insert(device.to_vec(), number);
                    number
                }
            };
            return Ok(Some(number));
        };
        if let Some((last, number)) = self.last
            && last == name
        {
            return Ok(Some(number));
        }
        let number = match self.short.get(&name) {
            Some(&number) => number,
            None => {
                let number = self.add(device)?;
                self.short.insert(name, number);
                number
            }
        };
        self.last = Some((name, number));
        Ok(Some(number))
    }

    fn add(&mut self, device: &[u8]) -> Result<u32, String> {
        if device.len() > DEVICE_BYTES_MAX {
            return Err(format!(
                "the name of a device to have at most {DEVICE_BYTES_MAX} bytes"
            ));
        }
        let number = self.names.len();
        if number >= DEVICES_MAX {
            return Err(format!(
                "at most {DEVICES_MAX} devices; read the trace for one of them"
            ));
        }
        let number = u32::try_from(number).expect("at most DEVICES_MAX");
        self.names.push(device.to_vec());
        Ok(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn names_are_numbered_in_the_order_of_their_first_occurrence(
            names in prop::collection::vec(prop::collection::vec(0_u8..3, 0..20), 1..200),
        ) {
            let mut devices = Devices::new(None);
            let mut expected: Vec<Vec<u8>> = Vec::new();
            for name in names {
                let at = expected.iter().position(|known| *known == name);
                let at = at.unwrap_or_else(|| {
                    expected.push(name.clone());
                    expected.len() - 1
                });
                let at = u32::try_from(at).unwrap();
                prop_assert_eq!(devices.number_of(&name), Ok(Some(at)));
            }
            let expected: Vec<_> = expected.into_iter().map(|name| String::from_utf8(name).unwrap()).collect();
            prop_assert_eq!(devices.names(), expected);
        }
    }
}
