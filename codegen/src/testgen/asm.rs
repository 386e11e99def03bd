//! Rewrites some ops of a program as inline assembly, for GPU targets only. The semantics of the program do not change.

use super::Rng;
use crate::ir::{BinaryOp, DType, Func, Op, OpId};
use std::collections::HashSet;

/// An op that can be rewritten: the op, the types of its operands and result, the assembly text, LLVM's constraints,
/// and the elements per execution.
type Row = (Op, &'static [DType], &'static str, &'static str, usize);

const ROWS: &[Row] = &[
    (Op::Binary(BinaryOp::Add), &[DType::I32, DType::U32], "add.u32 $0, $1, $2;", "=r,r,r", 1),
    (Op::Binary(BinaryOp::Sub), &[DType::I64, DType::U64], "sub.s64 $0, $1, $2;", "=l,l,l", 1),
    (Op::Binary(BinaryOp::Mul), &[DType::I32, DType::U32], "mul.lo.s32 $0, $1, $2;", "=r,r,r", 1),
    (Op::Binary(BinaryOp::Max), &[DType::I32], "max.s32 $0, $1, $2;", "=r,r,r", 1),
    // Not `lop3.b32`: ptxas 12.8 and 13.0 crash with a segmentation fault if its result, compared with 0, guards a
    // load.
    (Op::Binary(BinaryOp::Xor), &[DType::I32, DType::U32], "xor.b32 $0, $1, $2;", "=r,r,r", 1),
    (Op::Binary(BinaryOp::And), &[DType::I16, DType::U16], "and.b32 $0, $1, $2;", "=r,r,r", 2),
    (Op::Binary(BinaryOp::Or), &[DType::I8, DType::U8], "or.b32 $0, $1, $2;", "=r,r,r", 4),
    (Op::Binary(BinaryOp::Mul), &[DType::F32], "mul.rn.f32 $0, $1, $2;", "=f,f,f", 1),
    (Op::Binary(BinaryOp::Add), &[DType::F64], "add.rn.f64 $0, $1, $2;", "=d,d,d", 1),
    (Op::Fma, &[DType::F32], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", 1),
    (Op::Fma, &[DType::F64], "fma.rn.f64 $0, $1, $2, $3;", "=d,d,d,d", 1),
];

/// Rewrites about half of the ops that match a row.
pub(super) fn write(func: &mut Func, rng: &mut Rng) {
    // The combine regions of reductions and scans stay: they are executed in other orders, and not on tiles.
    let mut combined: HashSet<OpId> = HashSet::new();
    for id in func.walk() {
        let data = func.op(id);
        if matches!(data.op, Op::Reduce { .. } | Op::Scan { .. }) {
            combined.extend(func.walk_from(data.regions[0]));
        }
    }
    for id in func.walk() {
        let data = func.op(id);
        let dtype = data.results.first().and_then(|&v| func.ty(v).dtype());
        let row = ROWS.iter().find(|row| row.0 == data.op && dtype.is_some_and(|d| row.1.contains(&d)));
        let Some(&(_, _, asm, constraints, pack)) = row else { continue };
        // If a thread holds fewer elements than the assembly packs, compilation is refused; this should be rare.
        let rare = if pack == 1 { 2 } else { 12 };
        if !combined.contains(&id) && rng.one_in(rare) {
            func.op_mut(id).op = Op::InlineAsm { asm: asm.into(), constraints: constraints.into(), pack, pure: true };
        }
    }
}
