//! Unsupported expressions.
use tilewright::prelude::*;

#[kernel]
fn expressions(x: In<f32>, out: Out<f32>, n: i32) {
    let mut total = 0.0;
    let r = &total;
    *out = 1.0;
    println!("{}", total);
    assert!(n > 3);
    let v = vec![1, 2];
    let q = load(x)?;
    unsafe { store(out, 1.0) };
    let f = |a: Scalar<f32>| {
        total += a;
        a
    };
    let y = 1.0 + if n > 3 {
        total = 2.0;
        3.0
    } else {
        4.0
    };
    let z = helper(n, axis = 1);
}

fn helper(n: Scalar<i32>, _axis: i32) -> Scalar<i32> {
    n
}

fn main() {}
