//! The MMA instructions of NVIDIA GPUs: one table for planning, the verifier, the lowering, the simulator and the
//! random programs. It is the only definition of what is legal.
//!
//! - [`TABLE`] has a row per family, operand type and accumulator type (PTX ISA, "Matrix Multiply-Accumulate
//!   Instructions").
//! - [`plan`] distributes a dot over the warps of a block; [`Plan`] gives the layouts of operands and results.
//! - [`shared`] gives the shared-memory layouts that `wgmma` can read, and their matrix descriptors.

pub mod shared;

use crate::analysis::registers;
use crate::ir::{DType, Precision};
use crate::layout::LinearLayout;
use crate::target::GpuArch;

/// Instructions with one syntax and one assignment of operands to registers or shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `mma.sync`, executed by a warp: all operands in registers.
    MmaSync,
    /// `wgmma.mma_async`, executed by a warpgroup: b in shared memory, a in shared memory or registers.
    Wgmma,
}

/// Extents of a · b + acc, with a [m, k], b [k, n] and acc [m, n].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmaShape {
    pub m: u32,
    pub n: u32,
    pub k: u32,
}

/// Granularity of N.
pub const N_STEP: u32 = 8;

/// A row of the table: an instruction that computes a [m, k] · b [k, n] + acc [m, n].
#[derive(Debug, PartialEq, Eq)]
pub struct Instruction {
    pub family: Family,
    /// Element type of a and b; f32 is rounded to tf32.
    pub operands: DType,
    /// Element type of the accumulator.
    pub acc: DType,
    /// Name of the operand type in PTX.
    pub name: &'static str,
    pub m: u32,
    pub k: u32,
    /// Minimum and maximum N; all multiples of [`N_STEP`] in between are legal.
    pub n: [u32; 2],
    /// Number of warps that execute it together.
    pub warps: u32,
    /// First architecture that supports it.
    pub min_arch: GpuArch,
    /// Whether an operand in shared memory may be MN-major, i.e. have M or N instead of K contiguous.
    pub allows_mn_major: bool,
}

/// An `mma.sync` of 16-bit (k 16) or 32-bit (k 8) operands.
const fn mma_sync(operands: DType, name: &'static str, k: u32) -> Instruction {
    let (family, min_arch) = (Family::MmaSync, GpuArch::Sm80);
    Instruction {
        family,
        operands,
        acc: DType::F32,
        name,
        m: 16,
        k,
        n: [8, 8],
        warps: 1,
        min_arch,
        allows_mn_major: false,
    }
}

/// A `wgmma` with `k` operand elements per 32 bytes.
const fn wgmma(operands: DType, name: &'static str, k: u32, allows_mn_major: bool) -> Instruction {
    let (family, min_arch) = (Family::Wgmma, GpuArch::Sm90a);
    Instruction { family, operands, acc: DType::F32, name, m: 64, k, n: [8, 256], warps: 4, min_arch, allows_mn_major }
}

/// All MMA instructions.
pub const TABLE: &[Instruction] = &[
    mma_sync(DType::F16, "f16", 16),
    mma_sync(DType::BF16, "bf16", 16),
    mma_sync(DType::F32, "tf32", 8),
    wgmma(DType::F16, "f16", 16, true),
    wgmma(DType::BF16, "bf16", 16, true),
    wgmma(DType::F32, "tf32", 8, false),
];

impl Instruction {
    /// The row for these types.
    pub fn find(family: Family, operands: DType, acc: DType) -> Option<&'static Instruction> {
        TABLE.iter().find(|i| (i.family, i.operands, i.acc) == (family, operands, acc))
    }

    /// PTX mnemonic for `n` columns.
    pub fn mnemonic(&self, n: u32) -> String {
        let Instruction { family, name, m, k, .. } = self;
        match family {
            Family::MmaSync => format!("mma.sync.aligned.m{m}n{n}k{k}.row.col.f32.{name}.{name}.f32"),
            Family::Wgmma => format!("wgmma.mma_async.sync.aligned.m{m}n{n}k{k}.f32.{name}.{name}"),
        }
    }

    /// Parses the mnemonic at the start of a text; returns the row and N.
    pub fn parse_mnemonic(text: &str) -> Option<(&'static Instruction, u32)> {
        let mnemonic = text.split([' ', '{']).next()?;
        let columns = |i: &'static Instruction| (i.n[0]..=i.n[1]).step_by(N_STEP as usize).map(move |n| (i, n));
        TABLE.iter().flat_map(columns).find(|(i, n)| i.mnemonic(*n) == mnemonic)
    }

    /// Distributes a dot over `num_warps` warps. `None` if m, k or `num_warps` is not a multiple of the m, k or number
    /// of warps of the instruction, or if n is too small.
    ///
    /// Warps lie along M as far as the rows of the instruction permit. So a row of the result (and with it a row-wise
    /// softmax, and the next dot of a chain) stays in one warp.
    pub fn plan(&'static self, shape: MmaShape, num_warps: u32) -> Option<Plan> {
        let MmaShape { m, n, k } = shape;
        let whole = m.is_multiple_of(self.m) && k.is_multiple_of(self.k) && num_warps.is_multiple_of(self.warps);
        if !whole || n < self.n[0] {
            return None;
        }
        let units = num_warps / self.warps;
        let along_m = units.min(m / self.m);
        let warps = [self.warps * along_m, units / along_m];
        let mut columns = (n / warps[1]).min(self.n[1]);
        while columns > self.n[0] && self.min_registers(columns, true) > registers::available(32 * num_warps) {
            columns /= 2;
        }
        // If there are more `mma.sync` warps than columns, the rest compute replicas; warpgroups do not replicate.
        (self.family == Family::MmaSync || columns >= self.n[0]).then_some(Plan {
            instruction: self,
            warps,
            n: columns.max(self.n[0]),
        })
    }
}

/// Element type in which a dot multiplies operands of this type: f16 for 8-bit floats, which it represents exactly.
pub fn mma_dtype(operands: DType) -> DType {
    match operands {
        DType::F8E4M3 | DType::F8E5M2 => DType::F16,
        other => other,
    }
}

/// Shape and types of a dot.
#[derive(Clone, Copy, Debug)]
pub struct DotShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    /// As multiplied, see [`mma_dtype`].
    pub operands: DType,
    pub acc: DType,
    pub precision: Precision,
}

/// How a block computes a dot of one shape.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    pub instruction: &'static Instruction,
    /// Warps along M and N.
    pub warps: [u32; 2],
    /// N of one instruction.
    pub n: u32,
}

/// The instruction for a dot: `wgmma` if possible (for f32 operands only with `wgmma_f32`), else `mma.sync`. `None` if
/// no MMA instruction applies and the dot is computed by FMA.
pub fn plan(dot: DotShape, arch: GpuArch, num_warps: u32, wgmma_f32: bool) -> Option<Plan> {
    let DotShape { m, n, k, operands, acc, precision } = dot;
    let f32 = operands == DType::F32;
    let find = |family| {
        let row = Instruction::find(family, operands, acc).filter(|i| arch >= i.min_arch)?;
        row.plan(MmaShape { m: m as u32, n: n as u32, k: k as u32 }, num_warps)
    };
    if f32 && precision == Precision::Ieee {
        return None;
    }
    let by_warpgroups = if f32 && !wgmma_f32 { None } else { find(Family::Wgmma) };
    by_warpgroups.or_else(|| find(Family::MmaSync))
}

impl Instruction {
    /// Minimum registers per thread for an instruction with `n` columns, whose operand a is in registers or in shared
    /// memory: accumulator, a, and what `ptxas` (13.0) needs in addition. `ptxas` fails with fewer.
    pub fn min_registers(&self, n: u32, a_in_registers: bool) -> u32 {
        match self.family {
            Family::Wgmma => n / 2 + if a_in_registers { 30 } else { 26 },
            Family::MmaSync => 28,
        }
    }
}

impl Plan {
    /// Layout of the accumulator and the result [m, n].
    pub fn acc_layout(&self, shape: &[u32]) -> LinearLayout {
        match self.instruction.family {
            Family::Wgmma => LinearLayout::wgmma_acc(shape, self.n, self.warps),
            Family::MmaSync => LinearLayout::mma_m16n8(shape, self.warps),
        }
    }

    /// Layout of operand a [m, k] in registers.
    pub fn a_layout(&self, shape: &[u32]) -> LinearLayout {
        let bits = self.instruction.operands.bits() as u32;
        match self.instruction.family {
            Family::Wgmma => LinearLayout::wgmma_a_operand(shape, bits, self.warps),
            Family::MmaSync => LinearLayout::mma_m16n8_a(shape, bits, self.warps),
        }
    }

    /// Layout of operand b [k, n] in registers; `None` if it must be in shared memory.
    pub fn b_layout(&self, shape: &[u32]) -> Option<LinearLayout> {
        let bits = self.instruction.operands.bits() as u32;
        match self.instruction.family {
            Family::Wgmma => None,
            Family::MmaSync => Some(LinearLayout::mma_m16n8_b(shape, bits, self.warps)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mnemonics_name_one_row() {
        for instruction in TABLE {
            for n in (instruction.n[0]..=instruction.n[1]).step_by(8) {
                let text = format!("{} {{$0}}, {{$1}}", instruction.mnemonic(n));
                assert_eq!(Instruction::parse_mnemonic(&text), Some((instruction, n)));
            }
        }
        assert_eq!(Instruction::parse_mnemonic("wgmma.mma_async.sync.aligned.m64n12k16.f32.f16.f16 {$0}"), None);
    }

    /// Every shape with a plan has layouts, and the plan uses all warps.
    #[test]
    fn plans_have_layouts() {
        let extents = [8u32, 16, 32, 64, 128, 256];
        for instruction in TABLE {
            for (m, n, k) in extents.iter().flat_map(|&m| extents.iter().flat_map(move |&n| extents.map(|k| (m, n, k))))
            {
                for num_warps in [1, 2, 4, 8, 16, 32] {
                    let Some(plan) = instruction.plan(MmaShape { m, n, k }, num_warps) else { continue };
                    assert_eq!(plan.warps[0] * plan.warps[1], num_warps);
                    assert!(plan.n.is_power_of_two() && (instruction.n[0]..=instruction.n[1]).contains(&plan.n));
                    assert!(plan.acc_layout(&[m, n]).is_distributed());
                    assert!(plan.a_layout(&[m, k]).is_distributed());
                    assert_eq!(plan.b_layout(&[k, n]).is_none(), instruction.family == Family::Wgmma);
                }
            }
        }
    }
}
