//! Memory of a stack of feed-forward layers, which dominate very large models.

/// `blocks` times two linear layers: `d_model` → `d_ff` → `d_model`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ffn {
    pub d_model: f64,
    pub d_ff: f64,
    pub blocks: f64,
}

impl Ffn {
    /// The XXL model of the assignment.
    pub const XXL: Ffn = Ffn { d_model: 16384.0, d_ff: 53248.0, blocks: 126.0 };

    /// P = blocks · 2 · d_model · d_ff.
    pub fn parameters(&self) -> f64 {
        self.blocks * 2.0 * self.d_model * self.d_ff
    }

    /// Bytes per token of the activations saved for backward: the input of each linear layer, `element` bytes per
    /// element. blocks · (d_model + d_ff) · element.
    pub fn activations(&self, element: f64) -> f64 {
        self.blocks * (self.d_model + self.d_ff) * element
    }
}

/// Bytes per parameter in training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bytes {
    pub weights: f64,
    pub gradients: f64,
    /// AdamW state: two moments.
    pub optimizer: f64,
}

impl Bytes {
    /// All f32: 4 + 4 + 8.
    pub const F32: Bytes = Bytes { weights: 4.0, gradients: 4.0, optimizer: 8.0 };

    pub fn sum(&self) -> f64 {
        self.weights + self.gradients + self.optimizer
    }
}

/// Number of devices of `capacity` bytes that hold `bytes`, as a fraction.
pub fn devices(bytes: f64, capacity: f64) -> f64 {
    bytes / capacity
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of part (a) of the assignment.
    #[test]
    fn xxl_needs_three_and_a_half_terabytes() {
        let p = Ffn::XXL.parameters();
        assert_eq!(p, 219_848_638_464.0);
        let state = p * Bytes::F32.sum();
        assert_eq!((state / 1e9).round(), 3518.0);
        assert_eq!(devices(state, 80e9).ceil(), 44.0);
        // 126 · (16384 + 53248) · 2 bytes.
        assert_eq!(Ffn::XXL.activations(2.0), 17_547_264.0);
    }
}
