//! Argmax and top-k along rows: reductions with indices, and user-defined reductions.

use tilewright::bench::do_bench;
use tilewright::prelude::*;

/// The maximum of each row and its column; of equal elements the first. One program per `row_tile` rows.
#[kernel]
pub fn argmax_rows(
    x: In<f32>,
    value: Out<f32>,
    index: Out<i32>,
    rows: i32,
    cols: i32,
    #[constexpr] row_tile: usize,
    #[constexpr] col_tile: usize,
) {
    let row = program_id(0) * row_tile + arange(0, row_tile);
    let mut best = full([row_tile], f32::NEG_INFINITY);
    let mut place = zeros::<i32>([row_tile]);
    // Rows may be wider than a tile: the running maximum is combined with that of each tile.
    for first in range(0, cols, col_tile) {
        let col = first + arange(0, col_tile).expand_dims(0);
        let at = row.expand_dims(1).to::<i64>() * cols + col;
        let mask = row.expand_dims(1) < rows && col < cols;
        let (largest, at_column) = max_with_indices(load(x + at, mask = mask, other = f32::NEG_INFINITY), axis = 1);
        // `>`, not `>=`: of equal elements the first stays.
        place = where_(largest > best, first + at_column, place);
        best = maximum(best, largest);
    }
    store(value + row, best, mask = row < rows);
    store(index + row, place, mask = row < rows);
}

/// The k largest elements of each row in descending order, with their columns. One program per row; `tile` ≥ cols.
///
/// Each reduction finds one element, which is then masked; the row stays in registers. This is fast for small k.
#[kernel]
pub fn top_k(x: In<f32>, values: Out<f32>, indices: Out<i32>, cols: i32, k: i32, #[constexpr] tile: usize) {
    // A launch with wider rows, or for more elements than a row has, is refused.
    assume(cols <= tile && k <= cols);
    let row = program_id(0).to::<i64>();
    let col = arange(0, tile);
    let mut left = load(x + row * cols + col, mask = col < cols, other = f32::NEG_INFINITY);
    for i in range(0, k) {
        // Any associative and commutative function can be reduced with, over several tiles together: here the larger
        // value wins, and of equal values the smaller column. (This is `max_with_indices`, written out.)
        let (v, c) = reduce((left, col), |(v, c), (w, d)| {
            let first = v > w || (v == w && c < d);
            (if first { v } else { w }, if first { c } else { d })
        });
        store(values + row * k + i, v);
        store(indices + row * k + i, c);
        left = where_(col == c, f32::NEG_INFINITY, left);
    }
}

/// Runs both kernels and compares them with a sort.
pub fn run(device: &Device) -> Result<(), Box<dyn std::error::Error>> {
    let (rows, cols, k) = (203, 1000, 5);
    // Rounded, so that equal elements are frequent.
    let x: Vec<f32> = (0..rows * cols).map(|i| ((i as f32 * 0.7).sin() * 100.0).round()).collect();
    let (mut want_values, mut want_indices) = (Vec::new(), Vec::new());
    for row in x.chunks(cols) {
        let mut order: Vec<usize> = (0..cols).collect();
        // A stable sort: equal elements stay in the order of their columns.
        order.sort_by(|a, b| row[*b].total_cmp(&row[*a]));
        want_values.extend(order[..k].iter().map(|c| row[*c]));
        want_indices.extend(order[..k].iter().map(|c| *c as i32));
    }
    let x = Buffer::from_slice(device, &x)?;

    let (mut value, mut index) = (Buffer::<f32>::poisoned(device, rows)?, Buffer::<i32>::poisoned(device, rows)?);
    let (height, width, row_tile, col_tile) = (rows as i32, cols as i32, 4, 256);
    #[rustfmt::skip]
    let mut kernel = ArgmaxRows {
        x: &x, value: &mut value, index: &mut index, rows: height, cols: width, row_tile, col_tile,
    };
    kernel.launch(device, rows.div_ceil(row_tile))?;
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, rows.div_ceil(row_tile)))?;
    let firsts: Vec<f32> = want_values.iter().step_by(k).copied().collect();
    check("argmax's value", &value.to_vec()?, &firsts)?;
    check("argmax's index", &index.to_vec()?, &want_indices.iter().step_by(k).copied().collect::<Vec<i32>>())?;
    println!("argmax            {rows} × {cols:<22} exact         {:9.3} ms {:17} {device}", time.median, "");

    let mut values = Buffer::<f32>::poisoned(device, rows * k)?;
    let mut indices = Buffer::<i32>::poisoned(device, rows * k)?;
    let (cols, k, tile) = (cols as i32, k as i32, cols.next_power_of_two());
    let mut kernel = TopK { x: &x, values: &mut values, indices: &mut indices, cols, k, tile };
    kernel.launch(device, rows)?;
    let time = do_bench(device, 10.0, 50.0, || kernel.launch(device, rows))?;
    check("top-k's values", &values.to_vec()?, &want_values)?;
    check("top-k's indices", &indices.to_vec()?, &want_indices)?;
    println!("top_{k}             {rows} × {cols:<22} exact         {:9.3} ms {:17} {device}", time.median, "");
    Ok(())
}

/// Fails unless all elements are equal.
fn check<T: PartialEq + std::fmt::Display>(what: &str, got: &[T], want: &[T]) -> Result<(), String> {
    match got.iter().zip(want).position(|(got, want)| got != want) {
        Some(i) => Err(format!("{what}: element {i} is {}, expected {}", got[i], want[i])),
        None => Ok(()),
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    run(&Device::best()?)
}
