//! Arithmetic on 8-bit integers, which a GPU does four at a time: every device against plain Rust, for all
//! values.

use tilewright::codegen::lang::Num;
use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

const COUNT: usize = 256;

/// Stores 256 results, also as f16, at `place` of as many.
#[device_fn]
fn put<T: Num>(z: Ptr<T>, halves: Ptr<f16>, place: usize, result: Tile<T>) {
    let at = place * 256 + arange(0, 256);
    store(z + at, result);
    store(halves + at, result.to::<f16>());
}

#[kernel]
fn unsigned(x: In<u8>, y: In<u8>, z: Out<u8>, halves: Out<f16>) {
    let (a, b) = (load(x + arange(0, 256)), load(y + arange(0, 256)));
    put(z, halves, 0, a & b);
    put(z, halves, 1, a | b);
    put(z, halves, 2, a ^ b);
    put(z, halves, 3, a & 15);
    put(z, halves, 4, a >> 4);
    put(z, halves, 5, a << 3);
    put(z, halves, 6, a >> 7);
    put(z, halves, 7, a << 0);
    put(z, halves, 8, (a & 15) << 4 | a >> 4);
    put(z, halves, 9, a >> b % 8);
    let few = load(x + arange(0, 128));
    store(halves + 2560 + arange(0, 256), interleave(few & 15, few >> 4).to::<f16>());
}

#[kernel]
fn signed(x: In<i8>, y: In<i8>, z: Out<i8>, halves: Out<f16>) {
    let (a, b) = (load(x + arange(0, 256)), load(y + arange(0, 256)));
    put(z, halves, 0, a & b);
    put(z, halves, 1, a | b);
    put(z, halves, 2, a ^ b);
    put(z, halves, 3, a >> 3);
    put(z, halves, 4, a << 2);
    put(z, halves, 5, a ^ -1);
}

#[test]
fn every_unsigned_byte() {
    let x: Vec<u8> = (0..=255).collect();
    let y: Vec<u8> = x.iter().map(|n| n.wrapping_mul(91).wrapping_add(17)).collect();
    let of = |f: fn(u8, u8) -> u8| x.iter().zip(&y).map(move |(a, b)| f(*a, *b)).collect::<Vec<u8>>();
    let want: Vec<u8> = [
        of(|a, b| a & b),
        of(|a, b| a | b),
        of(|a, b| a ^ b),
        of(|a, _| a & 15),
        of(|a, _| a >> 4),
        of(|a, _| a << 3),
        of(|a, _| a >> 7),
        of(|a, _| a),
        of(|a, _| a.rotate_right(4)),
        of(|a, b| a >> (b % 8)),
    ]
    .concat();
    let mut numbers: Vec<f32> = want.iter().map(|n| f32::from(*n)).collect();
    numbers.extend(x[..COUNT / 2].iter().flat_map(|n| [f32::from(n & 15), f32::from(n >> 4)]));
    for device in devices() {
        for num_warps in [1, 2, 4] {
            let place = |v: &[u8]| Buffer::from_slice(&device, v).unwrap();
            let mut z = Buffer::<u8>::poisoned(&device, want.len()).unwrap();
            let mut halves = Buffer::<f16>::poisoned(&device, numbers.len()).unwrap();
            Unsigned { x: &place(&x), y: &place(&y), z: &mut z, halves: &mut halves }
                .launch_with(&device, &LaunchConfig::new(1).num_warps(num_warps))
                .unwrap();
            assert_eq!(z.to_vec().unwrap(), want, "{device} {num_warps}");
            let found: Vec<f32> = halves.to_vec().unwrap().into_iter().map(f16::to_f32).collect();
            assert_eq!(found, numbers, "{device} {num_warps}");
        }
    }
}

#[test]
fn every_signed_byte() {
    let x: Vec<i8> = (-128..=127).collect();
    let y: Vec<i8> = x.iter().map(|n| n.wrapping_mul(91).wrapping_add(17)).collect();
    let of = |f: fn(i8, i8) -> i8| x.iter().zip(&y).map(move |(a, b)| f(*a, *b)).collect::<Vec<i8>>();
    let want: Vec<i8> =
        [of(|a, b| a & b), of(|a, b| a | b), of(|a, b| a ^ b), of(|a, _| a >> 3), of(|a, _| a << 2), of(|a, _| !a)]
            .concat();
    for device in devices() {
        let place = |v: &[i8]| Buffer::from_slice(&device, v).unwrap();
        let mut z = Buffer::<i8>::poisoned(&device, want.len()).unwrap();
        let mut halves = Buffer::<f16>::poisoned(&device, want.len()).unwrap();
        Signed { x: &place(&x), y: &place(&y), z: &mut z, halves: &mut halves }.launch(&device, 1).unwrap();
        assert_eq!(z.to_vec().unwrap(), want, "{device}");
        let found: Vec<f32> = halves.to_vec().unwrap().into_iter().map(f16::to_f32).collect();
        assert_eq!(found, want.iter().map(|n| f32::from(*n)).collect::<Vec<_>>(), "{device}");
    }
}

/// Bytes that loops and branches carry, by as many threads that each has one of them to eight.
#[kernel]
fn carried(x: In<u8>, f: In<F8E4M3>, y: Out<u8>, g: Out<F8E5M2>, steps: i32, #[constexpr] tile: usize) {
    let i = arange(0, tile);
    let (mut a, mut b) = (load(x + i), load(f + i));
    for k in range(0, steps) {
        a = a ^ (3 + k).to::<u8>();
        b = (b.to::<f32>() * 1.5).to::<F8E4M3>();
    }
    let mut left = steps;
    while left > 0 {
        a = a << 1 | a >> 7;
        b = (b.to::<f32>() * -0.5).to::<F8E4M3>();
        left -= 1;
    }
    if steps > 2 {
        (a, b) = (a ^ 0x5a, (b.to::<f32>() + 0.25).to::<F8E4M3>());
    }
    store(y + i, a);
    store(g + i, b.to::<F8E5M2>());
}

#[test]
fn bytes_cross_loops_and_branches() {
    for (tile, num_warps) in [(32usize, 1), (64, 1), (128, 1), (256, 1), (96, 1), (256, 8)] {
        let x: Vec<u8> = (0..tile).map(|i| (i * 37 + 11) as u8).collect();
        // Also NaN, zeros of both signs, subnormal numbers and the largest ones.
        let f: Vec<F8E4M3> = x.iter().map(|&n| F8E4M3(n)).collect();
        for steps in [0, 1, 5] {
            let step = |n: u8| {
                let n = (0..steps).fold(n, |n, k| n ^ (3 + k as u8)).rotate_left(steps as u32);
                if steps > 2 { n ^ 0x5a } else { n }
            };
            let float = |n: F8E4M3| {
                let grown = (0..steps).fold(n, |n, _| F8E4M3::from_f32(n.to_f32() * 1.5));
                let small = (0..steps).fold(grown, |n, _| F8E4M3::from_f32(n.to_f32() * -0.5));
                let last = if steps > 2 { F8E4M3::from_f32(small.to_f32() + 0.25) } else { small };
                F8E5M2::from_f32(last.to_f32())
            };
            let want: (Vec<u8>, Vec<F8E5M2>) =
                (x.iter().map(|&n| step(n)).collect(), f.iter().map(|&n| float(n)).collect());
            for device in devices() {
                let (mut y, mut g) =
                    (Buffer::poisoned(&device, tile).unwrap(), Buffer::poisoned(&device, tile).unwrap());
                let (x, f) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &f).unwrap());
                Carried { x: &x, f: &f, y: &mut y, g: &mut g, steps, tile }
                    .launch_with(&device, &LaunchConfig::new(1).num_warps(num_warps))
                    .unwrap();
                let what = format!("{device}, tiles of {tile}, {num_warps} warps, {steps} steps");
                assert_eq!(y.to_vec().unwrap(), want.0, "{what}");
                for (found, want) in g.to_vec().unwrap().into_iter().zip(&want.1) {
                    assert!(
                        found.0 == want.0 || found.to_f32().is_nan() && want.to_f32().is_nan(),
                        "{what}: {found:?}, {want:?}"
                    );
                }
            }
        }
    }
}
