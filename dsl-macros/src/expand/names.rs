//! The variables that are in scope where an expression is expanded, as far as their values matter to the expansion.

use crate::parse::assigned::{bound_names, closures_in, pattern};
use crate::parse::literal;
use proc_macro2::Ident;
use std::collections::BTreeSet;
use syn::{Expr, Local, Pat, UnOp};

/// Variables in scope whose values matter to the expansion.
#[derive(Clone, Default)]
pub struct Names {
    /// Those that may hold closures: their values mention one.
    pub closures: BTreeSet<Ident>,
    /// Those that are closures, or parameters that are functions: calls of their names are theirs.
    pub functions: BTreeSet<Ident>,
    /// Those that are number literals.
    pub numbers: BTreeSet<Ident>,
    /// The parameters that are references.
    pub references: BTreeSet<Ident>,
}

impl Names {
    /// Declares the variables of a `let`.
    pub fn declare(&mut self, local: &Local) {
        let Some(init) = &local.init else { return };
        let is_function = match &*init.expr {
            Expr::Closure(_) => true,
            Expr::Path(path) => path.path.get_ident().is_some_and(|name| self.functions.contains(name)),
            _ => false,
        };
        self.declare_pattern(&local.pat, &init.expr);
        if let (true, Pat::Ident(pat)) = (is_function, pattern(local)) {
            self.functions.insert(pat.ident.clone());
        }
        // A written type is that of the variable.
        self.declare_numbers(&local.pat, &init.expr);
    }

    /// Declares the variables of a pattern for parts of a value.
    pub fn declare_pattern(&mut self, pat: &Pat, value: &Expr) {
        let names = bound_names(pat);
        let (mentioned, has_closure) = closures_in(value, &self.closures);
        self.forget(&names);
        if has_closure || !mentioned.is_empty() {
            self.closures.extend(names);
        }
    }

    /// Declares variables of which nothing is known.
    pub fn forget(&mut self, names: &[Ident]) {
        for name in names {
            for set in [&mut self.closures, &mut self.functions, &mut self.numbers, &mut self.references] {
                set.remove(name);
            }
        }
    }

    fn declare_numbers(&mut self, pat: &Pat, value: &Expr) {
        match (pat, value) {
            (Pat::Tuple(pats), Expr::Tuple(values)) if pats.elems.len() == values.elems.len() => {
                pats.elems.iter().zip(&values.elems).for_each(|(pat, value)| self.declare_numbers(pat, value));
            }
            (Pat::Ident(pat), value) if self.is_number(value) => {
                self.numbers.insert(pat.ident.clone());
            }
            _ => {}
        }
    }

    /// Whether an expression is a number literal, or a variable that is one.
    pub fn is_number(&self, expr: &Expr) -> bool {
        match expr {
            Expr::Path(path) => path.path.get_ident().is_some_and(|name| self.numbers.contains(name)),
            Expr::Paren(paren) => self.is_number(&paren.expr),
            Expr::Unary(unary) if !matches!(unary.op, UnOp::Deref(_)) => self.is_number(&unary.expr),
            _ => literal::kind(expr).is_some(),
        }
    }
}
