//! Loops, branches, hooks, and unsupported ops.

use super::*;
use crate::ir::DType;
use crate::lower::Unsupported;
use crate::pipeline::CompileError;

/// Each iteration computes (s, t, v) ← (t, sᵀ + v, s): each buffer is overwritten while another new value needs it.
#[test]
fn carried_tiles_are_swapped() {
    let text = format!(
        "kernel @k(%a: ptr<f32>, %b: ptr<f32>, %n: i32, %y: ptr<f32>, %z: ptr<f32>, %u: ptr<f32>) {{
{}{}  %zero = constant {{value = 0}} : i32
  %one = constant {{value = 1}} : i32
  %c = constant {{value = 0.5}} : tensor<8x8xf32>
  %p, %q, %r = for %zero, %n, %one, %a_t, %b_t, %c : tensor<8x8xf32>, tensor<8x8xf32>, tensor<8x8xf32> \
(%i: i32, %s: tensor<8x8xf32>, %t: tensor<8x8xf32>, %v: tensor<8x8xf32>) {{
    %st = trans %s {{perm = [1, 0]}} : tensor<8x8xf32>
    %w = add %st, %v : tensor<8x8xf32>
    yield %t, %w, %s
  }}
{}{}{}  return\n}}",
        load_dense("a", &[8, 8], DType::F32),
        load_dense("b", &[8, 8], DType::F32),
        store_dense("y", &[8, 8], DType::F32, "%p"),
        store_dense("z", &[8, 8], DType::F32, "%q"),
        store_dense("u", &[8, 8], DType::F32, "%r"),
    );
    let random = |seed| Data::random(DType::F32, 64, seed);
    let poison = || Data::poison(DType::F32, 64);
    for n in [0, 1, 2, 5] {
        let buffers = [random(1), random(2), poison(), poison(), poison()];
        let inputs =
            [Input::Buffer(0), Input::Buffer(1), Input::Int(n), Input::Buffer(2), Input::Buffer(3), Input::Buffer(4)];
        check(&text, &inputs, &buffers, [1; 3], Tolerance::Exact);
    }
}

/// A dot accumulates in place, and another op reads the transposed accumulator: it must observe the old values.
#[test]
fn dots_in_loops_do_not_overwrite_values_that_are_read() {
    let text = format!(
        "kernel @k(%a: ptr<f32>, %n: i32, %y: ptr<f32>) {{
{}  %zero = constant {{value = 0}} : i32
  %one = constant {{value = 1}} : i32
  %c = constant {{value = 0.25}} : tensor<16x16xf32>
  %p, %q = for %zero, %n, %one, %c, %c : tensor<16x16xf32>, tensor<16x16xf32> \
(%i: i32, %s: tensor<16x16xf32>, %t: tensor<16x16xf32>) {{
    %d = dot %a_t, %t, %s {{precision = ieee}} : tensor<16x16xf32>
    %st = trans %s {{perm = [1, 0]}} : tensor<16x16xf32>
    %h = constant {{value = 0.125}} : tensor<16x16xf32>
    %e = mul %st, %h : tensor<16x16xf32>
    %f = dot %e, %a_t, %t {{precision = ieee}} : tensor<16x16xf32>
    %g = mul %d, %h : tensor<16x16xf32>
    yield %g, %f
  }}
  %r = sub %p, %q : tensor<16x16xf32>
{}  return\n}}",
        load_dense("a", &[16, 16], DType::F32),
        store_dense("y", &[16, 16], DType::F32, "%r"),
    );
    for n in [0, 1, 3] {
        let buffers = [Data::random(DType::F32, 256, 3), Data::poison(DType::F32, 256)];
        check(&text, &[Input::Buffer(0), Input::Int(n), Input::Buffer(1)], &buffers, [1; 3], near(DType::F32));
    }
}

#[test]
fn branches_and_while_carry_scalars_tiles_and_views() {
    let text = format!(
        "kernel @k(%a: ptr<i32>, %n: i32, %y: ptr<i32>) {{
{}  %pid = program_id {{axis = 0}} : i32
  %zero = constant {{value = 0}} : i32
  %even = cmp_eq %pid, %zero : bool
  %one64 = constant {{value = 1}} : i64
  %zero64 = constant {{value = 0}} : i64
  %len = constant {{value = 64}} : i64
  %far = constant {{value = 32}} : i64
  %near = make_view %y, %len, %one64, %zero64 {{order = [0]}} : view<16xi32>
  %t, %v = if %even : tensor<16xi32>, view<16xi32> () {{
    %d = add %a_t, %a_t : tensor<16xi32>
    yield %d, %near
  }} () {{
    %w = advance %near, %far : view<16xi32>
    yield %a_t, %w
  }}
  %count, %last = while %zero, %t : i32, tensor<16xi32> (%i: i32, %x: tensor<16xi32>) {{
    %more = cmp_lt %i, %n : bool
    %j = add %i, %pid : i32
    condition %more, %j, %x
  }} (%i2: i32, %x2: tensor<16xi32>) {{
    %one = constant {{value = 1}} : i32
    %j2 = add %i2, %one : i32
    %s = splat %j2 : tensor<16xi32>
    %z = add %x2, %s : tensor<16xi32>
    yield %j2, %z
  }}
  %cs = splat %count : tensor<16xi32>
  %r = mul %last, %cs : tensor<16xi32>
  store_view %v, %r {{boundary = [], eviction = normal}}
  return\n}}",
        load_dense("a", &[16], DType::I32),
    );
    for n in [0, 1, 4] {
        let buffers = [Data::random(DType::I32, 16, 4), Data::poison(DType::I32, 64)];
        let inputs = [Input::Buffer(0), Input::Int(n), Input::Buffer(1)];
        check(&text, &inputs, &buffers, [2, 1, 1], Tolerance::Exact);
    }
}

#[test]
fn prints_and_failed_assertions_reach_the_hooks() {
    let text = "kernel @k(%n: i32) {
  %i = arange {start = 0, end = 4} : tensor<4xi32>
  %f = cast %i : tensor<4xf32>
  device_print %f, %n {prefix = \"x \\\"quoted\\\"\"}
  %ns = splat %n : tensor<4xi32>
  %ok = cmp_lt %i, %ns : tensor<4xbool>
  device_assert %ok {message = \"i is below n\"}
  device_print {prefix = \"passed\"}
  return\n}";
    let func = read(text);
    let mut loaded = Loaded::new(&compile(&func, &HostCpu::native()));
    output();
    assert_eq!(loaded.run(&[4], [1; 3]), 0);
    assert_eq!(
        output(),
        ["[0, 0, 0] x \"quoted\" [0.0, 1.0, 2.0, 3.0]", "[0, 0, 0] x \"quoted\" [4.0]", "[0, 0, 0] passed []"]
    );
    assert_eq!(loaded.run(&[3], [2, 1, 1]), 1);
    let lines = output();
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert!(lines[2].ends_with("assertion failed: i is below n"), "{lines:?}");

    let options = CompileOptions { debug_asserts: false, ..CompileOptions::default() };
    let quiet = compile_host(&func, &HostCpu::native(), &options, &mut ()).unwrap();
    assert_eq!(Loaded::new(&quiet).run(&[3], [1; 3]), 0);
    output();
}

#[test]
fn inline_ptx_is_refused_with_its_place() {
    let text = "kernel @k(%n: i32) {
  %m = inline_asm %n {asm = \"mov.u32 $0, $1;\", constraints = \"=r,r\", pack = 1, pure = true} : i32
  return\n}";
    let error = compile_host(&read(text), &HostCpu::native(), &CompileOptions::default(), &mut ()).unwrap_err();
    let CompileError::Unsupported(Unsupported { message, help, .. }) = error else { panic!("{error}") };
    assert!(message.contains("CPU") && help.is_some(), "{message}");
}

#[test]
fn grids_have_three_axes() {
    let text = "kernel @k(%y: ptr<i32>) {
  %a = program_id {axis = 0} : i32
  %b = program_id {axis = 1} : i32
  %c = program_id {axis = 2} : i32
  %na = num_programs {axis = 0} : i32
  %nb = num_programs {axis = 1} : i32
  %p = mul %c, %nb : i32
  %q = add %p, %b : i32
  %r = mul %q, %na : i32
  %s = add %r, %a : i32
  %at = ptr_add %y, %s : ptr<i32>
  store %at, %s {eviction = normal}
  return\n}";
    let out = check(text, &[Input::Buffer(0)], &[Data::poison(DType::I32, 24)], [2, 3, 4], Tolerance::Exact);
    assert_eq!(out[0].values(), (0..24).map(f64::from).collect::<Vec<_>>());
}
