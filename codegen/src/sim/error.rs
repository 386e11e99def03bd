//! Errors of the simulator, with their location.

use std::fmt;

/// Why a simulation stopped.
#[derive(Clone, Debug, PartialEq)]
pub enum SimError {
    /// The code contains something that the simulator does not support. Nothing has run.
    Unsupported(Box<UnsupportedCode>),
    /// The launch does not match the code: a wrong number of arguments, or no kernel. Nothing has run.
    Launch(String),
    /// A thread executed an action that no correct kernel executes.
    Fault(Box<Fault>),
}

/// Code that the simulator does not support, with its location.
#[derive(Clone, Debug, PartialEq)]
pub struct UnsupportedCode {
    pub kind: UnsupportedKind,
    /// Name of the function, without `@`.
    pub function: String,
    /// Line of the LLVM IR, from 1.
    pub line: usize,
    /// Text of this line.
    pub instruction: String,
    /// Source location of the kernel (`file:line:column`) that the line was compiled from; empty if unknown.
    pub source_loc: String,
}

/// The kind of code that the simulator does not support.
#[derive(Clone, Debug, PartialEq)]
pub enum UnsupportedKind {
    /// An LLVM type.
    Type(String),
    /// An LLVM instruction, or an instruction with these types.
    Instruction(String),
    /// A function that is called but not defined.
    Function(String),
    /// Text that is not LLVM IR, or that is not written in the form that the lowering emits.
    Syntax(String),
    /// A statement of inline assembly with an unsupported instruction, type or modifier.
    Assembly { statement: String },
    /// A malformed statement of inline assembly, and the reason.
    MalformedAssembly { statement: String, reason: String },
}

/// An error of a kernel while it ran.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fault {
    /// Block index of the program.
    pub block: [u32; 3],
    /// `tid.x` of the thread; `None` if the error belongs to several threads or to the whole program.
    pub thread: Option<u32>,
    /// The LLVM IR instruction; empty if the error does not belong to one.
    pub instruction: String,
    /// Source location of the kernel (`file:line:column`) that the instruction was compiled from; empty if unknown.
    pub source_loc: String,
    pub message: String,
}

impl fmt::Display for UnsupportedKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNSUPPORTED: &str = "the simulated GPU does not support";
        const REPORT: &str = "this is a limit of the simulator: please report it";
        match self {
            UnsupportedKind::Type(ty) => write!(f, "{UNSUPPORTED} the type `{ty}`; {REPORT}"),
            UnsupportedKind::Instruction(name) => write!(f, "{UNSUPPORTED} the instruction `{name}`; {REPORT}"),
            UnsupportedKind::Function(name) => write!(f, "{UNSUPPORTED} the function `{name}`; {REPORT}"),
            UnsupportedKind::Syntax(what) => write!(f, "{UNSUPPORTED} this LLVM IR: {what}; {REPORT}"),
            UnsupportedKind::Assembly { statement } => {
                let known = Vec::from_iter(super::ptx::known_instructions()).join(", ");
                write!(
                    f,
                    "{UNSUPPORTED} the instruction of the inline assembly `{statement}`, or one of its types or \
                     modifiers. It supports instructions on registers only, of integers, f16, bf16, f32 and f64: \
                     {known}. Use these, or run the kernel on a GPU"
                )
            }
            UnsupportedKind::MalformedAssembly { statement, reason } => {
                write!(f, "cannot parse the inline assembly `{statement}`: {reason}")
            }
        }
    }
}

impl fmt::Display for UnsupportedCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.source_loc.is_empty() {
            write!(f, "{}: ", self.source_loc)?;
        }
        let UnsupportedCode { kind, function, line, instruction, .. } = self;
        write!(f, "{kind}\n  in function `{function}`, line {line} of the LLVM IR: `{instruction}`")
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.source_loc.is_empty() {
            write!(f, "{}: ", self.source_loc)?;
        }
        let [x, y, z] = self.block;
        write!(f, "block ({x}, {y}, {z})")?;
        if let Some(thread) = self.thread {
            write!(f, ", thread {thread}")?;
        }
        write!(f, ": {}", self.message)?;
        if !self.instruction.is_empty() {
            write!(f, "\n  at `{}`", self.instruction)?;
        }
        Ok(())
    }
}

impl fmt::Display for SimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SimError::Unsupported(code) => code.fmt(f),
            SimError::Launch(message) => f.write_str(message),
            SimError::Fault(fault) => fault.fmt(f),
        }
    }
}

impl std::error::Error for SimError {}

/// Keeps the message only: inside of a run, [`Fault`] holds the location.
impl From<UnsupportedKind> for String {
    fn from(what: UnsupportedKind) -> String {
        what.to_string()
    }
}

impl From<SimError> for String {
    fn from(error: SimError) -> String {
        error.to_string()
    }
}
