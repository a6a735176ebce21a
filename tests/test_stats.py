import numpy as np
import pytest

from kernelbook.stats import Errors, errors, ulp_difference


def test_figures_of_a_worked_example():
    e = errors([3.0, 4.0, 0.0, 1.0], [3.0, 4.0, 0.0, 0.0])
    assert e.relative_frobenius == pytest.approx(1 / 5)
    assert (e.max_abs, e.rms, e.nonfinite) == (pytest.approx(1), pytest.approx(0.5), 0)
    assert e.cosine == pytest.approx(25 / (26**0.5 * 5))


def test_figures_are_float64_whatever_comes_in():
    ref = np.full(1000, 1, np.float16)
    out = ref.copy()
    out[0] = 2
    assert errors(out, ref).rms == pytest.approx(1000**-0.5, rel=1e-12)
    huge = np.float32([1e38, 1e38])
    assert errors(huge, huge * [1, -1]).relative_frobenius == pytest.approx(2**0.5)


@pytest.mark.parametrize("size", [1e-300, 1e-45, 1, 1e300])
def test_no_size_over_or_underflows(size):
    e = errors(np.array([1.0, 2.0]) * size, np.array([1.0, 1.0]) * size)
    assert e.relative_frobenius == pytest.approx(0.5**0.5)
    assert e.max_abs == pytest.approx(size) and e.rms == pytest.approx(size * 0.5**0.5)
    assert e.cosine == pytest.approx(0.9**0.5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_never_passes(bad):
    e = errors([1.0, bad, 3.0, bad], [1.0, 2.0, 3.0, 4.0])
    assert e == Errors(np.inf, np.inf, np.inf, 0.0, 2)


def test_zeros_and_nothing():
    equal = Errors(0.0, 0.0, 0.0, 1.0, 0)
    assert errors(np.zeros(3), np.zeros(3)) == equal
    assert errors(np.zeros((0, 4)), np.zeros((0, 4))) == equal
    assert errors([1e-30], [0.0]) == Errors(np.inf, 1e-30, 1e-30, 0.0, 0)
    assert errors([0.0], [2.0]) == Errors(1.0, 2.0, 2.0, 0.0, 0)


def test_errors_refuse_what_cannot_be_compared():
    with pytest.raises(ValueError, match=r"out has shape \(2, 1\), ref \(2,\)"):
        errors(np.ones((2, 1)), np.ones(2))
    with pytest.raises(ValueError, match=r"ref is nan at \(1, 0\)"):
        errors(np.ones((2, 1)), [[1], [np.nan]])
    with pytest.raises(TypeError, match="out must hold real numbers, not complex128"):
        errors(np.ones(2) * 1j, np.ones(2))


def test_ulp_difference_counts_floats():
    tiny = np.float32(1e-45)  # the smallest denormal
    a = np.float32([1, 1, -1, 0, tiny, 1, np.nan, -np.finfo("f4").max])
    b = np.float32([1, np.nextafter(np.float32(1), np.float32(2)), -1, -0.0, -tiny, 2, np.nan, -np.inf])
    largest, distance = ulp_difference(a, b)
    assert distance.tolist() == [0, 1, 0, 0, 2, 2**23, 2**32, 1]
    assert largest == 2**32 and isinstance(largest, int)
    assert ulp_difference(np.float32([[-np.inf]]), np.float32([[np.inf]]))[0] < 2**32
    largest, distance = ulp_difference(np.zeros((0, 3), "f4"), np.zeros((0, 3), "f4"))
    assert largest == 0 and distance.shape == (0, 3)
    assert ulp_difference(np.float32(1), np.float32(1))[0] == 0


def test_ulp_difference_refuses():
    with pytest.raises(TypeError, match="float32 arrays, not float64 and float32"):
        ulp_difference(np.ones(1), np.ones(1, np.float32))
    with pytest.raises(ValueError, match="they must be equal"):
        ulp_difference(np.ones(1, np.float32), np.ones(2, np.float32))
