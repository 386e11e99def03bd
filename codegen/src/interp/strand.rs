//! Lines of execution: a program is one, the roles of a block are two that take turns.

use super::InterpError;
use super::machine::{Fault, Machine};
use super::value::{Tile, Val};
use crate::ir::{BlockId, DType, Op, OpId};
use crate::num;

/// A place in nested regions.
pub(super) struct Strand {
    frames: Vec<Frame>,
}

/// A region that is being run.
struct Frame {
    block: BlockId,
    at: usize,
    kind: Kind,
}

enum Kind {
    /// The whole strand, or a side of an `if`: its values are the op's results.
    Once,
    Loop {
        index: i128,
        upper: i128,
        step: i128,
        ty: DType,
    },
    /// The two regions of a `while`.
    Before,
    After,
}

/// Where a program is: in its body, or in the roles that its body has come to.
pub(super) struct Flow {
    body: Strand,
    roles: Vec<Option<Strand>>,
}

/// Why a program stands still.
pub(super) enum Stop {
    Ended,
    /// Behind an access of global memory: another program may go on.
    Switch,
}

/// Why a strand stands still.
enum Pause {
    End,
    Switch,
    /// At a wait for a phase that is not complete.
    Blocked(OpId),
    /// At an op whose regions run side by side.
    Roles(OpId),
}

impl Strand {
    fn new(block: BlockId) -> Strand {
        Strand { frames: vec![Frame { block, at: 0, kind: Kind::Once }] }
    }

    fn push(&mut self, block: BlockId, kind: Kind) {
        self.frames.push(Frame { block, at: 0, kind });
    }
}

impl Flow {
    pub fn new(body: BlockId) -> Flow {
        Flow { body: Strand::new(body), roles: Vec::new() }
    }
}

impl Machine<'_> {
    /// Runs a program until it ends or lets others go on.
    pub(super) fn resume(&mut self, flow: &mut Flow) -> Result<Stop, InterpError> {
        loop {
            if !flow.roles.is_empty() {
                match self.take_turns(&mut flow.roles)? {
                    Stop::Ended => flow.roles.clear(),
                    Stop::Switch => return Ok(Stop::Switch),
                }
            }
            match self.advance(&mut flow.body)? {
                Pause::End => return Ok(Stop::Ended),
                Pause::Switch => return Ok(Stop::Switch),
                Pause::Blocked(id) => return Err(self.stuck(&[id])),
                Pause::Roles(id) => {
                    flow.roles = self.func.op(id).regions.iter().map(|&r| Some(Strand::new(r))).collect();
                }
            }
        }
    }

    fn stuck(&mut self, at: &[OpId]) -> InterpError {
        let states: Vec<String> = at
            .iter()
            .map(|&id| {
                let operands = self.operands(id);
                self.barriers.describe(operands[0].barriers(), operands[1].int())
            })
            .collect();
        self.error(at[0], format!("waits for ever: {}", states.join("; ")))
    }

    /// Runs the regions of a `roles` in turns, each as far as it comes.
    fn take_turns(&mut self, strands: &mut [Option<Strand>]) -> Result<Stop, InterpError> {
        loop {
            let before = self.outcome.ops;
            let (mut blocked, mut switch) = (Vec::new(), false);
            for slot in strands.iter_mut() {
                let Some(strand) = slot else { continue };
                match self.advance(strand)? {
                    Pause::End => *slot = None,
                    Pause::Switch => switch = true,
                    Pause::Blocked(at) => blocked.push(at),
                    Pause::Roles(at) => return Err(self.error(at, "roles inside a role".into())),
                }
            }
            if strands.iter().all(Option::is_none) {
                return Ok(Stop::Ended);
            }
            if switch {
                return Ok(Stop::Switch);
            }
            if self.outcome.ops == before {
                return Err(self.stuck(&blocked));
            }
        }
    }

    /// Runs until the strand ends or cannot go on.
    fn advance(&mut self, strand: &mut Strand) -> Result<Pause, InterpError> {
        loop {
            let Some(frame) = strand.frames.last_mut() else { return Ok(Pause::End) };
            let id = self.func.block(frame.block).ops[frame.at];
            match &self.func.op(id).op {
                Op::Yield | Op::Condition | Op::Return => {
                    let values = self.operands(id);
                    self.end_region(strand, values);
                    continue;
                }
                Op::MbarrierWait => {
                    if !self.wait(id)? {
                        return Ok(Pause::Blocked(id));
                    }
                    frame.at += 1;
                    continue;
                }
                _ => {}
            }
            frame.at += 1;
            match &self.func.op(id).op {
                Op::Roles { .. } => {
                    self.count_op(id)?;
                    return Ok(Pause::Roles(id));
                }
                Op::For { .. } => self.start_loop(strand, id)?,
                Op::If => {
                    self.count_op(id)?;
                    let side = if self.operands(id)[0].bits() != 0 { 0 } else { 1 };
                    strand.push(self.func.op(id).regions[side], Kind::Once);
                }
                Op::While => {
                    self.count_op(id)?;
                    let block = self.func.op(id).regions[0];
                    let carried = self.operands(id);
                    self.set_params(block, carried);
                    strand.push(block, Kind::Before);
                }
                _ => {
                    self.execute(id)?;
                    if self.lets_others_go_on(id) {
                        return Ok(Pause::Switch);
                    }
                }
            }
        }
    }

    fn start_loop(&mut self, strand: &mut Strand, id: OpId) -> Result<(), InterpError> {
        self.count_op(id)?;
        let mut operands = self.operands(id);
        let carried = operands.split_off(3);
        let [lower, upper, step] = [0, 1, 2].map(|i| operands[i].int());
        if step <= 0 {
            return Err(self.error(id, format!("the step of a loop should be positive, found {step}")));
        }
        let (ty, block) = (operands[0].tile().dtype(), self.func.op(id).regions[0]);
        if lower < upper {
            self.set_index(block, ty, lower, carried);
            strand.push(block, Kind::Loop { index: lower, upper, step, ty });
        } else {
            self.set_results(id, carried);
        }
        Ok(())
    }

    fn set_index(&mut self, block: BlockId, ty: DType, index: i128, carried: Vec<Val>) {
        let mut params = vec![Tile::scalar(ty, num::encode_int(ty, index)).into()];
        params.extend(carried);
        self.set_params(block, params);
    }

    /// The innermost region has come to its end with these values.
    fn end_region(&mut self, strand: &mut Strand, mut values: Vec<Val>) {
        let Some(mut frame) = strand.frames.pop() else { return };
        let Some(outer) = strand.frames.last() else { return };
        let owner = self.func.block(outer.block).ops[outer.at - 1];
        match &mut frame.kind {
            Kind::Once => self.set_results(owner, values),
            Kind::Loop { index, upper, step, ty } => {
                *index += *step;
                if *index < *upper {
                    self.set_index(frame.block, *ty, *index, values);
                    frame.at = 0;
                    strand.frames.push(frame);
                } else {
                    self.set_results(owner, values);
                }
            }
            Kind::Before => {
                if values.remove(0).bits() == 0 {
                    return self.set_results(owner, values);
                }
                let after = self.func.op(owner).regions[1];
                self.set_params(after, values);
                strand.push(after, Kind::After);
            }
            Kind::After => {
                let before = self.func.op(owner).regions[0];
                self.set_params(before, values);
                strand.push(before, Kind::Before);
            }
        }
    }

    fn wait(&mut self, id: OpId) -> Result<bool, InterpError> {
        let operands = self.operands(id);
        let off = operands.get(3).is_some_and(|switch| switch.bits() == 0);
        let passed = off || {
            let (group, index, parity) = (operands[0].barriers(), operands[1].int(), operands[2].int());
            self.barriers.wait(group, index, parity, &mut self.shared).map_err(|e| self.error(id, e))?
        };
        if passed {
            self.count_op(id)?;
        }
        Ok(passed)
    }

    fn count_op(&mut self, id: OpId) -> Result<(), InterpError> {
        self.count().map_err(|fault| self.name(id, fault))
    }

    fn execute(&mut self, id: OpId) -> Result<(), InterpError> {
        let results = self.op(id).map_err(|fault| self.name(id, fault))?;
        self.set_results(id, results);
        Ok(())
    }

    fn name(&self, id: OpId, fault: Fault) -> InterpError {
        match fault {
            Fault::Here(message) => self.error(id, message),
            Fault::Inside(error) => error,
        }
    }
}
