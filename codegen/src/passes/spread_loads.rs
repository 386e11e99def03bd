//! Loads from shared memory while `wgmma` run, in few registers.
//!
//! Does: where several lanes would load the same elements directly after a wait for a `wgmma`, with nothing that hides the
//! latency, each lane loads a part of them before the wait, and shuffles after it give each lane what it uses (a
//! `convert_layout`). The load takes its registers beside those of the `wgmma` in flight, hence a part only. Arithmetic
//! of the warp would hide the latency, and so would other warps, unless the loop keeps all of them in step: where they exchange a
//! tile in each iteration. FlashAttention-3 does so with L of its backward pass
//! (`hopper/mainloop_bwd_sm90_tma_gmma_ws.hpp`, `ShuffleLSE`); what it gains, and what it costs in loops without exchange:
//! `harness/records/2026-11-28-h200-attention-tiles.jsonl` and `…-attention-tried.jsonl` (eighteenth and twenty-first run).
//! Requires: stage *async*, with `wgmma_wait` in final position (`delay_waits`).
//! Keeps: results.
//! Does not: move loads past ops that may change shared memory.

use crate::analysis::access_layout::MAX_VECTOR_BYTES;
use crate::ir::{BlockId, Effects, Func, Op, OpId};
use crate::layout::{Conversion, Dim, LinearLayout, ThreadBases};

/// Loads of fewer registers stay as they are: with 16, as in the backward pass of attention with heads of 128, shuffles make
/// it up to 2 % slower (`…-attention-tried`, eighteenth run).
const MIN_REGISTERS: usize = 32;

/// Runs the pass.
pub fn run(func: &mut Func) {
    for block in (0..func.num_blocks() as u32).map(BlockId) {
        if !is_loop_with_exchange(func, block) {
            continue;
        }
        let waits = func.block(block).ops.iter().copied().filter(|&id| matches!(func.op(id).op, Op::WgmmaWait { .. }));
        for wait in waits.collect::<Vec<_>>() {
            if nothing_hides_latency(func, block, wait) {
                for (load, layout) in loads_after(func, block, wait) {
                    spread(func, block, load, wait, layout);
                }
            }
        }
    }
}

/// Changes the place of elements only.
fn is_move(op: &Op) -> bool {
    matches!(op, Op::LocalLoad | Op::ConvertLayout | Op::ExpandDims { .. } | Op::Broadcast)
}

/// Whether a block is the body of a loop that stores a tile to shared memory: warps wait for each other before they read it.
fn is_loop_with_exchange(func: &Func, block: BlockId) -> bool {
    let is_loop = func.owner(block).is_some_and(|owner| matches!(func.op(owner).op, Op::For { .. } | Op::While));
    let stores = |&id: &OpId| match func.op(id).op {
        Op::LocalStore => true,
        Op::LocalAlloc => !func.op(id).operands.is_empty(),
        _ => false,
    };
    is_loop && func.block(block).ops.iter().any(stores)
}

/// Whether there is no arithmetic on tiles between the last `wgmma` before a wait and the wait.
fn nothing_hides_latency(func: &Func, block: BlockId, wait: OpId) -> bool {
    let before = &func.block(block).ops[..func.position(wait)];
    let issued = before.iter().rposition(|&id| matches!(func.op(id).op, Op::Wgmma { .. }));
    issued.is_some_and(|at| {
        let gives_no_tile = |id: OpId| func.op(id).results.iter().all(|&v| !func.ty(v).is_tensor());
        let is_pure = |id: OpId| func.effects(id) == Effects::Pure;
        before[at + 1..].iter().all(|&id| is_move(&func.op(id).op) || is_pure(id) && gives_no_tile(id))
    })
}

/// The loads after a wait, up to the next op that does more than arithmetic, that can be spread, with their layouts.
fn loads_after(func: &Func, block: BlockId, wait: OpId) -> Vec<(OpId, LinearLayout)> {
    let at = func.position(wait);
    let after = &func.block(block).ops[at + 1..];
    let is_available = |id: &&OpId| {
        let operands = &func.op(**id).operands;
        operands.iter().all(|&v| func.def_op(v).is_none_or(|def| !func.is_in(def, block) || func.position(def) < at))
    };
    let passes = |id: &&OpId| func.op(**id).op == Op::LocalLoad || func.effects(**id) == Effects::Pure;
    let loads = after.iter().take_while(passes).filter(|&&id| func.op(id).op == Op::LocalLoad).filter(is_available);
    loads.filter_map(|&id| Some((id, spread_layout(func, id)?))).collect()
}

/// A layout in which lanes that would load the same elements load parts of them, with as wide accesses as before; `None` if
/// nothing is gained.
fn spread_layout(func: &Func, load: OpId) -> Option<LinearLayout> {
    let v = func.result(load);
    let (layout, memory) = (func.layout_of(v), func.layout_of(func.op(load).operands[0]));
    let bytes = func.ty(v).dtype()?.bytes() as u64;
    let mut register = layout.bases(Dim::Register).to_vec();
    if register.len() < MIN_REGISTERS.ilog2() as usize || bytes != 4 {
        return None;
    }
    let offsets: Vec<u32> = layout.locate_in(memory).images(Dim::Register).iter().map(|at| at.offset).collect();
    // The bits of a register number that tell the elements of one access apart.
    let vector = (0..).take_while(|&i| offsets.contains(&(1 << i)) && bytes << i < MAX_VECTOR_BYTES).count();
    let mut movable: Vec<usize> = (0..register.len()).filter(|&i| offsets[i].is_multiple_of(1 << vector)).collect();
    movable.sort_by_key(|&i| offsets[i]);
    let mut movable = movable.into_iter();
    let mut moved = Vec::new();
    let is_copy = |bit: &usize| layout.free_mask(Dim::Lane) >> bit & 1 == 1;
    let mut lane = layout.bases(Dim::Lane).to_vec();
    for (bit, from) in (0..lane.len()).filter(is_copy).zip(&mut movable) {
        lane[bit] = register[from].clone();
        moved.push(from);
    }
    let mut at = 0..;
    register.retain(|_| !moved.contains(&at.next().expect("internal compiler error: numbers end")));
    let [warp, block] = [Dim::Warp, Dim::Block].map(|dim| layout.bases(dim).to_vec());
    let spread = LinearLayout::distributed(layout.shape(), ThreadBases { register, lane, warp, block });
    match Conversion::between(&spread, layout) {
        Conversion::Lanes(plan) if plan.num_selects() == 0 => Some(spread),
        _ => None,
    }
}

fn spread(func: &mut Func, block: BlockId, load: OpId, wait: OpId, layout: LinearLayout) {
    let v = func.result(load);
    let (ty, loc) = (func.ty(v).clone(), func.op(load).loc.clone());
    let convert = func.create_op(Op::ConvertLayout, Vec::new(), vec![ty.clone()], Vec::new(), loc);
    func.insert(block, func.position(load) + 1, &[convert]);
    func.replace_uses(v, func.result(convert));
    func.add_operands(convert, &[v]);
    let layout = func.intern_layout(layout);
    func.set_ty(v, ty.with_layout(Some(layout)));
    func.move_before(load, wait);
}
