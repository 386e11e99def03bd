//! Unsupported control flow.
use tilewright::prelude::*;

#[kernel]
fn loops(out: Out<f32>, n: i32) {
    for i in 0..n {
        store(out + i, 1.0);
    }
    for i in range(0, n) {
        if i > 3 {
            break;
        }
        if i > 2 {
            continue;
        }
        if i > 1 {
            return;
        }
    }
    loop {
        store(out, 1.0);
    }
    'outer: for i in range(0, n) {
        store(out + i, 1.0);
    }
    for (i, j) in range(0, n) {
        store(out + i, 1.0);
    }
}

#[kernel]
fn patterns(out: Out<f32>, n: i32) {
    let x;
    x = 1.0;
    if let Some(y) = Some(n) {
        store(out, 1.0);
    }
    let Some(z) = Some(n) else { return };
}

#[kernel]
fn captured_name(out: Out<f32>, n: i32) {
    let x = 1.0;
    if n > 0 {
        let x = 2.0;
        if n > 1 {
            return;
        }
    }
    store(out, x);
}

const LIMIT: i32 = 5;

mod other {
    pub const LIMIT: i32 = 50;
}

#[kernel]
fn captured_items(out: Out<f32>, n: i32, #[constexpr] flag: bool) {
    if flag {
        const LIMIT: i32 = 100;
        if n > LIMIT {
            return;
        }
    }
    if n > 1 {
        use other::*;
        if n > LIMIT {
            return;
        }
    }
    store(out, LIMIT);
}

fn main() {}
