//! Keeps products in flight: waits for a `wgmma` where its result is first needed.
//!
//! Does: moves each `wgmma_wait` down to just before the first op that uses its result (the block's terminator at the
//! latest), and lets it leave the products that were started in between under way. Waits that meet become one.
//! Requires: stage laid; each `wgmma` is followed by a wait for it alone.
//! Keeps: meaning; every product is waited for in the block that starts it.
//! Does not: carry products in flight from one iteration of a loop to the next.

use crate::ir::{BlockId, Func, Op, OpId};

/// See the module's page.
pub fn run(func: &mut Func) {
    for b in 0..func.num_blocks() as u32 {
        block(func, BlockId(b));
    }
}

fn block(func: &mut Func, block: BlockId) {
    let waits: Vec<OpId> =
        func.block(block).ops.iter().copied().filter(|&id| matches!(func.op(id).op, Op::WgmmaWait { .. })).collect();
    // From the last to the first, so that a wait does not move past one that has moved already.
    for wait in waits.into_iter().rev() {
        let results = func.op(wait).results.clone();
        let ops = &func.block(block).ops;
        let from = ops.iter().position(|&op| op == wait).expect("internal compiler error: a lost wait");
        let needed = (from + 1..ops.len())
            .find(|&i| {
                let nested = func.op(ops[i]).regions.iter().flat_map(|&r| func.walk_from(r));
                let mut users = std::iter::once(ops[i]).chain(nested);
                let terminator = i + 1 == ops.len();
                // A loop or branch may start products of its own: nothing stays in flight across it.
                let region = !func.op(ops[i]).regions.is_empty() && !matches!(func.op(ops[i]).op, Op::Reduce { .. });
                terminator || region || users.any(|u| func.op(u).operands.iter().any(|o| results.contains(o)))
            })
            .expect("internal compiler error: a block without a terminator");
        let started = ops[from + 1..needed].iter().filter(|&&op| matches!(func.op(op).op, Op::Wgmma { .. })).count();
        if let Op::WgmmaWait { pending } = &mut func.op_mut(wait).op {
            *pending += started as u32;
        }
        let ops = &mut func.block_mut(block).ops;
        ops.remove(from);
        ops.insert(needed - 1, wait);
    }
    merge(func, block);
}

/// Makes one wait of neighbours: it waits for as much as the strictest of them.
fn merge(func: &mut Func, block: BlockId) {
    let ops = func.block(block).ops.clone();
    let is_wait = |func: &Func, id: OpId| matches!(func.op(id).op, Op::WgmmaWait { .. });
    let runs: Vec<&[OpId]> = ops.chunk_by(|&a, &b| is_wait(func, a) && is_wait(func, b)).collect();
    for run in runs.into_iter().filter(|run| run.len() > 1) {
        let mut strictest = u32::MAX;
        let (mut operands, mut results) = (Vec::new(), Vec::new());
        for &id in run {
            let data = func.op(id);
            if let Op::WgmmaWait { pending } = data.op {
                strictest = strictest.min(pending);
            }
            operands.extend(&data.operands);
            results.extend(&data.results);
        }
        let types = results.iter().map(|&v| func.ty(v).clone()).collect();
        let loc = func.op(run[0]).loc.clone();
        let one = func.create_op(Op::WgmmaWait { pending: strictest }, operands, types, Vec::new(), loc);
        for (old, new) in results.into_iter().zip(func.op(one).results.clone()) {
            func.replace_uses(old, new);
        }
        let ops = &mut func.block_mut(block).ops;
        let at = ops.iter().position(|&op| op == run[0]).expect("internal compiler error: a lost wait");
        ops.splice(at..at + run.len(), [one]);
    }
}

#[cfg(test)]
mod tests {
    use crate::text::{parse, print};

    const LAYOUTS: &str = "#l0 = linear<reg=[[0,1],[8,0]], lane=[[0,2],[0,4],[1,0],[2,0],[4,0]], warp=[[16,0],[32,0]], block=[], shape=[64,8]>
#l1 = shared<offset=[[0,1],[0,2],[0,4],[0,8],[1,0],[2,0],[4,0],[8,0],[16,0],[32,0]], shape=[64,16]>
#l2 = shared<offset=[[0,1],[0,2],[0,4],[1,0],[2,0],[4,0],[8,0]], shape=[16,8]>
";

    #[test]
    fn two_products_run_side_by_side() {
        let text = format!(
            "{LAYOUTS}kernel @f() {{
  %a = local_alloc : shared<64x16xbf16, #l1>
  %b = local_alloc : shared<16x8xbf16, #l2>
  %z = constant {{value = 0.0}} : tensor<64x8xf32, #l0>
  %s = wgmma %a, %b, %z {{warps = [4, 1]}} : tensor<64x8xf32, #l0>
  %sw = wgmma_wait %s {{pending = 0}} : tensor<64x8xf32, #l0>
  %t = wgmma %a, %b, %z {{warps = [4, 1]}} : tensor<64x8xf32, #l0>
  %tw = wgmma_wait %t {{pending = 0}} : tensor<64x8xf32, #l0>
  %e = exp2 %sw : tensor<64x8xf32, #l0>
  %p = mul %e, %tw : tensor<64x8xf32, #l0>
  return
}}"
        );
        let mut f = parse(&text).unwrap();
        super::run(&mut f);
        let out = print(&f);
        let order: Vec<&str> = out
            .lines()
            .filter_map(|l| ["wgmma ", "wgmma_wait", "exp2", "mul"].into_iter().find(|m| l.contains(m)))
            .collect();
        assert_eq!(order, ["wgmma ", "wgmma ", "wgmma_wait", "exp2", "wgmma_wait", "mul"], "{out}");
        assert!(out.contains("{pending = 1}") && out.contains("{pending = 0}"), "{out}");
    }

    #[test]
    fn waits_that_meet_become_one() {
        let mut f = parse(&format!(
            "{LAYOUTS}kernel @f(%n: i32) {{
  %a = local_alloc : shared<64x16xbf16, #l1>
  %b = local_alloc : shared<16x8xbf16, #l2>
  %z = constant {{value = 0.0}} : tensor<64x8xf32, #l0>
  %u = constant {{value = 1}} : i32
  %p, %q = for %n, %n, %u, %z, %z : tensor<64x8xf32, #l0>, tensor<64x8xf32, #l0> (%i: i32, %x: tensor<64x8xf32, #l0>, %y: tensor<64x8xf32, #l0>) {{
    %s = wgmma %a, %b, %x {{warps = [4, 1]}} : tensor<64x8xf32, #l0>
    %sw = wgmma_wait %s {{pending = 0}} : tensor<64x8xf32, #l0>
    %t = wgmma %a, %b, %y {{warps = [4, 1]}} : tensor<64x8xf32, #l0>
    %tw = wgmma_wait %t {{pending = 0}} : tensor<64x8xf32, #l0>
    yield %sw, %tw
  }}
  return
}}"
        ))
        .unwrap();
        super::run(&mut f);
        let out = print(&f);
        assert_eq!(out.matches("wgmma_wait").count(), 1, "{out}");
        assert!(out.contains("{pending = 0}"), "{out}");
        crate::verify::verify(&f, crate::ir::Stage::Laid).unwrap();
    }
}
