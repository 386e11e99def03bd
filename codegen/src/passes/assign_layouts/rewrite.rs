//! Rebuilds the function with the layouts that [`Assignments`] chose.

use super::anchors::{Assignments, scan_layout};
use super::dot::DotPlan;
use crate::analysis::access_layout::{extents, view_operands};
use crate::analysis::padding::zero_from;
use crate::ir::{BinaryOp, BlockId, DType, Elem, Func, LayoutId, Literal, Loc, Op, OpData, OpId, Type, Use, Value};
use crate::layout::{Conversion, LinearLayout, Swizzle};
use crate::mma::{DotShape, Family};
use crate::schedule::overlap;
use std::collections::HashMap;

/// A value of the old function in one layout (`None` for scalars and views).
type Key = (Value, Option<LayoutId>);

pub fn rewrite(assignments: &Assignments) -> Func {
    let old = assignments.func;
    let mut new = Func::new(old.name.clone());
    new.loc = old.loc.clone();
    let mut scope = HashMap::new();
    for (arg, &v) in old.args.iter().zip(&old.block(old.body).params) {
        let copy = new.add_arg(arg.clone(), old.ty(v).clone());
        scope.insert((v, None), copy);
    }
    let body = new.body;
    let mut r = Rewrite {
        assignments,
        old,
        new,
        scopes: vec![scope],
        block: body,
        loc: Loc::unknown(),
        loaded: HashMap::new(),
        hoisted_splits: HashMap::new(),
    };
    r.ops(old.body);
    r.new
}

pub(super) struct Rewrite<'h, 'f> {
    pub assignments: &'h Assignments<'f>,
    pub old: &'f Func,
    pub new: Func,
    /// The values computed so far, by region, innermost last.
    scopes: Vec<HashMap<Key, Value>>,
    block: BlockId,
    loc: Loc,
    /// Shared buffers of loaded tiles by element type, each allocated next to the load, so that it dominates every dot.
    loaded: HashMap<(Value, DType), Value>,
    /// Shared buffers of the (big, small) tf32 split of loaded tiles that tf32x3 dots in a loop share.
    pub(super) hoisted_splits: HashMap<Value, (Value, Value)>,
}

impl Rewrite<'_, '_> {
    fn lookup(&self, key: Key) -> Option<Value> {
        self.scopes.iter().rev().find_map(|s| s.get(&key).copied())
    }

    fn define(&mut self, key: Key, v: Value) {
        self.scopes.last_mut().expect("internal compiler error: no scope").insert(key, v);
        let name = self.old.value(key.0).name.clone();
        self.new.set_name(v, name);
    }

    fn emit(&mut self, op: Op, operands: Vec<Value>, results: Vec<Type>, regions: Vec<BlockId>) -> OpId {
        self.new.append(self.block, op, operands, results, regions, self.loc.clone())
    }

    pub(super) fn emit_one(&mut self, op: Op, operands: Vec<Value>, result: Type) -> Value {
        let id = self.emit(op, operands, vec![result], Vec::new());
        self.new.result(id)
    }

    pub(super) fn intern(&mut self, layout: &LinearLayout) -> LayoutId {
        self.new.intern_layout(layout.clone())
    }

    fn layout(&self, id: LayoutId) -> LinearLayout {
        self.new.layout(id).clone()
    }

    /// A scalar or a view.
    fn scalar_or_view(&self, v: Value) -> Value {
        self.lookup((v, None)).expect("internal compiler error: a scalar used before its definition")
    }

    /// A tile in the given layout, or a scalar.
    pub(super) fn get(&mut self, v: Value, layout: LayoutId) -> Value {
        if !self.old.ty(v).is_tensor() {
            return self.scalar_or_view(v);
        }
        if let Some(found) = self.lookup((v, Some(layout))) {
            return found;
        }
        let value = match self.assignments.assignment(v) {
            Some(_) if self.is_wider_than_its_source(v) => self.materialize(v, layout),
            Some(assignment) => {
                let assignment = self.intern(&assignment.layout);
                let assigned = self
                    .lookup((v, Some(assignment)))
                    .expect("internal compiler error: a tile used before its definition");
                let ty = self.new.ty(assigned).with_layout(Some(layout));
                self.emit_one(Op::ConvertLayout, vec![assigned], ty)
            }
            None => self.materialize(v, layout),
        };
        self.define((v, Some(layout)), value);
        value
    }

    /// Whether a tile is a cast to a wider type of a tile with the same assigned layout, or the transpose of one. Then the
    /// source is converted instead, because fewer bytes go through shared memory.
    fn is_wider_than_its_source(&self, v: Value) -> bool {
        let Some(OpData { op, operands, .. }) = self.old.def_op(v).map(|id| self.old.op(id)) else { return false };
        match op {
            Op::Cast => {}
            Op::Trans { .. } => return self.is_wider_than_its_source(operands[0]),
            _ => return false,
        }
        let bits = |v: Value| self.old.ty(v).elem().map_or(0, Elem::bits);
        let layout = |v: Value| self.assignments.assignment(v).map(|assignment| &assignment.layout);
        bits(operands[0]) < bits(v) && layout(operands[0]).is_some() && layout(operands[0]) == layout(v)
    }

    /// A tile in its assigned layout, or in the default layout of its shape.
    pub(super) fn get_assigned(&mut self, v: Value) -> Value {
        if !self.old.ty(v).is_tensor() {
            return self.scalar_or_view(v);
        }
        let layout = self.assignments.layout_or_default(v);
        let id = self.intern(&layout);
        self.get(v, id)
    }

    /// Computes a flexible tile in the given layout.
    fn materialize(&mut self, v: Value, layout: LayoutId) -> Value {
        let id = self.old.def_op(v).expect("internal compiler error: a flexible block parameter");
        let data = self.old.op(id);
        let ty = self.old.ty(v).with_layout(Some(layout));
        let l = self.layout(layout);
        let loc = std::mem::replace(&mut self.loc, data.loc.clone());
        let operand_layout = match &data.op {
            Op::Constant { .. } | Op::Arange { .. } | Op::Splat => None,
            Op::Broadcast => {
                let from = self.old.ty(data.operands[0]).shape();
                let mut operand = l;
                for (axis, (&from, &to)) in from.iter().zip(ty.shape()).enumerate() {
                    if from != to {
                        operand = operand.unbroadcast(axis).layout;
                    }
                }
                Some(operand)
            }
            Op::ExpandDims { axis } => Some(l.slice(*axis).layout),
            Op::Trans { perm } => {
                let mut inverse = vec![0; perm.len()];
                perm.iter().enumerate().for_each(|(i, &p)| inverse[p] = i);
                Some(l.transpose(&inverse).layout)
            }
            Op::Reshape => Some(l.reshape(&extents(self.old.ty(data.operands[0]).shape())).layout),
            Op::Join => {
                let half = l.split().unwrap_or_else(|| {
                    l.splittable().split().expect("internal compiler error: a splittable layout does not split")
                });
                let joined = half.layout.join().layout;
                if joined != l {
                    let joined = self.intern(&joined);
                    let in_joined_layout = self.get(v, joined);
                    let converted = self.emit_one(Op::ConvertLayout, vec![in_joined_layout], ty);
                    self.loc = loc;
                    return converted;
                }
                Some(half.layout)
            }
            // Elementwise: the operands have the layout of the result.
            _ => Some(l),
        };
        let operands: Vec<Value> = match operand_layout {
            Some(l) => {
                let id = self.intern(&l);
                data.operands.iter().map(|&v| self.get(v, id)).collect()
            }
            None => data.operands.iter().map(|&v| self.scalar_or_view(v)).collect(),
        };
        let value = self.emit_one(data.op.clone(), operands, ty);
        self.loc = loc;
        value
    }

    fn ops(&mut self, block: BlockId) {
        for &id in &self.old.block(block).ops {
            self.loc = self.old.op(id).loc.clone();
            self.op(id);
        }
    }

    /// Rebuilds a region whose parameters have the given types.
    fn region(
        &mut self,
        old: BlockId,
        params: &[(Value, Type)],
        end: impl FnOnce(&mut Self, &[Value]) -> Vec<Value>,
    ) -> BlockId {
        let block = self.new.add_block();
        let outer = std::mem::replace(&mut self.block, block);
        self.scopes.push(HashMap::new());
        for (v, ty) in params {
            let p = self.new.add_param(block, ty.clone());
            self.define((*v, ty.layout()), p);
        }
        let ops = &self.old.block(old).ops;
        let (&last, body) = ops.split_last().expect("internal compiler error: an empty region");
        for &id in body {
            self.loc = self.old.op(id).loc.clone();
            self.op(id);
        }
        let terminator = self.old.op(last);
        self.loc = terminator.loc.clone();
        let operands = end(self, &terminator.operands);
        self.emit(terminator.op.clone(), operands, Vec::new(), Vec::new());
        self.scopes.pop();
        self.block = outer;
        block
    }

    /// The type of a value of the old function with its assigned layout.
    fn assigned_type(&mut self, v: Value) -> Type {
        let ty = self.old.ty(v).clone();
        if !ty.is_tensor() {
            return ty;
        }
        let layout = self.assignments.layout_or_default(v);
        let id = self.intern(&layout);
        ty.with_layout(Some(id))
    }

    /// A value in the layout of a type; a scalar or a view if the type has no layout.
    fn get_as(&mut self, v: Value, ty: &Type) -> Value {
        match ty.layout() {
            Some(layout) => self.get(v, layout),
            None => self.scalar_or_view(v),
        }
    }

    fn define_results(&mut self, old: OpId, new: OpId) {
        let results = self.new.op(new).results.clone();
        for (&v, value) in self.old.op(old).results.iter().zip(results) {
            let layout = self.new.ty(value).layout();
            self.define((v, layout), value);
        }
    }

    /// Rebuilds an op with all operands and results in `layout`.
    fn same_layout(&mut self, id: OpId, layout: LayoutId) {
        let data = self.old.op(id);
        let operands = data.operands.iter().map(|&v| self.get(v, layout)).collect();
        let types = data.results.iter().map(|&v| self.old.ty(v).with_layout(Some(layout))).collect();
        let new = self.emit(data.op.clone(), operands, types, Vec::new());
        self.define_results(id, new);
    }

    fn op(&mut self, id: OpId) {
        let data = self.old.op(id);
        match &data.op {
            Op::For { .. } => self.for_loop(id),
            Op::While => self.while_loop(id),
            Op::If => {
                let condition = self.scalar_or_view(data.operands[0]);
                let types: Vec<Type> = data.results.iter().map(|&v| self.assigned_type(v)).collect();
                let regions = data
                    .regions
                    .iter()
                    .map(|&r| {
                        self.region(r, &[], |this, values| {
                            values.iter().zip(&types).map(|(&v, ty)| this.get_as(v, ty)).collect()
                        })
                    })
                    .collect();
                self.loc = data.loc.clone();
                let new = self.emit(data.op.clone(), vec![condition], types, regions);
                self.define_results(id, new);
            }
            Op::Reduce { .. } | Op::Scan { .. } => self.reduce_or_scan(id),
            Op::Dot { .. } => self.dot(id),
            Op::LoadView { .. } => {
                let view = self.scalar_or_view(data.operands[0]);
                let ty = self.assigned_type(data.results[0]);
                let new = self.emit(data.op.clone(), vec![view], vec![ty], Vec::new());
                self.define_results(id, new);
                self.copy_operand_to_shared(data.results[0]);
            }
            Op::StoreView { .. } | Op::AtomicView { .. } => {
                let view = self.scalar_or_view(data.operands[0]);
                let layout = self.assignments.store_layout(id);
                let layout = self.intern(&layout);
                let tile = self.get(data.operands[1], layout);
                self.emit(data.op.clone(), vec![view, tile], Vec::new(), Vec::new());
            }
            Op::SemaphoreWait => self.unchanged(id),
            Op::Load { .. } | Op::Store { .. } | Op::AtomicRmw { .. } | Op::AtomicCas { .. } => {
                match self.assignments.memory_layout(id) {
                    Some(layout) => {
                        let layout = self.intern(&layout);
                        self.same_layout(id, layout);
                        if let Op::Load { .. } = data.op {
                            self.copy_operand_to_shared(data.results[0]);
                        }
                    }
                    None => self.unchanged(id),
                }
            }
            Op::Gather { .. } => {
                let layout = self.assignments.layout_or_default(data.results[0]);
                let layout = self.intern(&layout);
                let source = self.get_assigned(data.operands[0]);
                let index = self.get(data.operands[1], layout);
                let ty = self.old.ty(data.results[0]).with_layout(Some(layout));
                let new = self.emit(data.op.clone(), vec![source, index], vec![ty], Vec::new());
                self.define_results(id, new);
            }
            Op::Split => {
                let half = self.assignments.layout_or_default(data.results[0]);
                let joined = half.join().layout;
                let joined = self.intern(&joined);
                let operand = self.get(data.operands[0], joined);
                let half = self.intern(&half);
                let types = data.results.iter().map(|&v| self.old.ty(v).with_layout(Some(half))).collect();
                let new = self.emit(Op::Split, vec![operand], types, Vec::new());
                self.define_results(id, new);
            }
            Op::DevicePrint { .. } | Op::DeviceAssert { .. } => {
                let operands = data.operands.iter().map(|&v| self.get_assigned(v)).collect();
                self.emit(data.op.clone(), operands, Vec::new(), Vec::new());
            }
            Op::InlineAsm { .. } => {
                match data.results.iter().chain(&data.operands).find(|&&v| self.old.ty(v).is_tensor()) {
                    Some(&v) => {
                        let layout = self.assignments.layout_or_default(v);
                        let layout = self.intern(&layout);
                        self.same_layout(id, layout);
                    }
                    None => self.unchanged(id),
                }
            }
            _ => match data.results.first() {
                Some(&result) if self.old.ty(result).is_tensor() => {
                    // Flexible tiles are computed when a user needs them.
                    if let Some(assignment) = self.assignments.assignment(result) {
                        let layout = self.intern(&assignment.layout.clone());
                        let value = self.materialize(result, layout);
                        self.define((result, Some(layout)), value);
                    }
                }
                _ => self.unchanged(id),
            },
        }
    }

    /// Rebuilds an op on scalars and views.
    fn unchanged(&mut self, id: OpId) {
        let data = self.old.op(id);
        let operands = data.operands.iter().map(|&v| self.scalar_or_view(v)).collect();
        let types = data.results.iter().map(|&v| self.old.ty(v).clone()).collect();
        let new = self.emit(data.op.clone(), operands, types, Vec::new());
        self.define_results(id, new);
    }

    fn for_loop(&mut self, id: OpId) {
        let data = self.old.op(id);
        let region = data.regions[0];
        let old_params = &self.old.block(region).params;
        let params: Vec<(Value, Type)> = old_params.iter().map(|&p| (p, self.assigned_type(p))).collect();
        let types: Vec<Type> = params[1..].iter().map(|(_, ty)| ty.clone()).collect();
        let mut operands: Vec<Value> = data.operands[..3].iter().map(|&v| self.scalar_or_view(v)).collect();
        for (&v, ty) in data.operands[3..].iter().zip(&types) {
            let v = self.get_as(v, ty);
            operands.push(v);
        }
        let block = self.region(region, &params, |this, values| {
            values.iter().zip(&types).map(|(&v, ty)| this.get_as(v, ty)).collect()
        });
        self.loc = data.loc.clone();
        let new = self.emit(data.op.clone(), operands, types, vec![block]);
        self.define_results(id, new);
    }

    fn while_loop(&mut self, id: OpId) {
        let data = self.old.op(id);
        let (before, after) = (data.regions[0], data.regions[1]);
        let carried: Vec<(Value, Type)> =
            self.old.block(before).params.iter().map(|&p| (p, self.assigned_type(p))).collect();
        let forwarded: Vec<(Value, Type)> =
            self.old.block(after).params.iter().map(|&p| (p, self.assigned_type(p))).collect();
        let operands: Vec<Value> = data.operands.iter().zip(&carried).map(|(&v, (_, ty))| self.get_as(v, ty)).collect();
        let before = self.region(before, &carried, |this, values| {
            let mut out = vec![this.scalar_or_view(values[0])];
            for (&v, (_, ty)) in values[1..].iter().zip(&forwarded) {
                let v = this.get_as(v, ty);
                out.push(v);
            }
            out
        });
        let after = self.region(after, &forwarded, |this, values| {
            values.iter().zip(&carried).map(|(&v, (_, ty))| this.get_as(v, ty)).collect()
        });
        self.loc = data.loc.clone();
        let types = forwarded.into_iter().map(|(_, ty)| ty).collect();
        let new = self.emit(Op::While, operands, types, vec![before, after]);
        self.define_results(id, new);
    }

    /// `reduce` and `scan`: converts all operands to one layout and copies the region.
    fn reduce_or_scan(&mut self, id: OpId) {
        let data = self.old.op(id);
        let (layout, result) = match &data.op {
            Op::Scan { axis, .. } => {
                let l = scan_layout(self.old.ty(data.operands[0]).shape(), *axis, self.assignments.num_warps);
                (l.clone(), l)
            }
            Op::Reduce { axis } => {
                let highest_priority =
                    data.operands.iter().filter_map(|&v| self.assignments.assignment(v)).max_by_key(|h| h.priority);
                let l = match highest_priority {
                    // The first operand of the highest priority, as `Assignments` chose.
                    Some(best) => {
                        let first = data
                            .operands
                            .iter()
                            .filter_map(|&v| self.assignments.assignment(v))
                            .find(|h| h.priority == best.priority);
                        first.map_or_else(|| (*best.layout).clone(), |h| (*h.layout).clone())
                    }
                    None => self.assignments.layout_or_default(data.operands[0]),
                };
                let sliced = l.slice(*axis).layout;
                (l, sliced)
            }
            _ => panic!("internal compiler error: neither reduce nor scan"),
        };
        let (layout, result) = (self.intern(&layout), self.intern(&result));
        let operands: Vec<Value> = data.operands.iter().map(|&v| self.get(v, layout)).collect();
        let types: Vec<Type> = data.results.iter().map(|&v| self.old.ty(v).with_layout(Some(result))).collect();
        let old_region = data.regions[0];
        let params: Vec<(Value, Type)> =
            self.old.block(old_region).params.iter().map(|&p| (p, self.old.ty(p).clone())).collect();
        let region =
            self.region(old_region, &params, |this, values| values.iter().map(|&v| this.scalar_or_view(v)).collect());
        self.loc = data.loc.clone();
        let new = self.emit(data.op.clone(), operands, types, vec![region]);
        self.define_results(id, new);
    }

    fn dot(&mut self, id: OpId) {
        let data = self.old.op(id);
        let (shape, plan) = self.assignments.dot(id);
        let acc_layout = self.intern(&plan.acc_layout(shape.m, shape.n));
        let result_ty = self.old.ty(data.results[0]).with_layout(Some(acc_layout));
        let acc_ty = result_ty.with_elem(plan.acc(&shape));
        let sum = self.sum_of_products(id, &shape, &plan, &acc_ty);
        let result = if acc_ty == result_ty { sum } else { self.emit_one(Op::Cast, vec![sum], result_ty) };
        self.define((data.results[0], Some(acc_layout)), result);
    }

    /// acc + a·b in the type and the layout `acc_ty`.
    fn sum_of_products(&mut self, id: OpId, shape: &DotShape, plan: &DotPlan, acc_ty: &Type) -> Value {
        let [a, b, acc] = self.old.op(id).operands[..] else {
            panic!("internal compiler error: a dot has three operands")
        };
        let start = |this: &mut Self| {
            if this.old.ty(acc).dtype() == acc_ty.dtype() {
                return this.get_as(acc, acc_ty);
            }
            match this.old.constant(acc) {
                Some(value) => this.emit_one(Op::Constant { value }, vec![], acc_ty.clone()),
                None => {
                    let acc = this.get_as(acc, acc_ty);
                    this.emit_one(Op::Cast, vec![acc], acc_ty.clone())
                }
            }
        };
        if let Some(wgmma) = plan.wgmma().filter(|plan| !plan.instruction.allows_mn_major()) {
            let acc = start(self);
            return self.k_major_dot(*shape, wgmma, [a, b], acc);
        }
        let [k_end, n_end] = self.nonzero_ends([a, b]);
        let [a_dtype, b_dtype] = plan.operands(shape);
        let a = match plan.a_layout(shape.m, shape.k) {
            Some(layout) if !self.is_loaded(a) && !self.stays_in_shared(id, &layout, plan) => {
                self.in_registers(a, &layout, a_dtype)
            }
            _ => self.in_shared(a, a_dtype),
        };
        let b = match plan.b_layout(shape.k, shape.n) {
            Some(layout) if !self.is_loaded(b) => self.in_registers(b, &layout, b_dtype),
            _ => self.in_shared(b, b_dtype),
        };
        let acc = start(self);
        match plan {
            DotPlan::Mma(mma) => {
                let (warps, operands) = (mma.warps.to_vec(), vec![a, b, acc]);
                match mma.instruction.family {
                    Family::Wgmma => {
                        let op = Op::Wgmma { warps, k_end, n_end };
                        let started = self.emit_one(op, operands, acc_ty.clone());
                        self.emit_one(Op::WgmmaWait { pending: 0 }, vec![started], acc_ty.clone())
                    }
                    Family::MmaSync => {
                        let op = Op::MmaSync { precision: shape.precision, warps, k_end, n_end };
                        // The sum of this dot is added in f32, unless its operands were widened.
                        if shape.max_imprecise.is_some() && mma.instruction.operands == shape.operands {
                            let zero = Op::Constant { value: Literal::Float(0.0) };
                            let zero = self.emit_one(zero, vec![], acc_ty.clone());
                            let sum = self.emit_one(op, vec![a, b, zero], acc_ty.clone());
                            self.emit_one(Op::Binary(BinaryOp::Add), vec![acc, sum], acc_ty.clone())
                        } else {
                            self.emit_one(op, operands, acc_ty.clone())
                        }
                    }
                }
            }
            DotPlan::Fma { .. } => self.emit_one(Op::FmaDot, vec![a, b, acc], acc_ty.clone()),
        }
    }

    /// The index along K from which both operands of a dot are zero, and the index along N from which the second is;
    /// `None` where unknown.
    pub(super) fn nonzero_ends(&self, [a, b]: [Value; 2]) -> [Option<u32>; 2] {
        // An instruction that computes nothing would still have to give its accumulator.
        let at_least_one = |end| u32::try_from(end).ok().map(|end| end.max(1));
        let zero = |v, dim| zero_from(self.old, &self.assignments.axis, v, dim).and_then(at_least_one);
        [zero(a, 1).zip(zero(b, 0)).map(|(a, b)| a.max(b)), zero(b, 1)]
    }

    /// Whether the tile is the result of a load, possibly transposed.
    pub(super) fn is_loaded(&self, v: Value) -> bool {
        match self.old.def_op(v).map(|id| self.old.op(id)) {
            Some(data) => match data.op {
                Op::LoadView { .. } | Op::Load { .. } => true,
                Op::Trans { .. } => self.is_loaded(data.operands[0]),
                _ => false,
            },
            None => false,
        }
    }

    /// Whether `wgmma` reads operand a of a dot from shared memory because converting it to the register layout `to` would go
    /// through shared memory anyway. Not for a dot that could overlap with the next iteration, as one that continues an accumulator:
    /// what it reads is written again in each iteration.
    fn stays_in_shared(&self, id: OpId, to: &LinearLayout, plan: &DotPlan) -> bool {
        let Assignments { func, options, .. } = self.assignments;
        let [a, _, acc] = func.op(id).operands[..] else { return false };
        let is_constant = func.def_op(acc).is_some_and(|id| matches!(func.op(id).op, Op::Constant { .. }));
        let may_overlap = || func.parent_op(id).is_some_and(|around| overlap::is_allowed(func, around, options));
        let through_shared = || {
            self.assignments
                .assignment(a)
                .is_some_and(|assignment| Conversion::between(&assignment.layout, to) == Conversion::Shared)
        };
        plan.wgmma().is_some() && (is_constant || !may_overlap()) && through_shared()
    }

    pub(super) fn in_registers(&mut self, v: Value, layout: &LinearLayout, dtype: DType) -> Value {
        let layout = self.intern(layout);
        let tile = self.get(v, layout);
        self.cast(tile, dtype)
    }

    fn cast(&mut self, tile: Value, dtype: DType) -> Value {
        let ty = self.new.ty(tile).clone();
        if ty.dtype() == Some(dtype) { tile } else { self.emit_one(Op::Cast, vec![tile], ty.with_elem(dtype)) }
    }

    /// Stores a loaded tile to shared memory if a dot reads it there.
    fn copy_operand_to_shared(&mut self, v: Value) {
        for dtype in self.assignments.shared_operand(v) {
            let buffer = self.in_shared(v, dtype);
            self.loaded.insert((v, dtype), buffer);
            self.hoist_tf32_split(v);
        }
    }

    /// Whether a tile is loaded through a view in which its dimension `inner` is contiguous.
    fn is_load_along(&self, v: Value, inner: usize) -> bool {
        let Some(id) = self.old.def_op(v) else { return false };
        let data = self.old.op(id);
        match &data.op {
            Op::LoadView { .. } => view_operands(self.old, data.operands[0]).order[0] == inner,
            Op::Trans { perm } => self.is_load_along(data.operands[0], perm[inner]),
            _ => false,
        }
    }

    /// The elements for which a row of a buffer has room beyond those of a tile whose dimension `inner` is contiguous: if TMA
    /// loads it, and each dot that reads it does so as b by columns, beside dots that read the same a and whose columns fill
    /// whole panels of a wider swizzle, it has a panel of this swizzle too, so that one `wgmma` can compute them all
    /// (`lower/nvptx/joined.rs`).
    fn row_with_room(&self, v: Value, inner: usize, dtype: DType) -> Option<usize> {
        if !self.assignments.loads_by_tma || !self.is_load_along(v, inner) {
            return None;
        }
        let own = self.old.ty(v).shape()[inner];
        let bytes = |n: usize| (n * dtype.bytes()) as u32;
        let mut rooms = self.old.uses(v).iter().map(|used| {
            let data = self.old.op(used.op);
            match &data.op {
                Op::Trans { perm } => {
                    let inner = perm.iter().position(|&from| from == inner)?;
                    self.row_with_room(data.results[0], inner, dtype)
                }
                Op::Dot { .. } if used.index == 1 && inner == 1 => {
                    self.assignments.dot(used.op).1.wgmma().filter(|plan| plan.instruction.allows_mn_major())?;
                    let is_beside = |other: &&Use| {
                        let is_dot = matches!(self.old.op(other.op).op, Op::Dot { .. });
                        is_dot && other.index == 0 && self.old.block_of(other.op) == self.old.block_of(used.op)
                    };
                    let dots = self.old.uses(data.operands[0]).iter().filter(is_beside);
                    let others = dots.map(|dot| self.old.op(dot.op).operands[1]).filter(|&b| self.is_load_along(b, 1));
                    let columns = others.map(|b| self.old.ty(b).shape()[1]);
                    let wider: Vec<u32> = columns.filter(|&n| n > own).map(bytes).collect();
                    let span = wider.iter().map(|&row| Swizzle::widest_for(row).bytes()).max()?;
                    let fill = wider.iter().all(|row| row.is_multiple_of(span));
                    (fill && bytes(own) < span && bytes(own) >= 32).then_some(span as usize / dtype.bytes())
                }
                _ => None,
            }
        });
        let first = rooms.next()??;
        rooms.all(|room| room == Some(first)).then_some(first)
    }

    /// The tile in a shared buffer; a transposed tile as a transposed view of the buffer of its source.
    pub(super) fn in_shared(&mut self, v: Value, dtype: DType) -> Value {
        if let Some(id) = self.old.def_op(v) {
            let data = self.old.op(id);
            if let Op::Trans { perm } = &data.op {
                let inner = self.in_shared(data.operands[0], dtype);
                let layout = self.new.layout_of(inner).transpose(perm).layout;
                let layout = self.intern(&layout);
                let ty = Type::Shared { shape: self.old.ty(v).shape().to_vec(), elem: dtype, layout };
                return self.emit_one(Op::LocalTrans { perm: perm.clone() }, vec![inner], ty);
            }
        }
        if let Some(&buffer) = self.loaded.get(&(v, dtype)) {
            return buffer;
        }
        let tile = self.get_assigned(v);
        let tile = self.cast(tile, dtype);
        let shape = self.old.ty(v).shape().to_vec();
        let order = order_of(self.new.layout_of(tile), &shape);
        let mut room = shape.clone();
        if let Some(row) = self.row_with_room(v, order[0], dtype) {
            room[order[0]] = row;
        }
        let layout = LinearLayout::shared_for_dots(&extents(&room), &order, dtype.bytes() as u32);
        let layout = self.intern(&layout);
        // Dots that read the tile, possibly transposed, share a buffer.
        let key = (v, Some(layout));
        let ty = Type::Shared { shape, elem: dtype, layout };
        if let Some(buffer) = self.lookup(key).filter(|&buffer| *self.new.ty(buffer) == ty) {
            return buffer;
        }
        let buffer = self.emit_one(Op::LocalAlloc, vec![tile], ty);
        self.define(key, buffer);
        buffer
    }
}

/// The dimensions of a tile in shared memory, fastest first: the fastest of the tile that is stored stays the fastest.
fn order_of(tile: &LinearLayout, shape: &[usize]) -> Vec<usize> {
    let runs: Vec<usize> = (0..shape.len()).map(|axis| tile.contiguous_run(axis)).collect();
    let mut order: Vec<usize> = (0..shape.len()).rev().collect();
    order.sort_by_key(|&axis| std::cmp::Reverse(runs[axis]));
    order
}
