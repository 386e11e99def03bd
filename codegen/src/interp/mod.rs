//! The interpreter: what every op of Tile IR means, in plain Rust.
//!
//! It is slow and obvious. Host code and GPU code are compared with it, and constant folding calls its [`arith`].
//!
//! - Programs of a grid run interleaved: they switch at accesses of global memory, in an order drawn from a seed ([`Order`]). An op is never
//!   interrupted; an atomic is atomic. What may be expected of other programs is what the simulated GPU expects too: atomics on one address
//!   happen one after the other; they are relaxed, and `atomic_cas` alone releases and acquires; what another program stores may be loaded only
//!   if an `atomic_cas` orders the two, everything else is a data race, which is an error. A program that waits for another one lets it
//!   go on. Where all only wait, that is an error: lost progress.
//! - Numbers keep their type: every op rounds its result to the element type, with one rounding
//!   ([`crate::num`] has the formats). NaNs have one bit pattern per type.
//! - A `reduce` folds the upper half of the axis onto the lower half until one element is left; a `scan` goes element
//!   by element. A `dot` adds products to the accumulator in the order of the inner dimension, each by a fused
//!   multiply-add in the accumulator's type.
//! - What the IR calls undefined is an error here that names the op: access outside a buffer or beyond a view's shape,
//!   a hint or assumption that does not hold, a loop step that is not positive.
//! - Two things are unspecified and do not stop a program, because lanes that are masked later may do them: integer
//!   division by zero (0 here) and shifts by the width or more (as if bit by bit here).
//! - At the later stages layouts mean nothing: `convert_layout` is the identity. `async_copy` and products take place
//!   at once; what `tma_load` writes is there for who has waited for its barrier. Reading shared memory that nothing has
//!   written is an error. Roles take turns, each runs until it waits; when all wait, that is an error too.
//!
//! `inline_asm` has no meaning here and is an error.

mod access;
pub mod arith;
mod barriers;
mod contract;
mod elementwise;
mod machine;
pub mod memory;
mod races;
mod shape;
mod shared;
mod strand;
#[cfg(test)]
mod tests;
pub mod value;

pub use machine::{Limits, Order};
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
    /// Any address, for pointers into a buffer.
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

/// What a run gives besides what it wrote to memory.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Outcome {
    /// What each `device_print` printed, program by program.
    pub prints: Vec<String>,
    /// Number of ops executed.
    pub ops: u64,
}

/// Why a run stopped.
#[derive(Clone, Debug, PartialEq)]
pub struct InterpError {
    /// The op as text; the kernel's name where no op is to blame.
    pub op: String,
    /// Its place in the user's source.
    pub loc: Loc,
    /// Coordinates of the program instance.
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

/// Sees what a run computes.
pub trait Trace {
    /// Called with each tile and scalar that a result or a block's parameter becomes.
    fn value(&mut self, v: Value, tile: &Tile);
}

/// Sees nothing.
impl Trace for () {
    fn value(&mut self, _: Value, _: &Tile) {}
}

/// Runs a kernel over a grid. Arguments go by position.
///
/// # Errors
/// Where the function breaks a rule of the verifier, an argument does not fit its parameter or the promises about it,
/// or a program does something undefined; `memory` is left as it was then.
pub fn run(func: &Func, args: &[ArgValue], grid: [u32; 3], memory: &mut Memory) -> Result<Outcome, InterpError> {
    run_traced(func, args, grid, memory, Limits::default(), Order::default(), &mut ())
}

/// As [`run`], with programs in that order; stops with an error at a limit, and shows every value to `trace`.
pub fn run_traced(
    func: &Func,
    args: &[ArgValue],
    grid: [u32; 3],
    memory: &mut Memory,
    limits: Limits,
    order: Order,
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
    machine::run(func, &args, grid, memory, limits, order, trace)
}

/// The arguments as scalars, checked against types and promises.
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

/// Storage of a constant of that type.
pub fn literal_bits(value: Literal, dtype: DType) -> u64 {
    match value {
        Literal::Bool(b) => b as u64,
        Literal::Int(i) => num::encode_int(dtype, i as i128),
        Literal::Float(x) => num::encode(dtype, x),
    }
}
