//! Runs a kernel on the CPU, and compiles it ahead of time into the folder that the command line names.

use tilewright::codegen::lang::kernel::{ConstValue, Specialization};
use tilewright::codegen::target::{Code, CompileOptions, HostCpu, Target};
use tilewright::precompiled::Document;
use tilewright::prelude::*;

#[path = "../../kernel.rs"]
mod kernel;
use kernel::{DOUBLE, Double};

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let device = Device::cpu();
    let x = Buffer::from_slice(&device, &[1.0f32, 2.0, 3.0])?;
    let mut y = Buffer::<f32>::zeros(&device, 3)?;
    Double { x: &x, y: &mut y, n: 3, tile: 4 }.launch(&device, 1)?;
    println!("CPU: {:?}", y.to_vec()?);

    let folder = std::path::PathBuf::from(std::env::args().nth(1).ok_or("expected a folder")?);
    let (constants, options) = ([("tile", ConstValue::Int(4))], CompileOptions::default());
    let aligned = Specialization::aligned_memory(&DOUBLE);
    let target = Target::Host(HostCpu::native());
    let artifact = tilewright::kernel::compile(&DOUBLE, &[], &constants, &aligned, &target, &options)?;
    let Code::Object(object) = &artifact.code else { return Err("expected an object file".into()) };
    let files = [("obj", "double.o".to_string())];
    let document = Document::new(&DOUBLE, &[], &constants, &options, &artifact, &files);
    std::fs::write(folder.join("double.o"), object)?;
    std::fs::write(folder.join("manifest.json"), document.to_json())?;
    Ok(())
}
