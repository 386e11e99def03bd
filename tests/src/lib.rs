//! Shared test code: tensors with gaps and poison, errors against f64 references, kernels in the interpreter and on
//! devices, the examples, and `ptxas`.

pub mod attention;
pub mod attention_8_bit;
pub mod attention_cache;
pub mod configurations;
pub mod erased;
pub mod examples;
pub mod interpret;
pub mod loops;
pub mod notes;
pub mod numerics;
pub mod on_device;
pub mod pointer_loads;
pub mod ptxas;
pub mod sass;
pub mod solved;
pub mod training;
