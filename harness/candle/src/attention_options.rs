//! Options of attention.

use candle_core::{DType, Device, Result, Tensor};
use tilewright::kernels;
use tilewright::kernels::attention::documents::document_ranges;
use tilewright::kernels::attention::{Backward, Cache, Descale, Mask, Options, Score, relative_bias_len};

use crate::check::{bad_argument, expect_dtype, expect_shape, same_device};
use crate::graph::grad_enabled;
use crate::memory::{OutputAlloc, Read, kernel_error};

/// Options of [`flash_attention`](crate::flash_attention).
///
/// ```
/// use tilewright_candle::AttentionOptions;
///
/// let options = AttentionOptions::new(true).with_window(1024).with_softcap(50.0).with_deterministic(false);
/// assert!(options.causal && options.window == Some(1024) && !options.deterministic);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Causal mask: row i attends only to the keys j ≤ i + (n_k − n_q).
    pub causal: bool,
    /// Factor of the scores, positive; 1/√d by default.
    pub scale: Option<f64>,
    /// Sliding window: each row sees this many keys before its diagonal, i + (n_k − n_q), the key on it, and without
    /// `causal` as many after it.
    pub window: Option<usize>,
    /// Prefix LM: each row sees this many first keys in addition to those up to its diagonal. It needs `causal`, and no
    /// window and packed sequences.
    pub prefix: Option<usize>,
    /// Softcap: a score s becomes c · tanh(s / c), c at most 10⁴.
    pub softcap: Option<f64>,
    /// ALiBi: the slopes mₕ of all query heads, f32 [heads], which get no gradient. A score s becomes
    /// s − mₕ · |i + (n_k − n_q) − j|, after the softcap.
    pub alibi_slopes: Option<Tensor>,
    /// Relative bias (T5), f32 [heads, n_q + n_k − 1], n_k the keys that there is room for: element n_q − 1 + t of a head is added to
    /// the scores of keys t places before their row's diagonal, i + (n_k − n_q) − j = t. It takes no softcap and no ALiBi beside it. A
    /// variable gets its gradient; O is copied for that.
    pub relative_bias: Option<Tensor>,
    /// Attention sinks, f32 [heads]: a score that each row of a query head has in addition to those of its keys, with a value of 0
    /// (gpt-oss). It is not scaled or modified. A variable gets its gradient; O is copied for that.
    pub sinks: Option<Tensor>,
    /// Packed sequences, each of which sees only itself. They have their own causal mask and window:
    /// `causal` here has to be theirs, and `window` `None`. All batch entries have the same sequences.
    pub packed: Option<PackedSequences>,
    /// A cache of keys and values, of which each batch entry has some; without gradients.
    pub cache: Option<KeyCache>,
    /// Whether the gradients have the same bits in every run, which is the default. Otherwise, where that is faster, the
    /// gradient of q is summed in any order: its last bits vary. Either way, one pass takes f32 scratch memory of the size of q.
    pub deterministic: bool,
}

impl Default for AttentionOptions {
    fn default() -> AttentionOptions {
        AttentionOptions::new(false)
    }
}

impl AttentionOptions {
    /// The default options, with or without the causal mask.
    pub fn new(causal: bool) -> AttentionOptions {
        AttentionOptions {
            causal,
            scale: None,
            window: None,
            prefix: None,
            softcap: None,
            alibi_slopes: None,
            relative_bias: None,
            sinks: None,
            packed: None,
            cache: None,
            deterministic: true,
        }
    }

    pub fn with_scale(self, scale: f64) -> AttentionOptions {
        AttentionOptions { scale: Some(scale), ..self }
    }

    pub fn with_window(self, window: usize) -> AttentionOptions {
        AttentionOptions { window: Some(window), ..self }
    }

    pub fn with_prefix(self, length: usize) -> AttentionOptions {
        AttentionOptions { prefix: Some(length), ..self }
    }

    pub fn with_softcap(self, softcap: f64) -> AttentionOptions {
        AttentionOptions { softcap: Some(softcap), ..self }
    }

    pub fn with_alibi_slopes(self, slopes: Tensor) -> AttentionOptions {
        AttentionOptions { alibi_slopes: Some(slopes), ..self }
    }

    pub fn with_relative_bias(self, bias: Tensor) -> AttentionOptions {
        AttentionOptions { relative_bias: Some(bias), ..self }
    }

    pub fn with_sinks(self, sinks: Tensor) -> AttentionOptions {
        AttentionOptions { sinks: Some(sinks), ..self }
    }

    pub fn with_packed(self, packed: PackedSequences) -> AttentionOptions {
        AttentionOptions { packed: Some(packed), ..self }
    }

    pub fn with_cache(self, cache: KeyCache) -> AttentionOptions {
        AttentionOptions { cache: Some(cache), ..self }
    }

    pub fn with_deterministic(self, deterministic: bool) -> AttentionOptions {
        AttentionOptions { deterministic, ..self }
    }

    /// # Errors
    /// Options that contradict each other, or tensors on another device than `q`.
    pub(crate) fn check(&self, q: &Tensor, k: &Tensor) -> Result<()> {
        let heads = q.dim(1)?;
        // In a cache with pages, the kernel knows how many keys there is room for.
        let is_paged = self.cache.as_ref().is_some_and(|cache| cache.table.is_some());
        let distances = match &self.relative_bias {
            Some(bias) if is_paged => bias.dims().last().copied().unwrap_or(0),
            _ => relative_bias_len(q.dim(2)?, k.dim(2)?),
        };
        let tensors = [
            ("alibi_slopes", &self.alibi_slopes, &[heads][..]),
            ("relative_bias", &self.relative_bias, &[heads, distances]),
            ("sinks", &self.sinks, &[heads]),
        ];
        for (name, numbers, shape) in tensors {
            let Some(numbers) = numbers else { continue };
            same_device("flash_attention", q, name, numbers)?;
            expect_dtype("flash_attention", name, numbers, DType::F32)?;
            expect_shape("flash_attention", name, numbers, shape)?;
            if name != "relative_bias" && !numbers.is_contiguous() {
                let found = format!("the strides {:?}", numbers.stride());
                return Err(bad_argument("flash_attention", name, "a contiguous tensor", found));
            }
        }
        if self.alibi_slopes.as_ref().is_some_and(|slopes| slopes.track_op() && grad_enabled()) {
            let expected = "slopes, which have no gradient: pass slopes.detach(),";
            return Err(bad_argument("flash_attention", "alibi_slopes", expected, "a variable or a result of one"));
        }
        if self.relative_bias.is_some() && (self.alibi_slopes.is_some() || self.softcap.is_some()) {
            let expected = "None beside alibi_slopes and softcap";
            return Err(bad_argument("flash_attention", "relative_bias", expected, "a tensor"));
        }
        if let Some(KeyCache { lengths, table, row_starts, .. }) = &self.cache {
            let tensors =
                [("lengths", Some(lengths), 1), ("table", table.as_ref(), 2), ("row_starts", row_starts.as_ref(), 1)];
            for (name, numbers, rank) in tensors {
                let Some(numbers) = numbers else { continue };
                same_device("flash_attention", q, name, numbers)?;
                expect_dtype("flash_attention", name, numbers, DType::I32)?;
                if numbers.rank() != rank || !numbers.is_contiguous() {
                    let expected = format!("a contiguous tensor of {rank} dimensions");
                    let found = format!("the shape {:?} with the strides {:?}", numbers.dims(), numbers.stride());
                    return Err(bad_argument("flash_attention", name, expected, found));
                }
            }
        }
        for (name, scales) in self.cache.iter().flat_map(KeyCache::scales) {
            same_device("flash_attention", q, name, scales)?;
            expect_dtype("flash_attention", name, scales, DType::F32)?;
            if !matches!(scales.rank(), 1 | 3) {
                let expected = "the shape [heads_kv] or [batch, heads_kv, 1]";
                return Err(bad_argument("flash_attention", name, expected, format!("{:?}", scales.dims())));
            }
        }
        if self.prefix.is_some() && (!self.causal || self.window.is_some() || self.packed.is_some()) {
            let expected = "no prefix, or causal attention without a window and packed sequences";
            return Err(bad_argument("flash_attention", "prefix", expected, format!("{:?}", self.prefix)));
        }
        let Some(packed) = &self.packed else { return Ok(()) };
        same_device("flash_attention", q, "packed", &packed.ranges)?;
        if self.window.is_some() {
            let expected = "None, since PackedSequences has a window of its own,";
            return Err(bad_argument("flash_attention", "window", expected, format!("{:?}", self.window)));
        }
        if (self.alibi_slopes.is_some() || self.relative_bias.is_some()) && !packed.same_lengths {
            let expected = "packed sequences with as many keys as rows each, beside ALiBi or a relative bias";
            return Err(bad_argument("flash_attention", "packed", expected, "other lengths"));
        }
        if self.causal != packed.causal {
            let expected = format!("the {} of the packed sequences", packed.causal);
            return Err(bad_argument("flash_attention", "causal", &expected, self.causal.to_string()));
        }
        Ok(())
    }

    /// Borrows the tensors of the modifiers.
    ///
    /// # Errors
    /// Tensors of other dtypes.
    pub(crate) fn modifiers(&self) -> Result<Modifiers<'_>> {
        let slopes = self.alibi_slopes.as_ref().map(Read::new).transpose()?;
        let relative_bias = self.relative_bias.as_ref().map(Read::new).transpose()?;
        let sinks = self.sinks.as_ref().map(Read::new).transpose()?;
        let ranges = self.packed.as_ref().map(|packed| Read::new(&packed.ranges)).transpose()?;
        let cache = self.cache.as_ref();
        let lengths = cache.map(|cache| Read::new(&cache.lengths)).transpose()?;
        let table = cache.and_then(|cache| cache.table.as_ref()).map(Read::new).transpose()?;
        let row_starts = cache.and_then(|cache| cache.row_starts.as_ref()).map(Read::new).transpose()?;
        let descale = cache.and_then(|cache| cache.descale.as_ref());
        let descale = descale.map(|[k, v]| -> Result<_> { Ok([Read::new(k)?, Read::new(v)?]) }).transpose()?;
        Ok(Modifiers { options: self, slopes, relative_bias, sinks, ranges, lengths, table, row_starts, descale })
    }
}

/// Options with the borrowed tensors of their modifiers.
pub(crate) struct Modifiers<'t> {
    options: &'t AttentionOptions,
    slopes: Option<Read<'t, f32>>,
    relative_bias: Option<Read<'t, f32>>,
    sinks: Option<Read<'t, f32>>,
    ranges: Option<Read<'t, i32>>,
    lengths: Option<Read<'t, i32>>,
    table: Option<Read<'t, i32>>,
    row_starts: Option<Read<'t, i32>>,
    descale: Option<[Read<'t, f32>; 2]>,
}

impl Modifiers<'_> {
    /// The options of the kernels.
    ///
    /// # Errors
    /// Slopes that are not contiguous.
    pub fn options(&self) -> Result<Options<'_>> {
        let AttentionOptions { causal, scale, window, prefix, softcap, deterministic, .. } = self.options;
        let mask = match (&self.ranges, window, prefix) {
            (Some(ranges), ..) => Mask::documents(ranges.view()?, self.options.packed.as_ref().map_or(0, |p| p.n_q)),
            (None, Some(size), _) => Mask::window(*size),
            (None, None, Some(length)) => Mask::prefix(*length),
            (None, None, None) => Mask::default(),
        };
        let slopes = self.slopes.as_ref().map(|slopes| slopes.view()).transpose()?;
        let score = match &self.relative_bias {
            Some(bias) => Score::relative(bias.view()?),
            None => Score::new(softcap.map(|cap| cap as f32), slopes),
        };
        let backward = if *deterministic { Backward::Deterministic } else { Backward::Auto };
        let scale = scale.map(|s| s as f32);
        let sinks = self.sinks.as_ref().map(|sinks| sinks.view()).transpose()?;
        let table = self.table.as_ref().map(|table| table.strided()).transpose()?;
        let lengths = self.lengths.as_ref().map(|lengths| lengths.view()).transpose()?;
        let row_starts = self.row_starts.as_ref().map(|starts| starts.strided()).transpose()?;
        let batch = lengths.map_or(0, |lengths| lengths.len());
        let descale = match &self.descale {
            Some([k, v]) => Some(Descale { q: None, k: scales_of(k, batch)?, v: scales_of(v, batch)? }),
            None => None,
        };
        let cache = lengths.map(|lengths| Cache { lengths, table, row_starts });
        let options = Options { mask, score, sinks, cache, descale, scale, backward, ..Options::new(*causal) };
        #[cfg(feature = "cuda")]
        if candle_core::cuda::gemm_reduced_precision_f32() {
            return Ok(Options { precision: Some(tilewright::prelude::Precision::Tf32), ..options });
        }
        Ok(options)
    }
}

/// Dequantization scales [heads_kv], which all `batch` entries have, or [batch, heads_kv, 1].
fn scales_of<'a>(scales: &'a Read<f32>, batch: usize) -> Result<kernels::Tensor<'a, f32, 3>> {
    let Ok(of_heads) = scales.strided::<1>() else { return scales.strided() };
    let ([heads], [stride]) = (of_heads.shape(), of_heads.strides());
    kernels::Tensor::strided(of_heads.view(), [batch, heads, 1], [0, stride, 0]).map_err(kernel_error)
}

/// A cache of keys and values, of which each batch entry has some: for inference with sequences of different lengths. The diagonal of
/// the causal mask ends at an entry's last key. What the cache holds beyond the keys of an entry has no effect.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KeyCache {
    /// The number of keys of each batch entry, i32 [batch]. It is read on the device: numbers below 0 count as 0, and larger ones than
    /// there is room for as that.
    pub lengths: Tensor,
    /// The pages of each batch entry, i32 [batch, most]: `None` where k and v are [batch, heads_kv, most keys, d].
    pub table: Option<Tensor>,
    /// Where entries have different numbers of queries: q has one batch entry with the rows of all, one after the other, and this is the
    /// first row of each and the end of the last, i32 [batch + 1]. It is read on the device; rows after the last entry give 0.
    pub row_starts: Option<Tensor>,
    /// Dequantization scales of k and v of f8e4m3, `k_descale` and `v_descale`: f32 [heads_kv], the same for all batch
    /// entries, or [batch, heads_kv, 1]; 1 by default. 0 means zeros, a negative one gives NaN.
    pub descale: Option<[Tensor; 2]>,
}

impl KeyCache {
    /// Keys in k [batch, heads_kv, most keys, d] and v.
    pub fn new(lengths: Tensor) -> KeyCache {
        KeyCache { lengths, table: None, row_starts: None, descale: None }
    }

    /// Keys in pages (paged attention: Kwon and others, 2023): k and v are [pages, heads_kv, rows, d], and key j of an entry is row
    /// j mod `rows` of page `table`[entry, ⌊j / rows⌋]. A page that is not there counts as zeros.
    pub fn paged(lengths: Tensor, table: Tensor) -> KeyCache {
        KeyCache { table: Some(table), ..KeyCache::new(lengths) }
    }

    /// The same keys for queries of entries of different lengths, as in continuous batching: q is [1, heads, rows of all, d].
    pub fn with_row_starts(self, row_starts: Tensor) -> KeyCache {
        KeyCache { row_starts: Some(row_starts), ..self }
    }

    /// With dequantization scales of k and v, which are f8e4m3.
    pub fn with_descale(self, k_descale: Tensor, v_descale: Tensor) -> KeyCache {
        KeyCache { descale: Some([k_descale, v_descale]), ..self }
    }

    pub(crate) fn scales(&self) -> impl Iterator<Item = (&'static str, &Tensor)> {
        ["k_descale", "v_descale"].into_iter().zip(self.descale.iter().flatten())
    }
}

/// Sequences of different lengths, packed one after the other into one row dimension: q [batch, heads, n_q, d] with n_q
/// the sum of their lengths. Computed once for a batch of text, and used by all layers.
#[derive(Clone, Debug)]
pub struct PackedSequences {
    causal: bool,
    n_q: usize,
    /// Whether each sequence has as many keys as rows.
    same_lengths: bool,
    /// i32 [2 · (n_q + n_k)], as [`document_ranges`] writes them.
    ranges: Tensor,
}

impl PackedSequences {
    /// Sequences of these lengths, for queries and keys alike. `window` is as in [`AttentionOptions`], for each sequence.
    ///
    /// # Errors
    /// Too many tokens; the device is out of memory.
    pub fn new(lengths: &[usize], causal: bool, window: Option<usize>, device: &Device) -> Result<PackedSequences> {
        PackedSequences::with_keys(lengths, lengths, causal, window, device)
    }

    /// Sequences with `rows[s]` queries and `keys[s]` keys each. The diagonal of each ends in its bottom right corner.
    ///
    /// # Errors
    /// As [`PackedSequences::new`]; other numbers of sequences.
    pub fn with_keys(
        rows: &[usize],
        keys: &[usize],
        causal: bool,
        window: Option<usize>,
        device: &Device,
    ) -> Result<PackedSequences> {
        let what = "PackedSequences";
        if rows.len() != keys.len() {
            let expected = format!("the lengths of {} sequences", rows.len());
            return Err(bad_argument(what, "keys", &expected, format!("those of {}", keys.len())));
        }
        let starts = |name, lengths: &[usize]| -> Result<Vec<i32>> {
            let mut starts = vec![0_i32];
            for length in lengths {
                let end = starts.last().and_then(|start| start.checked_add(i32::try_from(*length).ok()?));
                let end = end.ok_or_else(|| {
                    let found = "more tokens in all".to_string();
                    bad_argument(what, name, format!("at most {} tokens in all", i32::MAX), found)
                })?;
                starts.push(end);
            }
            Ok(starts)
        };
        let same_lengths = rows == keys;
        let (rows, keys) = (starts("rows", rows)?, starts("keys", keys)?);
        let extents = [&rows, &keys].map(|starts| starts[starts.len() - 1] as usize);
        let count = rows.len();
        let [rows, keys] = [rows, keys].map(|starts| Tensor::from_vec(starts, count, device));
        let (rows, keys) = (rows?, keys?);
        let len = 2 * (extents[0] + extents[1]);
        let mut ranges = OutputAlloc::<i32>::new(device, len)?;
        {
            let (rows, keys) = (Read::<i32>::new(&rows)?, Read::<i32>::new(&keys)?);
            let (on, lengths) = (rows.device(), [rows.view()?, keys.view()?]);
            document_ranges(on, lengths, extents, causal, window, ranges.view()?, None).map_err(kernel_error)?;
        }
        Ok(PackedSequences { causal, n_q: extents[0], same_lengths, ranges: ranges.into_tensor(len) })
    }
}

#[cfg(test)]
mod tests {
    use super::{AttentionOptions, Backward};

    #[test]
    fn gradients_are_deterministic_unless_options_say_otherwise() {
        let backward = |options: AttentionOptions| options.modifiers().unwrap().options().unwrap().backward;
        assert_eq!(backward(AttentionOptions::default()), Backward::Deterministic);
        assert_eq!(backward(AttentionOptions::new(true)), Backward::Deterministic);
        assert_eq!(backward(AttentionOptions::new(true).with_deterministic(false)), Backward::Auto);
    }
}
