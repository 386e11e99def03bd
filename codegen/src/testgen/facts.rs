//! Checks the results of the analyses against the values that the interpreter computes.

use super::{Argument, Program};
use crate::analysis::axis::{AxisAnalysis, AxisInfo};
use crate::analysis::lattice::Lattice;
use crate::analysis::{bounds, memory_effects, padding};
use crate::interp::{self, Memory, Tile, Trace};
use crate::ir::{Func, Stage, Value};
use crate::passes::{assume_ranges, canonicalize, carried_offsets, cse, dce, resolve_views};
use crate::pipeline;
use crate::verify::stage_of;

/// Compares every value of a run with the analysis results for it.
struct AnalysisChecker {
    axis: Vec<AxisInfo>,
    /// Per value: dimensions, with the index from which the value is zero.
    zero_from: Vec<Vec<(usize, usize)>>,
    violation: Option<String>,
}

impl AnalysisChecker {
    fn new(func: &Func) -> AnalysisChecker {
        let analysis = AxisAnalysis::new(func);
        let values = || (0..func.num_values() as u32).map(Value);
        let zero_from = |v: Value| {
            // From `Stage::Layout` on, views are created next to their uses. Erased ops have no operands.
            let exists = func.def_op(v).is_some_and(|id| func.block_of(id).is_some());
            let rank = if stage_of(func) == Stage::Tile || !exists { 0 } else { func.ty(v).shape().len() };
            let known = |dim| Some((dim, padding::zero_from(func, &analysis, v, dim)?));
            (0..rank).filter_map(known).collect()
        };
        AnalysisChecker {
            axis: values().map(|v| analysis.get(func, v)).collect(),
            zero_from: values().map(zero_from).collect(),
            violation: None,
        }
    }

    fn check(&self, v: Value, tile: &Tile) -> Result<(), String> {
        let info = &self.axis[v.0 as usize];
        info.check(tile).map_err(|e| format!("{e}, but the analysis gives {info:?}"))?;
        for &(dim, from) in &self.zero_from[v.0 as usize] {
            let inner: usize = tile.shape[dim + 1..].iter().product();
            let zero = |(i, &bits): (usize, &u64)| i / inner % tile.shape[dim] < from || bits == 0;
            if let Some(i) = tile.bits.iter().enumerate().position(|element| !zero(element)) {
                return Err(format!(
                    "element {i} is not zero, but the analysis gives zeros from index {from} of dimension {dim}"
                ));
            }
        }
        Ok(())
    }
}

impl Trace for AnalysisChecker {
    fn value(&mut self, v: Value, tile: &Tile) {
        if self.violation.is_none()
            && let Err(e) = self.check(v, tile)
        {
            self.violation = Some(format!("value %{}: {e}", v.0));
        }
    }
}

/// The arguments of a launch, with hypothetical buffer sizes.
struct Sizes<'p> {
    args: &'p [Argument],
    bytes: Vec<u64>,
    addresses: &'p [u64],
}

impl bounds::Launch for Sizes<'_> {
    fn integer(&self, arg: usize) -> i128 {
        match self.args[arg] {
            Argument::Int(n) => n.into(),
            Argument::Input { .. } | Argument::Output { .. } | Argument::Float(_) => 0,
        }
    }

    fn bytes(&self, arg: usize) -> u64 {
        self.bytes[arg]
    }

    fn address(&self, arg: usize) -> u64 {
        self.addresses[arg]
    }
}

/// A function as a launch with the program's arguments compiles it for a GPU: with assumptions about ranges, if they
/// hold.
pub(super) fn as_launched(program: &Program, func: &Func) -> Func {
    let mut assumed = func.clone();
    assume_ranges::run(&mut assumed);
    let arguments = program.args.len();
    let sizes = Sizes { args: &program.args, bytes: vec![0; arguments], addresses: &vec![0; arguments] };
    match pipeline::footprint(&assumed).violated_assumption(&sizes, program.grid) {
        None => assumed,
        Some(_) => func.clone(),
    }
}

/// Runs a function with the program's arguments and compares analysis results with the run: contiguity, divisibility,
/// constancy and ranges of every value, zeros beyond the end of padded tiles, which arguments are read and written, and
/// their access bounds.
///
/// # Errors
/// The result that is wrong, or why the function does not run.
pub fn check_analyses(program: &Program, func: &Func) -> Result<(), String> {
    run(program, func)?;
    if stage_of(func) != Stage::Tile {
        return Ok(());
    }
    // The bounds analysis sees the function after dead code is removed, so unused loads do not count.
    let mut left = func.clone();
    carried_offsets::run(&mut left);
    resolve_views::run(&mut left);
    canonicalize::run(&mut left);
    cse::run(&mut left);
    dce::run(&mut left);
    let (ends, addresses) = run(program, &left)?;
    let footprint = bounds::Footprint::of(&left);
    for (arg, &end) in ends.iter().enumerate().filter(|&(_, &end)| end > 0) {
        // If the buffer were one byte smaller, the bounds check must fail.
        let bytes = (0..program.args.len()).map(|i| if i == arg { end - 1 } else { 1 << 40 }).collect();
        let sizes = Sizes { args: &program.args, bytes, addresses: &addresses };
        if footprint.check(&sizes, program.grid).is_ok() {
            return Err(format!("argument `{}` is accessed up to byte {end}, beyond its bounds", func.args[arg].name));
        }
    }
    Ok(())
}

/// Runs a function and compares the analysis results of its values and of the memory that it accesses. Returns, per
/// argument, the end of the bytes that are accessed, and the address.
fn run(program: &Program, func: &Func) -> Result<(Vec<u64>, Vec<u64>), String> {
    let mut memory = Memory::new();
    let (values, buffers) = program.arguments(&mut memory);
    let mut checker = AnalysisChecker::new(func);
    let options = interp::RunOptions::default();
    interp::run_traced(func, &values, program.grid, &mut memory, options, &mut checker).map_err(|e| e.to_string())?;
    if let Some(violation) = checker.violation {
        return Err(violation);
    }
    let params = &func.block(func.body).params;
    let (writes, reads) = (memory_effects::written_pointers(func), memory_effects::read_pointers(func));
    let mut ends = vec![0; buffers.len()];
    for (arg, id) in buffers.iter().enumerate().filter_map(|(i, id)| Some((i, (*id)?))) {
        let [read, wrote] = memory.accessed(id);
        for (end, through, what) in [(read, &reads, "read"), (wrote, &writes, "written")] {
            if end > 0 && !through.contains(&params[arg]) {
                return Err(format!(
                    "argument `{}` is {what}, although the analysis says that it is not",
                    func.args[arg].name
                ));
            }
        }
        ends[arg] = read.max(wrote) as u64;
    }
    let addresses = buffers.iter().map(|id| id.map_or(0, |id| memory.address(id))).collect();
    Ok((ends, addresses))
}
