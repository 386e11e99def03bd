//! Accepts authenticated ranks and rejects all other connections. One thread serves all connections concurrently and
//! never blocks on one of them.
//!
//! A whole handshake has to end within [`GREETING`]. At most [`MOST_PENDING`] handshakes are in progress; another
//! connection replaces the oldest. A rank whose handshake was replaced connects again.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::time::Duration;

use super::super::comm::carrier::Deadline;
use super::super::comm::{CommError, Result};
use super::greeting::{HELLO, Next, Own, Server, Visitor, Why, is_pause, welcome};
use super::setup;

/// Timeout of a handshake.
pub const GREETING: Duration = Duration::from_secs(5);
/// Maximum number of handshakes in progress.
const MOST_PENDING: usize = 128;
/// Connections that are accepted before handshakes are served again.
const AT_ONCE: usize = 32;

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
    state: Server,
    message: [u8; HELLO],
    got: usize,
}

/// An authenticated connection.
pub struct Arrival {
    pub socket: TcpStream,
    pub ip: IpAddr,
    pub visitor: Visitor,
}

/// What [`Gate::next`] returns.
pub enum Event {
    Arrived(Arrival),
    /// A connection that was accepted before is closed.
    Ended(usize),
    /// The deadline has passed.
    Over,
}

/// Rejected connections, for the message of a timeout.
#[derive(Default)]
struct TurnedAway {
    count: usize,
    last: Option<(IpAddr, Why)>,
}

pub struct Gate<'a> {
    listeners: &'a [TcpListener],
    own: &'a Own,
    pending: VecDeque<Pending>,
    turned_away: TurnedAway,
}

impl<'a> Gate<'a> {
    /// Makes the listeners non-blocking.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(listeners: &'a [TcpListener], own: &'a Own) -> Result<Gate<'a>> {
        for listener in listeners {
            let set = listener.set_nonblocking(true);
            set.map_err(|error| CommError::Setup(format!("cannot listen for ranks: {error}")))?;
        }
        Ok(Gate { listeners, own, pending: VecDeque::new(), turned_away: TurnedAway::default() })
    }

    /// Waits for the next authenticated rank, and watches the accepted connections in the first argument for their end.
    ///
    /// # Errors
    /// The system cannot accept connections.
    pub fn next(&mut self, here: &[&TcpStream], deadline: Deadline) -> Result<Event> {
        loop {
            if deadline.is_over() {
                return Ok(Event::Over);
            }
            let ready = self.poll(here, deadline)?;
            if let Some(ended) = ready.here.iter().position(|ended| *ended) {
                return Ok(Event::Ended(ended));
            }
            for at in (0..self.pending.len()).rev() {
                if ready.pending[at]
                    && let Some(arrival) = self.serve(at)?
                {
                    return Ok(Event::Arrived(arrival));
                }
            }
            while self.pending.front().is_some_and(|oldest| oldest.until.is_over()) {
                self.turn_away(0, Why::Silent);
            }
            for (listener, ready) in self.listeners.iter().zip(ready.listeners) {
                if ready {
                    self.accept(listener)?;
                }
            }
        }
    }

    /// One line about rejected connections for a message; empty if there are none.
    pub fn turned_away(&self) -> String {
        let TurnedAway { count, last: Some((ip, why)) } = &self.turned_away else { return String::new() };
        let connections =
            if *count == 1 { "1 connection was".to_string() } else { format!("{count} connections were") };
        format!("\n  {connections} rejected; the last one, from {ip}: {}", why.of_visitor())
    }

    fn poll(&self, here: &[&TcpStream], deadline: Deadline) -> Result<Ready> {
        let descriptors = self.listeners.iter().map(AsRawFd::as_raw_fd);
        let descriptors = descriptors.chain(self.pending.iter().map(|pending| pending.socket.as_raw_fd()));
        let wait = |events| move |fd| libc::pollfd { fd, events, revents: 0 };
        let here_too = here.iter().map(|socket| socket.as_raw_fd()).map(wait(CLOSED));
        let mut waits: Vec<libc::pollfd> = descriptors.map(wait(libc::POLLIN)).chain(here_too).collect();
        let first = self.pending.front().map_or(Duration::from_secs(1), |oldest| oldest.until.left());
        let patience = first.min(deadline.left()).as_millis().clamp(1, 1000) as libc::c_int;
        // SAFETY: the array lives through the call, and its length is given.
        let outcome = unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, patience) };
        let error = std::io::Error::last_os_error();
        if outcome < 0 && error.kind() != ErrorKind::Interrupted {
            return setup(format!("cannot wait for ranks: {error}"));
        }
        let mut ready = waits.iter().map(|wait| outcome > 0 && wait.revents != 0);
        let mut take = |n: usize| ready.by_ref().take(n).collect();
        Ok(Ready { listeners: take(self.listeners.len()), pending: take(self.pending.len()), here: take(here.len()) })
    }

    fn accept(&mut self, listener: &TcpListener) -> Result<()> {
        for _ in 0..AT_ONCE {
            let (socket, address) = match listener.accept() {
                Ok(connection) => connection,
                Err(error) if is_pause(&error) => return Ok(()),
                // Closed before it was accepted.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => continue,
                // Descriptors may have run out: close the oldest connection.
                Err(_) if !self.pending.is_empty() => {
                    self.turn_away(0, Why::Silent);
                    return Ok(());
                }
                Err(error) => return setup(format!("cannot accept a rank's connection: {error}")),
            };
            if socket.set_nonblocking(true).is_err() {
                continue;
            }
            if self.pending.len() == MOST_PENDING {
                self.turn_away(0, Why::Silent);
            }
            let until = Deadline::after(GREETING);
            let (state, message) = (Server::Hello, [0; HELLO]);
            self.pending.push_back(Pending { socket, ip: address.ip(), until, state, message, got: 0 });
        }
        Ok(())
    }

    /// Closes a connection.
    fn turn_away(&mut self, at: usize, why: Why) {
        let Some(pending) = self.pending.remove(at) else { return };
        self.turned_away.count += 1;
        self.turned_away.last = Some((pending.ip, why));
    }

    /// Reads the available bytes of a handshake and continues it.
    fn serve(&mut self, at: usize) -> Result<Option<Arrival>> {
        let pending = &mut self.pending[at];
        while pending.got < pending.state.due() {
            match pending.socket.read(&mut pending.message[pending.got..pending.state.due()]) {
                Ok(n) if n > 0 => pending.got += n,
                Err(error) if is_pause(&error) => return Ok(None),
                _ => {
                    // A peer that leaves after it received our proof has another secret.
                    let why = if matches!(pending.state, Server::Answer { .. }) { Why::NoProof } else { Why::Silent };
                    self.turn_away(at, why);
                    return Ok(None);
                }
            }
        }
        let next = pending.state.take(self.own, &pending.message[..pending.got]);
        let next =
            next.map_err(|error| CommError::Setup(format!("no random numbers for the handshake with ranks: {error}")))?;
        // The send buffer of a new connection has space for these few bytes.
        let told = |mut socket: &TcpStream, bytes: &[u8]| socket.write(bytes).is_ok_and(|n| n == bytes.len());
        match next {
            Next::Send(bytes, state) if told(&pending.socket, &bytes) => {
                (pending.state, pending.got) = (state, 0);
                Ok(None)
            }
            Next::Send(..) => {
                self.turn_away(at, Why::Silent);
                Ok(None)
            }
            Next::Refuse(bytes, why) => {
                let _ = told(&pending.socket, &bytes);
                self.turn_away(at, why);
                Ok(None)
            }
            Next::Arrived(visitor) => {
                let Some(Pending { socket, ip, .. }) = self.pending.remove(at) else { return Ok(None) };
                // A peer that does not get the message connects again.
                let stays = told(&socket, welcome());
                Ok(stays.then_some(Arrival { socket, ip, visitor }))
            }
        }
    }
}

/// Readable sockets, and accepted connections that are closed.
struct Ready {
    listeners: Vec<bool>,
    pending: Vec<bool>,
    here: Vec<bool>,
}
