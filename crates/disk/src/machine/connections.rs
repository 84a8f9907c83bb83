//! Frontends: connections, messages and disconnection.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvFlags, recv};
use vhost::vhost_user::BackendReqHandler;

use super::device::{Connection, Link, lock};
use super::requests::NoRam;
use super::token::{LAST_FLUSH, Token};
use super::{Machine, TURN};

use crate::vhost::{Vhost, needs_quiet};
use crate::{DiskNumber, Operation, Request, RingMemory, Status, Tag};

/// Maximum time to receive the rest of a message once it has begun.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(1);

/// Bytes of the head of a vhost-user message: code, flags, size.
const MESSAGE_HEAD_BYTES: usize = 12;

fn ready(stream: &UnixStream, wanted: PollFlags) -> PollFlags {
    let mut fds = [PollFd::new(stream, wanted)];
    match poll(&mut fds, Some(&Timespec::default())) {
        Ok(_) => fds[0].revents(),
        Err(_) => PollFlags::empty(),
    }
}

fn hung_up(stream: &UnixStream) -> bool {
    ready(stream, PollFlags::RDHUP).intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR)
}

fn writable(stream: &UnixStream) -> bool {
    ready(stream, PollFlags::OUT).contains(PollFlags::OUT)
}

impl Machine {
    /// Accepts a waiting frontend, if none is connected: the others wait until it is gone.
    pub(super) fn accept(&mut self, index: usize) -> io::Result<()> {
        let device = &mut self.devices[index];
        let (Some(listener), Link::Idle, false) = (&device.listener, &device.link, self.stopping)
        else {
            return Ok(());
        };
        match listener.socket.accept() {
            Ok((stream, _)) => self.open(index, stream),
            // No frontend, one that disconnected again, or no free descriptors: a waiting one is accepted with the
            // next.
            Err(_) => Ok(()),
        }
    }

    pub(super) fn open(&mut self, index: usize, stream: UnixStream) -> io::Result<()> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(MESSAGE_TIMEOUT))?;
        stream.set_write_timeout(Some(MESSAGE_TIMEOUT))?;
        let device = &mut self.devices[index];
        let vhost = Arc::new(Mutex::new(Vhost::new(device.geometry)));
        self.serial += 1;
        let queues = usize::from(device.geometry.queues);
        let connection = Connection {
            handler: BackendReqHandler::from_stream(stream.try_clone()?, Arc::clone(&vhost)),
            stream,
            vhost,
            serial: self.serial,
            message: true,
            held: false,
            kicks: vec![None; queues],
            active: vec![false; queues],
        };
        device.stats.connections += 1;
        if let Some(disk) = device.disk {
            self.engine.attend(disk, true);
        }
        let token = Token::Connection(index, self.serial);
        self.watch_socket(connection.stream.as_fd(), token)?;
        self.devices[index].link = Link::Open(Box::new(connection));
        Ok(())
    }

    /// Handles a message of a frontend; returns whether there are more.
    pub(super) fn messages(&mut self, index: usize) -> io::Result<bool> {
        for _ in 0..TURN {
            let stopping = self.stopping;
            if self.devices[index].disk.is_none() {
                // What the message changes may end the ring, or let disks run before it.
                self.drain();
            }
            let device = &mut self.devices[index];
            let Link::Open(connection) = &mut device.link else {
                return Ok(false);
            };
            if stopping {
                self.leave(index)?;
                return Ok(false);
            }
            if !connection.message {
                return Ok(false);
            }
            let mut head = [0; MESSAGE_HEAD_BYTES];
            match recv(
                &connection.stream,
                &mut head,
                RecvFlags::PEEK | RecvFlags::DONTWAIT,
            ) {
                Ok((MESSAGE_HEAD_BYTES, _)) => {}
                Err(rustix::io::Errno::INTR) => continue,
                // No message, or part of one.
                Ok((1.., _)) | Err(rustix::io::Errno::AGAIN) if !hung_up(&connection.stream) => {
                    connection.message = false;
                    return Ok(false);
                }
                Ok(_) | Err(_) => {
                    self.leave(index)?;
                    return Ok(false);
                }
            }
            let code = u32::from_ne_bytes([head[0], head[1], head[2], head[3]]);
            connection.held = needs_quiet(code) && device.in_flight > 0;
            if connection.held {
                return Ok(false);
            }
            // A peer that reads no answers would block us.
            if !writable(&connection.stream) || connection.handler.handle_request().is_err() {
                self.leave(index)?;
                return Ok(false);
            }
            self.follow(index)?;
        }
        Ok(true)
    }

    /// Starts and stops queues according to the frontend's last message.
    fn follow(&mut self, index: usize) -> io::Result<()> {
        let device = &mut self.devices[index];
        let is_control = device.disk.is_none();
        let Link::Open(connection) = &mut device.link else {
            return Ok(());
        };
        let mut guard = lock(&connection.vhost);
        let vhost = &mut *guard;
        let begun = vhost.start(&mut self.serial);
        for (queue, (vring, watched)) in vhost.vrings.iter().zip(&mut connection.kicks).enumerate()
        {
            let token = Token::Kick(index, queue, vring.run).number();
            let wanted = vring.queue.is_some().then_some(token);
            if *watched == wanted {
                continue;
            }
            if let Some(token) = watched.take() {
                self.ring.unwatch(token)?;
            }
            if let (Some(token), Some(kick)) = (wanted, &vring.kick) {
                self.ring.watch(kick.as_fd(), token)?;
                *watched = Some(token);
            }
        }
        for &queue in &begun {
            let vring = &vhost.vrings[queue];
            if vring.faulty {
                device.stats.bad_requests += 1;
                vring.signal_error();
            } else {
                // An earlier daemon may have died between updating its used ring and signalling it.
                vring.signal();
            }
        }
        if is_control && let Some(control) = &mut self.control {
            let running = vhost.vrings.iter().find_map(|vring| vring.queue.as_ref());
            self.control_runs = running.is_some();
            if let (Some(queue), false) = (running, begun.is_empty()) {
                if queue.next_available() == 0 {
                    // A driver that is initialised anew: of another kernel than the ring, if there is one.
                    control.guest_gone(&mut self.engine);
                }
                control.set_ram(
                    Arc::clone(queue.ram()) as Arc<dyn RingMemory>,
                    &mut self.engine,
                );
            }
        }
        drop(guard);
        for queue in begun {
            self.activate(index, queue);
        }
        Ok(())
    }

    /// Handles the disconnection of the frontend.
    fn leave(&mut self, index: usize) -> io::Result<()> {
        if self.devices[index].disk.is_none() {
            self.control_runs = false;
        }
        let device = &mut self.devices[index];
        let gone = std::mem::replace(&mut device.link, Link::Leaving { flushing: false });
        if let Some(disk) = device.disk {
            self.engine.attend(disk, false);
        }
        if let Link::Open(connection) = gone {
            for token in connection.kicks.iter().flatten() {
                self.ring.unwatch(*token)?;
            }
            // Watches must be removed before their descriptors are closed.
            self.ring.submit()?;
        }
        self.active.retain(|&(device, _)| device != index);
        self.touched.retain(|&(device, _)| device != index);
        Ok(())
    }

    /// Flushes the disk of a disconnected frontend when none of its requests is in flight any more.
    pub(super) fn take_leave(&mut self, index: usize) -> io::Result<()> {
        let device = &mut self.devices[index];
        match &mut device.link {
            Link::Leaving { flushing: false } if device.in_flight == 0 => match device.disk {
                Some(disk) => {
                    self.flush_last(index, disk);
                    Ok(())
                }
                None => {
                    if let Some(control) = &mut self.control {
                        if self.stopping {
                            control.close();
                        } else {
                            control.guest_gone(&mut self.engine);
                        }
                    }
                    self.left(index)
                }
            },
            Link::Idle if self.stopping => {
                match device.disk {
                    // Nobody else writes what an earlier guest or daemon left.
                    Some(disk)
                        if self.engine.dirty_pages(disk) > 0
                            || self.not_flushed.contains(&disk) =>
                    {
                        self.flush_last(index, disk);
                    }
                    _ => device.link = Link::Over,
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Submits the flush after which a disk has no frontend.
    fn flush_last(&mut self, index: usize, disk: DiskNumber) {
        self.devices[index].link = Link::Leaving { flushing: true };
        self.engine.submit(Request {
            disk,
            tag: Tag(LAST_FLUSH | index as u64),
            operation: Operation::Flush,
            ram: Arc::new(NoRam),
        });
    }

    fn left(&mut self, index: usize) -> io::Result<()> {
        let device = &mut self.devices[index];
        let more = device.listener.is_some() && !self.stopping;
        device.link = if more { Link::Idle } else { Link::Over };
        self.accept(index)
    }

    pub(super) fn flushed_last(&mut self, index: usize, status: Status) -> io::Result<()> {
        let Some(disk) = self.devices[index].disk else {
            return Ok(());
        };
        if status == Status::Ok {
            self.engine.forget_disk(disk);
            self.not_flushed.remove(&disk);
        } else {
            // Its pages are still valid: nobody else writes to an image that is locked.
            self.engine.forget_frames();
            self.not_flushed.insert(disk);
        }
        self.left(index)
    }
}
