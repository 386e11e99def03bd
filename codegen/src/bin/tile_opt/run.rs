//! Runs passes by name.

use std::panic::{self, AssertUnwindSafe};
use std::time::{Duration, Instant};
use tilewright_codegen::ir::{Func, Stage};
use tilewright_codegen::passes::{self, PASSES, Step, TARGET_PASSES};
use tilewright_codegen::pipeline;
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_codegen::verify;

/// Steps that are more than one pass.
const PIPELINES: &[(&str, &str)] = &[
    ("gpu", "every pass of the GPU pipeline, in order"),
    ("ptx", "compile to PTX; leaves the function unchanged, and fails if the compilation fails"),
];

/// Names and summaries of all passes.
pub fn names() -> Vec<(&'static str, &'static str)> {
    let plain = PASSES.iter().map(|p| (p.name, p.summary));
    plain.chain(TARGET_PASSES.iter().map(|p| (p.name, p.summary))).chain(PIPELINES.iter().copied()).collect()
}

/// Passes in the order in which they run.
pub struct Steps(Vec<(String, Step)>);

impl Steps {
    pub fn new(names: &[String], arch: GpuArch, options: &CompileOptions) -> Result<Steps, String> {
        let step = |name: &String| Ok((name.clone(), find(name, arch, options)?));
        Ok(Steps(names.iter().map(step).collect::<Result<_, String>>()?))
    }

    /// Runs the passes; returns the time that each took.
    ///
    /// # Errors
    /// A pass fails, or, if `verify` is set, leaves invalid IR.
    pub fn run(&self, func: &mut Func, verify: bool) -> Result<Vec<(&str, Duration)>, String> {
        let mut times = Vec::new();
        for (name, pass) in &self.0 {
            let start = Instant::now();
            match name.as_str() {
                "gpu" | "ptx" | "assign_layouts" => expect_stage(name, func, &[Stage::Tile])?,
                "schedule_loops" => expect_stage(name, func, &[Stage::Layout, Stage::Schedule])?,
                _ => {}
            }
            let notes = panic::catch_unwind(AssertUnwindSafe(|| pass(func)))
                .map_err(|cause| format!("pass {name} panicked: {}", message(&*cause)))?
                .map_err(|e| format!("pass {name}: {e}"))?;
            notes.iter().for_each(|note| super::say(format_args!("note: {note}")));
            times.push((name.as_str(), start.elapsed()));
            if verify {
                super::verify_func(func)
                    .map_err(|e| format!("pass {name} leaves a function that is not valid:\n{e}"))?;
            }
        }
        Ok(times)
    }
}

/// Refuses a function that is not at one of these stages.
pub fn expect_stage(what: &str, func: &Func, stages: &[Stage]) -> Result<(), String> {
    let found = verify::stage_of(func);
    if stages.contains(&found) {
        return Ok(());
    }
    let expected: Vec<String> = stages.iter().map(|stage| format!("{stage:?}").to_lowercase()).collect();
    let found = format!("{found:?}").to_lowercase();
    Err(format!("{what} takes a function of stage {}, and this one is of stage {found}", expected.join(" or ")))
}

fn find(name: &str, arch: GpuArch, options: &CompileOptions) -> Result<Step, String> {
    let own = options.clone();
    match name {
        "gpu" => Ok(Box::new(move |f| {
            pipeline::check(f, &own).map_err(|error| error.to_string())?;
            *f = pipeline::gpu_ir(f, arch, &own, &mut ());
            Ok(Vec::new())
        })),
        "ptx" => Ok(Box::new(move |f| {
            let compiled = pipeline::compile_gpu(f, arch, &own, &mut ());
            compiled.map(|_| Vec::new()).map_err(|e| e.to_string())
        })),
        other => passes::step(other, arch, options).ok_or_else(|| {
            let known: Vec<&str> = names().into_iter().map(|(name, _)| name).collect();
            format!("unknown pass `{other}`: expected one of {}", known.join(", "))
        }),
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
