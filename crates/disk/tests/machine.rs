//! Opening and closing a machine: images, locks, sockets, and the errors returned.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

use plimsoll_disk::{
    CacheMode, Direct, DiskError, DiskOptions, EngineOptions, Machine, MachineOptions, Socket,
    WriteMode,
};

fn options(image: &Path, socket: &Path) -> MachineOptions {
    MachineOptions {
        disks: vec![DiskOptions {
            image: image.to_owned(),
            socket: Socket::Path(socket.to_owned()),
            read_only: false,
            serial: "test".into(),
            queues: 1,
            direct: Direct::Auto,
        }],
        engine: EngineOptions {
            mode: CacheMode::Exclusive,
            cache_bytes: 4 << 20,
            cache_bytes_max: 8 << 20,
            write: WriteMode::Delayed,
            dirty_pages_max: 256,
            ..EngineOptions::default()
        },
        ..MachineOptions::default()
    }
}

/// A directory, an image of this size in it, and a path for a socket.
fn place(bytes: u64) -> (tempfile::TempDir, PathBuf, PathBuf) {
    let folder = tempfile::tempdir().expect("a folder");
    let (image, socket) = (folder.path().join("image"), folder.path().join("socket"));
    File::create(&image)
        .and_then(|file| file.set_len(bytes))
        .expect("an image");
    (folder, image, socket)
}

#[test]
fn a_machine_answers_until_it_is_stopped_and_leaves_no_socket() {
    let (folder, image, socket) = place(1 << 20);
    let memory = tempfile::tempdir_in("/dev/shm").expect("a folder in memory");
    let mut options = options(&image, &socket);
    options.control = Some(Socket::Path(folder.path().join("control")));
    options.state = Some(memory.path().join("state"));
    options.socket_mode = 0o660;
    let mut machine = Machine::new(options).expect("a machine");
    let handle = machine.handle();
    let served = thread::spawn(move || machine.run());
    let stats = handle.stats().expect("an answer");
    assert_eq!((stats.disks.len(), stats.disks[0].size_bytes), (1, 1 << 20));
    assert_eq!(stats.engine.cache_bytes, 4 << 20);
    for socket in [&socket, &folder.path().join("control")] {
        let mode = fs::metadata(socket).expect("a socket").permissions().mode();
        assert_eq!(mode & 0o777, 0o660);
    }
    handle.resize(6 << 20).expect("a larger cache");
    assert_eq!(
        handle.stats().expect("an answer").engine.cache_bytes,
        6 << 20
    );
    assert!(matches!(handle.resize(1 << 40), Err(DiskError::Resize(_))));
    handle.enable().expect("an answer");
    handle.stop().expect("to be told");
    served.join().expect("no panic").expect("a clean end");
    assert!(matches!(handle.stats(), Err(DiskError::Ended)));
    assert!(matches!(handle.stop(), Err(DiskError::Ended)));
    assert!(!socket.exists() && !folder.path().join("control").exists());
    assert!(!memory.path().join("state/dirty.log").exists());
}

#[test]
fn a_frontend_that_says_nonsense_is_dropped_and_others_are_served() {
    use std::io::{Read as _, Write as _};
    let (_folder, image, socket) = place(1 << 20);
    let mut machine = Machine::new(options(&image, &socket)).expect("a machine");
    let handle = machine.handle();
    let served = thread::spawn(move || machine.run());
    let mut first = UnixStream::connect(&socket).expect("a connection");
    while !handle.stats().expect("an answer").disks[0].connected {
        thread::yield_now();
    }
    // A second one waits.
    let _second = UnixStream::connect(&socket).expect("a connection");
    // Half of a message's header blocks nobody; a complete invalid message ends the connection.
    first.write_all(&[0xff; 6]).expect("to be taken");
    assert!(handle.stats().expect("an answer").disks[0].connected);
    first.write_all(&[0xff; 6]).expect("to be taken");
    assert_eq!(first.read(&mut [0; 1]).expect("the end"), 0);
    while handle.stats().expect("an answer").disks[0].connections < 2 {
        thread::yield_now();
    }
    handle.stop().expect("to be told");
    served.join().expect("no panic").expect("a clean end");
}

#[test]
fn an_image_is_served_by_one_at_a_time() {
    let (folder, image, socket) = place(1 << 20);
    let first = Machine::new(options(&image, &socket)).expect("a machine");
    let second = Machine::new(options(&image, &folder.path().join("other")));
    assert!(matches!(second.err(), Some(DiskError::Locked { .. })));
    drop(first);
    Machine::new(options(&image, &socket)).expect("a machine");

    let shared = |name| {
        let mut options = options(&image, &folder.path().join(name));
        options.disks[0].read_only = true;
        Machine::new(options)
    };
    let _one = shared("one").expect("a machine that only reads");
    let _two = shared("two").expect("another");
    let writer = Machine::new(options(&image, &socket));
    assert!(matches!(writer.err(), Some(DiskError::Locked { .. })));
}

#[test]
fn images_that_are_no_disks_are_refused() {
    for bytes in [0, 511, 1025] {
        let (_folder, image, socket) = place(bytes);
        let machine = Machine::new(options(&image, &socket));
        assert!(
            matches!(machine.err(), Some(DiskError::Size { bytes: told, .. }) if told == bytes)
        );
    }
    let (folder, _, socket) = place(512);
    for image in [folder.path().to_owned(), folder.path().join("none")] {
        let machine = Machine::new(options(&image, &socket));
        assert!(matches!(machine.err(), Some(DiskError::Image { .. })));
    }
    let mut none = options(&socket, &socket);
    none.disks.clear();
    assert!(matches!(
        Machine::new(none).err(),
        Some(DiskError::Options(_))
    ));
}

#[test]
fn a_socket_left_behind_is_replaced_and_nothing_else_is() {
    let (folder, image, socket) = place(1 << 20);
    drop(UnixListener::bind(&socket).expect("a socket"));
    assert!(socket.exists());
    drop(Machine::new(options(&image, &socket)).expect("a machine"));

    let listener = UnixListener::bind(&socket).expect("a socket");
    let machine = Machine::new(options(&image, &socket));
    assert!(matches!(machine.err(), Some(DiskError::SocketInUse { .. })));
    drop(listener);

    let file = folder.path().join("file");
    fs::write(&file, "precious").expect("a file");
    let machine = Machine::new(options(&image, &file));
    assert!(matches!(machine.err(), Some(DiskError::NoSocket { .. })));
    assert_eq!(fs::read(&file).expect("the file"), b"precious");
}

#[test]
fn a_connected_descriptor_is_the_only_frontend() {
    let (_folder, image, socket) = place(1 << 20);
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let mut options = options(&image, &socket);
    options.disks[0].socket = Socket::Fd(theirs.into());
    let mut machine = Machine::new(options).expect("a machine");
    let handle = machine.handle();
    let served = thread::spawn(move || machine.run());
    assert!(handle.stats().expect("an answer").disks[0].connected);
    drop(ours);
    served.join().expect("no panic").expect("a clean end");
}
