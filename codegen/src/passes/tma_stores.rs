//! Stores tiles by TMA where threads would write few bytes of each row.
//!
//! Does: in loops, or wherever the option says so, replaces a `store_view`, or an `atomic_view` that adds f32 (with warp
//! specialization outside of loops too), by a `tma_store` if warps hold boxes of the tile ([`WarpBoxes`]), and threads would convert its layout through shared memory
//! or write less than 16 bytes at a time: a dot's sums, for example. Neither the conversion nor the addresses and bounds
//! of rows remain.
//! Requires: stage *layout*.
//! Keeps: results. The memory belongs to arguments that only stores of other parts of the tile, or other additions,
//! access, because TMA writes it as late as the end of the kernel; kernels whose atomics may release stores to other
//! programs are left alone.
//! Does not: stores of less than [`MIN_BYTES`] alone, or with an eviction priority.

use crate::analysis::access_layout::view_operands;
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::memory_effects::{is_pointer, may_release_stores, underlying_arguments};
use crate::analysis::warp_box::WarpBoxes;
use crate::ir::nested::is_in_loop;
use crate::ir::{AtomicOp, BinaryOp, DType, Effects, Elem, Eviction, Func, Op, OpId, Value};
use crate::layout::Conversion;
use crate::target::{CompileOptions, GpuArch, Schedule};
use std::collections::HashMap;

/// Smaller tiles do not pay for the proxy fence and the latency of TMA: this is one store of 16 bytes per thread of a
/// warpgroup.
const MIN_BYTES: usize = 2048;
/// Bytes that a thread writes at a time without TMA.
const WIDE: usize = 16;

/// Runs the pass.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) {
    let Schedule { tma, tma_stores, warp_specialize, .. } = options.schedule;
    if arch < GpuArch::Sm90a || tma == Some(false) || tma_stores == Some(false) || may_release_stores(func) {
        return;
    }
    // TMA reads shared memory while the next iteration of a loop computes. A program that ends has to wait, where stores of
    // threads need no wait; but atomics of threads are more instructions. Consumers have the memory of the rings then.
    let in_loop = |id: OpId| func.block_of(id).is_some_and(|block| is_in_loop(func, block));
    let adds = |id: OpId| warp_specialize == Some(true) && matches!(func.op(id).op, Op::AtomicView { .. });
    let wanted = |id: OpId| tma_stores == Some(true) || in_loop(id) || adds(id);
    let axis = AxisAnalysis::new(func);
    let is_store = |id: OpId| match &func.op(id).op {
        Op::StoreView { eviction, .. } => *eviction == Eviction::Normal,
        // Bulk reductions are of whole rows: the others have a boundary check in both dimensions.
        Op::AtomicView { op: AtomicOp::Add, boundary } => boundary.len() == 2,
        _ => false,
    };
    let stores = func.walk().into_iter().filter(|&id| is_store(id) && wanted(id) && is_only_access(func, id));
    let found: HashMap<OpId, Candidate> = stores.filter_map(|id| Some((id, candidate(func, &axis, id)?))).collect();
    // All parts of a tile or none: threads would not wait for the TMA stores of other parts.
    let pays = |id: OpId| found.get(&id).is_some_and(|candidate| candidate.pays);
    let chosen = found.iter().filter(|&(&id, _)| {
        let others = other_accesses(func, id);
        others.iter().all(|other| found.contains_key(other)) && others.into_iter().chain([id]).any(pays)
    });
    let mut chosen: Vec<(OpId, Value)> = chosen.map(|(&id, candidate)| (id, candidate.tile)).collect();
    chosen.sort_unstable_by_key(|&(id, _)| id);
    for (id, tile) in chosen {
        replace(func, id, tile);
    }
}

/// A store that TMA can do.
struct Candidate {
    /// The tile before a conversion of its layout.
    tile: Value,
    /// Whether threads would write few bytes at a time, or convert the layout through shared memory.
    pays: bool,
}

fn candidate(func: &Func, axis: &AxisAnalysis, id: OpId) -> Option<Candidate> {
    let data = func.op(id);
    let (Op::StoreView { boundary, .. } | Op::AtomicView { boundary, .. }) = &data.op else { return None };
    let adds_others = matches!(data.op, Op::AtomicView { .. }) && func.ty(data.operands[1]).dtype() != Some(DType::F32);
    let (view, stored) = (data.operands[0], data.operands[1]);
    let converted = func.def_op(stored).filter(|&def| func.op(def).op == Op::ConvertLayout);
    let tile = converted.map_or(stored, |def| func.op(def).operands[0]);
    let [from, to] = [tile, stored].map(|v| func.ty(v).layout());
    let (from, to) = (func.layout(from?), func.layout(to?));
    let bytes = func.ty(tile).elem().map_or(8, Elem::bits) / 8;
    let is_narrow = || to.contiguous_run(view_operands(func, view).order[0]) * bytes < WIDE;
    let pays = match converted {
        Some(_) => func.uses(stored).len() == 1 && Conversion::between(from, to) == Conversion::Shared,
        None => is_narrow(),
    };
    let is_large = func.ty(tile).numel() * bytes >= MIN_BYTES;
    let boxes = WarpBoxes::of_store(func, axis, view, tile, boundary);
    let boxes = boxes.filter(|(_, plan)| !adds_others && plan.check_indices(func, axis).is_ok());
    boxes.map(|_| Candidate { tile, pays: pays && is_large })
}

/// Whether no op accesses the memory of an op's arguments but this one, and stores of other parts of the same tile, or
/// other additions.
fn is_only_access(func: &Func, id: OpId) -> bool {
    let view = func.op(id).operands[0];
    let is_part = |other: &OpId| {
        let data = func.op(*other);
        if let (Op::AtomicView { op, .. }, Op::AtomicView { op: own, .. }) = (&data.op, &func.op(id).op) {
            return op == own;
        }
        matches!((&data.op, &func.op(id).op), (Op::StoreView { .. }, Op::StoreView { .. }))
            && func.block_of(*other) == func.block_of(id)
            && are_parts(func, view, data.operands[0])
    };
    !underlying_arguments(func, view).is_empty() && other_accesses(func, id).iter().all(is_part)
}

/// The other ops that access the memory of an op's arguments.
fn other_accesses(func: &Func, id: OpId) -> Vec<OpId> {
    let own = underlying_arguments(func, func.op(id).operands[0]);
    let accesses = |other: &OpId| {
        let data = func.op(*other);
        let mut pointers = data.operands.iter().filter(|&&v| is_pointer(func, v));
        *other != id
            && data.op.effects() != Effects::Pure
            && data.op.effects() != Effects::Regions
            && pointers.any(|&v| !underlying_arguments(func, v).is_disjoint(&own))
    };
    func.walk().into_iter().filter(accesses).collect()
}

/// Whether the blocks of two views are at constant distances from each other, and disjoint.
fn are_parts(func: &Func, a: Value, b: Value) -> bool {
    let (x, y) = (view_operands(func, a), view_operands(func, b));
    let same = (x.base, x.shape, x.strides) == (y.base, y.shape, y.strides);
    let distances: Option<Vec<i64>> = x.offsets.iter().zip(y.offsets).map(|(&v, &w)| distance(func, v, w)).collect();
    let blocks = [a, b].map(|view| func.ty(view).shape().to_vec());
    same && distances.is_some_and(|by| {
        let apart = |(dim, &by): (usize, &i64)| {
            let extent = if by > 0 { blocks[0][dim] } else { blocks[1][dim] };
            by.unsigned_abs() >= extent as u64
        };
        by.iter().enumerate().any(apart)
    })
}

/// `b - a`, if that is a constant.
fn distance(func: &Func, a: Value, b: Value) -> Option<i64> {
    let sum = |v: Value| -> (Option<Value>, i64) {
        if let Some(n) = func.constant_int(v) {
            return (None, n);
        }
        let of = func.def_op(v).map(|id| func.op(id)).filter(|data| data.op == Op::Binary(BinaryOp::Add));
        let by = of.and_then(|data| Some((data.operands[0], func.constant_int(data.operands[1])?)));
        by.map_or((Some(v), 0), |(base, n)| (Some(base), n))
    };
    let ((from, x), (to, y)) = (sum(a), sum(b));
    (from == to).then(|| y.checked_sub(x)).flatten()
}

fn replace(func: &mut Func, id: OpId, tile: Value) {
    let data = func.op(id);
    let (boundary, op) = match data.op.clone() {
        Op::StoreView { boundary, .. } => (boundary, None),
        Op::AtomicView { boundary, op } => (boundary, Some(op)),
        _ => return,
    };
    let (view, stored, loc) = (data.operands[0], data.operands[1], data.loc.clone());
    let store = func.create_op(Op::TmaStore { boundary, op }, vec![view, tile], Vec::new(), Vec::new(), loc);
    let (block, at) = (func.block_of(id).expect("internal compiler error: a detached op"), func.position(id));
    func.insert(block, at, &[store]);
    func.erase(id);
    if let Some(conversion) = func.def_op(stored).filter(|_| stored != tile && func.uses(stored).is_empty()) {
        func.erase(conversion);
    }
}
