//! What the compiler did to a kernel, as data for pages and pictures.
//!
//! [`Trace`] observes a compilation for a GPU and keeps the function after every pass; [`Trace::last`] is the function
//! that is lowered. [`layouts`] and [`loops`] describe that function, as do
//! [`registers::profile`](crate::analysis::registers::profile) and
//! [`shared_memory`](crate::lower::nvptx::shared_memory). [`timeline`] predicts when the ops of a loop run,
//! [`dots`] names their matrix instructions.

pub mod dots;
pub mod timeline;

use crate::analysis::pipes::{Pipe, pipe};
use crate::ir::{BlockId, DType, Func, LayoutId, Loc, Op, OpId, Stage, Type, Value};
use crate::pipeline::Observer;
use crate::schedule::stages::main_stage;
use crate::text;
use std::collections::{HashMap, VecDeque};

/// A line of a function's text ([`text::lines`]).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrLine {
    /// Levels of indentation.
    pub depth: usize,
    pub text: String,
    /// The op of this line; `None` for layouts, the head of the function and closing braces.
    pub op: Option<IrOp>,
}

/// An op after a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrOp {
    pub op: OpId,
    /// The same number after every pass that keeps the op, even if the pass rebuilds the function.
    pub number: u32,
    pub loc: Loc,
}

/// The function after a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub pass: &'static str,
    pub stage: Stage,
    pub lines: Vec<IrLine>,
}

/// Records a compilation. Values have the same name after every pass that keeps the op that defines them.
pub struct Trace {
    snapshots: Vec<Snapshot>,
    last: Func,
    numbers: Numbers,
    notes: Vec<String>,
    /// The schedule, by the number of an op, and of loads that run ahead also by their location.
    schedule: HashMap<u32, Scheduled>,
    scheduled_loads: HashMap<Loc, Scheduled>,
}

impl Trace {
    /// Name of the first snapshot: the function as the kernel's code recorded it.
    pub const RECORDED: &'static str = "recorded";

    /// A trace of a compilation of this function.
    pub fn new(func: &Func) -> Trace {
        let mut numbers = Numbers::default();
        numbers.extend(func);
        let first = snapshot(Trace::RECORDED, Stage::Tile, func, &numbers);
        Trace {
            snapshots: vec![first],
            last: func.clone(),
            numbers,
            notes: Vec::new(),
            schedule: HashMap::new(),
            scheduled_loads: HashMap::new(),
        }
    }

    /// The function as recorded and after each pass, in order.
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }

    /// The function after the last pass.
    pub fn last(&self) -> &Func {
        &self.last
    }

    /// Where the compiler does not follow an option or a hint.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// What the schedule says about ops of the last function. A copy runs as the load that it was.
    pub fn schedule(&self) -> HashMap<OpId, Scheduled> {
        let of = |id: OpId| {
            let by_number = || self.schedule.get(&self.numbers.ops[id.0 as usize]);
            let data = self.last.op(id);
            let is_copy = matches!(data.op, Op::AsyncCopy { .. } | Op::AsyncLoad { .. } | Op::TmaLoad { .. });
            let by_loc = || self.scheduled_loads.get(&data.loc).filter(|_| is_copy);
            Some((id, *by_number().or_else(by_loc)?))
        };
        self.last.walk().into_iter().filter_map(of).collect()
    }

    /// Keeps the schedule that a pass chose.
    fn keep_schedule(&mut self, func: &Func) {
        for id in func.walk() {
            let (Some(place), Some(block)) = (func.op(id).place, func.block_of(id)) else { continue };
            let Some(main) = main_stage(func, block) else { continue };
            let (stage, order) = (place.stage, place.order);
            let scheduled = Scheduled { stage, order, ahead: i64::from(main) - i64::from(stage) };
            self.schedule.insert(self.numbers.ops[id.0 as usize], scheduled);
            if place.depth.is_some() {
                self.scheduled_loads.insert(func.op(id).loc.clone(), scheduled);
            }
        }
    }
}

/// What a schedule says about an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Scheduled {
    /// As in [`Placement`](crate::ir::Placement).
    pub stage: u32,
    pub order: u32,
    /// By how many iterations the op runs ahead of its loop; negative for ops behind.
    pub ahead: i64,
}

impl Observer for Trace {
    fn after(&mut self, pass: &'static str, stage: Stage, func: &Func) {
        if is_rebuilt(&self.last, func) {
            self.numbers = self.numbers.of_rebuilt(&self.last, func);
        }
        self.numbers.extend(func);
        if stage == Stage::Schedule {
            self.keep_schedule(func);
        }
        self.snapshots.push(snapshot(pass, stage, func, &self.numbers));
        self.last = func.clone();
    }

    fn llvm_ir(&mut self, _: &str) {}

    fn note(&mut self, note: &str) {
        self.notes.push(note.to_string());
    }
}

/// Whether a pass built a new function. Most passes edit the old one, where an op keeps its index and its location.
fn is_rebuilt(old: &Func, new: &Func) -> bool {
    let loc = |func: &Func, index: usize| func.op(OpId(index as u32)).loc.clone();
    new.num_ops() < old.num_ops() || (0..old.num_ops()).any(|index| loc(old, index) != loc(new, index))
}

/// Numbers of the ops and values of a function, by index. The next ones are larger than all numbers so far.
#[derive(Clone, Default)]
struct Numbers {
    ops: Vec<u32>,
    values: Vec<u32>,
    next_op: u32,
    next_value: u32,
}

impl Numbers {
    /// Numbers the ops and values that have no number yet.
    fn extend(&mut self, func: &Func) {
        let Numbers { ops, values, next_op, next_value } = self;
        ops.resize_with(func.num_ops(), || next(next_op));
        values.resize_with(func.num_values(), || next(next_value));
    }

    /// Numbers of a function that a pass built from `old`, whose ops these numbers are for. The first op of a mnemonic
    /// and location keeps the numbers of the first such op, and of its values; so does the second, and so on.
    fn of_rebuilt(&self, old: &Func, new: &Func) -> Numbers {
        let mut numbers = Numbers { next_op: self.next_op, next_value: self.next_value, ..Numbers::default() };
        numbers.extend(new);
        let key = |func: &Func, id: OpId| (func.op(id).op.mnemonic(), func.op(id).loc.clone());
        let mut before: HashMap<_, VecDeque<OpId>> = HashMap::new();
        for id in old.walk() {
            before.entry(key(old, id)).or_default().push_back(id);
        }
        let keep = |values: &mut Vec<u32>, from: &[Value], to: &[Value]| {
            for (from, to) in from.iter().zip(to) {
                values[to.0 as usize] = self.values[from.0 as usize];
            }
        };
        for id in new.walk() {
            let Some(same) = before.get_mut(&key(new, id)).and_then(VecDeque::pop_front) else { continue };
            let (from, to) = (old.op(same), new.op(id));
            numbers.ops[id.0 as usize] = self.ops[same.0 as usize];
            keep(&mut numbers.values, &from.results, &to.results);
            for (from, to) in from.regions.iter().zip(&to.regions) {
                keep(&mut numbers.values, &old.block(*from).params, &new.block(*to).params);
            }
        }
        numbers
    }
}

fn next(number: &mut u32) -> u32 {
    *number += 1;
    *number - 1
}

fn snapshot(pass: &'static str, stage: Stage, func: &Func, numbers: &Numbers) -> Snapshot {
    let op = |id: OpId| IrOp { op: id, number: numbers.ops[id.0 as usize], loc: func.op(id).loc.clone() };
    let line = |line: text::Line| IrLine { depth: line.depth, text: line.text, op: line.op.map(op) };
    let lines = text::lines(func, &|v| numbers.values[v.0 as usize].to_string());
    Snapshot { pass, stage, lines: lines.into_iter().map(line).collect() }
}

/// A layout, and the values of one element type that have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutUse {
    pub layout: LayoutId,
    /// The element type of a shared buffer; `None` for layouts of registers, where the type does not matter.
    pub elem: Option<DType>,
    /// The ops that define values of this layout, in the order of the text. Values that a region begins with count for
    /// the op of the region.
    pub ops: Vec<OpId>,
}

/// The layouts of a function, in the order of their first use.
pub fn layouts(func: &Func) -> Vec<LayoutUse> {
    let mut uses: Vec<LayoutUse> = Vec::new();
    for id in func.walk() {
        let data = func.op(id);
        let params = data.regions.iter().flat_map(|&region| &func.block(region).params);
        for &v in data.results.iter().chain(params) {
            let (layout, elem) = match *func.ty(v) {
                Type::Tensor { layout: Some(layout), .. } => (layout, None),
                Type::Shared { layout, elem, .. } => (layout, Some(elem)),
                Type::Tensor { layout: None, .. } | Type::Scalar(_) | Type::View { .. } | Type::Barrier { .. } => {
                    continue;
                }
            };
            match uses.iter_mut().find(|known| (known.layout, known.elem) == (layout, elem)) {
                Some(known) if known.ops.last() == Some(&id) => {}
                Some(known) => known.ops.push(id),
                None => uses.push(LayoutUse { layout, elem, ops: vec![id] }),
            }
        }
    }
    uses
}

/// Warps that run the same code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Partition {
    /// All warps: the kernel, or this part of it, is not warp-specialized.
    All,
    Consumer,
    Producer,
}

impl Partition {
    pub fn name(self) -> &'static str {
        match self {
            Partition::All => "all warps",
            Partition::Consumer => "consumer",
            Partition::Producer => "producer",
        }
    }
}

/// An op of a loop's body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoopOp {
    pub op: OpId,
    pub mnemonic: &'static str,
    /// The pipe that executes most of the op; `None` for ops without instructions of their own.
    pub pipe: Option<Pipe>,
    /// Regions between the loop and the op, as of an `if` in the loop.
    pub depth: usize,
}

/// A loop, and its ops in order without those of inner loops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Loop {
    pub op: OpId,
    pub partition: Partition,
    pub ops: Vec<LoopOp>,
}

/// The loops of a function in the order of the text; an inner loop follows the one that contains it.
pub fn loops(func: &Func) -> Vec<Loop> {
    let mut found = Vec::new();
    find_loops(func, func.body, Partition::All, &mut found);
    found
}

fn find_loops(func: &Func, block: BlockId, partition: Partition, found: &mut Vec<Loop>) {
    for &id in &func.block(block).ops {
        let data = func.op(id);
        if data.op.is_loop() {
            let mut ops = Vec::new();
            data.regions.iter().for_each(|&region| loop_ops(func, region, 0, &mut ops));
            found.push(Loop { op: id, partition, ops });
        }
        for (i, &region) in data.regions.iter().enumerate() {
            find_loops(func, region, of_region(&data.op, i, partition), found);
        }
    }
}

fn loop_ops(func: &Func, block: BlockId, depth: usize, ops: &mut Vec<LoopOp>) {
    for &id in &func.block(block).ops {
        let data = func.op(id);
        ops.push(LoopOp { op: id, mnemonic: data.op.mnemonic(), pipe: pipe(func, id), depth });
        if matches!(data.op, Op::If) {
            data.regions.iter().for_each(|&region| loop_ops(func, region, depth + 1, ops));
        }
    }
}

/// The partition of region `index` of an op in `partition`.
fn of_region(op: &Op, index: usize, partition: Partition) -> Partition {
    match (op, index) {
        (Op::WarpSpecialize { .. }, 0) => Partition::Consumer,
        (Op::WarpSpecialize { .. }, _) => Partition::Producer,
        _ => partition,
    }
}

/// The partition that runs each op, in the order of [`Func::walk`].
pub fn partitions(func: &Func) -> Vec<(OpId, Partition)> {
    fn walk(func: &Func, block: BlockId, partition: Partition, found: &mut Vec<(OpId, Partition)>) {
        for &id in &func.block(block).ops {
            found.push((id, partition));
            let data = func.op(id);
            for (i, &region) in data.regions.iter().enumerate() {
                walk(func, region, of_region(&data.op, i, partition), found);
            }
        }
    }
    let mut found = Vec::new();
    walk(func, func.body, Partition::All, &mut found);
    found
}

#[cfg(test)]
mod tests;
