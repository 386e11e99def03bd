//! Cache keys of artifacts.

use std::fmt;

use tilewright_codegen::ir::{Func, Op};
use tilewright_codegen::target::{CompileOptions, Target};
use tilewright_codegen::{compiler_id, text};

/// Cache key of an artifact: a hash of all inputs of its code.
///
/// The inputs are the compiler with its LLVM, the target (a CPU with all its features), options, the function's text,
/// and the source locations that are in the code. The text has no locations: a kernel that moves in its file keeps its
/// entry, unless it contains an assertion or assumption. (The one location in the manifest is the kernel's own; the
/// reader of the cache sets it.)
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(pub(super) [u8; 32]);

impl Key {
    /// Key of the code that this compiler generates from `func` for `target` under `options`.
    pub fn new(func: &Func, target: &Target, options: &CompileOptions) -> Key {
        Key::of(compiler_id(), func, target, options)
    }

    pub(super) fn of(compiler: &str, func: &Func, target: &Target, options: &CompileOptions) -> Key {
        let mut hasher = blake3::Hasher::new();
        // Each part is preceded by its length, so that different lists of parts have different bytes.
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(compiler.as_bytes());
        // The derived text contains every field of both, by name.
        part(format!("{target:?}").as_bytes());
        part(format!("{options:?}").as_bytes());
        part(text::print(func).as_bytes());
        places(func).for_each(|place| part(place.as_bytes()));
        Key(*hasher.finalize().as_bytes())
    }
}

/// The locations that are in the code: a failing assertion or assumption reports its location.
fn places(func: &Func) -> impl Iterator<Item = String> {
    let asserts = func.walk().into_iter().filter(|&id| matches!(func.op(id).op, Op::DeviceAssert { .. } | Op::Assume));
    asserts.map(|id| func.op(id).loc.to_string())
}

impl fmt::Display for Key {
    /// 64 hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}
