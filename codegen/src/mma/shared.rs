//! Operands of `wgmma` in shared memory (PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout").
//!
//! The contiguous dimension is divided into panels as wide as the swizzle span. Each panel holds all rows, one span
//! after another; panels follow each other. Without a swizzle, the span is one chunk of 16 bytes.

use crate::ir::{Func, Type};
use crate::layout::{LinearLayout, Swizzle};

/// A matrix operand in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// Whether K is contiguous in memory.
    pub k_major: bool,
    pub swizzle: Swizzle,
    pub element_bytes: u32,
    /// Extent along M or N.
    pub extent: u32,
    /// Extent along K.
    pub k: u32,
}

impl Matrix {
    /// The operand that `wgmma` reads from a buffer of this type, in which dimension `k_axis` is K; `None` if it cannot read
    /// it.
    pub fn of(func: &Func, buffer: &Type, k_axis: usize, allows_mn_major: bool) -> Option<Matrix> {
        let Type::Shared { shape: extents, elem, layout } = buffer else { return None };
        let (layout, element_bytes) = (func.layout(*layout), elem.bytes() as u32);
        let &[rows, columns] = &extents[..] else { return None };
        let extents = [rows as u32, columns as u32];
        let shape = layout.shape();
        let matrix = |inner: usize, swizzle| Matrix {
            k_major: inner == k_axis,
            swizzle,
            element_bytes,
            extent: extents[1 - k_axis],
            k: extents[k_axis],
        };
        // The rows of a panel are those of the buffer.
        (extents[k_axis] == shape[k_axis]).then_some(())?;
        let fits = |inner: usize, swizzle: Swizzle| {
            let row = shape[inner] * element_bytes;
            match swizzle {
                // A single panel: each row is one chunk.
                Swizzle::None => {
                    row == swizzle.bytes()
                        && inner != k_axis
                        && *layout == LinearLayout::shared_row_major(shape, &[inner, 1 - inner])
                }
                _ => {
                    let expected =
                        || LinearLayout::shared_swizzled(shape, &[inner, 1 - inner], element_bytes, swizzle.bytes());
                    row >= swizzle.bytes() && *layout == expected()
                }
            }
        };
        Swizzle::ALL
            .into_iter()
            .flat_map(|swizzle| [(0, swizzle), (1, swizzle)])
            .filter(|&(inner, _)| inner == k_axis || allows_mn_major)
            .find(|&(inner, swizzle)| fits(inner, swizzle))
            .map(|(inner, swizzle)| matrix(inner, swizzle))
    }

    /// Elements of one swizzle span.
    pub fn panel(&self) -> u32 {
        self.swizzle.bytes() / self.element_bytes
    }

    /// Byte offset of the element (`at` along M or N, `k`), before the swizzle.
    pub fn offset(&self, at: u32, k: u32) -> u32 {
        let span = self.swizzle.bytes();
        let (inner, outer, rows) = if self.k_major { (k, at, self.extent) } else { (at, k, self.k) };
        (inner / self.panel()) * rows * span + outer * span + (inner % self.panel()) * self.element_bytes
    }

    /// The constant part of a matrix descriptor (PTX ISA, "Matrix Descriptor Format"): leading and stride byte offsets
    /// in units of 16 bytes, and the swizzle mode.
    pub fn descriptor(&self) -> u64 {
        let span = u64::from(self.swizzle.bytes());
        let (eight_rows, next_panel) = (8 * span, u64::from(self.k) * span);
        let (leading, stride) = match (self.k_major, self.swizzle) {
            // Without a swizzle, the two offsets are exchanged.
            (false, Swizzle::None) => (eight_rows, next_panel),
            (false, _) => (next_panel, eight_rows),
            // K-major: with a swizzle, the leading offset is ignored.
            (true, _) => (16, eight_rows),
        };
        let mode: u64 = match self.swizzle {
            Swizzle::None => 0,
            Swizzle::Bytes128 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes32 => 3,
        };
        ((leading >> 4) & 0x3FFF) << 16 | ((stride >> 4) & 0x3FFF) << 32 | mode << 62
    }
}
