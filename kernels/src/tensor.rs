//! Tensor arguments of the kernels: borrowed device memory with a shape and strides, and the checks of both.

use tilewright_runtime::Strided;
use tilewright_runtime::autotune::{Config, Problem};
use tilewright_runtime::prelude::*;

/// Element types of the kernels of this crate, which multiply and accumulate in f32.
pub trait FloatElement: Float + Element {}
impl FloatElement for f16 {}
impl FloatElement for bf16 {}
impl FloatElement for f32 {}

/// Element types of indices: tokens, targets, positions.
pub trait IndexElement: Int + Element {}
impl IndexElement for i32 {}
impl IndexElement for i64 {}
impl IndexElement for u32 {}

/// A read-only tensor of rank `R`.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a, T: Element, const R: usize> {
    pub(crate) data: View<'a, T>,
    pub(crate) shape: [usize; R],
    pub(crate) strides: [i64; R],
}

/// A writable tensor of rank `R`.
#[derive(Debug)]
pub struct TensorMut<'a, T: Element, const R: usize> {
    pub(crate) data: ViewMut<'a, T>,
    pub(crate) shape: [usize; R],
    pub(crate) strides: [i64; R],
}

impl<'a, T: Element, const R: usize> Tensor<'a, T, R> {
    /// A dense row-major tensor: the last dimension is contiguous.
    ///
    /// # Errors
    /// The data has fewer elements than the shape.
    pub fn dense(data: View<'a, T>, shape: [usize; R]) -> Result<Self> {
        Self::strided(data, shape, dense_strides(shape))
    }

    /// A strided tensor: element i₀, i₁, … is element Σ iₙ · stridesₙ of `data`. Strides may be zero: those elements
    /// repeat.
    ///
    /// # Errors
    /// An element lies outside of the data.
    pub fn strided(data: View<'a, T>, shape: [usize; R], strides: [i64; R]) -> Result<Self> {
        check_fits(shape, strides, data.len())?;
        Ok(Tensor { data, shape, strides })
    }

    /// The same elements with dimensions `a` and `b` swapped.
    pub fn transposed(mut self, a: usize, b: usize) -> Self {
        self.shape.swap(a, b);
        self.strides.swap(a, b);
        self
    }

    /// The memory of the tensor, from its first element on.
    pub fn view(&self) -> View<'a, T> {
        self.data
    }

    /// The extent of each dimension.
    pub fn shape(&self) -> [usize; R] {
        self.shape
    }

    /// The stride of each dimension, in elements.
    pub fn strides(&self) -> [i64; R] {
        self.strides
    }
}

impl<'a, T: Element, const R: usize> TensorMut<'a, T, R> {
    /// As [`Tensor::dense`].
    ///
    /// # Errors
    /// As [`Tensor::dense`].
    pub fn dense(data: ViewMut<'a, T>, shape: [usize; R]) -> Result<Self> {
        Self::strided(data, shape, dense_strides(shape))
    }

    /// As [`Tensor::strided`].
    ///
    /// # Errors
    /// As [`Tensor::strided`]; also strides with which elements overlap.
    pub fn strided(data: ViewMut<'a, T>, shape: [usize; R], strides: [i64; R]) -> Result<Self> {
        check_fits(shape, strides, data.len())?;
        check_no_overlap(shape, strides)?;
        Ok(TensorMut { data, shape, strides })
    }

    /// The same elements with dimensions `a` and `b` swapped.
    pub fn transposed(mut self, a: usize, b: usize) -> Self {
        self.shape.swap(a, b);
        self.strides.swap(a, b);
        self
    }

    /// The extent of each dimension.
    pub fn shape(&self) -> [usize; R] {
        self.shape
    }

    /// The stride of each dimension, in elements.
    pub fn strides(&self) -> [i64; R] {
        self.strides
    }
}

fn dense_strides<const R: usize>(shape: [usize; R]) -> [i64; R] {
    let mut strides = [1_i64; R];
    for axis in (1..R).rev() {
        strides[axis - 1] = strides[axis].saturating_mul(shape[axis].max(1) as i64);
    }
    strides
}

/// Fails unless every element lies within the `len` elements of the data.
fn check_fits<const R: usize>(shape: [usize; R], strides: [i64; R], len: usize) -> Result<()> {
    if shape.contains(&0) {
        return Ok(());
    }
    let mut last = 0_i128;
    for (n, stride) in shape.into_iter().zip(strides) {
        last += (n as i128 - 1) * stride.max(0) as i128;
    }
    if last < len as i128 && strides.iter().all(|&s| s >= 0) {
        return Ok(());
    }
    let shape = shape.iter().map(|&n| i64::try_from(n).unwrap_or(i64::MAX)).collect();
    Strided { shape, strides: strides.to_vec() }.check_fits(len)
}

/// Fails if two elements of an output may share an address: in order of their strides, the stride of each dimension
/// must exceed the span of all smaller ones.
fn check_no_overlap<const R: usize>(shape: [usize; R], strides: [i64; R]) -> Result<()> {
    if shape.contains(&0) {
        return Ok(());
    }
    let mut order: [usize; R] = std::array::from_fn(|axis| axis);
    order.sort_by_key(|&axis| strides[axis]);
    let mut span = 0_i128;
    for axis in order {
        if shape[axis] > 1 && i128::from(strides[axis]) <= span {
            return Err(Error::Argument {
                kernel: "tensor".into(),
                name: "strides",
                expected: "strides with which no two elements of an output overlap".into(),
                found: format!("{strides:?} for the shape {shape:?}"),
            });
        }
        span += (shape[axis] as i128 - 1) * i128::from(strides[axis]);
    }
    Ok(())
}

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

/// Largest extent of a dimension: offsets of the last tile, which may extend past it, are i32.
const MAX_EXTENT: usize = i32::MAX as usize - (1 << 20);

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
        let d_tile = d.max(1).next_power_of_two().clamp(16, max_d);
        let rows_tile = (ELEMENTS / d_tile).min((rows / PROGRAMS).max(1).next_power_of_two()).max(1);
        // 32 elements per thread leave registers for the results.
        let num_warps = ((rows_tile * d_tile / 1024) as u32).clamp(4, 16);
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

    #[test]
    fn outputs_must_not_self_overlap() {
        let mut data = Buffer::<f32>::zeros(&Device::cpu(), 100).unwrap();
        let mut strided = |shape, strides| TensorMut::strided(data.view_mut(), shape, strides).map(|_| ());
        strided([3, 4], [4, 1]).unwrap();
        strided([3, 4], [1, 3]).unwrap();
        strided([3, 4], [20, 5]).unwrap();
        strided([1, 4], [0, 1]).unwrap();
        strided([0, 4], [0, 0]).unwrap();
        let message = strided([3, 4], [3, 1]).unwrap_err().to_string();
        assert!(message.contains("[3, 1]") && message.contains("[3, 4]"), "{message}");
        assert!(strided([3, 4], [0, 1]).is_err());
        assert!(strided([3, 40], [40, 1]).unwrap_err().to_string().contains("0..=119"));
    }

    #[test]
    fn inputs_may_repeat_elements_within_their_buffer() {
        let data = Buffer::<f32>::zeros(&Device::cpu(), 10).unwrap();
        Tensor::strided(data.view(), [1000, 10], [0, 1]).unwrap();
        assert!(Tensor::strided(data.view(), [2, 2], [-1, 1]).is_err());
        assert!(Tensor::dense(data.view(), [usize::MAX]).is_err());
        assert_eq!(Tensor::dense(data.view(), [5, 2]).unwrap().transposed(0, 1).strides(), [1, 2]);
    }

    #[test]
    fn tiles_fit_their_rows() {
        let wide = RowTiles::new(16384, 1024, 1024);
        assert_eq!((wide.rows_tile, wide.d_tile, wide.num_warps), (8, 1024, 8));
        let few = RowTiles::new(3, 100_000, 1024);
        assert_eq!((few.rows_tile, few.d_tile), (1, 1024));
        let narrow = RowTiles::new(1 << 20, 1, 1024);
        assert_eq!((narrow.rows_tile, narrow.d_tile), (512, 16));
        assert_eq!(RowTiles::new(0, 0, 1024).programs(0), 0);
    }
}
