//! Finds number literals, which take the type of the other operand.

use syn::{BinOp, Expr, Lit, UnOp};

/// The kind of a literal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Int,
    Float,
}

/// The kind of an expression that consists of unsuffixed number literals only, such as `2`, `-1.0` or `(2 * 3)`.
pub fn kind(expr: &Expr) -> Option<Kind> {
    match expr {
        Expr::Lit(lit) => match &lit.lit {
            Lit::Int(n) if n.suffix().is_empty() => Some(Kind::Int),
            Lit::Float(x) if x.suffix().is_empty() => Some(Kind::Float),
            _ => None,
        },
        Expr::Unary(unary) if matches!(unary.op, UnOp::Neg(_)) => kind(&unary.expr),
        Expr::Unary(unary) if matches!(unary.op, UnOp::Not(_)) => kind(&unary.expr).filter(|kind| *kind == Kind::Int),
        Expr::Paren(paren) => kind(&paren.expr),
        Expr::Group(group) => kind(&group.expr),
        Expr::Binary(binary) => {
            let (left, right) = (kind(&binary.left)?, kind(&binary.right)?);
            let has_operator = match binary.op {
                BinOp::Add(_) | BinOp::Sub(_) | BinOp::Mul(_) | BinOp::Div(_) | BinOp::Rem(_) => true,
                BinOp::Shl(_) | BinOp::Shr(_) | BinOp::BitAnd(_) | BinOp::BitOr(_) | BinOp::BitXor(_) => {
                    left == Kind::Int
                }
                _ => false,
            };
            (has_operator && left == right).then_some(left)
        }
        _ => None,
    }
}
