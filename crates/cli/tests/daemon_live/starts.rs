//! Daemons without VMs: what hinders a start, what does not, and what is served where.

use std::fs;
use std::net::TcpListener;
use std::process::Command;

use plimsoll_protocol::decision::Mode;

use rustix::process::Signal;

use crate::rig::{DaemonDirectory, beside_another, get_tcp, signal};

#[test]
fn a_wrong_configuration_is_refused_with_its_line() {
    beside_another(|| {
        let place = DaemonDirectory::new();
        place.configure("mode = \"observe\"\nturn_intervall = \"2s\"\n");
        let said = place.refused();
        assert!(
            said.contains("test.toml:2: unknown key 'turn_intervall'"),
            "{said}"
        );
        place.configure("turn_interval = \"2h\"\n");
        let said = place.refused();
        assert!(
            said.contains("test.toml:1: turn_interval = \"2h\""),
            "{said}"
        );
        // Nothing was begun.
        assert!(!place.path("socket").exists() && !place.path("history.redb").exists());
    });
}

#[test]
fn a_second_daemon_is_refused_and_the_first_goes_on() {
    beside_another(|| {
        let place = DaemonDirectory::new();
        let daemon = place.start("");
        let refused = |said: &str, word: &str| assert!(said.contains(word), "{said}");
        refused(&place.refused(), "another plimsolld has this history open");
        place.configure("[history]\nfile = \"none\"\n");
        refused(&place.refused(), "another plimsolld serves there");
        place.configure(&format!(
            "[serve]\nsocket = \"{}\"\n",
            place.path("other").display()
        ));
        refused(&place.refused(), "another plimsolld has this history open");
        daemon.pass_turns(2);
        let (status, _) = daemon.end_by(Signal::INT);
        assert_eq!(status.code(), Some(0));
        assert!(!place.path("socket").exists());
        // Whoever was killed leaves a socket behind, which the next one takes over.
        place.start("").end_by(Signal::KILL);
        assert!(place.path("socket").exists());
        place.start("").pass_turns(1);
    });
}

#[test]
fn a_torn_history_is_set_aside_and_nothing_is_moved_until_resumed() {
    beside_another(|| {
        let place = DaemonDirectory::new();
        place.start("").end_by(Signal::TERM);
        let history = place.path("history.redb");
        let whole = fs::read(&history).unwrap();
        fs::write(&history, &whole[..whole.len() / 3]).unwrap();
        let daemon = place.start("mode = \"act\"\n");
        assert!(daemon.host().paused);
        daemon.until_logged("so it is paused; resume it");
        daemon.until_logged(".broken-");
        let names = fs::read_dir(history.parent().unwrap()).unwrap();
        let aside = names
            .map(|entry| entry.unwrap().path())
            .find(|path| path.to_string_lossy().contains("history.redb.broken-"))
            .unwrap();
        assert_eq!(fs::read(aside).unwrap(), &whole[..whole.len() / 3]);
        daemon.end_by(Signal::TERM);
        let daemon = place.start("mode = \"act\"\n");
        let host = daemon.host();
        assert!(host.paused, "nobody has resumed it");
        let is_told = host
            .warnings
            .iter()
            .any(|warning| warning.contains("the history is lost"));
        assert!(is_told, "{:?}", host.warnings);
        daemon.client().resume().unwrap();
        daemon.end_by(Signal::TERM);
        assert!(!place.start("mode = \"act\"\n").host().paused);
    });
}

#[test]
fn a_full_disk_under_the_history_stops_nothing() {
    beside_another(|| {
        let place = DaemonDirectory::new();
        let disk = place.path("small");
        fs::create_dir(&disk).unwrap();
        let mount = |options: &str| {
            let mounted = Command::new("mount")
                .args(["-t", "tmpfs", "-o", options, "none"])
                .arg(&disk)
                .status();
            assert!(mounted.unwrap().success());
        };
        mount("size=256k");
        fs::write(disk.join("filler"), vec![1; 255 << 10]).unwrap();
        let keys = format!("[history]\nfile = \"{}/history.redb\"\n", disk.display());
        let daemon = place.start(&keys);
        daemon.client().pause().unwrap();
        let host = daemon.pass_turns(2);
        assert!(host.paused);
        let told = |host: &plimsoll_protocol::vm::HostView| {
            host.warnings
                .iter()
                .any(|warning| warning.contains("history"))
        };
        assert!(told(&host), "{:?}", host.warnings);
        daemon.until_logged("history");
        // As soon as there is room, it is on disk again; that is tried once a minute, and at the end.
        mount("remount,size=64m");
        let (status, _) = daemon.end_by(Signal::TERM);
        assert_eq!(status.code(), Some(0));
        let daemon = place.start(&keys);
        assert!(!told(&daemon.host()), "{:?}", daemon.host().warnings);
        daemon.end_by(Signal::TERM);
        assert!(
            Command::new("umount")
                .arg(&disk)
                .status()
                .unwrap()
                .success()
        );
    });
}

#[test]
fn a_bad_file_changes_nothing_at_a_reload() {
    beside_another(|| {
        let place = DaemonDirectory::new();
        let daemon = place.start("mode = \"advise\"\n");
        place.configure("mode = \"move\"\n");
        signal(daemon.pid(), Signal::HUP);
        daemon.until_logged("the old one holds");
        daemon.until_logged("test.toml:1: mode = \"move\"");
        let refused = daemon.client().reload().unwrap_err().to_string();
        assert!(refused.contains("the old configuration holds"), "{refused}");
        assert_eq!(daemon.pass_turns(2).mode, Mode::Advise);
        place.configure("mode = \"act\"\n[history]\nfile = \"none\"\n");
        signal(daemon.pid(), Signal::HUP);
        daemon.until("the new mode", |host| host.mode == Mode::Act);
        daemon.until_logged("these take effect at the next start: history");
    });
}

#[test]
fn the_page_is_served_over_tcp_only_when_asked_for() {
    beside_another(|| {
        let place = DaemonDirectory::new();
        // Bound for a moment to find one that is free.
        let free = TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let address = free.to_string();
        let daemon = place.start("");
        let tcp = fs::read_to_string(format!("/proc/{}/net/tcp", daemon.pid())).unwrap();
        let port = format!(":{:04X} ", free.port());
        assert!(!tcp.contains(&port), "{tcp}");
        assert!(get_tcp(&address, "/").is_err());
        daemon.end_by(Signal::TERM);

        place.configure(&format!("[tcp]\nlisten = \"{address}\"\n"));
        let said = place.refused();
        assert!(said.contains("tcp.listen: needs tcp.token_file"), "{said}");
        let daemon = place.start(&format!(
            "[tcp]\nlisten = \"{address}\"\nread_only = true\n"
        ));
        let page = get_tcp(&address, "/").unwrap();
        assert!(
            page.starts_with("HTTP/1.1 200") && page.contains("<html"),
            "{page}"
        );
        let host = get_tcp(&address, "/v1/host").unwrap();
        assert!(host.contains("\"schema\":1"), "{host}");
        let page = daemon.get("/");
        assert!(page.starts_with("HTTP/1.1 200"), "{page}");
    });
}
