//! Gradients outside of the range of f16, and loss scaling.

use super::accumulate::Format;
use super::autocast::uniform;
use crate::report::{Axis, Cell, Column, Plot, Report, Series, Table};

/// Fraction of `values` that a type flushes to zero, if they are multiplied by `scale` before rounding and divided by
/// it after.
pub fn flushed(values: &[f64], format: Format, scale: f64) -> f64 {
    let zeros = values.iter().filter(|&&v| v != 0.0 && format.round(v * scale) / scale == 0.0).count();
    zeros as f64 / values.len() as f64
}

/// Fraction of `values` that overflow a type if multiplied by `scale`.
pub fn overflowed(values: &[f64], format: Format, scale: f64) -> f64 {
    values.iter().filter(|&&v| format.round(v * scale).is_infinite()).count() as f64 / values.len() as f64
}

/// Initial loss scale of f16 training.
const SCALE: f64 = 65536.0;

/// Returns a table and a plot of the share of lost gradients by their magnitude.
pub fn report() -> Report {
    let magnitudes: Vec<i32> = (-11..=2).collect();
    let values =
        |exponent: i32| -> Vec<f64> { uniform(11).take(4096).map(|v| f64::from(v) * 10_f64.powi(exponent)).collect() };
    let lost = |exponent: i32, format: Format, scale: f64| {
        let values = values(exponent);
        100.0 * (flushed(&values, format, scale) + overflowed(&values, format, scale))
    };
    let mut table = Table::new(
        "loss-scaling",
        "Share of gradients that are lost: rounded to zero, or to infinity",
        [
            Column::text("gradients up to"),
            Column::number("f16").unit("%").decimals(1),
            Column::number(&format!("f16, loss × {SCALE}")).unit("%").decimals(1).key("f16_scaled_percent"),
            Column::number("bf16").unit("%").decimals(1),
        ],
    );
    for &exponent in magnitudes.iter().rev() {
        table.push([
            Cell::from(format!("1e{exponent}")),
            Cell::from(lost(exponent, Format::F16, 1.0)),
            Cell::from(lost(exponent, Format::F16, SCALE)),
            Cell::from(lost(exponent, Format::Bf16, 1.0)),
        ]);
    }
    let series = |name: &str, format: Format, scale: f64| {
        Series::new(name, magnitudes.iter().map(|&e| (10_f64.powi(e), lost(e, format, scale)).into()))
    };
    let plot = Plot::lines(
        "loss-scaling",
        "Gradients lost to the range of the type",
        Axis::log10("largest gradient"),
        Axis::linear("lost (%)"),
        vec![
            series("f16", Format::F16, 1.0),
            series(&format!("f16, loss × {SCALE}"), Format::F16, SCALE),
            series("bf16", Format::Bf16, 1.0),
        ],
    );
    Report::new("loss-scaling", "Loss scaling")
        .text(format!(
            "f16 has no number between 0 and 6·10⁻⁸, and none above 65504: small gradients become zero, and training \
             stalls silently. Multiplying the loss by {SCALE} scales all gradients by the same factor, because the \
             backward pass is linear in it; the optimizer divides by it in f32. Too large a scale overflows; trainers \
             therefore halve it after a non-finite gradient and double it after a number of finite steps. bfloat16 has \
             the range of f32 and needs no loss scaling."
        ))
        .table(table)
        .plot(plot)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_saves_small_gradients_and_loses_large_ones() {
        let small = [1e-9, -2e-8, 5e-5];
        assert!((flushed(&small, Format::F16, 1.0) - 2.0 / 3.0).abs() < 1e-12);
        assert_eq!(flushed(&small, Format::F16, SCALE), 0.0);
        assert_eq!(flushed(&small, Format::Bf16, 1.0), 0.0);
        assert_eq!(overflowed(&[0.5, 2.0], Format::F16, SCALE), 0.5);
        assert_eq!(overflowed(&[0.5, 2.0], Format::Bf16, SCALE), 0.0);
    }
}
