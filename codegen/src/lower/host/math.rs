//! Transcendental functions of f32 lanes as straight-line code, and of f64 lanes by libm.
//!
//! The polynomials are the single-precision ones of S. L. Moshier's Cephes library (`exp2f`, `expf`, `logf`, `log2f`,
//! `sinf`, `cosf`, `tanhf`) and N. Juffa's published minimax fit of `erff`. Each function is defined once per vector
//! width and inlined by LLVM. Maximum errors against f64, in units in the last place of the result (checked by
//! `tests/math.rs`):
//!
//! | exp, exp2, log | erf | log2, tanh | sin, cos |
//! |---|---|---|---|
//! | 1.1 | 1.2 | 1.6 | 1.7 |

use super::repr::suffix;
use super::writer::{Writer, float_constant, intrinsic, splat, vector};
use crate::ir::UnaryOp;

/// Emits a call of `op` on `lanes` lanes of `ty` (`float` or `double`).
pub fn call(w: &mut Writer, op: UnaryOp, ty: &str, lanes: usize, x: &str) -> String {
    if ty == "double" {
        return libm(w, op.name(), lanes, x);
    }
    let vty = vector("float", lanes);
    define(w, op, lanes, None, "alwaysinline #0");
    w.call(&vty, &name(op, lanes), &[(&vty, x)])
}

fn name(op: UnaryOp, lanes: usize) -> String {
    format!("@math.{}.{lanes}", op.name())
}

/// The largest magnitude for which sine and cosine use the two-constant range reduction in f64.
pub const SMALL_ARGUMENT: f32 = 1_073_741_824.0;

/// The name of the function for arguments up to [`SMALL_ARGUMENT`] only.
pub fn small_argument_name(op: UnaryOp) -> String {
    format!("@math.{}.near", op.name())
}

/// The definitions of `@math.NAME.1` for these functions (for sine and cosine, also of [`small_argument_name`]) and
/// their declarations, for a GPU: exponentials are `ex2.approx`. With `f8`, also the conversions of
/// [`define_f8`](super::repr::define_f8). `attributes` is the attribute group of the definitions, `asm` that of assembly
/// that computes.
pub fn definitions(ops: &[UnaryOp], f8: bool, attributes: &str, asm: &'static str) -> String {
    let mut w = Writer::new();
    for &op in ops {
        if let UnaryOp::Sin | UnaryOp::Cos = op {
            let signature =
                format!("define internal float {}(float %x) alwaysinline {attributes}", small_argument_name(op));
            w.function(&small_argument_name(op), &signature, |w| {
                let mut m = Lanes { w, lanes: 1, gpu: Some(asm) };
                let (r, quadrant) = m.reduce_cody_waite("%x");
                let result = m.sin_cos_of(&r, &quadrant, op == UnaryOp::Cos);
                let result = m.with_zero(op, "%x", result);
                m.w.line(format!("ret float {result}"));
            });
            // Large arguments are rare, and their code is long.
            define(&mut w, op, 1, Some(asm), &format!("noinline cold {attributes}"));
        } else {
            define(&mut w, op, 1, Some(asm), &format!("alwaysinline {attributes}"));
        }
    }
    if f8 {
        super::repr::define_f8(&mut w, attributes);
    }
    w.finish("")
}

/// Defines the function on `lanes` lanes, once. `gpu`: as in [`Lanes`].
fn define(w: &mut Writer, op: UnaryOp, lanes: usize, gpu: Option<&'static str>, attributes: &str) {
    let name = name(op, lanes);
    let vty = vector("float", lanes);
    let signature = format!("define internal {vty} {name}({vty} %x) {attributes}");
    w.function(&name, &signature, |w| {
        let mut m = Lanes { w, lanes, gpu };
        let result = match op {
            UnaryOp::Exp => m.exp("%x"),
            UnaryOp::Exp2 => m.exp2("%x"),
            UnaryOp::Log => m.log("%x", false),
            UnaryOp::Log2 => m.log("%x", true),
            UnaryOp::Sin | UnaryOp::Cos => {
                let (r, quadrant) = m.reduce_angle("%x");
                let result = m.sin_cos_of(&r, &quadrant, op == UnaryOp::Cos);
                m.with_zero(op, "%x", result)
            }
            UnaryOp::Tanh => m.tanh("%x"),
            UnaryOp::Erf => m.erf("%x"),
            UnaryOp::Neg
            | UnaryOp::Not
            | UnaryOp::Abs
            | UnaryOp::Sqrt
            | UnaryOp::Rsqrt
            | UnaryOp::Floor
            | UnaryOp::Ceil
            | UnaryOp::Trunc
            | UnaryOp::Rint => panic!("internal compiler error: `{}` has no polynomial; please report this", op.name()),
        };
        m.w.line(format!("ret {vty} {result}"));
    });
}

/// Emits calls of the f64 function of libm, lane by lane.
fn libm(w: &mut Writer, function: &str, lanes: usize, x: &str) -> String {
    let callee = format!("@{function}");
    if lanes == 1 {
        return w.call("double", &callee, &[("double", x)]);
    }
    let vty = vector("double", lanes);
    let mut result = "poison".to_string();
    for lane in 0..lanes {
        let item = w.inst(format!("extractelement {vty} {x}, i64 {lane}"));
        let value = w.call("double", &callee, &[("double", &item)]);
        result = w.inst(format!("insertelement {vty} {result}, double {value}, i64 {lane}"));
    }
    result
}

/// Emits instructions on `lanes` lanes of f32 (and, where named so, of i32, i64 or f64).
struct Lanes<'w> {
    w: &'w mut Writer,
    lanes: usize,
    /// On a GPU, where instructions approximate functions: the attribute group of assembly that computes.
    gpu: Option<&'static str>,
}

impl Lanes<'_> {
    fn ty(&self, ty: &str) -> String {
        vector(ty, self.lanes)
    }

    fn c(&self, x: f32) -> String {
        splat("float", self.lanes, float_constant(x))
    }

    fn ci(&self, x: i64) -> String {
        splat("i32", self.lanes, x)
    }

    fn f(&mut self, op: &str, a: &str, b: &str) -> String {
        let ty = self.ty("float");
        self.w.inst(format!("{op} {ty} {a}, {b}"))
    }

    fn wide(&self, x: i64) -> String {
        splat("i64", self.lanes, x)
    }

    fn i64(&mut self, op: &str, a: &str, b: &str) -> String {
        let ty = self.ty("i64");
        self.w.inst(format!("{op} {ty} {a}, {b}"))
    }

    fn i(&mut self, op: &str, a: &str, b: &str) -> String {
        let ty = self.ty("i32");
        self.w.inst(format!("{op} {ty} {a}, {b}"))
    }

    fn convert(&mut self, op: &str, from: &str, x: &str, to: &str) -> String {
        let (from, to) = (self.ty(from), self.ty(to));
        self.w.inst(format!("{op} {from} {x} to {to}"))
    }

    fn intrinsic(&mut self, base: &str, ty: &str, args: &[&str]) -> String {
        let callee = intrinsic(base, suffix(ty), self.lanes);
        let vty = self.ty(ty);
        let args: Vec<(&str, &str)> = args.iter().map(|&a| (vty.as_str(), a)).collect();
        self.w.call(&vty, &callee, &args)
    }

    fn fma(&mut self, a: &str, b: &str, c: &str) -> String {
        self.intrinsic("llvm.fma", "float", &[a, b, c])
    }

    fn select(&mut self, c: &str, a: &str, b: &str) -> String {
        let (cond, ty) = (self.ty("i1"), self.ty("float"));
        self.w.inst(format!("select {cond} {c}, {ty} {a}, {ty} {b}"))
    }

    /// Horner's rule, with coefficients from the highest power down.
    fn polynomial(&mut self, x: &str, coefficients: &[f32]) -> String {
        let mut sum = self.c(coefficients[0]);
        for &coefficient in &coefficients[1..] {
            let c = self.c(coefficient);
            sum = self.fma(&sum, x, &c);
        }
        sum
    }

    /// x clamped to [low, high]; NaN stays NaN.
    fn clamp(&mut self, x: &str, low: f32, high: f32) -> String {
        let (low, high) = (self.c(low), self.c(high));
        let below = self.f("fcmp olt", x, &low);
        let x = self.select(&below, &low, x);
        let above = self.f("fcmp ogt", &x, &high);
        self.select(&above, &high, &x)
    }

    /// x · 2ⁿ for an integer-valued float n in [−252, 254].
    fn scale(&mut self, x: &str, n: &str) -> String {
        if self.w.has_scalef && matches!(self.lanes, 4 | 8 | 16) {
            return self.scalef(x, n);
        }
        self.scale_in_steps(x, n)
    }

    /// Emits AVX-512's `vscalefps`.
    fn scalef(&mut self, x: &str, n: &str) -> String {
        let (ty, lanes) = (self.ty("float"), self.lanes);
        let callee = format!("@llvm.x86.avx512.mask.scalef.ps.{}", 32 * lanes);
        // The mask has at least 8 bits. Only the 512-bit version has a rounding operand: 4 selects the mode of MXCSR.
        let mask = if lanes == 16 { "i16" } else { "i8" };
        let mut args = vec![(ty.as_str(), x), (&ty, n), (&ty, "zeroinitializer"), (mask, "-1")];
        if lanes == 16 {
            args.push(("i32", "4"));
        }
        self.w.call(&ty, &callee, &args)
    }

    /// Scales in two steps, so that neither factor overflows or underflows.
    fn scale_in_steps(&mut self, x: &str, n: &str) -> String {
        let is_nan = self.f("fcmp uno", n, n);
        let n = {
            let zero = self.c(0.0);
            self.select(&is_nan, &zero, n)
        };
        let n = self.convert("fptosi", "float", &n, "i32");
        let one = self.ci(1);
        let half = self.i("ashr", &n, &one);
        let rest = self.i("sub", &n, &half);
        let (bias, place) = (self.ci(127), self.ci(23));
        let mut result = x.to_string();
        for part in [half, rest] {
            let biased = self.i("add", &part, &bias);
            let bits = self.i("shl", &biased, &place);
            let factor = self.convert("bitcast", "i32", &bits, "float");
            result = self.f("fmul", &result, &factor);
        }
        result
    }

    /// 2ˣ = 2ⁿ · 2ᶠ with n the nearest integer.
    fn exp2(&mut self, x: &str) -> String {
        let x = self.clamp(x, -151.0, 129.0);
        let n = self.intrinsic("llvm.rint", "float", &[&x]);
        let f = self.f("fsub", &x, &n);
        let p = self.polynomial(
            &f,
            &[
                1.535_336_2e-4,
                1.339_887_4e-3,
                9.618_437e-3,
                5.550_332_5e-2,
                2.402_264_8e-1,
                std::f32::consts::LN_2,
                1.0,
            ],
        );
        self.scale(&p, &n)
    }

    /// eˣ. By `ex2.approx`: 2^(x·log2 e), with the product in two parts, since the rounding error of a single product
    /// would grow with x. Else 2ⁿ · eʳ with r = x − n ln 2, where ln 2 is split in two parts.
    fn exp(&mut self, x: &str) -> String {
        /// log₂ e as f32, and its remainder.
        const LOG2_E: (f32, f32) = (std::f32::consts::LOG2_E, 1.925_963_e-8);
        if let Some(attributes) = self.gpu {
            let [log2e, rest, ln2, limit] = [LOG2_E.0, LOG2_E.1, std::f32::consts::LN_2, 128.0].map(|c| self.c(c));
            let high = self.f("fmul", x, &log2e);
            let power = self.ex2(&high, attributes);
            let minus = self.w.inst(format!("fneg float {high}"));
            let low = self.fma(x, &log2e, &minus);
            let low = self.fma(x, &rest, &low);
            let low = self.f("fmul", &low, &ln2);
            let exact = self.fma(&power, &low, &power);
            // ∞ and 0 are exact already, and the correction would turn them into NaN.
            let size = self.intrinsic("llvm.fabs", "float", &[&high]);
            let is_finite = self.f("fcmp olt", &size, &limit);
            return self.select(&is_finite, &exact, &power);
        }
        let x = self.clamp(x, -105.0, 89.0);
        let log2e = self.c(std::f32::consts::LOG2_E);
        let scaled = self.f("fmul", &x, &log2e);
        let n = self.intrinsic("llvm.rint", "float", &[&scaled]);
        let (high, low) = (self.c(-0.693_359_4), self.c(2.121_944_4e-4));
        let r = self.fma(&n, &high, &x);
        let r = self.fma(&n, &low, &r);
        let p = self
            .polynomial(&r, &[1.987_569_1e-4, 1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5, 1.0, 1.0]);
        self.scale(&p, &n)
    }

    fn ex2(&mut self, x: &str, attributes: &str) -> String {
        self.w.inst(format!("call float asm \"ex2.approx.ftz.f32 $0, $1;\", \"=f,f\"(float {x}) {attributes}"))
    }

    /// The mantissa in [√½, √2) minus one, and the exponent as a float.
    fn split_exponent(&mut self, x: &str) -> (String, String) {
        // Denormals are scaled up first.
        let (tiny, up) = (self.c(f32::MIN_POSITIVE), self.c(8388608.0));
        let is_tiny = self.f("fcmp olt", x, &tiny);
        let scaled = self.f("fmul", x, &up);
        let x = self.select(&is_tiny, &scaled, x);
        let (shift, none) = (self.c(-23.0), self.c(0.0));
        let adjust = self.select(&is_tiny, &shift, &none);
        let bits = self.convert("bitcast", "float", &x, "i32");
        // After subtracting the bits of √½, the exponent field counts powers of two from there.
        let root_half = self.ci(std::f32::consts::FRAC_1_SQRT_2.to_bits() as i64);
        let offset = self.i("sub", &bits, &root_half);
        let (place, fraction) = (self.ci(23), self.ci(0x007f_ffff));
        let exponent = self.i("ashr", &offset, &place);
        let mantissa = self.i("and", &offset, &fraction);
        let mantissa = self.i("add", &mantissa, &root_half);
        let mantissa = self.convert("bitcast", "i32", &mantissa, "float");
        let one = self.c(-1.0);
        let m = self.f("fadd", &mantissa, &one);
        let e = self.convert("sitofp", "i32", &exponent, "float");
        let e = self.f("fadd", &e, &adjust);
        (m, e)
    }

    /// ln x, or log₂ x.
    fn log(&mut self, x: &str, base_two: bool) -> String {
        let (m, e) = self.split_exponent(x);
        let square = self.f("fmul", &m, &m);
        let p = self.polynomial(
            &m,
            &[
                7.037_683_6e-2,
                -1.151_461e-1,
                1.167_699_9e-1,
                -1.242_014_1e-1,
                1.424_932_3e-1,
                -1.666_805_7e-1,
                2.000_071_5e-1,
                -2.499_999_4e-1,
                3.333_333e-1,
            ],
        );
        let p = self.f("fmul", &p, &m);
        let y = self.f("fmul", &p, &square);
        let half = self.c(-0.5);
        let result = if base_two {
            let y = self.fma(&square, &half, &y);
            let part = self.c(std::f32::consts::LOG2_E - 1.0);
            let sum = self.f("fmul", &y, &part);
            let sum = self.fma(&m, &part, &sum);
            let sum = self.f("fadd", &sum, &y);
            let sum = self.f("fadd", &sum, &m);
            self.f("fadd", &sum, &e)
        } else {
            let (high, low) = (self.c(0.693_359_4), self.c(-2.121_944_4e-4));
            let y = self.fma(&e, &low, &y);
            let y = self.fma(&square, &half, &y);
            let sum = self.f("fadd", &m, &y);
            self.fma(&e, &high, &sum)
        };
        self.log_specials(x, &result)
    }

    fn log_specials(&mut self, x: &str, result: &str) -> String {
        let (zero, inf, minus_inf, nan) =
            (self.c(0.0), self.c(f32::INFINITY), self.c(f32::NEG_INFINITY), self.c(f32::NAN));
        let is_inf = self.f("fcmp oeq", x, &inf);
        let result = self.select(&is_inf, &inf, result);
        let is_zero = self.f("fcmp oeq", x, &zero);
        let result = self.select(&is_zero, &minus_inf, &result);
        let outside = self.f("fcmp ult", x, &zero);
        self.select(&outside, &nan, &result)
    }

    /// Range reduction: x = quadrant · π/2 + r with |r| ≤ π/4. Returns r, and the quadrant modulo four as an i32.
    fn reduce_angle(&mut self, x: &str) -> (String, String) {
        let (floats, ints) = (self.ty("float"), self.ty("i32"));
        // The phi below refers to this block: it needs a name.
        self.w.branch("near");
        self.w.label("near");
        let near = self.reduce_cody_waite(x);
        let limit = self.c(SMALL_ARGUMENT);
        let magnitude = self.intrinsic("llvm.fabs", "float", &[x]);
        let is_far = self.f("fcmp ogt", &magnitude, &limit);
        let any = if self.lanes == 1 {
            is_far.clone()
        } else {
            let cond = self.ty("i1");
            let callee = intrinsic("llvm.vector.reduce.or", "i1", self.lanes);
            self.w.call("i1", &callee, &[(&cond, &is_far)])
        };
        self.w.branch_if(&any, "far", "reduced");
        self.w.label("far");
        let far = self.reduce_payne_hanek(x, &magnitude);
        let r = self.select(&is_far, &far.0, &near.0);
        let quadrant = self.w.inst(format!("select {} {is_far}, {ints} {}, {ints} {}", self.ty("i1"), far.1, near.1));
        self.w.branch("reduced");
        self.w.label("reduced");
        let r = self.w.inst(format!("phi {floats} [ {}, %near ], [ {r}, %far ]", near.0));
        let quadrant = self.w.inst(format!("phi {ints} [ {}, %near ], [ {quadrant}, %far ]", near.1));
        (r, quadrant)
    }

    /// Cody–Waite reduction in f64, accurate up to [`SMALL_ARGUMENT`].
    fn reduce_cody_waite(&mut self, x: &str) -> (String, String) {
        let wide = self.convert("fpext", "float", x, "double");
        let double = self.ty("double");
        let constant = |v: f64, lanes: usize| splat("double", lanes, super::writer::double_constant(v));
        let per_quadrant = constant(std::f64::consts::FRAC_2_PI, self.lanes);
        let scaled = self.w.inst(format!("fmul {double} {wide}, {per_quadrant}"));
        let q = self.intrinsic("llvm.rint", "double", &[&scaled]);
        let minus = constant(-std::f64::consts::FRAC_PI_2, self.lanes);
        let r = self.intrinsic("llvm.fma", "double", &[&q, &minus, &wide]);
        let rest = constant(-6.123_233_995_736_766e-17, self.lanes);
        let r = self.intrinsic("llvm.fma", "double", &[&q, &rest, &r]);
        let r = self.convert("fptrunc", "double", &r, "float");
        let ints = self.ty("i32");
        let sat = format!(
            "@llvm.fptosi.sat.{}.{}",
            if self.lanes == 1 { "i32".into() } else { format!("v{}i32", self.lanes) },
            if self.lanes == 1 { "f64".into() } else { format!("v{}f64", self.lanes) }
        );
        let quadrant = self.w.call(&ints, &sat, &[(&double, &q)]);
        (r, quadrant)
    }

    /// Payne–Hanek reduction, for |x| > 2³⁰, where f64 is not accurate enough (Payne and Hanek, "Radian reduction for
    /// trigonometric functions", SIGNUM Newsletter 18, 1983). x = m · 2ᵏ with m < 2²⁴ and 7 ≤ k ≤ 104, so quadrants and
    /// their fraction are m · (2ᵏ · 2/π mod 4) mod 4: 96 bits of 2/π from bit k − 2 on, of which two are integer, leave
    /// an error below 2⁻⁷⁰ quadrants. No f32 is closer than 2⁻³⁰ quadrants to a whole quadrant.
    fn reduce_payne_hanek(&mut self, x: &str, magnitude: &str) -> (String, String) {
        let bits = self.convert("bitcast", "float", magnitude, "i32");
        let (fraction, hidden, place) = (self.ci(0x007f_ffff), self.ci(0x0080_0000), self.ci(23));
        let m = self.i("and", &bits, &fraction);
        let m = self.i("or", &m, &hidden);
        let m = self.convert("zext", "i32", &m, "i64");
        // The first bit of the window: the exponent field has a bias of 127, and m has 23 fraction bits.
        let exponent = self.i("lshr", &bits, &place);
        let bias = self.ci(127 + 23 + 2);
        let first = self.i("sub", &exponent, &bias);
        let (five, in_word) = (self.ci(5), self.ci(31));
        let word = self.i("lshr", &first, &five);
        let shift = self.i("and", &first, &in_word);
        let shift = self.convert("zext", "i32", &shift, "i64");
        let (low_half, half) = (self.wide(32), self.wide(1 << 61));
        let parts = [0, 1, 2, 3].map(|n| self.word_of_two_over_pi(&word, n));
        let [high, middle, low] = [0, 1, 2].map(|n| {
            let upper = self.i64("shl", &parts[n], &low_half);
            let both = self.i64("or", &upper, &parts[n + 1]);
            let moved = self.i64("shl", &both, &shift);
            self.i64("lshr", &moved, &low_half)
        });
        // The upper 64 of 96 bits of the product; the bits above are multiples of four quadrants.
        let product = self.i64("mul", &m, &low);
        let carried = self.i64("lshr", &product, &low_half);
        let product = self.i64("mul", &m, &middle);
        let sum = self.i64("add", &product, &carried);
        let product = self.i64("mul", &m, &high);
        let product = self.i64("shl", &product, &low_half);
        let product = self.i64("add", &product, &sum);
        // Rounds to the nearest quadrant; the remainder is a signed number with 64 fraction bits.
        let half_more = self.i64("add", &product, &half);
        let (integer, two) = (self.wide(62), self.wide(2));
        let quadrant = self.i64("lshr", &half_more, &integer);
        let quadrant = self.convert("trunc", "i64", &quadrant, "i32");
        let rest = self.i64("shl", &product, &two);
        let rest = self.convert("sitofp", "i64", &rest, "double");
        let double = self.ty("double");
        let scale = std::f64::consts::FRAC_PI_2 * 2f64.powi(-64);
        let scale = splat("double", self.lanes, super::writer::double_constant(scale));
        let r = self.w.inst(format!("fmul {double} {rest}, {scale}"));
        let r = self.convert("fptrunc", "double", &r, "float");
        self.reduced_with_sign(x, magnitude, &r, &quadrant)
    }

    /// Converts the reduction of |x| to that of x: negated where x is negative, and NaN for infinity.
    fn reduced_with_sign(&mut self, x: &str, magnitude: &str, r: &str, quadrant: &str) -> (String, String) {
        let (infinity, nan, zero) = (self.c(f32::INFINITY), self.c(f32::NAN), self.c(0.0));
        let (floats, ints, cond) = (self.ty("float"), self.ty("i32"), self.ty("i1"));
        let is_infinite = self.f("fcmp oeq", magnitude, &infinity);
        let r = self.select(&is_infinite, &nan, r);
        let is_negative = self.f("fcmp olt", x, &zero);
        let minus = self.w.inst(format!("fneg {floats} {r}"));
        let r = self.select(&is_negative, &minus, &r);
        let none = self.ci(0);
        let minus = self.i("sub", &none, quadrant);
        let quadrant = self.w.inst(format!("select {cond} {is_negative}, {ints} {minus}, {ints} {quadrant}"));
        (r, quadrant)
    }

    /// 32 bits of 2/π, as an i64: word number `word` + `n` after the binary point, `word` at most 3.
    fn word_of_two_over_pi(&mut self, word: &str, n: usize) -> String {
        const WORDS: [i64; 7] =
            [0xA2F9_836E, 0x4E44_1529, 0xFC27_57D1, 0xF534_DDC0, 0xDB62_9599, 0x3C43_9041, 0xFE51_63AB];
        let (wide, cond) = (self.ty("i64"), self.ty("i1"));
        let mut chosen = self.wide(WORDS[n + 3]);
        for i in (0..3).rev() {
            let index = self.ci(i as i64);
            let is_it = self.i("icmp eq", word, &index);
            chosen = self.w.inst(format!("select {cond} {is_it}, {wide} {}, {wide} {chosen}", self.wide(WORDS[n + i])));
        }
        chosen
    }

    /// The result of a sine of x, where that of −0 is −0.
    fn with_zero(&mut self, op: UnaryOp, x: &str, result: String) -> String {
        if op != UnaryOp::Sin {
            return result;
        }
        let zero = self.c(0.0);
        let is_zero = self.f("fcmp oeq", x, &zero);
        self.select(&is_zero, x, &result)
    }

    /// Sine or cosine of the angle quadrant · π/2 + r.
    fn sin_cos_of(&mut self, r: &str, quadrant: &str, cosine: bool) -> String {
        let offset = self.ci(i64::from(cosine));
        let quadrant = self.i("add", quadrant, &offset);
        let z = self.f("fmul", r, r);
        let s = self.polynomial(&z, &[-1.951_529_6e-4, 8.332_161e-3, -1.666_665_5e-1]);
        let s = self.f("fmul", &s, &z);
        let s = self.fma(&s, r, r);
        let c = self.polynomial(&z, &[2.443_315_7e-5, -1.388_731_6e-3, 4.166_664_6e-2, -0.5, 1.0]);
        let (one, two, zero) = (self.ci(1), self.ci(2), self.ci(0));
        let odd = self.i("and", &quadrant, &one);
        let odd = self.i("icmp ne", &odd, &zero);
        let value = self.select(&odd, &c, &s);
        let negative = self.i("and", &quadrant, &two);
        let negative = self.i("icmp ne", &negative, &zero);
        let ty = self.ty("float");
        let minus = self.w.inst(format!("fneg {ty} {value}"));
        self.select(&negative, &minus, &value)
    }

    /// A polynomial near zero, 1 − 2/(e²ˣ + 1) elsewhere.
    fn tanh(&mut self, x: &str) -> String {
        let magnitude = self.intrinsic("llvm.fabs", "float", &[x]);
        let twice = self.f("fadd", &magnitude, &magnitude);
        let e = self.exp(&twice);
        let (one, two) = (self.c(1.0), self.c(2.0));
        let sum = self.f("fadd", &e, &one);
        let quotient = match self.gpu {
            // Two units in the last place; `fdiv` calls a subroutine.
            Some(attributes) => self.w.inst(format!(
                "call float asm \"div.full.f32 $0, $1, $2;\", \"=f,f,f\"(float {two}, float {sum}) {attributes}"
            )),
            None => self.f("fdiv", &two, &sum),
        };
        let large = self.f("fsub", &one, &quotient);
        let s = self.f("fmul", x, x);
        let p = self.polynomial(&s, &[-5.704_988_7e-3, 2.063_909e-2, -5.373_971_6e-2, 1.333_144_2e-1, -3.333_328e-1]);
        let p = self.f("fmul", &p, &s);
        let small = self.fma(&p, x, x);
        let limit = self.c(0.625);
        let is_small = self.f("fcmp olt", &magnitude, &limit);
        let result = self.select(&is_small, &small, &large);
        // Also of −0, whose polynomial is +0.
        self.intrinsic("llvm.copysign", "float", &[&result, x])
    }

    /// A polynomial near zero, 1 − exp(polynomial) elsewhere.
    fn erf(&mut self, x: &str) -> String {
        let t = self.intrinsic("llvm.fabs", "float", &[x]);
        let s = self.f("fmul", x, x);
        let high = self.polynomial(&t, &[-1.728_534_7e-5, 3.831_971_3e-4]);
        let low = self.polynomial(&t, &[-3.883_964_4e-3, 2.425_462_2e-2]);
        let mut r = self.fma(&high, &s, &low);
        for coefficient in [-1.067_778_8e-1, -6.348_467e-1, -1.287_175_1e-1] {
            let c = self.c(coefficient);
            r = self.fma(&r, &t, &c);
        }
        let ty = self.ty("float");
        let minus = self.w.inst(format!("fneg {ty} {t}"));
        let r = self.fma(&r, &t, &minus);
        // At most 0.2, so that the error of a product that is not split is small.
        let e = match self.gpu {
            Some(attributes) => {
                let log2e = self.c(std::f32::consts::LOG2_E);
                let scaled = self.f("fmul", &r, &log2e);
                self.ex2(&scaled, attributes)
            }
            None => self.exp(&r),
        };
        let one = self.c(1.0);
        let large = self.f("fsub", &one, &e);
        let large = self.intrinsic("llvm.copysign", "float", &[&large, x]);
        let p = self.polynomial(
            &s,
            &[-5.967_617e-4, 4.991_194_2e-3, -2.676_813_5e-2, 1.128_199_25e-1, -3.761_253_4e-1, 1.283_791_7e-1],
        );
        let small = self.fma(&p, x, x);
        let limit = self.c(0.927_734_4);
        let is_large = self.f("fcmp ogt", &t, &limit);
        self.select(&is_large, &large, &small)
    }
}
