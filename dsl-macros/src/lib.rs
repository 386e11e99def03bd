//! `#[kernel]`, `#[autotune]` and `#[device_fn]`: the syntax of the language.
//!
//! These macros know syntax only. They rewrite operators, control flow and named arguments into calls of the language
//! module, and leave names, types and shapes to rustc and to the recorder. `parse/` reads what the user wrote, `expand/`
//! writes what it means; files of the same name belong together.

mod expand;
mod parse;

use proc_macro::TokenStream;

/// Makes a kernel of a function.
///
/// Of `pub fn scale<T: Float>(x: In<T>, y: Out<T>, n: i32, #[constexpr] tile: usize) { … }` it makes the static `SCALE`
/// (a `KernelDef`: name, parameters, how to record it) and the struct `Scale` (the typed arguments, with `launch`). Where
/// constants have defaults, also `ScaleRequired`: the arguments without them.
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::kernel::expand(attribute.into(), item.into()).into()
}

/// Lists configurations of a kernel, of which a launch takes the best that is known:
/// `#[autotune(configs = [Config(tile = 64, num_warps = 4), …], key = [n, …])]` above `#[kernel]`.
///
/// A `Config` gives values to `#[constexpr]` parameters and to `num_warps`, `num_stages`, `max_registers`,
/// `bulk_copies`, `warp_specialize`, `take_turns`, `overlap` and `wgmma_f32`. The key names the
/// arguments on which the choice depends: integer arguments by their size, the power of two at or above them; constants by
/// their value; element types always count. `default = function` names a function from the problem to the configuration for
/// what nobody has measured, which is the first one otherwise; `tables = TEXTS`, tables that ship with the kernel.
///
/// `configs = OTHER_AUTOTUNE` takes over those of the kernel `other`, which chooses constants of the same names.
///
/// Of a kernel `scale` it makes the static `SCALE_AUTOTUNE`, and `launch_tuned` of the struct `Scale`.
#[proc_macro_attribute]
pub fn autotune(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::autotune::expand(attribute.into(), item.into()).into()
}

/// Makes a function callable from kernels: its body gets the same operators, control flow and named arguments. Types in
/// its signature mean what they say: `Tile<f32>`, `Scalar<i32>`, `Ptr<T>`, and `usize` for numbers that are known when the
/// kernel is specialised.
#[proc_macro_attribute]
pub fn device_fn(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::device_fn::expand(attribute.into(), item.into()).into()
}
