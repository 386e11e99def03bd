//! Packed sequences: the ranges of keys and rows of the mask [`DOCUMENTS`](super::modifiers::DOCUMENTS).

use super::launch::{MAX_ROWS, expect};
use tilewright_runtime::Stream;
use tilewright_runtime::prelude::*;

/// The ranges of one side. For each position p of 0 to n − 1, in document d with `own[d]` ≤ p < `own[d + 1]`:
///
/// - `first[p]`..`end[p]` is the range of positions of the other side that p sees: `other[d]`..`other[d + 1]`, less what
///   `causal` and `window` exclude.
///
/// The diagonal of a document ends in its bottom right corner: row i and key j are on it if i − (end of the document's
/// rows) = j − (end of its keys). With `causal`, a row (`rows = true`) sees no position after it, and a key none before
/// it. With `window` ≥ 0, positions further from it than that are excluded. Positions beyond the last document see
/// nothing.
///
/// Grid: ⌈n / tile⌉.
#[kernel(grid = cdiv(n as usize, tile))]
pub fn document_ranges_of_side(
    own: In<i32>,
    other: In<i32>,
    first: Out<i32>,
    end: Out<i32>,
    #[no_specialize] n: i32,
    #[no_specialize] num_documents: i32,
    #[no_specialize] window: i32,
    #[constexpr] rows: bool,
    #[constexpr = false] causal: bool,
    #[constexpr = 256] tile: usize,
    #[constexpr = 16] block: usize,
) {
    let positions = program_id(0) * tile + arange(0, tile);
    let at = positions.expand_dims(1);
    // Starts of the last document that does not begin after p, and of the first one that does: the end of the former.
    // There are num_documents + 1 starts, the last of which is the end of all documents.
    let num_starts = num_documents + 1;
    let mut other_first = full::<i32>([tile], 0);
    let mut other_end = full::<i32>([tile], 0) + load(other + num_documents);
    let mut own_end = full::<i32>([tile], 0) + load(own + num_documents);
    for i in range(0, cdiv(num_starts, block)) {
        let document = i * block + arange(0, block);
        let inside = document < num_starts;
        let own_start = load(own + document, mask = inside, other = i32::MAX).expand_dims(0);
        let other_start = load(other + document, mask = inside, other = i32::MAX).expand_dims(0);
        let begun = own_start <= at;
        other_first = maximum(other_first, max(where_(begun, other_start, 0), axis = 1));
        other_end = minimum(other_end, min(where_(begun, i32::MAX, other_start), axis = 1));
        own_end = minimum(own_end, min(where_(begun, i32::MAX, own_start), axis = 1));
    }
    let diagonal = positions + (other_end - own_end);
    let mut first_seen = other_first;
    let mut end_seen = other_end;
    if causal && rows {
        end_seen = minimum(end_seen, diagonal + 1);
    } else if window >= 0 {
        end_seen = minimum(end_seen, diagonal + window + 1);
    }
    if causal && !rows {
        first_seen = maximum(first_seen, diagonal);
    } else if window >= 0 {
        first_seen = maximum(first_seen, diagonal - window);
    }
    // Both ends must not decrease from one position to the next, across documents too.
    store(first + positions, minimum(first_seen, other_end), mask = positions < n);
    store(end + positions, maximum(end_seen, other_first), mask = positions < n);
}

/// Computes the ranges of packed sequences for [`Mask::documents`](super::modifiers::Mask::documents): row i of document
/// d, rows `rows[d]`..`rows[d + 1]` of q, sees the keys `keys[d]`..`keys[d + 1]` only. With `causal`, the diagonal of
/// each document ends in its bottom right corner; with `window`, a row sees only keys at most that far from the diagonal.
///
/// `rows` and `keys` are cumulative lengths (`cu_seqlens`): as many numbers each, beginning with 0, not decreasing, at
/// most `n_q` and `n_k`. Others give ranges without a meaning, which attention clips to the tensors. Rows and keys beyond
/// the last document see nothing. `ranges` has 2 · (n_q + n_k) elements: first key and end of each row, first row and end
/// of each key.
///
/// # Errors
/// Lengths that do not match; launch errors.
pub fn document_ranges(
    device: &Device,
    [rows, keys]: [View<i32>; 2],
    [n_q, n_k]: [usize; 2],
    causal: bool,
    window: Option<usize>,
    ranges: ViewMut<i32>,
    stream: Option<Stream>,
) -> Result<()> {
    let expected = "as many cumulative lengths of rows as of keys, at least one each";
    let found = format_args!("{} and {}", rows.len(), keys.len());
    expect(!rows.is_empty() && rows.len() == keys.len(), "cu_seqlens", expected, found)?;
    let expected = format_args!("2 · (rows + keys) elements, for at most {MAX_ROWS} rows and keys");
    let found = format_args!("{} for {n_q} rows and {n_k} keys", ranges.len());
    expect(n_q.max(n_k) <= MAX_ROWS && ranges.len() == 2 * (n_q + n_k), "ranges", expected, found)?;
    let (mut key_first, rest) = ranges.split_at(n_q)?;
    let (mut key_end, rest) = rest.split_at(n_q)?;
    let (mut row_first, mut row_end) = rest.split_at(n_k)?;
    let config = LaunchConfig { stream, ..LaunchConfig::default() };
    let side = |own: View<i32>, other: View<i32>, first: &mut ViewMut<i32>, end: &mut ViewMut<i32>, is_rows: bool| {
        let n = first.len() as i32;
        DocumentRangesOfSide {
            own: &own,
            other: &other,
            first,
            end,
            n,
            num_documents: own.len() as i32 - 1,
            window: window.map_or(-1, |size| size.min(MAX_ROWS - 1) as i32),
            rows: is_rows,
            causal,
            tile: 256,
            block: 16,
        }
        .launch_with(device, &config)
    };
    side(rows, keys, &mut key_first, &mut key_end, true)?;
    side(keys, rows, &mut row_first, &mut row_end, false)
}
