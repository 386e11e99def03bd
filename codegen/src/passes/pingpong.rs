//! Ping-pong scheduling: consumer warpgroups alternate on the tensor cores, so that the arithmetic of one overlaps with
//! the `wgmma` of another.
//!
//! Does: in loops of a consumer partition with several warpgroups, inserts a wait on the warpgroup's named barrier
//! before the first `wgmma` of an iteration, and an arrival at the next warpgroup's barrier once the `wgmma` before the
//! first `wgmma_wait` have been issued. Where programs take turns in a loop around, it only moves the end of each turn to
//! the last wait for a buffer, whatever the option says.
//! Requires: stage *async*, with `wgmma_wait` in final position (`delay_waits`).
//! Keeps: results. All warpgroups run the same iterations: those of one program, and those of several programs in the
//! loops of the loads that they share.
//! Does not: change loops without `wgmma` in their own body, loops in which all warpgroups would synchronize between
//! the two barriers (to fill a buffer together, or to exchange values), or partitions of more than seven warpgroups.
//! Source: FlashAttention-3 (Shah et al., 2024), section 3.1.

use crate::analysis::buffers::buffer_of;
use crate::analysis::scratch;
use crate::ir::nested::takes_turns;
use crate::ir::{BlockId, Builder, Func, Op, OpId, Value};
use crate::target::CompileOptions;

/// Runs the pass. Returns notes: why loops do not alternate although the options ask for it.
pub fn run(func: &mut Func, options: &CompileOptions) -> Vec<String> {
    if takes_turns(func) {
        let ends = func.walk().into_iter().filter(|&id| func.op(id).op == Op::PingpongArrive);
        ends.collect::<Vec<OpId>>().into_iter().for_each(|id| end_turn_early(func, id));
        return Vec::new();
    }
    if options.schedule.pingpong != Some(true) {
        return Vec::new();
    }
    let consumers = func.walk().into_iter().find_map(|id| match func.op(id).op {
        Op::WarpSpecialize { warps, replicas, .. } if (8..=28).contains(&(warps * replicas.unwrap_or(1))) => {
            Some((func.op(id).regions[0], replicas.is_some()))
        }
        _ => None,
    });
    let Some((consumers, has_replicas)) = consumers else {
        let needs = "it needs warp specialization with 8 to 28 consumer warps";
        return vec![format!("ping-pong scheduling is requested but not applied: {needs}")];
    };
    let mut notes = Vec::new();
    for id in func.walk_from(consumers) {
        if matches!(func.op(id).op, Op::For { .. })
            && let Err(why) = insert_pingpong(func, id, has_replicas)
        {
            notes.push(format!("the warpgroups do not alternate in the loop at {}: {why}", func.op(id).loc));
        }
    }
    notes
}

/// Moves the end of a turn to behind the last wait for a buffer: its `wgmma` may still be in flight.
fn end_turn_early(func: &mut Func, id: OpId) {
    let block = func.parent_block(id);
    let is_wait = |id: OpId| matches!(func.op(id).op, Op::MbarrierWait);
    let inside = |id: OpId| func.op(id).regions.iter().flat_map(|&region| func.walk_from(region));
    let waits = |&&id: &&OpId| is_wait(id) || inside(id).any(is_wait);
    let Some(&last) = func.block(block).ops.iter().rev().find(waits) else { return };
    let (from, to) = (func.position(id), func.position(last) + 1);
    if to < from {
        func.detach(id);
        func.insert(block, to, &[id]);
    }
}

/// Nothing is to be done in a loop without `wgmma` and waits for them.
///
/// # Errors
/// Why warpgroups cannot alternate in the loop.
fn insert_pingpong(func: &mut Func, id: OpId, has_replicas: bool) -> Result<(), String> {
    let region = func.op(id).regions[0];
    let ops = &func.block(region).ops;
    let first = ops.iter().position(|&op| matches!(func.op(op).op, Op::Wgmma { .. }));
    let wait = ops.iter().position(|&op| matches!(func.op(op).op, Op::WgmmaWait { .. }));
    let (Some(first), Some(wait)) = (first, wait) else { return Ok(()) };
    // Programs that share a block run the loops of their common loads equally often, and others perhaps not.
    if has_replicas && !ops.iter().any(|&op| func.op(op).op == Op::MbarrierWait) {
        return Err("programs that share the block may run it different numbers of times".into());
    }
    if wait < first {
        return Err(format!("the wait at {} precedes its `wgmma`", func.op(ops[wait]).loc));
    }
    if let Some(&op) = ops[first..wait].iter().find(|&&op| may_synchronize(func, region, op)) {
        let (what, at) = (func.op(op).op.mnemonic(), &func.op(op).loc);
        return Err(format!("the `{what}` at {at} may need a barrier of all warpgroups"));
    }
    let (first, wait) = (ops[first], ops[wait]);
    let loc = func.op(first).loc.clone();
    Builder::before(func, first, loc.clone()).op(Op::PingpongWait, &[], &[]);
    Builder::before(func, wait, loc).op(Op::PingpongArrive, &[], &[]);
    Ok(())
}

/// Whether an op of a loop body, or an op inside of it, may need a barrier: where threads write shared memory (others
/// may still read it), read shared memory written in this loop, exchange values, or write global memory.
fn may_synchronize(func: &Func, region: BlockId, op: OpId) -> bool {
    let inside = func.op(op).regions.iter().flat_map(|&inner| func.walk_from(inner));
    std::iter::once(op).chain(inside).any(|id| {
        let data = func.op(id);
        let writes = match data.op {
            Op::LocalAlloc => !data.operands.is_empty(),
            Op::LocalStore | Op::BlockBarrier { .. } => true,
            _ => data.op.only_writes_global_memory(),
        };
        writes || scratch::bytes(func, id) > 0 || data.operands.iter().any(|&v| is_written_in_loop(func, region, v))
    })
}

/// Whether the loop writes the buffer of a value.
fn is_written_in_loop(func: &Func, region: BlockId, v: Value) -> bool {
    let Some(buffer) = buffer_of(func, v) else { return false };
    func.walk_from(region).into_iter().any(|id| match func.op(id).op {
        Op::LocalAlloc => id == buffer && !func.op(id).operands.is_empty(),
        Op::LocalStore => buffer_of(func, func.op(id).operands[0]) == Some(buffer),
        _ => false,
    })
}
