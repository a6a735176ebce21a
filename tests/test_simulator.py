"""The wave simulator: every feature a kernel relies on, every fault it must report, with 32 and 64 lanes."""

import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kernelbook.backends import BackendUnavailable, CompileError, Source, compiler, cpu
from kernelbook.backends.cpu import CpuBackend, KernelFault
from kernelbook.fragments import INSTRUCTIONS

DATA = Path(__file__).parent / "data" / "simulator"
i32, f32 = np.int32, np.float32


@pytest.fixture(scope="module", params=[32, 64])
def backend(request):
    return CpuBackend(wave=request.param, threads=2)


@pytest.fixture(scope="module")
def features(backend):
    return backend.compile(str(DATA / "features.cu"))


@pytest.fixture(scope="module")
def faults(backend):
    return backend.compile(str(DATA / "faults.cu"))


def rng():
    return np.random.default_rng(0)


# ---- features ----

def test_coordinates(backend, features):
    grid, block = (3, 2, 2), (4, 3, 5)
    out = backend.empty((12, 60, 12), i32)
    features.kernel("coordinates")(grid, block, [out])
    bz, by, bx = np.indices(grid[::-1]).reshape(3, -1, 1)
    tz, ty, tx = np.indices(block[::-1]).reshape(3, 1, -1)
    columns = [tx, ty, tz, bx, by, bz, *block, *grid]
    for i, expected in enumerate(columns):
        assert np.array_equal(out[..., i], np.broadcast_to(expected, (12, 60))), i


@pytest.mark.parametrize("width", [8, 32, None])
def test_shuffles(backend, features, width):
    width = width or backend.wave
    x = rng().standard_normal(128, dtype=f32)
    x[:] = np.round(x * 8)
    out = backend.empty((5, 128), f32)
    features.kernel("shuffles")(1, 128, [backend.array(x), out, i32(width)])
    lane = np.arange(128)
    begin = lane // width * width
    def inside(source):
        return np.where((source >= begin) & (source < begin + width), source, lane)
    assert np.array_equal(out[0], x[begin + 3])
    assert np.array_equal(out[1], x[lane ^ 5])
    assert np.array_equal(out[2], x[inside(lane + 2)])
    assert np.array_equal(out[3], x[inside(lane - 3)])
    wave = lane // backend.wave * backend.wave
    assert np.array_equal(out[4], x[wave + (lane + 1) % backend.wave])


def test_partial_mask(backend, features):
    x = np.arange(backend.wave, dtype=i32) ** 2
    out = backend.empty(backend.wave, i32)
    features.kernel("partial_mask")(1, backend.wave, [backend.array(x), out])
    assert np.array_equal(out, np.where(np.arange(backend.wave) % 2 == 0, x[::2].sum(), x))


def test_lane_outside_the_mask_gives_poison(backend, features):
    out = backend.empty(4, i32)
    features.kernel("absent_lane")(1, 32, [out])
    assert out.tolist() == [1, 2, 3, -1]


def test_votes(backend, features):
    n, wave = 128, backend.wave
    x = rng().integers(0, 8, n).astype(i32)
    x[5], x[wave:2 * wave] = 7, np.where(x[wave:2 * wave] == 7, 200, x[wave:2 * wave])
    ballot, any_, all_ = backend.empty(n, np.uint64), backend.empty(n, i32), backend.empty(n, i32)
    features.kernel("votes")(1, n, [backend.array(x), ballot, any_, all_])
    for w in range(0, n, wave):
        lanes = x[w:w + wave]
        assert set(ballot[w:w + wave].tolist()) == {sum(1 << i for i, v in enumerate(lanes.tolist()) if v & 1)}
        assert set(any_[w:w + wave].tolist()) == {int((lanes == 7).any())}
        assert set(all_[w:w + wave].tolist()) == {int((lanes < 100).all())}


@pytest.mark.parametrize("order", [0, 1])
def test_block_sum(backend, order):
    ordered = CpuBackend(backend.wave, threads=2, order=order)
    x = rng().standard_normal((20, 1000), dtype=f32)
    args = [ordered.array(x), ordered.empty(20, f32), i32(1000)]
    kernel = ordered.compile(str(DATA / "features.cu")).kernel("block_sum")
    kernel(20, 256, args, shared=4000)
    assert np.allclose(args[1], x.sum(axis=1, dtype=np.float64), rtol=1e-5, atol=1e-5)
    kernel.check_races(20, 256, args, shared=4000)


def test_exchange_in_step_within_a_wave(backend, features):
    x = np.arange(256, dtype=i32)
    args = [backend.array(x), backend.empty(256, i32)]
    features.kernel("warp_exchange").check_races(1, 256, args)
    assert np.array_equal(args[1], x ^ 1)


def test_every_block_finds_its_shared_memory_fresh_and_poisoned(backend, features):
    found = backend.empty(50, np.uint32)
    kernel = features.kernel("shared_is_fresh")
    for _ in range(2):  # the second launch meets the memory that the first one used
        found[:] = 0
        kernel(50, 1, [found, i32(1000)], shared=4000)
        assert found.tolist() == [1] * 50


def test_dp4a(backend, features):
    a, b = rng().integers(-128, 128, (2, 64, 4)).astype(np.int8)
    c = rng().integers(-10**6, 10**6, 64).astype(i32)
    out = backend.empty(64, i32)
    features.kernel("dot4")(1, 64, [backend.array(a.view(i32)), backend.array(b.view(i32)), backend.array(c), out])
    assert np.array_equal(out, (a.astype(i32) * b).sum(axis=1) + c)


def same_floats(a, b):
    return np.array_equal(np.isnan(a), np.isnan(b)) and np.array_equal(np.nan_to_num(a), np.nan_to_num(b))


def test_16_bit_floats(backend, features):
    codes = np.arange(65536, dtype=np.uint16)
    half, bf16 = backend.empty(65536, f32), backend.empty(65536, f32)
    features.kernel("from_16_bits")(256, 256, [half, bf16])
    assert same_floats(half, codes.view(np.float16).astype(f32))
    assert same_floats(bf16, (codes.astype(np.uint32) << 16).view(f32))

    # Every half, the floats halfway to the next, a little beside those, and floats at random.
    with np.errstate(invalid="ignore"):
        middle = (half[:-1] + half[1:]) / 2
    x = np.concatenate([half, middle, np.nextafter(middle, f32(0)), np.nextafter(middle, f32(np.inf)),
                        rng().integers(0, 2**32, 50000, dtype=np.uint32).view(f32), f32([65519.996, 65520, 7e4])])
    to_half, to_bf16 = backend.empty(x.size, np.uint16), backend.empty(x.size, np.uint16)
    features.kernel("to_16_bits")(-(-x.size // 256), 256, [backend.array(x), to_half, to_bf16, i32(x.size)])
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.where(np.isnan(x), np.uint16(0x7fff), x.astype(np.float16).view(np.uint16))
    assert np.array_equal(to_half, expected)
    import torch
    expected = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(to_bf16, np.where(np.isnan(x), np.uint16(0x7fff), expected))


def test_atomics(backend, features):
    x = rng().integers(-1000, 1000, 40 * 64).astype(i32)
    histogram, count = backend.array(np.zeros(16, i32)), backend.array(np.zeros(1, np.uint32))
    total, largest = backend.array(np.zeros(1, f32)), backend.array(np.full(1, -10**6, i32))
    features.kernel("atomics")(40, 64, [backend.array(x), histogram, count, total, largest])
    assert np.array_equal(histogram, np.bincount(x & 15, minlength=16))
    assert (count[0], total[0], largest[0]) == (x.size, x.size / 2, x.max())


def test_floats_round_as_written(backend, features):
    a = f32(1 + 2**-12)  # its square is 1 + 2^-11 + 2^-24, and the last term does not fit
    x = backend.array(f32([a, a, -1 - 2**-11, 0.5, 1.5, -2.5, 3e9, -3e9, np.nan]))
    out, rounded = backend.empty(4, f32), backend.empty(6, i32)
    features.kernel("rounding")(1, 1, [x, out, rounded])
    assert out.tolist() == [0.0, 2.0**-24, 0.0, a]
    assert rounded.tolist() == [0, 2, -2, 2**31 - 1, -2**31, 0]


def test_approximations(backend, features):
    """Exact here; subnormal results, which a GPU may flush, are left out."""
    x = np.concatenate([f32([-125, -1e30, -0.0, 0.5, 10, 127.9]), rng().uniform(-120, 120, 58).astype(f32)])
    powers, quotients = backend.empty(64, f32), backend.empty(64, f32)
    features.kernel("approximations")(2, 32, [backend.array(x), powers, quotients])
    assert np.allclose(powers, np.exp2(x.astype(np.float64)), rtol=2e-7, atol=0)
    other = x[np.arange(64) ^ 1].astype(np.float64)
    finite = other != 0
    assert np.allclose(quotients[finite], (x / np.where(finite, other, 1))[finite], rtol=2e-7, atol=0)


@pytest.mark.parametrize("there", [0, 1, 64, 100])
def test_copies_bring_what_is_there_and_zeros(backend, features, there):
    """The array ends with what is there: a read behind it would be a fault."""
    x = rng().integers(1, 2**32, (there, 4), dtype=np.uint32)
    args = [backend.array(x), backend.empty((2, 64, 4), np.uint32), i32(there)]
    features.kernel("copies").check_races(1, 64, args)
    expected = np.concatenate([x, np.zeros((128 - there, 4), np.uint32)]).reshape(2, 64, 4)
    assert np.array_equal(args[1], expected[:, ::-1])


def test_vectors_and_scalars(backend, features):
    x = rng().standard_normal((32, 4), dtype=f32)
    q = rng().integers(-128, 128, (32, 4)).astype(np.int8)
    out = backend.empty((32, 4), f32)
    features.kernel("vectors")(1, 32, [backend.array(x), backend.array(q), out])
    assert np.array_equal(out, x * q)
    out = backend.empty(1, np.int64)
    scalars = [np.int8(-3), np.uint16(65535), np.int64(2**40), np.float64(7), np.bool_(True)]
    features.kernel("scalars")(1, 1, [out, *scalars, None])
    assert out[0] == -3 + 65535 + 2**40 + 7 + 1 + 1 + 17
    features.kernel("nothing")((2, 3), 5, [])


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_matrix_instruction_is_the_matrix_product(name):
    instruction = INSTRUCTIONS[name]
    backend = CpuBackend(wave=instruction.lanes, threads=1)
    random = rng()

    def operand(o):
        if o.dtype == np.uint16:  # bf16
            values = (random.standard_normal(o.shape).astype(f32).view(np.uint32) >> 16 << 16).view(f32)
            return values, o.pack(values.view(np.uint32) >> 16)
        if o.dtype == np.float16:
            values = random.standard_normal(o.shape).astype(np.float16)
            return values, o.pack(values)
        values = random.integers(np.iinfo(o.dtype).min, np.iinfo(o.dtype).max + 1, o.shape)
        return values, o.pack(values)

    (A, a), (B, b) = operand(instruction.A), operand(instruction.B)
    C = random.integers(-1000, 1000, instruction.D.shape).astype(instruction.D.dtype)
    registers = np.uint32 if instruction.lanes == 32 else np.uint64
    d = backend.array(instruction.D.pack(C))
    a, b = backend.array(a.view(registers)), backend.array(b.view(registers))
    backend.compile(str(DATA / "matrix.cu")).kernel(f"{name}_tile")(1, instruction.lanes, [a, b, d, i32(a.shape[1])])
    expected = (C.astype(np.float64) + A.astype(np.float64) @ B.astype(np.float64)).astype(instruction.D.dtype)
    got = instruction.D.unpack(d)
    if instruction.D.dtype is np.int32:
        assert np.array_equal(got, expected)
    else:
        assert np.allclose(got, expected, rtol=1e-6, atol=0)


# ---- order ----

def tickets(order, wave=32):
    backend = CpuBackend(wave, threads=1, order=order)
    ticket, counter = backend.empty(5 * 96, i32), backend.array(np.zeros(1, i32))
    backend.compile(str(DATA / "features.cu")).kernel("tickets")(5, 96, [ticket, counter])
    return ticket.copy()


@pytest.mark.parametrize("wave", [32, 64])
def test_order_is_natural_or_random_by_seed(wave):
    assert np.array_equal(tickets(0, wave), np.arange(480))
    seeded = tickets(1, wave)
    assert np.array_equal(np.sort(seeded), np.arange(480))
    assert np.array_equal(seeded, tickets(1, wave))
    assert not np.array_equal(seeded, tickets(2, wave))
    blocks = seeded.reshape(5, 96)
    assert not np.array_equal(np.argsort(blocks[:, 0]), np.arange(5))  # blocks, waves and lanes all change places
    assert any(b[0] > b[95] for b in blocks) and any(b[0] > b[1] for b in blocks)


# ---- faults ----

def line_of(file, name):
    lines = (DATA / file).read_text().splitlines()
    return next(i for i, text in enumerate(lines, 1) if f"here: {name}" in text)


def launch(backend, module, name, bad, threads=64, shared=256, x=64):
    """Launch a kernel of faults.cu on fresh arrays; its output."""
    out = backend.array(np.zeros(13, np.uint8)) if name == "write_padding" else backend.array(np.zeros(64, i32))
    arguments = [out, i32(bad)]
    if name in FLOAT_INPUT:
        source = None if name == "null_pointer" and bad else backend.array(np.ones(x, f32))
        arguments = [source, backend.array(np.zeros(64, f32)), i32(bad)]
    module.kernel(name)(2, threads, arguments, shared)
    return out


FLOAT_INPUT = {"read_past_end", "write_past_end", "read_before_start", "write_before_start", "null_pointer",
               "misaligned"}

# Kernel, the words that must be there; a line marked in the source is checked wherever there is one.
FAULTS = {
    "barrier_ended": r"__syncthreads reached by 40 of 64 threads: thread \(40, 0, 0\) has ended",
    "barrier_elsewhere": r"__syncthreads reached by 32 of 64 threads: "
                         r"thread \(1, 0, 0\) waits at __syncthreads in line \d+",
    "shuffle_ended": r"lane 0 waits at __shfl_xor_sync, but lane 5 of its mask 0xf+ has ended",
    "shuffle_diverged": r"lane 0 waits at __shfl_xor_sync, but lane 1 of its mask 0xf+ waits at __syncthreads in line",
    "shuffle_other_mask": r"lane 0 waits at __shfl_sync, but lane 3 of its mask 0xf+ waits .* with mask 0xff$",
    "vote_not_in_mask": r"__any_sync: lane 0 is not in its own mask 0xfffe",
    "syncwarp_missing": r"waits at __syncwarp, but lane 31 of its mask 0xf+ has ended",
    "read_past_end": r"access outside an array: byte 256 of args\[0\] \(float32 of shape \(64,\), 256 bytes\), "
                     r"0 bytes past its end",
    "write_past_end": r"access outside an array: byte 256 of args\[1\]",
    "read_before_start": r"outside an array: byte -\d+ of args\[0\].*bytes before its start",
    "write_before_start": r"wrote outside an array: byte -4 of args\[1\] .* 4 bytes before its start",
    "write_padding": r"wrote outside an array: byte 13 of args\[0\] \(uint8 of shape \(13,\), 13 bytes\)",
    "null_pointer": r"null pointer \(args\[0\] is None\)",
    "dynamic_shared": r"access outside the dynamic shared memory: byte 256 of 256",
    "dynamic_shared_padding": r"wrote outside the dynamic shared memory: byte 13 of 13",
    "static_index": r"index 64 outside 'int ?\[64\]'",
    "index_overflow": r"300000 \* 8192 overflows 'int'",
    "sum_overflow": r"2147483600 \+ 48 overflows 'int'",
    "dot_overflow": r"__dp4a: 64516 \+ 2147483647 does not fit into int",
    "divide_by_zero": r"100 divided by zero",
    "shift_too_far": r"1 shifted by 32 bits, which 'unsigned int' does not have",
    "misaligned": r"misaligned access: .*float4.* 4 past a multiple of 16",
    "stack_overflow": r"stack overflow: a simulated thread has 64 KiB",
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_reported_and_the_next_launch_works(backend, faults, name):
    os_threads = len(os.listdir("/proc/self/task"))
    options = {"threads": backend.wave if "lane" in name or "shuffle" in name else 64}
    if name == "dynamic_shared_padding":
        options["shared"] = 13
    for _ in range(2):
        launch(backend, faults, name, bad=0, **options)
        with pytest.raises(KernelFault, match=FAULTS[name]) as caught:
            launch(backend, faults, name, bad=1, **options)
        fault = caught.value
        assert fault.kernel == name and fault.reason in str(fault)
        if f"here: {name}" in (DATA / "faults.cu").read_text():
            assert (fault.file, fault.line) == ("faults.cu", line_of("faults.cu", name))
            assert f"faults.cu:{fault.line}" in str(fault)
            assert fault.block is not None and fault.thread is not None
    launch(backend, faults, name, bad=0, **options)
    assert len(os.listdir("/proc/self/task")) == os_threads


def test_fault_names_block_and_thread(backend, faults):
    x, out = backend.array(np.ones(60, f32)), backend.array(np.zeros(64, f32))
    with pytest.raises(KernelFault) as caught:
        faults.kernel("read_past_end")(1, (16, 4), [x, out, i32(50)])
    assert caught.value.block == (0, 0, 0) and caught.value.thread == (10, 0, 0)
    assert "block (0, 0, 0), thread (10, 0, 0)" in str(caught.value)


@pytest.mark.parametrize("name, threads", [("race_shared", 64), ("race_waves", 128), ("race_blocks", 1)])
def test_race_is_found_by_other_orders(backend, faults, name, threads):
    out = backend.array(np.full(128, 7, i32))
    kernel = faults.kernel(name)
    blocks = 4 if name == "race_blocks" else 1
    kernel.check_races(blocks, threads, [out, i32(0)])
    right = out.copy()
    with pytest.raises(KernelFault, match=rf"{name}: race: args\[0\]\[\d+\] is -?\d+ in order 0 and -?\d+ in order"):
        kernel.check_races(blocks, threads, [out, i32(1)])
    kernel.check_races(blocks, threads, [out, i32(0)])
    assert np.array_equal(out, right)


def test_races_start_from_the_same_arrays(backend, features):
    """A kernel that adds to what it finds is no race."""
    ticket, counter = backend.empty(1, i32), backend.array(np.zeros(1, i32))
    features.kernel("tickets").check_races(1, 1, [ticket, counter])
    assert (ticket[0], counter[0]) == (0, 1)


@pytest.fixture(scope="module")
def matrix():
    return CpuBackend(32, threads=1).compile(str(DATA / "matrix.cu"))


def mma_arguments(backend):
    a, b = (backend.array(np.full((32, registers), 0x01010101, np.uint32)) for registers in (4, 2))
    return [a, b, backend.array(np.zeros((32, 4), i32))]


def test_matrix_instruction_needs_its_whole_wave(matrix):
    backend = matrix.backend
    kernel = matrix.kernel("lane_left")
    kernel(1, 32, [*mma_arguments(backend), i32(0)])
    with pytest.raises(KernelFault, match="waits at mma_m16n8k32_s8, but lane 0 of its mask 0xf+ has ended") as caught:
        kernel(1, 32, [*mma_arguments(backend), i32(1)])
    assert caught.value.line == line_of("matrix.cu", "lane_left")
    with pytest.raises(KernelFault, match="mma_m16n8k32_s8 takes all 32 lanes, but the block ends within the wave"):
        kernel(1, 16, [*mma_arguments(backend), i32(0)])
    wide = CpuBackend(64, threads=1)
    with pytest.raises(KernelFault, match="mma_m16n8k32_s8 takes a wave of 32 lanes, this one has 64"):
        wide.compile(str(DATA / "matrix.cu")).kernel("lane_left")(1, 64, [*mma_arguments(wide), i32(0)])


def test_accumulator_overflow(matrix):
    arguments = mma_arguments(matrix.backend)
    arguments[2][7, 2] = 2**31 - 1
    with pytest.raises(KernelFault, match="mma_m16n8k32_s8: an accumulator does not fit into int") as caught:
        matrix.kernel("lane_left")(1, 32, [*arguments, i32(0)])
    assert caught.value.thread == (7, 0, 0)


def test_a_fault_stops_blocks_that_would_wait_forever(faults):
    flag = faults.backend.array(np.zeros(1, i32))
    with pytest.raises(KernelFault, match="lane 1 is not in its own mask"):
        faults.kernel("waits_forever")(2, 2, [flag, i32(1)])


def test_ctrl_c_stops_a_launch(faults):
    flag = faults.backend.array(np.zeros(1, i32))
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        faults.kernel("waits_forever")(2, 2, [flag, i32(0)])
    flag[0] = 1
    faults.kernel("waits_forever")(2, 2, [flag, i32(0)])


def test_launches_from_several_threads(faults):
    def work(bad):
        for _ in range(20):
            launch(faults.backend, faults, "read_past_end", bad=0)
            if bad:
                with pytest.raises(KernelFault, match=FAULTS["read_past_end"]):
                    launch(faults.backend, faults, "read_past_end", bad=1)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, [0, 1, 1]))


def test_a_segmentation_fault_outside_a_launch_still_ends_the_process():
    done = subprocess.run([sys.executable, "-c", "import ctypes; from kernelbook.backends.cpu import CpuBackend; "
                           f"CpuBackend(threads=1).compile({str(DATA / 'features.cu')!r}).kernel('nothing')(1, 1, []); "
                           "ctypes.string_at(8)"], capture_output=True)
    assert done.returncode == -11


# ---- bad launches ----

def test_launch_limits(backend, features):
    kernel = features.kernel("nothing")
    for grid, block, shared, words in [
        (1, 1025, 0, "block.x is 1025; it must be from 1 to 1024"),
        (1, (1024, 2), 0, r"block \(1024, 2\) has 2048 threads; a block has at most 1024"),
        (1, (1, 1, 65), 0, "block.z is 65; .* to 64"),
        ((1, 65536), 1, 0, "grid.y is 65536; .* to 65535"),
        ((1, 1, 65536), 1, 0, "grid.z is 65536; .* to 65535"),
        ((0, 1), 1, 0, "grid.x is 0; it must be from 1"),
        (1, 1, 227 * 1024 + 1, "shared is 232449 bytes; a block has at most 232448"),
        (1, 1, -1, "shared is -1"),
    ]:
        with pytest.raises(ValueError, match=words):
            kernel(grid, block, [], shared)
    kernel(1, 1024, [], 227 * 1024)
    for grid in ("1", (1, 1, 1, 1), (1.5,)):
        with pytest.raises(TypeError, match="grid is .*; it takes one to three integers"):
            kernel(grid, 1, [])


def test_wrong_arguments(backend, features):
    kernel = features.kernel("to_16_bits")
    x, half = backend.empty(8, f32), backend.empty(8, np.uint16)
    good = [x, half, half, i32(8)]
    kernel(1, 8, good)

    def refused(i, value, words):
        with pytest.raises(TypeError, match=words):
            kernel(1, 8, [*good[:i], value, *good[i + 1:]])

    with pytest.raises(TypeError, match="to_16_bits takes 4 arguments, got 3"):
        kernel(1, 8, good[:3])
    refused(3, 8, r"args\[3\] is 8 of type int; .*np.int32\(4\)")
    refused(3, np.int64(8), r"args\[3\] is a NumPy int64 .*the kernel takes an integer of 4 bytes")
    refused(3, f32(8), r"args\[3\] is a NumPy float32 .*the kernel takes an integer of 4 bytes")
    refused(3, x, r"args\[3\] is an array; the kernel takes an integer")
    refused(3, None, r"args\[3\] is None; the kernel takes an integer")
    refused(0, i32(8), r"args\[0\] is a NumPy int32 .*the kernel takes a pointer")
    refused(0, np.zeros(8, f32), r"args\[0\] is an array in the host's memory; copy it to the device")
    refused(0, backend.empty((8, 2), f32)[:, 0], r"args\[0\] is an array of shape \(8,\) with strides \(8,\)")
    kernel(1, 4, [x[4:], half[:4], half[4:], i32(4)])  # views of whole rows are arrays too


def test_constructor_refuses():
    with pytest.raises(ValueError, match="wave is 16; a wave has 32 or 64 lanes"):
        CpuBackend(wave=16)
    with pytest.raises(ValueError, match="threads is 0"):
        CpuBackend(threads=0)


def test_arrays(backend):
    assert re.fullmatch(rf"CPU wave simulator, {backend.wave} lanes, .+ \d+\.\d+.*, 2 threads", backend.device)
    assert (backend.name, backend.simulated) == ("cpu", True)
    x = backend.array([[1.5, 2.5]])
    assert x.dtype == np.float64 and backend.numpy(x).tolist() == [[1.5, 2.5]]
    assert np.isnan(backend.empty((3, 2), f32)).all() and (backend.empty(5, np.int8) == -1).all()
    assert backend.empty((0, 4), f32).shape == (0, 4) and backend.empty((), f32).shape == ()
    copy = backend.numpy(x)
    copy[:] = 0
    assert x[0, 0] == 1.5


def test_memory_is_given_back(backend):
    def mapped():
        return sum(1 for _ in open("/proc/self/maps"))
    kept = backend.empty(1000, f32)[10:20]  # a view keeps the whole array
    before, live = mapped(), len(cpu._Memory.live)
    for _ in range(50):
        backend.empty(1000, f32)
    assert mapped() < before + 10 and len(cpu._Memory.live) == live
    kept[:] = 1


# ---- compiling ----

def test_compile_error_shows_line_and_words(backend):
    with pytest.raises(CompileError, match="undeclared") as caught:
        backend.compile(str(DATA / "broken.cu"))
    assert caught.value.line == 3
    assert "broken.cu:3" in str(caught.value) and "out[threadIdx.x] = undeclared;" in str(caught.value)


def test_unknown_kernel(features):
    with pytest.raises(ValueError, match="registers no kernel 'misspelt'.*there are: coordinates, shuffles"):
        features.kernel("misspelt")


def test_defines_reach_the_kernel_and_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "answer.cu"
    source.write_text('#include "gpu.h"\n'
                      'extern "C" __global__ void answer(int *out) { *out = ANSWER; }\nGPU_KERNEL(answer)\n')
    backend = CpuBackend(threads=1)
    out = backend.empty(1, i32)
    for value in (41, 42, 41):
        backend.compile(str(source), {"ANSWER": value}).kernel("answer")(1, 1, [out])
        assert out[0] == value
    assert len(list((tmp_path / "cache").glob("answer-*.so"))) == 2


def test_a_second_cache_folder_brings_a_second_simulator(monkeypatch, tmp_path):
    """The linker takes it for the first, by its name, and gives the kernel that one's state."""
    for folder in ("first", "second"):
        monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / folder))
        backend = CpuBackend()
        words = backend.empty(300, np.uint32)
        backend.compile("ceilings/memory.cu").kernel("fill_words")(
            (2, 1, 1), (64, 1, 1), [words, np.uint64(300), np.uint32(0)])
        assert len(np.unique(words)) == 300


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(PermissionError, match="KERNELBOOK_CACHE"):
        CpuBackend().compile(str(DATA / "features.cu"))


def test_no_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -O2")
    with pytest.raises(BackendUnavailable, match="CXX is 'no-such-compiler -O2', which is no program here"):
        CpuBackend()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(cpu.sys, "executable", "/bin/false")
    with pytest.raises(BackendUnavailable, match=r"neither g\+\+ nor clang\+\+ nor.*ziglang; install one"):
        CpuBackend()


def test_a_compiler_that_tells_no_version(monkeypatch):
    monkeypatch.setenv("CXX", "/bin/false")
    with pytest.raises(BackendUnavailable, match="`/bin/false --version` tells no version: exit code 1"):
        CpuBackend()


def test_a_compiler_that_hangs_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("KERNELBOOK_CACHE", str(tmp_path))
    hangs = tmp_path / "hangs"
    hangs.write_text("#!/bin/sh\ncase $1 in --version) echo hangs 1.0;; *) sleep 600;; esac\n")
    hangs.chmod(0o755)
    monkeypatch.setenv("CXX", str(hangs))
    backend = CpuBackend()
    monkeypatch.setattr(compiler.call, "__defaults__", (None, 0.5))
    with pytest.raises(CompileError, match="(?s)does not compile with hangs.*did not end within 0.5 s"):
        backend.compile(str(DATA / "features.cu"))
    hangs.write_text("#!/bin/sh\nsleep 600\n")
    call = compiler.call
    monkeypatch.setattr(compiler, "call", lambda command, timeout_s: call(command, timeout_s=0.5))
    with pytest.raises(BackendUnavailable, match="hangs --version` did not end within 0.5 s"):
        CpuBackend()


def test_context_switch_of_other_processors(monkeypatch):
    """Where there is no assembly for the processor, ucontext switches; it must behave the same."""
    source = Source("portable/simulator.cpp", {"SIM_UCONTEXT": 1})
    monkeypatch.setattr(CpuBackend, "_simulator_source", lambda _: source)
    backend = CpuBackend(threads=2)
    x = rng().standard_normal((8, 1000), dtype=f32)
    out = backend.empty(8, f32)
    backend.compile(str(DATA / "features.cu")).kernel("block_sum")(8, 256, [backend.array(x), out, i32(1000)], 4000)
    assert np.allclose(out, x.sum(axis=1), rtol=1e-4, atol=1e-4)
    faults = backend.compile(str(DATA / "faults.cu"))
    for name in ("stack_overflow", "shuffle_ended", "read_past_end", "index_overflow"):
        with pytest.raises(KernelFault, match=FAULTS[name]):
            launch(backend, faults, name, bad=1, threads=32 if "shuffle" in name else 64)


@pytest.mark.slow
def test_zig_as_the_compiler(monkeypatch):
    """The compiler of last resort, from a wheel: its first use builds a C++ library, which takes a minute."""
    pytest.importorskip("ziglang")
    monkeypatch.setenv("CXX", f"{sys.executable} -m ziglang c++")
    backend = CpuBackend(threads=2)
    assert "zig c++" in backend.device
    features, faults = (backend.compile(str(DATA / f)) for f in ("features.cu", "faults.cu"))
    test_every_block_finds_its_shared_memory_fresh_and_poisoned(backend, features)
    for name in FAULTS.keys() - {"misaligned"}:  # clang checks a number's alignment, not a whole vector's
        options = {"threads": 32 if "shuffle" in name else 64, "shared": 13 if name.endswith("shared_padding") else 256}
        launch(backend, faults, name, bad=0, **options)
        with pytest.raises(KernelFault, match=FAULTS[name]):
            launch(backend, faults, name, bad=1, **options)


# ---- the same source elsewhere ----

@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_source_builds_for_cuda(arch):
    nvrtc = pytest.importorskip("cupy").cuda.nvrtc
    source = Source(str(DATA / "everywhere.cu"))
    program = nvrtc.createProgram(source.text, "everywhere.cu", tuple(t.encode() for t in source.headers.values()),
                                  tuple(name.encode() for name in source.headers))
    try:
        nvrtc.compileProgram(program, (f"-arch={arch}", "-std=c++17"))
    except nvrtc.NVRTCError:
        pytest.fail(nvrtc.getProgramLog(program))
    assert nvrtc.getCUBIN(program)


@pytest.mark.parametrize("arch, instructions", [
    ("gfx942", ("v_mfma_i32_16x16x32_i8", "v_mfma_f32_16x16x16_bf16")),
    ("gfx90a", ("v_mfma_i32_16x16x16i8", "v_mfma_f32_16x16x16bf16_1k")),
    # No public clang knows gfx936 by name.
    ("gfx906 -D__gfx936__", ("v_mmac_i32_16x16x32_i8", "v_mmac_f32_16x16x16_bf16"))])
def test_source_builds_for_hip(arch, instructions, tmp_path):
    pytest.importorskip("ziglang")
    source = Source(str(DATA / "everywhere.cu"))
    for name, text in source.headers.items():
        (tmp_path / name).write_text(text)
    done = subprocess.run([sys.executable, "-m", "ziglang", "clang", "-x", "hip", *f"--offload-arch={arch}".split(),
                           "--offload-device-only", "-nogpulib", "-nogpuinc", "-nostdinc", "-O3", "-std=c++20",
                           "-ffp-contract=off", "-I", tmp_path, "-S", source.file, "-o", "-"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for instruction in instructions:
        assert instruction in done.stdout
