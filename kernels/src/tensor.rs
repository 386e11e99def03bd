//! What the host sides of the kernels share: element types, checks of shapes, and tiles of rows.

use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::kernel::MAX_EXTENT;
pub use tilewright_runtime::kernel::{Tensor, TensorMut};
use tilewright_runtime::prelude::*;

/// Element types of the kernels of this crate, which multiply and accumulate in f32.
pub trait FloatElement: Float + OperandElement<Result = Self> {}

/// Element types of the operands of dots, with the type of results.
pub trait OperandElement: Element + Dtype {
    type Result: FloatElement;
}

macro_rules! float_elements {
    ($($element:ty),*) => { $(
        impl FloatElement for $element {}
        impl OperandElement for $element {
            type Result = $element;
        }
    )* };
}
float_elements!(f16, bf16, f32);

/// 8-bit floats, whose results are bf16.
macro_rules! operands_of_8_bits {
    ($($element:ty),*) => { $(
        impl OperandElement for $element {
            type Result = bf16;
        }
    )* };
}
operands_of_8_bits!(F8E4M3, F8E5M2);

/// Element types of indices: tokens, targets, positions.
pub trait IndexElement: Int + Element {}
impl IndexElement for i32 {}
impl IndexElement for i64 {}
impl IndexElement for u32 {}

/// Fails unless `found` is the shape that the other arguments imply.
pub(crate) fn expect_shape<const R: usize>(
    kernel: &str,
    name: &'static str,
    found: [usize; R],
    expected: [usize; R],
) -> Result<()> {
    if found == expected {
        return Ok(());
    }
    Err(Error::Argument {
        kernel: kernel.into(),
        name,
        expected: format!("the shape {expected:?}"),
        found: format!("{found:?}"),
    })
}

/// Converts an extent to a kernel argument.
pub(crate) fn extent(kernel: &str, name: &'static str, n: usize) -> Result<i32> {
    if n <= MAX_EXTENT {
        return Ok(n as i32);
    }
    Err(Error::Argument {
        kernel: kernel.into(),
        name,
        expected: format!("at most {MAX_EXTENT} elements along a dimension"),
        found: n.to_string(),
    })
}

/// Tiles of row-wise kernels: few enough elements for the registers of a program, and enough programs to fill a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RowTiles {
    pub rows_tile: usize,
    pub d_tile: usize,
    pub num_warps: u32,
}

impl RowTiles {
    /// Chooses tiles for rows of `d` elements, with at most `max_d` columns.
    pub fn new(rows: usize, d: usize, max_d: usize) -> RowTiles {
        /// Elements of a tile of several rows.
        const ELEMENTS: usize = 8192;
        /// Programs that fill a large GPU several times.
        const PROGRAMS: usize = 512;
        let d_tile = d.max(1).next_power_of_two().max(16).min(max_d.max(1));
        let rows_tile = floor_power_of_two(ELEMENTS / d_tile).min((rows / PROGRAMS).max(1).next_power_of_two());
        // 32 elements per thread leave registers for the results.
        let num_warps = warps(rows_tile * d_tile / 1024);
        RowTiles { rows_tile, d_tile, num_warps }
    }

    /// The number of programs that cover all rows.
    pub fn programs(&self, rows: usize) -> usize {
        rows.div_ceil(self.rows_tile)
    }

    pub fn config(&self, rows: usize) -> LaunchConfig {
        LaunchConfig::new(self.programs(rows)).num_warps(self.num_warps)
    }
}

/// The largest power of two up to `n`, at least 1: tiles may have other widths.
pub(crate) fn floor_power_of_two(n: usize) -> usize {
    1 << n.max(1).ilog2()
}

/// About `n` warps, from 4 to 16.
pub(crate) fn warps(n: usize) -> u32 {
    floor_power_of_two(n.clamp(4, 16)) as u32
}

/// The configuration of [`RowTiles`], where no tuning entry applies. The key has `d_tile`, the width of a whole row,
/// and `rows`.
pub(crate) fn default_row_tiles(problem: &Problem) -> Config {
    let size = |name: &str| problem.int(name).map_or(1, |n| n.max(1) as usize);
    let tiles = RowTiles::new(size("rows"), size("d_tile"), size("d_tile"));
    Config::default().set("rows_tile", tiles.rows_tile).num_warps(tiles.num_warps)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tiles that are no powers of two have defaults that a launch takes.
    #[test]
    fn defaults_of_any_width() {
        for d_tile in [1, 96, 1000, 1536, 5120, 65535] {
            for rows in [1, 1000, 1 << 20] {
                let tiles = RowTiles::new(rows, d_tile, d_tile);
                assert!(tiles.num_warps.is_power_of_two() && (4..=16).contains(&tiles.num_warps), "{tiles:?}");
                assert!(tiles.rows_tile.is_power_of_two(), "{tiles:?}");
            }
        }
    }

    #[test]
    fn tiles_fit_their_rows() {
        let wide = RowTiles::new(16384, 1024, 1024);
        assert_eq!((wide.rows_tile, wide.d_tile, wide.num_warps), (8, 1024, 8));
        let narrow = RowTiles::new(3, 4, 8);
        assert_eq!((narrow.rows_tile, narrow.d_tile, narrow.num_warps), (1, 8, 4));
        let few = RowTiles::new(3, 100_000, 1024);
        assert_eq!((few.rows_tile, few.d_tile), (1, 1024));
        let narrow = RowTiles::new(1 << 20, 1, 1024);
        assert_eq!((narrow.rows_tile, narrow.d_tile), (512, 16));
        assert_eq!(RowTiles::new(0, 0, 1024).programs(0), 0);
    }
}
