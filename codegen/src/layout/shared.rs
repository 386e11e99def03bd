//! Shared-memory layouts: linear maps from the bits of an element offset to tensor coordinates.

use super::gf2::{self, Span};
use super::linear::{Basis, Dim, LinearLayout, bug, unflatten};

/// log2 of the bytes of a shared-memory wavefront: 32 banks of four bytes.
const WAVEFRONT_BYTES_LOG2: u32 = 7;

/// Swizzle modes of TMA and wgmma: they permute 16-byte chunks inside a span of this width.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl Swizzle {
    /// All modes, widest first.
    pub const ALL: [Swizzle; 4] = [Swizzle::Bytes128, Swizzle::Bytes64, Swizzle::Bytes32, Swizzle::None];

    /// Width of the span in bytes; without a swizzle, the 16 bytes of one chunk.
    pub fn bytes(self) -> u32 {
        16 << self.chunk_bits()
    }

    /// Number of bits of the chunk index that are swizzled: address bits from 4 up are XORed with those from 7 up.
    fn chunk_bits(self) -> u32 {
        match self {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 1,
            Swizzle::Bytes64 => 2,
            Swizzle::Bytes128 => 3,
        }
    }

    /// Required alignment of the buffer in bytes: the period of the pattern.
    pub fn alignment(self) -> u32 {
        128 << self.chunk_bits()
    }

    /// The mode with this span: 32, 64 or 128 bytes.
    pub fn of_bytes(bytes: u32) -> Option<Swizzle> {
        Swizzle::ALL.into_iter().find(|&swizzle| swizzle != Swizzle::None && swizzle.bytes() == bytes)
    }

    /// The widest mode whose span fits into a row of this many bytes.
    pub fn widest_for(row_bytes: u32) -> Swizzle {
        Swizzle::ALL.into_iter().find(|swizzle| swizzle.bytes() <= row_bytes).unwrap_or(Swizzle::None)
    }
}

impl LinearLayout {
    /// Row-major order with the axes in `order`, fastest first, without padding or swizzle.
    pub fn shared_row_major(shape: &[u32], order: &[usize]) -> Self {
        let mut offset = Vec::new();
        for &axis in order {
            offset.extend(axis_bases(shape, axis, 1, shape[axis]));
        }
        LinearLayout::shared(shape, offset)
    }

    /// The layout of a tile that dots read, or threads in other orders than it is written, with the axes in `order`, fastest
    /// first: with the widest swizzle that a row allows.
    pub fn shared_for_dots(shape: &[u32], order: &[usize], element_bytes: u32) -> Self {
        match Swizzle::widest_for(shape[order[0]] * element_bytes).bytes() {
            0..=16 => LinearLayout::shared_row_major(shape, order),
            swizzle => LinearLayout::shared_swizzled(shape, order, element_bytes, swizzle),
        }
    }

    /// The layout that TMA boxes with this swizzle produce, and that wgmma descriptors expect.
    ///
    /// The contiguous axis `order[0]` is divided into panels `swizzle_bytes` (32, 64 or 128) wide. Each panel holds all
    /// rows (the other axes in `order`), one span after another; panels follow each other. Inside a panel, bits 4.. of
    /// the byte address (the 16-byte chunk of a span) are XORed with bits 7..: three bits for 128, two for 64, one
    /// for 32. So the chunk index is XORed with the row modulo 8 for 128-byte spans, with half the row modulo 4 for
    /// 64-byte spans, and with a quarter of the row modulo 2 for 32-byte spans. The buffer must be aligned to
    /// [`Swizzle::alignment`].
    ///
    /// # Panics
    /// If the contiguous axis is narrower than the span ([`Swizzle::widest_for`]).
    pub fn shared_swizzled(shape: &[u32], order: &[usize], element_bytes: u32, swizzle_bytes: u32) -> Self {
        let Some(swizzle) = Swizzle::of_bytes(swizzle_bytes) else {
            bug(format!("a swizzle of {swizzle_bytes} bytes"));
        };
        let inner = order[0];
        let panel = swizzle.bytes() / element_bytes;
        if shape[inner] < panel || !element_bytes.is_power_of_two() || element_bytes > 8 {
            bug(format!(
                "a {swizzle_bytes}-byte swizzle of {shape:?} with {element_bytes}-byte elements along axis {inner}"
            ));
        }
        let mut offset = axis_bases(shape, inner, 1, panel);
        for &axis in &order[1..] {
            offset.extend(axis_bases(shape, axis, 1, shape[axis]));
        }
        offset.extend(axis_bases(shape, inner, panel, shape[inner]));
        // An offset with bit `row` set lies in the chunk whose index differs from the logical one in bit `chunk`.
        let element_bits = element_bytes.ilog2();
        for bit in 0..swizzle.chunk_bits() {
            let (chunk, row) = (4 + bit - element_bits, 7 + bit - element_bits);
            if let Some(basis) = offset.get_mut(row as usize) {
                basis[inner] ^= 1 << chunk;
            }
        }
        LinearLayout::shared(shape, offset)
    }

    /// A shared layout for converting a tensor from layout `src` to layout `dst` without bank conflicts and without
    /// padding (as far as the layouts permit).
    ///
    /// In terms of subspaces of coordinates: the lowest offset bits are register bits common to both sides, up to 16
    /// bytes (vector accesses). The highest offset bits do not change the bank, so no combination of them may be the
    /// difference of two lanes of one wavefront, on either side. They are taken from the complement of all lanes, then
    /// from sums of a lane of one side and a lane of the other. The remaining ones are the bank bits.
    ///
    /// With `matrices`, where rows of 8 × 8 matrices of 16-bit elements on one side ([`Self::matrix_move`]) are registers of
    /// a thread on the other, a row is a vector, and the lanes that address the eight rows of a matrix form a wavefront.
    pub fn conversion_scratch(src: &LinearLayout, dst: &LinearLayout, element_bytes: u32, matrices: bool) -> Self {
        let shape = src.shape();
        if dst.shape() != shape || !src.is_distributed() || !dst.is_distributed() {
            bug(format!("conversion from {src} to {dst}"));
        }
        let total = src.num_elements().ilog2() as usize;
        let element_bits = element_bytes.ilog2();
        let matrices = matrices && element_bytes == 2;
        let src_row = matrix_row(src, dst).filter(|_| matrices);
        let dst_row = matrix_row(dst, src).filter(|_| matrices && src_row.is_none());
        let mut vector = match src_row.as_ref().or(dst_row.as_ref()) {
            Some(row) => row.to_vec(),
            None => gf2::intersection(&src.columns(Dim::Register), &dst.columns(Dim::Register)),
        };
        vector.truncate(4u32.saturating_sub(element_bits) as usize);

        // Elements of one four-byte word share its bank, so a word is filled first, with registers of one side if both
        // have none in common.
        let word = 2u32.saturating_sub(element_bits) as usize;
        let mut filled = Span::of_columns(&vector);
        let units = || (0..total).map(|bit| 1 << bit);
        let registers = src.columns(Dim::Register).into_iter().chain(dst.columns(Dim::Register));
        for basis in registers.chain(units()) {
            if vector.len() < word && filled.insert(basis, 0) {
                vector.push(basis);
            }
        }

        // Accesses wider than four bytes are processed in groups of 16 or 8 consecutive lanes.
        let access_bits = element_bits + vector.len() as u32;
        let served = WAVEFRONT_BYTES_LOG2.saturating_sub(access_bits).min(5) as usize;
        let lanes = |layout: &LinearLayout, row: &Option<[u64; 3]>| {
            let columns = layout.columns(Dim::Lane);
            let within_row = if row.is_some() { 2 } else { 0 };
            columns.into_iter().skip(within_row).take(served).collect::<Vec<u64>>()
        };
        let (src_lanes, dst_lanes) = (lanes(src, &src_row), lanes(dst, &dst_row));

        let bank_bits = (WAVEFRONT_BYTES_LOG2 - access_bits) as usize;
        let needed = total.saturating_sub(vector.len() + bank_bits);
        let mut high = same_bank_vectors(&vector, &src_lanes, &dst_lanes, total);
        high.truncate(needed);

        let mut chosen = Span::default();
        for &basis in vector.iter().chain(&high) {
            chosen.insert(basis, 0);
        }
        let rest = src_lanes.iter().chain(&dst_lanes).copied().chain(units());
        let bank: Vec<u64> = rest.filter(|&basis| chosen.insert(basis, 0)).collect();
        // If `high` has too few vectors, bank bits are appended after it: unavoidable conflicts.
        let (bank, spill) = bank.split_at(bank_bits.min(bank.len()));
        let flat = [&vector, bank, &high, spill].concat();
        LinearLayout::shared(shape, flat.iter().map(|&basis| unflatten(shape, basis)).collect())
    }
}

/// The bases of steps `from, 2·from, … < to` along an axis.
fn axis_bases(shape: &[u32], axis: usize, from: u32, to: u32) -> Vec<Basis> {
    (from.ilog2()..to.ilog2())
        .map(|bit| {
            let mut basis = vec![0; shape.len()];
            basis[axis] = 1 << bit;
            basis
        })
        .collect()
}

/// The bits of the elements in a row of the matrices that a warp moves from or to these registers, where `other` has such a
/// row in the first eight registers of a thread.
fn matrix_row(layout: &LinearLayout, other: &LinearLayout) -> Option<[u64; 3]> {
    let (registers, lanes) = (layout.columns(Dim::Register), layout.columns(Dim::Lane));
    let row = [*registers.first()?, *lanes.first()?, *lanes.get(1)?];
    let vector: Vec<u64> = other.columns(Dim::Register).into_iter().take(3).collect();
    let whole = Span::of_columns(&vector);
    let unique = [Dim::Register, Dim::Lane].iter().all(|&dim| layout.free_mask(dim) == 0);
    (unique && row.iter().all(|&bit| whole.solve(bit).is_some())).then_some(row)
}

/// A maximal set of independent vectors whose span intersects neither that of `vector` and `src_lanes` nor that of
/// `vector` and `dst_lanes` (except in zero).
fn same_bank_vectors(vector: &[u64], src_lanes: &[u64], dst_lanes: &[u64], total: usize) -> Vec<u64> {
    let src_side = [vector, src_lanes].concat();
    let dst_side = [vector, dst_lanes].concat();
    let both = gf2::intersection(&src_side, &dst_side);
    // Lanes of one side that the other side does not span, modulo the common subspace.
    let beyond = |lanes: &[u64]| -> Vec<u64> {
        let mut span = Span::of_columns(&both);
        lanes.iter().copied().filter(|&lane| span.insert(lane, 0)).collect()
    };
    let (src_only, dst_only) = (beyond(src_lanes), beyond(dst_lanes));

    let mut reached = Span::of_columns(&src_side);
    dst_side.iter().for_each(|&lane| {
        reached.insert(lane, 0);
    });
    let mut high: Vec<u64> = (0..total).map(|bit| 1 << bit).filter(|&unit| reached.insert(unit, 0)).collect();
    high.extend(src_only.iter().zip(&dst_only).map(|(src, dst)| src ^ dst));
    high
}
