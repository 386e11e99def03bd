//! Parts of tiles whose extents are not powers of two.
//!
//! Layouts and vectors have extents that are powers of two. A tile of another extent consists of *parts*: one for each bit of
//! the extent, from the largest to the smallest. 192 is 128 and 64, so each part begins at a multiple of its own extent. A
//! tile of several dimensions has a part for each combination.

use std::ops::Range;

/// Largest number of parts of a tile: the code of an op is repeated for each.
pub const MAX_PARTS: usize = 16;

/// A part of a tile, or of the block of a view.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// The first element along each dimension.
    pub offsets: Vec<usize>,
    /// Powers of two.
    pub shape: Vec<usize>,
}

/// Number of parts of a tile of this shape.
pub fn count(shape: &[usize]) -> usize {
    shape.iter().map(|n| n.count_ones() as usize).fold(1, usize::saturating_mul)
}

/// The elements along one dimension of the parts of an extent.
pub fn along(extent: usize) -> Vec<Range<usize>> {
    let bits = (0..usize::BITS).rev().map(|bit| extent & (1 << bit)).filter(|&size| size != 0);
    bits.scan(0, |end, size| {
        *end += size;
        Some(*end - size..*end)
    })
    .collect()
}

/// The parts of a tile of this shape, those of the last dimension next to each other.
pub fn of(shape: &[usize]) -> Vec<Part> {
    let mut parts = vec![Part { offsets: Vec::new(), shape: Vec::new() }];
    for &extent in shape {
        let along = along(extent);
        parts = parts
            .iter()
            .flat_map(|part| {
                along.iter().map(|range| Part {
                    offsets: [&part.offsets[..], &[range.start]].concat(),
                    shape: [&part.shape[..], &[range.len()]].concat(),
                })
            })
            .collect();
    }
    parts
}

/// Place of a part among those [`of`] a shape, by its places along the dimensions.
pub fn place(shape: &[usize], along: &[usize]) -> usize {
    shape.iter().zip(along).fold(0, |place, (n, &at)| place * n.count_ones() as usize + at)
}

/// The places along the dimensions of each part, in the order of [`of`].
pub fn places(shape: &[usize]) -> Vec<Vec<usize>> {
    shape.iter().fold(vec![Vec::new()], |places, n| {
        let along = 0..n.count_ones() as usize;
        places.iter().flat_map(|place| along.clone().map(|at| [&place[..], &[at]].concat())).collect()
    })
}

/// Whether a reshape keeps parts apart: the parts of the result are those of the operand under another shape, in the same
/// order. They are where dimensions are combined and divided such that the first of them alone is not a power of two, as
/// in `[96, 2]` to `[192]`, but not in `[2, 96]` to `[192]`.
pub fn reshapes(from: &[usize], to: &[usize]) -> bool {
    let (mut from, mut to) = (from.iter().copied().peekable(), to.iter().copied().peekable());
    // Each turn takes the fewest dimensions of both that have the same number of elements.
    loop {
        let (Some(mut a), Some(mut b)) = (from.next(), to.next()) else {
            return from.all(|n| n == 1) && to.all(|n| n == 1);
        };
        while a != b {
            let smaller = if a < b { (&mut a, &mut from) } else { (&mut b, &mut to) };
            match smaller.1.next() {
                Some(n) if n.is_power_of_two() || *smaller.0 == 1 => *smaller.0 *= n,
                _ => return false,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_cover_a_tile_once() {
        assert_eq!(along(192), [0..128, 128..192]);
        assert_eq!(along(64), std::slice::from_ref(&(0..64)));
        assert_eq!(count(&[7, 3, 4]), 6);
        for shape in [vec![], vec![1], vec![7, 3, 4], vec![96, 5]] {
            let mut seen = std::collections::HashSet::new();
            for (part, places) in of(&shape).iter().zip(places(&shape)) {
                assert_eq!(of(&shape)[place(&shape, &places)], *part);
                let aligned = part.offsets.iter().zip(&part.shape).all(|(at, n)| n.is_power_of_two() && at % n == 0);
                assert!(aligned, "{part:?}");
                let elements: usize = part.shape.iter().product();
                for i in 0..elements {
                    let mut rest = i;
                    let element: Vec<usize> = (0..shape.len())
                        .rev()
                        .map(|d| {
                            let at = part.offsets[d] + rest % part.shape[d];
                            rest /= part.shape[d];
                            at
                        })
                        .collect();
                    assert!(seen.insert(element));
                }
            }
            assert_eq!(seen.len(), shape.iter().product::<usize>());
        }
    }

    /// Against the definition: the elements of part i of the operand are those of part i of the result, in their order.
    #[test]
    fn reshapes_that_keep_parts() {
        let elements = |shape: &[usize], part: &Part| -> Vec<usize> {
            let all: usize = shape.iter().product();
            let inside = |&i: &usize| {
                let mut rest = i;
                (0..shape.len()).rev().all(|d| {
                    let at = rest % shape[d];
                    rest /= shape[d];
                    (part.offsets[d]..part.offsets[d] + part.shape[d]).contains(&at)
                })
            };
            (0..all).filter(inside).collect()
        };
        let extents = [1, 2, 3, 4, 6, 12];
        let mut shapes: Vec<Vec<usize>> = vec![vec![]];
        for _ in 0..3 {
            let longer = shapes.iter().flat_map(|s| extents.map(|n| [&s[..], &[n]].concat()));
            shapes = longer.chain(shapes.clone()).collect();
        }
        shapes.sort();
        shapes.dedup();
        let (mut kept, mut torn) = (0, 0);
        for from in &shapes {
            for to in shapes.iter().filter(|to| to.iter().product::<usize>() == from.iter().product::<usize>()) {
                let (a, b) = (of(from), of(to));
                let same = a.len() == b.len() && a.iter().zip(&b).all(|(x, y)| elements(from, x) == elements(to, y));
                if reshapes(from, to) {
                    assert!(same, "{from:?} {to:?}");
                    kept += 1;
                } else {
                    torn += usize::from(!same);
                    assert!(!same, "{from:?} {to:?} could be split");
                }
            }
        }
        assert!(kept > 1000 && torn > 1000, "{kept} {torn}");
    }
}
