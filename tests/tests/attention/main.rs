//! FlashAttention-2 against its definition, on every machine: in the interpreter, and as native code.

mod interpreted;
mod native;
mod tiles;
