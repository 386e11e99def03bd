//! Sets of times, as intervals from start to end in nanoseconds.

/// (start, end) pairs. Functions of this module return them sorted and disjoint.
pub type Intervals = Vec<(u64, u64)>;

/// Union of the intervals.
pub fn union(mut intervals: Intervals) -> Intervals {
    intervals.retain(|(start, end)| start < end);
    intervals.sort_unstable();
    let mut all: Intervals = Vec::new();
    for (start, end) in intervals {
        match all.last_mut() {
            Some((_, until)) if start <= *until => *until = end.max(*until),
            _ => all.push((start, end)),
        }
    }
    all
}

/// Intersection of `a` and `b`, both sorted and disjoint as [`union`] returns them.
pub fn intersection(a: &[(u64, u64)], b: &[(u64, u64)]) -> Intervals {
    let (mut i, mut j) = (0, 0);
    let mut common = Vec::new();
    while let (Some(&(a_start, a_end)), Some(&(b_start, b_end))) = (a.get(i), b.get(j)) {
        let (start, end) = (a_start.max(b_start), a_end.min(b_end));
        if start < end {
            common.push((start, end));
        }
        match a_end < b_end {
            true => i += 1,
            false => j += 1,
        }
    }
    common
}

/// Difference: the times in `a` but not in `b`, both sorted and disjoint as [`union`] returns them.
pub fn difference(a: &[(u64, u64)], b: &[(u64, u64)]) -> Intervals {
    let mut rest = Vec::new();
    for &(start, end) in a {
        let mut from = start;
        for (taken_start, taken_end) in intersection(&[(start, end)], b) {
            rest.push((from, taken_start));
            from = taken_end;
        }
        rest.push((from, end));
    }
    rest.retain(|(start, end)| start < end);
    rest
}

/// Total length of disjoint intervals in nanoseconds.
pub fn total(intervals: &[(u64, u64)]) -> u64 {
    intervals.iter().map(|(start, end)| end - start).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_sets_match_brute_force() {
        // Brute force over every time, on pseudo-random intervals.
        let mut state = 1_u64;
        let mut number = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for _ in 0..200 {
            let mut draw = || -> Intervals {
                let count = number(6);
                (0..count).map(|_| (number(40), number(40))).map(|(a, b)| (a.min(b), a.max(b))).collect()
            };
            let (a, b) = (draw(), draw());
            let has = |set: &Intervals, t: u64| set.iter().any(|&(start, end)| start <= t && t < end);
            let (ua, ub) = (union(a.clone()), union(b.clone()));
            let (common, rest) = (intersection(&ua, &ub), difference(&ua, &ub));
            for t in 0..41 {
                assert_eq!(has(&ua, t), has(&a, t));
                assert_eq!(has(&common, t), has(&a, t) && has(&b, t));
                assert_eq!(has(&rest, t), has(&a, t) && !has(&b, t));
            }
            assert_eq!(total(&common) + total(&rest), total(&ua));
            assert!([&ua, &common, &rest].iter().all(|set| set.windows(2).all(|pair| pair[0].1 <= pair[1].0)));
        }
    }
}
