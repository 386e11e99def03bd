//! Assignment of elements to the ranks that update them.

use std::ops::Range;

use crate::params::ALIGNMENT;

/// A range that is synchronized with one collective after a step.
#[derive(Clone, Debug, PartialEq)]
pub enum Partition {
    /// Updated by one rank.
    Owned { rank: usize, range: Range<usize> },
    /// Updated by all ranks, in equal shards.
    Sharded { shard_len: usize, range: Range<usize> },
    /// Updated by every rank.
    Replicated { range: Range<usize> },
}

impl Partition {
    pub fn range(&self) -> Range<usize> {
        match self {
            Partition::Owned { range, .. } | Partition::Sharded { range, .. } | Partition::Replicated { range } => {
                range.clone()
            }
        }
    }

    /// The elements that `rank` updates.
    pub fn range_of(&self, rank: usize) -> Option<Range<usize>> {
        match self {
            Partition::Owned { rank: by, range } => (*by == rank).then(|| range.clone()),
            Partition::Sharded { shard_len, range } => {
                let start = range.start + rank * shard_len;
                Some(start..start + shard_len)
            }
            Partition::Replicated { range } => Some(range.clone()),
        }
    }
}

/// Intersection of two ranges; `None` if it is empty.
pub fn intersection(a: &Range<usize>, b: &Range<usize>) -> Option<Range<usize>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (!both.is_empty()).then_some(both)
}

/// Merges adjacent ranges of a sorted list, including the padding between parameters.
pub fn merge_adjacent(ranges: &[Range<usize>]) -> Vec<Range<usize>> {
    let mut joined: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last) if range.start - last.end < ALIGNMENT => last.end = range.end,
            _ => joined.push(range.clone()),
        }
    }
    joined
}

/// Splits `range` into ranges of equal step counts, according to a sorted list. Padding belongs to the entry before it;
/// elements that are not in the list have a count of 0.
pub fn split_by_steps(range: &Range<usize>, steps: &[(Range<usize>, u64)]) -> Vec<(Range<usize>, u64)> {
    let mut pieces: Vec<(Range<usize>, u64)> = Vec::new();
    let mut push = |piece: Range<usize>, steps: u64| match pieces.last_mut() {
        _ if piece.is_empty() => {}
        Some((last, same)) if *same == steps && last.end == piece.start => last.end = piece.end,
        _ => pieces.push((piece, steps)),
    };
    let mut at = range.start;
    for (index, (known, steps_of)) in steps.iter().enumerate() {
        let next = steps.get(index + 1).map_or(known.end, |(next, _)| next.start);
        let end = if next - known.end < ALIGNMENT { next } else { known.end };
        let Some(both) = intersection(&(known.start..end), range) else { continue };
        push(at..both.start, 0);
        push(both.clone(), *steps_of);
        at = both.end;
    }
    push(at..range.end, 0);
    pieces
}

/// Assigns parameters to ranks that own `load` elements so far: in order, so that each rank approaches the ideal shard.
/// Adjacent parameters of a rank become one range, including padding.
pub fn assign_by_size(params: &[Range<usize>], load: &mut [usize]) -> Vec<(usize, Range<usize>)> {
    let new: usize = params.iter().map(Range::len).sum();
    let ideal = (load.iter().sum::<usize>() + new) as f64 / load.len() as f64;
    // Ranks above the ideal shard get nothing, so that the capacities of the others exceed the elements to assign.
    let capacity: Vec<f64> = load.iter().map(|&load| (ideal - load as f64).max(0.0)).collect();
    let scale = new as f64 / capacity.iter().sum::<f64>();
    let (mut rank, mut end) = (0, capacity[0] * scale);
    let mut position = 0;
    let mut assigned: Vec<(usize, Range<usize>)> = Vec::new();
    for range in params {
        let middle = position as f64 + range.len() as f64 / 2.0;
        while rank + 1 < load.len() && middle >= end {
            rank += 1;
            end += capacity[rank] * scale;
        }
        position += range.len();
        load[rank] += range.len();
        match assigned.last_mut() {
            Some((last, before)) if *last == rank && range.start.saturating_sub(before.end) < ALIGNMENT => {
                before.end = range.end;
            }
            _ => assigned.push((rank, range.clone())),
        }
    }
    assigned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_by_steps_keeps_step_counts() {
        let steps = [(0..100, 5), (128..200, 5), (256..300, 2), (1000..1100, 5)];
        // Padding shorter than an alignment belongs to the range before it.
        assert_eq!(split_by_steps(&(0..300), &steps), [(0..256, 5), (256..300, 2)]);
        assert_eq!(
            split_by_steps(&(150..1200), &steps),
            [(150..256, 5), (256..300, 2), (300..1000, 0), (1000..1100, 5), (1100..1200, 0)]
        );
        assert_eq!(split_by_steps(&(400..500), &steps), [(400..500, 0)]);
        assert_eq!(split_by_steps(&(7..9), &[(0..4096, 3)]), [(7..9, 3)]);
        assert_eq!(merge_adjacent(&[0..100, 128..200, 300..400]), [0..200, 300..400]);
    }

    #[test]
    fn parameters_are_assigned_by_size() {
        let params: Vec<Range<usize>> = (0..10).map(|i| i * 64..(i + 1) * 64 - 4).collect();
        let mut load = vec![0; 4];
        let assigned = assign_by_size(&params, &mut load);
        assert_eq!(assigned, [(0, 0..124), (1, 128..316), (2, 320..444), (3, 448..636)]);
        assert_eq!(load, [120, 180, 120, 180]);
        // More parameters go to the ranks with the least load.
        let more = assign_by_size(&[1000..1060, 2000..2060], &mut load);
        assert_eq!((more, load), (vec![(0, 1000..1060), (2, 2000..2060)], vec![180; 4]));
    }

    #[test]
    fn load_is_within_one_parameter_of_the_ideal_shard() {
        let sizes = [5000, 10, 700, 700, 10, 900, 2000, 10, 3000, 64, 1];
        let mut end = 0_usize;
        let mut params = Vec::new();
        for size in sizes {
            params.push(end..end + size);
            end = (end + size).next_multiple_of(64);
        }
        for world in 1..=5 {
            let mut load = vec![0; world];
            let assigned = assign_by_size(&params, &mut load);
            let ideal = sizes.iter().sum::<usize>() as f64 / world as f64;
            assert!(load.iter().all(|&load| (load as f64 - ideal).abs() <= 5000.0), "{load:?}");
            let covered =
                |range: &Range<usize>| assigned.iter().any(|(_, s)| s.start <= range.start && range.end <= s.end);
            assert!(params.iter().all(covered));
            assert!(assigned.windows(2).all(|pair| pair[0].1.end <= pair[1].1.start && pair[0].0 < pair[1].0));
        }
    }
}
