//! A program without LLVM: runs a kernel on a simulated GPU, and as native code that was compiled ahead of time. A launch
//! that has to compile native code is an error.

use std::ffi::c_void;

use tilewright::codegen::target::HostHooks;
use tilewright::kernel::KernelArg;
use tilewright::precompiled::PrecompiledKernel;
use tilewright::prelude::*;

#[path = "../../kernel.rs"]
mod kernel;
use kernel::Double;

unsafe extern "C" {
    fn tilewright_double(
        args: *const *const c_void,
        pid: *const [i32; 3],
        num_programs: *const [i32; 3],
        arena: *mut u8,
        hooks: *const HostHooks,
    ) -> i32;
}

fn main() -> Result<()> {
    let device = Device::simulated(GpuArch::Sm90a);
    let x = Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0])?;
    let mut y = Buffer::<f32>::zeros(&device, 3)?;
    Double { x: &x, y: &mut y, n: 3, tile: 4 }.launch(&device, 1)?;
    println!("simulated GPU: {:?}", y.to_vec()?);

    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0])?;
    let mut y = Buffer::<f32>::zeros(&device, 3)?;
    // SAFETY: the build links the object that `with-llvm` wrote with this manifest, on this machine.
    let double = unsafe { PrecompiledKernel::linked(include_str!(env!("MANIFEST")), tilewright_double) }?;
    double.launch(1, &mut [KernelArg::In(&x), KernelArg::Out(&mut y), KernelArg::scalar(3i32)])?;
    println!("precompiled: {:?}", y.to_vec()?);
    let refused = double.launch(1, &mut [KernelArg::In(&x), KernelArg::Out(&mut y), KernelArg::scalar(4i32)]);
    println!("refused: {}", refused.unwrap_err());

    let failed = Double { x: &x, y: &mut y, n: 3, tile: 4 }.launch(&device, 1);
    println!("not compiled: {}", failed.unwrap_err());
    Ok(())
}
