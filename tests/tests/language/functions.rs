//! Reductions, scans, shapes, products, random numbers, debugging.

use crate::support::{A, run, run_as, text};
use tilewright::codegen::ir::DType;
use tilewright::prelude::*;

#[kernel]
fn reductions(x: In<f32>, out: Out<f32>) {
    let at = arange(0, 4).expand_dims(1) * 8 + arange(0, 8).expand_dims(0);
    let t = load(x + at);
    let rows = arange(0, 4);
    store(out + rows, sum(t, axis = 1));
    store(out + 4 + rows, max(t, -1));
    store(out + 8 + rows, t.min(1));
    store(out + 12 + rows, argmax(t, axis = 1).to::<f32>());
    store(out + 16 + rows, argmin(t, axis = 1).to::<f32>());
    let (largest, place) = max_with_indices(t, axis = 1);
    store(out + 20 + rows, largest * 100.0 + place.to::<f32>());
    store(out + 24 + rows, reduce(t, axis = 1, |a, b| if a > b { a } else { b }));
    let (s, n) = reduce((t, full_like(t, 1.0)), axis = 1, |(a, n), (b, m)| (a + b, n + m));
    store(out + 28 + rows, s / n);
    store(out + 32, sum(t));
    store(out + 33, max(sum(t, axis = 0), axis = 0));
    store(out + 34 + rows, softmax(t, axis = 1).sum(1));
    store(out + 38 + rows, sum(t, axis = 1, keep_dims = true).reshape([4]));
    store(out + 42, any(t > 20.0).to::<f32>());
    store(out + 43, all(t > 20.0).to::<f32>());
}

#[test]
fn reductions_agree_with_plain_rust() {
    let x: Vec<f32> = (0..32).map(|i| ((i * 7) % 32) as f32).collect();
    let got = run(&REDUCTIONS, &vec![], &[A::F32(&x), A::OutF32(44)], 1).f32(1);
    for (r, row) in x.chunks(8).enumerate() {
        let total: f32 = row.iter().sum();
        let largest = row.iter().copied().fold(f32::MIN, f32::max);
        let smallest = row.iter().copied().fold(f32::MAX, f32::min);
        let place = |v: f32| row.iter().position(|&x| x == v).unwrap() as f32;
        let expected = [
            total,
            largest,
            smallest,
            place(largest),
            place(smallest),
            largest * 100.0 + place(largest),
            largest,
            total / 8.0,
        ];
        for (k, want) in expected.iter().enumerate() {
            assert_eq!(got[4 * k + r], *want, "reduction {k} of row {r}");
        }
        assert!((got[34 + r] - 1.0).abs() < 1e-6);
        assert_eq!(got[38 + r], total);
    }
    let column = |c: usize| (0..4).map(|r| x[8 * r + c]).sum::<f32>();
    assert_eq!(got[32], x.iter().sum::<f32>());
    assert_eq!(got[33], (0..8).map(column).fold(f32::MIN, f32::max));
    assert_eq!(&got[42..], [1.0, 0.0]);
}

#[kernel]
fn ties(x: In<f32>, out: Out<i32>) {
    let t = load(x + arange(0, 8));
    store(out, argmax(t, axis = 0));
    store(out + 1, argmin(t, axis = 0));
}

#[test]
fn the_first_of_equal_elements_wins_and_nan_loses() {
    let nan = f32::NAN;
    let x = [nan, 2.0, 7.0, 1.0, 7.0, 1.0, nan, 3.0];
    assert_eq!(run(&TIES, &vec![], &[A::F32(&x), A::OutI32(2)], 1).i32(1), [2, 3]);
}

#[kernel]
fn scans(x: In<i32>, out: Out<i32>) {
    let i = arange(0, 8);
    let t = load(x + i);
    store(out + i, cumsum(t, axis = 0));
    store(out + 8 + i, cumsum(t, axis = 0, reverse = true));
    store(out + 16 + i, cumprod(t, 0));
    store(out + 24 + i, associative_scan(t, 0, |a, b| maximum(a, b)));
    let (v, _) = associative_scan((t, i), axis = 0, |(a, p), (b, q)| (b, q));
    store(out + 32 + i, v);
}

#[test]
fn scans_agree_with_plain_rust() {
    let x = [3, 1, -4, 1, 5, -9, 2, 6];
    let got = run(&SCANS, &vec![], &[A::I32(&x), A::OutI32(40)], 1).i32(1);
    for i in 0..8 {
        assert_eq!(got[i], x[..=i].iter().sum::<i32>());
        assert_eq!(got[8 + i], x[i..].iter().sum::<i32>());
        assert_eq!(got[16 + i], x[..=i].iter().product::<i32>());
        assert_eq!(got[24 + i], *x[..=i].iter().max().unwrap());
        assert_eq!(got[32 + i], x[i]);
    }
}

#[kernel]
fn shapes(out: Out<i32>) {
    let i = arange(0, 8);
    let (even, odd) = split(i.reshape([4, 2]));
    store(out + arange(0, 4), even * 10 + odd);
    store(out + 4 + arange(0, 8), interleave(even, odd));
    store(out + 12 + arange(0, 8), cat(odd, even));
    let cube = reshape(arange(0, 24 - 8), [2, 2, 4]).permute([2, 0, 1]);
    store(out + 20 + arange(0, 16), cube.ravel());
    let (a, b) = broadcast(even.expand_dims(0), odd.expand_dims(1));
    store(out + 36, sum(a * b));
    store(out + 37 + arange(0, 4), trans(join(even, odd)).sum(0));
    store(out + 41 + arange(0, 2), broadcast_to(sum(i), [2]));
    store(out + 43, zeros_like(i).numel() + i.shape()[0]);
}

#[test]
fn shapes_move_elements() {
    let got = run(&SHAPES, &vec![], &[A::OutI32(44)], 1).i32(0);
    assert_eq!(&got[..4], [1, 23, 45, 67]);
    assert_eq!(&got[4..12], [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(&got[12..20], [1, 3, 5, 7, 0, 2, 4, 6]);
    // element (k, i, j) of the permuted cube is (i, j, k) of the cube.
    let cube: Vec<i32> = (0..4).flat_map(|k| (0..4).map(move |ij| 4 * ij + k)).collect();
    assert_eq!(&got[20..36], cube);
    assert_eq!(got[36], 12 * 16);
    assert_eq!(&got[37..41], [1, 5, 9, 13]);
    assert_eq!(&got[41..43], [28, 28]);
    assert_eq!(got[43], 16);
}

#[kernel]
fn products<T: Float>(a: In<T>, b: In<T>, out: Out<f32>) {
    let i = arange(0, 16).expand_dims(1) * 16 + arange(0, 16).expand_dims(0);
    let (x, y) = (load(a + i), load(b + i));
    let mut acc = dot(x, y);
    acc = dot(x, y.trans(), acc, input_precision = tf32x3);
    acc = dot(x, y, acc = acc);
    store(out + i, acc);
}

#[test]
fn products_accumulate() {
    let a: Vec<f32> = (0..256).map(|i| (i % 5) as f32 - 2.0).collect();
    let b: Vec<f32> = (0..256).map(|i| (i % 7) as f32 - 3.0).collect();
    let got = run_as(&PRODUCTS, &[DType::F32], &vec![], &[A::F32(&a), A::F32(&b), A::OutF32(256)], 1).f32(2);
    for r in 0..16 {
        for c in 0..16 {
            let straight: f32 = (0..16).map(|k| a[16 * r + k] * b[16 * k + c]).sum();
            let transposed: f32 = (0..16).map(|k| a[16 * r + k] * b[16 * c + k]).sum();
            assert_eq!(got[16 * r + c], 2.0 * straight + transposed, "({r}, {c})");
        }
    }
    let printed = text(&PRODUCTS, &[DType::BF16], &vec![]);
    assert!(printed.contains("precision = tf32x3") && printed.contains("precision = ieee"), "{printed}");
}

#[kernel]
fn random(out: Out<f32>, bits: Out<i32>, seed: i32) {
    let i = arange(0, 1024);
    store(out + i, rand(seed, i));
    store(out + 1024 + i, randn(seed, i + 5000));
    let (a, b, c, d) = philox(seed, (i * 0).to::<u32>(), 0, 0, 0);
    let word = arange(0, 1);
    store(bits + word, a.bitcast::<i32>().reshape([1024]).min(0).expand_dims(0));
    store(bits + 1 + word, b.bitcast::<i32>().min(0).expand_dims(0));
    store(bits + 2 + word, c.bitcast::<i32>().min(0).expand_dims(0));
    store(bits + 3 + word, d.bitcast::<i32>().min(0).expand_dims(0));
}

#[test]
fn random_numbers_have_the_right_distribution_and_known_words() {
    let ran = run(&RANDOM, &vec![], &[A::OutF32(2048), A::OutI32(4), A::Int(0)], 1);
    let got = ran.f32(0);
    let (uniform, normal) = got.split_at(1024);
    assert!(uniform.iter().all(|u| (0.0..1.0).contains(u)));
    let mean = |v: &[f32]| v.iter().sum::<f32>() / v.len() as f32;
    let variance = |v: &[f32]| v.iter().map(|x| x * x).sum::<f32>() / v.len() as f32 - mean(v) * mean(v);
    assert!((mean(uniform) - 0.5).abs() < 0.03 && (variance(uniform) - 1.0 / 12.0).abs() < 0.01);
    assert!(mean(normal).abs() < 0.1 && (variance(normal) - 1.0).abs() < 0.15);
    // Known answer of Philox 4x32-10 for key 0 and counter 0 (Random123's kat_vectors).
    assert_eq!(ran.i32(1), [0x6627_e8d5_u32, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8].map(|w| w as i32));
}

#[kernel]
fn debugging(x: In<f32>, out: Out<f32>, n: i32, #[constexpr] tile: usize) {
    static_assert(tile >= 4, "tiles of at least 4");
    static_print("tile is", tile);
    assume(n > 0);
    let i = max_contiguous(multiple_of(arange(0, tile), 4), tile);
    let v = load(x + i);
    device_assert(v >= 0.0, "not negative");
    device_print("v", v, n);
    store(out + i, inline_asm_elementwise::<f32>(asm = "ex2.approx.f32 $0, $1;", constraints = "=f,f", args = (v,)));
}

#[test]
fn debugging_is_recorded() {
    let consts = crate::support::consts(&[("tile", 4)]);
    insta::assert_snapshot!(text(&DEBUGGING, &[], &consts));
    let spec = tilewright::codegen::lang::kernel::Specialization::default();
    let recording = DEBUGGING.record_full(&[], &consts, &spec).unwrap();
    assert_eq!(recording.prints, ["tile is 4"]);
}

#[kernel]
fn elementwise(x: In<f32>, out: Out<f32>) {
    let i = arange(0, 4);
    let v = load(x + i);
    store(out + i, exp(v));
    store(out + 4 + i, v.exp2());
    store(out + 8 + i, log(v));
    store(out + 12 + i, log2(v));
    store(out + 16 + i, sqrt(v));
    store(out + 20 + i, rsqrt(v));
    store(out + 24 + i, sin(v) + cos(v));
    store(out + 28 + i, tanh(v));
    store(out + 32 + i, erf(v));
    store(out + 36 + i, floor(v) + ceil(v));
    store(out + 40 + i, sigmoid(v));
    store(out + 44 + i, fma(v, v, 1.0));
    store(out + 48 + i, where_(v > 1.0, 1, 0.5));
}

#[test]
fn elementwise_functions_agree_with_rust() {
    let x = [0.25f32, 0.5, 1.5, 3.0];
    let got = run(&ELEMENTWISE, &vec![], &[A::F32(&x), A::OutF32(52)], 1).f32(1);
    let erf = [0.276_326_4, 0.520_499_9, 0.966_105_15, 0.999_977_9];
    for (i, &v) in x.iter().enumerate() {
        let expected = [
            v.exp(),
            v.exp2(),
            v.ln(),
            v.log2(),
            v.sqrt(),
            1.0 / v.sqrt(),
            v.sin() + v.cos(),
            v.tanh(),
            erf[i],
            v.floor() + v.ceil(),
            1.0 / (1.0 + (-v).exp()),
            v * v + 1.0,
            if v > 1.0 { 1.0 } else { 0.5 },
        ];
        for (k, want) in expected.iter().enumerate() {
            let found = got[4 * k + i];
            assert!((found - want).abs() <= 2e-6 * want.abs().max(1.0), "function {k} of {v}: {found} against {want}");
        }
    }
}

#[kernel]
fn eight_bit(a: In<F8E4M3>, b: In<F8E5M2>, n: In<i8>, out: Out<f32>, ints: Out<i32>) {
    let i = arange(0, 16).expand_dims(1) * 16 + arange(0, 16).expand_dims(0);
    let x = load(a + i);
    let narrow = load(b + i).to::<f32>().to::<F8E4M3>();
    store(out + i, dot(x, narrow));
    let k = load(n + i);
    store(ints + i, dot(k, k.t(), zeros::<i32>([16, 16])));
}

#[test]
fn eight_bit_products_accumulate_in_32_bits() {
    let printed = text(&EIGHT_BIT, &[], &vec![]);
    for part in [": tensor<16x16xf8e4m3>", "dot %", ": tensor<16x16xf32>", ": tensor<16x16xi32>"] {
        assert!(printed.contains(part), "`{part}` is missing in\n{printed}");
    }
}
