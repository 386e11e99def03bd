//! Products of 8-bit matrices of `tilewright bench kernels`.

use half::bf16;
use tilewright::codegen::lang::{Dtype, Num};
use tilewright::kernels::scaled_matmul::{self, Scales};
use tilewright::kernels::{Tensor, TensorMut, matmul};
use tilewright::{Buffer, Device, Element, F8E4M3, elements};

use super::Common;
use super::data::{Value, normal, values};
use super::record::{BenchError, Measured, Recorder, Row, Work, accept};
use crate::cli::Result;
use crate::cli::demo::case::{relative_error, tolerance};

/// Buffers of a square product n × n × n: a row-major, b column-major as a weight, c row-major.
struct Gemm<T: Element, O: Element> {
    device: Device,
    n: usize,
    a: Buffer<T>,
    b: Buffer<T>,
    /// Scales of the rows of a and of the columns of b.
    scales: [Buffer<f32>; 2],
    c: Buffer<O>,
}

/// Size of the problem that is checked; larger products use the same tiles.
const CHECKED: usize = 256;
/// Largest relative error of sums of 8-bit floats in the precision of Hopper's tensor cores.
const IMPRECISE: f64 = 5e-3;

impl<T: Value + Dtype, O: Value + Num> Gemm<T, O> {
    fn new(device: &Device, n: usize) -> tilewright::Result<Gemm<T, O>> {
        let len = elements(&[n, n])?;
        device.check_memory(len as f64 * (2 * size_of::<T>() + size_of::<O>()) as f64)?;
        let [a, b] = [normal(device, len, 1)?, normal(device, len, 2)?];
        let scales = [normal(device, n, 3)?, normal(device, n, 4)?];
        Ok(Gemm { device: device.clone(), n, a, b, scales, c: Buffer::poisoned(device, len)? })
    }

    fn run(&mut self, fast: bool) -> tilewright::Result<()> {
        let shape = [self.n, self.n];
        let (a, b) = (Tensor::dense(self.a.view(), shape)?, Tensor::dense(self.b.view(), shape)?.transposed(0, 1));
        let [of_a, of_b] = &self.scales;
        let scales = match <O as Dtype>::dtype().is_float() {
            true => Scales::Rowwise(Tensor::dense(of_a.view(), [self.n])?, Tensor::dense(of_b.view(), [self.n])?),
            false => Scales::None,
        };
        scaled_matmul::multiply(&self.device, a, b, scales, fast, TensorMut::dense(self.c.view_mut(), shape)?)
    }

    fn check(&self, tolerance: f64) -> Result<f64, BenchError> {
        let n = self.n;
        let (a, b) = (values(&self.a)?, values(&self.b)?);
        let b: Vec<f64> = (0..n * n).map(|at| b[at % n * n + at / n]).collect();
        let mut want = matmul::reference(&a, &b, [n; 3]);
        if <O as Dtype>::dtype().is_float() {
            let [x, y] = [values(&self.scales[0])?, values(&self.scales[1])?];
            want.iter_mut().enumerate().for_each(|(at, c)| *c *= x[at / n] * y[at % n]);
        }
        accept("c", relative_error(&values(&self.c)?, &want), tolerance)
    }
}

/// Measures products of size `n`: of floats with each precision of sums, and of integers.
pub fn measure(common: &Common, device: &Device, n: usize, recorder: &mut Recorder) -> Result<()> {
    let exact = tolerance(<bf16 as Dtype>::dtype());
    case::<F8E4M3, bf16>(common, device, n, (true, "fast accumulation", exact.max(IMPRECISE)), recorder)?;
    case::<F8E4M3, bf16>(common, device, n, (false, "", exact), recorder)?;
    case::<i8, i32>(common, device, n, (true, "", 0.0), recorder)
}

fn case<T: Value + Dtype, O: Value + Num>(
    common: &Common,
    device: &Device,
    n: usize,
    (fast, name, tolerance): (bool, &'static str, f64),
    recorder: &mut Recorder,
) -> Result<()> {
    let measured = (|| -> Measured {
        let mut small = Gemm::<T, O>::new(device, n.min(CHECKED + n % CHECKED))?;
        small.run(fast)?;
        let error = small.check(tolerance)?;
        let mut full = Gemm::<T, O>::new(device, n)?;
        Ok((common.time(device, || full.run(fast))?, error))
    })();
    let row = Row::new("scaled_matmul", &[n, n, n], <T as Dtype>::dtype().name());
    let row = if name.is_empty() { row } else { row.case(name) };
    recorder.push(row.measured(&measured, Work::Flop(2.0 * (n as f64).powi(3))))
}
