//! Progress of a run on standard error.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::train::Observer;
use crate::train::log::StepLine;

/// A progress bar on a terminal, else a line every [`LINE_INTERVAL`].
pub struct Progress {
    bar: ProgressBar,
    lines: bool,
    last_line: Instant,
    loss: MovingAverage,
    validation: Option<f64>,
}

/// An exponential moving average over about 20 steps; over all steps where there were fewer.
#[derive(Default)]
struct MovingAverage {
    weighted: f64,
    weights: f64,
}

impl MovingAverage {
    fn add(&mut self, x: f64) {
        const DECAY: f64 = 1.0 - 1.0 / 20.0;
        self.weighted = DECAY * self.weighted + (1.0 - DECAY) * x;
        self.weights = DECAY * self.weights + (1.0 - DECAY);
    }

    fn get(&self) -> Option<f64> {
        (self.weights > 0.0).then(|| self.weighted / self.weights)
    }
}

/// Time between lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

impl Progress {
    /// Creates the progress of a run that has completed `completed` of `steps` steps. Only rank 0 shows a bar.
    pub fn new(completed: u64, steps: u64, is_rank0: bool) -> Progress {
        let terminal = is_rank0 && std::io::stderr().is_terminal();
        let target = if terminal { ProgressDrawTarget::stderr_with_hz(5) } else { ProgressDrawTarget::hidden() };
        let bar = ProgressBar::with_draw_target(Some(steps), target).with_position(completed);
        let style = ProgressStyle::with_template("{wide_bar} {pos}/{len} {elapsed}<{eta}  {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.reset_eta();
        Progress { bar, lines: !terminal, last_line: Instant::now(), loss: MovingAverage::default(), validation: None }
    }

    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Formats the mean training loss and the latest validation loss.
    pub fn summary(&self) -> String {
        let format_loss = |loss: Option<f64>| loss.map_or("unknown".to_string(), |loss| format!("{loss:.3}"));
        format!(
            "training loss {} (moving average over about 20 steps), validation loss {}",
            format_loss(self.loss.get()),
            format_loss(self.validation)
        )
    }

    fn message(&self, line: &StepLine) -> String {
        let mfu = line.mfu.map(|mfu| format!(", MFU {:.0} %", 100.0 * mfu)).unwrap_or_default();
        let validation = self.validation.map(|loss| format!(", validation {loss:.3}")).unwrap_or_default();
        let loss = self.loss.get().unwrap_or(line.loss);
        format!("loss {loss:.3}{validation}, {} tokens/s{mfu}", thousands(line.tokens_per_second))
    }
}

/// Formats a number with a decimal prefix: `950`, `12.3 k`, `4.56 M`.
fn thousands(x: f64) -> String {
    match x {
        x if x < 1e3 => format!("{x:.0}"),
        x if x < 1e6 => format!("{:.1} k", x / 1e3),
        x => format!("{:.2} M", x / 1e6),
    }
}

impl Observer for Progress {
    fn step(&mut self, line: &StepLine) {
        self.loss.add(line.loss);
        let message = self.message(line);
        if self.lines && self.last_line.elapsed() >= LINE_INTERVAL {
            tilewright::terminal::print_stderr(format_args!("step {}: {message}", line.step));
            self.last_line = Instant::now();
        }
        self.bar.set_position(line.step);
        self.bar.set_message(message);
    }

    fn evaluated(&mut self, _step: u64, loss: f64) {
        self.validation = Some(loss);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_step_does_not_weigh_more_than_others() {
        let mut average = MovingAverage::default();
        assert_eq!(average.get(), None);
        for loss in [4.0, 2.0] {
            average.add(loss);
        }
        // Weights of 0.95 and 1.
        let expected = (0.95 * 4.0 + 2.0) / 1.95;
        assert!((average.get().unwrap() - expected).abs() < 1e-12);
    }

    #[test]
    fn numbers_are_short() {
        assert_eq!([950.4, 12_345.0, 4_560_000.0].map(thousands), ["950", "12.3 k", "4.56 M"]);
    }
}
