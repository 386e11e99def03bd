//! The demo's weighted sum, forward and backward.

use std::collections::BTreeMap;

use tilewright::codegen::ir::DType;
use tilewright::codegen::lang::kernel::KernelDef;
use tilewright::kernels::column_sum::COLUMN_SUM;
use tilewright::kernels::weighted_sum::{WEIGHTED_SUM_BWD, WEIGHTED_SUM_FWD, reference};

use super::case::{Call, Case, Launches, count, extent, tolerance};
use super::inputs::Inputs;
use crate::cli::{CliError, Result};

const ROWS_TILE: usize = 32;
const D_TILE: usize = 64;

/// Returns the forward case (y = x·w) and the backward case (its gradients); none if the inputs lack x or w.
///
/// # Errors
/// Inconsistent shapes.
pub fn cases(inputs: &Inputs, dtype: DType) -> Result<Vec<Case>> {
    let (Some(x), Some(w)) = (inputs.get("x"), inputs.get("w")) else { return Ok(Vec::new()) };
    let &[rows, d] = x.shape.as_slice() else {
        return Err(CliError::Failure(format!("`x` has shape {:?}: expected [rows, d]", x.shape)));
    };
    inputs.expect_shape("w", &[d])?;
    let grad_y = inputs.get_or_ones("grad_y", &[rows])?;

    let (x, w) = (x.rounded(dtype), w.rounded(dtype));
    let grad_y = grad_y.rounded(DType::F32);
    let (x64, w64, grad64) = (x.to_f64(), w.to_f64(), grad_y.to_f64());
    let programs = rows.div_ceil(ROWS_TILE);
    let shape = format!("[{rows}, {d}]");
    let forward = Case {
        kernel: "weighted sum".to_string(),
        name: format!("weighted-sum.{dtype}"),
        shape: shape.clone(),
        dtype,
        inputs: BTreeMap::from([("x", x.clone()), ("w", w.clone())]),
        outputs: BTreeMap::from([("y", (vec![rows], DType::F32))]),
        calls: Box::new(move |_| {
            let calls = vec![call(&WEIGHTED_SUM_FWD, vec![dtype], [programs, 1])];
            Ok(Launches { calls, ..Launches::default() })
        }),
        expected: vec![("y", reference::forward(&x64, &w64, rows))],
        // The reference has the same rounded inputs, and sums are accumulated in f32.
        tolerance: tolerance(DType::F32),
    };
    let (grad_x, grad_w) = reference::backward(&x64, &w64, &grad64);
    let backward = Case {
        kernel: "weighted sum backward".to_string(),
        name: format!("weighted-sum-backward.{dtype}"),
        shape,
        dtype,
        inputs: BTreeMap::from([("x", x), ("w", w), ("grad_y", grad_y)]),
        outputs: BTreeMap::from([
            ("grad_x", (vec![rows, d], dtype)),
            ("partial_grad_w", (vec![programs, d], DType::F32)),
            ("grad_w", (vec![1, d], DType::F32)),
        ]),
        calls: Box::new(move |_| {
            let columns = d.div_ceil(D_TILE);
            let mut gradients = call(&WEIGHTED_SUM_BWD, vec![dtype], [programs, columns]);
            let mut sum = call(&COLUMN_SUM, vec![DType::F32, DType::F32], [columns, 1]);
            gradients.scalars.push(("rows_per_program", extent("x", ROWS_TILE)?));
            // One program sums all rows of partial sums.
            let rows_per_program = extent("partial_grad_w", programs.next_multiple_of(ROWS_TILE).max(ROWS_TILE))?;
            sum.scalars.push(("rows_per_program", rows_per_program));
            sum.renamed = vec![("x", "partial_grad_w"), ("y", "grad_w")];
            Ok(Launches { calls: vec![gradients, sum], ..Launches::default() })
        }),
        expected: vec![("grad_x", grad_x), ("grad_w", grad_w)],
        tolerance: tolerance(dtype),
    };
    Ok(vec![forward, backward])
}

/// Builds a launch with the tiles of this file.
fn call(def: &'static KernelDef, dtypes: Vec<DType>, grid: [usize; 2]) -> Call {
    Call {
        def,
        dtypes,
        constants: vec![count("rows_tile", ROWS_TILE), count("d_tile", D_TILE)],
        renamed: Vec::new(),
        scalars: Vec::new(),
        grid: [grid[0], grid[1], 1],
        num_warps: 4,
        num_stages: 3,
    }
}
