//! Axis analysis: contiguity, divisibility, constancy and ranges of integer and pointer values, per dimension of a tile
//! (as in Triton's `AxisInfo`).
//!
//! Of tiles whose extents are powers of two: `passes::split_tiles` comes first.
//!
//! Vectorization and coalescing depend on it: a run of `contiguity` neighbors whose first address is a multiple of 16
//! bytes can be one 128-bit access if the mask is constant over the run (`constancy`).
//!
//! Integer arithmetic wraps, and so may runs: an i32 run that begins below 2^31 and is widened afterwards continues
//! 2^32 lower. Contiguity therefore holds modulo 2^32 (modulo the width of narrower types). It holds without wrapping
//! for runs no longer than their divisor ([`AxisInfo::non_wrapping_run`]), which suffices for accesses. Transfer
//! functions that depend on signs (`rem`, `div`) use the range.

mod assumed;
mod transfer;

#[cfg(test)]
mod tests;

use super::dataflow::{Facts, Forward};
use super::lattice::Lattice;
use crate::interp::Tile;
use crate::ir::{Elem, Func, OpId, Type, Value};
use crate::num;

/// Largest tracked divisor; the divisor of zero.
const MAX_DIVISOR: u64 = 1 << 32;

/// Facts about one value, per dimension of its tile (one entry for scalars). The elements of a run differ only in the
/// index of that dimension; facts about runs hold for all indices of the other dimensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AxisInfo {
    /// Length of aligned runs, a power of two, in which each element is the one before plus one (for pointers: one
    /// element further), modulo 2^32 beyond [`AxisInfo::non_wrapping_run`].
    pub contiguity: Vec<u64>,
    /// Power of two that divides the first element of each contiguous run (for pointers: its byte address). Shorter
    /// runs start inside longer ones, so code that reduces `contiguity` must use [`AxisInfo::divisor_at`].
    pub divisibility: Vec<u64>,
    /// Length of aligned runs, a power of two, of equal elements.
    pub constancy: Vec<u64>,
    /// Smallest and largest element; the full range for floats and pointers, whose range is not tracked.
    pub range: (i128, i128),
    /// Increment inside a contiguous run: 1; for pointers the bytes of an element.
    unit: u64,
    /// Width of an element in bits.
    bits: u32,
}

/// Smallest and largest value of an element type; all of i128 for floats and pointers.
fn full_range(elem: Option<Elem>) -> (i128, i128) {
    match elem {
        Some(Elem::Num(d)) if !d.is_float() => num::int_range(d),
        _ => (i128::MIN, i128::MAX),
    }
}

impl AxisInfo {
    /// No facts about a value of this type.
    pub fn unknown(ty: &Type) -> AxisInfo {
        let (n, elem) = (ty.shape().len().max(1), ty.elem());
        AxisInfo {
            contiguity: vec![1; n],
            divisibility: vec![1; n],
            constancy: vec![1; n],
            range: full_range(elem),
            unit: elem.and_then(Elem::pointee).map_or(1, |d| d.bytes() as u64),
            bits: elem.map_or(64, Elem::bits) as u32,
        }
    }

    /// Facts about elements that are all equal, multiples of `divisor`, and in `range`.
    fn uniform(ty: &Type, divisor: u64, range: (i128, i128)) -> AxisInfo {
        let mut info = AxisInfo::unknown(ty);
        info.divisibility.fill(divisor);
        if !ty.shape().is_empty() {
            info.constancy = ty.shape().iter().map(|&n| n as u64).collect();
        }
        info.range = range;
        info
    }

    /// Facts about elements that all equal `n`.
    fn number(ty: &Type, n: i128) -> AxisInfo {
        AxisInfo::uniform(ty, divisor(n), (n, n))
    }

    fn rank(&self) -> usize {
        self.contiguity.len()
    }

    /// The value, if it is one known integer.
    pub fn constant(&self) -> Option<i64> {
        let (low, high) = self.range;
        i64::try_from(low).ok().filter(|_| low == high)
    }

    /// Divisor of the first elements of aligned runs of length `run` along a dimension. Such runs start anywhere inside
    /// longer contiguous runs.
    pub fn divisor_at(&self, dim: usize, run: u64) -> u64 {
        let d = self.divisibility[dim];
        if self.contiguity[dim] <= run { d } else { d.min(run * self.unit) }
    }

    /// Divisor of every element, whatever its position in a run.
    pub fn divisor_of_all(&self) -> u64 {
        (0..self.rank()).map(|dim| self.divisor_at(dim, 1)).max().unwrap_or(1)
    }

    /// Length of the aligned runs along a dimension that are contiguous without wrapping around and whose first element
    /// is a multiple of the length.
    pub fn non_wrapping_run(&self, dim: usize) -> u64 {
        let aligned = self.contiguity[dim].min(self.divisibility[dim] / self.unit);
        aligned.min(1 << (self.bits - 1)).max(1)
    }

    /// The same facts for shorter runs, whose lengths divide the present ones.
    fn shortened(mut self, contiguity: Vec<u64>) -> AxisInfo {
        self.divisibility = contiguity.iter().enumerate().map(|(i, &c)| self.divisor_at(i, c)).collect();
        self.contiguity = contiguity;
        self
    }
}

impl Lattice for AxisInfo {
    type Concrete = Tile;

    fn meet(&self, other: &AxisInfo) -> AxisInfo {
        let contiguity = zip(&self.contiguity, &other.contiguity, u64::min);
        let at = |i: usize, c: u64| self.divisor_at(i, c).min(other.divisor_at(i, c));
        AxisInfo {
            divisibility: contiguity.iter().enumerate().map(|(i, &c)| at(i, c)).collect(),
            contiguity,
            constancy: zip(&self.constancy, &other.constancy, u64::min),
            range: (self.range.0.min(other.range.0), self.range.1.max(other.range.1)),
            unit: self.unit,
            bits: self.bits,
        }
    }

    fn check(&self, tile: &Tile) -> Result<(), String> {
        let Some(values) = tile.ints() else { return self.check_equal(tile) };
        let modulus = (1i128 << self.bits.min(32)) * self.unit as i128;
        let shape: &[usize] = if tile.shape.is_empty() { &[1] } else { &tile.shape };
        for (i, &value) in values.iter().enumerate() {
            if !(self.range.0..=self.range.1).contains(&value) {
                return Err(format!("element {i} is {value}, outside {:?}", self.range));
            }
            let mut stride = 1;
            for dim in (0..shape.len()).rev() {
                let at = (i / stride % shape[dim]) as u64;
                let follows = !at.is_multiple_of(self.contiguity[dim]);
                if follows {
                    let before = values[i - stride];
                    let off = value - before - self.unit as i128;
                    let exact = !at.is_multiple_of(self.non_wrapping_run(dim));
                    if (exact && off != 0) || off.rem_euclid(modulus) != 0 {
                        return Err(format!("element {i} is {value}, not contiguous with {before} in dimension {dim}"));
                    }
                } else if value.rem_euclid(self.divisibility[dim] as i128) != 0 {
                    let d = self.divisibility[dim];
                    return Err(format!("element {i} is {value}, not a multiple of {d}, in dimension {dim}"));
                }
                stride *= shape[dim];
            }
        }
        self.check_equal(tile)
    }
}

impl AxisInfo {
    fn check_equal(&self, tile: &Tile) -> Result<(), String> {
        let shape: &[usize] = if tile.shape.is_empty() { &[1] } else { &tile.shape };
        for i in 0..tile.bits.len() {
            let mut stride = 1;
            for dim in (0..shape.len()).rev() {
                let at = (i / stride % shape[dim]) as u64;
                if !at.is_multiple_of(self.constancy[dim]) && tile.bits[i] != tile.bits[i - stride] {
                    return Err(format!(
                        "element {i} differs from the one before in dimension {dim}, in a constant run"
                    ));
                }
                stride *= shape[dim];
            }
        }
        Ok(())
    }
}

fn zip(a: &[u64], b: &[u64], f: impl Fn(u64, u64) -> u64) -> Vec<u64> {
    a.iter().zip(b).map(|(&a, &b)| f(a, b)).collect()
}

/// Largest power of two that divides `n`, at most [`MAX_DIVISOR`]; zero is divisible by everything.
fn divisor(n: i128) -> u64 {
    if n == 0 { MAX_DIVISOR } else { 1u64 << n.trailing_zeros().min(32) }
}

/// Facts about all values of a function.
pub struct AxisAnalysis {
    facts: Facts<AxisInfo>,
}

impl AxisAnalysis {
    /// Analyzes the function.
    pub fn new(func: &Func) -> AxisAnalysis {
        let arguments = func.args.iter().zip(&func.block(func.body).params).map(|(arg, &v)| {
            let ty = func.ty(v);
            Some(match arg.equal_to {
                Some(n) => AxisInfo::number(ty, n as i128),
                None => AxisInfo::uniform(ty, divisor(arg.divisible_by as i128), assumed::range(func, v)),
            })
        });
        AxisAnalysis { facts: Facts::of(func, &Axis { func }, arguments.collect()) }
    }

    /// Facts about a value.
    pub fn get(&self, func: &Func, v: Value) -> AxisInfo {
        Axis { func }.get(&self.facts, v)
    }

    /// Largest known power of two that divides a scalar (for pointers: its byte address).
    pub fn scalar_divisor(&self, func: &Func, v: Value) -> u64 {
        self.get(func, v).divisibility[0]
    }

    /// The constant that a scalar is known to equal.
    pub fn scalar_constant(&self, func: &Func, v: Value) -> Option<i64> {
        self.get(func, v).constant()
    }
}

/// The analysis of one function.
struct Axis<'f> {
    func: &'f Func,
}

impl Axis<'_> {
    fn get(&self, facts: &Facts<AxisInfo>, v: Value) -> AxisInfo {
        facts.get(v).cloned().unwrap_or_else(|| AxisInfo::unknown(self.func.ty(v)))
    }
}

impl Forward for Axis<'_> {
    type Fact = AxisInfo;

    fn transfer(&self, facts: &Facts<AxisInfo>, id: OpId) -> Option<AxisInfo> {
        self.result(facts, id)
    }

    fn index(&self, facts: &Facts<AxisInfo>, id: OpId) -> Option<AxisInfo> {
        let data = self.func.op(id);
        let [lower, upper, step] = [0, 1, 2].map(|i| self.get(facts, data.operands[i]));
        let (first, end) = (lower.range.0, upper.range.1);
        let divisor = lower.divisibility[0].min(step.divisibility[0]);
        // The body runs only with an index below the upper bound.
        Some(AxisInfo::uniform(self.func.ty(data.operands[0]), divisor, (first, first.max(end - 1))))
    }

    /// Ranges could grow in every round; the other facts take at most 33 values each.
    fn carried(&self, param: Value, init: AxisInfo) -> AxisInfo {
        AxisInfo { range: full_range(self.func.ty(param).elem()), ..init }
    }
}
