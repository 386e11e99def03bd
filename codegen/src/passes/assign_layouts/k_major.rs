//! Dots by a `wgmma` that reads its operands from shared memory only where K is the fastest dimension: of f32 (in tf32)
//! and of 8-bit types.
//!
//! A loaded operand that is K-major in memory stays in the buffer that its load fills. Another one passes through
//! registers, which transpose it.

use super::rewrite::Rewrite;
use crate::analysis::access_layout::extents;
use crate::ir::{BinaryOp, DType, Literal, Op, Precision, Type, Value};
use crate::layout::LinearLayout;
use crate::mma::{self, DotShape};

impl Rewrite<'_, '_> {
    /// acc + a·b in the layout of `acc`. `acc` is a value of the new function, `operands` are values of the old one.
    pub(super) fn k_major_dot(&mut self, dot: DotShape, plan: &mma::Plan, operands: [Value; 2], acc: Value) -> Value {
        let [a_dtype, b_dtype] = plan.instruction.operands;
        if a_dtype == DType::F32 && dot.precision == Precision::Tf32x3 {
            return self.tf32x3_dot(dot, plan, operands, acc);
        }
        let [a, b] = operands;
        let ends = self.nonzero_ends(operands);
        let a = match self.k_major_buffer(a, a_dtype, 1) {
            Some(buffer) => buffer,
            None => self.load_to_registers(a, &plan.a_layout(&extents(&[dot.m, dot.k])), a_dtype),
        };
        let b = match self.k_major_buffer(b, b_dtype, 0) {
            Some(buffer) => buffer,
            None => {
                let layout = self.b_register_layout(b, false);
                let tile = self.load_to_registers(b, &layout, b_dtype);
                self.alloc_k_major(tile, 0)
            }
        };
        let acc_ty = self.new.ty(acc).clone();
        let start = match dot.max_imprecise {
            // The sum of this dot is added in f32.
            Some(_) => self.emit_one(Op::Constant { value: Literal::Float(0.0) }, vec![], acc_ty.clone()),
            None => acc,
        };
        let started = self.issue_wgmma(plan, ends, [a, b], start);
        let sum = self.emit_one(Op::WgmmaWait { pending: 0 }, vec![started], acc_ty.clone());
        match dot.max_imprecise {
            Some(_) => self.emit_one(Op::Binary(BinaryOp::Add), vec![acc, sum], acc_ty),
            None => sum,
        }
    }

    pub(super) fn issue_wgmma(
        &mut self,
        plan: &mma::Plan,
        [k_end, n_end]: [Option<u32>; 2],
        [a, b]: [Value; 2],
        acc: Value,
    ) -> Value {
        let op = Op::Wgmma { warps: plan.warps.to_vec(), k_end, n_end };
        let ty = self.new.ty(acc).clone();
        self.emit_one(op, vec![a, b, acc], ty)
    }

    /// The shared buffer of a loaded tile, if it is K-major: if dimension `k`, the K of the dot, is the fastest.
    pub(super) fn k_major_buffer(&mut self, v: Value, dtype: DType, k: usize) -> Option<Value> {
        if !self.is_loaded(v) {
            return None;
        }
        let buffer = self.in_shared(v, dtype);
        let Type::Shared { shape, layout, .. } = self.new.ty(buffer) else { return None };
        let wanted = LinearLayout::shared_for_dots(&extents(shape), &[k, 1 - k], dtype.bytes() as u32);
        (*self.new.layout(*layout) == wanted).then_some(buffer)
    }

    /// A tile in registers: loaded from shared memory where a load put it there for dots.
    pub(super) fn load_to_registers(&mut self, v: Value, layout: &LinearLayout, dtype: DType) -> Value {
        if !self.is_loaded(v) {
            return self.in_registers(v, layout, dtype);
        }
        let buffer = self.in_shared(v, dtype);
        let id = self.intern(layout);
        let ty = self.old.ty(v).with_elem(dtype).with_layout(Some(id));
        self.emit_one(Op::LocalLoad, vec![buffer], ty)
    }

    /// The register layout in which the second operand [k, n] moves from its source to a K-major buffer. Each thread
    /// holds four consecutive elements along K, and also along N if the source is not K-major.
    pub(super) fn b_register_layout(&self, b: Value, is_k_major: bool) -> LinearLayout {
        let shape = extents(self.old.ty(b).shape());
        let num_warps = self.assignments.num_warps;
        match is_k_major {
            true => LinearLayout::blocked_filling(&shape, &[4.min(shape[0]), 1], num_warps, &[0, 1]),
            false => LinearLayout::transposing(&shape, num_warps),
        }
    }

    /// Stores a tile to a shared buffer that `wgmma` can read, with dimension `k` as K, the fastest.
    pub(super) fn alloc_k_major(&mut self, tile: Value, k: usize) -> Value {
        let ty = self.new.ty(tile);
        let (shape, elem) = (ty.shape().to_vec(), ty.dtype().expect("internal compiler error: a dot of pointers"));
        let layout = self.intern(&LinearLayout::shared_for_dots(&extents(&shape), &[k, 1 - k], elem.bytes() as u32));
        self.emit_one(Op::LocalAlloc, vec![tile], Type::Shared { shape, elem, layout })
    }
}
