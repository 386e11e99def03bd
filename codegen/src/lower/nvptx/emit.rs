//! Writes LLVM IR text: values, labels, phis, declarations. Independent of Tile IR.

use crate::ir::Loc;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;

/// An LLVM operand: `%v12`, a literal, or a global.
pub type Val = String;

/// Prefix of the comments with source locations.
pub const LOC_COMMENT: &str = ";@ ";

/// The attribute that marks inline assembly of the kernel's author. The simulated GPU recognizes it by this attribute
/// alone.
pub const USER_ASM: &str = "\"user-asm\"";

/// The text of one kernel under construction.
pub struct Emitter {
    /// Instructions of the entry block, which depend only on the thread index and dominate all others.
    entry: Vec<String>,
    body: Vec<String>,
    next_value: usize,
    next_label: usize,
    /// Label of the block that instructions go to.
    label: String,
    declarations: BTreeSet<String>,
    globals: BTreeMap<String, String>,
    metadata: Vec<String>,
    /// Entry instructions by their text, so that each is emitted once.
    hoisted: HashMap<String, Val>,
    /// Math functions implemented by polynomials, called as `@math.NAME.1`.
    pub shared_math: Vec<crate::ir::UnaryOp>,
    /// i32 values that are another value plus a constant.
    offsets: HashMap<Val, (Val, i32)>,
    /// Sums and differences of such base values, by text and block.
    bases: HashMap<(String, String), Val>,
    /// Values that were extracted from vectors.
    elements: HashMap<Val, VectorElement>,
    /// The source location of the last comment of [`Emitter::set_loc`].
    loc: Loc,
    /// Whether `@decode.NAME` and `@encode.NAME` of the 8-bit floats are called.
    pub f8: bool,
}

/// The vector and the index that an element was extracted from.
struct VectorElement {
    vector: Val,
    /// LLVM type of an element.
    ty: String,
    /// Elements of the vector.
    len: usize,
    index: usize,
}

/// A phi whose incoming value from the loop end is still missing.
pub struct OpenPhi {
    line: usize,
    text: String,
}

impl Emitter {
    pub fn new() -> Emitter {
        Emitter {
            entry: Vec::new(),
            body: Vec::new(),
            next_value: 0,
            next_label: 0,
            label: "start".into(),
            declarations: BTreeSet::new(),
            globals: BTreeMap::new(),
            metadata: Vec::new(),
            hoisted: HashMap::new(),
            shared_math: Vec::new(),
            offsets: HashMap::new(),
            bases: HashMap::new(),
            elements: HashMap::new(),
            f8: false,
            loc: Loc::unknown(),
        }
    }

    fn fresh(&mut self) -> Val {
        self.next_value += 1;
        format!("%v{}", self.next_value)
    }

    /// Emits an instruction with a result.
    pub fn inst(&mut self, text: impl AsRef<str>) -> Val {
        let v = self.fresh();
        self.body.push(format!("  {v} = {}", text.as_ref()));
        v
    }

    /// Emits an instruction without a result.
    pub fn void(&mut self, text: impl AsRef<str>) {
        self.body.push(format!("  {}", text.as_ref()));
    }

    /// Emits a comment with the source location of the following instructions, which the simulated GPU reports.
    pub fn set_loc(&mut self, loc: &Loc) {
        if !loc.is_unknown() && *loc != self.loc {
            self.loc = loc.clone();
            let place = loc.to_string().replace(char::is_control, "?");
            // The previous location has no instructions.
            if self.body.last().is_some_and(|line| line.trim_start().starts_with(LOC_COMMENT)) {
                self.body.pop();
            }
            self.body.push(format!("  {LOC_COMMENT}{place}"));
        }
    }

    /// Extracts the elements of a vector.
    pub fn elements(&mut self, vector: &str, ty: &str, n: usize) -> Vec<Val> {
        let each = |i| {
            let v = self.inst(format!("extractelement <{n} x {ty}> {vector}, i32 {i}"));
            self.elements.insert(v.clone(), VectorElement { vector: vector.into(), ty: ty.into(), len: n, index: i });
            v
        };
        (0..n).map(each).collect()
    }

    /// The word of a vector that holds this pair of elements, of 32 bits for 16-bit elements and of 16 for bytes; `None` if they are
    /// not adjacent in one word.
    pub fn word_of(&mut self, pair: [&str; 2], ty: &str) -> Option<Val> {
        let word = if ty == "i8" { "i16" } else { "i32" };
        let [low, high] = pair.map(|v| self.elements.get(v));
        let (low, high) = (low?, high?);
        let adjacent = (&high.vector, &high.ty, high.len, high.index) == (&low.vector, &low.ty, low.len, low.index + 1);
        if !adjacent || low.ty != ty || low.index % 2 != 0 || low.len % 2 != 0 {
            return None;
        }
        let (words, at) = (low.len / 2, low.index / 2);
        let from = format!("<{} x {ty}> {}", low.len, low.vector);
        if words == 1 {
            return Some(self.inst(format!("bitcast {from} to {word}")));
        }
        let all = self.inst(format!("bitcast {from} to <{words} x {word}>"));
        Some(self.inst(format!("extractelement <{words} x {word}> {all}, i32 {at}")))
    }

    /// Emits an instruction to the entry block, once per text. Its operands must be available there.
    pub fn hoist(&mut self, text: impl AsRef<str>) -> Val {
        if let Some(v) = self.hoisted.get(text.as_ref()) {
            return v.clone();
        }
        let v = self.fresh();
        self.entry.push(format!("  {v} = {}", text.as_ref()));
        self.hoisted.insert(text.as_ref().into(), v.clone());
        v
    }

    /// `base + constant` as i32, where `base` never sets the bits of the constant.
    pub fn offset(&mut self, base: &str, constant: u32) -> Val {
        let v = self.inst(format!("or disjoint i32 {base}, {constant}"));
        self.offsets.insert(v.clone(), (base.into(), constant as i32));
        v
    }

    /// `a + b` or `a - b` as i32 with the constant part split off, so that values that differ only by constants share
    /// one base register. `None` if there is no constant part.
    pub fn add_offsets(&mut self, op: &str, a: &str, b: &str) -> Option<Val> {
        let part = |v: &str| match (v.parse::<i32>(), self.offsets.get(v)) {
            (Ok(n), _) => (None, n),
            (_, Some((base, n))) => (Some(base.clone()), *n),
            _ => (Some(v.to_string()), 0),
        };
        let ((a_base, a_constant), (b_base, b_constant)) = (part(a), part(b));
        let constant =
            if op == "sub" { a_constant.wrapping_sub(b_constant) } else { a_constant.wrapping_add(b_constant) };
        if a_constant == 0 && b_constant == 0 {
            return None;
        }
        let base = match (a_base, b_base) {
            (Some(a), Some(b)) => {
                let key = (self.label.clone(), format!("{op} i32 {a}, {b}"));
                match self.bases.get(&key) {
                    Some(known) => known.clone(),
                    None => {
                        let v = self.inst(&key.1);
                        self.bases.insert(key, v.clone());
                        v
                    }
                }
            }
            (Some(a), None) => a,
            (None, Some(b)) if op == "add" => b,
            _ => return None,
        };
        if constant == 0 {
            return Some(base);
        }
        let v = self.inst(format!("add i32 {base}, {constant}"));
        self.offsets.insert(v.clone(), (base, constant));
        Some(v)
    }

    /// Emits a call of a function and its declaration.
    pub fn call(&mut self, result: &str, name: &str, args: &[(&str, &str)]) -> Val {
        let types: Vec<&str> = args.iter().map(|(t, _)| *t).collect();
        self.declarations.insert(format!("declare {result} @{name}({})", types.join(", ")));
        let list: Vec<String> = args.iter().map(|(t, v)| format!("{t} {v}")).collect();
        let text = format!("call {result} @{name}({})", list.join(", "));
        if result == "void" {
            self.void(text);
            String::new()
        } else {
            self.inst(text)
        }
    }

    /// Requests the definition of `@math.NAME.1`.
    pub fn shared_math(&mut self, op: crate::ir::UnaryOp) {
        if !self.shared_math.contains(&op) {
            self.shared_math.push(op);
        }
    }

    pub fn declare(&mut self, text: &str) {
        self.declarations.insert(text.into());
    }

    /// Emits a zero-terminated string constant. Returns the name of its global.
    pub fn string(&mut self, text: &str) -> Val {
        let mut bytes = String::new();
        for b in text.bytes().chain([0]) {
            match b {
                b' '..=b'~' if b != b'"' && b != b'\\' => bytes.push(b as char),
                _ => {
                    let _ = write!(bytes, "\\{b:02X}");
                }
            }
        }
        let ty = format!("[{} x i8] c\"{bytes}\"", text.len() + 1);
        let found = self.globals.iter().find(|(_, t)| t.contains(&ty)).map(|(n, _)| n.clone());
        found.unwrap_or_else(|| {
            let name = format!("@str{}", self.globals.len());
            self.globals.insert(name.clone(), format!("private unnamed_addr addrspace(1) constant {ty}"));
            name
        })
    }

    /// Declares a global once.
    pub fn global(&mut self, name: &str, definition: &str) {
        self.globals.insert(name.into(), definition.into());
    }

    /// Emits a metadata node. Returns its number.
    pub fn metadata(&mut self, node: impl FnOnce(usize) -> String) -> usize {
        let n = self.metadata.len();
        self.metadata.push(node(n));
        n
    }

    pub fn new_label(&mut self, hint: &str) -> String {
        self.next_label += 1;
        format!("{hint}{}", self.next_label)
    }

    /// Label of the block that instructions go to.
    pub fn label(&self) -> String {
        self.label.clone()
    }

    /// Starts a basic block.
    pub fn start_block(&mut self, label: &str) {
        self.body.push(format!("{label}:"));
        self.label = label.into();
    }

    pub fn branch(&mut self, label: &str) {
        self.void(format!("br label %{label}"));
    }

    pub fn branch_if(&mut self, condition: &str, then: &str, otherwise: &str) {
        self.void(format!("br i1 {condition}, label %{then}, label %{otherwise}"));
    }

    /// Emits a phi with its first incoming edge.
    pub fn open_phi(&mut self, ty: &str, value: &str, from: &str) -> (Val, OpenPhi) {
        let v = self.fresh();
        let text = format!("  {v} = phi {ty} [ {value}, %{from} ]");
        self.body.push(text.clone());
        (v, OpenPhi { line: self.body.len() - 1, text })
    }

    /// Adds the second incoming edge of a phi.
    pub fn close_phi(&mut self, phi: OpenPhi, value: &str, from: &str) {
        self.body[phi.line] = format!("{}, [ {value}, %{from} ]", phi.text);
    }

    /// Returns the module: globals, the kernel, declarations, metadata.
    pub fn finish(self, signature: &str, attributes: &str) -> String {
        let mut out = String::new();
        for (name, definition) in &self.globals {
            let _ = writeln!(out, "{name} = {definition}");
        }
        let _ = writeln!(out, "\ndefine ptx_kernel void {signature} #0 {{\nentry:");
        for line in &self.entry {
            let _ = writeln!(out, "{line}");
        }
        out.push_str("  br label %start\nstart:\n");
        for line in &self.body {
            let _ = writeln!(out, "{line}");
        }
        out.push_str("}\n\n");
        let math = crate::lower::host::math::definitions(&self.shared_math, self.f8, "#5", "#2");
        // Declares each function once.
        let symbol = |line: &str| line.split_once('@').and_then(|(_, s)| s.split('(').next().map(str::to_string));
        let (more, math): (Vec<&str>, Vec<&str>) = math.lines().partition(|l| l.starts_with("declare"));
        let known: BTreeSet<Option<String>> = self.declarations.iter().map(|d| symbol(d)).collect();
        let more = more.into_iter().filter(|d| !known.contains(&symbol(d)));
        for d in self.declarations.iter().map(String::as_str).chain(more).chain(math) {
            let _ = writeln!(out, "{d}");
        }
        let _ = writeln!(out, "\nattributes #0 = {{ {attributes} }}");
        // Attributes of inline asm: #1 synchronizes, #2 computes, #3 reads through its pointer (where stores may change what it
        // reads, it has `~{memory}` too), #4 computes with the whole warp. #5 is for the math functions.
        out.push_str("attributes #1 = { convergent nounwind }\n");
        out.push_str("attributes #2 = { nounwind willreturn memory(none) }\n");
        out.push_str("attributes #3 = { nounwind willreturn memory(argmem: read) }\n");
        out.push_str("attributes #5 = { nounwind }\n");
        out.push_str("attributes #4 = { convergent nounwind willreturn memory(none) }\n");
        for (i, m) in self.metadata.iter().enumerate() {
            let _ = writeln!(out, "!{i} = {m}");
        }
        out
    }
}
