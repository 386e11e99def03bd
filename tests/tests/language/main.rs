//! The language from the outside: what kernels record, what they compute (by the interpreter), and what mistakes say.

mod control;
mod diagnostics;
mod functions;
mod kernel_def;
mod memory;
mod operators;
mod support;
mod weighted_sum;
