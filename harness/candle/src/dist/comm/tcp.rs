//! Links over TCP sockets, one between every two ranks.
//!
//! A message is a header of 12 bytes (kind and length), the payload, and a byte that marks the payload as complete.
//! Sockets are non-blocking: one thread sends to one rank while it receives from another, and `poll` wakes it when
//! either can continue.
//!
//! After a timeout, ranks run a roll call ([`roll_call`]): each waiting rank reports which ranks it waits for, so that
//! all of them name the unresponsive one.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use super::backend::Deadline;
use super::call::HEADER_BYTES;
use super::links::{LinkError, Links, OverLinks};
use super::roll_call::{self, LinkState, TRUNCATED, flush_and_send, read_head, write_head};
use super::{Communicator, Options, Result};
use tilewright::escape::printable_lines;

/// Kinds of messages.
pub(super) const CALL: u32 = 0x7743_0001;
pub(super) const DATA: u32 = 0x7743_0002;
/// Kind of an abort notice. Like [`WAITING_FOR`], it has no trailer.
pub(super) const ABORT: u32 = 0x7743_0003;
pub(super) const WAITING_FOR: u32 = 0x7743_0004;
pub(super) const HEAD: usize = 12;
/// Bytes after the payload: [`COMPLETE`], or 0 if the sender failed and the payload is invalid.
pub(super) const TRAILER: usize = 1;
const COMPLETE: u8 = 1;
/// Interval at which a rank that waits for one peer checks the others for notices.
const NOTICE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum length of a received abort reason in bytes.
const MAX_REASON_BYTES: usize = 4096;
/// Timeout for sending an abort notice.
const ABORT_NOTICE_TIMEOUT: Duration = Duration::from_millis(500);

/// Creates a communicator over connected sockets. `peers[r]` is the socket to rank r; `None` for this rank.
pub(crate) fn over_sockets(rank: usize, peers: Vec<Option<TcpStream>>, options: Options) -> Result<Communicator> {
    let world = peers.len();
    Communicator::with_backend(rank, world, "tcp", options, None, move || {
        Ok(OverLinks::new(Sockets::new(rank, peers)?))
    })
}

pub(crate) struct Sockets {
    rank: usize,
    peers: Vec<Option<TcpStream>>,
    aborted: bool,
    /// State of the connection to each rank after a failure.
    link_state: Vec<LinkState>,
    /// How long a rank polls for the others' calls before it sleeps.
    spin: Duration,
}

impl Sockets {
    pub fn new(rank: usize, peers: Vec<Option<TcpStream>>) -> Result<Sockets> {
        for socket in peers.iter().flatten() {
            let set = socket.set_nodelay(true).and_then(|()| socket.set_nonblocking(true));
            set.map_err(|error| super::CommError::Setup(format!("cannot set up a socket: {error}")))?;
        }
        let link_state = peers.iter().map(|_| LinkState::default()).collect();
        Ok(Sockets { rank, peers, aborted: false, link_state, spin: Duration::ZERO })
    }

    /// Busy-polls for calls this long before it sleeps: for ranks with spare cores whose GPUs would wait.
    #[cfg(any(feature = "nccl", test))]
    pub fn with_spin(self, spin: Duration) -> Sockets {
        Sockets { spin, ..self }
    }

    /// A rank whose socket is closed or that aborted, if there is one. Does not block and does not consume its data.
    #[cfg(any(feature = "nccl", test))]
    pub fn closed_peer(&self) -> Option<LinkError> {
        for (peer, socket) in self.peers.iter().enumerate() {
            let Some(socket) = socket else { continue };
            let mut head = [0_u8; HEAD];
            match socket.peek(&mut head) {
                Ok(HEAD) if head[..4] == ABORT.to_le_bytes() => {
                    let mut nothing = [0_u8; 0];
                    return self.pump_in(&mut Incoming::new(peer, CALL, &mut nothing)).err();
                }
                Ok(0) => return Some(LinkError::Gone(peer, "its connection is closed".into())),
                // The connection may be closed after unread data.
                Ok(_) if self.is_closed(peer) => {
                    return Some(LinkError::Gone(peer, "its connection is closed".into()));
                }
                Ok(_) => {}
                Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {}
                Err(error) => return Some(LinkError::Gone(peer, connection_error(&error))),
            }
        }
        None
    }

    /// Shuts down sending to all ranks, and waits until all of them have done so, up to a timeout.
    #[cfg(any(feature = "nccl", test))]
    pub fn shutdown(&self, timeout: Duration) {
        let deadline = Deadline::after(timeout);
        for socket in self.peers.iter().flatten() {
            // A closed peer need not be notified.
            let _ = socket.shutdown(std::net::Shutdown::Write);
        }
        let others = (0..self.world()).filter(|&peer| peer != self.rank);
        for peer in others {
            while !self.is_closed(peer) && !deadline.is_over() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Whether the peer has shut down sending, as far as the system reports it.
    #[cfg(any(feature = "nccl", test))]
    fn is_closed(&self, peer: usize) -> bool {
        #[cfg(target_os = "linux")]
        const ENDS: libc::c_short = libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR;
        #[cfg(not(target_os = "linux"))]
        const ENDS: libc::c_short = libc::POLLHUP | libc::POLLERR;
        let Ok(socket) = self.socket(peer) else { return true };
        let mut wait = libc::pollfd { fd: socket.as_raw_fd(), events: ENDS, revents: 0 };
        // SAFETY: one descriptor, which lives through the call.
        unsafe { libc::poll(&raw mut wait, 1, 0) == 1 && wait.revents & ENDS != 0 }
    }

    fn socket(&self, peer: usize) -> Result<&TcpStream, LinkError> {
        let missing = || LinkError::Other(format!("internal error: no socket to rank {peer}; please report this"));
        self.peers.get(peer).and_then(Option::as_ref).ok_or_else(missing)
    }

    /// Waits until a socket is readable or writable, at most 1 s.
    fn poll(&self, read: &[usize], write: Option<usize>, deadline: Deadline) -> Result<(), LinkError> {
        let mut waits: Vec<libc::pollfd> = Vec::with_capacity(read.len() + 1);
        for (&peer, events) in
            read.iter().map(|peer| (peer, libc::POLLIN)).chain(write.iter().map(|peer| (peer, libc::POLLOUT)))
        {
            waits.push(libc::pollfd { fd: self.socket(peer)?.as_raw_fd(), events, revents: 0 });
        }
        let timeout = deadline.left().as_millis().clamp(1, 1000) as libc::c_int;
        // SAFETY: the array lives through the call, and its length is given.
        let outcome = unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, timeout) };
        match outcome {
            -1 if std::io::Error::last_os_error().kind() != ErrorKind::Interrupted => {
                Err(LinkError::Other(format!("poll: {}", std::io::Error::last_os_error())))
            }
            _ => Ok(()),
        }
    }

    fn pump_out(&self, out: &mut Outgoing) -> Result<(), LinkError> {
        let mut socket = self.socket(out.to)?;
        while !out.is_done() {
            let parts = out.rest().map(std::io::IoSlice::new);
            match socket.write_vectored(&parts) {
                Ok(n) => out.transferred += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.disconnect_reason(out.to, &error)),
            }
        }
        Ok(())
    }

    /// Returns the abort notice that a peer sent before it closed its socket, or the connection's error if there is
    /// none.
    fn disconnect_reason(&self, peer: usize, error: &std::io::Error) -> LinkError {
        let mut text = [0u8; 1];
        let mut incoming = Incoming::new(peer, CALL, &mut text);
        match self.pump_in(&mut incoming) {
            Err(notice @ LinkError::Aborted(..)) => notice,
            _ => LinkError::Gone(peer, connection_error(error)),
        }
    }

    fn pump_in(&self, into: &mut Incoming) -> Result<(), LinkError> {
        let socket = self.socket(into.from)?;
        while !into.is_done() {
            let buffer = into.rest();
            match (&*socket).read(buffer) {
                Ok(0) => return Err(LinkError::Gone(into.from, "its connection is closed".into())),
                Ok(n) => into.transferred += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(LinkError::Gone(into.from, connection_error(&error))),
            }
            if into.transferred == HEAD {
                self.check_head(into)?;
            }
            if into.is_done() && into.trailer[0] != COMPLETE {
                // The sender failed in the middle of this message; its next message has the reason.
                into.transferred = 0;
            }
        }
        Ok(())
    }

    /// Checks the header of a message.
    fn check_head(&self, into: &Incoming) -> Result<(), LinkError> {
        let (kind, length) = read_head(&into.head);
        if kind == ABORT {
            return Err(LinkError::Aborted(into.from, self.read_abort_reason(into.from, length)));
        }
        if kind == WAITING_FOR {
            return Err(LinkError::PeerTimedOut(vec![into.from]));
        }
        match kind == into.kind && length == into.body.len() {
            true => Ok(()),
            false => Err(LinkError::Other(format!(
                "rank {} sent message {kind:#x} of {length} bytes, expected {:#x} of {} bytes; it runs another version of Tilewright",
                into.from,
                into.kind,
                into.body.len()
            ))),
        }
    }

    /// Reads the reason of an abort notice.
    fn read_abort_reason(&self, from: usize, length: usize) -> String {
        let mut text = vec![0; length.min(MAX_REASON_BYTES)];
        let (mut length_read, deadline) = (0, Deadline::after(ABORT_NOTICE_TIMEOUT));
        while length_read < text.len() && !deadline.is_over() {
            let Ok(mut socket) = self.socket(from) else { break };
            match socket.read(&mut text[length_read..]) {
                Ok(0) => break,
                Ok(n) => length_read += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => drop(self.poll(&[from], None, deadline)),
                Err(_) => break,
            }
        }
        printable_lines(&text[..length_read])
    }
}

impl Sockets {
    /// Receives all messages of `rest`, and removes those that are complete.
    fn receive_all(&self, rest: &mut Vec<Incoming>, deadline: Deadline) -> Result<(), LinkError> {
        let began = Instant::now();
        loop {
            let mut first_error = None;
            for into in rest.iter_mut() {
                if let Err(error) = self.pump_in(into) {
                    // An abort notice takes precedence: it names the cause of closed connections and timeouts.
                    match (&first_error, &error) {
                        (None, _)
                        | (Some(LinkError::Gone(..) | LinkError::PeerTimedOut(_)), LinkError::Aborted(..)) => {
                            first_error = Some(error);
                        }
                        _ => {}
                    }
                }
            }
            rest.retain(|into| !into.is_done());
            let missing: Vec<usize> = rest.iter().map(|into| into.from).collect();
            match first_error {
                // Another rank timed out: the ranks that are missing here may know which rank it waits for.
                Some(LinkError::PeerTimedOut(_)) => return Err(LinkError::PeerTimedOut(missing)),
                Some(error) => return Err(error),
                None if missing.is_empty() => return Ok(()),
                None if deadline.is_over() => return Err(LinkError::TimedOut(missing)),
                None if began.elapsed() < self.spin => std::hint::spin_loop(),
                None => self.poll(&missing, None, deadline)?,
            }
        }
    }

    /// Sends and receives, and periodically checks for abort notices.
    fn transfer(
        &self,
        out: &mut Option<Outgoing>,
        into: &mut Option<Incoming>,
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let mut looked = Instant::now();
        loop {
            let sent = out.as_mut().map_or(Ok(()), |out| self.pump_out(out));
            let received = sent.and_then(|()| into.as_mut().map_or(Ok(()), |into| self.pump_in(into)));
            let to = out.as_ref().filter(|out| !out.is_done()).map(|out| out.to);
            let from = into.as_ref().filter(|into| !into.is_done()).map(|into| into.from);
            let mut late: Vec<usize> = to.into_iter().chain(from).collect();
            late.dedup();
            match received {
                Err(LinkError::PeerTimedOut(_)) => return Err(LinkError::PeerTimedOut(late)),
                other => other?,
            }
            if late.is_empty() {
                return Ok(());
            }
            if deadline.is_over() {
                return Err(LinkError::TimedOut(late));
            }
            if looked.elapsed() >= NOTICE_INTERVAL {
                looked = Instant::now();
                match self.pending_notice(from) {
                    Some(LinkError::PeerTimedOut(_)) => return Err(LinkError::PeerTimedOut(late)),
                    Some(error) => return Err(error),
                    None => {}
                }
            }
            self.poll(from.as_slice(), to, deadline)?;
        }
    }

    /// The notice (abort or timeout) that is next on a socket, if there is one. `except` is in the middle of a message.
    fn pending_notice(&self, except: Option<usize>) -> Option<LinkError> {
        (0..self.peers.len()).filter(|peer| Some(*peer) != except).find_map(|peer| {
            let mut head = [0; HEAD];
            let got = self.peers[peer].as_ref()?.peek(&mut head).ok()?;
            let (kind, _) = read_head(&head);
            match (got == HEAD, kind) {
                (true, ABORT) => self.pump_in(&mut Incoming::new(peer, CALL, &mut [])).err(),
                (true, WAITING_FOR) => Some(LinkError::PeerTimedOut(vec![peer])),
                _ => None,
            }
        })
    }

    /// Stores how much of an outgoing message was sent before a failure.
    fn note_sent(&mut self, out: &Outgoing) {
        if out.transferred > 0
            && let Some(link_state) = self.link_state.get_mut(out.to)
        {
            link_state.unsent = out.left();
        }
    }

    /// Stores how much of an incoming message was received before a failure.
    fn note_received(&mut self, into: &Incoming) {
        let Some(link_state) = self.link_state.get_mut(into.from).filter(|_| !into.is_done()) else { return };
        let (kind, length) = read_head(&into.head);
        link_state.head = into.head;
        link_state.head_received = into.transferred.min(HEAD);
        let trailer = if [WAITING_FOR, ABORT].contains(&kind) { 0 } else { TRAILER };
        link_state.unread = length.saturating_add(trailer).saturating_sub(into.transferred.saturating_sub(HEAD));
    }
}

impl Links for Sockets {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn exchange_headers(
        &mut self,
        mine: &[u8; HEADER_BYTES],
        deadline: Deadline,
    ) -> Result<Vec<[u8; HEADER_BYTES]>, LinkError> {
        let mut headers = vec![*mine; self.world()];
        let others = |rank: usize, world: usize| (0..world).filter(move |&peer| peer != rank);
        // If sending fails, an abort notice may still be readable on that socket: `pump_out` then returns the notice.
        for to in others(self.rank, self.world()) {
            let mut out = Outgoing::new(to, CALL, mine);
            let sent = loop {
                match self.pump_out(&mut out) {
                    Ok(()) if out.is_done() => break Ok(()),
                    Ok(()) if deadline.is_over() => break Err(LinkError::TimedOut(vec![to])),
                    Ok(()) => self.poll(&[], Some(to), deadline)?,
                    Err(error) => break Err(error),
                }
            };
            if sent.is_err() {
                self.note_sent(&out);
                return sent.map(|()| headers);
            }
        }
        let mut rest: Vec<Incoming> = headers
            .iter_mut()
            .enumerate()
            .filter(|(from, _)| *from != self.rank)
            .map(|(from, h)| Incoming::new(from, CALL, h))
            .collect();
        match self.receive_all(&mut rest, deadline) {
            Ok(()) => drop(rest),
            Err(error) => {
                rest.iter().for_each(|into| self.note_received(into));
                return Err(error);
            }
        }
        Ok(headers)
    }

    fn exchange(
        &mut self,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let mut out = send.map(|(to, bytes)| Outgoing::new(to, DATA, bytes));
        let mut into = receive.map(|(from, bytes)| Incoming::new(from, DATA, bytes));
        let outcome = self.transfer(&mut out, &mut into, deadline);
        if outcome.is_err() {
            out.iter().for_each(|out| self.note_sent(out));
            into.iter().for_each(|into| self.note_received(into));
        }
        outcome
    }

    fn roll_call(&mut self, late: Vec<usize>, own_timeout: bool) -> LinkError {
        let behind = roll_call::find_unresponsive(&self.peers, &mut self.link_state, &late);
        // The rank that timed out first sends its notice next.
        let deadline = Deadline::after(if own_timeout { Duration::ZERO } else { NOTICE_INTERVAL });
        while !deadline.is_over() {
            if let Some(notice @ LinkError::Aborted(..)) = self.pending_notice(None) {
                return notice;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        LinkError::TimedOut(behind)
    }

    fn abort(&mut self, reason: &str) {
        if std::mem::replace(&mut self.aborted, true) {
            return;
        }
        let notice = abort_notice(reason);
        for to in (0..self.peers.len()).filter(|&to| to != self.rank) {
            let (deadline, mut sent) = (Deadline::after(ABORT_NOTICE_TIMEOUT), 0);
            // Sent after the rest of the message in flight, which is marked as invalid.
            let mut unsent = std::mem::take(&mut self.link_state[to].unsent);
            while unsent != TRUNCATED && sent < notice.len() && !deadline.is_over() {
                let Ok(socket) = self.socket(to) else { break };
                let going = flush_and_send(socket, &mut unsent, &notice, &mut sent).is_ok();
                if !going || (sent < notice.len() && self.poll(&[], Some(to), deadline).is_err()) {
                    break;
                }
            }
        }
    }
}

/// An abort notice with this reason.
fn abort_notice(reason: &str) -> Vec<u8> {
    let reason = &reason.as_bytes()[..reason.len().min(MAX_REASON_BYTES)];
    [&write_head(ABORT, reason.len()), reason].concat()
}

/// Sends an abort notice over sockets that have no communicator yet.
pub(crate) fn send_abort_notice<'a>(peers: impl Iterator<Item = &'a TcpStream>, reason: &str) {
    let notice = abort_notice(reason);
    for mut socket in peers {
        // The send buffer of a new connection has space for the notice. A rank that does not get it notices the closed
        // connection.
        let _ = socket.set_nonblocking(true).and_then(|()| socket.write(&notice));
    }
}

/// The reason in the abort notice of a peer that closed its connection, if it sent one. Calls that it sent before are
/// skipped.
pub(crate) fn abort_reason(socket: &TcpStream) -> Option<String> {
    let mut received = vec![0; HEAD + 2 * MAX_REASON_BYTES];
    socket.set_nonblocking(true).ok()?;
    let length = socket.peek(&mut received).ok()?;
    let mut rest = &received[..length];
    loop {
        let (kind, length) = read_head(rest.first_chunk()?);
        rest = &rest[HEAD..];
        if kind == ABORT {
            return Some(printable_lines(&rest[..length.min(rest.len())]));
        }
        rest = rest.get(length.checked_add(TRAILER)?..)?;
    }
}

fn connection_error(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "its connection is closed".into(),
        _ => format!("its connection failed: {error}"),
    }
}

/// An outgoing message.
struct Outgoing<'a> {
    to: usize,
    head: [u8; HEAD],
    body: &'a [u8],
    trailer: &'static [u8],
    transferred: usize,
}

impl<'a> Outgoing<'a> {
    fn new(to: usize, kind: u32, body: &'a [u8]) -> Outgoing<'a> {
        Outgoing { to, head: write_head(kind, body.len()), body, trailer: &[COMPLETE; TRAILER], transferred: 0 }
    }

    fn is_done(&self) -> bool {
        self.left() == 0
    }

    /// Bytes not sent yet.
    fn left(&self) -> usize {
        HEAD + self.body.len() + self.trailer.len() - self.transferred
    }

    fn rest(&self) -> [&[u8]; 3] {
        let behind = |from: usize, part: &'a [u8]| &part[self.transferred.saturating_sub(from).min(part.len())..];
        [
            &self.head[self.transferred.min(HEAD)..],
            behind(HEAD, self.body),
            behind(HEAD + self.body.len(), self.trailer),
        ]
    }
}

/// An incoming message of this kind and length, or a notice.
struct Incoming<'a> {
    from: usize,
    kind: u32,
    head: [u8; HEAD],
    body: &'a mut [u8],
    trailer: [u8; TRAILER],
    transferred: usize,
}

impl<'a> Incoming<'a> {
    fn new(from: usize, kind: u32, body: &'a mut [u8]) -> Incoming<'a> {
        Incoming { from, kind, head: [0; HEAD], body, trailer: [0; TRAILER], transferred: 0 }
    }

    fn is_done(&self) -> bool {
        self.transferred == HEAD + self.body.len() + TRAILER
    }

    fn rest(&mut self) -> &mut [u8] {
        let end = HEAD + self.body.len();
        match self.transferred {
            transferred if transferred < HEAD => &mut self.head[transferred..],
            transferred if transferred < end => &mut self.body[transferred - HEAD..],
            transferred => &mut self.trailer[transferred - end..],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Two connected ends, as ranks 0 and 1.
    fn pair() -> (Sockets, Sockets) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let here = listener.accept().unwrap().0;
        let here = Sockets::new(0, vec![None, Some(here)]).unwrap().with_spin(Duration::from_micros(50));
        (here, Sockets::new(1, vec![Some(there), None]).unwrap())
    }

    /// Waits for the first result of `closed_peer`.
    fn wait_for_end(sockets: &Sockets) -> LinkError {
        let deadline = Deadline::after(Duration::from_secs(20));
        loop {
            if let Some(error) = sockets.closed_peer() {
                return error;
            }
            assert!(!deadline.is_over(), "no closed peer was found");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_closed_peer_is_noticed_without_reading_its_data() {
        let (mut here, there) = pair();
        assert!(here.closed_peer().is_none());
        let mut call = Outgoing::new(0, CALL, &[7; HEADER_BYTES]);
        assert!(there.pump_out(&mut call).is_ok() && call.is_done());
        drop(there);
        assert!(matches!(wait_for_end(&here), LinkError::Gone(1, _)));
        // The last call of the closed peer can still be received.
        let deadline = Deadline::after(Duration::from_secs(20));
        let mut header = [0; HEADER_BYTES];
        let mut into = Incoming::new(1, CALL, &mut header);
        while !into.is_done() && !deadline.is_over() {
            assert!(here.pump_in(&mut into).is_ok());
        }
        assert_eq!(header, [7; HEADER_BYTES]);
        assert!(here.exchange_headers(&[0; HEADER_BYTES], deadline).is_err());
    }

    #[test]
    fn shutdown_waits_for_all_ranks() {
        let (mut here, there) = pair();
        std::thread::scope(|scope| {
            let leaving = scope.spawn(move || there.shutdown(Duration::from_secs(60)));
            assert!(matches!(wait_for_end(&here), LinkError::Gone(1, _)));
            assert!(!leaving.is_finished(), "the other rank is still connected");
            let outcome = here.exchange_headers(&[0; HEADER_BYTES], Deadline::after(Duration::from_secs(20)));
            assert!(matches!(outcome, Err(LinkError::Gone(1, _))));
            here.shutdown(Duration::from_secs(60));
        });
    }

    #[test]
    fn headers_are_exchanged() {
        let (mut here, mut there) = pair();
        let deadline = Deadline::after(Duration::from_secs(20));
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                (1..50).all(
                    |call| matches!(there.exchange_headers(&[2 * call; HEADER_BYTES], deadline), Ok(all) if all[0][0] == call),
                )
            });
            for call in 1..50 {
                let all = here.exchange_headers(&[call; HEADER_BYTES], deadline);
                assert!(matches!(all, Ok(all) if all == [[call; HEADER_BYTES], [2 * call; HEADER_BYTES]]));
            }
            assert!(other.join().unwrap());
        });
    }

    #[test]
    fn an_abort_notice_is_seen_outside_of_collectives() {
        let (here, mut there) = pair();
        there.abort("the disk is full");
        assert!(matches!(wait_for_end(&here), LinkError::Aborted(1, reason) if reason == "the disk is full"));
    }

    /// Sockets between every two of `world` ranks.
    fn mesh(world: usize) -> Vec<Sockets> {
        let mut all: Vec<Vec<Option<TcpStream>>> = (0..world).map(|_| (0..world).map(|_| None).collect()).collect();
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        for low in 0..world {
            for high in low + 1..world {
                all[high][low] = Some(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
                all[low][high] = Some(listener.accept().unwrap().0);
            }
        }
        all.into_iter().enumerate().map(|(rank, peers)| Sockets::new(rank, peers).unwrap()).collect()
    }

    /// Runs the roll call if needed, and aborts with the result.
    fn ends(links: &mut Sockets, error: LinkError) -> String {
        let error = match error {
            LinkError::TimedOut(late) => links.roll_call(late, true),
            LinkError::PeerTimedOut(late) => links.roll_call(late, false),
            other => other,
        };
        let text = match error {
            LinkError::TimedOut(ranks) => format!("waits for {ranks:?}"),
            LinkError::Aborted(_, reason) => reason,
            LinkError::Gone(..) | LinkError::PeerTimedOut(_) | LinkError::Other(_) => "something else".into(),
        };
        links.abort(&text);
        text
    }

    /// Rank 3 hangs in the middle of a message to rank 2, rank 2 in the middle of one to rank 1, and so on: each waits
    /// for another one.
    #[test]
    fn roll_call_names_the_hanging_rank_only() {
        let hang = |first: usize| {
            let mut all = mesh(4);
            let hangs = all.pop().unwrap();
            // A truncated message.
            let mut out = Outgoing::new(2, DATA, &[1; 1000]);
            out.body = &out.body[..10];
            hangs.pump_out(&mut out).unwrap_or_default();
            let texts: Vec<String> = std::thread::scope(|scope| {
                let start = |(rank, mut links): (usize, Sockets)| {
                    scope.spawn(move || {
                        // The rank that times out first has the least information.
                        let limit = if rank == first { 200 } else { 20_000 };
                        let deadline = Deadline::after(Duration::from_millis(limit));
                        // More than the kernel's buffers hold, so that it is truncated: rank 1 does not read it.
                        let (bytes, mut buffer) = (vec![1; if rank == 0 { 1 << 26 } else { 100 }], vec![0; 1000]);
                        let to = rank.checked_sub(1).or(Some(1)).filter(|_| rank != 1).map(|to| (to, bytes.as_slice()));
                        if rank == 1 {
                            links.exchange(None, Some((2, &mut buffer[..100])), deadline).unwrap_or_default();
                        }
                        let error = links.exchange(to, Some((rank + 1, &mut buffer)), deadline);
                        ends(&mut links, error.unwrap_err())
                    })
                };
                let threads: Vec<_> = all.into_iter().enumerate().map(start).collect();
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(texts, ["waits for [3]"; 3], "rank {first} first");
        };
        std::thread::scope(|scope| (0..3).for_each(|first| drop(scope.spawn(move || hang(first)))));
    }

    /// The rest of a message whose sender failed is not data.
    #[test]
    fn a_truncated_message_is_discarded() {
        let (mut here, mut there) = pair();
        let mut out = Outgoing::new(0, DATA, &[7; 1 << 12]);
        out.body = &out.body[..100];
        assert!(there.pump_out(&mut out).is_ok());
        there.link_state[0].unsent = (1 << 12) - 100;
        there.abort("the disk is full");
        let mut buffer = [0; 1 << 12];
        let outcome = here.exchange(None, Some((1, &mut buffer)), Deadline::after(Duration::from_secs(20)));
        assert!(matches!(outcome, Err(LinkError::Aborted(1, reason)) if reason == "the disk is full"));
    }
}
