"""Kernels by name on CuPy's arrays, by `__cuda_array_interface__`, and processes that are forked after a GPU was used."""

import subprocess
import sys

import numpy as np
import pytest

cupy = pytest.importorskip("cupy")

import tilewright  # noqa: E402

if not cupy.is_available():
    pytest.skip("CuPy finds no GPU", allow_module_level=True)


def launch(x, y, **options):
    rows, d = x.shape
    tilewright.launch("softmax_rows", x, y, d, 1, d, 1, rows, d, grid=rows, rows_tile=1, d_tile=64, **options)


def test_arrays_and_streams():
    x, y = cupy.random.standard_normal((200, 60), dtype=np.float32), cupy.empty((200, 60), np.float32)
    e = np.exp(x.get().astype(np.float64))
    for stream in (None, cupy.cuda.Stream(non_blocking=True)):
        y[:] = 0
        cupy.cuda.Device().synchronize()
        launch(x, y, stream=stream)
        cupy.cuda.Device().synchronize()
        np.testing.assert_allclose(y.get(), e / e.sum(-1, keepdims=True), atol=1e-6)
    with pytest.raises(tilewright.Error, match="different devices: `x` is on GPU 0, `y` on the CPU"):
        launch(x, np.empty((200, 60), np.float32))
    with pytest.raises(TypeError, match="stream: expected a CUDA stream"):
        launch(x, y, stream=7)


def test_freed_memory():
    class Freed:
        __cuda_array_interface__ = {"shape": (4, 60), "typestr": "<f4", "data": (0x1000, False), "version": 3}

    with pytest.raises(tilewright.Error, match="must be allocated GPU memory"):
        tilewright.launch("softmax_rows", Freed(), Freed(), 60, 1, 60, 1, 4, 60, grid=4, rows_tile=1, d_tile=64)


def test_a_forked_process_cannot_use_the_gpu_but_the_cpu():
    script = """
import os, numpy as np, cupy, tilewright
def launch(xp):
    x = xp.ones((4, 16), np.float32); y = xp.empty_like(x)
    tilewright.launch("softmax_rows", x, y, 16, 1, 16, 1, 4, 16, grid=4, rows_tile=1, d_tile=16)
    return y
x = cupy.ones((4, 16), np.float32); y = cupy.empty_like(x)
launch(cupy)
child = os.fork()
if child == 0:
    try:
        tilewright.launch("softmax_rows", x, y, 16, 1, 16, 1, 4, 16, grid=4, rows_tile=1, d_tile=16)
    except Exception as error:  # of CuPy or of tilewright
        print("an exception:", error, flush=True)
    assert abs(launch(np) - 1 / 16).max() < 1e-6
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert abs(launch(cupy).get() - 1 / 16).max() < 1e-6
print("done")
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert found.returncode == 0 and found.stdout.endswith("done\n"), found
    assert "an exception" in found.stdout, found
