//! Control flow. An execution context is a position in nested regions: a program has one for its body, and one for each
//! partition of a warp-specialized region.

use super::barriers::UsedByOthers;
use super::machine::{Fault, Machine, replicas_of_producer};
use super::value::{Barriers, Tile, Val};
use super::{InterpError, access};
use crate::ir::{AtomicOp, BlockId, DType, MemSem, Op, OpId};
use crate::num;

/// A position in nested regions.
pub(super) struct ExecContext {
    frames: Vec<Frame>,
}

/// A region in execution.
struct Frame {
    block: BlockId,
    at: usize,
    kind: FrameKind,
}

enum FrameKind {
    /// The body, a partition, or a branch of an `if`: its values are the results of the op.
    Once,
    Loop {
        index: i128,
        upper: i128,
        step: i128,
        ty: DType,
    },
    /// The regions of a `while`.
    Before,
    After,
}

/// Control state of a program: its body, and the partitions that its body has started.
pub(super) struct ControlState {
    body: ExecContext,
    partitions: Vec<Option<ExecContext>>,
}

/// Why a program stopped running.
pub(super) enum Stop {
    Ended,
    /// After an access to global memory, to let another program run.
    Switch,
}

/// Why an execution context stopped running.
enum Pause {
    End,
    Switch,
    /// At a wait for an incomplete phase.
    Blocked(OpId),
    /// At an op whose regions run concurrently.
    Partitions(OpId),
}

impl ExecContext {
    fn new(block: BlockId) -> ExecContext {
        ExecContext { frames: vec![Frame { block, at: 0, kind: FrameKind::Once }] }
    }

    fn push(&mut self, block: BlockId, kind: FrameKind) {
        self.frames.push(Frame { block, at: 0, kind });
    }
}

impl ControlState {
    pub fn new(body: BlockId) -> ControlState {
        ControlState { body: ExecContext::new(body), partitions: Vec::new() }
    }
}

impl Machine<'_> {
    /// Runs a program until it ends or yields to others.
    pub(super) fn resume(&mut self, flow: &mut ControlState) -> Result<Stop, InterpError> {
        loop {
            if !flow.partitions.is_empty() {
                match self.run_partitions(&mut flow.partitions)? {
                    Stop::Ended => flow.partitions.clear(),
                    Stop::Switch => return Ok(Stop::Switch),
                }
            }
            match self.advance(&mut flow.body)? {
                Pause::End => return Ok(Stop::Ended),
                Pause::Switch => return Ok(Stop::Switch),
                Pause::Blocked(id) => return Err(self.deadlock_error(&[id])),
                Pause::Partitions(id) => {
                    flow.partitions = self.func.op(id).regions.iter().map(|&r| Some(ExecContext::new(r))).collect();
                }
            }
        }
    }

    fn deadlock_error(&mut self, at: &[OpId]) -> InterpError {
        let states: Vec<String> = at
            .iter()
            .map(|&id| {
                let operands = self.operands(id);
                let index = if self.func.op(id).op == Op::PingpongWait { 2 } else { 1 };
                self.barriers.describe(operands[0].barriers(), operands[index].int())
            })
            .collect();
        self.error(at[0], format!("deadlock: {}", states.join("; ")))
    }

    /// Runs partitions round-robin, each until it ends, blocks or yields.
    fn run_partitions(&mut self, contexts: &mut [Option<ExecContext>]) -> Result<Stop, InterpError> {
        loop {
            let before = self.outcome.ops;
            let (mut blocked, mut switch) = (Vec::new(), false);
            for slot in contexts.iter_mut() {
                let Some(context) = slot else { continue };
                match self.advance(context)? {
                    Pause::End => *slot = None,
                    Pause::Switch => switch = true,
                    Pause::Blocked(at) => blocked.push(at),
                    Pause::Partitions(at) => return Err(self.error(at, "`warp_specialize` inside a partition".into())),
                }
            }
            // A producer may still load for the turns of other programs.
            let ended = |context: &Option<ExecContext>| context.is_none();
            if contexts.iter().all(ended) || self.takes_turns && contexts.first().is_some_and(ended) {
                return Ok(Stop::Ended);
            }
            if switch {
                return Ok(Stop::Switch);
            }
            if self.outcome.ops == before {
                return Err(self.deadlock_error(&blocked));
            }
        }
    }

    /// Runs a context until it ends, blocks or yields.
    fn advance(&mut self, context: &mut ExecContext) -> Result<Pause, InterpError> {
        loop {
            let Some(frame) = context.frames.last_mut() else { return Ok(Pause::End) };
            let id = self.func.block(frame.block).ops[frame.at];
            match &self.func.op(id).op {
                Op::Yield | Op::Condition | Op::Return => {
                    // So that an endless loop without other ops ends.
                    if self.func.op(id).op == Op::Condition {
                        self.count_op(id)?;
                    }
                    let values = self.operands(id);
                    self.end_region(context, values);
                    continue;
                }
                Op::MbarrierWait => {
                    if !self.wait(id)? {
                        return Ok(Pause::Blocked(id));
                    }
                    frame.at += 1;
                    continue;
                }
                Op::SemaphoreWait => {
                    let has_value = self.poll(id)?;
                    frame.at += usize::from(has_value);
                    if self.yields_after(id) || !has_value {
                        return Ok(Pause::Switch);
                    }
                    continue;
                }
                Op::PingpongWait => {
                    if !self.has_turn(id)? {
                        return Ok(Pause::Blocked(id));
                    }
                    frame.at += 1;
                    continue;
                }
                _ => {}
            }
            frame.at += 1;
            match &self.func.op(id).op {
                Op::WarpSpecialize { .. } => {
                    self.count_op(id)?;
                    return Ok(Pause::Partitions(id));
                }
                Op::For { .. } => self.start_loop(context, id)?,
                Op::If => {
                    self.count_op(id)?;
                    let side = if self.operands(id)[0].bits() != 0 { 0 } else { 1 };
                    context.push(self.func.op(id).regions[side], FrameKind::Once);
                }
                Op::While => {
                    self.count_op(id)?;
                    let block = self.func.op(id).regions[0];
                    let carried = self.operands(id);
                    self.set_params(block, carried);
                    context.push(block, FrameKind::Before);
                }
                _ => {
                    self.execute(id)?;
                    if self.yields_after(id) {
                        return Ok(Pause::Switch);
                    }
                }
            }
        }
    }

    fn start_loop(&mut self, context: &mut ExecContext, id: OpId) -> Result<(), InterpError> {
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
            context.push(block, FrameKind::Loop { index: lower, upper, step, ty });
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

    /// Leaves the innermost region, which has ended with these values.
    fn end_region(&mut self, context: &mut ExecContext, mut values: Vec<Val>) {
        let Some(mut frame) = context.frames.pop() else { return };
        let Some(outer) = context.frames.last() else { return };
        let owner = self.func.block(outer.block).ops[outer.at - 1];
        match &mut frame.kind {
            FrameKind::Once => self.set_results(owner, values),
            FrameKind::Loop { index, upper, step, ty } => {
                *index += *step;
                if *index < *upper {
                    self.set_index(frame.block, *ty, *index, values);
                    frame.at = 0;
                    context.frames.push(frame);
                } else {
                    self.set_results(owner, values);
                }
            }
            FrameKind::Before => {
                if values.remove(0).bits() == 0 {
                    return self.set_results(owner, values);
                }
                let after = self.func.op(owner).regions[1];
                self.set_params(after, values);
                context.push(after, FrameKind::After);
            }
            FrameKind::After => {
                let before = self.func.op(owner).regions[0];
                self.set_params(before, values);
                context.push(before, FrameKind::Before);
            }
        }
    }

    fn wait(&mut self, id: OpId) -> Result<bool, InterpError> {
        let operands = self.operands(id);
        let off = operands.get(3).is_some_and(|switch| switch.bits() == 0);
        let passed = off || {
            let (group, index, parity) = (operands[0].barriers(), operands[1].int(), operands[2].int());
            self.is_released_by_others(id, group, index)
                || self.barriers.wait(group, index, parity, &mut self.shared).map_err(|e| self.error(id, e))?
        };
        if passed {
            self.count_op(id)?;
        }
        Ok(passed)
    }

    /// Reads a semaphore; returns whether it has the value that the op waits for.
    fn poll(&mut self, id: OpId) -> Result<bool, InterpError> {
        self.count_op(id)?;
        let operands = self.operands(id);
        let (counter, value) = (operands[0].tile(), operands[1].tile());
        let zero = Tile::scalar(DType::I32, 0);
        let found = access::atomic_rmw(self.memory, AtomicOp::Add, counter, &zero, None, MemSem::Acquire);
        Ok(found.map_err(|message| self.error(id, message))?.bits == value.bits)
    }

    /// Whether a producer waits for the release of a buffer of another program of its block, which is not interpreted.
    fn is_released_by_others(&self, id: OpId, group: &Barriers, index: i128) -> bool {
        let replicas = replicas_of_producer(self.func, id).filter(|_| !self.takes_turns);
        let Some((count, warps)) = replicas else { return false };
        // Warps of one program arrive, each once or by each thread; all warps of the block release shared buffers.
        let arrivals = self.barriers.arrivals(group);
        let of_one = group.count == count as usize && [warps, 32 * warps].contains(&arrivals);
        of_one && index != i128::from(self.program[0] % count)
    }

    /// Whether the turns of other programs before that of this one have ended.
    fn has_turn(&mut self, id: OpId) -> Result<bool, InterpError> {
        let operands = self.operands(id);
        let ring = |five: &[Val]| UsedByOthers {
            full: five[0].barriers().clone(),
            empty: five[1].barriers().clone(),
            slot: five[2].int(),
            parity: five[3].int(),
            count: five[4].int(),
        };
        let rings: Vec<UsedByOthers> = operands.chunks_exact(5).map(ring).collect();
        let used = self.barriers.use_for_others(id, &rings, &mut self.shared);
        let (used, done) = used.map_err(|e| self.error(id, e))?;
        for _ in 0..used + u64::from(done) {
            self.count_op(id)?;
        }
        Ok(done)
    }

    fn count_op(&mut self, id: OpId) -> Result<(), InterpError> {
        self.count().map_err(|fault| self.with_op(id, fault))
    }

    fn execute(&mut self, id: OpId) -> Result<(), InterpError> {
        let results = self.op(id).map_err(|fault| self.with_op(id, fault))?;
        self.set_results(id, results);
        Ok(())
    }

    fn with_op(&self, id: OpId, fault: Fault) -> InterpError {
        match fault {
            Fault::Here(message) => self.error(id, message),
            Fault::Inside(error) => error,
        }
    }
}
