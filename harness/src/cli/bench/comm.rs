//! `tilewright bench comm`: times collectives by size, number of ranks and backend, and checks their results.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Instant;

use candle_core::Device;
use clap::{Args, ValueEnum};
use tilewright::{Buffer, check_host_memory};
use tilewright_candle::memory::kernel_device;

use super::process_groups::{CommBackend, comm_failure, for_each_process_group};
use crate::cli::Result;
use crate::cli::model_options::model_device;
use crate::dist::comm::handle::wait_all;
use crate::dist::comm::{Call, CommError, Communicator, Dtype, Handle, Op, Reduce};
use crate::report::plot::Point;
use crate::report::{Axis, Cell, Column, Outputs, Plot, Report, Series, Table};
use tilewright_cli::device::{self, DeviceArg};

/// Without a launcher (`tilewright launch`, mpirun, torchrun, srun), ranks are threads of this process.
#[derive(Args)]
pub struct Arguments {
    /// Collectives, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [Collective::AllReduce])]
    collective: Vec<Collective>,
    /// Sizes of each rank's f32 buffer, in megabytes (10⁶ bytes)
    #[arg(long, value_name = "MB,…", value_delimiter = ',', default_values_t = [0.512, 1.0, 10.0, 50.0, 100.0, 500.0, 1000.0], value_parser = crate::cli::value_parsers::size_mb)]
    sizes: Vec<f64>,
    /// Numbers of ranks, if they are threads of this process
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<u16>,
    /// Communication backends, if ranks are threads of this process
    #[arg(long, alias = "back-end", value_enum, value_delimiter = ',', default_values_t = [CommBackend::Threads, CommBackend::Tcp])]
    backend: Vec<CommBackend>,
    /// Device of the buffers: cpu, cuda or cuda:N. Default: a GPU if there is one
    #[arg(long, value_parser = device::parse)]
    device: Option<DeviceArg>,
    /// Use copy engines between GPUs of one host, for all_reduce, reduce_scatter and all_gather
    #[arg(long)]
    copy_engines: bool,
    /// Number of warm-up collectives
    #[arg(long, value_name = "N", default_value_t = 5)]
    warmup: u32,
    /// Number of timed collectives of each size
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    #[command(flatten)]
    outputs: Outputs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
enum Collective {
    AllReduce,
    ReduceScatter,
    AllGather,
    Broadcast,
}

/// Times of one collective at one size in one world, over all ranks.
struct Sample {
    backend: &'static str,
    ranks: usize,
    collective: Collective,
    bytes: usize,
    seconds: Vec<f64>,
}

pub fn run(arguments: &Arguments, out: &mut dyn Write) -> Result<()> {
    arguments.outputs.check()?;
    let device = model_device(arguments.device)?;
    let measure = |comm: Communicator| measure(arguments, &device, &comm).map_err(comm_failure);
    let worlds = for_each_process_group(&device, &arguments.backend, &arguments.ranks, measure)?;
    if worlds.is_empty() {
        return Ok(());
    }
    let samples: Vec<Sample> = worlds.into_iter().flatten().collect();
    Ok(arguments.outputs.write(report(&samples), out)?)
}

/// Measures on one rank. Every rank returns the samples of all ranks.
fn measure(arguments: &Arguments, device: &Device, comm: &Communicator) -> Result<Vec<Sample>, CommError> {
    let world = comm.world();
    comm.set_overlap_copy_engines(arguments.copy_engines)?;
    let copies = arguments.copy_engines && comm.is_on_device();
    let mut samples = Vec::new();
    for &collective in &arguments.collective {
        for &mb in &arguments.sizes {
            // A multiple of the world size: every rank has a chunk of equal size.
            let count = ((mb * 1e6 / 4.0) as usize).next_multiple_of(world).max(world);
            // Each rank allocates its buffer, and then a copy for `check` or, in f64, the times of all ranks. All ranks
            // may be on this host.
            let buffer = 4.0 * count as f64;
            let buffer_on_host = if device.is_cpu() { buffer } else { 0.0 };
            let times = f64::from(arguments.warmup) + f64::from(arguments.repeat) * world as f64;
            let bytes = (buffer_on_host + buffer.max(8.0 * times)) * world as f64;
            check_host_memory(bytes).map_err(|error| CommError::Setup(error.to_string()))?;
            let mut data = Data::new(device, vec![(comm.rank() + 1) as f32; count])?;
            data.calls(comm, collective, copies, &mut [0.0])?;
            check(comm, collective, &data.to_vec()?)?;
            data.calls(comm, collective, copies, &mut vec![0.0; arguments.warmup as usize])?;
            let mut all = vec![0.0_f64; world * arguments.repeat as usize];
            let own = &mut all[comm.rank() * arguments.repeat as usize..][..arguments.repeat as usize];
            data.calls(comm, collective, copies, own)?;
            comm.all_gather(&mut all)?;
            let bytes = count * size_of::<f32>();
            let backend = if copies && collective != Collective::Broadcast { "copies" } else { comm.backend() };
            samples.push(Sample { backend, ranks: world, collective, bytes, seconds: all });
        }
    }
    Ok(samples)
}

/// A buffer in the memory that the communicator uses.
enum Data {
    Host(Vec<f32>),
    Gpu(Buffer<f32>),
}

impl Data {
    fn new(device: &Device, values: Vec<f32>) -> Result<Data, CommError> {
        if device.is_cpu() {
            return Ok(Data::Host(values));
        }
        let device = kernel_device(device).map_err(|error| CommError::Setup(error.to_string()))?;
        Ok(Data::Gpu(Buffer::from_slice(device, &values).map_err(|error| CommError::Setup(error.to_string()))?))
    }

    fn to_vec(&self) -> Result<Vec<f32>, CommError> {
        match self {
            Data::Host(values) => Ok(values.clone()),
            Data::Gpu(buffer) => buffer.to_vec().map_err(|error| CommError::Setup(error.to_string())),
        }
    }

    /// Runs `seconds.len()` collectives and stores the time of each. On the CPU, a barrier precedes each collective. On
    /// a GPU, they are enqueued back to back and timed by events, so that the handshake of a collective overlaps with
    /// the previous collective, as in training.
    fn calls(
        &mut self,
        comm: &Communicator,
        collective: Collective,
        copies: bool,
        seconds: &mut [f64],
    ) -> Result<(), CommError> {
        let op = match collective {
            // After the first call all ranks hold the average, which further averaging does not change.
            Collective::AllReduce => Op::AllReduce(Reduce::Avg),
            Collective::ReduceScatter => Op::ReduceScatter(Reduce::Avg),
            Collective::AllGather => Op::AllGather,
            Collective::Broadcast => Op::Broadcast { root: 0 },
        };
        let (address, count) = match self {
            Data::Host(values) => (values.as_mut_ptr().cast(), values.len()),
            Data::Gpu(buffer) => (buffer.view_mut().address() as *mut u8, buffer.len()),
        };
        let call = Call { op, dtype: Dtype::F32, count, comm_dtype: None };
        // SAFETY: the buffer is owned by `self`, and all collectives complete before this function returns; on a GPU
        // the stream orders them.
        let start = || unsafe { if copies { comm.start_overlapped(call, address) } else { comm.start(call, address) } };
        comm.barrier()?;
        if !comm.is_on_device() {
            return seconds.iter_mut().try_for_each(|seconds| {
                comm.barrier()?;
                let began = Instant::now();
                start()?.wait()?;
                *seconds = began.elapsed().as_secs_f64();
                Ok(())
            });
        }
        let handles: Vec<Handle> = seconds.iter().map(|_| start()).collect::<Result<_, _>>()?;
        wait_all(&handles)?;
        for (seconds, handle) in seconds.iter_mut().zip(&handles) {
            handle.synchronize()?;
            *seconds = handle.device_seconds().unwrap_or(f64::NAN);
        }
        comm.failure().map_or(Ok(()), |error| Err(error.clone()))
    }
}

/// Checks the result of a collective whose input on rank r is r + 1.
fn check(comm: &Communicator, collective: Collective, data: &[f32]) -> Result<(), CommError> {
    let (rank, world, each) = (comm.rank(), comm.world(), data.len() / comm.world());
    let average = (world + 1) as f32 / 2.0;
    let right = match collective {
        Collective::AllReduce => data.iter().all(|&x| x == average),
        Collective::ReduceScatter => data[rank * each..(rank + 1) * each].iter().all(|&x| x == average),
        Collective::AllGather => {
            data.chunks(each).enumerate().all(|(r, chunk)| chunk.iter().all(|&x| x == (r + 1) as f32))
        }
        Collective::Broadcast => data.iter().all(|&x| x == 1.0),
    };
    match right {
        true => Ok(()),
        false => Err(CommError::Setup(format!("wrong result of {} on rank {rank}", name(collective)))),
    }
}

fn name(collective: Collective) -> &'static str {
    match collective {
        Collective::AllReduce => "all_reduce",
        Collective::ReduceScatter => "reduce_scatter",
        Collective::AllGather => "all_gather",
        Collective::Broadcast => "broadcast",
    }
}

/// Returns the ratio of bus bandwidth to algorithm bandwidth, as in nccl-tests: bytes over a link per byte of the
/// buffer. Bus bandwidths of different collectives and world sizes are comparable.
fn bus_factor(collective: Collective, ranks: usize) -> f64 {
    let share = (ranks - 1) as f64 / ranks as f64;
    match collective {
        Collective::AllReduce => 2.0 * share,
        Collective::ReduceScatter | Collective::AllGather => share,
        Collective::Broadcast => 1.0,
    }
}

fn report(samples: &[Sample]) -> Report {
    let columns = [
        Column::text("backend"),
        Column::integer("ranks"),
        Column::text("collective"),
        Column::number("size").unit("MB"),
        Column::number("mean").unit("ms"),
        Column::number("median").unit("ms"),
        Column::number("algorithm bandwidth").unit("GB/s").key("algbw_gbps"),
        Column::number("bus bandwidth").unit("GB/s").key("busbw_gbps"),
    ];
    let mut table = Table::new("comm", "Collectives, over all ranks", columns);
    let mut lines: BTreeMap<String, Vec<Point>> = BTreeMap::new();
    for sample in samples {
        let mut seconds = sample.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        let median = (seconds[(seconds.len() - 1) / 2] + seconds[seconds.len() / 2]) / 2.0;
        let milliseconds: Vec<f64> = seconds.iter().map(|s| s * 1e3).collect();
        let (mb, algorithm) = (sample.bytes as f64 / 1e6, sample.bytes as f64 / median / 1e9);
        let bus = algorithm * bus_factor(sample.collective, sample.ranks);
        table.push([
            Cell::from(sample.backend),
            sample.ranks.into(),
            name(sample.collective).into(),
            mb.into(),
            Cell::statistics(&milliseconds),
            (median * 1e3).into(),
            algorithm.into(),
            bus.into(),
        ]);
        let line = format!("{} {}, {} ranks", sample.backend, name(sample.collective), sample.ranks);
        lines.entry(line).or_default().push(Point { x: mb, y: bus, error: None });
    }
    let series = lines.into_iter().map(|(name, points)| Series::new(&name, points)).collect();
    let (x, y) = (Axis::log10("size (MB)"), Axis::log10("bus bandwidth (GB/s)"));
    let table = table.note(
        "Bandwidths are computed from the median; the bus bandwidth of an all-reduce is 2 (n − 1) / n times its \
         algorithm bandwidth.",
    );
    Report::new("comm", "Time of collectives").table(table).plot(Plot::lines(
        "comm",
        "Bandwidth of collectives",
        x,
        y,
        series,
    ))
}
