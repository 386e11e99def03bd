//! Accumulates a small number many times, in several precisions.

use half::{bf16, f16};

use crate::report::{Axis, Cell, Column, Plot, Point, Report, Series, Table};

/// A floating-point type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    F64,
    F32,
    F16,
    Bf16,
}

impl Format {
    pub fn name(self) -> &'static str {
        match self {
            Format::F64 => "f64",
            Format::F32 => "f32",
            Format::F16 => "f16",
            Format::Bf16 => "bf16",
        }
    }

    /// Rounds to the nearest number of this type.
    pub fn round(self, x: f64) -> f64 {
        match self {
            Format::F64 => x,
            Format::F32 => f64::from(x as f32),
            Format::F16 => f16::from_f64(x).to_f64(),
            Format::Bf16 => bf16::from_f64(x).to_f64(),
        }
    }

    /// `a + b` of two numbers of this type, rounded once: the f64 sum is exact or has far more digits than the type.
    pub fn add(self, a: f64, b: f64) -> f64 {
        self.round(a + b)
    }

    /// The distance from `x` to the next larger number of this type (ULP).
    pub fn spacing(self, x: f64) -> f64 {
        // Bits of the fraction.
        let digits = match self {
            Format::F64 => 52,
            Format::F32 => 23,
            Format::F16 => 10,
            Format::Bf16 => 7,
        };
        2_f64.powi(x.abs().log2().floor() as i32 - digits)
    }
}

/// One combination of types, with its running sums.
#[derive(Clone, Debug, PartialEq)]
pub struct Accumulation {
    /// Type of the running sum.
    pub sum: Format,
    /// Type of the stored addend.
    pub addend: Format,
    /// Whether the program casts the addend to the type of the sum; otherwise the addition converts it.
    pub cast: bool,
    /// The sum after each addition.
    pub sums: Vec<f64>,
}

impl Accumulation {
    /// Adds `addend` to zero `steps` times.
    pub fn run(sum: Format, addend: Format, cast: bool, value: f64, steps: usize) -> Accumulation {
        // A cast to a wider type is exact; a cast to a narrower one equals the conversion of the addition.
        let value = sum.round(addend.round(value));
        let next = |total: &mut f64, _| {
            *total = sum.add(*total, value);
            Some(*total)
        };
        Accumulation { sum, addend, cast, sums: (0..steps).scan(0.0, next).collect() }
    }

    pub fn result(&self) -> f64 {
        self.sums.last().copied().unwrap_or(0.0)
    }

    /// The first addition that did not change the sum, counted from 1.
    pub fn stalled_at(&self) -> Option<usize> {
        self.sums.windows(2).position(|pair| pair[0] == pair[1]).map(|i| i + 2)
    }

    fn label(&self) -> String {
        let cast = if self.cast { ", cast first" } else { "" };
        format!("{} += {}{cast}", self.sum.name(), self.addend.name())
    }
}

/// The four sums of the assignment, and two with bfloat16.
pub fn experiment(value: f64, steps: usize) -> Vec<Accumulation> {
    let run = |sum, addend, cast| Accumulation::run(sum, addend, cast, value, steps);
    vec![
        run(Format::F32, Format::F32, false),
        run(Format::F16, Format::F16, false),
        run(Format::F32, Format::F16, false),
        run(Format::F32, Format::F16, true),
        run(Format::Bf16, Format::Bf16, false),
        run(Format::F32, Format::Bf16, true),
    ]
}

/// Returns the table, the plot and the explanation of [`experiment`].
pub fn report(value: f64, steps: usize) -> Report {
    let exact = value * steps as f64;
    let runs = experiment(value, steps);
    let mut table = Table::new(
        "accumulation",
        &format!("{steps} × {value}, added one by one (exactly {})", short(exact)),
        [
            Column::text("sum += addend"),
            Column::number("result").decimals(4),
            Column::number("error").significant(2),
            Column::number("error of the addend").significant(2),
            Column::number("error of the additions").significant(2),
            Column::number("spacing at the result").significant(2),
            Column::text("stalls"),
        ],
    );
    for run in &runs {
        let result = run.result();
        let of_addend = (run.sum.round(run.addend.round(value)) - value) * steps as f64;
        let stalls = run.stalled_at().map_or("never".to_string(), |step| format!("at step {step}"));
        table.push([
            Cell::from(run.label()),
            Cell::from(result),
            Cell::from(result - exact),
            Cell::from(of_addend),
            // The rest of the error is the rounding of the additions of this row.
            Cell::from(if (result - exact - of_addend).abs() < 1e-12 { 0.0 } else { result - exact - of_addend }),
            Cell::from(if result == 0.0 { 0.0 } else { run.sum.spacing(result) }),
            Cell::from(stalls),
        ]);
    }
    let series = runs.iter().filter(|run| !run.cast || run.addend == Format::Bf16).map(|run| {
        let every = (steps / 200).max(1);
        let error = |(i, sum): (usize, &f64)| Point::from(((i + 1) as f64, (sum - value * (i + 1) as f64).abs()));
        Series::new(&run.label(), run.sums.iter().enumerate().step_by(every).map(error))
    });
    let plot = Plot::lines(
        "accumulation-error",
        "Error of the running sum",
        Axis::linear("additions"),
        Axis::log10("|sum − exact|"),
        series.collect(),
    );
    Report::new("accumulation", "Accumulation in mixed precision")
        .text(explanation(value, &runs))
        .table(table)
        .plot(plot)
}

/// Explains the results of `runs` in a text for the report.
fn explanation(value: f64, runs: &[Accumulation]) -> String {
    let stored = |format: Format| format.round(value);
    let stall = runs.iter().find(|run| run.sum == Format::Bf16).and_then(Accumulation::stalled_at);
    let stall = stall.map_or(String::new(), |step| {
        format!(
            " With the 8 significant bits of bfloat16 the sum stalls at step {step}: half the distance to the next number \
             exceeds the addend."
        )
    });
    format!(
        "The result has two errors. First, the stored addend is rounded once: {value} becomes {:.9} in f32, {:.9} in f16 and \
         {:.9} in bf16, and this error is proportional to the number of steps. Second, each sum is rounded to the spacing \
         of the type, which grows with the sum: near 10 it is {:.1e} in f32, {:.4} in f16 and {:.4} in bf16.{stall}\n\n\
         The type of the sum matters most: an f32 sum of f16 numbers has only the error of the stored addend (a thousand \
         numbers of 11 significant bits add up exactly in 24), whether the program casts the addend or the addition \
         does. Matmuls, reductions and optimizer states therefore accumulate in f32 even if their operands have 16 bits.",
        stored(Format::F32),
        stored(Format::F16),
        stored(Format::Bf16),
        Format::F32.spacing(10.0),
        Format::F16.spacing(10.0),
        Format::Bf16.spacing(10.0),
    )
}

/// Formats with up to nine decimals, without trailing zeros.
fn short(x: f64) -> String {
    let text = format!("{x:.9}");
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of the assignment, to four decimals.
    #[test]
    fn the_four_sums() {
        let results: Vec<String> = experiment(0.01, 1000).iter().map(|run| format!("{:.4}", run.result())).collect();
        assert_eq!(results[..4], ["10.0001", "9.9531", "10.0021", "10.0021"]);
    }

    #[test]
    fn additions_round_as_the_types_do() {
        let (mut narrow, mut wide, mut brain) = (f16::ZERO, 0_f32, bf16::ZERO);
        for _ in 0..1000 {
            narrow += f16::from_f32(0.01);
            wide += 0.01;
            brain += bf16::from_f32(0.01);
        }
        let runs = experiment(0.01, 1000);
        assert_eq!(runs[0].result(), f64::from(wide));
        assert_eq!(runs[1].result(), narrow.to_f64());
        assert_eq!(runs[4].result(), brain.to_f64());
        let stall = runs[4].stalled_at().unwrap();
        assert!(runs[4].sums[stall - 3] < runs[4].sums[stall - 2] && runs[4].sums[stall - 1] == brain.to_f64());
    }

    #[test]
    fn spacings_are_those_of_the_types() {
        assert_eq!(Format::F32.spacing(10.0), f64::from(10_f32.next_up() - 10.0));
        assert_eq!(Format::F16.spacing(10.0), 0.0078125);
        assert_eq!(Format::Bf16.spacing(1.0), 0.0078125);
        assert_eq!(Format::F64.spacing(1.0), f64::EPSILON);
    }
}
