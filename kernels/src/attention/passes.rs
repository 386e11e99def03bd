//! One function per kernel, which fills in the arguments that [`super::launch`] has checked, and launches it.

use super::backward::{FlashAttentionBwdDkdv, FlashAttentionBwdDq};
use super::backward_rows::{DQ_SUM_ROWS, FlashAttentionBwdPostprocess, FlashAttentionBwdPreprocess};
use super::config::{Keys, Pass, Tiles, adds_lanes_first, is_sub_wave, may_share};
use super::forward::FlashAttentionFwd;
use super::launch::{Backward, Problem, Saved, Tensor, TensorMut, expect};
use super::loops::SCALED_ROWS;
use super::split_kv::{KvSplit, MIN_SPLIT_ROWS};
use crate::tensor::{FloatElement, OperandElement};
use tilewright_runtime::prelude::*;

/// Rows of a tile of the row-wise kernels.
pub(super) const ROW_TILE: usize = 32;

impl Problem<'_> {
    /// The tiles of the options, else none: then they are the tuner's.
    fn given_tiles(&self, pass: Pass, split: KvSplit) -> Result<Option<Tiles>> {
        let options = self.options;
        let tiles = match pass {
            Pass::Forward => options.forward_tiles,
            Pass::Dkdv => options.dkdv_tiles,
            Pass::Dq => options.dq_tiles,
        };
        if let Some(Tiles { q_tile, k_tile, .. }) = tiles {
            // So they divide the rows of every split.
            let fits = !split.is_split() || [q_tile, k_tile].iter().all(|&tile| MIN_SPLIT_ROWS.is_multiple_of(tile));
            let expected = format_args!("tile sizes that divide {MIN_SPLIT_ROWS}, since the loop is split");
            expect(fits, "tiles", expected, format_args!("{q_tile} × {k_tile}"))?;
            let fits = options.descale.is_none() || q_tile.max(k_tile) <= SCALED_ROWS;
            let expected = format_args!("tile sizes of at most {SCALED_ROWS}, the rows of a scale");
            expect(fits, "tiles", expected, format_args!("{q_tile} × {k_tile}"))?;
        }
        Ok(tiles)
    }
}

/// Launches one of the three kernels with tiles, with the arguments that they share, and with its own. `tiles` are those of
/// [`Problem::given_tiles`].
macro_rules! launch {
    ($kernel:ident, $tiles:expr, $p:expr, $split:expr, $inputs:expr, { $($own:tt)* }) => {{
        let (p, options, (q, k, v)) = ($p, $p.options, $inputs);
        let mut args = $kernel {
            q: &q,
            k: &k,
            v: &v,
            mask_data: &p.mask_data,
            score_data: &p.score_data,
            scale: p.scale,
            mask_number: options.mask.number,
            score_number: options.score.number,
            q_tile: tuned(),
            k_tile: tuned(),
            causal: p.causal,
            precision: p.precision,
            split_rows: $split.rows,
            mask: options.mask.function,
            score: options.score.function,
            $($own)*
        };
        match $tiles {
            None => args.launch_tuned_with(p.device, &options.base_config()),
            Some(tiles) => {
                args.set_configuration(&tiles.config())?;
                args.launch_with(p.device, &options.launch(tiles))
            }
        }
    }};
}

/// Launches the forward kernel: O and L, or those of each split.
pub(super) fn launch_forward<T: OperandElement, R: FloatElement, C: Element + Dtype>(
    p: &Problem,
    q: Tensor<T>,
    [k, v]: [Tensor<C>; 2],
    o: &mut TensorMut<R>,
    lse: &mut ViewMut<f32>,
    split: KvSplit,
) -> Result<()> {
    let [batch, heads, n_q, _] = q.shape();
    let (cache, descale) = (p.options.cache.as_ref(), p.options.descale.as_ref());
    let given = p.given_tiles(Pass::Forward, split)?;
    let sub_wave = is_sub_wave([batch, heads / p.pack], n_q * p.pack);
    let keys = Keys::of(cache.is_some(), p.page);
    let has_ranges = !p.options.mask.function.is_dense();
    let tuned_may = may_share(&p.device.target(), T::DTYPE.size(), p.d, sub_wave, keys, has_ranges);
    let may_persist = given.map_or(tuned_may, |tiles| tiles.persistent);
    with_counters(p, usize::from(may_persist), |tiles_taken| {
        launch!(FlashAttentionFwd, given, p, split, (q, k, v), {
            o,
            lse,
            sinks: p.options.sinks.as_ref().map(|sinks| sinks as _),
            lengths: cache.map(|cache| &cache.lengths as _),
            table: cache.and_then(|cache| cache.table.as_ref()).map(|table| table as _),
            row_starts: cache.and_then(|cache| cache.row_starts.as_ref()).map(|starts| starts as _),
            q_descale: descale.and_then(|descale| descale.q.as_ref()).map(|q| q as _),
            k_descale: descale.map(|descale| &descale.k as _),
            v_descale: descale.map(|descale| &descale.v as _),
            tiles_taken,
            programs: p.device.info().compute_units.max(1) as i32,
            replicas: tuned(),
            persistent: tuned(),
            pack: p.pack,
        })
    })
}

/// Launches with counters that start at 0.
fn with_counters(p: &Problem, count: usize, launch: impl FnOnce(&mut Buffer<i32>) -> Result<()>) -> Result<()> {
    let mut counters = Buffer::<i32>::zeros(p.device, count)?;
    if count == 0 { launch(&mut counters) } else { p.options.in_stream_order(p.device, || launch(&mut counters)) }
}

/// The results of preprocessing, each with one value per query row.
#[derive(Clone, Copy)]
pub(super) struct RowVectors<'a> {
    pub lse2: View<'a, f32>,
    pub delta: View<'a, f32>,
}

/// Launches preprocessing: D and L · log₂ e of each row, and for one pass the first sums of dQ.
pub(super) fn launch_preprocess<T: FloatElement>(
    p: &Problem,
    Saved { q, o, lse, d_o, .. }: Saved<T>,
    [delta, lse2]: [&mut ViewMut<f32>; 2],
    dq_sum: &mut ViewMut<f32>,
    one_pass: bool,
) -> Result<()> {
    let d = q.shape()[3];
    FlashAttentionBwdPreprocess { o: &o, d_o: &d_o, lse: &lse, delta, lse2, dq_sum, d, q_tile: ROW_TILE, one_pass }
        .launch_with(p.device, &p.options.launch_rows())
}

/// Launches postprocessing: a gradient in its type, from the f32 sums of the splits; without splits, dQ from those of one
/// pass, which do not have the factor `scale`.
pub(super) fn launch_postprocess<T: FloatElement>(
    p: &Problem,
    sums: View<f32>,
    grad: &mut TensorMut<T>,
    split: KvSplit,
) -> Result<()> {
    FlashAttentionBwdPostprocess {
        sums: &sums,
        grad,
        num_splits: split.count as i32,
        scale: if split.is_split() { 1.0 } else { p.scale },
        row_tile: ROW_TILE,
        fragments: !split.is_split(),
        lanes_first: adds_lanes_first(&p.device.target()),
    }
    .launch_with(p.device, &p.options.launch_rows())
}

/// Launches the kernel of dK and dV: them, or those of each split, and with one pass the sums of dQ.
pub(super) fn launch_dkdv<T: FloatElement, R: FloatElement>(
    p: &Problem,
    Saved { q, k, v, d_o, .. }: Saved<T>,
    RowVectors { lse2, delta }: RowVectors,
    dk: &mut TensorMut<R>,
    dv: &mut TensorMut<R>,
    dq_sum: &mut ViewMut<f32>,
    split: KvSplit,
) -> Result<()> {
    let (d_o, lse2, delta) = (&d_o, &lse2, &delta);
    let [batch, heads, n_q, _] = q.shape();
    let ordered = p.form == Backward::Ordered;
    let given = p.given_tiles(Pass::Dkdv, split)?;
    let count = if ordered { batch * heads * n_q.next_multiple_of(DQ_SUM_ROWS) / 16 } else { 0 };
    with_counters(p, count, |counters| {
        launch!(FlashAttentionBwdDkdv, given, p, split, (q, k, v), {
            d_o, lse2, delta, dk, dv, dq_sum, counters, one_pass: p.is_one_pass(), ordered,
            lanes_first: adds_lanes_first(&p.device.target()),
        })
    })
}

/// Launches the kernel of dQ: it, or that of each split.
pub(super) fn launch_dq<T: FloatElement, R: FloatElement>(
    p: &Problem,
    Saved { q, k, v, d_o, .. }: Saved<T>,
    RowVectors { lse2, delta }: RowVectors,
    dq: &mut TensorMut<R>,
    split: KvSplit,
) -> Result<()> {
    let (d_o, lse2, delta) = (&d_o, &lse2, &delta);
    let given = p.given_tiles(Pass::Dq, split)?;
    launch!(FlashAttentionBwdDq, given, p, split, (q, k, v), { d_o, lse2, delta, dq, })
}
