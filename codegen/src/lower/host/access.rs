//! Addresses, masks, loads and stores at one point of a loop nest, for arena buffers, views and pointers.

use super::loop_nest::{DimMap, Evaluated, LoopNest, TileRef};
use super::repr::{from_memory, from_stored, in_memory, reg, stored, stored_bytes, suffix, to_memory, to_stored};
use super::state::Lowering;
use super::writer::{Writer, iota, splat, vector};
use crate::ir::{DType, Elem, Padding};

/// A view as LLVM operands.
#[derive(Clone, Debug)]
pub struct ViewRef {
    pub base: String,
    pub elem: DType,
    pub block: Vec<usize>,
    /// Dimensions from the fastest-varying in memory to the slowest.
    pub order: Vec<usize>,
    /// i64 operands, one per dimension. Extents are not negative.
    pub shape: Vec<String>,
    pub strides: Vec<String>,
    pub offsets: Vec<String>,
}

/// The addresses of lanes.
pub enum LaneAddresses {
    /// One address; the lanes of a vector are consecutive.
    Contiguous(String),
    /// A vector of addresses.
    Scattered(String),
}

/// An access to global memory.
pub struct Access {
    pub place: LaneAddresses,
    pub elem: DType,
    pub lanes: usize,
    /// The lanes to access, as one i1 per lane; `None` for all.
    pub mask: Option<String>,
}

/// One summand of an address.
struct Term {
    /// i64 operand.
    index: String,
    /// The loop level of `index`.
    level: usize,
    /// i64 operand, in elements.
    stride: String,
}

/// `base` plus Σ index · stride, in elements of `ty`. Each addition is emitted at the loop level of its index.
fn offset_pointer(
    w: &mut Writer,
    nest: &mut LoopNest,
    base: (String, usize),
    ty: &str,
    mut terms: Vec<Term>,
) -> (String, usize) {
    terms.sort_by_key(|term| term.level);
    let (mut pointer, mut at) = base;
    for Term { index, level, stride } in terms {
        if index == "0" || stride == "0" {
            continue;
        }
        let offset = match (index.as_str(), stride.as_str()) {
            (_, "1") => index,
            ("1", _) => stride,
            _ => nest.inst(w, level, format!("mul i64 {index}, {stride}")),
        };
        at = at.max(level);
        pointer = nest.inst(w, at, format!("getelementptr {ty}, ptr {pointer}, i64 {offset}"));
    }
    (pointer, at)
}

/// The terms of the mapped dimensions.
fn terms(nest: &LoopNest, map: &DimMap, strides: impl Iterator<Item = String>) -> Vec<Term> {
    map.iter()
        .zip(strides)
        .filter_map(|(d, stride)| d.map(|d| Term { index: nest.index[d].clone(), level: nest.level[d], stride }))
        .collect()
}

fn vector_suffix(ty: &str, lanes: usize) -> String {
    format!("v{lanes}{}", suffix(ty))
}

impl Lowering<'_> {
    /// The address of the first element of an arena tile.
    pub fn tile_pointer(&mut self, nest: &mut LoopNest, tile: &TileRef) -> String {
        let bytes = self.arena.offset(tile.buffer) + (tile.offset * stored_bytes(tile.elem)) as u64;
        nest.inst(&mut self.w, 0, format!("getelementptr i8, ptr %arena, i64 {bytes}"))
    }

    /// The stride of the vector dimension in a tile, under a map.
    fn lane_step(nest: &LoopNest, map: &DimMap, tile: &TileRef) -> usize {
        map.iter().zip(&tile.strides).filter(|(d, _)| **d == nest.vec_dim).map(|(_, s)| *s).sum()
    }

    pub fn tile_address(&mut self, nest: &mut LoopNest, tile: &TileRef, map: &DimMap) -> (String, usize) {
        let base = self.tile_pointer(nest, tile);
        let terms = terms(nest, map, tile.strides.iter().map(usize::to_string));
        offset_pointer(&mut self.w, nest, (base, 0), stored(tile.elem), terms)
    }

    /// Reads an arena tile.
    pub fn read_tile(&mut self, nest: &mut LoopNest, tile: &TileRef, map: &DimMap) -> Evaluated {
        let lanes = if nest.varies(map) { nest.lanes } else { 1 };
        let (pointer, address_level) = self.tile_address(nest, tile, map);
        let level = nest.map_level(map).max(address_level);
        nest.select(&mut self.w, level);
        let (ty, align) = (stored(tile.elem), stored_bytes(tile.elem));
        let step = Self::lane_step(nest, map, tile);
        let raw = if lanes == 1 || step == 1 {
            self.w.inst(format!("load {}, ptr {pointer}, align {align}", vector(ty, lanes)))
        } else {
            let mut all = "poison".to_string();
            let vty = vector(ty, lanes);
            for lane in 0..lanes {
                let p = self.w.inst(format!("getelementptr {ty}, ptr {pointer}, i64 {}", lane * step));
                let x = self.w.inst(format!("load {ty}, ptr {p}, align {align}"));
                all = self.w.inst(format!("insertelement {vty} {all}, {ty} {x}, i64 {lane}"));
            }
            all
        };
        let name = from_stored(&mut self.w, tile.elem, lanes, &raw);
        Evaluated { name, lanes, level }
    }

    /// Writes a register value (with the lanes of the nest where the map varies) to an arena tile, in the selected
    /// section.
    pub fn write_tile(&mut self, nest: &mut LoopNest, tile: &TileRef, map: &DimMap, value: &Evaluated) {
        let section = self.w.selected();
        let lanes = if nest.varies(map) { nest.lanes } else { 1 };
        let (pointer, _) = self.tile_address(nest, tile, map);
        self.w.select(section);
        let value = self.widen(nest, value, reg(tile.elem), lanes);
        self.w.select(section);
        let (ty, align) = (stored(tile.elem), stored_bytes(tile.elem));
        let value = to_stored(&mut self.w, tile.elem, lanes, &value);
        let (step, vty) = (Self::lane_step(nest, map, tile), vector(ty, lanes));
        if lanes == 1 || step == 1 {
            self.w.line(format!("store {vty} {value}, ptr {pointer}, align {align}"));
            return;
        }
        for lane in 0..lanes {
            let p = self.w.inst(format!("getelementptr {ty}, ptr {pointer}, i64 {}", lane * step));
            let x = self.w.inst(format!("extractelement {vty} {value}, i64 {lane}"));
            self.w.line(format!("store {ty} {x}, ptr {p}, align {align}"));
        }
    }

    /// A value with `lanes` lanes of register type `ty`; a scalar is broadcast.
    pub fn widen(&mut self, nest: &mut LoopNest, value: &Evaluated, ty: &str, lanes: usize) -> String {
        if value.lanes == lanes || lanes == 1 {
            return value.name.clone();
        }
        if !value.name.starts_with('%') {
            return splat(ty, lanes, &value.name);
        }
        let vty = vector(ty, lanes);
        let first =
            nest.inst(&mut self.w, value.level, format!("insertelement {vty} poison, {ty} {}, i64 0", value.name));
        let zeros = format!("<{lanes} x i32> zeroinitializer");
        nest.inst(&mut self.w, value.level, format!("shufflevector {vty} {first}, {vty} poison, {zeros}"))
    }

    /// The access to a view under a map, with the mask of the lanes that are in bounds. Returns its loop level too.
    pub fn view_access(
        &mut self,
        nest: &mut LoopNest,
        view: &ViewRef,
        map: &DimMap,
        boundary: &[usize],
    ) -> (Access, usize) {
        let lanes = if nest.varies(map) { nest.lanes } else { 1 };
        let memory = in_memory(view.elem);
        let origin = view.offsets.iter().zip(&view.strides);
        let origin = origin.map(|(o, s)| Term { index: o.clone(), level: 0, stride: s.clone() }).collect();
        let base = offset_pointer(&mut self.w, nest, (view.base.clone(), 0), memory, origin);
        let terms = terms(nest, map, view.strides.iter().cloned());
        let (pointer, mut level) = offset_pointer(&mut self.w, nest, base, memory, terms);
        level = level.max(nest.map_level(map));
        let vec_stride = map.iter().position(|d| *d == nest.vec_dim).map(|d| view.strides[d].clone());
        let place = match vec_stride {
            Some(stride) if lanes > 1 && !nest.in_bounds && stride != "1" => {
                let stride = self.widen(nest, &Evaluated { name: stride, lanes: 1, level: 0 }, "i64", lanes);
                let wide = vector("i64", lanes);
                let steps = nest.inst(&mut self.w, 0, format!("mul {wide} {stride}, {}", iota("i64", lanes)));
                let text = format!("getelementptr {memory}, ptr {pointer}, {wide} {steps}");
                LaneAddresses::Scattered(nest.inst(&mut self.w, level, text))
            }
            _ => LaneAddresses::Contiguous(pointer),
        };
        let mask = if nest.in_bounds { None } else { self.bounds_mask(nest, view, map, boundary, lanes) };
        (Access { place, elem: view.elem, lanes, mask }, level)
    }

    /// The mask of the lanes that are in bounds in the dimensions of `boundary`; `None` if there are none to check.
    fn bounds_mask(
        &mut self,
        nest: &mut LoopNest,
        view: &ViewRef,
        map: &DimMap,
        boundary: &[usize],
        lanes: usize,
    ) -> Option<String> {
        let mut scalar: Option<(String, usize)> = None;
        let mut lanewise = None;
        for &d in boundary {
            let (index, level) = map[d].map_or(("0".to_string(), 0), |k| (nest.index[k].clone(), nest.level[k]));
            let (offset, extent) = (&view.offsets[d], &view.shape[d]);
            let position = nest.inst(&mut self.w, level, format!("add i64 {offset}, {index}"));
            if lanes > 1 && map[d] == nest.vec_dim {
                let wide = vector("i64", lanes);
                let first = self.widen(nest, &Evaluated { name: position, lanes: 1, level }, "i64", lanes);
                let extent = self.widen(nest, &Evaluated { name: extent.clone(), lanes: 1, level: 0 }, "i64", lanes);
                let all = nest.inst(&mut self.w, level, format!("add {wide} {first}, {}", iota("i64", lanes)));
                lanewise = Some(nest.inst(&mut self.w, level, format!("icmp ult {wide} {all}, {extent}")));
            } else {
                // Unsigned comparison: a negative position is out of bounds too, as extents are not negative.
                let inside = nest.inst(&mut self.w, level, format!("icmp ult i64 {position}, {extent}"));
                scalar = Some(match scalar {
                    None => (inside, level),
                    Some((other, l)) => {
                        let level = level.max(l);
                        (nest.inst(&mut self.w, level, format!("and i1 {other}, {inside}")), level)
                    }
                });
            }
        }
        match (scalar, lanewise) {
            (None, lanewise) => lanewise,
            (Some((s, _)), None) if lanes == 1 => Some(s),
            (Some((name, level)), lanewise) => {
                let wide = self.widen(nest, &Evaluated { name, lanes: 1, level }, "i1", lanes);
                let depth = nest.map_level(map).max(level);
                Some(match lanewise {
                    None => wide,
                    Some(l) => nest.inst(&mut self.w, depth, format!("and {} {wide}, {l}", vector("i1", lanes))),
                })
            }
        }
    }

    /// Reads global memory, in the selected section. Lanes outside of the mask have the value `padding` (zero without
    /// one).
    pub fn read_memory(&mut self, access: &Access, padding: Option<Padding>) -> String {
        let (memory, lanes) = (in_memory(access.elem), access.lanes);
        let (ty, align) = (vector(memory, lanes), access.elem.bytes());
        let zero = if lanes > 1 { "zeroinitializer".to_string() } else { zero_of(memory) };
        let raw = match (&access.place, &access.mask) {
            (LaneAddresses::Contiguous(p), None) => self.w.inst(format!("load {ty}, ptr {p}, align {align}")),
            (LaneAddresses::Contiguous(p), Some(m)) if lanes == 1 => {
                // Masked-off lanes read the arena instead of the forbidden address.
                let p = self.w.inst(format!("select i1 {m}, ptr {p}, ptr %arena"));
                let x = self.w.inst(format!("load {ty}, ptr {p}, align 1"));
                self.w.inst(format!("select i1 {m}, {ty} {x}, {ty} {zero}"))
            }
            (place, mask) if !self.vectors.masks => self.read_lanes(place, mask.as_deref(), memory, lanes, align),
            (LaneAddresses::Contiguous(p), Some(m)) => {
                let callee = format!("@llvm.masked.load.{}.p0", vector_suffix(memory, lanes));
                let mask = vector("i1", lanes);
                let align = align.to_string();
                self.w.call(&ty, &callee, &[("ptr", p), ("i32", &align), (&mask, m), (&ty, &zero)])
            }
            (LaneAddresses::Scattered(p), m) => {
                let callee =
                    format!("@llvm.masked.gather.{}.{}", vector_suffix(memory, lanes), vector_suffix("ptr", lanes));
                let (mask, pointers) = (vector("i1", lanes), vector("ptr", lanes));
                let all = splat("i1", lanes, "true");
                let m = m.as_ref().unwrap_or(&all);
                let align = align.to_string();
                self.w.call(&ty, &callee, &[(&pointers, p), ("i32", &align), (&mask, m), (&ty, &zero)])
            }
        };
        let value = from_memory(&mut self.w, access.elem, lanes, &raw);
        match (&access.mask, padding) {
            (Some(m), Some(Padding::Nan)) => {
                let nan = super::elementwise::number(access.elem, lanes, f64::NAN);
                super::elementwise::select(&mut self.w, Elem::Num(access.elem), lanes, m, &value, &nan)
            }
            _ => value,
        }
    }

    /// The address of one lane.
    fn lane_address(&mut self, place: &LaneAddresses, memory: &str, lanes: usize, lane: usize) -> String {
        match place {
            LaneAddresses::Contiguous(p) => self.w.inst(format!("getelementptr {memory}, ptr {p}, i64 {lane}")),
            LaneAddresses::Scattered(p) => {
                self.w.inst(format!("extractelement {} {p}, i64 {lane}", vector("ptr", lanes)))
            }
        }
    }

    /// Reads a vector lane by lane; lanes outside of the mask are zero.
    fn read_lanes(
        &mut self,
        place: &LaneAddresses,
        mask: Option<&str>,
        memory: &str,
        lanes: usize,
        align: usize,
    ) -> String {
        let (ty, cond) = (vector(memory, lanes), vector("i1", lanes));
        let mut all = "poison".to_string();
        for lane in 0..lanes {
            let mut p = self.lane_address(place, memory, lanes, lane);
            let mut align = align;
            if let Some(m) = mask {
                let inside = self.w.inst(format!("extractelement {cond} {m}, i64 {lane}"));
                p = self.w.inst(format!("select i1 {inside}, ptr {p}, ptr %arena"));
                align = 1;
            }
            let x = self.w.inst(format!("load {memory}, ptr {p}, align {align}"));
            all = self.w.inst(format!("insertelement {ty} {all}, {memory} {x}, i64 {lane}"));
        }
        match mask {
            Some(m) => self.w.inst(format!("select {cond} {m}, {ty} {all}, {ty} zeroinitializer")),
            None => all,
        }
    }

    /// Writes the lanes of a vector inside of the mask, in order.
    fn write_lanes(
        &mut self,
        place: &LaneAddresses,
        mask: Option<&str>,
        memory: &str,
        lanes: usize,
        value: &str,
        align: &str,
    ) {
        let (ty, cond) = (vector(memory, lanes), vector("i1", lanes));
        for lane in 0..lanes {
            let p = self.lane_address(place, memory, lanes, lane);
            let x = self.w.inst(format!("extractelement {ty} {value}, i64 {lane}"));
            match mask {
                Some(m) => {
                    let inside = self.w.inst(format!("extractelement {cond} {m}, i64 {lane}"));
                    self.write_one(&p, &inside, memory, &x, align);
                }
                None => self.w.line(format!("store {memory} {x}, ptr {p}, align {align}")),
            }
        }
    }

    /// Writes one element if the mask is true.
    fn write_one(&mut self, p: &str, mask: &str, memory: &str, value: &str, align: &str) {
        let (ty, cond) = (format!("<1 x {memory}>"), "<1 x i1>");
        let value = self.w.inst(format!("insertelement {ty} poison, {memory} {value}, i64 0"));
        let mask = self.w.inst(format!("insertelement {cond} poison, i1 {mask}, i64 0"));
        let callee = format!("@llvm.masked.store.{}.p0", vector_suffix(memory, 1));
        self.w.call_void(&callee, &[(&ty, &value), ("ptr", p), ("i32", align), (cond, &mask)]);
    }

    /// Writes a register value with the lanes of the access to global memory, in the selected section.
    pub fn write_memory(&mut self, access: &Access, value: &str) {
        let (memory, lanes) = (in_memory(access.elem), access.lanes);
        let (ty, align) = (vector(memory, lanes), access.elem.bytes().to_string());
        let value = to_memory(&mut self.w, access.elem, lanes, value);
        match (&access.place, &access.mask) {
            (LaneAddresses::Contiguous(p), None) => self.w.line(format!("store {ty} {value}, ptr {p}, align {align}")),
            (LaneAddresses::Contiguous(p), Some(m)) if lanes == 1 => self.write_one(p, m, memory, &value, &align),
            (place, mask) if !self.vectors.masks => {
                self.write_lanes(place, mask.as_deref(), memory, lanes, &value, &align);
            }
            (LaneAddresses::Contiguous(p), Some(m)) => {
                let callee = format!("@llvm.masked.store.{}.p0", vector_suffix(memory, lanes));
                let mask = vector("i1", lanes);
                self.w.call_void(&callee, &[(&ty, &value), ("ptr", p), ("i32", &align), (&mask, m)]);
            }
            (LaneAddresses::Scattered(p), m) => {
                let callee =
                    format!("@llvm.masked.scatter.{}.{}", vector_suffix(memory, lanes), vector_suffix("ptr", lanes));
                let (mask, pointers) = (vector("i1", lanes), vector("ptr", lanes));
                let all = splat("i1", lanes, "true");
                let m = m.as_ref().unwrap_or(&all);
                self.w.call_void(&callee, &[(&ty, &value), (&pointers, p), ("i32", &align), (&mask, m)]);
            }
        }
    }
}

/// The zero of an LLVM type, as a constant.
fn zero_of(ty: &str) -> String {
    match ty {
        "float" | "double" => "0.0".to_string(),
        "ptr" => "null".to_string(),
        _ => "0".to_string(),
    }
}
