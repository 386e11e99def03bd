//! What of layer normalisation needs 32 bits: the same rows in several precisions, at several scales.

use candle_core::{DType, Device, Result, Tensor};

use super::autocast::{layer_norm, uniform};
use crate::report::{Cell, Column, Report, Table};

/// How a row is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Type of the row.
    pub stored: DType,
    /// Type of every step between.
    pub computed: DType,
}

pub const WAYS: [Way; 4] = [
    Way { stored: DType::F16, computed: DType::F16 },
    Way { stored: DType::F16, computed: DType::F32 },
    Way { stored: DType::BF16, computed: DType::BF16 },
    Way { stored: DType::BF16, computed: DType::F32 },
];

const ROWS: usize = 16;
const WIDTH: usize = 1024;

/// Largest error of normalised rows against f64, where the rows are `scale` times numbers from −1 to 1, with a mean of
/// `offset` times the scale. The f64 result is that of the rows as they are stored. NaN where a row has no finite result.
///
/// # Errors
/// What candle refuses.
pub fn error(way: Way, scale: f32, offset: f32) -> Result<f64> {
    let values: Vec<f32> = uniform(9).take(ROWS * WIDTH).map(|v| scale * (v + offset)).collect();
    let x = Tensor::from_vec(values, (ROWS, WIDTH), &Device::Cpu)?.to_dtype(way.stored)?;
    let run = |dtype: DType| {
        let (one, zero) = (Tensor::ones(WIDTH, dtype, &Device::Cpu)?, Tensor::zeros(WIDTH, dtype, &Device::Cpu)?);
        layer_norm(&x.to_dtype(dtype)?, &one, &zero)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()
    };
    let (found, expected) = (run(way.computed)?, run(DType::F64)?);
    let errors = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    Ok(errors.fold(0.0, |worst: f64, e| if e.is_nan() || worst.is_nan() { f64::NAN } else { worst.max(e) }))
}

/// A table over scales.
///
/// # Errors
/// What candle refuses.
pub fn report() -> Result<Report> {
    const CASES: [(&str, f32, f32); 4] = [
        ("numbers around 1", 1.0, 0.0),
        ("mean 16 × the deviation", 1.0, 16.0),
        ("numbers around 1000", 1000.0, 0.0),
        ("numbers around 0.001", 0.001, 0.0),
    ];
    let columns = CASES.iter().map(|(name, ..)| Column::number(name).significant(2));
    let mut table = Table::new(
        "layer-norm",
        &format!("LayerNorm over {WIDTH} numbers: largest error against f64"),
        [Column::text("rows in"), Column::text("computed in")].into_iter().chain(columns),
    )
    .note("An error of 1.7 or more, the size of the result itself, is that of rows that became zero: their variance was infinite.");
    for way in WAYS {
        let errors = CASES.iter().map(|&(_, scale, offset)| error(way, scale, offset).map(Cell::from));
        let errors = errors.collect::<Result<Vec<_>>>()?;
        let names = [way.stored, way.computed].map(|dtype| Cell::from(dtype.as_str()));
        table.push(names.into_iter().chain(errors));
    }
    Ok(Report::new("layer-norm", "LayerNorm in 16 bits")
        .text(
            "The sensitive parts are the reductions: mean and variance add up as many terms as a row is wide, and the \
             variance squares them first. In f16 the sum of squares passes 65504, the largest number, for quite ordinary \
             activations. bfloat16 has f32's range, so that nothing overflows, but 8 digits: each of a thousand additions \
             is rounded to them, and where the mean is large against the deviation, x − mean has hardly a digit left. So \
             the statistics stay in f32 with either type; only the rows need 16 bits, and their rounding is then all that \
             the result suffers from.",
        )
        .table(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_statistics_are_what_helps() {
        for pair in WAYS.chunks(2) {
            let (narrow, wide) = (error(pair[0], 1.0, 16.0).unwrap(), error(pair[1], 1.0, 16.0).unwrap());
            assert!(wide < 1e-4 && !(narrow < 1e-2), "{pair:?}: {narrow} {wide}");
        }
        // Squares of 1000 are beyond f16 and not beyond bf16.
        assert!(!(error(WAYS[0], 1000.0, 0.0).unwrap() < 0.5));
        assert!(error(WAYS[2], 1000.0, 0.0).unwrap() < 0.5);
    }
}
