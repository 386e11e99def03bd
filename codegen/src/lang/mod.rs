//! The kernel language: typed handles that record Tile IR.
//!
//! `#[kernel]` rewrites a Rust function into calls of this module; rustc checks element types, and this module checks
//! shapes while recording, with messages at the user's source line ([`crate::diag`]). Names are Triton's.
//!
//! Reading order: [`record`](mod@record) (where ops go), [`dtype`] (element types), [`handle`] (tiles, scalars,
//! pointers), [`operand`] (what combines with a tile, and broadcasting), [`arith`] and [`compare`] (operators),
//! X, then the operations by group, and [`kernel`] (kernel definitions
//! for the host).
//!
//! Functions here take all their arguments in order; kernel code may name them and omit optional ones, which the macro
//! fills in.

pub mod arith;
pub mod branch;
pub mod carried;
pub mod compare;
pub mod control;
pub mod create;
pub mod debug;
mod diag_text;
pub mod dot;
pub mod dot_scaled;
pub mod dtype;
pub mod handle;
pub mod index;
pub mod kernel;
pub mod libdevice;
pub mod map;
pub mod math;
pub mod memory;
pub mod operand;
pub mod random;
pub mod record;
pub mod reduce;
pub mod rows;
pub mod shape;
pub mod sort;
pub mod tensor;
#[cfg(test)]
mod tests;

pub use arith::{Combine, cdiv, maximum, minimum, rescale, umulhi};
pub use control::{range, static_assert, static_range};
pub use create::{arange, full, full_like, num_programs, ones, program_id, scalar, zeros, zeros_like};
pub use debug::{
    assume, device_assert, device_print, inline_asm_elementwise, max_contiguous, multiple_of, static_print,
};
pub use dot::{Precision, dot};
pub use dot_scaled::{BlockScale, DotFormat, dot_scaled};
pub use dtype::{Bits, Dtype, Float, Int, Num, Summed};
pub use handle::{BlockPtr, Data, FloatData, IntData, Ptr, PtrTile, Scalar, Tile};
pub use libdevice::{
    acos, acosh, asin, asinh, atan, atan2, atanh, cbrt, copysign, cosh, div_rn, exp10, expm1, fmod, hypot, isfinite,
    isinf, isnan, ldexp, log1p, log10, pow, rint, round, signbit, sinh, tan, trunc,
};
pub use map::{Mapped, map_elementwise};
pub use math::{
    MathMethods, abs, cast, ceil, clamp, cos, erf, exp, exp2, floor, fma, log, log2, rsqrt, sigmoid, sin, softmax,
    sqrt, sqrt_rn, swizzle2d, tanh, where_,
};
pub use memory::{
    Eviction, MemScope, MemSem, Padding, advance, atomic_add, atomic_and, atomic_cas, atomic_max, atomic_min,
    atomic_or, atomic_xchg, atomic_xor, load, load_tensor_descriptor, make_block_ptr, make_tensor_descriptor,
    semaphore_release, semaphore_wait, store, store_tensor_descriptor,
};
pub use operand::{FloatLiteral, HostNum, IntegerLiteral, Operand};
pub use random::{philox, rand, rand4x, randint, randint4x, randn, randn4x};
pub use record::{Recording, record, record_generic};
pub use reduce::{
    all, any, argmax, argmin, associative_scan, cumprod, cumsum, max, max_with_indices, min, min_with_indices, reduce,
    reduce_or, sum, xor_sum,
};
pub use shape::{
    ShapeMethods, broadcast, broadcast_to, cat, expand_dims, interleave, join, permute, ravel, reshape, split, squeeze,
    trans, view,
};
pub use sort::{flip, gather, histogram, sort, topk};
pub use tensor::TensorPtr;
