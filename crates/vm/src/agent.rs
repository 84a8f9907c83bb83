//! Reads files of a guest through the agent that runs in it (qemu-ga).
//!
//! An agent's answers come from inside the VM and are not trusted: waits, lines and files are bounded.
//! Agents of some distributions refuse to read files; the error repeats their message.
//!
//! Source: QEMU, docs/interop/qemu-ga-ref.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};

use crate::identity::connect_within;
use crate::{KernelMemory, VmError};

/// Maximum length of a line; a chunk of a file takes a third more than its bytes.
const LINE_BYTES_MAX: usize = 256 << 10;
/// Maximum bytes read of a file at once, and in all: files of `/proc` have a few KiB.
const CHUNK_BYTES: usize = 64 << 10;
const FILE_BYTES_MAX: usize = 1 << 20;
/// First byte of an answer to `guest-sync-delimited`; no earlier answer follows it.
const SYNC: u8 = 0xff;

/// A connection to the agent in a guest. It serves one client at a time.
#[derive(Debug)]
pub struct GuestAgent {
    stream: UnixStream,
    socket: PathBuf,
    /// Received bytes of an incomplete line.
    received: Vec<u8>,
    timeout: Duration,
}

impl GuestAgent {
    /// Connects and waits until an agent answers; `timeout` is the time limit of every later command, too.
    ///
    /// # Errors
    ///
    /// [`VmError::Agent`]: no agent answers, another client is connected, or no agent runs in the guest.
    pub fn connect(socket: &Path, timeout: Duration) -> Result<Self, VmError> {
        let stream = connect_within(socket, timeout).map_err(|error| VmError::Agent {
            socket: socket.to_owned(),
            what: error.to_string(),
        })?;
        let mut agent = Self {
            stream,
            socket: socket.to_owned(),
            received: Vec::new(),
            timeout,
        };
        agent.synchronize().map_err(|what| agent.error(what))?;
        Ok(agent)
    }

    /// Returns the memory statistics of the guest's kernel.
    ///
    /// # Errors
    ///
    /// [`VmError::Agent`].
    pub fn memory(&mut self) -> Result<KernelMemory, VmError> {
        let meminfo = self.read("/proc/meminfo")?;
        let vmstat = self.read("/proc/vmstat")?;
        KernelMemory::of_proc(&meminfo, &vmstat)
            .ok_or_else(|| self.error("its /proc has no memory counts".into()))
    }

    /// Reads a file of the guest, at most 1 MiB of it.
    ///
    /// # Errors
    ///
    /// [`VmError::Agent`]; a handle may stay open in the agent if the connection broke.
    pub fn read(&mut self, path: &str) -> Result<String, VmError> {
        let read = self.read_whole(path);
        read.map_err(|what| self.error(format!("{path}: {what}")))
    }

    fn read_whole(&mut self, path: &str) -> Result<String, String> {
        let handle = self.execute("guest-file-open", &json!({ "path": path, "mode": "r" }))?;
        let mut bytes = Vec::new();
        let end = loop {
            let chunk = json!({ "handle": handle, "count": CHUNK_BYTES });
            let answer = match self.execute("guest-file-read", &chunk) {
                Ok(answer) => answer,
                Err(what) => break Err(what),
            };
            let part = answer["buf-b64"].as_str().unwrap_or_default();
            match STANDARD.decode(part) {
                Ok(part) => bytes.extend(part),
                Err(error) => break Err(error.to_string()),
            }
            if bytes.len() > FILE_BYTES_MAX {
                break Err(format!("it has more than {FILE_BYTES_MAX} bytes"));
            }
            if part.is_empty() || answer["eof"] == true {
                break Ok(());
            }
        };
        let closed = self.execute("guest-file-close", &json!({ "handle": handle }));
        end.and(closed)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Ensures that the next line answers the next command, whatever was sent before.
    fn synchronize(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + self.timeout;
        let id = std::process::id();
        let request = json!({ "execute": "guest-sync-delimited", "arguments": { "id": id } });
        self.send(&[&[SYNC], format!("{request}\n").as_bytes()].concat())?;
        loop {
            let line = self.line(deadline)?;
            let Some(at) = line.iter().rposition(|&byte| byte == SYNC) else {
                continue;
            };
            let answer: Option<Value> = serde_json::from_slice(&line[at + 1..]).ok();
            if answer.is_some_and(|answer| answer["return"] == id) {
                return Ok(());
            }
        }
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, String> {
        let deadline = Instant::now() + self.timeout;
        let request = json!({ "execute": command, "arguments": arguments });
        self.send(format!("{request}\n").as_bytes())?;
        let line = self.line(deadline)?;
        let mut answer: Value = serde_json::from_slice(&line).map_err(|error| error.to_string())?;
        match answer.get_mut("return") {
            Some(value) => Ok(value.take()),
            None => Err(match answer["error"]["desc"].as_str() {
                Some(refusal) => refusal.to_owned(),
                None => format!("{command} was not answered"),
            }),
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), String> {
        self.stream
            .set_write_timeout(Some(self.timeout.max(Duration::from_millis(1))))
            .and_then(|()| self.stream.write_all(bytes))
            .map_err(|error| error.to_string())
    }

    /// Waits for a complete line.
    fn line(&mut self, deadline: Instant) -> Result<Vec<u8>, String> {
        loop {
            if let Some(at) = self.received.iter().position(|&byte| byte == b'\n') {
                return Ok(self.received.drain(..=at).collect());
            }
            if self.received.len() > LINE_BYTES_MAX {
                return Err(format!("a line has more than {LINE_BYTES_MAX} bytes"));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let silent = || format!("no answer within {:?}: does an agent run?", self.timeout);
            if left.is_zero() {
                return Err(silent());
            }
            let mut chunk = [0; 4096];
            let read = self
                .stream
                .set_read_timeout(Some(left))
                .and_then(|()| self.stream.read(&mut chunk));
            match read {
                Ok(0) => return Err("the connection was closed".into()),
                Ok(read) => self.received.extend(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(silent()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }

    fn error(&self, what: String) -> VmError {
        VmError::Agent {
            socket: self.socket.clone(),
            what,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader};
    use std::os::unix::net::UnixListener;
    use std::thread;

    const TIMEOUT: Duration = Duration::from_secs(5);

    /// An agent that answers its first line with noise and the synchronisation, and others with `answers`.
    fn agent(answers: Vec<String>) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent");
        let listener = UnixListener::bind(&socket).unwrap();
        thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut lines = BufReader::new(stream.try_clone().unwrap());
            let mut next = || {
                let mut line = Vec::new();
                let read = lines.read_until(b'\n', &mut line).unwrap_or(0);
                (read > 0).then_some(line)
            };
            let first = next().unwrap();
            let request: Value = serde_json::from_slice(&first[1..]).unwrap();
            let id = &request["arguments"]["id"];
            let greeting = format!("{{\"return\": {{}}}}\n\u{0}{{\"return\": {id}}}\n");
            let greeting: Vec<u8> = greeting
                .bytes()
                .map(|byte| if byte == 0 { SYNC } else { byte })
                .collect();
            stream.write_all(&greeting).unwrap();
            for answer in answers {
                if next().is_none() {
                    return;
                }
                stream.write_all(answer.as_bytes()).unwrap();
            }
            while next().is_some() {}
        });
        (folder, socket)
    }

    fn file(text: &str) -> Vec<String> {
        let (first, second) = text.split_at(text.len() / 2);
        let chunk = |part: &str, eof| {
            let part = STANDARD.encode(part);
            format!("{{\"return\": {{\"buf-b64\": \"{part}\", \"eof\": {eof}}}}}\n")
        };
        vec![
            "{\"return\": 7}\n".into(),
            chunk(first, false),
            chunk(second, true),
            "{\"return\": {}}\n".into(),
        ]
    }

    #[test]
    fn a_kernels_words_come_through_the_agent() {
        let meminfo = file("MemAvailable: 8 kB\nCommitted_AS: 4 kB\n");
        let vmstat = file("workingset_refault 1\npswpin 2\npgmajfault 3\n");
        let (_folder, socket) = agent([meminfo, vmstat].concat());
        let mut agent = GuestAgent::connect(&socket, TIMEOUT).unwrap();
        let expected = KernelMemory {
            committed_bytes: 4096,
            available_bytes: 8192,
            swap_free_bytes: 0,
            refaulted_pages: 1,
            swapped_in_pages: 2,
            major_faults: 3,
        };
        assert_eq!(agent.memory().unwrap(), expected);
    }

    #[test]
    fn a_refusal_carries_the_agents_words() {
        let refusal =
            "{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"has been disabled\"}}\n";
        let (_folder, socket) = agent(vec![refusal.into()]);
        let mut agent = GuestAgent::connect(&socket, TIMEOUT).unwrap();
        let error = agent.memory().unwrap_err().to_string();
        assert!(
            error.ends_with("/proc/meminfo: has been disabled"),
            "{error}"
        );
    }

    #[test]
    fn what_is_no_answer_is_an_error_and_ends() {
        let endless = "x".repeat(LINE_BYTES_MAX + 8192);
        let chunk = "{\"return\": {\"buf-b64\": \"*\"}}\n";
        for answers in [
            vec!["[]\n".to_owned()],
            vec![endless],
            vec!["{\"return\": 1}\n".to_owned(), chunk.to_owned()],
            vec!["{\"ret".to_owned()],
        ] {
            let (_folder, socket) = agent(answers);
            let mut agent = GuestAgent::connect(&socket, TIMEOUT).unwrap();
            agent.timeout = Duration::from_millis(200);
            assert!(matches!(agent.memory(), Err(VmError::Agent { .. })));
        }
    }

    #[test]
    fn a_guest_without_an_agent_is_told_so() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("agent");
        let _listener = UnixListener::bind(&socket).unwrap();
        let error = GuestAgent::connect(&socket, Duration::from_millis(50)).unwrap_err();
        assert!(error.to_string().contains("does an agent run"), "{error}");
    }
}
