"""The gated delta net of Qwen3.5-27B: linear attention whose state forgets by a gate and corrects what it recalls.

A layer has `key_heads` heads of queries and keys and `value_heads` heads of values, 128 numbers each; value head h uses
key head h // (value_heads / key_heads). It is given projections of its input: x, which becomes q, k and v, the output
gate z, and a and b, one number a value head.

    q, k, v = silu(causal depthwise convolution of x with 4 taps)
    q, k    = each head over sqrt(its sum of squares + 1e-6); q times 128^-0.5
    g       = -exp(a_log) softplus(a + dt_bias)         beta = sigmoid(b)
    S <- exp(g) S;  d = beta (v - S^T k);  S += k d^T;  o = S^T q         S: [128 of k, 128 of v] for each value head
    out     = norm * o / sqrt(mean of o^2 + 1e-6) * silu(z)               over the 128 numbers of a value head

What goes from one call to the next is a `State`: S and the last 3 rows of x.

The recurrence in chunks. In a chunk of 64 tokens that begins with the state S, let G_i be the sum of g up to and with
token i. Unrolled, the state after token i is exp(G_i) S + sum over j <= i of exp(G_i - G_j) k_j d_j^T, and so

    d_i = beta_i (v_i - exp(G_i) S^T k_i - sum over j < i of exp(G_i - G_j) (k_i . k_j) d_j)

With M_ij = beta_i exp(G_i - G_j) k_i . k_j below the diagonal and 0 elsewhere, and rows of Q, K, V, D for tokens,

    (I + M) D = diag(beta) (V - diag(exp G) K S)
    T = (I + M)^-1 diag(beta)             D = T (V - diag(exp G) K S)
    P_ij = exp(G_i - G_j) q_i . k_j for j <= i, else 0
    O = diag(exp G) Q S + P D             S <- exp(G_63) S + K^T diag(exp(G_63 - G)) D

T and P need no state: all chunks' are made at once. D = U - W S with U = T V and W = T diag(exp G) K is the WY form of
the product of the chunk's Householder-like factors; the kernels do not make U and W, since T times what is left of V
takes fewer products and reads K, which three value heads share, instead of W, which is each one's own. Every exponent
is at most 0. A chunk with fewer tokens is filled with tokens of g = 0 and beta = 0, which change nothing.

    GatedDeltaNet       a layer on a device: all of the above, or each of its three stages
    reference           the layer in float64
    recurrence          the middle stage in float64, token by token;  chunked_recurrence: in chunks

Source: prefill_breakdown article, section 3 (GDN's bucket); formulas: the model's definition.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from kernelbook.backends import Backend, Source
from kernelbook.ops.checks import check_apart, check_array, check_rows, start

HEAD_DIM = 128
TAPS = 4
CHUNK = 64
EPSILON = 1e-6  # in the norms, as the model has it
DESIGNS = ("chunked", "sequential")

# The geometry compiled into kernels/gated_delta_net.
HEADS_OF_BLOCK = 8
RUN = 8  # tokens that lanes of 1_conv_and_gates.cu walk through
SEQUENTIAL = {"COLUMNS": 32}
FACTOR_WAVES = 8
UNIT = 8192  # bytes a term; a chunk has 6 units for each key head, 2 for each value head
DECAYS = 2 * CHUNK * 4  # bytes beside the latter
SCAN = {(1, 32): {"WAVES": 2, "UNITS": 2, "STAGES": 4},  # by terms and lanes of a wave
        (2, 32): {"WAVES": 4, "UNITS": 1, "STAGES": 5},
        (1, 64): {"WAVES": 4, "UNITS": 1, "STAGES": 4},
        (2, 64): {"WAVES": 4, "UNITS": 1, "STAGES": 2}}
MATRIX = {"mma": 32, "mfma": 64, "mmac": 64}
"""Matrix instructions by the name that kernels take, and the lanes of their wave."""
MAX_GROUP = 4  # value heads of a key head whose factors one block makes


@dataclass(frozen=True)
class Weights:
    """What a layer owns besides its projections, float32 in host memory.

    conv: [channels, 4], channels of q, k and v in this order, the last tap for the token itself.
    a_log, dt_bias: [value_heads]. norm: [128].
    """

    conv: np.ndarray
    a_log: np.ndarray
    dt_bias: np.ndarray
    norm: np.ndarray

    @property
    def value_heads(self) -> int:
        return len(self.a_log)

    @property
    def key_heads(self) -> int:
        return (len(self.conv) // HEAD_DIM - self.value_heads) // 2

    @property
    def channels(self) -> int:
        return len(self.conv)

    def check(self) -> "Weights":
        """Raises TypeError for anything but float32 arrays, ValueError for shapes that do not go together."""
        for f in fields(self):
            array = getattr(self, f.name)
            if not isinstance(array, np.ndarray) or array.dtype != np.float32:
                raise TypeError(f"{f.name} is a {type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}; "
                                "expected a NumPy array of float32")
        heads = self.a_log.size
        if self.a_log.shape != (heads,) or heads == 0:
            raise ValueError(f"a_log has shape {self.a_log.shape}; expected [value_heads], at least one")
        for name, shape in (("dt_bias", (heads,)), ("norm", (HEAD_DIM,))):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} has shape {getattr(self, name).shape}; expected {shape}")
        key_heads, rest = divmod(self.conv.shape[0] - heads * HEAD_DIM, 2 * HEAD_DIM) if self.conv.ndim == 2 else (0, 0)
        if self.conv.shape[1:] != (TAPS,) or rest or key_heads < 1 or heads % key_heads:
            raise ValueError(f"conv has shape {self.conv.shape}; expected [(2 key_heads + {heads}) * {HEAD_DIM}, "
                             f"{TAPS}], with key_heads a divisor of the {heads} value heads")
        return self


@dataclass(frozen=True)
class State:
    """What a layer carries from one call to the next, float32, in host memory or on a device.

    conv: [3, channels], the last tokens' x, oldest first. recurrent: [value_heads, 128 of k, 128 of v].
    """

    conv: np.ndarray
    recurrent: np.ndarray

    @classmethod
    def zeros(cls, key_heads: int, value_heads: int) -> "State":
        """The state before the first token, in host memory."""
        return cls(np.zeros((TAPS - 1, (2 * key_heads + value_heads) * HEAD_DIM), np.float32),
                   np.zeros((value_heads, HEAD_DIM, HEAD_DIM), np.float32))


@dataclass(frozen=True)
class Inputs:
    """What the recurrence is given: q, k [tokens, key_heads, 128], v [tokens, value_heads, 128], g, beta [tokens,
    value_heads]; float32 on a device, float64 from the reference."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    g: np.ndarray
    beta: np.ndarray


@dataclass(frozen=True)
class Scratch:
    """Memory on a device for what a layer's kernels hand on to one another, from `GatedDeltaNet.scratch`. Layers of the
    same sizes that run one after the other can share one.

    o: what the recurrence gives. factors: of the chunked design, empty for the other: of each chunk and key head the
    terms of q, k and k transposed; of each chunk and value head those of T and P, and the decays from the chunk's start
    and to its end. As bytes that only the kernels know the order of.
    """

    inputs: Inputs
    o: np.ndarray
    factors: tuple


def sources() -> list[Source]:
    """The kernels of the family for static evidence, on each target's own matrix instructions."""
    return [Source(_file("1_conv_and_gates")), Source(_file("2_sequential"), SEQUENTIAL),
            Source(_file("3_chunk_factors"), {"TERMS": 2}),
            Source(_file("4_chunk_scan"), {"TERMS": 2, **SCAN[2, 32]}),
            Source(_file("5_norm_gate"))]


def _file(name: str) -> str:
    return f"gated_delta_net/{name}.cu"


class GatedDeltaNet:
    """A layer's gated delta net on a device.

    backend: where it runs. weights: as `Weights`.
    design: "chunked" (kernels 3 and 4) or "sequential" (kernel 2) for the recurrence.
    terms: of "chunked": bf16 numbers that stand for one operand of a matrix product, 1 or 2; the sum of 2 is the float
    to 2^-17, for three times the products.
    matrix: of "chunked": one of `MATRIX`; None takes the backend's first.
    Raises what `Weights.check` raises, and ValueError for a design, terms or matrix that does not exist or cannot run
    here.
    """

    def __init__(self, backend: Backend, weights: Weights, design: str = "chunked", *, terms: int = 2,
                 matrix: str | None = None):
        self.weights = weights.check()
        if design not in DESIGNS:
            raise ValueError(f"design is {design!r}; expected one of {', '.join(DESIGNS)}")
        if terms not in (1, 2) or isinstance(terms, bool):
            raise ValueError(f"terms is {terms!r}; expected 1 or 2")
        matrix = next(iter(backend.matrix), None) if matrix is None else matrix
        if matrix not in backend.matrix:
            known = ", ".join(backend.matrix) or "no matrix instructions of ours"
            raise ValueError(f"matrix is {matrix!r}; {backend.device} has waves of {backend.wave} lanes, which take "
                             f"{known}")
        group = weights.value_heads // weights.key_heads
        if design == "chunked" and group > MAX_GROUP:
            raise ValueError(f"{weights.value_heads} value heads on {weights.key_heads} key heads: the chunked design "
                             f"takes at most {MAX_GROUP} on one; take design='sequential'")
        self.backend, self.design, self.terms, self.matrix = backend, design, terms, matrix
        self.key_heads, self.value_heads, self.channels = weights.key_heads, weights.value_heads, weights.channels
        self._conv, self._a_log, self._dt_bias, self._norm = (backend.array(getattr(weights, f.name))
                                                             for f in fields(weights))

    def scratch(self, tokens: int) -> Scratch:
        """Memory for calls with so many tokens."""
        shapes = self._input_shapes(tokens)
        return Scratch(Inputs(*(self.backend.empty(shape, np.float32) for shape in shapes.values())),
                       self.backend.empty(shapes["v"], np.float32),
                       tuple(self.backend.empty(*form) for form in self._factor_forms(tokens)))

    def __call__(self, x, z, a, b, *, initial=None, final=None, out=None):
        """The layer's output; arguments and errors as `prepare` has them."""
        return self.prepare(x, z, a, b, initial=initial, final=final, out=out)()

    def prepare(self, x, z, a, b, *, initial: State | None = None, final: State | None = None, out=None,
                scratch: Scratch | None = None) -> Callable:
        """A call of no arguments that launches the whole layer on what the arrays then hold and returns `out`, float32
        [tokens, value_heads * 128] on the device. Everything is checked here, once; nothing is synchronized.

        x: float32 [tokens, channels], z: [tokens, value_heads * 128], a, b: [tokens, value_heads], all on the device.
        Rows of x, a and b may lie apart, those of a as far as those of b: parts of a fused projection.
        initial: the state before the first token; None is all zeros. final: where the state after the last token goes;
        None leaves it. Both may hold the same arrays, and then each call goes on where the last one ended.
        scratch: made where it is not given.
        No tokens leave the state as it is. Values are not looked at: a NaN or infinity in x, a or b makes meaningless
        what its channels or its head compute from then on, and the state.
        Raises TypeError or ValueError, before anything is launched, on a wrong dtype, device, shape, stride or
        alignment, and where an array to write shares memory with another, but for final with the same array of initial.
        """
        tokens = len(x) if len(getattr(x, "shape", ())) == 2 else 1  # any other shape is refused below
        check_rows(self.backend, x, "x", (tokens, self.channels), np.float32, 16)
        for what, state in (("initial", initial), ("final", final)):
            if not isinstance(state, State | None):
                raise TypeError(f"{what} is a {type(state).__name__}; expected a State or None")
        initial, final = (State(None, None) if state is None else state for state in (initial, final))
        flat, heads = (tokens, self.value_heads * HEAD_DIM), (tokens, self.value_heads, HEAD_DIM)
        out = self._array(out, "out", flat)
        self._check({"z": (z, flat)})
        scratch = self.scratch(tokens) if scratch is None else scratch
        stages = (self.prepare_inputs(x, a, b, initial=initial.conv, final=final.conv, inputs=scratch.inputs),
                  self.prepare_recurrence(scratch.inputs, initial=initial.recurrent, final=final.recurrent,
                                          out=scratch.o, factors=scratch.factors),
                  self.prepare_output(scratch.o, z.reshape(heads), out=out.reshape(heads)))
        self._check_apart({"out": out, "final.conv": final.conv, "final.recurrent": final.recurrent},
                          {"x": x, "z": z, "a": a, "b": b, "initial.conv": initial.conv,
                           "initial.recurrent": initial.recurrent})

        def launch():
            for stage in stages:
                stage()
            return out
        return launch

    def prepare_inputs(self, x, a, b, *, initial=None, final=None, inputs: Inputs | None = None) -> Callable:
        """The first stage alone (kernel 1): a call that launches it and returns `inputs`.

        x, a, b: as `prepare` takes them. initial, final: float32 [3, channels], as `prepare` has `State.conv`.
        Raises what `prepare` raises.
        """
        tokens = len(x) if len(getattr(x, "shape", ())) == 2 else 1  # any other shape is refused here
        x_stride = check_rows(self.backend, x, "x", (tokens, self.channels), np.float32, 16)
        inputs = self.scratch(tokens).inputs if inputs is None else inputs
        gates, conv = (tokens, self.value_heads), (TAPS - 1, self.channels)
        gate_strides = {check_rows(self.backend, array, what, gates, np.float32, 4)
                        for what, array in (("a", a), ("b", b))}
        if len(gate_strides) > 1:
            raise ValueError(f"rows of a and of b are {sorted(gate_strides)} numbers apart; expected one distance")
        self._check(self._with_shapes(inputs, tokens))
        self._check_states(initial, final, conv)
        self._check_apart(vars(inputs) | {"final": final}, {"x": x, "a": a, "b": b, "initial": initial})
        kernel = self.backend.compile(_file("1_conv_and_gates")).kernel("conv_and_gates")
        blocks = -(-self.channels // HEAD_DIM // HEADS_OF_BLOCK) + 1
        args = [start(x), self._conv, initial, final, start(a), start(b), self._a_log, self._dt_bias,
                *vars(inputs).values(), *map(np.int32, (tokens, self.key_heads, self.value_heads)),
                *map(np.int64, (x_stride, *gate_strides))]

        def launch():
            kernel((blocks * max(1, -(-tokens // RUN)), 1, 1), (HEADS_OF_BLOCK * 32, 1, 1), args)
            return inputs
        return launch

    def prepare_recurrence(self, inputs: Inputs, *, initial=None, final=None, out=None,
                           factors: tuple | None = None) -> Callable:
        """The recurrence alone (kernel 2, or 3 and 4): a call that launches it and returns `out`, float32 [tokens,
        value_heads, 128] on the device.

        inputs: on the device. initial, final: float32 [value_heads, 128, 128], as `prepare` has `State.recurrent`.
        factors: as `Scratch` has them; made where they are not given. g is to be at most 0, and lengths of q and k at
        most about 1, as the first stage makes them.
        Raises what `prepare` raises.
        """
        tokens = self._tokens(inputs.v, "v", (self.value_heads, HEAD_DIM))
        out = self._array(out, "out", (tokens, self.value_heads, HEAD_DIM))
        self._check(self._with_shapes(inputs, tokens))
        self._check_states(initial, final, (self.value_heads, HEAD_DIM, HEAD_DIM))
        forms = self._factor_forms(tokens)
        factors = tuple(self.backend.empty(*form) for form in forms) if factors is None else factors
        if len(factors) != len(forms):
            raise ValueError(f"factors are {len(factors)} arrays; the {self.design} design has {len(forms)}")
        named = {f"factors[{i}]": array for i, array in enumerate(factors)}
        for (what, array), form in zip(named.items(), forms, strict=True):
            check_array(self.backend, array, what, *form, 16)
        self._check_apart({"out": out, "final": final} | named, vars(inputs) | {"initial": initial})
        if self.design == "sequential":
            launches = self._sequential(inputs, initial, final, out, tokens)
        else:
            launches = self._chunked(inputs, initial, final, out, tokens, factors)

        def launch():
            for kernel, *how in launches:
                kernel(*how)
            return out
        return launch

    def _sequential(self, inputs, initial, final, out, tokens):
        kernel = self.backend.compile(_file("2_sequential"), SEQUENTIAL).kernel("sequential")
        columns = SEQUENTIAL["COLUMNS"]
        numbers = map(np.int32, (tokens, self.key_heads, self.value_heads))
        return [(kernel, (HEAD_DIM // columns, self.value_heads, 1), (4 * columns, 1, 1),
                 [*vars(inputs).values(), initial, final, out, *numbers])]

    def _factor_forms(self, tokens) -> list[tuple]:
        """Shape and dtype of each of the chunked design's factors, in the order of the kernels' parameters."""
        if self.design == "sequential":
            return []
        chunks = -(-tokens // CHUNK)
        return [((chunks, self.key_heads, 6 * self.terms * UNIT // 4), np.uint32),
                ((chunks, self.value_heads, (2 * self.terms * UNIT + DECAYS) // 4), np.uint32)]

    def _chunked(self, inputs, initial, final, out, tokens, factors):
        chunks, wave = -(-tokens // CHUNK), self.backend.wave
        numbers = list(map(np.int32, (tokens, self.key_heads, self.value_heads)))
        form = {"TERMS": self.terms, "MATRIX": self.matrix}
        launches = []
        if chunks:
            kernel = self.backend.compile(_file("3_chunk_factors"), form).kernel("chunk_factors")
            arrays = [inputs.q, inputs.k, inputs.g, inputs.beta, *factors]
            launches.append((kernel, (chunks, self.key_heads, 1), (wave, FACTOR_WAVES, 1), [*arrays, *numbers],
                             _factor_bytes(self.terms, self.value_heads // self.key_heads)))
        scan = SCAN[self.terms, wave]
        kernel = self.backend.compile(_file("4_chunk_scan"), form | scan).kernel("chunk_scan")
        launches.append((kernel, (HEAD_DIM // (16 * scan["WAVES"]), self.value_heads, 1), (wave, scan["WAVES"], 1),
                         [*factors, inputs.v, initial, final, out, *numbers], scan_bytes(self.terms, wave)))
        return launches

    def prepare_output(self, o, z, *, out=None) -> Callable:
        """The last stage alone (kernel 5): a call that launches it and returns `out`.

        o, z, out: float32 [tokens, value_heads, 128] on the device. Raises what `prepare` raises.
        """
        tokens = self._tokens(o, "o", (self.value_heads, HEAD_DIM))
        shape = (tokens, self.value_heads, HEAD_DIM)
        out = self._array(out, "out", shape)
        self._check({"z": (z, shape)})
        self._check_apart({"out": out}, {"o": o, "z": z})
        if tokens == 0:
            return lambda: out
        kernel = self.backend.compile(_file("5_norm_gate")).kernel("norm_gate")
        heads = tokens * self.value_heads

        def launch():
            kernel((-(-heads // HEADS_OF_BLOCK), 1, 1), (HEADS_OF_BLOCK * 32, 1, 1),
                   [o, z, self._norm, out, np.uint64(heads)])
            return out
        return launch

    # ---- checks

    def _tokens(self, array, what, rest) -> int:
        """The tokens of an array [tokens, *rest], once it is one."""
        shape = getattr(array, "shape", ())
        tokens = shape[0] if len(shape) == 1 + len(rest) else 1  # any other shape is refused here
        check_array(self.backend, array, what, (tokens, *rest), np.float32, 16)
        return tokens

    def _array(self, array, what, shape):
        array = self.backend.empty(shape, np.float32) if array is None else array
        check_array(self.backend, array, what, shape, np.float32, 16)
        return array

    def _check(self, arrays: dict):
        for what, (array, shape) in arrays.items():
            check_array(self.backend, array, what, shape, np.float32, 16)

    def _check_states(self, initial, final, shape):
        self._check({what: (array, shape) for what, array in (("initial", initial), ("final", final))
                     if array is not None})

    def _check_apart(self, written: dict, read: dict):
        """`check_apart` of the arrays that are there; final may be initial."""
        written, read = ({what: a for what, a in arrays.items() if a is not None} for arrays in (written, read))
        for what in [w for w in read if w.startswith("initial")]:
            other = written.get(what.replace("initial", "final"))
            if other is not None and self.backend.pointer(other) == self.backend.pointer(read[what]):
                del read[what]
        check_apart(self.backend, written, read)

    def _with_shapes(self, inputs: Inputs, tokens: int) -> dict:
        return {name: (getattr(inputs, name), shape) for name, shape in self._input_shapes(tokens).items()}

    def _input_shapes(self, tokens: int) -> dict:
        keys, values = (tokens, self.key_heads, HEAD_DIM), (tokens, self.value_heads, HEAD_DIM)
        return {"q": keys, "k": keys, "v": values, "g": values[:2], "beta": values[:2]}


def _factor_bytes(terms: int, group: int) -> int:
    """Dynamic shared memory of 3_chunk_factors.cu: first q and k, then in the same place M
    and the gates of each value head."""
    return max(2 * terms * CHUNK * HEAD_DIM * 2, group * CHUNK * (CHUNK + 4 + 3) * 4)


def scan_bytes(terms: int, lanes: int) -> int:
    """Dynamic shared memory of 4_chunk_scan.cu: the ring, and a block's columns of v. At most 99 KiB for waves of 32
    lanes, 64 KiB for those of 64: what the devices with the least of it give a block."""
    form = SCAN[terms, lanes]
    return form["STAGES"] * (form["UNITS"] * terms * UNIT + DECAYS // 2) + CHUNK * 16 * form["WAVES"] * 4


# ---- in float64

def reference(x, z, a, b, weights: Weights, initial: State | None = None) -> tuple[np.ndarray, State]:
    """The layer in float64: its output [tokens, value_heads * 128] and the state after the last token.

    x [tokens, channels], z [tokens, value_heads * 128], a, b [tokens, value_heads]. initial: None is all zeros.
    Raises what `Weights.check` raises, and ValueError for shapes that do not fit.
    """
    weights.check()
    tokens, heads = len(x), weights.value_heads
    for name, array, shape in (("x", x, (tokens, weights.channels)), ("z", z, (tokens, heads * HEAD_DIM)),
                               ("a", a, (tokens, heads)), ("b", b, (tokens, heads))):
        if np.shape(array) != shape:
            raise ValueError(f"{name} has shape {np.shape(array)}; expected {shape}")
    initial = State.zeros(weights.key_heads, heads) if initial is None else initial
    inputs, conv = inputs_reference(x, a, b, weights, initial.conv)
    o, recurrent = recurrence(inputs, initial.recurrent)
    out = output_reference(o, np.reshape(z, o.shape), weights.norm)
    return out.reshape(tokens, heads * HEAD_DIM), State(conv, recurrent)


def inputs_reference(x, a, b, weights: Weights, conv) -> tuple[Inputs, np.ndarray]:
    """The first stage in float64: the recurrence's inputs, and the new state of the convolution [3, channels]."""
    x, a, b, conv = (np.asarray(array, np.float64) for array in (x, a, b, conv))
    taps, a_log, dt_bias = (array.astype(np.float64) for array in (weights.conv, weights.a_log, weights.dt_bias))
    padded = np.concatenate([conv, x])
    mixed = _silu(sum(padded[tap:len(x) + tap] * taps[:, tap] for tap in range(TAPS)))
    heads = mixed.reshape(len(x), weights.channels // HEAD_DIM, HEAD_DIM)
    q, k, v = np.split(heads, [weights.key_heads, 2 * weights.key_heads], axis=1)
    q, k = (head / np.sqrt((head ** 2).sum(axis=-1, keepdims=True) + EPSILON) for head in (q, k))
    inputs = Inputs(q * HEAD_DIM ** -0.5, k, v, -np.exp(a_log) * np.logaddexp(0, a + dt_bias), _sigmoid(b))
    return inputs, padded[len(x):]


def recurrence(inputs: Inputs, state=None) -> tuple[np.ndarray, np.ndarray]:
    """The recurrence in float64, token by token: o [tokens, value_heads, 128] and the state after the last token.

    state: [value_heads, 128, 128]; None is zeros.
    """
    q, k, v, g, beta, state = _by_value_head(inputs, state)
    out = np.empty(v.shape)
    for t in range(v.shape[1]):
        state *= np.exp(g[:, t, None, None])
        change = beta[:, t, None] * (v[:, t] - np.einsum("hkv,hk->hv", state, k[:, t]))
        state += k[:, t, :, None] * change[:, None, :]
        out[:, t] = np.einsum("hkv,hk->hv", state, q[:, t])
    return out.swapaxes(0, 1), state


def chunked_recurrence(inputs: Inputs, state=None, chunk: int = CHUNK) -> tuple[np.ndarray, np.ndarray]:
    """What `recurrence` gives, in chunks of `chunk` tokens, as the module's text derives it."""
    q, k, v, g, beta, state = _by_value_head(inputs, state)
    out = np.empty(v.shape)
    for first in range(0, v.shape[1], chunk):
        Q, K, V, own_g, own_beta = (array[:, first:first + chunk] for array in (q, k, v, g, beta))
        G = np.cumsum(own_g, axis=1)
        tokens = np.arange(G.shape[1])
        seen = tokens[:, None] >= tokens
        decay = np.exp(np.where(seen, G[:, :, None] - G[:, None, :], -np.inf))
        keys = K.swapaxes(1, 2)
        M = np.where(tokens[:, None] > tokens, own_beta[..., None] * decay * (K @ keys), 0)
        T = np.linalg.inv(np.eye(len(tokens)) + M) * own_beta[:, None, :]
        D = T @ (V - np.exp(G)[..., None] * (K @ state))
        out[:, first:first + chunk] = np.exp(G)[..., None] * (Q @ state) + decay * (Q @ keys) @ D
        state = np.exp(G[:, -1, None, None]) * state + keys @ (np.exp(G[:, -1:] - G)[..., None] * D)
    return out.swapaxes(0, 1), state


def output_reference(o, z, norm) -> np.ndarray:
    """The last stage in float64: o, z [tokens, value_heads, 128], norm [128]."""
    o, z, norm = (np.asarray(array, np.float64) for array in (o, z, norm))
    return norm * o / np.sqrt((o ** 2).mean(axis=-1, keepdims=True) + EPSILON) * _silu(z)


def _by_value_head(inputs: Inputs, state):
    """q, k, v [value_heads, tokens, 128], g, beta [value_heads, tokens] and a copy of the state, in float64."""
    q, k, v, g, beta = (np.asarray(array, np.float64).swapaxes(0, 1) for array in vars(inputs).values())
    group = len(v) // len(q)
    state = np.zeros((len(v), HEAD_DIM, HEAD_DIM)) if state is None else np.array(state, np.float64)
    return np.repeat(q, group, axis=0), np.repeat(k, group, axis=0), v, g, beta, state


def _sigmoid(x):
    return np.exp(-np.logaddexp(0, -x))


def _silu(x):
    return x * _sigmoid(x)
