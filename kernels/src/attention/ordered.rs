//! One pass of the backward kernels whose programs add to each tile of dQ in a fixed order, so that the same inputs give the same
//! bits.
//!
//! The order is that in which the programs of a head start: a program then waits only for programs that run. Without a causal mask
//! it is the order of the tiles of keys.
//!
//! With a causal mask, loops have different lengths. If those of a head start from the shortest, and each at its diagonal, programs
//! hardly wait: the one that started before has already added there. But the last programs of a grid would be its longest. So the
//! heads at the end start from the longest loop. Each of these loops ends at its diagonal, so that all of them go over the same
//! tiles, each program behind the one that started before it.

use super::forward::{heads_in_l2, program_in_order, within};
use super::loops::{LoopMask, Part};
use super::modifiers::Site;
use tilewright_runtime::prelude::*;

/// The tile of keys, the head and the entry of this program, and whether its head is one of those at the end. The loops access
/// `row_bytes` for each of `rows` rows: as many heads as fit into the L2 cache come tile by tile.
#[device_fn]
pub(super) fn ordered_program(
    causal: bool,
    rows: Scalar<i32>,
    row_bytes: usize,
) -> ((Scalar<i32>, Scalar<i32>, Scalar<i32>), Scalar<bool>) {
    let extents = (num_programs(0), num_programs(1), num_programs(2));
    let id = program_in_order(program_id(0), extents);
    let (tiles, heads, entries) = extents;
    let all = heads * entries;
    let in_l2 = heads_in_l2(rows, row_bytes, 1);
    let at_end = if causal { minimum(in_l2, cdiv(all, 2)) } else { scalar::<i32>(0) };
    let others = all - at_end;
    // Of equal numbers of heads, so that the last ones are not few.
    let at_a_time = maximum(cdiv(others, maximum(cdiv(others, in_l2), 1)), 1);
    let is_last = id >= others * tiles;
    let first = where_(is_last, others, id / (tiles * at_a_time) * at_a_time);
    let number = where_(is_last, maximum(at_end, 1), minimum(at_a_time, maximum(others - first, 1)));
    let rest = id - first * tiles;
    let place = within(rest / number, tiles);
    let place = if causal { where_(is_last, place, tiles - 1 - place) } else { place };
    let head = within(first + rest % number, all);
    ((place, head % heads, within(head / heads, entries)), is_last)
}

/// The parts of a loop under the causal mask over the tiles `seen`, of `q_tile` queries, that see some of the keys `keys` = (first,
/// number).
#[device_fn]
pub(super) fn ordered_parts(
    seen: (Scalar<i32>, Scalar<i32>),
    keys: (Scalar<i32>, usize),
    q_tile: usize,
    site: Site,
    is_last: Scalar<bool>,
) -> Vec<Part> {
    let (first, end) = seen;
    let ((first_key, num_keys), Site { n_q, n_k, .. }) = (keys, site);
    // From here on, all rows see all of the keys.
    let full = cdiv(maximum(first_key + num_keys - 1 - (n_k - n_q), 0), q_tile);
    let full = minimum(maximum(full, first), end);
    let down = Some(is_last);
    let diagonal = LoopMask::Dense(site);
    Vec::from([
        Part { tiles: (first, where_(is_last, first, full)), mask: diagonal, down },
        Part { tiles: (full, end), mask: LoopMask::None, down },
        Part { tiles: (where_(is_last, first, full), full), mask: diagonal, down },
    ])
}

/// The number of the program of the tile `place` of keys among those that add to the tile `i` of queries, in their order, and how many
/// there are. `n`: queries and keys; `tile`: rows of their tiles; `is_last` as [`ordered_program`] has it.
#[device_fn]
pub(super) fn number_of(
    causal: bool,
    place: Scalar<i32>,
    i: Scalar<i32>,
    n: [Scalar<i32>; 2],
    tile: [usize; 2],
    is_last: Scalar<bool>,
) -> (Scalar<i32>, Scalar<i32>) {
    if causal {
        // The tiles of keys that some row of the tile sees.
        let seen = cdiv(minimum(maximum((i + 1) * tile[0] + (n[1] - n[0]), 0), n[1]), tile[1]);
        (where_(is_last, place, seen - 1 - place), seen)
    } else {
        (place, cdiv(n[1], tile[1]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What [`ordered_program`] gives each program, in the order in which they start.
    #[kernel]
    fn programs(
        place: Out<i32>,
        head: Out<i32>,
        is_last: Out<i32>,
        #[constexpr] causal: bool,
        #[constexpr] row_bytes: usize,
    ) {
        let ((tile, head_of_entry, entry), last) = ordered_program(causal, scalar::<i32>(1), row_bytes);
        let id = (program_id(2) * num_programs(1) + program_id(1)) * num_programs(0) + program_id(0);
        store(place + id, tile);
        store(head + id, entry * num_programs(1) + head_of_entry);
        store(is_last + id, last.to::<i32>());
    }

    /// Every program of a head is there once, and they start in the order of their numbers.
    #[test]
    fn programs_of_a_head_start_in_the_order_of_their_numbers() {
        let device = Device::cpu();
        for (tiles, heads, entries, in_l2) in
            [(1, 1, 1, 1), (5, 1, 1, 3), (5, 3, 1, 1), (5, 3, 1, 2), (4, 2, 3, 4), (3, 7, 1, 100), (2, 5, 2, 3)]
        {
            for causal in [false, true] {
                let count = tiles * heads * entries;
                let [mut place, mut head, mut is_last] =
                    [0; 3].map(|_| Buffer::<i32>::poisoned(&device, count).unwrap());
                let row_bytes = (40 << 20) / in_l2;
                Programs { place: &mut place, head: &mut head, is_last: &mut is_last, causal, row_bytes }
                    .launch(&device, (tiles, heads, entries))
                    .unwrap();
                let [place, head, is_last] = [place, head, is_last].map(|buffer| buffer.to_vec().unwrap());
                let mut at_end = 0;
                for of in 0..(heads * entries) as i32 {
                    let own: Vec<usize> = (0..count).filter(|&id| head[id] == of).collect();
                    let places: Vec<i32> = own.iter().map(|&id| place[id]).collect();
                    let last = is_last[own[0]] == 1;
                    assert!(own.iter().all(|&id| (is_last[id] == 1) == last), "head {of} of {heads} × {entries}");
                    let mut expected: Vec<i32> = (0..tiles as i32).collect();
                    if causal && !last {
                        expected.reverse();
                    }
                    assert_eq!(places, expected, "head {of} of {heads} × {entries}, causal: {causal}, in L2: {in_l2}");
                    at_end += usize::from(last);
                }
                let half = (heads * entries).div_ceil(2).min(in_l2);
                assert_eq!(at_end, if causal { half } else { 0 });
            }
        }
    }
}
