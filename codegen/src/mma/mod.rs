//! The MMA instructions of NVIDIA GPUs: one table for planning, the verifier, the lowering, the simulator and the
//! random programs. It is the only definition of what is legal.
//!
//! - [`TABLE`] has a row per family, operand type and accumulator type (PTX ISA, "Matrix Multiply-Accumulate
//!   Instructions").
//! - [`plan`] distributes a dot over the warps of a block; [`Plan`] gives the layouts of operands and results.
//! - [`shared`] gives the shared-memory layouts that `wgmma` can read, and their matrix descriptors.

pub mod shared;

use crate::analysis::registers;
use crate::ir::{BlockId, DType, Func, Op, OpData, OpId, Precision, Type, Value};
use crate::layout::LinearLayout;
use crate::target::{CompileOptions, GpuArch};

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
    /// Element types of a and b; f32 is rounded to tf32.
    pub operands: [DType; 2],
    /// Element type of the accumulator.
    pub acc: DType,
    pub m: u32,
    pub k: u32,
    /// Minimum and maximum N, see [`Instruction::columns`].
    pub n: [u32; 2],
    /// Number of warps that execute it together.
    pub warps: u32,
    /// First architecture that supports it.
    pub min_arch: GpuArch,
}

/// An `mma.sync` with `k` operand elements: 32 bytes, of f64 64.
const fn mma_sync(operands: [DType; 2], acc: DType, k: u32, min_arch: GpuArch) -> Instruction {
    Instruction { family: Family::MmaSync, operands, acc, m: 16, k, n: [8, 8], warps: 1, min_arch }
}

/// A `wgmma` with `k` operand elements per 32 bytes.
const fn wgmma(operands: [DType; 2], acc: DType, k: u32) -> Instruction {
    let (family, min_arch) = (Family::Wgmma, GpuArch::Sm90a);
    Instruction { family, operands, acc, m: 64, k, n: [8, 256], warps: 4, min_arch }
}

/// All MMA instructions.
pub const TABLE: &[Instruction] = {
    use DType::{BF16, F8E4M3, F8E5M2, F16, F32, F64, I8, I32, U8};
    use GpuArch::{Sm80, Sm89};
    &[
        mma_sync([F16, F16], F32, 16, Sm80),
        // `wgmma` has it as well, at the rate of sums in f32, which is higher than that of this one.
        mma_sync([F16, F16], F16, 16, Sm80),
        mma_sync([BF16, BF16], F32, 16, Sm80),
        mma_sync([F32, F32], F32, 8, Sm80),
        // Below sm_90 four of `F64_PART`, which assigns the same elements to registers.
        mma_sync([F64, F64], F64, 8, Sm80),
        // Mixed pairs are reachable from IR text: the language's `dot` takes two operands of one type.
        mma_sync([F8E4M3, F8E4M3], F32, 32, Sm89),
        mma_sync([F8E4M3, F8E5M2], F32, 32, Sm89),
        mma_sync([F8E5M2, F8E4M3], F32, 32, Sm89),
        mma_sync([F8E5M2, F8E5M2], F32, 32, Sm89),
        mma_sync([I8, I8], I32, 32, Sm80),
        mma_sync([I8, U8], I32, 32, Sm80),
        mma_sync([U8, I8], I32, 32, Sm80),
        mma_sync([U8, U8], I32, 32, Sm80),
        wgmma([F16, F16], F32, 16),
        wgmma([BF16, BF16], F32, 16),
        wgmma([F32, F32], F32, 8),
        wgmma([F8E4M3, F8E4M3], F32, 32),
        wgmma([F8E4M3, F8E5M2], F32, 32),
        wgmma([F8E5M2, F8E4M3], F32, 32),
        wgmma([F8E5M2, F8E5M2], F32, 32),
        wgmma([I8, I8], I32, 32),
        wgmma([I8, U8], I32, 32),
        wgmma([U8, I8], I32, 32),
        wgmma([U8, U8], I32, 32),
    ]
};

/// A quarter of the `mma.sync` of f64: half of its rows and half of K.
pub const F64_PART: Instruction =
    Instruction { m: 8, k: 4, ..mma_sync([DType::F64, DType::F64], DType::F64, 8, GpuArch::Sm80) };

/// The name of an element type in the mnemonic of an MMA instruction.
fn ptx_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F32 => "tf32",
        DType::F8E4M3 => "e4m3",
        DType::F8E5M2 => "e5m2",
        DType::I8 => "s8",
        DType::I32 => "s32",
        other => other.name(),
    }
}

impl Instruction {
    /// The row for these types.
    pub fn find(family: Family, operands: [DType; 2], acc: DType) -> Option<&'static Instruction> {
        TABLE.iter().find(|i| (i.family, i.operands, i.acc) == (family, operands, acc))
    }

    /// The row of an MMA op of this family; `None` if no instruction has its types.
    pub fn of(func: &Func, op: &OpData, family: Family) -> Option<&'static Instruction> {
        let elem = |i: usize| match func.ty(op.operands[i]) {
            Type::Shared { elem, .. } => Some(*elem),
            other => other.dtype(),
        };
        Instruction::find(family, [elem(0)?, elem(1)?], elem(2)?)
    }

    /// Whether an operand in shared memory may be MN-major, i.e. have M or N instead of K contiguous: 16-bit types only.
    pub fn allows_mn_major(&self) -> bool {
        self.family == Family::Wgmma && self.operands[0].bits() == 16
    }

    /// The legal N, ascending: multiples of 8, and above 32 of 16 for integers.
    pub fn columns(&self) -> impl Iterator<Item = u32> {
        let (integers, [first, last]) = (!self.acc.is_float(), self.n);
        (first..=last).step_by(N_STEP as usize).filter(move |n| !integers || *n <= 32 || n.is_multiple_of(16))
    }

    /// PTX mnemonic for `n` columns.
    pub fn mnemonic(&self, n: u32) -> String {
        let Instruction { family, m, k, .. } = self;
        let [a, b] = self.operands.map(ptx_name);
        let acc = self.acc_name();
        match family {
            Family::MmaSync => format!("mma.sync.aligned.m{m}n{n}k{k}.row.col.{acc}.{a}.{b}.{acc}"),
            Family::Wgmma => format!("wgmma.mma_async.sync.aligned.m{m}n{n}k{k}.{acc}.{a}.{b}"),
        }
    }

    /// First PTX version that has it, as major × 10 + minor.
    fn min_ptx(&self) -> u32 {
        let [a, b] = self.operands;
        match self.family {
            // 8-bit floats.
            Family::MmaSync if a.is_float() && self.operand_bits() == 8 => 84,
            // Signed and unsigned integers.
            Family::Wgmma if !a.is_float() && a != b => 84,
            _ => 80,
        }
    }

    fn acc_name(&self) -> &'static str {
        if self.acc == DType::F32 { "f32" } else { ptx_name(self.acc) }
    }

    /// Parses the mnemonic at the start of a text; returns the row and N.
    pub fn parse_mnemonic(text: &str) -> Option<(&'static Instruction, u32)> {
        let mnemonic = text.split([' ', '{']).next()?;
        let mut rows = TABLE.iter().chain([&F64_PART]).flat_map(|i| i.columns().map(move |n| (i, n)));
        rows.find(|(i, n)| i.mnemonic(*n) == mnemonic)
    }

    /// Distributes a dot over `num_warps` warps. `None` if m, k or `num_warps` is not a multiple of the m, k or number
    /// of warps of the instruction, or if n is too small.
    ///
    /// Warpgroups lie along M as far as the rows of the instruction permit, and so do warps that do not share rows: a row of
    /// the result (and with it a row-wise softmax, and the next dot of a chain) then stays in one warp. With `shared_rows`,
    /// the number of columns of b that are not known to be zero, warps compute parts for which they execute the fewest
    /// instructions, then load the fewest rows of a and columns of b (those that are as square as can be), then have the
    /// fewest rows.
    pub fn plan(&'static self, shape: MmaShape, num_warps: u32, shared_rows: Option<u32>) -> Option<Plan> {
        if !num_warps.is_multiple_of(self.warps) {
            return None;
        }
        let units = num_warps / self.warps;
        let most = units.min(shape.m / self.m).max(1);
        let along_m = match (self.family, shared_rows) {
            (Family::MmaSync, Some(columns)) => {
                let cost = |&along_m: &u32| {
                    let (rows, steps) = (shape.m / along_m, columns.div_ceil(units / along_m * self.n[0]));
                    (rows * steps, rows + steps * self.n[0])
                };
                let counts = std::iter::successors(Some(most), |count| (*count > 1).then_some(count / 2));
                counts.min_by_key(cost).unwrap_or(most)
            }
            _ => most,
        };
        self.on_warps(shape, [self.warps * along_m, units / along_m])
    }

    /// A dot with these warps along M and N; `None` if the instruction cannot compute it so.
    pub fn on_warps(&'static self, shape: MmaShape, warps: [u32; 2]) -> Option<Plan> {
        let MmaShape { m, n, k } = shape;
        let whole = m.is_multiple_of(self.m) && k.is_multiple_of(self.k) && warps[0].is_multiple_of(self.warps);
        if !whole || n < self.n[0] || warps[0] / self.warps > m / self.m {
            return None;
        }
        let mut columns = (n / warps[1]).min(self.n[1]);
        while columns > self.n[0] && self.min_registers(columns, true) > registers::available(32 * warps[0] * warps[1])
        {
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

/// Element type in which a dot multiplies operands of this type where no instruction multiplies them as they are: f16
/// for 8-bit floats, which it represents exactly.
pub fn widened(operand: DType) -> DType {
    match operand {
        DType::F8E4M3 | DType::F8E5M2 => DType::F16,
        other => other,
    }
}

/// Element type in which a dot accumulates where no instruction accumulates in this type: f32 for f16.
pub fn widened_acc(acc: DType) -> DType {
    if acc == DType::F16 { DType::F32 } else { acc }
}

/// Shape and types of a dot.
#[derive(Clone, Copy, Debug)]
pub struct DotShape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub operands: [DType; 2],
    pub acc: DType,
    pub precision: Precision,
    /// Maximum number of products that the accumulators of tensor cores may sum, where these are less precise than f32:
    /// for 8-bit floats.
    pub max_imprecise: Option<u32>,
    /// If warps may share rows of the result: how many columns of b are not known to be zero.
    pub shared_rows: Option<u32>,
}

impl DotShape {
    /// Whether 8-bit floats must not be multiplied as they are, because one step along K has too many products.
    fn must_widen(&self) -> bool {
        self.max_imprecise.is_some_and(|most| (most as usize) < self.k)
    }
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

/// The instruction for a dot: `wgmma` if possible (for f32 operands only with the option `wgmma_f32`), else `mma.sync`, of the
/// operands as they are, else [`widened`]; each with the accumulator as it is, else [widened](widened_acc), which takes
/// conversions in every step of a loop. `None` if no MMA instruction applies and the dot is computed by FMA.
pub fn plan(dot: DotShape, arch: GpuArch, options: &CompileOptions) -> Option<Plan> {
    let DotShape { m, n, k, operands, acc, precision, shared_rows, .. } = dot;
    let f32 = operands[0] == DType::F32;
    let find = |family, operands, acc| {
        let row = Instruction::find(family, operands, acc)?;
        let supported = arch >= row.min_arch && options.ptx_version >= row.min_ptx();
        let shape = MmaShape { m: m as u32, n: n as u32, k: k as u32 };
        supported.then(|| row.plan(shape, options.num_warps, shared_rows))?
    };
    // A limit of imprecise sums asks for those of f32.
    let accs = if dot.max_imprecise.is_some() { [widened_acc(acc); 2] } else { [acc, widened_acc(acc)] };
    if f32 && precision == Precision::Ieee {
        return None;
    }
    let has_wgmma = !f32 || options.schedule.wgmma_f32 == Some(true);
    let of = |operands| {
        accs.into_iter().find_map(|acc| {
            let by_warpgroups = if has_wgmma { find(Family::Wgmma, operands, acc) } else { None };
            by_warpgroups.or_else(|| find(Family::MmaSync, operands, acc))
        })
    };
    let as_they_are = if dot.must_widen() { None } else { of(operands) };
    as_they_are.or_else(|| of(operands.map(widened)))
}

impl Instruction {
    /// Minimum registers per thread for an instruction with `n` columns, whose operand a is in registers or in shared
    /// memory: accumulator, a, and what `ptxas` (13.0) needs in addition. `ptxas` fails with fewer.
    pub fn min_registers(&self, n: u32, a_in_registers: bool) -> u32 {
        match self.family {
            Family::Wgmma => n / 2 + if a_in_registers { 30 } else { 26 },
            Family::MmaSync if self.acc == DType::F64 => 40,
            Family::MmaSync => 28,
        }
    }

    /// Size of an operand's elements in bits; a and b have the same.
    pub fn operand_bits(&self) -> u32 {
        self.operands[0].bits() as u32
    }

    /// Elements of an operand in one register: of 32 bits, or of 64 for f64.
    pub fn per_word(&self) -> usize {
        (32 / self.operands[0].bits()).max(1)
    }
}

/// The registers per thread that `ptxas` asks for at launch, whatever `setmaxnreg` gives later: those of the widest `wgmma`.
/// Dots of parts, which follow each other and have one operand a, may share an instruction.
pub fn registers_at_launch(func: &Func) -> u32 {
    let mut last: Option<(BlockId, Value, u32)> = None;
    let mut of = |id: OpId| {
        let data = func.op(id);
        let Op::Wgmma { warps, n_end, .. } = &data.op else { return None };
        let instruction = Instruction::of(func, data, Family::Wgmma)?;
        let columns = (func.ty(data.operands[2]).shape()[1] as u32 / warps[1]).min(instruction.n[1]);
        let own = n_end.map_or(columns, |end| columns.min(end.next_multiple_of(N_STEP)));
        let (block, a) = (func.parent_block(id), data.operands[0]);
        let before = last.filter(|&(other, same, _)| other == block && same == a).map_or(0, |(.., columns)| columns);
        let columns = if before + own <= instruction.n[1] { before + own } else { own };
        last = Some((block, a, columns));
        Some(instruction.min_registers(columns, func.ty(a).is_tensor()))
    };
    func.walk().into_iter().filter_map(&mut of).max().unwrap_or(0)
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
        let bits = self.instruction.operand_bits();
        match self.instruction.family {
            Family::Wgmma => LinearLayout::wgmma_a_operand(shape, bits, self.warps),
            Family::MmaSync => LinearLayout::mma_m16n8_a(shape, bits, self.warps),
        }
    }

    /// Layout of operand b [k, n] in registers; `None` if it must be in shared memory.
    pub fn b_layout(&self, shape: &[u32]) -> Option<LinearLayout> {
        let bits = self.instruction.operand_bits();
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
            for n in instruction.columns() {
                let text = format!("{} {{$0}}, {{$1}}", instruction.mnemonic(n));
                assert_eq!(Instruction::parse_mnemonic(&text), Some((instruction, n)));
            }
        }
        for illegal in ["m64n12k16.f32.f16.f16", "m64n40k32.s32.s8.s8", "m64n8k32.f32.e4m3.s8"] {
            assert_eq!(Instruction::parse_mnemonic(&format!("wgmma.mma_async.sync.aligned.{illegal} {{$0}}")), None);
        }
    }

    /// Warps get square parts where they may share rows, unless padding makes that more instructions.
    #[test]
    fn warps_of_mma_sync_load_the_fewest_operands() {
        let of = |[m, n]: [u32; 2], num_warps, shared_rows| {
            let instruction = Instruction::find(Family::MmaSync, [DType::BF16; 2], DType::F32).unwrap();
            instruction.plan(MmaShape { m, n, k: 64 }, num_warps, shared_rows).unwrap().warps
        };
        assert_eq!(of([128, 128], 8, None), [8, 1]);
        assert_eq!(of([128, 128], 8, Some(128)), [4, 2]);
        assert_eq!(of([128, 256], 8, Some(256)), [2, 4]);
        assert_eq!(of([64, 64], 4, Some(64)), [2, 2]);
        // Three steps of 8 columns cannot be halved.
        assert_eq!(of([64, 64], 4, Some(24)), [4, 1]);
        assert_eq!(of([16, 64], 4, Some(64)), [1, 4]);
        // Wgmma keeps whole rows.
        let wgmma = Instruction::find(Family::Wgmma, [DType::BF16; 2], DType::F32).unwrap();
        assert_eq!(wgmma.plan(MmaShape { m: 128, n: 128, k: 64 }, 8, Some(128)).unwrap().warps, [8, 1]);
    }

    /// `wgmma` of signed with unsigned integers came with PTX 8.4 (PTX ISA, notes of wgmma.mma_async).
    #[test]
    fn mixed_integers_need_ptx_8_4_for_wgmma() {
        let family = |operands, ptx_version| {
            let (acc, precision) = (DType::I32, Precision::Ieee);
            let dot =
                DotShape { m: 64, n: 64, k: 64, operands, acc, precision, max_imprecise: None, shared_rows: None };
            let options = CompileOptions { ptx_version, ..CompileOptions::default() };
            plan(dot, GpuArch::Sm90a, &options).unwrap().instruction.family
        };
        for mixed in [[DType::I8, DType::U8], [DType::U8, DType::I8]] {
            assert_eq!(
                [80, 83, 84].map(|version| family(mixed, version)),
                [Family::MmaSync, Family::MmaSync, Family::Wgmma]
            );
        }
        assert_eq!(family([DType::I8; 2], 80), Family::Wgmma);
    }

    /// Sums of f16 are in f16 where an instruction has them, unless precise sums are asked for.
    #[test]
    fn sums_in_f16_are_wider_where_asked_or_where_fp8_is() {
        let of = |operand, max_imprecise, arch| {
            let dot = DotShape {
                m: 64,
                n: 64,
                k: 64,
                operands: [operand; 2],
                acc: DType::F16,
                precision: Precision::Ieee,
                max_imprecise,
                shared_rows: None,
            };
            let found = plan(dot, arch, &CompileOptions::default()).unwrap().instruction;
            (found.family, found.operands[0], found.acc)
        };
        let sync = Family::MmaSync;
        assert_eq!(of(DType::F16, None, GpuArch::Sm80), (sync, DType::F16, DType::F16));
        assert_eq!(of(DType::F16, None, GpuArch::Sm90a), (sync, DType::F16, DType::F16));
        assert_eq!(of(DType::F8E4M3, None, GpuArch::Sm90a), (Family::Wgmma, DType::F8E4M3, DType::F32));
        assert_eq!(of(DType::F8E4M3, None, GpuArch::Sm80), (sync, DType::F16, DType::F16));
        assert_eq!(of(DType::F8E4M3, None, GpuArch::Sm89), (sync, DType::F8E4M3, DType::F32));
        for arch in [GpuArch::Sm80, GpuArch::Sm89] {
            assert_eq!(of(DType::F8E4M3, Some(0), arch), (sync, DType::F16, DType::F32), "{arch:?}");
        }
        assert_eq!(of(DType::F8E4M3, Some(64), GpuArch::Sm89), (sync, DType::F8E4M3, DType::F32));
    }

    /// Every shape with a plan has layouts, and the plan uses all warps.
    #[test]
    fn plans_have_layouts() {
        let extents = [8u32, 16, 32, 64, 128, 256];
        for instruction in TABLE {
            for (m, n, k) in extents.iter().flat_map(|&m| extents.iter().flat_map(move |&n| extents.map(|k| (m, n, k))))
            {
                let rows = [None, Some(n), Some(n / 2 + 1)];
                for (num_warps, rows) in
                    [1, 2, 4, 8, 16, 32].into_iter().flat_map(|warps| rows.map(|rows| (warps, rows)))
                {
                    let Some(plan) = instruction.plan(MmaShape { m, n, k }, num_warps, rows) else { continue };
                    assert_eq!(plan.warps[0] * plan.warps[1], num_warps);
                    assert!(plan.n.is_power_of_two() && instruction.columns().any(|n| n == plan.n));
                    assert!(plan.acc_layout(&[m, n]).is_distributed());
                    assert!(plan.a_layout(&[m, k]).is_distributed());
                    assert_eq!(plan.b_layout(&[k, n]).is_none(), instruction.family == Family::Wgmma);
                }
            }
        }
    }
}
