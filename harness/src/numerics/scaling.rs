//! Gradients that f16 cannot hold, and the scale of the loss that saves them.

use super::accumulate::Format;
use super::autocast::uniform;
use crate::report::{Axis, Cell, Column, Plot, Report, Series, Table};

/// Share of `values` that become zero in a type, where they are multiplied by `scale` before and divided by it after.
pub fn flushed(values: &[f64], format: Format, scale: f64) -> f64 {
    let zeros = values.iter().filter(|&&v| v != 0.0 && format.round(v * scale) / scale == 0.0).count();
    zeros as f64 / values.len() as f64
}

/// Share of `values` that become infinite in a type when they are multiplied by `scale`.
pub fn overflown(values: &[f64], format: Format, scale: f64) -> f64 {
    values.iter().filter(|&&v| format.round(v * scale).is_infinite()).count() as f64 / values.len() as f64
}

/// The scale that the loss is multiplied by at the start of a training in f16.
const SCALE: f64 = 65536.0;

/// A table over magnitudes of gradients.
pub fn report() -> Report {
    let magnitudes: Vec<i32> = (-11..=2).collect();
    let values =
        |exponent: i32| -> Vec<f64> { uniform(11).take(4096).map(|v| f64::from(v) * 10_f64.powi(exponent)).collect() };
    let lost = |exponent: i32, format: Format, scale: f64| {
        let values = values(exponent);
        100.0 * (flushed(&values, format, scale) + overflown(&values, format, scale))
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
             stops without a sign. Multiplying the loss by {SCALE} moves all gradients up by as much, since the backward \
             pass is linear in it; the optimizer divides by it again, in f32. Too large a scale overflows, which is why \
             trainers halve it when they see an infinity and double it after a while without one. bfloat16 has f32's range \
             and needs no scale."
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
        assert_eq!(overflown(&[0.5, 2.0], Format::F16, SCALE), 0.5);
        assert_eq!(overflown(&[0.5, 2.0], Format::Bf16, SCALE), 0.0);
    }
}
