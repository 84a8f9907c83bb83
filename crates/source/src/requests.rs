//! Block I/O requests as spans of pages; shared by all formats of block I/O.
//!
//! The page of byte `b` of a device is `device * 2^48 + b / page size`. Devices are
//! numbered from 0 in the order of their first occurrence in the trace, so pages of
//! different devices never overlap, and the pages of a trace of one device follow from
//! its offsets. If only one device of a trace is read, its number is 0. If devices are asked for as groups, the number
//! is the group instead, and the pages of every device follow from its offsets.
//!
//! A request that neither reads nor writes, or has no bytes, yields no reference and is counted.

use plimsoll_flow::{AccessKind, PageNumber, PageSize};

use crate::devices::{DEVICE_BITS, Devices};
use crate::spans::Span;
use crate::{Grouping, Options};

/// Bits of a page number that identify the page within its device.
const PAGE_BITS: u32 = u64::BITS - DEVICE_BITS;

/// Maximum length of a request in bytes: what 32 bits can represent, to bound the effect of one line.
pub(crate) const REQUEST_BYTES_MAX: u64 = u32::MAX as u64;

/// Bytes in a sector, the unit of block offsets.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// A request of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request<'a> {
    pub(crate) device: &'a [u8],
    /// `None` for a request that neither reads nor writes.
    pub(crate) kind: Option<AccessKind>,
    pub(crate) offset_bytes: u64,
    pub(crate) length_bytes: u64,
}

/// Converts requests to pages.
pub(crate) struct Requests {
    page_size: PageSize,
    devices: Devices,
    /// Whether the device is the group of a span instead of a part of its pages.
    by_device: bool,
    skipped: u64,
}

impl Requests {
    pub(crate) fn new(options: &Options) -> Self {
        Self {
            page_size: options.page_size,
            devices: Devices::new(options.device.as_deref()),
            by_device: options.groups == Some(Grouping::Device),
            skipped: 0,
        }
    }

    /// Number of requests that made no reference, excluding those of devices that are not selected.
    pub(crate) fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Names of the devices so far, by number.
    pub(crate) fn devices(&self) -> Vec<String> {
        self.devices.names()
    }

    /// Returns the pages of a request, or `None` if it touches none.
    ///
    /// # Errors
    ///
    /// A description of the expected value, if no device can have such a request.
    pub(crate) fn place(&mut self, request: Request) -> Result<Option<Span>, String> {
        let Some(device) = self.devices.number_of(request.device)? else {
            return Ok(None);
        };
        let (Some(kind), Some(more)) = (request.kind, request.length_bytes.checked_sub(1)) else {
            self.skipped += 1;
            return Ok(None);
        };
        let last = request.offset_bytes.checked_add(more);
        let span = last
            .filter(|_| more < REQUEST_BYTES_MAX)
            .map(|last| Span::of_bytes(kind, request.offset_bytes, last, self.page_size));
        let Some(span) = span.filter(|span| span.last.0 >> PAGE_BITS == 0) else {
            return Err(format!(
                "a request of at most {REQUEST_BYTES_MAX} bytes within the first 2^{PAGE_BITS} \
                 pages of its device"
            ));
        };
        if self.by_device {
            return Ok(Some(Span {
                group: device,
                ..span
            }));
        }
        let base = u64::from(device) << PAGE_BITS;
        Ok(Some(Span {
            next: PageNumber(base | span.next.0),
            last: PageNumber(base | span.last.0),
            ..span
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::DEVICES_MAX;

    fn request(device: &str, offset_bytes: u64, length_bytes: u64) -> Request<'_> {
        Request {
            device: device.as_bytes(),
            kind: Some(AccessKind::Read),
            offset_bytes,
            length_bytes,
        }
    }

    fn pages(requests: &mut Requests, request: Request) -> Option<(u64, u64)> {
        let span = requests.place(request).unwrap();
        span.map(|span| (span.next.0, span.last.0))
    }

    #[test]
    fn a_request_touches_the_pages_its_bytes_lie_in() {
        let mut requests = Requests::new(&Options::default());
        assert_eq!(pages(&mut requests, request("a", 0, 1)), Some((0, 0)));
        assert_eq!(pages(&mut requests, request("a", 4095, 2)), Some((0, 1)));
        assert_eq!(pages(&mut requests, request("a", 4096, 8192)), Some((1, 2)));
        assert_eq!(pages(&mut requests, request("a", 4096, 0)), None);
        let trim = Request {
            kind: None,
            ..request("a", 0, 4096)
        };
        assert_eq!(pages(&mut requests, trim), None);
        assert_eq!(requests.skipped(), 2);
    }

    #[test]
    fn pages_of_devices_never_meet() {
        let mut requests = Requests::new(&Options::default());
        let page = |number: u64| Some(((number << 48) + 7, (number << 48) + 7));
        for (device, number) in [("a", 0), ("", 1), ("a", 0), ("b", 2), ("b", 2), ("", 1)] {
            let placed = pages(&mut requests, request(device, 7 << 12, 9));
            assert_eq!(placed, page(number), "{device}");
        }
        let only_b = Options {
            device: Some("b".to_owned()),
            ..Options::default()
        };
        let mut only = Requests::new(&only_b);
        assert_eq!(pages(&mut only, request("a", 7 << 12, 9)), None);
        assert_eq!(pages(&mut only, request("b", 7 << 12, 9)), page(0));
        assert_eq!(only.skipped(), 0);
    }

    #[test]
    fn devices_as_groups_have_the_pages_that_each_has_alone() {
        let by_device = Options {
            groups: Some(Grouping::Device),
            ..Options::default()
        };
        let mut requests = Requests::new(&by_device);
        for (device, group) in [("a", 0), ("", 1), ("a", 0), ("b", 2)] {
            let span = requests.place(request(device, 7 << 12, 9)).unwrap();
            let span = span.unwrap();
            assert_eq!((span.next.0, span.last.0, span.group), (7, 7, group));
        }
        assert_eq!(requests.devices(), ["a", "", "b"]);
    }

    #[test]
    fn what_no_device_has_is_refused() {
        let mut requests = Requests::new(&Options::default());
        let last = (1 << 60) - 1;
        assert!(requests.place(request("a", last, 1)).is_ok());
        for wrong in [
            request("a", last, 2),
            request("a", u64::MAX, 2),
            request("a", 0, REQUEST_BYTES_MAX + 1),
            request(&"n".repeat(129), 0, 1),
        ] {
            assert!(requests.place(wrong).is_err(), "{wrong:?}");
        }
        let whole = request("a", 0, REQUEST_BYTES_MAX);
        assert_eq!(pages(&mut requests, whole), Some((0, (1 << 20) - 1)));
    }

    #[test]
    fn there_are_as_many_devices_as_numbers() {
        let mut requests = Requests::new(&Options::default());
        for device in 0..DEVICES_MAX {
            let name = device.to_string();
            let page = (device as u64) << 48;
            assert_eq!(
                pages(&mut requests, request(&name, 0, 1)),
                Some((page, page))
            );
        }
        let error = requests.place(request("one more", 0, 1)).unwrap_err();
        assert!(error.starts_with("at most 65536 devices"), "{error}");
    }
}
