"""Lane maps: bijections, equal to the formulas in the makers' manuals, and the same in the generated header; the
tokens of P V that follow from them: equal to the article's, and right when V is loaded lane by lane."""

import re

import numpy as np
import pytest

from kernelbook import fragments
from kernelbook.fragments import INSTRUCTIONS, LOADS, Instruction, Operand, Tokens

OPERANDS = [pytest.param(getattr(i, o), id=f"{i.name}-{o}") for i in INSTRUCTIONS.values() for o in "ABD"]


def lanes_elements(operand):
    return np.meshgrid(np.arange(operand.lanes), np.arange(operand.elements), indexing="ij")


@pytest.mark.parametrize("operand", OPERANDS)
def test_map_is_a_bijection_and_owner_its_inverse(operand):
    lane, element = lanes_elements(operand)
    row, column = operand.place(lane, element)
    rows, columns = operand.shape
    assert sorted((row * columns + column).ravel()) == list(range(rows * columns))
    back = operand.owner(row, column)
    assert np.array_equal(back[0], lane) and np.array_equal(back[1], element)


@pytest.mark.parametrize("operand", OPERANDS)
def test_pack_and_unpack(operand):
    rows, columns = operand.shape
    matrix = np.arange(rows * columns).reshape(rows, columns).astype(operand.dtype)
    packed = operand.pack(matrix)
    assert packed.shape == (operand.lanes, operand.elements)
    assert np.array_equal(operand.unpack(packed), matrix)
    lane, element = 5, operand.elements - 1
    row, column = operand.place(lane, element)
    assert packed[lane, element] == matrix[row, column]


# The makers' formulas for (row, column) of lane l, element e; g and t are NVIDIA's group and thread in group.
def nvidia(formula):
    return lambda l, e: formula(l >> 2, l & 3, e)


EIGHT_BIT_A = nvidia(lambda g, t, e: (g + 8 * (e >> 2 & 1), 4 * t + (e & 3) + 16 * (e >> 3)))
EIGHT_BIT_B = nvidia(lambda g, t, e: (4 * t + (e & 3) + 16 * (e >> 2), g))
SIXTEEN_BIT_A = nvidia(lambda g, t, e: (g + 8 * (e >> 1 & 1), 2 * t + (e & 1) + 8 * (e >> 2)))
SIXTEEN_BIT_B = nvidia(lambda g, t, e: (2 * t + (e & 1) + 8 * (e >> 1), g))
NVIDIA_D = nvidia(lambda g, t, e: (g + 8 * (e >> 1), 2 * t + (e & 1)))
AMD_A = lambda l, e: (l & 15, 8 * (l >> 4) + e)  # noqa: E731
AMD_B = lambda l, e: (8 * (l >> 4) + e, l & 15)  # noqa: E731
AMD_16_A = lambda l, e: (l & 15, 4 * (l >> 4) + e)  # noqa: E731
AMD_16_B = AMD_D = lambda l, e: (4 * (l >> 4) + e, l & 15)
MMAC_D = lambda l, e: (l & 15, (l >> 4) + 4 * e)  # noqa: E731
FORMULAS = {
    "mma_m16n8k32_s8": (EIGHT_BIT_A, EIGHT_BIT_B, NVIDIA_D),
    "mma_m16n8k32_u8s8": (EIGHT_BIT_A, EIGHT_BIT_B, NVIDIA_D),
    "mma_m16n8k32_s8u8": (EIGHT_BIT_A, EIGHT_BIT_B, NVIDIA_D),
    "mma_m16n8k16_bf16": (SIXTEEN_BIT_A, SIXTEEN_BIT_B, NVIDIA_D),
    "mma_m16n8k16_f16": (SIXTEEN_BIT_A, SIXTEEN_BIT_B, NVIDIA_D),
    "mfma_i32_16x16x32_i8": (AMD_A, AMD_B, AMD_D),
    "mmac_i32_16x16x32_i8": (AMD_A, AMD_B, MMAC_D),
    "mfma_f32_16x16x16_bf16": (AMD_16_A, AMD_16_B, AMD_D),
    "mmac_f32_16x16x16_bf16": (AMD_16_A, AMD_16_B, MMAC_D),
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_map_equals_the_makers_formula(name):
    for operand, formula in zip("ABD", FORMULAS[name], strict=True):
        o = getattr(INSTRUCTIONS[name], operand)
        lane, element = lanes_elements(o)
        assert np.array_equal(o.place(lane, element), formula(lane, element)), operand


def product(instruction, a, b):
    """D's fragments for fragments of A and B."""
    A, B = instruction.A.unpack(a).astype(np.int32), instruction.B.unpack(b).astype(np.int32)
    return instruction.D.pack(A @ B)


@pytest.mark.parametrize("shape", ["i32_16x16x32_i8", "f32_16x16x16_bf16"])
def test_mmac_is_mfma_with_operands_swapped_and_rows_permuted(shape):
    """Small numbers as the 16 bits of bf16: a map moves elements and does not care what they stand for."""
    rng = np.random.default_rng(0)
    mmac, mfma = INSTRUCTIONS[f"mmac_{shape}"], INSTRUCTIONS[f"mfma_{shape}"]
    A, B = rng.integers(0, 128, (16, mmac.K)), rng.integers(0, 128, (mmac.K, 16))
    r = np.arange(16)
    permuted = B[:, r // 4 + 4 * (r % 4)]
    swapped = product(mfma, mfma.A.pack(permuted.T), mfma.B.pack(A.T))
    assert np.array_equal(product(mmac, mmac.A.pack(A), mmac.B.pack(B)), swapped)


def test_known_registers():
    """The first lane's registers of A in mma.m16n8k32, written out by hand."""
    A = np.arange(512, dtype=np.int32).reshape(16, 32)
    packed = Operand("l2 l3 l4 e2", "e0 e1 l0 l1 e3", np.int32).pack(A)
    assert packed[0].tolist() == [0, 1, 2, 3, 256, 257, 258, 259, 16, 17, 18, 19, 272, 273, 274, 275]
    assert packed[6].tolist()[:4] == [40, 41, 42, 43]  # group 1, thread 2


def test_header_holds_the_same_maps():
    text = fragments.header()
    for i in INSTRUCTIONS.values():
        place = re.search(rf'constexpr Instruction {i.name} = {{"{i.name}", (\d+), (\d+), (\d+), (\d+),', text)
        assert [int(n) for n in place.groups()] == [i.lanes, i.M, i.N, i.K]
    assert text.count("constexpr Instruction") == len(INSTRUCTIONS)


def test_bad_maps_and_shapes_are_refused():
    with pytest.raises(ValueError, match="permutation.*'l0 l0'"):
        Operand("l0 l0", "e0", np.int8)
    with pytest.raises(ValueError, match="16 x 32.*\\(32, 16\\)"):
        INSTRUCTIONS["mma_m16n8k32_s8"].A.pack(np.zeros((32, 16)))
    with pytest.raises(ValueError, match="32 lanes x 4 elements.*\\(4, 32\\)"):
        INSTRUCTIONS["mma_m16n8k32_s8"].D.unpack(np.zeros((4, 32)))
    mma = INSTRUCTIONS["mma_m16n8k32_s8"]
    with pytest.raises(ValueError, match="do not fit"):
        Instruction("wrong", "wrong", mma.B, mma.A, mma.D)


# ---- tokens of the steps of P V ----

INT8 = ["mma_m16n8k32_s8", "mfma_i32_16x16x32_i8", "mmac_i32_16x16x32_i8"]
TOKENS = [pytest.param(Tokens(i, load, operand), id=f"{i.name}-{operand}-{load}")
          for i in INSTRUCTIONS.values() for operand in "AB" for load in LOADS
          if getattr(i, operand).dtype is not np.uint8]


def ranges(*bounds):
    return [token for first, last in bounds for token in range(first, last + 1)]


INTERLEAVED = [ranges((0, 7), (16, 23), (32, 39), (48, 55)), ranges((8, 15), (24, 31), (40, 47), (56, 63))]


@pytest.mark.parametrize("operand", "AB")
@pytest.mark.parametrize("name", INT8)
def test_16_byte_loads_give_the_articles_two_interleaved_sets(name, operand):
    """Also for mma.sync, whose lanes hold other k, and with V and P swapped."""
    tokens = Tokens(INSTRUCTIONS[name], 16, operand)
    assert (tokens.steps, tokens.tile) == (2, 64)
    assert tokens.sets().tolist() == INTERLEAVED
    logical = np.arange(64).reshape(2, 32)
    assert len(np.intersect1d(tokens.sets()[0], logical[0])) == 16  # half of a step would get the wrong scale


@pytest.mark.parametrize("load", [4, 8])
@pytest.mark.parametrize("name", INT8)
def test_narrower_loads_give_contiguous_sets(name, load):
    tokens = Tokens(INSTRUCTIONS[name], load)
    assert tokens.sets().tolist() == [list(range(32))]


def test_the_load_at_which_k_is_the_token():
    for name, load in [("mma_m16n8k32_s8", 4), ("mfma_i32_16x16x32_i8", 8), ("mmac_i32_16x16x32_i8", 8)]:
        for other in LOADS:
            same = np.array_equal(Tokens(INSTRUCTIONS[name], other).token(0, np.arange(32)), np.arange(32))
            assert same == (other == load), (name, other)


def test_8_bytes_of_a_16_byte_load_miss_the_second_step():
    tokens = Tokens(INSTRUCTIONS["mmac_i32_16x16x32_i8"])
    assert tokens.missing(8).tolist() == INTERLEAVED[1]
    assert tokens.missing(16).size == 0


@pytest.mark.parametrize("tokens", TOKENS)
def test_every_token_belongs_to_one_step_and_place_is_the_inverse(tokens):
    assert sorted(tokens.sets().ravel()) == list(range(tokens.tile))
    assert tokens.tile == tokens.steps * tokens.instruction.K
    step, k = np.indices((tokens.steps, tokens.instruction.K))
    back = tokens.place(tokens.token(step, k))
    assert np.array_equal(back[0], step) and np.array_equal(back[1], k)
    later = tokens.place(tokens.token(step, k) + 3 * tokens.tile)
    assert np.array_equal(later[0], step) and np.array_equal(later[1], k)


def loads_of_v(tokens, V):
    """Fragments [steps, lanes, elements] of V [head_dim columns, tokens of a tile], loaded lane by lane."""
    i, on_b = tokens.instruction, tokens.operand == "B"
    operand = i.B if on_b else i.A
    loaded = np.empty((tokens.steps, operand.lanes, operand.elements), operand.dtype)
    for lane in range(operand.lanes):
        # Position of the lane along k: NVIDIA's thread in group, AMD's quarter of the wave.
        along = lane & 3 if i.lanes == 32 else lane >> 4
        place = operand.place(np.full(operand.elements, lane), np.arange(operand.elements))
        for column in np.unique(place[1 if on_b else 0]):
            mine, = np.nonzero(place[1 if on_b else 0] == column)
            wanted = tokens.steps * len(mine)
            rounds = V[column].reshape(-1, 4, tokens.load)  # 4 lanes along k, each with a load, then again
            loaded[:, lane, mine] = rounds[:, along].ravel()[:wanted].reshape(tokens.steps, len(mine))
    return loaded


@pytest.mark.parametrize("tokens", TOKENS)
def test_products_of_loaded_fragments_add_up_to_p_v(tokens):
    """V as lanes load it, P as `held` says: right. P by logical tokens: wrong, unless k is the token."""
    rng, i = np.random.default_rng(1), tokens.instruction
    on_b = tokens.operand == "B"
    P = rng.integers(0, 100, (i.M if on_b else i.N, tokens.tile))
    V = rng.integers(1, 100, (i.N if on_b else i.M, tokens.tile))
    v = loads_of_v(tokens, V)
    p_operand, name = (i.A, "A") if on_b else (i.B, "B")
    lane, element = lanes_elements(p_operand)
    query = p_operand.place(lane, element)[0 if on_b else 1]

    def total(token_of):
        sums = 0
        for step in range(tokens.steps):
            p = P[query, token_of(step)].astype(p_operand.dtype)
            a, b = (p, v[step]) if on_b else (v[step], p)
            sums = sums + i.A.unpack(a).astype(int) @ i.B.unpack(b).astype(int)
        return sums if on_b else sums.T

    assert np.array_equal(total(lambda step: tokens.held(name, step, lane, element)), P @ V.T)
    k = p_operand.place(lane, element)[1 if on_b else 0]
    logical = total(lambda step: step * i.K + k)
    in_order = np.array_equal(tokens.token(np.arange(tokens.steps)[:, None], np.arange(i.K)).ravel(),
                              np.arange(tokens.tile))
    assert np.array_equal(logical, P @ V.T) == in_order


@pytest.mark.parametrize("load", LOADS)
def test_mfma_and_mmac_own_the_same_tokens_lane_by_lane(load):
    mfma, mmac = (Tokens(INSTRUCTIONS[name], load) for name in INT8[1:])
    for operand in "AB":
        lane, element = lanes_elements(mfma.instruction.A)
        for step in range(mfma.steps):
            assert np.array_equal(mfma.held(operand, step, lane, element), mmac.held(operand, step, lane, element))


def test_the_articles_pv_tile():
    """Step of the 16 x 16 scores that a lane of the MMAC holds: (lane // 16 + 4 * i) // 8."""
    mmac = INSTRUCTIONS["mmac_i32_16x16x32_i8"]
    lane, i = lanes_elements(mmac.D)
    step, _ = Tokens(mmac).place(mmac.D.place(lane, i)[1])
    assert np.array_equal(step, ((lane >> 4) + 4 * i) // 8)


def test_blocks_that_a_tile_touches():
    tokens = Tokens(INSTRUCTIONS["mmac_i32_16x16x32_i8"])
    assert [tokens.blocks(size) for size in (16, 32, 48, 64, 96, 128)] == [4, 2, 2, 1, 2, 1]
    for size in range(16, 400, 16):
        starts = np.arange(0, 64 * size, 64)
        assert tokens.blocks(size) == ((starts + 63) // size - starts // size + 1).max(), size
    for size in (8, 24, 0, -16):
        with pytest.raises(ValueError, match=f"block size {size} .*multiple of 16"):
            tokens.blocks(size)
    assert Tokens(tokens.instruction, 8).blocks(8) == 4


def test_tokens_that_cannot_be_are_refused():
    mma = INSTRUCTIONS["mma_m16n8k32_u8s8"]
    with pytest.raises(ValueError, match="4, 8 or 16 bytes.*load=12"):
        Tokens(mma, 12)
    with pytest.raises(ValueError, match="'A' or 'B', got 'D'"):
        Tokens(mma, 16, "D")
    with pytest.raises(ValueError, match="operand A of mma_m16n8k32_u8s8 is unsigned"):
        Tokens(mma, 16, "A")
    with pytest.raises(ValueError, match="operand B of mma_m16n8k32_s8u8 is unsigned"):
        Tokens(INSTRUCTIONS["mma_m16n8k32_s8u8"])


KERNEL = """
#include "gpu.h"
#include "fragments.h"
extern "C" __global__ void places(int *out) {
  const int k = threadIdx.x;
  %s
}
GPU_KERNEL(places)
"""


def test_kernels_compute_the_same_tokens(simulator, tmp_path):
    parameters = [p.values[0] for p in TOKENS]
    body = "\n".join(
        f"{{ constexpr fragments::Tokens t = fragments::{t.instruction.name}_{t.operand}_{t.load};\n"
        f"  static_assert(t.load == {t.load} && t.steps == {t.steps} && t.tile == {t.tile});\n"
        f"  for (int step = 0; step < t.steps; ++step, out += {3 * t.instruction.K})\n"
        f"    if (k < {t.instruction.K}) {{\n"
        "      const int token = fragments::token(t, step, k);\n"
        "      out[3 * k] = token, out[3 * k + 1] = fragments::step_of(t, token);\n"
        "      out[3 * k + 2] = fragments::k_of(t, token);\n"
        "    } }" for t in parameters)
    (tmp_path / "places.cu").write_text(KERNEL % body)
    expected = []
    for t in parameters:
        step, k = np.indices((t.steps, t.instruction.K))
        expected.append(np.stack([t.token(step, k), step, k], axis=-1).ravel())
    expected = np.concatenate(expected)
    out = simulator.empty(expected.shape, np.int32)
    simulator.compile(str(tmp_path / "places.cu")).kernel("places")((1, 1, 1), (32, 1, 1), [out])
    assert np.array_equal(simulator.numpy(out), expected)
