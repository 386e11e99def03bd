//! Schedules that the constraint solver finds.

use crate::notes;
use tilewright_codegen::ir::Func;
use tilewright_codegen::pipeline;
use tilewright_codegen::schedule::problem::{LoopSchedule, LoopSchedules, Problem, loops, register_pressure};
use tilewright_codegen::target::{CompileOptions, GpuArch};
use tilewright_runtime::solver::{Found, Limits, solve};

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
    let own = pipeline::scheduled(func, arch, options);
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
    let with_loops = CompileOptions { loops: Some(all.to_string()), ..options.clone() };
    let (_, notes) = notes::gpu_ir(func, arch, &with_loops);
    match notes.iter().find(|note| note.contains("is not applied")) {
        Some(note) => Err(note.clone()),
        None => Ok((all, found)),
    }
}
