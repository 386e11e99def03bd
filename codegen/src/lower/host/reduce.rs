//! Lowers reductions.
//!
//! A reduction accumulates a vector of W partial results. Along the vector dimension, lane l combines the elements l,
//! l + W, l + 2W, … in order; then the lanes are combined by halves (lane l with lane l + W/2, and so on). Along
//! another dimension, every lane is an element of the result.
//!
//! If the function is a single operation (`add`, `mul`, `min`, `max`, `and`, `or`, `xor`), partial results start at its
//! neutral element, and those of narrow floats stay in f32 and are rounded once. Any other function starts with the
//! first element.

use super::elementwise as ew;
use super::loop_nest::{DimMap, Evaluated, LoopNest, LoopNestSpec, TileRef, identity};
use super::repr::{from_bits, is_narrow, reg, reg_num, round, to_bits};
use super::state::{Lowering, Result};
use super::writer::{Writer, splat, vector};
use crate::analysis::combine::single_binary_op;
use crate::ir::{BinaryOp, BlockId, DType, Elem, Literal, Op, OpId, Value};
use std::collections::HashMap;

/// The representation of partial results in a reduction by one operation: narrow floats in f32, and floats under `min`
/// or `max` as integers with the same order. One instruction then replaces seven on floats (for NaN and the two zeros),
/// and the dependent step has the latency of one.
struct Partial {
    /// The type of the partial results.
    d: DType,
    /// The type of the elements in registers.
    from: DType,
    op: BinaryOp,
}

impl Partial {
    fn new(op: BinaryOp, d: DType) -> Partial {
        let from = if is_narrow(d) { DType::F32 } else { d };
        let ordered = matches!(op, BinaryOp::Min | BinaryOp::Max);
        let d = match from {
            DType::F32 if ordered => DType::I32,
            DType::F64 if ordered => DType::I64,
            other => other,
        };
        Partial { d, from, op }
    }

    fn start(&self, lanes: usize) -> String {
        super::eval::literal(self.d, lanes, neutral(self.op, self.d))
    }

    /// Converts an element to a partial result. A NaN becomes the neutral element, which decodes to a NaN again.
    fn encode(&self, w: &mut Writer, lanes: usize, x: &str) -> String {
        if self.d == self.from {
            return x.to_string();
        }
        let bits = to_bits(w, self.from, lanes, x);
        let key = self.ordered(w, lanes, &bits);
        let ty = vector(reg_num(self.from), lanes);
        let is_nan = w.inst(format!("fcmp uno {ty} {x}, {x}"));
        ew::select(w, Elem::Num(self.d), lanes, &is_nan, &self.start(lanes), &key)
    }

    /// Converts a partial result to an element.
    fn decode(&self, w: &mut Writer, lanes: usize, x: &str) -> String {
        if self.d == self.from {
            return x.to_string();
        }
        let bits = self.ordered(w, lanes, x);
        from_bits(w, self.from, lanes, &bits)
    }

    /// Maps the bits of floats to integers with the same order, −0 below +0: inverts the bits of negative numbers
    /// except the sign. The map is its own inverse.
    fn ordered(&self, w: &mut Writer, lanes: usize, bits: &str) -> String {
        let (ty, width) = (reg_num(self.d), self.d.bits());
        let vty = vector(ty, lanes);
        let sign = w.inst(format!("ashr {vty} {bits}, {}", splat(ty, lanes, width - 1)));
        let flip = w.inst(format!("and {vty} {sign}, {}", splat(ty, lanes, i64::MAX >> (64 - width))));
        w.inst(format!("xor {vty} {bits}, {flip}"))
    }
}

/// The neutral element: x with `op(x, y) = y` for every y.
fn neutral(op: BinaryOp, d: DType) -> Literal {
    let signed = d.is_signed_int();
    let bits = d.bits() as u32;
    match op {
        BinaryOp::Add if d.is_float() => Literal::Float(-0.0),
        BinaryOp::Mul if d.is_float() => Literal::Float(1.0),
        BinaryOp::Mul => Literal::Int(1),
        BinaryOp::Max if signed => Literal::Int(i64::MIN >> (64 - bits)),
        BinaryOp::Min if signed => Literal::Int(i64::MAX >> (64 - bits)),
        BinaryOp::Min | BinaryOp::And => Literal::Int(-1),
        _ => Literal::Int(0),
    }
}

/// Half of a vector's lanes, from lane `from` on.
fn half(w: &mut Writer, ty: &str, lanes: usize, x: &str, from: usize) -> String {
    let (half, vty) = (lanes / 2, vector(ty, lanes));
    if half == 1 {
        return w.inst(format!("extractelement {vty} {x}, i64 {from}"));
    }
    let items: Vec<String> = (from..from + half).map(|i| format!("i32 {i}")).collect();
    w.inst(format!("shufflevector {vty} {x}, {vty} poison, <{half} x i32> <{}>", items.join(", ")))
}

/// Combines the lanes of a vector by halves.
pub fn combine_lanes(w: &mut Writer, op: BinaryOp, d: DType, mut lanes: usize, x: &str) -> String {
    let ty = reg_num(d);
    let mut x = x.to_string();
    while lanes > 1 {
        let (low, high) = (half(w, ty, lanes, &x, 0), half(w, ty, lanes, &x, lanes / 2));
        lanes /= 2;
        x = ew::binary(w, op, d, lanes, &low, &high);
    }
    x
}

impl Lowering<'_> {
    pub fn reduce(&mut self, id: OpId, axis: usize) -> Result<()> {
        let data = self.func.op(id);
        let (operands, results) = (data.operands.clone(), data.results.clone());
        let shape = self.shape(operands[0]).to_vec();
        let map = identity(&shape);
        let reads: Vec<(Value, DimMap)> = operands.iter().map(|&v| (v, map.clone())).collect();
        self.materialize_operands(&reads, &shape)?;
        let mut tiles = Vec::new();
        for &r in &results {
            tiles.push(self.new_tile(self.shape(r), self.elem(r)));
        }
        match single_binary_op(self.func, data.regions[0]) {
            Some(op) if operands.len() == 1 => self.reduce_by_op(op, &reads, &shape, axis, &tiles[0])?,
            _ => self.reduce_by_region(data.regions[0], &reads, &shape, axis, &tiles)?,
        }
        for (r, tile) in results.into_iter().zip(tiles) {
            self.define(r, tile);
        }
        Ok(())
    }

    fn reduce_by_op(
        &mut self,
        op: BinaryOp,
        reads: &[(Value, DimMap)],
        shape: &[usize],
        axis: usize,
        tile: &TileRef,
    ) -> Result<()> {
        let (v, map) = &reads[0];
        let d = self.elem(*v).num().expect("reductions are of numbers");
        let partial = Partial::new(op, d);
        let (vec_dim, lanes) = self.vector_dim(shape, reads, &[]);
        let mut spec = LoopNestSpec::new(shape, vec_dim, lanes);
        // The reduced dimension is innermost, so that partial results stay in registers.
        spec.order.retain(|&k| k != axis);
        spec.order.push(axis);
        let vty = vector(reg_num(partial.d), lanes);
        let slot = self.alloca(&vty);
        let start = partial.start(lanes);
        let mut result_map: DimMap = map.clone();
        result_map.remove(axis);
        self.loop_nest(&spec, reads, &[], |l, nest| {
            let outside = if nest.level[axis] > 0 { nest.level[axis] - 1 } else { nest.depth() };
            nest.select(&mut l.w, outside);
            l.w.line(format!("store {vty} {start}, ptr {slot}"));
            let ev = l.eval(nest, *v, map);
            let x = l.widen(nest, &ev, reg_num(d), lanes);
            nest.select(&mut l.w, nest.depth());
            let x = partial.encode(&mut l.w, lanes, &x);
            let sum = l.w.inst(format!("load {vty}, ptr {slot}"));
            let sum = ew::binary(&mut l.w, op, partial.d, lanes, &sum, &x);
            l.w.line(format!("store {vty} {sum}, ptr {slot}"));
            nest.select_after(&mut l.w, outside);
            let mut total = l.w.inst(format!("load {vty}, ptr {slot}"));
            let along = vec_dim == Some(axis);
            if along {
                total = combine_lanes(&mut l.w, op, partial.d, lanes, &total);
            }
            let result_lanes = if along { 1 } else { lanes };
            let total = partial.decode(&mut l.w, result_lanes, &total);
            let total = round(&mut l.w, d, result_lanes, &total);
            let total = Evaluated { name: total, lanes: result_lanes, level: outside };
            l.write_after(nest, tile, &result_map, &total, outside);
            Ok(())
        })
    }

    /// Writes to a tile at the end of a loop's body.
    fn write_after(&mut self, nest: &mut LoopNest, tile: &TileRef, map: &DimMap, value: &Evaluated, level: usize) {
        nest.select_after(&mut self.w, level);
        self.write_tile(nest, tile, map, value);
    }

    /// Reduces one or several tiles by any associative and commutative function.
    fn reduce_by_region(
        &mut self,
        region: BlockId,
        reads: &[(Value, DimMap)],
        shape: &[usize],
        axis: usize,
        tiles: &[TileRef],
    ) -> Result<()> {
        let (vec_dim, lanes) = self.vector_dim(shape, reads, &[]);
        let mut spec = LoopNestSpec::new(shape, vec_dim, lanes);
        spec.order.retain(|&k| k != axis);
        spec.order.push(axis);
        let elems: Vec<Elem> = reads.iter().map(|(v, _)| self.elem(*v)).collect();
        let slots = self.slots(&elems, lanes);
        let mut result_map = identity(shape);
        result_map.remove(axis);
        self.loop_nest(&spec, reads, &[], |l, nest| {
            let outside = if nest.level[axis] > 0 { nest.level[axis] - 1 } else { nest.depth() };
            let first = l.is_first(nest, axis);
            let names = l.eval_all(nest, reads, lanes);
            let combined = l.combine_with_slots(region, &elems, &slots, lanes, &first, &names)?;
            for (slot, (elem, new)) in slots.iter().zip(elems.iter().zip(&combined)) {
                l.w.line(format!("store {} {new}, ptr {slot}", vector(reg(*elem), lanes)));
            }
            nest.select_after(&mut l.w, outside);
            let mut totals = l.load_slots(&elems, &slots, lanes);
            let along = vec_dim == Some(axis);
            if along {
                totals = l.combine_halves(region, &elems, lanes, totals)?;
            }
            for (tile, name) in tiles.iter().zip(totals) {
                let total = Evaluated { name, lanes: if along { 1 } else { lanes }, level: outside };
                l.write_after(nest, tile, &result_map, &total, outside);
            }
            Ok(())
        })
    }

    /// Combines the lanes of vectors by halves, with a region.
    fn combine_halves(
        &mut self,
        region: BlockId,
        elems: &[Elem],
        mut lanes: usize,
        mut values: Vec<String>,
    ) -> Result<Vec<String>> {
        while lanes > 1 {
            let mut arguments = Vec::new();
            for from in [0, lanes / 2] {
                for (elem, x) in elems.iter().zip(&values) {
                    arguments.push(half(&mut self.w, reg(*elem), lanes, x, from));
                }
            }
            lanes /= 2;
            values = self.inline_region(region, lanes, &arguments)?;
        }
        Ok(values)
    }

    /// Emits an `alloca` for a vector of each type.
    pub fn slots(&mut self, elems: &[Elem], lanes: usize) -> Vec<String> {
        elems.iter().map(|e| self.alloca(&vector(reg(*e), lanes))).collect()
    }

    fn load_slots(&mut self, elems: &[Elem], slots: &[String], lanes: usize) -> Vec<String> {
        let load = |(e, slot): (&Elem, &String)| self.w.inst(format!("load {}, ptr {slot}", vector(reg(*e), lanes)));
        elems.iter().zip(slots).map(load).collect()
    }

    /// Whether the nest is at the beginning of a dimension, as an i1, in the innermost loop.
    pub fn is_first(&mut self, nest: &LoopNest, axis: usize) -> String {
        nest.select(&mut self.w, nest.depth());
        self.w.inst(format!("icmp eq i64 {}, 0", nest.index[axis]))
    }

    /// The values at the current point of the nest, with `lanes` lanes each. Selects the innermost loop.
    pub fn eval_all(&mut self, nest: &mut LoopNest, reads: &[(Value, DimMap)], lanes: usize) -> Vec<String> {
        let mut names = Vec::new();
        for (v, map) in reads {
            let ev = self.eval(nest, *v, map);
            let ty = reg(self.elem(*v));
            names.push(self.widen(nest, &ev, ty, lanes));
        }
        nest.select(&mut self.w, nest.depth());
        names
    }

    /// Combines the contents of the slots with `new`; the result is `new` where `first` holds, because the slots are
    /// empty then.
    pub fn combine_with_slots(
        &mut self,
        region: BlockId,
        elems: &[Elem],
        slots: &[String],
        lanes: usize,
        first: &str,
        new: &[String],
    ) -> Result<Vec<String>> {
        let first = ew::widen_lane(&mut self.w, "i1", lanes, first);
        let mut arguments = self.load_slots(elems, slots, lanes);
        for ((old, elem), x) in arguments.iter_mut().zip(elems).zip(new) {
            // Passes the element itself where the slots are empty, so that the function gets valid inputs.
            *old = ew::select(&mut self.w, *elem, lanes, &first, x, old);
        }
        arguments.extend(new.iter().cloned());
        let combined = self.inline_region(region, lanes, &arguments)?;
        let pick = |((c, elem), x): ((&String, &Elem), &String)| ew::select(&mut self.w, *elem, lanes, &first, x, c);
        Ok(combined.iter().zip(elems).zip(new).map(pick).collect())
    }

    /// Emits a combining region on vectors, in the selected section.
    pub fn inline_region(&mut self, region: BlockId, lanes: usize, arguments: &[String]) -> Result<Vec<String>> {
        let func = self.func;
        let mut values: HashMap<Value, String> =
            func.block(region).params.iter().copied().zip(arguments.iter().cloned()).collect();
        for &id in &func.block(region).ops {
            let data = func.op(id);
            let mut operands = Vec::new();
            for v in &data.operands {
                let name = match values.get(v) {
                    Some(name) => name.clone(),
                    None => {
                        let name = self.scalar(*v);
                        let ty = reg(self.elem(*v));
                        ew::widen_lane(&mut self.w, ty, lanes, &name)
                    }
                };
                operands.push(name);
            }
            let name = match &data.op {
                Op::Yield => return Ok(operands),
                Op::Constant { value } => {
                    let d = self.elem(data.results[0]).num().expect("constants are numbers");
                    super::eval::literal(d, lanes, *value)
                }
                Op::Unary(_) | Op::Binary(_) | Op::Cmp(_) | Op::Fma | Op::Select | Op::Cast | Op::Bitcast => {
                    self.apply(id, lanes, &operands)
                }
                other => {
                    self.loc = data.loc.clone();
                    return self.unsupported(
                        format!(
                            "`{}` inside the closure of a reduction or scan is not supported on the CPU",
                            other.mnemonic()
                        ),
                        Some("use arithmetic, comparisons and `where_` only"),
                    );
                }
            };
            values.insert(data.results[0], name);
        }
        panic!("internal compiler error: a region without `yield`; please report this")
    }
}
