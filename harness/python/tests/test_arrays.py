"""Arrays of other libraries: DLPack, interfaces that lie, byte orders, masks; and messages about long arguments."""

import numpy as np
import pytest

import tilewright as tw
import tilewright.numpy as tn
from tilewright import _native


def expected(x):
    e = np.exp(x.astype(np.float64))
    return e / e.sum(-1, keepdims=True)


def softmax(x, y):
    _native.softmax_forward(x, y)


@pytest.fixture
def x():
    return np.random.default_rng(0).standard_normal((7, 12)).astype(np.float32)


class Dlpack:
    """An array by DLPack alone: a producer of version 1."""

    def __init__(self, array):
        self.array = array

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

    def __dlpack__(self, *, stream=None, max_version=None):
        assert stream is None and max_version == (1, 0)
        return self.array.__dlpack__(max_version=max_version)


class OldDlpack(Dlpack):
    """A producer that knows version 0 only."""

    def __dlpack__(self, stream=None):
        assert stream is None
        return self.array.__dlpack__()


@pytest.mark.parametrize("producer", [Dlpack, OldDlpack])
def test_dlpack(x, producer):
    y = np.zeros_like(x)
    softmax(producer(x), producer(y))
    np.testing.assert_allclose(y, expected(x), atol=1e-6)
    # Strides, an offset and no copy.
    both = np.zeros((7, 24), np.float32)
    softmax(producer(np.asfortranarray(x)), producer(both[:, 12:]))
    np.testing.assert_allclose(both[:, 12:], expected(x), atol=1e-6)
    assert not both[:, :12].any()
    empty = np.zeros((0, 12), np.float32)
    softmax(producer(empty), producer(empty.copy()))
    q = np.ones((1, 2, 5, 16), np.float32)
    o, lse = np.empty_like(q), np.empty((1, 2, 5), np.float32)
    _native.attention_forward(*[producer(a) for a in (q, q, q, o, lse)], tn._float32, False)
    np.testing.assert_allclose(o, q, atol=1e-6)


def test_dlpack_of_other_types(x):
    targets, logits = np.arange(7), x.astype(np.float16)
    loss, lse = np.empty(7, np.float32), np.empty(7, np.float32)
    _native.cross_entropy_forward(*[Dlpack(a) for a in (logits, targets, loss, lse)], -100)
    np.testing.assert_allclose(loss, -np.log(expected(logits)[np.arange(7), targets]), atol=1e-3)


def test_memory_of_dlpack_is_released(x):
    """The producer's array lives while a launch needs it, and not longer."""
    import sys

    y = np.zeros_like(x)
    before = sys.getrefcount(x)
    for _ in range(5):
        softmax(Dlpack(x), Dlpack(y))
        with pytest.raises(tw.Error):
            softmax(Dlpack(x), np.zeros((3, 3), np.float32))
    assert sys.getrefcount(x) == before


def test_mistakes_of_dlpack_are_exceptions(x):
    y = np.zeros_like(x)
    read_only = y.copy()
    read_only.flags.writeable = False
    if tuple(int(part) for part in np.__version__.split(".")[:2]) >= (2, 1):
        softmax(Dlpack(np.broadcast_to(x, x.shape)), y)
        with pytest.raises(tw.Error, match="`y` is read-only"):
            softmax(x, Dlpack(read_only))
    with pytest.raises(tw.Error, match="`y`, which it writes, overlaps `x`"):
        softmax(Dlpack(x), x)
    with pytest.raises(TypeError, match=r"x: kernels have no element type for a DLPack tensor of type code 5 with 64 bits"):
        softmax(Dlpack(x.astype(np.complex64)), y)

    class Elsewhere(Dlpack):
        def __dlpack_device__(self):
            return (10, 0)

    with pytest.raises(ValueError, match="x: kernels run on NVIDIA GPUs and the CPU, found a tensor on the DLPack device type 10"):
        softmax(Elsewhere(x), y)

    class Fails(Dlpack):
        def __dlpack__(self, **_):
            raise BufferError("not now")

    with pytest.raises(BufferError, match="not now"):
        softmax(Fails(x), y)
    for result in (None, 3):
        class NoCapsule(Dlpack):
            def __dlpack__(self, **_):
                return result

        with pytest.raises(TypeError, match="x: its __dlpack__\\(\\) returned no capsule"):
            softmax(NoCapsule(x), y)

    class Other(Dlpack):
        def __dlpack__(self, **_):
            import datetime

            return datetime.datetime_CAPI

    with pytest.raises(TypeError, match="x: its __dlpack__\\(\\) returned a capsule that is no DLPack tensor"):
        softmax(Other(x), y)

    class Used(Dlpack):
        def __dlpack__(self, **_):
            capsule = self.array.__dlpack__()

            class Once:
                def __dlpack__(self, **_):
                    return capsule

                def __dlpack_device__(self):
                    return (1, 0)

            np.from_dlpack(Once())
            return capsule

    with pytest.raises(TypeError, match="or that was used before"):
        softmax(Used(x), y)
    with pytest.raises(TypeError, match="x: expected an array .*__dlpack__.*, found object"):
        softmax(object(), y)


def like(array, **change):
    """An object with the array's interface, changed, and its dtype."""

    class Interface:
        dtype = change.pop("dtype", array.dtype)
        __array_interface__ = {**array.__array_interface__, **change}
        owner = array

    return Interface()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
def test_other_byte_orders_are_exceptions(x, dtype):
    swapped = x.astype(dtype).astype(np.dtype(dtype).newbyteorder(">"))
    with pytest.raises(TypeError, match="no element type for an array of >.*convert it to this machine's byte order"):
        softmax(swapped, np.zeros(x.shape, np.float32))


def test_types_of_ml_dtypes_have_their_size_and_byte_order(x):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    short = x.astype(ml_dtypes.bfloat16)
    y = np.zeros_like(short)
    softmax(short, y)
    assert np.abs(y.astype(float) - expected(short.astype(np.float32))).max() < 1e-2
    for typestr in (">V2", "<V4", "|V1", "<f4"):
        with pytest.raises(TypeError, match="x: kernels have no element type|x: its array interface has elements of type <f4"):
            softmax(like(short, typestr=typestr, strides=None, shape=(1,)), y[0, :1])
    with pytest.raises(TypeError, match="x: its array interface has elements of type <f4, its dtype has 8 bytes"):
        softmax(like(x, dtype=np.dtype(np.float64)), np.zeros_like(x))


@pytest.mark.parametrize("mask", [np.ma.nomask, True])
def test_masked_arrays_are_exceptions(x, mask):
    y = np.zeros_like(x)
    with pytest.raises(TypeError, match=r"x: expected an array without a mask: .*filled"):
        softmax(np.ma.array(x, mask=mask), y)
    with pytest.raises(TypeError, match="y: expected an array without a mask"):
        softmax(x, np.ma.array(y, mask=mask))
    with pytest.raises(TypeError, match="x: expected an array without a mask"):
        softmax(like(x, mask=np.zeros(x.shape, bool)), y)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"data": (2**64 - 16, False)}, "x: its elements are outside of memory"),
        ({"data": (2**64 - 4, False), "shape": (1, 1)}, "x: its elements are outside of memory"),
        ({"data": (2**64, False)}, "x: its array interface has the data"),
        ({"data": (-8, False)}, "x: its array interface has the data"),
        ({"data": (64, False), "strides": (-48, 4)}, "x: its elements are outside of memory"),
        ({"strides": (2**62, 2**62)}, "x: its elements are outside of memory"),
        ({"strides": (-(2**63), 4)}, "x: its elements are outside of memory"),
        ({"shape": (2**31, 2**31)}, "x: its elements are outside of memory"),
        ({"shape": (2**40, 2**40), "strides": (0, 0)}, "x: its elements are outside of memory"),
    ],
)
def test_addresses_outside_of_memory_are_exceptions(x, change, message):
    for kernel in (lambda x, y: softmax(x, y), lambda x, y: _native.silu_forward(x, y)):
        with pytest.raises(ValueError, match=message):
            kernel(like(x, **change), np.zeros_like(x))


def test_an_array_at_the_end_of_memory_is_none():
    """The launch checks know nothing of the process's memory; arithmetic on the last address must not wrap around."""
    one = np.zeros((1, 1), np.float32)
    with pytest.raises(ValueError, match="x: elements of f32 are not aligned"):
        softmax(like(one, data=(2**64 - 6, False)), one)


def test_streams_of_interfaces():
    class OnGpu:
        def __init__(self, stream):
            self.__cuda_array_interface__ = {
                "shape": (0, 4), "typestr": "<f4", "data": (0, False), "version": 3, "stream": stream
            }

    for stream in (0, -1, "one", 2.5):
        with pytest.raises(ValueError, match="x: its array interface has the stream .*, expected None, 1, 2 or a handle"):
            softmax(OnGpu(stream), OnGpu(None))


def test_workspaces(x):
    """`allocate` is a callback of the package's own modules: what it returns is checked as an argument is."""
    q, grad = np.ones((1, 2, 40, 16), np.float32), np.ones((1, 2, 40, 16), np.float32)
    o, lse = tn.attention_forward(q, q, q)

    def backward(allocate):
        grads = [np.empty_like(q) for _ in range(3)]
        _native.attention_backward(q, q, q, o, lse, grad, *grads, allocate, False)
        return grads

    def read_only(n):
        workspace = np.empty(n, np.float32)
        workspace.flags.writeable = False
        return workspace

    memory = np.zeros(10_000, np.float32)
    memory[: q.size] = 1.0
    backward(lambda n: np.empty(n, np.float32))
    for allocate, message in [
        (read_only, "`workspace` is read-only"),
        (lambda n: np.empty(n - 1, np.float32), "`workspace` expects at least"),
        (lambda n: np.empty(n, np.int32), "`workspace` expects elements of type f32"),
        (lambda n: np.empty(2 * n, np.float32)[::2], "`workspace` expects a contiguous array"),
        (lambda n: np.broadcast_to(np.float32(0), n).copy()[::-1], "`workspace` expects a contiguous array"),
    ]:
        with pytest.raises(tw.Error, match=message):
            backward(allocate)
    inputs = [memory[: q.size].reshape(q.shape), q, q]
    with pytest.raises(tw.Error, match="`workspace`, which it writes, overlaps `q`"):
        _native.attention_backward(
            *inputs, o, lse, grad, *[np.empty_like(q) for _ in range(3)], lambda n: memory[:n], False
        )
    assert (memory[: q.size] == 1.0).all()


@pytest.mark.parametrize("base", [0, 0.0, -10000.0, np.nan, np.inf, -np.inf])
def test_rope_with_a_base_without_angles_is_an_exception(base):
    with pytest.raises(ValueError, match="base: expected a positive finite number, found"):
        tn.rope(np.ones((1, 1, 3, 8), np.float32), base=base)


LONG = "x" * (1 << 20)


@pytest.mark.parametrize(
    "call",
    [
        lambda: tw.Kernel(LONG),
        lambda: tw.launch(LONG, grid=1),
        lambda: tw.compile("softmax_rows", LONG),
        lambda: tw.compile("softmax_rows", "sm_80", types=LONG, rows_tile=1, d_tile=64),
        lambda: tw.compile("softmax_rows", "sm_80", types={LONG: "f32"}, rows_tile=1, d_tile=64),
        lambda: tw.compile("softmax_rows", "sm_80", types={"T": LONG}, rows_tile=1, d_tile=64),
        lambda: tw.compile("softmax_rows", "sm_80", types="f32", rows_tile=LONG, d_tile=64),
        lambda: tw.compile("softmax_rows", "sm_80", types="f32", rows_tile=[LONG], d_tile=64),
        lambda: tw.compile("softmax_rows", "sm_80", types="f32", rows_tile=1, d_tile=64, **{LONG: 1}),
        lambda: tw.compile("softmax_rows", "sm_80", types="f32", rows_tile=1, d_tile=64, options={LONG: 1}),
        lambda: tw.compile("softmax_rows", "sm_80", types="f32", rows_tile=1, d_tile=64, options={"num_warps": LONG}),
        lambda: tw.compile("softmax_rows", "sm_80", types="f32", rows_tile=1, d_tile=64, multiple_of={LONG: 16}),
        lambda: tw.compile("softmax_rows", "sm_80", types="f32", rows_tile=1, d_tile=64, equal_to={LONG: 16}),
        lambda: tw.compile("matmul", "sm_80", types="f32", m_tile=64, n_tile=64, k_tile=64, precision=LONG),
        lambda: tw.launch("softmax_rows", grid=LONG),
        lambda: tw.launch("softmax_rows", grid=[1] * (1 << 19)),
        lambda: tw.launch("softmax_rows", grid=1, **{LONG: 1}),
        lambda: tw.load(LONG),
        lambda: tw.load("/no/such/folder/" * 5000),
        lambda: tn.matmul(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), activation=LONG),
        lambda: tn.matmul(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), precision=LONG),
        lambda: softmax(np.zeros(3, [(f"field{i}", np.float32) for i in range(20_000)]), np.zeros(3, np.float32)),
        lambda: softmax(like(np.zeros(3, np.float32), typestr=LONG, dtype=None), np.zeros(3, np.float32)),
        lambda: softmax(like(np.zeros(3, np.float32), data=LONG), np.zeros(3, np.float32)),
    ],
)
def test_messages_do_not_repeat_long_arguments(call):
    with pytest.raises(Exception) as caught:
        call()
    assert not isinstance(caught.value, tw.InternalError)
    assert 0 < len(str(caught.value)) < 3000
