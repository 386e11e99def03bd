//! Lowers waits for `wgmma`: the registers that `wgmma` in flight write and read.

use super::dot::register_class;
use super::emit::Val;
use super::{Lowering, llvm_type};
use crate::ir::{BlockId, Def, Elem, Op, OpId, Type, Value};
use crate::mma::Family;

impl Lowering<'_> {
    /// Emits `wgmma.wait_group`, with the accumulators as tied operands, so that no use of them moves above it.
    pub(super) fn wgmma_wait(&mut self, id: OpId) {
        let data = self.func.op(id);
        let Op::WgmmaWait { pending } = data.op else { panic!("internal compiler error: not a wgmma_wait") };
        let pending = self.plan.joined.groups(self.func, id, pending);
        // Registers that no `wgmma` writes keep their values, and take no register if these are constant.
        let written: Vec<Vec<bool>> = data.operands.iter().map(|&v| self.written(v, &mut Vec::new())).collect();
        let mut regs: Vec<Val> = Vec::new();
        let (mut types, mut classes) = (Vec::new(), Vec::new());
        for (&v, written) in data.operands.iter().zip(&written) {
            regs.extend(self.regs(v).iter().zip(written).filter(|(_, written)| **written).map(|(reg, _)| reg.clone()));
            types.resize(regs.len(), llvm_type(Elem::Num(self.dtype(v))));
            classes.resize(regs.len(), register_class(self.dtype(v)));
        }
        // Register operands of `wgmma` in flight must stay in their registers until the wait.
        let held = self.register_operands(&data.operands);
        let text = format!("wgmma.wait_group.sync.aligned {pending};");
        if regs.is_empty() {
            self.e.void(format!("call void asm sideeffect \"{text}\", \"~{{memory}}\"() #1"));
            return;
        }
        let ty = format!("{{ {} }}", types.join(", "));
        let mut constraints: Vec<String> = classes.iter().map(|class| format!("={class}")).collect();
        constraints.extend((0..regs.len()).map(|i| i.to_string()));
        constraints.extend(vec!["r".to_string(); held.len()]);
        constraints.push("~{memory}".into());
        let mut args: Vec<String> = types.iter().zip(&regs).map(|(ty, r)| format!("{ty} {r}")).collect();
        args.extend(held.iter().map(|r| format!("i32 {r}")));
        let v = self.e.inst(format!(
            "call {ty} asm sideeffect \"{text}\", \"{}\"({}) #1",
            constraints.join(","),
            args.join(", ")
        ));
        let mut next_output = 0..regs.len();
        for ((&o, &result), written) in data.operands.iter().zip(&data.results).zip(&written) {
            let before = self.regs(o);
            let values =
                before.iter().zip(written).map(|(reg, written)| match written.then(|| next_output.next()).flatten() {
                    Some(at) => self.e.inst(format!("extractvalue {ty} {v}, {at}")),
                    None => reg.clone(),
                });
            let values = values.collect();
            self.set(result, values);
        }
    }

    /// The columns (N) of one `wgmma` instruction that covers its whole tile.
    pub(super) fn instruction_columns(&self, id: OpId) -> u32 {
        let data = self.func.op(id);
        let Op::Wgmma { warps, .. } = &data.op else { panic!("internal compiler error: not wgmma") };
        (self.tile_layout(data.results[0]).shape()[1] / warps[1]).min(256)
    }

    /// The columns that the instructions of a dot write in tile `tile` along N.
    pub(super) fn columns_written(&self, id: OpId, tile: u32) -> u32 {
        let Op::Wgmma { warps, n_end, .. } = &self.func.op(id).op else { panic!("internal compiler error: not wgmma") };
        let columns = self.instruction_columns(id);
        match n_end {
            // Warpgroups along N have different columns, but share the instruction.
            Some(end) if warps[1] == 1 => match end.saturating_sub(tile * columns).min(columns) {
                0 => 0,
                used => self.instruction(Family::Wgmma, id).columns().find(|&n| n >= used).unwrap_or(columns),
            },
            _ => columns,
        }
    }

    /// The registers of an accumulator that `wgmma` in flight may write.
    fn written(&self, v: Value, seen: &mut Vec<Value>) -> Vec<bool> {
        let count = self.tile_layout(v).num_registers();
        let all = |written: bool| vec![written; count];
        if seen.contains(&v) {
            return all(false);
        }
        seen.push(v);
        let either = |values: &[Value], seen: &mut Vec<Value>| {
            let each: Vec<Vec<bool>> = values.iter().map(|&v| self.written(v, seen)).collect();
            (0..count).map(|i| each.iter().any(|written| written[i])).collect()
        };
        match self.func.value(v).def {
            Def::Result(id, index) => match &self.func.op(id).op {
                Op::Wgmma { n_end: Some(_), warps, .. } => {
                    let per_tile = self.instruction_columns(id) / 2;
                    let n_tiles = self.tile_layout(v).shape()[1] / (2 * per_tile * warps[1]);
                    let own =
                        (0..count as u32).map(|i| i % per_tile < self.columns_written(id, i / per_tile % n_tiles) / 2);
                    let before = self.written(self.func.op(id).operands[2], seen);
                    own.zip(before).map(|(own, before)| own || before).collect()
                }
                Op::WgmmaWait { .. } => self.written(self.func.op(id).operands[index], seen),
                Op::Constant { .. } => all(false),
                Op::For { .. } => either(&self.carried(id, index), seen),
                _ => all(true),
            },
            Def::Param(block, index) => match self.loop_of(block) {
                Some(id) if index > 0 => either(&self.carried(id, index - 1), seen),
                _ => all(true),
            },
        }
    }

    /// The values that a loop carries at an index: before the first iteration, and after each.
    fn carried(&self, id: OpId, index: usize) -> [Value; 2] {
        let data = self.func.op(id);
        let last = self.func.block(data.regions[0]).ops.last().expect("internal compiler error: an empty region");
        [data.operands[3 + index], self.func.op(*last).operands[index]]
    }

    /// Whether a loop ends with `wgmma` in flight that the next op waits for.
    pub(super) fn leaves_wgmma_in_flight(&self, id: OpId) -> bool {
        let awaited = |v: &Value| {
            self.func.uses(*v).iter().any(|of| matches!(self.func.op(of.op).op, Op::WgmmaWait { pending: 0 }))
        };
        let region = self.func.op(id).regions[0];
        let deferred = |&id: &OpId| matches!(self.func.op(id).op, Op::WgmmaWait { pending: 1.. });
        self.func.block(region).ops.iter().any(deferred) && self.func.op(id).results.iter().any(awaited)
    }

    fn loop_of(&self, block: BlockId) -> Option<OpId> {
        let is = |&id: &OpId| matches!(self.func.op(id).op, Op::For { .. }) && self.func.op(id).regions[0] == block;
        self.func.walk().into_iter().find(is)
    }
}

impl Lowering<'_> {
    /// The words of the register operands of the `wgmma` that produce these results and of those that they accumulate
    /// onto.
    fn register_operands(&mut self, results: &[Value]) -> Vec<Val> {
        let mut held = Vec::new();
        let mut accumulators = results.to_vec();
        while let Some(v) = accumulators.pop() {
            let Some(id) = self.func.def_op(v) else { continue };
            let data = self.func.op(id);
            let Op::Wgmma { .. } = data.op else { continue };
            accumulators.push(data.operands[2]);
            if let Type::Tensor { .. } = self.func.ty(data.operands[0]) {
                let regs = self.regs(data.operands[0]);
                held.extend(self.words(&regs, self.dtype(data.operands[0])));
            }
        }
        held
    }
}
