//! Cost model of gradient buckets in data-parallel training.
//!
//! A collective of b bytes takes o + b / w seconds, with overhead o and bandwidth w. If the gradients of a bucket take
//! as long to compute as to send, all buckets but the last overlap with backward. For s bytes in n buckets, the exposed
//! time after backward is then
//!
//! T(n) = s / (n w) + n o,
//!
//! with its minimum at n = √(s / (o w)), that is at buckets of √(s o w) bytes.

/// Cost of a collective.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// o: overhead in seconds.
    pub overhead: f64,
    /// w: bandwidth in bytes per second.
    pub bandwidth: f64,
}

/// Why a fit fails.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
pub enum FitError {
    #[error("a fit requires times for at least two sizes, found fewer")]
    TooFewSizes,
    #[error("the times do not grow with the sizes")]
    NotGrowing,
}

impl Link {
    /// Fits t = o + b / w to pairs (b in bytes, t in seconds) by least squares of the relative errors
    /// (o + b / w − t) / t. A negative overhead, which noise can cause, is set to zero.
    ///
    /// # Errors
    /// Fewer than two sizes, or times that do not increase.
    pub fn fit(times: &[(f64, f64)]) -> Result<Link, FitError> {
        let first = times.first().ok_or(FitError::TooFewSizes)?.0;
        if times.iter().all(|(bytes, _)| *bytes == first) {
            return Err(FitError::TooFewSizes);
        }
        // With weights 1 / t, these are the normal equations of the unknowns o and 1 / w.
        let sum = |f: &dyn Fn(f64, f64) -> f64| times.iter().map(|&(b, t)| f(b, t) / (t * t)).sum::<f64>();
        let (one, b, bb) = (sum(&|_, _| 1.0), sum(&|b, _| b), sum(&|b, _| b * b));
        let (t, bt) = (sum(&|_, t| t), sum(&|b, t| b * t));
        let determinant = one * bb - b * b;
        let mut overhead = (bb * t - b * bt) / determinant;
        let mut slowness = (one * bt - b * t) / determinant;
        if overhead < 0.0 {
            (overhead, slowness) = (0.0, bt / bb);
        }
        match slowness > 0.0 && slowness.is_finite() {
            true => Ok(Link { overhead, bandwidth: 1.0 / slowness }),
            false => Err(FitError::NotGrowing),
        }
    }

    /// Time in seconds of a collective of `bytes`.
    pub fn time(&self, bytes: f64) -> f64 {
        self.overhead + bytes / self.bandwidth
    }

    /// T(n): exposed time in seconds after backward, for `bytes` in `n` buckets.
    pub fn exposed_time(&self, bytes: f64, n: f64) -> f64 {
        bytes / (n * self.bandwidth) + n * self.overhead
    }

    /// √(s o w): the bucket size with the least exposed time.
    pub fn optimal_bucket_bytes(&self, bytes: f64) -> f64 {
        (bytes * self.overhead * self.bandwidth).sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fit_recovers_the_link() {
        let link = Link { overhead: 50e-6, bandwidth: 300e9 };
        let times: Vec<_> = [1e6, 1e7, 1e8, 1e9].iter().map(|&bytes| (bytes, link.time(bytes))).collect();
        let found = Link::fit(&times).unwrap();
        assert!((found.overhead / link.overhead - 1.0).abs() < 1e-6, "{found:?}");
        assert!((found.bandwidth / link.bandwidth - 1.0).abs() < 1e-6, "{found:?}");
        // Noise of a few percent changes neither by much.
        let noisy: Vec<_> = times.iter().zip([1.03, 0.98, 1.02, 0.97]).map(|(&(b, t), f)| (b, t * f)).collect();
        let found = Link::fit(&noisy).unwrap();
        assert!((found.overhead / link.overhead - 1.0).abs() < 0.1, "{found:?}");
        assert!((found.bandwidth / link.bandwidth - 1.0).abs() < 0.1, "{found:?}");
    }

    #[test]
    fn bad_records_are_refused() {
        assert_eq!(Link::fit(&[]), Err(FitError::TooFewSizes));
        assert_eq!(Link::fit(&[(1e6, 1.0), (1e6, 2.0)]), Err(FitError::TooFewSizes));
        assert_eq!(Link::fit(&[(1e6, 1.0), (1e7, 1e-9)]), Err(FitError::NotGrowing));
    }

    #[test]
    fn the_optimal_bucket_minimizes_exposed_time() {
        let link = Link { overhead: 40e-6, bandwidth: 320e9 };
        let s = 8e9;
        let best = link.optimal_bucket_bytes(s);
        let least = link.exposed_time(s, s / best);
        for factor in [0.5, 0.9, 1.1, 2.0] {
            assert!(link.exposed_time(s, s / (best * factor)) > least);
        }
        // At the optimum half of the exposed time is overhead, half is transfer.
        assert!((s / best * link.overhead / least - 0.5).abs() < 1e-12);
    }
}
