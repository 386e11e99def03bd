//! Loop-invariant code motion.
//!
//! Does: moves ops without effects out of each `for` and `while` that defines none of the values that they use.
//! Requires: a verified function.
//! Keeps: every computed value. A moved op runs even if the loop has no iterations, which is harmless for ops without
//! effects.
//! Does not: move loads, nor whole loops and branches.

use crate::ir::nested::{defined_inside, uses};
use crate::ir::{Effects, Func, Op, OpId};

/// Runs the pass. Returns whether it changed the function.
pub fn run(func: &mut Func) -> bool {
    let mut changed = false;
    // In a walk, inner loops follow the loops that contain them: in reverse order, an op that leaves an inner loop is
    // considered again in the outer one.
    for id in func.walk().into_iter().rev() {
        if matches!(func.op(id).op, Op::For { .. } | Op::While) {
            changed |= hoist(func, id);
        }
    }
    changed
}

fn hoist(func: &mut Func, id: OpId) -> bool {
    let mut inside = defined_inside(func, id);
    let mut moved = Vec::new();
    for region in func.op(id).regions.clone() {
        let mut stay = Vec::new();
        for op in func.take_ops(region) {
            if func.op(op).op.effects() == Effects::Pure && uses(func, op).is_disjoint(&inside) {
                for v in &func.op(op).results {
                    inside.remove(v);
                }
                moved.push(op);
            } else {
                stay.push(op);
            }
        }
        func.set_ops(region, &stay);
    }
    if moved.is_empty() {
        return false;
    }
    func.insert(func.parent_block(id), func.position(id), &moved);
    true
}
