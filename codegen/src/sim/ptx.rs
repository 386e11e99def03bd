//! Scalar PTX that users write as inline assembly: registers, arithmetic, bits, comparisons and conversions, instruction by instruction as
//! the PTX ISA says. Memory and whatever needs other threads is not here.
//!
//! Results of `.approx` instructions are the exact ones rounded to the type: a GPU's may differ in the last bits. An instruction, type or
//! modifier that is not known is an error that names the instruction.

mod float;
mod integer;

use super::parse::Ty;
use super::value::{Value, mask};
use crate::ir::DType;
use crate::num;
use std::collections::HashMap;

/// Whether a text is one of those accesses of memory that the lowering writes.
pub fn is_memory(text: &str) -> bool {
    ["ld.global", "st.global", "st.shared", "atom.global", "red.global", "cp.async"].iter().any(|op| text.contains(op))
}

/// The type in an instruction's name.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Bits(u32),
    Unsigned(u32),
    Signed(u32),
    Float(DType),
    /// Two elements of 16 bits in a word.
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

/// An instruction's name: the operation, what modifies it, and its types.
struct Name<'a> {
    op: &'a str,
    modifiers: Vec<&'a str>,
    kinds: Vec<Kind>,
}

impl Name<'_> {
    fn has(&self, modifier: &str) -> bool {
        self.modifiers.contains(&modifier)
    }

    /// The last type, which most instructions have alone.
    fn kind(&self) -> Option<Kind> {
        self.kinds.last().copied()
    }
}

/// Registers by name, and the operands `$0`, `$1`, …
struct Machine {
    registers: HashMap<String, u64>,
    operands: Vec<u64>,
}

/// Runs the statements of an assembly text with so many outputs; gives their values.
///
/// # Errors
/// At an instruction that is not known, which is named, and at operands that are none.
pub fn execute(text: &str, outputs: usize, ty: &Ty, inputs: &[(Ty, u64)]) -> Result<Value, String> {
    let text = unescape(text);
    let mut operands = vec![0; outputs];
    operands.extend(inputs.iter().map(|(ty, bits)| bits & mask((ty.bytes() * 8) as u32)));
    let mut machine = Machine { registers: HashMap::new(), operands };
    for statement in statements(&text) {
        machine.statement(&statement).map_err(|e| format!("inline assembly `{}`: {e}", statement.trim()))?;
    }
    let result = |i: usize, ty: &Ty| Value::Bits(machine.operands[i] & mask((ty.bytes() * 8) as u32));
    Ok(match (outputs, ty) {
        (0, _) => Value::Undef,
        (_, Ty::Struct(types)) => Value::many(types.iter().enumerate().map(|(i, ty)| result(i, ty)).collect()),
        _ => result(0, ty),
    })
}

/// LLVM's `\0A` and the like, as the characters that they are.
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

/// Without comments and the braces of scopes; those of vectors stay.
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
        // A scope begins or ends where a statement would begin.
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
    fn statement(&mut self, statement: &str) -> Result<(), String> {
        if let Some(declared) = statement.strip_prefix(".reg") {
            return self.declare(declared.trim());
        }
        let mut rest = statement;
        if let Some(guard) = statement.strip_prefix('@') {
            let (guard, instruction) =
                guard.split_once(char::is_whitespace).ok_or("a guard without an instruction".to_string())?;
            let (name, wanted) = guard.strip_prefix('!').map_or((guard, 1), |name| (name, 0));
            if self.value(name, Kind::Pred)? & 1 != wanted {
                return Ok(());
            }
            rest = instruction.trim();
        }
        let (name, operands) = rest.split_once(char::is_whitespace).unwrap_or((rest, ""));
        let mut parts = name.split('.');
        let op = parts.next().unwrap_or("");
        let (mut modifiers, mut kinds) = (Vec::new(), Vec::new());
        for part in parts {
            match Kind::parse(part) {
                Some(kind) => kinds.push(kind),
                None => modifiers.push(part),
            }
        }
        let operands = split_operands(operands);
        let name = Name { op, modifiers, kinds };
        self.instruction(&name, &operands)
    }

    /// `.b32 a, b<4>`.
    fn declare(&mut self, text: &str) -> Result<(), String> {
        let (_, names) = text.split_once(char::is_whitespace).ok_or("a declaration without names".to_string())?;
        for name in names.split(',') {
            match name.trim().split_once('<') {
                Some((base, count)) => {
                    let count: usize =
                        count.trim_end_matches('>').trim().parse().map_err(|_| format!("the number of `{name}`"))?;
                    self.registers.extend((0..count).map(|i| (format!("{base}{i}"), 0)));
                }
                None => {
                    self.registers.insert(name.trim().into(), 0);
                }
            }
        }
        Ok(())
    }

    /// The value of an operand of that type: a register, an operand of the assembly, or a number.
    fn value(&self, token: &str, kind: Kind) -> Result<u64, String> {
        if let Some(token) = token.strip_prefix('!') {
            return Ok(1 - (self.value(token, Kind::Pred)? & 1));
        }
        let bits = match (token.strip_prefix('$'), self.registers.get(token)) {
            (Some(number), _) => {
                let number = number.trim_start_matches('{').trim_end_matches('}');
                let found = number.parse().ok().and_then(|i: usize| self.operands.get(i));
                *found.ok_or_else(|| format!("there is no operand `{token}`"))?
            }
            (None, Some(&bits)) => bits,
            (None, None) => literal(token, kind).ok_or_else(|| format!("there is no register `{token}`"))?,
        };
        Ok(bits & mask(kind.bits()))
    }

    fn set(&mut self, token: &str, bits: u64) -> Result<(), String> {
        if token == "_" {
            return Ok(());
        }
        let place = match token.strip_prefix('$') {
            Some(number) => number.parse().ok().and_then(|i: usize| self.operands.get_mut(i)),
            None => self.registers.get_mut(token),
        };
        *place.ok_or_else(|| format!("`{token}` is not declared"))? = bits;
        Ok(())
    }

    fn instruction(&mut self, name: &Name, operands: &[&str]) -> Result<(), String> {
        let unknown = || "the simulated GPU does not know this instruction".to_string();
        let (&to, from) = operands.split_first().ok_or_else(unknown)?;
        if name.op == "setp" {
            return self.set_predicate(name, to, from);
        }
        if name.op == "mov" {
            return self.mov(name, to, from);
        }
        let kind = name.kind().ok_or_else(unknown)?;
        let mut values = Vec::new();
        for (i, operand) in from.iter().enumerate() {
            values.push(self.value(operand, operand_kind(name, kind, i))?);
        }
        let result = match (name.op, kind) {
            ("selp", _) if values.len() == 3 => Some(if values[2] & 1 == 1 { values[0] } else { values[1] }),
            ("cvt", _) => float::convert(name, &values),
            (_, Kind::Float(dtype)) => float::execute(name, dtype, &values),
            (_, Kind::Pair(dtype)) => float::execute_pair(name, dtype, &values),
            _ => integer::execute(name, kind, &values),
        };
        self.set(to, result.ok_or_else(unknown)?)
    }

    /// `mov`, which also packs and unpacks vectors in braces.
    fn mov(&mut self, name: &Name, to: &str, from: &[&str]) -> Result<(), String> {
        let (Some(kind), &[from]) = (name.kind(), from) else {
            return Err("a type and one operand are expected".into());
        };
        let list = |text: &str| -> Option<Vec<String>> {
            let inner = text.strip_prefix('{')?.strip_suffix('}')?;
            Some(inner.split(',').map(|part| part.trim().to_string()).collect())
        };
        if let Some(parts) = list(to) {
            let width = kind.bits() / parts.len() as u32;
            let all = self.value(from, kind)?;
            for (i, part) in parts.iter().enumerate() {
                self.set(part, all >> (width * i as u32) & mask(width))?;
            }
            return Ok(());
        }
        if let Some(parts) = list(from) {
            let width = kind.bits() / parts.len() as u32;
            let mut all = 0;
            for (i, part) in parts.iter().enumerate() {
                all |= self.value(part, Kind::Bits(width))? << (width * i as u32);
            }
            return self.set(to, all);
        }
        let bits = self.value(from, kind)?;
        self.set(to, bits)
    }

    /// `setp.CMP{.and|.or|.xor}.TYPE p{|q}, a, b{, c}`.
    fn set_predicate(&mut self, name: &Name, to: &str, from: &[&str]) -> Result<(), String> {
        let unknown = || "the simulated GPU does not know this instruction".to_string();
        let kind = name.kind().ok_or_else(unknown)?;
        let [a, b, ..] = from[..] else { return Err("two operands are expected".into()) };
        let (x, y) = (self.value(a, kind)?, self.value(b, kind)?);
        let comparison = name.modifiers.first().ok_or_else(unknown)?;
        let holds = match kind {
            Kind::Float(dtype) => float::compare(comparison, num::decode(dtype, x), num::decode(dtype, y)),
            kind => integer::compare(comparison, kind, x, y),
        };
        let holds = holds.ok_or_else(unknown)?;
        let with = match from.get(2) {
            Some(c) => self.value(c, Kind::Pred)? & 1 == 1,
            None => true,
        };
        let combine = |p: bool| match name.modifiers.get(1).copied() {
            Some("or") => p | with,
            Some("xor") => p ^ with,
            Some("and") => p & with,
            _ => p,
        };
        match to.split_once('|') {
            Some((p, q)) => {
                self.set(p.trim(), u64::from(combine(holds)))?;
                self.set(q.trim(), u64::from(combine(!holds)))
            }
            None => self.set(to, u64::from(combine(holds))),
        }
    }
}

/// The type of a source operand, where it is not the instruction's.
fn operand_kind(name: &Name, kind: Kind, i: usize) -> Kind {
    match (name.op, i) {
        ("selp", 2) => Kind::Pred,
        ("shl" | "shr", 1) | ("bfe", 1 | 2) | ("bfi", 2 | 3) | ("lop3" | "shf" | "prmt", _) => Kind::Bits(32),
        ("mad", 2) if name.has("wide") => Kind::Bits(2 * kind.bits()),
        ("cvt", _) => kind,
        _ => kind,
    }
}

/// Operands between commas, vectors in one piece.
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

/// A number as PTX writes it: `0f3F800000`, `0d…`, hexadecimal, binary, octal or decimal, or a decimal fraction.
fn literal(token: &str, kind: Kind) -> Option<u64> {
    let (negative, digits) = token.strip_prefix('-').map_or((false, token), |digits| (true, digits));
    let lower = digits.to_ascii_lowercase();
    let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
    if let Some(digits) = lower.strip_prefix("0f") {
        let x = f64::from(f32::from_bits(hex(digits)? as u32));
        return Some(match kind {
            Kind::Float(d) => num::encode(d, x),
            _ => hex(digits)?,
        });
    }
    if let Some(digits) = lower.strip_prefix("0d") {
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
        (_, Some(n)) => Some(if negative { n.wrapping_neg() } else { n }),
        _ => None,
    }
}
