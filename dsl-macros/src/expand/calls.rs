//! Expands calls with named arguments.

use super::body::Body;
use super::lang;
use crate::parse::calls::{
    DefaultArg, EnumWords, FUNCTIONS, Function, Kind, canonical, function, method_kinds, named_argument,
};
use crate::parse::literal::{self, Kind as LiteralKind};
use crate::parse::triton;
use proc_macro2::{Span, TokenStream};
use quote::{ToTokens, format_ident, quote, quote_spanned};
use syn::spanned::Spanned;
use syn::{Expr, ExprCall, ExprMethodCall, Ident, PathArguments};

/// The message for a named argument of a function that is not one of the language.
fn named_argument_of_another(func: &Expr, argument: &Ident) -> String {
    let by_position = format!("pass `{argument}` by position");
    let Expr::Path(path) = func else {
        return format!("only functions of the language take named arguments: {by_position}");
    };
    let Some(name) = path.path.segments.last().map(|s| s.ident.to_string()) else { return by_position };
    match similar_function(&name) {
        Some(known) => format!(
            "the language has no function `{name}`: did you mean `{known}`? (For one of your own, {by_position})"
        ),
        None => format!("only functions of the language take named arguments, and `{name}` is none: {by_position}"),
    }
}

/// The function of the language whose name differs in a single letter, or has a letter more or less.
fn similar_function(name: &str) -> Option<&'static str> {
    let near = |known: &str| {
        let (a, b) = if known.len() <= name.len() { (known, name) } else { (name, known) };
        let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
        let same = a.iter().zip(&b).take_while(|(x, y)| x == y).count();
        let rest = |skip: usize| a[(same + skip).min(a.len())..] == b[(same + 1).min(b.len())..];
        match b.len() - a.len() {
            0 => rest(1),
            1 => rest(0),
            _ => false,
        }
    };
    FUNCTIONS.iter().map(|f| f.name).find(|known| known.len() > 2 && near(known))
}

impl Body {
    pub fn call(&mut self, call: &ExprCall) -> TokenStream {
        if let Expr::Path(path) = &*call.func
            && path.qself.is_none()
            && path.path.leading_colon.is_none()
            && path.path.segments.len() == 1
            && !self.names.functions.contains(&path.path.segments[0].ident)
            && let Some(f) = function(&path.path.segments[0].ident)
        {
            let segment = &path.path.segments[0];
            let args: Vec<&Expr> = call.args.iter().collect();
            return self.bound_call(f, &segment.ident, &segment.arguments, &args);
        }
        if let (Expr::Path(path), Some(Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }))) =
            (&*call.func, call.args.first())
            && path.path.is_ident("float")
        {
            let constant = match text.value().trim_start_matches('+') {
                "-inf" | "-infinity" => "f32::NEG_INFINITY",
                "nan" => "f32::NAN",
                _ => "f32::INFINITY",
            };
            return self.reject(path.span(), format!("write `{constant}`"));
        }
        let func = self.expr(&call.func);
        let args = self.plain_arguments(&call.func, call.args.iter());
        let span = call.paren_token.span.join();
        let args = quote_spanned!(span=> (#(#args),*));
        quote!(#func #args)
    }

    fn plain_arguments<'a>(&mut self, func: &Expr, args: impl Iterator<Item = &'a Expr>) -> Vec<TokenStream> {
        args.map(|arg| match named_argument(arg) {
            Some((name, _)) => self.reject(name.span(), named_argument_of_another(func, name)),
            None => self.expr(arg),
        })
        .collect()
    }

    pub fn method_call(&mut self, call: &ExprMethodCall) -> TokenStream {
        if let Some(module) = self.triton_module(&call.receiver) {
            let args: Vec<&Expr> = call.args.iter().collect();
            let source = call.paren_token.span.join().source_text();
            return self.reject(module.span(), triton::call(&call.method, &args, source));
        }
        if let ("to", Some(arg)) = (call.method.to_string().as_str(), call.args.first()) {
            let bits = call.args.iter().any(|arg| named_argument(arg).is_some_and(|(name, _)| name == "bitcast"));
            let method = if bits { "bitcast" } else { "to" };
            let ty = triton::type_name(named_argument(arg).map_or(arg, |(_, value)| value));
            let message = format!("write the type as `.{method}::<{}>()`", ty.as_deref().unwrap_or("f32"));
            self.expr(&call.receiver);
            return self.reject(call.method.span(), message);
        }
        let named = call.args.iter().any(|arg| named_argument(arg).is_some());
        if named && let Some(f) = function(&call.method) {
            let generics = match &call.turbofish {
                Some(t) => PathArguments::AngleBracketed(t.clone()),
                None => PathArguments::None,
            };
            let mut args = vec![&*call.receiver];
            args.extend(&call.args);
            return self.bound_call(f, &call.method, &generics, &args);
        }
        let receiver = self.expr(&call.receiver);
        let kinds = method_kinds(&call.method.to_string());
        let args: Vec<TokenStream> = call
            .args
            .iter()
            .enumerate()
            .map(|(i, arg)| match (named_argument(arg), kinds.get(i)) {
                (Some((name, _)), _) => self.reject(
                    name.span(),
                    "only functions of the language take named arguments: pass this one by position",
                ),
                // A list that is not a literal, or a single number, may belong to one of Rust's own methods.
                (None, Some(Kind::Indices | Kind::Extents)) if !matches!(arg, Expr::Array(_)) => self.expr(arg),
                (None, Some(kind)) => self.argument(*kind, arg),
                (None, None) => self.expr(arg),
            })
            .collect();
        let (dot, method, turbofish) = (&call.dot_token, &call.method, &call.turbofish);
        let span = call.paren_token.span.join();
        let args = quote_spanned!(span=> (#(#args),*));
        quote!(#receiver #dot #method #turbofish #args)
    }

    /// Expands a call of a function of the language, with every argument in its position.
    fn bound_call(&mut self, f: &Function, name: &Ident, generics: &PathArguments, args: &[&Expr]) -> TokenStream {
        let mut given: Vec<Option<TokenStream>> = vec![None; f.params.len()];
        let mut positional = Vec::new();
        for arg in args {
            let Some((arg_name, value)) = named_argument(arg) else {
                positional.push(*arg);
                continue;
            };
            let text = arg_name.to_string();
            let Some(i) = f.params.iter().position(|p| p.name == canonical(&text) && p.kind != Kind::Rest) else {
                self.reject(arg_name.span(), unknown_argument(f, &text));
                continue;
            };
            if given[i].is_some() {
                self.reject(arg_name.span(), format!("`{text}` is given twice"));
            }
            given[i] = Some(match is_none(value) {
                true => self.reject(value.span(), format!("there is no `None`: leave `{text}` out")),
                false => self.argument(f.params[i].kind, value),
            });
        }
        let mut next = 0;
        // `range(n)` starts at zero, as in Python.
        let end = f.params.iter().position(|p| p.name == "end");
        if let (1, Some(end), "range" | "static_range") = (positional.len(), end, f.name)
            && given[end].is_none()
        {
            given[0] = Some(default_tokens(DefaultArg::Start, name.span()));
        }
        for arg in positional {
            while next < f.params.len() && given[next].is_some() && f.params[next].kind != Kind::Rest {
                next += 1;
            }
            match f.params.get(next).map(|p| p.kind) {
                None => {
                    self.reject(arg.span(), format!("`{}` takes at most {} arguments", f.name, f.params.len()));
                    break;
                }
                Some(Kind::Rest) => {
                    let value = self.expr(arg);
                    let so_far = given[next].take();
                    given[next] = Some(quote!(#so_far #value,));
                }
                Some(_) if is_none(arg) => {
                    let message = format!(
                        "there is no `None`: leave `{}` out, and pass the following arguments by name",
                        f.params[next].name
                    );
                    given[next] = Some(self.reject(arg.span(), message));
                }
                // A function binds to the parameter that takes one, and skips optional parameters that are left out.
                Some(_) => {
                    let takes_function = |kind| matches!(kind, Kind::Combine | Kind::Function);
                    if self.is_function(arg)
                        && let Some(i) = f.params.iter().position(|p| takes_function(p.kind))
                    {
                        given[i] = Some(match given[i] {
                            None => self.argument(f.params[i].kind, arg),
                            Some(_) => self.reject(arg.span(), format!("`{}` is given twice", f.params[i].name)),
                        });
                        continue;
                    }
                    given[next] = Some(self.argument(f.params[next].kind, arg));
                }
            }
        }
        let span = name.span();
        let lang = lang(span);
        let mut complete = Vec::new();
        for (param, value) in f.params.iter().zip(given) {
            complete.push(match (value, param.default, param.kind) {
                (value, _, Kind::Rest) => quote!((#value)),
                (Some(value), ..) => value,
                (None, Some(missing), _) => default_tokens(missing, span),
                (None, None, _) => self.reject(span, format!("`{}` needs the argument `{}`", f.name, param.name)),
            });
        }
        let function = format_ident!("{}", name, span = span);
        let turbofish = match generics {
            PathArguments::AngleBracketed(a) => {
                let args = &a.args;
                quote_spanned!(span=> ::<#args>)
            }
            _ => quote!(),
        };
        quote_spanned!(span=> #lang::#function #turbofish (#(#complete),*))
    }

    /// Whether an argument is a closure or, by its name, a function: constants have names in capitals.
    fn is_function(&self, arg: &Expr) -> bool {
        let Expr::Path(path) = arg else { return matches!(arg, Expr::Closure(_)) };
        let Some(name) = path.path.segments.last().map(|last| last.ident.to_string()) else { return false };
        let is_local = path.path.segments.len() == 1 && self.is_bound(&name);
        !is_local && name.trim_start_matches('_').starts_with(|c: char| c.is_lowercase())
    }

    fn argument(&mut self, kind: Kind, value: &Expr) -> TokenStream {
        let span = value.span();
        let lang = lang(span);
        match kind {
            Kind::Plain | Kind::Function | Kind::Rest => self.expr(value),
            Kind::Combine if matches!(value, Expr::Closure(_)) => self.expr(value),
            Kind::Combine => {
                let function = self.expr(value);
                quote_spanned!(span=> #lang::reduce::combine_function(#function))
            }
            Kind::Operand => self.operand(value),
            Kind::Indices => self.list(value, quote_spanned!(span=> #lang::index::index), "index_list"),
            Kind::Extents => self.list(value, quote_spanned!(span=> #lang::index::extent), "extent_list"),
            Kind::Dims => match value {
                Expr::Array(_) => {
                    let list = self.expr(value);
                    quote_spanned!(span=> &#list)
                }
                // `(0)` is not a tuple.
                number if literal::kind(number) == Some(LiteralKind::Int) => quote_spanned!(span=> &[#number]),
                Expr::Tuple(tuple) => {
                    let list: Vec<TokenStream> = tuple.elems.iter().map(|e| self.expr(e)).collect();
                    quote_spanned!(span=> &[#(#list),*])
                }
                other => {
                    let list = self.expr(other);
                    quote_spanned!(span=> &(#list)[..])
                }
            },
            // For a bare number, rustc could not infer the integer type of the axis.
            Kind::Axis if literal::kind(value) == Some(LiteralKind::Int) => quote_spanned!(span=> (#value as i32)),
            Kind::Axis => self.expr(value),
            Kind::Pack => {
                let value = self.expr(value);
                quote_spanned!(span=> #lang::map::Pack::<{ #value }>)
            }
            Kind::Word(words) => self.word(words, value),
        }
    }

    /// Expands a list, with a conversion of each element.
    fn list(&mut self, value: &Expr, each: TokenStream, whole: &str) -> TokenStream {
        let span = value.span();
        if let Expr::Array(array) = value {
            let items: Vec<TokenStream> = array
                .elems
                .iter()
                .map(|e| {
                    let item = self.operand(e);
                    // With the span of the element, so that error messages point there.
                    let each: TokenStream = each
                        .clone()
                        .into_iter()
                        .map(|mut t| {
                            t.set_span(e.span());
                            t
                        })
                        .collect();
                    let span = e.span();
                    quote_spanned!(span=> #each(#item))
                })
                .collect();
            return quote_spanned!(span=> [#(#items),*]);
        }
        let lang = lang(span);
        let whole = format_ident!("{whole}", span = span);
        let value = self.expr(value);
        quote_spanned!(span=> #lang::index::#whole(#value))
    }

    /// Expands a keyword of a fixed set, or an expression of the enum's type.
    fn word(&mut self, words: &'static EnumWords, value: &Expr) -> TokenStream {
        let span = value.span();
        let lang = lang(span);
        let enum_name = format_ident!("{}", words.enum_name, span = span);
        if let Expr::Path(path) = value
            && let Some(ident) = path.path.get_ident()
            && let Some((_, variant)) = words.words.iter().find(|(word, _)| ident == word)
        {
            let variant = format_ident!("{variant}", span = span);
            return quote_spanned!(span=> #lang::#enum_name::#variant);
        }
        if let Expr::Lit(lit) = value {
            if let syn::Lit::Str(text) = &lit.lit
                && words.words.iter().any(|(word, _)| *word == text.value())
            {
                return self.reject(span, format!("write `{}` without quotes", text.value()));
            }
            let list: Vec<&str> = words.words.iter().map(|(word, _)| *word).collect();
            let found = lit.to_token_stream();
            return self.reject(span, format!("expected one of {}, found {found}", list.join(", ")));
        }
        self.expr(value)
    }
}

fn is_none(value: &Expr) -> bool {
    matches!(value, Expr::Path(path) if path.path.is_ident("None"))
}

fn unknown_argument(f: &Function, name: &str) -> String {
    let names: Vec<&str> = f.params.iter().map(|p| p.name).collect();
    let hint = match (f.name, name) {
        ("load" | "store", "volatile") => {
            ": to see what other programs write, use an atomic, such as `atomic_or(p, 0, sem = acquire)`"
        }
        ("dot", "out_dtype") => {
            ": the result has the type of the accumulator; without one, f32 for floats and i32 for integers"
        }
        ("dot", "allow_tf32") => ": write `input_precision = tf32`",
        ("arange" | "sum" | "cumsum", "dtype") => ": convert with `.to::<f32>()`",
        ("max" | "min", "return_indices") => ": use `max_with_indices` or `min_with_indices`",
        ("zeros" | "full" | "ones", "dtype") => ": write the type as `zeros::<f32>([…])`",
        _ => "",
    };
    format!("`{}` has no argument `{name}`{hint}; it takes {}", f.name, names.join(", "))
}

fn default_tokens(missing: DefaultArg, span: Span) -> TokenStream {
    let lang = lang(span);
    match missing {
        DefaultArg::Unset => quote_spanned!(span=> #lang::index::Unset),
        DefaultArg::NoDims => quote_spanned!(span=> &[]),
        DefaultArg::False => quote_spanned!(span=> false),
        DefaultArg::True => quote_spanned!(span=> true),
        DefaultArg::One => quote_spanned!(span=> #lang::IntegerLiteral(1)),
        DefaultArg::Start => quote_spanned!(span=> #lang::IntegerLiteral(0)),
        DefaultArg::Ten => quote_spanned!(span=> 10),
        DefaultArg::Zero => quote_spanned!(span=> 0),
        DefaultArg::Last => quote_spanned!(span=> -1),
        DefaultArg::Text => quote_spanned!(span=> ""),
        DefaultArg::Pack => quote_spanned!(span=> #lang::map::Pack::<1>),
        DefaultArg::Word(words) => {
            let enum_name = format_ident!("{}", words.enum_name, span = span);
            let variant = format_ident!("{}", words.words[0].1, span = span);
            quote_spanned!(span=> #lang::#enum_name::#variant)
        }
    }
}
