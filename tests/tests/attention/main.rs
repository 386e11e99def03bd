//! FlashAttention-2 against its definition, on every machine: in the interpreter, and as native code.

mod case;
mod device;
mod interpreted;
mod native;
