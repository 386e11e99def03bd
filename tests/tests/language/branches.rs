//! Branches that are decided at specialization around those that are not, and `match`.

use crate::support::{Arg, consts, run, text};
use tilewright::codegen::lang::kernel::ConstValue;
use tilewright::prelude::*;

/// A variable starts as a literal. A constexpr `if`, an arm of `match` or an unrolled loop assigns it, in part by run-time `if`s and
/// loops.
#[kernel]
fn literals_become_run_time_values(out: Out<f32>, n: i32, #[constexpr] mode: usize) {
    let mut by_if = 0;
    if mode > 0 {
        by_if = 1;
        if n > 3 {
            by_if = n;
        }
    } else {
        by_if = 9;
    }
    let mut by_match = 0;
    match mode {
        0 => {
            for i in range(0, n) {
                by_match += i;
            }
        }
        1 => by_match = 2,
        2 if mode > 5 => {}
        k if k == 2 => {
            if n > 3 {
                by_match = n + k;
            }
        }
        _ => {}
    }
    let mut unrolled = 0;
    for i in static_range(0, 3) {
        for j in range(0, n) {
            unrolled += i * 10 + j;
        }
    }
    // Known at specialization: a shape.
    let mut width = 4;
    match mode {
        0 => width = 8,
        1 => width *= 4,
        _ => {}
    }
    store(out, (by_if * 10000 + by_match * 100).to::<f32>());
    store(out + 1, unrolled.to::<f32>());
    store(out + 2, sum(full::<f32>([width], 1.0)));
}

#[test]
fn arms_give_literals_the_type_of_run_time_values() {
    for (mode, n) in [(0, 4), (1, 4), (1, 2), (2, 4), (2, 2), (3, 4)] {
        let consts = vec![("mode", ConstValue::Int(mode))];
        let got = run(&LITERALS_BECOME_RUN_TIME_VALUES, &consts, &[Arg::OutF32(3), Arg::Int(n)], 1).f32(0);
        let by_if = match (mode, n) {
            (0, _) => 9,
            (_, 4) => n,
            _ => 1,
        };
        let by_match = match mode {
            0 => (0..n).sum(),
            1 => 2,
            2 if n > 3 => n + 2,
            _ => 0,
        };
        let unrolled: i64 = (0..3).flat_map(|i| (0..n).map(move |j| i * 10 + j)).sum();
        let width = [8, 16, 4, 4][mode as usize];
        assert_eq!(got, [(by_if * 10000 + by_match * 100) as f32, unrolled as f32, width as f32], "{mode} {n}");
    }
}

/// Arms of a written type, arms that are tuples, arms that panic, and literals that are assigned to members of a tuple.
#[kernel]
fn values_of_arms(out: Out<f32>, n: i32, #[constexpr] mode: usize) {
    let width: usize = match mode {
        0 => 2,
        1 => 8,
        7 => panic!("no mode 7"),
        _ => 4,
    };
    let height: usize = if mode == 0 {
        8
    } else if mode == 1 {
        2
    } else {
        1
    };
    let x = n.to::<f32>();
    let (first, second) = if mode == 0 { (0.5, x) } else { (1.5, x + 1.0) };
    let mut pair = (x, n);
    if n > 3 {
        pair = (-1.0, 7);
    }
    let tile = if mode == 0 {
        arange(0, 4).to::<f32>()
    } else if mode == 1 {
        1.0
    } else {
        2.0
    };
    let product = match (mode, width) {
        (0, _) => 0.25,
        (_, 8) => tile * 4.0,
        (_, w) => tile * w,
    };
    let kept = if mode < 7 { x } else { unreachable!() };
    let pairs = (0.5, x);
    store(out, sum(full::<f32>([height, width], 1.0)));
    store(out + 1, first * second + kept * pairs.0);
    store(out + 2, pair.0 + pair.1.to::<f32>());
    store(out + 4 + arange(0, 4), tile);
    store(out + 8 + arange(0, 4), product);
}

#[test]
fn arms_have_values_of_the_written_type() {
    for (mode, n) in [(0, 3), (1, 3), (2, 4)] {
        let consts = vec![("mode", ConstValue::Int(mode))];
        let got = run(&VALUES_OF_ARMS, &consts, &[Arg::OutF32(12), Arg::Int(n)], 1).f32(0);
        let x = n as f32;
        let sum = if mode == 0 { 0.5 * x } else { 1.5 * (x + 1.0) };
        let pair = if n > 3 { 6.0 } else { 2.0 * x };
        assert_eq!(got[..3], [[16.0, 16.0, 4.0][mode as usize], sum + x * 0.5, pair]);
        for i in 0..4 {
            let tile = [i as f32, 1.0, 2.0][mode as usize];
            let product = if mode == 0 { 0.25 } else { tile * [2.0, 4.0, 4.0][mode as usize] };
            assert_eq!([got[4 + i], got[8 + i]], [tile, product], "mode {mode}, element {i}");
        }
    }
}

#[test]
#[should_panic(expected = "no mode 7")]
fn an_arm_that_panics_is_chosen_at_specialization() {
    run(&VALUES_OF_ARMS, &vec![("mode", ConstValue::Int(7))], &[Arg::OutF32(12), Arg::Int(1)], 1);
}

/// What a helper of a kernel may be written with: values that are not `Copy`, texts, functions, and references.
enum Shape {
    Dims(Vec<usize>),
    Empty,
}

struct Steps {
    first: usize,
}

fn name() -> String {
    "wide".to_string()
}

#[device_fn]
fn double(x: Scalar<f32>) -> Scalar<f32> {
    x * 2.0
}

#[device_fn]
fn negate(x: Scalar<f32>) -> Scalar<f32> {
    -x
}

#[device_fn]
fn extent(mode: usize) -> usize {
    match mode {
        0 => 1,
        1 => 2,
        _ => 4,
    }
}

#[device_fn]
fn pair_of(x: Scalar<f32>, mode: usize) -> (Scalar<f32>, usize) {
    if mode == 0 { (0.25, 3) } else { (x, 5) }
}

#[device_fn]
fn advance_by(dims: &mut [usize; 2], steps: &mut Steps, by: usize) {
    dims[0] += by;
    steps.first = by;
}

fn advanced(by: usize) -> (usize, usize) {
    let (mut dims, mut steps) = ([1, 2], Steps { first: 0 });
    advance_by(&mut dims, &mut steps, by);
    (dims[0] * dims[1], steps.first)
}

#[device_fn]
fn rank(shape: Shape, text: &str) -> usize {
    let wide: usize = match text {
        "wide" => 10,
        _ => 0,
    };
    match shape {
        Shape::Dims(dims) => dims.len() + wide,
        Shape::Empty => wide,
    }
}

#[device_fn]
fn chosen_mode(x: Ptr<f32>, mode: usize) -> (usize, Scalar<f32>) {
    (mode, load(x + 3))
}

#[device_fn]
fn never(mode: usize) -> Scalar<f32> {
    match mode {
        0 => panic!("zero"),
        _ => {
            panic!("not zero")
        }
    }
}

/// No warning is due here that plain Rust would not give.
#[deny(warnings)]
#[kernel]
fn other_arms(
    x: In<f32>,
    out: Out<f32>,
    extra: Option<In<f32>>,
    n: i32,
    #[constexpr] mode: usize,
    #[constexpr] width: usize,
) {
    let tile: Tile<f32> = if n > 3 { load(x + arange(0, 4)) } else { 0.5 };
    let filled: Tile<f32> = match mode {
        0 => 1.5,
        _ => zeros::<f32>([4]),
    };
    let (rows, columns) = if mode == 0 { (2, 8) } else { (width, width) };
    let first = match mode {
        0 => load(x),
        1 => 0.5,
        _ => 2,
    };
    let guarded = match mode {
        k if k > 1 => load(x + 1),
        7 => std::panic!("seven"),
        8 => match width {
            1 => panic!("one"),
            _ => {
                unreachable!()
            }
        },
        _ => 0.25,
    };
    let literal = if mode < 7 { 0.5 } else { unreachable!() };
    let mut count = 0;
    let wide: usize = if mode == 0 {
        count = 3;
        4
    } else {
        8
    };
    let mut narrow: usize = 1;
    narrow = if mode == 1 { 2 } else { narrow };
    let mut half = scalar::<f16>(0.0);
    half = match mode {
        0 => 1.0,
        _ => half,
    };
    let mut found = false;
    if mode == 0 {
        if n > 3 {
            found = true;
        }
    }
    let is_large = if mode == 1 { n > 3 } else { false };
    let function = match mode {
        0 => double,
        _ => negate,
    };
    let (mut a, mut b) = (n, load(x));
    for i in static_range(0, 2) {
        a += i;
        for _ in static_range(0, 2) {
            b = b + 1.0;
        }
    }
    // Patterns bind the names of variables that other arms assign.
    let (mut k, mut m) = (n, 1i32);
    match mode {
        0 => {
            k += 1;
            m = 5;
        }
        k if k > 1 => m = k as i32 * 2,
        m => k += m,
    }
    let flags = (mode == 0) & (n > 3) == (mode != 0 || n > 3);
    let step = 3;
    let backwards = -step + k + m;
    let (extent_of_dims, first_step) = advanced(3);
    let of_call = match chosen_mode(x, mode).0 {
        0 => load(x),
        _ => 1.5,
    };
    let mut total = scalar::<f32>(0.0);
    if let Some(mut extra) = extra {
        extra += 1;
        total += load(extra);
    }
    let (factor, size) = pair_of(load(x), mode);
    let shape = if mode == 0 { Shape::Empty } else { Shape::Dims(Vec::from([1, 2])) };
    store(out + arange(0, 4), tile + filled);
    store(out + 4, sum(full::<f32>([rows, columns], 1.0)));
    store(out + 5, first + guarded + literal);
    store(out + 6, sum(full::<f32>([wide], 1.0)) + count);
    store(out + 7, sum(full::<f32>([narrow * extent(mode)], 1.0)) + half.to::<f32>());
    store(out + 8, found.to::<f32>() + is_large.to::<f32>() * 2.0);
    store(out + 9, function(load(x)) + a.to::<f32>() + b);
    store(out + 10, sum(full::<f32>([extent_of_dims], 1.0)) + first_step);
    store(out + 11, of_call + total);
    store(out + 13, backwards.to::<f32>() + flags.to::<f32>() * 100.0);
    store(out + 14, if matches!(mode, 0 | 2) { load(x) } else { 0.0 });
    store(out + 12, factor * size + scalar::<f32>(0.0) + rank(shape, name().as_str()));
}

#[test]
fn arms_take_what_rust_takes() {
    let x = [3.0, 2.5, 1.0, 7.0];
    for (mode, n) in [(0, 4), (1, 4), (2, 2)] {
        let mut consts = consts(&[("mode", mode), ("width", 4)]);
        consts.push(("extra_given", ConstValue::Bool(true)));
        let args = [Arg::F32(&x), Arg::OutF32(15), Arg::F32(&[9.0, 8.0]), Arg::Int(n)];
        let got = run(&OTHER_ARMS, &consts, &args, 1).f32(1);
        let nth = |values: [f32; 3]| values[mode as usize];
        let want_tile: Vec<f32> =
            (0..4).map(|i| if n > 3 { x[i] } else { 0.5 } + if mode == 0 { 1.5 } else { 0.0 }).collect();
        assert_eq!(got[..4], want_tile);
        let function = if mode == 0 { 6.0 } else { -3.0 };
        assert_eq!(
            got[4..],
            [
                16.0,
                nth([3.0, 0.5, 2.0]) + nth([0.25, 0.25, 2.5]) + 0.5,
                nth([7.0, 8.0, 8.0]),
                nth([2.0, 4.0, 4.0]),
                nth([1.0, 2.0, 0.0]),
                function + (n as f32 + 1.0) + 7.0,
                8.0 + 3.0,
                nth([3.0, 1.5, 1.5]) + 8.0,
                nth([0.75, 15.0, 15.0]) + nth([10.0, 12.0, 12.0]),
                // flags: true & true == true, false == true, false == true.
                nth([-3.0 + 5.0 + 5.0 + 100.0, -3.0 + 5.0 + 1.0, -3.0 + 2.0 + 4.0]),
                nth([3.0, 0.0, 3.0]),
            ]
        );
    }
}

#[kernel]
fn calls_never(out: Out<f32>, #[constexpr] mode: usize) {
    store(out, never(mode));
}

#[test]
#[should_panic(expected = "not zero")]
fn all_arms_may_panic() {
    run(&CALLS_NEVER, &consts(&[("mode", 1)]), &[Arg::OutF32(1)], 1);
}

/// What a `match` looks at is recorded once.
#[kernel]
fn matched_call(x: In<f32>, out: Out<f32>, #[constexpr] mode: usize) {
    let value = match chosen_mode(x, mode).0 {
        0 => 1.0,
        1 => load(x),
        _ => 2.0,
    };
    store(out, value);
}

#[test]
fn what_a_match_looks_at_is_recorded_once() {
    for (mode, loads) in [(0, 1), (1, 2)] {
        let text = text(&MATCHED_CALL, &[], &consts(&[("mode", mode)]));
        assert_eq!(text.matches("load").count(), loads, "{text}");
    }
}

/// Loops at the ends of arms, a guard with variables of its own, an inner variable that shadows one of an unrolled loop, and literals
/// with any operator.
#[kernel]
fn shadows(out: Out<f32>, n: i32, #[constexpr] mode: usize) {
    let mut total = n;
    for i in range(0, 3) {
        match mode {
            j if {
                let mut total = j;
                total += 1;
                total > 1
            } =>
            {
                total += i;
            }
            _ => {}
        }
    }
    let mut width: usize = 1;
    for _ in static_range(0, 2) {
        width *= 2;
        {
            let mut width = 0;
            for i in range(0, 3) {
                width += i;
            }
            total += width;
        }
    }
    // The guard chooses the alternative.
    let mut chosen = n;
    match (mode, width) {
        (j, _) | (_, j) if j > 3 => chosen = scalar::<i32>(0) + j,
        _ => {}
    }
    total += chosen;
    let given = Some(mode);
    let mut count: i32 = 0;
    match given {
        None if mode > 7 => count = 1,
        Some(q) if q == 1 => count = 2,
        _ => {}
    }
    let is_large = match mode {
        0 => true,
        1 => n > 3,
        _ => false,
    };
    total += is_large.to::<i32>() * 10 + count;
    // A closure sees members that are not assigned, and bounds may call it.
    let mut pair = (n, 1i32);
    let first = |x: Scalar<i32>| x + pair.0;
    if n > 0 {
        pair.1 = 7;
    }
    let offset = scalar::<i32>(1);
    let bound = |x: Scalar<i32>| x + offset;
    for i in range(0, bound(n)) {
        total += i;
    }
    total += first(n) + pair.1;
    let bits = match mode {
        0 => n,
        1 => !3,
        _ => (7 % 4) | 8,
    };
    store(out, total.to::<f32>() + sum(full::<f32>([width], 1.0)));
    store(out + 1, bits.to::<f32>());
    match mode {
        0 => {
            for i in range(0, 2) {
                store(out + 2 + i, 5.0);
            }
        }
        _ => store(out + 2 + arange(0, 2), full::<f32>([2], 6.0)),
    }
}

/// Closures that a branch uses before it assigns what they captured, or that captured something else, and arms that are
/// variables.
#[kernel]
fn closures_in_arms(out: Out<i32>, n: i32, #[constexpr] mode: usize) {
    let (seven, other) = (7, n);
    let mut pair = (n, n);
    let of_other = |x: Scalar<i32>| x + other + pair.0;
    let mut offset = scalar::<i32>(1);
    let moved = |x: Scalar<i32>| x + offset;
    let twice = |x: Scalar<i32>| moved(x) * 2;
    let first = match mode {
        0 => seven,
        _ => n,
    };
    let (second, third) = match mode {
        0 => (seven, n),
        _ => (n, seven),
    };
    if n > 2 {
        store(out, twice(n));
        if n > 3 {
            offset = n;
        } else {
            store(out, moved(n));
        }
        pair.1 = n;
        let moved = |x: Scalar<i32>| x * offset + of_other(x) - other - x - pair.1;
        store(out + 1, moved(n));
        let sum = reduce(arange(0, 4), axis = 0, |a, b| a + b).scalar();
        offset += sum - 6;
    }
    store(out + 2, offset);
    if n > 7 {
        offset = sum(arange(0, 4));
        store(out, offset + sum(arange(0, 4)));
    }
    store(out + 3, first + second * 10 + third * 100);
}

#[test]
fn closures_in_arms_see_what_they_captured() {
    for (mode, n) in [(0, 2), (0, 3), (1, 4)] {
        let got = run(&CLOSURES_IN_ARMS, &consts(&[("mode", mode)]), &[Arg::OutI32(4), Arg::Int(n)], 1).i32(0);
        let stored = [[0, 0, 1], [4, 3, 1], [10, 16, 4]][n as usize - 2];
        let (first, third) = if mode == 0 { (7, n as i32) } else { (n as i32, 7) };
        assert_eq!(got[..3], stored, "n = {n}");
        assert_eq!(got[3], first + 10 * first + 100 * third);
    }
}

#[device_fn]
fn three_or(a: Scalar<i32>, mode: usize) -> Scalar<i32> {
    let three = 3;
    match mode {
        0 => three,
        1 => -three,
        _ => a,
    }
}

#[device_fn]
fn apply(minimum: fn(Scalar<i32>, Scalar<i32>) -> Scalar<i32>, a: Scalar<i32>) -> Scalar<i32> {
    minimum(a, a)
}

#[device_fn]
fn product(a: Scalar<i32>, b: Scalar<i32>) -> Scalar<i32> {
    a * b
}

/// Variables of blocks that have ended, results of closures, closures with names of functions, and other members of a variable.
#[kernel]
fn names_in_scope(out: Out<i32>, n: i32, #[constexpr] mode: usize) {
    let mut total = n;
    let mut last = scalar::<i32>(0);
    let more = |x: Scalar<i32>| total + x;
    if n > 2 {
        let value = {
            let double = total * 2;
            double + 1
        };
        let kept = more(n);
        let shadow = |more: Scalar<i32>| more * 2;
        total = value;
        last = kept + shadow(kept);
    }
    let minimum = |x: Scalar<i32>, y: Scalar<i32>| x * 10 + y;
    let two = 2;
    let four: usize = 4;
    let width: usize = match mode {
        0 => two,
        1 => four,
        _ => 4,
    };
    store(out, total);
    store(out + 1, last);
    store(out + 2, minimum(n, total - total));
    store(out + 3, three_or(n, mode) + apply(product, n));
    let given = Some(mode);
    // Other variables of the name.
    let index: usize = match given {
        Some(two) => two,
        None => 7,
    };
    let mut steps = scalar::<i32>(0);
    for two in range(0, n) {
        let step: Scalar<i32> = if two > 0 { two } else { two + 5 };
        steps += step;
    }
    store(out + 4, sum(arange(0, width)));
    store(out + 5, steps + index);
}

#[test]
fn names_mean_what_they_mean_in_rust() {
    for (mode, n) in [(0, 2), (1, 3), (2, 4)] {
        let got = run(&NAMES_IN_SCOPE, &consts(&[("mode", mode)]), &[Arg::OutI32(6), Arg::Int(n)], 1).i32(0);
        let n = n as i32;
        let [total, last] = if n > 2 { [2 * n + 1, 6 * n] } else { [n, 0] };
        let chosen = [3, -3, n][mode as usize] + n * n;
        let steps = n * (n - 1) / 2 + 5 + mode as i32;
        assert_eq!(got, [total, last, 10 * n, chosen, if mode == 0 { 1 } else { 6 }, steps], "mode {mode}");
    }
}

/// A `match` at the end whose arms are assignments.
#[kernel]
fn assigning_tail(out: Out<f32>, n: i32, #[constexpr] mode: usize) {
    let mut last = n;
    match mode {
        0 => last += 1,
        _ => {
            last += 2;
            store(out, last.to::<f32>());
        }
    }
}

#[test]
fn arms_at_the_end_may_assign() {
    assert_eq!(run(&ASSIGNING_TAIL, &consts(&[("mode", 1)]), &[Arg::OutF32(1), Arg::Int(2)], 1).f32(0), [4.0]);
}

#[test]
fn inner_names_are_their_own() {
    for mode in 0..3 {
        let got = run(&SHADOWS, &consts(&[("mode", mode)]), &[Arg::OutF32(4), Arg::Int(2)], 1).f32(0);
        let chosen = 4.0;
        let flags = [10.0, 2.0, 0.0][mode as usize];
        let total = 2.0 + if mode > 0 { 3.0 } else { 0.0 } + 6.0 + chosen + flags + 3.0 + 4.0 + 7.0;
        let last = if mode == 0 { 5.0 } else { 6.0 };
        assert_eq!(got, [total + 4.0, [2.0, -4.0, 11.0][mode as usize], last, last]);
    }
}
