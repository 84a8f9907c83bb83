//! A hostile client of hcache: its requests on the socket, and all it can do to its ring, cannot make the server
//! panic, lose count, or touch or show the pages of another.
#![no_main]

use std::cell::OnceCell;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{SystemTime, UNIX_EPOCH};

use libfuzzer_sys::fuzz_target;
use plimsoll_hcache::{Client, ClientOptions, Handle, PAGE_BYTES, Page, PoolId, PoolOptions};
use plimsoll_hcache::{Store, StoreOptions};
use plimsoll_ring::protocol::{Geometry, Op, RawCompletion, Request, Status, Submission};
use plimsoll_ring::{Executor, Region, Tally, Word};
use xxhash_rust::xxh3::xxh3_64;

const ENTRIES: u32 = 8;
const SLOTS: u32 = 3;
/// Fewer pages than push the victim's out of the store.
const STEPS_MAX: usize = 400;
const KEY: u128 = 7;
const MAX_POOLS: usize = 4;

/// Another client, with pages in a private and in a shared pool.
struct Victim {
    store: Store,
    client: Client,
    pools: [PoolId; 2],
    secret: u64,
}

impl Victim {
    fn new() -> Self {
        let store = Store::new(StoreOptions {
            shards: 2,
            ..StoreOptions::new(8 << 20)
        })
        .unwrap();
        let client = store
            .create_client(ClientOptions {
                group: 1,
                ..ClientOptions::new("victim")
            })
            .unwrap();
        let pools = [PoolOptions::private(), PoolOptions::shared(KEY)]
            .map(|options| client.create_pool(options).unwrap());
        // Not to be found in this program, nor guessed by the fuzzer.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
        let secret = xxh3_64(&now.as_nanos().to_le_bytes());
        let victim = Self {
            store,
            client,
            pools,
            secret,
        };
        for handle in victim.handles() {
            let page = victim.page(handle);
            assert!(victim.client.put(handle, &page).unwrap().is_stored());
        }
        victim
    }

    /// Names that a client would try first.
    fn handles(&self) -> impl Iterator<Item = Handle> {
        let handle = |at: u32, pool| Handle {
            pool,
            object: u64::from(at / 4),
            index: at % 4,
        };
        (0..8).flat_map(move |at| self.pools.map(|pool| handle(at, pool)))
    }

    fn page(&self, handle: Handle) -> Page {
        let mut page = [0; PAGE_BYTES];
        for bytes in page.chunks_exact_mut(16) {
            bytes[..8].copy_from_slice(&self.secret.to_le_bytes());
            bytes[8..12].copy_from_slice(&handle.pool.0.to_le_bytes());
            bytes[12] = handle.object as u8;
            bytes[13] = handle.index as u8;
        }
        page
    }

    /// Whether the secret is in a page. Hashes are compared, for the fuzzer learns what is compared.
    fn shows_in(&self, page: &Page) -> bool {
        let secret = xxh3_64(&self.secret.to_le_bytes());
        page.chunks_exact(8).any(|word| xxh3_64(word) == secret)
    }

    fn check(&self) {
        for handle in self.handles() {
            let mut page = [0; PAGE_BYTES];
            assert!(self.client.get(handle, &mut page).unwrap(), "{handle:?}");
            assert!(page == self.page(handle), "{handle:?}");
            self.client.put(handle, &page).unwrap();
        }
        let stats = self.store.stats();
        assert_eq!((stats.pages, stats.clients.len()), (16, 1));
    }

    fn executor(&self) -> Executor {
        let (region, _) = Region::create(Geometry::new(ENTRIES, SLOTS).unwrap()).unwrap();
        let options = ClientOptions {
            group: 2,
            ..ClientOptions::new("hostile")
        };
        Executor::new(
            region,
            self.store.create_client(options).unwrap(),
            MAX_POOLS,
        )
    }
}

/// The fuzzer's bytes, to be used up.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1).first().copied().unwrap_or(0)
    }

    fn word(&mut self) -> u32 {
        self.take(4)
            .iter()
            .fold(0, |word, byte| word << 8 | u32::from(*byte))
    }
}

/// Requests are the same whatever pieces they come in, and say all that their bytes say.
fn check_requests(bytes: &[u8]) {
    let mut whole = bytes.to_vec();
    let mut pieces = Vec::new();
    let mut rest = bytes;
    loop {
        let before = whole.clone();
        let request = Request::take(&mut whole);
        let mut piecewise = Request::take(&mut pieces);
        while piecewise == Ok(None) && !rest.is_empty() {
            pieces.push(rest[0]);
            rest = &rest[1..];
            piecewise = Request::take(&mut pieces);
        }
        assert_eq!(request, piecewise);
        match request {
            Ok(Some(request)) => {
                let bytes = request.to_bytes();
                assert_eq!(before[..bytes.len()], bytes);
                assert_eq!(before[bytes.len()..], whole);
            }
            Ok(None) | Err(_) => return,
        }
    }
}

/// An entry with some sense in it.
fn submission(bytes: &mut Bytes<'_>, sequence: u32, pools: &[PoolId]) -> Submission {
    let pool = pools[usize::from(bytes.byte()) % pools.len()];
    let places = bytes.byte();
    let op = bytes.byte();
    Submission {
        sequence,
        op: op % (Op::ALL.len() as u8 + 1),
        flags: if op & 0x10 == 0 { 0 } else { op >> 5 },
        reserved: 0,
        pool: pool.0,
        index: u32::from(places & 7),
        object: u64::from(places >> 3 & 3),
        slot: u32::from(places >> 6),
        last: bytes.byte().into(),
        user_data: sequence.into(),
        capacity_pages: u64::from(op >> 5),
        key: KEY,
    }
}

fn attack(victim: &Victim, mut bytes: Bytes<'_>) {
    let mut executor = victim.executor();
    let mut pools = victim.pools.to_vec();
    let (mut written, mut reaped) = (0_u32, 0_u32);
    for _ in 0..STEPS_MAX {
        if bytes.0.is_empty() {
            return;
        }
        let region = executor.region();
        match bytes.byte() % 8 {
            0 => {
                let at = bytes.word() as usize % region.geometry().region_bytes();
                let length = usize::from(bytes.byte()).min(region.geometry().region_bytes() - at);
                region.overwrite(at, bytes.take(length));
            }
            1 => {
                let word = [
                    Word::Entries,
                    Word::Slots,
                    Word::SubmissionTail,
                    Word::SubmissionHead,
                    Word::CompletionTail,
                    Word::CompletionHead,
                    Word::ServerSleeping,
                    Word::ClientSleeping,
                ][usize::from(bytes.byte() % 8)];
                region.word(word).store(bytes.word(), Release);
            }
            2 => {
                region.write_submission(bytes.word(), &std::array::from_fn(|_| bytes.word().into()))
            }
            3 => {
                // As a good client does: take all completions, and publish.
                region.word(Word::CompletionHead).store(reaped, Release);
                region.word(Word::SubmissionTail).store(written, Release);
            }
            4..6 => {
                let sequence = written.wrapping_add(1);
                let entry = submission(&mut bytes, sequence, &pools);
                region.write_submission(written, &entry.to_words());
                written = sequence;
            }
            _ => {
                let budget = u32::from(bytes.byte() % 12);
                let mut tally = Tally::default();
                let Ok(turn) = executor.serve(budget, &mut tally) else {
                    assert_eq!(tally, Tally::default());
                    executor = victim.executor();
                    (written, reaped) = (0, 0);
                    pools.truncate(2);
                    continue;
                };
                assert!(turn.entries <= budget.min(ENTRIES));
                assert_eq!(tally.entries, u64::from(turn.entries));
                let region = executor.region();
                let mut bad = 0;
                for _ in 0..turn.entries {
                    let done = RawCompletion::from_words(&region.completion(reaped));
                    reaped = reaped.wrapping_add(1);
                    assert_eq!(done.sequence, reaped);
                    let status = Status::from_number(done.status).expect("a status");
                    bad += u64::from(Status::BAD.contains(&status));
                    let entry = Submission::from_words(&region.submission(reaped.wrapping_sub(1)));
                    if status == Status::Ok && entry.op == Op::CreatePool as u8 {
                        pools.push(PoolId(done.value as u32));
                        assert!(!victim.pools.contains(&PoolId(done.value as u32)));
                    }
                }
                assert_eq!(tally.bad.iter().sum::<u64>(), bad);
                if turn.entries > 0 {
                    assert_eq!(region.word(Word::CompletionTail).load(Acquire), reaped);
                }
                for slot in 0..SLOTS {
                    let mut page = [0; PAGE_BYTES];
                    region.read_slot(slot, &mut page);
                    assert!(!victim.shows_in(&page));
                }
            }
        }
    }
}

thread_local! {
    static VICTIM: OnceCell<Victim> = const { OnceCell::new() };
}

fuzz_target!(|bytes: &[u8]| {
    let mut bytes = Bytes(bytes);
    let length = usize::from(bytes.byte());
    check_requests(bytes.take(length));
    VICTIM.with(|victim| {
        let victim = victim.get_or_init(Victim::new);
        attack(victim, bytes);
        victim.check();
    });
});
