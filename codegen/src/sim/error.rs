//! What the simulated GPU reports, and where it found it.

use std::fmt;

/// Why a run stopped.
#[derive(Clone, Debug, PartialEq)]
pub enum SimError {
    /// The code has something that the simulated GPU does not know. Nothing has run.
    Unknown(Box<Unknown>),
    /// The launch does not fit the code: another number of arguments, or no kernel. Nothing has run.
    Launch(String),
    /// A thread did what no correct kernel does.
    Fault(Box<Fault>),
}

/// What the simulated GPU does not know, and where it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Unknown {
    pub what: What,
    /// The function without `@`.
    pub function: String,
    /// The line of the LLVM IR, from 1.
    pub line: usize,
    /// The text of that line.
    pub instruction: String,
    /// The line of the kernel's source that it comes from (`file:line:column`); empty where it is not known.
    pub place: String,
}

/// A thing that the simulated GPU does not know.
#[derive(Clone, Debug, PartialEq)]
pub enum What {
    /// A type of LLVM.
    Type(String),
    /// An instruction of LLVM, or one of these types.
    Instruction(String),
    /// A function that is called and not defined.
    Function(String),
    /// Text that is no LLVM IR, or that is written in another way than the lowering writes it.
    Syntax(String),
    /// A statement of inline assembly whose instruction, type or modifier is not known.
    Assembly { statement: String },
    /// A statement of inline assembly that is none, and why.
    MalformedAssembly { statement: String, reason: String },
}

/// A thread's mistake.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Fault {
    /// Coordinates of the program.
    pub block: [u32; 3],
    /// `tid.x` of the thread; `None` where several threads or a whole program are to blame.
    pub thread: Option<u32>,
    /// The LLVM IR instruction; empty where none is to blame.
    pub instruction: String,
    /// The line of the kernel's source that the instruction comes from (`file:line:column`); empty where it is not known.
    pub place: String,
    pub message: String,
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const KNOWN: &str = "the simulated GPU does not know";
        const OURS: &str = "this is a limit of the simulator: please report it";
        match self {
            What::Type(ty) => write!(f, "{KNOWN} the type `{ty}`; {OURS}"),
            What::Instruction(name) => write!(f, "{KNOWN} the instruction `{name}`; {OURS}"),
            What::Function(name) => write!(f, "{KNOWN} the function `{name}`; {OURS}"),
            What::Syntax(what) => write!(f, "{KNOWN} this LLVM IR: {what}; {OURS}"),
            What::Assembly { statement } => {
                let known = Vec::from_iter(super::ptx::known()).join(", ");
                write!(
                    f,
                    "{KNOWN} the instruction of the inline assembly `{statement}`, or one of its types or modifiers. It knows \
                     instructions on registers alone, of integers, f16, bf16, f32 and f64: {known}. Use these, or run the kernel on a GPU"
                )
            }
            What::MalformedAssembly { statement, reason } => {
                write!(f, "the inline assembly `{statement}` cannot be read: {reason}")
            }
        }
    }
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
        }
        let Unknown { what, function, line, instruction, .. } = self;
        write!(f, "{what}\n  in function `{function}`, line {line} of the LLVM IR: `{instruction}`")
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.place.is_empty() {
            write!(f, "{}: ", self.place)?;
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
            SimError::Unknown(unknown) => unknown.fmt(f),
            SimError::Launch(message) => f.write_str(message),
            SimError::Fault(fault) => fault.fmt(f),
        }
    }
}

impl std::error::Error for SimError {}

/// Inside of a run: where it happens says [`Fault`].
impl From<What> for String {
    fn from(what: What) -> String {
        what.to_string()
    }
}

impl From<SimError> for String {
    fn from(error: SimError) -> String {
        error.to_string()
    }
}
