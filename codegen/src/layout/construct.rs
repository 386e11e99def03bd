//! Constructors of distributed layouts: blocked layouts, and the fragments of tensor-core instructions.
//!
//! Fragment formulas are those of the PTX ISA ("Matrix Fragments for mma.m16n8k…", "Register Fragments for
//! wgmma.m64k…"); the tests spell them out per element.

use super::linear::{Basis, Dim, LinearLayout, ThreadBases, bug};

/// log2 of the lanes of a warp.
const LANE_BITS: usize = 5;

/// Builds a distributed layout from the inside out: each step covers a larger box of the tensor.
#[derive(Clone, Debug)]
pub struct LayoutBuilder {
    shape: Vec<u32>,
    /// Extent covered by the bits so far, along each axis.
    covered: Vec<u32>,
    bases: [Vec<Basis>; 4],
}

impl LayoutBuilder {
    /// Starts with one element of a tensor of this shape.
    pub fn new(shape: &[u32]) -> Self {
        LayoutBuilder { shape: shape.to_vec(), covered: vec![1; shape.len()], bases: Default::default() }
    }

    /// Adds bits of `dim` along `axis`, for `extent` repetitions of the box so far. Bits that exceed the tensor wrap
    /// to its start: lanes and warps then hold replicas, and such register bits are omitted.
    #[must_use]
    pub fn along(mut self, dim: Dim, axis: usize, extent: u32) -> Self {
        if !extent.is_power_of_two() || axis >= self.shape.len() || dim == Dim::Offset {
            bug(format!("{extent} steps of {dim:?} along axis {axis} of {:?}", self.shape));
        }
        for _ in 0..extent.ilog2() {
            let mut basis = vec![0; self.shape.len()];
            let inside = self.covered[axis] < self.shape[axis];
            if inside {
                basis[axis] = self.covered[axis];
                self.covered[axis] *= 2;
            }
            if inside || dim != Dim::Register {
                self.bases[dim as usize].push(basis);
            }
        }
        self
    }

    /// Adds bits of `dim` whose `extent` values hold replicas.
    #[must_use]
    pub fn replicas(mut self, dim: Dim, extent: u32) -> Self {
        let zero = vec![0; self.shape.len()];
        self.bases[dim as usize].extend(vec![zero; extent.ilog2() as usize]);
        self
    }

    /// Completes the layout: additional registers cover the rest of the tensor, axes in `order`.
    pub fn wrap(mut self, order: &[usize]) -> LinearLayout {
        for &axis in order {
            let rest = self.shape[axis] / self.covered[axis];
            self = self.along(Dim::Register, axis, rest);
        }
        let [register, lane, warp, block] = self.bases;
        LinearLayout::distributed(&self.shape, ThreadBases { register, lane, warp, block })
    }
}

impl LinearLayout {
    /// Triton's blocked layout. Each thread holds a box of `size_per_thread`; `threads_per_warp` boxes tile the box of
    /// a warp, and `warps_per_cta` of those the box of the program. `order` lists the axes, fastest first. For a larger
    /// tensor, the program's box repeats in additional registers; for a smaller one, lanes and warps hold replicas.
    pub fn blocked(
        shape: &[u32],
        size_per_thread: &[u32],
        threads_per_warp: &[u32],
        warps_per_cta: &[u32],
        order: &[usize],
    ) -> Self {
        let rank = shape.len();
        let lengths = [size_per_thread.len(), threads_per_warp.len(), warps_per_cta.len(), order.len()];
        if lengths != [rank; 4] {
            bug(format!("a blocked layout of rank {rank} with parameters of rank {lengths:?}"));
        }
        let mut builder = LayoutBuilder::new(shape);
        let steps = [(Dim::Register, size_per_thread), (Dim::Lane, threads_per_warp), (Dim::Warp, warps_per_cta)];
        for (dim, sizes) in steps {
            for &axis in order {
                builder = builder.along(dim, axis, sizes[axis]);
            }
        }
        builder.wrap(order)
    }

    /// The blocked layout that distributes `num_warps` warps over a tensor with this box per thread. Lanes, then warps,
    /// fill the axes in `order`; the rest goes along the slowest axis, as replicas.
    pub fn blocked_filling(shape: &[u32], size_per_thread: &[u32], num_warps: u32, order: &[usize]) -> Self {
        if shape.is_empty() {
            return LayoutBuilder::new(shape).replicas(Dim::Lane, 32).replicas(Dim::Warp, num_warps).wrap(order);
        }
        let mut remaining: Vec<u32> =
            shape.iter().zip(size_per_thread).map(|(extent, size)| (extent / size).max(1)).collect();
        let mut fill = |mut count: u32| {
            let mut sizes = vec![1; shape.len()];
            for (i, &axis) in order.iter().enumerate() {
                sizes[axis] = if i + 1 == order.len() { count } else { count.min(remaining[axis]) };
                count /= sizes[axis];
                remaining[axis] = (remaining[axis] / sizes[axis]).max(1);
            }
            sizes
        };
        let lanes = fill(1 << LANE_BITS);
        let warps = fill(num_warps);
        Self::blocked(shape, size_per_thread, &lanes, &warps, order)
    }

    /// A layout of `[k, n]` for transposition between memory that is contiguous along `n` and along `k`. Each thread
    /// holds 4×4 boxes, and the lanes of one wavefront cover both directions, so that accesses to either side of a
    /// swizzled buffer are free of bank conflicts.
    pub fn transposing(shape: &[u32], num_warps: u32) -> Self {
        let small = |axis: usize, most: u32| most.min(shape[axis]);
        LayoutBuilder::new(shape)
            .along(Dim::Register, 1, small(1, 4))
            .along(Dim::Register, 0, small(0, 4))
            .along(Dim::Lane, 0, 2)
            .along(Dim::Lane, 1, 4)
            .along(Dim::Lane, 0, 4)
            .along(Dim::Warp, 1, num_warps)
            .wrap(&[0, 1])
    }

    /// The accumulator of `mma.sync.m16n8` with 32-bit elements over a tensor `[m, n]`: c0, c1 in row lane/4, columns
    /// 2·(lane%4)+{0,1}; c2, c3 eight rows below. Warps tile `[m, n]`, along m first; additional instructions cover n,
    /// then m, with four registers each.
    pub fn mma_m16n8(shape: &[u32], warps_per_cta: [u32; 2]) -> Self {
        check_matrix(shape, [16, 8]);
        accumulator_tile(LayoutBuilder::new(shape))
            .along(Dim::Warp, 0, warps_per_cta[0])
            .along(Dim::Warp, 1, warps_per_cta[1])
            .wrap(&[1, 0])
    }

    /// The A operand `[m, k]` of `mma.sync.m16n8`: k16 for 16-bit elements, k32 for 8-bit, k8 for tf32 and
    /// f64. Warps along n hold replicas. Instructions cover k, then m.
    ///
    /// The 32-bit and 64-bit elements of a lane are neighbors along k, where the PTX ISA has them four apart. This is valid
    /// because a dot sums over k in any order that both operands share. Loads then take two elements at a time with
    /// fewer bank conflicts, and an accumulator is an A operand without conversion.
    pub fn mma_m16n8_a(shape: &[u32], element_bits: u32, warps_per_cta: [u32; 2]) -> Self {
        let per_word = elements_per_word(element_bits);
        check_matrix(shape, [16, 8 * per_word]);
        let tile = match per_word {
            1 => accumulator_tile(LayoutBuilder::new(shape)),
            _ => a_tile(LayoutBuilder::new(shape), per_word),
        };
        tile.along(Dim::Warp, 0, warps_per_cta[0]).replicas(Dim::Warp, warps_per_cta[1]).wrap(&[1, 0])
    }

    /// The B operand `[k, n]` of `mma.sync.m16n8`, see [`Self::mma_m16n8_a`]. Warps along m hold replicas. Instructions
    /// cover k, then n.
    pub fn mma_m16n8_b(shape: &[u32], element_bits: u32, warps_per_cta: [u32; 2]) -> Self {
        let per_word = elements_per_word(element_bits);
        check_matrix(shape, [8 * per_word, 8]);
        // Each lane holds words of neighboring k in column lane/4; its second word is four words further, or the next
        // one.
        let (together, apart) = if per_word == 1 { (2, 1) } else { (per_word, 2) };
        LayoutBuilder::new(shape)
            .along(Dim::Register, 0, together)
            .along(Dim::Lane, 0, 4)
            .along(Dim::Lane, 1, 8)
            .along(Dim::Register, 0, apart)
            .replicas(Dim::Warp, warps_per_cta[0])
            .along(Dim::Warp, 1, warps_per_cta[1])
            .wrap(&[0, 1])
    }

    /// The accumulator of `wgmma.m64nN` with 32-bit elements over a tensor `[m, n]`. Four warps lie along m, with
    /// sixteen rows each; the columns of a warp are as in `mma_m16n8`, with N/2 registers per instruction.
    /// `warps_per_cta[0]` is a multiple of four: additional warpgroups lie along m, `warps_per_cta[1]` along n.
    /// Additional instructions cover n, then m.
    pub fn wgmma_acc(shape: &[u32], n_instr: u32, warps_per_cta: [u32; 2]) -> Self {
        check_matrix(shape, [64, n_instr]);
        if !(8..=256).contains(&n_instr) || !n_instr.is_power_of_two() {
            bug(format!("wgmma with n = {n_instr}"));
        }
        accumulator_tile(LayoutBuilder::new(shape))
            .along(Dim::Register, 1, n_instr / 8)
            .along(Dim::Warp, 0, warpgroup_warps(warps_per_cta))
            .along(Dim::Warp, 1, warps_per_cta[1])
            .wrap(&[1, 0])
    }

    /// The A operand `[m, k]` of `wgmma` in registers; element widths as in [`Self::mma_m16n8_a`].
    pub fn wgmma_a_operand(shape: &[u32], element_bits: u32, warps_per_cta: [u32; 2]) -> Self {
        let per_word = elements_per_word(element_bits);
        check_matrix(shape, [64, 8 * per_word]);
        a_tile(LayoutBuilder::new(shape), per_word)
            .along(Dim::Warp, 0, warpgroup_warps(warps_per_cta))
            .replicas(Dim::Warp, warps_per_cta[1])
            .wrap(&[1, 0])
    }
}

/// The 16×8 box of an accumulator: pairs of columns, eight rows of four lanes, then the lower half.
fn accumulator_tile(builder: LayoutBuilder) -> LayoutBuilder {
    builder.along(Dim::Register, 1, 2).along(Dim::Lane, 1, 4).along(Dim::Lane, 0, 8).along(Dim::Register, 0, 2)
}

/// The box of an A operand: a word of neighboring k per lane, eight rows of four lanes, the lower half, then the second
/// half of k.
fn a_tile(builder: LayoutBuilder, per_word: u32) -> LayoutBuilder {
    builder
        .along(Dim::Register, 1, per_word)
        .along(Dim::Lane, 1, 4)
        .along(Dim::Lane, 0, 8)
        .along(Dim::Register, 0, 2)
        .along(Dim::Register, 1, 2)
}

fn elements_per_word(element_bits: u32) -> u32 {
    match element_bits {
        8 | 16 | 32 => 32 / element_bits,
        // A word of its own for each f64: the same places as tf32.
        64 => 1,
        _ => bug(format!("a tensor-core operand with {element_bits}-bit elements")),
    }
}

fn warpgroup_warps(warps_per_cta: [u32; 2]) -> u32 {
    if !warps_per_cta[0].is_multiple_of(4) {
        bug(format!("wgmma with {warps_per_cta:?} warps: a warpgroup is four warps along m"));
    }
    warps_per_cta[0]
}

fn check_matrix(shape: &[u32], instruction: [u32; 2]) {
    let fits = shape.len() == 2 && shape.iter().zip(instruction).all(|(&extent, least)| extent >= least);
    if !fits {
        bug(format!("a tensor of shape {shape:?} for a tensor-core instruction of {instruction:?}"));
    }
}
