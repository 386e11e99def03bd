//! Matmuls of `tilewright bench kernels`.

use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::Precision;
use tilewright::kernels::activation::Activation;
use tilewright::kernels::matmul::{self, Options};
use tilewright::kernels::{Tensor, TensorMut, matmul_swiglu};
use tilewright::{Buffer, Device, elements};

use super::Common;
use super::data::{GemmElement, Number, normal, values};
use super::record::{BenchError, Measured, Recorder, Row, Work, accept};
use crate::cli::Result;
use crate::cli::demo::case::{relative_error, tolerance};

/// A matmul variant, and its tolerance.
#[derive(Clone, Copy)]
struct Case {
    options: Options,
    /// Whether a bias is added.
    bias: bool,
    /// `case` of the record row; empty for a plain matmul.
    name: &'static str,
    tolerance: f64,
    /// The activation in f64.
    then: fn(f64) -> f64,
}

/// Buffers of a square matmul, n × n × n.
struct Gemm<T: GemmElement> {
    device: Device,
    n: usize,
    a: Buffer<T>,
    b: Buffer<T>,
    bias: Buffer<T>,
    c: Buffer<T>,
}

/// Size of the problem that is checked; larger matmuls use the same tiles.
const CHECKED: usize = 256;

impl<T: GemmElement> Gemm<T> {
    fn new(device: &Device, n: usize) -> tilewright::Result<Gemm<T>> {
        let len = elements(&[n, n])?;
        device.check_memory(3.0 * len as f64 * size_of::<T>() as f64)?;
        let [a, b] = [normal(device, len, 1)?, normal(device, len, 2)?];
        let bias = normal(device, n, 3)?;
        Ok(Gemm { device: device.clone(), n, a, b, bias, c: Buffer::poisoned(device, len)? })
    }

    fn run(&mut self, case: Case) -> tilewright::Result<()> {
        let shape = [self.n, self.n];
        let (a, b) = (Tensor::dense(self.a.view(), shape)?, Tensor::dense(self.b.view(), shape)?);
        let c = TensorMut::dense(self.c.view_mut(), shape)?;
        match case.bias {
            false => matmul::multiply(&self.device, a, b, c, case.options),
            true => {
                let bias = Tensor::dense(self.bias.view(), [self.n])?;
                matmul::multiply_add_bias(&self.device, a, b, bias, c, case.options)
            }
        }
    }

    fn check(&self, case: Case) -> Result<f64, BenchError> {
        let mut want = matmul::reference(&values(&self.a)?, &values(&self.b)?, [self.n; 3]);
        if case.bias {
            let bias = values(&self.bias)?;
            want.iter_mut().enumerate().for_each(|(at, x)| *x += bias[at % self.n]);
        }
        want.iter_mut().for_each(|x| *x = (case.then)(*x));
        accept("c", relative_error(&values(&self.c)?, &want), case.tolerance)
    }
}

/// SwiGLU of two matmuls, n × n × n each.
struct Gated<T: Number> {
    operands: [Buffer<T>; 3],
    results: [Buffer<T>; 3],
    n: usize,
}

impl<T: Number> Gated<T> {
    fn new(device: &Device, n: usize) -> tilewright::Result<Gated<T>> {
        let len = elements(&[n, n])?;
        device.check_memory(6.0 * len as f64 * size_of::<T>() as f64)?;
        let operands = [normal(device, len, 1)?, normal(device, len, 2)?, normal(device, len, 3)?];
        let poisoned = || Buffer::poisoned(device, len);
        Ok(Gated { operands, results: [poisoned()?, poisoned()?, poisoned()?], n })
    }

    fn run(&mut self, device: &Device) -> tilewright::Result<()> {
        let shape = [self.n; 2];
        let [a, gate, value] = &self.operands;
        let b = [Tensor::dense(gate.view(), shape)?, Tensor::dense(value.view(), shape)?];
        let [gates, values, y] = &mut self.results;
        let products = [TensorMut::dense(gates.view_mut(), shape)?, TensorMut::dense(values.view_mut(), shape)?];
        let (a, y) = (Tensor::dense(a.view(), shape)?, TensorMut::dense(y.view_mut(), shape)?);
        matmul_swiglu::multiply(device, a, b, Some(products), y, 0)
    }

    fn check(&self) -> Result<f64, BenchError> {
        let [a, gate, value] = &self.operands;
        let of = |b| Ok::<_, BenchError>(matmul::reference(&values(a)?, &values(b)?, [self.n; 3]));
        let (gates, factors) = (of(gate)?, of(value)?);
        let want: Vec<f64> = gates.iter().zip(&factors).map(|(g, v)| g / (1.0 + (-g).exp()) * v).collect();
        accept("y", relative_error(&values(&self.results[2])?, &want), tolerance(T::dtype()))
    }
}

/// Measures matmuls of size `n`.
pub fn measure<T: GemmElement>(common: &Common, device: &Device, n: usize, recorder: &mut Recorder) -> Result<()> {
    let plain =
        Case { options: Options::default(), bias: false, name: "", tolerance: tolerance(T::dtype()), then: |x| x };
    let of = |precision, name, tolerance| {
        let options = Options { precision, ..Options::default() };
        Case { options, name, tolerance, ..plain }
    };
    let relu = Options { activation: Activation::Relu, ..Options::default() };
    let silu = Options { activation: Activation::Silu, ..Options::default() };
    let cases = match T::dtype() {
        DType::F64 => vec![plain],
        // tf32 rounds each operand to ten mantissa bits.
        DType::F32 if device.is_cuda() => vec![
            of(Precision::Ieee, "ieee", 1e-5),
            of(Precision::Tf32x3, "tf32x3", 1e-5),
            of(Precision::Tf32, "tf32", 2e-3),
        ],
        _ => vec![
            plain,
            Case { options: relu, bias: true, name: "bias relu", then: |x| x.max(0.0), ..plain },
            Case { options: silu, bias: true, name: "bias silu", then: |x| x / (1.0 + (-x).exp()), ..plain },
        ],
    };
    for case in cases {
        let measured = (|| -> Measured {
            let mut small = Gemm::<T>::new(device, n.min(CHECKED + n % CHECKED))?;
            small.run(case)?;
            let error = small.check(case)?;
            let mut full = Gemm::<T>::new(device, n)?;
            Ok((common.time(device, || full.run(case))?, error))
        })();
        let row = Row::new("matmul", &[n, n, n], T::dtype().name());
        let row = if case.name.is_empty() { row } else { row.case(case.name) };
        recorder.push(row.measured(&measured, Work::Flop(2.0 * (n as f64).powi(3))))?;
    }
    Ok(())
}

/// Measures SwiGLU of two matmuls of size `n`.
pub fn measure_swiglu<T: Number>(common: &Common, device: &Device, n: usize, recorder: &mut Recorder) -> Result<()> {
    let measured = (|| -> Measured {
        let mut small = Gated::<T>::new(device, n.min(CHECKED + n % CHECKED))?;
        small.run(device)?;
        let error = small.check()?;
        let mut full = Gated::<T>::new(device, n)?;
        Ok((common.time(device, || full.run(device))?, error))
    })();
    let row = Row::new("matmul_swiglu", &[n, n, n], T::dtype().name());
    recorder.push(row.measured(&measured, Work::Flop(4.0 * (n as f64).powi(3))))
}
