//! Operands of views, layouts of memory accesses, and default layouts of other values.

use super::axis::AxisAnalysis;
use crate::ir::{Func, Op, OpData, Value};
use crate::layout::LinearLayout;

/// Maximum size of one access by one thread, in bytes.
pub const MAX_VECTOR_BYTES: u64 = 16;

/// Converts extents to the type that layouts use.
pub fn extents(shape: &[usize]) -> Vec<u32> {
    shape.iter().map(|&n| n as u32).collect()
}

/// A blocked layout with consecutive threads along `order[0]`, each with `vector` consecutive elements (fewer where the
/// tile has not enough elements for all threads).
pub fn coalesced(shape: &[usize], order: &[usize], vector: u64, num_warps: u32) -> LinearLayout {
    let threads = 32 * num_warps as usize;
    let per_thread = (shape.iter().product::<usize>() / threads).max(1) as u64;
    let mut size = vec![1; shape.len()];
    // A scalar, the result of `split` on two elements, has no dimension to distribute.
    if let Some(&fastest) = order.first() {
        size[fastest] = vector.min(per_thread).min(shape[fastest] as u64) as u32;
    }
    LinearLayout::blocked_filling(&extents(shape), &size, num_warps, order)
}

/// The layout of a value without other constraints: last dimension fastest, 4 elements per thread.
pub fn default_layout(shape: &[usize], num_warps: u32) -> LinearLayout {
    let order: Vec<usize> = (0..shape.len()).rev().collect();
    coalesced(shape, &order, 4, num_warps)
}

/// The operands of a `make_view` by name.
pub struct ViewOperands<'f> {
    pub base: Value,
    pub shape: &'f [Value],
    pub strides: &'f [Value],
    pub offsets: &'f [Value],
    pub order: &'f [usize],
}

/// The operands of the `make_view` that defines a view.
pub fn view_operands(func: &Func, view: Value) -> ViewOperands<'_> {
    let id = func.def_op(view).expect("internal compiler error: an unresolved view");
    let OpData { op: Op::MakeView { order }, operands, .. } = func.op(id) else {
        panic!("internal compiler error: an unresolved view")
    };
    let rank = order.len();
    let part = |i: usize| &operands[1 + i * rank..1 + (i + 1) * rank];
    ViewOperands { base: operands[0], shape: part(0), strides: part(1), offsets: part(2), order }
}

/// The maximum number of consecutive elements along the fastest dimension of a view that one access may cover, by
/// alignment alone; 1 where that dimension is not contiguous.
pub fn view_vector_width(func: &Func, axis: &AxisAnalysis, view: Value, boundary: &[usize]) -> u64 {
    let parts = view_operands(func, view);
    let crate::ir::Type::View { elem, block } = func.ty(view) else {
        panic!("internal compiler error: a view of another type")
    };
    let bytes = elem.bytes() as u64;
    let inner = parts.order[0];
    if axis.scalar_constant(func, parts.strides[inner]) != Some(1) {
        return 1;
    }
    let mut aligned = axis.scalar_divisor(func, parts.base);
    for d in 0..block.len() {
        let offset = axis.scalar_divisor(func, parts.offsets[d]);
        let step = if d == inner { offset } else { axis.scalar_divisor(func, parts.strides[d]) };
        aligned = aligned.min(step.saturating_mul(bytes));
    }
    let mut vector = (aligned / bytes).clamp(1, MAX_VECTOR_BYTES / bytes);
    if boundary.contains(&inner) {
        // An access must not cross the bound of the dimension: it is either in bounds as a whole or not at all.
        vector = vector.min(axis.scalar_divisor(func, parts.shape[inner]));
    }
    vector.max(1)
}

/// The layout of a `cp.async` copy of a view's block into shared memory, with the vector as the first register bits.
/// Vectors stay wide even where some threads then have nothing to copy: `cp.async` copies at least four bytes.
pub fn async_copy_layout(
    func: &Func,
    axis: &AxisAnalysis,
    view: Value,
    boundary: &[usize],
    num_warps: u32,
) -> LinearLayout {
    let (extents, order) = (extents(func.ty(view).shape()), view_operands(func, view).order);
    let mut size = vec![1; extents.len()];
    size[order[0]] = extents[order[0]].min(view_vector_width(func, axis, view, boundary) as u32);
    LinearLayout::blocked_filling(&extents, &size, num_warps, order)
}

/// Elements that one `cp.async` of the given layout copies into a buffer: elements that are consecutive along `inner`
/// in global memory have to be consecutive in the buffer too.
pub fn async_copy_width(copies: &LinearLayout, inner: usize, buffer: &LinearLayout) -> usize {
    copies.contiguous_run(inner).min(copies.contiguous_offsets(buffer))
}

/// The pointers and the mask of an access through a tile of pointers.
pub fn pointers_and_mask(func: &Func, data: &OpData) -> Option<(Value, Option<Value>)> {
    let mask = match &data.op {
        Op::Load { .. } => data.operands.get(1),
        Op::Store { .. } | Op::AtomicRmw { .. } => data.operands.get(2),
        Op::AtomicCas { .. } => data.operands.get(3),
        _ => return None,
    };
    func.ty(data.operands[0]).is_tensor().then(|| (data.operands[0], mask.copied()))
}

/// The dimensions of a pointer tile from the fastest-varying in memory to the slowest, and the number of consecutive
/// elements along the fastest that one access may cover.
pub fn pointer_order_and_width(
    func: &Func,
    axis: &AxisAnalysis,
    pointers: Value,
    mask: Option<Value>,
) -> (Vec<usize>, u64) {
    let info = axis.get(func, pointers);
    let shape = func.ty(pointers).shape();
    let mut order: Vec<usize> = (0..shape.len()).rev().collect();
    order.sort_by_key(|&d| std::cmp::Reverse(info.contiguity[d]));
    let inner = order[0];
    let bytes = func.ty(pointers).elem().and_then(|e| e.pointee()).map_or(1, |d| d.bytes()) as u64;
    let mut vector = info.contiguity[inner].min(info.divisibility[inner] / bytes).min(MAX_VECTOR_BYTES / bytes);
    if let Some(mask) = mask {
        vector = vector.min(axis.get(func, mask).constancy[inner]);
    }
    (order, vector.max(1))
}

/// The coalesced layout of the tile of a memory op, with at most `most` consecutive elements per thread; `None` for
/// scalars and other ops.
pub fn memory_layout(
    func: &Func,
    axis: &AxisAnalysis,
    data: &OpData,
    num_warps: u32,
    most: u64,
) -> Option<LinearLayout> {
    match &data.op {
        Op::LoadView { boundary, .. } | Op::StoreView { boundary, .. } | Op::AtomicView { boundary, .. } => {
            let view = data.operands[0];
            let vector = view_vector_width(func, axis, view, boundary).min(most);
            let parts = view_operands(func, view);
            Some(coalesced(func.ty(view).shape(), parts.order, vector, num_warps))
        }
        _ => {
            let (pointers, mask) = pointers_and_mask(func, data)?;
            let (order, vector) = pointer_order_and_width(func, axis, pointers, mask);
            Some(coalesced(func.ty(pointers).shape(), &order, vector.min(most), num_warps))
        }
    }
}
