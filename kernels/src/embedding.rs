//! The gradient of an embedding: y[t, :] = w[ids[t], :] gives ∂L/∂w[k, :] = Σ g[t, :] over the tokens t with ids[t] =
//! k, where g = ∂L/∂y.
//!
//! The program of the first token of each id sums the gradients of all tokens with that id, in token order: the sum has
//! the same bits in every run, which atomic additions would not guarantee.

use crate::blocks::tile_start;
use crate::tensor::{FloatElement, IndexElement, Tensor, TensorMut};
use tilewright_runtime::prelude::*;

/// Sentinel for "no such token": greater than every token index.
const NO_TOKEN: i32 = i32::MAX;

/// The smallest index in `at` that is greater than `after` and whose id matches (`same`).
#[device_fn]
fn next_match(at: Tile<i32>, same: Tile<bool>, after: Scalar<i32>) -> Scalar<i32> {
    min(where_(same && (at > after), at, NO_TOKEN))
}

/// The gradient of token t in the given columns; zero where t is [`NO_TOKEN`].
#[device_fn]
fn load_grad_row<T: Float>(
    grad_y: TensorPtr<T>,
    t: Scalar<i32>,
    (columns, inside): (Tile<i32>, Tile<bool>),
) -> Tile<f32> {
    let exists = (t >= 0) && (t < grad_y.dim(0));
    let at = grad_y.ptr() + (t.to::<i64>() * grad_y.stride(0) + columns.to::<i64>() * grad_y.stride(1));
    load(at, mask = inside && exists, other = 0.0).to::<f32>()
}

/// grad_w[ids[t], :] += grad_y[t, :] for every token t; ids outside of 0..vocabulary are skipped.
///
/// One program per token and `d_tile` columns; a program returns early if an earlier token has the same id.
#[kernel(grid = tokens * cdiv(d, d_tile))]
pub fn embedding_bwd<T: Float, I: Int>(
    ids: Tensor<I, (tokens,)>,
    grad_y: Tensor<T, (tokens, d)>,
    grad_w: TensorInOut<f32, (vocabulary, d)>,
    #[constexpr] ids_tile: usize,
    #[constexpr] d_tile: usize,
) {
    let (token, col) = tile_start(d, (1, d_tile));
    let own = load(ids.ptr() + token.to::<i64>() * ids.stride(0));
    let id = own.to::<i64>();
    let mut before = scalar::<i32>(0);
    for start in range(0, token, ids_tile) {
        let at = start + arange(0, ids_tile);
        let found = load(ids.ptr() + at.to::<i64>() * ids.stride(0), mask = at < token);
        before += sum(where_((found == own) && (at < token), 1, 0));
    }
    if (before == 0) && (id >= 0) && (id < vocabulary.to::<i64>()) {
        let columns = col + arange(0, d_tile);
        let inside = columns < d;
        let target = grad_w.ptr() + (id * grad_w.stride(0) + columns.to::<i64>() * grad_w.stride(1));
        let mut total = load(target, mask = inside, other = 0.0);
        for start in range(token, tokens, ids_tile) {
            let at = start + arange(0, ids_tile);
            let same = (load(ids.ptr() + at.to::<i64>() * ids.stride(0), mask = at < tokens) == own) && (at < tokens);
            let count = sum(where_(same, 1, 0));
            let mut last = scalar::<i32>(-1);
            // Four rows are in flight.
            for _ in range(0, cdiv(count, 4)) {
                let first = next_match(at, same, last);
                let second = next_match(at, same, first);
                let third = next_match(at, same, second);
                last = next_match(at, same, third);
                let rows = (
                    load_grad_row(grad_y, first, (columns, inside)),
                    load_grad_row(grad_y, second, (columns, inside)),
                    load_grad_row(grad_y, third, (columns, inside)),
                    load_grad_row(grad_y, last, (columns, inside)),
                );
                total = total + rows.0 + rows.1 + rows.2 + rows.3;
            }
        }
        store(target, total, mask = inside);
    }
}

/// Widest tile of columns.
const MAX_D_TILE: usize = 512;
/// Largest tile of the token ids that are scanned.
const IDS_TILE: usize = 512;

/// Adds grad_y [tokens, d] to the rows of grad_w [vocabulary, d] that `ids` [tokens] select. Ids outside of
/// 0..vocabulary, such as −1 for padding, are skipped.
///
/// # Errors
/// Shapes that do not match; tensors on another device; launch errors.
pub fn backward<T: FloatElement, I: IndexElement>(
    device: &Device,
    ids: Tensor<'_, I, 1>,
    grad_y: Tensor<'_, T, 2>,
    mut grad_w: TensorMut<'_, f32, 2>,
) -> Result<()> {
    let [tokens, d] = grad_y.shape();
    let d_tile = d.max(1).next_power_of_two().clamp(16, MAX_D_TILE);
    let ids_tile = tokens.max(1).next_power_of_two().clamp(32, IDS_TILE);
    EmbeddingBwd { ids: &ids, grad_y: &grad_y, grad_w: &mut grad_w, ids_tile, d_tile }
        .launch_with(device, &LaunchConfig::new(tokens * d.div_ceil(d_tile)).num_warps(1))
}

/// The reference in f64, on dense row-major slices with rows of `d` elements.
pub fn reference(ids: &[i64], grad_y: &[f64], d: usize, grad_w: &mut [f64]) {
    for (id, row) in ids.iter().zip(grad_y.chunks_exact(d.max(1))) {
        if let Some(start) = usize::try_from(*id).ok().map(|id| id * d).filter(|start| *start < grad_w.len()) {
            for (sum, g) in grad_w[start..start + d].iter_mut().zip(row) {
                *sum += g;
            }
        }
    }
}
