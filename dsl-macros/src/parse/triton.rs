//! Detects Triton syntax, and suggests what to write instead.
//!
//! Some of it is not valid Rust (`x[:, None]`, `where(…)`). rustc reports its own syntax error first; attribute macros
//! still get the tokens, so that the suggestion can be reported as well.

use super::calls::function;
use proc_macro2::{Delimiter, Group, Ident, Span, TokenStream, TokenTree};
use quote::ToTokens;
use std::collections::HashSet;
use syn::visit::{self, Visit};
use syn::{Error, Expr, Member, PatIdent};

/// Functions of the language without named arguments, which [`function`] does not list.
const PLAIN: &[&str] = &[
    "abs", "ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sigmoid", "sin", "sqrt", "sqrt_rn",
    "tanh",
];

/// Element types: Triton's name, and Rust's.
const TYPES: &[(&str, &str)] = &[
    ("float16", "f16"),
    ("bfloat16", "bf16"),
    ("float32", "f32"),
    ("float64", "f64"),
    ("float8e4nv", "F8E4M3"),
    ("float8e5", "F8E5M2"),
    ("int1", "bool"),
    ("int8", "i8"),
    ("int16", "i16"),
    ("int32", "i32"),
    ("int64", "i64"),
    ("uint8", "u8"),
    ("uint16", "u16"),
    ("uint32", "u32"),
    ("uint64", "u64"),
];

/// Triton's modules, and Python modules that are used with them.
const MODULES: &[&str] = &["tl", "triton", "libdevice", "math", "torch"];

/// Names that the patterns of the code bind.
pub fn bound(block: &syn::Block, inputs: impl IntoIterator<Item = syn::FnArg>) -> HashSet<String> {
    struct Names(HashSet<String>);
    impl Visit<'_> for Names {
        fn visit_pat_ident(&mut self, pat: &PatIdent) {
            self.0.insert(pat.ident.to_string());
            visit::visit_pat_ident(self, pat);
        }
    }
    let mut names = Names(HashSet::new());
    names.visit_block(block);
    inputs.into_iter().for_each(|input| names.visit_fn_arg(&input));
    names.0
}

/// The module `tl` at the start of `tl.sum`, `tl.math.exp` or `tl.float32`.
pub fn module(expr: &Expr) -> Option<&Ident> {
    match expr {
        Expr::Path(path) => path.path.get_ident().filter(|name| MODULES.iter().any(|module| name == module)),
        Expr::Field(field) => module(&field.base),
        _ => None,
    }
}

/// The suggestion for `tl.name(arguments)`.
pub fn call(name: &Ident, args: &[&Expr], source: Option<String>) -> String {
    let text = name.to_string();
    let dtype = |arg: &&Expr| match named(arg, "dtype") {
        Some(value) => type_name(value),
        None => matches!(arg, Expr::Field(_)).then(|| type_name(arg)).flatten(),
    };
    let element = || args.iter().find_map(dtype).unwrap_or_else(|| "f32".into());
    match text.as_str() {
        "zeros" | "ones" | "empty" => {
            let text = if text == "empty" { "zeros" } else { &text };
            format!(
                "write `{text}::<{}>([…])`: names are plain functions here, and the element type comes first",
                element()
            )
        }
        "full" => format!(
            "write `full::<{}>([…], value)`: names are plain functions here, and the element type comes first",
            element()
        ),
        "cast" => {
            let to = args.get(1).and_then(|arg| type_name(named(arg, "dtype").unwrap_or(arg)));
            format!("write `.to::<{}>()`", to.unwrap_or_else(|| "f32".into()))
        }
        "debug_barrier" => "remove this: the compiler inserts barriers".into(),
        _ if function(name).is_some() || PLAIN.contains(&text.as_str()) => {
            let source =
                source.map(|args| args.replace("tl.", "")).filter(|args| args.len() < 60 && !args.contains('\n'));
            format!("names are plain functions here: write `{text}{}`", source.unwrap_or_else(|| "(…)".into()))
        }
        _ => format!("the language has no function `{text}`; names are plain functions here, as `sum(x, axis = 1)`"),
    }
}

/// The suggestion for `tl.float32`.
pub fn name(member: &Member) -> String {
    let text = member.to_token_stream().to_string();
    match TYPES.iter().find(|(triton, _)| *triton == text) {
        Some((_, rust)) => format!("the type is `{rust}` here, as in `.to::<{rust}>()`"),
        None => "names have no module prefix here: `sum(x, axis = 1)`, `f32`".into(),
    }
}

fn named<'a>(arg: &'a Expr, wanted: &str) -> Option<&'a Expr> {
    super::calls::named_argument(arg).filter(|(name, _)| *name == wanted).map(|(_, value)| value)
}

/// The Rust type that an expression such as `tl.float32` or `x.dtype.element_ty` stands for.
pub fn type_name(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Field(field) if module(&field.base).is_some() => {
            let text = field.member.to_token_stream().to_string();
            TYPES.iter().find(|(triton, _)| *triton == text).map(|(_, rust)| (*rust).to_string())
        }
        // The element type of a pointer or tile: the name of the kernel's type parameter is not known here.
        Expr::Field(_) => Some("T".into()),
        Expr::Path(path) => path.path.get_ident().map(Ident::to_string),
        _ => None,
    }
}

/// Errors for Triton syntax in the tokens of a function that does not parse; empty if none is recognized.
pub fn find_mistakes(tokens: TokenStream) -> Vec<Error> {
    let mut errors = Vec::new();
    scan(&tokens.clone().into_iter().collect::<Vec<_>>(), &mut errors);
    parameters(tokens, &mut errors);
    errors
}

fn scan(tokens: &[TokenTree], errors: &mut Vec<Error>) {
    for (i, token) in tokens.iter().enumerate() {
        let before = i.checked_sub(1).and_then(|i| tokens.get(i));
        let next = tokens.get(i + 1);
        match token {
            TokenTree::Ident(ident) if ident == "where" && is_group(next, Delimiter::Parenthesis) => {
                errors.push(Error::new(ident.span(), "`where` is a keyword of Rust: write `where_(condition, a, b)`"));
            }
            TokenTree::Ident(ident) if ident == "if" && before.is_some_and(is_value) && !has_arrow(&tokens[i..]) => {
                errors.push(Error::new(
                    ident.span(),
                    "`a if c else b` is `if c { a } else { b }` here, and `where_(c, a, b)` for tiles",
                ));
            }
            TokenTree::Ident(ident) if ident == "is" && before.is_some_and(is_value) && next.is_some_and(is_value) => {
                errors.push(Error::new(
                    ident.span(),
                    "there is no `None`: use a `#[constexpr] flag: bool`, as in `if flag { … }`",
                ));
            }
            TokenTree::Ident(ident)
                if ident == "not" && !before.is_some_and(is_value) && next.is_some_and(is_value) =>
            {
                errors.push(Error::new(ident.span(), "`not x` is `!x` here"));
            }
            TokenTree::Group(group) => match index(group) {
                Some(message) if before.is_some_and(is_value) => errors.push(Error::new(group.span(), message)),
                _ => scan(&group.stream().into_iter().collect::<Vec<_>>(), errors),
            },
            _ => {}
        }
    }
}

/// The suggestion for an index such as `[None, :]` or `[0:4]`; `None` if Rust has such an index.
fn index(group: &Group) -> Option<String> {
    if group.delimiter() != Delimiter::Bracket {
        return None;
    }
    let parts = comma_separated(group.stream());
    let is_none = |part: &[TokenTree]| matches!(part, [TokenTree::Ident(ident)] if ident == "None");
    let is_all = |part: &[TokenTree]| matches!(part, [TokenTree::Punct(p)] if p.as_char() == ':');
    if parts.iter().all(|part| is_none(part) || is_all(part)) && parts.iter().any(|part| is_all(part)) {
        let axes = parts.iter().enumerate().filter(|(_, part)| is_none(part));
        let calls: String = axes.map(|(axis, _)| format!(".expand_dims({axis})")).collect();
        return Some(match calls.is_empty() {
            true => "an index of full dimensions has no effect: remove it".into(),
            false => format!("write `{calls}`: tiles have no index syntax"),
        });
    }
    let slices = parts.iter().any(|part| {
        part.iter().any(
            |t| matches!(t, TokenTree::Punct(p) if p.as_char() == ':' && p.spacing() == proc_macro2::Spacing::Alone),
        )
    });
    slices.then(|| "tiles have no slices: load the part that you need".into())
}

fn comma_separated(tokens: TokenStream) -> Vec<Vec<TokenTree>> {
    let mut parts = vec![Vec::new()];
    for token in tokens {
        match &token {
            TokenTree::Punct(p) if p.as_char() == ',' => parts.push(Vec::new()),
            _ => parts.last_mut().unwrap_or_else(|| unreachable!("internal error: no part")).push(token),
        }
    }
    if parts.last().is_some_and(Vec::is_empty) {
        parts.pop();
    }
    parts
}

fn is_group(token: Option<&TokenTree>, delimiter: Delimiter) -> bool {
    matches!(token, Some(TokenTree::Group(group)) if group.delimiter() == delimiter)
}

/// Whether an expression may end with this token.
fn is_value(token: &TokenTree) -> bool {
    const KEYWORDS: [&str; 8] = ["else", "return", "in", "if", "match", "while", "mut", "let"];
    match token {
        TokenTree::Ident(ident) => !KEYWORDS.iter().any(|word| ident == word),
        TokenTree::Group(group) => group.delimiter() != Delimiter::Brace,
        TokenTree::Literal(_) => true,
        TokenTree::Punct(_) => false,
    }
}

/// Whether the tokens, up to the next `,` or `;`, contain `=>`: then they start with the guard of a `match` arm.
fn has_arrow(tokens: &[TokenTree]) -> bool {
    let end = tokens.iter().position(|t| matches!(t, TokenTree::Punct(p) if matches!(p.as_char(), ',' | ';')));
    let tokens = &tokens[..end.unwrap_or(tokens.len())];
    let punct = |t: &TokenTree, c: char| matches!(t, TokenTree::Punct(p) if p.as_char() == c);
    tokens.windows(2).any(|pair| punct(&pair[0], '=') && punct(&pair[1], '>'))
}

/// Reports parameters without a type, and `tl.constexpr`.
fn parameters(tokens: TokenStream, errors: &mut Vec<Error>) {
    let is_list = |t: &TokenTree| is_group(Some(t), Delimiter::Parenthesis);
    let Some(TokenTree::Group(list)) = tokens.into_iter().skip_while(|t| !is_fn(t)).find(is_list) else {
        return;
    };
    for part in comma_separated(list.stream()) {
        let is_colon = |t: &TokenTree| matches!(t, TokenTree::Punct(p) if p.as_char() == ':');
        let colon = part.iter().position(is_colon);
        match (&part[..], colon) {
            ([TokenTree::Ident(name), ..], None) if part.len() == 1 || is_punct(&part[1], '=') => errors.push(Error::new(
                name.span(),
                format!(
                    "a parameter needs a type: `{name}: In<f32>` or `Out<f32>` for memory, `{name}: i32` for a number, \
                     `#[constexpr] {name}: usize` for a constant known at specialization"
                ),
            )),
            ([TokenTree::Ident(name), ..], Some(at)) => {
                if let Some(span) = triton_constexpr(&part[at + 1..]) {
                    errors.push(Error::new(span, format!("write `#[constexpr] {name}: usize`")));
                }
            }
            _ => {}
        }
    }
}

fn is_fn(token: &TokenTree) -> bool {
    matches!(token, TokenTree::Ident(ident) if ident == "fn")
}

fn is_punct(token: &TokenTree, c: char) -> bool {
    matches!(token, TokenTree::Punct(p) if p.as_char() == c)
}

/// The span of `tl.constexpr`.
fn triton_constexpr(ty: &[TokenTree]) -> Option<Span> {
    match ty {
        [TokenTree::Ident(module), dot, TokenTree::Ident(name), ..] if is_punct(dot, '.') && name == "constexpr" => {
            Some(module.span())
        }
        _ => None,
    }
}
