//! GEMMs in f32 on wgmma, compared with sums in f64.

use super::tests::{relative_error, run_two_inputs, uniform};
use crate::ir::Func;
use crate::lower::nvptx::lower;
use crate::pipeline::gpu_ir;
use crate::target::{CompileOptions, GpuArch, Schedule};

/// A GEMM c [m, n] = a [m, k] · b [k, n] by one program, `k_tile` of k per iteration.
struct Gemm {
    shape: [usize; 3],
    k_tile: usize,
    /// Whether the first dimension of a and of b is contiguous (column-major).
    columns: [bool; 2],
    precision: &'static str,
}

impl Gemm {
    fn func(&self) -> Func {
        let [m, n, k] = self.shape;
        let kt = self.k_tile;
        let order = |columns: bool| if columns { "[0, 1]" } else { "[1, 0]" };
        let strides = |columns: bool, rows: usize, cols: usize| if columns { [1, rows] } else { [cols, 1] };
        let ([am, ak], [bk, bn]) = (strides(self.columns[0], m, k), strides(self.columns[1], k, n));
        let [oa, ob] = self.columns.map(order);
        let precision = self.precision;
        let text = format!(
            "kernel @gemm(%a: ptr<f32> {{divisible_by = 16}}, %b: ptr<f32> {{divisible_by = 16}}, %c: ptr<f32> {{divisible_by = 16}}) {{
  %m = constant {{value = {m}}} : i64
  %n = constant {{value = {n}}} : i64
  %k = constant {{value = {k}}} : i64
  %am = constant {{value = {am}}} : i64
  %ak = constant {{value = {ak}}} : i64
  %bk = constant {{value = {bk}}} : i64
  %bn = constant {{value = {bn}}} : i64
  %zero = constant {{value = 0}} : i64
  %one = constant {{value = 1}} : i64
  %step = constant {{value = {kt}}} : i64
  %from = constant {{value = 0}} : i32
  %to = constant {{value = {steps}}} : i32
  %by = constant {{value = 1}} : i32
  %av = make_view %a, %m, %k, %am, %ak, %zero, %zero {{order = {oa}}} : view<{m}x{kt}xf32>
  %bv = make_view %b, %k, %n, %bk, %bn, %zero, %zero {{order = {ob}}} : view<{kt}x{n}xf32>
  %cv = make_view %c, %m, %n, %n, %one, %zero, %zero {{order = [1, 0]}} : view<{m}x{n}xf32>
  %none = constant {{value = 0.0}} : tensor<{m}x{n}xf32>
  %sum, %ae, %be = for %from, %to, %by, %none, %av, %bv : tensor<{m}x{n}xf32>, view<{m}x{kt}xf32>, view<{kt}x{n}xf32> (%i: i32, %acc: tensor<{m}x{n}xf32>, %ai: view<{m}x{kt}xf32>, %bi: view<{kt}x{n}xf32>) {{
    %at = load_view %ai {{boundary = [], padding = zero, eviction = normal}} : tensor<{m}x{kt}xf32>
    %bt = load_view %bi {{boundary = [], padding = zero, eviction = normal}} : tensor<{kt}x{n}xf32>
    %next = dot %at, %bt, %acc {{precision = {precision}}} : tensor<{m}x{n}xf32>
    %an = advance %ai, %zero, %step : view<{m}x{kt}xf32>
    %bnext = advance %bi, %step, %zero : view<{kt}x{n}xf32>
    yield %next, %an, %bnext
  }}
  store_view %cv, %sum {{boundary = [], eviction = normal}}
  return
}}
",
            steps = k / kt
        );
        crate::text::parse(&text).unwrap_or_else(|e| panic!("{e}"))
    }

    fn expected(&self, a: &[f32], b: &[f32]) -> Vec<f64> {
        let [m, n, k] = self.shape;
        let at = |i: usize, l: usize| a[if self.columns[0] { l * m + i } else { i * k + l }];
        let bt = |l: usize, j: usize| b[if self.columns[1] { j * k + l } else { l * n + j }];
        let sum = |i, j| (0..k).map(|l| f64::from(at(i, l)) * f64::from(bt(l, j))).sum();
        (0..m * n).map(|at| sum(at / n, at % n)).collect()
    }

    /// Runs the GEMM on the simulator; returns the relative error and the code.
    fn error(&self, options: &CompileOptions) -> (f64, String) {
        let [m, n, k] = self.shape;
        let numbers = |count: usize, seed: u32| uniform(seed).take(count).collect::<Vec<f32>>();
        let (a, b) = (numbers(m * k, 1), numbers(k * n, 2));
        let inputs = [&a, &b].map(|x| x.iter().flat_map(|x| x.to_le_bytes()).collect());
        let (found, code) = run_two_inputs(&self.func(), GpuArch::Sm90a, options, inputs, m * n, 5);
        (relative_error(&self.expected(&a, &b), &found), code)
    }
}

fn wgmma_f32_options(num_warps: u32, num_stages: u32) -> CompileOptions {
    let schedule = Schedule { wgmma_f32: Some(true), ..Schedule::default() };
    CompileOptions { num_warps, num_stages, schedule, ..CompileOptions::default() }
}

#[test]
fn operands_may_be_row_or_column_major() {
    for columns in [[false, true], [false, false], [true, true], [true, false]] {
        for (precision, most) in [("tf32", 1e-3), ("tf32x3", 3e-7)] {
            let gemm = Gemm { shape: [64, 32, 96], k_tile: 32, columns, precision };
            let (error, code) = gemm.error(&wgmma_f32_options(4, 2));
            assert!(code.contains("wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32"), "{columns:?}, {precision}");
            assert!(error < most, "{columns:?}, {precision}: {error}");
        }
    }
}

#[test]
fn tiles_of_several_instructions_and_warpgroups() {
    for (shape, k_tile, num_warps, num_stages) in
        [([128, 64, 64], 32, 8, 3), ([64, 64, 64], 16, 8, 3), ([128, 16, 24], 8, 4, 1), ([128, 128, 32], 16, 8, 2)]
    {
        for columns in [[false, true], [true, false]] {
            let gemm = Gemm { shape, k_tile, columns, precision: "tf32x3" };
            let (error, _) = gemm.error(&wgmma_f32_options(num_warps, num_stages));
            assert!(error < 3e-7, "{shape:?} by {k_tile}, {columns:?}: {error}");
        }
    }
}

/// `mma.sync` is as accurate as wgmma: an odd number of steps along K, and tiles of several instructions.
#[test]
fn mma_sync_and_wgmma_agree() {
    for columns in [[false, true], [false, false], [true, true], [true, false]] {
        for (precision, most) in [("tf32", 1e-3), ("tf32x3", 3e-7)] {
            for (shape, k_tile) in [([64, 32, 96], 32), ([32, 64, 24], 8), ([16, 16, 32], 16)] {
                let gemm = Gemm { shape, k_tile, columns, precision };
                let (error, code) = gemm.error(&CompileOptions { num_warps: 4, ..CompileOptions::default() });
                assert!(code.contains("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"), "{columns:?}, {shape:?}");
                assert!(error < most, "{precision}, {columns:?}, {shape:?}: {error}");
            }
        }
    }
}

/// If shared memory has room for one block per SM only, `minctasm` tells the assembler, which otherwise saves registers
/// for a second block.
#[test]
fn single_resident_block_sets_minctasm() {
    let code = |k_tile| {
        let gemm = Gemm { shape: [64, 64, 256], k_tile, columns: [false, true], precision: "tf32x3" };
        let options = CompileOptions { num_warps: 8, num_stages: 2, ..CompileOptions::default() };
        let gpu_func = gpu_ir(&gemm.func(), GpuArch::Sm90a, &options, &mut ());
        let module = lower(&gpu_func, GpuArch::Sm90a, &options).unwrap_or_else(|e| panic!("{e}"));
        (module.shared_bytes, module.llvm_ir.contains("\"nvvm.minctasm\"=\"1\""))
    };
    let ((large, alone), (small, together)) = (code(128), code(32));
    assert!(large > 114 << 10 && alone && small < 114 << 10 && !together, "{large} {alone}, {small} {together}");
}

/// A NaN reaches its own row, whatever its bits are, and no other row.
#[test]
fn nan_stays_in_its_row() {
    let gemm = Gemm { shape: [64, 32, 32], k_tile: 32, columns: [false, true], precision: "tf32x3" };
    let [m, n, k] = gemm.shape;
    for options in [wgmma_f32_options(4, 2), CompileOptions { num_warps: 4, ..CompileOptions::default() }] {
        for bits in [0x7FFF_FFFFu32, 0xFFFF_FFFF, 0x7F80_0001, 0x7FC0_0000] {
            let mut a = vec![1f32; m * k];
            a[5 * k + 3] = f32::from_bits(bits);
            let inputs = [a, vec![1f32; k * n]].map(|x| x.iter().flat_map(|x| x.to_le_bytes()).collect());
            let (found, _) = run_two_inputs(&gemm.func(), GpuArch::Sm90a, &options, inputs, m * n, 5);
            for (at, x) in found.iter().enumerate() {
                assert!(if at / n == 5 { x.is_nan() } else { *x == k as f64 }, "{bits:x}: row {}, {x}", at / n);
            }
        }
    }
}
