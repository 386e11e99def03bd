//! Accepts authenticated ranks and rejects all other connections. One thread serves all connections concurrently and
//! never blocks on one of them.
//!
//! A whole handshake has to end within [`HANDSHAKE_TIMEOUT`]. At most [`MAX_PENDING`] handshakes are in progress;
//! another connection replaces the oldest. A rank whose handshake was replaced connects again.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use super::super::comm::backend::Deadline;
use super::super::comm::{CommError, Result};
use super::handshake::{
    HELLO, HandshakeError, LocalIdentity, PeerInfo, ServerAction, ServerState, is_retryable, welcome,
};
use super::setup;

/// Timeout of a handshake.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of handshakes in progress.
const MAX_PENDING: usize = 128;
/// Connections that are accepted before handshakes are served again.
const ACCEPT_BATCH: usize = 32;

/// Poll event of a socket whose other end is closed, even with unread data. Systems other than Linux report reset
/// connections without being asked.
#[cfg(target_os = "linux")]
const CLOSED: libc::c_short = libc::POLLRDHUP;
#[cfg(not(target_os = "linux"))]
const CLOSED: libc::c_short = 0;

/// A connection whose peer is not authenticated yet.
struct Pending {
    socket: TcpStream,
    ip: IpAddr,
    until: Deadline,
    state: ServerState,
    message: [u8; HELLO],
    received: usize,
}

/// An authenticated connection.
pub struct AcceptedPeer {
    pub socket: TcpStream,
    pub ip: IpAddr,
    pub peer_info: PeerInfo,
}

/// What [`Acceptor::next`] returns.
pub enum Event {
    Accepted(AcceptedPeer),
    /// An accepted connection was closed: its index in `connected`.
    Closed(usize),
    /// The deadline has passed.
    TimedOut,
}

/// Rejected connections, for the message of a timeout.
#[derive(Default)]
struct Rejections {
    count: usize,
    last: Option<(IpAddr, HandshakeError)>,
}

pub struct Acceptor<'a> {
    listeners: &'a [TcpListener],
    identity: &'a LocalIdentity,
    pending: VecDeque<Pending>,
    rejections: Rejections,
}

impl<'a> Acceptor<'a> {
    /// Makes the listeners non-blocking.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(listeners: &'a [TcpListener], identity: &'a LocalIdentity) -> Result<Acceptor<'a>> {
        for listener in listeners {
            let set = listener.set_nonblocking(true);
            set.map_err(|error| CommError::Setup(format!("cannot listen for ranks: {error}")))?;
        }
        Ok(Acceptor { listeners, identity, pending: VecDeque::new(), rejections: Rejections::default() })
    }

    /// Waits for the next authenticated rank, and watches the accepted connections in `connected` for their end.
    ///
    /// # Errors
    /// The system cannot accept connections.
    pub fn next(&mut self, connected: &[&TcpStream], deadline: Deadline) -> Result<Event> {
        loop {
            if deadline.is_over() {
                return Ok(Event::TimedOut);
            }
            let ready = self.poll(connected, deadline)?;
            if let Some(ended) = ready.connected.iter().position(|ended| *ended) {
                return Ok(Event::Closed(ended));
            }
            for at in (0..self.pending.len()).rev() {
                if ready.pending[at]
                    && let Some(peer) = self.serve(at)?
                {
                    return Ok(Event::Accepted(peer));
                }
            }
            while self.pending.front().is_some_and(|oldest| oldest.until.is_over()) {
                self.reject(0, HandshakeError::NoReply);
            }
            for (listener, ready) in self.listeners.iter().zip(ready.listeners) {
                if ready {
                    self.accept(listener)?;
                }
            }
        }
    }

    /// One line about rejected connections for a message; empty if there are none.
    pub fn rejections(&self) -> String {
        let Rejections { count, last: Some((ip, why)) } = &self.rejections else { return String::new() };
        let connections =
            if *count == 1 { "1 connection was".to_string() } else { format!("{count} connections were") };
        format!("\n  {connections} rejected; the last one, from {ip}: {}", why.peer_message())
    }

    fn poll(&self, connected: &[&TcpStream], deadline: Deadline) -> Result<Ready> {
        let descriptors = self.listeners.iter().map(AsRawFd::as_raw_fd);
        let descriptors = descriptors.chain(self.pending.iter().map(|pending| pending.socket.as_raw_fd()));
        let wait = |events| move |fd| libc::pollfd { fd, events, revents: 0 };
        let connected_too = connected.iter().map(|socket| socket.as_raw_fd()).map(wait(CLOSED));
        let mut waits: Vec<libc::pollfd> = descriptors.map(wait(libc::POLLIN)).chain(connected_too).collect();
        let first = self.pending.front().map_or(Duration::from_secs(1), |oldest| oldest.until.left());
        let timeout = first.min(deadline.left()).as_millis().clamp(1, 1000) as libc::c_int;
        // SAFETY: the array lives through the call, and its length is given.
        let outcome = unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, timeout) };
        let error = std::io::Error::last_os_error();
        if outcome < 0 && error.kind() != ErrorKind::Interrupted {
            return setup(format!("cannot wait for ranks: {error}"));
        }
        let mut ready = waits.iter().map(|wait| outcome > 0 && wait.revents != 0);
        let mut take = |n: usize| ready.by_ref().take(n).collect();
        Ok(Ready {
            listeners: take(self.listeners.len()),
            pending: take(self.pending.len()),
            connected: take(connected.len()),
        })
    }

    fn accept(&mut self, listener: &TcpListener) -> Result<()> {
        for _ in 0..ACCEPT_BATCH {
            let (socket, address) = match listener.accept() {
                Ok(connection) => connection,
                Err(error) if is_retryable(&error) => return Ok(()),
                // Closed before it was accepted.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                // Descriptors may have run out: close the oldest connection.
                Err(_) if !self.pending.is_empty() => {
                    self.reject(0, HandshakeError::NoReply);
                    return Ok(());
                }
                Err(error) => return setup(format!("cannot accept a rank's connection: {error}")),
            };
            if socket.set_nonblocking(true).is_err() {
                continue;
            }
            if self.pending.len() == MAX_PENDING {
                self.reject(0, HandshakeError::NoReply);
            }
            let until = Deadline::after(HANDSHAKE_TIMEOUT);
            let (state, message) = (ServerState::Hello, [0; HELLO]);
            self.pending.push_back(Pending { socket, ip: address.ip(), until, state, message, received: 0 });
        }
        Ok(())
    }

    /// Closes the pending connection `at`, and counts the rejection.
    fn reject(&mut self, at: usize, why: HandshakeError) {
        let Some(pending) = self.pending.remove(at) else { return };
        self.rejections.count += 1;
        self.rejections.last = Some((pending.ip, why));
    }

    /// Reads the available bytes of a handshake and continues it.
    fn serve(&mut self, at: usize) -> Result<Option<AcceptedPeer>> {
        let pending = &mut self.pending[at];
        while pending.received < pending.state.expected_len() {
            match pending.socket.read(&mut pending.message[pending.received..pending.state.expected_len()]) {
                Ok(n) if n > 0 => pending.received += n,
                Err(error) if is_retryable(&error) => return Ok(None),
                _ => {
                    // A peer that leaves after it received our proof has another secret.
                    let why = if matches!(pending.state, ServerState::Answer { .. }) {
                        HandshakeError::NoProof
                    } else {
                        HandshakeError::NoReply
                    };
                    self.reject(at, why);
                    return Ok(None);
                }
            }
        }
        let next = pending.state.on_message(self.identity, &pending.message[..pending.received]);
        let next =
            next.map_err(|error| CommError::Setup(format!("no random numbers for the handshake with ranks: {error}")))?;
        // The send buffer of a new connection has space for these few bytes.
        let send_all = |mut socket: &TcpStream, bytes: &[u8]| socket.write(bytes).is_ok_and(|n| n == bytes.len());
        match next {
            ServerAction::Send(bytes, state) if send_all(&pending.socket, &bytes) => {
                (pending.state, pending.received) = (state, 0);
                Ok(None)
            }
            ServerAction::Send(..) => {
                self.reject(at, HandshakeError::NoReply);
                Ok(None)
            }
            ServerAction::Refuse(bytes, why) => {
                let _ = send_all(&pending.socket, &bytes);
                self.reject(at, why);
                Ok(None)
            }
            ServerAction::Accepted(peer_info) => {
                let Some(Pending { socket, ip, .. }) = self.pending.remove(at) else { return Ok(None) };
                // A peer that does not get the message connects again.
                let stays = send_all(&socket, welcome());
                Ok(stays.then_some(AcceptedPeer { socket, ip, peer_info }))
            }
        }
    }
}

/// Readable sockets, and accepted connections that are closed.
struct Ready {
    listeners: Vec<bool>,
    pending: Vec<bool>,
    connected: Vec<bool>,
}
