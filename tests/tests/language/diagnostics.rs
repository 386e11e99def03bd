//! Errors that are found while a kernel is recorded: they name the user's line.

use tilewright::codegen::lang::kernel::{KernelDef, Specialization};
use tilewright::prelude::*;

/// The message for a kernel of this file, with its source line.
fn text(def: &KernelDef) -> String {
    match def.record(&[], &[], &Specialization::default()) {
        Ok(_) => panic!("{} records without an error", def.name),
        Err(d) => d.render(Some(include_str!("diagnostics.rs"))),
    }
}

/// The message for a kernel whose line names no types.
fn message(def: &KernelDef) -> String {
    let text = text(def);
    for internal in ["Tile<", "Scalar<", "IntegerLiteral", "Value(", "lang::", "Operand"] {
        assert!(!text.contains(internal), "`{internal}` in\n{text}");
    }
    text
}

#[kernel]
fn shapes_differ(x: In<f32>, out: Out<f32>) {
    let a = load(x + arange(0, 64));
    let b = load(x + arange(0, 32));
    store(out + arange(0, 64), a * b);
}

#[kernel]
fn ranks_differ(x: In<f32>, out: Out<f32>) {
    let a = zeros::<f32>([64, 32]);
    let b = load(x + arange(0, 32));
    store(out, sum(a + b));
}

#[kernel]
fn too_many_parts(x: In<f32>, out: Out<f32>) {
    let a = zeros::<f32>([63, 63]);
    store(out, sum(a));
}

#[kernel]
fn sorts_another_extent(x: In<f32>, out: Out<f32>) {
    store(out, sum(sort(zeros::<f32>([4, 96]), axis = 0)));
}

#[device_fn]
fn without_end(x: Tile<f32>, n: Scalar<i32>) -> Tile<f32> {
    if n == 0 { x } else { without_end(x * 0.5, n - 1) }
}

#[kernel]
fn calls_itself_without_end(out: Out<f32>, n: i32) {
    store(out + arange(0, 8), without_end(ones::<f32>([8]), n));
}

#[device_fn]
fn fibonacci(n: usize) -> usize {
    if n < 2 { n } else { fibonacci(n - 1) + fibonacci(n - 2) }
}

#[kernel]
fn calls_too_often(out: Out<f32>) {
    store(out + arange(0, 8), full::<f32>([8], fibonacci(60) as f32));
}

#[kernel]
fn takes_an_extent_apart(x: In<f32>, out: Out<f32>) {
    store(out, sum(zeros::<f32>([2, 96]).reshape([192])));
}

#[kernel]
fn counts_into_another_number(x: In<i32>, out: Out<i32>) {
    store(out + arange(0, 81), histogram(load(x + arange(0, 256)), 81));
}

#[kernel]
fn takes_another_number(x: In<f32>, out: Out<f32>) {
    store(out + arange(0, 3), topk(load(x + arange(0, 64)), 3));
}

#[kernel]
fn masks_a_store_by_another_shape(x: In<f32>, out: Out<f32>) {
    let i = arange(0, 64);
    store(out + i, load(x + i), mask = i.expand_dims(0) < 3);
}

#[kernel]
fn masks_a_load_by_another_shape(x: In<f32>, out: Out<f32>) {
    let i = arange(0, 64);
    store(out + i, load(x + i, mask = i.expand_dims(0) < 3));
}

#[kernel]
fn fills_with_another_shape(x: In<f32>, out: Out<f32>) {
    let i = arange(0, 64);
    store(out + i, load(x + i, mask = i < 3, other = zeros::<f32>([32])));
}

#[kernel]
fn masks_an_atomic_by_another_shape(x: In<f32>, out: Out<f32>) {
    let i = arange(0, 64);
    atomic_add(out + i, load(x + i), mask = i.expand_dims(0) < 3);
}

#[kernel]
fn begins_below_zero(out: Out<i32>) {
    store(out + arange(0, 100), arange(-3, 97));
}

#[kernel]
fn loop_changes_shape(x: In<f32>, out: Out<f32>) {
    let mut acc = zeros::<f32>([64]);
    for _ in range(0, 10) {
        acc = acc.expand_dims(1) + zeros::<f32>([64, 64]);
    }
    store(out, sum(acc));
}

#[kernel]
fn branches_differ(x: In<f32>, out: Out<f32>, n: i32) {
    let y = if n > 3 { zeros::<f32>([64]) } else { zeros::<f32>([32]) };
    store(out, sum(y));
}

#[kernel]
fn writes_an_input(x: In<f32>, out: Out<f32>) {
    store(x + arange(0, 64), 1.0);
}

#[kernel]
fn dot_dimensions(x: In<f32>, out: Out<f32>) {
    let a = zeros::<f32>([64, 32]);
    let c = dot(a, a);
    store(out, sum(c));
}

#[kernel]
fn dot_batches(x: In<f32>, out: Out<f32>) {
    let c = dot(zeros::<f32>([4, 16, 16]), zeros::<f32>([1, 16, 16]));
    store(out, sum(c));
}

#[kernel]
fn dot_ranks(x: In<f32>, out: Out<f32>) {
    let c = dot(zeros::<f32>([4, 16, 16]), zeros::<f32>([16, 16]));
    store(out, sum(c));
}

#[kernel]
fn dot_of_many_matrices(x: In<f32>, out: Out<f32>) {
    let c = dot(zeros::<f32>([128, 16, 16]), zeros::<f32>([128, 16, 16]));
    store(out, sum(c));
}

#[kernel]
fn condition_is_a_tile(x: In<f32>, out: Out<f32>) {
    let v = load(x + arange(0, 64));
    if v > 0.0 {
        store(out, 1.0);
    }
}

#[kernel]
fn while_condition_is_a_tile(x: In<f32>, out: Out<f32>) {
    let mut v = load(x + arange(0, 64));
    while v > 1.0 {
        v = v * 0.5;
    }
    store(out + arange(0, 64), v);
}

#[kernel]
fn no_such_axis(x: In<f32>, out: Out<f32>) {
    let v = load(x + arange(0, 64));
    store(out, sum(v, axis = 1));
}

#[kernel]
fn view_of_different_ranks(x: In<f32>, out: Out<f32>, n: i32) {
    let block = make_block_ptr(x, shape = [n, n], strides = [n], offsets = [0, 0], block_shape = [64, 64]);
    store(out, sum(load(block)));
}

#[kernel]
fn mask_on_a_block(x: In<f32>, out: Out<f32>, n: i32) {
    let block = make_block_ptr(x, shape = [n], strides = [1], offsets = [0], block_shape = [64]);
    store(out, sum(load(block, mask = n > 0)));
}

#[kernel]
fn a_failed_static_assert(x: In<f32>, out: Out<f32>, #[constexpr = 12] tile: usize) {
    static_assert(tile % 16 == 0, "tile must be a multiple of 16");
    store(out, 1.0);
}

#[kernel]
fn a_number_too_large(bytes: Out<i8>) {
    store(bytes, 300);
}

#[kernel]
fn bits_of_a_float(x: In<f32>, out: Out<f32>) {
    let v = load(x + arange(0, 64));
    store(out, sum(v & v));
}

#[kernel]
fn gathers_from_another_shape(x: In<f32>, out: Out<f32>) {
    let v = load(x + arange(0, 64)).reshape([8, 8]);
    store(out, sum(gather(v, arange(0, 8), axis = 1)));
}

#[kernel]
fn too_many_of_the_largest(x: In<f32>, out: Out<f32>) {
    store(out, sum(topk(load(x + arange(0, 64)), 128)));
}

#[kernel]
fn squeezes_a_wide_dimension(x: In<f32>, out: Out<f32>) {
    store(out, sum(squeeze(load(x + arange(0, 64)), axis = 0)));
}

#[kernel]
fn scales_of_too_few_elements(x: In<u8>, out: Out<f32>) {
    let (a, b) = (zeros::<u8>([16, 32]), zeros::<bf16>([64, 16]));
    store(out, sum(dot_scaled(a, zeros::<u8>([16, 4]), e2m1, rhs = b, rhs_format = bf16)));
}

#[kernel]
fn four_bits_of_another_type(x: In<u8>, out: Out<f32>) {
    let (a, b) = (zeros::<i8>([16, 32]), zeros::<bf16>([64, 16]));
    store(out, sum(dot_scaled(a, zeros::<u8>([16, 2]), e2m1, rhs = b, rhs_format = bf16)));
}

#[kernel]
fn scales_that_are_floats(x: In<u8>, out: Out<f32>) {
    let (a, b) = (zeros::<u8>([16, 32]), zeros::<bf16>([64, 16]));
    store(out, sum(dot_scaled(a, zeros::<f32>([16, 2]), e2m1, rhs = b, rhs_format = bf16)));
}

#[kernel]
fn scales_of_wide_elements(x: In<u8>, out: Out<f32>) {
    let (a, b) = (zeros::<bf16>([16, 64]), zeros::<bf16>([64, 16]));
    store(out, sum(dot_scaled(a, zeros::<F8E4M3>([16, 4]), bf16, rhs = b, rhs_format = bf16)));
}

#[kernel]
fn fewer_elements_than_a_scale_has(x: In<u8>, out: Out<f32>) {
    let (a, b) = (zeros::<F8E5M2>([16, 16]), zeros::<bf16>([16, 16]));
    store(out, sum(dot_scaled(a, zeros::<u8>([16, 1]), e5m2, rhs = b, rhs_format = bf16)));
}

#[kernel]
fn scaled_ranks(x: In<u8>, out: Out<f32>) {
    let (a, b) = (zeros::<F8E5M2>([2, 16, 32]), zeros::<bf16>([32, 16]));
    store(out, sum(dot_scaled(a, zeros::<u8>([2, 16, 1]), e5m2, rhs = b, rhs_format = bf16)));
}

#[kernel]
fn packed_dimensions(x: In<u8>, out: Out<f32>) {
    let (a, b) = (zeros::<u8>([16, 32]), zeros::<bf16>([32, 16]));
    store(out, sum(dot_scaled(a, zeros::<u8>([16, 2]), e2m1, rhs = b, rhs_format = bf16)));
}

#[kernel]
fn scaled_accumulator(x: In<u8>, out: Out<f32>) {
    let (a, b) = (zeros::<u8>([16, 32]), zeros::<bf16>([64, 16]));
    store(
        out,
        sum(dot_scaled(a, zeros::<u8>([16, 2]), e2m1, rhs = b, rhs_format = bf16, acc = zeros::<f32>([16, 32]))),
    );
}

#[kernel]
fn a_float_too_large(x: In<f16>, out: Out<f16>) {
    store(out, load(x) * 100000.0);
}

#[kernel]
fn an_arm_too_large(x: In<i8>, out: Out<i8>) {
    let v = load(x);
    store(out, if v > 3 { v } else { 300 });
}

#[kernel]
fn more_products_than_k(out: Out<f32>) {
    let (a, b) = (zeros::<F8E5M2>([64, 64]), zeros::<F8E5M2>([64, 64]));
    store(out, sum(dot(a, b, max_num_imprecise_acc = 128)));
}

#[test]
fn mistakes_name_the_line() {
    let kernels = [
        &SHAPES_DIFFER,
        &RANKS_DIFFER,
        &TOO_MANY_PARTS,
        &SORTS_ANOTHER_EXTENT,
        &CALLS_TOO_OFTEN,
        &TAKES_AN_EXTENT_APART,
        &COUNTS_INTO_ANOTHER_NUMBER,
        &TAKES_ANOTHER_NUMBER,
        &MASKS_A_STORE_BY_ANOTHER_SHAPE,
        &MASKS_A_LOAD_BY_ANOTHER_SHAPE,
        &FILLS_WITH_ANOTHER_SHAPE,
        &MASKS_AN_ATOMIC_BY_ANOTHER_SHAPE,
        &BEGINS_BELOW_ZERO,
        &LOOP_CHANGES_SHAPE,
        &BRANCHES_DIFFER,
        &WRITES_AN_INPUT,
        &DOT_DIMENSIONS,
        &DOT_BATCHES,
        &DOT_RANKS,
        &DOT_OF_MANY_MATRICES,
        &MORE_PRODUCTS_THAN_K,
        &CONDITION_IS_A_TILE,
        &WHILE_CONDITION_IS_A_TILE,
        &NO_SUCH_AXIS,
        &GATHERS_FROM_ANOTHER_SHAPE,
        &TOO_MANY_OF_THE_LARGEST,
        &SQUEEZES_A_WIDE_DIMENSION,
        &SCALES_OF_TOO_FEW_ELEMENTS,
        &FOUR_BITS_OF_ANOTHER_TYPE,
        &SCALES_THAT_ARE_FLOATS,
        &SCALES_OF_WIDE_ELEMENTS,
        &FEWER_ELEMENTS_THAN_A_SCALE_HAS,
        &SCALED_RANKS,
        &PACKED_DIMENSIONS,
        &SCALED_ACCUMULATOR,
        &VIEW_OF_DIFFERENT_RANKS,
        &MASK_ON_A_BLOCK,
        &A_FAILED_STATIC_ASSERT,
        &A_NUMBER_TOO_LARGE,
        &A_FLOAT_TOO_LARGE,
        &AN_ARM_TOO_LARGE,
        &BITS_OF_A_FLOAT,
    ];
    for def in kernels {
        let text = message(def);
        insta::assert_snapshot!(def.name, text);
    }
}

#[test]
fn recursion_without_end_is_refused() {
    insta::assert_snapshot!(text(&CALLS_ITSELF_WITHOUT_END));
    // The next kernel starts to count again.
    assert!(text(&CALLS_ITSELF_WITHOUT_END).contains("one too many"));
}
