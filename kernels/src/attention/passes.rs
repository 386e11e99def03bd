//! One function per kernel, which fills in the arguments that [`super::launch`] has checked, and launches it.

use super::backward::{FlashAttentionBwdDkdv, FlashAttentionBwdDq};
use super::backward_rows::{FlashAttentionBwdPostprocess, FlashAttentionBwdPreprocess};
use super::config::{Pass, Tiles, is_sub_wave, modified_tiles};
use super::forward::FlashAttentionFwd;
use super::launch::{Options, Saved, Sizes, Tensor, TensorMut, invalid_argument};
use super::split_kv::{FlashAttentionFwdCombine, KvSplit, MIN_SPLIT_ROWS};
use crate::tensor::FloatElement;
use tilewright_codegen::target::GpuArch;
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
    // The tuner has persistent programs where they can share a block, and not in sub-wave grids.
    let tuned_may = device.gpu_arch().is_some_and(|arch| arch >= GpuArch::Sm90a)
        && T::DTYPE.size() == 2
        && !is_sub_wave([s.batch, s.heads], s.n_q);
    let may_persist = options.forward_tiles.map_or(tuned_may, |tiles| tiles.persistent);
    let mut tiles_taken = Buffer::<i32>::zeros(device, usize::from(may_persist))?;
    let mut args = FlashAttentionFwd {
        q: &q,
        k: &k,
        v: &v,
        o,
        lse,
        tiles_taken: &mut tiles_taken,
        mask_data: &s.mask.data,
        score_data: &s.score.data,
        scale: s.scale,
        mask_number: s.mask.number,
        score_number: s.score.number,
        programs: device.info().compute_units.max(1) as i32,
        q_tile: tuned(),
        k_tile: tuned(),
        replicas: tuned(),
        persistent: tuned(),
        causal: options.causal,
        precision: s.precision,
        split_rows: split.rows,
        mask: s.mask.function,
        score: s.score.function,
    };
    match given_tiles::<T>(options.forward_tiles, Pass::Forward, device, s) {
        None => args.launch_tuned_with(device, &options.base_config()),
        Some(tiles) => {
            expect_tiles_divide_split(tiles, split)?;
            args.set_configuration(&tiles.config())?;
            args.launch_with(device, &options.launch(tiles))
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
    [partial_o, partial_lse]: [View<f32>; 2],
    o: &mut TensorMut<T>,
    lse: &mut ViewMut<f32>,
    split: KvSplit,
    options: &Options,
) -> Result<()> {
    FlashAttentionFwdCombine {
        partial_o: &partial_o,
        partial_lse: &partial_lse,
        o,
        lse,
        num_splits: split.count as i32,
        q_tile: ROW_TILES.q_tile,
    }
    .launch_with(device, &options.launch(ROW_TILES))
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
    FlashAttentionBwdPreprocess {
        o: &o,
        d_o: &d_o,
        lse: &lse,
        delta,
        lse2,
        dq_sum,
        q_tile: ROW_TILES.q_tile,
        one_pass: s.one_pass,
    }
    .launch_with(device, &options.launch(ROW_TILES))
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
    FlashAttentionBwdPostprocess {
        sums: &sums,
        grad,
        num_splits,
        scale,
        row_tile: ROW_TILES.q_tile,
        fragments: matches!(origin, Sums::OnePass),
    }
    .launch_with(device, &options.launch(ROW_TILES))
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
        scale: s.scale,
        mask_number: s.mask.number,
        score_number: s.score.number,
        q_tile: tuned(),
        k_tile: tuned(),
        causal: options.causal,
        one_pass: s.one_pass,
        precision: s.precision,
        split_rows: split.rows,
        mask: s.mask.function,
        score: s.score.function,
    };
    match given_tiles::<T>(options.dkdv_tiles, Pass::Dkdv, device, s) {
        None => args.launch_tuned_with(device, &options.base_config()),
        Some(tiles) => {
            expect_tiles_divide_split(tiles, split)?;
            args.set_configuration(&tiles.config())?;
            args.launch_with(device, &options.launch(tiles))
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
        scale: s.scale,
        mask_number: s.mask.number,
        score_number: s.score.number,
        q_tile: tuned(),
        k_tile: tuned(),
        causal: options.causal,
        precision: s.precision,
        split_rows: split.rows,
        mask: s.mask.function,
        score: s.score.function,
    };
    match given_tiles::<T>(options.dq_tiles, Pass::Dq, device, s) {
        None => args.launch_tuned_with(device, &options.base_config()),
        Some(tiles) => {
            expect_tiles_divide_split(tiles, split)?;
            args.set_configuration(&tiles.config())?;
            args.launch_with(device, &options.launch(tiles))
        }
    }
}
