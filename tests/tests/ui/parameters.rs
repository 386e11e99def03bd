//! Tuples among the parameters, and memory that may be left out.

use tilewright::prelude::*;

#[kernel]
fn tuple_with_default(y: Out<i32>, #[constexpr = 3] n: (usize, usize)) {
    store(y, scalar::<i32>(n.0));
}

#[kernel]
fn tuple_of_slices(y: Out<i32>, n: (i32, &[i32])) {
    store(y, n.0);
}

#[kernel]
fn two_of_a_name(y: Out<i32>, n: (i32, i32), n_1: i32) {
    store(y, n.1 + n_1);
}

#[kernel]
fn optional_number(y: Out<i32>, n: Option<i32>) {
    store(y, 1);
}

#[kernel]
fn option_of_a_value(y: Out<i32>, n: i32) {
    if let 3 = n {
        store(y, 1);
    }
}

fn main() {}
