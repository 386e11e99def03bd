//! Dots of f32 by `wgmma`, in tf32 (one `wgmma` op per dot) or tf32x3 (3xTF32: three).
//!
//! `wgmma` multiplies tf32, the leading 11 significant bits of each number, and reads its second operand from shared
//! memory, where K must be the fastest dimension.
//!
//! tf32x3 splits each number in two, x = big + small (Ootomo and Yokota, "Recovering single precision accuracy from
//! Tensor Cores while surpassing the FP32 theoretical peak performance", 2022): a·b ≈ a_small·b_big + a_big·b_small +
//! a_big·b_big, the small terms first. Tensor cores truncate bits that do not fit their accumulator, which biases long
//! sums toward zero. Therefore the accumulator of each tile starts at zero, and FP32 adds with rounding accumulate the
//! tiles.
//!
//! A first operand that is invariant in a loop (the keys for dK and dV, the queries for O) is split once, before the
//! loop, and the two halves stay in shared memory: in registers they would take twice the space of the tile for the
//! whole loop.

use super::rewrite::{Rewrite, shared_in_order};
use crate::analysis::access_layout::extents;
use crate::ir::{BinaryOp, DType, Literal, Op, Precision, Type, Value};
use crate::layout::LinearLayout;
use crate::mma::{self, DotShape};
use crate::num::{TF32_HALF, TF32_KEPT};

/// Maximum shared memory of one split operand, in bytes.
const MAX_SPLIT_BYTES: usize = 64 << 10;
/// Maximum number of split operands that stay in shared memory: two leave space for pipelined loads.
const MAX_SPLIT_OPERANDS: usize = 2;

impl Rewrite<'_, '_> {
    /// acc + a·b in the layout of `acc`. `acc` is a value of the new function, `operands` are values of the old one.
    pub(super) fn tf32_dot(&mut self, dot: DotShape, plan: &mma::Plan, operands: [Value; 2], acc: Value) -> Value {
        let [a, b] = operands;
        let ends = self.nonzero_ends(operands);
        let (warps, is_tf32x3) = (&plan.warps, dot.precision == Precision::Tf32x3);
        let acc_ty = self.new.ty(acc).clone();
        let layout = plan.a_layout(&extents(&[dot.m, dot.k]));
        let b_buffer = self.k_major_buffer(b, 0);
        let b_layout = self.b_register_layout(b, b_buffer.is_some());
        if !is_tf32x3 {
            let a = match self.k_major_buffer(a, 1) {
                Some(buffer) => buffer,
                None => self.load_to_registers(a, &layout),
            };
            let b = b_buffer.unwrap_or_else(|| {
                let tile = self.load_to_registers(b, &b_layout);
                self.alloc_k_major(tile, 0)
            });
            let started = self.issue_wgmma(warps, ends, [a, b], acc, &acc_ty);
            return self.emit_one(Op::WgmmaWait { pending: 0 }, vec![started], acc_ty);
        }
        // b first: its registers are free again once b is in shared memory.
        let b = self.load_to_registers(b, &b_layout);
        let (b_big, b_small) = self.split_tf32(b);
        let (b_big, b_small) = (self.alloc_k_major(b_big, 0), self.alloc_k_major(b_small, 0));
        let (a_big, a_small) = match self.hoisted_splits.get(&a) {
            Some(&parts) => parts,
            None => {
                let a = self.load_to_registers(a, &layout);
                self.split_tf32(a)
            }
        };
        let mut sum = self.emit_one(Op::Constant { value: Literal::Float(0.0) }, vec![], acc_ty.clone());
        for pair in [[a_small, b_big], [a_big, b_small], [a_big, b_big]] {
            sum = self.issue_wgmma(warps, ends, pair, sum, &acc_ty);
        }
        let sum = self.emit_one(Op::WgmmaWait { pending: 0 }, vec![sum], acc_ty.clone());
        self.emit_one(Op::Binary(BinaryOp::Add), vec![acc, sum], acc_ty)
    }

    fn issue_wgmma(
        &mut self,
        warps: &[u32; 2],
        [k_end, n_end]: [Option<u32>; 2],
        [a, b]: [Value; 2],
        acc: Value,
        ty: &Type,
    ) -> Value {
        let op = Op::Wgmma { warps: warps.to_vec(), k_end, n_end };
        self.emit_one(op, vec![a, b, acc], ty.clone())
    }

    /// The shared buffer of a loaded tile, if it is K-major: if dimension `k`, the K of the dot, is the fastest.
    fn k_major_buffer(&mut self, v: Value, k: usize) -> Option<Value> {
        if !self.is_loaded(v) {
            return None;
        }
        let buffer = self.in_shared(v, DType::F32);
        let Type::Shared { shape, layout, .. } = self.new.ty(buffer) else { return None };
        let wanted = k_major_layout(shape, k);
        (*self.new.layout(*layout) == wanted).then_some(buffer)
    }

    /// A tile in registers: loaded from shared memory where a load put it there for dots.
    fn load_to_registers(&mut self, v: Value, layout: &LinearLayout) -> Value {
        if !self.is_loaded(v) {
            return self.in_registers(v, layout, DType::F32);
        }
        let buffer = self.in_shared(v, DType::F32);
        let id = self.intern(layout);
        let ty = self.old.ty(v).with_elem(DType::F32).with_layout(Some(id));
        self.emit_one(Op::LocalLoad, vec![buffer], ty)
    }

    /// The register layout in which the second operand [k, n] moves from its source to a K-major buffer. Each thread
    /// holds four consecutive elements along K, and also along N if the source is not K-major.
    fn b_register_layout(&self, b: Value, is_k_major: bool) -> LinearLayout {
        let shape = extents(self.old.ty(b).shape());
        let num_warps = self.assignments.num_warps;
        match is_k_major {
            true => LinearLayout::blocked_filling(&shape, &[4.min(shape[0]), 1], num_warps, &[0, 1]),
            false => LinearLayout::transposing(&shape, num_warps),
        }
    }

    /// Splits a loaded tile next to its load, if it is a loop-invariant first operand.
    pub(super) fn hoist_tf32_split(&mut self, v: Value) {
        let num_elements: usize = self.old.ty(v).shape().iter().product();
        let fits =
            2 * num_elements * size_of::<f32>() <= MAX_SPLIT_BYTES && self.hoisted_splits.len() < MAX_SPLIT_OPERANDS;
        if fits && self.assignments.is_loop_invariant_operand(v) {
            let tile = self.get_assigned(v);
            let (big, small) = self.split_tf32(tile);
            let parts = (self.alloc_k_major(big, 1), self.alloc_k_major(small, 1));
            self.hoisted_splits.insert(v, parts);
        }
    }

    /// Stores a tile to a shared buffer that `wgmma` can read, with dimension `k` as K.
    fn alloc_k_major(&mut self, tile: Value, k: usize) -> Value {
        let shape = self.new.ty(tile).shape().to_vec();
        let layout = self.intern(&k_major_layout(&shape, k));
        self.emit_one(Op::LocalAlloc, vec![tile], Type::Shared { shape, elem: DType::F32, layout })
    }

    /// Splits x into x rounded to tf32 and the remainder. Tensor cores truncate the remainder to tf32: at most its last
    /// bit is lost.
    fn split_tf32(&mut self, x: Value) -> (Value, Value) {
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
fn k_major_layout(shape: &[usize], k: usize) -> LinearLayout {
    shared_in_order(shape, &[k, 1 - k], DType::F32)
}
