//! Elementary functions of one element on the GPU.
//!
//! Uses the hardware approximations that are accurate to a few units in the last place (PTX ISA, "Floating Point
//! Instructions"), and the polynomials of the host lowering for the other functions.

use super::emit::{Emitter, Val};
use crate::ir::UnaryOp;

/// log2(e) as f32, and its remainder.
const LOG2_E: (f32, f32) = (std::f32::consts::LOG2_E, 1.925_963_e-8);

fn f32_literal(x: f32) -> String {
    format!("0x{:016X}", f64::from(x).to_bits())
}

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
        UnaryOp::Exp => {
            in_f32();
            // 2^(x·log2 e), with the product in two parts: the rounding error of a single product would grow with x.
            let high = e.inst(format!("fmul float {x}, {}", f32_literal(LOG2_E.0)));
            let power = approx(e, "ex2.approx.ftz.f32", &high);
            let minus = e.inst(format!("fneg float {high}"));
            let fma = |e: &mut Emitter, a: &str, b: &str, c: &str| {
                e.call("float", "llvm.fma.f32", &[("float", a), ("float", b), ("float", c)])
            };
            let low = fma(e, x, &f32_literal(LOG2_E.0), &minus);
            let low = fma(e, x, &f32_literal(LOG2_E.1), &low);
            let low = e.inst(format!("fmul float {low}, {}", f32_literal(std::f32::consts::LN_2)));
            let exact = fma(e, &power, &low, &power);
            // ∞ and 0 are exact already, and the correction would turn them into NaN.
            let finite = e.inst(format!("fcmp one float {high}, {}", f32_literal(f32::INFINITY)));
            let finite_low = e.inst(format!("fcmp ogt float {high}, {}", f32_literal(-150.0)));
            let below = e.inst(format!("fcmp olt float {high}, {}", f32_literal(128.0)));
            let both = e.inst(format!("and i1 {finite}, {finite_low}"));
            let all = e.inst(format!("and i1 {both}, {below}"));
            e.inst(format!("select i1 {all}, float {exact}, float {power}"))
        }
        UnaryOp::Not => panic!("internal compiler error: `not` of a float"),
        UnaryOp::Log | UnaryOp::Log2 | UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Tanh | UnaryOp::Erf => {
            in_f32();
            e.shared_math(op);
            e.inst(format!("call float @math.{}.1(float {x})", op.name()))
        }
    }
}

fn approx(e: &mut Emitter, instruction: &str, x: &str) -> Val {
    e.inst(format!("call float asm \"{instruction} $0, $1;\", \"=f,f\"(float {x}) #2"))
}
