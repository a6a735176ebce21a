"""Grouped-quantized GEMM: the sum of every group of K is finished, then scaled, then added to the output.

    out[m, n] = sum over groups g of  w_scale[g, n] * (sum over k in g of  a[m, k] * w[k, n])

The weights are strips (`kernelbook.formats.Strips`). From the device upward:

    GroupedGemm     weights on a device, arrays on the device in and out
    HostGemm        the same call from host memory and back: staging, copies, one synchronize
    CpuGemm         the product on the CPU
    Linear          chooses between the last two for each call and says why

Source: grouped_gemm article, sections 2 and 3.
"""

from collections import Counter
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from numbers import Real

import numpy as np

from kernelbook import formats
from kernelbook.backends import Backend, Source
from kernelbook.ops.checks import check_apart, check_array, check_count

# The geometry compiled into kernels/grouped_gemm/split.h.
THREADS_N, THREADS_M, COLUMNS = 64, 4, 4

TARGET_BLOCKS = 512
"""Blocks that the split rule aims for (section 3.3)."""
PARTIAL_CAP_BYTES = 64 << 20
"""Largest buffer of partial sums that the split rule allows (section 3.3)."""
FLOP_GATE = 1e7
"""Products below this many FLOP stay on the CPU (section 3.5); `measure` finds the break-even of a machine."""

MAX_GRID_Y = 65535
INT32_MAX = 2**31 - 1
MAX_COLUMNS = INT32_MAX - THREADS_N * THREADS_M * COLUMNS  # n is a 32-bit int in the kernels


def blocks_xy(m: int, n: int, remap: bool) -> tuple[int, int]:
    """Grid along columns and rows. With `remap` and one row, all threads of a block lie along the columns."""
    if remap and m == 1:
        return -(-n // (THREADS_N * THREADS_M * COLUMNS)), 1
    return -(-n // (THREADS_N * COLUMNS)), -(-m // THREADS_M)


def choose_nsplit(m: int, n: int, groups: int, remap: bool = True) -> int:
    """Slices along K: enough for TARGET_BLOCKS blocks, at most one a group, partial sums within PARTIAL_CAP_BYTES."""
    x, y = blocks_xy(m, n, remap)
    nsplit = min(-(-TARGET_BLOCKS // (x * y)), groups) if 0 < x * y < TARGET_BLOCKS else 1
    return max(1, min(nsplit, PARTIAL_CAP_BYTES // max(1, m * n * 4)))


def source(activations: str, group: int, *, remap: bool = True, carry: bool = True,
           keep_sums: bool = False) -> tuple[str, dict]:
    """File below kernels/ and constants of the kernel for "float" or "int8" activations, as GroupedGemm takes them."""
    constants = {"GROUP": group, "CARRY": int(carry)}
    if activations == "float":
        return "grouped_gemm/2_float_activations.cu", constants | {"REMAP": int(remap)}
    return "grouped_gemm/1_int8_activations.cu", constants | {"GROUP_SUMS": int(keep_sums)}


def sources(group: int = 32) -> list[Source]:
    """Every kernel of the family in every form, for static evidence."""
    forms = [source("int8", group), source("int8", group, keep_sums=True), source("float", group),
             source("float", group, remap=False), source("float", group, carry=False),
             ("grouped_gemm/3_reduce_splits.cu", {})]
    return [Source(*form) for form in forms]


def _check_activations(activations: str, group: int):
    if activations not in ("float", "int8"):
        raise ValueError(f"activations {activations!r}; expected 'float' or 'int8'")
    if activations == "int8" and group * 128 * 128 > INT32_MAX:
        raise ValueError(f"a group of {group} int8 codes times int8 activations sums up to {group} * 128 * 128 = "
                         f"{group * 128 * 128}, more than an int32's {INT32_MAX}; take groups of at most "
                         f"{INT32_MAX // (128 * 128)} codes, or float activations")


def _host_matrix(x, k: int) -> np.ndarray:
    """x, contiguous, once it is a float32 matrix of k columns in host memory."""
    array = np.asarray(x)
    if array.dtype != np.float32:
        raise TypeError(f"x is a {type(x).__name__} with dtype {array.dtype}; expected float32 [M, {k}]")
    if array.ndim != 2 or array.shape[1] != k:
        raise ValueError(f"x has shape {array.shape}; expected [M, {k}]")
    return np.ascontiguousarray(array)


class GroupedGemm:
    """One weight matrix on a device.

    backend: where it runs.  strips: the weights [K, N]; their group must divide K.
    activations: "float" (kernel 2) or "int8" (kernel 1).
    remap: with "float" and one row, lay the whole block along the columns (section 3.2).
    carry: add groups with a carry, which the article's kernel does not.
    keep_sums: with "int8", each call also leaves the integer sum of every group in `self.sums`, int32 [M, groups, N].
    Raises ValueError where K is no multiple of the group, where a group is so large that its sum of int8 products
    may overflow an int32, and what `Strips.check` raises.
    """

    def __init__(self, backend: Backend, strips: formats.Strips, activations: str = "float", *,
                 remap: bool = True, carry: bool = True, keep_sums: bool = False):
        strips.check()
        _check_activations(activations, strips.group)
        if keep_sums and activations != "int8":
            raise ValueError("keep_sums needs int8 activations: sums of floats are not integers")
        if strips.k % strips.group:
            raise ValueError(f"K = {strips.k} is no multiple of the group of {strips.group}: the kernels take whole "
                             "groups only; CpuGemm takes any K")
        if strips.n > MAX_COLUMNS:
            raise ValueError(f"N = {strips.n} columns; the kernels index at most {MAX_COLUMNS}")
        self.backend = backend
        self.strips = strips
        self._codes = backend.array(strips.codes)
        self._scales = backend.array(strips.scales)
        self._partial = self.sums = None
        self._choose_kernel(activations, remap, carry, keep_sums)

    def _choose_kernel(self, activations, remap, carry, keep_sums):
        self.activations = activations
        self.remap = remap and activations == "float"
        self.keep_sums = keep_sums
        module = self.backend.compile(*source(activations, self.strips.group, remap=remap, carry=carry,
                                              keep_sums=keep_sums))
        self._gemm = module.kernel(f"grouped_gemm_{activations}")
        self._reduce = self.backend.compile("grouped_gemm/3_reduce_splits.cu").kernel("reduce_splits")

    def using(self, activations: str, *, remap: bool = True, carry: bool = True) -> "GroupedGemm":
        """The same weights, at the same place on the device, for another kernel."""
        other = copy(self)
        other._partial = other.sums = None
        _check_activations(activations, self.strips.group)
        other._choose_kernel(activations, remap, carry, keep_sums=False)
        return other

    def clone(self) -> "GroupedGemm":
        """The same weights at other addresses on the device, for measurements that must miss the cache."""
        other = copy(self)
        other._codes, other._scales = map(self.backend.array, (self._codes, self._scales))
        other._partial = other.sums = None
        return other

    def choose_nsplit(self, m: int) -> int:
        """The split rule's slices for `m` rows."""
        return choose_nsplit(m, self.strips.n, self.strips.groups, self.remap)

    def __call__(self, x, *, nsplit: int | None = None, out=None, partial=None, launch_per_slice: bool = False):
        """The product [M, N], float32 on the device; arguments and errors as `prepare` has them."""
        return self.prepare(x, nsplit=nsplit, out=out, partial=partial, launch_per_slice=launch_per_slice)()

    def prepare(self, x, *, nsplit: int | None = None, out=None, partial=None,
                launch_per_slice: bool = False) -> Callable:
        """A call of no arguments that launches the product [M, N] of what `x` then holds and returns `out`, float32 on
        the device. Everything is checked here, once; the call only launches. Nothing is synchronized.

        x: float32 [M, K] on the device; for int8 activations a pair (codes int8 [M, K], scales float32 [M, groups]).
        nsplit: slices along K, 1 to groups; None takes the split rule's.
        out: float32 [M, N] to write into.  partial: float32 [nsplit, M, N] for the partial sums of nsplit > 1;
        both are made where they are not given.
        launch_per_slice: launch each slice alone, as section 3.3 warns against, instead of all along blockIdx.z.
        Values are not looked at: NaN or infinite activations, or activation scales, make the outputs of their row NaN
        or infinite as arithmetic has it, whatever nsplit is, and leave other rows alone.
        Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or
        alignment, and where `out` or `partial` shares memory with an input, with the weights or with the other.
        """
        s = self.strips
        pair = self.activations == "int8"
        if pair and not (isinstance(x, tuple | list) and len(x) == 2):
            raise TypeError(f"x is a {type(x).__name__}; int8 activations are a pair (codes, scales)")
        codes = x[0] if pair else x
        shape = getattr(codes, "shape", ())
        m = shape[0] if len(shape) == 2 else 1  # anything but a matrix is refused below
        if pair:
            check_array(self.backend, codes, "x codes", (m, s.k), np.int8, 1)
            check_array(self.backend, x[1], "x scales", (m, s.groups), np.float32, 4)
        else:
            check_array(self.backend, x, "x", (m, s.k), np.float32, 4)
        if nsplit is None:
            nsplit = self.choose_nsplit(m)
        check_count("nsplit", nsplit)
        if nsplit > s.groups:
            raise ValueError(f"nsplit = {nsplit}; expected 1 to {s.groups}, the number of groups")
        if out is None:
            out = self.backend.empty((m, s.n), np.float32)
        check_array(self.backend, out, "out", (m, s.n), np.float32, 16)
        if nsplit > 1:
            partial = self._partial_buffer(nsplit, m) if partial is None else partial
            check_array(self.backend, partial, "partial", (nsplit, m, s.n), np.float32, 16)
        read = {"x codes": x[0], "x scales": x[1]} if pair else {"x": x}
        check_apart(self.backend, {"out": out} | ({"partial": partial} if nsplit > 1 else {}),
                     read | {"the weights' codes": self._codes, "the weights' scales": self._scales})
        if self.keep_sums:
            self.sums = self.backend.empty((m, s.groups, s.n), np.int32)
        target = partial if nsplit > 1 else out
        slices = [(z, 1) for z in range(nsplit)] if launch_per_slice else [(0, nsplit)]
        rows = MAX_GRID_Y * THREADS_M
        if m > rows and nsplit > 1:
            raise ValueError(f"M = {m} rows with nsplit = {nsplit}; more than {rows} rows take nsplit = 1")
        launches = []
        for first_row in range(0, m, rows):  # one trip, unless M passes the grid's limit
            part = slice(first_row, min(first_row + rows, m))
            count = part.stop - part.start
            arrays = [*((a[part] for a in x) if pair else (x[part],)), self._codes, self._scales,
                      target if nsplit > 1 else target[part]]
            sums = [self.sums[part]] if self.keep_sums else []
            for first_slice, depth in slices:
                numbers = map(np.int32, (count, s.n, s.npad, s.k, nsplit, first_slice))
                launches.append((self._gemm, (*blocks_xy(count, s.n, self.remap), depth), (THREADS_N, THREADS_M, 1),
                                 [*arrays, *numbers, *sums]))
        if nsplit > 1 and m:
            total = m * s.n
            launches.append((self._reduce, (-(-total // 256), 1, 1), (256, 1, 1),
                             [partial, out, np.uint64(total), np.int32(nsplit)]))

        def launch():
            for kernel, grid, block, args in launches:
                kernel(grid, block, args)
            return out
        return launch

    def _partial_buffer(self, nsplit, m):
        size = nsplit * m * self.strips.n
        if self._partial is None or self._partial.size < size:
            self._partial = self.backend.empty(size, np.float32)
        return self._partial[:size].reshape(nsplit, m, self.strips.n)


class HostGemm:
    """A product from host memory and back, the way an engine on the host calls it (section 3.4).

    gemm: the weights on the device.  max_rows: the most rows of a call; staging and device buffers are made once.
    """

    def __init__(self, gemm: GroupedGemm, max_rows: int):
        check_count("max_rows", max_rows)
        self.gemm = gemm
        self.max_rows = max_rows
        s, backend = gemm.strips, gemm.backend
        shapes = [((max_rows, s.k), np.float32)]
        if gemm.activations == "int8":
            shapes = [((max_rows, s.k), np.int8), ((max_rows, s.groups), np.float32)]
        self._staged_in = [backend.pinned(*shape) for shape in shapes]
        self._device_in = [backend.empty(*shape) for shape in shapes]
        self._staged_out = backend.pinned((max_rows, s.n), np.float32)
        self._device_out = backend.empty((max_rows, s.n), np.float32)
        self._products: dict[int, Callable] = {}  # by the number of rows

    def _inputs(self, x) -> list[np.ndarray]:
        s = self.gemm.strips
        x = _host_matrix(x, s.k)
        if len(x) > self.max_rows:
            raise ValueError(f"M = {len(x)} rows; this HostGemm has buffers for {self.max_rows}")
        return list(formats.quantize_activations(x, s.group)) if self.gemm.activations == "int8" else [x]

    def _multiply(self, m):
        if m not in self._products:
            x = [a[:m] for a in self._device_in]
            self._products[m] = self.gemm.prepare(x if len(x) == 2 else x[0], out=self._device_out[:m])
        return self._products[m]()

    def __call__(self, x) -> np.ndarray:
        """x float32 [M, K] -> float32 [M, N]: pinned staging, queued copies, one synchronize."""
        inputs, backend = self._inputs(x), self.gemm.backend
        m = len(inputs[0])
        if m == 0:
            return np.empty((0, self.gemm.strips.n), np.float32)
        for device, staged, host in zip(self._device_in, self._staged_in, inputs, strict=True):
            staged[:m] = host
            backend.copy_in(device[:m], staged[:m])
        out = self._multiply(m)
        backend.copy_out(self._staged_out[:m], out)
        backend.synchronize()
        return self._staged_out[:m].copy()

    def pageable(self, x) -> np.ndarray:
        """The old way: copies straight from and to pageable memory, a blocking read-back, a second synchronize."""
        inputs, backend = self._inputs(x), self.gemm.backend
        m = len(inputs[0])
        result = np.empty((m, self.gemm.strips.n), np.float32)
        if m == 0:
            return result
        for device, host in zip(self._device_in, inputs, strict=True):
            backend.copy_in(device[:m], host)
        out = self._multiply(m)
        backend.synchronize()
        backend.copy_out_blocking(result, out)
        return result


class CpuGemm:
    """The product on the CPU: weights dequantized once to float32, then PyTorch's GEMM. Takes any K.

    A partial last group has a scale of its own. Costs 4 bytes a weight of host memory.
    """

    def __init__(self, strips: formats.Strips):
        import torch
        strips.check()
        self.strips = strips
        self._weights = torch.from_numpy(np.ascontiguousarray(strips.dequantize(np.float32)))

    def __call__(self, x) -> np.ndarray:
        """x float32 [M, K] -> float32 [M, N]."""
        import torch
        return (torch.from_numpy(_host_matrix(x, self.strips.k)) @ self._weights.T).numpy()


@dataclass(frozen=True)
class Route:
    """Where a call goes, "device" or "cpu", and why."""

    path: str
    reason: str


def route(strips: formats.Strips, m: int, gate: float = FLOP_GATE) -> Route:
    """The article's rule (sections 3.5 and 5): whole groups only, and nothing below `gate` FLOP, on the device."""
    flops = 2 * m * strips.n * strips.k
    if strips.k % strips.group:
        return Route("cpu", f"K = {strips.k} is no multiple of the group of {strips.group}")
    if flops < gate:
        return Route("cpu", f"{flops / 1e6:.2f} MFLOP is below the gate of {gate / 1e6:g} MFLOP")
    return Route("device", f"{flops / 1e6:.2f} MFLOP, gate {gate / 1e6:g} MFLOP")


class Linear:
    """One projection of a model, called from host memory; each call goes where `route` sends it.

    `routes` counts the calls by Route. The CPU's and the device's copy of the weights are each made at the first
    call that needs them.
    Raises TypeError or ValueError at once for strips, a gate (FLOP, at least 0), max_rows or activations that no call
    could use.
    """

    def __init__(self, strips: formats.Strips, backend: Backend, gate: float = FLOP_GATE, max_rows: int = 32,
                 activations: str = "float"):
        strips.check()
        _check_activations(activations, strips.group)
        check_count("max_rows", max_rows)
        if isinstance(gate, bool) or not isinstance(gate, Real):
            raise TypeError(f"gate is {gate!r} of type {type(gate).__name__}; expected a number of FLOP")
        if not gate >= 0:
            raise ValueError(f"gate = {gate}; expected a number of FLOP, at least 0")
        self.strips, self.backend, self.gate = strips, backend, gate
        self.max_rows, self.activations = max_rows, activations
        self.routes: Counter[Route] = Counter()
        self._cpu = self._host = None

    def __call__(self, x) -> np.ndarray:
        """x float32 [M, K] -> float32 [M, N]."""
        x = _host_matrix(x, self.strips.k)
        taken = route(self.strips, len(x), self.gate)
        self.routes[taken] += 1
        if taken.path == "cpu":
            self._cpu = self._cpu or CpuGemm(self.strips)
            return self._cpu(x)
        if self._host is None or len(x) > self._host.max_rows:
            gemm = self._host.gemm if self._host else GroupedGemm(self.backend, self.strips, self.activations)
            self._host = HostGemm(gemm, max(self.max_rows, len(x)))
        return self._host(x)


def reference(x, strips: formats.Strips) -> np.ndarray:
    """The product in float64 on the same codes and scales. x [M, K] -> float64 [M, N]."""
    return np.asarray(x, np.float64) @ strips.dequantize(np.float64).T


def reference_int8(codes, scales, strips: formats.Strips) -> np.ndarray:
    """The product in float64 on quantized activations: codes int8 [M, K], scales [M, groups] -> float64 [M, N]."""
    widths = np.minimum(strips.group, strips.k - strips.group * np.arange(strips.groups))
    x = np.asarray(codes, np.float64) * np.repeat(np.asarray(scales, np.float64), widths, axis=1)
    return reference(x, strips)


def integer_sums(codes, strips: formats.Strips) -> np.ndarray:
    """The exact integer sum of every group: codes int8 [M, K] -> int64 [M, groups, N]. K must be whole groups."""
    m, groups, group = len(codes), strips.groups, strips.group
    a = np.asarray(codes, np.float64).reshape(m, groups, group)
    w = strips.codes[:, :strips.n].astype(np.float64).reshape(groups, group, strips.n)
    return np.einsum("mgk,gkn->mgn", a, w, optimize=True).astype(np.int64)
