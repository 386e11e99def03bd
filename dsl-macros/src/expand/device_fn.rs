//! Expands `#[device_fn]`.

use super::body::{Body, has_numbers};
use proc_macro2::TokenStream;
use quote::{ToTokens, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Error, FnArg, PatType, PathArguments, ReturnType, Type};

/// `In<T>`, `Out<T>` and `InOut<T>` are parameters of kernels: a device function gets what they are in a body.
fn reject_kernel_parameter(body: &mut Body, input: &mut FnArg) {
    let FnArg::Typed(PatType { ty, attrs, .. }) = input else { return };
    // The others stay: of an unknown one, rustc would report a second error.
    let (ours, others) = std::mem::take(attrs)
        .into_iter()
        .partition(|attr| ["constexpr", "no_specialize"].iter().any(|name| attr.path().is_ident(name)));
    *attrs = others;
    let ours: Vec<syn::Attribute> = ours;
    for attr in &ours {
        let message = "this is for parameters of kernels: a device function gets a value that is known at specialization as Rust's own \
                       type, such as `usize` or `bool`";
        body.errors.push(Error::new(attr.span(), message));
    }
    let Type::Path(path) = &**ty else { return };
    let Some(last) = path.path.segments.last() else { return };
    if ["In", "Out", "InOut"].iter().any(|name| last.ident == name) {
        let elem = match &last.arguments {
            PathArguments::AngleBracketed(list) => list.args.to_token_stream().to_string(),
            _ => "T".to_string(),
        };
        let message = format!(
            "`{0}<{elem}>` is a parameter of a kernel, in whose body it is a `Ptr<{elem}>`: write that",
            last.ident
        );
        body.errors.push(Error::new(ty.span(), message));
    }
}

pub fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let (f, syntax) = crate::parse::item::parse(item);
    let Some(mut f) = f else {
        return syntax.into_iter().map(Error::into_compile_error).collect();
    };
    let mut body = Body::of(&f);
    body.errors = syntax;
    if !attribute.is_empty() {
        body.errors.push(Error::new(attribute.span(), "`#[device_fn]` takes no arguments"));
    }
    if let Some(token) = &f.sig.asyncness {
        body.errors.push(Error::new(token.span(), "a device function cannot be `async`"));
    }
    if let Some(token) = &f.sig.constness {
        body.errors.push(Error::new(token.span(), "a device function cannot be `const`: it records operations"));
    }
    f.sig.inputs.iter_mut().for_each(|input| reject_kernel_parameter(&mut body, input));
    body.result = match &f.sig.output {
        ReturnType::Type(_, ty) if has_numbers(ty) => Some((**ty).clone()),
        _ => None,
    };
    let inner = body.function(&f);
    let errors: Vec<TokenStream> = body.errors.into_iter().map(Error::into_compile_error).collect();
    if errors.is_empty() {
        let (depth, name) = (super::body::hygienic("depth"), f.sig.ident.to_string());
        let lang = super::lang(f.sig.ident.span());
        let enter = quote_spanned!(f.sig.ident.span()=> let #depth = #lang::record::enter_function(#name););
        f.block = match syn::parse2(quote!({ #enter #inner })) {
            Ok(block) => block,
            Err(e) => return e.into_compile_error(),
        };
        f.attrs.push(syn::parse_quote!(#[allow(
            unused_mut, unused_assignments, unused_parens, clippy::all
        )]));
        f.into_token_stream()
    } else {
        // The signature stays, so that callers and the editor still see the function.
        let (attrs, vis, sig) = (&f.attrs, &f.vis, &f.sig);
        quote! {
            #(#errors)*
            #(#attrs)* #[allow(unused_variables, unused_mut)] #vis #sig { ::core::panic!("this function has errors") }
        }
    }
}
