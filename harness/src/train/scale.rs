//! Dynamic loss scaling for gradients in f16.

use serde::{Deserialize, Serialize};

/// Loss scale: the loss is multiplied by this factor before backward, so that small gradients do not underflow in f16
/// (Micikevicius et al., "Mixed precision training", 2018, section 3.2). The factor is halved when a gradient
/// overflows, and that step is skipped; it is doubled after many steps without overflow.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossScale {
    factor: f64,
    /// Steps since the factor changed.
    #[serde(rename = "good")]
    clean_steps: u32,
    dynamic: bool,
}

/// Steps without overflow after which the factor is doubled.
const GROWTH_INTERVAL: u32 = 2000;
const MAX_FACTOR: f64 = 16_777_216.0;

impl LossScale {
    /// No scaling: the factor is 1, and an overflow is an error.
    pub const NONE: LossScale = LossScale { factor: 1.0, clean_steps: 0, dynamic: false };

    /// Dynamic scaling with an initial factor of 65536.
    pub fn dynamic() -> LossScale {
        LossScale { factor: 65_536.0, clean_steps: 0, dynamic: true }
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
    pub fn can_decrease(&self) -> bool {
        self.dynamic && self.factor > 1.0
    }

    /// Updates the factor after a step with a finite or a non-finite gradient. Returns whether the step is to be
    /// applied; `None` if the gradient is not finite and the factor cannot be halved further.
    pub fn update(&mut self, finite: bool) -> Option<bool> {
        if finite {
            self.clean_steps = self.clean_steps.saturating_add(1);
            if self.dynamic && self.clean_steps >= GROWTH_INTERVAL && self.factor < MAX_FACTOR {
                (self.factor, self.clean_steps) = (2.0 * self.factor, 0);
            }
            return Some(true);
        }
        if !self.can_decrease() {
            return None;
        }
        (self.factor, self.clean_steps) = (0.5 * self.factor, 0);
        Some(false)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_backs_off_and_grows() {
        let mut scale = LossScale::dynamic();
        assert_eq!((scale.update(false), scale.factor()), (Some(false), 32_768.0));
        for _ in 0..GROWTH_INTERVAL - 1 {
            assert_eq!(scale.update(true), Some(true));
        }
        assert_eq!(scale.factor(), 32_768.0);
        scale.update(true);
        assert_eq!(scale.factor(), 65_536.0);
    }

    #[test]
    fn overflow_at_the_minimum_scale_is_an_error() {
        let mut none = LossScale::NONE;
        assert_eq!((none.update(true), none.update(false), none.factor()), (Some(true), None, 1.0));
        let mut scale = LossScale::dynamic();
        let tries = std::iter::from_fn(|| scale.update(false)).count();
        assert_eq!((tries, scale.factor()), (16, 1.0));
    }
}
