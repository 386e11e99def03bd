//! Decomposes views into scalars, and rebuilds them at their uses.
//!
//! Does: decomposes each view into base, shape, strides and offsets. Loops and branches carry only those of these
//! scalars that change (typically one or two i64 offsets), `advance` becomes additions, and every use of a view refers
//! to a `make_view` in the same block or in an enclosing one.
//! Requires: a verified function at stage *tile*.
//! Keeps: every value read and written.
//! Does not: analyze the scalars: a loop that swaps two views carries their bases. Where the branches of an `if` yield
//! views of different `order`, which is only a hint, uses that of the first branch.

use super::{dce, fold_carried};
use crate::ir::{BinaryOp, BlockId, DType, Func, Loc, Op, OpId, Type, Value};
use std::collections::HashMap;

/// Runs the pass.
pub fn run(func: &mut Func) {
    let mut pass = Pass { func, views: HashMap::new() };
    pass.block(pass.func.body);
    fold_carried::run(func);
    dce::run(func);
}

/// The decomposition of a view.
#[derive(Clone)]
struct ViewComponents {
    order: Vec<usize>,
    /// The operands of `make_view`.
    scalars: Vec<Value>,
}

struct Pass<'f> {
    func: &'f mut Func,
    views: HashMap<Value, ViewComponents>,
}

/// The types of the components of a view; `None` for other types.
fn component_types(ty: &Type) -> Option<Vec<Type>> {
    let Type::View { block, elem } = ty else { return None };
    let mut types = vec![Type::scalar(crate::ir::Elem::Ptr(*elem))];
    types.extend(vec![Type::scalar(DType::I64); 3 * block.len()]);
    Some(types)
}

impl Pass<'_> {
    fn block(&mut self, block: BlockId) {
        for id in self.func.take_ops(block) {
            match self.func.op(id).op.clone() {
                Op::MakeView { order } => {
                    let data = self.func.op(id);
                    self.views.insert(data.results[0], ViewComponents { order, scalars: data.operands.clone() });
                    self.push(block, id);
                }
                Op::Advance => self.advance(block, id),
                Op::For { .. } => {
                    let body = self.func.op(id).regions[0];
                    let orders = self.orders(&self.func.op(id).operands[3..]);
                    self.expand_params(body, 1, &orders);
                    self.expand_operands(id);
                    self.region(body);
                    self.expand_results(block, id, &orders);
                }
                Op::If => {
                    let regions = self.func.op(id).regions.clone();
                    for &side in &regions {
                        self.block(side);
                    }
                    let orders = self.orders(&self.func.op(self.func.terminator(regions[0])).operands);
                    for &side in &regions {
                        self.expand_operands(self.func.terminator(side));
                    }
                    self.expand_results(block, id, &orders);
                }
                Op::While => {
                    let regions = self.func.op(id).regions.clone();
                    let orders = self.orders(&self.func.op(id).operands);
                    self.expand_params(regions[0], 0, &orders);
                    self.expand_operands(id);
                    self.block(regions[0]);
                    let condition = self.func.terminator(regions[0]);
                    let orders = self.orders(&self.func.op(condition).operands[1..]);
                    self.expand_operands(condition);
                    self.expand_params(regions[1], 0, &orders);
                    self.region(regions[1]);
                    self.expand_results(block, id, &orders);
                }
                _ => self.push(block, id),
            }
        }
    }

    /// Processes a region whose terminator yields views.
    fn region(&mut self, region: BlockId) {
        self.block(region);
        self.expand_operands(self.func.terminator(region));
    }

    fn push(&mut self, block: BlockId, id: OpId) {
        self.func.push(block, id);
    }

    /// Replaces an `advance` by a `make_view` with new offsets.
    fn advance(&mut self, block: BlockId, id: OpId) {
        let data = self.func.op(id).clone();
        let mut components = self.views[&data.operands[0]].clone();
        let first = components.scalars.len() - (data.operands.len() - 1);
        for (i, &delta) in data.operands[1..].iter().enumerate() {
            // An offset that does not change stays the same value, so that loops need not carry it.
            if self.func.constant_int(delta) != Some(0) {
                let operands = vec![components.scalars[first + i], delta];
                let types = vec![Type::scalar(DType::I64)];
                let sum =
                    self.func.append(block, Op::Binary(BinaryOp::Add), operands, types, Vec::new(), data.loc.clone());
                components.scalars[first + i] = self.func.result(sum);
            }
        }
        self.func.rewrite(id, Op::MakeView { order: components.order.clone() }, components.scalars.clone());
        self.views.insert(data.results[0], components);
        self.push(block, id);
    }

    /// The `order` of each view among these values.
    fn orders(&self, values: &[Value]) -> Vec<Option<Vec<usize>>> {
        values.iter().map(|v| self.views.get(v).map(|components| components.order.clone())).collect()
    }

    /// Replaces views among the operands of an op by their components.
    fn expand_operands(&mut self, id: OpId) {
        let operands = &self.func.op(id).operands;
        let components =
            |v: &Value| self.views.get(v).map_or_else(|| vec![*v], |components| components.scalars.clone());
        let expanded: Vec<Value> = operands.iter().flat_map(components).collect();
        self.func.set_operands(id, &expanded);
    }

    /// Replaces views among the parameters of a region, from parameter `first` on, by their components, and rebuilds
    /// the views at the start of the region.
    fn expand_params(&mut self, region: BlockId, first: usize, orders: &[Option<Vec<usize>>]) {
        let old = self.func.block(region).params.clone();
        let mut params = old[..first].to_vec();
        let mut made = Vec::new();
        for (&v, order) in old[first..].iter().zip(orders) {
            let (Some(types), Some(order)) = (component_types(self.func.ty(v)), order) else {
                params.push(v);
                continue;
            };
            let scalars: Vec<Value> = types.into_iter().map(|ty| self.func.add_param(region, ty)).collect();
            params.extend(&scalars);
            made.push(self.make_view(v, ViewComponents { order: order.clone(), scalars }, Loc::unknown()));
        }
        self.func.set_params(region, params);
        self.func.insert(region, 0, &made);
    }

    /// Appends an op whose results that are views are replaced by their components, then rebuilds the views.
    fn expand_results(&mut self, block: BlockId, id: OpId, orders: &[Option<Vec<usize>>]) {
        if orders.iter().all(Option::is_none) {
            return self.push(block, id);
        }
        let old = self.func.op(id).clone();
        let types = old.results.iter().flat_map(|&v| {
            let ty = self.func.ty(v);
            component_types(ty).unwrap_or_else(|| vec![ty.clone()])
        });
        let types = types.collect();
        let regions = self.func.take_regions(id);
        self.func.erase(id);
        let new = self.func.append(block, old.op, old.operands, types, regions, old.loc.clone());
        let mut results = self.func.op(new).results.clone().into_iter();
        for (&v, order) in old.results.iter().zip(orders) {
            match (component_types(self.func.ty(v)), order) {
                (Some(types), Some(order)) => {
                    let scalars = results.by_ref().take(types.len()).collect();
                    let view = self.make_view(v, ViewComponents { order: order.clone(), scalars }, old.loc.clone());
                    self.push(block, view);
                }
                _ => {
                    let result = results.next().expect("internal compiler error: too few results; please report this");
                    let name = self.func.value(v).name.clone();
                    self.func.set_name(result, name);
                    self.func.replace_uses(v, result);
                }
            }
        }
    }

    /// Creates a `make_view` that replaces the view `v`.
    fn make_view(&mut self, v: Value, components: ViewComponents, loc: Loc) -> OpId {
        let op = Op::MakeView { order: components.order.clone() };
        let ty = self.func.ty(v).clone();
        let id = self.func.create_op(op, components.scalars.clone(), vec![ty], Vec::new(), loc);
        let view = self.func.result(id);
        let name = self.func.value(v).name.clone();
        self.func.set_name(view, name);
        self.func.replace_uses(v, view);
        self.views.insert(view, components);
        id
    }
}
