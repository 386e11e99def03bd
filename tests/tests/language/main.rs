//! The language: recorded IR, results in the interpreter, and error messages.

mod branches;
mod control;
mod diagnostics;
mod functions;
mod kernel_def;
mod memory;
mod operators;
mod support;
mod weighted_sum;
