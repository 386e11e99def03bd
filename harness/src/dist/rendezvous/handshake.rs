//! What two ranks say when one connects to the other: each proves that it knows the job's secret before it is told anything.
//!
//! | | who | bytes |
//! |---|---|---|
//! | hello | the one that connects | magic, its rank, the rank it looks for, ranks in all, the job's tag, a nonce |
//! | challenge | the one that listens | magic, a nonce, the proof `server` of hello and nonce |
//! | answer | the one that connects | the port where it listens, the proof `client` of hello, both nonces and port |
//! | welcome | the one that listens | magic |
//!
//! In the rank_info of the challenge a rank of another job is refused. Whoever says anything else is not answered. All messages have a fixed
//! length, so that a greeting takes [`HELLO`] bytes of memory, whoever sends it.
//!
//! What follows on the connection is neither encrypted nor signed: the proofs say who began it.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;

use super::super::comm::backend::Deadline;
use super::super::rank::RankInfo;
use super::super::secret::{Key, random};
use super::Job;

const HELLO_MAGIC: [u8; 8] = *b"twmeet02";
const CHALLENGE_MAGIC: [u8; 8] = *b"twprove2";
const REFUSED_MAGIC: [u8; 8] = *b"twother2";
const WELCOME_MAGIC: [u8; 8] = *b"twcomein";

/// Bytes of each message.
pub const HELLO: usize = 84;
const CHALLENGE: usize = 72;
pub const ANSWER: usize = 34;

/// What of a job and a rank goes into greetings.
#[derive(Clone)]
pub struct LocalIdentity {
    rank: u32,
    world: u32,
    tag: [u8; 32],
    key: Key,
}

impl LocalIdentity {
    /// `purpose` tells apart the meetings of one job.
    pub fn new(rank_info: &RankInfo, job: &Job, purpose: &str) -> LocalIdentity {
        let mut tag = blake3::Hasher::new();
        tag.update(&[purpose.len() as u8]).update(purpose.as_bytes()).update(job.name.as_bytes());
        let tag = *tag.finalize().as_bytes();
        LocalIdentity { rank: rank_info.rank as u32, world: rank_info.world as u32, tag, key: job.access.key() }
    }
}

fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut part = [0; N];
    part.copy_from_slice(&bytes[at..at + N]);
    part
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(part(bytes, at))
}

/// HandshakeError a connection is not one between ranks of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// It does not speak our language, or another version of it.
    UnknownProtocol,
    OtherJob,
    /// It does not know the secret.
    NoProof,
    /// It ended before all was said, or did not say it in time.
    NoReply,
}

impl HandshakeError {
    /// Of whoever listens at an address, for the rank that connected there.
    pub fn listener_message(self) -> &'static str {
        match self {
            HandshakeError::UnknownProtocol => "what answers there is no rank of Tilewright, or of another version",
            HandshakeError::OtherJob => "another job meets at this port; set MASTER_PORT to a free one",
            HandshakeError::NoProof => {
                "what answers there does not know this job's secret; all ranks need the same TILEWRIGHT_SECRET or TILEWRIGHT_SECRET_FILE"
            }
            HandshakeError::NoReply => "what is there accepts connections and does not answer",
        }
    }

    /// Of whoever connected, for the rank that listens.
    pub fn peer_message(self) -> &'static str {
        match self {
            HandshakeError::UnknownProtocol => "it is no rank of Tilewright, or of another version",
            HandshakeError::OtherJob => "it belongs to another job",
            HandshakeError::NoProof => "it does not know the job's secret",
            HandshakeError::NoReply => "it did not say who it is",
        }
    }
}

/// Who has proved to be one of the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    pub rank: usize,
    pub world: usize,
    /// Where it listens; 0 where it does not.
    pub port: u16,
}

/// The part of the one that listens, without waiting: it is given what has come, and says what to send.
pub enum ServerState {
    /// Waits for the hello.
    Hello,
    /// Waits for the answer.
    Answer { hello: [u8; HELLO], nonce: [u8; 32] },
}

/// What comes of a message.
pub enum ServerAction {
    Send(Vec<u8>, ServerState),
    /// The connection ends, after these bytes.
    Refuse(Vec<u8>, HandshakeError),
    /// It has to be told that it is [`welcome`].
    Accepted(PeerInfo),
}

impl ServerState {
    /// Bytes of the message that is due.
    pub fn due(&self) -> usize {
        match self {
            ServerState::Hello => HELLO,
            ServerState::Answer { .. } => ANSWER,
        }
    }

    /// What to do with the message that was due.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn take(&self, identity: &LocalIdentity, message: &[u8]) -> io::Result<ServerAction> {
        Ok(match self {
            ServerState::Hello if message[..8] != HELLO_MAGIC => {
                ServerAction::Refuse(Vec::new(), HandshakeError::UnknownProtocol)
            }
            ServerState::Hello if message[20..52] != identity.tag => {
                ServerAction::Refuse(REFUSED_MAGIC.to_vec(), HandshakeError::OtherJob)
            }
            ServerState::Hello if number(message, 12) != identity.rank => {
                ServerAction::Refuse(Vec::new(), HandshakeError::UnknownProtocol)
            }
            ServerState::Hello => {
                let (hello, nonce) = (part::<HELLO>(message, 0), random::<32>()?);
                let proof = identity.key.proof("server", &[&hello, &nonce]);
                let challenge = [CHALLENGE_MAGIC.as_slice(), &nonce, proof.as_bytes()].concat();
                ServerAction::Send(challenge, ServerState::Answer { hello, nonce })
            }
            ServerState::Answer { hello, nonce } => {
                let (port, shown) = (part::<2>(message, 0), part::<32>(message, 2));
                match identity.key.is_proof(shown, "client", &[hello, nonce, &port]) {
                    false => ServerAction::Refuse(Vec::new(), HandshakeError::NoProof),
                    true => ServerAction::Accepted(PeerInfo {
                        rank: number(hello, 8) as usize,
                        world: number(hello, 16) as usize,
                        port: u16::from_le_bytes(port),
                    }),
                }
            }
        })
    }
}

/// The last message of the one that listens.
pub fn welcome() -> &'static [u8] {
    &WELCOME_MAGIC
}

/// The part of the one that connects, to rank `to`; `port` is where it listens itself. Whoever answers has `proof_deadline` to prove that it is of
/// the job, and then until `deadline`.
///
/// # Errors
/// HandshakeError whoever answers is not the one that was looked for.
pub fn handshake(
    socket: &mut TcpStream,
    identity: &LocalIdentity,
    to: usize,
    port: u16,
    proof_deadline: Deadline,
    deadline: Deadline,
) -> Result<(), HandshakeError> {
    let silent = |_| HandshakeError::NoReply;
    let nonce = random::<32>().map_err(silent)?;
    let (rank, to, world) = (identity.rank.to_le_bytes(), (to as u32).to_le_bytes(), identity.world.to_le_bytes());
    let hello = [HELLO_MAGIC.as_slice(), &rank, &to, &world, &identity.tag, &nonce].concat();
    write_by(socket, &hello, proof_deadline).map_err(silent)?;
    let mut magic = [0; 8];
    read_by(socket, &mut magic, proof_deadline).map_err(silent)?;
    match magic {
        CHALLENGE_MAGIC => {}
        REFUSED_MAGIC => return Err(HandshakeError::OtherJob),
        _ => return Err(HandshakeError::UnknownProtocol),
    }
    let mut challenge = [0; CHALLENGE - 8];
    read_by(socket, &mut challenge, proof_deadline).map_err(silent)?;
    let (nonce, shown) = (part::<32>(&challenge, 0), part::<32>(&challenge, 32));
    if !identity.key.is_proof(shown, "server", &[&hello, &nonce]) {
        return Err(HandshakeError::NoProof);
    }
    let port = port.to_le_bytes();
    let proof = identity.key.proof("client", &[&hello, &nonce, &port]);
    write_by(socket, &[port.as_slice(), proof.as_bytes()].concat(), deadline).map_err(silent)?;
    let mut welcome = [0; 8];
    read_by(socket, &mut welcome, deadline).map_err(silent)?;
    match welcome {
        WELCOME_MAGIC => Ok(()),
        _ => Err(HandshakeError::UnknownProtocol),
    }
}

/// Fills `bytes` from a socket that blocks; the limit is one of all bytes together.
///
/// # Errors
/// The end of the connection, and of time.
pub fn read_by(socket: &mut TcpStream, bytes: &mut [u8], deadline: Deadline) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let left = deadline.left();
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        socket.set_read_timeout(Some(left))?;
        match socket.read(&mut bytes[done..]) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes `bytes` to a socket that blocks, as [`read_by`].
///
/// # Errors
/// As [`read_by`].
pub fn write_by(socket: &mut TcpStream, bytes: &[u8], deadline: Deadline) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        let left = deadline.left();
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        socket.set_write_timeout(Some(left))?;
        match socket.write(&bytes[done..]) {
            Ok(n) => done += n,
            Err(error) if is_pause(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether it is worth going on.
pub fn is_pause(error: &io::Error) -> bool {
    [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted].contains(&error.kind())
}
