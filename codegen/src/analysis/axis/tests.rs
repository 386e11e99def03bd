use super::transfer::{binary, cast, compare, reshape};
use super::*;
use crate::interp::arith;
use crate::ir::{BinaryOp, CmpOp, DType, Op};
use crate::testgen::Rng;
use crate::text::parse;
use proptest::prelude::*;

/// Facts about the result of the last op with this mnemonic.
fn facts(text: &str, mnemonic: &str) -> AxisInfo {
    let f = parse(text).unwrap();
    let a = AxisAnalysis::new(&f);
    let id = f.walk().into_iter().rfind(|&id| f.op(id).op.mnemonic() == mnemonic).unwrap();
    a.get(&f, f.result(id))
}

/// The facts about a carried value hold for its initial value, except for the range, and for the next value: the
/// iteration ended at a fixed point.
#[test]
fn facts_about_carried_values_are_a_fixed_point() {
    let mut carried = 0;
    for seed in 0..60 {
        let func = crate::testgen::case(seed).program.func;
        let axis = AxisAnalysis::new(&func);
        for id in func.walk() {
            let data = func.op(id);
            if !matches!(data.op, Op::For { .. }) {
                continue;
            }
            let body = data.regions[0];
            let yields = &func.op(func.terminator(body)).operands;
            for (i, &param) in func.block(body).params[1..].iter().enumerate() {
                let [fact, init, next, result] =
                    [param, data.operands[3 + i], yields[i], data.results[i]].map(|v| axis.get(&func, v));
                let init = AxisInfo { range: fact.range, ..init };
                assert!(fact.implied_by(&init) && fact.implied_by(&next), "seed {seed}: {fact:?}, {init:?}, {next:?}");
                assert_eq!(fact, result);
                carried += 1;
            }
        }
    }
    assert!(carried > 20, "only {carried} carried values");
}

#[test]
fn pointers_of_a_masked_vector_add() {
    let text = "kernel @f(%x: ptr<f32> {divisible_by = 16}, %n: i32 {divisible_by = 16}) {
        %p = program_id {axis = 0} : i32
        %b = constant {value = 1024} : i32
        %o = mul %p, %b : i32
        %r = arange {start = 0, end = 1024} : tensor<1024xi32>
        %s = splat %o : tensor<1024xi32>
        %i = add %s, %r : tensor<1024xi32>
        %q = splat %x : tensor<1024xptr<f32>>
        %a = ptr_add %q, %i : tensor<1024xptr<f32>>
        %m = splat %n : tensor<1024xi32>
        %k = cmp_lt %i, %m : tensor<1024xbool>
        return }";
    let p = facts(text, "ptr_add");
    assert_eq!((p.contiguity[0], p.divisibility[0]), (1024, 16));
    assert_eq!(facts(text, "cmp_lt").constancy[0], 16);
    assert_eq!(facts(&text.replace("%n: i32 {divisible_by = 16}", "%n: i32"), "cmp_lt").constancy[0], 1);
}

#[test]
fn exact_quotients_keep_the_other_factors() {
    let divisor = |op: &str, by: i64| {
        let text = format!(
            "kernel @f(%n: i32 {{divisible_by = 16}}) {{
        %c = constant {{value = {by}}} : i32
        %q = {op} %n, %c : i32
        return }}"
        );
        facts(&text, op).divisor_of_all()
    };
    assert_eq!(["div", "cdiv", "shr"].map(|op| divisor(op, 2)), [8, 8, 4]);
    // A remainder, a quotient of unknown sign, a division by zero, a shift by all bits.
    assert_eq!(["div", "cdiv"].map(|op| [32, 3, -2, 0].map(|by| divisor(op, by))), [[1; 4]; 2]);
    assert_eq!([5, 32, -1].map(|by| divisor("shr", by)), [1; 3]);
}

#[test]
fn assumes_narrow_argument_ranges() {
    let quotient = |assumed: &str| {
        let text = format!(
            "kernel @f(%n: i32, %flag: bool) {{
        %zero = constant {{value = 0}} : i32
        %most = constant {{value = 1000}} : i32
        %ten = constant {{value = 10}} : i32
        %q = div %n, %ten : i32
        %above = cmp_lt %zero, %n : bool
        %below = cmp_le %n, %most : bool
        %both = and %above, %below : bool
        {assumed}
        return }}"
        );
        facts(&text, "div").range
    };
    let full = (i128::from(i32::MIN / 10), i128::from(i32::MAX / 10));
    assert_eq!(quotient("assume %both"), (0, 100));
    assert_eq!(quotient("assume %below"), (full.0, 100));
    assert_eq!(quotient("assume %above"), (0, full.1));
    assert_eq!(quotient("%neither = cmp_lt %most, %zero : bool\n assume %neither"), full);
    // An assumption inside a branch applies only there.
    assert_eq!(quotient("if %flag () {\n assume %both\n yield\n }"), full);
}

#[test]
fn loop_carried_facts_reach_a_fixed_point() {
    let text = |step: i64| {
        format!(
            "kernel @f(%n: i32) {{
        %z = constant {{value = 0}} : i32
        %o = constant {{value = 1}} : i32
        %s = constant {{value = {step}}} : i32
        %c = constant {{value = 64}} : i32
        %r = for %z, %n, %o, %c : i32 (%i: i32, %a: i32) {{
          %b = add %a, %s : i32
          yield %b
        }}
        return }}"
        )
    };
    assert_eq!(facts(&text(32), "for").divisibility[0], 32);
    assert_eq!(facts(&text(5), "for").divisibility[0], 1);
    assert_eq!(facts(&text(128), "for").divisibility[0], 64);
}

fn tile(dtype: DType, shape: &[usize], values: impl IntoIterator<Item = i128>) -> Tile {
    let bits = values.into_iter().map(|v| num::encode_int(dtype, v)).collect();
    Tile { shape: shape.to_vec(), elem: dtype.into(), bits }
}

fn type_of(t: &Tile) -> Type {
    Type::tensor(&t.shape, t.elem)
}

/// The strongest facts about a tile, with the longest runs.
fn facts_of(t: &Tile) -> AxisInfo {
    let mut info = AxisInfo::unknown(&type_of(t));
    let values = t.ints().unwrap();
    info.range = (*values.iter().min().unwrap(), *values.iter().max().unwrap());
    for dim in 0..info.rank() {
        let lengths = (0..).map(|k| 1u64 << k).take_while(|&n| n <= t.shape[dim] as u64);
        let (mut longest, mut equal) = (info.clone(), 1);
        for n in lengths {
            let mut runs = info.clone();
            runs.contiguity[dim] = n;
            let divides = |d: &u64| {
                let mut with = runs.clone();
                with.divisibility[dim] = *d;
                with.check(t).is_ok()
            };
            if let Some(d) = (0..=32).rev().map(|k| 1u64 << k).find(divides) {
                runs.divisibility[dim] = d;
                longest = runs;
            }
            let mut constant = info.clone();
            constant.constancy[dim] = n;
            equal = if constant.check(t).is_ok() { n } else { equal };
        }
        info = longest;
        info.constancy[dim] = equal;
    }
    info.check(t).unwrap();
    info
}

/// Random facts that `info` implies.
fn weaker(dtype: DType, info: &AxisInfo, rng: &mut Rng) -> AxisInfo {
    let shift = |rng: &mut Rng, n: u64| (n >> rng.pick(&[0, 0, 1, 2, 5])).max(1);
    let mut weak = info.clone().shortened(info.contiguity.iter().map(|&c| shift(rng, c)).collect());
    for i in 0..weak.rank() {
        weak.divisibility[i] = shift(rng, weak.divisibility[i]);
        weak.constancy[i] = shift(rng, weak.constancy[i]);
    }
    if rng.one_in(2) {
        let (low, high) = num::int_range(dtype);
        weak.range = (rng.pick(&[low, weak.range.0.min(0).max(low)]), rng.pick(&[weak.range.1, high]));
    }
    weak
}

/// Runs, staircases, repetitions and noise, near zero and near the limits of the type.
fn random_tile(dtype: DType, shape: &[usize], rng: &mut Rng) -> Tile {
    let (low, high) = num::int_range(dtype);
    let start = rng.pick(&[0, low, high, 16, -16, 48, 1, -3]) + i128::from(rng.range(-5, 5)) * rng.pick(&[0, 1, 4, 8]);
    let (run, stair, step) =
        (1 << rng.below(4), rng.range(-9, 9) as i128 * rng.pick(&[1, 4, 8]), rng.pick(&[0, 1, 1, 2]));
    let noise = rng.one_in(8);
    let count: usize = shape.iter().product();
    tile(
        dtype,
        shape,
        (0..count as i128).map(|i| {
            let odd = if noise { i128::from(rng.range(0, 3)) } else { 0 };
            start + i % run * step + i / run * stair + odd
        }),
    )
}

const SHAPES: &[&[usize]] = &[&[8], &[16], &[4, 8], &[8, 4], &[1, 8], &[2, 4, 4]];
const INTS: &[DType] = &[DType::I8, DType::U8, DType::I16, DType::I32, DType::U32, DType::I64, DType::U64];

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn facts_form_a_semilattice(seed in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let (dtype, shape) = (rng.pick(INTS), rng.pick(SHAPES));
        let mut some = || { let t = random_tile(dtype, shape, &mut rng); weaker(dtype, &facts_of(&t), &mut rng) };
        let (a, b, c) = (some(), some(), some());
        prop_assert_eq!(a.meet(&a), a.clone());
        prop_assert_eq!(a.meet(&b), b.meet(&a));
        prop_assert_eq!(a.meet(&b).meet(&c), a.meet(&b.meet(&c)));
        prop_assert!(a.meet(&b).implied_by(&a) && a.meet(&b).implied_by(&b));
        prop_assert!(AxisInfo::unknown(&Type::tensor(shape, dtype)).implied_by(&a));
    }

    #[test]
    fn meet_holds_for_values_of_both_operands(seed in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let (dtype, shape) = (rng.pick(INTS), rng.pick(SHAPES));
        let tiles = [0; 2].map(|_| random_tile(dtype, shape, &mut rng));
        let [a, b] = [0, 1].map(|i| weaker(dtype, &facts_of(&tiles[i]), &mut rng));
        for t in &tiles {
            prop_assert_eq!(a.meet(&b).check(t), Ok(()), "{:?} and {:?}, {:?}", a, b, t);
        }
    }

    #[test]
    fn transfer_functions_are_monotone(seed in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let (dtype, shape) = (rng.pick(INTS), rng.pick(SHAPES));
        let ty = Type::tensor(shape, dtype);
        let [a, b] = [0; 2].map(|_| facts_of(&random_tile(dtype, shape, &mut rng)));
        let (weak_a, weak_b) = (weaker(dtype, &a, &mut rng), weaker(dtype, &b, &mut rng));
        prop_assert!(weak_a.implied_by(&a), "{a:?} {weak_a:?}");
        for op in BinaryOp::of_integers() {
            let (strong, weak) = (binary(op, dtype, &a, &b, &ty), binary(op, dtype, &weak_a, &weak_b, &ty));
            prop_assert!(weak.implied_by(&strong), "{op:?} of {a:?}, {b:?}: {strong:?}\nof {weak_a:?}, {weak_b:?}: {weak:?}");
        }
        for &op in CmpOp::ALL {
            prop_assert!(compare(op, &weak_a, &weak_b, &ty).implied_by(&compare(op, &a, &b, &ty)));
        }
    }

    #[test]
    fn transfer_functions_hold_on_random_tiles(seed in any::<u64>()) {
        let mut rng = Rng::new(seed);
        let (dtype, shape) = (rng.pick(INTS), rng.pick(SHAPES));
        let ty = Type::tensor(shape, dtype);
        let [x, y] = [0; 2].map(|_| random_tile(dtype, shape, &mut rng));
        let (a, b) = (weaker(dtype, &facts_of(&x), &mut rng), weaker(dtype, &facts_of(&y), &mut rng));
        check_binary(dtype, (&x, &a), (&y, &b))?;
        let to = rng.pick(INTS);
        let converted = Tile { bits: x.bits.iter().map(|&v| num::convert(dtype, to, v)).collect(), elem: to.into(), ..x.clone() };
        let info = cast(&a, dtype.into(), &ty.with_elem(to));
        prop_assert_eq!(info.check(&converted), Ok(()), "{} to {} of {:?} with {:?}: {:?}", dtype, to, x, a, info);
        let other = rng.pick(SHAPES);
        if other.iter().product::<usize>() == x.bits.len() {
            let moved = Tile { shape: other.to_vec(), ..x.clone() };
            prop_assert_eq!(reshape(&a, &ty, &Type::tensor(other, dtype)).check(&moved), Ok(()));
        }
    }
}

fn check_binary(dtype: DType, (x, a): (&Tile, &AxisInfo), (y, b): (&Tile, &AxisInfo)) -> Result<(), TestCaseError> {
    let ty = type_of(x);
    let apply = |elem: Elem, f: &dyn Fn(u64, u64) -> u64| {
        let bits = x.bits.iter().zip(&y.bits).map(|(&x, &y)| f(x, y)).collect();
        Tile { bits, elem, ..x.clone() }
    };
    for op in BinaryOp::of_integers() {
        let result = apply(dtype.into(), &|x, y| arith::binary(op, dtype, x, y));
        let info = binary(op, dtype, a, b, &ty);
        prop_assert_eq!(info.check(&result), Ok(()), "{:?} of {:?}\n{:?} and {:?}\n{:?}\n{:?}", op, x, a, y, b, info);
    }
    for &op in CmpOp::ALL {
        let result = apply(DType::Bool.into(), &|x, y| arith::compare(op, Some(dtype), x, y) as u64);
        let info = compare(op, a, b, &ty);
        prop_assert_eq!(info.check(&result), Ok(()), "{:?} of {:?}\n{:?} and {:?}\n{:?}\n{:?}", op, x, a, y, b, info);
    }
    Ok(())
}

/// All runs of eight 8-bit numbers, with constants that are multiples of four, close to zero or the maximum; as first
/// and as second operand.
#[test]
fn transfer_functions_hold_on_all_8_bit_runs_and_constants() {
    for dtype in [DType::I8, DType::U8] {
        let (low, high) = num::int_range(dtype);
        for start in low..=high {
            let run = tile(dtype, &[8], (0..8).map(|i| start + i));
            let of_run = facts_of(&run);
            for number in (low..=high).filter(|n| n % 4 == 0 || n.abs() < 4 || *n == high) {
                let same = tile(dtype, &[8], [number; 8]);
                let of_same = facts_of(&same);
                check_binary(dtype, (&run, &of_run), (&same, &of_same)).unwrap();
                check_binary(dtype, (&same, &of_same), (&run, &of_run)).unwrap();
            }
        }
    }
}

/// A gather of rows that start at multiples of five elements: a vector load of four elements would be misaligned.
#[test]
fn select_drops_divisibility_of_shortened_runs() {
    let text = "kernel @f(%x: ptr<f32> {divisible_by = 16}, %m: i32) {
        %r = arange {start = 0, end = 64} : tensor<64xi32>
        %n = splat %m : tensor<64xi32>
        %z = constant {value = 0} : tensor<64xi32>
        %k = cmp_lt %r, %n : tensor<64xbool>
        %w = select %k, %r, %z : tensor<64xi32>
        %e = expand_dims %w {axis = 1} : tensor<64x1xi32>
        %five = constant {value = 5} : tensor<64x1xi32>
        %f = mul %e, %five : tensor<64x1xi32>
        %fb = broadcast %f : tensor<64x4xi32>
        %c = arange {start = 0, end = 4} : tensor<4xi32>
        %ce = expand_dims %c {axis = 0} : tensor<1x4xi32>
        %cb = broadcast %ce : tensor<64x4xi32>
        %o = add %fb, %cb : tensor<64x4xi32>
        %q = splat %x : tensor<64x4xptr<f32>>
        %a = ptr_add %q, %o : tensor<64x4xptr<f32>>
        %v = load %a {eviction = normal} : tensor<64x4xf32>
        return }";
    let p = facts(text, "ptr_add");
    assert_eq!((p.contiguity[1], p.divisibility[1]), (4, 4));
}

/// A remainder keeps runs only if the dividend is not negative and the divisor not zero: -16, -15, … by 16 give 0, -15,
/// …, and a remainder by zero is always zero.
#[test]
fn rem_keeps_runs_of_non_negative_dividends() {
    let by = |first: &str, divisor: &str| {
        format!(
            "kernel @f(%n: i32, %m: i32 {{divisible_by = 16}}) {{
            %sixteen = constant {{value = 16}} : i32
            %most = max %m, %sixteen : i32
            %b = constant {{value = 64}} : i32
            {first}
            %o = mul %p, %b : i32
            %r = arange {{start = 0, end = 64}} : tensor<64xi32>
            %s = splat %o : tensor<64xi32>
            %i = add %s, %r : tensor<64xi32>
            %w = splat {divisor} : tensor<64xi32>
            %q = rem %i, %w : tensor<64xi32>
            return }}"
        )
    };
    let text = |first: &str| by(first, "%most");
    let known = "%p = constant {value = 3} : i32";
    assert_eq!(facts(&text(known), "rem").contiguity[0], 16);
    assert_eq!(facts(&by(known, "%m"), "rem").contiguity[0], 1);
    // A grid may have 2^31 - 1 programs, and 64 times that wraps.
    assert_eq!(facts(&text("%p = program_id {axis = 0} : i32"), "rem").contiguity[0], 1);
    assert_eq!(facts(&text("%p = add %n, %n : i32"), "rem").contiguity[0], 1);
}

/// Hints about signs, as `assume_ranges` adds them, keep runs of any dividend by any argument; also hints about both
/// the divisor of runs and the sign.
#[test]
fn rem_keeps_runs_of_hinted_operands() {
    let text = |hints: [&str; 2]| {
        let [dividend, divisor] = hints;
        format!(
            "kernel @f(%n: i32, %m: i32 {{divisible_by = 16}}) {{
            %b = constant {{value = 64}} : i32
            %o = mul %n, %b : i32
            %r = arange {{start = 0, end = 64}} : tensor<64xi32>
            %s = splat %o : tensor<64xi32>
            %i = add %s, %r : tensor<64xi32>
            %w = splat %m : tensor<64xi32>
            %hi = hint %i {{{dividend}}} : tensor<64xi32>
            %hw = hint %w {{{divisor}}} : tensor<64xi32>
            %q = rem %hi, %hw : tensor<64xi32>
            return }}"
        )
    };
    let rem = |hints| facts(&text(hints), "rem");
    let q = rem(["at_least = 0", "at_least = 1"]);
    assert_eq!((q.contiguity[0], q.divisibility[0], q.range), (16, 16, (0, i32::MAX as i128 - 1)));
    assert_eq!(rem(["divisible = 64, at_least = 3", "at_least = 1"]).contiguity[0], 16);
    for weaker in
        [["at_least = -1", "at_least = 1"], ["at_least = 0", "at_least = 0"], ["divisible = 64", "divisible = 2"]]
    {
        assert_eq!(rem(weaker).contiguity[0], 1, "{weaker:?}");
    }
}

/// Without `contiguous`, the divisibility of a hint applies to the longest runs of the actual values.
#[test]
fn hint_divisibility_applies_to_run_starts() {
    let text = |shape: &str, hint: &str| {
        format!(
            "kernel @f(%x: ptr<f32>, %n: tensor<{shape}xi32>) {{
            %h = hint %n {{{hint}}} : tensor<{shape}xi32>
            return }}"
        )
        .replace(&format!(", %n: tensor<{shape}xi32>"), ", %s: i32")
        .replace("%h =", &format!("%n = splat %s : tensor<{shape}xi32>\n %z = add %n, %n : tensor<{shape}xi32>\n %h ="))
        .replace("hint %n", "hint %z")
    };
    // The length of the runs is unknown, so the hint says nothing about the divisor of single elements.
    assert_eq!(facts(&text("8", "divisible = 16"), "hint").divisibility, [1]);
    assert_eq!(facts(&text("8x1", "divisible = 16"), "hint").divisibility, [16, 16]);
    let both = facts(&text("8", "divisible = 16, contiguous = 4"), "hint");
    assert_eq!((both.contiguity[0], both.divisibility[0]), (4, 16));
}
