//! Parses the subset of LLVM IR that the GPU lowering emits.

use super::callee::Callee;
use super::error::{SimError, UnsupportedCode, UnsupportedKind};
use super::ptx::Program;
use crate::ir::MemSem;
use crate::lower::nvptx::{LOC_COMMENT, USER_ASM};
use std::collections::HashMap;
use std::fmt;
use std::rc::Rc;

type Parsed<T> = Result<T, UnsupportedKind>;

/// An LLVM type.
#[derive(Clone, Debug, PartialEq)]
pub enum Ty {
    Void,
    Int(u32),
    Half,
    BFloat,
    Float,
    Double,
    /// A pointer, with its address space.
    Ptr(u32),
    Vector(usize, Box<Ty>),
    Struct(Vec<Ty>),
    Array(usize, Box<Ty>),
}

impl Ty {
    /// Size in memory in bytes.
    pub fn bytes(&self) -> usize {
        match self {
            Ty::Void => 0,
            Ty::Int(bits) => (*bits as usize).div_ceil(8),
            Ty::Half | Ty::BFloat => 2,
            Ty::Float => 4,
            Ty::Double | Ty::Ptr(_) => 8,
            Ty::Vector(n, t) | Ty::Array(n, t) => n * t.bytes(),
            Ty::Struct(list) => list.iter().map(Ty::bytes).sum(),
        }
    }
}

impl fmt::Display for Ty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Ty::Void => f.write_str("void"),
            Ty::Int(bits) => write!(f, "i{bits}"),
            Ty::Half => f.write_str("half"),
            Ty::BFloat => f.write_str("bfloat"),
            Ty::Float => f.write_str("float"),
            Ty::Double => f.write_str("double"),
            Ty::Ptr(0) => f.write_str("ptr"),
            Ty::Ptr(space) => write!(f, "ptr addrspace({space})"),
            Ty::Vector(n, t) => write!(f, "<{n} x {t}>"),
            Ty::Array(n, t) => write!(f, "[{n} x {t}]"),
            Ty::Struct(list) => {
                let list: Vec<String> = list.iter().map(Ty::to_string).collect();
                write!(f, "{{ {} }}", list.join(", "))
            }
        }
    }
}

/// An operand: a register of the function, or a constant.
#[derive(Clone, Debug)]
pub enum Operand {
    Reg(usize),
    Bits(u64),
    Undef,
    /// All zeros, of any type.
    Zero,
}

#[derive(Clone, Debug)]
pub enum Inst {
    Binary {
        op: String,
        ty: Ty,
        a: Operand,
        b: Operand,
    },
    Compare {
        predicate: String,
        ty: Ty,
        a: Operand,
        b: Operand,
    },
    FNeg {
        ty: Ty,
        x: Operand,
    },
    Select {
        c: Operand,
        a: Operand,
        b: Operand,
    },
    Cast {
        op: String,
        from: Ty,
        x: Operand,
        to: Ty,
    },
    Gep {
        element: usize,
        base: Operand,
        index_ty: Ty,
        index: Operand,
    },
    Load {
        ty: Ty,
        space: u32,
        p: Operand,
    },
    AtomicLoad {
        ty: Ty,
        p: Operand,
    },
    Store {
        ty: Ty,
        v: Operand,
        space: u32,
        p: Operand,
    },
    ExtractElement {
        v: Operand,
        i: Operand,
    },
    InsertElement {
        len: usize,
        v: Operand,
        x: Operand,
        i: Operand,
    },
    ExtractValue {
        v: Operand,
        i: usize,
    },
    Call {
        callee: Callee,
        ty: Ty,
        args: Vec<(Ty, Operand)>,
    },
    Asm {
        text: String,
        /// The text as arithmetic on registers; `None` for other assembly of the lowering: memory, synchronization,
        /// MMAs.
        program: Option<Program>,
        constraints: Vec<String>,
        ty: Ty,
        args: Vec<(Ty, Operand)>,
    },
    Phi {
        edges: Vec<(Operand, usize)>,
    },
    Branch {
        to: usize,
    },
    BranchIf {
        c: Operand,
        yes: usize,
        no: usize,
    },
    Ret {
        v: Option<Operand>,
    },
    Atomic {
        op: String,
        p: Operand,
        ty: Ty,
        v: Operand,
        order: MemSem,
    },
    CompareExchange {
        p: Operand,
        ty: Ty,
        expected: Operand,
        new: Operand,
        order: MemSem,
    },
    Alloca,
}

impl Inst {
    fn ends_block(&self) -> bool {
        matches!(self, Inst::Branch { .. } | Inst::BranchIf { .. } | Inst::Ret { .. })
    }
}

#[derive(Clone, Debug)]
pub struct Line {
    pub result: Option<usize>,
    pub inst: Inst,
    pub text: String,
    /// Line number in the module's text, from 1.
    pub number: usize,
    /// Source location of the kernel, from the last location comment; empty if there is none.
    pub source_loc: Rc<str>,
}

#[derive(Clone, Debug, Default)]
pub struct Function {
    pub params: Vec<usize>,
    pub param_types: Vec<Ty>,
    pub blocks: Vec<Vec<Line>>,
    pub registers: usize,
}

#[derive(Clone, Debug, Default)]
pub struct Module {
    pub functions: HashMap<String, Function>,
    pub entry: String,
}

/// Offset of the dynamic shared memory in the shared window; not zero, so that no code relies on zero.
pub const SMEM_BASE: u64 = 1024;

/// Parses a module.
///
/// # Errors
/// The unsupported code, and its location.
pub fn parse(text: &str) -> Result<Module, SimError> {
    let mut module = Module::default();
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        if let Some(rest) = line.strip_prefix("define ") {
            let body: Vec<(usize, &str)> = lines.by_ref().take_while(|(_, l)| *l != "}").collect();
            let mut parser = FunctionParser { line: (number, line), ..FunctionParser::default() };
            let function = parser.function(rest, &body).map_err(|what| {
                let (line, text) = parser.line;
                let (function, source_loc) = (parser.name.clone(), parser.source_loc.to_string());
                SimError::Unsupported(Box::new(UnsupportedCode {
                    kind: what,
                    function,
                    line,
                    instruction: text.trim().into(),
                    source_loc,
                }))
            })?;
            if rest.starts_with("ptx_kernel") {
                module.entry = parser.name.clone();
            }
            module.functions.insert(parser.name, function);
        }
    }
    super::check::check(&module)?;
    Ok(module)
}

#[derive(Default)]
struct FunctionParser<'a> {
    name: String,
    /// The current line, with its number.
    line: (usize, &'a str),
    registers: HashMap<String, usize>,
    labels: HashMap<String, usize>,
    source_loc: Rc<str>,
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn skip(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn eat(&mut self, token: &str) -> bool {
        self.skip();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn expect(&mut self, token: &str) -> Parsed<()> {
        match self.eat(token) {
            true => Ok(()),
            false => Err(self.syntax_error(&format!("`{token}`"))),
        }
    }

    /// The error if the text is not what was expected.
    fn syntax_error(&self, expected: &str) -> UnsupportedKind {
        UnsupportedKind::Syntax(format!("expected {expected} at `{}`", self.rest.trim()))
    }

    /// Skips past the first of these characters; returns the skipped text.
    fn skip_past(&mut self, end: &[char]) -> Parsed<&'a str> {
        let (skipped, rest) = self.rest.split_once(end).ok_or_else(|| self.syntax_error(&format!("one of {end:?}")))?;
        self.rest = rest;
        Ok(skipped)
    }

    fn number<N: std::str::FromStr>(&mut self) -> Parsed<N> {
        let here = self.rest;
        self.word().parse().map_err(|_| Cursor { rest: here }.syntax_error("a number"))
    }

    /// Reads a word of letters, digits and the punctuation of names.
    fn word(&mut self) -> &'a str {
        self.skip();
        let end = self.rest.find(|c: char| !(c.is_alphanumeric() || "._-+%@$".contains(c))).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    fn ty(&mut self) -> Parsed<Ty> {
        self.skip();
        for (open, close) in [("<", ">"), ("[", "]")] {
            if self.eat(open) {
                let n = self.number()?;
                self.expect("x")?;
                let t = Box::new(self.ty()?);
                self.expect(close)?;
                return Ok(if open == "<" { Ty::Vector(n, t) } else { Ty::Array(n, t) });
            }
        }
        if self.eat("{") {
            let mut list = vec![self.ty()?];
            while self.eat(",") {
                list.push(self.ty()?);
            }
            self.expect("}")?;
            return Ok(Ty::Struct(list));
        }
        let word = self.word();
        Ok(match word {
            "void" => Ty::Void,
            "half" => Ty::Half,
            "bfloat" => Ty::BFloat,
            "float" => Ty::Float,
            "double" => Ty::Double,
            "ptr" if self.eat("addrspace(") => {
                let space = self.number()?;
                self.expect(")")?;
                Ty::Ptr(space)
            }
            "ptr" => Ty::Ptr(0),
            _ => match word.strip_prefix('i').and_then(|bits| bits.parse().ok()) {
                Some(bits) if matches!(bits, 1..=64 | 128) => Ty::Int(bits),
                _ => {
                    return Err(UnsupportedKind::Type(if word.is_empty() {
                        self.rest.trim().into()
                    } else {
                        word.into()
                    }));
                }
            },
        })
    }
}

impl<'a> FunctionParser<'a> {
    fn register(&mut self, name: &str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name.to_string()).or_insert(next)
    }

    /// Parses a function from the text after `define`.
    fn function(&mut self, definition: &'a str, body: &[(usize, &'a str)]) -> Parsed<Function> {
        let mut f = Function::default();
        let mut c = Cursor { rest: definition };
        c.skip_past(&['@'])?;
        self.name = c.word().to_string();
        c.expect("(")?;
        while !c.eat(")") {
            f.param_types.push(c.ty()?);
            loop {
                if c.eat("byval(") || c.eat("\"") {
                    c.skip_past(&[')', '"'])?;
                }
                match c.word() {
                    name if name.starts_with('%') => {
                        let r = self.register(name);
                        f.params.push(r);
                        break;
                    }
                    "" => return Err(c.syntax_error("the name of a parameter")),
                    _ => {}
                }
            }
            c.eat(",");
        }
        // Collects the labels first, because branches go forward. The code before the first label is the entry block.
        let mut count = 0;
        for (_, line) in body {
            if let Some(label) = label(line) {
                if count == 0 {
                    count = 1;
                }
                let number = if self.labels.is_empty() && label == "entry" { 0 } else { count };
                count = count.max(number + 1);
                self.labels.insert(label.to_string(), number);
            }
        }
        f.blocks = vec![Vec::new()];
        for &(number, line) in body {
            self.line = (number, line);
            match label(line) {
                Some("entry") if f.blocks.len() == 1 && f.blocks[0].is_empty() => {}
                Some(_) => f.blocks.push(Vec::new()),
                None if line.trim().is_empty() => {}
                None if line.trim_start().starts_with(';') => {
                    if let Some(source_loc) = line.trim_start().strip_prefix(LOC_COMMENT) {
                        self.source_loc = source_loc.trim().into();
                    }
                }
                None => {
                    let parsed = self.instruction(line)?;
                    f.blocks.last_mut().expect("internal error: no block").push(parsed);
                }
            }
        }
        if let Some(open) = f.blocks.iter().position(|block| !block.last().is_some_and(|line| line.inst.ends_block())) {
            return Err(UnsupportedKind::Syntax(format!(
                "block {open} of the function has no terminator (`br` or `ret`)"
            )));
        }
        f.registers = self.registers.len();
        Ok(f)
    }

    fn instruction(&mut self, text: &str) -> Parsed<Line> {
        let mut c = Cursor { rest: text };
        c.skip();
        let result = match c.rest.strip_prefix('%') {
            Some(_) => {
                let name = c.word().to_string();
                c.expect("=")?;
                Some(self.register(&name))
            }
            None => None,
        };
        let inst = self.inst(&mut c)?;
        if matches!(inst, Inst::Phi { .. }) && result.is_none() {
            return Err(UnsupportedKind::Syntax("a phi without a result".into()));
        }
        Ok(Line {
            result,
            inst,
            text: text.trim().to_string(),
            number: self.line.0,
            source_loc: self.source_loc.clone(),
        })
    }

    fn operand(&mut self, c: &mut Cursor, ty: &Ty) -> Parsed<Operand> {
        c.skip();
        let here = c.rest;
        let word = c.word();
        if word.starts_with('%') {
            return Ok(Operand::Reg(self.register(word)));
        }
        let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
        let bits = match word {
            "true" => Some(1),
            "false" => Some(0),
            "poison" | "undef" => return Ok(Operand::Undef),
            "zeroinitializer" | "null" => return Ok(Operand::Zero),
            "@smem" => Some(SMEM_BASE),
            w if w.starts_with('@') => Some(0),
            w => match (w.strip_prefix("0xH").or(w.strip_prefix("0xR")), w.strip_prefix("0x"), ty) {
                (Some(digits), ..) => hex(digits),
                (None, Some(digits), _) => hex(digits).map(|bits| float_bits(f64::from_bits(bits), ty)),
                (None, None, Ty::Float | Ty::Double) => w.parse().ok().map(|x| float_bits(x, ty)),
                (None, None, _) => w.parse::<i128>().ok().map(|n| n as u64),
            },
        };
        bits.map(Operand::Bits).ok_or_else(|| Cursor { rest: here }.syntax_error(&format!("an operand of type {ty}")))
    }

    fn typed(&mut self, c: &mut Cursor) -> Parsed<(Ty, Operand)> {
        let ty = c.ty()?;
        while ["noundef", "nonnull"].iter().any(|w| c.eat(w)) {}
        let v = self.operand(c, &ty)?;
        Ok((ty, v))
    }

    fn label(&self, name: &str) -> Parsed<usize> {
        let found = name.strip_prefix('%').and_then(|name| self.labels.get(name));
        found.copied().ok_or_else(|| UnsupportedKind::Syntax(format!("unknown label `{name}`")))
    }

    fn target(&self, c: &mut Cursor) -> Parsed<usize> {
        c.expect("label")?;
        self.label(c.word())
    }

    #[expect(clippy::too_many_lines, reason = "one arm per instruction")]
    fn inst(&mut self, c: &mut Cursor) -> Parsed<Inst> {
        let op = c.word().to_string();
        Ok(match op.as_str() {
            "add" | "sub" | "mul" | "udiv" | "sdiv" | "urem" | "srem" | "and" | "or" | "xor" | "shl" | "lshr"
            | "ashr" | "fadd" | "fsub" | "fmul" | "fdiv" | "frem" => {
                while ["nsw", "nuw", "exact", "disjoint", "contract"].iter().any(|w| c.eat(w)) {}
                let ty = c.ty()?;
                let a = self.operand(c, &ty)?;
                c.expect(",")?;
                let b = self.operand(c, &ty)?;
                Inst::Binary { op, ty, a, b }
            }
            "icmp" | "fcmp" => {
                let predicate = format!("{}{}", &op[..1], c.word());
                let ty = c.ty()?;
                let a = self.operand(c, &ty)?;
                c.expect(",")?;
                let b = self.operand(c, &ty)?;
                Inst::Compare { predicate, ty, a, b }
            }
            "fneg" => {
                let (ty, x) = self.typed(c)?;
                Inst::FNeg { ty, x }
            }
            "select" => {
                let (_, cond) = self.typed(c)?;
                c.expect(",")?;
                let (_, a) = self.typed(c)?;
                c.expect(",")?;
                let (_, b) = self.typed(c)?;
                Inst::Select { c: cond, a, b }
            }
            "zext" | "sext" | "trunc" | "fpext" | "fptrunc" | "sitofp" | "uitofp" | "fptosi" | "fptoui"
            | "ptrtoint" | "inttoptr" | "bitcast" | "addrspacecast" => {
                c.eat("nneg");
                let (from, x) = self.typed(c)?;
                c.expect("to")?;
                let to = c.ty()?;
                Inst::Cast { op, from, x, to }
            }
            "getelementptr" => {
                let element = c.ty()?.bytes();
                c.expect(",")?;
                let (_, base) = self.typed(c)?;
                c.expect(",")?;
                let (index_ty, index) = self.typed(c)?;
                Inst::Gep { element, base, index_ty, index }
            }
            "load" => {
                let atomic = c.eat("atomic");
                let ty = c.ty()?;
                c.expect(",")?;
                let (p_ty, p) = self.typed(c)?;
                if atomic {
                    return Ok(Inst::AtomicLoad { ty, p });
                }
                Inst::Load { ty, space: space(&p_ty)?, p }
            }
            "store" => {
                let (ty, v) = self.typed(c)?;
                c.expect(",")?;
                let (p_ty, p) = self.typed(c)?;
                Inst::Store { ty, v, space: space(&p_ty)?, p }
            }
            "extractelement" => {
                let (_, v) = self.typed(c)?;
                c.expect(",")?;
                let (_, i) = self.typed(c)?;
                Inst::ExtractElement { v, i }
            }
            "insertelement" => {
                let (ty, v) = self.typed(c)?;
                c.expect(",")?;
                let (_, x) = self.typed(c)?;
                c.expect(",")?;
                let (_, i) = self.typed(c)?;
                let Ty::Vector(len, _) = ty else {
                    return Err(UnsupportedKind::Instruction(format!("insertelement into {ty}")));
                };
                Inst::InsertElement { len, v, x, i }
            }
            "extractvalue" => {
                let (_, v) = self.typed(c)?;
                c.expect(",")?;
                Inst::ExtractValue { v, i: c.number()? }
            }
            "call" => self.call(c)?,
            "phi" => {
                let ty = c.ty()?;
                let mut edges = Vec::new();
                loop {
                    c.expect("[")?;
                    let v = self.operand(c, &ty)?;
                    c.expect(",")?;
                    let from = c.word();
                    edges.push((v, self.label(from)?));
                    c.expect("]")?;
                    if !c.eat(",") {
                        break;
                    }
                }
                Inst::Phi { edges }
            }
            "br" => {
                if c.eat("i1 ") {
                    let cond = self.operand(c, &Ty::Int(1))?;
                    c.expect(",")?;
                    let yes = self.target(c)?;
                    c.expect(",")?;
                    let no = self.target(c)?;
                    Inst::BranchIf { c: cond, yes, no }
                } else {
                    Inst::Branch { to: self.target(c)? }
                }
            }
            "ret" => {
                if c.eat("void") {
                    Inst::Ret { v: None }
                } else {
                    let (_, v) = self.typed(c)?;
                    Inst::Ret { v: Some(v) }
                }
            }
            "atomicrmw" => {
                let op = c.word().to_string();
                let (_, p) = self.typed(c)?;
                c.expect(",")?;
                let (ty, v) = self.typed(c)?;
                Inst::Atomic { op, p, ty, v, order: memory_order(c.rest) }
            }
            "cmpxchg" => {
                let (_, p) = self.typed(c)?;
                c.expect(",")?;
                let (ty, expected) = self.typed(c)?;
                c.expect(",")?;
                let (_, new) = self.typed(c)?;
                Inst::CompareExchange { p, ty, expected, new, order: memory_order(c.rest) }
            }
            "alloca" => Inst::Alloca,
            other => return Err(UnsupportedKind::Instruction(other.into())),
        })
    }

    fn call(&mut self, c: &mut Cursor) -> Parsed<Inst> {
        if c.eat("range(") {
            c.skip_past(&[')'])?;
        }
        let ty = c.ty()?;
        let mut asm = None;
        if c.eat("asm") {
            c.eat("sideeffect");
            let text = quoted(c)?;
            c.expect(",")?;
            asm = Some((text, quoted(c)?));
        }
        let name = if asm.is_none() { c.word().trim_start_matches('@').to_string() } else { String::new() };
        c.expect("(")?;
        let mut args = Vec::new();
        while !c.eat(")") {
            args.push(self.typed(c)?);
            c.eat(",");
        }
        let Some((text, constraints)) = asm else { return Ok(Inst::Call { callee: Callee::of(&name), ty, args }) };
        let constraints: Vec<String> = constraints.split(',').map(String::from).collect();
        // Assembly written by users is arithmetic, even if the lowering could emit the same text.
        let program = match super::asm::is_compiler_asm(&text) && !c.rest.contains(USER_ASM) {
            true => None,
            false => Some(Program::parse(&text, &constraints, &ty, args.iter().map(|(ty, _)| ty))?),
        };
        Ok(Inst::Asm { text, program, constraints, ty, args })
    }
}

fn label(line: &str) -> Option<&str> {
    line.strip_suffix(':').filter(|l| !l.starts_with(' '))
}

fn space(ty: &Ty) -> Parsed<u32> {
    match ty {
        Ty::Ptr(n) => Ok(*n),
        other => Err(UnsupportedKind::Syntax(format!("expected an address, found a value of type {other}"))),
    }
}

fn quoted(c: &mut Cursor) -> Parsed<String> {
    c.expect("\"")?;
    c.skip_past(&['"']).map(String::from)
}

fn float_bits(x: f64, ty: &Ty) -> u64 {
    match ty {
        Ty::Float => u64::from((x as f32).to_bits()),
        _ => x.to_bits(),
    }
}

/// What the rest of an atomic instruction (or of its PTX) orders between programs: nothing at the scope of one block.
pub(super) fn memory_order(rest: &str) -> MemSem {
    let rest = rest.split([';', ',']).next().unwrap_or_default();
    let has = |word: &str| rest.split(|c: char| !c.is_alphanumeric() && c != '_').any(|w| w == word);
    if has("block") || has("cta") {
        MemSem::Relaxed
    } else if has("acq_rel") || has("seq_cst") {
        MemSem::AcqRel
    } else if has("release") {
        MemSem::Release
    } else if has("acquire") {
        MemSem::Acquire
    } else {
        MemSem::Relaxed
    }
}
