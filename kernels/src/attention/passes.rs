//! One function per kernel, which fills in the arguments that [`super::launch`] has checked, and launches it.

use super::backward::{FlashAttentionBwdDkdv, FlashAttentionBwdDq};
use super::backward_rows::{DQ_SUM_ROWS, FlashAttentionBwdPostprocess, FlashAttentionBwdPreprocess};
use super::config::{Pass, Tiles, d_tile, is_sub_wave, modified_tiles};
use super::forward::FlashAttentionFwd;
use super::launch::{Options, Saved, Sizes, Tensor, TensorMut, invalid_argument};
use super::split_kv::{FlashAttentionFwdCombine, KvSplit, MIN_SPLIT_ROWS};
use crate::tensor::FloatElement;
use tilewright_runtime::prelude::*;

/// Launches the forward kernel: O and L, or those of each split.
pub(super) fn launch_forward<T: FloatElement, R: FloatElement>(
    device: &Device,
    s: &Sizes,
    [q, k, v]: [Tensor<T>; 3],
    o: &mut TensorMut<R>,
    lse: &mut ViewMut<f32>,
    split: KvSplit,
    options: &Options,
) -> Result<()> {
    let [q_strides, k_strides, v_strides, o_strides] = [q.strides(), k.strides(), v.strides(), o.strides()];
    let mut args = FlashAttentionFwd {
        q: &q,
        k: &k,
        v: &v,
        o,
        lse,
        mask_data: &s.mask.data,
        score_data: &s.score.data,
        q_stride_batch: q_strides[0],
        q_stride_head: q_strides[1],
        q_stride_row: q_strides[2],
        q_stride_dim: q_strides[3],
        k_stride_batch: k_strides[0],
        k_stride_head: k_strides[1],
        k_stride_row: k_strides[2],
        k_stride_dim: k_strides[3],
        v_stride_batch: v_strides[0],
        v_stride_head: v_strides[1],
        v_stride_row: v_strides[2],
        v_stride_dim: v_strides[3],
        o_stride_batch: o_strides[0],
        o_stride_head: o_strides[1],
        o_stride_row: o_strides[2],
        o_stride_dim: o_strides[3],
        n_q: s.n_q as i32,
        n_k: s.n_k as i32,
        scale: s.scale,
        mask_number: s.mask.number,
        score_number: s.score.number,
        d: s.d,
        d_tile: d_tile(s.d),
        q_tile: tuned(),
        k_tile: tuned(),
        group: s.group,
        causal: options.causal,
        even_keys: tuned(),
        precision: s.precision,
        sub_wave: is_sub_wave(s.batch * s.heads, s.n_q),
        split_rows: split.rows,
        mask: s.mask.function,
        score: s.score.function,
    };
    let grid = |args: &mut FlashAttentionFwd<T, R>| {
        args.even_keys = s.n_k.is_multiple_of(args.k_tile.max(1));
        [s.n_q.div_ceil(args.q_tile.max(1)), s.heads, s.batch * split.count]
    };
    match given_tiles::<T>(options.forward_tiles, Pass::Forward, device, s) {
        None => args.launch_tuned_with(device, &options.base_config(), grid),
        Some(tiles) => {
            expect_tiles_divide_split(tiles, split)?;
            args.set_configuration(&tiles.config())?;
            let grid = grid(&mut args);
            args.launch_with(device, &options.launch(tiles, grid))
        }
    }
}

/// The tiles of a kernel of this problem that are not the tuner's: those of the options, or those of modifiers.
fn given_tiles<T: Element>(given: Option<Tiles>, pass: Pass, device: &Device, s: &Sizes) -> Option<Tiles> {
    let (has_ranges, has_derivative) = (!s.mask.function.is_dense(), s.score.function.0.has_derivative);
    given.or_else(|| modified_tiles(pass, s.d, T::DTYPE.size(), &device.target(), has_ranges, has_derivative))
}

/// Launches the combine kernel: O and L from the dense results of the splits.
pub(super) fn launch_combine<T: FloatElement>(
    device: &Device,
    s: &Sizes,
    [partial_o, partial_lse]: [View<f32>; 2],
    o: &mut TensorMut<T>,
    lse: &mut ViewMut<f32>,
    split: KvSplit,
    options: &Options,
) -> Result<()> {
    let config = options.launch(ROW_TILES, [s.n_q.div_ceil(ROW_TILES.q_tile), s.heads, s.batch]);
    let strides = o.strides();
    FlashAttentionFwdCombine {
        partial_o: &partial_o,
        partial_lse: &partial_lse,
        o,
        lse,
        o_stride_batch: strides[0],
        o_stride_head: strides[1],
        o_stride_row: strides[2],
        o_stride_dim: strides[3],
        n_q: s.n_q as i32,
        num_splits: split.count as i32,
        d: s.d,
        d_tile: d_tile(s.d),
        q_tile: ROW_TILES.q_tile,
    }
    .launch_with(device, &config)
}

/// Fails unless tile sizes divide [`MIN_SPLIT_ROWS`], and so the rows of every split.
fn expect_tiles_divide_split(tiles: Tiles, split: KvSplit) -> Result<()> {
    let Tiles { q_tile, k_tile, .. } = tiles;
    if !split.is_split() || [q_tile, k_tile].iter().all(|tile| MIN_SPLIT_ROWS.is_multiple_of(*tile)) {
        return Ok(());
    }
    invalid_argument(
        "tiles",
        format!("tile sizes that divide {MIN_SPLIT_ROWS}, since the loop is split"),
        format!("{q_tile} × {k_tile}"),
    )
}

/// The results of preprocessing, each with one value per query row.
#[derive(Clone, Copy)]
pub(super) struct RowVectors<'a> {
    pub lse2: View<'a, f32>,
    pub delta: View<'a, f32>,
}

/// Tiles of the row-wise kernels.
const ROW_TILES: Tiles = Tiles::new(32, 32, 4, 1);

pub(super) fn launch_preprocess<T: FloatElement>(
    device: &Device,
    s: &Sizes,
    o: Tensor<T>,
    d_o: Tensor<T>,
    lse: View<f32>,
    delta: &mut ViewMut<f32>,
    lse2: &mut ViewMut<f32>,
    dq_sum: &mut ViewMut<f32>,
    options: &Options,
) -> Result<()> {
    let rows = if s.one_pass { s.n_q.next_multiple_of(DQ_SUM_ROWS) } else { s.n_q };
    let config = options.launch(ROW_TILES, [rows.div_ceil(ROW_TILES.q_tile), s.heads, s.batch]);
    let [o_strides, d_o_strides] = [o.strides(), d_o.strides()];
    FlashAttentionBwdPreprocess {
        o: &o,
        d_o: &d_o,
        lse: &lse,
        delta,
        lse2,
        dq_sum,
        o_stride_batch: o_strides[0],
        o_stride_head: o_strides[1],
        o_stride_row: o_strides[2],
        o_stride_dim: o_strides[3],
        do_stride_batch: d_o_strides[0],
        do_stride_head: d_o_strides[1],
        do_stride_row: d_o_strides[2],
        do_stride_dim: d_o_strides[3],
        n_q: s.n_q as i32,
        d: s.d,
        d_tile: d_tile(s.d),
        q_tile: ROW_TILES.q_tile,
        one_pass: s.one_pass,
    }
    .launch_with(device, &config)
}

/// Where the f32 sums of a gradient come from.
#[derive(Clone, Copy)]
pub(super) enum Sums {
    /// Each split of a loop has stored its own.
    Splits(KvSplit),
    /// dQ of one pass, without the factor `scale`.
    OnePass,
}

/// Launches postprocessing: a gradient in its type, from its f32 sums.
pub(super) fn launch_postprocess<T: FloatElement>(
    device: &Device,
    s: &Sizes,
    sums: View<f32>,
    grad: &mut TensorMut<T>,
    origin: Sums,
    options: &Options,
) -> Result<()> {
    let (num_splits, scale) = match origin {
        Sums::Splits(split) => (split.count as i32, 1.0),
        Sums::OnePass => (1, s.scale),
    };
    let ([_, heads, n, _], strides) = (grad.shape(), grad.strides());
    let config = options.launch(ROW_TILES, [n.div_ceil(ROW_TILES.q_tile), heads, s.batch]);
    FlashAttentionBwdPostprocess {
        sums: &sums,
        grad,
        grad_stride_batch: strides[0],
        grad_stride_head: strides[1],
        grad_stride_row: strides[2],
        grad_stride_dim: strides[3],
        n: n as i32,
        num_splits,
        scale,
        d: s.d,
        d_tile: d_tile(s.d),
        row_tile: ROW_TILES.q_tile,
        fragments: matches!(origin, Sums::OnePass),
    }
    .launch_with(device, &config)
}

pub(super) fn launch_dkdv<T: FloatElement, R: FloatElement>(
    device: &Device,
    s: &Sizes,
    Saved { q, k, v, d_o, .. }: Saved<T>,
    rows: RowVectors,
    dk: &mut TensorMut<R>,
    dv: &mut TensorMut<R>,
    dq_sum: &mut ViewMut<f32>,
    split: KvSplit,
    options: &Options,
) -> Result<()> {
    let [q_strides, k_strides, v_strides, d_o_strides, dk_strides, dv_strides] =
        [q.strides(), k.strides(), v.strides(), d_o.strides(), dk.strides(), dv.strides()];
    let mut args = FlashAttentionBwdDkdv {
        q: &q,
        k: &k,
        v: &v,
        d_o: &d_o,
        lse2: &rows.lse2,
        delta: &rows.delta,
        mask_data: &s.mask.data,
        score_data: &s.score.data,
        dk,
        dv,
        dq_sum,
        q_stride_batch: q_strides[0],
        q_stride_head: q_strides[1],
        q_stride_row: q_strides[2],
        q_stride_dim: q_strides[3],
        k_stride_batch: k_strides[0],
        k_stride_head: k_strides[1],
        k_stride_row: k_strides[2],
        k_stride_dim: k_strides[3],
        v_stride_batch: v_strides[0],
        v_stride_head: v_strides[1],
        v_stride_row: v_strides[2],
        v_stride_dim: v_strides[3],
        do_stride_batch: d_o_strides[0],
        do_stride_head: d_o_strides[1],
        do_stride_row: d_o_strides[2],
        do_stride_dim: d_o_strides[3],
        dk_stride_batch: dk_strides[0],
        dk_stride_head: dk_strides[1],
        dk_stride_row: dk_strides[2],
        dk_stride_dim: dk_strides[3],
        dv_stride_batch: dv_strides[0],
        dv_stride_head: dv_strides[1],
        dv_stride_row: dv_strides[2],
        dv_stride_dim: dv_strides[3],
        n_q: s.n_q as i32,
        n_k: s.n_k as i32,
        scale: s.scale,
        mask_number: s.mask.number,
        score_number: s.score.number,
        d: s.d,
        d_tile: d_tile(s.d),
        q_tile: tuned(),
        k_tile: tuned(),
        group: s.group,
        causal: options.causal,
        even_queries: tuned(),
        even_keys: tuned(),
        one_pass: s.one_pass,
        precision: s.precision,
        sub_wave: is_sub_wave(s.batch * s.heads_kv, s.n_k),
        split_rows: split.rows,
        mask: s.mask.function,
        score: s.score.function,
    };
    let grid = |args: &mut FlashAttentionBwdDkdv<T, R>| {
        args.even_queries = s.n_q.is_multiple_of(args.q_tile.max(1));
        args.even_keys = s.n_k.is_multiple_of(args.k_tile.max(1));
        [s.n_k.div_ceil(args.k_tile.max(1)), s.heads_kv, s.batch * split.count]
    };
    match given_tiles::<T>(options.dkdv_tiles, Pass::Dkdv, device, s) {
        None => args.launch_tuned_with(device, &options.base_config(), grid),
        Some(tiles) => {
            expect_tiles_divide_split(tiles, split)?;
            args.set_configuration(&tiles.config())?;
            let grid = grid(&mut args);
            args.launch_with(device, &options.launch(tiles, grid))
        }
    }
}

pub(super) fn launch_dq<T: FloatElement, R: FloatElement>(
    device: &Device,
    s: &Sizes,
    Saved { q, k, v, d_o, .. }: Saved<T>,
    rows: RowVectors,
    dq: &mut TensorMut<R>,
    split: KvSplit,
    options: &Options,
) -> Result<()> {
    let [q_strides, k_strides, v_strides, d_o_strides, dq_strides] =
        [q.strides(), k.strides(), v.strides(), d_o.strides(), dq.strides()];
    let mut args = FlashAttentionBwdDq {
        q: &q,
        k: &k,
        v: &v,
        d_o: &d_o,
        lse2: &rows.lse2,
        delta: &rows.delta,
        mask_data: &s.mask.data,
        score_data: &s.score.data,
        dq,
        q_stride_batch: q_strides[0],
        q_stride_head: q_strides[1],
        q_stride_row: q_strides[2],
        q_stride_dim: q_strides[3],
        k_stride_batch: k_strides[0],
        k_stride_head: k_strides[1],
        k_stride_row: k_strides[2],
        k_stride_dim: k_strides[3],
        v_stride_batch: v_strides[0],
        v_stride_head: v_strides[1],
        v_stride_row: v_strides[2],
        v_stride_dim: v_strides[3],
        do_stride_batch: d_o_strides[0],
        do_stride_head: d_o_strides[1],
        do_stride_row: d_o_strides[2],
        do_stride_dim: d_o_strides[3],
        dq_stride_batch: dq_strides[0],
        dq_stride_head: dq_strides[1],
        dq_stride_row: dq_strides[2],
        dq_stride_dim: dq_strides[3],
        n_q: s.n_q as i32,
        n_k: s.n_k as i32,
        scale: s.scale,
        mask_number: s.mask.number,
        score_number: s.score.number,
        d: s.d,
        d_tile: d_tile(s.d),
        q_tile: tuned(),
        k_tile: tuned(),
        group: s.group,
        causal: options.causal,
        even_keys: tuned(),
        precision: s.precision,
        sub_wave: is_sub_wave(s.batch * s.heads, s.n_q),
        split_rows: split.rows,
        mask: s.mask.function,
        score: s.score.function,
    };
    let grid = |args: &mut FlashAttentionBwdDq<T, R>| {
        args.even_keys = s.n_k.is_multiple_of(args.k_tile.max(1));
        [s.n_q.div_ceil(args.q_tile.max(1)), s.heads, s.batch * split.count]
    };
    match given_tiles::<T>(options.dq_tiles, Pass::Dq, device, s) {
        None => args.launch_tuned_with(device, &options.base_config(), grid),
        Some(tiles) => {
            expect_tiles_divide_split(tiles, split)?;
            args.set_configuration(&tiles.config())?;
            let grid = grid(&mut args);
            args.launch_with(device, &options.launch(tiles, grid))
        }
    }
}
