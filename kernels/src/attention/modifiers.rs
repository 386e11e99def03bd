//! Modifiers of attention as functions: a [`MaskMod`] decides which keys each query sees, a [`ScoreMod`] changes scores.
//! The kernels call them while they are traced, so that a modifier costs what its arithmetic costs.
//!
//! A mask gives each query a range of keys, and each key the range of queries that see it. Tiles outside of the ranges
//! are not loaded, and tiles inside of all of their ranges are not masked. A score function gives the modified scores
//! and, for the backward pass, their derivative.
//!
//! A modifier has one number and one tensor as its run-time arguments. [`WINDOW`], [`PREFIX`] and [`DOCUMENTS`] are
//! masks, [`SOFTCAP`], [`ALIBI`], [`SOFTCAP_ALIBI`] and [`RELATIVE`] score functions; others are
//! declared like them.

use super::launch::MAX_ROWS;
use tilewright_runtime::prelude::*;

/// What a modifier knows about the problem: run-time scalars, except for `causal`.
#[derive(Clone, Copy)]
pub struct Site {
    /// The batch entry; with packed lengths beside a cache the sequence, whose rows and keys `n_q` and `n_k` are.
    pub batch: Scalar<i32>,
    /// The query head.
    pub head: Scalar<i32>,
    pub n_q: Scalar<i32>,
    /// Keys of the batch entry.
    pub n_k: Scalar<i32>,
    /// Keys that there is room for: the capacity of a cache, `n_k` without one.
    pub most_keys: Scalar<i32>,
    /// Whether row i sees no key beyond i + (n_k − n_q).
    pub causal: bool,
}

/// The arguments of a modifier: its number, its tensor, and the problem.
#[derive(Clone, Copy)]
pub struct Args<T: Dtype> {
    pub number: Scalar<T>,
    pub data: Ptr<T>,
    pub site: Site,
}
pub type MaskArgs = Args<i32>;
pub type ScoreArgs = Args<f32>;

/// For each position, a range of positions of the other side: from the first tile's element up to, but without, the second
/// tile's.
pub type Ranges = (Tile<i32>, Tile<i32>);

/// The functions of a mask: device functions from positions and arguments to ranges.
///
/// `keys` gives the range of keys that each row of q sees, `rows` the range of rows that see each key: the same relation. Both
/// ends of both must not decrease from one position to the next. Positions beyond the tensors do not matter. The kernels
/// call them with a tile of positions, and with a single one: a tile without dimensions.
pub struct MaskMod {
    pub name: &'static str,
    pub keys: fn(Tile<i32>, MaskArgs) -> Ranges,
    pub rows: fn(Tile<i32>, MaskArgs) -> Ranges,
}

/// All keys, or with `causal` those up to the diagonal.
pub static DENSE: MaskMod = MaskMod { name: "dense", keys: dense_keys, rows: dense_rows };
/// Sliding window: row i sees the keys from i + (n_k − n_q) − w to i + (n_k − n_q) + w, w = `number`; with `causal`
/// none after the diagonal.
pub static WINDOW: MaskMod = MaskMod { name: "window", keys: window_keys, rows: window_rows };
/// Prefix LM: row i sees the first `number` keys, and those up to its diagonal, i + (n_k − n_q).
pub static PREFIX: MaskMod = MaskMod { name: "prefix", keys: prefix_keys, rows: prefix_rows };
/// Packed sequences: each row sees keys of its own sequence only. The number is that of rows, the tensor the output of
/// [`document_ranges`](super::documents), which also has the causal mask and the window of each sequence.
pub static DOCUMENTS: MaskMod = MaskMod { name: "documents", keys: document_keys, rows: document_rows };

#[device_fn]
fn dense_keys(rows: Tile<i32>, args: MaskArgs) -> Ranges {
    let Site { n_q, n_k, causal, .. } = args.site;
    (full_like(rows, 0), if causal { rows + (n_k - n_q + 1) } else { full_like(rows, n_k) })
}

#[device_fn]
fn dense_rows(keys: Tile<i32>, args: MaskArgs) -> Ranges {
    let Site { n_q, n_k, causal, .. } = args.site;
    (if causal { keys - (n_k - n_q) } else { full_like(keys, 0) }, full_like(keys, n_q))
}

#[device_fn]
fn window_keys(rows: Tile<i32>, args: MaskArgs) -> Ranges {
    let Site { n_q, n_k, causal, .. } = args.site;
    let diagonal = rows + (n_k - n_q);
    let last = if causal { diagonal } else { diagonal + args.number };
    (diagonal - args.number, last + 1)
}

#[device_fn]
fn window_rows(keys: Tile<i32>, args: MaskArgs) -> Ranges {
    let Site { n_q, n_k, causal, .. } = args.site;
    let diagonal = keys - (n_k - n_q);
    let first = if causal { diagonal } else { diagonal - args.number };
    (first, diagonal + (args.number + 1))
}

#[device_fn]
fn prefix_keys(rows: Tile<i32>, args: MaskArgs) -> Ranges {
    let Site { n_q, n_k, .. } = args.site;
    (full_like(rows, 0), maximum(rows + (n_k - n_q + 1), args.number))
}

#[device_fn]
fn prefix_rows(keys: Tile<i32>, args: MaskArgs) -> Ranges {
    let Site { n_q, n_k, .. } = args.site;
    // From 0 on, because the first row must not decrease where the prefix ends.
    let diagonal = maximum(keys - (n_k - n_q), 0);
    (where_(keys < args.number, 0, diagonal), full_like(keys, n_q))
}

#[device_fn]
fn document_keys(rows: Tile<i32>, args: MaskArgs) -> Ranges {
    let n = args.site.n_q;
    (read(args.data, scalar::<i64>(0), rows, n), read(args.data, n.to::<i64>(), rows, n))
}

#[device_fn]
fn document_rows(keys: Tile<i32>, args: MaskArgs) -> Ranges {
    let n = args.site.n_k;
    let first = args.site.n_q.to::<i64>() * 2;
    (read(args.data, first, keys, n), read(args.data, first + n.to::<i64>(), keys, n))
}

/// The elements `first` + p of `data` for positions p from 0 to n − 1; 0 for others.
#[device_fn]
fn read(data: Ptr<i32>, first: Scalar<i64>, positions: Tile<i32>, n: Scalar<i32>) -> Tile<i32> {
    load(data + first + positions, mask = (positions >= 0) & (positions < n), other = 0)
}

/// A tile of modified scores.
pub struct Modified {
    pub scores: Tile<f32>,
    /// The derivative of each modified score with respect to the score; `None` where it is 1.
    pub derivative: Option<Tile<f32>>,
}

/// Modifies a tile of scores (scale · Q Kᵀ), given the positions of rows and keys, which broadcast to its shape.
pub type ScoreFn = Box<dyn Fn(Tile<f32>, Tile<i32>, Tile<i32>) -> Modified>;

/// A score function: its name, and a function that is called before the loop over tiles, where it loads what does not
/// change, and gives the function that is called in the loop.
pub struct ScoreMod {
    pub name: &'static str,
    pub bind: fn(ScoreArgs) -> ScoreFn,
    /// Whether the derivative is not always 1: the backward pass chooses its tiles by it.
    pub has_derivative: bool,
}

/// Leaves scores as they are.
pub static PLAIN: ScoreMod = ScoreMod {
    name: "plain",
    has_derivative: false,
    bind: |_| Box::new(|scores, _, _| Modified { scores, derivative: None }),
};
/// Softcap (Gemma 2): c · tanh(s / c), c = `number`.
pub static SOFTCAP: ScoreMod = ScoreMod {
    name: "softcap",
    has_derivative: true,
    bind: |args| Box::new(move |scores, _, _| softcap(scores, args.number)),
};
/// ALiBi (Press and others, 2022): s − mₕ · |i + (n_k − n_q) − j|. The tensor has the slope mₕ of each query head.
pub static ALIBI: ScoreMod = ScoreMod { name: "alibi", has_derivative: false, bind: |args| with_alibi(args, false) };
/// [`SOFTCAP`], then [`ALIBI`].
pub static SOFTCAP_ALIBI: ScoreMod =
    ScoreMod { name: "softcap_alibi", has_derivative: true, bind: |args| with_alibi(args, true) };

/// Relative bias (T5: Raffel and others, 2020): adds a number for each head and distance. The tensor is [heads, n_q + n_k − 1], with
/// n_k the keys that there is room for; element n_q − 1 + t of a head is that of the key t places before a row's diagonal, which is key
/// i + (n_k − n_q). t is below 0 after the diagonal.
pub static RELATIVE: ScoreMod = ScoreMod { name: "relative", has_derivative: false, bind: with_relative_bias };

#[device_fn]
fn with_relative_bias(args: ScoreArgs) -> ScoreFn {
    let Site { head, n_q, n_k, most_keys, .. } = args.site;
    let width = n_q + most_keys - 1;
    let biases = args.data + head.to::<i64>() * width;
    Box::new(move |scores, rows, keys| {
        let element = rows + (n_k - 1 - keys);
        // Rows and keys beyond the ends have none. Up to 2^30 rows and keys, the sum fits an i32.
        let bias = load(biases + element, mask = (element >= 0) & (element < width), other = 0.0);
        Modified { scores: scores + bias, derivative: None }
    })
}

#[device_fn]
fn with_alibi(args: ScoreArgs, capped: bool) -> ScoreFn {
    let slope = load(args.data + args.site.head);
    Box::new(move |scores, rows, keys| {
        let modified = if capped { softcap(scores, args.number) } else { Modified { scores, derivative: None } };
        let scores = alibi(modified.scores, rows, keys, slope, args.site);
        Modified { scores, derivative: modified.derivative }
    })
}

/// tanh x = 1 − 2 / (1 + exp 2x), with an absolute error of about an ulp of 1: c times that in the score.
#[device_fn]
fn softcap(scores: Tile<f32>, cap: Scalar<f32>) -> Modified {
    let factor = 2.0 * std::f32::consts::LOG2_E / cap;
    let tanh = 1.0 - 2.0 / (1.0 + exp2(scores * factor));
    Modified { scores: cap * tanh, derivative: Some(1.0 - tanh * tanh) }
}

#[device_fn]
fn alibi(scores: Tile<f32>, rows: Tile<i32>, keys: Tile<i32>, slope: Scalar<f32>, site: Site) -> Tile<f32> {
    // Exact in f32: rows and keys are below 2^24.
    let diagonal = (rows + (site.n_k - site.n_q)).to::<f32>();
    scores - slope * (diagonal - keys.to::<f32>()).abs()
}

impl MaskMod {
    /// Whether this is [`DENSE`].
    pub fn is_dense(&self) -> bool {
        std::ptr::eq(self, &DENSE)
    }

    /// Whether rows at one position of all heads see the same keys: false for masks that are not of this module.
    pub(super) fn ignores_head(&self) -> bool {
        [&DENSE, &WINDOW, &PREFIX, &DOCUMENTS].into_iter().any(|known| std::ptr::eq(known, self))
    }
}

impl ScoreMod {
    /// The function for the tiles of a loop; `None` if it changes nothing.
    pub(super) fn bound(&self, args: ScoreArgs) -> Option<ScoreFn> {
        (!self.is_plain()).then(|| (self.bind)(args))
    }

    /// Whether the scores of all heads are modified alike: false for functions that are not of this module.
    pub(super) fn ignores_head(&self) -> bool {
        [&PLAIN, &SOFTCAP].into_iter().any(|known| std::ptr::eq(known, self))
    }

    /// Whether this is [`PLAIN`].
    pub fn is_plain(&self) -> bool {
        std::ptr::eq(self, &PLAIN)
    }
}

impl ConstexprItem for MaskMod {
    const TYPE: &'static str = "dense | window | prefix | documents";
    const KNOWN: &'static [&'static MaskMod] = &[&DENSE, &WINDOW, &PREFIX, &DOCUMENTS];
    fn name(&self) -> &'static str {
        self.name
    }
}

impl ConstexprItem for ScoreMod {
    const TYPE: &'static str = "plain | softcap | alibi | softcap_alibi | relative";
    const KNOWN: &'static [&'static ScoreMod] = &[&PLAIN, &SOFTCAP, &ALIBI, &SOFTCAP_ALIBI, &RELATIVE];
    fn name(&self) -> &'static str {
        self.name
    }
}

impl Modified {
    /// The gradient of the scores, from that of the modified scores.
    pub(super) fn chain(&self, gradient: Tile<f32>) -> Tile<f32> {
        self.derivative.map_or(gradient, |derivative| gradient * derivative)
    }
}

/// A mask with its arguments; by default [`DENSE`].
#[derive(Clone, Copy)]
pub struct Mask<'a> {
    pub function: &'static MaskMod,
    pub number: i32,
    pub data: Option<View<'a, i32>>,
}

impl Default for Mask<'_> {
    fn default() -> Self {
        Mask { function: &DENSE, number: 0, data: None }
    }
}

impl<'a> Mask<'a> {
    /// Sliding window ([`WINDOW`]): each row sees at most `size` keys before its diagonal, the key on it, and without
    /// `causal` as many after it.
    pub fn window(size: usize) -> Mask<'static> {
        Mask { function: &WINDOW, number: size.min(MAX_ROWS - 1) as i32, data: None }
    }

    /// Prefix LM ([`PREFIX`]): each row sees the first `length` keys, and those up to its diagonal. `causal` of the options
    /// then only orders the tiles, and should be set.
    pub fn prefix(length: usize) -> Mask<'static> {
        Mask { function: &PREFIX, number: length.min(MAX_ROWS) as i32, data: None }
    }

    /// Packed sequences ([`DOCUMENTS`]), from the output of [`document_ranges`](super::documents::document_ranges) for
    /// `n_q` rows. The ranges have the causal mask or not: `causal` of the options then only orders the tiles, and should
    /// be what it was there. All batch entries have the same sequences.
    pub fn documents(ranges: View<'a, i32>, n_q: usize) -> Mask<'a> {
        Mask { function: &DOCUMENTS, number: n_q.min(MAX_ROWS) as i32, data: Some(ranges) }
    }
}

/// A score function with its arguments; by default [`PLAIN`].
#[derive(Clone, Copy)]
pub struct Score<'a> {
    pub function: &'static ScoreMod,
    pub number: f32,
    pub data: Option<View<'a, f32>>,
}

impl Default for Score<'_> {
    fn default() -> Self {
        Score::new(None, None)
    }
}

impl<'a> Score<'a> {
    /// A softcap c · tanh(s / c) ([`SOFTCAP`]), c from 10⁻³⁰ to 10⁴: the error of a score is about c · 10⁻⁷. Then
    /// [`ALIBI`], with the slope of each query head.
    pub fn new(softcap: Option<f32>, alibi_slopes: Option<View<'a, f32>>) -> Score<'a> {
        let function = match (softcap, alibi_slopes) {
            (None, None) => &PLAIN,
            (Some(_), None) => &SOFTCAP,
            (None, Some(_)) => &ALIBI,
            (Some(_), Some(_)) => &SOFTCAP_ALIBI,
        };
        Score { function, number: softcap.unwrap_or(0.0), data: alibi_slopes }
    }

    /// A relative bias ([`RELATIVE`]), f32 [heads, n_q + n_k − 1]; with a cache n_k is the number of keys that there is room for.
    /// [`relative_bias_gradient`](super::relative_bias_gradient) has its gradient.
    pub fn relative(bias: View<'a, f32>) -> Score<'a> {
        Score { function: &RELATIVE, number: 0.0, data: Some(bias) }
    }
}
