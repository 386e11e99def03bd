//! Roll call: after a timeout, ranks over sockets find out which of them is unresponsive.
//!
//! A rank that waits for another one knows only that this one is late; the late rank may itself wait for a third one
//! that hangs. Every rank that times out, or that learns of another rank's timeout, therefore reports which ranks it
//! waits for ([`WAITING_FOR`]), and collects the reports of the others for up to [`ROLL_CALL_TIMEOUT`]. A rank that
//! others wait for and that does not report is the one that hangs. Ranks that are in no collective do not report
//! either, but no waiting rank names them.
//!
//! A message that was in flight at the timeout is completed with zeros and marked as invalid, so that it is not taken
//! for data and the connection stays in sync.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::Duration;

use super::backend::Deadline;
use super::tcp::{ABORT, HEAD, TRAILER, WAITING_FOR};

/// Time for a healthy rank to answer: it may check for notices only once a second.
const ROLL_CALL_TIMEOUT: Duration = Duration::from_secs(3);
/// Maximum number of ranks in a notice.
const MAX_RANKS: usize = 1 << 16;

/// State of the connection to one rank.
pub(super) struct LinkState {
    /// Unsent bytes of a message, including its trailer.
    pub unsent: usize,
    /// The received bytes of a header.
    pub head: [u8; HEAD],
    pub head_received: usize,
    /// Bytes that follow a received header.
    pub unread: usize,
}

impl Default for LinkState {
    fn default() -> LinkState {
        LinkState { unsent: 0, head: [0; HEAD], head_received: 0, unread: 0 }
    }
}

/// Value of `unsent` after a truncated notice: the peer can no longer parse this connection.
pub(super) const TRUNCATED: usize = usize::MAX;

/// Sends zeros for the `unsent` bytes of an earlier message, then `bytes` from `sent` on, until the send buffer is
/// full.
///
/// # Errors
/// The connection failed.
pub(super) fn flush_and_send(
    mut socket: &TcpStream,
    unsent: &mut usize,
    bytes: &[u8],
    sent: &mut usize,
) -> std::io::Result<()> {
    const ZEROS: &[u8] = &[0; 1 << 14];
    while *sent < bytes.len() {
        let written = match *unsent {
            0 => socket.write(&bytes[*sent..]),
            unsent => socket.write(&ZEROS[..unsent.min(ZEROS.len())]),
        };
        match written {
            Ok(n) if *unsent > 0 => *unsent -= n,
            Ok(n) => *sent += n,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Kind and length of a message.
pub(super) fn read_head(head: &[u8; HEAD]) -> (u32, usize) {
    let kind = u32::from_le_bytes(head[..4].try_into().unwrap_or_default());
    (kind, u64::from_le_bytes(head[4..].try_into().unwrap_or_default()) as usize)
}

/// Builds a header.
pub(super) fn write_head(kind: u32, length: usize) -> [u8; HEAD] {
    let mut head = [0; HEAD];
    head[..4].copy_from_slice(&kind.to_le_bytes());
    head[4..].copy_from_slice(&(length as u64).to_le_bytes());
    head
}

/// A peer during the roll call.
struct Peer<'a> {
    socket: &'a TcpStream,
    link_state: &'a mut LinkState,
    /// Sent bytes of this rank's notice.
    sent: usize,
    /// Received bytes of the peer's notice.
    notice: Vec<u8>,
    /// The ranks that the peer waits for.
    answer: Option<Vec<usize>>,
    closed: bool,
}

/// Returns the unresponsive ranks among `late` and the ranks that these wait for, directly or indirectly. Takes
/// [`ROLL_CALL_TIMEOUT`] if a rank hangs.
pub(super) fn find_unresponsive(
    sockets: &[Option<TcpStream>],
    link_state: &mut [LinkState],
    late: &[usize],
) -> Vec<usize> {
    let mut own = write_head(WAITING_FOR, 4 * late.len()).to_vec();
    late.iter().for_each(|rank| own.extend((*rank as u32).to_le_bytes()));
    let with = sockets.iter().zip(link_state);
    let mut peers: Vec<Option<Peer>> = with
        .map(|(socket, link_state)| {
            let socket = socket.as_ref()?;
            Some(Peer { socket, link_state, sent: 0, notice: Vec::new(), answer: None, closed: false })
        })
        .collect();
    let deadline = Deadline::after(ROLL_CALL_TIMEOUT);
    loop {
        let mut waits = Vec::new();
        for peer in peers.iter_mut().flatten() {
            peer.send(&own);
            peer.receive();
            let (sends, receives) = (peer.sent < own.len(), peer.answer.is_none());
            if !peer.closed && (sends || receives) {
                let events = if sends { libc::POLLOUT } else { 0 } | if receives { libc::POLLIN } else { 0 };
                waits.push(libc::pollfd { fd: peer.socket.as_raw_fd(), events, revents: 0 });
            }
        }
        if waits.is_empty() || deadline.is_over() {
            break;
        }
        let timeout = deadline.left().as_millis().clamp(1, 1000) as libc::c_int;
        // SAFETY: the array lives through the call, and its length is given.
        unsafe { libc::poll(waits.as_mut_ptr(), waits.len() as libc::nfds_t, timeout) };
    }
    for peer in peers.iter_mut().flatten().filter(|peer| (1..own.len()).contains(&peer.sent)) {
        peer.link_state.unsent = TRUNCATED;
    }
    let answers: Vec<Option<Vec<usize>>> =
        peers.into_iter().map(|peer| peer.map_or(Some(Vec::new()), |peer| peer.answer)).collect();
    unresponsive(late, &answers)
}

/// The ranks without an answer among `late` and the ranks that these wait for, directly or indirectly; `late` if all of
/// them answered.
fn unresponsive(late: &[usize], answers: &[Option<Vec<usize>>]) -> Vec<usize> {
    let (mut seen, mut next, mut silent) = (vec![false; answers.len()], late.to_vec(), Vec::new());
    while let Some(rank) = next.pop() {
        if rank >= answers.len() || std::mem::replace(&mut seen[rank], true) {
            continue;
        }
        match &answers[rank] {
            Some(waits_for) => next.extend(waits_for),
            None => silent.push(rank),
        }
    }
    silent.sort_unstable();
    if silent.is_empty() { late.to_vec() } else { silent }
}

impl Peer<'_> {
    /// Completes the message in flight and sends the notice, until the send buffer is full.
    fn send(&mut self, own: &[u8]) {
        if !self.closed && self.sent < own.len() {
            let sent = flush_and_send(self.socket, &mut self.link_state.unsent, own, &mut self.sent);
            self.closed = sent.is_err();
        }
    }

    /// Discards messages in flight, up to the notice.
    fn receive(&mut self) {
        let mut buffer = [0; 1 << 14];
        while !self.closed && self.answer.is_none() {
            let link_state = &mut *self.link_state;
            let reads_head = link_state.head_received < HEAD;
            let into = match reads_head {
                true => &mut link_state.head[link_state.head_received..],
                false => &mut buffer[..link_state.unread.min(1 << 14)],
            };
            let got = match self.socket.read(into) {
                Ok(0) => {
                    self.closed = true;
                    return;
                }
                Ok(n) => n,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => {
                    self.closed = true;
                    return;
                }
            };
            if reads_head {
                link_state.head_received += got;
                if link_state.head_received == HEAD {
                    let (kind, length) = read_head(&link_state.head);
                    link_state.unread = match kind {
                        WAITING_FOR | ABORT => length,
                        _ => length.saturating_add(TRAILER),
                    };
                }
            } else {
                if read_head(&link_state.head).0 == WAITING_FOR && self.notice.len() < 4 * MAX_RANKS {
                    self.notice.extend(&buffer[..got]);
                }
                link_state.unread -= got;
            }
            self.accept_message();
        }
    }

    /// Handles a complete message.
    fn accept_message(&mut self) {
        if self.link_state.head_received < HEAD || self.link_state.unread > 0 {
            return;
        }
        self.link_state.head_received = 0;
        match read_head(&self.link_state.head).0 {
            WAITING_FOR => {
                let numbers = self.notice.chunks_exact(4);
                self.answer = Some(numbers.map(|n| u32::from_le_bytes([n[0], n[1], n[2], n[3]]) as usize).collect());
            }
            // The peer has aborted, and waits for no rank.
            ABORT => self.answer = Some(Vec::new()),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unresponsive_ranks_are_those_without_an_answer() {
        let waits = |ranks: &[usize]| Some(ranks.to_vec());
        // 0 waits for 1, 1 for 2, 2 for 3, which does not answer; 4 computes, and no rank waits for it.
        let answers = [waits(&[]), waits(&[2]), waits(&[3]), None, None];
        assert_eq!(unresponsive(&[1], &answers), [3]);
        assert_eq!(unresponsive(&[3, 4], &answers), [3, 4]);
        // All wait for each other: a link is slow or broken.
        let answers = [waits(&[]), waits(&[2]), waits(&[1])];
        assert_eq!(unresponsive(&[1], &answers), [1]);
        assert_eq!(unresponsive(&[7], &answers), [7]);
    }

    #[test]
    fn pages_state_the_timeouts() {
        let default = super::super::TIMEOUT.as_secs();
        let expected = format!(
            "the slowest rank: {default}. Over sockets, ranks take up to {} s more to find out which rank hangs |",
            ROLL_CALL_TIMEOUT.as_secs()
        );
        let pages = [include_str!("../rank.rs"), include_str!("../../../../../docs/distributed.md")];
        for page in pages {
            let row = page.lines().find(|line| line.contains("| `TILEWRIGHT_COMM_TIMEOUT` | seconds |"));
            assert!(row.is_some_and(|row| row.ends_with(&expected)), "expected `{expected}`: {row:?}");
        }
        let failure = pages[1].lines().find(|line| line.starts_with("| a rank hangs |")).unwrap_or_default();
        let expected = format!(
            "after `TILEWRIGHT_COMM_TIMEOUT` seconds, {default} by default, and over sockets up to {} s more",
            ROLL_CALL_TIMEOUT.as_secs()
        );
        assert!(failure.contains(&expected), "expected `{expected}`: {failure}");
    }
}
