//! Recognizes the combine regions of `reduce` and `scan`.

use crate::ir::{BinaryOp, BlockId, Func, Op};

/// The binary op of a region that applies only this op to its two parameters. `None` for other regions, and for ops
/// that are not associative and commutative (float `add` and `mul` count as associative).
pub fn single_binary_op(func: &Func, region: BlockId) -> Option<BinaryOp> {
    let block = func.block(region);
    let [id, last] = block.ops[..] else { return None };
    let Op::Binary(op) = func.op(id).op else { return None };
    let associative = matches!(
        op,
        BinaryOp::Add | BinaryOp::Mul | BinaryOp::Min | BinaryOp::Max | BinaryOp::And | BinaryOp::Or | BinaryOp::Xor
    );
    let operands = &func.op(id).operands;
    let of_both = *operands == block.params || operands.iter().rev().eq(&block.params);
    (associative && block.params.len() == 2 && of_both && func.op(last).operands == func.op(id).results).then_some(op)
}
