//! What the tests share: tensors with gaps and poison, errors against f64 references, and kernels in the
//! interpreter and on devices.

pub mod interpret;
pub mod numerics;
pub mod on_device;
