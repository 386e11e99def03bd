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
use crate::analysis::memory_effects::{is_pointer, may_release_stores, underlying_arguments};
use crate::analysis::tensor_map;
use crate::ir::nested::is_in_loop;
use crate::ir::{Effects, Eviction, Func, Op, OpId, Type};
use crate::layout::{Conversion, LinearLayout, Swizzle};
use crate::target::{CompileOptions, GpuArch, Schedule};

/// Smaller tiles do not pay for the proxy fence and the latency of TMA: this is one store of 16 bytes per thread of a
/// warpgroup.
const MIN_BYTES: usize = 2048;

/// Runs the pass.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) {
    let Schedule { tma, tma_stores, .. } = options.schedule;
    if arch < GpuArch::Sm90a || tma == Some(false) || tma_stores == Some(false) || may_release_stores(func) {
        return;
    }
    // The next iteration of a loop does not wait until TMA has read shared memory. A program that ends has to, where
    // stores of threads need no wait.
    let in_loop = |id: OpId| func.block_of(id).is_some_and(|block| is_in_loop(func, block));
    let wanted = |id: OpId| tma_stores == Some(true) || in_loop(id);
    let stores = func.walk().into_iter().filter(|&id| wanted(id) && is_candidate(func, id));
    for id in stores.collect::<Vec<_>>() {
        let axis = AxisAnalysis::new(func);
        if let Some(buffer) = buffer_type(func, &axis, id)
            && is_only_access(func, id)
        {
            replace(func, id, buffer);
        }
    }
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
    let widest = Some(Swizzle::widest_for(extents[order[0]] * bytes)).filter(|&swizzle| swizzle != Swizzle::None)?;
    let layout = func.intern_layout(LinearLayout::shared_swizzled(&extents, &order, bytes, widest.bytes()));
    let buffer = Type::Shared { shape, elem, layout };
    tensor_map::plan(func, axis, view, &boundary, &buffer).map(|_| buffer)
}

/// Whether an op is the only one that accesses the memory of its arguments.
fn is_only_access(func: &Func, id: OpId) -> bool {
    let own = underlying_arguments(func, func.op(id).operands[0]);
    let accesses = |other: &OpId| {
        let data = func.op(*other);
        let mut pointers = data.operands.iter().filter(|&&v| is_pointer(func, v));
        *other != id
            && data.op.effects() != Effects::Pure
            && data.op.effects() != Effects::Regions
            && pointers.any(|&v| !underlying_arguments(func, v).is_disjoint(&own))
    };
    !own.is_empty() && !func.walk().iter().any(accesses)
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
