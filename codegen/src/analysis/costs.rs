//! Predicted cost of an op on a streaming multiprocessor (SM), in clock cycles.
//!
//! An op occupies the pipe that executes most of it ([`pipe`]) for `busy` cycles, and its result is ready `latency`
//! cycles later. Rates are peaks of the hardware: no bank conflicts, full sectors, tiles of global memory in the L2 cache.
//! Scalars cost nothing. No constant is fitted to a kernel's measured time.
//!
//! Sources, by which the constants are named:
//! - *Guide*: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions".
//! - *Data sheets* of A100, A40, L40S and H100 (SXM): dense matrix rate / (SMs × boost clock).
//! - *Whitepaper*: NVIDIA A100 Tensor Core GPU Architecture: the L2 cache reads 5120 bytes per clock.
//! - *Luo*: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", 2024,
//!   arXiv 2402.13499: latencies of memories, `mma.sync` and TMA.
//! - *Jia*: Jia et al., "Dissecting the NVIDIA Volta GPU Architecture via Microbenchmarking", 2018, arXiv 1804.06826:
//!   latency of arithmetic.

use super::pipes::{Pipe, pipe};
use crate::ir::{BinaryOp, DType, Func, Op, OpId, Precision, Type, UnaryOp, Value};
use crate::layout::Conversion;
use crate::target::GpuArch;

/// Threads of a warp.
const LANES: f64 = 32.0;
/// Parts of an SM, with a scheduler and pipes each; a warp belongs to one.
const SUB_PARTITIONS: u32 = 4;

/// Results per clock and SM: comparisons, minima and maxima, selections, integers, conversions (Guide).
const ALU_RATE: f64 = 64.0;
/// Results per clock and SM of the multi-function unit (Guide).
const MUFU_RATE: f64 = 16.0;
/// Lanes per clock and SM of warp shuffles (Guide).
const SHUFFLE_RATE: f64 = 32.0;
/// Multiply-adds of a software function or division: range reduction, polynomial or Newton step.
const SOFTWARE_FUNCTION: f64 = 8.0;
/// Bytes per clock and SM of shared memory: 32 banks of 4 bytes (Guide, "Shared Memory").
const SHARED_BYTES: f64 = 128.0;
/// Bytes per clock that the L2 cache reads, and the SMs that share them: A100 (Whitepaper). Other devices are taken to
/// have as much per SM.
const L2_BYTES: f64 = 5120.0 / 108.0;

/// Cycles from an arithmetic instruction to one that uses its result (Jia).
pub const ALU_LATENCY: f64 = 4.0;
/// Of the multi-function unit (Jia).
pub const MUFU_LATENCY: f64 = 18.0;
/// Of a load from shared memory, or of a shuffle; also taken for barriers, which are in shared memory (Luo).
pub const SHARED_LATENCY: f64 = 29.0;
/// Of a load that hits the L2 cache (Luo).
pub const L2_LATENCY: f64 = 263.0;
/// What a TMA copy takes beyond a load (Luo).
pub const TMA_LATENCY: f64 = 170.0;
/// Of `mma.sync` and, after the last operand, of `wgmma` (Luo: m16n8k16).
pub const MMA_LATENCY: f64 = 32.0;
/// Share of the peak that `mma.sync` reaches on Hopper (Luo).
const MMA_SYNC_SHARE: f64 = 0.629;

/// The warps that execute an op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Executors {
    pub warps: u32,
    /// Groups of this number of warps, each of which executes its part of the op.
    pub groups: u32,
}

/// The cost of an op for one group of executors, in cycles.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Cost {
    /// For this long the op has its pipe for itself.
    pub busy: f64,
    /// From then to the result.
    pub latency: f64,
}

/// The cost of an op of stage *async*. 0 for ops without pipe, of control flow, of synchronization and of scalars.
pub fn cost(func: &Func, id: OpId, arch: GpuArch, executors: Executors) -> Cost {
    let Some(pipe) = pipe(func, id) else { return Cost::default() };
    let model = Model { func, arch, executors };
    match pipe {
        Pipe::Copy => model.copy(id),
        Pipe::LoadStore => model.load_store(id),
        Pipe::Mma => model.mma(id),
        Pipe::Special => model.special(id),
        Pipe::Alu => model.alu(id),
        Pipe::Barrier | Pipe::Control => Cost::default(),
    }
}

/// The cost of a load that asynchronous copies perform: it fills a buffer of this type.
pub fn copy_cost(buffer: &Type, tma: bool, executors: Executors) -> Cost {
    let Type::Shared { elem, .. } = buffer else { return Cost::default() };
    let bytes = (buffer.numel() * elem.bytes()) as f64;
    let (bytes, latency) = match tma {
        // One thread copies for all groups.
        true => (bytes, L2_LATENCY + TMA_LATENCY),
        false => (bytes / f64::from(executors.groups), L2_LATENCY),
    };
    Cost { busy: bytes / L2_BYTES, latency }
}

/// The cost of reading a tile from a buffer of shared memory.
pub fn read_cost(func: &Func, tile: Value, arch: GpuArch, executors: Executors) -> Cost {
    Model { func, arch, executors }.shared(&[tile])
}

/// Whether an op begins only when its operands are complete. Others stream: they follow the op that computes an
/// operand, on another pipe, and end after it.
pub fn needs_whole_operands(op: &Op) -> bool {
    use Op::{ConvertLayout, FmaDot, LocalAlloc, LocalStore, MmaSync, Wgmma};
    matches!(op, Wgmma { .. } | MmaSync { .. } | FmaDot | ConvertLayout | LocalStore | LocalAlloc)
}

/// Whether the whole result of an op is ready at once.
pub fn gives_whole_result(op: &Op) -> bool {
    matches!(op, Op::Reduce { .. } | Op::Wgmma { .. } | Op::MmaSync { .. } | Op::FmaDot)
}

/// Cycles from the beginning of an op to the first in which an op that uses its result can begin.
pub fn delay(from: (&Op, Cost), to: (&Op, Cost)) -> f64 {
    let whole = from.1.busy + from.1.latency;
    match needs_whole_operands(to.0) || gives_whole_result(from.0) {
        true => whole,
        false => from.1.latency.max(whole - to.1.busy),
    }
}

struct Model<'a> {
    func: &'a Func,
    arch: GpuArch,
    executors: Executors,
}

impl Model<'_> {
    /// f32 multiply-adds per clock and SM (Guide).
    fn fma_rate(&self) -> f64 {
        match self.arch {
            GpuArch::Sm80 => 64.0,
            GpuArch::Sm86 | GpuArch::Sm89 | GpuArch::Sm90a => 128.0,
        }
    }

    /// f64 multiply-adds per clock and SM (Guide).
    fn f64_rate(&self) -> f64 {
        match self.arch {
            GpuArch::Sm80 => 32.0,
            GpuArch::Sm86 | GpuArch::Sm89 => 2.0,
            GpuArch::Sm90a => 64.0,
        }
    }

    /// Multiply-adds per clock and SM of dense MMAs of 16-bit floats (Data sheets).
    fn mma_rate(&self) -> f64 {
        match self.arch {
            GpuArch::Sm80 => 1024.0,
            GpuArch::Sm86 | GpuArch::Sm89 => 512.0,
            GpuArch::Sm90a => 2048.0,
        }
    }

    /// Elements of a tile that all threads of a group hold; 0 for scalars.
    fn elements(&self, v: Value) -> f64 {
        match self.func.ty(v) {
            Type::Tensor { layout: Some(_), .. } => {
                self.func.layout_of(v).num_registers() as f64 * f64::from(self.executors.warps) * LANES
            }
            _ => 0.0,
        }
    }

    /// Cycles for instructions of a tile at a rate of the SM. Few warps do not use all of its parts.
    fn at_rate(&self, elements: f64, rate: f64) -> f64 {
        let parts = self.executors.warps.clamp(1, SUB_PARTITIONS);
        elements * f64::from(SUB_PARTITIONS) / (rate * f64::from(parts))
    }

    fn bytes(&self, v: Value) -> f64 {
        self.elements(v) * self.elem_bytes(v)
    }

    fn elem_bytes(&self, v: Value) -> f64 {
        match self.func.ty(v) {
            Type::Shared { elem, .. } => elem.bytes() as f64,
            ty => ty.elem().map_or(4.0, |elem| elem.bits() as f64 / 8.0),
        }
    }

    fn dtype(&self, v: Value) -> Option<DType> {
        self.func.ty(v).dtype()
    }

    fn alu(&self, id: OpId) -> Cost {
        let data = self.func.op(id);
        if matches!(data.op, Op::FmaDot) {
            let (fma, _) = self.dot_work(id);
            return Cost { busy: fma / self.fma_rate(), latency: ALU_LATENCY };
        }
        let Some(&subject) = data.operands.first() else { return Cost::default() };
        let result = data.results.first().copied().unwrap_or(subject);
        let is_reduction = matches!(data.op, Op::Reduce { .. } | Op::Scan { .. });
        let widest = if is_reduction || self.elements(subject) > self.elements(result) { subject } else { result };
        let elements = self.elements(widest);
        if elements == 0.0 || self.is_fused(id) {
            return Cost::default();
        }
        let (count, rate) = self.instructions(id, widest);
        // A reduction ends with shuffles between lanes: five steps at most.
        let latency = if is_reduction { ALU_LATENCY + 2.0 * SHARED_LATENCY } else { ALU_LATENCY };
        Cost { busy: self.at_rate(elements * count, rate), latency }
    }

    /// Instructions per element of arithmetic, and their rate.
    fn instructions(&self, id: OpId, widest: Value) -> (f64, f64) {
        let data = self.func.op(id);
        let dtype = self.dtype(widest);
        let float_rate = match dtype {
            Some(DType::F64) => self.f64_rate(),
            _ => self.fma_rate(),
        };
        // Two 16-bit floats per instruction.
        let packed = if matches!(dtype, Some(DType::F16 | DType::BF16)) { 0.5 } else { 1.0 };
        let is_float = dtype.is_some_and(DType::is_float);
        match &data.op {
            Op::Binary(BinaryOp::Add | BinaryOp::Sub | BinaryOp::Mul | BinaryOp::Rescale) if is_float => {
                (packed, float_rate)
            }
            Op::Fma => (packed, float_rate),
            Op::Binary(BinaryOp::Div | BinaryOp::Rem | BinaryOp::CeilDiv) => (SOFTWARE_FUNCTION, float_rate),
            Op::Unary(UnaryOp::Erf | UnaryOp::Exp | UnaryOp::Log | UnaryOp::Sqrt | UnaryOp::Sin | UnaryOp::Cos) => {
                (SOFTWARE_FUNCTION, float_rate)
            }
            // A conversion writes two 16-bit floats.
            Op::Cast if self.elem_bytes(data.results[0]) <= 2.0 => (0.5, ALU_RATE),
            Op::Reduce { .. } | Op::Scan { .. } => {
                let combine = &self.func.block(data.regions[0]).ops;
                let is_sum = |op: &&OpId| matches!(self.func.op(**op).op, Op::Binary(BinaryOp::Add | BinaryOp::Mul));
                let (sums, all) = (combine.iter().filter(is_sum).count(), combine.len().saturating_sub(1));
                let cycles = sums as f64 / float_rate + (all - sums.min(all)) as f64 / ALU_RATE;
                (cycles * ALU_RATE, ALU_RATE)
            }
            _ => (packed, ALU_RATE),
        }
    }

    /// Whether a float multiplication becomes a part of the multiply-add of its only user.
    fn is_fused(&self, id: OpId) -> bool {
        let data = self.func.op(id);
        let uses = match data.results[..] {
            [result] => self.func.uses(result),
            _ => return false,
        };
        let is_sum = |op: OpId| matches!(self.func.op(op).op, Op::Binary(BinaryOp::Add | BinaryOp::Sub));
        let is_float = data.results.first().and_then(|&v| self.dtype(v)).is_some_and(DType::is_float);
        data.op == Op::Binary(BinaryOp::Mul) && is_float && matches!(uses, [used] if is_sum(used.op))
    }

    fn special(&self, id: OpId) -> Cost {
        let elements = self.elements(self.func.result(id));
        match elements == 0.0 {
            true => Cost::default(),
            false => Cost { busy: self.at_rate(elements, MUFU_RATE), latency: MUFU_LATENCY },
        }
    }

    /// The cost of moving tiles to or from shared memory.
    fn shared(&self, tiles: &[Value]) -> Cost {
        let bytes: f64 = tiles.iter().map(|&v| self.bytes(v)).sum();
        Cost { busy: bytes / SHARED_BYTES, latency: SHARED_LATENCY }
    }

    fn load_store(&self, id: OpId) -> Cost {
        let data = self.func.op(id);
        let tile = data.results.first().or(data.operands.last()).copied();
        match &data.op {
            Op::LocalLoad => self.shared(&data.results[..1]),
            Op::LocalAlloc => self.shared(&data.operands[..1]),
            Op::LocalStore => self.shared(&data.operands),
            Op::ConvertLayout => self.conversion(id),
            Op::DevicePrint { .. } => Cost::default(),
            _ => {
                // The largest tile: of pointers, values or results.
                let values = data.operands.iter().chain(&data.results).chain(tile.as_ref());
                let is_data = |v: &&Value| self.dtype(**v).is_some_and(|of| of != DType::Bool);
                let bytes = values.filter(is_data).map(|&v| self.bytes(v)).fold(0.0, f64::max);
                Cost { busy: bytes / L2_BYTES, latency: L2_LATENCY }
            }
        }
    }

    fn conversion(&self, id: OpId) -> Cost {
        let data = self.func.op(id);
        let (from, to) = (data.operands[0], data.results[0]);
        match Conversion::between(self.func.layout_of(from), self.func.layout_of(to)) {
            Conversion::Lanes(plan) => {
                let words = (self.elem_bytes(to) / 4.0).max(0.5);
                let lanes = plan.num_shuffles() as f64 * words * f64::from(self.executors.warps) * LANES;
                Cost { busy: lanes / SHUFFLE_RATE, latency: SHARED_LATENCY }
            }
            // Written, then read.
            _ => Cost { busy: (self.bytes(from) + self.bytes(to)) / SHARED_BYTES, latency: 2.0 * SHARED_LATENCY },
        }
    }

    fn copy(&self, id: OpId) -> Cost {
        let data = self.func.op(id);
        match data.op {
            // Written to shared memory; TMA reads it.
            Op::TmaStore { .. } => {
                return Cost { busy: self.bytes(data.operands[1]) / SHARED_BYTES, latency: SHARED_LATENCY };
            }
            Op::PrefetchView { .. } => return Cost::default(),
            _ => {}
        }
        let is_tma = matches!(data.op, Op::TmaLoad { .. });
        copy_cost(self.func.ty(data.operands[1]), is_tma, self.executors)
    }

    /// Multiply-adds of a group's part of a dot, and bytes that it reads from shared memory.
    fn dot_work(&self, id: OpId) -> (f64, f64) {
        let data = self.func.op(id);
        let [a, b, acc] = data.operands[..] else { return (0.0, 0.0) };
        let (k_end, n_end) = match &data.op {
            Op::Wgmma { k_end, n_end, .. } | Op::MmaSync { k_end, n_end, .. } => (*k_end, *n_end),
            _ => (None, None),
        };
        let shape = self.func.ty(acc).shape();
        let whole = |extent: Option<&usize>| extent.copied().unwrap_or(1) as f64;
        let n = n_end.map_or(whole(shape.last()), f64::from);
        let rows = self.func.ty(acc).numel() as f64 / whole(shape.last()) / f64::from(self.executors.groups);
        let k = k_end.map_or(whole(self.func.ty(a).shape().last()), f64::from);
        let in_shared = |v: Value| matches!(self.func.ty(v), Type::Shared { .. });
        // As `wgmma` reads them: each 64 rows read b, and a is read once.
        let a_bytes = if in_shared(a) { rows * k * self.elem_bytes(a) } else { 0.0 };
        let b_bytes = if in_shared(b) { (rows / 64.0).max(1.0) * k * n * self.elem_bytes(b) } else { 0.0 };
        (rows * n * k, a_bytes + b_bytes)
    }

    fn mma(&self, id: OpId) -> Cost {
        let data = self.func.op(id);
        let (fma, bytes) = self.dot_work(id);
        let width = match self.elem_bytes(data.operands[0]) {
            ..=1.0 => 2.0,
            ..=2.0 => 1.0,
            ..=4.0 => 0.5,
            _ => 1.0 / 16.0,
        };
        let (share, parts) = match &data.op {
            Op::MmaSync { precision, .. } => (
                if self.arch == GpuArch::Sm90a { MMA_SYNC_SHARE } else { 1.0 },
                if *precision == Precision::Tf32x3 { 3.0 } else { 1.0 },
            ),
            _ => (1.0, 1.0),
        };
        let busy = fma * parts / (self.mma_rate() * width * share);
        Cost { busy: busy.max(bytes / SHARED_BYTES), latency: MMA_LATENCY }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::parse;

    /// The costs of the ops of a body with this mnemonic, for four warps.
    fn costs(body: &str, mnemonic: &str, arch: GpuArch) -> Vec<Cost> {
        let text = format!(
            "#l0 = linear<reg=[[0,1],[8,0],[0,8],[0,16],[0,32]], lane=[[0,2],[0,4],[1,0],[2,0],[4,0]], \
             warp=[[16,0],[32,0]], block=[], shape=[64,64]>\n\
             #l1 = shared<offset=[[0,1],[0,2],[0,4],[0,8],[0,16],[0,32],[1,8],[2,16],[4,32],[8,0],[16,0],[32,0]], \
             shape=[64,64]>\n\
             kernel @k(%p: ptr<bf16>, %s: f32) {{\n  %z = constant {{value = 0.5}} : tensor<64x64xf32, #l0>\n  \
             %h = cast %z : tensor<64x64xbf16, #l0>\n  %x = local_alloc %h : shared<64x64xbf16, #l1>\n{body}\n  \
             return\n}}\n"
        );
        let func = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let ops = func.walk().into_iter().filter(|&id| func.op(id).op.mnemonic() == mnemonic);
        ops.map(|id| cost(&func, id, arch, Executors { warps: 4, groups: 1 })).collect()
    }

    fn busy(body: &str, mnemonic: &str, arch: GpuArch) -> f64 {
        costs(body, mnemonic, arch)[0].busy
    }

    #[test]
    fn arithmetic_takes_its_results_over_the_rate() {
        let h100 = GpuArch::Sm90a;
        assert_eq!(busy("  %e = exp2 %z : tensor<64x64xf32, #l0>", "exp2", h100), 4096.0 / 16.0);
        assert_eq!(busy("  %e = add %z, %z : tensor<64x64xf32, #l0>", "add", h100), 4096.0 / 128.0);
        assert_eq!(busy("  %e = add %z, %z : tensor<64x64xf32, #l0>", "add", GpuArch::Sm80), 4096.0 / 64.0);
        assert_eq!(busy("  %e = max %z, %z : tensor<64x64xf32, #l0>", "max", h100), 4096.0 / 64.0);
        // Two 16-bit results per instruction.
        assert_eq!(busy("", "cast", h100), 2048.0 / 64.0);
        assert_eq!(busy("  %e = mul %s, %s : f32", "mul", h100), 0.0);
    }

    #[test]
    fn a_multiplication_before_an_addition_is_a_part_of_it() {
        let body = "  %m = mul %z, %z : tensor<64x64xf32, #l0>\n  %e = sub %m, %z : tensor<64x64xf32, #l0>";
        assert_eq!(busy(body, "mul", GpuArch::Sm90a), 0.0);
        let twice = format!("{body}\n  %f = sub %z, %m : tensor<64x64xf32, #l0>");
        assert_eq!(busy(&twice, "mul", GpuArch::Sm90a), 32.0);
    }

    #[test]
    fn an_mma_takes_its_multiply_adds_or_its_operands_bytes() {
        let body = "  %w = wgmma %x, %x, %z {warps = [4, 1]} : tensor<64x64xf32, #l0>";
        // 64³ / 2048, as long as 16 KiB at 128 bytes per clock.
        assert_eq!(busy(body, "wgmma", GpuArch::Sm90a), 128.0);
        let narrow = "  %w = wgmma %x, %x, %z {warps = [4, 1], n_end = 16} : tensor<64x64xf32, #l0>";
        // A quarter of the multiply-adds; a is read as a whole.
        assert_eq!(busy(narrow, "wgmma", GpuArch::Sm90a), (8192.0 + 2048.0) / 128.0);
        assert_eq!(busy("", "local_alloc", GpuArch::Sm90a), 8192.0 / 128.0);
    }
}
