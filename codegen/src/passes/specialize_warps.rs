//! Warp specialisation: loads that feed products become the work of warps of their own.
//!
//! Does: where loops ask for it, and everything that their products read from memory can be fetched by the bulk copy
//! engine, makes `roles` of the kernel's body. The consumers run the body as it is, but that they wait for a *full*
//! barrier before they use a buffer, and arrive at its *empty* barrier when they have. The producer runs through the same
//! loops with nothing in them but the addresses: it waits for *empty*, and fetches. Loops with buffers of equal types,
//! one after the other, share their rings, so that the producer runs ahead from one loop into the next.
//! Requires: stage laid. Keeps: meaning.
//! Does not: touch a kernel whose addresses or loop bounds come from memory or from a `while`.
//!
//! A ring's state is the slot that comes next and the parity of its phase. It is carried through loops and branches, in
//! both roles alike; for the producer, who waits for the phase *before*, parities are the other way round.

mod build;
mod slice;

use super::pipeline_loads::{Candidate, find, reads_ring};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::{scratch, tensor_map};
use crate::ir::{Func, Op, OpId, Type};
use crate::target::{CompileOptions, GpuArch};
use std::collections::HashMap;

/// Registers of a multiprocessor, and of one thread at most under `setmaxnreg` with room for the driver's own.
const REGISTERS: u32 = 65536;
const MOST_REGISTERS: u32 = 248;

/// Warps that compute, beside the four of the producer's warpgroup: whole warpgroups, and no more than a block has room for.
pub const WARPS: [u32; 3] = [4, 8, 16];

/// One ring of buffers.
struct Ring {
    buffer: Type,
    bytes: u32,
    /// Fetched by the bulk copy engine; else by `cp.async`.
    bulk: bool,
}

impl Ring {
    /// How many of each warp's threads say that a buffer has been read. One for all does, by the memory model; but
    /// compute-sanitizer does not follow it from there to what a `cp.async` writes, and would report a race.
    fn lanes(&self) -> u32 {
        if self.bulk { 1 } else { 32 }
    }
}

/// Rings that fill together.
struct Group {
    rings: Vec<Ring>,
}

/// What becomes of the kernel.
struct Plan {
    groups: Vec<Group>,
    /// Group and loads of each loop that has some.
    loops: HashMap<OpId, (usize, Vec<Candidate>)>,
    stages: u32,
    warps: u32,
    /// How many blocks a multiprocessor has shared memory for.
    blocks: u32,
    /// The most registers that a thread may have at its launch.
    max_registers: Option<u32>,
}

/// See the module's page.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) {
    if arch < GpuArch::Sm90a || !WARPS.contains(&options.num_warps) || !wanted(func, options) {
        return;
    }
    let Some(plan) = Plan::new(func, arch, options) else { return };
    let Some(slice) = slice::Slice::new(func, &plan) else { return };
    build::build(func, &plan, &slice);
}

/// A loop asks for it, or the options do and no loop objects.
pub fn wanted(func: &Func, options: &CompileOptions) -> bool {
    let hints: Vec<bool> = func
        .walk()
        .into_iter()
        .filter_map(|id| match func.op(id).op {
            Op::For { warp_specialize, .. } => warp_specialize,
            _ => None,
        })
        .collect();
    hints.contains(&true) || options.schedule.warp_specialize == Some(true) && !hints.contains(&false)
}

impl Plan {
    fn new(func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Option<Plan> {
        let (warps, max_registers) = (options.num_warps, options.max_registers);
        let mut plan = Plan { groups: Vec::new(), loops: HashMap::new(), stages: 0, warps, blocks: 1, max_registers };
        let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
        for id in loops {
            let candidates = find(func, id);
            if candidates.is_empty() {
                continue;
            }
            let rings = rings(func, &candidates, options.schedule.bulk_copies != Some(false))?;
            let same = |g: &Group| {
                let pairs = || g.rings.iter().zip(&rings);
                g.rings.len() == rings.len() && pairs().all(|(a, b)| a.buffer == b.buffer && a.bulk == b.bulk)
            };
            let group = plan.groups.iter().position(same).unwrap_or_else(|| {
                plan.groups.push(Group { rings });
                plan.groups.len() - 1
            });
            if let Op::For { num_stages, .. } = func.op(id).op {
                plan.stages = plan.stages.max(num_stages.unwrap_or(options.num_stages));
            }
            plan.loops.insert(id, (group, candidates));
        }
        let nested = plan.loops.keys().any(|&id| {
            let inside = func.walk_from(func.op(id).regions[0]);
            inside.iter().any(|inner| plan.loops.contains_key(inner))
        });
        if plan.loops.is_empty() || nested {
            return None;
        }
        let (fixed, rings) = plan.shared_bytes(func);
        plan.stages = plan.stages.min(arch.max_shared_bytes().saturating_sub(fixed) / rings.max(1));
        // A multiprocessor reserves 1 KB for each block, of which one block alone is told nothing.
        plan.blocks = (arch.max_shared_bytes() + 1024) / (fixed + plan.stages * rings + 1024);
        (plan.stages >= 1).then_some(plan)
    }

    /// Bytes of shared memory: of buffers that are in no ring, and what single ops need, as a change of layout does; and of one buffer of each
    /// ring. Rings are there until the kernel ends.
    fn shared_bytes(&self, func: &Func) -> (u32, u32) {
        let ours = |id: OpId| self.loops.values().any(|(_, list)| list.iter().any(|c| c.alloc == Some(id)));
        let size = |ty: &Type| match ty {
            Type::Shared { elem, .. } => (ty.numel() * elem.bytes()).next_multiple_of(1024) as u32,
            _ => 0,
        };
        let others: u32 = func
            .walk()
            .into_iter()
            .filter(|&id| func.op(id).op == Op::LocalAlloc && !ours(id))
            .map(|id| size(func.ty(func.result(id))))
            .sum();
        let of_ring = |id: OpId| self.loops.values().any(|(_, list)| reads_ring(func, id, list));
        let steps = func.walk().into_iter().filter(|&id| !of_ring(id));
        let scratch = steps.map(|id| scratch::bytes(func, id)).max().unwrap_or(0);
        let rings: u32 = self.groups.iter().flat_map(|g| &g.rings).map(|r| size(&r.buffer)).sum();
        // Barriers, and the padding between small buffers.
        (others + scratch + 1024, rings)
    }

    /// Registers of a thread of the consumers and of the producers: what the block has at its launch, handed over. `setmaxnreg.inc`
    /// waits until the block has that many, for ever where it asks for more than the block was launched with. Empty where a launch has
    /// no registers to hand over.
    fn registers(&self) -> Vec<u32> {
        let groups = self.warps / 4 + 1;
        // Two blocks of one group that computes have as many registers for each thread as one of two groups.
        let blocks = if groups == 2 { self.blocks.clamp(1, 2) } else { 1 };
        let each = (REGISTERS / (128 * groups * blocks)).min(self.max_registers.unwrap_or(255)).min(255) / 8 * 8;
        let bulk = self.groups.iter().flat_map(|g| &g.rings).all(|r| r.bulk);
        let producer = if bulk { 24 } else { 40 };
        if each <= producer {
            return Vec::new();
        }
        let consumer = ((each * groups - producer) / (groups - 1) / 8 * 8).min(MOST_REGISTERS);
        vec![consumer, producer]
    }
}

/// The rings for a loop's loads; `None` where a product reads what the engine cannot fetch, or may not.
fn rings(func: &Func, candidates: &[Candidate], engine: bool) -> Option<Vec<Ring>> {
    let axis = AxisAnalysis::new(func);
    candidates
        .iter()
        .map(|c| {
            let Op::LoadView { boundary, .. } = &func.op(c.load).op else { return None };
            let view = func.op(c.load).operands[0];
            let bulk = engine && tensor_map::plan(func, &axis, view, boundary, &c.buffer).is_some();
            let Type::Shared { elem, .. } = c.buffer else { return None };
            let bytes = (c.buffer.numel() * elem.bytes()) as u32;
            // Bytes that `cp.async` writes are not there for `wgmma` without a fence by the writers.
            (bulk || c.alloc.is_none()).then(|| Ring { buffer: c.buffer.clone(), bytes, bulk })
        })
        .collect()
}
