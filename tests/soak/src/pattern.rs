//! Block pattern, which identifies disk, block and write.

/// Block size in bytes.
pub(crate) const BLOCK: usize = 512;

/// Contents of `block` of a disk after the write `generation`; zeroes for generation 0.
pub(crate) fn pattern(disk: u64, block: u64, generation: u64) -> [u64; BLOCK / 8] {
    if generation == 0 {
        return [0; BLOCK / 8];
    }
    let mut words = [0; BLOCK / 8];
    let mut state = disk << 48 ^ block << 32 ^ generation;
    for word in &mut words {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *word = state;
    }
    words[..3].copy_from_slice(&[disk, block, generation]);
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_identifies_disk_block_and_generation() {
        let block = pattern(3, 77, 9);
        assert_eq!(block[..3], [3, 77, 9]);
        let others = [pattern(4, 77, 9), pattern(3, 78, 9), pattern(3, 77, 10)];
        assert!(others.iter().all(|other| other[3..] != block[3..]));
        assert_eq!(pattern(3, 77, 0), [0; 64]);
    }
}
