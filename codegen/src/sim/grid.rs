//! Runs the programs of a grid, interleaved.
//!
//! # Memory model between programs
//!
//! - All programs may run concurrently, in any order, and switch at every access of global memory. A seed chooses one
//!   interleaving; [`run_in_order`] starts each program when the previous one has ended.
//! - Atomics on one address are totally ordered across all programs (device scope). An atomic that returns the old
//!   value sees the result of the previous atomic. Observing another program's relaxed atomic says nothing about its
//!   other writes: what a program did before an atomic that releases is visible to every program that executes one that
//!   acquires on the same address later. Those with the scope of one block order nothing between programs.
//! - A load sees another program's plain stores only if they happen before it in this sense. All other conflicting
//!   accesses are data races: errors that name both sides ([`super::global`]).
//! - Bulk reductions complete at the end of the kernel, whatever its threads have waited for.
//! - A program that spins on atomics in a loop yields to other programs: scheduling is fair. If every program that has
//!   not ended only repeats atomics or loads that change nothing, the grid is livelocked, which is reported.
//!
//! A GPU runs only as many programs concurrently as fit: a grid whose programs wait for programs with higher indices
//! must be that small.

use super::Global;
use super::error::SimError;
use super::machine::{Block, LoadedKernel, SliceEnd};
use super::parse::parse;
use super::random::Random;
use crate::target::TensorMapDesc;

/// A launch to simulate.
pub struct Launch<'a> {
    /// The LLVM IR that the lowering emitted.
    pub llvm_ir: &'a str,
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    /// Bits of the kernel's arguments, in order.
    pub args: &'a [u64],
    /// Tensor maps, which follow the arguments.
    pub tensor_maps: &'a [TensorMapDesc],
    /// Chooses the order in which programs and threads run.
    pub seed: u64,
}

/// Maximum number of registers of all resident programs, which bounds the memory use. Exceeded if more programs must
/// start for others to make progress.
const RESIDENT_REGISTERS: usize = 1 << 24;
/// Maximum number of resident programs, even if they have few registers.
const RESIDENT: usize = 8;
/// Maximum number of time slices of one program in a row.
const MAX_SLICES: usize = 64;

/// Runs the programs of the grid in the interleaving that the seed chooses.
///
/// # Errors
/// Unsupported code ([`SimError::Unsupported`]), a launch that does not match the code, and errors of the kernel:
/// races, deadlocks, out-of-bounds accesses and others. `global` is left in the state at the time of the error.
pub fn run(launch: &Launch, global: &mut Global) -> Result<(), SimError> {
    let kernel = LoadedKernel::new(parse(launch.llvm_ir)?, launch)?;
    let threads = (launch.threads * kernel.ctas) as usize;
    let fit = RESIDENT_REGISTERS / (kernel.registers() * threads).max(1);
    run_grid(launch, &kernel, fit.clamp(2, RESIDENT), global)
}

/// Runs the programs of the grid one after the other, except if one waits for a later one.
///
/// # Errors
/// As for [`run`].
pub fn run_in_order(launch: &Launch, global: &mut Global) -> Result<(), SimError> {
    run_grid(launch, &LoadedKernel::new(parse(launch.llvm_ir)?, launch)?, 1, global)
}

fn run_grid(launch: &Launch, kernel: &LoadedKernel, mut limit: usize, global: &mut Global) -> Result<(), SimError> {
    let [x, y, z] = launch.grid;
    // The blocks of a cluster run together.
    let ctas = kernel.ctas as usize;
    let total = x as usize / ctas * y as usize * z as usize;
    let mut waiting = (0..z).flat_map(|k| (0..y).flat_map(move |j| (0..x).step_by(ctas).map(move |i| [i, j, k])));
    let mut random = Random::new(launch.seed ^ 0x6A09_E667);
    let mut resident: Vec<Block> = Vec::new();
    let mut started = 0;
    global.begin_launch(total);
    loop {
        while resident.len() < limit
            && let Some(program_id) = waiting.next()
        {
            resident.push(Block::new(kernel, launch, program_id, started));
            started += 1;
        }
        if resident.is_empty() {
            return Ok(());
        }
        let at = random.below(resident.len());
        for _ in 0..1 + random.below(MAX_SLICES) {
            match resident[at].run_slice(global)? {
                SliceEnd::Ready => {}
                SliceEnd::Yield => break,
                SliceEnd::Exited => {
                    resident.swap_remove(at);
                    break;
                }
            }
        }
        if !resident.is_empty() && resident.iter().all(|block| block.is_spinning(global.changes)) {
            if (started as usize) == total {
                return Err(resident[0].livelock(resident.len()));
            }
            // The program that they wait for may not have started yet.
            limit = resident.len() + 1;
        }
    }
}
