//! Finds the outer variables that a piece of code assigns: the state of a loop or a branch.

use super::calls::named_argument;
use proc_macro2::Ident;
use std::collections::HashMap;
use syn::visit::{self, Visit};
use syn::{
    Arm, BinOp, Block, Error, Expr, ExprAssign, ExprBinary, ExprClosure, ExprForLoop, FnArg, Item, Local, Pat,
    PatIdent, Signature, Type,
};

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
    Assigned::of(expr).found
}

/// Those that run-time loops inside of the expression assign, by `range` or `while`.
pub fn assigned_in_loops(expr: &Expr) -> Vec<Ident> {
    Assigned::of(expr).in_loops
}

/// Those that the expression assigns as a whole, not only members of them.
pub fn assigned_whole(expr: &Expr) -> Vec<Ident> {
    Assigned::of(expr).whole
}

/// The last name of the path of a call, such as `range`.
pub fn called_name(expr: &Expr) -> Option<String> {
    let Expr::Call(call) = expr else { return None };
    let Expr::Path(path) = &*call.func else { return None };
    path.path.segments.last().map(|segment| segment.ident.to_string())
}

/// Names that a pattern binds.
pub fn bound_names(pat: &Pat) -> Vec<Ident> {
    bindings(pat).into_iter().map(|(name, _)| name).collect()
}

/// Names that a pattern binds, and whether with `mut`.
fn bindings(pat: &Pat) -> Vec<(Ident, bool)> {
    struct Names(Vec<(Ident, bool)>);
    impl Visit<'_> for Names {
        fn visit_pat_ident(&mut self, pat: &PatIdent) {
            self.0.push((pat.ident.clone(), pat.mutability.is_some()));
        }
        // A guard's expression binds its own.
        fn visit_expr(&mut self, _: &Expr) {}
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

/// Those of [`targets`] that are changed as a whole.
fn whole_targets(left: &Expr, out: &mut Vec<Ident>) {
    match left {
        Expr::Field(_) | Expr::Index(_) => {}
        Expr::Tuple(t) => t.elems.iter().for_each(|e| whole_targets(e, out)),
        Expr::Paren(p) => whole_targets(&p.expr, out),
        other => targets(other, out),
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

/// Errors for assignments to variables and parameters that are not declared with `mut`. rustc does not see those inside of loops and
/// branches, which are rewritten to declare what they assign.
pub fn assigned_without_mut(sig: &Signature, block: &Block) -> Vec<Error> {
    let mut visitor = Assigned::default();
    for input in &sig.inputs {
        match input {
            // What a reference points to may be assigned.
            FnArg::Typed(typed) if matches!(*typed.ty, Type::Reference(_)) => {}
            FnArg::Typed(typed) => visitor.declare(&typed.pat),
            FnArg::Receiver(_) => {}
        }
    }
    visitor.visit_block(block);
    visitor.immutable
}

#[derive(Default)]
struct Assigned {
    /// The names that each scope declares, and whether with `mut`.
    scopes: Vec<HashMap<Ident, bool>>,
    found: Vec<Ident>,
    immutable: Vec<Error>,
    /// Those of `found` that are assigned as a whole.
    whole: Vec<Ident>,
    /// Those of `found` that a run-time loop assigns.
    in_loops: Vec<Ident>,
    /// The number of run-time loops around.
    loops: usize,
}

impl Assigned {
    fn of(expr: &Expr) -> Assigned {
        let mut visitor = Assigned::default();
        visitor.visit_expr(expr);
        visitor
    }

    fn declare(&mut self, pat: &Pat) {
        match self.scopes.last_mut() {
            Some(scope) => scope.extend(bindings(pat)),
            None => self.scopes.push(bindings(pat).into_iter().collect()),
        }
    }

    fn assign(&mut self, left: &Expr) {
        let mut names = Vec::new();
        targets(left, &mut names);
        let mut whole = Vec::new();
        whole_targets(left, &mut whole);
        for name in names {
            match self.scopes.iter_mut().rev().find_map(|scope| scope.get_mut(&name)) {
                Some(mutable) if !*mutable => {
                    // Once per variable.
                    *mutable = true;
                    let message = format!("`{name}` is assigned, but it is not mutable: declare it as `mut {name}`");
                    self.immutable.push(Error::new(name.span(), message));
                }
                Some(_) => {}
                None => {
                    if whole.contains(&name) {
                        self.whole.push(name.clone());
                    }
                    if self.loops > 0 {
                        self.in_loops.push(name.clone());
                    }
                    if !self.found.contains(&name) {
                        self.found.push(name);
                    }
                }
            }
        }
    }

    fn scoped(&mut self, inside: impl FnOnce(&mut Self)) {
        self.scopes.push(HashMap::new());
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
        // Without a value, the first assignment is none of a mutable variable; it is refused for another reason.
        if let (None, Some(scope)) = (&local.init, self.scopes.last_mut()) {
            scope.extend(bound_names(&local.pat).into_iter().map(|name| (name, true)));
        }
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
        let is_run_time = called_name(&f.expr).is_none_or(|name| name != "static_range");
        self.loops += usize::from(is_run_time);
        self.scoped(|this| {
            this.declare(&f.pat);
            this.visit_block(&f.body);
        });
        self.loops -= usize::from(is_run_time);
    }

    fn visit_expr_while(&mut self, w: &'ast syn::ExprWhile) {
        self.loops += 1;
        visit::visit_expr_while(self, w);
        self.loops -= 1;
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
