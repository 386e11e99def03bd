//! Gives the buffers through which warps exchange tiles the slots that a schedule asks for.
//!
//! Does: replaces each `local_alloc` of a tile with `depth = 2` by a ring of two buffers before the loop; an iteration
//! stores its tile into the one that the iteration before did not use. Other warps may still read that one, so the
//! barrier plan needs no barrier before the store ([`alternation`](crate::analysis::buffers::alternation)).
//! Requires: stage *schedule*, before `rotate_loops`.
//! Keeps: results.
//! Does not: choose. [`crate::schedule`] does.

use crate::ir::{BinaryOp, Builder, DType, Func, Op, OpId, Placement, Type};

/// Runs the pass.
pub fn run(func: &mut Func) {
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    for id in loops {
        let region = func.op(id).regions[0];
        let has_slots = |&op: &OpId| {
            let data = func.op(op);
            data.op == Op::LocalAlloc && data.operands.len() == 1 && data.place.is_some_and(|at| at.depth.is_some())
        };
        let buffers: Vec<OpId> = func.block(region).ops.iter().copied().filter(has_slots).collect();
        for alloc in buffers {
            alternate(func, id, alloc);
        }
    }
}

fn alternate(func: &mut Func, id: OpId, alloc: OpId) {
    let region = func.op(id).regions[0];
    let data = func.op(alloc).clone();
    let (tile, old) = (data.operands[0], data.results[0]);
    let buffer = func.ty(old).clone();
    let (Some(place), Type::Shared { shape, elem, layout }) = (data.place, buffer.clone()) else {
        panic!("internal compiler error: a buffer of another type")
    };
    let ring = Type::Shared { shape: [vec![2], shape].concat(), elem, layout };
    let mut b = Builder::before(func, id, data.loc.clone());
    let alloc_ring = b.op(Op::LocalAlloc, &[], &[ring]);
    let ring = b.func.result(alloc_ring);
    let first = b.int(0, DType::I32);
    func.add_operands(id, &[first]);
    func.add_result(id, Type::scalar(DType::I32));
    let index = func.add_param(region, Type::scalar(DType::I32));

    let own = Some(Placement { depth: None, ..place });
    let mut b = Builder::before(func, alloc, data.loc.clone());
    let slot = b.op(Op::LocalSlot, &[ring, index], &[buffer]);
    let part = b.func.result(slot);
    let store = b.op(Op::LocalStore, &[part, tile], &[]);
    func.replace_uses(old, part);
    func.erase(alloc);

    let end = func.terminator(region);
    let mut b = Builder::before(func, end, data.loc);
    let one = b.int(1, DType::I32);
    let other = b.binary(BinaryOp::Xor, index, one);
    func.add_operands(end, &[other]);
    let switch = func.def_op(other);
    for op in [Some(slot), Some(store), func.def_op(one), switch].into_iter().flatten() {
        func.set_place(op, own);
    }
}
