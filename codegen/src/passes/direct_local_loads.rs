//! Folds layout conversions into loads from shared memory.
//!
//! Does: where a `local_load`, possibly through `expand_dims`, has a `convert_layout` as its only use, loads in the
//! layout of the conversion and removes the conversion, which would go through shared memory again. Moves the load down
//! to its use, which shortens the live range of its registers, unless an op in between may change shared memory.
//! Requires: stage *layout*.
//! Keeps: results.
//! Does not: change loads that are used in several layouts.

use crate::ir::{Effects, Func, Op, OpId, Value};
use crate::layout::LinearLayout;

/// Runs the pass.
pub fn run(func: &mut Func) {
    for id in func.walk() {
        if func.op(id).op == Op::ConvertLayout {
            fold(func, id);
        }
    }
}

fn fold(func: &mut Func, convert: OpId) {
    let Some(chain) = chain(func, convert) else { return };
    let target_layout = func.layout_of(func.result(convert)).clone();
    let Some(layouts) = layouts(func, &chain, target_layout) else { return };
    for (&op, layout) in chain.iter().zip(layouts) {
        let v = func.result(op);
        let layout = func.intern_layout(layout);
        let ty = func.ty(v).with_layout(Some(layout));
        func.set_ty(v, ty);
    }
    let (old, new) = (func.result(convert), func.op(convert).operands[0]);
    func.replace_uses(old, new);
    let between = &func.block(func.parent_block(convert)).ops[func.position(chain[0])..func.position(convert)];
    if between.iter().all(|&op| preserves_shared_memory(func, op)) {
        chain.into_iter().for_each(|op| func.move_before(op, convert));
    }
    func.erase(convert);
}

/// The ops from a `local_load` to the conversion, all in one block and with one use each; `None` for other definitions.
fn chain(func: &Func, convert: OpId) -> Option<Vec<OpId>> {
    // An `mbarrier_arrive` that releases the buffer uses the value only to be ordered after the load.
    let reads =
        |v: Value| func.uses(v).iter().filter(|used| !matches!(func.op(used.op).op, Op::MbarrierArrive { .. })).count();
    let block = func.parent_block(convert);
    let mut chain = Vec::new();
    let mut v = func.op(convert).operands[0];
    loop {
        let id = func.def_op(v).filter(|&id| func.is_in(id, block) && reads(v) == 1)?;
        chain.insert(0, id);
        match func.op(id).op {
            Op::LocalLoad => return Some(chain),
            Op::ExpandDims { .. } => v = func.op(id).operands[0],
            _ => return None,
        }
    }
}

/// The layouts of the results of the chain for which the last one is `target_layout`.
fn layouts(func: &Func, chain: &[OpId], target_layout: LinearLayout) -> Option<Vec<LinearLayout>> {
    let mut layouts = vec![target_layout];
    for &id in chain[1..].iter().rev() {
        let Op::ExpandDims { axis } = func.op(id).op else { return None };
        let outer = &layouts[0];
        let inner = outer.slice(axis).layout;
        if inner.expand_dims(axis).layout != *outer {
            return None;
        }
        layouts.insert(0, inner);
    }
    Some(layouts)
}

/// Whether the op leaves shared memory unchanged.
fn preserves_shared_memory(func: &Func, id: OpId) -> bool {
    match func.op(id).op {
        Op::Wgmma { .. } | Op::WgmmaWait { .. } => true,
        _ => matches!(func.effects(id), Effects::Pure | Effects::Read),
    }
}
