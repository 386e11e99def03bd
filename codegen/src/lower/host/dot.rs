//! Lowers dots.
//!
//! The accumulators of a block of MR rows × NR vectors stay in registers while k runs over all of K; each step loads NR
//! vectors of b and MR scalars of a, and performs MR · NR fused multiply-adds (the register blocking of K. Goto and R.
//! van de Geijn, "Anatomy of High-Performance Matrix Multiplication", 2008; the kernel's tiles are the outer blocking).
//! Operands are arena tiles: a with any strides, b with contiguous rows, packed first if necessary. The accumulator
//! operand is evaluated where the registers of a block are loaded, so that scaling the accumulator takes no separate
//! pass.

use super::elementwise as ew;
use super::loop_nest::{Evaluated, LoopNest, LoopNestSpec, TileRef, identity};
use super::repr::{is_narrow, reg_num, round, stored, stored_bytes};
use super::state::{Lowering, Result};
use super::writer::vector;
use crate::ir::{BinaryOp, DType, OpId, Value};

/// A dot, resolved to tiles and block sizes.
struct BlockedDot {
    a: TileRef,
    b: TileRef,
    /// The extent of the contracted dimension.
    depth: usize,
    /// Rows of a register block.
    rows: usize,
    /// Vectors per row of a register block.
    columns: usize,
    lanes: usize,
    /// The type of the partial sums.
    sum: DType,
}

/// The largest power of two that divides `n` and is at most `limit`.
fn power_of_two(n: usize, limit: usize) -> usize {
    let mut p = 1 << n.trailing_zeros();
    while p > limit.max(1) {
        p /= 2;
    }
    p
}

impl Lowering<'_> {
    pub fn dot(&mut self, id: OpId) -> Result<()> {
        let data = self.func.op(id);
        let (a, b, acc, result) = (data.operands[0], data.operands[1], data.operands[2], data.results[0]);
        let shape = self.shape(result).to_vec();
        let map = identity(&shape);
        let (a_tile, a_temporary) = self.tile_of(a)?;
        let (b_tile, b_temporary) = self.contiguous_rows(b)?;
        let reads = [(acc, map.clone())];
        self.materialize_operands(&reads, &shape)?;
        let d = self.elem(result).num().expect("dots are of numbers");
        let sum = if is_narrow(d) { DType::F32 } else { d };
        let vectors = self.vectors;
        let widest = vectors.lanes * 4 / sum.bytes().max(4);
        let lanes = power_of_two(shape[1], widest);
        let columns = power_of_two(shape[1] / lanes, if vectors.registers >= 32 { 4 } else { 2 });
        let rows = power_of_two(shape[0], vectors.registers / 2 / columns);
        let depth = self.shape(a)[1];
        let blocked = BlockedDot { a: a_tile, b: b_tile, depth, rows, columns, lanes, sum };
        let tile = match self.destinations.remove(&result) {
            Some(tile) => {
                self.arena.retain(tile.buffer);
                tile
            }
            None => self.new_tile(&shape, self.elem(result)),
        };
        let spec = LoopNestSpec {
            shape: shape.clone(),
            order: vec![1, 0],
            steps: vec![rows, columns * lanes],
            vec_dim: (lanes > 1).then_some(1),
            lanes,
        };
        self.loop_nest(&spec, &reads, &[], |l, nest| {
            l.block(nest, &blocked, acc, (a, b), &tile);
            Ok(())
        })?;
        for (tile, temporary) in [(&blocked.a, a_temporary), (&blocked.b, b_temporary)] {
            if temporary {
                self.arena.release(tile.buffer);
            }
        }
        self.define(result, tile);
        Ok(())
    }

    /// The tile of `b` with its last dimension contiguous; `true` if the caller must release it.
    fn contiguous_rows(&mut self, b: Value) -> Result<(TileRef, bool)> {
        let (tile, temporary) = self.tile_of(b)?;
        if tile.strides[1] == 1 || self.shape(b)[1] == 1 {
            return Ok((tile, temporary));
        }
        let packed = self.new_tile(self.shape(b), self.elem(b));
        self.fill(b, &packed)?;
        if temporary {
            self.arena.release(tile.buffer);
        }
        Ok((packed, true))
    }

    /// Computes one register block of the result.
    fn block(&mut self, nest: &mut LoopNest, p: &BlockedDot, acc: Value, operands: (Value, Value), tile: &TileRef) {
        let d = self.elem(acc).num().expect("dots are of numbers");
        let vty = vector(reg_num(p.sum), p.lanes);
        let (start, depth) = (nest.index.clone(), nest.depth());
        let map = identity(&nest.shape);
        nest.select(&mut self.w, depth);
        let mut points = Vec::new();
        for i in 0..p.rows {
            for j in 0..p.columns {
                let row = self.offset(&start[0], i);
                let column = self.offset(&start[1], j * p.lanes);
                points.push((vec![row, column], self.alloca(&vty)));
            }
        }
        for (point, slot) in &points {
            nest.move_to(point.clone());
            let ev = self.eval(nest, acc, &map);
            let x = self.widen(nest, &ev, reg_num(p.sum), p.lanes);
            nest.select(&mut self.w, depth);
            self.w.line(format!("store {vty} {x}, ptr {slot}"));
        }
        nest.select(&mut self.w, depth);
        self.contraction(nest, p, operands, &points);
        for (point, slot) in &points {
            nest.move_to(point.clone());
            nest.select(&mut self.w, depth);
            let x = self.w.inst(format!("load {vty}, ptr {slot}"));
            let name = round(&mut self.w, d, p.lanes, &x);
            let ev = Evaluated { name, lanes: p.lanes, level: depth };
            self.write_tile(nest, tile, &map, &ev);
        }
    }

    fn offset(&mut self, index: &str, by: usize) -> String {
        match index.parse::<usize>() {
            Ok(i) => (i + by).to_string(),
            Err(_) if by == 0 => index.to_string(),
            Err(_) => self.w.inst(format!("add i64 {index}, {by}")),
        }
    }

    /// Emits the loop over k.
    fn contraction(
        &mut self,
        nest: &mut LoopNest,
        p: &BlockedDot,
        operands: (Value, Value),
        points: &[(Vec<String>, String)],
    ) {
        let depth = nest.depth();
        let (a_base, b_base) = (self.tile_pointer(nest, &p.a), self.tile_pointer(nest, &p.b));
        nest.select(&mut self.w, depth);
        let (a_ty, b_ty) = (stored(p.a.elem), stored(p.b.elem));
        let rows: Vec<String> =
            (0..p.rows).map(|i| self.moved(&a_base, a_ty, &points[i * p.columns].0[0], p.a.strides[0])).collect();
        let columns: Vec<String> =
            (0..p.columns).map(|j| self.moved(&b_base, b_ty, &points[j].0[1], p.b.strides[1])).collect();
        let unroll = power_of_two(p.depth, 4);
        let label = self.w.fresh_label("k");
        let k = self.w.fresh("k");
        self.w.branch(&format!("{label}.pre"));
        self.w.label(&format!("{label}.pre"));
        self.w.branch(&label);
        self.w.label(&label);
        self.w.line(format!("{k} = phi i64 [ 0, %{label}.pre ], [ {k}.next, %{label} ]"));
        for u in 0..unroll {
            let at = self.offset(&k, u);
            self.step(p, operands, &rows, &columns, points, &at);
        }
        self.w.line(format!("{k}.next = add nuw nsw i64 {k}, {unroll}"));
        self.w.line(format!("{k}.more = icmp ult i64 {k}.next, {}", p.depth));
        self.w.branch_if(&format!("{k}.more"), &label, &format!("{label}.exit"));
        self.w.label(&format!("{label}.exit"));
    }

    fn moved(&mut self, pointer: &str, ty: &str, index: &str, stride: usize) -> String {
        let offset = self.w.inst(format!("mul i64 {index}, {stride}"));
        self.w.inst(format!("getelementptr {ty}, ptr {pointer}, i64 {offset}"))
    }

    /// One step of k: adds the outer product of a column of `a` and a row of `b`.
    fn step(
        &mut self,
        p: &BlockedDot,
        operands: (Value, Value),
        rows: &[String],
        columns: &[String],
        points: &[(Vec<String>, String)],
        k: &str,
    ) {
        let (sum, lanes) = (p.sum, p.lanes);
        let number = |l: &Self, v: Value| l.elem(v).num().expect("dots are of numbers");
        let (from_a, from_b) = (number(self, operands.0), number(self, operands.1));
        let (a_ty, b_ty) = (stored(p.a.elem), stored(p.b.elem));
        let vty = vector(reg_num(sum), lanes);
        let mut row_values = Vec::new();
        for column in columns {
            let pointer = self.moved(column, b_ty, k, p.b.strides[0]);
            let align = stored_bytes(p.b.elem);
            let x = self.w.inst(format!("load {}, ptr {pointer}, align {align}", vector(b_ty, lanes)));
            row_values.push(self.operand(from_b, sum, lanes, &x));
        }
        for (i, row) in rows.iter().enumerate() {
            let pointer = self.moved(row, a_ty, k, p.a.strides[1]);
            let x = self.w.inst(format!("load {a_ty}, ptr {pointer}, align {}", stored_bytes(p.a.elem)));
            let x = self.operand(from_a, sum, 1, &x);
            let x = ew::widen_lane(&mut self.w, reg_num(sum), lanes, &x);
            for (j, y) in row_values.iter().enumerate() {
                let slot = &points[i * columns.len() + j].1;
                let old = self.w.inst(format!("load {vty}, ptr {slot}"));
                let new = if sum.is_float() {
                    ew::fma(&mut self.w, sum, lanes, &x, y, &old)
                } else {
                    let product = ew::binary(&mut self.w, BinaryOp::Mul, sum, lanes, &x, y);
                    ew::binary(&mut self.w, BinaryOp::Add, sum, lanes, &product, &old)
                };
                self.w.line(format!("store {vty} {new}, ptr {slot}"));
            }
        }
    }

    /// Converts an element of an operand to the type of the sums.
    fn operand(&mut self, from: DType, sum: DType, lanes: usize, x: &str) -> String {
        if reg_num(from) == reg_num(sum) { x.to_string() } else { ew::cast(&mut self.w, from, sum, lanes, x) }
    }
}
