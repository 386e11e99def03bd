//! Compares directed rounding, `.ftz` and `.sat` with the arithmetic of the host CPU, whose control register (MXCSR)
//! has the same rounding modes.

use super::Program;
use crate::sim::parse::Ty;
use crate::testgen::Rng;
use std::arch::asm;

/// PTX rounding modes, of floats and of integers, with the CPU's encoding.
const DIRECTIONS: [(&str, &str, u32); 4] = [("rn", "rni", 0), ("rm", "rmi", 1), ("rp", "rpi", 2), ("rz", "rzi", 3)];

/// The value of MXCSR: all exceptions masked, a rounding mode, and whether subnormal operands are zeros.
fn control(direction: u32, flushes: bool) -> u32 {
    0x1F80 | direction << 13 | if flushes { 0x40 } else { 0 }
}

/// Functions of an MXCSR value and operands; each executes one CPU instruction.
macro_rules! processor {
    ($($name:ident: $a:ty [$class:ident], $result:ty [$to:ident], $instruction:literal;)+) => {$(
        fn $name(control: u32, a: $a, b: $a, c: $a) -> $result {
            let mut old = 0u32;
            let result: $result;
            // SAFETY: only `result` and `old` change, and MXCSR is restored.
            unsafe {
                asm!(
                    "stmxcsr [{old}]", "ldmxcsr [{control}]", $instruction, "ldmxcsr [{old}]",
                    old = in(reg) &raw mut old, control = in(reg) &raw const control,
                    a = in($class) a, b = in($class) b, c = in($class) c, r = out($to) result,
                );
            }
            result
        }
    )+};
}

processor! {
    add32: f32 [xmm_reg], f32 [xmm_reg], "vaddss {r}, {a}, {b} /* {c} */";
    sub32: f32 [xmm_reg], f32 [xmm_reg], "vsubss {r}, {a}, {b} /* {c} */";
    mul32: f32 [xmm_reg], f32 [xmm_reg], "vmulss {r}, {a}, {b} /* {c} */";
    div32: f32 [xmm_reg], f32 [xmm_reg], "vdivss {r}, {a}, {b} /* {c} */";
    sqrt32: f32 [xmm_reg], f32 [xmm_reg], "vsqrtss {r}, {a}, {a} /* {b} {c} */";
    fma32: f32 [xmm_reg], f32 [xmm_reg], "vmovaps {r}, {a}\nvfmadd213ss {r}, {b}, {c}";
    add64: f64 [xmm_reg], f64 [xmm_reg], "vaddsd {r}, {a}, {b} /* {c} */";
    sub64: f64 [xmm_reg], f64 [xmm_reg], "vsubsd {r}, {a}, {b} /* {c} */";
    mul64: f64 [xmm_reg], f64 [xmm_reg], "vmulsd {r}, {a}, {b} /* {c} */";
    div64: f64 [xmm_reg], f64 [xmm_reg], "vdivsd {r}, {a}, {b} /* {c} */";
    sqrt64: f64 [xmm_reg], f64 [xmm_reg], "vsqrtsd {r}, {a}, {a} /* {b} {c} */";
    fma64: f64 [xmm_reg], f64 [xmm_reg], "vmovapd {r}, {a}\nvfmadd213sd {r}, {b}, {c}";
    narrow: f64 [xmm_reg], f32 [xmm_reg], "vcvtsd2ss {r}, {a}, {a} /* {b} {c} */";
    to_i32: f32 [xmm_reg], u32 [reg], "vcvtss2si {r:e}, {a} /* {b} {c} */";
    to_i64: f64 [xmm_reg], u64 [reg], "vcvtsd2si {r}, {a} /* {b} {c} */";
    of_i64: u64 [reg], f32 [xmm_reg], "vcvtsi2ss {r}, {r}, {a} /* {b} {c} */";
    of_i64_wide: u64 [reg], f64 [xmm_reg], "vcvtsi2sd {r}, {r}, {a} /* {b} {c} */";
}

/// A PTX op and the CPU instruction that computes the same.
struct HostInstruction<F> {
    op: &'static str,
    operands: usize,
    /// Executes the CPU instruction with a value of MXCSR.
    function: fn(u32, F, F, F) -> F,
}

const SINGLE: [HostInstruction<f32>; 6] = [
    HostInstruction { op: "add", operands: 2, function: add32 },
    HostInstruction { op: "sub", operands: 2, function: sub32 },
    HostInstruction { op: "mul", operands: 2, function: mul32 },
    HostInstruction { op: "div", operands: 2, function: div32 },
    HostInstruction { op: "sqrt", operands: 1, function: sqrt32 },
    HostInstruction { op: "fma", operands: 3, function: fma32 },
];
const DOUBLE: [HostInstruction<f64>; 6] = [
    HostInstruction { op: "add", operands: 2, function: add64 },
    HostInstruction { op: "sub", operands: 2, function: sub64 },
    HostInstruction { op: "mul", operands: 2, function: mul64 },
    HostInstruction { op: "div", operands: 2, function: div64 },
    HostInstruction { op: "sqrt", operands: 1, function: sqrt64 },
    HostInstruction { op: "fma", operands: 3, function: fma64 },
];

fn can_run() -> bool {
    std::arch::is_x86_feature_detected!("avx") && std::arch::is_x86_feature_detected!("fma")
}

/// A PTX instruction on operands of one type.
struct Instruction {
    text: String,
    program: Program,
    to: Ty,
}

impl Instruction {
    fn new(name: &str, to: Ty, from: Ty, count: usize) -> Instruction {
        let text = format!("{name} $0, {};", ["$1", "$2", "$3"][..count].join(", "));
        let constraints: Vec<String> = ["=r", "r", "r", "r"][..=count].iter().map(|c| c.to_string()).collect();
        let types = vec![from; count];
        let program = Program::parse(&text, &constraints, &to, types.iter()).unwrap_or_else(|e| panic!("{e}"));
        Instruction { text, program, to }
    }

    fn run(&self, inputs: &[u64]) -> u64 {
        self.program.run(&self.to, inputs).and_then(|v| v.bits()).unwrap_or_else(|e| panic!("{}: {e}", self.text))
    }
}

/// Operands with all kinds of exponents, close to each other and far apart, and the limits of the format.
fn operands(mantissa: u32, exponent: u32, count: usize) -> Vec<[u64; 3]> {
    let (one, top) = (1u64 << mantissa, (1u64 << exponent) - 1);
    let ends = [
        0,
        1,
        one - 1,
        one,
        one + 1,
        (top / 2) << mantissa,
        ((top / 2) << mantissa) + 1,
        (top << mantissa) - 1,
        top << mantissa,
    ];
    let sign = 1u64 << (mantissa + exponent);
    let ends: Vec<u64> = ends.iter().flat_map(|&bits| [bits, bits | sign]).collect();
    let mut list: Vec<[u64; 3]> =
        ends.iter().flat_map(|&a| ends.iter().flat_map(move |&b| [a, b].into_iter().map(move |c| [a, b, c]))).collect();
    let mut rng = Rng::new(7);
    let mut near = |field: u64, spread: u64| {
        let field = (field + rng.next_u64() % (2 * spread + 1)).saturating_sub(spread).min(top - 1);
        // Some fractions have few bits set, so that results are exact or ties.
        let fraction = rng.next_u64() & (one - 1);
        let fraction =
            if rng.next_u64().is_multiple_of(3) { fraction & fraction << (mantissa / 2) & (one - 1) } else { fraction };
        (rng.next_u64() & sign) | field << mantissa | fraction
    };
    for i in 0..count as u64 {
        let middle = [top / 2, top / 2, 2, top - 3, top / 4, i % top][i as usize % 6];
        let spread = [1, 4, u64::from(mantissa), 2 * u64::from(mantissa), top][(i / 6) as usize % 5];
        let (a, b) = (near(middle, spread), near(middle, spread));
        // Addends about as large as the product.
        let product = ((a & !sign) >> mantissa) + ((b & !sign) >> mantissa);
        let c = near(product.saturating_sub(top / 2).min(top - 1), spread);
        list.push([a, b, c]);
    }
    list
}

fn same(found: u64, expected: u64, infinity: u64, sign: u64) -> bool {
    let nan = |bits: u64| bits & !sign > infinity;
    found == expected || nan(found) && nan(expected)
}

#[test]
fn arithmetic_of_f32() {
    if !can_run() {
        return;
    }
    let operands = operands(23, 8, 6000);
    for HostInstruction { op, operands: count, function } in SINGLE {
        for (direction, _, number) in DIRECTIONS {
            for (flushes, modifiers) in [(false, ""), (true, ".ftz"), (false, ".sat")] {
                if modifiers == ".sat" && ["div", "sqrt"].contains(&op) {
                    continue;
                }
                let one = Instruction::new(&format!("{op}.{direction}{modifiers}.f32"), Ty::Float, Ty::Float, count);
                for bits in &operands {
                    let [a, b, c] = bits.map(|bits| f32::from_bits(bits as u32));
                    let result = function(control(number, flushes), a, b, c);
                    let expected = match modifiers {
                        ".ftz" if result.is_subnormal() => 0f32.copysign(result),
                        ".sat" if result >= 1.0 => 1.0,
                        ".sat" if result > 0.0 => result,
                        ".sat" => 0.0,
                        _ => result,
                    };
                    let found = one.run(&bits[..count]);
                    let expected = u64::from(expected.to_bits());
                    let name = &one.text;
                    assert!(
                        same(found, expected, 0x7F80_0000, 1 << 31),
                        "{name} {bits:x?}: found {found:#x}, expected {expected:#x}"
                    );
                }
            }
        }
    }
}

#[test]
fn arithmetic_of_f64() {
    if !can_run() {
        return;
    }
    let operands = operands(52, 11, 6000);
    for HostInstruction { op, operands: count, function } in DOUBLE {
        for (direction, _, number) in DIRECTIONS {
            let one = Instruction::new(&format!("{op}.{direction}.f64"), Ty::Double, Ty::Double, count);
            for bits in &operands {
                let [a, b, c] = bits.map(f64::from_bits);
                let expected = function(control(number, false), a, b, c).to_bits();
                let found = one.run(&bits[..count]);
                let name = &one.text;
                assert!(
                    same(found, expected, 0x7FF << 52, 1 << 63),
                    "{name} {bits:x?}: found {found:#x}, expected {expected:#x}"
                );
            }
        }
    }
}

#[test]
fn rcp_equals_one_divided_by_x() {
    for direction in ["rn", "rz", "rm", "rp"] {
        let rcp = Instruction::new(&format!("rcp.{direction}.f64"), Ty::Double, Ty::Double, 1);
        let div = Instruction::new(&format!("div.{direction}.f64"), Ty::Double, Ty::Double, 2);
        for [x, ..] in operands(52, 11, 1000) {
            assert_eq!(rcp.run(&[x]), div.run(&[1f64.to_bits(), x]), "{direction} {x:#x}");
        }
    }
}

#[test]
fn conversions() {
    if !can_run() {
        return;
    }
    let mut wide: Vec<u64> = operands(52, 11, 4000).into_iter().flatten().collect();
    // In the range of f32, and of integers.
    let mut rng = Rng::new(8);
    wide.extend((0..20_000).map(|_| {
        let exponent = 1023 - 152 + rng.next_u64() % 285;
        (rng.next_u64() & (1 << 63)) | exponent << 52 | rng.next_u64() >> 12
    }));
    for (direction, integral, number) in DIRECTIONS {
        let narrowing = Instruction::new(&format!("cvt.{direction}.f32.f64"), Ty::Float, Ty::Double, 1);
        let from_i64 = Instruction::new(&format!("cvt.{direction}.f32.s64"), Ty::Float, Ty::Int(64), 1);
        let from_i64_wide = Instruction::new(&format!("cvt.{direction}.f64.s64"), Ty::Double, Ty::Int(64), 1);
        let to_s64 = Instruction::new(&format!("cvt.{integral}.s64.f64"), Ty::Int(64), Ty::Double, 1);
        let to_s32 = Instruction::new(&format!("cvt.{integral}.s32.f32"), Ty::Int(32), Ty::Float, 1);
        for &bits in &wide {
            let x = f64::from_bits(bits);
            let expected = narrow(control(number, false), x, 0.0, 0.0);
            let (found, expected) = (narrowing.run(&[bits]), u64::from(expected.to_bits()));
            assert!(
                same(found, expected, 0x7F80_0000, 1 << 31),
                "{} {bits:#x}: {found:#x}, {expected:#x}",
                narrowing.text
            );
            for shift in [0, 10, 30] {
                let n = bits >> shift;
                let expected = u64::from(of_i64(control(number, false), n, 0, 0).to_bits());
                assert_eq!(from_i64.run(&[n]), expected, "{} {n}", from_i64.text);
                let expected = of_i64_wide(control(number, false), n, 0, 0).to_bits();
                assert_eq!(from_i64_wide.run(&[n]), expected, "{} {n}", from_i64_wide.text);
            }
            // The CPU has a single result for all values out of range.
            if x.abs() < 9e18 {
                assert_eq!(to_s64.run(&[bits]), to_i64(control(number, false), x, 0.0, 0.0), "{} {x}", to_s64.text);
            }
            let single = x as f32;
            if single.abs() < 2e9 {
                let expected = u64::from(to_i32(control(number, false), single, 0.0, 0.0));
                assert_eq!(to_s32.run(&[u64::from(single.to_bits())]), expected, "{} {single}", to_s32.text);
            }
        }
    }
    // PTX ISA, `cvt`: values out of range give the nearest representable integer; NaN depends on the types.
    for (name, to, from, bits, expected) in [
        ("cvt.rzi.s32.f32", 32, Ty::Float, u64::from(f32::NAN.to_bits()), 0),
        ("cvt.rzi.s64.f32", 64, Ty::Float, u64::from(f32::NAN.to_bits()), 1 << 63),
        ("cvt.rzi.s32.f64", 32, Ty::Double, f64::NAN.to_bits(), 1 << 31),
        ("cvt.rzi.u64.f64", 64, Ty::Double, f64::NAN.to_bits(), 1 << 63),
        ("cvt.rzi.u64.f64", 64, Ty::Double, f64::INFINITY.to_bits(), u64::MAX),
        ("cvt.rzi.u32.f32", 32, Ty::Float, u64::from(1e20f32.to_bits()), u64::from(u32::MAX)),
        ("cvt.rpi.u32.f32", 32, Ty::Float, u64::from((-1e20f32).to_bits()), 0),
    ] {
        assert_eq!(Instruction::new(name, Ty::Int(to), from, 1).run(&[bits]), expected, "{name} {bits:#x}");
    }
}
