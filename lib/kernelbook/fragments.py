"""Lane maps of matrix instructions as data: which lane holds which element of A, B and D.

Each map permutes bits: every bit of an element's row and column is one bit of the lane number or of the
element's index within its lane. The maps are written that way, least significant bit first: "l2 l3 l4 e2"
reads bit 0 from lane bit 2, ..., bit 3 from element bit 2. Pure data: the simulator's instructions (through
`header`), the packing of operands and the figures all derive from it.

A is M x K, B is K x N, D is M x N. An element is a byte of an int8 operand, 16 bits of a bf16 one, 32 of D.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Operand:
    """Where one operand of a matrix instruction lies.

    row, column: source bits, least significant first: "l2" is bit 2 of the lane, "e2" bit 2 of the element.
    dtype: NumPy dtype of an element; bf16 is held as its 16 bits in uint16.
    Raises ValueError where the bits are not each named exactly once.
    """

    row: str
    column: str
    dtype: type
    lanes: int = field(init=False)
    elements: int = field(init=False)  # in each lane

    def __post_init__(self):
        bits = self.row.split() + self.column.split()
        counts = {kind: sum(bit[0] == kind for bit in bits) for kind in "le"}
        if sorted(bits) != sorted(f"{kind}{b}" for kind, n in counts.items() for b in range(n)):
            raise ValueError("not a permutation of lane and element bits: "
                             f"row {self.row!r}, column {self.column!r}")
        object.__setattr__(self, "lanes", 1 << counts["l"])
        object.__setattr__(self, "elements", 1 << counts["e"])

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return 1 << len(self.row.split()), 1 << len(self.column.split())

    def place(self, lane, element):
        """(row, column) of element `element` of lane `lane`; integers or integer arrays that broadcast."""
        source = {"l": np.asarray(lane), "e": np.asarray(element)}
        return tuple(sum((source[bit[0]] >> int(bit[1:]) & 1) << i for i, bit in enumerate(bits.split()))
                     for bits in (self.row, self.column))

    def owner(self, row, column):
        """(lane, element) that holds the matrix element at (row, column): the inverse of `place`."""
        held = {"l": 0, "e": 0}
        for bits, index in ((self.row, np.asarray(row)), (self.column, np.asarray(column))):
            for i, bit in enumerate(bits.split()):
                held[bit[0]] = held[bit[0]] + ((index >> i & 1) << int(bit[1:]))
        return held["l"], held["e"]

    def pack(self, matrix):
        """Fragments [lanes, elements] of a matrix of `shape`; `.view(np.uint32)` makes registers of them."""
        matrix = np.asarray(matrix, self.dtype)
        if matrix.shape != self.shape:
            raise ValueError(f"operand is {self.shape[0]} x {self.shape[1]}, "
                             f"got an array of shape {matrix.shape}")
        return matrix[self.place(np.arange(self.lanes)[:, None], np.arange(self.elements))]

    def unpack(self, fragments):
        """The matrix that fragments [lanes, elements] make up: the inverse of `pack`."""
        fragments = np.asarray(fragments, self.dtype)
        if fragments.shape != (self.lanes, self.elements):
            raise ValueError(f"fragments are {self.lanes} lanes x {self.elements} elements, "
                             f"got an array of shape {fragments.shape}")
        rows, columns = np.indices(self.shape)
        return fragments[self.owner(rows, columns)]


@dataclass(frozen=True)
class Instruction:
    """A matrix instruction D += A B that a whole wave carries out together.

    name: of the function in kernels/portable. mnemonic: the instruction's name in its maker's manual.
    """

    name: str
    mnemonic: str
    A: Operand
    B: Operand
    D: Operand

    def __post_init__(self):
        if not (self.A.shape == (self.M, self.K) and self.B.shape == (self.K, self.N)
                and self.A.lanes == self.B.lanes == self.D.lanes):
            raise ValueError(f"{self.name}: A of {self.A.shape}, B of {self.B.shape} and D of {self.D.shape} "
                             "do not fit")

    @property
    def M(self) -> int:
        return self.D.shape[0]

    @property
    def N(self) -> int:
        return self.D.shape[1]

    @property
    def K(self) -> int:
        return self.A.shape[1]

    @property
    def lanes(self) -> int:
        return self.D.lanes


def _mma_m16n8k32(name, a_dtype, a_name):
    # Lane = 4 * group + thread in group; a 32-bit register holds four neighbouring k.
    return Instruction(name, f"mma.sync.aligned.m16n8k32.row.col.s32.{a_name}.s8.s32",
                       A=Operand("l2 l3 l4 e2", "e0 e1 l0 l1 e3", a_dtype),
                       B=Operand("e0 e1 l0 l1 e2", "l2 l3 l4", np.int8),
                       D=Operand("l2 l3 l4 e1", "e0 l0 l1", np.int32))


INSTRUCTIONS = {i.name: i for i in (
    _mma_m16n8k32("mma_m16n8k32_s8", np.int8, "s8"),
    _mma_m16n8k32("mma_m16n8k32_u8s8", np.uint8, "u8"),
    Instruction("mma_m16n8k16_bf16", "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32",
                A=Operand("l2 l3 l4 e1", "e0 l0 l1 e2", np.uint16),
                B=Operand("e0 l0 l1 e1", "l2 l3 l4", np.uint16),
                D=Operand("l2 l3 l4 e1", "e0 l0 l1", np.float32)),
    # CDNA3: a lane holds eight neighbouring k of one row of A and of one column of B, and four rows of D.
    Instruction("mfma_i32_16x16x32_i8", "v_mfma_i32_16x16x32_i8",
                A=Operand("l0 l1 l2 l3", "e0 e1 e2 l4 l5", np.int8),
                B=Operand("e0 e1 e2 l4 l5", "l0 l1 l2 l3", np.int8),
                D=Operand("e0 e1 l4 l5", "l0 l1 l2 l3", np.int32)),
    # gfx936, gfx928: A and B the same; a lane holds every fourth column of one row of D.
    Instruction("mmac_i32_16x16x32_i8", "v_mmac_i32_16x16x32_i8",
                A=Operand("l0 l1 l2 l3", "e0 e1 e2 l4 l5", np.int8),
                B=Operand("e0 e1 e2 l4 l5", "l0 l1 l2 l3", np.int8),
                D=Operand("l0 l1 l2 l3", "l4 l5 e0 e1", np.int32)),
    Instruction("mfma_f32_16x16x16_bf16", "v_mfma_f32_16x16x16_bf16",
                A=Operand("l0 l1 l2 l3", "e0 e1 l4 l5", np.uint16),
                B=Operand("e0 e1 l4 l5", "l0 l1 l2 l3", np.uint16),
                D=Operand("e0 e1 l4 l5", "l0 l1 l2 l3", np.float32)),
)}


_HEADER = """\
// Lane maps of matrix instructions, generated from the table in kernelbook/fragments.py.
#pragma once
namespace fragments {
// An operand's rows, columns and elements in each lane, and where the bits of its row and column come from, least
// significant first: s is bit s of the lane, 8 + s is bit s of the element's index in the lane, -1 ends the list.
struct Operand { int rows, columns, elements; signed char row[6], column[6]; };
struct Instruction { const char *name; int lanes, M, N, K; Operand A, B, D; };

__host__ __device__ constexpr int gather(const signed char *source, int lane, int element) {
  int index = 0;
  for (int i = 0; source[i] >= 0; ++i)
    index |= ((source[i] < 8 ? lane >> source[i] : element >> (source[i] - 8)) & 1) << i;
  return index;
}
__host__ __device__ constexpr int row(const Operand &o, int lane, int element) {
  return gather(o.row, lane, element);
}
__host__ __device__ constexpr int column(const Operand &o, int lane, int element) {
  return gather(o.column, lane, element);
}

"""


def header() -> str:
    """Text of `fragments.h`: every map as a constexpr `fragments::NAME`, and the functions `row` and `column`."""
    def bits(names):
        return ", ".join(str(int(name[1:]) + 8 * (name[0] == "e")) for name in names.split())

    def operand(o):
        return f"{{{o.shape[0]}, {o.shape[1]}, {o.elements}, {{{bits(o.row)}, -1}}, {{{bits(o.column)}, -1}}}}"

    instructions = [f'constexpr Instruction {i.name} = {{"{i.name}", {i.lanes}, {i.M}, {i.N}, {i.K},\n'
                    f"    {operand(i.A)},\n    {operand(i.B)},\n    {operand(i.D)}}};\n"
                    for i in INSTRUCTIONS.values()]
    return _HEADER + "".join(instructions) + "}  // namespace fragments\n"
