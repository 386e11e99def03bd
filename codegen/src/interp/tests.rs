//! Small programs with results computed by hand or by plain Rust in f32 and f64.

use super::{ArgValue, BufferId, InterpError, Memory, Outcome, RunOptions, run, run_traced};
use crate::text::parse;

fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn read_f32s(memory: &Memory, id: BufferId) -> Vec<f32> {
    memory.bytes(id).chunks(4).map(|c| f32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

fn read_i32s(memory: &Memory, id: BufferId) -> Vec<i32> {
    memory.bytes(id).chunks(4).map(|c| i32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

fn run_text(text: &str, args: &[ArgValue], grid: [u32; 3], memory: &mut Memory) -> Result<Outcome, InterpError> {
    let func = parse(text).unwrap_or_else(|e| panic!("{e}\n{text}"));
    run(&func, args, grid, memory)
}

/// Runs a body as a single program that writes to a buffer of `n` i32, `%o`; returns the buffer.
fn ints(n: usize, body: &str) -> Result<Vec<i32>, InterpError> {
    let mut memory = Memory::new();
    let out = memory.add(vec![0; 4 * n]);
    let text = format!("kernel @k(%o: ptr<i32>) {{\n{body}\nreturn\n}}");
    run_text(&text, &[ArgValue::Buffer(out)], [1; 3], &mut memory)?;
    Ok(read_i32s(&memory, out))
}

/// As [`ints`]; stores the tile `%r: tensor<nxi32>` of the body to the buffer.
fn tile(n: usize, body: &str) -> Vec<i32> {
    let store = format!(
        "%idx = arange {{start = 0, end = {n}}} : tensor<{n}xi32>
        %ps = splat %o : tensor<{n}xptr<i32>>
        %pp = ptr_add %ps, %idx : tensor<{n}xptr<i32>>
        store %pp, %r {{eviction = normal}}"
    );
    ints(n, &format!("{body}\n{store}")).unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn a_masked_loop_over_programs_adds_vectors() {
    let text = "kernel @add(%x: ptr<f32>, %y: ptr<f32>, %n: i32) {
        %0 = program_id {axis = 0} : i32
        %1 = constant {value = 8} : i32
        %2 = mul %0, %1 : i32
        %3 = arange {start = 0, end = 8} : tensor<8xi32>
        %4 = splat %2 : tensor<8xi32>
        %5 = add %4, %3 : tensor<8xi32>
        %6 = splat %n : tensor<8xi32>
        %7 = cmp_lt %5, %6 : tensor<8xbool>
        %8 = splat %x : tensor<8xptr<f32>>
        %9 = ptr_add %8, %5 : tensor<8xptr<f32>>
        %10 = load %9, %7 {eviction = normal} : tensor<8xf32>
        %11 = add %10, %10 : tensor<8xf32>
        %12 = splat %y : tensor<8xptr<f32>>
        %13 = ptr_add %12, %5 : tensor<8xptr<f32>>
        store %13, %11, %7 {eviction = normal}
        return
    }";
    let mut memory = Memory::new();
    let input: Vec<f32> = (0..20).map(|i| i as f32 * 0.5).collect();
    let x = memory.add(f32s(&input));
    let y = memory.add_uninit(80);
    let args = [ArgValue::Buffer(x), ArgValue::Buffer(y), ArgValue::Int(20)];
    run_text(text, &args, [3, 1, 1], &mut memory).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(read_f32s(&memory, y), input.iter().map(|v| v + v).collect::<Vec<_>>());

    // One element too many: the error names the op, the program, the buffer and the offset.
    let args = [ArgValue::Buffer(x), ArgValue::Buffer(y), ArgValue::Int(21)];
    let error = run_text(text, &args, [3, 1, 1], &mut memory).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`%10 = load %9, %7 {eviction = normal} : tensor<8xf32>` in program (2, 0, 0): \
         accesses 4 bytes at offset 80 of buffer 0, which has 80 bytes"
    );
}

#[test]
fn views_pad_loads_and_mask_stores_at_the_boundary() {
    let text = |boundary: &str| {
        format!(
            "kernel @copy(%x: ptr<f32>, %y: ptr<f32>, %rows: i64, %cols: i64, %ld: i64, %r0: i64, %c0: i64) {{
            %one = constant {{value = 1}} : i64
            %zero = constant {{value = 0}} : i64
            %four = constant {{value = 4}} : i64
            %v = make_view %x, %rows, %cols, %ld, %one, %zero, %zero {{order = [1, 0]}} : view<4x4xf32>
            %w = advance %v, %r0, %c0 : view<4x4xf32>
            %t = load_view %w {{boundary = {boundary}, padding = nan, eviction = normal}} : tensor<4x4xf32>
            %o = make_view %y, %four, %four, %four, %one, %zero, %zero {{order = [1, 0]}} : view<4x4xf32>
            store_view %o, %t {{boundary = [], eviction = normal}}
            return
            }}"
        )
    };
    let mut memory = Memory::new();
    // 3 rows of 5 elements, 6 apart.
    let x = memory.add(f32s(&(0..18).map(|i| i as f32).collect::<Vec<_>>()));
    let y = memory.add(vec![0; 64]);
    let mut args = [ArgValue::Int(0); 7];
    args[0] = ArgValue::Buffer(x);
    args[1] = ArgValue::Buffer(y);
    for (arg, value) in args[2..].iter_mut().zip([3, 5, 6, -1, 2]) {
        *arg = ArgValue::Int(value);
    }
    run_text(&text("[0, 1]"), &args, [1; 3], &mut memory).unwrap_or_else(|e| panic!("{e}"));
    let n = f32::NAN;
    let expected = [n, n, n, n, 2.0, 3.0, 4.0, n, 8.0, 9.0, 10.0, n, 14.0, 15.0, 16.0, n];
    for (got, want) in read_f32s(&memory, y).into_iter().zip(expected) {
        assert!(got == want || (got.is_nan() && want.is_nan()), "{got} {want}");
    }
    let error = run_text(&text("[0]"), &args, [1; 3], &mut memory).unwrap_err();
    assert!(
        error.message == "accesses index 5 of dimension 1, which has 5 elements, and `boundary` does not list it",
        "{error}"
    );
}

#[test]
fn shapes_move_elements() {
    let grid = "%a = arange {start = 0, end = 8} : tensor<8xi32>\n%m = reshape %a : tensor<2x4xi32>\n";
    assert_eq!(
        tile(8, &format!("{grid}%t = trans %m {{perm = [1, 0]}} : tensor<4x2xi32>\n%r = reshape %t : tensor<8xi32>")),
        [0, 4, 1, 5, 2, 6, 3, 7]
    );
    let broadcast = "%a = arange {start = 5, end = 7} : tensor<2xi32>
        %e = expand_dims %a {axis = 1} : tensor<2x1xi32>
        %b = broadcast %e : tensor<2x4xi32>
        %r = reshape %b : tensor<8xi32>";
    assert_eq!(tile(8, broadcast), [5, 5, 5, 5, 6, 6, 6, 6]);
    let join = "%a = arange {start = 0, end = 4} : tensor<4xi32>
        %b = arange {start = 4, end = 8} : tensor<4xi32>
        %j = join %a, %b : tensor<4x2xi32>
        %r = reshape %j : tensor<8xi32>";
    assert_eq!(tile(8, join), [0, 4, 1, 5, 2, 6, 3, 7]);
    let split = format!("{grid}%p = reshape %a : tensor<4x2xi32>\n%s, %r = split %p : tensor<4xi32>, tensor<4xi32>");
    assert_eq!(tile(4, &split), [1, 3, 5, 7]);
}

#[test]
fn reductions_and_scans_follow_their_axis() {
    let grid = "%a = arange {start = 0, end = 8} : tensor<8xi32>\n%m = reshape %a : tensor<2x4xi32>\n";
    let sum = "(%x: i32, %y: i32) { %s = add %x, %y : i32\nyield %s }";
    assert_eq!(tile(4, &format!("{grid}%r = reduce %m {{axis = 0}} : tensor<4xi32> {sum}")), [4, 6, 8, 10]);
    assert_eq!(tile(2, &format!("{grid}%r = reduce %m {{axis = 1}} : tensor<2xi32> {sum}")), [6, 22]);
    let scan = |reverse: bool| {
        format!(
            "{grid}%sc = scan %m {{axis = 1, reverse = {reverse}}} : tensor<2x4xi32> {sum}\n%r = reshape %sc : tensor<8xi32>"
        )
    };
    assert_eq!(tile(8, &scan(false)), [0, 1, 3, 6, 4, 9, 15, 22]);
    assert_eq!(tile(8, &scan(true)), [6, 6, 5, 3, 22, 18, 13, 7]);
    // Two operands: the largest of (7·i) mod 8 and its index.
    let argmax = "%i = arange {start = 0, end = 8} : tensor<8xi32>
        %c = constant {value = 7} : tensor<8xi32>
        %d = constant {value = 8} : tensor<8xi32>
        %p = mul %i, %c : tensor<8xi32>
        %v = rem %p, %d : tensor<8xi32>
        %m, %at = reduce %v, %i {axis = 0} : i32, i32 (%v0: i32, %i0: i32, %v1: i32, %i1: i32) {
          %g = cmp_gt %v1, %v0 : bool
          %vv = select %g, %v1, %v0 : i32
          %ii = select %g, %i1, %i0 : i32
          yield %vv, %ii
        }
        %j = join %m, %at : tensor<2xi32>
        %r = reshape %j : tensor<2xi32>";
    assert_eq!(tile(2, argmax), [7, 1]);
}

#[test]
fn loops_branches_and_whiles_carry_values() {
    let sum_to_ten = "%0 = constant {value = 0} : i32
        %1 = constant {value = 10} : i32
        %2 = constant {value = 3} : i32
        %3, %4 = for %0, %1, %2, %0, %1 : i32, i32 (%i: i32, %s: i32, %t: i32) {
          %5 = add %s, %i : i32
          yield %5, %s
        }
        %j = join %3, %4 : tensor<2xi32>
        %r = reshape %j : tensor<2xi32>";
    assert_eq!(tile(2, sum_to_ten), [18, 9]);
    // Number of Collatz steps from 6: 6 3 10 5 16 8 4 2 1.
    let collatz = "%six = constant {value = 6} : i32
        %zero = constant {value = 0} : i32
        %one = constant {value = 1} : i32
        %two = constant {value = 2} : i32
        %three = constant {value = 3} : i32
        %n, %steps = while %six, %zero : i32, i32 (%a: i32, %s: i32) {
          %go = cmp_ne %a, %one : bool
          condition %go, %a, %s
        } (%b: i32, %t: i32) {
          %low = and %b, %one : i32
          %odd = cmp_eq %low, %one : bool
          %next = if %odd : i32 () {
            %m = mul %b, %three : i32
            %m1 = add %m, %one : i32
            yield %m1
          } () {
            %h = div %b, %two : i32
            yield %h
          }
          %t1 = add %t, %one : i32
          yield %next, %t1
        }
        %j = join %n, %steps : tensor<2xi32>
        %r = reshape %j : tensor<2xi32>";
    assert_eq!(tile(2, collatz), [1, 8]);
}

#[test]
fn dot_precisions_meet_their_error_bounds() {
    let text = "kernel @dot(%a: ptr<f32>, %b: ptr<f32>, %c: ptr<f32>, %n: i64) {
        %one = constant {value = 1} : i64
        %zero = constant {value = 0} : i64
        %va = make_view %a, %n, %n, %n, %one, %zero, %zero {order = [1, 0]} : view<4x4xf32>
        %vb = make_view %b, %n, %n, %n, %one, %zero, %zero {order = [1, 0]} : view<4x4xf32>
        %vc = make_view %c, %n, %n, %n, %one, %zero, %zero {order = [1, 0]} : view<4x4xf32>
        %ta = load_view %va {boundary = [], padding = zero, eviction = normal} : tensor<4x4xf32>
        %tb = load_view %vb {boundary = [], padding = zero, eviction = normal} : tensor<4x4xf32>
        %tc = load_view %vc {boundary = [], padding = zero, eviction = normal} : tensor<4x4xf32>
        %d = dot %ta, %tb, %tc {precision = PRECISION} : tensor<4x4xf32>
        store_view %vc, %d {boundary = [], eviction = normal}
        return
    }";
    let a: Vec<f32> = (0..16).map(|i| (i as f32 * 0.731).sin()).collect();
    let b: Vec<f32> = (0..16).map(|i| (i as f32 * 1.377).cos()).collect();
    let exact = |i: usize, j: usize| 1.0 + (0..4).map(|k| a[i * 4 + k] as f64 * b[k * 4 + j] as f64).sum::<f64>();
    for (precision, least, most) in [("ieee", 0.0, 5e-7), ("tf32x3", 0.0, 5e-7), ("tf32", 1e-5, 2e-3)] {
        let mut memory = Memory::new();
        let ids = [memory.add(f32s(&a)), memory.add(f32s(&b)), memory.add(f32s(&[1.0; 16]))];
        let args = [ids[0].into(), ids[1].into(), ids[2].into(), ArgValue::Int(4)];
        run_text(&text.replace("PRECISION", precision), &args, [1; 3], &mut memory).unwrap_or_else(|e| panic!("{e}"));
        let got = read_f32s(&memory, ids[2]);
        let error = (0..16).map(|p| (got[p] as f64 - exact(p / 4, p % 4)).abs()).fold(0.0, f64::max);
        assert!((least..most).contains(&error), "{precision}: {error}");
    }
}

#[test]
fn integers_wrap_and_follow_their_sign() {
    let scalar = |op: &str, a: i64, b: i64, ty: &str| {
        let body = format!(
            "%a = constant {{value = {a}}} : {ty}\n%b = constant {{value = {b}}} : {ty}\n%c = {op} %a, %b : {ty}
            %d = cast %c : i32\nstore %o, %d {{eviction = normal}}"
        );
        ints(1, &body).unwrap_or_else(|e| panic!("{e}"))[0]
    };
    assert_eq!(scalar("add", 127, 1, "i8"), -128);
    assert_eq!(scalar("sub", 0, 1, "u8"), 255);
    assert_eq!(scalar("mul", 65537, 65537, "u32"), 131073);
    assert_eq!(scalar("div", -7, 2, "i32"), -3);
    for (a, b, up) in [(7, 2, 4), (8, 2, 4), (-7, 2, -3), (7, -2, -3), (-7, -2, 4), (-8, 2, -4), (7, 0, 0)] {
        assert_eq!(scalar("cdiv", a, b, "i32"), up, "{a}, {b}");
    }
    assert_eq!(scalar("cdiv", i32::MAX.into(), 64, "i32"), 1 << 25);
    assert_eq!(scalar("cdiv", 255, 16, "u8"), 16);
    assert_eq!(scalar("rem", -7, 2, "i32"), -1);
    assert_eq!(scalar("shr", -8, 1, "i32"), -4);
    assert_eq!(scalar("shr", 248, 1, "u8"), 124);
    assert_eq!(scalar("shl", 1, 7, "i8"), -128);
    assert_eq!(scalar("mulhi", -1, 1, "i64"), -1);
    assert_eq!(scalar("mulhi", -1, -1, "u64"), -2);
    assert_eq!(scalar("mulhi", 0x10000, 0x10000, "u32"), 1);
    assert_eq!(scalar("min", 200, 100, "u8"), 100);
    assert_eq!(scalar("div", i32::MIN as i64, -1, "i32"), i32::MIN);
}

#[test]
fn f16_ops_round_each_result() {
    // 2048 + 1 is 2048 in f16; in f32 the sum of both would be 2050.
    let body = "%big = constant {value = 2048.0} : f16
        %one = constant {value = 1.0} : f16
        %s = add %big, %one : f16
        %t = add %s, %one : f16
        %d = cast %t : i32
        store %o, %d {eviction = normal}";
    assert_eq!(ints(1, body), Ok(vec![2048]));
}

#[test]
fn atomics_give_the_old_value() {
    let body = "%c = constant {value = 5} : i32
        %a = atomic_rmw %o, %c {op = add} : i32
        %b = atomic_rmw %o, %c {op = add} : i32
        %z = constant {value = 10} : i32
        %x = atomic_cas %o, %z, %b : i32
        %y = atomic_cas %o, %z, %c : i32
        %p = constant {value = 1} : i32
        %q = ptr_add %o, %p : ptr<i32>
        %xy = add %x, %y : i32
        store %q, %xy {eviction = normal}";
    // The first `atomic_cas` stores 5, so the second finds 5 and stores nothing.
    assert_eq!(ints(2, body), Ok(vec![5, 15]));
}

#[test]
fn shared_memory_rings_and_transposes() {
    let layouts = "#l0 = linear<reg=[[1],[2]], lane=[], warp=[], block=[], shape=[4]>
#l1 = linear<reg=[[0,1],[1,0]], lane=[], warp=[], block=[], shape=[2,2]>
#l2 = shared<offset=[[0,1],[1,0]], shape=[2,2]>
";
    let body = |store: &str| {
        format!(
            "{layouts}kernel @k(%o: ptr<i32>) {{
            %a = arange {{start = 0, end = 4}} : tensor<4xi32, #l0>
            %m = reshape %a : tensor<2x2xi32, #l1>
            %ring = local_alloc : shared<3x2x2xi32, #l2>
            %two = constant {{value = 2}} : i32
            %slot = local_slot %ring, %two : shared<2x2xi32, #l2>
            {store}
            %t = local_trans %slot {{perm = [1, 0]}} : shared<2x2xi32, #l2>
            %r = local_load %t : tensor<2x2xi32, #l1>
            device_print %r {{prefix = \"r = \"}}
            return
            }}"
        )
    };
    let mut memory = Memory::new();
    let o = memory.add(vec![0; 4]);
    let args = [ArgValue::Buffer(o)];
    let outcome = run_text(&body("local_store %slot, %m"), &args, [1; 3], &mut memory);
    assert_eq!(outcome.unwrap_or_else(|e| panic!("{e}")).prints, ["r = [[0, 2], [1, 3]]"]);
    let error = run_text(&body(""), &args, [1; 3], &mut memory).unwrap_err();
    assert_eq!(error.message, "reads uninitialized shared memory");
}

#[test]
fn undefined_programs_are_errors() {
    let message = |body: &str| ints(1, body).unwrap_err().message;
    assert_eq!(
        message("%0 = constant {value = false} : bool\ndevice_assert %0 {message = \"n is positive\"}"),
        "assertion failed at element 0: n is positive"
    );
    assert_eq!(message("%0 = constant {value = false} : bool\nassume %0"), "the assumption does not hold");
    assert_eq!(
        message("%0 = constant {value = 24} : i32\n%1 = hint %0 {divisible = 16} : i32"),
        "element 0 is 24, not a multiple of 16, which violates the hint"
    );
    assert_eq!(
        message("%0 = arange {start = -2, end = 2} : tensor<4xi32>\n%1 = hint %0 {at_least = -1} : tensor<4xi32>"),
        "element 0 is -2, below -1, which violates the hint"
    );
    assert_eq!(
        message(
            "%0 = arange {start = 0, end = 8} : tensor<8xi32>\n%1 = add %0, %0 : tensor<8xi32>
            %2 = hint %1 {contiguous = 4} : tensor<8xi32>"
        ),
        "element 1 is 2, not contiguous with 0, which violates the hint"
    );
    // Runs of eight that start at multiples of eight satisfy both facts.
    assert!(ints(1, "%0 = arange {start = 8, end = 24} : tensor<16xi32>\n%1 = hint %0 {divisible = 8, contiguous = 8} : tensor<16xi32>").is_ok());
    assert_eq!(
        message("%0 = constant {value = 0} : i32\nfor %0, %0, %0 (%i: i32) { yield }"),
        "the step of a loop should be positive, found 0"
    );
}

#[test]
fn runs_stop_at_their_limit_and_check_their_arguments() {
    let text = "kernel @k(%n: i32 {divisible_by = 16}, %one: i32 {equal_to = 1}) {
        while () {
          %t = constant {value = true} : bool
          condition %t
        } () { yield }
        return
    }";
    let func = parse(text).unwrap_or_else(|e| panic!("{e}"));
    let go = |n: i64, one: i64| {
        let args = [ArgValue::Int(n), ArgValue::Int(one)];
        let options = RunOptions { max_ops: 100, ..RunOptions::default() };
        run_traced(&func, &args, [1; 3], &mut Memory::new(), options, &mut ()).unwrap_err().message
    };
    assert_eq!(go(32, 1), "stopped after 100 ops");
    assert_eq!(go(40, 1), "argument `n` is 40, but the kernel was specialized for multiples of 16");
    assert_eq!(go(32, 2), "argument `one` is 2, but the kernel was specialized for the value 1");
    let error = run(&func, &[], [1; 3], &mut Memory::new()).unwrap_err();
    assert_eq!(error.message, "the kernel takes 2 arguments, found 0");
}
