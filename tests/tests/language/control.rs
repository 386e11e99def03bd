//! Loops, branches, early returns, and loop-carried variables.

use crate::support::{Arg, consts, run, text};
use tilewright::codegen::lang::kernel::ConstValue;
use tilewright::prelude::*;

#[kernel]
fn nested_loops(out: Out<i32>, n: i32) {
    let mut total = 0;
    let mut last = -1;
    for i in range(n) {
        let mut inner = i * 10;
        for j in range(0, i, 2) {
            inner += j;
            total += 1;
        }
        total += inner;
        last = i;
    }
    store(out, total);
    store(out + 1, last);
}

#[test]
fn variables_are_carried_through_nested_loops() {
    for n in [0, 1, 2, 5] {
        let (mut total, mut last) = (0, -1);
        for i in 0..n {
            let mut inner = i * 10;
            for j in (0..i).step_by(2) {
                inner += j;
                total += 1;
            }
            total += inner;
            last = i;
        }
        assert_eq!(
            run(&NESTED_LOOPS, &vec![], &[Arg::OutI32(2), Arg::Int(n.into())], 1).i32(0),
            [total, last],
            "n = {n}"
        );
    }
}

#[kernel]
fn collatz(out: Out<i32>, start: i32) {
    let mut x = start;
    let mut steps = 0;
    while x != 1 && steps < 1000 {
        x = if x % 2 == 0 { x / 2 } else { 3 * x + 1 };
        steps += 1;
    }
    store(out, steps);
}

#[test]
fn while_condition_is_tested_before_each_iteration() {
    for (start, steps) in [(1, 0), (2, 1), (6, 8), (27, 111)] {
        assert_eq!(run(&COLLATZ, &vec![], &[Arg::OutI32(1), Arg::Int(start)], 1).i32(0), [steps]);
    }
}

#[kernel]
fn branches(out: Out<i32>, a: i32, b: i32) {
    let mut small = a;
    let mut big = b;
    if a > b {
        (small, big) = (b, a);
    } else if a == b {
        big = 100;
    } else {
        let shadow = big;
        big = shadow + 1;
    }
    let word = if small < 0 {
        big *= 2;
        -1
    } else {
        1
    };
    store(out, small);
    store(out + 1, big);
    store(out + 2, word);
}

#[test]
fn branches_assign_give_values_and_shadow() {
    let expect = |a: i32, b: i32| {
        let (small, mut big) = if a > b {
            (b, a)
        } else if a == b {
            (a, 100)
        } else {
            (a, b + 1)
        };
        let word = if small < 0 {
            big *= 2;
            -1
        } else {
            1
        };
        vec![small, big, word]
    };
    for (a, b) in [(3, 5), (5, 3), (4, 4), (-2, 7), (7, -2)] {
        let ran = run(&BRANCHES, &vec![], &[Arg::OutI32(3), Arg::Int(a.into()), Arg::Int(b.into())], 1);
        assert_eq!(ran.i32(0), expect(a, b), "{a}, {b}");
    }
}

/// Variables of blocks take the names of outer ones that the blocks have assigned before.
#[kernel]
fn shadows(x: In<f32>, out: Out<f32>, a: i32, n: i32, #[constexpr] flag: bool) {
    let mut v = a;
    let mut w = a;
    if a > 1 {
        v = a + 1;
        let v = a + 10;
        store(out, v.to::<f32>());
        w = v + 100;
        let (w, z) = (w + 1000, v);
        store(out + 1, (w + z).to::<f32>());
    } else {
        let v = v + 5;
        w = v;
    }
    store(out + 2, v.to::<f32>());
    store(out + 3, w.to::<f32>());
    let mut acc = scalar::<f32>(0.0);
    for i in range(0, n) {
        acc += load(x + i);
        let acc = (acc * 2.0).to::<f16>();
        store(out + 4, acc.to::<f32>());
    }
    store(out + 5, acc);
    for _ in static_range(0, 2) {
        acc = acc + 1.0;
        let acc = acc * 0.0;
        store(out + 6, acc);
    }
    store(out + 7, acc);
    while v < 40 {
        v = v * 3;
        let v = if v > 20 {
            w = v;
            v + 7
        } else {
            0
        };
        store(out + 8, v.to::<f32>());
    }
    {
        w = w + 1;
        let mut w = acc;
        w = w + 0.5;
        store(out + 9, w);
    }
    let sum = if flag {
        v += 1;
        let v = w;
        v + 1
    } else {
        v
    };
    store(out + 10, v.to::<f32>());
    store(out + 11, w.to::<f32>());
    store(out + 12, sum.to::<f32>());
}

/// The same in Rust.
fn shadowed(x: &[f32], a: i32, flag: bool) -> [f32; 13] {
    let mut out = [f32::NAN; 13];
    let mut v = a;
    let mut w;
    if a > 1 {
        v = a + 1;
        let v = a + 10;
        out[0] = v as f32;
        w = v + 100;
        let (w, z) = (w + 1000, v);
        out[1] = (w + z) as f32;
    } else {
        let v = v + 5;
        w = v;
    }
    out[2] = v as f32;
    out[3] = w as f32;
    let mut acc = 0.0;
    for value in x {
        acc += value;
        let acc = acc * 2.0;
        out[4] = acc;
    }
    out[5] = acc;
    for _ in 0..2 {
        acc += 1.0;
        let acc = acc * 0.0;
        out[6] = acc;
    }
    out[7] = acc;
    while v < 40 {
        v *= 3;
        let v = if v > 20 {
            w = v;
            v + 7
        } else {
            0
        };
        out[8] = v as f32;
    }
    {
        w += 1;
        let mut w = acc;
        w += 0.5;
        out[9] = w;
    }
    let sum = if flag {
        v += 1;
        let v = w;
        v + 1
    } else {
        v
    };
    out[10] = v as f32;
    out[11] = w as f32;
    out[12] = sum as f32;
    out
}

#[test]
fn shadowed_variables_keep_their_values() {
    let x = [1.0, 2.5, 4.0];
    for (a, flag) in [(1, false), (2, true), (40, true)] {
        let args = [Arg::F32(&x), Arg::OutF32(13), Arg::Int(a.into()), Arg::Int(x.len() as i64)];
        let got = run(&SHADOWS, &vec![("flag", ConstValue::Bool(flag))], &args, 1).f32(1);
        let want = shadowed(&x, a, flag);
        let same = |(found, want): (&f32, &f32)| found == want || found.is_nan() && want.is_nan();
        assert!(got.iter().zip(&want).all(same), "{a} {flag}: {got:?}, but {want:?} in Rust");
    }
}

#[kernel]
fn early_return(out: Out<i32>, a: i32) {
    store(out, 1);
    if a == 0 {
        return;
    }
    let mut x = a;
    if a < 0 {
        x = -a;
        if a < -10 {
            store(out, 2);
            return;
        }
    } else {
        store(out + 1, 7);
    }
    store(out, x);
}

#[test]
fn return_skips_the_rest() {
    for (a, expected) in [(0, [1, 0]), (5, [5, 7]), (-3, [3, 0]), (-11, [2, 0])] {
        assert_eq!(run(&EARLY_RETURN, &vec![], &[Arg::OutI32(2), Arg::Int(a)], 1).i32(0), expected, "a = {a}");
    }
}

#[kernel]
fn constexpr_branches(out: Out<i32>, #[constexpr] causal: bool, #[constexpr = 3] n: usize) {
    let mut width = n;
    let mut stages = 2;
    if causal {
        width = 2 * n;
        stages = 4;
    }
    let scale = if causal { 10 } else { 20 };
    let mut total = scalar::<i32>(0);
    for i in static_range(0, width) {
        if i % 2 == 0 {
            total += i;
        }
        if total > 100 {
            total = 0;
        }
    }
    store(out, total * scale + stages);
}

#[test]
fn constexpr_conditions_record_one_branch() {
    let with = |causal| vec![("causal", ConstValue::Bool(causal))];
    // 0 + 2 + 4 over six iterations, 0 + 2 over three.
    assert_eq!(run(&CONSTEXPR_BRANCHES, &with(true), &[Arg::OutI32(1)], 1).i32(0), [64]);
    assert_eq!(run(&CONSTEXPR_BRANCHES, &with(false), &[Arg::OutI32(1)], 1).i32(0), [42]);
    let printed = text(&CONSTEXPR_BRANCHES, &[], &with(false));
    // Three unrolled iterations with one run-time `if` each; no loop, and no constexpr condition.
    assert_eq!(printed.matches(" = if ").count(), 3, "{printed}");
    assert!(!printed.contains("for "), "{printed}");
}

#[kernel]
fn loop_hints(out: Out<i32>, n: i64, #[constexpr] stages: usize) {
    let mut x = full::<i32>([4], 1);
    for i in range(0, n, num_stages = stages, unroll = 2, warp_specialize = true, overlap = false) {
        x += i.to::<i32>();
    }
    store(out + arange(0, 4), x);
}

#[test]
fn hints_reach_the_loop_and_i64_bounds_give_an_i64_index() {
    let printed = text(&LOOP_HINTS, &[], &consts(&[("stages", 5)]));
    assert!(printed.contains("{num_stages = 5, unroll = 2, warp_specialize = true, overlap = false}"), "{printed}");
    let args = [Arg::OutI32(4), Arg::Int(4)];
    assert_eq!(run(&LOOP_HINTS, &consts(&[("stages", 5)]), &args, 1).i32(0), [7; 4]);
}

#[kernel]
fn tuples_and_blocks(out: Out<i32>, a: i32) {
    let mut pair = (a, a + 1);
    let mut sum = 0;
    for i in range(0, 3) {
        pair = (pair.1, pair.0);
        pair.0 += i;
        let step = {
            let twice = i * 2;
            sum += twice;
            twice + 1
        };
        sum += step;
    }
    {
        let a = 1000;
        sum += a;
    }
    store(out, pair.0);
    store(out + 1, pair.1);
    store(out + 2, sum + a);
}

#[test]
fn tuples_and_blocks_are_carried() {
    let (mut pair, mut sum) = ((5, 6), 0);
    for i in 0..3 {
        pair = (pair.1 + i, pair.0);
        sum += 2 * i + 2 * i + 1;
    }
    assert_eq!(
        run(&TUPLES_AND_BLOCKS, &vec![], &[Arg::OutI32(3), Arg::Int(5)], 1).i32(0),
        [pair.0, pair.1, sum + 1005]
    );
}

#[device_fn]
fn clipped<T: Num>(x: Tile<T>, low: Scalar<T>, invert: bool) -> Tile<T> {
    if invert {
        return minimum(x, low);
    }
    let mut result = x;
    if sum(x) > 100 {
        result = result * 2;
    }
    maximum(result, low)
}

#[kernel]
fn calls(out: Out<i32>, a: i32, #[constexpr] invert: bool) {
    let x = arange(0, 8) * a;
    store(out + arange(0, 8), clipped(x, a, invert));
}

#[test]
fn device_functions_are_inlined() {
    let with = |invert| vec![("invert", ConstValue::Bool(invert))];
    let expect = |f: &dyn Fn(i32) -> i32| (0..8).map(f).collect::<Vec<_>>();
    let args = |a| [Arg::OutI32(8), Arg::Int(a)];
    assert_eq!(run(&CALLS, &with(true), &args(3), 1).i32(0), expect(&|i| (3 * i).min(3)));
    assert_eq!(run(&CALLS, &with(false), &args(3), 1).i32(0), expect(&|i| (3 * i).max(3)));
    assert_eq!(run(&CALLS, &with(false), &args(4), 1).i32(0), expect(&|i| (8 * i).max(4)));
}

constexpr_enum! {
    /// The operation.
    enum Mode {
        Double,
        Square,
        Negate,
    }
}

#[kernel]
fn modes(out: Out<i32>, a: i32, #[constexpr] mode: Mode, #[constexpr = 1] n: usize) {
    let mut x = a;
    match mode {
        Mode::Double => x = x * 2,
        Mode::Square => {
            let y = x;
            x *= y;
        }
        Mode::Negate if n > 0 => x = -x,
        Mode::Negate => {}
    }
    let bonus = match n {
        0 => 100,
        _ => 200,
    };
    store(out, x + bonus);
    if mode == Mode::Double && n >= 1 || a > 1000 {
        store(out + 1, 1);
    }
}

#[test]
fn constexpr_enums_are_matched() {
    let with = |mode: &str| vec![("mode", ConstValue::Variant(mode.into()))];
    let result = |mode| run(&MODES, &with(mode), &[Arg::OutI32(2), Arg::Int(7)], 1).i32(0);
    assert_eq!(result("Double"), [214, 1]);
    assert_eq!(result("Square"), [249, 0]);
    assert_eq!(result("Negate"), [193, 0]);
}

#[kernel]
fn views_in_loops(x: In<f32>, out: Out<f32>, n: i32) {
    let mut block = make_block_ptr(x, shape = [n], strides = [1], offsets = [0], block_shape = [4]);
    let mut target = out + arange(0, 4);
    for _ in range(0, cdiv(n, 4)) {
        store(target, load(block, boundary_check = [0]) + 1.0);
        block = advance(block, [4]);
        target = target + 4;
    }
}

#[test]
fn pointers_and_views_are_carried() {
    let x: Vec<f32> = (0..6).map(|i| i as f32).collect();
    let ran = run(&VIEWS_IN_LOOPS, &vec![], &[Arg::F32(&x), Arg::OutF32(8), Arg::Int(6)], 1);
    assert_eq!(ran.f32(1), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 1.0, 1.0]);
}

/// The place of the first element above 5, by a flag, and numbers that are assigned to scalars.
#[kernel]
fn first_above(x: In<f32>, out: Out<f32>, n: i32) {
    let mut done = false;
    let mut j = 0;
    let mut least = scalar::<f32>(0.0);
    while !done && j < n {
        if load(x + j, mask = j < n, other = 0.0) > 5.0 {
            done = true;
            least = f32::NEG_INFINITY;
        } else {
            j += 1;
        }
    }
    store(out, j.to::<f32>());
    store(out + 1, least);
}

#[test]
fn flags_and_numbers_are_assigned() {
    let x = [1.0, 7.0, 9.0];
    for (n, want) in [(3, [1.0, f32::NEG_INFINITY]), (1, [1.0, 0.0])] {
        assert_eq!(run(&FIRST_ABOVE, &vec![], &[Arg::F32(&x), Arg::OutF32(2), Arg::Int(n)], 1).f32(1), want);
    }
}

#[device_fn]
fn sign<T: Num>(n: Scalar<i32>) -> Scalar<T> {
    if n < 0 {
        return -1;
    }
    if n > 0 { 1 } else { 0 }
}

#[device_fn]
fn half() -> Scalar<f32> {
    0.5
}

#[device_fn]
fn kept_or_zero(x: Scalar<f32>, keep: bool) -> Scalar<f32> {
    if keep { x } else { 0.0 }
}

#[device_fn]
fn below_or_one(x: Tile<f32>, n: Scalar<i32>) -> Tile<f32> {
    if n > 3 {
        return 1.0;
    }
    x * 2.0
}

/// Literal arms take the type of the other arm, and its shape with a run-time condition, whether the condition is known at specialization or not.
#[kernel]
fn literal_arms(out: Out<f32>, n: i32, #[constexpr] flag: bool, #[constexpr] width: usize) {
    let chosen = if flag { n.to::<f32>() } else { 2.5 };
    store(out, chosen);
    let columns = if flag { 4 } else { width };
    store(out + 1, sum(full::<f32>([columns], 1.0)));
    let above = if n > 3 { 7.0 } else { chosen };
    store(out + 2, above);
    let v = zeros::<f32>([1, 8]);
    let same = if v.shape() == [1, 8] { chosen } else { 0.0 };
    store(out + 3, same);
    let other = if v.shape() != [8, 1] { 1.5 } else { chosen };
    store(out + 4, other);
    store(out + 5, kept_or_zero(chosen, flag));
    let pair = arange(0, 2).to::<f32>();
    let tile = if n > 3 { pair + 1.0 } else { -4.0 };
    store(out + 6 + arange(0, 2), tile);
    store(out + 8 + arange(0, 2), below_or_one(pair, n));
    store(out + 10, sign::<f32>(n - 5) + half() + sign::<i32>(n - 3).to::<f32>());
}

#[test]
fn literal_arms_take_the_type_of_the_other_arm() {
    for (flag, n) in [(true, 5), (false, 5), (true, 1)] {
        let consts = vec![("flag", ConstValue::Bool(flag)), ("width", ConstValue::Int(8))];
        let got = run(&LITERAL_ARMS, &consts, &[Arg::OutF32(11), Arg::Int(n)], 1).f32(0);
        let chosen = if flag { n as f32 } else { 2.5 };
        let above = if n > 3 { 7.0 } else { chosen };
        let kept = if flag { chosen } else { 0.0 };
        let tiles = if n > 3 { [1.0, 2.0, 1.0, 1.0] } else { [-4.0, -4.0, 0.0, 2.0] };
        assert_eq!(got[..6], [chosen, if flag { 4.0 } else { 8.0 }, above, chosen, 1.5, kept]);
        assert_eq!(got[6..10], tiles);
        assert_eq!(got[10], ((n - 5).signum() + (n - 3).signum()) as f32 + 0.5);
    }
}

/// Arms that are literals beside tiles, in a `match` and where the condition is known at specialization; literals in a tuple; a
/// device function that calls itself; the function of `map_elementwise` first, as in Triton.
#[kernel]
fn literals_beside_tiles(out: Out<f32>, n: i32, #[constexpr] mode: usize) {
    let row = arange(0, 8).to::<f32>();
    let scaled = match mode {
        0 => row * 2.0,
        1 => 1.0,
        _ => -3.5,
    };
    let offset = if mode == 2 { row } else { 0.25 };
    let (mut total, (factor, one)) = (0.0, (0.5, 1.0));
    for i in range(0, n) {
        total += i.to::<f32>() * factor;
    }
    let raised = power(row + one, 3);
    let (mut low, mut high) = (0.0, row);
    (low, (high, _)) = (1.0, (row - 1.0, low));
    let checked = match mode {
        0 | 1 => 2.0,
        2 => 3.0,
        _ => unreachable!(),
    };
    store(out + 24 + arange(0, 8), (high + low) * checked);
    store(out + arange(0, 8), scaled + offset + total);
    store(out + 8 + arange(0, 8), scaled);
    store(out + 16 + arange(0, 8), map_elementwise(one_more, raised));
}

#[device_fn]
fn one_more(x: Scalar<f32>) -> Scalar<f32> {
    x + 1.0
}

#[device_fn]
fn power(x: Tile<f32>, n: usize) -> Tile<f32> {
    if n == 0 { 1.0 } else { x * power(x, n - 1) }
}

#[test]
fn literals_take_the_type_of_tiles_and_tuples_hold_literals() {
    for mode in 0..3 {
        let n = 4;
        let consts = vec![("mode", ConstValue::Int(mode))];
        let got = run(&LITERALS_BESIDE_TILES, &consts, &[Arg::OutF32(32), Arg::Int(n)], 1).f32(0);
        for i in 0..8 {
            let row = i as f32;
            let scaled = [row * 2.0, 1.0, -3.5][mode as usize];
            let offset = if mode == 2 { row } else { 0.25 };
            let want = [scaled + offset + 3.0, scaled, (row + 1.0).powi(3) + 1.0];
            assert_eq!([got[i], got[8 + i], got[16 + i]], want, "mode {mode}, element {i}");
            assert_eq!(got[24 + i], row * if mode == 2 { 3.0 } else { 2.0 });
        }
    }
}

/// Numbers that branches assign, outside of loops.
#[kernel]
fn assigned_numbers(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] wide: bool) {
    let mut count = 0;
    let mut value = 0.5;
    let mut flag = false;
    if n > 3 {
        count = n * 2;
        value = load(x + 1);
        flag = n > 5;
    } else if n == 2 {
        count += 7;
        value += 1.0;
    }
    // Known at specialization: still a shape.
    let mut width = 4;
    if wide {
        width = 8;
    }
    let mut tile = full::<f32>([width], 1.0);
    if flag {
        tile = tile * value;
        count += 1;
    }
    store(out, count.to::<f32>());
    store(out + 1, value);
    store(out + 2, sum(tile));
}

#[test]
fn branches_assign_run_time_values_to_numbers() {
    for (wide, n) in [(false, 0), (false, 2), (true, 4), (true, 6)] {
        let consts = vec![("wide", ConstValue::Bool(wide))];
        let got = run(&ASSIGNED_NUMBERS, &consts, &[Arg::F32(&[3.0, 2.5]), Arg::OutF32(3), Arg::Int(n)], 1).f32(1);
        let (mut count, mut value) = (0, 0.5);
        if n > 3 {
            (count, value) = (n * 2, 2.5);
        } else if n == 2 {
            (count, value) = (7, 1.5);
        }
        let mut total = if wide { 8.0 } else { 4.0 };
        if n > 5 {
            (total, count) = (total * value, count + 1);
        }
        assert_eq!(got, [count as f32, value, total]);
    }
}
