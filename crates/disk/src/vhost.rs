//! Messages of a frontend (QEMU) on a disk's vhost-user socket, and the state they set up.
//!
//! Messages that change rings or RAM are handled only while no request of the disk is in flight ([`needs_quiet`]): the
//! owner of the [`Vhost`] ensures this.

mod fuzz;

use std::fs::File;
use std::sync::Arc;

use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use vhost::vhost_user::message::{
    FrontendReq, VhostTransferStateDirection, VhostTransferStatePhase, VhostUserConfigFlags,
    VhostUserInflight, VhostUserLog, VhostUserMemoryRegion, VhostUserProtocolFeatures,
    VhostUserShMemConfig, VhostUserSharedMsg, VhostUserSingleMemoryRegion, VhostUserVirtioFeatures,
    VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_CONFIG_WCE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH,
    VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
    VIRTIO_BLK_F_TOPOLOGY, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::inflight::Inflight;
use crate::queue::{
    ENTRIES_MAX, Queue, QueueFault, RANGE_SECTORS_MAX, RANGES_MAX, RingPlaces, SEGMENT_BYTES_MAX,
    SEGMENTS_MAX, Shape,
};
use crate::{GuestRam, RamRegion};

pub use self::fuzz::fuzz_messages;

/// Maximum number of RAM regions accepted.
const RAM_REGIONS_MAX: usize = 256;
/// Bytes of the configuration space that can be read.
const CONFIG_BYTES: usize = 256;
/// Offset of the cache mode in it.
const AT_WRITEBACK: u32 = 32;

/// Fixed properties of a disk.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Geometry {
    pub(crate) size_bytes: u64,
    pub(crate) block_bytes: u32,
    pub(crate) read_only: bool,
    pub(crate) plain: bool,
    pub(crate) queues: u16,
}

/// A virtqueue as the frontend describes it.
#[derive(Debug, Default)]
pub(crate) struct Vring {
    size: u16,
    /// In the frontend's addresses.
    places: RingPlaces,
    base: u16,
    pub(crate) kick: Option<File>,
    call: Option<File>,
    error: Option<File>,
    enabled: bool,
    /// While it runs.
    pub(crate) queue: Option<Queue>,
    /// Whether it was found invalid and must not be started again unchanged.
    pub(crate) faulty: bool,
    /// Number of the current run, to distinguish it from earlier ones.
    pub(crate) run: u64,
}

/// State set up by a connection.
#[derive(Debug)]
pub(crate) struct Vhost {
    geometry: Geometry,
    features: u64,
    protocol: VhostUserProtocolFeatures,
    regions: Vec<(RamRegion, u64)>,
    ram: Option<Arc<GuestRam>>,
    inflight: Option<Inflight>,
    writes_through: bool,
    pub(crate) vrings: Vec<Vring>,
}

/// Whether a message must wait until no request is in flight.
pub(crate) fn needs_quiet(code: u32) -> bool {
    ![
        FrontendReq::GET_FEATURES,
        FrontendReq::GET_PROTOCOL_FEATURES,
        FrontendReq::SET_PROTOCOL_FEATURES,
        FrontendReq::GET_QUEUE_NUM,
        FrontendReq::GET_MAX_MEM_SLOTS,
        FrontendReq::GET_CONFIG,
        FrontendReq::SET_CONFIG,
        FrontendReq::SET_VRING_CALL,
        FrontendReq::SET_VRING_ERR,
    ]
    .iter()
    .any(|&quick| u32::from(quick) == code)
}

impl Vhost {
    pub(crate) fn new(geometry: Geometry) -> Self {
        let mut vrings = Vec::new();
        vrings.resize_with(geometry.queues.into(), Vring::default);
        Self {
            geometry,
            features: 0,
            protocol: VhostUserProtocolFeatures::empty(),
            regions: Vec::new(),
            ram: None,
            inflight: None,
            writes_through: false,
            vrings,
        }
    }

    fn offered(&self) -> u64 {
        let bit = |number: u32| 1 << number;
        let mut features = bit(VIRTIO_F_VERSION_1)
            | bit(VIRTIO_RING_F_INDIRECT_DESC)
            | bit(VIRTIO_RING_F_EVENT_IDX)
            | bit(VIRTIO_BLK_F_SIZE_MAX)
            | bit(VIRTIO_BLK_F_SEG_MAX)
            | bit(VIRTIO_BLK_F_BLK_SIZE)
            | bit(VIRTIO_BLK_F_TOPOLOGY)
            | bit(VIRTIO_BLK_F_FLUSH)
            | bit(VIRTIO_BLK_F_MQ)
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        if self.geometry.read_only {
            features |= bit(VIRTIO_BLK_F_RO);
        } else if !self.geometry.plain {
            features |= bit(VIRTIO_BLK_F_CONFIG_WCE)
                | bit(VIRTIO_BLK_F_DISCARD)
                | bit(VIRTIO_BLK_F_WRITE_ZEROES);
        }
        features
    }

    fn accepted(&self, feature: u32) -> bool {
        self.features & (1 << feature) != 0
    }

    /// The limits against which requests are validated.
    pub(crate) fn shape(&self) -> Shape {
        let Geometry {
            size_bytes,
            block_bytes,
            read_only,
            plain,
            ..
        } = self.geometry;
        Shape {
            size_bytes,
            block_bytes,
            read_only,
            plain,
            durable: self.writes_through || !self.accepted(VIRTIO_BLK_F_FLUSH),
        }
    }

    pub(crate) fn ram(&self) -> Option<&Arc<GuestRam>> {
        self.ram.as_ref()
    }

    /// Starts the virtqueues that can run and do not, numbered by `run`; returns the indices of those started.
    pub(crate) fn start(&mut self, run: &mut u64) -> Vec<usize> {
        let mut begun = Vec::new();
        let Some(ram) = self.ram.clone() else {
            return begun;
        };
        let event_index = self.accepted(VIRTIO_RING_F_EVENT_IDX);
        for index in 0..self.geometry.queues {
            let vring = &self.vrings[usize::from(index)];
            if !self.is_ready(vring) || vring.faulty || vring.queue.is_some() {
                continue;
            }
            let places = self.places(vring);
            let part = self
                .inflight
                .as_ref()
                .and_then(|region| region.queue(index, vring.size));
            let started = places.ok_or(QueueFault::Ring).and_then(|places| {
                Queue::start(
                    Arc::clone(&ram),
                    places,
                    vring.size,
                    event_index,
                    vring.base,
                    part,
                )
            });
            let vring = &mut self.vrings[usize::from(index)];
            *run += 1;
            vring.run = *run;
            match started {
                Ok(queue) => vring.queue = Some(queue),
                Err(_) => vring.faulty = true,
            }
            begun.push(usize::from(index));
        }
        begun
    }

    fn is_ready(&self, vring: &Vring) -> bool {
        let by_protocol = self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() != 0;
        vring.kick.is_some() && (vring.enabled || !by_protocol)
    }

    /// Where a ring is, guest-physical; `None` if it is not in RAM.
    fn places(&self, vring: &Vring) -> Option<RingPlaces> {
        let translate = |user: u64| {
            let (region, start) = self.regions.iter().find(|(region, start)| {
                user.checked_sub(*start)
                    .is_some_and(|offset| offset < region.bytes)
            })?;
            Some(region.address + (user - start))
        };
        Some(RingPlaces {
            table: translate(vring.places.table)?,
            available: translate(vring.places.available)?,
            used: translate(vring.places.used)?,
        })
    }

    /// Whether a virtqueue cannot run because it is in memory that the frontend does not share.
    pub(crate) fn has_unshared_queue(&self) -> bool {
        let mut vrings = self.vrings.iter();
        vrings.any(|vring| self.is_ready(vring) && self.places(vring).is_none())
    }

    fn stop_all(&mut self) {
        for vring in &mut self.vrings {
            vring.stop();
        }
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        self.vrings
            .get_mut(index as usize)
            .ok_or(Error::InvalidParam)
    }

    /// Stops a virtqueue that is to change; it may be started again afterwards.
    fn changing(&mut self, index: u32) -> Result<&mut Vring> {
        let vring = self.vring(index)?;
        if let Some(queue) = vring.queue.take() {
            vring.base = queue.next_available();
        }
        vring.faulty = false;
        Ok(vring)
    }

    fn map_ram(&mut self) -> Result<()> {
        // Rings are in the old RAM.
        for index in 0..self.vrings.len() {
            #[expect(clippy::cast_possible_truncation, reason = "as many as queues, a u16")]
            self.changing(index as u32)?;
        }
        if self.regions.is_empty() {
            self.ram = None;
            return Ok(());
        }
        let regions = self
            .regions
            .iter()
            .map(|(region, _)| region.clone())
            .collect();
        let ram = GuestRam::new(regions)
            .map_err(|error| Error::ReqHandlerError(std::io::Error::other(error)))?;
        self.ram = Some(Arc::new(ram));
        Ok(())
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        let Geometry {
            size_bytes,
            block_bytes,
            queues,
            ..
        } = self.geometry;
        let sectors_per_page = 4096 / 512;
        let blocks_per_page = 4096 / block_bytes;
        let mut config = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &(size_bytes / 512).to_le_bytes());
        put(8, &SEGMENT_BYTES_MAX.to_le_bytes());
        put(12, &SEGMENTS_MAX.to_le_bytes());
        put(20, &block_bytes.to_le_bytes());
        put(24, &blocks_per_page.trailing_zeros().to_le_bytes()[..1]);
        put(26, &blocks_per_page.to_le_bytes()[..2]);
        put(AT_WRITEBACK as usize, &[u8::from(!self.writes_through)]);
        put(34, &queues.to_le_bytes());
        put(36, &RANGE_SECTORS_MAX.to_le_bytes());
        put(40, &RANGES_MAX.to_le_bytes());
        put(44, &u32::to_le_bytes(sectors_per_page));
        put(48, &RANGE_SECTORS_MAX.to_le_bytes());
        put(52, &RANGES_MAX.to_le_bytes());
        put(56, &[1]);
        config
    }
}

impl Vring {
    /// Marks it invalid: it is not served until it is set up again, and the frontend is notified.
    pub(crate) fn fail(&mut self) {
        self.queue = None;
        self.faulty = true;
        self.signal_error();
    }

    /// Notifies the guest of new entries in its used ring.
    pub(crate) fn signal(&self) {
        signal(self.call.as_ref());
    }

    /// Notifies the frontend of a fault.
    pub(crate) fn signal_error(&self) {
        signal(self.error.as_ref());
    }

    fn stop(&mut self) {
        *self = Self {
            size: self.size,
            places: self.places,
            call: self.call.take(),
            error: self.error.take(),
            base: self
                .queue
                .take()
                .map_or(self.base, |queue| queue.next_available()),
            ..Self::default()
        };
    }
}

fn signal(file: Option<&File>) {
    if let Some(file) = file {
        // A full counter wakes the reader as well; the reader may have closed its end.
        let _ = rustix::io::write(file, &1u64.to_ne_bytes());
    }
}

/// A descriptor that is only signalled must never block the signalling thread.
fn unblocked(file: Option<File>) -> Result<Option<File>> {
    if let Some(file) = &file {
        fcntl_getfl(file)
            .and_then(|flags| fcntl_setfl(file, flags | OFlags::NONBLOCK))
            .map_err(|error| Error::ReqHandlerError(error.into()))?;
    }
    Ok(file)
}

fn ram_region(region: &VhostUserMemoryRegion, file: File) -> (RamRegion, u64) {
    let ram = RamRegion {
        address: region.guest_phys_addr,
        bytes: region.memory_size,
        file: Arc::new(file),
        offset: region.mmap_offset,
    };
    (ram, region.user_addr)
}

const UNSUPPORTED: Error = Error::InvalidOperation("not supported");

impl VhostUserBackendReqHandlerMut for Vhost {
    /// Begins a new device: QEMU keeps the connection when a device is unplugged, and no other message resets the device's state.
    fn set_owner(&mut self) -> Result<()> {
        *self = Self {
            protocol: self.protocol,
            ..Self::new(self.geometry)
        };
        Ok(())
    }

    fn reset_owner(&mut self) -> Result<()> {
        self.reset_device()
    }

    fn reset_device(&mut self) -> Result<()> {
        self.stop_all();
        self.features = 0;
        self.writes_through = false;
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(self.offered())
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !self.offered() != 0 {
            return Err(Error::FeatureMismatch);
        }
        self.features = features;
        Ok(())
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        self.regions = regions
            .iter()
            .zip(files)
            .map(|(region, file)| ram_region(region, file))
            .collect();
        self.map_ram().map(|()| None)
    }

    fn set_vring_num(&mut self, index: u32, entries: u32) -> Result<()> {
        let entries = u16::try_from(entries).map_err(|_| Error::InvalidParam)?;
        if !entries.is_power_of_two() || entries > ENTRIES_MAX {
            return Err(Error::InvalidParam);
        }
        self.changing(index)?.size = entries;
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        table: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        self.changing(index)?.places = RingPlaces {
            table,
            available,
            used,
        };
        Ok(())
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base).map_err(|_| Error::InvalidParam)?;
        self.changing(index)?.base = base;
        Ok(())
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let vring = self.vring(index)?;
        vring.stop();
        Ok(VhostUserVringState::new(index, vring.base.into()))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        // Without one the ring would have to be polled.
        let file = file.ok_or(Error::InvalidParam)?;
        self.changing(index.into())?.kick = Some(file);
        Ok(())
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let vring = self.vring(index.into())?;
        vring.call = unblocked(file)?;
        // Notifications of earlier completions were lost, and with event indices no later batch would trigger them.
        vring.signal();
        Ok(())
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        self.vring(index.into())?.error = unblocked(file)?;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        self.protocol =
            VhostUserProtocolFeatures::from_bits(features).ok_or(Error::FeatureMismatch)?;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(self.geometry.queues.into())
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        if enable {
            self.vring(index)?.enabled = true;
        } else {
            self.changing(index)?.enabled = false;
        }
        Ok(())
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let config = self.config();
        let range = offset as usize..(offset as usize).saturating_add(size as usize);
        Ok(config.get(range).ok_or(Error::InvalidParam)?.to_vec())
    }

    fn set_config(
        &mut self,
        offset: u32,
        bytes: &[u8],
        _flags: VhostUserConfigFlags,
    ) -> Result<()> {
        if !self.accepted(VIRTIO_BLK_F_CONFIG_WCE) || offset != AT_WRITEBACK {
            return Err(Error::InvalidParam);
        }
        self.writes_through = match bytes {
            [0] => true,
            [1] => false,
            _ => return Err(Error::InvalidParam),
        };
        if let Some(region) = &self.inflight {
            region.set_writes_through(self.writes_through);
        }
        Ok(())
    }

    fn set_gpu_socket(&mut self, _socket: GpuBackend) -> Result<()> {
        Err(UNSUPPORTED)
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(UNSUPPORTED)
    }

    fn get_inflight_fd(&mut self, wanted: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let (queues, entries) = (wanted.num_queues, wanted.queue_size);
        if queues > self.geometry.queues || entries > ENTRIES_MAX {
            return Err(Error::InvalidParam);
        }
        let file = Inflight::make(queues, entries).map_err(Error::ReqHandlerError)?;
        let bytes = Inflight::bytes(queues, entries);
        Ok((VhostUserInflight::new(bytes, 0, queues, entries), file))
    }

    fn set_inflight_fd(&mut self, told: &VhostUserInflight, file: File) -> Result<()> {
        if told.num_queues > self.geometry.queues || told.queue_size > ENTRIES_MAX {
            return Err(Error::InvalidParam);
        }
        let region = Inflight::map(
            file,
            told.mmap_offset,
            told.mmap_size,
            told.num_queues,
            told.queue_size,
        )
        .map_err(|error| Error::ReqHandlerError(std::io::Error::other(error)))?;
        self.writes_through |= region.writes_through();
        region.set_writes_through(self.writes_through);
        self.inflight = Some(region);
        Ok(())
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(RAM_REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy_listening: Option<bool>,
    ) -> Result<Option<u64>> {
        if self.regions.len() == RAM_REGIONS_MAX {
            return Err(Error::InvalidParam);
        }
        self.regions.push(ram_region(region, file));
        let mapped = self.map_ram();
        if mapped.is_err() {
            self.regions.pop();
        }
        mapped.map(|()| None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let (address, bytes) = (region.guest_phys_addr, region.memory_size);
        let index = self
            .regions
            .iter()
            .position(|(known, _)| known.address == address && known.bytes == bytes)
            .ok_or(Error::InvalidParam)?;
        self.regions.remove(index);
        self.map_ram()
    }

    fn set_device_state_fd(
        &mut self,
        _direction: VhostTransferStateDirection,
        _phase: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        Err(UNSUPPORTED)
    }

    fn check_device_state(&mut self) -> Result<()> {
        Err(UNSUPPORTED)
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        Err(UNSUPPORTED)
    }

    fn set_log_base(&mut self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(UNSUPPORTED)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    const GEOMETRY: Geometry = Geometry {
        size_bytes: 1 << 20,
        block_bytes: 512,
        read_only: false,
        plain: false,
        queues: 1,
    };

    fn add_ram(vhost: &mut Vhost, bytes: u64) -> Result<Option<u64>> {
        let file = File::from(memfd_create("ram", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        let region = VhostUserSingleMemoryRegion::new(0, bytes, 0x7000_0000, 0);
        vhost.add_mem_region(&region, file, None)
    }

    /// A queue whose used ring is at this address, and the others at the beginning of RAM.
    fn set_used(vhost: &mut Vhost, used: u64) {
        let (ring, flags) = (0x7000_0000, VhostUserVringAddrFlags::empty());
        vhost.set_vring_addr(0, flags, ring, used, ring, 0).unwrap();
    }

    #[test]
    fn a_device_that_is_plugged_again_begins_anew_on_the_same_connection() {
        let mut vhost = Vhost::new(GEOMETRY);
        vhost.set_owner().unwrap();
        vhost.set_features(vhost.offered()).unwrap();
        vhost
            .set_config(AT_WRITEBACK, &[0], VhostUserConfigFlags::WRITABLE)
            .unwrap();
        add_ram(&mut vhost, 2 << 20).unwrap();
        assert!(add_ram(&mut vhost, 2 << 20).is_err());
        vhost.set_vring_num(0, 128).unwrap();
        vhost.set_vring_base(0, 77).unwrap();

        vhost.set_owner().unwrap();
        add_ram(&mut vhost, 4 << 20).unwrap();
        assert!(vhost.ram().unwrap().contains(0, 4 << 20));
        let base = vhost.get_vring_base(0).unwrap().num;
        assert_eq!(base, 0);
        assert!(!vhost.writes_through);
    }

    #[test]
    fn a_queue_in_memory_that_is_not_shared_is_seen() {
        let mut vhost = Vhost::new(GEOMETRY);
        let ring = 0x7000_0000;
        set_used(&mut vhost, ring);
        assert!(!vhost.has_unshared_queue(), "nobody uses it");
        let kick = memfd_create("kick", MemfdFlags::CLOEXEC).unwrap();
        vhost.set_vring_kick(0, Some(kick.into())).unwrap();
        assert!(vhost.has_unshared_queue());
        add_ram(&mut vhost, 2 << 20).unwrap();
        assert!(!vhost.has_unshared_queue());
        set_used(&mut vhost, ring + (2 << 20));
        assert!(vhost.has_unshared_queue());
    }
}
