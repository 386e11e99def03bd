//! Dynamic loops: the blocks of a launch take the iterations of a persistent loop one after the other, from a counter in
//! memory (CUTLASS: dynamic persistent tile scheduler).
//!
//! Each block runs the iteration with its own number first. Its producer takes the next one as soon as it has issued the
//! loads of the current one, and tells consumers through shared memory.

use super::partitions::{Plan, is_within};
use super::turns::is;
use crate::analysis::memory_effects::{is_pointer, underlying_arguments};
use crate::ir::{BinaryOp, BlockId, Def, Effects, Func, Op, OpId, Value};

/// The loop that a `dynamic_index` is for, if a producer can take its iterations.
///
/// # Errors
/// Why it cannot.
pub fn outer_loop(func: &Func, id: OpId, plan: &Plan) -> Result<OpId, String> {
    let [counter, index, step, end] = func.op(id).operands[..] else {
        panic!("internal compiler error: a `dynamic_index` of other operands")
    };
    let outer = func.parent_op(id).filter(|&outer| func.block_of(outer) == Some(func.body));
    let Some(outer) = outer else { return Err("it is inside of another loop or a branch".into()) };
    let (bounds, region) = (&func.op(outer).operands, func.op(outer).regions[0]);
    if !matches!(func.op(outer).op, Op::For { .. })
        || bounds[1..] != [end, step]
        || func.block(region).params != [index]
    {
        return Err("it carries values, or has other bounds than its `dynamic_index`".into());
    }
    if plan.ctas > 1 || plan.turns.is_some() {
        return Err("its programs share clusters, or take turns".into());
    }
    let [first, blocks] = [Op::ProgramId { axis: 0 }, Op::NumPrograms { axis: 0 }];
    if !is_part(func, bounds[0], &first, plan.replicas) || !is_part(func, step, &blocks, plan.replicas) {
        let by = if plan.replicas > 1 { format!(" / {}", plan.replicas) } else { String::new() };
        return Err(format!("it is not `range(program_id(0){by}, …, num_programs(0){by})`"));
    }
    if !is_same_for_all(func, end) {
        return Err("its end may differ between programs".into());
    }
    if func.uses(index).iter().any(|used| used.op != id) {
        return Err("its index is used in another way".into());
    }
    let is_once = |block: BlockId| plan.groups[plan.blocks[&block].0].once;
    if !plan.blocks.keys().all(|&block| is_within(func, block, region) || block == region && is_once(block)) {
        return Err("there are loads of the producer outside, or no loops inside with loads".into());
    }
    if !matches!(func.value(counter).def, Def::Param(block, _) if block == func.body) {
        return Err("its counter is not an argument of the kernel".into());
    }
    let accesses = |other: &OpId| {
        let data = func.op(*other);
        let mut pointers = data.operands.iter().filter(|&&v| is_pointer(func, v));
        *other != id
            && !matches!(data.op.effects(), Effects::Pure | Effects::Regions)
            && pointers.any(|&v| underlying_arguments(func, v).contains(&counter))
    };
    if let Some(other) = func.walk().into_iter().find(accesses) {
        let (what, at) = (func.op(other).op.mnemonic(), &func.op(other).loc);
        return Err(format!("the `{what}` at {at} accesses its counter"));
    }
    Ok(outer)
}

/// Notes on the loops that options and hints want to be dynamic, and that are not.
pub fn notes(func: &Func, plan: Option<&Plan>) -> Vec<String> {
    let ids = func.walk().into_iter().filter(|&id| func.op(id).op == Op::DynamicIndex);
    let why = |id: OpId| match plan {
        Some(plan) => outer_loop(func, id, plan).err(),
        None => Some("no producer loads for it (warp specialization)".into()),
    };
    let note = |id: OpId| Some(format!("the loop at {} is not dynamic: {}", func.op(id).loc, why(id)?));
    ids.filter_map(note).collect()
}

/// Whether a value is `op`, divided by `count` if that is above 1.
fn is_part(func: &Func, v: Value, op: &Op, count: u32) -> bool {
    if count == 1 {
        return is(func, v, op);
    }
    func.def_op(v).map(|id| func.op(id)).is_some_and(|data| {
        data.op == Op::Binary(BinaryOp::Div)
            && is(func, data.operands[0], op)
            && func.constant_int(data.operands[1]) == Some(count.into())
    })
}

/// Whether a scalar is computed from arguments, the extents of the grid and constants alone.
fn is_same_for_all(func: &Func, v: Value) -> bool {
    match func.value(v).def {
        Def::Param(block, _) => block == func.body,
        Def::Result(id, _) => {
            let data = func.op(id);
            let is_own = matches!(data.op, Op::ProgramId { .. } | Op::CtaRank { .. });
            data.op.effects() == Effects::Pure && !is_own && data.operands.iter().all(|&v| is_same_for_all(func, v))
        }
    }
}
