//! Loops and branches. Carried scalars are in stack slots, which LLVM promotes to registers; carried tiles are in fixed
//! buffers.

use super::access::ViewRef;
use super::loop_nest::{TileRef, identity};
use super::plan::{is_fused, is_map};
use super::repr::reg;
use super::state::{Lowering, Result};
use crate::ir::{BlockId, DType, Effects, Op, OpId, Type, Value};

/// The location of a value between iterations, or of a branch result.
#[derive(Clone, Debug)]
enum Carried {
    Scalar {
        slot: String,
        ty: String,
    },
    /// `fixed` holds the components of a view that never change; the other components have slots.
    View {
        fixed: ViewRef,
        moving: CarriedParts,
        slots: Vec<String>,
    },
    Tile(TileRef),
}

/// The components of a carried view that have slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CarriedParts {
    Offsets,
    Everything,
}

/// A tile that waits in a temporary buffer until its target is free.
struct Temporary {
    copy: TileRef,
    target: TileRef,
    value: Value,
}

fn view_components(view: &ViewRef, moving: CarriedParts) -> Vec<(&'static str, String)> {
    let mut list: Vec<(&'static str, String)> = Vec::new();
    if moving == CarriedParts::Everything {
        list.push(("ptr", view.base.clone()));
        list.extend(view.shape.iter().chain(&view.strides).map(|x| ("i64", x.clone())));
    }
    list.extend(view.offsets.iter().map(|x| ("i64", x.clone())));
    list
}

impl Lowering<'_> {
    /// Prepares the values that a region uses from outside: they exist before it starts, and live until it ends.
    fn enter(&mut self, id: OpId) -> Result<Vec<Value>> {
        let captured = self.captured(id);
        for &v in &captured {
            if self.func.ty(v).is_tensor() {
                self.materialize_captured(v)?;
            }
        }
        if !matches!(self.func.effects(id), Effects::Pure | Effects::Read) {
            self.materialize_clobbered_loads(None, None)?;
        }
        for &v in &captured {
            self.uses[v.0 as usize] += 1;
        }
        Ok(captured)
    }

    fn leave(&mut self, captured: Vec<Value>) {
        for v in captured {
            self.used(v);
        }
    }

    /// Lowers the ops of a region. Returns its terminator.
    fn region(&mut self, block: BlockId) -> Result<OpId> {
        let outer = std::mem::replace(&mut self.block, block);
        let pending = std::mem::take(&mut self.pending_loads);
        let terminator = self.ops(block)?;
        self.pending_loads = pending;
        self.block = outer;
        Ok(terminator)
    }

    /// Allocates a location for values of a type, and stores `initial` to it if given.
    fn carry(&mut self, ty: &Type, initial: Option<Value>, moving: CarriedParts) -> Result<Carried> {
        Ok(match ty {
            Type::Scalar(elem) => {
                let ty = reg(*elem).to_string();
                let slot = self.alloca(&ty);
                if let Some(v) = initial {
                    let x = self.scalar(v);
                    self.w.line(format!("store {ty} {x}, ptr {slot}"));
                }
                Carried::Scalar { slot, ty }
            }
            Type::Tensor { shape, elem, .. } => Carried::Tile(self.carry_tile(shape, *elem, initial)?),
            Type::View { block, elem } => {
                let fixed = match initial {
                    Some(v) => self.view(v),
                    None => empty_view(block, *elem),
                };
                let list = view_components(&fixed, moving);
                let slots: Vec<String> = list.iter().map(|(ty, _)| self.alloca(ty)).collect();
                if initial.is_some() {
                    for (slot, (ty, x)) in slots.iter().zip(&list) {
                        self.w.line(format!("store {ty} {x}, ptr {slot}"));
                    }
                }
                Carried::View { fixed, moving, slots }
            }
            Type::Shared { .. } | Type::Barrier { .. } => {
                panic!("internal compiler error: {ty} on the CPU; please report this")
            }
        })
    }

    fn carry_tile(&mut self, shape: &[usize], elem: crate::ir::Elem, initial: Option<Value>) -> Result<TileRef> {
        let Some(v) = initial else { return Ok(self.new_tile(shape, elem)) };
        // Reuses the initial value's buffer, if it has no other use.
        if let Some(tile) = self.tiles.get(&v).cloned()
            && self.uses[v.0 as usize] == 1
            && self.arena.references(tile.buffer) == 1
            && self.plan.block[v.0 as usize] == self.block
            && self.dense(v, &tile)
        {
            self.arena.retain(tile.buffer);
            return Ok(tile);
        }
        let tile = self.new_tile(shape, elem);
        self.fill(v, &tile)?;
        Ok(tile)
    }

    /// Binds a carried location to the parameter of a region.
    fn bind(&mut self, v: Value, place: &Carried) {
        match place {
            Carried::Scalar { .. } | Carried::View { .. } => self.bind_result(v, place),
            Carried::Tile(tile) => {
                if self.uses[v.0 as usize] > 0 {
                    self.arena.retain(tile.buffer);
                }
                self.tiles.insert(v, tile.clone());
            }
        }
    }

    /// Binds a carried location to the result of an op, which takes over the reference to its buffer.
    fn bind_result(&mut self, v: Value, place: &Carried) {
        match place {
            Carried::Scalar { slot, ty } => {
                let x = self.w.inst(format!("load {ty}, ptr {slot}"));
                self.scalars.insert(v, x);
            }
            Carried::View { fixed, moving, slots } => {
                let mut view = fixed.clone();
                let list = view_components(fixed, *moving);
                let mut names: Vec<String> = Vec::new();
                for (slot, (ty, _)) in slots.iter().zip(&list) {
                    names.push(self.w.inst(format!("load {ty}, ptr {slot}")));
                }
                let rank = view.offsets.len();
                if *moving == CarriedParts::Everything {
                    view.base = names[0].clone();
                    view.shape = names[1..1 + rank].to_vec();
                    view.strides = names[1 + rank..1 + 2 * rank].to_vec();
                }
                view.offsets = names[names.len() - rank..].to_vec();
                self.views.insert(v, view);
            }
            Carried::Tile(tile) => self.set_tile(v, tile.clone()),
        }
    }

    /// Assigns the values of a terminator to their locations, as a parallel copy.
    fn assign(&mut self, values: &[Value], places: &[Carried]) -> Result<()> {
        let mut stores = Vec::new();
        let mut tiles = Vec::new();
        for (&v, place) in values.iter().zip(places) {
            match place {
                Carried::Scalar { slot, ty } => stores.push((ty.clone(), self.scalar(v), slot.clone())),
                Carried::View { moving, slots, fixed } => {
                    let view = self.view(v);
                    if *moving == CarriedParts::Everything && view.order != fixed.order {
                        return self.unsupported("the branches or iterations yield views of different `order`", None);
                    }
                    for (slot, (ty, x)) in slots.iter().zip(view_components(&view, *moving)) {
                        stores.push((ty.to_string(), x, slot.clone()));
                    }
                }
                Carried::Tile(tile) => tiles.push((v, tile.clone())),
            }
        }
        for (ty, x, slot) in stores {
            self.w.line(format!("store {ty} {x}, ptr {slot}"));
        }
        self.assign_tiles(tiles)?;
        for &v in values {
            self.used(v);
        }
        Ok(())
    }

    /// Writes each value to its buffer. A buffer is written once no other pending value reads it; on a cycle (swapped
    /// values), one value goes through a temporary.
    fn assign_tiles(&mut self, mut pending: Vec<(Value, TileRef)>) -> Result<()> {
        let mut temporaries: Vec<Temporary> = Vec::new();
        while !pending.is_empty() {
            let ready = (0..pending.len()).find(|&i| {
                let (v, target) = &pending[i];
                self.in_place(*v, target)
                    || (!self.reads_elsewhere(*v, target)
                        && pending.iter().enumerate().all(|(j, (other, _))| j == i || !self.reads(*other, target)))
            });
            match ready {
                Some(i) => {
                    let (v, target) = pending.remove(i);
                    if !self.in_place(v, &target) {
                        self.fill(v, &target)?;
                    }
                }
                None => {
                    let (v, target) = pending.remove(0);
                    let copy = self.new_tile(self.shape(v), target.elem);
                    self.fill(v, &copy)?;
                    temporaries.push(Temporary { copy, target, value: v });
                }
            }
        }
        for Temporary { copy, target, value } in temporaries {
            self.copy(&copy, &target, self.shape(value).iter().product());
            self.arena.release(copy.buffer);
        }
        Ok(())
    }

    fn in_place(&self, v: Value, target: &TileRef) -> bool {
        self.tiles.get(&v).is_some_and(|t| t.buffer == target.buffer && t.strides == target.strides)
    }

    /// Whether evaluating `v` reads the target's buffer.
    fn reads(&self, v: Value, target: &TileRef) -> bool {
        self.visited(&[(v, identity(self.shape(v)))])
            .iter()
            .any(|(leaf, _)| self.tiles.get(leaf).is_some_and(|t| t.buffer == target.buffer))
    }

    /// Whether an element of `v` depends on other elements of the target's buffer.
    fn reads_elsewhere(&self, v: Value, target: &TileRef) -> bool {
        let full = identity(self.shape(v));
        self.visited(&[(v, full.clone())]).iter().any(|(leaf, map)| {
            self.tiles
                .get(leaf)
                .is_some_and(|t| t.buffer == target.buffer && (*map != full || t.strides != target.strides))
        })
    }

    /// Copies a dense tile.
    fn copy(&mut self, from: &TileRef, to: &TileRef, count: usize) {
        let bytes = (count * super::repr::stored_bytes(from.elem)).to_string();
        let at = |l: &mut Self, t: &TileRef| {
            let offset = l.arena.offset(t.buffer);
            l.w.inst(format!("getelementptr i8, ptr %arena, i64 {offset}"))
        };
        let (source, target) = (at(self, from), at(self, to));
        self.w.call_void(
            "@llvm.memcpy.p0.p0.i64",
            &[("ptr", &target), ("ptr", &source), ("i64", &bytes), ("i1", "false")],
        );
    }

    pub fn for_loop(&mut self, id: OpId) -> Result<()> {
        let func = self.func;
        let data = func.op(id);
        let body = data.regions[0];
        let (params, yielded) = (&func.block(body).params, self.terminator(body));
        let captured = self.enter(id)?;
        let mut places = Vec::new();
        for (k, &init) in data.operands[3..].iter().enumerate() {
            let moving = if self.only_advances(yielded[k], params[k + 1]) {
                CarriedParts::Offsets
            } else {
                CarriedParts::Everything
            };
            places.push(self.carry(func.ty(init), Some(init), moving)?);
        }
        let bounds: Vec<String> = data.operands[..3].iter().map(|&v| self.scalar(v)).collect();
        for &v in &data.operands {
            self.used(v);
        }
        let index_type = func.ty(params[0]).dtype().expect("loop indices are integers");
        let ty = reg(index_type.into());
        let slot = self.alloca(ty);
        self.w.line(format!("store {ty} {}, ptr {slot}", bounds[0]));
        let label = self.w.fresh_label("for");
        self.w.branch(&label);
        self.w.label(&label);
        let index = self.w.inst(format!("load {ty}, ptr {slot}"));
        let less = if index_type.is_signed_int() { "slt" } else { "ult" };
        let more = self.w.inst(format!("icmp {less} {ty} {index}, {}", bounds[1]));
        self.w.branch_if(&more, &format!("{label}.body"), &format!("{label}.exit"));
        self.w.label(&format!("{label}.body"));
        self.scalars.insert(params[0], index.clone());
        for (&p, place) in params[1..].iter().zip(&places) {
            self.bind(p, place);
        }
        self.choose_dot_destinations(body, &places);
        let terminator = self.region(body)?;
        self.in_region(body, |l| l.assign(&func.op(terminator).operands, &places))?;
        let next = self.w.inst(format!("add {ty} {index}, {}", bounds[2]));
        self.w.line(format!("store {ty} {next}, ptr {slot}"));
        self.w.branch(&label);
        self.w.label(&format!("{label}.exit"));
        self.leave(captured);
        for (&r, place) in data.results.iter().zip(&places) {
            self.bind_result(r, place);
        }
        Ok(())
    }

    /// Runs `f` as part of a region, so that values of the region may get buffers.
    fn in_region(&mut self, block: BlockId, f: impl FnOnce(&mut Self) -> Result<()>) -> Result<()> {
        let outer = std::mem::replace(&mut self.block, block);
        let result = f(self);
        self.block = outer;
        result
    }

    fn terminator(&self, block: BlockId) -> Vec<Value> {
        match self.func.block(block).ops.last() {
            Some(&id) => self.func.op(id).operands.clone(),
            None => Vec::new(),
        }
    }

    /// Whether a carried view changes only by `advance`.
    fn only_advances(&self, mut v: Value, param: Value) -> bool {
        loop {
            if v == param {
                return true;
            }
            match self.func.def_op(v) {
                Some(id) if self.func.op(id).op == Op::Advance => v = self.func.op(id).operands[0],
                _ => return false,
            }
        }
    }

    /// Lets dots whose result becomes a carried value write directly to its buffer, where nothing reads the old value
    /// later.
    fn choose_dot_destinations(&mut self, body: BlockId, places: &[Carried]) {
        let (params, yielded) = (self.func.block(body).params.clone(), self.terminator(body));
        for (k, place) in places.iter().enumerate() {
            let (Carried::Tile(tile), y, p) = (place, yielded[k], params[params.len() - places.len() + k]) else {
                continue;
            };
            let Some(id) = self.func.def_op(y) else { continue };
            let data = self.func.op(id);
            if !matches!(data.op, Op::Dot { .. }) || self.plan.block[y.0 as usize] != body {
                continue;
            }
            let position = self.plan.position[id.0 as usize];
            let once = yielded.iter().filter(|&&v| v == y).count() == 1;
            let last_reader = self.plan.roots[p.0 as usize].iter().all(|&(at, _)| at <= position);
            let clean = !self.depends(data.operands[0], p, false)
                && !self.depends(data.operands[1], p, false)
                && !self.depends(data.operands[2], p, true);
            if once && last_reader && clean {
                self.destinations.insert(y, tile.clone());
            }
        }
    }

    /// Whether fused ops lead from `v` to `target`; with `through_maps`, only paths with an op that moves elements
    /// count.
    fn depends(&self, v: Value, target: Value, through_maps: bool) -> bool {
        if v == target {
            return !through_maps;
        }
        let Some(id) = self.func.def_op(v).filter(|&id| is_fused(self.func, id)) else { return false };
        let through_maps = through_maps && !is_map(self.func, id);
        self.func.op(id).operands.iter().any(|&o| self.depends(o, target, through_maps))
    }

    pub fn branch(&mut self, id: OpId) -> Result<()> {
        let func = self.func;
        let data = func.op(id);
        let captured = self.enter(id)?;
        let condition = self.scalar(data.operands[0]);
        let mut places = Vec::new();
        for &r in &data.results {
            let mut place = self.carry(func.ty(r), None, CarriedParts::Everything)?;
            if let Carried::View { fixed, .. } = &mut place {
                fixed.order = self.order_of(self.terminator(data.regions[0])[places.len()]);
            }
            places.push(place);
        }
        self.used(data.operands[0]);
        let label = self.w.fresh_label("if");
        let names = [format!("{label}.then"), format!("{label}.else")];
        let exit = format!("{label}.exit");
        let otherwise = if data.regions.len() > 1 { &names[1] } else { &exit };
        self.w.branch_if(&condition, &names[0], otherwise);
        for (&region, name) in data.regions.iter().zip(&names) {
            self.w.label(name);
            let terminator = self.region(region)?;
            self.in_region(region, |l| l.assign(&func.op(terminator).operands, &places))?;
            self.w.branch(&exit);
        }
        self.w.label(&exit);
        self.leave(captured);
        for (&r, place) in data.results.iter().zip(&places) {
            self.bind_result(r, place);
        }
        Ok(())
    }

    /// The `order` of a view, from its definition.
    fn order_of(&self, v: Value) -> Vec<usize> {
        if let Some(view) = self.views.get(&v) {
            return view.order.clone();
        }
        match self.func.def_op(v).map(|id| self.func.op(id)) {
            Some(data) => match &data.op {
                Op::MakeView { order } => order.clone(),
                Op::Advance => self.order_of(data.operands[0]),
                _ => (0..self.shape(v).len()).rev().collect(),
            },
            None => (0..self.shape(v).len()).rev().collect(),
        }
    }

    pub fn while_loop(&mut self, id: OpId) -> Result<()> {
        let func = self.func;
        let data = func.op(id);
        let (before, after) = (data.regions[0], data.regions[1]);
        let captured = self.enter(id)?;
        let mut carried = Vec::new();
        for &init in &data.operands {
            carried.push(self.carry(func.ty(init), Some(init), CarriedParts::Everything)?);
        }
        for &v in &data.operands {
            self.used(v);
        }
        let mut forwarded = Vec::new();
        for &r in &data.results {
            let mut place = self.carry(func.ty(r), None, CarriedParts::Everything)?;
            if let Carried::View { fixed, .. } = &mut place {
                fixed.order = self.order_of(self.terminator(before)[1 + forwarded.len()]);
            }
            forwarded.push(place);
        }
        let label = self.w.fresh_label("while");
        self.w.branch(&label);
        self.w.label(&label);
        for (&p, place) in func.block(before).params.iter().zip(&carried) {
            self.bind(p, place);
        }
        let condition = self.region(before)?;
        let operands = &func.op(condition).operands;
        let proceed = self.scalar(operands[0]);
        self.in_region(before, |l| l.assign(&operands[1..], &forwarded))?;
        self.used(operands[0]);
        self.w.branch_if(&proceed, &format!("{label}.body"), &format!("{label}.exit"));
        self.w.label(&format!("{label}.body"));
        for (&p, place) in func.block(after).params.iter().zip(&forwarded) {
            self.bind(p, place);
        }
        let terminator = self.region(after)?;
        self.in_region(after, |l| l.assign(&func.op(terminator).operands, &carried))?;
        self.w.branch(&label);
        self.w.label(&format!("{label}.exit"));
        self.leave(captured);
        for place in &carried {
            if let Carried::Tile(tile) = place {
                self.arena.release(tile.buffer);
            }
        }
        for (&r, place) in data.results.iter().zip(&forwarded) {
            self.bind_result(r, place);
        }
        Ok(())
    }
}

/// A view of a type, with placeholders for all components.
fn empty_view(block: &[usize], elem: DType) -> ViewRef {
    let zeros = vec!["0".to_string(); block.len()];
    ViewRef {
        base: "null".to_string(),
        elem,
        block: block.to_vec(),
        order: (0..block.len()).rev().collect(),
        shape: zeros.clone(),
        strides: zeros.clone(),
        offsets: zeros,
    }
}
