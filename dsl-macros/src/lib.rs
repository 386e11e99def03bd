//! `#[kernel]` and `#[device_fn]`: the syntax of the language.
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
/// (a `KernelDef`: name, parameters, how to record it) and the struct `Scale` (the typed arguments, with `launch`).
#[proc_macro_attribute]
pub fn kernel(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::kernel::expand(attribute.into(), item.into()).into()
}

/// Makes a function callable from kernels: its body gets the same operators, control flow and named arguments. Types in
/// its signature mean what they say: `Tile<f32>`, `Scalar<i32>`, `Ptr<T>`, and `usize` for numbers that are known when the
/// kernel is specialised.
#[proc_macro_attribute]
pub fn device_fn(attribute: TokenStream, item: TokenStream) -> TokenStream {
    expand::device_fn::expand(attribute.into(), item.into()).into()
}
