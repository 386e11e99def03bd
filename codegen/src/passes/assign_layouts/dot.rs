//! The implementation of a dot: the instruction and its layouts.

use crate::analysis::access_layout::extents;
use crate::ir::DType;
use crate::layout::LinearLayout;
use crate::mma::{self, DotShape};
use crate::target::{CompileOptions, GpuArch};

/// The implementation of a dot of one shape.
#[derive(Clone, Debug, PartialEq)]
pub enum DotPlan {
    /// Matrix instructions (`mma.sync` or `wgmma`).
    Mma(mma::Plan),
    /// Multiply-add instructions.
    Fma { layout: LinearLayout },
}

/// Chooses the implementation; see [`mma::plan`].
pub fn plan_dot(dot: DotShape, arch: GpuArch, options: &CompileOptions) -> DotPlan {
    if let Some(plan) = mma::plan(dot, arch, options) {
        return DotPlan::Mma(plan);
    }
    let (DotShape { m, n, .. }, num_warps) = (dot, options.num_warps);
    let per_thread = (m * n / (32 * num_warps as usize)).max(1);
    let size = match per_thread {
        0..2 => [1, 1],
        2..4 => [1, 2],
        4..16 => [2, 2],
        _ => [4.min(m as u32), 4.min(n as u32)],
    };
    DotPlan::Fma { layout: LinearLayout::blocked_filling(&extents(&[m, n]), &size, num_warps, &[1, 0]) }
}

impl DotPlan {
    /// The plan of a dot by `wgmma`; `None` for other dots.
    pub fn wgmma(&self) -> Option<&mma::Plan> {
        match self {
            DotPlan::Mma(plan) if plan.instruction.family == mma::Family::Wgmma => Some(plan),
            DotPlan::Mma(_) | DotPlan::Fma { .. } => None,
        }
    }

    /// The element types in which the operands are multiplied.
    pub fn operands(&self, dot: &DotShape) -> [DType; 2] {
        match self {
            DotPlan::Mma(plan) => plan.instruction.operands,
            DotPlan::Fma { .. } => dot.operands.map(mma::widened),
        }
    }

    /// The element type in which products are summed.
    pub fn acc(&self, dot: &DotShape) -> DType {
        match self {
            DotPlan::Mma(plan) => plan.instruction.acc,
            DotPlan::Fma { .. } => mma::widened_acc(dot.acc),
        }
    }

    /// The layout of the accumulator and the result.
    pub fn acc_layout(&self, m: usize, n: usize) -> LinearLayout {
        match self {
            DotPlan::Mma(plan) => plan.acc_layout(&extents(&[m, n])),
            DotPlan::Fma { layout } => layout.clone(),
        }
    }

    /// The layout of operand a in registers; `None` for multiply-adds, which read it from shared memory.
    pub fn a_layout(&self, m: usize, k: usize) -> Option<LinearLayout> {
        match self {
            DotPlan::Mma(plan) => Some(plan.a_layout(&extents(&[m, k]))),
            DotPlan::Fma { .. } => None,
        }
    }

    /// The layout of operand b in registers; `None` for `wgmma` and multiply-adds, which read it from shared memory.
    pub fn b_layout(&self, k: usize, n: usize) -> Option<LinearLayout> {
        match self {
            DotPlan::Mma(plan) => plan.b_layout(&extents(&[k, n])),
            DotPlan::Fma { .. } => None,
        }
    }
}
