//! Software-pipelined loops, and communication between threads through global memory, on GPU 0.

use super::gpu;
use tilewright_tests::loops::{check_pipelined_loops, check_shipped_row_loops, check_thread_communication};

#[test]
fn loops_are_pipelined() {
    let Some(gpu) = gpu() else { return };
    check_pipelined_loops(&gpu);
}

#[test]
fn shipped_row_loops_are_pipelined() {
    let Some(gpu) = gpu() else { return };
    check_shipped_row_loops(&gpu);
}

#[test]
fn threads_communicate_through_memory() {
    let Some(gpu) = gpu() else { return };
    check_thread_communication(&gpu);
}
