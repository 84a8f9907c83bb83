//! Serves disks: `serve --disk IMAGE,SOCKET[,QUEUES] ... [--read-only] [--control SOCKET] [--cache MIB] [--write delayed]
//! [--mode none|exclusive|from-storage] [--state FOLDER] [--direct auto|on|off] [--stat-every SECONDS]`. Ends with the
//! last byte of standard input if that is a pipe and `--until-eof` is given.

use std::io::Read as _;
use std::path::PathBuf;
use std::time::Duration;

use plimsoll_disk::{
    CacheMode, Direct, DiskOptions, EngineOptions, Machine, MachineOptions, Socket, WriteMode,
};

fn main() {
    let mut disks = Vec::new();
    let mut control = None;
    let mut state = None;
    let mut every = None;
    let mut until_eof = false;
    let mut engine = EngineOptions {
        mode: CacheMode::None,
        cache_bytes: 0,
        cache_bytes_max: 4 << 30,
        write: WriteMode::Through,
        dirty_pages_max: 0,
        dirty_age_max: Duration::from_secs(30),
        hash_check: true,
        newest_check: true,
        verify: false,
    };
    let mut direct = Direct::Auto;
    let mut read_only = false;
    let mut arguments = std::env::args().skip(1);
    while let Some(flag) = arguments.next() {
        let mut value = || arguments.next().expect("a value");
        match flag.as_str() {
            "--disk" => {
                let value = value();
                let mut parts = value.split(',');
                let image = PathBuf::from(parts.next().expect("an image"));
                let socket = Socket::Path(PathBuf::from(parts.next().expect("a socket")));
                let queues = parts
                    .next()
                    .map_or(4, |queues| queues.parse().expect("a number"));
                disks.push((image, socket, queues));
            }
            "--control" => control = Some(Socket::Path(PathBuf::from(value()))),
            "--cache" => {
                engine.cache_bytes = value().parse::<u64>().expect("a number") << 20;
                engine.mode = CacheMode::Exclusive;
                engine.dirty_pages_max = engine.cache_bytes / 4096 / 4;
            }
            "--mode" => {
                engine.mode = match value().as_str() {
                    "none" => CacheMode::None,
                    "from-storage" => CacheMode::FromStorage,
                    _ => CacheMode::Exclusive,
                }
            }
            "--write" => {
                if value() == "delayed" {
                    engine.write = WriteMode::Delayed;
                }
            }
            "--state" => state = Some(PathBuf::from(value())),
            "--direct" => {
                direct = match value().as_str() {
                    "on" => Direct::On,
                    "off" => Direct::Off,
                    _ => Direct::Auto,
                }
            }
            "--stat-every" => every = Some(Duration::from_secs(value().parse().expect("a number"))),
            "--read-only" => read_only = true,
            "--until-eof" => until_eof = true,
            "--no-hash-check" => engine.hash_check = false,
            "--no-newest-check" => engine.newest_check = false,
            "--verify" => engine.verify = true,
            other => panic!("unknown flag {other}"),
        }
    }
    let disks = (0..)
        .zip(disks)
        .map(|(number, (image, socket, queues))| DiskOptions {
            image,
            socket,
            read_only,
            serial: format!("plimsoll-{number}"),
            queues,
            direct,
        })
        .collect();
    let options = MachineOptions {
        disks,
        control,
        engine,
        observer: None,
        second_chance: None,
        state,
        sweep: true,
    };
    let mut machine = Machine::new(options).unwrap_or_else(|error| {
        eprintln!(
            "{error}: {:?}",
            std::error::Error::source(&error).map(ToString::to_string)
        );
        std::process::exit(1);
    });
    if let Some(every) = every {
        let handle = machine.handle();
        std::thread::spawn(move || {
            while let Ok(stats) = handle.stats() {
                println!("{}", serde_json::to_string(&stats).expect("JSON"));
                std::thread::sleep(every);
            }
        });
    }
    if until_eof {
        let handle = machine.handle();
        std::thread::spawn(move || {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            handle.stop()
        });
    }
    if let Err(error) = machine.run() {
        eprintln!(
            "{error}: {:?}",
            std::error::Error::source(&error).map(ToString::to_string)
        );
        std::process::exit(1);
    }
}
