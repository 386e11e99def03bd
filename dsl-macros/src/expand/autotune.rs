//! Expands `#[autotune]`: the static with the configurations, and `launch_tuned`.

use super::host::{Lists, pascal_case};
use super::kernel::{const_default, def_name};
use super::values::{Grid, erased_key, typed_key};
use super::{body::hygienic, private};
use crate::parse::autotune::{self as parse, Autotune, Config, Key, KeyValue, SCHEDULE_OPTIONS};
use crate::parse::kernel::{self as signature, Origin, ParamKind, Signature};
use proc_macro2::{Ident, TokenStream};
use quote::{format_ident, quote};
use syn::{Error, ItemFn, Visibility};

pub fn expand(attribute: TokenStream, item: TokenStream) -> TokenStream {
    let (f, syntax) = crate::parse::item::parse(item.clone());
    let Some(f) = f else {
        return syntax.into_iter().map(Error::into_compile_error).collect();
    };
    let is_kernel = |a: &syn::Attribute| a.path().segments.last().is_some_and(|s| s.ident == "kernel");
    if !f.attrs.iter().any(is_kernel) {
        let message = "`#[autotune]` must be above `#[kernel]`, which is missing";
        let error = Error::new(f.sig.ident.span(), message).into_compile_error();
        return quote!(#error #item);
    }
    let (signature, mistakes) = signature::parse(&f);
    // `#[kernel]` reports errors of the signature and of the syntax.
    if !mistakes.is_empty() {
        return item;
    }
    let (autotune, errors) = parse::parse(attribute, &signature);
    let errors: Vec<TokenStream> = errors.into_iter().map(Error::into_compile_error).collect();
    let tuned = autotune.map(|autotune| launch(&f, &signature, &autotune));
    quote!(#(#errors)* #item #tuned)
}

/// The static `Autotune`.
fn definition(f: &ItemFn, signature: &Signature, autotune: &Autotune, name: &Ident) -> TokenStream {
    let private = private();
    let (vis, def) = (&f.vis, def_name(f));
    let tuned = autotune.tuned.iter().map(Ident::to_string);
    let key: Vec<String> = autotune.key.iter().map(|key| key.name.to_string()).collect();
    let values = autotune.key.iter().map(|key| match &key.value {
        KeyValue::Expr(expr) => {
            let function = erased_key(expr, signature);
            quote!(::core::option::Option::Some(#function))
        }
        KeyValue::Size | KeyValue::Bool | KeyValue::Constant => quote!(::core::option::Option::None),
    });
    let option = |value: Option<u32>| match value {
        Some(n) => quote!(::core::option::Option::Some(#n)),
        None => quote!(::core::option::Option::None),
    };
    let flag = |value: Option<bool>| match value {
        Some(b) => quote!(::core::option::Option::Some(#b)),
        None => quote!(::core::option::Option::None),
    };
    let configs = autotune.configs.iter().map(|config| {
        let Config { constants, num_warps, num_ctas, num_stages, max_registers, schedule_options } = config;
        let constants = constants.iter().map(|c| const_default(c, &quote!(#private::lang)));
        let [num_warps, num_ctas, num_stages, max_registers] =
            [*num_warps, *num_ctas, *num_stages, *max_registers].map(option);
        let (names, schedule_options) =
            (SCHEDULE_OPTIONS.map(|name| format_ident!("{name}")), schedule_options.map(flag));
        quote!(#private::autotune::ConfigDef {
            constants: &[#(#constants),*],
            num_warps: #num_warps,
            num_ctas: #num_ctas,
            num_stages: #num_stages,
            max_registers: #max_registers,
            schedule: #private::Schedule { #(#names: #schedule_options),* },
        })
    });
    let lists = match &autotune.shared {
        Some(other) => {
            let names = parse::constants(signature).map(|p| p.name.to_string());
            let other = quote!(#private::autotune::shared_configs(&#other, &[#(#names),*], &[#(#key),*]));
            quote!(tuned: #other.tuned, configs: #other.configs,)
        }
        None => quote!(tuned: &[#(#tuned),*], configs: &[#(#configs),*],),
    };
    let default = match &autotune.default {
        Some(function) => quote!(::core::option::Option::Some(#function)),
        None => quote!(::core::option::Option::None),
    };
    let keep = match (&autotune.keep, &autotune.shared) {
        (Some(function), _) => quote!(::core::option::Option::Some(#function)),
        (None, Some(other)) => quote!(#other.keep),
        (None, None) => quote!(::core::option::Option::None),
    };
    let tables = match &autotune.tables {
        Some(tables) => quote!(#tables),
        None => quote!(&[]),
    };
    let doc = format!("The configurations of the kernel `{}`, and what the best one depends on.", f.sig.ident);
    quote! {
        #[doc = #doc]
        #vis static #name: #private::autotune::Autotune = #private::autotune::Autotune {
            def: &#def,
            #lists
            key: &[#(#private::autotune::KeyDef { name: #key, value: #values }),*],
            keep: #keep,
            default: #default,
            tables: #tables,
        };
    }
}

/// Statements that set the constants of a configuration.
fn setters(signature: &Signature, autotune: &Autotune, chosen: &Ident) -> Vec<TokenStream> {
    let set_one = |name: &Ident| {
        let text = name.to_string();
        let field = signature.params.iter().find(|p| p.name == *name).map(|p| p.field());
        quote!(self.#field = #chosen.value(Self::DEF, #text)?;)
    };
    match autotune.shared {
        None => autotune.tuned.iter().map(set_one).collect(),
        // The constants of the other kernel's configurations are not known at expansion.
        Some(_) => {
            let set_chosen = |p: &signature::Param| {
                let (text, set) = (p.name.to_string(), set_one(&p.name));
                quote!(if #chosen.constant(#text).is_some() { #set })
            };
            parse::constants(signature).map(set_chosen).collect()
        }
    }
}

/// The tokens of the key: statements that bind its values, the words that are hashed, and the named parts.
#[derive(Default)]
struct KeyTokens {
    bindings: Vec<TokenStream>,
    words: Vec<TokenStream>,
    parts: Vec<TokenStream>,
}

impl KeyTokens {
    fn of(signature: &Signature, autotune: &Autotune) -> KeyTokens {
        let private = private();
        let (lang, key_value) = (quote!(#private::lang), quote!(#private::autotune::KeyValue));
        let mut tokens = KeyTokens::default();
        for (n, Key { name, value }) in autotune.key.iter().enumerate() {
            let (text, bound) = (name.to_string(), hygienic(&format!("key{n}")));
            let param = signature.params.iter().find(|p| p.name == *name);
            let argument = match param.map(|p| (&p.kind, &p.origin, &p.ty)) {
                Some((ParamKind::Scalar(_), Origin::Field, _)) => {
                    let field = param.map(|p| p.field());
                    quote!(self.#field)
                }
                Some((_, Origin::Dim, ty)) => quote!(#name as #ty),
                _ => quote!(#name),
            };
            let (binding, word, part) = match value {
                KeyValue::Size => (
                    quote!(#private::autotune::size_bucket((#argument) as i64)),
                    quote!(#bound),
                    quote!(#key_value::Size(#bound)),
                ),
                KeyValue::Bool => (argument, quote!(u64::from(#bound)), quote!(#key_value::from(#bound))),
                KeyValue::Constant => (
                    argument,
                    quote!(#lang::kernel::Constexpr::key(#bound)),
                    quote!(#key_value::Exact(#lang::kernel::Constexpr::to_const(#bound))),
                ),
                KeyValue::Expr(expr) => (typed_key(expr, signature), quote!(#bound.word()), quote!(#bound.clone())),
            };
            tokens.bindings.push(quote!(let #bound = #binding;));
            tokens.words.push(word);
            tokens.parts.push(quote!(#private::autotune::KeyPart { name: #text, value: #part }));
        }
        tokens
    }
}

/// The method `launch_tuned`, and what `launch_tuned_with` takes and calls: the closure that chooses the grid, with its
/// type parameter, or nothing if the kernel gives its grid.
fn grid_tokens(vis: &Visibility, own: Option<&Grid>, device: &Ident, grid: &Ident) -> [TokenStream; 5] {
    let private = private();
    match own {
        None => {
            let parameter = quote!(#grid: impl ::core::ops::FnMut(&mut Self) -> Shape,);
            let launch_tuned = quote! {
                /// Launches the kernel with the best known configuration for these arguments. `grid` is called with the
                /// arguments after the configuration's constants are set; it may set constants that follow from them,
                /// and returns the grid.
                ///
                /// # Errors
                /// As for `launch`; with tuning enabled, also if no configuration runs.
                #[allow(dead_code)]
                #vis fn launch_tuned<Shape: ::core::convert::Into<#private::Grid>>(
                    &mut self,
                    #device: &#private::Device,
                    #parameter
                ) -> #private::Result<()> {
                    self.launch_tuned_with(#device, &#private::LaunchConfig::default(), #grid)
                }
            };
            let generics = quote!(<Shape: ::core::convert::Into<#private::Grid>>);
            [launch_tuned, quote!(mut #parameter), generics, quote!(&mut #grid,), quote!(#grid(self))]
        }
        Some(_) => {
            let launch_tuned = quote! {
                /// Launches the kernel with the best known configuration for these arguments.
                ///
                /// # Errors
                /// As for `launch`; with tuning enabled, also if no configuration runs.
                #[allow(dead_code)]
                #vis fn launch_tuned(&mut self, #device: &#private::Device) -> #private::Result<()> {
                    self.launch_tuned_with(#device, &#private::LaunchConfig::default())
                }
            };
            [launch_tuned, quote!(), quote!(), quote!(), quote!(0)]
        }
    }
}

/// The static, and the methods of the argument struct.
fn launch(f: &ItemFn, signature: &Signature, autotune: &Autotune) -> TokenStream {
    let private = private();
    let lang = quote!(#private::lang);
    let vis = &f.vis;
    let name = format_ident!("{}", pascal_case(&f.sig.ident.to_string()), span = f.sig.ident.span());
    let static_name = format_ident!("{}_AUTOTUNE", def_name(f));
    let definition = definition(f, signature, autotune, &static_name);
    let Lists { lifetime, params, names, bindings, args, keys: _, values } = Lists::of(signature);
    let own_grid = Grid::of(f);
    let [device, config, grid, chosen, argument_list, value_list, choice, error] =
        ["device", "config", "grid", "chosen", "args", "values", "choice", "error"].map(hygienic);
    let key = KeyTokens::of(signature, autotune);
    let (bind_key, key_words, key_parts) = (&key.bindings, &key.words, &key.parts);
    let set = setters(signature, autotune, &chosen);
    let [launch_tuned, parameter, generics, closure, launch_grid] = grid_tokens(vis, own_grid.as_ref(), &device, &grid);
    let grid_parameter = own_grid.is_none().then(|| quote!(#grid: &mut impl ::core::ops::FnMut(&mut Self) -> Shape,));
    let candidate_grid = match &own_grid {
        None => quote!(let #grid = #grid(self).into(); #bindings),
        Some(own) => {
            let value = own.typed(signature);
            quote!(#bindings let #grid = #value;)
        }
    };
    quote! {
        #definition

        #[allow(non_snake_case, unused_parens)]
        impl<#lifetime #(#params),*> #name<#lifetime #(#names),*> {
            /// The configurations, and the key on which the best one depends.
            #vis const AUTOTUNE: &'static #private::autotune::Autotune = &#static_name;

            #launch_tuned

            /// As `launch_tuned`, with options. Their grid, warps and stages are ignored; their registers and schedule
            /// apply where the configuration sets none.
            ///
            /// # Errors
            /// As for `launch_tuned`.
            #[allow(dead_code)]
            #vis fn launch_tuned_with #generics(
                &mut self,
                #device: &#private::Device,
                #config: &#private::LaunchConfig,
                #parameter
            ) -> #private::Result<()> {
                let mut #choice = self.choose(#device, #config, #closure)?;
                loop {
                    self.set_configuration(&#choice.config)?;
                    let #chosen = #choice.config.launch_config(#config, #launch_grid);
                    match self.launch_with(#device, &#chosen) {
                        ::core::result::Result::Ok(()) => return ::core::result::Result::Ok(()),
                        ::core::result::Result::Err(#error) => #choice = #choice.fallback(#error)?,
                    }
                }
            }

            /// The configuration that `launch_tuned_with` would use, and its source. Launches nothing except for
            /// tuning, if it is enabled.
            ///
            /// # Errors
            /// As for `launch_tuned`.
            #[allow(dead_code, unused_variables)]
            #vis fn choose #generics(
                &mut self,
                #device: &#private::Device,
                #config: &#private::LaunchConfig,
                #grid_parameter
            ) -> #private::Result<::std::sync::Arc<#private::autotune::Choice>> {
                #bindings
                #(#bind_key)*
                #private::autotune::choose(
                    Self::AUTOTUNE,
                    #device,
                    #config,
                    &[#(<#names as #lang::Dtype>::dtype()),*],
                    &[#(#key_words),*],
                    &|| ::std::vec![#(#key_parts),*],
                    &mut |#chosen| {
                        self.set_configuration(#chosen)?;
                        #candidate_grid
                        let #value_list = ::std::vec![#(#values),*];
                        let #argument_list = [#(#args),*];
                        ::core::result::Result::Ok(#private::autotune::CandidateLaunch::new(
                            Self::DEF,
                            #grid,
                            #value_list,
                            &#argument_list,
                        ))
                    },
                )
            }

            /// Sets the constants of a configuration.
            ///
            /// # Errors
            /// A value that does not have the constant's type.
            #[allow(dead_code)]
            #vis fn set_configuration(&mut self, #chosen: &#private::autotune::Config) -> #private::Result<()> {
                #(#set)*
                ::core::result::Result::Ok(())
            }
        }
    }
}
