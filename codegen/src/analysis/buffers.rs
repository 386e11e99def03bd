//! The allocation that a shared-memory value belongs to.

use crate::ir::{Func, Op, OpId, Value};

/// The `local_alloc` of the shared buffer that a value is, or is a part of; `None` for other values.
pub fn buffer_of(func: &Func, v: Value) -> Option<OpId> {
    let id = func.def_op(v)?;
    match func.op(id).op {
        Op::LocalAlloc => Some(id),
        Op::LocalSlot | Op::LocalTrans { .. } => buffer_of(func, func.op(id).operands[0]),
        _ => None,
    }
}
