//! Every kernel through the compiler: snapshots of its stages, and PTX that `ptxas` assembles.
//!
//! `INSTA_UPDATE=always cargo test -p tilewright-tests --test kernels_compiled` accepts the new text; review the
//! difference before committing it.

use std::sync::Mutex;
use tilewright_codegen::ir::{DType, Func, Stage};
use tilewright_codegen::lang::kernel::{ArgSpec, Specialization};
use tilewright_codegen::pipeline::{self, Observer};
use tilewright_codegen::target::{Code, GpuArch, Target};
use tilewright_codegen::text;
use tilewright_tests::configurations::{Configuration, configurations, well_aligned};
use tilewright_tests::consts;
use tilewright_tests::ptxas;

const ARCHS: [GpuArch; 2] = [GpuArch::Sm80, GpuArch::Sm90a];

/// The text after the last pass of each stage.
#[derive(Default)]
struct Stages {
    schedule: String,
    last: String,
}

impl Observer for Stages {
    fn after(&mut self, _: &'static str, stage: Stage, func: &Func) {
        match stage {
            Stage::Tile | Stage::Layout => {}
            Stage::Schedule => self.schedule = text::print(func),
            Stage::Async => self.last = text::print(func),
        }
    }
    fn llvm_ir(&mut self, _: &str) {}
}

fn ptx(configuration: &Configuration, specialization: &Specialization, arch: GpuArch) -> Result<String, String> {
    let func = configuration.record(specialization);
    let target = Target::Nvptx(arch);
    match pipeline::compile(&func, &target, &configuration.options, &mut ()).map_err(|e| e.to_string())?.code {
        Code::Ptx(ptx) => Ok(ptx),
        Code::Object(_) => Err("an object file instead of PTX".into()),
    }
}

#[test]
fn stages_of_every_kernel() {
    for configuration in configurations(DType::BF16) {
        let name = configuration.def.name;
        let func = configuration.record(&well_aligned(configuration.def));
        insta::assert_snapshot!(format!("{name}.tile"), text::print(&func));
        let stages = |arch| {
            let mut stages = Stages::default();
            pipeline::gpu_ir(&func, arch, &configuration.options, &mut stages);
            stages
        };
        let (ampere, hopper) = (stages(GpuArch::Sm80), stages(GpuArch::Sm90a));
        insta::assert_snapshot!(format!("{name}.async.sm_90a"), hopper.last);
        // Without asynchronous ops the last two stages are the same; often both architectures are the same, too.
        if hopper.schedule != hopper.last {
            insta::assert_snapshot!(format!("{name}.schedule.sm_90a"), hopper.schedule);
        }
        if ampere.last != hopper.last {
            insta::assert_snapshot!(format!("{name}.async.sm_80"), ampere.last);
        }
    }
}

/// The PTX of one small kernel, which can be reviewed.
#[test]
fn ptx_of_weighted_sum() {
    let all = configurations(DType::BF16);
    let configuration = all.iter().find(|c| c.def.name == "weighted_sum_fwd").expect("a configuration");
    for arch in ARCHS {
        let ptx = ptx(configuration, &well_aligned(configuration.def), arch).unwrap();
        insta::assert_snapshot!(format!("weighted_sum_fwd.ptx.{}", arch.name()), ptx);
    }
}

/// Rows of 50257 elements are not aligned to 16 bytes, so a launch does not specialize on their addresses and strides.
/// Logits are loaded and gradients are stored 16 bytes at a time nevertheless, except for the peeled head and tail of
/// each row and the logit of the target.
#[test]
fn unaligned_rows_are_vectorized() {
    for (name, loads, stores) in [("cross_entropy_fwd", 2, 0), ("cross_entropy_bwd", 1, 1)] {
        let all = configurations(DType::BF16);
        let mut configuration = all.into_iter().find(|c| c.def.name == name).expect("a configuration");
        configuration.consts.extend(consts! { vector = 8usize }.iter().cloned());
        let mut spec = well_aligned(configuration.def);
        for (arg, param) in spec.args.iter_mut().zip(configuration.def.params) {
            if ["logits", "grad_logits", "d"].contains(&param.name) || param.name.ends_with("_stride_row") {
                *arg = ArgSpec::default();
            }
        }
        for arch in ARCHS {
            let ptx = ptx(&configuration, &spec, arch).unwrap();
            let count = |what: &str| ptx.matches(what).count();
            let vectors = count("ld.global.v4.b32");
            assert!(vectors >= 2, "{name}: {ptx}");
            assert_eq!(count("st.global.v4.b32"), if stores > 0 { vectors } else { 0 }, "{name}: {ptx}");
            assert_eq!([count("ld.global.b16"), count("st.global.b16")], [loads, stores], "{name}: {ptx}");
        }
    }
}

/// A kernel to assemble.
struct Job {
    configuration: Configuration,
    specialization: Specialization,
    arch: GpuArch,
    /// Whether spills are an error.
    without_spills: bool,
    what: String,
}

fn jobs() -> Vec<Job> {
    let mut jobs = Vec::new();
    for dtype in [DType::BF16, DType::F32] {
        for configuration in configurations(dtype) {
            for arch in ARCHS {
                for aligned in [true, false] {
                    let def = configuration.def;
                    let specialization = if aligned { well_aligned(def) } else { Specialization::default() };
                    let how = if aligned { "well aligned" } else { "of any strides" };
                    jobs.push(Job {
                        configuration: configuration.clone(),
                        specialization,
                        arch,
                        without_spills: aligned,
                        what: format!("{} {dtype} {how} for {}", def.name, arch.name()),
                    });
                }
            }
        }
    }
    jobs
}

/// `ptxas` assembles the PTX of every kernel, for each architecture, in two element types, specialized and not. With
/// well-aligned tensors, for which the tile sizes were chosen, nothing spills.
#[test]
fn ptxas_assembles_every_kernel() {
    let Some(ptxas) = ptxas::find() else { return };
    let jobs = Mutex::new(jobs().into_iter());
    let failures = Mutex::new(Vec::new());
    let work = || {
        loop {
            let Some(job) = jobs.lock().unwrap().next() else { return };
            let assembled = ptx(&job.configuration, &job.specialization, job.arch)
                .and_then(|ptx| ptxas::assemble(&ptxas, &ptx, job.arch.name()));
            match assembled {
                Err(e) => failures.lock().unwrap().push(format!("{}: {e}", job.what)),
                Ok(r) => {
                    println!("{}: {} registers, {} bytes of spills", job.what, r.registers, r.spills);
                    if job.without_spills && r.spills > 0 {
                        failures.lock().unwrap().push(format!("{}: {} bytes of spills", job.what, r.spills));
                    }
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    let failures = failures.into_inner().unwrap();
    assert!(failures.is_empty(), "{} kernels:\n{}", failures.len(), failures.join("\n"));
}
