//! Canonicalization: rewrites each op to its simplest form.
//!
//! Does: folds constants (with the interpreter's arithmetic), removes ops that change nothing (`x + 0`, `trans` of
//! `trans`, masks that are always true), moves constants to the right operand, inlines branches and loops with a
//! constant condition or trip count, removes redundant loop-carried values (`fold_carried`), replaces arguments
//! that the specialization fixes by constants, and orders the dimensions of a view by its strides, as far as they are known.
//! Requires: a verified function.
//! Keeps: the results, bit by bit; at later stages, the layouts.
//! Does not: remove dead ops (`dce` does), nor apply float identities that hold only for real numbers.

mod constants;
mod control;
mod elementwise;
mod memory;
mod shape;

use super::fold_carried;
use crate::ir::{BlockId, Func, Literal, Loc, Op, OpId, Type, Value};

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut any = propagate_constant_arguments(func);
    loop {
        let mut pass = Pass { func, out: Vec::new(), changed: false };
        pass.block(pass.func.body);
        let changed = pass.changed | fold_carried::run(func);
        any |= changed;
        if !changed {
            return any;
        }
    }
}

/// Replaces arguments with a known value by constants.
fn propagate_constant_arguments(func: &mut Func) -> bool {
    let mut constants = Vec::new();
    for (i, &v) in func.block(func.body).params.clone().iter().enumerate() {
        if let Some(n) = func.args[i].equal_to.filter(|_| !func.uses(v).is_empty()) {
            let op = Op::Constant { value: Literal::Int(n) };
            let id = func.create_op(op, Vec::new(), vec![func.ty(v).clone()], Vec::new(), func.loc.clone());
            let constant = func.result(id);
            func.replace_uses(v, constant);
            constants.push(id);
        }
    }
    let changed = !constants.is_empty();
    let body = func.body;
    func.insert(body, 0, &constants);
    changed
}

/// The result of a rewrite rule.
enum Change {
    /// Removes the op and replaces its results by these values.
    Replace(Vec<Value>),
    /// Replaces the op by this op on these operands; the results stay.
    Into(Op, Vec<Value>),
    /// Replaces the op by the ops of this region, with these values for the region's parameters.
    Inline(BlockId, Vec<Value>),
}

impl Change {
    /// Replaces the only result of the op by a value.
    fn replace_with(v: Value) -> Option<Change> {
        Some(Change::Replace(vec![v]))
    }

    /// Replaces the op by a constant.
    fn constant(value: Literal) -> Option<Change> {
        Some(Change::Into(Op::Constant { value }, Vec::new()))
    }
}

struct Pass<'f> {
    func: &'f mut Func,
    /// The new ops of the current block.
    out: Vec<OpId>,
    changed: bool,
}

impl Pass<'_> {
    fn block(&mut self, block: BlockId) {
        let ops = self.func.take_ops(block);
        let outer = std::mem::take(&mut self.out);
        self.ops(ops);
        let new = std::mem::replace(&mut self.out, outer);
        self.func.set_ops(block, &new);
    }

    fn ops(&mut self, ops: Vec<OpId>) {
        for id in ops {
            while let Some(change) = self.simplify(id) {
                self.changed = true;
                match change {
                    Change::Into(op, operands) => {
                        self.func.rewrite(id, op, operands);
                        continue;
                    }
                    Change::Replace(values) => self.replace(id, &values),
                    Change::Inline(region, params) => self.inline(id, region, &params),
                }
                self.func.erase(id);
                break;
            }
        }
    }

    /// The next rewrite of an op. Without one, emits the op to the current block.
    fn simplify(&mut self, id: OpId) -> Option<Change> {
        let change = constants::fold(self.func, id).or_else(|| self.rewrite_rules(id));
        if change.is_none() {
            for region in self.func.op(id).regions.clone() {
                self.block(region);
            }
            self.out.push(id);
        }
        change
    }

    /// Applies the rules of an op. Ops without rules are canonical.
    fn rewrite_rules(&mut self, id: OpId) -> Option<Change> {
        match self.func.op(id).op.clone() {
            Op::Unary(op) => elementwise::unary(self.func, id, op),
            Op::Binary(op) => elementwise::binary(self, id, op),
            Op::Cmp(op) => elementwise::cmp(self.func, id, op),
            Op::Select => elementwise::select(self.func, id),
            Op::Cast => elementwise::cast(self.func, id),
            Op::Bitcast => elementwise::bitcast(self.func, id),
            Op::ExpandDims { .. } | Op::Broadcast | Op::Reshape => shape::repeat_or_reshape(self.func, id),
            Op::Trans { perm } => shape::trans(self.func, id, &perm),
            Op::Split => shape::split(self.func, id),
            Op::ConvertLayout => shape::convert_layout(self.func, id),
            Op::PtrAdd => memory::ptr_add(self.func, id),
            Op::MakeView { order } => memory::make_view(self.func, id, &order),
            Op::Advance => memory::advance(self.func, id),
            Op::Load { eviction } => memory::load(self.func, id, eviction),
            Op::Store { eviction } => memory::store(self.func, id, eviction),
            Op::For { .. } => control::for_loop(self.func, id),
            Op::If => control::branch(self.func, id),
            Op::Assume | Op::DeviceAssert { .. } => control::known_true(self.func, id),
            _ => None,
        }
    }

    fn replace(&mut self, id: OpId, values: &[Value]) {
        for (result, &value) in self.func.op(id).results.clone().into_iter().zip(values) {
            self.func.replace_uses(result, value);
        }
    }

    fn inline(&mut self, id: OpId, region: BlockId, values: &[Value]) {
        for (param, &value) in self.func.block(region).params.clone().into_iter().zip(values) {
            self.func.replace_uses(param, value);
        }
        let end = self.func.terminator(region);
        let mut ops = self.func.take_ops(region);
        ops.pop();
        self.ops(ops);
        let yielded = self.func.op(end).operands.clone();
        self.func.erase(end);
        self.replace(id, &yielded);
    }

    /// Emits a constant before the current op.
    fn new_constant(&mut self, value: Literal, ty: Type, loc: Loc) -> Value {
        let id = self.func.create_op(Op::Constant { value }, Vec::new(), vec![ty], Vec::new(), loc);
        self.out.push(id);
        self.func.result(id)
    }
}
