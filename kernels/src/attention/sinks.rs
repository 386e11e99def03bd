//! Gradients of attention sinks.
//!
//! Row i of head h has the score of the sink, sₕ, beside those of its keys, with a value of 0: its probability is Pᵢ = exp(sₕ − Lᵢ).
//! By the chain rule through the softmax its gradient is −Pᵢ Dᵢ, D = rowsum(dO ∘ O), and that of sₕ the sum over all rows.

use super::backward_rows::row_block;
use super::forward::row_offset;
use super::launch::{Tensor, expect, expect_len, expect_shape, rows};
use super::passes::ROW_TILE;
use crate::blocks::boundary_dims;
use crate::column_sum;
use crate::tensor::FloatElement;
use tilewright_runtime::prelude::*;

/// `sums`[b · T + t, h] = −Σ P D over the rows of tile t of T, of head h and batch entry b.
///
/// `lse` is dense [batch, heads, n_q].
///
/// Grid: (⌈n_q / q_tile⌉, heads, batch).
#[kernel(grid = (cdiv(n_q, q_tile), heads, batch))]
pub fn flash_attention_bwd_sinks<T: Float>(
    o: Tensor<T, (batch, heads, n_q, d)>,
    d_o: Tensor<T, (batch, heads, n_q, d)>,
    lse: In<f32>,
    sinks: Tensor<f32, (heads,)>,
    sums: TensorMut<f32, (partials, heads)>,
    #[no_specialize] n_q: i32,
    #[constexpr] d: usize,
    #[heuristic(super::config::d_tile(d))] d_tile: usize,
    #[constexpr] q_tile: usize,
) {
    let (tile, head, batch) = (program_id(0), program_id(1), program_id(2));
    let first_row = tile * q_tile;
    let boundary = boundary_dims(true, d != d_tile);
    let o_block = o.index([batch, head]).block([first_row, 0], [q_tile, d_tile]);
    let do_block = d_o.index([batch, head]).block([first_row, 0], [q_tile, d_tile]);
    let ot = load(o_block, boundary_check = boundary, padding = zero).to::<f32>();
    let grad_o = load(do_block, boundary_check = boundary, padding = zero).to::<f32>();
    let lse_block = row_block(lse + row_offset(head, batch, n_q), first_row, n_q, q_tile);
    let lt = load(lse_block, boundary_check = [0], padding = zero);
    let sink = load(sinks.block([head], [1]), boundary_check = [0], padding = zero);
    // Beyond the end D is 0, and L, which is at least the sink elsewhere, may be less. A row without keys and sink has an L of −∞.
    let p = where_(lt == f32::NEG_INFINITY, 0.0, exp(minimum(sink - lt, 0.0, propagate_nan = true)));
    let total = sum(p * sum(ot * grad_o, axis = 1), axis = 0, keep_dims = true);
    let sum_block = sums.block([batch * num_programs(0) + tile, head], [1, 1]);
    store(sum_block, -total.expand_dims(0), boundary_check = [0, 1]);
}

/// The gradients of the sinks, f32 [heads], from the results of the forward pass with them and the gradient `d_o` of O, with the
/// same bits in every run. Launches are on the device's own stream: after [`forward_into`](super::forward_into) on another one,
/// that stream has to wait for it.
///
/// # Errors
/// Shapes that do not match; launch errors; out of memory for a sum per 32 rows.
pub fn sink_gradients<T: FloatElement>(
    device: &Device,
    sinks: View<f32>,
    o: Tensor<T>,
    lse: View<f32>,
    d_o: Tensor<T>,
) -> Result<Buffer<f32>> {
    let mut d_sinks = Buffer::uninit(device, sinks.len())?;
    sink_gradients_into(device, sinks, o, lse, d_o, d_sinks.view_mut())?;
    Ok(d_sinks)
}

/// As [`sink_gradients`], into memory of the caller.
///
/// # Errors
/// As [`sink_gradients`].
pub fn sink_gradients_into<T: FloatElement>(
    device: &Device,
    sinks: View<f32>,
    o: Tensor<T>,
    lse: View<f32>,
    d_o: Tensor<T>,
    d_sinks: ViewMut<f32>,
) -> Result<()> {
    let [batch, heads, n_q, _] = o.shape();
    expect_shape("d_o", d_o.shape(), o.shape())?;
    expect_len("lse", lse.len(), rows(o.shape()), ", one per row of o")?;
    for (name, len) in [("sinks", sinks.len()), ("d_sinks", d_sinks.len())] {
        expect(len == heads, name, format_args!("a score for each of {heads} heads"), format_args!("{len} scores"))?;
    }
    let partials = batch * n_q.div_ceil(ROW_TILE);
    let mut sums = Buffer::uninit(device, partials * heads)?;
    let mut target = sums.tensor_mut([partials, heads])?;
    FlashAttentionBwdSinks { o: &o, d_o: &d_o, lse: &lse, sinks: &sinks, sums: &mut target, q_tile: ROW_TILE }
        .launch_with(device, &LaunchConfig::default().num_warps(4).num_stages(1))?;
    column_sum::forward(device, sums.tensor([partials, heads])?, TensorMut::dense(d_sinks, [heads])?)
}
