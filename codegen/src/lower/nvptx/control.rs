//! Loops and branches: a tile that crosses them becomes one phi per register, and of bytes one per four registers: LLVM
//! would combine single bytes to words in pairs of its own.

use super::{Lowering, Result, llvm_type};
use crate::ir::{Op, OpId, Value};
use std::rc::Rc;

use super::emit::{OpenPhi, Val};

/// Bytes of a word.
const BYTES: usize = 4;

/// A value that crosses the boundary of a block, in registers of this type.
struct Crossing {
    regs: Vec<Val>,
    ty: &'static str,
    is_packed: bool,
}

/// A parameter of a block with its phis, which are open.
struct Carried {
    param: Value,
    regs: Vec<Val>,
    phis: Vec<OpenPhi>,
    is_packed: bool,
}

impl Lowering<'_> {
    fn terminator(&self, block: crate::ir::BlockId) -> &[Value] {
        match self.func.block(block).ops.last() {
            Some(&id) => &self.func.op(id).operands,
            None => &[],
        }
    }

    /// The registers of values as they cross the boundary of a block: bytes in words of four.
    fn crossing(&mut self, values: &[Value]) -> Vec<Crossing> {
        let crossing = |&v: &Value| {
            let (regs, ty) = (self.regs(v), self.func.ty(v).elem().map_or("i32", llvm_type));
            let is_packed = ty == "i8" && regs.len().is_multiple_of(BYTES);
            let words = |this: &mut Self| regs.chunks(BYTES).map(|four| this.pack_elements(four, ty, "i32")).collect();
            let regs = if is_packed { words(self) } else { regs.to_vec() };
            Crossing { regs, ty: if is_packed { "i32" } else { ty }, is_packed }
        };
        values.iter().map(crossing).collect()
    }

    /// Gives a value the registers that crossed the boundary.
    fn set_crossed(&mut self, v: Value, regs: Vec<Val>, is_packed: bool) {
        let bytes =
            |this: &mut Self| regs.iter().flat_map(|word| this.unpack_elements(word, "i32", "i8", BYTES)).collect();
        let regs = if is_packed { bytes(self) } else { regs };
        self.values[v.0 as usize] = Some(Rc::new(regs));
    }

    /// Opens the phis of the parameters of a block, from their first values.
    fn open(&mut self, params: &[Value], init: Vec<Crossing>, from: &str) -> Vec<Carried> {
        let open = |(&param, Crossing { regs, ty, is_packed }): (&Value, Crossing)| {
            let (regs, phis) = regs.iter().map(|first| self.e.open_phi(ty, first, from)).unzip();
            Carried { param, regs, phis, is_packed }
        };
        params.iter().zip(init).map(open).collect()
    }

    /// Gives the parameters their registers, after all phis of the block. Returns the phis.
    fn enter(&mut self, carried: Vec<Carried>) -> Vec<Vec<OpenPhi>> {
        let enter = |Carried { param, regs, phis, is_packed }: Carried| {
            self.set_crossed(param, regs, is_packed);
            phis
        };
        carried.into_iter().map(enter).collect()
    }

    fn close(&mut self, phis: Vec<Vec<OpenPhi>>, values: &[Value]) {
        let values = self.crossing(values);
        let from = self.e.label();
        for (phi, reg) in phis.into_iter().flatten().zip(values.iter().flat_map(|value| &value.regs)) {
            self.e.close_phi(phi, reg, &from);
        }
    }

    pub(super) fn for_loop(&mut self, id: OpId) -> Result<()> {
        let func = self.func;
        let data = func.op(id);
        let Op::For { unroll, .. } = &data.op else { panic!("internal compiler error: not a loop") };
        let region = data.regions[0];
        let params = &func.block(region).params;
        let index_ty = self.ty(params[0]);
        let signed = self.dtype(params[0]).is_signed_int();
        let [lower, upper, step] = [0, 1, 2].map(|i| self.scalar(data.operands[i]));
        let (head, body, exit) = (self.e.new_label("head"), self.e.new_label("body"), self.e.new_label("exit"));
        let init = self.crossing(&data.operands[3..]);
        let before = self.e.label();
        self.e.branch(&head);
        self.e.start_block(&head);
        let (index, index_phi) = self.e.open_phi(index_ty, &lower, &before);
        self.values[params[0].0 as usize] = Some(Rc::new(vec![index.clone()]));
        let carried = self.open(&params[1..], init, &before);
        let first = self.leaves_wgmma_in_flight(id).then(|| self.e.open_phi("i1", "true", &before));
        let phis = self.enter(carried);
        let less = if signed { "slt" } else { "ult" };
        let more = self.e.inst(format!("icmp {less} {index_ty} {index}, {upper}"));
        self.e.branch_if(&more, &body, &exit);
        self.e.start_block(&body);
        self.block(region)?;
        let next = self.e.inst(format!("add {} {index_ty} {index}, {step}", if signed { "nsw" } else { "nuw" }));
        let end = self.e.label();
        self.e.close_phi(index_phi, &next, &end);
        let yields = self.terminator(region).to_vec();
        self.close(phis, &yields);
        let not_entered = first.map(|(first, phi)| {
            self.e.close_phi(phi, "false", &end);
            first
        });
        let has_tiles = params[1..].iter().any(|&p| func.ty(p).is_tensor());
        let hint = match unroll {
            Some(n) if *n > 1 => Some(format!("!\"llvm.loop.unroll.count\", i32 {n}")),
            // Loop bodies with tiles are long already: unrolling them costs registers.
            Some(_) => Some("!\"llvm.loop.unroll.disable\"".to_string()),
            None if has_tiles => Some("!\"llvm.loop.unroll.disable\"".to_string()),
            None => None,
        };
        match hint {
            Some(hint) => {
                let hint = self.e.metadata(|_| format!("!{{{hint}}}"));
                let node = self.e.metadata(|n| format!("distinct !{{!{n}, !{hint}}}"));
                self.e.void(format!("br label %{head}, !llvm.loop !{node}"));
            }
            None => self.e.branch(&head),
        }
        self.e.start_block(&exit);
        if let Some(not_entered) = not_entered {
            self.wait_where_entered(&not_entered);
        }
        // The head dominates the exit: its phis are the results.
        for (&result, &param) in data.results.iter().zip(&params[1..]) {
            let regs = self.regs(param);
            self.values[result.0 as usize] = Some(regs);
        }
        Ok(())
    }

    /// Waits for all `wgmma`, unless the loop before it had no iteration.
    ///
    /// The accumulators of a loop without iterations are other registers. Where both come together, ptxas sees `wgmma` in
    /// flight whose accumulators other instructions define, and serializes all of them (C7515).
    fn wait_where_entered(&mut self, not_entered: &str) {
        let (entered, done) = (self.e.new_label("entered"), self.e.new_label("done"));
        self.e.branch_if(not_entered, &done, &entered);
        self.e.start_block(&entered);
        self.e.void("call void asm sideeffect \"wgmma.wait_group.sync.aligned 0;\", \"~{memory}\"() #1");
        self.e.branch(&done);
        self.e.start_block(&done);
    }

    pub(super) fn while_loop(&mut self, id: OpId) -> Result<()> {
        let func = self.func;
        let data = func.op(id);
        let (before, after) = (data.regions[0], data.regions[1]);
        let (head, body, exit) = (self.e.new_label("head"), self.e.new_label("body"), self.e.new_label("exit"));
        let init = self.crossing(&data.operands);
        let entered_from = self.e.label();
        self.e.branch(&head);
        self.e.start_block(&head);
        let carried = self.open(&func.block(before).params, init, &entered_from);
        let phis = self.enter(carried);
        self.block(before)?;
        let condition = self.terminator(before).to_vec();
        let go_on = self.scalar(condition[0]);
        self.e.branch_if(&go_on, &body, &exit);
        for (i, &v) in condition[1..].iter().enumerate() {
            let regs = self.regs(v);
            self.values[func.block(after).params[i].0 as usize] = Some(regs.clone());
            self.values[data.results[i].0 as usize] = Some(regs);
        }
        self.e.start_block(&body);
        self.block(after)?;
        let yields = self.terminator(after).to_vec();
        self.close(phis, &yields);
        self.e.branch(&head);
        self.e.start_block(&exit);
        Ok(())
    }

    pub(super) fn if_op(&mut self, id: OpId) -> Result<()> {
        let func = self.func;
        let data = func.op(id);
        let condition = self.scalar(data.operands[0]);
        let labels = [self.e.new_label("then"), self.e.new_label("else")];
        let join = self.e.new_label("join");
        self.e.branch_if(&condition, &labels[0], &labels[1]);
        let mut arms: Vec<(String, Vec<Crossing>)> = Vec::new();
        for (label, &region) in labels.iter().zip(&data.regions) {
            self.e.start_block(label);
            self.block(region)?;
            let yields = self.terminator(region).to_vec();
            let yields = self.crossing(&yields);
            arms.push((self.e.label(), yields));
            self.e.branch(&join);
        }
        self.e.start_block(&join);
        let mut joined = Vec::new();
        for (i, &result) in data.results.iter().enumerate() {
            let Crossing { regs, ty, is_packed } = &arms[0].1[i];
            let phi = |r: usize| {
                let edge = |(from, values): &(String, Vec<Crossing>)| format!("[ {}, %{from} ]", values[i].regs[r]);
                let edges: Vec<String> = arms.iter().map(edge).collect();
                self.e.inst(format!("phi {ty} {}", edges.join(", ")))
            };
            joined.push((result, (0..regs.len()).map(phi).collect::<Vec<Val>>(), *is_packed));
        }
        for (result, regs, is_packed) in joined {
            self.set_crossed(result, regs, is_packed);
        }
        Ok(())
    }
}
