//! Keeps `wgmma` in flight until their results are needed.
//!
//! Does: moves each `wgmma_wait` down to just before the first op that uses its result, or that overwrites the
//! registers of an operand (at the latest before the terminator of the block), and lets it leave the `wgmma` that were
//! issued later in flight (`pending`). Merges adjacent waits. ptxas may move a wait up past arithmetic that does not
//! depend on it; holding the arithmetic above the wait was slower
//! (`harness/records/2026-11-26-h200-attention-schedules.jsonl`). A deferred wait (one that the schedule places a stage
//! after its `wgmma`) leaves the `wgmma` of this iteration in flight and completes the one of the previous iteration;
//! another wait after the loop completes the last.
//! Requires: stage *layout*; each `wgmma` is followed by its own wait in the same block.
//! Keeps: results. Every `wgmma` is waited for in the block that issues it, unless its wait is deferred or it enters a
//! loop that defers the waits for its accumulator.
//! Does not: defer the wait for a `wgmma` that reads a buffer which the loop itself fills: it waits in the iteration.

use crate::analysis::buffers::buffer_of;
use crate::ir::nested::uses;
use crate::ir::{BlockId, Builder, DType, Def, Effects, Func, Op, OpId, Type, Value};
use crate::schedule::stages;
use std::collections::HashSet;

/// Runs the pass.
pub fn run(func: &mut Func) {
    run_with(func, true);
}

/// Like [`run`]; without `f32_in_flight`, waits for f32 `wgmma` stay in place. FP32 adds outside of the tensor cores
/// accumulate these, so each one in flight takes the registers of one more accumulator.
pub fn run_with(func: &mut Func, f32_in_flight: bool) {
    for id in func.walk() {
        if let Op::For { .. } = func.op(id).op {
            wait_after_loop(func, id);
        }
    }
    let entering: HashSet<OpId> = func.walk().into_iter().filter(|&id| enters_loop_in_flight(func, id)).collect();
    for b in 0..func.num_blocks() as u32 {
        block(func, BlockId(b), f32_in_flight, &entering);
    }
    for b in 0..func.num_blocks() as u32 {
        stages::clear(func, BlockId(b));
    }
}

/// Whether a wait is for an f32 `wgmma`.
fn waits_for_f32(func: &Func, wait: OpId) -> bool {
    let b = |id: OpId| func.ty(func.op(id).operands[1]);
    awaited_wgmma(func, wait).is_some_and(|id| matches!(b(id), Type::Shared { elem: DType::F32, .. }))
}

/// Inserts waits after a loop for its deferred `wgmma`.
fn wait_after_loop(func: &mut Func, id: OpId) {
    let region = func.op(id).regions[0];
    stages::undefer_unsafe_waits(func, region);
    for dot in stages::deferred_dots(func, region) {
        let (_, number) = stages::accumulator_of(func, region, dot)
            .expect("internal compiler error: a deferred wgmma without an accumulator");
        let result = func.op(id).results[number];
        let (ty, loc) = (func.ty(result).clone(), func.op(id).loc.clone());
        let wait = Builder::after(func, id, loc).op(Op::WgmmaWait { pending: 0 }, &[], &[ty]);
        let waited = func.result(wait);
        func.replace_uses(result, waited);
        func.add_operands(wait, &[result]);
    }
}

/// Moves the waits of a block. `entering` are waits whose `wgmma` stay in flight into a loop.
fn block(func: &mut Func, block: BlockId, f32_in_flight: bool, entering: &HashSet<OpId>) {
    let releases = detach_releases(func, block);
    let is_wait = |&id: &OpId| matches!(func.op(id).op, Op::WgmmaWait { .. });
    let waits: Vec<OpId> = func.block(block).ops.iter().copied().filter(is_wait).collect();
    let waits: Vec<OpId> = waits.into_iter().filter(|&id| f32_in_flight || !waits_for_f32(func, id)).collect();
    // From the last to the first, so that a wait does not move past another that has already moved.
    for &wait in waits.iter().rev() {
        let results = func.op(wait).results.clone();
        let overwritten_operand = overwritten_operand(func, block, wait);
        let ops = &func.block(block).ops;
        let needed = (func.position(wait) + 1..ops.len())
            .find(|&i| {
                let data = func.op(ops[i]);
                let end = i + 1 == ops.len();
                // A loop or branch may issue `wgmma` too: none stays in flight across it.
                let region = matches!(data.op, Op::For { .. } | Op::While | Op::If);
                // Other warps may then overwrite the buffers that the `wgmma` reads.
                let writes = match data.op {
                    Op::BlockBarrier { .. } => true,
                    Op::MbarrierArrive { .. } => data.operands.len() == 2,
                    // A `wgmma` in flight does not read global memory, and no buffer that it reads shares memory with the
                    // scratch memory of an op that writes global memory.
                    _ => data.op.effects() == Effects::Write && !data.op.only_writes_global_memory(),
                };
                let rewrites = data.results.iter().any(|v| overwritten_operand == Some(*v));
                end || region || writes || rewrites || uses(func, ops[i]).iter().any(|v| results.contains(v))
            })
            .expect("internal compiler error: a block without a terminator");
        func.move_before(wait, ops[needed]);
    }
    for wait in waits {
        let started = issued_since(func, block, wait, entering.contains(&wait));
        if let Op::WgmmaWait { pending } = func.op_mut(wait) {
            *pending = started;
        }
    }
    merge_adjacent_waits(func, block);
    let end = func.block(block).ops.len().saturating_sub(1);
    func.insert(block, end, &releases);
    let waits: Vec<OpId> =
        func.block(block).ops.iter().copied().filter(|&id| matches!(func.op(id).op, Op::WgmmaWait { .. })).collect();
    for wait in waits {
        sink_loads(func, block, wait);
    }
}

/// Removes the arrivals that release buffers after a `wgmma`, so that they do not force an early wait. The caller
/// appends them to the block, and `early_release` moves them up to the wait.
fn detach_releases(func: &mut Func, block: BlockId) -> Vec<OpId> {
    let ops = func.block(block).ops.clone();
    let is_release = |&id: &OpId| matches!(func.op(id).op, Op::MbarrierArrive { .. }) && func.op(id).operands.len() > 2;
    let (releases, rest): (Vec<OpId>, Vec<OpId>) = ops.into_iter().partition(is_release);
    func.set_ops(block, &rest);
    releases
}

/// Moves loads from shared memory, and changes of their shape and layout, from before a wait to after it where only ops
/// after it use them: their registers are then not live while a `wgmma` in flight occupies its own.
fn sink_loads(func: &mut Func, block: BlockId, wait: OpId) {
    let at = func.position(wait);
    let mut sunk: Vec<OpId> = Vec::new();
    for &id in func.block(block).ops[..at].iter().rev() {
        let data = func.op(id);
        let moves = matches!(data.op, Op::LocalLoad | Op::ConvertLayout | Op::ExpandDims { .. } | Op::Broadcast);
        let is_after = |user: OpId| sunk.contains(&user) || func.is_in(user, block) && func.position(user) > at;
        let mut users = data.results.iter().flat_map(|&v| func.uses(v));
        if moves && func.ty(func.result(id)).is_tensor() && users.all(|used| is_after(used.op)) {
            sunk.push(id);
            continue;
        }
        let crosses = match data.op {
            Op::Wgmma { .. } | Op::WgmmaWait { .. } => true,
            Op::LocalAlloc => false,
            _ => matches!(data.op.effects(), Effects::Pure | Effects::Read),
        };
        if !crosses {
            break;
        }
    }
    sunk.reverse();
    sunk.iter().for_each(|&id| func.detach(id));
    func.insert(block, func.position(wait) + 1, &sunk);
}

/// The `wgmma` that a wait completes.
fn awaited_wgmma(func: &Func, wait: OpId) -> Option<OpId> {
    let id = func.def_op(*func.op(wait).operands.first()?)?;
    matches!(func.op(id).op, Op::Wgmma { .. }).then_some(id)
}

/// The value that overwrites the registers of an operand in flight: the next value of the carried tile that is the
/// operand.
fn overwritten_operand(func: &Func, block: BlockId, wait: OpId) -> Option<Value> {
    let tile = func.op(awaited_wgmma(func, wait)?).operands[0];
    match (func.value(tile).def, func.ty(tile)) {
        (Def::Param(of, i), Type::Tensor { .. }) if of == block && i > 0 => {
            func.op(func.terminator(block)).operands.get(i - 1).copied()
        }
        _ => None,
    }
}

/// The number of `wgmma` that a wait leaves in flight: those issued since the one that it completes. A deferred wait
/// completes the one of the previous iteration, and one that enters a loop completes none.
fn issued_since(func: &Func, block: BlockId, wait: OpId, enters_loop: bool) -> u32 {
    let ops = &func.block(block).ops;
    let dot = awaited_wgmma(func, wait);
    let until = func.position(wait);
    let from = dot.filter(|&dot| func.is_in(dot, block)).map_or(until, |dot| func.position(dot) + 1);
    let count_dots = |ops: &[OpId]| ops.iter().filter(|&&op| matches!(func.op(op).op, Op::Wgmma { .. })).count() as u32;
    let since = count_dots(&ops[from..until]);
    let leaves_all = enters_loop || dot.is_some_and(|dot| stages::is_wait_deferred(func, dot));
    if leaves_all { count_dots(ops) + since } else { since }
}

/// Whether an op waits for a `wgmma` whose result is only the first value of an accumulator of a loop that defers the
/// waits for it: the first wait of the loop, or the one after it, completes this `wgmma` too. The loop must read the
/// same buffers, which therefore live until then.
fn enters_loop_in_flight(func: &Func, wait: OpId) -> bool {
    let ([result], Op::WgmmaWait { .. }) = (&func.op(wait).results[..], &func.op(wait).op) else { return false };
    let [used] = func.uses(*result) else { return false };
    let user = func.op(used.op);
    let Some(number) = used.index.checked_sub(3).filter(|_| matches!(user.op, Op::For { .. })) else { return false };
    let buffers = |dot: OpId| func.op(dot).operands[..2].iter().map(|&v| buffer_of(func, v)).collect::<Vec<_>>();
    let Some(own) = awaited_wgmma(func, wait).map(buffers) else { return false };
    let region = user.regions[0];
    stages::deferred_dots(func, region).into_iter().any(|dot| {
        let accumulates = stages::accumulator_of(func, region, dot).is_some_and(|(_, i)| i == number);
        accumulates && own.iter().all(|buffer| buffer.is_some() && buffers(dot).contains(buffer))
    })
}

/// Merges adjacent waits into one with the smallest `pending`.
fn merge_adjacent_waits(func: &mut Func, block: BlockId) {
    let ops = func.block(block).ops.clone();
    let is_wait = |func: &Func, id: OpId| matches!(func.op(id).op, Op::WgmmaWait { .. });
    let runs: Vec<&[OpId]> = ops.chunk_by(|&a, &b| is_wait(func, a) && is_wait(func, b)).collect();
    for run in runs.into_iter().filter(|run| run.len() > 1) {
        let mut strictest = u32::MAX;
        let (mut operands, mut results) = (Vec::new(), Vec::new());
        for &id in run {
            let data = func.op(id);
            if let Op::WgmmaWait { pending } = data.op {
                strictest = strictest.min(pending);
            }
            operands.extend(&data.operands);
            results.extend(&data.results);
        }
        let types = results.iter().map(|&v| func.ty(v).clone()).collect();
        let loc = func.op(run[0]).loc.clone();
        let one = func.create_op(Op::WgmmaWait { pending: strictest }, operands, types, Vec::new(), loc);
        for (old, new) in results.into_iter().zip(func.op(one).results.clone()) {
            func.replace_uses(old, new);
        }
        func.insert(block, func.position(run[0]), &[one]);
        run.iter().for_each(|&id| func.erase(id));
    }
}

#[cfg(test)]
mod tests {
    use crate::text::{parse, print};

    const LAYOUTS: &str = "#l0 = linear<reg=[[0,1],[8,0]], lane=[[0,2],[0,4],[1,0],[2,0],[4,0]], warp=[[16,0],[32,0]], block=[], shape=[64,8]>
#l1 = shared<offset=[[0,1],[0,2],[0,4],[0,8],[1,0],[2,0],[4,8],[8,0],[16,0],[32,0]], shape=[64,16]>
#l2 = shared<offset=[[0,1],[0,2],[0,4],[1,0],[2,0],[4,0],[8,0]], shape=[16,8]>
";

    #[test]
    fn two_wgmmas_are_in_flight_together() {
        let text = format!(
            "{LAYOUTS}kernel @f() {{
  %a = local_alloc : shared<64x16xbf16, #l1>
  %b = local_alloc : shared<16x8xbf16, #l2>
  %z = constant {{value = 0.0}} : tensor<64x8xf32, #l0>
  %s = wgmma %a, %b, %z {{warps = [4, 1]}} : tensor<64x8xf32, #l0>
  %sw = wgmma_wait %s {{pending = 0}} : tensor<64x8xf32, #l0>
  %t = wgmma %a, %b, %z {{warps = [4, 1]}} : tensor<64x8xf32, #l0>
  %tw = wgmma_wait %t {{pending = 0}} : tensor<64x8xf32, #l0>
  %e = exp2 %sw : tensor<64x8xf32, #l0>
  %p = mul %e, %tw : tensor<64x8xf32, #l0>
  return
}}"
        );
        let mut f = parse(&text).unwrap();
        super::run(&mut f);
        let out = print(&f);
        let order: Vec<&str> = out
            .lines()
            .filter_map(|l| ["wgmma ", "wgmma_wait", "exp2", "mul"].into_iter().find(|m| l.contains(m)))
            .collect();
        assert_eq!(order, ["wgmma ", "wgmma ", "wgmma_wait", "exp2", "wgmma_wait", "mul"], "{out}");
        assert!(out.contains("{pending = 1}") && out.contains("{pending = 0}"), "{out}");
    }

    #[test]
    fn adjacent_waits_merge() {
        let mut f = parse(&format!(
            "{LAYOUTS}kernel @f(%n: i32) {{
  %a = local_alloc : shared<64x16xbf16, #l1>
  %b = local_alloc : shared<16x8xbf16, #l2>
  %z = constant {{value = 0.0}} : tensor<64x8xf32, #l0>
  %u = constant {{value = 1}} : i32
  %p, %q = for %n, %n, %u, %z, %z : tensor<64x8xf32, #l0>, tensor<64x8xf32, #l0> (%i: i32, %x: tensor<64x8xf32, #l0>, %y: tensor<64x8xf32, #l0>) {{
    %s = wgmma %a, %b, %x {{warps = [4, 1]}} : tensor<64x8xf32, #l0>
    %sw = wgmma_wait %s {{pending = 0}} : tensor<64x8xf32, #l0>
    %t = wgmma %a, %b, %y {{warps = [4, 1]}} : tensor<64x8xf32, #l0>
    %tw = wgmma_wait %t {{pending = 0}} : tensor<64x8xf32, #l0>
    yield %sw, %tw
  }}
  return
}}"
        ))
        .unwrap();
        super::run(&mut f);
        let out = print(&f);
        assert_eq!(out.matches("wgmma_wait").count(), 1, "{out}");
        assert!(out.contains("{pending = 0}"), "{out}");
        crate::verify::verify(&f, crate::ir::Stage::Layout).unwrap();
    }
}
