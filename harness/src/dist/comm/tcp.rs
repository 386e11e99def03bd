//! Links that are sockets, one between every two ranks.
//!
//! A message is 12 bytes of header (what it is, how long) and its payload. Sockets do not block: one thread sends to one rank while
//! it receives from another, and `poll` wakes it when either can go on.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use super::call::HEADER_BYTES;
use super::carrier::Deadline;
use super::links::{LinkError, Links, OverLinks};
use super::{Communicator, Options, Result};
use crate::dist::printable::printable;

/// What a message is.
const CALL: u32 = 0x7743_0001;
const DATA: u32 = 0x7743_0002;
const GAVE_UP: u32 = 0x7743_0003;
const HEAD: usize = 12;
/// The longest reason for giving up that is read.
const LONGEST_REASON: usize = 4096;
/// How long telling the others that this rank gives up may take.
const FAREWELL: Duration = Duration::from_millis(500);

/// A communicator over sockets that are connected already. `peers[r]` leads to rank r; there is none for this rank.
pub(crate) fn over_sockets(rank: usize, peers: Vec<Option<TcpStream>>, options: Options) -> Result<Communicator> {
    let world = peers.len();
    Communicator::with_carrier(rank, world, "tcp", options, None, move || {
        Ok(OverLinks::new(Sockets::new(rank, peers)?))
    })
}

pub(crate) struct Sockets {
    rank: usize,
    peers: Vec<Option<TcpStream>>,
    gave_up: bool,
    /// How long ranks look for each other's calls before they sleep.
    eager: Duration,
}

impl Sockets {
    pub fn new(rank: usize, peers: Vec<Option<TcpStream>>) -> Result<Sockets> {
        for socket in peers.iter().flatten() {
            let set = socket.set_nodelay(true).and_then(|()| socket.set_nonblocking(true));
            set.map_err(|error| super::CommError::Setup(format!("cannot set up a socket: {error}")))?;
        }
        Ok(Sockets { rank, peers, gave_up: false, eager: Duration::ZERO })
    }

    /// Looks for calls so long before it sleeps: for ranks that have cores to spare, and whose GPUs wait.
    #[cfg(any(feature = "nccl", test))]
    pub fn looking_for(self, eager: Duration) -> Sockets {
        Sockets { eager, ..self }
    }

    /// A rank whose end of its socket is closed, or that gave up, if there is one; does not wait. What it sent before is not read.
    #[cfg(any(feature = "nccl", test))]
    pub fn ended(&self) -> Option<LinkError> {
        for (peer, socket) in self.peers.iter().enumerate() {
            let Some(socket) = socket else { continue };
            let mut head = [0_u8; HEAD];
            match socket.peek(&mut head) {
                Ok(HEAD) if head[..4] == GAVE_UP.to_le_bytes() => {
                    let mut nothing = [0_u8; 0];
                    return self.pump_in(&mut Incoming::new(peer, CALL, &mut nothing)).err();
                }
                Ok(0) => return Some(LinkError::Gone(peer, "its connection is closed".into())),
                // Behind what it sent, the end may be there already.
                Ok(_) if self.is_closed(peer) => {
                    return Some(LinkError::Gone(peer, "its connection is closed".into()));
                }
                Ok(_) => {}
                Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {}
                Err(error) => return Some(LinkError::Gone(peer, closed(&error))),
            }
        }
        None
    }

    /// Says to all that this rank sends nothing any more, and waits until nobody else does, a while at most.
    #[cfg(any(feature = "nccl", test))]
    pub fn leave(&self, patience: Duration) {
        let deadline = Deadline::after(patience);
        for socket in self.peers.iter().flatten() {
            // Whoever is gone need not be told.
            let _ = socket.shutdown(std::net::Shutdown::Write);
        }
        let others = (0..self.world()).filter(|&peer| peer != self.rank);
        for peer in others {
            while !self.is_closed(peer) && !deadline.is_over() {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Whether the other end sends nothing any more, as far as the system tells.
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
        let missing = || LinkError::Other(format!("internal compiler error: no socket to rank {peer}, please report"));
        self.peers.get(peer).and_then(Option::as_ref).ok_or_else(missing)
    }

    /// Waits until one of the sockets can be read or written, a while at most.
    fn poll(&self, read: &[usize], write: Option<usize>, deadline: Deadline) -> Result<(), LinkError> {
        let mut waits: Vec<libc::pollfd> = Vec::with_capacity(read.len() + 1);
        for (&peer, events) in
            read.iter().map(|peer| (peer, libc::POLLIN)).chain(write.iter().map(|peer| (peer, libc::POLLOUT)))
        {
            waits.push(libc::pollfd { fd: self.socket(peer)?.as_raw_fd(), events, revents: 0 });
        }
        let patience = deadline.left().as_millis().clamp(1, 1000) as libc::c_int;
        // SAFETY: the array lives through the call, and its length is given.
        let outcome = unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, patience) };
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
            let (head, body) = out.rest();
            let parts = [std::io::IoSlice::new(head), std::io::IoSlice::new(body)];
            match socket.write_vectored(&parts) {
                Ok(n) => out.done += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.lost(out.to, &error)),
            }
        }
        Ok(())
    }

    /// A peer whose socket cannot be written to may have said why before.
    fn lost(&self, peer: usize, error: &std::io::Error) -> LinkError {
        let mut text = [0u8; 1];
        let mut parting = Incoming::new(peer, CALL, &mut text);
        match self.pump_in(&mut parting) {
            Err(said @ LinkError::Aborted(..)) => said,
            _ => LinkError::Gone(peer, closed(error)),
        }
    }

    fn pump_in(&self, into: &mut Incoming) -> Result<(), LinkError> {
        let socket = self.socket(into.from)?;
        while !into.is_done() {
            let room = into.rest();
            match (&*socket).read(room) {
                Ok(0) => return Err(LinkError::Gone(into.from, "its connection is closed".into())),
                Ok(n) => into.done += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(LinkError::Gone(into.from, closed(&error))),
            }
            if into.done == HEAD {
                self.check_head(into)?;
            }
        }
        Ok(())
    }

    /// Looks at the header of a message that has begun.
    fn check_head(&self, into: &Incoming) -> Result<(), LinkError> {
        let kind = u32::from_le_bytes(into.head[..4].try_into().unwrap_or_default());
        let length = u64::from_le_bytes(into.head[4..].try_into().unwrap_or_default()) as usize;
        if kind == GAVE_UP {
            return Err(LinkError::Aborted(into.from, self.reason(into.from, length)));
        }
        match kind == into.kind && length == into.body.len() {
            true => Ok(()),
            false => Err(LinkError::Other(format!(
                "rank {} sent message {kind:#x} of {length} bytes, where {:#x} of {} were due; it runs another version",
                into.from,
                into.kind,
                into.body.len()
            ))),
        }
    }

    /// Reads why a rank gives up.
    fn reason(&self, from: usize, length: usize) -> String {
        let mut text = vec![0; length.min(LONGEST_REASON)];
        let (mut done, deadline) = (0, Deadline::after(FAREWELL));
        while done < text.len() && !deadline.is_over() {
            let Ok(mut socket) = self.socket(from) else { break };
            match socket.read(&mut text[done..]) {
                Ok(0) => break,
                Ok(n) => done += n,
                Err(error) if error.kind() == ErrorKind::WouldBlock => drop(self.poll(&[from], None, deadline)),
                Err(_) => break,
            }
        }
        printable(&text[..done])
    }
}

impl Links for Sockets {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.peers.len()
    }

    fn agree(&mut self, mine: &[u8; HEADER_BYTES], deadline: Deadline) -> Result<Vec<[u8; HEADER_BYTES]>, LinkError> {
        let mut headers = vec![*mine; self.world()];
        let others = || (0..self.world()).filter(|&peer| peer != self.rank);
        // A peer that is gone for good may still have left a reason on its socket, or another rank may know more: read before saying so.
        let mut unsent = None;
        for to in others() {
            let mut out = Outgoing::new(to, CALL, mine);
            while !out.is_done() && unsent.is_none() {
                match self.pump_out(&mut out) {
                    Ok(()) if !out.is_done() => self.poll(&[], Some(to), deadline)?,
                    Ok(()) => {}
                    Err(error) => unsent = Some(error),
                }
                if deadline.is_over() && !out.is_done() {
                    return Err(LinkError::Late(vec![to]));
                }
            }
        }
        if let Some(error) = unsent {
            return Err(error);
        }
        let mut rest: Vec<Incoming> = headers
            .iter_mut()
            .enumerate()
            .filter(|(from, _)| *from != self.rank)
            .map(|(from, h)| Incoming::new(from, CALL, h))
            .collect();
        let began = Instant::now();
        loop {
            let mut first_error = None;
            for into in &mut rest {
                if let Err(error) = self.pump_in(into) {
                    // A reason says more than a closed connection, which may be its consequence.
                    match (&first_error, &error) {
                        (None, _) | (Some(LinkError::Gone(..)), LinkError::Aborted(..)) => first_error = Some(error),
                        _ => {}
                    }
                }
            }
            if let Some(error) = first_error {
                return Err(error);
            }
            rest.retain(|into| !into.is_done());
            let missing: Vec<usize> = rest.iter().map(|into| into.from).collect();
            if missing.is_empty() {
                drop(rest);
                return Ok(headers);
            }
            if deadline.is_over() {
                return Err(LinkError::Late(missing));
            }
            match began.elapsed() < self.eager {
                true => std::hint::spin_loop(),
                false => self.poll(&missing, None, deadline)?,
            }
        }
    }

    fn exchange(
        &mut self,
        send: Option<(usize, &[u8])>,
        receive: Option<(usize, &mut [u8])>,
        deadline: Deadline,
    ) -> Result<(), LinkError> {
        let mut out = send.map(|(to, bytes)| Outgoing::new(to, DATA, bytes));
        let mut into = receive.map(|(from, bytes)| Incoming::new(from, DATA, bytes));
        loop {
            if let Some(out) = &mut out {
                self.pump_out(out)?;
            }
            if let Some(into) = &mut into {
                self.pump_in(into)?;
            }
            let to = out.as_ref().filter(|out| !out.is_done()).map(|out| out.to);
            let from = into.as_ref().filter(|into| !into.is_done()).map(|into| into.from);
            if to.is_none() && from.is_none() {
                return Ok(());
            }
            if deadline.is_over() {
                let mut late: Vec<usize> = to.into_iter().chain(from).collect();
                late.dedup();
                return Err(LinkError::Late(late));
            }
            self.poll(from.as_slice(), to, deadline)?;
        }
    }

    fn give_up(&mut self, reason: &str) {
        if std::mem::replace(&mut self.gave_up, true) {
            return;
        }
        let reason = &reason.as_bytes()[..reason.len().min(LONGEST_REASON)];
        for to in 0..self.peers.len() {
            let mut out = Outgoing::new(to, GAVE_UP, reason);
            let deadline = Deadline::after(FAREWELL);
            while to != self.rank && !out.is_done() && !deadline.is_over() {
                let sent =
                    self.pump_out(&mut out).is_ok() && (out.is_done() || self.poll(&[], Some(to), deadline).is_ok());
                if !sent {
                    break;
                }
            }
        }
    }
}

fn closed(error: &std::io::Error) -> String {
    match error.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => "its connection is closed".into(),
        _ => format!("its connection failed: {error}"),
    }
}

/// A message on its way out.
struct Outgoing<'a> {
    to: usize,
    head: [u8; HEAD],
    body: &'a [u8],
    done: usize,
}

impl<'a> Outgoing<'a> {
    fn new(to: usize, kind: u32, body: &'a [u8]) -> Outgoing<'a> {
        let mut head = [0; HEAD];
        head[..4].copy_from_slice(&kind.to_le_bytes());
        head[4..].copy_from_slice(&(body.len() as u64).to_le_bytes());
        Outgoing { to, head, body, done: 0 }
    }

    fn is_done(&self) -> bool {
        self.done == HEAD + self.body.len()
    }

    fn rest(&self) -> (&[u8], &[u8]) {
        (&self.head[self.done.min(HEAD)..], &self.body[self.done.saturating_sub(HEAD)..])
    }
}

/// A message on its way in: of this kind and length, or a farewell.
struct Incoming<'a> {
    from: usize,
    kind: u32,
    head: [u8; HEAD],
    body: &'a mut [u8],
    done: usize,
}

impl<'a> Incoming<'a> {
    fn new(from: usize, kind: u32, body: &'a mut [u8]) -> Incoming<'a> {
        Incoming { from, kind, head: [0; HEAD], body, done: 0 }
    }

    fn is_done(&self) -> bool {
        self.done == HEAD + self.body.len()
    }

    fn rest(&mut self) -> &mut [u8] {
        match self.done < HEAD {
            true => &mut self.head[self.done..],
            false => &mut self.body[self.done - HEAD..],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    /// Two ends of one connection, as ranks 0 and 1.
    fn pair() -> (Sockets, Sockets) {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let there = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let here = listener.accept().unwrap().0;
        let here = Sockets::new(0, vec![None, Some(here)]).unwrap().looking_for(Duration::from_micros(50));
        (here, Sockets::new(1, vec![Some(there), None]).unwrap())
    }

    /// What `ended` says, once it says anything.
    fn wait_for_end(sockets: &Sockets) -> LinkError {
        let deadline = Deadline::after(Duration::from_secs(20));
        loop {
            if let Some(error) = sockets.ended() {
                return error;
            }
            assert!(!deadline.is_over(), "nothing was noticed");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_end_of_a_rank_is_noticed_without_reading_what_it_sent() {
        let (mut here, there) = pair();
        assert!(here.ended().is_none());
        let mut call = Outgoing::new(0, CALL, &[7; HEADER_BYTES]);
        assert!(there.pump_out(&mut call).is_ok() && call.is_done());
        drop(there);
        assert!(matches!(wait_for_end(&here), LinkError::Gone(1, _)));
        // Its last call is still there.
        let deadline = Deadline::after(Duration::from_secs(20));
        let mut header = [0; HEADER_BYTES];
        let mut into = Incoming::new(1, CALL, &mut header);
        while !into.is_done() && !deadline.is_over() {
            assert!(here.pump_in(&mut into).is_ok());
        }
        assert_eq!(header, [7; HEADER_BYTES]);
        assert!(here.agree(&[0; HEADER_BYTES], deadline).is_err());
    }

    #[test]
    fn ranks_leave_together() {
        let (mut here, there) = pair();
        std::thread::scope(|scope| {
            let leaving = scope.spawn(move || there.leave(Duration::from_secs(60)));
            assert!(matches!(wait_for_end(&here), LinkError::Gone(1, _)));
            assert!(!leaving.is_finished(), "the other one is still there");
            let outcome = here.agree(&[0; HEADER_BYTES], Deadline::after(Duration::from_secs(20)));
            assert!(matches!(outcome, Err(LinkError::Gone(1, _))));
            here.leave(Duration::from_secs(60));
        });
    }

    #[test]
    fn both_see_the_others_call() {
        let (mut here, mut there) = pair();
        let deadline = Deadline::after(Duration::from_secs(20));
        std::thread::scope(|scope| {
            let other = scope.spawn(move || {
                (1..50).all(
                    |call| matches!(there.agree(&[2 * call; HEADER_BYTES], deadline), Ok(all) if all[0][0] == call),
                )
            });
            for call in 1..50 {
                let all = here.agree(&[call; HEADER_BYTES], deadline);
                assert!(matches!(all, Ok(all) if all == [[call; HEADER_BYTES], [2 * call; HEADER_BYTES]]));
            }
            assert!(other.join().unwrap());
        });
    }

    #[test]
    fn a_rank_that_gives_up_is_heard_without_a_collective() {
        let (here, mut there) = pair();
        there.give_up("the disk is full");
        assert!(matches!(wait_for_end(&here), LinkError::Aborted(1, reason) if reason == "the disk is full"));
    }
}
