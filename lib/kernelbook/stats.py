"""Error figures between a kernel's output and a reference, and distances in ulp."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Errors:
    """How far an output is from its reference, all in float64.

    relative_frobenius: |out - ref| / |ref| over all elements, the main figure; 0 where both are zero,
    infinite where only the reference is.
    max_abs, rms: largest and root mean square of out - ref, in the output's own units.
    cosine: of the angle between the two, 1 where both are zero, 0 where one is.
    nonfinite: how many values of the output are NaN or infinite. One is enough to make every other figure
    the worst it can be (infinite, or 0 for the cosine), so that no comparison with a NaN can pass.
    """

    relative_frobenius: float
    max_abs: float
    rms: float
    cosine: float
    nonfinite: int


def errors(out, ref) -> Errors:
    """Errors of `out` against `ref`, real arrays of one shape. Arrays without elements do not differ.

    Raises TypeError for arrays that are not real numbers, ValueError for shapes that differ (they are not
    broadcast) and for a reference that is not finite.
    """
    out, ref = _float64(out, "out"), _float64(ref, "ref")
    if out.shape != ref.shape:
        raise ValueError(f"out has shape {out.shape}, ref {ref.shape}; they must be equal")
    if not np.isfinite(ref).all():
        place = tuple(int(i) for i in np.argwhere(~np.isfinite(ref))[0])
        raise ValueError(f"ref is {ref[place]} at {place}; a reference must be finite")
    nonfinite = int(np.count_nonzero(~np.isfinite(out)))
    if nonfinite:
        return Errors(np.inf, np.inf, np.inf, 0.0, nonfinite)
    peak = max(np.abs(out).max(initial=0), np.abs(ref).max(initial=0))
    if peak == 0:
        return Errors(0.0, 0.0, 0.0, 1.0, 0)
    # Norms of values in units of the largest, so that no square over- or underflows.
    out, ref = out / peak, ref / peak
    difference = np.abs(out - ref)
    distance, size, out_size = (float(np.linalg.norm(x)) for x in (difference, ref, out))
    return Errors(relative_frobenius=distance / size if size else np.inf,
                  max_abs=float(difference.max() * peak),
                  rms=float(distance * peak / out.size ** 0.5),
                  cosine=float(np.vdot(out, ref)) / (size * out_size) if size and out_size else 0.0,
                  nonfinite=0)


def ulp_difference(a, b) -> tuple[int, np.ndarray]:
    """The largest distance between float32 arrays a and b of one shape, and all distances, int64 like a.

    A distance is the number of float32 values to step over from one to the other: 0 between +0 and -0, 1
    between neighbours, also across 0. Where either is NaN it is 2**32, more than between any two numbers.

    Raises TypeError for another dtype, ValueError for shapes that differ.
    """
    a, b = np.asarray(a), np.asarray(b)
    if a.dtype != np.float32 or b.dtype != np.float32:
        raise TypeError(f"ulp_difference takes float32 arrays, not {a.dtype} and {b.dtype}")
    if a.shape != b.shape:
        raise ValueError(f"a has shape {a.shape}, b {b.shape}; they must be equal")
    distance = np.where(np.isnan(a) | np.isnan(b), 2**32, np.abs(_order(a) - _order(b)))
    return int(distance.max(initial=0)), distance


def _float64(x, name):
    x = np.asarray(x)
    if x.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold real numbers, not {x.dtype}")
    return x.astype(np.float64)


def _order(x):
    """Integers in the order of the floats, one step a float: bit patterns, of negatives mirrored at 0."""
    bits = x.view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
