//! Writes the PTX of every shipped kernel, in every configuration of its autotune list and of the tuned tables, and of
//! the examples, to a folder: `cargo run --release -p tilewright-tests --example write_ptx -- DIR [NAME...]`, of those
//! whose names begin with a NAME if any is given.
//!
//! `scripts/compare_ptx.py OLD NEW` compares two of these folders up to symbol names: it shows that a change does not
//! change generated code.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use tilewright::kernels::{AUTOTUNED, attention};
use tilewright_codegen::ir::DType;
use tilewright_codegen::lang::kernel::{ConstValue, KernelDef, Specialization};
use tilewright_codegen::passes::assume_ranges;
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{Code, CompileOptions, GpuArch, Schedule, Target};
use tilewright_tests::configurations::{PTX_VERSION, compile_options, configurations, well_aligned};
use tilewright_tests::examples::variants;

/// A kernel to compile.
struct Job {
    def: &'static KernelDef,
    dtypes: Vec<DType>,
    constants: Vec<(&'static str, ConstValue)>,
    specialization: Specialization,
    arch: GpuArch,
    options: CompileOptions,
}

const ARCHS: [GpuArch; 2] = [GpuArch::Sm80, GpuArch::Sm90a];

fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for kernel in configurations(dtype) {
            for arch in ARCHS {
                for specialization in [well_aligned(kernel.def), Specialization::default()] {
                    jobs.push(Job {
                        def: kernel.def,
                        dtypes: kernel.dtypes.clone(),
                        constants: kernel.consts.clone(),
                        specialization,
                        arch,
                        options: kernel.options.clone(),
                    });
                }
            }
        }
    }
    for dtype in [DType::BF16, DType::F32] {
        for kernel in configurations(dtype) {
            for autotune in AUTOTUNED.iter().filter(|autotune| std::ptr::eq(autotune.def, kernel.def)) {
                let mut configs: Vec<_> = autotune.configs().collect();
                configs.extend(autotune.shipped().into_iter().map(|(_, config)| config));
                configs.sort_by_key(ToString::to_string);
                configs.dedup_by_key(|config| config.to_string());
                let has = |name: &str| kernel.consts.iter().any(|(constant, _)| *constant == name);
                let dims: &[usize] = if has("causal") { &[64, 128] } else { &[0] };
                for config in configs {
                    for (&d, causal) in dims.iter().flat_map(|d| [(d, true), (d, false)]) {
                        if d == 0 && causal {
                            continue;
                        }
                        let mut constants: BTreeMap<_, _> = kernel.consts.iter().cloned().collect();
                        constants.extend(config.constants.iter().cloned());
                        if d > 0 {
                            constants.insert("d", ConstValue::Int(d as i64));
                            constants.insert("d_tile", ConstValue::Int(attention::config::d_tile(d) as i64));
                            constants.insert("causal", ConstValue::Bool(causal));
                        }
                        jobs.push(Job {
                            def: kernel.def,
                            dtypes: kernel.dtypes.clone(),
                            constants: constants.into_iter().collect(),
                            specialization: well_aligned(kernel.def),
                            arch: GpuArch::Sm90a,
                            options: compile_options(&config),
                        });
                    }
                }
            }
        }
    }
    for variant in variants() {
        for arch in ARCHS {
            for schedule in [
                Schedule::default(),
                Schedule { warp_specialize: Some(true), overlap: Some(true), ..Schedule::default() },
            ] {
                jobs.push(Job {
                    def: variant.def,
                    dtypes: variant.dtypes.clone(),
                    constants: variant.consts.clone(),
                    specialization: Specialization::aligned_memory(variant.def),
                    arch,
                    options: CompileOptions { schedule, ptx_version: PTX_VERSION, ..CompileOptions::default() },
                });
            }
        }
    }
    jobs
}

/// The PTX, or the reason why there is none.
fn compile(job: &Job) -> String {
    let mut func = match job.def.record(&job.dtypes, &job.constants, &job.specialization) {
        Ok(func) => func,
        Err(_) => return "refused when it was recorded".into(),
    };
    // As for a launch.
    assume_ranges::run(&mut func);
    // Skipped, as by the tuner: not worth minutes of compile time.
    if pipeline::estimate_resources(&func, job.arch, &job.options).is_ok_and(|estimate| estimate.over_limit().is_some())
    {
        return "left out by the estimate of its registers".into();
    }
    match pipeline::compile(&func, &Target::Nvptx(job.arch), &job.options, &mut ()) {
        Ok(artifact) => match artifact.code {
            Code::Ptx(ptx) => ptx,
            Code::Object(_) => unreachable!("a GPU target gives PTX"),
        },
        Err(_) => "refused when it was compiled".into(),
    }
}

fn main() -> std::io::Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().expect("usage: write_ptx DIR [NAME...]");
    let names: Vec<String> = args.collect();
    let dir = Path::new(&dir);
    std::fs::create_dir_all(dir)?;
    let mut jobs = jobs();
    jobs.retain(|job| names.is_empty() || names.iter().any(|name| job.def.name.starts_with(name)));
    let count = jobs.len();
    println!("{count} kernels to compile");
    let next = Mutex::new(jobs.into_iter().enumerate());
    let work = || -> std::io::Result<()> {
        loop {
            let Some((i, job)) = next.lock().expect("no job panics").next() else { return Ok(()) };
            std::fs::write(dir.join(format!("{i:05}-{}.ptx", job.def.name)), compile(&job))?;
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("no job panics"))
    })?;
    println!("{count} files in {}", dir.display());
    Ok(())
}
