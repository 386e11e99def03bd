//! Tensors [batch, heads, rows, d] in device memory, as the attention kernels take them.

use tilewright_runtime::prelude::*;
use tilewright_runtime::{Element, Strided};

/// A tensor [batch, heads, rows, d] that is read.
#[derive(Clone, Copy, Debug)]
pub struct Tensor<'a, T: Element> {
    pub(super) data: View<'a, T>,
    pub(super) shape: [usize; 4],
    pub(super) strides: [i64; 4],
}

/// A tensor [batch, heads, rows, d] that is written.
#[derive(Debug)]
pub struct TensorMut<'a, T: Element> {
    pub(super) data: ViewMut<'a, T>,
    pub(super) shape: [usize; 4],
    pub(super) strides: [i64; 4],
}

/// Strides of a dense tensor, last dimension fastest.
fn dense_strides([_, heads, rows, d]: [usize; 4]) -> [i64; 4] {
    let row = d as i64;
    let head = row.saturating_mul(rows as i64);
    [head.saturating_mul(heads as i64), head, row, 1]
}

/// Checks that every element lies in memory of `len` elements.
fn check_fits(shape: [usize; 4], strides: [i64; 4], len: usize) -> Result<()> {
    let extent = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
    Strided { shape: shape.map(extent).to_vec(), strides: strides.to_vec() }.check_fits(len)
}

/// Whether two elements may lie in one place. Says yes for some exotic strides whose elements interleave.
fn may_overlap(shape: [usize; 4], strides: [i64; 4]) -> bool {
    let mut axes: Vec<(u64, u64)> =
        shape.iter().zip(strides).filter(|&(&n, _)| n > 1).map(|(&n, s)| (s.unsigned_abs(), n as u64)).collect();
    axes.sort_unstable();
    let mut reach = 0u64;
    for (stride, extent) in axes {
        if stride <= reach {
            return true;
        }
        reach = reach.saturating_add(stride.saturating_mul(extent - 1));
    }
    false
}

impl<'a, T: Element> Tensor<'a, T> {
    /// A dense tensor, last dimension fastest.
    ///
    /// # Errors
    /// The memory has fewer elements than the shape.
    pub fn dense(data: View<'a, T>, shape: [usize; 4]) -> Result<Self> {
        Self::strided(data, shape, dense_strides(shape))
    }

    /// A tensor with any strides, in elements, from the first element of `data` on. Strides may be zero or negative as
    /// long as every element lies in `data`.
    ///
    /// # Errors
    /// Some element lies outside `data`.
    pub fn strided(data: View<'a, T>, shape: [usize; 4], strides: [i64; 4]) -> Result<Self> {
        check_fits(shape, strides, data.len())?;
        Ok(Tensor { data, shape, strides })
    }

    /// [batch, heads, rows, d].
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }
}

impl<'a, T: Element> TensorMut<'a, T> {
    /// A dense tensor, last dimension fastest.
    ///
    /// # Errors
    /// The memory has fewer elements than the shape.
    pub fn dense(data: ViewMut<'a, T>, shape: [usize; 4]) -> Result<Self> {
        Self::strided(data, shape, dense_strides(shape))
    }

    /// A tensor with any strides, in elements, from the first element of `data` on, no two elements in one place.
    ///
    /// # Errors
    /// Some element lies outside `data`, or two elements would be written to one place.
    pub fn strided(data: ViewMut<'a, T>, shape: [usize; 4], strides: [i64; 4]) -> Result<Self> {
        check_fits(shape, strides, data.len())?;
        if !shape.contains(&0) && may_overlap(shape, strides) {
            return Err(Error::Argument {
                kernel: "attention".into(),
                name: "output",
                expected: "a place of its own for every element".into(),
                found: format!("shape {shape:?} with strides {strides:?}"),
            });
        }
        Ok(TensorMut { data, shape, strides })
    }

    /// [batch, heads, rows, d].
    pub fn shape(&self) -> [usize; 4] {
        self.shape
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strides_are_checked_against_the_memory() {
        let device = Device::cpu();
        let mut buffer = Buffer::<f32>::zeros(&device, 120).unwrap();
        assert_eq!(Tensor::dense(buffer.view(), [2, 3, 4, 5]).unwrap().strides, [60, 20, 5, 1]);
        let message = Tensor::dense(buffer.view(), [2, 3, 4, 6]).unwrap_err().to_string();
        assert!(message.contains("143") && message.contains("120"), "{message}");
        // One head read for three.
        Tensor::strided(buffer.view(), [2, 3, 4, 5], [60, 0, 5, 1]).unwrap();
        let message = TensorMut::strided(buffer.view_mut(), [2, 3, 4, 5], [60, 0, 5, 1]).unwrap_err().to_string();
        assert!(message.contains("place of its own"), "{message}");
        TensorMut::strided(buffer.view_mut(), [2, 3, 4, 5], [60, 5, 15, 1]).unwrap();
        TensorMut::strided(buffer.view_mut(), [2, 3, 0, 5], [0, 0, 0, 0]).unwrap();
    }
}
