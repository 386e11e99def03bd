//! Interval arithmetic over integers.

use crate::ir::{BinaryOp, CmpOp, DType};
use crate::num::int_range;
use serde::{Deserialize, Serialize};
use std::fmt;

/// The integers from `low` to `high`; empty if `low > high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "super::stored::StoredInterval", try_from = "super::stored::StoredInterval")]
pub struct Interval {
    pub low: i128,
    pub high: i128,
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.low == self.high {
            true => write!(f, "{}", self.low),
            false => write!(f, "({} to {})", self.low, self.high),
        }
    }
}

/// Exceeds every address; sums of a few of these do not overflow.
pub(super) const MAX_MAGNITUDE: i128 = 1 << 120;

impl Interval {
    pub const EMPTY: Interval = Interval { low: 1, high: 0 };
    /// Every integer in the supported range.
    pub const ANY: Interval = Interval { low: -MAX_MAGNITUDE, high: MAX_MAGNITUDE };

    pub fn point(n: i128) -> Interval {
        Interval { low: n, high: n }
    }

    /// All values of an integer type.
    pub fn of_type(dtype: DType) -> Interval {
        match dtype {
            DType::Bool => Interval { low: 0, high: 1 },
            d if d.is_int() => {
                let (low, high) = int_range(d);
                Interval { low, high }
            }
            _ => Interval::ANY,
        }
    }

    pub fn is_empty(self) -> bool {
        self.low > self.high
    }

    pub fn contains(self, other: Interval) -> bool {
        other.is_empty() || (self.low <= other.low && other.high <= self.high)
    }

    pub fn intersect(self, other: Interval) -> Interval {
        Interval { low: self.low.max(other.low), high: self.high.min(other.high) }
    }

    /// The smallest interval that contains both.
    pub fn hull(self, other: Interval) -> Interval {
        match (self.is_empty(), other.is_empty()) {
            (true, _) => other,
            (_, true) => self,
            _ => Interval { low: self.low.min(other.low), high: self.high.max(other.high) },
        }
    }

    /// These integers modulo 2ⁿ as values of an n-bit type: the full type if they are not contiguous there.
    pub fn wrap(self, dtype: DType) -> Interval {
        let all = Interval::of_type(dtype);
        if all.contains(self) {
            return self;
        }
        // Ends at MAX_MAGNITUDE are clamped: the actual ends are unknown, also modulo 2ⁿ.
        if !dtype.is_int() || self.low <= -MAX_MAGNITUDE || self.high >= MAX_MAGNITUDE {
            return all;
        }
        let values = all.high - all.low + 1;
        let turns = (self.low - all.low).div_euclid(values) * values;
        let wrapped = Interval { low: self.low - turns, high: self.high - turns };
        if all.contains(wrapped) { wrapped } else { all }
    }

    pub fn plus(self, other: Interval) -> Interval {
        self.bounded(other, |a, b| Interval { low: a.low + b.low, high: a.high + b.high })
    }

    pub fn minus(self, other: Interval) -> Interval {
        self.bounded(other, |a, b| Interval { low: a.low - b.high, high: a.high - b.low })
    }

    pub fn times(self, other: Interval) -> Interval {
        self.bounded(other, |a, b| {
            let product = |x: i128, y: i128| x.saturating_mul(y);
            Interval::around([
                product(a.low, b.low),
                product(a.low, b.high),
                product(a.high, b.low),
                product(a.high, b.high),
            ])
        })
    }

    /// Quotients rounded toward zero. 0 if the divisor is 0; any integer if it may be 0.
    pub fn quotient(self, other: Interval) -> Interval {
        if other == Interval::point(0) && !self.is_empty() {
            return other;
        }
        if !other.is_empty() && other.low <= 0 && other.high >= 0 {
            return Interval::ANY;
        }
        self.bounded(other, |a, b| Interval::around([a.low / b.low, a.low / b.high, a.high / b.low, a.high / b.high]))
    }

    /// Quotients rounded up. 0 if the divisor is 0; any integer if it may be 0.
    fn quotient_up(self, other: Interval) -> Interval {
        if other == Interval::point(0) && !self.is_empty() {
            return other;
        }
        if !other.is_empty() && other.low <= 0 && other.high >= 0 {
            return Interval::ANY;
        }
        let up = |a: i128, b: i128| a.div_euclid(b) + i128::from(a % b != 0 && b > 0);
        self.bounded(other, |a, b| {
            Interval::around([up(a.low, b.low), up(a.low, b.high), up(a.high, b.low), up(a.high, b.high)])
        })
    }

    /// Remainders with the sign of the dividend. 0 if the divisor is 0; any integer if it may be 0.
    fn remainder(self, other: Interval) -> Interval {
        if other == Interval::point(0) && !self.is_empty() {
            return other;
        }
        if !other.is_empty() && other.low <= 0 && other.high >= 0 {
            return Interval::ANY;
        }
        self.bounded(other, |a, b| {
            if a.low == a.high && b.low == b.high {
                return Interval::point(a.low % b.low);
            }
            let largest = b.low.abs().max(b.high.abs()) - 1;
            let smallest = b.low.abs().min(b.high.abs());
            // Dividends smaller than every divisor are their own remainders.
            if a.low >= 0 && a.high < smallest {
                return a;
            }
            let low = if a.low < 0 { (-largest).max(a.low) } else { 0 };
            let high = if a.high > 0 { largest.min(a.high) } else { 0 };
            Interval { low, high }
        })
    }

    /// Result of a binary op before wrapping; any integer if nothing better is known.
    pub fn binary(self, op: BinaryOp, other: Interval) -> Interval {
        let (a, b) = (self, other);
        if let (BinaryOp::And | BinaryOp::Or | BinaryOp::Xor, true, true) =
            (op, a == Interval::point(a.low), b == Interval::point(b.low))
        {
            return Interval::point(match op {
                BinaryOp::And => a.low & b.low,
                BinaryOp::Or => a.low | b.low,
                _ => a.low ^ b.low,
            });
        }
        let natural = |f: fn(Interval, Interval) -> Interval| match a.low >= 0 && b.low >= 0 {
            true => a.bounded(b, f),
            false => Interval::ANY,
        };
        match op {
            BinaryOp::Add => a.plus(b),
            BinaryOp::Sub => a.minus(b),
            BinaryOp::Mul => a.times(b),
            BinaryOp::Div => a.quotient(b),
            BinaryOp::CeilDiv => a.quotient_up(b),
            BinaryOp::Rem => a.remainder(b),
            BinaryOp::Min => a.bounded(b, |a, b| Interval { low: a.low.min(b.low), high: a.high.min(b.high) }),
            BinaryOp::Max => a.bounded(b, |a, b| Interval { low: a.low.max(b.low), high: a.high.max(b.high) }),
            // Some bits of the operand that is not negative.
            BinaryOp::And if a.is_empty() || b.is_empty() => Interval::EMPTY,
            BinaryOp::And => match (a.low >= 0, b.low >= 0) {
                (true, true) => Interval { low: 0, high: a.high.min(b.high) },
                (true, false) => Interval { low: 0, high: a.high },
                (false, true) => Interval { low: 0, high: b.high },
                (false, false) => Interval::ANY,
            },
            BinaryOp::Or | BinaryOp::Xor => natural(|a, b| Interval { low: 0, high: ones_above(a.high.max(b.high)) }),
            BinaryOp::Shl if b == Interval::point(b.low) && (0..63).contains(&b.low) => {
                a.times(Interval::point(1 << b.low))
            }
            BinaryOp::Shr if b == Interval::point(b.low) && (0..63).contains(&b.low) => {
                a.bounded(b, |a, b| Interval { low: a.low >> b.low, high: a.high >> b.low })
            }
            BinaryOp::Shl | BinaryOp::Shr | BinaryOp::MulHi | BinaryOp::Rescale => Interval::ANY,
        }
    }

    /// Result of a comparison: {0}, {1} or both.
    pub fn compare(self, op: CmpOp, other: Interval) -> Interval {
        let (a, b) = (self, other);
        let (always, never) = match op {
            CmpOp::Lt => (a.high < b.low, a.low >= b.high),
            CmpOp::Le => (a.high <= b.low, a.low > b.high),
            CmpOp::Gt => (a.low > b.high, a.high <= b.low),
            CmpOp::Ge => (a.low >= b.high, a.high < b.low),
            CmpOp::Eq => (a.low == b.high && a.high == b.low, a.high < b.low || a.low > b.high),
            CmpOp::Ne => (a.high < b.low || a.low > b.high, a.low == b.high && a.high == b.low),
        };
        match (a.is_empty() || b.is_empty(), always, never) {
            (true, ..) => Interval::EMPTY,
            (_, true, _) => Interval::point(1),
            (_, _, true) => Interval::point(0),
            _ => Interval::of_type(DType::Bool),
        }
    }

    /// `f` of two non-empty intervals, clamped to the supported range.
    fn bounded(self, other: Interval, f: impl Fn(Interval, Interval) -> Interval) -> Interval {
        match self.is_empty() || other.is_empty() {
            true => Interval::EMPTY,
            false => match f(self, other) {
                // Clamping would reverse ends that lie outside the supported range.
                all if all.low > MAX_MAGNITUDE || all.high < -MAX_MAGNITUDE => Interval::ANY,
                all => all.intersect(Interval::ANY),
            },
        }
    }

    fn around(corners: [i128; 4]) -> Interval {
        let [first, ..] = corners;
        let (low, high) = corners.iter().fold((first, first), |(low, high), &n| (low.min(n), high.max(n)));
        Interval { low, high }
    }
}

/// The smallest 2ᵏ − 1 that is at least `n`.
fn ones_above(n: i128) -> i128 {
    (n as u128 + 1).next_power_of_two() as i128 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPS: [BinaryOp; 13] = [
        BinaryOp::Add,
        BinaryOp::Sub,
        BinaryOp::Mul,
        BinaryOp::Div,
        BinaryOp::CeilDiv,
        BinaryOp::Rem,
        BinaryOp::Min,
        BinaryOp::Max,
        BinaryOp::And,
        BinaryOp::Or,
        BinaryOp::Xor,
        BinaryOp::Shl,
        BinaryOp::Shr,
    ];

    fn apply(op: BinaryOp, a: i128, b: i128) -> Option<i128> {
        Some(match op {
            BinaryOp::Add => a + b,
            BinaryOp::Sub => a - b,
            BinaryOp::Mul => a * b,
            BinaryOp::Div => a.checked_div(b).unwrap_or(0),
            BinaryOp::CeilDiv if b == 0 => 0,
            BinaryOp::CeilDiv => (a as f64 / b as f64).ceil() as i128,
            BinaryOp::Rem => a.checked_rem(b).unwrap_or(0),
            BinaryOp::Min => a.min(b),
            BinaryOp::Max => a.max(b),
            BinaryOp::And => a & b,
            BinaryOp::Or => a | b,
            BinaryOp::Xor => a ^ b,
            BinaryOp::Shl => a << u32::try_from(b).ok()?,
            BinaryOp::Shr => a >> u32::try_from(b).ok()?,
            BinaryOp::MulHi | BinaryOp::Rescale => return None,
        })
    }

    #[test]
    fn every_result_is_in_the_interval() {
        let intervals = || (-6..6).flat_map(|low| (low..6).map(move |high| Interval { low, high }));
        for op in OPS {
            for (a, b) in intervals().flat_map(|a| intervals().map(move |b| (a, b))) {
                let all = a.binary(op, b);
                for x in a.low..=a.high {
                    for y in b.low..=b.high {
                        if let Some(z) = apply(op, x, y) {
                            assert!((all.low..=all.high).contains(&z), "{x} {op:?} {y} = {z}, not in {all:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_comparison_is_in_its_interval() {
        let intervals = || (-3..3).flat_map(|low| (low..3).map(move |high| Interval { low, high }));
        for op in [CmpOp::Lt, CmpOp::Le, CmpOp::Gt, CmpOp::Ge, CmpOp::Eq, CmpOp::Ne] {
            for (a, b) in intervals().flat_map(|a| intervals().map(move |b| (a, b))) {
                let seen =
                    (a.low..=a.high).flat_map(|x| (b.low..=b.high).map(move |y| (x, y))).map(|(x, y)| match op {
                        CmpOp::Lt => x < y,
                        CmpOp::Le => x <= y,
                        CmpOp::Gt => x > y,
                        CmpOp::Ge => x >= y,
                        CmpOp::Eq => x == y,
                        CmpOp::Ne => x != y,
                    });
                let seen = seen.fold(Interval::EMPTY, |all, holds| all.hull(Interval::point(holds.into())));
                assert_eq!(a.compare(op, b), seen, "{a:?} {op:?} {b:?}");
            }
        }
    }

    #[test]
    fn simple_intervals_are_tight() {
        let (a, b) = (Interval { low: -3, high: 5 }, Interval { low: 2, high: 4 });
        assert_eq!(a.binary(BinaryOp::Mul, b), Interval { low: -12, high: 20 });
        assert_eq!(a.binary(BinaryOp::Div, b), Interval { low: -1, high: 2 });
        assert_eq!(Interval { low: 0, high: 9 }.binary(BinaryOp::Rem, b), Interval { low: 0, high: 3 });
        assert!(Interval::EMPTY.plus(a).is_empty());
    }

    #[test]
    fn overflowing_intervals_wrap_to_the_full_type() {
        let large = Interval { low: 0, high: 1 << 31 };
        assert_eq!(large.wrap(DType::I32), Interval::of_type(DType::I32));
        assert_eq!(large.wrap(DType::I64), large);
        assert_eq!(Interval::ANY.wrap(DType::I64), Interval::of_type(DType::I64));
        let cut = Interval { low: MAX_MAGNITUDE - 3, high: MAX_MAGNITUDE };
        assert_eq!(cut.wrap(DType::I32), Interval::of_type(DType::I32));
    }

    #[test]
    fn uniformly_wrapping_intervals_stay_exact() {
        for (n, dtype, wrapped) in [
            (1 << 31, DType::I32, -1 << 31),
            (2_500_000_000, DType::I32, 2_500_000_000i64 as i32 as i128),
            (-1, DType::U32, (1 << 32) - 1),
            (i128::from(i64::MIN) - 1, DType::I64, i128::from(i64::MAX)),
            (300, DType::I8, 44),
        ] {
            assert_eq!(Interval::point(n).wrap(dtype), Interval::point(wrapped), "{n} as {dtype}");
            let two = Interval { low: n, high: n + 1 };
            let all = Interval::of_type(dtype);
            let expected = if wrapped == all.high { all } else { Interval { low: wrapped, high: wrapped + 1 } };
            assert_eq!(two.wrap(dtype), expected, "{two:?} as {dtype}");
        }
    }
}
