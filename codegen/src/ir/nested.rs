//! Queries and edits of an op together with its regions.

use super::{BlockId, Func, Op, OpId, Value};
use std::collections::{HashMap, HashSet};

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

/// Whether a block is the body of a loop, or inside of one.
pub fn is_in_loop(func: &Func, block: BlockId) -> bool {
    let mut owners = std::iter::successors(func.owner(block), |&owner| func.parent_op(owner));
    owners.any(|owner| matches!(func.op(owner).op, Op::For { .. } | Op::While))
}

/// Whether an op is in the body of a kernel, its partitions, branches and loops: not in a function that combines elements.
pub fn is_in_code(func: &Func, id: OpId) -> bool {
    let mut owners = std::iter::successors(func.parent_op(id), |&owner| func.parent_op(owner));
    owners.all(|owner| matches!(func.op(owner).op, Op::If | Op::For { .. } | Op::While | Op::WarpSpecialize { .. }))
}

/// The first loop with a dot that precedes an op in its block.
pub fn dot_loop_before(func: &Func, id: OpId) -> Option<OpId> {
    let multiplies = |&op: &OpId| {
        let data = func.op(op);
        matches!(data.op, Op::For { .. }) && func.block(data.regions[0]).ops.iter().any(|&op| func.op(op).op.is_dot())
    };
    func.block(func.block_of(id)?).ops[..func.position(id)].iter().copied().find(multiplies)
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
        for (index, operand) in func.op(op).operands.clone().into_iter().enumerate() {
            if let Some(&new) = map.get(&operand) {
                func.set_operand(op, index, new);
            }
        }
    }
}

/// Copies an op with its regions; the copy is in no block. `map` maps used values to their replacements, and receives
/// the results of the copy.
pub fn copy_op(func: &mut Func, id: OpId, map: &mut HashMap<Value, Value>) -> OpId {
    let data = func.op(id).clone();
    let regions = data.regions.iter().map(|&region| copy_region(func, region, map)).collect();
    let operands = data.operands.iter().map(|v| map.get(v).copied().unwrap_or(*v)).collect();
    let types = data.results.iter().map(|&v| func.ty(v).clone()).collect();
    let copy = func.create_op(data.op, operands, types, regions, data.loc);
    map.extend(data.results.into_iter().zip(func.op(copy).results.iter().copied()));
    copy
}

/// Copies the computation of a value: its op, if `copies` holds for it, after those that compute the operands; `put` puts each
/// copy into a block. `map` has known replacements, and receives those that are made. Returns that of the value, or the value.
pub fn copy_slice(
    func: &mut Func,
    v: Value,
    map: &mut HashMap<Value, Value>,
    copies: impl Fn(&Func, OpId) -> bool + Copy,
    put: impl Fn(&mut Func, OpId) + Copy,
) -> Value {
    if let Some(&known) = map.get(&v) {
        return known;
    }
    let Some(id) = func.def_op(v).filter(|&id| copies(func, id)) else { return v };
    for operand in func.op(id).operands.clone() {
        copy_slice(func, operand, map, copies, put);
    }
    let copy = copy_op(func, id, map);
    put(func, copy);
    map[&v]
}

/// Copies a region for another op, with the replacements of `map`, which receives the values of the copy.
pub fn copy_region(func: &mut Func, region: BlockId, map: &mut HashMap<Value, Value>) -> BlockId {
    let copy = func.add_block();
    for param in func.block(region).params.clone() {
        let ty = func.ty(param).clone();
        let v = func.add_param(copy, ty);
        map.insert(param, v);
    }
    for op in func.block(region).ops.clone() {
        let inner = copy_op(func, op, map);
        func.push(copy, inner);
    }
    copy
}

/// Whether the programs that share a block load different tiles, in turn. These are as many programs apart as there are
/// blocks; programs that share loads follow each other.
pub fn takes_turns(func: &Func) -> bool {
    let waits_for_others = |id: OpId| {
        let data = func.op(id);
        data.op == Op::PingpongWait && !data.operands.is_empty()
    };
    func.walk().into_iter().any(waits_for_others)
}

/// The CTAs (thread blocks) of a cluster that run one program; 1 without clusters.
pub fn ctas(func: &Func) -> u32 {
    let of_op = |id: OpId| match func.op(id).op {
        Op::CtaRank { ctas } => Some(ctas),
        _ => None,
    };
    func.walk().into_iter().find_map(of_op).unwrap_or(1)
}
