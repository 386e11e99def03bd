//! `tilewright bench kernels`: what is bound by memory, and matrix products.

use std::io::Write;

use clap::{Args, ValueEnum};
use half::bf16;
use tilewright::codegen::ir::DType;
use tilewright::kernels::{Tensor, TensorMut, rms_norm, softmax, weighted_sum};
use tilewright::{Buffer, Device};

use super::data::{Number, normal, values};
use super::record::{Measured, Recorder, Row, Trouble, Work, accept};
use super::{Common, copy, matmul};
use crate::cli::demo::case::{relative_error, tolerance};
use crate::cli::{CliError, Result};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Which kernels, several with commas; all without it
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Kernel>,
    /// Rows; 50000, and 8192 on the CPU
    #[arg(long)]
    rows: Option<usize>,
    /// Elements of a row, several with commas; 1024, 2048, 4096 and 8192, and 1024 on the CPU
    #[arg(long, value_delimiter = ',')]
    d: Vec<usize>,
    /// Sizes of square matrix products, several with commas; 1024, 2048, 4096 and 8192, and 512 on the CPU
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kernel {
    #[value(name = "weighted_sum")]
    WeightedSum,
    #[value(name = "softmax")]
    Softmax,
    #[value(name = "rms_norm")]
    RmsNorm,
    #[value(name = "matmul")]
    Matmul,
}

/// One pass over rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Op {
    WeightedSum,
    WeightedSumBackward,
    Softmax,
    RmsNorm,
    RmsNormBackward,
}

impl Kernel {
    fn ops(self) -> &'static [Op] {
        match self {
            Kernel::WeightedSum => &[Op::WeightedSum, Op::WeightedSumBackward],
            Kernel::Softmax => &[Op::Softmax],
            Kernel::RmsNorm => &[Op::RmsNorm, Op::RmsNormBackward],
            Kernel::Matmul => &[],
        }
    }
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Op::WeightedSum => "weighted_sum_fwd",
            Op::WeightedSumBackward => "weighted_sum_bwd",
            Op::Softmax => "softmax",
            Op::RmsNorm => "rms_norm_fwd",
            Op::RmsNormBackward => "rms_norm_bwd",
        }
    }

    /// How many tensors of the rows' size must move; what is as small as one row does not count.
    fn tensors(self) -> f64 {
        match self {
            Op::WeightedSum => 1.0,
            Op::WeightedSumBackward | Op::Softmax | Op::RmsNorm => 2.0,
            Op::RmsNormBackward => 3.0,
        }
    }
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let (device, mut recorder) = arguments.common.open()?;
    let or = |given: &[usize], gpu: &[usize], cpu: &[usize]| match (given, device.is_cuda()) {
        ([], true) => gpu.to_vec(),
        ([], false) => cpu.to_vec(),
        (given, _) => given.to_vec(),
    };
    let rows = or(arguments.rows.as_slice(), &[50_000], &[8192])[0];
    let widths = or(&arguments.d, &[1024, 2048, 4096, 8192], &[1024]);
    let sizes = or(&arguments.sizes, &[1024, 2048, 4096, 8192], &[512]);
    if rows == 0 || widths.contains(&0) || sizes.contains(&0) {
        return Err(CliError::usage("there is nothing to time in an empty tensor", "rows, d and sizes are at least 1"));
    }
    let wanted = if arguments.only.is_empty() { Kernel::value_variants() } else { &arguments.only };
    let ops: Vec<Op> = wanted.iter().flat_map(|kernel| kernel.ops()).copied().collect();
    if !ops.is_empty() {
        let ceiling = copy::ceiling(&arguments.common, &device)?;
        for d in widths {
            over_rows::<f32>(arguments, &device, &ops, [rows, d], ceiling, &mut recorder)?;
            over_rows::<bf16>(arguments, &device, &ops, [rows, d], ceiling, &mut recorder)?;
        }
    }
    if wanted.contains(&Kernel::Matmul) {
        for n in sizes {
            matmul::measure::<bf16>(&arguments.common, &device, n, &mut recorder)?;
            matmul::measure::<f32>(&arguments.common, &device, n, &mut recorder)?;
        }
    }
    recorder.finish(out)
}

/// Rows of the check: enough of them for the tiles of a large problem, and the same rest.
fn checked_rows(rows: usize) -> usize {
    rows.min(4096 + rows % 64)
}

fn over_rows<T: Number>(
    arguments: &Arguments,
    device: &Device,
    ops: &[Op],
    [rows, d]: [usize; 2],
    ceiling: f64,
    recorder: &mut Recorder,
) -> Result<()> {
    let mut small = Rows::<T>::new(device, checked_rows(rows), d)?;
    let mut full = Rows::<T>::new(device, rows, d)?;
    for &op in ops {
        let measured = (|| -> Measured {
            small.run(op)?;
            let error = small.check(op)?;
            Ok((arguments.common.time(device, || full.run(op))?, error))
        })();
        let bytes = op.tensors() * (rows * d * T::dtype().bytes()) as f64;
        let row = Row::new(op.name(), &[rows, d], T::dtype().name());
        recorder.push(row.measured(&measured, Work::Bytes(bytes, Some(ceiling))))?;
    }
    Ok(())
}

/// Everything that the kernels read and write, allocated once.
struct Rows<T: Number> {
    device: Device,
    rows: usize,
    d: usize,
    x: Buffer<T>,
    w: Buffer<T>,
    grad_y: Buffer<T>,
    /// The gradient of a result that is one number a row.
    grad_sum: Buffer<f32>,
    /// Results in the shape of x.
    y: Buffer<T>,
    /// Results that are one number a row.
    sum: Buffer<f32>,
    rstd: Buffer<f32>,
    grad_w: Buffer<f32>,
}

const EPS: f32 = 1e-5;

impl<T: Number> Rows<T> {
    /// The rstd is that of the inputs, for the backward pass.
    fn new(device: &Device, rows: usize, d: usize) -> tilewright::Result<Rows<T>> {
        let mut new = Rows {
            device: device.clone(),
            rows,
            d,
            x: normal(device, rows * d, 1)?,
            w: normal(device, d, 2)?,
            grad_y: normal(device, rows * d, 3)?,
            grad_sum: normal(device, rows, 4)?,
            y: Buffer::poisoned(device, rows * d)?,
            sum: Buffer::poisoned(device, rows)?,
            rstd: Buffer::poisoned(device, rows)?,
            grad_w: Buffer::poisoned(device, d)?,
        };
        new.run(Op::RmsNorm)?;
        new.y.poison()?;
        Ok(new)
    }

    fn run(&mut self, op: Op) -> tilewright::Result<()> {
        let (device, shape) = (&self.device, [self.rows, self.d]);
        let x = Tensor::dense(self.x.view(), shape)?;
        let w = Tensor::dense(self.w.view(), [self.d])?;
        let grad_y = Tensor::dense(self.grad_y.view(), shape)?;
        let grad_sum = Tensor::dense(self.grad_sum.view(), [self.rows])?;
        let y = TensorMut::dense(self.y.view_mut(), shape)?;
        let sum = TensorMut::dense(self.sum.view_mut(), [self.rows])?;
        let grad_w = TensorMut::dense(self.grad_w.view_mut(), [self.d])?;
        match op {
            Op::WeightedSum => weighted_sum::forward(device, x, w, sum),
            Op::WeightedSumBackward => weighted_sum::backward(device, x, w, grad_sum, y, grad_w),
            Op::Softmax => softmax::forward(device, x, y),
            Op::RmsNorm => {
                let rstd = TensorMut::dense(self.rstd.view_mut(), [self.rows])?;
                rms_norm::forward(device, x, w, y, rstd, EPS)
            }
            Op::RmsNormBackward => {
                let rstd = Tensor::dense(self.rstd.view(), [self.rows])?;
                rms_norm::backward(device, x, w, rstd, grad_y, y, grad_w)
            }
        }
    }

    /// The largest error of what `op` just wrote; the outputs are poisoned for the next one.
    fn check(&mut self, op: Op) -> Result<f64, Trouble> {
        let (x, w) = (values(&self.x)?, values(&self.w)?);
        // In x's shape and type, one f32 a row, one f32 a column.
        let (wide, narrow, column) = match op {
            Op::WeightedSum => (None, Some(weighted_sum::reference::forward(&x, &w, self.rows)), None),
            Op::WeightedSumBackward => {
                let (grad_x, grad_w) = weighted_sum::reference::backward(&x, &w, &values(&self.grad_sum)?);
                (Some(grad_x), None, Some(grad_w))
            }
            Op::Softmax => (Some(softmax::reference(&x, self.d)), None, None),
            Op::RmsNorm => (Some(rms_norm::reference::forward(&x, &w, f64::from(EPS)).0), None, None),
            Op::RmsNormBackward => {
                let grad_y = values(&self.grad_y)?;
                let (grad_x, grad_w) = rms_norm::reference::backward(&x, &w, &grad_y, f64::from(EPS));
                (Some(grad_x), None, Some(grad_w))
            }
        };
        let mut worst = 0.0_f64;
        if let Some(want) = wide {
            let error = relative_error(&values(&self.y)?, &want);
            worst = worst.max(accept("the rows", error, tolerance(T::dtype()))?);
        }
        for (name, buffer, want) in [("the sums", &self.sum, narrow), ("grad_w", &self.grad_w, column)] {
            if let Some(want) = want {
                let error = relative_error(&values(buffer)?, &want);
                worst = worst.max(accept(name, error, tolerance(DType::F32))?);
            }
        }
        self.y.poison()?;
        self.sum.poison()?;
        self.grad_w.poison()?;
        Ok(worst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pass_is_checked_against_its_reference() {
        for op in [Op::WeightedSum, Op::WeightedSumBackward, Op::Softmax, Op::RmsNorm, Op::RmsNormBackward] {
            let mut rows = Rows::<f32>::new(&Device::cpu(), 37, 50).unwrap();
            assert!(matches!(rows.check(op), Err(Trouble::Wrong(_))), "{op:?} before it ran");
            rows.run(op).unwrap();
            assert!(rows.check(op).unwrap() < 1e-5, "{op:?}");
        }
    }

    #[test]
    fn checks_have_the_rest_of_the_rows() {
        assert_eq!([50_000, 8192, 100].map(checked_rows), [4112, 4096, 100]);
    }
}
