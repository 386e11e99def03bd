//! Elementary functions of one element on the GPU.
//!
//! Uses the hardware approximations that are accurate to a few units in the last place (PTX ISA, "Floating Point
//! Instructions"), and the polynomials of the host lowering for the other functions.

use super::emit::{Emitter, Val};
use crate::ir::UnaryOp;

/// `op(x)` for x of LLVM type `float`, or `double` if the function has an instruction
/// ([`expand_f64`](crate::passes::expand_f64) replaces the others).
pub fn unary(e: &mut Emitter, op: UnaryOp, ty: &str, x: &str) -> Val {
    let bits = if ty == "double" { 64 } else { 32 };
    let in_f32 = || assert_eq!(ty, "float", "internal compiler error: `{}` of f64; please report this", op.name());
    let mut intrinsic = |name: &str| e.call(ty, &format!("llvm.{name}.f{bits}"), &[(ty, x)]);
    match op {
        UnaryOp::Neg => e.inst(format!("fneg {ty} {x}")),
        UnaryOp::Abs => intrinsic("fabs"),
        UnaryOp::Floor => intrinsic("floor"),
        UnaryOp::Ceil => intrinsic("ceil"),
        UnaryOp::Trunc => intrinsic("trunc"),
        UnaryOp::Rint => intrinsic("rint"),
        UnaryOp::Sqrt => intrinsic("sqrt"),
        UnaryOp::Rsqrt if ty == "double" => {
            let root = intrinsic("sqrt");
            e.inst(format!("fdiv double 1.0, {root}"))
        }
        UnaryOp::Rsqrt => approx(e, "rsqrt.approx.f32", x),
        UnaryOp::Exp2 => {
            in_f32();
            approx(e, "ex2.approx.ftz.f32", x)
        }
        UnaryOp::Not => panic!("internal compiler error: `not` of a float"),
        UnaryOp::Exp | UnaryOp::Log | UnaryOp::Log2 | UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Tanh | UnaryOp::Erf => {
            in_f32();
            e.shared_math(op);
            e.inst(format!("call float @math.{}.1(float {x})", op.name()))
        }
    }
}

fn approx(e: &mut Emitter, instruction: &str, x: &str) -> Val {
    e.inst(format!("call float asm \"{instruction} $0, $1;\", \"=f,f\"(float {x}) #2"))
}
