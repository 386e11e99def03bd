//! Checks the outputs of attention before it is timed.

use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::Precision;
use tilewright::kernels::attention::Options;
use tilewright::kernels::attention::reference::Problem;

use super::measure::Step;
use crate::cli::bench::attention_check::{Attention, small};
use crate::cli::bench::data::{Number, values};
use crate::cli::bench::record::{BenchError, accept};
use crate::cli::demo::case::tolerance;

/// Largest number of multiply-adds of QKᵀ, over all heads, for which all outputs are checked in f64.
const MAX_FULL_CHECK: f64 = 1e8;

/// The largest relative error, and what was checked.
#[derive(Clone, Debug, PartialEq)]
pub struct Checked {
    pub error: f64,
    /// Description of the check.
    pub how: String,
}

/// Runs one step on poisoned outputs and checks them: all outputs, or for a large problem some rows, and all outputs of
/// a small problem with the same tiles.
///
/// # Errors
/// [`BenchError::WrongResult`] if an error exceeds the tolerance; errors of the device.
pub fn check<T: Number>(step: &mut Step<T>, options: &Options) -> Result<Checked, BenchError> {
    let problem = *step.attention.problem();
    step.attention.poison_forward()?;
    step.attention.poison_backward()?;
    step.run(options)?;
    let mut error = sum_error(step)?;
    let size = problem.batch as f64 * problem.heads_q as f64 * (problem.n_q as f64).powi(2) * problem.d as f64;
    let how = if size <= MAX_FULL_CHECK {
        let expected = step.attention.expected()?;
        error = error.max(step.attention.check_forward(&expected)?);
        error = error.max(step.attention.check_backward(&expected)?);
        "all outputs against f64".to_string()
    } else {
        error = error.max(step.attention.spot_check_forward()?);
        error = error.max(step.attention.spot_check_backward()?);
        let reduced = small(&problem);
        error = error.max(check_small::<T>(step, reduced, options)?);
        format!("rows of several heads, and all outputs at {} tokens with the same tiles, against f64", reduced.n_q)
    };
    Ok(Checked { error, how })
}

/// Returns the tolerance on the relative error. tf32 rounds each operand to ten mantissa bits.
pub fn tolerance_of<T: Number>(precision: Option<Precision>) -> f64 {
    match (T::dtype(), precision) {
        (DType::F32, Some(Precision::Tf32)) => 2e-3,
        (dtype, _) => tolerance(dtype),
    }
}

fn check_small<T: Number>(step: &Step<T>, problem: Problem, options: &Options) -> Result<f64, BenchError> {
    let small = Attention::<T>::new(step.device(), problem)?.split_like(step.attention.problem());
    let mut small = small.with_tolerance(tolerance_of::<T>(options.precision));
    let expected = small.expected()?;
    small.forward(options)?;
    small.backward(options)?;
    let forward = small.check_forward(&expected)?;
    Ok(forward.max(small.check_backward(&expected)?))
}

/// Returns the error of the sum of O, against the f64 sum of the O that was written, relative to the root of the sum of
/// squares of O, because the terms cancel.
fn sum_error<T: Number>(step: &Step<T>) -> Result<f64, BenchError> {
    let o = values(step.attention.output())?;
    let (want, scale) = (o.iter().sum::<f64>(), o.iter().map(|x| x * x).sum::<f64>().sqrt());
    let found = step.total()?;
    accept("the sum of O", (found - want).abs() / scale.max(f64::MIN_POSITIVE), 1e-3)
}
