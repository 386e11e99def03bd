//! Replaces loop-carried pointer and index tiles by scalar offsets.
//!
//! Does: where a `for` carries a tile of pointers or integers to which each iteration adds the same number for all
//! elements, carries the sum of these numbers as a scalar instead, and adds it to the initial tile where the tile is
//! used. This exposes the contiguity of the tile inside the loop.
//! Requires: a verified function of stage *tile*.
//! Keeps: every computed value.
//! Does not: look through more than one `ptr_add` or `add` of a `splat` or constant.

use super::edit::terminator;
use super::fold_carried::drop_for;
use crate::ir::{BinaryOp, BlockId, DType, Elem, Func, Literal, Op, OpId, Type, Value};

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut changed = false;
    for id in func.walk().into_iter().rev() {
        if let Op::For { .. } = func.op(id).op {
            changed |= for_loop(func, id);
        }
    }
    changed
}

/// The number that an iteration adds to a carried tile.
#[derive(Clone, Copy)]
enum Step {
    Constant(i64),
    Scalar(Value),
}

/// A carried tile with a uniform step: its index among the carried values, the op that adds the step, and the step.
struct Induction {
    index: usize,
    op: Op,
    step: Step,
    /// The type of the scalar sum of steps.
    sum: DType,
}

fn find_induction(func: &Func, id: OpId, index: usize) -> Option<Induction> {
    let body = func.op(id).regions[0];
    let param = func.block(body).params[1 + index];
    let elem = func.ty(param).elem().filter(|_| func.ty(param).is_tensor())?;
    let next = func.def_op(func.op(terminator(func, body)).operands[index])?;
    let data = func.op(next);
    let (step, sum) = match (&data.op, elem) {
        (Op::PtrAdd, Elem::Ptr(_)) if data.operands[0] == param => (data.operands[1], DType::I64),
        (Op::Binary(BinaryOp::Add), Elem::Num(d)) if d.is_int() && data.operands[0] == param => (data.operands[1], d),
        (Op::Binary(BinaryOp::Add), Elem::Num(d)) if d.is_int() && data.operands[1] == param => (data.operands[0], d),
        _ => return None,
    };
    let source = func.op(func.def_op(step)?);
    let step = match source.op {
        Op::Constant { value: Literal::Int(i) } => Step::Constant(i),
        Op::Splat => Step::Scalar(source.operands[0]),
        _ => return None,
    };
    Some(Induction { index, op: data.op.clone(), step, sum })
}

fn for_loop(func: &mut Func, id: OpId) -> bool {
    let carried = func.op(id).results.len();
    let found: Vec<Induction> = (0..carried).filter_map(|i| find_induction(func, id, i)).collect();
    if found.is_empty() {
        return false;
    }
    let outer = block_of(func, id);
    let body = func.op(id).regions[0];
    let data = func.op(id).clone();
    let mut operands = data.operands.clone();
    let mut types: Vec<Type> = data.results.iter().map(|&r| func.ty(r).clone()).collect();
    let mut sums = Vec::new();
    for m in &found {
        let ty = Type::scalar(m.sum);
        let at = position_of(func, outer, id);
        operands.push(insert(func, outer, at, id, Op::Constant { value: Literal::Int(0) }, &[], ty.clone()));
        sums.push(func.add_param(body, ty.clone()));
        types.push(ty);
    }
    let new = func.create_op(data.op, operands, types, data.regions, data.loc);
    let at = position_of(func, outer, id);
    func.block_mut(outer).ops[at] = new;
    for (k, &old) in data.results.iter().enumerate() {
        let result = func.op(new).results[k];
        func.replace_uses(old, result);
    }
    let mut keep = vec![true; carried + found.len()];
    for (j, m) in found.iter().enumerate() {
        let (init, param) = (data.operands[3 + m.index], func.block(body).params[1 + m.index]);
        let (result, total) = (func.op(new).results[m.index], func.op(new).results[carried + j]);
        let inside = offset_tile(func, body, 0, new, m, init, sums[j]);
        func.replace_uses(param, inside);
        let after = position_of(func, outer, new) + 1;
        let outside = offset_tile(func, outer, after, new, m, init, total);
        func.replace_uses(result, outside);
        advance(func, body, new, m, sums[j]);
        keep[m.index] = false;
    }
    drop_for(func, new, &keep);
    true
}

/// Emits `init` plus `sum` for all elements at position `at` of a block.
fn offset_tile(func: &mut Func, block: BlockId, at: usize, loc: OpId, m: &Induction, init: Value, sum: Value) -> Value {
    let ty = func.ty(init).clone();
    let splat = insert(func, block, at, loc, Op::Splat, &[sum], ty.with_elem(m.sum));
    insert(func, block, at + 1, loc, m.op.clone(), &[init, splat], ty)
}

/// Adds a step to the sum at the end of the loop body.
fn advance(func: &mut Func, body: BlockId, loc: OpId, m: &Induction, sum: Value) {
    let ty = Type::scalar(m.sum);
    let end = |func: &Func| func.block(body).ops.len() - 1;
    let mut step = match m.step {
        Step::Constant(i) => {
            let at = end(func);
            insert(func, body, at, loc, Op::Constant { value: Literal::Int(i) }, &[], ty.clone())
        }
        Step::Scalar(v) => v,
    };
    if func.ty(step).dtype() != Some(m.sum) {
        let at = end(func);
        step = insert(func, body, at, loc, Op::Cast, &[step], ty.clone());
    }
    let at = end(func);
    let next = insert(func, body, at, loc, Op::Binary(BinaryOp::Add), &[sum, step], ty);
    let last = terminator(func, body);
    func.op_mut(last).operands.push(next);
}

/// Inserts an op with one result at a position of a block, with the source location of `like`.
fn insert(func: &mut Func, block: BlockId, at: usize, like: OpId, op: Op, operands: &[Value], ty: Type) -> Value {
    let loc = func.op(like).loc.clone();
    let id = func.create_op(op, operands.to_vec(), vec![ty], Vec::new(), loc);
    func.block_mut(block).ops.insert(at, id);
    func.result(id)
}

fn position_of(func: &Func, block: BlockId, id: OpId) -> usize {
    let position = func.block(block).ops.iter().position(|&op| op == id);
    position.expect("internal compiler error: an op is not in its block; please report this")
}

fn block_of(func: &Func, id: OpId) -> BlockId {
    let inner = func.walk().into_iter().flat_map(|op| func.op(op).regions.clone());
    let mut blocks = std::iter::once(func.body).chain(inner);
    let found = blocks.find(|&block| func.block(block).ops.contains(&id));
    found.expect("internal compiler error: an op is in no block; please report this")
}
