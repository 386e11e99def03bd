//! Parses the arguments of `#[autotune]`.

use super::calls::named_argument;
use super::kernel::{self, Default, Elem, Generic, Origin, Param, ParamKind, Signature};
use super::schedule_names;
use proc_macro2::{Span, TokenStream, TokenTree};
use quote::ToTokens;
use syn::parse::Parser;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit_mut::{VisitMut, visit_expr_mut};
use syn::{Error, Expr, ExprArray, ExprCall, ExprPath, Ident, MetaNameValue, Token, parse_quote};

/// The arguments of `#[autotune]`, checked against the kernel's signature.
pub struct Autotune {
    /// The constants that every configuration sets, in the order of the first one.
    pub tuned: Vec<Ident>,
    pub configs: Vec<Config>,
    /// Instead of `tuned` and `configs`: the static of another kernel's configurations.
    pub shared: Option<ExprPath>,
    pub key: Vec<Key>,
    /// The function that says whether a configuration is worth measuring.
    pub keep: Option<Expr>,
    /// The function that computes the default configuration.
    pub default: Option<Expr>,
    /// The tables that ship with the kernel.
    pub tables: Option<Expr>,
}

/// Options of the compiler's schedule that a configuration may set, by the names of their fields.
pub const SCHEDULE_OPTIONS: [&str; 6] = ["tma", "warp_specialize", "pingpong", "overlap", "wgmma_f32", "tma_stores"];

pub struct Config {
    /// One per tuned constant.
    pub constants: Vec<Default>,
    pub num_warps: Option<u32>,
    pub num_ctas: Option<u32>,
    pub num_stages: Option<u32>,
    pub max_registers: Option<u32>,
    /// One per name of [`SCHEDULE_OPTIONS`].
    pub schedule_options: [Option<bool>; SCHEDULE_OPTIONS.len()],
}

/// An entry of the key.
pub struct Key {
    pub name: Ident,
    pub value: KeyValue,
}

/// What the key contains of an entry.
pub enum KeyValue {
    /// The size of an integer argument or of a tensor's extent: the next power of two.
    Size,
    /// The value of a bool argument.
    Bool,
    /// The value of a constant.
    Constant,
    /// The value of an expression of arguments, extents and constants, which is a bool or an integer.
    Expr(Expr),
}

const HELP: &str = "expected `#[autotune(configs = [Config(tile = 64, num_warps = 4), …], key = [n, …])]`";

/// Parses the arguments; collects all errors.
pub fn parse(attribute: TokenStream, signature: &Signature) -> (Option<Autotune>, Vec<Error>) {
    let pairs = match Punctuated::<MetaNameValue, Token![,]>::parse_terminated.parse2(attribute) {
        Ok(pairs) => pairs,
        Err(error) => return (None, vec![Error::new(error.span(), HELP)]),
    };
    let mut errors = Vec::new();
    let (mut configs, mut keep, mut key, mut default, mut tables) = (None, None, None, None, None);
    for pair in pairs {
        let slot = match pair.path.get_ident().map(Ident::to_string).as_deref() {
            Some("configs") => &mut configs,
            Some("keep") => &mut keep,
            Some("key") => &mut key,
            Some("default") => &mut default,
            Some("tables") => &mut tables,
            _ => {
                let message = "unknown argument: `#[autotune]` takes `configs`, `keep`, `key`, `default` and `tables`";
                errors.push(Error::new(pair.path.span(), message));
                continue;
            }
        };
        if slot.replace(pair.value).is_some() {
            errors.push(Error::new(pair.path.span(), "duplicate argument"));
        }
    }
    let shared = match &configs {
        Some(Expr::Path(path)) => Some(path.clone()),
        _ => None,
    };
    let (tuned, configs) = match &configs {
        Some(Expr::Path(_)) => (Vec::new(), Vec::new()),
        Some(list) => read_configs(list, signature, &mut errors),
        None => {
            errors.push(Error::new(Span::call_site(), format!("no configurations: {HELP}")));
            (Vec::new(), Vec::new())
        }
    };
    let key = match &key {
        Some(list) => read_key(list, &tuned, signature, &mut errors),
        None => Vec::new(),
    };
    let autotune = Autotune { tuned, configs, shared, keep, key, default, tables };
    (errors.is_empty().then_some(autotune), errors)
}

fn elements<'a>(list: &'a Expr, what: &str, errors: &mut Vec<Error>) -> Vec<&'a Expr> {
    match list {
        Expr::Array(array) => array.elems.iter().collect(),
        other => {
            errors.push(Error::new(other.span(), format!("{what} must be a list: {HELP}")));
            Vec::new()
        }
    }
}

/// The parameters that configurations can set.
pub fn constants(signature: &Signature) -> impl Iterator<Item = &Param> {
    let is_set = |p: &&Param| matches!(p.kind, ParamKind::Constexpr(_)) && matches!(p.origin, Origin::Field);
    signature.params.iter().filter(is_set)
}

fn names<'a>(params: impl Iterator<Item = &'a Param>) -> String {
    let names: Vec<String> = params.map(|p| p.name.to_string()).collect();
    if names.is_empty() { "none".into() } else { names.join(", ") }
}

fn read_configs(list: &Expr, signature: &Signature, errors: &mut Vec<Error>) -> (Vec<Ident>, Vec<Config>) {
    let list_span = list.span();
    let list = elements(list, "`configs`", errors);
    if list.is_empty() && errors.is_empty() {
        errors.push(Error::new(list_span, format!("no configurations: {HELP}")));
    }
    let tuned = tuned_constants(&list, signature);
    let mut configs = Vec::new();
    let mut texts = Vec::new();
    for expr in list {
        let Expr::Call(call) = expr else {
            errors
                .push(Error::new(expr.span(), "a configuration is `Config(tile = 64, num_warps = 4, num_stages = 2)`"));
            continue;
        };
        let is_config =
            matches!(&*call.func, Expr::Path(path) if path.path.segments.last().is_some_and(|s| s.ident == "Config"));
        if !is_config {
            let message = "a configuration is `Config(tile = 64, num_warps = 4, num_stages = 2)`";
            errors.push(Error::new(call.func.span(), message));
            continue;
        }
        let mut call = call.clone();
        if let Err(error) = expand_ranges(&mut call) {
            errors.push(error);
            continue;
        }
        let call = &call;
        let count = list_arguments(call).map(|(_, list)| list.elems.len()).product::<usize>();
        if count > MAX_COMBINATIONS {
            let message = format!("these lists expand to {count} configurations: {MAX_COMBINATIONS} is the maximum");
            errors.push(Error::new(call.func.span(), message));
            continue;
        }
        for call in combinations(call) {
            let known = errors.len();
            let config = read_config(&call, signature, &tuned, errors);
            // The other combinations have the same errors.
            if errors.len() > known {
                break;
            }
            let text = config.text();
            if texts.contains(&text) {
                errors.push(Error::new(call.func.span(), "duplicate configuration"));
                break;
            }
            texts.push(text);
            configs.push(config);
        }
    }
    (tuned, configs)
}

/// The constants that some configuration sets, in the order in which they appear.
fn tuned_constants(list: &[&Expr], signature: &Signature) -> Vec<Ident> {
    let calls = list.iter().filter_map(|expr| if let Expr::Call(call) = expr { Some(call) } else { None });
    let names = calls.flat_map(|call| call.args.iter().filter_map(|arg| Some(named_argument(arg)?.0.clone())));
    let mut tuned: Vec<Ident> = Vec::new();
    for name in names {
        if !tuned.contains(&name) && constants(signature).any(|p| p.name == name) {
            tuned.push(name);
        }
    }
    tuned
}

/// Maximum number of configurations that one `Config` with lists may expand to: a typo should not cause hours of
/// compilation.
const MAX_COMBINATIONS: usize = 256;

/// Replaces ranges by lists: `num_stages = 2..=4` has all numbers, other ranges the powers of two, `tile = 16..=128`.
fn expand_ranges(call: &mut ExprCall) -> Result<(), Error> {
    for arg in &mut call.args {
        let Some((name, Expr::Range(range))) = named_argument(arg) else { continue };
        let all = name == "num_stages";
        let bound = |bound: &Option<Box<Expr>>| match bound.as_deref().and_then(kernel::constant) {
            Some(Default::Int(n)) if n > 0 && (all || n.count_ones() == 1) => Some(n),
            _ => None,
        };
        let inclusive = matches!(range.limits, syn::RangeLimits::Closed(_));
        let (Some(first), Some(last), true) = (bound(&range.start), bound(&range.end), inclusive) else {
            let message = "a range has the powers of two from one to another, `tile = 16..=128`, and of `num_stages` all \
                           numbers, `2..=4`";
            return Err(Error::new(range.span(), message));
        };
        let next = |n: &i64| if all { n.checked_add(1) } else { n.checked_mul(2) };
        let numbers = std::iter::successors(Some(first), next).take_while(|n| *n <= last);
        let numbers = numbers.map(proc_macro2::Literal::i64_unsuffixed);
        let list = syn::parse_quote!([#(#numbers),*]);
        if let Expr::Assign(assignment) = arg {
            *assignment.right = list;
        }
    }
    Ok(())
}

/// Arguments that are lists, with their positions. An empty list is reported as an invalid value.
fn list_arguments(call: &ExprCall) -> impl Iterator<Item = (usize, &ExprArray)> {
    call.args.iter().enumerate().filter_map(|(place, arg)| match named_argument(arg) {
        Some((_, Expr::Array(list))) if !list.elems.is_empty() => Some((place, list)),
        _ => None,
    })
}

/// Expands a call with lists to one call per combination of their elements; the last list varies fastest.
fn combinations(call: &ExprCall) -> Vec<ExprCall> {
    let with = |call: &ExprCall, place: usize, value: &Expr| {
        let mut call = call.clone();
        if let Expr::Assign(assignment) = &mut call.args[place] {
            *assignment.right = value.clone();
        }
        call
    };
    list_arguments(call).fold(vec![call.clone()], |calls, (place, list)| {
        calls.iter().flat_map(|call| list.elems.iter().map(|value| with(call, place, value))).collect()
    })
}

/// Parses one configuration. A constant of `tuned` that it does not set has its default.
fn read_config(call: &ExprCall, signature: &Signature, tuned: &[Ident], errors: &mut Vec<Error>) -> Config {
    let mut given = Vec::new();
    let mut config = Config {
        constants: Vec::new(),
        num_warps: None,
        num_ctas: None,
        num_stages: None,
        max_registers: None,
        schedule_options: [None; SCHEDULE_OPTIONS.len()],
    };
    let known = errors.len();
    for arg in &call.args {
        match read_argument(arg, signature, &given, &mut config) {
            Ok(Some(constant)) => given.push(constant),
            Ok(None) => {}
            Err(error) => errors.push(error),
        }
    }
    // A configuration with errors is not compared with the others.
    if errors.len() > known {
        return config;
    }
    for name in tuned {
        let own = given.iter().position(|(n, _)| n == name).map(|place| given.swap_remove(place).1);
        let default = constants(signature).find(|p| p.name == *name).and_then(|p| match &p.kind {
            ParamKind::Constexpr(default) => default.clone(),
            _ => None,
        });
        match own.or(default) {
            Some(value) => config.constants.push(value),
            None => {
                let message = format!(
                    "`{name}` is missing, which another configuration sets and which has no default: give it a value, or \
                     `#[constexpr = …]` in the kernel"
                );
                errors.push(Error::new(call.func.span(), message));
            }
        }
    }
    config
}

impl Config {
    fn text(&self) -> String {
        let value = |d: &Default| match d {
            Default::Int(n) => n.to_string(),
            Default::Float(x) => x.to_string(),
            Default::Bool(b) => b.to_string(),
            Default::Variant(w) => w.clone(),
        };
        let constants: Vec<String> = self.constants.iter().map(value).collect();
        let Config { num_warps, num_ctas, num_stages, max_registers, .. } = self;
        let schedule_options = self.schedule_options;
        format!("{constants:?} {num_warps:?} {num_ctas:?} {num_stages:?} {max_registers:?} {schedule_options:?}")
    }
}

/// Parses one argument of a `Config`: a constant of the kernel, or an option of the compiler.
fn read_argument(
    arg: &Expr,
    signature: &Signature,
    given: &[(Ident, Default)],
    config: &mut Config,
) -> Result<Option<(Ident, Default)>, Error> {
    let Some((name, value)) = named_argument(arg) else {
        return Err(Error::new(arg.span(), "write `name = value`, as in `Config(tile = 64)`"));
    };
    let known = constants(signature).any(|p| p.name == *name);
    let text = name.to_string();
    let option = schedule_names::current_name(&text);
    if let (false, Some(at)) = (known, SCHEDULE_OPTIONS.iter().position(|choice| option == *choice)) {
        return read_bool(name, value, &mut config.schedule_options[at]);
    }
    let (slot, range, expected) = match text.as_str() {
        _ if known => {
            if given.iter().any(|(other, _)| other == name) {
                return Err(Error::new(name.span(), format!("`{name}` is given twice")));
            }
            let value = kernel::constant(value).ok_or_else(|| {
                Error::new(value.span(), "a constant is a number, `true`, `false`, or the name of an enum's variant")
            })?;
            return Ok(Some((name.clone(), value)));
        }
        "num_warps" => (&mut config.num_warps, 1..=32, "1, 2, 4, 8, 16 or 32"),
        "num_ctas" => (&mut config.num_ctas, 1..=8, "1, 2, 4 or 8"),
        "num_stages" => (&mut config.num_stages, 1..=16, "1 to 16"),
        "max_registers" => (&mut config.max_registers, 16..=255, "16 to 255"),
        _ => {
            let found = signature.params.iter().find(|p| p.name == *name);
            let message = match found.map(|p| &p.origin) {
                Some(Origin::Heuristic(_)) => format!("`{name}` follows from its `#[heuristic(…)]`"),
                Some(Origin::Dim) => format!("`{name}` is an extent of a tensor, which each launch gives"),
                Some(_) => format!("`{name}` is passed at each launch: a configuration sets `#[constexpr]` parameters"),
                None => format!(
                    "the kernel has no constant `{name}`: a configuration can set {}, and num_warps, num_ctas, \
                     num_stages, max_registers, {}",
                    names(constants(signature)),
                    SCHEDULE_OPTIONS.join(", ")
                ),
            };
            return Err(Error::new(name.span(), message));
        }
    };
    let number = match kernel::constant(value) {
        Some(Default::Int(n)) => u32::try_from(n).ok().filter(|n| range.contains(n)),
        _ => None,
    };
    let number = number.filter(|n| (name != "num_warps" && name != "num_ctas") || n.is_power_of_two());
    let number = number.ok_or_else(|| Error::new(value.span(), format!("`{name}` must be {expected}")))?;
    match slot.replace(number) {
        None => Ok(None),
        Some(_) => Err(Error::new(name.span(), format!("`{name}` is given twice"))),
    }
}

/// Parses a boolean option of the compiler.
fn read_bool(name: &Ident, value: &Expr, slot: &mut Option<bool>) -> Result<Option<(Ident, Default)>, Error> {
    let Some(Default::Bool(flag)) = kernel::constant(value) else {
        return Err(Error::new(value.span(), format!("`{name}` must be true or false")));
    };
    match slot.replace(flag) {
        None => Ok(None),
        Some(_) => Err(Error::new(name.span(), format!("`{name}` is given twice"))),
    }
}

/// An expression of a key with `dtypes[n]` in place of `T::dtype()` of the type parameter n.
pub fn dtypes_by_index(expr: &Expr, generics: &[Generic], dtypes: &Ident) -> Expr {
    struct ByIndex<'s>(&'s [Generic], &'s Ident);
    impl VisitMut for ByIndex<'_> {
        fn visit_expr_mut(&mut self, expr: &mut Expr) {
            let ByIndex(generics, dtypes) = *self;
            if let Expr::Call(call) = expr
                && call.args.is_empty()
                && let Expr::Path(function) = &*call.func
                && let [ty, method] = &function.path.segments.iter().collect::<Vec<_>>()[..]
                && method.ident == "dtype"
                && let Some(n) = generics.iter().position(|generic| generic.name == ty.ident)
            {
                *expr = parse_quote!(#dtypes[#n]);
            }
            visit_expr_mut(self, expr);
        }
    }
    let mut expr = expr.clone();
    ByIndex(generics, dtypes).visit_expr_mut(&mut expr);
    expr
}

/// The error for an expression of a key that uses a type parameter otherwise than as `T::dtype()`.
fn other_use_of_type(expr: &Expr, generics: &[Generic]) -> Option<Error> {
    let rest = dtypes_by_index(expr, generics, &Ident::new("dtypes", Span::call_site()));
    let name = &generics.iter().find(|generic| mentions(rest.to_token_stream(), &generic.name))?.name;
    let message = format!("a key is computed from element types known at run time: write `{name}::dtype()`");
    Some(Error::new(expr.span(), message))
}

/// Whether tokens have the identifier.
fn mentions(tokens: TokenStream, name: &Ident) -> bool {
    tokens.into_iter().any(|token| match token {
        TokenTree::Ident(ident) => ident == *name,
        TokenTree::Group(group) => mentions(group.stream(), name),
        TokenTree::Punct(_) | TokenTree::Literal(_) => false,
    })
}

fn read_key(list: &Expr, tuned: &[Ident], signature: &Signature, errors: &mut Vec<Error>) -> Vec<Key> {
    let mut key: Vec<Key> = Vec::new();
    for expr in elements(list, "`key`", errors) {
        let (name, value) = match expr {
            Expr::Path(path) => (path.path.get_ident(), None),
            Expr::Assign(_) => named_argument(expr).map_or((None, None), |(name, value)| (Some(name), Some(value))),
            _ => (None, None),
        };
        let Some(name) = name else {
            let message = "expected the name of a parameter, or a named expression: `is_small = rows * d < 4096`";
            errors.push(Error::new(expr.span(), message));
            continue;
        };
        if key.iter().any(|other| other.name == *name) {
            errors.push(Error::new(name.span(), format!("`{name}` is given twice")));
            continue;
        }
        let found = signature.params.iter().find(|p| p.name == *name);
        if let Some(value) = value {
            match found {
                None => {
                    errors.extend(other_use_of_type(value, &signature.generics));
                    key.push(Key { name: name.clone(), value: KeyValue::Expr(value.clone()) });
                }
                Some(_) => errors.push(Error::new(
                    name.span(),
                    format!("`{name}` is a parameter: an expression of the key has a name of its own"),
                )),
            }
            continue;
        }
        let value = match found.map(|p| &p.kind) {
            Some(ParamKind::Constexpr(_)) if tuned.contains(name) => {
                errors.push(Error::new(
                    name.span(),
                    format!("`{name}` is set by the configurations: it cannot be part of the key"),
                ));
                continue;
            }
            Some(ParamKind::Constexpr(_)) => KeyValue::Constant,
            Some(ParamKind::Scalar(Elem::Fixed("Bool"))) => KeyValue::Bool,
            Some(ParamKind::Scalar(Elem::Fixed("F32" | "F64"))) => {
                let message = "a key is an integer argument, a bool or a constant: floats are not supported";
                errors.push(Error::new(name.span(), message));
                continue;
            }
            Some(ParamKind::Scalar(_)) => KeyValue::Size,
            Some(ParamKind::Memory(..)) => {
                errors.push(Error::new(
                    name.span(),
                    "element types are always part of the key: name an integer argument, a bool or a constant",
                ));
                continue;
            }
            None => {
                let keys = signature.params.iter().filter(|p| !matches!(p.kind, ParamKind::Memory(..)));
                let message = format!("the kernel has no parameter `{name}`: expected one of {}", names(keys));
                errors.push(Error::new(name.span(), message));
                continue;
            }
        };
        key.push(Key { name: name.clone(), value });
    }
    key
}
