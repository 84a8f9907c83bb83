//! Hostile and ordinary rings, and requests in them.

use std::fs::File;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

use super::request::{IOERR, ParsedRequest, UNSUPP};
use super::*;
use crate::{ByteRange, GuestData as _, Operation, RamRegion, Segment};

const TABLE: u64 = 0;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const INDIRECT: u64 = 0x3000;
const HEADER: u64 = 0x4000;
const STATUS: u64 = 0x5000;
const DATA: u64 = 0x8000;
const RAM_BYTES: u64 = 0x40000;
const PLACES: RingPlaces = RingPlaces {
    table: TABLE,
    available: AVAILABLE,
    used: USED,
};

// The bits of a descriptor's flags, a field of 16.
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const NESTED: u16 = 4;

fn ram() -> Arc<GuestRam> {
    let file = rustix::fs::memfd_create("ram", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let file = File::from(file);
    file.set_len(RAM_BYTES).expect("its length");
    let file = Arc::new(file);
    let region = RamRegion {
        address: 0,
        bytes: RAM_BYTES,
        file,
        offset: 0,
    };
    Arc::new(GuestRam::new(vec![region]).expect("RAM"))
}

fn describe(
    ram: &GuestRam,
    table: u64,
    index: u64,
    address: u64,
    bytes: u32,
    flags: u16,
    next: u16,
) {
    let mut descriptor = [0; 16];
    descriptor[..8].copy_from_slice(&address.to_le_bytes());
    descriptor[8..12].copy_from_slice(&bytes.to_le_bytes());
    descriptor[12..14].copy_from_slice(&flags.to_le_bytes());
    descriptor[14..].copy_from_slice(&next.to_le_bytes());
    ram.write(table + 16 * index, &descriptor).expect("in RAM");
}

fn header(ram: &GuestRam, kind: u32, sector: u64) {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&sector.to_le_bytes());
    ram.write(HEADER, &header).expect("in RAM");
}

fn shape() -> Shape {
    Shape {
        size_bytes: 1 << 20,
        block_bytes: 512,
        read_only: false,
        plain: false,
        durable: true,
    }
}

fn piece(address: u64, bytes: u32, writable: bool) -> Piece {
    Piece {
        address,
        bytes,
        writable,
    }
}

fn parse(ram: &GuestRam, pieces: &[Piece], shape: &Shape) -> Result<ParsedRequest, Refusal> {
    let parsed = parse_request(ram, pieces, shape);
    if let Ok(wanted) = &parsed {
        wanted.check(ram, shape);
    }
    parsed
}

const BAD: Refusal = Refusal {
    status: Some(STATUS),
    answer: IOERR,
};
const UNSUPPORTED: Refusal = Refusal {
    status: Some(STATUS),
    answer: UNSUPP,
};

#[test]
fn a_request_may_be_cut_anywhere() {
    let ram = ram();
    header(&ram, VIRTIO_BLK_T_IN, 8);
    let segment = |address, bytes| Segment { address, bytes };
    let read = |segments, data_bytes| {
        let kind = RequestKind::Disk(Operation::Read {
            offset: 4096,
            segments,
        });
        Ok(ParsedRequest {
            kind,
            status: STATUS,
            data_bytes,
            written: data_bytes + 1,
        })
    };
    let plain = [
        piece(HEADER, 16, false),
        piece(DATA, 1024, true),
        piece(STATUS, 1, true),
    ];
    assert_eq!(
        parse(&ram, &plain, &shape()),
        read(vec![segment(DATA, 1024)], 1024)
    );
    let cut = [
        piece(HEADER, 3, false),
        piece(HEADER + 3, 13, false),
        piece(DATA, 1, true),
        piece(DATA + 0x1000, 510, true),
        piece(STATUS - 1, 2, true),
    ];
    let segments = vec![
        segment(DATA, 1),
        segment(DATA + 0x1000, 510),
        segment(STATUS - 1, 1),
    ];
    assert_eq!(parse(&ram, &cut, &shape()), read(segments, 512));

    header(&ram, VIRTIO_BLK_T_OUT, 8);
    ram.write(DATA, &ram_bytes(&ram, HEADER, 16))
        .expect("in RAM");
    let joined = [piece(DATA, 16 + 512, false), piece(STATUS, 1, true)];
    let operation = Operation::Write {
        offset: 4096,
        segments: vec![segment(DATA + 16, 512)],
        durable: true,
    };
    let wanted = ParsedRequest {
        kind: RequestKind::Disk(operation),
        status: STATUS,
        data_bytes: 512,
        written: 1,
    };
    assert_eq!(parse(&ram, &joined, &shape()), Ok(wanted));
}

fn ram_bytes(ram: &GuestRam, address: u64, bytes: usize) -> Vec<u8> {
    let mut read = vec![0; bytes];
    ram.read(address, &mut read).expect("in RAM");
    read
}

#[test]
fn requests_that_make_no_sense_are_refused() {
    let ram = ram();
    let (head, status) = (piece(HEADER, 16, false), piece(STATUS, 1, true));
    let transfer = |kind, sector, bytes, shape: &Shape| {
        header(&ram, kind, sector);
        let data = piece(DATA, bytes, kind == VIRTIO_BLK_T_IN);
        parse(&ram, &[head, data, status], shape)
    };
    // Beyond the end, across it, where sectors overflow, of no whole sector, of none.
    for (sector, bytes) in [
        (2048, 512),
        (2047, 1024),
        (1 << 55, 512),
        (u64::MAX, 512),
        (0, 511),
    ] {
        assert_eq!(
            transfer(VIRTIO_BLK_T_IN, sector, bytes, &shape()),
            Err(BAD),
            "{sector} {bytes}"
        );
        assert_eq!(
            transfer(VIRTIO_BLK_T_OUT, sector, bytes, &shape()),
            Err(BAD),
            "{sector} {bytes}"
        );
    }
    header(&ram, VIRTIO_BLK_T_IN, 0);
    assert_eq!(parse(&ram, &[head, status], &shape()), Err(BAD));
    // Data of the other direction.
    assert_eq!(
        parse(&ram, &[head, piece(DATA, 512, false), status], &shape()),
        Err(BAD)
    );
    header(&ram, VIRTIO_BLK_T_OUT, 0);
    assert_eq!(
        parse(&ram, &[head, piece(DATA, 512, true), status], &shape()),
        Err(BAD)
    );
    // Smaller than a block; a write to what cannot be written.
    let large = Shape {
        block_bytes: 4096,
        ..shape()
    };
    assert_eq!(transfer(VIRTIO_BLK_T_IN, 1, 4096, &large), Err(BAD));
    assert_eq!(transfer(VIRTIO_BLK_T_IN, 8, 512, &large), Err(BAD));
    assert!(transfer(VIRTIO_BLK_T_IN, 8, 4096, &large).is_ok());
    let read_only = Shape {
        read_only: true,
        ..shape()
    };
    assert_eq!(transfer(VIRTIO_BLK_T_OUT, 0, 512, &read_only), Err(BAD));
    // A short header; no status; data before the header's direction ends.
    assert_eq!(
        parse(&ram, &[piece(HEADER, 15, false), status], &shape()),
        Err(BAD)
    );
    assert_eq!(
        parse(&ram, &[head, piece(DATA, 512, false)], &shape()),
        Err(Refusal::UNANSWERABLE)
    );
    assert_eq!(
        parse(&ram, &[status, head], &shape()),
        Err(Refusal::UNANSWERABLE)
    );
    assert_eq!(parse(&ram, &[], &shape()), Err(Refusal::UNANSWERABLE));
    // Pieces outside RAM: a status, or anything else.
    for (address, bytes) in [
        (RAM_BYTES - 1, 2),
        (RAM_BYTES, 1),
        (u64::MAX, 2),
        (0, u32::MAX),
    ] {
        header(&ram, VIRTIO_BLK_T_IN, 0);
        let (nowhere, data) = (piece(address, bytes, true), piece(DATA, 512, true));
        let refused = parse(&ram, &[head, data, nowhere], &shape());
        assert_eq!(refused, Err(Refusal::UNANSWERABLE), "{address:#x}");
        assert_eq!(parse(&ram, &[head, nowhere, status], &shape()), Err(BAD));
        let nowhere = piece(address, bytes, false);
        assert_eq!(parse(&ram, &[nowhere, data, status], &shape()), Err(BAD));
    }
    // What is unknown, and what a control disk does not do.
    header(&ram, 99, 0);
    assert_eq!(parse(&ram, &[head, status], &shape()), Err(UNSUPPORTED));
    header(&ram, VIRTIO_BLK_T_DISCARD, 0);
    let plain = Shape {
        plain: true,
        ..shape()
    };
    assert_eq!(
        parse(&ram, &[head, piece(DATA, 16, false), status], &plain),
        Err(UNSUPPORTED)
    );
}

#[test]
fn ranges_are_held_against_the_disk_and_the_flags() {
    let ram = ram();
    let ranges = |kind, entries: &[(u64, u32, u32)]| {
        header(&ram, kind, 0);
        let mut bytes = Vec::new();
        for (sector, sectors, flags) in entries {
            bytes.extend(sector.to_le_bytes());
            bytes.extend(sectors.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
        }
        ram.write(DATA, &bytes).expect("in RAM");
        let data = piece(DATA, u32::try_from(bytes.len()).expect("short"), false);
        let pieces = [piece(HEADER, 16, false), data, piece(STATUS, 1, true)];
        parse(&ram, &pieces, &shape()).map(|wanted| wanted.kind)
    };
    let range = |offset, bytes| ByteRange { offset, bytes };
    let (discard, zeroes) = (VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_WRITE_ZEROES);
    let wanted = RequestKind::Disk(Operation::Discard(vec![range(512, 1024), range(0, 512)]));
    assert_eq!(
        ranges(discard, &[(1, 2, 0), (7, 0, 0), (0, 1, 0)]),
        Ok(wanted)
    );
    let zeroed = |unmap| {
        RequestKind::Disk(Operation::WriteZeroes {
            ranges: vec![range(0, 512)],
            unmap,
            durable: shape().durable,
        })
    };
    assert_eq!(ranges(zeroes, &[(0, 1, 1)]), Ok(zeroed(true)));
    assert_eq!(ranges(zeroes, &[(0, 1, 0)]), Ok(zeroed(false)));
    assert_eq!(ranges(zeroes, &[(0, 0, 1)]), Ok(RequestKind::Nothing));
    assert_eq!(ranges(discard, &[(0, 1, 1)]), Err(UNSUPPORTED));
    assert_eq!(ranges(zeroes, &[(0, 1, 2)]), Err(UNSUPPORTED));
    assert_eq!(ranges(discard, &[(2047, 2, 0)]), Err(BAD));
    assert_eq!(ranges(discard, &[(1 << 55, 1, 0)]), Err(BAD));
    assert_eq!(ranges(discard, &[(u64::MAX, u32::MAX, 0)]), Err(BAD));
    assert_eq!(ranges(discard, &[]), Err(BAD));
    assert_eq!(
        ranges(discard, &[(0, 1, 0); RANGES_MAX as usize + 1]),
        Err(BAD)
    );
    assert!(ranges(discard, &[(0, 1, 0); RANGES_MAX as usize]).is_ok());
}

#[test]
fn chains_that_make_no_sense_are_refused() {
    let ram = ram();
    let mut pieces = Vec::new();
    let mut walk = |head| chain(&ram, TABLE, 8, head, &mut pieces).map(|()| pieces.len());
    describe(&ram, TABLE, 0, DATA, 16, NEXT, 1);
    describe(&ram, TABLE, 1, DATA, 0, NEXT, 2);
    describe(&ram, TABLE, 2, DATA, 16, WRITE, 0);
    assert_eq!(walk(0), Ok(2));
    // Cycles, numbers beyond the table.
    describe(&ram, TABLE, 2, DATA, 16, NEXT, 0);
    assert_eq!(walk(0), Err(BadChain::Invalid));
    describe(&ram, TABLE, 2, DATA, 16, NEXT, 8);
    assert_eq!(walk(0), Err(BadChain::Invalid));
    assert_eq!(walk(8), Err(BadChain::Invalid));
    // Indirect tables: a good one, one in another, one with a successor, of odd size, empty, outside RAM.
    describe(&ram, TABLE, 2, INDIRECT, 32, NESTED, 0);
    describe(&ram, INDIRECT, 0, DATA, 16, NEXT, 1);
    describe(&ram, INDIRECT, 1, DATA, 16, WRITE, 0);
    assert_eq!(walk(0), Ok(3));
    describe(&ram, INDIRECT, 1, DATA, 16, NEXT, 2);
    assert_eq!(walk(0), Err(BadChain::Invalid));
    describe(&ram, INDIRECT, 1, INDIRECT, 16, NESTED, 0);
    assert_eq!(walk(0), Err(BadChain::Invalid));
    for (address, bytes, flags) in [
        (INDIRECT, 32, NESTED | NEXT),
        (INDIRECT, 31, NESTED),
        (INDIRECT, 0, NESTED),
        (RAM_BYTES - 8, 16, NESTED),
        (u64::MAX - 8, 16, NESTED),
    ] {
        describe(&ram, TABLE, 2, address, bytes, flags, 0);
        assert_eq!(walk(0), Err(BadChain::Invalid));
    }
}

fn offer(ram: &GuestRam, index: u16, heads: &[u16], size: u16) {
    for (at, head) in (index..).zip(heads) {
        let place = AVAILABLE + 4 + 2 * u64::from(at % size);
        ram.write(place, &head.to_le_bytes()).expect("in RAM");
    }
    let count = u16::try_from(heads.len()).expect("few");
    ram.write(AVAILABLE + 2, &index.wrapping_add(count).to_le_bytes())
        .expect("in RAM");
}

fn used(ram: &GuestRam) -> u16 {
    u16::from_le_bytes(ram_bytes(ram, USED + 2, 2).try_into().expect("2 bytes"))
}

#[test]
fn requests_are_taken_once_and_told_in_batches() {
    let ram = ram();
    let mut queue = Queue::start(Arc::clone(&ram), PLACES, 4, true, 0, None).expect("a queue");
    assert_eq!(queue.pop(), Ok(None));
    assert_eq!(queue.enable_notifications(), Ok(false));
    offer(&ram, 0, &[3, 1, 2], 4);
    assert_eq!(queue.enable_notifications(), Ok(true));
    for head in [3, 1, 2] {
        assert_eq!(queue.pop(), Ok(Some((head, false))));
    }
    assert_eq!(queue.pop(), Ok(None));
    queue.done(1, 7);
    queue.done(3, 1);
    // The driver requests a notification of the first one.
    assert_eq!(queue.publish(), Ok(true));
    assert_eq!(used(&ram), 2);
    let element: Vec<u8> = [1u32, 7]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .collect();
    assert_eq!(ram_bytes(&ram, USED + 4, 8), element);
    // And no other before it requests one.
    queue.done(2, 1);
    assert_eq!(queue.publish(), Ok(false));
    ram.write(AVAILABLE + 4 + 2 * 4, &3u16.to_le_bytes())
        .expect("in RAM");
    offer(&ram, 3, &[0], 4);
    assert_eq!(queue.pop(), Ok(Some((0, false))));
    queue.done(0, 1);
    assert_eq!(queue.publish(), Ok(true));
    assert_eq!((used(&ram), queue.next_available()), (4, 4));
}

#[test]
fn without_indices_flags_say_when_to_notify() {
    let ram = ram();
    let mut queue = Queue::start(Arc::clone(&ram), PLACES, 4, false, 0, None).expect("a queue");
    queue.disable_notifications().expect("in RAM");
    assert_eq!(ram_bytes(&ram, USED, 2), [1, 0]);
    offer(&ram, 0, &[0, 1], 4);
    queue.pop().expect("a request");
    queue.done(0, 1);
    assert_eq!(queue.publish(), Ok(true));
    ram.write(AVAILABLE, &[1, 0]).expect("in RAM");
    queue.pop().expect("a request");
    queue.done(1, 1);
    assert_eq!(queue.publish(), Ok(false));
    assert_eq!(queue.enable_notifications(), Ok(false));
    assert_eq!(ram_bytes(&ram, USED, 2), [0, 0]);
}

#[test]
fn a_ring_that_makes_no_sense_is_a_fault() {
    let ram = ram();
    let start =
        |places, size| Queue::start(Arc::clone(&ram), places, size, true, 0, None).map(drop);
    let odd = |table, available, used| RingPlaces {
        table,
        available,
        used,
    };
    assert_eq!(start(PLACES, 3), Err(QueueFault::Ring));
    assert_eq!(start(PLACES, 2048), Err(QueueFault::Ring));
    assert_eq!(start(odd(8, AVAILABLE, USED), 4), Err(QueueFault::Ring));
    assert_eq!(
        start(odd(TABLE, AVAILABLE + 1, USED), 4),
        Err(QueueFault::Ring)
    );
    assert_eq!(
        start(odd(TABLE, AVAILABLE, USED + 2), 4),
        Err(QueueFault::Ring)
    );
    assert_eq!(
        start(odd(TABLE, AVAILABLE, RAM_BYTES - 8), 4),
        Err(QueueFault::Ring)
    );
    assert_eq!(
        start(odd(u64::MAX - 15, AVAILABLE, USED), 4),
        Err(QueueFault::Ring)
    );

    let queue = || Queue::start(Arc::clone(&ram), PLACES, 4, true, 0, None).expect("a queue");
    offer(&ram, 5, &[], 4);
    assert_eq!(queue().pop(), Err(QueueFault::TooMany));
    offer(&ram, 0, &[4], 4);
    assert_eq!(queue().pop(), Err(QueueFault::Head));
    // More requests than descriptors, without waiting for any.
    let mut queue = queue();
    offer(&ram, 0, &[0, 1, 2, 3], 4);
    while queue.pop().expect("requests").is_some() {}
    offer(&ram, 4, &[0], 4);
    assert_eq!(queue.pop(), Err(QueueFault::TooMany));
}

#[test]
fn a_queue_takes_up_where_a_former_daemon_was_killed() {
    use crate::inflight::Inflight;
    let ram = ram();
    let file = Inflight::make(1, 4).expect("a memfd");
    let region = Inflight::map(file, 0, Inflight::bytes(1, 4), 1, 4).expect("a region");
    let part = || region.queue(0, 4);
    let start =
        |base| Queue::start(Arc::clone(&ram), PLACES, 4, true, base, part()).expect("a queue");
    let mut first = start(0);
    offer(&ram, 0, &[2, 0, 3], 4);
    for _ in 0..3 {
        first.pop().expect("a request");
    }
    first.done(0, 1);
    first.publish().expect("told");
    drop(first);
    // Heads 2 and 3 again, oldest first, then the requests after all three; the base given is ignored.
    let mut second = start(1);
    offer(&ram, 3, &[0], 4);
    assert_eq!(second.pop(), Ok(Some((2, true))));
    assert_eq!(second.pop(), Ok(Some((3, true))));
    assert_eq!(second.pop(), Ok(Some((0, false))));
    assert_eq!((second.pop(), used(&ram)), (Ok(None), 1));
}

proptest::proptest! {
    #[test]
    fn any_memory_gives_a_request_within_bounds_or_none(bytes in proptest::collection::vec(0u8.., 0..512)) {
        fuzz_request(&bytes);
    }
}
