//! The text form of Tile IR.
//!
//! ```text
//! kernel @double(%x: ptr<f32> {divisible_by = 16}, %n: i32) {
//!   %0 = program_id {axis = 0} : i32
//!   %1 = arange {start = 0, end = 64} : tensor<64xi32>
//!   …
//!   return
//! }
//! ```
//!
//! Every op has the same form: `results = mnemonic operands {attributes} : result types (params) { region }`, with each
//! part left out where it is empty. Values are numbered in text order, so that two functions print alike exactly when they
//! are alike; `parse(print(f))` is `f`. Source places are not part of the text.

mod parse;
mod print;
#[cfg(test)]
mod tests;

pub use parse::{ParseError, parse};
pub use print::{print, print_op};
