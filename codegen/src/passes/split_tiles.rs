//! Splits tiles whose extents are not powers of two into parts whose extents are ([`parts`]).
//!
//! Does: replaces each such tile, or view of such a block, by its parts, and each op on it by ops on these. Loops and
//! branches carry the parts. A dot of parts sums over the parts of K in their order; reductions and scans along a split
//! dimension combine the results of its parts.
//! Requires: a verified function at stage *tile*.
//! Keeps: every value read and written, but for the order of sums of floats and their roundings.
//! Does not: change a function in which all extents are powers of two. Keep a `hint` that holds for a part only because
//! of its neighbors: the part has a weaker one.

use super::dce;
use crate::ir::nested::copy_region;
use crate::ir::parts::{self, Part};
use crate::ir::{BinaryOp, BlockId, Builder, CmpOp, DType, Elem, Func, Op, OpData, OpId, Type, Value};
use std::collections::HashMap;

/// Runs the pass.
pub fn run(func: &mut Func) {
    let values = func.walk().into_iter().flat_map(|id| func.op(id).results.clone());
    if values.into_iter().all(|v| parts::count(func.ty(v).shape()) == 1) {
        return;
    }
    let mut pass = Pass { func, parts: HashMap::new() };
    pass.block(pass.func.body);
    dce::run(func);
}

struct Pass<'f> {
    func: &'f mut Func,
    /// The parts of each value that is split.
    parts: HashMap<Value, Vec<Value>>,
}

/// The types of the parts of a value.
fn types(ty: &Type) -> Vec<Type> {
    let of = |shape: &[usize]| match ty {
        Type::View { elem, .. } => Type::View { block: shape.to_vec(), elem: *elem },
        Type::Tensor { elem, .. } => Type::tensor(shape, *elem),
        other => other.clone(),
    };
    parts::of(ty.shape()).iter().map(|part| of(&part.shape)).collect()
}

impl Pass<'_> {
    fn block(&mut self, block: BlockId) {
        for id in self.func.take_ops(block) {
            let data = self.func.op(id);
            let is_split = |v: &Value| parts::count(self.func.ty(*v).shape()) > 1;
            let any = data.operands.iter().chain(&data.results).any(is_split);
            match data.op {
                Op::For { .. } | Op::If | Op::While => self.control_flow(block, id),
                Op::Yield | Op::Condition => {
                    self.expand_operands(id);
                    self.func.push(block, id);
                }
                _ if any => self.split(block, id),
                _ => self.func.push(block, id),
            }
        }
    }

    /// The parts of a value: itself where it is one.
    fn parts(&self, v: Value) -> Vec<Value> {
        self.parts.get(&v).cloned().unwrap_or_else(|| vec![v])
    }

    /// Appends ops for the op `id`.
    fn builder(&mut self, block: BlockId, id: OpId) -> Builder<'_> {
        let loc = self.func.op(id).loc.clone();
        Builder::new(self.func, block, loc)
    }

    fn shape(&self, v: Value) -> Vec<usize> {
        self.func.ty(v).shape().to_vec()
    }

    /// Replaces a value by its parts.
    fn replace(&mut self, v: Value, parts: Vec<Value>) {
        let name = self.func.value(v).name.clone();
        for &part in &parts {
            self.func.set_name(part, name.clone());
        }
        match parts[..] {
            [one] if parts::count(self.func.ty(v).shape()) == 1 => self.func.replace_uses(v, one),
            _ => _ = self.parts.insert(v, parts),
        }
    }

    // Control flow.

    fn control_flow(&mut self, block: BlockId, id: OpId) {
        let is_for = matches!(self.func.op(id).op, Op::For { .. });
        for region in self.func.op(id).regions.clone() {
            self.expand_params(region, usize::from(is_for));
            self.block(region);
        }
        self.expand_operands(id);
        let old = self.func.op(id).clone();
        let split: Vec<Vec<Type>> = old.results.iter().map(|&v| types(self.func.ty(v))).collect();
        let regions = self.func.take_regions(id);
        self.func.erase(id);
        let new = self.func.append(block, old.op, old.operands, split.concat(), regions, old.loc);
        let mut results = self.func.op(new).results.clone().into_iter();
        for (&v, types) in old.results.iter().zip(&split) {
            let parts = results.by_ref().take(types.len()).collect();
            self.replace(v, parts);
        }
    }

    fn expand_operands(&mut self, id: OpId) {
        let expanded: Vec<Value> = self.func.op(id).operands.iter().flat_map(|&v| self.parts(v)).collect();
        self.func.set_operands(id, &expanded);
    }

    /// Replaces parameters of a region, from `first` on, by parameters for their parts.
    fn expand_params(&mut self, region: BlockId, first: usize) {
        let mut params = Vec::new();
        for (i, v) in self.func.block(region).params.clone().into_iter().enumerate() {
            let types = types(self.func.ty(v));
            if i < first || types.len() == 1 {
                params.push(v);
                continue;
            }
            let parts: Vec<Value> = types.into_iter().map(|ty| self.func.add_param(region, ty)).collect();
            params.extend(&parts);
            self.replace(v, parts);
        }
        self.func.set_params(region, params);
    }

    // Ops.

    /// Appends ops on parts in place of an op, and erases it.
    fn split(&mut self, block: BlockId, id: OpId) {
        let data = self.func.op(id).clone();
        match data.op {
            Op::Dot { .. } => self.dot(block, id),
            Op::Reduce { axis } => self.reduce(block, id, axis),
            Op::Scan { axis, reverse } => self.scan(block, id, axis, reverse),
            Op::Gather { axis } => self.gather(block, id, axis),
            Op::DevicePrint { prefix } if data.operands.len() > 1 => {
                for v in data.operands {
                    let op = Op::DevicePrint { prefix: prefix.clone() };
                    let one = self.func.create_op(op, vec![v], Vec::new(), Vec::new(), data.loc.clone());
                    self.part_by_part(block, one);
                    self.func.erase(one);
                }
            }
            Op::Unary(_)
            | Op::Binary(_)
            | Op::Cmp(_)
            | Op::Constant { .. }
            | Op::Arange { .. }
            | Op::MakeView { .. }
            | Op::Advance
            | Op::LoadView { .. }
            | Op::StoreView { .. }
            | Op::AtomicView { .. }
            | Op::PtrAdd
            | Op::Load { .. }
            | Op::Store { .. }
            | Op::AtomicRmw { .. }
            | Op::AtomicCas { .. }
            | Op::SemaphoreWait
            | Op::Splat
            | Op::ExpandDims { .. }
            | Op::Broadcast
            | Op::Trans { .. }
            | Op::Reshape
            | Op::Join
            | Op::Split
            | Op::Fma
            | Op::Select
            | Op::Cast
            | Op::Bitcast
            | Op::InlineAsm { .. }
            | Op::Hint { .. }
            | Op::DevicePrint { .. }
            | Op::DeviceAssert { .. } => self.part_by_part(block, id),
            other => {
                panic!("internal compiler error: `{}` of a tile that is split; please report this", other.mnemonic())
            }
        }
        self.func.erase(id);
    }

    /// An op of which a part of the result depends on one part of each operand.
    fn part_by_part(&mut self, block: BlockId, id: OpId) {
        let data = self.func.op(id).clone();
        // Ops without a result have the shape of their operands.
        let of_operands = || data.operands.iter().max_by_key(|&&v| parts::count(&self.shape(v)));
        let shape = data.results.first().or_else(of_operands).map(|&v| self.shape(v)).unwrap_or_default();
        let split: Vec<Vec<Type>> = data.results.iter().map(|&v| types(self.func.ty(v))).collect();
        let mut results: Vec<Vec<Value>> = vec![Vec::new(); split.len()];
        for (i, part) in parts::of(&shape).iter().enumerate() {
            let types: Vec<Type> = split.iter().map(|types| types[i].clone()).collect();
            let operands: Vec<Value> = data.operands.iter().map(|&v| self.operand(&data.op, v, &shape, i)).collect();
            let op = match data.op {
                Op::Hint { .. } => hint_of_part(self.func.op(id), part, self.func.ty(data.results[0])),
                ref op => Some(of_part(op, part)),
            };
            let new = match op {
                Some(op) => {
                    let new = self.builder(block, id).op(op, &operands, &types);
                    self.func.op(new).results.clone()
                }
                None => operands,
            };
            let new = match data.op {
                Op::MakeView { .. } => vec![self.moved(block, id, new[0], &part.offsets)],
                _ => new,
            };
            results.iter_mut().zip(new).for_each(|(all, v)| all.push(v));
        }
        for (&v, parts) in data.results.iter().zip(results) {
            self.replace(v, parts);
        }
    }

    /// The part of an operand that part `i` of a result of that shape depends on.
    fn operand(&self, op: &Op, v: Value, shape: &[usize], i: usize) -> Value {
        let (parts, from) = (self.parts(v), self.shape(v));
        let to = || parts::places(shape).swap_remove(i);
        match op {
            _ if parts.len() == 1 => parts[0],
            Op::Trans { perm } => {
                let to = to();
                let mut place = vec![0; perm.len()];
                perm.iter().zip(to).for_each(|(&dim, at)| place[dim] = at);
                parts[parts::place(&from, &place)]
            }
            Op::Broadcast => {
                let along = to().iter().zip(&from).map(|(&at, &n)| if n == 1 { 0 } else { at }).collect::<Vec<_>>();
                parts[parts::place(&from, &along)]
            }
            // The same dimensions, others of extent 1 or 2, or a reshape that keeps the parts.
            _ => parts[i],
        }
    }

    /// The view of a part: `view`, which has the offsets of the whole block, moved by those of the part.
    fn moved(&mut self, block: BlockId, id: OpId, view: Value, offsets: &[usize]) -> Value {
        if offsets.iter().all(|&at| at == 0) {
            return view;
        }
        let mut builder = self.builder(block, id);
        let deltas: Vec<Value> = offsets.iter().map(|&at| builder.int(at as i64, DType::I64)).collect();
        builder.advance(view, &deltas)
    }

    /// acc[i, j] + Σ a[i, k] · b[k, j] of parts.
    fn dot(&mut self, block: BlockId, id: OpId) {
        let data = self.func.op(id).clone();
        let [a, b, acc] = [0, 1, 2].map(|i| (self.parts(data.operands[i]), self.shape(data.operands[i])));
        let depth = parts::along(a.1[1]).len();
        let mut results = Vec::new();
        for place in parts::places(&acc.1) {
            let mut sum = acc.0[parts::place(&acc.1, &place)];
            for k in 0..depth {
                let operands = [a.0[parts::place(&a.1, &[place[0], k])], b.0[parts::place(&b.1, &[k, place[1]])], sum];
                let (ty, depth) = (self.func.ty(sum).clone(), self.shape(operands[0])[1] as u32);
                let op = match data.op {
                    Op::Dot { precision, max_imprecise } => {
                        Op::Dot { precision, max_imprecise: max_imprecise.map(|most| most.min(depth)) }
                    }
                    ref other => other.clone(),
                };
                sum = self.builder(block, id).one(op, &operands, ty);
            }
            results.push(sum);
        }
        self.replace(data.results[0], results);
    }

    /// A copy of a reduction or scan `id` for other operands. Its results have the operands' shape, without `removed`.
    fn combine(&mut self, block: BlockId, id: OpId, op: Op, operands: &[Value], removed: Option<usize>) -> Vec<Value> {
        let data = self.func.op(id).clone();
        let types: Vec<Type> = operands
            .iter()
            .zip(&data.results)
            .map(|(&v, &like)| {
                let mut shape = self.shape(v);
                removed.map(|axis| shape.remove(axis));
                let elem = self
                    .func
                    .ty(like)
                    .elem()
                    .expect("internal compiler error: a reduction without elements; please report this");
                Type::tensor(&shape, elem)
            })
            .collect();
        let region = copy_region(self.func, data.regions[0], &mut HashMap::new());
        let new = self.builder(block, id).op_with_regions(op, operands, &types, &[region]);
        self.func.op(new).results.clone()
    }

    /// Pairs of `left` and `right`, along a new last dimension.
    fn joined(&mut self, block: BlockId, id: OpId, left: &[Value], right: &[Value]) -> Vec<Value> {
        let mut builder = self.builder(block, id);
        left.iter().zip(right).map(|(&a, &b)| builder.join(a, b)).collect()
    }

    /// Reduces each part, and the results of parts along the axis two at a time.
    fn reduce(&mut self, block: BlockId, id: OpId, axis: usize) {
        let data = self.func.op(id).clone();
        let shape = self.shape(data.operands[0]);
        let mut of_rest = shape.clone();
        of_rest.remove(axis);
        let mut results: Vec<Vec<Value>> = vec![Vec::new(); data.results.len()];
        for rest in parts::places(&of_rest) {
            let mut sums: Option<Vec<Value>> = None;
            for at in 0..parts::along(shape[axis]).len() {
                let operands = self.along(&data.operands, &shape, axis, &rest, at);
                let next = self.combine(block, id, Op::Reduce { axis }, &operands, Some(axis));
                sums = Some(match sums {
                    None => next,
                    Some(sums) => {
                        let pairs = self.joined(block, id, &sums, &next);
                        let last = self.shape(pairs[0]).len() - 1;
                        self.combine(block, id, Op::Reduce { axis: last }, &pairs, Some(last))
                    }
                });
            }
            results.iter_mut().zip(sums.into_iter().flatten()).for_each(|(all, v)| all.push(v));
        }
        for (&v, parts) in data.results.iter().zip(results) {
            self.replace(v, parts);
        }
    }

    /// The parts of operands at `at` along the axis and at `rest` along the other dimensions.
    fn along(&self, operands: &[Value], shape: &[usize], axis: usize, rest: &[usize], at: usize) -> Vec<Value> {
        let mut place = rest.to_vec();
        place.insert(axis, at);
        operands.iter().map(|&v| self.parts(v)[parts::place(shape, &place)]).collect()
    }

    /// Scans each part along the axis, and combines its results with the last of the part before.
    fn scan(&mut self, block: BlockId, id: OpId, axis: usize, reverse: bool) {
        let data = self.func.op(id).clone();
        let shape = self.shape(data.operands[0]);
        let mut of_rest = shape.clone();
        of_rest.remove(axis);
        let count = parts::along(shape[axis]).len();
        let mut results: Vec<Vec<Option<Value>>> = vec![vec![None; parts::count(&shape)]; data.results.len()];
        for rest in parts::places(&of_rest) {
            let mut before: Option<Vec<Value>> = None;
            for step in 0..count {
                let at = if reverse { count - 1 - step } else { step };
                let operands = self.along(&data.operands, &shape, axis, &rest, at);
                let op = Op::Scan { axis, reverse };
                let mut scanned = self.combine(block, id, op, &operands, None);
                if let Some(before) = before {
                    scanned = self.continued(block, id, axis, reverse, &before, &scanned);
                }
                let mut place = rest.clone();
                place.insert(axis, at);
                for (all, &v) in results.iter_mut().zip(&scanned) {
                    all[parts::place(&shape, &place)] = Some(v);
                }
                before = Some(scanned);
            }
        }
        for (&v, parts) in data.results.iter().zip(results) {
            self.replace(v, parts.into_iter().flatten().collect());
        }
    }

    /// The results of a scan of a part, combined with those of the part before.
    fn continued(
        &mut self,
        block: BlockId,
        id: OpId,
        axis: usize,
        reverse: bool,
        before: &[Value],
        scanned: &[Value],
    ) -> Vec<Value> {
        let (from, to) = (self.shape(before[0]), self.shape(scanned[0]));
        let mut one = from.clone();
        one[axis] = 1;
        let mut builder = self.builder(block, id);
        let last = if reverse { 0 } else { from[axis] - 1 };
        let index = builder.number(last as f64, Type::tensor(&one, DType::I32));
        let carried: Vec<Value> = before
            .iter()
            .map(|&v| {
                let last = builder.gather(v, index, axis);
                builder.broadcast(last, &to)
            })
            .collect();
        // The scan of a pair gives the combination in the order of the scan.
        let (left, right) = if reverse { (scanned, &carried[..]) } else { (&carried[..], scanned) };
        let pairs = self.joined(block, id, left, right);
        let op = Op::Scan { axis: to.len(), reverse };
        let both = self.combine(block, id, op, &pairs, None);
        let mut builder = self.builder(block, id);
        both.into_iter()
            .map(|v| {
                let (first, second) = builder.split(v);
                if reverse { first } else { second }
            })
            .collect()
    }

    /// Gathers from each part of the operand along the axis, and selects by the index.
    fn gather(&mut self, block: BlockId, id: OpId, axis: usize) {
        let data = self.func.op(id).clone();
        let (shape, to) = (self.shape(data.operands[0]), self.shape(data.operands[1]));
        let indices = self.parts(data.operands[1]);
        let ranges = parts::along(shape[axis]);
        let mut results = Vec::new();
        for (place, index) in parts::places(&to).into_iter().zip(indices) {
            let mut rest = place;
            rest.remove(axis);
            let sources: Vec<Value> =
                (0..ranges.len()).map(|at| self.along(&data.operands[..1], &shape, axis, &rest, at)[0]).collect();
            let mut b = self.builder(block, id);
            if let [source] = sources[..] {
                results.push(b.gather(source, index, axis));
                continue;
            }
            // Modulo the extent, as gathers from a part are modulo its own.
            let ty = b.func.ty(index).clone();
            let number = |b: &mut Builder, n: usize| b.number(n as f64, ty.clone());
            let (extent, zero) = (number(&mut b, shape[axis]), number(&mut b, 0));
            let rest = b.binary(BinaryOp::Rem, index, extent);
            let (negative, above) = (b.cmp(CmpOp::Lt, rest, zero), b.binary(BinaryOp::Add, rest, extent));
            let index = b.select(negative, above, rest);
            let mut picked = b.gather(sources[0], index, axis);
            for (&source, range) in sources.iter().zip(&ranges).skip(1) {
                let start = number(&mut b, range.start);
                let inside = b.binary(BinaryOp::Sub, index, start);
                let (here, from_here) = (b.cmp(CmpOp::Ge, index, start), b.gather(source, inside, axis));
                picked = b.select(here, from_here, picked);
            }
            results.push(picked);
        }
        self.replace(data.results[0], results);
    }
}

/// The op for a part, but for hints.
fn of_part(op: &Op, part: &Part) -> Op {
    match op {
        Op::Arange { start, .. } => {
            let start = start + part.offsets[0] as i64;
            Op::Arange { start, end: start + part.shape[0] as i64 }
        }
        Op::DevicePrint { prefix } if part.offsets.iter().any(|&at| at != 0) => {
            Op::DevicePrint { prefix: format!("{prefix} from {:?}", part.offsets) }
        }
        other => other.clone(),
    }
}

/// What a hint about a tile of type `ty` says about a part; `None` if nothing.
fn hint_of_part(hint: &OpData, part: &Part, ty: &Type) -> Option<Op> {
    let Op::Hint { divisible, contiguous, at_least } = hint.op else { return Some(hint.op.clone()) };
    let extent = ty.shape().last().copied().unwrap_or(1);
    if extent.is_power_of_two() {
        return Some(hint.op.clone());
    }
    // Runs that are longer than the smallest part continue from one part to the next.
    let run = contiguous.map(|n| 1 << n.trailing_zeros().min(extent.trailing_zeros()));
    let unit = ty.elem().and_then(Elem::pointee).map_or(1, |dtype| dtype.bytes() as i64);
    let divisible = match run {
        // The first element of a shorter run is only a multiple of both.
        Some(run) if contiguous != Some(run) => divisible.map(|d| gcd(d, run * unit)),
        None if part.offsets.last() != Some(&0) => None,
        _ => divisible,
    };
    let says = divisible.is_some() || run.is_some() || at_least.is_some();
    says.then_some(Op::Hint { divisible, contiguous: run, at_least })
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}
