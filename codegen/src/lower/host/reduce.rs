//! Reductions and scans.
//!
//! A reduction by one associative function (`add`, `mul`, `min`, `max`, `and`, `or`, `xor`) keeps a vector of partial
//! results. Along the vector dimension lane l combines the elements l, l + W, l + 2W, … in order; then the lanes are
//! combined in halves (lane l with lane l + W/2, and so on). Along another dimension every lane is an element of the
//! result. Partial sums of narrow floats stay in f32 and are rounded once.
//!
//! Any other reduction, and every scan, combines elements strictly in order.

use super::elementwise as ew;
use super::nest::{Ev, Map, NestSpec, TileRef, identity};
use super::repr::{is_narrow, reg, reg_num, round};
use super::state::{Lowering, Result};
use super::writer::{Writer, vector};
use crate::ir::{BinaryOp, BlockId, DType, Elem, Literal, Op, OpId, Value};
use std::collections::HashMap;

/// The function of a region that only applies one to its two parameters.
fn single_function(func: &crate::ir::Func, region: BlockId) -> Option<BinaryOp> {
    let block = func.block(region);
    let [id, last] = block.ops[..] else { return None };
    let Op::Binary(op) = func.op(id).op else { return None };
    let associative = matches!(
        op,
        BinaryOp::Add | BinaryOp::Mul | BinaryOp::Min | BinaryOp::Max | BinaryOp::And | BinaryOp::Or | BinaryOp::Xor
    );
    let operands = &func.op(id).operands;
    let of_both = *operands == block.params || operands.iter().rev().eq(&block.params);
    (associative && block.params.len() == 2 && of_both && func.op(last).operands == func.op(id).results).then_some(op)
}

/// The type that partial results have.
fn partial_type(d: DType) -> DType {
    if is_narrow(d) { DType::F32 } else { d }
}

/// x with `op(x, y) = y` for every y. Minimum and maximum ignore a NaN beside a number.
fn neutral(op: BinaryOp, d: DType) -> Literal {
    let signed = d.is_signed_int();
    let bits = d.bits() as u32;
    match op {
        BinaryOp::Min | BinaryOp::Max if d.is_float() => Literal::Float(f64::NAN),
        BinaryOp::Add if d.is_float() => Literal::Float(-0.0),
        BinaryOp::Mul if d.is_float() => Literal::Float(1.0),
        BinaryOp::Mul => Literal::Int(1),
        BinaryOp::Max if signed => Literal::Int(i64::MIN >> (64 - bits)),
        BinaryOp::Min if signed => Literal::Int(i64::MAX >> (64 - bits)),
        BinaryOp::Min | BinaryOp::And => Literal::Int(-1),
        _ => Literal::Int(0),
    }
}

/// Combines the lanes of a vector in halves.
pub fn combine_lanes(w: &mut Writer, op: BinaryOp, d: DType, mut lanes: usize, x: &str) -> String {
    let ty = reg_num(d);
    let mut x = x.to_string();
    while lanes > 1 {
        let half = lanes / 2;
        let vty = vector(ty, lanes);
        let part = |w: &mut Writer, from: usize| {
            if half == 1 {
                return w.inst(format!("extractelement {vty} {x}, i64 {from}"));
            }
            let items: Vec<String> = (from..from + half).map(|i| format!("i32 {i}")).collect();
            w.inst(format!("shufflevector {vty} {x}, {vty} poison, <{half} x i32> <{}>", items.join(", ")))
        };
        let (low, high) = (part(w, 0), part(w, half));
        x = ew::binary(w, op, d, half, &low, &high);
        lanes = half;
    }
    x
}

impl Lowering<'_> {
    pub fn reduce(&mut self, id: OpId, axis: usize) -> Result<()> {
        let data = self.func.op(id);
        let (operands, results) = (data.operands.clone(), data.results.clone());
        let shape = self.shape(operands[0]).to_vec();
        let map = identity(&shape);
        let reads: Vec<(Value, Map)> = operands.iter().map(|&v| (v, map.clone())).collect();
        self.prepare(&reads, &shape)?;
        let mut tiles = Vec::new();
        for &r in &results {
            tiles.push(self.new_tile(self.shape(r), self.elem(r)));
        }
        match single_function(self.func, data.regions[0]) {
            Some(op) if operands.len() == 1 => self.reduce_fast(op, &reads, &shape, axis, &tiles[0])?,
            _ => self.in_order(id, &reads, &shape, axis, false, &tiles)?,
        }
        for (r, tile) in results.into_iter().zip(tiles) {
            self.define(r, tile);
        }
        Ok(())
    }

    fn reduce_fast(
        &mut self,
        op: BinaryOp,
        reads: &[(Value, Map)],
        shape: &[usize],
        axis: usize,
        tile: &TileRef,
    ) -> Result<()> {
        let (v, map) = &reads[0];
        let d = self.elem(*v).num().expect("reductions are of numbers");
        let partial = partial_type(d);
        let (vec_dim, lanes) = self.vector_dim(shape, reads, &[]);
        let mut spec = NestSpec::new(shape, vec_dim, lanes);
        // The reduced dimension is innermost: its partial results stay in registers.
        spec.order.retain(|&k| k != axis);
        spec.order.push(axis);
        let vty = vector(reg_num(partial), lanes);
        let slot = self.alloca(&vty);
        let start = super::eval::literal(partial, lanes, neutral(op, partial));
        let mut result_map: Map = map.clone();
        result_map.remove(axis);
        self.nest(&spec, reads, &[], |l, nest| {
            let outside = if nest.level[axis] > 0 { nest.level[axis] - 1 } else { nest.depth() };
            nest.select(&mut l.w, outside);
            l.w.line(format!("store {vty} {start}, ptr {slot}"));
            let ev = l.eval(nest, *v, map);
            let x = l.widen(nest, &ev, reg_num(d), lanes);
            nest.select(&mut l.w, nest.depth());
            let sum = l.w.inst(format!("load {vty}, ptr {slot}"));
            let sum = ew::binary(&mut l.w, op, partial, lanes, &sum, &x);
            l.w.line(format!("store {vty} {sum}, ptr {slot}"));
            nest.select_after(&mut l.w, outside);
            let mut total = l.w.inst(format!("load {vty}, ptr {slot}"));
            let along = vec_dim == Some(axis);
            if along {
                total = combine_lanes(&mut l.w, op, partial, lanes, &total);
            }
            let result_lanes = if along { 1 } else { lanes };
            let total = round(&mut l.w, d, result_lanes, &total);
            let total = Ev { name: total, lanes: result_lanes, level: outside };
            l.write_after(nest, tile, &result_map, &total, outside);
            Ok(())
        })
    }

    /// Writes to a tile at the end of a loop's body.
    fn write_after(&mut self, nest: &mut super::nest::Nest, tile: &TileRef, map: &Map, value: &Ev, level: usize) {
        nest.select_after(&mut self.w, level);
        self.write_tile(nest, tile, map, value);
    }

    pub fn scan(&mut self, id: OpId, axis: usize, reverse: bool) -> Result<()> {
        let data = self.func.op(id);
        let (operands, results) = (data.operands.clone(), data.results.clone());
        let shape = self.shape(operands[0]).to_vec();
        let map = identity(&shape);
        let reads: Vec<(Value, Map)> = operands.iter().map(|&v| (v, map.clone())).collect();
        self.prepare(&reads, &shape)?;
        let mut tiles = Vec::new();
        for &r in &results {
            tiles.push(self.new_tile(self.shape(r), self.elem(r)));
        }
        self.in_order(id, &reads, &shape, axis, reverse, &tiles)?;
        for (r, tile) in results.into_iter().zip(tiles) {
            self.define(r, tile);
        }
        Ok(())
    }

    /// Combines elements one after the other along `axis`; lanes are positions along another dimension, if there is one.
    fn in_order(
        &mut self,
        id: OpId,
        reads: &[(Value, Map)],
        shape: &[usize],
        axis: usize,
        reverse: bool,
        tiles: &[TileRef],
    ) -> Result<()> {
        let scan = matches!(self.func.op(id).op, Op::Scan { .. });
        let region = self.func.op(id).regions[0];
        let (mut vec_dim, mut lanes) = self.vector_dim(shape, reads, &[]);
        if vec_dim == Some(axis) {
            (vec_dim, lanes) = (None, 1);
        }
        let mut spec = NestSpec::new(shape, vec_dim, lanes);
        spec.order.retain(|&k| k != axis);
        spec.order.push(axis);
        let elems: Vec<Elem> = reads.iter().map(|(v, _)| self.elem(*v)).collect();
        let slots: Vec<String> = elems.iter().map(|e| self.alloca(&vector(reg(*e), lanes))).collect();
        let map = identity(shape);
        let mut result_map = map.clone();
        if !scan {
            result_map.remove(axis);
        }
        let extent = shape[axis];
        self.nest(&spec, reads, &[], |l, nest| {
            let depth = nest.depth();
            let outside = if nest.level[axis] > 0 { nest.level[axis] - 1 } else { depth };
            nest.select(&mut l.w, depth);
            let first = l.w.inst(format!("icmp eq i64 {}, 0", nest.index[axis]));
            if reverse && nest.level[axis] > 0 {
                nest.index[axis] = l.w.inst(format!("sub i64 {}, {}", extent - 1, nest.index[axis]));
            }
            let mut names = Vec::new();
            for ((v, map), elem) in reads.iter().zip(&elems) {
                let ev = l.eval(nest, *v, map);
                names.push(l.widen(nest, &ev, reg(*elem), lanes));
            }
            nest.select(&mut l.w, depth);
            let mut arguments = Vec::new();
            for ((slot, elem), x) in slots.iter().zip(&elems).zip(&names) {
                // Before the first element the slot holds nothing; the element itself keeps the function's inputs sane.
                let old = l.w.inst(format!("load {}, ptr {slot}", vector(reg(*elem), lanes)));
                let flag = ew::widen_lane(&mut l.w, "i1", lanes, &first);
                arguments.push(ew::select(&mut l.w, *elem, lanes, &flag, x, &old));
            }
            arguments.extend(names.iter().cloned());
            let combined = l.inline_region(region, lanes, &arguments)?;
            for (k, elem) in elems.iter().enumerate() {
                let flag = ew::widen_lane(&mut l.w, "i1", lanes, &first);
                let new = ew::select(&mut l.w, *elem, lanes, &flag, &names[k], &combined[k]);
                l.w.line(format!("store {} {new}, ptr {}", vector(reg(*elem), lanes), slots[k]));
                if scan {
                    let ev = Ev { name: new, lanes, level: depth };
                    l.write_tile(nest, &tiles[k], &result_map, &ev);
                }
            }
            for (k, elem) in elems.iter().enumerate().filter(|_| !scan) {
                nest.select_after(&mut l.w, outside);
                let total = l.w.inst(format!("load {}, ptr {}", vector(reg(*elem), lanes), slots[k]));
                let ev = Ev { name: total, lanes, level: outside };
                l.write_after(nest, &tiles[k], &result_map, &ev, outside);
            }
            Ok(())
        })
    }

    /// Writes a combining region on vectors in the selected section.
    fn inline_region(&mut self, region: BlockId, lanes: usize, arguments: &[String]) -> Result<Vec<String>> {
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
        panic!("internal compiler error: a region without `yield`, please report")
    }
}
