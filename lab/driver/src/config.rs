//! The configuration space of a block device.

/// The configuration of a block device (`struct virtio_blk_config`, virtio 1.2 §5.2.4). Its features determine which
/// fields are valid.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Size in sectors of 512 bytes.
    pub capacity_sectors: u64,
    /// Maximum number of segments of a request.
    pub segments_max: u32,
    /// Logical block size in bytes.
    pub block_bytes: u32,
    /// Whether writes may complete before they are on stable storage.
    pub write_cache: bool,
    /// Number of queues.
    pub queues: u16,
    /// Maximum number of sectors of a range to be discarded.
    pub discard_sectors_max: u32,
    /// Maximum number of ranges of a discard.
    pub discard_ranges_max: u32,
    /// Alignment of discards in sectors.
    pub discard_alignment_sectors: u32,
    /// Maximum number of sectors of a range to be zeroed.
    pub zeroes_sectors_max: u32,
    /// Maximum number of ranges of a write of zeros.
    pub zeroes_ranges_max: u32,
    /// Whether a write of zeros may free storage.
    pub zeroes_may_unmap: bool,
}

impl Config {
    /// Number of bytes that are read.
    pub(crate) const BYTES: u32 = 60;

    pub(crate) fn parse(bytes: &[u8; Self::BYTES as usize]) -> Self {
        let u16_at = |at| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let u32_at = |at| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        Self {
            capacity_sectors: u64::from(u32_at(0)) | u64::from(u32_at(4)) << 32,
            segments_max: u32_at(12),
            block_bytes: u32_at(20),
            write_cache: bytes[32] != 0,
            queues: u16_at(34),
            discard_sectors_max: u32_at(36),
            discard_ranges_max: u32_at(40),
            discard_alignment_sectors: u32_at(44),
            zeroes_sectors_max: u32_at(48),
            zeroes_ranges_max: u32_at(52),
            zeroes_may_unmap: bytes[56] != 0,
        }
    }
}
