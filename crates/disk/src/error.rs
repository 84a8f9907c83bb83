//! Why a VM's disks cannot be served.

use std::io;
use std::path::PathBuf;

/// Why a VM's disks are not, or no longer, served. Unless stated, nothing was written to an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskError {
    /// The image cannot be opened or used.
    #[error("image {}", image.display())]
    Image {
        /// Which.
        image: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Another process uses the image.
    #[error("image {} is in use: another process holds its lock (flock)", image.display())]
    Locked {
        /// Which.
        image: PathBuf,
    },
    /// The size of the image is no disk's.
    #[error("image {} has {bytes} bytes: not a multiple of {block_bytes}, or none", image.display())]
    Size {
        /// Which.
        image: PathBuf,
        /// Its size.
        bytes: u64,
        /// What it must be a multiple of.
        block_bytes: u32,
    },
    /// The socket cannot be made.
    #[error("socket {socket}")]
    Socket {
        /// Its path or descriptor.
        socket: String,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// Somebody listens there already.
    #[error("socket {} is in use: another process listens on it", path.display())]
    SocketInUse {
        /// Where.
        path: PathBuf,
    },
    /// Something else than a socket is there.
    #[error("{} is there and is no socket", path.display())]
    NoSocket {
        /// Where.
        path: PathBuf,
    },
    /// Options that do not fit together.
    #[error("{0}")]
    Options(&'static str),
    /// There is no memory for the cache, or it is too small.
    #[error("cache")]
    Cache(#[source] plimsoll_hcache::Error),
    /// The directory of the dirty log cannot be used.
    #[error("state in {}", path.display())]
    State {
        /// Directory or file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The dirty log cannot be used. Pages a former daemon left in it are still there.
    #[error("dirty log")]
    DirtyLog(#[source] crate::DirtyLogError),
    /// The kernel gives no `io_uring`, or refuses its use. Requests under way are not completed.
    #[error("io_uring (needs Linux 5.13, and /proc/sys/kernel/io_uring_disabled 0)")]
    Ring(#[source] io::Error),
    /// What was written last may not be on storage: the flush at the end failed.
    #[error("image {} could not be flushed; what was written since the last flush may be lost", image.display())]
    NotFlushed {
        /// Which.
        image: PathBuf,
    },
    /// The cache was not resized and is as it was.
    #[error("cache not resized")]
    Resize(#[source] plimsoll_hcache::Error),
    /// The machine has ended.
    #[error("the disks are no longer served")]
    Ended,
}
