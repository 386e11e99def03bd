//! Chooses the products of a loop that start or end one iteration late, under the work of the next iteration.
//!
//! Does: in a loop where a product is computed from another one's result (in attention, P V from the scores), marks the
//! later ones `late`, as many of them, from the last one back, as registers allow. `rotate_loops` then moves them.
//! Where nothing but the next iteration's sum needs a product (a plain matrix product), marks it `open`: the next iteration
//! starts its own before it waits for this one. `delay_waits` does that.
//! A late or open product and what needs its result must be arithmetic that the rest of the loop does not need, and its shared
//! operands must come from outside the loop or from memory, so that `pipeline_loads` can keep them longer.
//! Requires: stage laid, products ordered by `order_products`.
//! Keeps: everything; marks are hints.
//! Does not: look into loops inside the loop, nor at products by `mma.sync`, which do not run asynchronously.

use super::edit::{terminator, uses};
use super::late;
use crate::analysis::registers;
use crate::ir::{BlockId, Def, Func, Op, OpId, Type, Value};
use crate::target::CompileOptions;
use std::collections::{HashMap, HashSet};

/// Registers of a thread that addresses, counters and ptxas's alignment take beside the tiles: between 25 and 70 in the
/// attention kernels.
const RESERVED_REGISTERS: u32 = 52;

/// See the module's page.
pub fn run(func: &mut Func, options: &CompileOptions) {
    let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
    for id in loops {
        let Op::For { overlap, .. } = func.op(id).op else { continue };
        let wanted = overlap.or(options.schedule.overlap);
        if wanted == Some(false) {
            continue;
        }
        // Who asks for it gets it, whatever it costs.
        let limit = if wanted == Some(true) { u32::MAX } else { limit(options) };
        let region = func.op(id).regions[0];
        let chosen = choose(func, region, limit);
        for &product in &chosen {
            if let Op::Wgmma { late, .. } = &mut func.op_mut(product).op {
                *late = Some(true);
            }
        }
        let sums = if chosen.is_empty() { sums(func, region) } else { Vec::new() };
        for product in sums {
            if let Op::Wgmma { open, .. } = &mut func.op_mut(product).op {
                *open = Some(true);
            }
        }
    }
}

/// Registers of a thread that the tiles of a loop may take.
fn limit(options: &CompileOptions) -> u32 {
    let share = registers::available(options.num_warps * 32);
    share.min(options.max_registers.unwrap_or(share)).saturating_sub(RESERVED_REGISTERS)
}

/// The products to start late.
fn choose(func: &Func, region: BlockId, limit: u32) -> Vec<OpId> {
    let mut chained = chained(func, region);
    while !chained.is_empty() {
        let buffers = chained.iter().all(|&id| func.op(id).operands[..2].iter().all(|&v| outlasts(func, region, v)));
        if buffers
            && let Some(late) = late::follow(func, region, &chained)
            && pressure(func, region, &late) <= limit
        {
            return chained;
        }
        chained.remove(0);
    }
    Vec::new()
}

/// The products of a loop's block that only add to a carried sum, from shared memory that outlasts the iteration.
fn sums(func: &Func, region: BlockId) -> Vec<OpId> {
    let uses = func.use_counts();
    let adds = |&id: &OpId| {
        let Op::Wgmma { .. } = func.op(id).op else { return false };
        let [a, b, acc] = func.op(id).operands[..] else { return false };
        let shared = [a, b].iter().all(|&v| matches!(func.ty(v), Type::Shared { .. }) && outlasts(func, region, v));
        shared && uses[acc.0 as usize] == 1 && late::sum_of(func, region, id).is_some()
    };
    func.block(region).ops.iter().copied().filter(adds).collect()
}

/// The products of a block that are computed from others of the same iteration.
fn chained(func: &Func, region: BlockId) -> Vec<OpId> {
    let mut from_products: HashSet<Value> = HashSet::new();
    let mut found = Vec::new();
    for &id in &func.block(region).ops {
        let product = matches!(func.op(id).op, Op::Wgmma { .. });
        let depends = !uses(func, id).is_disjoint(&from_products);
        if product && depends {
            found.push(id);
        }
        if product || depends {
            from_products.extend(&func.op(id).results);
        }
    }
    found
}

/// Whether an operand of a product is there in the next iteration too: a tile in registers, or a buffer that is filled
/// outside the loop or can be kept in a ring.
fn outlasts(func: &Func, region: BlockId, v: Value) -> bool {
    if !matches!(func.ty(v), Type::Shared { .. }) {
        return true;
    }
    let Some(id) = func.def_op(v).filter(|id| func.block(region).ops.contains(id)) else { return true };
    let data = func.op(id);
    match data.op {
        Op::LocalTrans { .. } => outlasts(func, region, data.operands[0]),
        Op::LocalAlloc => data.operands.first().is_some_and(|&tile| {
            let load = func.def_op(tile).filter(|id| func.block(region).ops.contains(id));
            load.is_some_and(|id| matches!(func.op(id).op, Op::LoadView { .. }))
        }),
        _ => false,
    }
}

/// A value in the loop's body after rotation.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Live {
    This(Value),
    /// What the iteration before computed.
    Before(Value),
}

/// The most registers of a thread that tiles take at any point of the loop, once the late ops are moved.
fn pressure(func: &Func, region: BlockId, late: &HashSet<OpId>) -> u32 {
    let end = terminator(func, region);
    let (second, first): (Vec<OpId>, Vec<OpId>) =
        func.block(region).ops.iter().filter(|&&id| id != end).partition(|id| late.contains(id));
    let wait = first.iter().position(|&id| matches!(func.op(id).op, Op::WgmmaWait { .. })).unwrap_or(first.len());
    let order = [&first[..wait], &second[..], &first[wait..]].concat();
    let is_late = |v: Value| func.def_op(v).is_some_and(|id| late.contains(&id));
    // Late ops use what the iteration before computed, unless it is late itself.
    let live = |op: OpId, v: Value| {
        let inside = func.def_op(v).is_some_and(|id| func.block(region).ops.contains(&id));
        if late.contains(&op) && inside && !is_late(v) { Live::Before(v) } else { Live::This(v) }
    };
    let mut weights: HashMap<Live, u32> = HashMap::new();
    let mut at_end: HashSet<Live> = func.op(end).operands.iter().map(|&v| Live::This(v)).collect();
    for &op in &second {
        for v in sources(func, op) {
            if let Live::Before(v) = live(op, v) {
                at_end.insert(Live::This(v));
            }
        }
    }
    let invariant: HashSet<Live> = order
        .iter()
        .flat_map(|&op| sources(func, op))
        .filter(|&v| match func.value(v).def {
            Def::Param(block, _) => block != region,
            Def::Result(id, _) => !func.block(region).ops.contains(&id),
        })
        .map(Live::This)
        .collect();
    let mut weigh = |l: &Live| {
        let (Live::This(v) | Live::Before(v)) = *l;
        *weights.entry(*l).or_insert_with(|| registers::of_tile(func, v))
    };
    let mut alive: HashSet<Live> = at_end.union(&invariant).copied().collect();
    let mut most = alive.iter().map(&mut weigh).sum::<u32>();
    for &op in order.iter().rev() {
        for &v in &func.op(op).results {
            alive.remove(&Live::This(v));
        }
        alive.extend(sources(func, op).into_iter().map(|v| live(op, v)));
        alive.extend(&invariant);
        most = most.max(alive.iter().map(&mut weigh).sum());
    }
    most
}

/// What an op reads from registers; through ops that only give another shape to the same numbers.
fn sources(func: &Func, id: OpId) -> Vec<Value> {
    // Shapes are given where they are used.
    if registers::is_shape(&func.op(id).op) {
        return Vec::new();
    }
    uses(func, id).into_iter().map(|v| registers::source(func, v)).collect()
}
