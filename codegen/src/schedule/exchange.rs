//! Chooses the buffers of a loop through which warps exchange a tile that they compute, and gives each two slots where
//! shared memory suffices: an iteration then writes one slot while other warps may still read the other, which saves the
//! barrier before the write.

use super::partitions::{Plan, buffer_bytes};
use super::stages;
use crate::analysis::buffers::users;
use crate::ir::{BlockId, Func, Op, OpId, Partition, Placement};
use crate::target::GpuArch;

/// The slots of an exchange buffer.
const DEPTH: u32 = 2;

/// Sets the depth of the exchange buffers of a scheduled loop, of all of them or none.
pub fn place(func: &mut Func, id: OpId, plan: &Plan, arch: GpuArch) {
    let region = func.op(id).regions[0];
    let buffers = exchange_buffers(func, region);
    let bytes = |&alloc: &OpId| buffer_bytes(func, func.ty(func.result(alloc)));
    let more: u32 = buffers.iter().map(bytes).sum::<u32>() * (DEPTH - 1);
    if !plan.has_space(func, id, arch, more) {
        return;
    }
    for alloc in buffers {
        let place = func.op(alloc).place.map(|place| Placement { depth: Some(DEPTH), ..place });
        func.set_place(alloc, place);
    }
}

/// The buffers that the main stage of a loop writes and reads.
fn exchange_buffers(func: &Func, region: BlockId) -> Vec<OpId> {
    let Some(main) = stages::main_stage(func, region) else { return Vec::new() };
    let ops = &func.block(region).ops;
    let consumer = Partition::Consumer;
    let runs_in_main = |op: OpId| func.op(op).place.is_some_and(|at| (at.stage, at.partition) == (main, consumer));
    let exchanges = |&id: &OpId| {
        let data = func.op(id);
        let [tile] = data.operands[..] else { return false };
        let computed = func.def_op(tile).is_some_and(|def| func.is_in(def, region));
        data.op == Op::LocalAlloc
            && computed
            && runs_in_main(id)
            && users(func, ops, func.result(id)).into_iter().all(runs_in_main)
    };
    ops.iter().copied().filter(exchanges).collect()
}
