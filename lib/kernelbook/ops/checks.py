"""Checks of what a kernel is about to be given, before anything is launched."""

import math

import numpy as np


def check_array(backend, array, what, shape, dtype, align):
    """Refuse an array that a kernel must not get: TypeError for another place or dtype, ValueError for another shape, a
    gap between its elements, or a first byte that is no multiple of `align`. what: its name in the error.
    """
    if not backend.owns(array):
        raise TypeError(f"{what} is a {type(array).__name__}; expected an array on {backend.device} "
                        "(make one with backend.array or backend.empty)")
    if array.dtype != dtype:
        raise TypeError(f"{what} has dtype {array.dtype}; expected {np.dtype(dtype)}")
    if tuple(array.shape) != tuple(shape):
        raise ValueError(f"{what} has shape {tuple(array.shape)}; expected {tuple(shape)}"
                         f"{', for any M' if what.startswith('x') else ''}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{what} has strides {array.strides}; expected a C-contiguous array (copy it first)")
    if backend.pointer(array) % align:
        raise ValueError(f"{what} starts at address {backend.pointer(array):#x}; expected a multiple of {align} bytes")


def check_rows(backend, array, what, shape, dtype, align) -> int:
    """Numbers from one row of a matrix to the next, whose rows have no gaps but may lie apart, as columns of a larger
    matrix do: fused[:, 4:8]. TypeError and ValueError as `check_array` has them, and ValueError for numbers that lie
    apart and for rows that do not start at multiples of `align`.
    """
    if backend.owns(array) and array.dtype == dtype and tuple(array.shape) == tuple(shape) and 0 not in shape:
        row, number = array.strides
        if number != array.itemsize or row < number * shape[1] or row % align:
            raise ValueError(f"{what} has strides {array.strides}; expected rows without gaps, multiples of {align} "
                             "bytes apart")
        check_array(backend, array[0], what, shape[1:], dtype, align)
        return row // number
    check_array(backend, array, what, shape, dtype, align)
    return shape[1]


def start(rows):
    """An array without gaps at the same address as `rows`, as kernels take it; they are told how far apart rows are."""
    return rows[0] if len(rows) else rows


def check_apart(backend, written: dict, read: dict):
    """ValueError where an array to write shares bytes with another: kernels read through __restrict__ pointers.

    written, read: device arrays by their name in the error. Of rows that lie apart, all from the first byte to the last
    counts.
    """
    def span(array):
        last = sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True))
        return backend.pointer(array), backend.pointer(array) + (last + array.itemsize if array.size else 0)
    spans = {what: span(array) for what, array in (read | written).items()}
    for what in written:
        for other in spans:
            (begin, end), (other_begin, other_end) = spans[what], spans[other]
            if other != what and max(begin, other_begin) < min(end, other_end):
                raise ValueError(f"{what} overlaps {other}: both hold the bytes from {max(begin, other_begin):#x} to "
                                 f"{min(end, other_end):#x}; give {what} memory of its own")


def check_count(what, value):
    """TypeError where `value` is no integer, ValueError where it is below 1."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"{what} is {value!r} of type {type(value).__name__}; expected an integer")
    if value < 1:
        raise ValueError(f"{what} = {value}; expected at least 1")


def given_scratch(backend, scratch, size, shape):
    """`scratch`, float32 of one dimension, once it has the `size` elements that a product of `shape` takes; made where
    it is None. Raises what `check_array` raises, and ValueError where it is too small."""
    if scratch is None:
        scratch = backend.empty(size, np.float32)
    given = math.prod(getattr(scratch, "shape", ()))
    check_array(backend, scratch, "scratch", (given,), np.float32, 16)
    if given < size:
        raise ValueError(f"scratch has {given} elements; {shape[0]} x {shape[1]} take {size}, see scratch()")
    return scratch
