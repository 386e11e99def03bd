//! Connects the processes of a job: every rank connects to rank 0, then to all other ranks.
//!
//! Every rank but 0 connects to rank 0, and both prove that they belong to the same job ([`handshake`]). In the
//! handshake the rank sends the port on which it listens itself. When all ranks are connected, rank 0 sends everyone
//! the list of addresses, and rank i connects to ranks 1 to i − 1 with the same handshake. The result is a socket
//! between every two ranks. A rank that fails sends the reason to all ranks that it is connected to, so that all of
//! them report the same reason.
//!
//! Guarantees:
//! - The rendezvous ends within [`Options::start_timeout`], plus a short time for sending abort notices.
//! - Only an authenticated rank can make the rendezvous fail or claim a rank. Other peers are rejected and do not delay
//!   the ranks ([`acceptor`]). A rank that finds another program at a peer's address retries until the timeout.
//! - Without a secret ([`Access`]) proofs authenticate no peer. Ranks then listen and connect on the loopback interface
//!   only, unless unauthenticated peers are explicitly allowed.
//! - Rank 0 listens on the address in MASTER_ADDR, the other ranks on the local address of their connection to rank 0.

mod acceptor;
mod handshake;

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::comm::backend::Deadline;
use super::comm::error::{ranks, seconds};
use super::comm::{CommError, Communicator, Options, Result, tcp};
use super::rank::RankInfo;
use super::secret::{Access, Secret};
use super::watchdog::{WATCHDOG_MARGIN, guard};
use acceptor::{AcceptedPeer, Acceptor, Event, HANDSHAKE_TIMEOUT};
use handshake::{ConnectRequest, HandshakeError, LocalIdentity, handshake, read_by, write_by};
use tilewright::escape::{printable, printable_lines};

/// Time between two attempts to connect.
const RETRY_INTERVAL: Duration = Duration::from_millis(50);
/// Timeout of one attempt to connect to one of a name's addresses.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout for sending one rank the outcome of the rendezvous.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum length of a received failure reason in bytes.
const MAX_REASON_BYTES: usize = 4096;
/// Maximum length of one rank's line in the address list.
const MAX_LINE_BYTES: usize = 64;

/// What all ranks of a job share.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// Tells apart jobs that use the same address by accident.
    pub name: String,
    /// Which peers may take part.
    pub access: Access,
}

impl Job {
    /// A job whose ranks this process starts, with a generated secret.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn generate(name: &str) -> Result<Job> {
        let secret =
            Secret::generate().map_err(|error| CommError::Setup(format!("cannot generate a secret: {error}")))?;
        Ok(Job { name: name.to_string(), access: Access::Secret(secret) })
    }
}

/// Connects the processes of a job by sockets, and returns the communicator.
///
/// # Errors
/// The port is in use; ranks are missing after [`Options::start_timeout`]; two processes claim the same rank; the world
/// sizes differ; an address that other hosts can reach, without a secret.
pub fn connect(rank_info: &RankInfo, job: &Job, options: Options) -> Result<Communicator> {
    tcp::over_sockets(rank_info.rank, sockets(rank_info, job, "ranks", options)?, options)
}

/// The sockets by rank; `None` for this rank. `purpose` distinguishes several rendezvous of one job.
///
/// # Errors
/// See [`connect`].
pub(crate) fn sockets(
    rank_info: &RankInfo,
    job: &Job,
    purpose: &str,
    options: Options,
) -> Result<Vec<Option<TcpStream>>> {
    let deadline = Deadline::after(options.start_timeout);
    let identity = LocalIdentity::new(rank_info, job, purpose);
    // Name resolution may hang.
    let (rank, (name, port)) = (rank_info.rank, rank_info.master.clone());
    let limit = options.start_timeout.saturating_add(WATCHDOG_MARGIN);
    let _guarded = guard(limit, move || format!("rank {rank}: the rendezvous at {name}:{port}"));
    match (rank_info.world, rank_info.rank) {
        (1, _) => Ok(vec![None]),
        (_, 0) => run_rank0(rank_info, job, &identity, deadline),
        _ => run_other_rank(rank_info, job, &identity, deadline),
    }
}

fn setup<T>(message: impl Into<String>) -> Result<T> {
    Err(CommError::Setup(message.into()))
}

/// Fails for an address that other hosts can reach, if peers are not authenticated.
fn check_access(job: &Job, ip: IpAddr) -> Result<()> {
    match job.access {
        Access::Loopback if !ip.to_canonical().is_loopback() => setup(format!(
            "the rendezvous address is {ip}, which other hosts can reach, and this job has no secret\n  help: give all ranks the same random TILEWRIGHT_SECRET (`head -c 32 /dev/urandom | base64` prints one), or TILEWRIGHT_SECRET_FILE, the path of a file of mode 0600 that holds it; set TILEWRIGHT_UNAUTHENTICATED=1 only on a network that only the job's hosts can reach"
        )),
        _ => Ok(()),
    }
}

/// Listens as rank 0, on all addresses of this host that the name resolves to.
fn listen(rank_info: &RankInfo, job: &Job) -> Result<Vec<TcpListener>> {
    let (name, port) = &rank_info.master;
    let addresses: Vec<SocketAddr> = match (name.as_str(), *port).to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(error) => {
            return setup(format!(
                "MASTER_ADDR is `{name}`, which has no address on the host of rank 0: {error}\n  help: set it to a name or address of that host"
            ));
        }
    };
    addresses.iter().try_for_each(|address| check_access(job, address.ip()))?;
    if rank_info.local_world < rank_info.world
        && addresses.iter().all(|address| address.ip().to_canonical().is_loopback())
    {
        let ip = addresses.first().map_or_else(|| name.clone(), |address| address.ip().to_string());
        return setup(format!(
            "MASTER_ADDR is `{name}`, which is {ip} on the host of rank 0: {} of {} ranks are on other hosts, which cannot reach it there\n  help: set MASTER_ADDR to an address of this host that they can reach, the same for all ranks",
            rank_info.world - rank_info.local_world,
            rank_info.world
        ));
    }
    let mut listeners: Vec<TcpListener> = Vec::new();
    let mut absent = None;
    for address in addresses {
        let here = |listener: &TcpListener| listener.local_addr().is_ok_and(|at| at == address);
        if listeners.iter().any(here) {
            continue;
        }
        match TcpListener::bind(address) {
            Ok(listener) => listeners.push(listener),
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                return setup(format!(
                    "port {port} on {name}, the rendezvous port, is in use by another program\n  help: set MASTER_PORT to a free port, the same for all ranks"
                ));
            }
            Err(error) => absent = Some((address, error)),
        }
    }
    match absent {
        Some((address, error)) if listeners.is_empty() => setup(format!(
            "rank 0 cannot listen at {address}, which MASTER_ADDR names: {error}\n  help: MASTER_ADDR has to be an address of the host on which rank 0 runs, as that host itself knows it (in a container: of the container, or use the host's network)"
        )),
        _ => Ok(listeners),
    }
}

/// Runs the rendezvous on rank 0.
fn run_rank0(
    rank_info: &RankInfo,
    job: &Job,
    identity: &LocalIdentity,
    deadline: Deadline,
) -> Result<Vec<Option<TcpStream>>> {
    let listeners = listen(rank_info, job)?;
    let mut accepted: Vec<AcceptedPeer> = Vec::new();
    let outcome = accept_all(&listeners, rank_info, identity, deadline, &mut accepted);
    let mut message = match &outcome {
        Ok(()) => vec![b'y'],
        Err(_) => vec![b'n'],
    };
    let mut text = String::new();
    match &outcome {
        Ok(()) => {
            accepted.sort_by_key(|peer| peer.peer_info.rank);
            accepted.iter().for_each(|peer| text += &format!("{} {}\n", peer.ip, peer.peer_info.port));
        }
        Err(error) => text = error.to_string(),
    }
    message.extend((text.len() as u32).to_le_bytes());
    message.extend(text.into_bytes());
    for AcceptedPeer { socket, .. } in &mut accepted {
        // A rank that cannot be notified notices the closed connection.
        let _ =
            socket.set_nonblocking(false).and_then(|()| write_by(socket, &message, Deadline::after(NOTIFY_TIMEOUT)));
    }
    outcome?;
    Ok(std::iter::once(None).chain(accepted.into_iter().map(|peer| Some(peer.socket))).collect())
}

/// Accepts ranks until all are connected.
fn accept_all(
    listeners: &[TcpListener],
    rank_info: &RankInfo,
    identity: &LocalIdentity,
    deadline: Deadline,
    accepted: &mut Vec<AcceptedPeer>,
) -> Result<()> {
    let mut acceptor = Acceptor::new(listeners, identity)?;
    while accepted.len() + 1 < rank_info.world {
        let here: Vec<&TcpStream> = accepted.iter().map(|peer| &peer.socket).collect();
        let peer = match acceptor.next(&here, deadline)? {
            Event::Accepted(peer) => peer,
            Event::Closed(at) => {
                let AcceptedPeer { socket, peer_info, .. } = &accepted[at];
                return setup(match tcp::abort_reason(socket) {
                    Some(reason) => format!("rank {} aborted: {reason}", peer_info.rank),
                    None => format!("rank {} ended before all ranks were connected", peer_info.rank),
                });
            }
            Event::TimedOut => {
                let is_here = |rank: &usize| accepted.iter().any(|peer| peer.peer_info.rank == *rank);
                let missing: Vec<usize> = (1..rank_info.world).filter(|rank| !is_here(rank)).collect();
                let (host, port) = &rank_info.master;
                return setup(format!(
                    "{} of {} did not connect to {host}:{port} within {}{}\n  help: check why they did not start; TILEWRIGHT_START_TIMEOUT=SECONDS raises the limit",
                    ranks(&missing),
                    rank_info.world,
                    seconds(&deadline.timeout),
                    acceptor.rejections()
                ));
            }
        };
        let peer_info = peer.peer_info;
        let taken = peer_info.rank == 0 || accepted.iter().any(|other| other.peer_info.rank == peer_info.rank);
        // Added before the checks: the peer gets the error message too.
        accepted.push(peer);
        if peer_info.world != rank_info.world {
            return setup(format!(
                "rank {} has world size {}, rank 0 has {}",
                peer_info.rank, peer_info.world, rank_info.world
            ));
        }
        if taken || peer_info.rank >= rank_info.world {
            return setup(format!("two processes claim rank {}", peer_info.rank));
        }
    }
    Ok(())
}

/// Runs the rendezvous on all other ranks. On failure, the connected ranks get the reason.
fn run_other_rank(
    rank_info: &RankInfo,
    job: &Job,
    identity: &LocalIdentity,
    deadline: Deadline,
) -> Result<Vec<Option<TcpStream>>> {
    let mut peers: Vec<Option<TcpStream>> = (0..rank_info.world).map(|_| None).collect();
    match connect_peers(rank_info, job, identity, deadline, &mut peers) {
        Ok(()) => Ok(peers),
        Err(error) => {
            tcp::send_abort_notice(peers.iter().flatten(), &error.to_string());
            Err(error)
        }
    }
}

fn connect_peers(
    rank_info: &RankInfo,
    job: &Job,
    identity: &LocalIdentity,
    deadline: Deadline,
    peers: &mut [Option<TcpStream>],
) -> Result<()> {
    let (name, port) = &rank_info.master;
    let (rank, world) = (rank_info.rank, rank_info.world);
    let broken = |what: &str, error: std::io::Error| CommError::Setup(format!("rank {rank}: {what}: {error}"));
    let help = "rank 0 has to run there; MASTER_ADDR and MASTER_PORT have to be the same for all ranks";
    let mut listener = None;
    let socket = connect_with_retry((name, *port), job, deadline, help, |socket, proof_deadline| {
        // Other ranks reach this rank at the address from which it reaches rank 0.
        if listener.is_none() {
            let ip = socket.local_addr().map(|address| address.ip());
            listener = ip.and_then(|ip| TcpListener::bind((ip, 0))).ok();
        }
        let port =
            listener.as_ref().and_then(|listener| listener.local_addr().ok()).map_or(0, |address| address.port());
        handshake(socket, identity, ConnectRequest { to: 0, port, proof_deadline, deadline })
    })?;
    let socket = peers[0].insert(socket);
    let Some(listener) = listener else { return setup(format!("rank {rank} has no port for the other ranks")) };
    let list = receive_address_list(socket, rank_info, deadline)?;
    let master = socket.peer_addr().map_err(|error| broken("lost the connection to rank 0", error))?.ip();
    for (index, line) in list.lines().enumerate().take(rank - 1) {
        let to = index + 1;
        let address = line.split_once(' ').and_then(|(ip, port)| Some((ip.parse().ok()?, port.parse().ok()?)));
        let Some((ip, port)): Option<(IpAddr, u16)> = address else {
            return setup(format!("rank 0 sent an invalid address: `{}`", printable(line)));
        };
        // Rank 0 saw that rank at a loopback address: use rank 0's own address instead.
        let ip = if ip.to_canonical().is_loopback() { master } else { ip };
        let peer = connect_with_retry(
            (&ip.to_string(), port),
            job,
            deadline,
            "all ranks have to reach each other",
            |socket, proof_deadline| {
                handshake(socket, identity, ConnectRequest { to, port: 0, proof_deadline, deadline })
            },
        );
        let peer = peer.map_err(|error| CommError::Setup(format!("rank {rank} cannot reach rank {to}: {error}")))?;
        peers[to] = Some(peer);
    }
    let listeners = [listener];
    let mut acceptor = Acceptor::new(&listeners, identity)?;
    let (mut deadline, mut ended) = (deadline, None);
    while let Some(missing) = (rank + 1..world).find(|&rank| peers[rank].is_none()) {
        let here: Vec<(usize, &TcpStream)> =
            peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?))).collect();
        let watched: Vec<&TcpStream> = here.iter().filter(|_| ended.is_none()).map(|(_, socket)| *socket).collect();
        match acceptor.next(&watched, deadline)? {
            Event::Accepted(AcceptedPeer { socket, peer_info, .. }) => {
                if peer_info.rank <= rank || peer_info.rank >= world || peers[peer_info.rank].is_some() {
                    return setup(format!("two processes claim rank {}", peer_info.rank));
                }
                peers[peer_info.rank] = Some(socket);
            }
            // The peer may have finished the rendezvous already. If it failed because of the missing rank, that rank
            // will not connect.
            Event::Closed(at) => {
                let (other, socket) = here[at];
                if let Some(reason) = tcp::abort_reason(socket) {
                    return setup(format!("rank {other} aborted: {reason}"));
                }
                ended = Some(other);
                deadline = Deadline::after(HANDSHAKE_TIMEOUT.min(deadline.left()));
            }
            Event::TimedOut => {
                let after = ended.map_or(String::new(), |ended| format!(" after rank {ended} had ended"));
                return setup(format!(
                    "rank {missing} did not connect to rank {rank} within {}{after}{}",
                    seconds(&deadline.timeout),
                    acceptor.rejections()
                ));
            }
        }
    }
    Ok(())
}

/// Receives the address list, or the reason for which rank 0 aborts.
fn receive_address_list(socket: &mut TcpStream, rank_info: &RankInfo, deadline: Deadline) -> Result<String> {
    let (name, port) = &rank_info.master;
    // Rank 0 times out first, and sends the reason.
    let deadline = Deadline::after(deadline.left() + HANDSHAKE_TIMEOUT);
    let gone = |error: std::io::Error| match error.kind() {
        ErrorKind::TimedOut => {
            CommError::Setup(format!("rank 0 at {name}:{port} no longer answers rank {}", rank_info.rank))
        }
        _ => CommError::Setup(format!("rank 0 at {name}:{port} ended before all ranks were connected")),
    };
    let mut head = [0; 5];
    read_by(socket, &mut head, deadline).map_err(gone)?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let (is_list, most) = match head[0] {
        b'y' => (true, MAX_LINE_BYTES * rank_info.world),
        _ => (false, MAX_REASON_BYTES),
    };
    let mut text = vec![0; length.min(most)];
    read_by(socket, &mut text, deadline).map_err(gone)?;
    match is_list {
        true => Ok(String::from_utf8_lossy(&text).into_owned()),
        false => setup(printable_lines(&text)),
    }
}

/// Connects to a listening rank and runs the handshake; retries until the deadline, also after an answer of another
/// program, which may release the address.
fn connect_with_retry(
    (host, port): (&str, u16),
    job: &Job,
    deadline: Deadline,
    help: &str,
    mut do_handshake: impl FnMut(&mut TcpStream, Deadline) -> Result<(), HandshakeError>,
) -> Result<TcpStream> {
    let mut last = String::from("it has no address");
    let mut last_error: Option<HandshakeError> = None;
    loop {
        let addresses = (host, port).to_socket_addrs();
        if let Err(error) = &addresses {
            last = error.to_string();
        }
        for address in addresses.into_iter().flatten() {
            check_access(job, address.ip())?;
            let mut socket =
                match TcpStream::connect_timeout(&address, deadline.left().clamp(RETRY_INTERVAL, CONNECT_TIMEOUT)) {
                    Ok(socket) => socket,
                    Err(error) => {
                        last = error.to_string();
                        continue;
                    }
                };
            let proof_deadline = Deadline::after(HANDSHAKE_TIMEOUT.min(deadline.left().max(RETRY_INTERVAL)));
            match do_handshake(&mut socket, proof_deadline) {
                Ok(()) => return Ok(socket),
                // Other handshake errors are more specific than a missing reply.
                Err(HandshakeError::NoReply) if last_error.is_some() => {}
                Err(why) => last_error = Some(why),
            }
        }
        if deadline.is_over() {
            let after = seconds(&deadline.timeout);
            return match last_error {
                Some(why) => setup(format!(
                    "no rank of this job answers at {host}:{port} after {after}: {}",
                    why.listener_message()
                )),
                None => setup(format!("no process answers at {host}:{port} after {after} ({last})\n  help: {help}")),
            };
        }
        std::thread::sleep(RETRY_INTERVAL);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A job of `world` ranks on this host; the tests act as some of them.
    struct TestJob {
        world: usize,
        port: u16,
        job: Job,
        options: Options,
    }

    impl TestJob {
        fn new(world: usize) -> TestJob {
            let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
            let options = Options { start_timeout: Duration::from_secs(120), ..Options::default() };
            TestJob { world, port, job: Job::generate("test").unwrap(), options }
        }

        fn rank_info(&self, rank: usize) -> RankInfo {
            let master = ("127.0.0.1".into(), self.port);
            RankInfo {
                rank,
                world: self.world,
                local_rank: rank,
                local_world: self.world,
                master,
                ..RankInfo::single()
            }
        }

        fn deadline(&self) -> Deadline {
            Deadline::after(self.options.start_timeout)
        }

        /// Runs a rank's rendezvous.
        fn sockets(&self, rank: usize) -> Result<Vec<Option<TcpStream>>> {
            sockets(&self.rank_info(rank), &self.job, "ranks", self.options)
        }

        /// Connects as `rank` to the listening rank `to`.
        fn connect_as(&self, rank: usize, to: usize, port: u16) -> TcpStream {
            let identity = LocalIdentity::new(&self.rank_info(rank), &self.job, "ranks");
            let do_handshake = |socket: &mut TcpStream, proof_deadline: Deadline| {
                handshake(socket, &identity, ConnectRequest { to, port: 1, proof_deadline, deadline: self.deadline() })
            };
            connect_with_retry(("127.0.0.1", port), &self.job, self.deadline(), "", do_handshake).unwrap()
        }

        /// Receives the address list as `rank`.
        fn receive_address_list(&self, rank: usize, socket: &mut TcpStream) -> Result<String> {
            receive_address_list(socket, &self.rank_info(rank), self.deadline())
        }
    }

    /// Rank 2 connects to rank 0, and ends before it connects to rank 1; rank 0 notices, and ends too.
    #[test]
    fn a_rank_that_ends_after_the_rendezvous_ends_the_wait() {
        let (test_job, began) = (TestJob::new(3), Instant::now());
        let error = std::thread::scope(|scope| {
            scope.spawn(|| drop(test_job.sockets(0).unwrap()));
            scope.spawn(|| {
                drop(test_job.receive_address_list(2, &mut test_job.connect_as(2, 0, test_job.port)).unwrap())
            });
            test_job.sockets(1).unwrap_err().to_string()
        });
        assert!(error.contains("rank 2 did not connect to rank 1 within 5 s after rank 0 had ended"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(100));
    }

    #[test]
    fn a_rank_that_fails_before_the_list_sends_its_reason() {
        let test_job = TestJob::new(4);
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| test_job.sockets(0).unwrap_err().to_string());
            let mut first = test_job.connect_as(1, 0, test_job.port);
            tcp::send_abort_notice([&test_job.connect_as(2, 0, test_job.port)].into_iter(), "it has no GPU");
            let one = test_job.receive_address_list(1, &mut first).unwrap_err().to_string();
            for error in [zero.join().unwrap(), one] {
                assert_eq!(error, "rank 2 aborted: it has no GPU");
            }
        });
    }

    /// Rank 2 is connected to rank 1, which still waits for rank 3, when it fails.
    #[test]
    fn a_rank_that_fails_while_connecting_sends_its_reason() {
        let test_job = TestJob::new(4);
        std::thread::scope(|scope| {
            // Its sockets stay open until the end.
            let zero = scope.spawn(|| test_job.sockets(0));
            let one = scope.spawn(|| test_job.sockets(1).unwrap_err().to_string());
            scope.spawn(|| {
                drop(test_job.receive_address_list(3, &mut test_job.connect_as(3, 0, test_job.port)).unwrap())
            });
            let mut first = test_job.connect_as(2, 0, test_job.port);
            let list = test_job.receive_address_list(2, &mut first).unwrap();
            let port = list.lines().next().and_then(|line| line.split(' ').nth(1)).unwrap().parse().unwrap();
            let second = test_job.connect_as(2, 1, port);
            tcp::send_abort_notice([&first, &second].into_iter(), "it has no GPU");
            drop((first, second));
            assert_eq!(one.join().unwrap(), "rank 2 aborted: it has no GPU");
            drop(zero.join().unwrap());
        });
    }
}
