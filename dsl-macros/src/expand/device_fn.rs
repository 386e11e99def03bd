//! Expands `#[device_fn]`.

use super::body::Body;
use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::spanned::Spanned;
use syn::{Error, FnArg, PatType, PathArguments, Type};

/// `In<T>`, `Out<T>` and `InOut<T>` are parameters of kernels: a device function gets what they are in a body.
fn reject_kernel_parameter(body: &mut Body, input: &FnArg) {
    let FnArg::Typed(PatType { ty, .. }) = input else { return };
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
    f.sig.inputs.iter().for_each(|input| reject_kernel_parameter(&mut body, input));
    let inner = body.function(&f.block);
    let errors: Vec<TokenStream> = body.errors.into_iter().map(Error::into_compile_error).collect();
    if errors.is_empty() {
        f.block = match syn::parse2(quote!({ #inner })) {
            Ok(block) => block,
            Err(e) => return e.into_compile_error(),
        };
        f.attrs.push(syn::parse_quote!(#[allow(
            unused_mut, unused_variables, unused_assignments, unused_parens, clippy::all
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
