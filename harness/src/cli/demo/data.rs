//! The inputs that ship with the demo. A test below generates and compares them.
//!
//! | tensor | shape | type |
//! |---|---|---|
//! | x, w, grad_y | [100, 120], [120], [100] | f32 |
//! | q, d_o | [1, 4, 144, 64] | bf16 |
//! | k, v | [1, 2, 144, 64] | bf16 |
//!
//! The sequence length is deliberately not a multiple of a tile, and two query heads share each key/value head.

/// The file `harness/data/demo.safetensors`.
pub const SHIPPED: &[u8] = include_bytes!("../../../data/demo.safetensors");

#[cfg(test)]
mod tests {
    use super::SHIPPED;
    use crate::cli::tensors::{Tensor, parse, serialize};
    use std::path::Path;
    use tilewright::codegen::ir::DType;

    /// Generates the file's contents. The numbers are the same on every machine: integer arithmetic and exact sums.
    fn generate() -> Result<Vec<u8>, String> {
        let mut random = Random(2022);
        let mut tensor = |name: &str, dtype, shape: &[usize]| {
            let values: Vec<f64> = (0..shape.iter().product()).map(|_| random.approx_normal()).collect();
            (name.to_string(), Tensor::from_f64(dtype, shape, &values))
        };
        serialize(&[
            tensor("x", DType::F32, &[100, 120]),
            tensor("w", DType::F32, &[120]),
            tensor("grad_y", DType::F32, &[100]),
            tensor("q", DType::BF16, &[1, 4, 144, 64]),
            tensor("k", DType::BF16, &[1, 2, 144, 64]),
            tensor("v", DType::BF16, &[1, 2, 144, 64]),
            tensor("d_o", DType::BF16, &[1, 4, 144, 64]),
        ])
    }

    /// SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut z = self.0;
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        }

        /// Returns an approximately normal number with mean 0: the sum of four uniform numbers has variance 1/3, so
        /// 1.75 times it has variance 1.02.
        fn approx_normal(&mut self) -> f64 {
            let uniform = |bits: u64| (bits >> 40) as f64 / (1_u64 << 24) as f64;
            let sum: f64 = (0..4).map(|_| uniform(self.next())).sum();
            (sum - 2.0) * 1.75
        }
    }

    /// `BLESS=1` writes the file.
    #[test]
    fn the_shipped_file_is_what_the_generator_makes() {
        let made = generate().unwrap();
        if std::env::var_os("BLESS").is_some_and(|v| v == "1") {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("data/demo.safetensors");
            std::fs::write(path, &made).unwrap();
            return;
        }
        assert!(
            made == SHIPPED,
            "harness/data/demo.safetensors differs from the output of `generate`: BLESS=1 rewrites it"
        );
        assert!(made.len() < 300_000);
    }

    #[test]
    fn the_numbers_look_normal() {
        for (name, tensor) in parse(SHIPPED).unwrap() {
            let values = tensor.to_f64();
            let n = values.len() as f64;
            let mean = values.iter().sum::<f64>() / n;
            let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n;
            assert!(mean.abs() < 0.3 && (0.6..1.5).contains(&variance), "{name}: mean {mean}, variance {variance}");
        }
    }
}
