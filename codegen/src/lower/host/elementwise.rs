//! Elementwise functions on register values, of one lane or a vector.
//!
//! Narrow floats are computed in f32 and rounded after each operation (see [`super::repr`]).

use super::math;
use super::repr::{from_bits, is_narrow, reg, reg_num, round, suffix, to_bits};
use super::writer::{Writer, double_constant, float_constant, intrinsic, splat, vector};
use crate::ir::{BinaryOp, CmpOp, DType, Elem, UnaryOp};

/// A number of type `d` in every lane.
pub fn number(d: DType, lanes: usize, value: f64) -> String {
    match reg_num(d) {
        "float" => splat("float", lanes, float_constant(value as f32)),
        "double" => splat("double", lanes, double_constant(value)),
        ty => splat(ty, lanes, value as i64),
    }
}

fn call_same(w: &mut Writer, base: &str, ty: &str, lanes: usize, args: &[&str]) -> String {
    let callee = intrinsic(base, suffix(ty), lanes);
    let vty = vector(ty, lanes);
    let args: Vec<(&str, &str)> = args.iter().map(|&a| (vty.as_str(), a)).collect();
    w.call(&vty, &callee, &args)
}

pub fn unary(w: &mut Writer, op: UnaryOp, d: DType, lanes: usize, x: &str) -> String {
    let ty = reg_num(d);
    let vty = vector(ty, lanes);
    if !d.is_float() {
        return match op {
            UnaryOp::Neg => w.inst(format!("sub {vty} {}, {x}", number(d, lanes, 0.0))),
            UnaryOp::Not if d == DType::Bool => w.inst(format!("xor {vty} {x}, {}", splat("i1", lanes, "true"))),
            UnaryOp::Not => w.inst(format!("xor {vty} {x}, {}", splat(ty, lanes, -1))),
            UnaryOp::Abs if d.is_signed_int() => {
                let callee = intrinsic("llvm.abs", suffix(ty), lanes);
                w.call(&vty, &callee, &[(&vty, x), ("i1", "false")])
            }
            UnaryOp::Abs | UnaryOp::Floor | UnaryOp::Ceil | UnaryOp::Trunc | UnaryOp::Rint => x.to_string(),
            UnaryOp::Exp
            | UnaryOp::Exp2
            | UnaryOp::Log
            | UnaryOp::Log2
            | UnaryOp::Sqrt
            | UnaryOp::Rsqrt
            | UnaryOp::Sin
            | UnaryOp::Cos
            | UnaryOp::Tanh
            | UnaryOp::Erf => panic!("internal compiler error: `{}` of {d}; please report this", op.name()),
        };
    }
    let result = match op {
        UnaryOp::Neg => w.inst(format!("fneg {vty} {x}")),
        UnaryOp::Not => panic!("internal compiler error: `not` of {d}; please report this"),
        UnaryOp::Abs => call_same(w, "llvm.fabs", ty, lanes, &[x]),
        UnaryOp::Sqrt => call_same(w, "llvm.sqrt", ty, lanes, &[x]),
        UnaryOp::Floor => call_same(w, "llvm.floor", ty, lanes, &[x]),
        UnaryOp::Ceil => call_same(w, "llvm.ceil", ty, lanes, &[x]),
        UnaryOp::Trunc => call_same(w, "llvm.trunc", ty, lanes, &[x]),
        UnaryOp::Rint => call_same(w, "llvm.rint", ty, lanes, &[x]),
        UnaryOp::Rsqrt => {
            let root = call_same(w, "llvm.sqrt", ty, lanes, &[x]);
            w.inst(format!("fdiv {vty} {}, {root}", number(d, lanes, 1.0)))
        }
        UnaryOp::Exp
        | UnaryOp::Exp2
        | UnaryOp::Log
        | UnaryOp::Log2
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Tanh
        | UnaryOp::Erf => math::call(w, op, ty, lanes, x),
    };
    round(w, d, lanes, &result)
}

pub fn binary(w: &mut Writer, op: BinaryOp, d: DType, lanes: usize, a: &str, b: &str) -> String {
    let ty = reg_num(d);
    let vty = vector(ty, lanes);
    if d.is_float() {
        let result = match op {
            BinaryOp::Add => w.inst(format!("fadd {vty} {a}, {b}")),
            BinaryOp::Sub => w.inst(format!("fsub {vty} {a}, {b}")),
            BinaryOp::Mul | BinaryOp::Rescale => w.inst(format!("fmul {vty} {a}, {b}")),
            BinaryOp::Div => w.inst(format!("fdiv {vty} {a}, {b}")),
            BinaryOp::Rem => w.inst(format!("frem {vty} {a}, {b}")),
            // Rounding to e5m2 saturates infinity to the largest number. Other types need no rounding here.
            BinaryOp::Min | BinaryOp::Max if d == DType::F8E5M2 => extremum(w, op, ty, lanes, a, b),
            BinaryOp::Min | BinaryOp::Max => return extremum(w, op, ty, lanes, a, b),
            BinaryOp::CeilDiv
            | BinaryOp::And
            | BinaryOp::Or
            | BinaryOp::Xor
            | BinaryOp::Shl
            | BinaryOp::Shr
            | BinaryOp::MulHi => {
                panic!("internal compiler error: `{}` of {d}; please report this", op.name())
            }
        };
        return round(w, d, lanes, &result);
    }
    let signed = d.is_signed_int();
    match op {
        // One-bit arithmetic: `add` of bools is their exclusive or, `mul` their conjunction.
        BinaryOp::Add => w.inst(format!("add {vty} {a}, {b}")),
        BinaryOp::Sub => w.inst(format!("sub {vty} {a}, {b}")),
        BinaryOp::Mul => w.inst(format!("mul {vty} {a}, {b}")),
        BinaryOp::And => w.inst(format!("and {vty} {a}, {b}")),
        BinaryOp::Or => w.inst(format!("or {vty} {a}, {b}")),
        BinaryOp::Xor => w.inst(format!("xor {vty} {a}, {b}")),
        BinaryOp::Min => call_same(w, if signed { "llvm.smin" } else { "llvm.umin" }, ty, lanes, &[a, b]),
        BinaryOp::Max => call_same(w, if signed { "llvm.smax" } else { "llvm.umax" }, ty, lanes, &[a, b]),
        BinaryOp::Div | BinaryOp::Rem => integer_division(w, op == BinaryOp::Rem, d, lanes, a, b),
        BinaryOp::CeilDiv => ceil_div(w, d, lanes, a, b),
        BinaryOp::Rescale => panic!("internal compiler error: `rescale` of {d}; please report this"),
        BinaryOp::Shl | BinaryOp::Shr => shift(w, op == BinaryOp::Shl, d, lanes, a, b),
        BinaryOp::MulHi => {
            let wide = vector(&format!("i{}", 2 * d.bits()), lanes);
            let extend = if signed { "sext" } else { "zext" };
            let (wa, wb) =
                (w.inst(format!("{extend} {vty} {a} to {wide}")), w.inst(format!("{extend} {vty} {b} to {wide}")));
            let product = w.inst(format!("mul {wide} {wa}, {wb}"));
            let count = splat(&format!("i{}", 2 * d.bits()), lanes, d.bits());
            let high = w.inst(format!("lshr {wide} {product}, {count}"));
            w.inst(format!("trunc {wide} {high} to {vty}"))
        }
    }
}

/// Minimum or maximum of floats: of a number and a NaN, the number; −0 is below +0. Implemented explicitly, because
/// `llvm.minimumnum` and `llvm.maximumnum` of LLVM 22 return the NaN on x86 if the other operand is known to be a
/// number.
fn extremum(w: &mut Writer, op: BinaryOp, ty: &str, lanes: usize, a: &str, b: &str) -> String {
    let (vty, cond) = (vector(ty, lanes), vector("i1", lanes));
    let bits = vector(if ty == "double" { "i64" } else { "i32" }, lanes);
    // For equal numbers, OR of the signs yields −0, and AND yields +0.
    let (before, merge) = if op == BinaryOp::Min { ("olt", "or") } else { ("ogt", "and") };
    let first = w.inst(format!("fcmp {before} {vty} {a}, {b}"));
    let ordered = w.inst(format!("select {cond} {first}, {vty} {a}, {vty} {b}"));
    let not_b = w.inst(format!("fcmp uno {vty} {b}, {b}"));
    let number = w.inst(format!("select {cond} {not_b}, {vty} {a}, {vty} {ordered}"));
    let equal = w.inst(format!("fcmp oeq {vty} {a}, {b}"));
    let (x, y) = (w.inst(format!("bitcast {vty} {a} to {bits}")), w.inst(format!("bitcast {vty} {b} to {bits}")));
    let merged = w.inst(format!("{merge} {bits} {x}, {y}"));
    let merged = w.inst(format!("bitcast {bits} {merged} to {vty}"));
    w.inst(format!("select {cond} {equal}, {vty} {merged}, {vty} {number}"))
}

/// Integer division: division by zero yields quotient and remainder 0, and the one quotient that overflows wraps. The
/// CPU instruction would trap in both cases.
fn integer_division(w: &mut Writer, remainder: bool, d: DType, lanes: usize, a: &str, b: &str) -> String {
    let ty = reg_num(d);
    let (vty, cond) = (vector(ty, lanes), vector("i1", lanes));
    let (zero, one) = (splat(ty, lanes, 0), splat(ty, lanes, 1));
    let by_zero = w.inst(format!("icmp eq {vty} {b}, {zero}"));
    let mut divisor = w.inst(format!("select {cond} {by_zero}, {vty} {one}, {vty} {b}"));
    let mut minus = None;
    if d.is_signed_int() {
        let by_minus_one = w.inst(format!("icmp eq {vty} {b}, {}", splat(ty, lanes, -1)));
        divisor = w.inst(format!("select {cond} {by_minus_one}, {vty} {one}, {vty} {divisor}"));
        minus = Some(by_minus_one);
    }
    let op = match (d.is_signed_int(), remainder) {
        (true, false) => "sdiv",
        (true, true) => "srem",
        (false, false) => "udiv",
        (false, true) => "urem",
    };
    let mut result = w.inst(format!("{op} {vty} {a}, {divisor}"));
    if let (Some(minus), false) = (minus, remainder) {
        let negated = w.inst(format!("sub {vty} {zero}, {a}"));
        result = w.inst(format!("select {cond} {minus}, {vty} {negated}, {vty} {result}"));
    }
    w.inst(format!("select {cond} {by_zero}, {vty} {zero}, {vty} {result}"))
}

/// The quotient rounded up: adds 1 to the truncated quotient where the remainder is not 0 and has the divisor's sign.
fn ceil_div(w: &mut Writer, d: DType, lanes: usize, a: &str, b: &str) -> String {
    let ty = reg_num(d);
    let (vty, cond, zero) = (vector(ty, lanes), vector("i1", lanes), splat(ty, lanes, 0));
    let quotient = integer_division(w, false, d, lanes, a, b);
    let rest = integer_division(w, true, d, lanes, a, b);
    let mut rounded_down = w.inst(format!("icmp ne {vty} {rest}, {zero}"));
    if d.is_signed_int() {
        let signs = w.inst(format!("xor {vty} {rest}, {b}"));
        let same_sign = w.inst(format!("icmp sge {vty} {signs}, {zero}"));
        rounded_down = w.inst(format!("and {cond} {rounded_down}, {same_sign}"));
    }
    let one_more = w.inst(format!("zext {cond} {rounded_down} to {vty}"));
    w.inst(format!("add {vty} {quotient}, {one_more}"))
}

/// Emits a shift. A shift by the bit width or more yields the result of shifting bit by bit: 0, or the sign in every
/// bit.
fn shift(w: &mut Writer, left: bool, d: DType, lanes: usize, a: &str, b: &str) -> String {
    let ty = reg_num(d);
    let vty = vector(ty, lanes);
    let most = splat(ty, lanes, d.bits() - 1);
    if !left && d.is_signed_int() {
        let count = call_same(w, "llvm.umin", ty, lanes, &[b, &most]);
        return w.inst(format!("ashr {vty} {a}, {count}"));
    }
    let op = if left { "shl" } else { "lshr" };
    let in_range = w.inst(format!("icmp ule {vty} {b}, {most}"));
    let count = call_same(w, "llvm.umin", ty, lanes, &[b, &most]);
    let shifted = w.inst(format!("{op} {vty} {a}, {count}"));
    w.inst(format!("select {} {in_range}, {vty} {shifted}, {vty} {}", vector("i1", lanes), splat(ty, lanes, 0)))
}

pub fn compare(w: &mut Writer, op: CmpOp, elem: Elem, lanes: usize, a: &str, b: &str) -> String {
    let ty = vector(reg(elem), lanes);
    let d = elem.num();
    if d.is_some_and(DType::is_float) {
        let predicate = match op {
            CmpOp::Eq => "oeq",
            CmpOp::Ne => "une",
            CmpOp::Lt => "olt",
            CmpOp::Le => "ole",
            CmpOp::Gt => "ogt",
            CmpOp::Ge => "oge",
        };
        return w.inst(format!("fcmp {predicate} {ty} {a}, {b}"));
    }
    let signed = d.is_some_and(DType::is_signed_int);
    let predicate = match (op, signed) {
        (CmpOp::Eq, _) => "eq",
        (CmpOp::Ne, _) => "ne",
        (CmpOp::Lt, true) => "slt",
        (CmpOp::Le, true) => "sle",
        (CmpOp::Gt, true) => "sgt",
        (CmpOp::Ge, true) => "sge",
        (CmpOp::Lt, false) => "ult",
        (CmpOp::Le, false) => "ule",
        (CmpOp::Gt, false) => "ugt",
        (CmpOp::Ge, false) => "uge",
    };
    w.inst(format!("icmp {predicate} {ty} {a}, {b}"))
}

/// a·b + c. Floats are rounded once; narrow floats are rounded to f32, then to their type.
pub fn fma(w: &mut Writer, d: DType, lanes: usize, a: &str, b: &str, c: &str) -> String {
    if d.is_float() {
        let result = call_same(w, "llvm.fma", reg_num(d), lanes, &[a, b, c]);
        return round(w, d, lanes, &result);
    }
    let product = binary(w, BinaryOp::Mul, d, lanes, a, b);
    binary(w, BinaryOp::Add, d, lanes, &product, c)
}

/// Emits a numeric conversion.
pub fn cast(w: &mut Writer, from: DType, to: DType, lanes: usize, x: &str) -> String {
    let (source, target) = (vector(reg_num(from), lanes), vector(reg_num(to), lanes));
    if from == to {
        return x.to_string();
    }
    if to == DType::Bool {
        let zero = number(from, lanes, 0.0);
        let op = if from.is_float() { "fcmp une" } else { "icmp ne" };
        return w.inst(format!("{op} {source} {x}, {zero}"));
    }
    match (from.is_float(), to.is_float()) {
        (true, true) => cast_float(w, from, to, lanes, x),
        (true, false) => {
            let base = if to.is_signed_int() { "llvm.fptosi.sat" } else { "llvm.fptoui.sat" };
            let callee = format!(
                "{}.{}",
                intrinsic(base, suffix(reg_num(to)), lanes),
                if lanes == 1 {
                    suffix(reg_num(from)).to_string()
                } else {
                    format!("v{lanes}{}", suffix(reg_num(from)))
                }
            );
            w.call(&target, &callee, &[(&source, x)])
        }
        (false, true) => {
            let op = if from.is_signed_int() { "sitofp" } else { "uitofp" };
            if is_narrow(to) {
                // Through f64, so that f32 does not round first.
                let wide = w.inst(format!("{op} {source} {x} to {}", vector("double", lanes)));
                return cast_float(w, DType::F64, to, lanes, &wide);
            }
            w.inst(format!("{op} {source} {x} to {target}"))
        }
        (false, false) if to.bits() > from.bits() || from == DType::Bool => {
            let op = if from.is_signed_int() { "sext" } else { "zext" };
            match (lanes, x.parse::<i64>()) {
                (1, Ok(n)) => n.to_string(),
                _ => w.inst(format!("{op} {source} {x} to {target}")),
            }
        }
        (false, false) if to.bits() < from.bits() => w.inst(format!("trunc {source} {x} to {target}")),
        (false, false) => x.to_string(),
    }
}

fn cast_float(w: &mut Writer, from: DType, to: DType, lanes: usize, x: &str) -> String {
    let (float, double) = (vector("float", lanes), vector("double", lanes));
    match (from, to) {
        (_, DType::F64) => w.inst(format!("fpext {float} {x} to {double}")),
        (DType::F64, DType::F32) => w.inst(format!("fptrunc {double} {x} to {float}")),
        (DType::F64, _) => {
            let odd = truncate_to_odd(w, lanes, x);
            round(w, to, lanes, &odd)
        }
        _ => round(w, to, lanes, x),
    }
}

/// f64 → f32 with rounding to odd: rounding the result to a narrower type then equals rounding the f64 directly (Boldo
/// and Melquiond, "When double rounding is odd", 2005).
pub fn truncate_to_odd(w: &mut Writer, lanes: usize, x: &str) -> String {
    let (float, double, int, cond) =
        (vector("float", lanes), vector("double", lanes), vector("i32", lanes), vector("i1", lanes));
    let near = w.inst(format!("fptrunc {double} {x} to {float}"));
    let back = w.inst(format!("fpext {float} {near} to {double}"));
    let inexact = w.inst(format!("fcmp one {double} {back}, {x}"));
    let bits = w.inst(format!("bitcast {float} {near} to {int}"));
    // Undoes rounding away from zero, then sets the last bit.
    let (abs_back, abs_x) =
        (call_same(w, "llvm.fabs", "double", lanes, &[&back]), call_same(w, "llvm.fabs", "double", lanes, &[x]));
    let away = w.inst(format!("fcmp ogt {double} {abs_back}, {abs_x}"));
    let one = w.inst(format!("zext {cond} {away} to {int}"));
    let toward = w.inst(format!("sub {int} {bits}, {one}"));
    let last = w.inst(format!("zext {cond} {inexact} to {int}"));
    let odd = w.inst(format!("or {int} {toward}, {last}"));
    w.inst(format!("bitcast {int} {odd} to {float}"))
}

/// Reinterprets the bits as another element type of the same width.
pub fn bitcast(w: &mut Writer, from: Elem, to: Elem, lanes: usize, x: &str) -> String {
    let bits = match from {
        Elem::Num(d) => to_bits(w, d, lanes, x),
        Elem::Ptr(_) if to.num().is_none() => return x.to_string(),
        Elem::Ptr(_) => w.inst(format!("ptrtoint {} {x} to {}", vector("ptr", lanes), vector("i64", lanes))),
    };
    match to {
        Elem::Num(d) => from_bits(w, d, lanes, &bits),
        Elem::Ptr(_) => w.inst(format!("inttoptr {} {bits} to {}", vector("i64", lanes), vector("ptr", lanes))),
    }
}

/// `condition ? a : b`.
pub fn select(w: &mut Writer, elem: Elem, lanes: usize, condition: &str, a: &str, b: &str) -> String {
    let ty = vector(reg(elem), lanes);
    w.inst(format!("select {} {condition}, {ty} {a}, {ty} {b}", vector("i1", lanes)))
}

/// Broadcasts a scalar to all lanes.
pub fn widen_lane(w: &mut Writer, ty: &str, lanes: usize, x: &str) -> String {
    if lanes == 1 {
        return x.to_string();
    }
    if !x.starts_with('%') {
        return splat(ty, lanes, x);
    }
    let vty = vector(ty, lanes);
    let first = w.inst(format!("insertelement {vty} poison, {ty} {x}, i64 0"));
    w.inst(format!("shufflevector {vty} {first}, {vty} poison, <{lanes} x i32> zeroinitializer"))
}
