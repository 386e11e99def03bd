//! Analyses for passes and lowerings. None of them changes the function.

pub mod axis;
pub mod buffers;
pub mod combine;
pub mod lattice;
pub mod magnitude;
pub mod padding;
pub mod reach;
pub mod registers;
pub mod scratch;
pub mod tensor_map;
pub mod written;
