//! Memory-bound kernels of `bench kernels`: their buffers, bytes moved, and checks against f64 references.

use half::bf16;
use tilewright::codegen::ir::DType;
use tilewright::kernels::activation::Activation;
use tilewright::kernels::rope::Direction;
use tilewright::kernels::{
    Tensor, TensorMut, activation, adamw, cast, column_sum, cross_entropy, embedding, layer_norm, rank_sum, rms_norm,
    rope, softmax, swiglu, weighted_sum,
};
use tilewright::{Buffer, Device, check_host_memory, elements};

use super::data::{Number, normal, values};
use super::record::{BenchError, accept};
use crate::cli::demo::case::{relative_error, tolerance};

/// A row-wise or element-wise kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    WeightedSum,
    WeightedSumBackward,
    ColumnSum,
    Softmax,
    SoftmaxBackward,
    RmsNorm,
    RmsNormBackward,
    LayerNorm,
    LayerNormBackward,
    /// SiLU.
    Activation,
    ActivationBackward,
    Swiglu,
    SwigluBackward,
    CrossEntropy,
    CrossEntropyBackward,
    CrossEntropyInPlace,
    RopeFrom,
    RopeAt,
    EmbeddingBackward,
    AdamW,
    AdamWWithComputeWeights,
    AdamWTwoPeers,
    Cast,
    Scale,
    RankSum,
}

impl Op {
    #[cfg(test)]
    pub const ALL: [Op; 25] = [
        Op::WeightedSum,
        Op::WeightedSumBackward,
        Op::ColumnSum,
        Op::Softmax,
        Op::SoftmaxBackward,
        Op::RmsNorm,
        Op::RmsNormBackward,
        Op::LayerNorm,
        Op::LayerNormBackward,
        Op::Activation,
        Op::ActivationBackward,
        Op::Swiglu,
        Op::SwigluBackward,
        Op::CrossEntropy,
        Op::CrossEntropyBackward,
        Op::CrossEntropyInPlace,
        Op::RopeFrom,
        Op::RopeAt,
        Op::EmbeddingBackward,
        Op::AdamW,
        Op::AdamWWithComputeWeights,
        Op::AdamWTwoPeers,
        Op::Cast,
        Op::Scale,
        Op::RankSum,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Op::WeightedSum => "weighted_sum_fwd",
            Op::WeightedSumBackward => "weighted_sum_bwd",
            Op::ColumnSum => "column_sum",
            Op::Softmax => "softmax",
            Op::SoftmaxBackward => "softmax_bwd",
            Op::RmsNorm => "rms_norm_fwd",
            Op::RmsNormBackward => "rms_norm_bwd",
            Op::LayerNorm => "layer_norm_fwd",
            Op::LayerNormBackward => "layer_norm_bwd",
            Op::Activation => "activation_fwd",
            Op::ActivationBackward => "activation_bwd",
            Op::Swiglu => "swiglu_fwd",
            Op::SwigluBackward => "swiglu_bwd",
            Op::CrossEntropy => "cross_entropy_fwd",
            Op::CrossEntropyBackward => "cross_entropy_bwd",
            Op::CrossEntropyInPlace => "cross_entropy_fwd_bwd",
            Op::RopeFrom => "rope_from",
            Op::RopeAt => "rope_at",
            Op::EmbeddingBackward => "embedding_bwd",
            Op::AdamW => "adamw",
            Op::AdamWWithComputeWeights => "adamw_with_compute_weights",
            Op::AdamWTwoPeers => "adamw_two_peers",
            Op::Cast => "cast",
            Op::Scale => "scale",
            Op::RankSum => "rank_sum",
        }
    }

    /// Returns the bytes read and written per element of the rows, whose element type has `size` bytes. Tensors of the
    /// size of a row or a column are not counted.
    pub fn bytes_per_element(self, size: usize) -> usize {
        match self {
            Op::WeightedSum | Op::ColumnSum | Op::CrossEntropy => size,
            Op::WeightedSumBackward | Op::Softmax | Op::RmsNorm | Op::LayerNorm | Op::Activation => 2 * size,
            // In place, the second read is not counted.
            Op::CrossEntropyBackward | Op::CrossEntropyInPlace | Op::RopeFrom | Op::RopeAt => 2 * size,
            Op::SoftmaxBackward | Op::ActivationBackward | Op::Swiglu => 3 * size,
            Op::RmsNormBackward | Op::LayerNormBackward => 3 * size,
            Op::SwigluBackward => 5 * size,
            // The gradient is read; the rows of the f32 table to which it is added are read and written.
            Op::EmbeddingBackward => size + 8,
            // Parameter and two moments are read and written in f32; the gradient is read.
            Op::AdamW => 24 + size,
            Op::AdamWWithComputeWeights => 26 + size,
            Op::AdamWTwoPeers => 26 + 2 * size,
            // From f32 to bf16, or back.
            Op::Cast | Op::Scale => 6,
            // Two gradients are read; their average is written twice.
            Op::RankSum => 4 * size,
        }
    }
}

/// An output that is checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Output {
    Y,
    Y2,
    Rows,
    Column,
    Column2,
    Table,
    Parameters,
    Moment1,
    Moment2,
    Narrow,
    Wide,
}

/// Inputs and outputs of all kernels, allocated once.
pub struct RowwiseBuffers<T: Number> {
    device: Device,
    rows: usize,
    d: usize,
    x: Buffer<T>,
    /// A second input with the shape of x.
    b: Buffer<T>,
    w: Buffer<T>,
    bias: Buffer<T>,
    grad_y: Buffer<T>,
    /// The gradient of an output with one number per row.
    grad_sum: Buffer<f32>,
    /// Class of each row, index of a table row, or position of a token, depending on the kernel.
    targets: Buffer<i64>,
    frequencies: Buffer<f64>,
    /// Outputs with the shape of x.
    y: Buffer<T>,
    y2: Buffer<T>,
    /// Outputs with one number per row.
    sum: Buffer<f32>,
    rstd: Buffer<f32>,
    mean: Buffer<f32>,
    lse: Buffer<f32>,
    /// Outputs with one number per column.
    grad_w: Buffer<f32>,
    grad_b: Buffer<f32>,
    /// Embedding gradient: one row per class.
    table: Buffer<f32>,
    /// Parameters and moments.
    p: Buffer<f32>,
    m: Buffer<f32>,
    v: Buffer<f32>,
    /// Step control in device memory: step size, inverse square root of the second bias correction and decay
    /// ([`adamw::Options::rates_at_step`]), then the gradient scale and 1 for a step that is applied.
    step_control: Buffer<f64>,
    /// Outputs with the shape of x, in the types that x is cast to; `narrow` also holds the compute weights of AdamW.
    narrow: Buffer<bf16>,
    wide: Buffer<f32>,
}

const EPS: f32 = 1e-5;
const BASE: f64 = 10_000.0;
const NO_CLASS: i64 = -100;
/// Rows of the embedding table.
const VOCABULARY: usize = 10_000;

impl<T: Number> RowwiseBuffers<T> {
    /// Allocates random inputs and poisoned outputs.
    pub fn new(device: &Device, rows: usize, d: usize) -> tilewright::Result<RowwiseBuffers<T>> {
        // Classes index columns in cross-entropy, and table rows in the embedding's backward.
        let classes = VOCABULARY.min(d);
        let n = elements(&[rows, d])?;
        // The classes are in host memory on every device; on the CPU, the tensors are too.
        check_host_memory(8.0 * rows as f64)?;
        device.check_memory(n as f64 * (5 * size_of::<T>() + 18) as f64 + 4.0 * elements(&[classes, d])? as f64)?;
        let targets: Vec<i64> = (0..rows).map(|row| (row % classes * 7919 % classes) as i64).collect();
        let frequencies = rope::frequencies(head(d), BASE);
        let [step_size, inv_sqrt_bias_correction2, decay] = adamw::Options::default().rates_at_step(1)?;
        let mut new = RowwiseBuffers {
            device: device.clone(),
            rows,
            d,
            x: normal(device, n, 1)?,
            b: normal(device, n, 5)?,
            w: normal(device, d, 2)?,
            bias: normal(device, d, 6)?,
            grad_y: normal(device, n, 3)?,
            grad_sum: normal(device, rows, 4)?,
            targets: Buffer::from_slice(device, &targets)?,
            frequencies: Buffer::from_slice(device, &frequencies)?,
            y: Buffer::poisoned(device, n)?,
            y2: Buffer::poisoned(device, n)?,
            sum: Buffer::poisoned(device, rows)?,
            rstd: Buffer::poisoned(device, rows)?,
            mean: Buffer::poisoned(device, rows)?,
            lse: Buffer::poisoned(device, rows)?,
            grad_w: Buffer::poisoned(device, d)?,
            grad_b: Buffer::poisoned(device, d)?,
            table: Buffer::zeros(device, classes * d)?,
            p: normal(device, n, 7)?,
            m: Buffer::zeros(device, n)?,
            v: Buffer::zeros(device, n)?,
            step_control: Buffer::from_slice(device, &[step_size, inv_sqrt_bias_correction2, decay, 1.0, 1.0])?,
            narrow: Buffer::poisoned(device, n)?,
            wide: Buffer::poisoned(device, n)?,
        };
        new.reset_outputs()?;
        Ok(new)
    }

    /// Fills outputs with NaN, and resets tensors that are updated in place.
    fn reset_outputs(&mut self) -> tilewright::Result<()> {
        for buffer in [&mut self.y, &mut self.y2] {
            buffer.poison()?;
        }
        for buffer in [&mut self.sum, &mut self.grad_w, &mut self.grad_b, &mut self.wide] {
            buffer.poison()?;
        }
        self.narrow.poison()?;
        for buffer in [&mut self.table, &mut self.m, &mut self.v] {
            buffer.fill_zero()?;
        }
        let p = normal::<f32>(&self.device, self.p.len(), 7)?;
        self.p.copy_from(p.view())
    }

    /// Runs the forward kernel that `op` depends on, and resets the outputs.
    pub fn prepare(&mut self, op: Op) -> tilewright::Result<()> {
        match op {
            Op::RmsNormBackward => self.run(Op::RmsNorm),
            Op::LayerNormBackward => self.run(Op::LayerNorm),
            Op::CrossEntropyBackward => self.run(Op::CrossEntropy),
            _ => Ok(()),
        }?;
        self.reset_outputs()?;
        match op {
            // The average is computed in place.
            Op::RankSum => self.y.copy_from(self.b.view()),
            Op::CrossEntropyInPlace => self.y.copy_from(self.x.view()),
            _ => Ok(()),
        }
    }

    pub fn run(&mut self, op: Op) -> tilewright::Result<()> {
        let (device, shape) = (&self.device, [self.rows, self.d]);
        let x = Tensor::dense(self.x.view(), shape)?;
        let b = Tensor::dense(self.b.view(), shape)?;
        let w = Tensor::dense(self.w.view(), [self.d])?;
        let bias = Tensor::dense(self.bias.view(), [self.d])?;
        let grad_y = Tensor::dense(self.grad_y.view(), shape)?;
        let grad_sum = Tensor::dense(self.grad_sum.view(), [self.rows])?;
        let targets = Tensor::dense(self.targets.view(), [self.rows])?;
        let y = TensorMut::dense(self.y.view_mut(), shape)?;
        let y2 = TensorMut::dense(self.y2.view_mut(), shape)?;
        let sum = TensorMut::dense(self.sum.view_mut(), [self.rows])?;
        let grad_w = TensorMut::dense(self.grad_w.view_mut(), [self.d])?;
        let grad_b = TensorMut::dense(self.grad_b.view_mut(), [self.d])?;
        let options = adamw::Options::default();
        let state = adamw::AdamState { p: self.p.view_mut(), m: self.m.view_mut(), v: self.v.view_mut() };
        match op {
            Op::WeightedSum => weighted_sum::forward(device, x, w, sum),
            Op::WeightedSumBackward => weighted_sum::backward(device, x, w, grad_sum, y, grad_w),
            Op::ColumnSum => column_sum::forward(device, x, grad_w),
            Op::Softmax => softmax::forward(device, x, y),
            // Any numbers serve as the result of the forward pass.
            Op::SoftmaxBackward => softmax::backward(device, x, grad_y, y),
            Op::RmsNorm => {
                let rstd = TensorMut::dense(self.rstd.view_mut(), [self.rows])?;
                rms_norm::forward(device, x, w, y, rstd, EPS)
            }
            Op::RmsNormBackward => {
                let rstd = Tensor::dense(self.rstd.view(), [self.rows])?;
                rms_norm::backward(device, x, w, rstd, grad_y, y, grad_w)
            }
            Op::LayerNorm => {
                let mean = TensorMut::dense(self.mean.view_mut(), [self.rows])?;
                let rstd = TensorMut::dense(self.rstd.view_mut(), [self.rows])?;
                layer_norm::forward(device, x, w, bias, y, mean, rstd, EPS)
            }
            Op::LayerNormBackward => {
                let mean = Tensor::dense(self.mean.view(), [self.rows])?;
                let rstd = Tensor::dense(self.rstd.view(), [self.rows])?;
                layer_norm::backward(device, x, w, mean, rstd, grad_y, y, grad_w, grad_b)
            }
            Op::Activation => activation::forward(device, x, None, Activation::Silu, None, y),
            Op::ActivationBackward => activation::backward(device, x, None, Activation::Silu, grad_y, y),
            Op::Swiglu => swiglu::forward(device, x, b, y),
            Op::SwigluBackward => swiglu::backward(device, x, b, grad_y, y, y2),
            Op::CrossEntropy => {
                let lse = TensorMut::dense(self.lse.view_mut(), [self.rows])?;
                cross_entropy::forward(device, x, targets, NO_CLASS, sum, lse)
            }
            Op::CrossEntropyBackward => {
                let lse = Tensor::dense(self.lse.view(), [self.rows])?;
                cross_entropy::backward(device, x, targets, NO_CLASS, lse, grad_sum, 1.0, y)
            }
            Op::CrossEntropyInPlace => {
                cross_entropy::forward_backward(device, y, self.d, targets, NO_CLASS, grad_sum, 1.0, sum)
            }
            Op::RopeFrom | Op::RopeAt => {
                let d = head(self.d);
                let shape = [self.rows, self.d / d, d];
                let x = Tensor::dense(self.x.view(), shape)?;
                let y = TensorMut::dense(self.y.view_mut(), shape)?;
                let frequencies = Tensor::dense(self.frequencies.view(), [d / 2])?;
                match op {
                    Op::RopeAt => rope::rotate_at(device, x, targets, frequencies, y, Direction::Forward),
                    _ => rope::rotate_from(device, x, 0, self.rows, frequencies, y, Direction::Forward),
                }
            }
            Op::EmbeddingBackward => {
                let classes = self.table.len() / self.d;
                let table = TensorMut::dense(self.table.view_mut(), [classes, self.d])?;
                embedding::backward(device, targets, grad_y, table)
            }
            Op::AdamW => adamw::step(device, state, self.grad_y.view(), 1, &options),
            Op::AdamWWithComputeWeights => {
                adamw::step_with_compute_weights(device, state, self.grad_y.view(), self.narrow.view_mut(), 1, &options)
            }
            Op::AdamWTwoPeers => {
                let gradients = [self.grad_y.view(), self.x.view()];
                let squares = self.wide.slice_mut(..adamw::squares_two_peers(gradients[0].len()))?;
                let control = [self.step_control.slice(..3)?, self.step_control.slice(3..)?];
                let weights = Some(self.narrow.view_mut());
                adamw::step_two_peers(device, state, gradients, weights, squares, control, &options)
            }
            Op::Cast => match T::dtype() {
                DType::F32 => cast::forward(device, x, TensorMut::dense(self.narrow.view_mut(), shape)?),
                _ => cast::forward(device, x, TensorMut::dense(self.wide.view_mut(), shape)?),
            },
            Op::Scale => {
                let factor = Tensor::dense(self.grad_sum.slice(..1)?, [1])?;
                match T::dtype() {
                    DType::F32 => cast::scaled(device, x, factor, TensorMut::dense(self.narrow.view_mut(), shape)?),
                    _ => cast::scaled(device, x, factor, TensorMut::dense(self.wide.view_mut(), shape)?),
                }
            }
            Op::RankSum => {
                // Averages, unlike sums, stay finite over repeated runs.
                let ranks = rank_sum::RankReduction { rank: 0, world: 2, average: true };
                let (x, copy) = ((self.x.view(), self.x.len()), self.y2.view_mut());
                rank_sum::reduce(device, self.y.view_mut(), x, Some(copy), ranks, None)
            }
        }
    }

    /// Computes the expected outputs of `op` in f64.
    fn expected(&self, op: Op) -> tilewright::Result<Vec<(Output, Vec<f64>)>> {
        let (d, eps) = (self.d, f64::from(EPS));
        let x = values(&self.x)?;
        let [w, bias, grad_y] = [values(&self.w)?, values(&self.bias)?, values(&self.grad_y)?];
        let targets = self.targets.to_vec()?;
        Ok(match op {
            Op::WeightedSum => vec![(Output::Rows, weighted_sum::reference::forward(&x, &w, self.rows))],
            Op::WeightedSumBackward => {
                let (grad_x, grad_w) = weighted_sum::reference::backward(&x, &w, &values(&self.grad_sum)?);
                vec![(Output::Y, grad_x), (Output::Column, grad_w)]
            }
            Op::ColumnSum => vec![(Output::Column, column_sum::reference(&x, d))],
            Op::Softmax => vec![(Output::Y, softmax::reference(&x, d))],
            Op::SoftmaxBackward => vec![(Output::Y, softmax::reference_backward(&x, &grad_y, d))],
            Op::RmsNorm => vec![(Output::Y, rms_norm::reference::forward(&x, &w, eps).0)],
            Op::RmsNormBackward => {
                let (grad_x, grad_w) = rms_norm::reference::backward(&x, &w, &grad_y, eps);
                vec![(Output::Y, grad_x), (Output::Column, grad_w)]
            }
            Op::LayerNorm => vec![(Output::Y, layer_norm::reference::forward(&x, &w, &bias, eps).y)],
            Op::LayerNormBackward => {
                let grad = layer_norm::reference::backward(&x, &w, &grad_y, eps);
                vec![(Output::Y, grad.x), (Output::Column, grad.w), (Output::Column2, grad.b)]
            }
            Op::Activation => {
                vec![(Output::Y, x.iter().map(|&x| activation::reference::forward(x, Activation::Silu)).collect())]
            }
            Op::ActivationBackward => {
                let gradients =
                    x.iter().zip(&grad_y).map(|(&x, g)| g * activation::reference::derivative(x, Activation::Silu));
                vec![(Output::Y, gradients.collect())]
            }
            Op::Swiglu => vec![(Output::Y, swiglu::reference::forward(&x, &values(&self.b)?))],
            Op::SwigluBackward => {
                let (grad_a, grad_b) = swiglu::reference::backward(&x, &values(&self.b)?, &grad_y);
                vec![(Output::Y, grad_a), (Output::Y2, grad_b)]
            }
            Op::CrossEntropy => vec![(Output::Rows, cross_entropy::reference::forward(&x, &targets, d, NO_CLASS).0)],
            Op::CrossEntropyBackward => {
                let grad = values(&self.grad_sum)?;
                vec![(Output::Y, cross_entropy::reference::backward(&x, &targets, d, NO_CLASS, &grad, 1.0))]
            }
            Op::CrossEntropyInPlace => {
                let grad = values(&self.grad_sum)?;
                let gradient = cross_entropy::reference::backward(&x, &targets, d, NO_CLASS, &grad, 1.0);
                let loss = cross_entropy::reference::forward(&x, &targets, d, NO_CLASS).0;
                vec![(Output::Rows, loss), (Output::Y, gradient)]
            }
            Op::RopeFrom | Op::RopeAt => {
                let places = if op == Op::RopeAt { targets } else { (0..self.rows as i64).collect() };
                let size = head(d);
                vec![(Output::Y, rope::reference(&x, &places, d / size, size, BASE, Direction::Forward))]
            }
            Op::EmbeddingBackward => {
                let mut table = vec![0.0; self.table.len()];
                embedding::reference(&targets, &grad_y, d, &mut table);
                vec![(Output::Table, table)]
            }
            Op::AdamW | Op::AdamWWithComputeWeights | Op::AdamWTwoPeers => {
                let gradient = match op {
                    // Rounded to the gradients' dtype, as an all-reduce would round them.
                    Op::AdamWTwoPeers => {
                        let average = rank_sum::reference(&[grad_y, x], true);
                        average.into_iter().map(|g| T::from_f32(g as f32).to_f64()).collect()
                    }
                    _ => grad_y,
                };
                let mut p = values(&normal::<f32>(&self.device, self.p.len(), 7)?)?;
                let (mut m, mut v) = (vec![0.0; p.len()], vec![0.0; p.len()]);
                adamw::reference(&mut p, &mut m, &mut v, &gradient, 1, &adamw::Options::default());
                let copy = (op != Op::AdamW).then(|| (Output::Narrow, p.clone()));
                let updated = [(Output::Parameters, p), (Output::Moment1, m), (Output::Moment2, v)];
                updated.into_iter().chain(copy).collect()
            }
            Op::Cast if T::dtype() == DType::F32 => vec![(Output::Narrow, x)],
            Op::Cast => vec![(Output::Wide, x)],
            Op::Scale => {
                let factor = values(&self.grad_sum)?[0];
                let output = if T::dtype() == DType::F32 { Output::Narrow } else { Output::Wide };
                vec![(output, x.iter().map(|x| factor * x).collect())]
            }
            Op::RankSum => {
                let average = rank_sum::reference(&[values(&self.b)?, x], true);
                vec![(Output::Y, average.clone()), (Output::Y2, average)]
            }
        })
    }

    /// Returns the values of an output, and the tolerance of its dtype.
    fn found(&self, output: Output) -> tilewright::Result<(Vec<f64>, f64)> {
        let exact = tolerance(DType::F32);
        Ok(match output {
            Output::Y => (values(&self.y)?, tolerance(T::dtype())),
            Output::Y2 => (values(&self.y2)?, tolerance(T::dtype())),
            Output::Rows => (values(&self.sum)?, exact),
            Output::Column => (values(&self.grad_w)?, exact),
            Output::Column2 => (values(&self.grad_b)?, exact),
            Output::Table => (values(&self.table)?, exact),
            Output::Parameters => (values(&self.p)?, exact),
            Output::Moment1 => (values(&self.m)?, exact),
            Output::Moment2 => (values(&self.v)?, exact),
            Output::Narrow => (values(&self.narrow)?, tolerance(DType::BF16)),
            Output::Wide => (values(&self.wide)?, exact),
        })
    }

    /// Returns the largest error of the outputs after one run of `op` on reset outputs.
    pub fn check(&mut self, op: Op) -> Result<f64, BenchError> {
        let mut worst = 0.0_f64;
        for (output, want) in self.expected(op)? {
            let (found, limit) = self.found(output)?;
            worst = worst.max(accept(&format!("{output:?}"), relative_error(&found, &want), limit)?);
        }
        Ok(worst)
    }
}

/// Returns an even head dimension that divides `d`, for RoPE; 0 if there is none.
fn head(d: usize) -> usize {
    [64, 2].into_iter().find(|&head| d.is_multiple_of(head)).unwrap_or(0)
}

/// Whether `op` can run on rows of `d` elements.
pub fn supports(op: Op, d: usize) -> bool {
    !matches!(op, Op::RopeFrom | Op::RopeAt) || head(d) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_op_is_checked_against_its_reference() {
        for op in Op::ALL {
            let mut rows = RowwiseBuffers::<f32>::new(&Device::cpu(), 37, 50).unwrap();
            rows.prepare(op).unwrap();
            assert!(matches!(rows.check(op), Err(BenchError::WrongResult(_))), "{op:?} before it ran");
            rows.run(op).unwrap();
            let error = rows.check(op).unwrap();
            let rounded = matches!(op, Op::Cast | Op::Scale | Op::AdamWWithComputeWeights | Op::AdamWTwoPeers);
            assert!(error < if rounded { 1e-2 } else { 1e-5 }, "{op:?}: {error}");
        }
    }
}
