//! Blocks far outside of their tensors, at offsets that exceed the 32 bits of a TMA coordinate, compared with the
//! interpreter.

use crate::ir::DType;
use crate::lower::nvptx::{GpuModule, lower};
use crate::num;
use crate::pipeline::gpu_ir;
use crate::target::{CompileOptions, GpuArch, Schedule};
use crate::testgen::check::simulate;
use crate::testgen::{Argument, Program};

/// Accumulates dots of four tiles of `x` with a tile of `w`; the offset in `x` starts at (`o`, `p`) and advances by `s`
/// rows.
const DOT: &str = "kernel @k(%x: ptr<bf16> {divisible_by = 16}, %w: ptr<bf16> {divisible_by = 16}, %y: ptr<f32>, %rows: i32, %columns: i32 {divisible_by = 16}, %o: i64, %p: i64 {divisible_by = 16}, %s: i64) {
  %zero = constant {value = 0} : i64
  %one = constant {value = 1} : i64
  %d = constant {value = 128} : i64
  %n = constant {value = 64} : i64
  %m = cast %rows : i64
  %k = cast %columns : i64
  %first = constant {value = 0} : i32
  %by = constant {value = 1} : i32
  %steps = constant {value = 4} : i32
  %none = constant {value = 0.0} : tensor<64x64xf32>
  %x0 = make_view %x, %m, %k, %d, %one, %o, %p {order = [1, 0]} : view<64x64xbf16>
  %wv = make_view %w, %n, %n, %n, %one, %zero, %zero {order = [1, 0]} : view<64x64xbf16>
  %sum, %xe = for %first, %steps, %by, %none, %x0 : tensor<64x64xf32>, view<64x64xbf16> (%i: i32, %acc: tensor<64x64xf32>, %xv: view<64x64xbf16>) {
    %xt = load_view %xv {boundary = [0, 1], padding = zero, eviction = normal} : tensor<64x64xbf16>
    %wt = load_view %wv {boundary = [], padding = zero, eviction = normal} : tensor<64x64xbf16>
    %next = dot %xt, %wt, %acc {precision = ieee} : tensor<64x64xf32>
    %xn = advance %xv, %s, %zero : view<64x64xbf16>
    yield %next, %xn
  }
  %yv = make_view %y, %n, %n, %n, %one, %zero, %zero {order = [1, 0]} : view<64x64xf32>
  store_view %yv, %sum {boundary = [], eviction = normal}
  return
}
";

/// Adds ones to rows of `y`, starting at row `o`.
const ADD: &str = "kernel @k(%y: ptr<f32> {divisible_by = 16}, %rows: i32, %o: i64) {
  %zero = constant {value = 0} : i64
  %one = constant {value = 1} : i64
  %n = constant {value = 32} : i64
  %m = cast %rows : i64
  %t = constant {value = 1.0} : tensor<64x32xf32>
  %v = make_view %y, %m, %n, %n, %one, %o, %zero {order = [1, 0]} : view<64x32xf32>
  atomic_view %v, %t {op = add, boundary = [0]}
  return
}
";

fn bytes(dtype: DType, numbers: impl Iterator<Item = f64>) -> Vec<u8> {
    numbers.flat_map(|x| num::encode(dtype, x).to_le_bytes()[..dtype.bytes()].to_vec()).collect()
}

fn program(text: &str, args: Vec<Argument>) -> Program {
    let func = crate::text::parse(text).unwrap_or_else(|e| panic!("{e}"));
    Program { func, args, grid: [1; 3] }
}

fn module(program: &Program, specialize: bool) -> GpuModule {
    let schedule = Schedule { tma: Some(true), warp_specialize: specialize.then_some(true), ..Schedule::default() };
    let options = CompileOptions { num_warps: 4, num_stages: 3, schedule, ..CompileOptions::default() };
    let gpu_func = gpu_ir(&program.func, GpuArch::Sm90a, &options, &mut ());
    lower(&gpu_func, GpuArch::Sm90a, &options).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn out_of_bounds_loads_read_padding() {
    const I32: i64 = 1 << 31;
    // Modulo 2^32, these offsets would lie inside of the tensor.
    let near = [0, -20, 30, 63, 64, -64];
    let turns = [0, 1, -1, 2, -2, 1 << 20, -(1 << 20)];
    let mut places: Vec<[i64; 3]> = turns.iter().flat_map(|t| near.map(|n| [2 * I32 * t + n, 0, 16])).collect();
    places.extend(turns.iter().flat_map(|t| [0, -16, 32, 64, -64].map(|n| [0, 2 * I32 * t + n, 16])));
    for edge in [I32, -I32] {
        places.extend([-65, -64, -1, 0, 1, 64].map(|n| [edge + n, 0, 1]));
        places.extend([-80, -64, -16, 0, 16, 64].map(|n| [0, edge + n, 0]));
    }
    // Steps from one end of the i32 range to the other, and from far outside into the tensor.
    places.extend([[-3 * I32, 0, I32], [2 * I32, 0, -I32], [0, 0, 2 * I32], [16, 0, -2 * I32 + 1]]);
    places.extend([[i64::MAX - 300, 0, 64], [i64::MIN, 0, 64], [0, i64::MAX - 127, 0], [0, i64::MIN, 0]]);
    let x = bytes(DType::BF16, (0..100 * 128).map(|i| f64::from(i % 17)));
    let w = bytes(DType::BF16, (0..64 * 64).map(|i| f64::from(u8::from(i % 65 == 0))));
    for specialize in [false, true] {
        let mut code = None;
        for &[o, p, s] in &places {
            let args = vec![
                Argument::Input { dtype: DType::BF16, bytes: x.clone() },
                Argument::Input { dtype: DType::BF16, bytes: w.clone() },
                Argument::Output { dtype: DType::F32, bytes: vec![0x55; 64 * 64 * 4] },
            ];
            let numbers = [90, 96, o, p, s].map(Argument::Int);
            let program = program(DOT, args.into_iter().chain(numbers).collect());
            let module = code.get_or_insert_with(|| module(&program, specialize));
            assert!(module.tensor_maps.len() == 2, "threads copy");
            let expected = program.interpret().unwrap_or_else(|e| panic!("{e}"));
            let found = simulate(&program, &program.func, module, 1).unwrap_or_else(|e| panic!("{e}"));
            assert!(found == expected, "at ({o}, {p}) with steps of {s}, specialized: {specialize}");
            let outside = [o, p].iter().any(|at| at.unsigned_abs() > 1 << 30) && s.abs() < I32;
            assert!(!outside || found[0].iter().all(|&byte| byte == 0), "numbers at ({o}, {p})");
        }
    }
}

#[test]
fn out_of_bounds_reductions_write_nothing() {
    let mut code = None;
    for o in [0, 90, -64, 1 << 31, 1 << 32, -(1 << 32), (1 << 32) + 20, i64::MAX - 63, i64::MIN, (1 << 40) - 63] {
        let y = bytes(DType::F32, (0..100 * 32).map(f64::from));
        let args = vec![Argument::Output { dtype: DType::F32, bytes: y }, Argument::Int(100), Argument::Int(o)];
        let program = program(ADD, args);
        let module = code.get_or_insert_with(|| module(&program, false));
        assert!(module.llvm_ir.contains("cp.reduce.async.bulk"), "threads add");
        let expected = program.interpret().unwrap_or_else(|e| panic!("{e}"));
        let found = simulate(&program, &program.func, module, 1).unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(found, expected, "at {o}");
    }
}

/// If offsets are known to be i32, no clamps are generated.
#[test]
fn i32_offsets_are_not_clamped() {
    let far = module(&program(DOT, Vec::new()), false);
    let narrow = DOT
        .replace("%o: i64", "%o32: i32")
        .replace("%zero = constant", "%o = cast %o32 : i64\n  %zero = constant")
        .replace("advance %xv, %s, %zero", "advance %xv, %zero, %zero")
        .replace("[0, 1], padding", "[0], padding");
    let near = module(&program(&narrow, Vec::new()), false);
    let clamps = |module: &GpuModule| module.llvm_ir.matches("call i64 @llvm.smin.i64").count();
    assert!(clamps(&far) > 0);
    assert_eq!(clamps(&near), 0);
}
