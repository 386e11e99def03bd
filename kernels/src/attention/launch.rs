//! Host side of attention: argument checks, workspace, and the order of the kernels, which [`super::passes`] launches.

use super::backward_rows::DQ_SUM_ROWS;
use super::config::{Pass, Tiles, d_tile, one_pass_is_faster, ordered_is_faster};
use super::eight_bit::{Transposed, scaled_blocks};
use super::loops::MAX_SEQUENCES;
use super::modifiers::{ALIBI, DOCUMENTS, Mask, PREFIX, RELATIVE, SOFTCAP, SOFTCAP_ALIBI, Score, WINDOW};
use super::passes::{RowVectors, launch_dkdv, launch_dq, launch_forward, launch_postprocess, launch_preprocess};
use super::split_kv::{FlashAttentionFwdCombine, KvSplit, combine_tiles};
use crate::tensor::{self, FloatElement, OperandElement};
use std::fmt::Display;
use std::ptr;
use tilewright_runtime::Stream;
use tilewright_runtime::prelude::*;

/// A read-only tensor [batch, heads, rows, d].
pub type Tensor<'a, T> = tensor::Tensor<'a, T, 4>;
/// A writable tensor [batch, heads, rows, d].
pub type TensorMut<'a, T> = tensor::TensorMut<'a, T, 4>;

/// How the backward pass computes dQ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Backward {
    /// One pass where that was measured to be faster
    /// ([`one_pass_is_faster`](super::config::one_pass_is_faster)), else two. Code that needs the same bits in every run
    /// takes [`Backward::Deterministic`].
    #[default]
    Auto,
    /// The same inputs give the same bits in every run: [`Backward::Ordered`] where that was measured to be faster
    /// ([`ordered_is_faster`](super::config::ordered_is_faster)), else [`Backward::TwoPass`].
    Deterministic,
    /// A separate kernel recomputes the scores. The same inputs give the same bits in every run.
    TwoPass,
    /// The kernel that computes dK and dV also adds to dQ, atomically in f32: two of seven dots are saved, but the last
    /// bits of dQ change from run to run.
    OnePass,
    /// One pass, whose programs add to dQ in a fixed order. The same inputs give the same bits in every run. With a mask of
    /// ranges this is [`Backward::TwoPass`].
    Ordered,
}

/// Options of attention.
#[derive(Clone, Default)]
pub struct Options<'a> {
    /// Causal mask: row i attends only to the keys j ≤ i + (n_k − n_q). A mask of ranges decides itself what it makes of
    /// this.
    pub causal: bool,
    /// Which keys a row sees; by default all, or those up to the diagonal.
    pub mask: Mask<'a>,
    /// How scores are modified; by default not at all. [`relative_bias_gradient`](super::relative_bias_gradient) has the gradient of a
    /// relative bias.
    pub score: Score<'a>,
    /// Attention sinks: for each query head a score that each row has in addition to those of its keys, with a value of 0 (gpt-oss).
    /// It is not scaled or modified. [`sink_gradients`](super::sink_gradients) has their gradients.
    pub sinks: Option<View<'a, f32>>,
    /// Keys and values in a cache, for the forward pass.
    pub cache: Option<Cache<'a>>,
    /// Dequantization scales of 8-bit floats, for the forward pass; 1 by default.
    pub descale: Option<Descale<'a>>,
    /// Factor of the scores, positive; 1/√d by default.
    pub scale: Option<f32>,
    /// Precision of dots of f32 operands: by default tf32x3 on a GPU and IEEE on the CPU. Dots of other types are exact
    /// before accumulation.
    pub precision: Option<Precision>,
    /// Tile sizes of the forward kernel. `None`, here and in the next two fields, selects those of the autotuner
    /// ([`tilewright_runtime::autotune`]), or else the defaults of [`config`](super::config).
    pub forward_tiles: Option<Tiles>,
    /// Tile sizes of the kernel that computes dK and dV.
    pub dkdv_tiles: Option<Tiles>,
    /// Tile sizes of the kernel that computes dQ.
    pub dq_tiles: Option<Tiles>,
    /// How the backward pass computes dQ.
    pub backward: Backward,
    /// Largest number of splits of the loop over keys or queries (split-KV). By default, loops are split only on a GPU
    /// and without a mask of ranges, and only if the grid would be sub-wave otherwise. All splits but the last have the same number of rows, a power
    /// of two of at least 256.
    pub num_splits: Option<usize>,
    /// The stream of the launches; the device's own by default. Inputs must be ready on this stream: use events to order it after
    /// others. Where temporary memory is needed, the device's own stream waits for the launches.
    pub stream: Option<Stream>,
}

/// A cache of keys and values, of which each batch entry has some. The diagonal of the causal mask ends at the last of them.
#[derive(Clone, Copy)]
pub struct Cache<'a> {
    /// The number of keys of each entry, i32 [batch], which is read on the device: numbers below 0 count as 0, and larger ones
    /// than there is room for as that.
    pub lengths: View<'a, i32>,
    /// The pages of each entry, i32 [batch, most], where k and v are [pages, heads_kv, rows, d]: key j is row j mod `rows` of the
    /// page in column ⌊j / rows⌋ (paged attention: Kwon and others, 2023). A page that is not there counts as zeros. Without a
    /// table, k and v are [batch, heads_kv, most keys, d]. Loops are split by the keys that there is room for.
    pub table: Option<tensor::Tensor<'a, i32, 2>>,
    /// Where entries have different numbers of queries, as in continuous batching: q and O have one batch entry, with the rows of all
    /// entries one after the other, and this is the first row of each and the end of the last (`cu_seqlens_q`), i32 [batch + 1]: numbers
    /// from 0 to n_q that do not decrease. They are read on the device. Rows after the last entry see no key: O is 0, and L −∞ or the sink.
    /// Other numbers give wrong rows of O, or leave some as they are.
    pub row_starts: Option<tensor::Tensor<'a, i32, 1>>,
}

/// Dequantization scales of 8-bit floats: queries, keys and values are the elements of q, k and v times them. A negative one gives NaN;
/// without scales they are 1.
///
/// [batch, heads, blocks], with a scale for each block of 128 rows, as [`quantize`](super::quantize()) makes them, or one for all rows, as in a
/// cache. A stride of 0 repeats a scale.
#[derive(Clone, Copy)]
pub struct Descale<'a> {
    pub q: Option<tensor::Tensor<'a, f32, 3>>,
    /// As many blocks as `v`.
    pub k: tensor::Tensor<'a, f32, 3>,
    pub v: tensor::Tensor<'a, f32, 3>,
}

impl<'a> Descale<'a> {
    /// One scale for each head of k and of v, the same for all batch entries: those of the cache, with [`Cache::row_starts`] its sequences.
    ///
    /// # Errors
    /// Other numbers of scales than that of k.
    pub fn per_head(batch: usize, k: View<'a, f32>, v: View<'a, f32>) -> Result<Descale<'a>> {
        let heads = k.len();
        let of_heads = |scales| tensor::Tensor::strided(scales, [batch, heads, 1], [0, 1, 0]);
        expect(v.len() == heads, "v_descale", format_args!("as many scales as `k_descale`, {heads}"), v.len())?;
        Ok(Descale { q: None, k: of_heads(k)?, v: of_heads(v)? })
    }
}

impl<'a> Cache<'a> {
    /// A cache without pages.
    pub fn new(lengths: View<'a, i32>) -> Cache<'a> {
        Cache { lengths, table: None, row_starts: None }
    }
}

impl<'a> Options<'a> {
    /// The default options, with or without the causal mask.
    pub fn new(causal: bool) -> Options<'a> {
        Options { causal, ..Options::default() }
    }

    /// How the backward pass computes dQ for k and v of these shapes: [`Backward::TwoPass`], [`Backward::OnePass`] or
    /// [`Backward::Ordered`].
    pub fn form<T: Element>(&self, device: &Device, k: [usize; 4], v: [usize; 4]) -> Backward {
        let (target, bytes) = (device.target(), T::DTYPE.size());
        let k = [k[0], k[1], k[2], k[3].max(v[3])];
        let form = match self.backward {
            Backward::Auto if one_pass_is_faster(&target, bytes, k) => Backward::OnePass,
            Backward::Deterministic if ordered_is_faster(&target, bytes, k) => Backward::Ordered,
            Backward::Auto | Backward::Deterministic => Backward::TwoPass,
            given => given,
        };
        match form {
            // Ranges decide which programs add to a tile of dQ, so that their order is not known.
            Backward::Ordered if !self.mask.function.is_dense() => Backward::TwoPass,
            form => form,
        }
    }

    /// The number of sequences that are packed beside a cache; `None` where entries are those of q.
    fn sequences(&self) -> Option<usize> {
        Some(self.cache?.row_starts?.shape()[0].saturating_sub(1))
    }

    /// Whether the backward pass for k and v of these shapes takes one pass.
    pub fn is_one_pass<T: Element>(&self, device: &Device, k: [usize; 4], v: [usize; 4]) -> bool {
        self.form::<T>(device, k, v) != Backward::TwoPass
    }

    /// Runs launches on the stream of the options after the work on the device's own stream, which then waits for them: memory is
    /// allocated, filled and freed in the order of that stream.
    pub(super) fn in_stream_order<R>(&self, device: &Device, launches: impl FnOnce() -> Result<R>) -> Result<R> {
        let Some(stream) = &self.stream else { return launches() };
        stream.wait(&device.stream().record()?)?;
        let result = launches();
        device.stream().wait(&stream.record()?)?;
        result
    }

    /// A launch configuration without tile sizes.
    pub(super) fn base_config(&self) -> LaunchConfig {
        LaunchConfig { stream: self.stream.clone(), ..LaunchConfig::default() }
    }

    pub(super) fn launch(&self, tiles: Tiles) -> LaunchConfig {
        // The kernels give their grids.
        tiles.config().launch_config(&self.base_config(), 0)
    }

    /// A launch configuration of the row-wise kernels.
    pub(super) fn launch_rows(&self) -> LaunchConfig {
        self.base_config().num_warps(4).num_stages(1)
    }
}

/// A problem whose arguments are valid, with the scale and the precision that the options give.
#[derive(Clone, Copy)]
pub(super) struct Problem<'a> {
    pub device: &'a Device,
    pub options: &'a Options<'a>,
    /// The larger head dimension: of q and k, or of v.
    pub d: usize,
    /// Query heads whose rows the forward kernel takes as those of one head: see [`packed_heads`].
    pub pack: usize,
    pub causal: bool,
    pub scale: f32,
    pub precision: Precision,
    /// Rows of a page of the cache; 0 without pages.
    pub page: usize,
    /// How the backward pass computes dQ: [`Options::form`].
    pub form: Backward,
    pub mask_data: View<'a, i32>,
    pub score_data: View<'a, f32>,
}

/// The shape of k as if it were not in pages: [batch, heads_kv, most keys, d].
fn unpaged(k: [usize; 4], options: &Options) -> [usize; 4] {
    match options.cache.and_then(|cache| cache.table) {
        Some(table) => [table.shape()[0], k[1], table.shape()[1].saturating_mul(k[2]), k[3]],
        None => k,
    }
}

/// The shape of q as if its sequences were batch entries, of their mean length.
fn unpacked([batch, heads, n_q, d]: [usize; 4], options: &Options) -> [usize; 4] {
    match options.sequences() {
        Some(sequences) => [sequences.max(1), heads, n_q.div_ceil(sequences.max(1)), d],
        None => [batch, heads, n_q, d],
    }
}

/// Largest number of rows: tile indices and causal differences stay well within i32.
pub(super) const MAX_ROWS: usize = 1 << 30;
/// Largest head dimension: a tile holds a whole row.
pub(super) const MAX_D: usize = 256;

/// Fails unless the argument is valid.
pub(super) fn expect(is_valid: bool, name: &'static str, expected: impl Display, found: impl Display) -> Result<()> {
    if is_valid {
        return Ok(());
    }
    Err(Error::Argument { kernel: "attention".into(), name, expected: expected.to_string(), found: found.to_string() })
}

pub(super) fn expect_shape(name: &'static str, found: [usize; 4], expected: [usize; 4]) -> Result<()> {
    tensor::expect_shape("attention", name, found, expected)
}

impl<'a> Problem<'a> {
    pub fn is_one_pass(&self) -> bool {
        self.form != Backward::TwoPass
    }

    /// As [`Problem::new`], for the backward pass.
    pub fn of_backward<T: Element + Dtype>(
        device: &'a Device,
        Saved { q, k, v, o, lse, d_o }: &Saved<T>,
        options: &'a Options<'a>,
    ) -> Result<Problem<'a>> {
        let p = Problem::new::<T, T>(device, [q, k, v].map(|x| x.shape()), options)?;
        expect(options.cache.is_none(), "cache", "none: attention of a cache has no backward pass", "a cache")?;
        expect(options.descale.is_none(), "descale", "none: 8-bit floats have no backward pass", "scales")?;
        expect_shape("o", o.shape(), o_shape(q, v))?;
        expect_shape("d_o", d_o.shape(), o_shape(q, v))?;
        expect_len("lse", lse.len(), rows(q.shape()), ", one per row of q")?;
        Ok(p)
    }

    fn new<T: Element + Dtype, C: Element + Dtype>(
        device: &'a Device,
        [q, k, v]: [[usize; 4]; 3],
        options: &'a Options<'a>,
    ) -> Result<Problem<'a>> {
        let [batch, heads, n_q, d] = q;
        let [_, heads_kv, n_k, _] = unpaged(k, options);
        let row_starts = options.cache.and_then(|cache| cache.row_starts);
        // Entries of keys: sequences.
        let entries = options.sequences().unwrap_or(batch);
        let d_v = v[3];
        let (is_8_bit, has_cache) = (T::dtype().is_f8(), options.cache.is_some());
        let is_valid = C::DTYPE == T::DTYPE || has_cache && C::dtype().is_f8();
        let expected = format_args!("elements of type {}, as for q; beside a cache also 8-bit floats", T::DTYPE.name());
        expect(is_valid, "k", expected, C::DTYPE.name())?;
        expect(!(is_8_bit && has_cache), "q", "elements of f16, bf16 or f32 beside a cache", T::DTYPE.name())?;
        for (name, d, shape) in [("q", d, q), ("v", d_v, v)] {
            let found = format_args!("shape {shape:?}");
            expect((1..=MAX_D).contains(&d), name, format_args!("a head dimension of 1 to {MAX_D}"), found)?;
        }
        if let Some(Cache { lengths, table, .. }) = options.cache {
            expect(
                lengths.len() == entries,
                "lengths",
                format_args!("a number for each of {entries} batch entries"),
                lengths.len(),
            )?;
            let rows = table.map_or(entries, |table| table.shape()[0]);
            expect(rows == entries, "table", format_args!("a row for each of {entries} batch entries"), rows)?;
            if let Some(starts) = row_starts {
                let expected = "one batch entry, whose rows are those of all sequences";
                expect(batch == 1, "q", expected, batch)?;
                let expected = "the first row of each of up to 2^20 - 1 sequences, and the end of the last";
                let found = format_args!("{} numbers", starts.shape()[0]);
                expect((1..MAX_SEQUENCES as usize).contains(&entries), "row_starts", expected, found)?;
                let is_relative = ptr::eq(options.score.function, &RELATIVE);
                let expected = "none beside `row_starts`, as its elements depend on the number of rows";
                expect(!is_relative, "relative_bias", expected, "some")?;
            }
            let is_documents = ptr::eq(options.mask.function, &DOCUMENTS);
            expect(
                !is_documents,
                "mask",
                "no packed sequences beside a cache: `row_starts` of the cache has those of queries",
                "some",
            )?;
        }
        if let Some(descale) = options.descale {
            let expected = "8-bit floats, which have scales";
            expect(C::dtype().is_f8(), "k", expected, C::DTYPE.name())?;
            expect(is_8_bit || descale.q.is_none(), "q", expected, T::DTYPE.name())?;
            let has_blocks = descale.k.shape()[2] > 1;
            let expected = "one scale for all rows of a head, beside a cache";
            expect(is_8_bit || !has_blocks, "k_descale", expected, format_args!("{}", descale.k.shape()[2]))?;
            expect_descale(descale, [batch, heads, n_q], [entries, heads_kv, n_k])?;
        }
        let is_paged = options.cache.is_some_and(|cache| cache.table.is_some());
        let [pages, _, rows, _] = k;
        expect_shape("k", k, [if is_paged { pages } else { entries }, heads_kv, rows, d])?;
        expect_shape("v", v, [pages, heads_kv, rows, d_v])?;
        let has_groups = if heads_kv == 0 { heads == 0 } else { heads.is_multiple_of(heads_kv) };
        let expected = "a number of heads that divides the number of heads of q";
        expect(has_groups, "k", expected, format_args!("{heads_kv} heads; q has {heads}"))?;
        let expected = format_args!("at most {MAX_ROWS} rows, as for k");
        expect(n_q.max(n_k) <= MAX_ROWS, "q", expected, format_args!("{n_q} rows, and {n_k} of k"))?;
        let scale = options.scale.unwrap_or(1.0 / (d as f32).sqrt());
        expect(scale > 0.0 && scale.is_finite(), "scale", "a positive finite number", scale)?;
        let precision = match options.precision {
            Some(precision) if T::DTYPE.size() == 4 => precision,
            None if T::DTYPE.size() == 4 && device.is_cuda() => Precision::Tf32x3,
            _ => Precision::Ieee,
        };
        let form = options.form::<T>(device, k, v);
        if let Some(sinks) = options.sinks {
            let expected = format_args!("a score for each of {heads} heads");
            expect(sinks.len() == heads, "sinks", expected, format_args!("{} scores", sinks.len()))?;
        }
        let mask_data = options.mask.data.unwrap_or(View::empty(device));
        let score_data = options.score.data.unwrap_or(View::empty(device));
        expect_mask(&options.mask, mask_data.len(), [n_q, n_k])?;
        expect_score(&options.score, score_data.len(), heads, [n_q, n_k])?;
        // One row sees all keys.
        let causal = options.causal && !(n_q == 1 && options.mask.function.is_dense());
        let (d, pack) = (d.max(d_v), packed_heads(q, k, options));
        let page = if is_paged { rows } else { 0 };
        Ok(Problem { device, options, d, pack, page, causal, scale, precision, form, mask_data, score_data })
    }
}

/// Checks the shapes of scales, of queries [batch, heads, rows] and of keys of these extents.
fn expect_descale(Descale { q: of_q, k: of_k, v: of_v }: Descale, q: [usize; 3], k: [usize; 3]) -> Result<()> {
    let scales = [("q_descale", of_q, q), ("k_descale", Some(of_k), k), ("v_descale", Some(of_v), k)];
    for (name, scales, [batch, heads, rows]) in scales {
        let Some(scales) = scales else { continue };
        let (found, blocks) = (scales.shape(), scaled_blocks(rows));
        let of_blocks = if blocks > 1 { format!(" or {blocks}") } else { String::new() };
        let expected = format_args!("scales of {batch} batch entries × {heads} heads × 1{of_blocks} blocks of rows");
        let is_valid = [[batch, heads, blocks], [batch, heads, 1]].contains(&found);
        expect(is_valid, name, expected, format_args!("{} × {} × {}", found[0], found[1], found[2]))?;
    }
    let [blocks_k, blocks_v] = [of_k, of_v].map(|scales| scales.shape()[2]);
    expect(
        blocks_k == blocks_v,
        "v_descale",
        format_args!("scales of {blocks_k} blocks of rows, as `k_descale`"),
        blocks_v,
    )
}

/// Checks the arguments of the masks that are known here: those of others are bounded by what their launch reads.
fn expect_mask(&Mask { function, number, .. }: &Mask, data_len: usize, [n_q, n_k]: [usize; 2]) -> Result<()> {
    if ptr::eq(function, &DOCUMENTS) {
        let len = 2 * (n_q + n_k);
        let expected = format_args!("ranges of {n_q} rows and {n_k} keys, {len} numbers");
        let found = format_args!("{data_len} numbers, of {number} rows");
        expect(data_len == len && number as usize == n_q, "mask", expected, found)?;
    }
    if ptr::eq(function, &WINDOW) {
        let max = MAX_ROWS as i32 - 1;
        expect((0..=max).contains(&number), "window", format_args!("0 to {max} keys"), number)?;
    }
    if ptr::eq(function, &PREFIX) {
        expect((0..=MAX_ROWS as i32).contains(&number), "prefix", format_args!("0 to {MAX_ROWS} keys"), number)?;
    }
    Ok(())
}

/// As [`expect_mask`], for score functions.
fn expect_score(
    &Score { function, number, .. }: &Score,
    data_len: usize,
    heads: usize,
    [n_q, n_k]: [usize; 2],
) -> Result<()> {
    let is_any_of = |functions: [_; 2]| functions.into_iter().any(|f| ptr::eq(function, f));
    if is_any_of([&SOFTCAP, &SOFTCAP_ALIBI]) {
        // Smaller caps have no finite reciprocal times 2 log₂ e.
        const MIN: f32 = 1e-30;
        // The error of a score is about 10⁻⁷ times its cap: at most 10⁻³, which is that factor of a probability.
        const MAX: f32 = 1e4;
        let expected = format_args!(
            "a number from {MIN:e} to {MAX} (scores have an error of 1e-7 times it; one that is larger hardly changes \
             scores: leave it out)"
        );
        expect((MIN..=MAX).contains(&number), "softcap", expected, number)?;
    }
    if is_any_of([&ALIBI, &SOFTCAP_ALIBI]) {
        let expected = format_args!("a slope for each of {heads} heads");
        expect(data_len == heads, "alibi_slopes", expected, format_args!("{data_len} slopes"))?;
        // Positions are exact in f32.
        const MAX_ROWS: usize = 1 << 24;
        let expected = format_args!("at most {MAX_ROWS} rows and keys");
        expect(n_q.max(n_k) <= MAX_ROWS, "alibi_slopes", expected, format_args!("{n_q} rows and {n_k} keys"))?;
    }
    if ptr::eq(function, &RELATIVE) {
        let width = relative_bias_len(n_q, n_k);
        let expected =
            format_args!("{width} numbers, for distances of {n_q} rows and {n_k} keys, for each of {heads} heads");
        expect(data_len == heads.saturating_mul(width), "relative_bias", expected, format_args!("{data_len} numbers"))?;
    }
    Ok(())
}

/// The number of distances between rows and keys: of the elements of a relative bias, per head. Saturates.
pub fn relative_bias_len(n_q: usize, n_k: usize) -> usize {
    n_q.saturating_add(n_k).saturating_sub(1)
}

/// Computes O and L of q [batch, heads, n_q, d], k [batch, heads_kv, n_k, d] and v [batch, heads_kv, n_k, d_v], as
/// [`flash_attention_fwd`](super::forward::FlashAttentionFwd) defines them. O is dense [batch, heads, n_q, d_v], and L
/// [batch, heads, n_q].
///
/// Of q, k and v in 8-bit floats (`F8E4M3`, `F8E5M2`), possibly with scales ([`Options::descale`]), the matrix instructions multiply 8-bit
/// numbers where the target has them, and O is bf16. V is first copied, transposed.
///
/// # Errors
/// Shapes that do not match; launch errors.
pub fn forward<T: OperandElement, C: Element + Dtype>(
    device: &Device,
    q: Tensor<T>,
    k: Tensor<C>,
    v: Tensor<C>,
    options: &Options,
) -> Result<(Buffer<T::Result>, Buffer<f32>)> {
    Problem::new::<T, C>(device, [q.shape(), k.shape(), v.shape()], options)?;
    let (shape, needed) = (o_shape(&q, &v), forward_workspace::<T>(device, q.shape(), k.shape(), v.shape(), options));
    let mut o = Buffer::uninit(device, shape.iter().product())?;
    let mut lse = Buffer::uninit(device, rows(shape))?;
    let mut workspace = Buffer::uninit(device, needed)?;
    let target = TensorMut::dense(o.view_mut(), shape)?;
    options.in_stream_order(device, || {
        forward_into(device, q, k, v, target, lse.view_mut(), workspace.view_mut(), options)
    })?;
    Ok((o, lse))
}

/// The number of f32 elements in the workspace of [`forward_into`], for q, k and v of these shapes: 0 unless the loop over
/// keys is split; then room for O and L of each split. Saturates for shapes that do not fit any memory.
pub fn forward_workspace<T: Element>(
    device: &Device,
    q: [usize; 4],
    k: [usize; 4],
    v: [usize; 4],
    options: &Options,
) -> usize {
    let split = forward_split::<T>(device, q, k, options);
    if split.is_split() { product(&[split.count, rows(q), v[3].saturating_add(1)]) } else { 0 }
}

/// The split of the loops over keys, for q and k of these shapes.
fn forward_split<T: Element>(device: &Device, q: [usize; 4], k: [usize; 4], options: &Options) -> KvSplit {
    let ([batch, heads, n_q, d], pack) = (unpacked(q, options), packed_heads(q, k, options));
    let (q, causal) = ([batch, heads / pack, n_q.saturating_mul(pack), d], options.causal && n_q > 1);
    KvSplit::new::<T>(Pass::Forward, device, q, unpaged(k, options), causal, options)
}

/// The shape of O.
fn o_shape<T: Element, C: Element>(q: &Tensor<T>, v: &Tensor<C>) -> [usize; 4] {
    let [batch, heads, n_q, _] = q.shape();
    [batch, heads, n_q, v.shape()[3]]
}

/// Queries of a head, at most, in groups whose heads are packed without a cache.
const MAX_PACKED: usize = 16;

/// The query heads whose rows the forward kernel takes as those of one head, so that it loads their keys once: those of a group
/// beside a cache, and where they have few rows, if no modifier distinguishes them; else 1.
fn packed_heads([_, heads, n_q, _]: [usize; 4], k: [usize; 4], options: &Options) -> usize {
    let are_alike = options.mask.function.ignores_head() && options.score.function.ignores_head();
    let is_group = k[1] > 0 && heads.is_multiple_of(k[1]);
    let fits = n_q.saturating_mul(heads) <= MAX_ROWS && options.descale.is_none_or(|descale| descale.q.is_none());
    let is_few = options.cache.is_some() || (1..=MAX_PACKED).contains(&n_q);
    if are_alike && is_group && fits && is_few { (heads / k[1]).max(1) } else { 1 }
}

/// The product of extents; saturates.
pub(super) fn product(extents: &[usize]) -> usize {
    extents.iter().fold(1, |product, &extent| product.saturating_mul(extent))
}

/// As [`forward`], into memory of the caller: o [batch, heads, n_q, d_v], lse dense [batch, heads, n_q]. `workspace` has at least
/// [`forward_workspace`] elements.
///
/// # Errors
/// As [`forward`].
pub fn forward_into<T: OperandElement, C: Element + Dtype>(
    device: &Device,
    q: Tensor<T>,
    k: Tensor<C>,
    v: Tensor<C>,
    o: TensorMut<T::Result>,
    lse: ViewMut<f32>,
    workspace: ViewMut<f32>,
    options: &Options,
) -> Result<()> {
    let p = Problem::new::<T, C>(device, [q.shape(), k.shape(), v.shape()], options)?;
    expect_shape("o", o.shape(), o_shape(&q, &v))?;
    expect_len("lse", lse.len(), rows(q.shape()), ", one per row of q")?;
    let needed = forward_workspace::<T>(device, q.shape(), k.shape(), v.shape(), options);
    expect_len("workspace", workspace.len(), needed, "")?;
    if !T::dtype().is_f8() {
        return launch_split_forward(&p, q, [k, v], o, lse, workspace);
    }
    let mut transposed = Transposed::uninit(&p, v.shape())?;
    options.in_stream_order(device, || {
        transposed.fill(&p, v)?;
        let options = Options { descale: transposed.descale(options.descale)?, ..options.clone() };
        let p = Problem { options: &options, ..p };
        launch_split_forward(&p, q, [k, transposed.tensor()?], o, lse, workspace)
    })
}

/// The forward pass, in splits where the grid would be sub-wave.
fn launch_split_forward<T: OperandElement, C: Element + Dtype>(
    p: &Problem,
    q: Tensor<T>,
    [k, v]: [Tensor<C>; 2],
    mut o: TensorMut<T::Result>,
    mut lse: ViewMut<f32>,
    workspace: ViewMut<f32>,
) -> Result<()> {
    let split = forward_split::<T>(p.device, q.shape(), k.shape(), p.options);
    if !split.is_split() {
        return launch_forward(p, q, [k, v], &mut o, &mut lse, split);
    }
    let (mut partial_o, rest) = split_results(workspace, o_shape(&q, &v), split)?;
    let (mut partial_lse, _) = rest.split_at(rows(partial_o.shape()))?;
    launch_forward(p, q, [k, v], &mut partial_o, &mut partial_lse, split)?;
    let [q_tile, split_tile] = combine_tiles(split, q.shape()[2], v.shape()[3]);
    FlashAttentionFwdCombine {
        partial_o: &partial_o.as_view(),
        partial_lse: &partial_lse,
        o: &mut o,
        lse: &mut lse,
        num_splits: split.count as i32,
        q_tile,
        split_tile,
    }
    .launch_with(p.device, &p.options.launch_rows())
}

/// From the beginning of the workspace, a tensor for the results of the splits of a tensor of this shape; and the rest.
fn split_results<'a>(
    workspace: ViewMut<'a, f32>,
    [batch, heads, rows, d]: [usize; 4],
    split: KvSplit,
) -> Result<(TensorMut<'a, f32>, ViewMut<'a, f32>)> {
    let shape = [batch * split.count, heads, rows, d];
    let (results, rest) = workspace.split_at(shape.iter().product())?;
    Ok((TensorMut::dense(results, shape)?, rest))
}

pub(super) fn expect_len(name: &'static str, found: usize, needed: usize, of: &str) -> Result<()> {
    expect(found >= needed, name, format_args!("at least {needed} elements{of}"), found)
}

/// The number of rows of a tensor of this shape.
pub(super) fn rows([batch, heads, n, _]: [usize; 4]) -> usize {
    product(&[batch, heads, n])
}

/// The inputs of the backward pass: inputs and outputs of the forward pass, and the gradient of O.
#[derive(Clone, Copy, Debug)]
pub struct Saved<'a, T: Element> {
    pub q: Tensor<'a, T>,
    pub k: Tensor<'a, T>,
    pub v: Tensor<'a, T>,
    pub o: Tensor<'a, T>,
    /// Dense [batch, heads, n_q].
    pub lse: View<'a, f32>,
    pub d_o: Tensor<'a, T>,
}

/// The number of f32 elements in the workspace of [`backward_into`], for q, k and v of these shapes: two per query row;
/// with one pass the sums of dQ; and, if loops are split, the gradients of each split. Saturates for shapes that fit no
/// memory.
pub fn backward_workspace<T: Element>(
    device: &Device,
    q: [usize; 4],
    k: [usize; 4],
    v: [usize; 4],
    options: &Options,
) -> usize {
    let [keys, queries] = backward_splits::<T>(device, q, k, options);
    let partial_len = |shape: [usize; 4], split: KvSplit| {
        if split.is_split() { product(&shape).saturating_mul(split.count) } else { 0 }
    };
    let partial_dkdv_len = partial_len(k, keys).saturating_add(partial_len(v, keys));
    let gradients_len = match options.is_one_pass::<T>(device, k, v) {
        false => partial_dkdv_len.max(partial_len(q, queries)),
        true => dq_sum_len(q).saturating_add(partial_dkdv_len),
    };
    aligned_rows(q).saturating_mul(2).saturating_add(gradients_len)
}

/// The splits of the loops of the dK/dV kernel and of the dQ kernel.
fn backward_splits<T: Element>(device: &Device, q: [usize; 4], k: [usize; 4], options: &Options) -> [KvSplit; 2] {
    [Pass::Dkdv, Pass::Dq].map(|pass| KvSplit::new::<T>(pass, device, q, k, options.causal, options))
}

/// The number of f32 elements of the sums of dQ ([`dq_sum_block`](super::backward_rows::dq_sum_block)).
fn dq_sum_len([batch, heads, n_q, d]: [usize; 4]) -> usize {
    product(&[batch, heads, saturating_multiple(n_q, DQ_SUM_ROWS), d_tile(d)])
}

/// Rows of one workspace vector, rounded up so that the second vector is aligned like the first.
pub(super) fn aligned_rows(q_shape: [usize; 4]) -> usize {
    saturating_multiple(rows(q_shape), 64)
}

/// The next multiple; saturates.
fn saturating_multiple(n: usize, of: usize) -> usize {
    n.checked_next_multiple_of(of).unwrap_or(usize::MAX)
}

/// The gradients of q, k and v, dense, in their shapes.
pub struct Gradients<T: Element> {
    pub dq: Buffer<T>,
    pub dk: Buffer<T>,
    pub dv: Buffer<T>,
}

/// Computes the gradients of q, k and v. Those of sinks are [`sink_gradients`](super::sink_gradients), and that of a relative bias
/// [`relative_bias_gradient`](super::relative_bias_gradient).
///
/// # Errors
/// Shapes that do not match; launch errors.
pub fn backward<T: FloatElement>(device: &Device, saved: Saved<T>, options: &Options) -> Result<Gradients<T>> {
    Problem::of_backward(device, &saved, options)?;
    let shapes @ [q, k, v] = [saved.q, saved.k, saved.v].map(|tensor| tensor.shape());
    let [dq, dk, dv] = shapes.map(|shape| Buffer::uninit(device, shape.iter().product()));
    let (mut dq, mut dk, mut dv) = (dq?, dk?, dv?);
    let mut workspace = Buffer::uninit(device, backward_workspace::<T>(device, q, k, v, options))?;
    let (dq_out, dk_out, dv_out) = (dq.tensor_mut(q)?, dk.tensor_mut(k)?, dv.tensor_mut(v)?);
    options.in_stream_order(device, || {
        backward_into(device, saved, dq_out, dk_out, dv_out, workspace.view_mut(), options)
    })?;
    Ok(Gradients { dq, dk, dv })
}

/// As [`backward`], into memory of the caller. `workspace` has at least [`backward_workspace`] elements.
///
/// # Errors
/// As [`backward`].
pub fn backward_into<T: FloatElement>(
    device: &Device,
    saved: Saved<T>,
    mut dq: TensorMut<T>,
    mut dk: TensorMut<T>,
    mut dv: TensorMut<T>,
    workspace: ViewMut<f32>,
    options: &Options,
) -> Result<()> {
    let p = Problem::of_backward(device, &saved, options)?;
    let [q_shape, k_shape, v_shape] = [saved.q, saved.k, saved.v].map(|tensor| tensor.shape());
    let gradients = [("dq", dq.shape(), q_shape), ("dk", dk.shape(), k_shape), ("dv", dv.shape(), v_shape)];
    for (name, shape, expected) in gradients {
        expect_shape(name, shape, expected)?;
    }
    let needed = backward_workspace::<T>(device, q_shape, k_shape, v_shape, options);
    expect_len("workspace", workspace.len(), needed, "")?;
    let (mut delta, rest) = workspace.split_at(aligned_rows(q_shape))?;
    let (mut lse2, rest) = rest.split_at(aligned_rows(q_shape))?;
    let (mut dq_sum, mut rest) = rest.split_at(if p.is_one_pass() { dq_sum_len(q_shape) } else { 0 })?;
    let [dkdv_split, dq_split] = backward_splits::<T>(device, q_shape, k_shape, options);

    launch_preprocess(&p, saved, [&mut delta, &mut lse2], &mut dq_sum, p.is_one_pass())?;
    let rows = RowVectors { lse2: lse2.as_view(), delta: delta.as_view() };
    if dkdv_split.is_split() {
        let (mut partial_dk, rest) = split_results(rest.reborrow(), k_shape, dkdv_split)?;
        let (mut partial_dv, _) = split_results(rest, v_shape, dkdv_split)?;
        launch_dkdv(&p, saved, rows, &mut partial_dk, &mut partial_dv, &mut dq_sum, dkdv_split)?;
        launch_postprocess(&p, partial_dk.as_view(), &mut dk, dkdv_split)?;
        launch_postprocess(&p, partial_dv.as_view(), &mut dv, dkdv_split)?;
    } else {
        launch_dkdv(&p, saved, rows, &mut dk, &mut dv, &mut dq_sum, dkdv_split)?;
    }
    if p.is_one_pass() {
        launch_postprocess(&p, dq_sum.as_view(), &mut dq, KvSplit::UNSPLIT)
    } else if dq_split.is_split() {
        // Reuses the memory of the partial dK and dV, which are reduced by now.
        let (mut partial_dq, _) = split_results(rest, q_shape, dq_split)?;
        launch_dq(&p, saved, rows, &mut partial_dq, dq_split)?;
        launch_postprocess(&p, partial_dq.as_view(), &mut dq, dq_split)
    } else {
        launch_dq(&p, saved, rows, &mut dq, dq_split)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspaces_of_shapes_that_fit_no_memory_saturate() {
        const MAX: usize = usize::MAX;
        let options = |num_splits, backward| Options { num_splits, backward, ..Options::default() };
        for device in [Device::cpu(), Device::simulated(GpuArch::Sm90a)] {
            for shape in [[MAX, 2, 2, 16], [2, MAX, 2, 16], [2, 2, MAX, 16], [2, 2, 2, MAX], [MAX; 4]] {
                for (splits, backward) in [(None, Backward::Auto), (Some(4), Backward::OnePass)] {
                    let (options, many) = (options(splits, backward), [2, 2, 1 << 20, 16]);
                    let lens = [
                        forward_workspace::<f16>(&device, shape, shape, shape, &options),
                        forward_workspace::<f32>(&device, shape, many, many, &options),
                        backward_workspace::<f16>(&device, shape, shape, shape, &options),
                        backward_workspace::<f32>(&device, many, shape, shape, &options),
                    ];
                    assert!(lens[0] == 0 || lens[0] >= 1 << 62, "{shape:?}: {lens:?}");
                    assert!(lens[2] >= 8, "{shape:?}: {lens:?}");
                }
            }
        }
        let two = options(Some(2), Backward::OnePass);
        let (shape, device) = ([MAX, 2, 1024, 16], Device::cpu());
        assert_eq!(forward_workspace::<f16>(&device, shape, shape, shape, &two), MAX);
        assert_eq!(backward_workspace::<f16>(&device, shape, shape, shape, &two), MAX);
        // Two splits of O and L; delta and L, the sums of dQ, and two splits of dK and dV.
        let (shape, v) = ([3, 2, 1024, 16], [3, 2, 1024, 24]);
        let rows = 3 * 2 * 1024;
        assert_eq!(forward_workspace::<f16>(&device, shape, shape, v, &two), 2 * rows * 25);
        assert_eq!(backward_workspace::<f16>(&device, shape, shape, v, &two), rows * (2 + 16 + 2 * (16 + 24)));
    }

    /// The heads of a group are the rows of one head where each has few, and no modifier distinguishes them.
    #[test]
    fn groups_of_few_queries_are_packed() {
        let (q, k) = ([3, 8, 5, 16], [3, 2, 1024, 24]);
        let plain = Options::new(true);
        assert_eq!(packed_heads(q, k, &plain), 4);
        let device = Device::cpu();
        let slopes = Buffer::<f32>::zeros(&device, 8).unwrap();
        let window = Options { mask: Mask::window(3), ..Options::new(true) };
        let alibi = Options { score: Score::new(None, Some(slopes.view())), ..Options::default() };
        assert_eq!(packed_heads(q, k, &window), 4);
        let cases =
            [(q, k, &alibi), ([3, 8, 17, 16], k, &plain), ([3, 8, 0, 16], k, &plain), (q, [3, 8, 9, 16], &plain)];
        for (q, k, options) in cases {
            assert_eq!(packed_heads(q, k, options), 1);
        }
    }
}
