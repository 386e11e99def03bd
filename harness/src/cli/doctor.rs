//! `tilewright doctor`: reports GPUs, driver, CPU, tools and cache of this machine, and what each missing part costs.

use std::io::Write;

use clap::Args;
use serde::Serialize;
use tilewright::probe::{self, Report};
use tilewright::{DeviceInfo, Error};

use super::cache::kernels;
use super::output::to_json;
use super::{CliError, Result};

#[derive(Args)]
pub struct Arguments {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// One line of the report.
#[derive(Serialize)]
struct Part {
    name: String,
    /// Whether the part is present and usable.
    ok: bool,
    /// Description of the part, or why it is not usable.
    state: String,
    /// What does not work without the part, and how to install it.
    #[serde(skip_serializing_if = "Option::is_none")]
    cost: Option<String>,
}

#[derive(Serialize)]
struct Doctor {
    version: &'static str,
    /// The default device.
    runs_on: Option<String>,
    parts: Vec<Part>,
    gpus: Vec<Gpu>,
    cpu: Cpu,
}

#[derive(Serialize)]
struct Gpu {
    name: String,
    compute_capability: String,
    sms: u32,
    memory_bytes: u64,
    l2_bytes: u64,
    shared_memory_per_block: u32,
}

#[derive(Serialize)]
struct Cpu {
    name: Option<String>,
    /// LLVM's name of the CPU.
    llvm: String,
    triple: String,
    features: Vec<String>,
    threads: u32,
    memory_bytes: u64,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    let report = probe::report();
    let doctor = examine(&report);
    // A machine without a usable device gets the same report before the command fails.
    let no_device =
        report.best.as_ref().err().map(|error| CliError::Failure(format!("no device can run kernels: {error}")));
    if arguments.json {
        writeln!(out, "{}", to_json(&doctor))?;
        return no_device.map_or(Ok(()), Err);
    }
    let width = doctor.parts.iter().map(|part| part.name.chars().count()).max().unwrap_or(0);
    for part in &doctor.parts {
        let mark = if part.ok { ' ' } else { '-' };
        writeln!(out, "{mark} {:width$}  {}", part.name, indented(&part.state, width + 4))?;
        if let Some(cost) = &part.cost {
            writeln!(out, "  {:width$}  {}", "", indented(cost, width + 4))?;
        }
    }
    if let Some(device) = &doctor.runs_on {
        writeln!(out, "\nKernels run on {device}.")?;
    }
    no_device.map_or(Ok(()), Err)
}

/// Indents all lines but the first by `columns`.
fn indented(text: &str, columns: usize) -> String {
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    lines.join(&format!("\n{:columns$}", ""))
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / (1_u64 << 30) as f64
}

fn examine(report: &Report) -> Doctor {
    let mut parts = vec![llvm(report), cpu(report), driver(report)];
    parts.extend(report.gpus.iter().enumerate().map(|(ordinal, gpu)| match gpu {
        Ok(info) => working_part(format!("GPU {ordinal}"), gpu_line(info)),
        Err(error) => missing_part(format!("GPU {ordinal}"), error.to_string(), "kernels cannot run on this GPU"),
    }));
    parts.push(libraries(report));
    parts.push(ptxas(report));
    parts.push(cache(report));
    Doctor {
        version: tilewright::codegen::VERSION,
        runs_on: report.best.as_ref().ok().cloned(),
        parts,
        gpus: report.gpus.iter().flatten().map(gpu_facts).collect(),
        cpu: Cpu {
            name: report.cpu_model.clone(),
            llvm: report.host_cpu.cpu.clone(),
            triple: report.host_cpu.triple.clone(),
            features: features(report),
            threads: report.cpu.compute_units,
            memory_bytes: report.cpu.memory_bytes,
        },
    }
}

fn working_part(name: impl Into<String>, state: impl Into<String>) -> Part {
    Part { name: name.into(), ok: true, state: state.into(), cost: None }
}

fn missing_part(name: impl Into<String>, state: impl Into<String>, cost: impl Into<String>) -> Part {
    Part { name: name.into(), ok: false, state: state.into(), cost: Some(cost.into()) }
}

fn llvm(report: &Report) -> Part {
    match report.llvm {
        Some(llvm) => {
            working_part("LLVM", format!("{llvm}, statically linked: compiles for GPU and CPU without a toolkit"))
        }
        None => missing_part("LLVM", "not part of this program (feature `llvm`)", "kernels cannot be compiled"),
    }
}

/// CPU features that determine the width and the speed of vector code.
const VECTOR_FEATURES: [&str; 14] = [
    "sse4.2",
    "avx",
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512bf16",
    "avx512fp16",
    "amx-bf16",
    "neon",
    "fullfp16",
    "sve",
];

/// Returns all features of the CPU, in LLVM's spelling.
fn features(report: &Report) -> Vec<String> {
    report.host_cpu.features.split(',').filter_map(|word| word.strip_prefix('+')).map(String::from).collect()
}

fn cpu(report: &Report) -> Part {
    let all = features(report);
    let vector: Vec<&str> = VECTOR_FEATURES.into_iter().filter(|name| all.iter().any(|have| have == name)).collect();
    let name = report.cpu_model.as_deref().unwrap_or(&report.cpu.name);
    working_part(
        "CPU",
        format!(
            "{name} (LLVM: {}), {} threads, {:.1} GiB\n{}",
            report.host_cpu.cpu,
            report.cpu.compute_units,
            gib(report.cpu.memory_bytes),
            vector.join(" ")
        ),
    )
}

fn driver(report: &Report) -> Part {
    match &report.driver {
        Ok(version) => working_part("CUDA driver", format!("{}.{}", version / 1000, version % 1000 / 10)),
        Err(error) => {
            // The rest of the message says how a program chooses its device.
            let state = match error {
                Error::NoDriver { reason } => reason.clone(),
                other => other.to_string(),
            };
            missing_part("CUDA driver", state, "kernels run on the CPU; compiling to PTX needs no driver")
        }
    }
}

fn gpu_line(info: &DeviceInfo) -> String {
    let (major, minor) = info.compute_capability.unwrap_or_default();
    format!(
        "{}, compute capability {major}.{minor}, {} SMs, {:.1} GiB, L2 {} MiB, shared memory per block {} KiB",
        info.name,
        info.compute_units,
        gib(info.memory_bytes),
        info.l2_bytes >> 20,
        info.max_shared_bytes >> 10
    )
}

fn gpu_facts(info: &DeviceInfo) -> Gpu {
    let (major, minor) = info.compute_capability.unwrap_or_default();
    Gpu {
        name: info.name.clone(),
        compute_capability: format!("{major}.{minor}"),
        sms: info.compute_units,
        memory_bytes: info.memory_bytes,
        l2_bytes: info.l2_bytes,
        shared_memory_per_block: info.max_shared_bytes,
    }
}

fn libraries(report: &Report) -> Part {
    let (found, missing): (Vec<_>, Vec<_>) = report.libraries.iter().partition(|library| library.file.is_some());
    let names = |list: &[&probe::Library]| list.iter().map(|library| library.name).collect::<Vec<_>>().join(", ");
    let state = match (found.is_empty(), missing.is_empty()) {
        (true, _) => "none".to_string(),
        (false, true) => names(&found),
        (false, false) => format!("{} (not {})", names(&found), names(&missing)),
    };
    if missing.is_empty() {
        return working_part("CUDA libraries", state);
    }
    let uses: Vec<String> = missing.iter().map(|library| format!("{} ({})", library.name, library.purpose)).collect();
    let cost = format!("kernels do not need them; other features do:\n{}", uses.join(", "));
    Part { name: "CUDA libraries".into(), ok: !found.is_empty(), state, cost: Some(cost) }
}

fn ptxas(report: &Report) -> Part {
    const COST: &str = "kernels do not need it; tests that assemble the PTX are skipped\n\
                        (`make cuda-tools` downloads it to build/cuda-tools/nvidia/cu13/bin/ptxas: set TILEWRIGHT_PTXAS to that path)";
    match &report.ptxas {
        Ok(Some(ptxas)) => working_part("ptxas", format!("{} at {}", ptxas.version, ptxas.path.display())),
        Ok(None) => missing_part("ptxas", "not found", COST),
        Err(error) => missing_part("ptxas", error.to_string(), COST),
    }
}

fn cache(report: &Report) -> Part {
    const COST: &str = "every process recompiles its kernels (set TILEWRIGHT_CACHE to a folder)";
    match (&report.cache_dir, &report.cache) {
        (_, Err(error)) => missing_part("cache folder", error.to_string(), COST),
        (None, Ok(())) => missing_part("cache folder", "off", COST),
        (Some(dir), Ok(())) => {
            let (entries, bytes) = report.cache_usage;
            working_part(
                "cache folder",
                format!("{}: {}, {} KiB", dir.display(), kernels(entries), bytes.div_ceil(1024)),
            )
        }
    }
}
