//! Parses the signature of a kernel.

use super::tuples::{self, Place, Tuple};
use proc_macro2::{Span, TokenStream};
use quote::ToTokens;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{
    Attribute, Error, Expr, ExprLit, FnArg, GenericArgument, GenericParam, Ident, ItemFn, Lit, Meta, Pat,
    PathArguments, Token, Type, TypeParamBound, UnOp,
};

/// A kernel's signature, checked.
pub struct Signature {
    pub generics: Vec<Generic>,
    /// The parameters as the compiler has them: those in the signature, then the strides of all tensors, then the
    /// extents that are no parameters yet, then whether memory is given that may be left out.
    pub params: Vec<Param>,
    pub tensors: Vec<Tensor>,
    /// The tuples in the signature, whose members are in `params`.
    pub tuples: Vec<Tuple>,
    /// The extents that tensors give.
    pub dims: Vec<Ident>,
    pub doc: String,
    pub aliases: Aliases,
}

/// A tensor in the signature.
pub struct Tensor {
    /// Its memory, an index of `params`.
    pub memory: usize,
    /// Its strides, indices of `params`.
    pub strides: Vec<usize>,
    /// Its extents, indices of `dims`.
    pub dims: Vec<usize>,
}

/// Former names, as `#[alias(former_kernel, former = parameter)]` gives them.
#[derive(Default)]
pub struct Aliases {
    pub kernel: Vec<Ident>,
    /// Former and present names of parameters.
    pub params: Vec<(Ident, Ident)>,
}

/// A type parameter and the name of its bound.
pub struct Generic {
    pub name: Ident,
    pub bound: Ident,
}

pub struct Param {
    pub name: Ident,
    /// Whether it is declared `mut`.
    pub mutable: bool,
    pub kind: ParamKind,
    /// Where a launch takes the value from.
    pub origin: Origin,
    /// For an extent of a tensor that is a constant: what it is where no tensor says so, ahead of time.
    pub without_tensor: Option<Expr>,
    /// For memory that a launch may leave out (`Option<…>`): the constant that says whether it is given.
    pub given: Option<Ident>,
    /// What that constant is where nothing says so: ahead of time, and in tools.
    pub given_by_default: bool,
    /// Where the field is, if the parameter is a member of a tuple.
    pub place: Option<Place>,
    /// The default of a constexpr parameter, as written.
    pub default: Option<Expr>,
    pub specialize: bool,
    /// The type as written.
    pub ty: Type,
    pub docs: Vec<Attribute>,
}

impl Param {
    /// The field of the argument struct, after `self.`.
    pub fn field(&self) -> TokenStream {
        match &self.place {
            Some(place) => place.to_token_stream(),
            None => self.name.to_token_stream(),
        }
    }

    /// A scalar that the signature does not list, of the type i32 or i64.
    fn number(name: Ident, ty: &str, origin: Origin, specialize: bool) -> Param {
        let ident = Ident::new(ty, name.span());
        let elem = if ty == "i64" { "I64" } else { "I32" };
        Param {
            name,
            mutable: false,
            kind: ParamKind::Scalar(Elem::Fixed(elem)),
            origin,
            without_tensor: None,
            given: None,
            given_by_default: true,
            place: None,
            default: None,
            specialize,
            ty: syn::parse_quote!(#ident),
            docs: Vec::new(),
        }
    }
}

/// Where a launch takes the value of a parameter from.
pub enum Origin {
    /// A field of the argument struct.
    Field,
    /// The memory of a tensor, by its index in [`Signature::tensors`].
    Tensor(usize),
    /// The stride of a tensor's dimension.
    Stride,
    /// An extent of a tensor.
    Dim,
    /// Whether the memory parameter of this index is given.
    Given(usize),
    /// A function of other values.
    Heuristic(Expr),
}

pub enum ParamKind {
    Memory(Access, Elem),
    Scalar(Elem),
    Constexpr(Option<Default>),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    In,
    Out,
    InOut,
}

/// An element type: a type parameter by index, or a Rust type by the name of its variant.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Elem {
    Generic(usize),
    Fixed(&'static str),
}

/// The default of a constexpr parameter: a literal, or the name of a variant.
#[derive(Clone)]
pub enum Default {
    Int(i64),
    Float(f64),
    Bool(bool),
    Variant(String),
}

/// Element types by their Rust names, with the variant of the element type enum.
const ELEMS: &[(&str, &str)] = &[
    ("bool", "Bool"),
    ("i8", "I8"),
    ("i16", "I16"),
    ("i32", "I32"),
    ("i64", "I64"),
    ("u8", "U8"),
    ("u16", "U16"),
    ("u32", "U32"),
    ("u64", "U64"),
    ("F8E4M3", "F8E4M3"),
    ("F8E5M2", "F8E5M2"),
    ("f16", "F16"),
    ("bf16", "BF16"),
    ("f32", "F32"),
    ("f64", "F64"),
];

/// Types of scalar arguments.
const SCALARS: &[&str] = &["bool", "i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64", "f32", "f64"];

/// Parses the signature; collects all errors.
pub fn parse(f: &ItemFn) -> (Signature, Vec<Error>) {
    let mut errors = Vec::new();
    let (doc, aliases) = (doc_text(&f.attrs), Aliases::default());
    let (params, tensors, tuples, dims) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut signature = Signature { generics: Vec::new(), params, tensors, tuples, dims, doc, aliases };
    check_modifiers(f, &mut errors);
    for param in &f.sig.generics.params {
        match generic(param) {
            Ok(g) => signature.generics.push(g),
            Err(e) => errors.push(e),
        }
    }
    let mut tensors = Vec::new();
    let declared: Vec<&Ident> = f.sig.inputs.iter().filter_map(name_of).collect();
    let mut add =
        |input: &FnArg, place: Option<Place>, signature: &mut Signature| match parameter(input, &signature.generics) {
            Ok((p, None)) => signature.params.push(Param { place, ..p }),
            Ok((p, Some(dims))) => {
                signature.params.push(Param { origin: Origin::Tensor(tensors.len()), place, ..p });
                tensors.push((signature.params.len() - 1, dims));
            }
            Err(e) => errors.push(e),
        };
    let mut misused = Vec::new();
    for input in &f.sig.inputs {
        match tuples::split(input) {
            Ok(None) => add(input, None, &mut signature),
            Ok(Some((tuple, members))) => {
                signature.tuples.push(tuple);
                members.iter().for_each(|(member, place)| add(member, Some(place.clone()), &mut signature));
            }
            Err(e) => misused.push(e),
        }
    }
    errors.extend(misused);
    signature.add_tensors(tensors, &declared);
    let given = signature.params.iter().enumerate().filter_map(|(n, p)| {
        let bool_type = syn::parse_quote!(bool);
        let constant = Param::number(p.given.clone()?, "i32", Origin::Given(n), true);
        let default = Some(Default::Bool(p.given_by_default));
        Some(Param { kind: ParamKind::Constexpr(default), ty: bool_type, ..constant })
    });
    let given: Vec<Param> = given.collect();
    signature.params.extend(given);
    errors.extend(signature.check_dims().err());
    for attr in f.attrs.iter().filter(|a| a.path().is_ident("alias")) {
        if let Err(e) = read_aliases(attr, &mut signature) {
            errors.push(e);
        }
    }
    for (n, g) in signature.generics.iter().enumerate() {
        let used = signature.params.iter().any(|p| matches!(p.kind, ParamKind::Memory(_, Elem::Generic(m)) if m == n));
        if !used && errors.is_empty() {
            errors.push(Error::new(
                g.name.span(),
                format!("no parameter has elements of type `{}`: a launch cannot infer it", g.name),
            ));
        }
    }
    (signature, errors)
}

fn name_of(input: &FnArg) -> Option<&Ident> {
    match input {
        FnArg::Typed(typed) => match &*typed.pat {
            Pat::Ident(pat) => Some(&pat.ident),
            _ => None,
        },
        FnArg::Receiver(_) => None,
    }
}

impl Signature {
    /// Adds the strides of tensors, given as places of their memory with the names of their extents, and the extents that
    /// are not `declared` as parameters.
    fn add_tensors(&mut self, tensors: Vec<(usize, Vec<Ident>)>, declared: &[&Ident]) {
        let mut extents = Vec::new();
        for (memory, dims) in tensors {
            let Param { name: tensor, specialize, .. } = &self.params[memory];
            let (tensor, specialize) = (tensor.clone(), *specialize);
            let first_stride = self.params.len();
            let mut indices = Vec::new();
            for (axis, dim) in dims.iter().enumerate() {
                let suffix = if dims[..axis].contains(dim) { format!("_{axis}") } else { String::new() };
                let name = Ident::new(&format!("{tensor}_stride_{dim}{suffix}"), dim.span());
                self.params.push(Param::number(name, "i64", Origin::Stride, specialize));
                let known = self.dims.iter().position(|known| known == dim);
                indices.push(known.unwrap_or(self.dims.len()));
                if known.is_none() {
                    self.dims.push(dim.clone());
                    if !declared.contains(&dim) {
                        extents.push(Param::number(dim.clone(), "i32", Origin::Dim, false));
                    }
                }
            }
            // Consecutive elements are along the last dimension: its extent decides how wide masked accesses can be.
            for extent in extents.iter_mut().filter(|extent| Some(&extent.name) == dims.last()) {
                extent.specialize |= specialize;
            }
            self.tensors.push(Tensor { memory, strides: (first_stride..self.params.len()).collect(), dims: indices });
        }
        self.params.extend(extents);
    }

    /// Marks the parameters that tensors give the values of, and checks their types and all names.
    fn check_dims(&mut self) -> Result<(), Error> {
        for p in self.params.iter_mut().filter(|p| self.dims.contains(&p.name)) {
            let is_integer = match &p.kind {
                ParamKind::Scalar(elem) => matches!(elem, Elem::Fixed("I32" | "I64")),
                ParamKind::Constexpr(_) => {
                    let types = ["usize", "i32", "i64", "u32", "u64"];
                    matches!(&p.ty, Type::Path(path) if types.iter().any(|ty| path.path.is_ident(ty)))
                }
                ParamKind::Memory(..) => false,
            };
            if !is_integer || p.default.is_some() {
                return Err(Error::new(
                    p.name.span(),
                    format!(
                        "`{}` is an extent of a tensor: declare it as an i32, an i64 or `#[constexpr] {}: usize`, without \
                         default, or leave it out",
                        p.name, p.name
                    ),
                ));
            }
            if let Origin::Heuristic(expr) = std::mem::replace(&mut p.origin, Origin::Dim) {
                p.without_tensor = Some(expr);
            }
        }
        for (place, p) in self.params.iter().enumerate() {
            if self.params[..place].iter().any(|other| other.name == p.name) {
                return Err(Error::new(p.name.span(), format!("`{}` is the name of two parameters", p.name)));
            }
        }
        Ok(())
    }
}

fn check_modifiers(f: &ItemFn, errors: &mut Vec<Error>) {
    let sig = &f.sig;
    let mut reject = |span: Span, message: &str| errors.push(Error::new(span, message));
    if let Some(token) = &sig.asyncness {
        reject(token.span(), "a kernel cannot be `async`: launches are asynchronous by themselves");
    }
    if let Some(token) = &sig.constness {
        reject(token.span(), "a kernel cannot be `const`");
    }
    if let Some(abi) = &sig.abi {
        reject(abi.span(), "a kernel has no ABI: remove `extern`");
    }
    if let syn::ReturnType::Type(_, ty) = &sig.output {
        reject(ty.span(), "a kernel returns nothing: take an `Out<…>` parameter and `store` to it");
    }
    if let Some(clause) = &sig.generics.where_clause {
        reject(clause.span(), "write the bound at the type parameter, as in `<T: Float>`");
    }
}

fn generic(param: &GenericParam) -> Result<Generic, Error> {
    const HELP: &str = "expected one of Float, Int, Num, Bits, Dtype, as in `<T: Float>`";
    match param {
        GenericParam::Type(t) => {
            let mut bounds = t.bounds.iter();
            let (Some(TypeParamBound::Trait(bound)), None) = (bounds.next(), bounds.next()) else {
                return Err(Error::new(t.span(), format!("a kernel's type parameter has exactly one bound: {HELP}")));
            };
            let Some(last) = bound.path.segments.last() else {
                return Err(Error::new(bound.span(), HELP));
            };
            if !["Float", "Int", "Num", "Bits", "Dtype"].iter().any(|b| last.ident == b) {
                return Err(Error::new(
                    last.ident.span(),
                    format!("`{}` is not a class of element types: {HELP}", last.ident),
                ));
            }
            Ok(Generic { name: t.ident.clone(), bound: last.ident.clone() })
        }
        GenericParam::Lifetime(l) => Err(Error::new(l.span(), "a kernel has no lifetimes: remove this parameter")),
        GenericParam::Const(c) => Err(Error::new(
            c.span(),
            format!("write a number that is known at specialization as a parameter: `#[constexpr] {}: usize`", c.ident),
        )),
    }
}

/// Parses a parameter, and the names of the extents if it is a tensor.
fn parameter(input: &FnArg, generics: &[Generic]) -> Result<(Param, Option<Vec<Ident>>), Error> {
    let FnArg::Typed(typed) = input else {
        return Err(Error::new(input.span(), "a kernel is a free function: it has no `self`"));
    };
    let Pat::Ident(pat) = &*typed.pat else {
        return Err(Error::new(typed.pat.span(), "a kernel's parameter is a plain name"));
    };
    if let Some(by_ref) = &pat.by_ref {
        return Err(Error::new(by_ref.span(), "a kernel's parameter is a plain name: remove `ref`"));
    }
    let mut param = Param {
        name: pat.ident.clone(),
        mutable: pat.mutability.is_some(),
        kind: ParamKind::Constexpr(None),
        origin: Origin::Field,
        without_tensor: None,
        given: None,
        given_by_default: true,
        place: None,
        default: None,
        specialize: true,
        ty: (*typed.ty).clone(),
        docs: Vec::new(),
    };
    let (mut constexpr, mut given) = (None, None);
    for attr in &typed.attrs {
        if attr.path().is_ident("constexpr") {
            param.default = default_expr(attr)?;
            constexpr = Some(param.default.as_ref().map(default_value).transpose()?);
        } else if attr.path().is_ident("heuristic") {
            param.origin = Origin::Heuristic(attr.parse_args().map_err(|e| {
                let example = "`#[heuristic(n.is_multiple_of(tile))] even: bool`";
                Error::new(e.span(), format!("expected an expression of other parameters, as in {example}"))
            })?);
            constexpr.get_or_insert(None);
        } else if attr.path().is_ident("no_specialize") {
            param.specialize = false;
        } else if attr.path().is_ident("given") {
            given = Some((attr, given_by_default(attr)?));
        } else if attr.path().is_ident("doc") {
            param.docs.push(attr.clone());
        } else {
            return Err(Error::new(
                attr.span(),
                "unknown attribute: a parameter may have `#[constexpr]`, `#[heuristic(…)]`, `#[no_specialize]` or \
                 `#[given = false]`",
            ));
        }
    }
    if constexpr.is_some() && !param.specialize {
        let message = format!("`{}` is a constant: remove `#[no_specialize]`, which is for arguments", param.name);
        return Err(Error::new(param.name.span(), message));
    }
    let mut dims = None;
    param.kind = match constexpr {
        Some(default) => ParamKind::Constexpr(default),
        None => {
            if let Some(inner) = optional(&param.ty) {
                param.ty = inner.clone();
                param.given = Some(Ident::new(&format!("{}_given", param.name), param.name.span()));
            }
            let kind = run_time_kind(&param.ty, generics, &mut dims)?;
            if param.given.is_some() && matches!(kind, ParamKind::Scalar(_)) {
                let message = "a launch may leave out memory only: `Option<Tensor<T, (rows, d)>>`, `Option<In<T>>`";
                return Err(Error::new(typed.ty.span(), message));
            }
            kind
        }
    };
    if let Some((attr, by_default)) = given {
        if param.given.is_none() {
            let message = "`#[given = false]` is for memory that a launch may leave out: `Option<In<T>>`";
            return Err(Error::new(attr.span(), message));
        }
        param.given_by_default = by_default;
    }
    Ok((param, dims))
}

/// The value in `#[given = false]`.
fn given_by_default(attr: &Attribute) -> Result<bool, Error> {
    let value = match &attr.meta {
        Meta::NameValue(meta) => default_value(&meta.value).ok(),
        _ => None,
    };
    match value {
        Some(Default::Bool(value)) => Ok(value),
        _ => Err(Error::new(
            attr.span(),
            "expected `#[given = false]`: without it the memory is given, unless a launch has `None`",
        )),
    }
}

/// The `T` of `Option<T>`.
fn optional(ty: &Type) -> Option<&Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last().filter(|last| last.ident == "Option")?;
    let PathArguments::AngleBracketed(args) = &last.arguments else { return None };
    match (args.args.first(), args.args.len()) {
        (Some(GenericArgument::Type(inner)), 1) => Some(inner),
        _ => None,
    }
}

/// A tensor, `In<T>`, `Out<T>`, `InOut<T>`, or a number type. Returns the extents of a tensor in `dims`.
fn run_time_kind(ty: &Type, generics: &[Generic], dims: &mut Option<Vec<Ident>>) -> Result<ParamKind, Error> {
    const HELP: &str = "a parameter is `Tensor<T, (rows, d)>`, `TensorMut<T, (rows, d)>` or `TensorInOut<T, (rows, \
                        d)>`, `In<T>`, `Out<T>` or `InOut<T>` for a pointer, a number type such as `i32` or `f32` for a \
                        scalar, or `#[constexpr] name: usize` for a number known at specialization";
    let Type::Path(path) = ty else {
        return Err(Error::new(ty.span(), HELP));
    };
    let Some(last) = path.path.segments.last() else {
        return Err(Error::new(ty.span(), HELP));
    };
    if let Some(access) = tensor_access(&last.ident) {
        let (inner, names) = tensor_arguments(last)?;
        *dims = Some(names);
        return Ok(ParamKind::Memory(access, elem(inner, generics)?));
    }
    let access = match last.ident.to_string().as_str() {
        "In" => Some(Access::In),
        "Out" => Some(Access::Out),
        "InOut" => Some(Access::InOut),
        _ => None,
    };
    if let Some(access) = access {
        if let PathArguments::AngleBracketed(args) = &last.arguments
            && let (Some(GenericArgument::Type(inner)), 1) = (args.args.first(), args.args.len())
        {
            return Ok(ParamKind::Memory(access, elem(inner, generics)?));
        }
        return Err(Error::new(last.span(), format!("`{0}` takes the element type: `{0}<f32>`", last.ident)));
    }
    if last.ident == "usize" || last.ident == "isize" {
        return Err(Error::new(
            last.span(),
            format!(
                "`{}` has different sizes on host and device: use i32 or i64, or mark the parameter `#[constexpr]`",
                last.ident
            ),
        ));
    }
    if generics.iter().any(|g| path.path.is_ident(&g.name)) {
        return Err(Error::new(
            last.span(),
            format!("a scalar argument has a fixed type: use f32 or i32, and convert with `.to::<{}>()`", last.ident),
        ));
    }
    if path.path.get_ident().is_none() || !SCALARS.iter().any(|s| last.ident == s) {
        return Err(Error::new(ty.span(), HELP));
    }
    Ok(ParamKind::Scalar(elem(ty, generics)?))
}

/// The access of a tensor type.
fn tensor_access(name: &Ident) -> Option<Access> {
    match name.to_string().as_str() {
        "Tensor" => Some(Access::In),
        "TensorMut" => Some(Access::Out),
        "TensorInOut" => Some(Access::InOut),
        _ => None,
    }
}

/// The element type and the extents of `Tensor<T, (rows, d)>`.
fn tensor_arguments(segment: &syn::PathSegment) -> Result<(&Type, Vec<Ident>), Error> {
    let name = &segment.ident;
    let help = || {
        let message = format!(
            "`{name}` takes the element type and the names of its extents: `{name}<f32, (rows, d)>`, and \
             `{name}<f32, (n,)>` with one dimension"
        );
        Error::new(segment.span(), message)
    };
    let PathArguments::AngleBracketed(args) = &segment.arguments else { return Err(help()) };
    let mut args = args.args.iter();
    let (Some(GenericArgument::Type(inner)), Some(GenericArgument::Type(Type::Tuple(shape))), None) =
        (args.next(), args.next(), args.next())
    else {
        return Err(help());
    };
    let mut names = Vec::new();
    for extent in &shape.elems {
        let ident = match extent {
            Type::Path(path) if path.qself.is_none() => path.path.get_ident(),
            _ => None,
        };
        names.push(ident.cloned().ok_or_else(|| {
            Error::new(extent.span(), "the extent of a dimension is a name, which tensors of equal extents share")
        })?);
    }
    if names.is_empty() || names.len() > MAX_DIMS {
        return Err(Error::new(segment.span(), format!("a tensor has 1 to {MAX_DIMS} dimensions")));
    }
    Ok((inner, names))
}

/// Maximum number of dimensions of a tensor, as of tiles.
const MAX_DIMS: usize = 8;

fn elem(ty: &Type, generics: &[Generic]) -> Result<Elem, Error> {
    if let Type::Path(path) = ty {
        if let Some(n) = generics.iter().position(|g| path.path.is_ident(&g.name)) {
            return Ok(Elem::Generic(n));
        }
        if let Some(last) = path.path.segments.last()
            && let Some((_, variant)) = ELEMS.iter().find(|(name, _)| last.ident == name)
        {
            return Ok(Elem::Fixed(variant));
        }
    }
    Err(Error::new(
        ty.span(),
        "expected an element type: a type parameter, bool, i8 to i64, u8 to u64, f16, bf16, f32, f64, F8E4M3 or F8E5M2",
    ))
}

/// The names in `#[alias(former_kernel, former = parameter, …)]`.
fn read_aliases(attr: &Attribute, signature: &mut Signature) -> Result<(), Error> {
    const HELP: &str = "expected former names: `#[alias(former_kernel, former = parameter)]`";
    let names = attr.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated);
    for name in names.map_err(|e| Error::new(e.span(), HELP))? {
        let former = name.path().get_ident().cloned().ok_or_else(|| Error::new(name.span(), HELP))?;
        let Meta::NameValue(pair) = &name else {
            signature.aliases.kernel.push(former);
            continue;
        };
        let present = match &pair.value {
            Expr::Path(path) => path.path.get_ident().cloned(),
            _ => None,
        };
        let present = present.ok_or_else(|| Error::new(pair.value.span(), HELP))?;
        let has = |name: &Ident| signature.params.iter().any(|p| p.name == *name);
        if !has(&present) {
            return Err(Error::new(present.span(), format!("the kernel has no parameter `{present}`")));
        }
        if has(&former) || signature.aliases.params.iter().any(|(other, _)| *other == former) {
            return Err(Error::new(former.span(), format!("`{former}` names a parameter already")));
        }
        signature.aliases.params.push((former, present));
    }
    Ok(())
}

/// The default in `#[constexpr]`, `#[constexpr = 64]` or `#[constexpr(default = 64)]`.
fn default_expr(attr: &Attribute) -> Result<Option<Expr>, Error> {
    match &attr.meta {
        Meta::Path(_) => Ok(None),
        Meta::NameValue(pair) => Ok(Some(pair.value.clone())),
        Meta::List(list) => {
            let pair: syn::MetaNameValue = list.parse_args()?;
            if !pair.path.is_ident("default") {
                return Err(Error::new(pair.path.span(), "expected `default = …`"));
            }
            Ok(Some(pair.value))
        }
    }
}

fn default_value(value: &Expr) -> Result<Default, Error> {
    constant(value).ok_or_else(|| {
        Error::new(
            value.span(),
            "a default is a number, `true`, `false`, or the name of an enum's variant or of a static",
        )
    })
}

/// A literal, or the name of a variant.
pub fn constant(expr: &Expr) -> Option<Default> {
    match expr {
        Expr::Lit(ExprLit { lit: Lit::Int(n), .. }) => n.base10_parse().ok().map(Default::Int),
        Expr::Lit(ExprLit { lit: Lit::Float(x), .. }) => x.base10_parse().ok().map(Default::Float),
        Expr::Lit(ExprLit { lit: Lit::Bool(b), .. }) => Some(Default::Bool(b.value)),
        Expr::Unary(unary) if matches!(unary.op, UnOp::Neg(_)) => match constant(&unary.expr)? {
            Default::Int(n) => Some(Default::Int(-n)),
            Default::Float(x) => Some(Default::Float(-x)),
            Default::Bool(_) | Default::Variant(_) => None,
        },
        Expr::Path(path) => path.path.segments.last().map(|s| Default::Variant(s.ident.to_string())),
        _ => None,
    }
}

/// The text of doc comments, without the space after `///`.
fn doc_text(attrs: &[Attribute]) -> String {
    let mut lines = Vec::new();
    for attr in attrs {
        if let Meta::NameValue(pair) = &attr.meta
            && pair.path.is_ident("doc")
            && let Expr::Lit(ExprLit { lit: Lit::Str(text), .. }) = &pair.value
        {
            let text = text.value();
            lines.push(text.strip_prefix(' ').unwrap_or(&text).to_string());
        }
    }
    lines.join("\n").trim().to_string()
}
