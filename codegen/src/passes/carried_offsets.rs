//! Replaces loop-carried pointer and index tiles by scalar offsets.
//!
//! Does: where a `for` carries a tile of pointers or integers to which each iteration adds the same number for all
//! elements, carries the sum of these numbers as a scalar instead, and adds it to the initial tile where the tile is
//! used. This exposes the contiguity of the tile inside the loop.
//! Requires: a verified function of stage *tile*.
//! Keeps: every computed value.
//! Does not: look through more than one `ptr_add` or `add` of a `splat` or constant.

use super::fold_carried::drop_for;
use crate::ir::{BinaryOp, Builder, DType, Elem, Func, Literal, Op, OpId, Type, Value};

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
    let next = func.def_op(func.op(func.terminator(body)).operands[index])?;
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
    let body = func.op(id).regions[0];
    let data = func.op(id).clone();
    let loc = data.loc.clone();
    let mut operands = data.operands.clone();
    let mut types: Vec<Type> = data.results.iter().map(|&r| func.ty(r).clone()).collect();
    let mut sums = Vec::new();
    for m in &found {
        operands.push(Builder::before(func, id, loc.clone()).int(0, m.sum));
        sums.push(func.add_param(body, Type::scalar(m.sum)));
        types.push(Type::scalar(m.sum));
    }
    let regions = func.take_regions(id);
    let new = func.create_op(data.op, operands, types, regions, data.loc);
    func.move_before(new, id);
    func.erase(id);
    for (k, &old) in data.results.iter().enumerate() {
        let result = func.op(new).results[k];
        func.replace_uses(old, result);
    }
    let mut keep = vec![true; carried + found.len()];
    for (j, m) in found.iter().enumerate() {
        let (init, param) = (data.operands[3 + m.index], func.block(body).params[1 + m.index]);
        let (result, total) = (func.op(new).results[m.index], func.op(new).results[carried + j]);
        let start = func.block(body).ops[0];
        let inside = offset_tile(&mut Builder::before(func, start, loc.clone()), m, init, sums[j]);
        func.replace_uses(param, inside);
        let outside = offset_tile(&mut Builder::after(func, new, loc.clone()), m, init, total);
        func.replace_uses(result, outside);
        let end = func.terminator(body);
        let next = advance(&mut Builder::before(func, end, loc.clone()), m, sums[j]);
        func.add_operands(end, &[next]);
        keep[m.index] = false;
    }
    drop_for(func, new, &keep);
    true
}

/// Emits `init` plus `sum` for all elements.
fn offset_tile(b: &mut Builder, m: &Induction, init: Value, sum: Value) -> Value {
    let ty = b.func.ty(init).clone();
    let splat = b.one(Op::Splat, &[sum], ty.with_elem(m.sum));
    b.one(m.op.clone(), &[init, splat], ty)
}

/// Emits the sum after a step.
fn advance(b: &mut Builder, m: &Induction, sum: Value) -> Value {
    let step = match m.step {
        Step::Constant(i) => b.int(i, m.sum),
        Step::Scalar(v) => b.cast(v, m.sum),
    };
    b.binary(BinaryOp::Add, sum, step)
}
