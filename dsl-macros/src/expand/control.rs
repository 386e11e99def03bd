//! Expands loops and branches: the variables that they assign become loop-carried values and results.

use super::body::{Body, hygienic, operand_name};
use super::lang;
use crate::parse::assigned::{assigned_in, assigned_in_expr, bound_names, pattern};
use crate::parse::literal;
use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Block, Expr, ExprForLoop, ExprIf, ExprMatch, ExprWhile, Pat, Stmt};

/// What a block yields.
#[derive(Clone, Copy)]
struct Yield<'a> {
    /// The variables that it assigns, which come last.
    vars: &'a [Ident],
    /// Whether the value of its last expression comes first.
    value: bool,
}

/// Maximum number of carried variables: larger tuples have no impl.
const MAX_CARRIED: usize = 19;

impl Body {
    /// Expands a control expression as statements: the assigned variables are redeclared with their new values, and so
    /// is `value`, if one is wanted.
    pub fn control(&mut self, expr: &Expr, value: Option<&Ident>) -> TokenStream {
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
        let result = Yield { vars: &vars, value: value.is_some() };
        let bind = value.map(|v| quote!(#v,));
        match expr {
            Expr::If(e) => {
                let call = self.branch(e, result);
                redeclare(&bind, &vars, &call)
            }
            Expr::Block(e) => {
                if let Some(label) = &e.label {
                    return self.reject(label.span(), "labels cannot be translated: kernels have no `break`");
                }
                let inner = self.yielding(&e.block, result);
                redeclare(&bind, &vars, &quote!({ #inner }))
            }
            Expr::Match(e) => {
                let inner = self.match_arms(e, result);
                redeclare(&bind, &vars, &inner)
            }
            Expr::ForLoop(e) => self.for_loop(e),
            Expr::While(e) => self.while_loop(e),
            other => self.expr(other),
        }
    }

    /// Expands a control expression inside another expression.
    pub fn nested_control(&mut self, expr: &Expr) -> TokenStream {
        if let Some(name) = assigned_in_expr(expr).first() {
            return self.reject(
                name.span(),
                format!("`{name}` is assigned inside an expression: bind the `if` with `let` first, and use that"),
            );
        }
        match expr {
            Expr::If(e) => self.branch_value(e),
            Expr::Match(e) => {
                let scrutinee = self.expr(&e.expr);
                let gives_type = |arm: &syn::Arm| {
                    let block = arm_block(arm);
                    literal_of(&block).is_none()
                        && !matches!(block.stmts.last(), Some(Stmt::Macro(_) | Stmt::Expr(Expr::Macro(_), _)))
                };
                let has_type = e.arms.iter().any(gives_type);
                let mut arms = Vec::new();
                for arm in &e.arms {
                    let (pat, block) = (self.arm_pattern(arm), arm_block(arm));
                    let mut body = self.value_of(&block);
                    if has_type && literal_of(&block).is_some() {
                        let (span, lang) = (arm.body.span(), lang(arm.body.span()));
                        body = quote_spanned!(span=> #lang::operand::literal_arm(#body));
                    }
                    arms.push(quote!(#pat => { #body }));
                }
                quote!(match #scrutinee { #(#arms)* })
            }
            Expr::Block(e) => {
                let inner = self.value_of(&e.block);
                quote!({ #inner })
            }
            other => self.expr(other),
        }
    }

    /// Expands a block that assigns no outer variable: its statements and last expression.
    fn value_of(&mut self, block: &Block) -> TokenStream {
        match block.stmts.split_last() {
            Some((Stmt::Expr(last, None), before)) => {
                let before = self.statements(before);
                let last = self.operand(last);
                quote!(#before #last)
            }
            _ => self.statements(&block.stmts),
        }
    }

    /// Expands a block so that it ends with the tuple of yielded values. Assigned variables are copied first, so that
    /// branches do not see each other's assignments.
    fn yielding(&mut self, block: &Block, result: Yield) -> TokenStream {
        let copies = copies(result.vars);
        let inner = self.yielding_own(block, result);
        quote!(#copies #inner)
    }

    /// As `yielding`, for a block that has variables of its own for those that it assigns.
    fn yielding_own(&mut self, block: &Block, result: Yield) -> TokenStream {
        let vars = result.vars;
        if !result.value {
            let (inner, ends) = self.unit_statements(&block.stmts, vars);
            return quote!(#inner (#(#ends,)*));
        }
        let value = hygienic("inner");
        match block.stmts.split_last() {
            Some((Stmt::Expr(last, None), before)) => {
                let (before, ends) = self.unit_statements(before, vars);
                let bind = self.bind(quote!(#value), None, last, super::body::Literals::Adapt);
                quote!(#before #bind (#value, #(#ends,)*))
            }
            _ => {
                let (inner, ends) = self.unit_statements(&block.stmts, vars);
                quote!(#inner ((), #(#ends,)*))
            }
        }
    }

    /// Expands the statements of a block whose last expression has no value, or an unused one, and gives what holds the outer
    /// variables `vars` at its end: a `let` may give one of their names to another variable.
    fn unit_statements(&mut self, stmts: &[Stmt], vars: &[Ident]) -> (TokenStream, Vec<Ident>) {
        let mut ends = vars.to_vec();
        let mut tokens = TokenStream::new();
        for stmt in stmts {
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

    /// Expands `if` to a call that returns the tuple of yielded values.
    fn branch(&mut self, e: &ExprIf, result: Yield) -> TokenStream {
        let condition = self.condition(&e.cond);
        let then = self.yielding_own(&e.then_branch, result);
        let otherwise = match &e.else_branch {
            Some((_, otherwise)) => self.yielding_own(&else_block(otherwise), result),
            None => {
                let vars = result.vars;
                let unit = result.value.then(|| quote!((),));
                quote!((#unit #(#vars,)*))
            }
        };
        let mut names: Vec<String> = result.vars.iter().map(Ident::to_string).collect();
        if result.value {
            names.insert(0, String::new());
        }
        call_branch(e.if_token.span(), &condition, &names, result.vars, [&then, &otherwise])
    }

    /// Expands `if` to a call that returns the value of its branches, which assign nothing.
    fn branch_value(&mut self, e: &ExprIf) -> TokenStream {
        let condition = self.condition(&e.cond);
        let then = self.value_of(&e.then_branch);
        let otherwise = match &e.else_branch {
            Some((_, otherwise)) => self.value_of(&else_block(otherwise)),
            None => quote!(),
        };
        if let Some(first) = literal_arm(e) {
            let (arm, number) = if first { (&otherwise, &then) } else { (&then, &otherwise) };
            let span = e.if_token.span();
            let arms = quote!(#first, || { #arm }, #number);
            return with_condition(
                span,
                &condition,
                |lang, condition| quote_spanned!(span=> #lang::control::branch_literal(#condition, #arms)),
            );
        }
        call_branch(e.if_token.span(), &condition, &[String::new()], &[], [&then, &otherwise])
    }

    /// Expands `if` at the end of a function: its branches may assign, but the values are unused.
    pub fn tail_if(&mut self, e: &ExprIf) -> TokenStream {
        let condition = self.condition(&e.cond);
        let vars = assigned_in_expr(&Expr::If(e.clone()));
        // With a scalar as the function's result, `tail` gives literals its type.
        if vars.is_empty() && self.scalar_result.is_none() && literal_arm(e).is_some() {
            return self.branch_value(e);
        }
        let then = self.tail(&e.then_branch.stmts);
        let otherwise = match &e.else_branch {
            Some((_, otherwise)) => self.tail(&else_block(otherwise).stmts),
            None => quote!(),
        };
        let names = [String::new()];
        call_branch(e.if_token.span(), &condition, &names, &vars, [&then, &otherwise])
    }

    fn condition(&mut self, cond: &Expr) -> TokenStream {
        if let Some(name) = assigned_in_expr(cond).first() {
            return self.reject(name.span(), "a condition cannot assign a variable: assign it in a statement before");
        }
        self.expr(cond)
    }

    /// The pattern of an arm, with its guard.
    fn arm_pattern(&mut self, arm: &syn::Arm) -> TokenStream {
        match &arm.pat {
            Pat::Guard(guarded) => {
                let (pat, token) = (&guarded.pat, &guarded.if_token);
                let guard = self.expr(&guarded.guard);
                quote!(#pat #token #guard)
            }
            other => other.to_token_stream(),
        }
    }

    fn match_arms(&mut self, e: &ExprMatch, result: Yield) -> TokenStream {
        let scrutinee = self.expr(&e.expr);
        let arms: Vec<TokenStream> = e
            .arms
            .iter()
            .map(|arm| {
                let pat = self.arm_pattern(arm);
                let body = self.yielding(&arm_block(arm), result);
                quote!(#pat => { #body })
            })
            .collect();
        quote!(match #scrutinee { #(#arms)* })
    }

    fn for_loop(&mut self, e: &ExprForLoop) -> TokenStream {
        if let Some(label) = &e.label {
            return self.reject(label.span(), "labels cannot be translated: kernels have no `break`");
        }
        let pat = match &*e.pat {
            Pat::Ident(p) if p.by_ref.is_none() && p.subpat.is_none() => p.to_token_stream(),
            Pat::Wild(w) => w.to_token_stream(),
            other => return self.reject(other.span(), "a loop index must be a single name, or `_`"),
        };
        let kind = match &*e.expr {
            Expr::Call(call) => match &*call.func {
                Expr::Path(p) => p.path.segments.last().map(|s| s.ident.to_string()),
                _ => None,
            },
            _ => None,
        };
        let mut vars = assigned_in([&e.body]);
        let own = bound_names(&e.pat);
        vars.retain(|v| !own.contains(v));
        if vars.len() > MAX_CARRIED {
            let message = format!(
                "{} variables are assigned here, the maximum is {MAX_CARRIED}: group some into tuples",
                vars.len()
            );
            return self.reject(e.for_token.span(), message);
        }
        match kind.as_deref() {
            Some("range") => {
                let range = self.expr(&e.expr);
                let (inner, ends) = self.unit_statements(&e.body.stmts, &vars);
                let names = vars.iter().map(Ident::to_string);
                let span = e.for_token.span();
                let lang = lang(span);
                let call = quote_spanned! {span=>
                    #lang::control::for_range(
                        #range, (#(#vars,)*), &[#(#names),*],
                        |#pat, (#(mut #vars,)*)| { #inner (#(#ends,)*) },
                    )
                };
                redeclare(&None, &vars, &call)
            }
            Some("static_range") => {
                let range = self.expr(&e.expr);
                let (inner, ends) = self.unit_statements(&e.body.stmts, &vars);
                if vars.is_empty() {
                    return quote!(for #pat in #range { #inner });
                }
                quote! {
                    for #pat in #range {
                        (#(#vars,)*) = {
                            let (#(mut #vars,)*) = (#(#vars,)*);
                            #inner
                            (#(#ends,)*)
                        };
                    }
                }
            }
            _ => self.reject(
                e.expr.span(),
                "expected `range(start, end)`, or `static_range(start, end)` for an unrolled loop",
            ),
        }
    }

    fn while_loop(&mut self, e: &ExprWhile) -> TokenStream {
        if let Some(label) = &e.label {
            return self.reject(label.span(), "labels cannot be translated: kernels have no `break`");
        }
        let vars = assigned_in([&e.body]);
        if vars.len() > MAX_CARRIED {
            let message = format!(
                "{} variables are assigned here, the maximum is {MAX_CARRIED}: group some into tuples",
                vars.len()
            );
            return self.reject(e.while_token.span(), message);
        }
        let condition = self.condition(&e.cond);
        let (inner, ends) = self.unit_statements(&e.body.stmts, &vars);
        let names = vars.iter().map(Ident::to_string);
        let span = e.while_token.span();
        let lang = lang(span);
        let call = quote_spanned! {span=>
            #lang::control::while_loop(
                (#(#vars,)*), &[#(#names),*],
                |#[allow(unused_variables)] (#(#vars,)*)| #condition,
                |(#(mut #vars,)*)| { #inner (#(#ends,)*) },
            )
        };
        redeclare(&None, &vars, &call)
    }
}

/// Copies of variables, which a branch may assign.
fn copies(vars: &[Ident]) -> TokenStream {
    match vars {
        [] => quote!(),
        _ => quote!(#[allow(unused_variables)] let (#(mut #vars,)*) = (#(#vars,)*);),
    }
}

/// Declares the assigned variables again, with their new values, after the value that `bind` names. They may not be used again,
/// which is no reason for a warning.
fn redeclare(bind: &Option<TokenStream>, vars: &[Ident], values: &TokenStream) -> TokenStream {
    let results = hygienic("results");
    quote! {
        let #results = #values;
        #[allow(unused_variables)]
        let (#bind #(mut #vars,)*) = #results;
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
            |_| quote_spanned!(span=> let #state = #lang::control::ArmState::arm_state(&#condition, (#(#vars,)*));),
        );
        quote_spanned!(span=> #state #lang::control::branch(#condition, #arms))
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
    let first = literal_of(&e.then_branch).is_some();
    (first != literal_of(&else_block(&e.else_branch.as_ref()?.1)).is_some()).then_some(first)
}

/// The kind of the number literal that a block is.
fn literal_of(block: &Block) -> Option<literal::Kind> {
    match &block.stmts[..] {
        [Stmt::Expr(last, None)] => literal::kind(last),
        _ => None,
    }
}

/// The block after `else`.
fn else_block(otherwise: &Expr) -> Block {
    match otherwise {
        Expr::Block(block) => block.block.clone(),
        other => Block { brace_token: Default::default(), stmts: vec![Stmt::Expr(other.clone(), None)] },
    }
}

/// The body of a match arm, as a block.
fn arm_block(arm: &syn::Arm) -> Block {
    match &*arm.body {
        Expr::Block(block) if block.label.is_none() => block.block.clone(),
        other => Block { brace_token: Default::default(), stmts: vec![Stmt::Expr(other.clone(), None)] },
    }
}
