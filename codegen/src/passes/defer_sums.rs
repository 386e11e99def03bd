//! Adds up what a loop sums inside its threads, so that warps meet once behind the loop.
//!
//! Does: where a `for` carries a value to which each iteration adds the sum of a tile across warps, and nothing else sees either, the loop
//! carries the sum of those tiles, element by element, and the `reduce` goes behind it. (An inner product of long rows: warps would wait for
//! each other at every tile, and no loads would be on their way meanwhile.)
//! Requires: stage laid.
//! Keeps: what is summed and the order of effects; floats are added in another order.
//! Does not: sum numbers of fewer than 32 bits, nor tiles that would take many registers for as long as the loop runs; nor look for sums that
//! something scales in between.

use super::edit::{rewrite, terminator};
use super::join_reductions::crosses_warps;
use crate::analysis::combine::single_function;
use crate::ir::{BinaryOp, Func, Literal, Op, OpId};

/// The most registers of a thread for one such sum: it stays as long as the loop runs, and takes room from other blocks.
const MOST_REGISTERS: usize = 16;

/// Runs the pass.
pub fn run(func: &mut Func) {
    // Inner loops first: what they leave behind them may be what the loop around them sums.
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

/// A carried value's sum: the carried value is `add` of itself and `reduce`.
struct Sum {
    add: OpId,
    reduce: OpId,
}

fn find(func: &Func, id: OpId, carried: usize) -> Option<Sum> {
    let body = func.op(id).regions[0];
    let param = func.block(body).params[1 + carried];
    let next = func.op(terminator(func, body)).operands[carried];
    let add = func.def_op(next).filter(|&op| func.op(op).op == Op::Binary(BinaryOp::Add))?;
    let part = match func.op(add).operands[..] {
        [a, b] if a == param => b,
        [a, b] if b == param => a,
        _ => return None,
    };
    let reduce = func.def_op(part).filter(|&op| crosses_warps(func, op))?;
    let is_sum = single_function(func, func.op(reduce).regions[0]) == Some(BinaryOp::Add);
    let seen = func.use_counts();
    let only_here = [param, part, next].iter().all(|v| seen[v.0 as usize] == 1);
    let here = [add, reduce].iter().all(|op| func.block(body).ops.contains(op));
    let tile = func.op(reduce).operands[0];
    let bits = func.ty(tile).elem().map_or(0, |elem| elem.bits());
    // Not `registers::of_tile`: what is made where it is used takes none, but sums of it do.
    let registers = func.layout_of(tile).num_registers() * bits / 32;
    (is_sum && only_here && here && bits >= 32 && registers <= MOST_REGISTERS).then_some(Sum { add, reduce })
}

fn defer(func: &mut Func, id: OpId, carried: usize, sum: &Sum) {
    let Sum { add, reduce } = *sum;
    let body = func.op(id).regions[0];
    let tile = func.op(reduce).operands[0];
    let (ty, loc) = (func.ty(tile).clone(), func.op(reduce).loc.clone());
    let zero = Op::Constant { value: Literal::number(0.0, ty.dtype()) };
    let zeros = func.create_op(zero, vec![], vec![ty.clone()], vec![], loc.clone());
    let none = func.result(zeros);
    let first = std::mem::replace(&mut func.op_mut(id).operands[3 + carried], none);

    // In the loop: the tile, element by element.
    let (param, next) = (func.block(body).params[1 + carried], func.result(add));
    rewrite(func, add, Op::Binary(BinaryOp::Add), vec![param, tile]);
    let total = func.op(id).results[carried];
    for v in [param, next, total] {
        func.set_ty(v, ty.clone());
    }
    func.block_mut(body).ops.retain(|&op| op != reduce);

    // Behind it: the reduction, and what the loop began with.
    let part = func.result(reduce);
    let part_ty = func.ty(part).clone();
    let whole = func.create_op(Op::Binary(BinaryOp::Add), vec![first, part], vec![part_ty], vec![], loc);
    func.replace_uses(total, func.result(whole));
    func.op_mut(reduce).operands = vec![total];
    let (parent, at) = func.place(id);
    func.block_mut(parent).ops.splice(at..=at, [zeros, id, reduce, whole]);
}
