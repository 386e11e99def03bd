//! Host expressions over a kernel's arguments: the grid in `#[kernel(grid = …)]`, `#[heuristic(…)]`, and expressions of a
//! tuning key.
//!
//! In them, an extent of a tensor is a `usize`, and a scalar or constant has its declared type. Each expression is
//! expanded twice: for the typed arguments of the struct, and for values that are known by name only, on a command line.

use super::private;
use crate::parse::autotune::dtypes_by_index;
use crate::parse::kernel::{Origin, Param, ParamKind, Signature};
use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::{ToTokens, quote, quote_spanned};
use std::collections::HashSet;
use syn::spanned::Spanned;
use syn::{Attribute, Error, Expr, ItemFn, Meta, MetaNameValue};

/// The grid that `#[kernel(grid = …)]` gives.
pub struct Grid(Expr);

impl Grid {
    /// The grid of a kernel below other attributes, if `#[kernel]` gives one. Mistakes are reported by `#[kernel]`.
    pub fn of(f: &ItemFn) -> Option<Grid> {
        let is_kernel = |a: &&Attribute| a.path().segments.last().is_some_and(|s| s.ident == "kernel");
        match &f.attrs.iter().find(is_kernel)?.meta {
            Meta::List(list) => Grid::parse(list.tokens.clone()).ok().flatten(),
            Meta::Path(_) | Meta::NameValue(_) => None,
        }
    }

    /// Parses the arguments of `#[kernel]`.
    pub fn parse(attribute: TokenStream) -> Result<Option<Grid>, Error> {
        if attribute.is_empty() {
            return Ok(None);
        }
        let span = attribute.span();
        match syn::parse2::<MetaNameValue>(attribute) {
            Ok(pair) if pair.path.is_ident("grid") => Ok(Some(Grid(pair.value))),
            _ => Err(Error::new(span, "`#[kernel]` takes the grid only: `#[kernel(grid = (cdiv(n, tile), heads))]`")),
        }
    }

    /// The function for values by name.
    pub fn erased(&self, signature: &Signature) -> TokenStream {
        let private = private();
        let expr = &self.0;
        let value = quote_spanned!(expr.span()=> #private::Grid::from(#expr).to_array());
        Values::of(expr, &signature.params).erased(&quote!(), &quote!([i64; 3]), &value)
    }

    /// The grid, where the parameters are variables or fields.
    pub fn typed(&self, signature: &Signature) -> TokenStream {
        let private = private();
        let expr = &self.0;
        let value = quote_spanned!(expr.span()=> #private::Grid::from(#expr));
        Values::of(expr, &signature.params).typed([quote!(), quote!()], &quote!(#private::Grid), &value)
    }
}

/// The function that computes a heuristic constant from values by name; `params` are the parameters before it.
pub fn erased_heuristic(constant: &Param, expr: &Expr, signature: &Signature) -> TokenStream {
    let private = private();
    let lang = quote!(#private::lang);
    let ty = &constant.ty;
    let value = quote_spanned!(expr.span()=> { let value: #ty = #expr; #lang::kernel::Constexpr::to_const(value) });
    Values::of_heuristic(constant, expr, signature).erased(&quote!(), &quote!(#lang::kernel::ConstValue), &value)
}

/// The value of a heuristic constant, where the parameters are variables or fields.
pub fn typed_heuristic(constant: &Param, expr: &Expr, signature: &Signature) -> TokenStream {
    let values = Values::of_heuristic(constant, expr, signature);
    values.typed([quote!(), quote!()], &constant.ty.to_token_stream(), &expr.to_token_stream())
}

/// The function that computes an expression of a tuning key from the element types and from values by name.
pub fn erased_key(expr: &Expr, signature: &Signature) -> TokenStream {
    let key = KeyExpr::of(expr, signature);
    Values::of(expr, &signature.params).erased(&key.parameter, &key.result, &key.value)
}

/// The value of an expression of a tuning key, where the parameters are variables or fields.
pub fn typed_key(expr: &Expr, signature: &Signature) -> TokenStream {
    let key = KeyExpr::of(expr, signature);
    Values::of(expr, &signature.params).typed([key.parameter, key.argument], &key.result, &key.value)
}

/// The tokens of an expression of a tuning key, in which `dtypes[n]` stands for `T::dtype()` of the type parameter n.
struct KeyExpr {
    parameter: TokenStream,
    argument: TokenStream,
    result: TokenStream,
    value: TokenStream,
}

impl KeyExpr {
    fn of(expr: &Expr, signature: &Signature) -> KeyExpr {
        let private = private();
        let lang = quote!(#private::lang);
        let dtypes = super::body::hygienic("dtypes");
        let expr = dtypes_by_index(expr, &signature.generics, &dtypes);
        let names = signature.generics.iter().map(|generic| &generic.name);
        KeyExpr {
            parameter: quote!(#dtypes: &[#lang::kernel::DType],),
            argument: quote!(&[#(<#names as #lang::Dtype>::dtype()),*],),
            result: quote!(#private::autotune::KeyValue),
            value: quote_spanned!(expr.span()=> #private::autotune::KeyValue::from(#expr)),
        }
    }
}

/// The parameters that an expression uses.
struct Values<'s>(Vec<&'s Param>);

impl<'s> Values<'s> {
    fn of(expr: &Expr, params: impl IntoIterator<Item = &'s Param>) -> Values<'s> {
        let mut names = HashSet::new();
        collect_names(expr.to_token_stream(), &mut names);
        let is_value = |p: &&Param| !matches!(p.kind, ParamKind::Memory(..)) && !matches!(p.origin, Origin::Stride);
        Values(params.into_iter().filter(|p| is_value(p) && names.contains(&p.name.to_string())).collect())
    }

    /// A heuristic may use those that are declared before it.
    fn of_heuristic(constant: &Param, expr: &Expr, signature: &'s Signature) -> Values<'s> {
        let place = signature.params.iter().position(|p| p.name == constant.name).unwrap_or(0);
        let known = |(n, p): (usize, &'s Param)| (n < place || !matches!(p.origin, Origin::Heuristic(_))).then_some(p);
        Values::of(expr, signature.params.iter().enumerate().filter_map(known))
    }

    fn types(&self) -> Vec<TokenStream> {
        let ty = |p: &&Param| match p.origin {
            Origin::Dim => quote!(usize),
            _ => p.ty.to_token_stream(),
        };
        self.0.iter().map(ty).collect()
    }

    fn names(&self) -> Vec<&Ident> {
        self.0.iter().map(|p| &p.name).collect()
    }

    /// A function of a `Lookup`, below other parameters.
    fn erased(&self, parameter: &TokenStream, result: &TokenStream, value: &TokenStream) -> TokenStream {
        let private = private();
        let lang = quote!(#private::lang);
        let (names, types) = (self.names(), self.types());
        let texts = names.iter().map(|name| name.to_string());
        quote!({
            #[allow(unused_imports, unused_variables, clippy::all)]
            fn evaluate(
                #parameter
                values: &#lang::kernel::Lookup<'_>,
            ) -> ::core::result::Result<#result, &'static str> {
                use #private::kernel::cdiv;
                #(let #names: #types = #lang::kernel::lookup(values, #texts)?;)*
                ::core::result::Result::Ok(#value)
            }
            evaluate
        })
    }

    /// A call with the variables and fields of a method of the argument struct, below another parameter and argument.
    fn typed(&self, [parameter, argument]: [TokenStream; 2], result: &TokenStream, value: &TokenStream) -> TokenStream {
        let private = private();
        let (names, types) = (self.names(), self.types());
        let arguments = self.0.iter().map(|p| {
            let (name, field) = (&p.name, p.field());
            match (&p.kind, &p.origin) {
                (ParamKind::Scalar(_), Origin::Field) => quote!(self.#field),
                _ => name.to_token_stream(),
            }
        });
        quote!({
            #[allow(unused_imports, unused_variables, clippy::all)]
            fn evaluate(#parameter #(#names: #types),*) -> #result {
                use #private::kernel::cdiv;
                #value
            }
            evaluate(#argument #(#arguments),*)
        })
    }
}

fn collect_names(tokens: TokenStream, names: &mut HashSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(name) => {
                names.insert(name.to_string());
            }
            TokenTree::Group(group) => collect_names(group.stream(), names),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}
