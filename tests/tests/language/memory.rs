//! Loads, stores, views and atomics.

use crate::support::{Arg, consts, run, text};
use tilewright::prelude::*;

#[kernel]
fn transpose_tile(x: In<f32>, out: Out<f32>, rows: i32, cols: i32) {
    let source = make_tensor_descriptor(x, shape = [rows, cols], strides = [cols, 1], block_shape = [4, 8]);
    let target = make_tensor_descriptor(out, shape = [cols, rows], strides = [rows, 1], block_shape = [8, 4]);
    let tile = source.load([0, 0]);
    target.store([0, 0], tile.t());
}

#[test]
fn descriptors_load_and_store_within_bounds() {
    let x: Vec<f32> = (0..15).map(|i| i as f32).collect();
    let args = [Arg::F32(&x), Arg::OutF32(15), Arg::Int(3), Arg::Int(5)];
    let expected: Vec<f32> = (0..5).flat_map(|c| (0..3).map(move |r| (5 * r + c) as f32)).collect();
    assert_eq!(run(&TRANSPOSE_TILE, &vec![], &args, 1).f32(1), expected);
}

#[kernel]
fn masked(x: In<f32>, out: Out<f32>, n: i32) {
    let i = program_id(0) * 4 + arange(0, 4);
    let inside = i < n;
    let v = load(x + i, mask = inside, other = -1.0, eviction = evict_first);
    store(out + i, v * v);
    store(out + i, load(x + i, inside), mask = inside && i % 2 == 0, eviction_policy = evict_last);
}

#[test]
fn masks_and_other() {
    let ran = run(&MASKED, &vec![], &[Arg::F32(&[1.0, 2.0, 3.0, 4.0, 5.0]), Arg::OutF32(8), Arg::Int(5)], 2);
    assert_eq!(ran.f32(1), [1.0, 4.0, 3.0, 16.0, 5.0, 1.0, 1.0, 1.0]);
    let printed = text(&MASKED, &[], &vec![]);
    assert!(printed.contains("eviction = evict_first") && printed.contains("eviction = evict_last"), "{printed}");
}

#[kernel]
fn atomics(out: InOut<i32>, values: In<i32>) {
    let i = arange(0, 8);
    let v = load(values + i);
    let zero = i * 0;
    atomic_add(out + zero, v);
    atomic_max(out + 1 + zero, v, mask = v < 100);
    atomic_min(out + 2 + zero, v);
    let old = atomic_cas(out + 3, 0, 42);
    let older = atomic_xchg(out + 4, old + 7);
    atomic_or(out + 5, 6);
    atomic_and(out + 5, older | 3);
    atomic_xor(out + 6, 5);
    let view = make_block_ptr(out, shape = [10], strides = [1], offsets = [8], block_shape = [4], order = [0]);
    atomic_add(view, i.reshape([2, 4]).sum(0), boundary_check = [0]);
}

#[test]
fn atomics_combine() {
    let values = [3, -4, 500, 7, 0, 1, 2, 99];
    let mut state = [0; 10];
    state[4] = 1;
    state[5] = 8;
    let ran = run(&ATOMICS, &vec![], &[Arg::I32(&state), Arg::I32(&values)], 1);
    let sum: i32 = values.iter().sum();
    assert_eq!(ran.i32(0), [sum, 99, -4, 42, 7, (8 | 6) & 3, 5, 0, 4, 6]);
}

#[kernel]
fn paddings(x: In<f32>, out: Out<f32>) {
    let block = make_block_ptr(x, shape = [3], strides = [1], offsets = [2], block_shape = [2]);
    store(out + arange(0, 2), load(block, boundary_check = [0], padding_option = nan));
}

#[test]
fn padding_can_be_nan() {
    let got = run(&PADDINGS, &vec![], &[Arg::F32(&[1.0, 2.0, 3.0]), Arg::OutF32(2)], 1).f32(1);
    assert!(got[0] == 3.0 && got[1].is_nan(), "{got:?}");
}

/// Lists in variables: literals take the type of the other elements, and tuples may have elements of several types.
#[kernel]
fn lists(x: In<f32>, out: Out<f32>, rows: i32, cols: i32, #[constexpr] tile: usize) {
    let (sizes, strides) = ([rows, cols], [cols, 1]);
    let origin = (program_id(0) * tile, 0);
    let block = [tile, 8];
    let source = make_block_ptr(x, shape = sizes, strides = strides, offsets = origin, block_shape = block);
    let t = load(source, boundary_check = [0, 1]);
    let ahead = load(source.advance((0, 4)), boundary_check = [0, 1]);
    let all = (tile, 8);
    let total = t + ahead + zeros::<f32>(all) + full::<f32>(block, 1.0).reshape(all);
    let target = make_tensor_descriptor(out, shape = (rows, cols), strides = strides, block_shape = block);
    target.store(origin, total);
}

#[test]
fn lists_may_be_variables() {
    let x: Vec<f32> = (0..15).map(|i| i as f32).collect();
    let args = [Arg::F32(&x), Arg::OutF32(15), Arg::Int(3), Arg::Int(5)];
    let got = run(&LISTS, &consts(&[("tile", 2)]), &args, 2).f32(1);
    let expected: Vec<f32> = (0..15).map(|i| x[i] + 1.0 + if i % 5 == 0 { x[i + 4] } else { 0.0 }).collect();
    assert_eq!(got, expected);
}
