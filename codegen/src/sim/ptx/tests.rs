//! Checks scalar PTX against the PTX ISA, instruction by instruction.

use super::{Program, known_instructions};
use crate::ir::DType;
use crate::num;
use crate::sim::callee::Intrinsic;
use crate::sim::parse::Ty;
use crate::sim::value::{self, Value};

fn bits(value: &Value) -> u64 {
    value.bits().unwrap()
}

/// Executes a text with this many outputs.
pub(super) fn execute(text: &str, outputs: usize, ty: &Ty, inputs: &[(Ty, u64)]) -> Result<Value, String> {
    let constraints: Vec<String> =
        (0..outputs).map(|_| "=r").chain(inputs.iter().map(|_| "r")).map(String::from).collect();
    let program = Program::parse(text, &constraints, ty, inputs.iter().map(|(ty, _)| ty))?;
    let inputs: Vec<u64> = inputs.iter().map(|&(_, bits)| bits).collect();
    program.run(ty, &inputs)
}

/// Executes a text with one output and inputs of 32 bits.
fn run32(text: &str, inputs: &[u32]) -> Result<u32, String> {
    let inputs: Vec<(Ty, u64)> = inputs.iter().map(|&x| (Ty::Int(32), u64::from(x))).collect();
    execute(text, 1, &Ty::Int(32), &inputs).map(|v| bits(&v) as u32)
}

fn check(text: &str, inputs: &[u32], expected: u32) {
    match run32(text, inputs) {
        Ok(found) => assert_eq!(found, expected, "{text} {inputs:x?}: found {found:#x}, expected {expected:#x}"),
        Err(e) => panic!("{text}: {e}"),
    }
}

fn f(x: f32) -> u32 {
    x.to_bits()
}

#[test]
fn integers_and_bits() {
    check("mov.b32 $0, $1;", &[7], 7);
    check("add.u32 $0, $1, $2;", &[u32::MAX, 2], 1);
    check("add.sat.s32 $0, $1, $2;", &[i32::MAX as u32, 2], i32::MAX as u32);
    check("sub.s32 $0, $1, 5;", &[3], -2i32 as u32);
    check("mul.lo.u32 $0, $1, $2;", &[0x1_0001, 0x1_0001], 0x2_0001);
    check("mul.hi.u32 $0, $1, $2;", &[u32::MAX, u32::MAX], u32::MAX - 1);
    check("mul.hi.s32 $0, $1, $2;", &[u32::MAX, u32::MAX], 0);
    check("mad.lo.s32 $0, $1, $2, $3;", &[3, 4, 5], 17);
    check("min.s32 $0, $1, $2;", &[u32::MAX, 1], u32::MAX);
    check("min.u32 $0, $1, $2;", &[u32::MAX, 1], 1);
    check("max.s32 $0, $1, $2;", &[u32::MAX, 1], 1);
    check("abs.s32 $0, $1;", &[-5i32 as u32], 5);
    check("neg.s32 $0, $1;", &[5], -5i32 as u32);
    check("and.b32 $0, $1, 0xF0;", &[0xFF], 0xF0);
    check("or.b32 $0, $1, $2;", &[1, 6], 7);
    check("xor.b32 $0, $1, $2;", &[5, 6], 3);
    check("not.b32 $0, $1;", &[0], u32::MAX);
    check("shl.b32 $0, $1, $2;", &[1, 31], 1 << 31);
    check("shl.b32 $0, $1, $2;", &[1, 32], 0);
    check("shr.s32 $0, $1, $2;", &[-8i32 as u32, 40], u32::MAX);
    check("shr.u32 $0, $1, $2;", &[0x80, 4], 8);
    check("lop3.b32 $0, $1, $2, $3, 0x96;", &[0b1100, 0b1010, 0b0110], 0b1100 ^ 0b1010 ^ 0b0110);
    check("lop3.b32 $0, $1, $2, $3, 0xCA;", &[0xF0F0, 0xAAAA, 0x5555], 0xF0F0 & 0xAAAA | !0xF0F0 & 0x5555);
    check("prmt.b32 $0, $1, $2, 0x5410;", &[0x3333_1111, 0x4444_2222], 0x2222_1111);
    check("prmt.b32 $0, $1, $2, 0x0123;", &[0x0403_0201, 0], 0x0102_0304);
    check("prmt.b32 $0, $1, $2, 0x8888;", &[0x80, 0], u32::MAX);
    check("bfe.u32 $0, $1, 4, 8;", &[0xABCD], 0xBC);
    check("bfe.s32 $0, $1, 4, 8;", &[0xABCD], 0xFFFF_FFBC);
    check("bfi.b32 $0, $1, $2, 8, 4;", &[0xF5, 0], 0x500);
    check("popc.b32 $0, $1;", &[0xF0F0], 8);
    check("clz.b32 $0, $1;", &[1], 31);
    check("clz.b32 $0, $1;", &[0], 32);
    check("brev.b32 $0, $1;", &[1], 1 << 31);
    check("bfind.u32 $0, $1;", &[0x100], 8);
    check("shf.l.wrap.b32 $0, $1, $2, 8;", &[0xAB00_0000, 0x12], 0x12AB);
    check("dp4a.s32.s32 $0, $1, $2, $3;", &[0x0102_03FF, 0x0101_0101, 10], 15);
}

#[test]
fn floats() {
    check("add.f32 $0, $1, $2;", &[f(0.1), f(0.2)], f(0.1 + 0.2));
    check("sub.rn.f32 $0, $1, $2;", &[f(0.1), f(0.2)], f(0.1 - 0.2));
    check("mul.ftz.f32 $0, $1, $2;", &[f(1e-38), f(0.5)], 0);
    check("fma.rn.f32 $0, $1, $2, $3;", &[f(1.1), f(1.3), f(-1.43)], f(1.1f32.mul_add(1.3, -1.43)));
    check("min.f32 $0, $1, $2;", &[f(f32::NAN), f(2.0)], f(2.0));
    check("min.NaN.f32 $0, $1, $2;", &[f(f32::NAN), f(2.0)], f(f32::NAN));
    check("max.f32 $0, $1, $2;", &[f(-0.0), f(0.0)], f(0.0));
    check("abs.f32 $0, $1;", &[f(-2.5)], f(2.5));
    check("neg.f32 $0, $1;", &[f(2.5)], f(-2.5));
    check("ex2.approx.f32 $0, $1;", &[f(3.0)], f(8.0));
    check("lg2.approx.f32 $0, $1;", &[f(8.0)], f(3.0));
    check("rcp.approx.ftz.f32 $0, $1;", &[f(4.0)], f(0.25));
    check("rsqrt.approx.f32 $0, $1;", &[f(4.0)], f(0.5));
    check("div.approx.f32 $0, $1, $2;", &[f(6.0), f(-3.0)], f(-2.0));
    check("div.approx.f32 $0, $1, $2;", &[f(1e38), f(-2e38)], f(-0.0));
    check("div.approx.f32 $0, $1, $2;", &[f(f32::INFINITY), f(2e38)], f(f32::NAN));
    check("div.full.f32 $0, $1, $2;", &[f(1e38), f(-2e38)], f(-0.5));
    check("sqrt.rn.f32 $0, $1;", &[f(2.0)], f(2f32.sqrt()));
    check("sin.approx.f32 $0, $1;", &[f(0.0)], f(0.0));
    check("cos.approx.f32 $0, $1;", &[f(0.0)], f(1.0));
    check("tanh.approx.f32 $0, $1;", &[f(100.0)], f(1.0));
    check("add.sat.f32 $0, $1, $2;", &[f(0.75), f(0.75)], f(1.0));
    check("mov.f32 $0, 0f3F800000;", &[], f(1.0));
    // Packed halves: 1.5 + 2 and -1 + 0.5.
    check("add.f16x2 $0, $1, $2;", &[0xBC00_3E00, 0x3800_4000], 0xB800_4300);
    check("fma.rn.bf16x2 $0, $1, $2, $3;", &[0x3F80_4000, 0x4000_4000, 0x3F80_3F80], 0x4040_40A0);
}

#[test]
fn conversions() {
    check("cvt.rni.s32.f32 $0, $1;", &[f(2.5)], 2);
    check("cvt.rzi.s32.f32 $0, $1;", &[f(-2.7)], -2i32 as u32);
    check("cvt.rmi.s32.f32 $0, $1;", &[f(-2.1)], -3i32 as u32);
    check("cvt.rpi.s32.f32 $0, $1;", &[f(2.1)], 3);
    check("cvt.rzi.u32.f32 $0, $1;", &[f(-1.0)], 0);
    check("cvt.rzi.s32.f32 $0, $1;", &[f(f32::NAN)], 0);
    check("cvt.rzi.s32.f32 $0, $1;", &[f(1e20)], i32::MAX as u32);
    check("cvt.rn.f32.s32 $0, $1;", &[-7i32 as u32], f(-7.0));
    check("cvt.rn.f32.u32 $0, $1;", &[u32::MAX], f(u32::MAX as f32));
    check("cvt.rz.f32.u32 $0, $1;", &[u32::MAX], f(u32::MAX as f32) - 1);
    check("cvt.rp.f32.s32 $0, $1;", &[0x0100_0001], f(16_777_218.0));
    check("cvt.rz.bf16.f32 $0, $1;", &[f(1.999)], 0x3FFF);
    check("cvt.ftz.f64.f32 $0, $1;", &[f(-1e-40)], 0);
    check("cvt.rn.ftz.f16.f32 $0, $1;", &[f(1e-6)], 0x11);
    check("cvt.rni.f32.f32 $0, $1;", &[f(3.5)], f(4.0));
    check("cvt.s32.s8 $0, $1;", &[0xFF], u32::MAX);
    check("cvt.u32.u8 $0, $1;", &[0x1FF], 0xFF);
    check("cvt.sat.u8.s32 $0, $1;", &[300], 255);
    check("cvt.rn.bf16x2.f32 $0, $1, $2;", &[f(1.0), f(2.0)], 0x3F80_4000);
    check("cvt.rn.relu.f16x2.f32 $0, $1, $2;", &[f(-1.0), f(2.0)], 0x0000_4000);
    check("cvt.rn.satfinite.e4m3x2.f32 $0, $1, $2;", &[f(1e9), f(1.0)], 0x7E38);
    check("cvt.rn.satfinite.e5m2x2.f32 $0, $1, $2;", &[f(-1e9), f(1.0)], 0xFB3C);
    check("cvt.rn.f16x2.e4m3x2 $0, $1;", &[0x38B8], 0x3C00_BC00);
    check("cvt.rna.tf32.f32 $0, $1;", &[0x3F80_1000], 0x3F80_2000);
    let halves = execute("cvt.rn.f16.f32 $0, $1;", 1, &Ty::Int(16), &[(Ty::Float, u64::from(f(0.1)))]).unwrap();
    assert_eq!(bits(&halves), num::encode(DType::F16, f64::from(0.1f32)));
    let wide = execute("cvt.f64.f32 $0, $1;", 1, &Ty::Double, &[(Ty::Float, u64::from(f(0.1)))]).unwrap();
    assert_eq!(f64::from_bits(bits(&wide)), f64::from(0.1f32));
}

#[test]
fn several_instructions_with_registers_and_predicates() {
    let text = r"{
        .reg .pred p, q;          // where x is the lesser
        .reg .b32 t<2>;
        .reg .f32 half;
        setp.lt.s32 p|q, $1, $2;
        selp.b32 t0, $1, $2, p;
        mov.b32 t1, 0; /* not yet */
        @q add.s32 t1, t1, 100;
        @!q mov.b32 t1, 200;
        add.s32 $0, t0, t1;
    }";
    check(text, &[3, 9], 203);
    check(text, &[9, 3], 103);
    check(
        "{.reg .pred p; setp.ge.and.f32 p, $1, 0f00000000, 1; selp.f32 $0, 0f3F800000, 0f00000000, p;}",
        &[f(2.0)],
        f(1.0),
    );
    // Multi-line text, as LLVM escapes it.
    check("{\\0A.reg .b32 t;\\0A\\09add.u32 t, $1, 1;\\0A\\09mov.u32 $0, t;\\0A}", &[4], 5);
    let swap = execute(
        "{ .reg .b16 a, b; mov.b32 {a, b}, $2; mov.b32 $0, {b, a}; mul.wide.u16 $1, a, b; }",
        2,
        &Ty::Struct(vec![Ty::Int(32), Ty::Int(32)]),
        &[(Ty::Int(32), 0x0003_0005)],
    );
    let swap = swap.unwrap();
    assert_eq!((bits(&swap.element(0)), bits(&swap.element(1))), (0x0005_0003, 15));
    let wide = execute(
        "mad.wide.s32 $0, $1, $2, $3;",
        1,
        &Ty::Int(64),
        &[(Ty::Int(32), 0xFFFF_FFFF), (Ty::Int(32), 5), (Ty::Int(64), 7)],
    );
    assert_eq!(bits(&wide.unwrap()) as i64, 2);
}

#[test]
fn unsupported_instructions_are_named() {
    for (text, named) in [
        ("frobnicate.b32 $0, $1;", "frobnicate.b32"),
        ("add.rx.f32 $0, $1, $1;", "add.rx.f32"),
        ("add.rna.f32 $0, $1, $1;", "add.rna.f32"),
        ("add.ftz.rz.f32 $0, $1, $1;", "add.ftz.rz.f32"),
        ("add.rz.rm.f32 $0, $1, $1;", "add.rz.rm.f32"),
        ("add.cc.u32 $0, $1, $1;", "add.cc.u32"),
        ("add.sat.u32 $0, $1, $1;", "add.sat.u32"),
        ("mul.u32 $0, $1, $1;", "mul.u32"),
        ("mad.hi.sat.s32 $0, $1, $1, $1;", "mad.hi.sat.s32"),
        ("add.ftz.f64 $0, $1, $1;", "add.ftz.f64"),
        ("add.rz.f16 $0, $1, $1;", "add.rz.f16"),
        ("add.sat.bf16x2 $0, $1, $1;", "add.sat.bf16x2"),
        ("fma.f32 $0, $1, $1, $1;", "fma.f32"),
        ("sqrt.f32 $0, $1;", "sqrt.f32"),
        ("min.xorsign.abs.f32 $0, $1, $1;", "min.xorsign.abs.f32"),
        ("prmt.b32.f4e $0, $1, $1, 0;", "prmt.b32.f4e"),
        ("cvt.s32.f32 $0, $1;", "cvt.s32.f32"),
        ("cvt.rn.s32.f32 $0, $1;", "cvt.rn.s32.f32"),
        ("cvt.f32.s32 $0, $1;", "cvt.f32.s32"),
        ("cvt.rni.f32.s32 $0, $1;", "cvt.rni.f32.s32"),
        ("cvt.rn.tf32.f32 $0, $1;", "cvt.rn.tf32.f32"),
        ("cvt.rn.e4m3x2.f32 $0, $1, $1;", "cvt.rn.e4m3x2.f32"),
        ("{ .reg .pred p; setp.lt.and.f32 p, $1, $1; mov.b32 $0, 0; }", "setp.lt.and.f32"),
        ("{ .reg .pred p; setp.lt.ftz.s32 p, $1, $1; mov.b32 $0, 0; }", "setp.lt.ftz.s32"),
        ("mov.b32 $0, %tid.x;", "%tid.x"),
        ("bar.sync 0;", "bar.sync 0"),
        ("ld.global.b32 $0, [$1];", "ld.global.b32"),
        ("again: add.s32 $0, $1, $1;", "again:"),
        ("{ .reg .b32 t; add.s32 $0, t, $1; }", "`t` is read"),
        ("{ .reg .b32 t<x>; mov.b32 $0, $1; }", "t<x>"),
        ("{ .reg; mov.b32 $0, $1; }", "declaration"),
        ("@p", "guard"),
        ("mov.b32 {$0, $0, $0}, $1;", "3 parts"),
        ("add.f32 $0, $1, 1;", "`1` is not"),
        ("add.f32 $0, $1, 0f3F8;", "0f3F8"),
        ("{ .reg .b32 t; add.s32 t, $1, 1; vote.sync.ballot.b32 $0, t, 1; }", "vote.sync.ballot.b32"),
        ("add.s32 $0, $1, missing;", "missing"),
        ("add.s32 $0, $1, $9;", "$9"),
        ("mov.b32 nowhere, $1;", "nowhere"),
    ] {
        let error = run32(text, &[1]).expect_err(text);
        assert!(error.contains(named), "{text}: {error}");
    }
}

/// Guards skip or execute statements; a register that was not written is undefined.
#[test]
fn guards_and_ties() {
    let text = "{ .reg .pred p; setp.gt.s32 p, $1, 0; @p mov.b32 $0, 7; }";
    check(text, &[1], 7);
    assert!(matches!(execute(text, 1, &Ty::Int(32), &[(Ty::Int(32), 0)]), Ok(Value::Undef)));
    // The output is tied to the second input.
    let constraints = ["=r", "r", "0"].map(String::from);
    let types = [Ty::Int(32), Ty::Int(32)];
    for (text, expected) in [("add.s32 $0, $0, $1;", 12), ("", 5)] {
        let program = Program::parse(text, &constraints, &Ty::Int(32), types.iter()).unwrap();
        assert_eq!(bits(&program.run(&Ty::Int(32), &[7, 5]).unwrap()), expected, "{text}");
    }
    for constraints in [["=r", "r", "3"], ["r", "r", "r"]] {
        Program::parse("", &constraints.map(String::from), &Ty::Int(32), types.iter()).expect_err("wrong constraints");
    }
}

/// Every instruction listed in error messages is supported.
#[test]
fn listed_instructions_are_supported() {
    for name in known_instructions() {
        let arithmetic = super::float::PATTERNS.iter().chain(super::integer::PATTERNS);
        let patterns: Vec<_> = arithmetic.filter(|p| p.ops.split(' ').any(|op| op == name)).collect();
        assert!(!patterns.is_empty() || ["cvt", "mov", "selp", "setp"].contains(&name), "{name}");
        for pattern in patterns {
            for ty in pattern.types.split(' ') {
                let modifiers: Vec<&str> = pattern.modifiers.split_whitespace().collect();
                // The first member of each group.
                let first = |group: &&str| format!(".{}", group.trim_end_matches('?').split('|').next().unwrap());
                let modifiers: String = modifiers.iter().map(first).collect();
                let types = if name == "dp4a" { format!(".{ty}.{ty}") } else { format!(".{ty}") };
                let declared = if ty == "pred" { "pred" } else { "b64" };
                let known = (1..=4).any(|n| {
                    let sources = ["b", "c", "d", "e"][..n].join(", ");
                    let zero = |r: &str| match ty {
                        "pred" => format!("setp.eq.u32 {r}, 0, 0;"),
                        _ => format!("mov.b64 {r}, 0;"),
                    };
                    let zeros: String = ["b", "c", "d", "e"].map(zero).concat();
                    let text = format!(
                        "{{ .reg .{declared} a, b, c, d, e; {zeros} {name}{modifiers}{types} a, {sources}; mov.b32 $0, 0; }}"
                    );
                    run32(&text, &[]).is_ok()
                });
                assert!(known, "{name}{modifiers}{types}");
            }
        }
    }
}

#[test]
fn llvm_conversions_round_once() {
    // Above the tie by less than an f32 can represent.
    let x = 2049.0 + 1e-10;
    assert_eq!(
        value::cast("fptrunc", &Ty::Double, f64::to_bits(x), &Ty::Half).unwrap(),
        num::encode(DType::F16, 2050.0)
    );
    let x = 257.0 + 1e-9;
    assert_eq!(
        value::cast("fptrunc", &Ty::Double, f64::to_bits(x), &Ty::BFloat).unwrap(),
        num::encode(DType::BF16, 258.0)
    );
    // Values such as 2^24 + 2^15·3 + 1, which would become ties if converted by way of f64 or f32.
    for n in [0x0100_0001_0000_0001_u64, (1 << 60) + (1 << 52) + 1, (1 << 62) + (1 << 54) + 1] {
        assert_eq!(
            value::cast("uitofp", &Ty::Int(64), n, &Ty::BFloat).unwrap(),
            num::convert(DType::U64, DType::BF16, n)
        );
        assert_eq!(value::cast("sitofp", &Ty::Int(64), n, &Ty::Float).unwrap(), u64::from((n as f32).to_bits()));
    }
    // A product and a sum of halves whose f64 sum would be a tie.
    let [a, b, c] = [0x3C01u64, 0x3C01, 0x0001];
    let fma = Intrinsic::parse("llvm.fma.f16")
        .expect("an intrinsic")
        .evaluate(&Ty::Half, &[(&Ty::Half, a), (&Ty::Half, b), (&Ty::Half, c)]);
    assert_eq!(bits(&fma.unwrap()), num::fused_multiply_add(DType::F16, a, b, c));
}
