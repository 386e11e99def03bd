//! Evaluates fused tiles inside of loop nests, vector by vector.

use super::access::{Access, LaneAddresses};
use super::elementwise as ew;
use super::loop_nest::{DimMap, Evaluated, LoopNest, LoopNestSpec, TileRef, identity, row_major};
use super::repr::{in_memory, reg};
use super::state::{Lowering, Result};
use super::writer::{iota, splat, vector};
use crate::ir::{BinaryOp, DType, Elem, Literal, Op, OpId, Value};
use crate::num;
use std::collections::HashSet;

/// A view that a loop nest accesses.
#[derive(Clone)]
pub struct ViewUse {
    pub view: Value,
    /// The map of the accessed tile.
    pub map: DimMap,
    /// The dimensions whose bounds are checked.
    pub boundary: Vec<usize>,
}

/// The operands of a fused op, broadcast to the same number of lanes.
struct Operands {
    names: Vec<String>,
    lanes: usize,
    /// The innermost loop that an operand depends on.
    level: usize,
}

/// The LLVM operand of a literal.
pub fn literal(d: DType, lanes: usize, value: Literal) -> String {
    match value {
        Literal::Bool(b) => ew::number(d, lanes, b as u8 as f64),
        Literal::Float(x) if d.is_float() => {
            let rounded = round_literal(d, x);
            ew::number(d, lanes, rounded)
        }
        Literal::Float(x) => splat(reg(Elem::Num(d)), lanes, x as i64),
        Literal::Int(i) if d.is_float() => ew::number(d, lanes, round_literal(d, i as f64)),
        Literal::Int(i) => {
            let bits = d.bits();
            // Printed as the signed number with the same bits, which LLVM accepts for any integer type.
            let shifted = ((i as i128) << (128 - bits)) >> (128 - bits);
            if d == DType::Bool {
                splat("i1", lanes, i64::from(i != 0))
            } else {
                splat(reg(Elem::Num(d)), lanes, shifted)
            }
        }
    }
}

/// A literal rounded to the element type.
fn round_literal(d: DType, x: f64) -> f64 {
    match d {
        DType::F16 => half::f16::from_f64(x).to_f64(),
        DType::BF16 => half::bf16::from_f64(x).to_f64(),
        DType::F8E4M3 | DType::F8E5M2 => num::decode(d, num::encode(d, x)),
        _ => x,
    }
}

impl Lowering<'_> {
    /// The operands of a fused op, with the maps by which an element of the result reads them.
    fn operand_maps(&self, id: OpId, map: &DimMap) -> Vec<(Value, DimMap)> {
        let data = self.func.op(id);
        let drop_units = |v: Value, map: DimMap| -> (Value, DimMap) {
            let shape = self.shape(v);
            (v, map.into_iter().zip(shape).map(|(m, &n)| if n == 1 { None } else { m }).collect())
        };
        let first = || data.operands[0];
        match &data.op {
            Op::Splat | Op::Constant { .. } | Op::Arange { .. } | Op::LoadView { .. } => Vec::new(),
            Op::ExpandDims { axis } => {
                let mut inner = map.clone();
                inner.remove(*axis);
                vec![drop_units(first(), inner)]
            }
            Op::Trans { perm } => {
                let mut inner = vec![None; map.len()];
                for (i, &p) in perm.iter().enumerate() {
                    inner[p] = map[i];
                }
                vec![drop_units(first(), inner)]
            }
            Op::Reshape => {
                let result = self.shape(data.results[0]);
                let mut real = map.iter().zip(result).filter(|(_, n)| **n != 1).map(|(m, _)| *m);
                let inner = self.shape(first()).iter().map(|&n| if n == 1 { None } else { real.next().flatten() });
                vec![(first(), inner.collect())]
            }
            _ => data.operands.iter().map(|&v| drop_units(v, map.clone())).collect(),
        }
    }

    /// All tiles that evaluating `reads` visits, once per map. Tiles with buffers are leaves.
    pub fn visited(&self, reads: &[(Value, DimMap)]) -> Vec<(Value, DimMap)> {
        let mut seen: HashSet<(Value, DimMap)> = HashSet::new();
        let mut stack: Vec<(Value, DimMap)> = reads.to_vec();
        let mut order = Vec::new();
        while let Some((v, map)) = stack.pop() {
            if self.func.ty(v).is_scalar() || !seen.insert((v, map.clone())) {
                continue;
            }
            if let Some(id) = self.fused_op(v) {
                stack.extend(self.operand_maps(id, &map));
            }
            order.push((v, map));
        }
        order
    }

    /// Whether the map covers the iteration space exactly once, with dimensions in order.
    fn covers(map: &DimMap, shape: &[usize]) -> bool {
        let used: Vec<usize> = map.iter().flatten().copied().collect();
        let real: Vec<usize> = (0..shape.len()).filter(|&d| shape[d] > 1).collect();
        used == real
    }

    /// Materializes the values that need their own loops before `reads` can be evaluated over `shape`.
    pub fn materialize_operands(&mut self, reads: &[(Value, DimMap)], shape: &[usize]) -> Result<()> {
        loop {
            let next = self.visited(reads).into_iter().rev().find(|(v, map)| {
                let i = v.0 as usize;
                self.fused_op(*v).is_some()
                    && (self.plan.own_loops[i] || (self.plan.buffered[i] && !Self::covers(map, shape)))
                    && self.uses[i] > 0
            });
            match next {
                Some((v, _)) => self.materialize(v)?,
                None => return Ok(()),
            }
        }
    }

    /// The dimension of `shape` along which most accesses are contiguous, and a vector width that divides its extent.
    pub fn vector_dim(&self, shape: &[usize], reads: &[(Value, DimMap)], writes: &[ViewUse]) -> (Option<usize>, usize) {
        let mut votes = vec![0i64; shape.len()];
        let mut vote = |d: Option<usize>, weight: i64| {
            if let Some(d) = d {
                votes[d] += weight;
            }
        };
        for (v, map) in self.visited(reads) {
            if let Some(tile) = self.tiles.get(&v) {
                vote(map.iter().zip(&tile.strides).find(|(d, s)| d.is_some() && **s == 1).and_then(|(d, _)| *d), 2);
            } else if let Some(id) = self.fused_op(v)
                && let Op::LoadView { .. } = self.func.op(id).op
            {
                vote(map[self.view(self.func.op(id).operands[0]).order[0]], 3);
            }
        }
        for ViewUse { view, map, .. } in writes {
            vote(map[self.view(*view).order[0]], 3);
        }
        if let Some(last) = (0..shape.len()).rev().find(|&d| shape[d] > 1) {
            votes[last] += 1;
        }
        let best = (0..shape.len()).filter(|&d| shape[d] > 1).max_by_key(|&d| (votes[d], d));
        let lanes = best.map_or(1, |d| self.lanes_for(shape[d]));
        if lanes == 1 { (None, 1) } else { (best, lanes) }
    }

    /// The largest power of two that divides the extent and fits a vector of f32.
    pub fn lanes_for(&self, extent: usize) -> usize {
        (1 << extent.trailing_zeros()).min(self.vectors.lanes)
    }

    /// Runs `body` inside of a loop nest. Emits two versions under a run-time test where a view may be out of bounds or
    /// non-contiguous. Also fills the buffers of fused values that the plan buffers.
    pub fn loop_nest(
        &mut self,
        spec: &LoopNestSpec,
        reads: &[(Value, DimMap)],
        writes: &[ViewUse],
        mut body: impl FnMut(&mut Self, &mut LoopNest) -> Result<()>,
    ) -> Result<()> {
        let mut side_buffers: Vec<(Value, TileRef)> = Vec::new();
        for (v, _) in self.visited(reads) {
            let i = v.0 as usize;
            let in_block = self.plan.block[i] == self.block;
            if self.plan.buffered[i]
                && in_block
                && self.fused_op(v).is_some()
                && side_buffers.iter().all(|(s, _)| *s != v)
            {
                let tile = self.new_tile(self.shape(v), self.elem(v));
                side_buffers.push((v, tile));
            }
        }
        let target = self.w.selected();
        let condition = self.in_bounds_condition(spec, reads, writes);
        let done = self.w.fresh_label("done");
        let edge = self.w.fresh_label("edge");
        if let Some(c) = &condition {
            let inside = self.w.fresh_label("inside");
            self.w.branch_if(c, &inside, &edge);
            self.w.label(&inside);
        }
        self.loop_nest_variant(spec, &side_buffers, true, &mut body)?;
        if condition.is_some() {
            self.w.branch(&done);
            self.w.label(&edge);
            self.loop_nest_variant(spec, &side_buffers, false, &mut body)?;
            self.w.branch(&done);
            self.w.label(&done);
        }
        debug_assert_eq!(self.w.selected(), target);
        for (v, tile) in side_buffers {
            self.set_tile(v, tile);
        }
        Ok(())
    }

    fn loop_nest_variant(
        &mut self,
        spec: &LoopNestSpec,
        side_buffers: &[(Value, TileRef)],
        in_bounds: bool,
        body: &mut impl FnMut(&mut Self, &mut LoopNest) -> Result<()>,
    ) -> Result<()> {
        let target = self.w.selected();
        let mut nest = LoopNest::open(&mut self.w, spec, in_bounds);
        nest.side_buffers = side_buffers.iter().cloned().collect();
        nest.select(&mut self.w, nest.depth());
        body(self, &mut nest)?;
        nest.close(&mut self.w, target);
        Ok(())
    }

    /// The run-time condition that all views of the nest are in bounds and contiguous; `None` where it always holds.
    fn in_bounds_condition(
        &mut self,
        spec: &LoopNestSpec,
        reads: &[(Value, DimMap)],
        writes: &[ViewUse],
    ) -> Option<String> {
        let mut uses: Vec<ViewUse> = writes.to_vec();
        for (v, map) in self.visited(reads) {
            if let Some(id) = self.fused_op(v)
                && let Op::LoadView { boundary, .. } = &self.func.op(id).op
            {
                uses.push(ViewUse { view: self.func.op(id).operands[0], map, boundary: boundary.clone() });
            }
        }
        let mut all: Option<String> = None;
        let mut require = |w: &mut super::writer::Writer, condition: String| {
            all = Some(match all.take() {
                None => condition,
                Some(other) => w.inst(format!("and i1 {other}, {condition}")),
            });
        };
        let mut seen = HashSet::new();
        for ViewUse { view: v, map, boundary } in uses {
            let view = self.view(v);
            if let Some(d) = map.iter().position(|d| d.is_some() && *d == spec.vec_dim)
                && spec.lanes > 1
                && view.strides[d] != "1"
                && seen.insert((v, d, false))
            {
                let c = self.w.inst(format!("icmp eq i64 {}, 1", view.strides[d]));
                require(&mut self.w, c);
            }
            for d in boundary {
                if !seen.insert((v, d, true)) {
                    continue;
                }
                let (offset, extent) = (&view.offsets[d], &view.shape[d]);
                let c = self.w.inst(format!("icmp sge i64 {offset}, 0"));
                require(&mut self.w, c);
                // Extents are not negative: this difference cannot wrap, while offset + block could.
                let last = self.w.inst(format!("sub i64 {extent}, {}", view.block[d]));
                let c = self.w.inst(format!("icmp sle i64 {offset}, {last}"));
                require(&mut self.w, c);
            }
        }
        all
    }

    /// The value of a tile (or scalar) at the current point of the nest.
    pub fn eval(&mut self, nest: &mut LoopNest, v: Value, map: &DimMap) -> Evaluated {
        if self.func.ty(v).is_scalar() {
            return Evaluated { name: self.scalar(v), lanes: 1, level: 0 };
        }
        if let Some(ev) = nest.cached(v, map) {
            return ev;
        }
        let ev = match self.fused_op(v) {
            None => {
                let tile = self.tiles.get(&v).cloned();
                let tile = tile.unwrap_or_else(|| {
                    panic!("internal compiler error: tile %{} is used before it is computed; please report this", v.0)
                });
                self.read_tile(nest, &tile, map)
            }
            Some(id) => self.eval_op(nest, id, map),
        };
        nest.cache(v, map, &ev);
        if !nest.lane0
            && let Some(tile) = nest.side_buffers.get(&v).cloned()
        {
            nest.select(&mut self.w, nest.depth().min(nest.map_level(map).max(ev.level)));
            self.write_tile(nest, &tile, map, &ev);
        }
        ev
    }

    /// Evaluates operands and broadcasts them to the same number of lanes.
    fn operands(&mut self, nest: &mut LoopNest, reads: &[(Value, DimMap)]) -> Operands {
        let evs: Vec<Evaluated> = reads.iter().map(|(v, map)| self.eval(nest, *v, map)).collect();
        let lanes = evs.iter().map(|e| e.lanes).max().unwrap_or(1);
        let level = evs.iter().map(|e| e.level).max().unwrap_or(0);
        let names = evs
            .iter()
            .zip(reads)
            .map(|(e, (v, _))| {
                let ty = reg(self.elem(*v));
                self.widen(nest, e, ty, lanes)
            })
            .collect();
        nest.select(&mut self.w, level);
        Operands { names, lanes, level }
    }

    fn eval_op(&mut self, nest: &mut LoopNest, id: OpId, map: &DimMap) -> Evaluated {
        let data = self.func.op(id);
        let result = data.results[0];
        let elem = self.elem(result);
        let reads = self.operand_maps(id, map);
        match &data.op {
            Op::Constant { value } => {
                let name = literal(elem.num().expect("constants are numbers"), 1, *value);
                return Evaluated { name, lanes: 1, level: 0 };
            }
            Op::Arange { start, .. } => return self.eval_arange(nest, *start, map),
            Op::Splat => return Evaluated { name: self.scalar(data.operands[0]), lanes: 1, level: 0 },
            Op::LoadView { boundary, padding, .. } => {
                let view = self.view(data.operands[0]);
                let (access, level) = self.view_access(nest, &view, map, boundary);
                nest.select(&mut self.w, level);
                let name = self.read_memory(&access, Some(*padding));
                return Evaluated { name, lanes: access.lanes, level };
            }
            Op::Load { .. } => return self.eval_load(nest, id, &reads),
            Op::ExpandDims { .. } | Op::Broadcast | Op::Trans { .. } | Op::Hint { .. } | Op::Reshape => {
                return self.eval(nest, reads[0].0, &reads[0].1);
            }
            _ => {}
        }
        let Operands { names, lanes, level } = self.operands(nest, &reads);
        let name = self.apply(id, lanes, &names);
        Evaluated { name, lanes, level }
    }

    /// Emits an elementwise op on register values with `lanes` lanes, in the selected section.
    pub fn apply(&mut self, id: OpId, lanes: usize, x: &[String]) -> String {
        let data = self.func.op(id);
        let elem = self.elem(data.results[0]);
        let operand = self.elem(data.operands[0]);
        let number = |e: Elem| e.num().unwrap_or_else(|| panic!("internal compiler error: arithmetic on pointers"));
        let w = &mut self.w;
        match &data.op {
            Op::Unary(op) => ew::unary(w, *op, number(elem), lanes, &x[0]),
            Op::Binary(op) => ew::binary(w, *op, number(elem), lanes, &x[0], &x[1]),
            Op::Cmp(op) => ew::compare(w, *op, operand, lanes, &x[0], &x[1]),
            Op::Fma => ew::fma(w, number(elem), lanes, &x[0], &x[1], &x[2]),
            Op::Select => ew::select(w, elem, lanes, &x[0], &x[1], &x[2]),
            Op::Cast => ew::cast(w, number(operand), number(elem), lanes, &x[0]),
            Op::Bitcast => ew::bitcast(w, operand, elem, lanes, &x[0]),
            Op::PtrAdd => {
                let offset = self.func.ty(data.operands[1]).dtype().expect("offsets are integers");
                let index = ew::cast(w, offset, DType::I64, lanes, &x[1]);
                let memory = in_memory(elem.pointee().expect("pointers point at something"));
                let (pointers, indices) = (vector("ptr", lanes), vector("i64", lanes));
                w.inst(format!("getelementptr {memory}, {pointers} {}, {indices} {index}", x[0]))
            }
            other => panic!("internal compiler error: `{}` is not elementwise; please report this", other.mnemonic()),
        }
    }

    fn eval_arange(&mut self, nest: &mut LoopNest, start: i64, map: &DimMap) -> Evaluated {
        let Some(d) = map[0] else { return Evaluated { name: start.to_string(), lanes: 1, level: 0 } };
        let (index, level) = (nest.index[d].clone(), nest.level[d]);
        let first = match index.parse::<i64>() {
            Ok(i) => (i + start).to_string(),
            Err(_) => {
                let narrow = nest.inst(&mut self.w, level, format!("trunc i64 {index} to i32"));
                if start == 0 { narrow } else { nest.inst(&mut self.w, level, format!("add i32 {narrow}, {start}")) }
            }
        };
        if !nest.varies(map) {
            return Evaluated { name: first, lanes: 1, level };
        }
        let lanes = nest.lanes;
        let wide = self.widen(nest, &Evaluated { name: first, lanes: 1, level }, "i32", lanes);
        let name =
            nest.inst(&mut self.w, level, format!("add {} {wide}, {}", vector("i32", lanes), iota("i32", lanes)));
        Evaluated { name, lanes, level }
    }

    /// The distance between consecutive lanes of an integer or pointer tile; `None` if it is not constant. Assumes that
    /// integers do not wrap between the lanes of a vector.
    pub fn lane_distance(&self, nest: &LoopNest, v: Value, map: &DimMap) -> Option<i64> {
        if self.func.ty(v).is_scalar() || !nest.varies(map) {
            return Some(0);
        }
        let id = self.fused_op(v)?;
        let reads = self.operand_maps(id, map);
        let distance = |i: usize| self.lane_distance(nest, reads[i].0, &reads[i].1);
        match &self.func.op(id).op {
            Op::Constant { .. } | Op::Splat => Some(0),
            Op::Arange { .. } => Some(1),
            Op::ExpandDims { .. } | Op::Broadcast | Op::Trans { .. } | Op::Hint { .. } | Op::Reshape => distance(0),
            Op::PtrAdd | Op::Binary(BinaryOp::Add) => Some(distance(0)? + distance(1)?),
            Op::Binary(BinaryOp::Sub) => Some(distance(0)? - distance(1)?),
            Op::Binary(BinaryOp::Mul) => {
                let constant = |i: usize| self.func.constant_int(reads[i].0);
                match (distance(0)?, distance(1)?) {
                    (0, 0) => Some(0),
                    (d, 0) => Some(d * constant(1)?),
                    (0, d) => Some(d * constant(0)?),
                    _ => None,
                }
            }
            Op::Cast if self.func.ty(reads[0].0).dtype().is_some_and(DType::is_int) => distance(0),
            _ => None,
        }
    }

    /// The access through a pointer tile (`reads[0]`), and its loop level. `mask` is an index into `reads`.
    pub fn pointer_access(
        &mut self,
        nest: &mut LoopNest,
        reads: &[(Value, DimMap)],
        mask: Option<usize>,
    ) -> (Access, usize) {
        let (pointer, map) = &reads[0];
        let elem = self.elem(*pointer).pointee().expect("loads and stores go through pointers");
        let varies = nest.varies(map);
        let contiguous = varies && self.lane_distance(nest, *pointer, map) == Some(1);
        let mask = mask.map(|i| {
            let ev = self.eval(nest, reads[i].0, &reads[i].1);
            (ev.lanes, ev)
        });
        nest.lane0 |= contiguous;
        let at = self.eval(nest, *pointer, map);
        nest.lane0 = false;
        let mask_lanes = mask.as_ref().map_or(1, |(lanes, _)| *lanes);
        let lanes = if contiguous { nest.lanes } else { at.lanes.max(mask_lanes) };
        let level = at.level.max(mask.as_ref().map_or(0, |(_, ev)| ev.level)).max(nest.map_level(map));
        let place = if contiguous || lanes == 1 {
            LaneAddresses::Contiguous(at.name)
        } else {
            LaneAddresses::Scattered(self.widen(nest, &at, "ptr", lanes))
        };
        let mask = mask.map(|(_, ev)| self.widen(nest, &ev, "i1", lanes));
        (Access { place, elem, lanes, mask }, level)
    }

    fn eval_load(&mut self, nest: &mut LoopNest, id: OpId, reads: &[(Value, DimMap)]) -> Evaluated {
        let mask = (reads.len() > 1).then_some(1);
        let (mut access, mut level) = self.pointer_access(nest, reads, mask);
        let other = reads.get(2).map(|(v, map)| self.eval(nest, *v, map));
        let elem = self.elem(self.func.result(id));
        let constant_true = mask.is_some_and(|i| matches!(self.func.constant(reads[i].0), Some(Literal::Bool(true))));
        if constant_true {
            access.mask = None;
        }
        nest.select(&mut self.w, level);
        let mut name = self.read_memory(&access, None);
        let mut lanes = access.lanes;
        if let (Some(other), Some(mask)) = (other, &access.mask) {
            lanes = lanes.max(other.lanes);
            level = level.max(other.level);
            let mask = self.widen(nest, &Evaluated { name: mask.clone(), lanes: access.lanes, level }, "i1", lanes);
            let value = self.widen(nest, &Evaluated { name, lanes: access.lanes, level }, reg(elem), lanes);
            let other = self.widen(nest, &other, reg(elem), lanes);
            nest.select(&mut self.w, level);
            name = ew::select(&mut self.w, elem, lanes, &mask, &value, &other);
        }
        Evaluated { name, lanes, level }
    }

    /// Computes a fused tile into a buffer, in its own loops.
    pub fn materialize(&mut self, v: Value) -> Result<()> {
        let tile = self.new_tile(self.shape(v), self.elem(v));
        self.plan.buffered[v.0 as usize] = false;
        self.fill(v, &tile)?;
        self.set_tile(v, tile);
        Ok(())
    }

    /// Evaluates a tile (fused or not) into an arena tile.
    pub fn fill(&mut self, v: Value, tile: &TileRef) -> Result<()> {
        let shape = self.shape(v).to_vec();
        let map = identity(&shape);
        let reads = [(v, map.clone())];
        self.prepare_operands(v, &shape)?;
        let (vec_dim, lanes) = self.vector_dim(&shape, &reads, &[]);
        let last = (0..shape.len()).rev().find(|&d| shape[d] > 1);
        if let (Some(d), Some(last)) = (vec_dim, last)
            && d != last
            && tile.strides[last] == 1
        {
            let across = self.lanes_for(shape[last]);
            if across == lanes {
                return self.fill_transposed(v, tile, d, last, lanes);
            }
        }
        let spec = LoopNestSpec::new(&shape, vec_dim, lanes);
        self.loop_nest(&spec, &reads, &[], |l, nest| {
            let value = l.eval(nest, v, &map);
            nest.select(&mut l.w, nest.depth());
            l.write_tile(nest, tile, &map, &value);
            Ok(())
        })
    }

    /// Like [`Self::materialize_operands`], for the operands of `v` only: `v` itself gets a buffer afterwards.
    fn prepare_operands(&mut self, v: Value, shape: &[usize]) -> Result<()> {
        match self.fused_op(v) {
            Some(id) => {
                let reads = self.operand_maps(id, &identity(shape));
                self.materialize_operands(&reads, shape)
            }
            None => Ok(()),
        }
    }

    /// Evaluates vectors along dimension `from`, where memory is contiguous, and writes vectors along `to`, where the
    /// tile is contiguous: transposes squares of `lanes` × `lanes` elements in registers.
    fn fill_transposed(&mut self, v: Value, tile: &TileRef, from: usize, to: usize, lanes: usize) -> Result<()> {
        let shape = self.shape(v).to_vec();
        let map = identity(&shape);
        let mut spec = LoopNestSpec::new(&shape, Some(from), lanes);
        spec.steps[to] = lanes;
        let elem = tile.elem;
        self.loop_nest(&spec, &[(v, map.clone())], &[], |l, nest| {
            let (start, depth) = (nest.index.clone(), nest.depth());
            let mut rows = Vec::new();
            for r in 0..lanes {
                nest.select(&mut l.w, depth);
                let mut index = start.clone();
                index[to] = l.w.inst(format!("add i64 {}, {r}", start[to]));
                nest.move_to(index);
                let ev = l.eval(nest, v, &map);
                let name = l.widen(nest, &ev, reg(elem), lanes);
                nest.select(&mut l.w, depth);
                rows.push(super::repr::to_stored(&mut l.w, elem, lanes, &name));
            }
            nest.select(&mut l.w, depth);
            let ty = super::repr::stored(elem);
            let columns = super::transpose::transpose(&mut l.w, ty, &rows);
            for (r, column) in columns.iter().enumerate() {
                nest.select(&mut l.w, depth);
                let mut index = start.clone();
                index[from] = l.w.inst(format!("add i64 {}, {r}", start[from]));
                nest.move_to(index);
                l.write_row(nest, tile, &map, column, lanes);
            }
            Ok(())
        })
    }

    /// Writes a vector of the stored type along a contiguous dimension of a tile that is not the vector dimension of
    /// the nest.
    fn write_row(&mut self, nest: &mut LoopNest, tile: &TileRef, map: &DimMap, value: &str, lanes: usize) {
        let depth = nest.depth();
        let pointer = self.tile_pointer(nest, tile);
        nest.select(&mut self.w, depth);
        let ty = super::repr::stored(tile.elem);
        let mut at = pointer;
        for (d, stride) in map.iter().zip(&tile.strides) {
            if let Some(d) = d {
                let offset = self.w.inst(format!("mul i64 {}, {stride}", nest.index[*d]));
                at = self.w.inst(format!("getelementptr {ty}, ptr {at}, i64 {offset}"));
            }
        }
        let align = super::repr::stored_bytes(tile.elem);
        self.w.line(format!("store {} {value}, ptr {at}, align {align}", vector(ty, lanes)));
    }

    /// The buffer of a tile with any strides, and whether the caller must release it after use.
    pub fn tile_of(&mut self, v: Value) -> Result<(TileRef, bool)> {
        if let Some(tile) = self.tiles.get(&v) {
            return Ok((tile.clone(), false));
        }
        if let Some(tile) = self.alias(v) {
            return Ok((tile, false));
        }
        if self.plan.block[v.0 as usize] == self.block {
            self.materialize(v)?;
            return Ok((self.tiles[&v].clone(), false));
        }
        let tile = self.new_tile(self.shape(v), self.elem(v));
        self.fill(v, &tile)?;
        Ok((tile, true))
    }

    /// The buffer that a chain of maps reads, with the strides of the mapped tile; `None` if the tile is no such chain.
    fn alias(&self, v: Value) -> Option<TileRef> {
        if let Some(tile) = self.tiles.get(&v) {
            return Some(tile.clone());
        }
        let id = self.fused_op(v).filter(|&id| super::plan::is_map(self.func, id))?;
        let data = self.func.op(id);
        let source = self.alias(data.operands[0])?;
        let shape = self.shape(v);
        // Composes the maps, starting with the identity.
        let full: DimMap = (0..shape.len()).map(Some).collect();
        let maps = self.operand_maps(id, &full);
        let mut strides = vec![0; shape.len()];
        for (d, &stride) in maps[0].1.iter().zip(&source.strides) {
            if let Some(d) = d {
                strides[*d] = stride;
            }
        }
        Some(TileRef { strides, ..source })
    }

    /// Whether a tile has the row-major strides of the value's shape.
    pub fn dense(&self, v: Value, tile: &TileRef) -> bool {
        let shape = self.shape(v);
        tile.offset == 0 && row_major(shape).iter().zip(&tile.strides).zip(shape).all(|((a, b), n)| *n == 1 || a == b)
    }
}
