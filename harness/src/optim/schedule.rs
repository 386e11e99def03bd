//! Learning-rate schedule.

use serde::{Deserialize, Serialize};

/// Linear warm-up, cosine decay to a minimum (Loshchilov and Hutter, "SGDR", 2017, without restarts), then constant at
/// the minimum.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LrSchedule {
    /// Reached at the end of the warm-up.
    #[serde(rename = "peak", with = "crate::train::exact")]
    pub max_lr: f64,
    /// Reached in step `total_steps`.
    #[serde(rename = "floor", with = "crate::train::exact")]
    pub min_lr: f64,
    #[serde(rename = "warmup")]
    pub warmup_steps: u64,
    /// The step at which the decay ends.
    #[serde(rename = "total")]
    pub total_steps: u64,
}

impl LrSchedule {
    /// Constant learning rate.
    pub fn constant(rate: f64) -> LrSchedule {
        LrSchedule { max_lr: rate, min_lr: rate, warmup_steps: 0, total_steps: 0 }
    }

    /// Learning rate of step `step`, counted from 1. The rate of the first step is above zero.
    pub fn rate(&self, step: u64) -> f64 {
        if step <= self.warmup_steps {
            return self.max_lr * step as f64 / self.warmup_steps as f64;
        }
        if step >= self.total_steps {
            return self.min_lr;
        }
        let progress = (step - self.warmup_steps) as f64 / (self.total_steps - self.warmup_steps) as f64;
        self.min_lr + 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()) * (self.max_lr - self.min_lr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_warms_up_decays_and_stays_at_the_minimum() {
        let schedule = LrSchedule { max_lr: 1.0, min_lr: 0.1, warmup_steps: 10, total_steps: 110 };
        assert_eq!((schedule.rate(1), schedule.rate(5), schedule.rate(10)), (0.1, 0.5, 1.0));
        assert!((schedule.rate(60) - 0.55).abs() < 1e-12, "halfway down");
        assert_eq!((schedule.rate(110), schedule.rate(10_000)), (0.1, 0.1));
        assert!((10..110).all(|step| schedule.rate(step + 1) < schedule.rate(step)));
        assert!((1..10).all(|step| schedule.rate(step + 1) > schedule.rate(step)));
    }

    #[test]
    fn warmup_longer_than_the_run_and_no_warmup() {
        assert_eq!(LrSchedule { max_lr: 1.0, min_lr: 0.0, warmup_steps: 100, total_steps: 10 }.rate(50), 0.5);
        assert_eq!(LrSchedule { max_lr: 1.0, min_lr: 0.0, warmup_steps: 0, total_steps: 2 }.rate(1), 0.5);
        assert_eq!(LrSchedule::constant(3e-4).rate(1), 3e-4);
        assert_eq!(LrSchedule::constant(3e-4).rate(77), 3e-4);
    }
}
