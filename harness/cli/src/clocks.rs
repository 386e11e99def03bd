//! `clocks`: records when the warps of a block reach each wait, matrix product and copy, for `explain --clocks`.

use std::collections::HashSet;
use std::io::Write;
use std::path::{Path, PathBuf};

use clap::Args;
use serde::{Deserialize, Serialize};
use tilewright_codegen::explain::Trace;
use tilewright_codegen::lang::kernel::{ArgSpec, KernelDef, ParamKind, Specialization};
use tilewright_codegen::target::{Artifact, CompileOptions, GpuArch, Schedule, Target, clocks};
use tilewright_runtime::kernel;
use tilewright_runtime::{Device, LaunchConfig};

use crate::bench::Inputs;
use crate::compile::{self, Options, Request};
use crate::device::{self, DeviceArg};
use crate::run::{Buffers, Job, Launch};
use crate::tuned::Plan;
use crate::{CliError, Kernels, Result, choose, files};

#[derive(Args)]
#[command(
    after_help = "Takes a GPU. The first warp of each warpgroup of the block stores its SM's clock, up to 8192 times: an \
                        intra-kernel profile. `explain KERNEL --clocks FILE --html PAGE` shows it beside the predicted \
                        timelines, on this machine or on another one."
)]
pub struct Arguments {
    #[command(flatten)]
    launch: Launch,
    #[command(flatten)]
    inputs: Inputs,
    /// File for the clocks, as JSON
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
    /// Block whose clocks are recorded, counted from 0 along the first axis of the grid, then along the others
    #[arg(long, value_name = "N", default_value_t = 0)]
    block: u32,
    /// Device: cuda or cuda:N. Default: TILEWRIGHT_DEVICE, else a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    #[command(flatten)]
    options: Options,
}

pub fn run(arguments: &Arguments, kernels: &Kernels, out: &mut dyn Write) -> Result<()> {
    let Arguments { launch, inputs, output, block, device, options } = arguments;
    let def = kernels.find(&launch.kernel)?;
    let read: Vec<&Path> = inputs.input.iter().chain(options.table()).map(PathBuf::as_path).collect();
    files::check_distinct(&[output.as_path()], &read)?;
    files::check_writable(output).map_err(|error| CliError::file("write", output, error))?;
    let device = device::open(*device)?;
    check_device(&device)?;
    options.use_table(def, &device.target())?;
    let tensors = || inputs.tensors(def, &launch.dtype);
    let (job, base) = Plan::new(kernels, launch, &launch.set, &tensors)?.on(&device)?;
    let config = job.config(&options.over(base))?;
    let recording = Recording::of(&job, &device, &config, *block, &mut job.upload(&device)?)?;
    recording.write(output)?;
    writeln!(out, "{}: {}", output.display(), recording.note())?;
    Ok(())
}

/// The architecture of a device that records clocks.
///
/// # Errors
/// The CPU.
fn check_device(device: &Device) -> Result<GpuArch> {
    match device.target() {
        Target::Nvptx(arch) => Ok(arch),
        Target::Host(_) => Err(CliError::usage(
            format!("{device} records no clocks"),
            "GPUs do: pass --device cuda on a machine with one",
        )),
    }
}

/// The clocks of one launch, with all that its code was compiled from.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recording {
    kernel: String,
    device: String,
    /// The GPU's architecture, such as `sm_90a`.
    target: String,
    /// As `--dtype` takes them.
    types: Vec<String>,
    /// As `--set` takes them.
    constants: Vec<String>,
    assumptions: Specialization,
    /// Whether the launch checked assumptions about ranges, with which the code was compiled.
    assume_ranges: bool,
    options: CompileOptions,
    grid: [i64; 3],
    /// The block whose clocks these are, by its linear index in the grid of blocks.
    block: u32,
    /// The number of blocks of the grid.
    blocks: i64,
    /// [`clocks::hash`] of the lowered function.
    lowered: u64,
    /// The events of each warpgroup.
    events: Vec<Vec<clocks::Event>>,
}

impl Recording {
    /// Launches the kernel twice, and keeps the clocks of the second launch.
    ///
    /// # Errors
    /// A device that records none; what the launch refuses; a block that is not in the grid.
    pub fn of(
        job: &Job,
        device: &Device,
        config: &LaunchConfig,
        block: u32,
        buffers: &mut Buffers,
    ) -> Result<Recording> {
        let arch = check_device(device)?;
        let config = LaunchConfig { clocks: Some(block), ..config.clone() };
        job.start(device, &config, buffers)?;
        job.start(device, &config, buffers)?;
        let args = job.arguments(buffers);
        let without_maps =
            LaunchConfig { schedule: Schedule { tma: Some(false), ..config.schedule }, ..config.clone() };
        let [x, y, z] = job.grid();
        let mut blocks = 0;
        // Where no tensor map can describe a tensor, a launch takes code without them.
        for config in [config, without_maps] {
            let prepared = kernel::prepare_erased(job.def, device, &config, &job.dtypes, &args, &job.constants)?;
            let manifest = prepared.manifest();
            blocks = x / i64::from(manifest.programs_per_block) * i64::from(manifest.ctas_per_program) * y * z;
            let events = prepared.clocks()?;
            let Some(of) = manifest.clocks_of.filter(|_| !events.is_empty()) else { continue };
            let generics = job.def.generics.iter().zip(&job.dtypes);
            return Ok(Recording {
                kernel: job.def.name.to_string(),
                device: device.to_string(),
                target: arch.name().to_string(),
                types: generics.map(|(generic, dtype)| format!("{}={dtype}", generic.name)).collect(),
                constants: job.constants.iter().map(|(name, value)| format!("{name}={value}")).collect(),
                assumptions: kernel::specialization(job.def, &args),
                assume_ranges: of.assume_ranges,
                options: CompileOptions { clocks: None, ..device.limit_ptx_version(&config.options()) },
                grid: job.grid(),
                block,
                blocks,
                lowered: of.lowered,
                events,
            });
        }
        Err(match u64::try_from(blocks) {
            Ok(blocks) if u64::from(block) >= blocks => CliError::usage(
                format!("--block {block} is not in the grid, which has {blocks} blocks"),
                "blocks are counted from 0, along the first axis of the grid first",
            ),
            _ => CliError::usage(
                format!("kernel `{}` records no clocks", job.def.name),
                "it has no loops, barriers, matrix products or asynchronous copies",
            ),
        })
    }

    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, path: &Path) -> Result<()> {
        let text = serde_json::to_string(self)?;
        files::replace(path, |file| writeln!(file, "{text}")).map_err(|error| CliError::file("write", path, error))
    }

    /// # Errors
    /// A file that cannot be read, or has something else.
    pub fn read(path: &Path) -> Result<Recording> {
        let text = files::read_to_string(path).map_err(|error| CliError::file("read", path, error))?;
        let checked = serde_json::from_str(&text).map_err(|error| error.to_string());
        let checked = checked.and_then(|recording: Recording| recording.check().map(|()| recording));
        checked.map_err(|error| {
            CliError::usage(
                format!("{} is damaged, or has no clocks: {error}", path.display()),
                "give a file that the command `clocks` wrote on a GPU",
            )
        })
    }

    /// Checks what the command line checks, and the clocks.
    fn check(&self) -> Result<(), String> {
        const LARGEST: u64 = 1 << 53;
        let names = [&self.kernel, &self.device, &self.target];
        let words = names.into_iter().chain(&self.types).chain(&self.constants).chain(&self.options.loops);
        let is_text = |c: char| !c.is_control() || c == '\n';
        if words.into_iter().any(|word| !word.chars().all(is_text)) {
            return Err("it has control characters".to_string());
        }
        if self.events.iter().all(Vec::is_empty) {
            return Err("it has no events".to_string());
        }
        if self.events.len() > clocks::WARPGROUPS {
            return Err(format!("{} warpgroups: a block has at most {}", self.events.len(), clocks::WARPGROUPS));
        }
        for (group, events) in self.events.iter().enumerate() {
            if events.len() > clocks::EVENTS {
                return Err(format!(
                    "{} events of warpgroup {group}: expected at most {}",
                    events.len(),
                    clocks::EVENTS
                ));
            }
            if let Some(event) = events.iter().find(|event| event.clock.unsigned_abs() > LARGEST) {
                return Err(format!("a clock of {}: expected less than 2^53 cycles", event.clock));
            }
            if let Some(pair) = events.windows(2).find(|pair| pair[1].clock < pair[0].clock) {
                return Err(format!(
                    "the clock of warpgroup {group} goes from {} back to {}",
                    pair[0].clock, pair[1].clock
                ));
            }
        }
        let is_power = |spec: &&ArgSpec| spec.divisible_by.is_power_of_two();
        if let Some(spec) = self.assumptions.args.iter().find(|spec| !is_power(spec)) {
            return Err(format!("an argument divisible by {}: expected a power of two", spec.divisible_by));
        }
        if !(80..=99).contains(&self.options.ptx_version) {
            return Err(format!("a PTX version of {}: expected 80 to 99", self.options.ptx_version));
        }
        Options::default().over(self.options.clone()).compile_options().map(drop).map_err(|error| error.to_string())
    }

    /// What the code was compiled from.
    ///
    /// # Errors
    /// Another kernel than this one; constants that this program's kernel does not have.
    pub fn request(&self, kernels: &Kernels, name: &str) -> Result<Request> {
        let def: &'static KernelDef = kernels.find(name)?;
        if self.kernel != def.name {
            return Err(CliError::usage(
                format!("--clocks: the file has the clocks of `{}`", self.kernel),
                format!("write `explain {}`", self.kernel),
            ));
        }
        let passed = def.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. })).count();
        if self.assumptions.args.len() != passed {
            return Err(self.other_version());
        }
        let arch: GpuArch = self.target.parse().map_err(CliError::Usage)?;
        Ok(Request {
            def,
            dtypes: choose::dtypes(def, &self.types)?,
            constants: choose::constants(def, &self.constants)?,
            specialization: self.assumptions.clone(),
            sizes: Vec::new(),
            target: Target::Nvptx(arch),
            options: self.options.clone(),
        })
    }

    fn other_version(&self) -> CliError {
        CliError::usage(
            format!(
                "--clocks: the file has the clocks of another version of `{}`, or of another compiler",
                self.kernel
            ),
            "record them again with the command `clocks` of this program",
        )
    }

    /// Compiles as the launch did, and checks that the events are of the ops of this code.
    ///
    /// # Errors
    /// Another kernel or compiler than the launch's.
    pub fn compile(&self, request: &Request) -> Result<(Artifact, Trace)> {
        let (artifact, trace) = compile::compile_traced(request, self.assume_ranges)?;
        if clocks::hash(trace.last(), &request.options) != self.lowered {
            return Err(self.other_version());
        }
        let ops: HashSet<u32> = trace.last().walk().into_iter().map(|id| id.0).collect();
        match self.events.iter().flatten().find(|event| !ops.contains(&event.op)) {
            Some(event) => Err(CliError::usage(
                format!("--clocks: the file is damaged: an event of op {}, which the code does not have", event.op),
                "record the clocks again with the command `clocks`",
            )),
            None => Ok((artifact, trace)),
        }
    }

    /// The events of each warpgroup.
    pub fn events(&self) -> &[Vec<clocks::Event>] {
        &self.events
    }

    /// Where and of what they were recorded.
    pub fn note(&self) -> String {
        let Recording { device, grid: [x, y, z], block, blocks, events, .. } = self;
        let full = match clocks::is_full(events) {
            true => format!(", the first {} events of each warpgroup", clocks::EVENTS),
            false => String::new(),
        };
        format!("clocks of block {block} of {blocks} on {device}, in a grid of {x} × {y} × {z} programs{full}")
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use tilewright_codegen::analysis::pipes::Pipe;
    use tilewright_codegen::explain::timeline;

    use super::*;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    /// A matmul of 8 iterations, whose clocks on the simulated GPU are shown by `explain`.
    #[test]
    fn clocks_of_a_launch_become_a_timeline() {
        let folder = files::temporary_folder().unwrap();
        let [clocks, page] = ["clocks.json", "page.html"].map(|name| folder.path().join(name));
        let kernels = crate::kernels::shipped();
        let words =
            ["x", "matmul", "-o", "clocks.json", "--dtype", "bf16", "--shape", "a=64,512", "--shape", "b=512,128"];
        let set = "m_tile=64,n_tile=64,k_tile=64,replicas=1";
        let options = ["--set", set, "--num-stages", "2", "--warp-specialize", "true"];
        let Command { arguments } = clap::Parser::parse_from(words.into_iter().chain(options));
        let def = kernels.find("matmul").unwrap();
        let device = Device::simulated(GpuArch::Sm90a);
        let tensors = || arguments.inputs.tensors(def, &arguments.launch.dtype);
        let plan = Plan::new(&kernels, &arguments.launch, &arguments.launch.set, &tensors).unwrap();
        let (job, base) = plan.on(&device).unwrap();
        let config = job.config(&arguments.options.over(base)).unwrap();
        let mut buffers = job.upload(&device).unwrap();
        let recording = Recording::of(&job, &device, &config, 1, &mut buffers).unwrap();
        recording.write(&clocks).unwrap();
        // Consumers and producer.
        assert_eq!(recording.events().len(), 2);
        let read = Recording::read(&clocks).unwrap();
        let request = read.request(&kernels, "matmul").unwrap();
        let (_, trace) = read.compile(&request).unwrap();
        let settings = timeline::Settings {
            arch: GpuArch::Sm90a,
            warps: 8,
            blocks: 1,
            barriers: HashSet::new(),
            schedule: trace.schedule(),
        };
        let measured = timeline::measured(trace.last(), &settings, read.events());
        let [of] = &measured[..] else { panic!("{} loops", measured.len()) };
        // Of the 8 iterations, one is outside of the loop.
        assert_eq!(of.iterations, 7);
        let groups: Vec<String> = (0..of.timeline.groups.len()).map(|group| of.timeline.group_name(group)).collect();
        assert_eq!(groups, ["consumer", "producer"]);
        let has = |group: usize, pipe: Pipe| of.timeline.bars.iter().any(|bar| (bar.group, bar.pipe) == (group, pipe));
        assert!(has(0, Pipe::Mma) && has(0, Pipe::Barrier) && has(1, Pipe::Barrier) && has(1, Pipe::Copy), "{of:?}");
        let products = of.timeline.bars.iter().filter(|bar| bar.pipe == Pipe::Mma);
        let mut iterations: Vec<usize> = products.map(|bar| bar.iteration).collect();
        iterations.dedup();
        assert!(iterations.windows(2).all(|pair| pair[0] + 1 == pair[1]) && iterations.len() >= 3, "{iterations:?}");
        // The page has both pictures; other kernels and blocks are refused.
        #[derive(clap::Parser)]
        struct Explain {
            #[command(flatten)]
            arguments: crate::explain::Arguments,
        }
        let explain = |kernel: &str| {
            let words = ["x", kernel, "--clocks", clocks.to_str().unwrap(), "--html", page.to_str().unwrap()];
            let Explain { arguments } = clap::Parser::parse_from(words);
            crate::explain::run(&arguments, &kernels, &mut Vec::new())
        };
        explain("matmul").unwrap();
        let html = std::fs::read_to_string(&page).unwrap();
        assert!(html.contains("Predicted timeline of 3") && html.contains("Measured timeline of 3"));
        assert!(html.contains("clocks of block 1 of 2 on"));
        // What a damaged file must not do: draw something else, or panic.
        let text = std::fs::read_to_string(&clocks).unwrap();
        let first = &recording.events()[0][0];
        let of_first = serde_json::to_string(first).unwrap();
        let changed = |clock: i64, op: u32| serde_json::to_string(&clocks::Event { clock, op, ..*first }).unwrap();
        for (from, to, expected) in [
            (of_first.as_str(), changed(1 << 60, first.op), "a clock of 1152921504606846976"),
            (&of_first, changed(1 << 50, first.op), "goes from 1125899906842624 back to"),
            (&of_first, changed(0, u32::MAX), "an event of op 4294967295, which the code does not have"),
            ("\"num_stages\":2", "\"num_stages\":0".into(), "--num-stages cannot be 0"),
            ("\"num_stages\":2", "\"num_stages\":3".into(), "of another version of `matmul`"),
            ("\"fp_fusion\":true", "\"fp_fusion\":false".into(), "of another version of `matmul`"),
            ("\"ptx_version\":84", "\"ptx_version\":7".into(), "a PTX version of 7: expected 80 to 99"),
            ("\"divisible_by\":16", "\"divisible_by\":0".into(), "divisible by 0: expected a power of two"),
            ("\"kernel\":\"", "\"kernel\":\"\\u001b[31m".into(), "control characters"),
            ("\"kernel\":", "\"unknown\":1,\"kernel\":".into(), "unknown field `unknown`"),
            ("\"events\":[", "\"events\":[],\"old\":[".into(), "unknown field `old`"),
        ] {
            assert!(text.contains(from), "{from}: {text:.2000}");
            std::fs::write(&clocks, text.replacen(from, &to, 1)).unwrap();
            let found = explain("matmul").unwrap_err().to_string();
            assert!(found.contains(expected), "{to}: {found}");
        }
        std::fs::write(&clocks, &text[..text.len() / 2]).unwrap();
        let found = explain("matmul").unwrap_err().to_string();
        assert!(found.contains("is damaged, or has no clocks"), "{found}");
        let none = serde_json::to_string(&Recording { events: vec![vec![]], ..recording.clone() }).unwrap();
        std::fs::write(&clocks, none).unwrap();
        let found = explain("matmul").unwrap_err().to_string();
        assert!(found.contains("it has no events"), "{found}");
        let few = serde_json::to_string(&Recording { events: vec![vec![*first]], ..recording.clone() }).unwrap();
        std::fs::write(&clocks, few).unwrap();
        explain("matmul").unwrap();
        let html = std::fs::read_to_string(&page).unwrap();
        assert!(
            html.contains("No loop ran for 4 iterations in the block") && html.contains("Not measured: it ran for")
        );
        std::fs::write(&clocks, text).unwrap();
        let other = explain("softmax_rows").unwrap_err().to_string();
        assert!(other.contains("the file has the clocks of `matmul`"), "{other}");
        let none = Recording::of(&job, &device, &config, 2, &mut buffers).unwrap_err().to_string();
        assert!(none.contains("--block 2 is not in the grid, which has 2 blocks"), "{none}");
        let cpu = Device::cpu();
        let mut on_cpu = job.upload(&cpu).unwrap();
        let refused = Recording::of(&job, &cpu, &config, 0, &mut on_cpu).unwrap_err().to_string();
        assert!(refused.contains("records no clocks"), "{refused}");
    }
}
