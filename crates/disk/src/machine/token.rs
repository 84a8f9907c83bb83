//! Tokens that identify the origin of a completion of the `io_uring`.

/// Contents of the ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Token {
    Command,
    Alarm,
    /// Of [`Machine::follow_burst`].
    Burst,
    /// Of [`Machine::sockets`].
    Sockets,
    Listener(usize),
    Connection(usize, u64),
    Kick(usize, usize, u64),
    Submission(usize),
}

impl Token {
    const SERIAL_BITS: u32 = 40;

    pub(super) fn number(self) -> u64 {
        let pack = |kind: u64, device: usize, queue: usize, serial: u64| {
            debug_assert!(device < 1 << 12 && queue < 1 << 8 && serial < 1 << Self::SERIAL_BITS);
            kind << 60 | (device as u64) << 48 | (queue as u64) << Self::SERIAL_BITS | serial
        };
        match self {
            Self::Command => pack(0, 0, 0, 0),
            Self::Alarm => pack(1, 0, 0, 0),
            Self::Sockets => pack(2, 0, 0, 0),
            Self::Listener(device) => pack(3, device, 0, 0),
            Self::Connection(device, serial) => pack(4, device, 0, serial),
            Self::Kick(device, queue, run) => pack(5, device, queue, run),
            Self::Submission(index) => pack(6, 0, 0, index as u64),
            Self::Burst => pack(7, 0, 0, 0),
        }
    }

    pub(super) fn of(number: u64) -> Self {
        let device = (number >> 48 & 0xfff) as usize;
        let queue = (number >> Self::SERIAL_BITS & 0xff) as usize;
        let serial = number & ((1 << Self::SERIAL_BITS) - 1);
        match number >> 60 {
            0 => Self::Command,
            1 => Self::Alarm,
            2 => Self::Sockets,
            3 => Self::Listener(device),
            4 => Self::Connection(device, serial),
            5 => Self::Kick(device, queue, serial),
            7 => Self::Burst,
            _ => Self::Submission(serial as usize),
        }
    }
}

/// Tags of the flush when a frontend is gone have this bit and the number of the device; others are places in
/// [`Machine::requests`].
pub(super) const LAST_FLUSH: u64 = 1 << 63;

/// Items addressed by small numbers.
pub(super) struct Slab<T> {
    pub(super) places: Vec<Option<T>>,
    pub(super) free: Vec<usize>,
}

impl<T> Slab<T> {
    pub(super) fn new() -> Self {
        let (places, free) = (Vec::new(), Vec::new());
        Self { places, free }
    }

    /// The position of the next item to be inserted.
    pub(super) fn next(&self) -> usize {
        self.free.last().copied().unwrap_or(self.places.len())
    }

    pub(super) fn put(&mut self, thing: T) -> usize {
        let place = self.next();
        if self.free.pop().is_some() {
            self.places[place] = Some(thing);
        } else {
            self.places.push(Some(thing));
        }
        place
    }

    pub(super) fn get(&mut self, place: usize) -> Option<&mut T> {
        self.places.get_mut(place)?.as_mut()
    }

    pub(super) fn take(&mut self, place: usize) -> Option<T> {
        let thing = self.places.get_mut(place)?.take()?;
        self.free.push(place);
        Some(thing)
    }
}
