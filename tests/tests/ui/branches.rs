//! Arms that do not fit together, and conditions that are no constants.
use tilewright::prelude::*;

#[kernel]
fn run_time_match(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] mode: usize) {
    let factor = match n {
        _ => load(x),
    };
    let guarded = match mode {
        0 if n > 0 => 1.0,
        _ => 2.0,
    };
    let panics = if n > 3 { load(x) } else { panic!("too small") };
    store(out, factor + guarded + panics);
}

#[kernel]
fn types_of_arms(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] mode: usize) {
    let a = match mode {
        0 => load(x),
        1 => 0,
        _ => load(x) > 0.0,
    };
    let b = if mode == 0 { zeros::<f32>([16]) } else { zeros::<i32>([16]) };
    let c: f32 = if n > 0 { 1.0 } else { 2.0 };
    let mut pair = (load(x), n);
    pair = (0, 1.0);
    let mut count = 0;
    for i in static_range(0, 4) {
        if n > i {
            count = n;
        }
    }
    store(out, load(x));
}

#[kernel]
fn without_else(x: In<f32>, out: Out<f32>, n: i32) {
    let value = if n > 0 { load(x) };
    let total = 1.0 + {
        value = 2.0;
        value
    };
    store(out, total);
}

#[kernel]
fn not_mutable(x: In<f32>, out: Out<f32>, n: i32) {
    let total = 0.0;
    for i in range(0, n) {
        total += load(x + i);
        total += 1.0;
        n = 3;
    }
    let (a, mut b) = (1.0, 2.0);
    if n > 0 {
        (a, b) = (b, a);
    }
    store(out, total);
}

#[kernel]
fn unused_values(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] mode: usize) {
    let mut total = load(x);
    if n > 0 {
        total * 2.0
    }
    match mode {
        0 => load(x),
        _ => total = 1.0,
    }
    for i in range(0, n) {
        load(x + i)
    }
    store(out, total);
}

#[kernel]
fn stale_closures(x: In<f32>, out: Out<f32>, n: i32) {
    let mut total = load(x);
    let scaled = |factor: f32| total * factor;
    if n > 0 {
        total = 1.0;
    }
    let mut sum = load(x);
    let more = |x: Scalar<f32>| sum + x;
    for i in range(0, n) {
        sum = more(load(x + i));
    }
    store(out, scaled(2.0) + sum);
}

#[kernel]
fn stale_closures_in_branches(x: In<i32>, out: Out<i32>, n: i32, #[constexpr] mode: usize) {
    let mut total = load(x);
    let more = |x: Scalar<i32>| total + x;
    let twice = |x: Scalar<i32>| more(x) * 2;
    if n > 0 {
        if n > 1 {
            total = load(x + 1);
        } else {
            store(out, more(n));
        }
        store(out, twice(n));
    }
    let mut product = load(x);
    let scaled = |x: Scalar<i32>| product * x;
    match mode {
        0 => store(out, scaled(n)),
        _ => {
            for i in range(0, n) {
                store(out, scaled(i));
                product = load(x + i);
            }
        }
    }
}

#[kernel]
fn stale_through_other_closures(x: In<i32>, out: Out<i32>, n: i32) {
    let mut pair = (load(x), load(x + 1));
    let more = |x: Scalar<i32>| pair.1 + x;
    if n > 0 {
        let twice = |x: Scalar<i32>| more(x) * 2;
        pair.1 = n;
        store(out, twice(n));
    }
}

#[kernel]
fn stale_members(x: In<i32>, out: Out<i32>, n: i32) {
    let mut pair = (load(x), load(x + 1));
    let more = |x: Scalar<i32>| pair.1 + x;
    if n > 0 {
        pair.1 = load(x + 2);
    }
    store(out, more(n));
}

#[kernel]
fn stale_after_another_member(x: In<i32>, out: Out<i32>, n: i32) {
    let mut pair = (load(x), load(x + 1));
    let more = |x: Scalar<i32>| pair.1 + x;
    if n > 0 {
        pair.0 = load(x + 2);
    }
    pair.1 = load(x + 3);
    store(out, more(n));
}

#[kernel]
fn stale_by_other_names(x: In<i32>, out: Out<i32>, n: i32) {
    let mut total = load(x);
    let more = |x: Scalar<i32>| total + x;
    if n > 0 {
        match more {
            again => {
                let other = again;
                {
                    let other = n;
                    store(out, other);
                }
                total = n;
                store(out, other(n));
            }
        }
    }
}

#[device_fn]
fn stale_local(total: &mut [Scalar<i32>; 2], a: Scalar<i32>) -> Scalar<i32> {
    total[0] = a;
    let mut total = a;
    let more = |x: Scalar<i32>| total + x;
    if a > 2 {
        total = a * 100;
    }
    more(a)
}

#[device_fn]
fn dropped_value(a: Scalar<i32>, flag: bool) -> Scalar<i32> {
    if flag {
        if a > 3 {
            return a;
        }
        a + 1
    }
    a * 2
}

fn main() {}
