//! Column sums: the second stage of every gradient that is reduced over rows.
//!
//! A kernel that loops over tiles of rows writes one row of partial sums per program. This kernel sums those rows in a
//! fixed order: the gradient has the same bits in every run, which atomic additions would not guarantee.

use crate::tensor::{FloatElement, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::prelude::*;

/// y[p, j] = Σᵢ x[i, j] over chunk p of the rows, accumulated in f32.
///
/// One program per tile of columns (axis 0) and chunk of `rows_per_program` rows (axis 1); it loops over its rows.
/// `rows_per_program` is a multiple of `rows_tile`.
#[kernel(grid = (cdiv(d, d_tile), chunks))]
#[alias(rows_each = rows_per_program)]
pub fn column_sum<T: Float, U: Float>(
    x: Tensor<T, (rows, d)>,
    y: TensorMut<U, (chunks, d)>,
    rows_per_program: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    assume((rows_per_program > 0) && (rows_per_program % rows_tile == 0));
    let column = program_id(0) * d_tile;
    let first = program_id(1) * rows_per_program;
    let mut block = x.block([first, column], [rows_tile, d_tile]);
    let y_block = y.block([program_id(1), column], [1, d_tile]);
    let mut total = zeros::<f32>([rows_tile, d_tile]);
    for _ in range(0, minimum(rows_per_program, rows - first), rows_tile) {
        total += load(block, boundary_check = [0, 1], padding = zero).to::<f32>();
        block = block.advance([rows_tile, 0]);
    }
    store(y_block, sum(total, axis = 0, keep_dims = true).to::<U>(), boundary_check = [0, 1]);
}

/// The tile sizes and the split of rows among programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Tiling {
    rows_tile: usize,
    d_tile: usize,
    num_warps: u32,
    /// Rows of a chunk.
    rows_per_program: usize,
}

impl Tiling {
    fn new(rows: usize, d: usize, gpu: bool) -> Tiling {
        /// Rows that one program sums faster than a second launch would take.
        const MAX_SINGLE_PASS_ROWS: usize = 2048;
        /// Programs that saturate the memory bandwidth of a large GPU.
        const TARGET_PROGRAMS: usize = 1024;
        match gpu {
            // Long contiguous runs, and a single chunk.
            false => {
                Tiling { rows_tile: 8, d_tile: 256, num_warps: 4, rows_per_program: rows.next_multiple_of(8).max(8) }
            }
            // Tiles of 128 contiguous bytes, so that even a narrow matrix gives many programs.
            true if rows <= MAX_SINGLE_PASS_ROWS => Tiling {
                rows_tile: 256,
                d_tile: 32,
                num_warps: 8,
                rows_per_program: rows.next_multiple_of(256).max(256),
            },
            true => {
                let chunks = (TARGET_PROGRAMS / d.div_ceil(32).max(1)).clamp(1, rows.div_ceil(256));
                Tiling {
                    rows_tile: 64,
                    d_tile: 32,
                    num_warps: 4,
                    rows_per_program: rows.div_ceil(chunks).next_multiple_of(64),
                }
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
    let tiling = Tiling::new(rows, d, device.is_cuda());
    let chunks = rows.div_ceil(tiling.rows_per_program).max(1);
    if chunks == 1 {
        let strides = [0, y.strides()[0]];
        return launch_column_sum(device, x, TensorMut::strided(y.into_view_mut(), [1, d], strides)?, tiling);
    }
    let mut sums = Buffer::<f32>::uninit(device, chunks * d)?;
    launch_column_sum(device, x, sums.tensor_mut([chunks, d])?, tiling)?;
    forward(device, sums.tensor([chunks, d])?, y)
}

fn launch_column_sum<T: FloatElement, U: FloatElement>(
    device: &Device,
    x: Tensor<'_, T, 2>,
    mut y: TensorMut<'_, U, 2>,
    tiling: Tiling,
) -> Result<()> {
    let Tiling { rows_tile, d_tile, num_warps, rows_per_program } = tiling;
    let rows_per_program = extent("column_sum", "x", rows_per_program)?;
    let grid = (x.shape()[1].div_ceil(d_tile), y.shape()[0]);
    ColumnSum { x: &x, y: &mut y, rows_per_program, rows_tile, d_tile }
        .launch_with(device, &LaunchConfig::new(grid).num_warps(num_warps))
}

/// The reference in f64: `x` is row-major with rows of `d` elements.
pub fn reference(x: &[f64], d: usize) -> Vec<f64> {
    (0..d).map(|j| x.iter().skip(j).step_by(d).sum()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_the_rows() {
        for (rows, d) in [(0, 5), (4096, 0), (1, 1), (2049, 7), (50_000, 1024), (50_000, 100_000), (1 << 24, 3)] {
            for gpu in [false, true] {
                let tiling = Tiling::new(rows, d, gpu);
                assert!(
                    tiling.rows_per_program.is_multiple_of(tiling.rows_tile) && tiling.rows_per_program > 0,
                    "{tiling:?}"
                );
                let chunks = rows.div_ceil(tiling.rows_per_program);
                assert!(chunks <= 1024 && (gpu || chunks <= 1), "{chunks} chunks of {rows} rows: {tiling:?}");
            }
        }
        assert_eq!(50_000usize.div_ceil(Tiling::new(50_000, 1024, true).rows_per_program), 32);
    }
}
