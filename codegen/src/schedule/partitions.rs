//! The partitions of a warp-specialized kernel: which loads a producer warp performs, for consumer warpgroups.

use super::candidates::{
    Candidate, choose_tma, find_candidates, note_tma, operand_loads, scheduled_loads, tma_can_load,
};
use super::dynamic;
use super::overlap::Prefetch;
use super::prefetch::reads_ring;
use super::slice::Slice;
use super::turns::Turns;
use crate::analysis::axis::AxisAnalysis;
use crate::analysis::buffers::users;
use crate::analysis::{scratch, warp_box};
use crate::ir::nested::{ctas, is_in_loop};
use crate::ir::{BlockId, Func, Op, OpId, Partition, Placement, Type, Value};
use crate::mma;
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
    /// Filled with the same block in all CTAs of the cluster, of which each loads a part for all.
    pub multicast: bool,
}

/// A load shares the mbarriers of a load before it where one dot reads both, so that it waits for both anyway, or where that
/// load has at least this many times its bytes: waiting for both takes hardly longer than for the large one. Each mbarrier
/// costs every iteration a wait and an arrival.
const SHARED_BARRIER_RATIO: usize = 8;

impl Ring {
    /// The number of threads per warp that arrive at the empty mbarrier. By the memory model one suffices, but
    /// compute-sanitizer does not follow the order from there to the writes of a `cp.async`, and would report a race.
    pub fn arriving_lanes(&self) -> u32 {
        if self.tma { 1 } else { 32 }
    }
}

/// The rings that the loads of one block fill.
pub struct RingGroup {
    pub rings: Vec<Ring>,
    /// Filled by loads outside of the scheduled loops, which run once for each run of these loops: one buffer each.
    pub once: bool,
    /// Filled more than once, so that consumers have to release the buffers.
    pub is_refilled: bool,
    /// Filled for each program of the block: the buffer with the number of the program.
    pub replicated: bool,
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
    /// The ring group and the loads of each block that has loads: the body of a loop, or a block outside of these loops.
    pub blocks: HashMap<BlockId, (usize, Vec<Candidate>)>,
    /// The buffers of each ring that a loop fills.
    stages: u32,
    /// Consumer warps of one program.
    pub warps: u32,
    /// The programs of a block for which the producer loads: 1 unless the loops ask for more. They are consecutive on
    /// axis 0, or take turns.
    pub replicas: u32,
    /// The CTAs of a cluster that run one program.
    pub ctas: u32,
    /// How the programs of a block take turns, if the loads of loops differ between them.
    pub turns: Option<Turns>,
    /// The loop whose iterations the producer takes ([`super::dynamic`]), and its `dynamic_index`.
    pub dynamic: Option<(OpId, OpId)>,
    /// The number of blocks per SM for which shared memory suffices.
    blocks_that_fit: u32,
    /// The maximum number of registers per thread at launch.
    max_registers: Option<u32>,
    /// The number that the matrix instructions need.
    min_registers: u32,
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

const NO_LOADS: &str = "no loop has a load that a producer can issue";

fn no_tma(arch: GpuArch) -> String {
    format!("{} has no TMA", arch.name())
}

impl Plan {
    /// Chooses the loads of a producer; `None` where neither options nor hints ask for warp specialization. Notes which of
    /// them TMA does not perform, and where shared memory permits fewer stages than are requested.
    ///
    /// # Errors
    /// The reason why a kernel that asks for it is not specialized.
    pub fn choose(
        func: &mut Func,
        arch: GpuArch,
        options: &CompileOptions,
        notes: &mut Vec<String>,
    ) -> Result<Option<Plan>, String> {
        if !is_requested(func, options) {
            return Ok(None);
        }
        if arch < GpuArch::Sm90a {
            return Err(no_tma(arch));
        }
        let (mut loops, mut refused) = (Vec::new(), Vec::new());
        let allow_tma = options.schedule.tma != Some(false);
        for id in func.walk() {
            let Op::For { num_stages, .. } = func.op(id).op else { continue };
            // The producer partition computes addresses by scalar arithmetic only.
            let candidates = find_candidates(func, id);
            let mut loads = candidates.found;
            let of_dots = loads.iter().filter(|c| c.alloc.is_some() && matches!(func.op(c.load).op, Op::Load { .. }));
            let through_pointers =
                of_dots.map(|c| format!("the load at {} goes through pointers", func.op(c.load).loc));
            let others = candidates.refused.iter().map(|r| format!("the load at {}: {}", r.loc, r.reason));
            // Loops that are copies of each other have the same loads.
            for reason in through_pointers.chain(others) {
                if !refused.contains(&reason) {
                    refused.push(reason);
                }
            }
            loads.retain(|c| matches!(func.op(c.load).op, Op::LoadView { .. }) && !c.indirect);
            if loads.is_empty() {
                continue;
            }
            if allow_tma {
                choose_tma(func, &mut loads);
                // Without the operands of a dot, there is no plan.
                note_tma(func, loads.iter().filter(|c| c.alloc.is_none()), notes);
            }
            loops.push((func.op(id).regions[0], loads, num_stages.unwrap_or(options.num_stages)));
        }
        if loops.is_empty() && !refused.is_empty() {
            return Err(format!("{NO_LOADS}: {}", refused.join("; ")));
        }
        // The loads of a loop around another one do not run ahead of it.
        let all: Vec<BlockId> = loops.iter().map(|(region, ..)| *region).collect();
        loops.retain(|(region, ..)| !is_around(func, *region, &all));
        let stages = loops.iter().map(|(.., stages)| *stages).max().unwrap_or(0);
        let loops: Vec<(BlockId, Vec<Candidate>)> =
            loops.into_iter().map(|(region, loads, _)| (region, loads)).collect();
        let mut plan = Plan::with_stages(func, arch, options, loops.clone(), stages)?;
        // Each load outside of the loops that the producer can issue, where the loops keep their buffers.
        let mut blocks = loops;
        let once = if allow_tma { loads_around(func, &blocks) } else { Vec::new() };
        for (block, load) in once.into_iter().flat_map(|(block, loads)| loads.into_iter().map(move |c| (block, c))) {
            let mut more = blocks.clone();
            match more.iter_mut().find(|(other, _)| *other == block) {
                Some((_, loads)) => loads.push(load),
                None => more.push((block, vec![load])),
            }
            if let Ok(whole) = Plan::with_stages(func, arch, options, more.clone(), stages)
                && (whole.stages, whole.blocks_per_sm()) == (plan.stages, plan.blocks_per_sm())
            {
                (plan, blocks) = (whole, more);
            }
        }
        if let Some((region, _)) = blocks.first()
            && let Some(id) = func.owner(*region)
            && plan.stages < stages
        {
            notes.push(plan.note_of_stages(func, id, arch, stages));
        }
        Ok(Some(plan))
    }

    /// Why a loop has fewer stages than are requested.
    fn note_of_stages(&self, func: &Func, id: OpId, arch: GpuArch, requested: u32) -> String {
        let (fixed, rings) = (self.fixed_bytes(func), self.ring_bytes(func, false, 1));
        format!(
            "the loop at {} has {} of the {requested} pipeline stages that are requested: a stage takes {rings} bytes of \
             shared memory in addition to {fixed} bytes, and a block of {} has {}",
            func.op(id).loc,
            self.stages,
            arch.name(),
            arch.max_shared_bytes()
        )
    }

    /// A plan with at most `stages` buffers per ring, as shared memory permits.
    fn with_stages(
        func: &Func,
        arch: GpuArch,
        options: &CompileOptions,
        blocks: Vec<(BlockId, Vec<Candidate>)>,
        stages: u32,
    ) -> Result<Plan, String> {
        let mut plan = Plan::new(func, arch, options, blocks)?;
        let stages = stages.min(plan.stage_limit(func, arch));
        if stages == 0 {
            let (fixed, rings) = (plan.fixed_bytes(func), plan.ring_bytes(func, false, 1));
            return Err(format!(
                "a stage of {rings} bytes does not fit into shared memory in addition to {fixed} bytes"
            ));
        }
        plan.set_stages(func, arch, stages);
        Slice::new(func, &plan)?;
        Ok(plan)
    }

    /// The loads that a schedule gives to a producer; `None` if it gives none.
    ///
    /// # Errors
    /// What cannot be carried out, and why.
    pub fn scheduled(func: &mut Func, arch: GpuArch, options: &CompileOptions) -> Result<Option<Plan>, String> {
        let mut blocks: Vec<(BlockId, Vec<Candidate>)> = Vec::new();
        for block in blocks_of(func) {
            let mut loads = scheduled_loads(func, block, arch)?;
            loads.retain(|c| func.op(c.load).place.is_some_and(|place| place.partition == Partition::Producer));
            if !loads.is_empty() {
                blocks.push((block, loads));
            }
        }
        let regions: Vec<BlockId> = blocks.iter().map(|(block, _)| *block).collect();
        let in_loops = || blocks.iter().filter(|(block, _)| !is_around(func, *block, &regions));
        let all = || in_loops().flat_map(|(_, loads)| loads);
        let Some(first) = all().next() else { return Ok(None) };
        if let Some(other) = all().find(|c| c.depth != first.depth) {
            let [a, b] = [first, other].map(|c| func.op(c.load).loc.clone());
            return Err(format!(
                "the producer's loads at {a} and {b} have rings of {} and {} buffers, and should have equal ones",
                first.depth, other.depth
            ));
        }
        let stages = first.depth;
        let mut plan = Plan::new(func, arch, options, blocks)?;
        plan.set_stages(func, arch, stages);
        Ok(Some(plan))
    }

    /// A plan without stages.
    fn new(
        func: &Func,
        arch: GpuArch,
        options: &CompileOptions,
        blocks: Vec<(BlockId, Vec<Candidate>)>,
    ) -> Result<Plan, String> {
        if arch < GpuArch::Sm90a {
            return Err(no_tma(arch));
        }
        let (warps, max_registers) = (options.num_warps, options.max_registers);
        if !CONSUMER_WARPS.contains(&warps) {
            return Err(format!("num_warps is {warps}: expected 4, 8 or 16 consumer warps"));
        }
        if blocks.is_empty() {
            return Err(NO_LOADS.into());
        }
        let mut plan = Plan {
            groups: Vec::new(),
            blocks: HashMap::new(),
            stages: 0,
            warps,
            replicas: replicas(func, options)?,
            ctas: ctas(func),
            turns: None,
            dynamic: None,
            blocks_that_fit: 1,
            max_registers,
            min_registers: mma::registers_at_launch(func),
        };
        let regions: Vec<BlockId> = blocks.iter().map(|(block, _)| *block).collect();
        for (block, loads) in blocks {
            let once = is_around(func, block, &regions);
            let rings = rings(func, &loads, once)?;
            // The buffers of blocks around each other are in use at the same time.
            let is_apart = |number: usize| {
                let mut users = plan.blocks.iter().filter(|(_, (group, _))| *group == number);
                users.all(|(&other, _)| !is_within(func, block, other) && !is_within(func, other, block))
            };
            let same = |(number, g): (usize, &RingGroup)| {
                let pairs = || g.rings.iter().zip(&rings);
                let equal = |(a, b): (&Ring, &Ring)| (&a.buffer, a.tma, a.tracker) == (&b.buffer, b.tma, b.tracker);
                g.once == once && g.rings.len() == rings.len() && pairs().all(equal) && is_apart(number)
            };
            let group = plan.groups.iter().enumerate().position(same).unwrap_or_else(|| {
                plan.groups.push(RingGroup { rings, once, is_refilled: false, replicated: false });
                plan.groups.len() - 1
            });
            let is_shared = plan.blocks.values().any(|(other, _)| *other == group);
            plan.groups[group].is_refilled |= is_shared || is_in_loop(func, block);
            plan.blocks.insert(block, (group, loads));
        }
        if plan.replicas > 1 {
            plan.replicate(func)?;
        } else if plan.ctas > 1 {
            plan.find_multicasts(func)?;
        }
        let mut indices = func.walk().into_iter().filter(|&id| func.op(id).op == Op::DynamicIndex);
        plan.dynamic = indices.find_map(|id| Some((dynamic::outer_loop(func, id, &plan).ok()?, id)));
        Ok(plan)
    }

    /// Finds the rings whose loads are the same in all CTAs of the cluster.
    fn find_multicasts(&mut self, func: &Func) -> Result<(), String> {
        let slice = Slice::new(func, self)?;
        let axis = AxisAnalysis::new(func);
        for (number, group) in self.groups.iter_mut().enumerate() {
            for (index, ring) in group.rings.iter_mut().enumerate() {
                let mut loads =
                    self.blocks.values().filter(|(other, _)| *other == number).map(|(_, list)| &list[index]);
                ring.multicast = ring.tma
                    && loads.all(|c| {
                        let same = !slice.varies(func, c.load) && slice.varying_control(func, c.load).is_none();
                        same && tma_can_load(func, &axis, c, self.ctas).is_ok()
                    });
            }
        }
        Ok(())
    }

    /// Whether CTAs of a cluster load for each other.
    pub fn multicasts(&self) -> bool {
        self.groups.iter().flat_map(|group| &group.rings).any(|ring| ring.multicast)
    }

    /// The CTAs that release a buffer of a ring to its producer: all those of the cluster where one of the rings with the
    /// same mbarriers is filled by multicast.
    pub fn releasing_ctas(&self, group: usize, tracker: usize) -> Option<u32> {
        let RingGroup { rings, .. } = &self.groups[group];
        self.groups[group].tracked_by(tracker).any(|ring| rings[ring].multicast).then_some(self.ctas)
    }

    /// Finds the loads that differ between the programs of a block.
    fn replicate(&mut self, func: &Func) -> Result<(), String> {
        let slice = Slice::new(func, self)?;
        let replicas = self.replicas;
        let help = format!(
            "depends on program_id(0) in another way than by program_id(0) / {replicas}: compute it from that, put the loop \
             into an outermost loop `range(program_id(0), …, num_programs(0))`, in which programs take turns, or remove \
             `replicas`"
        );
        let mut loads: Vec<(OpId, usize)> =
            self.blocks.values().flat_map(|(group, loads)| loads.iter().map(|c| (c.load, *group))).collect();
        loads.sort();
        let in_loops = || loads.iter().filter(|(_, group)| !self.groups[*group].once);
        let differs =
            |&(load, _): &(OpId, usize)| slice.varies(func, load) || slice.varying_control(func, load).is_some();
        if in_loops().any(differs)
            && let Some(turns) = Turns::find(func, &Slice::of_programs(func, self, false)?, &self.blocks)?
        {
            if let Some((load, _)) = loads.iter().find(|(_, group)| self.groups[*group].once) {
                let at = &func.op(*load).loc;
                return Err(format!("the load at {at} is outside of the loops in which programs take turns"));
            }
            self.turns = Some(turns);
            return Ok(());
        }
        for (load, group) in loads {
            let loc = &func.op(load).loc;
            if let Some(control) = slice.varying_control(func, load) {
                let (what, at) = (func.op(control).op.mnemonic(), &func.op(control).loc);
                return Err(format!(
                    "replicas is {replicas}, and the load at {loc} is in the `{what}` at {at}, which {help}"
                ));
            }
            let varies = slice.varies(func, load);
            let RingGroup { once, .. } = self.groups[group];
            let can_differ = once && slice.is_computed_by_ops(func, func.op(load).operands[0]);
            if varies && !can_differ {
                return Err(format!("replicas is {replicas}, and the address of the load at {loc} {help}"));
            }
            self.groups[group].replicated |= varies;
        }
        Ok(())
    }

    /// The buffers of each ring of a group.
    pub fn depth(&self, group: usize) -> u32 {
        match self.groups[group] {
            RingGroup { replicated: true, .. } => self.replicas,
            RingGroup { once: true, .. } => 1,
            _ => self.stages,
        }
    }

    /// The warps that read a buffer of a group.
    pub fn readers(&self, group: usize) -> u32 {
        let of_one = self.groups[group].replicated || self.turns.is_some();
        if of_one { self.warps } else { self.warps * self.replicas }
    }

    fn set_stages(&mut self, func: &Func, arch: GpuArch, stages: u32) {
        self.stages = stages;
        // An SM reserves 1 KB for each block; `max_shared_bytes` excludes the 1 KB of one block.
        let bytes = self.fixed_bytes(func) + self.ring_bytes(func, false, stages);
        let bytes = bytes.max(self.bytes_after_loops(func));
        self.blocks_that_fit = (arch.max_shared_bytes() + 1024) / (bytes + 1024);
        let depths: Vec<u32> = (0..self.groups.len()).map(|group| self.depth(group)).collect();
        for (group, loads) in self.blocks.values_mut() {
            loads.iter_mut().for_each(|c| c.depth = depths[*group]);
        }
    }

    /// The maximum number of buffers of each ring for which the shared memory of an SM suffices, for as many blocks.
    pub fn stage_limit(&self, func: &Func, arch: GpuArch) -> u32 {
        let share = (arch.max_shared_bytes() + 1024) / self.blocks_per_sm() - 1024;
        let fixed = self.fixed_bytes(func);
        // A stage has a byte at least, so this ends.
        let fits = |&stages: &u32| fixed + self.ring_bytes(func, false, stages) <= share;
        (1..=share).take_while(fits).last().unwrap_or(0)
    }

    /// Blocks per SM. Two blocks with one consumer warpgroup each leave about as many registers per consumer thread as
    /// one block with two (232 and 240, if TMA does all loads). More than two would leave fewer. Two are launched with 128.
    pub fn blocks_per_sm(&self) -> u32 {
        let is_narrow = self.warps == 4 && self.replicas == 1 && self.min_registers <= REGISTERS / (2 * 256);
        if is_narrow { self.blocks_that_fit.clamp(1, 2) } else { 1 }
    }

    /// The number of loops with loads.
    pub fn num_loops(&self) -> usize {
        self.blocks.values().filter(|(group, _)| !self.groups[*group].once).count()
    }

    /// Whether a loop contains others with loads.
    pub fn is_around_loops(&self, func: &Func, region: BlockId) -> bool {
        self.blocks.keys().any(|&inner| is_within(func, inner, region))
    }

    /// The loads of a loop.
    pub fn loads_of(&self, region: BlockId) -> Prefetch {
        let of_loop = self.blocks.get(&region).filter(|(group, _)| !self.groups[*group].once);
        let loads = of_loop.map_or(Vec::new(), |(_, loads)| loads.clone());
        Prefetch { loads, stages: self.stages, partition: Partition::Producer }
    }

    /// Gives the loads outside of the loops their placements.
    pub fn place_around(&self, func: &mut Func) {
        for (_, loads) in self.blocks.values().filter(|(group, _)| self.groups[*group].once) {
            for c in loads {
                let partition = Partition::Producer;
                let place = Placement { partition, depth: Some(1), tma: c.tma, ..Placement::default() };
                func.set_place(c.load, Some(place));
            }
        }
    }

    /// Bytes of shared memory that do not depend on the number of stages: of buffers, plus the scratch memory of ops up to
    /// the last use of a ring, such as layout conversions.
    fn fixed_bytes(&self, func: &Func) -> u32 {
        // Plus 1 KB for mbarriers and for the padding between small buffers.
        let own = self.of_all_programs(self.other_bytes(func) + self.scratch_bytes(func, false));
        let own = own + self.bytes_of_index();
        own + self.ring_bytes(func, true, 1) + 1024
    }

    /// Bytes of the buffer for the index of the next iteration, with its alignment.
    fn bytes_of_index(&self) -> u32 {
        if self.dynamic.is_some() { 1024 } else { 0 }
    }

    /// Bytes of shared memory when the rings are no longer used.
    fn bytes_after_loops(&self, func: &Func) -> u32 {
        self.other_bytes(func) + self.scratch_bytes(func, true) + 1024
    }

    /// Bytes of the buffers outside of rings, and of those of TMA stores: the most that a loop and the code around it need.
    fn other_bytes(&self, func: &Func) -> u32 {
        let of_loops = self.blocks.keys().map(|&region| self.bytes_while(func, region));
        of_loops.max().unwrap_or(0) + warp_box::buffers(func).1
    }

    /// Bytes of the buffers outside of rings, but for those of other loops, whose memory is free while this loop runs.
    fn bytes_while(&self, func: &Func, region: BlockId) -> u32 {
        let loops = self.blocks.iter().filter(|(other, (group, _))| **other != region && !self.groups[*group].once);
        let in_another = |alloc: OpId| loops.clone().any(|(&other, _)| func.is_in(alloc, other));
        let alive = self.other_buffers(func).into_iter().filter(|&alloc| !in_another(alloc));
        alive.map(|alloc| buffer_bytes(func, func.ty(func.result(alloc)))).sum()
    }

    /// Bytes of the memory of which each program of the block has its own, in multiples of 1 KB if there are several.
    fn of_all_programs(&self, bytes: u32) -> u32 {
        if self.replicas > 1 { self.replicas * bytes.next_multiple_of(1024) } else { bytes }
    }

    /// Bytes of the rings of loops or outside of them, with `depth` buffers of each, and their alignment.
    fn ring_bytes(&self, func: &Func, once: bool, depth: u32) -> u32 {
        let groups = self.groups.iter().filter(|group| group.once == once);
        let bytes = |group: &RingGroup| -> u32 {
            let depth = if group.replicated { self.replicas * depth } else { depth };
            group.rings.iter().map(|r| (func.shared_bytes(&r.buffer) as u32 * depth).next_multiple_of(1024)).sum()
        };
        groups.map(bytes).sum()
    }

    /// The buffers outside of rings.
    fn other_buffers(&self, func: &Func) -> Vec<OpId> {
        let rings: HashSet<OpId> = self.blocks.values().flat_map(|(_, list)| list).filter_map(|c| c.alloc).collect();
        let is_other = |&id: &OpId| func.op(id).op == Op::LocalAlloc && !rings.contains(&id);
        func.walk().into_iter().filter(is_other).collect()
    }

    /// Scratch memory of the op that needs most, after the last use of a ring or before. Programs that share rings use them
    /// until the block ends.
    fn scratch_bytes(&self, func: &Func, after: bool) -> u32 {
        let only_reads_ring = |id: OpId| self.blocks.values().any(|(_, list)| reads_ring(func, id, list));
        let outermost = |id: OpId| {
            let around = std::iter::successors(Some(id), |&id| func.parent_op(id));
            around.last().map_or(0, |id| func.position(id))
        };
        let order = func.walk();
        let readers = |c: &Candidate| {
            let of_buffer = c.alloc.map_or_else(Vec::new, |alloc| users(func, &order, func.result(alloc)));
            let of_load = func.uses(func.result(c.load)).iter().map(|used| used.op);
            of_load.chain([c.load]).chain(of_buffer).collect::<Vec<_>>()
        };
        let loads = self.blocks.values().flat_map(|(_, list)| list);
        let last = loads.flat_map(readers).map(outermost).max().unwrap_or(0);
        let is_after = |id: OpId| self.replicas == 1 && outermost(id) > last;
        let ops = func.walk().into_iter().filter(|&id| !only_reads_ring(id) && is_after(id) == after);
        ops.map(|id| scratch::bytes(func, id)).max().unwrap_or(0)
    }

    /// Whether a loop can use `more` bytes of shared memory in addition, with as many blocks per SM.
    pub fn has_space(&self, func: &Func, id: OpId, arch: GpuArch, more: u32) -> bool {
        let buffers = self.bytes_while(func, func.op(id).regions[0]);
        let rings = self.ring_bytes(func, true, 1) + self.ring_bytes(func, false, self.stages);
        let stores = warp_box::buffers(func).1;
        let own = self.of_all_programs(buffers + stores + self.scratch_bytes(func, false) + more);
        let bytes = own + 1024 + rings + self.bytes_of_index();
        (arch.max_shared_bytes() + 1024) / (bytes + 1024) >= self.blocks_that_fit.max(1)
    }

    /// Registers per thread of consumers and producer: the registers of the launched block, redistributed by
    /// `setmaxnreg`. `setmaxnreg.inc` waits until the block has enough free registers, forever if it requests more than
    /// the block was launched with. Empty if the launch leaves nothing to redistribute.
    pub fn registers(&self) -> Vec<u32> {
        let groups = self.replicas * self.warps / 4 + 1;
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

/// The programs of a block that the loops ask for.
///
/// # Errors
/// Options that do not go together with replicas.
fn replicas(func: &Func, options: &CompileOptions) -> Result<u32, String> {
    let hint = |id: OpId| match func.op(id).op {
        Op::For { replicas, .. } => replicas.map(|count| (count, id)),
        _ => None,
    };
    let hints: Vec<(u32, OpId)> = func.walk().into_iter().filter_map(hint).collect();
    let Some(&(count, first)) = hints.first() else { return Ok(1) };
    if let Some((other, id)) = hints.iter().find(|(other, _)| *other != count) {
        let [a, b] = [first, *id].map(|id| &func.op(id).loc);
        return Err(format!("the loops at {a} and {b} have replicas {count} and {other}: give both the same number"));
    }
    if let Some(&wait) = func.walk().iter().find(|&&id| func.op(id).op == Op::SemaphoreWait) {
        return Err(format!(
            "replicas is {count}, and a program that waits for the semaphore at {} would hold the buffers that it shares with \
             others: remove `replicas`",
            func.op(wait).loc
        ));
    }
    let warps = options.num_warps;
    if ctas(func) > 1 {
        return Err(format!("replicas is {count}, and num_ctas is {}: one of the two can be above 1", ctas(func)));
    }
    if warps != 4 {
        return Err(format!(
            "num_warps is {warps}, and each of {count} replicas has one warpgroup: set num_warps = 4, or remove `replicas`"
        ));
    }
    Ok(count)
}

/// The blocks of loops and branches, and the body, from the outside in.
fn blocks_of(func: &Func) -> Vec<BlockId> {
    let is_control = |id: &OpId| matches!(func.op(*id).op, Op::For { .. } | Op::While | Op::If);
    let regions = func.walk().into_iter().filter(is_control).flat_map(|id| func.op(id).regions.clone());
    std::iter::once(func.body).chain(regions).collect()
}

/// Whether one of these blocks is inside of `block`.
fn is_around(func: &Func, block: BlockId, all: &[BlockId]) -> bool {
    all.iter().any(|&inner| inner != block && is_within(func, inner, block))
}

/// Whether a block is inside of another one.
pub(super) fn is_within(func: &Func, block: BlockId, outer: BlockId) -> bool {
    let mut owners = std::iter::successors(func.owner(block), |&owner| func.parent_op(owner));
    owners.any(|owner| func.is_in(owner, outer))
}

/// The loads around the loops of a producer that it can do too: operands of dots in shared memory, by TMA.
fn loads_around(func: &mut Func, loops: &[(BlockId, Vec<Candidate>)]) -> Vec<(BlockId, Vec<Candidate>)> {
    let mut around: Vec<BlockId> = blocks_of(func);
    around.retain(|&block| loops.iter().any(|&(region, _)| is_within(func, region, block)));
    let candidates = around.into_iter().map(|block| (block, operand_loads(func, block)));
    candidates.filter(|(_, loads)| !loads.is_empty()).collect()
}

/// Bytes of a shared buffer, with its alignment.
pub fn buffer_bytes(func: &Func, ty: &Type) -> u32 {
    func.shared_bytes(ty).next_multiple_of(1024) as u32
}

/// The rings for the loads of a loop.
///
/// # Errors
/// The operand of a dot that TMA does not load.
fn rings(func: &Func, loads: &[Candidate], once: bool) -> Result<Vec<Ring>, String> {
    let mut rings: Vec<Ring> = Vec::new();
    let dots: Vec<HashSet<OpId>> = loads.iter().map(|c| dots_of(func, c)).collect();
    for (number, c) in loads.iter().enumerate() {
        // `wgmma` does not see `cp.async` writes without a proxy fence by the writing threads.
        if !c.tma && c.alloc.is_some() {
            let cause = c.no_tma.as_deref().unwrap_or("tma is off");
            return Err(format!("TMA cannot load the operand of a dot at {}: {cause}", func.op(c.load).loc));
        }
        let bytes = c.buffer_bytes() as u32;
        let is_large = |r: &Ring| r.bytes as usize >= SHARED_BARRIER_RATIO * c.buffer_bytes();
        let with_dot = (0..number).find(|&other| !dots[other].is_disjoint(&dots[number]));
        let with_large = || rings.last().map(|last| last.tracker).filter(|&tracker| is_large(&rings[tracker]));
        let tracker = with_dot.map(|other| rings[other].tracker).or_else(with_large);
        // A load around loops may come after one of them.
        let tracker = tracker.filter(|&tracker| !once && c.tma && rings[tracker].tma).unwrap_or(number);
        rings.push(Ring { buffer: c.buffer.clone(), bytes, tma: c.tma, tracker, multicast: false });
    }
    Ok(rings)
}

/// The dots that read the buffer of a load.
fn dots_of(func: &Func, c: &Candidate) -> HashSet<OpId> {
    let mut dots = HashSet::new();
    let mut buffers: Vec<Value> = c.alloc.map(|alloc| func.result(alloc)).into_iter().collect();
    while let Some(buffer) = buffers.pop() {
        for used in func.uses(buffer) {
            let data = func.op(used.op);
            match data.op {
                Op::LocalTrans { .. } => buffers.extend(&data.results),
                Op::Wgmma { .. } | Op::MmaSync { .. } => _ = dots.insert(used.op),
                _ => {}
            }
        }
    }
    dots
}
