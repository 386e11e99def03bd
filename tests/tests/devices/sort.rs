//! Functions that move elements within a tile, as native code and on a simulated GPU, against plain Rust.

use tilewright::Element;
use tilewright::codegen::lang::Num;
use tilewright::codegen::lang::kernel::Specialization;
use tilewright::codegen::pipeline::compile;
use tilewright::codegen::target::{Code, CompileOptions, Target};
use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

/// `x` as a [rows, columns] tile, sorted along `axis`.
#[kernel]
fn sorted<T: Num>(
    x: In<T>,
    y: Out<T>,
    #[constexpr] rows: usize,
    #[constexpr] columns: usize,
    #[constexpr] axis: usize,
    #[constexpr] down: bool,
) {
    let at = arange(0, rows).expand_dims(1) * columns + arange(0, columns).expand_dims(0);
    store(y + at, sort(load(x + at), axis = axis, descending = down));
}

/// Random numbers with repetitions, from `of`.
fn random<T>(n: usize, of: impl Fn(u64) -> T) -> Vec<T> {
    let mut state = 7u64;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            of(state >> 33)
        })
        .collect()
}

fn check_sort<T: Element + Num>(x: &[T], (rows, columns): (usize, usize), order: fn(&T, &T) -> std::cmp::Ordering) {
    for (axis, down) in [(0, false), (1, true), (1, false)] {
        let mut want = x.to_vec();
        if axis == 1 {
            want.chunks_mut(columns).for_each(|row| row.sort_by(order));
        } else {
            for c in 0..columns {
                let mut line: Vec<T> = (0..rows).map(|r| x[r * columns + c]).collect();
                line.sort_by(order);
                (0..rows).for_each(|r| want[r * columns + c] = line[r]);
            }
        }
        if down {
            want.chunks_mut(columns).for_each(<[T]>::reverse);
        }
        for device in devices() {
            let at = Buffer::from_slice(&device, x).unwrap();
            let mut y = Buffer::<T>::poisoned(&device, x.len()).unwrap();
            Sorted { x: &at, y: &mut y, rows, columns, axis, down }.launch(&device, 1).unwrap();
            let got = y.to_vec().unwrap();
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                assert!(
                    order(g, w).is_eq(),
                    "{device}, axis {axis}, down {down}: element {i} is {g:?}, expected {w:?}"
                );
            }
        }
    }
}

#[test]
fn tiles_are_sorted_along_each_axis() {
    check_sort(&random(256, |n| (n % 50) as i32 - 20), (4, 64), Ord::cmp);
    check_sort(&random(64, |n| n as u8), (64, 1), Ord::cmp);
    check_sort(&random(256, |n| n as i64 * 1_000_000_007 - (1 << 60)), (1, 256), Ord::cmp);
    check_sort(&random(128, |n| f16::from_f32(n as f32 % 100.0 - 50.0)), (8, 16), f16::total_cmp);
    check_sort(&random(32, |n| n as f64 - 1e9), (2, 16), f64::total_cmp);
}

#[test]
fn special_floats_are_sorted_in_total_order() {
    let special = [f32::NAN, -0.0, f32::INFINITY, 0.0, f32::NEG_INFINITY, 1e-42, -1.5, f32::MAX];
    check_sort(&random(128, |n| special[n as usize % 8]), (2, 64), f32::total_cmp);
}

#[kernel]
fn moves(x: In<i32>, at: In<i32>, y: Out<i32>, counts: Out<i32>) {
    let i = arange(0, 64);
    let v = load(x + i);
    store(y + i, flip(v));
    store(y + 64 + arange(0, 16), topk(v, 16));
    let square = v.reshape([8, 8]);
    let line = arange(0, 8).expand_dims(1) * 8 + arange(0, 8).expand_dims(0);
    let narrow = arange(0, 8).expand_dims(1) * 4 + arange(0, 4).expand_dims(0);
    store(y + 80 + line, flip(square, axis = 0));
    let k = load(at + narrow);
    store(y + 144 + narrow, gather(square, k, axis = 1));
    store(y + 176 + arange(0, 8), reduce_or(square, axis = 1));
    store(y + 184 + arange(0, 8), squeeze(sum(square, axis = 0, keep_dims = true), axis = 0));
    store(y + 192 + arange(0, 2), join(program_id(0) + 5, scalar::<i32>(7)));
    store(counts + arange(0, 16), histogram(v, 16));
    store(counts + 16 + arange(0, 16), histogram(v, num_bins = 16, mask = i < 20));
}

#[test]
fn elements_move_as_in_plain_rust() {
    let x: Vec<i32> = random(64, |n| (n % 23) as i32 - 2);
    // Also indices out of range: they count modulo 8.
    let at: Vec<i32> = random(32, |n| (n % 40) as i32 - 16);
    let mut want: Vec<i32> = x.iter().rev().copied().collect();
    let mut down = x.clone();
    down.sort_by(|a, b| b.cmp(a));
    want.extend(&down[..16]);
    want.extend(x.chunks(8).rev().flatten());
    want.extend((0..32).map(|i| x[i / 4 * 8 + at[i].rem_euclid(8) as usize]));
    want.extend(x.chunks(8).map(|row| row.iter().fold(0, |a, b| a | b)));
    want.extend((0..8).map(|c| (0..8).map(|r| x[8 * r + c]).sum::<i32>()));
    want.extend([5, 7]);
    let count = |(n, bin): (usize, i32)| x[..n].iter().filter(|&&v| v == bin).count() as i32;
    let counts: Vec<i32> = [64, 20].into_iter().flat_map(|n| (0..16).map(move |bin| (n, bin))).map(count).collect();
    for device in devices() {
        let (x, at) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &at).unwrap());
        let mut y = Buffer::<i32>::poisoned(&device, want.len()).unwrap();
        let mut found = Buffer::<i32>::poisoned(&device, 32).unwrap();
        Moves { x: &x, at: &at, y: &mut y, counts: &mut found }.launch(&device, 1).unwrap();
        assert_eq!(y.to_vec().unwrap(), want, "{device}");
        assert_eq!(found.to_vec().unwrap(), counts, "{device}");
    }
}

/// Gathers along rows whose elements one warp holds: of one column, of computed columns, and of fewer columns than there
/// are. A column counts modulo 128.
#[kernel]
fn gathers_in_rows<T: Float>(x: In<T>, y: Out<T>, shift: i32) {
    let place = arange(0, 8).expand_dims(1) * 128 + arange(0, 128).expand_dims(0);
    let v = cumsum(load(x + place).to::<f32>(), axis = 1).to::<T>();
    let (rows, columns) = (arange(0, 8).expand_dims(1), arange(0, 128).expand_dims(0));
    store(y + arange(0, 8).expand_dims(1), gather(v, full::<i32>([8, 1], 127), axis = 1));
    store(y + 8 + place, gather(v, columns * 3 + rows + shift, axis = 1));
    let few = arange(0, 16).expand_dims(0);
    store(y + 1032 + arange(0, 8).expand_dims(1) * 16 + few, gather(v, few * 7 - rows + shift, axis = 1));
}

fn check_gathers_in_rows<T: Element + tilewright::codegen::lang::Float>(of: fn(f32) -> T, value: fn(T) -> f32) {
    let x: Vec<f32> = random(8 * 128, |n| (n % 3) as f32);
    let mut sums = x.clone();
    for row in sums.chunks_mut(128) {
        (1..128).for_each(|i| row[i] += row[i - 1]);
    }
    for shift in [50, -300] {
        check_gathers_with(&x, &sums, shift, of, value);
    }
}

fn check_gathers_with<T: Element + tilewright::codegen::lang::Float>(
    x: &[f32],
    sums: &[f32],
    shift: i32,
    of: fn(f32) -> T,
    value: fn(T) -> f32,
) {
    let at = |row: usize, column: i32| sums[row * 128 + column.rem_euclid(128) as usize];
    let mut want: Vec<f32> = (0..8).map(|row| at(row, 127)).collect();
    want.extend((0..8 * 128).map(|i| at(i / 128, (i % 128 * 3 + i / 128) as i32 + shift)));
    want.extend((0..8 * 16).map(|i| at(i / 16, (i % 16 * 7) as i32 - (i / 16) as i32 + shift)));
    for device in devices() {
        for num_warps in [1, 4, 8] {
            let x = Buffer::from_slice(&device, &x.iter().map(|v| of(*v)).collect::<Vec<T>>()).unwrap();
            let mut y = Buffer::<T>::poisoned(&device, want.len()).unwrap();
            GathersInRows { x: &x, y: &mut y, shift }
                .launch_with(&device, &LaunchConfig::new(1).num_warps(num_warps))
                .unwrap();
            let found: Vec<f32> = y.to_vec().unwrap().into_iter().map(value).collect();
            assert_eq!(found, want, "{device} {num_warps}");
        }
    }
}

#[kernel]
fn distance_to_last(x: In<i32>, y: Out<i32>) {
    let place = arange(0, 8).expand_dims(1) * 128 + arange(0, 128).expand_dims(0);
    let v = load(x + place);
    store(y + place, gather(v, full::<i32>([8, 1], 127), axis = 1) - v);
}

/// A warp has all elements of a row: they are shuffled, without shared memory and its barriers.
#[test]
fn gathers_within_a_warp_need_no_barrier() {
    let func = DISTANCE_TO_LAST.record(&[], &[], &Specialization::aligned_memory(&DISTANCE_TO_LAST)).unwrap();
    let target = Target::Nvptx(GpuArch::Sm90a);
    let artifact = compile(&func, &target, &CompileOptions::default(), &mut ()).unwrap();
    let Code::Ptx(ptx) = &artifact.code else { panic!("no PTX") };
    assert!(ptx.contains("shfl.sync.idx") && !ptx.contains("bar.sync"), "{ptx}");
}

#[test]
fn gathers_in_rows_pick_every_column() {
    check_gathers_in_rows::<f32>(|x| x, |x| x);
    check_gathers_in_rows::<f16>(f16::from_f32, f16::to_f32);
    check_gathers_in_rows::<f64>(f64::from, |x| x as f32);
}

/// More comparisons than fit in registers at once: a loop over parts of the tile.
#[kernel]
fn many_bins(x: In<i32>, counts: Out<i32>) {
    store(counts + arange(0, 512), histogram(load(x + arange(0, 256)), 512));
}

#[test]
fn histograms_of_many_bins_are_computed_in_parts() {
    let x: Vec<i32> = random(256, |n| (n % 600) as i32);
    let want: Vec<i32> = (0..512).map(|bin| x.iter().filter(|&&v| v == bin).count() as i32).collect();
    for device in devices() {
        let at = Buffer::from_slice(&device, &x).unwrap();
        let mut counts = Buffer::<i32>::poisoned(&device, 512).unwrap();
        ManyBins { x: &at, counts: &mut counts }.launch(&device, 1).unwrap();
        assert_eq!(counts.to_vec().unwrap(), want, "{device}");
    }
}
