//! Learning-rate schedule.

use serde::{Deserialize, Serialize};

/// Linear warm-up, cosine decay to a floor (Loshchilov and Hutter, "SGDR", 2017, without restarts), then constant at
/// the floor.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LrSchedule {
    /// Highest learning rate, reached at the end of the warm-up.
    #[serde(with = "crate::train::exact")]
    pub peak: f64,
    /// Lowest learning rate, reached in step `total`.
    #[serde(with = "crate::train::exact")]
    pub floor: f64,
    /// Number of warm-up steps.
    pub warmup: u64,
    /// The step that reaches the floor.
    pub total: u64,
}

impl LrSchedule {
    /// Constant learning rate.
    pub fn constant(rate: f64) -> LrSchedule {
        LrSchedule { peak: rate, floor: rate, warmup: 0, total: 0 }
    }

    /// Learning rate of step `step`, counted from 1. The rate of the first step is above zero.
    pub fn rate(&self, step: u64) -> f64 {
        if step <= self.warmup {
            return self.peak * step as f64 / self.warmup as f64;
        }
        if step >= self.total {
            return self.floor;
        }
        let progress = (step - self.warmup) as f64 / (self.total - self.warmup) as f64;
        self.floor + 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()) * (self.peak - self.floor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_warms_up_decays_and_stays_at_the_floor() {
        let schedule = LrSchedule { peak: 1.0, floor: 0.1, warmup: 10, total: 110 };
        assert_eq!((schedule.rate(1), schedule.rate(5), schedule.rate(10)), (0.1, 0.5, 1.0));
        assert!((schedule.rate(60) - 0.55).abs() < 1e-12, "halfway down");
        assert_eq!((schedule.rate(110), schedule.rate(10_000)), (0.1, 0.1));
        assert!((10..110).all(|step| schedule.rate(step + 1) < schedule.rate(step)));
        assert!((1..10).all(|step| schedule.rate(step + 1) > schedule.rate(step)));
    }

    #[test]
    fn warm_ups_longer_than_the_run_and_none_at_all() {
        assert_eq!(LrSchedule { peak: 1.0, floor: 0.0, warmup: 100, total: 10 }.rate(50), 0.5);
        assert_eq!(LrSchedule { peak: 1.0, floor: 0.0, warmup: 0, total: 2 }.rate(1), 0.5);
        assert_eq!(LrSchedule::constant(3e-4).rate(1), 3e-4);
        assert_eq!(LrSchedule::constant(3e-4).rate(77), 3e-4);
    }
}
