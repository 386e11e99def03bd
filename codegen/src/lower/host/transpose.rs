//! Transposes a square of vectors in registers.

use super::writer::{Writer, vector};

/// The columns of the square with these rows. The number of rows is the number of lanes, a power of two.
///
/// Eklundh's method takes log₂ n rounds. Round k swaps, between rows that differ in bit k of their index, the lanes
/// that differ in bit k of theirs.
pub fn transpose(w: &mut Writer, ty: &str, rows: &[String]) -> Vec<String> {
    let n = rows.len();
    let vty = vector(ty, n);
    let mut rows = rows.to_vec();
    let mut bit = 1;
    while bit < n {
        let keep = shuffle_mask(n, |lane| if lane & bit == 0 { lane } else { n + (lane ^ bit) });
        let swap = shuffle_mask(n, |lane| if lane & bit == 0 { lane | bit } else { n + lane });
        for row in (0..n).filter(|row| row & bit == 0) {
            let (a, b) = (rows[row].clone(), rows[row | bit].clone());
            rows[row] = w.inst(format!("shufflevector {vty} {a}, {vty} {b}, {keep}"));
            rows[row | bit] = w.inst(format!("shufflevector {vty} {a}, {vty} {b}, {swap}"));
        }
        bit *= 2;
    }
    rows
}

fn shuffle_mask(n: usize, lane: impl Fn(usize) -> usize) -> String {
    let items: Vec<String> = (0..n).map(|i| format!("i32 {}", lane(i))).collect();
    format!("<{n} x i32> <{}>", items.join(", "))
}
