//! Which parts of layer normalization need 32 bits: the same rows in several precisions, at several scales.

use candle_core::{DType, Device, Result, Tensor};

use super::autocast::{layer_norm, uniform};
use crate::report::{Cell, Column, Report, Table};

/// Precision of a row: storage and arithmetic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NormPrecision {
    /// Dtype of the stored row.
    pub stored: DType,
    /// Dtype of every intermediate step.
    pub computed: DType,
}

pub const NORM_PRECISIONS: [NormPrecision; 4] = [
    NormPrecision { stored: DType::F16, computed: DType::F16 },
    NormPrecision { stored: DType::F16, computed: DType::F32 },
    NormPrecision { stored: DType::BF16, computed: DType::BF16 },
    NormPrecision { stored: DType::BF16, computed: DType::F32 },
];

const ROWS: usize = 16;
const D: usize = 1024;

/// Largest error of normalized rows against f64, for rows of `scale` · (v + `offset`) with uniformly random v from −1
/// to 1. The f64 reference uses the rows as stored. NaN if an element of the result is NaN.
///
/// # Errors
/// Errors of candle.
pub fn error(precision: NormPrecision, scale: f32, offset: f32) -> Result<f64> {
    let values: Vec<f32> = uniform(9).take(ROWS * D).map(|v| scale * (v + offset)).collect();
    let x = Tensor::from_vec(values, (ROWS, D), &Device::Cpu)?.to_dtype(precision.stored)?;
    let run = |dtype: DType| {
        let (one, zero) = (Tensor::ones(D, dtype, &Device::Cpu)?, Tensor::zeros(D, dtype, &Device::Cpu)?);
        layer_norm(&x.to_dtype(dtype)?, &one, &zero)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()
    };
    let (found, expected) = (run(precision.computed)?, run(DType::F64)?);
    let errors = found.iter().zip(&expected).map(|(a, b)| (a - b).abs());
    Ok(errors.fold(0.0, |worst: f64, e| if e.is_nan() || worst.is_nan() { f64::NAN } else { worst.max(e) }))
}

/// Returns a table of the errors of all [`NORM_PRECISIONS`] at several scales.
///
/// # Errors
/// Errors of candle.
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
        &format!("LayerNorm over {D} numbers: largest error against f64"),
        [Column::text("storage dtype").key("rows_in"), Column::text("compute dtype").key("computed_in")]
            .into_iter()
            .chain(columns),
    )
    .note(
        "An error of 1.7 or more, the magnitude of the result, means that rows became zero: their variance overflowed.",
    );
    for precision in NORM_PRECISIONS {
        let errors = CASES.iter().map(|&(_, scale, offset)| error(precision, scale, offset).map(Cell::from));
        let errors = errors.collect::<Result<Vec<_>>>()?;
        let names = [precision.stored, precision.computed].map(|dtype| Cell::from(dtype.as_str()));
        table.push(names.into_iter().chain(errors));
    }
    Ok(Report::new("layer-norm", "LayerNorm in 16 bits")
        .text(
            "The sensitive parts are the reductions: mean and variance sum over a whole row, and the variance squares its \
             terms first. In f16 the sum of squares exceeds 65504, the largest number, for ordinary activations. bfloat16 \
             has the range of f32, so nothing overflows, but only 8 significant bits: each of a thousand additions is \
             rounded to them, and if the mean is large against the deviation, x − mean has hardly a significant bit left. \
             The statistics therefore stay in f32 with either type; only the rows have 16 bits, and their rounding is then \
             the only error of the result.",
        )
        .table(table))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f32_statistics_restore_accuracy() {
        for pair in NORM_PRECISIONS.chunks(2) {
            let (narrow, wide) = (error(pair[0], 1.0, 16.0).unwrap(), error(pair[1], 1.0, 16.0).unwrap());
            assert!(wide < 1e-4 && !(narrow < 1e-2), "{pair:?}: {narrow} {wide}");
        }
        // The squares of 1000 overflow f16 but not bf16.
        assert!(!(error(NORM_PRECISIONS[0], 1000.0, 0.0).unwrap() < 0.5));
        assert!(error(NORM_PRECISIONS[2], 1000.0, 0.0).unwrap() < 0.5);
    }
}
