//! Layouts of MMA fragments and shared-memory matrix descriptors, element by element, as the PTX ISA defines them.

/// Mask of the bits of an f32 that tensor cores read as tf32.
pub const TF32_MASK: u64 = crate::num::TF32_KEPT as u64;

/// Descriptor of a `wgmma` operand in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    start: u64,
    leading: u64,
    stride: u64,
    /// Width of the swizzle pattern in bytes.
    span: u64,
}

impl Descriptor {
    /// Decodes the 64 bits of a descriptor (PTX ISA, "Matrix Descriptor Format").
    pub fn decode(bits: u64) -> Result<Descriptor, String> {
        let field = |from: u32| ((bits >> from) & 0x3FFF) << 4;
        let span = match bits >> 62 {
            1 => 128,
            2 => 64,
            3 => 32,
            _ => 16,
        };
        if (bits >> 49) & 7 != 0 {
            return Err("unsupported matrix descriptor: its base offset is not zero".into());
        }
        Ok(Descriptor { start: field(0), leading: field(16), stride: field(32), span })
    }

    /// Address of the element at index `at` along M or N and `k` along K; an element has `bytes` bytes.
    pub fn address(&self, [at, k]: [u64; 2], k_major: bool, bytes: u64) -> u64 {
        let per_span = self.span / bytes;
        // Without a swizzle, core matrices of eight 16-byte chunks lie `leading` apart along K and `stride` apart along
        // M or N.
        let offset = if self.span == 16 {
            let (row, column) = if k_major { (at, k) } else { (k, at) };
            let (along_k, along_at) = if k_major { (column / per_span, row / 8) } else { (row / 8, column / per_span) };
            along_k * self.leading + along_at * self.stride + (row % 8) * 16 + (column % per_span) * bytes
        } else if k_major {
            (at / 8) * self.stride + (at % 8) * self.span + k * bytes
        } else {
            (at / per_span) * self.leading + (at % per_span) * bytes + (k / 8) * self.stride + (k % 8) * self.span
        };
        let linear = self.start + offset;
        let rows = match self.span {
            128 => 7,
            64 => 3,
            32 => 1,
            _ => 0,
        };
        linear ^ (((linear >> 7) & rows) << 4)
    }
}

/// Row and column of accumulator register `r` of lane `lane`, in a 16-row slab of adjacent `m16n8` tiles.
pub fn accumulator(lane: usize, r: usize) -> (usize, usize) {
    (lane / 4 + 8 * ((r / 2) % 2), 8 * (r / 4) + 2 * (lane % 4) + r % 2)
}

/// Row and K index of element `e` of word `w` of an A fragment with `per_word` elements in a word.
pub fn a(lane: usize, w: usize, e: usize, per_word: usize) -> (usize, usize) {
    (lane / 4 + 8 * (w % 2), per_word * (lane % 4 + 4 * (w / 2)) + e)
}

/// K index and column of element `e` of word `w` of a B fragment with `per_word` elements in a word.
pub fn b(lane: usize, w: usize, e: usize, per_word: usize) -> (usize, usize) {
    (per_word * (lane % 4 + 4 * w) + e, lane / 4)
}
