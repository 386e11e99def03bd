//! Elementwise ops on whole tiles.

use super::arith;
use super::value::Tile;
use crate::ir::{BinaryOp, CmpOp, DType, Elem, UnaryOp};
use crate::num;

pub(super) fn unary(op: UnaryOp, x: &Tile) -> Tile {
    x.map(x.elem, |x_bits| arith::unary(op, x.dtype(), x_bits))
}

pub(super) fn binary(op: BinaryOp, a: &Tile, b: &Tile) -> Tile {
    a.zip(b, a.elem, |x, y| arith::binary(op, a.dtype(), x, y))
}

pub(super) fn cmp(op: CmpOp, a: &Tile, b: &Tile) -> Tile {
    a.zip(b, DType::Bool, |x, y| arith::compare(op, a.elem.num(), x, y) as u64)
}

pub(super) fn fma(a: &Tile, b: &Tile, c: &Tile) -> Tile {
    let factors = a.bits.iter().zip(&b.bits).zip(&c.bits);
    let bits = factors.map(|((&x, &y), &z)| num::fused_multiply_add(a.dtype(), x, y, z)).collect();
    Tile { bits, ..a.clone() }
}

pub(super) fn select(condition: &Tile, a: &Tile, b: &Tile) -> Tile {
    let sides = a.bits.iter().zip(&b.bits);
    let bits = condition.bits.iter().zip(sides).map(|(&c, (&x, &y))| if c != 0 { x } else { y }).collect();
    Tile { bits, ..a.clone() }
}

pub(super) fn cast(x: &Tile, to: DType) -> Tile {
    x.map(to, |bits| num::convert(x.dtype(), to, bits))
}

pub(super) fn bitcast(x: &Tile, to: Elem) -> Tile {
    x.map(to, |bits| bits)
}

/// Checks the facts stated by a `hint`: groups of `contiguous` neighbors along the last dimension increase by one (by
/// one element for pointers), and the first of each run is a multiple of `divisible` (in bytes for pointers). Without
/// `contiguous`, runs are those of the actual values. No element is below `at_least`.
pub(super) fn hint(tile: &Tile, divisible: i64, contiguous: Option<i64>, at_least: Option<i64>) -> Result<(), String> {
    let values = tile.ints().unwrap_or_default();
    let unit = tile.elem.pointee().map_or(1, |d| d.bytes() as i128);
    let row = tile.shape.last().copied().unwrap_or(1);
    for (i, &value) in values.iter().enumerate() {
        let follows = i % row != 0 && value == values[i - 1] + unit;
        let starts = contiguous.map_or(!follows, |n| (i % row) as i64 % n == 0);
        if !starts && !follows {
            return Err(format!(
                "element {i} is {value}, not contiguous with {}, which violates the hint",
                values[i - 1]
            ));
        }
        if starts && value % divisible as i128 != 0 {
            return Err(format!("element {i} is {value}, not a multiple of {divisible}, which violates the hint"));
        }
        if let Some(least) = at_least.filter(|&least| value < least.into()) {
            return Err(format!("element {i} is {value}, below {least}, which violates the hint"));
        }
    }
    Ok(())
}

/// The text that `device_print` prints for a tile: the elements of each row in brackets.
pub(super) fn display(tile: &Tile) -> String {
    let element = |bits: u64| match tile.elem {
        Elem::Ptr(_) => format!("{bits:#x}"),
        Elem::Num(DType::Bool) => (bits != 0).to_string(),
        Elem::Num(d) if d.is_float() => num::decode(d, bits).to_string(),
        Elem::Num(d) => num::decode_int(d, bits).to_string(),
    };
    nested(&tile.shape, &tile.bits.iter().map(|&b| element(b)).collect::<Vec<_>>())
}

fn nested(shape: &[usize], elements: &[String]) -> String {
    match shape.split_first() {
        None => elements[0].clone(),
        Some((&n, rest)) => {
            let parts: Vec<String> = elements.chunks(elements.len() / n).map(|c| nested(rest, c)).collect();
            format!("[{}]", parts.join(", "))
        }
    }
}
