"""Experiments behind the claims of the int8_pv article that are about results: what is exact, which tokens share a
scale, how large errors are and what notices a wrong kernel. Those about speed are in `int8_pv_speed`.

Everything is decode of a few queries, the last of their sequence, unless said. A kernel's error has up to three parts,
which references tell apart: what the codes of W = P sV cost shows against the same kernel with its P V in bf16, what
P V costs altogether against float64 attention on the cache with the query as the kernel quantizes it, and with the
query as it was there is the query's own rounding too, which is no error of P V.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from kernelbook import kv_cache, pv_model, shapes, smollm2, stats, toolchain, validation
from kernelbook.backends import Backend, BackendUnavailable, Source
from kernelbook.backends.cpu import CpuBackend
from kernelbook.experiments import Finding, Lab
from kernelbook.experiments.int8_pv_speed import Shape
from kernelbook.fragments import INSTRUCTIONS, Tokens
from kernelbook.ops import int8_pv as op
from kernelbook.ops.int8_pv import Form

KERNEL = "int8_pv"
DECODE, PREFILL, WGMMA = "2_decode_int8", "3_prefill_int8", "6_prefill_wgmma_int8"
BLOCK_SIZE = 16
BOUND = 0.03
"""Relative Frobenius against float64 attention on the cache that INT8 scores and weights must stay within."""
SAME = 1e-3
"""Relative Frobenius that a kernel may be from the model of its own arithmetic: where float32's rounding turns a code
over, one weight changes by a 127th of its group's largest."""
WRONG_FORMS = {"logical groups": Form(grouping="logical"), "half of each load": Form(read=8),
               "one scale of V": Form(common_scale=True)}


# ---------------------------------------------------------------- where kernels run

@dataclass(frozen=True)
class Place:
    """A lane map, and the backend whose waves run it. name: for tables."""

    name: str
    backend: Backend
    matrix: str

    def form(self, form: Form) -> Form:
        return replace(form, matrix=self.matrix).on(self.backend)


def places(lab: Lab, maps: Iterable[str]) -> list[Place]:
    """The device's own lane map first, then the others of `maps` (keys of `ops.int8_pv.MATRIX`) in the simulator.

    A map that nothing here can run is left out: on a GPU of 32 lanes in a machine without a C++ compiler.
    """
    own = Form().on(lab.backend).matrix
    found = [Place(f"{own}, {'simulator' if lab.backend.simulated else lab.backend.device}", lab.backend, own)]
    for matrix in maps:
        if matrix != own:
            try:
                found.append(Place(f"{matrix}, simulator", CpuBackend(wave=op.MATRIX[matrix][1]), matrix))
            except BackendUnavailable:
                continue
    return found


def compile_ahead(places: Sequence[Place], head_dim: int, partitions: Iterable[int],
                  scale_tokens: Iterable[int]) -> None:
    """Compile the forms that a run on the simulator needs, several at once, for it is most of what the run takes.

    On the first place, the device's own, also what the experiments on speed look at. What is compiled stays on disk:
    the next run compiles nothing.
    """
    every = [Form(), Form(pv="bf16"), Form(trace=True), *WRONG_FORMS.values()]
    own = [*every, *(Form(partition=n) for n in partitions), *(Form(scale_tokens=n) for n in scale_tokens),
           *(Form(pv=pv) for pv in op.PV)]

    def build(place, form, head_dim):
        nothing = np.zeros((1, 1, head_dim), np.float32)
        cache = op.on_device(place.backend, kv_cache.quantize([nothing], [nothing], BLOCK_SIZE))
        q = place.backend.array(nothing[None])
        if form.pv == "uint8" and place.matrix != "mma":
            return
        op.Attention(place.backend, cache, place.form(form)).decode(q)
        if form == Form() and place is places[0]:
            op.Attention(place.backend, cache, Form(matrix=place.matrix)).prefill(q)

    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(build, place, form, n) for place in places if place.backend.simulated
                for n, forms in ((64, every), (head_dim, own if place is places[0] else ())) for form in set(forms)]
    for job in jobs:
        job.result()


def attend(backend: Backend, inputs: "Inputs", form: Form) -> np.ndarray:
    """The inputs through decode: float32 of q's shape."""
    attention = op.Attention(backend, op.on_device(backend, inputs.cache), form)
    return backend.numpy(attention.decode(backend.array(inputs.q), causal_offset=inputs.causal_offset)())


# ---------------------------------------------------------------- inputs

def check_parameters(*, maps: list[str], layers: list[int], tokens: int, error_heads: list[int],
                     error_histories: list[int], accuracy_history: int, settings: list[list[int]],
                     histories: list[int], compared: list[list[int]], compared_histories: list[int],
                     partitions: list[int], scale_tokens: list[int], peer_settings: list[list[int]],
                     peer_histories: list[int]) -> None:
    """Raise ValueError, naming the first value that no experiment can use and what was expected, before any runs."""
    depth = shapes.SMOLLM2_135M.layers
    for name, values, low, high in (
            ("layers", layers, 0, depth - 1), ("tokens", [tokens], 64, 8192),
            ("error_histories", error_histories, 64, 1 << 17), ("accuracy_history", [accuracy_history], 64, 1 << 17),
            ("histories", histories, 64, 1 << 20), ("compared_histories", compared_histories, 64, 1 << 20),
            ("peer_histories", peer_histories, 64, 1 << 20)):
        if not values:
            raise ValueError(f"{name} is empty; expected at least one value from {low} to {high}")
        for value in values:
            if not low <= value <= high:
                raise ValueError(f"{name}: {value}; expected {low} to {high}")
    for name, values, known, needed in (("maps", maps, tuple(op.MATRIX), ()),
                                        ("partitions", partitions, (128, 256, 512, 1024), (256, 512)),
                                        ("scale_tokens", scale_tokens, (32, 64, 128, 256), (32, 256))):
        for value in [v for v in values if v not in known] + [f"no {v}" for v in needed if v not in values]:
            raise ValueError(f"{name}: {value}; expected some of {', '.join(map(str, known))}"
                             + (f", with {' and '.join(map(str, needed))} among them" if needed else ""))
    if len(error_heads) != 3:
        raise ValueError(f"error_heads: {error_heads}; expected query heads, KV heads and head_dim")
    for name, given in (("error_heads", [[1, *error_heads]]), ("settings", settings), ("compared", compared),
                        ("peer_settings", peer_settings)):
        if not given:
            raise ValueError(f"{name} is empty; expected at least one batch, heads, kv_heads and head_dim")
        for setting in given:
            if len(setting) != 4:
                raise ValueError(f"{name}: {setting}; expected batch, heads, kv_heads and head_dim")
            try:
                Shape(*setting, history=1)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None


@dataclass(frozen=True, eq=False)
class Inputs:
    """Attention of the last tokens of a sequence to all of it.

    name: for tables and records. q: float32 [1, queries, heads, head_dim], of the last `queries` tokens.
    k, v: float32 [tokens, kv_heads, head_dim].
    """

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def history(self) -> int:
        return len(self.k)

    @property
    def causal_offset(self) -> int:
        """The last token that the first query sees: its own."""
        return self.history - self.q.shape[1]

    @cached_property
    def cache(self) -> kv_cache.PagedCache:
        """K and V as INT8, on pages in a random order."""
        pages = np.random.default_rng(0).permutation(-(-self.history // BLOCK_SIZE))
        return kv_cache.quantize([self.k], [self.v], BLOCK_SIZE, pages[None])

    @cached_property
    def quantized_q(self) -> np.ndarray:
        """The query as kernels quantize it, float64."""
        codes, scales = kv_cache.quantize_vectors(self.q)
        return codes * scales[..., None].astype(np.float64)

    @cached_property
    def exact(self) -> np.ndarray:
        """float64 attention on the cache, with the query as kernels quantize it."""
        return op.reference(self.quantized_q, self.cache, causal_offset=self.causal_offset)

    @cached_property
    def exact_of_real_q(self) -> np.ndarray:
        """float64 attention on the cache, with the query as it is."""
        return op.reference(self.q, self.cache, causal_offset=self.causal_offset)

    def case(self, experiment: str, form: Form) -> dict:
        """What a record calls these inputs through a kernel in a form whose matrix is chosen."""
        _, queries, heads, head_dim = self.q.shape
        grouping = {} if form.grouping == "fragment" else {"grouping": form.grouping}
        return {"experiment": experiment, "inputs": self.name, "history": self.history, "queries": queries,
                "heads": heads, "kv_heads": self.k.shape[1], "head_dim": head_dim, "matrix": form.matrix, **grouping}

    def by_kv_head(self):
        """Of every KV head, in float64 but for the codes: the softmax's probabilities [rows, tokens] with the query as
        kernels quantize it, V before it was quantized [tokens, head_dim], its codes int8 [head_dim, tokens] and scales
        [tokens], and the place of its rows in q."""
        seen = np.arange(self.history) <= self.causal_offset + np.arange(self.q.shape[1])[:, None]
        heads = pv_model.by_kv_head(self.quantized_q, self.cache)
        for head, (place, q, k_codes, k_scales, v_codes, v_scales) in enumerate(heads):
            keys = k_codes * k_scales[:, None].astype(np.float64)
            scores = np.where(seen[:, None], q @ keys.T * q.shape[-1] ** -0.5, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights = (weights / weights.sum(axis=-1, keepdims=True)).reshape(-1, self.history)
            yield weights, self.v[:, head].astype(np.float64), v_codes, v_scales.astype(np.float64), place


def random_inputs(lab: Lab, history: int, heads: int = 9, kv_heads: int = 3, head_dim: int = 64, queries: int = 1,
                  octaves: float = 0) -> Inputs:
    """Queries, keys and values of unit variance.

    octaves: V of each token is divided by a power of two up to 2**octaves, its exponent drawn evenly: tokens of a real
    cache differ in size (`spread`), and where they are alike no scale that belongs to another token shows.
    """
    rng = lab.rng(1, history, heads, kv_heads, head_dim, queries, round(octaves))
    k, v = rng.standard_normal((2, history, kv_heads, head_dim), np.float32)
    if octaves:
        v *= np.exp2(-octaves * rng.random((history, kv_heads, 1), np.float32))
    q = rng.standard_normal((1, queries, heads, head_dim), np.float32)
    return Inputs(f"random, V over {octaves:g} octaves" if octaves else "random, unit variance", q, k, v)


def real_inputs(model: smollm2.Model, layers: Sequence[int], tokens: int, queries: int = 4) -> list[Inputs]:
    """What the attention of SmolLM2's `layers` reads on `tokens` tokens of English prose, all heads, the last
    `queries` tokens asking."""
    text = model.tokenize(smollm2.prose())[:tokens]
    return [Inputs(f"SmolLM2, layer {layer}", np.ascontiguousarray(q[None, -queries:]), k, v)
            for layer, (q, k, v) in model.attention_inputs(text, layers).items()]


def spread(inputs: Inputs) -> float:
    """The largest over the smallest scale of a token's V, in the KV head where that is most."""
    scales = kv_cache.quantize_vectors(inputs.v)[1]
    return float((scales.max(axis=0) / scales.min(axis=0)).max())


# ---------------------------------------------------------------- the scale inside the sum (P01, P02)

def folding(lab: Lab, problems: Sequence[Inputs]) -> Finding:
    """O = sum P (sV Vq) with the scale folded into P, and with one scale in front of the sum, the best that any row
    could have: in float64."""
    rows = []
    for inputs in problems:
        outs = []
        for p, _, codes, scales, _ in inputs.by_kv_head():
            v = codes.T.astype(np.float64)
            plain, folded, bare = p @ (scales[:, None] * v), (p * scales) @ v, p @ v
            best = (plain * bare).sum(axis=1, keepdims=True) / (bare * bare).sum(axis=1, keepdims=True)
            outs.append((plain, folded, best * bare))
        plain, folded, common = (np.concatenate(part) for part in zip(*outs, strict=True))
        row = {"inputs": inputs.name, "tokens": inputs.history, "scales of V, largest / smallest": spread(inputs),
               "folded": stats.errors(folded, plain).relative_frobenius,
               "one scale, the best": stats.errors(common, plain).relative_frobenius}
        for how in ("folded", "one scale, the best"):
            lab.record.measure(kernel="float64", variant=how, metric="relative_frobenius", value=row[how], unit="1",
                               case={"experiment": "folding", "inputs": inputs.name, "history": inputs.history})
        rows.append(row)
    folded, common = ([row[how] for row in rows] for how in ("folded", "one scale, the best"))
    exact, needed = max(folded) < 1e-14, min(common) > 0.01
    return Finding(
        "P01", "reproduced" if exact and needed else "contradicted",
        f"In float64 on {len(rows)} inputs: with the scale folded into the probability the sum differs by at most "
        f"{max(folded):.1e} relative Frobenius, the rounding of float64. One scale in front of the sum is off by "
        f"{min(common):.1%} to {max(common):.1%}, though each row has the scale that suits it best.",
        f"folded {max(folded):.0e}; one scale {min(common):.0%} to {max(common):.0%}", data=rows)


@dataclass(frozen=True)
class Traced:
    """What a kernel's own integers say of its error on some inputs.

    cache, weights: the two terms of O - O', float64 of q's shape. total: O - O'. reference: O.
    sums, sums_wrong: integer sums of the kernel, and how many are not codes times V of the step's tokens.
    largest: of the sums, absolute.
    """

    cache: np.ndarray
    weights: np.ndarray
    total: np.ndarray
    reference: np.ndarray
    sums: int
    sums_wrong: int
    largest: int


def traced(backend: Backend, inputs: Inputs, form: Form = Form(trace=True)) -> Traced:
    """Both error terms from the weights, codes and sums that decode computed. O is P V in float64 with V as it was
    before the cache; nothing of it comes from the kernel."""
    attention = op.Attention(backend, op.on_device(backend, inputs.cache), form)
    out = backend.numpy(attention.decode(backend.array(inputs.q), causal_offset=inputs.causal_offset)())
    trace, n, form = attention.trace, inputs.history, attention.form
    group = pv_model.groups(form.tokens, n, form.scale_tokens)
    partition = np.arange(n) // form.partition
    terms, wrong, count, largest = np.zeros((3, *out.shape)), 0, 0, 0
    for p, v, v_codes, v_scales, place in inputs.by_kv_head():
        weights, codes = (x[place].reshape(len(p), -1)[:, :n] for x in (trace.weights, trace.codes))
        sums = trace.sums[place].reshape(len(p), -1, len(v_codes))
        own = np.arange(group.max() + 1)[:, None] == group  # [scales, tokens]
        exact = codes.astype(np.float64), v_codes.T.astype(np.float64)
        expected = np.stack([exact[0][:, mine] @ exact[1][mine] for mine in own], axis=1)
        found = sums[:, :len(own)]
        count, wrong = count + found.size, wrong + int(np.count_nonzero(found != expected))
        largest = max(largest, int(np.abs(found).max()))
        scale = np.stack([weights[:, mine].max(axis=1) for mine in own], axis=1) / np.float32(form.largest)
        # The kernel's weights are normalized within a partition: what a partition counts is its share of P.
        shares = np.stack([p[:, partition == i].sum(axis=1) for i in range(partition.max() + 1)], axis=1)
        stood_for = shares[:, partition] * scale[:, group].astype(np.float64) * codes
        split = pv_model.error_terms(p, v, v_codes, v_scales, stood_for)
        for target, value in zip(terms, (split.cache, split.weights, p @ v), strict=True):
            target[place] = value.reshape(target[place].shape)
    cache, weights, reference = terms
    return Traced(cache, weights, reference - out, reference, count, wrong, largest)


def error_terms(lab: Lab, problems: Sequence[Inputs]) -> Finding:
    """O - O' = sum P eV + sum eW Vq on the kernel's own weights, codes and output."""
    rows, wrong, sums = [], 0, 0
    for inputs in problems:
        found = traced(lab.backend, inputs)
        size, total = np.linalg.norm(found.reference), np.linalg.norm(found.total)
        row = {"inputs": inputs.name, "tokens": inputs.history, "V cache": np.linalg.norm(found.cache) / size,
               "weights": np.linalg.norm(found.weights) / size, "O - O'": total / size,
               "left over": np.linalg.norm(found.total - found.cache - found.weights) / total}
        case = inputs.case("error terms", Form(trace=True).on(lab.backend))
        for name, metric in (("V cache", "cache_term"), ("weights", "weights_term"), ("O - O'", "error"),
                             ("left over", "left_over_of_error")):
            lab.record.measure(kernel=KERNEL, variant=DECODE, case=case, metric=f"relative_{metric}", unit="1",
                               value=row[name])
        lab.record.measure(kernel=KERNEL, variant=DECODE, case=case, metric="integer_sums_wrong", unit="1",
                           value=found.sums_wrong)
        rows.append(row)
        wrong, sums = wrong + found.sums_wrong, sums + found.sums
    left = max(row["left over"] for row in rows)
    ratio = [row["weights"] / row["V cache"] for row in rows]
    return Finding(
        "P02", "reproduced" if left < 0.01 and not wrong else "contradicted",
        f"On {len(rows)} inputs the two terms, from the kernel's own codes, add up to float64 attention minus the "
        f"kernel's output; left over are at most {left:.1e} of the error, roundings of float32. {wrong} of {sums} of "
        f"the kernel's integer sums differ from exact ones. The term of the weights is {min(ratio):.1f} to "
        f"{max(ratio):.1f} times that of V's cache.",
        f"left over {left:.0e} of the error", data=rows)


def largest_sum(lab: Lab, problems: Sequence[Inputs] = (), length: int = 320) -> Finding:
    """Codes of 127 throughout, of either sign in V: the largest sums of a step that there can be."""
    k = np.zeros((length, 1, 64), np.float32)
    v = np.where(np.arange(64) % 2, -1, 1).astype(np.float32) * np.ones((length, 1, 1), np.float32)
    extreme = traced(lab.backend, Inputs("all codes 127", np.ones((1, 1, 1, 64), np.float32), k, v))
    others = max((traced(lab.backend, inputs).largest for inputs in problems), default=0)
    limit = 32 * kv_cache.LARGEST_CODE ** 2
    lab.record.measure(kernel=KERNEL, variant=DECODE, case={"experiment": "largest sum", "history": length},
                       metric="largest_step_sum", value=extreme.largest, unit="1")
    good = extreme.largest == limit and others <= limit and not extreme.sums_wrong
    return Finding(
        "P04", "reproduced" if good else "contradicted",
        f"Equal scores and V of codes 127 and -127 give sums of {extreme.largest} = 32 * 127 * 127 in size, "
        f"{'none wrong' if not extreme.sums_wrong else f'{extreme.sums_wrong} wrong'} of {extreme.sums}. Other inputs "
        f"reach {others}. It rests on codes that are symmetric: -128, which a cache may not hold, would give "
        f"{32 * 128 * 127}.",
        f"{extreme.largest}", data={"extreme": extreme.largest, "others": others})


# ---------------------------------------------------------------- two paths (P03)

def rising_inputs(lab: Lab, history: int = 1024, heads: int = 9, kv_heads: int = 3, head_dim: int = 64,
                  queries: int = 4, rise: float = 400) -> Inputs:
    """Scores that rise by `rise`, to base 2, from the first token to the last, far beyond what float32's exponents
    hold: right only where an online softmax rescales what it has, and where partitions merge by their maxima."""
    rng = lab.rng(2, history, heads, kv_heads, head_dim, queries)
    v = rng.standard_normal((history, kv_heads, head_dim), np.float32)
    k = np.repeat(np.linspace(-1, 1, history, dtype=np.float32), kv_heads * head_dim).reshape(v.shape)
    size = rise / 2 / np.log2(np.e) / head_dim ** 0.5
    q = np.full((1, queries, heads, head_dim), size, np.float32)
    return Inputs(f"scores rising by {rise:g}", q, k, v)


def two_paths(lab: Lab, problems: Sequence[Inputs]) -> Finding:
    """The same rows through prefill and through decode, each against float64 and against the model of its own
    arithmetic; and whether decode's weights add up to 1 in each partition before V's scales are folded in."""
    rows, sums = [], []
    for inputs in problems:
        attention = op.Attention(lab.backend, op.on_device(lab.backend, inputs.cache), Form(trace=True))
        attention.decode(lab.backend.array(inputs.q), causal_offset=inputs.causal_offset)()
        sums.append(_partition_sums(inputs, attention.trace.weights, attention.form.partition))
        outs = _paths(lab.backend, inputs)
        for path, (form, out, model) in outs.items():
            exact = lab.errors(KERNEL, path, inputs.case("two paths", form), out, inputs.exact, BOUND)
            row = {"inputs": inputs.name, "rows": inputs.q.shape[1] * inputs.q.shape[2], "path": path,
                   "to float64": exact.relative_frobenius, "to its model": stats.errors(out, model).relative_frobenius,
                   "to decode": stats.errors(out, outs[DECODE][1]).relative_frobenius}
            lab.record.measure(kernel=KERNEL, variant=path, case=inputs.case("two paths", form), unit="1",
                               metric="relative_frobenius_to_model", value=row["to its model"])
            rows.append(row)
    off = max(float(np.abs(s - 1).max()) for s in sums)
    right = all(row["to float64"] <= BOUND and row["to its model"] <= SAME for row in rows)
    worst = {row["path"]: max(r["to float64"] for r in rows if r["path"] == row["path"]) for row in rows}
    figures = "; ".join(f"{path} {error:.2%}" for path, error in worst.items())
    return Finding(
        "P03", "reproduced" if right and off < 1e-5 else "contradicted",
        f"The same rows on {len(problems)} inputs, relative Frobenius to float64 attention: {figures}; each within "
        f"{max(row['to its model'] for row in rows):.1e} of the model of its path. Decode's weights, taken from the "
        f"kernel, add up to 1 in every partition to {off:.0e}. {PREFILL} gives what decode does to "
        f"{max(row['to decode'] for row in rows if row['path'] == PREFILL):.1e}: where a group has a scale of its own, "
        "what its weights are relative to cancels in the codes.",
        figures, data=rows)


def _paths(backend: Backend, inputs: Inputs) -> dict[str, tuple[Form, np.ndarray, np.ndarray]]:
    """Of each path that the backend has: its form, what its kernel gives and what its model gives."""
    decode = Form().on(backend)
    prefill = Form(swapped=decode.matrix == "mfma").on(backend)
    q, offset = backend.array(inputs.q), inputs.causal_offset
    cache = op.on_device(backend, inputs.cache)
    found = {DECODE: (decode, op.Attention(backend, cache, decode).decode(q, causal_offset=offset)(),
                      _decode_model(inputs, decode)),
             PREFILL: (prefill, op.Attention(backend, cache, prefill).prefill(q, causal_offset=offset, wgmma=False)(),
                       pv_model.prefill(inputs.q, inputs.cache, prefill.tokens, offset))}
    if getattr(backend, "arch", None) == "90a" and inputs.q.shape[-1] % 64 == 0:
        # No lane loads V there, and a step multiplies neighbouring tokens, as it would with loads of 8 bytes.
        neighbours = Tokens(prefill.tokens.instruction, 8)
        found[WGMMA] = (prefill, op.Attention(backend, cache, prefill).prefill(q, causal_offset=offset, wgmma=True)(),
                        pv_model.prefill(inputs.q, inputs.cache, neighbours, offset))
    return {path: (form, backend.numpy(out), model) for path, (form, out, model) in found.items()}


def _partition_sums(inputs: Inputs, weights: np.ndarray, partition: int) -> np.ndarray:
    """Sums over each partition that a row sees of W / sV, the weights that decode computed, flat."""
    sums = []
    for p, _, _, v_scales, place in inputs.by_kv_head():
        normalized = weights[place].reshape(len(p), -1)[:, :inputs.history] / v_scales
        seen = np.arange(inputs.history) <= inputs.causal_offset + np.repeat(np.arange(inputs.q.shape[1]),
                                                                             len(p) // inputs.q.shape[1])[:, None]
        first = np.arange(0, inputs.history, partition)
        total = np.add.reduceat(normalized, first, axis=1)
        sums.append(total[np.logical_or.reduceat(seen, first, axis=1)])
    return np.concatenate(sums)


def _decode_model(inputs: Inputs, form: Form, **change) -> np.ndarray:
    """What `pv_model` gives for the inputs, each query at its own length, float32 of q's shape."""
    arguments = {"partition": form.partition, "scale_tokens": form.scale_tokens, "largest": form.largest} | change
    out = np.empty(inputs.q.shape, np.float32)
    for i in range(inputs.q.shape[1]):
        length = np.array([inputs.causal_offset + i + 1], np.int32)
        out[:, i:i + 1] = pv_model.decode(inputs.q[:, i:i + 1], replace(inputs.cache, lengths=length), form.tokens,
                                          **arguments)
    return out


# ---------------------------------------------------------------- instructions and tokens (P05, P06)

MATRIX_INSTRUCTIONS = {"sm_90a": ("IMMA.16832", "HMMA.16816"),
                       "gfx942": ("v_mfma_i32_16x16x32_i8", "v_mfma_f32_16x16x16_bf16")}
"""Of a target: the INT8 and the BF16 instruction, as `toolchain` calls them."""


def instructions(lab: Lab, head_dim: int = 64) -> Finding:
    """Matrix instructions of P V in the machine code of decode, for 32 tokens and the columns of one instruction."""
    rows, absent = [], {}
    reasons = toolchain.targets()
    for target, (int8, bf16) in MATRIX_INSTRUCTIONS.items():
        if reasons[target]:
            absent[target] = reasons[target]
            continue
        swapped = target.startswith("sm_")
        counts = {}
        for pv in ("int8", "bf16"):
            form = Form(pv=pv, swapped=swapped)
            source = Source("int8_pv/2_decode.cu", form.defines(head_dim) | {"PARTITION": form.partition, "TRACE": 0})
            code = (toolchain.compile_cuda(source, target.removeprefix("sm_")) if swapped
                    else toolchain.compile_hip(source, target)).kernels["decode"]
            counts[pv] = code.opcodes
        # The INT8 instructions of the BF16 form are Q K, which both forms have alike.
        times = {"int8": counts["int8"][int8] - counts["bf16"][int8], "bf16": counts["bf16"][bf16]}
        # A wave multiplies the partition's tokens with its share of the columns, 16 of them at once.
        steps = Form().partition // 32 * (head_dim // 16 // op.WAVES)
        for pv, name in (("int8", int8), ("bf16", bf16)):
            row = {"target": target, "P V in": pv, "instruction": name, "in the kernel": times[pv],
                   "for 32 tokens": times[pv] / steps}
            lab.record.measure(kernel=KERNEL, variant=f"2_decode_{pv}", metric="matrix_instructions_for_32_tokens",
                               case={"target": target, "head_dim": head_dim}, value=row["for 32 tokens"], unit="1")
            rows.append(row)
    if not rows:
        return Finding("P05", "not testable here", "No code object could be made.", data=rows,
                       missing="a compiler for GPU targets: " + "; ".join(absent.values()))
    good = all(row["for 32 tokens"] == {"int8": 1, "bf16": 2}[row["P V in"]] for row in rows)
    targets = ", ".join(dict.fromkeys(row["target"] for row in rows))
    words = "; ".join(f"{row['target']} {row['in the kernel']} {row['instruction']}, {row['for 32 tokens']:g} for 32 "
                      "tokens" for row in rows)
    return Finding(
        "P05", "reproduced" if good else "contradicted",
        f"Counted in the machine code of decode with {head_dim} columns, per wave and partition, less what Q K takes: "
        f"{words}. No public compiler assembles for gfx936; its instructions have the shapes of CDNA3's.",
        f"{targets}: {rows[1]['for 32 tokens']:g} BF16 against {rows[0]['for 32 tokens']:g} INT8", data=rows)


ARTICLE_SETS = tuple(tuple(t for first in firsts for t in range(first, first + 8))
                     for firsts in ((0, 16, 32, 48), (8, 24, 40, 56)))
"""The tokens of the two steps on gfx936 (section 4)."""


@dataclass(frozen=True)
class Probe:
    """What a decode kernel does with the first 64 tokens, found out by asking it.

    step: int [64], the step that multiplies each token; None where the form keeps no sums.
    shared: bool [64, 64], whether two tokens are quantized with one scale.
    """

    step: np.ndarray | None
    shared: np.ndarray


def probe(backend: Backend, form: Form) -> Probe:
    """Ask a kernel which tokens it multiplies together and which it quantizes together, without its lane map.

    All scores are equal and V of token t has one code, in column t, so that each column of the output is one token. In
    sequence j, V of token j has 1000 times the scale of all others and no code: the tokens that share its scale round
    to 0, all others stay. In a last sequence all scales are equal: each token's column is in the sums of one step.
    """
    n = 64
    code = np.eye(n, dtype=np.int8) * 127
    scales = np.ones((n + 1, n), np.float32)
    scales[np.arange(n), np.arange(n)] = 1000
    pages = -(-n // BLOCK_SIZE)
    tables = np.arange((n + 1) * pages).reshape(n + 1, pages)
    cache = kv_cache.empty(1, n, BLOCK_SIZE, tables, np.full(n + 1, n), tables.size)
    for sequence, scale in enumerate(scales):
        page, offset = cache.slots(sequence, 0, n).T
        cache.k_codes[page, 0, offset], cache.k_scales[page, 0, offset] = 0, 1
        cache.v_codes[page, 0, :, offset] = np.where(np.arange(n)[:, None] == sequence, 0, code)
        cache.v_scales[page, 0, offset] = scale
    attention = op.Attention(backend, op.on_device(backend, cache), form)
    q = np.ones((n + 1, 1, 1, n), np.float32)
    out = backend.numpy(attention.decode(backend.array(q))())[:n, 0, 0]
    step = np.abs(attention.trace.sums[n, 0, 0]).argmax(axis=0) if form.trace else None
    return Probe(step, (np.abs(out) < 0.5) | np.eye(n, dtype=bool))


def token_sets(lab: Lab, places: Sequence[Place]) -> Finding:
    """The tokens of each step as they follow from every lane map, and as the kernels on `places` have them.

    Data: rows, a lane map each; probes by place, of right kernels; `wrong`, that of the first place's with logical
    groups.
    """
    rows, probes, asked_right = [], {}, []
    asked = {place.matrix: place for place in places}
    for matrix, (name, _) in op.MATRIX.items():
        tokens = Tokens(INSTRUCTIONS[name])
        row = {"map": matrix, "instruction": INSTRUCTIONS[name].mnemonic,
               "derived as in the article": _is_article(tokens.sets()),
               "with loads of 8 bytes": "0-31, 32-63" if np.array_equal(
                   Tokens(INSTRUCTIONS[name], 8).sets().ravel(), np.arange(64)[:tokens.instruction.K]) else "others"}
        if matrix in asked:
            place = asked[matrix]
            found = probes[place.name] = probe(place.backend, place.form(Form(trace=True)))
            derived = place.form(Form()).tokens.place(np.arange(64))[0]
            multiplied = np.array_equal(found.step, derived)
            quantized = np.array_equal(found.shared, derived[:, None] == derived)
            row |= {"asked": place.name, "multiplied so": multiplied, "quantized so": quantized}
            asked_right.append(multiplied and quantized)
            for metric, value in (("tokens_multiplied_elsewhere", np.count_nonzero(found.step != derived)),
                                  ("pairs_quantized_otherwise",
                                   np.count_nonzero(found.shared != (derived[:, None] == derived)))):
                lab.record.measure(kernel=KERNEL, variant=DECODE, case={"experiment": "token sets", "matrix": matrix},
                                   metric=metric, value=int(value), unit="1")
        rows.append(row)
    article = {row["map"]: row["derived as in the article"] for row in rows}
    wrong = probe(places[0].backend, places[0].form(WRONG_FORMS["logical groups"]))
    alike = [row["map"] for row in rows if row["derived as in the article"] and row["map"] != "mmac"]
    return Finding(
        "P06", "reproduced" if article["mmac"] and all(asked_right) else "contradicted",
        f"From gfx936's lane map and a 16-byte load follow the article's two sets{'' if article['mmac'] else ', NOT'}; "
        f"the same follow for {' and '.join(alike)}, which give a lane 8 tokens of a step too. {sum(asked_right)} of "
        f"{len(asked_right)} kernels that were asked ({'; '.join(probes)}) multiply and quantize just these tokens "
        "together. With 8-byte loads, and twice as many, the steps would own tokens 0-31 and 32-63.",
        f"both sets derived; {sum(asked_right)} of {len(asked_right)} kernels have them",
        data={"rows": rows, "probes": probes, "wrong": wrong})


def _is_article(sets: np.ndarray) -> bool:
    return tuple(map(tuple, sets.tolist())) == ARTICLE_SETS


# ---------------------------------------------------------------- the wrong groups (P07)

ARTICLE_RIGHT, ARTICLE_WRONG = 0.001293, 0.062622
"""max_abs against BF16 of the article's quantized reference and of its kernel with logical groups (section 4)."""


def wrong_groups(lab: Lab, places: Sequence[Place], problems: Sequence[Inputs]) -> Finding:
    """The same kernel with scales of the tokens that a step multiplies and with scales of tokens 0-31 and 32-63."""
    rows, first = [], {}
    forms = {"right": Form(), "wrong": Form(grouping="logical"), "bf16": Form(pv="bf16")}
    for place in places:
        for inputs in problems:
            outs = {how: attend(place.backend, inputs, form) for how, form in forms.items()}
            own = first.setdefault(inputs, outs["right"])
            row = {"map": place.name, "inputs": inputs.name, "tokens": inputs.history}
            for how in ("right", "wrong"):
                form = place.form(forms[how])
                errors = stats.errors(outs[how], outs["bf16"])
                exact = lab.errors(KERNEL, DECODE, inputs.case("wrong groups", form), outs[how], inputs.exact, BOUND)
                model = _decode_model(inputs, form, grouping=form.grouping)
                row |= {f"{how}, max_abs": errors.max_abs, f"{how}, error": exact.relative_frobenius,
                        f"{how}, to its model": stats.errors(outs[how], model).relative_frobenius}
                lab.record.measure(kernel=KERNEL, variant=DECODE, case=inputs.case("wrong groups", form), unit="1",
                                   metric="max_abs_to_bf16_pv",
                                   value=errors.max_abs if np.isfinite(errors.max_abs) else None)
            row |= {"ratio": row["wrong, max_abs"] / row["right, max_abs"],
                    "right, to the first map": stats.errors(outs["right"], own).relative_frobenius,
                    **_loose(outs["wrong"], outs["bf16"])}
            rows.append(row)
    article = ARTICLE_WRONG / ARTICLE_RIGHT
    unit = [row["ratio"] for row in rows if row["inputs"] == "random, unit variance"] or [row["ratio"] for row in rows]
    ratios = [row["ratio"] for row in rows]
    near = article / 2 <= np.median(unit) <= article * 2
    finite = all(row["finite"] for row in rows)
    models = max(row[f"{how}, to its model"] for row in rows for how in ("right", "wrong"))
    verdict = ("contradicted" if min(ratios) <= 1 or not finite else "reproduced" if near
               else "direction holds" if min(ratios) > 2 else "not reproduced")
    return Finding(
        "P07", verdict,
        f"max_abs against BF16 P V in the same kernel, wrong groups over right ones: {np.median(unit):.0f} times with "
        f"unit variance (median), {min(ratios):.0f} to {max(ratios):.0f} over all {len(rows)} cases; the article's "
        f"figures make {article:.0f}. Every wrong output is {'' if finite else 'NOT '}finite, with a cosine of "
        f"{min(row['cosine'] for row in rows):.2f} to {max(row['cosine'] for row in rows):.2f}; an absolute tolerance "
        f"of 0.1 accepts {sum(row['atol 0.1'] for row in rows)} of {len(rows)}, one of 0.01 "
        f"{sum(row['atol 0.01'] for row in rows)}. Each kernel is within {models:.1e} of a reference that groups as it "
        f"does: such a reference alone finds nothing. The right kernels of {len(places)} lane maps agree to "
        f"{max(row['right, to the first map'] for row in rows):.1e}.",
        "; ".join(dict.fromkeys(f"{row['tokens']} tokens: {row['right, max_abs']:.6f} right, "
                                f"{row['wrong, max_abs']:.6f} wrong, {row['ratio']:.0f}x"
                                for row in rows if row["inputs"] == rows[0]["inputs"])),
        data=rows)


def _loose(out, right) -> dict:
    """What loose tests say of an output: True is a pass."""
    return {"finite": bool(np.isfinite(out).all()), "cosine": stats.errors(out, right).cosine,
            "atol 0.1": bool(np.allclose(out, right, rtol=0, atol=0.1)),
            "atol 0.01": bool(np.allclose(out, right, rtol=0, atol=0.01))}


# ---------------------------------------------------------------- error against history (P09)

ARTICLE_ERRORS = {4096: (0.000977, 0.000252), 8192: (0.000732, 0.000179), 16384: (0.000488, 0.000122)}
"""History to max_abs and RMS against BF16 P V (section 5)."""
REFERENCES = ("BF16 P V, same kernel", "float64, query as quantized", "float64, query as it is")


def history(lab: Lab, problems: Iterable[Inputs]) -> Finding:
    """INT8 and BF16 P V in the same kernel at growing history, against each other and float64.

    problems: unit variance, the same heads, of growing history; one at a time is held.
    """
    rows = []
    for inputs in problems:
        int8, bf16 = (attend(lab.backend, inputs, Form(pv=pv)) for pv in ("int8", "bf16"))
        references = dict(zip(REFERENCES, (bf16, inputs.exact, inputs.exact_of_real_q), strict=True))
        for pv, out in (("int8", int8), ("bf16", bf16)):
            case = inputs.case("history", Form(pv=pv).on(lab.backend))
            for reference, right in references.items():
                if right is not out:
                    errors = lab.errors(KERNEL, f"2_decode_{pv}", case | {"reference": reference}, out, right, BOUND)
                    rows.append({"history": inputs.history, "P V in": pv, "reference": reference,
                                 "max_abs": errors.max_abs, "rms": errors.rms,
                                 "relative_frobenius": errors.relative_frobenius, "cosine": errors.cosine})
    found = {row["history"]: row for row in rows if row["reference"] == REFERENCES[0]}
    falls = all(a["rms"] > b["rms"] for a, b in zip(list(found.values()), list(found.values())[1:], strict=False))
    shortest = min(ARTICLE_ERRORS)
    long = {n: row for n, row in found.items() if n >= shortest}
    bounded = long and all(row["max_abs"] <= ARTICLE_ERRORS[shortest][0] for row in long.values())
    near = [0.5 <= row["rms"] / ARTICLE_ERRORS[n][1] <= 2 for n, row in long.items() if n in ARTICLE_ERRORS]
    first, last = (found[n] for n in (min(found), max(found)))
    figures = ", ".join(f"{n} tokens {row['max_abs']:.6f} and {row['rms']:.6f}" for n, row in found.items())
    others = "; ".join(f"against {name} {row['rms']:.6f}" for name in REFERENCES[1:] for row in rows
                       if (row["history"], row["P V in"], row["reference"]) == (last["history"], "int8", name))
    return Finding(
        "P09", "reproduced" if falls and bounded and near and all(near) else "direction holds" if falls and
        len(found) > 1 else "contradicted" if last["rms"] > first["rms"] else "not reproduced",
        f"Unit variance, max_abs over {int8.size} outputs and RMS against BF16 P V in the same kernel: {figures}. RMS "
        f"at {last['history']} tokens {others}: the last holds the rounding of the query to INT8 too. A maximum grows "
        "with the number of outputs, which the article does not give; its own are whole multiples of 2^-12, as "
        "differences of outputs in bf16 are, and these are float32.",
        "; ".join(f"{n}: {row['max_abs']:.6f}, RMS {row['rms']:.6f}" for n, row in (long or found).items()), data=rows)


# ---------------------------------------------------------------- the gate (P16) and what it would have saved (P15)

RIGHT_FORMS = {"right": Form()}


def gate(lab: Lab, places: Sequence[Place], right: dict[str, Form] | None = None) -> Finding:
    """`validation.validate` on right and wrong kernels: which checks refuse which."""
    rows, reports, as_it_should = [], {}, []
    right = RIGHT_FORMS if right is None else right
    for place in places:
        for name, form in {**right, **WRONG_FORMS}.items():
            finite = []

            def run(q, cache, form=form, place=place, finite=finite):
                attention = op.Attention(place.backend, op.on_device(place.backend, cache), place.form(form))
                out = place.backend.numpy(attention.decode(place.backend.array(q))())
                finite.append(bool(np.isfinite(out).all()))
                return out

            report = validation.validate(run, place.form(form).tokens, largest=form.largest, partition=form.partition,
                                         scale_tokens=form.scale_tokens)
            reports[place.name, name] = report
            as_it_should.append(report.passed == (name in right))
            rows.append({"map": place.name, "kernel": name, "finite": all(finite),
                         **{check.name: "passed" if check.passed else "FAILED" for check in report.checks}})
            lab.record.measure(kernel=KERNEL, variant=DECODE, metric="checks_failed", value=len(report.caught_by),
                               unit="1", case={"experiment": "gate", "matrix": place.matrix, "kernel": name})
    wrong = [row for row in rows if row["kernel"] not in right]
    refused = sum(good for good, row in zip(as_it_should, rows, strict=True) if row["kernel"] not in right)
    finite = sum(row["finite"] for row in wrong)
    caught = {name: dict.fromkeys(check for (_, kernel), report in reports.items() if kernel == name
                                  for check in report.caught_by) for name in WRONG_FORMS}
    return Finding(
        "P16", "reproduced" if all(as_it_should) and finite else "contradicted",
        f"On {len(places)} lane maps the gate refuses {refused} of {len(wrong)} wrong kernels, {finite} of which gave "
        f"finite output throughout, and accepts {sum(as_it_should) - refused} of {len(rows) - len(wrong)} right ones. "
        "Checks that fail: " + "; ".join(f"{name}: {', '.join(checks) or 'none'}" for name, checks in caught.items())
        + ".", f"{sum(as_it_should)} of {len(rows)} kernels told apart", data={"rows": rows, "reports": reports})


def service() -> Finding:
    """What a wrong kernel looks like to a service: no model here has been trained to end its answers."""
    return Finding("P15", "not testable here", "What the wrong kernel does to an output is measured (P07), what it "
                   "does to the length of an answer is not.",
                   missing="a model trained to end its answers, generating through the right and the wrong kernel")
