//! Parses the function below an attribute.

use super::triton;
use proc_macro2::{Delimiter, Group, TokenStream, TokenTree};
use syn::{Error, ItemFn};

/// The function, and its syntax errors. If the errors are in the body, the function has an empty body, so that callers
/// and the editor still see it. `None` if the signature is not valid Rust.
pub fn parse(item: TokenStream) -> (Option<ItemFn>, Vec<Error>) {
    let error = match syn::parse2(item.clone()) {
        Ok(f) => return (Some(f), Vec::new()),
        Err(error) => error,
    };
    let mut errors = triton::find_mistakes(item.clone());
    if errors.is_empty() {
        errors.push(error);
    }
    (syn::parse2(without_body(item)).ok(), errors)
}

fn without_body(item: TokenStream) -> TokenStream {
    let mut tokens: Vec<TokenTree> = item.into_iter().collect();
    if let Some(TokenTree::Group(body)) = tokens.last_mut()
        && body.delimiter() == Delimiter::Brace
    {
        let span = body.span();
        *body = Group::new(Delimiter::Brace, TokenStream::new());
        body.set_span(span);
    }
    tokens.into_iter().collect()
}
