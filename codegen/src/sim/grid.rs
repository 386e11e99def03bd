//! Programs of a grid, interleaved.
//!
//! # What holds between programs
//!
//! - All programs may run at the same time, in any order, and switch at every access of global memory. A seed draws one such
//!   interleaving; [`run_in_order`] is the one in which each program starts when the one before has ended.
//! - Atomics on one address happen one after the other, for all programs (device scope). Those that give the old value see what the last
//!   one left. They are relaxed: that another program's atomic has been seen says nothing about its other writes. `atomic_cas` alone
//!   releases and acquires: what a program did before its `atomic_cas` is visible to whoever executes one on the same address later.
//! - A load sees other programs' plain stores only if they happened before it in that sense. Everything else is a data race, and an error
//!   that names both sides ([`super::global`]).
//! - What the bulk copy engine adds is complete when the kernel ends, not before, whatever its threads have waited for.
//! - A program that waits for another one (by atomics in a loop) lets it go on: nobody is starved. Where every program that has not ended
//!   only repeats atomics or loads that change nothing, nobody can go on: that is reported as lost progress.
//!
//! On a GPU only as many programs run at the same time as fit: a grid whose programs wait for programs of higher numbers must be that small.

use super::Global;
use super::error::SimError;
use super::machine::{Block, Code, Turn};
use super::parse::parse;
use super::random::Random;
use crate::target::TensorMapDesc;

/// What to run.
pub struct Launch<'a> {
    /// The lowering's LLVM IR.
    pub llvm_ir: &'a str,
    pub grid: [u32; 3],
    pub threads: u32,
    pub shared_bytes: u32,
    /// The kernel's arguments as bits, in order.
    pub args: &'a [u64],
    /// What follows them: maps that the bulk copy engine takes.
    pub tensor_maps: &'a [TensorMapDesc],
    /// Draws the order in which programs and threads run.
    pub seed: u64,
}

/// Registers of all programs that run at a time, unless more programs have to start for others to go on: a bound on memory.
const RESIDENT_REGISTERS: usize = 1 << 24;
/// As many programs as run at a time where they are small.
const RESIDENT: usize = 8;
/// Turns of a program before it may be another one's.
const BURST: usize = 64;

/// Runs the programs of the grid, interleaved as the seed has it.
///
/// # Errors
/// What the simulated GPU does not know ([`SimError::Unknown`]), a launch that does not fit the code, and what no correct kernel does:
/// races, deadlocks, accesses outside of memory, and so on. `global` is left as it was then.
pub fn run(launch: &Launch, global: &mut Global) -> Result<(), SimError> {
    let code = Code::new(parse(launch.llvm_ir)?, launch)?;
    let fit = RESIDENT_REGISTERS / (code.registers() * launch.threads as usize).max(1);
    run_grid(launch, &code, fit.clamp(2, RESIDENT), global)
}

/// Runs the programs of the grid one after the other, except where one waits for a later one.
///
/// # Errors
/// As [`run`].
pub fn run_in_order(launch: &Launch, global: &mut Global) -> Result<(), SimError> {
    run_grid(launch, &Code::new(parse(launch.llvm_ir)?, launch)?, 1, global)
}

fn run_grid(launch: &Launch, code: &Code, mut limit: usize, global: &mut Global) -> Result<(), SimError> {
    let [x, y, z] = launch.grid;
    let total = x as usize * y as usize * z as usize;
    let mut waiting = (0..z).flat_map(|k| (0..y).flat_map(move |j| (0..x).map(move |i| [i, j, k])));
    let mut random = Random::new(launch.seed ^ 0x6A09_E667);
    let mut resident: Vec<Block> = Vec::new();
    let mut started = 0;
    global.begin(total);
    loop {
        while resident.len() < limit
            && let Some(place) = waiting.next()
        {
            resident.push(Block::new(code, launch, place, started));
            started += 1;
        }
        if resident.is_empty() {
            return Ok(());
        }
        let at = random.below(resident.len());
        for _ in 0..1 + random.below(BURST) {
            match resident[at].turn(global)? {
                Turn::On => {}
                Turn::Yield => break,
                Turn::Ended => {
                    resident.swap_remove(at);
                    break;
                }
            }
        }
        if !resident.is_empty() && resident.iter().all(|block| block.polls(global.changes)) {
            if (started as usize) == total {
                return Err(resident[0].lost_progress(resident.len()));
            }
            // The one that they wait for may not have started.
            limit = resident.len() + 1;
        }
    }
}
