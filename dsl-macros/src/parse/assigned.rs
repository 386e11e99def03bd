//! Finds the outer variables that a piece of code assigns: the state of a loop or a branch.

use super::calls::named_argument;
use proc_macro2::Ident;
use quote::ToTokens;
use std::collections::{BTreeSet, HashMap};
use syn::visit::{self, Visit};
use syn::{
    BinOp, Block, Error, Expr, ExprAssign, ExprBinary, ExprClosure, ExprForLoop, ExprIf, ExprMatch, ExprWhile, FnArg,
    Item, Local, Pat, PatIdent, Path, Signature, Type,
};

/// Variables that an expression assigns but does not declare, in order of first assignment.
pub fn assigned_in_expr(expr: &Expr) -> Vec<Ident> {
    Assigned::of(expr).found
}

/// Those that run-time loops inside of the expression assign, by `range` or `while`.
pub fn assigned_in_loops(expr: &Expr) -> Vec<Ident> {
    Assigned::of(expr).in_loops
}

/// What the expression assigns of them: a variable, or a member of one.
pub fn assigned_places(expr: &Expr) -> Vec<Place> {
    Assigned::of(expr).places
}

/// All places that a function assigns.
pub fn all_places(block: &Block) -> Vec<Place> {
    struct All(Vec<Place>);
    impl Visit<'_> for All {
        fn visit_expr_assign(&mut self, assign: &ExprAssign) {
            self.0.extend(places(&assign.left));
            visit::visit_expr_assign(self, assign);
        }
        fn visit_expr_binary(&mut self, binary: &ExprBinary) {
            if is_compound(&binary.op) {
                self.0.extend(places(&binary.left));
            }
            visit::visit_expr_binary(self, binary);
        }
    }
    let mut all = All(Vec::new());
    all.visit_block(block);
    all.0
}

/// Pairs of a place that the expression assigns and one of `closures` that it uses after that.
pub fn used_after_assignment(expr: &Expr, closures: &BTreeSet<Ident>) -> Vec<(Place, Ident)> {
    let mut visitor = Assigned { closures: closures.clone(), ..Assigned::default() };
    visitor.visit_expr(expr);
    visitor.used_after.into_iter().map(|(place, closure)| (visitor.places[place].clone(), closure)).collect()
}

/// Those of `closures`, variables that may hold closures, that an expression mentions, and whether it has a closure.
pub fn closures_in(expr: &Expr, closures: &BTreeSet<Ident>) -> (Vec<Ident>, bool) {
    struct Found<'a>(&'a BTreeSet<Ident>, Vec<Ident>, bool);
    impl Visit<'_> for Found<'_> {
        fn visit_expr_closure(&mut self, closure: &ExprClosure) {
            self.2 = true;
            visit::visit_expr_closure(self, closure);
        }
        fn visit_path(&mut self, path: &Path) {
            self.1.extend(path.get_ident().filter(|name| self.0.contains(name)).cloned());
        }
    }
    let mut found = Found(closures, Vec::new(), false);
    found.visit_expr(expr);
    (found.1, found.2)
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

/// A place that is assigned, such as `x.0`, and its variable.
#[derive(Clone)]
pub struct Place {
    pub var: Ident,
    pub expr: Expr,
}

impl PartialEq for Place {
    fn eq(&self, other: &Place) -> bool {
        self.expr.to_token_stream().to_string() == other.expr.to_token_stream().to_string()
    }
}

/// The places that an assignment's left side changes. That of an element is its array.
fn places(left: &Expr) -> Vec<Place> {
    match left {
        Expr::Path(p) => {
            p.path.get_ident().map(|var| Place { var: var.clone(), expr: left.clone() }).into_iter().collect()
        }
        Expr::Field(f) => {
            let member = |Place { var, expr }| {
                let member = &f.member;
                let expr = if is_element(&f.base) { expr } else { syn::parse_quote!(#expr.#member) };
                Place { var, expr }
            };
            places(&f.base).into_iter().map(member).collect()
        }
        Expr::Index(i) => places(&i.expr),
        Expr::Paren(p) => places(&p.expr),
        Expr::Group(g) => places(&g.expr),
        Expr::Tuple(t) => t.elems.iter().flat_map(places).collect(),
        Expr::Array(a) => a.elems.iter().flat_map(places).collect(),
        _ => Vec::new(),
    }
}

/// Whether a place is an element of an array, or a part of one.
fn is_element(place: &Expr) -> bool {
    match place {
        Expr::Index(_) => true,
        Expr::Field(f) => is_element(&f.base),
        Expr::Paren(p) => is_element(&p.expr),
        Expr::Group(g) => is_element(&g.expr),
        _ => false,
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

/// A variable that the visited code declares.
struct Declared {
    mutable: bool,
    /// The outer closures that its value may hold.
    holds: Vec<Ident>,
}

#[derive(Default)]
struct Assigned {
    /// The names that each scope declares.
    scopes: Vec<HashMap<Ident, Declared>>,
    found: Vec<Ident>,
    immutable: Vec<Error>,
    /// What is assigned of them, each place once.
    places: Vec<Place>,
    /// Those of `found` that a run-time loop assigns.
    in_loops: Vec<Ident>,
    /// The number of run-time loops around.
    loops: usize,
    /// Outer variables that may hold closures.
    closures: BTreeSet<Ident>,
    /// Those of `closures` that the value of the expression that is visited may hold.
    held: Vec<Ident>,
    /// The number of closures around.
    depth: usize,
    /// Indices in `places` of those that have been assigned on a path to here.
    changed: BTreeSet<usize>,
    /// Pairs of one of `changed` and a closure that is used then.
    used_after: BTreeSet<(usize, Ident)>,
}

impl Assigned {
    fn of(expr: &Expr) -> Assigned {
        let mut visitor = Assigned::default();
        visitor.visit_expr(expr);
        visitor
    }

    fn declare(&mut self, pat: &Pat) {
        self.declare_holding(pat, &[]);
    }

    /// Declares the variables of a pattern whose value may hold these closures.
    fn declare_holding(&mut self, pat: &Pat, holds: &[Ident]) {
        let declared =
            bindings(pat).into_iter().map(|(name, mutable)| (name, Declared { mutable, holds: holds.to_vec() }));
        match self.scopes.last_mut() {
            Some(scope) => scope.extend(declared),
            None => self.scopes.push(declared.collect()),
        }
    }

    /// Visits a value; returns the outer closures that it may hold.
    fn value(&mut self, value: &Expr) -> Vec<Ident> {
        let outer = std::mem::take(&mut self.held);
        self.visit_expr(value);
        std::mem::replace(&mut self.held, outer)
    }

    fn assign(&mut self, left: &Expr) {
        let mut names = Vec::new();
        targets(left, &mut names);
        for place in places(left) {
            if self.is_inner(&place.var) {
                continue;
            }
            let at = self.places.iter().position(|other| *other == place).unwrap_or(self.places.len());
            self.changed.insert(at);
            if at == self.places.len() {
                self.places.push(place);
            }
        }
        for name in names {
            match self.scopes.iter_mut().rev().find_map(|scope| scope.get_mut(&name)) {
                Some(declared) if !declared.mutable => {
                    // Once per variable.
                    declared.mutable = true;
                    let message = format!("`{name}` is assigned, but it is not mutable: declare it as `mut {name}`");
                    self.immutable.push(Error::new(name.span(), message));
                }
                Some(_) => {}
                None => {
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

    /// Whether the visited code declares the variable.
    fn is_inner(&self, name: &Ident) -> bool {
        self.scopes.iter().any(|scope| scope.contains_key(name))
    }

    /// Visits alternatives, one of which is executed.
    fn alternatives<A>(&mut self, alternatives: impl IntoIterator<Item = A>, visit: impl Fn(&mut Self, A)) {
        let (before, mut after) = (self.changed.clone(), BTreeSet::new());
        for alternative in alternatives {
            visit(self, alternative);
            after.append(&mut std::mem::replace(&mut self.changed, before.clone()));
        }
        self.changed = after;
    }

    /// Visits what a loop repeats: an assignment is before a use that comes earlier.
    fn repeated(&mut self, visit: impl Fn(&mut Self)) {
        let times = if self.closures.is_empty() { 1 } else { 2 };
        for _ in 0..times {
            visit(self);
        }
    }

    /// Visits a call, whose value holds no closures, unless a closure makes it.
    fn called(&mut self, visit: impl FnOnce(&mut Self)) {
        let held = self.held.len();
        visit(self);
        if self.depth == 0 {
            self.held.truncate(held);
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
        match &local.init {
            Some(init) => {
                let holds = self.value(&init.expr);
                self.declare_holding(&local.pat, &holds);
            }
            // The first assignment is none of a mutable variable; it is refused for another reason.
            None => {
                self.declare(&local.pat);
                if let Some(scope) = self.scopes.last_mut() {
                    let names = bound_names(&local.pat).into_iter();
                    scope.extend(names.map(|name| (name, Declared { mutable: true, holds: Vec::new() })));
                }
            }
        }
    }

    fn visit_expr_assign(&mut self, assign: &'ast ExprAssign) {
        visit::visit_expr_assign(self, assign);
        self.assign(&assign.left);
    }

    fn visit_expr_binary(&mut self, binary: &'ast ExprBinary) {
        visit::visit_expr_binary(self, binary);
        if is_compound(&binary.op) {
            self.assign(&binary.left);
        }
    }

    fn visit_path(&mut self, path: &'ast Path) {
        let Some(name) = path.get_ident() else { return };
        // At the place of this use, for rustc's messages.
        let here = |closure: &Ident| Ident::new(&closure.to_string(), closure.span().located_at(name.span()));
        let holds: Vec<Ident> = match self.scopes.iter().rev().find_map(|scope| scope.get(name)) {
            Some(declared) => declared.holds.iter().map(here).collect(),
            None => self.closures.get(name).map(here).into_iter().collect(),
        };
        for closure in &holds {
            self.used_after.extend(self.changed.iter().map(|&place| (place, closure.clone())));
        }
        self.held.extend(holds);
    }

    fn visit_expr_if(&mut self, e: &'ast ExprIf) {
        self.visit_expr(&e.cond);
        self.alternatives([true, false], |this, then| match (&e.else_branch, then) {
            (_, true) => this.visit_block(&e.then_branch),
            (Some((_, otherwise)), false) => this.visit_expr(otherwise),
            (None, false) => {}
        });
    }

    fn visit_expr_match(&mut self, e: &'ast ExprMatch) {
        let holds = self.value(&e.expr);
        self.alternatives(&e.arms, |this, arm| {
            this.scoped(|this| {
                this.declare_holding(&arm.pat, &holds);
                visit::visit_arm(this, arm);
            });
        });
    }

    fn visit_expr_for_loop(&mut self, f: &'ast ExprForLoop) {
        self.visit_expr(&f.expr);
        let is_run_time = called_name(&f.expr).is_none_or(|name| name != "static_range");
        self.loops += usize::from(is_run_time);
        self.repeated(|this| {
            this.scoped(|this| {
                this.declare(&f.pat);
                this.visit_block(&f.body);
            });
        });
        self.loops -= usize::from(is_run_time);
    }

    fn visit_expr_while(&mut self, w: &'ast ExprWhile) {
        self.loops += 1;
        self.repeated(|this| visit::visit_expr_while(this, w));
        self.loops -= 1;
    }

    fn visit_expr_closure(&mut self, closure: &'ast ExprClosure) {
        self.depth += 1;
        self.scoped(|this| {
            for pat in &closure.inputs {
                this.declare(pat);
            }
            this.visit_expr(&closure.body);
        });
        self.depth -= 1;
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        self.called(|this| {
            this.visit_expr(&call.func);
            for arg in &call.args {
                this.visit_expr(named_argument(arg).map_or(arg, |(_, value)| value));
            }
        });
    }

    fn visit_expr_method_call(&mut self, call: &'ast syn::ExprMethodCall) {
        self.called(|this| {
            this.visit_expr(&call.receiver);
            for arg in &call.args {
                this.visit_expr(named_argument(arg).map_or(arg, |(_, value)| value));
            }
        });
    }

    fn visit_item(&mut self, _item: &'ast Item) {}
}
