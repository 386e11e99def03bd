//! Bounds analysis: the access footprint of a kernel, as formulas of its arguments and grid.
//!
//! The formulas are built once per recorded kernel ([`crate::pipeline::footprint`]) and evaluated before each launch
//! ([`Footprint::check`]). They make launches from safe code memory-safe: a launch whose extents, strides or masks do
//! not keep the kernel inside its buffers is rejected.
//!
//! The analysis is interval arithmetic on integers. At launch, arguments and grid are known numbers; `program_id`,
//! `arange` and loop indices have known ranges. The elements that an access may touch are an interval:
//!
//! - Through a view: the intersection of block and shape in dimensions of `boundary_check`, the block in other
//!   dimensions.
//! - Through pointers: the offsets, limited by the mask. Its comparisons (joined by `&&`) bound the values that they
//!   compare, as do the conditions of enclosing branches.
//!
//! Arithmetic wraps as in the generated code: two's complement, in the type of the op. Other preconditions of the
//! generated code (non-negative extents, `assume`, hints) are checked too (`preconditions.rs`).
//!
//! If intervals are too coarse, addresses are also analyzed as affine sums, which the mask may bound as a whole
//! (`affine.rs`).
//!
//! The analysis is sound: values that it does not follow (e.g. numbers loaded from memory) may be any value of their
//! type. It is not complete: relations between values are known only for affine sums, so it may reject accesses that
//! are always in bounds.

mod affine;
mod assumptions;
mod build;
mod conditions;
mod interval;
mod linear;
mod preconditions;
mod stored;
#[cfg(test)]
mod tests;

pub use assumptions::{AssumptionViolation, are_known_at_launch};
pub use interval::Interval;
pub use preconditions::argument;

use crate::ir::{BinaryOp, CmpOp, DType, Func, Loc, OpId};
use affine::BoundedSum;
use assumptions::Assumption;
use preconditions::Precondition;
use serde::{Deserialize, Serialize};

/// Indices of the lower and upper end of an interval.
const LOW: usize = 0;
const HIGH: usize = 1;

/// Index of a node in [`Formulas::nodes`]; operands precede their users.
type NodeId = u32;

/// Range of a `for` loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct LoopRange<T> {
    start: T,
    end: T,
    step: T,
}

impl LoopRange<NodeId> {
    /// The interval of each bound, by [`NodeId`].
    fn intervals(self, values: &[Interval]) -> LoopRange<Interval> {
        let at = |id: NodeId| values[id as usize];
        LoopRange { start: at(self.start), end: at(self.end), step: at(self.step) }
    }
}

/// One step of a formula: an interval computed from earlier ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Node {
    Known(Interval),
    /// An opaque value: any value of its type.
    Opaque(DType),
    /// An integer argument, read as this type.
    Arg(usize, DType),
    ProgramId(usize),
    NumPrograms(usize),
    /// A binary op; with a type, results wrap to it.
    Binary(BinaryOp, NodeId, NodeId, Option<DType>),
    /// A conversion to this type.
    Cast(NodeId, DType),
    /// A comparison: 0, 1 or either.
    Compare(CmpOp, NodeId, NodeId),
    Hull(NodeId, NodeId),
    /// The subset of the first that is at most the second plus a number.
    AtMost(NodeId, NodeId, i8),
    /// The subset of the first that is at least the second plus a number.
    AtLeast(NodeId, NodeId, i8),
    /// The first without the second, if the second is a single number at one end.
    Not(NodeId, NodeId),
    /// Index of a loop.
    Index(LoopRange<NodeId>),
    /// A value that grows from `from` by `by` per iteration of a loop: at the beginning of an iteration, or, with
    /// `after`, after the last one.
    Induction {
        from: NodeId,
        by: NodeId,
        range: LoopRange<NodeId>,
        after: bool,
    },
    /// `then` if the interval of each test lies inside its limit, else `otherwise`.
    If {
        tests: Vec<(NodeId, Interval)>,
        then: NodeId,
        otherwise: NodeId,
    },
    /// Elements along a dimension of a view: offset, block extent, and the shape if the boundary is checked.
    Block {
        offset: NodeId,
        block: usize,
        shape: Option<NodeId>,
    },
}

/// One load, store or atomic.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Access {
    /// The accessed argument; `None` if unknown.
    arg: Option<usize>,
    /// Offsets from the start of the argument, in elements.
    elements: NodeId,
    /// The offset as a sum under conditions.
    sum: Option<BoundedSum>,
    /// The access executes only if none of these is empty.
    when: Vec<NodeId>,
    loc: Loc,
}

/// Formulas of the accesses of a kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Formulas {
    nodes: Vec<Node>,
    accesses: Vec<Access>,
    preconditions: Vec<Precondition>,
    assumptions: Vec<Assumption>,
}

/// Access footprint of a kernel. Manifests of compiled kernels contain it (`stored.rs`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "stored::Stored")]
pub struct Footprint {
    /// Intervals only: fast, and sufficient for most launches.
    intervals: Formulas,
    /// With addresses as affine sums (`affine.rs`), for launches that intervals cannot prove safe; `None` if there are
    /// none.
    sums: Option<Formulas>,
    /// Element size in bytes of each pointer argument.
    elem_bytes: Vec<Option<u64>>,
}

/// Argument values of one launch.
pub trait Launch {
    /// Value of an integer argument. Unsigned ones may be given as the signed integer with the same bits.
    fn integer(&self, arg: usize) -> i128;
    /// Size in bytes of the memory that an argument points to.
    fn bytes(&self, arg: usize) -> u64;
    /// Address of the memory that an argument points to.
    fn address(&self, arg: usize) -> u64;
}

/// Reason why a launch is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaunchViolation {
    /// An access may be out of bounds.
    OutOfBounds(OutOfBounds),
    /// The extent of a dimension of a block pointer is negative. `arg` is the argument that holds it, if one does.
    Extent { arg: Option<usize>, dim: usize, found: i128, loc: Loc },
    /// The step of a loop is not positive.
    Step { found: i128, loc: Loc },
    /// The index of a loop may overflow.
    LoopEnd { found: i128, step: i128, dtype: DType, loc: Loc },
    /// The condition of an `assume` may be false.
    Assumption { failed: FailedCondition, loc: Loc },
    /// The operand of a `multiple_of` may not be a multiple.
    Multiple { by: i64, loc: Loc },
}

/// A condition that does not hold for a launch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailedCondition {
    /// The comparison that does not hold, as text with the values of both sides, if one alone decides.
    pub comparison: Option<String>,
    /// Indices of the arguments that the condition depends on.
    pub args: Vec<usize>,
}

/// An access that may be out of bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutOfBounds {
    /// Index of the argument; `None` if unknown.
    pub arg: Option<usize>,
    /// Number of elements of the argument.
    pub elements: u64,
    /// Offset of the farthest element; `None` if it depends on more than arguments and grid.
    pub farthest_element: Option<i128>,
    /// Whether its lower and its upper end are outside, and depend on more than arguments and grid.
    pub unbounded: [bool; 2],
    pub loc: Loc,
}

impl Footprint {
    /// Builds the formulas of a function. Requires views at their uses; equal values that are not unified make the
    /// intervals coarser ([`crate::pipeline::footprint`]).
    pub fn of(func: &Func) -> Footprint {
        build::build(func)
    }

    /// Number of the kernel's arguments.
    pub fn argument_count(&self) -> usize {
        self.elem_bytes.len()
    }

    /// Checks that a launch meets the kernel's preconditions and that all accesses are in bounds.
    ///
    /// # Errors
    /// The first violated precondition, or the first access that may be out of bounds.
    pub fn check(&self, launch: &impl Launch, grid: [u32; 3]) -> Result<(), LaunchViolation> {
        if grid.contains(&0) {
            return Ok(());
        }
        let values = self.intervals.evaluate(launch, grid);
        if let Some(violation) = self.intervals.first_violated(&values, launch) {
            return Err(violation);
        }
        self.check_accesses(&values, launch, grid).map_err(LaunchViolation::OutOfBounds)
    }

    fn check_accesses(&self, values: &[Interval], launch: &impl Launch, grid: [u32; 3]) -> Result<(), OutOfBounds> {
        let Some(out_of_bounds) = self.intervals.first_out_of_bounds(values, |access| self.available(access, launch))
        else {
            return Ok(());
        };
        let Some(sums) = &self.sums else { return Err(self.intervals.explain(values, out_of_bounds)) };
        let values = sums.evaluate(launch, grid);
        match sums.first_out_of_bounds(&values, |access| self.available(access, launch)) {
            Some(out_of_bounds) => Err(sums.explain(&values, out_of_bounds)),
            None => Ok(()),
        }
    }

    /// Number of elements that an access may touch.
    fn available(&self, access: &Access, launch: &impl Launch) -> u64 {
        access.arg.map_or(0, |arg| launch.bytes(arg) / self.elem_bytes[arg].unwrap_or(1).max(1))
    }
}

/// An access that may be out of bounds.
struct AccessViolation<'a> {
    access: &'a Access,
    /// The elements that it may touch.
    elements: Interval,
    /// The number of elements in the argument's memory.
    available: u64,
}

impl Formulas {
    fn evaluate(&self, launch: &impl Launch, grid: [u32; 3]) -> Vec<Interval> {
        let mut values = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            values.push(evaluate(node, &values, launch, grid));
        }
        values
    }

    /// The first access that may be out of bounds.
    fn first_out_of_bounds(
        &self,
        values: &[Interval],
        available: impl Fn(&Access) -> u64,
    ) -> Option<AccessViolation<'_>> {
        let at = |id: NodeId| values[id as usize];
        self.accesses.iter().find_map(|access| {
            let mut elements = at(access.elements);
            if elements.is_empty() || access.when.iter().any(|&id| at(id).is_empty()) {
                return None;
            }
            let available = available(access);
            let memory = Interval { low: 0, high: i128::from(available) - 1 };
            if let (Some(sum), false) = (&access.sum, memory.contains(elements)) {
                elements = sum.tighten(elements, memory, values);
            }
            (access.arg.is_none() || !memory.contains(elements)).then_some(AccessViolation {
                access,
                elements,
                available,
            })
        })
    }

    fn explain(&self, values: &[Interval], violation: AccessViolation<'_>) -> OutOfBounds {
        let AccessViolation { access, elements, available } = violation;
        let opaque = self.opaque_ends(values);
        let plain = values[access.elements as usize];
        let unknown = |end: usize| match access.sum.as_ref() {
            Some(sum) if [elements.low, elements.high][end] != [plain.low, plain.high][end] => {
                sum.inputs().any(|id| opaque[id as usize].contains(&true))
            }
            _ => opaque[access.elements as usize][end],
        };
        let (end, farthest) = if elements.low < 0 { (LOW, elements.low) } else { (HIGH, elements.high) };
        let farthest_element = (access.arg.is_some() && !unknown(end)).then_some(farthest);
        let unbounded = [elements.low < 0 && unknown(LOW), elements.high >= i128::from(available) && unknown(HIGH)];
        OutOfBounds { arg: access.arg, elements: available, farthest_element, unbounded, loc: access.loc.clone() }
    }

    /// By node, whether its lower and its upper end depend on an opaque or wrapped value.
    fn opaque_ends(&self, values: &[Interval]) -> Vec<[bool; 2]> {
        let mut opaque: Vec<[bool; 2]> = Vec::with_capacity(self.nodes.len());
        for (node, &value) in self.nodes.iter().zip(values) {
            let of = |id: NodeId| opaque[id as usize];
            let either = |id: NodeId| of(id).contains(&true);
            let at = |id: NodeId| values[id as usize];
            opaque.push(match *node {
                Node::Opaque(_) => [true; 2],
                Node::Known(_) | Node::Arg(..) | Node::ProgramId(_) | Node::NumPrograms(_) => [false; 2],
                Node::Binary(_, _, _, Some(dtype)) if value == Interval::of_type(dtype) => [true; 2],
                Node::Binary(BinaryOp::Add, a, b, _) => [of(a)[LOW] || of(b)[LOW], of(a)[HIGH] || of(b)[HIGH]],
                Node::Binary(_, a, b, _) => [either(a) || either(b); 2],
                Node::Compare(_, a, b) => [either(a) || either(b); 2],
                Node::Cast(a, _) | Node::Not(a, _) => of(a),
                Node::Hull(a, b) => [of(a)[LOW] || of(b)[LOW], of(a)[HIGH] || of(b)[HIGH]],
                Node::AtMost(a, b, _) if value.high < at(a).high => [of(a)[LOW], of(b)[HIGH]],
                Node::AtLeast(a, b, _) if value.low > at(a).low => [of(b)[LOW], of(a)[HIGH]],
                Node::AtMost(a, ..) | Node::AtLeast(a, ..) => of(a),
                Node::Index(LoopRange { start, end, step }) => {
                    [either(start), either(start) || either(end) || either(step)]
                }
                Node::Induction { from, by, range: LoopRange { start, end, step }, .. } => {
                    [[from, by, start, end, step].into_iter().any(either); 2]
                }
                Node::If { then, otherwise, .. } => [either(then) || either(otherwise); 2],
                Node::Block { offset, shape, .. } => {
                    let cut = shape.filter(|&shape| value.high == at(shape).high - 1);
                    let low = value.low == at(offset).low && of(offset)[LOW];
                    [low, cut.map_or(of(offset)[HIGH], |shape| of(shape)[HIGH])]
                }
            });
        }
        opaque
    }
}

fn evaluate(node: &Node, values: &[Interval], launch: &impl Launch, grid: [u32; 3]) -> Interval {
    let at = |id: NodeId| values[id as usize];
    match *node {
        Node::Known(interval) => interval,
        Node::Opaque(dtype) => Interval::of_type(dtype),
        Node::Arg(arg, dtype) => Interval::point(read_as(launch.integer(arg), dtype)),
        Node::ProgramId(axis) => Interval { low: 0, high: i128::from(grid[axis]) - 1 },
        Node::NumPrograms(axis) => Interval::point(grid[axis].into()),
        Node::Binary(op, a, b, wraps) => {
            let exact = at(a).binary(op, at(b));
            wraps.map_or(exact, |dtype| exact.wrap(dtype))
        }
        Node::Cast(a, dtype) => at(a).wrap(dtype),
        Node::Compare(op, a, b) => at(a).compare(op, at(b)),
        Node::Hull(a, b) => at(a).hull(at(b)),
        Node::AtMost(a, b, more) => {
            let high = at(b).high + i128::from(more);
            if at(b).is_empty() { Interval::EMPTY } else { at(a).intersect(Interval { high, ..Interval::ANY }) }
        }
        Node::AtLeast(a, b, more) => {
            let low = at(b).low + i128::from(more);
            if at(b).is_empty() { Interval::EMPTY } else { at(a).intersect(Interval { low, ..Interval::ANY }) }
        }
        Node::Not(a, b) => {
            let (mut all, n) = (at(a), at(b));
            if n == Interval::point(n.low) && all.low == n.low {
                all.low += 1;
            } else if n == Interval::point(n.low) && all.high == n.low {
                all.high -= 1;
            }
            all
        }
        Node::Index(range) => index(range.intervals(values)),
        Node::Induction { from, by, range, after } => {
            let most = max_trip_count(range.intervals(values));
            let most = if after { most } else { most - 1 };
            if most < 0 {
                return Interval::EMPTY;
            }
            at(from).plus(at(by).times(Interval { low: 0, high: most }))
        }
        Node::If { ref tests, then, otherwise } => {
            let holds = tests.iter().all(|(test, inside)| inside.contains(at(*test)));
            if holds { at(then) } else { at(otherwise) }
        }
        Node::Block { offset, block, shape } => {
            let touched = at(offset).plus(Interval { low: 0, high: block as i128 - 1 });
            match shape {
                None => touched,
                Some(shape) => touched.intersect(Interval { low: 0, high: at(shape).high - 1 }),
            }
        }
    }
}

/// Removes from a recorded kernel the hints that no launch can check, and clamps extents of block pointers to at least
/// 0 if no launch can check their sign. [`Footprint::check`] checks the remaining assumptions.
pub fn drop_unchecked_assumptions(func: &mut Func) {
    build::drop_unchecked_assumptions(func);
}

/// Whether [`Footprint::check`] checks an `assume`, so that the generated code need not.
pub fn checks_assumption(func: &Func, id: OpId) -> bool {
    build::checks_assumption(func, id)
}

/// An integer argument as a value of its type: unsigned arguments are passed as signed integers with the same bits.
fn read_as(n: i128, dtype: DType) -> i128 {
    match dtype {
        DType::U8 => i128::from(n as u8),
        DType::U16 => i128::from(n as u16),
        DType::U32 => i128::from(n as u32),
        DType::U64 => i128::from(n as u64),
        _ => n,
    }
}

/// Range of a loop index.
fn index(LoopRange { start, end, step }: LoopRange<Interval>) -> Interval {
    if start.is_empty() || end.is_empty() || start.low >= end.high {
        return Interval::EMPTY;
    }
    // The language allows only positive steps, but a step passed as an argument may be anything.
    if step.low <= 0 {
        return Interval::ANY;
    }
    let last = end.high - 1;
    let is_number = |i: Interval| i.low == i.high;
    let high = match is_number(start) && is_number(step) {
        true => start.low + (last - start.low) / step.low * step.low,
        false => last,
    };
    Interval { low: start.low, high }
}

/// Maximum trip count of a loop.
fn max_trip_count(LoopRange { start, end, step }: LoopRange<Interval>) -> i128 {
    if start.is_empty() || end.is_empty() || start.low >= end.high {
        return 0;
    }
    if step.low <= 0 {
        return i128::from(i64::MAX);
    }
    (end.high - start.low + step.low - 1) / step.low
}
