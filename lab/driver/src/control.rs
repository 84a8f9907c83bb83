//! The guest's side of the control disk.

use std::io;

use plimsoll_disk::protocol::{SECTOR_BYTES, VERSION, control};

use crate::virtqueue::Segment;
use crate::{Bank, Driver, FrontendError, NoticeRing, PAGE_BYTES, Page, Request};

/// The pages returned by a get of consecutive blocks, one by one.
pub type OptionalPages = Vec<Option<Box<Page>>>;

/// The control disk, accessed through a driver.
pub struct ControlDisk {
    driver: Driver,
    sequence: u64,
    buffer: u64,
}

impl ControlDisk {
    /// Uses a driver of a control disk.
    pub fn new(driver: Driver) -> Self {
        let buffer = driver
            .ram()
            .allocate(Bank::High, (control::GET_PAGES_MAX + 1) * PAGE_BYTES);
        Self {
            driver,
            sequence: 0,
            buffer,
        }
    }

    /// The driver.
    pub fn driver(&mut self) -> &mut Driver {
        &mut self.driver
    }

    /// The host's features, `PLIMSOLL_HAS_*`.
    ///
    /// # Errors
    /// [`FrontendError::BadAnswer`], or the errors of [`Driver::execute`].
    pub fn features(&mut self) -> Result<u32, FrontendError> {
        let mut info = [0; SECTOR_BYTES];
        self.driver.read(0, &mut info)?;
        if u64_at(&info, control::INFO_MAGIC) != control::MAGIC
            || u32_at(&info, control::INFO_VERSION) != VERSION
        {
            return Err(FrontendError::BadAnswer("information"));
        }
        Ok(u32_at(&info, control::INFO_FEATURES))
    }

    /// Announces a ring, which the host reads from then on.
    ///
    /// # Errors
    /// [`FrontendError::Refused`], or the errors of [`command`](Self::command).
    pub fn attach(&mut self, ring: &NoticeRing) -> Result<(), FrontendError> {
        let arguments = [ring.address(), ring.nonce(), 0, 0];
        self.command(control::ATTACH, arguments).map(drop)
    }

    /// Makes the host release a ring.
    ///
    /// # Errors
    /// [`FrontendError::Refused`], or the errors of [`command`](Self::command).
    pub fn detach(&mut self, ring: &NoticeRing) -> Result<(), FrontendError> {
        self.command(control::DETACH, [ring.nonce(), 0, 0, 0])
            .map(drop)
    }

    /// Makes the host drain the ring.
    ///
    /// # Errors
    /// [`FrontendError::Refused`], or the errors of [`command`](Self::command).
    pub fn kick(&mut self) -> Result<(), FrontendError> {
        self.command(control::KICK, [0; 4]).map(drop)
    }

    /// Sends any command; returns the value of its answer.
    ///
    /// # Errors
    /// [`FrontendError::Refused`] with the host's status, [`FrontendError::BadAnswer`], or the errors of
    /// [`Driver::execute`].
    pub fn command(&mut self, command: u32, arguments: [u64; 4]) -> Result<u64, FrontendError> {
        self.sequence += 1;
        let mut bytes = [0; SECTOR_BYTES];
        let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        set(control::COMMAND_MAGIC, &control::MAGIC.to_le_bytes());
        set(control::COMMAND_VERSION, &VERSION.to_le_bytes());
        set(control::COMMAND_COMMAND, &command.to_le_bytes());
        set(control::COMMAND_SEQUENCE, &self.sequence.to_le_bytes());
        for (number, argument) in arguments.iter().enumerate() {
            set(control::COMMAND_ARG + 8 * number, &argument.to_le_bytes());
        }
        self.driver.write(0, &bytes)?;
        let mut answer = [0; SECTOR_BYTES];
        self.driver.read(512, &mut answer)?;
        if u64_at(&answer, control::ANSWER_MAGIC) != control::MAGIC
            || u64_at(&answer, control::ANSWER_SEQUENCE) != self.sequence
        {
            return Err(FrontendError::BadAnswer("answer"));
        }
        match i32::try_from(u32_at(&answer, control::ANSWER_STATUS)) {
            Ok(0) => Ok(u64_at(&answer, control::ANSWER_VALUE)),
            Ok(status) => Err(FrontendError::Refused(io::Error::from_raw_os_error(status))),
            Err(_) => Err(FrontendError::BadAnswer("status")),
        }
    }

    /// Gets `count` blocks of a pool, 1 to 64.
    ///
    /// # Errors
    /// [`FrontendError::BadAnswer`], or the errors of [`Driver::execute`].
    ///
    /// # Panics
    /// If `count` is out of range.
    pub fn get(
        &mut self,
        pool: u32,
        block: u64,
        count: usize,
    ) -> Result<OptionalPages, FrontendError> {
        assert!(
            (1..=control::GET_PAGES_MAX).contains(&count),
            "1 to 64 blocks"
        );
        let bytes = u32::try_from(count * PAGE_BYTES).expect("few");
        let answer_at = self.buffer + u64::from(bytes);
        self.driver.ram().write(answer_at, &[0; SECTOR_BYTES]);
        let segments = [
            Segment {
                address: self.buffer,
                bytes,
            },
            Segment {
                address: answer_at,
                bytes: 512,
            },
        ];
        self.driver.execute(&Request::Read {
            sector: u64::from(pool) << control::POOL_SHIFT | block << control::BLOCK_SHIFT,
            segments: &segments,
        })?;
        let mut answer = [0; SECTOR_BYTES];
        let ram = self.driver.ram();
        ram.read(answer_at, &mut answer);
        if u64_at(&answer, control::GET_MAGIC) != control::MAGIC
            || u64_at(&answer, control::GET_POOL) != u64::from(pool)
            || u64_at(&answer, control::GET_BLOCK) != block
            || u64::from(u32_at(&answer, control::GET_COUNT)) != count as u64
        {
            return Err(FrontendError::BadAnswer("get"));
        }
        let hits = u64_at(&answer, control::GET_HITS);
        let pages = (0..count as u64).map(|at| {
            (hits >> at & 1 == 1).then(|| {
                let mut page = Box::new([0; PAGE_BYTES]);
                ram.read(self.buffer + at * PAGE_BYTES as u64, &mut page[..]);
                page
            })
        });
        Ok(pages.collect())
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([0, 1, 2, 3].map(|byte| bytes[at + byte]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}
