//! The handshake between two ranks: each proves that it knows the job's secret before the other sends it anything else.
//!
//! | message | sender | bytes |
//! |---|---|---|
//! | hello | client | magic, its rank, the rank that it wants to reach, world size, the job's tag, a nonce |
//! | challenge | server | magic, a nonce, the proof `server` of hello and nonce |
//! | answer | client | the port on which it listens, the proof `client` of hello, both nonces and port |
//! | welcome | server | magic |
//!
//! A rank of another job gets a refusal instead of the challenge. Any other message gets no reply. All messages have a
//! fixed length, so that a handshake takes [`HELLO`] bytes of memory, whatever the client sends.
//!
//! Data after the handshake is neither encrypted nor signed: the proofs authenticate the start of the connection only.

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

/// The data of this rank and its job in handshakes.
#[derive(Clone)]
pub struct LocalIdentity {
    rank: u32,
    world: u32,
    tag: [u8; 32],
    key: Key,
}

impl LocalIdentity {
    /// `purpose` distinguishes several rendezvous of one job.
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

/// Why a handshake failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// The peer uses another protocol, or another version of this one.
    UnknownProtocol,
    OtherJob,
    /// The peer does not know the secret.
    NoProof,
    /// The peer closed the connection, or did not answer in time.
    NoReply,
}

impl HandshakeError {
    /// Describes the server, for the message of the client.
    pub fn listener_message(self) -> &'static str {
        match self {
            HandshakeError::UnknownProtocol => {
                "the program that answers there is not a Tilewright rank, or is one of another version"
            }
            HandshakeError::OtherJob => "another job uses this port; set MASTER_PORT to a free one",
            HandshakeError::NoProof => {
                "the program that answers there does not know this job's secret; all ranks need the same TILEWRIGHT_SECRET or TILEWRIGHT_SECRET_FILE"
            }
            HandshakeError::NoReply => "a program there accepts connections and does not answer",
        }
    }

    /// Describes the client, for the message of the server.
    pub fn peer_message(self) -> &'static str {
        match self {
            HandshakeError::UnknownProtocol => "it is not a Tilewright rank, or is one of another version",
            HandshakeError::OtherJob => "it belongs to another job",
            HandshakeError::NoProof => "it does not know the job's secret",
            HandshakeError::NoReply => "it did not identify itself",
        }
    }
}

/// An authenticated peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    pub rank: usize,
    pub world: usize,
    /// The port on which it listens; 0 if it does not.
    pub port: u16,
}

/// State machine of the server side: takes received messages and returns what to send. Does no I/O.
pub enum ServerState {
    /// Waits for the hello.
    Hello,
    /// Waits for the answer.
    Answer { hello: [u8; HELLO], nonce: [u8; 32] },
}

/// What to do after a message.
pub enum ServerAction {
    Send(Vec<u8>, ServerState),
    /// Send these bytes and close the connection.
    Refuse(Vec<u8>, HandshakeError),
    /// The peer is authenticated; send it [`welcome`].
    Accepted(PeerInfo),
}

impl ServerState {
    /// Length of the expected message in bytes.
    pub fn expected_len(&self) -> usize {
        match self {
            ServerState::Hello => HELLO,
            ServerState::Answer { .. } => ANSWER,
        }
    }

    /// Handles the expected message.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn on_message(&self, identity: &LocalIdentity, message: &[u8]) -> io::Result<ServerAction> {
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
                let (port, proof) = (part::<2>(message, 0), part::<32>(message, 2));
                match identity.key.is_proof(proof, "client", &[hello, nonce, &port]) {
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

/// The server's last message.
pub fn welcome() -> &'static [u8] {
    &WELCOME_MAGIC
}

/// What the client of a handshake asks for.
pub struct ConnectRequest {
    /// The rank to connect to.
    pub to: usize,
    /// The port on which this rank listens; 0 if it does not.
    pub port: u16,
    /// The server has to send its proof before this.
    pub proof_deadline: Deadline,
    /// The server has to finish the handshake before this.
    pub deadline: Deadline,
}

/// Runs the client side of the handshake.
///
/// # Errors
/// The reason if the server is not the expected rank.
pub fn handshake(
    socket: &mut TcpStream,
    identity: &LocalIdentity,
    request: ConnectRequest,
) -> Result<(), HandshakeError> {
    let ConnectRequest { to, port, proof_deadline, deadline } = request;
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
    let (nonce, proof) = (part::<32>(&challenge, 0), part::<32>(&challenge, 32));
    if !identity.key.is_proof(proof, "server", &[&hello, &nonce]) {
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

/// Fills `bytes` from a blocking socket; the deadline applies to all bytes together.
///
/// # Errors
/// A closed connection, a timeout.
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
            Err(error) if is_retryable(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes `bytes` to a blocking socket, see [`read_by`].
///
/// # Errors
/// See [`read_by`].
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
            Err(error) if is_retryable(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Whether the operation can be retried.
pub fn is_retryable(error: &io::Error) -> bool {
    [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted].contains(&error.kind())
}
