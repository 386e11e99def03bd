//! Gathers and scatters of rows through tensor descriptors.

use tilewright::codegen::lang::kernel::{KernelDef, Specialization};
use tilewright::prelude::*;
use tilewright_tests::numerics::integers;
use tilewright_tests::on_device::devices;

/// Rows of a tensor of 11, of which some occur twice and some are out of bounds.
const ROWS: [i32; 16] = [3, 0, 10, 3, 11, -1, 7, 9, 1, 2, 1000, 5, 6, i32::MIN, 8, 4];

#[kernel]
fn gathered(x: Tensor<f32, (rows, d)>, index: In<i32>, y: Out<f32>, column: i32, #[constexpr] width: usize) {
    let i = arange(0, 16);
    let tile = x.descriptor([1, width]).gather(load(index + i), column);
    store(y + (i.expand_dims(1) * width + arange(0, width).expand_dims(0)), tile);
}

#[test]
fn rows_are_gathered() {
    let (rows, d, width) = (11, 20, 8);
    let x: Vec<f32> = integers(rows * d, 1);
    for column in [0, 4, 15, -3, 40] {
        let element = |at: usize| {
            let (row, column) = (i64::from(ROWS[at / width]), i64::from(column) + (at % width) as i64);
            let inside = (0..rows as i64).contains(&row) && (0..d as i64).contains(&column);
            if inside { x[row as usize * d + column as usize] } else { 0.0 }
        };
        let want: Vec<f32> = (0..16 * width).map(element).collect();
        for device in devices() {
            let (x, index) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &ROWS).unwrap());
            let mut y = Buffer::<f32>::poisoned(&device, want.len()).unwrap();
            Gathered { x: &x.tensor([rows, d]).unwrap(), index: &index, y: &mut y, column, width }
                .launch(&device, 1)
                .unwrap_or_else(|error| panic!("{device}: {error}"));
            assert_eq!(y.to_vec().unwrap(), want, "{device}: from column {column}");
        }
    }
}

#[kernel]
fn scattered(x: In<f32>, index: In<i64>, y: TensorInOut<f32, (rows, d)>, column: i64, #[constexpr] width: usize) {
    let i = arange(0, 16);
    let tile = load(x + (i.expand_dims(1) * width + arange(0, width).expand_dims(0)));
    y.descriptor([1, width]).scatter(tile, load(index + i), column);
}

#[test]
fn rows_are_scattered() {
    let (rows, d, width) = (11, 20, 8);
    // Only one of the equal rows.
    let index: Vec<i64> = ROWS.iter().enumerate().map(|(at, &row)| if at == 3 { -7 } else { row.into() }).collect();
    let x: Vec<f32> = integers(16 * width, 2);
    for column in [0, 4, 15] {
        let mut want = vec![9.0; rows * d];
        for (at, &x) in x.iter().enumerate() {
            let (row, column) = (index[at / width], column + at % width);
            if (0..rows as i64).contains(&row) && column < d {
                want[row as usize * d + column] = x;
            }
        }
        for device in devices() {
            let (x, index) = (Buffer::from_slice(&device, &x).unwrap(), Buffer::from_slice(&device, &index).unwrap());
            let mut y = Buffer::from_slice(&device, &vec![9.0f32; rows * d]).unwrap();
            let tensor = &mut y.tensor_mut([rows, d]).unwrap();
            Scattered { x: &x, index: &index, y: tensor, column: column as i64, width }
                .launch(&device, 1)
                .unwrap_or_else(|error| panic!("{device}: {error}"));
            assert_eq!(y.to_vec().unwrap(), want, "{device}: from column {column}");
        }
    }
}

#[kernel]
fn gathered_dot(
    x: Tensor<f16, (rows, k)>,
    index: In<i32>,
    w: Tensor<f16, (k, n)>,
    y: TensorMut<f32, (m, n)>,
    #[constexpr] tile: usize,
) {
    let (x, w) = (x.descriptor([1, tile]), w.descriptor([tile, tile]));
    let at = load(index + arange(0, 16));
    let mut acc = zeros::<f32>([16, tile]);
    for l in range(0, k, tile, num_stages = 3) {
        acc = dot(x.gather(at, l), w.load([l, 0]), acc);
    }
    y.descriptor([16, tile]).store([0, 0], acc);
}

#[test]
fn gathered_rows_are_multiplied() {
    let (rows, k, n) = (11, 104, 24);
    let (x, w): (Vec<f32>, Vec<f32>) = (integers(rows * k, 3), integers(k * n, 4));
    let element = |at: usize| match usize::try_from(ROWS[at / n]) {
        Ok(row) if row < rows => (0..k).map(|l| x[row * k + l] * w[l * n + at % n]).sum(),
        _ => 0.0,
    };
    let want: Vec<f32> = (0..16 * n).map(element).collect();
    let half = |values: &[f32]| values.iter().map(|&v| f16::from_f32(v)).collect::<Vec<_>>();
    for device in devices() {
        let (x, w) = (Buffer::from_slice(&device, &half(&x)).unwrap(), Buffer::from_slice(&device, &half(&w)).unwrap());
        let index = Buffer::from_slice(&device, &ROWS).unwrap();
        let mut y = Buffer::<f32>::poisoned(&device, want.len()).unwrap();
        GatheredDot {
            x: &x.tensor([rows, k]).unwrap(),
            index: &index,
            w: &w.tensor([k, n]).unwrap(),
            y: &mut y.tensor_mut([16, n]).unwrap(),
            tile: 32,
        }
        .launch(&device, 1)
        .unwrap_or_else(|error| panic!("{device}: {error}"));
        assert_eq!(y.to_vec().unwrap(), want, "{device}");
    }
}

#[kernel]
fn blocks_of_two_rows(x: Tensor<f32, (rows, d)>, y: Out<f32>) {
    store(y, sum(x.descriptor([2, 8]).gather(arange(0, 4), 0)));
}

#[kernel]
fn through_an_advanced_block(x: Tensor<f32, (rows, d)>, y: Out<f32>) {
    store(y, sum(x.block([0, 0], [1, 8]).advance([1, 0]).gather(arange(0, 4), 0)));
}

#[kernel]
fn scatters_another_shape(y: TensorMut<f32, (rows, d)>) {
    y.descriptor([1, 8]).scatter(zeros::<f32>([8, 8]), arange(0, 4), 0);
}

#[test]
fn mistakes_are_explained() {
    let message = |def: &KernelDef| def.record(&[], &[], &Specialization::default()).unwrap_err().to_string();
    let cases = [
        (message(&BLOCKS_OF_TWO_ROWS), "`gather` through a descriptor of blocks [2, 8]"),
        (message(&THROUGH_AN_ADVANCED_BLOCK), "`gather` through a block pointer that was advanced"),
        (message(&SCATTERS_ANOTHER_SHAPE), "expected [4, 8]: a row for each index"),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message}");
    }
}
