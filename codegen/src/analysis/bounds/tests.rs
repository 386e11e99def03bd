//! Footprints of small kernels, compared with the elements that they touch.

use super::*;
use crate::ir::{Arg, Op};
use crate::pipeline::footprint;
use crate::text::parse;

struct TestLaunch {
    integers: Vec<i128>,
    bytes: u64,
}

impl Launch for TestLaunch {
    fn integer(&self, arg: usize) -> i128 {
        self.integers[arg]
    }
    fn bytes(&self, _: usize) -> u64 {
        self.bytes
    }
    fn address(&self, _: usize) -> u64 {
        1 << 20
    }
}

/// Minimum number of f32 elements of argument 0 for which a launch is accepted; `None` if no number suffices.
/// `integers` are the values of all arguments, including placeholders for pointers.
fn required_elements(text: &str, integers: &[i128], grid: [u32; 3]) -> Option<u64> {
    let func = parse(text).unwrap_or_else(|e| panic!("{e}"));
    let footprint = footprint(&func);
    let fits =
        |elements: u64| footprint.check(&TestLaunch { integers: integers.to_vec(), bytes: 4 * elements }, grid).is_ok();
    if !fits(1 << 40) {
        return None;
    }
    let (mut low, mut high) = (0, 1 << 40);
    while low < high {
        let middle = (low + high) / 2;
        if fits(middle) { high = middle } else { low = middle + 1 }
    }
    Some(low)
}

/// Loads and stores `%p` through tiles of 64 pointers, under a mask that `mask` computes into `%k`.
fn masked(mask: &str) -> String {
    format!(
        "kernel @f(%p: ptr<f32>, %n: i32, %m: i32) {{
  %pid = program_id {{axis = 0}} : i32
  %c = constant {{value = 64}} : i32
  %zero = constant {{value = 0}} : i32
  %first = mul %pid, %c : i32
  %a = arange {{start = 0, end = 64}} : tensor<64xi32>
  %f = splat %first : tensor<64xi32>
  %i = add %f, %a : tensor<64xi32>
  %ns = splat %n : tensor<64xi32>
  %ms = splat %m : tensor<64xi32>
  %z = splat %zero : tensor<64xi32>
  {mask}
  %ps = splat %p : tensor<64xptr<f32>>
  %at = ptr_add %ps, %i : tensor<64xptr<f32>>
  %v = load %at, %k {{eviction = normal}} : tensor<64xf32>
  store %at, %v, %k {{eviction = normal}}
  return
}}"
    )
}

#[test]
fn a_mask_bounds_what_it_compares() {
    let grid = [10, 1, 1];
    for (mask, n, elements) in [
        ("%k = cmp_lt %i, %ns : tensor<64xbool>", 600, 600),
        // The mask allows more than the grid covers.
        ("%k = cmp_lt %i, %ns : tensor<64xbool>", 6000, 640),
        ("%k = cmp_le %i, %ns : tensor<64xbool>", 600, 601),
        ("%k = cmp_gt %ns, %i : tensor<64xbool>", 600, 600),
        ("%k = cmp_lt %i, %ns : tensor<64xbool>", 0, 0),
        ("%k = cmp_eq %i, %ns : tensor<64xbool>", 17, 18),
        ("%o = cmp_ge %i, %ns : tensor<64xbool>\n  %k = not %o : tensor<64xbool>", 600, 600),
        (
            "%l = cmp_lt %i, %ns : tensor<64xbool>\n  %g = cmp_ge %i, %z : tensor<64xbool>\n  %k = and %l, %g : tensor<64xbool>",
            600,
            600,
        ),
        // One side of an `or` bounds nothing.
        (
            "%l = cmp_lt %i, %ns : tensor<64xbool>\n  %g = cmp_lt %i, %ms : tensor<64xbool>\n  %k = or %l, %g : tensor<64xbool>",
            100,
            640,
        ),
        ("%k = cmp_lt %ns, %ms : tensor<64xbool>", 100, 0),
        ("%k = cmp_lt %ms, %ns : tensor<64xbool>", 100, 640),
    ] {
        assert_eq!(required_elements(&masked(mask), &[0, n, 50], grid), Some(elements), "{mask} with n = {n}");
    }
}

/// An access at the start of a row plus the distance to a multiple of 8, which is not negative: `cdiv(x, 8) * 8 >= x`.
#[test]
fn ceilings_are_at_least_their_numbers() {
    let text = "kernel @f(%p: ptr<f32>, %stride: i64, %lead: i64) {
  %pid = program_id {axis = 0} : i32
  %wide = cast %pid : i64
  %first = mul %wide, %stride : i64
  %from = add %first, %lead : i64
  %eight = constant {value = 8} : i64
  %up = cdiv %from, %eight : i64
  %begin = mul %up, %eight : i64
  %head = sub %begin, %from : i64
  %there = add %first, %head : i64
  %at = ptr_add %p, %there : ptr<f32>
  %v = load %at {eviction = normal} : f32
  device_print %v {prefix = \"v\"}
  return
}";
    // Rows start at 0, 5, 10 and 15. With a lead of 3, the next multiples of 8 are 8, 8, 16 and 24.
    assert_eq!(required_elements(text, &[0, 5, 3], [4, 1, 1]), Some(24 - 3 + 1));
    assert_eq!(required_elements(text, &[0, 5, 0], [1, 1, 1]), Some(1));
    assert_eq!(required_elements(text, &[0, 5, -3], [1, 1, 1]), Some(4));
    // The second row begins before the buffer.
    assert_eq!(required_elements(text, &[0, -8, 3], [2, 1, 1]), None);
}

/// Loads `%p` through a view [n, m] of strides [s, 1], in blocks of 16 × 32.
fn viewed(boundary: &str) -> String {
    format!(
        "kernel @f(%p: ptr<f32>, %n: i64, %m: i64, %s: i64) {{
  %pid = program_id {{axis = 0}} : i32
  %rows = constant {{value = 16}} : i64
  %one = constant {{value = 1}} : i64
  %zero = constant {{value = 0}} : i64
  %wide = cast %pid : i64
  %first = mul %wide, %rows : i64
  %w = make_view %p, %n, %m, %s, %one, %first, %zero {{order = [1, 0]}} : view<16x32xf32>
  %v = load_view %w {{boundary = {boundary}, padding = zero, eviction = normal}} : tensor<16x32xf32>
  device_print %v {{prefix = \"v\"}}
  return
}}"
    )
}

#[test]
fn boundary_checks_limit_a_view_to_its_shape() {
    let both = viewed("[0, 1]");
    assert_eq!(required_elements(&both, &[0, 40, 20, 100], [3, 1, 1]), Some(39 * 100 + 20));
    // One program accesses only sixteen rows.
    assert_eq!(required_elements(&both, &[0, 40, 20, 100], [1, 1, 1]), Some(15 * 100 + 20));
    assert_eq!(required_elements(&both, &[0, 0, 20, 100], [3, 1, 1]), Some(0));
    assert_eq!(required_elements(&both, &[0, 40, 20, 0], [3, 1, 1]), Some(20));
    // A negative stride leaves the buffer at its start.
    assert_eq!(required_elements(&both, &[0, 40, 20, -1], [3, 1, 1]), None);
    assert_eq!(required_elements(&viewed("[0]"), &[0, 40, 20, 100], [3, 1, 1]), Some(39 * 100 + 32));
    assert_eq!(required_elements(&viewed("[]"), &[0, 40, 20, 100], [3, 1, 1]), Some(47 * 100 + 32));
}

#[test]
fn wrapping_or_loaded_offsets_are_unbounded() {
    let times = |factor: &str| {
        format!(
            "kernel @f(%p: ptr<f32>, %n: i32, %q: ptr<i32>) {{
  %zero = constant {{value = 0}} : i32
  %m = load %q {{eviction = normal}} : i32
  %k = mul %n, {factor} : i32
  %at = ptr_add %p, %k : ptr<f32>
  %v = load %at {{eviction = normal}} : f32
  device_print %v {{prefix = \"v\"}}
  return
}}"
        )
    };
    assert_eq!(required_elements(&times("%n"), &[0, 30_000, 0], [1, 1, 1]), Some(900_000_001));
    assert_eq!(required_elements(&times("%n"), &[0, 50_000, 0], [1, 1, 1]), None);
    assert_eq!(required_elements(&times("%m"), &[0, 3, 0], [1, 1, 1]), None);
    assert_eq!(required_elements(&times("%zero"), &[0, 3, 0], [1, 1, 1]), Some(1));
}

#[test]
fn conditions_around_an_access_bound_it() {
    let text = "kernel @f(%p: ptr<f32>, %n: i32) {
  %pid = program_id {axis = 0} : i32
  %b = cmp_lt %pid, %n : bool
  if %b () {
    %at = ptr_add %p, %pid : ptr<f32>
    %v = load %at {eviction = normal} : f32
    device_print %v {prefix = \"v\"}
    yield
  } () {
    yield
  }
  return
}";
    assert_eq!(required_elements(text, &[0, 7], [100, 1, 1]), Some(7));
    assert_eq!(required_elements(text, &[0, 700], [100, 1, 1]), Some(100));
    assert_eq!(required_elements(text, &[0, 0], [100, 1, 1]), Some(0));
}

/// Loads tiles of 16 elements without a boundary check, in a loop from tile `mid` to tile `last` that carries the
/// offset.
const CARRIED: &str = "kernel @f(%p: ptr<f32>, %last: i32) {
  %pid = program_id {axis = 0} : i32
  %t = constant {value = 16} : i32
  %i1 = constant {value = 1} : i32
  %one = constant {value = 1} : i64
  %tile = constant {value = 16} : i64
  %zero = constant {value = 0} : i64
  %from = mul %pid, %t : i32
  %wide = cast %from : i64
  %mid = min %pid, %last : i32
  %mid16 = mul %mid, %t : i32
  %init = cast %mid16 : i64
  %r = for %mid, %last, %i1, %init : i64 (%i: i32, %o: i64) {
    %w = make_view %p, %one, %one, %o {order = [0]} : view<16xf32>
    %v = load_view %w {boundary = [], padding = zero, eviction = normal} : tensor<16xf32>
    device_print %v {prefix = \"v\"}
    %next = add %o, %tile : i64
    yield %next
  }
  return
}";

#[test]
fn carried_offsets_are_bounded_by_the_loop_index() {
    let text = CARRIED;
    // No program exceeds the last tile, whichever it starts at.
    assert_eq!(required_elements(text, &[0, 20], [10, 1, 1]), Some(320));
    assert_eq!(required_elements(text, &[0, 0], [10, 1, 1]), Some(0));
}

/// Nested selects, as in sorting networks: the work must not double with each level.
#[test]
fn long_select_chains_analyze_in_linear_time() {
    let mut chain = String::new();
    for i in 0..200 {
        chain += &format!(
            "  %b{i} = cmp_lt %x{i}, %n : bool\n  %u{i} = add %x{i}, %one : i32\n  %x{} = select %b{i}, %u{i}, %x{i} : i32\n",
            i + 1
        );
    }
    let text = format!(
        "kernel @f(%p: ptr<f32>, %n: i32) {{
  %x0 = program_id {{axis = 0}} : i32
  %one = constant {{value = 1}} : i32
{chain}  %at = ptr_add %p, %x200 : ptr<f32>
  %v = load %at {{eviction = normal}} : f32
  store %at, %v {{eviction = normal}}
  return
}}"
    );
    let start = std::time::Instant::now();
    assert_eq!(required_elements(&text, &[0, 1000], [10, 1, 1]), Some(210));
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

/// A loop that loads four elements `s` apart per iteration and advances by `by`: through pointers, or by an advancing
/// offset. Programs are 3 elements apart.
fn advancing_pointers(how: &str, stride: i32, mask: &str) -> String {
    let (carried, ty, at, next) = match how {
        "tile of pointers" => ("%own", "tensor<4xptr<f32>>", "%at = add %zs, %as : tensor<4xi32>", "ptr_add %q, %bys"),
        "pointer" => ("%from", "ptr<f32>", "%qs = splat %q : tensor<4xptr<f32>>", "ptr_add %q, %by"),
        _ => ("%as", "tensor<4xi32>", "%fs = splat %from : tensor<4xptr<f32>>", "add %q, %bys"),
    };
    let address = match how {
        "tile of pointers" => "%u = ptr_add %q, %zs",
        "pointer" => "%u = ptr_add %qs, %as",
        _ => "%u = ptr_add %fs, %q",
    };
    let operand = if mask.is_empty() { "" } else { ", %k" };
    format!(
        "kernel @f(%p: ptr<f32>, %n: i32, %s: i32, %first: i32, %last: i32, %by: i32, %m: i32) {{
  %pid = program_id {{axis = 0}} : i32
  %three = constant {{value = 3}} : i32
  %one = constant {{value = 1}} : i32
  %zero = constant {{value = 0}} : i32
  %stride = constant {{value = {stride}}} : i32
  %row = mul %pid, %three : i32
  %from = ptr_add %p, %row : ptr<f32>
  %a = arange {{start = 0, end = 4}} : tensor<4xi32>
  %zs = splat %zero : tensor<4xi32>
  %ones = splat %one : tensor<4xi32>
  %ss = splat %s : tensor<4xi32>
  %as = mul %a, %ss : tensor<4xi32>
  %ns = splat %n : tensor<4xi32>
  %bys = splat %by : tensor<4xi32>
  %froms = splat %from : tensor<4xptr<f32>>
  %own = ptr_add %froms, %as : tensor<4xptr<f32>>
  %r = for %first, %last, %stride, {carried} : {ty} (%i: i32, %q: {ty}) {{
    %im = mul %i, %m : i32
    %left = sub %n, %im : i32
    %lefts = splat %left : tensor<4xi32>
    %ims = splat %im : tensor<4xi32>
    %sum = add %ims, %a : tensor<4xi32>
    {mask}
    {at}
    {address} : tensor<4xptr<f32>>
    %v = load %u{operand} {{eviction = normal}} : tensor<4xf32>
    device_print %v {{prefix = \"v\"}}
    %next = {next} : {ty}
    yield %next
  }}
  return
}}"
    )
}

/// Masks of [`advancing_pointers`], and whether each allows an element of the range, given the product of index and
/// `m`, and `n`.
type Allowed = fn(i32, i32, i32) -> bool;
const MASKS: [(&str, Allowed); 7] = [
    ("%k = cmp_lt %a, %lefts : tensor<4xbool>", |a, im, n| a < n.wrapping_sub(im)),
    ("%k = cmp_gt %lefts, %a : tensor<4xbool>", |a, im, n| n.wrapping_sub(im) > a),
    ("%k = cmp_lt %sum, %ns : tensor<4xbool>", |a, im, n| im.wrapping_add(a) < n),
    ("%k = cmp_le %ns, %sum : tensor<4xbool>", |a, im, n| n <= im.wrapping_add(a)),
    ("%o = cmp_ge %sum, %ns : tensor<4xbool>\n    %k = not %o : tensor<4xbool>", |a, im, n| im.wrapping_add(a) < n),
    (
        "%l = cmp_le %a, %lefts : tensor<4xbool>\n    %g = cmp_ge %a, %ones : tensor<4xbool>\n    %k = and %l, %g : tensor<4xbool>",
        |a, im, n| a <= n.wrapping_sub(im) && a >= 1,
    ),
    ("", |_, _, _| true),
];

/// The lowest and the highest element that [`advancing_pointers`] touches, by enumeration.
fn touched_range(how: &str, stride: i32, allowed: Allowed, args: &[i32; 6]) -> Option<(i64, i64)> {
    let &[n, s, first, last, by, m] = args;
    let mut touched: Option<(i64, i64)> = None;
    for pid in 0..2 {
        for (turn, i) in (first..last).step_by(stride as usize).enumerate() {
            for a in (0..4).filter(|&a| allowed(a, i.wrapping_mul(m), n)) {
                let (own, moved) = (a.wrapping_mul(s), turn as i64 * i64::from(by));
                let offset = match how {
                    "offsets" => i64::from(own.wrapping_add(moved as i32)),
                    _ => i64::from(own) + moved,
                };
                let element = pid * 3 + offset;
                let (low, high) = touched.unwrap_or((element, element));
                touched = Some((low.min(element), high.max(element)));
            }
        }
    }
    touched
}

/// Launches with small numbers (and some that wrap) are rejected if a single element is out of bounds.
#[test]
fn footprint_of_moved_pointers_is_sound() {
    let (mut launches, mut accepted) = (0, 0);
    for how in ["tile of pointers", "pointer", "offsets"] {
        for (stride, (mask, allowed)) in [1, 2].into_iter().flat_map(|stride| MASKS.map(|mask| (stride, mask))) {
            let footprint = footprint(&parse(&advancing_pointers(how, stride, mask)).unwrap_or_else(|e| panic!("{e}")));
            let numbers = [
                [-1, 0, 5, 8, 11],
                [1, -2, 3, 0, 1 << 30],
                [0, 1, 0, 2, 0],
                [0, 1, 2, 3, 4],
                [4, 8, -3, 1, 1 << 30],
                [4, 2, 1, 0, 1 << 30],
            ];
            for choice in 0..5usize.pow(6) {
                // Every seventh launch, to limit the time of debug builds.
                if choice % 7 != 3 {
                    continue;
                }
                let args: [i32; 6] = std::array::from_fn(|k| numbers[k][choice / 5usize.pow(k as u32) % 5]);
                let integers: Vec<i128> = [0].into_iter().chain(args.map(i128::from)).collect();
                let check = |elements: i64| {
                    footprint.check(&TestLaunch { integers: integers.clone(), bytes: 4 * elements as u64 }, [2, 1, 1])
                };
                let Some((low, high)) = touched_range(how, stride, allowed, &args) else { continue };
                launches += 1;
                if low < 0 {
                    assert!(check(1 << 50).is_err(), "{how}, {mask} with {args:?} touches {low}");
                } else {
                    assert!(check(high).is_err(), "{how}, {mask} with {args:?} touches {high}");
                    accepted += u32::from(check(high + 1).is_ok());
                }
            }
        }
    }
    assert!(launches > 40_000 && accepted > launches / 4, "{accepted} of {launches} are accepted");
}

#[test]
fn masks_over_sums_give_tight_bounds_for_moved_pointers() {
    for how in ["tile of pointers", "pointer", "offsets"] {
        for (mask, allowed) in [0, 1, 2, 4].map(|k| MASKS[k]) {
            for (n, s) in (1..20).flat_map(|n| [1, 2, 5].map(|s| (n, s))) {
                // The iterations cover n; the pointers advance with the index.
                let args = [n, s, 0, (n + 3) / 4, 4 * s, 4];
                let integers: Vec<i128> = [0].into_iter().chain(args.map(i128::from)).collect();
                let touched = touched_range(how, 1, allowed, &args).map(|(_, high)| high as u64 + 1);
                assert_eq!(
                    required_elements(&advancing_pointers(how, 1, mask), &integers, [2, 1, 1]),
                    touched,
                    "{how}, {mask} with {args:?}"
                );
            }
        }
    }
}

#[test]
fn facts_of_one_iteration_do_not_apply_to_earlier_ones() {
    // The offset at index 9 is 10 + 9 + … + 2: each iteration adds 10 − index, which is 1 there.
    let text = "kernel @f(%p: ptr<f32>, %last: i32) {
  %ten = constant {value = 10} : i32
  %nine = constant {value = 9} : i32
  %one = constant {value = 1} : i32
  %zero = constant {value = 0} : i32
  %r = for %zero, %last, %one, %zero : i32 (%i: i32, %o: i32) {
    %b = cmp_eq %i, %nine : bool
    %by = sub %ten, %i : i32
    if %b () {
      %at = ptr_add %p, %o : ptr<f32>
      %v = load %at {eviction = normal} : f32
      device_print %v {prefix = \"v\"}
      yield
    } () {
      yield
    }
    %next = add %o, %by : i32
    yield %next
  }
  return
}";
    assert!(required_elements(text, &[0, 10], [1, 1, 1]).is_none_or(|elements| elements >= 55));
}

/// Why a launch of `text` with `elements` f32 of memory is rejected.
fn violation(text: &str, integers: &[i128], elements: u64) -> Option<LaunchViolation> {
    let mut func = parse(text).unwrap_or_else(|e| panic!("{e}"));
    drop_unchecked_assumptions(&mut func);
    let launch = TestLaunch { integers: integers.to_vec(), bytes: 4 * elements };
    footprint(&func).check(&launch, [1; 3]).err()
}

#[test]
fn negative_extents_are_rejected_with_the_argument() {
    for (boundary, n, m, arg, dim) in
        [("[0, 1]", -1, 20, 1, 0), ("[0, 1]", 40, i64::MIN, 2, 1), ("[1]", -1, 20, 1, 0), ("[]", 40, -1, 2, 1)]
    {
        let found = violation(&viewed(boundary), &[0, n.into(), m.into(), 100], 1 << 40);
        let Some(LaunchViolation::Extent { arg: found, dim: at, .. }) = found else {
            panic!("{boundary}, {n}, {m}: {found:?}")
        };
        assert_eq!((found, at), (Some(arg), dim));
    }
    assert_eq!(violation(&viewed("[0, 1]"), &[0, 40, 20, 100], 1 << 40), None);
}

/// A load of one element at an offset that `body` computes into `%k` from the i32 `%n` and the i64 `%w`.
fn at(body: &str) -> String {
    format!(
        "kernel @f(%p: ptr<f32>, %n: i32, %w: i64) {{
  %zero = constant {{value = 0}} : i32
  %one = constant {{value = 1}} : i32
  {body}
  %at = ptr_add %p, %k : ptr<f32>
  %v = load %at {{eviction = normal}} : f32
  device_print %v {{prefix = \"v\"}}
  return
}}"
    )
}

#[test]
fn arithmetic_of_a_launch_wraps_exactly() {
    // 65 537² = 2³² + 2¹⁷ + 1.
    let square = at("%k = mul %n, %n : i32");
    assert_eq!(violation(&square, &[0, 65537, 0], (1 << 17) + 2), None);
    let Some(LaunchViolation::OutOfBounds(out_of_bounds)) = violation(&square, &[0, 65537, 0], (1 << 17) + 1) else {
        panic!("accepted")
    };
    assert_eq!(out_of_bounds.farthest_element, Some((1 << 17) + 1));
    let narrowed = at("%k = cast %w : i32");
    assert_eq!(violation(&narrowed, &[0, 0, (1 << 32) + 5], 6), None);
    assert!(violation(&narrowed, &[0, 0, (1 << 31) + 5], 6).is_some());
    // Division by zero is zero, on every target.
    assert_eq!(violation(&at("%k = div %n, %zero : i32"), &[0, 100, 0], 1), None);
}

#[test]
fn assumes_on_launch_values_are_checked_and_others_ignored() {
    let positive = at("%c = cmp_gt %n, %zero : bool\n  assume %c\n  %k = mul %n, %zero : i32");
    assert_eq!(violation(&positive, &[0, 1, 0], 1), None);
    assert!(matches!(violation(&positive, &[0, 0, 0], 1), Some(LaunchViolation::Assumption { .. })));
    assert!(matches!(violation(&positive, &[0, i128::from(i32::MIN), 0], 1), Some(LaunchViolation::Assumption { .. })));
    let both = at(
        "%c = cmp_gt %n, %zero : bool\n  %d = cmp_lt %n, %one : bool\n  %e = not %d : bool\n  %a = and %c, %e : bool\n  assume %a\n  %k = mul %n, %zero : i32",
    );
    assert_eq!(violation(&both, &[0, 1, 0], 1), None);
    assert!(violation(&both, &[0, 0, 0], 1).is_some());
    // A number loaded from memory may be anything, whatever the kernel assumes.
    let text = "kernel @f(%p: ptr<f32>, %q: ptr<i32>, %n: i32) {
  %zero = constant {value = 0} : i32
  %k = load %q {eviction = normal} : i32
  %low = cmp_ge %k, %zero : bool
  %high = cmp_lt %k, %n : bool
  %c = and %low, %high : bool
  assume %c
  %at = ptr_add %p, %k : ptr<f32>
  %v = load %at {eviction = normal} : f32
  device_print %v {prefix = \"v\"}
  return
}";
    assert!(matches!(violation(text, &[0, 0, 10], 1 << 20), Some(LaunchViolation::OutOfBounds(_))));
}

#[test]
fn hints_are_checked_or_dropped() {
    let hinted = |body: &str| at(&format!("{body}\n  %l = min %h, %zero : i32\n  %k = max %l, %zero : i32"));
    let of_argument = hinted("%h = hint %n {divisible = 16} : i32");
    assert_eq!(violation(&of_argument, &[0, -32, 0], 1), None);
    assert!(matches!(violation(&of_argument, &[0, 24, 0], 1), Some(LaunchViolation::Multiple { by: 16, .. })));
    // For every program id.
    let of_product =
        hinted("%i = program_id {axis = 0} : i32\n  %x = mul %i, %n : i32\n  %h = hint %x {divisible = 16} : i32");
    assert_eq!(violation(&of_product, &[0, 48, 0], 1), None);
    assert!(matches!(violation(&of_product, &[0, 40, 0], 1), Some(LaunchViolation::Multiple { by: 16, .. })));
    // No launch can check these hints.
    for body in [
        "%i = program_id {axis = 0} : i32\n  %h = hint %i {divisible = 16} : i32",
        "%i = min %n, %one : i32\n  %j = program_id {axis = 0} : i32\n  %x = mul %j, %j : i32\n  %h = hint %x {contiguous = 4} : i32",
    ] {
        let mut func = parse(&hinted(body)).unwrap_or_else(|e| panic!("{e}"));
        drop_unchecked_assumptions(&mut func);
        let left = func.walk().into_iter().any(|id| {
            matches!(&func.op(id).op, Op::Hint { divisible: Some(_), .. } | Op::Hint { contiguous: Some(_), .. })
        });
        assert!(!left, "{body}");
    }
}

#[test]
fn hints_on_addresses_cancel_terms() {
    // p + (r + (⌈(r + n) / 4⌉ · 4 − (r + n))) is p − n and multiples of four f32s.
    let text = "kernel @f(%p: ptr<f32>, %n: i32, %r: ptr<i32>) {
  %four = constant {value = 4} : i32
  %three = constant {value = 3} : i32
  %row = load %r {eviction = normal} : i32
  %from = add %row, %n : i32
  %up = add %from, %three : i32
  %q = div %up, %four : i32
  %begin = mul %q, %four : i32
  %head = sub %begin, %from : i32
  %k = add %row, %head : i32
  %at = ptr_add %p, %k : ptr<f32>
  %h = hint %at {divisible = 16} : ptr<f32>
  %zero = constant {value = 0} : i32
  %c = cmp_lt %n, %zero : bool
  if %c () {
    %v = load %h {eviction = normal} : f32
    device_print %v {prefix = \"v\"}
    yield
  } () {
    yield
  }
  return
}";
    assert_eq!(violation(text, &[0, 4, 0], 1), None);
    assert!(matches!(violation(text, &[0, 3, 0], 1), Some(LaunchViolation::Multiple { by: 16, .. })));
}

#[test]
fn loop_steps_and_ends_are_checked() {
    let text = "kernel @f(%p: ptr<f32>, %start: i32, %end: i32, %step: i32) {
  %zero = constant {value = 0} : i32
  for %start, %end, %step (%i: i32) {
    %k = mul %i, %zero : i32
    %at = ptr_add %p, %k : ptr<f32>
    %v = load %at {eviction = normal} : f32
    device_print %v {prefix = \"v\"}
    yield
  }
  return
}";
    let check = |start: i32, end: i32, step: i32| violation(text, &[0, start, end, step].map(i128::from), 1);
    assert_eq!(check(0, 100, 7), None);
    assert!(matches!(check(0, 100, 0), Some(LaunchViolation::Step { found: 0, .. })));
    assert!(matches!(check(0, 100, -3), Some(LaunchViolation::Step { found: -3, .. })));
    assert!(matches!(check(100, 0, -3), Some(LaunchViolation::Step { found: -3, .. })));
    assert_eq!(check(100, 0, 3), None);
    // A loop without a distance to go may have any step.
    assert_eq!(check(5, 5, 0), None);
    assert!(matches!(check(0, i32::MAX, 64), Some(LaunchViolation::LoopEnd { .. })));
    assert_eq!(check(i32::MIN, i32::MIN + 70, 64), None);
}

#[test]
fn conditions_are_printed_and_decided_for_all_launches() {
    let of = |body: &str| footprint(&parse(&at(&format!("{body}\n  %k = mul %n, %zero : i32"))).unwrap());
    let names = ["p", "n", "w"];
    let sixteen =
        "%s = constant {value = 16} : i32\n  %r = rem %n, %s : i32\n  %c = cmp_eq %r, %zero : bool\n  assume %c";
    let listed = of(sixteen).assumed_conditions(&names).concat();
    assert!(listed.starts_with("(n % 16) == 0 ("), "{listed}");
    let both = "%c = cmp_gt %n, %zero : bool\n  %d = cmp_lt %n, %one : bool\n  %a = and %c, %d : bool\n  assume %a";
    let listed = of(both).assumed_conditions(&names).concat();
    assert!(listed.starts_with("(n > 0) && (n < 1) ("), "{listed}");
    let args = names.map(|name| Arg { name: name.into(), divisible_by: 1, equal_to: None });
    assert_eq!(of(sixteen).false_assumption(&args), None);
    assert!(of("%c = cmp_gt %zero, %one : bool\n  assume %c").false_assumption(&args).is_some());
    let text = at(&format!("{sixteen}\n  %k = mul %n, %zero : i32"));
    let with = |n: i32| footprint(&parse(&text.replace("%n: i32", &format!("%n: i32 {{equal_to = {n}}}"))).unwrap());
    assert!(with(5).false_assumption(&args).is_some() && with(32).false_assumption(&args).is_none());
    let is_false = |body: &str, divisible_by: u64, equal_to: Option<i64>| {
        let [p, n, w] = args.clone();
        of(body).false_assumption(&[p, Arg { divisible_by, equal_to, ..n }, w]).is_some()
    };
    assert!(is_false(sixteen, 1, Some(5)) && !is_false(sixteen, 1, Some(32)));
    // 4 · n + 1 is 7 for no n, and is 9 only for n = 2.
    let sum = |of_sum: i32| {
        format!(
            "%f = constant {{value = 4}} : i32\n  %e = constant {{value = {of_sum}}} : i32\n  \
             %m = mul %n, %f : i32\n  %s = add %m, %one : i32\n  %c = cmp_eq %s, %e : bool\n  assume %c"
        )
    };
    assert!(is_false(&sum(7), 1, None) && !is_false(&sum(9), 1, None));
    assert!(!is_false(&sum(9), 2, None) && is_false(&sum(9), 4, None) && is_false(&sum(9), 1, Some(3)));
}
