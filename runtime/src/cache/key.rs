//! Names of artifacts.

use std::fmt;

use tilewright_codegen::ir::{Func, Op};
use tilewright_codegen::target::{CompileOptions, Target};
use tilewright_codegen::{compiler_id, text};

/// Name of an artifact: a hash of everything that its code is made from.
///
/// That is the compiler with the LLVM in it, target (a CPU with all its features), options, the function's text, and the
/// source places that are in the code. The text has no places: a kernel that moves in its file keeps its entry, unless it
/// asserts something. (The one place in the manifest is the kernel's own, which whoever takes an artifact from the cache
/// puts there.)
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(pub(super) [u8; 32]);

impl Key {
    /// Key of what this compiler makes of `func` for `target` under `options`.
    pub fn new(func: &Func, target: &Target, options: &CompileOptions) -> Key {
        Key::of(compiler_id(), func, target, options)
    }

    pub(super) fn of(compiler: &str, func: &Func, target: &Target, options: &CompileOptions) -> Key {
        let mut hasher = blake3::Hasher::new();
        // Each part's length goes first, so that no two different lists of parts give the same bytes.
        let mut part = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes());
            hasher.update(bytes);
        };
        part(compiler.as_bytes());
        // The derived text has every field of both, with its name.
        part(format!("{target:?}").as_bytes());
        part(format!("{options:?}").as_bytes());
        part(text::print(func).as_bytes());
        places(func).for_each(|place| part(place.as_bytes()));
        Key(*hasher.finalize().as_bytes())
    }
}

/// The places that are in the code: an assertion or an assumption that fails names its own.
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
