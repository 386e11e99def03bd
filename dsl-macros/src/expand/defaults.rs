//! Expands the struct of the arguments that have no defaults.

use super::body::hygienic;
use super::host::{Lists, fields, pascal_case};
use crate::parse::calls::PRECISION;
use crate::parse::kernel::{Origin, Param, Signature};
use proc_macro2::TokenStream;
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Expr, ExprLit, ExprUnary, ItemFn, Lit, LitFloat, UnOp};

/// The struct `NameRequired`, and its conversion to the kernel's own struct; nothing if no parameter has a default.
pub fn required(f: &ItemFn, signature: &Signature) -> TokenStream {
    let is_field = |p: &&Param| matches!(p.origin, Origin::Field | Origin::Tensor(_)) && p.place.is_none();
    let own = signature.params.iter().filter(is_field);
    let (optional, needed): (Vec<&Param>, Vec<&Param>) = own.partition(|p| p.default.is_some());
    if optional.is_empty() {
        return quote!();
    }
    let vis = &f.vis;
    let base = pascal_case(&f.sig.ident.to_string());
    let span = f.sig.ident.span();
    let (name, full) = (format_ident!("{base}Required", span = span), format_ident!("{base}", span = span));
    let Lists { lifetime, params, names, .. } = Lists::of(signature);
    let fields = fields(signature, vis, |p| p.default.is_none());
    let needed: Vec<_> = needed.iter().map(|p| &p.name).chain(signature.tuples.iter().map(|t| &t.name)).collect();
    let list: Vec<String> = optional.iter().map(|p| format!("`{}`", p.name)).collect();
    let (constants, values): (Vec<_>, Vec<_>) =
        optional.iter().filter_map(|p| Some((&p.name, value(p, p.default.as_ref()?)))).unzip();
    let summary =
        format!("Arguments of the kernel `{}` but for {}, which have defaults.", f.sig.ident, list.join(", "));
    let this = hygienic("this");
    quote! {
        #[doc = #summary]
        #[allow(non_snake_case, dead_code)]
        #vis struct #name<#lifetime #(#params),*> { #(#fields),* }

        #[allow(non_snake_case)]
        impl<#lifetime #(#params),*> #name<#lifetime #(#names),*> {
            /// All arguments, with the constants at their defaults. Other values are set with struct update syntax, as
            /// in `Kernel { constant: 3, ..KernelRequired { … }.with_defaults() }`.
            #[allow(dead_code)]
            #vis fn with_defaults(self) -> #full<#lifetime #(#names),*> {
                let #this = self;
                #full { #(#needed: #this.#needed,)* #(#constants: #values,)* }
            }
        }
    }
}

/// A default as an expression that rustc checks.
fn value(p: &Param, default: &Expr) -> TokenStream {
    let ty = &p.ty;
    let span = default.span();
    match default {
        Expr::Path(item) if matches!(ty, syn::Type::Reference(_)) => quote_spanned!(span=> &#item),
        Expr::Path(path) => {
            let Some(word) = path.path.segments.last().map(|s| &s.ident) else {
                return default.to_token_stream();
            };
            let variant = match PRECISION.words.iter().find(|(text, _)| word == text) {
                Some((_, variant)) => format_ident!("{variant}", span = span),
                None => word.clone(),
            };
            quote_spanned!(span=> <#ty>::#variant)
        }
        number if is_float(ty) => float(number),
        other => other.to_token_stream(),
    }
}

/// Converts a number literal to a float literal: `1` to `1.0`.
fn float(number: &Expr) -> TokenStream {
    match number {
        Expr::Lit(ExprLit { lit: Lit::Int(int), .. }) if int.suffix().is_empty() => {
            LitFloat::new(&format!("{}.0", int.base10_digits()), int.span()).to_token_stream()
        }
        Expr::Unary(ExprUnary { op: op @ UnOp::Neg(_), expr, .. }) => {
            let digits = float(expr);
            quote!(#op #digits)
        }
        other => other.to_token_stream(),
    }
}

fn is_float(ty: &syn::Type) -> bool {
    matches!(ty, syn::Type::Path(path) if path.path.is_ident("f32") || path.path.is_ident("f64"))
}
