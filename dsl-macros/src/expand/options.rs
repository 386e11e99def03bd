//! Lowers `if let Some(x) = option { … }`, for arguments that a launch may leave out: whether they are given is known
//! while the kernel is recorded.

use syn::visit_mut::{self, VisitMut};
use syn::{Block, Expr, ExprIf, Pat, parse_quote};

/// Replaces each `if let Some(x) = option` by a test of `option`, which is a variable or a field.
pub fn lower(block: &mut Block) {
    Lowering.visit_block_mut(block);
}

struct Lowering;

impl VisitMut for Lowering {
    fn visit_expr_if_mut(&mut self, branch: &mut ExprIf) {
        if let Expr::Let(condition) = &*branch.cond
            && let Pat::TupleStruct(pattern) = &*condition.pat
            && pattern.path.is_ident("Some")
            && pattern.elems.len() == 1
            && matches!(&*condition.expr, Expr::Path(_) | Expr::Field(_))
        {
            let (inner, option) = (&pattern.elems[0], &condition.expr);
            branch.then_branch.stmts.insert(0, parse_quote!(let #inner = #option.unwrap();));
            branch.cond = parse_quote!(#option.is_some());
        }
        visit_mut::visit_expr_if_mut(self, branch);
    }
}
