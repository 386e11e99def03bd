//! How far a kernel reaches into its arguments' memory, as formulas of its arguments and its grid.
//!
//! Made once for a recorded kernel ([`Reach::of`]) and evaluated before each launch ([`Reach::check`]), these formulas are
//! what makes a launch from safe code safe: a kernel whose extents, strides or masks do not keep it inside its buffers is
//! refused.
//!
//! Every integer is followed as an interval: arguments and the grid are known numbers by then, `program_id`, `arange` and
//! the index of a loop run through known intervals. Each access gives the interval of elements that it may touch:
//!
//! - through a view: in a dimension of `boundary_check` what block and shape have in common, in another one the block;
//! - through pointers: what is left of their offsets under the mask, whose comparisons (joined by `&&`) bound the values
//!   that they compare. Conditions of branches around the access bound values in the same way.
//!
//! Arithmetic wraps as it does in the code that is made: by two's complement, of the type that it is in. What else that code
//! relies on (extents that are not negative, `assume`, hints) is checked too (`promises.rs`), and refused where it is not so.
//!
//! Where intervals alone cannot tell, addresses are followed as sums, which the mask may bound as a whole (`affine.rs`).
//!
//! Whatever is not followed (a number read from memory, say) may be any value of its type, so nothing is overlooked: an
//! access is inside, or it is reported. The reverse does not hold. What two values have to do with each other is
//! known of sums only, so an access that is always inside may be reported, too.

mod affine;
mod build;
mod interval;
mod linear;
mod promises;
#[cfg(test)]
mod tests;

pub use interval::Interval;
pub use promises::argument;

use crate::ir::{BinaryOp, CmpOp, DType, Func, Loc, OpId};
use affine::Bounded;
use promises::Promise;

/// The ends of an interval, as indices.
const LOW: usize = 0;
const HIGH: usize = 1;

/// Index of a node in [`Formulas::nodes`]; operands come before what uses them.
type NodeId = u32;

/// One step of a formula: an interval made of earlier ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Node {
    Known(Interval),
    /// A number that is not followed: any value of its type.
    Untold(DType),
    /// An integer argument, read as that type.
    Arg(usize, DType),
    ProgramId(usize),
    NumPrograms(usize),
    /// An elementwise function; with a type, of numbers that wrap.
    Binary(BinaryOp, NodeId, NodeId, Option<DType>),
    /// A conversion to that type.
    Cast(NodeId, DType),
    /// A comparison: 0, 1 or either.
    Compare(CmpOp, NodeId, NodeId),
    Hull(NodeId, NodeId),
    /// What of the first is at most the second plus a number.
    AtMost(NodeId, NodeId, i8),
    /// What of the first is at least the second plus a number.
    AtLeast(NodeId, NodeId, i8),
    /// What of the first is not the second, where that is one number at an end.
    Not(NodeId, NodeId),
    /// Index of a loop: start, end, step.
    Index(NodeId, NodeId, NodeId),
    /// A value that grows by the second in each of the loop's iterations (start, end, step) from the first on, at the
    /// beginning of an iteration, or where the flag is set after the last one.
    Grown {
        from: NodeId,
        by: NodeId,
        range: [NodeId; 3],
        after: bool,
    },
    /// `then` where each test's interval is inside of what it is compared with, else `otherwise`.
    If {
        tests: Vec<(NodeId, Interval)>,
        then: NodeId,
        otherwise: NodeId,
    },
    /// Elements along a dimension of a view: offset, block, and the shape where the boundary is checked.
    Block {
        offset: NodeId,
        block: usize,
        shape: Option<NodeId>,
    },
}

/// One load, store or atomic.
#[derive(Clone, Debug)]
struct Access {
    /// The kernel's argument; `None` where it is not known which.
    arg: Option<usize>,
    /// Elements of the argument, from its start on.
    elements: NodeId,
    /// The same as a sum of unknowns under conditions.
    sum: Option<Bounded>,
    /// Happens only if none of these is empty.
    when: Vec<NodeId>,
    loc: Loc,
}

/// Formulas for a kernel's accesses.
#[derive(Clone, Debug)]
struct Formulas {
    nodes: Vec<Node>,
    accesses: Vec<Access>,
    promises: Vec<Promise>,
}

/// What a kernel's accesses touch.
#[derive(Clone, Debug)]
pub struct Reach {
    /// By intervals alone: quick, and enough for most launches.
    plain: Formulas,
    /// With addresses as sums (`affine.rs`), for launches of which the plain ones cannot tell; `None` where there are none.
    sums: Option<Formulas>,
    /// Size of an element in bytes, of each argument that is a pointer.
    elem_bytes: Vec<Option<u64>>,
}

/// The numbers of one launch.
pub trait Launch {
    /// Value of an integer argument.
    fn integer(&self, arg: usize) -> i128;
    /// Size in bytes of the memory that an argument points to.
    fn bytes(&self, arg: usize) -> u64;
    /// Address of the memory that an argument points to.
    fn address(&self, arg: usize) -> u64;
}

/// Why a launch is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// An access may leave its memory.
    Beyond(Beyond),
    /// The extent of a block pointer's dimension is negative. `arg` is the argument that it is, if it is one.
    Extent { arg: Option<usize>, dim: usize, found: i128, loc: Loc },
    /// The step of a loop is not positive.
    Step { found: i128, loc: Loc },
    /// The index of a loop may overflow.
    LoopEnd { found: i128, step: i128, dtype: DType, loc: Loc },
    /// The condition of an `assume` is false.
    Assumption { loc: Loc },
    /// What a `multiple_of` is about need not be a multiple.
    Multiple { by: i64, loc: Loc },
}

/// An access that may leave the memory it is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Beyond {
    /// Index of the argument; `None` where it is not known which one the access goes to.
    pub arg: Option<usize>,
    /// Elements that the argument has.
    pub elements: u64,
    /// The element farthest out; `None` where it depends on more than arguments and grid.
    pub reached: Option<i128>,
    pub loc: Loc,
}

impl Reach {
    /// The formulas of a recorded function.
    pub fn of(func: &Func) -> Reach {
        build::build(func)
    }

    /// Whether a launch keeps what the kernel promises, and every access stays inside the arguments' memory.
    ///
    /// # Errors
    /// The first promise that it does not keep, or the first access that may go beyond.
    pub fn check(&self, launch: &impl Launch, grid: [u32; 3]) -> Result<(), Refused> {
        if grid.contains(&0) {
            return Ok(());
        }
        let values = self.plain.evaluate(launch, grid);
        if let Some(broken) = self.plain.first_broken(&values, launch) {
            return Err(broken);
        }
        self.check_accesses(&values, launch, grid).map_err(Refused::Beyond)
    }

    fn check_accesses(&self, values: &[Interval], launch: &impl Launch, grid: [u32; 3]) -> Result<(), Beyond> {
        let Some(beyond) = self.plain.first_beyond(values, |access| self.available(access, launch)) else {
            return Ok(());
        };
        let Some(sums) = &self.sums else { return Err(self.plain.explain(values, beyond)) };
        let values = sums.evaluate(launch, grid);
        match sums.first_beyond(&values, |access| self.available(access, launch)) {
            Some(beyond) => Err(sums.explain(&values, beyond)),
            None => Ok(()),
        }
    }

    /// Elements that an access may touch.
    fn available(&self, access: &Access, launch: &impl Launch) -> u64 {
        access.arg.map_or(0, |arg| launch.bytes(arg) / self.elem_bytes[arg].unwrap_or(1).max(1))
    }
}

impl Formulas {
    fn evaluate(&self, launch: &impl Launch, grid: [u32; 3]) -> Vec<Interval> {
        let mut values = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            values.push(evaluate(node, &values, launch, grid));
        }
        values
    }

    /// The first access that may leave its memory, with its elements and those there are.
    fn first_beyond(
        &self,
        values: &[Interval],
        available: impl Fn(&Access) -> u64,
    ) -> Option<(&Access, Interval, u64)> {
        let at = |id: NodeId| values[id as usize];
        self.accesses.iter().find_map(|access| {
            let mut elements = at(access.elements);
            if elements.is_empty() || access.when.iter().any(|&id| at(id).is_empty()) {
                return None;
            }
            let available = available(access);
            let memory = Interval { low: 0, high: i128::from(available) - 1 };
            if let (Some(sum), false) = (&access.sum, memory.contains(elements)) {
                elements = sum.cut(elements, memory, values);
            }
            (access.arg.is_none() || !memory.contains(elements)).then_some((access, elements, available))
        })
    }

    fn explain(&self, values: &[Interval], (access, elements, available): (&Access, Interval, u64)) -> Beyond {
        let untold = self.untold(values);
        let (end, farthest) = if elements.low < 0 { (LOW, elements.low) } else { (HIGH, elements.high) };
        let plain = values[access.elements as usize];
        let by_sum = farthest != [plain.low, plain.high][end];
        let unknown = match access.sum.as_ref().filter(|_| by_sum) {
            Some(sum) => sum.inputs().any(|id| untold[id as usize].contains(&true)),
            None => untold[access.elements as usize][end],
        };
        let reached = (access.arg.is_some() && !unknown).then_some(farthest);
        Beyond { arg: access.arg, elements: available, reached, loc: access.loc.clone() }
    }

    /// For each node, whether its lower and its upper end depend on a number that is not followed, or that wrapped.
    fn untold(&self, values: &[Interval]) -> Vec<[bool; 2]> {
        let mut untold: Vec<[bool; 2]> = Vec::with_capacity(self.nodes.len());
        for (node, &value) in self.nodes.iter().zip(values) {
            let of = |id: NodeId| untold[id as usize];
            let either = |id: NodeId| of(id).contains(&true);
            let at = |id: NodeId| values[id as usize];
            untold.push(match *node {
                Node::Untold(_) => [true; 2],
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
                Node::Index(start, end, step) => [either(start), either(start) || either(end) || either(step)],
                Node::Grown { from, by, range, .. } => [[from, by].iter().chain(&range).any(|&id| either(id)); 2],
                Node::If { then, otherwise, .. } => [either(then) || either(otherwise); 2],
                Node::Block { offset, shape, .. } => {
                    let cut = shape.filter(|&shape| value.high == at(shape).high - 1);
                    let low = value.low == at(offset).low && of(offset)[LOW];
                    [low, cut.map_or(of(offset)[HIGH], |shape| of(shape)[HIGH])]
                }
            });
        }
        untold
    }
}

fn evaluate(node: &Node, values: &[Interval], launch: &impl Launch, grid: [u32; 3]) -> Interval {
    let at = |id: NodeId| values[id as usize];
    match *node {
        Node::Known(interval) => interval,
        Node::Untold(dtype) => Interval::of_type(dtype),
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
            if at(b).is_empty() { Interval::EMPTY } else { at(a).meet(Interval { high, ..Interval::ANY }) }
        }
        Node::AtLeast(a, b, more) => {
            let low = at(b).low + i128::from(more);
            if at(b).is_empty() { Interval::EMPTY } else { at(a).meet(Interval { low, ..Interval::ANY }) }
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
        Node::Index(start, end, step) => index(at(start), at(end), at(step)),
        Node::Grown { from, by, range, after } => {
            let most = trips(range.map(at));
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
                Some(shape) => touched.meet(Interval { low: 0, high: at(shape).high - 1 }),
            }
        }
    }
}

/// Takes out of a recorded kernel the hints that no launch can check, which then nobody believes, and makes 0 of negative extents that
/// none can check: what is left is among what [`Reach::check`] checks.
pub fn distrust_unchecked(func: &mut Func) {
    build::distrust_unchecked(func);
}

/// Whether [`Reach::check`] checks an `assume`, so that code need not.
pub fn checks_assumption(func: &Func, id: OpId) -> bool {
    build::checks_assumption(func, id)
}

/// Unsigned arguments come as the signed ones with the same bits.
fn read_as(n: i128, dtype: DType) -> i128 {
    match dtype {
        DType::U8 => i128::from(n as u8),
        DType::U16 => i128::from(n as u16),
        DType::U32 => i128::from(n as u32),
        DType::U64 => i128::from(n as u64),
        _ => n,
    }
}

/// Values of a loop's index.
fn index(start: Interval, end: Interval, step: Interval) -> Interval {
    if start.is_empty() || end.is_empty() || start.low >= end.high {
        return Interval::EMPTY;
    }
    // The language has positive steps only; a number that is passed may be something else.
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

/// Most iterations of a loop.
fn trips([start, end, step]: [Interval; 3]) -> i128 {
    if start.is_empty() || end.is_empty() || start.low >= end.high {
        return 0;
    }
    if step.low <= 0 {
        return i128::from(i64::MAX);
    }
    (end.high - start.low + step.low - 1) / step.low
}
