//! A minimal client of QEMU's monitor protocol (QMP) over a Unix socket.
//!
//! A monitor sends JSON, one object per line: a greeting, then answers to commands, with events between them at any
//! time. A monitor serves one client at a time: a second one can connect but is not greeted, and once the queue is
//! full, others cannot even connect. The monitor's output is untrusted, because a VM may have compromised its QEMU:
//! lines and waits are bounded. Events are not used.
//!
//! Source: QEMU, docs/interop/qmp-spec.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::identity::{PeerSocket, ProcessId, connect_within};
use crate::{BlockReads, GuestStats, Vcpu, VmError};

/// Maximum length of a line; QEMU's longest answers (its own schema) stay under 1 MiB.
const LINE_BYTES_MAX: usize = 4 << 20;
/// Property of a balloon: interval of its guest's statistics, in s.
const STATS_INTERVAL: &str = "guest-stats-polling-interval";

/// The run state of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunState {
    /// Whether its virtual CPUs run.
    pub running: bool,
    /// QEMU's name of the state, such as `running`.
    pub status: String,
}

/// A connection to a VM's monitor. Its commands fail as [`execute`](Self::execute) does.
#[derive(Debug)]
pub struct Qmp {
    stream: UnixStream,
    /// Received bytes of an incomplete line.
    received: Vec<u8>,
    /// Time limit of an answer.
    timeout: Duration,
    /// Number of the next command, which its answer repeats.
    next_id: u64,
}

/// RAM of a VM, in bytes; the sum is a 64-bit number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VmRam {
    /// What it booted with, and plugged DIMMs: the RAM that a balloon is counted against.
    pub fixed_bytes: u64,
    /// What its guest has plugged of virtio-mem devices.
    pub virtio_mem_bytes: u64,
}

#[expect(
    clippy::missing_errors_doc,
    reason = "commands have the errors of `execute`, documented at the type"
)]
impl Qmp {
    /// The process that listens at the socket, if it can be seen.
    pub fn listener(&self) -> Option<ProcessId> {
        ProcessId::listening(&self.stream)
    }

    /// Connects and completes the negotiation within `timeout`, which is also the time limit of every later command.
    ///
    /// # Errors
    ///
    /// [`VmError::QmpConnect`] if there is no monitor, [`VmError::QmpTaken`] if it sends no greeting (another client may be
    /// connected), and those of [`execute`](Self::execute).
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Self, VmError> {
        let deadline = Instant::now() + timeout;
        Self::greet(connect_within(socket, timeout), socket, deadline, timeout)
    }

    /// As [`connect`](Self::connect) at the first of a VM's sockets whose monitor can be used, each in its share of the time; refuses
    /// a peer that is not that VM's own process. The socket becomes the first of `sockets`, to be tried first when they are used
    /// again.
    ///
    /// # Errors
    ///
    /// [`VmError::NoMonitor`] without sockets. Those of [`connect`](Self::connect); [`VmError::QmpConnect`] also if another process
    /// listens there. [`VmError::NoFreeMonitor`] if several sockets have such errors.
    pub fn connect_to(sockets: &mut [PeerSocket], timeout: Duration) -> Result<Self, VmError> {
        let connect = |socket: &PeerSocket, share| socket.connect(share).map(|(stream, _)| stream);
        Self::first_usable(sockets, timeout, connect, |socket| &socket.path)
    }

    /// As [`connect_to`](Self::connect_to), whoever listens there.
    ///
    /// # Errors
    ///
    /// Those of [`connect_to`](Self::connect_to).
    pub fn connect_any(sockets: &mut [PathBuf], timeout: Duration) -> Result<Self, VmError> {
        let connect = |socket: &PathBuf, share| connect_within(socket, share);
        Self::first_usable(sockets, timeout, connect, |socket| socket)
    }

    fn first_usable<T>(
        sockets: &mut [T],
        timeout: Duration,
        connect: impl Fn(&T, Duration) -> io::Result<UnixStream>,
        path: impl Fn(&T) -> &Path,
    ) -> Result<Self, VmError> {
        let end = Instant::now() + timeout;
        let mut failures = Vec::new();
        for (tried, left) in (1..=sockets.len()).rev().enumerate() {
            let share = end.saturating_duration_since(Instant::now())
                / u32::try_from(left).unwrap_or(u32::MAX);
            let socket = &sockets[tried];
            let deadline = Instant::now() + share;
            match Self::greet(connect(socket, share), path(socket), deadline, timeout) {
                Ok(qmp) => {
                    sockets[..=tried].rotate_right(1);
                    return Ok(qmp);
                }
                Err(error) => failures.push(error),
            }
        }
        Err(match failures.len() {
            0 => VmError::NoMonitor,
            1 => failures.remove(0),
            _ => VmError::NoFreeMonitor(failures),
        })
    }

    fn greet(
        stream: io::Result<UnixStream>,
        socket: &Path,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Self, VmError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => VmError::QmpTaken {
                socket: socket.to_owned(),
            },
            _ => VmError::QmpConnect {
                socket: socket.to_owned(),
                source,
            },
        };
        let stream = stream.map_err(failed)?;
        let mut qmp = Self {
            stream,
            received: Vec::new(),
            timeout,
            next_id: 0,
        };
        let greeting = qmp.receive(deadline).map_err(|error| match error {
            Receive::Io(source) => failed(source),
            Receive::Protocol(what) => VmError::QmpProtocol { what },
        })?;
        if greeting.get("QMP").is_none() {
            return Err(VmError::QmpProtocol {
                what: "it does not greet".into(),
            });
        }
        qmp.timeout = deadline.saturating_duration_since(Instant::now());
        qmp.execute("qmp_capabilities", Value::Null)?;
        qmp.timeout = timeout;
        Ok(qmp)
    }

    /// Sets the time limit of later commands.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Runs a command and returns its answer; `arguments` is an object, or null for none.
    ///
    /// # Errors
    ///
    /// [`VmError::QmpRefused`] if QEMU refuses, [`VmError::QmpTimeout`],
    /// [`VmError::QmpBroken`], [`VmError::QmpProtocol`].
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value, VmError> {
        let id = self.next_id;
        self.next_id += 1;
        let mut request = json!({ "execute": command, "id": id });
        if !arguments.is_null() {
            request["arguments"] = arguments;
        }
        let deadline = Instant::now() + self.timeout;
        let broken = |source: io::Error, timeout| match source.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => VmError::QmpTimeout {
                command: command.to_owned(),
                timeout,
            },
            _ => VmError::QmpBroken {
                command: command.to_owned(),
                source,
            },
        };
        self.stream
            .set_write_timeout(Some(self.timeout.max(Duration::from_millis(1))))
            .and_then(|()| self.stream.write_all(format!("{request}\n").as_bytes()))
            .map_err(|source| broken(source, self.timeout))?;
        loop {
            let mut answer = self.receive(deadline).map_err(|error| match error {
                Receive::Io(source) => broken(source, self.timeout),
                Receive::Protocol(what) => VmError::QmpProtocol { what },
            })?;
            if answer["id"] != id {
                // An event, or the late answer to a command that has timed out.
                continue;
            }
            if let Some(value) = answer.get_mut("return") {
                return Ok(value.take());
            }
            let error = &answer["error"];
            let text = |key: &str| error[key].as_str().unwrap_or("unknown").to_owned();
            return Err(VmError::QmpRefused {
                command: command.to_owned(),
                class: text("class"),
                description: text("desc"),
            });
        }
    }

    /// Stops the virtual CPUs.
    pub fn stop(&mut self) -> Result<(), VmError> {
        self.execute("stop", Value::Null).map(drop)
    }

    /// Resumes the virtual CPUs.
    pub fn cont(&mut self) -> Result<(), VmError> {
        self.execute("cont", Value::Null).map(drop)
    }

    /// Ends QEMU at once.
    pub fn quit(&mut self) -> Result<(), VmError> {
        self.execute("quit", Value::Null).map(drop)
    }

    /// Returns whether the VM runs.
    pub fn status(&mut self) -> Result<RunState, VmError> {
        let answer = self.execute("query-status", Value::Null)?;
        match (answer["running"].as_bool(), answer["status"].as_str()) {
            (Some(running), Some(status)) => Ok(RunState {
                running,
                status: status.to_owned(),
            }),
            _ => Err(VmError::QmpProtocol {
                what: "query-status does not return whether the VM runs".into(),
            }),
        }
    }

    /// Returns the threads that run the virtual CPUs.
    pub fn vcpus(&mut self) -> Result<Vec<Vcpu>, VmError> {
        let answer = self.execute("query-cpus-fast", Value::Null)?;
        let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        let vcpu = |cpu: &Value| {
            Some(Vcpu {
                index: number(&cpu["cpu-index"])?,
                thread_id: number(&cpu["thread-id"])?,
            })
        };
        answer
            .as_array()
            .and_then(|cpus| cpus.iter().map(vcpu).collect())
            .ok_or_else(|| VmError::QmpProtocol {
                what: "query-cpus-fast does not list CPUs and threads".into(),
            })
    }

    /// Sets the balloon target as the memory left to the guest; QEMU limits it to the VM's RAM without virtio-mem. The
    /// guest follows later, if it has a driver.
    ///
    /// QEMU refuses if there is no balloon (class `DeviceNotActive`).
    pub fn set_balloon(&mut self, target_bytes: u64) -> Result<(), VmError> {
        self.execute("balloon", json!({ "value": target_bytes }))
            .map(drop)
    }

    /// Returns the guest's memory: its RAM without virtio-mem, less the balloon's size as reported by the guest.
    ///
    /// QEMU refuses if there is no balloon (class `DeviceNotActive`).
    pub fn balloon_actual_bytes(&mut self) -> Result<u64, VmError> {
        let answer = self.execute("query-balloon", Value::Null)?;
        // Negative if a guest claims a balloon larger than its RAM.
        answer["actual"]
            .as_u64()
            .ok_or_else(|| VmError::QmpProtocol {
                what: "query-balloon does not return the guest's memory".into(),
            })
    }

    /// Returns the VM's RAM, including plugged RAM. Persistent memory is none.
    pub fn ram(&mut self) -> Result<VmRam, VmError> {
        let summary = self.execute("query-memory-size-summary", Value::Null)?;
        let devices = self.execute("query-memory-devices", Value::Null)?;
        let size_of = |kind: &str| {
            let devices = devices.as_array()?.iter();
            let mut devices = devices.filter(|device| device["type"] == kind);
            devices.try_fold(0_u64, |sum, device| {
                sum.checked_add(device["data"]["size"].as_u64()?)
            })
        };
        let ram = || {
            let base = summary["base-memory"].as_u64()?;
            let virtio_mem_bytes = size_of("virtio-mem")?;
            let fixed_bytes = base.checked_add(size_of("dimm")?)?;
            fixed_bytes.checked_add(virtio_mem_bytes)?;
            Some(VmRam {
                fixed_bytes,
                virtio_mem_bytes,
            })
        };
        ram().ok_or_else(|| VmError::QmpProtocol {
            what:
                "query-memory-size-summary and query-memory-devices do not return the size of RAM"
                    .into(),
        })
    }

    /// Finds the path of the VM's balloon in QEMU's tree of objects; `None` if it has none.
    pub fn find_balloon(&mut self) -> Result<Option<String>, VmError> {
        for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let listing = self.execute("qom-list", json!({ "path": folder }))?;
            let found = listing.as_array().into_iter().flatten().find_map(|child| {
                let kind = child["type"].as_str()?;
                let name = child["name"].as_str()?;
                kind.starts_with("child<virtio-balloon").then_some(name)
            });
            if let Some(name) = found {
                return Ok(Some(format!("{folder}/{name}")));
            }
        }
        Ok(None)
    }

    /// Returns the interval at which the balloon at `path` requests its guest's statistics, in s; 0 for never.
    pub fn stats_interval_s(&mut self, path: &str) -> Result<u64, VmError> {
        let property = json!({ "path": path, "property": STATS_INTERVAL });
        let answer = self.execute("qom-get", property)?;
        answer.as_u64().ok_or_else(|| VmError::QmpProtocol {
            what: format!("{STATS_INTERVAL} is {answer}"),
        })
    }

    /// Sets the interval at which the balloon at `path` requests its guest's statistics, in s; 0 for never.
    pub fn set_stats_interval_s(&mut self, path: &str, interval_s: u64) -> Result<(), VmError> {
        let property = json!({ "path": path, "property": STATS_INTERVAL, "value": interval_s });
        self.execute("qom-set", property).map(drop)
    }

    /// Returns the newest statistics that the guest reported to the balloon at `path`; `None` if it never reported any,
    /// as without a driver.
    pub fn guest_stats(&mut self, path: &str) -> Result<Option<GuestStats>, VmError> {
        let property = json!({ "path": path, "property": "guest-stats" });
        let answer = self.execute("qom-get", property)?;
        GuestStats::of_qmp(&answer).ok_or_else(|| VmError::QmpProtocol {
            what: "guest-stats has no time of its last update".into(),
        })
    }

    /// Returns the reads of the VM's disks since its start; `None` if QEMU serves none of them itself.
    pub fn block_reads(&mut self) -> Result<Option<BlockReads>, VmError> {
        let answer = self.execute("query-blockstats", Value::Null)?;
        Ok(BlockReads::of_qmp(&answer))
    }

    /// Waits for a complete line and parses it.
    fn receive(&mut self, deadline: Instant) -> Result<Value, Receive> {
        let mut searched = 0;
        loop {
            let newline = self.received[searched..]
                .iter()
                .position(|&byte| byte == b'\n');
            if let Some(at) = newline {
                let line: Vec<u8> = self.received.drain(..=searched + at).collect();
                let value: Value = serde_json::from_slice(&line)
                    .map_err(|error| Receive::Protocol(error.to_string()))?;
                return match value {
                    Value::Object(_) => Ok(value),
                    _ => Err(Receive::Protocol("a line is no object".into())),
                };
            }
            searched = self.received.len();
            if searched > LINE_BYTES_MAX {
                return Err(Receive::Protocol(format!(
                    "a line has more than {LINE_BYTES_MAX} bytes"
                )));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Receive::Io(io::ErrorKind::TimedOut.into()));
            }
            self.stream.set_read_timeout(Some(left))?;
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(Receive::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(read) => self.received.extend(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Why no line was received.
enum Receive {
    Io(io::Error),
    Protocol(String),
}

impl From<io::Error> for Receive {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::net::UnixListener;
    use std::path::PathBuf;
    use std::thread;

    use crate::identity::{AllowedUsers, Listener};

    const TIMEOUT: Duration = Duration::from_secs(5);

    /// A monitor that sends `greeting`, then one of `answers` for each line it receives,
    /// and then nothing more.
    fn monitor(greeting: &str, answers: &[&str]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        let greeting = greeting.to_owned();
        let answers: Vec<String> = answers.iter().map(|&answer| answer.to_owned()).collect();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
            let mut send = |text: &str| drop(stream.write_all(text.as_bytes()));
            send(&greeting);
            for answer in answers {
                lines.next();
                send(&answer);
            }
            while lines.next().is_some_and(|line| line.is_ok()) {}
        });
        (folder, socket)
    }

    const GREETING: &str = "{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n";
    const AGREED: &str = "{\"return\": {}, \"id\": 0}\r\n";

    #[test]
    fn an_answer_is_found_among_events_and_late_answers() {
        let answer = "{\"event\": \"STOP\", \"timestamp\": {}}\n\
             {\"return\": {\"late\": true}, \"id\": 77}\n\
             {\"return\": {\"running\": false, \"status\": \"paused\"}, \"id\": 1}\n";
        let (_folder, socket) = monitor(GREETING, &[AGREED, answer]);
        let mut qmp = Qmp::connect(&socket, TIMEOUT).unwrap();
        let expected = RunState {
            running: false,
            status: "paused".into(),
        };
        assert_eq!(qmp.status().unwrap(), expected);
    }

    #[test]
    fn a_refusal_carries_qemus_words() {
        let refusal =
            "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"no such\"}, \"id\": 1}\n";
        let (_folder, socket) = monitor(GREETING, &[AGREED, refusal]);
        let error = Qmp::connect(&socket, TIMEOUT).unwrap().stop().unwrap_err();
        let expected = "QMP command \"stop\" was refused: no such (CommandNotFound)";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_monitor_that_is_taken_does_not_keep_us() {
        let (_folder, socket) = monitor("", &[]);
        let error = Qmp::connect(&socket, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, VmError::QmpTaken { .. }), "{error}");
    }

    #[test]
    fn a_monitor_that_is_taken_keeps_no_free_one_from_use() {
        let of_us = |socket: &Path| PeerSocket {
            path: socket.to_owned(),
            root: None,
            listener: Listener::Users(AllowedUsers::default()),
        };
        let (folder, taken) = monitor("", &[]);
        let (_folder, free) = monitor(GREETING, &[AGREED, AGREED]);
        let absent = folder.path().join("absent");
        let mut sockets = [&absent, &taken, &free].map(|socket| of_us(socket));
        Qmp::connect_to(&mut sockets, TIMEOUT).unwrap();
        assert_eq!(
            sockets,
            [&free, &absent, &taken].map(|socket| of_us(socket))
        );
        // That one served its one client.
        let (_folder, taken) = monitor("", &[]);
        let mut sockets = [&absent, &taken].map(|socket| of_us(socket));
        let error = Qmp::connect_to(&mut sockets, Duration::from_millis(50)).unwrap_err();
        let text = error.to_string();
        assert!(error.took_its_time(), "{text}");
        assert!(
            text.starts_with("no monitor of 2 can be used: no QMP monitor answers at /")
                && text.contains("absent: No such file")
                && text.contains("; the monitor at /")
                && text.contains("sends no greeting"),
            "{text}"
        );
        let none = Qmp::connect_to(&mut [], TIMEOUT).unwrap_err();
        assert!(matches!(none, VmError::NoMonitor), "{none}");
    }

    #[test]
    fn a_monitor_whose_queue_is_full_does_not_keep_us() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let _listener = UnixListener::bind(&socket).unwrap();
        let mut waiting = Vec::new();
        let error = loop {
            match connect_within(&socket, Duration::from_millis(1)) {
                Ok(stream) => waiting.push(stream),
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        let error = Qmp::connect(&socket, Duration::from_millis(50)).unwrap_err();
        assert!(matches!(error, VmError::QmpTaken { .. }), "{error}");
    }

    #[test]
    fn a_balloon_is_asked_and_told() {
        let answers = [
            AGREED,
            "{\"return\": {\"base-memory\": 201326592, \"plugged-memory\": 7340032}, \"id\": 1}\n",
            "{\"return\": [{\"type\": \"dimm\", \"data\": {\"size\": 1048576}}, \
              {\"type\": \"nvdimm\", \"data\": {\"size\": 2097152}}, \
              {\"type\": \"virtio-mem\", \"data\": {\"size\": 4194304, \"max-size\": 1073741824}}], \"id\": 2}\n",
            "{\"return\": [{\"name\": \"type\", \"type\": \"string\"}], \"id\": 3}\n",
            "{\"return\": [{\"name\": \"device[0]\", \"type\": \"child<virtio-balloon-pci>\"}], \"id\": 4}\n",
            "{\"return\": 0, \"id\": 5}\n",
            "{\"return\": {\"stats\": {}, \"last-update\": 0}, \"id\": 6}\n",
            "{\"return\": {\"actual\": 104857600}, \"id\": 7}\n",
            "{\"return\": {\"actual\": -4096}, \"id\": 8}\n",
        ];
        let (_folder, socket) = monitor(GREETING, &answers);
        let mut qmp = Qmp::connect(&socket, TIMEOUT).unwrap();
        let ram = qmp.ram().unwrap();
        assert_eq!(
            (ram.fixed_bytes, ram.virtio_mem_bytes),
            (193 << 20, 4 << 20)
        );
        let path = qmp.find_balloon().unwrap().unwrap();
        assert_eq!(path, "/machine/peripheral-anon/device[0]");
        assert_eq!(qmp.stats_interval_s(&path).unwrap(), 0);
        assert_eq!(qmp.guest_stats(&path).unwrap(), None);
        assert_eq!(qmp.balloon_actual_bytes().unwrap(), 100 << 20);
        let error = qmp.balloon_actual_bytes().unwrap_err();
        assert!(matches!(error, VmError::QmpProtocol { .. }), "{error}");
    }

    #[test]
    fn a_command_without_an_answer_ends_by_time() {
        let (_folder, socket) = monitor(GREETING, &[AGREED, "{\"ret"]);
        let mut qmp = Qmp::connect(&socket, Duration::from_secs(1)).unwrap();
        let error = qmp.cont().unwrap_err();
        assert!(matches!(error, VmError::QmpTimeout { .. }), "{error}");
    }

    #[test]
    fn what_is_not_qmp_is_refused() {
        let endless = "x".repeat(LINE_BYTES_MAX + 8192);
        for greeting in ["SSH-2.0\n", "[]\n", "{}\n", "\u{0}\n", &endless] {
            let (_folder, socket) = monitor(greeting, &[]);
            let error = Qmp::connect(&socket, TIMEOUT).unwrap_err();
            assert!(matches!(error, VmError::QmpProtocol { .. }), "{error}");
        }
    }
}
