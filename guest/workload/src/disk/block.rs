//! Signed blocks of 1 KiB: each identifies itself and determines all of its bytes.
//!
//! The first 16 bytes name the block: file, number, generation, seed. All other bytes follow from
//! them, so a block is its own checksum: one that is torn, misplaced, old or corrupted is distinguished
//! from the expected block, and the block found instead is identified by its own name.

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 1024;
const WORDS: usize = BLOCK_BYTES / 8;

/// What a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Name {
    /// File, or another number of what the block is a part of.
    pub file: u32,
    /// Its number in the file.
    pub number: u32,
    /// How often it was written, or in which write.
    pub generation: u32,
    /// Tells one run from another.
    pub seed: u32,
}

impl Name {
    fn words(self) -> [u64; 2] {
        let pair = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        [
            pair(self.file, self.number),
            pair(self.generation, self.seed),
        ]
    }

    /// The block of this name.
    pub fn block(self) -> [u8; BLOCK_BYTES] {
        let [first, second] = self.words();
        let mixed = (first ^ second.rotate_left(17)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mixed = (mixed ^ (mixed >> 29) ^ second).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let base = mixed ^ (mixed >> 32);
        let mut bytes = [0; BLOCK_BYTES];
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (nth, word) in words.iter_mut().enumerate() {
            let value = base.wrapping_add((nth as u64).wrapping_mul(0xbf58_476d_1ce4_e5b9));
            *word = value.to_le_bytes();
        }
        words[0] = first.to_le_bytes();
        words[1] = second.to_le_bytes();
        bytes
    }

    /// The name of a block that is whole, and `None` for any other bytes.
    pub fn of(block: &[u8]) -> Option<Self> {
        let (words, _) = block.as_chunks::<8>();
        if words.len() != WORDS {
            return None;
        }
        let halves = |word: [u8; 8]| {
            let [a, b, c, d, e, f, g, h] = word;
            (
                u32::from_le_bytes([e, f, g, h]),
                u32::from_le_bytes([a, b, c, d]),
            )
        };
        let (file, number) = halves(words[0]);
        let (generation, seed) = halves(words[1]);
        let name = Self {
            file,
            number,
            generation,
            seed,
        };
        (name.block() == block).then_some(name)
    }
}

/// Signs the blocks of `bytes`, a multiple of 1 KiB, numbered from `first.number` on.
pub fn sign(bytes: &mut [u8], first: Name) {
    for (block, number) in bytes.chunks_exact_mut(BLOCK_BYTES).zip(first.number..) {
        block.copy_from_slice(&Name { number, ..first }.block());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_block_tells_its_name(file: u32, number: u32, generation: u32, seed: u32) {
            let name = Name { file, number, generation, seed };
            prop_assert_eq!(Name::of(&name.block()), Some(name));
        }

        #[test]
        fn a_block_with_a_flipped_bit_is_no_block(
            file: u32, generation: u32, byte in 0..BLOCK_BYTES, bit in 0u32..8,
        ) {
            let name = Name { file, generation, ..Name::default() };
            let mut block = name.block();
            block[byte] ^= 1 << bit;
            prop_assert_eq!(Name::of(&block), None);
        }

        #[test]
        fn two_halves_of_different_blocks_are_no_block(
            file: u32, one in 0u32..1000, other in 0u32..1000, cut in 2..WORDS,
        ) {
            prop_assume!(one != other);
            let name = |generation| Name { file, generation, ..Name::default() };
            let mut torn = name(one).block();
            torn[cut * 8..].copy_from_slice(&name(other).block()[cut * 8..]);
            prop_assert_eq!(Name::of(&torn), None);
        }
    }

    #[test]
    fn zeros_and_parts_are_no_blocks() {
        assert_eq!(Name::of(&[0; BLOCK_BYTES]), None);
        assert_eq!(Name::of(&Name::default().block()[..512]), None);
    }

    #[test]
    fn blocks_are_numbered_on() {
        let mut bytes = vec![0; 3 * BLOCK_BYTES];
        let first = Name {
            number: 7,
            ..Name::default()
        };
        sign(&mut bytes, first);
        let numbers: Vec<_> = bytes
            .chunks(BLOCK_BYTES)
            .map(|block| Name::of(block).unwrap().number)
            .collect();
        assert_eq!(numbers, [7, 8, 9]);
    }
}
