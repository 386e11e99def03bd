//! Executes scalar PTX that users write as inline assembly: registers, arithmetic, bit operations, comparisons and
//! conversions, as the PTX ISA defines them. Memory accesses and collective instructions are not supported.
//!
//! Rounding modes, `.ftz`, `.sat` and other modifiers follow the ISA. `.ftz` flushes results that are subnormal after
//! rounding, as LLVM does when it folds constants. Results of `.approx` and `.full` instructions are the exact results
//! rounded to the type: a GPU's results may differ in the last bits, and so may NaN payloads. An unsupported
//! instruction, type or modifier is an error when the code is parsed, before anything runs.

mod float;
mod integer;
mod rounding;
#[cfg(all(test, target_arch = "x86_64"))]
mod rounding_tests;
#[cfg(test)]
mod tests;

use super::error::UnsupportedKind;
use super::parse::Ty;
use super::value::{Value, mask};
use crate::ir::DType;
use crate::num;
use std::collections::{BTreeSet, HashMap};

/// A pattern of instructions. Each field is a list of words separated by spaces.
struct Pattern {
    /// Names of instructions.
    ops: &'static str,
    /// Accepted types.
    types: &'static str,
    /// Modifier groups in order, their members separated by `|`. Exactly one member of each group must be present;
    /// groups that end in `?` are optional.
    modifiers: &'static str,
}

/// Names of the supported instructions, sorted.
pub fn known_instructions() -> BTreeSet<&'static str> {
    let patterns = float::PATTERNS.iter().chain(integer::PATTERNS);
    patterns.flat_map(|p| p.ops.split(' ')).chain(OTHER_INSTRUCTIONS).collect()
}

/// Instructions whose types and modifiers are checked in code.
const OTHER_INSTRUCTIONS: [&str; 4] = ["cvt", "mov", "selp", "setp"];

/// A type in an instruction's name.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Bits(u32),
    Unsigned(u32),
    Signed(u32),
    Float(DType),
    /// Two 16-bit elements in a 32-bit word.
    Pair(DType),
    Pred,
}

impl Kind {
    fn parse(name: &str) -> Option<Kind> {
        Some(match name {
            "pred" => Kind::Pred,
            "f16" => Kind::Float(DType::F16),
            "bf16" => Kind::Float(DType::BF16),
            "f32" => Kind::Float(DType::F32),
            "f64" => Kind::Float(DType::F64),
            "f16x2" => Kind::Pair(DType::F16),
            "bf16x2" => Kind::Pair(DType::BF16),
            _ => {
                let (letter, bits) = name.split_at_checked(1)?;
                let bits: u32 = bits.parse().ok().filter(|b| [8, 16, 32, 64].contains(b))?;
                match letter {
                    "b" => Kind::Bits(bits),
                    "u" => Kind::Unsigned(bits),
                    "s" => Kind::Signed(bits),
                    _ => return None,
                }
            }
        })
    }

    fn bits(self) -> u32 {
        match self {
            Kind::Bits(n) | Kind::Unsigned(n) | Kind::Signed(n) => n,
            Kind::Float(d) => d.bits() as u32,
            Kind::Pair(_) => 32,
            Kind::Pred => 1,
        }
    }
}

/// A parsed instruction name: operation, modifiers and types.
#[derive(Clone, Debug)]
struct Name {
    op: String,
    modifiers: Vec<String>,
    kinds: Vec<Kind>,
    /// The texts of `kinds`.
    types: Vec<String>,
}

impl Name {
    fn parse(text: &str) -> Name {
        let mut parts = text.split('.');
        let op = parts.next().unwrap_or("").to_string();
        let mut name = Name { op, modifiers: Vec::new(), kinds: Vec::new(), types: Vec::new() };
        for part in parts {
            match Kind::parse(part) {
                Some(kind) => {
                    name.kinds.push(kind);
                    name.types.push(part.into());
                }
                None => name.modifiers.push(part.into()),
            }
        }
        name
    }

    fn has(&self, modifier: &str) -> bool {
        self.modifiers.iter().any(|m| m == modifier)
    }

    /// Whether the modifiers match those of a pattern (see [`Pattern::modifiers`]).
    fn matches_modifiers(&self, modifiers: &str) -> bool {
        let mut own = self.modifiers.iter().peekable();
        let groups = modifiers.split_whitespace().all(|group| {
            let (names, optional) = group.strip_suffix('?').map_or((group, false), |names| (names, true));
            own.next_if(|own| names.split('|').any(|name| name == *own)).is_some() || optional
        });
        groups && own.next().is_none()
    }

    /// Whether one of the patterns matches this instruction with its types and modifiers.
    fn matches_any(&self, patterns: &[Pattern]) -> bool {
        let types = if self.op == "dp4a" { 2 } else { 1 };
        self.types.len() == types
            && patterns.iter().any(|p| {
                p.ops.split(' ').any(|op| op == self.op)
                    && self.types.iter().all(|ty| p.types.split(' ').any(|accepted| accepted == ty))
                    && self.matches_modifiers(p.modifiers)
            })
    }

    /// The last type; most instructions have only one.
    fn kind(&self) -> Option<Kind> {
        self.kinds.last().copied()
    }
}

/// A parsed assembly text.
#[derive(Clone, Debug)]
pub struct Program {
    statements: Vec<Statement>,
    /// Names of the declared registers.
    registers: Vec<String>,
    /// Types of `$0`, `$1`, …: the outputs, then the inputs.
    operands: Vec<Ty>,
    outputs: usize,
    /// Outputs tied to an input, with that input.
    ties: Vec<(usize, usize)>,
}

#[derive(Clone, Debug)]
struct Statement {
    text: String,
    /// The guard predicate, and the value at which the statement is skipped.
    guard: Option<(String, u64)>,
    name: Name,
    /// Whether a pattern matches the instruction.
    has_pattern: bool,
    operands: Vec<String>,
}

/// Declared registers by name, and the operands `$0`, `$1`, …; `None` before the first write.
struct Machine {
    registers: HashMap<String, Option<u64>>,
    operands: Vec<Option<u64>>,
}

/// Why a statement cannot be executed.
#[derive(Clone, Debug, PartialEq)]
enum StatementError {
    Unsupported,
    Malformed(String),
}

impl From<String> for StatementError {
    fn from(reason: String) -> StatementError {
        StatementError::Malformed(reason)
    }
}

impl StatementError {
    fn at(self, statement: &str) -> UnsupportedKind {
        let statement = statement.to_string();
        match self {
            StatementError::Unsupported => UnsupportedKind::Assembly { statement },
            StatementError::Malformed(reason) => UnsupportedKind::MalformedAssembly { statement, reason },
        }
    }
}

impl Program {
    /// Parses the text of LLVM inline assembly; `ty` is the type of its result, or a struct with the types of its
    /// results.
    ///
    /// # Errors
    /// An unsupported instruction, and malformed text.
    pub fn parse<'a>(
        text: &str,
        constraints: &[String],
        ty: &Ty,
        inputs: impl Iterator<Item = &'a Ty>,
    ) -> Result<Program, UnsupportedKind> {
        let text = unescape(text);
        let inputs: Vec<Ty> = inputs.cloned().collect();
        let count = constraints.iter().filter(|c| c.starts_with('=')).count();
        let outputs = match ty {
            Ty::Void => Vec::new(),
            Ty::Struct(types) => types.clone(),
            one => vec![one.clone()],
        };
        let malformed = |reason: String| StatementError::Malformed(reason).at(&text);
        if outputs.len() != count {
            return Err(malformed(format!(
                "the constraints have {count} outputs, but the result type has {} values",
                outputs.len()
            )));
        }
        let of_inputs = constraints.iter().filter(|c| !c.starts_with(['=', '~']));
        let ties: Vec<(usize, usize)> =
            of_inputs.enumerate().filter_map(|(i, c)| Some((c.parse().ok()?, count + i))).collect();
        let operands: Vec<Ty> = outputs.into_iter().chain(inputs).collect();
        if let Some(&(output, input)) = ties.iter().find(|(o, i)| *o >= count || *i >= operands.len()) {
            return Err(malformed(format!(
                "a constraint ties operand {input} to output {output}, and one of them does not exist"
            )));
        }
        if let Some(ty) =
            operands.iter().find(|ty| matches!(ty, Ty::Void | Ty::Struct(_) | Ty::Array(..)) || ty.bytes() > 8)
        {
            return Err(UnsupportedKind::Type(format!("{ty} of an operand of inline assembly")));
        }
        let mut program = Program { statements: Vec::new(), registers: Vec::new(), operands, outputs: count, ties };
        for text in statements(&text) {
            let declared = text.strip_prefix(".reg").map(|rest| program.declare(rest.trim()));
            match declared {
                Some(declared) => declared.map_err(|reason| StatementError::Malformed(reason).at(&text))?,
                None => program.statements.push(Statement::parse(&text).map_err(|error| error.at(&text))?),
            }
        }
        // Whether an instruction is supported does not depend on operand values, so each is tried on zeros.
        let mut machine = program.start(&vec![0; program.operands.len() - count]);
        for statement in &program.statements {
            let guard = statement.guard.as_ref().map_or(Ok(0), |(name, _)| machine.value(name, Kind::Pred));
            let outcome = guard.map_err(StatementError::from).and_then(|_| machine.instruction(statement));
            outcome.map_err(|error| error.at(&statement.text))?;
        }
        Ok(program)
    }

    /// Executes the statements on the bits of the inputs; returns the results.
    ///
    /// # Errors
    /// A register that is read before it is written.
    pub fn run(&self, ty: &Ty, inputs: &[u64]) -> Result<Value, String> {
        let mut machine = self.start(inputs);
        for statement in &self.statements {
            machine.statement(statement).map_err(|error| String::from(error.at(&statement.text)))?;
        }
        let result = |i: usize| {
            machine.operands[i]
                .map_or(Value::Undef, |bits| Value::Bits(bits & mask((self.operands[i].bytes() * 8) as u32)))
        };
        Ok(match ty {
            Ty::Void => Value::Undef,
            Ty::Struct(_) => Value::aggregate((0..self.outputs).map(result).collect()),
            _ => result(0),
        })
    }

    fn start(&self, inputs: &[u64]) -> Machine {
        let types = &self.operands[self.outputs..];
        let inputs = inputs.iter().zip(types).map(|(bits, ty)| Some(bits & mask((ty.bytes() * 8) as u32)));
        let mut operands = vec![None; self.outputs];
        operands.extend(inputs);
        for &(output, input) in &self.ties {
            operands[output] = operands[input];
        }
        Machine { registers: self.registers.iter().map(|name| (name.clone(), None)).collect(), operands }
    }

    /// Declares registers: `.b32 a, b<4>`.
    fn declare(&mut self, text: &str) -> Result<(), String> {
        let (_, names) = text.split_once(char::is_whitespace).ok_or("a declaration without names")?;
        for name in names.split(',') {
            match name.trim().split_once('<') {
                Some((base, count)) => {
                    let count = count.trim_end_matches('>').trim().parse().ok().filter(|&n: &usize| n <= MAX_REGISTERS);
                    let count = count.ok_or_else(|| format!("invalid number of registers: `{}`", name.trim()))?;
                    self.registers.extend((0..count).map(|i| format!("{base}{i}")));
                }
                None => self.registers.push(name.trim().into()),
            }
        }
        Ok(())
    }
}

/// Maximum number of registers per declaration.
const MAX_REGISTERS: usize = 1 << 16;

impl Statement {
    fn parse(text: &str) -> Result<Statement, StatementError> {
        let mut rest = text;
        let mut guard = None;
        if let Some(after) = text.strip_prefix('@') {
            let (name, instruction) =
                after.split_once(char::is_whitespace).ok_or_else(|| "a guard without an instruction".to_string())?;
            guard = Some(name.strip_prefix('!').map_or((name.into(), 0), |name| (name.into(), 1)));
            rest = instruction.trim();
        }
        let (name, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let name = Name::parse(name);
        let has_pattern = name.matches_any(float::PATTERNS) || name.matches_any(integer::PATTERNS);
        if !has_pattern && !OTHER_INSTRUCTIONS.contains(&name.op.as_str()) {
            return Err(StatementError::Unsupported);
        }
        let operands = split_operands(operands).into_iter().map(String::from).collect();
        Ok(Statement { text: text.into(), guard, name, has_pattern, operands })
    }
}

/// Replaces LLVM's escapes, such as `\0A`, by their characters.
fn unescape(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('\\') {
        out.push_str(before);
        match after.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
            Some(byte) => {
                out.push(char::from(byte));
                rest = &after[2..];
            }
            None => {
                out.push('\\');
                rest = after;
            }
        }
    }
    out + rest
}

/// The statements, without comments and the braces of scopes; braces of vectors stay.
fn statements(text: &str) -> Vec<String> {
    let mut clean = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("/*") {
        clean.push_str(&rest[..at]);
        rest = rest[at..].split_once("*/").map_or("", |(_, after)| after);
    }
    clean.push_str(rest);
    let lines: Vec<&str> = clean.lines().map(|line| line.split("//").next().unwrap_or("")).collect();
    let mut list = Vec::new();
    for statement in lines.join("\n").split(';') {
        let mut s = statement.trim();
        // Braces of scopes start or end where a statement would start.
        while let Some(rest) = s.strip_prefix(['{', '}']) {
            s = rest.trim_start();
        }
        if !s.is_empty() {
            list.push(s.to_string());
        }
    }
    list
}

impl Machine {
    fn statement(&mut self, statement: &Statement) -> Result<(), StatementError> {
        if let Some((name, unwanted)) = &statement.guard
            && self.value(name, Kind::Pred)? & 1 == *unwanted
        {
            return Ok(());
        }
        self.instruction(statement)
    }

    /// The value of a source operand of this type: a register, an operand of the assembly, or a literal.
    fn value(&self, token: &str, kind: Kind) -> Result<u64, String> {
        if let Some(token) = token.strip_prefix('!') {
            return Ok(1 - (self.value(token, Kind::Pred)? & 1));
        }
        let register = match operand_number(token) {
            Some(i) => self.operands.get(i),
            None => self.registers.get(token),
        };
        let bits = match register {
            Some(bits) => bits.ok_or_else(|| format!("`{token}` is read before it is written"))?,
            None => literal(token, kind)
                .ok_or_else(|| format!("`{token}` is not an operand, a register or a literal of this type"))?,
        };
        Ok(bits & mask(kind.bits()))
    }

    fn set(&mut self, token: &str, bits: u64) -> Result<(), String> {
        if token == "_" {
            return Ok(());
        }
        let place = match operand_number(token) {
            Some(i) => self.operands.get_mut(i),
            None => self.registers.get_mut(token),
        };
        *place.ok_or_else(|| format!("`{token}` is not declared"))? = Some(bits);
        Ok(())
    }

    fn instruction(&mut self, statement: &Statement) -> Result<(), StatementError> {
        let name = &statement.name;
        let (to, from) = statement.operands.split_first().ok_or(StatementError::Unsupported)?;
        let kind = name.kind().ok_or(StatementError::Unsupported)?;
        match name.op.as_str() {
            "setp" => return self.set_predicate(name, kind, to, from),
            "mov" if name.matches_modifiers("") => return Ok(self.mov(kind, to, from)?),
            _ => {}
        }
        let mut values = Vec::new();
        for (i, operand) in from.iter().enumerate() {
            values.push(self.value(operand, operand_kind(name, kind, i))?);
        }
        let result = match (name.op.as_str(), kind) {
            ("selp", kind) if kind.bits() > 8 && name.matches_modifiers("") => match values[..] {
                [a, b, p] => Some(if p & 1 == 1 { a } else { b }),
                _ => None,
            },
            ("cvt", _) => float::convert(name, &values),
            _ if !statement.has_pattern => None,
            (_, Kind::Float(dtype)) => float::execute(name, dtype, &values),
            (_, Kind::Pair(dtype)) => float::execute_pair(name, dtype, &values),
            _ => integer::execute(name, kind, &values),
        };
        Ok(self.set(to, result.ok_or(StatementError::Unsupported)?)?)
    }

    /// Executes `mov`, which also packs and unpacks vectors in braces.
    fn mov(&mut self, kind: Kind, to: &str, from: &[String]) -> Result<(), String> {
        let [from] = from else { return Err("expected one source".into()) };
        let width = |parts: &[String]| match parts.len() as u32 {
            n @ (2 | 4) if kind.bits() / n >= 8 => Ok(kind.bits() / n),
            n => Err(format!("cannot pack {} bits in {n} parts", kind.bits())),
        };
        let list = |text: &str| -> Option<Vec<String>> {
            let inner = text.strip_prefix('{')?.strip_suffix('}')?;
            Some(inner.split(',').map(|part| part.trim().to_string()).collect())
        };
        if let Some(parts) = list(to) {
            let width = width(&parts)?;
            let all = self.value(from, kind)?;
            for (i, part) in parts.iter().enumerate() {
                self.set(part, all >> (width * i as u32) & mask(width))?;
            }
            return Ok(());
        }
        if let Some(parts) = list(from) {
            let width = width(&parts)?;
            let mut all = 0;
            for (i, part) in parts.iter().enumerate() {
                all |= self.value(part, Kind::Bits(width))? << (width * i as u32);
            }
            return self.set(to, all);
        }
        let bits = self.value(from, kind)?;
        self.set(to, bits)
    }

    /// Executes `setp.CMP{.and|.or|.xor}{.ftz}.TYPE p{|q}, a, b{, c}`.
    fn set_predicate(&mut self, name: &Name, kind: Kind, to: &str, from: &[String]) -> Result<(), StatementError> {
        let (comparison, modifiers) = name.modifiers.split_first().ok_or(StatementError::Unsupported)?;
        let rest = Name { modifiers: modifiers.to_vec(), ..name.clone() };
        let combines = from.len() == 3;
        let wanted = match (combines, kind == Kind::Float(DType::F32) || kind == Kind::Float(DType::F16)) {
            (true, true) => "and|or|xor ftz?",
            (true, false) => "and|or|xor",
            (false, true) => "ftz?",
            (false, false) => "",
        };
        let ([a, b] | [a, b, _]) = from else {
            return Err(StatementError::Malformed(
                "expected two operands, and a predicate after `.and`, `.or` or `.xor`".into(),
            ));
        };
        if !rest.matches_modifiers(wanted) || name.kinds.len() != 1 {
            return Err(StatementError::Unsupported);
        }
        let (x, y) = (self.value(a, kind)?, self.value(b, kind)?);
        let holds = match kind {
            Kind::Float(dtype) => float::compare_bits(name, comparison, dtype, x, y),
            Kind::Pair(_) | Kind::Pred => None,
            kind => integer::compare(comparison, kind, x, y),
        };
        let holds = holds.ok_or(StatementError::Unsupported)?;
        let with = if combines { self.value(&from[2], Kind::Pred)? & 1 == 1 } else { true };
        let combine = |p: bool| match modifiers.first().map(String::as_str) {
            Some("or") => p | with,
            Some("xor") => p ^ with,
            Some("and") => p & with,
            _ => p,
        };
        match to.split_once('|') {
            Some((p, q)) => {
                self.set(p.trim(), u64::from(combine(holds)))?;
                Ok(self.set(q.trim(), u64::from(combine(!holds)))?)
            }
            None => Ok(self.set(to, u64::from(combine(holds)))?),
        }
    }
}

/// Parses `$n` or `${n}`.
fn operand_number(token: &str) -> Option<usize> {
    let number = token.strip_prefix('$')?;
    number.strip_prefix('{').and_then(|n| n.strip_suffix('}')).unwrap_or(number).parse().ok()
}

/// The type of source operand `i`, if it differs from the instruction's type.
fn operand_kind(name: &Name, kind: Kind, i: usize) -> Kind {
    match (name.op.as_str(), i) {
        ("selp", 2) => Kind::Pred,
        ("shl" | "shr", 1) | ("bfe", 1 | 2) | ("bfi", 2 | 3) | ("lop3" | "shf" | "prmt", _) => Kind::Bits(32),
        ("mad", 2) if name.has("wide") => Kind::Bits(2 * kind.bits()),
        _ => kind,
    }
}

/// Splits operands at commas; vectors stay in one piece.
fn split_operands(text: &str) -> Vec<&str> {
    let (mut list, mut depth, mut start) = (Vec::new(), 0, 0);
    for (i, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                list.push(text[start..i].trim());
                start = i + 1;
            }
            _ => {}
        }
    }
    let last = text[start..].trim();
    if !last.is_empty() {
        list.push(last);
    }
    list
}

/// Parses a PTX literal: `0f3F800000`, `0d…`, hexadecimal, binary, octal or decimal, or a decimal fraction.
fn literal(token: &str, kind: Kind) -> Option<u64> {
    let (negative, digits) = token.strip_prefix('-').map_or((false, token), |digits| (true, digits));
    let lower = digits.to_ascii_lowercase();
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
    if negative && (lower.starts_with("0f") || lower.starts_with("0d")) {
        return None;
    }
    if let Some(digits) = lower.strip_prefix("0f").filter(|digits| digits.len() == 8) {
        let x = f64::from(f32::from_bits(hex(digits)? as u32));
        return Some(match kind {
            Kind::Float(d) => num::encode(d, x),
            _ => hex(digits)?,
        });
    }
    if let Some(digits) = lower.strip_prefix("0d").filter(|digits| digits.len() == 16) {
        let x = f64::from_bits(hex(digits)?);
        return Some(if let Kind::Float(d) = kind { num::encode(d, x) } else { hex(digits)? });
    }
    let lower = lower.trim_end_matches('u');
    let magnitude = if let Some(digits) = lower.strip_prefix("0x") {
        hex(digits)
    } else if let Some(digits) = lower.strip_prefix("0b") {
        u64::from_str_radix(digits, 2).ok()
    } else if lower.len() > 1 && lower.starts_with('0') && lower.bytes().all(|b| b.is_ascii_digit()) {
        u64::from_str_radix(&lower[1..], 8).ok()
    } else {
        lower.parse().ok()
    };
    match (kind, magnitude) {
        (Kind::Float(d), _) if lower.contains('.') => {
            let x: f64 = lower.parse().ok()?;
            Some(num::encode(d, if negative { -x } else { x }))
        }
        // Float literals have a point, or are bits after `0f` or `0d`.
        (Kind::Float(_) | Kind::Pair(_), _) => None,
        (_, Some(n)) => Some(if negative { n.wrapping_neg() } else { n }),
        _ => None,
    }
}
