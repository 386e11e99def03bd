//! Brings what a kernel reads after a loop of products into the L2 cache while the loop runs.
//!
//! Does: in kernels that load by TMA, where a block reads a view of two dimensions, or adds to its memory, after a loop with
//! a dot in the same block, puts a `prefetch_view` of a few rows into the first such loop: the next rows in each iteration.
//! Otherwise all programs would read at once, and wait, when the tensor cores have nothing to do. A prefetch of all rows
//! before the loop would delay the loop's first loads, and in a long loop there is less to gain than other loads lose.
//! Requires: stage *async*, before `rotate_loops`.
//! Keeps: results.
//! Does not: blocks of less than [`MIN_BYTES`], views that depend on the loop, and those that TMA cannot fetch. Rows beyond
//! the last iteration are left out, and loops of more than [`MOST_ITERATIONS`] prefetch nothing.

use crate::analysis::access_layout::view_operands;
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::tensor_map;
use crate::ir::nested::{copy_slice, dot_loop_before};
use crate::ir::{BinaryOp, Builder, CmpOp, DType, Effects, Func, Op, OpId, Type, Value};
use std::collections::HashMap;

/// Smaller blocks do not pay for a tensor map and its coordinates.
const MIN_BYTES: usize = 2048;
/// Rows of a prefetch: a tile of 128 rows takes as many iterations as [`MOST_ITERATIONS`].
const ROWS: usize = 8;
/// Iterations of loops that prefetch. On an H100, products in bf16 that add a matrix in f32 took 1 to 19 % less time with
/// loops of up to 16 iterations (36 timings, median 5 %); with longer ones the median was 1 % more (76 timings,
/// `harness/records/2026-11-27-h100-matmul-added.jsonl`).
const MOST_ITERATIONS: i64 = 16;

/// Runs the pass.
pub fn run(func: &mut Func) {
    let by_tma = func.walk().iter().any(|&id| matches!(func.op(id).op, Op::TmaLoad { .. }));
    if !by_tma {
        return;
    }
    let axis = AxisAnalysis::new(func);
    let found: Vec<Prefetch> = func.walk().into_iter().filter_map(|id| Prefetch::of(func, &axis, id)).collect();
    found.into_iter().for_each(|prefetch| prefetch.insert(func));
}

/// The rows of a view's block, in a loop that precedes its use.
struct Prefetch {
    view: Value,
    boundary: Vec<usize>,
    in_loop: OpId,
    /// Dimensions of the view: of contiguous elements, and of rows.
    inner: usize,
    outer: usize,
}

impl Prefetch {
    /// That of what an op reads, or adds to.
    fn of(func: &Func, axis: &AxisAnalysis, id: OpId) -> Option<Prefetch> {
        let data = func.op(id);
        let (Op::LoadView { boundary, .. } | Op::AtomicView { boundary, .. } | Op::TmaStore { boundary, op: Some(_) }) =
            &data.op
        else {
            return None;
        };
        let view = data.operands[0];
        let Type::View { block, elem } = func.ty(view) else { return None };
        let (&[inner, outer], true) = (view_operands(func, view).order, block.len() == 2) else { return None };
        let in_loop = dot_loop_before(func, id)?;
        let is_large = block.iter().product::<usize>() * elem.bytes() >= MIN_BYTES;
        let is_known = func.op(func.def_op(view)?).operands.iter().all(|&v| is_known_before(func, v, in_loop));
        let fits = is_large
            && is_known
            && block[outer].is_multiple_of(ROWS)
            && tensor_map::plan_dense(func, axis, view, boundary)
                .is_ok_and(|plan| plan.check_indices(func, axis).is_ok());
        fits.then(|| Prefetch { view, boundary: boundary.clone(), in_loop, inner, outer })
    }

    fn insert(self, func: &mut Func) {
        let Prefetch { view, boundary, in_loop, inner, outer } = self;
        let def = func.def_op(view).expect("internal compiler error: an unresolved view");
        let mut copies = HashMap::new();
        let operands: Vec<Value> =
            func.op(def).operands.clone().into_iter().map(|v| copy_before(func, v, in_loop, &mut copies)).collect();
        let Type::View { block, elem } = func.ty(view).clone() else { return };
        let body = func.op(in_loop).regions[0];
        let (index, [lower, upper, step]) =
            (func.block(body).params[0], [0, 1, 2].map(|i| func.op(in_loop).operands[i]));
        let (first, loc) = (func.block(body).ops[0], func.op(in_loop).loc.clone());
        let dtype = func.ty(index).dtype().unwrap_or(DType::I32);
        let (order, rows) = (vec![inner, outer], block[outer]);
        let mut part = block;
        part[outer] = ROWS;

        let mut b = Builder::before(func, in_loop, loc.clone());
        let length = b.binary(BinaryOp::Sub, upper, lower);
        let iterations = b.binary(BinaryOp::Div, length, step);
        let most = b.int(MOST_ITERATIONS, dtype);
        let is_short = b.cmp(CmpOp::Le, iterations, most);

        let mut b = Builder::before(func, first, loc);
        let iteration = b.binary(BinaryOp::Sub, index, lower);
        let iteration = b.binary(BinaryOp::Div, iteration, step);
        let iteration = b.cast(iteration, DType::I64);
        let size = b.int(ROWS as i64, DType::I64);
        let by = b.binary(BinaryOp::Mul, iteration, size);
        let count = b.int(rows as i64, DType::I64);
        let remains = b.cmp(CmpOp::Lt, by, count);
        let acts = b.binary(BinaryOp::And, remains, is_short);
        let mut operands = operands;
        // Base, extents, strides, offsets.
        let offset = 1 + 2 * order.len() + outer;
        operands[offset] = b.binary(BinaryOp::Add, operands[offset], by);
        let rows = b.one(Op::MakeView { order }, &operands, Type::View { block: part, elem });
        b.op(Op::PrefetchView { boundary }, &[rows, acts], &[]);
    }
}

/// Whether a value that is visible in the block of `before` is defined before it, or can be computed there.
fn is_known_before(func: &Func, v: Value, before: OpId) -> bool {
    let Some(def) = func.def_op(v).filter(|&def| is_after(func, def, before)) else { return true };
    let data = func.op(def);
    let can_move = data.op.effects() == Effects::Pure && data.regions.is_empty();
    can_move && data.operands.iter().all(|&operand| is_known_before(func, operand, before))
}

/// Whether an op is `before`, or follows it in its block.
fn is_after(func: &Func, id: OpId, before: OpId) -> bool {
    func.block_of(id) == func.block_of(before) && func.position(id) >= func.position(before)
}

/// The value, or a copy of it that is computed before an op.
fn copy_before(func: &mut Func, v: Value, before: OpId, copies: &mut HashMap<Value, Value>) -> Value {
    let put = |func: &mut Func, copy| func.insert(func.parent_block(before), func.position(before), &[copy]);
    copy_slice(func, v, copies, |func, id| is_after(func, id, before), put)
}
