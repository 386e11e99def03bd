//! Tests that split loops compute the same values, and are split at the mask boundary.

use crate::interp::{self, ArgValue, Memory};
use crate::ir::{Builder, Func, Loc, Op, OpId, Stage};
use crate::text::{parse, print};
use crate::verify::verify;
use proptest::prelude::*;

/// The parameters of the loop of [`Case::text`].
#[derive(Clone, Debug)]
struct Shape {
    step: i64,
    /// The factor of the index in the comparison.
    factor: i64,
    comparison: &'static str,
    /// The `select` uses the negated comparison.
    negated: bool,
    /// The `select` keeps the tile where the condition is false.
    inverted: bool,
    /// The dimension of the tile along which the index is compared.
    axis: usize,
}

/// A loop over tiles of rows, with its arguments.
#[derive(Clone, Debug)]
struct Case {
    shape: Shape,
    lower: i32,
    upper: i32,
    left: i32,
    right: i32,
    /// The row of the first tile, and the number of rows.
    start: i32,
    rows: i32,
}

const TILE: i64 = 4;
/// The distance in rows between consecutive tiles, a multiple of every step.
const ROW_STEP: i64 = 6;

impl Case {
    /// Compares factor · i + (0 … 3) − left with right + (0 … 3), for tiles that advance by six rows per iteration.
    fn text(&self) -> String {
        let Shape { step, factor, comparison, negated, inverted, axis } = &self.shape;
        let condition = if *negated { "%n" } else { "%c" };
        let arms = if *inverted { "%fill, %t" } else { "%t, %fill" };
        let (other, by) = (1 - axis, ROW_STEP);
        let (wide, tall) = if *axis == 0 { ("1x4", "4x1") } else { ("4x1", "1x4") };
        format!(
            "kernel @f(%x: ptr<f32>, %out: ptr<f32>, %trace: ptr<i32>, %lo: i32, %hi: i32, %left: i32, %right: i32, \
             %start: i32, %rows: i32) {{
  %step = constant {{value = {step}}} : i32
  %factor = constant {{value = {factor}}} : i32
  %by = constant {{value = {by}}} : i64
  %zero = constant {{value = 0}} : i64
  %one = constant {{value = 1}} : i64
  %four = constant {{value = 4}} : i64
  %none = constant {{value = 0}} : i32
  %prime = constant {{value = 31}} : i32
  %sums = constant {{value = 0.0}} : tensor<4x4xf32>
  %fill = constant {{value = -2.0}} : tensor<4x4xf32>
  %first = cast %start : i64
  %count = cast %rows : i64
  %r = arange {{start = 0, end = 4}} : tensor<4xi32>
  %ls = splat %left : tensor<4xi32>
  %rs = splat %right : tensor<4xi32>
  %rr = add %r, %rs : tensor<4xi32>
  %re = expand_dims %rr {{axis = {other}}} : tensor<{tall}xi32>
  %rb = broadcast %re : tensor<4x4xi32>
  %acc, %end, %hash = for %lo, %hi, %step, %sums, %first, %none {{num_stages = 3}} : tensor<4x4xf32>, i64, i32 \
             (%i: i32, %a: tensor<4x4xf32>, %at: i64, %h: i32) {{
    %v = make_view %x, %count, %four, %four, %one, %at, %zero {{order = [1, 0]}} : view<4x4xf32>
    %t = load_view %v {{boundary = [0], padding = zero, eviction = normal}} : tensor<4x4xf32>
    %f = mul %i, %factor : i32
    %s = splat %f : tensor<4xi32>
    %k = add %s, %r : tensor<4xi32>
    %d = sub %k, %ls : tensor<4xi32>
    %e = expand_dims %d {{axis = {axis}}} : tensor<{wide}xi32>
    %b = broadcast %e : tensor<4x4xi32>
    %c = {comparison} %b, %rb : tensor<4x4xbool>
    %n = not %c : tensor<4x4xbool>
    %m = select {condition}, {arms} : tensor<4x4xf32>
    %p = dot %m, %t, %a {{precision = ieee}} : tensor<4x4xf32>
    %g = mul %h, %prime : i32
    %w = add %g, %i : i32
    %next = add %at, %by : i64
    yield %p, %next, %w
  }}
  %o = make_view %out, %four, %four, %four, %one, %zero, %zero {{order = [1, 0]}} : view<4x4xf32>
  store_view %o, %acc {{boundary = [], eviction = normal}}
  store %trace, %hash {{eviction = normal}}
  return
}}"
        )
    }

    /// Runs the function. Returns the memory that it writes, and the number of prints.
    fn run(&self, func: &Func) -> (Vec<u8>, usize) {
        let mut memory = Memory::new();
        let values = (0..self.rows.max(0) * 4).flat_map(|i| (0.25 * (i * 7 % 64 - 31) as f32).to_le_bytes());
        let x = memory.add(values.collect());
        let [out, trace] = [64, 4].map(|bytes| memory.add_uninit(bytes));
        let numbers = [self.lower, self.upper, self.left, self.right, self.start, self.rows];
        let numbers = numbers.map(|n| ArgValue::Int(n.into()));
        let args = [&[x.into(), out.into(), trace.into()], &numbers[..]].concat();
        let outcome = interp::run(func, &args, [1; 3], &mut memory);
        let outcome = outcome.unwrap_or_else(|e| panic!("{e}\n{self:?}\n{}", print(func)));
        ([memory.bytes(out), memory.bytes(trace)].concat(), outcome.prints.len())
    }

    /// The iterations, as (index, first row).
    fn iterations(&self) -> Vec<(i64, i64)> {
        let indices = (self.lower.into()..self.upper.into()).step_by(self.shape.step as usize);
        indices.enumerate().map(|(t, i): (usize, i64)| (i, i64::from(self.start) + ROW_STEP * t as i64)).collect()
    }

    /// Whether the mask keeps all elements of a tile, checked element by element.
    fn is_fully_visible(&self, i: i64) -> bool {
        let keeps = |(k, r): (i64, i64)| {
            let x = self.shape.factor * i + k - i64::from(self.left);
            let y = r + i64::from(self.right);
            let holds = match self.shape.comparison {
                "cmp_lt" => x < y,
                "cmp_le" => x <= y,
                "cmp_gt" => x > y,
                _ => x >= y,
            };
            holds ^ self.shape.negated ^ self.shape.inverted
        };
        (0..TILE).flat_map(|k| (0..TILE).map(move |r| (k, r))).all(keeps)
    }

    /// The number of iterations that need neither mask nor bounds check (at the end of the loop: no mask).
    fn unmasked(&self) -> usize {
        let less = matches!(self.shape.comparison, "cmp_lt" | "cmp_le");
        let small = less ^ self.shape.negated ^ self.shape.inverted;
        let all = self.iterations();
        if small == (self.shape.factor > 0) {
            let inside = |row: i64| self.start >= 0 && row + TILE <= i64::from(self.rows);
            all.iter().take_while(|&&(i, row)| self.is_fully_visible(i) && inside(row)).count()
        } else {
            all.iter().rev().take_while(|&&(i, _)| self.is_fully_visible(i)).count()
        }
    }
}

fn loops(func: &Func) -> Vec<OpId> {
    func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::For { .. })).collect()
}

fn has(func: &Func, id: OpId, wanted: impl Fn(&Op) -> bool) -> bool {
    func.block(func.op(id).regions[0]).ops.iter().any(|&op| wanted(&func.op(op).op))
}

fn split(text: &str) -> Func {
    let mut func = parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    super::run(&mut func);
    verify(&func, Stage::Tile).unwrap_or_else(|e| panic!("{}\n{}", e[0], print(&func)));
    func
}

/// Adds a print to each iteration of the loops without a mask.
fn print_where_unmasked(func: &mut Func) {
    for id in loops(func) {
        if !has(func, id, |op| *op == Op::Select) {
            let region = func.op(id).regions[0];
            let first = func.block(region).ops[0];
            let mut b = Builder::before(func, first, Loc::unknown());
            b.op(Op::DevicePrint { prefix: "unmasked".into() }, &[], &[]);
        }
    }
}

prop_compose! {
    fn shapes()(
        step in 1..4i64,
        factor in prop::sample::select(vec![-5, -4, -1, 1, 2, 3, 8]),
        comparison in prop::sample::select(vec!["cmp_lt", "cmp_le", "cmp_gt", "cmp_ge"]),
        negated in any::<bool>(),
        inverted in any::<bool>(),
        axis in 0..2usize,
    ) -> Shape {
        Shape { step, factor, comparison, negated, inverted, axis }
    }
}

prop_compose! {
    /// Small numbers of both signs, including loops without iterations.
    fn cases()(
        shape in shapes(),
        lower in -6..7i32,
        upper in -8..24i32,
        left in -40..40i32,
        right in -40..40i32,
        start in prop::sample::select(vec![-6, -1, 0, 0, 0, 3]),
        rows in 0..100i32,
    ) -> Case {
        Case { shape, lower, upper, left, right, start, rows }
    }
}

prop_compose! {
    /// Numbers near the limits of i32, where sums wrap.
    fn far_cases()(
        case in cases(),
        base in prop::sample::select(vec![0, i32::MIN, i32::MAX, i32::MAX / 8]),
        moved in (any::<bool>(), any::<bool>(), any::<bool>()),
    ) -> Case {
        let to = |n: i32, moved: bool| if moved { base.saturating_add(n) } else { n };
        let (lower, upper) = (to(case.lower, moved.0), to(case.upper, moved.0));
        Case { lower, upper, left: to(case.left, moved.1), right: to(case.right, moved.2), ..case }
    }
}

proptest! {
    #[test]
    fn loops_are_split_where_the_mask_ends(case in cases()) {
        let before = parse(&case.text()).unwrap();
        let mut after = split(&case.text());
        let text = print(&after);
        prop_assert_eq!(loops(&after).len(), 2, "{}", text);
        print_where_unmasked(&mut after);
        let (expected, _) = case.run(&before);
        let (found, unmasked) = case.run(&after);
        prop_assert_eq!(expected, found, "{}", text);
        prop_assert_eq!(unmasked, case.unmasked(), "{}", text);
    }

    #[test]
    fn wrapping_arithmetic_keeps_results(case in far_cases()) {
        let before = parse(&case.text()).unwrap();
        let after = split(&case.text());
        prop_assert_eq!(case.run(&before).0, case.run(&after).0, "{}", print(&after));
    }
}

fn typical_case() -> Case {
    let shape = Shape { step: 1, factor: 4, comparison: "cmp_le", negated: false, inverted: false, axis: 0 };
    Case { shape, lower: 0, upper: 10, left: 0, right: 17, start: 0, rows: 40 }
}

/// Keys 4i … 4i + 3 against rows 17 …: tiles 0 to 3 are fully visible.
#[test]
fn hints_stay_and_bounds_checks_are_removed() {
    let mut func = split(&typical_case().text());
    let all = loops(&func);
    for &id in &all {
        assert!(matches!(func.op(id).op, Op::For { num_stages: Some(3), .. }), "{}", print(&func));
    }
    let unchecked = |op: &Op| matches!(op, Op::LoadView { boundary, .. } if boundary.is_empty());
    assert_eq!(all.iter().map(|&id| has(&func, id, unchecked)).collect::<Vec<_>>(), [true, false]);
    assert_eq!(all.iter().map(|&id| has(&func, id, |op| *op == Op::Select)).collect::<Vec<_>>(), [false, true]);
    print_where_unmasked(&mut func);
    assert_eq!(typical_case().run(&func).1, 4);
}

#[test]
fn other_loops_are_not_split() {
    let text = typical_case().text();
    for (why, from, to) in [
        ("no dot", "%p = dot %m, %t, %a {precision = ieee}", "%p = add %m, %a"),
        ("a condition that never changes", "%f = mul %i, %factor", "%f = mul %lo, %factor"),
        ("a factor that is not known", "%f = mul %i, %factor", "%f = mul %i, %left"),
        ("not the index alone", "%f = mul %i, %factor", "%f = mul %i, %i"),
        ("equality", "cmp_le", "cmp_eq"),
    ] {
        assert!(text.contains(from), "{why}");
        assert_eq!(loops(&split(&text.replace(from, to))).len(), 1, "{why}");
    }
}

/// Each row sees the 9 keys before it and its own: the first comparison determines the split, and the other stays in
/// both loops.
#[test]
fn a_sliding_window_is_split_at_one_end() {
    let text = typical_case().text();
    let line = "    %n = not %c : tensor<4x4xbool>\n";
    let window = "    %nine = constant {value = 9} : tensor<4x4xi32>
    %low = sub %rb, %nine : tensor<4x4xi32>
    %c2 = cmp_ge %b, %low : tensor<4x4xbool>
    %n = and %c, %c2 : tensor<4x4xbool>\n";
    let text = text.replace(line, window).replace("select %c", "select %n");
    let before = parse(&text).unwrap();
    let func = split(&text);
    let all = loops(&func);
    let count = |id: OpId| {
        let ops = &func.block(func.op(id).regions[0]).ops;
        let used = |&&op: &&OpId| {
            let data = func.op(op);
            matches!(data.op, Op::Cmp(_)) && !func.uses(data.results[0]).is_empty()
        };
        ops.iter().filter(used).count()
    };
    assert_eq!(all.iter().map(|&id| count(id)).collect::<Vec<_>>(), [1, 2], "{}", print(&func));
    assert_eq!(typical_case().run(&before).0, typical_case().run(&func).0);
}

/// Running sums of tiles of x, added up; the last tile may be partial.
fn sums_of_tiles(hints: &str, combine: &str) -> String {
    format!(
        "kernel @f(%x: ptr<f32>, %out: ptr<f32>, %n: i32) {{
  %none = constant {{value = 0}} : i32
  %four = constant {{value = 4}} : i32
  %zero = constant {{value = 0}} : i64
  %one = constant {{value = 1}} : i64
  %all = constant {{value = 4}} : i64
  %count = cast %n : i64
  %sums = constant {{value = 0.0}} : tensor<4xf32>
  %acc = for %none, %n, %four, %sums{hints} : tensor<4xf32> (%i: i32, %a: tensor<4xf32>) {{
    %at = cast %i : i64
    %v = make_view %x, %count, %one, %at {{order = [0]}} : view<4xf32>
    %t = load_view %v {{boundary = [0], padding = zero, eviction = normal}} : tensor<4xf32>
    {combine}
    %b = add %a, %s : tensor<4xf32>
    yield %b
  }}
  %o = make_view %out, %all, %one, %zero {{order = [0]}} : view<4xf32>
  store_view %o, %acc {{boundary = [], eviction = normal}}
  return
}}"
    )
}

#[test]
fn a_scan_of_loaded_tiles_runs_without_bounds_checks_up_to_the_last_tile() {
    let scan = "%s = scan %t {axis = 0, reverse = false} : tensor<4xf32> (%l: f32, %r: f32) {
      %q = add %l, %r : f32
      yield %q
    }";
    let square = "%s = mul %t, %t : tensor<4xf32>";
    for (hints, combine, parts) in
        [("", scan, 2), (" {split = false}", scan, 1), ("", square, 1), (" {split = true}", square, 2)]
    {
        let text = sums_of_tiles(hints, combine);
        let func = split(&text);
        let unchecked = |op: &Op| matches!(op, Op::LoadView { boundary, .. } if boundary.is_empty());
        let found: Vec<bool> = loops(&func).iter().map(|&id| has(&func, id, unchecked)).collect();
        assert_eq!(found, [&[true, false][..], &[false]][2 - parts], "{hints} {combine}");
        for n in 0..10 {
            let result = |func: &Func| {
                let mut memory = Memory::new();
                let x = memory.add((0..n).flat_map(|i| (1.5 * i as f32).to_le_bytes()).collect());
                let out = memory.add_uninit(16);
                let args = [x.into(), out.into(), ArgValue::Int(n.into())];
                interp::run(func, &args, [1; 3], &mut memory).unwrap_or_else(|e| panic!("{e}\n{}", print(func)));
                memory.bytes(out).to_vec()
            };
            assert_eq!(result(&func), result(&parse(&text).unwrap()), "{n} elements, {hints} {combine}");
        }
    }
}
