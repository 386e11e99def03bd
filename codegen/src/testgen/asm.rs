//! Rewrites some ops of a program as inline assembly, for GPU targets only. The semantics of the program do not change.

use super::Rng;
use crate::ir::BinaryOp::{Add, And, Max, Mul, Or, Sub, Xor};
use crate::ir::DType::{F32, F64, I8, I16, I32, I64, U8, U16, U32, U64};
use crate::ir::Op::{Binary, Fma};
use crate::ir::{DType, Func, Op, OpId, parts};
use std::collections::HashSet;

/// An op that can be rewritten, and its replacement.
struct AsmPattern {
    op: Op,
    /// Types of the op's operands and result.
    dtypes: &'static [DType],
    asm: &'static str,
    /// LLVM's constraints.
    constraints: &'static str,
    /// Elements per execution.
    pack: usize,
}

const PATTERNS: &[AsmPattern] = &[
    AsmPattern { op: Binary(Add), dtypes: &[I32, U32], asm: "add.u32 $0, $1, $2;", constraints: "=r,r,r", pack: 1 },
    AsmPattern { op: Binary(Sub), dtypes: &[I64, U64], asm: "sub.s64 $0, $1, $2;", constraints: "=l,l,l", pack: 1 },
    AsmPattern { op: Binary(Mul), dtypes: &[I32, U32], asm: "mul.lo.s32 $0, $1, $2;", constraints: "=r,r,r", pack: 1 },
    AsmPattern { op: Binary(Max), dtypes: &[I32], asm: "max.s32 $0, $1, $2;", constraints: "=r,r,r", pack: 1 },
    // Not `lop3.b32`: ptxas 12.8 and 13.0 crash with a segmentation fault if its result, compared with 0, guards a
    // load.
    AsmPattern { op: Binary(Xor), dtypes: &[I32, U32], asm: "xor.b32 $0, $1, $2;", constraints: "=r,r,r", pack: 1 },
    AsmPattern { op: Binary(And), dtypes: &[I16, U16], asm: "and.b32 $0, $1, $2;", constraints: "=r,r,r", pack: 2 },
    AsmPattern { op: Binary(Or), dtypes: &[I8, U8], asm: "or.b32 $0, $1, $2;", constraints: "=r,r,r", pack: 4 },
    AsmPattern { op: Binary(Mul), dtypes: &[F32], asm: "mul.rn.f32 $0, $1, $2;", constraints: "=f,f,f", pack: 1 },
    AsmPattern { op: Binary(Add), dtypes: &[F64], asm: "add.rn.f64 $0, $1, $2;", constraints: "=d,d,d", pack: 1 },
    AsmPattern { op: Fma, dtypes: &[F32], asm: "fma.rn.f32 $0, $1, $2, $3;", constraints: "=f,f,f,f", pack: 1 },
    AsmPattern { op: Fma, dtypes: &[F64], asm: "fma.rn.f64 $0, $1, $2, $3;", constraints: "=d,d,d,d", pack: 1 },
];

/// Rewrites about half of the ops that match a pattern.
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
        let pattern = PATTERNS.iter().find(|p| p.op == data.op && dtype.is_some_and(|d| p.dtypes.contains(&d)));
        let Some(&AsmPattern { asm, constraints, pack, .. }) = pattern else { continue };
        // If a thread holds fewer elements than the assembly packs, compilation is refused; this should be rare.
        let rare = if pack == 1 { 2 } else { 12 };
        let whole = pack == 1 || data.results.iter().all(|&v| parts::count(func.ty(v).shape()) == 1);
        if !combined.contains(&id) && rng.one_in(rare) && whole {
            *func.op_mut(id) = Op::InlineAsm { asm: asm.into(), constraints: constraints.into(), pack, pure: true };
        }
    }
}
