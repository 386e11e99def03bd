//! Expands statements and expressions of kernels and device functions.

use super::names::Names;
use super::{lang, options, returns};
use crate::parse::assigned::{
    Place, all_places, assigned_in_expr, assigned_without_mut, bound_names, is_compound, pattern,
};
use crate::parse::literal::{self, Kind as LiteralKind};
use crate::parse::triton;
use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use std::collections::HashSet;
use syn::spanned::Spanned;
use syn::{
    BinOp, Error, Expr, ExprArray, ExprBinary, ExprCast, ExprClosure, ExprField, FnArg, ItemFn, Local, Macro, Member,
    Pat, Stmt, Type, UnOp,
};

/// Rewrites one body; collects errors for code that cannot be translated.
#[derive(Default)]
pub struct Body {
    pub errors: Vec<Error>,
    /// The result type of a device function, where it has numbers.
    pub result: Option<Type>,
    /// Names bound by the function's patterns: a local variable `tl` is not Triton's module.
    bound: HashSet<String>,
    /// The places that the function assigns.
    pub places: Vec<Place>,
    pub names: Names,
}

/// An identifier with mixed-site hygiene, which the user's code cannot see.
pub fn hygienic(name: &str) -> Ident {
    Ident::new(name, Span::mixed_site())
}

/// A name for an operand of a call, all of which is at `span`: rustc then reports a type error once, there. With mixed-site
/// hygiene, it would report it at the attribute too.
pub fn operand_name(name: &str, span: Span) -> Ident {
    format_ident!("__tilewright_{name}", span = span)
}

impl Body {
    /// A rewriter for the body of this function.
    pub fn of(f: &ItemFn) -> Body {
        let bound = triton::bound(&f.block, f.sig.inputs.iter().cloned());
        let mut names = Names::default();
        names.references.insert(Ident::new("self", Span::call_site()));
        for input in &f.sig.inputs {
            let FnArg::Typed(typed) = input else { continue };
            match &*typed.ty {
                Type::Reference(_) => names.references.extend(bound_names(&typed.pat)),
                Type::FnPtr(_) | Type::ImplTrait(_) => names.functions.extend(bound_names(&typed.pat)),
                _ => {}
            }
        }
        Body { bound, places: all_places(&f.block), names, ..Body::default() }
    }

    /// Whether a pattern of the function binds a name.
    pub fn is_bound(&self, name: &str) -> bool {
        self.bound.contains(name)
    }

    /// The module name, such as `tl`, that an expression starts with.
    pub fn triton_module<'a>(&self, expr: &'a Expr) -> Option<&'a Ident> {
        triton::module(expr).filter(|name| !self.is_bound(&name.to_string()))
    }

    pub fn reject(&mut self, span: Span, message: impl std::fmt::Display) -> TokenStream {
        self.errors.push(Error::new(span, message));
        // `unreachable!()` has any type, so that rustc reports no further error.
        quote_spanned!(span=> ::core::unreachable!())
    }

    /// Rewrites the whole body of a function, with early returns resolved.
    pub fn function(&mut self, f: &ItemFn) -> TokenStream {
        let mut block = (*f.block).clone();
        options::lower(&mut block);
        self.errors.extend(assigned_without_mut(&f.sig, &block));
        let stmts = returns::lower(block.stmts, &mut self.errors);
        self.tail(&stmts)
    }

    /// Rewrites statements at the end of a function: nothing that they assign is used afterwards.
    pub fn tail(&mut self, stmts: &[Stmt]) -> TokenStream {
        self.scoped(|this| this.tail_statements(stmts))
    }

    fn tail_statements(&mut self, stmts: &[Stmt]) -> TokenStream {
        match stmts.split_last() {
            Some((Stmt::Expr(Expr::If(branch), None), before)) => {
                let before = self.statements(before);
                let last = self.tail_if(branch);
                quote!(#before #last)
            }
            Some((Stmt::Expr(last, None), before))
                if self.result.is_some()
                    && !matches!(last, Expr::ForLoop(_) | Expr::While(_))
                    && assigned_in_expr(last).is_empty() =>
            {
                let (before, ty) = (self.statements(before), self.result.clone());
                let last = ty.map(|ty| self.typed(last, &ty));
                quote!(#before #last)
            }
            Some((Stmt::Expr(last, None), before)) if !matches!(last, Expr::ForLoop(_) | Expr::While(_)) => {
                let before = self.statements(before);
                if assigned_in_expr(last).is_empty() {
                    let last = self.expr(last);
                    return quote!(#before #last);
                }
                let value = hygienic("value");
                let bind = self.bind(quote!(#value), None, last, Literals::Keep);
                quote!(#before #bind #value)
            }
            _ => self.statements(stmts),
        }
    }

    /// Expands a block: variables that it declares are not in scope after it.
    pub fn scoped<T>(&mut self, expand: impl FnOnce(&mut Self) -> T) -> T {
        let names = self.names.clone();
        let expanded = expand(self);
        self.names = names;
        expanded
    }

    pub fn statements(&mut self, stmts: &[Stmt]) -> TokenStream {
        stmts.iter().map(|stmt| self.statement(stmt)).collect()
    }

    fn statement(&mut self, stmt: &Stmt) -> TokenStream {
        match stmt {
            Stmt::Local(local) => {
                let tokens = self.local(local, &pattern(local).to_token_stream());
                self.names.declare(local);
                tokens
            }
            Stmt::Item(item) => item.to_token_stream(),
            Stmt::Macro(m) => {
                let tokens = self.macro_call(&m.mac);
                quote!(#tokens;)
            }
            Stmt::Expr(expr, _) => self.expression_statement(expr),
        }
    }

    /// Expands a `let` that binds `pat`, which need not be its own pattern.
    pub fn local(&mut self, local: &Local, pat: &TokenStream) -> TokenStream {
        let ty = match &local.pat {
            Pat::Type(typed) => Some(&*typed.ty),
            _ => None,
        };
        let Some(init) = &local.init else {
            let names: Vec<String> = bound_names(&local.pat).iter().map(Ident::to_string).collect();
            let name = names.first().map_or("it", String::as_str);
            return self.reject(
                local.span(),
                format!(
                    "`{name}` has no value: initialize it here, for example `let {name} = if … {{ … }} else {{ … }};`"
                ),
            );
        };
        if let Some((token, _)) = &init.diverge {
            return self.reject(token.span(), "`let … else` cannot be translated: kernels have no refutable patterns");
        }
        if matches!(pattern(local), Pat::Ident(_)) {
            self.check_else(&init.expr);
        }
        if let (pattern @ (Pat::Tuple(_) | Pat::Ident(_)), value @ Expr::Tuple(_)) = (&local.pat, &*init.expr) {
            let value = self.bound_value(pattern, value);
            return quote_spanned!(init.expr.span()=> let #pat = #value;);
        }
        let literals = if ty.is_some() { Literals::Keep } else { Literals::Adapt };
        self.bind(pat.clone(), ty, &init.expr, literals)
    }

    /// Rejects an `if` without `else` as a value.
    fn check_else(&mut self, mut value: &Expr) {
        while let Expr::If(branch) = value {
            match &branch.else_branch {
                Some((_, otherwise)) => value = otherwise,
                None => {
                    self.reject(branch.if_token.span(), "an `if` that gives a value needs an `else`");
                    return;
                }
            }
        }
    }

    /// Expands `let pat: ty = expr;`, where the expression may assign outer variables.
    pub fn bind(&mut self, pat: TokenStream, annotated: Option<&Type>, expr: &Expr, literals: Literals) -> TokenStream {
        let ty = annotated.map(|ty| quote!(: #ty));
        if is_control(expr) && !assigned_in_expr(expr).is_empty() {
            let value = hygienic("value");
            let statements = self.control(expr, Some(&value), annotated);
            return quote!(#statements let #pat #ty = #value;);
        }
        let value = match (literals, annotated) {
            (_, Some(ty)) => self.typed(expr, ty),
            (Literals::Adapt, None) => self.operand(expr),
            (Literals::Keep, None) => self.expr(expr),
        };
        quote_spanned!(expr.span()=> let #pat #ty = #value;)
    }

    /// Rewrites the value of a `let` with this pattern. A literal that a name in a tuple is bound to adapts as that of a `let` of
    /// its own.
    fn bound_value(&mut self, pat: &Pat, expr: &Expr) -> TokenStream {
        match (pat, expr) {
            (Pat::Tuple(pats), Expr::Tuple(tuple)) if pats.elems.len() == tuple.elems.len() => {
                let pairs = pats.elems.iter().zip(&tuple.elems);
                let elems: Vec<TokenStream> = pairs.map(|(pat, expr)| self.bound_value(pat, expr)).collect();
                quote!((#(#elems,)*))
            }
            (Pat::Ident(_), _) => self.adapting(expr, None),
            _ => self.expr(expr),
        }
    }

    /// Rewrites the right side of an assignment to a tuple of variables, whose types literals take.
    fn assigned_value(&mut self, place: &Expr, value: &Expr) -> TokenStream {
        match (place, value) {
            (Expr::Tuple(places), Expr::Tuple(values)) if places.elems.len() == values.elems.len() => {
                let pairs = places.elems.iter().zip(&values.elems);
                let elems: Vec<TokenStream> = pairs.map(|(place, value)| self.assigned_value(place, value)).collect();
                quote_spanned!(values.span()=> (#(#elems,)*))
            }
            (Expr::Path(_) | Expr::Field(_), Expr::Tuple(values)) => {
                let members = (0..values.elems.len()).map(|i| -> Expr {
                    let member = Member::from(i);
                    syn::parse_quote!(#place.#member)
                });
                let pairs = members.zip(&values.elems);
                let elems: Vec<TokenStream> = pairs.map(|(place, value)| self.assigned_value(&place, value)).collect();
                quote_spanned!(values.span()=> (#(#elems,)*))
            }
            (Expr::Path(_) | Expr::Field(_), _) if literal::kind(value).is_some() => {
                let (left, right) = (self.place(place), self.operand(value));
                let (span, lang) = (value.span(), lang(value.span()));
                quote_spanned!(span=> #lang::operand::literal_for(&#left, #right))
            }
            _ => self.expr(value),
        }
    }

    fn expression_statement(&mut self, expr: &Expr) -> TokenStream {
        match expr {
            e if is_statement_like(e) => self.control(e, None, None),
            Expr::Assign(assign) => {
                self.check_else(&assign.right);
                if is_control(&assign.right) && !assigned_in_expr(&assign.right).is_empty() {
                    let value = hygienic("value");
                    let statements = self.control(&assign.right, Some(&value), None);
                    let left = self.place(&assign.left);
                    return quote!(#statements #left = #value;);
                }
                let left = self.place(&assign.left);
                if literal::kind(&assign.right).is_some() && !matches!(&*assign.left, Expr::Tuple(_)) {
                    let lang = lang(assign.eq_token.span());
                    let right = self.operand(&assign.right);
                    let span = assign.eq_token.span();
                    return quote_spanned!(span=> #left = #lang::operand::literal_for(&#left, #right););
                }
                let right = self.assigned_value(&assign.left, &assign.right);
                assignment(&assign.left, &left, &right, assign.eq_token.span())
            }
            Expr::Binary(binary) if is_compound(&binary.op) => {
                let left = self.place(&binary.left);
                let value = self.binary(binary);
                assignment(&binary.left, &left, &value, binary.op.span())
            }
            Expr::Return(ret) => self.reject(
                ret.span(),
                "`return` can be used at the end of a function and of the branches of an `if` outside loops: move what \
                 follows into an `if`",
            ),
            other => {
                let tokens = self.expr(other);
                quote!(#tokens;)
            }
        }
    }

    /// Rewrites the left side of an assignment.
    fn place(&mut self, expr: &Expr) -> TokenStream {
        match expr {
            Expr::Path(path) if path.path.is_ident("self") => {
                self.reject(path.span(), "a method cannot change `self`: return a new value")
            }
            Expr::Path(path) if path.path.get_ident().is_some_and(|name| !self.is_bound(&name.to_string())) => {
                let name = path.to_token_stream();
                let message = format!(
                    "`{name}` is not declared: write `let {name} = …`, or `let mut {name} = …` if it changes later"
                );
                self.reject(path.span(), message)
            }
            Expr::Path(_) | Expr::Infer(_) => expr.to_token_stream(),
            Expr::Paren(p) => self.place(&p.expr),
            Expr::Group(g) => self.place(&g.expr),
            Expr::Field(f) => {
                let base = self.place(&f.base);
                let member = &f.member;
                quote!(#base.#member)
            }
            Expr::Index(i) => {
                let (base, index) = (self.place(&i.expr), self.expr(&i.index));
                let list = i.bracket_token.span.join();
                quote_spanned!(list=> #base[#index])
            }
            Expr::Tuple(t) => {
                let elems: Vec<TokenStream> = t.elems.iter().map(|e| self.place(e)).collect();
                quote!((#(#elems,)*))
            }
            Expr::Unary(unary) if matches!(unary.op, UnOp::Deref(_)) => {
                self.reject(unary.op.span(), "write memory with `store(pointer, value)`")
            }
            other => self.reject(other.span(), "cannot assign to this: expected a variable, or a tuple of variables"),
        }
    }

    /// Rewrites an expression; literals take the type of the other operand.
    pub fn operand(&mut self, expr: &Expr) -> TokenStream {
        let span = expr.span();
        let lang = lang(span);
        match literal::kind(expr) {
            Some(LiteralKind::Int) => quote_spanned!(span=> #lang::IntegerLiteral(#expr)),
            Some(LiteralKind::Float) => quote_spanned!(span=> #lang::FloatLiteral(#expr)),
            None => self.expr(expr),
        }
    }

    /// As [`Body::operand`], also for the literals of a tuple; with a type as [`Body::typed`].
    pub fn adapting(&mut self, expr: &Expr, ty: Option<&Type>) -> TokenStream {
        match (expr, ty) {
            (_, Some(ty)) => self.typed(expr, ty),
            (Expr::Tuple(tuple), None) => {
                let elems: Vec<TokenStream> = tuple.elems.iter().map(|elem| self.adapting(elem, None)).collect();
                quote_spanned!(expr.span()=> (#(#elems,)*))
            }
            _ => self.operand(expr),
        }
    }

    /// Rewrites an expression whose type is written: literals that are its value, or elements of it, get that type.
    pub fn typed(&mut self, expr: &Expr, ty: &Type) -> TokenStream {
        let (span, lang) = (expr.span(), lang(expr.span()));
        match (expr, ty) {
            (Expr::Tuple(tuple), Type::Tuple(types)) if tuple.elems.len() == types.elems.len() => {
                let pairs = tuple.elems.iter().zip(&types.elems);
                let elems: Vec<TokenStream> = pairs.map(|(elem, ty)| self.typed(elem, ty)).collect();
                quote_spanned!(span=> (#(#elems,)*))
            }
            (Expr::If(_) | Expr::Match(_) | Expr::Block(_), ty) if has_numbers(ty) => {
                self.nested_control(expr, Some(ty))
            }
            (Expr::Lit(_) | Expr::Unary(_) | Expr::Paren(_) | Expr::Binary(_) | Expr::Path(_), ty)
                if has_numbers(ty) && self.names.is_number(expr) =>
            {
                let literal = self.operand(expr);
                quote_spanned!(span=> #lang::operand::literal_of::<#ty, _>(#literal))
            }
            _ => self.expr(expr),
        }
    }

    pub fn expr(&mut self, expr: &Expr) -> TokenStream {
        match expr {
            Expr::Path(path) => {
                let name = path.path.get_ident().filter(|name| !self.is_bound(&name.to_string()));
                if let Some(name @ ("True" | "False")) = name.map(Ident::to_string).as_deref() {
                    return self.reject(path.span(), format!("in Rust, write `{}`", name.to_lowercase()));
                }
                expr.to_token_stream()
            }
            Expr::Lit(_) | Expr::Infer(_) => expr.to_token_stream(),
            Expr::Paren(p) => {
                let inner = self.expr(&p.expr);
                let span = p.paren_token.span.join();
                quote_spanned!(span=> (#inner))
            }
            Expr::Group(g) => self.expr(&g.expr),
            Expr::Binary(binary) if is_compound(&binary.op) => self.reject(
                binary.op.span(),
                "an assignment is a statement: it cannot be used as part of another expression",
            ),
            Expr::Binary(binary) => {
                if literal::kind(expr).is_some() {
                    expr.to_token_stream()
                } else {
                    self.binary(binary)
                }
            }
            Expr::Unary(unary) => {
                if literal::kind(expr).is_some() {
                    return expr.to_token_stream();
                }
                if let UnOp::Deref(star) = &unary.op {
                    return self.reject(
                        star.span(),
                        "pointers cannot be dereferenced: use `load(pointer)` and `store(pointer, value)`",
                    );
                }
                let op = &unary.op;
                let inner = self.expr(&unary.expr);
                quote!(#op #inner)
            }
            Expr::Call(call) => self.call(call),
            Expr::MethodCall(call) => self.method_call(call),
            Expr::Tuple(t) => {
                let elems: Vec<TokenStream> = t.elems.iter().map(|e| self.expr(e)).collect();
                quote!((#(#elems,)*))
            }
            Expr::Array(a) => self.array(a),
            Expr::Repeat(r) => {
                let (value, len) = (self.expr(&r.expr), &r.len);
                quote!([#value; #len])
            }
            Expr::Field(field) => self.field(field),
            Expr::Index(i) => {
                let (base, index) = (self.expr(&i.expr), self.expr(&i.index));
                let list = i.bracket_token.span.join();
                quote_spanned!(list=> #base[#index])
            }
            Expr::Cast(cast) => self.cast(cast),
            Expr::Struct(s) => {
                if let Some(rest) = &s.rest {
                    return self.reject(rest.span(), "name every field: `..` cannot be translated");
                }
                let path = &s.path;
                let fields: Vec<TokenStream> = s
                    .fields
                    .iter()
                    .map(|f| {
                        let (member, value) = (&f.member, self.expr(&f.expr));
                        quote!(#member: #value)
                    })
                    .collect();
                quote!(#path { #(#fields),* })
            }
            Expr::Closure(closure) => self.closure(closure),
            Expr::If(_) | Expr::Match(_) | Expr::Block(_) => self.nested_control(expr, None),
            Expr::Macro(m) => self.macro_call(&m.mac),
            other => self.untranslatable(other),
        }
    }

    fn field(&mut self, field: &ExprField) -> TokenStream {
        if let Some(module) = self.triton_module(&field.base) {
            return self.reject(module.span(), triton::name(&field.member));
        }
        let (base, member) = (self.expr(&field.base), &field.member);
        if matches!(member, Member::Named(name) if name == "T") {
            return self.reject(member.span(), "write `.t()`, or `trans(x)`");
        }
        quote!(#base.#member)
    }

    /// Rewrites `as`, which only applies to Rust's own number types.
    fn cast(&mut self, cast: &ExprCast) -> TokenStream {
        let (value, ty, token) = (self.expr(&cast.expr), &cast.ty, &cast.as_token);
        if literal::kind(&cast.expr).is_some() {
            return quote!((#value #token #ty));
        }
        let to = match &**ty {
            Type::Infer(_) => quote!(()),
            ty => ty.to_token_stream(),
        };
        let span = token.span;
        let lang = lang(span);
        let name = operand_name("value", span);
        quote_spanned!(span=> ({ let #name = #value; #lang::operand::rust_number::<#to, _>(#name) } #token #ty))
    }

    /// Rewrites an array. Literals take the type of the elements that are not literals.
    fn array(&mut self, array: &ExprArray) -> TokenStream {
        let is_literal = |e: &Expr| literal::kind(e).is_some();
        let Some(first) = array.elems.iter().position(|e| !is_literal(e)) else {
            return array.to_token_stream();
        };
        if !array.elems.iter().any(is_literal) {
            let elems: Vec<TokenStream> = array.elems.iter().map(|e| self.expr(e)).collect();
            return quote!([#(#elems),*]);
        }
        let name = |i: usize| hygienic(&format!("element{i}"));
        let (mut names, mut values, mut list) = (Vec::new(), Vec::new(), Vec::new());
        let neighbor = name(first);
        for (i, e) in array.elems.iter().enumerate() {
            let name = name(i);
            if is_literal(e) {
                let (span, value) = (e.span(), self.operand(e));
                let lang = lang(span);
                list.push(quote_spanned!(span=> #lang::operand::literal_for(&#neighbor, #value)));
            } else {
                values.push(self.expr(e));
                list.push(name.to_token_stream());
                names.push(name);
            }
        }
        quote!({ let (#(#names,)*) = (#(#values,)*); [#(#list),*] })
    }

    /// Rejects an expression that kernels cannot contain; the message says what to write instead.
    fn untranslatable(&mut self, expr: &Expr) -> TokenStream {
        let (span, message) = match expr {
            Expr::Assign(a) => (
                a.eq_token.span(),
                "an assignment is a statement; a named argument `name = value` must be an argument of a function of the \
                 language",
            ),
            Expr::Reference(r) => (
                r.and_token.span(),
                "kernels have no references: tiles, scalars and pointers are `Copy`, so write the value itself",
            ),
            Expr::Return(r) => (
                r.return_token.span(),
                "`return` can be used at the end of a function and of the branches of an `if` outside loops",
            ),
            Expr::Break(b) => (
                b.break_token.span(),
                "`break` cannot be translated: put the exit condition into the head of a `while` loop",
            ),
            Expr::Continue(c) => (
                c.continue_token.span(),
                "`continue` cannot be translated: put the rest of the loop's body into an `if`",
            ),
            Expr::Loop(l) => {
                (l.loop_token.span(), "`loop` has no exit condition to translate: use `while condition { … }`")
            }
            Expr::ForLoop(f) => (f.for_token.span(), "a loop has no value: write it as a statement"),
            Expr::While(w) => (w.while_token.span(), "a loop has no value: write it as a statement"),
            Expr::Try(t) => (t.question_token.span(), "`?` cannot be translated: kernels have no errors to propagate"),
            Expr::Await(a) => {
                (a.await_token.span(), "`await` cannot be translated: a kernel does not wait for futures")
            }
            Expr::Async(a) => (a.async_token.span(), "`async` cannot be translated: a kernel has no futures"),
            Expr::Unsafe(u) => (u.unsafe_token.span(), "nothing in a kernel needs `unsafe`: remove the block"),
            Expr::Let(l) => (
                l.let_token.span(),
                "`if let` can be translated only for an argument that may be left out: `if let Some(x) = x { … }`",
            ),
            Expr::Range(r) => (
                r.limits.span(),
                "`a..b` is not an iterator here: write `range(a, b)`, or `static_range(a, b)` to unroll",
            ),
            other => (other.span(), "this expression cannot be translated into a kernel"),
        };
        self.reject(span, message)
    }

    /// Rewrites an operator, plain or compound, to a call with the operator's span.
    fn binary(&mut self, binary: &ExprBinary) -> TokenStream {
        let span = binary.op.span();
        let lang = lang(span);
        if let (BinOp::Mul(_), Expr::Unary(syn::ExprUnary { op: UnOp::Deref(_), .. })) = (&binary.op, &*binary.right) {
            return self.reject(span, "there is no `**`: write `x * x`, or `exp2(log2(x) * y)` where `x` is positive");
        }
        let left = self.operand(&binary.left);
        let right = self.operand(&binary.right);
        let name = match &binary.op {
            BinOp::Add(_) | BinOp::AddAssign(_) => "Add",
            BinOp::Sub(_) | BinOp::SubAssign(_) => "Sub",
            BinOp::Mul(_) | BinOp::MulAssign(_) => "Mul",
            BinOp::Div(_) | BinOp::DivAssign(_) => "Div",
            BinOp::Rem(_) | BinOp::RemAssign(_) => "Rem",
            BinOp::BitAnd(_) | BinOp::BitAndAssign(_) => "And",
            BinOp::BitOr(_) | BinOp::BitOrAssign(_) => "Or",
            BinOp::BitXor(_) | BinOp::BitXorAssign(_) => "Xor",
            BinOp::Shl(_) | BinOp::ShlAssign(_) => "Shl",
            BinOp::Shr(_) | BinOp::ShrAssign(_) => "Shr",
            BinOp::Eq(_) => return self.comparison("eq", span, left, right),
            BinOp::Ne(_) => return self.comparison("ne", span, left, right),
            BinOp::Lt(_) => return self.comparison("lt", span, left, right),
            BinOp::Le(_) => return self.comparison("le", span, left, right),
            BinOp::Gt(_) => return self.comparison("gt", span, left, right),
            BinOp::Ge(_) => return self.comparison("ge", span, left, right),
            BinOp::And(_) => return quote_spanned!(span=> #lang::compare::and(#left, || #right)),
            BinOp::Or(_) => return quote_spanned!(span=> #lang::compare::or(#left, || #right)),
            _ => return self.reject(span, "this operator cannot be translated"),
        };
        let op = format_ident!("{name}", span = span);
        let [first, second] = ["left", "right"].map(|name| operand_name(name, span));
        quote_spanned! {span=> {
            let (#first, #second) = (#left, #right);
            #lang::arith::Combine::combine(#first, #second, #lang::arith::BinaryOp::#op)
        }}
    }

    fn comparison(&mut self, name: &str, span: Span, left: TokenStream, right: TokenStream) -> TokenStream {
        let lang = lang(span);
        let function = format_ident!("{name}", span = span);
        let [first, second] = ["left", "right"].map(|name| operand_name(name, span));
        quote_spanned! {span=> {
            let (#first, #second) = (#left, #right);
            #lang::compare::#function(#first, #second)
        }}
    }

    fn closure(&mut self, closure: &ExprClosure) -> TokenStream {
        if let Some(token) = &closure.asyncness {
            return self.reject(token.span(), "`async` cannot be translated: a kernel has no futures");
        }
        let outer = assigned_in_expr(&Expr::Closure(closure.clone()));
        if let Some(name) = outer.first() {
            return self.reject(
                name.span(),
                format!("a closure cannot assign `{name}`, which is declared outside: return the value instead"),
            );
        }
        let (or1, inputs, or2) = (&closure.inputs_begin, &closure.inputs, &closure.inputs_end);
        let (output, capture) = (&closure.output, &closure.capture);
        let parameters: Vec<Ident> = inputs.iter().flat_map(bound_names).collect();
        let body = self.scoped(|this| {
            this.names.forget(&parameters);
            match &*closure.body {
                Expr::Block(block) => {
                    let outer = this.result.take();
                    let inner = this.tail(&block.block.stmts);
                    this.result = outer;
                    quote!({ #inner })
                }
                other => this.expr(other),
            }
        });
        let body = match output {
            syn::ReturnType::Default => body,
            syn::ReturnType::Type(..) => quote!({ #body }),
        };
        quote!(#capture #or1 #inputs #or2 #output #body)
    }

    fn macro_call(&mut self, mac: &Macro) -> TokenStream {
        let name = mac.path.segments.last().map(|s| s.ident.to_string()).unwrap_or_default();
        let advice = match name.as_str() {
            "concat" | "stringify" | "line" | "file" | "column" | "env" | "matches" | "unreachable" | "panic"
            | "todo" | "unimplemented" => {
                return mac.to_token_stream();
            }
            "println" | "print" | "eprintln" | "eprint" | "dbg" => {
                "use `device_print(\"text\", value)` while the kernel runs, or `static_print(\"text\", value)` while it is specialized"
            }
            "assert" | "assert_eq" | "assert_ne" | "debug_assert" | "debug_assert_eq" => {
                "use `device_assert(condition, \"text\")` while the kernel runs, or `static_assert(condition, \"text\")` while it \
                 is specialized"
            }
            "vec" => "use an array: `[a, b, c]`",
            _ => "macros hide their code from `#[kernel]`: use a function marked `#[device_fn]`",
        };
        self.reject(mac.path.span(), format!("`{name}!` cannot be used in a kernel: {advice}"))
    }
}

/// Expands `place = value;`, with the language's error message if the types differ.
fn assignment(place: &Expr, left: &TokenStream, value: &TokenStream, span: Span) -> TokenStream {
    if !matches!(place, Expr::Path(_) | Expr::Field(_)) {
        return quote_spanned!(span=> #left = #value;);
    }
    let lang = lang(span);
    quote_spanned!(span=> #left = #lang::operand::assigned(#lang::operand::type_of(&#left), #value);)
}

/// How literals without another operand are treated.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Literals {
    /// They adapt to a later operand.
    Adapt,
    /// rustc infers their type.
    Keep,
}

/// Whether an expression consists of blocks, which may assign variables.
fn is_control(expr: &Expr) -> bool {
    matches!(expr, Expr::If(_) | Expr::Match(_) | Expr::Block(_))
}

/// Whether a type is one of numbers that literals convert to, or a tuple with one.
pub fn has_numbers(ty: &Type) -> bool {
    const NUMBERS: [&str; 12] = ["Scalar", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "usize", "f32", "f64"];
    match ty {
        Type::Path(path) => path.path.segments.last().is_some_and(|last| NUMBERS.iter().any(|name| last.ident == name)),
        Type::Tuple(tuple) => tuple.elems.iter().any(has_numbers),
        _ => false,
    }
}

/// Whether an expression may be a statement without a value.
pub fn is_statement_like(expr: &Expr) -> bool {
    matches!(expr, Expr::If(_) | Expr::ForLoop(_) | Expr::While(_) | Expr::Block(_) | Expr::Match(_))
}
