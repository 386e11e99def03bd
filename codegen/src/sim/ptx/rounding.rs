//! Directed rounding: starts from the nearest value of a type, and steps toward the exact result if the mode asks for
//! it.

use super::Name;
use crate::ir::DType;
use crate::num;
use std::cmp::Ordering;

/// A rounding mode.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
}

impl Rounding {
    /// The rounding mode (of a float or integer result) that the name has; `None` without one.
    pub fn of(name: &Name) -> Option<Rounding> {
        name.modifiers.iter().find_map(|m| match m.as_str() {
            "rn" | "rni" => Some(Rounding::Nearest),
            "rz" | "rzi" => Some(Rounding::Zero),
            "rm" | "rmi" => Some(Rounding::Down),
            "rp" | "rpi" => Some(Rounding::Up),
            _ => None,
        })
    }

    pub fn to_integer(self, x: f64) -> f64 {
        match self {
            Rounding::Nearest => x.round_ties_even(),
            Rounding::Zero => x.trunc(),
            Rounding::Down => x.floor(),
            Rounding::Up => x.ceil(),
        }
    }

    /// Rounds a value to the type.
    pub fn encode(self, dtype: DType, x: f64) -> u64 {
        let nearest = num::encode(dtype, x);
        self.step(dtype, nearest, x.partial_cmp(&num::decode(dtype, nearest)).unwrap_or(Ordering::Equal))
    }

    /// Rounds, given the nearest element and how the exact result compares to it.
    pub fn step(self, dtype: DType, nearest: u64, exact: Ordering) -> u64 {
        let negative = nearest >> (dtype.bits() - 1) & 1 == 1;
        let (lower, higher) = match negative {
            true => (nearest.wrapping_add(1), nearest.wrapping_sub(1)),
            false => (nearest.wrapping_sub(1), nearest.wrapping_add(1)),
        };
        match (self, exact) {
            (Rounding::Down, Ordering::Less) => lower,
            (Rounding::Up, Ordering::Greater) => higher,
            (Rounding::Zero, Ordering::Less) if !negative => lower,
            (Rounding::Zero, Ordering::Greater) if negative => higher,
            _ => nearest,
        }
    }
}

/// Compares the exact result of an operation with `found`, a finite value or the infinity that it overflows to. `Equal`
/// if operands or results are NaN or exact infinities.
pub fn compare_exact(op: &str, x: &[f64], found: f64) -> Ordering {
    let division_by_zero = op == "div" && x[1] == 0.0;
    if x.iter().any(|x| !x.is_finite()) || found.is_nan() || division_by_zero {
        return Ordering::Equal;
    }
    if found.is_infinite() {
        return 0.0.partial_cmp(&found).unwrap_or(Ordering::Equal);
    }
    match op {
        "add" => sign_of_sum(&[[x[0], 1.0], [x[1], 1.0], [found, -1.0]]),
        "mul" => sign_of_sum(&[[x[0], x[1]], [found, -1.0]]),
        "fma" => sign_of_sum(&[[x[0], x[1]], [x[2], 1.0], [found, -1.0]]),
        "sqrt" => sign_of_sum(&[[x[0], 1.0], [found, -found]]),
        "div" => {
            let remainder = sign_of_sum(&[[x[0], 1.0], [found, -x[1]]]);
            if x[1] < 0.0 { remainder.reverse() } else { remainder }
        }
        _ => panic!("internal error: `{op}` has no directed rounding"),
    }
}

/// Words of a fixed-point number that holds every product of two f64 exactly, and sums of a few: in units of 2^-2148,
/// up to 2^2050.
const WORDS: usize = 68;

/// The sign of a sum of products of finite values.
fn sign_of_sum(products: &[[f64; 2]]) -> Ordering {
    let mut sum = [0u64; WORDS];
    for &[a, b] in products {
        let ((m, e), (n, f)) = (split(a), split(b));
        let shift = (e + f + 2 * 1074) as usize;
        let product = u128::from(m) * u128::from(n);
        // 128 bits span up to three words.
        let (at, by) = (shift / 64, shift % 64);
        let (low, high) = (product << by, if by == 0 { 0 } else { product >> (128 - by) });
        let words = [low as u64, (low >> 64) as u64, high as u64];
        let negative = (a < 0.0) != (b < 0.0);
        let mut carry = false;
        for (i, word) in sum.iter_mut().enumerate().skip(at) {
            let other = words.get(i - at).copied().unwrap_or(0);
            let step = if negative { u64::borrowing_sub } else { u64::carrying_add };
            (*word, carry) = step(*word, other, carry);
        }
    }
    match (sum[WORDS - 1] >> 63, sum.iter().all(|&word| word == 0)) {
        (1, _) => Ordering::Less,
        (_, true) => Ordering::Equal,
        _ => Ordering::Greater,
    }
}

/// Splits |x| into m·2^e.
fn split(x: f64) -> (u64, i32) {
    let field = (x.to_bits() >> 52 & 0x7FF) as i32;
    let fraction = x.to_bits() & ((1 << 52) - 1);
    (if field == 0 { fraction } else { fraction | 1 << 52 }, field.max(1) - 1075)
}
