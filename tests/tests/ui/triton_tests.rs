//! Mistakes of which Triton has tests.

use tilewright::prelude::*;

#[kernel]
fn specialized_constant(y: Out<i32>, #[constexpr] #[no_specialize] n: usize) {
    store(y, scalar::<i32>(n));
}

#[kernel]
fn assigned_index(y: Out<i32>, n: i32) {
    for i in range(0, n) {
        store(y + i, i);
        i += 1;
    }
}

fn main() {}
