//! Expands `#[aggregate]`: a struct of values becomes a value of kernel code.

use super::lang;
use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, quote};
use syn::spanned::Spanned;
use syn::{Error, Field, Fields, Generics, Ident, ItemStruct, Type, parse_quote};

/// Rust types that are constants in kernel code.
const NUMBERS: [&str; 14] =
    ["bool", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "usize", "isize", "f32", "f64", "Precision"];

/// A field, after its attribute `#[constexpr]` is taken off.
struct Member {
    name: Ident,
    ty: Type,
    constant: bool,
}

fn is_number(ty: &Type) -> bool {
    matches!(ty, Type::Path(path) if NUMBERS.iter().any(|name| path.path.is_ident(name)))
}

fn member(field: &mut Field) -> Result<Member, Error> {
    let before = field.attrs.len();
    field.attrs.retain(|attribute| !attribute.path().is_ident("constexpr"));
    let (constant, ty) = (field.attrs.len() < before, field.ty.clone());
    let Some(name) = field.ident.clone() else {
        return Err(Error::new(field.span(), "name the fields: `struct Pair { x: Tile<f32>, y: Tile<f32> }`"));
    };
    if !constant && is_number(&ty) {
        let ty = ty.to_token_stream();
        let message = format!(
            "a field is a run-time value, such as `Scalar<{ty}>`, or known at specialization: `#[constexpr] {name}: {ty}`"
        );
        return Err(Error::new(field.ty.span(), message));
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
    quote! {
        #(#errors)*
        #[derive(Clone, Copy)]
        #item
        #carried
    }
}

/// `impl Carried`: loops and branches carry the fields that are no constants.
fn carried(name: &Ident, generics: &Generics, members: &[Member]) -> TokenStream {
    let lang = lang(Span::call_site());
    let carried = quote!(#lang::carried::Carried);
    let (values, constants): (Vec<&Member>, Vec<&Member>) = members.iter().partition(|member| !member.constant);
    let (fields, types): (Vec<&Ident>, Vec<&Type>) = values.iter().map(|member| (&member.name, &member.ty)).unzip();
    let fixed: Vec<&Ident> = constants.iter().map(|member| &member.name).collect();
    let mut generics = generics.clone();
    let bounds = &mut generics.make_where_clause().predicates;
    for ty in &types {
        bounds.push(parse_quote!(#ty: #carried<Handle = #ty>));
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
            fn constants(handle: &Self, out: &mut ::std::vec::Vec<(::std::string::String, u64)>) {
                #(<#types as #carried>::constants(&handle.#fields, out);)*
                #(out.push((
                    ::std::string::String::from(::core::stringify!(#fixed)),
                    #lang::kernel::Constexpr::key(handle.#fixed),
                ));)*
            }
        }
    }
}
