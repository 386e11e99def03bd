//! Chooses the `wgmma` of a loop that overlap with the next iteration: those that run behind the main stage, and those
//! whose wait is deferred.
//!
//! In a loop where one `wgmma` depends on the result of another (in attention, P V depends on the scores), the dependent
//! ones run behind: as many of them, from the last one back, as registers allow. All ops that depend on them run behind
//! too, and must be arithmetic that the rest of the loop does not use. Where only the next iteration's accumulation depends on a
//! `wgmma` (a plain matmul), its wait is deferred: the next iteration issues its own `wgmma` first. The shared operands of
//! either must be allocated outside of the loop or prefetched, so that a ring can keep them longer. Loops inside of the
//! loop, and `mma.sync`, which is synchronous, do not overlap.

use super::candidates::{Candidate, ahead_ops};
use super::stages::{self, order};
use crate::analysis::registers;
use crate::ir::nested::uses;
use crate::ir::{BlockId, Def, Effects, Func, Op, OpId, Partition, Placement, Type, Value};
use crate::target::CompileOptions;
use std::collections::{HashMap, HashSet};

/// Registers per thread for addresses, counters and ptxas's register alignment, in addition to tiles: between 25 and 70
/// in the attention kernels.
const RESERVED_REGISTERS: u32 = 52;

/// The `wgmma` of a loop that overlap with its next iteration.
#[derive(Default)]
pub struct Overlap {
    /// Run behind the main stage.
    behind: Vec<OpId>,
    /// Their wait is deferred.
    deferred: Vec<OpId>,
    /// Why there are none, where they were dropped.
    refused: Option<&'static str>,
}

/// The loads of a loop that run ahead of its main stage.
#[derive(Default)]
pub struct Prefetch {
    pub loads: Vec<Candidate>,
    /// Stages from the loads to the main stage, both included. 0 without loads.
    pub stages: u32,
    /// The warps that load.
    pub partition: Partition,
}

/// Chooses the `wgmma` of a loop that overlap with its next iteration, if all loads of their operands are prefetched.
pub fn choose(func: &Func, id: OpId, options: &CompileOptions) -> Overlap {
    if !is_allowed(func, id, options) {
        return Overlap::default();
    }
    let limit = register_limit(func, id, options).unwrap_or(u32::MAX);
    let region = func.op(id).regions[0];
    let behind = choose_behind(func, region, limit);
    let deferred = if behind.is_empty() { accumulating_dots(func, region) } else { Vec::new() };
    Overlap { behind, deferred, refused: None }
}

/// Why no dot of a loop overlaps with the next iteration although a hint or the options ask for it.
pub fn note(func: &Func, id: OpId, overlap: &Overlap, prefetch: &Prefetch, options: &CompileOptions) -> Option<String> {
    let region = func.op(id).regions[0];
    if wanted(func, id, options) != Some(true) {
        return None;
    }
    let loc = |id: OpId| &func.op(id).loc;
    let not = |why: String| {
        Some(format!("the dots of the loop at {} do not overlap with the next iteration: {why}", loc(id)))
    };
    let ops = &func.block(region).ops;
    let dots: Vec<OpId> = ops.iter().copied().filter(|&id| matches!(func.op(id).op, Op::Wgmma { .. })).collect();
    let Some(first) = dots.first() else {
        let other = *ops.iter().find(|&&id| func.op(id).op.is_dot())?;
        return not(format!("the `{}` at {} is no `wgmma`", func.op(other).op.mnemonic(), loc(other)));
    };
    if let Some(reason) = overlap.refused {
        return not(reason.to_string());
    }
    let chosen: Vec<OpId> = [&overlap.behind[..], &overlap.deferred].concat();
    let filled = |&dot: &OpId| {
        let operands = &func.op(dot).operands[..2];
        let mut filled = operands.iter().filter_map(|&v| filled_in_loop(func, region, v));
        filled.find(|alloc| !prefetch.loads.iter().any(|c| c.alloc == Some(*alloc) && c.depth > 1))
    };
    match chosen.iter().chain(&dots).find_map(|dot| Some((*dot, filled(dot)?))) {
        Some((dot, alloc)) => not(format!(
            "the `wgmma` at {} reads the tile of the `{}` at {}, which has no ring of two or more buffers",
            loc(dot),
            func.op(alloc).op.mnemonic(),
            loc(alloc)
        )),
        None if chosen.is_empty() => not(format!(
            "no `wgmma` from the one at {} on adds to a tile that only the next iteration uses, or has only arithmetic after it",
            loc(*first)
        )),
        None => None,
    }
}

impl Overlap {
    /// Drops all, for this reason.
    pub fn refuse(&mut self, reason: &'static str) {
        *self = Overlap { refused: Some(reason), ..Overlap::default() };
    }

    /// Drops the `wgmma` that read a buffer which the loop fills and no ring of two or more buffers keeps. Those behind
    /// stay or go together.
    pub fn require_rings(&mut self, func: &Func, region: BlockId, has_ring: impl Fn(OpId) -> bool) {
        let is_kept = |&dot: &OpId| {
            func.op(dot).operands[..2].iter().all(|&v| filled_in_loop(func, region, v).is_none_or(&has_ring))
        };
        if !self.behind.iter().all(is_kept) {
            self.behind.clear();
        }
        self.deferred.retain(is_kept);
    }

    /// Whether one of the `wgmma` reads a buffer: the next iteration still needs it.
    pub fn reads(&self, func: &Func, region: BlockId, alloc: OpId) -> bool {
        let dots = || self.behind.iter().chain(&self.deferred);
        dots().any(|&dot| func.op(dot).operands[..2].iter().any(|&v| filled_in_loop(func, region, v) == Some(alloc)))
    }

    /// Gives the ops of a loop their placements, unless nothing runs ahead or behind.
    pub fn place(mut self, func: &mut Func, id: OpId, prefetch: &Prefetch) {
        let region = func.op(id).regions[0];
        let loads = &prefetch.loads;
        self.require_rings(func, region, |alloc| loads.iter().any(|c| c.alloc == Some(alloc) && c.depth > 1));
        let mut behind = dependent_ops(func, region, &self.behind).unwrap_or_default();
        sink(func, region, &mut behind);
        let buffers: Vec<Value> = loads.iter().filter_map(|c| c.alloc).map(|alloc| func.result(alloc)).collect();
        let can_cross = |v: &Value| matches!(func.ty(*v), Type::Scalar(_) | Type::Tensor { .. }) || buffers.contains(v);
        if !stages::cross_stage_values(func, region, &behind).iter().all(can_cross) {
            behind.clear();
        }
        if loads.is_empty() && behind.is_empty() && self.deferred.is_empty() {
            return;
        }

        let end = func.terminator(region);
        let addresses = loads.iter().flat_map(|c| func.op(c.load).operands.iter().copied().take(2));
        let ahead = ahead_ops(func, region, addresses);
        let indices: Vec<OpId> =
            ahead.iter().copied().filter(|&op| matches!(func.op(op).op, Op::Load { .. })).collect();
        // Loads that addresses depend on, and their own addresses, run one more iteration ahead, except in a producer,
        // which waits for them.
        let index_addresses = indices.iter().flat_map(|&op| func.op(op).operands.iter().copied().take(2));
        let first = [ahead_ops(func, region, index_addresses), indices.clone()].concat();
        let (loading, main) = match prefetch.partition {
            // The depth of the rings bounds how far the producer runs ahead.
            Partition::Producer => (0, 0),
            Partition::Consumer => {
                let loading = u32::from(!indices.is_empty());
                (loading, loading + prefetch.stages.saturating_sub(1))
            }
        };
        let only_ahead = only_ahead(func, region, &ahead, |id| loads.iter().any(|c| c.load == id));
        let first_wait = func
            .block(region)
            .ops
            .iter()
            .position(|op| matches!(func.op(*op).op, Op::WgmmaWait { .. }) && !behind.contains(op));
        let last = carried_to_behind(func, region, &behind);
        let deferred: Vec<Value> = self.deferred.iter().map(|&dot| func.result(dot)).collect();
        for (at, op) in func.block(region).ops.clone().into_iter().enumerate() {
            let data = func.op(op);
            let is_deferred =
                matches!(data.op, Op::WgmmaWait { .. }) && data.operands.iter().any(|v| deferred.contains(v));
            let order =
                if behind.is_empty() || first_wait.is_some_and(|wait| at < wait) { order::FIRST } else { order::REST };
            let place = Placement { stage: main, order, ..Placement::default() };
            let ahead = Placement { stage: loading, partition: prefetch.partition, ..place };
            let place = match loads.iter().find(|c| c.load == op || c.alloc == Some(op)) {
                Some(c) if c.load == op => Placement { depth: Some(c.depth), tma: c.tma, ..ahead },
                Some(_) => ahead,
                None if only_ahead.contains(&op) && first.contains(&op) => Placement { stage: 0, ..ahead },
                None if only_ahead.contains(&op) => ahead,
                None if behind.contains(&op) => Placement { stage: main + 1, order: order::BEHIND, ..place },
                None if is_deferred => Placement { stage: main + 1, order: order::LAST, ..place },
                None if op == end || last.contains(&op) => Placement { order: order::LAST, ..place },
                None => place,
            };
            func.set_place(op, Some(place));
        }
    }
}

/// The ops ahead that only addresses of prefetched loads depend on.
pub fn only_ahead(func: &Func, region: BlockId, ahead: &[OpId], is_load: impl Fn(OpId) -> bool) -> HashSet<OpId> {
    let end = func.terminator(region);
    let mut only: HashSet<OpId> = ahead.iter().copied().collect();
    let params = &func.block(region).params;
    loop {
        let is_ahead = |id: OpId| only.contains(&id) || is_load(id);
        let param_is_ahead = |v: Value| func.uses(v).iter().all(|used| is_ahead(used.op));
        let stays = |&id: &OpId| {
            let users = func.op(id).results.iter().flat_map(|&v| func.uses(v));
            users.into_iter().all(|used| match used.op == end {
                true => param_is_ahead(params[1 + used.index]),
                false => is_ahead(used.op),
            })
        };
        let kept: HashSet<OpId> = only.iter().copied().filter(stays).collect();
        if kept.len() == only.len() {
            return only;
        }
        only = kept;
    }
}

/// The tiles of arithmetic of the main stage that only ops behind use.
fn carried_to_behind(func: &Func, region: BlockId, behind: &HashSet<OpId>) -> HashSet<OpId> {
    let is_carried = |&id: &OpId| {
        let data = func.op(id);
        let [result] = data.results[..] else { return false };
        let mut users =
            func.block(region).ops.iter().filter(|&&op| func.uses(result).iter().any(|u| is_inside(func, u.op, op)));
        data.op.effects() == Effects::Pure
            && func.ty(result).is_tensor()
            && !behind.contains(&id)
            && !func.uses(result).is_empty()
            && users.all(|op| behind.contains(op))
    };
    func.block(region).ops.iter().copied().filter(is_carried).collect()
}

/// Whether an op is another one, or inside of its regions.
fn is_inside(func: &Func, id: OpId, outer: OpId) -> bool {
    let mut at = Some(id);
    while let Some(id) = at.filter(|&id| id != outer) {
        at = func.parent_op(id);
    }
    at.is_some()
}

/// What the hint of a loop or the options say about overlap.
fn wanted(func: &Func, id: OpId, options: &CompileOptions) -> Option<bool> {
    let Op::For { overlap, .. } = func.op(id).op else { return Some(false) };
    overlap.or(options.schedule.overlap)
}

/// Whether `wgmma` of a loop may overlap with its next iteration.
pub fn is_allowed(func: &Func, id: OpId, options: &CompileOptions) -> bool {
    wanted(func, id, options) != Some(false)
}

/// The programs of a block that runs a loop: its hint, or that of a loop around it.
fn replicas(func: &Func, id: OpId, options: &CompileOptions) -> u32 {
    if options.schedule.warp_specialize != Some(true) {
        return 1;
    }
    let mut loops = std::iter::successors(Some(id), |&inner| func.parent_op(inner));
    let hint = loops.find_map(|id| match func.op(id).op {
        Op::For { replicas, .. } => replicas,
        _ => None,
    });
    hint.unwrap_or(1)
}

/// Registers per thread available to the tiles of a loop; `None` for a loop that asks for overlap, which has no limit.
pub fn register_limit(func: &Func, id: OpId, options: &CompileOptions) -> Option<u32> {
    let share = registers::available(options.num_warps * 32 * replicas(func, id, options));
    let limit = share.min(options.max_registers.unwrap_or(share)).saturating_sub(RESERVED_REGISTERS);
    (wanted(func, id, options) != Some(true)).then_some(limit)
}

/// The `wgmma` to run behind the main stage.
fn choose_behind(func: &Func, region: BlockId, limit: u32) -> Vec<OpId> {
    let mut chained = dependent_dots(func, region);
    while !chained.is_empty() {
        let buffers =
            chained.iter().all(|&id| func.op(id).operands[..2].iter().all(|&v| outlives_iteration(func, region, v)));
        if buffers
            && let Some(behind) = dependent_ops(func, region, &chained)
            && register_pressure(func, region, &behind) <= limit
        {
            return chained;
        }
        chained.remove(0);
    }
    Vec::new()
}

/// The ops of a loop body that have to run in the stage behind if these `wgmma` do: all that depend on their results in
/// the same iteration, and through a carried value. `None` where these include other ops than arithmetic and buffer
/// releases, include another `wgmma`, or where carried values are swapped.
fn dependent_ops(func: &Func, region: BlockId, dots: &[OpId]) -> Option<HashSet<OpId>> {
    let end = func.terminator(region);
    let mut behind: HashSet<OpId> = dots.iter().copied().collect();
    behind.extend(users_of(func, region, dots.iter().map(|&dot| func.result(dot)).collect()));
    loop {
        let users = users_of(func, region, carried_from(func, region, &behind));
        if users.is_subset(&behind) {
            break;
        }
        behind.extend(users);
    }
    let carried = carried_from(func, region, &behind);
    if func.op(end).operands.iter().any(|y| carried.contains(y)) {
        return None;
    }
    let arithmetic = behind.iter().all(|&id| match func.op(id).op {
        Op::Wgmma { .. } => dots.contains(&id),
        Op::WgmmaWait { .. } | Op::MbarrierArrive { .. } => true,
        _ => func.op(id).op.effects() == Effects::Pure,
    });
    arithmetic.then_some(behind)
}

/// The ops of a loop body that depend on these values in the same iteration.
fn users_of(func: &Func, region: BlockId, mut values: HashSet<Value>) -> HashSet<OpId> {
    let end = func.terminator(region);
    let mut users = HashSet::new();
    for &id in func.block(region).ops.iter().filter(|&&id| id != end) {
        if !uses(func, id).is_disjoint(&values) {
            users.insert(id);
            values.extend(&func.op(id).results);
        }
    }
    users
}

/// The carried values of a loop that ops behind compute.
fn carried_from(func: &Func, region: BlockId, behind: &HashSet<OpId>) -> HashSet<Value> {
    stages::carried_from(func, region, behind).map(|(param, _)| param).collect()
}

/// Adds the ops that only ops behind use and that cost nothing to run later: constants, ops that change the shape of a
/// value, and views of buffers. Copies views that both stages use.
fn sink(func: &mut Func, region: BlockId, behind: &mut HashSet<OpId>) {
    let end = func.terminator(region);
    for id in func.block(region).ops.clone().into_iter().rev() {
        if behind.contains(&id) || !is_free_to_sink(&func.op(id).op) {
            continue;
        }
        let result = func.result(id);
        let users: Vec<OpId> =
            func.block(region).ops.iter().copied().filter(|&op| uses(func, op).contains(&result)).collect();
        let (late, other): (Vec<OpId>, Vec<OpId>) =
            users.into_iter().partition(|&op| op != end && behind.contains(&op));
        if late.is_empty() {
            continue;
        }
        if other.is_empty() {
            behind.insert(id);
        } else if matches!(func.ty(result), Type::Shared { .. }) {
            behind.insert(stages::copy_for(func, id, &late));
        }
    }
}

fn is_free_to_sink(op: &Op) -> bool {
    matches!(
        op,
        Op::ExpandDims { .. } | Op::Broadcast | Op::Splat | Op::Constant { .. } | Op::LocalSlot | Op::LocalTrans { .. }
    )
}

/// The `wgmma` of a loop body that only accumulate into a carried value, with operands in shared memory that outlives
/// the iteration.
pub fn accumulating_dots(func: &Func, region: BlockId) -> Vec<OpId> {
    let adds = |&id: &OpId| {
        let Op::Wgmma { .. } = func.op(id).op else { return false };
        let [a, b, acc] = func.op(id).operands[..] else { return false };
        let shared =
            [a, b].iter().all(|&v| matches!(func.ty(v), Type::Shared { .. }) && outlives_iteration(func, region, v));
        shared && func.uses(acc).len() == 1 && stages::accumulator_of(func, region, id).is_some()
    };
    func.block(region).ops.iter().copied().filter(adds).collect()
}

/// The `wgmma` of a block that depend on others of the same iteration.
fn dependent_dots(func: &Func, region: BlockId) -> Vec<OpId> {
    let mut from_dots: HashSet<Value> = HashSet::new();
    let mut found = Vec::new();
    for &id in &func.block(region).ops {
        let is_dot = matches!(func.op(id).op, Op::Wgmma { .. });
        let depends = !uses(func, id).is_disjoint(&from_dots);
        if is_dot && depends {
            found.push(id);
        }
        if is_dot || depends {
            from_dots.extend(&func.op(id).results);
        }
    }
    found
}

/// Whether an operand is still available in the next iteration: a tile in registers, or a buffer that is filled outside
/// of the loop or can be kept in a ring.
pub fn outlives_iteration(func: &Func, region: BlockId, v: Value) -> bool {
    if !matches!(func.ty(v), Type::Shared { .. }) {
        return true;
    }
    let Some(alloc) = filled_in_loop(func, region, v) else { return true };
    let data = func.op(alloc);
    data.op == Op::LocalAlloc
        && data.operands.first().is_some_and(|&tile| {
            let load = func.def_op(tile).filter(|&id| func.is_in(id, region));
            load.is_some_and(|id| matches!(func.op(id).op, Op::LoadView { .. } | Op::Load { .. }))
        })
}

/// The op of a loop body that fills the buffer of a value; `None` for a buffer from outside and for a tile.
fn filled_in_loop(func: &Func, region: BlockId, v: Value) -> Option<OpId> {
    if !matches!(func.ty(v), Type::Shared { .. }) {
        return None;
    }
    let id = func.def_op(v).filter(|&id| func.is_in(id, region))?;
    match func.op(id).op {
        Op::LocalTrans { .. } | Op::LocalSlot => filled_in_loop(func, region, func.op(id).operands[0]),
        _ => Some(id),
    }
}

/// A value in the loop body after rotation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Live {
    Current(Value),
    /// A value of the previous iteration.
    Previous(Value),
}

/// Registers per thread that tiles take in every schedule of a loop: carried values and values from outside.
pub fn register_floor(func: &Func, region: BlockId) -> u32 {
    let end = func.terminator(region);
    let ops = func.block(region).ops.iter().filter(|&&id| id != end);
    let used = ops.flat_map(|&id| sources(func, id)).filter(|&v| match func.value(v).def {
        Def::Param(block, _) => block != region,
        Def::Result(id, _) => !func.is_in(id, region),
    });
    let kept: HashSet<Value> = used.chain(func.op(end).operands.iter().copied()).collect();
    kept.into_iter().map(|v| registers::tile_registers(func, v)).sum()
}

/// The maximum number of registers per thread that tiles take at any point of the loop, after rotation.
pub fn register_pressure(func: &Func, region: BlockId, behind: &HashSet<OpId>) -> u32 {
    let end = func.terminator(region);
    let (second, first): (Vec<OpId>, Vec<OpId>) =
        func.block(region).ops.iter().filter(|&&id| id != end).partition(|id| behind.contains(id));
    let wait = first.iter().position(|&id| matches!(func.op(id).op, Op::WgmmaWait { .. })).unwrap_or(first.len());
    let order = [&first[..wait], &second[..], &first[wait..]].concat();
    let is_late = |v: Value| func.def_op(v).is_some_and(|id| behind.contains(&id));
    let from_behind: HashMap<Value, Value> = stages::carried_from(func, region, behind).collect();
    // Ops of the stage behind use values of the main stage of the previous iteration; ops of the main stage, results of
    // the ops behind that ran before them.
    let live = |op: OpId, v: Value| {
        let inside = func.def_op(v).is_some_and(|id| func.is_in(id, region));
        match from_behind.get(&v) {
            Some(&result) if !behind.contains(&op) => Live::Current(result),
            _ if behind.contains(&op) && inside && !is_late(v) => Live::Previous(v),
            _ => Live::Current(v),
        }
    };
    let mut weights: HashMap<Live, u32> = HashMap::new();
    let used_behind: HashSet<Value> = second.iter().flat_map(|&op| sources(func, op)).collect();
    let carried = func.op(end).operands.iter().zip(&func.block(region).params[1..]);
    let carried = carried.filter(|(_, param)| !from_behind.contains_key(param) || used_behind.contains(param));
    let mut at_end: HashSet<Live> = carried.map(|(&v, _)| Live::Current(v)).collect();
    for &op in &second {
        for v in sources(func, op) {
            if let Live::Previous(v) = live(op, v) {
                at_end.insert(Live::Current(v));
            }
        }
    }
    let invariant: HashSet<Live> = order
        .iter()
        .flat_map(|&op| sources(func, op))
        .filter(|&v| match func.value(v).def {
            Def::Param(block, _) => block != region,
            Def::Result(id, _) => !func.is_in(id, region),
        })
        .map(Live::Current)
        .collect();
    let mut weigh = |l: &Live| {
        let (Live::Current(v) | Live::Previous(v)) = *l;
        *weights.entry(*l).or_insert_with(|| registers::tile_registers(func, v))
    };
    let mut alive: HashSet<Live> = at_end.union(&invariant).copied().collect();
    let mut most = alive.iter().map(&mut weigh).sum::<u32>();
    for &op in order.iter().rev() {
        for &v in &func.op(op).results {
            alive.remove(&Live::Current(v));
        }
        alive.extend(sources(func, op).into_iter().map(|v| live(op, v)));
        alive.extend(&invariant);
        most = most.max(alive.iter().map(&mut weigh).sum());
    }
    most
}

/// The values that an op reads from registers: the sources of shape ops instead of their results.
fn sources(func: &Func, id: OpId) -> Vec<Value> {
    // Shape ops are rematerialized at their uses.
    if registers::is_shape_op(&func.op(id).op) {
        return Vec::new();
    }
    uses(func, id).into_iter().map(|v| registers::source(func, v)).collect()
}
