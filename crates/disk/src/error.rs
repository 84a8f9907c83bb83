//! Why a VM's disks cannot be served.

use std::io;
use std::path::PathBuf;

/// Why a VM's disks are not, or no longer, served. Unless stated, nothing was written to an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "each field is part of the message")]
pub enum DiskError {
    /// The image cannot be opened or used.
    #[error("image {}", image.display())]
    Image {
        image: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Another process uses the image.
    #[error("image {} is in use: {lock}", image.display())]
    Locked {
        image: PathBuf,
        lock: crate::ImageLock,
    },
    /// The size of the image is not valid for a disk.
    #[error("image {} has {bytes} bytes: its size must be a positive multiple of {block_bytes} bytes", image.display())]
    Size {
        image: PathBuf,
        bytes: u64,
        /// What it must be a multiple of.
        block_bytes: u32,
    },
    /// The socket cannot be created.
    #[error("socket {socket}")]
    Socket {
        /// Its path or descriptor.
        socket: String,
        #[source]
        source: io::Error,
    },
    /// Another process listens on the socket already.
    #[error("socket {} is in use: another process listens on it", path.display())]
    SocketInUse { path: PathBuf },
    /// The path exists and is not a socket.
    #[error("{} exists and is not a socket", path.display())]
    NoSocket { path: PathBuf },
    /// Options that contradict each other.
    #[error("{0}")]
    Options(&'static str),
    /// There is no memory for the cache, or it is too small.
    #[error("cache")]
    Cache(#[source] plimsoll_hcache::Error),
    /// The directory of the dirty log cannot be used.
    #[error("state in {}", path.display())]
    State {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    /// Delayed writes were requested, but the directory for their log is not in memory.
    #[error(
        "{} is not on tmpfs: a log of delayed writes on a disk would outlive the host's crash without being \
         in order; name a directory on tmpfs, as in /dev/shm or /run",
        path.display()
    )]
    StateOnDisk { path: PathBuf },
    /// Pages of an earlier daemon cannot be written to storage, and there is no cache, without which they cannot be served.
    /// They are still in the log.
    #[error(
        "{pages} acknowledged pages of an earlier daemon, the first of image {}, cannot be written ({reason}), and cannot \
         be served without a cache: make room on the storage, or serve with a cache",
        image.display()
    )]
    NotRecovered {
        image: PathBuf,
        pages: u64,
        reason: String,
    },
    /// The dirty log cannot be used. Pages that an earlier daemon left in it are still there.
    #[error("dirty log")]
    DirtyLog(#[source] crate::DirtyLogError),
    /// The kernel has no `io_uring`, or refuses its use. Requests in flight are not completed.
    #[error("io_uring (needs Linux 5.13, and /proc/sys/kernel/io_uring_disabled 0)")]
    Ring(#[source] io::Error),
    /// The last writes may not be on storage, because the final flushes failed.
    #[error("{}", not_flushed(images, *log_pages))]
    NotFlushed {
        images: Vec<PathBuf>,
        /// How many pages of these images are in the dirty log.
        log_pages: u64,
    },
    /// The cache was not resized and is unchanged.
    #[error("cache not resized")]
    Resize(#[source] plimsoll_hcache::Error),
    /// The machine has ended.
    #[error("the disks are no longer served")]
    Ended,
}

fn not_flushed(images: &[PathBuf], log_pages: u64) -> String {
    let images: Vec<_> = images
        .iter()
        .map(|image| image.display().to_string())
        .collect();
    let images = images.join(", ");
    let kept = match log_pages {
        0 => String::new(),
        pages => format!("; {pages} pages stay in the dirty log, and the next daemon writes them"),
    };
    format!(
        "image {images} could not be flushed; what was written through since the last flush may be lost{kept}"
    )
}
