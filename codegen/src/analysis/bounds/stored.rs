//! Footprints in manifests of compiled kernels: the form of intervals there, and the check of a footprint that is read.
//!
//! Evaluation indexes nodes, arguments and axes without checks, so a footprint from a file is checked once when it is
//! read: ids refer to earlier nodes, arguments and axes exist, and numbers are in the range of the arithmetic.

use serde::{Deserialize, Serialize};

use super::affine::{BoundedSum, Multiple, Sum};
use super::interval::MAX_MAGNITUDE;
use super::preconditions::{LoopBounds, PreconditionKind};
use super::{Access, Footprint, Formulas, Interval, LoopRange, Node, NodeId};

/// One end of an interval: a decimal text where it exceeds 64 bits, for the many JSON libraries without such integers.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum End {
    Number(i64),
    Text(String),
}

impl From<i128> for End {
    fn from(n: i128) -> End {
        i64::try_from(n).map_or_else(|_| End::Text(n.to_string()), End::Number)
    }
}

impl TryFrom<End> for i128 {
    type Error = String;

    fn try_from(end: End) -> Result<i128, String> {
        let n = match end {
            End::Number(n) => i128::from(n),
            End::Text(text) => text.parse().map_err(|_| format!("`{text}` is not an end of an interval"))?,
        };
        match (-MAX_MAGNITUDE..=MAX_MAGNITUDE).contains(&n) {
            true => Ok(n),
            false => Err(format!("an interval that ends at {n} is out of range")),
        }
    }
}

/// An interval as its two ends.
#[derive(Serialize, Deserialize)]
pub struct StoredInterval(End, End);

impl From<Interval> for StoredInterval {
    fn from(Interval { low, high }: Interval) -> StoredInterval {
        StoredInterval(low.into(), high.into())
    }
}

impl TryFrom<StoredInterval> for Interval {
    type Error = String;

    fn try_from(StoredInterval(low, high): StoredInterval) -> Result<Interval, String> {
        Ok(Interval { low: low.try_into()?, high: high.try_into()? })
    }
}

/// A footprint that is not checked yet.
#[derive(Deserialize)]
pub(super) struct Stored {
    intervals: Formulas,
    sums: Option<Formulas>,
    elem_bytes: Vec<Option<u64>>,
}

impl TryFrom<Stored> for Footprint {
    type Error = String;

    fn try_from(Stored { intervals, sums, elem_bytes }: Stored) -> Result<Footprint, String> {
        [Some(&intervals), sums.as_ref()].into_iter().flatten().try_for_each(|f| f.check(elem_bytes.len()))?;
        Ok(Footprint { intervals, sums, elem_bytes })
    }
}

impl Node {
    /// The nodes that the value is computed from.
    pub(super) fn operands(&self) -> Vec<NodeId> {
        match self {
            Node::Known(_) | Node::Opaque(_) | Node::Arg(..) | Node::ProgramId(_) | Node::NumPrograms(_) => vec![],
            &Node::Cast(a, _) => vec![a],
            &Node::Binary(_, a, b, _) | &Node::Compare(_, a, b) | &Node::Hull(a, b) => vec![a, b],
            &Node::AtMost(a, b, _) | &Node::AtLeast(a, b, _) | &Node::Not(a, b) => vec![a, b],
            Node::Index(range) => range.ids().to_vec(),
            Node::Induction { from, by, range, .. } => [&[*from, *by], &range.ids()[..]].concat(),
            Node::If { tests, then, otherwise } => {
                tests.iter().map(|(test, _)| *test).chain([*then, *otherwise]).collect()
            }
            &Node::Block { offset, shape, .. } => [offset].into_iter().chain(shape).collect(),
        }
    }
}

impl LoopRange<NodeId> {
    fn ids(&self) -> [NodeId; 3] {
        [self.start, self.end, self.step]
    }
}

impl Formulas {
    /// Checks the ids, indices and numbers, for a kernel with this number of arguments.
    fn check(&self, args: usize) -> Result<(), String> {
        for (id, node) in self.nodes.iter().enumerate() {
            in_range(node.operands(), id)?;
            match *node {
                Node::Arg(arg, _) => argument(Some(arg), args)?,
                Node::ProgramId(axis) | Node::NumPrograms(axis) if axis >= 3 => {
                    return Err(format!("a grid has 3 axes, and no axis {axis}"));
                }
                _ => {}
            }
        }
        let nodes = self.nodes.len();
        for Access { arg, elements, sum, when, .. } in &self.accesses {
            argument(*arg, args)?;
            in_range(when.iter().copied().chain([*elements]), nodes)?;
            sum.iter().try_for_each(|sum| sum.check(nodes))?;
        }
        for precondition in &self.preconditions {
            in_range(precondition.when.iter().copied(), nodes)?;
            precondition.kind.check(nodes, args)?;
        }
        for assumption in &self.assumptions {
            in_range(assumption.when.iter().copied().chain([assumption.value]), nodes)?;
        }
        Ok(())
    }
}

impl PreconditionKind {
    fn check(&self, nodes: usize, args: usize) -> Result<(), String> {
        match self {
            PreconditionKind::Extent { extent, arg, .. } => {
                argument(*arg, args)?;
                in_range([*extent], nodes)
            }
            PreconditionKind::Loop(LoopBounds { range, .. }) => in_range(range.ids(), nodes),
            PreconditionKind::Assume { condition } => in_range([*condition], nodes),
            PreconditionKind::Multiple { by, .. } if *by <= 0 => Err(format!("there are no multiples of {by}")),
            PreconditionKind::Multiple { of: None, .. } => Ok(()),
            PreconditionKind::Multiple { of: Some(Multiple { base, numbers, factors, tests, .. }), .. } => {
                argument(*base, args)?;
                let tests = tests.iter().map(|(test, _)| *test);
                in_range(numbers.iter().flatten().chain(factors).copied().chain(tests), nodes)
            }
        }
    }
}

impl BoundedSum {
    fn check(&self, nodes: usize) -> Result<(), String> {
        in_range(self.unknowns.iter().copied(), nodes)?;
        for Sum { terms, tests } in std::iter::once(&self.sum).chain(&self.limits) {
            let coefficients = terms.iter().map(|(_, coefficient)| *coefficient);
            in_range(coefficients.chain(tests.iter().map(|(test, _)| *test)), nodes)?;
            if let Some((unknown, _)) = terms.iter().find(|(unknown, _)| *unknown >= self.unknowns.len()) {
                return Err(format!("a sum has no unknown {unknown}"));
            }
        }
        Ok(())
    }
}

/// Checks that nodes are among the first `nodes`.
fn in_range(ids: impl IntoIterator<Item = NodeId>, nodes: usize) -> Result<(), String> {
    match ids.into_iter().find(|&id| id as usize >= nodes) {
        Some(id) => Err(format!("a formula refers to node {id}: expected one of the {nodes} nodes before it")),
        None => Ok(()),
    }
}

fn argument(arg: Option<usize>, args: usize) -> Result<(), String> {
    match arg.filter(|&arg| arg >= args) {
        Some(arg) => Err(format!("a formula refers to argument {arg}: the kernel has {args} arguments")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analysis::bounds::Launch;
    use crate::pipeline;
    use crate::text;

    /// Loops, views, and conditions on program ids.
    const KERNEL: &str = include_str!("../../sim/programs/attention32.tile");

    /// `bytes` in each pointer argument, and `n` as each integer.
    struct Arguments {
        bytes: u64,
        n: i128,
    }

    impl Launch for Arguments {
        fn integer(&self, _: usize) -> i128 {
            self.n
        }
        fn bytes(&self, _: usize) -> u64 {
            self.bytes
        }
        fn address(&self, _: usize) -> u64 {
            256
        }
    }

    fn footprint() -> Footprint {
        pipeline::footprint(&text::parse(KERNEL).unwrap_or_else(|error| panic!("{error}")))
    }

    fn read(text: &str) -> Result<Footprint, String> {
        serde_json::from_str(text).map_err(|error| error.to_string())
    }

    #[test]
    fn a_footprint_is_read_as_it_was_written() {
        let footprint = footprint();
        let found = read(&serde_json::to_string(&footprint).unwrap()).unwrap();
        assert_eq!(found, footprint);
        let mut accepted = 0;
        for bytes in [0, 4 * 32 * 16, 4 * 32 * 64, 4 * 32 * 1024] {
            for n in [-16, 0, 16, 64, 1024] {
                let outcome = footprint.check(&Arguments { bytes, n }, [2, 1, 1]);
                assert_eq!(found.check(&Arguments { bytes, n }, [2, 1, 1]), outcome, "{bytes} bytes, n = {n}");
                accepted += usize::from(outcome.is_ok());
            }
        }
        assert!((1..20).contains(&accepted), "{accepted} of 20");
    }

    /// Each change of one number of the text is refused, or gives a footprint that can be evaluated.
    #[test]
    fn damaged_footprints_are_refused_or_harmless() {
        let text = serde_json::to_string(&footprint()).unwrap();
        let digits: Vec<usize> = text.char_indices().filter(|(_, c)| c.is_ascii_digit()).map(|(at, _)| at).collect();
        let mut refused = 0;
        for at in digits {
            for with in ["9", "777", "-1"] {
                match read(&format!("{}{with}{}", &text[..at], &text[at + 1..])) {
                    Ok(footprint) => {
                        let arguments = Arguments { bytes: 4096, n: 16 };
                        let _ = footprint.check(&arguments, [2, 1, 1]);
                        let _ = footprint.violated_assumption(&arguments, [2, 1, 1]);
                    }
                    Err(_) => refused += 1,
                }
            }
        }
        assert!(refused > 100, "{refused}");
    }

    #[test]
    fn wide_ends_are_texts() {
        let unsigned = Interval { low: 0, high: u64::MAX.into() };
        for interval in [Interval::ANY, Interval::EMPTY, Interval::point(-7), unsigned] {
            let text = serde_json::to_string(&interval).unwrap();
            assert_eq!(serde_json::from_str::<Interval>(&text).unwrap(), interval, "{text}");
        }
        assert!(serde_json::from_str::<Interval>("[0, \"1e3\"]").is_err());
        let wide = format!("[0, \"{}\"]", i128::MAX);
        assert!(serde_json::from_str::<Interval>(&wide).is_err());
    }
}
