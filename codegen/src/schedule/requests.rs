//! Options of the schedule that ask for something, and code that does not have it.

use crate::ir::{DType, Func, Op, OpId};
use crate::target::CompileOptions;

/// Notes on requests of the options that nothing in a function at stage *async* follows.
pub fn unfollowed(func: &Func, options: &CompileOptions) -> Vec<String> {
    let schedule = options.schedule;
    let has = |is: &dyn Fn(&Op) -> bool| func.walk().into_iter().any(|id| is(&func.op(id).op));
    let is_wgmma_f32 = |&id: &OpId| {
        let data = func.op(id);
        matches!(data.op, Op::Wgmma { .. }) && func.ty(data.operands[0]).dtype() == Some(DType::F32)
    };
    [
        (
            schedule.tma,
            has(&|op| matches!(op, Op::TmaLoad { .. })),
            "TMA loads are requested, and there are none: they fill the rings of loops, of tiles that are read through block \
             pointers or descriptors",
        ),
        (
            schedule.pingpong,
            has(&|op| matches!(op, Op::PingpongWait)),
            "ping-pong scheduling is requested but not applied: no loop has a `wgmma`",
        ),
        (
            schedule.overlap,
            has(&|op| matches!(op, Op::Wgmma { .. })),
            "overlap with the next iteration is requested, and no loop has a `wgmma`",
        ),
        (
            schedule.tma_stores,
            has(&|op| matches!(op, Op::TmaStore { .. })),
            "TMA stores are requested, and there are none: they store tiles through block pointers or descriptors whose rows \
             are multiples of 16 bytes",
        ),
        (
            schedule.wgmma_f32,
            func.walk().iter().any(is_wgmma_f32),
            "`wgmma` of f32 is requested, and no dot is one: it takes f32 operands in tf32 or tf32x3, and 64 rows for four warps",
        ),
    ]
    .into_iter()
    .filter(|(requested, is_there, _)| *requested == Some(true) && !is_there)
    .map(|(.., note)| note.to_string())
    .collect()
}
