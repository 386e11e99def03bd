//! Fully sharded data parallelism (FSDP) over N devices, also combined with tensor parallelism.
//!
//! Notation of Austin et al., "How to scale your model" (2025), part 5: B tokens in total, D = d_model, F = d_ff, X
//! devices along the FSDP axis of the mesh and Y along the tensor axis, with M_X and M_Y hardware axes each; per
//! device, C FLOP per second, and W bytes per second of one axis. Elements have 2 bytes.

use super::memory::{Bytes, Ffn};

/// Memory model of one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sharding {
    pub bytes: Bytes,
    /// Bytes per element of an activation.
    pub element: f64,
    /// The fraction of activations that is sharded.
    pub sharded_activations: f64,
}

impl Sharding {
    /// The case of the assignment: state in f32, activations in bf16, those of every second layer sharded.
    pub const ASSIGNMENT: Sharding = Sharding { bytes: Bytes::F32, element: 2.0, sharded_activations: 0.5 };

    /// Bytes per device on `n` devices with `tokens` tokens: (state + s · A) / n + (1 − s) · A, where A are the
    /// activations.
    pub fn per_device(&self, ffn: &Ffn, n: f64, tokens: f64) -> f64 {
        let activations = ffn.activations(self.element) * tokens;
        let sharded_bytes = ffn.parameters() * self.bytes.sum() + self.sharded_activations * activations;
        sharded_bytes / n + (1.0 - self.sharded_activations) * activations
    }

    /// The smallest number of devices that need less than `limit` bytes each; `None` if no number does, or none below
    /// 2⁵³.
    pub fn min_devices(&self, ffn: &Ffn, limit: f64, tokens: f64) -> Option<u64> {
        let activations = ffn.activations(self.element) * tokens;
        let available = limit - (1.0 - self.sharded_activations) * activations;
        let sharded_bytes = ffn.parameters() * self.bytes.sum() + self.sharded_activations * activations;
        // The limit is exclusive: one more device if it divides evenly.
        let fewest = (sharded_bytes / available).floor() + 1.0;
        (available > 0.0 && fewest < (1_u64 << 53) as f64).then_some(fewest as u64)
    }
}

/// A mesh of devices, and the rates of each device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mesh {
    /// Devices along the FSDP axis, and along the tensor axis.
    pub x: f64,
    pub y: f64,
    /// Hardware axes of each.
    pub m_x: f64,
    pub m_y: f64,
    /// FLOP per second of a device.
    pub flops: f64,
    /// Bytes per second of one hardware axis, both directions together.
    pub bandwidth: f64,
}

/// Time of a forward pass of one block, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BlockTimes {
    pub compute: f64,
    /// All-gather of the weights along X.
    pub weights: f64,
    /// All-gather and reduce-scatter of the activations along Y.
    pub activations: f64,
}

/// The smallest batch, in tokens, with which a forward pass is compute-bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MinBatch {
    pub per_device: f64,
    pub overall: f64,
}

impl Mesh {
    /// The mesh of the assignment: TPU v5p, 16 × 4.
    pub const ASSIGNMENT: Mesh = Mesh { x: 16.0, y: 4.0, m_x: 2.0, m_y: 1.0, flops: 4.6e14, bandwidth: 2.0 * 9e10 };

    /// α = C / W: FLOP of a device per byte sent.
    pub fn alpha(&self) -> f64 {
        self.flops / self.bandwidth
    }

    /// Times of a block with `tokens` tokens in total:
    ///
    /// - compute: 2 · 2BDF / (XY C)
    /// - weights: 2 · 2DF / (Y W M_X): both layers' weights; the shard of each device along Y is gathered along X
    /// - activations: 2 · 2BD / (X W M_Y): the input is gathered and the output reduce-scattered along Y
    pub fn times(&self, ffn: &Ffn, tokens: f64) -> BlockTimes {
        let (d, f) = (ffn.d_model, ffn.d_ff);
        BlockTimes {
            compute: 4.0 * tokens * d * f / (self.x * self.y * self.flops),
            weights: 4.0 * d * f / (self.y * self.bandwidth * self.m_x),
            activations: 4.0 * tokens * d / (self.x * self.bandwidth * self.m_y),
        }
    }

    /// Whether communication along Y takes less time than compute: Y < M_Y F / α. Independent of the batch.
    pub fn tensor_axis_fits(&self, ffn: &Ffn) -> bool {
        self.y < self.m_y * ffn.d_ff / self.alpha()
    }

    /// The smallest batch if the axes communicate concurrently on separate links: compute ≥ weights, so
    /// B / (XY) ≥ α / (Y M_X). `None` if the tensor axis is the bottleneck for every batch.
    pub fn batch(&self, ffn: &Ffn) -> Option<MinBatch> {
        self.tensor_axis_fits(ffn).then(|| self.min_batch(self.alpha() / (self.y * self.m_x)))
    }

    /// The smallest batch if the axes communicate one after the other: compute ≥ weights + activations, so
    /// B / (XY) ≥ α / (Y M_X) / (1 − α Y / (M_Y F)). `None` as for [`Mesh::batch`].
    pub fn batch_serialized(&self, ffn: &Ffn) -> Option<MinBatch> {
        let left = 1.0 - self.alpha() * self.y / (self.m_y * ffn.d_ff);
        (left > 0.0).then(|| self.min_batch(self.alpha() / (self.y * self.m_x) / left))
    }

    fn min_batch(&self, per_device: f64) -> MinBatch {
        MinBatch { per_device, overall: per_device * self.x * self.y }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thirty_eight_devices_of_95_gb_hold_xxl() {
        let (sharding, ffn) = (Sharding::ASSIGNMENT, Ffn::XXL);
        assert_eq!(sharding.min_devices(&ffn, 95e9, 0.0), Some(38));
        assert!(sharding.per_device(&ffn, 38.0, 0.0) < 95e9 && sharding.per_device(&ffn, 37.0, 0.0) >= 95e9);
        // Tokens need more devices, until the unsharded half of their activations alone exceeds the limit.
        let more = sharding.min_devices(&ffn, 95e9, 1000.0).unwrap();
        assert!(sharding.per_device(&ffn, more as f64, 1000.0) < 95e9);
        assert!(sharding.per_device(&ffn, more as f64 - 1.0, 1000.0) >= 95e9 && more > 38);
        assert_eq!(sharding.min_devices(&ffn, 95e9, 11_000.0), None);
    }

    #[test]
    fn min_devices_is_strictly_below_the_limit() {
        let ffn = Ffn { d_model: 1.0, d_ff: 1.0, blocks: 1.0 };
        // 32 bytes of state: on 4 devices each holds exactly 8.
        assert_eq!(Sharding::ASSIGNMENT.min_devices(&ffn, 8.0, 0.0), Some(5));
    }

    /// Finds the batch at which the times are equal by bisection over the times.
    #[test]
    fn min_batch_is_where_times_are_equal() {
        let (mesh, ffn) = (Mesh::ASSIGNMENT, Ffn::XXL);
        let crossing = |communication: &dyn Fn(BlockTimes) -> f64| {
            let (mut low, mut high) = (1.0, 1e9);
            for _ in 0..200 {
                let middle = (low + high) / 2.0;
                let times = mesh.times(&ffn, middle);
                if times.compute >= communication(times) { high = middle } else { low = middle }
            }
            high
        };
        let overlapped = mesh.batch(&ffn).unwrap();
        let found = crossing(&|times| times.weights.max(times.activations));
        assert!((overlapped.overall / found - 1.0).abs() < 1e-9, "{} {found}", overlapped.overall);
        let serialized = mesh.batch_serialized(&ffn).unwrap();
        let found = crossing(&|times| times.weights + times.activations);
        assert!((serialized.overall / found - 1.0).abs() < 1e-9, "{} {found}", serialized.overall);
        // α = 4.6e14 / 1.8e11 = 2556; 2556 / (4 · 2) = 319 tokens a device, 20 444 in all.
        assert_eq!(
            (mesh.alpha().round(), overlapped.per_device.round(), overlapped.overall.round()),
            (2556.0, 319.0, 20444.0)
        );
        assert_eq!((serialized.per_device.round(), serialized.overall.round()), (395.0, 25302.0));
    }

    #[test]
    fn too_long_a_tensor_axis_is_never_compute_bound() {
        let mesh = Mesh { y: 32.0, ..Mesh::ASSIGNMENT };
        assert!(!mesh.tensor_axis_fits(&Ffn::XXL) && mesh.batch(&Ffn::XXL).is_none());
        assert!(mesh.batch_serialized(&Ffn::XXL).is_none());
    }
}
