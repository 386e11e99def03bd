//! Column sums: the second stage of every gradient that is reduced over rows.
//!
//! A kernel that loops over tiles of rows writes one row of partial sums per program. This kernel sums those rows in a
//! fixed order: the gradient has the same bits in every run, which atomic additions would not guarantee.

use crate::blocks::row_block;
use crate::tensor::{FloatElement, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::prelude::*;

/// y[p, j] = Σᵢ x[i, j] over chunk p of the rows, accumulated in f32.
///
/// One program per tile of columns (axis 0) and chunk of `rows_each` rows (axis 1); it loops over its rows. `rows_each`
/// is a multiple of `rows_tile`.
#[kernel]
pub fn column_sum<T: Float, U: Float>(
    x: In<T>,
    y: Out<U>,
    x_stride_row: i64,
    x_stride_d: i64,
    y_stride_part: i64,
    y_stride_d: i64,
    rows: i32,
    d: i32,
    rows_each: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    assume((rows_each > 0) && (rows_each % rows_tile == 0));
    let column = program_id(0) * d_tile;
    let first = program_id(1) * rows_each;
    let mut block =
        row_block(x, (rows, d), (x_stride_row, x_stride_d), first, (rows_tile, d_tile)).advance([0, column]);
    let y_block = row_block(y, (num_programs(1), d), (y_stride_part, y_stride_d), program_id(1), (1, d_tile));
    let mut total = zeros::<f32>([rows_tile, d_tile]);
    for _ in range(0, minimum(rows_each, rows - first), rows_tile) {
        total += load(block, boundary_check = [0, 1], padding = zero).to::<f32>();
        block = block.advance([rows_tile, 0]);
    }
    store(y_block.advance([0, column]), sum(total, axis = 0, keep_dims = true).to::<U>(), boundary_check = [0, 1]);
}

/// The tile sizes and the split of rows among programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Cut {
    rows_tile: usize,
    d_tile: usize,
    num_warps: u32,
    /// Rows of a chunk.
    part: usize,
}

impl Cut {
    fn new(rows: usize, d: usize, gpu: bool) -> Cut {
        /// Rows that one program sums faster than a second launch would take.
        const FEW_ROWS: usize = 2048;
        /// Programs that saturate the memory bandwidth of a large GPU.
        const PROGRAMS: usize = 1024;
        match gpu {
            // Long contiguous runs, and a single chunk.
            false => Cut { rows_tile: 8, d_tile: 256, num_warps: 4, part: rows.next_multiple_of(8).max(8) },
            // Tiles of 128 contiguous bytes, so that even a narrow matrix gives many programs.
            true if rows <= FEW_ROWS => {
                Cut { rows_tile: 256, d_tile: 32, num_warps: 8, part: rows.next_multiple_of(256).max(256) }
            }
            true => {
                let parts = (PROGRAMS / d.div_ceil(32)).clamp(1, rows.div_ceil(256));
                Cut { rows_tile: 64, d_tile: 32, num_warps: 4, part: rows.div_ceil(parts).next_multiple_of(64) }
            }
        }
    }
}

/// Sums x [rows, d] over its rows into y [d], in two launches where there are many rows of few columns.
///
/// # Errors
/// Shapes that do not match; tensors on another device; launch errors; out of memory for the sums of chunks, f32
/// [chunks, d].
pub fn forward<T: FloatElement, U: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    y: TensorMut<'_, U, 1>,
) -> Result<()> {
    let [rows, d] = x.shape();
    expect_shape("column_sum", "y", y.shape(), [d])?;
    let cut = Cut::new(rows, d, device.is_cuda());
    let parts = rows.div_ceil(cut.part).max(1);
    if parts == 1 {
        let strides = [0, y.strides()[0]];
        return sum_parts(device, x, y.data, strides, 1, cut);
    }
    let mut sums = Buffer::<f32>::uninit(device, parts * d)?;
    sum_parts(device, x, sums.view_mut(), [d as i64, 1], parts, cut)?;
    forward(device, Tensor::dense(sums.view(), [parts, d])?, y)
}

fn sum_parts<T: FloatElement, U: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    mut y: ViewMut<'_, U>,
    y_strides: [i64; 2],
    parts: usize,
    cut: Cut,
) -> Result<()> {
    let [rows, d] = x.shape();
    ColumnSum {
        x_stride_row: x.strides()[0],
        x_stride_d: x.strides()[1],
        y_stride_part: y_strides[0],
        y_stride_d: y_strides[1],
        rows: extent("column_sum", "x", rows)?,
        d: extent("column_sum", "x", d)?,
        rows_each: extent("column_sum", "x", cut.part)?,
        x: &x.data,
        y: &mut y,
        rows_tile: cut.rows_tile,
        d_tile: cut.d_tile,
    }
    .launch_with(device, &LaunchConfig::new((d.div_ceil(cut.d_tile), parts)).num_warps(cut.num_warps))
}

/// The reference in f64: `x` is row-major with rows of `d` elements.
pub fn reference(x: &[f64], d: usize) -> Vec<f64> {
    (0..d).map(|j| x.iter().skip(j).step_by(d).sum()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_the_rows() {
        for (rows, d) in [(0, 5), (1, 1), (2049, 7), (50_000, 1024), (50_000, 100_000), (1 << 24, 3)] {
            for gpu in [false, true] {
                let cut = Cut::new(rows, d, gpu);
                assert!(cut.part.is_multiple_of(cut.rows_tile) && cut.part > 0, "{cut:?}");
                let parts = rows.div_ceil(cut.part);
                assert!(parts <= 1024 && (gpu || parts <= 1), "{parts} parts of {rows} rows: {cut:?}");
            }
        }
        assert_eq!(50_000usize.div_ceil(Cut::new(50_000, 1024, true).part), 32);
    }
}
