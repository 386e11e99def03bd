//! The pipe of a streaming multiprocessor (SM) that executes most instructions of an op.

use crate::ir::{DType, Func, Op, OpId, UnaryOp, Value};
use crate::layout::Conversion;

/// Execution resources of an SM that work concurrently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Pipe {
    /// Asynchronous copies from global to shared memory: TMA, `cp.async`.
    Copy,
    /// Loads, stores and atomics of global and shared memory, and shuffles.
    LoadStore,
    /// Tensor cores.
    Mma,
    /// Multi-function unit (MUFU): exponentials, logarithms, reciprocals, roots, sine and cosine.
    Special,
    /// Multiply-adds, other arithmetic and conversions.
    Alu,
    /// Barriers, and waits for copies and MMAs.
    Barrier,
    /// Loops, branches and ends of regions.
    Control,
}

impl Pipe {
    pub const ALL: [Pipe; 7] =
        [Pipe::Copy, Pipe::LoadStore, Pipe::Mma, Pipe::Special, Pipe::Alu, Pipe::Barrier, Pipe::Control];

    pub fn name(self) -> &'static str {
        match self {
            Pipe::Copy => "copy",
            Pipe::LoadStore => "load/store",
            Pipe::Mma => "MMA",
            Pipe::Special => "MUFU",
            Pipe::Alu => "FMA/ALU",
            Pipe::Barrier => "barrier",
            Pipe::Control => "control",
        }
    }
}

/// The pipe of an op; `None` for ops that have no instructions of their own: constants, changes of shape, and values
/// that are computed where they are used.
pub fn pipe(func: &Func, id: OpId) -> Option<Pipe> {
    let data = func.op(id);
    match &data.op {
        Op::ProgramId { .. }
        | Op::CtaRank { .. }
        | Op::DynamicIndex
        | Op::NumPrograms { .. }
        | Op::Constant { .. }
        | Op::Arange { .. }
        | Op::MakeView { .. }
        | Op::Splat
        | Op::ExpandDims { .. }
        | Op::Broadcast
        | Op::Trans { .. }
        | Op::Reshape
        | Op::Join
        | Op::Split
        | Op::Bitcast
        | Op::Hint { .. }
        | Op::Assume
        | Op::LocalSlot
        | Op::LocalTrans { .. } => None,
        Op::Unary(unary) => Some(of_unary(*unary, func.ty(data.operands[0]).dtype())),
        Op::Binary(_)
        | Op::Cmp(_)
        | Op::Advance
        | Op::PtrAdd
        | Op::Fma
        | Op::Select
        | Op::Cast
        | Op::InlineAsm { .. }
        | Op::Scan { .. }
        | Op::FmaDot => Some(Pipe::Alu),
        Op::Gather { .. }
        | Op::LoadView { .. }
        | Op::StoreView { .. }
        | Op::AtomicView { .. }
        | Op::Load { .. }
        | Op::Store { .. }
        | Op::AtomicRmw { .. }
        | Op::AtomicCas { .. }
        | Op::SemaphoreWait
        | Op::LocalLoad
        | Op::LocalStore
        | Op::TakeIndex
        | Op::TakenIndex
        | Op::DevicePrint { .. } => Some(Pipe::LoadStore),
        Op::LocalAlloc => (!data.operands.is_empty()).then_some(Pipe::LoadStore),
        Op::ConvertLayout => of_conversion(func, data.operands[0], data.results[0]),
        // Most elements are combined within a thread.
        Op::Reduce { .. } => Some(Pipe::Alu),
        Op::Dot { .. } | Op::MmaSync { .. } | Op::Wgmma { .. } => Some(Pipe::Mma),
        Op::AsyncCopy { .. }
        | Op::AsyncLoad { .. }
        | Op::TmaLoad { .. }
        | Op::TmaStore { .. }
        | Op::PrefetchView { .. } => Some(Pipe::Copy),
        Op::AsyncCommit
        | Op::AsyncWait { .. }
        | Op::WgmmaWait { .. }
        | Op::FenceAsyncShared
        | Op::BlockBarrier { .. }
        | Op::ClusterBarrier
        | Op::MbarrierAlloc { .. }
        | Op::MbarrierFree
        | Op::MbarrierExpect { .. }
        | Op::MbarrierArrive { .. }
        | Op::AsyncArrive { .. }
        | Op::MbarrierWait
        | Op::PingpongWait
        | Op::PingpongArrive => Some(Pipe::Barrier),
        Op::For { .. }
        | Op::If
        | Op::While
        | Op::Yield
        | Op::Condition
        | Op::Return
        | Op::DeviceAssert { .. }
        | Op::WarpSpecialize { .. } => Some(Pipe::Control),
    }
}

fn of_unary(op: UnaryOp, dtype: Option<DType>) -> Pipe {
    match op {
        UnaryOp::Exp
        | UnaryOp::Exp2
        | UnaryOp::Log
        | UnaryOp::Log2
        | UnaryOp::Sqrt
        | UnaryOp::Rsqrt
        | UnaryOp::Sin
        | UnaryOp::Cos
        | UnaryOp::Tanh => match dtype {
            // Software functions of multiply-adds.
            Some(DType::F64) => Pipe::Alu,
            _ => Pipe::Special,
        },
        UnaryOp::Neg
        | UnaryOp::Not
        | UnaryOp::Abs
        | UnaryOp::Erf
        | UnaryOp::Floor
        | UnaryOp::Ceil
        | UnaryOp::Trunc
        | UnaryOp::Rint => Pipe::Alu,
    }
}

fn of_conversion(func: &Func, from: Value, to: Value) -> Option<Pipe> {
    let layout = |v: Value| func.ty(v).layout().map(|id| func.layout(id));
    match Conversion::between(layout(from)?, layout(to)?) {
        Conversion::Identity | Conversion::Registers(_) => None,
        Conversion::Lanes(_) | Conversion::Shared | Conversion::Blocks => Some(Pipe::LoadStore),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ir::Effects;
    use crate::text::parse;

    fn pipes(body: &str) -> Vec<(&'static str, Option<Pipe>)> {
        let text = format!("kernel @k(%p: ptr<f32>, %n: i32) {{\n{body}\n  return\n}}\n");
        let func = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        func.walk().into_iter().map(|id| (func.op(id).op.mnemonic(), pipe(&func, id))).collect()
    }

    #[test]
    fn the_special_function_unit_has_no_f64() {
        let of = |dtype: &str| {
            let body =
                format!("  %0 = constant {{value = 1.0}} : {dtype}\n  %1 = exp2 %0 : {dtype}\n  %2 = abs %1 : {dtype}");
            pipes(&body)
        };
        let f32 = [
            ("constant", None),
            ("exp2", Some(Pipe::Special)),
            ("abs", Some(Pipe::Alu)),
            ("return", Some(Pipe::Control)),
        ];
        assert_eq!(of("f32"), f32);
        assert_eq!(of("f64")[1], ("exp2", Some(Pipe::Alu)));
    }

    #[test]
    fn conversions_cost_what_they_move() {
        let layout = |registers: &str, lanes: &str| {
            format!("linear<reg=[{registers}], lane=[{lanes}], warp=[], block=[], shape=[64]>")
        };
        let lanes = |first: u32| (0..5).map(|bit| format!("[{}]", first << bit)).collect::<Vec<_>>().join(",");
        let text = format!(
            "#l0 = {}\n#l1 = {}\nkernel @k(%p: ptr<f32>) {{\n  %0 = constant {{value = 1.0}} : tensor<64xf32, #l0>\n  \
             %1 = convert_layout %0 : tensor<64xf32, #l0>\n  %2 = convert_layout %1 : tensor<64xf32, #l1>\n  return\n}}\n",
            layout("[1]", &lanes(2)),
            layout("[32]", &lanes(1)),
        );
        let func = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        let found: Vec<_> = func.walk().into_iter().map(|id| pipe(&func, id)).collect();
        assert_eq!(found, [None, None, Some(Pipe::LoadStore), Some(Pipe::Control)]);
    }

    #[test]
    fn ops_that_touch_memory_have_a_pipe() {
        let body = "  %0 = load %p {eviction = normal} : f32\n  store %p, %0 {eviction = normal}";
        let found = pipes(body);
        assert_eq!(found[0], ("load", Some(Pipe::LoadStore)));
        assert_eq!(found[1], ("store", Some(Pipe::LoadStore)));
        let text = format!("kernel @k(%p: ptr<f32>, %n: i32) {{\n{body}\n  return\n}}\n");
        let func = parse(&text).unwrap();
        let silent = func.walk().into_iter().filter(|&id| pipe(&func, id).is_none());
        assert!(silent.map(|id| func.op(id).op.effects()).all(|effects| effects == Effects::Pure));
    }
}
