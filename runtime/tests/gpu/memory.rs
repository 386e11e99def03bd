//! Buffers of a GPU.

use half::bf16;
use tilewright_runtime::{Buffer, Device, Error};

use crate::gpu;

#[test]
fn device_info_is_plausible() {
    let Some(device) = gpu() else { return };
    let info = device.info();
    println!("{}: {info:?}, PTX up to {:?}", *device, device.max_ptx_version());
    assert!(info.compute_units > 0 && info.l2_bytes > 0 && info.memory_bytes > 1 << 30);
    assert!(info.max_shared_bytes >= 99 * 1024);
    assert!(device.max_ptx_version() >= Some(80));
    assert!(device.to_string().starts_with("GPU 0 ("));
    let (free, total) = device.free_and_total_memory().unwrap().unwrap();
    assert!(free <= total && total == info.memory_bytes);
}

#[test]
fn contents_survive_the_round_trip() {
    let Some(device) = gpu() else { return };
    let values: Vec<i32> = (0..100_003).collect();
    let mut buffer = Buffer::from_slice(&device, &values).unwrap();
    assert_eq!(buffer.to_vec().unwrap(), values);
    assert_eq!(buffer.address() % 256, 0);
    assert_eq!(buffer.slice(70..73).unwrap().to_vec().unwrap(), [70, 71, 72]);
    let clone = buffer.try_clone().unwrap();
    buffer.slice_mut(1..3).unwrap().copy_from_slice(&[-1, -2]).unwrap();
    assert_eq!(buffer.slice(..4).unwrap().to_vec().unwrap(), [0, -1, -2, 3]);
    assert_eq!(clone.to_vec().unwrap(), values);
    let on_cpu = clone.to_device(&Device::cpu()).unwrap();
    assert_eq!(on_cpu.to_vec().unwrap(), values);
    assert!(buffer.copy_from(on_cpu.view()).unwrap_err().to_string().contains("the CPU"));
}

#[test]
fn fresh_buffers_are_zeros_or_poison() {
    let Some(device) = gpu() else { return };
    assert_eq!(Buffer::<i64>::zeros(&device, 9).unwrap().to_vec().unwrap(), [0; 9]);
    let poison = Buffer::<bf16>::poisoned(&device, 9).unwrap().to_vec().unwrap();
    assert!(poison.iter().all(|x| x.is_nan()));
    assert_eq!(Buffer::<bool>::poisoned(&device, 3).unwrap().to_vec().unwrap(), [true; 3]);
    assert!(Buffer::<f32>::zeros(&device, 0).unwrap().to_vec().unwrap().is_empty());
}

#[test]
fn out_of_memory_is_an_error() {
    let Some(device) = gpu() else { return };
    let elements = device.info().memory_bytes as usize / 8 * 2;
    let error = Buffer::<f64>::uninit(&device, elements).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { .. }), "{error}");
    // The device is still usable.
    assert_eq!(Buffer::<u8>::zeros(&device, 2).unwrap().to_vec().unwrap(), [0, 0]);
    device.release_unused_memory().unwrap();
}
