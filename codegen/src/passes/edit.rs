//! Small edits of a function that several passes share.

use crate::ir::{BlockId, Def, Func, Op, OpId, Value};
use std::collections::{HashMap, HashSet};

/// Removes the results of an op that `keep` excludes.
pub fn retain_results(func: &mut Func, id: OpId, keep: &[bool]) {
    let results = kept(&func.op(id).results, keep);
    for (i, &v) in results.iter().enumerate() {
        func.value_mut(v).def = Def::Result(id, i);
    }
    func.op_mut(id).results = results;
}

/// Removes the parameters of a block that `keep` excludes.
pub fn retain_params(func: &mut Func, block: BlockId, keep: &[bool]) {
    let params = kept(&func.block(block).params, keep);
    set_params(func, block, params);
}

/// Removes the operands of an op that `keep` excludes.
pub fn retain_operands(func: &mut Func, id: OpId, keep: &[bool]) {
    let operands = kept(&func.op(id).operands, keep);
    func.op_mut(id).operands = operands;
}

fn kept(values: &[Value], keep: &[bool]) -> Vec<Value> {
    values.iter().zip(keep).filter_map(|(&v, &k)| k.then_some(v)).collect()
}

/// Sets the parameters of a block.
pub fn set_params(func: &mut Func, block: BlockId, params: Vec<Value>) {
    for (i, &v) in params.iter().enumerate() {
        func.value_mut(v).def = Def::Param(block, i);
    }
    func.block_mut(block).params = params;
}

/// The terminator of a region.
///
/// # Panics
/// If the region is empty: a compiler bug.
pub fn terminator(func: &Func, region: BlockId) -> OpId {
    *func.block(region).ops.last().expect("internal compiler error: an empty region; please report this")
}

/// All values defined in the regions of an op, at any depth.
pub fn defined_inside(func: &Func, id: OpId) -> HashSet<Value> {
    let mut inside = HashSet::new();
    for &region in &func.op(id).regions {
        inside.extend(&func.block(region).params);
        for op in func.walk_from(region) {
            let data = func.op(op);
            inside.extend(&data.results);
            inside.extend(data.regions.iter().flat_map(|&r| &func.block(r).params));
        }
    }
    inside
}

/// Replaces an op without regions by another with the same results.
pub fn rewrite(func: &mut Func, id: OpId, op: Op, operands: Vec<Value>) {
    let data = func.op_mut(id);
    data.op = op;
    data.operands = operands;
}

/// The values from outside that an op and its regions use.
pub fn uses(func: &Func, id: OpId) -> HashSet<Value> {
    let own = defined_inside(func, id);
    let nested = func.op(id).regions.iter().flat_map(|&region| func.walk_from(region));
    let operands = std::iter::once(id).chain(nested).flat_map(|op| func.op(op).operands.clone());
    operands.filter(|v| !own.contains(v)).collect()
}

/// Replaces values that an op and its regions use by `map`; other values stay.
pub fn replace_in(func: &mut Func, id: OpId, map: &HashMap<Value, Value>) {
    let nested: Vec<OpId> = func.op(id).regions.iter().flat_map(|&region| func.walk_from(region)).collect();
    for op in std::iter::once(id).chain(nested) {
        for operand in &mut func.op_mut(op).operands {
            *operand = map.get(operand).copied().unwrap_or(*operand);
        }
    }
}

/// Appends a copy of an op with its regions to a block. `map` maps used values to their replacements, and receives the
/// results of the copy.
pub fn copy_op(func: &mut Func, id: OpId, block: BlockId, map: &mut HashMap<Value, Value>) {
    let data = func.op(id).clone();
    let mut regions = Vec::new();
    for &region in &data.regions {
        let copy = func.add_block();
        for param in func.block(region).params.clone() {
            let ty = func.ty(param).clone();
            let v = func.add_param(copy, ty);
            map.insert(param, v);
        }
        for op in func.block(region).ops.clone() {
            copy_op(func, op, copy, map);
        }
        regions.push(copy);
    }
    let operands = data.operands.iter().map(|v| map.get(v).copied().unwrap_or(*v)).collect();
    let types = data.results.iter().map(|&v| func.ty(v).clone()).collect();
    let copy = func.append(block, data.op, operands, types, regions, data.loc);
    for (old, &new) in data.results.into_iter().zip(&func.op(copy).results.clone()) {
        map.insert(old, new);
    }
}
