//! Expands the host side of a kernel: the struct of its arguments, with `launch`.

use super::body::hygienic;
use super::private;
use super::values::{Grid, typed_heuristic};
use crate::parse::kernel::{Access, Generic, Origin, Param, ParamKind, Signature, Tensor};
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
    /// Statements that bind the constants, and the strides and extents of tensors, to variables with their names.
    pub bindings: TokenStream,
    /// A `KernelArg` per parameter that is passed at a launch.
    pub args: Vec<TokenStream>,
    /// For each constant: its key and its value.
    pub keys: Vec<TokenStream>,
    pub values: Vec<TokenStream>,
}

impl Lists<'_> {
    pub fn of(signature: &Signature) -> Lists<'_> {
        let private = private();
        let lang = quote!(#private::lang);
        let (mut args, mut keys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        for p in &signature.params {
            let (name, field, ty) = (&p.name, p.field(), &p.ty);
            let elem = super::kernel::element_type(ty);
            let kernel_arg = quote!(#private::kernel::KernelArg);
            match (&p.kind, &p.origin) {
                (ParamKind::Memory(access, _), _) => {
                    let arg = |memory: TokenStream| match access {
                        Access::In => quote!(#kernel_arg::input::<#elem>(#memory)),
                        Access::Out | Access::InOut => quote!(#kernel_arg::output::<#elem>(&mut *#memory)),
                    };
                    let arg = match (&p.given, access) {
                        (None, _) => arg(quote!(self.#field)),
                        (Some(_), Access::In) => optional_arg(quote!(self.#field), arg(quote!(memory))),
                        (Some(_), _) => optional_arg(quote!(&mut self.#field), arg(quote!(*memory))),
                    };
                    args.push(arg);
                }
                (ParamKind::Scalar(_), Origin::Dim) => {
                    args.push(quote!(#private::kernel::KernelArg::scalar(#name as #ty)));
                }
                (ParamKind::Scalar(_), Origin::Stride) => args.push(quote!(#private::kernel::KernelArg::scalar(#name))),
                (ParamKind::Scalar(_), _) => args.push(quote!(#private::kernel::KernelArg::scalar(self.#field))),
                (ParamKind::Constexpr(_), origin) => {
                    let value = match origin {
                        Origin::Dim => quote!(#name as #ty),
                        _ => name.to_token_stream(),
                    };
                    keys.push(quote!(#lang::kernel::Constexpr::key(#value)));
                    values.push(quote!(#lang::kernel::Constexpr::to_const(#value)));
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
            bindings: bindings(signature),
            args,
            keys,
            values,
        }
    }
}

/// The argument for memory that may be left out; `given` is the one for `memory`.
fn optional_arg(field: TokenStream, given: TokenStream) -> TokenStream {
    let private = private();
    quote! {
        match #field {
            ::core::option::Option::Some(memory) => #given,
            ::core::option::Option::None => #private::kernel::KernelArg::Absent,
        }
    }
}

/// Statements that bind values of the arguments to variables with the parameters' names.
fn bindings(signature: &Signature) -> TokenStream {
    let private = private();
    let constants = signature.params.iter().filter(|p| matches!(p.kind, ParamKind::Constexpr(_)));
    let constants: Vec<&Param> = constants.filter(|p| matches!(p.origin, Origin::Field)).collect();
    let (names, fields) = (constants.iter().map(|p| &p.name), constants.iter().map(|p| p.field()));
    let constants = quote!(let (#(#names,)*) = (#(self.#fields,)*););
    let tensor = |t: &Tensor, function: TokenStream| {
        let p = &signature.params[t.memory];
        let (field, elem, rank) = (p.field(), super::kernel::element_type(&p.ty), t.dims.len());
        let call = quote!(#private::kernel::InputTensor::<#elem, #rank>::#function);
        match p.given {
            Some(_) => quote!(self.#field.as_ref().map(|tensor| #call(&**tensor))),
            None => quote!(#call(&*self.#field)),
        }
    };
    let is_optional = |t: &Tensor| signature.params[t.memory].given.is_some();
    let shapes = signature.tensors.iter().map(|t| {
        let shape = tensor(t, quote!(shape));
        if is_optional(t) { quote!(#shape.as_slice().as_flattened()) } else { quote!(&#shape[..]) }
    });
    let dims = &signature.dims;
    let dims = (!dims.is_empty())
        .then(|| quote!(let [#(#dims),*] = #private::kernel::tensor_dims(Self::DEF, &[#(#shapes),*])?;));
    let strides = signature.tensors.iter().map(|t| {
        let (names, strides) = (t.strides.iter().map(|&n| &signature.params[n].name), tensor(t, quote!(strides)));
        let rank = t.dims.len();
        let strides = if is_optional(t) { quote!(#strides.unwrap_or([0; #rank])) } else { strides };
        quote!(let [#(#names),*] = #strides;)
    });
    let given = signature.params.iter().filter_map(|p| match p.origin {
        Origin::Given(memory) => {
            let (name, field) = (&p.name, signature.params[memory].field());
            Some(quote!(let #name = self.#field.is_some();))
        }
        _ => None,
    });
    let heuristics = signature.params.iter().filter_map(|p| match &p.origin {
        Origin::Heuristic(expr) => {
            let (name, value) = (&p.name, typed_heuristic(p, expr, signature));
            Some(quote!(let #name = #value;))
        }
        _ => None,
    });
    quote!(#constants #dims #(#strides)* #(#given)* #(#heuristics)*)
}

/// The fields of the argument struct for parameters that `include` selects, and for all tuples.
pub fn fields(signature: &Signature, vis: &Visibility, include: impl Fn(&Param) -> bool) -> Vec<TokenStream> {
    let own = signature.params.iter().filter(|p| p.place.is_none() && include(p)).filter_map(|p| {
        let (name, docs, ty) = (&p.name, &p.docs, field_type(p, signature)?);
        Some(quote!(#(#docs)* #vis #name: #ty))
    });
    let tuples = signature.tuples.iter().map(|tuple| {
        let (name, docs) = (&tuple.name, &tuple.docs);
        let ty = tuple.tokens(&|member| {
            let p = signature.params.iter().find(|p| p.name == *member);
            p.and_then(|p| field_type(p, signature)).unwrap_or_default()
        });
        quote!(#(#docs)* #vis #name: #ty)
    });
    own.chain(tuples).collect()
}

/// The type of a parameter's field, if it has one.
fn field_type(p: &Param, signature: &Signature) -> Option<TokenStream> {
    let private = private();
    let ty = &p.ty;
    let rank = match p.origin {
        Origin::Tensor(t) => Some(signature.tensors[t].dims.len()),
        Origin::Field => None,
        Origin::Stride | Origin::Dim | Origin::Given(_) | Origin::Heuristic(_) => return None,
    };
    let ty = match &p.kind {
        ParamKind::Memory(access, _) => {
            let elem = super::kernel::element_type(ty);
            match (access, rank) {
                (Access::In, None) => quote!(&'a dyn #private::kernel::Input<#elem>),
                (Access::Out | Access::InOut, None) => quote!(&'a mut dyn #private::kernel::Output<#elem>),
                (Access::In, Some(rank)) => quote!(&'a dyn #private::kernel::InputTensor<#elem, #rank>),
                (Access::Out | Access::InOut, Some(rank)) => {
                    quote!(&'a mut dyn #private::kernel::OutputTensor<#elem, #rank>)
                }
            }
        }
        ParamKind::Scalar(_) | ParamKind::Constexpr(_) => ty.to_token_stream(),
    };
    Some(if p.given.is_some() { quote!(::core::option::Option<#ty>) } else { ty })
}

/// The struct and its methods. `def` is the static with the kernel's definition.
pub fn arguments(f: &ItemFn, signature: &Signature, grid: Option<&Grid>, def: &Ident) -> TokenStream {
    let private = private();
    let lang = quote!(#private::lang);
    let vis = &f.vis;
    let name = format_ident!("{}", pascal_case(&f.sig.ident.to_string()), span = f.sig.ident.span());
    let docs: Vec<_> = f.attrs.iter().filter(|a| a.path().is_ident("doc")).collect();
    let Lists { lifetime, params, names, bindings, args, keys, values } = Lists::of(signature);
    let fields = fields(signature, vis, |_| true);
    let summary = format!("Arguments of the kernel `{}`, by name.", f.sig.ident);
    let paragraph = (!docs.is_empty()).then(|| quote!(#[doc = ""]));
    // Parameters keep the user's names, so generated names need other hygiene.
    let [key_list, value_list, consts, arg_list, device, config, shape] =
        ["keys", "values", "consts", "args", "device", "config", "grid"].map(hygienic);
    let with_grid = grid.map(|grid| {
        let grid = grid.typed(signature);
        quote!(let #config = &#private::LaunchConfig { grid: #grid, ..#config.clone() };)
    });
    let start = |function: TokenStream| {
        quote! {
            #bindings
            #with_grid
            let #key_list = [#(#keys),*];
            let #value_list = || ::std::vec![#(#values),*];
            let #consts = #private::kernel::Consts { keys: &#key_list, values: &#value_list };
            let mut #arg_list = [#(#args),*];
            #function(Self::DEF, #device, #config, &[#(<#names as #lang::Dtype>::dtype()),*], &mut #arg_list, #consts)
        }
    };
    let launch_with = start(quote!(#private::kernel::launch));
    let prepare = start(quote!(#private::kernel::prepare));
    let launch = match grid {
        None => quote! {
            /// Launches the kernel on `grid` program instances, with the compiler's default options. On a GPU the
            /// launch is asynchronous; on the CPU it is complete when this returns.
            ///
            /// # Errors
            /// Errors in the kernel, arguments on another device, and all errors of a launch.
            #[allow(dead_code)]
            #vis fn launch(
                &mut self,
                #device: &#private::Device,
                #shape: impl ::core::convert::Into<#private::Grid>,
            ) -> #private::Result<()> {
                self.launch_with(#device, &#private::LaunchConfig::new(#shape))
            }
        },
        Some(_) => quote! {
            /// Launches the kernel on its grid, with the compiler's default options. On a GPU the launch is
            /// asynchronous; on the CPU it is complete when this returns.
            ///
            /// # Errors
            /// Errors in the kernel, tensors whose extents do not match, arguments on another device, and all errors of
            /// a launch.
            #[allow(dead_code)]
            #vis fn launch(&mut self, #device: &#private::Device) -> #private::Result<()> {
                self.launch_with(#device, &#private::LaunchConfig::default())
            }
        },
    };
    let options = match grid {
        None => "As `launch`, with options.",
        Some(_) => "As `launch`, with options. Their grid is ignored.",
    };
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

            #launch

            #[doc = #options]
            ///
            /// # Errors
            /// As for `launch`.
            #[allow(dead_code, unused_variables)]
            #vis fn launch_with(
                &mut self,
                #device: &#private::Device,
                #config: &#private::LaunchConfig,
            ) -> #private::Result<()> {
                #launch_with
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
            #[allow(dead_code, unused_variables)]
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
