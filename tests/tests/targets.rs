//! Every kernel, for every target and element type: compilation gives code that `ptxas` assembles, or an `Unsupported`
//! error, and never panics.

use rayon::prelude::*;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tilewright::kernels::activation::Activation;
use tilewright::kernels::matmul::MATMUL;
use tilewright::prelude::Precision;
use tilewright_codegen::ir::{DType, Func};
use tilewright_codegen::lang::kernel::Specialization;
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{Code, CompileOptions, GpuArch, HostCpu, Schedule, Target};
use tilewright_tests::configurations::{PTX_VERSION, configurations, well_aligned};
use tilewright_tests::examples::variants;
use tilewright_tests::{consts, notes, ptxas};

const ARCHS: [GpuArch; 4] = [GpuArch::Sm80, GpuArch::Sm86, GpuArch::Sm89, GpuArch::Sm90a];

/// Time limit of one compilation.
const LIMIT: Duration = Duration::from_secs(60);

/// Compilations that may fail, but must not panic.
#[derive(Default)]
struct Compilations(Vec<Compilation>);

struct Compilation {
    what: String,
    func: Arc<Func>,
    target: Target,
    options: CompileOptions,
}

enum Outcome {
    /// The code, if it is PTX.
    Compiled(Option<(GpuArch, String)>),
    Unsupported(String),
    Failed(String),
}

impl Compilation {
    /// Compiles. An error must be `Unsupported`, which names what the target lacks.
    fn run(&self) -> Outcome {
        let Compilation { what, func, target, options } = self;
        let start = Instant::now();
        let compiled = catch_unwind(AssertUnwindSafe(|| pipeline::compile(func, target, options, &mut ())));
        let outcome = match compiled {
            Err(_) => Outcome::Failed(format!("{what}: panicked")),
            Ok(Err(pipeline::CompileError::Unsupported(why))) => {
                Outcome::Unsupported(format!("{what}: {}", why.message))
            }
            Ok(Err(e)) => Outcome::Failed(format!("{what}: {e}")),
            Ok(Ok(artifact)) => Outcome::Compiled(match (artifact.code, target) {
                (Code::Ptx(ptx), Target::Nvptx(arch)) => Some((*arch, ptx)),
                _ => None,
            }),
        };
        match start.elapsed() {
            took if took > LIMIT => Outcome::Failed(format!("{what}: took {took:?}")),
            _ => outcome,
        }
    }
}

impl Compilations {
    fn add(&mut self, what: String, func: &Arc<Func>, target: &Target, options: &CompileOptions) {
        self.0.push(Compilation { what, func: func.clone(), target: target.clone(), options: options.clone() });
    }

    /// Compiles all, and assembles PTX. Of those with the same instructions, only the one for the oldest architecture is
    /// assembled: later ones take what it takes.
    fn check(self, min_compiled: usize) {
        let outcomes: Vec<Outcome> = self.0.par_iter().map(Compilation::run).collect();
        let (mut compiled, mut unsupported, mut failures) = (0, Vec::new(), Vec::new());
        let mut assembled = HashMap::new();
        for (compilation, outcome) in self.0.iter().zip(outcomes) {
            match outcome {
                Outcome::Compiled(ptx) => {
                    compiled += 1;
                    if let Some((arch, ptx)) = ptx {
                        let instructions: String = ptx.lines().filter(|line| !line.starts_with(".target")).collect();
                        let kept = assembled.entry(instructions).or_insert((&compilation.what, arch, ptx.clone()));
                        if arch < kept.1 {
                            *kept = (&compilation.what, arch, ptx);
                        }
                    }
                }
                Outcome::Unsupported(why) => unsupported.push(why),
                Outcome::Failed(why) => failures.push(why),
            }
        }
        if let Some(ptxas) = ptxas::find() {
            failures.par_extend(assembled.par_iter().filter_map(|(_, (what, arch, ptx))| {
                let start = Instant::now();
                let failed = ptxas::assemble(&ptxas, ptx, arch.name()).err().map(|e| format!("{what}: {e}"));
                let took = start.elapsed();
                failed.or((took > LIMIT).then(|| format!("{what}: ptxas took {took:?}")))
            }));
        }
        println!(
            "{compiled} compiled, {} of them different, {} unsupported\n{}",
            assembled.len(),
            unsupported.len(),
            unsupported.join("\n")
        );
        assert!(failures.is_empty(), "{}", failures.join("\n"));
        assert!(compiled >= min_compiled, "{compiled} compiled, expected at least {min_compiled}");
    }
}

fn targets() -> Vec<Target> {
    ARCHS.map(Target::Nvptx).into_iter().chain([Target::Host(HostCpu::native())]).collect()
}

#[test]
fn every_kernel_compiles_for_every_target() {
    let mut compilations = Compilations::default();
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::F64] {
        for configuration in configurations(dtype) {
            // Kernels whose dots support fewer types than their type parameters fail when they are recorded.
            let spec = well_aligned(configuration.def);
            let Ok(func) = configuration.def.record(&configuration.dtypes, &configuration.consts, &spec) else {
                continue;
            };
            let func = Arc::new(func);
            for target in targets() {
                let what = format!("{} of {dtype} for {target}", configuration.def.name);
                compilations.add(what, &func, &target, &configuration.options);
            }
        }
    }
    compilations.check(300);
}

#[test]
fn every_example_compiles_for_every_target() {
    let mut compilations = Compilations::default();
    let schedules = [
        Schedule::default(),
        Schedule { tma: Some(true), overlap: Some(true), ..Schedule::default() },
        Schedule { warp_specialize: Some(true), ..Schedule::default() },
    ];
    for variant in variants() {
        let spec = Specialization::aligned_memory(variant.def);
        let func = variant.def.record(&variant.dtypes, &variant.consts, &spec).unwrap_or_else(|e| panic!("{e}"));
        let func = Arc::new(func);
        for target in targets() {
            // Other targets have one schedule.
            let several = target == Target::Nvptx(GpuArch::Sm90a);
            for (i, schedule) in schedules.into_iter().enumerate().take(if several { 3 } else { 1 }) {
                for num_warps in [4, 8] {
                    let options =
                        CompileOptions { num_warps, schedule, ptx_version: PTX_VERSION, ..CompileOptions::default() };
                    let what = format!("{} for {target}, {num_warps} warps, schedule {i}", variant.def.name);
                    compilations.add(what, &func, &target, &options);
                }
            }
        }
    }
    compilations.check(150);
}

/// Dots of every small shape, with every instruction that the target has for them.
///
/// A thread has at most 128 accumulators: with more, ptxas takes up to 20 s for its spills, and says nothing else.
#[test]
fn dots_of_every_shape_compile() {
    let mut compilations = Compilations::default();
    for (dtype, precision) in
        [(DType::BF16, Precision::Ieee), (DType::F32, Precision::Tf32), (DType::F32, Precision::Tf32x3)]
    {
        for [m_tile, n_tile, k_tile] in [
            [64usize, 8usize, 64usize],
            [64, 16, 16],
            [128, 8, 32],
            [16, 8, 16],
            [16, 16, 128],
            [64, 128, 64],
            [128, 256, 16],
        ] {
            let consts = consts! {
                m_tile = m_tile, n_tile = n_tile, k_tile = k_tile, activation = Activation::None, precision = precision,
            };
            for spec in [well_aligned(&MATMUL), Specialization::default()] {
                let func = Arc::new(MATMUL.record(&[dtype; 2], consts, &spec).unwrap_or_else(|e| panic!("{e}")));
                for arch in [GpuArch::Sm80, GpuArch::Sm90a] {
                    for (num_warps, wgmma_f32) in [(1, false), (4, false), (4, true), (8, true)] {
                        let same_as_without = arch == GpuArch::Sm80 || dtype != DType::F32;
                        let accumulators = m_tile * n_tile / (32 * num_warps as usize);
                        if accumulators > 128 || num_warps == 4 && wgmma_f32 && same_as_without {
                            continue;
                        }
                        let schedule = Schedule { wgmma_f32: Some(wgmma_f32), ..Schedule::default() };
                        let options = CompileOptions {
                            num_warps,
                            schedule,
                            ptx_version: PTX_VERSION,
                            ..CompileOptions::default()
                        };
                        let what = format!(
                            "{dtype} {precision:?} {m_tile} x {n_tile} x {k_tile}, {num_warps} warps, {schedule:?}, {arch:?}"
                        );
                        compilations.add(what, &func, &Target::Nvptx(arch), &options);
                    }
                }
            }
        }
    }
    compilations.check(200);
}

/// `setmaxnreg.inc` blocks forever if the block was launched with too few registers.
#[test]
fn setmaxnreg_stays_within_the_register_file() {
    let configuration =
        configurations(DType::BF16).into_iter().find(|c| c.def.name == "matmul").expect("a configuration");
    let func = configuration.record(&well_aligned(configuration.def));
    let number = |text: &str, after: &str| -> Option<u32> {
        let rest = text.split_once(after)?.1;
        rest.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
    };
    let mut reallocated = 0;
    for num_warps in [4, 8, 16] {
        for max_registers in [None, Some(24), Some(32), Some(40), Some(64), Some(100), Some(128), Some(168), Some(255)]
        {
            let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
            let options = CompileOptions {
                num_warps,
                max_registers,
                schedule,
                ptx_version: PTX_VERSION,
                ..CompileOptions::default()
            };
            let target = Target::Nvptx(GpuArch::Sm90a);
            let what = format!("{num_warps} warps, max_registers {max_registers:?}");
            let artifact = match pipeline::compile(&func, &target, &options, &mut ()) {
                Ok(artifact) => artifact,
                // An MMA of 128 columns takes 90 registers.
                Err(e) if max_registers.is_some_and(|most| most < 90) => {
                    assert!(e.to_string().contains("registers per thread"), "{what}: {e}");
                    continue;
                }
                Err(e) => panic!("{what}: {e}"),
            };
            let Code::Ptx(ptx) = artifact.code else { panic!("an object file instead of PTX") };
            let threads = artifact.manifest.threads;
            assert_eq!(threads, 32 * (num_warps + 4), "{what}");
            if let Some(n) = number(&ptx, ".maxnreg ") {
                // Registers are allocated in units of 8 per thread.
                assert!(
                    n.next_multiple_of(8) * threads <= 65536,
                    "{what}: {n} registers for {threads} threads do not launch"
                );
            }
            // The registers of a thread at launch, as ptxas derives them from the directives.
            let most = 65536 / threads / 8 * 8;
            let launched = match (number(&ptx, ".maxnreg "), number(&ptx, ".minnctapersm ")) {
                (Some(n), _) => n.min(most) / 8 * 8,
                (None, blocks) => (65536 / (threads * blocks.unwrap_or(1)) / 8 * 8).min(most),
            };
            let requested =
                number(&ptx, "setmaxnreg.inc.sync.aligned.u32 ").zip(number(&ptx, "setmaxnreg.dec.sync.aligned.u32 "));
            if let Some((more, less)) = requested {
                reallocated += 1;
                assert!(
                    32 * num_warps * more + 128 * less <= threads * launched,
                    "{what}: {more}, {less} of {launched}"
                );
                assert!(less <= launched, "{what}: {less} of {launched}");
            }
        }
    }
    assert!(reallocated > 10, "{reallocated}");
}

/// Warp specialization with an unsupported number of warps is an error that lists the supported ones.
#[test]
fn invalid_num_warps_for_warp_specialization_is_rejected() {
    let configuration =
        configurations(DType::BF16).into_iter().find(|c| c.def.name == "matmul").expect("a configuration");
    let func = configuration.record(&well_aligned(configuration.def));
    for num_warps in [1, 2, 32] {
        let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
        let options = CompileOptions { num_warps, schedule, ..CompileOptions::default() };
        let error =
            pipeline::compile(&func, &Target::Nvptx(GpuArch::Sm90a), &options, &mut ()).unwrap_err().to_string();
        assert!(error.contains(&format!("num_warps is {num_warps}: expected 4, 8 or 16")), "{error}");
        // Architectures without warp specialization ignore the option, as they ignore TMA.
        assert!(pipeline::compile(&func, &Target::Nvptx(GpuArch::Sm80), &options, &mut ()).is_ok());
    }
}

/// The notes on a shipped configuration with another schedule.
fn notes_of(name: &str, dtype: DType, arch: GpuArch, schedule: Schedule) -> Vec<String> {
    let all = configurations(dtype);
    let configuration = all.iter().find(|c| c.def.name == name).expect("a configuration");
    let func = configuration.record(&well_aligned(configuration.def));
    let options = CompileOptions { schedule, ..configuration.options.clone() };
    notes::gpu_ir(&func, arch, &options).1
}

/// Requests that nothing in the code follows are noted.
#[test]
fn requests_without_effect_are_explained() {
    let none = Schedule::default();
    for (name, dtype, schedule, reason) in [
        ("softmax_rows", DType::BF16, Schedule { tma: Some(true), ..none }, "TMA loads are requested"),
        ("softmax_rows", DType::BF16, Schedule { overlap: Some(true), ..none }, "no loop has a `wgmma`"),
        ("softmax_rows", DType::BF16, Schedule { wgmma_f32: Some(true), ..none }, "no dot is one"),
        ("matmul", DType::BF16, Schedule { wgmma_f32: Some(true), ..none }, "no dot is one"),
        ("column_sum", DType::BF16, Schedule { tma_stores: Some(true), ..none }, "TMA stores are requested"),
    ] {
        let notes = notes_of(name, dtype, GpuArch::Sm90a, schedule);
        assert!(notes.len() == 1 && notes[0].contains(reason), "{name}: {notes:?}");
    }
    let all = Schedule { tma: Some(true), tma_stores: Some(true), ..none };
    assert_eq!(notes_of("matmul", DType::BF16, GpuArch::Sm90a, all), [""; 0]);
}

/// Requested warp specialization that is not possible gives a note with the reason.
#[test]
fn missing_warp_specialization_is_explained() {
    let of = notes_of;
    let requested = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    assert!(of("matmul", DType::BF16, GpuArch::Sm90a, requested).is_empty());
    assert!(of("matmul", DType::BF16, GpuArch::Sm80, Schedule::default()).is_empty());
    for (name, arch, schedule, reason) in [
        ("matmul", GpuArch::Sm80, requested, "sm_80 has no TMA"),
        ("softmax_rows", GpuArch::Sm90a, requested, "no loop has a load that a producer can issue"),
        ("matmul", GpuArch::Sm90a, Schedule { tma: Some(false), ..requested }, "tma is off"),
    ] {
        let notes = of(name, DType::BF16, arch, schedule);
        assert!(notes.len() == 1 && notes[0].contains(reason), "{name}: {notes:?}");
    }
}
