//! GPU numerics: every kernel, element type and odd shape on GPU 0, against f64 references, with poisoned outputs.
//!
//! The binary needs no other file: `make gpu-test` packages it for a GPU machine. Without a GPU each test prints that
//! it was skipped, and passes.

#[path = "gpu/attention.rs"]
mod attention;
#[path = "gpu/loops.rs"]
mod loops;
#[path = "gpu/training.rs"]
mod training;

use std::io::Write;
use std::sync::{Mutex, MutexGuard, OnceLock};
use tilewright::codegen::ir::DType;
use tilewright::kernels::matmul::Options;
use tilewright::kernels::{Tensor, TensorMut, matmul, softmax};
use tilewright::prelude::*;
use tilewright_tests::for_types;
use tilewright_tests::numerics::{HostTensor, Random, dense, tolerance};
use tilewright_tests::on_device::{
    ACTIVATIONS, ALIGNED_GAPS, ColumnMajor, DENSE, GAPS, STEPS, Spacing, check_matmul, check_scaled_matmul,
};

/// GPU 0, locked for one test at a time: a device fault ends all work in flight, and must be attributed to the test
/// that caused it.
struct Gpu {
    device: Device,
    _alone: MutexGuard<'static, ()>,
}

impl std::ops::Deref for Gpu {
    type Target = Device;
    fn deref(&self) -> &Device {
        &self.device
    }
}

/// The GPU; `None`, with a line on standard error, where there is no driver or no GPU. Any other error fails the test.
fn gpu() -> Option<Gpu> {
    static GPU: OnceLock<Option<Device>> = OnceLock::new();
    static ALONE: Mutex<()> = Mutex::new(());
    let gpu = GPU.get_or_init(|| match Device::cuda(0) {
        Ok(device) => Some(device),
        Err(error @ (Error::NoDriver { .. } | Error::NoSuchGpu { .. })) => {
            let why = error.to_string();
            // Not `println!`, which the test harness captures.
            let _ = writeln!(std::io::stderr(), "skipped: {}", why.lines().next().unwrap_or_default());
            None
        }
        Err(other) => panic!("{other}"),
    });
    let alone = ALONE.lock().unwrap_or_else(|failed| failed.into_inner());
    gpu.clone().map(|device| Gpu { device, _alone: alone })
}

/// One, odd, prime, round in decimal, and one more than a power of two.
const LENGTHS: [usize; 5] = [1, 17, 127, 1000, 4097];

/// Calls `check` for all pairs of lengths; with gaps only for small shapes, to keep the test short.
fn each_shape(mut check: impl FnMut([usize; 2], Spacing)) {
    for rows in LENGTHS {
        for d in LENGTHS {
            check([rows, d], DENSE);
            if rows * d <= 200_000 {
                check([rows, d], GAPS);
                check([rows, d], STEPS);
            }
        }
    }
    // Shapes and strides that are multiples of 16, for which launches specialize.
    check([64, 256], DENSE);
    check([128, 1024], ALIGNED_GAPS);
}

#[test]
fn column_sum() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_column_sum(&gpu, shape, spacing)));
}

#[test]
fn examples() {
    let Some(gpu) = gpu() else { return };
    for (name, run) in tilewright_tests::examples::EXAMPLES {
        run(&gpu).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
}

#[test]
fn weighted_sum_and_its_gradients() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_weighted_sum(&gpu, shape, spacing)));
}

#[test]
fn softmax_of_rows() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_softmax(&gpu, shape, spacing)));
    // The widest row of a single tile, and wider ones.
    for d in [16384, 16385, 50_000] {
        for_types!(check_softmax(&gpu, [3, d], GAPS));
    }
}

#[test]
fn rms_norm_and_its_gradients() {
    let Some(gpu) = gpu() else { return };
    each_shape(|shape, spacing| for_types!(check_rms_norm(&gpu, shape, spacing)));
    for d in [8192, 8193, 20_000] {
        for_types!(check_rms_norm(&gpu, [3, d], GAPS));
    }
}

#[test]
fn matmul_of_any_shape() {
    let Some(gpu) = gpu() else { return };
    let plain = ColumnMajor::default();
    for m in [1, 17, 127, 1000] {
        for n in [1, 17, 127, 1000] {
            for k in [1, 17, 127, 1000] {
                for_types!(check_matmul(&gpu, [m, n, k], DENSE, plain, Options::default()));
            }
        }
    }
    for shape in [[4097, 127, 17], [17, 4097, 127], [127, 17, 4097], [512, 768, 256]] {
        for_types!(check_matmul(&gpu, shape, DENSE, plain, Options::default()));
        for_types!(check_matmul(&gpu, shape, GAPS, plain, Options::default()));
    }
}

#[test]
fn matmul_swiglu_of_any_strides() {
    let Some(gpu) = gpu() else { return };
    let orders = [(false, false), (false, true), (true, true)];
    for columns in orders.map(|(a, b)| ColumnMajor { a, b, c: false }) {
        let small = [[17, 33, 5], [3, 4, 0], [0, 4, 3], [4, 0, 3], [1, 96, 64]].map(|shape| (shape, DENSE));
        let large = [([512, 384, 1024], DENSE), ([200, 130, 300], GAPS), ([1024, 768, 256], DENSE)];
        for (shape, spacing) in small.into_iter().chain(large) {
            for_types!(check_matmul_swiglu(&gpu, shape, spacing, columns));
        }
    }
}

#[test]
fn scaled_matmul_of_any_strides() {
    /// Relative error of sums in the 14 bits that Hopper's tensor cores keep.
    const IMPRECISE: f64 = 5e-3;
    let Some(gpu) = gpu() else { return };
    for columns in [ColumnMajor::default(), ColumnMajor { b: true, ..ColumnMajor::default() }] {
        for (shape, spacing) in [([512, 384, 1024], DENSE), ([200, 130, 300], GAPS), ([16, 512, 256], ALIGNED_GAPS)] {
            check_scaled_matmul::<F8E4M3, bf16>(&gpu, shape, spacing, columns, IMPRECISE);
            check_scaled_matmul::<F8E5M2, f32>(&gpu, shape, spacing, columns, IMPRECISE);
            check_scaled_matmul::<i8, i32>(&gpu, shape, spacing, columns, 0.0);
            check_scaled_matmul::<u8, f32>(&gpu, shape, spacing, columns, 0.0);
        }
    }
}

#[test]
fn matmul_of_any_strides() {
    let Some(gpu) = gpu() else { return };
    for bits in 0..8 {
        let columns = ColumnMajor { a: bits & 1 != 0, b: bits & 2 != 0, c: bits & 4 != 0 };
        for spacing in [DENSE, GAPS, ALIGNED_GAPS, STEPS] {
            for_types!(check_matmul(&gpu, [127, 65, 100], spacing, columns, Options::default()));
            for_types!(check_matmul(&gpu, [256, 128, 192], spacing, columns, Options::default()));
            check_matmul::<f64>(&gpu, [200, 150, 100], spacing, columns, Options::default());
        }
    }
}

#[test]
fn matmul_with_activations_and_precisions() {
    let Some(gpu) = gpu() else { return };
    for activation in ACTIVATIONS {
        let options = Options { activation, ..Options::default() };
        for_types!(check_matmul(&gpu, [200, 150, 100], DENSE, ColumnMajor::default(), options));
    }
    for precision in [Precision::Tf32, Precision::Tf32x3] {
        let options = Options { precision, ..Options::default() };
        for shape in [[1, 1, 1], [127, 65, 100], [256, 128, 192], [1000, 127, 1000]] {
            for columns in [ColumnMajor::default(), ColumnMajor { a: true, b: true, c: false }] {
                check_matmul::<f32>(&gpu, shape, DENSE, columns, options);
            }
        }
        // All tile sizes that f32 uses on Hopper, with the operand layouts of the three GEMMs of a linear layer
        // (forward, dgrad, wgrad).
        for shape in [[150, 140, 80], [1000, 1000, 72], [1500, 1600, 100]] {
            for (a, b) in [(false, true), (false, false), (true, false)] {
                check_matmul::<f32>(&gpu, shape, DENSE, ColumnMajor { a, b, c: false }, options);
            }
        }
    }
}

#[test]
fn empty_tensors() {
    let Some(gpu) = gpu() else { return };
    for shape in [[0, 5], [5, 0], [0, 0]] {
        for_types!(check_column_sum(&gpu, shape, DENSE));
        for_types!(check_weighted_sum(&gpu, shape, DENSE));
        for_types!(check_softmax(&gpu, shape, DENSE));
    }
    for_types!(check_rms_norm(&gpu, [0, 5], DENSE));
    for shape in [[0, 5, 3], [5, 0, 3], [5, 3, 0]] {
        for_types!(check_matmul(&gpu, shape, DENSE, ColumnMajor::default(), Options::default()));
    }
}

/// Row stride with which the last row starts beyond element 2³¹.
const FAR: usize = (1 << 30) + 24;

/// Three rows of `values` in a buffer of more than 2³¹ elements, the rest poison.
fn far_rows(gpu: &Device, values: &HostTensor) -> Buffer<bf16> {
    let d = values.shape[1];
    let mut buffer = Buffer::poisoned(gpu, 2 * FAR + d).unwrap();
    for (r, row) in values.values().chunks(d).enumerate() {
        let row: Vec<bf16> = row.iter().map(|&x| bf16::from_f64(x)).collect();
        buffer.slice_mut(r * FAR..r * FAR + d).unwrap().copy_from_slice(&row).unwrap();
    }
    buffer
}

/// Reads the three rows of a buffer that [`far_rows`] or a kernel wrote.
fn read_rows(buffer: &Buffer<bf16>, d: usize) -> HostTensor {
    let rows = (0..3).flat_map(|r| buffer.slice(r * FAR..r * FAR + d).unwrap().to_vec().unwrap());
    let values: Vec<f64> = rows.map(f64::from).collect();
    HostTensor::of(DType::BF16, &[3, d], &[d, 1], &values)
}

#[test]
fn more_than_two_to_the_31_elements() {
    let Some(gpu) = gpu() else { return };
    let (d, strides) = (136, [FAR as i64, 1]);
    let x = HostTensor::random(DType::BF16, &[3, d], &dense(&[3, d]), &mut Random::new(8));
    let far = far_rows(&gpu, &x);
    let input = || Tensor::strided(far.view(), [3, d], strides).unwrap();

    let mut y = Buffer::<bf16>::poisoned(&gpu, 2 * FAR + d).unwrap();
    softmax::forward(&gpu, input(), TensorMut::strided(y.view_mut(), [3, d], strides).unwrap()).unwrap();
    let want = softmax::reference(&x.values(), d);
    read_rows(&y, d).check("softmax with a large row stride", &want, tolerance(DType::BF16));

    // x · xᵀ: the offsets of both operands exceed 2³¹.
    let mut c = Buffer::<bf16>::poisoned(&gpu, 9).unwrap();
    let out = TensorMut::dense(c.view_mut(), [3, 3]).unwrap();
    matmul::multiply(&gpu, input(), input().transposed(0, 1), out, Options::default()).unwrap();
    let (xs, mut want) = (x.values(), vec![0.0; 9]);
    for (i, sum) in want.iter_mut().enumerate() {
        *sum = (0..d).map(|j| xs[i / 3 * d + j] * xs[i % 3 * d + j]).sum();
    }
    let got: Vec<f64> = c.to_vec().unwrap().into_iter().map(f64::from).collect();
    HostTensor::of(DType::BF16, &[9], &[1], &got).check(
        "matmul with a large row stride",
        &want,
        tolerance(DType::BF16),
    );
}

/// Products of which each SM gets several tiles run as persistent programs, some in turns, whose results TMA stores. Rows
/// and columns of the last tiles lie outside of c.
#[test]
fn persistent_matmuls_match() {
    let Some(gpu) = gpu() else { return };
    for [m, n, k] in [[4104, 3080, 72], [2056, 6160, 136]] {
        for columns in [ColumnMajor::default(), ColumnMajor { b: true, ..ColumnMajor::default() }] {
            check_matmul::<bf16>(&gpu, [m, n, k], DENSE, columns, Options::default());
        }
    }
}
