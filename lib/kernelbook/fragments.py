"""Lane maps of matrix instructions as data: which lane holds which element of A, B and D.

Each map permutes bits: every bit of an element's row and column is one bit of the lane number or of the
element's index within its lane. The maps are written that way, least significant bit first: "l2 l3 l4 e2"
reads bit 0 from lane bit 2, ..., bit 3 from element bit 2. Pure data: the simulator's instructions (through
`header`), the packing of operands, the tokens that the steps of P V own and the figures all derive from it.

A is M x K, B is K x N, D is M x N. An element is a byte of an int8 operand, 16 bits of a bf16 or f16 one, 32 of D.
"""

from dataclasses import dataclass, field
from functools import cache
from math import gcd

import numpy as np

LOADS = (4, 8, 16)  # bytes that one lane loads at once: whole registers, up to the widest load there is


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


@dataclass(frozen=True)
class Tokens:
    """Which tokens the steps of P V multiply, as it follows from how lanes load V.

    V lies in memory as INT8 with neighbouring tokens of one head_dim column side by side, and P V sums over
    tokens along k. What a lane loads at once are `load` neighbouring tokens of a column that the lane holds,
    the next lane along k loads the next `load`, and a lane feeds what it has, in order, to one step after the
    other. So a step's tokens are fixed by the lane map and the load, and need be neither neighbours nor in the
    order of k: the columns of P, and the scale of what one step multiplies, must follow them.

    instruction: of a step; a bf16 one takes V converted in registers. load: bytes, 4, 8 or 16.
    operand: what V is: "B" in P V, "A" in the swapped form, transposed V times transposed P.
    bits: sources of a token's bits, least significant first: "k2" is bit 2 of k, "s0" bit 0 of the step.
    steps: that one round of loads feeds. tile: tokens that they bring; tile t starts at token t * tile.
    Raises ValueError for another load or operand, and for an unsigned operand, which cannot hold V.
    """

    instruction: Instruction
    load: int = 16
    operand: str = "B"
    bits: str = field(init=False)
    steps: int = field(init=False)
    tile: int = field(init=False)

    def __post_init__(self):
        if self.load not in LOADS:
            raise ValueError(f"a lane loads {', '.join(map(str, LOADS[:-1]))} or {LOADS[-1]} bytes of V, "
                             f"got load={self.load!r}")
        if self.operand not in ("A", "B"):
            raise ValueError(f"V is operand 'A' or 'B', got {self.operand!r}")
        if getattr(self.instruction, self.operand).dtype is np.uint8:
            raise ValueError(f"operand {self.operand} of {self.instruction.name} is unsigned and cannot hold V")
        k_bits = {kind: [f"k{i}" for i, bit in enumerate(self._k_bits) if bit[0] == kind] for kind in "le"}
        width = self.load.bit_length() - 1
        # The bits that count a lane's tokens: first through the elements of a step, then through the steps.
        own = k_bits["e"] + [f"s{i}" for i in range(width - len(k_bits["e"]))]
        # A load covers the lowest `width` of them, then come the lanes, then further loads of the same step.
        bits = own[:width] + k_bits["l"] + own[width:]
        object.__setattr__(self, "bits", " ".join(bits))
        object.__setattr__(self, "steps", (1 << len(bits)) // self.instruction.K)
        object.__setattr__(self, "tile", 1 << len(bits))

    @property
    def _k_bits(self) -> list[str]:
        return (self.instruction.B.row if self.operand == "B" else self.instruction.A.column).split()

    def token(self, step, k):
        """Token of the tile that step `step` multiplies at `k`; integers or integer arrays that broadcast."""
        source = dict(zip("sk", np.broadcast_arrays(step, k), strict=True))
        return sum((source[bit[0]] >> int(bit[1:]) & 1) << i for i, bit in enumerate(self.bits.split()))

    def place(self, token):
        """(step, k) that multiplies `token`: the inverse of `token`. Tokens of later tiles count from their tile."""
        token = np.asarray(token)
        place = {"s": 0 * token, "k": 0 * token}
        for i, bit in enumerate(self.bits.split()):
            place[bit[0]] = place[bit[0]] + ((token >> i & 1) << int(bit[1:]))
        return place["s"], place["k"]

    def sets(self):
        """Tokens of each step, ascending: [steps, K]."""
        return np.sort(self.token(np.arange(self.steps)[:, None], np.arange(self.instruction.K)))

    def held(self, operand, step, lane, element):
        """Token that element `element` of lane `lane` of operand "A" or "B" belongs to in step `step`."""
        row, column = getattr(self.instruction, operand).place(lane, element)
        return self.token(step, column if operand == "A" else row)

    def missing(self, read):
        """Tokens of the tile that are never read where lanes read only `read` bytes of each load, in its place."""
        tokens = np.arange(self.tile)
        return tokens[tokens % self.load >= read]

    def blocks(self, block_size) -> int:
        """The most blocks of a paged cache that a tile touches; 1 where a tile needs one entry of the block table.

        Raises ValueError where a load would reach beyond its block or start at an address it is not aligned to.
        """
        if block_size <= 0 or block_size % self.load:
            raise ValueError(f"block size {block_size} is no multiple of the {self.load} tokens that a lane loads "
                             f"at once; use a multiple of {self.load} or a narrower load")
        latest_start = block_size - gcd(self.tile, block_size)  # of a tile within a block
        return (latest_start + self.tile - 1) // block_size + 1


def _mma_m16n8k32(a, b):
    # Lane = 4 * group + thread in group; a 32-bit register holds four neighbouring k.
    dtypes = {"s8": np.int8, "u8": np.uint8}
    return Instruction("mma_m16n8k32_s8" if a == b else f"mma_m16n8k32_{a}{b}",
                       f"mma.sync.aligned.m16n8k32.row.col.s32.{a}.{b}.s32",
                       A=Operand("l2 l3 l4 e2", "e0 e1 l0 l1 e3", dtypes[a]),
                       B=Operand("e0 e1 l0 l1 e2", "l2 l3 l4", dtypes[b]),
                       D=Operand("l2 l3 l4 e1", "e0 l0 l1", np.int32))


def _mma_m16n8k16(name, dtype):
    return Instruction(f"mma_m16n8k16_{name}", f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32",
                       A=Operand("l2 l3 l4 e1", "e0 l0 l1 e2", dtype),
                       B=Operand("e0 l0 l1 e1", "l2 l3 l4", dtype),
                       D=Operand("l2 l3 l4 e1", "e0 l0 l1", np.float32))


INSTRUCTIONS = {i.name: i for i in (
    _mma_m16n8k32("s8", "s8"),
    _mma_m16n8k32("u8", "s8"),
    _mma_m16n8k32("s8", "u8"),
    _mma_m16n8k16("bf16", np.uint16),
    _mma_m16n8k16("f16", np.float16),
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
    # The instruction is gfx936's; its map is the one that public sources give for the f16 form of the same shape.
    Instruction("mmac_f32_16x16x16_bf16", "v_mmac_f32_16x16x16_bf16",
                A=Operand("l0 l1 l2 l3", "e0 e1 l4 l5", np.uint16),
                B=Operand("e0 e1 l4 l5", "l0 l1 l2 l3", np.uint16),
                D=Operand("l0 l1 l2 l3", "l4 l5 e0 e1", np.float32)),
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

// Which tokens the steps of P V multiply where lanes load V `load` tokens at a time: NAME_B_16 for V as operand B of
// NAME and 16 tokens a load. Sources of a token's bits: s is bit s of k, 8 + s is bit s of the step.
struct Tokens { int load, steps, tile; signed char bits[8]; };

__host__ __device__ constexpr int token(const Tokens &t, int step, int k) { return gather(t.bits, k, step); }
__host__ __device__ constexpr int scatter(const signed char *source, int index, int first) {
  int place = 0;
  for (int i = 0; source[i] >= 0; ++i)
    if (source[i] >= first && source[i] < first + 8) place |= (index >> i & 1) << (source[i] - first);
  return place;
}
// The step that multiplies a token, and the k at which it does: where the token's probability belongs.
__host__ __device__ constexpr int k_of(const Tokens &t, int token) { return scatter(t.bits, token, 0); }
__host__ __device__ constexpr int step_of(const Tokens &t, int token) { return scatter(t.bits, token, 8); }

"""


def _tokens():
    """Name in `fragments.h` and Tokens, for every operand that can hold V and every load."""
    for i in INSTRUCTIONS.values():
        for operand in "AB":
            if getattr(i, operand).dtype is not np.uint8:
                for load in LOADS:
                    yield f"{i.name}_{operand}_{load}", Tokens(i, load, operand)


@cache
def header() -> str:
    """Text of `fragments.h`: every map as a constexpr `fragments::NAME`, the functions `row` and `column`, and every
    Tokens as `fragments::NAME_OPERAND_LOAD` with the functions `token`, `k_of` and `step_of`.
    """
    def bits(names):  # of the two kinds of sources, e and s are the ones from 8 on
        return ", ".join(str(int(name[1:]) + 8 * (name[0] in "es")) for name in names.split())

    def operand(o):
        return f"{{{o.shape[0]}, {o.shape[1]}, {o.elements}, {{{bits(o.row)}, -1}}, {{{bits(o.column)}, -1}}}}"

    instructions = [f'constexpr Instruction {i.name} = {{"{i.name}", {i.lanes}, {i.M}, {i.N}, {i.K},\n'
                    f"    {operand(i.A)},\n    {operand(i.B)},\n    {operand(i.D)}}};\n"
                    for i in INSTRUCTIONS.values()]
    tokens = [f"constexpr Tokens {name} = {{{t.load}, {t.steps}, {t.tile}, {{{bits(t.bits)}, -1}}}};\n"
              for name, t in _tokens()]
    return _HEADER + "".join(instructions) + "\n" + "".join(tokens) + "}  // namespace fragments\n"
