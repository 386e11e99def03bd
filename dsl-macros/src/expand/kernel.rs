//! Expands `#[kernel]`: the definition, and the host side.

use super::body::Body;
use super::private;
use super::values::{Grid, erased_heuristic};
use crate::parse::kernel::{self as signature, Access, Default, Elem, Origin, Param, ParamKind, Signature};
use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use std::collections::HashMap;
use syn::spanned::Spanned;
use syn::{Error, ItemFn};

pub fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let (f, syntax) = crate::parse::item::parse(item);
    let Some(f) = f else {
        return syntax.into_iter().map(Error::into_compile_error).collect();
    };
    let (signature, mut errors) = signature::parse(&f);
    let grid = Grid::parse(attribute).unwrap_or_else(|e| {
        errors.push(e);
        None
    });
    if let Some(a) = f.attrs.iter().find(|a| a.path().segments.last().is_some_and(|s| s.ident == "autotune")) {
        errors.push(Error::new(a.span(), "`#[autotune]` must be above `#[kernel]`"));
    }
    let signature_failed = !errors.is_empty();
    let mut body = Body::of(&f);
    let inner = body.function(&f);
    errors.extend(syntax);
    errors.extend(body.errors);
    let failed = !errors.is_empty();
    let errors: Vec<TokenStream> = errors.into_iter().map(Error::into_compile_error).collect();
    let grid = grid.as_ref();
    let definition = definition(&f, &signature, grid, (!failed).then_some(inner));
    let def = def_name(&f);
    // With errors in the signature, the struct would cause further errors.
    let host = (!signature_failed).then(|| super::host::arguments(&f, &signature, grid, &def));
    let required = (!signature_failed).then(|| super::defaults::required(&f, &signature));
    quote!(#(#errors)* #definition #host #required)
}

/// Name of the static: the function's name in upper case.
pub fn def_name(f: &ItemFn) -> Ident {
    format_ident!("{}", f.sig.ident.to_string().to_uppercase(), span = f.sig.ident.span())
}

/// The static `KernelDef`. Without a body (after errors) it still names the parameters, for the editor.
fn definition(f: &ItemFn, signature: &Signature, grid: Option<&Grid>, body: Option<TokenStream>) -> TokenStream {
    let private = private();
    let lang = quote!(#private::lang);
    let (name, vis) = (&f.sig.ident, &f.vis);
    let text = name.to_string();
    let def = def_name(f);
    let doc = &signature.doc;
    let aliases = signature.aliases.kernel.iter().map(Ident::to_string);
    let param_aliases = signature.aliases.params.iter().map(|(former, present)| {
        let (former, present) = (former.to_string(), present.to_string());
        quote!((#former, #present))
    });
    let docs = f.attrs.iter().filter(|a| a.path().is_ident("doc"));
    let span = name.span();
    let generics = signature.generics.iter().map(|g| {
        let (name, bound) = (g.name.to_string(), g.bound.to_string());
        quote!(#lang::kernel::GenericDef { name: #name, bound: #bound })
    });
    let params = signature.params.iter().map(|p| param_def(p, signature, &lang));
    let tensors = signature.tensors.iter().map(|t| {
        let name = signature.params[t.memory].name.to_string();
        let (dims, strides) = (&t.dims, t.strides.iter().map(|&stride| signature.params[stride].name.to_string()));
        quote!(#lang::kernel::TensorDef { name: #name, dims: &[#(#dims),*], strides: &[#(#strides),*] })
    });
    let dims = signature.dims.iter().map(Ident::to_string);
    let grid = option(grid.map(|grid| grid.erased(signature)));
    let run = match body {
        Some(body) => run_body(f, signature, &lang, body),
        None => quote!(let _ = inputs;),
    };
    let (file, line) = (quote_spanned!(span=> ::core::file!()), quote_spanned!(span=> ::core::line!()));
    quote! {
        #(#docs)*
        #vis static #def: #lang::kernel::KernelDef = #lang::kernel::KernelDef {
            name: #text,
            aliases: &[#(#aliases),*],
            param_aliases: &[#(#param_aliases),*],
            doc: #doc,
            file: #file,
            line: #line,
            generics: &[#(#generics),*],
            params: &[#(#params),*],
            tensors: &[#(#tensors),*],
            dims: &[#(#dims),*],
            grid: #grid,
            body: {
                fn record_body(inputs: &#lang::kernel::Inputs<'_>) { #run }
                record_body
            },
        };
    }
}

fn elem_def(elem: &Elem, lang: &TokenStream) -> TokenStream {
    match elem {
        Elem::Generic(n) => quote!(#lang::kernel::ElemDef::Generic(#n)),
        Elem::Fixed(variant) => {
            let variant = Ident::new(variant, Span::call_site());
            quote!(#lang::kernel::ElemDef::Fixed(#lang::kernel::DType::#variant))
        }
    }
}

/// A constant as an expression in the kernel's definition.
pub fn const_default(d: &Default, lang: &TokenStream) -> TokenStream {
    let value = match d {
        Default::Int(n) => quote!(Int(#n)),
        Default::Float(x) => quote!(Float(#x)),
        Default::Bool(b) => quote!(Bool(#b)),
        Default::Variant(w) => quote!(Variant(#w)),
    };
    quote!(#lang::kernel::ConstDefault::#value)
}

/// `Some(value)` or `None` as tokens.
pub fn option(value: Option<TokenStream>) -> TokenStream {
    match value {
        Some(value) => quote!(::core::option::Option::Some(#value)),
        None => quote!(::core::option::Option::None),
    }
}

fn param_def(p: &Param, signature: &Signature, lang: &TokenStream) -> TokenStream {
    let (name, specialize) = (p.name.to_string(), p.specialize);
    let heuristic = match &p.origin {
        Origin::Heuristic(expr) => Some(expr),
        _ => p.without_tensor.as_ref(),
    };
    let heuristic = option(heuristic.map(|expr| erased_heuristic(p, expr, signature)));
    let kind = match &p.kind {
        ParamKind::Memory(access, elem) => {
            let elem = elem_def(elem, lang);
            let access = match access {
                Access::In => quote!(In),
                Access::Out => quote!(Out),
                Access::InOut => quote!(InOut),
            };
            quote!(#access(#elem))
        }
        ParamKind::Scalar(elem) => {
            let elem = elem_def(elem, lang);
            quote!(Scalar(#elem))
        }
        ParamKind::Constexpr(default) => {
            let ty = &p.ty;
            let default = default.as_ref().map(|default| match (ty, default) {
                // A static item.
                (syn::Type::Reference(_), Default::Variant(item)) => Default::Variant(item.to_lowercase()),
                _ => default.clone(),
            });
            let default = option(default.map(|d| const_default(&d, lang)));
            quote!(Constexpr { ty: <#ty as #lang::kernel::Constexpr>::TYPE, default: #default })
        }
    };
    quote!(#lang::kernel::ParamDef {
        name: #name,
        kind: #lang::kernel::ParamKind::#kind,
        specialize: #specialize,
        heuristic: #heuristic,
    })
}

/// Declares the arguments, then runs the rewritten body on their handles.
fn run_body(f: &ItemFn, signature: &Signature, lang: &TokenStream, body: TokenStream) -> TokenStream {
    // Not the kernel's name: the body may call a function of the language with the same name.
    let name = super::body::hygienic("kernel_body");
    let generics = &f.sig.generics;
    // Arguments are declared in the order of the parameters; a tensor's strides are no inputs of the body.
    let handles: Vec<Ident> =
        (0..signature.params.len()).map(|n| super::body::hygienic(&format!("input{n}"))).collect();
    let (mut inputs, mut types, mut args, mut declarations) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    // The type and the value of each member of a tuple.
    let mut members: HashMap<String, (TokenStream, TokenStream)> = HashMap::new();
    let (mut run_time, mut constants) = (0usize, 0usize);
    for (p, handle) in signature.params.iter().zip(&handles) {
        let (ident, ty, text) = (&p.name, &p.ty, p.name.to_string());
        let (input, declaration) = match &p.kind {
            ParamKind::Memory(access, _) => {
                let inner = element_type(ty);
                let writable = *access != Access::In;
                let handle = match p.origin {
                    Origin::Tensor(_) => quote_spanned!(ty.span()=> #lang::TensorPtr<#inner>),
                    _ => quote_spanned!(ty.span()=> #lang::Ptr<#inner>),
                };
                (handle, quote!(inputs.pointer(#text, #run_time, #writable)))
            }
            ParamKind::Scalar(_) => {
                (quote_spanned!(ty.span()=> #lang::Scalar<#ty>), quote!(inputs.scalar::<#ty>(#text, #run_time)))
            }
            ParamKind::Constexpr(_) => (ty.to_token_stream(), quote!(inputs.constant::<#ty>(#text, #constants))),
        };
        match &p.kind {
            ParamKind::Constexpr(_) => constants += 1,
            ParamKind::Memory(..) | ParamKind::Scalar(_) => run_time += 1,
        }
        declarations.push(quote!(let #handle = #declaration;));
        if matches!(p.origin, Origin::Stride | Origin::Given(_)) {
            continue;
        }
        let arg = match p.origin {
            Origin::Tensor(t) => {
                let tensor = &signature.tensors[t];
                let strides = tensor.strides.iter().map(|&stride| &handles[stride]);
                let dims = tensor.dims.iter().filter_map(|&dim| {
                    let place = signature.params.iter().position(|p| p.name == signature.dims[dim])?;
                    Some(&handles[place])
                });
                let dims = dims.map(|dim| quote!(#lang::tensor::TensorDim::from(#dim)));
                quote!(#lang::TensorPtr::new(#handle, &[#(#dims),*], &[#(#strides),*]))
            }
            _ => handle.to_token_stream(),
        };
        let given = signature.params.iter().position(|other| Some(&other.name) == p.given.as_ref());
        let (input, arg) = match given.map(|place| &handles[place]) {
            Some(given) => (quote!(::core::option::Option<#input>), quote!(#given.then(|| #arg))),
            None => (input, arg),
        };
        if p.place.is_some() {
            members.insert(text, (input, arg));
            continue;
        }
        let mutability = p.mutable.then(|| quote!(mut));
        inputs.push(quote!(#mutability #ident));
        types.push(input);
        args.push(arg);
    }
    for tuple in &signature.tuples {
        let (name, mutability) = (&tuple.name, tuple.mutable.then(|| quote!(mut)));
        inputs.push(quote!(#mutability #name));
        types.push(tuple.tokens(&|member| members[&member.to_string()].0.clone()));
        args.push(tuple.tokens(&|member| members[&member.to_string()].1.clone()));
    }
    let placeholders = signature.generics.iter().enumerate().map(|(n, g)| {
        let placeholder = format_ident!("Generic{}", g.bound);
        quote!(#lang::dtype::#placeholder<#n>)
    });
    let turbofish = if signature.generics.is_empty() { quote!() } else { quote!(::<#(#placeholders),*>) };
    quote! {
        #[allow(
            unused_mut, unused_assignments, unused_parens, non_snake_case, clippy::all
        )]
        fn #name #generics (#(#[allow(unused_variables)] #inputs: #types),*) { #body }
        #(#declarations)*
        #name #turbofish (#(#args),*)
    }
}

/// The `T` of `In<T>` and of `Tensor<T, (rows, d)>`.
pub fn element_type(ty: &syn::Type) -> TokenStream {
    if let syn::Type::Path(path) = ty
        && let Some(last) = path.path.segments.last()
        && let syn::PathArguments::AngleBracketed(args) = &last.arguments
        && let Some(first) = args.args.first()
    {
        return first.to_token_stream();
    }
    quote!(#ty)
}
