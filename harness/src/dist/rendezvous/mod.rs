//! Connects the processes of a job: every rank connects to rank 0, then to all other ranks.
//!
//! Every rank but 0 connects to rank 0, and both prove that they belong to the same job ([`greeting`]). In the
//! handshake the rank sends the port on which it listens itself. When all ranks are connected, rank 0 sends everyone
//! the list of addresses, and rank i connects to ranks 1 to i − 1 with the same handshake. The result is a socket
//! between every two ranks. A rank that fails sends the reason to all ranks that it is connected to, so that all of
//! them report the same reason.
//!
//! Guarantees:
//! - The rendezvous ends within [`Options::start_timeout`], plus a short time for sending abort notices.
//! - Only an authenticated rank can make the rendezvous fail or claim a rank. Other peers are rejected and do not delay
//!   the ranks ([`gate`]). A rank that finds another program at a peer's address retries until the timeout.
//! - Without a secret ([`Access`]) proofs authenticate no peer. Ranks then listen and connect on the loopback interface
//!   only, unless unauthenticated peers are explicitly allowed.
//! - Rank 0 listens on the address in MASTER_ADDR, the other ranks on the local address of their connection to rank 0.

mod gate;
mod greeting;

use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::comm::carrier::Deadline;
use super::comm::error::{ranks, seconds};
use super::comm::{CommError, Communicator, Options, Result, tcp};
use super::rank::Place;
use super::secret::{Access, Secret};
use super::watchdog::{LAST_RESORT, guard};
use crate::escape::{printable, printable_lines};
use gate::{Arrival, Event, GREETING, Gate};
use greeting::{Own, Why, greet, read_by, write_by};

/// Time between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(50);
/// Timeout of one attempt to connect to one of a name's addresses.
const CONNECT: Duration = Duration::from_secs(10);
/// Timeout for sending one rank the outcome of the rendezvous.
const TELLING: Duration = Duration::from_secs(2);
/// Maximum length of a received failure reason in bytes.
const LONGEST_REASON: usize = 4096;
/// Maximum length of one rank's line in the address list.
const LONGEST_LINE: usize = 64;

/// What all ranks of a job share.
#[derive(Clone, Debug, Default)]
pub struct Job {
    /// Tells apart jobs that use the same address by accident.
    pub word: String,
    /// Which peers may take part.
    pub access: Access,
}

impl Job {
    /// A job whose ranks this process starts, with a generated secret.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub fn fresh(word: &str) -> Result<Job> {
        let secret = Secret::fresh().map_err(|error| CommError::Setup(format!("cannot generate a secret: {error}")))?;
        Ok(Job { word: word.to_string(), access: Access::Secret(secret) })
    }
}

/// Connects the processes of a job by sockets, and returns the communicator.
///
/// # Errors
/// The port is in use; ranks are missing after [`Options::start_timeout`]; two processes claim the same rank; the world
/// sizes differ; an address that other hosts can reach, without a secret.
pub fn connect(place: &Place, job: &Job, options: Options) -> Result<Communicator> {
    tcp::over_sockets(place.rank, sockets(place, job, "ranks", options)?, options)
}

/// The sockets by rank; `None` for this rank. `purpose` distinguishes several rendezvous of one job.
///
/// # Errors
/// See [`connect`].
pub(crate) fn sockets(place: &Place, job: &Job, purpose: &str, options: Options) -> Result<Vec<Option<TcpStream>>> {
    let deadline = Deadline::after(options.start_timeout);
    let own = Own::new(place, job, purpose);
    // Name resolution may hang.
    let (rank, (name, port)) = (place.rank, place.master.clone());
    let limit = options.start_timeout.saturating_add(LAST_RESORT);
    let _guarded = guard(limit, move || format!("rank {rank}: the rendezvous at {name}:{port}"));
    match (place.world, place.rank) {
        (1, _) => Ok(vec![None]),
        (_, 0) => host(place, job, &own, deadline),
        _ => join(place, job, &own, deadline),
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
fn listen(place: &Place, job: &Job) -> Result<Vec<TcpListener>> {
    let (name, port) = &place.master;
    let addresses: Vec<SocketAddr> = match (name.as_str(), *port).to_socket_addrs() {
        Ok(addresses) => addresses.collect(),
        Err(error) => {
            return setup(format!(
                "MASTER_ADDR is `{name}`, which has no address on the host of rank 0: {error}\n  help: set it to a name or address of that host"
            ));
        }
    };
    addresses.iter().try_for_each(|address| check_access(job, address.ip()))?;
    if place.local_world < place.world && addresses.iter().all(|address| address.ip().to_canonical().is_loopback()) {
        let ip = addresses.first().map_or_else(|| name.clone(), |address| address.ip().to_string());
        return setup(format!(
            "MASTER_ADDR is `{name}`, which is {ip} on the host of rank 0: {} of {} ranks are on other hosts, which cannot reach it there\n  help: set MASTER_ADDR to an address of this host that they can reach, the same for all ranks",
            place.world - place.local_world,
            place.world
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
fn host(place: &Place, job: &Job, own: &Own, deadline: Deadline) -> Result<Vec<Option<TcpStream>>> {
    let listeners = listen(place, job)?;
    let mut arrivals: Vec<Arrival> = Vec::new();
    let outcome = gather(&listeners, place, own, deadline, &mut arrivals);
    let mut message = match &outcome {
        Ok(()) => vec![b'y'],
        Err(_) => vec![b'n'],
    };
    let mut text = String::new();
    match &outcome {
        Ok(()) => {
            arrivals.sort_by_key(|arrival| arrival.visitor.rank);
            arrivals.iter().for_each(|arrival| text += &format!("{} {}\n", arrival.ip, arrival.visitor.port));
        }
        Err(error) => text = error.to_string(),
    }
    message.extend((text.len() as u32).to_le_bytes());
    message.extend(text.into_bytes());
    for Arrival { socket, .. } in &mut arrivals {
        // A rank that cannot be notified notices the closed connection.
        let _ = socket.set_nonblocking(false).and_then(|()| write_by(socket, &message, Deadline::after(TELLING)));
    }
    outcome?;
    Ok(std::iter::once(None).chain(arrivals.into_iter().map(|arrival| Some(arrival.socket))).collect())
}

/// Accepts ranks until all are connected.
fn gather(
    listeners: &[TcpListener],
    place: &Place,
    own: &Own,
    deadline: Deadline,
    arrivals: &mut Vec<Arrival>,
) -> Result<()> {
    let mut gate = Gate::new(listeners, own)?;
    while arrivals.len() + 1 < place.world {
        let here: Vec<&TcpStream> = arrivals.iter().map(|arrival| &arrival.socket).collect();
        let arrival = match gate.next(&here, deadline)? {
            Event::Arrived(arrival) => arrival,
            Event::Ended(at) => {
                let Arrival { socket, visitor, .. } = &arrivals[at];
                return setup(match tcp::parting(socket) {
                    Some(reason) => format!("rank {} aborted: {reason}", visitor.rank),
                    None => format!("rank {} ended before all ranks were connected", visitor.rank),
                });
            }
            Event::Over => {
                let is_here = |rank: &usize| arrivals.iter().any(|arrival| arrival.visitor.rank == *rank);
                let missing: Vec<usize> = (1..place.world).filter(|rank| !is_here(rank)).collect();
                let (host, port) = &place.master;
                return setup(format!(
                    "{} of {} did not connect to {host}:{port} within {}{}\n  help: check why they did not start; TILEWRIGHT_START_TIMEOUT=SECONDS raises the limit",
                    ranks(&missing),
                    place.world,
                    seconds(&deadline.patience),
                    gate.turned_away()
                ));
            }
        };
        let visitor = arrival.visitor;
        let taken = visitor.rank == 0 || arrivals.iter().any(|other| other.visitor.rank == visitor.rank);
        // It gets the error message too.
        arrivals.push(arrival);
        if visitor.world != place.world {
            return setup(format!(
                "rank {} has world size {}, rank 0 has {}",
                visitor.rank, visitor.world, place.world
            ));
        }
        if taken || visitor.rank >= place.world {
            return setup(format!("two processes claim rank {}", visitor.rank));
        }
    }
    Ok(())
}

/// Runs the rendezvous on all other ranks. On failure, the connected ranks get the reason.
fn join(place: &Place, job: &Job, own: &Own, deadline: Deadline) -> Result<Vec<Option<TcpStream>>> {
    let mut peers: Vec<Option<TcpStream>> = (0..place.world).map(|_| None).collect();
    match connect_peers(place, job, own, deadline, &mut peers) {
        Ok(()) => Ok(peers),
        Err(error) => {
            tcp::part(peers.iter().flatten(), &error.to_string());
            Err(error)
        }
    }
}

fn connect_peers(
    place: &Place,
    job: &Job,
    own: &Own,
    deadline: Deadline,
    peers: &mut [Option<TcpStream>],
) -> Result<()> {
    let (name, port) = &place.master;
    let (rank, world) = (place.rank, place.world);
    let broken = |what: &str, error: std::io::Error| CommError::Setup(format!("rank {rank}: {what}: {error}"));
    let help = "rank 0 has to run there; MASTER_ADDR and MASTER_PORT have to be the same for all ranks";
    let mut listener = None;
    let socket = reach((name, *port), job, deadline, help, |socket, brief| {
        // Other ranks reach this rank at the address from which it reaches rank 0.
        if listener.is_none() {
            let ip = socket.local_addr().map(|address| address.ip());
            listener = ip.and_then(|ip| TcpListener::bind((ip, 0))).ok();
        }
        let port =
            listener.as_ref().and_then(|listener| listener.local_addr().ok()).map_or(0, |address| address.port());
        greet(socket, own, 0, port, brief, deadline)
    })?;
    let socket = peers[0].insert(socket);
    let Some(listener) = listener else { return setup(format!("rank {rank} has no port for the other ranks")) };
    let list = roster(socket, place, deadline)?;
    let master = socket.peer_addr().map_err(|error| broken("lost the connection to rank 0", error))?.ip();
    for (index, line) in list.lines().enumerate().take(rank - 1) {
        let to = index + 1;
        let address = line.split_once(' ').and_then(|(ip, port)| Some((ip.parse().ok()?, port.parse().ok()?)));
        let Some((ip, port)): Option<(IpAddr, u16)> = address else {
            return setup(format!("rank 0 sent an invalid address: `{}`", printable(line)));
        };
        // A loopback address was seen by rank 0: use rank 0's address instead.
        let ip = if ip.to_canonical().is_loopback() { master } else { ip };
        let peer =
            reach((&ip.to_string(), port), job, deadline, "all ranks have to reach each other", |socket, brief| {
                greet(socket, own, to, 0, brief, deadline)
            });
        let peer = peer.map_err(|error| CommError::Setup(format!("rank {rank} cannot reach rank {to}: {error}")))?;
        peers[to] = Some(peer);
    }
    let listeners = [listener];
    let mut gate = Gate::new(&listeners, own)?;
    let (mut deadline, mut ended) = (deadline, None);
    while let Some(missing) = (rank + 1..world).find(|&rank| peers[rank].is_none()) {
        let here: Vec<(usize, &TcpStream)> =
            peers.iter().enumerate().filter_map(|(rank, peer)| Some((rank, peer.as_ref()?))).collect();
        let watched: Vec<&TcpStream> = here.iter().filter(|_| ended.is_none()).map(|(_, socket)| *socket).collect();
        match gate.next(&watched, deadline)? {
            Event::Arrived(Arrival { socket, visitor, .. }) => {
                if visitor.rank <= rank || visitor.rank >= world || peers[visitor.rank].is_some() {
                    return setup(format!("two processes claim rank {}", visitor.rank));
                }
                peers[visitor.rank] = Some(socket);
            }
            // It may have finished the rendezvous already. If it failed because of the missing rank, that rank will not
            // connect.
            Event::Ended(at) => {
                let (other, socket) = here[at];
                if let Some(reason) = tcp::parting(socket) {
                    return setup(format!("rank {other} aborted: {reason}"));
                }
                ended = Some(other);
                deadline = Deadline::after(GREETING.min(deadline.left()));
            }
            Event::Over => {
                let after = ended.map_or(String::new(), |ended| format!(" after rank {ended} had ended"));
                return setup(format!(
                    "rank {missing} did not connect to rank {rank} within {}{after}{}",
                    seconds(&deadline.patience),
                    gate.turned_away()
                ));
            }
        }
    }
    Ok(())
}

/// Receives the address list, or the reason for which rank 0 aborts.
fn roster(socket: &mut TcpStream, place: &Place, deadline: Deadline) -> Result<String> {
    let (name, port) = &place.master;
    // Rank 0 times out first, and sends the reason.
    let deadline = Deadline::after(deadline.left() + GREETING);
    let gone = |error: std::io::Error| match error.kind() {
        ErrorKind::TimedOut => {
            CommError::Setup(format!("rank 0 at {name}:{port} no longer answers rank {}", place.rank))
        }
        _ => CommError::Setup(format!("rank 0 at {name}:{port} ended before all ranks were connected")),
    };
    let mut head = [0; 5];
    read_by(socket, &mut head, deadline).map_err(gone)?;
    let length = u32::from_le_bytes([head[1], head[2], head[3], head[4]]) as usize;
    let (is_list, most) = match head[0] {
        b'y' => (true, LONGEST_LINE * place.world),
        _ => (false, LONGEST_REASON),
    };
    let mut text = vec![0; length.min(most)];
    read_by(socket, &mut text, deadline).map_err(gone)?;
    match is_list {
        true => Ok(String::from_utf8_lossy(&text).into_owned()),
        false => setup(printable_lines(&text)),
    }
}

/// Connects to a listening rank and runs the handshake; retries until the deadline. Another program at this address may
/// be gone soon.
fn reach(
    (host, port): (&str, u16),
    job: &Job,
    deadline: Deadline,
    help: &str,
    mut greets: impl FnMut(&mut TcpStream, Deadline) -> Result<(), Why>,
) -> Result<TcpStream> {
    let mut last = String::from("it has no address");
    let mut met: Option<Why> = None;
    loop {
        let addresses = (host, port).to_socket_addrs();
        if let Err(error) = &addresses {
            last = error.to_string();
        }
        for address in addresses.into_iter().flatten() {
            check_access(job, address.ip())?;
            let mut socket = match TcpStream::connect_timeout(&address, deadline.left().clamp(PAUSE, CONNECT)) {
                Ok(socket) => socket,
                Err(error) => {
                    last = error.to_string();
                    continue;
                }
            };
            let brief = Deadline::after(GREETING.min(deadline.left().max(PAUSE)));
            match greets(&mut socket, brief) {
                Ok(()) => return Ok(socket),
                // Other handshake errors are more specific than a missing reply.
                Err(Why::Silent) if met.is_some() => {}
                Err(why) => met = Some(why),
            }
        }
        if deadline.is_over() {
            let after = seconds(&deadline.patience);
            return match met {
                Some(why) => {
                    setup(format!("no rank of this job answers at {host}:{port} after {after}: {}", why.of_listener()))
                }
                None => setup(format!("nobody answers at {host}:{port} after {after} ({last})\n  help: {help}")),
            };
        }
        std::thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// A job of `world` ranks on this host; the tests act as some of them.
    struct Play {
        world: usize,
        port: u16,
        job: Job,
        options: Options,
    }

    impl Play {
        fn new(world: usize) -> Play {
            let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
            let options = Options { start_timeout: Duration::from_secs(120), ..Options::default() };
            Play { world, port, job: Job::fresh("test").unwrap(), options }
        }

        fn place(&self, rank: usize) -> Place {
            let master = ("127.0.0.1".into(), self.port);
            Place { rank, world: self.world, local_rank: rank, local_world: self.world, master, ..Place::alone() }
        }

        fn deadline(&self) -> Deadline {
            Deadline::after(self.options.start_timeout)
        }

        /// Runs a rank's rendezvous.
        fn sockets(&self, rank: usize) -> Result<Vec<Option<TcpStream>>> {
            sockets(&self.place(rank), &self.job, "ranks", self.options)
        }

        /// Connects as `rank` to the listening rank `to`.
        fn come(&self, rank: usize, to: usize, port: u16) -> TcpStream {
            let own = Own::new(&self.place(rank), &self.job, "ranks");
            let greets = |socket: &mut TcpStream, brief: Deadline| greet(socket, &own, to, 1, brief, self.deadline());
            reach(("127.0.0.1", port), &self.job, self.deadline(), "", greets).unwrap()
        }

        /// Receives the address list as `rank`.
        fn roster(&self, rank: usize, socket: &mut TcpStream) -> Result<String> {
            roster(socket, &self.place(rank), self.deadline())
        }
    }

    /// Rank 2 connects to rank 0, and ends before it connects to rank 1; rank 0 notices, and ends too.
    #[test]
    fn a_rank_does_not_wait_for_one_that_ended_after_all_had_come() {
        let (play, began) = (Play::new(3), Instant::now());
        let error = std::thread::scope(|scope| {
            scope.spawn(|| drop(play.sockets(0).unwrap()));
            scope.spawn(|| drop(play.roster(2, &mut play.come(2, 0, play.port)).unwrap()));
            play.sockets(1).unwrap_err().to_string()
        });
        assert!(error.contains("rank 2 did not connect to rank 1 within 5 s after rank 0 had ended"), "{error}");
        assert!(began.elapsed() < Duration::from_secs(100));
    }

    #[test]
    fn a_rank_that_fails_before_all_have_come_says_why() {
        let play = Play::new(4);
        std::thread::scope(|scope| {
            let zero = scope.spawn(|| play.sockets(0).unwrap_err().to_string());
            let mut first = play.come(1, 0, play.port);
            tcp::part([&play.come(2, 0, play.port)].into_iter(), "it has no GPU");
            let one = play.roster(1, &mut first).unwrap_err().to_string();
            for error in [zero.join().unwrap(), one] {
                assert_eq!(error, "rank 2 aborted: it has no GPU");
            }
        });
    }

    /// Rank 2 is connected to rank 1, which still waits for rank 3, when it fails.
    #[test]
    fn a_rank_that_fails_while_it_connects_says_why() {
        let play = Play::new(4);
        std::thread::scope(|scope| {
            // Its sockets stay open until the end.
            let zero = scope.spawn(|| play.sockets(0));
            let one = scope.spawn(|| play.sockets(1).unwrap_err().to_string());
            scope.spawn(|| drop(play.roster(3, &mut play.come(3, 0, play.port)).unwrap()));
            let mut first = play.come(2, 0, play.port);
            let list = play.roster(2, &mut first).unwrap();
            let port = list.lines().next().and_then(|line| line.split(' ').nth(1)).unwrap().parse().unwrap();
            let second = play.come(2, 1, port);
            tcp::part([&first, &second].into_iter(), "it has no GPU");
            drop((first, second));
            assert_eq!(one.join().unwrap(), "rank 2 aborted: it has no GPU");
            drop(zero.join().unwrap());
        });
    }
}
