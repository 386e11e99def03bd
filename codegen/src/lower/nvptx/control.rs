//! Loops and branches: a tile that crosses them becomes one phi per register.

use super::{Lowering, Result, llvm_type};
use crate::ir::{Op, OpId, Value};
use std::rc::Rc;

use super::emit::{OpenPhi, Val};

impl Lowering<'_> {
    fn terminator(&self, block: crate::ir::BlockId) -> &[Value] {
        match self.func.block(block).ops.last() {
            Some(&id) => &self.func.op(id).operands,
            None => &[],
        }
    }

    /// Opens one phi per register of `init` for the value `v`.
    fn carry(&mut self, v: Value, init: &[Val], from: &str, phis: &mut Vec<Vec<OpenPhi>>) {
        let ty = self.func.ty(v).elem().map_or("i32", llvm_type);
        let mut regs = Vec::new();
        let mut open = Vec::new();
        for value in init {
            let (reg, phi) = self.e.open_phi(ty, value, from);
            regs.push(reg);
            open.push(phi);
        }
        self.values[v.0 as usize] = Some(Rc::new(regs));
        phis.push(open);
    }

    fn close(&mut self, phis: Vec<Vec<OpenPhi>>, values: &[Value]) {
        let from = self.e.label();
        for (open, &v) in phis.into_iter().zip(values) {
            let regs = self.regs(v);
            for (phi, reg) in open.into_iter().zip(regs.iter()) {
                self.e.close_phi(phi, reg, &from);
            }
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
        let before = self.e.label();
        self.e.branch(&head);
        self.e.start_block(&head);
        let (index, index_phi) = self.e.open_phi(index_ty, &lower, &before);
        self.values[params[0].0 as usize] = Some(Rc::new(vec![index.clone()]));
        let mut phis = Vec::new();
        for (&param, &init) in params[1..].iter().zip(&data.operands[3..]) {
            let init = self.regs(init);
            self.carry(param, &init, &before, &mut phis);
        }
        let first = self.leaves_wgmma_in_flight(id).then(|| self.e.open_phi("i1", "true", &before));
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
        let entered_from = self.e.label();
        self.e.branch(&head);
        self.e.start_block(&head);
        let mut phis = Vec::new();
        for (&param, &init) in func.block(before).params.iter().zip(&data.operands) {
            let init = self.regs(init);
            self.carry(param, &init, &entered_from, &mut phis);
        }
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
        let mut arms: Vec<(String, Vec<super::Regs>)> = Vec::new();
        for (label, &region) in labels.iter().zip(&data.regions) {
            self.e.start_block(label);
            self.block(region)?;
            let yields = self.terminator(region).to_vec();
            arms.push((self.e.label(), yields.iter().map(|&v| self.regs(v)).collect()));
            self.e.branch(&join);
        }
        self.e.start_block(&join);
        for (i, &result) in data.results.iter().enumerate() {
            let ty = self.ty(result);
            let regs = (0..arms[0].1[i].len())
                .map(|r| {
                    let edges: Vec<String> =
                        arms.iter().map(|(from, values)| format!("[ {}, %{from} ]", values[i][r])).collect();
                    self.e.inst(format!("phi {ty} {}", edges.join(", ")))
                })
                .collect();
            self.values[result.0 as usize] = Some(Rc::new(regs));
        }
        Ok(())
    }
}
