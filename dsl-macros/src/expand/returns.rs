//! Lowers early `return`s: the statements after an `if` that returns move into the branches that do not return.

use proc_macro2::{Ident, TokenStream, TokenTree};
use quote::ToTokens;
use std::collections::HashSet;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Block, Error, Expr, ExprIf, Item, Stmt, UseGlob, UseName, UseRename, parse_quote_spanned};

use super::branches::else_block;
use super::control::unused_value;
use crate::parse::assigned::bound_names;

/// Lowers the statements of a function to statements without `return`; the last expression is the function's value.
pub fn lower(stmts: Vec<Stmt>, errors: &mut Vec<Error>) -> Vec<Stmt> {
    let mut done = Vec::new();
    let mut rest = stmts.into_iter();
    while let Some(stmt) = rest.next() {
        match stmt {
            Stmt::Expr(Expr::Return(ret), _) => {
                if let Some(value) = ret.expr {
                    done.push(Stmt::Expr(*value, None));
                }
                return done;
            }
            Stmt::Expr(Expr::If(branch), semi) if returns(&branch) => {
                let rest: Vec<Stmt> = rest.collect();
                done.push(Stmt::Expr(Expr::If(with_rest(branch, &rest, errors)), None));
                let _ = semi;
                return done;
            }
            other => done.push(other),
        }
    }
    done
}

/// Appends `rest` to every branch that does not return.
fn with_rest(mut branch: ExprIf, rest: &[Stmt], errors: &mut Vec<Error>) -> ExprIf {
    branch.then_branch = continued(branch.then_branch, rest, errors);
    let (token, otherwise) = match branch.else_branch.take() {
        Some((token, otherwise)) => (token, else_block(&otherwise)),
        None => (Default::default(), Block { brace_token: branch.then_branch.brace_token, stmts: Vec::new() }),
    };
    let otherwise = continued(otherwise, rest, errors);
    let block = syn::ExprBlock { attrs: Vec::new(), label: None, block: otherwise };
    branch.else_branch = Some((token, Box::new(Expr::Block(block))));
    branch
}

fn continued(mut block: Block, rest: &[Stmt], errors: &mut Vec<Error>) -> Block {
    if !diverges(&block.stmts) {
        check_names(&block, rest, errors);
        // The last expression of the branch becomes a statement, which has no value.
        match block.stmts.pop() {
            Some(Stmt::Expr(value, None)) if !rest.is_empty() => block.stmts.push(match unused_value(&value) {
                true => parse_quote_spanned!(value.span()=> let () = #value;),
                false => Stmt::Expr(value, Some(Default::default())),
            }),
            last => block.stmts.extend(last),
        }
        block.stmts.extend(rest.iter().cloned());
    }
    block.stmts = lower(std::mem::take(&mut block.stmts), errors);
    block
}

/// Names declared in the branch would capture names in the moved statements.
fn check_names(block: &Block, rest: &[Stmt], errors: &mut Vec<Error>) {
    let mut used = HashSet::new();
    for stmt in rest {
        collect_idents(stmt.to_token_stream(), &mut used);
    }
    for stmt in &block.stmts {
        let names = match stmt {
            Stmt::Local(local) => bound_names(&local.pat),
            Stmt::Item(item) => item_names(item, errors),
            _ => continue,
        };
        for name in names {
            if used.contains(&name.to_string()) {
                errors.push(Error::new(
                    name.span(),
                    format!("another `{name}` is used after this `if`, which returns: rename this one"),
                ));
            }
        }
    }
}

/// The names that an item declares.
fn item_names(item: &Item, errors: &mut Vec<Error>) -> Vec<Ident> {
    struct Imports(Vec<Ident>, Vec<Error>);
    impl<'ast> Visit<'ast> for Imports {
        fn visit_use_name(&mut self, name: &'ast UseName) {
            self.0.push(name.ident.clone());
        }
        fn visit_use_rename(&mut self, rename: &'ast UseRename) {
            self.0.push(rename.rename.clone());
        }
        fn visit_use_glob(&mut self, glob: &'ast UseGlob) {
            let message = "names of this import may be used after this `if`, which returns: import them outside of it";
            self.1.push(Error::new(glob.span(), message));
        }
    }
    match item {
        Item::Const(item) => vec![item.ident.clone()],
        Item::Static(item) => vec![item.ident.clone()],
        Item::Fn(item) => vec![item.sig.ident.clone()],
        Item::Struct(item) => vec![item.ident.clone()],
        Item::Enum(item) => vec![item.ident.clone()],
        Item::Type(item) => vec![item.ident.clone()],
        Item::Mod(item) => vec![item.ident.clone()],
        Item::Trait(item) => vec![item.ident.clone()],
        Item::Macro(item) => item.ident.iter().cloned().collect(),
        Item::Use(item) => {
            let mut imports = Imports(Vec::new(), Vec::new());
            imports.visit_item_use(item);
            errors.extend(imports.1);
            imports.0
        }
        _ => Vec::new(),
    }
}

fn collect_idents(tokens: TokenStream, out: &mut HashSet<String>) {
    for token in tokens {
        match token {
            TokenTree::Ident(ident) => {
                out.insert(Ident::to_string(&ident));
            }
            TokenTree::Group(group) => collect_idents(group.stream(), out),
            TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
    }
}

/// Whether every path through the statements returns.
fn diverges(stmts: &[Stmt]) -> bool {
    stmts.iter().any(|stmt| match stmt {
        Stmt::Expr(Expr::Return(_), _) => true,
        Stmt::Expr(Expr::If(branch), _) => {
            diverges(&branch.then_branch.stmts)
                && branch.else_branch.as_ref().is_some_and(|(_, otherwise)| match &**otherwise {
                    Expr::Block(block) => diverges(&block.block.stmts),
                    Expr::If(inner) => diverges(&[Stmt::Expr(Expr::If(inner.clone()), None)]),
                    _ => false,
                })
        }
        _ => false,
    })
}

/// Whether a branch contains `return`; loops and closures, where `return` is rejected, do not count.
fn returns(branch: &ExprIf) -> bool {
    struct Finder(bool);
    impl<'ast> Visit<'ast> for Finder {
        fn visit_expr(&mut self, expr: &'ast Expr) {
            match expr {
                Expr::Return(_) => self.0 = true,
                Expr::ForLoop(_) | Expr::While(_) | Expr::Loop(_) | Expr::Closure(_) | Expr::Match(_) => {}
                other => visit::visit_expr(self, other),
            }
        }
        fn visit_item(&mut self, _: &'ast syn::Item) {}
    }
    let mut finder = Finder(false);
    finder.visit_expr_if(branch);
    finder.0
}
