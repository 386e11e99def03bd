//! Reductions, scans, shapes, dots, random numbers, debugging.

use crate::support::{Arg, run, run_as, run_within, text};
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
    let got = run_within(1e-6, &REDUCTIONS, &[], &vec![], &[Arg::F32(&x), Arg::OutF32(44)], 1).f32(1);
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
    assert_eq!(run(&TIES, &vec![], &[Arg::F32(&x), Arg::OutI32(2)], 1).i32(1), [2, 3]);
}

#[kernel]
fn scans(x: In<i32>, out: Out<i32>) {
    let i = arange(0, 8);
    let t = load(x + i);
    store(out + i, cumsum(t, axis = 0));
    store(out + 8 + i, cumsum(t, axis = 0, reverse = true));
    store(out + 16 + i, cumprod(t, 0));
    store(out + 24 + i, associative_scan(t, 0, |a, b| maximum(a, b)));
    let (v, _) = associative_scan((t, i), axis = 0, |_, (b, q)| (b, q));
    store(out + 32 + i, v);
}

#[test]
fn scans_agree_with_plain_rust() {
    let x = [3, 1, -4, 1, 5, -9, 2, 6];
    let got = run(&SCANS, &vec![], &[Arg::I32(&x), Arg::OutI32(40)], 1).i32(1);
    for i in 0..8 {
        assert_eq!(got[i], x[..=i].iter().sum::<i32>());
        assert_eq!(got[8 + i], x[i..].iter().sum::<i32>());
        assert_eq!(got[16 + i], x[..=i].iter().product::<i32>());
        assert_eq!(got[24 + i], *x[..=i].iter().max().unwrap());
        assert_eq!(got[32 + i], x[i]);
    }
}

#[device_fn]
fn larger(a: Tile<i32>, b: Tile<i32>) -> Tile<i32> {
    maximum(a, b)
}

#[device_fn]
fn total<T: Num>(a: Scalar<T>, b: Scalar<T>) -> Scalar<T> {
    a + b
}

/// The elements of both tiles on the left, then on the right, as in Triton.
#[device_fn]
fn first_maximum(a: Scalar<i32>, i: Scalar<i32>, b: Scalar<i32>, j: Scalar<i32>) -> (Scalar<i32>, Scalar<i32>) {
    if a > b || (a == b && i < j) { (a, i) } else { (b, j) }
}

#[device_fn]
fn last_of_pairs(_a: (Scalar<i32>, Scalar<i32>), b: (Scalar<i32>, Scalar<i32>)) -> (Scalar<i32>, Scalar<i32>) {
    b
}

/// Sum, minimum and maximum, of tiles of one element.
#[device_fn]
fn statistics(
    a: Tile<i32>,
    b: Tile<i32>,
    c: Tile<i32>,
    d: Tile<i32>,
    e: Tile<i32>,
    f: Tile<i32>,
) -> (Tile<i32>, Tile<i32>, Tile<i32>) {
    (a + d, minimum(b, e), maximum(c, f))
}

#[kernel]
fn combined_by_name(x: In<i32>, out: Out<i32>) {
    let i = arange(0, 8);
    let t = load(x + i);
    store(out, reduce(t, 0, larger));
    store(out + 1, reduce(t, combine = total));
    let (most, at) = reduce((t, i), axis = 0, combine_fn = first_maximum);
    store(out + 2, most);
    store(out + 3, at);
    let (sum, least, most) = reduce((t, t, t), 0, statistics);
    store(out + 4, sum);
    store(out + 5, least);
    store(out + 6, most);
    store(out + 8 + i, associative_scan(t, 0, larger));
    let (v, _) = associative_scan((t, i), 0, last_of_pairs);
    store(out + 16 + i, v);
}

#[test]
fn functions_combine_by_their_names() {
    let x = [3, 1, -4, 1, 9, -9, 9, 6];
    let got = run(&COMBINED_BY_NAME, &vec![], &[Arg::I32(&x), Arg::OutI32(24)], 1).i32(1);
    let (sum, least, most) = (x.iter().sum(), *x.iter().min().unwrap(), *x.iter().max().unwrap());
    assert_eq!(got[..7], [most, sum, most, 4, sum, least, most]);
    for i in 0..8 {
        assert_eq!(got[8 + i], *x[..=i].iter().max().unwrap());
        assert_eq!(got[16 + i], x[i]);
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
    let got = run(&SHAPES, &vec![], &[Arg::OutI32(44)], 1).i32(0);
    assert_eq!(&got[..4], [1, 23, 45, 67]);
    assert_eq!(&got[4..12], [0, 1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(&got[12..20], [1, 3, 5, 7, 0, 2, 4, 6]);
    // Element (k, i, j) of the permuted cube is element (i, j, k) of the cube.
    let cube: Vec<i32> = (0..4).flat_map(|k| (0..4).map(move |ij| 4 * ij + k)).collect();
    assert_eq!(&got[20..36], cube);
    assert_eq!(got[36], 12 * 16);
    assert_eq!(&got[37..41], [1, 5, 9, 13]);
    assert_eq!(&got[41..43], [28, 28]);
    assert_eq!(got[43], 16);
}

#[kernel]
fn dots<T: Float>(a: In<T>, b: In<T>, out: Out<f32>) {
    let i = arange(0, 16).expand_dims(1) * 16 + arange(0, 16).expand_dims(0);
    let (x, y) = (load(a + i), load(b + i));
    let mut acc = dot(x, y);
    acc = dot(x, y.trans(), acc, input_precision = tf32x3);
    acc = dot(x, y, acc = acc);
    store(out + i, acc);
}

#[test]
fn dot_accumulates() {
    let a: Vec<f32> = (0..256).map(|i| (i % 5) as f32 - 2.0).collect();
    let b: Vec<f32> = (0..256).map(|i| (i % 7) as f32 - 3.0).collect();
    let got = run_as(&DOTS, &[DType::F32], &vec![], &[Arg::F32(&a), Arg::F32(&b), Arg::OutF32(256)], 1).f32(2);
    for r in 0..16 {
        for c in 0..16 {
            let straight: f32 = (0..16).map(|k| a[16 * r + k] * b[16 * k + c]).sum();
            let transposed: f32 = (0..16).map(|k| a[16 * r + k] * b[16 * c + k]).sum();
            assert_eq!(got[16 * r + c], 2.0 * straight + transposed, "({r}, {c})");
        }
    }
    let printed = text(&DOTS, &[DType::BF16], &vec![]);
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
    let ran = run_within(1e-6, &RANDOM, &[], &vec![], &[Arg::OutF32(2048), Arg::OutI32(4), Arg::Int(0)], 1);
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

/// Philox 4×32-10 of one counter (Salmon et al., SC11), and the conversions of Triton's `random.py`.
struct Reference;

impl Reference {
    fn philox(seed: u64, mut counter: [u32; 4]) -> [u32; 4] {
        let mut key = [seed as u32, (seed >> 32) as u32];
        for _ in 0..10 {
            let [a, b] = [0xD251_1F53_u64 * u64::from(counter[0]), 0xCD9E_8D57_u64 * u64::from(counter[2])];
            let [high_a, high_b] = [a, b].map(|product| (product >> 32) as u32);
            counter = [high_b ^ counter[1] ^ key[0], b as u32, high_a ^ counter[3] ^ key[1], a as u32];
            key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
        }
        counter
    }

    fn words(seed: u64, offset: u64) -> [u32; 4] {
        Reference::philox(seed, [offset as u32, (offset >> 32) as u32, 0, 0])
    }

    /// `uint_to_uniform_float`: `where(x < 0, -x - 1, x) * 4.6566127342e-10` in f32.
    fn uniform(word: u32) -> f32 {
        let x = word as i32;
        let x = if x < 0 { -1 - x } else { x };
        x as f32 * 4.656_612_7e-10_f32
    }

    /// `pair_uniform_to_normal`, in f64.
    fn normal(a: u32, b: u32) -> (f64, f64) {
        let (a, b) = (f64::from(Reference::uniform(a)).max(1e-7), f64::from(Reference::uniform(b)));
        let (radius, angle) = ((-2.0 * a.ln()).sqrt(), std::f64::consts::TAU * b);
        (radius * angle.cos(), radius * angle.sin())
    }
}

#[kernel]
fn random_of<I: Int>(offsets: In<I>, uniform: Out<f32>, normal: Out<f32>, bits: Out<i32>, seed: i64) {
    let i = arange(0, 64);
    let at = load(offsets + i);
    let (a, b, c, d) = rand4x(seed, at);
    store(uniform + i, rand(seed, at));
    store(uniform + 64 + i, b);
    store(uniform + 128 + i, c);
    store(uniform + 192 + i, d);
    store(uniform + 256 + i, a);
    let (w, x, y, z) = randn4x(seed, at);
    store(normal + i, randn(seed, at));
    store(normal + 64 + i, x);
    store(normal + 128 + i, y);
    store(normal + 192 + i, z);
    store(normal + 256 + i, w);
    store(bits + i, randint(seed, at).bitcast::<i32>());
}

#[test]
fn random_numbers_are_those_of_triton() {
    // Random123's kat_vectors of philox4x32-10.
    let known = [
        (0, [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
        (u64::MAX, [u32::MAX; 4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
        (
            0x299f_31d0_a409_3822,
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
        ),
    ];
    for (seed, counter, words) in known {
        assert_eq!(Reference::philox(seed, counter), words, "seed {seed:#x}");
    }
    let narrow: Vec<i32> = (0..64).map(|i| i * i * 7919 - 40_000).collect();
    let wide: Vec<i64> = (0..64).map(|i| i * i * 0x1_2345_6789 - 77).collect();
    for seed in [0, 42, -7, 0x1234_5678_9abc_def0] {
        for (dtype, offsets) in [(DType::I32, Arg::I32(&narrow)), (DType::I64, Arg::I64(&wide))] {
            let at: Vec<u64> = match dtype {
                DType::I32 => narrow.iter().map(|&n| u64::from(n as u32)).collect(),
                _ => wide.iter().map(|&n| n as u64).collect(),
            };
            let args = [offsets, Arg::OutF32(320), Arg::OutF32(320), Arg::OutI32(64), Arg::Int(seed)];
            let ran = run_within(1e-6, &RANDOM_OF, &[dtype], &vec![], &args, 1);
            let (uniform, normal, bits) = (ran.f32(1), ran.f32(2), ran.i32(3));
            for (i, &offset) in at.iter().enumerate() {
                let words = Reference::words(seed as u64, offset);
                assert_eq!(bits[i], words[0] as i32, "seed {seed}, offset {offset:#x}");
                for (place, word) in [(0, words[0]), (64, words[1]), (128, words[2]), (192, words[3]), (256, words[0])]
                {
                    let expected = Reference::uniform(word);
                    assert_eq!(uniform[place + i].to_bits(), expected.to_bits(), "seed {seed}, offset {offset:#x}");
                }
                let ((a, b), (c, d)) = (Reference::normal(words[0], words[1]), Reference::normal(words[2], words[3]));
                for (place, expected) in [(0, a), (64, b), (128, c), (192, d), (256, a)] {
                    let found = f64::from(normal[place + i]);
                    assert!(
                        (found - expected).abs() < 1e-5,
                        "seed {seed}, offset {offset:#x}: {found}, expected {expected}"
                    );
                }
            }
        }
    }
    // The words that give the smallest and the largest numbers, and those around the change of sign.
    let ends = [0, 1, 0x7fff_ffff, 0x8000_0000, 0xffff_ffff].map(Reference::uniform);
    assert!(ends.iter().all(|u| (0.0..1.0).contains(u)), "{ends:?}");
}

/// Sums have the types of Triton's `_pick_sum_dtype`: the stores compile only for these.
#[kernel]
fn sums(
    a: In<i8>,
    b: In<u8>,
    c: In<i16>,
    d: In<u16>,
    e: In<bool>,
    f: In<bf16>,
    signed: Out<i32>,
    unsigned: Out<u32>,
    floats: Out<f32>,
) {
    let i = arange(0, 64);
    let none = i * 0;
    let (a, b, c, d) = (load(a + i), load(b + i), load(c + i), load(d + i));
    store(signed + 0, sum(a));
    store(signed + 1, sum(c));
    store(signed + 64 + i, cumsum(a, axis = 0));
    store(signed + 128 + i, c.cumsum(0));
    store(unsigned + 0, sum(b));
    store(unsigned + 1, sum(d));
    store(unsigned + 2, sum(load(e + i)));
    store(unsigned + 64 + i, cumsum(b, axis = 0));
    store(unsigned + 128 + i, b.reshape([1, 64]).sum(0) + none.to::<u32>());
    store(floats + i, cumsum(load(f + i), axis = 0));
    store(floats + 64 + i, cumprod(load(f + i), axis = 0));
}

#[test]
fn sums_of_small_types_are_as_wide_as_tritons() {
    let bytes: Vec<u8> = (0..64).map(|i| 255 - i).collect();
    let shorts: Vec<u8> = (0..64u16).flat_map(|i| (65_535 - 3 * i).to_le_bytes()).collect();
    let flags: Vec<u8> = (0..64).map(|i| u8::from(i % 3 != 0)).collect();
    let half: Vec<u8> = (0..64).flat_map(|i| half::bf16::from_f32(1.0 + i as f32 / 256.0).to_le_bytes()).collect();
    let args = [
        Arg::Bytes(&bytes),
        Arg::Bytes(&bytes),
        Arg::Bytes(&shorts),
        Arg::Bytes(&shorts),
        Arg::Bytes(&flags),
        Arg::Bytes(&half),
        Arg::OutI32(192),
        Arg::OutI32(192),
        Arg::OutF32(128),
    ];
    let ran = run_within(1e-6, &SUMS, &[], &vec![], &args, 1);
    let (signed, unsigned, floats) = (ran.i32(6), ran.i32(7), ran.f32(8));
    let a = |i: usize| i32::from(bytes[i] as i8);
    let c = |i: usize| -1 - 3 * i as i32;
    assert_eq!(signed[..2], [(0..64).map(a).sum(), (0..64).map(c).sum::<i32>()]);
    assert_eq!(unsigned[0], (0..64).map(|i| i32::from(bytes[i])).sum::<i32>());
    assert_eq!(unsigned[1], (0..64).map(|i| 65_535 - 3 * i).sum::<i32>());
    assert_eq!(unsigned[2], flags.iter().map(|&flag| i32::from(flag)).sum::<i32>());
    let (mut total, mut product) = (0f32, 1f32);
    for i in 0..64 {
        assert_eq!(signed[64 + i], (0..=i).map(a).sum::<i32>());
        assert_eq!(signed[128 + i], (0..=i).map(c).sum::<i32>());
        assert_eq!(unsigned[64 + i], (0..=i).map(|k| i32::from(bytes[k])).sum::<i32>());
        assert_eq!(unsigned[128 + i], i32::from(bytes[i]));
        let x = half::bf16::from_f32(1.0 + i as f32 / 256.0).to_f32();
        (total, product) = (total + x, product * x);
        assert!((floats[i] - total).abs() < 1e-4 && (floats[64 + i] - product).abs() < 1e-4 * product);
    }
}

#[kernel]
fn generic_sums<T: Num, I: Int>(x: In<T>, n: In<I>, out: Out<f32>, counts: Out<i64>) {
    let i = arange(0, 64);
    store(out + 0, sum(load(x + i)).to::<f32>());
    store(out + 1 + i, cumsum(load(x + i), axis = 0).to::<f32>());
    store(counts + 0, sum(load(n + i)).to::<i64>());
    store(counts + 1 + i, load(n + i).cumsum(0).to::<i64>());
}

#[test]
fn sums_of_generic_elements_have_the_type_of_their_instance() {
    let bytes: Vec<u8> = (0..64).map(|i| 255 - i).collect();
    for (d, value) in [(DType::I8, (|b: u8| i64::from(b as i8)) as fn(u8) -> i64), (DType::U8, |b| i64::from(b))] {
        let args = [Arg::Bytes(&bytes), Arg::Bytes(&bytes), Arg::OutF32(65), Arg::OutBytes(65 * 8)];
        let ran = run_as(&GENERIC_SUMS, &[d, d], &vec![], &args, 1);
        let counts: Vec<i64> = ran.bytes(3).chunks(8).map(|c| i64::from_le_bytes(c.try_into().unwrap())).collect();
        let total: i64 = bytes.iter().map(|&b| value(b)).sum();
        assert_eq!(
            (counts[0], counts[64], ran.f32(2)[0], ran.f32(2)[64]),
            (total, total, total as f32, total as f32),
            "{d}"
        );
    }
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
    let got = run_within(1e-6, &ELEMENTWISE, &[], &vec![], &[Arg::F32(&x), Arg::OutF32(52)], 1).f32(1);
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
fn eight_bit_dots_accumulate_in_32_bits() {
    let printed = text(&EIGHT_BIT, &[], &vec![]);
    for part in [": tensor<16x16xf8e4m3>", "dot %", ": tensor<16x16xf32>", ": tensor<16x16xi32>"] {
        assert!(printed.contains(part), "`{part}` is missing in\n{printed}");
    }
}
