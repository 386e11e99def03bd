#!/usr/bin/env python3
"""Times the kernels of examples/ beside their counterparts in Triton, on one GPU.

    bench_examples.py [--record FILE] [--commit HASH] PROGRAM [NAME...]

PROGRAM is the built example_mains of the crate tilewright-tests, HASH the commit that it was built from.

Needs PyTorch and Triton (3.6). For each case, the Triton kernel is autotuned and compared with PyTorch in f64; the
example compares its own results with f64. Then both are timed in five rounds, interleaved (ABBA), each run with a cold
L2 cache. A kernel with wrong results gets no time, and the exit code is 1. TILEWRIGHT_TUNE=SECONDS tunes the
example's kernels, too. FILE gets a JSON row for each side (harness/records/README.md).
"""

import argparse
import ctypes
import importlib
import json
import os
import statistics
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = os.path.join(HERE, "triton_examples")
ROUNDS = 5
TOLERANCE = 0.02


class Example:
    """The example's process, which times its current case when it is told to."""

    def __init__(self, program, name):
        self.process = subprocess.Popen(
            [program, name, "--interleave"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the example ended with {self.process.wait()}")
        return line.strip()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()

    def say(self, word):
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()


def error_of(found, wanted):
    return ((found.double() - wanted).abs() / wanted.abs().clamp(min=1)).max().item()


def measure(program, name):
    """The kernel, case, error, our median and Triton's median of each case; the example's checks end its process."""
    with Example(program, name) as example:
        results = [time_case(example, *case) for case in importlib.import_module(name).cases()]
        summary = [line for line in example.process.stdout if line.strip()]
        if example.process.wait() != 0:
            raise RuntimeError("the example's results are wrong, or it failed: see its message")
    for (kernel, case, *_), line in zip(results, summary, strict=True):
        if kernel not in line or case not in line:
            raise RuntimeError(f"the example reports another case than {kernel} ({case}): {line}")
    return results


def time_case(example, kernel, case, launch, check):
    from triton.testing import do_bench

    while (line := example.line()) != "ready":
        pass
    launch()
    error = error_of(*check())
    if not error <= TOLERANCE:
        raise RuntimeError(f"Triton's {kernel} ({case}) has an error of {error}")
    ours, theirs = [], []

    def own():
        example.say("time")
        ours.append(float(example.line()))

    def peer():
        theirs.append(do_bench(launch, warmup=10, rep=60, return_mode="median"))

    for _ in range(ROUNDS):
        own(), peer(), peer(), own()
    example.say("done")
    return kernel, case, error, statistics.median(ours), statistics.median(theirs)


def driver_version():
    """The CUDA version that the driver supports."""
    version = ctypes.c_int()
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--record", metavar="FILE")
    parser.add_argument("--commit", metavar="HASH")
    arguments = parser.parse_intermixed_args()
    sys.path.insert(0, PEERS)
    import torch
    import triton

    device, failed = torch.cuda.get_device_name(0), False
    known = sorted(file[:-3] for file in os.listdir(PEERS) if file.endswith(".py"))
    print(f"{'kernel':24}{'case':46}{'Tilewright ms':>15}{'Triton ms':>12}{'ratio':>8}   {device}")
    for name in arguments.names or known:
        try:
            results = measure(arguments.program, name)
        except Exception as error:  # One example must not stop the others.
            print(f"{name}: {error}")
            failed = True
            continue
        for kernel, case, error, ours, theirs in results:
            print(f"{kernel:24}{case:46}{ours:15.4f}{theirs:12.4f}{ours / theirs:8.3f}", flush=True)
            if arguments.record:
                shared = {"device": device, "driver": driver_version()}
                shared |= {"kernel": kernel, "case": case, "n": 2 * ROUNDS}
                own = {"commit": arguments.commit, **shared, "median_ms": round(ours, 5)}
                peer = {"commit": None, **shared, "median_ms": round(theirs, 5), "error": float(f"{error:.2e}")}
                peer |= {"peer": f"Triton {triton.__version__}"}
                with open(arguments.record, "a", encoding="utf-8") as file:
                    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in (own, peer))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
