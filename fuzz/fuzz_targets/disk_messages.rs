//! A hostile frontend of a disk: any messages, with any files, and queues that it changes at will. Nothing panics, and what
//! is taken for a request is within the disk and within RAM.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| plimsoll_disk::fuzz_messages(bytes));
