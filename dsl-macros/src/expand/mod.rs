//! What the user's code means, in calls of the language module.

pub mod autotune;
pub mod body;
pub mod calls;
pub mod control;
pub mod defaults;
pub mod device_fn;
pub mod host;
pub mod kernel;
pub mod returns;

use proc_macro_crate::{FoundCrate, crate_name};
use proc_macro2::{Span, TokenStream};
use quote::{format_ident, quote, quote_spanned};

/// The module `__private` of whichever crate of ours the caller depends on.
pub fn private() -> TokenStream {
    for name in ["tilewright", "tilewright-runtime"] {
        match crate_name(name) {
            // Examples and tests of the crate itself see it by its name, and so does its library (`extern crate self`).
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

/// The language module, with every token at a place of the user's source: rustc and the recorder then report that place.
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
