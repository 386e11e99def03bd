//! Remainders of floats. PTX has no instruction for them, and LLVM's form, x − trunc(x / y) · y, is wrong for large quotients.

use super::emit::{Emitter, Val};

/// The remainder of x / y with the sign of x, as C's `fmod` gives it, of two numbers of LLVM type `ty`.
pub fn remainder(e: &mut Emitter, ty: &str, x: &str, y: &str) -> Val {
    if ty == "double" {
        return of_f64(e, x, y);
    }
    let wide = [x, y].map(|v| e.inst(format!("fpext {ty} {v} to double")));
    // Exact: it is a multiple of the last place of x or y, and not larger than either.
    let result = of_f64(e, &wide[0], &wide[1]);
    e.inst(format!("fptrunc double {result} to {ty}"))
}

/// Each step subtracts the largest multiple of y · 2ᵏ, for the least k ≥ 0 for which the quotient has fewer than 53 bits, until
/// less than y is left: 41 steps at most, and one if the quotient is below 2⁵². All steps are exact: a remainder is a
/// multiple of the last place of y or of x, and is less than y · 2ᵏ.
fn of_f64(e: &mut Emitter, x: &str, y: &str) -> Val {
    let abs = |e: &mut Emitter, v: &str| e.call("double", "llvm.fabs.f64", &[("double", v)]);
    let exponent = |e: &mut Emitter, v: &str| {
        let bits = e.inst(format!("bitcast double {v} to i64"));
        e.inst(format!("lshr i64 {bits}, 52"))
    };
    let (ax, ay) = (abs(e, x), abs(e, y));
    // Infinite x, y = 0, and NaN give NaN.
    let finite = e.inst(format!("fcmp olt double {ax}, 0x7FF0000000000000"));
    let nonzero = e.inst(format!("fcmp ogt double {ay}, 0.0"));
    let valid = e.inst(format!("and i1 {finite}, {nonzero}"));
    let first = e.inst(format!("select i1 {valid}, double {ax}, double 0x7FF8000000000000"));
    // The biased exponent of y, also below that of the normal numbers: of y · 2⁵⁴, less 54.
    let field = exponent(e, &ay);
    let scaled = e.inst(format!("fmul double {ay}, 0x4350000000000000"));
    let below = exponent(e, &scaled);
    let below = e.inst(format!("sub i64 {below}, 54"));
    let normal = e.inst(format!("icmp ne i64 {field}, 0"));
    let of_y = e.inst(format!("select i1 {normal}, i64 {field}, i64 {below}"));

    let (head, body, done) = (e.new_label("remainder"), e.new_label("subtract"), e.new_label("remains"));
    let from = e.label();
    e.branch(&head);
    e.start_block(&head);
    let (rest, phi) = e.open_phi("double", &first, &from);
    let more = e.inst(format!("fcmp oge double {rest}, {ay}"));
    e.branch_if(&more, &body, &done);
    e.start_block(&body);
    let of_rest = exponent(e, &rest);
    let difference = e.inst(format!("sub i64 {of_rest}, {of_y}"));
    let k = e.inst(format!("sub i64 {difference}, 51"));
    let k = e.call("i64", "llvm.smax.i64", &[("i64", &k), ("i64", "0")]);
    // 2ᵏ in two factors, as k may exceed the exponents of f64.
    let half = e.inst(format!("lshr i64 {k}, 1"));
    let other = e.inst(format!("sub i64 {k}, {half}"));
    let power = |e: &mut Emitter, k: &str| {
        let biased = e.inst(format!("add i64 {k}, 1023"));
        let bits = e.inst(format!("shl i64 {biased}, 52"));
        e.inst(format!("bitcast i64 {bits} to double"))
    };
    let (a, b) = (power(e, &half), power(e, &other));
    let multiple = e.inst(format!("fmul double {ay}, {a}"));
    let multiple = e.inst(format!("fmul double {multiple}, {b}"));
    let quotient = e.inst(format!("fdiv double {rest}, {multiple}"));
    let quotient = e.call("double", "llvm.trunc.f64", &[("double", &quotient)]);
    let negative = e.inst(format!("fneg double {quotient}"));
    let next = e.call("double", "llvm.fma.f64", &[("double", &negative), ("double", &multiple), ("double", &rest)]);
    // The quotient was rounded up.
    let too_much = e.inst(format!("fcmp olt double {next}, 0.0"));
    let added = e.inst(format!("fadd double {next}, {multiple}"));
    let next = e.inst(format!("select i1 {too_much}, double {added}, double {next}"));
    let end = e.label();
    e.branch(&head);
    e.close_phi(phi, &next, &end);
    e.start_block(&done);
    e.call("double", "llvm.copysign.f64", &[("double", &rest), ("double", x)])
}
