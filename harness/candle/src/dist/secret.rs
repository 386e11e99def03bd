//! The shared secret of a job, and the proofs by which its ranks authenticate each other.
//!
//! The secret itself is never sent. Each side of a connection sends a random nonce, and proves that it knows the secret
//! by a BLAKE3 hash, keyed with it, of both nonces and all other bytes of the handshake ([`Key::proof`]). A proof is
//! not valid on another connection.
//!
//! | source | |
//! |---|---|
//! | `TILEWRIGHT_SECRET` | the secret itself, at least [`MIN_BYTES`] bytes; `tilewright launch` sets it for its ranks |
//! | `TILEWRIGHT_SECRET_FILE` | a file with the secret, which belongs to this user and which no other user can read |
//!
//! An eavesdropper can test guesses offline against a recorded proof. The secret therefore has to be random: 32 bytes
//! of `/dev/urandom`, not a word.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use rand::TryRng;
use rand::rngs::SysRng;

/// Minimum length of a secret in bytes.
pub const MIN_BYTES: usize = 16;
/// Maximum number of bytes read from a file.
const MAX_FILE_BYTES: u64 = 4096;

/// The secret of a job. `Debug` hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// Returns random bytes of the operating system's generator.
///
/// # Errors
/// The system has no random numbers.
pub fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SysRng.try_fill_bytes(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

impl Secret {
    /// Generates a secret: 32 random bytes as hexadecimal digits.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate() -> io::Result<Secret> {
        Ok(Secret(random::<32>()?.iter().map(|byte| format!("{byte:02x}")).collect()))
    }

    /// Uses `text` as the secret.
    ///
    /// # Errors
    /// A text that is too short, or that an environment variable cannot hold.
    pub fn new(text: &str) -> Result<Secret, String> {
        let text = text.trim();
        match text.len() {
            _ if text.contains('\0') => Err(
                "the job's secret has a NUL byte, which an environment variable cannot hold\n  help: `head -c 32 /dev/urandom | base64` prints a valid secret"
                    .into(),
            ),
            length if length < MIN_BYTES => Err(format!(
                "the job's secret has {length} bytes, expected at least {MIN_BYTES}\n  help: `head -c 32 /dev/urandom | base64` prints a valid secret"
            )),
            _ => Ok(Secret(text.to_string())),
        }
    }

    /// Reads the secret from a file, which has to belong to this user and must not be readable by others.
    ///
    /// # Errors
    /// Names the file and the reason.
    pub fn from_file(path: &Path) -> Result<Secret, String> {
        let show = path.display();
        let failed = |error: io::Error| format!("cannot read the job's secret from {show}: {error}");
        // Non-blocking, so that a FIFO without a writer does not hang. All checks are made on the open file.
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(path);
        let file = file.map_err(failed)?;
        let meta = file.metadata().map_err(failed)?;
        // SAFETY: has no preconditions.
        let user = unsafe { libc::geteuid() };
        if !meta.is_file() {
            return Err(format!("{show}, which should hold the job's secret, is not a regular file"));
        }
        if meta.uid() != user {
            let owner = meta.uid();
            return Err(format!(
                "{show}, which should hold the job's secret, belongs to user {owner}, but this process runs as user {user}\n  help: create the file as user {user}"
            ));
        }
        let mode = meta.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(format!(
                "{show}, which holds the job's secret, is accessible to other users (mode {mode:04o})\n  help: run `chmod 600 {show}`, and replace the secret if another user may have read it"
            ));
        }
        let mut text = String::new();
        file.take(MAX_FILE_BYTES).read_to_string(&mut text).map_err(failed)?;
        Secret::new(&text).map_err(|why| format!("{show}: {why}"))
    }

    /// The text, for the environment of ranks that this process starts.
    pub fn text(&self) -> &str {
        &self.0
    }
}

/// Which peers may take part in a job.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Access {
    /// Any program on this host: ranks listen and connect on the loopback interface only.
    #[default]
    Loopback,
    /// Peers that know the secret.
    Secret(Secret),
    /// Any peer that can reach the port: the user states that only the job's hosts can.
    Unauthenticated,
}

impl Access {
    /// The key of proofs. Without a secret it is a constant, and proofs authenticate no peer.
    pub(super) fn key(&self) -> Key {
        const CONTEXT: &str = "tilewright 2026-11-23 secret of a job of ranks";
        let secret = match self {
            Access::Secret(secret) => secret.0.as_bytes(),
            Access::Loopback | Access::Unauthenticated => b"",
        };
        Key(blake3::derive_key(CONTEXT, secret))
    }
}

/// Key derived from a secret.
#[derive(Clone)]
pub(super) struct Key([u8; 32]);

impl Key {
    /// The proof of `role` for a handshake transcript. All entries but the last have a fixed length for each role.
    pub fn proof(&self, role: &str, transcript: &[&[u8]]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&[role.len() as u8]).update(role.as_bytes());
        for part in transcript {
            hasher.update(part);
        }
        hasher.finalize()
    }

    /// Whether `shown` is the proof of `role` for this transcript. Runs in constant time.
    pub fn is_proof(&self, shown: [u8; 32], role: &str, transcript: &[&[u8]]) -> bool {
        // `blake3::Hash` compares in constant time.
        self.proof(role, transcript) == blake3::Hash::from_bytes(shown)
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
        assert!(Secret::from_file(folder.path()).unwrap_err().contains("not a regular file"));
        let fifo = folder.path().join("fifo");
        let name = std::ffi::CString::new(fifo.to_str().unwrap()).unwrap();
        // SAFETY: the name ends with a NUL byte.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        assert!(Secret::from_file(&fifo).unwrap_err().contains("not a regular file"));
    }
}
