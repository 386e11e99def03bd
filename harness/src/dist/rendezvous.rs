//! How processes that were started apart find each other: at rank 0's address.
//!
//! Every rank but 0 listens on a port of its own, connects to rank 0, and says who it is and where it listens. When all are there,
//! rank 0 sends everybody the list; rank i then connects to ranks 1 to i − 1. In the end there is a socket between every two ranks.
//! Whoever finds something wrong tells those whom it can tell, so that all ranks name the same reason.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

use super::comm::carrier::Deadline;
use super::comm::error::{ranks, seconds};
use super::comm::{CommError, Communicator, Options, Result, tcp};
use super::rank::Place;

const MAGIC: [u8; 8] = *b"twmeet01";
/// How often is looked whether somebody came.
const PAUSE: Duration = Duration::from_millis(5);
/// Nobody needs longer for a greeting once connected; strangers that say nothing must not hold up the ranks.
const GREETING: Duration = Duration::from_secs(5);
const LONGEST: usize = 1 << 20;

/// A communicator over sockets between the processes of a job.
///
/// # Errors
/// The port is in use, ranks are missing after [`Options::start_timeout`], two say that they are the same one, or they do not agree
/// how many they are.
pub fn connect(place: &Place, job: &str, options: Options) -> Result<Communicator> {
    tcp::over_sockets(place.rank, sockets(place, job, options)?, options)
}

/// The sockets themselves, by rank; none for this rank.
///
/// # Errors
/// As [`connect`].
pub(crate) fn sockets(place: &Place, job: &str, options: Options) -> Result<Vec<Option<TcpStream>>> {
    let deadline = Deadline::after(options.start_timeout);
    match (place.world, place.rank) {
        (1, _) => Ok(vec![None]),
        (_, 0) => host(place, job, deadline),
        _ => join(place, job, deadline),
    }
}

fn setup<T>(message: impl Into<String>) -> Result<T> {
    Err(CommError::Setup(message.into()))
}

/// Who somebody says to be.
struct Greeting {
    world: usize,
    rank: usize,
    port: u16,
    job: String,
}

/// Rank 0's part.
fn host(place: &Place, job: &str, deadline: Deadline) -> Result<Vec<Option<TcpStream>>> {
    let (name, port) = &place.master;
    let here = ["localhost", "127.0.0.1"].contains(&name.as_str());
    // A host's own name may mean an address that others cannot reach, so we listen on all of them.
    let address = SocketAddr::from((if here { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED }, *port));
    let listener = TcpListener::bind(address).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => CommError::Setup(format!(
            "port {port} on {name}, where the ranks were to meet, is in use by another program\n  help: set MASTER_PORT to a free port, the same for all ranks"
        )),
        _ => CommError::Setup(format!("rank 0 cannot listen on port {port}: {error}")),
    })?;
    let mut peers: Vec<Option<(TcpStream, u16)>> = (0..place.world).map(|_| None).collect();
    let outcome = gather(&listener, place, job, deadline, &mut peers);
    let farewell = outcome.as_ref().err().map(ToString::to_string);
    let mut list = String::new();
    for (socket, port) in peers.iter().flatten() {
        let ip = socket.peer_addr().map_or(IpAddr::V4(Ipv4Addr::LOCALHOST), |address| address.ip());
        list += &format!("{ip} {port}\n");
    }
    for (socket, _) in peers.iter_mut().flatten() {
        // Whoever cannot be told finds out by itself.
        let _ = match &farewell {
            None => send(socket, &format!("ok\n{list}")),
            Some(reason) => send(socket, &format!("no\n{reason}")),
        };
    }
    outcome?;
    Ok(peers.into_iter().map(|peer| peer.map(|(socket, _)| socket)).collect())
}

/// Accepts until all ranks are there.
fn gather(
    listener: &TcpListener,
    place: &Place,
    job: &str,
    deadline: Deadline,
    peers: &mut [Option<(TcpStream, u16)>],
) -> Result<()> {
    loop {
        let missing: Vec<usize> = (1..place.world).filter(|&rank| peers[rank].is_none()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        let Some(mut socket) = accept(listener, deadline)? else {
            let (host, port) = &place.master;
            return setup(format!(
                "{} of {} did not come to {host}:{port} within {}\n  help: see why they did not start; TILEWRIGHT_START_TIMEOUT=SECONDS waits longer",
                ranks(&missing),
                place.world,
                seconds(&deadline.patience)
            ));
        };
        // A stranger, or a rank of another job, is sent away.
        let Some(greeting) = greeted(&mut socket) else { continue };
        if greeting.job != job {
            let _ = send(&mut socket, "no\nanother job meets at this port; set MASTER_PORT to a free one");
            continue;
        }
        let wrong = if greeting.world != place.world {
            Some(format!("rank {} counts {} ranks, rank 0 counts {}", greeting.rank, greeting.world, place.world))
        } else if greeting.rank == 0 || greeting.rank >= place.world || peers[greeting.rank].is_some() {
            Some(format!("two processes say that they are rank {}", greeting.rank))
        } else {
            None
        };
        if let Some(wrong) = wrong {
            let _ = send(&mut socket, &format!("no\n{wrong}"));
            return setup(wrong);
        }
        peers[greeting.rank] = Some((socket, greeting.port));
    }
}

/// Everybody else's part.
fn join(place: &Place, job: &str, deadline: Deadline) -> Result<Vec<Option<TcpStream>>> {
    let (name, port) = &place.master;
    let broken = |what: &str, error: std::io::Error| CommError::Setup(format!("rank {}: {what}: {error}", place.rank));
    let mut socket = reach(name, *port, deadline)?;
    let here = socket.peer_addr().is_ok_and(|address| address.ip().is_loopback());
    let any = if here { Ipv4Addr::LOCALHOST } else { Ipv4Addr::UNSPECIFIED };
    let listener = TcpListener::bind((any, 0)).map_err(|error| broken("cannot listen", error))?;
    let own_port = listener.local_addr().map_err(|error| broken("cannot listen", error))?.port();
    greet(&mut socket, place, own_port, job).map_err(|error| broken("cannot greet rank 0", error))?;
    // Rank 0 gives up first, and says why.
    let patience = deadline.left() + GREETING;
    let answer = receive(&mut socket, patience).map_err(|error| match error.kind() {
        ErrorKind::WouldBlock | ErrorKind::TimedOut => {
            CommError::Setup(format!("rank 0 at {name}:{port} does not answer rank {} any more", place.rank))
        }
        _ => CommError::Setup(format!("rank 0 at {name}:{port} ended before all ranks had come")),
    })?;
    let list = match answer.split_once('\n') {
        Some(("ok", list)) => list,
        Some(("no", reason)) => return setup(reason),
        _ => return setup(format!("what answers at {name}:{port} is not rank 0 of a Tilewright job")),
    };
    let master = socket.peer_addr().map_err(|error| broken("rank 0 is gone", error))?.ip();
    let mut peers: Vec<Option<TcpStream>> = (0..place.world).map(|_| None).collect();
    peers[0] = Some(socket);
    for (index, line) in list.lines().enumerate().take(place.rank - 1) {
        let rank = index + 1;
        let address = line.split_once(' ').and_then(|(ip, port)| Some((ip.parse().ok()?, port.parse().ok()?)));
        let Some((ip, port)): Option<(IpAddr, u16)> = address else {
            return setup(format!("rank 0 sent an address that makes no sense: `{line}`"));
        };
        // What rank 0 sees on its own host is where we see rank 0.
        let ip = if ip.is_loopback() { master } else { ip };
        let mut peer = reach(&ip.to_string(), port, deadline)
            .map_err(|error| CommError::Setup(format!("rank {} cannot reach rank {rank}: {error}", place.rank)))?;
        greet(&mut peer, place, 0, job).map_err(|error| broken("cannot greet", error))?;
        peers[rank] = Some(peer);
    }
    while let Some(missing) = (place.rank + 1..place.world).find(|&rank| peers[rank].is_none()) {
        let Some(mut peer) = accept(&listener, deadline)? else {
            return setup(format!(
                "rank {missing} did not connect to rank {} within {}",
                place.rank,
                seconds(&deadline.patience)
            ));
        };
        match greeted(&mut peer) {
            Some(greeting) if greeting.job == job && greeting.rank < place.world => peers[greeting.rank] = Some(peer),
            _ => continue,
        }
    }
    Ok(peers)
}

/// Connects to where somebody listens, or will soon.
fn reach(host: &str, port: u16, deadline: Deadline) -> Result<TcpStream> {
    let mut last = String::from("it has no address");
    loop {
        let addresses = (host, port).to_socket_addrs();
        if let Err(error) = &addresses {
            last = error.to_string();
        }
        for address in addresses.into_iter().flatten() {
            match TcpStream::connect_timeout(&address, deadline.left().max(PAUSE)) {
                Ok(socket) => return Ok(socket),
                Err(error) => last = error.to_string(),
            }
        }
        if deadline.is_over() {
            return setup(format!(
                "nobody answers at {host}:{port} after {} ({last})\n  help: rank 0 has to run there; MASTER_ADDR and MASTER_PORT have to be the same for all ranks",
                seconds(&deadline.patience)
            ));
        }
        std::thread::sleep(PAUSE * 10);
    }
}

/// The next connection; `None` when time is over.
fn accept(listener: &TcpListener, deadline: Deadline) -> Result<Option<TcpStream>> {
    let failed = |error| CommError::Setup(format!("cannot accept a rank's connection: {error}"));
    listener.set_nonblocking(true).map_err(failed)?;
    loop {
        match listener.accept() {
            Ok((socket, _)) => {
                socket.set_nonblocking(false).map_err(failed)?;
                return Ok(Some(socket));
            }
            Err(error) if [ErrorKind::WouldBlock, ErrorKind::Interrupted].contains(&error.kind()) => {}
            Err(error) => return Err(failed(error)),
        }
        if deadline.is_over() {
            return Ok(None);
        }
        std::thread::sleep(PAUSE);
    }
}

fn greet(socket: &mut TcpStream, place: &Place, port: u16, job: &str) -> std::io::Result<()> {
    socket.write_all(&MAGIC)?;
    send(socket, &format!("{}\n{}\n{port}\n{job}", place.world, place.rank))
}

/// What a new connection says; `None` if it is not one of us.
fn greeted(socket: &mut TcpStream) -> Option<Greeting> {
    let mut magic = [0; MAGIC.len()];
    socket.set_read_timeout(Some(GREETING)).ok()?;
    socket.read_exact(&mut magic).ok()?;
    if magic != MAGIC {
        return None;
    }
    let text = receive(socket, GREETING).ok()?;
    let mut lines = text.splitn(4, '\n');
    let mut number = || lines.next()?.parse::<usize>().ok();
    let (world, rank, port) = (number()?, number()?, u16::try_from(number()?).ok()?);
    Some(Greeting { world, rank, port, job: lines.next()?.to_string() })
}

fn send(socket: &mut TcpStream, text: &str) -> std::io::Result<()> {
    socket.write_all(&(text.len() as u32).to_le_bytes())?;
    socket.write_all(text.as_bytes())
}

fn receive(socket: &mut TcpStream, patience: Duration) -> std::io::Result<String> {
    socket.set_read_timeout(Some(patience))?;
    let mut length = [0; 4];
    socket.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length];
    socket.read_exact(&mut text)?;
    String::from_utf8(text).map_err(|_| ErrorKind::InvalidData.into())
}
