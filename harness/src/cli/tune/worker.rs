//! What a worker does: one launch of one kernel, tuned.

use std::path::Path;
use std::time::Duration;

use half::{bf16, f16};
use serde::{Deserialize, Serialize};
use tilewright::autotune::{self, Outcome};
use tilewright::kernels::attention::{self, reference};
use tilewright::kernels::{Tensor, TensorMut, matmul};
use tilewright::prelude::Precision;
use tilewright::{Buffer, Device, elements};

use super::Arguments;
use crate::cli::bench::attention_check::Attention;
use crate::cli::bench::data::{Number, normal};
use crate::cli::bench::rows::{Op, Rows};
use crate::cli::{CliError, Result};

/// The kernels that `attention` means.
pub const ATTENTION: [&str; 3] = ["flash_attention_fwd", "flash_attention_bwd_dkdv", "flash_attention_bwd_dq"];
pub const MATMUL: &str = "matmul";
/// Rows, and elements of a row, several of them.
type RowShapes = (usize, &'static [usize]);

const TOKENS: RowShapes = (50_000, &[1024, 2048, 4096, 8192]);
const LOGITS: RowShapes = (16_384, &[10_000, 50_257, 131_072]);

/// The kernels over rows, what launches them, and what they are tuned for on a GPU where nobody says otherwise.
const ROWS: [(&str, Op, RowShapes); 8] = [
    ("cross_entropy_fwd", Op::CrossEntropy, LOGITS),
    ("layer_norm_bwd", Op::LayerNormBackward, TOKENS),
    ("layer_norm_fwd", Op::LayerNorm, TOKENS),
    ("rms_norm_bwd", Op::RmsNormBackward, TOKENS),
    ("rms_norm_fwd", Op::RmsNorm, TOKENS),
    ("softmax_rows", Op::Softmax, TOKENS),
    ("weighted_sum_bwd", Op::WeightedSumBackward, TOKENS),
    ("weighted_sum_fwd", Op::WeightedSum, TOKENS),
];

/// Everything that can be tuned.
pub fn kernels() -> impl Iterator<Item = &'static str> {
    ATTENTION.into_iter().chain([MATMUL]).chain(ROWS.map(|(name, ..)| name))
}

/// What launches a kernel over rows; `None` for the others.
fn op_of(kernel: &str) -> Option<Op> {
    ROWS.iter().find(|(name, ..)| *name == kernel).map(|(_, op, _)| *op)
}

/// Usual shapes of a kernel over rows; `None` for the others.
pub fn usual_rows(kernel: &str) -> Option<RowShapes> {
    ROWS.iter().find(|(name, ..)| *name == kernel).map(|(_, _, shapes)| *shapes)
}

/// A kernel and what it is tuned for.
#[derive(Clone, Debug, PartialEq)]
pub struct Problem {
    kernel: &'static str,
    dtype: String,
    /// How f32 multiplies on a GPU.
    precision: Option<Precision>,
    shape: Shape,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Shape {
    /// Batch, heads, length and head dimension.
    Attention([usize; 4], bool),
    /// m, n and k, and which operands lie column by column.
    Product([usize; 3], [bool; 2]),
    /// Rows, and elements of a row.
    Rows([usize; 2]),
}

/// `256x256x64`, or `256` for all three.
pub fn size(text: &str) -> Result<[usize; 3], String> {
    let wrong = || format!("`{text}` is no size: write it as 256x256x64");
    let numbers: Vec<usize> =
        text.split(['x', '×']).map(|n| n.parse().map_err(|_| wrong())).collect::<Result<_, _>>()?;
    match numbers[..] {
        [n] if n > 0 => Ok([n; 3]),
        [m, n, k] if m > 0 && n > 0 && k > 0 => Ok([m, n, k]),
        _ => Err(wrong()),
    }
}

/// The words for which operands lie column by column.
const COLUMNS: [(&str, [bool; 2]); 4] =
    [("none", [false, false]), ("a", [true, false]), ("b", [false, true]), ("ab", [true, true])];

/// One of [`COLUMNS`].
pub fn columns(text: &str) -> Result<[bool; 2], String> {
    let found = COLUMNS.iter().find(|(word, _)| *word == text);
    found.map(|(_, columns)| *columns).ok_or_else(|| format!("`{text}` is none of none, a, b and ab"))
}

fn word_of(columns: [bool; 2]) -> &'static str {
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
        Problem { kernel: MATMUL, dtype: dtype.to_string(), precision, shape: Shape::Product(size, columns) }
    }

    pub fn over_rows(kernel: &'static str, dtype: &str, shape: [usize; 2]) -> Problem {
        Problem { kernel, dtype: dtype.to_string(), precision: None, shape: Shape::Rows(shape) }
    }

    /// The element type, and how it multiplies where there is a choice.
    fn numbers(&self) -> String {
        match self.precision {
            Some(precision) => format!("{} ({})", self.dtype, precision.name()),
            None => self.dtype.clone(),
        }
    }

    /// In words; different for every problem.
    pub fn title(&self) -> String {
        let (kernel, dtype) = (self.kernel, self.numbers());
        match self.shape {
            Shape::Attention([b, h, n, d], causal) => {
                format!("{kernel} {dtype} {b}×{h}×{n}×{d} {}", if causal { "causal" } else { "full" })
            }
            Shape::Product([m, n, k], [false, false]) => format!("{kernel} {dtype} {m}×{n}×{k}"),
            Shape::Product([m, n, k], columns) => {
                format!("{kernel} {dtype} {m}×{n}×{k}, {} by columns", word_of(columns))
            }
            Shape::Rows([rows, d]) => format!("{kernel} {dtype} {rows}×{d}"),
        }
    }

    /// The command line that means this problem alone.
    pub fn arguments(&self) -> Vec<String> {
        let mut words = vec![self.kernel.to_string(), "--dtype".to_string(), self.dtype.clone()];
        let mut add = |name: &str, value: String| words.extend([name.to_string(), value]);
        match self.shape {
            Shape::Attention([b, h, n, d], causal) => {
                add("--batch", b.to_string());
                add("--heads", h.to_string());
                add("--length", n.to_string());
                add("--dim", d.to_string());
                add("--causal", causal.to_string());
            }
            Shape::Product([m, n, k], columns) => {
                add("--size", format!("{m}x{n}x{k}"));
                add("--columns", word_of(columns).to_string());
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

    /// Launches the kernel, after what it needs.
    fn launch<T: Number>(&self, device: &Device) -> tilewright::Result<()> {
        match self.shape {
            Shape::Attention([batch, heads, n, d], causal) => {
                let scale = f64::from(1.0 / (d as f32).sqrt());
                let problem =
                    reference::Problem { batch, heads_q: heads, heads_kv: heads, n_q: n, n_k: n, d, causal, scale };
                let mut attention = Attention::<T>::new(device, problem)?;
                let options = attention::Options { precision: self.precision, ..attention::Options::new(causal) };
                attention.forward(&options)?;
                if self.kernel != ATTENTION[0] {
                    attention.backward(&options)?;
                }
            }
            Shape::Product([m, n, k], [a_columns, b_columns]) => {
                let [a, b, c] = [elements(&[m, k])?, elements(&[k, n])?, elements(&[m, n])?];
                device.expect_memory((a as f64 + b as f64 + c as f64) * size_of::<T>() as f64)?;
                let (a, b) = (normal::<T>(device, a, 1)?, normal::<T>(device, b, 2)?);
                let mut c = Buffer::<T>::poisoned(device, c)?;
                let (a, b) = (matrix(&a, [m, k], a_columns)?, matrix(&b, [k, n], b_columns)?);
                let c = TensorMut::dense(c.view_mut(), [m, n])?;
                let options = matmul::Options::default();
                let precision = self.precision.unwrap_or(options.precision);
                matmul::multiply(device, a, b, c, matmul::Options { precision, ..options })?;
            }
            Shape::Rows([rows, d]) => {
                if let Some(op) = op_of(self.kernel) {
                    let mut rows = Rows::<T>::new(device, rows, d)?;
                    rows.before(op)?;
                    rows.run(op)?;
                }
            }
        }
        device.synchronize()
    }
}

/// A matrix that lies row by row, or column by column.
fn matrix<T: Number>(
    buffer: &Buffer<T>,
    [rows, cols]: [usize; 2],
    columns: bool,
) -> tilewright::Result<Tensor<'_, T, 2>> {
    match columns {
        true => Ok(Tensor::dense(buffer.view(), [cols, rows])?.transposed(0, 1)),
        false => Tensor::dense(buffer.view(), [rows, cols]),
    }
}

/// What a worker found, as one line.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Answer {
    #[serde(skip)]
    pub title: String,
    pub kernel: String,
    pub key: String,
    pub config: String,
    pub median_ms: Option<f64>,
    pub seconds: f64,
    /// None where it was known.
    pub candidates: Vec<Tried>,
}

/// One candidate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Tried {
    pub config: String,
    pub median_ms: Option<f64>,
    pub runs: Option<usize>,
    pub dropped: Option<String>,
}

/// Tunes the kernel for the problem.
///
/// # Errors
/// No candidate works, or the device is lost.
pub fn tune(problem: &Problem, device: &Device, arguments: &Arguments, log: &Path) -> Result<Answer> {
    let options = autotune::Options {
        again: arguments.again,
        kernel: Some(problem.kernel.to_string()),
        limit: Duration::from_secs_f64(arguments.limit),
        log: Some(log.to_path_buf()),
        ..autotune::Options::new(Duration::from_secs_f64(arguments.budget))
    };
    let (outcome, reports) = autotune::tuning(&options, || match problem.dtype.as_str() {
        "f32" => problem.launch::<f32>(device),
        "f16" => problem.launch::<f16>(device),
        _ => problem.launch::<bf16>(device),
    });
    outcome?;
    if let Some(report) = reports.into_iter().next() {
        let tried = |candidate: autotune::Candidate| {
            let config = candidate.config.to_string();
            match candidate.outcome {
                Outcome::Timed { median_ms, runs } => {
                    Tried { config, median_ms: Some(median_ms), runs: Some(runs), dropped: None }
                }
                Outcome::Dropped(why) => Tried { config, dropped: Some(why), ..Tried::default() },
                Outcome::Unfinished => {
                    Tried { config, dropped: Some("the budget ended before it".to_string()), ..Tried::default() }
                }
            }
        };
        let (config, median_ms) = report.chosen;
        return Ok(Answer {
            title: problem.title(),
            kernel: report.kernel.to_string(),
            key: report.key,
            config: config.to_string(),
            median_ms: Some(median_ms),
            seconds: report.seconds,
            candidates: report.candidates.into_iter().map(tried).collect(),
        });
    }
    let chosen = autotune::chosen().into_iter().find(|choice| choice.kernel == problem.kernel);
    let choice = chosen.ok_or_else(|| {
        CliError::Failure(format!("internal error: `{}` chose no configuration; please report", problem.kernel))
    })?;
    let (kernel, key, config) = (choice.kernel.to_string(), choice.key.clone(), choice.config.to_string());
    Ok(Answer { title: problem.title(), kernel, key, config, ..Answer::default() })
}

impl Answer {
    /// As a worker prints it.
    pub fn line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// # Errors
    /// A line that no worker prints.
    pub fn parse(problem: &Problem, line: &str) -> Result<Answer> {
        let answer: Answer = serde_json::from_str(line).map_err(|error| {
            CliError::Failure(format!("internal error: a worker answered `{line}`: {error}; please report"))
        })?;
        Ok(Answer { title: problem.title(), ..answer })
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
