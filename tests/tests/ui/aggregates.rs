//! Structs of values.

use tilewright::prelude::*;

#[aggregate]
struct Number {
    x: Tile<f32>,
    n: i32,
    size: usize,
    offset: isize,
    byte: u8,
    precision: Precision,
    #[constexpr = 3]
    three: usize,
    #[constexpr(bad)]
    bad: usize,
}

#[aggregate]
struct Constant {
    x: Tile<f32>,
    #[constexpr]
    byte: u8,
}

#[aggregate]
struct Unnamed(Tile<f32>);

#[aggregate]
struct Text {
    x: Tile<f32>,
    name: &'static str,
}

#[aggregate]
enum Either {
    One,
    Two,
}

struct Plain {
    x: Tile<f32>,
}

#[kernel]
fn carries_a_plain_struct(y: Out<f32>, n: i32) {
    let mut plain = Plain { x: zeros::<f32>([8]) };
    for i in range(0, n) {
        plain = Plain { x: plain.x + 1.0 };
    }
    store(y + arange(0, 8), plain.x);
}

fn main() {}
