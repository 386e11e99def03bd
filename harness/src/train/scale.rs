//! Dynamic loss scaling for gradients in f16.

use serde::{Deserialize, Serialize};

/// Loss scale: the loss is multiplied by this factor before backward, so that small gradients do not underflow in f16
/// (Micikevicius et al., "Mixed precision training", 2018, section 3.2). The factor is halved when a gradient
/// overflows, and that step is skipped; it is doubled after many steps without overflow.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    factor: f64,
    /// Steps since the factor changed.
    good: u32,
    dynamic: bool,
}

/// Steps without overflow after which the factor is doubled.
const GROW_AFTER: u32 = 2000;
const LARGEST: f64 = 16_777_216.0;

impl LossScale {
    /// No scaling: the factor is 1, and an overflow is an error.
    pub const NONE: LossScale = LossScale { factor: 1.0, good: 0, dynamic: false };

    /// Dynamic scaling with an initial factor of 65536.
    pub fn dynamic() -> LossScale {
        LossScale { factor: 65_536.0, good: 0, dynamic: true }
    }

    /// Factor of the loss; gradients are divided by it.
    pub fn factor(&self) -> f64 {
        self.factor
    }

    /// Whether the factor changes during training.
    pub fn is_dynamic(&self) -> bool {
        self.dynamic
    }

    /// Whether the factor can be halved after an overflow.
    pub fn can_shrink(&self) -> bool {
        self.dynamic && self.factor > 1.0
    }

    /// Updates the factor after a step with a finite or a non-finite gradient. Returns whether the step counts; `None`
    /// if the factor cannot be halved further.
    pub fn learn(&mut self, finite: bool) -> Option<bool> {
        if finite {
            self.good = self.good.saturating_add(1);
            if self.dynamic && self.good >= GROW_AFTER && self.factor < LARGEST {
                (self.factor, self.good) = (2.0 * self.factor, 0);
            }
            return Some(true);
        }
        if !self.can_shrink() {
            return None;
        }
        (self.factor, self.good) = (0.5 * self.factor, 0);
        Some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_backs_off_at_once_and_grows_slowly() {
        let mut scale = LossScale::dynamic();
        assert_eq!((scale.learn(false), scale.factor()), (Some(false), 32_768.0));
        for _ in 0..GROW_AFTER - 1 {
            assert_eq!(scale.learn(true), Some(true));
        }
        assert_eq!(scale.factor(), 32_768.0);
        scale.learn(true);
        assert_eq!(scale.factor(), 65_536.0);
    }

    #[test]
    fn overflows_that_nothing_helps_are_errors() {
        let mut none = LossScale::NONE;
        assert_eq!((none.learn(true), none.learn(false), none.factor()), (Some(true), None, 1.0));
        let mut scale = LossScale::dynamic();
        let tries = std::iter::from_fn(|| scale.learn(false)).count();
        assert_eq!((tries, scale.factor()), (16, 1.0));
    }
}
