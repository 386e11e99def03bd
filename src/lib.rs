//! Tilewright: GPU tile kernels written in Rust.
