//! What a parameter is before it has a device: name, shape, starting values.

use std::ops::Range;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use rayon::prelude::*;

/// A parameter to be made.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Unique among the model's parameters; dots for the place in the model.
    pub name: String,
    pub shape: Vec<usize>,
    pub init: Init,
    /// Whether weight decay applies: for matrices, not for norms and biases.
    pub decay: bool,
    /// Factor of the learning rate.
    pub lr_scale: f64,
    /// Not trained.
    pub frozen: bool,
}

/// Starting values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with mean 0 and standard deviation `std`; values beyond three standard deviations are drawn again.
    Normal {
        std: f64,
    },
}

impl ParamSpec {
    /// A trained matrix with weight decay.
    pub fn matrix(name: impl Into<String>, shape: &[usize], std: f64) -> ParamSpec {
        ParamSpec {
            name: name.into(),
            shape: shape.to_vec(),
            init: Init::Normal { std },
            decay: true,
            lr_scale: 1.0,
            frozen: false,
        }
    }

    /// A trained vector without weight decay: a norm's weight or a bias.
    pub fn vector(name: impl Into<String>, len: usize, init: Init) -> ParamSpec {
        ParamSpec { name: name.into(), shape: vec![len], init, decay: false, lr_scale: 1.0, frozen: false }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// The flat tensor of values. Each parameter has a generator of its own, so that they can be filled at the same time.
pub(super) fn initial_values(specs: &[ParamSpec], ranges: &[Range<usize>], len: usize, seed: u64) -> Vec<f32> {
    let mut values = vec![0.0_f32; len];
    let mut rest = values.as_mut_slice();
    let mut start = 0;
    let mut parts = Vec::with_capacity(specs.len());
    for (i, range) in ranges.iter().enumerate() {
        let (part, after) = std::mem::take(&mut rest)[range.start - start..].split_at_mut(range.len());
        (rest, start) = (after, range.end);
        parts.push((i as u64, part));
    }
    parts.into_par_iter().for_each(|(i, part)| match specs[i as usize].init {
        Init::Zeros => {}
        Init::Ones => part.fill(1.0),
        Init::Normal { std } => fill_normal(part, std, seed ^ (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)),
    });
    values
}

/// The polar method of Marsaglia and Bray ("A convenient method for generating normal variables", 1964).
fn fill_normal(values: &mut [f32], std: f64, seed: u64) {
    const LIMIT: f64 = 3.0;
    let mut random = StdRng::seed_from_u64(seed);
    let mut spare = None;
    for value in values {
        *value = loop {
            let normal = spare.take().unwrap_or_else(|| {
                let (x, y, s) = loop {
                    let (x, y) = (random.random_range(-1.0..1.0_f64), random.random_range(-1.0..1.0_f64));
                    let s = x * x + y * y;
                    if s > 0.0 && s < 1.0 {
                        break (x, y, s);
                    }
                };
                let factor = (-2.0 * s.ln() / s).sqrt();
                spare = Some(y * factor);
                x * factor
            });
            if normal.abs() <= LIMIT {
                break (normal * std) as f32;
            }
        };
    }
}
