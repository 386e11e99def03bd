//! The problems for which shipped kernels are tuned, and their launches.

use half::{bf16, f16};
use tilewright::kernels::attention::{self, reference};
use tilewright::kernels::{Tensor, TensorMut, matmul};
use tilewright::prelude::Precision;
use tilewright::{Buffer, Device, elements};

use crate::cli::bench::attention_check::Attention;
use crate::cli::bench::data::{GemmElement, Number, normal};
use crate::cli::bench::rowwise::{Op, RowwiseBuffers};
use tilewright_cli::tune;

/// The kernels that the name `attention` denotes.
pub const ATTENTION: [&str; 3] = ["flash_attention_fwd", "flash_attention_bwd_dkdv", "flash_attention_bwd_dq"];
pub const MATMUL: &str = "matmul";
/// Number of rows, and several numbers of elements per row.
type RowShapes = (usize, &'static [usize]);

const TOKENS: RowShapes = (50_000, &[1024, 2048, 4096, 8192]);
const LOGITS: RowShapes = (16_384, &[10_000, 50_257, 131_072]);

/// A row-wise kernel that can be tuned.
#[derive(Clone, Copy)]
struct RowwiseKernel {
    name: &'static str,
    /// The op that launches the kernel.
    op: Op,
    /// Default shapes on a GPU.
    shapes: RowShapes,
}

const ROWWISE: [RowwiseKernel; 8] = [
    RowwiseKernel { name: "cross_entropy_fwd", op: Op::CrossEntropy, shapes: LOGITS },
    RowwiseKernel { name: "layer_norm_bwd", op: Op::LayerNormBackward, shapes: TOKENS },
    RowwiseKernel { name: "layer_norm_fwd", op: Op::LayerNorm, shapes: TOKENS },
    RowwiseKernel { name: "rms_norm_bwd", op: Op::RmsNormBackward, shapes: TOKENS },
    RowwiseKernel { name: "rms_norm_fwd", op: Op::RmsNorm, shapes: TOKENS },
    RowwiseKernel { name: "softmax_rows", op: Op::Softmax, shapes: TOKENS },
    RowwiseKernel { name: "weighted_sum_bwd", op: Op::WeightedSumBackward, shapes: TOKENS },
    RowwiseKernel { name: "weighted_sum_fwd", op: Op::WeightedSum, shapes: TOKENS },
];

/// Iterates over all kernels that can be tuned.
pub fn kernels() -> impl Iterator<Item = &'static str> {
    ATTENTION.into_iter().chain([MATMUL]).chain(ROWWISE.map(|kernel| kernel.name))
}

/// Returns the op that launches a row-wise kernel; `None` for other kernels.
fn rowwise_op(kernel: &str) -> Option<Op> {
    ROWWISE.iter().find(|rowwise| rowwise.name == kernel).map(|rowwise| rowwise.op)
}

/// Returns the default shapes of a row-wise kernel; `None` for other kernels.
pub fn default_row_shapes(kernel: &str) -> Option<RowShapes> {
    ROWWISE.iter().find(|rowwise| rowwise.name == kernel).map(|rowwise| rowwise.shapes)
}

/// A kernel, and the problem for which it is tuned.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    kernel: &'static str,
    dtype: String,
    /// Precision of f32 dots on a GPU.
    precision: Option<Precision>,
    shape: Shape,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    /// Batch, heads, sequence length and head dimension; whether the mask is causal.
    Attention([usize; 4], bool),
    /// m, n and k; whether a and b are column-major.
    Gemm([usize; 3], [bool; 2]),
    /// Number of rows, and elements per row.
    Rows([usize; 2]),
}

/// Parses `256x256x64`, or `256` for all three.
pub fn size(text: &str) -> Result<[usize; 3], String> {
    let wrong = || format!("`{text}` is not a size: expected one such as 256x256x64");
    let numbers: Vec<usize> =
        text.split(['x', '×']).map(|n| n.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
    match numbers[..] {
        [n] if n > 0 => Ok([n; 3]),
        [m, n, k] if m > 0 && n > 0 && k > 0 => Ok([m, n, k]),
        _ => Err(wrong()),
    }
}

/// Names on the command line for the column-major operands.
const COLUMNS: [(&str, [bool; 2]); 4] =
    [("none", [false, false]), ("a", [true, false]), ("b", [false, true]), ("ab", [true, true])];

/// Parses one of [`COLUMNS`].
pub fn columns(text: &str) -> Result<[bool; 2], String> {
    let found = COLUMNS.iter().find(|(word, _)| *word == text);
    found.map(|(_, columns)| *columns).ok_or_else(|| format!("`{text}` is unknown: expected none, a, b or ab"))
}

fn operand_name(columns: [bool; 2]) -> &'static str {
    COLUMNS.iter().find(|(_, other)| *other == columns).map_or("none", |(word, _)| word)
}

impl Problem {
    pub fn attention(
        kernel: &'static str,
        dtype: &str,
        precision: Option<Precision>,
        shape: [usize; 4],
        causal: bool,
    ) -> Problem {
        Problem { kernel, dtype: dtype.to_string(), precision, shape: Shape::Attention(shape, causal) }
    }

    pub fn matmul(dtype: &str, precision: Option<Precision>, size: [usize; 3], columns: [bool; 2]) -> Problem {
        Problem { kernel: MATMUL, dtype: dtype.to_string(), precision, shape: Shape::Gemm(size, columns) }
    }

    pub fn rowwise(kernel: &'static str, dtype: &str, shape: [usize; 2]) -> Problem {
        Problem { kernel, dtype: dtype.to_string(), precision: None, shape: Shape::Rows(shape) }
    }

    /// Formats the element type, with the precision of f32.
    fn dtype_and_precision(&self) -> String {
        match self.precision {
            Some(precision) => format!("{} ({})", self.dtype, precision.name()),
            None => self.dtype.clone(),
        }
    }

    /// Allocates the inputs, runs the kernels that the tuned kernel depends on, and launches it.
    fn launch_typed<T: Number>(&self, device: &Device) -> tilewright::Result<()> {
        match self.shape {
            Shape::Attention([batch, heads, n, d], causal) => {
                let scale = f64::from(1.0 / (d as f32).sqrt());
                let problem = reference::Problem {
                    batch,
                    heads_q: heads,
                    heads_kv: heads,
                    n_q: n,
                    n_k: n,
                    d,
                    d_v: d,
                    causal,
                    scale,
                    modifiers: Default::default(),
                };
                let mut attention = Attention::<T>::new(device, problem)?;
                let options = attention::Options { precision: self.precision, ..attention::Options::new(causal) };
                attention.forward(&options)?;
                if self.kernel != ATTENTION[0] {
                    attention.backward(&options)?;
                }
            }
            Shape::Gemm(size, columns) => self.launch_gemm::<T>(device, size, columns)?,
            Shape::Rows([rows, d]) => {
                if let Some(op) = rowwise_op(self.kernel) {
                    let mut rows = RowwiseBuffers::<T>::new(device, rows, d)?;
                    rows.prepare(op)?;
                    rows.run(op)?;
                }
            }
        }
        Ok(())
    }

    /// Launches a matmul, with a and b column-major or not.
    fn launch_gemm<T: GemmElement>(
        &self,
        device: &Device,
        [m, n, k]: [usize; 3],
        [a_col_major, b_col_major]: [bool; 2],
    ) -> tilewright::Result<()> {
        let [a, b, c] = [elements(&[m, k])?, elements(&[k, n])?, elements(&[m, n])?];
        device.check_memory((a as f64 + b as f64 + c as f64) * size_of::<T>() as f64)?;
        let (a, b) = (normal::<T>(device, a, 1)?, normal::<T>(device, b, 2)?);
        let mut c = Buffer::<T>::poisoned(device, c)?;
        let (a, b) = (matrix(&a, [m, k], a_col_major)?, matrix(&b, [k, n], b_col_major)?);
        let c = TensorMut::dense(c.view_mut(), [m, n])?;
        let options = matmul::Options::default();
        let precision = self.precision.unwrap_or(options.precision);
        matmul::multiply(device, a, b, c, matmul::Options { precision, ..options })
    }
}

impl tune::Problem for Problem {
    fn kernel(&self) -> &'static str {
        self.kernel
    }

    fn title(&self) -> String {
        let (kernel, dtype) = (self.kernel, self.dtype_and_precision());
        match self.shape {
            Shape::Attention([b, h, n, d], causal) => {
                format!("{kernel} {dtype} {b}×{h}×{n}×{d} {}", if causal { "causal" } else { "full" })
            }
            Shape::Gemm([m, n, k], [false, false]) => format!("{kernel} {dtype} {m}×{n}×{k}"),
            Shape::Gemm([m, n, k], columns) => {
                format!("{kernel} {dtype} {m}×{n}×{k}, {} column-major", operand_name(columns))
            }
            Shape::Rows([rows, d]) => format!("{kernel} {dtype} {rows}×{d}"),
        }
    }

    fn arguments(&self) -> Vec<String> {
        let mut words = vec![self.kernel.to_string(), "--dtype".to_string(), self.dtype.clone()];
        let mut add = |name: &str, value: String| words.extend([name.to_string(), value]);
        match self.shape {
            Shape::Attention([b, h, n, d], causal) => {
                add("--batch", b.to_string());
                add("--heads", h.to_string());
                add("--seq-len", n.to_string());
                add("--head-dim", d.to_string());
                add("--causal", causal.to_string());
            }
            Shape::Gemm([m, n, k], columns) => {
                add("--size", format!("{m}x{n}x{k}"));
                add("--column-major", operand_name(columns).to_string());
            }
            Shape::Rows([rows, d]) => {
                add("--rows", rows.to_string());
                add("--d", d.to_string());
            }
        }
        if let Some(precision) = self.precision {
            words.extend(["--precision".to_string(), precision.name().to_string()]);
        }
        words
    }

    fn launch(&self, device: &Device) -> tilewright::Result<()> {
        match self.dtype.as_str() {
            "f64" => match self.shape {
                Shape::Gemm(size, columns) => self.launch_gemm::<f64>(device, size, columns),
                Shape::Attention(..) | Shape::Rows(_) => unreachable!("problems in f64 are matmuls"),
            },
            "f32" => self.launch_typed::<f32>(device),
            "f16" => self.launch_typed::<f16>(device),
            _ => self.launch_typed::<bf16>(device),
        }?;
        device.synchronize()
    }
}

/// Returns a view of a row-major or column-major matrix.
fn matrix<T: GemmElement>(
    buffer: &Buffer<T>,
    [rows, cols]: [usize; 2],
    columns: bool,
) -> tilewright::Result<Tensor<'_, T, 2>> {
    match columns {
        true => Ok(Tensor::dense(buffer.view(), [cols, rows])?.transposed(0, 1)),
        false => Tensor::dense(buffer.view(), [rows, cols]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes() {
        assert_eq!((size("64"), size("4x5x6")), (Ok([64; 3]), Ok([4, 5, 6])));
        for bad in ["", "0", "4x5", "4x5x0", "4x5x6x7", "ax4x5"] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
