//! The gradient of an embedding: y[t, :] = w[ids[t], :] gives ∂L/∂w[k, :] = Σ g[t, :] over the tokens t with ids[t] = k, where
//! g = ∂L/∂y.
//!
//! Tokens add to their rows with atomics, in f32. Their order is up to the device, and so are the last bits of a sum of
//! three and more.

use crate::blocks::{ElementTiles, row_block, tile_start, vector_block};
use crate::tensor::{FloatElement, IndexElement, Tensor, TensorMut, expect_shape, extent};
use tilewright_runtime::prelude::*;

/// grad_w[ids[t], :] += grad_y[t, :] for every token t; ids outside 0..vocabulary add nothing.
///
/// One program per tile.
#[kernel]
pub fn embedding_bwd<T: Float, I: Int>(
    ids: In<I>,
    grad_y: In<T>,
    grad_w: InOut<f32>,
    ids_stride: i64,
    grad_y_stride_row: i64,
    grad_y_stride_d: i64,
    grad_w_stride_row: i64,
    grad_w_stride_d: i64,
    tokens: i32,
    vocabulary: i32,
    d: i32,
    #[constexpr] rows_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let tile = (rows_tile, d_tile);
    let (first, col) = tile_start(d, tile);
    let ids_block = vector_block(ids, tokens, ids_stride, first, rows_tile);
    let id = load(ids_block, boundary_check = [0], padding = zero).to::<i64>();
    let g_block = row_block(grad_y, (tokens, d), (grad_y_stride_row, grad_y_stride_d), first, tile);
    let g = load(g_block.advance([0, col]), boundary_check = [0, 1], padding = zero).to::<f32>();
    let token = first + arange(0, rows_tile);
    let columns = col + arange(0, d_tile);
    let known = (token < tokens) && (id >= 0) && (id < vocabulary.to::<i64>());
    let rows = (id * grad_w_stride_row).expand_dims(1);
    let at = grad_w + (rows + (columns.to::<i64>() * grad_w_stride_d).expand_dims(0));
    atomic_add(at, g, mask = known.expand_dims(1) && (columns < d).expand_dims(0));
}

/// Adds the gradient of the rows that `ids` [tokens] chose, grad_y [tokens, d], to grad_w [vocabulary, d]. Ids that are no
/// row of grad_w, such as −1 for padding, add nothing.
///
/// # Errors
/// Shapes that do not fit each other, tensors on another device, and everything that a launch can say.
pub fn backward<T: FloatElement, I: IndexElement>(
    device: &Device,
    ids: Tensor<'_, I, 1>,
    grad_y: Tensor<'_, T, 2>,
    mut grad_w: TensorMut<'_, f32, 2>,
) -> Result<()> {
    const NAME: &str = "embedding_bwd";
    let [tokens, d] = grad_y.shape();
    let vocabulary = grad_w.shape()[0];
    expect_shape(NAME, "ids", ids.shape(), [tokens])?;
    expect_shape(NAME, "grad_w", grad_w.shape(), [vocabulary, d])?;
    let tiles = ElementTiles::new(tokens, d);
    EmbeddingBwd {
        ids_stride: ids.strides()[0],
        grad_y_stride_row: grad_y.strides()[0],
        grad_y_stride_d: grad_y.strides()[1],
        grad_w_stride_row: grad_w.strides()[0],
        grad_w_stride_d: grad_w.strides()[1],
        tokens: extent(NAME, "grad_y", tokens)?,
        vocabulary: extent(NAME, "grad_w", vocabulary)?,
        d: extent(NAME, "grad_y", d)?,
        ids: &ids.data,
        grad_y: &grad_y.data,
        grad_w: &mut grad_w.data,
        rows_tile: tiles.rows_tile,
        d_tile: tiles.d_tile,
    }
    .launch_with(device, &tiles.config())
}

/// The same in f64, on dense row-major slices with rows of `d` elements.
pub fn reference(ids: &[i64], grad_y: &[f64], d: usize, grad_w: &mut [f64]) {
    for (id, row) in ids.iter().zip(grad_y.chunks_exact(d.max(1))) {
        if let Some(start) = usize::try_from(*id).ok().map(|id| id * d).filter(|start| *start < grad_w.len()) {
            for (sum, g) in grad_w[start..start + d].iter_mut().zip(row) {
                *sum += g;
            }
        }
    }
}
