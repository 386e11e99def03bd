//! The loops of a program over tiles of keys, or of queries: which tiles they have, which of these need the mask, and what
//! an iteration does with a tile of scores.

use super::forward::within;
use super::modifiers::{MaskArgs, MaskMod, Modified, Ranges, ScoreFn, Site};
use tilewright_codegen::lang::carried::Carried;
use tilewright_runtime::prelude::*;

/// The split of a loop that a program computes: number `index`, of `rows` rows; all of the loop where `rows` is 0.
#[derive(Clone, Copy)]
pub(super) struct Split {
    index: Scalar<i32>,
    rows: usize,
}

/// The batch entry and the split of an entry of the grid's third axis, where the loop runs over `loop_rows` rows.
#[device_fn]
pub(super) fn batch_and_split(entry: Scalar<i32>, loop_rows: Scalar<i32>, split_rows: usize) -> (Scalar<i32>, Split) {
    if split_rows > 0 {
        let num_splits = cdiv(loop_rows, split_rows);
        (entry / num_splits, Split { index: entry % num_splits, rows: split_rows })
    } else {
        (entry, Split { index: scalar::<i32>(0), rows: 0 })
    }
}

/// Assumes that a result has an entry for each batch entry and split, where the loop runs over `loop_rows` rows: with fewer,
/// some splits would be missing from the sum.
#[device_fn]
pub(super) fn assume_entries(entries: Scalar<i32>, batch: Scalar<i32>, loop_rows: Scalar<i32>, split_rows: usize) {
    let splits = if split_rows > 0 { cdiv(loop_rows, split_rows) } else { scalar::<i32>(1) };
    assume(entries == batch * splits);
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

/// The tiles `tiles.0..tiles.1` of a loop, which have one mask: from the first to the last, or where `down` is true from the last
/// to the first.
#[derive(Clone, Copy)]
pub(super) struct Part {
    pub tiles: (Scalar<i32>, Scalar<i32>),
    pub mask: LoopMask,
    pub down: Option<Scalar<bool>>,
}

impl Part {
    /// The tile of the iteration that would have tile `i` in ascending order.
    #[device_fn]
    pub fn tile(self, i: Scalar<i32>) -> Scalar<i32> {
        let (first, end) = self.tiles;
        match self.down {
            None => i,
            // The limits are those of the tile, too: the check of a launch sees them.
            Some(down) => where_(down, maximum(minimum(first + end - 1 - i, end - 1), 0), i),
        }
    }
}

impl Split {
    /// Whether this is the first split of its loop.
    #[device_fn]
    pub fn is_first(self) -> Scalar<bool> {
        self.index == 0
    }

    /// The range (first, end) of those of the tiles `first..end`, of `tile` rows each, that lie in this split.
    #[device_fn]
    pub fn tiles(self, first: Scalar<i32>, end: Scalar<i32>, tile: usize) -> (Scalar<i32>, Scalar<i32>) {
        if self.rows > 0 {
            static_assert(self.rows.is_multiple_of(tile), "split_rows must be a multiple of the tile size");
            let tiles_per_split = self.rows / tile;
            let begin = minimum(maximum(first, self.index * tiles_per_split), end);
            (begin, maximum(begin, minimum(end, (self.index + 1) * tiles_per_split)))
        } else {
            (first, end)
        }
    }

    /// The parts of a loop over these [`tile_bounds`]: the tiles at the edges of ranges, and those inside between them.
    pub fn parts(self, bounds: [Scalar<i32>; 4], tile: usize, edges: LoopMask, inside: LoopMask) -> Vec<Part> {
        let [first, full, last_full, end] = bounds;
        let parts = [(first, full, edges), (full, last_full, inside), (last_full, end, edges)];
        parts.map(|(first, end, mask)| Part { tiles: self.tiles(first, end, tile), mask, down: None }).to_vec()
    }
}

/// The tiles, of `tile` positions of 0 to n − 1, that the range of some position of a block includes, from the block's first
/// and last position: the first tile, the first and the end of those inside of all ranges, and the end.
#[device_fn]
pub(super) fn tile_bounds(
    ranges: fn(Tile<i32>, MaskArgs) -> Ranges,
    block: (Scalar<i32>, Scalar<i32>),
    args: MaskArgs,
    n: Scalar<i32>,
    tile: usize,
) -> [Scalar<i32>; 4] {
    let (first_begin, first_end) = ranges(block.0.broadcast_to(NO_DIMENSIONS), args);
    let (last_begin, last_end) = ranges(block.1.broadcast_to(NO_DIMENSIONS), args);
    let begin = minimum(maximum(first_begin.scalar(), 0), n) / tile;
    let full = cdiv(minimum(maximum(last_begin.scalar(), 0), n), tile);
    let last_full = minimum(maximum(first_end.scalar(), 0), n) / tile;
    let end = maximum(cdiv(minimum(maximum(last_end.scalar(), 0), n), tile), begin);
    let full = minimum(maximum(full, begin), end);
    [begin, full, minimum(maximum(last_full, full), end), end]
}

/// The shape of a tile of one element.
const NO_DIMENSIONS: [usize; 0] = [];

/// The parts of the loop over tiles of keys that `rows` see, and `all_rows` = (first, number) of the programs that share
/// loads with this one. `is_cached`: tiles that all rows see are loaded in another way than others.
#[device_fn]
pub(super) fn parts_of_keys(
    mask: &'static MaskMod,
    args: MaskArgs,
    rows: Tile<i32>,
    all_rows: (Scalar<i32>, usize),
    k_tile: usize,
    even_keys: bool,
    is_cached: bool,
    split: Split,
) -> Vec<Part> {
    let Site { n_q, n_k, causal, .. } = args.site;
    let (first_row, num_rows) = all_rows;
    if mask.is_dense() {
        let mut seen = n_k;
        if causal {
            seen = minimum(maximum(first_row + (n_k - n_q) + num_rows, 0), n_k);
        }
        let end = cdiv(seen, k_tile);
        let is_masked = causal || !even_keys;
        let diagonal = if is_masked { LoopMask::Dense(args.site) } else { LoopMask::None };
        let first = scalar::<i32>(0);
        if is_masked && (is_cached || num_rows != rows.shape()[0]) {
            // All of the rows see the tiles up to `full`. The compiler would split the loop where those of one program do, and
            // not where several heads have the same positions, nor load the tiles of a cache in two ways.
            let keys = if causal { maximum(first_row + (n_k - n_q) + 1, 0) } else { n_k };
            let full = minimum(keys, n_k) / k_tile;
            let unmasked = Part { tiles: split.tiles(first, full, k_tile), mask: LoopMask::None, down: None };
            Vec::from([unmasked, Part { tiles: split.tiles(full, end, k_tile), mask: diagonal, down: None }])
        } else {
            Vec::from([Part { tiles: split.tiles(first, end, k_tile), mask: diagonal, down: None }])
        }
    } else {
        let last_row = maximum(minimum(first_row + num_rows, n_q) - 1, 0);
        let bounds = tile_bounds(mask.keys, (first_row, last_row), args, n_k, k_tile);
        let (start, end) = (mask.keys)(rows, args);
        let edges = LoopMask::Keys(start.expand_dims(1), minimum(end, n_k).expand_dims(1));
        split.parts(bounds, k_tile, edges, LoopMask::None)
    }
}

/// What a loop applies to each tile of scores: a mask, and a score function.
#[derive(Clone, Copy)]
pub(super) struct Rules<'a> {
    pub mask: LoopMask,
    pub modify: Option<&'a ScoreFn>,
    pub scale: Scalar<f32>,
}

impl Rules<'_> {
    /// The factor between the results of [`Scores::modified`] and exponents of 2.
    #[device_fn]
    pub fn exponent_scale(self) -> Scalar<f32> {
        let log2_e = std::f32::consts::LOG2_E;
        if self.modify.is_some() { scalar::<f32>(log2_e) } else { self.scale * log2_e }
    }

    /// Whether the compiler splits the loop: those of ranges are split already.
    pub fn split_hint(self) -> Option<bool> {
        matches!(self.mask, LoopMask::Keys(..) | LoopMask::Rows(..)).then_some(false)
    }
}

/// A tile of Q Kᵀ or its transpose, with the positions of its rows and keys, which broadcast to its shape.
#[derive(Clone, Copy)]
pub(super) struct Scores<'a> {
    pub dot: Tile<f32>,
    pub rows: Tile<i32>,
    pub keys: Tile<i32>,
    pub rules: Rules<'a>,
}

impl Scores<'_> {
    /// The scores that the score function makes of the tile. Without one, they are not scaled either.
    #[track_caller]
    pub fn modified(self) -> Modified {
        match self.rules.modify {
            None => Modified { scores: self.dot, derivative: None },
            Some(modify) => modify(self.dot * self.rules.scale, self.rows, self.keys),
        }
    }

    /// `x` where the row sees the key, `otherwise` elsewhere.
    #[device_fn]
    pub fn keep(self, x: Tile<f32>, otherwise: f32) -> Tile<f32> {
        let Scores { rows, keys, .. } = self;
        match self.rules.mask {
            LoopMask::None => x,
            LoopMask::Dense(Site { n_q, n_k, causal, .. }) => {
                // Under the causal mask, rows below n_q see no key beyond n_k.
                where_(if causal { keys - (n_k - n_q) <= rows } else { keys < n_k }, x, otherwise)
            }
            LoopMask::Keys(first, end) => where_((keys >= first) & (keys < end), x, otherwise),
            LoopMask::Rows(first, end) => where_((rows >= first) & (rows < end), x, otherwise),
        }
    }
}

/// The sequences whose rows are those of one batch entry of q, one after the other.
#[derive(Clone, Copy)]
pub(super) struct PackedSequences {
    /// The first row of each, and the end of the last: [sequences + 1]. The first number counts as 0. Numbers that decrease or exceed
    /// `n_q` give other rows, or leave rows unwritten, but reach none that are not there.
    pub starts: TensorPtr<i32>,
    pub n_q: Scalar<i32>,
}

/// The sequence that a program has rows of, and which.
#[derive(Clone, Copy)]
pub(super) struct Sequence {
    /// Its number. The rows after all sequences count as those of the last one.
    pub index: Scalar<i32>,
    /// The program's tile among those of the sequence.
    pub tile: Scalar<i32>,
    /// The sequence's first row in q, and the number of its rows.
    pub first: Scalar<i32>,
    pub n_q: Scalar<i32>,
    /// Whether the tile has rows of a sequence.
    pub is_there: Scalar<bool>,
}

impl PackedSequences {
    /// The sequence of tile `tile` of all, where sequence s has the tiles from ⌊`pack` · start / `q_tile`⌋ + s on, at least as many as it
    /// needs, and `pack` rows of tiles are one of a sequence. By scalars alone, so that a producer warp can do it, too.
    #[device_fn]
    pub fn sequence_of(self, tile: Scalar<i32>, q_tile: usize, pack: usize) -> Sequence {
        let PackedSequences { starts, n_q } = self;
        let last = starts.dim(0) - 1;
        assume((last >= 1) & (last < MAX_SEQUENCES));
        let start_of = |i: Scalar<i32>| clamp(load(starts.ptr() + i.to::<i64>() * starts.stride(0)), 0, n_q);
        // The last of those that have begun, a bit at a time; the last number is the start of the rows after all sequences.
        let (mut begun, mut step) = (scalar::<i32>(0), scalar::<i32>(MAX_SEQUENCES));
        for _ in range(0, MAX_SEQUENCES.ilog2() as i32) {
            step = step / 2;
            let next = clamp(begun + step, 0, last);
            let has_begun = (begun + step <= last) & (start_of(next) * pack / q_tile + next <= tile);
            begun = where_(has_begun, next, begun);
        }
        let index = clamp(begun, 0, last);
        // The rows before the second start are those of the first sequence.
        let first = where_(index == 0, 0, start_of(index));
        let end = where_(index < last, maximum(start_of(minimum(index + 1, last)), first), n_q);
        let tile = maximum(tile - (first * pack / q_tile + index), 0);
        let rows = end - first;
        let is_there = (index < last) & (tile * q_tile < rows * pack);
        Sequence { index: within(index, last), tile, first, n_q: rows, is_there }
    }
}

/// Packed sequences, at most: one less, a power of two.
pub(super) const MAX_SEQUENCES: i32 = 1 << 20;

/// Rows of q and O where those of `pack` heads are one: row r is that of position ⌊r / pack⌋ of head `head` + r mod pack. Position 0 is
/// row `first` of the `n_q` rows of q, and `end` the end of those that are there.
#[derive(Clone, Copy)]
pub(super) struct PackedRows {
    pub head: Scalar<i32>,
    pub rows: Tile<i32>,
    pub pack: usize,
    pub first: Scalar<i32>,
    pub end: Scalar<i32>,
    pub n_q: Scalar<i32>,
}

impl PackedRows {
    #[device_fn]
    pub fn positions(self) -> Tile<i32> {
        self.rows / self.pack
    }

    #[device_fn]
    pub fn heads(self) -> Tile<i32> {
        self.head + self.rows % self.pack
    }

    /// Rows of q.
    #[device_fn]
    fn places(self) -> Tile<i32> {
        self.first + self.positions()
    }

    #[device_fn]
    pub fn are_there(self) -> Tile<bool> {
        self.places() < self.end
    }

    /// Their places among the rows of these heads, [heads, n_q].
    #[device_fn]
    pub fn in_order(self) -> Tile<i64> {
        (self.rows % self.pack).to::<i64>() * self.n_q + self.places()
    }

    /// The rows of `x` [heads, n_q, d].
    #[device_fn]
    pub fn of<T: Dtype>(self, x: TensorPtr<T>, d_tile: usize) -> PtrTile<T> {
        let row = self.heads().to::<i64>() * x.stride(0) + self.places().to::<i64>() * x.stride(1);
        x.ptr() + row.expand_dims(1) + arange(0, d_tile).expand_dims(0).to::<i64>() * x.stride(2)
    }

    /// Which elements of the rows are there.
    #[device_fn]
    pub fn mask(self, d: usize, d_tile: usize) -> Tile<bool> {
        self.are_there().expand_dims(1) & (arange(0, d_tile).expand_dims(0) < d)
    }
}

/// K or V of a batch entry in a cache.
#[derive(Clone, Copy)]
pub(super) struct CachedRows<C: Dtype> {
    /// [batch, heads, most keys, d], or [pages, heads, rows, d].
    pub x: TensorPtr<C>,
    pub batch: Scalar<i32>,
    pub head: Scalar<i32>,
    /// The pages of the entry, and the rows of one.
    pub pages: Option<(TensorPtr<i32>, usize)>,
    /// Keys of the entry, at most those that there is room for.
    pub n_k: Scalar<i32>,
    pub d_tile: usize,
}

impl<C: Dtype> CachedRows<C> {
    /// Whether tiles of `k_tile` keys of which all are there are blocks of memory, as [`CachedRows::block`] has them.
    pub fn has_blocks(self, k_tile: usize) -> bool {
        self.pages.is_none_or(|(_, page)| page.is_multiple_of(k_tile))
    }

    /// The block of tile `i` of `k_tile` keys, of which all are there. It has rows beyond the last if its page is not there, which are
    /// zeros.
    #[device_fn]
    fn block(self, i: Scalar<i32>, k_tile: usize) -> BlockPtr<C> {
        let CachedRows { x, batch, head, pages, d_tile, .. } = self;
        let first = i * k_tile;
        let (entry, row) = match pages {
            None => (batch, first),
            Some((table, page)) => {
                let id = load(table.ptr() + (first / page).to::<i64>() * table.stride(0));
                let is_there = (id >= 0) & (id < x.dim(0));
                (within(id, x.dim(0)), where_(is_there, first % page, x.dim(2)))
            }
        };
        x.index([entry, head]).block([row, 0], [k_tile, d_tile])
    }

    /// The rows of these keys, [keys, d_tile]; zeros for keys from n_k on, whose memory may hold anything, and of pages that are
    /// not there.
    #[device_fn]
    fn load(self, keys: Tile<i32>) -> Tile<C> {
        let CachedRows { x, batch, head, pages, n_k, d_tile } = self;
        let seen = keys < n_k;
        let (rows, is_there) = if let Some((table, page)) = pages {
            let id = load(table.ptr() + (keys / page) * table.stride(0), mask = seen, other = -1);
            (id.to::<i64>() * x.stride(0) + (keys % page).to::<i64>() * x.stride(2), (id >= 0) & (id < x.dim(0)))
        } else {
            (keys.to::<i64>() * x.stride(2) + batch * x.stride(0), seen)
        };
        let column = arange(0, d_tile).expand_dims(0);
        let at = (rows + head * x.stride(1)).expand_dims(1) + column.to::<i64>() * x.stride(3);
        let zero = scalar::<f32>(0.0).to::<C>();
        load(x.ptr() + at, mask = is_there.expand_dims(1) & (column < x.dim(3)), other = zero)
    }
}

/// Rows of q, k and v that share a dequantization scale.
pub const SCALED_ROWS: usize = 128;

/// The dequantization scales of a head's blocks of [`SCALED_ROWS`] rows, f32 [blocks].
#[derive(Clone, Copy)]
pub(super) struct BlockScales(pub TensorPtr<f32>);

impl BlockScales {
    /// The scale of tile `i`, of `tile` rows.
    #[device_fn]
    pub fn of_tile(self, i: Scalar<i32>, tile: usize) -> Scalar<f32> {
        static_assert(SCALED_ROWS.is_multiple_of(tile), "tiles of scaled rows must divide 128");
        let block = within(i / (SCALED_ROWS / tile), self.0.dim(0));
        load(self.0.ptr() + block * self.0.stride(0))
    }

    /// The scale of all rows; 1 where there are none.
    #[device_fn]
    pub fn of_all(self) -> Scalar<f32> {
        load(self.0.ptr(), mask = self.0.dim(0) > 0, other = 1.0)
    }
}

/// The factor of scores whose queries and keys have these dequantization scales, multiplied. Where it is 0 it becomes the smallest
/// positive number, so that masked scores stay −∞: −∞ · 0 is NaN.
#[device_fn]
pub(super) fn descaled(scale: Scalar<f32>, descale: Scalar<f32>) -> Scalar<f32> {
    maximum(scale * descale, f32::MIN_POSITIVE, propagate_nan = true)
}

/// A dequantization scale, NaN where it is negative.
#[device_fn]
pub(super) fn not_negative(descale: Scalar<f32>) -> Scalar<f32> {
    where_(descale >= 0.0, descale, f32::NAN)
}

/// What all iterations over tiles of keys use.
#[derive(Clone, Copy)]
pub(super) struct KeyLoop<T: Dtype, C: Dtype> {
    pub q: Tile<T>,
    /// [q_tile, 1].
    pub rows: Tile<i32>,
    /// The first tiles.
    pub k: BlockPtr<C>,
    pub v: BlockPtr<C>,
    pub k_tile: usize,
    /// The dimensions of tiles of K that need a boundary check.
    pub k_boundary: &'static [usize],
    /// As `k_boundary`, of V.
    pub v_boundary: &'static [usize],
    /// K and V in a cache, in place of `k` and `v`.
    pub cached: Option<[CachedRows<C>; 2]>,
    pub precision: Precision,
    pub scale: Scalar<f32>,
    /// Dequantization scales of blocks of k, the logarithms of those of v, and the scale of q.
    pub descale: Option<([BlockScales; 2], Scalar<f32>)>,
    pub replicas: usize,
}

/// The tiles of one iteration.
#[derive(Clone, Copy)]
pub(super) struct KeyTiles<'a, T: Dtype> {
    pub k: Tile<T>,
    pub v: Tile<T>,
    /// The binary logarithm of the dequantization scale of `v`.
    pub v_scale: Option<Scalar<f32>>,
    pub scores: Scores<'a>,
    /// [`Rules::exponent_scale`].
    pub scale2: Scalar<f32>,
}

impl<T: Dtype, C: Dtype> KeyLoop<T, C> {
    /// Calls `step` with `state` and the tiles of each iteration; it returns the next state.
    #[device_fn]
    pub fn run<S: Carried<Handle = S>>(
        self,
        parts: Vec<Part>,
        modify: Option<&ScoreFn>,
        state: S,
        step: impl Fn(S, KeyTiles<T>) -> S,
    ) -> S {
        let KeyLoop { q, rows, k, v, k_tile, k_boundary, v_boundary, cached, descale, precision, .. } = self;
        let (scale, replicas) = (self.scale, self.replicas);
        parts.into_iter().fold(state, |state, part| {
            let (first, end) = part.tiles;
            let rules = Rules { mask: part.mask, modify, scale };
            let hint = rules.split_hint();
            let mut state = state;
            let mut k_block = k.advance([first * k_tile, 0]);
            let mut v_block = v.advance([first * k_tile, 0]);
            for i in range(first, end, split = hint, replicas = replicas) {
                let (kt, vt) = match cached {
                    Some([k, v]) if matches!(part.mask, LoopMask::None) && k.has_blocks(k_tile) => {
                        let k_block = k.block(i, k_tile);
                        let v_block = v.block(i, k_tile);
                        let kt = load(k_block, boundary_check = k_boundary, padding = zero);
                        (kt, load(v_block, boundary_check = v_boundary, padding = zero))
                    }
                    None => {
                        let kt = load(k_block, boundary_check = k_boundary, padding = zero);
                        (kt, load(v_block, boundary_check = v_boundary, padding = zero))
                    }
                    Some([k, v]) => {
                        let keys = i * k_tile + arange(0, k_tile);
                        (k.load(keys), v.load(keys))
                    }
                };
                let (kt, vt) = (kt.to::<T>(), vt.to::<T>());
                let descale = descale.map(|([of_k, of_v], of_q)| {
                    let of_k = not_negative(of_k.of_tile(i, k_tile));
                    [of_q * of_k, of_v.of_tile(i, k_tile)]
                });
                let rules = match descale {
                    Some([of_scores, _]) => Rules { mask: part.mask, modify, scale: descaled(scale, of_scores) },
                    None => rules,
                };
                let product = dot(q, kt.trans(), input_precision = precision).to::<f32>();
                let keys = (i * k_tile + arange(0, k_tile)).expand_dims(0);
                let scores = Scores { dot: product, rows, keys, rules };
                let (v_scale, scale2) = (descale.map(|[_, of_v]| of_v), rules.exponent_scale());
                state = step(state, KeyTiles { k: kt, v: vt, v_scale, scores, scale2 });
                k_block = k_block.advance([k_tile, 0]);
                v_block = v_block.advance([k_tile, 0]);
            }
            state
        })
    }
}
