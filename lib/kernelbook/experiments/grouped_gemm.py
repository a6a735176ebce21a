"""Experiments behind the claims of the grouped_gemm article, G01 to G15, in the order of the notebook."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import gguf
import numpy as np

from kernelbook import backends, counters, formats, measure, shapes, smollm2, stats, toolchain
from kernelbook.backends.cpu import CpuBackend
from kernelbook.experiments import Finding, Lab, made_ahead, not_timed, omitted, speed_verdict
from kernelbook.ops import grouped_gemm as op
from kernelbook.peers import gemm as gemm_peers

KERNEL = "grouped_gemm"
VARIANTS = {"int8": "1_int8_activations", "float": "2_float_activations"}
BOUND = 5e-7
"""Relative Frobenius against float64 on the same codes that a float32 kernel must stay within."""
CPU_BOUND = 2e-6
"""The same for PyTorch's float32 product, which adds along K without regard to groups."""
PRECISIONS = ("int8", "int4")


# ---------------------------------------------------------------- inputs

def check_parameters(*, layers: list[int], rows: int, selftest_rows: list[int], selftest_columns: list[int],
                     perplexity_tokens: int, sweep_rows: list[int]) -> None:
    """Raise ValueError, naming the first value that no experiment can use and what was expected, before any runs."""
    depth = shapes.SMOLLM2_135M.layers
    rules = [("rows", [rows], 1, 8192), ("selftest_rows", selftest_rows, 1, 4096),
             ("selftest_columns", selftest_columns, 1, 1 << 20), ("sweep_rows", sweep_rows, 1, 4096),
             ("layers", layers, 0, depth - 1)]
    for name, values, low, high in rules:
        if not values:
            raise ValueError(f"{name} is empty; expected at least one value from {low} to {high}")
        for value in values:
            if not low <= value <= high:
                raise ValueError(f"{name}: {value}; expected {low} to {high}")
    if perplexity_tokens != 0 and perplexity_tokens < 16:
        raise ValueError(f"perplexity_tokens: {perplexity_tokens}; expected 0 for none, or at least 16")


@dataclass(frozen=True)
class Inputs:
    """Weights and activations that error figures are computed on.

    source: where they come from, in words.
    projections: name to (w float32 [N, K], x float32 [M, K]).
    blocks: name to (kind, uint8 [N, bytes]): tensors in GGUF's own form.
    """

    source: str
    projections: dict[str, tuple[np.ndarray, np.ndarray]]
    blocks: dict[str, tuple[str, np.ndarray]]


def real_inputs(model: smollm2.Model, layers: Sequence[int], rows: int) -> Inputs:
    """SmolLM2's weights in `layers` and lm_head, and its activations on `rows` tokens of English prose."""
    tokens = model.tokenize(smollm2.prose())[:rows]
    projections = {name: (model.weights[name].numpy(), x)
                   for name, x in model.activations(tokens, layers).items()}
    blocks = {smollm2.LM_HEAD: ("Q8_0", formats.gguf_tensor(smollm2.path(), smollm2.LM_HEAD).data)}
    return Inputs(f"SmolLM2-135M-Instruct (its file's 4-bit Q4_1 weights and Q8_0 embedding as floats), layers "
                  f"{', '.join(map(str, layers))} on {rows} tokens of prose",
                  projections, _with_blocks(projections, blocks))


def random_inputs(lab: Lab, rows: int) -> Inputs:
    """Random weights and activations in one SmolLM2 layer's shapes, for a machine without the model."""
    rng = lab.rng(1)
    projections = {p.name: (rng.standard_normal((p.n, p.k), np.float32) / np.float32(p.k**0.5),
                            rng.standard_normal((rows, p.k), np.float32))
                   for p in shapes.SMOLLM2_135M.projections}
    return Inputs("random weights and activations in SmolLM2-135M's shapes", projections,
                  _with_blocks(projections, {}))


def _with_blocks(projections, blocks):
    name, (w, _) = next(iter(projections.items()))
    kinds = {"Q8_0": gguf.GGMLQuantizationType.Q8_0, "Q4_0": gguf.GGMLQuantizationType.Q4_0}
    return blocks | {f"{name} as {kind}": (kind, gguf.quants.quantize(w, qtype)) for kind, qtype in kinds.items()}


def random_strips(rng: np.random.Generator, n: int, k: int, group: int = 32, precision: str = "int8",
                  skewed: bool = False) -> formats.Strips:
    """Valid random strips: uniform codes and float16 scales that give weights of about 1/sqrt(K).

    skewed: codes from a quarter of the lowest to the highest, but for the first row, which has the lowest. Products
    with activations that have a mean too are then far from zero: an output of few values is no cancellation, whose
    relative error would say nothing.
    """
    low, high = formats.CODES[precision]
    codes = np.zeros((k, formats.padded(n)), np.int8)
    codes[:, :n] = rng.integers(low // 4 if skewed else low, high + 1, (k, n), np.int8)
    if skewed:
        codes[0, :n] = low
    scales = np.zeros((-(-k // group), formats.padded(n)), np.float32)
    scales[:, :n] = (rng.uniform(0.5, 1.5, (len(scales), n)) * 1.7 / (high * k**0.5)).astype(np.float16)
    return formats.Strips(codes, scales, n, k, group, precision)


def label(p: shapes.Projection) -> str:
    """A projection's name and shape: two models may call different shapes by one name."""
    return f"{p.name} {p.n} x {p.k}"


def _case(m: int, strips: formats.Strips) -> dict:
    """What a record calls a product of m rows with `strips`."""
    return {"M": m, "N": strips.n, "K": strips.k, "group": strips.group, "codes": strips.precision}


def _passes(lab: Lab, variant: str, case: dict, out, reference, bound: float = BOUND, columns=None) -> bool:
    """Record the errors of `out`; whether relative Frobenius is within `bound`.

    columns: those that `reference` holds, where it does not hold all; the others must be finite.
    """
    elsewhere = 0
    if columns is not None and len(columns) < out.shape[1]:
        case = case | {"columns compared": len(columns)}
        part = out[:, columns]
        elsewhere = int(np.count_nonzero(~np.isfinite(out)) - np.count_nonzero(~np.isfinite(part)))
        out = part
    return lab.errors(KERNEL, variant, case, out, reference, bound, elsewhere).relative_frobenius <= bound


def _none_right(claim: str, data=None) -> Finding:
    """The finding on a speed claim where every result is wrong."""
    return Finding(claim, "not reproduced", "No product passes its error check, so no time counts.", data=data)


# ---------------------------------------------------------------- one artifact, every backend (G15)

def artifact(lab: Lab, inputs: Inputs, rows: int = 2) -> Finding:
    """GGUF blocks to strips and back, and one product of the strips on every backend there is."""
    places = {f"wave simulator, {wave} lanes": CpuBackend(wave=wave) for wave in (32, 64)}
    if lab.timed:
        places[lab.backend.device] = lab.backend
    table, exact, agree = [], True, True
    for i, (name, (kind, blocks)) in enumerate(inputs.blocks.items()):
        strips = formats.strips_from_blocks(blocks, kind)
        back = formats.blocks_from_strips(strips)
        round_trip = np.array_equal(back, blocks)
        same_values = np.array_equal(strips.dequantize(), gguf.quants.dequantize(
            blocks, gguf.GGMLQuantizationType[kind]))
        x = lab.rng(2, i).standard_normal((rows, strips.k), np.float32)
        ref = op.reference(x, strips)
        outs = {place: _multiply(op.GroupedGemm(backend, strips), [x]) for place, backend in places.items()}
        outs["CPU path (PyTorch)"] = op.CpuGemm(strips)(x)
        first = next(iter(outs.values()))
        case = _case(rows, strips) | {"tensor": name}
        lab.record.measure(kernel="formats", variant=kind, case=case, metric="bytes_changed_by_round_trip",
                           value=int(np.count_nonzero(back != blocks)), unit="1")
        for place, out in outs.items():
            bound, variant = (CPU_BOUND, "cpu_path") if "CPU path" in place else (BOUND, VARIANTS["float"])
            error = lab.errors(KERNEL, variant, case | {"where": place}, out, ref, bound)
            lab.record.measure(kernel=KERNEL, variant=variant, case=case | {"where": place}, unit="1",
                               metric="outputs_with_other_bits", value=int(np.count_nonzero(out != first)))
            agree &= error.relative_frobenius <= bound
            table.append({"tensor": name, "kind": kind, "N": strips.n, "K": strips.k, "round trip exact": round_trip,
                          "values as gguf's": same_values, "where": place, "error": error.relative_frobenius,
                          "bits as the first": np.array_equal(out, first)})
        exact &= round_trip and same_values
    kernels_equal = all(row["bits as the first"] for row in table if "CPU path" not in row["where"])
    return Finding(
        "G15", "reproduced" if exact and agree else "contradicted",
        f"{len(inputs.blocks)} tensors from {inputs.source}: blocks to strips to blocks "
        f"{'returns every byte' if exact else 'loses bytes'}; one product on {len(places)} kernel backends and the CPU "
        f"path, {'each' if agree else 'not each'} within its bound of float64; the kernels' outputs are "
        f"{'equal to the bit' if kernels_equal else 'not all equal to the bit'} across backends.",
        f"round trip {'exact' if exact else 'not exact'}; {len(places) + 1} backends agree" if agree else "differ",
        data=table)


def _bits(equal: bool) -> str:
    return "equal bits" if equal else "DIFFERENT bits"


def _multiply(gemm: op.GroupedGemm, given: Sequence[np.ndarray], **options) -> np.ndarray:
    """Host arrays (x, or codes and scales) to a host array through a kernel, for checks."""
    device = tuple(map(gemm.backend.array, given))
    return gemm.backend.numpy(gemm(device if len(device) == 2 else device[0], **options))


# ---------------------------------------------------------------- one mapping, every shape (G01, G14)

SELFTEST_ROWS = (1, 2, 3, 4, 5, 31, 32, 33, 128)
SELFTEST_COLUMNS = (1, 3, 4, 63, 64, 65, 1023, 2048)
SELFTEST_K_GROUP = tuple((k, g) for k in (32, 64, 96, 2048) for g in (32, 64, 128) if k % g == 0)


def selftest(lab: Lab, rows: Iterable[int] = SELFTEST_ROWS, columns: Iterable[int] = SELFTEST_COLUMNS,
             k_group: Iterable[tuple[int, int]] = SELFTEST_K_GROUP, precisions: Iterable[str] = PRECISIONS,
             ) -> tuple[Finding, Finding]:
    """Both kernels against float64 over a matrix of shapes; the findings on G01 and G14.

    On a GPU the simulator runs every case too, and its bits are compared with the GPU's. The data is the worst relative
    Frobenius error by (activations, codes, M).
    """
    rows, columns, precisions = tuple(rows), tuple(columns), tuple(precisions)
    places = [lab.backend]
    if lab.timed and backends.available()["cpu"] is None:
        places.append(backends.get("cpu"))
    worst: dict[tuple, float] = {}
    cases = failures = unequal = 0
    for precision in precisions:
        for k, group in k_group:
            for n in columns:
                strips = random_strips(lab.rng(3, n, k, group), n, k, group, precision, skewed=True)
                x = lab.rng(4, n, k).standard_normal((max(rows), k), np.float32) + np.float32(2)
                codes, scales = formats.quantize_activations(x, group)
                given = {"float": (x,), "int8": (codes, scales)}
                references = {"float": op.reference(x, strips), "int8": op.reference_int8(codes, scales, strips)}
                for activations in VARIANTS:
                    gemms = [op.GroupedGemm(place, strips, activations) for place in places]
                    for m in rows:
                        outs = [_multiply(gemm, [array[:m] for array in given[activations]]) for gemm in gemms]
                        error = max(stats.errors(out, references[activations][:m]).relative_frobenius for out in outs)
                        key = (activations, precision, m)
                        worst[key] = max(worst.get(key, 0.0), error)
                        cases += 1
                        failures += error > BOUND
                        unequal += not np.array_equal(outs[0], outs[-1])
    for (activations, precision, m), error in worst.items():
        status = {} if error <= BOUND else {"status": "wrong_result", "reason": f"exceeds {BOUND:g}"}
        lab.record.measure(kernel=KERNEL, variant=VARIANTS[activations], metric="worst_relative_frobenius",
                           case={"selftest": "over N, K and group", "M": m, "codes": precision},
                           value=error if np.isfinite(error) else None, unit="1", **status)
    decode = max((e for (_, _, m), e in worst.items() if m == 1), default=0.0)
    prefill = max((e for (_, _, m), e in worst.items() if m != 1), default=0.0)
    figure = f"M=1: {decode:.1e}, M up to {max(rows)}: {prefill:.1e}"
    if 1 in rows and max(rows) >= 32:
        g01 = Finding("G01", "reproduced" if max(decode, prefill) <= BOUND else "contradicted",
                      f"One kernel source and mapping at M = 1 and at M up to {max(rows)}; worst relative Frobenius "
                      f"error against float64 {figure}; bound {BOUND:g}.", figure, data=worst)
    else:
        g01 = Finding("G01", "not testable here", f"Worst relative Frobenius error {figure}.", figure, data=worst,
                      missing="M = 1 and an M of at least 32 among the rows of the selftest")
    bits = (f" The simulator ran every case too; its outputs differ from the GPU's in some bit in {unequal} cases."
            if len(places) > 1 else "")
    odd = [n for n in columns if n % op.COLUMNS]
    lacking = ", ".join(what for what, there in (("M = 1", 1 in rows), ("an M of at least 32", max(rows) >= 32),
                                                 ("an N that is no multiple of 4", odd), ("int8 and int4 codes",
                                                 set(precisions) == set(PRECISIONS))) if not there)
    g14 = Finding("G14", "contradicted" if failures else "not testable here" if lacking else "reproduced",
                  f"{cases} cases ({' and '.join(precisions)} codes x M in {rows} x N in {columns} x K and group in "
                  f"{tuple(k_group)} x both kernels), {failures} beyond {BOUND:g}.{bits}",
                  f"{cases - failures} of {cases} cases pass", data=worst,
                  missing=f"{lacking} among the cases of the selftest" if lacking and not failures else None)
    return g01, g14


# ---------------------------------------------------------------- whole groups, fixed order (G03, G04)

def partition(lab: Lab, m: int = 3, n: int = 65, k: int = 2048, group: int = 32) -> Finding:
    """Integer sums of every group for many nsplit, against exact ones; and the largest sum that codes can make."""
    strips = random_strips(lab.rng(5), n, k, group)
    codes = lab.rng(6).integers(-127, 128, (m, k), np.int8)
    scales = np.full((m, strips.groups), 0.01, np.float32)
    exact = op.integer_sums(codes, strips)
    args = lab.backend.array(codes), lab.backend.array(scales)
    gemm = op.GroupedGemm(lab.backend, strips, "int8", keep_sums=True)
    nsplits = sorted({s for s in (1, 2, 3, 4, 7, 8, 16, 32, 33, 64) if s <= strips.groups} | {strips.groups})
    wrong = {}
    for nsplit in nsplits:
        gemm(args, nsplit=nsplit)
        wrong[nsplit] = int(np.count_nonzero(lab.backend.numpy(gemm.sums) != exact))
        lab.record.measure(kernel=KERNEL, variant=VARIANTS["int8"], metric="group_sums_wrong", value=wrong[nsplit],
                           case=_case(m, strips) | {"nsplit": nsplit}, unit="1")
    digest = hashlib.sha256(exact.astype("<i4").tobytes()).hexdigest()[:12]
    lab.record.measure(kernel=KERNEL, variant=VARIANTS["int8"], metric="group_sums_checksum", value=int(digest, 16),
                       case=_case(m, strips), unit="sha256, first 48 bits")
    extremes = {}
    for weight, activation in ((127, 127), (127, -127), (-128, 127)):
        full = formats.Strips(np.full((group, formats.LINE), weight, np.int8), np.ones((1, formats.LINE), np.float32),
                              formats.LINE, group, group, "int8")
        one = op.GroupedGemm(lab.backend, full, "int8", keep_sums=True)
        one((lab.backend.array(np.full((1, group), activation, np.int8)),
             lab.backend.array(np.ones((1, 1), np.float32))))
        extremes[weight, activation] = int(lab.backend.numpy(one.sums)[0, 0, 0])
        lab.record.measure(kernel=KERNEL, variant=VARIANTS["int8"], metric="group_sum", unit="1",
                           value=extremes[weight, activation],
                           case={"group": group, "weight": weight, "activation": activation})
    sound = not any(wrong.values()) and all(s == group * w * a for (w, a), s in extremes.items())
    return Finding(
        "G03", "reproduced" if sound else "contradicted",
        f"{exact.size} integer group sums equal exact ones for nsplit {', '.join(map(str, nsplits))} "
        f"({sum(wrong.values())} differ); all-extreme codes give {extremes[127, 127]} = {group} * 127 * 127, far "
        f"inside int32. A Q8_0 file may also hold -128, which gives {extremes[-128, 127]}.",
        f"0 of {exact.size} differ, max |sum| {extremes[127, 127]}" if sound else f"{wrong} differ",
        data={"wrong": wrong, "extremes": extremes, "digest": digest})


def order(lab: Lab, m: int = 2, n: int = 1000, k: int = 2048, repeats: int = 5) -> Finding:
    """The same product again and again, and with other nsplit; differences in ulp."""
    strips = random_strips(lab.rng(7), n, k)
    x = lab.backend.array(lab.rng(8).standard_normal((m, k), np.float32))
    gemm = op.GroupedGemm(lab.backend, strips)
    nsplits = [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= strips.groups]
    unequal, outs = 0, {}
    for nsplit in nsplits:
        # fresh partial sums for each run: those of the run before would be right ones
        runs = [lab.backend.numpy(gemm(x, nsplit=nsplit, partial=lab.backend.empty((nsplit, m, n), np.float32)))
                for _ in range(repeats)]
        unequal += sum(not np.array_equal(runs[0].view(np.int32), run.view(np.int32)) for run in runs[1:])
        outs[nsplit] = runs[0]
    ulps = {nsplit: stats.ulp_difference(out, outs[1]) for nsplit, out in outs.items()}
    changed = {nsplit: float((d > 0).mean()) for nsplit, (_, d) in ulps.items()}
    widest = max(ulps, key=lambda nsplit: ulps[nsplit][0])
    largest, distances = ulps[widest]
    # an ulp is small beside small values: say how large the output is where the distance is largest
    there = np.unravel_index(distances.argmax(), distances.shape)
    size = abs(float(outs[1][there])) / float(np.sqrt(np.mean(np.square(outs[1], dtype=np.float64))))
    for nsplit, (top, _) in ulps.items():
        case = _case(m, strips) | {"nsplit": nsplit}
        lab.record.measure(kernel=KERNEL, variant=VARIANTS["float"], metric="max_ulp_from_nsplit_1", value=int(top),
                           case=case, unit="ulp")
        lab.record.measure(kernel=KERNEL, variant=VARIANTS["float"], metric="share_of_outputs_changed_from_nsplit_1",
                           value=changed[nsplit], case=case, unit="1")
    lab.record.measure(kernel=KERNEL, variant=VARIANTS["float"], metric="repeats_with_other_bits", value=unequal,
                       case=_case(m, strips) | {"repeats": repeats}, unit="1")
    other = (f"Another nsplit changes bits of up to {max(changed.values()):.0%} of the outputs, at the median of "
             f"nsplit {widest} by {np.median(distances):.0f} ulp and at most by {largest}, at an output of {size:.1g} "
             "of the RMS." if largest else "No other nsplit changes any bit.")
    return Finding(
        "G04", "reproduced" if unequal == 0 and largest else "direction holds" if unequal == 0 else "contradicted",
        f"{repeats} runs at each of nsplit {', '.join(map(str, nsplits))}: {unequal} differ in any bit. {other}",
        f"{unequal} of {(repeats - 1) * len(nsplits)} repeats differ; other nsplit: up to {largest} ulp",
        data={"ulps": {s: d.ravel() for s, (_, d) in ulps.items()}, "changed": changed})


def carry(lab: Lab, p: shapes.Projection, columns: int = 256, rows: int = 2) -> list[dict]:
    """What adding groups with a carry gains in accuracy on `p`, over some of its columns and without a split, and what
    it costs in time on all of it where there is a GPU. Rows of {sum, error, time at M = 1}."""
    strips = random_strips(lab.rng(18), columns, p.k)
    x = lab.rng(19).standard_normal((rows, p.k), np.float32)
    reference = op.reference(x, strips)
    weights = _Weights(lab, _strips(lab, p, "int8")) if lab.timed else None
    table, benches = [], {}
    for with_carry in (False, True):
        gemm = op.GroupedGemm(lab.backend, strips, carry=with_carry)
        out = lab.backend.numpy(gemm(lab.backend.array(x), nsplit=1))
        variant = VARIANTS["float"] + ("" if with_carry else "_without_carry")
        case = _case(rows, strips) | {"nsplit": 1}
        error = lab.errors(KERNEL, variant, case, out, reference, BOUND).relative_frobenius
        table.append({"sum over groups": "with a carry" if with_carry else "plain", "relative Frobenius": error})
        if weights and (bench := _Bench(weights, 1, carry=with_carry)).check():
            benches[with_carry] = bench
    if benches:
        for with_carry, timing in measure.device_times({c: b.calls() for c, b in benches.items()}).items():
            benches[with_carry].record(timing, experiment="carry")
            table[with_carry]["M = 1, cold"] = str(timing)
    return table


# ---------------------------------------------------------------- what the compiler makes of it (G02)

def sectors(addresses, width: int = 4, sector: int = 32) -> int:
    """32-byte sectors that one warp-wide load touches: addresses of its lanes in bytes, `width` bytes each."""
    first = np.asarray(addresses)
    return len(np.unique(np.concatenate([first // sector, (first + width - 1) // sector])))


def transactions(lab: Lab) -> Finding:
    """Widths of the loads in the machine code of every target, and sectors a request from the mapping."""
    rows = []
    targets = [name for name, missing in toolchain.targets().items() if missing is None]
    for activations in VARIANTS:
        file, defines = op.source(activations, 32)
        rows += toolchain.evidence(backends.Source(file, defines), targets)
    lanes = np.arange(32)
    per_load = {"codes": sectors(lanes * op.COLUMNS), "activation": sectors(np.zeros(32, int))}
    counted = _count_sectors(lab)
    for row in rows:
        variant = VARIANTS[row["kernel"].removeprefix("grouped_gemm_")]
        for metric in ("registers", "spill_bytes", "shared_bytes", "macs", "instructions_per_mac", "loads_per_mac",
                       "conversions_per_mac"):
            if row.get(metric) is not None:
                lab.record.measure(kernel=KERNEL, variant=variant, case={"target": row["target"], "group": 32},
                                   metric=metric, value=row[metric], unit="1")
        for width, count in row["global_loads"].items():
            lab.record.measure(kernel=KERNEL, variant=variant, metric="global_loads", value=count, unit="1",
                               case={"target": row["target"], "group": 32, "bits": int(width)})
    # a group takes 32 loads of four codes; of the others, only those of int8 activations may be narrower
    nvidia = [row for row in rows if row["target"].startswith("sm_")]
    bytewise = {"grouped_gemm_int8": 32, "grouped_gemm_float": 0}
    narrow = [row["target"] for row in nvidia if row["global_loads"].get("32", 0) < 32
              or row["global_loads"].get("8", 0) + row["global_loads"].get("16", 0) > bytewise[row["kernel"]]]
    if isinstance(counted, str):
        agree = True
        words = f"Counters were not read ({counted})."
    else:
        agree = all(abs(c["measured"] - c["predicted"]) < 0.02 for c in counted.values())
        words = "Hardware counters: " + "; ".join(
            f"{name} {c['measured']:.2f} sectors a load request on average, {c['predicted']:.2f} follow from the "
            f"mapping, {c['efficiency']:.0f}% of the bytes moved are used" for name, c in counted.items()) + "."
    loads = "has no 4-byte loads on " + ", ".join(narrow) if narrow else "has the 4-byte loads that this needs"
    good = per_load == {"codes": 4, "activation": 1} and not narrow and agree
    if not nvidia:
        return Finding("G02", "not testable here", f"The mapping gives {per_load['codes']} sectors a request for codes "
                       f"and {per_load['activation']} for an activation. {words}",
                       missing=f"a compiler for NVIDIA targets: {toolchain.targets()['sm_80']}", data=rows)
    return Finding(
        "G02", "reproduced" if good else "contradicted",
        f"A warp's load of codes covers 32 x {op.COLUMNS} contiguous bytes from a 128-byte line of the strips: "
        f"{per_load['codes']} sectors of 32 bytes, all of them used; its load of an activation is one address, "
        f"{per_load['activation']} sector. The machine code for {len({r['target'] for r in nvidia})} NVIDIA targets "
        f"{loads}. {words}",
        f"{per_load['codes']} sectors a request for codes, {per_load['activation']} for an activation", data=rows)


def _count_sectors(lab: Lab) -> dict[str, dict] | str:
    """Sectors a load request by the hardware's counters and by the mapping, for each kernel; or why not."""
    if not lab.timed:
        return "no GPU"
    code = f"from kernelbook.experiments import grouped_gemm as g; g.launch_each({lab.seed})"
    try:
        found = counters.read(code, [counters.SECTORS_PER_REQUEST, counters.LOAD_EFFICIENCY])
    except backends.BackendUnavailable as unavailable:
        return str(unavailable)
    # of a group: 32 loads of codes, 32 of activations (one sector), the four scales of each lane, and with int8
    # activations the one scale of the row
    group, scales = 32, sectors(np.arange(32) * 16, 16)
    loads = group * sectors(np.arange(32) * op.COLUMNS) + group
    predicted = {"grouped_gemm_float": (loads + scales) / (2 * group + 1),
                 "grouped_gemm_int8": (loads + scales + 1) / (2 * group + 2)}
    result = {}
    for kernel, expected in predicted.items():
        measured, efficiency = found[kernel][counters.SECTORS_PER_REQUEST], found[kernel][counters.LOAD_EFFICIENCY]
        result[kernel] = {"measured": measured, "predicted": expected, "efficiency": efficiency}
        for metric, value in (("sectors_per_load_request", measured), ("predicted_sectors_per_load_request", expected),
                              ("load_efficiency_percent", efficiency)):
            lab.record.measure(kernel=KERNEL, variant=VARIANTS[kernel.removeprefix("grouped_gemm_")], metric=metric,
                               case={"M": 4, "N": 2048, "K": 2048, "group": group}, value=value, unit="1")
    return result


def launch_each(seed: int) -> None:
    """Launch both kernels once on full tiles: what a profiler looks at."""
    backend, rng = backends.get("cuda"), np.random.default_rng(seed)
    gemm = op.GroupedGemm(backend, random_strips(rng, 2048, 2048))
    x = rng.standard_normal((4, 2048), np.float32)
    gemm(backend.array(x))
    gemm.using("int8")(tuple(map(backend.array, formats.quantize_activations(x))))
    backend.synchronize()


# ---------------------------------------------------------------- filling the device (G05, G06, G07)

def occupancy(m: int, projections: Iterable[shapes.Projection], group: int = 32) -> list[dict]:
    """Blocks of each projection's grid, without and with the split rule."""
    table = []
    for p in projections:
        x, y = op.blocks_xy(m, p.n, remap=True)
        nsplit = op.choose_nsplit(m, p.n, p.k // group)
        table.append({"projection": p.name, "N": p.n, "K": p.k, "blocks": x * y, "nsplit": nsplit,
                      "blocks with split": x * y * nsplit})
    return table


def _outer_columns(strips: formats.Strips) -> tuple[np.ndarray, formats.Strips]:
    """The outer columns, where a grid's tail is, and their weights: for error checks that need not compute all of
    float64's product."""
    keep = np.unique(np.r_[:min(256, strips.n), max(0, strips.n - 256):strips.n])
    return keep, formats.pack(strips.codes[:, keep].T, strips.scales[:, keep].T, strips.group, strips.precision)


def dense(lab: Lab, strips: formats.Strips):
    """The weights as a float32 tensor [N, K], K a multiple of the group, where the lab computes: for peers."""
    groups, group, n = strips.groups, strips.group, strips.n
    codes = lab.tensor(strips.codes)[:, :n].float().reshape(groups, group, n)
    return (codes * lab.tensor(strips.scales)[:, None, :n]).reshape(groups * group, n).T.contiguous()


def _strips(lab: Lab, p: shapes.Projection, precision: str) -> formats.Strips:
    return random_strips(lab.rng(9, p.n, p.k), p.n, p.k, precision=precision)


class _Weights:
    """A weight matrix on the device, in enough copies to be measured cold."""

    def __init__(self, lab: Lab, strips: formats.Strips):
        self.lab, self.strips = lab, strips
        first = op.GroupedGemm(lab.backend, strips)
        copies = measure.rotation(strips.nbytes, lab.backend.l2_bytes)
        self.gemms = [first] + [first.clone() for _ in range(copies - 1)]
        self.columns, self.sample = _outer_columns(strips)

    def x(self, m: int) -> np.ndarray:
        return self.lab.rng(10, m, self.strips.k).standard_normal((m, self.strips.k), np.float32)


class _Bench:
    """A product of some rows with such weights, with everything a timed call needs allocated before."""

    def __init__(self, weights: _Weights, m: int, activations: str = "float", *, remap: bool = True,
                 carry: bool = True):
        self.lab, self.weights, self.activations = weights.lab, weights, activations
        s, backend = weights.strips, weights.lab.backend
        self.m, self.strips = m, s
        self.gemms = [gemm.using(activations, remap=remap, carry=carry) for gemm in weights.gemms]
        self.case = _case(m, s)
        self.variant = (VARIANTS[activations] + ("" if remap else "_without_remap")
                        + ("" if carry else "_without_carry"))
        self.host_x = weights.x(m)
        self.given = formats.quantize_activations(self.host_x, s.group) if activations == "int8" else (self.host_x,)
        device = tuple(map(backend.array, self.given))
        self.x = device if activations == "int8" else device[0]
        self.out = backend.empty((m, s.n), np.float32)
        self.nbytes = s.k * s.n + 4 * s.n * s.groups + sum(a.nbytes for a in self.given) + self.out.nbytes
        self.flop = 2 * m * s.n * s.k

    def calls(self, cold: bool = True, **options):
        nsplit = options.get("nsplit") or self.gemms[0].choose_nsplit(self.m)
        partial = self.lab.backend.empty((nsplit, self.m, self.strips.n), np.float32) if nsplit > 1 else None
        return [gemm.prepare(self.x, out=self.out, partial=partial, **options)
                for gemm in (self.gemms if cold else self.gemms[:1])]

    def check(self, **options) -> bool:
        """Whether the output is within BOUND of float64; records the errors."""
        self.out.fill(np.nan)
        self.gemms[0](self.x, out=self.out, **options)
        reference = op.reference_int8 if self.activations == "int8" else op.reference
        out = self.lab.backend.numpy(self.out)
        return _passes(self.lab, self.variant, self.case | options, out, reference(*self.given, self.weights.sample),
                       columns=self.weights.columns)

    def record(self, timing, cache="cold", **options):
        self.lab.time(KERNEL, self.variant, self.case | options, timing, cache, nbytes=self.nbytes, flop=self.flop)


def split_sweep(lab: Lab, projections: Sequence[shapes.Projection], precision: str = "int8") -> Finding:
    """Time of a decode product (M = 1) against nsplit, beside the split rule's choice."""
    table = occupancy(1, projections)
    for r in table:
        for metric in ("blocks", "nsplit", "blocks with split"):
            lab.record.measure(kernel=KERNEL, variant=VARIANTS["float"], metric=metric.replace(" ", "_"),
                               value=r[metric], unit="1",
                               case={"M": 1, "N": r["N"], "K": r["K"], "group": 32, "split rule": True})
    if not lab.timed:
        starved = sum(r["blocks"] < op.TARGET_BLOCKS for r in table)
        filled = sum(r["blocks with split"] >= op.TARGET_BLOCKS for r in table)
        return not_timed(
            "G05", f"At M = 1 the grid of {starved} of {len(table)} projections has fewer than {op.TARGET_BLOCKS} "
            f"blocks (as few as {min(r['blocks'] for r in table)}). With the split rule {filled} have at least that "
            f"many and the others, at one slice a group, at least {min(r['blocks with split'] for r in table)}. "
            "Whether that pays needs a clock.", {"occupancy": table})
    times, rule_gain, from_best, left_out = {}, {}, {}, []
    for p in projections:
        bench = _Bench(_Weights(lab, _strips(lab, p, precision)), 1)
        groups = bench.strips.groups
        rule = bench.gemms[0].choose_nsplit(1)
        nsplits = sorted({s for s in (1, 2, 4, 8, 16, 32, 64) if s <= groups} | {rule})
        if not all([bench.check(nsplit=s) for s in nsplits]):
            left_out.append(label(p))
            continue
        timed = measure.device_times({s: bench.calls(nsplit=s) for s in nsplits})
        for nsplit, timing in timed.items():
            bench.record(timing, nsplit=nsplit, experiment="split sweep")
        times[label(p)] = {"times": timed, "rule": rule, "N": p.n, "K": p.k}
        best = min(t.median for t in timed.values())
        rule_gain[label(p)] = timed[1].median / timed[rule].median
        from_best[label(p)] = timed[rule].median / best
    if not times:
        return _none_right("G05", {"occupancy": table})
    gain, gap = min(rule_gain.values()), max(from_best.values())
    worst = max(from_best, key=from_best.get)
    return Finding(
        "G05", speed_verdict([(t["times"][1], t["times"][t["rule"]]) for t in times.values()], left_out),
        f"M = 1, cold, {precision} codes, {len(times)} projections: the split rule is {gain:.2f} to "
        f"{max(rule_gain.values()):.2f} times as fast as no split, and within {gap - 1:.0%} of the best nsplit "
        f"measured (furthest on {worst}).{omitted(left_out)}",
        f"{gain:.2f}x to {max(rule_gain.values()):.2f}x over nsplit 1",
        data={"occupancy": table, "times": times})


def launch_per_slice(lab: Lab, p: shapes.Projection, nsplit: int = 64, precision: str = "int8") -> Finding:
    """All slices in one launch against a launch for each, and an empty launch beside them."""
    if not lab.timed:
        strips = random_strips(lab.rng(16), 256, p.k)
        gemm = op.GroupedGemm(lab.backend, strips)
        x = lab.backend.array(lab.rng(17).standard_normal((1, p.k), np.float32))
        nsplit = min(nsplit, strips.groups)
        one, many = (lab.backend.numpy(gemm(x, nsplit=nsplit, launch_per_slice=each)) for each in (False, True))
        return not_timed("G06", f"With nsplit {nsplit}, one launch and {nsplit} launches give "
                         f"{_bits(np.array_equal(one, many))} here; what the launches cost needs a clock.")
    bench = _Bench(_Weights(lab, _strips(lab, p, precision)), 1)
    nsplit = min(nsplit, bench.strips.groups)
    if not (bench.check(nsplit=nsplit) and bench.check(nsplit=nsplit, launch_per_slice=True)):
        return _none_right("G06")
    graph = measure.device_times({"one launch": bench.calls(nsplit=nsplit),
                                  "a launch a slice": bench.calls(nsplit=nsplit, launch_per_slice=True)})

    def synchronized(**options):
        calls = bench.calls(nsplit=nsplit, **options)

        def run():
            calls[0]()
            lab.backend.synchronize()
        return run

    host = measure.host_times({"one launch": synchronized(), "a launch a slice": synchronized(launch_per_slice=True)},
                              rounds=50)
    for name, timing in graph.items():
        bench.record(timing, nsplit=nsplit, launches=name)
    for name, timing in host.items():
        bench.record(timing, cache="warm", nsplit=nsplit, launches=name, launched="from the host")
    extra = {how: t["a launch a slice"].median / t["one launch"].median
             for how, t in (("graph", graph), ("host", host))}
    # judged by the graph, where a launch costs least: from the host, Python's own work would count against the loop
    verdict = ("reproduced" if extra["graph"] > 2 else "direction holds" if extra["graph"] > 1.1 else
               "contradicted" if extra["graph"] < 0.9 else "not reproduced")
    return Finding(
        "G06", verdict,
        f"{p.name} ({p.n} x {p.k}), M = 1, nsplit {nsplit}: inside a CUDA graph {graph['one launch']} in one launch "
        f"and {graph['a launch a slice']} in {nsplit}, {extra['graph']:.1f} times as long, so the extra launches cost "
        f"{'more' if extra['graph'] > 2 else 'less'} than the whole product; one after the other, the slices also "
        f"leave the device as empty as nsplit 1 does. From the host {host['one launch']} and "
        f"{host['a launch a slice']}, {extra['host']:.1f} times. {_from_python(lab)}",
        f"{extra['host']:.1f}x from the host, {extra['graph']:.1f}x in a graph", data={"graph": graph, "host": host})


def _from_python(lab: Lab) -> str:
    """What to know about times of calls from the host."""
    empty = lab.ceilings["launch_and_synchronize"]
    return (f"Calls from the host go through Python and CuPy, where an empty launch with its synchronize takes "
            f"{empty.value:.1f} us.")


def remap(lab: Lab, projections: Sequence[shapes.Projection], precision: str = "int8") -> Finding:
    """At M = 1, the whole block along the columns against three of four threads idle."""
    if not lab.timed:
        idle = 1 - 1 / op.THREADS_M
        strips = random_strips(lab.rng(16), 1500, 256)
        x = lab.backend.array(lab.rng(17).standard_normal((1, 256), np.float32))
        with_, without = (lab.backend.numpy(op.GroupedGemm(lab.backend, strips, remap=r)(x, nsplit=4))
                          for r in (True, False))
        return not_timed("G07", f"Without the remap {idle:.0%} of a block's threads leave at once at M = 1. At the "
                         f"same nsplit both forms give {_bits(np.array_equal(with_, without))} here; what the idle "
                         "threads cost needs a clock.")
    gains, left_out = {}, []
    for p in projections:
        weights = _Weights(lab, _strips(lab, p, precision))
        benches = {r: _Bench(weights, 1, remap=r) for r in (True, False)}
        # equal slices as well as each form's own rule, so that the remap is not credited with another split
        rule = {r: b.gemms[0].choose_nsplit(1) for r, b in benches.items()}
        if not all([benches[r].check(nsplit=rule[s]) for r, s in ((True, True), (False, True), (False, False))]):
            left_out.append(label(p))
            continue
        timed = measure.device_times({"remap": benches[True].calls(nsplit=rule[True]),
                                      "no remap, same nsplit": benches[False].calls(nsplit=rule[True]),
                                      "no remap, own nsplit": benches[False].calls(nsplit=rule[False])})
        benches[True].record(timed["remap"], nsplit=rule[True], experiment="remap")
        benches[False].record(timed["no remap, same nsplit"], nsplit=rule[True], experiment="remap, same nsplit")
        benches[False].record(timed["no remap, own nsplit"], nsplit=rule[False], experiment="remap, own nsplit")
        gains[label(p)] = {"times": timed, "same": timed["no remap, same nsplit"].median / timed["remap"].median,
                         "own": timed["no remap, own nsplit"].median / timed["remap"].median}
    if not gains:
        return _none_right("G07")
    same, own = ([g[how] for g in gains.values()] for how in ("same", "own"))
    return Finding(
        "G07", speed_verdict([(g["times"]["no remap, own nsplit"], g["times"]["remap"]) for g in gains.values()],
                             left_out),
        f"M = 1, cold, {len(gains)} projections: without the remap {min(same):.2f} to {max(same):.2f} times the time "
        f"at the same nsplit, {min(own):.2f} to {max(own):.2f} times at the nsplit that the rule gives it."
        f"{omitted(left_out)}",
        f"{min(own):.2f}x to {max(own):.2f}x", data=gains)


# ---------------------------------------------------------------- times at every M, peers beside (no claim of its own)

def row_sweep(lab: Lab, projections: Sequence[shapes.Projection], rows: Sequence[int],
              precisions: Sequence[str] = PRECISIONS, budget_s: float = 0.5) -> list[dict]:
    """Cold and warm times of both kernels and of every peer that imports, each after its error check.

    Rows of {projection, N, K, M, codes, variant, cache, timing, nbytes, flop}; a peer that fails or is wrong is
    recorded as such and has no time. budget_s: seconds of measuring a shape, precision and M, see measure.device_times.
    """
    table = []
    known = lab.able(KERNEL, gemm_peers.all_peers())
    cases = [(lab, p, precision) for p in projections for precision in precisions]
    for (_, p, precision), strips in zip(cases, made_ahead(_strips, cases), strict=True):
        weights = _Weights(lab, strips)
        prepared = lab.prepare_peers(KERNEL, known, precision, lambda strips=strips: dense(lab, strips),
                                     lambda nbytes: measure.rotation(nbytes, lab.backend.l2_bytes),
                                     {"N": p.n, "K": p.k, "group": strips.group, "codes": precision})
        for m in rows:
            contenders, nbytes = {}, {}
            for activations in VARIANTS:
                bench = _Bench(weights, m, activations)
                if bench.check():
                    nbytes[bench.variant] = bench.nbytes
                    contenders[bench.variant, "cold"] = bench.calls()
                    contenders[bench.variant, "warm"] = bench.calls(cold=False)
            for peer, calls in prepared.items():
                given = gemm_peers.activations(peer, weights.x(m))
                if _check_peer(lab, peer, calls[0], weights, given):
                    nbytes[peer.name] = peer.weight_bytes(p.n, p.k, 32) + 2 * m * (p.k + p.n)
                    contenders[peer.name, "cold"] = [lambda c=c, given=given: c(given) for c in calls]
            for (variant, cache), timing in measure.device_times(contenders, budget_s=budget_s).items():
                flop = 2 * m * p.n * p.k
                lab.time(KERNEL, variant, _case(m, weights.strips), timing, cache, nbytes=nbytes[variant], flop=flop)
                table.append({"projection": p.name, "N": p.n, "K": p.k, "M": m, "codes": precision,
                              "variant": variant, "cache": cache, "timing": timing, "nbytes": nbytes[variant],
                              "flop": flop})
    return table


def standings(table: list[dict]) -> list[dict]:
    """Of a row_sweep, cold: our fastest kernel against the fastest peer (of this precision, or cuBLAS on bf16 weights),
    a row a shape and M."""
    rows = []
    keys = dict.fromkeys((r["projection"], r["N"], r["K"], r["codes"], r["M"]) for r in table)
    for key in keys:
        cold = [r for r in table
                if r["cache"] == "cold" and key == (r["projection"], r["N"], r["K"], r["codes"], r["M"])]
        ours = min((r for r in cold if r["variant"] in VARIANTS.values()), key=lambda r: r["timing"].median,
                   default=None)
        peer = min((r for r in cold if r["variant"] not in VARIANTS.values()), key=lambda r: r["timing"].median,
                   default=None)
        row = dict(zip(("projection", "N", "K", "codes", "M"), key, strict=True))
        for who, r in (("ours", ours), ("best peer", peer)):
            if r:
                row |= {who: r["variant"], f"{who} us": r["timing"].median,
                        f"{who} GB/s": r["nbytes"] / r["timing"].median / 1e3}
        if ours and peer:
            row["ours / peer"] = ours["timing"].median / peer["timing"].median
        rows.append(row)
    return rows


def _check_peer(lab, peer, call, weights, given) -> bool:
    """Whether the peer is within its bound of float64; records the errors."""
    s = weights.strips
    case = _case(len(given), s)
    try:
        out = call(given).float().cpu().numpy()
    except Exception as error:  # a peer's own failure must not cost the run
        lab.no_time(KERNEL, peer.name, case, "runtime_error", error)
        return False
    return _passes(lab, peer.name, case, out, op.reference(weights.x(len(given)), weights.sample),
                   gemm_peers.BOUND[peer.bits], columns=weights.columns)


# ---------------------------------------------------------------- called from the host (G09 to G12)

def host_paths(lab: Lab, projections: Sequence[shapes.Projection], precision: str = "int8") -> tuple[Finding, Finding]:
    """Pinned staging with one synchronize against pageable copies with two; the findings on G09 and G10."""
    if not lab.timed:
        host = op.HostGemm(op.GroupedGemm(lab.backend, random_strips(lab.rng(16), 256, 2048)), 1)
        x = lab.rng(17).standard_normal((1, 2048), np.float32)
        evidence = (f"Both host paths run here and give {_bits(np.array_equal(host(x), host.pageable(x)))}; the "
                    "simulator has no copies and no synchronizes to pay for.")
        return not_timed("G09", evidence), not_timed("G10", evidence)
    trip = lab.ceilings["round_trip_pinned"]
    table, left_out = {}, []
    for p in projections:
        bench = _Bench(_Weights(lab, _strips(lab, p, precision)), 1)
        host = op.HostGemm(bench.gemms[0], 1)
        right = bench.check()
        paths = [host(bench.host_x), host.pageable(bench.host_x)]
        if not (right and all(np.array_equal(out, lab.backend.numpy(bench.out)) for out in paths)):
            left_out.append(label(p))
            continue
        timed = measure.host_times({"pinned": lambda h=host, b=bench: h(b.host_x),
                                    "pageable": lambda h=host, b=bench: h.pageable(b.host_x)}, rounds=100, budget_s=3)
        # a model's other weights go through the cache between two calls of one: the kernel is cold
        kernel = measure.device_times({"kernel": bench.calls()})["kernel"]
        bench.record(kernel, experiment="host paths")
        for path, timing in timed.items():
            bench.record(timing, cache="warm", path=path, launched="from host memory and back")
        table[label(p)] = {**timed, "kernel": kernel, "MFLOP": bench.flop / 1e6,
                         "fixed share": 1 - kernel.median / timed["pinned"].median}
    if not table:
        return _none_right("G09"), _none_right("G10")
    saved = {name: r["pageable"].median - r["pinned"].median for name, r in table.items()}
    trips = {name: s / trip.value for name, s in saved.items()}
    median = float(np.median(list(trips.values())))
    g09 = Finding(
        "G09", "reproduced" if median >= 0.5 and not left_out else "direction holds" if median > 0.05 else
        "contradicted" if median < -0.05 else "not reproduced",
        f"M = 1, {len(table)} projections: pinned staging and one synchronize save {min(saved.values()):.1f} to "
        f"{max(saved.values()):.1f} us a call, {min(trips.values()):.2f} to {max(trips.values()):.2f} of this "
        f"machine's round trip of {trip.value:.1f} us (median {median:.2f}). {_from_python(lab)}{omitted(left_out)}",
        f"saves {median:.2f} round trips (median of {len(table)} shapes)", data=table)
    fixed = {name: r["pinned"].median - r["kernel"].median for name, r in table.items()}
    typical = float(np.median(list(fixed.values())))
    small = [name for name, r in table.items() if r["MFLOP"] < op.FLOP_GATE / 1e6]
    dominated = [name for name in small if fixed[name] > table[name]["kernel"].median]
    close = 50 <= typical <= 200
    g10 = Finding(
        "G10", "reproduced" if close and small and dominated == small and not left_out else
        "direction holds" if dominated else "not reproduced",
        f"Fixed cost of a call (call from the host minus cold kernel in a graph) {min(fixed.values()):.0f} to "
        f"{max(fixed.values()):.0f} us, median "
        f"{typical:.0f} us, of which an empty round trip of 8 KB is {trip.value:.1f} us; it exceeds the kernel's own "
        f"time on {len(dominated)} of the {len(small)} projections below the article's gate "
        f"({', '.join(dominated) or 'none'}). {_from_python(lab)}{omitted(left_out)}",
        f"{typical:.0f} us a call, empty round trip {trip.value:.0f} us", data=table)
    return g09, g10


ARTICLE_MFLOP = {"q": 8.4, "k": 4.2, "v": 4.2, "o": 8.4, "gate": 25, "up": 25, "down": 25, "lm_head": 622}
"""The article's figures for Qwen3-VL-2B at M = 1 (section 3.5)."""
ARTICLE_DEVICE = {"gate", "up", "down", "lm_head"}
"""What its gate sends to the GPU."""


def flop_gate(lab: Lab, model: shapes.Inventory, precision: str = "int8") -> Finding:
    """FLOP of each projection at M = 1 against the article's figures and gate; where there is a GPU, the break-even
    that times give. The data has a row a shape."""
    flops = {p.name: p.flops(1) for p in model}
    above = {name for name, f in flops.items() if f >= op.FLOP_GATE}
    same = flops.keys() == ARTICLE_MFLOP.keys() and all(
        abs(f / 1e6 / ARTICLE_MFLOP[name] - 1) < 0.01 for name, f in flops.items())
    figures = ", ".join(f"{name} {f / 1e6:.1f}" for name, f in flops.items())
    evidence = (f"MFLOP at M = 1: {figures}, {'as' if same else 'not all as'} the article has them; the gate of 1e7 "
                f"sends {', '.join(name for name in flops if name in above) or 'none'} to the GPU.")
    rows, left_out = [], []
    for p in shapes.distinct(model):
        strips = random_strips(lab.rng(9, p.n, p.k), p.n, p.k, 32, precision)
        x = lab.rng(10, 1, p.k).standard_normal((1, p.k), np.float32)
        case = _case(1, strips)
        columns, sample = _outer_columns(strips)
        reference = op.reference(x, sample)
        cpu = op.CpuGemm(strips)
        contenders = {"cpu": lambda cpu=cpu, x=x: cpu(x)}
        right = _passes(lab, "cpu_path", case, cpu(x), reference, CPU_BOUND, columns)
        if lab.timed:
            host = op.HostGemm(op.GroupedGemm(lab.backend, strips), 1)
            contenders["device"] = lambda host=host, x=x: host(x)
            right &= _passes(lab, "host_device", case, host(x), reference, columns=columns)
        if not right:
            left_out.append(label(p))
            continue
        timed = measure.host_times(contenders, rounds=50, budget_s=2)
        for how, variant in (("cpu", "cpu_path"), ("device", "host_device")):
            if how in timed:
                lab.time(KERNEL, variant, case, timed[how], "warm", flop=flops[p.name], host=how == "cpu")
        rows.append({"projection": p.name, "flop": flops[p.name], **timed})
    if not rows:
        evidence += " No product passes its error check, so none is timed."
    elif lab.timed:
        pays = sorted(r["flop"] for r in rows if r["device"].median < r["cpu"].median)
        loses = sorted(r["flop"] for r in rows if r["device"].median >= r["cpu"].median)
        if pays and loses and loses[-1] < pays[0]:
            evidence += (f" Measured here, the CPU is the faster up to {loses[-1] / 1e6:.1f} MFLOP and the device from "
                         f"{pays[0] / 1e6:.1f}: this machine's own gate lies between, "
                         f"{'as' if loses[-1] < op.FLOP_GATE <= pays[0] else 'other than'} the article's.")
        elif pays and loses:
            evidence += " Measured here, neither is the faster on one side of any size: FLOP alone make no gate."
        else:
            evidence += (f" Measured here, the {'device' if pays else 'CPU'} is the faster at every size, so this "
                         "machine has no use for a gate at 1e7.")
    else:
        slowest = max(rows, key=lambda r: r["cpu"].median)
        evidence += (f" The CPU path here takes {rows[0]['cpu']} on {rows[0]['projection']} and {slowest['cpu']} on "
                     f"{slowest['projection']}; the break-even with a GPU needs one.")
    return Finding("G11", "reproduced" if same and above == ARTICLE_DEVICE else "contradicted",
                   evidence + omitted(left_out), f"{figures} MFLOP", data=rows)


def fusion(lab: Lab, model: shapes.Inventory, precision: str = "int8") -> Finding:
    """q, k, v and gate, up one by one against fused, called from the host, with the CPU path beside: one layer."""
    groups = [[p for p in model.projections if p.name in names] for names in (("q", "k", "v"), ("gate", "up"))]
    rows, right = {}, {}
    for group in groups:
        parts = [random_strips(lab.rng(11, i), p.n, p.k, 32, precision) for i, p in enumerate(group)]
        fused = formats.fuse(parts)
        x = lab.rng(12).standard_normal((1, group[0].k), np.float32)
        products = {"cpu": [op.CpuGemm(s) for s in parts],
                    "separate": [op.HostGemm(op.GroupedGemm(lab.backend, s), 1) for s in parts],
                    "fused": [op.HostGemm(op.GroupedGemm(lab.backend, fused), 1)]}
        name = "+".join(p.name for p in group)
        case = _case(1, fused) | {"projections": name}
        reference = op.reference(x, fused)
        right[name] = all([_passes(lab, f"host_{how}", case, np.hstack([f(x) for f in each]), reference,
                                   CPU_BOUND if how == "cpu" else BOUND) for how, each in products.items()])
        if not (lab.timed and right[name]):
            continue
        rows[name] = measure.host_times({how: lambda each=each, x=x: [f(x) for f in each]
                                         for how, each in products.items()}, rounds=100, budget_s=3)
        for how, timing in rows[name].items():
            lab.time(KERNEL, f"host_{how}", case, timing, "warm", host=how == "cpu")
    if not lab.timed:
        return not_timed("G12", f"Fused and separate products {'are' if all(right.values()) else 'are not all'} within "
                         f"{BOUND:g} of float64 for {' and '.join(right)} of {model.name}; three calls become one. "
                         "Their cost needs a clock.")
    if not rows:
        return _none_right("G12")
    gain = {name: r["separate"].median / r["fused"].median for name, r in rows.items()}
    turned = [name for name, r in rows.items() if r["separate"].median > r["cpu"].median > r["fused"].median]
    words = "; ".join(f"{name}: CPU {r['cpu'].median:.0f}, separate {r['separate'].median:.0f}, "
                      f"fused {r['fused'].median:.0f} us" for name, r in rows.items())
    against_cpu = (f"a loss against the CPU becomes a gain for {', '.join(turned)}" if turned else
                   "on this machine separate calls are no loss against the CPU to begin with, or fusing does not make "
                   "up for it")
    left_out = [name for name, ok in right.items() if not ok]
    return Finding("G12", "reproduced" if len(turned) == len(rows) and not left_out else
                   "direction holds" if min(gain.values()) > 1.05 else "not reproduced",
                   f"{model.name}, one layer, M = 1, host memory to host memory. {words}. Fusing is "
                   f"{min(gain.values()):.2f} to {max(gain.values()):.2f} times as fast as separate calls; "
                   f"{against_cpu}. {_from_python(lab)}{omitted(left_out)}",
                   ", ".join(f"{name} {g:.2f}x" for name, g in gain.items()), data=rows)


# ---------------------------------------------------------------- what int8 activations cost (G08)

def activation_errors(lab: Lab, inputs: Inputs, precisions: Sequence[str] = PRECISIONS) -> list[dict]:
    """Both kernels on `inputs` against float64 on unrounded activations and on their own.

    Rows of {projection, codes, activations, arithmetic, total, relative errors}: `arithmetic` against float64 on the
    activations as the kernel gets them, `total` against float64 on the float activations (with int8 ones, what rounding
    them costs), both relative Frobenius; `differences` are the elementwise errors over the output's RMS.
    """
    rows = []
    for name, (w, x) in inputs.projections.items():
        for precision in precisions:
            strips = formats.quantize(w, precision)
            exact = op.reference(x, strips)
            codes, scales = formats.quantize_activations(x, strips.group)
            own = {"float": exact, "int8": op.reference_int8(codes, scales, strips)}
            case = _case(len(x), strips) | {"projection": name}
            for activations, given in (("float", [x]), ("int8", [codes, scales])):
                out = _multiply(op.GroupedGemm(lab.backend, strips, activations), given)
                arithmetic = lab.errors(KERNEL, VARIANTS[activations], case, out, own[activations], BOUND)
                total = stats.errors(out, exact)
                lab.record.measure(kernel=KERNEL, variant=VARIANTS[activations], case=case, unit="1",
                                   metric="relative_frobenius_to_float_activations", value=total.relative_frobenius)
                rows.append({"projection": name, "codes": precision, "activations": activations,
                             "arithmetic": arithmetic.relative_frobenius, "total": total.relative_frobenius,
                             "differences": ((out - exact) / np.sqrt(np.mean(exact**2))).ravel()})
    return rows


def perplexity(lab: Lab, model: smollm2.Model | None, rows: list[dict], tokens: int, context: int = 512) -> Finding:
    """Perplexity of SmolLM2 in float32, with Q8_0 weights and float activations, and with int8 activations too.

    The products run in PyTorch on dequantized codes: `rows` (from activation_errors) shows that the kernels compute the
    same within float32's rounding. tokens: how many tokens of prose are scored, in windows of `context`; 0 for none.
    """
    totals = {(r["activations"], r["projection"], r["codes"]): r["total"] for r in rows}
    ratios = [total / totals["float", projection, codes]
              for (activations, projection, codes), total in totals.items() if activations == "int8"]
    int8 = [r["total"] for r in rows if r["activations"] == "int8"]
    error = (f"On {len(int8)} products int8 activations cost {min(int8):.1e} to {max(int8):.1e} relative Frobenius, "
             f"{min(ratios):.0f} to {max(ratios):.0f} times the float kernel's whole error.")
    if model is None:
        return Finding("G08", "not testable here", error, missing=f"a language model: {smollm2.INSTALL}")
    if tokens == 0:
        return Finding("G08", "not testable here", error, missing="tokens to measure perplexity on: 0 were asked for")
    import torch
    quantized: dict[str, torch.Tensor] = {}

    def weights(name, w):
        if name not in quantized:
            quantized[name] = torch.from_numpy(formats.quantize(w.numpy(), "int8").dequantize())
        return quantized[name]

    last: list[torch.Tensor] = [torch.empty(0)] * 2  # an activation and its rounded form, which q, k and v share

    def rounded(x):
        if last[0] is not x:
            codes, scales = formats.quantize_activations(x.numpy())
            last[:] = x, torch.from_numpy(codes * np.repeat(scales, formats.BLOCK, axis=1))
        return last[1]

    paths = {"float32 weights": lambda name, x, w: x @ w.T,
             "Q8_0 weights, float activations": lambda name, x, w: x @ weights(name, w).T,
             "Q8_0 weights, int8 activations": lambda name, x, w: rounded(x) @ weights(name, w).T}
    text = model.tokenize(smollm2.prose())[:tokens]
    results = {name: model.perplexity(text, context, linear=linear) for name, linear in paths.items()}
    base = results["float32 weights"]
    table = {}
    case = {"tokens": int(base.nll.size), "context": context}
    for name, result in results.items():
        delta, error_of_delta = result.increase_over(base)
        table[name] = {"perplexity": result.value, "delta": delta, "standard error": error_of_delta}
        for metric, value in (("perplexity", result.value), ("perplexity_delta", delta),
                              ("perplexity_delta_standard_error", error_of_delta)):
            lab.record.measure(kernel="smollm2", variant=name, metric=metric, value=value, unit="1", case=case,
                               n=case["tokens"])
    floats, ints = (table[f"Q8_0 weights, {a} activations"] for a in ("float", "int8"))
    cost, cost_error = results["Q8_0 weights, int8 activations"].increase_over(
        results["Q8_0 weights, float activations"])
    clear = cost > 2 * cost_error
    near = clear and 1.5 <= 100 * ints["delta"] <= 6 and 0.095 <= 100 * floats["delta"] <= 0.38
    figures = ", ".join(f"{a} activations {100 * t['delta']:+.3f}% (standard error {100 * t['standard error']:.3f}%)"
                        for a, t in (("int8", ints), ("float", floats)))
    verdict = ("reproduced" if near else "direction holds" if clear else "contradicted" if cost < -2 * cost_error
               else "not testable here")
    return Finding(
        "G08", verdict,
        f"SmolLM2-135M on {base.nll.size} tokens of prose, perplexity {base.value:.3f} in float32; change with "
        f"Q8_0 weights: {figures}. {error} "
        f"Int8 activations cost {100 * cost:+.3f}% over float ones (standard error {100 * cost_error:.3f}%). "
        "The article's model and text are others.",
        f"{100 * ints['delta']:+.2f}% -> {100 * floats['delta']:+.2f}%", data=table,
        missing="enough tokens: the difference is within twice its standard error" if verdict == "not testable here"
        else None)


# ---------------------------------------------------------------- refusals (G13)

def refusals(lab: Lab) -> Finding:
    """K that is no multiple of the group goes to the CPU, precisions other than int8 and int4 are refused."""
    ragged = random_strips(lab.rng(13), 8, 100, 32)
    x = lab.rng(14).standard_normal((2, 100), np.float32)
    linear = op.Linear(ragged, lab.backend, gate=0)
    out = linear(x)
    route, = linear.routes
    error = lab.errors(KERNEL, "cpu_path", _case(2, ragged), out,
                       op.reference(x, ragged), CPU_BOUND).relative_frobenius
    good = random_strips(lab.rng(15), 8, 64)
    bad = {
        "precision 'int2'": lambda: formats.Strips(good.codes, good.scales, 8, 64, 32, "int2").check(),
        "K = 100 on the device": lambda: op.GroupedGemm(lab.backend, ragged),
        "x of float64": lambda: op.GroupedGemm(lab.backend, good)(lab.backend.array(np.ones((1, 64)))),
        "x of another width": lambda: op.GroupedGemm(lab.backend, good)(
            lab.backend.array(np.ones((1, 32), np.float32))),
        "x on the host": lambda: op.GroupedGemm(lab.backend, good)([[0.0] * 64]),
        "nsplit = 3 of 2 groups": lambda: op.GroupedGemm(lab.backend, good)(
            lab.backend.array(np.ones((1, 64), np.float32)), nsplit=3),
        "a NaN scale": lambda: formats.Strips(good.codes, np.full_like(good.scales, np.nan), 8, 64, 32, "int8").check(),
    }
    messages = {}
    for name, call in bad.items():
        try:
            call()
            messages[name] = None
        except (TypeError, ValueError) as refused:
            messages[name] = f"{type(refused).__name__}: {refused}"
    refused = all(messages.values())
    return Finding(
        "G13", "reproduced" if route.path == "cpu" and error <= CPU_BOUND and refused else "contradicted",
        f"K = 100 with groups of 32 goes to the CPU ({route.reason}), relative Frobenius {error:.1e}; "
        f"{sum(m is not None for m in messages.values())} of {len(messages)} kinds of bad input are refused before a "
        "launch.",
        f"CPU fallback {error:.0e}; {len(messages)} refusals", data=messages)
