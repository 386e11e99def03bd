//! Modifiers of attention as functions: a [`MaskMod`] decides which keys each query sees, a [`ScoreMod`] changes scores.
//! The kernels call them while they are traced, so that a modifier costs what its arithmetic costs.
//!
//! A mask gives each query a range of keys, and each key the range of queries that see it. Tiles outside of the ranges
//! are not loaded, and tiles inside of all of their ranges are not masked. A score function gives the modified scores
//! and, for the backward pass, their derivative.
//!
//! A modifier has one number and one tensor as its run-time arguments. [`WINDOW`], [`PREFIX`] and [`DOCUMENTS`] are
//! masks, [`SOFTCAP`], [`ALIBI`] and [`SOFTCAP_ALIBI`] score functions; others are declared like them.

use super::forward::tiles_of_split;
use super::launch::MAX_ROWS;
use std::ops::{Add, Sub};
use tilewright_codegen::lang::kernel::{ConstItem, ConstValue, Constexpr};
use tilewright_runtime::prelude::*;

/// What a modifier knows about the problem: run-time scalars, except for `causal`.
#[derive(Clone, Copy)]
pub struct Site {
    pub batch: Scalar<i32>,
    /// The query head.
    pub head: Scalar<i32>,
    pub n_q: Scalar<i32>,
    pub n_k: Scalar<i32>,
    /// Whether row i sees no key beyond i + (n_k − n_q).
    pub causal: bool,
}

/// Positions of rows or keys: one, or a tile of them. Mask functions are generic over this type.
pub trait Position: Data<Elem = i32> + Add<Scalar<i32>, Output = Self> + Sub<Scalar<i32>, Output = Self> {
    /// A position that is the same for all.
    fn fixed(self, position: Scalar<i32>) -> Self;
    /// The larger of the position and `limit`.
    fn at_least(self, limit: Scalar<i32>) -> Self;
    /// The smaller of the position and `limit`.
    fn at_most(self, limit: Scalar<i32>) -> Self;
    /// `below` where the position is below `limit`, and `other` elsewhere.
    fn choose(self, limit: Scalar<i32>, below: Self, other: Self) -> Self;
    /// Element `first` + p of `data` for each position p from 0 to n − 1; 0 at others.
    fn read(self, data: Ptr<i32>, first: Scalar<i64>, n: Scalar<i32>) -> Self;
}

#[device_fn]
fn read_tile(at: Tile<i32>, data: Ptr<i32>, first: Scalar<i64>, n: Scalar<i32>) -> Tile<i32> {
    load(data + first + at, mask = (at >= 0) & (at < n), other = 0)
}

#[device_fn]
fn read_scalar(at: Scalar<i32>, data: Ptr<i32>, first: Scalar<i64>, n: Scalar<i32>) -> Scalar<i32> {
    load(data + first + at, mask = (at >= 0) & (at < n), other = 0)
}

#[device_fn]
fn fixed_tile(at: Tile<i32>, position: Scalar<i32>) -> Tile<i32> {
    zeros::<i32>(at.shape()) + position
}

#[device_fn]
fn choose_tile(at: Tile<i32>, limit: Scalar<i32>, below: Tile<i32>, other: Tile<i32>) -> Tile<i32> {
    where_(at < limit, below, other)
}

#[device_fn]
fn choose_scalar(at: Scalar<i32>, limit: Scalar<i32>, below: Scalar<i32>, other: Scalar<i32>) -> Scalar<i32> {
    where_(at < limit, below, other)
}

impl Position for Tile<i32> {
    fn fixed(self, position: Scalar<i32>) -> Self {
        fixed_tile(self, position)
    }
    fn at_least(self, limit: Scalar<i32>) -> Self {
        maximum(self, limit, false)
    }
    fn at_most(self, limit: Scalar<i32>) -> Self {
        minimum(self, limit, false)
    }
    fn choose(self, limit: Scalar<i32>, below: Self, other: Self) -> Self {
        choose_tile(self, limit, below, other)
    }
    fn read(self, data: Ptr<i32>, first: Scalar<i64>, n: Scalar<i32>) -> Self {
        read_tile(self, data, first, n)
    }
}

impl Position for Scalar<i32> {
    fn fixed(self, position: Scalar<i32>) -> Self {
        position
    }
    fn at_least(self, limit: Scalar<i32>) -> Self {
        maximum(self, limit, false)
    }
    fn at_most(self, limit: Scalar<i32>) -> Self {
        minimum(self, limit, false)
    }
    fn choose(self, limit: Scalar<i32>, below: Self, other: Self) -> Self {
        choose_scalar(self, limit, below, other)
    }
    fn read(self, data: Ptr<i32>, first: Scalar<i64>, n: Scalar<i32>) -> Self {
        read_scalar(self, data, first, n)
    }
}

/// The arguments of a mask function: its number, its tensor, and the problem.
#[derive(Clone, Copy)]
pub struct MaskArgs {
    pub number: Scalar<i32>,
    pub data: Ptr<i32>,
    pub site: Site,
}

/// A range of positions: from the first one up to, but without, the second one.
type Range<P> = (P, P);

/// The functions of a mask; [`mask_mod!`](crate::mask_mod) declares one.
///
/// `keys` gives the range of keys that a row of q sees, `rows` the range of rows that see a key: the same relation. Both
/// ends of both must not decrease from one position to the next. Positions beyond the tensors do not matter.
pub struct MaskFunctions {
    pub name: &'static str,
    pub keys: fn(Tile<i32>, MaskArgs) -> Range<Tile<i32>>,
    pub keys_of_one: fn(Scalar<i32>, MaskArgs) -> Range<Scalar<i32>>,
    pub rows: fn(Tile<i32>, MaskArgs) -> Range<Tile<i32>>,
    pub rows_of_one: fn(Scalar<i32>, MaskArgs) -> Range<Scalar<i32>>,
}

/// Declares a mask from two functions that are generic over [`Position`](crate::attention::modifiers::Position).
#[macro_export]
macro_rules! mask_mod {
    ($(#[$meta:meta])* $vis:vis $name:ident = $text:literal, $keys:path, $rows:path) => {
        $(#[$meta])*
        $vis static $name: $crate::attention::modifiers::MaskFunctions = $crate::attention::modifiers::MaskFunctions {
            name: $text,
            keys: $keys,
            keys_of_one: $keys,
            rows: $rows,
            rows_of_one: $rows,
        };
    };
}

mask_mod! {
    /// All keys, or with `causal` those up to the diagonal.
    pub DENSE = "dense", dense_keys, dense_rows
}
mask_mod! {
    /// Sliding window: row i sees the keys from i + (n_k − n_q) − w to i + (n_k − n_q) + w, w = `number`; with `causal`
    /// none after the diagonal.
    pub WINDOW = "window", window_keys, window_rows
}
mask_mod! {
    /// Prefix LM: row i sees the first `number` keys, and those up to its diagonal, i + (n_k − n_q).
    pub PREFIX = "prefix", prefix_keys, prefix_rows
}
mask_mod! {
    /// Packed sequences: each row sees keys of its own sequence only. The number is that of rows, the tensor the output of
    /// [`document_ranges`](super::documents), which also has the causal mask and the window of each sequence.
    pub DOCUMENTS = "documents", document_keys, document_rows
}

fn dense_keys<P: Position>(row: P, args: MaskArgs) -> Range<P> {
    let Site { n_q, n_k, causal, .. } = args.site;
    (row.fixed(scalar::<i32>(0)), if causal { row + (n_k - n_q + 1) } else { row.fixed(n_k) })
}

fn dense_rows<P: Position>(key: P, args: MaskArgs) -> Range<P> {
    let Site { n_q, n_k, causal, .. } = args.site;
    (if causal { key - (n_k - n_q) } else { key.fixed(scalar::<i32>(0)) }, key.fixed(n_q))
}

fn window_keys<P: Position>(row: P, args: MaskArgs) -> Range<P> {
    let Site { n_q, n_k, causal, .. } = args.site;
    let diagonal = row + (n_k - n_q);
    let last = if causal { diagonal } else { diagonal + args.number };
    (diagonal - args.number, last + scalar::<i32>(1))
}

fn window_rows<P: Position>(key: P, args: MaskArgs) -> Range<P> {
    let Site { n_q, n_k, causal, .. } = args.site;
    let diagonal = key - (n_k - n_q);
    let first = if causal { diagonal } else { diagonal - args.number };
    (first, diagonal + (args.number + 1))
}

fn prefix_keys<P: Position>(row: P, args: MaskArgs) -> Range<P> {
    let Site { n_q, n_k, .. } = args.site;
    (row.fixed(scalar::<i32>(0)), (row + (n_k - n_q + 1)).at_least(args.number))
}

fn prefix_rows<P: Position>(key: P, args: MaskArgs) -> Range<P> {
    let Site { n_q, n_k, .. } = args.site;
    let all = key.fixed(scalar::<i32>(0));
    // From 0 on, because the first row must not decrease where the prefix ends.
    let diagonal = (key - (n_k - n_q)).at_least(scalar::<i32>(0));
    (key.choose(args.number, all, diagonal), key.fixed(n_q))
}

fn document_keys<P: Position>(row: P, args: MaskArgs) -> Range<P> {
    let n = args.site.n_q;
    (row.read(args.data, scalar::<i64>(0), n), row.read(args.data, n.to::<i64>(), n))
}

fn document_rows<P: Position>(key: P, args: MaskArgs) -> Range<P> {
    let n = args.site.n_k;
    let first = args.site.n_q.to::<i64>() * 2;
    (key.read(args.data, first, n), key.read(args.data, first + n.to::<i64>(), n))
}

/// The mask of a kernel: a reference to its functions.
#[derive(Clone, Copy)]
pub struct MaskMod(pub &'static MaskFunctions);

/// A tile of modified scores.
pub struct Modified {
    pub scores: Tile<f32>,
    /// The derivative of each modified score with respect to the score; `None` where it is 1.
    pub derivative: Option<Tile<f32>>,
}

/// The arguments of a score function: its number, its tensor, and the problem.
#[derive(Clone, Copy)]
pub struct ScoreArgs {
    pub number: Scalar<f32>,
    pub data: Ptr<f32>,
    pub site: Site,
}

/// Modifies a tile of scores (scale · Q Kᵀ), given the positions of rows and keys, which broadcast to its shape.
pub type ScoreFn = Box<dyn Fn(Tile<f32>, Tile<i32>, Tile<i32>) -> Modified>;

/// A score function: its name, and a function that is called before the loop over tiles, where it loads what does not
/// change, and gives the function that is called in the loop.
pub struct ScoreFunctions {
    pub name: &'static str,
    pub bind: fn(ScoreArgs) -> ScoreFn,
    /// Whether the derivative is not always 1: the backward pass chooses its tiles by it.
    pub has_derivative: bool,
}

/// The score function of a kernel: a reference to its functions.
#[derive(Clone, Copy)]
pub struct ScoreMod(pub &'static ScoreFunctions);

/// Leaves scores as they are.
pub static PLAIN: ScoreFunctions = ScoreFunctions {
    name: "plain",
    has_derivative: false,
    bind: |_| Box::new(|scores, _, _| Modified { scores, derivative: None }),
};
/// Softcap (Gemma 2): c · tanh(s / c), c = `number`.
pub static SOFTCAP: ScoreFunctions = ScoreFunctions {
    name: "softcap",
    has_derivative: true,
    bind: |args| Box::new(move |scores, _, _| softcap(scores, args.number)),
};
/// ALiBi (Press and others, 2022): s − mₕ · |i + (n_k − n_q) − j|. The tensor has the slope mₕ of each query head.
pub static ALIBI: ScoreFunctions = ScoreFunctions {
    name: "alibi",
    has_derivative: false,
    bind: |args| {
        let slope = slope(args.data, args.site.head);
        Box::new(move |scores, rows, keys| Modified {
            scores: alibi(scores, rows, keys, slope, args.site.n_q, args.site.n_k),
            derivative: None,
        })
    },
};
/// [`SOFTCAP`], then [`ALIBI`].
pub static SOFTCAP_ALIBI: ScoreFunctions = ScoreFunctions {
    name: "softcap_alibi",
    has_derivative: true,
    bind: |args| {
        let slope = slope(args.data, args.site.head);
        Box::new(move |scores, rows, keys| {
            let capped = softcap(scores, args.number);
            Modified { scores: alibi(capped.scores, rows, keys, slope, args.site.n_q, args.site.n_k), ..capped }
        })
    },
};

/// tanh x = 1 − 2 / (1 + exp 2x), with an absolute error of about an ulp of 1: c times that in the score.
#[device_fn]
fn softcap(scores: Tile<f32>, cap: Scalar<f32>) -> Modified {
    let factor = 2.0 * std::f32::consts::LOG2_E / cap;
    let tanh = 1.0 - 2.0 / (1.0 + exp2(scores * factor));
    Modified { scores: cap * tanh, derivative: Some(1.0 - tanh * tanh) }
}

#[device_fn]
fn slope(slopes: Ptr<f32>, head: Scalar<i32>) -> Scalar<f32> {
    load(slopes + head)
}

#[device_fn]
fn alibi(
    scores: Tile<f32>,
    rows: Tile<i32>,
    keys: Tile<i32>,
    slope: Scalar<f32>,
    n_q: Scalar<i32>,
    n_k: Scalar<i32>,
) -> Tile<f32> {
    // Exact in f32: rows and keys are below 2^24.
    let diagonal = (rows + (n_k - n_q)).to::<f32>();
    scores - slope * (diagonal - keys.to::<f32>()).abs()
}

impl MaskMod {
    pub(super) fn is_dense(self) -> bool {
        self == MaskMod(&DENSE)
    }

    pub(super) fn keys(self, rows: Tile<i32>, args: MaskArgs) -> Range<Tile<i32>> {
        (self.0.keys)(rows, args)
    }

    pub(super) fn keys_of_one(self, row: Scalar<i32>, args: MaskArgs) -> Range<Scalar<i32>> {
        (self.0.keys_of_one)(row, args)
    }

    pub(super) fn rows(self, keys: Tile<i32>, args: MaskArgs) -> Range<Tile<i32>> {
        (self.0.rows)(keys, args)
    }

    pub(super) fn rows_of_one(self, key: Scalar<i32>, args: MaskArgs) -> Range<Scalar<i32>> {
        (self.0.rows_of_one)(key, args)
    }
}

impl ScoreMod {
    /// The function for the tiles of a loop; `None` if it changes nothing.
    pub(super) fn bind(self, args: ScoreArgs) -> Option<ScoreFn> {
        (self != ScoreMod(&PLAIN)).then(|| (self.0.bind)(args))
    }
}

/// Applies a score function to a tile of Q Kᵀ. Without one, the tile is not scaled either.
#[track_caller]
pub(super) fn modified(
    scores: Tile<f32>,
    modify: Option<&ScoreFn>,
    scale: Scalar<f32>,
    rows: impl Fn() -> Tile<i32>,
    keys: impl Fn() -> Tile<i32>,
) -> Modified {
    match modify {
        None => Modified { scores, derivative: None },
        Some(modify) => modify(scores * scale, rows(), keys()),
    }
}

impl Modified {
    /// The gradient of the scores, from that of the modified scores.
    pub(super) fn chain(&self, gradient: Tile<f32>) -> Tile<f32> {
        match self.derivative {
            None => gradient,
            Some(derivative) => gradient * derivative,
        }
    }
}

/// The factor between the results of [`modified`] and exponents of 2.
#[device_fn]
pub(super) fn exponent_scale(scale: Scalar<f32>, modify: Option<&ScoreFn>) -> Scalar<f32> {
    if modify.is_some() { scalar::<f32>(std::f32::consts::LOG2_E) } else { scale * std::f32::consts::LOG2_E }
}

/// The mask of the tiles of a loop.
#[derive(Clone, Copy)]
pub(super) enum LoopMask {
    None,
    /// Keys below n_k, and with `causal` up to the diagonal.
    Dense(Site),
    /// Ranges of keys, for each row of the tile.
    Keys(Tile<i32>, Tile<i32>),
    /// Ranges of rows, for each key of the tile.
    Rows(Tile<i32>, Tile<i32>),
}

impl LoopMask {
    /// Whether the compiler splits the loop: those of ranges are split already.
    pub fn split_hint(self) -> Option<bool> {
        matches!(self, LoopMask::Keys(..) | LoopMask::Rows(..)).then_some(false)
    }

    /// `scores` where the row sees the key, `otherwise` elsewhere. Rows and keys broadcast to the shape of `scores`.
    #[track_caller]
    pub fn keep(
        self,
        scores: Tile<f32>,
        rows: impl Fn() -> Tile<i32>,
        keys: impl Fn() -> Tile<i32>,
        otherwise: f32,
    ) -> Tile<f32> {
        let seen = match self {
            LoopMask::None => return scores,
            LoopMask::Dense(site) => visible(rows(), keys(), site),
            LoopMask::Keys(first, end) => within(keys(), first, end),
            LoopMask::Rows(first, end) => within(rows(), first, end),
        };
        where_(seen, scores, otherwise)
    }
}

#[device_fn]
fn within(position: Tile<i32>, first: Tile<i32>, end: Tile<i32>) -> Tile<bool> {
    (position >= first) & (position < end)
}

/// The dense mask, for rows and keys that broadcast to the shape of the scores.
#[device_fn]
fn visible(rows: Tile<i32>, keys: Tile<i32>, site: Site) -> Tile<bool> {
    let Site { n_q, n_k, causal, .. } = site;
    // Under the causal mask, rows below n_q see no key beyond n_k.
    if causal { keys - (n_k - n_q) <= rows } else { keys < n_k }
}

macro_rules! modifier_constexpr {
    ($($name:ident: $type:literal, $default:ident, [$($known:ident),+];)*) => { $(
        impl $name {
            /// The default of kernels.
            #[allow(non_upper_case_globals)]
            pub const $default: $name = $name::PLACEHOLDER;

            /// The name of the functions.
            pub fn name(self) -> &'static str {
                self.0.name
            }
        }

        impl Constexpr for $name {
            const TYPE: &'static str = $type;
            const PLACEHOLDER: $name = [$($name(&$known)),+][0];
            fn to_const(self) -> ConstValue {
                ConstValue::Item(ConstItem { name: self.0.name, item: self.0 })
            }
            /// By name only those of this module.
            fn from_const(value: &ConstValue) -> Option<$name> {
                match value {
                    ConstValue::Item(item) => item.downcast().map($name),
                    ConstValue::Variant(name) => [$($name(&$known)),+].into_iter().find(|known| known.0.name == name),
                    _ => None,
                }
            }
            fn key(self) -> u64 {
                std::ptr::from_ref(self.0).addr() as u64
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &$name) -> bool {
                std::ptr::eq(self.0, other.0)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.0.name)
            }
        }
    )* };
}
modifier_constexpr! {
    MaskMod: "dense | window | prefix | documents", dense, [DENSE, WINDOW, PREFIX, DOCUMENTS];
    ScoreMod: "plain | softcap | alibi | softcap_alibi", plain, [PLAIN, SOFTCAP, ALIBI, SOFTCAP_ALIBI];
}

/// A mask with its arguments.
#[derive(Clone, Copy, Debug)]
pub struct Mask<'a> {
    pub function: MaskMod,
    pub number: i32,
    pub data: Option<View<'a, i32>>,
}

impl<'a> Mask<'a> {
    /// [`DENSE`].
    pub const DENSE: Mask<'static> = Mask { function: MaskMod(&DENSE), number: 0, data: None };

    /// Sliding window ([`WINDOW`]): each row sees at most `size` keys before its diagonal, the key on it, and without
    /// `causal` as many after it.
    pub fn window(size: usize) -> Mask<'static> {
        Mask { function: MaskMod(&WINDOW), number: size.min(MAX_ROWS - 1) as i32, data: None }
    }

    /// Prefix LM ([`PREFIX`]): each row sees the first `length` keys, and those up to its diagonal. `causal` of the options
    /// then only orders the tiles, and should be set.
    pub fn prefix(length: usize) -> Mask<'static> {
        Mask { function: MaskMod(&PREFIX), number: length.min(MAX_ROWS) as i32, data: None }
    }

    /// Packed sequences ([`DOCUMENTS`]), from the output of [`document_ranges`](super::documents::document_ranges) for
    /// `n_q` rows. The ranges have the causal mask or not: `causal` of the options then only orders the tiles, and should
    /// be what it was there. All batch entries have the same sequences.
    pub fn documents(ranges: View<'a, i32>, n_q: usize) -> Mask<'a> {
        Mask { function: MaskMod(&DOCUMENTS), number: n_q.min(MAX_ROWS) as i32, data: Some(ranges) }
    }
}

impl Default for Mask<'_> {
    fn default() -> Self {
        Mask::DENSE
    }
}

/// A score function with its arguments.
#[derive(Clone, Copy, Debug)]
pub struct Score<'a> {
    pub function: ScoreMod,
    pub number: f32,
    pub data: Option<View<'a, f32>>,
}

impl<'a> Score<'a> {
    /// [`PLAIN`].
    pub const PLAIN: Score<'static> = Score { function: ScoreMod(&PLAIN), number: 0.0, data: None };

    /// c · tanh(s / c) ([`SOFTCAP`]), c from 10⁻³⁰ to 10⁴: the error of a score is about c · 10⁻⁷.
    pub fn softcap(cap: f32) -> Score<'static> {
        Score { function: ScoreMod(&SOFTCAP), number: cap, data: None }
    }

    /// [`ALIBI`], with the slope of each query head.
    pub fn alibi(slopes: View<'a, f32>) -> Score<'a> {
        Score { function: ScoreMod(&ALIBI), number: 0.0, data: Some(slopes) }
    }

    /// [`SOFTCAP_ALIBI`].
    pub fn softcap_alibi(cap: f32, slopes: View<'a, f32>) -> Score<'a> {
        Score { function: ScoreMod(&SOFTCAP_ALIBI), number: cap, data: Some(slopes) }
    }
}

impl Default for Score<'_> {
    fn default() -> Self {
        Score::PLAIN
    }
}

/// The tiles of a loop: those from `first` to `full` and from `last_full` to `end` need the mask, those from `full` to
/// `last_full` do not.
#[derive(Clone, Copy)]
pub(super) struct TileRanges {
    pub first: Scalar<i32>,
    pub full: Scalar<i32>,
    pub last_full: Scalar<i32>,
    pub end: Scalar<i32>,
}

/// The tiles, of `tile` positions of 0 to n − 1, that the range of some position of a block includes, from the ranges
/// of the block's first and last position.
#[device_fn]
pub(super) fn tile_ranges(
    first: (Scalar<i32>, Scalar<i32>),
    last: (Scalar<i32>, Scalar<i32>),
    n: Scalar<i32>,
    tile: usize,
) -> TileRanges {
    let begin = minimum(maximum(first.0, 0), n) / tile;
    let full = cdiv(minimum(maximum(last.0, 0), n), tile);
    let last_full = minimum(maximum(first.1, 0), n) / tile;
    let end = maximum(cdiv(minimum(maximum(last.1, 0), n), tile), begin);
    let full = minimum(maximum(full, begin), end);
    TileRanges { first: begin, full: full, last_full: minimum(maximum(last_full, full), end), end: end }
}

/// The three parts of a loop over `ranges` that lie in a split: (first, end) of the tiles before, in and after the full
/// ones.
pub(super) fn parts_of_split(
    split: Scalar<i32>,
    split_rows: usize,
    ranges: TileRanges,
    tile: usize,
) -> [(Scalar<i32>, Scalar<i32>); 3] {
    let TileRanges { first, full, last_full, end } = ranges;
    [(first, full), (full, last_full), (last_full, end)]
        .map(|(first, end)| tiles_of_split(split, split_rows, first, end, tile))
}
