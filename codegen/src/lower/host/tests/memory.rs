//! Views with every kind of boundary, order and stride; pointers and masks; atomics; shape ops.

use super::*;
use crate::ir::{AtomicOp, DType};

/// Copies an 8 × 16 block of `x` (any strides and offsets) to a dense `y`, and the same block back to `z`.
fn copy_kernel(elem: DType, boundary: &str, padding: &str, order: &str, unit: bool) -> String {
    let one = if unit { " {equal_to = 1}" } else { "" };
    format!(
        "kernel @copy(%x: ptr<{elem}>, %y: ptr<{elem}>, %z: ptr<{elem}>, %n0: i64, %n1: i64, %s0: i64, %s1: i64{one}, \
         %o0: i64, %o1: i64) {{
  %v = make_view %x, %n0, %n1, %s0, %s1, %o0, %o1 {{order = {order}}} : view<8x16x{elem}>
  %t = load_view %v {{boundary = {boundary}, padding = {padding}, eviction = normal}} : tensor<8x16x{elem}>
  %w = make_view %z, %n0, %n1, %s0, %s1, %o0, %o1 {{order = {order}}} : view<8x16x{elem}>
  store_view %w, %t {{boundary = {boundary}, eviction = normal}}
{}  return\n}}",
        store_dense("y", &[8, 16], elem, "%t")
    )
}

#[test]
fn views_agree_at_every_boundary() {
    for elem in [DType::F32, DType::BF16, DType::I8, DType::I64, DType::Bool] {
        for (boundary, n0, n1, o0, o1) in [
            ("[]", 20, 40, 3, 5),
            ("[0, 1]", 20, 40, 3, 5),
            ("[0, 1]", 9, 19, 3, 5),
            ("[0]", 9, 40, 3, 5),
            ("[1]", 20, 19, 3, 5),
            ("[0, 1]", 20, 40, -3, -5),
            ("[0, 1]", 2, 3, 0, 0),
            ("[0, 1]", 20, 40, 30, 0),
            ("[0, 1]", 0, 0, 0, 0),
            // Negative extents are empty: no index wraps around into bounds.
            ("[0, 1]", -1, 40, 3, 5),
            ("[0, 1]", 20, -7, 3, 5),
            ("[0, 1]", i64::MIN, i64::MIN + 5, 0, 0),
            ("[0, 1]", i64::MIN, 40, i64::MAX, 5),
            ("[0, 1]", 20, 40, i64::MAX - 3, 0),
            ("[0, 1]", 20, 40, 3, i64::MAX - 12),
            ("[0, 1]", 20, 40, i64::MIN, i64::MIN),
        ] {
            let padding = if elem.is_float() { "nan" } else { "zero" };
            let (rows, columns) = (20, 48);
            for (order, s0, s1, unit) in [
                ("[1, 0]", columns, 1, true),
                ("[1, 0]", columns, 1, false),
                ("[0, 1]", 1, 24, false),
                ("[1, 0]", 90, 2, false),
            ] {
                let text = copy_kernel(elem, boundary, padding, order, unit);
                let len = 90 * rows as usize + 100;
                let buffers = [Data::random(elem, len, 11), Data::poison(elem, 128), Data::poison(elem, len)];
                let mut inputs: Vec<Input> = (0..3).map(Input::Buffer).collect();
                inputs.extend([n0, n1, s0, s1, o0, o1].map(Input::Int));
                // Launches on GPUs refuse negative extents.
                let check = if n0 < 0 || n1 < 0 { check_native } else { check };
                check(&text, &inputs, &buffers, [1; 3], Tolerance::Exact);
            }
        }
    }
}

/// Loads and stores through pointers: masks with and without a value for masked lanes, any distance between lanes.
#[test]
fn pointers_agree_under_masks() {
    for elem in [DType::F32, DType::F16, DType::U8, DType::I64] {
        for stride in [1, 2, 3] {
            let text = format!(
                "kernel @k(%x: ptr<{elem}>, %y: ptr<{elem}>, %n: i32) {{
  %p = program_id {{axis = 0}} : i32
  %c = constant {{value = 32}} : i32
  %b = mul %p, %c : i32
  %i = arange {{start = 0, end = 32}} : tensor<32xi32>
  %bs = splat %b : tensor<32xi32>
  %j = add %bs, %i : tensor<32xi32>
  %ns = splat %n : tensor<32xi32>
  %m = cmp_lt %j, %ns : tensor<32xbool>
  %s = constant {{value = {stride}}} : tensor<32xi32>
  %k = mul %j, %s : tensor<32xi32>
  %xs = splat %x : tensor<32xptr<{elem}>>
  %xp = ptr_add %xs, %k : tensor<32xptr<{elem}>>
  %o = constant {{value = {value}}} : tensor<32x{elem}>
  %v = load %xp, %m, %o {{eviction = normal}} : tensor<32x{elem}>
  %w = load %xp, %m {{eviction = normal}} : tensor<32x{elem}>
  %r = add %v, %w : tensor<32x{elem}>
  %ys = splat %y : tensor<32xptr<{elem}>>
  %yp = ptr_add %ys, %j : tensor<32xptr<{elem}>>
  store %yp, %r, %m {{eviction = normal}}
  %k2 = constant {{value = 64}} : i32
  %yb = ptr_add %y, %k2 : ptr<{elem}>
  %ys2 = splat %yb : tensor<32xptr<{elem}>>
  %yp2 = ptr_add %ys2, %k : tensor<32xptr<{elem}>>
  store %yp2, %v {{eviction = normal}}
  return\n}}",
                value = if elem.is_float() { "3.0" } else { "3" }
            );
            let buffers = [Data::random(elem, 256, 12), Data::poison(elem, 512)];
            let inputs = [Input::Buffer(0), Input::Buffer(1), Input::Int(45)];
            check(&text, &inputs, &buffers, [2, 1, 1], Tolerance::Exact);
        }
    }
}

#[test]
fn a_store_is_not_moved_above_a_load() {
    // y[i + 1] = x[i] with x and y in one buffer: the whole load precedes the store. A second load observes the store.
    let text = "kernel @k(%x: ptr<i32>, %y: ptr<i32>) {
  %i = arange {start = 0, end = 64} : tensor<64xi32>
  %xs = splat %x : tensor<64xptr<i32>>
  %p = ptr_add %xs, %i : tensor<64xptr<i32>>
  %v = load %p {eviction = normal} : tensor<64xi32>
  %one = constant {value = 1} : tensor<64xi32>
  %q = ptr_add %p, %one : tensor<64xptr<i32>>
  store %q, %v {eviction = normal}
  %w = load %p {eviction = normal} : tensor<64xi32>
  %s = add %w, %v : tensor<64xi32>
  %ys = splat %y : tensor<64xptr<i32>>
  %yp = ptr_add %ys, %i : tensor<64xptr<i32>>
  store %yp, %s {eviction = normal}
  return\n}";
    let buffers = [Data::ints(DType::I32, 0..65), Data::poison(DType::I32, 64)];
    let out = check(text, &[Input::Buffer(0), Input::Buffer(1)], &buffers, [1; 3], Tolerance::Exact);
    assert_eq!(out[0].values()[..4], [0.0, 0.0, 1.0, 2.0]);
}

#[test]
fn an_update_in_place_reads_each_element_once() {
    let text = "kernel @k(%x: ptr<f32>, %n: i64) {
  %one = constant {value = 1} : i64
  %zero = constant {value = 0} : i64
  %v = make_view %x, %n, %one, %zero {order = [0]} : view<64xf32>
  %t = load_view %v {boundary = [0], padding = zero, eviction = normal} : tensor<64xf32>
  %u = add %t, %t : tensor<64xf32>
  store_view %v, %u {boundary = [0], eviction = normal}
  %t2 = load_view %v {boundary = [0], padding = zero, eviction = normal} : tensor<64xf32>
  %u2 = mul %t2, %t : tensor<64xf32>
  store_view %v, %u2 {boundary = [0], eviction = normal}
  return\n}";
    let buffers = [Data::random(DType::F32, 64, 13)];
    check(text, &[Input::Buffer(0), Input::Int(50)], &buffers, [1; 3], Tolerance::Exact);
    check(text, &[Input::Buffer(0), Input::Int(64)], &buffers, [1; 3], Tolerance::Exact);
}

#[test]
fn atomics_give_the_old_value() {
    for &op in AtomicOp::ALL {
        for d in [DType::I32, DType::U32, DType::I64, DType::F32, DType::F64, DType::F16, DType::BF16] {
            let bitwise = matches!(op, AtomicOp::And | AtomicOp::Or | AtomicOp::Xor);
            if (bitwise && d.is_float()) || (op != AtomicOp::Add && d.bits() < 32) {
                continue;
            }
            // Several lanes have the same address.
            let text = format!(
                "kernel @k(%x: ptr<{d}>, %a: ptr<{d}>, %y: ptr<{d}>) {{
{}  %i = arange {{start = 0, end = 32}} : tensor<32xi32>
  %four = constant {{value = 4}} : tensor<32xi32>
  %k = div %i, %four : tensor<32xi32>
  %xs = splat %x : tensor<32xptr<{d}>>
  %p = ptr_add %xs, %k : tensor<32xptr<{d}>>
  %seven = constant {{value = 27}} : tensor<32xi32>
  %m = cmp_lt %i, %seven : tensor<32xbool>
  %old = atomic_rmw %p, %a_t, %m {{op = {}}} : tensor<32x{d}>
{}  return\n}}",
                load_dense("a", &[32], d),
                op.name(),
                store_dense("y", &[32], d, "%old")
            );
            let buffers = [Data::random(d, 8, 14), Data::random(d, 32, 15), Data::poison(d, 32)];
            let inputs = [Input::Buffer(0), Input::Buffer(1), Input::Buffer(2)];
            // Lanes of a GPU have no order.
            check_native(&text, &inputs, &buffers, [1; 3], Tolerance::Exact);
        }
    }
}

#[test]
fn atomics_on_views_and_compare_and_swap() {
    for d in [DType::F32, DType::I32] {
        let (zero, five) = if d.is_float() { ("0.0", "5.0") } else { ("0", "5") };
        let text = format!(
            "kernel @k(%x: ptr<{d}>, %a: ptr<{d}>, %n: i64, %y: ptr<{d}>) {{
{}  %one = constant {{value = 1}} : i64
  %eight = constant {{value = 8}} : i64
  %zero = constant {{value = 0}} : i64
  %v = make_view %x, %n, %eight, %eight, %one, %zero, %zero {{order = [1, 0]}} : view<4x8x{d}>
  atomic_view %v, %a_t {{op = add, boundary = [0]}}
  %c0 = constant {{value = {zero}}} : {d}
  %c1 = constant {{value = {five}}} : {d}
  %old = atomic_cas %y, %c0, %c1 : {d}
  %old2 = atomic_cas %y, %c0, %c0 : {d}
  %i1 = constant {{value = 1}} : i32
  %y1 = ptr_add %y, %i1 : ptr<{d}>
  %sum = add %old, %old2 : {d}
  store %y1, %sum {{eviction = normal}}
  return\n}}",
            load_dense("a", &[4, 8], d)
        );
        let mut y = Data::poison(d, 2);
        y.bits[0] = 0;
        let buffers = [Data::random(d, 32, 16), Data::random(d, 32, 17), y];
        for n in [3, 4] {
            let inputs = [Input::Buffer(0), Input::Buffer(1), Input::Int(n), Input::Buffer(2)];
            let out = check(&text, &inputs, &buffers, [1; 3], Tolerance::Exact);
            assert_eq!(out[2].values(), [5.0, 5.0]);
        }
    }
}

#[test]
fn shapes_change_without_changing_elements() {
    for d in [DType::F32, DType::U8, DType::Bool] {
        let text = format!(
            "kernel @k(%a: ptr<{d}>, %y: ptr<{d}>, %z: ptr<{d}>, %u: ptr<{d}>) {{
{}  %t = trans %a_t {{perm = [1, 0]}} : tensor<16x8x{d}>
  %r = reshape %t : tensor<4x32x{d}>
  %e = expand_dims %r {{axis = 1}} : tensor<4x1x32x{d}>
  %b = broadcast %e : tensor<4x2x32x{d}>
{}  %s = reshape %a_t : tensor<8x8x2x{d}>
  %l, %h = split %s : tensor<8x8x{d}>, tensor<8x8x{d}>
  %j = join %h, %l : tensor<8x8x2x{d}>
{}  %p = trans %b {{perm = [2, 0, 1]}} : tensor<32x4x2x{d}>
{}  return\n}}",
            load_dense("a", &[8, 16], d),
            store_dense("y", &[4, 2, 32], d, "%b"),
            store_dense("z", &[8, 8, 2], d, "%j"),
            store_dense("u", &[32, 4, 2], d, "%p"),
        );
        let buffers = [Data::random(d, 128, 18), Data::poison(d, 256), Data::poison(d, 128), Data::poison(d, 256)];
        let inputs: Vec<Input> = (0..4).map(Input::Buffer).collect();
        check(&text, &inputs, &buffers, [1; 3], Tolerance::Exact);
    }
}
