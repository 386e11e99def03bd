//! Integer arithmetic and bit operations.

use super::{Kind, Name, Pattern};
use crate::sim::value::{mask, signed};

pub fn compare(comparison: &str, kind: Kind, x: u64, y: u64) -> Option<bool> {
    let bits = kind.bits();
    let order = match kind {
        Kind::Signed(_) => signed(x, bits).cmp(&signed(y, bits)),
        _ => x.cmp(&y),
    };
    Some(match comparison {
        "eq" => order.is_eq(),
        "ne" => order.is_ne(),
        "lt" | "lo" => order.is_lt(),
        "le" | "ls" => order.is_le(),
        "gt" | "hi" => order.is_gt(),
        "ge" | "hs" => order.is_ge(),
        _ => return None,
    })
}

/// The supported instructions.
pub const PATTERNS: &[Pattern] = &[
    Pattern { ops: "add sub", types: "u16 s16 u32 u64 s64", modifiers: "" },
    Pattern { ops: "add sub", types: "s32", modifiers: "sat?" },
    Pattern { ops: "mul mad", types: "u16 s16 u32 s32", modifiers: "lo|hi|wide" },
    Pattern { ops: "mul mad", types: "u64 s64", modifiers: "lo|hi" },
    Pattern { ops: "mul24", types: "u32 s32", modifiers: "lo" },
    Pattern { ops: "div rem min max sad", types: "u16 s16 u32 s32 u64 s64", modifiers: "" },
    Pattern { ops: "abs neg", types: "s16 s32 s64", modifiers: "" },
    Pattern { ops: "and or xor not", types: "pred b16 b32 b64", modifiers: "" },
    Pattern { ops: "cnot shl", types: "b16 b32 b64", modifiers: "" },
    Pattern { ops: "shr", types: "b16 u16 s16 b32 u32 s32 b64 u64 s64", modifiers: "" },
    Pattern { ops: "shf", types: "b32", modifiers: "l|r wrap|clamp" },
    Pattern { ops: "lop3 prmt", types: "b32", modifiers: "" },
    Pattern { ops: "bfe", types: "u32 s32 u64 s64", modifiers: "" },
    Pattern { ops: "bfind", types: "u32 s32 u64 s64", modifiers: "shiftamt?" },
    Pattern { ops: "bfi popc clz brev", types: "b32 b64", modifiers: "" },
    Pattern { ops: "dp4a", types: "u32 s32", modifiers: "" },
];

/// Executes an instruction; `None` if it is not supported.
pub fn execute(name: &Name, kind: Kind, values: &[u64]) -> Option<u64> {
    let bits = kind.bits();
    let is_signed = matches!(kind, Kind::Signed(_));
    let wide = |v: u64| if is_signed { i128::from(signed(v, bits)) } else { i128::from(v & mask(bits)) };
    let clamp = |x: i128| {
        let (low, high) = (-(1i128 << (bits - 1)), (1i128 << (bits - 1)) - 1);
        if name.has("sat") && is_signed { x.clamp(low, high) } else { x }
    };
    let result = match (name.op.as_str(), values) {
        ("add", &[a, b]) => clamp(wide(a) + wide(b)) as u64,
        ("sub", &[a, b]) => clamp(wide(a) - wide(b)) as u64,
        ("mul", &[a, b]) => return product(name, wide(a) * wide(b), bits),
        ("mul24", &[a, b]) => {
            let low = |v: u64| if is_signed { i128::from(signed(v, 24)) } else { i128::from(v & 0xFF_FFFF) };
            (low(a) * low(b)) as u64
        }
        ("mad", &[a, b, c]) if name.has("wide") => {
            return Some((wide(a) * wide(b)).wrapping_add(i128::from(c)) as u64 & mask(2 * bits));
        }
        ("mad", &[a, b, c]) => product(name, wide(a) * wide(b), bits)?.wrapping_add(c),
        // The ISA leaves division by zero unspecified.
        ("div", &[a, b]) => wide(a).checked_div(wide(b)).unwrap_or(-1) as u64,
        ("rem", &[a, b]) => wide(a).checked_rem(wide(b)).unwrap_or(wide(a)) as u64,
        ("min", &[a, b]) => wide(a).min(wide(b)) as u64,
        ("max", &[a, b]) => wide(a).max(wide(b)) as u64,
        ("abs", &[a]) => wide(a).unsigned_abs() as u64,
        ("neg", &[a]) => (-wide(a)) as u64,
        ("sad", &[a, b, c]) => ((wide(a) - wide(b)).unsigned_abs() as u64).wrapping_add(c),
        ("and", &[a, b]) => a & b,
        ("or", &[a, b]) => a | b,
        ("xor", &[a, b]) => a ^ b,
        ("not", &[a]) => !a,
        ("cnot", &[a]) => u64::from(a == 0),
        // Shift amounts are clamped to the width.
        ("shl", &[a, by]) => {
            if by >= u64::from(bits) {
                0
            } else {
                a << by
            }
        }
        ("shr", &[a, by]) => (wide(a) >> by.min(u64::from(bits))) as u64,
        ("shf", &[low, high, by]) => return shift_funnel(name, low, high, by),
        ("lop3", &[a, b, c, table]) => return Some(lop3(a, b, c, table)),
        ("prmt", &[a, b, selector]) => return Some(permute(a, b, selector)),
        ("bfe", &[a, from, count]) => return Some(extract(kind, a, from & 0xFF, count & 0xFF)),
        ("bfi", &[field, into, from, count]) => {
            let (from, count) = ((from & 0xFF) as u32, (count & 0xFF) as u32);
            let hole = if from >= bits { 0 } else { mask(count.min(bits)) << from & mask(bits) };
            into & !hole | if from >= bits { 0 } else { field << from & hole }
        }
        ("bfind", &[a]) => {
            let a = if is_signed && signed(a, bits) < 0 { !a & mask(bits) } else { a };
            match (a, name.has("shiftamt")) {
                (0, _) => return Some(0xFFFF_FFFF),
                (a, false) => u64::from(63 - a.leading_zeros()),
                (a, true) => u64::from(bits - 1 - (63 - a.leading_zeros())),
            }
        }
        ("popc", &[a]) => u64::from(a.count_ones()),
        ("clz", &[a]) => u64::from(a.leading_zeros() - (64 - bits)),
        ("brev", &[a]) => a.reverse_bits() >> (64 - bits),
        ("dp4a", &[a, b, c]) => {
            let kinds = [name.kinds.first()?, name.kinds.get(1)?];
            let part = |v: u64, i: u32, kind: &Kind| {
                let byte = v >> (8 * i) & 0xFF;
                if matches!(kind, Kind::Signed(_)) { signed(byte, 8) } else { byte as i64 }
            };
            (0..4).fold(signed(c, 32), |sum, i| sum + part(a, i, kinds[0]) * part(b, i, kinds[1])) as u64
        }
        _ => return None,
    };
    Some(result & mask(bits))
}

/// The low, high or wide part of a product, by the modifiers.
fn product(name: &Name, product: i128, bits: u32) -> Option<u64> {
    if name.has("wide") {
        return Some(product as u64 & mask(2 * bits));
    }
    if name.has("hi") {
        return Some((product >> bits) as u64 & mask(bits));
    }
    name.has("lo").then_some(product as u64 & mask(bits))
}

fn shift_funnel(name: &Name, low: u64, high: u64, by: u64) -> Option<u64> {
    let by = if name.has("wrap") { by & 31 } else { by.min(32) };
    let both = high << 32 | low;
    if name.has("l") {
        return Some(if by == 32 { low } else { both << by >> 32 & 0xFFFF_FFFF });
    }
    name.has("r").then_some(both >> by & 0xFFFF_FFFF)
}

fn lop3(a: u64, b: u64, c: u64, table: u64) -> u64 {
    (0..32).fold(0, |out, i| {
        let index = (a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1;
        out | (table >> index & 1) << i
    })
}

/// The default mode of `prmt`: each nibble of the selector selects a byte, or replicates its sign.
fn permute(a: u64, b: u64, selector: u64) -> u64 {
    let bytes = b << 32 | a;
    (0..4).fold(0, |out, i| {
        let nibble = selector >> (4 * i) & 0xF;
        let byte = bytes >> (8 * (nibble & 7)) & 0xFF;
        let byte = if nibble & 8 == 0 { byte } else { if byte & 0x80 != 0 { 0xFF } else { 0 } };
        out | byte << (8 * i)
    })
}

fn extract(kind: Kind, a: u64, from: u64, count: u64) -> u64 {
    let bits = u64::from(kind.bits());
    let sign = match kind {
        Kind::Signed(_) if count > 0 => a >> (from + count - 1).min(bits - 1) & 1,
        _ => 0,
    };
    let at = |i: u64| if i < count && from + i < bits { a >> (from + i) & 1 } else { sign };
    (0..bits).fold(0, |out, i| out | at(i) << i)
}
