//! The partitions of a warp-specialized kernel: which loads a producer warp performs, for consumer warpgroups.

use super::candidates::{Candidate, find_candidates, scheduled_loads, tma_can_load};
use super::overlap::Prefetch;
use super::prefetch::reads_ring;
use super::slice::Slice;
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::scratch;
use crate::ir::{Func, Op, OpId, Partition, Type};
use crate::target::{CompileOptions, GpuArch};
use std::collections::{HashMap, HashSet};

/// Registers of a streaming multiprocessor (SM).
const REGISTERS: u32 = 65536;
/// The maximum number of registers per thread with `setmaxnreg`: leaves space for the driver.
const MAX_REGISTERS: u32 = 248;

/// Supported numbers of consumer warps, in addition to the four warps of the producer warpgroup: whole warpgroups,
/// within the limit of a block.
pub const CONSUMER_WARPS: [u32; 3] = [4, 8, 16];

/// A ring of buffers.
pub struct Ring {
    /// The type of one buffer.
    pub buffer: Type,
    pub bytes: u32,
    /// Loaded by TMA; otherwise by `cp.async`.
    pub tma: bool,
    /// The index of the ring in its group whose mbarriers track it: its own, or that of a load before it.
    pub tracker: usize,
}

/// A load shares the mbarriers of a load before it of at least this many times its bytes: waiting for both takes hardly
/// longer than for the large one, and each mbarrier costs every iteration a wait and an arrival.
const SHARED_BARRIER_RATIO: usize = 8;

impl Ring {
    /// The number of threads per warp that arrive at the empty mbarrier. By the memory model one suffices, but
    /// compute-sanitizer does not follow the order from there to the writes of a `cp.async`, and would report a race.
    pub fn arriving_lanes(&self) -> u32 {
        if self.tma { 1 } else { 32 }
    }
}

/// The rings that one loop fills.
pub struct RingGroup {
    pub rings: Vec<Ring>,
}

impl RingGroup {
    /// The rings that the mbarriers of a ring track: none if it has no mbarriers of its own.
    pub fn tracked_by(&self, ring: usize) -> impl Iterator<Item = usize> {
        self.rings.iter().enumerate().filter(move |(_, r)| r.tracker == ring).map(|(number, _)| number)
    }
}

/// What a producer loads, and through which rings. Consecutive loops with buffers of equal types share their rings, so
/// that the producer runs ahead from one loop into the next.
pub struct Plan {
    pub groups: Vec<RingGroup>,
    /// The ring group and the loads of each loop that has loads.
    pub loops: HashMap<OpId, (usize, Vec<Candidate>)>,
    /// The buffers of each ring.
    pub stages: u32,
    /// Consumer warps.
    pub warps: u32,
    /// The number of blocks per SM for which shared memory suffices.
    blocks: u32,
    /// The maximum number of registers per thread at launch.
    max_registers: Option<u32>,
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
    /// Chooses the loads of a producer; `None` where neither options nor hints ask for warp specialization.
    ///
    /// # Errors
    /// The reason why a kernel that asks for it is not specialized.
    pub fn choose(func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Result<Option<Plan>, String> {
        if !is_requested(func, options) {
            return Ok(None);
        }
        let mut loops = Vec::new();
        let mut stages = 0;
        for id in func.walk() {
            let Op::For { num_stages, .. } = func.op(id).op else { continue };
            // The producer partition computes addresses by scalar arithmetic only.
            let mut loads = find_candidates(func, id).found;
            loads.retain(|c| matches!(func.op(c.load).op, Op::LoadView { .. }) && !c.indirect);
            if loads.is_empty() {
                continue;
            }
            let axis = AxisAnalysis::new(func);
            let allow_tma = options.schedule.tma != Some(false);
            loads.iter_mut().for_each(|c| c.tma = allow_tma && tma_can_load(func, &axis, c));
            stages = stages.max(num_stages.unwrap_or(options.num_stages));
            loops.push((id, loads));
        }
        let mut plan = Plan::new(func, arch, options, loops)?;
        stages = stages.min(plan.stage_limit(func, arch));
        if stages == 0 {
            let (fixed, rings) = plan.shared_bytes(func);
            return Err(format!(
                "a stage of {rings} bytes does not fit into shared memory in addition to {fixed} bytes"
            ));
        }
        plan.set_stages(func, arch, stages);
        Slice::new(func, &plan)?;
        Ok(Some(plan))
    }

    /// The loads that a schedule gives to a producer; `None` if it gives none.
    ///
    /// # Errors
    /// What cannot be carried out, and why.
    pub fn scheduled(func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Result<Option<Plan>, String> {
        let mut loops = Vec::new();
        for id in func.walk() {
            if !matches!(func.op(id).op, Op::For { .. }) {
                continue;
            }
            let mut loads = scheduled_loads(func, id)?;
            loads.retain(|c| func.op(c.load).place.is_some_and(|place| place.partition == Partition::Producer));
            if !loads.is_empty() {
                loops.push((id, loads));
            }
        }
        let all = || loops.iter().flat_map(|(_, loads)| loads);
        let Some(first) = all().next() else { return Ok(None) };
        if let Some(other) = all().find(|c| c.depth != first.depth) {
            let [a, b] = [first, other].map(|c| func.op(c.load).loc.clone());
            return Err(format!(
                "the producer's loads at {a} and {b} have rings of {} and {} buffers, and should have equal ones",
                first.depth, other.depth
            ));
        }
        let stages = first.depth;
        let mut plan = Plan::new(func, arch, options, loops)?;
        plan.set_stages(func, arch, stages);
        Ok(Some(plan))
    }

    /// A plan without stages.
    fn new(
        func: &Func,
        arch: GpuArch,
        options: &CompileOptions,
        loops: Vec<(OpId, Vec<Candidate>)>,
    ) -> Result<Plan, String> {
        if arch < GpuArch::Sm90a {
            return Err(format!("{} has no TMA", arch.name()));
        }
        let (warps, max_registers) = (options.num_warps, options.max_registers);
        if !CONSUMER_WARPS.contains(&warps) {
            return Err(format!("num_warps is {warps}: expected 4, 8 or 16 consumer warps"));
        }
        if loops.is_empty() {
            return Err("no loop loads operands of dots through block pointers or descriptors".into());
        }
        let mut plan = Plan { groups: Vec::new(), loops: HashMap::new(), stages: 0, warps, blocks: 1, max_registers };
        for (id, loads) in loops {
            let rings = rings(func, &loads, options.schedule.tma != Some(false))?;
            let same = |g: &RingGroup| {
                let pairs = || g.rings.iter().zip(&rings);
                let equal = |(a, b): (&Ring, &Ring)| (&a.buffer, a.tma, a.tracker) == (&b.buffer, b.tma, b.tracker);
                g.rings.len() == rings.len() && pairs().all(equal)
            };
            let group = plan.groups.iter().position(same).unwrap_or_else(|| {
                plan.groups.push(RingGroup { rings });
                plan.groups.len() - 1
            });
            plan.loops.insert(id, (group, loads));
        }
        let nested = plan.loops.keys().any(|&id| {
            let inside = func.walk_from(func.op(id).regions[0]);
            inside.iter().any(|inner| plan.loops.contains_key(inner))
        });
        match nested {
            true => Err("a loop that loads operands of dots contains another one".into()),
            false => Ok(plan),
        }
    }

    fn set_stages(&mut self, func: &Func, arch: GpuArch, stages: u32) {
        let (fixed, rings) = self.shared_bytes(func);
        self.stages = stages;
        // An SM reserves 1 KB for each block; `max_shared_bytes` excludes the 1 KB of one block.
        self.blocks = (arch.max_shared_bytes() + 1024) / (fixed + stages * rings + 1024);
        self.loops.values_mut().flat_map(|(_, loads)| loads).for_each(|c| c.depth = stages);
    }

    /// The maximum number of buffers of each ring for which the shared memory of an SM suffices, for as many blocks.
    pub fn stage_limit(&self, func: &Func, arch: GpuArch) -> u32 {
        let (fixed, rings) = self.shared_bytes(func);
        let share = (arch.max_shared_bytes() + 1024) / self.blocks_per_sm() - 1024;
        share.saturating_sub(fixed) / rings.max(1)
    }

    /// Blocks per SM. Two blocks with one consumer warpgroup each leave about as many registers per consumer thread as
    /// one block with two (232 and 240, if TMA does all loads). More than two would leave fewer.
    pub fn blocks_per_sm(&self) -> u32 {
        if self.warps == 4 { self.blocks.clamp(1, 2) } else { 1 }
    }

    /// The loads of a loop.
    pub fn loads_of(&self, id: OpId) -> Prefetch {
        let loads = self.loops.get(&id).map_or(Vec::new(), |(_, loads)| loads.clone());
        Prefetch { loads, stages: self.stages, partition: Partition::Producer }
    }

    /// Bytes of shared memory: of buffers outside of rings plus the scratch memory of ops such as layout conversions,
    /// and of one buffer of each ring. Rings live until the kernel ends.
    fn shared_bytes(&self, func: &Func) -> (u32, u32) {
        let others: u32 = self.other_buffers(func).into_iter().map(|id| buffer_bytes(func.ty(func.result(id)))).sum();
        let rings: u32 = self.groups.iter().flat_map(|g| &g.rings).map(|r| buffer_bytes(&r.buffer)).sum();
        // Plus 1 KB for mbarriers and for the padding between small buffers.
        (others + self.scratch_bytes(func) + 1024, rings)
    }

    /// The buffers outside of rings.
    fn other_buffers(&self, func: &Func) -> Vec<OpId> {
        let rings: HashSet<OpId> = self.loops.values().flat_map(|(_, list)| list).filter_map(|c| c.alloc).collect();
        let is_other = |&id: &OpId| func.op(id).op == Op::LocalAlloc && !rings.contains(&id);
        func.walk().into_iter().filter(is_other).collect()
    }

    /// Scratch memory of the op that needs most.
    fn scratch_bytes(&self, func: &Func) -> u32 {
        let only_reads_ring = |id: OpId| self.loops.values().any(|(_, list)| reads_ring(func, id, list));
        let ops = func.walk().into_iter().filter(|&id| !only_reads_ring(id));
        ops.map(|id| scratch::bytes(func, id)).max().unwrap_or(0)
    }

    /// Whether a loop can use `more` bytes of shared memory in addition, with as many blocks per SM. While it runs, the
    /// memory of the buffers of other loops is free.
    pub fn has_space(&self, func: &Func, id: OpId, arch: GpuArch, more: u32) -> bool {
        let loops: Vec<OpId> = self.loops.keys().copied().filter(|&other| other != id).collect();
        let in_another = |alloc: OpId| loops.iter().any(|&other| func.is_in(alloc, func.op(other).regions[0]));
        let alive = self.other_buffers(func).into_iter().filter(|&alloc| !in_another(alloc));
        let buffers: u32 = alive.map(|alloc| buffer_bytes(func.ty(func.result(alloc)))).sum();
        let (_, rings) = self.shared_bytes(func);
        let bytes = buffers + self.scratch_bytes(func) + 1024 + self.stages * rings + more;
        (arch.max_shared_bytes() + 1024) / (bytes + 1024) >= self.blocks.max(1)
    }

    /// Registers per thread of consumers and producer: the registers of the launched block, redistributed by
    /// `setmaxnreg`. `setmaxnreg.inc` waits until the block has enough free registers, forever if it requests more than
    /// the block was launched with. Empty if the launch leaves nothing to redistribute.
    pub fn registers(&self) -> Vec<u32> {
        let groups = self.warps / 4 + 1;
        let each =
            (REGISTERS / (128 * groups * self.blocks_per_sm())).min(self.max_registers.unwrap_or(255)).min(255) / 8 * 8;
        let tma = self.groups.iter().flat_map(|g| &g.rings).all(|r| r.tma);
        let producer = if tma { 24 } else { 40 };
        if each <= producer {
            return Vec::new();
        }
        let consumer = ((each * groups - producer) / (groups - 1) / 8 * 8).min(MAX_REGISTERS);
        vec![consumer, producer]
    }
}

/// Bytes of a shared buffer, with its alignment.
pub fn buffer_bytes(ty: &Type) -> u32 {
    match ty {
        Type::Shared { elem, .. } => (ty.numel() * elem.bytes()).next_multiple_of(1024) as u32,
        _ => 0,
    }
}

/// The rings for the loads of a loop.
///
/// # Errors
/// The operand of a dot that TMA does not load.
fn rings(func: &Func, loads: &[Candidate], allow_tma: bool) -> Result<Vec<Ring>, String> {
    let mut rings: Vec<Ring> = Vec::new();
    for c in loads {
        // `wgmma` does not see `cp.async` writes without a proxy fence by the writing threads.
        if !c.tma && c.alloc.is_some() {
            let cause = if allow_tma { "no tensor map describes it" } else { "tma is off" };
            return Err(format!("TMA cannot load the operand of a dot at {}: {cause}", func.op(c.load).loc));
        }
        let bytes = c.buffer_bytes() as u32;
        let is_large = |r: &Ring| c.tma && r.tma && r.bytes as usize >= SHARED_BARRIER_RATIO * c.buffer_bytes();
        let tracker = match rings.last() {
            Some(last) if is_large(&rings[last.tracker]) => last.tracker,
            _ => rings.len(),
        };
        rings.push(Ring { buffer: c.buffer.clone(), bytes, tma: c.tma, tracker });
    }
    Ok(rings)
}
