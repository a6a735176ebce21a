"""Waves of 32 and of 64 lanes: every family gives the same results on both, integers to the bit, and a kernel that
takes a wave for 32 lanes is found out."""

import shutil

import numpy as np
import pytest

from kernelbook import formats, kv_cache
from kernelbook.backends import source
from kernelbook.backends.cpu import CpuBackend, KernelFault
from kernelbook.experiments.grouped_gemm import random_strips
from kernelbook.ops import gated_delta_net, grouped_gemm, int8_pv, layer, prefill_gemm, q4_probe
from kernelbook.stats import errors

FLOATS = 1e-6
"""Relative error between two orders of adding floats."""


def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def both(compute):
    """What `compute(backend)` gives for waves of 32 lanes and of 64."""
    return [compute(CpuBackend(wave)) for wave in (32, 64)]


def assert_close(narrow, wide, bound=FLOATS):
    assert narrow.shape == wide.shape and np.isfinite(narrow).all()
    assert errors(wide, narrow).relative_frobenius <= bound, errors(wide, narrow)


def assert_equal(narrow, wide):
    for a, b in zip(narrow, wide, strict=True):
        assert np.array_equal(a, b)


# ---- families

def test_grouped_gemm():
    strips = random_strips(np.random.default_rng(1), 72, 256, 32, "int8")
    x = normal(3, 256)
    pair = formats.quantize_activations(x, 32)

    def compute(backend):
        gemm = grouped_gemm.GroupedGemm(backend, strips, "int8", keep_sums=True)
        out = backend.numpy(gemm(tuple(map(backend.array, pair)), nsplit=2))
        return out, backend.numpy(gemm.sums), backend.numpy(grouped_gemm.GroupedGemm(backend, strips)(backend.array(x)))
    narrow, wide = both(compute)
    assert_equal(narrow[1:2], wide[1:2])
    assert_close(narrow[0], wide[0])
    assert_close(narrow[2], wide[2])


def probe(variant, wave_rows):
    weights, x = formats.random_tiles(np.random.default_rng(2), 20, 544), normal(8, 544)

    def compute(backend):
        multiply = q4_probe.Q4Probe(backend, weights, variant, wave_rows)
        if variant == "int8_dot":
            return backend.numpy(multiply(tuple(map(backend.array, formats.quantize_activations(x)))))
        return backend.numpy(multiply(backend.array(x)))
    assert_close(*both(compute))


@pytest.mark.parametrize("variant, wave_rows", [("baseline", 1), ("explicit_fma", 4), ("int8_dot", 2)])
def test_q4_probe(variant, wave_rows):
    probe(variant, wave_rows)


@pytest.mark.parametrize("design, same_bits", [("tiled_fp32", True), ("int8_dot", True), ("int8_matrix", True),
                                               ("tensor_cores", False)])
def test_prefill_gemm(design, same_bits):
    weights, x = formats.random_tiles(np.random.default_rng(3), 68, 128), normal(17, 128)
    takes = prefill_gemm.DESIGNS[design].activations

    def compute(backend):
        if takes == "int8":
            given = tuple(map(backend.array, formats.quantize_activations(x)))
        elif takes == "bf16":
            bits = x.view(np.uint32)
            given = backend.array(((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16))
        else:
            given = backend.array(x)
        return backend.numpy(prefill_gemm.PrefillGemm(backend, weights, design).prepare(given)())
    narrow, wide = both(compute)
    assert np.array_equal(narrow, wide) if same_bits else errors(wide, narrow).relative_frobenius <= FLOATS


@pytest.mark.parametrize("design, bound", [("sequential", FLOATS), ("chunked", 4e-5)])
def test_gated_delta_net(design, bound):
    """The chunked form's operands are sums of two bf16 numbers, 2^-17 off, and are split differently."""
    w = gated_delta_net.Weights(0.5 * normal(4 * 128, 4), np.log([0.1, 2.0]).astype(np.float32), normal(2),
                                np.ones(128, np.float32))
    given = gated_delta_net.inputs_reference(normal(66, 4 * 128), normal(66, 2, seed=1), normal(66, 2, seed=2), w,
                                             normal(3, 4 * 128, seed=3))[0]

    def compute(backend):
        net = gated_delta_net.GatedDeltaNet(backend, w, design)
        final = backend.empty((2, 128, 128), np.float32)
        on_device = type(given)(*(backend.array(a.astype(np.float32)) for a in vars(given).values()))
        return backend.numpy(net.prepare_recurrence(on_device, final=final)()), backend.numpy(final)
    for narrow, wide in zip(*both(compute), strict=True):
        assert_close(narrow, wide, bound)


def quantized_pages():
    k, v = normal(48, 2, 64), normal(48, 2, 64, seed=1)  # pages that are full
    tables = np.array([[5, 1, 3]])

    def compute(backend):
        cache = int8_pv.on_device(backend, kv_cache.empty(2, 64, 16, tables, np.array([48]), 6))
        slots = int8_pv.on_host(backend, cache).slots(0, 0, 48)
        int8_pv.write_tokens(backend, cache, backend.array(k), backend.array(v), slots)
        found = int8_pv.on_host(backend, cache)
        return [getattr(found, name)[[5, 1, 3]] for name in ("k_codes", "v_codes", "k_scales", "v_scales")]
    assert_equal(*both(compute))


def test_int8_pv_quantizes_to_the_same_bits():
    quantized_pages()


@pytest.mark.parametrize("method, queries", [("decode", 1), ("prefill", 3)])
def test_int8_pv(method, queries):
    """Scales of weights belong to other tokens on another lane map: what is left between two maps is their rounding."""
    cache = kv_cache.quantize([normal(130, 1, 64)], [normal(130, 1, 64, seed=1)], 16)
    q = normal(1, queries, 2, 64, seed=2)

    def compute(backend):
        attention = int8_pv.Attention(backend, int8_pv.on_device(backend, cache), int8_pv.Form("int8"))
        return backend.numpy(getattr(attention, method)(backend.array(q))())
    narrow, wide = both(compute)
    assert_close(narrow, wide, 0.02)
    assert_close(int8_pv.reference(q, cache).astype(np.float32), wide, 0.02)


def test_layer():
    x, weight = normal(3, 160), normal(160, seed=1)

    def compute(backend):
        out = layer.activations(backend, 3, 160, "int8")
        codes, scales = layer.add_norm(backend, backend.array(x), None, backend.array(weight), out)()
        return backend.numpy(codes), backend.numpy(scales)
    assert_equal(*both(compute))


# ---- a kernel that assumes 32 lanes

@pytest.mark.parametrize("file, code, planted, check", [
    ("q4_probe/probe.h", "flip = warpSize / 2", "flip = 16", lambda: probe("explicit_fma", 4)),
    ("q4_probe/probe.h", "return warpSize / kQuarters", "return 32 / kQuarters", lambda: probe("explicit_fma", 4)),
    ("int8_pv/1_quantize_kv.cu", "flip = warpSize / 2", "flip = 16", quantized_pages),
], ids=["half a butterfly", "lanes that meet", "half a maximum"])
def test_a_wave_taken_for_32_lanes_is_found_out(monkeypatch, tmp_path, file, code, planted, check):
    copy = tmp_path / "kernels"
    shutil.copytree(source.KERNELS, copy)
    text = (copy / file).read_text(encoding="utf-8")
    assert code in text
    (copy / file).write_text(text.replace(code, planted), encoding="utf-8")
    monkeypatch.setattr(source, "KERNELS", copy)
    with pytest.raises((AssertionError, KernelFault)):
        check()
