//! The conditions of a kernel's `assume`s: as text for callers that check their arguments themselves, and whether one
//! is false for every launch, so that code compiled ahead of time could never be launched.

use super::interval::MAX_MAGNITUDE;
use super::preconditions::{Precondition, PreconditionKind, symbol};
use super::{Footprint, Formulas, Interval, Launch, Node, NodeId, evaluate, read_as};
use crate::ir::{Arg, BinaryOp, CmpOp, DType, Loc};

/// Operators below this depth of a condition are not printed.
const MAX_DEPTH: usize = 8;

/// Stands for what is not printed.
const ELLIPSIS: &str = "…";

/// Arguments of which nothing is read: [`Formulas::of_launches`] takes what is known of them from elsewhere.
struct Unknown;

impl Launch for Unknown {
    fn integer(&self, _: usize) -> i128 {
        0
    }
    fn bytes(&self, _: usize) -> u64 {
        0
    }
    fn address(&self, _: usize) -> u64 {
        0
    }
}

impl Footprint {
    /// The first `assume` whose condition is false for every launch of which `args` holds: its text with the names of
    /// the arguments, and its location.
    pub fn false_assumption(&self, args: &[Arg]) -> Option<(String, &Loc)> {
        let values = self.intervals.of_launches(args);
        let names: Vec<&str> = args.iter().map(|arg| &*arg.name).collect();
        self.conditions().find_map(|(condition, is_always_reached, loc)| {
            let is_false = is_always_reached && values[condition as usize] == Interval::point(0);
            is_false.then(|| (self.intervals.condition(condition, &names, MAX_DEPTH), loc))
        })
    }

    /// What the kernel's `assume`s and the steps of its loops require of a launch, with the `names` of its arguments, and where they
    /// are. Arithmetic wraps as in the kernel, and `/` and `%` round toward zero.
    pub fn assumed_conditions(&self, names: &[&str]) -> Vec<String> {
        let text = |text: String, is_always_reached: bool, loc: &Loc| {
            let only = if is_always_reached { "" } else { ", in launches that reach it" };
            format!("{text} ({loc}{only})")
        };
        let assumed = self.conditions().map(|(condition, is_always_reached, loc)| {
            text(self.intervals.condition(condition, names, MAX_DEPTH), is_always_reached, loc)
        });
        let loops = self.intervals.preconditions.iter().filter_map(|Precondition { kind, when, loc }| {
            let PreconditionKind::Loop(bounds) = kind else { return None };
            let step = bounds.launch_step()?;
            let is_known = matches!(self.intervals.nodes[step as usize], Node::Known(_));
            let condition = format!("{} > 0", self.intervals.number_text(step, names, MAX_DEPTH));
            (!is_known).then(|| text(condition, when.is_empty(), loc))
        });
        assumed.chain(loops).collect()
    }

    /// The condition of each `assume` that launches check, whether all launches reach it, and where it is.
    fn conditions(&self) -> impl Iterator<Item = (NodeId, bool, &Loc)> {
        self.intervals.preconditions.iter().filter_map(|Precondition { kind, when, loc }| match kind {
            PreconditionKind::Assume { condition } => Some((*condition, when.is_empty(), loc)),
            _ => None,
        })
    }
}

impl Formulas {
    /// The interval of each node over all launches of which `args` holds.
    fn of_launches(&self, args: &[Arg]) -> Vec<Interval> {
        let mut values: Vec<Interval> = Vec::with_capacity(self.nodes.len());
        let mut low_bits: Vec<LowBits> = Vec::with_capacity(self.nodes.len());
        for node in &self.nodes {
            let of = |id: NodeId| low_bits[id as usize];
            let either = Interval::of_type(DType::Bool);
            let value = match *node {
                Node::Arg(arg, dtype) => match args.get(arg).and_then(|arg| arg.equal_to) {
                    Some(n) => Interval::point(read_as(n.into(), dtype)),
                    None => Interval::of_type(dtype),
                },
                Node::ProgramId(_) | Node::NumPrograms(_) => Interval { low: 0, high: u32::MAX.into() },
                _ => evaluate(node, &values, &Unknown, [1; 3]),
            };
            let value = match *node {
                Node::Compare(CmpOp::Eq, a, b) if value == either && of(a).differ(of(b)) => Interval::point(0),
                Node::Compare(CmpOp::Ne, a, b) if value == either && of(a).differ(of(b)) => Interval::point(1),
                _ => value,
            };
            let bits = match *node {
                // Ends of that magnitude are clamped.
                _ if value == Interval::point(value.low) && value.low.abs() < MAX_MAGNITUDE => {
                    LowBits::new(LowBits::ALL, value.low as u128)
                }
                Node::Arg(arg, _) => {
                    let divisible_by = args.get(arg).map_or(1, |arg| arg.divisible_by);
                    LowBits::new(divisible_by.trailing_zeros(), 0)
                }
                Node::Binary(op, a, b, wraps) => of(a).binary(op, of(b)).wrap(wraps),
                Node::Cast(a, dtype) => of(a).wrap(Some(dtype)),
                Node::AtMost(a, ..) | Node::AtLeast(a, ..) | Node::Not(a, _) => of(a),
                _ => LowBits::new(0, 0),
            };
            values.push(value);
            low_bits.push(bits);
        }
        values
    }

    /// The text of a condition, a node that is 0 or 1.
    fn condition(&self, id: NodeId, names: &[&str], depth: usize) -> String {
        let of = |id: NodeId| self.condition(id, names, depth.saturating_sub(1));
        match self.nodes[id as usize] {
            _ if depth == 0 => ELLIPSIS.to_string(),
            Node::Known(value) => (value == Interval::point(1)).to_string(),
            Node::Compare(op, a, b) => {
                let [a, b] = [a, b].map(|id| self.number_text(id, names, depth - 1));
                format!("{a} {} {b}", symbol(op))
            }
            // On 0 and 1, minimum and maximum are and and or, and 1 - x is not.
            Node::Binary(BinaryOp::Min, a, b, None) => format!("({}) && ({})", of(a), of(b)),
            Node::Binary(BinaryOp::Max, a, b, None) => format!("({}) || ({})", of(a), of(b)),
            Node::Binary(BinaryOp::Sub, _, a, None) => format!("!({})", of(a)),
            _ => self.number_text(id, names, depth),
        }
    }

    fn number_text(&self, id: NodeId, names: &[&str], depth: usize) -> String {
        let of = |id: NodeId| self.number_text(id, names, depth.saturating_sub(1));
        match self.nodes[id as usize] {
            _ if depth == 0 => ELLIPSIS.to_string(),
            Node::Known(value) => value.to_string(),
            Node::Arg(arg, _) => names.get(arg).copied().unwrap_or(ELLIPSIS).to_string(),
            Node::NumPrograms(axis) => format!("num_programs({axis})"),
            Node::Cast(a, _) => of(a),
            Node::Binary(op, a, b, _) => {
                let (a, b) = (of(a), of(b));
                match op {
                    BinaryOp::Add => format!("({a} + {b})"),
                    BinaryOp::Sub => format!("({a} - {b})"),
                    BinaryOp::Mul => format!("({a} * {b})"),
                    BinaryOp::Div => format!("({a} / {b})"),
                    BinaryOp::Rem => format!("({a} % {b})"),
                    _ => format!("{}({a}, {b})", op.name()),
                }
            }
            _ => ELLIPSIS.to_string(),
        }
    }
}

/// The low bits of an integer that are the same for every launch.
#[derive(Clone, Copy)]
struct LowBits {
    /// Their number.
    known: u32,
    /// The bits; the others are 0.
    bits: u128,
}

impl LowBits {
    /// The number for an integer that is known. All have fewer bits.
    const ALL: u32 = 127;

    fn new(known: u32, bits: u128) -> LowBits {
        let known = known.min(LowBits::ALL);
        LowBits { known, bits: bits & ((1u128 << known) - 1) }
    }

    /// Those of the result of an op before wrapping.
    fn binary(self, op: BinaryOp, other: LowBits) -> LowBits {
        let (a, b) = (self, other);
        match op {
            BinaryOp::Add => LowBits::new(a.known.min(b.known), a.bits.wrapping_add(b.bits)),
            BinaryOp::Sub => LowBits::new(a.known.min(b.known), a.bits.wrapping_sub(b.bits)),
            // (a + 2ᵐ·x) · (b + 2ⁿ·y) = a·b + a·2ⁿ·y + b·2ᵐ·x + 2ᵐ⁺ⁿ·x·y, with the known bits a and b.
            BinaryOp::Mul => {
                let of_unknown =
                    [b.known + a.bits.trailing_zeros(), a.known + b.bits.trailing_zeros(), a.known + b.known];
                let known = of_unknown.into_iter().fold(LowBits::ALL, u32::min);
                LowBits::new(known, a.bits.wrapping_mul(b.bits))
            }
            _ => LowBits::new(0, 0),
        }
    }

    /// Those of the integer modulo 2ⁿ as a value of an n-bit type.
    fn wrap(self, dtype: Option<DType>) -> LowBits {
        match dtype {
            None => self,
            Some(dtype) if dtype.is_int() => LowBits::new(self.known.min(dtype.bits() as u32), self.bits),
            Some(_) => LowBits::new(0, 0),
        }
    }

    /// Whether no two integers with these low bits are equal.
    fn differ(self, other: LowBits) -> bool {
        let known = self.known.min(other.known);
        LowBits::new(known, self.bits).bits != LowBits::new(known, other.bits).bits
    }
}
