//! Software-pipelined loops, and communication between threads through global memory, on GPU 0.

use super::gpu;
use tilewright_tests::loops::{check_exchange, check_shipped_walks, check_walks};

#[test]
fn walks_fetch_ahead() {
    let Some(gpu) = gpu() else { return };
    check_walks(&gpu);
}

#[test]
fn shipped_walks_fetch_ahead() {
    let Some(gpu) = gpu() else { return };
    check_shipped_walks(&gpu);
}

#[test]
fn threads_exchange_through_memory() {
    let Some(gpu) = gpu() else { return };
    check_exchange(&gpu);
}
