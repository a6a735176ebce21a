"""Lane maps: bijections, equal to the formulas in the makers' manuals, and the same in the generated header."""

import re

import numpy as np
import pytest

from kernelbook import fragments
from kernelbook.fragments import INSTRUCTIONS, Instruction, Operand

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
NVIDIA_D = nvidia(lambda g, t, e: (g + 8 * (e >> 1), 2 * t + (e & 1)))
AMD_A = lambda l, e: (l & 15, 8 * (l >> 4) + e)  # noqa: E731
AMD_B = lambda l, e: (8 * (l >> 4) + e, l & 15)  # noqa: E731
AMD_D = lambda l, e: (4 * (l >> 4) + e, l & 15)  # noqa: E731
FORMULAS = {
    "mma_m16n8k32_s8": (EIGHT_BIT_A, EIGHT_BIT_B, NVIDIA_D),
    "mma_m16n8k32_u8s8": (EIGHT_BIT_A, EIGHT_BIT_B, NVIDIA_D),
    "mma_m16n8k16_bf16": (nvidia(lambda g, t, e: (g + 8 * (e >> 1 & 1), 2 * t + (e & 1) + 8 * (e >> 2))),
                          nvidia(lambda g, t, e: (2 * t + (e & 1) + 8 * (e >> 1), g)), NVIDIA_D),
    "mfma_i32_16x16x32_i8": (AMD_A, AMD_B, AMD_D),
    "mmac_i32_16x16x32_i8": (AMD_A, AMD_B, lambda l, e: (l & 15, (l >> 4) + 4 * e)),
    "mfma_f32_16x16x16_bf16": (lambda l, e: (l & 15, 4 * (l >> 4) + e), lambda l, e: (4 * (l >> 4) + e, l & 15),
                               AMD_D),
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


def test_mmac_is_mfma_with_operands_swapped_and_rows_permuted():
    rng = np.random.default_rng(0)
    mmac, mfma = INSTRUCTIONS["mmac_i32_16x16x32_i8"], INSTRUCTIONS["mfma_i32_16x16x32_i8"]
    A, B = rng.integers(-128, 128, (16, 32)), rng.integers(-128, 128, (32, 16))
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
