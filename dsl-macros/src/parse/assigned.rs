//! Finds the outer variables that a piece of code assigns: the state of a loop or a branch.

use super::calls::named_argument;
use proc_macro2::Ident;
use std::collections::HashSet;
use syn::visit::{self, Visit};
use syn::{Arm, BinOp, Block, Expr, ExprAssign, ExprBinary, ExprClosure, ExprForLoop, Item, Local, Pat, PatIdent};

/// Variables that the code assigns but does not declare, in order of first assignment.
pub fn assigned_in<'a>(code: impl IntoIterator<Item = &'a Block>) -> Vec<Ident> {
    let mut visitor = Assigned::default();
    for block in code {
        visitor.visit_block(block);
    }
    visitor.found
}

/// As [`assigned_in`], for one expression.
pub fn assigned_in_expr(expr: &Expr) -> Vec<Ident> {
    let mut visitor = Assigned::default();
    visitor.visit_expr(expr);
    visitor.found
}

/// Names that a pattern binds.
pub fn bound_names(pat: &Pat) -> Vec<Ident> {
    struct Names(Vec<Ident>);
    impl Visit<'_> for Names {
        fn visit_pat_ident(&mut self, pat: &PatIdent) {
            self.0.push(pat.ident.clone());
        }
    }
    let mut names = Names(Vec::new());
    names.visit_pat(pat);
    names.0
}

/// The pattern of a `let`, without its type.
pub fn pattern(local: &Local) -> &Pat {
    match &local.pat {
        Pat::Type(typed) => &typed.pat,
        pat => pat,
    }
}

/// The variables that an assignment's left side changes: `x`, `x.0`, `x[i]`, `(x, y)`.
pub fn targets(left: &Expr, out: &mut Vec<Ident>) {
    match left {
        Expr::Path(p) => out.extend(p.path.get_ident().cloned()),
        Expr::Field(f) => targets(&f.base, out),
        Expr::Index(i) => targets(&i.expr, out),
        Expr::Paren(p) => targets(&p.expr, out),
        Expr::Group(g) => targets(&g.expr, out),
        Expr::Tuple(t) => t.elems.iter().for_each(|e| targets(e, out)),
        Expr::Array(a) => a.elems.iter().for_each(|e| targets(e, out)),
        _ => {}
    }
}

/// Whether the operator is a compound assignment, such as `+=`.
pub fn is_compound(op: &BinOp) -> bool {
    matches!(
        op,
        BinOp::AddAssign(_)
            | BinOp::SubAssign(_)
            | BinOp::MulAssign(_)
            | BinOp::DivAssign(_)
            | BinOp::RemAssign(_)
            | BinOp::BitXorAssign(_)
            | BinOp::BitAndAssign(_)
            | BinOp::BitOrAssign(_)
            | BinOp::ShlAssign(_)
            | BinOp::ShrAssign(_)
    )
}

#[derive(Default)]
struct Assigned {
    scopes: Vec<HashSet<Ident>>,
    found: Vec<Ident>,
}

impl Assigned {
    fn declare(&mut self, pat: &Pat) {
        let names = bound_names(pat);
        match self.scopes.last_mut() {
            Some(scope) => scope.extend(names),
            None => self.scopes.push(names.into_iter().collect()),
        }
    }

    fn assign(&mut self, left: &Expr) {
        let mut names = Vec::new();
        targets(left, &mut names);
        for name in names {
            let local = self.scopes.iter().any(|scope| scope.contains(&name));
            if !local && !self.found.contains(&name) {
                self.found.push(name);
            }
        }
    }

    fn scoped(&mut self, inside: impl FnOnce(&mut Self)) {
        self.scopes.push(HashSet::new());
        inside(self);
        self.scopes.pop();
    }
}

impl<'ast> Visit<'ast> for Assigned {
    fn visit_block(&mut self, block: &'ast Block) {
        self.scoped(|this| visit::visit_block(this, block));
    }

    fn visit_local(&mut self, local: &'ast Local) {
        if let Some(init) = &local.init {
            self.visit_expr(&init.expr);
        }
        self.declare(&local.pat);
    }

    fn visit_expr_assign(&mut self, assign: &'ast ExprAssign) {
        self.assign(&assign.left);
        visit::visit_expr_assign(self, assign);
    }

    fn visit_expr_binary(&mut self, binary: &'ast ExprBinary) {
        if is_compound(&binary.op) {
            self.assign(&binary.left);
        }
        visit::visit_expr_binary(self, binary);
    }

    fn visit_expr_for_loop(&mut self, f: &'ast ExprForLoop) {
        self.visit_expr(&f.expr);
        self.scoped(|this| {
            this.declare(&f.pat);
            this.visit_block(&f.body);
        });
    }

    fn visit_arm(&mut self, arm: &'ast Arm) {
        self.scoped(|this| {
            this.declare(&arm.pat);
            visit::visit_arm(this, arm);
        });
    }

    fn visit_expr_closure(&mut self, closure: &'ast ExprClosure) {
        self.scoped(|this| {
            for pat in &closure.inputs {
                this.declare(pat);
            }
            this.visit_expr(&closure.body);
        });
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        self.visit_expr(&call.func);
        for arg in &call.args {
            self.visit_expr(named_argument(arg).map_or(arg, |(_, value)| value));
        }
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.visit_expr(&call.receiver);
        for arg in &call.args {
            self.visit_expr(named_argument(arg).map_or(arg, |(_, value)| value));
        }
    }

    fn visit_item(&mut self, _item: &'ast Item) {}
}
