//! A server that writes into the ring and the socket whatever it likes.

mod common;

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;
use std::time::{Duration, Instant};

use plimsoll_hcache::{Handle, PoolId};
use plimsoll_ring::protocol::{Geometry, RawCompletion, Reply, Status};
use plimsoll_ring::{ConnectOptions, Connection, Error, Region, Word, stats};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

const ENTRIES: u32 = 8;
const SLOTS: u32 = 3;

/// Long enough for any machine; no test lasts as long.
const FAR: Duration = Duration::from_secs(60);
const SOON: Duration = Duration::from_millis(200);

struct Liar {
    connection: Connection,
    region: Region,
    stream: UnixStream,
    _folder: tempfile::TempDir,
}

fn listener(folder: &Path) -> (UnixListener, PathBuf) {
    let path = folder.join("hcache");
    (UnixListener::bind(&path).unwrap(), path)
}

/// A ring, and the files of it that a client gets.
fn shared() -> (Region, [OwnedFd; 2]) {
    let (region, memory) = Region::create(Geometry::new(ENTRIES, SLOTS).unwrap()).unwrap();
    let bell = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    (region, [memory, bell])
}

/// A connection to a server that welcomed its client as it should.
fn liar() -> Liar {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listener(folder.path());
    let (region, files) = shared();
    let server = thread::spawn(move || welcome(&listener, &files));
    let options = ConnectOptions {
        entries: ENTRIES,
        slots: SLOTS - 1,
        spin: Duration::ZERO,
        timeout: FAR,
        ..ConnectOptions::new("lied to")
    };
    Liar {
        connection: Connection::connect(&path, &options).unwrap(),
        region,
        stream: server.join().unwrap(),
        _folder: folder,
    }
}

fn welcome(listener: &UnixListener, files: &[OwnedFd; 2]) -> UnixStream {
    let (mut stream, _) = listener.accept().unwrap();
    // The client sends its request in one piece.
    assert!(stream.read(&mut [0; 512]).unwrap() > 0);
    let descriptors = files.each_ref().map(|file| file.as_fd());
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let reply = Reply::Welcome {
        client: 1,
        entries: ENTRIES,
        slots: SLOTS,
    };
    let bytes = reply.to_bytes();
    let parts = [IoSlice::new(&bytes)];
    sendmsg(&stream, &parts, &mut ancillary, SendFlags::NOSIGNAL).unwrap();
    stream
}

#[test]
fn a_completion_has_the_user_data_that_was_submitted_whatever_the_server_writes() {
    let mut liar = liar();
    let handle = Handle {
        pool: PoolId(1),
        object: 0,
        index: 0,
    };
    for (position, lie) in [(0, 200), (1, u64::MAX)] {
        let slot = liar.connection.reserve().unwrap();
        liar.connection.submit_get(handle, slot, 3).unwrap();
        liar.connection.publish();
        let completion = RawCompletion {
            user_data: lie,
            sequence: position + 1,
            status: Status::Ok as i32,
            value: 0,
        };
        liar.region
            .write_completion(position, &completion.to_words());
        liar.region
            .word(Word::CompletionTail)
            .store(position + 1, SeqCst);
        let done = liar.connection.reap().unwrap().unwrap();
        assert_eq!(done.user_data, 3);
        liar.connection.release(done.slot);
    }
    // And one of nothing.
    liar.region.word(Word::CompletionTail).store(3, SeqCst);
    assert!(matches!(liar.connection.reap(), Err(Error::Protocol(_))));
}

#[test]
fn the_c_client_has_its_user_data_whatever_the_server_writes() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listener(folder.path());
    let (region, files) = shared();
    let completion = RawCompletion {
        user_data: u64::MAX,
        sequence: 1,
        status: Status::Ok as i32,
        value: 0,
    };
    region.write_completion(0, &completion.to_words());
    let mut client = Command::new(common::c_client(folder.path()))
        .arg(&path)
        .arg("liar")
        .spawn()
        .unwrap();
    let mut stream = welcome(&listener, &files);
    while region.word(Word::SubmissionTail).load(SeqCst) == 0
        && client.try_wait().unwrap().is_none()
    {
        thread::sleep(Duration::from_millis(1));
    }
    region.word(Word::CompletionTail).store(1, SeqCst);
    // The client, which sleeps by now or soon, looks again when a byte comes.
    stream.write_all(&[0]).unwrap();
    assert!(client.wait().unwrap().success());
}

#[test]
fn a_server_that_wakes_its_client_without_end_is_given_up_at_the_deadline() {
    let Liar {
        mut connection,
        region: _region,
        mut stream,
        _folder,
    } = liar();
    let handle = Handle {
        pool: PoolId(1),
        object: 0,
        index: 0,
    };
    connection.submit_flush(handle, 0).unwrap();
    // A server that goes on sending is always ahead, so the client must not wait until there are no bytes.
    stream.write_all(&[7; 1 << 16]).unwrap();
    connection.set_deadline(Some(Instant::now()));
    assert!(matches!(connection.wait(), Err(Error::TimedOut)));
    drop(connection);
    let left = stream.read(&mut [0]).map_err(|error| error.kind());
    // Bytes that nobody has read.
    assert_eq!(left, Err(std::io::ErrorKind::ConnectionReset));
}

#[test]
fn an_answer_that_comes_byte_by_byte_has_one_time_limit() {
    let folder = tempfile::tempdir().unwrap();
    let (listener, path) = listener(folder.path());
    thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let answer = Reply::Stats("x".repeat(1000)).to_bytes();
            for byte in answer {
                if stream.write_all(&[byte]).is_err() {
                    return;
                }
                thread::sleep(SOON / 4);
            }
        });
        let result = stats(&path, SOON);
        let timed_out = |error: &std::io::Error| error.kind() == std::io::ErrorKind::TimedOut;
        assert!(matches!(result, Err(Error::Io(error)) if timed_out(&error)));
    });
}
