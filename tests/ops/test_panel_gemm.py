"""Tiles that become panels on the device, to the bit, and the product on them: refused, as planned, as compiled and, on
a Hopper GPU, multiplying."""

import numpy as np
import pytest

from kernelbook import formats, packing, toolchain
from kernelbook.ops import panel_gemm as op
from kernelbook.ops import prefill_gemm
from kernelbook.stats import errors

SIZES = [(4, 32), (16, 128), (48, 160), (20, 96), (36, 416), (100, 32), (128, 256)]
"""(N, K): whole panels and chunks, and ends within either; 36 x 416 takes more threads than a block has."""


def weight(n, k):
    return formats.random_tiles(np.random.default_rng((n, k)), n, k)


def bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def floats(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ---- packed

@pytest.mark.parametrize("n, k", SIZES)
def test_panels_are_those_of_the_host(backend, n, k):
    tiles = weight(n, k)
    found = packing.Panels(backend.numpy(op.pack(backend, backend.array(tiles.data))), n, k, "int4")
    assert np.array_equal(found.check().data, packing.panels_from_tiles(tiles).data)
    assert found.nbytes == op.panel_bytes(n, k)


def test_some_rows_of_a_weight_are_packed_where_they_are(simulator):
    """As the designs have it that do not fuse projections."""
    tiles = weight(48, 96)
    found = simulator.numpy(op.pack(simulator, simulator.array(tiles.data)[3:8]))
    assert np.array_equal(found, packing.panels_from_tiles(formats.Tiles(tiles.data[3:8].copy())).data)


def test_scales_go_over_as_they_are(simulator):
    """Infinite ones, subnormal ones, and minus zero."""
    tiles = weight(16, 128)
    halves = tiles.data[..., :8].copy().view(np.uint16)
    halves[0, 0], halves[3, 2] = (0x7e01, 0x7c00, 0xfc00, 0x8000), (1, 0x8001, 0x3ff, 0)
    tiles.data[..., :8] = halves.view(np.uint8)
    found = packing.Panels(simulator.numpy(op.pack(simulator, simulator.array(tiles.data))), 16, 128, "int4")
    assert np.array_equal(found.scales.view(np.uint16), tiles.scales.view(np.uint16))


def test_bad_tiles_are_refused(simulator):
    good = simulator.array(weight(16, 128).data)
    for kind, words, tiles in (
            (TypeError, "tiles is a Tiles; expected an array on", weight(16, 128)),
            (TypeError, "tiles has dtype int8; expected uint8", good.view(np.int8)),
            (ValueError, r"tiles has shape \(4, 288\); expected \[N / 4, K / 32, 72\]", good.reshape(4, 288)),
            (ValueError, "with no 0", good[:0]),
            (ValueError, "tiles has strides", good[:, ::2])):
        with pytest.raises(kind, match=words):
            op.pack(simulator, tiles)


def test_nothing_spills():
    rows = toolchain.evidence(op._PACK, [name for name, missing in toolchain.targets().items() if not missing])
    assert rows and not any(row["spill_bytes"] or row["stack_bytes"] for row in rows)


# ---- multiplied

def test_other_devices_are_refused_before_anything_is_packed(simulator):
    with pytest.raises(ValueError, match="design 'packed_wgmma': it needs Hopper's warpgroup instructions"):
        op.PanelGemm(simulator, simulator.array(weight(16, 128).data))
    assert op.why_not(simulator, 16, 128)


def test_what_is_launched(hopper_in_numpy):
    backend, launched, tiles = hopper_in_numpy, hopper_in_numpy.launches, weight(1544, 512)
    gemm = op.PanelGemm(backend, backend.array(tiles.data))
    x, out = backend.array(bf16(np.ones((300, 512)))), backend.empty((300, 1544), np.uint16)
    assert gemm.prepare(x, out=out)() is out
    call, = launched
    assert (floats(out) == floats(out)[0]).all() and out.any()  # of equal tokens
    assert (gemm.n, gemm.k, call["weights"].precision) == (1544, 512, "int4") and call["x"] is x
    assert np.array_equal(call["data"], packing.panels_from_tiles(tiles).data)
    assert gemm.prepare(x)().dtype == np.float32
    size = gemm.scratch(300)
    assert size == call["plan"].scratch
    shared = backend.empty(size + 8, np.float32)
    gemm.prepare(x, scratch=shared)
    assert launched[-1]["sums"] is (shared if size else None)
    empty = gemm.prepare(x[:0])()
    assert empty.shape == (0, 1544) and gemm.scratch(0) == 0 and len(launched) == 3


def test_bad_arguments_are_refused(hopper_in_numpy):
    backend = hopper_in_numpy
    gemm = op.PanelGemm(backend, backend.array(weight(528, 4096).data))
    m = next(m for m in range(1, 600) if gemm.scratch(m))
    x, out = backend.empty((m, 4096), np.uint16), backend.empty((m, 528), np.float32)
    flat = backend.empty(m * (4096 + 528) + 8, np.uint16)
    for kind, words, given in (
            (TypeError, "x has dtype float32; expected uint16", dict(x=backend.empty((m, 4096), np.float32))),
            (ValueError, r"x has shape \(4096,\)", dict(x=x[0])),
            (ValueError, r"x has shape .*, 4064\)", dict(x=backend.empty((m, 4064), np.uint16))),
            (TypeError, "out has dtype float16; expected float32", dict(out=backend.empty((m, 528), np.float16))),
            (ValueError, "out has shape", dict(out=out[:, :524])),
            (ValueError, "out has strides", dict(out=backend.empty((m, 1056), np.float32)[:, ::2])),
            (ValueError, f"scratch has 4 elements; {m} x 528 take", dict(scratch=backend.empty(4, np.float32))),
            (TypeError, "scratch has dtype float64", dict(scratch=backend.empty(1 << 22, np.float64))),
            (ValueError, "out overlaps x", dict(x=flat[:m * 4096].reshape(m, 4096),
                                                out=flat[m * 4096 - 8:][:m * 528].reshape(m, 528)))):
        with pytest.raises(kind, match=words):
            gemm.prepare(**{"x": x, "out": out} | given)
    assert not backend.launches


@pytest.mark.gpu
@pytest.mark.parametrize("m, n, k", [(1, 16, 128), (5, 48, 96), (33, 1544, 512), (130, 36, 416), (300, 2064, 1536)])
def test_against_float64(gpu, m, n, k):
    if op.why_not(gpu, n, k):
        pytest.skip(op.why_not(gpu, n, k))
    tiles, x = weight(n, k), np.random.default_rng(m).standard_normal((m, k), np.float32)
    gemm, given = op.PanelGemm(gpu, gpu.array(tiles.data)), gpu.array(bf16(x))
    found = gpu.numpy(gemm.prepare(given)())
    assert errors(found, prefill_gemm.reference(x, tiles)).relative_frobenius <= 4e-3
    rounded, scratch = gpu.empty((m, n), np.uint16), gpu.empty(max(gemm.scratch(m), 4), np.float32)
    rounded.fill(0xffff)
    for _ in range(2):  # bits repeat, and what blocks leave each other serves again
        assert np.array_equal(gpu.numpy(gemm.prepare(given, out=rounded, scratch=scratch)()), bf16(found))
    assert np.isfinite(floats(gpu.numpy(rounded))).all()
