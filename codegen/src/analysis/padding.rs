//! Zero padding of tiles whose extents are rounded up.

use super::access_layout::view_operands;
use super::axis::AxisAnalysis;
use crate::ir::{Func, Op, Padding, Value};

/// First index along `dim` from which on a tile holds only zeros: it was loaded across the end of its tensor, whose
/// extent is a constant. `None` if this is unknown, or nothing lies past the end.
pub fn zero_from(func: &Func, axis: &AxisAnalysis, v: Value, dim: usize) -> Option<usize> {
    let data = func.op(func.def_op(v)?);
    match &data.op {
        Op::Cast => zero_from(func, axis, data.operands[0], dim),
        Op::Trans { perm } => zero_from(func, axis, data.operands[0], perm[dim]),
        Op::LoadView { boundary, padding: Padding::Zero, .. } if boundary.contains(&dim) => {
            let view = view_operands(func, data.operands[0]);
            let constant = |v: Value| axis.scalar_constant(func, v);
            let end = constant(view.shape[dim])? - constant(view.offsets[dim])?;
            let end = usize::try_from(end.max(0)).ok()?;
            (end < func.ty(v).shape()[dim]).then_some(end)
        }
        _ => None,
    }
}
