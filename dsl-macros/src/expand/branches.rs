//! Expands `if` and `match`: whether they are decided at specialization, the traits of `lang::branch` find.

use super::body::{Body, hygienic, operand_name};
use super::control::Yield;
use super::lang;
use crate::parse::assigned::{assigned_in_expr, bound_names};
use crate::parse::literal;
use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use std::iter::zip;
use syn::spanned::Spanned;
use syn::visit::Visit;
use syn::{BinOp, Block, Expr, ExprIf, ExprMatch, Pat, Stmt, Type};

impl Body {
    /// Expands `if` to a call that returns the tuple of yielded values.
    pub(super) fn branch(&mut self, e: &ExprIf, result: Yield) -> TokenStream {
        let condition = self.condition(&e.cond);
        let then = self.yielding(&e.then_branch, result);
        let otherwise = match &e.else_branch {
            Some((_, otherwise)) => self.yielding(&else_block(otherwise), result),
            None => {
                let vars = result.vars;
                let unit = result.value.then(|| quote!((),));
                quote!((#unit #(#vars,)*))
            }
        };
        choose(e, &condition, &result.names(), result.vars, [&then, &otherwise])
    }

    /// Expands `if` to a call that returns the value of its branches, which assign nothing.
    pub(super) fn branch_value(&mut self, e: &ExprIf, ty: Option<&Type>) -> TokenStream {
        let (condition, span) = (self.condition(&e.cond), e.if_token.span());
        let otherwise = e.else_branch.as_ref().map(|(_, otherwise)| else_block(otherwise)).unwrap_or_else(empty);
        if let (None, Some(first)) = (ty, literal_arm(e)) {
            let [then, otherwise] = [&e.then_branch, &otherwise].map(|block| self.value_of(block, ty));
            let (arm, number) = if first { (&otherwise, &then) } else { (&then, &otherwise) };
            let arms = quote!(#first, || { #arm }, #number);
            return with_condition(
                span,
                &condition,
                |lang, condition| quote_spanned!(span=> #lang::branch::branch_literal(#condition, #arms)),
            );
        }
        let (arms, names, value) = self.values_of(&[&e.then_branch, &otherwise], ty, span);
        let chosen = choose(e, &condition, &names, &[], [&arms[0], &arms[1]]);
        quote_spanned!(span=> #chosen #value)
    }

    /// Expands blocks that assign nothing so that each ends with a tuple: with that of its value, or if all of them end with tuples of
    /// one length, with these, so that each element has a type of its own. Also gives names for the elements, and what comes after the
    /// tuple that is chosen.
    fn values_of(
        &mut self,
        blocks: &[&Block],
        ty: Option<&Type>,
        span: Span,
    ) -> (Vec<TokenStream>, Vec<String>, Option<TokenStream>) {
        let tuple = |block: &&&Block| match block.stmts.last() {
            Some(Stmt::Expr(Expr::Tuple(tuple), None)) => tuple.elems.len(),
            _ => 0,
        };
        let mut lens = blocks.iter().filter(|block| !panics(block)).map(|block| tuple(&block));
        let len = lens.next().unwrap_or(0);
        if len == 0 || lens.any(|other| other != len) {
            let arms = blocks.iter().map(|block| self.value_of(block, ty)).map(|value| quote!(({ #value },))).collect();
            return (arms, vec![String::new()], Some(quote_spanned!(span=> .0)));
        }
        let arm = |block: &&Block| match block.stmts.split_last() {
            Some((Stmt::Expr(last @ Expr::Tuple(_), None), before)) => {
                let expand = |this: &mut Self| (this.statements(before), this.adapting(last, ty));
                let (before, last) = self.scoped(expand);
                quote!({ #before #last })
            }
            _ => self.value_of(block, ty),
        };
        (blocks.iter().map(arm).collect(), vec![String::new(); len], None)
    }

    /// Expands `if` at the end of a function: its branches may assign, but the values are unused.
    pub fn tail_if(&mut self, e: &ExprIf) -> TokenStream {
        let condition = self.condition(&e.cond);
        let whole = Expr::If(e.clone());
        let vars = assigned_in_expr(&whole);
        // With numbers as the function's result, `tail` gives literals its type.
        if vars.is_empty() && self.result.is_none() && literal_arm(e).is_some() {
            return self.branch_value(e, None);
        }
        let then = self.tail(&e.then_branch.stmts);
        let otherwise = match &e.else_branch {
            Some((_, otherwise)) => self.tail(&else_block(otherwise).stmts),
            None => quote!(),
        };
        let arms = [&quote!(({ #then },)), &quote!(({ #otherwise },))];
        let (stale, value) = (self.stale(&whole), choose(e, &condition, &[String::new()], &vars, arms));
        quote_spanned!(e.if_token.span()=> #stale #value.0)
    }

    /// The pattern of an arm, with its guard.
    fn arm_pattern(&mut self, arm: &syn::Arm) -> TokenStream {
        match &arm.pat {
            Pat::Guard(guarded) => {
                let (pat, token) = (&guarded.pat, &guarded.if_token);
                let (guard, span) = (self.expr(&guarded.guard), guarded.guard.span());
                let lang = lang(span);
                quote_spanned!(span=> #pat #token #lang::branch::known(#guard))
            }
            other => other.to_token_stream(),
        }
    }

    /// Expands `match` to the value of its arms, which assign nothing.
    pub(super) fn match_value(&mut self, e: &ExprMatch, ty: Option<&Type>) -> TokenStream {
        self.scoped(|this| {
            e.arms.iter().for_each(|arm| this.names.forget(&bound_names(&arm.pat)));
            this.arm_values(e, ty)
        })
    }

    fn arm_values(&mut self, e: &ExprMatch, ty: Option<&Type>) -> TokenStream {
        let blocks: Vec<Block> = e.arms.iter().map(arm_block).collect();
        if ty.is_none() && blocks.iter().any(|block| self.adapts(block)) {
            let (bodies, names, value) = self.values_of(&blocks.iter().collect::<Vec<_>>(), ty, e.match_token.span());
            let chosen = self.match_arms(e, &bodies, &names, &[]);
            return quote_spanned!(e.match_token.span()=> #chosen #value);
        }
        let bodies: Vec<TokenStream> = blocks.iter().map(|block| self.value_of(block, ty)).collect();
        self.match_alike(e, &bodies)
    }

    /// Whether the value of a block may take the type of another arm's: a number literal or a variable that is one, a tuple
    /// with one, or a bool, which may be known at specialization in one arm only.
    fn adapts(&self, block: &Block) -> bool {
        let is_bool = |expr: &Expr| match expr {
            Expr::Lit(lit) => matches!(lit.lit, syn::Lit::Bool(_)),
            Expr::Unary(unary) => matches!(unary.op, syn::UnOp::Not(_)),
            Expr::Binary(binary) => matches!(
                binary.op,
                BinOp::Eq(_)
                    | BinOp::Ne(_)
                    | BinOp::Lt(_)
                    | BinOp::Le(_)
                    | BinOp::Gt(_)
                    | BinOp::Ge(_)
                    | BinOp::And(_)
                    | BinOp::Or(_)
            ),
            _ => false,
        };
        let is_number = |expr: &Expr| self.names.is_number(expr);
        match block.stmts.last() {
            Some(Stmt::Expr(Expr::Tuple(tuple), None)) => tuple.elems.iter().any(is_number),
            Some(Stmt::Expr(last, None)) => {
                let inner = || ends(last).is_some_and(|ends| ends.iter().any(|end| self.adapts(end)));
                is_number(last) || is_bool(last) || inner()
            }
            _ => false,
        }
    }

    /// Expands `match` to one whose arms all have one type.
    pub(super) fn match_alike(&mut self, e: &ExprMatch, bodies: &[TokenStream]) -> TokenStream {
        let pats: Vec<TokenStream> = e.arms.iter().map(|arm| self.arm_pattern(arm)).collect();
        let arms = arms_of(e, quote!(#(#pats => { #bodies })*));
        self.matching(e, |value| quote_spanned!(e.match_token.span()=> match #value #arms))
    }

    /// Evaluates what a `match` looks at, and checks that it is known at specialization.
    fn matching(&mut self, e: &ExprMatch, inner: impl FnOnce(&TokenStream) -> TokenStream) -> TokenStream {
        fn is_place(expr: &Expr) -> bool {
            match expr {
                Expr::Path(_) => true,
                Expr::Field(field) => is_place(&field.base),
                _ => false,
            }
        }
        let (value, span) = (self.expr(&e.expr), e.expr.span());
        let lang = lang(span);
        let checked = |value: &TokenStream| {
            let inner = inner(value);
            quote_spanned! {span=> {
                { #[allow(unused_imports)] use #lang::branch::Known as _; #lang::branch::Scrutinee(&#value).check(); }
                #inner
            }}
        };
        if is_place(&e.expr) {
            return checked(&value);
        }
        let name = operand_name("scrutinee", span).to_token_stream();
        let inner = checked(&name);
        quote_spanned!(span=> match #value { #name => #inner })
    }

    /// Expands `match`, given the tuple that each arm yields. One `match` finds the number of the arm, and branches on that number give
    /// the elements of all tuples one type.
    pub(super) fn match_arms(
        &mut self,
        e: &ExprMatch,
        bodies: &[TokenStream],
        names: &[String],
        vars: &[Ident],
    ) -> TokenStream {
        let span = e.match_token.span();
        let chosen = operand_name("chosen", span);
        let guarded: Vec<TokenStream> = e.arms.iter().map(|arm| self.arm_pattern(arm)).collect();
        let numbers = 0..bodies.len();
        let numbered = arms_of(e, quote!(#(#guarded => #numbers,)*));
        self.matching(e, |value| {
            let (mut panicking, mut result) = (Vec::new(), None);
            for (i, (arm, body)) in e.arms.iter().zip(bodies).enumerate().rev() {
                // Of the alternatives of a pattern, the guard chooses; it is evaluated once otherwise.
                let (pat, used) = match &arm.pat {
                    Pat::Guard(guarded) if !has_alternatives(&guarded.pat) => {
                        (guarded.pat.to_token_stream(), variables(&guarded.pat))
                    }
                    _ => (guarded[i].clone(), Vec::new()),
                };
                let outer = outer_names(arm, vars);
                let outer = zip(vars, &outer).filter(|(var, outer)| var != outer);
                let outer = outer.map(|(var, outer)| quote!(let #outer = #var;));
                // Names that only the guard uses are not unused.
                let body = quote_spanned! {arm.body.span()=>
                    #(#outer)*
                    #[allow(unreachable_patterns)]
                    match #value { #pat => { #(let _ = &#used;)* #body } _ => ::core::unreachable!() }
                };
                if panics(&arm_block(arm)) {
                    panicking.push(quote!(#[allow(unreachable_code)] if #chosen == #i { #body; }));
                    continue;
                }
                result = Some(match result {
                    None => body,
                    Some(rest) => call_branch(arm.body.span(), &quote!(#chosen == #i), names, vars, [&body, &rest]),
                });
            }
            let result = result.unwrap_or_else(|| quote!(::core::unreachable!()));
            quote_spanned! {span=>
                #[allow(unused_variables)]
                let #chosen: usize = match #value #numbered;
                #(#panicking)*
                #result
            }
        })
    }
}

/// An `if` with these arms. An arm that panics has no type; its condition must be known at specialization.
fn choose(
    e: &ExprIf,
    condition: &TokenStream,
    names: &[String],
    vars: &[Ident],
    [then, otherwise]: [&TokenStream; 2],
) -> TokenStream {
    let span = e.if_token.span();
    let lang = lang(span);
    if panics(&e.then_branch) {
        return quote_spanned! {span=> {
            #[allow(unreachable_code)]
            if #lang::branch::known(#condition) { #then; }
            #otherwise
        }};
    }
    if e.else_branch.as_ref().is_some_and(|(_, otherwise)| panics(&else_block(otherwise))) {
        return quote_spanned! {span=> {
            #[allow(unreachable_code)]
            if !#lang::branch::known(#condition) { #otherwise; }
            #then
        }};
    }
    call_branch(span, condition, names, vars, [then, otherwise])
}

/// Whether a pattern has several alternatives, which may bind names to different values.
fn has_alternatives(pat: &Pat) -> bool {
    struct Alternatives(bool);
    impl Visit<'_> for Alternatives {
        fn visit_pat_or(&mut self, _: &syn::PatOr) {
            self.0 = true;
        }
    }
    let mut found = Alternatives(false);
    found.visit_pat(pat);
    found.0
}

/// The variables that a pattern binds: a name in capitals may be a constant or a variant.
fn variables(pat: &Pat) -> Vec<Ident> {
    let is_variable = |name: &Ident| !name.to_string().starts_with(char::is_uppercase);
    bound_names(pat).into_iter().filter(is_variable).collect()
}

/// Whether a block ends with a macro that panics.
fn panics(block: &Block) -> bool {
    let is_panic = |mac: &syn::Macro| {
        let names = ["panic", "unreachable", "todo", "unimplemented"];
        mac.path.segments.last().is_some_and(|last| names.iter().any(|name| last.ident == name))
    };
    match block.stmts.last() {
        Some(Stmt::Macro(statement)) => is_panic(&statement.mac),
        Some(Stmt::Expr(Expr::Macro(e), _)) => is_panic(&e.mac),
        Some(Stmt::Expr(Expr::Paren(e), None)) => panics(&else_block(&e.expr)),
        Some(Stmt::Expr(e, None)) => ends(e).is_some_and(|ends| ends.iter().all(panics)),
        _ => false,
    }
}

/// The blocks of an expression, one of which gives its value.
fn ends(expr: &Expr) -> Option<Vec<Block>> {
    match expr {
        Expr::If(e) => Some(vec![e.then_branch.clone(), else_block(&e.else_branch.as_ref()?.1)]),
        Expr::Match(e) => Some(e.arms.iter().map(arm_block).collect()),
        Expr::Block(e) => Some(vec![e.block.clone()]),
        _ => None,
    }
}

fn call_branch(
    span: Span,
    condition: &TokenStream,
    names: &[String],
    vars: &[Ident],
    [then, otherwise]: [&TokenStream; 2],
) -> TokenStream {
    let state = hygienic("state");
    let own = (!vars.is_empty()).then(|| quote!(#[allow(unused_variables)] let (#(mut #vars,)*) = #state;));
    let arms = quote!(&[#(#names),*], || { #own #then }, || { #own #otherwise });
    with_condition(span, condition, |lang, condition| {
        let state = own.as_ref().map(
            |_| quote_spanned!(span=> let #state = #lang::branch::ArmState::arm_state(&#condition, (#(#vars,)*));),
        );
        quote_spanned!(span=> #state #lang::branch::branch(#condition, #arms))
    })
}

/// A call that gets a name for the condition.
fn with_condition(
    span: Span,
    condition: &TokenStream,
    call: impl FnOnce(&TokenStream, &Ident) -> TokenStream,
) -> TokenStream {
    let name = operand_name("condition", span);
    let call = call(&lang(span), &name);
    quote_spanned!(span=> { let #name = #condition; #call })
}

/// Whether the first arm is a number literal, where one of two is.
fn literal_arm(e: &ExprIf) -> Option<bool> {
    let otherwise = else_block(&e.else_branch.as_ref()?.1);
    if panics(&e.then_branch) || panics(&otherwise) {
        return None;
    }
    let first = literal_of(&e.then_branch).is_some();
    (first != literal_of(&otherwise).is_some()).then_some(first)
}

/// The kind of the number literal that a block is.
fn literal_of(block: &Block) -> Option<literal::Kind> {
    match &block.stmts[..] {
        [Stmt::Expr(last, None)] => literal::kind(last),
        _ => None,
    }
}

/// The block after `else`.
pub(super) fn else_block(otherwise: &Expr) -> Block {
    match otherwise {
        Expr::Block(block) => block.block.clone(),
        other => Block { brace_token: Default::default(), stmts: vec![Stmt::Expr(other.clone(), None)] },
    }
}

/// Arms in the braces of the source, into which rustc suggests to write missing ones.
fn arms_of(e: &ExprMatch, arms: TokenStream) -> TokenTree {
    let mut group = Group::new(Delimiter::Brace, arms);
    group.set_span(e.brace_token.span.join());
    group.into()
}

/// The variables, with other names for those that the pattern of the arm binds to something else.
pub(super) fn outer_names(arm: &syn::Arm, vars: &[Ident]) -> Vec<Ident> {
    let bound = bound_names(&arm.pat);
    let name =
        |(i, var): (usize, &Ident)| if bound.contains(var) { hygienic(&format!("outer_arm_{i}")) } else { var.clone() };
    vars.iter().enumerate().map(name).collect()
}

fn empty() -> Block {
    Block { brace_token: Default::default(), stmts: Vec::new() }
}

/// The body of a match arm, as a block.
pub(super) fn arm_block(arm: &syn::Arm) -> Block {
    match &*arm.body {
        Expr::Block(block) if block.label.is_none() => block.block.clone(),
        other => Block { brace_token: Default::default(), stmts: vec![Stmt::Expr(other.clone(), None)] },
    }
}
