//! Analyses for passes and lowerings. None of them changes the function.

pub mod access_layout;
pub mod axis;
pub mod bounds;
pub mod buffers;
pub mod combine;
pub mod costs;
pub mod dataflow;
pub mod lattice;
pub mod magnitude;
pub mod memory_effects;
pub mod padding;
pub mod pipes;
pub mod registers;
pub mod scratch;
pub mod tensor_map;
pub mod warp_box;
