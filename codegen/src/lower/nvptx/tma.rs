//! mbarriers, TMA copies, warp specialization, and ping-pong barriers.

use super::emit::Val;
use super::{Lowering, Result};
use crate::analysis::tensor_map::{self, BoxCopy};
use crate::ir::{Elem, Op, OpId, Type, Value};
use crate::target::{ArgDesc, ArgType, TensorMapDesc};

/// The size of an mbarrier, in bytes.
pub(super) const MBARRIER_BYTES: u32 = 8;

/// TMA copies between a block of global memory and a shared buffer.
pub(super) struct TmaCopies {
    map: Val,
    /// The coordinates of the block in i32, by dimension of the map.
    pub at: Vec<Val>,
    /// The byte offset of the buffer.
    pub buffer: Val,
    boxes: Vec<BoxCopy>,
}

impl TmaCopies {
    /// The rank of the map, and the operand of `cp.async.bulk.tensor` for the map `map` and the coordinates from operand
    /// `first` on.
    fn coordinates(&self, map: &str, first: usize) -> (usize, String) {
        let list: Vec<String> = (first..first + self.at.len()).map(|i| format!("${i}")).collect();
        (self.at.len(), format!("[{map}, {{{}}}]", list.join(",")))
    }

    pub fn rank(&self) -> usize {
        self.at.len()
    }

    /// The instruction of a copy to global memory, or of an addition to it.
    pub fn store_text(&self, adds: bool) -> String {
        let (rank, at) = self.coordinates("$0", 1);
        let [name, op] = if adds { ["cp.reduce", ".add"] } else { ["cp", ""] };
        format!("{name}.async.bulk.tensor.{rank}d.global.shared::cta{op}.tile.bulk_group {at}, [${}];", 1 + rank)
    }
}

impl Lowering<'_> {
    /// i1: this thread acts for its warp.
    pub(super) fn first_lane(&mut self) -> Val {
        self.e.hoist(format!("icmp eq i32 {}, 0", self.threads.lane))
    }

    /// i1: this thread acts for its partition (or its block).
    pub(super) fn leader(&mut self) -> Val {
        let lane = self.first_lane();
        let warp = self.e.hoist(format!("icmp eq i32 {}, 0", self.threads.warp));
        self.e.hoist(format!("and i1 {lane}, {warp}"))
    }

    /// i1: this thread is the [leader](Self::leader), and the predicate, if there is one, holds.
    fn acting_thread(&mut self, predicate: Option<&Value>) -> Val {
        let leader = self.leader();
        match predicate {
            Some(&v) => {
                let on = self.scalar(v);
                self.e.inst(format!("and i1 {on}, {leader}"))
            }
            None => leader,
        }
    }

    /// The pointer to one mbarrier of a group.
    fn mbarrier_at(&mut self, group: Value, index: Value) -> Val {
        let (base, index) = (self.scalar(group), self.scalar(index));
        let offset = self.e.inst(format!("mul i32 {index}, {MBARRIER_BYTES}"));
        let at = self.e.inst(format!("add i32 {base}, {offset}"));
        self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {at}"))
    }

    /// Emits synchronizing inline assembly with the address of the mbarrier as `$0`.
    fn mbarrier_asm(&mut self, text: &str, barrier: &str) {
        self.e.void(format!("call void asm sideeffect \"{text}\", \"r,~{{memory}}\"(ptr addrspace(3) {barrier}) #1"));
    }

    pub(super) fn mbarrier_alloc(&mut self, id: OpId) {
        let data = self.func.op(id);
        let Op::MbarrierAlloc { arrivals } = data.op else { panic!("internal compiler error: not an mbarrier_alloc") };
        let base = self.plan.offset(id);
        self.values[data.results[0].0 as usize] = Some(std::rc::Rc::new(vec![base.to_string()]));
        let count = self.mbarrier_count(data.results[0]);
        let leader = self.leader();
        self.when(Some(leader), |this| {
            for i in 0..count {
                let p = this.mbarrier_pointer(base, i);
                this.mbarrier_asm(&format!("mbarrier.init.shared::cta.b64 [$0], {arrivals};"), &p);
            }
            this.e.void("call void asm sideeffect \"fence.mbarrier_init.release.cluster;\", \"~{memory}\"()");
        });
    }

    pub(super) fn mbarrier_free(&mut self, id: OpId) {
        let group = self.func.op(id).operands[0];
        let alloc = self.func.def_op(group).expect("internal compiler error: mbarriers without an mbarrier_alloc");
        let (base, count) = (self.plan.offset(alloc), self.mbarrier_count(group));
        let leader = self.leader();
        self.when(Some(leader), |this| {
            for i in 0..count {
                let p = this.mbarrier_pointer(base, i);
                this.mbarrier_asm("mbarrier.inval.shared::cta.b64 [$0];", &p);
            }
        });
    }

    fn mbarrier_count(&self, group: Value) -> u32 {
        match self.func.ty(group) {
            Type::Barrier { count } => *count as u32,
            other => panic!("internal compiler error: {other} is not a group of mbarriers"),
        }
    }

    fn mbarrier_pointer(&mut self, base: u32, index: u32) -> Val {
        let at = base + index * MBARRIER_BYTES;
        self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {at}"))
    }

    pub(super) fn mbarrier_expect(&mut self, id: OpId) {
        let data = self.func.op(id);
        let Op::MbarrierExpect { bytes } = data.op else { panic!("internal compiler error: not an mbarrier_expect") };
        let acting_thread = self.acting_thread(data.operands.get(2));
        let p = self.mbarrier_at(data.operands[0], data.operands[1]);
        self.when(Some(acting_thread), |this| {
            this.mbarrier_asm(&format!("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {bytes};"), &p);
        });
    }

    pub(super) fn mbarrier_arrive(&mut self, id: OpId) {
        let data = self.func.op(id);
        let Op::MbarrierArrive { lanes, ctas, .. } = data.op else {
            panic!("internal compiler error: not an mbarrier_arrive")
        };
        let p = self.mbarrier_at(data.operands[0], data.operands[1]);
        if let Some(ctas) = ctas {
            return self.arrive_in_cluster(&p, lanes, ctas);
        }
        if lanes == 32 {
            self.mbarrier_asm("mbarrier.arrive.shared::cta.b64 _, [$0];", &p);
            return;
        }
        self.warp_barrier();
        let first = self.first_lane();
        // Predicated: a branch would end where the paths around it meet, and ptxas would take what loops carry there, such as the
        // slots of rings, for values that differ between threads: it would keep no descriptors of `wgmma` in uniform registers.
        self.e.void(format!(
            "call void asm sideeffect \"@$0 mbarrier.arrive.shared::cta.b64 _, [$1];\", \"b,r,~{{memory}}\"(i1 {first}, ptr addrspace(3) {p}) #1"
        ));
    }

    /// Arrives at the mbarriers at this address of all CTAs of the cluster: lane `i` of a warp at that of rank `i`, or each lane
    /// at all of them. The default semantics suffice (as in CUTLASS): the arrival publishes no writes, only that the buffer has
    /// been read.
    fn arrive_in_cluster(&mut self, barrier: &str, lanes: u32, ctas: u32) {
        let text = "{.reg .b32 at; mapa.shared::cluster.u32 at, $0, $1; mbarrier.arrive.shared::cluster.b64 _, [at];}";
        let arrive = |this: &mut Self, rank: &str| {
            this.e.void(format!(
                "call void asm sideeffect \"{text}\", \"r,r,~{{memory}}\"(ptr addrspace(3) {barrier}, i32 {rank}) #1"
            ));
        };
        if lanes == 32 {
            (0..ctas).for_each(|rank| arrive(self, &rank.to_string()));
            return;
        }
        self.warp_barrier();
        let lane = self.threads.lane.clone();
        let first = self.e.hoist(format!("icmp ult i32 {lane}, {ctas}"));
        self.when(Some(first), |this| arrive(this, &lane));
    }

    /// Takes the next iteration of a loop for the block, by one thread.
    pub(super) fn take_index(&mut self, id: OpId) {
        let data = self.func.op(id);
        let [counter, _, step, end, buffer, ..] = [0, 1, 2, 3, 4].map(|i| self.scalar(data.operands[i]));
        let barrier = self.mbarrier_at(data.operands[5], data.operands[6]);
        let leader = self.leader();
        // All threads of the warp have read the index before.
        self.warp_barrier();
        self.when(Some(leader), |this| {
            let before =
                this.e.inst(format!("atomicrmw add ptr addrspace(1) {counter}, i32 1 syncscope(\"device\") monotonic"));
            // A take follows each iteration that runs, so there are `end` of them.
            let last = this.e.inst(format!("sub i32 {end}, 1"));
            let is_last = this.e.inst(format!("icmp eq i32 {before}, {last}"));
            this.when(Some(is_last), |this| {
                this.e
                    .inst(format!("atomicrmw xchg ptr addrspace(1) {counter}, i32 0 syncscope(\"device\") monotonic"));
            });
            // Both terms are below 2³¹. No index is beyond `end`, so that none is negative.
            let next = this.e.inst(format!("add i32 {step}, {before}"));
            let next = this.e.call("i32", "llvm.umin.i32", &[("i32", &next), ("i32", &end)]);
            let at = this.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {buffer}"));
            this.e.void(format!("store i32 {next}, ptr addrspace(3) {at}"));
            this.mbarrier_asm("mbarrier.arrive.shared::cta.b64 _, [$0];", &barrier);
        });
    }

    pub(super) fn taken_index(&mut self, id: OpId) {
        let data = self.func.op(id);
        let buffer = self.scalar(data.operands[0]);
        let at = self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {buffer}"));
        let index = self.e.inst(format!("load i32, ptr addrspace(3) {at}"));
        let index = self.marked_uniform(&index);
        self.set(data.results[0], vec![index]);
    }

    /// Emits a barrier of all threads of the cluster.
    pub(super) fn cluster_barrier(&mut self) {
        self.e.void(
            "call void asm sideeffect \"barrier.cluster.arrive.release; barrier.cluster.wait.acquire;\", \"~{memory}\"() #1",
        );
    }

    pub(super) fn async_arrive(&mut self, id: OpId) {
        let data = self.func.op(id);
        let p = self.mbarrier_at(data.operands[0], data.operands[1]);
        self.mbarrier_asm("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$0];", &p);
    }

    pub(super) fn mbarrier_wait(&mut self, id: OpId) {
        let data = self.func.op(id);
        let p = self.mbarrier_at(data.operands[0], data.operands[1]);
        let parity = self.scalar(data.operands[2]);
        let predicate = data.operands.get(3).map(|&v| self.scalar(v));
        self.when(predicate, |this| {
            // Labels are local to the braces.
            this.e.void(format!(
                "call void asm sideeffect \"{{.reg .pred done; again: mbarrier.try_wait.parity.shared::cta.b64 done, [$0], $1; @!done bra again;}}\", \"r,r,~{{memory}}\"(ptr addrspace(3) {p}, i32 {parity}) #1"
            ));
        });
    }

    pub(super) fn tma_load(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::TmaLoad { boundary, ctas } = &data.op else { panic!("internal compiler error: not a TMA load") };
        let copies = self.tma_copies(data.operands[0], data.operands[1], boundary, ctas.unwrap_or(1))?;
        if let Some(ctas) = *ctas {
            self.multicast(id, &copies, ctas);
            return Ok(());
        }
        let acting_thread = self.acting_thread(data.operands.get(4));
        let barrier = self.mbarrier_at(data.operands[2], data.operands[3]);
        let (rank, at) = copies.coordinates("$1", 2);
        let text = format!(
            "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], {at}, [${}];",
            2 + rank
        );
        let constraints = format!("r,l,{},r,~{{memory}}", vec!["r"; rank].join(","));
        self.when(Some(acting_thread), |this| {
            for copy in &copies.boxes {
                let (buffer, coordinates) = this.tma_box(&copies, copy);
                this.e.void(format!(
                    "call void asm sideeffect \"{text}\", \"{constraints}\"({buffer}, ptr {}, {coordinates}, ptr addrspace(3) {barrier}) #1",
                    copies.map
                ));
            }
        });
        Ok(())
    }

    /// Each CTA copies its part of the boxes to all `ctas` CTAs of the cluster.
    fn multicast(&mut self, id: OpId, copies: &TmaCopies, ctas: u32) {
        let data = self.func.op(id);
        let acting_thread = self.acting_thread(data.operands.get(4));
        let barrier = self.mbarrier_at(data.operands[2], data.operands[3]);
        let (rank, at) = copies.coordinates("$1", 2);
        let text = format!(
            "cp.async.bulk.tensor.{rank}d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [$0], {at}, [${}], ${};",
            2 + rank,
            3 + rank
        );
        let constraints = format!("r,l,{},r,h,~{{memory}}", vec!["r"; rank].join(","));
        let (own, all) = (self.cta_rank(), (1u32 << ctas) - 1);
        for (cta, boxes) in copies.boxes.chunks(copies.boxes.len() / ctas as usize).enumerate() {
            let is_own = self.e.hoist(format!("icmp eq i32 {own}, {cta}"));
            let acts = self.e.inst(format!("and i1 {acting_thread}, {is_own}"));
            self.when(Some(acts), |this| {
                for copy in boxes {
                    let (buffer, coordinates) = this.tma_box(copies, copy);
                    this.e.void(format!(
                        "call void asm sideeffect \"{text}\", \"{constraints}\"({buffer}, ptr {}, {coordinates}, ptr addrspace(3) {barrier}, i16 {all}) #1",
                        copies.map
                    ));
                }
            });
        }
    }

    /// Starts one copy to global memory.
    pub(super) fn issue_store(&mut self, copies: &TmaCopies, text: &str, copy: &BoxCopy) {
        let constraints = format!("l,{},r,~{{memory}}", vec!["r"; copies.rank()].join(","));
        let (buffer, coordinates) = self.tma_box(copies, copy);
        self.e.void(format!(
            "call void asm sideeffect \"{text}\", \"{constraints}\"(ptr {}, {coordinates}, {buffer}) #1",
            copies.map
        ));
    }

    pub(super) fn prefetch_view(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::PrefetchView { boundary } = &data.op else { panic!("internal compiler error: not a prefetch") };
        let plan = tensor_map::plan_dense(self.func, &self.axis, data.operands[0], boundary);
        let copies = self.planned_or_unsupported(data.operands[0], plan)?;
        let (rank, at) = copies.coordinates("$1", 2);
        let text = format!("@$0 cp.async.bulk.prefetch.tensor.{rank}d.L2.global.tile {at};");
        let constraints = format!("b,l,{}", vec!["r"; rank].join(","));
        let acting_thread = self.acting_thread(data.operands.get(1));
        for copy in &copies.boxes {
            let coordinates = self.box_coordinates(&copies, copy);
            self.e.void(format!(
                "call void asm sideeffect \"{text}\", \"{constraints}\"(i1 {acting_thread}, ptr {}, {coordinates})",
                copies.map
            ));
        }
        Ok(())
    }

    /// Emits `cp.async.bulk.commit_group` or a wait for such groups.
    pub(super) fn bulk_group(&mut self, what: &str) {
        self.e.void(format!("call void asm sideeffect \"cp.async.bulk.{what};\", \"~{{memory}}\"() #1"));
    }

    /// The TMA copies between the block of a view and a buffer: a multiple of `pieces`.
    fn tma_copies(&mut self, view: Value, buffer: Value, boundary: &[usize], pieces: u32) -> Result<TmaCopies> {
        let plan = tensor_map::plan(self.func, &self.axis, view, boundary, self.func.ty(buffer), pieces);
        let copies = self.planned_or_unsupported(view, plan)?;
        Ok(TmaCopies { buffer: self.scalar(buffer), ..copies })
    }

    fn planned_or_unsupported(&mut self, view: Value, plan: Result<tensor_map::TmaPlan, String>) -> Result<TmaCopies> {
        match plan {
            Ok(plan) => Ok(self.planned_copies(plan)),
            Err(reason) => {
                let view = self.func.ty(view);
                self.unsupported(format!("TMA cannot copy a block of `{view}`: {reason}"), None)
            }
        }
    }

    /// The copies of a plan, for a buffer at 0.
    pub(super) fn planned_copies(&mut self, plan: tensor_map::TmaPlan) -> TmaCopies {
        let map = self.tensor_map(TensorMapDesc {
            arg: 0,
            base: plan.base,
            elem: plan.elem.name().into(),
            shape: plan.shape.clone(),
            strides: plan.strides.clone(),
            block: plan.block.clone(),
            swizzle_bytes: plan.swizzle_bytes,
        });
        let coordinates = plan.coordinates.iter().zip(&plan.checked).enumerate();
        let at = coordinates.map(|(d, (&v, &checked))| self.coordinate(v, checked, d == 0)).collect();
        TmaCopies { map, at, buffer: "0".into(), boxes: plan.copies }
    }

    /// The arguments of one copy: the pointer to its part of the buffer, and its coordinates.
    fn tma_box(&mut self, copies: &TmaCopies, copy: &BoxCopy) -> (String, String) {
        let buffer = self.e.inst(format!("add i32 {}, {}", copies.buffer, copy.offset));
        let buffer = self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {buffer}"));
        (format!("ptr addrspace(3) {buffer}"), self.box_coordinates(copies, copy))
    }

    fn box_coordinates(&mut self, copies: &TmaCopies, copy: &BoxCopy) -> String {
        let at = copies.at.iter().zip(&copy.start).map(|(x, &by)| match by {
            0 => format!("i32 {x}"),
            _ => format!("i32 {}", self.e.inst(format!("add i32 {x}, {by}"))),
        });
        at.collect::<Vec<String>>().join(", ")
    }

    /// A coordinate in i32. Clamps it where `checked` says that it may lie outside of the tensor, whose extents are
    /// below 2^31 - 1. Adding the offset of another box of the same block wraps at most from the largest i32 to the
    /// smallest ones, which are out of bounds too. In the innermost dimension, where coordinates are multiples of 16 bytes, the
    /// least i32 stands for what is too large.
    fn coordinate(&mut self, v: Value, checked: bool, innermost: bool) -> Val {
        let (least, most) = (i64::from(i32::MIN), i64::from(i32::MAX));
        if let Some(c) = self.axis.scalar_constant(self.func, v) {
            return if innermost && c > most { least } else { c.clamp(least, most) }.to_string();
        }
        let mut x = self.scalar(v);
        if !matches!(self.elem(v), Elem::Num(d) if d.bits() == 64) {
            return x;
        }
        let (low, high) = self.axis.get(self.func, v).range;
        if checked && low < least.into() {
            x = self.e.call("i64", "llvm.smax.i64", &[("i64", &x), ("i64", &least.to_string())]);
        }
        if checked && high > most.into() && innermost {
            let inside = self.e.inst(format!("icmp sle i64 {x}, {most}"));
            x = self.e.inst(format!("select i1 {inside}, i64 {x}, i64 {least}"));
        } else if checked && high > most.into() {
            x = self.e.call("i64", "llvm.smin.i64", &[("i64", &x), ("i64", &most.to_string())]);
        }
        self.e.inst(format!("trunc i64 {x} to i32"))
    }

    /// The parameter with this tensor map, added if there is none yet.
    fn tensor_map(&mut self, wanted: TensorMapDesc) -> Val {
        let arg = |index: usize| self.func.args.len() + usize::from(self.clocks.is_some()) + index;
        let found = (0..self.maps.len()).find(|&i| TensorMapDesc { arg: arg(i), ..wanted.clone() } == self.maps[i]);
        let index = found.unwrap_or_else(|| {
            let arg = arg(self.maps.len());
            self.maps.push(TensorMapDesc { arg, ..wanted });
            self.maps.len() - 1
        });
        format!("%map{index}")
    }

    /// The parameters of the entry for tensor maps, and the descriptions of these arguments.
    pub(super) fn map_arguments(&self) -> (Vec<String>, Vec<ArgDesc>) {
        let name = |i: usize| format!("map{i}");
        let params = (0..self.maps.len())
            .map(|i| format!("ptr byval([128 x i8]) align 64 \"nvvm.grid_constant\" %{}", name(i)))
            .collect();
        let args = (0..self.maps.len())
            .map(|i| ArgDesc { name: name(i), ty: ArgType::TensorMap, divisible_by: 1, equal_to: None })
            .collect();
        (params, args)
    }

    /// Emits `bar.sync` or `bar.arrive` (`how`) on the named barrier of the warpgroup `ahead` positions after this one.
    /// Each barrier counts the 256 threads of its own warpgroup and the previous one.
    pub(super) fn pingpong_barrier(&mut self, how: &str, ahead: u32) {
        let groups = self.num_warpgroups();
        let own = self.warpgroup();
        let next = self.e.hoist(format!("add i32 {own}, {ahead}"));
        let next = self.e.hoist(format!("urem i32 {next}, {groups}"));
        // The barriers before are those of the programs.
        let id = self.e.hoist(format!("add i32 {next}, {}", 1 + self.replicas));
        self.e.void(format!("call void asm sideeffect \"bar.{how} $0, 256;\", \"r,~{{memory}}\"(i32 {id}) #1"));
    }

    /// The consumer warpgroups of the block.
    fn num_warpgroups(&self) -> u32 {
        let warps = self.consumers.expect("internal compiler error: ping-pong outside of a consumer partition");
        self.replicas * warps / 4
    }

    /// The index of this consumer warpgroup in the block.
    fn warpgroup(&mut self) -> Val {
        let in_program = self.warp_uniform(|e, t| e.hoist(format!("lshr i32 {}, 2", t.warp)));
        match (self.replica.clone(), self.consumers) {
            (Some(replica), Some(warps)) => {
                let first = self.e.hoist(format!("mul i32 {replica}, {}", warps / 4));
                self.e.hoist(format!("add i32 {first}, {in_program}"))
            }
            _ => in_program,
        }
    }

    /// Makes the last warpgroup arrive once before the loop, so that the first warpgroup starts.
    fn start_pingpong(&mut self) {
        let own = self.warpgroup();
        let last = self.e.hoist(format!("icmp eq i32 {own}, {}", self.num_warpgroups() - 1));
        self.when(Some(last), |this| this.pingpong_barrier("arrive", 1));
    }

    /// Emits the two partitions; see [`Op::WarpSpecialize`].
    pub(super) fn warp_specialize(&mut self, id: OpId) -> Result<()> {
        let func = self.func;
        let data = func.op(id);
        let Op::WarpSpecialize { warps, producers, registers, .. } = &data.op else {
            panic!("internal compiler error: not a warp_specialize")
        };
        let consumers = warps * self.replicas;
        let labels = ["consume", "produce", "produced"].map(|hint| self.e.new_label(hint));
        let [consume, produce, join] = &labels;
        let warp = self.warp_uniform(|_, t| t.warp.clone());
        let producer = self.e.hoist(format!("icmp uge i32 {warp}, {consumers}"));
        self.e.branch_if(&producer, produce, consume);

        self.e.start_block(consume);
        if let [n, _] = registers[..] {
            self.e.void(format!(
                "call void asm sideeffect \"setmaxnreg.inc.sync.aligned.u32 {n};\", \"~{{memory}}\"() #1"
            ));
        }
        self.consumers = Some(*warps);
        let outer = self.threads.warp.clone();
        if self.replicas > 1 {
            self.replica = Some(self.e.hoist(format!("udiv i32 {warp}, {warps}")));
            self.threads.warp = self.e.hoist(format!("urem i32 {outer}, {warps}"));
        }
        if func.walk_from(data.regions[0]).iter().any(|&op| func.op(op).op == Op::PingpongWait) {
            self.start_pingpong();
        }
        self.block(data.regions[0])?;
        if !self.ordered_adds.is_empty() {
            self.end_ordered();
        }
        self.consumers = None;
        self.replica = None;
        self.threads.warp = outer;
        self.e.branch(join);

        self.e.start_block(produce);
        if let [_, n] = registers[..] {
            self.e.void(format!(
                "call void asm sideeffect \"setmaxnreg.dec.sync.aligned.u32 {n};\", \"~{{memory}}\"() #1"
            ));
        }
        let own = self.e.hoist(format!("sub i32 {}, {consumers}", self.threads.warp));
        if *producers < 4 {
            let active = self.e.new_label("active");
            let uniform = self.e.hoist(format!("sub i32 {warp}, {consumers}"));
            let first = self.e.hoist(format!("icmp ult i32 {uniform}, {producers}"));
            let others = self.e.new_label("others");
            self.e.branch_if(&first, &active, &others);
            self.e.start_block(&others);
            if !self.ordered_adds.is_empty() {
                let next = self.e.hoist(format!("icmp eq i32 {uniform}, {producers}"));
                self.when(Some(next), Self::serve_ordered);
            }
            self.e.branch(join);
            self.e.start_block(&active);
        }
        let outer = std::mem::replace(&mut self.threads.warp, own);
        let outer_warps = std::mem::replace(&mut self.num_warps, *producers);
        self.block(data.regions[1])?;
        self.threads.warp = outer;
        self.num_warps = outer_warps;
        self.e.branch(join);
        self.e.start_block(join);
        Ok(())
    }
}
