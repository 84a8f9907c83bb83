//! Requests of a virtqueue: taken, passed to the engine or the control disk, carried out and completed.

use std::io;
use std::sync::Arc;
use std::time::Instant;

use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};

use super::device::{InFlight, Link, lock};
use super::token::{LAST_FLUSH, Token};
use super::{Machine, TURN};

use crate::queue::{BadChain, QueueFault, Refusal, RequestKind, parse_request};
use crate::vhost::Vring;
use crate::{
    ControlDisk, DiskStats, Engine, GuestData, GuestRam, Operation, OutsideRam, Request,
    RequestResult, Segment, Status, Tag,
};

/// No more requests are taken while those in flight move this many bytes.
const IN_FLIGHT_BYTES_MAX: u64 = 64 << 20;

/// The result of serving a queue.
pub(super) enum QueueProgress {
    /// The queue has more requests.
    More,
    /// Suspended until a request completes, or the frontend's message is handled.
    Waiting,
    /// The queue is empty; the driver notifies of new requests.
    All,
}

/// No RAM, for a flush.
pub(super) struct NoRam;

impl GuestData for NoRam {
    fn read(&self, address: u64, bytes: &mut [u8]) -> Result<(), OutsideRam> {
        let bytes = bytes.len();
        Err(OutsideRam { address, bytes })
    }

    fn write(&self, address: u64, bytes: &[u8]) -> Result<(), OutsideRam> {
        let bytes = bytes.len();
        Err(OutsideRam { address, bytes })
    }

    fn is_ram(&self, _: u64) -> bool {
        false
    }
}

/// Serves a request of the control disk; returns whether it succeeded.
fn serve_control(
    control: &mut ControlDisk,
    engine: &mut Engine,
    ram: &Arc<GuestRam>,
    operation: &Operation,
) -> bool {
    match operation {
        Operation::Read { offset, segments } => {
            let bytes = segments.iter().map(|segment| segment.bytes as usize).sum();
            let mut ok = true;
            control.read(*offset, bytes, &mut |at, piece| {
                ok &= scatter(ram, segments, at, piece);
            });
            ok
        }
        Operation::Write {
            offset, segments, ..
        } => {
            let mut command = [0; 512];
            let bytes: usize = segments.iter().map(|segment| segment.bytes as usize).sum();
            if bytes != command.len() {
                return false;
            }
            let mut at = 0;
            for segment in segments {
                let end = at + segment.bytes as usize;
                if ram.read(segment.address, &mut command[at..end]).is_err() {
                    return false;
                }
                at = end;
            }
            control.write(*offset, &command, engine).is_ok()
        }
        Operation::Flush => true,
        Operation::Discard(_) | Operation::WriteZeroes { .. } => false,
    }
}

/// Copies bytes to the segments from their byte `at` on; excess bytes are dropped. Returns whether all of it is RAM.
fn scatter(ram: &Arc<GuestRam>, segments: &[Segment], at: usize, bytes: &[u8]) -> bool {
    let mut skip = at;
    let mut rest = bytes;
    for segment in segments {
        let length = segment.bytes as usize;
        let skipped = skip.min(length);
        skip -= skipped;
        let (now, later) = rest.split_at(rest.len().min(length - skipped));
        if !now.is_empty() && ram.write(segment.address + skipped as u64, now).is_err() {
            return false;
        }
        rest = later;
    }
    true
}

/// Stops a queue that is invalid, or in RAM that cannot be accessed.
fn fail(vring: &mut Vring, ram: &GuestRam, fault: QueueFault, stats: &mut DiskStats) {
    let is_failure = count_failures(ram, stats) && matches!(fault, QueueFault::Ram(_));
    stats.bad_requests += u64::from(!is_failure);
    vring.fail();
}

/// Adds the accesses to RAM that failed since the last call; returns whether there were any.
fn count_failures(ram: &GuestRam, stats: &mut DiskStats) -> bool {
    let failures = ram.take_failures();
    stats.ram_errors += failures;
    failures > 0
}

impl Machine {
    /// Serves the requests in a queue.
    pub(super) fn serve_queue(&mut self, index: usize, number: usize) -> QueueProgress {
        let device = &mut self.devices[index];
        let Link::Open(connection) = &mut device.link else {
            return QueueProgress::All;
        };
        if connection.held {
            return QueueProgress::Waiting;
        }
        let mut guard = lock(&connection.vhost);
        let vhost = &mut *guard;
        let shape = vhost.shape();
        let vring = &mut vhost.vrings[number];
        let run = vring.run;
        let Some(queue) = &mut vring.queue else {
            return QueueProgress::All;
        };
        let ram = Arc::clone(queue.ram());
        let served = (|| -> Result<QueueProgress, QueueFault> {
            queue.disable_notifications()?;
            for _ in 0..TURN {
                // A disk without requests in flight may always begin one.
                if self.in_flight_bytes >= IN_FLIGHT_BYTES_MAX && device.in_flight > 0 {
                    return Ok(QueueProgress::Waiting);
                }
                let Some((head, again)) = queue.pop()? else {
                    if queue.enable_notifications()? {
                        continue;
                    }
                    return Ok(QueueProgress::All);
                };
                device.stats.resubmitted += u64::from(again);
                let wanted = match queue.chain(head, &mut self.pieces) {
                    Ok(()) => parse_request(&ram, &self.pieces, &shape),
                    Err(BadChain::Invalid) => Err(Refusal::UNANSWERABLE),
                    // The driver would take what the status was before as its answer.
                    Err(BadChain::Ram(outside)) => return Err(outside.into()),
                };
                // Every notification sent before the request.
                if let Some(control) = &mut self.control
                    && self.control_runs
                {
                    control.drain(&mut self.engine);
                }
                let (status, answer, written) = match wanted {
                    Err(refused) => {
                        let is_failure = count_failures(&ram, &mut device.stats);
                        device.stats.bad_requests += u64::from(!is_failure);
                        device.stats.unshared |= self.pieces.iter().any(|piece| !piece.is_in(&ram));
                        (
                            refused.status,
                            refused.answer,
                            u32::from(refused.status.is_some()),
                        )
                    }
                    Ok(wanted) => match (wanted.kind, device.disk) {
                        (RequestKind::Disk(operation), Some(disk)) => {
                            self.in_flight_bytes += u64::from(wanted.data_bytes);
                            device.in_flight += 1;
                            let place = self.requests.put(InFlight {
                                device: index,
                                queue: number,
                                run,
                                head,
                                status: wanted.status,
                                written: wanted.written,
                                data_bytes: wanted.data_bytes,
                                since: Instant::now(),
                            });
                            self.engine.submit(Request {
                                disk,
                                tag: Tag(place as u64),
                                operation,
                                ram: Arc::clone(&ram) as Arc<dyn GuestData>,
                            });
                            continue;
                        }
                        (kind, _) => {
                            device.stats.requests += 1;
                            let ok = match kind {
                                RequestKind::Disk(operation) => {
                                    let control = self.control.as_mut();
                                    control.is_some_and(|control| {
                                        serve_control(control, &mut self.engine, &ram, &operation)
                                    })
                                }
                                RequestKind::Identity(segments) => {
                                    scatter(&ram, &segments, 0, &device.serial)
                                }
                                RequestKind::Nothing => true,
                            };
                            let answer = if ok {
                                VIRTIO_BLK_S_OK
                            } else {
                                VIRTIO_BLK_S_IOERR
                            };
                            #[expect(clippy::cast_possible_truncation, reason = "0 or 1")]
                            let answer = answer as u8;
                            (
                                Some(wanted.status),
                                answer,
                                if ok { wanted.written } else { 1 },
                            )
                        }
                    },
                };
                if let Some(status) = status {
                    ram.mapped().write(status, &[answer])?;
                }
                queue.done(head, written);
                if self.touched.last() != Some(&(index, number)) {
                    self.touched.push((index, number));
                }
            }
            Ok(QueueProgress::More)
        })();
        match served {
            Ok(progress) => {
                count_failures(&ram, &mut device.stats);
                progress
            }
            Err(fault) => {
                fail(vring, &ram, fault, &mut device.stats);
                QueueProgress::All
            }
        }
    }

    /// Submits I/O to storage, and returns completed requests to the queues.
    pub(super) fn carry_out(&mut self) -> io::Result<()> {
        loop {
            let mut any = false;
            while let Some(submission) = self.engine.next_submission() {
                let storage = &self.storages[usize::from(submission.disk.0)];
                let token = Token::Submission(self.submissions.next()).number();
                if let Some(times) = &mut self.image_times
                    && submission.action.is_change()
                {
                    times.begin(usize::from(submission.disk.0));
                }
                let running = storage.begin(&mut self.ring, submission, token)?;
                self.submissions.put(running);
            }
            if let Some(unsynced) = &mut self.unsynced {
                // Before the guest is told. Without it a restart forgets them, as without a state directory.
                let _ = unsynced.record(self.engine.unsynced(), &self.storages);
            }
            while let Some(completed) = self.engine.next_completed() {
                any = true;
                if completed.tag.0 & LAST_FLUSH != 0 {
                    self.flushed_last((completed.tag.0 & !LAST_FLUSH) as usize, completed.status)?;
                } else {
                    #[expect(clippy::cast_possible_truncation, reason = "made of an index")]
                    self.completed(completed.tag.0 as usize, completed);
                }
            }
            if !any {
                return Ok(());
            }
        }
    }

    fn completed(&mut self, place: usize, result: RequestResult) {
        let Some(request) = self.requests.take(place) else {
            return;
        };
        let device = &mut self.devices[request.device];
        device.in_flight -= 1;
        device.stats.requests += 1;
        if result.read_storage {
            let waited_ns = u64::try_from(request.since.elapsed().as_nanos()).unwrap_or(u64::MAX);
            device.stats.waited_reads += 1;
            device.stats.read_wait_ns = device.stats.read_wait_ns.saturating_add(waited_ns);
        }
        self.in_flight_bytes -= u64::from(request.data_bytes);
        let Link::Open(connection) = &mut device.link else {
            return;
        };
        let mut vhost = lock(&connection.vhost);
        let vring = &mut vhost.vrings[request.queue];
        if vring.run != request.run {
            return;
        }
        let Some(queue) = &mut vring.queue else {
            return;
        };
        let (answer, written) = match result.status {
            Status::Ok => (VIRTIO_BLK_S_OK, request.written),
            Status::IoError => (VIRTIO_BLK_S_IOERR, 1),
            Status::Unsupported => (VIRTIO_BLK_S_UNSUPP, 1),
        };
        #[expect(clippy::cast_possible_truncation, reason = "0 to 2")]
        let answer = answer as u8;
        if result.status == Status::IoError {
            count_failures(queue.ram(), &mut device.stats);
        }
        let told = queue.ram().mapped().write(request.status, &[answer]);
        if let Err(outside) = told {
            let ram = Arc::clone(queue.ram());
            fail(vring, &ram, outside.into(), &mut device.stats);
            return;
        }
        queue.done(request.head, written);
        let touched = (request.device, request.queue);
        if self.touched.last() != Some(&touched) {
            self.touched.push(touched);
        }
    }

    /// Publishes completed requests to the guest.
    pub(super) fn publish(&mut self) {
        for (index, number) in self.touched.drain(..) {
            let device = &mut self.devices[index];
            let Link::Open(connection) = &mut device.link else {
                continue;
            };
            let mut vhost = lock(&connection.vhost);
            let vring = &mut vhost.vrings[number];
            let Some(queue) = &mut vring.queue else {
                continue;
            };
            match queue.publish() {
                Ok(true) => vring.signal(),
                Ok(false) => {}
                Err(fault) => {
                    let ram = Arc::clone(queue.ram());
                    fail(vring, &ram, fault, &mut device.stats);
                }
            }
        }
    }
}
