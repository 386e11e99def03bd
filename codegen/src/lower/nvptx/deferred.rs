//! Computes what a TMA store stores box by box: loads of other tiles, and the elementwise ops between these and the store.
//!
//! The tile of a store is often a sum in registers, a dot's, and a tile from memory, such as a residual stream. Loaded as a
//! whole, it would need as many registers again. Instead each warp loads the elements of one box while it stores those of
//! the box before. Memory that the kernel does not write is the same at both times.

use super::emit::Val;
use super::memory::BlockAddress;
use super::{Lowering, Regs, Result};
use crate::analysis::memory_effects::{underlying_arguments, written_pointers};
use crate::ir::{Elem, Func, Op, OpId, Value};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// The ops that stores compute box by box: loads of views that have no other use, and elementwise ops on their results.
pub(super) fn deferred_ops(func: &Func) -> HashSet<OpId> {
    let written = written_pointers(func);
    let mut found = HashSet::new();
    for id in func.walk() {
        if let Op::TmaStore { .. } = func.op(id).op {
            defer(func, &written, id, func.op(id).operands[1], &mut found);
        }
    }
    found
}

/// Adds the op that defines a value to those that a store computes, if it has to load for that.
fn defer(func: &Func, written: &HashSet<Value>, store: OpId, v: Value, found: &mut HashSet<OpId>) -> bool {
    let Some(id) = func.def_op(v) else { return false };
    let data = func.op(id);
    let layout = func.ty(func.op(store).operands[1]).layout();
    let fits = func.block_of(id) == func.block_of(store)
        && func.uses(v).len() == 1
        && func.ty(v).layout() == layout
        // 8-bit integers are computed four at a time, in words.
        && matches!(func.ty(v).elem(), Some(Elem::Num(dtype)) if dtype.is_float() && dtype.bits() >= 16);
    if !fits {
        return false;
    }
    let is_deferred = match data.op {
        Op::LoadView { .. } => {
            let read = underlying_arguments(func, data.operands[0]);
            !read.is_empty() && read.is_disjoint(written)
        }
        Op::Unary(_) | Op::Binary(_) | Op::Fma | Op::Cast => {
            // All operands, not only the first with a load.
            data.operands.iter().filter(|&&operand| defer(func, written, store, operand, found)).count() > 0
        }
        _ => false,
    };
    if is_deferred {
        found.insert(id);
    }
    is_deferred
}

/// A load of which boxes are loaded one after the other.
pub(super) struct DeferredLoad<'f> {
    id: OpId,
    block: BlockAddress<'f>,
}

impl<'f> Lowering<'f> {
    /// The loads for a tile that a store computes box by box.
    pub(super) fn deferred_loads(&mut self, tile: Value) -> Vec<DeferredLoad<'f>> {
        let Some(id) = self.func.def_op(tile).filter(|id| self.deferred.contains(id)) else { return Vec::new() };
        let data = self.func.op(id);
        match &data.op {
            Op::LoadView { boundary, .. } => {
                let block = self.block_address(data.operands[0], self.tile_layout(tile), boundary);
                vec![DeferredLoad { id, block }]
            }
            _ => data.operands.iter().flat_map(|&operand| self.deferred_loads(operand)).collect(),
        }
    }

    /// Loads the elements in some registers of the layout.
    pub(super) fn load_box(&mut self, loads: &mut [DeferredLoad<'f>], registers: &[usize]) -> HashMap<Value, Regs> {
        let store = self.loc.clone();
        let mut loaded = HashMap::new();
        for load in loads {
            self.e.set_loc(&self.func.op(load.id).loc);
            let registers = self.load_registers(load.id, &mut load.block, registers);
            loaded.insert(self.func.result(load.id), Rc::new(registers));
        }
        self.e.set_loc(&store);
        loaded
    }

    /// The elements of a tile in some registers of the layout, with the results of the loads that it needs.
    pub(super) fn box_values(
        &mut self,
        tile: Value,
        registers: &[usize],
        loaded: &HashMap<Value, Regs>,
    ) -> Result<Regs> {
        if let Some(values) = loaded.get(&tile) {
            return Ok(values.clone());
        }
        match self.func.def_op(tile).filter(|id| self.deferred.contains(id)) {
            None => {
                let all = self.regs(tile);
                let of_register = |&register: &usize| -> Val { all[register].clone() };
                Ok(Rc::new(registers.iter().map(of_register).collect()))
            }
            Some(id) => {
                let operands = self.func.op(id).operands.iter();
                let operands: Result<Vec<Regs>> =
                    operands.map(|&operand| self.box_values(operand, registers, loaded)).collect();
                Ok(Rc::new(self.elementwise_registers(id, &operands?, 1)?))
            }
        }
    }
}
