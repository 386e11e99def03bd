//! FlashAttention-2 against its definition, without a GPU: in the interpreter, on the simulated GPU, and as native
//! code.

mod bounds;
mod cache;
mod eight_bit;
mod interpreted;
mod native;
mod tiles;
