//! Dots that are joined: one `wgmma` of 160 columns for the dots of a with 128 and with 32 columns, as those of the parts of
//! a tile ([`crate::ir::parts`]).
//!
//! A `wgmma` reads a from shared memory once for all of its columns, and b once for each 64 rows. An SM reads and writes 128
//! bytes of shared memory per cycle in all, which limits the loop of a matmul before the tensor cores do: a step of 64 along K
//! of a tile 128 × N, by two warpgroups, reads 16 KB of a for each `wgmma` and N · 256 bytes of b, and TMA writes (128 + N) · 128
//! bytes; N = 256 takes as long as the products, N = 160 1.15 times that, and 1.35 times in two `wgmma` (H200: measured times
//! are 1.03 to 1.25 times the larger of the two limits). So two dots that follow each other are joined where they multiply the same a, and their operands b come from rings of which each slot can
//! have that of the other ring right after it.

use crate::analysis::buffers::buffer_of;
use crate::ir::{Effects, Func, Literal, Op, OpId, Type, Value};
use crate::mma::{Family, Instruction, shared::Matrix};
use std::collections::HashMap;

/// Alignment of buffers: the period of the widest swizzle.
const ALIGN: usize = 1024;

/// The joined dots of a function.
#[derive(Clone, Debug, Default)]
pub struct JoinedDots {
    /// By the first of them, all.
    dots: HashMap<OpId, Vec<OpId>>,
    /// The rings whose slots follow each other: those of the first dot, of the second, and so on.
    pub rings: Vec<Vec<OpId>>,
}

impl JoinedDots {
    /// Finds the dots to join. `is_stored` says whether threads store to a ring.
    pub fn find(func: &Func, is_stored: impl Fn(OpId) -> bool) -> JoinedDots {
        let mut found: Vec<(Vec<OpId>, Vec<OpId>)> = Vec::new();
        let mut taken: Vec<OpId> = Vec::new();
        for first in func.walk() {
            if matches!(func.op(first).op, Op::Wgmma { .. }) && !taken.contains(&first) {
                let (dots, rings) = run(func, first);
                taken.extend(&dots);
                found.extend((dots.len() > 1 && !rings.iter().any(|&ring| is_stored(ring))).then_some((dots, rings)));
            }
        }
        // A ring has one place.
        let lists: Vec<Vec<OpId>> = found.iter().map(|(_, rings)| rings.clone()).collect();
        let alone = |rings: &Vec<OpId>| {
            let mut others = lists.iter().filter(|other| *other != rings);
            !others.any(|other| rings.iter().any(|ring| other.contains(ring)))
        };
        found.retain(|(_, rings)| alone(rings));
        let mut joined = JoinedDots::default();
        for (dots, rings) in found {
            joined.dots.insert(dots[0], dots);
            if !joined.rings.contains(&rings) {
                joined.rings.push(rings);
            }
        }
        joined
    }

    /// Keeps only the joins that `fits` accepts: the others are computed one by one, in the same memory.
    pub fn retain(&mut self, fits: impl Fn(&[OpId]) -> bool) {
        self.dots.retain(|_, dots| fits(dots));
    }

    /// The dots that the `wgmma` of a dot computes: none if it is joined to one before it.
    pub fn of(&self, id: OpId) -> Vec<OpId> {
        let later = self.dots.values().any(|dots| dots[1..].contains(&id));
        if later { Vec::new() } else { self.dots.get(&id).cloned().unwrap_or_else(|| vec![id]) }
    }

    /// The number of groups of `wgmma` that a wait may leave in flight, where that of dots is `pending`: those that the last
    /// dots before it fill.
    pub fn groups(&self, func: &Func, wait: OpId, pending: u32) -> u32 {
        let largest = self.dots.values().map(Vec::len).max().unwrap_or(1) as u32;
        let before = &func.block(func.parent_block(wait)).ops[..func.position(wait)];
        let (mut dots, mut groups) = (0, 0);
        for &id in before.iter().rev().filter(|&&id| matches!(func.op(id).op, Op::Wgmma { .. })) {
            dots += self.of(id).len() as u32;
            if dots > pending {
                return groups;
            }
            groups += u32::from(!self.of(id).is_empty());
        }
        // Those before the block may be joined.
        groups + (pending - dots) / largest
    }

    /// Bytes from a slot of a ring to the next one, where it is not the size of its own slot.
    pub fn pitch(&self, func: &Func, ring: OpId) -> Option<usize> {
        let rings = self.rings.iter().find(|rings| rings.contains(&ring))?;
        Some(rings.iter().map(|&ring| slot_bytes(func, ring)).sum())
    }
}

/// Bytes of one slot of a ring.
pub fn slot_bytes(func: &Func, ring: OpId) -> usize {
    let ty = func.ty(func.result(ring));
    match ty {
        Type::Shared { shape, .. } => func.shared_bytes(ty) / shape[0],
        _ => 0,
    }
}

/// The dots from `first` on that one instruction can compute, and their rings.
fn run(func: &Func, first: OpId) -> (Vec<OpId>, Vec<OpId>) {
    let block = func.parent_block(first);
    let Some(slot) = Slot::of(func, first) else { return (vec![first], Vec::new()) };
    let (mut dots, mut rings, mut columns) = (vec![first], vec![slot.ring], slot.matrix.extent);
    let mut between: Vec<Value> = func.op(first).results.clone();
    for &id in &func.block(block).ops[func.position(first) + 1..] {
        let data = func.op(id);
        if let Op::Wgmma { .. } = data.op {
            let next = Slot::of(func, id).filter(|next| slot.can_precede(next) && !rings.contains(&next.ring));
            let ready = !between.contains(&data.operands[2]) && is_zero(func, first) == is_zero(func, id);
            let same = func.op(first).op == data.op && func.op(first).operands[0] == data.operands[0];
            let Some(next) = next.filter(|_| ready && same) else { break };
            columns += next.matrix.extent;
            let instruction = |id: OpId| Instruction::of(func, func.op(id), Family::Wgmma);
            let types = |id: OpId| instruction(id).map(|instruction| instruction.operands);
            let is_legal = instruction(id).is_some_and(|instruction| instruction.columns().any(|n| n == columns));
            if !is_legal || types(first) != types(id) {
                break;
            }
            dots.push(id);
            rings.push(next.ring);
        } else if data.op.effects() != Effects::Pure {
            break;
        }
        between.extend(&data.results);
    }
    (dots, rings)
}

fn is_zero(func: &Func, dot: OpId) -> bool {
    matches!(func.constant(func.op(dot).operands[2]), Some(Literal::Float(0.0) | Literal::Int(0)))
}

/// Operand b of a dot: the slot of a ring.
struct Slot {
    ring: OpId,
    index: Value,
    /// The number of slots.
    count: usize,
    matrix: Matrix,
}

impl Slot {
    /// `None` where b is not all of a slot of a ring that copies fill, or one instruction does not have all columns.
    fn of(func: &Func, dot: OpId) -> Option<Slot> {
        let data = func.op(dot);
        let Op::Wgmma { warps, n_end: None, .. } = &data.op else { return None };
        let b = data.operands[1];
        let mut slot = func.def_op(b)?;
        while let Op::LocalTrans { .. } = func.op(slot).op {
            slot = func.def_op(func.op(slot).operands[0])?;
        }
        let ring = buffer_of(func, b)?;
        let Type::Shared { shape, .. } = func.ty(func.result(ring)) else { return None };
        let is_slot = func.op(slot).op == Op::LocalSlot && func.op(ring).operands.is_empty();
        if !is_slot || warps[1] != 1 || !slot_bytes(func, ring).is_multiple_of(ALIGN) {
            return None;
        }
        let mn_major = Instruction::of(func, data, Family::Wgmma)?.allows_mn_major();
        let matrix = Matrix::of(func, func.ty(b), 0, mn_major)?;
        Some(Slot { ring, index: func.op(slot).operands[1], count: shape[0], matrix })
    }

    /// Whether a matrix that begins with this one continues with the other: in rows of one panel, or in whole panels.
    fn can_precede(&self, next: &Slot) -> bool {
        let (a, b) = (self.matrix, next.matrix);
        let alike = (a.k_major, a.swizzle, a.k) == (b.k_major, b.swizzle, b.k);
        let continues = if a.k_major { a.k == a.panel() } else { a.extent.is_multiple_of(a.panel()) };
        alike && continues && (self.index, self.count) == (next.index, next.count)
    }
}
