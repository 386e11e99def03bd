//! Tile IR: SSA over scalars, tiles and views, with structured control flow.
//!
//! A [`Func`] owns everything; [`Value`], [`OpId`] and [`BlockId`] are indices into it. Reading order: [`types`] (types
//! of values), [`ops`] (the op table), [`func`] (the arenas), [`place`] (schedules of loops), [`parts`] (extents that are not powers of two), [`edit`] and [`nested`]
//! (changes), [`build`] (typed constructors).

pub mod attr;
pub mod build;
pub mod edit;
pub mod func;
pub mod nested;
pub mod ops;
pub mod parts;
pub mod place;
pub mod types;

pub use attr::{Attr, Literal};
pub use build::Builder;
pub use func::{Arg, BlockData, BlockId, Def, Func, Loc, OpData, OpId, Use, Value};
pub use ops::{
    AtomicOp, BinaryOp, CmpOp, Effects, Eviction, MemScope, MemSem, Op, OpInfo, Padding, Precision, Stage, UnaryOp,
};
pub use place::{Partition, Placement};
pub use types::{DType, Elem, LayoutId, Type};
