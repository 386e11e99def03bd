//! Which shared buffer a value is in.

use crate::ir::{Func, Op, OpId, Value};

/// The `local_alloc` that a shared value is (a part of); `None` for other values.
pub fn buffer_of(func: &Func, v: Value) -> Option<OpId> {
    let id = func.def_op(v)?;
    match func.op(id).op {
        Op::LocalAlloc => Some(id),
        Op::LocalSlot | Op::LocalTrans { .. } => buffer_of(func, func.op(id).operands[0]),
        _ => None,
    }
}
