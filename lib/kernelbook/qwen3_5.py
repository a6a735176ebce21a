"""A true prefill pass of Qwen3.5: 48 layers of gated delta net, softmax attention with an output gate in each fourth,
an FFN in all 64, in whichever design is asked for, on the weights that all designs share.

    model = Model.random(backend, shapes.QWEN3_5_27B)      # 15 GB on the device, in seconds; layers=8: an eighth
    run = Pass(model, DESIGNS["tensor_cores"], tokens=512)
    run.feed(ids)
    run()                                                  # only launches
    run.outcome().logits

A layer, on a residual stream that stays float32 in every design:

    x = RMSNorm(stream)
    GDN layers       stream += out(gated delta net of qkv(x), z(x), b(x), a(x))
    others           q, gate = q(x), in turn for each head;  q, k = their heads' RMSNorm, the first quarter of each head
                     turned by the position;  stream += o(causal attention(q, k, v) * sigmoid(gate))
    x = RMSNorm(stream);  stream += down(silu(gate(x)) * up(x))

then logits = lm_head(RMSNorm(stream)) of the last token. The model turns pairs of numbers by the position in time, in
height or in width; of text the three are one, so that the turns are plain rotary ones. Attention itself is PyTorch's.

    reference       the same in float64 on the dequantized weights
    growth          how far two outcomes are apart, layer by layer

Source: prefill_breakdown article, sections 1 and 3; formulas: the model's definition.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernelbook import formats, shapes
from kernelbook.backends import Backend
from kernelbook.ops import gated_delta_net, layer, panel_gemm, prefill_gemm, q4_probe
from kernelbook.ops.checks import check_count
from kernelbook.ops.gated_delta_net import GatedDeltaNet
from kernelbook.ops.panel_gemm import PanelGemm
from kernelbook.ops.prefill_gemm import PrefillGemm
from kernelbook.shapes import Inventory, Projection
from kernelbook.stats import errors

INTERVAL = 4  # layers, of which the last attends
ROPE_BASE = 1e7
NUMBERS = {"float32": np.float32, "bf16": np.uint16}
BITS_PER_WEIGHT = formats.BITS_PER_WEIGHT["Q4_0"]

RESIDUAL = {"gdn_out": 0.5, "o": 0.5, "down": 0.5}
"""Gains of random projections that are added to the stream; those of the others are 1. A stream of 128 additions ends
3 to 4 times as large as it began."""


@dataclass(frozen=True)
class Design:
    """How a pass computes.

    gemm: a design of `prefill_gemm`, or `panel_gemm.NAME`, for which each pass lays the weights out anew; or, where
    there is a `tile`, a variant of `q4_probe`.
    tile: tokens that one launch of a projection takes, each tile reading the weights anew; None for all at once.
    fused: projections of one source in one product.
    gdn, gdn_terms: design of the gated delta net, and the terms of its chunked one.
    activations: what projections are given, a form of `ops.layer`.
    ffn: "float32" or "bf16", what the products gate and up give; bf16 of designs on bf16 activations.
    attention: "float32" or "bf16", in it and its cache.
    Raises ValueError for words that there are not, and for a probe on activations that it does not take.
    """

    name: str
    gemm: str
    activations: str
    attention: str
    ffn: str = "float32"
    gdn: str = "chunked"
    gdn_terms: int = 2
    fused: bool = True
    tile: int | None = None

    def __post_init__(self):
        for what, value, known in (("activations", self.activations, tuple(layer.FORMS)),
                                   ("ffn", self.ffn, tuple(NUMBERS)),
                                   ("attention", self.attention, tuple(NUMBERS)),
                                   ("gdn", self.gdn, gated_delta_net.DESIGNS)):
            if value not in known:
                raise ValueError(f"{what} of design {self.name!r} is {value!r}; expected one of {', '.join(known)}")
        if self.tile is not None:
            q4_probe.source(self.gemm, formats.TILE_ROWS, self.tile)
            takes = "int8" if self.gemm == "int8_dot" else "float32"
            if self.activations != takes:
                raise ValueError(f"design {self.name!r} gives {self.activations} activations to the probe "
                                 f"{self.gemm!r}, which takes {takes}")

    @property
    def in_panels(self) -> bool:
        """Whether products read panels made from the tiles instead of these."""
        return self.gemm == panel_gemm.NAME

    @property
    def kernel(self) -> str:
        """Name of the kernel that multiplies."""
        if self.tile:
            return f"q4_{self.gemm}"
        return panel_gemm.NAME if self.in_panels else prefill_gemm.DESIGNS[self.gemm].kernel

    def reads(self, tokens: int) -> int:
        """How often a pass over `tokens` goes through the weights."""
        return 1 if self.tile is None else -(-tokens // self.tile)

    def bytes_read(self, model: Inventory, tokens: int) -> int:
        """Bytes of the layers' projections that a pass over `tokens` reads, if no launch finds in a cache what another
        has read (B12)."""
        return self.reads(tokens) * int(model.weights * BITS_PER_WEIGHT) // 8


DESIGNS = {design.name: design for design in (
    Design("article", "explicit_fma", "float32", "float32", gdn="sequential", fused=False, tile=16),
    Design("article_int8", "int8_dot", "int8", "float32", gdn="sequential", fused=False, tile=16),
    Design("tiled_fp32", "tiled_fp32", "float32", "float32"),
    Design("int8_dot", "int8_dot", "int8", "bf16", gdn_terms=1),
    Design("int8_matrix", "int8_matrix", "int8", "bf16", gdn_terms=1),
    Design("tensor_cores", "tensor_cores", "bf16", "bf16", ffn="bf16", gdn_terms=1),
    Design("wgmma", "wgmma", "bf16", "bf16", ffn="bf16", gdn_terms=1),
    Design("packed_wgmma", panel_gemm.NAME, "bf16", "bf16", ffn="bf16", gdn_terms=1),
)}
"""The engine of the article, the same on its dp4a kernel, and its candidates A, B (on dot products and on matrix
instructions) and C (on those, on a warpgroup's, and on these with weights in the order that they take). Where
activations are rounded, one term of the gated delta net adds less than a tenth to what that costs."""


# ---- sizes

def inventory(*, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocabulary: int,
              key_heads: int, value_heads: int, name: str = "Qwen3.5 of other sizes") -> Inventory:
    """The projections of a model with the layers of Qwen3.5 and any sizes.

    layers: a multiple of 4. key_heads, value_heads: of the gated delta net, 128 numbers each.
    Raises ValueError for sizes that have no layers or no tiles: outputs in multiples of 4, inputs in multiples of 32.
    """
    _check_layers(layers)
    values, gdn, attending = value_heads * gated_delta_net.HEAD_DIM, layers - layers // INTERVAL, layers // INTERVAL
    made = Inventory(name, hidden, layers, heads, kv_heads, head_dim, ffn, vocabulary, (
        Projection("gdn_qkv", 2 * key_heads * gated_delta_net.HEAD_DIM + values, hidden, gdn, "gdn_norm"),
        Projection("gdn_z", values, hidden, gdn, "gdn_norm"),
        Projection("gdn_b", value_heads, hidden, gdn, "gdn_norm"),
        Projection("gdn_a", value_heads, hidden, gdn, "gdn_norm"),
        Projection("gdn_out", hidden, values, gdn, "gdn"),
        Projection("q", 2 * heads * head_dim, hidden, attending, "attn_norm"),
        Projection("k", kv_heads * head_dim, hidden, attending, "attn_norm"),
        Projection("v", kv_heads * head_dim, hidden, attending, "attn_norm"),
        Projection("o", hidden, heads * head_dim, attending, "attention"),
        Projection("gate", ffn, hidden, layers, "ffn_norm"),
        Projection("up", ffn, hidden, layers, "ffn_norm"),
        Projection("down", hidden, ffn, layers, "ffn"),
    ))
    for projection in made:
        if projection.n % formats.TILE_ROWS or projection.k % formats.BLOCK:
            raise ValueError(f"{projection.name} is {projection.n} x {projection.k}; tiles take multiples of "
                             f"{formats.TILE_ROWS} x {formats.BLOCK}")
    return made


def first_layers(model: Inventory, layers: int) -> Inventory:
    """The inventory of the first `layers` layers, which its name tells. Raises ValueError for no multiple of 4, and for
    more than there are."""
    _check_layers(layers)
    if layers > model.layers:
        raise ValueError(f"layers = {layers}; {model.name} has {model.layers}")
    if layers == model.layers:
        return model
    return replace(model, name=f"{model.name}, {layers} of its {model.layers} layers", layers=layers, projections=tuple(
        replace(p, count=p.count * layers // model.layers) for p in model.projections))


def weight_bytes(model: Inventory) -> int:
    """Bytes of all weights in tiles: the layers' projections, the embedding and lm_head."""
    return int((model.weights + 2 * model.lm_head.weights) * BITS_PER_WEIGHT) // 8


def panel_bytes(backend: Backend, design: Design, model: Inventory) -> int:
    """Bytes of the panels that a pass in a design makes for itself, beside the weights in tiles: 0 for a design without
    panels, and for one that does not run on this backend."""
    products = (*model.fused(), model.lm_head)
    if not design.in_panels or any(panel_gemm.why_not(backend, p.n, p.k) for p in products):
        return 0
    return sum(p.count * panel_gemm.panel_bytes(p.n, p.k) for p in products)


def _check_layers(layers):
    check_count("layers", layers)
    if layers % INTERVAL:
        raise ValueError(f"layers = {layers}; expected a multiple of {INTERVAL}, of which the last one attends")


TINY = inventory(name="Qwen3.5, tiny", hidden=128, layers=4, heads=4, kv_heads=2, head_dim=128, ffn=256,
                 vocabulary=128, key_heads=2, value_heads=4)
"""Four layers of the same kinds, small enough for the simulator."""


# ---- weights

@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of one layer.

    projections: for the projections of each source, named as `Inventory.fused` names them, tiles on the device,
    uint8 [n / 4, k / 32, 72], rows of the first projection first.
    norm, ffn_norm: float32 [hidden], on the device. gdn: of a GDN layer, in host memory; its norm is on the device too.
    q_norm, k_norm: of other layers, float32 [head_dim], on the device.
    """

    projections: dict
    norm: np.ndarray
    ffn_norm: np.ndarray
    gdn: gated_delta_net.Weights | None = None
    gdn_norm: np.ndarray | None = None
    q_norm: np.ndarray | None = None
    k_norm: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class Model:
    """Weights on a device. embedding, lm_head: tiles of [vocabulary, hidden]; norm: float32 [hidden], the last one."""

    backend: Backend
    inventory: Inventory
    layers: tuple[Layer, ...]
    embedding: np.ndarray
    lm_head: np.ndarray
    norm: np.ndarray

    @classmethod
    def random(cls, backend: Backend, inventory: Inventory = shapes.QWEN3_5_27B, *, seed: int = 0,
               layers: int | None = None) -> "Model":
        """Valid random weights, the same on every backend, made on the device. Activations stay near 1 through all
        layers; every matrix has bytes of its own, so that no cache serves two.

        layers: how many of the model's layers, a multiple of 4; None for all.
        Raises what `first_layers` raises, ValueError for an inventory without the projections of Qwen3.5, and the
        device's own error where memory is short: `weight_bytes` says what it takes.
        """
        inventory = inventory if layers is None else first_layers(inventory, layers)
        rng, matrices = np.random.default_rng(seed), iter(range(2**32))
        fused = {p.source: p for p in inventory.fused()}
        missing = {"gdn_norm", "gdn", "attn_norm", "attention", "ffn_norm", "ffn"} - set(fused)
        if missing:
            raise ValueError(f"{inventory.name} has no projections of {', '.join(sorted(missing))}; it is no Qwen3.5")

        def tiles(n, k, gain=1.0):
            return layer.random_tiles(backend, n, k, seed=seed, matrix=next(matrices), gain=gain)

        def norm(n, mean=1.0):
            return backend.array((mean * (1 + 0.1 * rng.standard_normal(n))).astype(np.float32))

        def projections(*sources):
            return {p.name: tiles(p.n, p.k, RESIDUAL.get(p.name, 1.0)) for p in map(fused.get, sources)}

        def one(i):
            both = {"norm": norm(inventory.hidden), "ffn_norm": norm(inventory.hidden)}
            if attends(i):  # scores with a deviation of about 2: some tokens matter more than others
                return Layer(projections("attn_norm", "attention", "ffn_norm", "ffn"), **both,
                             q_norm=norm(inventory.head_dim, 1.5), k_norm=norm(inventory.head_dim, 1.5))
            gdn = _random_gdn(rng, inventory)
            return Layer(projections("gdn_norm", "gdn", "ffn_norm", "ffn"), **both, gdn=gdn,
                         gdn_norm=backend.array(gdn.norm))

        hidden, vocabulary = inventory.hidden, inventory.vocabulary
        return cls(backend, inventory, tuple(one(i) for i in range(inventory.layers)),
                   tiles(vocabulary, hidden, hidden ** 0.5), tiles(vocabulary, hidden), norm(hidden))


def attends(index: int) -> bool:
    """Whether the layer with this index is one of softmax attention."""
    return (index + 1) % INTERVAL == 0


def _random_gdn(rng, inventory) -> gated_delta_net.Weights:
    """Gates as models of this kind start with: heads that forget within a few tokens, and others that keep for
    thousands."""
    heads, channels = inventory["gdn_a"].n, inventory["gdn_qkv"].n
    steps = np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), heads))
    arrays = (0.5 * rng.standard_normal((channels, gated_delta_net.TAPS)), np.log(rng.uniform(1, 16, heads)),
              np.log(np.expm1(steps)),  # the softplus of which is `steps`
              1 + 0.1 * rng.standard_normal(gated_delta_net.HEAD_DIM))
    return gated_delta_net.Weights(*(array.astype(np.float32) for array in arrays)).check()


# ---- what goes from one pass to the next

@dataclass(frozen=True, eq=False)
class State:
    """What a pass leaves for the next one, on the device.

    layers: of each GDN layer a `gated_delta_net.State`, of each other keys and values [capacity, kv_heads, head_dim].
    attention: the number format of keys and values, as `Design` has it.
    """

    layers: tuple
    capacity: int
    attention: str

    @classmethod
    def empty(cls, model: Model, design: Design, capacity: int) -> "State":
        """Room for `capacity` tokens. A pass that starts at token 0 finds nothing in it, whatever it holds."""
        check_count("capacity", capacity)
        backend, sizes = model.backend, model.inventory
        heads, channels = sizes["gdn_a"].n, sizes["gdn_qkv"].n
        number = NUMBERS[design.attention]

        def one(i):
            if attends(i):
                return tuple(backend.empty((capacity, sizes.kv_heads, sizes.head_dim), number) for _ in "kv")
            return gated_delta_net.State(
                backend.empty((gated_delta_net.TAPS - 1, channels), np.float32),
                backend.empty((heads, gated_delta_net.HEAD_DIM, gated_delta_net.HEAD_DIM), np.float32))
        return cls(tuple(map(one, range(sizes.layers))), capacity, design.attention)


# ---- the pass

@dataclass(frozen=True, eq=False)
class Outcome:
    """What a pass computed, in host memory.

    logits: [vocabulary], of the last token. streams: [layers + 1, tokens, hidden], the residual stream before the first
    layer and after each, or None where the pass did not keep them.
    """

    logits: np.ndarray
    streams: np.ndarray | None


class Pass:
    """One prefill pass, prepared once: `feed` tokens, then call it, which only launches; it allocates nothing after its
    first run but what PyTorch's attention takes from PyTorch's own pool, so that a CUDA graph can hold it. Kernels
    and attention run on CuPy's and on PyTorch's current stream, which must be the same one. A design on panels makes
    them when it is prepared (`panel_bytes`), and they go with the pass.

    model, design: weights, and how to compute with them.
    tokens: how many. start: how many came before, in passes that used the same `state`; those must have run.
    state: made for so many tokens where it is not given. A pass with start > 0 moves the state on, so that it counts
    once; one with start = 0 gives the same whenever it is called.
    keep_streams: keep every layer's residual stream, for `outcome`.
    Raises ValueError or TypeError for counts below their range, for a state that is missing, too small or of another
    number format, and what the kernels of the design raise where they do not run on this backend.
    """

    def __init__(self, model: Model, design: Design, tokens: int, *, start: int = 0, state: State | None = None,
                 keep_streams: bool = False):
        check_count("tokens", tokens)
        if isinstance(start, bool) or not isinstance(start, int | np.integer) or start < 0:
            raise ValueError(f"start is {start!r}; expected a whole number of at least 0")
        if state is None:
            if start:
                raise ValueError(f"start = {start}, and no state; give the one that the passes before left")
            state = State.empty(model, design, tokens)
        if len(state.layers) != model.inventory.layers or state.attention != design.attention:
            raise ValueError(f"the state is one of {len(state.layers)} layers with {state.attention} attention; design "
                             f"{design.name!r} of {model.inventory.name} takes {model.inventory.layers} and "
                             f"{design.attention}")
        if state.capacity < start + tokens:
            raise ValueError(f"the state has room for {state.capacity} tokens; tokens {start} to {start + tokens - 1} "
                             f"take {start + tokens}")
        self.model, self.design, self.tokens, self.start, self.state = model, design, tokens, start, state
        self._backend = _Counting(model.backend)
        self._sizes = model.inventory
        self._rows = tokens if design.tile is None else design.tile * design.reads(tokens)
        self._buffers: dict = {}
        self._steps: list[Callable] = []
        self._prepare(keep_streams)

    # ---- use

    def feed(self, ids: Sequence[int]) -> None:
        """Copy in the tokens that the next call works on. Raises ValueError for another number of them, or for ids
        outside the vocabulary, TypeError for ids that are no integers."""
        ids = np.asarray(ids)
        if not np.issubdtype(ids.dtype, np.integer):
            raise TypeError(f"ids are of {ids.dtype}; expected integers")
        if ids.shape != (self.tokens,):
            raise ValueError(f"ids have shape {ids.shape}; this pass was prepared for ({self.tokens},)")
        bad = (ids < 0) | (ids >= self._sizes.vocabulary)
        if bad.any():
            at = int(np.argmax(bad))
            raise ValueError(f"ids[{at}] is {ids[at]}; expected 0 to {self._sizes.vocabulary - 1}")
        self._backend.copy_in(self._ids, np.ascontiguousarray(ids, np.int32))
        self._backend.synchronize()  # the copy on the host may go

    def __call__(self):
        """Launch everything on the tokens fed last; returns the logits on the device, float32 [1, vocabulary]."""
        self._backend.launched.clear()
        for step in self._steps:
            step()
        return self._logits

    def outcome(self) -> Outcome:
        """What the last call computed, once it has ended."""
        streams = None if self._streams is None else self._backend.numpy(self._streams)
        return Outcome(self._backend.numpy(self._logits)[0], streams)

    @property
    def launches(self) -> Counter:
        """Kernels that the last call launched, by name; PyTorch's attention is one "sdpa" a layer that attends,
        whatever it launches."""
        return Counter(self._backend.launched)

    # ---- preparation

    def _prepare(self, keep_streams):
        backend, sizes, model = self._backend, self._sizes, self.model
        shape = (self.tokens, sizes.hidden)
        self._ids = backend.array(np.zeros(self.tokens, np.int32))
        self._turns = backend.array(layer.turns(np.arange(self.start, self.start + self.tokens), sizes.head_dim // 4,
                                                ROPE_BASE))
        self._streams = backend.empty((sizes.layers + 1, *shape), np.float32) if keep_streams else None
        stream = backend.empty(shape, np.float32)  # within a layer, and throughout where none is kept
        at = [stream] * (sizes.layers + 1) if self._streams is None else list(self._streams)
        x = self._activations(sizes.hidden)

        self._steps.append(layer.embedding(backend, model.embedding, self._ids, at[0]))
        self._steps.append(layer.add_norm(backend, at[0], None, model.layers[0].norm, self._own(x)))
        for i, weights in enumerate(model.layers):
            mix = self._attend if attends(i) else self._recur
            delta = mix(weights, self.state.layers[i], x)
            self._steps.append(layer.add_norm(backend, at[i], delta, weights.ffn_norm, self._own(x), sum=stream))
            delta = self._ffn(weights, x)
            norm = model.layers[i + 1].norm if i + 1 < sizes.layers else model.norm
            self._steps.append(layer.add_norm(backend, stream, delta, norm, self._own(x), sum=at[i + 1]))
        last = slice(self.tokens - 1, self.tokens)
        self._logits = backend.empty((1, sizes.vocabulary), np.float32)
        self._multiply(model.lm_head, _each(x, last), self._logits)
        backend.launched.clear()  # what has laid out weights is no part of a call

    def _recur(self, weights: Layer, state: gated_delta_net.State, x):
        """The steps of a gated delta net between two norms; returns what they add to the stream."""
        backend = self._backend
        parts = self._project(weights, "gdn_norm", x)
        net = GatedDeltaNet(backend, weights.gdn, self.design.gdn, terms=self.design.gdn_terms)
        scratch = self._once("gdn", lambda: net.scratch(self.tokens))
        conv, recurrent = (state.conv, state.recurrent) if self.start else (None, None)
        self._steps += [net.prepare_inputs(parts["gdn_qkv"], parts["gdn_a"], parts["gdn_b"], initial=conv,
                                           final=state.conv, inputs=scratch.inputs),
                        net.prepare_recurrence(scratch.inputs, initial=recurrent, final=state.recurrent, out=scratch.o,
                                               factors=scratch.factors)]
        out = self._activations(self._sizes["gdn_out"].k)
        self._steps.append(layer.silu_norm(backend, scratch.o, parts["gdn_z"], weights.gdn_norm, self._own(out)))
        return self._project(weights, "gdn", out)["gdn_out"]

    def _attend(self, weights: Layer, state: tuple, x):
        """The same of a layer of softmax attention."""
        backend, sizes = self._backend, self._sizes
        parts = self._project(weights, "attn_norm", x)
        number, shape = state[0].dtype, (self.tokens, sizes.heads, sizes.head_dim)
        q, attended = (self._once(name, lambda: backend.empty(shape, number)) for name in ("turned q", "attended"))
        k, v = (cache[:self.start + self.tokens] for cache in state)
        self._steps += [
            layer.rotary_heads(backend, parts["q"], parts["k"], parts["v"], weights.q_norm, weights.k_norm, self._turns,
                               q, k[self.start:], v[self.start:]),
            backend.counted("sdpa", causal_attention(backend, q, k, v, attended))]
        out = self._activations(sizes["o"].k)
        self._steps.append(layer.attention_gate(backend, attended, parts["q"], self._own(out)))
        return self._project(weights, "attention", out)["o"]

    def _ffn(self, weights: Layer, x):
        """The same of an FFN."""
        parts = self._project(weights, "ffn_norm", x, NUMBERS[self.design.ffn])
        out = self._activations(self._sizes["down"].k)
        self._steps.append(layer.silu_product(self._backend, parts["gate"], parts["up"], self._own(out)))
        return self._project(weights, "ffn", out)["down"]

    def _project(self, weights: Layer, source: str, x, number=np.float32) -> dict:
        """The products of all projections of a source: by name, [tokens, n], rows of memory that all layers share."""
        parts = [p for p in self._sizes.projections if p.source == source]
        fused, = (p for p in self._sizes.fused() if p.source == source)
        tiles, ends = weights.projections[fused.name], np.cumsum([p.n for p in parts])
        columns = {p.name: slice(int(end) - p.n, int(end)) for p, end in zip(parts, ends, strict=True)}
        if self.design.fused:
            out = self._memory(fused.name, fused.n, number)
            self._multiply(tiles, x, out)
            return {name: out[:self.tokens, part] for name, part in columns.items()}
        outs = {p.name: self._memory(p.name, p.n, number) for p in parts}
        for name, part in columns.items():
            rows = slice(part.start // formats.TILE_ROWS, part.stop // formats.TILE_ROWS)
            self._multiply(tiles[rows], x, outs[name])
        return {name: out[:self.tokens] for name, out in outs.items()}

    def _multiply(self, tiles, x, out):
        """The step out [M, n] = x [M, k] times the transpose of `tiles`."""
        if self.design.tile:
            self._steps.append(tile_by_tile(self._backend, self.design, tiles, x, out))
            return
        product = (PanelGemm(self._backend, tiles) if self.design.in_panels else
                   PrefillGemm(self._backend, tiles, self.design.gemm))
        size = product.scratch(len(out))
        scratch = self._once(("scratch", size), lambda: self._backend.empty(size, np.float32)) if size else None
        self._steps.append(product.prepare(x, out=out, scratch=scratch))

    def _memory(self, name, columns, number):
        return self._once(name, lambda: self._backend.empty((self._rows, columns), number))

    def _activations(self, columns):
        form = self.design.activations
        return self._once((form, columns), lambda: layer.activations(self._backend, self._rows, columns, form))

    def _own(self, x):
        """Rows of the tokens, without those that fill the last tile."""
        return _each(x, slice(self.tokens))

    def _once(self, key, make):
        if key not in self._buffers:
            self._buffers[key] = make()
        return self._buffers[key]


class _Counting:
    """A backend whose launches are counted by name."""

    def __init__(self, backend: Backend):
        self._backend, self.launched = backend, Counter()

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def compile(self, source, defines=None):
        return _CountingModule(self, self._backend.compile(source, defines))

    def counted(self, name, call) -> Callable:
        def launch(*args, **kwargs):
            self.launched[name] += 1
            return call(*args, **kwargs)
        return launch


@dataclass(frozen=True)
class _CountingModule:
    backend: _Counting
    module: object

    def kernel(self, name):
        return self.backend.counted(name, self.module.kernel(name))


def _each(x, rows):
    """Some rows of activations, which may be a pair."""
    return tuple(part[rows] for part in x) if isinstance(x, tuple) else x[rows]


def tile_by_tile(backend: Backend, design: Design, tiles, x, out) -> Callable:
    """A call that launches a product as the article's engine has it: a `q4_probe` kernel for each tile of tokens, with
    four rows of weights a wave.

    design: one whose `tile` is set. tiles: uint8 [N / 4, K / 32, 72], x: [M, K] as the design has its activations, out:
    float32 [M, N], all on the device; M is 1 or a multiple of the tile. Nothing is checked.
    """
    n, k = formats.TILE_ROWS * tiles.shape[0], formats.BLOCK * tiles.shape[1]
    wave_rows, m = formats.TILE_ROWS, min(len(out), design.tile)
    kernel = backend.compile(*q4_probe.source(design.gemm, wave_rows, m)).kernel(f"q4_{design.gemm}")
    grid, block = (-(-n // (q4_probe.WAVES * wave_rows)), 1, 1), (backend.wave, q4_probe.WAVES, 1)
    calls = []
    for first in range(0, len(out), m):
        rows = slice(first, first + m)
        inputs = _each(x, rows)
        calls.append([tiles, *(inputs if isinstance(inputs, tuple) else [inputs]), out[rows], np.int32(n), np.int32(k)])

    def launch():
        for args in calls:
            kernel(grid, block, args)
        return out
    return launch


# ---- attention

def causal_attention(backend: Backend, q, k, v, out) -> Callable:
    """A call that attends with PyTorch's scaled_dot_product_attention. The queries are the sequence's last tokens,
    query head h reads KV head h // (heads / kv_heads), and scores are scaled by head_dim^-0.5.

    q, out [M, heads, head_dim]; k, v [length, kv_heads, head_dim], length at least M; all float32, or all bf16 in
    uint16, on the device. Raises RuntimeError where PyTorch has no CUDA beside a CUDA device.
    """
    import torch
    from torch.nn.attention.bias import causal_lower_right
    if backend.name == "cuda" and not torch.cuda.is_available():
        raise RuntimeError(f"attention on {backend.device} takes PyTorch with CUDA; this one is {torch.__version__}")
    is_bf16 = q.dtype == np.uint16

    def tensor(array):  # DLPack has no bf16 on CuPy's side, and 16-bit integers on both
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16) if is_bf16 else torch.from_dlpack(array)
    (queries, heads, head_dim), (length, kv_heads, _) = q.shape, k.shape
    q, out = (tensor(x).unflatten(1, (kv_heads, heads // kv_heads)).permute(1, 2, 0, 3) for x in (q, out))
    # A head of keys for each query head, in the same memory.
    k, v = (tensor(x).permute(1, 0, 2)[:, None].expand(kv_heads, heads // kv_heads, length, head_dim) for x in (k, v))
    if queries == 1:
        how = {}  # one query sees all there is
    elif queries == length:
        how = {"is_causal": True}
    else:
        how = {"attn_mask": causal_lower_right(queries, length)}

    def launch():
        out.copy_(torch.nn.functional.scaled_dot_product_attention(q, k, v, **how))
    return launch


# ---- in float64

def reference(model: Model, ids: Sequence[int]) -> Outcome:
    """The pass over `ids` from an empty state in float64, on the dequantized weights: for small models."""
    sizes, host = model.inventory, model.backend.numpy
    positions, rotary = np.arange(len(ids)), sizes.head_dim // 4

    def multiplied(x, weights, source):
        """The products of a source's projections, by name."""
        parts = [p for p in sizes.projections if p.source == source]
        w = formats.Tiles(host(weights.projections["+".join(p.name for p in parts)])).dequantize(np.float64)
        ends = np.cumsum([p.n for p in parts])[:-1]
        return dict(zip((p.name for p in parts), np.split(x @ w.T, ends, axis=1), strict=True))

    def recur(x, weights):
        given = multiplied(x, weights, "gdn_norm")
        out, _ = gated_delta_net.reference(*(given[f"gdn_{name}"] for name in ("qkv", "z", "a", "b")), weights.gdn)
        return multiplied(out, weights, "gdn")["gdn_out"]

    def attend(x, weights):
        given = multiplied(x, weights, "attn_norm")
        q, gate = given["q"].reshape(len(x), sizes.heads, 2, sizes.head_dim).swapaxes(0, 2).swapaxes(1, 2)
        k, v = (given[name].reshape(len(x), sizes.kv_heads, sizes.head_dim) for name in "kv")
        q, k = (layer.rotated(layer.rms_norm(heads, host(norm)), positions, rotary, ROPE_BASE)
                for heads, norm in ((q, weights.q_norm), (k, weights.k_norm)))
        out = attention_reference(q, k, v) * layer.sigmoid(gate)
        return multiplied(out.reshape(len(x), -1), weights, "attention")["o"]

    stream = formats.Tiles(host(model.embedding)).dequantize(np.float64)[np.asarray(ids)]
    streams = [stream]
    for i, weights in enumerate(model.layers):
        x = layer.rms_norm(stream, host(weights.norm))
        stream = stream + (attend if attends(i) else recur)(x, weights)
        parts = multiplied(layer.rms_norm(stream, host(weights.ffn_norm)), weights, "ffn_norm")
        stream = stream + multiplied(layer.silu(parts["gate"]) * parts["up"], weights, "ffn")["down"]
        streams.append(stream)
    last = layer.rms_norm(stream[-1], host(model.norm))
    return Outcome(formats.Tiles(host(model.lm_head)).dequantize(np.float64) @ last, np.stack(streams))


def attention_reference(q, k, v) -> np.ndarray:
    """Causal attention in float64, the queries the sequence's last tokens: q [M, heads, head_dim], k, v [length,
    kv_heads, head_dim] -> [M, heads, head_dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(np.asarray(x, np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", np.asarray(q, np.float64), k) * q.shape[-1] ** -0.5
    unseen = np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]
    scores[:, unseen] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", weights / weights.sum(axis=-1, keepdims=True), v)


def growth(outcome: Outcome, ref: Outcome) -> list[float]:
    """Relative Frobenius distance of each layer's residual stream from the reference's, from the embedding on: how
    errors grow. Raises ValueError where one of the two kept no streams, and what `stats.errors` raises."""
    for what, one in (("outcome", outcome), ("ref", ref)):
        if one.streams is None:
            raise ValueError(f"{what} has no streams; prepare its pass with keep_streams=True")
    return [errors(found, expected).relative_frobenius
            for found, expected in zip(outcome.streams, ref.streams, strict=True)]
