//! A VM's disks over vhost-user, with an exclusive cache behind them (\[LS07\] §3).
#![deny(unsafe_code)]

mod buffers;
mod busy;
mod cache;
mod control_disk;
mod dirty;
mod dirty_log;
mod engine;
mod error;
mod frames;
mod image_lock;
mod inflight;
mod listener;
mod machine;
mod memory;
mod notices;
pub mod protocol;
mod queue;
mod segments;
mod served_images;
mod source;
mod stats;
mod storage;
mod sys;
mod types;
mod vhost;
mod victim_cache;

pub use control_disk::{BadRequest, ControlDisk};
pub use dirty_log::{
    ChangeTimes, DirtyLog, DirtyLogError, DiskIdentity, LeftoverPages, SetAside, boot_id,
};
pub use engine::{Engine, StorageErrors};
pub use error::DiskError;
pub use image_lock::ImageLock;
pub use listener::Listener;
pub use machine::{DiskOptions, Machine, MachineHandle, MachineOptions, Recovery, Socket};
pub use memory::{GuestRam, MappedRam, RamError, RamRegion};
pub use notices::{AttachError, BlockSink, DrainResult, FrameSink, Notices, RingMemory};
pub use served_images::{ImageNumber, ServedImages, Verdict, image_pool_key};
pub use source::{MissObserver, Misses, misses};
pub use stats::{DiskStats, EngineStats, MachineStats, RingStats, VictimCacheStats};
pub use storage::Direct;
pub use sys::{Buffer, Ring, RingCompletion};
pub use types::{
    Action, ByteRange, CacheMode, Contents, DirtyPages, DiskNumber, EngineOptions, GuestData,
    Location, Notice, Observer, Operation, OutsideRam, PAGE_BYTES, Page, Request, RequestResult,
    Segment, Status, Submission, SubmissionId, Tag, WriteErrorAction, WriteMode,
};
pub use victim_cache::{GuestPool, PoolRequest, Pools, VictimCache};

#[doc(hidden)]
pub use frames::MappingTables;
#[doc(hidden)]
pub use vhost::fuzz_messages;

/// Entry points of private code for the fuzz targets.
#[doc(hidden)]
pub mod fuzz {
    pub use crate::queue::fuzz_request as request;
}
