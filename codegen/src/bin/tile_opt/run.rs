//! Runs passes by name.

use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};
use tilewright_codegen::ir::Func;
use tilewright_codegen::passes::{self, PASSES, assign_layouts, pipeline_loads};
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{CompileOptions, GpuArch};

/// Passes that need a target, with their summaries.
const TARGET_PASSES: &[(&str, &str)] = &[
    ("assign_layouts", "assign a layout to every tile (stage layout; needs resolve_views)"),
    ("pipeline_loads", "pipeline the loads of loops with asynchronous copies (stage async)"),
    ("gpu", "every pass of the GPU pipeline, in order"),
    ("ptx", "compile to PTX; leaves the function unchanged, and fails if the compilation fails"),
];

/// Names and summaries of all passes.
pub fn names() -> Vec<(&'static str, &'static str)> {
    PASSES.iter().map(|p| (p.name, p.summary)).chain(TARGET_PASSES.iter().copied()).collect()
}

type PassFn = Box<dyn Fn(&mut Func)>;

/// Passes in the order in which they run.
pub struct Steps(Vec<(String, PassFn)>);

impl Steps {
    pub fn new(names: &[String], arch: GpuArch, options: &CompileOptions) -> Result<Steps, String> {
        let step = |name: &String| Ok((name.clone(), find(name, arch, options.clone())?));
        Ok(Steps(names.iter().map(step).collect::<Result<_, String>>()?))
    }

    /// Runs the passes; returns the time that each took.
    ///
    /// # Errors
    /// A pass panics, or, if `verify` is set, leaves invalid IR.
    pub fn run(&self, func: &mut Func, verify: bool) -> Result<Vec<(&str, Duration)>, String> {
        let mut times = Vec::new();
        for (name, pass) in &self.0 {
            let start = Instant::now();
            panic::catch_unwind(AssertUnwindSafe(|| pass(func)))
                .map_err(|cause| format!("pass {name} panicked: {}", message(&*cause)))?;
            times.push((name.as_str(), start.elapsed()));
            if verify {
                super::verify_func(func)
                    .map_err(|e| format!("pass {name} leaves a function that is not valid:\n{e}"))?;
            }
        }
        Ok(times)
    }
}

fn find(name: &str, arch: GpuArch, options: CompileOptions) -> Result<PassFn, String> {
    if let Some(pass) = passes::by_name(name) {
        return Ok(Box::new(pass.run));
    }
    match name {
        "assign_layouts" => Ok(Box::new(move |f| assign_layouts::run(f, arch, &options))),
        "pipeline_loads" => Ok(Box::new(move |f| {
            for note in pipeline_loads::run(f, arch, &options) {
                eprintln!("note: {note}");
            }
        })),
        "gpu" => Ok(Box::new(move |f| *f = pipeline::gpu_ir(f, arch, &options, &mut ()))),
        "ptx" => Ok(Box::new(move |f| {
            if let Err(e) = pipeline::compile_gpu(f, arch, &options, &mut ()) {
                panic!("{e}");
            }
        })),
        other => {
            let targeted: Vec<&str> = TARGET_PASSES.iter().map(|(name, _)| *name).collect();
            Err(format!("unknown pass `{other}`: expected one of {}, {}", super::pass_names(), targeted.join(", ")))
        }
    }
}

/// The message of a panic.
fn message(cause: &(dyn std::any::Any + Send)) -> String {
    let text = cause.downcast_ref::<String>().cloned();
    text.or_else(|| cause.downcast_ref::<&str>().map(|s| s.to_string())).unwrap_or_else(|| "no message".into())
}

/// Runs `f` without printing panic messages.
pub fn without_panic_messages<T>(f: impl FnOnce() -> T) -> T {
    let hook = panic::take_hook();
    panic::set_hook(Box::new(|_| {}));
    let result = f();
    panic::set_hook(hook);
    result
}
