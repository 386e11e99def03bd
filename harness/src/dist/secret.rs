//! The secret of a job: what its ranks know and nobody else, and what they prove with it.
//!
//! The secret itself never travels. Each side of a connection sends a random nonce, and proves that it knows the secret by a BLAKE3 hash,
//! keyed with it, of both nonces and everything else that was said ([`Key::proof`]). A proof is worth nothing on another connection.
//!
//! | where it comes from | |
//! |---|---|
//! | `TILEWRIGHT_SECRET` | the secret itself, at least [`MIN_BYTES`] bytes; `tilewright launch` sets it for its ranks |
//! | `TILEWRIGHT_SECRET_FILE` | a file that has it, which belongs to us and nobody else can read |
//!
//! Guessing a secret takes no connection once a proof was seen, so it has to be random: 32 bytes of `/dev/urandom`, not a word.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rand::TryRng;
use rand::rngs::SysRng;

/// The fewest bytes of a secret.
pub const MIN_BYTES: usize = 16;
/// The most bytes of a file that are read.
const MAX_FILE_BYTES: u64 = 4096;

/// What the ranks of one job know. Shown as dots wherever it is printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Bytes that nobody can guess.
///
/// # Errors
/// The system has no random numbers.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SysRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

impl Secret {
    /// A new one, which nobody knows yet: 32 random bytes as hexadecimal digits.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate() -> io::Result<Secret> {
        Ok(Secret(random::<32>()?.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// The secret that somebody wrote down.
    ///
    /// # Errors
    /// It is short enough to be guessed, or no environment can hold it.
    pub fn new(text: &str) -> Result<Secret, String> {
        let text = text.trim();
        match text.len() {
            _ if text.contains('\0') => Err(
                "the job's secret has a NUL byte, which no environment variable can hold\n  help: `head -c 32 /dev/urandom | base64` makes one that is text"
                    .into(),
            ),
            length if length < MIN_BYTES => Err(format!(
                "the job's secret has {length} bytes, expected at least {MIN_BYTES}\n  help: `head -c 32 /dev/urandom | base64` makes one"
            )),
            _ => Ok(Secret(text.to_string())),
        }
    }

    /// The secret in a file of ours that nobody else can read.
    ///
    /// # Errors
    /// Names the file, and what is wrong with it.
    pub fn from_file(path: &Path) -> Result<Secret, String> {
        let show = path.display();
        let failed = |error: io::Error| format!("cannot read the job's secret from {show}: {error}");
        // Without waiting for the other end of a FIFO; all checks are made on the open file.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path);
        let file = file.map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        // SAFETY: asks for a number.
        let user = unsafe { libc::geteuid() };
        if !meta.is_file() {
            return Err(format!("{show}, which should hold the job's secret, is no regular file"));
        }
        if meta.uid() != user {
            let owner = meta.uid();
            return Err(format!(
                "{show}, which should hold the job's secret, belongs to user {owner}, and this process acts for user {user}\n  help: make a file of your own"
            ));
        }
        let mode = meta.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(format!(
                "{show}, which holds the job's secret, can be used by others (mode {mode:04o})\n  help: `chmod 600 {show}`, and another secret if somebody may have read it"
            ));
        }
        let mut text = String::new();
        file.take(MAX_FILE_BYTES).read_to_string(&mut text).map_err(failed)?;
        Secret::new(&text).map_err(|why| format!("{show}: {why}"))
    }

    /// The text, for the environment of ranks that we start.
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Who may take part in a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Any program of this host: ranks listen and connect on the loopback interface only.
    #[default]
    Loopback,
    /// Whoever knows the secret.
    Secret(Secret),
    /// Whoever reaches the port, because somebody said that only the job's hosts do.
    Unauthenticated,
}

impl Access {
    /// What proofs are made with. Without a secret it is the same for everybody, and proves nothing.
    pub(super) fn key(&self) -> Key {
        const CONTEXT: &str = "tilewright 2026-11-23 secret of a job of ranks";
        let secret = match self {
            Access::Secret(secret) => secret.0.as_bytes(),
            Access::Loopback | Access::Unauthenticated => b"",
        };
        Key(blake3::derive_key(CONTEXT, secret))
    }
}

/// A secret as a key.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// The proof of `role` for what was said. All parts but the last have a fixed length for each role.
    pub fn proof(&self, role: &str, said: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[role.len() as u8]).update(role.as_bytes());
        for part in said {
            hasher.update(part);
        }
        hasher.finalize()
    }

    /// Whether `shown` is the proof; takes as long for every wrong one.
    pub fn is_proof(&self, shown: [u8; 32], role: &str, said: &[&[u8]]) -> bool {
        // Hashes are compared in constant time.
        self.proof(role, said) == blake3::Hash::from_bytes(shown)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn secrets_are_long_and_never_printed() {
        let secret = Secret::generate().unwrap();
        assert_eq!(secret.text().len(), 64);
        assert_ne!(secret, Secret::generate().unwrap());
        assert!(!format!("{:?}", Access::Secret(secret.clone())).contains(&secret.text()[..8]));
        assert!(Secret::new("0123456789\0abcdef").unwrap_err().contains("NUL byte"));
        assert!(Secret::new("short").unwrap_err().contains("has 5 bytes, expected at least 16"));
    }

    #[test]
    fn proofs_depend_on_role_secret_and_transcript() {
        let key = |text: &str| Access::Secret(Secret::new(text).unwrap()).key();
        let (ours, other) = (key("0123456789abcdef"), key("0123456789abcdeg"));
        let proof = *ours.proof("server", &[b"nonce"]).as_bytes();
        assert!(ours.is_proof(proof, "server", &[b"nonce"]));
        assert!(!ours.is_proof(proof, "client", &[b"nonce"]));
        assert!(!ours.is_proof(proof, "server", &[b"noncf"]));
        assert!(!other.is_proof(proof, "server", &[b"nonce"]));
    }

    #[test]
    fn files_readable_by_others_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        std::fs::write(&path, "0123456789abcdef0123\n").unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o640)).unwrap();
        let why = Secret::from_file(&path).unwrap_err();
        assert!(why.contains("mode 0640") && why.contains("chmod 600"), "{why}");
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        assert_eq!(Secret::from_file(&path).unwrap().text(), "0123456789abcdef0123");
        assert!(Secret::from_file(folder.path()).unwrap_err().contains("no regular file"));
        let fifo = folder.path().join("fifo");
        let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a zero.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(Secret::from_file(&fifo).unwrap_err().contains("no regular file"));
    }
}
