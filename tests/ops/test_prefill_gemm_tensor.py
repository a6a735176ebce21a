"""The designs of prefill_gemm on tensor cores."""

from copy import copy

import numpy as np
import pytest

from kernelbook import formats, fragments, stats, toolchain
from kernelbook.backends.cpu import CpuBackend
from kernelbook.ops import prefill_gemm as op
from kernelbook.ops.prefill_tensor import TENSOR_DESIGNS, plan

BOUND = 4e-3       # against float64 on the same codes and float activations
OWN_BOUND = 1e-6   # on the operands as they are multiplied: what is left is the order of sums
SHAPES = [(1, 48, 96), (5, 132, 64), (20, 260, 352), (40, 4, 32), (70, 132, 160), (130, 300, 288)]
"""(M, N, K): the compiled rows of x, ends within a tile, a step of half its columns, one step and several."""


def rng(*key):
    return np.random.default_rng(key)


def tiles(n, k, seed=0):
    return formats.random_tiles(rng(seed, n, k), n, k)


def normal(m, k, seed=1):
    return rng(seed, m, k).standard_normal((m, k), np.float32)


def to_bf16(x):
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7fff + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_float(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def with_processors(backend, multiprocessors):
    """The backend as one that has so many: as many blocks, and tiles that are cut."""
    other = copy(backend)
    other.multiprocessors = multiprocessors
    return other


def relative(out, ref):
    return stats.errors(out, ref).relative_frobenius


def check(backend, design, m, n, k, matrix=None):
    weights, x = tiles(n, k), normal(m, k)
    out = backend.numpy(op.PrefillGemm(backend, weights, design, matrix=matrix)(backend.array(to_bf16(x))))
    assert out.dtype == np.float32
    assert relative(out, op.reference(x, weights)) <= BOUND
    rounded = to_float(to_bf16(weights.dequantize())).astype(np.float64)
    assert relative(out, to_float(to_bf16(x)) @ rounded.T) <= OWN_BOUND


# ---- results

@pytest.mark.parametrize("m,n,k", SHAPES)
def test_against_float64(backend, m, n, k):
    check(with_processors(backend, 3) if backend.simulated else backend, "tensor_cores", m, n, k)


def test_on_mmac():
    """The third lane map there is."""
    for m, n, k in [(20, 260, 352), (70, 132, 160)]:
        check(with_processors(CpuBackend(wave=64), 2), "tensor_cores", m, n, k, "mmac")


def test_every_weight_is_its_product_rounded_once(backend):
    """One activation at a time gives the weights back: each nibble from where formats.Tiles says, and as the bf16
    nearest to code * scale, whatever bits a scale has; subnormal ones and the largest included."""
    codes = rng(2).integers(-8, 8, (136, 64), np.int8)
    scales = rng(3).uniform(0.002, 0.02, (136, 2)).astype(np.float16)
    scales[:4, 0] = [6e-8, 65504, -0.3333, 0]
    codes[:4, :16] = np.arange(-8, 8)
    packed = formats.pack(codes, scales.astype(np.float32), 32, "int4")
    weights = formats.tiles_from_blocks(formats.blocks_from_strips(packed))
    gemm = op.PrefillGemm(backend, weights, "tensor_cores")
    out = backend.numpy(gemm(backend.array(to_bf16(np.eye(64)))))
    assert np.array_equal(out, to_float(to_bf16(weights.dequantize())).T)


def test_two_bf16_hold_a_scale():
    """And the second times a code is one bf16: what dequantize.h adds up in one rounding is the exact product."""
    scales = np.arange(0x7c00, dtype=np.uint16).view(np.float16).astype(np.float32)
    rest = scales - to_float(to_bf16(scales))
    products = rest * np.arange(-8, 8, dtype=np.float32)[:, None]
    assert np.array_equal(to_float(to_bf16(rest)), rest) and np.array_equal(to_float(to_bf16(products)), products)


@pytest.mark.parametrize("multiprocessors", [1, 2, 3, 7, 40])
def test_tiles_cut_anywhere(multiprocessors):
    """Two pieces of a tile, many, pieces and whole tiles, one block for all."""
    backend = with_processors(CpuBackend(), multiprocessors)
    for m, n, k in [(17, 12, 2080), (16, 644, 1024)]:
        check(backend, "tensor_cores", m, n, k)


def test_pieces_are_added_in_the_order_of_k():
    """Whoever comes last: lanes, waves and blocks in any order give the same bits."""
    weights, x = tiles(132, 2080), to_bf16(normal(17, 2080))
    outs = []
    for order in range(4):
        backend = with_processors(CpuBackend(order=order), 7)
        gemm = op.PrefillGemm(backend, weights, "tensor_cores")
        outs.append(backend.numpy(gemm(backend.array(x))))
    assert all(np.array_equal(out, outs[0]) for out in outs)


def test_a_prepared_product_repeats_and_reads_what_x_holds(backend):
    """The counters are as they were before; scratch that another product has used does no harm."""
    backend = with_processors(backend, 7) if backend.simulated else backend
    weights, x = tiles(132, 2080), backend.array(to_bf16(normal(17, 2080)))
    gemm = op.PrefillGemm(backend, weights, "tensor_cores")
    scratch = backend.array(np.full(gemm.scratch(17) + 4, np.nan, np.float32))
    product = gemm.prepare(x, scratch=scratch)
    for seed in (1, 1, 2):
        new = normal(17, 2080, seed)
        backend.copy_in(x, to_bf16(new))
        first = backend.numpy(product()).copy()
        assert relative(first, op.reference(new, weights)) <= BOUND
        assert np.array_equal(backend.numpy(product()), first)


def test_bf16_output_is_the_sum_rounded(backend):
    weights, x = tiles(132, 160), backend.array(to_bf16(normal(20, 160)))
    gemm = op.PrefillGemm(backend, weights, "tensor_cores")
    short = gemm(x, out=backend.empty((20, 132), np.uint16))
    assert np.array_equal(backend.numpy(short), to_bf16(backend.numpy(gemm(x))))


@pytest.mark.parametrize("dtype,value", [(np.float32, 7), (np.uint16, 7)])
def test_what_lies_around_the_output_is_left_alone(backend, dtype, value):
    memory = backend.array(np.full((22, 132), value, dtype))
    weights, x = tiles(132, 96), normal(18, 96)
    op.PrefillGemm(backend, weights, "tensor_cores")(backend.array(to_bf16(x)), out=memory[2:20])
    memory = backend.numpy(memory)
    out = memory[2:20] if dtype == np.float32 else to_float(memory[2:20])
    assert relative(out, op.reference(x, weights)) <= BOUND
    assert (memory[[0, 1, 20, 21]] == value).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_activations_that_are_not_finite_spoil_their_row_only(backend, value):
    x, weights = normal(4, 288), tiles(20, 288)
    x[2, 259] = value
    out = backend.numpy(op.PrefillGemm(backend, weights, "tensor_cores")(backend.array(to_bf16(x))))
    assert not np.isfinite(out[2]).any()
    x[2] = out[2] = 0
    assert relative(out, op.reference(x, weights)) <= BOUND


def test_no_rows_are_no_launch(backend):
    gemm = op.PrefillGemm(backend, tiles(8, 64), "tensor_cores")
    assert gemm(backend.empty((0, 64), np.uint16)).shape == (0, 8) and gemm.scratch(0) == 0


# ---- on a GPU

@pytest.fixture
def hopper(gpu):
    if gpu.arch != "90a":
        pytest.skip(f"{gpu.device} has no warpgroup instructions")
    return gpu


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 30, 60, 128, 500])
def test_wgmma_against_float64(hopper, m):
    for n, k in [(48, 5120), (1028, 64), (300, 2112), (4100, 1024)]:
        check(hopper, "wgmma", m, n, k)


@pytest.mark.gpu
def test_wgmma_agrees_with_its_sibling_and_repeats(hopper):
    weights, x = tiles(2052, 5120), hopper.array(to_bf16(normal(300, 5120)))
    wgmma, sibling = (op.PrefillGemm(hopper, weights, design) for design in ("wgmma", "tensor_cores"))
    product = wgmma.prepare(x)
    out = hopper.numpy(product()).copy()
    assert relative(out, hopper.numpy(sibling(x))) <= OWN_BOUND
    assert all(np.array_equal(hopper.numpy(product()), out) for _ in range(5))
    short = wgmma(x, out=hopper.empty((300, 2052), np.uint16))
    assert np.array_equal(hopper.numpy(short), to_bf16(out))


# ---- where wgmma's lanes find their weights

def test_a_lane_of_wgmma_reads_what_its_fragment_holds():
    """A from registers is laid out as A of mma.m16n8k16. What 5_wgmma.cu has a lane read, in words of tiles and
    nibbles, are the columns of its fragment, of rows that are neighbours where the fragment's are 8 apart."""
    weights = formats.random_tiles(rng(5), 16, 32)
    a = fragments.INSTRUCTIONS["mma_m16n8k16_bf16"].A
    for lane in range(32):
        row = lane // 4 * 2
        for part in range(2):
            for r in range(2):
                tile = weights.data[(row + r) // 4, 0]
                at = 8 + lane % 4 // 2 * 16 + row % 4 * 4 + part * 32 + r * 4
                pair = tile[at + lane % 2 * 2:][:2]  # what the bytes 0x4140 or 0x4342 select
                for half, nibbles in enumerate((pair & 15, pair >> 4)):
                    for e in range(2):
                        fragment_row, column = a.place(lane, 2 * (2 * part + r) + e)
                        assert fragment_row == lane // 4 + 8 * r
                        assert weights.codes[row + r, 16 * half + column] == (int(nibbles[e]) ^ 8) - 8


# ---- the plan

def test_every_multiprocessor_has_the_same_to_do():
    for n, k in [(17408, 5120), (5120, 17408), (5120, 6144), (12288, 5120), (16480, 5120)]:
        found = plan(TENSOR_DESIGNS["wgmma"], 512, n, k, 132)
        assert found.blocks == 132 and found.tiles * found.steps >= 132 * 50


def test_few_columns_take_tiles_of_fewer_tokens():
    """Of 1024 x 5120 there would be 16 tiles of 256 tokens: most of the time would go into adding up their parts."""
    assert plan(TENSOR_DESIGNS["wgmma"], 512, 1024, 5120, 132).tile.tokens == 64


@pytest.mark.parametrize("m,tokens", [(1, 16), (16, 16), (17, 32), (64, 64), (128, 128), (512, 256), (2048, 256)])
def test_tiles_are_as_tall_as_there_are_tokens(m, tokens):
    assert plan(TENSOR_DESIGNS["wgmma"], m, 17408, 5120, 132).tile.tokens == tokens


def test_small_products_take_few_blocks():
    found = plan(TENSOR_DESIGNS["wgmma"], 1, 48, 5120, 132)
    assert (found.tiles, found.steps, found.blocks) == (1, 80, 10)


def test_integers_of_the_schedule_do_not_overflow():
    """Its largest product is of a step in the row of cut tiles, of which there are up to twice the blocks."""
    found = plan(TENSOR_DESIGNS["tensor_cores"], 16, 2048, 2**23, 200)
    assert 2 * found.blocks**2 * found.steps < 2**31
    with pytest.raises(ValueError, match="multiply fewer rows at a time"):
        plan(TENSOR_DESIGNS["tensor_cores"], 2**20, 2**20, 2**20, 132)


# ---- bad input

def test_bad_input_is_refused_before_a_launch(backend):
    weights = tiles(8, 96)
    gemm, x = op.PrefillGemm(backend, weights, "tensor_cores"), backend.array(to_bf16(normal(4, 96)))
    untouched, memory = backend.array(np.full((4, 8), 7, np.float32)), backend.array(np.full(512, 7, np.uint16))
    device = backend.array(weights.data)
    bytes_ = backend.array(np.full(8 + weights.data.size, 7, np.uint8))
    cases = [
        (TypeError, "x has dtype float32; expected uint16", lambda: gemm(backend.array(normal(4, 96)))),
        (TypeError, "x is a list", lambda: gemm([[0] * 96])),
        (ValueError, r"x has shape \(4, 64\); expected \(4, 96\)", lambda: gemm(x[:, :64])),
        (ValueError, "strides", lambda: gemm(backend.array(to_bf16(normal(4, 192)))[:, ::2])),
        (ValueError, "multiple of 16", lambda: gemm(memory[1:385].reshape(4, 96), out=untouched)),
        (ValueError, r"out has shape \(4, 9\); expected \(4, 8\)", lambda: gemm(x, out=backend.empty((4, 9), "f4"))),
        (TypeError, "out has dtype float64", lambda: gemm(x, out=backend.empty((4, 8), np.float64))),
        (ValueError, "out overlaps x", lambda: gemm(memory[:384].reshape(4, 96), out=memory[352:384].reshape(4, 8))),
        (ValueError, "splits = 2; design 'tensor_cores' cuts tiles itself", lambda: gemm.prepare(x, splits=2)),
        (ValueError, "scratch has 8 elements; 4 x 8 take", lambda: gemm.prepare(x, scratch=backend.empty(8, "f4"))),
        (TypeError, "scratch has dtype int32", lambda: gemm.prepare(x, scratch=backend.empty(1 << 20, "i4"))),
    ]
    if getattr(backend, "arch", None) == "90a":
        cases += [(ValueError, "design 'wgmma': it takes K a multiple of 64, not 96; take 'tensor_cores'",
                   lambda: gemm.using("wgmma")),
                  (ValueError, "weights starts at address .*; expected a multiple of 16",
                   lambda: op.PrefillGemm(backend, bytes_[8:8 + 2 * 2 * 72].reshape(2, 2, 72), "wgmma"))]
    else:
        cases += [(ValueError, "design 'wgmma': it needs Hopper's warpgroup instructions",
                   lambda: op.PrefillGemm(backend, device, "wgmma"))]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()
    assert (backend.numpy(untouched) == 7).all() and (backend.numpy(memory) == 7).all()


# ---- static evidence

missing = toolchain.targets()


def needs(target):
    return pytest.mark.skipif(missing[target] is not None, reason=str(missing[target]))


@pytest.mark.parametrize("target", [pytest.param(target, marks=needs(target)) for target in missing])
def test_nothing_spills(target):
    for design in TENSOR_DESIGNS.values():
        for tokens in (16, 128):
            rows = toolchain.evidence(design.source(tokens), [target])
            assert len(rows) == (not design.wgmma or target == "sm_90a")
            assert not any(row["spill_bytes"] for row in rows)


@needs("sm_90a")
@pytest.mark.parametrize("tokens", [tile.tokens for tile in TENSOR_DESIGNS["wgmma"].tiles])
def test_products_of_wgmma_run_while_weights_are_made(tokens):
    """The compiler waits for each product where it cannot tell which registers are in use: it says so, and the loop
    would have as many waits. A step of 64 columns has four products and takes a warp 180 instructions, all told."""
    code = toolchain.compile_cuda(TENSOR_DESIGNS["wgmma"].source(tokens), "90a")
    _, log = toolchain.nvrtc_compile(TENSOR_DESIGNS["wgmma"].source(tokens), "90a")
    assert "serializ" not in log and "setmaxnreg" not in log
    kernel = code.kernels["prefill_wgmma"]
    loop, = (loop for loop in kernel.loops if any(i.opcode.startswith("HGMMA") for i in loop.instructions))
    opcodes = [i.opcode for i in loop.instructions]
    assert sum(o.startswith(f"HGMMA.64x{tokens}x16") for o in opcodes) == 4
    assert sum(o.startswith("WARPGROUP.DEPBAR") for o in opcodes) == 2
    assert len(opcodes) <= 180
