//! Programs that share a block and a producer, and load different tiles: in a persistent loop, the producer loads for one
//! program after the other, and the programs' inner loops take turns.
//!
//! Each program has its own tile of the persistent loop, so that one computes while another stores (the ping-pong
//! kernels of CUTLASS). Their loads fill the same rings: a program uses the buffers of its turn and skips those of the
//! others.

use super::candidates::Candidate;
use super::slice::Slice;
use crate::ir::nested::defined_inside;
use crate::ir::{BlockId, Func, Op, OpId, Value};
use std::collections::{HashMap, HashSet};

/// The turns of a kernel.
pub struct Turns {
    /// The persistent loop. Each iteration is a turn of one program.
    pub outer: OpId,
    /// For each block with loads, the loops inside of `outer` that run it, from the inside out: the product of their
    /// iterations is how often it runs in a turn.
    pub loops: HashMap<BlockId, Vec<OpId>>,
    /// The values from before `outer` that the producer needs inside, and that differ between the programs.
    pub outside: Vec<Value>,
}

impl Turns {
    /// The turns of programs with these loads; `None` where no loop `range(program_id(0), …)` is around all of them.
    ///
    /// # Errors
    /// Why the programs cannot take turns in that loop.
    pub fn find(
        func: &Func,
        slice: &Slice,
        blocks: &HashMap<BlockId, (usize, Vec<Candidate>)>,
    ) -> Result<Option<Turns>, String> {
        let owners = |block: BlockId| -> Vec<OpId> {
            std::iter::successors(func.owner(block), |&owner| func.parent_op(owner)).collect()
        };
        let mut around: Vec<(BlockId, Vec<OpId>)> = blocks.keys().map(|&block| (block, owners(block))).collect();
        around.sort_by_key(|(block, _)| *block);
        let Some(&outer) = around.first().and_then(|(_, owners)| owners.last()) else { return Ok(None) };
        let bounds = func.op(outer).operands.clone();
        let is_inside = |owners: &[OpId]| owners.len() > 1 && owners.last() == Some(&outer);
        if !matches!(func.op(outer).op, Op::For { .. })
            || !around.iter().all(|(_, owners)| is_inside(owners))
            || !is(func, bounds[0], &Op::ProgramId { axis: 0 })
        {
            return Ok(None);
        }
        let refuse = |what: String| format!("programs cannot take turns in the loop at {}: {what}", func.op(outer).loc);
        if slice.differs(bounds[1]) {
            return Err(refuse("its end depends on program_id(0)".into()));
        }
        // With smaller steps, some programs of a block would have more turns than others.
        if !is(func, bounds[2], &Op::NumPrograms { axis: 0 }) {
            return Err(refuse("its step is not num_programs(0)".into()));
        }
        if slice.carried.get(&outer).is_some_and(|kept| !kept.is_empty()) {
            return Err(refuse("it carries values that addresses depend on: compute them from its index".into()));
        }
        let inside = defined_inside(func, outer);
        let outside = varying_outside(func, slice, outer, &inside);
        if let Some(v) = outside.iter().find(|&&v| !slice.is_computed_by_ops(func, v)) {
            let at = func.def_op(*v).map_or_else(String::new, |id| format!(" at {}", func.op(id).loc));
            return Err(refuse(format!(
                "addresses depend on a value{at} that depends on program_id(0) by a branch or another loop: compute it inside"
            )));
        }
        let mut loops = HashMap::new();
        for (block, mut owners) in around {
            owners.pop();
            for &owner in &owners {
                let data = func.op(owner);
                let (what, at) = (data.op.mnemonic(), &data.loc);
                let is_same = |v: &Value| func.constant_int(*v).is_some() || !slice.differs(*v) && !inside.contains(v);
                if !matches!(data.op, Op::For { .. }) {
                    let why = format!("there are loads in the `{what}` at {at}, and only loops may be around them");
                    return Err(refuse(why));
                }
                if !data.operands[..3].iter().all(is_same) {
                    return Err(refuse(format!("the `{what}` at {at} has other bounds in each iteration")));
                }
            }
            loops.insert(block, owners);
        }
        Ok(Some(Turns { outer, loops, outside }))
    }
}

/// The values from before a loop that addresses inside use, or branches and loops of theirs give, and that differ between
/// the programs.
fn varying_outside(func: &Func, slice: &Slice, outer: OpId, inside: &HashSet<Value>) -> Vec<Value> {
    let of_slice = |id: &OpId| slice.ops.contains(id) || slice.control.contains(id) || slice.loads.contains(id);
    let ops = func.walk_from(func.op(outer).regions[0]).into_iter().filter(of_slice);
    let with_yields = ops.flat_map(|id| {
        let yields = func.op(id).regions.iter().map(|&region| func.terminator(region));
        yields.chain([id]).collect::<Vec<OpId>>()
    });
    let operands = with_yields.flat_map(|id| func.op(id).operands.clone());
    let mut values: Vec<Value> = operands.filter(|v| slice.differs(*v) && !inside.contains(v)).collect();
    values.sort();
    values.dedup();
    values
}

/// Whether a value is the result of this op, or a cast of it.
pub(super) fn is(func: &Func, v: Value, op: &Op) -> bool {
    match func.def_op(v).map(|id| func.op(id)) {
        Some(data) if data.op == Op::Cast => is(func, data.operands[0], op),
        Some(data) => data.op == *op,
        None => false,
    }
}
