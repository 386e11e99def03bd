//! Schedules that the constraint solver finds.

use tilewright_codegen::ir::{Func, Stage};
use tilewright_codegen::pipeline::{self, Observer};
use tilewright_codegen::schedule::problem::{LoopSchedule, LoopSchedules, Problem, loops, register_pressure};
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_runtime::solver::{Found, Limits, solve};

/// Keeps the function that the scheduler leaves, and what the compiler says.
#[derive(Default)]
pub struct Scheduled {
    pub func: Option<Func>,
    pub notes: Vec<String>,
}

impl Observer for Scheduled {
    fn after(&mut self, _: &'static str, stage: Stage, func: &Func) {
        if stage == Stage::Schedule {
            self.func = Some(func.clone());
        }
    }

    fn llvm_ir(&mut self, _: &str) {}

    fn note(&mut self, note: &str) {
        self.notes.push(note.to_string());
    }
}

/// The best schedules of the loops of a recorded kernel, and what the solver says about each. Checks that the compiler
/// takes them.
///
/// # Errors
/// What the solver or the compiler refuses.
pub fn solve_loops(
    func: &Func,
    arch: GpuArch,
    options: &CompileOptions,
) -> Result<(LoopSchedules, Vec<Found>), String> {
    let mut scheduled = Scheduled::default();
    pipeline::gpu_ir(func, arch, options, &mut scheduled);
    let own = scheduled.func.ok_or("no pass schedules loops")?;
    let (mut all, mut found) = (Vec::new(), Vec::new());
    for (number, id) in loops(&own).into_iter().enumerate() {
        // Others are loops with control flow.
        let Ok(problem) = Problem::of(&own, id, arch, options) else { continue };
        if problem.nodes.is_empty() {
            continue;
        }
        let of_loop = solve(&problem, &|behind| register_pressure(&own, &problem, behind), Limits::default())?;
        let solution = of_loop.solution.clone();
        all.push(LoopSchedule { number, solution, bound: of_loop.bound });
        found.push(of_loop);
    }
    let all = LoopSchedules(all);
    if all.0.is_empty() {
        return Ok((all, found));
    }
    let mut taken = Scheduled::default();
    pipeline::gpu_ir(func, arch, &CompileOptions { loops: Some(all.to_string()), ..options.clone() }, &mut taken);
    match taken.notes.iter().find(|note| note.contains("is not applied")) {
        Some(note) => Err(note.clone()),
        None => Ok((all, found)),
    }
}
