//! The representations of numbers in registers, in arena buffers and in memory.
//!
//! | element | register | arena | memory |
//! |---|---|---|---|
//! | bool | i1 | i8 | i8 |
//! | integers | iN | iN | iN |
//! | f8, f16, bf16 | float, rounded to the type after each operation | float | iN bits |
//! | f32, f64 | float, double | the same | the same |
//! | pointers | ptr | ptr | |
//!
//! A narrow float as an f32 register value needs no conversion when it is read again or used in a `dot`; conversions
//! occur only at memory accesses.

use super::writer::{Writer, float_constant, intrinsic, splat, vector};
use crate::ir::{DType, Elem};

/// The LLVM type of one lane in a register.
pub fn reg(elem: Elem) -> &'static str {
    match elem {
        Elem::Ptr(_) => "ptr",
        Elem::Num(d) => reg_num(d),
    }
}

/// The LLVM type of one lane of a number in a register.
pub fn reg_num(d: DType) -> &'static str {
    match d {
        DType::Bool => "i1",
        DType::I8 | DType::U8 => "i8",
        DType::I16 | DType::U16 => "i16",
        DType::I32 | DType::U32 => "i32",
        DType::I64 | DType::U64 => "i64",
        DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16 | DType::F32 => "float",
        DType::F64 => "double",
    }
}

/// The suffix of LLVM intrinsics for that register type.
pub fn suffix(ty: &str) -> &str {
    match ty {
        "float" => "f32",
        "double" => "f64",
        "ptr" => "p0",
        other => other,
    }
}

/// The LLVM type of one element in an arena buffer.
pub fn stored(elem: Elem) -> &'static str {
    match reg(elem) {
        "i1" => "i8",
        other => other,
    }
}

/// The size of one element in an arena buffer, in bytes.
pub fn stored_bytes(elem: Elem) -> usize {
    match stored(elem) {
        "i8" => 1,
        "i16" => 2,
        "i32" | "float" => 4,
        _ => 8,
    }
}

/// The LLVM type of one element in global memory: floats narrower than f32 are integers of their width.
pub fn in_memory(d: DType) -> &'static str {
    match d {
        DType::Bool | DType::I8 | DType::U8 | DType::F8E4M3 | DType::F8E5M2 => "i8",
        DType::I16 | DType::U16 | DType::F16 | DType::BF16 => "i16",
        DType::I32 | DType::U32 => "i32",
        DType::I64 | DType::U64 => "i64",
        DType::F32 => "float",
        DType::F64 => "double",
    }
}

/// Whether the type is a float that is wider in registers.
pub fn is_narrow(d: DType) -> bool {
    matches!(d, DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16)
}

/// Converts from the arena representation to a register value.
pub fn from_stored(w: &mut Writer, elem: Elem, lanes: usize, x: &str) -> String {
    match reg(elem) {
        "i1" => w.inst(format!("icmp ne {} {x}, {}", vector("i8", lanes), splat("i8", lanes, 0))),
        _ => x.to_string(),
    }
}

/// Converts a register value to the arena representation.
pub fn to_stored(w: &mut Writer, elem: Elem, lanes: usize, x: &str) -> String {
    match reg(elem) {
        "i1" => w.inst(format!("zext {} {x} to {}", vector("i1", lanes), vector("i8", lanes))),
        _ => x.to_string(),
    }
}

/// Converts from the memory representation to a register value.
pub fn from_memory(w: &mut Writer, d: DType, lanes: usize, x: &str) -> String {
    match d {
        DType::Bool => from_stored(w, Elem::Num(d), lanes, x),
        DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16 => widen(w, d, lanes, x),
        _ => x.to_string(),
    }
}

/// Converts a register value to the memory representation.
pub fn to_memory(w: &mut Writer, d: DType, lanes: usize, x: &str) -> String {
    match d {
        DType::Bool => to_stored(w, Elem::Num(d), lanes, x),
        DType::F8E4M3 | DType::F8E5M2 | DType::F16 | DType::BF16 => narrow_bits(w, d, lanes, x),
        _ => x.to_string(),
    }
}

/// Emits instructions on vectors with explicit types.
struct Ops<'w> {
    w: &'w mut Writer,
    lanes: usize,
}

impl Ops<'_> {
    fn int(&self, v: i64) -> String {
        splat("i32", self.lanes, v)
    }

    fn float(&self, v: f32) -> String {
        splat("float", self.lanes, float_constant(v))
    }

    fn ty(&self, ty: &str) -> String {
        vector(ty, self.lanes)
    }

    fn i(&mut self, op: &str, a: &str, b: &str) -> String {
        let ty = self.ty("i32");
        self.w.inst(format!("{op} {ty} {a}, {b}"))
    }

    fn f(&mut self, op: &str, a: &str, b: &str) -> String {
        let ty = self.ty("float");
        self.w.inst(format!("{op} {ty} {a}, {b}"))
    }

    fn select(&mut self, ty: &str, c: &str, a: &str, b: &str) -> String {
        let (cond, ty) = (self.ty("i1"), self.ty(ty));
        self.w.inst(format!("select {cond} {c}, {ty} {a}, {ty} {b}"))
    }

    fn convert(&mut self, op: &str, from: &str, x: &str, to: &str) -> String {
        let (from, to) = (self.ty(from), self.ty(to));
        self.w.inst(format!("{op} {from} {x} to {to}"))
    }

    fn abs(&mut self, x: &str) -> String {
        let ty = self.ty("float");
        let callee = intrinsic("llvm.fabs", "f32", self.lanes);
        self.w.call(&ty, &callee, &[(&ty, x)])
    }

    fn copysign(&mut self, x: &str, sign: &str) -> String {
        let ty = self.ty("float");
        let callee = intrinsic("llvm.copysign", "f32", self.lanes);
        self.w.call(&ty, &callee, &[(&ty, x), (&ty, sign)])
    }
}

/// The format of an 8-bit float: the number of mantissa bits, the difference between f32's exponent bias and its own,
/// and its largest finite number.
struct Fp8 {
    mantissa: u32,
    rebias: i32,
    largest: f32,
}

fn fp8(d: DType) -> Fp8 {
    match d {
        DType::F8E4M3 => Fp8 { mantissa: 3, rebias: 120, largest: 448.0 },
        _ => Fp8 { mantissa: 2, rebias: 112, largest: 57344.0 },
    }
}

/// Converts the bits of a narrow float to f32 lanes.
fn widen(w: &mut Writer, d: DType, lanes: usize, x: &str) -> String {
    let mut o = Ops { w, lanes };
    match d {
        DType::F16 => {
            let half = o.convert("bitcast", "i16", x, "half");
            o.convert("fpext", "half", &half, "float")
        }
        DType::BF16 => {
            let wide = o.convert("zext", "i16", x, "i32");
            let sixteen = o.int(16);
            let shifted = o.i("shl", &wide, &sixteen);
            o.convert("bitcast", "i32", &shifted, "float")
        }
        _ => {
            let layout = fp8(d);
            let bits = o.convert("zext", "i8", x, "i32");
            let low = o.int(0x7f);
            let magnitude = o.i("and", &bits, &low);
            let shift = o.int(23 - layout.mantissa as i64);
            let placed = o.i("shl", &magnitude, &shift);
            let tiny = o.convert("bitcast", "i32", &placed, "float");
            let scale = o.float(2f32.powi(layout.rebias));
            let scaled = o.f("fmul", &tiny, &scale);
            let special = if d == DType::F8E4M3 { 0x7f } else { 0x7c };
            let special = o.int(special);
            let ty = o.ty("i32");
            let is_special = o.w.inst(format!("icmp uge {ty} {magnitude}, {special}"));
            let nan = o.float(f32::NAN);
            let beyond = if d == DType::F8E4M3 {
                nan
            } else {
                let is_inf = o.w.inst(format!("icmp eq {ty} {magnitude}, {special}"));
                let inf = o.float(f32::INFINITY);
                o.select("float", &is_inf, &inf, &nan)
            };
            let value = o.select("float", &is_special, &beyond, &scaled);
            let twenty_four = o.int(24);
            let sign = o.i("shl", &bits, &twenty_four);
            let sign = o.convert("bitcast", "i32", &sign, "float");
            o.copysign(&value, &sign)
        }
    }
}

/// Rounds f32 lanes to the nearest value of a narrow float, ties to even; returns other types unchanged.
pub fn round(w: &mut Writer, d: DType, lanes: usize, x: &str) -> String {
    let mut o = Ops { w, lanes };
    match d {
        DType::F16 => {
            let half = o.convert("fptrunc", "float", x, "half");
            o.convert("fpext", "half", &half, "float")
        }
        DType::BF16 => {
            let bits = o.convert("bitcast", "float", x, "i32");
            let rounded = round_bits(&mut o, &bits, 16);
            let rounded = o.convert("bitcast", "i32", &rounded, "float");
            keep_nan(&mut o, x, &rounded)
        }
        DType::F8E4M3 | DType::F8E5M2 => round_fp8(&mut o, d, x),
        _ => x.to_string(),
    }
}

/// Rounds away the lowest `drop` bits, to nearest even.
fn round_bits(o: &mut Ops, bits: &str, drop: i64) -> String {
    let (shift, one, mask, half) = (o.int(drop), o.int(1), o.int(-1 << drop), o.int((1 << (drop - 1)) - 1));
    let above = o.i("lshr", bits, &shift);
    let odd = o.i("and", &above, &one);
    let sum = o.i("add", bits, &half);
    let sum = o.i("add", &sum, &odd);
    o.i("and", &sum, &mask)
}

fn keep_nan(o: &mut Ops, x: &str, otherwise: &str) -> String {
    let is_nan = o.f("fcmp uno", x, x);
    let nan = o.float(f32::NAN);
    o.select("float", &is_nan, &nan, otherwise)
}

fn round_fp8(o: &mut Ops, d: DType, x: &str) -> String {
    let layout = fp8(d);
    let magnitude = o.abs(x);
    // Normal numbers.
    let bits = o.convert("bitcast", "float", &magnitude, "i32");
    let normal = round_bits(o, &bits, 23 - layout.mantissa as i64);
    let normal = o.convert("bitcast", "i32", &normal, "float");
    // Denormal numbers are multiples of one step: adding and subtracting 1.5 · 2²³ steps rounds to such a multiple.
    let smallest_normal = 2f32.powi(1 - (127 - layout.rebias));
    let step = smallest_normal / (1 << layout.mantissa) as f32;
    let magic = o.float(1.5 * 8388608.0 * step);
    let sum = o.f("fadd", &magnitude, &magic);
    let denormal = o.f("fsub", &sum, &magic);
    let limit = o.float(smallest_normal);
    let is_small = o.f("fcmp olt", &magnitude, &limit);
    let rounded = o.select("float", &is_small, &denormal, &normal);
    let largest = o.float(layout.largest);
    let too_large = o.f("fcmp ogt", &rounded, &largest);
    let bounded = o.select("float", &too_large, &largest, &rounded);
    let signed = o.copysign(&bounded, x);
    keep_nan(o, x, &signed)
}

/// The bits of f32 lanes that already are values of the narrow float `d`.
pub fn narrow_bits(w: &mut Writer, d: DType, lanes: usize, x: &str) -> String {
    let mut o = Ops { w, lanes };
    match d {
        DType::F16 => {
            let half = o.convert("fptrunc", "float", x, "half");
            o.convert("bitcast", "half", &half, "i16")
        }
        DType::BF16 => {
            let bits = o.convert("bitcast", "float", x, "i32");
            let sixteen = o.int(16);
            let high = o.i("lshr", &bits, &sixteen);
            o.convert("trunc", "i32", &high, "i16")
        }
        _ => {
            let layout = fp8(d);
            let magnitude = o.abs(x);
            let scale = o.float(2f32.powi(-layout.rebias));
            let tiny = o.f("fmul", &magnitude, &scale);
            let tiny = o.convert("bitcast", "float", &tiny, "i32");
            let shift = o.int(23 - layout.mantissa as i64);
            let number = o.i("lshr", &tiny, &shift);
            let largest = o.float(layout.largest);
            let is_number = o.f("fcmp ole", &magnitude, &largest);
            let is_nan = o.f("fcmp uno", x, x);
            let (nan, inf) = (o.int(0x7f), o.int(0x7c));
            let special = o.select("i32", &is_nan, &nan, &inf);
            let bits = o.select("i32", &is_number, &number, &special);
            let source = o.convert("bitcast", "float", x, "i32");
            let (shift, sign_bit) = (o.int(24), o.int(0x80));
            let sign = o.i("lshr", &source, &shift);
            let sign = o.i("and", &sign, &sign_bit);
            let all = o.i("or", &bits, &sign);
            o.convert("trunc", "i32", &all, "i8")
        }
    }
}

/// Converts the bits (an integer of the type's width) of an element to a register value.
pub fn from_bits(w: &mut Writer, d: DType, lanes: usize, x: &str) -> String {
    match d {
        DType::F32 | DType::F64 => {
            let bits = if d == DType::F32 { "i32" } else { "i64" };
            w.inst(format!("bitcast {} {x} to {}", vector(bits, lanes), vector(reg_num(d), lanes)))
        }
        _ => from_memory(w, d, lanes, x),
    }
}

/// The bits of a register value as an integer of the type's width.
pub fn to_bits(w: &mut Writer, d: DType, lanes: usize, x: &str) -> String {
    match d {
        DType::F32 | DType::F64 => {
            let bits = if d == DType::F32 { "i32" } else { "i64" };
            w.inst(format!("bitcast {} {x} to {}", vector(reg_num(d), lanes), vector(bits, lanes)))
        }
        _ => to_memory(w, d, lanes, x),
    }
}

/// The integer type with the width of an element.
pub fn bits_type(d: DType) -> &'static str {
    match d.bits() {
        8 => "i8",
        16 => "i16",
        32 => "i32",
        _ => "i64",
    }
}

/// Defines `@decode.NAME(i8) -> float` and `@encode.NAME(float) -> i8` for the 8-bit floats, and `@odd(double) ->
/// float`, which rounds to odd, so that `@encode` then rounds as if from the f64. For lowerings without their own
/// conversions.
pub fn define_f8(w: &mut Writer, attributes: &str) {
    w.function("@odd", &format!("define internal float @odd(double %x) alwaysinline {attributes}"), |w| {
        let odd = super::elementwise::truncate_to_odd(w, 1, "%x");
        w.line(format!("ret float {odd}"));
    });
    for d in [DType::F8E4M3, DType::F8E5M2] {
        let name = format!("@decode.{d}");
        w.function(&name, &format!("define internal float {name}(i8 %x) alwaysinline {attributes}"), |w| {
            let value = widen(w, d, 1, "%x");
            w.line(format!("ret float {value}"));
        });
        let name = format!("@encode.{d}");
        w.function(&name, &format!("define internal i8 {name}(float %x) alwaysinline {attributes}"), |w| {
            let rounded = round(w, d, 1, "%x");
            let bits = narrow_bits(w, d, 1, &rounded);
            w.line(format!("ret i8 {bits}"));
        });
    }
}
