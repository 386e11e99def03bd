//! Parser: a tokenizer, and one function per rule of the grammar in [`super`].

use crate::ir::{Arg, Attr, BlockId, DType, Elem, Func, LayoutId, Loc, Op, Placement, Type, Value};
use crate::layout::LayoutError;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

/// A syntax error and its position.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError {
    /// 1-based.
    pub line: usize,
    /// 1-based, in characters.
    pub column: usize,
    pub message: String,
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}: {}", self.line, self.column, self.message)
    }
}

impl std::error::Error for ParseError {}

/// Parses one function, whose ops have no locations. Never panics.
pub fn parse(text: &str) -> Result<Func, ParseError> {
    parse_as(None, text)
}

/// Parses one function, whose ops have their places in the text for locations; `file` is its name. Never panics.
pub fn parse_file(file: &str, text: &str) -> Result<Func, ParseError> {
    parse_as(Some(file.into()), text)
}

fn parse_as(file: Option<Arc<str>>, text: &str) -> Result<Func, ParseError> {
    let mut func = Func::new("");
    let header = layouts(text, &mut func)?;
    let mut p = Parser { file, tokens: tokenize(text, header)?, at: 0, func, values: HashMap::new(), depth: 0 };
    p.function()?;
    Ok(p.func)
}

/// Parses the lines `#l0 = linear<…>` before the kernel; returns the number of lines before it.
fn layouts(text: &str, func: &mut Func) -> Result<usize, ParseError> {
    for (row, line) in text.lines().enumerate() {
        let trimmed = line.trim();
        if trimmed.is_empty() || trimmed.starts_with("//") {
            continue;
        }
        let Some(rest) = trimmed.strip_prefix("#l") else { return Ok(row) };
        let error = |message: String| ParseError { line: row + 1, column: 1, message };
        let (number, layout) =
            rest.split_once('=').ok_or_else(|| error("expected a layout, as `#l0 = linear<…>`".into()))?;
        if number.trim().parse() != Ok(func.layouts.len()) {
            return Err(error(format!(
                "expected the layout `#l{}`: layouts are numbered in order",
                func.layouts.len()
            )));
        }
        func.layouts.push(layout.trim().parse().map_err(|e: LayoutError| error(e.to_string()))?);
    }
    Ok(0)
}

/// Maximum nesting of regions, so that no text overflows the stack.
const MAX_DEPTH: usize = 64;
/// Maximum number of elements of a tile (Triton's limit too).
const MAX_ELEMENTS: usize = 1 << 20;
/// Maximum nesting of lists in an attribute.
const MAX_LIST_DEPTH: usize = 8;

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Value(String),
    Symbol(String),
    Hash(String),
    Number(String),
    Str(String),
    Punct(char),
    End,
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Token::Word(s) | Token::Number(s) => write!(f, "`{s}`"),
            Token::Value(s) => write!(f, "`%{s}`"),
            Token::Symbol(s) => write!(f, "`@{s}`"),
            Token::Hash(s) => write!(f, "`#{s}`"),
            Token::Str(s) => write!(f, "\"{s}\""),
            Token::Punct(c) => write!(f, "`{c}`"),
            Token::End => f.write_str("the end of the text"),
        }
    }
}

struct Spanned {
    token: Token,
    line: usize,
    column: usize,
}

/// Tokens of the text after the first `skip` lines.
fn tokenize(text: &str, skip: usize) -> Result<Vec<Spanned>, ParseError> {
    let mut tokens = Vec::new();
    for (row, line_text) in text.lines().enumerate().skip(skip) {
        let chars: Vec<char> = line_text.chars().collect();
        let mut i = 0;
        while i < chars.len() {
            let (line, column) = (row + 1, i + 1);
            let error = |message: String| ParseError { line, column, message };
            let c = chars[i];
            let word_end = |from: usize| {
                (from..chars.len()).find(|&j| !(chars[j].is_alphanumeric() || chars[j] == '_')).unwrap_or(chars.len())
            };
            let token = match c {
                ' ' | '\t' | '\r' => {
                    i += 1;
                    continue;
                }
                '/' if chars.get(i + 1) == Some(&'/') => break,
                '%' | '@' | '#' => {
                    let end = word_end(i + 1);
                    let name: String = chars[i + 1..end].iter().collect();
                    if name.is_empty() {
                        return Err(error(format!("expected a name after `{c}`")));
                    }
                    i = end;
                    match c {
                        '%' => Token::Value(name),
                        '@' => Token::Symbol(name),
                        _ => Token::Hash(name),
                    }
                }
                '"' => {
                    let (s, end) = string_literal(&chars, i + 1).map_err(error)?;
                    i = end;
                    Token::Str(s)
                }
                c if c.is_ascii_digit() || (c == '-' && chars.get(i + 1).is_some_and(|d| d.is_ascii_digit())) => {
                    let end = number_end(&chars, i);
                    let s: String = chars[i..end].iter().collect();
                    i = end;
                    Token::Number(s)
                }
                '-' if chars[i + 1..].starts_with(&['i', 'n', 'f']) => {
                    i += 4;
                    Token::Word("-inf".into())
                }
                c if c.is_alphabetic() || c == '_' => {
                    let end = word_end(i);
                    let s: String = chars[i..end].iter().collect();
                    i = end;
                    Token::Word(s)
                }
                '(' | ')' | '{' | '}' | '[' | ']' | '<' | '>' | ',' | ':' | '=' => {
                    i += 1;
                    Token::Punct(c)
                }
                other => return Err(error(format!("unexpected character `{}`", other.escape_default()))),
            };
            tokens.push(Spanned { token, line, column });
        }
    }
    let line = text.lines().count().max(1);
    tokens.push(Spanned { token: Token::End, line, column: 1 });
    Ok(tokens)
}

/// End of a number that starts at `from`: digits, then at most one fraction and exponent. `64x128xf32` stops at `x`.
fn number_end(chars: &[char], from: usize) -> usize {
    let digits = |mut j: usize| {
        while j < chars.len() && chars[j].is_ascii_digit() {
            j += 1;
        }
        j
    };
    let mut end = digits(from + 1);
    if chars.get(end) == Some(&'.') {
        end = digits(end + 1);
    }
    if chars.get(end) == Some(&'e') {
        let sign = usize::from(matches!(chars.get(end + 1), Some('-' | '+')));
        let exponent = digits(end + 1 + sign);
        if exponent > end + 1 + sign {
            end = exponent;
        }
    }
    end
}

/// Reads a string after the opening quote, with Rust's escapes; returns it and the index after the closing quote.
fn string_literal(chars: &[char], mut i: usize) -> Result<(String, usize), String> {
    let mut s = String::new();
    while let Some(&c) = chars.get(i) {
        i += 1;
        match c {
            '"' => return Ok((s, i)),
            '\\' => {
                let escape = chars.get(i).copied();
                i += 1;
                match escape {
                    Some('n') => s.push('\n'),
                    Some('t') => s.push('\t'),
                    Some('r') => s.push('\r'),
                    Some(c @ ('"' | '\'' | '\\')) => s.push(c),
                    Some('u') => {
                        let close = chars[i.min(chars.len())..].iter().position(|&c| c == '}').map(|n| n + i);
                        let digits: String =
                            close.map(|n| chars[(i + 1).min(n)..n].iter().collect()).unwrap_or_default();
                        let c = u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32);
                        s.push(c.ok_or("malformed \\u{…} escape")?);
                        i = close.map_or(i, |n| n + 1);
                    }
                    _ => return Err("unknown escape in a string".into()),
                }
            }
            c => s.push(c),
        }
    }
    Err("a string without a closing quote".into())
}

struct Parser {
    /// The name of the text, for locations.
    file: Option<Arc<str>>,
    tokens: Vec<Spanned>,
    at: usize,
    func: Func,
    values: HashMap<String, Value>,
    depth: usize,
}

type Result<T, E = ParseError> = std::result::Result<T, E>;

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].token
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        token
    }

    /// An error at the cursor.
    fn error<T>(&self, message: impl Into<String>) -> Result<T> {
        let t = &self.tokens[self.at];
        Err(ParseError { line: t.line, column: t.column, message: message.into() })
    }

    fn expected<T>(&self, what: &str) -> Result<T> {
        self.error(format!("expected {what}, found {}", self.peek()))
    }

    fn eat(&mut self, c: char) -> bool {
        let found = *self.peek() == Token::Punct(c);
        if found {
            self.next();
        }
        found
    }

    fn punct(&mut self, c: char) -> Result<()> {
        if self.eat(c) { Ok(()) } else { self.expected(&format!("`{c}`")) }
    }

    fn word(&mut self, what: &str) -> Result<String> {
        match self.peek() {
            Token::Word(_) => match self.next() {
                Token::Word(s) => Ok(s),
                _ => unreachable!("peeked a word"),
            },
            _ => self.expected(what),
        }
    }

    fn integer(&mut self, what: &str) -> Result<usize> {
        match self.peek() {
            Token::Number(n) => match n.parse() {
                Ok(n) => {
                    self.next();
                    Ok(n)
                }
                Err(_) => self.expected(what),
            },
            _ => self.expected(what),
        }
    }

    fn function(&mut self) -> Result<()> {
        if self.word("`kernel`")? != "kernel" {
            self.at = 0;
            return self.expected("`kernel`");
        }
        self.func.name = match self.next() {
            Token::Symbol(name) => name,
            _ => return self.error("expected the kernel's name, as `@name`"),
        };
        self.punct('(')?;
        while !self.eat(')') {
            self.argument()?;
            if !self.eat(',') && *self.peek() != Token::Punct(')') {
                return self.expected("`,` or `)`");
            }
        }
        let body = self.func.body;
        self.block(body)?;
        if *self.peek() != Token::End { self.expected("the end of the text") } else { Ok(()) }
    }

    fn argument(&mut self) -> Result<()> {
        let Token::Value(name) = self.next() else { return self.error("expected an argument, as `%name: type`") };
        self.punct(':')?;
        let ty = self.ty()?;
        let mut arg = Arg { name: name.clone(), divisible_by: 1, equal_to: None };
        for (key, value) in self.attributes()? {
            match (key.as_str(), value) {
                ("divisible_by", Attr::Int(n)) if n > 0 => arg.divisible_by = n as u64,
                ("equal_to", Attr::Int(n)) => arg.equal_to = Some(n),
                _ => return self.error(format!("unknown or malformed argument attribute `{key}`")),
            }
        }
        let v = self.func.add_arg(arg, ty);
        self.define(name, v)
    }

    fn define(&mut self, name: String, v: Value) -> Result<()> {
        if self.values.contains_key(&name) {
            return self.error(format!("`%{name}` is defined twice"));
        }
        self.values.insert(name, v);
        Ok(())
    }

    fn block(&mut self, block: BlockId) -> Result<()> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return self.error(format!("regions are nested deeper than {MAX_DEPTH}"));
        }
        self.punct('{')?;
        while !self.eat('}') {
            self.op(block)?;
        }
        self.depth -= 1;
        Ok(())
    }

    fn op(&mut self, block: BlockId) -> Result<()> {
        let mut names = Vec::new();
        while let Token::Value(name) = self.peek() {
            names.push(name.clone());
            self.next();
            if !self.eat(',') {
                self.punct('=')?;
                break;
            }
        }
        let start = self.at;
        let mnemonic = self.word("an op")?;
        let mut operands = Vec::new();
        // Operands start on the line of the mnemonic: a value on the next line is a result of the next op.
        while let Token::Value(name) = self.peek()
            && (!operands.is_empty() || self.tokens[self.at].line == self.tokens[start].line)
        {
            let Some(&v) = self.values.get(name) else {
                return self.error(format!("`%{name}` is not defined here"));
            };
            operands.push(v);
            self.next();
            if !self.eat(',') {
                break;
            }
        }
        let mut attributes = self.attributes()?;
        let mnemonic = current_names(&mnemonic, &mut attributes);
        let op = match Op::from_parts(mnemonic, &attributes) {
            Ok(op) => op,
            Err(message) => {
                self.at = start;
                return self.error(message);
            }
        };
        let mut types = Vec::new();
        if self.eat(':') {
            types.push(self.ty()?);
            while self.eat(',') {
                types.push(self.ty()?);
            }
        }
        if types.len() != names.len() {
            self.at = start;
            return self.error(format!("{} results are named, but {} types are given", names.len(), types.len()));
        }
        let place = self.place()?;
        let mut regions = Vec::new();
        while *self.peek() == Token::Punct('(') {
            regions.push(self.region()?);
        }
        let (line, column) = (self.tokens[start].line as u32, self.tokens[start].column as u32);
        let loc = self.file.clone().map_or(Loc::unknown(), |file| Loc { file, line, column });
        let id = self.func.append(block, op, operands, types, regions, loc);
        self.func.set_place(id, place);
        for (i, name) in names.into_iter().enumerate() {
            let v = self.func.op(id).results[i];
            self.define(name, v)?;
        }
        Ok(())
    }

    /// The placement of an op: `at {stage = 1, order = 2}`.
    fn place(&mut self) -> Result<Option<Placement>> {
        if *self.peek() != Token::Word("at".into()) {
            return Ok(None);
        }
        let start = self.at;
        self.next();
        if *self.peek() != Token::Punct('{') {
            return self.expected("`{`, as in `at {stage = 0}`");
        }
        let attributes = self.attributes()?;
        Placement::from_attributes(&attributes).map(Some).or_else(|message| {
            self.at = start;
            self.error(message)
        })
    }

    fn region(&mut self) -> Result<BlockId> {
        let region = self.func.add_block();
        self.punct('(')?;
        while !self.eat(')') {
            let Token::Value(name) = self.next() else { return self.error("expected a parameter, as `%name: type`") };
            self.punct(':')?;
            let ty = self.ty()?;
            let v = self.func.add_param(region, ty);
            self.define(name, v)?;
            if !self.eat(',') && *self.peek() != Token::Punct(')') {
                return self.expected("`,` or `)`");
            }
        }
        self.block(region)?;
        Ok(region)
    }

    fn attributes(&mut self) -> Result<Vec<(String, Attr)>> {
        let mut list = Vec::new();
        // The brace of a region follows `)`, so a brace here opens attributes.
        if !self.eat('{') {
            return Ok(list);
        }
        while !self.eat('}') {
            let key = self.word("an attribute name")?;
            if list.iter().any(|(known, _)| *known == key) {
                return self.error(format!("attribute `{key}` is given twice"));
            }
            self.punct('=')?;
            let value = self.attribute(0)?;
            list.push((key, value));
            if !self.eat(',') && *self.peek() != Token::Punct('}') {
                return self.expected("`,` or `}`");
            }
        }
        Ok(list)
    }

    fn attribute(&mut self, depth: usize) -> Result<Attr> {
        if depth > MAX_LIST_DEPTH {
            return self.error(format!("lists are nested deeper than {MAX_LIST_DEPTH}"));
        }
        match self.peek().clone() {
            Token::Number(n) => {
                let parsed = n
                    .parse()
                    .ok()
                    .map(Attr::Int)
                    .or_else(|| if n.contains(['.', 'e']) { n.parse().ok().map(Attr::Float) } else { None });
                match parsed {
                    Some(attr) => {
                        self.next();
                        Ok(attr)
                    }
                    None => self.error(format!("`{n}` does not fit into 64 bits")),
                }
            }
            Token::Str(s) => {
                self.next();
                Ok(Attr::Str(s))
            }
            Token::Word(w) => {
                self.next();
                Ok(Attr::Ident(w))
            }
            Token::Punct('[') => {
                self.next();
                let mut items = Vec::new();
                while !self.eat(']') {
                    items.push(self.attribute(depth + 1)?);
                    if !self.eat(',') && *self.peek() != Token::Punct(']') {
                        return self.expected("`,` or `]`");
                    }
                }
                Ok(Attr::List(items))
            }
            _ => self.expected("an attribute value"),
        }
    }

    fn ty(&mut self) -> Result<Type> {
        let word = self.word("a type")?;
        match word.as_str() {
            "tensor" => {
                let (shape, elem) = self.shaped()?;
                let layout = if self.eat(',') { Some(self.layout_id()?) } else { None };
                self.punct('>')?;
                Ok(Type::Tensor { shape, elem, layout })
            }
            "view" => {
                let (block, elem) = self.shaped()?;
                self.punct('>')?;
                match elem {
                    Elem::Num(elem) => Ok(Type::View { block, elem }),
                    Elem::Ptr(_) => self.error("the element type of a view should be a number type"),
                }
            }
            "shared" => {
                let (shape, elem) = self.shaped()?;
                self.punct(',')?;
                let layout = self.layout_id()?;
                self.punct('>')?;
                match elem {
                    Elem::Num(elem) => Ok(Type::Shared { shape, elem, layout }),
                    Elem::Ptr(_) => self.error("the element type of shared memory should be a number type"),
                }
            }
            "barrier" => {
                self.punct('<')?;
                let count = self.integer("a count")?;
                self.punct('>')?;
                Ok(Type::Barrier { count })
            }
            other => Ok(Type::Scalar(self.elem(other)?)),
        }
    }

    fn elem(&mut self, word: &str) -> Result<Elem> {
        if word == "ptr" {
            self.punct('<')?;
            let pointee = self.word("an element type")?;
            self.punct('>')?;
            return match DType::from_name(&pointee) {
                Some(d) => Ok(Elem::Ptr(d)),
                None => self.error(format!("unknown element type `{pointee}`")),
            };
        }
        match DType::from_name(word) {
            Some(d) => Ok(Elem::Num(d)),
            None => self.error(format!("unknown type `{word}`")),
        }
    }

    /// `<64x128xf32`, without the closing bracket. The tokenizer gives `64` and the word `x128xf32`, so extents are
    /// split off words.
    fn shaped(&mut self) -> Result<(Vec<usize>, Elem)> {
        self.punct('<')?;
        let mut shape = vec![self.integer("an extent")?];
        let word = self.word("`x` and an element type")?;
        let mut rest = word.as_str();
        loop {
            let Some(after) = rest.strip_prefix('x') else {
                return self.error(format!("malformed shape near `{rest}`"));
            };
            let digits = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
            if digits == 0 {
                let elem = self.elem(after)?;
                let elements = shape.iter().try_fold(1usize, |n, &s| n.checked_mul(s));
                return match elements {
                    Some(1..=MAX_ELEMENTS) => Ok((shape, elem)),
                    _ => self.error(format!("a tile should have 1 to {MAX_ELEMENTS} elements")),
                };
            }
            match after[..digits].parse() {
                Ok(n) => shape.push(n),
                Err(_) => return self.error(format!("malformed extent in `{word}`")),
            }
            rest = &after[digits..];
        }
    }

    fn layout_id(&mut self) -> Result<LayoutId> {
        match self.next() {
            Token::Hash(name) => match name.strip_prefix('l').and_then(|n| n.parse().ok()) {
                Some(n) if (n as usize) < self.func.layouts.len() => Ok(LayoutId(n)),
                Some(n) => self.error(format!("the layout `#l{n}` is not defined above")),
                None => self.error("expected a layout, as `#l0`"),
            },
            _ => self.error("expected a layout, as `#l0`"),
        }
    }
}

/// The current mnemonic for a current or former one. Removes former hints, which schedules have replaced.
fn current_names<'t>(mnemonic: &'t str, attributes: &mut Vec<(String, Attr)>) -> &'t str {
    if mnemonic == "wgmma" {
        attributes.retain(|(name, _)| !["late", "stage_one", "open", "defer_wait"].contains(&name.as_str()));
    }
    match mnemonic {
        "take_turn" => "pingpong_wait",
        "pass_turn" => "pingpong_arrive",
        "roles" => "warp_specialize",
        other => other,
    }
}
