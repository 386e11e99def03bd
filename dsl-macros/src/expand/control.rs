//! Expands loops and branches: the variables that they assign become loop-carried values and results.

use super::body::{Body, hygienic, is_statement_like};
use super::branches::{arm_block, outer_names};
use super::lang;
use crate::parse::assigned::{
    Place, assigned_in_expr, assigned_in_loops, assigned_places, bound_names, called_name, is_compound, pattern,
    used_after_assignment,
};
use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Block, Expr, ExprForLoop, ExprWhile, Pat, Stmt, Type};

/// What a block yields.
#[derive(Clone, Copy)]
pub(super) struct Yield<'a> {
    /// The variables that it assigns, which come last.
    pub vars: &'a [Ident],
    /// What holds them where the block begins: a pattern may bind one of their names to something else.
    pub ends: &'a [Ident],
    /// Whether the value of its last expression comes first.
    pub value: bool,
    /// The type of the value, where it is written.
    pub ty: Option<&'a Type>,
}

impl Yield<'_> {
    /// The names of what is yielded; a value has none.
    pub fn names(&self) -> Vec<String> {
        self.value.then(String::new).into_iter().chain(self.vars.iter().map(Ident::to_string)).collect()
    }
}

/// Maximum number of carried variables: larger tuples have no impl.
const MAX_CARRIED: usize = 19;

impl Body {
    /// Expands a control expression as statements: the assigned variables are redeclared with their new values, and so
    /// is `value`, if one is wanted.
    pub fn control(&mut self, expr: &Expr, value: Option<&Ident>, ty: Option<&Type>) -> TokenStream {
        let vars = assigned_in_expr(expr);
        if vars.len() > MAX_CARRIED {
            return self.reject(
                expr.span(),
                format!(
                    "{} variables are assigned here, the maximum is {MAX_CARRIED}: group some into tuples",
                    vars.len()
                ),
            );
        }
        let places = self.places(expr);
        // They are declared again, perhaps as run-time values.
        for var in &vars {
            self.names.numbers.remove(var);
        }
        self.control_of(expr, value, ty, &vars, &places)
    }

    fn control_of(
        &mut self,
        expr: &Expr,
        value: Option<&Ident>,
        ty: Option<&Type>,
        vars: &[Ident],
        places: &[Place],
    ) -> TokenStream {
        let result = Yield { vars, ends: vars, value: value.is_some(), ty };
        let bind = value.map(|v| quote!(#v,));
        match expr {
            Expr::If(e) => {
                let (stale, call) = (self.stale(expr), self.branch(e, result));
                let branch = redeclare(&bind, vars, places, &call);
                quote!(#stale #branch)
            }
            Expr::Block(e) => {
                if let Some(label) = &e.label {
                    return self.reject(label.span(), "labels cannot be translated: kernels have no `break`");
                }
                let inner = self.yielding(&e.block, result);
                let copies =
                    (!vars.is_empty()).then(|| quote!(#[allow(unused_variables)] let (#(mut #vars,)*) = (#(#vars,)*);));
                let (stale, block) = (self.stale(expr), redeclare(&bind, vars, places, &quote!({ #copies #inner })));
                quote!(#stale #block)
            }
            Expr::Match(e) => {
                let arm_body = |arm: &syn::Arm| {
                    self.scoped(|this| {
                        this.names.declare_pattern(&arm.pat, &e.expr);
                        this.yielding(&arm_block(arm), Yield { ends: &outer_names(arm, vars), ..result })
                    })
                };
                let bodies: Vec<TokenStream> = e.arms.iter().map(arm_body).collect();
                let chosen = match vars.is_empty() {
                    true => self.match_alike(e, &bodies),
                    false => self.match_arms(e, &bodies, &result.names(), vars),
                };
                let (stale, chosen) = (self.stale(expr), redeclare(&bind, vars, places, &chosen));
                quote!(#stale #chosen)
            }
            Expr::ForLoop(e) => self.for_loop(e, vars, places),
            Expr::While(e) => self.while_loop(e, vars, places),
            other => self.expr(other),
        }
    }

    /// The places that an expression assigns, but for what references point to.
    ///
    /// Where the function assigns other members of a variable too, the place is the variable: it is declared again, so that
    /// rustc would not see that those are assigned later.
    fn places(&self, expr: &Expr) -> Vec<Place> {
        let own = assigned_places(expr);
        let mut places: Vec<Place> = Vec::new();
        for place in own.iter().filter(|place| !self.names.references.contains(&place.var)) {
            let others = self.places.iter().any(|other| other.var == place.var && !own.contains(other));
            let place = match others {
                true => {
                    let var = &place.var;
                    Place { expr: syn::parse_quote!(#var), ..place.clone() }
                }
                false => place.clone(),
            };
            if !places.contains(&place) {
                places.push(place);
            }
        }
        places
    }

    /// Code that rustc refuses if a branch uses a closure after it assigned what the closure has captured: branches assign
    /// variables of their own, so that the closure would see the old value.
    pub(super) fn stale(&self, expr: &Expr) -> TokenStream {
        let pairs = used_after_assignment(expr, &self.names.closures).into_iter();
        let pairs = pairs.filter(|(place, _)| !self.names.references.contains(&place.var));
        let use_after = |(place, closure): (Place, Ident)| {
            let touch = touch(&place);
            // What comes after it does not see the assignment.
            quote_spanned!(closure.span()=> if false { #touch let _ = &#closure; ::core::unreachable!() })
        };
        pairs.map(use_after).collect()
    }

    /// Expands a control expression inside another expression. Its literals get the type `ty`, if one is given.
    pub fn nested_control(&mut self, expr: &Expr, ty: Option<&Type>) -> TokenStream {
        if let Some(name) = assigned_in_expr(expr).first() {
            return self.reject(
                name.span(),
                format!(
                    "`{name}` is assigned inside an expression: bind the value of this `if`, `match` or block with `let` first, \
                     and use that"
                ),
            );
        }
        match expr {
            Expr::If(e) => self.branch_value(e, ty),
            Expr::Match(e) => self.match_value(e, ty),
            Expr::Block(e) => {
                let inner = self.value_of(&e.block, ty);
                quote!({ #inner })
            }
            other => self.expr(other),
        }
    }

    /// Expands a block that assigns no outer variable: its statements and last expression.
    pub(super) fn value_of(&mut self, block: &Block, ty: Option<&Type>) -> TokenStream {
        self.scoped(|this| match block.stmts.split_last() {
            Some((Stmt::Expr(last, None), before)) if !has_no_value(last) => {
                let before = this.statements(before);
                let last = match ty {
                    Some(ty) => this.typed(last, ty),
                    None => this.operand(last),
                };
                quote!(#before #last)
            }
            _ => this.statements(&block.stmts),
        })
    }

    /// Expands a block so that it ends with the tuple of yielded values. It has variables of its own for those that it assigns, so that
    /// branches do not see each other's assignments.
    pub(super) fn yielding(&mut self, block: &Block, result: Yield) -> TokenStream {
        let vars = result.ends;
        let value = hygienic("inner");
        self.scoped(|this| match block.stmts.split_last() {
            Some((Stmt::Expr(last, None), before)) if result.value && !has_no_value(last) => {
                let (before, ends) = this.unit_statements(before, vars);
                let bind = this.bind(quote!(#value), result.ty, last, super::body::Literals::Adapt);
                quote!(#before #bind (#value, #(#ends,)*))
            }
            _ => {
                let (inner, ends) = this.unit_statements(&block.stmts, vars);
                let unit = result.value.then(|| quote!((),));
                quote!(#inner (#unit #(#ends,)*))
            }
        })
    }

    /// Expands the statements of a block whose last expression has no value, or an unused one, and gives what holds the outer
    /// variables `vars` at its end: a `let` may give one of their names to another variable.
    fn unit_statements(&mut self, stmts: &[Stmt], vars: &[Ident]) -> (TokenStream, Vec<Ident>) {
        let mut ends = vars.to_vec();
        let mut tokens = TokenStream::new();
        for (i, stmt) in stmts.iter().enumerate() {
            if i + 1 == stmts.len()
                && let Stmt::Expr(value, None) = stmt
                && unused_value(value)
            {
                let (span, lang, value) = (value.span(), lang(value.span()), self.expr(value));
                tokens.extend(quote_spanned!(span=> #lang::control::no_value(#value);));
                continue;
            }
            let names = match stmt {
                Stmt::Local(local) if local.init.is_some() => bound_names(&local.pat),
                _ => Vec::new(),
            };
            let shadowed: Vec<usize> =
                (0..vars.len()).filter(|&i| ends[i] == vars[i] && names.contains(&vars[i])).collect();
            let (Stmt::Local(local), false) = (stmt, shadowed.is_empty()) else {
                tokens.extend(self.statements(std::slice::from_ref(stmt)));
                continue;
            };
            // The value may still read and assign the outer variable.
            let value = hygienic("shadowing");
            tokens.extend(self.local(local, &value.to_token_stream()));
            self.names.declare(local);
            for i in shadowed {
                let outer = hygienic(&format!("outer_{i}"));
                let var = std::mem::replace(&mut ends[i], outer.clone());
                tokens.extend(quote!(let #outer = #var;));
            }
            let pat = pattern(local);
            tokens.extend(quote!(let #pat = #value;));
        }
        (tokens, ends)
    }

    pub(super) fn condition(&mut self, cond: &Expr) -> TokenStream {
        if let Some(name) = assigned_in_expr(cond).first() {
            return self.reject(name.span(), "a condition cannot assign a variable: assign it in a statement before");
        }
        self.expr(cond)
    }

    fn for_loop(&mut self, e: &ExprForLoop, vars: &[Ident], places: &[Place]) -> TokenStream {
        if let Some(label) = &e.label {
            return self.reject(label.span(), "labels cannot be translated: kernels have no `break`");
        }
        let pat = match &*e.pat {
            Pat::Ident(p) if p.by_ref.is_none() && p.subpat.is_none() => p.to_token_stream(),
            Pat::Wild(w) => w.to_token_stream(),
            other => return self.reject(other.span(), "a loop index must be a single name, or `_`"),
        };
        match called_name(&e.expr).as_deref() {
            Some("range") => {
                let range = self.expr(&e.expr);
                let (inner, ends) = self.loop_body(e, vars);
                let names = vars.iter().map(Ident::to_string);
                let span = e.for_token.span();
                let lang = lang(span);
                let (touched, bounds) = (touched(vars, places), hygienic("bounds"));
                let call = quote_spanned! {span=> {
                    let #bounds = #range;
                    #touched
                    #lang::control::for_range(
                        #bounds, (#(#vars,)*), &[#(#names),*],
                        |#pat, (#(mut #vars,)*)| { #inner (#(#ends,)*) },
                    )
                }};
                redeclare(&None, vars, places, &call)
            }
            Some("static_range") => {
                let range = self.expr(&e.expr);
                let (inner, ends) = self.loop_body(e, vars);
                if vars.is_empty() {
                    return quote!(for #pat in #range { #inner });
                }
                let run_time = run_time_values(&assigned_in_loops(&Expr::ForLoop(e.clone())), vars);
                let lang = lang(e.for_token.span());
                let types: Vec<Ident> = (0..vars.len()).map(|i| hygienic(&format!("type_{i}"))).collect();
                let assigned = vars
                    .iter()
                    .zip(types.iter().zip(&ends))
                    .map(|(var, (ty, end))| quote_spanned!(var.span()=> #lang::operand::assigned(#ty, #end)));
                let (touched, bounds) = (touched(vars, places), hygienic("bounds"));
                quote! {
                    let #bounds = #range;
                    #touched
                    #run_time
                    {
                        let (#(#types,)*) = (#(#lang::operand::type_of(&#vars),)*);
                        for #pat in #bounds {
                            (#(#vars,)*) = {
                                let (#(mut #vars,)*) = (#(#vars,)*);
                                #inner
                                (#(#assigned,)*)
                            };
                        }
                    }
                }
            }
            _ => self.reject(
                e.expr.span(),
                "expected `range(start, end)`, or `static_range(start, end)` for an unrolled loop",
            ),
        }
    }

    fn loop_body(&mut self, e: &ExprForLoop, vars: &[Ident]) -> (TokenStream, Vec<Ident>) {
        self.scoped(|this| {
            this.names.forget(&bound_names(&e.pat));
            this.unit_statements(&e.body.stmts, vars)
        })
    }

    fn while_loop(&mut self, e: &ExprWhile, vars: &[Ident], places: &[Place]) -> TokenStream {
        if let Some(label) = &e.label {
            return self.reject(label.span(), "labels cannot be translated: kernels have no `break`");
        }
        let condition = self.condition(&e.cond);
        let (inner, ends) = self.scoped(|this| this.unit_statements(&e.body.stmts, vars));
        let names = vars.iter().map(Ident::to_string);
        let span = e.while_token.span();
        let lang = lang(span);
        let touched = touched(vars, places);
        let call = quote_spanned! {span=> {
            #touched
            #lang::control::while_loop(
                (#(#vars,)*), &[#(#names),*],
                |#[allow(unused_variables)] (#(#vars,)*)| #condition,
                |(#(mut #vars,)*)| { #inner (#(#ends,)*) },
            )
        }};
        redeclare(&None, vars, places, &call)
    }
}

/// Makes those of the variables run-time values that a run-time loop inside of a `static_range` assigns: all iterations give them
/// one type.
fn run_time_values(in_loops: &[Ident], vars: &[Ident]) -> TokenStream {
    let vars = vars.iter().filter(|var| in_loops.contains(var)).map(|var| {
        let (span, lang) = (var.span(), lang(var.span()));
        quote_spanned!(span=> let mut #var = #lang::control::Carried::into_handle(#var);)
    });
    quote!(#(#vars)*)
}

/// Assigns a place to itself, so that rustc sees that it is assigned: a closure that has captured it would still see its
/// old value.
fn touch(Place { var, expr }: &Place) -> TokenStream {
    let lang = lang(var.span());
    quote_spanned!(var.span()=> #expr = #lang::control::same(#expr);)
}

/// Those of the places that are of these variables, [assigned to themselves](touch).
fn touched(vars: &[Ident], places: &[Place]) -> TokenStream {
    places.iter().filter(|place| vars.contains(&place.var)).map(touch).collect()
}

/// Declares the assigned variables again, with their new values, after the value that `bind` names. They may not be used again,
/// which is no reason for a warning.
fn redeclare(bind: &Option<TokenStream>, vars: &[Ident], places: &[Place], values: &TokenStream) -> TokenStream {
    let (results, touched) = (hygienic("results"), touched(vars, places));
    quote! {
        let #results = #values;
        #touched
        #[allow(unused_variables)]
        let (#bind #(mut #vars,)*) = #results;
    }
}

/// Whether the last expression of a block may have a value: no control flow, which is looked into, and no assignment.
pub(super) fn unused_value(value: &Expr) -> bool {
    match value {
        Expr::Return(_) | Expr::Break(_) | Expr::Continue(_) | Expr::Macro(_) | Expr::Loop(_) => false,
        other => !is_statement_like(other) && !has_no_value(other),
    }
}

/// Whether an expression is a loop or an assignment, which are statements.
pub(super) fn has_no_value(expr: &Expr) -> bool {
    match expr {
        Expr::ForLoop(_) | Expr::While(_) | Expr::Assign(_) => true,
        Expr::Binary(binary) => is_compound(&binary.op),
        _ => false,
    }
}
