//! Messages of a hostile frontend, for the fuzz target: through the `vhost` crate to our handler, and then the queues that
//! they start.

use std::fs::File;
use std::io::{IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use vhost::vhost_user::BackendReqHandler;
use vhost::vhost_user::message::FrontendReq;

use super::{Geometry, Vhost};
use crate::inflight::Inflight;
use crate::queue::{QueueFault, parse_request};

const RAM_BYTES: u64 = 64 << 10;
/// Where the frontend has the RAM mapped.
const USER_ADDRESS: u64 = 0x7f00_0000_0000;
/// Requests that are taken from a queue at a time.
const REQUESTS_MAX: usize = 64;

/// The bytes of an input, to be used up; zeros afterwards.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut taken = [0; N];
        let count = N.min(self.0.len());
        let (now, later) = self.0.split_at(count);
        taken[..count].copy_from_slice(now);
        self.0 = later;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take::<1>()[0]
    }

    /// A number that is mostly small, and sometimes anything.
    fn number(&mut self) -> u64 {
        match self.byte() {
            0xff => u64::from_le_bytes(self.take()),
            small => u64::from(small),
        }
    }
}

fn message(code: FrontendReq, words: &[u64]) -> (u32, Vec<u8>) {
    let payload = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    (code.into(), payload)
}

/// A word of two halves.
fn halves(low: u64, high: u64) -> u64 {
    low & 0xffff_ffff | high << 32
}

fn memory(name: &str, bytes: u64) -> File {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create(name, flags).expect("a memfd"));
    file.set_len(bytes).expect("its length");
    file
}

/// Handles messages, and takes requests from the queues, in an order encoded by `bytes`.
///
/// # Panics
/// If a request that is accepted is outside the disk or RAM.
#[doc(hidden)]
pub fn fuzz_messages(bytes: &[u8]) {
    let mut bytes = Bytes(bytes);
    let choice = bytes.byte();
    let geometry = Geometry {
        size_bytes: 1 << 30,
        block_bytes: if choice & 1 == 0 { 512 } else { 4096 },
        read_only: choice & 2 != 0,
        plain: choice & 4 != 0,
        queues: 2,
    };
    let (ours, theirs) = UnixStream::pair().expect("a pair");
    let vhost = Arc::new(Mutex::new(Vhost::new(geometry)));
    let mut frontend = Frontend {
        handler: BackendReqHandler::from_stream(ours, Arc::clone(&vhost)),
        stream: theirs,
        ram: memory("fuzz-ram", RAM_BYTES),
        inflight: Inflight::make(2, 16).expect("a region"),
        vhost,
        run: 0,
    };
    if choice & 8 == 0 {
        let offered = frontend.vhost.lock().expect("no panic").offered();
        let messages = [
            message(FrontendReq::SET_OWNER, &[]),
            message(FrontendReq::GET_FEATURES, &[]),
            message(FrontendReq::GET_PROTOCOL_FEATURES, &[]),
            message(FrontendReq::SET_FEATURES, &[offered]),
            message(
                FrontendReq::SET_PROTOCOL_FEATURES,
                &[1 << 3 | 1 << 9 | 1 << 12 | 1 << 15],
            ),
        ];
        for (code, payload) in messages {
            assert!(frontend.send(code, &payload, &[], false));
        }
        let (code, payload) = frontend.table(1, 0, RAM_BYTES);
        let ram = frontend.ram.try_clone().expect("a descriptor");
        assert!(frontend.send(code, &payload, &[ram.into()], false));
    }
    while !bytes.0.is_empty() && frontend.step(&mut bytes) {}
}

struct Frontend {
    handler: BackendReqHandler<Mutex<Vhost>>,
    stream: UnixStream,
    vhost: Arc<Mutex<Vhost>>,
    ram: File,
    inflight: File,
    run: u64,
}

impl Frontend {
    /// Executes the next bytes; returns whether the connection goes on.
    fn step(&mut self, bytes: &mut Bytes<'_>) -> bool {
        use FrontendReq as Code;
        let kind = bytes.byte();
        let ring = bytes.number();
        let ram = || vec![OwnedFd::from(self.ram.try_clone().expect("a descriptor"))];
        let event = || vec![eventfd(0, EventfdFlags::CLOEXEC).expect("an event")];
        let mut files = Vec::new();
        let (code, payload) = match kind % 18 {
            0 => message(Code::SET_VRING_NUM, &[halves(ring, bytes.number())]),
            1 => {
                let [table, used, available] = [0; 3].map(|_| USER_ADDRESS + bytes.number() * 16);
                message(
                    Code::SET_VRING_ADDR,
                    &[ring & 0xffff_ffff, table, used, available, 0],
                )
            }
            2 => message(Code::SET_VRING_BASE, &[halves(ring, bytes.number())]),
            3 => {
                files = event();
                message(Code::SET_VRING_KICK, &[ring])
            }
            4 => {
                files = event();
                message(Code::SET_VRING_CALL, &[ring])
            }
            5 => message(Code::SET_VRING_ENABLE, &[halves(ring, bytes.number())]),
            6 => message(Code::GET_VRING_BASE, &[ring]),
            7 => {
                files = ram();
                self.table(ring, bytes.number() * 4096, bytes.number() * 4096)
            }
            8 | 9 => {
                files = ram();
                let (address, length) = (bytes.number() * 4096, bytes.number() * 4096);
                let code = match kind % 18 {
                    8 => Code::ADD_MEM_REG,
                    _ => Code::REM_MEM_REG,
                };
                message(
                    code,
                    &[0, address, length, USER_ADDRESS + address, ring * 512],
                )
            }
            10 => {
                let (offset, byte) = (bytes.byte(), bytes.byte());
                let code = if ring & 1 == 0 {
                    Code::GET_CONFIG
                } else {
                    Code::SET_CONFIG
                };
                let mut payload = halves(u64::from(offset), 1).to_le_bytes().to_vec();
                payload.extend([0, 0, 0, 0, byte]);
                (code.into(), payload)
            }
            11 => {
                let (offset, byte) = (bytes.number() * 2, bytes.byte());
                self.inflight
                    .write_all_at(&[byte], offset % 700)
                    .expect("in the region");
                files = vec![self.inflight.try_clone().expect("a descriptor").into()];
                let length = Inflight::bytes(2, 16);
                let shape = if ring == 0 {
                    2 | 16 << 16
                } else {
                    bytes.number()
                };
                message(Code::SET_INFLIGHT_FD, &[length, 0, shape])
            }
            12 => message(Code::GET_INFLIGHT_FD, &[0, 0, ring]),
            13 | 14 => {
                // The guest writes its rings.
                let words = bytes.take::<16>();
                let count = usize::from(bytes.byte() % 17);
                let at = (ring * 8) % (RAM_BYTES - 16);
                self.ram.write_all_at(&words[..count], at).expect("in RAM");
                return true;
            }
            15 => {
                self.serve();
                return true;
            }
            16 => message(Code::RESET_DEVICE, &[]),
            _ => {
                if ring & 1 == 1 {
                    files = event();
                }
                if ring & 2 == 2 {
                    files.extend(ram());
                }
                let (code, length) = (bytes.number(), bytes.byte() % 64);
                let payload = (0..length).map(|_| bytes.byte()).collect();
                #[expect(clippy::cast_possible_truncation, reason = "any code")]
                let code = code as u32;
                (code, payload)
            }
        };
        self.send(code, &payload, &files, kind & 0x80 != 0)
    }

    /// A table of one region, or of two.
    fn table(&self, regions: u64, address: u64, bytes: u64) -> (u32, Vec<u8>) {
        let region = [address, bytes, USER_ADDRESS + address, 0];
        message(
            FrontendReq::SET_MEM_TABLE,
            &[&[regions][..], &region].concat(),
        )
    }

    /// Sends a message, perhaps of a wrong length, and lets it be handled; returns whether the connection goes on.
    fn send(&mut self, code: u32, payload: &[u8], files: &[OwnedFd], wrong: bool) -> bool {
        let length = u32::try_from(payload.len()).expect("short") + u32::from(wrong);
        // Version 1, with an answer.
        let mut head: Vec<u8> = [code, 1 | 1 << 3, length]
            .iter()
            .flat_map(|word| word.to_le_bytes())
            .collect();
        head.extend(payload);
        let descriptors: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&descriptors)));
        }
        let flags = SendFlags::NOSIGNAL;
        if sendmsg(&self.stream, &[IoSlice::new(&head)], &mut ancillary, flags).is_err() {
            return false;
        }
        if wrong {
            let _ = self.stream.flush();
            let _ = self.stream.shutdown(Shutdown::Write);
        }
        if self.handler.handle_request().is_err() {
            return false;
        }
        let mut answer = [0_u8; 1024];
        while matches!(
            recv(&self.stream, &mut answer, RecvFlags::DONTWAIT),
            Ok((1.., _))
        ) {}
        self.vhost.lock().expect("no panic").start(&mut self.run);
        true
    }

    /// Takes requests from the queues, checks them, and completes them.
    fn serve(&self) {
        let mut vhost = self.vhost.lock().expect("no panic");
        let shape = vhost.shape();
        for vring in &mut vhost.vrings {
            let Some(queue) = &mut vring.queue else {
                continue;
            };
            let ram = Arc::clone(queue.ram());
            let mut pieces = Vec::new();
            let served = (|| -> Result<(), QueueFault> {
                queue.disable_notifications()?;
                for _ in 0..REQUESTS_MAX {
                    let Some((head, _)) = queue.pop()? else {
                        queue.enable_notifications()?;
                        break;
                    };
                    let mut written = 0;
                    if queue.chain(head, &mut pieces).is_ok()
                        && let Ok(wanted) = parse_request(&ram, &pieces, &shape)
                    {
                        wanted.check(&ram, &shape);
                        written = wanted.written;
                    }
                    queue.done(head, written);
                }
                queue.publish()?;
                Ok(())
            })();
            if served.is_err() {
                vring.fail();
            }
            ram.sweep();
        }
    }
}
