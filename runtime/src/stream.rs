//! Queues of work on a device (streams), and events in them.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use cudarc::driver::{CudaEvent, CudaStream, DriverError, result, sys};

use crate::device::{Cuda, Device, Inner, driver_version, same_device};
use crate::error::{Error, ErrorContext, Result};

/// An ordered queue of work. On the CPU work runs immediately, and every queue is always empty.
#[derive(Clone)]
pub struct Stream {
    device: Device,
    cuda: Option<Arc<CudaStream>>,
}

/// A point in a stream. On the CPU, a point in time.
pub struct Event {
    device: Device,
    point: Point,
}

enum Point {
    Cpu(Instant),
    Cuda(CudaEvent),
}

impl Stream {
    pub(crate) fn default_of(device: &Device) -> Stream {
        let cuda = match device.inner() {
            Inner::Cpu(_) | Inner::Simulated(_) => None,
            Inner::Cuda(cuda) => Some(cuda.stream.clone()),
        };
        Stream { device: device.clone(), cuda }
    }

    pub(crate) fn new(device: &Device) -> Result<Stream> {
        let cuda = match device.inner() {
            Inner::Cpu(_) | Inner::Simulated(_) => None,
            Inner::Cuda(cuda) => {
                Some(cuda.context.new_stream().context(&format!("opening a stream on {}", cuda.label))?)
            }
        };
        Ok(Stream { device: device.clone(), cuda })
    }

    /// The device that the work runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// cudarc's handle; `None` on the CPU.
    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        self.cuda.as_ref()
    }

    /// Records an event after the work that is queued now.
    pub fn record(&self) -> Result<Event> {
        let point = match self.cuda_parts() {
            None => Point::Cpu(Instant::now()),
            Some((cuda, stream)) => {
                let flags = sys::CUevent_flags::CU_EVENT_DEFAULT;
                Point::Cuda(stream.record_event(Some(flags)).context(&format!("recording an event on {}", cuda.label))?)
            }
        };
        Ok(Event { device: self.device.clone(), point })
    }

    /// Makes work that is queued here from now on wait for `event`.
    pub fn wait(&self, event: &Event) -> Result<()> {
        match (self.cuda_parts(), &event.point) {
            (Some((cuda, stream)), Point::Cuda(event)) => {
                stream.wait(event).context(&format!("waiting for an event on {}", cuda.label))
            }
            (None, Point::Cpu(_)) => Ok(()),
            (Some(_), Point::Cpu(_)) | (None, Point::Cuda(_)) => {
                same_device("waiting for an event", &self.device, &event.device)
            }
        }
    }

    /// Waits until all work queued here is done.
    ///
    /// # Errors
    /// A failure of that work.
    pub fn synchronize(&self) -> Result<()> {
        match self.cuda_parts() {
            None => Ok(()),
            Some((cuda, stream)) => cuda.synchronize(stream),
        }
    }

    fn cuda_parts(&self) -> Option<(&Cuda, &Arc<CudaStream>)> {
        match (self.device.inner(), &self.cuda) {
            (Inner::Cuda(cuda), Some(stream)) => Some((cuda, stream)),
            (Inner::Cuda(_) | Inner::Cpu(_) | Inner::Simulated(_), _) => None,
        }
    }
}

impl Event {
    /// Waits until the work before this event is done.
    pub fn synchronize(&self) -> Result<()> {
        match (&self.point, self.device.inner()) {
            (Point::Cuda(event), Inner::Cuda(cuda)) => {
                event.synchronize().map_err(|e| cuda.failure(&format!("running kernels on {}", cuda.label), e))
            }
            (Point::Cuda(_) | Point::Cpu(_), _) => Ok(()),
        }
    }

    /// Whether the work before this event is done, without waiting.
    pub fn is_done(&self) -> Result<bool> {
        match (&self.point, self.device.inner()) {
            (Point::Cuda(event), Inner::Cuda(cuda)) => {
                cuda.bind()?;
                // SAFETY: the event is live.
                match unsafe { sys::cuEventQuery(event.cu_event()) } {
                    sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
                    other => {
                        let done = other.result().map(|()| true);
                        done.map_err(|e| cuda.failure(&format!("running kernels on {}", cuda.label), e))
                    }
                }
            }
            (Point::Cuda(_) | Point::Cpu(_), _) => Ok(true),
        }
    }

    /// Time from `start` to this event, after waiting for both. On a GPU it is measured by the GPU's clock (resolution
    /// about 0.5 µs).
    pub fn elapsed_since(&self, start: &Event) -> Result<Duration> {
        match (&start.point, &self.point) {
            (Point::Cpu(start), Point::Cpu(end)) => Ok(end.saturating_duration_since(*start)),
            (Point::Cuda(from), Point::Cuda(to)) => {
                start.synchronize()?;
                self.synchronize()?;
                let ms = elapsed_ms(from, to).context("reading the time between two events")?;
                Ok(Duration::from_secs_f64(ms.max(0.0) as f64 / 1e3))
            }
            (Point::Cpu(_), Point::Cuda(_)) | (Point::Cuda(_), Point::Cpu(_)) => Err(Error::DifferentDevices {
                what: "the time between two events",
                left: start.device.to_string(),
                right: self.device.to_string(),
            }),
        }
    }
}

type ElapsedTime = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// Milliseconds between two completed events.
///
/// cudarc binds `cuEventElapsedTime_v2`, which drivers before CUDA 12.8 lack; for those this calls the first version.
fn elapsed_ms(from: &CudaEvent, to: &CudaEvent) -> Result<f32, DriverError> {
    from.context().bind_to_thread()?;
    if driver_version().is_ok_and(|version| version >= 12080) {
        // SAFETY: both events are live.
        return unsafe { result::event::elapsed(from.cu_event(), to.cu_event()) };
    }
    static FIRST_VERSION: OnceLock<Result<ElapsedTime, DriverError>> = OnceLock::new();
    let elapsed = (*FIRST_VERSION.get_or_init(|| {
        let mut address = std::ptr::null_mut();
        let mut status = sys::CUdriverProcAddressQueryResult::CU_GET_PROC_ADDRESS_SUCCESS;
        // SAFETY: the name is zero-terminated, and both pointers are valid for writes; the function of this name has
        // had this signature since CUDA 2.0.
        unsafe {
            sys::cuGetProcAddress_v2(c"cuEventElapsedTime".as_ptr(), &mut address, 11040, 0, &mut status).result()?;
            if address.is_null() {
                return Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_FOUND));
            }
            Ok(std::mem::transmute::<*mut std::ffi::c_void, ElapsedTime>(address))
        }
    }))?;
    let mut ms = 0.0;
    // SAFETY: both events are live, and `ms` is valid for the write.
    unsafe { elapsed(&mut ms, from.cu_event(), to.cu_event()) }.result()?;
    Ok(ms)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_on_the_cpu_measure_wall_time() {
        let stream = Device::cpu().stream();
        let start = stream.record().unwrap();
        std::thread::sleep(Duration::from_millis(3));
        let end = stream.record().unwrap();
        assert!(end.is_done().unwrap());
        assert!(end.elapsed_since(&start).unwrap() >= Duration::from_millis(3));
        stream.wait(&end).unwrap();
        stream.synchronize().unwrap();
    }
}
