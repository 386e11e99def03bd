//! Ops that write memory: stores through views and pointers, atomics; and ops that move tiles between buffers.

use super::access::{Access, LaneAddresses};
use super::elementwise as ew;
use super::eval::ViewUse;
use super::loop_nest::{DimMap, Evaluated, LoopNest, LoopNestSpec, TileRef, identity};
use super::repr::{bits_type, from_bits, reg, reg_num, to_bits};
use super::state::{Lowering, Result};
use super::writer::Writer;
use crate::ir::{AtomicOp, BinaryOp, DType, Literal, MemSem, Op, OpId, Value};

impl Lowering<'_> {
    pub fn store_view(&mut self, id: OpId, boundary: &[usize]) -> Result<()> {
        let (view, value) = (self.func.op(id).operands[0], self.func.op(id).operands[1]);
        let keep = self.same_address_load(value, view);
        self.materialize_clobbered_loads(self.underlying_argument(view), keep)?;
        let shape = self.func.ty(view).shape().to_vec();
        let map = identity(&shape);
        let reads = [(value, map.clone())];
        self.materialize_operands(&reads, &shape)?;
        let writes = [ViewUse { view, map: map.clone(), boundary: boundary.to_vec() }];
        let (vec_dim, lanes) = self.vector_dim(&shape, &reads, &writes);
        let spec = LoopNestSpec::new(&shape, vec_dim, lanes);
        let view = self.view(view);
        let ty = reg(self.elem(value));
        self.loop_nest(&spec, &reads, &writes, |l, nest| {
            let ev = l.eval(nest, value, &map);
            let (access, _) = l.view_access(nest, &view, &map, boundary);
            let x = l.widen(nest, &ev, ty, access.lanes);
            nest.select(&mut l.w, nest.depth());
            l.write_memory(&access, &x);
            Ok(())
        })
    }

    /// The load of a stored value, if the store overwrites exactly the elements that the load reads, and the load has
    /// no other use: only then may the load move down to the store.
    fn same_address_load(&self, value: Value, address: Value) -> Option<Value> {
        let mut found = None;
        let mut stack = vec![value];
        while let Some(v) = stack.pop() {
            let Some(id) = self.fused_op(v) else { continue };
            let data = self.func.op(id);
            match &data.op {
                Op::LoadView { .. } | Op::Load { .. } if data.operands[0] == address => {
                    if self.uses[v.0 as usize] != 1 || found.is_some() {
                        return None;
                    }
                    found = Some(v);
                }
                // Loads from other addresses, and ops that permute elements, would read elements after the store has
                // overwritten them.
                Op::LoadView { .. } | Op::Load { .. } | Op::Broadcast | Op::Trans { .. } => {}
                _ if self.uses[v.0 as usize] == 1 => stack.extend(&data.operands),
                _ => {}
            }
        }
        found
    }

    pub fn store(&mut self, id: OpId) -> Result<()> {
        let operands = self.func.op(id).operands.clone();
        let keep = self.same_address_load(operands[1], operands[0]);
        self.materialize_clobbered_loads(self.underlying_argument(operands[0]), keep)?;
        self.loop_over_pointers(&operands, |l, nest, reads, mask| {
            let (mut access, _) = l.pointer_access(nest, reads, mask);
            if let Some(i) = mask
                && let Some(Literal::Bool(true)) = l.func.constant(reads[i].0)
            {
                access.mask = None;
            }
            let value = l.eval(nest, reads[1].0, &reads[1].1);
            // A value that differs between lanes needs one address per lane.
            if value.lanes > access.lanes {
                access = l.spread(nest, access, value.lanes);
            }
            let ty = reg(l.elem(reads[1].0));
            let x = l.widen(nest, &value, ty, access.lanes);
            nest.select(&mut l.w, nest.depth());
            l.write_memory(&access, &x);
            Ok(())
        })
    }

    /// Replaces an access with one address by one with `lanes` equal addresses.
    fn spread(&mut self, nest: &mut LoopNest, access: Access, lanes: usize) -> Access {
        let level = nest.depth();
        let LaneAddresses::Contiguous(p) = access.place else {
            panic!("internal compiler error: an address has the wrong number of lanes; please report this")
        };
        let place = LaneAddresses::Scattered(self.widen(nest, &Evaluated { name: p, lanes: 1, level }, "ptr", lanes));
        let mask = access.mask.map(|m| self.widen(nest, &Evaluated { name: m, lanes: 1, level }, "i1", lanes));
        Access { place, mask, lanes, ..access }
    }

    /// Emits loops over the elements of pointer operands (operand 0; a mask is operand 2). Scalars take no loop.
    fn loop_over_pointers(
        &mut self,
        operands: &[Value],
        body: impl Fn(&mut Self, &mut LoopNest, &[(Value, DimMap)], Option<usize>) -> Result<()>,
    ) -> Result<()> {
        let shape = self.shape(operands[0]).to_vec();
        let map = identity(&shape);
        let reads: Vec<(Value, DimMap)> = operands.iter().map(|&v| (v, map.clone())).collect();
        self.materialize_operands(&reads, &shape)?;
        let (vec_dim, lanes) = self.vector_dim(&shape, &reads, &[]);
        let spec = LoopNestSpec::new(&shape, vec_dim, lanes);
        let mask = (operands.len() > 2).then_some(2);
        self.loop_nest(&spec, &reads, &[], |l, nest| body(l, nest, &reads, mask))
    }

    /// Lowers `view[i] = op(view[i], value[i])`, with one atomic operation per element in bounds.
    pub fn atomic_view(&mut self, id: OpId, op: AtomicOp, boundary: &[usize]) -> Result<()> {
        let (view, value) = (self.func.op(id).operands[0], self.func.op(id).operands[1]);
        self.materialize_clobbered_loads(self.underlying_argument(view), None)?;
        let shape = self.func.ty(view).shape().to_vec();
        let map = identity(&shape);
        let reads = [(value, map.clone())];
        self.materialize_operands(&reads, &shape)?;
        let spec = LoopNestSpec::new(&shape, None, 1);
        let view = self.view(view);
        // Bounds are tested per element: the atomic update costs far more.
        self.loop_nest(&spec, &reads, &[], |l, nest| {
            let value = l.eval(nest, value, &map);
            let fast = std::mem::replace(&mut nest.in_bounds, false);
            let (access, _) = l.view_access(nest, &view, &map, boundary);
            nest.in_bounds = fast;
            let LaneAddresses::Contiguous(pointer) = access.place else { unreachable!("one lane has one address") };
            nest.select(&mut l.w, nest.depth());
            l.if_mask(access.mask.as_deref(), |l| {
                l.atomic_rmw(op, view.elem, &pointer, &value.name, "monotonic");
            });
            Ok(())
        })
    }

    /// Lowers atomics through pointers. The old values become a tile (or scalar).
    pub fn atomic(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let operands = data.operands.clone();
        let result = data.results[0];
        let elem = self.elem(result).num().expect("atomics are on numbers");
        let shape = self.shape(operands[0]).to_vec();
        let map = identity(&shape);
        let reads: Vec<(Value, DimMap)> = operands.iter().map(|&v| (v, map.clone())).collect();
        self.materialize_operands(&reads, &shape)?;
        let tile = self.new_tile(&shape, self.elem(result));
        let (op, mask_at, sem) = match &self.func.op(id).op {
            Op::AtomicRmw { op, sem, .. } => (Some(*op), 2, sem.unwrap_or(MemSem::Relaxed)),
            Op::AtomicCas { sem, .. } => (None, 3, sem.unwrap_or(MemSem::AcqRel)),
            other => panic!("internal compiler error: `{}` is not an atomic; please report this", other.mnemonic()),
        };
        let (order, written) = match sem {
            MemSem::Relaxed => ("monotonic", self.underlying_argument(operands[0])),
            // Then other programs may change any memory, or do so before.
            other => (other.name(), None),
        };
        self.materialize_clobbered_loads(written, None)?;
        let slot = self.alloca(reg_num(elem));
        let spec = LoopNestSpec::new(&shape, None, 1);
        self.loop_nest(&spec, &reads, &[], |l, nest| {
            let evs: Vec<Evaluated> = reads.iter().map(|(v, m)| l.eval(nest, *v, m)).collect();
            nest.select(&mut l.w, nest.depth());
            l.w.line(format!("store {} {}, ptr {slot}", reg_num(elem), literal_zero(elem)));
            let mask = evs.get(mask_at).map(|mask| mask.name.clone());
            l.if_mask(mask.as_deref(), |l| {
                let old = match op {
                    Some(op) => l.atomic_rmw(op, elem, &evs[0].name, &evs[1].name, order),
                    None => l.compare_and_swap(elem, [&evs[0].name, &evs[1].name, &evs[2].name], order),
                };
                l.w.line(format!("store {} {old}, ptr {slot}", reg_num(elem)));
            });
            let old = l.w.inst(format!("load {}, ptr {slot}", reg_num(elem)));
            let level = nest.depth();
            l.write_tile(nest, &tile, &map, &Evaluated { name: old, lanes: 1, level });
            Ok(())
        })?;
        self.define(result, tile);
        Ok(())
    }

    /// Loads a counter until it has a value.
    pub fn semaphore_wait(&mut self, id: OpId) -> Result<()> {
        // Other programs change any memory while this one waits.
        self.materialize_clobbered_loads(None, None)?;
        let [counter, value] = [0, 1].map(|i| self.scalar(self.func.op(id).operands[i]));
        let (again, released) = (self.w.fresh_label("wait"), self.w.fresh_label("released"));
        self.w.branch(&again);
        self.w.label(&again);
        let found = self.w.inst(format!("load atomic i32, ptr {counter} acquire, align 4"));
        let has_value = self.w.inst(format!("icmp eq i32 {found}, {value}"));
        self.w.branch_if(&has_value, &released, &again);
        self.w.label(&released);
        Ok(())
    }

    /// Binds the result of an op that is not fused to an arena tile; scalars are read from the tile.
    pub fn define(&mut self, result: Value, tile: TileRef) {
        if self.func.ty(result).is_tensor() {
            self.set_tile(result, tile);
            return;
        }
        let spec = LoopNestSpec::new(&[], None, 1);
        let target = self.w.selected();
        let mut nest = LoopNest::open(&mut self.w, &spec, true);
        let ev = self.read_tile(&mut nest, &tile, &Vec::new());
        nest.close(&mut self.w, target);
        self.scalars.insert(result, ev.name);
        self.arena.release(tile.buffer);
    }

    /// Runs `body` where the mask is true.
    fn if_mask(&mut self, mask: Option<&str>, body: impl FnOnce(&mut Self)) {
        let Some(mask) = mask else { return body(self) };
        let (inside, after) = (self.w.fresh_label("masked"), self.w.fresh_label("after"));
        self.w.branch_if(mask, &inside, &after);
        self.w.label(&inside);
        body(self);
        self.w.branch(&after);
        self.w.label(&after);
    }

    /// Emits one atomic read-modify-write. Returns the old value.
    fn atomic_rmw(&mut self, op: AtomicOp, d: DType, pointer: &str, value: &str, order: &str) -> String {
        let (bits, align) = (bits_type(d), d.bytes());
        let integer = match (op, d.is_float()) {
            (AtomicOp::Xchg, _) => Some("xchg"),
            (_, true) => None,
            (AtomicOp::Add, _) => Some("add"),
            (AtomicOp::And, _) => Some("and"),
            (AtomicOp::Or, _) => Some("or"),
            (AtomicOp::Xor, _) => Some("xor"),
            (AtomicOp::Min, _) => Some(if d.is_signed_int() { "min" } else { "umin" }),
            (AtomicOp::Max, _) => Some(if d.is_signed_int() { "max" } else { "umax" }),
        };
        if let Some(op) = integer {
            let new = to_bits(&mut self.w, d, 1, value);
            let old = self.w.inst(format!("atomicrmw {op} ptr {pointer}, {bits} {new} {order}, align {align}"));
            return from_bits(&mut self.w, d, 1, &old);
        }
        let op = match op {
            AtomicOp::Add => BinaryOp::Add,
            AtomicOp::Min => BinaryOp::Min,
            AtomicOp::Max => BinaryOp::Max,
            AtomicOp::And | AtomicOp::Or | AtomicOp::Xor | AtomicOp::Xchg => {
                panic!("internal compiler error: bitwise atomic on {d}; please report this")
            }
        };
        self.atomic_cas_loop(op, d, pointer, value, order)
    }

    /// Updates a float: repeats compare-and-swap until it succeeds.
    fn atomic_cas_loop(&mut self, op: BinaryOp, d: DType, pointer: &str, value: &str, order: &str) -> String {
        let (bits, align) = (bits_type(d), d.bytes());
        let slot = self.alloca(bits);
        let first = self.w.inst(format!("load atomic {bits}, ptr {pointer} monotonic, align {align}"));
        self.w.line(format!("store {bits} {first}, ptr {slot}"));
        let (again, done) = (self.w.fresh_label("again"), self.w.fresh_label("swapped"));
        self.w.branch(&again);
        self.w.label(&again);
        let old = self.w.inst(format!("load {bits}, ptr {slot}"));
        let x = from_bits(&mut self.w, d, 1, &old);
        let sum = ew::binary(&mut self.w, op, d, 1, &x, value);
        let new = to_bits(&mut self.w, d, 1, &sum);
        let pair = self
            .w
            .inst(format!("cmpxchg weak ptr {pointer}, {bits} {old}, {bits} {new} {order} monotonic, align {align}"));
        let seen = self.w.inst(format!("extractvalue {{ {bits}, i1 }} {pair}, 0"));
        let swapped = self.w.inst(format!("extractvalue {{ {bits}, i1 }} {pair}, 1"));
        self.w.line(format!("store {bits} {seen}, ptr {slot}"));
        self.w.branch_if(&swapped, &done, &again);
        self.w.label(&done);
        x
    }

    fn compare_and_swap(&mut self, d: DType, [pointer, expected, new]: [&str; 3], order: &str) -> String {
        let (bits, align) = (bits_type(d), d.bytes());
        let (expected, new) = (to_bits(&mut self.w, d, 1, expected), to_bits(&mut self.w, d, 1, new));
        // A swap that fails releases nothing.
        let failure = if matches!(order, "acquire" | "acq_rel") { "acquire" } else { "monotonic" };
        let pair = self
            .w
            .inst(format!("cmpxchg ptr {pointer}, {bits} {expected}, {bits} {new} {order} {failure}, align {align}"));
        let old = self.w.inst(format!("extractvalue {{ {bits}, i1 }} {pair}, 0"));
        from_bits(&mut self.w, d, 1, &old)
    }

    /// Loads a scalar through a pointer, at the position of the op.
    pub fn scalar_load(&mut self, id: OpId) {
        let data = self.func.op(id);
        let names: Vec<String> = data.operands.iter().map(|&v| self.scalar(v)).collect();
        let elem = self.elem(data.results[0]);
        let d = elem.num().expect("loads yield numbers");
        let access = Access {
            place: LaneAddresses::Contiguous(names[0].clone()),
            elem: d,
            lanes: 1,
            mask: names.get(1).cloned(),
        };
        let mut value = self.read_memory(&access, None);
        if let Some(other) = names.get(2) {
            value = ew::select(&mut self.w, elem, 1, &names[1], &value, other);
        }
        self.scalars.insert(data.results[0], value);
    }

    /// `join`: stacks two tiles in a new last dimension.
    pub fn join(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let (operands, result) = (data.operands.clone(), data.results[0]);
        let tile = self.new_tile(self.shape(result), self.elem(result));
        for (side, &v) in operands.iter().enumerate() {
            let strides = tile.strides[..tile.strides.len() - 1].to_vec();
            let half = TileRef { offset: side, strides, ..tile.clone() };
            if self.func.ty(v).is_scalar() {
                self.write_scalar(&half, v);
            } else {
                self.materialize_operands(&[(v, identity(self.shape(v)))], self.shape(v))?;
                self.fill(v, &half)?;
            }
        }
        self.set_tile(result, tile);
        Ok(())
    }

    /// Writes a scalar to an arena tile without dimensions.
    pub fn write_scalar(&mut self, tile: &TileRef, v: Value) {
        let spec = LoopNestSpec::new(&[], None, 1);
        let target = self.w.selected();
        let mut nest = LoopNest::open(&mut self.w, &spec, true);
        nest.select(&mut self.w, 0);
        let ev = Evaluated { name: self.scalar(v), lanes: 1, level: 0 };
        self.write_tile(&mut nest, tile, &Vec::new(), &ev);
        nest.close(&mut self.w, target);
    }

    /// `split`: both halves are views of the operand's buffer.
    pub fn split(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let (operand, results) = (data.operands[0], data.results.clone());
        let (tile, temporary) = self.tile_of(operand)?;
        let (last, strides) = tile.strides.split_last().expect("a tile to split has dimensions");
        for (side, &r) in results.iter().enumerate() {
            let half = TileRef { offset: tile.offset + side * last, strides: strides.to_vec(), ..tile.clone() };
            self.arena.retain(tile.buffer);
            self.define(r, half);
        }
        if temporary {
            self.arena.release(tile.buffer);
        }
        Ok(())
    }

    /// `gather`: reads the operand's buffer at the indices, element by element.
    pub fn gather(&mut self, id: OpId, axis: usize) -> Result<()> {
        let data = self.func.op(id);
        let (source, index, result) = (data.operands[0], data.operands[1], data.results[0]);
        let (from, temporary) = self.tile_of(source)?;
        let (extent, shape) = (self.shape(source)[axis], self.shape(result).to_vec());
        let map = identity(&shape);
        let mut others = map.clone();
        others[axis] = None;
        let reads = [(index, map.clone())];
        self.materialize_operands(&reads, &shape)?;
        let tile = self.new_tile(&shape, self.elem(result));
        let (ty, stride) = (super::repr::stored(from.elem), from.strides[axis]);
        let spec = LoopNestSpec::new(&shape, None, 1);
        self.loop_nest(&spec, &reads, &[], |l, nest| {
            let picked = l.eval(nest, index, &map);
            let (line, _) = l.tile_address(nest, &from, &others);
            let depth = nest.depth();
            nest.select(&mut l.w, depth);
            let at = modulo(&mut l.w, &picked.name, extent);
            let at = l.w.inst(format!("zext i32 {at} to i64"));
            let at = l.w.inst(format!("mul i64 {at}, {stride}"));
            let p = l.w.inst(format!("getelementptr {ty}, ptr {line}, i64 {at}"));
            let raw = l.w.inst(format!("load {ty}, ptr {p}, align {}", super::repr::stored_bytes(from.elem)));
            let name = super::repr::from_stored(&mut l.w, from.elem, 1, &raw);
            l.write_tile(nest, &tile, &map, &Evaluated { name, lanes: 1, level: depth });
            Ok(())
        })?;
        if temporary {
            self.arena.release(from.buffer);
        }
        self.define(result, tile);
        Ok(())
    }

    /// `reshape` to other extents: reuses the buffer if it is dense, else makes a dense copy.
    pub fn reshape(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let (operand, result) = (data.operands[0], data.results[0]);
        let (mut tile, mut temporary) = self.tile_of(operand)?;
        if !self.dense(operand, &tile) {
            let copy = self.new_tile(self.shape(operand), self.elem(operand));
            self.fill(operand, &copy)?;
            if temporary {
                self.arena.release(tile.buffer);
            }
            (tile, temporary) = (copy, true);
        }
        if !temporary {
            self.arena.retain(tile.buffer);
        }
        let strides = super::loop_nest::row_major(self.shape(result));
        self.define(result, TileRef { strides, ..tile });
        Ok(())
    }
}

fn literal_zero(d: DType) -> &'static str {
    match reg_num(d) {
        "float" | "double" => "0.0",
        _ => "0",
    }
}

/// An i32 modulo an extent: at least 0.
fn modulo(w: &mut Writer, n: &str, extent: usize) -> String {
    if extent.is_power_of_two() {
        return w.inst(format!("and i32 {n}, {}", extent - 1));
    }
    let rest = w.inst(format!("srem i32 {n}, {extent}"));
    let above = w.inst(format!("add i32 {rest}, {extent}"));
    let negative = w.inst(format!("icmp slt i32 {rest}, 0"));
    w.inst(format!("select i1 {negative}, i32 {above}, i32 {rest}"))
}
