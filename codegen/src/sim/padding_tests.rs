//! Dots of tiles that extend beyond their matrices: the padding is not multiplied. Results are compared with sums in
//! f64.

use super::tests::{relative_error, run_two_inputs, uniform};
use crate::ir::{DType, Func};
use crate::num;
use crate::target::{CompileOptions, GpuArch, Schedule};

/// A GEMM c [m, n] = a [m, k] · b [k, n] by one program, in tiles [m, k_tile] and [k_tile, n_tile], padded with zeros
/// beyond k and n.
struct Gemm {
    dtype: DType,
    shape: [usize; 3],
    k_tile: usize,
    n_tile: usize,
}

impl Gemm {
    fn func(&self) -> Func {
        let [m, n, k] = self.shape;
        let (t, kt, nt) = (self.dtype, self.k_tile, self.n_tile);
        let precision = if t == DType::F32 { "tf32x3" } else { "ieee" };
        // If one tile covers all of K, its offset is constant.
        let (open, next, close) = match k.div_ceil(kt) {
            1 => ("", "", String::new()),
            steps => (
                "%sum, %ae, %be = for %from, %to, %by, %none, %a0, %b0 : tensor<MxNxf32>, view<MxKxT>, view<KxNxT> (%i: i32, %acc: tensor<MxNxf32>, %av: view<MxKxT>, %bv: view<KxNxT>) {",
                "%an = advance %av, %zero, %step : view<MxKxT>
                 %bn = advance %bv, %step, %zero : view<KxNxT>
                 yield %next, %an, %bn
               }",
                format!("%to = constant {{value = {steps}}} : i32"),
            ),
        };
        let (av, bv, acc, sum) =
            if open.is_empty() { ("%a0", "%b0", "%none", "%next") } else { ("%av", "%bv", "%acc", "%sum") };
        let text = format!(
            "kernel @gemm(%a: ptr<T> {{divisible_by = 16}}, %b: ptr<T> {{divisible_by = 16}}, %c: ptr<f32> {{divisible_by = 16}}) {{
               %m = constant {{value = {m}}} : i64
               %n = constant {{value = {n}}} : i64
               %k = constant {{value = {k}}} : i64
               %zero = constant {{value = 0}} : i64
               %one = constant {{value = 1}} : i64
               %step = constant {{value = {kt}}} : i64
               %from = constant {{value = 0}} : i32
               %by = constant {{value = 1}} : i32
               {close}
               %a0 = make_view %a, %m, %k, %k, %one, %zero, %zero {{order = [1, 0]}} : view<MxKxT>
               %b0 = make_view %b, %k, %n, %n, %one, %zero, %zero {{order = [1, 0]}} : view<KxNxT>
               %cv = make_view %c, %m, %n, %n, %one, %zero, %zero {{order = [1, 0]}} : view<MxNxf32>
               %none = constant {{value = 0.0}} : tensor<MxNxf32>
               {open}
               %at = load_view {av} {{boundary = [1], padding = zero, eviction = normal}} : tensor<MxKxT>
               %bt = load_view {bv} {{boundary = [0, 1], padding = zero, eviction = normal}} : tensor<KxNxT>
               %next = dot %at, %bt, {acc} {{precision = {precision}}} : tensor<MxNxf32>
               {next}
               store_view %cv, {sum} {{boundary = [1], eviction = normal}}
               return
             }}
             ",
        );
        let text = text.replace("xT>", &format!("x{t}>")).replace("<T>", &format!("<{t}>"));
        let text = text.replace("MxK", &format!("{m}x{kt}")).replace("KxN", &format!("{kt}x{nt}"));
        let text = text.replace("MxN", &format!("{m}x{nt}"));
        crate::text::parse(&text).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    /// Random elements: their bytes, and their values.
    fn numbers(&self, count: usize, seed: u32) -> (Vec<u8>, Vec<f64>) {
        let bytes = self.dtype.bytes();
        let bits: Vec<u64> = uniform(seed).take(count).map(|x| num::encode(self.dtype, f64::from(x))).collect();
        let memory = bits.iter().flat_map(|bits| bits.to_le_bytes().into_iter().take(bytes)).collect();
        (memory, bits.iter().map(|&bits| num::decode(self.dtype, bits)).collect())
    }

    /// Runs the GEMM on the simulator; returns the relative error and the code.
    fn error(&self, arch: GpuArch, options: &CompileOptions) -> (f64, String) {
        let [m, n, k] = self.shape;
        let ((a, a_values), (b, b_values)) = (self.numbers(m * k, 1), self.numbers(k * n, 2));
        let (found, code) = run_two_inputs(&self.func(), arch, options, [a, b], m * n, 7);
        let sum = |i, j| (0..k).map(|l| a_values[i * k + l] * b_values[l * n + j]).sum();
        let expected: Vec<f64> = (0..m * n).map(|at| sum(at / n, at % n)).collect();
        (relative_error(&expected, &found), code)
    }
}

fn options(num_warps: u32) -> CompileOptions {
    let schedule = Schedule { wgmma_f32: Some(true), ..Schedule::default() };
    CompileOptions { num_warps, num_stages: 2, schedule, ..CompileOptions::default() }
}

/// A single tile along K that exceeds the matrix: fewer and narrower instructions.
#[test]
fn padding_is_not_multiplied() {
    for (dtype, k, k_instruction) in [(DType::F32, 40, 8), (DType::BF16, 48, 16)] {
        let gemm = Gemm { dtype, shape: [64, 24, k], k_tile: 64, n_tile: 64 };
        for (arch, num_warps) in [(GpuArch::Sm80, 4), (GpuArch::Sm90a, 4), (GpuArch::Sm90a, 8)] {
            let (error, code) = gemm.error(arch, &options(num_warps));
            assert!(error < 3e-7, "{dtype} on {arch:?} by {num_warps} warps: {error}");
            let products = |name: &str| code.matches(name).count();
            let (parts, steps) = (if dtype == DType::F32 { 3 } else { 1 }, k / k_instruction);
            match (arch, num_warps) {
                // Three of the eight n8 tiles of a warp.
                (GpuArch::Sm80, _) => assert_eq!(products("mma.sync.aligned.m16n8"), parts * steps * 3, "{dtype}"),
                (_, 4) => assert_eq!(products("wgmma.mma_async.sync.aligned.m64n24k"), parts * steps, "{dtype}"),
                // Two warpgroups along N share one instruction shape.
                _ => assert_eq!(products("wgmma.mma_async.sync.aligned.m64n32k"), parts * steps, "{dtype}"),
            }
        }
    }
}

/// Accumulation over many tiles whose last columns are padding, with asynchronous MMAs in flight across iterations.
#[test]
fn padded_columns_stay_zero() {
    for dtype in [DType::F32, DType::BF16] {
        for (n, n_tile) in [(40, 64), (264, 512), (8, 16)] {
            let gemm = Gemm { dtype, shape: [64, n, 96], k_tile: 32, n_tile };
            for (arch, num_warps) in [(GpuArch::Sm80, 4), (GpuArch::Sm90a, 4)] {
                let (error, _) = gemm.error(arch, &options(num_warps));
                assert!(error < 3e-7, "{dtype}, {n} of {n_tile} columns on {arch:?}: {error}");
            }
        }
    }
}
