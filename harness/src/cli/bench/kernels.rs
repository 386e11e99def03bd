//! `tilewright bench kernels`: times memory-bound kernels and matmuls.

use std::io::Write;

use clap::{Args, Parser, ValueEnum};
use half::bf16;
use tilewright::Device;

use super::data::Number;
use super::record::{Measured, Recorder, Row, Work};
use super::rowwise::{Op, RowwiseBuffers, supports};
use super::{Common, copy, matmul, scaled_matmul};
use crate::cli::{CliError, Result, expect_used, shipped};

#[derive(Args)]
pub struct Arguments {
    #[command(flatten)]
    common: Common,
    /// Kernels, separated by commas. Default: all
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Kernel>,
    /// Number of rows. Default: 50000, or 8192 on the CPU
    #[arg(long)]
    rows: Option<usize>,
    /// Elements per row, separated by commas. Default: 1024,2048,4096,8192, or 1024 on the CPU
    #[arg(long, value_delimiter = ',')]
    d: Vec<usize>,
    /// Sizes of square matmuls, separated by commas. Default: 1024,2048,4096,8192, or 512 on the CPU
    #[arg(long, value_delimiter = ',')]
    sizes: Vec<usize>,
}

/// A group of kernels: forward and backward, or variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Kernel {
    WeightedSum,
    ColumnSum,
    Softmax,
    RmsNorm,
    LayerNorm,
    Activation,
    Swiglu,
    CrossEntropy,
    Rope,
    Embedding,
    Adamw,
    Cast,
    RankSum,
    Matmul,
    ScaledMatmul,
}

impl Kernel {
    fn ops(self) -> &'static [Op] {
        match self {
            Kernel::WeightedSum => &[Op::WeightedSum, Op::WeightedSumBackward],
            Kernel::ColumnSum => &[Op::ColumnSum],
            Kernel::Softmax => &[Op::Softmax, Op::SoftmaxBackward],
            Kernel::RmsNorm => &[Op::RmsNorm, Op::RmsNormBackward],
            Kernel::LayerNorm => &[Op::LayerNorm, Op::LayerNormBackward],
            Kernel::Activation => &[Op::Activation, Op::ActivationBackward],
            Kernel::Swiglu => &[Op::Swiglu, Op::SwigluBackward],
            Kernel::CrossEntropy => &[Op::CrossEntropy, Op::CrossEntropyBackward, Op::CrossEntropyInPlace],
            Kernel::Rope => &[Op::RopeFrom, Op::RopeAt],
            Kernel::Embedding => &[Op::EmbeddingBackward],
            Kernel::Adamw => &[Op::AdamW, Op::AdamWWithComputeWeights, Op::AdamWTwoPeers],
            Kernel::Cast => &[Op::Cast, Op::Scale],
            Kernel::RankSum => &[Op::RankSum],
            Kernel::Matmul | Kernel::ScaledMatmul => &[],
        }
    }

    /// Returns the group that times a kernel of the registry, and its op unless it is a matmul; `None` for attention
    /// kernels.
    fn of(kernel: &str) -> Option<(Kernel, Option<Op>)> {
        // Softmax of rows that do not fit into a tile is a separate kernel.
        let name = match kernel {
            "softmax_rows" | "softmax_wide_rows" => "softmax",
            // The same work, with step control in device memory instead of arguments.
            "adamw_controlled" => "adamw_with_compute_weights",
            other => other,
        };
        match name {
            "matmul" | "matmul_swiglu" => return Some((Kernel::Matmul, None)),
            "scaled_matmul" => return Some((Kernel::ScaledMatmul, None)),
            _ => {}
        }
        let find = |group: &Kernel| group.ops().iter().find(|op| op.name() == name).map(|op| (*group, Some(*op)));
        Kernel::value_variants().iter().find_map(find)
    }
}

/// Arguments after the name of a kernel.
#[derive(Parser)]
#[command(name = "tilewright bench KERNEL", max_term_width = 100)]
struct Named {
    #[command(flatten)]
    arguments: Arguments,
}

/// Runs `tilewright bench KERNEL …`: times one kernel of the registry, such as `softmax_rows`.
pub fn run_named(words: &[String], out: &mut dyn Write) -> Result<()> {
    let name = words.first().map_or("", String::as_str);
    let def = shipped().find(name)?;
    let Some((group, op)) = Kernel::of(def.name) else {
        return Err(CliError::usage(
            format!("`{}` is an attention kernel, and is timed with the other ones", def.name),
            "tilewright bench attention",
        ));
    };
    let mut named = tilewright_cli::parse::<Named>(words).map_err(CliError::Arguments)?.arguments;
    if !named.only.is_empty() {
        let message = format!("--only is unused: `tilewright bench {name}` measures this kernel");
        return Err(CliError::usage(message, "omit it, or write `tilewright bench kernels --only …`"));
    }
    named.only = vec![group];
    measure(&named, op, out)
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    measure(arguments, None, out)
}

/// Refuses the extents of kernels that are not measured.
fn check_extents(arguments: &Arguments, wanted: &[Kernel]) -> Result<()> {
    let has_rows = wanted.iter().any(|kernel| !kernel.ops().is_empty());
    let has_sizes = wanted.iter().any(|kernel| kernel.ops().is_empty());
    let unused = [
        ("--rows", arguments.rows.is_some() && !has_rows, "matmuls have --sizes"),
        ("--d", !arguments.d.is_empty() && !has_rows, "matmuls have --sizes"),
        ("--sizes", !arguments.sizes.is_empty() && !has_sizes, "kernels other than matmuls have --rows and --d"),
    ];
    expect_used(unused.map(|(option, is_unused, help)| {
        (option, is_unused, "no kernel that is measured has it".to_string(), help.to_string())
    }))
}

fn measure(arguments: &Arguments, alone: Option<Op>, out: &mut dyn Write) -> Result<()> {
    let wanted = if arguments.only.is_empty() { Kernel::value_variants() } else { &arguments.only };
    check_extents(arguments, wanted)?;
    let (device, mut recorder) = arguments.common.open("kernels")?;
    let or = |given: &[usize], gpu: &[usize], cpu: &[usize]| match (given, device.is_cuda()) {
        ([], true) => gpu.to_vec(),
        ([], false) => cpu.to_vec(),
        (given, _) => given.to_vec(),
    };
    let rows = or(arguments.rows.as_slice(), &[50_000], &[8192])[0];
    let ds = or(&arguments.d, &[1024, 2048, 4096, 8192], &[1024]);
    let sizes = or(&arguments.sizes, &[1024, 2048, 4096, 8192], &[512]);
    if rows == 0 || ds.contains(&0) || sizes.contains(&0) {
        return Err(CliError::usage("empty tensors cannot be timed", "rows, d and sizes must be at least 1"));
    }
    let all = wanted.iter().flat_map(|kernel| kernel.ops()).copied();
    let ops: Vec<Op> = all.filter(|op| alone.is_none_or(|alone| alone == *op)).collect();
    if !ops.is_empty() {
        let copy_gbps = copy::bandwidth(&arguments.common, &device)?;
        for d in ds {
            measure_rowwise::<f32>(arguments, &device, &ops, [rows, d], copy_gbps, &mut recorder)?;
            measure_rowwise::<bf16>(arguments, &device, &ops, [rows, d], copy_gbps, &mut recorder)?;
        }
    }
    if wanted.contains(&Kernel::ScaledMatmul) {
        for &n in &sizes {
            scaled_matmul::measure(&arguments.common, &device, n, &mut recorder)?;
        }
    }
    if wanted.contains(&Kernel::Matmul) {
        for n in sizes {
            matmul::measure::<bf16>(&arguments.common, &device, n, &mut recorder)?;
            matmul::measure_swiglu::<bf16>(&arguments.common, &device, n, &mut recorder)?;
            matmul::measure::<f32>(&arguments.common, &device, n, &mut recorder)?;
            matmul::measure_swiglu::<f32>(&arguments.common, &device, n, &mut recorder)?;
            matmul::measure::<f64>(&arguments.common, &device, n, &mut recorder)?;
        }
    }
    recorder.finish(out)
}

/// Returns the number of rows of the check: enough for the tiles of a large problem, with the same remainder modulo 64.
fn checked_rows(rows: usize) -> usize {
    rows.min(4096 + rows % 64)
}

fn measure_rowwise<T: Number>(
    arguments: &Arguments,
    device: &Device,
    ops: &[Op],
    [rows, d]: [usize; 2],
    copy_gbps: f64,
    recorder: &mut Recorder,
) -> Result<()> {
    let mut small = RowwiseBuffers::<T>::new(device, checked_rows(rows), d)?;
    let mut full = RowwiseBuffers::<T>::new(device, rows, d)?;
    for &op in ops.iter().filter(|op| supports(**op, d)) {
        let measured = (|| -> Measured {
            small.prepare(op)?;
            full.prepare(op)?;
            small.run(op)?;
            let error = small.check(op)?;
            Ok((arguments.common.time(device, || full.run(op))?, error))
        })();
        let bytes = (op.bytes_per_element(T::dtype().bytes()) * rows * d) as f64;
        let row = Row::new(op.name(), &[rows, d], T::dtype().name());
        recorder.push(row.measured(&measured, Work::Bytes(bytes, Some(copy_gbps))))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tilewright::kernels::KERNELS;

    #[test]
    fn every_kernel_is_timed() {
        for def in KERNELS {
            // `bench attention` times these.
            let beside = ["document_ranges_of_side", "quantize_rows", "transpose_values"];
            let attention = def.name.starts_with("flash_attention") || beside.contains(&def.name);
            assert_eq!(Kernel::of(def.name).is_none(), attention, "`{}`", def.name);
        }
        assert_eq!(Kernel::of("rms_norm_bwd"), Some((Kernel::RmsNorm, Some(Op::RmsNormBackward))));
    }

    #[test]
    fn checks_have_the_rest_of_the_rows() {
        assert_eq!([50_000, 8192, 100].map(checked_rows), [4112, 4096, 100]);
    }
}
