//! The attribute macros `#[kernel]`, `#[autotune]` and `#[device_fn]`: the syntax of the language.
//!
//! The macros only handle syntax. They rewrite operators, control flow and named arguments to calls of the language
//! module, and leave names, types and shapes to rustc and to the recorder. `parse/` parses the user's code, `expand/`
//! generates code; files with the same name belong together.

mod expand;
mod parse;

use proc_macro::TokenStream;

/// Turns a function into a kernel.
///
/// For `pub fn scale<T: Float>(x: In<T>, y: Out<T>, n: i32, #[constexpr] tile: usize) { … }`, generates the static
/// `SCALE` (a `KernelDef`: name, parameters, how to record it) and the struct `Scale` (the typed arguments, with
/// `launch`). If constants have defaults, also generates `ScaleRequired`: the arguments without defaults.
///
/// `#[alias(former_name, former = parameter)]` below `#[kernel]` gives former names of the kernel and of its
/// parameters: command lines, tuning tables and constants that are given by name may still use them.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::kernel::expand(attribute.into(), item.into()).into()
}

/// Lists configurations of a kernel, of which a launch uses the best one known: `#[autotune(configs = [Config(tile =
/// 64, num_warps = 4), …], key = [n, …])]` above `#[kernel]`.
///
/// A `Config` sets `#[constexpr]` parameters and `num_warps`, `num_ctas`, `num_stages`, `max_registers`, `tma`,
/// `warp_specialize`, `pingpong`, `overlap`, `wgmma_f32` and `tma_stores`. The key names the arguments on which the best configuration
/// depends: integer arguments by size (the next power of two), constants and bools by value; element types are always
/// part of it.
/// `default = function` names a function from the problem to the configuration to use without measurements; without it,
/// the first configuration is used. `tables = TEXTS` gives tables that ship with the kernel.
///
/// `configs = OTHER_AUTOTUNE` reuses the configurations of the kernel `other`, whose constants have the same names.
///
/// For a kernel `scale`, generates the static `SCALE_AUTOTUNE`, and `launch_tuned` of the struct `Scale`.
#[proc_macro_attribute]
pub fn autotune(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::autotune::expand(attribute.into(), item.into()).into()
}

/// Makes a function callable from kernels: its body has the same operators, control flow and named arguments. Its
/// signature uses handle types, such as `Tile<f32>`, `Scalar<i32>` and `Ptr<T>`, and `usize` for numbers that are known
/// when the kernel is specialized.
#[proc_macro_attribute]
pub fn device_fn(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::device_fn::expand(attribute.into(), item.into()).into()
}

/// Makes a struct with named fields a value of kernel code, which loops and branches carry: its fields are tiles, scalars,
/// pointers, blocks, or tuples, arrays and aggregates of these. Fields that are marked `#[constexpr]` are Rust numbers or
/// enums, known at specialization; a loop cannot change them. Methods are marked `#[device_fn]`.
///
/// ```text
/// #[aggregate]
/// struct Moments {
///     sum: Tile<f32>,
///     squares: Tile<f32>,
///     #[constexpr]
///     axis: usize,
/// }
///
/// impl Moments {
///     #[device_fn]
///     fn mean(self, n: Scalar<f32>) -> Tile<f32> {
///         sum(self.sum, axis = self.axis) / n
///     }
/// }
/// ```
#[proc_macro_attribute]
pub fn aggregate(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::aggregate::expand(attribute.into(), item.into()).into()
}
