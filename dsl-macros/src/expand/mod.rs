//! Expands the user's code to calls of the language module.

pub mod aggregate;
pub mod autotune;
pub mod body;
mod branches;
pub mod calls;
pub mod control;
pub mod defaults;
pub mod device_fn;
pub mod host;
pub mod kernel;
mod names;
mod options;
pub mod returns;
pub mod values;

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};

/// The module `__private` of the Tilewright crate that the caller depends on.
pub fn private() -> TokenStream {
    for name in ["tilewright", "tilewright-runtime"] {
        match crate_name(name) {
            // Examples and tests of the crate refer to it by name, and so does its library (`extern crate self`).
            Ok(FoundCrate::Itself) => {
                let name = format_ident!("{}", name.replace('-', "_"));
                return quote!(::#name::__private);
            }
            Ok(FoundCrate::Name(found)) => {
                let name = format_ident!("{found}");
                return quote!(::#name::__private);
            }
            Err(_) => {}
        }
    }
    quote!(::tilewright::__private)
}

/// The language module, with all tokens at a span of the user's source: rustc and the recorder report that location.
pub fn lang(span: Span) -> TokenStream {
    let private: TokenStream = private()
        .into_iter()
        .map(|mut token| {
            token.set_span(span);
            token
        })
        .collect();
    quote_spanned!(span=> #private::lang)
}
