//! Tensor parameters: their extents and strides at a launch, block pointers made of them, grids and heuristics of kernels.

use tilewright::prelude::*;
use tilewright_tests::on_device::devices;

/// y[b, h, i] = Σⱼ x[b, h, i, j] · w[j]: a program per tile of i, h and b.
#[autotune(
    configs = [Config(tile = [8, 16])],
    key = [d, i, many = batch * heads > 4],
)]
#[kernel(grid = (cdiv(i, tile), heads, batch))]
fn weighted_rows<T: Float>(
    x: Tensor<T, (batch, heads, i, d)>,
    w: Tensor<T, (d,)>,
    y: TensorMut<f32, (batch, heads, i)>,
    #[constexpr] tile: usize,
    #[constexpr] d: usize,
    #[constexpr = false]
    #[heuristic(i.is_multiple_of(tile))]
    even: bool,
) {
    let (first, head, entry) = (program_id(0) * tile, program_id(1), program_id(2));
    let d_tile = d.next_power_of_two();
    let block = x.index([entry, head]).block([first, 0], [tile, d_tile]);
    let xt = if even {
        load(block, boundary_check = [1], padding = zero)
    } else {
        load(block, boundary_check = [0, 1], padding = zero)
    };
    let wt = load(w.block([0], [d_tile]), boundary_check = [0], padding = zero);
    let total = sum(xt.to::<f32>() * wt.to::<f32>().expand_dims(0), axis = 1);
    store(y.index([entry, head]).block([first], [tile]), total, boundary_check = [0]);
}

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 + 11) % 23) as f32 - 11.0).collect()
}

/// The result for x with these strides, computed in f64.
fn reference(x: &[f32], w: &[f32], shape: [usize; 4], strides: [usize; 4]) -> Vec<f32> {
    let [batch, heads, rows, d] = shape;
    let mut y = Vec::new();
    for b in 0..batch {
        for h in 0..heads {
            for i in 0..rows {
                let at = |j: usize| x[b * strides[0] + h * strides[1] + i * strides[2] + j * strides[3]];
                y.push((0..d).map(|j| f64::from(at(j)) * f64::from(w[j])).sum::<f64>() as f32);
            }
        }
    }
    y
}

#[test]
fn extents_strides_and_grid_come_with_the_tensors() {
    for device in devices() {
        for shape @ [batch, heads, rows, d] in [[2, 3, 16, 8], [1, 2, 13, 5], [3, 1, 1, 1]] {
            let data = values(batch * heads * rows * d);
            // Stored as [heads, rows, batch, d].
            let strides = [d, rows * batch * d, batch * d, 1];
            let x = Buffer::from_slice(&device, &data).unwrap();
            let x_tensor = Tensor::strided(x.view(), shape, strides.map(|s| s as i64)).unwrap();
            let w = Buffer::from_slice(&device, &values(d)).unwrap();
            let mut y = Buffer::<f32>::poisoned(&device, batch * heads * rows).unwrap();
            let want = reference(&data, &values(d), shape, strides);
            let mut y_tensor = y.tensor_mut([batch, heads, rows]).unwrap();
            WeightedRows { x: &x_tensor, w: &w, y: &mut y_tensor, tile: 8 }.launch(&device).unwrap();
            assert_eq!(y.to_vec().unwrap(), want, "{device}, {shape:?}");

            let mut y = Buffer::<f32>::poisoned(&device, batch * heads * rows).unwrap();
            let mut y_tensor = y.tensor_mut([batch, heads, rows]).unwrap();
            WeightedRows { x: &x_tensor, w: &w, y: &mut y_tensor, tile: tuned() }.launch_tuned(&device).unwrap();
            assert_eq!(y.to_vec().unwrap(), want, "{device}, {shape:?}, tuned");
        }
    }
}

#[test]
fn extents_must_agree() {
    let device = Device::cpu();
    let x = Buffer::<f32>::zeros(&device, 2 * 3 * 4 * 5).unwrap();
    let (w, mut y) = (Buffer::<f32>::zeros(&device, 6).unwrap(), Buffer::<f32>::zeros(&device, 24).unwrap());
    let x = x.tensor([2, 3, 4, 5]).unwrap();
    let mut y = y.tensor_mut([2, 3, 4]).unwrap();
    let error = WeightedRows { x: &x, w: &w, y: &mut y, tile: 8 }.launch(&device).unwrap_err().to_string();
    for part in ["`weighted_rows`", "tensor_parameters.rs", "`w`", "d = 5, as in `x`", "d = 6", "[6]"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(x.shape() == [2, 3, 4, 5] && y.shape() == [2, 3, 4], "tensors can be used after a launch");
}

/// A tile of 0 is reported when the kernel is compiled, not by a division in the grid.
#[test]
fn a_tile_of_zero_is_a_mistake_with_a_message() {
    let device = Device::cpu();
    let (x, w) = (Buffer::<f32>::zeros(&device, 5).unwrap(), Buffer::<f32>::zeros(&device, 5).unwrap());
    let mut y = Buffer::<f32>::zeros(&device, 1).unwrap();
    let mut y = y.tensor_mut([1, 1, 1]).unwrap();
    let x = x.tensor([1, 1, 1, 5]).unwrap();
    let error = WeightedRows { x: &x, w: &w, y: &mut y, tile: 0 }.launch(&device).unwrap_err().to_string();
    assert!(error.contains("dimension 0 is 0"), "{error}");
}

/// The transpose of x, through a permuted tensor and a descriptor.
#[kernel(grid = (cdiv(rows, tile), cdiv(columns, tile)))]
fn transpose<T: Dtype>(x: Tensor<T, (rows, columns)>, y: TensorMut<T, (columns, rows)>, #[constexpr] tile: usize) {
    let (row, column) = (program_id(0) * tile, program_id(1) * tile);
    let xt = x.permute([1, 0]).descriptor([tile, tile]).load([column, row]);
    y.descriptor([tile, tile]).store([column, row], xt);
}

#[test]
fn permuted_tensors_and_descriptors() {
    for device in devices() {
        let (rows, columns) = (5, 19);
        let data = values(rows * columns);
        let x = Buffer::from_slice(&device, &data).unwrap();
        let mut y = Buffer::<f32>::poisoned(&device, rows * columns).unwrap();
        let (x, mut y_tensor) = (x.tensor([rows, columns]).unwrap(), y.tensor_mut([columns, rows]).unwrap());
        Transpose { x: &x, y: &mut y_tensor, tile: 16 }.launch(&device).unwrap();
        let want: Vec<f32> = (0..rows * columns).map(|at| data[at % rows * columns + at / rows]).collect();
        assert_eq!(y.to_vec().unwrap(), want, "{device}");
    }
}

/// Extents, ranks and positions inside the body.
#[kernel(grid = 1)]
fn extents(x: Tensor<f32, (n, m, n)>, y: TensorMut<i64, (count,)>) {
    let inner = x.index([0]);
    store(y.ptr() + 0, n.to::<i64>());
    store(y.ptr() + 1, x.dim(-2).to::<i64>());
    store(y.ptr() + 2, x.stride(0));
    store(y.ptr() + 3, inner.dim(0).to::<i64>() * 100 + inner.rank());
    store(y.ptr() + 4, inner.stride(-1));
}

#[test]
fn a_name_may_be_used_twice_in_a_tensor() {
    let device = Device::cpu();
    let x = Buffer::<f32>::zeros(&device, 3 * 4 * 3).unwrap();
    let mut y = Buffer::<i64>::zeros(&device, 5).unwrap();
    Extents { x: &x.tensor([3, 4, 3]).unwrap(), y: &mut y }.launch(&device).unwrap();
    assert_eq!(y.to_vec().unwrap(), [3, 4, 12, 402, 1]);
    let error = Extents { x: &x.tensor([3, 4, 2]).unwrap(), y: &mut y }.launch(&device).unwrap_err().to_string();
    assert!(error.contains("n = 3, as in `x`") && error.contains("n = 2 in the shape [3, 4, 2]"), "{error}");
    let names: Vec<&str> = EXTENTS.params.iter().map(|p| p.name).collect();
    assert_eq!(names, ["x", "y", "x_stride_n", "x_stride_m", "x_stride_n_2", "y_stride_count", "n", "m", "count"]);
}

/// A block that starts at any column, for TMA, whose rows start at multiples of 16 bytes.
#[kernel]
fn columns_from(x: Tensor<f32, (rows, columns)>, y: Out<f32>, first: i32) {
    let mut block = make_block_ptr(
        x.ptr(),
        shape = [rows, columns],
        strides = [x.stride(0), x.stride(1)],
        offsets = [0, first],
        block_shape = [32, 16],
        order = [1, 0],
    );
    let mut sums = zeros::<f32>([32, 16]);
    for _ in range(0, 2, num_stages = 2) {
        sums += load(block, boundary_check = [0, 1], padding = zero);
        block = block.advance([0, 16]);
    }
    store(y + arange(0, 32).expand_dims(1) * 16 + arange(0, 16).expand_dims(0), sums);
}

#[test]
fn blocks_start_at_any_column() {
    let (rows, columns) = (32, 64);
    let x: Vec<f32> = (0..rows * columns).map(|n| (n * 7 % 61) as f32).collect();
    for device in devices() {
        let at = Buffer::from_slice(&device, &x).unwrap();
        for first in [0i32, 1, 2, 3, 4, 6, 16, 33] {
            let column = |c: usize| first as usize + c;
            let cell = |r: usize, c: usize| if column(c) < columns { x[r * columns + column(c)] } else { 0.0 };
            let want: Vec<f32> = (0..rows * 16).map(|n| cell(n / 16, n % 16) + cell(n / 16, n % 16 + 16)).collect();
            let tensor = Tensor::strided(at.view(), [rows, columns], [columns as i64, 1]).unwrap();
            let mut y = Buffer::<f32>::poisoned(&device, rows * 16).unwrap();
            let config = LaunchConfig::new(1).tma(true);
            // sm_80 has no TMA.
            let config = if device.to_string().contains("sm_80") { LaunchConfig::new(1) } else { config };
            ColumnsFrom { x: &tensor, y: &mut y, first }.launch_with(&device, &config).unwrap();
            assert_eq!(y.to_vec().unwrap(), want, "{device}, from column {first}");
        }
    }
}

/// The first columns of a product of 64 rows and columns, in rows of `y` that may be longer.
#[kernel]
fn first_columns(a: Tensor<f16, (rows, inner)>, b: Tensor<f16, (inner, wide)>, y: TensorMut<f32, (rows, columns)>) {
    let product =
        dot(load(a.block([0, 0], [64, 16]), boundary_check = [0], padding = zero), load(b.block([0, 0], [16, 64])));
    store(y.block([0, 0], [64, 64]), product, boundary_check = [0, 1]);
}

/// TMA writes whole chunks of 16 bytes: it would also write what lies after rows of other sizes.
#[test]
fn stores_end_at_any_column() {
    let (rows, pitch) = (50, 64);
    let [a, b]: [Vec<f32>; 2] = [7, 5].map(|by| (0..64 * 16).map(|n| (n * by % 13) as f32 - 6.0).collect());
    let product = |r: usize, c: usize| (0..16).map(|k| a[r * 16 + k] * b[k * 64 + c]).sum::<f32>();
    let f16s = |x: &[f32]| -> Vec<f16> { x.iter().map(|&x| f16::from_f32(x)).collect() };
    for device in devices() {
        let [a, b] = [&a[..rows * 16], &b].map(|x| Buffer::from_slice(&device, &f16s(x)).unwrap());
        for columns in [1, 7, 8, 38, 47, 48, 63] {
            let mut y = Buffer::from_slice(&device, &vec![-1.0f32; rows * pitch]).unwrap();
            let mut tensor = TensorMut::strided(y.view_mut(), [rows, columns], [pitch as i64, 1]).unwrap();
            let (a, b) = (a.tensor([rows, 16]).unwrap(), b.tensor([16, 64]).unwrap());
            FirstColumns { a: &a, b: &b, y: &mut tensor }
                .launch_with(&device, &LaunchConfig::new(1).tma_stores(true))
                .unwrap();
            let cell = |r: usize, c: usize| if c < columns { product(r, c) } else { -1.0 };
            let want: Vec<f32> = (0..rows * pitch).map(|n| cell(n / pitch, n % pitch)).collect();
            assert_eq!(y.to_vec().unwrap(), want, "{device}, {columns} columns");
        }
    }
}
