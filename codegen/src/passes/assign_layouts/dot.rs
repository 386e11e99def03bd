//! Which instruction computes a dot, and with which layouts.

use super::choose::extents;
use crate::ir::{DType, Precision};
use crate::layout::LinearLayout;
use crate::target::GpuArch;

/// How a dot of one shape is computed.
#[derive(Clone, Debug, PartialEq)]
pub enum DotPlan {
    /// `wgmma`: b in shared memory, a in shared memory or registers. Operands of f32 are multiplied as tf32.
    Wgmma { warps: [u32; 2], n: u32 },
    /// `mma.sync` with 16-bit (m16n8k16) or tf32 (m16n8k8) operands.
    MmaSync { warps: [u32; 2] },
    /// Multiply-adds.
    Fma { layout: LinearLayout },
}

/// Shape and types of a dot.
#[derive(Clone, Copy, Debug)]
pub struct DotShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub operands: DType,
    pub acc: DType,
    pub precision: Precision,
}

/// Largest N of one `wgmma`.
const WGMMA_MAX_N: usize = 256;

/// Chooses the product. Warps stand along M as far as the instruction's rows go, so that a row of the result (and with
/// it a softmax over the row, and the next dot in a chain) stays inside one warp. Products of f32 are the work of warpgroups where
/// `wgmma_f32` says so.
pub fn plan_dot(dot: DotShape, arch: GpuArch, num_warps: u32, wgmma_f32: bool) -> DotPlan {
    let DotShape { m, n, k, operands, acc, precision } = dot;
    let half = matches!(operands, DType::F16 | DType::BF16) && acc == DType::F32;
    let tf32 = operands == DType::F32 && acc == DType::F32 && precision != Precision::Ieee;
    let k_instr = if half { 16 } else { 8 };
    if (half || (tf32 && wgmma_f32))
        && arch >= GpuArch::Sm90a
        && m.is_multiple_of(64)
        && k.is_multiple_of(k_instr)
        && n >= 8
        && num_warps.is_multiple_of(4)
    {
        let groups = (num_warps / 4).min((m / 64) as u32);
        let warps = [4 * groups, num_warps / (4 * groups)];
        if n >= 8 * warps[1] as usize {
            return DotPlan::Wgmma { warps, n: (n / warps[1] as usize).min(WGMMA_MAX_N) as u32 };
        }
    }
    if (half || tf32) && m >= 16 && n >= 8 && k >= k_instr {
        let along_m = num_warps.min((m / 16) as u32);
        return DotPlan::MmaSync { warps: [along_m, num_warps / along_m] };
    }
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
    /// Layout of accumulator and result.
    pub fn acc_layout(&self, m: usize, n: usize) -> LinearLayout {
        let shape = extents(&[m, n]);
        match self {
            DotPlan::Wgmma { warps, n } => LinearLayout::wgmma_acc(&shape, *n, *warps),
            DotPlan::MmaSync { warps } => LinearLayout::mma_m16n8(&shape, *warps),
            DotPlan::Fma { layout } => layout.clone(),
        }
    }

    /// Layout in which operand a can stay in registers.
    pub fn a_layout(&self, m: usize, k: usize, operands: DType) -> Option<LinearLayout> {
        let shape = extents(&[m, k]);
        match self {
            DotPlan::Wgmma { warps, .. } => Some(LinearLayout::wgmma_a_operand(&shape, operands.bits() as u32, *warps)),
            DotPlan::MmaSync { warps } => Some(LinearLayout::mma_m16n8_a(&shape, operands.bits() as u32, *warps)),
            DotPlan::Fma { .. } => None,
        }
    }

    /// Layout in which operand b can stay in registers.
    pub fn b_layout(&self, k: usize, n: usize, operands: DType) -> Option<LinearLayout> {
        match self {
            DotPlan::MmaSync { warps } => {
                Some(LinearLayout::mma_m16n8_b(&extents(&[k, n]), operands.bits() as u32, *warps))
            }
            DotPlan::Wgmma { .. } | DotPlan::Fma { .. } => None,
        }
    }
}
