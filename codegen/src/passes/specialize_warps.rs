//! Warp specialization: a producer warp loads the operands of dots for consumer warpgroups.
//!
//! Does: where loops ask for it, and TMA can load everything that their dots read from memory, splits the body of the
//! kernel into two partitions. The consumer partition runs the body, except that it waits for the *full* mbarrier of a
//! buffer before its first use and arrives at its *empty* mbarrier after the last. The producer partition runs the same
//! loops with only the addresses: it waits for *empty*, and loads. Consecutive loops with buffers of equal types share
//! their rings, so that the producer runs ahead from one loop into the next.
//! Requires: stage *layout*.
//! Keeps: results.
//! Does not: change a kernel whose addresses or loop bounds come from memory or from a `while`.
//!
//! The state of a ring is its next slot and the parity of the slot's phase, carried through loops and branches in both
//! partitions. The producer waits for the *previous* phase, so its parities are inverted.

mod build;
mod slice;

use super::pipeline_loads::{Candidate, buffer_bytes, find_candidates, reads_ring};
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::{scratch, tensor_map};
use crate::ir::{Func, Op, OpId, Type};
use crate::target::{CompileOptions, GpuArch};
use std::collections::HashMap;

/// Registers of a streaming multiprocessor (SM).
const REGISTERS: u32 = 65536;
/// The maximum number of registers per thread with `setmaxnreg`: leaves space for the driver.
const MAX_REGISTERS: u32 = 248;

/// Supported numbers of consumer warps, in addition to the four warps of the producer warpgroup: whole warpgroups,
/// within the limit of a block.
pub const CONSUMER_WARPS: [u32; 3] = [4, 8, 16];

/// A ring of buffers.
struct Ring {
    buffer: Type,
    bytes: u32,
    /// Loaded by TMA; otherwise by `cp.async`.
    tma: bool,
}

impl Ring {
    /// The number of threads per warp that arrive at the empty mbarrier. By the memory model one suffices, but
    /// compute-sanitizer does not follow the order from there to the writes of a `cp.async`, and would report a race.
    fn arriving_lanes(&self) -> u32 {
        if self.tma { 1 } else { 32 }
    }
}

/// The rings that one loop fills.
struct RingGroup {
    rings: Vec<Ring>,
}

/// The plan of the transformation.
struct Plan {
    groups: Vec<RingGroup>,
    /// The ring group and the loads of each loop that has loads.
    loops: HashMap<OpId, (usize, Vec<Candidate>)>,
    stages: u32,
    warps: u32,
    /// The number of blocks per SM for which shared memory suffices.
    blocks: u32,
    /// The maximum number of registers per thread at launch.
    max_registers: Option<u32>,
}

/// Runs the pass.
///
/// # Errors
/// The reason why a kernel that asks for warp specialization stays unchanged.
pub fn run(func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Result<(), String> {
    if !is_requested(func, options) {
        return Ok(());
    }
    if arch < GpuArch::Sm90a {
        return Err(format!("{} has no TMA", arch.name()));
    }
    if !CONSUMER_WARPS.contains(&options.num_warps) {
        return Err(format!("num_warps is {}: expected 4, 8 or 16 consumer warps", options.num_warps));
    }
    let plan = Plan::new(func, arch, options)?;
    let slice = slice::Slice::new(func, &plan)?;
    build::build(func, &plan, &slice);
    Ok(())
}

/// Whether a loop asks for warp specialization, or the options do and no loop forbids it.
pub fn is_requested(func: &Func, options: &CompileOptions) -> bool {
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
    fn new(func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Result<Plan, String> {
        let (warps, max_registers) = (options.num_warps, options.max_registers);
        let mut plan = Plan { groups: Vec::new(), loops: HashMap::new(), stages: 0, warps, blocks: 1, max_registers };
        let loops: Vec<OpId> = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect();
        for id in loops {
            // The producer partition computes addresses by scalar arithmetic only.
            let mut candidates = find_candidates(func, id).found;
            candidates.retain(|c| matches!(func.op(c.load).op, Op::LoadView { .. }) && !c.indirect);
            if candidates.is_empty() {
                continue;
            }
            let rings = rings(func, &candidates, options.schedule.tma != Some(false))?;
            let same = |g: &RingGroup| {
                let pairs = || g.rings.iter().zip(&rings);
                g.rings.len() == rings.len() && pairs().all(|(a, b)| a.buffer == b.buffer && a.tma == b.tma)
            };
            let group = plan.groups.iter().position(same).unwrap_or_else(|| {
                plan.groups.push(RingGroup { rings });
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
        if plan.loops.is_empty() {
            return Err("no loop loads operands of dots through block pointers or descriptors".into());
        }
        if nested {
            return Err("a loop that loads operands of dots contains another one".into());
        }
        let (fixed, rings) = plan.shared_bytes(func);
        plan.stages = plan.stages.min(arch.max_shared_bytes().saturating_sub(fixed) / rings.max(1));
        // An SM reserves 1 KB for each block; `max_shared_bytes` excludes the 1 KB of one block.
        plan.blocks = (arch.max_shared_bytes() + 1024) / (fixed + plan.stages * rings + 1024);
        match plan.stages {
            0 => Err(format!("a stage of {rings} bytes does not fit into shared memory in addition to {fixed} bytes")),
            _ => Ok(plan),
        }
    }

    /// Bytes of shared memory: of buffers outside of rings plus the scratch memory of ops such as layout conversions,
    /// and of one buffer of each ring. Rings live until the kernel ends.
    fn shared_bytes(&self, func: &Func) -> (u32, u32) {
        let is_ring_buffer = |id: OpId| self.loops.values().any(|(_, list)| list.iter().any(|c| c.alloc == Some(id)));
        let size = |ty: &Type| match ty {
            Type::Shared { elem, .. } => (ty.numel() * elem.bytes()).next_multiple_of(1024) as u32,
            _ => 0,
        };
        let others: u32 = func
            .walk()
            .into_iter()
            .filter(|&id| func.op(id).op == Op::LocalAlloc && !is_ring_buffer(id))
            .map(|id| size(func.ty(func.result(id))))
            .sum();
        let only_reads_ring = |id: OpId| self.loops.values().any(|(_, list)| reads_ring(func, id, list));
        let ops = func.walk().into_iter().filter(|&id| !only_reads_ring(id));
        let scratch = ops.map(|id| scratch::bytes(func, id)).max().unwrap_or(0);
        let rings: u32 = self.groups.iter().flat_map(|g| &g.rings).map(|r| size(&r.buffer)).sum();
        // Plus 1 KB for mbarriers and for the padding between small buffers.
        (others + scratch + 1024, rings)
    }

    /// Registers per thread of consumers and producer: the registers of the launched block, redistributed by
    /// `setmaxnreg`. `setmaxnreg.inc` waits until the block has enough free registers, forever if it requests more than
    /// the block was launched with. Empty if the launch leaves nothing to redistribute.
    fn registers(&self) -> Vec<u32> {
        let groups = self.warps / 4 + 1;
        // Two blocks with one consumer warpgroup each leave about as many registers per consumer thread as one block
        // with two (232 and 240, if TMA does all loads). More than two would leave fewer.
        let blocks = if groups == 2 { self.blocks.clamp(1, 2) } else { 1 };
        let each = (REGISTERS / (128 * groups * blocks)).min(self.max_registers.unwrap_or(255)).min(255) / 8 * 8;
        let tma = self.groups.iter().flat_map(|g| &g.rings).all(|r| r.tma);
        let producer = if tma { 24 } else { 40 };
        if each <= producer {
            return Vec::new();
        }
        let consumer = ((each * groups - producer) / (groups - 1) / 8 * 8).min(MAX_REGISTERS);
        vec![consumer, producer]
    }
}

/// The rings for the loads of a loop.
///
/// # Errors
/// The operand of a dot that TMA cannot load: always where `allow_tma` is false.
fn rings(func: &Func, candidates: &[Candidate], allow_tma: bool) -> Result<Vec<Ring>, String> {
    let axis = AxisAnalysis::new(func);
    let ring = |c: &Candidate| {
        let data = func.op(c.load);
        let Op::LoadView { boundary, .. } = &data.op else {
            panic!("internal compiler error: a candidate of another op; please report this")
        };
        let tma = allow_tma && tensor_map::plan(func, &axis, data.operands[0], boundary, &c.buffer).is_some();
        // `wgmma` does not see `cp.async` writes without a proxy fence by the writing threads.
        if !tma && c.alloc.is_some() {
            let cause = if allow_tma { "no tensor map describes it" } else { "tma is off" };
            return Err(format!("TMA cannot load the operand of a dot at {}: {cause}", data.loc));
        }
        Ok(Ring { buffer: c.buffer.clone(), bytes: buffer_bytes(&c.buffer) as u32, tma })
    };
    candidates.iter().map(ring).collect()
}
