//! Printer.

use crate::ir::{BlockId, Func, OpId, Value};
use std::collections::HashMap;
use std::fmt::Write;

/// The text of a function; ends with a newline.
pub fn print(func: &Func) -> String {
    let mut p = Printer::new(func, Naming::TextOrder);
    p.function();
    p.out
}

/// A line of a function's text, without its indentation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// Levels of indentation.
    pub depth: usize,
    pub text: String,
    /// The op of this line; `None` for layouts, the head of the function and closing braces.
    pub op: Option<OpId>,
}

/// The lines of [`print()`], but with these names (without `%`) of values that are not arguments.
pub fn lines(func: &Func, name: &dyn Fn(Value) -> String) -> Vec<Line> {
    let mut p = Printer::new(func, Naming::Given(name));
    p.function();
    let mut start = 0;
    let mut ops = p.ops.iter().peekable();
    let of_line = |line: &str| {
        let op = ops.next_if(|(at, _)| *at == start).map(|(_, id)| *id);
        start += line.len() + 1;
        let text = line.trim_start_matches(' ');
        Line { depth: (line.len() - text.len()) / INDENT.len(), text: text.to_string(), op }
    };
    p.out.lines().map(of_line).collect()
}

/// The line of one op as in [`print()`], without indentation and regions. For messages.
pub fn print_op(func: &Func, op: OpId) -> String {
    let mut p = Printer::new(func, Naming::TextOrder);
    // Prints the whole function first, so that values have the same numbers.
    p.function();
    p.out.clear();
    p.op_line(op);
    p.out
}

const INDENT: &str = "  ";

/// Names of values that are not arguments.
enum Naming<'f> {
    /// Numbered in the order of the text.
    TextOrder,
    Given(&'f dyn Fn(Value) -> String),
}

struct Printer<'f> {
    func: &'f Func,
    naming: Naming<'f>,
    names: HashMap<Value, String>,
    next: usize,
    out: String,
    /// Where in `out` the line of each op starts.
    ops: Vec<(usize, OpId)>,
}

impl<'f> Printer<'f> {
    fn new(func: &'f Func, naming: Naming<'f>) -> Printer<'f> {
        Printer { func, naming, names: HashMap::new(), next: 0, out: String::new(), ops: Vec::new() }
    }

    fn function(&mut self) {
        let func = self.func;
        for (i, layout) in func.layouts.iter().enumerate() {
            let _ = writeln!(self.out, "#l{i} = {layout}");
        }
        let mut params = Vec::new();
        for (arg, &v) in func.args.iter().zip(&func.block(func.body).params) {
            self.names.insert(v, arg.name.clone());
            let mut attrs = Vec::new();
            if arg.divisible_by != 1 {
                attrs.push(format!("divisible_by = {}", arg.divisible_by));
            }
            if let Some(n) = arg.equal_to {
                attrs.push(format!("equal_to = {n}"));
            }
            let attrs = if attrs.is_empty() { String::new() } else { format!(" {{{}}}", attrs.join(", ")) };
            params.push(format!("%{}: {}{attrs}", arg.name, func.ty(v)));
        }
        let _ = write!(self.out, "kernel @{}({}) ", func.name, params.join(", "));
        self.block(func.body, 0);
        self.out.push('\n');
    }

    fn name(&mut self, v: Value) -> String {
        if let Some(name) = self.names.get(&v) {
            return format!("%{name}");
        }
        let is_argument = |name: String| self.func.args.iter().any(|arg| arg.name == name);
        while is_argument(self.next.to_string()) {
            self.next += 1;
        }
        let name = match self.naming {
            Naming::TextOrder => self.next.to_string(),
            Naming::Given(name) => name(v),
        };
        self.next += 1;
        self.names.insert(v, name.clone());
        format!("%{name}")
    }

    /// A block with its braces.
    fn block(&mut self, block: BlockId, depth: usize) {
        self.out.push_str("{\n");
        for &op in &self.func.block(block).ops {
            self.op(op, depth + 1);
        }
        let _ = write!(self.out, "{}}}", INDENT.repeat(depth));
    }

    fn op(&mut self, id: OpId, depth: usize) {
        let func = self.func;
        self.ops.push((self.out.len(), id));
        self.out.push_str(&INDENT.repeat(depth));
        self.op_line(id);
        for &region in &func.op(id).regions {
            let params: Vec<String> =
                func.block(region).params.iter().map(|&v| format!("{}: {}", self.name(v), func.ty(v))).collect();
            let _ = write!(self.out, " ({}) ", params.join(", "));
            self.block(region, depth);
        }
        self.out.push('\n');
    }

    /// An op without its regions.
    fn op_line(&mut self, id: OpId) {
        let data = self.func.op(id);
        // Operands are named before results, so that a use before its definition (a bug that the verifier reports)
        // prints too.
        let operands: Vec<String> = data.operands.iter().map(|&v| self.name(v)).collect();
        let results: Vec<String> = data.results.iter().map(|&v| self.name(v)).collect();
        if !results.is_empty() {
            let _ = write!(self.out, "{} = ", results.join(", "));
        }
        self.out.push_str(data.op.mnemonic());
        if !operands.is_empty() {
            let _ = write!(self.out, " {}", operands.join(", "));
        }
        let attrs: Vec<String> = data.op.attributes().iter().map(|(k, v)| format!("{k} = {v}")).collect();
        if !attrs.is_empty() {
            let _ = write!(self.out, " {{{}}}", attrs.join(", "));
        }
        if !data.results.is_empty() {
            let types: Vec<String> = data.results.iter().map(|&v| self.func.ty(v).to_string()).collect();
            let _ = write!(self.out, " : {}", types.join(", "));
        }
        if let Some(place) = data.place {
            let list: Vec<String> = place.attributes().iter().map(|(k, v)| format!("{k} = {v}")).collect();
            let _ = write!(self.out, " at {{{}}}", list.join(", "));
        }
    }
}
