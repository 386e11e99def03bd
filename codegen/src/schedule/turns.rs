//! Programs that share a block and a producer, and load different tiles: in a persistent loop, the producer loads for one
//! program after the other, and the programs' inner loops take turns.
//!
//! Each program has its own tile of the persistent loop, so that one computes while another stores (the ping-pong kernels of
//! CUTLASS). Their loads fill the same rings: a program uses the buffers of its turn and skips those of the others.

use super::candidates::Candidate;
use super::slice::Slice;
use crate::ir::nested::defined_inside;
use crate::ir::{BlockId, Func, Op, OpId, Value};
use std::collections::HashMap;

/// The turns of a kernel.
pub struct Turns {
    /// The persistent loop. Each iteration is a turn of one program.
    pub outer: OpId,
    /// For each block with loads, the loops inside of `outer` that run it, from the inside out: the product of their
    /// iterations is how often it runs in a turn.
    pub loops: HashMap<BlockId, Vec<OpId>>,
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
        let around: HashMap<BlockId, Vec<OpId>> = blocks.keys().map(|&block| (block, owners(block))).collect();
        let mut outermost = around.values().map(|owners| owners.last().copied());
        let Some(Some(outer)) = outermost.next() else { return Ok(None) };
        let is_inside = |owners: &Vec<OpId>| owners.len() > 1;
        if !outermost.all(|other| other == Some(outer))
            || !around.values().all(is_inside)
            || !matches!(func.op(outer).op, Op::For { .. })
            || !is_program(func, func.op(outer).operands[0])
        {
            return Ok(None);
        }
        let [_, end, step] = func.op(outer).operands[..3] else { return Ok(None) };
        let refuse = |what: String| format!("programs cannot take turns in the loop at {}: {what}", func.op(outer).loc);
        if [end, step].iter().any(|&v| slice.differs(v)) {
            return Err(refuse("its end and its step depend on program_id(0)".into()));
        }
        if slice.carried.get(&outer).is_some_and(|kept| !kept.is_empty()) {
            return Err(refuse("it carries values that addresses depend on: compute them from its index".into()));
        }
        let inside = defined_inside(func, outer);
        let mut loops = HashMap::new();
        for (block, mut owners) in around {
            owners.pop();
            for &owner in &owners {
                let data = func.op(owner);
                let (what, at) = (data.op.mnemonic(), &data.loc);
                let is_same = |v: &Value| {
                    func.constant_int(*v).is_some() || !slice.differs(*v) && !inside.contains(v)
                };
                if !matches!(data.op, Op::For { .. }) {
                    return Err(refuse(format!("there are loads in the `{what}` at {at}, and only loops may be around them")));
                }
                if !data.operands[..3].iter().all(is_same) {
                    return Err(refuse(format!("the `{what}` at {at} has other bounds in each iteration")));
                }
            }
            loops.insert(block, owners);
        }
        Ok(Some(Turns { outer, loops }))
    }
}

/// Whether a value is `program_id(0)`.
fn is_program(func: &Func, v: Value) -> bool {
    match func.def_op(v).map(|id| func.op(id)) {
        Some(data) if data.op == Op::Cast => is_program(func, data.operands[0]),
        Some(data) => data.op == Op::ProgramId { axis: 0 },
        None => false,
    }
}
