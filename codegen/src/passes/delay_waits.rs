//! Keeps products in flight: waits for a `wgmma` where its result is first needed.
//!
//! Does: moves each `wgmma_wait` down to just before the first op that uses its result (the block's terminator at the
//! latest), and lets it leave the products that were started in between under way.
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
}

#[cfg(test)]
mod tests {
    use crate::text::{parse, print};

    #[test]
    fn two_products_run_side_by_side() {
        let layouts = "#l0 = linear<reg=[[0,1],[8,0]], lane=[[0,2],[0,4],[1,0],[2,0],[4,0]], warp=[[16,0],[32,0]], block=[], shape=[64,8]>
#l1 = shared<offset=[[0,1],[0,2],[0,4],[0,8],[1,0],[2,0],[4,0],[8,0],[16,0],[32,0]], shape=[64,16]>
#l2 = shared<offset=[[0,1],[0,2],[0,4],[1,0],[2,0],[4,0],[8,0]], shape=[16,8]>
";
        let text = format!(
            "{layouts}kernel @f() {{
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
}
