//! Writes textual LLVM IR: unique names, instructions, declarations and constants, into several sections.
//!
//! Text goes to the selected [`Section`]. A lowering that emits loops opens one section per loop level, writes
//! invariant code to an outer one while it works on an inner one, and joins them when the nest is complete.

use std::collections::BTreeSet;
use std::collections::HashSet;
use std::fmt::{Display, Write};

/// A piece of text under construction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Section(usize);

/// An LLVM module under construction.
#[derive(Debug, Default)]
pub struct Writer {
    sections: Vec<String>,
    current: usize,
    names: u32,
    declarations: BTreeSet<String>,
    globals: Vec<String>,
    functions: Vec<String>,
    defined: HashSet<String>,
    /// Whether the target has AVX-512's instruction for x · 2ⁿ.
    pub has_scalef: bool,
}

impl Writer {
    pub fn new() -> Writer {
        Writer { sections: vec![String::new()], ..Writer::default() }
    }

    /// A unique local name, as `%hint12`.
    pub fn fresh(&mut self, hint: &str) -> String {
        self.names += 1;
        format!("%{hint}{}", self.names)
    }

    /// A unique label, without `%`.
    pub fn fresh_label(&mut self, hint: &str) -> String {
        self.names += 1;
        format!("{hint}{}", self.names)
    }

    /// Appends a line that defines no value.
    pub fn line(&mut self, text: impl Display) {
        let _ = writeln!(self.sections[self.current], "  {text}");
    }

    /// Appends an instruction with a fresh name, and returns the name.
    pub fn inst(&mut self, text: impl Display) -> String {
        let name = self.fresh("v");
        self.line(format_args!("{name} = {text}"));
        name
    }

    /// Starts a basic block.
    pub fn label(&mut self, name: &str) {
        let _ = writeln!(self.sections[self.current], "{name}:");
    }

    pub fn branch(&mut self, label: &str) {
        self.line(format_args!("br label %{label}"));
    }

    pub fn branch_if(&mut self, condition: &str, yes: &str, no: &str) {
        self.line(format_args!("br i1 {condition}, label %{yes}, label %{no}"));
    }

    /// Emits a call of a function (declared on first use) with a result. Arguments are (type, operand) pairs.
    pub fn call(&mut self, result: &str, callee: &str, args: &[(&str, &str)]) -> String {
        self.declare_call(result, callee, args);
        let text = call_text(result, callee, args);
        self.inst(text)
    }

    /// Emits a call of a function (declared on first use) without a result.
    pub fn call_void(&mut self, callee: &str, args: &[(&str, &str)]) {
        self.declare_call("void", callee, args);
        let text = call_text("void", callee, args);
        self.line(text);
    }

    fn declare_call(&mut self, result: &str, callee: &str, args: &[(&str, &str)]) {
        if self.defined.contains(callee) {
            return;
        }
        let types: Vec<&str> = args.iter().map(|(ty, _)| *ty).collect();
        self.declarations.insert(format!("declare {result} {callee}({})", types.join(", ")));
    }

    /// Emits a constant global with these bytes and a terminating zero. Returns its name.
    pub fn string(&mut self, text: &str) -> String {
        let mut escaped = String::new();
        for byte in text.bytes().filter(|&b| b != 0) {
            match byte {
                b' '..=b'~' if byte != b'"' && byte != b'\\' => escaped.push(byte as char),
                _ => {
                    let _ = write!(escaped, "\\{byte:02X}");
                }
            }
        }
        let len = text.bytes().filter(|&b| b != 0).count() + 1;
        let name = format!("@str{}", self.globals.len());
        self.globals.push(format!("{name} = private unnamed_addr constant [{len} x i8] c\"{escaped}\\00\""));
        name
    }

    /// Defines a function once per `name`; `body` writes its instructions.
    pub fn function(&mut self, name: &str, signature: &str, body: impl FnOnce(&mut Writer)) {
        if !self.defined.insert(name.to_string()) {
            return;
        }
        let outer = self.current;
        let section = self.open();
        self.select(section);
        body(self);
        let text = self.take(section);
        self.current = outer;
        self.functions.push(format!("{signature} {{\n{text}}}\n"));
    }

    /// Opens a new, empty section, without selecting it.
    pub fn open(&mut self) -> Section {
        self.sections.push(String::new());
        Section(self.sections.len() - 1)
    }

    /// Selects the section that receives text from now on.
    pub fn select(&mut self, section: Section) {
        self.current = section.0;
    }

    pub fn selected(&self) -> Section {
        Section(self.current)
    }

    /// Empties a section and returns its text.
    pub fn take(&mut self, section: Section) -> String {
        std::mem::take(&mut self.sections[section.0])
    }

    /// Appends text that was taken from a section.
    pub fn splice(&mut self, text: &str) {
        self.sections[self.current].push_str(text);
    }

    /// The text of the module: globals, declarations, helper functions, then `main`.
    pub fn finish(self, main: &str) -> String {
        let mut out = String::new();
        for line in self.globals.iter().chain(&self.declarations) {
            out.push_str(line);
            out.push('\n');
        }
        for function in &self.functions {
            out.push('\n');
            out.push_str(function);
        }
        out.push('\n');
        out.push_str(main);
        out
    }
}

fn call_text(result: &str, callee: &str, args: &[(&str, &str)]) -> String {
    let args: Vec<String> = args.iter().map(|(ty, v)| format!("{ty} {v}")).collect();
    format!("call {result} {callee}({})", args.join(", "))
}

/// The type of a vector: `ty` for one lane, `<lanes x ty>` for more.
pub fn vector(ty: &str, lanes: usize) -> String {
    if lanes == 1 { ty.to_string() } else { format!("<{lanes} x {ty}>") }
}

/// A constant in every lane: `text` itself for one lane.
pub fn splat(ty: &str, lanes: usize, text: impl Display) -> String {
    if lanes == 1 { text.to_string() } else { format!("splat ({ty} {text})") }
}

/// The vector `0, 1, 2, …` of an integer type.
pub fn iota(ty: &str, lanes: usize) -> String {
    if lanes == 1 {
        return "0".to_string();
    }
    let items: Vec<String> = (0..lanes).map(|i| format!("{ty} {i}")).collect();
    format!("<{}>", items.join(", "))
}

/// The exact LLVM spelling of an f32 constant.
pub fn float_constant(x: f32) -> String {
    format!("0x{:016X}", f64_bits(x))
}

/// The exact LLVM spelling of an f64 constant.
pub fn double_constant(x: f64) -> String {
    format!("0x{:016X}", x.to_bits())
}

/// The f64 bits of an f32. NaNs keep their sign.
fn f64_bits(x: f32) -> u64 {
    (x as f64).to_bits()
}

/// The name of an intrinsic for a type: `llvm.floor` for 8 floats is `@llvm.floor.v8f32`. `short` is LLVM's suffix
/// (`f32`, `i64`, …).
pub fn intrinsic(base: &str, short: &str, lanes: usize) -> String {
    if lanes == 1 { format!("@{base}.{short}") } else { format!("@{base}.v{lanes}{short}") }
}
