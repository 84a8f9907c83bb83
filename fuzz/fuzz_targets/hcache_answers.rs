//! A hostile server of hcache: whatever it answers on the socket, with whatever files, and whatever it writes into the ring,
//! its client returns errors or values, in time, and never hands out a slot twice.
#![no_main]

use std::cell::RefCell;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use plimsoll_hcache::{Handle, PAGE_BYTES, PoolId, PoolOptions};
use plimsoll_ring::protocol::{Geometry, RawCompletion, Reply};
use plimsoll_ring::{ConnectOptions, Connection, Error, Region, Slot, Word, resize, stats};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const ENTRIES: u32 = 8;
const SLOTS: u32 = 3;
const TIMEOUT: Duration = Duration::from_secs(30);

struct Server {
    listener: UnixListener,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Server {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("hcache");
        Self {
            listener: UnixListener::bind(&path).unwrap(),
            path,
            _folder: folder,
        }
    }

    /// Answers the next client by these bytes and files; the connection is open until it is dropped.
    fn answer(&self, bytes: &[u8], files: &[OwnedFd]) -> UnixStream {
        let (stream, _) = self.listener.accept().unwrap();
        let descriptors: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(3))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        }
        // What does not fit, or comes too late, is not sent.
        let _ = sendmsg(
            &stream,
            &[IoSlice::new(bytes)],
            &mut ancillary,
            SendFlags::NOSIGNAL,
        );
        let _ = stream.shutdown(std::net::Shutdown::Write);
        stream
    }

    /// The result of `ask` while the server answers so.
    fn with<T>(&self, bytes: &[u8], files: &[OwnedFd], ask: impl FnOnce() -> T) -> (T, UnixStream) {
        thread::scope(|scope| {
            let server = scope.spawn(|| self.answer(bytes, files));
            let result = ask();
            (result, server.join().unwrap())
        })
    }
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap()
}

fn options() -> ConnectOptions {
    ConnectOptions {
        entries: ENTRIES,
        slots: SLOTS - 1,
        spin: Duration::ZERO,
        timeout: TIMEOUT,
        ..ConnectOptions::new("fuzz")
    }
}

/// Any answer.
fn answers(server: &Server, choice: u8, bytes: &[u8]) {
    let mut files = Vec::new();
    if choice & 4 != 0 {
        let memory = memfd_create("ring", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&memory, u64::from(choice) << 10).unwrap();
        files.push(memory);
    }
    files.extend((0..choice >> 3 & 3).take(3 - files.len()).map(|_| event()));
    let (path, timeout) = (&server.path, TIMEOUT);
    match choice >> 5 & 3 {
        0 => drop(server.with(bytes, &files, || stats(path, timeout))),
        1 => drop(server.with(bytes, &files, || resize(path, 7, timeout))),
        _ => drop(server.with(bytes, &files, || Connection::connect(path, &options()))),
    }
}

/// A connection, and a server that writes into its ring.
fn ring(server: &Server, bytes: &[u8]) {
    let geometry = Geometry::new(ENTRIES, SLOTS).unwrap();
    let (region, memory) = Region::create(geometry).unwrap();
    let welcome = Reply::Welcome {
        client: 1,
        entries: ENTRIES,
        slots: SLOTS,
    };
    let files = [memory, event()];
    let connect = || Connection::connect(&server.path, &options());
    let (connection, _stream) = server.with(&welcome.to_bytes(), &files, connect);
    let mut connection = connection.unwrap();
    let mut held: Vec<Slot> = Vec::new();
    for step in bytes.as_chunks::<4>().0 {
        let value = u32::from(step[2]) | u32::from(step[3]) << 8;
        let handle = Handle {
            pool: PoolId(u32::from(step[1] & 1)),
            object: value.into(),
            index: value,
        };
        connection.set_deadline(Some(Instant::now()));
        let done: Result<(), Error> = match step[0] % 16 {
            0 => {
                let word = [
                    Word::CompletionTail,
                    Word::SubmissionHead,
                    Word::ClientSleeping,
                ];
                region
                    .word(word[usize::from(step[1]) % 3])
                    .store(value, SeqCst);
                Ok(())
            }
            // As an answer should be.
            1..5 => {
                let tail = region.word(Word::CompletionTail).load(SeqCst);
                let completion = RawCompletion {
                    user_data: value.into(),
                    sequence: tail.wrapping_add(1 + u32::from(step[1] == 7)),
                    status: i32::from(step[1]) - 8,
                    value: u64::from(value) << (step[1] & 48),
                };
                region.write_completion(tail, &completion.to_words());
                region
                    .word(Word::CompletionTail)
                    .store(tail.wrapping_add(1), SeqCst);
                Ok(())
            }
            5 => {
                let at = (usize::from(step[1]) << 8 | usize::from(step[2]))
                    % (geometry.region_bytes() - 1);
                region.overwrite(at, &step[3..]);
                Ok(())
            }
            6 => connection.create_pool(PoolOptions::private()).map(drop),
            7 => connection.put(handle, &[step[3]; PAGE_BYTES]).map(drop),
            8 => connection.get(handle, &mut [0; PAGE_BYTES]).map(drop),
            9 => connection.flush_range(handle.pool, 1, 0..=value).map(drop),
            10 => {
                held.extend(connection.reserve());
                Ok(())
            }
            11 => match held.pop() {
                Some(slot) => connection.submit_put(handle, slot, value.into()),
                None => Ok(()),
            },
            12 => match held.pop() {
                Some(slot) => connection.submit_get(handle, slot, value.into()),
                None => Ok(()),
            },
            13 => connection.submit_flush(handle, value.into()),
            14 => connection.wait(),
            _ => connection.reap().map(|done| {
                held.extend(done.and_then(|done| done.slot));
            }),
        };
        assert!(connection.under_way() <= ENTRIES);
        assert!(connection.free_slots() + held.len() < SLOTS as usize);
        for slot in &mut held {
            connection.page(slot)[0] = step[3];
        }
        if done.is_err() {
            break;
        }
    }
}

thread_local! {
    static SERVER: RefCell<Option<Server>> = const { RefCell::new(None) };
}

fuzz_target!(|input: &[u8]| {
    let begun = Instant::now();
    SERVER.with_borrow_mut(|server| {
        let server = server.get_or_insert_with(Server::new);
        let (choice, bytes) = input.split_first().unwrap_or((&0, &[]));
        if choice & 3 == 0 {
            answers(server, *choice, bytes);
        } else {
            ring(server, bytes);
        }
    });
    assert!(begun.elapsed() < TIMEOUT);
});
