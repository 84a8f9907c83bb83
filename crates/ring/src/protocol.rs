//! Constants and layouts of the socket's messages and of the ring, as documented in docs/hcache-protocol.md.
//!
//! Messages on the socket are little-endian. Words in the ring are in the order of the host, which must be
//! little-endian as well.

use crate::Refusal;

const _: () = assert!(cfg!(target_endian = "little") && size_of::<usize>() == 8);

/// Version of the protocol; a server supports only this one.
pub const VERSION: u32 = 1;

/// First word of a ring: `HCRG`.
pub const MAGIC: u32 = u32::from_le_bytes(*b"HCRG");

/// Bytes of a message's head: length of the payload and type, a word each.
pub const HEAD_BYTES: usize = 8;

/// Largest payload that a client may send, in bytes.
pub const REQUEST_BYTES_MAX: u32 = 4096;

/// Largest payload that a server may send, in bytes.
pub const REPLY_BYTES_MAX: u32 = 64 << 20;

/// Longest name of a client, in bytes.
pub const NAME_BYTES_MAX: usize = 64;

/// Types of messages; those of the server have the bit 0x80.
pub mod message {
    #![allow(missing_docs)]
    pub const HELLO: u32 = 0x01;
    pub const STATS: u32 = 0x02;
    pub const RESIZE: u32 = 0x03;
    pub const WELCOME: u32 = 0x81;
    pub const STATS_TEXT: u32 = 0x82;
    pub const RESIZED: u32 = 0x83;
    pub const REFUSED: u32 = 0x84;
}

/// Flag of [`Op::CreatePool`]: shared by its key, not private.
pub const CREATE_SHARED: u8 = 1;
/// Flag of [`Op::CreatePool`]: the pool has the capacity given.
pub const CREATE_CAPACITY: u8 = 2;

/// Operation of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs)]
pub enum Op {
    Nop = 0,
    Put = 1,
    Get = 2,
    Flush = 3,
    FlushRange = 4,
    FlushObject = 5,
    FlushPool = 6,
    CreatePool = 7,
    DestroyPool = 8,
}

impl Op {
    /// All, in the order of their numbers.
    pub const ALL: [Self; 9] = [
        Self::Nop,
        Self::Put,
        Self::Get,
        Self::Flush,
        Self::FlushRange,
        Self::FlushObject,
        Self::FlushPool,
        Self::CreatePool,
        Self::DestroyPool,
    ];
}

/// The result of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Status {
    /// Done; a get found its page.
    Ok = 0,
    /// A get found no page.
    Miss = 1,
    /// A put was not stored; no older page is left under the handle.
    Refused = 2,
    /// The entry was published before it was written.
    Torn = -1,
    /// No such operation.
    BadOp = -2,
    /// A flag the operation does not have, or a reserved field that is not zero.
    BadFlags = -3,
    /// A slot the ring does not have.
    BadSlot = -4,
    /// A range that ends before it begins.
    BadRange = -5,
    /// A pool that is not there, or not this client's.
    NoSuchPool = -6,
    /// No more pools for this client.
    TooManyPools = -7,
    /// The store failed in another way.
    Failed = -8,
}

impl Status {
    /// All statuses of invalid entries, from -1 down.
    pub const BAD: [Self; 8] = [
        Self::Torn,
        Self::BadOp,
        Self::BadFlags,
        Self::BadSlot,
        Self::BadRange,
        Self::NoSuchPool,
        Self::TooManyPools,
        Self::Failed,
    ];

    /// Returns the status with this number.
    pub fn from_number(number: i32) -> Option<Self> {
        let good = [Self::Ok, Self::Miss, Self::Refused];
        let mut all = good.into_iter().chain(Self::BAD);
        all.find(|status| *status as i32 == number)
    }
}

/// One entry of the submission ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Submission {
    /// Position of the entry plus one, wrapping: distinguishes a written entry from an older one at its position.
    pub sequence: u32,
    /// An [`Op`].
    pub op: u8,
    /// Flags of the operation.
    pub flags: u8,
    /// Zero.
    pub reserved: u16,
    /// The pool.
    pub pool: u32,
    /// Index of the page, or the first of a range.
    pub index: u32,
    /// The object.
    pub object: u64,
    /// Slot from which a page is put or into which it is got.
    pub slot: u32,
    /// Last index of a range.
    pub last: u32,
    /// Returned with the completion.
    pub user_data: u64,
    /// Maximum number of pages of a new pool.
    pub capacity_pages: u64,
    /// Key of a shared pool.
    pub key: u128,
}

/// Number of words of a submission.
pub const SUBMISSION_WORDS: usize = 8;

impl Submission {
    /// Returns the submission that the words of an entry encode.
    pub fn from_words(words: &[u64; SUBMISSION_WORDS]) -> Self {
        let [
            sequence,
            names,
            object,
            places,
            user_data,
            capacity_pages,
            key_low,
            key_high,
        ] = *words;
        Self {
            sequence: low(sequence),
            op: (sequence >> 32 & 0xff) as u8,
            flags: (sequence >> 40 & 0xff) as u8,
            reserved: (sequence >> 48) as u16,
            pool: low(names),
            index: high(names),
            object,
            slot: low(places),
            last: high(places),
            user_data,
            capacity_pages,
            key: u128::from(key_high) << 64 | u128::from(key_low),
        }
    }

    /// Returns the words of the entry.
    pub fn to_words(&self) -> [u64; SUBMISSION_WORDS] {
        #[expect(clippy::cast_possible_truncation, reason = "the low half is meant")]
        let key_low = self.key as u64;
        let bits = u64::from(self.op) | u64::from(self.flags) << 8 | u64::from(self.reserved) << 16;
        [
            u64::from(self.sequence) | bits << 32,
            pair(self.pool, self.index),
            self.object,
            pair(self.slot, self.last),
            self.user_data,
            self.capacity_pages,
            key_low,
            (self.key >> 64) as u64,
        ]
    }
}

/// One entry of the completion ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RawCompletion {
    /// From the submission.
    pub user_data: u64,
    /// Sequence that the submission had, or should have had.
    pub sequence: u32,
    /// A [`Status`].
    pub status: i32,
    /// The count returned by the operation, or the new pool's number.
    pub value: u64,
}

/// Number of words of a completion.
pub const COMPLETION_WORDS: usize = 4;

impl RawCompletion {
    /// Returns the completion that the words of an entry encode.
    pub fn from_words(words: &[u64; COMPLETION_WORDS]) -> Self {
        Self {
            user_data: words[0],
            sequence: low(words[1]),
            status: high(words[1]).cast_signed(),
            value: words[2],
        }
    }

    /// Returns the words of the entry.
    pub fn to_words(&self) -> [u64; COMPLETION_WORDS] {
        let second = pair(self.sequence, self.status.cast_unsigned());
        [self.user_data, second, self.value, 0]
    }
}

fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

/// Size of a ring, which determines the offsets of everything in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    entries: u32,
    slots: u32,
}

impl Geometry {
    /// Maximum number of entries of a ring.
    pub const ENTRIES_MAX: u32 = 1 << 15;
    /// Maximum number of slots of a ring (1 GiB of pages).
    pub const SLOTS_MAX: u32 = 1 << 18;
    /// Offset of the entries of the submission ring, in bytes.
    pub const SUBMISSIONS_AT: usize = 4096;

    /// Returns the geometry of a ring of `entries`, a power of two up to [`ENTRIES_MAX`](Self::ENTRIES_MAX), and
    /// `slots`, from 1 to [`SLOTS_MAX`](Self::SLOTS_MAX); `None` for other numbers.
    pub fn new(entries: u32, slots: u32) -> Option<Self> {
        let fits = entries.is_power_of_two()
            && entries <= Self::ENTRIES_MAX
            && (1..=Self::SLOTS_MAX).contains(&slots);
        fits.then_some(Self { entries, slots })
    }

    /// Entries of each ring.
    pub fn entries(self) -> u32 {
        self.entries
    }

    /// Pages for data.
    pub fn slots(self) -> u32 {
        self.slots
    }

    /// Offset of the entries of the completion ring, in bytes.
    pub fn completions_at(self) -> usize {
        Self::SUBMISSIONS_AT + (self.entries as usize * 8 * SUBMISSION_WORDS).next_multiple_of(4096)
    }

    /// Offset of the first slot, in bytes.
    pub fn slots_at(self) -> usize {
        self.completions_at()
            + (self.entries as usize * 8 * COMPLETION_WORDS).next_multiple_of(4096)
    }

    /// Total length, in bytes.
    pub fn region_bytes(self) -> usize {
        self.slots_at() + self.slots as usize * 4096
    }
}

/// Request of a client on the socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Become a client with a ring.
    Hello {
        /// Version that the client uses.
        version: u32,
        /// Number of entries wanted.
        entries: u32,
        /// Number of slots wanted.
        slots: u32,
        /// Zero.
        flags: u32,
        /// Name for display.
        name: Vec<u8>,
    },
    /// Request for statistics.
    Stats,
    /// Change the store's capacity.
    Resize {
        /// Capacity wanted, in bytes.
        capacity_bytes: u64,
    },
}

/// The error of a stream of requests; nothing after it can be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestFault {
    /// A message longer than [`REQUEST_BYTES_MAX`].
    Oversized,
    /// A type that is no request.
    Unknown,
    /// A payload that is too short or too long for its type.
    Malformed,
}

impl Request {
    /// Removes one request from the front of `stream`; `None` if it is not complete yet.
    ///
    /// # Errors
    ///
    /// [`RequestFault`], as soon as it is detected.
    pub fn take(stream: &mut Vec<u8>) -> Result<Option<Self>, RequestFault> {
        let (Some(length), Some(kind)) = (word(stream, 0), word(stream, 4)) else {
            return Ok(None);
        };
        if length > REQUEST_BYTES_MAX {
            return Err(RequestFault::Oversized);
        }
        if !(message::HELLO..=message::RESIZE).contains(&kind) {
            return Err(RequestFault::Unknown);
        }
        let end = HEAD_BYTES + length as usize;
        let Some(payload) = stream.get(HEAD_BYTES..end) else {
            return Ok(None);
        };
        let request = Self::parse(kind, payload).ok_or(RequestFault::Malformed)?;
        stream.drain(..end);
        Ok(Some(request))
    }

    fn parse(kind: u32, payload: &[u8]) -> Option<Self> {
        match kind {
            message::HELLO => Some(Self::Hello {
                version: word(payload, 0)?,
                entries: word(payload, 4)?,
                slots: word(payload, 8)?,
                flags: word(payload, 12)?,
                name: payload[16..].to_vec(),
            }),
            message::STATS => payload.is_empty().then_some(Self::Stats),
            _ => Some(Self::Resize {
                capacity_bytes: u64::from_le_bytes(payload.try_into().ok()?),
            }),
        }
    }

    /// Returns the message.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Hello {
                version,
                entries,
                slots,
                flags,
                name,
            } => {
                let words = [version, entries, slots, flags].map(|word| word.to_le_bytes());
                message_of(message::HELLO, &[words.as_flattened(), name].concat())
            }
            Self::Stats => message_of(message::STATS, &[]),
            Self::Resize { capacity_bytes } => {
                message_of(message::RESIZE, &capacity_bytes.to_le_bytes())
            }
        }
    }
}

/// Reply of a server on the socket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// The client has a ring; its descriptors are sent with the message.
    Welcome {
        /// Number of the client.
        client: u32,
        /// Entries of its ring.
        entries: u32,
        /// Slots of its ring.
        slots: u32,
    },
    /// Statistics of the store, as text made by the embedding program.
    Stats(String),
    /// The store's capacity was changed.
    Resized {
        /// Capacity now, in bytes.
        capacity_bytes: u64,
    },
    /// A refusal.
    Refused(Refusal, String),
}

impl Reply {
    /// Returns the message.
    pub fn to_bytes(&self) -> Vec<u8> {
        match self {
            Self::Welcome {
                client,
                entries,
                slots,
            } => {
                let words = [VERSION, *client, *entries, *slots].map(u32::to_le_bytes);
                message_of(message::WELCOME, words.as_flattened())
            }
            Self::Stats(text) => message_of(message::STATS_TEXT, text.as_bytes()),
            Self::Resized { capacity_bytes } => {
                message_of(message::RESIZED, &capacity_bytes.to_le_bytes())
            }
            Self::Refused(refusal, text) => {
                let code = (*refusal as u32).to_le_bytes();
                message_of(message::REFUSED, &[&code, text.as_bytes()].concat())
            }
        }
    }

    /// Returns the reply of a type and payload, `None` if it is invalid.
    pub fn parse(kind: u32, payload: &[u8]) -> Option<Self> {
        match kind {
            message::WELCOME => {
                let whole = payload.len() == 16 && word(payload, 0) == Some(VERSION);
                whole.then_some(Self::Welcome {
                    client: word(payload, 4)?,
                    entries: word(payload, 8)?,
                    slots: word(payload, 12)?,
                })
            }
            message::STATS_TEXT => Some(Self::Stats(String::from_utf8(payload.to_vec()).ok()?)),
            message::RESIZED => Some(Self::Resized {
                capacity_bytes: u64::from_le_bytes(payload.try_into().ok()?),
            }),
            message::REFUSED => {
                let refusal = Refusal::from_number(word(payload, 0)?);
                let text = String::from_utf8_lossy(&payload[4..]).into_owned();
                Some(Self::Refused(refusal, text))
            }
            _ => None,
        }
    }
}

/// Returns the little-endian word at an offset, if the bytes extend that far.
pub fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at + 4)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn message_of(kind: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap_or(u32::MAX);
    [&length.to_le_bytes(), &kind.to_le_bytes(), payload].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_survive_being_written_and_read() {
        let submission = Submission {
            sequence: 0x0102_0304,
            op: 5,
            flags: 6,
            reserved: 0x0708,
            pool: 0x090a_0b0c,
            index: 0x0d0e_0f10,
            object: 0x1112_1314_1516_1718,
            slot: 0x191a_1b1c,
            last: 0x1d1e_1f20,
            user_data: 0x2122_2324_2526_2728,
            capacity_pages: 0x292a_2b2c_2d2e_2f30,
            key: 0x3132_3334_3536_3738_393a_3b3c_3d3e_3f40,
        };
        let words = submission.to_words();
        assert_eq!(words[0], 0x0708_0605_0102_0304);
        assert_eq!(Submission::from_words(&words), submission);
        let completion = RawCompletion {
            user_data: 1,
            sequence: u32::MAX,
            status: -3,
            value: 9,
        };
        assert_eq!(
            RawCompletion::from_words(&completion.to_words()),
            completion
        );
    }

    #[test]
    fn requests_survive_being_sent_in_pieces() {
        let hello = Request::Hello {
            version: 1,
            entries: 2,
            slots: 3,
            flags: 4,
            name: b"web".to_vec(),
        };
        let resize = Request::Resize {
            capacity_bytes: 1 << 40,
        };
        for request in [hello, Request::Stats, resize] {
            let bytes = request.to_bytes();
            let mut stream = Vec::new();
            for (at, byte) in bytes.iter().enumerate() {
                assert_eq!(Request::take(&mut stream), Ok(None), "{at}");
                stream.push(*byte);
            }
            stream.push(77);
            assert_eq!(Request::take(&mut stream), Ok(Some(request)));
            assert_eq!(stream, [77]);
        }
    }

    #[test]
    fn a_bad_request_is_known_by_its_head() {
        let take = |length: u32, kind: u32, payload: &[u8]| {
            let head = [length.to_le_bytes(), kind.to_le_bytes()];
            Request::take(&mut [head.as_flattened(), payload].concat())
        };
        assert_eq!(take(4097, 1, &[]), Err(RequestFault::Oversized));
        assert_eq!(take(u32::MAX, 1, &[]), Err(RequestFault::Oversized));
        assert_eq!(take(4096, 1, &[]), Ok(None));
        assert_eq!(take(0, 0, &[]), Err(RequestFault::Unknown));
        assert_eq!(take(0, 0x81, &[]), Err(RequestFault::Unknown));
        assert_eq!(take(15, 1, &[0; 15]), Err(RequestFault::Malformed));
        assert_eq!(take(1, 2, &[0]), Err(RequestFault::Malformed));
        assert_eq!(take(7, 3, &[0; 7]), Err(RequestFault::Malformed));
        assert_eq!(take(9, 3, &[0; 9]), Err(RequestFault::Malformed));
    }

    #[test]
    fn replies_survive_being_sent() {
        for reply in [
            Reply::Welcome {
                client: 1,
                entries: 2,
                slots: 3,
            },
            Reply::Stats("{}".to_owned()),
            Reply::Resized { capacity_bytes: 5 },
            Reply::Refused(Refusal::Geometry, "no".to_owned()),
        ] {
            let bytes = reply.to_bytes();
            let kind = word(&bytes, 4).unwrap();
            assert_eq!(Reply::parse(kind, &bytes[HEAD_BYTES..]), Some(reply));
        }
        assert_eq!(Reply::parse(message::WELCOME, &[0; 16]), None);
        assert_eq!(Reply::parse(message::REFUSED, &[0; 3]), None);
        assert_eq!(Reply::parse(1, &[]), None);
    }

    #[test]
    fn a_geometry_is_of_a_power_of_two_of_entries_and_some_slots() {
        for (entries, slots) in [(0, 1), (3, 1), (1, 0), (1 << 16, 1), (1, (1 << 18) + 1)] {
            assert_eq!(Geometry::new(entries, slots), None);
        }
        let geometry = Geometry::new(256, 10).unwrap();
        assert_eq!(geometry.completions_at(), 4096 + 16384);
        assert_eq!(geometry.slots_at(), 4096 + 16384 + 8192);
        assert_eq!(geometry.region_bytes(), 4096 + 16384 + 8192 + 40960);
    }
}
