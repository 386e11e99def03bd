//! Programs that the CTAs of a cluster share (`num_ctas`), on the simulated GPU: results, loads by multicast, and programs that
//! cannot be shared.

use tilewright::prelude::*;
use tilewright_codegen::ir::{Func, Op};
use tilewright_codegen::lang::kernel::KernelDef;
use tilewright_codegen::target::{CompileOptions, GpuArch, Schedule};
use tilewright_tests::configurations::well_aligned;
use tilewright_tests::{consts, notes};

/// y = x − max(x) of each row or, with `columns`, of each column.
#[kernel(grid = 1)]
fn below_maximum(x: In<f32>, y: Out<f32>, #[constexpr] columns: bool) {
    let places = arange(0, 64).expand_dims(1) * 32 + arange(0, 32).expand_dims(0);
    let tile = load(x + places);
    let top = if columns { max(tile, axis = 0).expand_dims(0) } else { max(tile, axis = 1).expand_dims(1) };
    store(y + places, tile - top);
}

/// Programs that CTAs cannot share, by `form`.
#[kernel(grid = 1)]
fn refused(x: InOut<f32>, y: InOut<f32>, #[constexpr] form: usize) {
    let i = arange(0, 64);
    if form == 0 {
        let old = atomic_add(y + i, 1.0);
        store(x + i, old);
    } else if form == 1 {
        store(x + i, load(x + i + 1));
    } else if form == 2 {
        let tile = load(x + i.expand_dims(1) * 64 + i.expand_dims(0));
        store(y + i, sum(tile, axis = 0) + sum(tile, axis = 1));
    } else if form == 3 {
        store(y + i, cumsum(load(x + i), axis = 0));
    } else if form == 4 {
        store(y, load(x));
    } else if form == 5 {
        for k in range(0, 4) {
            let moving =
                make_block_ptr(x + k, shape = [64], strides = [1], offsets = [0], block_shape = [64], order = [0]);
            store(moving, load(moving) * 2.0);
        }
    } else if form == 6 {
        let pairs = join(load(x + i), cumsum(load(x + i), axis = 0));
        store(y + i.expand_dims(1) * 2 + arange(0, 2).expand_dims(0), pairs);
    } else {
        // The operand has no elements of a CTA.
        store(y + i, cumsum(full::<f32>([64], 1.0), axis = 0));
    }
}

/// c = max(a · b + bias, 0), where bias has an element per row or per column of c. `form` 1 stores c transposed, 2 adds to
/// what c has, 3 reads what c has.
#[kernel(grid = if persistent { 3 } else { cdiv(m, m_tile) * cdiv(n, n_tile) })]
fn product(
    a: Tensor<f16, (m, k)>,
    b: Tensor<f16, (k, n)>,
    rows: Tensor<f32, (m,)>,
    columns: Tensor<f32, (n,)>,
    c: TensorInOut<f32, (m, n)>,
    #[constexpr] m_tile: usize,
    #[constexpr] n_tile: usize,
    #[constexpr] form: usize,
    #[constexpr = false] persistent: bool,
) {
    let n_tiles = cdiv(n, n_tile);
    let compute = |tile: Scalar<i32>| {
        let (i, j) = (tile / n_tiles * m_tile, tile % n_tiles * n_tile);
        let mut acc = zeros::<f32>([m_tile, n_tile]);
        for at in range(0, k, 32) {
            let a_tile = load(a.block([i, at], [m_tile, 32]), boundary_check = [0, 1], padding = zero);
            let b_tile = load(b.block([at, j], [32, n_tile]), boundary_check = [0, 1], padding = zero);
            acc = dot(a_tile, b_tile, acc);
        }
        let row = i + arange(0, m_tile);
        acc = acc + load(rows.ptr() + row, mask = row < m, other = 0.0).expand_dims(1);
        let column = j + arange(0, n_tile);
        acc = acc + load(columns.ptr() + column, mask = column < n, other = 0.0).expand_dims(0);
        acc = maximum(acc, 0.0);
        let block = c.block([i, j], [m_tile, n_tile]);
        if form == 1 {
            let places = c.ptr() + row.expand_dims(1) * n + column.expand_dims(0);
            let inside = (row.expand_dims(1) < m) & (column.expand_dims(0) < n);
            store(places.trans(), acc.trans(), mask = inside.trans());
        } else if form == 2 {
            atomic_add(block, acc, boundary_check = [0, 1]);
        } else {
            if form == 3 {
                acc = acc + load(block, boundary_check = [0, 1], padding = zero);
            }
            store(block, acc, boundary_check = [0, 1]);
        }
    };
    if persistent {
        for tile in range(program_id(0), cdiv(m, m_tile) * n_tiles, num_programs(0)) {
            compute(tile);
        }
    } else {
        compute(program_id(0));
    }
}

fn wave(len: usize, f: f64) -> Vec<f16> {
    (0..len).map(|i| f16::from_f64((i as f64 * f).sin())).collect()
}

/// Runs `product` and compares it with f64.
fn check([m, n, k]: [usize; 3], [m_tile, n_tile]: [usize; 2], form: usize, persistent: bool, config: &LaunchConfig) {
    let (a, b) = (wave(m * k, 0.7), wave(k * n, 0.3));
    let (rows, columns): (Vec<f32>, Vec<f32>) =
        ((0..m).map(|i| i as f32 * 0.25 - 9.0).collect(), (0..n).map(|i| 4.0 - i as f32 * 0.125).collect());
    let before: Vec<f32> = (0..m * n).map(|i| (i % 13) as f32).collect();
    let device = Device::simulated(GpuArch::Sm90a);
    let [a_buffer, b_buffer] = [&a, &b].map(|v| Buffer::from_slice(&device, v).unwrap());
    let [rows_buffer, columns_buffer] = [&rows, &columns].map(|v| Buffer::from_slice(&device, v).unwrap());
    let mut c = Buffer::from_slice(&device, &before).unwrap();
    Product {
        a: &a_buffer.tensor([m, k]).unwrap(),
        b: &b_buffer.tensor([k, n]).unwrap(),
        rows: &rows_buffer.tensor([m]).unwrap(),
        columns: &columns_buffer.tensor([n]).unwrap(),
        c: &mut c.tensor_mut([m, n]).unwrap(),
        m_tile,
        n_tile,
        form,
        persistent,
    }
    .launch_with(&device, config)
    .unwrap_or_else(|e| panic!("{m} × {n} × {k}, form {form}: {e}"));
    let found = c.to_vec().unwrap();
    for i in 0..m {
        for j in 0..n {
            let sum: f64 = (0..k).map(|l| a[i * k + l].to_f64() * b[l * n + j].to_f64()).sum();
            let mut want = (sum + f64::from(rows[i]) + f64::from(columns[j])).max(0.0);
            if form >= 2 {
                want += f64::from(before[i * n + j]);
            }
            let got = f64::from(found[i * n + j]);
            assert!((got - want).abs() < 1e-2, "{m} × {n} × {k}, form {form}: ({i}, {j}) is {got}, expected {want}");
        }
    }
}

fn specialized(ctas: u32) -> LaunchConfig {
    LaunchConfig::default().num_warps(4).num_ctas(ctas).num_stages(3).warp_specialize(true)
}

#[test]
fn ctas_compute_their_rows() {
    for (form, persistent) in [(0, false), (1, false), (2, false), (0, true), (2, true), (3, true)] {
        check([160, 72, 96], [128, 64], form, persistent, &specialized(2));
    }
    check([264, 96, 64], [256, 96], 0, false, &specialized(4));
    check([40, 24, 32], [64, 32], 0, false, &LaunchConfig::default().num_warps(2).num_ctas(2));
    // 160 columns are 128 and 32, which one instruction computes, of rows of 64 that TMA fills in part.
    check([70, 160, 64], [128, 160], 0, false, &specialized(2));
    check([70, 208, 64], [64, 208], 0, false, &specialized(1));
}

fn recorded(
    def: &'static KernelDef,
    constants: &[(&'static str, tilewright_codegen::lang::kernel::ConstValue)],
) -> Func {
    def.record(&[], constants, &well_aligned(def)).unwrap_or_else(|e| panic!("{e}"))
}

fn options(num_ctas: u32) -> CompileOptions {
    let schedule = Schedule { warp_specialize: Some(true), ..Schedule::default() };
    CompileOptions { num_ctas, schedule, ..CompileOptions::default() }
}

#[test]
fn what_all_ctas_load_reaches_them_by_multicast() {
    let constants = consts!(m_tile = 128usize, n_tile = 64usize, form = 0usize);
    let func = recorded(Product::DEF, constants);
    let loads = |ctas: u32| {
        let (func, notes) = notes::gpu_ir(&func, GpuArch::Sm90a, &options(ctas));
        let loads = func.walk().into_iter().filter_map(|id| match func.op(id).op {
            Op::TmaLoad { ctas, .. } => Some((func.ty(func.op(id).operands[0]).shape().to_vec(), ctas)),
            _ => None,
        });
        (loads.collect::<Vec<_>>(), notes)
    };
    assert_eq!(loads(1), (vec![(vec![128, 32], None), (vec![32, 64], None)], vec![]));
    assert_eq!(loads(2), (vec![(vec![64, 32], None), (vec![32, 64], Some(2))], vec![]));
}

#[test]
fn ctas_share_kernels_without_dots() {
    let x: Vec<f32> = (0..64 * 32).map(|i| ((i * 37) % 101) as f32).collect();
    let device = Device::simulated(GpuArch::Sm90a);
    let x_buffer = Buffer::from_slice(&device, &x).unwrap();
    for columns in [false, true] {
        let mut y = Buffer::<f32>::poisoned(&device, x.len()).unwrap();
        let config = LaunchConfig::default().num_ctas(2);
        BelowMaximum { x: &x_buffer, y: &mut y, columns }.launch_with(&device, &config).unwrap();
        let want = |i: usize| {
            let line = (0..64 * 32).filter(|j| if columns { j % 32 == i % 32 } else { j / 32 == i / 32 });
            x[i] - line.map(|j| x[j]).fold(f32::NEG_INFINITY, f32::max)
        };
        assert_eq!(y.to_vec().unwrap(), (0..x.len()).map(want).collect::<Vec<_>>(), "columns: {columns}");
    }
}

#[test]
fn programs_that_ctas_cannot_share_are_refused() {
    let message = |device: &Device, form: usize, ctas: u32| {
        let buffers = [(); 2].map(|()| Buffer::<f32>::zeros(device, 64 * 64).unwrap());
        let [mut x, mut y] = buffers;
        let config = LaunchConfig::default().num_ctas(ctas);
        Refused { x: &mut x, y: &mut y, form }.launch_with(device, &config).unwrap_err().to_string()
    };
    let hopper = Device::simulated(GpuArch::Sm90a);
    for (form, why) in [
        (0, "cannot share the `atomic_rmw`: atomics that return a value"),
        (1, "a CTA might read or write what another one writes"),
        (2, "cannot share the `reduce`: it combines elements along this dimension"),
        (3, "cannot share the `scan`: it combines elements along this dimension"),
        (5, "a CTA might read or write what another one writes"),
        (6, "cannot share the `scan`"),
        (7, "cannot share the `scan`"),
        (4, "the kernel has no dot and stores no tile that CTAs could share"),
    ] {
        let found = message(&hopper, form, 2);
        assert!(
            found.contains(why) && found.contains("clusters.rs:") && found.contains("num_ctas = 1"),
            "{form}: {found}"
        );
    }
    assert!(message(&hopper, 3, 3).contains("num_ctas is 3: expected 1, 2, 4 or 8"));
    let device = Device::simulated(GpuArch::Sm80);
    let x = Buffer::<f32>::zeros(&device, 64 * 32).unwrap();
    let mut y = Buffer::<f32>::zeros(&device, 64 * 32).unwrap();
    let mut launch = BelowMaximum { x: &x, y: &mut y, columns: false };
    let error = launch.launch_with(&device, &LaunchConfig::default().num_ctas(2)).unwrap_err().to_string();
    assert!(error.contains("num_ctas is 2, and sm_80 has no thread block clusters"), "{error}");
}
