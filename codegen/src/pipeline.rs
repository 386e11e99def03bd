//! The compiler pipelines: one function per target, one line per pass.
//!
//! [`compile`] takes a verified function of stage *tile* and returns an [`Artifact`]. [`gpu_ir`] stops after the last
//! pass on Tile IR, [`lower_gpu`] after LLVM IR. Debug builds verify the function after every pass.

use crate::analysis::bounds::Footprint;
use crate::analysis::registers;
use crate::ir::{Func, Op, Stage, Value};
use crate::llvm::{self, LlvmError, Opt};
use crate::lower::{self, Unsupported};
use crate::passes::{
    alternate_buffers, assign_layouts, canonicalize, carried_offsets, cse, dce, defer_reductions, delay_waits,
    direct_local_loads, early_release, expand_f64, fold_carried, fuse_reductions, hoist_buffers, invariant_divisors,
    licm, order_dots, pingpong, pipeline_loads, prefetch_views, resolve_views, rotate_loops, specialize_warps,
    split_ctas, split_loops, split_tiles, spread_loads, tma_stores,
};
use crate::schedule;
use crate::target::{Artifact, Code, CompileOptions, GpuArch, HostCpu, Manifest, Target, clocks};
use crate::verify::verify;

/// The reason why a kernel did not compile.
#[derive(Clone, Debug, thiserror::Error)]
pub enum CompileError {
    /// The kernel uses something that the target does not support.
    #[error("{0}")]
    Unsupported(#[from] Unsupported),
    /// LLVM rejected the generated IR, which is a bug of the compiler, or there is no LLVM in this program.
    #[error("{0}")]
    Llvm(#[from] LlvmError),
}

/// Receives the intermediate forms of a compilation, for `--emit`, dumps and timing.
pub trait Observer {
    /// Called with the function after each pass.
    fn after(&mut self, pass: &'static str, stage: Stage, func: &Func);
    /// Called with LLVM IR before LLVM sees it.
    fn llvm_ir(&mut self, text: &str);
    /// Called with the reason where the compiler does not follow an option or a hint.
    fn note(&mut self, _note: &str) {}
}

/// Observes nothing.
impl Observer for () {
    fn after(&mut self, _: &'static str, _: Stage, _: &Func) {}
    fn llvm_ir(&mut self, _: &str) {}
}

/// A function between passes.
struct Pipeline<'o> {
    func: Func,
    observer: &'o mut dyn Observer,
    /// For a schedule written by hand, which may ask for what no pass can do: the first pass that fails, and why. It ends the
    /// pipeline. Else `None`, and a pass that fails is a mistake of the compiler.
    failure: Option<Result<(), String>>,
    /// Whether a pass has said what it does not do.
    has_notes: bool,
}

/// The names of passes that [`Observer::after`] receives, in the order of the pipelines.
pub const PASS_NAMES: &[&str] = &[
    "split_ctas",
    "split_tiles",
    "carried_offsets",
    "resolve_views",
    "canonicalize",
    "fold_carried",
    "cse",
    "licm",
    "split_loops",
    "dce",
    "expand_f64",
    "assign_layouts",
    "licm_layout",
    "cse_layout",
    "dce_layout",
    "defer_reductions",
    "fuse_reductions",
    "hoist_buffers",
    "order_dots",
    "tma_stores",
    "schedule_loops",
    "specialize_warps",
    "pipeline_loads",
    "alternate_buffers",
    "prefetch_views",
    "rotate_loops",
    "invariant_divisors",
    "cse_async",
    "dce_async",
    "delay_waits",
    "direct_local_loads",
    "spread_loads",
    "early_release",
    "pingpong",
];

impl Pipeline<'_> {
    /// Runs one pass, verifies its result in debug builds, and passes it to the observer.
    fn pass(&mut self, name: &'static str, stage: Stage, pass: impl FnOnce(&mut Func)) {
        debug_assert!(
            PASS_NAMES.contains(&name),
            "internal compiler error: `{name}` is missing in PASS_NAMES; please report this"
        );
        if let Some(Err(_)) = self.failure {
            return;
        }
        pass(&mut self.func);
        if (cfg!(debug_assertions) || self.failure.is_some())
            && let Err(errors) = verify(&self.func, stage)
        {
            if let Some(failure) = &mut self.failure {
                let first = errors.first().map(ToString::to_string).unwrap_or_default();
                *failure = Err(format!("`{name}` cannot carry it out: {first}"));
                return;
            }
            let list: Vec<String> = errors.iter().map(ToString::to_string).collect();
            panic!(
                "internal compiler error: pass `{name}` left an invalid function; please report this\n{}\n{}",
                list.join("\n"),
                crate::text::print(&self.func)
            );
        }
        self.observer.after(name, stage, &self.func);
    }

    /// As [`Pipeline::pass`], for a pass that carries out a schedule.
    fn try_pass(&mut self, name: &'static str, pass: impl FnOnce(&mut Func) -> Result<(), String>) {
        let mut carried_out = Ok(());
        self.pass(name, Stage::Async, |f| carried_out = pass(f));
        let Err(why) = carried_out else { return };
        match &mut self.failure {
            Some(failure) => *failure = Err(why),
            None => {
                panic!("internal compiler error: the chosen schedule cannot be carried out: {why}; please report this")
            }
        }
    }

    /// The passes up to the schedule of loops.
    fn schedule(&mut self, arch: GpuArch, options: &CompileOptions) {
        self.pass("split_ctas", Stage::Tile, |f| {
            let split = split_ctas::run(f, options.num_ctas);
            split.expect("internal compiler error: a kernel that CTAs cannot share, after `check`; please report this");
        });
        self.pass("split_tiles", Stage::Tile, split_tiles::run);
        self.tile_passes();
        self.pass("expand_f64", Stage::Tile, expand_f64::run);
        self.pass("assign_layouts", Stage::Layout, |f| assign_layouts::run(f, arch, options));
        // Moves layout conversions of loop-invariant tiles out of loops.
        self.pass("licm_layout", Stage::Layout, |f| {
            licm::run(f);
        });
        self.pass("cse_layout", Stage::Layout, |f| {
            cse::run(f);
        });
        self.pass("dce_layout", Stage::Layout, |f| {
            dce::run(f);
        });
        self.pass("defer_reductions", Stage::Layout, defer_reductions::run);
        self.pass("fuse_reductions", Stage::Layout, fuse_reductions::run);
        self.pass("hoist_buffers", Stage::Layout, hoist_buffers::run);
        self.pass("order_dots", Stage::Layout, order_dots::run);
        self.pass("tma_stores", Stage::Layout, |f| tma_stores::run(f, arch, options));
        let mut notes = Vec::new();
        self.pass("schedule_loops", Stage::Schedule, |f| notes = schedule::choose(f, arch, options));
        self.note(&notes);
    }

    /// The passes that carry out a schedule: from stage *schedule* to stage *async*.
    fn carry_out(&mut self, arch: GpuArch, options: &CompileOptions) {
        let mut notes = Vec::new();
        self.try_pass("specialize_warps", |f| specialize_warps::run(f, arch, options));
        self.try_pass("pipeline_loads", |f| pipeline_loads::run(f, arch));
        self.pass("alternate_buffers", Stage::Async, alternate_buffers::run);
        self.pass("prefetch_views", Stage::Async, prefetch_views::run);
        self.pass("rotate_loops", Stage::Async, rotate_loops::run);
        self.pass("invariant_divisors", Stage::Async, invariant_divisors::run);
        self.pass("cse_async", Stage::Async, |f| {
            cse::run(f);
        });
        self.pass("dce_async", Stage::Async, |f| {
            dce::run(f);
        });
        let f32_in_flight = options.schedule.overlap != Some(false);
        self.pass("delay_waits", Stage::Async, |f| delay_waits::run_with(f, f32_in_flight));
        self.pass("direct_local_loads", Stage::Async, direct_local_loads::run);
        self.pass("spread_loads", Stage::Async, spread_loads::run);
        self.pass("early_release", Stage::Async, early_release::run);
        self.pass("pingpong", Stage::Async, |f| notes = pingpong::run(f, options));
        self.note(&notes);
        if !self.has_notes {
            self.note(&schedule::requests::unfollowed(&self.func, options));
        }
    }

    fn note(&mut self, notes: &[String]) {
        self.has_notes |= !notes.is_empty();
        notes.iter().for_each(|note| self.observer.note(note));
    }

    /// The passes that both targets run first.
    fn tile_passes(&mut self) {
        self.pass("resolve_views", Stage::Tile, resolve_views::run);
        self.pass("canonicalize", Stage::Tile, |f| {
            canonicalize::run(f);
        });
        self.pass("fold_carried", Stage::Tile, |f| {
            fold_carried::run(f);
        });
        self.pass("cse", Stage::Tile, |f| {
            cse::run(f);
        });
        self.pass("licm", Stage::Tile, |f| {
            licm::run(f);
        });
        self.pass("split_loops", Stage::Tile, |f| {
            split_loops::run(f);
        });
        self.pass("dce", Stage::Tile, |f| {
            dce::run(f);
        });
    }
}

/// The access footprint of a recorded function.
pub fn footprint(func: &Func) -> Footprint {
    // These passes unify equal values, expose views at their uses, and remove unused loads.
    let mut func = func.clone();
    split_tiles::run(&mut func);
    carried_offsets::run(&mut func);
    resolve_views::run(&mut func);
    canonicalize::run(&mut func);
    cse::run(&mut func);
    dce::run(&mut func);
    Footprint::of(&func)
}

/// Compiles for any target.
pub fn compile(
    func: &Func,
    target: &Target,
    options: &CompileOptions,
    observer: &mut dyn Observer,
) -> Result<Artifact, CompileError> {
    match target {
        Target::Nvptx(arch) => compile_gpu(func, *arch, options, observer),
        Target::Host(cpu) => compile_host(func, cpu, options, observer),
    }
}

/// Runs all passes on Tile IR for an NVIDIA GPU. The result is at stage *async*.
pub fn gpu_ir(func: &Func, arch: GpuArch, options: &CompileOptions, observer: &mut dyn Observer) -> Func {
    let mut p = Pipeline { func: func.clone(), observer, failure: None, has_notes: false };
    p.schedule(arch, options);
    p.carry_out(arch, options);
    p.func
}

/// The function that `schedule_loops` leaves: at stage *schedule*.
pub fn scheduled(func: &Func, arch: GpuArch, options: &CompileOptions) -> Func {
    let mut p = Pipeline { func: func.clone(), observer: &mut (), failure: None, has_notes: false };
    p.schedule(arch, options);
    p.func
}

/// Values that [`CompileOptions::max_registers`] accepts. `ptxas` replaces smaller values by 24.
pub const MAX_REGISTERS: std::ops::RangeInclusive<u32> = 24..=255;

/// Values that [`CompileOptions::num_ctas`] accepts: the cluster sizes that every GPU with clusters has.
pub const NUM_CTAS: [u32; 4] = [1, 2, 4, 8];

/// Rejects options that no GPU supports. The CPU ignores these options, but rejects the same values, so that a kernel
/// that runs on the CPU also compiles for a GPU.
fn check_options(func: &Func, options: &CompileOptions) -> Result<(), Unsupported> {
    let refuse =
        |message: String, help: &str| Err(Unsupported { loc: func.loc.clone(), message, help: Some(help.into()) });
    let warps = options.num_warps;
    if !warps.is_power_of_two() || warps > 32 {
        let message = format!("num_warps is {warps}: expected a power of two from 1 to 32");
        return refuse(message, "a block has 32 threads per warp, and at most 1024");
    }
    let ctas = options.num_ctas;
    if !NUM_CTAS.contains(&ctas) {
        let message = format!("num_ctas is {ctas}: expected 1, 2, 4 or 8");
        return refuse(message, "the CTAs of one cluster run a program");
    }
    match options.max_registers {
        Some(registers) if !MAX_REGISTERS.contains(&registers) => {
            let message = format!("max_registers is {registers}: expected 24 to 255");
            refuse(message, "ptxas allocates at least 24 and at most 255 registers per thread")
        }
        Some(_) | None => Ok(()),
    }
}

/// Maximum elements of one tile per thread: four times the registers of a thread. With more, the code spills most of
/// the tile, and compilation takes minutes.
const MAX_ELEMENTS_PER_THREAD: usize = 1024;

/// Rejects tiles that are far larger than the register file of a block.
fn check_tiles(func: &Func, options: &CompileOptions) -> Result<(), Unsupported> {
    let threads = 32 * options.num_warps as usize;
    for id in func.walk() {
        let data = func.op(id);
        let spread = |v: &&Value| func.ty(**v).is_tensor() && !matches!(data.op, Op::Constant { .. } | Op::Splat);
        let Some(&v) = data.results.iter().find(spread) else { continue };
        let elements = func.ty(v).numel() / threads;
        if elements > MAX_ELEMENTS_PER_THREAD {
            let shape = func.ty(v).shape();
            return Err(Unsupported {
                loc: data.loc.clone(),
                message: format!(
                    "a tile of shape {shape:?} has {elements} elements per thread ({threads} threads): at most \
                     {MAX_ELEMENTS_PER_THREAD} are supported"
                ),
                help: Some("use smaller tiles or more warps: a thread has 255 registers".into()),
            });
        }
    }
    Ok(())
}

/// Rejects options and tiles that no GPU supports, and programs that the CTAs of a cluster cannot share where options ask for
/// it, before any pass runs.
///
/// # Errors
/// The limit that is exceeded, and what to do.
pub fn check(func: &Func, options: &CompileOptions) -> Result<(), Unsupported> {
    check_options(func, options)?;
    let ctas = options.num_ctas;
    if ctas == 1 {
        return check_tiles(func, options);
    }
    let mut part = func.clone();
    split_ctas::run(&mut part, ctas).map_err(|(id, why)| Unsupported {
        loc: func.op(id).loc.clone(),
        message: format!("num_ctas is {ctas}, and CTAs cannot share the `{}`: {why}", func.op(id).op.mnemonic()),
        help: Some("set num_ctas = 1".into()),
    })?;
    check_tiles(&part, options)
}

/// Resources that a kernel needs on an NVIDIA GPU, estimated from its IR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResourceEstimate {
    /// Estimated maximum of live registers for tiles.
    pub registers: u32,
    /// Registers available to a thread.
    pub available: u32,
    /// Multiply-add instructions that the unrolled FMA dots put into the code of a thread.
    pub fma_count: u64,
    /// Bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// Bytes of shared memory that a block can have.
    pub shared_available: u32,
}

/// Limit of unrolled multiply-add instructions per thread. Longer code is far larger than any instruction cache, and
/// the driver compiles it for many seconds.
const MAX_FMA_COUNT: u64 = 16384;

impl ResourceEstimate {
    /// The reason to reject the kernel before the driver compiles it; `None` where it may be worthwhile.
    ///
    /// The limit is 1.5 times the available registers, because the estimate is too high: it is up to 260 registers for
    /// FlashAttention and up to 330 for norms, of 255, and ptxas spills few or none of them. At the limit, spills take
    /// tens of kilobytes.
    pub fn over_limit(&self) -> Option<String> {
        let ResourceEstimate { registers, available, fma_count, shared_bytes, shared_available } = *self;
        if registers > available + available / 2 {
            return Some(format!(
                "its tiles need about {registers} registers per thread, and {available} are available"
            ));
        }
        if shared_bytes > shared_available {
            return Some(format!(
                "its buffers need {shared_bytes} bytes of shared memory, and {shared_available} are available"
            ));
        }
        (fma_count > MAX_FMA_COUNT)
            .then(|| format!("its code has {fma_count} unrolled multiply-adds per thread, more than {MAX_FMA_COUNT}"))
    }
}

/// Estimates the resources that a kernel needs on an NVIDIA GPU. Much faster than compiling it.
///
/// # Errors
/// The feature that the target does not support.
pub fn estimate_resources(
    func: &Func,
    arch: GpuArch,
    options: &CompileOptions,
) -> Result<ResourceEstimate, CompileError> {
    check(func, options)?;
    check_target(func, arch, options)?;
    check_schedule(func, arch, options)?;
    let gpu_func = gpu_ir(func, arch, options, &mut ());
    let available = registers::available(32 * options.num_warps);
    let mut estimate = ResourceEstimate {
        registers: registers::max_live(&gpu_func),
        available: options.max_registers.map_or(available, |most| most.min(available)),
        fma_count: registers::fma_count(&gpu_func),
        shared_bytes: 0,
        shared_available: arch.max_shared_bytes(),
    };
    // The code of oversized tiles is long.
    if estimate.over_limit().is_none() {
        estimate.shared_bytes = lower::nvptx::lower(&gpu_func, arch, options)?.shared_bytes;
    }
    Ok(estimate)
}

/// Rejects clusters on a GPU without them, and a number of warps that warp specialization does not support, where the kernel
/// or the options ask for it.
fn check_target(func: &Func, arch: GpuArch, options: &CompileOptions) -> Result<(), Unsupported> {
    if options.num_ctas > 1 && arch < GpuArch::Sm90a {
        return Err(Unsupported {
            loc: func.loc.clone(),
            message: format!("num_ctas is {}, and {} has no thread block clusters", options.num_ctas, arch.name()),
            help: Some("set num_ctas = 1".into()),
        });
    }
    let warps = options.num_warps;
    if arch < GpuArch::Sm90a
        || schedule::partitions::CONSUMER_WARPS.contains(&warps)
        || !schedule::partitions::is_requested(func, options)
    {
        return Ok(());
    }
    Err(Unsupported {
        loc: func.loc.clone(),
        message: format!("num_warps is {warps}: expected 4, 8 or 16 with warp specialization"),
        help: Some(
            "consumer warps are whole warpgroups of 4 warps, and the producer warpgroup adds 4 more to a block of at \
             most 32: choose another num_warps, or turn warp_specialize off"
                .into(),
        ),
    })
}

/// Rejects a schedule written by hand that is not one of this kernel or cannot be carried out.
fn check_schedule(func: &Func, arch: GpuArch, options: &CompileOptions) -> Result<(), Unsupported> {
    const HELP: &str =
        "start from the text of `--emit schedule` for the same types, constants, options and assumptions";
    let Some(text) = options.loops.as_deref().filter(|text| schedule::given::is_text(text)) else { return Ok(()) };
    let mut scheduled = scheduled(func, arch, &CompileOptions { loops: None, ..options.clone() });
    let carried_out = schedule::given::apply(&mut scheduled, text).and_then(|()| {
        let mut p = Pipeline { func: scheduled, observer: &mut (), failure: Some(Ok(())), has_notes: false };
        p.carry_out(arch, options);
        p.failure.unwrap_or(Ok(()))
    });
    carried_out.map_err(|why| Unsupported {
        loc: func.loc.clone(),
        message: format!("the given schedule: {why}"),
        help: Some(HELP.into()),
    })
}

/// Compiles for an NVIDIA GPU to LLVM IR, which the simulated GPU runs.
///
/// # Errors
/// The feature that the target does not support.
pub fn lower_gpu(
    func: &Func,
    arch: GpuArch,
    options: &CompileOptions,
    observer: &mut dyn Observer,
) -> Result<(Manifest, String), Unsupported> {
    check(func, options)?;
    check_target(func, arch, options)?;
    check_schedule(func, arch, options)?;
    let gpu_func = gpu_ir(func, arch, options, observer);
    let module = lower::nvptx::lower(&gpu_func, arch, options)?;
    observer.llvm_ir(&module.llvm_ir);
    let manifest = Manifest {
        kernel: func.name.clone(),
        entry: module.entry,
        target: arch.name().into(),
        args: module.args,
        threads: module.threads,
        shared_bytes: module.shared_bytes,
        programs_per_block: module.programs_per_block,
        ctas_per_program: module.ctas_per_program,
        arena_bytes: 0,
        tensor_maps: module.tensor_maps,
        source: func.loc.to_string(),
        clocks_of: options
            .clocks
            .map(|_| clocks::Subject { lowered: clocks::hash(&gpu_func, options), assume_ranges: false }),
        footprint: None,
    };
    Ok((manifest, module.llvm_ir))
}

/// Compiles for an NVIDIA GPU.
pub fn compile_gpu(
    func: &Func,
    arch: GpuArch,
    options: &CompileOptions,
    observer: &mut dyn Observer,
) -> Result<Artifact, CompileError> {
    let (manifest, llvm_ir) = lower_gpu(func, arch, options, observer)?;
    let ptx = llvm::ptx(&llvm_ir, arch, options.ptx_version, &Opt::gpu())?;
    Ok(Artifact { manifest, code: Code::Ptx(ptx.code) })
}

/// Compiles for a CPU. One call of the entry runs one program instance.
pub fn compile_host(
    func: &Func,
    cpu: &HostCpu,
    options: &CompileOptions,
    observer: &mut dyn Observer,
) -> Result<Artifact, CompileError> {
    check_options(func, options)?;
    let mut p = Pipeline { func: func.clone(), observer, failure: None, has_notes: false };
    p.pass("split_tiles", Stage::Tile, split_tiles::run);
    p.pass("carried_offsets", Stage::Tile, |f| {
        carried_offsets::run(f);
    });
    p.tile_passes();
    let module = lower::host::lower(&p.func, cpu, options)?;
    p.observer.llvm_ir(&module.llvm_ir);
    let object = llvm::object(&module.llvm_ir, cpu, &Opt::host())?;
    let manifest = Manifest {
        kernel: func.name.clone(),
        entry: module.entry,
        target: "host".into(),
        args: module.args,
        threads: 1,
        shared_bytes: 0,
        programs_per_block: 1,
        ctas_per_program: 1,
        arena_bytes: module.arena_bytes,
        tensor_maps: Vec::new(),
        source: func.loc.to_string(),
        clocks_of: None,
        footprint: None,
    };
    Ok(Artifact { manifest, code: Code::Object(object.code) })
}
