//! LLVM IR text, as far as the GPU lowering writes it, to instructions.

use crate::lower::nvptx::PLACE;
use std::collections::HashMap;
use std::rc::Rc;

/// An LLVM type.
#[derive(Clone, Debug, PartialEq)]
pub enum Ty {
    Void,
    Int(u32),
    Half,
    BFloat,
    Float,
    Double,
    /// With its address space.
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

/// An operand: a register of the function, or a constant.
#[derive(Clone, Debug)]
pub enum Operand {
    Reg(usize),
    Bits(u64),
    Undef,
    /// All zeros, of whatever type.
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
        name: String,
        ty: Ty,
        args: Vec<(Ty, Operand)>,
    },
    Asm {
        text: String,
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
    },
    /// With acquire and release, or relaxed.
    CompareExchange {
        p: Operand,
        ty: Ty,
        expected: Operand,
        new: Operand,
        synchronizes: bool,
    },
    Alloca,
}

#[derive(Clone, Debug)]
pub struct Line {
    pub result: Option<usize>,
    pub inst: Inst,
    pub text: String,
    /// The line of the kernel's source that it comes from, as the last comment says; empty where there is none.
    pub place: Rc<str>,
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

/// Where the dynamic shared memory starts in the shared window; other than zero, so that nobody relies on it.
pub const SMEM_BASE: u64 = 1024;

/// Reads a module. What it does not know is a reason to teach it, so it panics with the line.
pub fn parse(text: &str) -> Module {
    let mut module = Module::default();
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("define ") {
            let at = rest.find('@').unwrap_or_else(|| panic!("no name: {line}"));
            let name: String = rest[at + 1..].chars().take_while(|&c| c != '(').collect();
            let body: Vec<&str> = lines.by_ref().take_while(|l| *l != "}").collect();
            let function = FunctionParser::default().function(&rest[at + 1 + name.len()..], &body);
            if rest.starts_with("ptx_kernel") {
                module.entry = name.clone();
            }
            module.functions.insert(name, function);
        }
    }
    module
}

#[derive(Default)]
struct FunctionParser {
    registers: HashMap<String, usize>,
    labels: HashMap<String, usize>,
    place: Rc<str>,
}

struct Cursor<'a> {
    rest: &'a str,
    whole: &'a str,
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

    fn expect(&mut self, token: &str) {
        assert!(self.eat(token), "expected `{token}` at `{}` in `{}`", self.rest, self.whole);
    }

    /// A word of letters, digits and what names are made of.
    fn word(&mut self) -> &'a str {
        self.skip();
        let end = self.rest.find(|c: char| !(c.is_alphanumeric() || "._-+%@$".contains(c))).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    fn ty(&mut self) -> Ty {
        self.skip();
        if self.eat("<") {
            let n = self.word().parse().unwrap_or_else(|_| panic!("vector in `{}`", self.whole));
            self.expect("x");
            let t = self.ty();
            self.expect(">");
            return Ty::Vector(n, Box::new(t));
        }
        if self.eat("[") {
            let n = self.word().parse().unwrap_or_else(|_| panic!("array in `{}`", self.whole));
            self.expect("x");
            let t = self.ty();
            self.expect("]");
            return Ty::Array(n, Box::new(t));
        }
        if self.eat("{") {
            let mut list = vec![self.ty()];
            while self.eat(",") {
                list.push(self.ty());
            }
            self.expect("}");
            return Ty::Struct(list);
        }
        match self.word() {
            "void" => Ty::Void,
            "half" => Ty::Half,
            "bfloat" => Ty::BFloat,
            "float" => Ty::Float,
            "double" => Ty::Double,
            "ptr" => {
                if self.eat("addrspace(") {
                    let n = self.word().parse().expect("an address space");
                    self.expect(")");
                    Ty::Ptr(n)
                } else {
                    Ty::Ptr(0)
                }
            }
            w if w.starts_with('i') => {
                Ty::Int(w[1..].parse().unwrap_or_else(|_| panic!("type `{w}` in `{}`", self.whole)))
            }
            w => panic!("type `{w}` in `{}`", self.whole),
        }
    }
}

impl FunctionParser {
    fn register(&mut self, name: &str) -> usize {
        let next = self.registers.len();
        *self.registers.entry(name.to_string()).or_insert(next)
    }

    fn function(mut self, signature: &str, body: &[&str]) -> Function {
        let mut f = Function::default();
        let mut c = Cursor { rest: signature, whole: signature };
        c.expect("(");
        while !c.eat(")") {
            f.param_types.push(c.ty());
            loop {
                if c.eat("byval(") || c.eat("\"") {
                    let end = c.rest.find([')', '"']).expect("the end of an attribute");
                    c.rest = &c.rest[end + 1..];
                }
                match c.word() {
                    name if name.starts_with('%') => {
                        let r = self.register(name);
                        f.params.push(r);
                        break;
                    }
                    "" => panic!("parameter in `{signature}`"),
                    _ => {}
                }
            }
            c.eat(",");
        }
        // Labels first: branches go forward. Code before the first label is the entry.
        let mut count = 0;
        for line in body {
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
        for line in body {
            match label(line) {
                Some("entry") if f.blocks.len() == 1 && f.blocks[0].is_empty() => {}
                Some(_) => f.blocks.push(Vec::new()),
                None if line.trim().is_empty() => {}
                None if line.trim_start().starts_with(';') => {
                    if let Some(place) = line.trim_start().strip_prefix(PLACE) {
                        self.place = place.trim().into();
                    }
                }
                None => {
                    let parsed = self.line(line);
                    f.blocks.last_mut().expect("a block").push(parsed);
                }
            }
        }
        f.registers = self.registers.len();
        f
    }

    fn line(&mut self, text: &str) -> Line {
        let mut c = Cursor { rest: text, whole: text };
        c.skip();
        let result = match c.rest.strip_prefix('%') {
            Some(_) => {
                let name = c.word().to_string();
                c.expect("=");
                Some(self.register(&name))
            }
            None => None,
        };
        let inst = self.inst(&mut c);
        Line { result, inst, text: text.trim().to_string(), place: self.place.clone() }
    }

    fn operand(&mut self, c: &mut Cursor, ty: &Ty) -> Operand {
        c.skip();
        if c.rest.starts_with('<') {
            // A vector constant with equal lanes.
            let end = c.rest.find('>').expect("a vector constant");
            panic!("vector constant `{}` in `{}`", &c.rest[..=end], c.whole);
        }
        let word = c.word();
        if word.starts_with('%') {
            return Operand::Reg(self.register(word));
        }
        match word {
            "true" => return Operand::Bits(1),
            "false" => return Operand::Bits(0),
            "poison" | "undef" => return Operand::Undef,
            "zeroinitializer" | "null" => return Operand::Zero,
            "@smem" => return Operand::Bits(SMEM_BASE),
            w if w.starts_with('@') => return Operand::Bits(0),
            _ => {}
        }
        if let Some(hex) = word.strip_prefix("0xH").or(word.strip_prefix("0xR")) {
            return Operand::Bits(u64::from_str_radix(hex, 16).expect("hex"));
        }
        if let Some(hex) = word.strip_prefix("0x") {
            let bits = u64::from_str_radix(hex, 16).expect("hex");
            return Operand::Bits(float_bits(f64::from_bits(bits), ty));
        }
        match ty {
            Ty::Float | Ty::Double => {
                Operand::Bits(float_bits(word.parse().unwrap_or_else(|_| panic!("`{word}` in `{}`", c.whole)), ty))
            }
            _ => Operand::Bits(word.parse::<i128>().unwrap_or_else(|_| panic!("`{word}` in `{}`", c.whole)) as u64),
        }
    }

    fn typed(&mut self, c: &mut Cursor) -> (Ty, Operand) {
        let ty = c.ty();
        while ["noundef", "nonnull"].iter().any(|w| c.eat(w)) {}
        let v = self.operand(c, &ty);
        (ty, v)
    }

    fn target(&self, c: &mut Cursor) -> usize {
        c.expect("label");
        let name = c.word();
        self.labels[&name[1..]]
    }

    #[expect(clippy::too_many_lines, reason = "one arm per instruction")]
    fn inst(&mut self, c: &mut Cursor) -> Inst {
        let op = c.word().to_string();
        match op.as_str() {
            "add" | "sub" | "mul" | "udiv" | "sdiv" | "urem" | "srem" | "and" | "or" | "xor" | "shl" | "lshr"
            | "ashr" | "fadd" | "fsub" | "fmul" | "fdiv" | "frem" => {
                while ["nsw", "nuw", "exact", "disjoint", "contract"].iter().any(|w| c.eat(w)) {}
                let ty = c.ty();
                let a = self.operand(c, &ty);
                c.expect(",");
                let b = self.operand(c, &ty);
                Inst::Binary { op, ty, a, b }
            }
            "icmp" | "fcmp" => {
                let predicate = format!("{}{}", &op[..1], c.word());
                let ty = c.ty();
                let a = self.operand(c, &ty);
                c.expect(",");
                let b = self.operand(c, &ty);
                Inst::Compare { predicate, ty, a, b }
            }
            "fneg" => {
                let (ty, x) = self.typed(c);
                Inst::FNeg { ty, x }
            }
            "select" => {
                let (_, cond) = self.typed(c);
                c.expect(",");
                let (_, a) = self.typed(c);
                c.expect(",");
                let (_, b) = self.typed(c);
                Inst::Select { c: cond, a, b }
            }
            "zext" | "sext" | "trunc" | "fpext" | "fptrunc" | "sitofp" | "uitofp" | "fptosi" | "fptoui"
            | "ptrtoint" | "inttoptr" | "bitcast" | "addrspacecast" => {
                c.eat("nneg");
                let (from, x) = self.typed(c);
                c.expect("to");
                let to = c.ty();
                Inst::Cast { op, from, x, to }
            }
            "getelementptr" => {
                let element = c.ty().bytes();
                c.expect(",");
                let (_, base) = self.typed(c);
                c.expect(",");
                let (index_ty, index) = self.typed(c);
                Inst::Gep { element, base, index_ty, index }
            }
            "load" => {
                let atomic = c.eat("atomic");
                let ty = c.ty();
                c.expect(",");
                let (p_ty, p) = self.typed(c);
                if atomic {
                    return Inst::AtomicLoad { ty, p };
                }
                Inst::Load { ty, space: space(&p_ty), p }
            }
            "store" => {
                let (ty, v) = self.typed(c);
                c.expect(",");
                let (p_ty, p) = self.typed(c);
                Inst::Store { ty, v, space: space(&p_ty), p }
            }
            "extractelement" => {
                let (_, v) = self.typed(c);
                c.expect(",");
                let (_, i) = self.typed(c);
                Inst::ExtractElement { v, i }
            }
            "insertelement" => {
                let (ty, v) = self.typed(c);
                c.expect(",");
                let (_, x) = self.typed(c);
                c.expect(",");
                let (_, i) = self.typed(c);
                let Ty::Vector(len, _) = ty else { panic!("insertelement into {ty:?}") };
                Inst::InsertElement { len, v, x, i }
            }
            "extractvalue" => {
                let (_, v) = self.typed(c);
                c.expect(",");
                Inst::ExtractValue { v, i: c.word().parse().expect("an index") }
            }
            "call" => self.call(c),
            "phi" => {
                let ty = c.ty();
                let mut edges = Vec::new();
                loop {
                    c.expect("[");
                    let v = self.operand(c, &ty);
                    c.expect(",");
                    let from = c.word();
                    edges.push((v, self.labels[&from[1..]]));
                    c.expect("]");
                    if !c.eat(",") {
                        break;
                    }
                }
                Inst::Phi { edges }
            }
            "br" => {
                if c.eat("i1 ") {
                    let cond = self.operand(c, &Ty::Int(1));
                    c.expect(",");
                    let yes = self.target(c);
                    c.expect(",");
                    let no = self.target(c);
                    Inst::BranchIf { c: cond, yes, no }
                } else {
                    Inst::Branch { to: self.target(c) }
                }
            }
            "ret" => {
                if c.eat("void") {
                    Inst::Ret { v: None }
                } else {
                    let (_, v) = self.typed(c);
                    Inst::Ret { v: Some(v) }
                }
            }
            "atomicrmw" => {
                let op = c.word().to_string();
                let (_, p) = self.typed(c);
                c.expect(",");
                let (ty, v) = self.typed(c);
                Inst::Atomic { op, p, ty, v }
            }
            "cmpxchg" => {
                let (_, p) = self.typed(c);
                c.expect(",");
                let (ty, expected) = self.typed(c);
                c.expect(",");
                let (_, new) = self.typed(c);
                let synchronizes = c.rest.contains("acq_rel") || c.rest.contains("seq_cst");
                Inst::CompareExchange { p, ty, expected, new, synchronizes }
            }
            "alloca" => Inst::Alloca,
            other => panic!("instruction `{other}` in `{}`", c.whole),
        }
    }

    fn call(&mut self, c: &mut Cursor) -> Inst {
        if c.eat("range(") {
            let end = c.rest.find(')').expect("a range");
            c.rest = &c.rest[end + 1..];
        }
        let ty = c.ty();
        let mut asm = None;
        if c.eat("asm") {
            c.eat("sideeffect");
            let text = quoted(c);
            c.expect(",");
            let constraints = quoted(c);
            asm = Some((text, constraints));
        }
        let name = if asm.is_none() { c.word().trim_start_matches('@').to_string() } else { String::new() };
        c.expect("(");
        let mut args = Vec::new();
        while !c.eat(")") {
            args.push(self.typed(c));
            c.eat(",");
        }
        match asm {
            Some((text, constraints)) => {
                Inst::Asm { text, constraints: constraints.split(',').map(String::from).collect(), ty, args }
            }
            None => Inst::Call { name, ty, args },
        }
    }
}

fn label(line: &str) -> Option<&str> {
    line.strip_suffix(':').filter(|l| !l.starts_with(' '))
}

fn space(ty: &Ty) -> u32 {
    match ty {
        Ty::Ptr(n) => *n,
        other => panic!("{other:?} is no pointer"),
    }
}

fn quoted(c: &mut Cursor) -> String {
    c.expect("\"");
    let end = c.rest.find('"').expect("a closing quote");
    let (text, rest) = c.rest.split_at(end);
    c.rest = &rest[1..];
    text.to_string()
}

fn float_bits(x: f64, ty: &Ty) -> u64 {
    match ty {
        Ty::Float => u64::from((x as f32).to_bits()),
        _ => x.to_bits(),
    }
}
