//! Dots of f32 by `wgmma` in tf32x3 (3xTF32): three `wgmma` ops that multiply tf32, the leading 11 significant bits of
//! each number.
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

use super::rewrite::Rewrite;
use crate::analysis::access_layout::extents;
use crate::ir::{BinaryOp, DType, Literal, Op, Value};
use crate::mma::{self, DotShape};
use crate::num::{TF32_HALF, TF32_KEPT};

/// Maximum shared memory of one split operand, in bytes.
const MAX_SPLIT_BYTES: usize = 64 << 10;
/// Maximum number of split operands that stay in shared memory: two leave space for pipelined loads.
const MAX_SPLIT_OPERANDS: usize = 2;

impl Rewrite<'_, '_> {
    /// acc + a·b in the layout of `acc`. `acc` is a value of the new function, `operands` are values of the old one.
    pub(super) fn tf32x3_dot(&mut self, dot: DotShape, plan: &mma::Plan, operands: [Value; 2], acc: Value) -> Value {
        let [a, b] = operands;
        let acc_ty = self.new.ty(acc).clone();
        // b first: its registers are free again once b is in shared memory.
        let is_k_major = self.k_major_buffer(b, DType::F32, 0).is_some();
        let b_layout = self.b_register_layout(b, is_k_major);
        let b = self.load_to_registers(b, &b_layout, DType::F32);
        let (b_big, b_small) = self.split_tf32(b);
        let (b_big, b_small) = (self.alloc_k_major(b_big, 0), self.alloc_k_major(b_small, 0));
        let (a_big, a_small) = match self.hoisted_splits.get(&a) {
            Some(&parts) => parts,
            None => {
                let layout = plan.a_layout(&extents(&[dot.m, dot.k]));
                let a = self.load_to_registers(a, &layout, DType::F32);
                self.split_tf32(a)
            }
        };
        let ends = self.nonzero_ends(operands);
        let zero = self.emit_one(Op::Constant { value: Literal::Float(0.0) }, vec![], acc_ty.clone());
        let pairs = [[a_small, b_big], [a_big, b_small], [a_big, b_big]];
        let sum = pairs.into_iter().fold(zero, |sum, pair| self.issue_wgmma(plan, ends, pair, sum));
        let sum = self.emit_one(Op::WgmmaWait { pending: 0 }, vec![sum], acc_ty.clone());
        self.emit_one(Op::Binary(BinaryOp::Add), vec![acc, sum], acc_ty)
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
