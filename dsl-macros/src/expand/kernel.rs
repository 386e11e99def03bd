//! Expands `#[kernel]`: the definition, and the host side.

use super::body::Body;
use super::private;
use crate::parse::kernel::{self as signature, Access, Default, Elem, Param, ParamKind, Signature};
use proc_macro2::{Ident, Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Error, ItemFn};

pub fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let (f, syntax) = crate::parse::item::parse(item);
    let Some(f) = f else {
        return syntax.into_iter().map(Error::into_compile_error).collect();
    };
    let (signature, mut errors) = signature::parse(&f);
    if !attribute.is_empty() {
        errors.push(Error::new(attribute.span(), "`#[kernel]` takes no arguments"));
    }
    if let Some(a) = f.attrs.iter().find(|a| a.path().segments.last().is_some_and(|s| s.ident == "autotune")) {
        errors.push(Error::new(a.span(), "`#[autotune]` must be above `#[kernel]`"));
    }
    let signature_failed = !errors.is_empty();
    let mut body = Body::of(&f);
    let inner = body.function(&f.block);
    errors.extend(syntax);
    errors.extend(body.errors);
    let failed = !errors.is_empty();
    let errors: Vec<TokenStream> = errors.into_iter().map(Error::into_compile_error).collect();
    let definition = definition(&f, &signature, (!failed).then_some(inner));
    let def = def_name(&f);
    // With errors in the signature, the struct would cause further errors.
    let host = (!signature_failed).then(|| super::host::arguments(&f, &signature, &def));
    let required = (!signature_failed).then(|| super::defaults::required(&f, &signature));
    quote!(#(#errors)* #definition #host #required)
}

/// Name of the static: the function's name in upper case.
pub fn def_name(f: &ItemFn) -> Ident {
    format_ident!("{}", f.sig.ident.to_string().to_uppercase(), span = f.sig.ident.span())
}

/// The static `KernelDef`. Without a body (after errors) it still names the parameters, for the editor.
fn definition(f: &ItemFn, signature: &Signature, body: Option<TokenStream>) -> TokenStream {
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
    let params = signature.params.iter().map(|p| param_def(p, &lang));
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

fn param_def(p: &Param, lang: &TokenStream) -> TokenStream {
    let (name, specialize) = (p.name.to_string(), p.specialize);
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
            let default = match default {
                None => quote!(::core::option::Option::None),
                Some(d) => {
                    let value = const_default(d, lang);
                    quote!(::core::option::Option::Some(#value))
                }
            };
            quote!(Constexpr { ty: <#ty as #lang::kernel::Constexpr>::TYPE, default: #default })
        }
    };
    quote!(#lang::kernel::ParamDef { name: #name, kind: #lang::kernel::ParamKind::#kind, specialize: #specialize })
}

/// Declares the arguments, then runs the rewritten body on their handles.
fn run_body(f: &ItemFn, signature: &Signature, lang: &TokenStream, body: TokenStream) -> TokenStream {
    // Not the kernel's name: the body may call a function of the language with the same name.
    let name = super::body::hygienic("kernel_body");
    let generics = &f.sig.generics;
    let (mut inputs, mut types, mut args) = (Vec::new(), Vec::new(), Vec::new());
    let (mut run_time, mut constants) = (0usize, 0usize);
    for p in &signature.params {
        let (ident, ty, text) = (&p.name, &p.ty, p.name.to_string());
        let mutability = p.mutable.then(|| quote!(mut));
        inputs.push(quote!(#mutability #ident));
        match &p.kind {
            ParamKind::Memory(access, _) => {
                let inner = element_type(ty);
                types.push(quote_spanned!(ty.span()=> #lang::Ptr<#inner>));
                let writable = *access != Access::In;
                args.push(quote!(inputs.pointer(#text, #run_time, #writable)));
                run_time += 1;
            }
            ParamKind::Scalar(_) => {
                types.push(quote_spanned!(ty.span()=> #lang::Scalar<#ty>));
                args.push(quote!(inputs.scalar(#text, #run_time)));
                run_time += 1;
            }
            ParamKind::Constexpr(_) => {
                types.push(ty.to_token_stream());
                args.push(quote!(inputs.constant::<#ty>(#text, #constants)));
                constants += 1;
            }
        }
    }
    let placeholders = signature.generics.iter().enumerate().map(|(n, g)| {
        let placeholder = format_ident!("Generic{}", g.bound);
        quote!(#lang::dtype::#placeholder<#n>)
    });
    let turbofish = if signature.generics.is_empty() { quote!() } else { quote!(::<#(#placeholders),*>) };
    quote! {
        #[allow(
            unused_mut, unused_variables, unused_assignments, unused_parens, non_snake_case, clippy::all
        )]
        fn #name #generics (#(#inputs: #types),*) { #body }
        #name #turbofish (#(#args),*)
    }
}

/// The `T` of `In<T>`.
pub fn element_type(ty: &syn::Type) -> TokenStream {
    if let syn::Type::Path(path) = ty
        && let Some(last) = path.path.segments.last()
        && let syn::PathArguments::AngleBracketed(args) = &last.arguments
    {
        return args.args.to_token_stream();
    }
    quote!(#ty)
}
