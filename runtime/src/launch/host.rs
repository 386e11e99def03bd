//! Runs a grid of native code on rayon's pool.

use std::cell::{Cell, RefCell};
use std::ffi::{CStr, c_char, c_void};
use std::io::Write;
use std::sync::Arc;

use rayon::prelude::*;
use smallvec::SmallVec;
use tilewright_codegen::target::{HostEntry, HostHooks};

use crate::device::HostMemory;
use crate::error::Error;

/// Why a grid stopped.
pub(super) enum Failure {
    Assert { pid: [i32; 3], message: String },
    Arena(Error),
}

impl Failure {
    pub(super) fn into_error(self, kernel: &Arc<str>) -> Error {
        match self {
            Failure::Assert { pid, message } => Error::DeviceAssert { kernel: kernel.to_string(), pid, message },
            Failure::Arena(error) => error,
        }
    }
}

thread_local! {
    /// Scratch memory of this thread, reused by later launches. A running program takes it out of the cell.
    static ARENA: Cell<HostMemory> = Cell::default();
    /// The message of an assertion that has just failed on this thread.
    static ASSERT_MESSAGE: RefCell<Option<String>> = const { RefCell::new(None) };
}

static HOOKS: HostHooks = HostHooks { print, assert_failed };

/// Pointers to the argument slots, for all threads.
struct Arguments(SmallVec<[*const c_void; 32]>);

// SAFETY: the slots behind these pointers are borrowed for the whole run and only read.
unsafe impl Sync for Arguments {}

/// Runs every program of `grid`, and returns when all are done or one has failed.
///
/// # Safety
/// `entry` takes the arguments in `slots` and needs `arena_bytes` of scratch memory; the caller is responsible for its
/// accesses through them.
pub(super) unsafe fn run_grid(
    entry: HostEntry,
    slots: &[u64],
    grid: [u32; 3],
    arena_bytes: u64,
) -> Result<(), Failure> {
    let arguments = Arguments(slots.iter().map(|slot| slot as *const u64 as *const c_void).collect());
    let arguments = &arguments;
    let extents = grid.map(|extent| extent as i32);
    let [x, y, z] = grid.map(|extent| extent as u64);
    let run = |index: u64| {
        let pid = [index % x, index / x % y, index / (x * y)].map(|coordinate| coordinate as i32);
        with_arena(arena_bytes as usize, |arena| {
            // SAFETY: the caller's promise; only this call uses the arena.
            let status = unsafe { entry(arguments.0.as_ptr(), &pid, &extents, arena, &HOOKS) };
            match status {
                0 => Ok(()),
                _ => {
                    let message = ASSERT_MESSAGE.take().unwrap_or_else(|| "the condition is false".to_string());
                    Err(Failure::Assert { pid, message })
                }
            }
        })
    };
    match x * y * z {
        1 => run(0),
        programs => (0..programs).into_par_iter().try_for_each(run),
    }
}

/// Calls `f` with at least `bytes` of this thread's scratch memory.
fn with_arena(bytes: usize, f: impl FnOnce(*mut u8) -> Result<(), Failure>) -> Result<(), Failure> {
    let mut arena = ARENA.take();
    if arena.len() < bytes {
        drop(arena);
        arena = HostMemory::zeroed(bytes).map_err(Failure::Arena)?;
    }
    let outcome = f(arena.as_mut_ptr());
    ARENA.set(arena);
    outcome
}

/// Prints one line to standard output: `pid (x, y, z) prefix: v v v`.
unsafe extern "C" fn print(prefix: *const c_char, values: *const f64, len: u64, pid: *const [i32; 3]) {
    // SAFETY: the contract of `HostHooks`.
    let (prefix, values, pid) = unsafe {
        let values = if len == 0 { &[] } else { std::slice::from_raw_parts(values, len as usize) };
        (CStr::from_ptr(prefix).to_string_lossy(), values, *pid)
    };
    let mut line = format!("pid ({}, {}, {}) {prefix}:", pid[0], pid[1], pid[2]);
    for value in values {
        line.push_str(&format!(" {value}"));
    }
    line.push('\n');
    // A closed standard output does not stop a kernel.
    let _ = std::io::stdout().lock().write_all(line.as_bytes());
}

unsafe extern "C" fn assert_failed(message: *const c_char, _pid: *const [i32; 3]) {
    // SAFETY: the contract of `HostHooks`.
    let text = unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned();
    ASSERT_MESSAGE.set(Some(text));
}
