//! Every kernel on a device, against its f64 reference: shared by the tests of the CPU and of GPUs.
//!
//! Each function makes random inputs, launches the kernel through its host function with poisoned outputs, and checks
//! results and gaps. `spacing` is the distance of elements and rows in memory.

pub use crate::training::*;

use crate::numerics::{HostTensor, Random, TF32_TOLERANCE, gapped, tolerance};
use tilewright::codegen::ir::DType;
use tilewright::codegen::target::GpuArch;
use tilewright::kernels::activation::Activation;
use tilewright::kernels::matmul::Options;
use tilewright::kernels::scaled_matmul::{self, Scales};
use tilewright::kernels::{
    FloatElement, Tensor, TensorMut, column_sum, matmul, matmul_swiglu, rms_norm, softmax, weighted_sum,
};
use tilewright::prelude::*;

/// Native code, simulated GPUs of Ampere and Hopper, and the GPU of this machine, if there is one.
pub fn devices() -> Vec<Device> {
    let mut devices = vec![Device::cpu(), Device::simulated(GpuArch::Sm80), Device::simulated(GpuArch::Sm90a)];
    devices.extend(Device::cuda(0));
    devices
}

/// Runs `launch` with inputs and a poisoned output of `n` elements on every device, and returns the outputs.
pub fn outputs<T: Element>(
    devices: Vec<Device>,
    n: usize,
    launch: impl Fn(&Device, &mut Buffer<T>) -> Result<()>,
) -> Vec<(Device, Vec<T>)> {
    let run = |device: Device| {
        let mut y = Buffer::<T>::poisoned(&device, n).expect("memory");
        launch(&device, &mut y).unwrap_or_else(|error| panic!("{device}: {error}"));
        let y = y.to_vec().expect("the output");
        (device, y)
    };
    devices.into_iter().map(run).collect()
}

/// Distances in memory, in elements.
#[derive(Clone, Copy, Debug)]
pub struct Spacing {
    /// From one element of a row to the next.
    pub step: usize,
    /// Gap between rows.
    pub gap: usize,
    /// From the start of memory to the first element.
    pub first: usize,
}

/// No gaps.
pub const DENSE: Spacing = Spacing { step: 1, gap: 0, first: 0 };
/// Rows that do not start at multiples of 16 bytes.
pub const GAPS: Spacing = Spacing { step: 1, gap: 3, first: 0 };
/// Gaps of 64 elements: rows start at multiples of 16 bytes if dense rows would.
pub const ALIGNED_GAPS: Spacing = Spacing { step: 1, gap: 64, first: 0 };
/// Adjacent elements at a stride of 2.
pub const STEPS: Spacing = Spacing { step: 2, gap: 5, first: 0 };
/// No gaps, starting at an offset in memory.
pub const OFFSET: Spacing = Spacing { step: 1, gap: 0, first: 3 };

impl Spacing {
    pub(crate) fn strides(self, shape: &[usize]) -> Vec<usize> {
        gapped(shape, self.gap, self.step)
    }
}

/// A tensor in host memory and on the device.
pub struct DeviceTensor<T: Element> {
    pub host: HostTensor,
    pub buffer: Buffer<T>,
}

fn array<const R: usize>(list: &[usize]) -> [usize; R] {
    list.try_into().expect("a tensor of that rank")
}

impl<T: Dtype + Element> DeviceTensor<T> {
    /// Copies `host` to the device.
    pub fn new(device: &Device, host: HostTensor) -> DeviceTensor<T> {
        let buffer = host.upload(device);
        DeviceTensor { host, buffer }
    }

    /// A tensor of numbers uniform in [−1, 1), rounded to the type.
    pub fn random(device: &Device, shape: &[usize], spacing: Spacing, random: &mut Random) -> DeviceTensor<T> {
        let host = HostTensor::random(T::dtype(), shape, &spacing.strides(shape), random);
        DeviceTensor::new(device, host.with_offset(spacing.first))
    }

    /// A poisoned output.
    pub fn poisoned(device: &Device, shape: &[usize], spacing: Spacing) -> DeviceTensor<T> {
        DeviceTensor::new(
            device,
            HostTensor::poisoned(T::dtype(), shape, &spacing.strides(shape)).with_offset(spacing.first),
        )
    }

    pub fn input<const R: usize>(&self) -> Tensor<'_, T, R> {
        let strides = array(&self.host.strides).map(|s| s as i64);
        let data = self.buffer.slice(self.host.first..).expect("a slice");
        Tensor::strided(data, array(&self.host.shape), strides).unwrap_or_else(|e| panic!("{e}"))
    }

    pub fn output<const R: usize>(&mut self) -> TensorMut<'_, T, R> {
        let strides = array(&self.host.strides).map(|s| s as i64);
        let data = self.buffer.slice_mut(self.host.first..).expect("a slice");
        TensorMut::strided(data, array(&self.host.shape), strides).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The values in host memory, rounded to the type.
    pub fn values(&self) -> Vec<f64> {
        self.host.values()
    }

    /// Copies the device memory back and checks it.
    #[track_caller]
    pub fn check(&mut self, what: &str, want: &[f64], tolerance: f64) {
        self.host.download(&self.buffer);
        self.host.check(what, want, tolerance);
    }
}

/// Tolerance of f32 results of f32 sums.
pub(crate) const F32: f64 = 1e-5;

#[track_caller]
pub(crate) fn ok(result: Result<()>) {
    result.unwrap_or_else(|e| panic!("{e}"));
}

pub fn check_column_sum<T: FloatElement>(device: &Device, [rows, d]: [usize; 2], spacing: Spacing) {
    let what = format!("column_sum {} [{rows}, {d}] {spacing:?}", T::dtype());
    let x = DeviceTensor::<T>::random(device, &[rows, d], spacing, &mut Random::new(1));
    let mut y = DeviceTensor::<f32>::poisoned(device, &[d], spacing);
    ok(column_sum::forward(device, x.input(), y.output()));
    y.check(&what, &column_sum::reference(&x.values(), d), F32);
}

pub fn check_weighted_sum<T: FloatElement>(device: &Device, [rows, d]: [usize; 2], spacing: Spacing) {
    let what = format!("weighted_sum {} [{rows}, {d}] {spacing:?}", T::dtype());
    let mut random = Random::new(2);
    let x = DeviceTensor::<T>::random(device, &[rows, d], spacing, &mut random);
    let w = DeviceTensor::<T>::random(device, &[d], spacing, &mut random);
    let mut y = DeviceTensor::<f32>::poisoned(device, &[rows], spacing);
    ok(weighted_sum::forward(device, x.input(), w.input(), y.output()));
    y.check(&what, &weighted_sum::reference::forward(&x.values(), &w.values(), rows), F32);

    let grad_y = DeviceTensor::<f32>::random(device, &[rows], spacing, &mut random);
    let mut grad_x = DeviceTensor::<T>::poisoned(device, &[rows, d], spacing);
    let mut grad_w = DeviceTensor::<f32>::poisoned(device, &[d], spacing);
    ok(weighted_sum::backward(device, x.input(), w.input(), grad_y.input(), grad_x.output(), grad_w.output()));
    let (want_x, want_w) = weighted_sum::reference::backward(&x.values(), &w.values(), &grad_y.values());
    grad_x.check(&format!("{what}, grad_x"), &want_x, tolerance(T::dtype()));
    grad_w.check(&format!("{what}, grad_w"), &want_w, F32);
}

pub fn check_softmax<T: FloatElement>(device: &Device, [rows, d]: [usize; 2], spacing: Spacing) {
    let what = format!("softmax {} [{rows}, {d}] {spacing:?}", T::dtype());
    let mut random = Random::new(3);
    // Large enough that exp overflows unless the maximum is subtracted.
    let values: Vec<f64> = (0..rows * d).map(|_| 100.0 * random.number()).collect();
    let shape = [rows, d];
    let x = DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &shape, &spacing.strides(&shape), &values));
    let mut y = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    ok(softmax::forward(device, x.input(), y.output()));
    y.check(&what, &softmax::reference(&x.values(), d), tolerance(T::dtype()));

    let weights: Vec<f64> = (0..rows * d).map(|_| random.number().abs()).collect();
    let y = DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &shape, &spacing.strides(&shape), &weights));
    let grad_y = DeviceTensor::<T>::random(device, &shape, spacing, &mut random);
    let mut grad_x = DeviceTensor::<T>::poisoned(device, &shape, spacing);
    ok(softmax::backward(device, y.input(), grad_y.input(), grad_x.output()));
    let want = softmax::reference_backward(&y.values(), &grad_y.values(), d);
    grad_x.check(&format!("{what}, grad_x"), &want, tolerance(T::dtype()));
}

pub fn check_rms_norm<T: FloatElement>(device: &Device, [rows, d]: [usize; 2], spacing: Spacing) {
    let what = format!("rms_norm {} [{rows}, {d}] {spacing:?}", T::dtype());
    let eps = 1e-5;
    let mut random = Random::new(4);
    let x = DeviceTensor::<T>::random(device, &[rows, d], spacing, &mut random);
    let w = DeviceTensor::<T>::random(device, &[d], spacing, &mut random);
    let mut y = DeviceTensor::<T>::poisoned(device, &[rows, d], spacing);
    let mut rstd = DeviceTensor::<f32>::poisoned(device, &[rows], spacing);
    ok(rms_norm::forward(device, x.input(), w.input(), y.output(), rstd.output(), eps as f32));
    let (want_y, want_rstd) = rms_norm::reference::forward(&x.values(), &w.values(), eps);
    y.check(&what, &want_y, tolerance(T::dtype()));
    rstd.check(&format!("{what}, rstd"), &want_rstd, F32);

    let grad_y = DeviceTensor::<T>::random(device, &[rows, d], spacing, &mut random);
    let mut grad_x = DeviceTensor::<T>::poisoned(device, &[rows, d], spacing);
    let mut grad_w = DeviceTensor::<T>::poisoned(device, &[d], spacing);
    ok(rms_norm::backward(
        device,
        x.input(),
        w.input(),
        rstd.input(),
        grad_y.input(),
        grad_x.output(),
        grad_w.output(),
    ));
    let (want_x, want_w) = rms_norm::reference::backward(&x.values(), &w.values(), &grad_y.values(), eps);
    // With one element per row the gradient is a difference of equal numbers, of which only eps remains.
    if d > 1 {
        grad_x.check(&format!("{what}, grad_x"), &want_x, tolerance(T::dtype()));
    }
    grad_w.check(&format!("{what}, grad_w"), &want_w, tolerance(T::dtype()));
}

/// Which matrices of a matmul are column-major.
#[derive(Clone, Copy, Debug, Default)]
pub struct ColumnMajor {
    pub a: bool,
    pub b: bool,
    pub c: bool,
}

/// Products of T, with results of the same type and in f32.
pub fn check_matmul<T: Float + Element>(
    device: &Device,
    shape: [usize; 3],
    spacing: Spacing,
    columns: ColumnMajor,
    options: Options,
) {
    check_products::<T, T>(device, shape, spacing, columns, options);
    if T::dtype() != DType::F32 {
        check_products::<T, f32>(device, shape, spacing, columns, options);
    }
}

fn check_products<T: Float + Element, C: Float + Element>(
    device: &Device,
    [m, n, k]: [usize; 3],
    spacing: Spacing,
    columns: ColumnMajor,
    options: Options,
) {
    let what = format!("matmul {} to {} [{m}, {n}, {k}] {spacing:?} {columns:?} {options:?}", T::dtype(), C::dtype());
    let mut random = Random::new(5);
    // A column-major matrix is a transposed row-major one.
    let strides = |shape: [usize; 2], columns: bool| {
        if columns {
            let strides = spacing.strides(&[shape[1], shape[0]]);
            vec![strides[1], strides[0]]
        } else {
            spacing.strides(&shape)
        }
    };
    let mut operand = |shape: [usize; 2], columns: bool| {
        let host = HostTensor::random(T::dtype(), &shape, &strides(shape, columns), &mut random);
        DeviceTensor::<T>::new(device, host)
    };
    let (a, b) = (operand([m, k], columns.a), operand([k, n], columns.b));
    let host = HostTensor::poisoned(C::dtype(), &[m, n], &strides([m, n], columns.c));
    let mut c = DeviceTensor::<C>::new(device, host);
    ok(matmul::multiply(device, a.input(), b.input(), c.output(), options));
    let product = matmul::reference(&a.values(), &b.values(), [m, n, k]);
    let want: Vec<f64> = product.iter().map(|x| activated(*x, options.activation)).collect();
    let tf32 = T::dtype() == DType::F32 && options.precision == Precision::Tf32;
    let allowed = if tf32 { TF32_TOLERANCE } else { tolerance(C::dtype()) };
    c.check(&what, &want, allowed);

    let other = HostTensor::random(C::dtype(), &[m, n], &strides([m, n], columns.c), &mut random);
    let sums: Vec<f64> = want.iter().zip(other.values()).map(|(x, other)| x + other).collect();
    let other = DeviceTensor::<C>::new(device, other);
    let mut c = DeviceTensor::<C>::new(device, HostTensor::poisoned(C::dtype(), &[m, n], &strides([m, n], columns.c)));
    ok(matmul::multiply_add(device, a.input(), b.input(), other.input(), c.output(), options));
    c.check(&format!("{what} plus another matrix"), &sums, allowed);
    let mut c = other;
    ok(matmul::accumulate(device, a.input(), b.input(), c.output(), options));
    c.check(&format!("{what} accumulated into c"), &sums, allowed);

    let bias = HostTensor::random(T::dtype(), &[n], &spacing.strides(&[n]), &mut random);
    let numbers = bias.values();
    let bias = DeviceTensor::<T>::new(device, bias);
    let mut c = DeviceTensor::<C>::new(device, HostTensor::poisoned(C::dtype(), &[m, n], &strides([m, n], columns.c)));
    ok(matmul::multiply_add_bias(device, a.input(), b.input(), bias.input(), c.output(), options));
    let biased = product.iter().enumerate().map(|(at, x)| activated(x + numbers[at % n], options.activation));
    c.check(&format!("{what} with bias"), &biased.collect::<Vec<_>>(), allowed);
}

/// Checks SwiGLU of a [m, k] times two matrices [k, n], with and without memory for the products.
pub fn check_matmul_swiglu<T: FloatElement>(
    device: &Device,
    [m, n, k]: [usize; 3],
    spacing: Spacing,
    columns: ColumnMajor,
) {
    let what = format!("matmul_swiglu {} [{m}, {n}, {k}] {spacing:?} {columns:?}", T::dtype());
    let mut random = Random::new(6);
    let mut operand = |shape: [usize; 2], columns: bool| {
        let strides = if columns { spacing.strides(&[shape[1], shape[0]]) } else { spacing.strides(&shape) };
        let strides = if columns { vec![strides[1], strides[0]] } else { strides };
        DeviceTensor::<T>::new(device, HostTensor::random(T::dtype(), &shape, &strides, &mut random))
    };
    let (a, gate, value) = (operand([m, k], columns.a), operand([k, n], columns.b), operand([k, n], columns.b));
    let products = [&gate, &value].map(|b| matmul::reference(&a.values(), &b.values(), [m, n, k]));
    let want: Vec<f64> =
        products[0].iter().zip(&products[1]).map(|(g, v)| activated(*g, Activation::Silu) * v).collect();
    let [mut gates, mut values, mut y] = [(); 3].map(|()| DeviceTensor::<T>::poisoned(device, &[m, n], spacing));
    let b = || [gate.input(), value.input()];
    ok(matmul_swiglu::multiply(device, a.input(), b(), Some([gates.output(), values.output()]), y.output(), 0));
    let allowed = tolerance(T::dtype());
    gates.check(&format!("{what}, gate"), &products[0], allowed);
    values.check(&format!("{what}, value"), &products[1], allowed);
    y.check(&what, &want, allowed);
    let mut y = DeviceTensor::<T>::poisoned(device, &[m, n], spacing);
    ok(matmul_swiglu::multiply(device, a.input(), b(), None, y.output(), 0));
    y.check(&format!("{what} alone"), &want, allowed);
}

/// The error of a sum of 128 products of 8-bit floats on Hopper's tensor cores, which keep 14 bits: with and without
/// `fast_accumulation`, each such sum is theirs.
const TENSOR_CORE_SUM: f64 = 1.0 / (1 << 13) as f64;

/// Checks products of 8-bit matrices [m, k] and [k, n] with each kind of scales. `imprecise` is the tolerance of sums in
/// the precision of tensor cores.
pub fn check_scaled_matmul<T: Dtype + Element, O: Num + Element>(
    device: &Device,
    [m, n, k]: [usize; 3],
    spacing: Spacing,
    columns: ColumnMajor,
    imprecise: f64,
) {
    let mut random = Random::new(7);
    // Integers of the type's whole range; floats in [-1, 1).
    let factor = if T::dtype().is_float() { 1.0 } else { 128.0 };
    let mut operand = |shape: [usize; 2], columns: bool| {
        let mut strides = spacing.strides(&if columns { [shape[1], shape[0]] } else { shape });
        if columns {
            strides.reverse();
        }
        let least = if matches!(T::dtype(), DType::U8) { 128.0 } else { 0.0 };
        let numbers: Vec<f64> = (0..shape[0] * shape[1]).map(|_| random.number() * factor + least).collect();
        DeviceTensor::<T>::new(device, HostTensor::of(T::dtype(), &shape, &strides, &numbers))
    };
    let (a, b) = (operand([m, k], columns.a), operand([k, n], columns.b));
    let product = matmul::reference(&a.values(), &b.values(), [m, n, k]);
    let scales = |n: usize, random: &mut Random| DeviceTensor::<f32>::random(device, &[n], spacing, random);
    for fast in [true, false] {
        // Scaled results would be truncated to integers.
        let kinds = if O::dtype().is_float() { 3 } else { 1 };
        for lines in [None, Some([1, 1]), Some([m, n])].into_iter().take(kinds) {
            let what = format!(
                "scaled_matmul {} [{m}, {n}, {k}] {spacing:?} {columns:?}, scales {lines:?}, fast_accumulation {fast}",
                T::dtype()
            );
            let of = lines.map(|[rows, columns]| [scales(rows, &mut random), scales(columns, &mut random)]);
            let given = match (&of, lines) {
                (Some([x, y]), Some([1, 1])) => Scales::PerTensor(x.input(), y.input()),
                (Some([x, y]), _) => Scales::Rowwise(x.input(), y.input()),
                (None, _) => Scales::None,
            };
            let mut c = DeviceTensor::<O>::poisoned(device, &[m, n], spacing);
            ok(scaled_matmul::multiply(device, a.input(), b.input(), given, fast, c.output()));
            let factor = |at: usize| match &of {
                Some([x, y]) => {
                    let (x, y) = (x.values(), y.values());
                    x[(at / n) % x.len()] * y[(at % n) % y.len()]
                }
                None => 1.0,
            };
            let want: Vec<f64> = product.iter().enumerate().map(|(at, x)| x * factor(at)).collect();
            let on_tensor_cores = device.is_cuda() && T::dtype().is_float();
            let least = if on_tensor_cores { TENSOR_CORE_SUM } else { 0.0 };
            let exact = if O::dtype().is_float() { tolerance(O::dtype()).max(least) } else { 0.0 };
            c.check(&what, &want, if fast { exact.max(imprecise) } else { exact });
        }
    }
}

/// The activations in f64, by other formulas than the kernel's.
pub fn activated(x: f64, activation: Activation) -> f64 {
    match activation {
        Activation::None => x,
        Activation::Relu => (x + x.abs()) / 2.0,
        Activation::Gelu => x / 2.0 * (1.0 + libm::erf(x / 2f64.sqrt())),
        Activation::GeluTanh => {
            let u = std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x.powi(3));
            x - x / (1.0 + (2.0 * u).exp())
        }
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

/// The activations that are not the identity.
pub const ACTIVATIONS: [Activation; 4] = [Activation::Relu, Activation::Gelu, Activation::GeluTanh, Activation::Silu];

/// Runs a check, generic over the element type, for all element types of the kernels.
#[macro_export]
macro_rules! for_types {
    ($check:ident($($arg:expr),* $(,)?)) => {{
        $crate::on_device::$check::<f32>($($arg),*);
        $crate::on_device::$check::<half::f16>($($arg),*);
        $crate::on_device::$check::<half::bf16>($($arg),*);
    }};
}
