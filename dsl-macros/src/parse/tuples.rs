//! Tuples among a kernel's parameters: `pair: (In<f32>, (i32, Const<usize>))`.
//!
//! The members are parameters of their own, which the compiler and the command line know as `pair_0`, `pair_1_0` and
//! `pair_1_1`. The struct of the arguments and the kernel's body have the tuple.

use proc_macro2::{Ident, TokenStream};
use quote::{ToTokens, quote};
use syn::spanned::Spanned;
use syn::{Attribute, Error, FnArg, GenericArgument, Pat, PatType, PathArguments, Type};

/// A tuple in the signature.
pub struct Tuple {
    pub name: Ident,
    pub mutable: bool,
    pub docs: Vec<Attribute>,
    pub members: Vec<Member>,
}

/// A member of a tuple: a parameter by its name, or a tuple.
pub enum Member {
    Param(Ident),
    Tuple(Vec<Member>),
}

/// Where a parameter is in the struct of the arguments, if it is a member of a tuple.
#[derive(Clone)]
pub struct Place {
    tuple: Ident,
    path: Vec<usize>,
}

impl ToTokens for Place {
    fn to_tokens(&self, tokens: &mut TokenStream) {
        self.tuple.to_tokens(tokens);
        for &index in &self.path {
            let index = syn::Index::from(index);
            tokens.extend(quote!(.#index));
        }
    }
}

/// The members of a tuple as parameters of their own.
type Inputs = Vec<(FnArg, Place)>;

/// Splits a parameter that is a tuple into its members; `None` for other parameters.
///
/// # Errors
/// Attributes that a tuple cannot have.
pub fn split(input: &FnArg) -> Result<Option<(Tuple, Inputs)>, Error> {
    let FnArg::Typed(PatType { attrs, pat, ty, .. }) = input else { return Ok(None) };
    let (Type::Tuple(tuple), Pat::Ident(pat)) = (&**ty, &**pat) else { return Ok(None) };
    for attr in attrs {
        let is_plain = matches!(attr.meta, syn::Meta::Path(_)) || attr.path().is_ident("doc");
        if !is_plain {
            return Err(Error::new(
                attr.span(),
                "a tuple has no default, and is no heuristic: write its members as parameters",
            ));
        }
    }
    let (docs, attrs): (Vec<_>, Vec<_>) = attrs.iter().cloned().partition(|attr| attr.path().is_ident("doc"));
    let mut inputs = Vec::new();
    let root = Place { tuple: pat.ident.clone(), path: Vec::new() };
    let members = members(tuple, &attrs, &root, &mut inputs);
    Ok(Some((Tuple { name: pat.ident.clone(), mutable: pat.mutability.is_some(), docs, members }, inputs)))
}

/// The members of a tuple at `place`; adds their parameters to `inputs`.
fn members(tuple: &syn::TypeTuple, attrs: &[Attribute], place: &Place, inputs: &mut Inputs) -> Vec<Member> {
    let member = |(index, ty): (usize, &Type)| {
        let mut place = place.clone();
        place.path.push(index);
        if let Type::Tuple(inner) = ty {
            return Member::Tuple(members(inner, attrs, &place, inputs));
        }
        let path: String = place.path.iter().map(|index| format!("_{index}")).collect();
        let name = Ident::new(&format!("{}{path}", place.tuple), place.tuple.span());
        let (constexpr, ty) = match constant(ty) {
            Some(inner) => (Some(quote!(#[constexpr])), inner),
            None => (None, ty),
        };
        inputs.push((syn::parse_quote!(#constexpr #(#attrs)* #name: #ty), place));
        Member::Param(name)
    };
    tuple.elems.iter().enumerate().map(member).collect()
}

/// The `T` of `Const<T>`.
fn constant(ty: &Type) -> Option<&Type> {
    let Type::Path(path) = ty else { return None };
    let last = path.path.segments.last().filter(|last| last.ident == "Const")?;
    let PathArguments::AngleBracketed(args) = &last.arguments else { return None };
    match (args.args.first(), args.args.len()) {
        (Some(GenericArgument::Type(inner)), 1) => Some(inner),
        _ => None,
    }
}

impl Tuple {
    /// A tuple of what `of` gives for each parameter.
    pub fn tokens(&self, of: &dyn Fn(&Ident) -> TokenStream) -> TokenStream {
        fn tuple(members: &[Member], of: &dyn Fn(&Ident) -> TokenStream) -> TokenStream {
            let members = members.iter().map(|member| match member {
                Member::Param(name) => of(name),
                Member::Tuple(members) => tuple(members, of),
            });
            quote!((#(#members,)*))
        }
        tuple(&self.members, of)
    }
}
