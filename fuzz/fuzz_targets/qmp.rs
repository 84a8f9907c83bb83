//! A hostile monitor: whatever it sends, in whatever order, each command of the client ends with an error or a value.
//!
//! The input is lines, separated by bytes of 0. By its first byte, a line is the answer to the next command, an event, a
//! refusal, or sent as it is.
#![no_main]

use std::io::{IoSlice, Read as _};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use plimsoll_vm::{Qmp, VmError};
use rustix::net::{SendAncillaryBuffer, SendFlags, sendmsg};

const TIMEOUT: Duration = Duration::from_secs(30);

struct Monitor {
    listener: UnixListener,
    path: PathBuf,
    _folder: tempfile::TempDir,
}

impl Monitor {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("monitor");
        Self {
            listener: UnixListener::bind(&path).unwrap(),
            path,
            _folder: folder,
        }
    }

    /// Sends all of it to the next client, and then no more; reads until the client is gone.
    fn serve(&self, text: &[u8]) {
        let (mut stream, _) = self.listener.accept().unwrap();
        let mut sent = 0;
        while sent < text.len() {
            // A client that is gone is no signal.
            let parts = [IoSlice::new(&text[sent..])];
            let mut none = SendAncillaryBuffer::default();
            match sendmsg(&stream, &parts, &mut none, SendFlags::NOSIGNAL) {
                Ok(more) => sent += more,
                Err(_) => return,
            }
        }
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

/// What the monitor sends.
fn text_of(input: &[u8]) -> Vec<u8> {
    let mut text = Vec::new();
    let mut lines = input.split(|byte| *byte == 0);
    match lines.next() {
        Some(b"") | None => text.extend(b"{\"QMP\":{}}\n{\"id\":0,\"return\":{}}\n"),
        Some(line) => text.extend([line, b"\n"].concat()),
    }
    let mut id = 1;
    for line in lines {
        let (kind, rest) = line.split_first().unwrap_or((&0, &[]));
        let (begin, end) = match kind % 8 {
            0..4 => {
                id += 1;
                (format!("{{\"id\":{},\"return\":", id - 1), "}\n")
            }
            4 => {
                id += 1;
                (format!("{{\"id\":{},\"error\":", id - 1), "}\n")
            }
            5 => ("{\"event\":\"E\",\"data\":".to_owned(), "}\n"),
            6 => (String::new(), "\n"),
            _ => (String::new(), ""),
        };
        text.extend([begin.as_bytes(), rest, end.as_bytes()].concat());
    }
    text
}

/// Whether the monitor can still answer.
fn goes_on<T>(result: Result<T, VmError>) -> bool {
    match result {
        Ok(_) | Err(VmError::QmpRefused { .. } | VmError::QmpProtocol { .. }) => true,
        Err(VmError::QmpTimeout { .. }) => panic!("it waits for what will not come"),
        Err(_) => false,
    }
}

fn talk(mut qmp: Qmp) {
    loop {
        let more = goes_on(qmp.status())
            && goes_on(qmp.vcpus())
            && goes_on(qmp.balloon_actual_bytes())
            && goes_on(qmp.set_balloon(u64::MAX))
            && goes_on(qmp.ram())
            && goes_on(qmp.find_balloon())
            && goes_on(qmp.stats_interval_s("/machine"))
            && goes_on(qmp.guest_stats("/machine"))
            && goes_on(qmp.block_reads());
        if !more {
            break;
        }
    }
}

thread_local! {
    static MONITOR: Monitor = Monitor::new();
}

fuzz_target!(|input: &[u8]| {
    let text = text_of(input);
    let begun = Instant::now();
    MONITOR.with(|monitor| {
        thread::scope(|scope| {
            scope.spawn(|| monitor.serve(&text));
            if let Ok(qmp) = Qmp::connect(&monitor.path, TIMEOUT) {
                talk(qmp);
            }
        });
    });
    assert!(begun.elapsed() < TIMEOUT);
});
