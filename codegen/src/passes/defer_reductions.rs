//! Moves cross-warp sum reductions out of loops.
//!
//! Does: where a `for` carries a value to which each iteration adds the sum of a tile across warps, and neither has
//! another use, the loop carries the elementwise sum of the tiles instead, and the `reduce` moves after the loop. The
//! warps then synchronize once instead of in each iteration. (Example: an inner product of long rows, where all warps
//! would wait at every tile, with no loads in flight.)
//! Requires: stage *layout*.
//! Keeps: the set of summands and the order of effects. Floats are added in another order.
//! Does not: move sums of types below 32 bits, of tiles that would occupy more than 16 registers per thread during the
//! loop, or sums that are scaled in between.

use super::fuse_reductions::is_cross_warp;
use crate::analysis::combine::single_binary_op;
use crate::ir::{BinaryOp, Builder, Func, Op, OpId};

/// Maximum registers per thread of one such sum: they stay live for the whole loop, and reduce the number of resident
/// blocks.
const MAX_REGISTERS: usize = 16;

/// Runs the pass.
pub fn run(func: &mut Func) {
    // Inner loops first: a reduction that leaves an inner loop may be a sum of the outer one.
    for id in func.walk().into_iter().rev() {
        if matches!(func.op(id).op, Op::For { .. }) {
            for carried in 0..func.op(id).results.len() {
                if let Some(sum) = find(func, id, carried) {
                    defer(func, id, carried, &sum);
                }
            }
        }
    }
}

/// A sum over iterations: the carried value is `add` of itself and of `reduce`.
struct Accumulation {
    add: OpId,
    reduce: OpId,
}

fn find(func: &Func, id: OpId, carried: usize) -> Option<Accumulation> {
    let body = func.op(id).regions[0];
    let param = func.block(body).params[1 + carried];
    let next = func.op(func.terminator(body)).operands[carried];
    let add = func.def_op(next).filter(|&op| func.op(op).op == Op::Binary(BinaryOp::Add))?;
    let part = match func.op(add).operands[..] {
        [a, b] if a == param => b,
        [a, b] if b == param => a,
        _ => return None,
    };
    let reduce = func.def_op(part).filter(|&op| is_cross_warp(func, op))?;
    let is_sum = single_binary_op(func, func.op(reduce).regions[0]) == Some(BinaryOp::Add);
    let have_single_use = [param, part, next].iter().all(|&v| func.uses(v).len() == 1);
    let are_in_body = [add, reduce].iter().all(|&op| func.is_in(op, body));
    let tile = func.op(reduce).operands[0];
    let bits = func.ty(tile).elem().map_or(0, |elem| elem.bits());
    // Not `registers::tile_registers`: it counts no registers for values that are rematerialized at their use, but
    // their sums need registers.
    let registers = func.layout_of(tile).num_registers() * bits / 32;
    (is_sum && have_single_use && are_in_body && bits >= 32 && registers <= MAX_REGISTERS)
        .then_some(Accumulation { add, reduce })
}

fn defer(func: &mut Func, id: OpId, carried: usize, sum: &Accumulation) {
    let Accumulation { add, reduce } = *sum;
    let body = func.op(id).regions[0];
    let tile = func.op(reduce).operands[0];
    let (ty, loc) = (func.ty(tile).clone(), func.op(reduce).loc.clone());
    let first = func.op(id).operands[3 + carried];
    let zero_tile = Builder::before(func, id, loc.clone()).zero(ty.clone());
    func.set_operand(id, 3 + carried, zero_tile);

    // In the loop: adds the tile elementwise.
    let (param, next) = (func.block(body).params[1 + carried], func.result(add));
    func.rewrite(add, Op::Binary(BinaryOp::Add), vec![param, tile]);
    let total = func.op(id).results[carried];
    for v in [param, next, total] {
        func.set_ty(v, ty.clone());
    }

    // After the loop: the reduction, plus the initial value.
    let part = func.result(reduce);
    func.move_after(reduce, id);
    let final_sum = Builder::after(func, reduce, loc).binary(BinaryOp::Add, first, part);
    func.replace_uses(total, final_sum);
    func.set_operands(reduce, &[total]);
}
