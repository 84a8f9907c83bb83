//! A monitor with configurable behaviour, one client at a time, as QEMU does.
#![allow(dead_code, reason = "each test uses its part")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use plimsoll_vm::{AllowedUsers, Listener, PeerSocket};
use serde_json::{Value, json};

/// How a command is answered.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Answer {
    /// As QEMU does.
    Right,
    /// Not at all.
    Hang,
    /// By the end of the connection, in the middle of an answer.
    Close,
    /// With this line.
    Text(&'static str),
    /// As QEMU does, but byte by byte, each after so long.
    Slowly(Duration),
}

/// State and behaviour of the monitor.
#[derive(Debug)]
pub struct State {
    pub ram_bytes: i64,
    /// Plugged virtio-mem, which neither of the two others contains.
    pub virtio_mem_bytes: i64,
    pub actual_bytes: i64,
    /// The state in which its processors do not run.
    pub stopped: Option<&'static str>,
    /// Whether a balloon is there.
    pub device: bool,
    /// Memory that the guest manages.
    pub total_bytes: u64,
    /// Time of the guest's last statistics; 0 for never.
    pub told_unix_s: u64,
    pub interval_s: u64,
    /// The command, or `greeting`, that is answered differently, and its answer.
    pub quirk: Option<(&'static str, Answer)>,
    /// All commands that came, with their arguments.
    pub commands: Vec<(String, Value)>,
}

/// A monitor, which runs until the test's process ends.
pub struct Monitor {
    pub socket: PathBuf,
    state: Arc<Mutex<State>>,
    folder: Option<tempfile::TempDir>,
}

pub const GREETING: &str = "greeting";

impl Monitor {
    /// A monitor of a VM of 512 MiB whose balloon is empty, and whose guest has just reported its statistics.
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("qmp");
        let listener = UnixListener::bind(&socket).unwrap();
        let state = Arc::new(Mutex::new(State {
            ram_bytes: 512 << 20,
            virtio_mem_bytes: 0,
            actual_bytes: 512 << 20,
            stopped: None,
            device: true,
            total_bytes: 480 << 20,
            told_unix_s: now_unix_s(),
            interval_s: 0,
            quirk: None,
            commands: Vec::new(),
        }));
        let served = Arc::clone(&state);
        thread::spawn(move || {
            for stream in listener.incoming() {
                // A client that closes the connection is not an error here.
                let _ = converse(stream.unwrap(), &served);
            }
        });
        Self {
            socket,
            state,
            folder: Some(folder),
        }
    }

    /// Its socket, at which processes of this user may listen.
    pub fn peer(&self) -> PeerSocket {
        peer(&self.socket)
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// The VM ends: its socket is gone.
    pub fn end(&mut self) {
        self.folder = None;
    }

    /// Sizes that the balloon was set to.
    pub fn targets(&self) -> Vec<u64> {
        let state = self.state();
        let told = state.commands.iter().filter(|(name, _)| name == "balloon");
        told.map(|(_, arguments)| arguments["value"].as_u64().unwrap())
            .collect()
    }
}

/// A socket at which processes of this user may listen.
pub fn peer(path: &Path) -> PeerSocket {
    PeerSocket {
        path: path.to_owned(),
        root: None,
        listener: Listener::Users(AllowedUsers::default()),
    }
}

pub fn now_unix_s() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    now.unwrap().as_secs()
}

fn converse(mut stream: UnixStream, state: &Mutex<State>) -> std::io::Result<()> {
    let quirk = |name: &str| {
        let quirk = state.lock().unwrap().quirk;
        quirk.map_or(Answer::Right, |(of, answer)| match of == name {
            true => answer,
            false => Answer::Right,
        })
    };
    let lines = BufReader::new(stream.try_clone()?).lines();
    let greeting = json!({ "QMP": { "version": {}, "capabilities": [] } });
    if !send(&mut stream, &greeting, quirk(GREETING))? {
        return Ok(());
    }
    for line in lines {
        let request: Value = serde_json::from_str(&line?)?;
        let name = request["execute"].as_str().unwrap().to_owned();
        let arguments = request["arguments"].clone();
        let result = {
            let mut state = state.lock().unwrap();
            state.commands.push((name.clone(), arguments.clone()));
            state.answer(&name, &arguments)
        };
        let mut answer = match result {
            Ok(value) => json!({ "return": value }),
            Err((class, text)) => json!({ "error": { "class": class, "desc": text } }),
        };
        answer["id"] = request["id"].clone();
        if !send(&mut stream, &answer, quirk(&name))? {
            return Ok(());
        }
    }
    Ok(())
}

/// Whether the conversation goes on.
fn send(stream: &mut UnixStream, answer: &Value, how: Answer) -> std::io::Result<bool> {
    let line = format!("{answer}\r\n");
    match how {
        Answer::Right => stream.write_all(line.as_bytes())?,
        Answer::Text(text) => stream.write_all(text.as_bytes())?,
        // Until the other end goes.
        Answer::Hang => {
            std::io::copy(stream, &mut std::io::sink())?;
        }
        Answer::Close => {
            stream.write_all(&line.as_bytes()[..line.len() / 2])?;
            return Ok(false);
        }
        Answer::Slowly(pause) => {
            for byte in line.bytes() {
                stream.write_all(&[byte])?;
                thread::sleep(pause);
            }
        }
    }
    Ok(true)
}

impl State {
    fn answer(
        &mut self,
        name: &str,
        arguments: &Value,
    ) -> Result<Value, (&'static str, &'static str)> {
        const BALLOON: &str = "/machine/peripheral/balloon0";
        let no_balloon = ("DeviceNotActive", "No balloon device has been activated");
        let property = arguments["property"].as_str().unwrap_or_default();
        match name {
            "qmp_capabilities" => Ok(json!({})),
            "query-memory-size-summary" => Ok(json!({ "base-memory": self.ram_bytes })),
            "query-memory-devices" => Ok(json!([
                { "type": "virtio-mem", "data": { "size": self.virtio_mem_bytes } },
            ])),
            "query-blockstats" => Ok(json!([
                { "stats": { "rd_operations": 40, "rd_total_time_ns": 20_000_000 } },
            ])),
            "query-status" => Ok(json!({
                "running": self.stopped.is_none(),
                "status": self.stopped.unwrap_or("running"),
            })),
            "balloon" | "query-balloon" if !self.device => Err(no_balloon),
            "balloon" => Ok(json!({})),
            "query-balloon" => Ok(json!({ "actual": self.actual_bytes })),
            "qom-list" => Ok(json!([{ "name": "balloon0", "type": "child<virtio-balloon-pci>" }])),
            "qom-set" if arguments["path"] == BALLOON => {
                self.interval_s = arguments["value"].as_u64().unwrap();
                Ok(json!({}))
            }
            "qom-get" if property == "guest-stats-polling-interval" => Ok(json!(self.interval_s)),
            "qom-get" if property == "guest-stats" => Ok(json!({
                "stats": { "stat-total-memory": self.total_bytes, "stat-free-memory": 1 << 20, "stat-swap-in": u64::MAX },
                "last-update": self.told_unix_s,
            })),
            _ => Err(("CommandNotFound", "there is no such command")),
        }
    }
}
