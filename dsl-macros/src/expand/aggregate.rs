//! Expands `#[aggregate]`: a struct of values becomes a value of kernel code.

use super::lang;
use proc_macro2::{Span, TokenStream};
use quote::{quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Attribute, Error, Field, Fields, Generics, Ident, ItemStruct, Type, parse_quote_spanned};

/// Rust types that are no run-time values, what a field of that type may be instead as a run-time value, and whether it
/// may be a `#[constexpr]` (the types of `lang::kernel::Constexpr` of the prelude).
const NUMBERS: [(&str, Option<&str>, bool); 14] = [
    ("bool", Some("bool"), true),
    ("i8", Some("i8"), false),
    ("i16", Some("i16"), false),
    ("i32", Some("i32"), true),
    ("i64", Some("i64"), true),
    ("u8", Some("u8"), false),
    ("u16", Some("u16"), false),
    ("u32", Some("u32"), true),
    ("u64", Some("u64"), true),
    ("usize", Some("i64"), true),
    ("isize", Some("i64"), false),
    ("f32", Some("f32"), true),
    ("f64", Some("f64"), true),
    ("Precision", None, true),
];

/// A field, after its attribute `#[constexpr]` is taken off.
struct Member {
    name: Ident,
    ty: Type,
    constant: bool,
}

/// What to write in place of a field of a Rust type.
fn instead_of_number(name: &Ident, ty: &Type) -> Option<String> {
    let Type::Path(path) = ty else { return None };
    let (ty, scalar, constant) = NUMBERS.iter().find(|(ty, ..)| path.path.is_ident(ty))?;
    let constant = constant.then(|| format!("known at specialization: `#[constexpr] {name}: {ty}`"));
    let scalar = scalar.map(|scalar| format!("a run-time value, such as `{name}: Scalar<{scalar}>`"));
    let choices: Vec<String> = scalar.into_iter().chain(constant).collect();
    Some(format!("the field `{name}` is a Rust `{ty}`; it can be {}", choices.join(", or ")))
}

fn is_constexpr(attribute: &Attribute) -> bool {
    attribute.path().is_ident("constexpr")
}

fn member(field: &mut Field) -> Result<Member, Error> {
    let (constexprs, rest) = field.attrs.drain(..).partition::<Vec<_>, _>(is_constexpr);
    field.attrs = rest;
    for attribute in &constexprs {
        if attribute.meta.require_path_only().is_err() {
            return Err(Error::new(attribute.meta.span(), "`#[constexpr]` of a field takes no arguments"));
        }
    }
    let (constant, ty) = (!constexprs.is_empty(), field.ty.clone());
    let Some(name) = field.ident.clone() else {
        return Err(Error::new(field.span(), "name the fields: `struct Pair { x: Tile<f32>, y: Tile<f32> }`"));
    };
    if !constant && let Some(message) = instead_of_number(&name, &ty) {
        return Err(Error::new(ty.span(), message));
    }
    Ok(Member { name, ty, constant })
}

pub fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let mut item: ItemStruct = match syn::parse2(item.clone()) {
        Ok(item) => item,
        Err(error) => {
            let error =
                Error::new(error.span(), format!("`#[aggregate]` is for structs: {error}")).into_compile_error();
            return quote!(#error #item);
        }
    };
    let mut errors = Vec::new();
    if !attribute.is_empty() {
        errors.push(Error::new(attribute.span(), "`#[aggregate]` takes no arguments"));
    }
    let mut members = Vec::new();
    match &mut item.fields {
        Fields::Named(fields) => {
            for field in &mut fields.named {
                match member(field) {
                    Ok(member) => members.push(member),
                    Err(error) => errors.push(error),
                }
            }
        }
        fields => errors.push(Error::new(fields.span(), "an aggregate has named fields: `struct Pair { x: …, y: … }`")),
    }
    let errors: Vec<TokenStream> = errors.into_iter().map(Error::into_compile_error).collect();
    let carried = if errors.is_empty() { carried(&item.ident, &item.generics, &members) } else { TokenStream::new() };
    let derives = derives(&item.attrs);
    quote! {
        #(#errors)*
        #derives
        #item
        #carried
    }
}

/// Derives `Clone` and `Copy`, if an attribute below `#[aggregate]` does not.
fn derives(attributes: &[Attribute]) -> TokenStream {
    let mut missing = vec!["Clone", "Copy"];
    for attribute in attributes.iter().filter(|attribute| attribute.path().is_ident("derive")) {
        // Errors are those of the compiler.
        let _ = attribute.parse_nested_meta(|derived| {
            missing.retain(|name| derived.path.segments.last().is_none_or(|last| last.ident != name));
            Ok(())
        });
    }
    let missing = missing.into_iter().map(|name| Ident::new(name, Span::call_site()));
    quote!(#(#[derive(#missing)])*)
}

/// `impl Carried`: loops and branches carry the fields that are no constants.
fn carried(name: &Ident, generics: &Generics, members: &[Member]) -> TokenStream {
    let lang = lang(Span::call_site());
    let carried = quote!(#lang::carried::Carried);
    let (values, constants): (Vec<&Member>, Vec<&Member>) = members.iter().partition(|member| !member.constant);
    let (fields, types): (Vec<&Ident>, Vec<&Type>) = values.iter().map(|member| (&member.name, &member.ty)).unzip();
    let fixed: Vec<&Ident> = constants.iter().map(|member| &member.name).collect();
    // At the place of the type, where a message about it belongs.
    let keys = constants.iter().map(|Member { name, ty, .. }| {
        let lang = super::lang(ty.span());
        quote_spanned!(ty.span()=> <#ty as #lang::kernel::Constexpr>::key(handle.#name))
    });
    let mut generics = generics.clone();
    let bounds = &mut generics.make_where_clause().predicates;
    for ty in &types {
        let lang = super::lang(ty.span());
        bounds.push(parse_quote_spanned!(ty.span()=> #ty: #lang::carried::Carried<Handle = #ty>));
    }
    let (parameters, arguments, bounds) = generics.split_for_impl();
    quote! {
        impl #parameters #carried for #name #arguments #bounds {
            type Handle = Self;
            fn into_handle(self) -> Self {
                self
            }
            fn values(handle: &Self, out: &mut ::std::vec::Vec<#lang::carried::Value>) {
                #(<#types as #carried>::values(&handle.#fields, out);)*
            }
            fn rebuild(
                like: &Self,
                values: &mut dyn ::core::iter::Iterator<Item = #lang::carried::Value>,
            ) -> Self {
                #name {
                    #(#fields: <#types as #carried>::rebuild(&like.#fields, values),)*
                    #(#fixed: like.#fixed,)*
                }
            }
            fn names(handle: &Self, name: &str, out: &mut ::std::vec::Vec<::std::string::String>) {
                #(<#types as #carried>::names(
                    &handle.#fields,
                    &::std::format!("{name}.{}", ::core::stringify!(#fields)),
                    out,
                );)*
            }
            fn constants(
                handle: &Self,
                name: &str,
                out: &mut ::std::vec::Vec<(::std::string::String, u64)>,
            ) {
                #(<#types as #carried>::constants(
                    &handle.#fields,
                    &::std::format!("{name}.{}", ::core::stringify!(#fields)),
                    out,
                );)*
                #(out.push((::std::format!("{name}.{}", ::core::stringify!(#fixed)), #keys));)*
            }
        }
    }
}
