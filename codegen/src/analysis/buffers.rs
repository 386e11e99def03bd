//! The allocation that a shared-memory value belongs to.

use crate::ir::{Func, Op, OpId, Value};

/// The `local_alloc` whose buffer, or part of it, a value is; `None` for other values.
pub fn buffer_of(func: &Func, v: Value) -> Option<OpId> {
    let id = func.def_op(v)?;
    match func.op(id).op {
        Op::LocalAlloc => Some(id),
        Op::LocalSlot | Op::LocalTrans { .. } => buffer_of(func, func.op(id).operands[0]),
        _ => None,
    }
}
