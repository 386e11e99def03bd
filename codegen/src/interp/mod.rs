//! The interpreter: the reference semantics of all ops of Tile IR, in plain Rust.
//!
//! It favors clarity over speed. Host and GPU code are tested against it, and constant folding uses its [`arith`].
//!
//! - The programs of a grid are interleaved: they switch at accesses to global memory, in an order derived from a seed
//!   ([`Order`]). Ops are not interrupted; atomics are atomic. The memory model is that of the simulated GPU: atomics
//!   on one address are totally ordered, and acquire and release as their `sem` says, unless their scope is one
//!   program. A load of another program's store must be ordered after it by a release and an acquire; otherwise it is
//!   a data race, which is an error. A program that waits for another one lets it run. If all programs only wait, that is an error: livelock.
//! - Every op rounds its result to the element type, with one rounding (formats: [`crate::num`]). NaNs have one bit
//!   pattern per type.
//! - A `reduce` combines the upper half of the axis with the lower half until one element is left; a `scan` proceeds
//!   element by element. A `dot` accumulates products in the order of the inner dimension, each by a fused multiply-add
//!   in the type of the accumulator.
//! - Undefined behavior of the IR is an error that names the op: an access outside a buffer or beyond the shape of a
//!   view, a hint or assumption that does not hold, a loop step that is not positive.
//! - Integer division by zero gives 0, and a shift by the width or more equals repeated shifts by one bit. Neither is
//!   an error, since lanes that are masked off later may execute them.
//! - At later stages, layouts have no effect: `convert_layout` is the identity. `async_copy` and asynchronous MMA
//!   complete immediately; the bytes of a `tma_load` become visible to a wait for its mbarrier. Reading uninitialized
//!   shared memory is an error. Warp-specialized partitions run round-robin, each until it blocks; if all block, that
//!   is an error (deadlock).
//!
//! `inline_asm` is not supported and is an error.

mod access;
pub mod arith;
mod barriers;
mod dot_and_reduce;
mod elementwise;
mod exec_context;
mod machine;
pub mod memory;
mod races;
mod shape;
mod shared;
#[cfg(test)]
mod tests;
pub mod value;

pub use machine::{Order, RunOptions, STOPPED};
pub use memory::{BufferId, Memory};
pub use value::Tile;

use crate::ir::{DType, Elem, Func, Literal, Loc, Type, Value};
use crate::num;
use crate::verify;
use std::fmt;

/// An argument of a kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ArgValue {
    /// A pointer to the start of a buffer.
    Buffer(BufferId),
    /// An address, e.g. inside a buffer.
    Address(u64),
    Int(i64),
    Float(f64),
    Bool(bool),
}

impl From<BufferId> for ArgValue {
    fn from(id: BufferId) -> ArgValue {
        ArgValue::Buffer(id)
    }
}

/// Results of a run other than the contents of memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// Output of each `device_print`, ordered by program.
    pub prints: Vec<String>,
    /// Number of ops executed.
    pub ops: u64,
}

/// Error that stopped a run.
#[derive(Clone, Debug, PartialEq)]
pub struct InterpError {
    /// The op as text; the kernel's name if no op is at fault.
    pub op: String,
    /// Location in the user's source.
    pub loc: Loc,
    /// Coordinates of the program.
    pub program: [u32; 3],
    pub message: String,
}

impl fmt::Display for InterpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.program;
        if !self.loc.is_unknown() {
            write!(f, "{}: ", self.loc)?;
        }
        write!(f, "`{}` in program ({x}, {y}, {z}): {}", self.op, self.message)
    }
}

impl std::error::Error for InterpError {}

/// Observer of the values that a run computes.
pub trait Trace {
    /// Called for each tile and scalar that becomes a result or block parameter.
    fn value(&mut self, v: Value, tile: &Tile);
}

/// Ignores all values.
impl Trace for () {
    fn value(&mut self, _: Value, _: &Tile) {}
}

/// Runs a kernel over a grid, with positional arguments.
///
/// # Errors
/// If the function violates a rule of the verifier, an argument does not match its parameter or the facts that the
/// kernel is specialized for, or a program has undefined behavior. `memory` keeps its contents at that point.
pub fn run(func: &Func, args: &[ArgValue], grid: [u32; 3], memory: &mut Memory) -> Result<Outcome, InterpError> {
    run_traced(func, args, grid, memory, RunOptions::default(), &mut ())
}

/// As [`run`], with options and an observer of all values.
pub fn run_traced(
    func: &Func,
    args: &[ArgValue],
    grid: [u32; 3],
    memory: &mut Memory,
    options: RunOptions,
    trace: &mut dyn Trace,
) -> Result<Outcome, InterpError> {
    let before = |message: String| InterpError {
        op: format!("kernel @{}", func.name),
        loc: func.loc.clone(),
        program: [0; 3],
        message,
    };
    verify::verify(func, verify::stage_of(func)).map_err(|errors| before(errors[0].to_string()))?;
    let args = arguments(func, args, memory).map_err(before)?;
    machine::run(func, &args, grid, memory, options, trace)
}

/// The arguments as scalars, checked against types and specialization.
fn arguments(func: &Func, args: &[ArgValue], memory: &Memory) -> Result<Vec<Tile>, String> {
    let params = &func.block(func.body).params;
    if params.len() != args.len() {
        return Err(format!("the kernel takes {} arguments, found {}", params.len(), args.len()));
    }
    let mut scalars = Vec::new();
    for ((arg, &v), value) in func.args.iter().zip(params).zip(args) {
        let ty = func.ty(v);
        let scalar = scalar_argument(ty, *value, memory).map_err(|e| format!("argument `{}`: {e}", arg.name))?;
        let integer = match scalar.elem {
            Elem::Ptr(_) => Some(scalar.bits[0] as i128),
            Elem::Num(d) if d.is_int() => Some(num::decode_int(d, scalar.bits[0])),
            Elem::Num(_) => None,
        };
        if let Some(i) = integer {
            let promised = arg.equal_to.is_none_or(|n| n as i128 == i) && i % arg.divisible_by as i128 == 0;
            if !promised {
                return Err(format!(
                    "argument `{}` is {i}, but the kernel was specialized for {}",
                    arg.name,
                    match arg.equal_to {
                        Some(n) => format!("the value {n}"),
                        None => format!("multiples of {}", arg.divisible_by),
                    }
                ));
            }
        }
        scalars.push(scalar);
    }
    Ok(scalars)
}

fn scalar_argument(ty: &Type, value: ArgValue, memory: &Memory) -> Result<Tile, String> {
    let mismatch = || Err(format!("expected {ty}, found {value:?}"));
    let Some(elem) = ty.elem() else { return mismatch() };
    let bits = match (elem, value) {
        (Elem::Ptr(_), ArgValue::Buffer(id)) => memory.address(id),
        (Elem::Ptr(_), ArgValue::Address(address)) => address,
        (Elem::Num(DType::Bool), ArgValue::Bool(b)) => b as u64,
        (Elem::Num(d), ArgValue::Float(x)) if d.is_float() => num::encode(d, x),
        (Elem::Num(d), ArgValue::Int(i)) if d.is_int() => {
            let (low, high) = num::int_range(d);
            if !(low..=high).contains(&(i as i128)) {
                return Err(format!("{i} is not a value of {d}"));
            }
            num::encode_int(d, i as i128)
        }
        _ => return mismatch(),
    };
    Ok(Tile::scalar(elem, bits))
}

/// Storage of a literal in this type.
pub fn literal_bits(value: Literal, dtype: DType) -> u64 {
    match value {
        Literal::Bool(b) => b as u64,
        Literal::Int(i) => num::encode_int(dtype, i as i128),
        Literal::Float(x) => num::encode(dtype, x),
    }
}
