//! Chooses the loads of a loop that all warps prefetch, and the number of stages that fit into shared memory.

use super::candidates::{Candidate, choose_tma, find_candidates, note_tma};
use super::overlap::{Overlap, Prefetch};
use crate::analysis::buffers::users;
use crate::analysis::{scratch, warp_box};
use crate::ir::{Func, Op, OpId, Partition, Type};
use crate::target::{CompileOptions, GpuArch};
use std::collections::HashMap;

/// The loads to prefetch; none if fewer than two stages are asked for or fit. Drops the overlap if its buffers leave room
/// for fewer than two stages.
pub fn choose(
    func: &mut Func,
    id: OpId,
    overlap: &mut Overlap,
    arch: GpuArch,
    options: &CompileOptions,
    notes: &mut Vec<String>,
) -> Prefetch {
    let Op::For { num_stages, .. } = func.op(id).op else { return Prefetch::default() };
    let wanted = num_stages.unwrap_or(options.num_stages);
    let candidates = find_candidates(func, id);
    let loc = func.op(id).loc.clone();
    if wanted >= 2 {
        notes.extend(candidates.refused.iter().map(|refusal| {
            format!("the load at {} is not prefetched by the loop at {loc}: {}", refusal.loc, refusal.reason)
        }));
    }
    let mut loads = candidates.found;
    if loads.is_empty() {
        return Prefetch::default();
    }
    let region = func.op(id).regions[0];
    for c in &mut loads {
        // One more buffer than stages where the next iteration still reads the tile.
        c.depth = u32::from(c.alloc.is_some_and(|alloc| overlap.reads(func, region, alloc)));
    }
    if arch >= GpuArch::Sm90a && options.schedule.tma == Some(true) {
        choose_tma(func, &mut loads);
        note_tma(func, &loads, notes);
    }
    let mut stages = stages_that_fit(func, id, &loads, wanted, arch);
    if stages < 2 && wanted >= 2 && loads.iter().any(|c| c.depth > 0) {
        loads.iter_mut().for_each(|c| c.depth = 0);
        stages = stages_that_fit(func, id, &loads, wanted, arch);
        overlap.refuse("one more buffer for each of their operands leaves shared memory for fewer than two stages");
    }
    if stages < wanted {
        let bytes: usize = loads.iter().map(|c| func.shared_bytes(&c.buffer)).sum();
        notes.push(format!(
            "the loop at {loc} has {} of the {wanted} pipeline stages that are requested: a stage takes {bytes} bytes of \
             shared memory, and a block of {} has {}",
            stages.max(1),
            arch.name(),
            arch.max_shared_bytes()
        ));
    }
    if stages < 2 {
        return Prefetch::default();
    }
    loads.iter_mut().for_each(|c| c.depth += stages);
    Prefetch { loads, stages, partition: Partition::Consumer }
}

/// The maximum number of stages, up to `wanted`, whose rings fit into shared memory together with the buffers that are
/// live during the loop and the scratch memory of its ops. `depth` of a candidate is what it needs beyond the stages.
fn stages_that_fit(func: &Func, id: OpId, candidates: &[Candidate], wanted: u32, arch: GpuArch) -> u32 {
    let size = |ty: &Type, depth: u32| (func.shared_bytes(ty) * depth as usize).next_multiple_of(1024) as u64;
    let others: u64 = buffers_live_in_loop(func, id)
        .into_iter()
        .filter(|alloc| !candidates.iter().any(|c| c.alloc == Some(*alloc)))
        .map(|alloc| size(func.ty(func.result(alloc)), 1))
        .sum();
    // Space for the mbarriers.
    let barriers = if candidates.iter().any(|c| c.tma) { 1024 } else { 0 };
    let stores = u64::from(warp_box::buffers(func).1);
    let available = u64::from(arch.max_shared_bytes()).saturating_sub(others + barriers + stores);
    let buffers = |stages| candidates.iter().map(|c| size(&c.buffer, 1) * u64::from(stages + c.depth)).sum::<u64>();
    let rings = |stages| candidates.iter().map(|c| size(&c.buffer, stages + c.depth)).sum::<u64>();
    let ops = func.walk_from(func.op(id).regions[0]).into_iter().filter(|&op| !reads_ring(func, op, candidates));
    let scratch = ops.map(|op| u64::from(scratch::bytes(func, op))).max().unwrap_or(0);
    let fits = |&stages: &u32| buffers(stages) <= available && rings(stages) + scratch <= available;
    (1..=wanted).rev().find(fits).unwrap_or(0)
}

/// Whether an op only converts the layout of a tile from a ring: the load will use that layout directly.
pub fn reads_ring(func: &Func, id: OpId, candidates: &[Candidate]) -> bool {
    let mut at = Some(id).filter(|&id| func.op(id).op == Op::ConvertLayout);
    while let Some(id) = at {
        at = func.def_op(func.op(id).operands[0]);
        match at.map(|id| &func.op(id).op) {
            Some(Op::LoadView { .. } | Op::Load { .. }) => return candidates.iter().any(|c| Some(c.load) == at),
            Some(Op::ExpandDims { .. }) => {}
            _ => return false,
        }
    }
    false
}

/// The buffers that are live during the loop: all but those allocated after it and those last used before it.
fn buffers_live_in_loop(func: &Func, id: OpId) -> Vec<OpId> {
    let order = func.walk();
    let number: HashMap<OpId, usize> = order.iter().enumerate().map(|(at, &op)| (op, at)).collect();
    let first = number[&id];
    let last = first + func.walk_from(func.op(id).regions[0]).len();
    let loops: Vec<(usize, usize)> = order
        .iter()
        .enumerate()
        .filter(|(_, op)| matches!(func.op(**op).op, Op::For { .. } | Op::While))
        .map(|(at, &op)| (at, at + func.op(op).regions.iter().map(|&r| func.walk_from(r).len()).sum::<usize>()))
        .collect();
    let needed = |&(allocated_at, alloc): &(usize, OpId)| {
        let last_user = users(func, &order[allocated_at..], func.result(alloc)).last().copied();
        let end = last_user.map_or(allocated_at, |user| number[&user]);
        // Allocated before a loop and used in it: live until the end of the loop.
        let end = loops
            .iter()
            .filter(|&&(from, to)| allocated_at < from && from <= end && end <= to)
            .map(|l| l.1)
            .fold(end, usize::max);
        allocated_at <= last && end >= first
    };
    let allocs = order.iter().copied().enumerate().filter(|(_, op)| func.op(*op).op == Op::LocalAlloc);
    allocs.filter(needed).map(|(_, alloc)| alloc).collect()
}
