"""The gated delta net: its two float64 forms against each other and by hand, every kernel on every lane map against
float64, and what holds whatever the numbers: a sequence may be cut, the order of threads changes nothing."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from kernelbook import toolchain
from kernelbook.backends import Source
from kernelbook.backends.cpu import CpuBackend
from kernelbook.ops import gated_delta_net as op
from kernelbook.ops.gated_delta_net import GatedDeltaNet, Inputs, State, Weights
from kernelbook.stats import errors

KEY_HEADS, VALUE_HEADS = 2, 6
TOKENS = (1, 63, 64, 65, 130)


# ---- problems

def normal(*shape, seed=0):
    return np.random.default_rng((seed, *shape)).standard_normal(shape, np.float32)


def weights(key_heads=KEY_HEADS, value_heads=VALUE_HEADS):
    """Value heads that forget within a token, and others that keep for thousands."""
    return Weights(0.5 * normal((2 * key_heads + value_heads) * 128, 4),
                   np.log(np.geomspace(1e-3, 16, value_heads)).astype(np.float32), normal(value_heads, seed=1),
                   1 + 0.1 * normal(128, seed=2)).check()


def layer_input(tokens, w, seed=3):
    """x, z, a, b."""
    return tuple(normal(tokens, n, seed=seed + i) for i, n in
                 enumerate((w.channels, w.value_heads * 128, w.value_heads, w.value_heads)))


def state(w, seed=9):
    return State(normal(3, w.channels, seed=seed), 0.1 * normal(w.value_heads, 128, 128, seed=seed))


def inputs(tokens, w=None, seed=3, **gates):
    """The recurrence's inputs as the first stage makes them, float32, with g or beta replaced by what is given."""
    w = weights() if w is None else w
    x, _, a, b = layer_input(tokens, w, seed)
    made, _ = op.inputs_reference(x, a, b, w, state(w).conv)
    made = replace(made, **{name: np.broadcast_to(gate, made.g.shape) for name, gate in gates.items()})
    return Inputs(*(array.astype(np.float32) for array in vars(made).values()))


def on_device(backend, x):
    return type(x)(*map(backend.array, vars(x).values()))


def on_host(backend, x):
    return type(x)(*map(backend.numpy, vars(x).values()))


def assert_close(found, expected, bound):
    assert errors(found, expected).relative_frobenius <= bound, errors(found, expected)


@dataclass(frozen=True)
class Way:
    """One way to compute the recurrence, and the error that its arithmetic may have."""

    design: str
    terms: int = 2
    matrix: str | None = None

    @property
    def bound(self):
        return 1e-6 if self.design == "sequential" else {2: 2e-5, 1: 6e-3}[self.terms]

    def __str__(self):
        return "-".join(filter(None, (self.design, f"{self.terms}" * (self.design == "chunked"), self.matrix)))

    def net(self, backend, w=None):
        return GatedDeltaNet(backend, weights() if w is None else w, self.design, terms=self.terms, matrix=self.matrix)

    def recurrence(self, backend, given, initial=None, w=None):
        """o and the last state, in host memory."""
        net = self.net(backend, w)
        final = backend.empty((net.value_heads, 128, 128), np.float32)
        initial = None if initial is None else backend.array(initial)
        o = net.prepare_recurrence(on_device(backend, given), initial=initial, final=final)()
        return backend.numpy(o), backend.numpy(final)


SEQUENTIAL, CHUNKED = Way("sequential"), Way("chunked")
WAYS = (SEQUENTIAL, CHUNKED, Way("chunked", 1), Way("chunked", 2, "mmac"))


@pytest.fixture(params=WAYS, ids=str)
def way(request, backend):
    if op.MATRIX.get(request.param.matrix, backend.wave) != backend.wave:
        pytest.skip("this backend's waves have other matrix instructions")
    return request.param


# ---- float64

@pytest.mark.parametrize("tokens", [0, *TOKENS])
@pytest.mark.parametrize("begins", ["zeros", "state"])
def test_chunks_are_the_recurrence(tokens, begins):
    given = inputs(tokens)
    initial = None if begins == "zeros" else state(weights()).recurrent
    for found, expected in zip(op.chunked_recurrence(given, initial), op.recurrence(given, initial), strict=True):
        assert np.abs(found - expected).max(initial=0) <= 1e-12 * np.abs(expected).max(initial=1)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_any_chunk_gives_the_recurrence(chunk):
    given = inputs(33)
    for found, expected in zip(op.chunked_recurrence(given, chunk=chunk), op.recurrence(given), strict=True):
        assert np.allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_recurrence_by_hand():
    """Two tokens of one key: the second value takes the place of the first, as far as beta says."""
    unit, v = np.zeros((2, 1, 128)), np.array([[[1.0] * 128], [[3.0] * 128]])
    unit[:, 0, 5] = 1
    g, beta = np.log([[0.5], [0.5]]), np.array([[1.0], [0.25]])
    o, last = op.recurrence(Inputs(2 * unit, unit, v, g, beta))
    assert np.allclose(o[0], 2) and np.allclose(o[1], 2 * (0.5 + 0.25 * (3 - 0.5)))
    assert np.allclose(last[0, 5], 1.125) and np.count_nonzero(last) == 128


def test_stages_by_hand():
    w = weights()
    x, z, a, b = (array.astype(np.float64) for array in layer_input(5, w))
    conv = state(w).conv.astype(np.float64)
    made, left = op.inputs_reference(x, a, b, w, conv)
    rows = [*conv, *x]
    token, channel = 1, 2 * KEY_HEADS * 128 + 3 * 128 + 7  # of value head 3
    mixed = sum(rows[token + tap][channel] * float(w.conv[channel, tap]) for tap in range(4))
    assert np.isclose(made.v[token, 3, 7], mixed / (1 + np.exp(-mixed)), rtol=1e-13)
    assert np.allclose((made.k ** 2).sum(-1), 1, atol=1e-6) and np.allclose((made.q ** 2).sum(-1), 1 / 128, atol=1e-8)
    assert np.isclose(made.g[2, 4], -np.exp(float(w.a_log[4])) * np.log1p(np.exp(a[2, 4] + w.dt_bias[4])), rtol=1e-13)
    assert np.isclose(made.beta[2, 4], 1 / (1 + np.exp(-b[2, 4])), rtol=1e-13)
    assert np.array_equal(left, x[2:])
    o = normal(5, VALUE_HEADS, 128, seed=8).astype(np.float64)
    out = op.output_reference(o, z.reshape(o.shape), w.norm)
    gate = z.reshape(o.shape)[3, 2, 9]
    rms = np.sqrt((o[3, 2] ** 2).mean() + 1e-6)
    assert np.isclose(out[3, 2, 9], w.norm[9] * o[3, 2, 9] / rms * gate / (1 + np.exp(-gate)), rtol=1e-13)


def test_value_heads_share_key_heads_in_blocks():
    """Value head h uses key head h // 3, not h % 2."""
    given = inputs(3)
    given.k[:, 1] = 0
    o, _ = op.recurrence(given)
    assert o[:, :3].any() and not o[:, 3:].any()


# ---- the stages on a device

@pytest.mark.parametrize("tokens", TOKENS)
def test_inputs_against_float64(backend, tokens):
    w, (x, _, a, b) = weights(), layer_input(tokens, weights())
    net, conv = SEQUENTIAL.net(backend), state(weights()).conv
    for initial in (None, conv):
        final = backend.empty(conv.shape, np.float32)
        device = (None if initial is None else backend.array(initial))
        found = on_host(backend, net.prepare_inputs(*map(backend.array, (x, a, b)), initial=device, final=final)())
        expected, left = op.inputs_reference(x, a, b, w, np.zeros_like(conv) if initial is None else initial)
        for name, array in vars(expected).items():
            assert_close(getattr(found, name), array, 3e-7)
        assert np.array_equal(backend.numpy(final), left)


def test_inputs_may_be_parts_of_fused_rows(backend):
    w, (x, _, a, b) = weights(), layer_input(5, weights())
    net, conv = SEQUENTIAL.net(backend), backend.array(state(weights()).conv)
    fused = backend.array(np.concatenate([x, normal(5, 4), b, a], axis=1))
    parts = fused[:, :w.channels], fused[:, -VALUE_HEADS:], fused[:, -2 * VALUE_HEADS:-VALUE_HEADS]
    finals = [backend.empty(conv.shape, np.float32) for _ in range(2)]
    apart = on_host(backend, net.prepare_inputs(*map(backend.array, (x, a, b)), initial=conv, final=finals[0])())
    found = on_host(backend, net.prepare_inputs(*parts, initial=conv, final=finals[1])())
    for name, array in vars(apart).items():
        assert np.array_equal(getattr(found, name), array)
    assert np.array_equal(*map(backend.numpy, finals))
    with pytest.raises(ValueError, match=r"rows of a and of b are \[6, 1296\] numbers apart"):
        net.prepare_inputs(parts[0], parts[1], backend.array(b))


def test_gates_at_the_ends_of_their_range(backend):
    w = replace(weights(), dt_bias=np.zeros(VALUE_HEADS, np.float32))
    values = np.array([0, -1e-3, -20, -80, 30, 500], np.float32)
    x = np.zeros((1, w.channels), np.float32)
    made = SEQUENTIAL.net(backend, w).prepare_inputs(*map(backend.array, (x, values[None], values[None])))()
    expected, _ = op.inputs_reference(x, values[None], values[None], w, np.zeros((3, w.channels)))
    assert np.allclose(backend.numpy(made.g), expected.g, rtol=1e-6, atol=0)
    assert np.allclose(backend.numpy(made.beta), expected.beta, rtol=1e-6, atol=0)
    assert not backend.numpy(made.q).any()  # no direction, and no NaN


@pytest.mark.parametrize("tokens", [1, 7])
def test_output_against_float64(backend, tokens):
    o, z = (normal(tokens, 5, 128, seed=seed) for seed in (1, 2))
    o *= np.exp(normal(tokens, 5, 1, seed=3) * 4)
    w = weights(5, 5)
    out = SEQUENTIAL.net(backend, w).prepare_output(backend.array(o), backend.array(z))()
    assert_close(backend.numpy(out), op.output_reference(o, z, w.norm), 3e-7)


@pytest.mark.parametrize("tokens", TOKENS)
def test_recurrence_against_float64(backend, way, tokens):
    given, initial = inputs(tokens), state(weights()).recurrent
    for found, expected in zip(way.recurrence(backend, given, initial), op.recurrence(given, initial), strict=True):
        assert_close(found, expected, way.bound)


@pytest.mark.parametrize("key_heads,value_heads", [(1, 1), (3, 3), (1, 4)])
def test_other_numbers_of_heads(backend, key_heads, value_heads):
    w = weights(key_heads, value_heads)
    given = inputs(70, w)
    expected = op.recurrence(given)
    for way in (SEQUENTIAL, CHUNKED):
        for found, right in zip(way.recurrence(backend, given, w=w), expected, strict=True):
            assert_close(found, right, way.bound)


def test_layer_against_float64(backend, way):
    w, arrays = weights(), layer_input(70, weights())
    expected, left = op.reference(*arrays, w, state(w))
    final = State(*(backend.empty(array.shape, np.float32) for array in vars(left).values()))
    out = way.net(backend)(*map(backend.array, arrays), initial=on_device(backend, state(w)), final=final)
    assert_close(backend.numpy(out), expected, way.bound)
    assert_close(backend.numpy(final.recurrent), left.recurrent, way.bound)
    assert np.array_equal(backend.numpy(final.conv), left.conv)


# ---- a sequence in parts

@pytest.mark.parametrize("cut", [0, 1, 2, 3, 4, 63, 64, 65, 69, 70])
@pytest.mark.parametrize("way", [SEQUENTIAL, CHUNKED], ids=str)
def test_a_sequence_may_be_cut_anywhere(simulator, way, cut):
    """The state in place, from call to call. Whole chunks, and single tokens, even give the same bits."""
    w, arrays = weights(1, 2), layer_input(70, weights(1, 2))
    net, whole_state, carried = way.net(simulator, w), *(on_device(simulator, state(w)) for _ in range(2))
    whole = net(*map(simulator.array, arrays), initial=whole_state, final=whole_state)
    parts = [net(*(simulator.array(array[part]) for array in arrays), initial=carried, final=carried)
             for part in (slice(None, cut), slice(cut, None))]
    together = np.concatenate(parts)
    exact = way is SEQUENTIAL or cut in (0, 64, 70)
    for found, expected in ((together, whole), (carried.recurrent, whole_state.recurrent)):
        if exact:
            assert np.array_equal(found, expected)
        else:
            assert_close(found, expected, way.bound)
    assert np.array_equal(carried.conv, whole_state.conv)


def test_without_a_final_state_nothing_else_is_written(backend, way):
    w, arrays = weights(), layer_input(3, weights())
    initial = on_device(backend, state(w))
    out = way.net(backend)(*map(backend.array, arrays), initial=initial)
    assert_close(backend.numpy(out), op.reference(*arrays, w, state(w))[0], way.bound)
    for found, given in zip(vars(on_host(backend, initial)).values(), vars(state(w)).values(), strict=True):
        assert np.array_equal(found, given)


def test_a_prepared_call_repeats_and_reads_what_its_arrays_hold(backend, way):
    w = weights(1, 3)
    arrays = list(map(backend.array, layer_input(66, w)))
    call = way.net(backend, w).prepare(*arrays, initial=on_device(backend, state(w)))
    first = backend.numpy(call())
    assert np.array_equal(backend.numpy(call()), first)
    other = layer_input(66, w, seed=20)
    for array, values in zip(arrays, other, strict=True):
        backend.copy_in(array, values)
    assert_close(backend.numpy(call()), op.reference(*other, w, state(w))[0], way.bound)


def test_layers_may_share_scratch(backend, way):
    w = weights(1, 3)
    nets, arrays = [way.net(backend, replace(w, norm=norm)) for norm in (w.norm, 2 * w.norm)], layer_input(66, w)
    scratch = nets[0].scratch(66)
    device = list(map(backend.array, arrays))
    first, second = (backend.numpy(net.prepare(*device, scratch=scratch)()) for net in nets)
    assert_close(first, op.reference(*arrays, w)[0], way.bound)
    assert np.array_equal(second, 2 * first)


# ---- hard numbers

FEW = weights(1, 2)
GATES = {
    "empties the state": dict(g=-1e4),
    "keeps everything": dict(g=0.0),
    "writes nothing": dict(beta=0.0),
    "replaces what it recalls": dict(beta=1.0),
    "writes without forgetting": dict(g=0.0, beta=1.0),
    # The running sum of g passes -20000, where floats are 2e-3 apart, and tokens in between differ by 1e-2.
    "forgets all, then little": dict(g=np.where(np.arange(130) % 5 == 0, -900.0, -0.01)[:, None]),
    "forgets all, and more than all": dict(g=np.where(np.arange(130) % 5 == 0, -np.inf, -0.01)[:, None]),
    "beta of 0 and 1 in turn": dict(beta=(np.arange(130) % 2.0)[:, None]),
}


@pytest.mark.parametrize("gates", GATES.values(), ids=GATES)
def test_extreme_gates(backend, way, gates):
    given, initial = inputs(130, FEW, **gates), state(FEW).recurrent
    results = way.recurrence(backend, given, initial, FEW)
    for found, expected in zip(results, op.recurrence(given, initial), strict=True):
        assert_close(found, expected, 2 * way.bound)  # a sum may lack what errors are relative to


def test_no_write_keeps_the_state_to_the_bit(backend, way):
    given, initial = inputs(70, FEW, g=0.0, beta=0.0), state(FEW).recurrent
    _, final = way.recurrence(backend, given, initial, FEW)
    assert np.array_equal(final, initial)


@pytest.mark.parametrize("way", [SEQUENTIAL, CHUNKED], ids=str)
def test_keys_that_are_nearly_one(backend, way):
    """M is full of numbers near 1, and what is recalled is nearly all that is told."""
    given = inputs(130, FEW, g=-1e-3, beta=0.98)
    given.k[:] = given.k[:1] + 0.05 * given.k
    given.k[:] /= np.linalg.norm(given.k, axis=-1, keepdims=True)
    for found, expected in zip(way.recurrence(backend, given, w=FEW), op.recurrence(given), strict=True):
        assert_close(found, expected, 3 * way.bound)


@pytest.mark.parametrize("way", [SEQUENTIAL, CHUNKED], ids=str)
def test_many_steps_stay_accurate(simulator, way):
    """Errors of 2000 tokens that hardly forget add up to no more than those of a rounded exp(g) in float."""
    w = weights(1, 1)
    given = inputs(2000, w, g=-1e-3)
    expected, last = op.chunked_recurrence(given)
    o, final = way.recurrence(simulator, given, w=w)
    bound = max(way.bound, 4e-6)
    assert_close(o[-100:], expected[-100:], bound)
    assert_close(final, last, bound)


def through_layers(layer, w, tokens=66):
    """48 layers on one another: each one's output, through a random matrix, is added to what the next is given."""
    rng = np.random.default_rng(0)
    widths = (w.channels, 128, 1, 1)  # x, z, a, b of one head
    stream, into = rng.standard_normal((tokens, 128)), rng.standard_normal((128, sum(widths))) * 128 ** -0.5
    for _ in range(48):
        normed = stream / np.sqrt((stream ** 2).mean(axis=1, keepdims=True))
        arrays = np.split((normed @ into).astype(np.float32), np.cumsum(widths)[:-1], axis=1)
        stream = stream + layer(*arrays) @ rng.standard_normal((128, 128)) * 128 ** -0.5
    return stream


@pytest.fixture(scope="module")
def stream():
    w = weights(1, 1)
    return through_layers(lambda *arrays: op.reference(*arrays, w)[0], w)


@pytest.mark.parametrize("way", [SEQUENTIAL, CHUNKED, Way("chunked", 1)], ids=str)
def test_forty_eight_layers_stay_accurate(simulator, way, stream):
    w = weights(1, 1)
    net = way.net(simulator, w)
    assert_close(through_layers(lambda *arrays: net(*map(simulator.array, arrays)), w), stream, 8 * way.bound)


def test_a_nan_stays_in_its_head(backend, way):
    given = inputs(70, FEW)
    given.g[10, 1] = np.nan
    o, final = way.recurrence(backend, given, w=FEW)
    bad = np.isnan(o).all(axis=-1)
    assert bad[10 if way.design == "sequential" else 64:, 1].all() and not np.isnan(np.delete(o, 1, axis=1)).any()
    assert np.isnan(final[1]).all() and not np.isnan(np.delete(final, 1, axis=0)).any()


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("design", op.DESIGNS)
def test_order_of_lanes_waves_and_blocks_changes_no_bit(wave, design):
    w = weights(1, 3)
    results = []
    for order in (0, 1, 2):
        backend = CpuBackend(wave, order=order)
        carried = on_device(backend, state(w))
        out = GatedDeltaNet(backend, w, design)(*map(backend.array, layer_input(70, w)), initial=carried, final=carried)
        results.append((out, *vars(carried).values()))
    for other in results[1:]:
        assert all(map(np.array_equal, results[0], other))


# ---- bad input

def test_bad_weights_are_refused():
    w = weights()
    for kind, words, bad in (
            (TypeError, "norm is a ndarray of float64", dict(norm=np.ones(128))),
            (TypeError, "a_log is a list", dict(a_log=[0.0])),
            (ValueError, r"norm has shape \(64,\); expected \(128,\)", dict(norm=normal(64))),
            (ValueError, r"dt_bias has shape \(5,\); expected \(6,\)", dict(dt_bias=normal(5))),
            (ValueError, "at least one", dict(a_log=normal(0))),
            (ValueError, r"conv has shape \(1280, 3\)", dict(conv=normal(1280, 3))),
            (ValueError, r"with key_heads a divisor of the 6 value heads", dict(conv=normal((8 + 6) * 128, 4))),
            (ValueError, r"conv has shape \(1300, 4\)", dict(conv=normal(1300, 4))),
            (ValueError, r"conv has shape \(768, 4\)", dict(conv=normal(768, 4)))):
        with pytest.raises(kind, match=words):
            replace(w, **bad).check()


def test_bad_forms_are_refused(backend, simulator):
    for words, how in (("design is 'wy'", dict(design="wy")), ("terms is 3", dict(terms=3)),
                       ("terms is True", dict(terms=True)), ("matrix is 'wgmma'", dict(matrix="wgmma"))):
        with pytest.raises(ValueError, match=words):
            GatedDeltaNet(backend, weights(), **how)
    with pytest.raises(ValueError, match="waves of 32 lanes, which take mma"):
        GatedDeltaNet(simulator, weights(), matrix="mfma")
    with pytest.raises(ValueError, match="5 value heads on 1 key heads.*design='sequential'"):
        GatedDeltaNet(simulator, weights(1, 5))
    with pytest.raises(ValueError, match=r"z has shape \(4, 5\); expected \(4, 768\)"):
        x, z, a, b = layer_input(4, weights())
        op.reference(x, z[:, :5], a, b, weights())


@pytest.mark.parametrize("design", op.DESIGNS)
def test_bad_input_is_refused_before_anything_is_written(backend, design):
    w = weights()
    net = GatedDeltaNet(backend, w, design)
    x, z, a, b = map(backend.array, layer_input(4, w))
    out = backend.array(np.zeros((4, 768), np.float32))
    good = on_device(backend, state(w))
    memory = backend.array(np.zeros((7, w.channels), np.float32))
    before = on_host(backend, good)

    def call(x=x, z=z, a=a, b=b, **how):
        return lambda: net.prepare(x, z, a, b, **({"out": out} | how))()

    cases = [
        (TypeError, "x is a list", call(x=[0.0])),
        (TypeError, "a has dtype float64", call(a=backend.array(np.ones((4, 6))))),
        (ValueError, r"x has shape \(4, 1279\)", call(x=backend.array(normal(4, 1279)))),
        (ValueError, r"x has shape \(1280,\)", call(x=x[0])),
        (ValueError, r"z has shape \(3, 768\); expected \(4, 768\)", call(z=z[:3])),
        (ValueError, r"b has shape \(4, 5\); expected \(4, 6\)", call(b=backend.array(normal(4, 5)))),
        (ValueError, "x has strides", call(x=backend.array(normal(4, 2 * w.channels))[:, ::2])),
        (ValueError, "z starts at address", call(z=backend.array(np.zeros(4 * 768 + 4, np.float32))[1:-3]
                                                 .reshape(4, 768))),
        (ValueError, r"q has shape \(5, 2, 128\); expected \(4, 2, 128\)", call(scratch=net.scratch(5))),
        (ValueError, "factors are 1 arrays; the (chunked|sequential) design has (2|0)",
         call(scratch=replace(net.scratch(4), factors=(x,)))),
        (TypeError, "initial is a tuple; expected a State or None", call(initial=(1, 2))),
        (ValueError, r"initial has shape \(4, 1280\); expected \(3, 1280\)", call(initial=replace(good, conv=x))),
        (ValueError, r"final has shape \(5, 128, 128\); expected \(6, 128, 128\)",
         call(final=replace(good, recurrent=good.recurrent[:5]))),
        (ValueError, "out overlaps z", call(out=z)),
        (ValueError, "final overlaps x", call(x=memory[:4], final=replace(good, conv=memory[1:4]))),
        (ValueError, "final overlaps initial",
         call(initial=replace(good, conv=memory[:3]), final=replace(good, conv=memory[1:4]))),
        (ValueError, "out overlaps final.conv",
         call(out=good.conv.reshape(-1)[:4 * 768].reshape(4, 768), final=good)),
    ]
    for kind, words, attempt in cases:
        with pytest.raises(kind, match=words):
            attempt()
    assert not backend.numpy(out).any() and not backend.numpy(memory).any()
    for found, given in zip(vars(on_host(backend, good)).values(), vars(before).values(), strict=True):
        assert np.array_equal(found, given)


# ---- static evidence

@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_120", "gfx90a", "gfx942"])
def test_kernels_build_without_spills(target):
    reason = toolchain.targets()[target]
    if reason:
        pytest.skip(reason)
    rows = [row for source in op.sources() for row in toolchain.evidence(source, [target])]
    assert [row["kernel"] for row in rows] == ["conv_and_gates", "sequential", "chunk_factors", "chunk_scan",
                                               "norm_gate"]
    for row in rows:
        assert row["spill_bytes"] == 0, row


@pytest.mark.parametrize("terms", [1, 2])
@pytest.mark.parametrize("target,lanes,most_shared", [("sm_80", 32, 99), ("sm_90a", 32, 99), ("gfx90a", 64, 64),
                                                      ("gfx942", 64, 64)])
def test_every_form_of_the_scan_builds_without_spills(target, lanes, most_shared, terms):
    """And within the KiB of shared memory that the devices with the least of it give a block."""
    if toolchain.targets()[target]:
        pytest.skip(toolchain.targets()[target])
    row, = toolchain.evidence(Source("gated_delta_net/4_chunk_scan.cu", {"TERMS": terms, **op.SCAN[terms, lanes]}),
                              [target])
    assert row["spill_bytes"] == 0
    assert op.scan_bytes(terms, lanes) <= most_shared << 10
