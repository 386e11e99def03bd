//! Shared memory: buffers, layout conversions, shuffles, and broadcasts between threads.

use super::emit::Val;
use super::memory::memory_type;
use super::threads::offsets;
use super::{Lowering, Result, llvm_type};
use crate::analysis::access_layout::{MAX_VECTOR_BYTES, async_copy_layout, async_copy_width};
use crate::analysis::buffers::buffer_of;
use crate::analysis::scratch;
use crate::ir::{DType, Elem, Op, OpId, Type, Value};
use crate::layout::{Conversion, Dim, LaneGather, LanePlan, LinearLayout, SourceLane, VectorAccess};
use crate::target::GpuArch;
use std::collections::HashMap;

/// Addresses of a thread's registers in a shared buffer.
pub(super) struct SharedAccess {
    offsets: super::threads::Coordinate,
    vector: VectorAccess,
    /// The i32 byte offset of the buffer.
    base: Val,
    elem: DType,
    /// Pointers, by the bits of a register's offset that overlap with the thread's.
    pointers: HashMap<u32, Val>,
}

impl SharedAccess {
    /// Addresses of single places.
    pub(super) fn of_rows(offsets: super::threads::Coordinate, base: Val, elem: DType) -> SharedAccess {
        let vector = VectorAccess { elements: 1, groups: Vec::new() };
        SharedAccess { offsets, vector, base, elem, pointers: HashMap::new() }
    }
}

impl Lowering<'_> {
    pub(super) fn shared_access(
        &mut self,
        layout: &LinearLayout,
        memory: &LinearLayout,
        base: Val,
        elem: DType,
    ) -> SharedAccess {
        let vector = layout.vector_access(memory, MAX_VECTOR_BYTES as usize / elem.bytes());
        let offsets = offsets(&mut self.e, &self.threads, layout, memory);
        SharedAccess { offsets, vector, base, elem, pointers: HashMap::new() }
    }

    /// The pointer to the element in a register.
    pub(super) fn shared_pointer(&mut self, access: &mut SharedAccess, register: usize) -> Val {
        let constant = access.offsets.register[register];
        let (overlap, rest) = (constant & access.offsets.mask, constant & !access.offsets.mask);
        let bytes = access.elem.bytes() as u32;
        let pointer = match access.pointers.get(&overlap) {
            Some(p) => p.clone(),
            None => {
                let thread = access.offsets.at(&mut self.e, overlap);
                let thread = self.e.inst(format!("mul i32 {thread}, {bytes}"));
                let at = self.e.inst(format!("add i32 {thread}, {}", access.base));
                let p = self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {at}"));
                access.pointers.insert(overlap, p.clone());
                p
            }
        };
        match rest * bytes {
            0 => pointer,
            n => self.e.inst(format!("getelementptr i8, ptr addrspace(3) {pointer}, i32 {n}")),
        }
    }

    pub(super) fn store_shared(&mut self, access: &mut SharedAccess, regs: &[Val]) {
        let elem = access.elem;
        let ty = memory_type(elem);
        let n = access.vector.elements;
        for group in access.vector.groups.clone() {
            let pointer = self.shared_pointer(access, group[0]);
            let mut v = "poison".to_string();
            for (i, &r) in group.iter().enumerate() {
                let x = if elem == DType::Bool {
                    self.e.inst(format!("zext i1 {} to i8", regs[r]))
                } else {
                    regs[r].clone()
                };
                v = if n == 1 { x } else { self.e.inst(format!("insertelement <{n} x {ty}> {v}, {ty} {x}, i32 {i}")) };
            }
            let vector = if n == 1 { ty.to_string() } else { format!("<{n} x {ty}>") };
            self.e.void(format!("store {vector} {v}, ptr addrspace(3) {pointer}, align {}", n * elem.bytes()));
        }
    }

    /// Loads the vector that contains `register`. Returns its registers with their values.
    pub(super) fn load_shared_group(&mut self, access: &mut SharedAccess, register: usize) -> Vec<(usize, Val)> {
        let elem = access.elem;
        let ty = memory_type(elem);
        let n = access.vector.elements;
        let group = access.vector.groups.iter().find(|g| g.contains(&register)).cloned();
        let group = group.expect("internal compiler error: a register without a group");
        let pointer = self.shared_pointer(access, group[0]);
        let align = n * elem.bytes();
        let mut values: Vec<Val> = if n == 1 {
            vec![self.e.inst(format!("load {ty}, ptr addrspace(3) {pointer}, align {align}"))]
        } else {
            let v = self.e.inst(format!("load <{n} x {ty}>, ptr addrspace(3) {pointer}, align {align}"));
            self.e.elements(&v, ty, n)
        };
        if elem == DType::Bool {
            values = values.iter().map(|v| self.e.inst(format!("icmp ne i8 {v}, 0"))).collect();
        }
        group.into_iter().zip(values).collect()
    }

    pub(super) fn load_shared(&mut self, access: &mut SharedAccess, count: usize) -> Vec<Val> {
        let mut regs: Vec<Option<Val>> = vec![None; count];
        for r in 0..count {
            if regs[r].is_none() {
                for (i, v) in self.load_shared_group(access, r) {
                    regs[i] = Some(v);
                }
            }
        }
        regs.into_iter().map(|r| r.expect("internal compiler error: a register without a value")).collect()
    }

    /// The layout, element type and base of a shared buffer.
    pub(super) fn buffer(&self, v: Value) -> (&LinearLayout, DType, Val) {
        match self.func.ty(v) {
            Type::Shared { layout, elem, .. } => (self.func.layout(*layout), *elem, self.scalar(v)),
            other => panic!("internal compiler error: {other} is not a shared buffer"),
        }
    }

    pub(super) fn local_alloc(&mut self, id: OpId) {
        let data = self.func.op(id);
        let base = self.own_memory(self.plan.offset(id));
        self.values[data.results[0].0 as usize] = Some(std::rc::Rc::new(vec![base]));
        if let Some(&tile) = data.operands.first() {
            self.write_buffer(data.results[0], tile);
        }
    }

    /// The byte offset of an op's scratch memory.
    pub(super) fn scratch(&mut self, id: OpId) -> Val {
        self.own_memory(self.plan.scratch(id))
    }

    /// The byte offset of memory of which each replica has its own.
    fn own_memory(&mut self, offset: u32) -> Val {
        match self.replica.clone() {
            Some(replica) => {
                let start = self.e.hoist(format!("mul i32 {replica}, {}", self.plan.replica_bytes));
                self.e.hoist(format!("add i32 {start}, {offset}"))
            }
            None => offset.to_string(),
        }
    }

    pub(super) fn local_store(&mut self, id: OpId) {
        let data = self.func.op(id);
        self.write_buffer(data.operands[0], data.operands[1]);
    }

    fn write_buffer(&mut self, buffer: Value, tile: Value) {
        let layout = self.tile_layout(tile);
        let (memory, elem, base) = self.buffer(buffer);
        let memory = memory.clone();
        let regs = self.regs(tile);
        let layout = layout.clone();
        self.store_tile(&layout, &memory, base, elem, &regs);
    }

    pub(super) fn store_tile(
        &mut self,
        layout: &LinearLayout,
        memory: &LinearLayout,
        base: Val,
        elem: DType,
        regs: &[Val],
    ) {
        if !self.store_matrices(layout, memory, &base, elem, regs) {
            let mut access = self.shared_access(layout, memory, base, elem);
            self.store_by_owners(layout, &mut access, regs);
        }
    }

    fn load_tile(&mut self, layout: &LinearLayout, memory: &LinearLayout, base: Val, elem: DType) -> Vec<Val> {
        self.load_matrices(layout, memory, &base, elem).unwrap_or_else(|| {
            let mut access = self.shared_access(layout, memory, base, elem);
            self.load_shared(&mut access, layout.num_registers())
        })
    }

    /// Stores a tile. One of the threads with copies of an element stores it.
    fn store_by_owners(&mut self, layout: &LinearLayout, access: &mut SharedAccess, regs: &[Val]) {
        let owner = self.threads.owner(&mut self.e, layout);
        self.when(owner, |this| this.store_shared(access, regs));
    }

    pub(super) fn local_load(&mut self, id: OpId) {
        let data = self.func.op(id);
        let layout = self.tile_layout(data.results[0]);
        let (memory, elem, base) = self.buffer(data.operands[0]);
        let (memory, layout) = (memory.clone(), layout.clone());
        let regs = self.load_tile(&layout, &memory, base, elem);
        self.set(data.results[0], regs);
    }

    pub(super) fn local_slot(&mut self, id: OpId) {
        let data = self.func.op(id);
        let ring = buffer_of(self.func, data.operands[0])
            .unwrap_or_else(|| panic!("internal compiler error: a slot of a value that is not a buffer"));
        let bytes = self.plan.pitch(self.func, ring);
        let (base, index) = (self.scalar(data.operands[0]), self.scalar(data.operands[1]));
        let offset = self.e.inst(format!("mul i32 {index}, {bytes}"));
        let at = self.e.inst(format!("add i32 {base}, {offset}"));
        self.values[data.results[0].0 as usize] = Some(std::rc::Rc::new(vec![at]));
    }

    /// Emits `cp.async` of the block that a view selects, 4 to 16 bytes per thread; bytes beyond the boundary become
    /// zeros.
    pub(super) fn async_copy(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::AsyncCopy { boundary, .. } = &data.op else { panic!("internal compiler error: not a copy") };
        let view = data.operands[0];
        let layout = async_copy_layout(self.func, &self.axis, view, boundary, self.num_warps);
        let (memory, elem, base) = self.buffer(data.operands[1]);
        let memory = memory.clone();
        let predicate = data.operands.get(2).map(|&p| self.scalar(p));
        let mut place = self.block_address(view, &layout, boundary);
        let mut access = self.shared_access(&layout, &memory, base, elem);
        let n = async_copy_width(&layout, place.parts.order[0], &memory);
        let bytes = n * elem.bytes();
        if !matches!(bytes, 4 | 8 | 16) {
            panic!("internal compiler error: an asynchronous copy of {bytes} bytes");
        }
        let owner = self.threads.owner(&mut self.e, &layout);
        let free = layout.free_mask(Dim::Register) as usize;
        for r in (0..layout.num_registers()).step_by(n).filter(|r| r & free == 0) {
            let from = self.address(&place, r);
            let to = self.shared_pointer(&mut access, r);
            let inside = self.inside(&mut place, r);
            self.cp_async(&from, &to, bytes, inside, [predicate.clone(), owner.clone()]);
        }
        Ok(())
    }

    /// Emits `cp.async` of the elements that a tile of pointers selects; masked-off elements become zeros.
    pub(super) fn async_load(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let Op::AsyncLoad { vector } = data.op else { panic!("internal compiler error: not a copy") };
        let pointers = self.regs(data.operands[0]);
        let mask = data.operands.get(3).map(|&v| self.regs(v));
        let layout = self.tile_layout(data.operands[0]);
        let (memory, elem, base) = self.buffer(data.operands[1]);
        let memory = memory.clone();
        if vector > layout.contiguous_offsets(&memory) {
            panic!("internal compiler error: a copy of {vector} elements that are no neighbors in the buffer");
        }
        let predicate = self.scalar(data.operands[2]);
        let mut access = self.shared_access(layout, &memory, base, elem);
        let owner = self.threads.owner(&mut self.e, layout);
        let free = layout.free_mask(Dim::Register) as usize;
        for r in (0..layout.num_registers()).step_by(vector).filter(|r| r & free == 0) {
            let to = self.shared_pointer(&mut access, r);
            let inside = mask.as_ref().map(|m| m[r].clone());
            self.cp_async(&pointers[r], &to, vector * elem.bytes(), inside, [Some(predicate.clone()), owner.clone()]);
        }
        Ok(())
    }

    /// Emits one `cp.async` of 4, 8 or 16 bytes where all `guards` are true; writes zeros where `inside` is false.
    fn cp_async(&mut self, from: &str, to: &str, bytes: usize, inside: Option<Val>, guards: [Option<Val>; 2]) {
        let cache = if bytes == 16 { "cg" } else { "ca" };
        let size = match inside {
            Some(inside) => self.e.inst(format!("select i1 {inside}, i32 {bytes}, i32 0")),
            None => bytes.to_string(),
        };
        let [a, b] = guards;
        let (prefix, constraint, arg) = match self.and_predicates(a, b) {
            Some(g) => ("@$3 ", ",b", format!(", i1 {g}")),
            None => ("", "", String::new()),
        };
        self.e.void(format!(
            "call void asm sideeffect \"{prefix}cp.async.{cache}.shared.global [$0], [$1], {bytes}, $2;\", \"r,l,r{constraint},~{{memory}}\"(ptr addrspace(3) {to}, ptr addrspace(1) {from}, i32 {size}{arg})"
        ));
    }

    pub(super) fn convert_layout(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let (from, to) = (self.tile_layout(data.operands[0]), self.tile_layout(data.results[0]));
        let regs = self.regs(data.operands[0]);
        let elem = self.elem(data.operands[0]);
        let result = match Conversion::between(from, to) {
            Conversion::Identity => regs.to_vec(),
            Conversion::Registers(map) => map.iter().map(|&r| regs[r].clone()).collect(),
            Conversion::Lanes(plan) => self.convert_lanes(&plan, &regs, elem),
            Conversion::Shared => {
                let (bytes, matrices) = ((elem.bits() / 8) as u32, self.arch >= GpuArch::Sm90a);
                let memory = LinearLayout::conversion_scratch(from, to, bytes, matrices);
                let base = self.scratch(id);
                self.through_shared(from, to, &memory, &base, &regs, elem)
            }
            Conversion::Blocks => panic!("internal compiler error: a conversion between blocks"),
        };
        self.set(data.results[0], result);
        Ok(())
    }

    fn through_shared(
        &mut self,
        from: &LinearLayout,
        to: &LinearLayout,
        memory: &LinearLayout,
        base: &str,
        regs: &[Val],
        elem: Elem,
    ) -> Vec<Val> {
        // Pointers are converted through integers.
        let (dtype, regs) = match elem {
            Elem::Num(d) => (d, regs.to_vec()),
            Elem::Ptr(_) => (
                DType::I64,
                regs.iter().map(|r| self.e.inst(format!("ptrtoint ptr addrspace(1) {r} to i64"))).collect(),
            ),
        };
        self.store_tile(from, memory, base.into(), dtype, &regs);
        self.barrier();
        let out = self.load_tile(to, memory, base.into(), dtype);
        match elem {
            Elem::Num(_) => out,
            Elem::Ptr(_) => out.iter().map(|r| self.e.inst(format!("inttoptr i64 {r} to ptr addrspace(1)"))).collect(),
        }
    }

    /// Shuffles, where each element is in the warp that needs it; else stores the operand to scratch memory in row-major
    /// order, and each thread loads the elements that its indices pick.
    pub(super) fn gather(&mut self, id: OpId, axis: usize) -> Result<()> {
        let data = self.func.op(id);
        let (source, index, result) = (data.operands[0], data.operands[1], data.results[0]);
        let Elem::Num(elem) = self.elem(source) else {
            let help = "gather integer offsets instead, and add the base pointer to the result";
            return self.unsupported("`gather` of pointers is not supported", Some(help));
        };
        if let Some(gather) = scratch::lane_gather(self.func, id) {
            let picked = self.gather_in_warp(&gather, &self.regs(source), &self.regs(index), Elem::Num(elem));
            self.set(result, picked);
            return Ok(());
        }
        let shape = self.func.ty(source).shape().to_vec();
        let from = self.tile_layout(source).clone();
        let order: Vec<usize> = (0..shape.len()).rev().collect();
        let memory = LinearLayout::shared_row_major(from.shape(), &order);
        let base = self.scratch(id);
        let regs = self.regs(source);
        let mut write = self.shared_access(&from, &memory, base.clone(), elem);
        self.store_by_owners(&from, &mut write, &regs);
        self.barrier();
        let to = self.tile_layout(result).clone();
        let places = super::threads::coordinates(&mut self.e, &self.threads, &to);
        let indices = self.regs(index);
        let (ty, bytes) = (memory_type(elem), elem.bytes());
        let mut picked = Vec::new();
        for (r, i) in indices.iter().enumerate() {
            let mut at = base.clone();
            let mut stride = bytes;
            for d in (0..shape.len()).rev() {
                let place = if d == axis {
                    self.e.inst(format!("and i32 {i}, {}", shape[d] - 1))
                } else {
                    places[d].at(&mut self.e, places[d].register[r])
                };
                let part = self.e.inst(format!("mul i32 {place}, {stride}"));
                at = self.e.inst(format!("add i32 {part}, {at}"));
                stride *= shape[d];
            }
            let p = self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {at}"));
            let x = self.e.inst(format!("load {ty}, ptr addrspace(3) {p}, align {bytes}"));
            picked.push(if elem == DType::Bool { self.e.inst(format!("icmp ne i8 {x}, 0")) } else { x });
        }
        self.set(result, picked);
        Ok(())
    }

    fn gather_in_warp(&mut self, gather: &LaneGather, source: &[Val], indices: &[Val], elem: Elem) -> Vec<Val> {
        let ty = llvm_type(elem);
        let own = self.e.hoist(format!("and i32 {}, {}", self.threads.lane, gather.kept_lanes));
        let mut picked = Vec::new();
        for (register, index) in indices.iter().enumerate() {
            // The bit of the index as bit `to` of a number.
            let moved_bit = |this: &mut Self, bit: u32, to: u32| match index.parse::<i64>() {
                Ok(n) => ((n >> bit & 1) << to).to_string(),
                Err(_) => {
                    let shifted = this.e.inst(format!("lshr i32 {index}, {bit}"));
                    let alone = this.e.inst(format!("and i32 {shifted}, 1"));
                    this.e.inst(format!("shl i32 {alone}, {to}"))
                }
            };
            let mut lane = own.clone();
            for &(bit, to) in &gather.lane_bits {
                let part = moved_bit(self, bit, to);
                lane = self.e.inst(format!("or i32 {lane}, {part}"));
            }
            let choices: Vec<Val> = gather.register_bits.iter().map(|&(bit, _)| moved_bit(self, bit, 0)).collect();
            let mut candidates = gather.candidates(register);
            // Those of a constant index are known.
            let known = choices.iter().enumerate().map(|(place, c)| Some(c.parse::<usize>().ok()? << place));
            if let Some(known) = known.collect::<Option<Vec<usize>>>() {
                candidates = vec![candidates[known.iter().sum::<usize>()]];
            }
            let mut found: Vec<Val> = candidates
                .iter()
                .map(|&r| match gather.lane_bits.is_empty() {
                    true => source[r].clone(),
                    false => self.shuffle("idx", &source[r], elem, &lane),
                })
                .collect();
            for choice in choices.iter().filter(|_| candidates.len() > 1) {
                let is_set = self.e.inst(format!("icmp ne i32 {choice}, 0"));
                found = found
                    .chunks(2)
                    .map(|pair| self.e.inst(format!("select i1 {is_set}, {ty} {}, {ty} {}", pair[1], pair[0])))
                    .collect();
            }
            picked.push(found.swap_remove(0));
        }
        picked
    }

    /// Performs the three steps of a [`LanePlan`].
    fn convert_lanes(&mut self, plan: &LanePlan, regs: &[Val], elem: Elem) -> Vec<Val> {
        let ty = llvm_type(elem);
        let (lane, warp) = (self.threads.lane.clone(), self.threads.warp.clone());
        let mut sources = regs.to_vec();
        for (number, masks) in [(&lane, &plan.rotate_in_lane), (&warp, &plan.rotate_in_warp)] {
            sources = self.rotate(sources, number, masks, ty);
        }
        let source_lane = plan.source_lane();
        let from = match source_lane {
            SourceLane::Computed => self.threads.linear(&mut self.e, &plan.from_lane, &plan.from_warp),
            _ => "0".into(),
        };
        let received: Vec<Val> = plan
            .shuffles
            .iter()
            .map(|s| {
                let value = sources[s.register].clone();
                match source_lane {
                    SourceLane::Xor if s.lane == 0 => value,
                    SourceLane::Xor => self.shuffle("bfly", &value, elem, &s.lane.to_string()),
                    SourceLane::Segment { kept } => {
                        self.shuffle_in_segments("idx", &value, elem, &s.lane.to_string(), kept)
                    }
                    SourceLane::Computed => {
                        let source = self.e.inst(format!("xor i32 {from}, {}", s.lane));
                        self.shuffle("idx", &value, elem, &source)
                    }
                }
            })
            .collect();
        let received = self.rotate(received, &lane, &plan.rotate_out_lane, ty);
        plan.registers.iter().map(|&r| received[r].clone()).collect()
    }

    /// Replaces register `r` by register `r ^ masks[b]` in the threads with bit `b` of `number` set, for each bit.
    fn rotate(&mut self, mut regs: Vec<Val>, number: &str, masks: &[u32], ty: &str) -> Vec<Val> {
        for (bit, &mask) in masks.iter().enumerate() {
            if mask == 0 {
                continue;
            }
            let b = self.e.hoist(format!("and i32 {number}, {}", 1 << bit));
            let set = self.e.hoist(format!("icmp ne i32 {b}, 0"));
            regs = (0..regs.len())
                .map(|r| {
                    let other = &regs[r ^ mask as usize];
                    self.e.inst(format!("select i1 {set}, {ty} {other}, {ty} {}", regs[r]))
                })
                .collect();
        }
        regs
    }

    /// Emits `shfl.sync` of one element; `mode` is `bfly`, `idx` or `up`.
    pub(super) fn shuffle(&mut self, mode: &str, value: &str, elem: Elem, lane: &str) -> Val {
        self.shuffle_in_segments(mode, value, elem, lane, 0)
    }

    /// As [`Self::shuffle`], where each lane keeps the bits `kept` of its own number.
    fn shuffle_in_segments(&mut self, mode: &str, value: &str, elem: Elem, lane: &str, kept: u32) -> Val {
        let ty = llvm_type(elem);
        // `up` clamps at lane 0, the other modes at lane 31.
        let clamp = (kept << 8 | if mode == "up" { 0 } else { 31 }).to_string();
        let word = |e: &mut super::emit::Emitter, w: &str| {
            let args = [("i32", "-1"), ("i32", w), ("i32", lane), ("i32", &clamp)];
            e.call("i32", &format!("llvm.nvvm.shfl.sync.{mode}.i32"), &args)
        };
        match elem.bits() {
            64 => {
                let packed = self.pack_elements(&[value.to_string()], ty, "i64");
                let low = self.e.inst(format!("trunc i64 {packed} to i32"));
                let high = self.e.inst(format!("lshr i64 {packed}, 32"));
                let high = self.e.inst(format!("trunc i64 {high} to i32"));
                let (low, high) = (word(&mut self.e, &low), word(&mut self.e, &high));
                let low = self.e.inst(format!("zext i32 {low} to i64"));
                let high = self.e.inst(format!("zext i32 {high} to i64"));
                let high = self.e.inst(format!("shl i64 {high}, 32"));
                let packed = self.e.inst(format!("or disjoint i64 {low}, {high}"));
                self.unpack_elements(&packed, "i64", ty, 1).remove(0)
            }
            32 => {
                let packed = self.pack_elements(&[value.to_string()], ty, "i32");
                let moved = word(&mut self.e, &packed);
                self.unpack_elements(&moved, "i32", ty, 1).remove(0)
            }
            bits => {
                let narrow = if ty == "i1" { "i1".to_string() } else { format!("i{bits}") };
                let packed = self.pack_elements(&[value.to_string()], ty, &narrow);
                let wide = self.e.inst(format!("zext {narrow} {packed} to i32"));
                let moved = word(&mut self.e, &wide);
                let packed = self.e.inst(format!("trunc i32 {moved} to {narrow}"));
                self.unpack_elements(&packed, &narrow, ty, 1).remove(0)
            }
        }
    }

    /// Broadcasts values through shared memory from the threads that own the elements to all threads with copies.
    pub(super) fn broadcast_from_owners(&mut self, result: Value, layout: &LinearLayout, values: Vec<Val>) -> Vec<Val> {
        let order: Vec<usize> = (0..layout.rank()).rev().collect();
        let memory = LinearLayout::shared_row_major(layout.shape(), &order);
        let id = self.func.def_op(result).expect("internal compiler error: a broadcast of a block parameter");
        let base = self.scratch(id);
        let elem = self.dtype(result);
        let mut access = self.shared_access(layout, &memory, base.clone(), elem);
        self.store_by_owners(layout, &mut access, &values);
        self.barrier();
        let mut access = self.shared_access(layout, &memory, base, elem);
        self.load_shared(&mut access, values.len())
    }

    /// Broadcasts a scalar from thread 0.
    pub(super) fn broadcast_scalar(&mut self, result: Value, values: Vec<Val>) -> Vec<Val> {
        let id = self.func.def_op(result).expect("internal compiler error: a broadcast of a block parameter");
        let base = self.scratch(id);
        let elem = self.dtype(result);
        let ty = memory_type(elem);
        let first = self.leader();
        let p = self.e.inst(format!("getelementptr i8, ptr addrspace(3) @smem, i32 {base}"));
        self.when(Some(first), |this| {
            this.e.void(format!("store {ty} {}, ptr addrspace(3) {p}, align {}", values[0], elem.bytes()));
        });
        self.barrier();
        vec![self.e.inst(format!("load {ty}, ptr addrspace(3) {p}, align {}", elem.bytes()))]
    }

    /// Runs `f` in the threads where the condition holds.
    pub(super) fn when(&mut self, condition: Option<Val>, f: impl FnOnce(&mut Self)) {
        let Some(c) = condition else { return f(self) };
        let (then, join) = (self.e.new_label("when"), self.e.new_label("after"));
        self.e.branch_if(&c, &then, &join);
        self.e.start_block(&then);
        f(self);
        self.e.branch(&join);
        self.e.start_block(&join);
    }
}
