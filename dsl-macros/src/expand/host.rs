//! Expands the host side of a kernel: the struct of its arguments, with `launch`.

use super::body::hygienic;
use super::private;
use crate::parse::kernel::{Access, Generic, Param, ParamKind, Signature};
use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, format_ident, quote};
use syn::{ItemFn, Visibility};

/// `weighted_sum_fwd` → `WeightedSumFwd`.
pub fn pascal_case(name: &str) -> String {
    name.split('_')
        .map(|word| {
            let mut letters = word.chars();
            letters.next().map_or(String::new(), |first| first.to_uppercase().chain(letters).collect())
        })
        .collect()
}

/// Token lists from which the methods of the struct are generated.
pub struct Lists<'s> {
    /// `'a,` if a parameter is memory.
    pub lifetime: Option<TokenStream>,
    /// Type parameters with and without their bounds.
    pub params: Vec<TokenStream>,
    pub names: Vec<&'s Ident>,
    /// A `KernelArg` per parameter that is passed at a launch.
    pub args: Vec<TokenStream>,
    /// For each constant: its key, its value from a variable with the constant's name, and its name.
    pub keys: Vec<TokenStream>,
    pub values: Vec<TokenStream>,
    pub constants: Vec<&'s Ident>,
}

impl Lists<'_> {
    pub fn of(signature: &Signature) -> Lists<'_> {
        let private = private();
        let lang = quote!(#private::lang);
        let (mut args, mut keys, mut values, mut constants) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for p in &signature.params {
            let field = &p.name;
            match &p.kind {
                ParamKind::Memory(Access::In, _) => args.push(quote!(#private::kernel::KernelArg::input(self.#field))),
                ParamKind::Memory(Access::Out | Access::InOut, _) => {
                    args.push(quote!(#private::kernel::KernelArg::output(&mut *self.#field)));
                }
                ParamKind::Scalar(_) => args.push(quote!(#private::kernel::KernelArg::scalar(self.#field))),
                ParamKind::Constexpr(_) => {
                    keys.push(quote!(#lang::kernel::Constexpr::key(self.#field)));
                    values.push(quote!(#lang::kernel::Constexpr::to_const(#field)));
                    constants.push(field);
                }
            }
        }
        let has_memory = signature.params.iter().any(|p| matches!(p.kind, ParamKind::Memory(..)));
        let bounded = |g: &Generic| {
            let (name, bound) = (&g.name, &g.bound);
            quote!(#name: #lang::#bound + #private::Element)
        };
        Lists {
            lifetime: has_memory.then(|| quote!('a,)),
            params: signature.generics.iter().map(bounded).collect(),
            names: signature.generics.iter().map(|g| &g.name).collect(),
            args,
            keys,
            values,
            constants,
        }
    }
}

/// The field of a parameter.
pub fn field(p: &Param, vis: &Visibility) -> TokenStream {
    let private = private();
    let (field, ty, docs) = (&p.name, &p.ty, &p.docs);
    let field_type = match &p.kind {
        ParamKind::Memory(access, _) => {
            let elem = super::kernel::element_type(ty);
            match access {
                Access::In => quote!(&'a dyn #private::kernel::Input<#elem>),
                Access::Out | Access::InOut => quote!(&'a mut dyn #private::kernel::Output<#elem>),
            }
        }
        ParamKind::Scalar(_) | ParamKind::Constexpr(_) => ty.to_token_stream(),
    };
    quote!(#(#docs)* #vis #field: #field_type)
}

/// The struct and its methods. `def` is the static with the kernel's definition.
pub fn arguments(f: &ItemFn, signature: &Signature, def: &Ident) -> TokenStream {
    let private = private();
    let lang = quote!(#private::lang);
    let vis = &f.vis;
    let name = format_ident!("{}", pascal_case(&f.sig.ident.to_string()), span = f.sig.ident.span());
    let docs: Vec<_> = f.attrs.iter().filter(|a| a.path().is_ident("doc")).collect();
    let Lists { lifetime, params, names, args, keys, values, constants } = Lists::of(signature);
    let fields = signature.params.iter().map(|p| field(p, vis));
    let summary = format!("Arguments of the kernel `{}`, by name.", f.sig.ident);
    let paragraph = (!docs.is_empty()).then(|| quote!(#[doc = ""]));
    // Constants keep the user's names, so generated names need other hygiene.
    let [key_list, value_list, consts, arg_list, device, config, grid] =
        ["keys", "values", "consts", "args", "device", "config", "grid"].map(hygienic);
    let start = |function: TokenStream| {
        quote! {
            let #key_list = [#(#keys),*];
            let (#(#constants,)*) = (#(self.#constants,)*);
            let #value_list = || ::std::vec![#(#values),*];
            let #consts = #private::kernel::Consts { keys: &#key_list, values: &#value_list };
            let mut #arg_list = [#(#args),*];
            #function(Self::DEF, #device, #config, &[#(<#names as #lang::Dtype>::dtype()),*], &mut #arg_list, #consts)
        }
    };
    let launch = start(quote!(#private::kernel::launch));
    let prepare = start(quote!(#private::kernel::prepare));
    quote! {
        #[doc = #summary]
        #paragraph
        #(#docs)*
        #[allow(non_snake_case, dead_code)]
        #vis struct #name<#lifetime #(#params),*> { #(#fields),* }

        #[allow(non_snake_case, unused_parens)]
        impl<#lifetime #(#params),*> #name<#lifetime #(#names),*> {
            /// The kernel's definition: its parameters, and how to record it.
            #vis const DEF: &'static #lang::kernel::KernelDef = &#def;

            /// Launches the kernel on `grid` program instances, with the compiler's default options. On a GPU the
            /// launch is asynchronous; on the CPU it is complete when this returns.
            ///
            /// # Errors
            /// Errors in the kernel, arguments on another device, and all errors of a launch.
            #[allow(dead_code)]
            #vis fn launch(
                &mut self,
                #device: &#private::Device,
                #grid: impl ::core::convert::Into<#private::Grid>,
            ) -> #private::Result<()> {
                self.launch_with(#device, &#private::LaunchConfig::new(#grid))
            }

            /// As `launch`, with options.
            ///
            /// # Errors
            /// As for `launch`.
            #[allow(dead_code)]
            #vis fn launch_with(
                &mut self,
                #device: &#private::Device,
                #config: &#private::LaunchConfig,
            ) -> #private::Result<()> {
                #launch
            }

            /// A compilation of the kernel ahead of time for a GPU (`GpuArch`) or a CPU (`HostCpu`).
            #[allow(dead_code)]
            #vis fn compile_for(
                #device: impl ::core::convert::Into<#private::Target>,
            ) -> #private::AheadOfTime {
                #private::AheadOfTime::new(Self::DEF, &[#(<#names as #lang::Dtype>::dtype()),*], #device)
            }

            /// Compiles the variant that `launch_with` would launch, without launching it.
            ///
            /// # Errors
            /// As for `launch`.
            #[allow(dead_code)]
            #vis fn compile(
                &mut self,
                #device: &#private::Device,
                #config: &#private::LaunchConfig,
            ) -> #private::Result<#private::CompiledKernel> {
                #prepare
            }
        }
    }
}
