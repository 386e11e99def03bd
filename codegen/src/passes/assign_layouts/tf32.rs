//! Dots of f32 by `wgmma`, in tf32 (one instruction per step) or tf32x3 (3xTF32).
//!
//! `wgmma` multiplies tf32, the leading 11 significant bits of each number, and reads its second operand from shared
//! memory, where K must be the fastest dimension.
//!
//! tf32x3 splits each number in two, x = big + small (Ootomo and Yokota, "Recovering single precision accuracy from
//! Tensor Cores while surpassing the FP32 theoretical peak performance", 2022): a·b ≈ a_small·b_big + a_big·b_small +
//! a_big·b_big, the small terms first. Tensor cores truncate bits that do not fit their accumulator, which biases long
//! sums towards zero. Therefore the accumulator of each tile starts at zero, and FP32 adds with rounding accumulate the
//! tiles.
//!
//! A first operand that is invariant in a loop (the keys for dK and dV, the queries for O) is split once, before the
//! loop, and the two halves stay in shared memory: in registers they would take twice the space of the tile for the
//! whole loop.

use super::choose::extents;
use super::rewrite::{Rewrite, shared_in_order};
use crate::ir::{BinaryOp, DType, Literal, Op, Precision, Type, Value};
use crate::layout::LinearLayout;
use crate::mma::{self, DotShape};
use crate::num::{TF32_HALF, TF32_KEPT};

/// Maximum shared memory of one split operand, in bytes.
const HELD_BYTES: usize = 64 << 10;
/// Maximum number of split operands that stay in shared memory: two leave space for pipelined loads.
const HELD_OPERANDS: usize = 2;

impl Rewrite<'_, '_> {
    /// acc + a·b in the layout of `acc`. `acc` is a value of the new function, `operands` are values of the old one.
    pub(super) fn tf32_product(&mut self, dot: DotShape, plan: &mma::Plan, operands: [Value; 2], acc: Value) -> Value {
        let [a, b] = operands;
        let ends = self.ends(operands);
        let (warps, exact) = (&plan.warps, dot.precision == Precision::Tf32x3);
        let acc_ty = self.new.ty(acc).clone();
        let layout = plan.a_layout(&extents(&[dot.m, dot.k]));
        let b_buffer = self.k_major(b, 0);
        let b_layout = self.second_in_registers(b, b_buffer.is_some());
        if !exact {
            let a = match self.k_major(a, 1) {
                Some(buffer) => buffer,
                None => self.tile(a, &layout),
            };
            let b = b_buffer.unwrap_or_else(|| {
                let tile = self.tile(b, &b_layout);
                self.shared_along(tile, 0)
            });
            let started = self.start(warps, ends, [a, b], acc, &acc_ty);
            return self.emit_one(Op::WgmmaWait { pending: 0 }, vec![started], acc_ty);
        }
        // b first: its registers are free again once b is in shared memory.
        let b = self.tile(b, &b_layout);
        let (b_big, b_small) = self.parts(b);
        let (b_big, b_small) = (self.shared_along(b_big, 0), self.shared_along(b_small, 0));
        let (a_big, a_small) = match self.held.get(&a) {
            Some(&parts) => parts,
            None => {
                let a = self.tile(a, &layout);
                self.parts(a)
            }
        };
        let mut sum = self.emit_one(Op::Constant { value: Literal::Float(0.0) }, vec![], acc_ty.clone());
        for pair in [[a_small, b_big], [a_big, b_small], [a_big, b_big]] {
            sum = self.start(warps, ends, pair, sum, &acc_ty);
        }
        let sum = self.emit_one(Op::WgmmaWait { pending: 0 }, vec![sum], acc_ty.clone());
        self.emit_one(Op::Binary(BinaryOp::Add), vec![acc, sum], acc_ty)
    }

    fn start(
        &mut self,
        warps: &[u32; 2],
        [k_end, n_end]: [Option<u32>; 2],
        [a, b]: [Value; 2],
        acc: Value,
        ty: &Type,
    ) -> Value {
        let op = Op::Wgmma { warps: warps.to_vec(), late: None, open: None, k_end, n_end };
        self.emit_one(op, vec![a, b, acc], ty.clone())
    }

    /// The buffer of a loaded tile, if dimension `k`, which is K, is the fastest there.
    fn k_major(&mut self, v: Value, k: usize) -> Option<Value> {
        if !self.comes_from_memory(v) {
            return None;
        }
        let buffer = self.in_shared(v, DType::F32);
        let Type::Shared { shape, layout, .. } = self.new.ty(buffer) else { return None };
        let wanted = along_k(shape, k);
        (*self.new.layout(*layout) == wanted).then_some(buffer)
    }

    /// A tile in registers: loaded from shared memory where a load put it there for dots.
    fn tile(&mut self, v: Value, layout: &LinearLayout) -> Value {
        if !self.comes_from_memory(v) {
            return self.in_registers(v, layout, DType::F32);
        }
        let buffer = self.in_shared(v, DType::F32);
        let id = self.intern(layout);
        let ty = self.old.ty(v).with_elem(DType::F32).with_layout(Some(id));
        self.emit_one(Op::LocalLoad, vec![buffer], ty)
    }

    /// The register layout of the second operand [k, n] between its source, which may be K-major too, and a K-major
    /// buffer: four consecutive elements on each side.
    fn second_in_registers(&self, b: Value, is_along_k: bool) -> LinearLayout {
        let shape = extents(self.old.ty(b).shape());
        let num_warps = self.homes.num_warps;
        match is_along_k {
            true => LinearLayout::blocked_filling(&shape, &[4.min(shape[0]), 1], num_warps, &[0, 1]),
            false => LinearLayout::transposing(&shape, num_warps),
        }
    }

    /// Splits a loaded tile next to its load, if it is a loop-invariant first operand.
    pub(super) fn hold_parts(&mut self, v: Value) {
        let numbers: usize = self.old.ty(v).shape().iter().product();
        let has_room = 2 * numbers * size_of::<f32>() <= HELD_BYTES && self.held.len() < HELD_OPERANDS;
        if has_room && self.homes.is_shared_by_a_loop(v) {
            let tile = self.get_anywhere(v);
            let (big, small) = self.parts(tile);
            let parts = (self.shared_along(big, 1), self.shared_along(small, 1));
            self.held.insert(v, parts);
        }
    }

    /// Stores a tile to a shared buffer that `wgmma` can read, with dimension `k` as K.
    fn shared_along(&mut self, tile: Value, k: usize) -> Value {
        let shape = self.new.ty(tile).shape().to_vec();
        let layout = self.intern(&along_k(&shape, k));
        self.emit_one(Op::LocalAlloc, vec![tile], Type::Shared { shape, elem: DType::F32, layout })
    }

    /// Splits x into x rounded to tf32 and the remainder. Tensor cores truncate the remainder to tf32: at most its last
    /// bit is lost.
    fn parts(&mut self, x: Value) -> (Value, Value) {
        let ty = self.new.ty(x).clone();
        let bits_ty = ty.with_elem(DType::I32);
        let int = |this: &mut Self, n| this.emit_one(Op::Constant { value: Literal::Int(n) }, vec![], bits_ty.clone());
        let (half, kept) = (int(self, TF32_HALF.into()), int(self, (TF32_KEPT as i32).into()));
        let bits = self.emit_one(Op::Bitcast, vec![x], bits_ty.clone());
        let above = self.emit_one(Op::Binary(BinaryOp::Add), vec![bits, half], bits_ty.clone());
        let big = self.emit_one(Op::Binary(BinaryOp::And), vec![above, kept], bits_ty);
        let big = self.emit_one(Op::Bitcast, vec![big], ty.clone());
        (big, self.emit_one(Op::Binary(BinaryOp::Sub), vec![x, big], ty))
    }
}

/// The layout of a buffer from which `wgmma` can read f32: dimension `k`, which is K, is the fastest.
fn along_k(shape: &[usize], k: usize) -> LinearLayout {
    shared_in_order(shape, &[k, 1 - k], DType::F32)
}
