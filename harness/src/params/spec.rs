//! Describes parameters before they are allocated: name, shape, initial values.

use std::ops::Range;

use rayon::prelude::*;

/// Description of a parameter to create.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Unique among the model's parameters; dots separate the path in the model.
    pub name: String,
    pub shape: Vec<usize>,
    pub init: Init,
    /// Whether weight decay applies: true for matrices, false for norms and biases.
    pub decay: bool,
    /// Factor on the learning rate.
    pub lr_scale: f64,
    /// Whether the parameter is excluded from training.
    pub frozen: bool,
}

/// Distribution of the initial values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Init {
    Zeros,
    Ones,
    /// Normal with mean 0 and standard deviation `std`, truncated at three standard deviations.
    Normal {
        std: f64,
    },
}

impl ParamSpec {
    /// A trainable matrix with weight decay.
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

    /// A trainable vector without weight decay: a norm's weight or a bias.
    pub fn vector(name: impl Into<String>, len: usize, init: Init) -> ParamSpec {
        ParamSpec { name: name.into(), shape: vec![len], init, decay: false, lr_scale: 1.0, frozen: false }
    }

    /// Number of elements.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Generates the initial values of any range of the flat tensor. Each element is a function of the seed, the index of
/// its parameter and its index in the parameter, so ranges can be generated in any order and in parallel.
pub(super) struct InitialValues<'a> {
    specs: &'a [ParamSpec],
    ranges: &'a [Range<usize>],
    seed: u64,
    quantiles: Vec<f32>,
}

/// Elements that one thread generates at a time.
const CHUNK: usize = 1 << 16;

impl<'a> InitialValues<'a> {
    pub(super) fn new(specs: &'a [ParamSpec], ranges: &'a [Range<usize>], seed: u64) -> InitialValues<'a> {
        InitialValues { specs, ranges, seed, quantiles: quantiles() }
    }

    /// Whether all values are zero.
    pub(super) fn is_zero(&self) -> bool {
        self.specs.iter().all(|spec| spec.init == Init::Zeros)
    }

    /// Writes the elements `first..first + values.len()` of the flat tensor.
    pub(super) fn fill(&self, first: usize, values: &mut [f32]) {
        values.par_chunks_mut(CHUNK).enumerate().for_each(|(i, part)| self.fill_chunk(first + i * CHUNK, part));
    }

    fn fill_chunk(&self, first: usize, values: &mut [f32]) {
        let end = first + values.len();
        // Padding is zero.
        values.fill(0.0);
        let from = self.ranges.partition_point(|range| range.end <= first);
        for (i, range) in self.ranges.iter().enumerate().skip(from).take_while(|(_, range)| range.start < end) {
            let (start, stop) = (range.start.max(first), range.end.min(end));
            let values = &mut values[start - first..stop - first];
            match self.specs[i].init {
                Init::Zeros => {}
                Init::Ones => values.fill(1.0),
                Init::Normal { std } => {
                    let key = mix(mix(self.seed).wrapping_add((i as u64 + 1).wrapping_mul(GOLDEN)));
                    self.fill_normal(
                        values,
                        std as f32,
                        key.wrapping_add(((start - range.start) as u64).wrapping_mul(GOLDEN)),
                    );
                }
            }
        }
    }

    /// Inverse transform sampling: the quantile function at random points, interpolated linearly in a table.
    fn fill_normal(&self, values: &mut [f32], std: f32, mut counter: u64) {
        for value in values {
            counter = counter.wrapping_add(GOLDEN);
            let bits = mix(counter);
            let cell = (bits >> (64 - CELL_BITS)) as usize;
            let fraction = (bits as u32 >> 8) as f32 * (1.0 / (1 << 24) as f32);
            let (low, high) = (self.quantiles[cell], self.quantiles[cell + 1]);
            *value = (low + (high - low) * fraction) * std;
        }
    }
}

/// The mixing function of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014):
/// maps a counter that advances by [`GOLDEN`] to random bits.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// 2⁶⁴ divided by the golden ratio: the increment of SplitMix64.
const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Logarithm to base 2 of the number of cells of the quantile table.
const CELL_BITS: u32 = 12;

/// The quantiles k / 2^CELL_BITS, for all k, of a standard normal truncated at three standard deviations.
///
/// Integrates dx/du = 1 / density(x) from x(1/2) = 0 with the fourth-order Runge–Kutta method. The other half follows
/// by symmetry.
fn quantiles() -> Vec<f32> {
    /// Probability of a normal variable within three standard deviations: erf(3 / √2).
    const WITHIN: f64 = 0.997_300_203_936_739_8;
    let cells = 1_usize << CELL_BITS;
    let h = 1.0 / cells as f64;
    let slope = |x: f64| WITHIN * std::f64::consts::TAU.sqrt() * (0.5 * x * x).exp();
    let mut table = vec![0.0_f32; cells + 1];
    let mut x = 0.0_f64;
    for k in 1..=cells / 2 {
        let a = slope(x);
        let b = slope(x + 0.5 * h * a);
        let c = slope(x + 0.5 * h * b);
        let d = slope(x + h * c);
        x += h / 6.0 * (a + 2.0 * b + 2.0 * c + d);
        table[cells / 2 + k] = x as f32;
        table[cells / 2 - k] = -x as f32;
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(specs: &[ParamSpec], ranges: &[Range<usize>], first: usize, len: usize) -> Vec<f32> {
        let mut values = vec![f32::NAN; len];
        InitialValues::new(specs, ranges, 5).fill(first, &mut values);
        values
    }

    #[test]
    fn any_range_matches_the_whole() {
        let specs = [
            ParamSpec::matrix("a", &[300, 301], 0.5),
            ParamSpec::vector("b", 70, Init::Ones),
            ParamSpec::matrix("c", &[9, 11], 2.0),
        ];
        let ranges = [0..90_300, 90_304..90_374, 90_432..90_531];
        let whole = values(&specs, &ranges, 0, 90_560);
        assert!(whole.iter().all(|x| x.is_finite()));
        assert!([&whole[90_300..90_304], &whole[90_374..90_432], &whole[90_531..]].concat().iter().all(|&x| x == 0.0));
        assert!(whole[90_304..90_374].iter().all(|&x| x == 1.0));
        for (first, len) in [(0, 1), (17, 90_000), (90_299, 3), (90_301, 200), (90_500, 60)] {
            assert_eq!(values(&specs, &ranges, first, len), whole[first..first + len], "{len} from {first}");
        }
        // Parameters have different values.
        assert_ne!(whole[0].to_bits(), (whole[90_432] / 4.0).to_bits());
    }

    /// Kolmogorov–Smirnov test against a distribution function integrated by Simpson's rule.
    #[test]
    fn values_follow_a_normal_truncated_at_three_standard_deviations() {
        let n = 1 << 20;
        let mut found = values(&[ParamSpec::matrix("w", &[n], 1.0)], std::slice::from_ref(&(0..n)), 0, n);
        found.sort_by(f32::total_cmp);
        assert!(found[0] >= -3.0001 && found[n - 1] <= 3.0001 && found[n - 1] > 2.9);
        let density = |x: f64| (-0.5 * x * x).exp() / std::f64::consts::TAU.sqrt();
        let below = |x: f64| {
            let (steps, h) = (600, (x + 3.0) / 600.0);
            let sum: f64 = (0..=steps)
                .map(|i| density(-3.0 + i as f64 * h) * if i == 0 || i == steps { 1.0 } else { (2 + i % 2 * 2) as f64 })
                .sum();
            sum * h / 3.0 / 0.997_300_203_9
        };
        let worst =
            (0..n).step_by(1024).map(|i| (below(found[i].into()) - i as f64 / n as f64).abs()).fold(0.0, f64::max);
        // The statistic exceeds 1.63 / √n with a probability of 1 %.
        assert!(worst < 1.63 / (n as f64).sqrt() + 1.0 / n as f64, "{worst}");
    }
}
