//! Fused cross-warp reductions of elements of several sizes, on the simulated GPU.

use tilewright::prelude::*;
use tilewright_codegen::ir::DType;
use tilewright_codegen::target::GpuArch;
use tilewright_tests::consts;
use tilewright_tests::interpret::{Arg, Form, interpret};
use tilewright_tests::numerics::{HostTensor, Random};

/// For each row: whether any element of x is above 0.9; the sum of x in f64, its maximum in f16, and its sum in f32;
/// and the maximum of `small` in i8, with its index.
#[kernel]
fn several(x: In<f32>, small: In<f32>, y: Out<f32>, #[constexpr] rows: usize, #[constexpr] n: usize) {
    let i = arange(0, rows).expand_dims(1) * n + arange(0, n).expand_dims(0);
    let v = load(x + i);
    let above = any(v > 0.9, axis = 1);
    let exact = sum(v.to::<f64>(), axis = 1);
    let half = max(v.to::<f16>(), axis = 1);
    let total = sum(v, axis = 1);
    let (largest, place) = max_with_indices(load(small + i).to::<i8>(), axis = 1);
    let row = arange(0, rows) * 6;
    store(y + row, above.to::<f32>());
    store(y + (row + 1), exact.to::<f32>());
    store(y + (row + 2), half.to::<f32>());
    store(y + (row + 3), total);
    store(y + (row + 4), largest.to::<f32>());
    store(y + (row + 5), place.to::<f32>());
}

#[test]
fn fused_reductions_of_mixed_element_sizes() {
    const N: usize = 512;
    let mut random = Random::new(3);
    for rows in [1usize, 2, 8] {
        let x = HostTensor::random(DType::F32, &[rows, N], &[N, 1], &mut random);
        let small: Vec<f64> = (0..rows * N).map(|_| (random.number() * 127.0).round()).collect();
        let small = HostTensor::of(DType::F32, &[rows, N], &[N, 1], &small);
        let run = |form| {
            let mut y = HostTensor::poisoned(DType::F32, &[rows, 6], &[6, 1]);
            let args = &mut [Arg::In(&x), Arg::In(&small), Arg::Out(&mut y)];
            interpret(form, &SEVERAL, &[], consts! { rows = rows, n = N }, [1, 1, 1], args);
            y
        };
        let want = run(Form::Recorded).values();
        for (arch, num_warps) in [(GpuArch::Sm80, 2), (GpuArch::Sm80, 4), (GpuArch::Sm90a, 8), (GpuArch::Sm90a, 16)] {
            let found = run(Form::Simulated { arch, num_warps, num_stages: 1 });
            found.check(&format!("{rows} rows, {num_warps} warps"), &want, 1e-5);
        }
    }
}
