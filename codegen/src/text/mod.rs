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
//! All ops have the form `results = mnemonic operands {attributes} : result types at {placement} (params) { region }`,
//! without the parts that are empty. Values are numbered in text order, so that equal functions have equal text; `parse(print(f))`
//! is `f` but for source locations, which the text does not contain.

mod parse;
mod print;
#[cfg(test)]
mod tests;

pub use parse::{ParseError, parse, parse_file};
pub use print::{Line, lines, print, print_op};
