//! Formatting of types and shapes for messages, without names internal to the compiler.

use crate::ir::{Elem, Type};

/// `[64, 128]`, or `a scalar` without dimensions.
pub(crate) fn shape(shape: &[usize]) -> String {
    if shape.is_empty() { "a scalar".into() } else { format!("{shape:?}") }
}

/// `f32 tile of shape [64, 128]`, `i32 scalar`, `pointer to f16`, `block pointer to f16 of block shape [64, 64]`.
pub(crate) fn ty(ty: &Type) -> String {
    match ty {
        Type::Scalar(Elem::Num(d)) => format!("{d} scalar"),
        Type::Scalar(Elem::Ptr(d)) => format!("pointer to {d}"),
        Type::Tensor { shape, elem: Elem::Num(d), .. } => format!("{d} tile of shape {shape:?}"),
        Type::Tensor { shape, elem: Elem::Ptr(d), .. } => format!("tile of pointers to {d} of shape {shape:?}"),
        Type::View { block, elem } => format!("block pointer to {elem} of block shape {block:?}"),
        other => format!("value of type {other}"),
    }
}

/// The text with its indefinite article: "an f32 tile", "a bf16 tile".
pub(crate) fn with_article(words: &str) -> String {
    let starts_with_vowel_sound = words.starts_with(['f', 'i']) && words[1..].starts_with(|c: char| c.is_ascii_digit());
    format!("{} {words}", if starts_with_vowel_sound { "an" } else { "a" })
}
