//! Tiles whose extents are not powers of two, on every device, against plain Rust or f64.

use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::{ArgSpec, ConstValue, ParamKind};
use tilewright::codegen::pipeline::lower_gpu;
use tilewright::codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright::prelude::*;
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::on_device::{devices, outputs};

/// Random numbers from −1 to 1.
fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Each row of x divided by its sum of exponentials, and the largest element and the sum of all of the tile.
#[kernel]
fn softmax_tile(
    x: Tensor<f32, (m, n)>,
    y: TensorMut<f32, (n, m)>,
    of_all: Out<f32>,
    #[constexpr] rows: usize,
    #[constexpr] columns: usize,
) {
    let block = x.block([program_id(0) * rows, 0], [rows, columns]);
    let tile = load(block, boundary_check = [0, 1], padding = zero);
    let inside = (arange(0, columns) < n).expand_dims(0);
    let largest = max(where_(inside, tile, f32::NEG_INFINITY), axis = 1, keep_dims = true);
    let weights = where_(inside, exp(tile - largest), 0.0);
    let normalized = weights / sum(weights, axis = 1, keep_dims = true);
    store(y.block([0, program_id(0) * rows], [columns, rows]), normalized.t(), boundary_check = [0, 1]);
    store(of_all + program_id(0) * 2, max(tile));
    store(of_all + program_id(0) * 2 + 1, sum(tile));
}

#[test]
fn rows_are_normalized_and_reduced() {
    for (m, n, rows, columns) in [(12, 96, 12, 96), (13, 90, 6, 96), (5, 7, 3, 7), (1, 1000, 1, 1000), (40, 5, 40, 5)] {
        let x = random(m * n, 1);
        let programs = m.div_ceil(rows);
        let of_row = |r: usize| -> Vec<f64> {
            let row: Vec<f64> = x[r * n..][..n].iter().map(|&v| f64::from(v).exp()).collect();
            let total: f64 = row.iter().sum();
            row.iter().map(|v| v / total).collect()
        };
        for device in devices() {
            let at = Buffer::from_slice(&device, &x).unwrap();
            let mut y = Buffer::<f32>::poisoned(&device, m * n).unwrap();
            let mut of_all = Buffer::<f32>::poisoned(&device, 2 * programs).unwrap();
            let view = at.tensor([m, n]).unwrap();
            let mut out = y.tensor_mut([n, m]).unwrap();
            SoftmaxTile { x: &view, y: &mut out, of_all: &mut of_all, rows, columns }
                .launch(&device, programs)
                .unwrap_or_else(|error| panic!("{device} {rows}x{columns}: {error}"));
            let (y, of_all) = (y.to_vec().unwrap(), of_all.to_vec().unwrap());
            for r in 0..m {
                for (c, want) in of_row(r).iter().enumerate() {
                    let got = f64::from(y[c * m + r]);
                    assert!((got - want).abs() < 1e-6, "{device} {rows}x{columns}: ({r}, {c}) is {got}, not {want}");
                }
            }
            for p in 0..programs {
                // The padding is zero.
                let tile = &x[p * rows * n..((p + 1) * rows * n).min(m * n)];
                let padded = (p + 1) * rows > m || columns > n;
                let largest = tile.iter().copied().fold(if padded { 0.0 } else { f32::MIN }, f32::max);
                let total: f64 = tile.iter().map(|&v| f64::from(v)).sum();
                assert_eq!(of_all[2 * p], largest, "{device}");
                assert!((f64::from(of_all[2 * p + 1]) - total).abs() < 1e-4, "{device}");
            }
        }
    }
}

/// c = a·b in tiles of any size. With `by_columns`, b is column-major.
#[kernel]
fn product<T: Float>(
    a: Tensor<T, (m, k)>,
    b: Tensor<T, (k, n)>,
    c: TensorMut<f32, (m, n)>,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] k_tile: usize,
    #[constexpr] by_columns: bool,
) {
    let n_tiles = cdiv(n, n_tile);
    let (i, j) = (program_id(0) / n_tiles, program_id(0) % n_tiles);
    let mut acc = zeros::<f32>([m_tile, n_tile]);
    let mut a_block = a.block([i * m_tile, 0], [m_tile, k_tile]);
    let mut b_block = make_block_ptr(
        b.ptr(),
        shape = [k, n],
        strides = [b.stride(0), b.stride(1)],
        offsets = [0, j * n_tile],
        block_shape = [k_tile, n_tile],
        order = if by_columns { [0, 1] } else { [1, 0] },
    );
    for _ in range(0, cdiv(k, k_tile)) {
        let at = load(a_block, boundary_check = [0, 1], padding = zero);
        let bt = load(b_block, boundary_check = [0, 1], padding = zero);
        acc = dot(at, bt, acc);
        a_block = a_block.advance([0, k_tile]);
        b_block = b_block.advance([k_tile, 0]);
    }
    store(c.block([i * m_tile, j * n_tile], [m_tile, n_tile]), acc, boundary_check = [0, 1]);
}

#[test]
fn products_in_tiles_of_any_size() {
    // Tile, extents, warps, and whether producer warps load.
    let cases = [
        ([48, 96, 24], [100, 96, 50], 4, false),
        ([64, 192, 64], [64, 200, 128], 4, false),
        ([64, 160, 64], [72, 160, 256], 4, true),
        ([128, 208, 64], [256, 416, 192], 8, true),
        ([64, 80, 128], [64, 80, 256], 4, true),
        ([20, 7, 5], [23, 14, 11], 4, false),
    ];
    for (([m_tile, n_tile, k_tile], [m, n, k], warps, specialize), by_columns) in
        cases.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        let convert = |list: Vec<f32>| list.into_iter().map(bf16::from_f32).collect::<Vec<_>>();
        let (a, b) = (convert(random(m * k, 2)), convert(random(k * n, 3)));
        // The elements of b in memory.
        let at = |l: usize, j: usize| if by_columns { j * k + l } else { l * n + j };
        let grid = m.div_ceil(m_tile) * n.div_ceil(n_tile);
        let runs = outputs::<f32>(devices(), m * n, |device, c| {
            let (a, b) = (Buffer::from_slice(device, &a)?, Buffer::from_slice(device, &b)?);
            let a = a.tensor([m, k])?;
            let b = if by_columns { b.tensor([n, k])?.transposed(0, 1) } else { b.tensor([k, n])? };
            let mut c = c.tensor_mut([m, n])?;
            let config = LaunchConfig::new(grid).num_warps(warps).warp_specialize(specialize);
            Product { a: &a, b: &b, c: &mut c, m_tile, n_tile, k_tile, by_columns }.launch_with(device, &config)
        });
        for (device, c) in runs {
            for i in 0..m {
                for j in 0..n {
                    let want: f64 = (0..k).map(|l| a[i * k + l].to_f64() * b[at(l, j)].to_f64()).sum();
                    let got = f64::from(c[i * n + j]);
                    assert!(
                        (got - want).abs() < 1e-4,
                        "{device}, {m_tile}x{n_tile}x{k_tile}, by columns {by_columns}: ({i}, {j}): {got}, {want}"
                    );
                }
            }
        }
    }
}

/// The columns of the instructions of `product` for Hopper.
fn instruction_columns(n_tile: usize, k_tile: usize, by_columns: bool) -> Vec<usize> {
    let consts = [
        ("m_tile", ConstValue::Int(64)),
        ("n_tile", ConstValue::Int(n_tile as i64)),
        ("k_tile", ConstValue::Int(k_tile as i64)),
        ("by_columns", ConstValue::Bool(by_columns)),
    ];
    let mut facts = well_aligned(&PRODUCT);
    let runtime = PRODUCT.params.iter().filter(|p| !matches!(p.kind, ParamKind::Constexpr { .. }));
    let strides = facts.args.iter_mut().zip(runtime).filter(|(_, param)| param.name.starts_with("b_stride"));
    for ((fact, _), unit) in strides.zip([by_columns, !by_columns]) {
        *fact = match unit {
            true => ArgSpec { divisible_by: 1, equal_to: Some(1) },
            false => ArgSpec { divisible_by: 16, equal_to: None },
        };
    }
    let func = PRODUCT.record(&[DType::BF16], &consts, &facts).expect("the kernel records");
    let options = CompileOptions {
        num_stages: 3,
        schedule: Schedule { warp_specialize: Some(true), ..Schedule::default() },
        ..CompileOptions::default()
    };
    let (_, llvm_ir) = lower_gpu(&func, GpuArch::Sm90a, &options, &mut ()).expect("the kernel compiles");
    let names = llvm_ir.split("wgmma.mma_async.sync.aligned.m64n").skip(1);
    let columns = names.filter_map(|rest| rest.split('k').next()?.parse().ok());
    columns.collect::<std::collections::BTreeSet<usize>>().into_iter().collect()
}

/// Dots of parts are one instruction where the slots of their rings can follow each other.
#[test]
fn dots_of_parts_share_an_instruction() {
    assert_eq!(instruction_columns(160, 64, true), [160]);
    assert_eq!(instruction_columns(208, 64, true), [208]);
    // Rows of b of two panels of 64 columns, and of one.
    assert_eq!(instruction_columns(192, 64, false), [192]);
    // The last panel is not full: of 32 columns, and of 16. After one of 32, the next 16 do not begin a panel.
    assert_eq!(instruction_columns(160, 64, false), [160]);
    assert_eq!(instruction_columns(208, 64, false), [208]);
    assert_eq!(instruction_columns(176, 64, false), [16, 160]);
    // Columns of b of two panels.
    assert_eq!(instruction_columns(80, 128, true), [16, 64]);
    assert_eq!(instruction_columns(128, 64, true), [128]);
}

/// o = Σ_j (q · k_jᵀ) · k_j: keys that are values too, so that one buffer is read along both of its dimensions.
#[kernel]
fn keys_as_values(
    q: Tensor<f16, (rows, width)>,
    k: Tensor<f16, (keys, width)>,
    o: TensorMut<f32, (rows, width)>,
    #[constexpr] d: usize,
) {
    let own = load(q.block([0, 0], [64, d]));
    let mut acc = zeros::<f32>([64, d]);
    for j in range(0, keys, 64) {
        let tile = load(k.block([j, 0], [64, d]));
        let scores = dot(own, tile.t(), zeros::<f32>([64, 64]));
        acc = dot(scores.to::<f16>(), tile, acc);
    }
    store(o.block([0, 0], [64, d]), acc);
}

#[test]
fn a_buffer_is_read_along_both_dimensions() {
    for (d, config) in [
        (160, LaunchConfig::new(1).warp_specialize(true)),
        (80, LaunchConfig::new(1).tma(true)),
        (96, LaunchConfig::new(1).warp_specialize(true)),
    ] {
        let device = Device::simulated(GpuArch::Sm90a);
        let wave =
            |len: usize, f: f64| -> Vec<f16> { (0..len).map(|i| f16::from_f64((i as f64 * f).sin() / 8.0)).collect() };
        let (q, k) = (wave(64 * d, 0.7), wave(128 * d, 0.3));
        let [q_buffer, k_buffer] = [&q, &k].map(|v| Buffer::from_slice(&device, v).unwrap());
        let mut o = Buffer::<f32>::poisoned(&device, 64 * d).unwrap();
        KeysAsValues {
            q: &q_buffer.tensor([64, d]).unwrap(),
            k: &k_buffer.tensor([128, d]).unwrap(),
            o: &mut o.tensor_mut([64, d]).unwrap(),
            d,
        }
        .launch_with(&device, &config)
        .unwrap_or_else(|e| panic!("{d}: {e}"));
        let found = o.to_vec().unwrap();
        let at = |v: &[f16], row: usize, column: usize| v[row * d + column].to_f64();
        for row in 0..64 {
            let scores: Vec<f64> = (0..128).map(|j| (0..d).map(|c| at(&q, row, c) * at(&k, j, c)).sum()).collect();
            for column in 0..d {
                let want: f64 = (0..128).map(|j| scores[j] * at(&k, j, column)).sum();
                let got = f64::from(found[row * d + column]);
                assert!((got - want).abs() < 2e-3, "{d}: ({row}, {column}) is {got}, expected {want}");
            }
        }
    }
}

/// Running sums along both axes, forward and backward, and the recurrence y = a·y + b, which does not commute.
#[kernel]
fn scans(x: In<i32>, y: Out<i32>, #[constexpr] rows: usize, #[constexpr] columns: usize) {
    let at = arange(0, rows).expand_dims(1) * columns + arange(0, columns).expand_dims(0);
    let tile = load(x + at);
    let n = rows * columns;
    store(y + at, cumsum(tile, axis = 0));
    store(y + at + n, cumsum(tile, axis = 1, reverse = true));
    let (_, b) = associative_scan((tile, tile + 1), axis = 1, |(a, b), (c, d)| (a * c, b * c + d), reverse = false);
    store(y + at + 2 * n, b);
    let (_, back) = associative_scan((tile, tile + 1), axis = 0, |(a, b), (c, d)| (a * c, b * c + d), reverse = true);
    store(y + at + 3 * n, back);
}

#[test]
fn scans_along_extents_of_any_size() {
    for (rows, columns) in [(3, 7), (24, 5), (1, 96), (12, 12)] {
        let n = rows * columns;
        let x: Vec<i32> = (0..n as i32).map(|i| (i * 7919) % 5 - 2).collect();
        let mut want = vec![0i32; 4 * n];
        let line = |sequence: Vec<usize>, want: &mut [i32], step: &dyn Fn(i32, i32) -> i32| {
            let mut carried = 0;
            for at in sequence {
                carried = step(carried, x[at]);
                want[at] = carried;
            }
        };
        let add = |sum: i32, v: i32| sum.wrapping_add(v);
        let recurrence = |y: i32, v: i32| y.wrapping_mul(v).wrapping_add(v + 1);
        let (first, rest) = want.split_at_mut(n);
        let (second, rest) = rest.split_at_mut(n);
        let (third, fourth) = rest.split_at_mut(n);
        for c in 0..columns {
            line((0..rows).map(|r| r * columns + c).collect(), first, &add);
            line((0..rows).rev().map(|r| r * columns + c).collect(), fourth, &recurrence);
        }
        for r in 0..rows {
            line((0..columns).rev().map(|c| r * columns + c).collect(), second, &add);
            line((0..columns).map(|c| r * columns + c).collect(), third, &recurrence);
        }
        let runs = outputs::<i32>(devices(), 4 * n, |device, y| {
            let x = Buffer::from_slice(device, &x)?;
            Scans { x: &x, y, rows, columns }.launch(device, 1)
        });
        for (device, y) in runs {
            assert_eq!(y, want, "{device}, {rows}x{columns}");
        }
    }
}

/// Picks by positions, which may be negative or beyond the extent; reverses; moves and combines dimensions.
#[kernel]
fn moves(x: In<i32>, y: Out<i32>, best: Out<i32>, #[constexpr] rows: usize, #[constexpr] columns: usize) {
    let (row, column) = (arange(0, rows).expand_dims(1), arange(0, columns).expand_dims(0));
    let at = row * columns + column;
    let tile = load(x + at);
    let n = rows * columns;
    store(y + at, gather(tile, column * 3 - row - 5, axis = 1));
    store(y + at + n, flip(tile, axis = 0));
    // [rows, columns] → [rows, 2 · columns]: pairs of neighbors.
    let twice = interleave(tile, -tile);
    let wide = row * (2 * columns) + arange(0, 2 * columns).expand_dims(0);
    store(y + wide + 2 * n, twice);
    let (even, odd) = split(twice.reshape([rows, columns, 2]));
    store(y + at + 4 * n, even - odd);
    store(best + arange(0, rows), argmax(tile, axis = 1));
    store(best + rows + arange(0, columns), argmin(tile, axis = 0));
}

#[test]
fn elements_move_within_tiles_of_any_size() {
    for (rows, columns) in [(3, 7), (24, 5), (1, 96), (12, 12)] {
        let n = rows * columns;
        let x: Vec<i32> = (0..n as i32).map(|i| (i * 7919) % 101 - 50).collect();
        let cell = |r: usize, c: usize| x[r * columns + c];
        let mut want = vec![0; 5 * n];
        for r in 0..rows {
            for c in 0..columns {
                let from = (c as i64 * 3 - r as i64 - 5).rem_euclid(columns as i64) as usize;
                want[r * columns + c] = cell(r, from);
                want[n + r * columns + c] = cell(rows - 1 - r, c);
                want[2 * n + r * 2 * columns + 2 * c] = cell(r, c);
                want[2 * n + r * 2 * columns + 2 * c + 1] = -cell(r, c);
                want[4 * n + r * columns + c] = 2 * cell(r, c);
            }
        }
        let first = |list: Vec<i32>, better: fn(&i32, &i32) -> bool| {
            (0..list.len()).fold(0, |best, i| if better(&list[i], &list[best]) { i } else { best }) as i32
        };
        let rows_best = (0..rows).map(|r| first((0..columns).map(|c| cell(r, c)).collect(), i32::gt));
        let columns_best = (0..columns).map(|c| first((0..rows).map(|r| cell(r, c)).collect(), i32::lt));
        let best: Vec<i32> = rows_best.chain(columns_best).collect();
        for device in devices() {
            let at = Buffer::from_slice(&device, &x).unwrap();
            let mut y = Buffer::<i32>::poisoned(&device, 5 * n).unwrap();
            let mut found = Buffer::<i32>::poisoned(&device, rows + columns).unwrap();
            Moves { x: &at, y: &mut y, best: &mut found, rows, columns }
                .launch(&device, 1)
                .unwrap_or_else(|error| panic!("{device} {rows}x{columns}: {error}"));
            assert_eq!(y.to_vec().unwrap(), want, "{device}, {rows}x{columns}");
            assert_eq!(found.to_vec().unwrap(), best, "{device}, {rows}x{columns}");
        }
    }
}

/// Loops and branches that carry tiles; masked loads, atomics, and functions of neighbors.
#[kernel]
fn carried(x: In<i32>, n: i32, y: InOut<i32>, #[constexpr] tile: usize) {
    let offsets = arange(0, tile);
    let mut total = zeros::<i32>([tile]);
    let mut pointers = x + offsets;
    for first in range(0, n, tile) {
        let next = load(pointers, mask = first + offsets < n, other = 0);
        if first > tile {
            total = total + next * 2;
        } else {
            total = total + next;
        }
        pointers = pointers + tile;
    }
    let mut doublings = 0;
    while max(total) < 1000 {
        total = total + total;
        doublings += 1;
    }
    let swapped = map_elementwise(total, |[a, b]| [b, a], pack = 2);
    atomic_add(y + offsets, swapped + doublings);
}

#[test]
fn loops_carry_tiles_of_any_size() {
    for (tile, n) in [(96, 500), (6, 100), (10, 7)] {
        let x: Vec<i32> = (0..n).map(|i| (i * 31) % 17 + 1).collect();
        let mut total = vec![0; tile];
        for (i, v) in x.iter().enumerate() {
            total[i % tile] += if i / tile > 1 { 2 * v } else { *v };
        }
        let mut doublings = 0;
        while total.iter().max() < Some(&1000) {
            total.iter_mut().for_each(|v| *v *= 2);
            doublings += 1;
        }
        let want: Vec<i32> = (0..tile).map(|i| total[i ^ 1] + doublings + 5).collect();
        for device in devices() {
            let at = Buffer::from_slice(&device, &x).unwrap();
            let mut y = Buffer::from_slice(&device, &vec![5i32; tile]).unwrap();
            Carried { x: &at, n, y: &mut y, tile }.launch(&device, 1).unwrap();
            assert_eq!(y.to_vec().unwrap(), want, "{device}, tile {tile}");
        }
    }
}
