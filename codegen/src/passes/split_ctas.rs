//! Splits the tiles of a program among the CTAs of a cluster (`num_ctas`).
//!
//! Does: splits the rows of the first dot's result, or else its columns, and the same dimension of everything that is
//! elementwise with it; without a dot, that of the first tile that is stored. Each CTA computes its part, at offsets that
//! follow from its rank ([`Op::CtaRank`]), and everything else, such as the other operand of a dot, is computed by all.
//! Stores of the latter are those of the first CTA.
//! Requires: a verified function at stage *tile*, before `split_tiles`.
//! Keeps: every value written. CTAs run without an order between them, so no CTA reads, or writes again, what another has
//! written: an op is the only one on its memory and runs once, or all ops on it are the same atomic function without a
//! result, or all are of block pointers of one matrix that start at multiples of their extent. The rows of a matrix are
//! taken to be different memory: strides for which they are not are those of programs that race with themselves.
//! Does not: change a function for one CTA.

use crate::analysis::access_layout::view_operands;
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::memory_effects::{is_pointer, underlying_arguments, written_pointers};
use crate::ir::nested::is_in_loop;
use crate::ir::{AtomicOp, BinaryOp, BlockId, Builder, CmpOp, DType, Def, Effects, Func, Op, OpId, Type, Value};
use std::collections::{HashMap, HashSet};

/// A dimension of a value.
type Axis = (Value, usize);

/// Runs the pass.
///
/// # Errors
/// The op that keeps the program from being split, and why. The function is unchanged.
pub fn run(func: &mut Func, ctas: u32) -> Result<(), (OpId, String)> {
    if ctas <= 1 {
        return Ok(());
    }
    let axes = Axes::of(func);
    let ops = func.walk();
    let dot = ops.iter().copied().find(|&id| matches!(func.op(id).op, Op::Dot { .. }));
    let stored = || ops.iter().find_map(|&id| Some((id, stored_tile(func, id).filter(|&v| func.ty(v).is_tensor())?)));
    let (at, tile) = match dot.map(|id| (id, func.result(id))).or_else(stored) {
        Some(found) => found,
        None => {
            let first = ops.first().copied().expect("internal compiler error: a kernel without ops");
            return Err((first, "the kernel has no dot and stores no tile that CTAs could share".into()));
        }
    };
    let mut refused = None;
    for axis in 0..func.ty(tile).shape().len() {
        match axes.split_of(func, (tile, axis), ctas).and_then(|split| check(func, &split).map(|()| split)) {
            Ok(split) => {
                rewrite(func, &split, ctas);
                return Ok(());
            }
            Err(error) => refused = refused.or(Some(error)),
        }
    }
    Err(refused.unwrap_or((at, "its tile has no dimension that CTAs could share".into())))
}

/// The tile that an op without a result writes.
fn stored_tile(func: &Func, id: OpId) -> Option<Value> {
    let data = func.op(id);
    matches!(data.op, Op::StoreView { .. } | Op::AtomicView { .. } | Op::Store { .. }).then(|| data.operands[1])
}

/// Which dimensions are split together, and which cannot be.
#[derive(Default)]
struct Axes {
    /// Another dimension of the same class, or the first of it.
    parent: HashMap<Axis, Axis>,
    /// The ops for which the whole of a dimension has to be in one CTA, and why.
    whole: Vec<(Axis, OpId, &'static str)>,
}

impl Axes {
    fn of(func: &Func) -> Axes {
        let mut axes = Axes::default();
        for id in func.walk() {
            axes.op(func, id);
        }
        axes
    }

    fn class(&self, axis: Axis) -> Axis {
        std::iter::successors(Some(axis), |axis| self.parent.get(axis).copied()).last().unwrap_or(axis)
    }

    fn join(&mut self, a: Axis, b: Axis) {
        let (a, b) = (self.class(a), self.class(b));
        if a != b {
            self.parent.insert(a, b);
        }
    }

    /// Joins the dimensions of two values of one shape.
    fn same(&mut self, func: &Func, a: Value, b: Value) {
        let rank = func.ty(a).shape().len();
        if rank == func.ty(b).shape().len() {
            (0..rank).for_each(|d| self.join((a, d), (b, d)));
        }
    }

    fn keep_whole(&mut self, func: &Func, v: Value, id: OpId, why: &'static str) {
        for d in 0..func.ty(v).shape().len() {
            self.whole.push(((v, d), id, why));
        }
    }

    fn op(&mut self, func: &Func, id: OpId) {
        let data = func.op(id);
        let (operands, results) = (&data.operands, &data.results);
        match &data.op {
            Op::ExpandDims { axis } => {
                for d in 0..func.ty(operands[0]).shape().len() {
                    self.join((operands[0], d), (results[0], d + usize::from(d >= *axis)));
                }
            }
            Op::Broadcast => {
                let [from, to] = [operands[0], results[0]].map(|v| func.ty(v).shape());
                for d in (0..to.len()).filter(|&d| from[d] == to[d]) {
                    self.join((operands[0], d), (results[0], d));
                }
            }
            Op::Trans { perm } => {
                perm.iter().enumerate().for_each(|(to, &from)| self.join((operands[0], from), (results[0], to)));
            }
            Op::Join | Op::Split => {
                for (&whole, &half) in operands.iter().flat_map(|a| results.iter().map(move |b| (a, b))) {
                    let ranks = [whole, half].map(|v| func.ty(v).shape().len());
                    let rank = ranks[0].min(ranks[1]);
                    (0..rank).for_each(|d| self.join((whole, d), (half, d)));
                    let pairs = if ranks[0] > rank { whole } else { half };
                    self.whole.push(((pairs, rank), id, "it joins or splits pairs along this dimension"));
                }
            }
            Op::Gather { axis } => {
                self.same(func, operands[1], results[0]);
                for d in (0..func.ty(operands[0]).shape().len()).filter(|d| d != axis) {
                    self.join((operands[0], d), (results[0], d));
                }
                self.whole.push(((operands[0], *axis), id, "it gathers along this dimension"));
            }
            Op::Dot { .. } => {
                let [a, b, acc] = operands[..] else { return };
                self.same(func, acc, results[0]);
                self.join((a, 0), (results[0], 0));
                self.join((b, 1), (results[0], 1));
                self.join((a, 1), (b, 0));
                self.whole.push(((a, 1), id, "it sums along this dimension"));
            }
            Op::Reduce { axis } | Op::Scan { axis, .. } => {
                let removed = matches!(data.op, Op::Reduce { .. });
                for &v in operands {
                    self.whole.push(((v, *axis), id, "it combines elements along this dimension"));
                    for d in (0..func.ty(v).shape().len()).filter(|d| d != axis) {
                        let to = if removed && d > *axis { d - 1 } else { d };
                        results.iter().for_each(|&result| self.join((v, d), (result, to)));
                    }
                    if !removed {
                        results.iter().for_each(|&result| self.join((v, *axis), (result, *axis)));
                    }
                }
            }
            Op::For { .. } => self.region_values(func, id, 3, 1),
            Op::If => self.region_values(func, id, usize::MAX, 0),
            Op::While => {
                self.region_values(func, id, 0, 0);
                let condition = func.terminator(data.regions[0]);
                let forwarded = func.op(condition).operands[1..].iter();
                let after = &func.block(data.regions[1]).params;
                for ((&v, &param), &result) in forwarded.zip(after).zip(results) {
                    self.same(func, v, param);
                    self.same(func, v, result);
                }
            }
            Op::Yield | Op::Condition => {}
            Op::Reshape | Op::DevicePrint { .. } => {
                let why = "it needs all elements in their order";
                operands.iter().chain(results).for_each(|&v| self.keep_whole(func, v, id, why));
            }
            Op::InlineAsm { pack, .. } if *pack > 1 => {
                operands.iter().chain(results).for_each(|&v| self.keep_whole(func, v, id, "it takes several elements"));
            }
            // Elementwise, and accesses of memory.
            _ => {
                let mut all = operands.iter().chain(results).filter(|&&v| !func.ty(v).shape().is_empty());
                let Some(&first) = all.next() else { return };
                all.for_each(|&v| self.same(func, first, v));
            }
        }
    }

    /// Joins what a loop or branch carries: its operands from `init` on, the parameters of its regions from `skip` on, what
    /// these yield, and its results.
    fn region_values(&mut self, func: &Func, id: OpId, init: usize, skip: usize) {
        let data = func.op(id);
        let is_while = matches!(data.op, Op::While);
        // The first region of a `while` does not yield, and its second one has other parameters.
        let entered = if is_while { &data.regions[..1] } else { &data.regions[..] };
        let left = if is_while { &data.regions[1..] } else { &data.regions[..] };
        let mut lists: Vec<Vec<Value>> = entered
            .iter()
            .map(|&region| func.block(region).params.iter().skip(skip).copied().collect())
            .chain(left.iter().map(|&region| func.op(func.terminator(region)).operands.clone()))
            .collect();
        lists.push(data.operands.iter().skip(init).copied().collect());
        if !is_while {
            lists.push(data.results.clone());
        }
        let lists: Vec<Vec<Value>> = lists.into_iter().filter(|list| !list.is_empty()).collect();
        for pair in lists.windows(2) {
            pair[0].iter().zip(&pair[1]).for_each(|(&a, &b)| self.same(func, a, b));
        }
    }

    /// The dimensions that are split with this one.
    fn split_of(&self, func: &Func, axis: Axis, ctas: u32) -> Result<HashSet<Axis>, (OpId, String)> {
        let class = self.class(axis);
        let extent = func.ty(axis.0).shape()[axis.1];
        let at = |v: Value| func.def_op(v).unwrap_or_else(|| func.walk()[0]);
        if !extent.is_multiple_of(ctas as usize) {
            let message = format!("a dimension of {extent} elements is not a multiple of num_ctas = {ctas}");
            return Err((at(axis.0), message));
        }
        if let Some((_, id, why)) = self.whole.iter().find(|(whole, ..)| self.class(*whole) == class) {
            return Err((*id, format!("{why}, which CTAs would have to share")));
        }
        let values = all_values(func);
        let dims = values.into_iter().flat_map(|v| (0..func.ty(v).shape().len()).map(move |d| (v, d)));
        let split: HashSet<Axis> = dims.filter(|&axis| self.class(axis) == class).collect();
        match split.iter().find(|(v, d)| func.ty(*v).shape()[*d] != extent) {
            Some(&(v, _)) => Err((at(v), "dimensions of different extents would be shared by CTAs".into())),
            None => Ok(split),
        }
    }
}

/// The parameters of blocks and the results of ops.
fn all_values(func: &Func) -> Vec<Value> {
    let ops = func.walk();
    let regions = ops.iter().flat_map(|&id| func.op(id).regions.clone());
    let params = regions.flat_map(|region| func.block(region).params.clone());
    params.chain(ops.iter().flat_map(|&id| func.op(id).results.clone())).collect()
}

/// The dimension of a value that is split.
fn split_axis(func: &Func, split: &HashSet<Axis>, v: Value) -> Option<usize> {
    (0..func.ty(v).shape().len()).find(|&d| split.contains(&(v, d)))
}

/// Checks that no CTA depends on what another one writes, and that each write is done once.
fn check(func: &Func, split: &HashSet<Axis>) -> Result<(), (OpId, String)> {
    for v in all_values(func) {
        if (0..func.ty(v).shape().len()).filter(|&d| split.contains(&(v, d))).count() > 1 {
            let id = func.def_op(v).unwrap_or_else(|| func.walk()[0]);
            return Err((id, "CTAs would share two dimensions of one tile".into()));
        }
    }
    let written: HashSet<Value> = written_pointers(func).into_iter().filter(|&v| is_argument(func, v)).collect();
    let mut accesses: HashMap<Value, Vec<OpId>> = HashMap::new();
    for id in func.walk() {
        let data = func.op(id);
        match data.op {
            Op::AtomicRmw { .. } | Op::AtomicCas { .. } => {
                return Err((id, "atomics that return a value are not shared by CTAs".into()));
            }
            Op::SemaphoreWait => return Err((id, "semaphores are not shared by CTAs".into())),
            Op::InlineAsm { pure: false, .. } => return Err((id, "inline assembly is not shared by CTAs".into())),
            _ => {}
        }
        let Some(&pointer) = data.operands.first().filter(|&&v| is_pointer(func, v)) else { continue };
        if matches!(data.op.effects(), Effects::Read | Effects::Write) {
            for argument in underlying_arguments(func, pointer).into_iter().filter(|v| written.contains(v)) {
                accesses.entry(argument).or_default().push(id);
            }
        }
    }
    let axis = AxisAnalysis::new(func);
    let mut of_memory: Vec<Vec<OpId>> = accesses.into_values().collect();
    of_memory.sort();
    for ops in of_memory {
        // What the first CTA alone writes, nobody reads.
        let of_all = |&id: &OpId| split_axis(func, split, func.op(id).operands[0]).is_none();
        let only_stores = ops.iter().all(|&id| func.op(id).op.effects() == Effects::Write);
        let runs_once = ops.len() == 1 && !is_in_loop(func, func.parent_block(ops[0]));
        // Of one function that commutes, in any order.
        let function = |&id: &OpId| match func.op(id).op {
            Op::AtomicView { op, .. } if op != AtomicOp::Xchg => Some(op),
            _ => None,
        };
        let combines = ops.iter().all(|id| function(id).is_some_and(|op| function(&ops[0]) == Some(op)));
        if only_stores && (ops.iter().all(of_all) || runs_once || combines && !ops.iter().any(of_all)) {
            continue;
        }
        let first = own_rows(func, &axis, split, ops[0]);
        for &id in &ops {
            let rows = own_rows(func, &axis, split, id);
            if rows.is_none() || rows != first {
                let why = "a CTA might read or write what another one writes: memory that is written is accessed by one op that \
                           runs once, or through block pointers of one matrix that start at multiples of their extent";
                return Err((id, why.into()));
            }
        }
    }
    Ok(())
}

fn is_argument(func: &Func, v: Value) -> bool {
    matches!(func.value(v).def, Def::Param(block, _) if block == func.body)
}

/// What determines the elements that a CTA accesses, whatever the offsets of the access: the base, extents and strides of
/// its view, and the dimension and extent of what is split. `None` if the offsets matter.
fn own_rows(func: &Func, axis: &AxisAnalysis, split: &HashSet<Axis>, id: OpId) -> Option<(Vec<Fixed>, usize, usize)> {
    let view = func.op(id).operands[0];
    let Type::View { block, .. } = func.ty(view) else { return None };
    let d = split_axis(func, split, view)?;
    matches!(func.op(func.def_op(view)?).op, Op::MakeView { .. }).then_some(())?;
    let parts = view_operands(func, view);
    let starts_at_multiple = axis.scalar_divisor(func, parts.offsets[d]).is_multiple_of(block[d] as u64);
    let matrix = [&[parts.base], parts.shape, parts.strides].concat();
    let matrix: Option<Vec<Fixed>> = matrix.into_iter().map(|v| fixed(func, v)).collect();
    Some((matrix.filter(|_| starts_at_multiple)?, d, block[d]))
}

/// A value that is the same in the whole program.
#[derive(PartialEq)]
enum Fixed {
    Constant(i64),
    /// The value that casts begin with.
    Of(Value),
}

/// `None` if a value may change from one iteration of a loop to the next.
fn fixed(func: &Func, v: Value) -> Option<Fixed> {
    fn is_fixed(func: &Func, v: Value) -> bool {
        match func.value(v).def {
            Def::Param(block, _) => block == func.body,
            Def::Result(id, _) => {
                let data = func.op(id);
                let pure = data.op.effects() == Effects::Pure && data.regions.is_empty();
                pure && data.operands.iter().all(|&v| is_fixed(func, v))
            }
        }
    }
    if let Some(n) = func.constant_int(v) {
        return Some(Fixed::Constant(n));
    }
    let mut source = v;
    while let Some(id) = func.def_op(source).filter(|&id| func.op(id).op == Op::Cast) {
        source = func.op(id).operands[0];
    }
    is_fixed(func, v).then_some(Fixed::Of(source))
}

/// Gives each value its part, and each op what depends on the rank.
fn rewrite(func: &mut Func, split: &HashSet<Axis>, ctas: u32) {
    let ops = func.walk();
    let moved: Vec<(OpId, usize, usize)> = ops
        .iter()
        .filter(|&&id| matches!(func.op(id).op, Op::Arange { .. } | Op::MakeView { .. }))
        .filter_map(|&id| {
            let v = func.result(id);
            let d = split_axis(func, split, v)?;
            Some((id, d, func.ty(v).shape()[d] / ctas as usize))
        })
        .collect();
    for &id in &ops {
        weaken_hint(func, id, split, ctas);
    }
    let of_all: Vec<OpId> = ops
        .iter()
        .copied()
        .filter(|&id| {
            let data = func.op(id);
            let writes = matches!(data.op, Op::StoreView { .. } | Op::AtomicView { .. } | Op::Store { .. });
            let prints = matches!(data.op, Op::DevicePrint { .. });
            prints || writes && data.operands.iter().all(|&v| split_axis(func, split, v).is_none())
        })
        .collect();
    for v in all_values(func) {
        if let Some(d) = split_axis(func, split, v) {
            let mut shape = func.ty(v).shape().to_vec();
            shape[d] /= ctas as usize;
            let ty = match func.ty(v) {
                Type::View { elem, .. } => Type::View { block: shape, elem: *elem },
                ty => Type::tensor(&shape, ty.elem().expect("internal compiler error: a tile without elements")),
            };
            func.set_ty(v, ty);
        }
    }
    let loc = func.loc.clone();
    let mut b = Builder::before(func, ops[0], loc);
    let rank = b.one(Op::CtaRank { ctas }, &[], Type::scalar(DType::I32));
    let zero = b.int(0, DType::I32);
    let is_first = b.cmp(CmpOp::Eq, rank, zero);
    for (id, d, extent) in moved {
        let loc = func.op(id).loc.clone();
        match func.op(id).op.clone() {
            Op::Arange { start, .. } => {
                *func.op_mut(id) = Op::Arange { start, end: start + extent as i64 };
                let v = func.result(id);
                let mut b = Builder::after(func, id, loc);
                let extent_value = b.int(extent as i64, DType::I32);
                let offset = b.binary(BinaryOp::Mul, rank, extent_value);
                let offset = b.splat(offset, &[extent]);
                let sum = b.binary(BinaryOp::Add, v, offset);
                let add = func.def_op(sum).expect("internal compiler error: a sum without an op");
                let others: Vec<(OpId, usize)> =
                    func.uses(v).iter().filter(|used| used.op != add).map(|used| (used.op, used.index)).collect();
                others.into_iter().for_each(|(op, index)| func.set_operand(op, index, sum));
            }
            _ => {
                let at = func.op(id).operands.len() - func.ty(func.result(id)).shape().len() + d;
                let start = func.op(id).operands[at];
                let mut b = Builder::before(func, id, loc);
                let (wide, extent) = (b.cast(rank, DType::I64), b.int(extent as i64, DType::I64));
                let offset = b.binary(BinaryOp::Mul, wide, extent);
                let sum = b.binary(BinaryOp::Add, start, offset);
                func.set_operand(id, at, sum);
            }
        }
    }
    for id in of_all {
        by_first(func, id, is_first);
    }
}

/// Removes from a hint along a dimension that is split what holds for runs of elements, if parts do not consist of whole runs.
fn weaken_hint(func: &mut Func, id: OpId, split: &HashSet<Axis>, ctas: u32) {
    let Op::Hint { contiguous, at_least, .. } = func.op(id).op else { return };
    let v = func.result(id);
    let Some(d) = split_axis(func, split, v).filter(|&d| d + 1 == func.ty(v).shape().len()) else { return };
    let extent = func.ty(v).shape()[d] as i64 / i64::from(ctas);
    if contiguous.is_none_or(|run| extent % run != 0) {
        *func.op_mut(id) = Op::Hint { divisible: None, contiguous: None, at_least };
    }
}

/// Lets only the first CTA run an op without results.
fn by_first(func: &mut Func, id: OpId, is_first: Value) {
    let loc = func.op(id).loc.clone();
    let [then, otherwise]: [BlockId; 2] = [func.add_block(), func.add_block()];
    Builder::before(func, id, loc.clone()).op_with_regions(Op::If, &[is_first], &[], &[then, otherwise]);
    func.detach(id);
    func.push(then, id);
    for block in [then, otherwise] {
        Builder::new(func, block, loc.clone()).op(Op::Yield, &[], &[]);
    }
}
