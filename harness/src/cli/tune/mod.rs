//! `tilewright tune`: autotunes the shipped kernels for problems that they have host functions for ([`tune`]).

mod worker;

use std::io::Write;

use clap::Args;
use tilewright::codegen::lang::Precision;
use tilewright_cli::device::open;
use tilewright_cli::tune::{Settings, tune};

use self::worker::Problem;
use super::{CliError, Result, choose, expect_used, shipped};

#[derive(Args)]
pub struct Arguments {
    /// Names of kernels, as in `tilewright list`; `attention` means the FlashAttention-2 kernels with tiles. Default:
    /// all that can be tuned
    kernels: Vec<String>,
    #[command(flatten)]
    settings: Settings,
    /// Element types, separated by commas; f64 for matmul only. Default: bf16, or f32 on the CPU
    #[arg(long, value_delimiter = ',', value_parser = ["bf16", "f16", "f32", "f64"])]
    dtype: Vec<String>,
    /// Attention: batch size. Default: 1
    #[arg(long)]
    batch: Option<usize>,
    /// Attention: number of heads. Default: 16, or 2 on the CPU
    #[arg(long)]
    heads: Option<usize>,
    /// Attention: sequence lengths, separated by commas. Default: 16384, or 512 on the CPU
    #[arg(long, alias = "length", value_delimiter = ',')]
    seq_len: Vec<usize>,
    /// Attention: head dimensions, separated by commas. Default: 64,128, or 64 on the CPU
    #[arg(long, alias = "dim", value_delimiter = ',')]
    head_dim: Vec<usize>,
    /// Attention: causal mask; `true,false` tunes with and without. Default: true
    #[arg(long, value_delimiter = ',', action = clap::ArgAction::Set)]
    causal: Vec<bool>,
    /// Matmul: sizes m×n×k, separated by commas. Default: 4096x4096x4096, or 256x256x256 on the CPU
    #[arg(long, value_delimiter = ',', value_parser = worker::size)]
    size: Vec<[usize; 3]>,
    /// Matmul: column-major operands, separated by commas: none, a, b, ab. A linear layer has b forward, none for the
    /// gradient of its input, and a for the gradient of its weight. Default: none
    #[arg(long, alias = "columns", value_delimiter = ',', value_parser = worker::columns)]
    column_major: Vec<[bool; 2]>,
    /// f32 on a GPU: precision of matmul and attention, separated by commas. Default: tf32x3
    #[arg(long, value_delimiter = ',', value_parser = ["tf32x3", "tf32", "ieee"])]
    precision: Vec<String>,
    /// Row-wise kernels: number of rows. Default: 50000 (16384 for cross-entropy), or 512 on the CPU
    #[arg(long)]
    rows: Option<usize>,
    /// Row-wise kernels: elements per row, separated by commas. Default: 1024 to 8192 (10000, 50257 and 131072 for
    /// cross-entropy), or 256 on the CPU
    #[arg(long, value_delimiter = ',')]
    d: Vec<usize>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    tune(&arguments.problems()?, &arguments.settings, &shipped(), out)
}

impl Arguments {
    /// Returns every requested combination of kernel and problem.
    fn problems(&self) -> Result<Vec<Problem>> {
        let mut kernels: Vec<&'static str> = Vec::new();
        for name in &self.kernels {
            match name.as_str() {
                "attention" => kernels.extend(worker::ATTENTION),
                other => match worker::kernels().find(|known| *known == other) {
                    Some(known) => kernels.push(known),
                    None => {
                        let known: Vec<&str> = worker::kernels().collect();
                        let help = choose::suggest(other, &known, "the kernels that can be tuned are");
                        return Err(CliError::usage(format!("`{other}` is not a kernel that can be tuned"), help));
                    }
                },
            }
        }
        if kernels.is_empty() {
            kernels.extend(worker::kernels());
        }
        let gpu = open(self.settings.device)?.is_cuda();
        let or = |given: &[usize], gpu_default: &[usize], cpu_default: &[usize]| match (given, gpu) {
            ([], true) => gpu_default.to_vec(),
            ([], false) => cpu_default.to_vec(),
            (given, _) => given.to_vec(),
        };
        let (heads, lengths) = (self.heads.unwrap_or(if gpu { 16 } else { 2 }), or(&self.seq_len, &[16384], &[512]));
        let dims = or(&self.head_dim, &[64, 128], &[64]);
        let default_size = [[if gpu { 4096 } else { 256 }; 3]];
        let sizes = if self.size.is_empty() { &default_size[..] } else { &self.size };
        let default_dtype = [if gpu { "bf16" } else { "f32" }.to_string()];
        let dtypes = if self.dtype.is_empty() { &default_dtype[..] } else { &self.dtype };
        self.expect_used(&kernels, gpu && dtypes.iter().any(|dtype| dtype == "f32"))?;
        let batch = self.batch.unwrap_or(1);
        let masks = if self.causal.is_empty() { &[true][..] } else { &self.causal };
        let orders = if self.column_major.is_empty() { &[[false; 2]][..] } else { &self.column_major };
        if self.rows == Some(0) || self.d.contains(&0) {
            return Err(CliError::usage(
                "kernels cannot be tuned for empty tensors",
                "--rows and --d must be at least 1",
            ));
        }
        let wrong = [batch, heads].contains(&0) || lengths.contains(&0) || !dims.iter().all(|d| (1..=256).contains(d));
        if wrong {
            return Err(CliError::usage(
                "invalid shape of attention",
                "--batch, --heads and --seq-len must be at least 1, head dimensions from 1 to 256",
            ));
        }
        let mut problems = Vec::new();
        let precisions = |dtype: &str| match (dtype == "f32" && gpu, &self.precision[..]) {
            (false, _) => vec![None],
            (true, []) => vec![Some(Precision::Tf32x3)],
            (true, given) => given.iter().map(|word| Precision::from_name(word)).collect(),
        };
        for kernel in kernels {
            for dtype in dtypes {
                if dtype == "f64" && kernel != worker::MATMUL {
                    return Err(CliError::usage(
                        format!("`{kernel}` has no form in f64"),
                        "--dtype f64 is for matmul: name that kernel",
                    ));
                }
                if kernel == worker::MATMUL {
                    for precision in precisions(dtype) {
                        for &columns in orders {
                            problems.extend(sizes.iter().map(|&size| Problem::matmul(dtype, precision, size, columns)));
                        }
                    }
                    continue;
                }
                if let Some((rows, ds)) = worker::default_row_shapes(kernel) {
                    let rows = self.rows.unwrap_or(if gpu { rows } else { 512 });
                    let shapes = or(&self.d, ds, &[256]).into_iter().map(|d| [rows, d]);
                    problems.extend(shapes.map(|shape| Problem::rowwise(kernel, dtype, shape)));
                    continue;
                }
                for precision in precisions(dtype) {
                    for &d in &dims {
                        for &causal in masks {
                            let shape = |n| [batch, heads, n, d];
                            let problem = |&n| Problem::attention(kernel, dtype, precision, shape(n), causal);
                            problems.extend(lengths.iter().map(problem));
                        }
                    }
                }
            }
        }
        Ok(problems)
    }

    /// Refuses options that none of the kernels uses. `has_f32`: whether one is tuned for f32 on a GPU.
    fn expect_used(&self, kernels: &[&'static str], has_f32: bool) -> Result<()> {
        let attention = kernels.iter().any(|kernel| worker::ATTENTION.contains(kernel));
        let matmul = kernels.contains(&worker::MATMUL);
        let rowwise = kernels.iter().any(|kernel| worker::default_row_shapes(kernel).is_some());
        let precision = has_f32 && (attention || matmul);
        let options = [
            ("--batch", self.batch.is_some(), "attention", attention),
            ("--heads", self.heads.is_some(), "attention", attention),
            ("--seq-len", !self.seq_len.is_empty(), "attention", attention),
            ("--head-dim", !self.head_dim.is_empty(), "attention", attention),
            ("--causal", !self.causal.is_empty(), "attention", attention),
            ("--size", !self.size.is_empty(), "matmul", matmul),
            ("--column-major", !self.column_major.is_empty(), "matmul", matmul),
            ("--precision", !self.precision.is_empty(), "matmul and attention of f32 on a GPU", precision),
            ("--rows", self.rows.is_some(), "row-wise kernels", rowwise),
            ("--d", !self.d.is_empty(), "row-wise kernels", rowwise),
        ];
        expect_used(options.map(|(option, is_given, of, is_tuned)| {
            let help = "omit it, or tune what it is for".to_string();
            (option, is_given && !is_tuned, format!("it is for {of}"), help)
        }))
    }
}
