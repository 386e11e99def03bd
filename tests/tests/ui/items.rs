//! Items of an aggregate are read: it has no others than its fields to assign.

use tilewright::prelude::*;

#[aggregate]
struct Pair {
    first: Tile<i32>,
    second: Tile<i32>,
}

impl std::ops::Index<usize> for Pair {
    type Output = Tile<i32>;
    fn index(&self, n: usize) -> &Tile<i32> {
        if n == 0 { &self.first } else { &self.second }
    }
}

#[kernel]
fn assigns_an_item(y: Out<i32>) {
    let mut pair = Pair { first: arange(0, 4), second: arange(0, 4) };
    pair[1] = full::<i32>([4], 42);
    store(y + arange(0, 4), pair[1]);
}

#[kernel]
fn adds_to_an_item(y: Out<i32>) {
    let mut pair = Pair { first: arange(0, 4), second: arange(0, 4) };
    pair[1] += 42;
    store(y + arange(0, 4), pair[1]);
}

fn main() {}
