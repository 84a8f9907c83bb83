//! Descriptor chains and request headers of arbitrary guest memory: a request is refused, or it is within the disk and
//! within RAM.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| plimsoll_disk::fuzz::request(bytes));
