//! Stores tiles by TMA where their elements would move between threads on the way to global memory.
//!
//! Does: in loops, or wherever the option says so, replaces a `store_view` of a tile that a layout conversion through
//! shared memory brought into the order of global memory (an accumulator, for example) by a `local_alloc` of the tile and
//! a `tma_store`: shared memory is written in the order that TMA reads, and neither loads nor the addresses and bounds of
//! rows remain.
//! Requires: stage *async*. Shared memory of the conversion and of the buffer are of the same size.
//! Keeps: results. The memory belongs to arguments that no other op accesses, because TMA writes it as late as the end of
//! the kernel; kernels whose atomics may release stores to other programs are left alone.
//! Does not: stores of less than [`MIN_BYTES`], or with an eviction priority.

use crate::analysis::access_layout::{extents, view_operands};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::memory_effects::underlying_pointers;
use crate::analysis::tensor_map;
use crate::ir::{Def, Effects, Eviction, Func, Op, OpId, Type, Value};
use crate::layout::{Conversion, LinearLayout, Swizzle};
use crate::target::{CompileOptions, GpuArch, Schedule};
use std::collections::HashSet;

/// Smaller tiles do not pay for the proxy fence and the latency of TMA: this is one store of 16 bytes per thread of a
/// warpgroup.
const MIN_BYTES: usize = 2048;

/// Runs the pass.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) {
    let Schedule { tma, tma_stores, .. } = options.schedule;
    if arch < GpuArch::Sm90a || tma == Some(false) || tma_stores == Some(false) || releases_stores(func) {
        return;
    }
    let wanted = |func: &Func, id: OpId| is_in_loop(func, id) || tma_stores == Some(true);
    let stores = func.walk().into_iter().filter(|&id| wanted(func, id) && is_candidate(func, id));
    for id in stores.collect::<Vec<_>>() {
        let axis = AxisAnalysis::new(func);
        if let Some(buffer) = buffer_type(func, &axis, id)
            && is_only_access(func, id)
        {
            replace(func, id, buffer);
        }
    }
}

/// Whether an op is in a loop, whose next iteration does not wait until TMA has written. A program that ends has to wait
/// until TMA has read shared memory, where stores of threads need no wait.
fn is_in_loop(func: &Func, id: OpId) -> bool {
    std::iter::successors(func.parent_op(id), |&id| func.parent_op(id))
        .any(|id| matches!(func.op(id).op, Op::For { .. } | Op::While))
}

/// Whether an op stores the result of a conversion through shared memory that nothing else uses.
fn is_candidate(func: &Func, id: OpId) -> bool {
    let data = func.op(id);
    if !matches!(data.op, Op::StoreView { eviction: Eviction::Normal, .. }) {
        return false;
    }
    let tile = data.operands[1];
    let Some(conversion) = func.def_op(tile).filter(|&def| func.op(def).op == Op::ConvertLayout) else { return false };
    let layouts = [func.op(conversion).operands[0], tile].map(|v| func.ty(v).layout());
    let [Some(from), Some(to)] = layouts else { return false };
    let through_shared = || Conversion::between(func.layout(from), func.layout(to)) == Conversion::Shared;
    func.uses(tile).len() == 1 && through_shared()
}

/// Whether other programs may wait for earlier stores of this one, at an atomic or in inline assembly.
fn releases_stores(func: &Func) -> bool {
    func.walk().iter().any(|&id| {
        matches!(func.op(id).op, Op::AtomicRmw { .. } | Op::AtomicCas { .. } | Op::InlineAsm { pure: false, .. })
    })
}

/// The type of a buffer that TMA can copy to the view of a store; `None` if there is none.
fn buffer_type(func: &mut Func, axis: &AxisAnalysis, id: OpId) -> Option<Type> {
    let data = func.op(id);
    let Op::StoreView { boundary, .. } = &data.op else { return None };
    let (view, boundary) = (data.operands[0], boundary.clone());
    let Type::View { block, elem } = func.ty(view) else { return None };
    let (shape, elem) = (block.clone(), *elem);
    if shape.len() < 2 || shape.iter().product::<usize>() * elem.bytes() < MIN_BYTES {
        return None;
    }
    let (extents, order) = (extents(&shape), view_operands(func, view).order.to_vec());
    let bytes = elem.bytes() as u32;
    let widest = Swizzle::ALL.into_iter().find(|s| *s != Swizzle::None && extents[order[0]] * bytes >= s.bytes())?;
    let layout = func.intern_layout(LinearLayout::shared_swizzled(&extents, &order, bytes, widest.bytes()));
    let buffer = Type::Shared { shape, elem, layout };
    tensor_map::plan(func, axis, view, &boundary, &buffer).map(|_| buffer)
}

/// Whether an op is the only one that accesses the memory of its arguments.
fn is_only_access(func: &Func, id: OpId) -> bool {
    let own = arguments(func, func.op(id).operands[0]);
    let accesses = |other: &OpId| {
        let data = func.op(*other);
        let operands = data.operands.iter().filter(|&&v| {
            matches!(func.ty(v), Type::View { .. }) || func.ty(v).elem().is_some_and(|elem| elem.pointee().is_some())
        });
        *other != id
            && data.op.effects() != Effects::Pure
            && data.op.effects() != Effects::Regions
            && operands.into_iter().any(|&v| !arguments(func, v).is_disjoint(&own))
    };
    !own.is_empty() && !func.walk().iter().any(accesses)
}

/// The arguments whose memory a pointer or view may access.
fn arguments(func: &Func, v: Value) -> HashSet<Value> {
    let is_argument = |v: &Value| matches!(func.value(*v).def, Def::Param(block, _) if block == func.body);
    underlying_pointers(func, v).into_iter().filter(is_argument).collect()
}

fn replace(func: &mut Func, id: OpId, buffer: Type) {
    let data = func.op(id);
    let Op::StoreView { boundary, .. } = data.op.clone() else { return };
    let (view, converted, loc) = (data.operands[0], data.operands[1], data.loc.clone());
    let conversion = func.def_op(converted).expect("internal compiler error: a store of a parameter");
    let tile = func.op(conversion).operands[0];
    let filled = func.create_op(Op::LocalAlloc, vec![tile], vec![buffer], Vec::new(), loc.clone());
    let store = func.create_op(Op::TmaStore { boundary }, vec![view, func.result(filled)], Vec::new(), Vec::new(), loc);
    let (block, at) = (func.block_of(id).expect("internal compiler error: a detached op"), func.position(id));
    func.insert(block, at, &[filled, store]);
    func.erase(id);
    func.erase(conversion);
}
