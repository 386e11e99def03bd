//! Scratch: shared memory that an op needs while it runs, in addition to the buffers that the function allocates.

use crate::ir::{DType, Elem, Func, Op, OpId, Value};
use crate::layout::{Conversion, Dim, LaneGather, LinearLayout};

/// Scratch of an op on tiles with layouts, in bytes.
pub fn bytes(func: &Func, id: OpId) -> u32 {
    let data = func.op(id);
    let layout = |v: Value| func.ty(v).layout().map(|l| func.layout(l));
    match &data.op {
        Op::ConvertLayout => match (layout(data.operands[0]), layout(data.results[0])) {
            (Some(from), Some(to)) if Conversion::between(from, to) == Conversion::Shared => {
                let bits = func.ty(data.operands[0]).elem().map_or(64, Elem::bits);
                (from.num_elements() * bits / 8) as u32
            }
            _ => 0,
        },
        // The whole operand, in row-major order.
        Op::Gather { .. } if lane_gather(func, id).is_none() => {
            let ty = func.ty(data.operands[0]);
            layout(data.operands[0]).map_or(0, |_| (ty.numel() * ty.elem().map_or(64, Elem::bits).max(8) / 8) as u32)
        }
        Op::Reduce { axis } => match layout(data.operands[0]) {
            Some(l) => {
                let dtypes: Vec<_> = data.operands.iter().filter_map(|&v| func.ty(v).dtype()).collect();
                reduction_bytes(l, *axis, &dtypes)
            }
            None => 0,
        },
        Op::AtomicRmw { .. } | Op::AtomicCas { .. } => {
            let used = !func.uses(data.results[0]).is_empty();
            let bytes = func.ty(data.results[0]).elem().map_or(8, Elem::bits) / 8;
            match layout(data.results[0]) {
                Some(l) if used && (l.free_mask(Dim::Lane) != 0 || l.free_mask(Dim::Warp) != 0) => {
                    (l.num_elements() * bytes) as u32
                }
                None if used => bytes as u32,
                _ => 0,
            }
        }
        _ => 0,
    }
}

/// How a gather exchanges elements by shuffles, where that takes less time than scratch memory: an element for each result
/// and each register that may have it.
pub fn lane_gather(func: &Func, id: OpId) -> Option<LaneGather> {
    let data = func.op(id);
    let Op::Gather { axis } = data.op else { return None };
    let layout = |v: Value| func.ty(v).layout().map(|l| func.layout(l));
    let (from, to) = (layout(data.operands[0])?, layout(data.results[0])?);
    let gather = from.lane_gather(to, axis)?;
    let is_constant = func.def_op(data.operands[1]).is_some_and(|op| matches!(func.op(op).op, Op::Constant { .. }));
    let candidates = if is_constant { 1 } else { 1 << gather.register_bits.len() };
    // A shuffle takes as long as a 4-byte access of shared memory. A barrier and the latency come on top of accesses.
    let accesses = from.num_registers() + to.num_registers();
    (to.num_registers() * candidates <= 2 * accesses).then_some(gather)
}

/// Scratch of a cross-warp reduction: a partial result per warp for each operand.
fn reduction_bytes(layout: &LinearLayout, axis: usize, dtypes: &[DType]) -> u32 {
    match layout.reduction(axis) {
        Some(steps) if !steps.warps.is_empty() => {
            let partials = steps.layout.num_elements() as u32 * (1 << steps.warps.len());
            reduction_operands(partials, dtypes).1
        }
        _ => 0,
    }
}

/// Offsets in bytes of the partial results of each operand of a cross-warp reduction, and the total size. Vector
/// accesses to each operand are aligned.
pub fn reduction_operands(partials: u32, dtypes: &[DType]) -> (Vec<u32>, u32) {
    /// Width of the widest access in bytes.
    const WIDEST: u32 = 16;
    let mut end = 0u32;
    let mut place = |dtype: &DType| {
        let start = end.next_multiple_of(WIDEST);
        end = start + partials * dtype.bytes() as u32;
        start
    };
    let starts = dtypes.iter().map(&mut place).collect();
    (starts, end)
}
