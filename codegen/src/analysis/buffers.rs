//! The allocation that a shared-memory value belongs to, and how loops use its slots.

use crate::ir::nested::uses;
use crate::ir::{BinaryOp, Def, Func, Literal, Op, OpId, Type, Value};

/// The `local_alloc` of the shared buffer that a value is, or is a part of; `None` for other values.
pub fn buffer_of(func: &Func, v: Value) -> Option<OpId> {
    let id = func.def_op(v)?;
    match func.op(id).op {
        Op::LocalAlloc => Some(id),
        Op::LocalSlot | Op::LocalTrans { .. } => buffer_of(func, func.op(id).operands[0]),
        _ => None,
    }
}

/// The ops among `ops`, in the order of the text, that use a buffer or a value derived from it, themselves or in their
/// regions. A `wgmma` in flight uses its operands until a wait completes it.
pub fn users(func: &Func, ops: &[OpId], buffer: Value) -> Vec<OpId> {
    let mut derived = vec![buffer];
    let mut found = Vec::new();
    for &id in ops {
        let data = func.op(id);
        let is_derived = |v: &Value| derived.contains(v);
        if data.operands.iter().any(is_derived) || !data.regions.is_empty() && uses(func, id).iter().any(is_derived) {
            found.push(id);
            if let Op::LocalSlot | Op::LocalTrans { .. } | Op::Wgmma { .. } = data.op {
                derived.extend(&data.results);
            }
        }
    }
    found
}

/// The loop whose iterations use the two slots of a ring in turn: all uses are in its body, at an index that it carries
/// and flips.
pub fn alternation(func: &Func, ring: OpId) -> Option<OpId> {
    let value = func.result(ring);
    let Type::Shared { shape, .. } = func.ty(value) else { return None };
    let mut found = None;
    for used in func.uses(value) {
        let data = func.op(used.op);
        let (Op::LocalSlot, Def::Param(block, number)) = (&data.op, func.value(*data.operands.get(1)?).def) else {
            return None;
        };
        let id = func.owner(block)?;
        let yields = &func.op(func.terminator(block)).operands;
        let flips = number > 0 && is_flip(func, yields[number - 1], data.operands[1]);
        let is_loop = matches!(func.op(id).op, Op::For { .. }) && func.is_in(used.op, block);
        if !is_loop || !flips || found.is_some_and(|other| other != id) {
            return None;
        }
        found = Some(id);
    }
    found.filter(|_| shape.first() == Some(&2))
}

/// Whether a value is another one with its lowest bit flipped.
fn is_flip(func: &Func, v: Value, of: Value) -> bool {
    let Some(id) = func.def_op(v).filter(|&id| func.op(id).op == Op::Binary(BinaryOp::Xor)) else { return false };
    let [a, b] = func.op(id).operands[..] else { return false };
    let one = |v: Value| {
        let value = func.def_op(v).map(|id| &func.op(id).op);
        matches!(value, Some(Op::Constant { value: Literal::Int(1) }))
    };
    a == of && one(b) || b == of && one(a)
}
