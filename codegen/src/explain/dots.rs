//! The instructions that compute the dots of a function.

use crate::analysis::buffers::buffer_of;
use crate::ir::{DType, Func, Loc, Op, OpId, Type, Value};
use crate::lower::nvptx::joined_dots;
use crate::mma::{F64_PART, Family, Instruction};
use crate::target::GpuArch;

/// How a dot is computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dot {
    pub loc: Loc,
    /// Mnemonic of the matrix instruction; `None` for multiply-adds, one for each product.
    pub instruction: Option<String>,
    /// Where the instruction reads a and b.
    pub operands: [Place; 2],
}

/// Where an instruction reads an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    Registers,
    /// Shared memory, as an asynchronous copy wrote it.
    Shared,
    /// Shared memory, to which registers were stored: the operand was loaded outside of a pipelined loop, computed, or
    /// transposed because the instruction reads only operands that are contiguous along K.
    Stored,
}

impl Place {
    pub fn name(self) -> &'static str {
        match self {
            Place::Registers => "registers",
            Place::Shared => "shared memory",
            Place::Stored => "shared memory, stored from registers",
        }
    }

    fn of(func: &Func, v: Value) -> Place {
        if !matches!(func.ty(v), Type::Shared { .. }) {
            return Place::Registers;
        }
        let Some(id) = func.def_op(v) else { return Place::Shared };
        let data = func.op(id);
        match data.op {
            Op::LocalTrans { .. } => Place::of(func, data.operands[0]),
            Op::LocalAlloc if !data.operands.is_empty() => Place::Stored,
            Op::LocalSlot if is_stored(func, v) => Place::Stored,
            _ => Place::Shared,
        }
    }
}

/// Whether threads store to the ring of a slot.
fn is_stored(func: &Func, slot: Value) -> bool {
    let ring = buffer_of(func, slot);
    let stores = |id: &OpId| func.op(*id).op == Op::LocalStore && buffer_of(func, func.op(*id).operands[0]) == ring;
    func.walk().iter().any(stores)
}

/// The dots of a function that is lowered for this architecture, one for each place in the source and way to compute it.
pub fn dots(func: &Func, arch: GpuArch) -> Vec<Dot> {
    let mut dots: Vec<Dot> = Vec::new();
    let joined = joined_dots(func);
    for id in func.walk().into_iter().filter(|&id| !joined.of(id).is_empty()) {
        let family = match func.op(id).op {
            Op::Wgmma { .. } => Some(Family::Wgmma),
            Op::MmaSync { .. } => Some(Family::MmaSync),
            Op::FmaDot => None,
            _ => continue,
        };
        let data = func.op(id);
        let dot = Dot {
            loc: data.loc.clone(),
            instruction: family.and_then(|family| mnemonic(func, &joined.of(id), family, arch)),
            operands: [0, 1].map(|i| Place::of(func, data.operands[i])),
        };
        if !dots.contains(&dot) {
            dots.push(dot);
        }
    }
    dots
}

/// The instruction of a dot, or of several that are joined.
fn mnemonic(func: &Func, ids: &[OpId], family: Family, arch: GpuArch) -> Option<String> {
    let data = func.op(*ids.first()?);
    let instruction = Instruction::of(func, data, family)?;
    if instruction.acc == DType::F64 && arch < GpuArch::Sm90a {
        return Some(F64_PART.mnemonic(F64_PART.n[0]));
    }
    let columns = match &data.op {
        Op::Wgmma { warps, .. } => {
            ids.iter().map(|&id| func.ty(func.op(id).results[0]).shape()[1] as u32 / warps[1]).sum()
        }
        _ => instruction.n[0],
    };
    Some(instruction.mnemonic(columns.min(instruction.n[1])))
}
