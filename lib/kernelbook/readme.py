"""The tables and the picture of the README pages, and the table by which products are dispatched, drawn from the
committed records of real devices."""

from kernelbook import plots, records, tables
from kernelbook.experiments import gemm_ladder
from kernelbook.measure import Timing
from kernelbook.ops import gemm_dispatch
from kernelbook.tables import RESULTS, pivot, select, table

DEVICE = "nvidia-h200"
PICTURE = "grouped_gemm.svg"
PAGES = ("README.md", "kernels/README.md", "results/README.md")

NAMES = {"cublas_bf16": "cuBLAS bf16", "tinygemm_int4": "tinygemm W4", "humming_int8": "Humming W8",
         "humming_int4": "Humming W4", "1_int8_activations": "1 int8 activations",
         "2_float_activations": "2 float activations"}
"""Variants of the grouped GEMM as the tables call them, peers first."""


def _digits(value: float) -> str:
    """Three digits, or all of those before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _shape(m: dict) -> str:
    return f"{m['case']['N']} x {m['case']['K']}"


def _sweep(results: dict, **case) -> list[dict]:
    """Cold times of the sweep over M, peers first; the other experiments say which they are and stay out."""
    found = select(results[DEVICE]["1_grouped_gemm"], metric="time_us", cache="cold", kernel="grouped_gemm", case=case)
    order = list(NAMES)
    return sorted((m for m in found if m["variant"] in order and "experiment" not in m["case"]
                   and "nsplit" not in m["case"]), key=lambda m: order.index(m["variant"]))


@table("ceilings")
def ceilings(results: dict) -> str:
    found = select(results[DEVICE]["0_machine"], kernel="ceilings")
    return pivot((m for m in found if m["unit"] in ("GB/s", "TFLOP/s", "us")),
                 row=lambda m: m["variant"].replace("_", " "), column=lambda m: "measured",
                 cell=lambda m: f"{m['value']:,.4g} {m['unit']}", corner="ceiling")


@table("decode")
def decode(results: dict) -> str:
    return pivot(_sweep(results, M=1, codes="int8"), row=_shape, column=lambda m: NAMES[m["variant"]],
                 cell=lambda m: f"{m['value']:.1f}", corner="M = 1, us, cold")


@table("prefill")
def prefill(results: dict) -> str:
    return pivot(_sweep(results, M=512, codes="int8"), row=_shape, column=lambda m: NAMES[m["variant"]],
                 cell=lambda m: f"{m['value']:,.0f}", corner="M = 512, us, cold")


def _beside_peers(ratios: list[float], of: str) -> str:
    """The end of a sentence on times of ours over those of the best peer."""
    return (f"takes {min(ratios):.2g} to {max(ratios):.2g} times the time of the best peer, and is behind it on "
            f"{sum(r > 1 for r in ratios)} of {len(ratios)} {of}.")


@table("standing")
def standing(results: dict) -> str:
    """In words, how this collection's fastest kernel stands against the best peer at M = 1 and 512."""
    sentences = []
    for m in (1, 512):
        ratios = []
        sweep = _sweep(results, M=m, codes="int8")
        for shape in dict.fromkeys(map(_shape, sweep)):
            ours, peers = ([e["value"] for e in sweep if _shape(e) == shape and e["variant"][0].isdigit() is mine]
                           for mine in (True, False))
            ratios.append(min(ours) / min(peers))
        sentences.append(f"At M = {m} the faster of the two kernels {_beside_peers(ratios, 'shapes')}")
    return " ".join(sentences) + "\n"


@table("kernels")
def kernels(results: dict) -> str:
    """How much of the read ceiling each kernel reaches, over M, on one large weight matrix."""
    record = results[DEVICE]["1_grouped_gemm"]
    found = [m for m in select(record, metric="fraction_of_read", cache="cold", kernel="grouped_gemm",
                               case={"N": 17408, "codes": "int8"})
             if m["variant"][0].isdigit() and "experiment" not in m["case"] and m["case"]["M"] in (1, 4, 16)]
    return pivot(found, row=lambda m: NAMES[m["variant"]], column=lambda m: f"M = {m['case']['M']}",
                 cell=lambda m: f"{m['value']:.0%}", corner="of the read ceiling")


NO_RECORD = "This device has no record of it yet.\n"
LADDER_ROWS = (1, 8, 32, 64, 512, 2048)
LADDER_SHAPES = ("17408 x 5120", "5120 x 17408", "5120 x 6144", "2048 x 2048")


def _ladder(results: dict) -> list[gemm_ladder.Point]:
    return gemm_ladder.points(results[DEVICE]["1_grouped_gemm"])


@table("ladder")
def ladder(results: dict) -> str:
    """Of a few shapes, the time of our fastest design, and over that of the fastest peer."""
    return _beside(results, lambda row: row.ours.shape in LADDER_SHAPES)


@table("ladder_all")
def ladder_all(results: dict) -> str:
    """The same of every shape."""
    return _beside(results, lambda row: True)


def _beside(results: dict, shown) -> str:
    rows = [row for row in gemm_ladder.standings(_ladder(results)) if row.ours.m in LADDER_ROWS and shown(row)]
    if not rows:
        return NO_RECORD
    return pivot(rows, row=lambda row: f"{row.ours.shape}, {row.ours.codes}", column=lambda row: f"M = {row.ours.m}",
                 cell=lambda row: f"{_digits(row.ours.us)} us, {row.ratio:.2f}", corner="time, of the best peer's")


@table("ladder_standing")
def ladder_standing(results: dict) -> str:
    """In words, where the fastest design is behind the fastest peer."""
    found = _ladder(results)
    return gemm_ladder.against_peers(found, named=3) + "\n" if found else ""


@table("goals")
def goals(results: dict) -> str:
    """What the ladder was built to reach, met or not."""
    found = [goal.row() for goal in gemm_ladder.goals_of_record(results[DEVICE]["1_grouped_gemm"])]
    if not found:
        return NO_RECORD
    lines = [[*found[0]], ["---"] * len(found[0]), *(row.values() for row in found)]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


@table("rungs")
def rungs(results: dict) -> str:
    """Each design's speed on one large weight matrix, 8-bit codes."""
    found = [p for p in _ladder(results) if (p.n, p.k, p.codes) == (17408, 5120, "int8") and p.m in LADDER_ROWS]
    if not found:
        return NO_RECORD
    return pivot(found, row=lambda p: p.label, column=lambda p: f"M = {p.m}",
                 cell=lambda p: p.speed, corner="17408 x 5120, int8")


ATTENTION = {"2_decode_int8": "2 INT8 P V", "2_decode_bf16": "2 BF16 P V", "3_prefill_int8": "3 INT8 P V",
             "3_prefill_bf16": "3 BF16 P V", "6_prefill_wgmma_int8": "6 wgmma", "6_prefill_wgmma_int8_64":
             "6 wgmma, a scale for 64", "sdpa_bf16": "SDPA bf16", "fa3_bf16": "FA3 bf16", "fa3_fp8": "FA3 fp8",
             "flashinfer_bf16": "FlashInfer bf16", "sage_int8": "SageAttention"}
"""Variants of attention as the tables call them, ours first; peers read caches of 16 bits, fp8 of 8."""


def _attention(results: dict, **case) -> list[dict]:
    """Times beside peers: decode cold, prefill warm."""
    found = select(results[DEVICE]["3_int8_pv"], metric="time_us", kernel="int8_pv",
                   case={"experiment": "peers"} | case)
    order = list(ATTENTION)
    return sorted((m for m in found if m["value"] is not None and m["variant"] in order
                   and m["cache"] == ("cold" if m["case"]["queries"] == 1 else "warm")),
                  key=lambda m: order.index(m["variant"]))


def _attention_case(m: dict) -> str:
    c = m["case"]
    what = "decode" if c["queries"] == 1 else f"{c['queries']} queries"
    return f"{what}, {c['history'] // 1024}K, batch {c['batch']}, {c['heads']}/{c['kv_heads']} x {c['head_dim']}"


def _attention_table(found: list[dict], decode: bool) -> str:
    return pivot((m for m in found if (m["case"]["queries"] == 1) is decode), row=_attention_case,
                 column=lambda m: ATTENTION[m["variant"]], cell=lambda m: _digits(m["value"]), corner="us")


@table("attention_decode")
def attention_decode(results: dict) -> str:
    return _attention_table(_attention(results), decode=True)


@table("attention_prefill")
def attention_prefill(results: dict) -> str:
    return _attention_table(_attention(results), decode=False)


@table("attention_standing")
def attention_standing(results: dict) -> str:
    """In words, how our fastest kernel on INT8 stands against the best peer, decode and prefill apart."""
    sentences = []
    for what, decode in (("decode", True), ("prefill", False)):
        cases: dict[str, list[dict]] = {}
        for m in _attention(results):
            if (m["case"]["queries"] == 1) is decode:
                cases.setdefault(_attention_case(m), []).append(m)
        ratios = [min(m["value"] for m in case if "int8" in m["variant"] and m["variant"][0].isdigit())
                  / min(m["value"] for m in case if not m["variant"][0].isdigit()) for case in cases.values()]
        sentences.append(f"In {what} the fastest of our INT8 kernels {_beside_peers(ratios, 'cases')}")
    return " ".join(sentences) + "\n"


@table("attention")
def attention(results: dict) -> str:
    """Our kernels alone, on the heads that most figures are about."""
    found = [m for m in _attention(results, heads=24, kv_heads=4, head_dim=128) if m["variant"][0].isdigit()]
    return pivot(found, row=lambda m: ATTENTION[m["variant"]],
                 column=lambda m: _attention_case(m).removesuffix(", 24/4 x 128"),
                 cell=lambda m: _digits(m["value"]), corner="us")


@table("gain")
def gain(results: dict) -> str:
    """BF16 P V's time over INT8's, in the same decode kernel, cold."""
    found = select(results[DEVICE]["3_int8_pv"], metric="time_us", cache="cold", case={"experiment": "decode speed"})
    times = {(m["variant"], _attention_setting(m), m["case"]["history"]): m["value"] for m in found if m["value"]}
    ratios = [m | {"value": times["2_decode_bf16", _attention_setting(m), m["case"]["history"]] / m["value"]}
              for m in found if m["variant"] == "2_decode_int8" and m["value"]]
    return pivot(ratios, row=_attention_setting, column=lambda m: f"{m['case']['history'] // 1024}K",
                 cell=lambda m: f"{m['value']:.2f}x", corner="BF16 / INT8 P V")


def _attention_setting(m: dict) -> str:
    c = m["case"]
    return f"batch {c['batch']}, {c['heads']}/{c['kv_heads']} x {c['head_dim']}"


BREAKDOWN = "2_prefill_breakdown"
ENGINES = {"article": "the article's design", "tiled_fp32": "A, FP32", "int8_dot": "B, dp4a",
           "int8_matrix": "B, INT8 matrix", "tensor_cores": "C, mma", "wgmma": "C, wgmma",
           "packed_wgmma": "C, wgmma, panels", "llama.cpp": "llama.cpp"}
"""Designs of a whole pass as the tables call them."""
PRODUCTS = {"1_tiled_fp32": "A, FP32", "2_int8_dot": "B, dp4a", "3_int8_matrix": "B, INT8 matrix",
            "4_tensor_cores": "C, mma", "5_wgmma": "C, wgmma", "7_packed_wgmma": "C, wgmma, panels",
            "cublas_bf16": "cuBLAS bf16", "humming_int4": "Humming W4"}
"""Variants of prefill_gemm as the tables call them, peers last."""


@table("passes")
def passes(results: dict) -> str:
    """A whole pass in buckets, a row a design: what the profiler saw, which adds up to the wall time."""
    record = results[DEVICE].get(BREAKDOWN)
    if record is None:
        return NO_RECORD
    found = [m for m in select(record, metric="time_us", kernel="pass") if m["value"] and "bucket" in m["case"]]
    order = list(ENGINES)
    return pivot(sorted((m for m in found if m["variant"] in order), key=lambda m: order.index(m["variant"])),
                 row=lambda m: ENGINES[m["variant"]], column=lambda m: m["case"]["bucket"],
                 cell=lambda m: _digits(m["value"] / 1e3), corner="ms")


@table("products")
def products(results: dict) -> str:
    """TFLOP/s of the candidates and peers on the model's projections at M = 512, cold."""
    record = results[DEVICE].get(BREAKDOWN)
    if record is None:
        return NO_RECORD
    found = select(record, metric="throughput_tflops", kernel="prefill_gemm", cache="cold", case={"M": 512})
    order = list(PRODUCTS)
    return pivot(sorted((m for m in found if m["variant"] in order), key=lambda m: order.index(m["variant"])),
                 row=_shape, column=lambda m: PRODUCTS[m["variant"]], cell=lambda m: f"{m['value']:,.0f}",
                 corner="M = 512, TFLOP/s")


@table("verdicts")
def verdicts(results: dict) -> str:
    lines = ["| claim | verdict | measured |", "| --- | --- | --- |"]
    for device, notebooks in results.items():
        for record in notebooks.values():
            for v in record["verdicts"] if device == DEVICE else ():
                figure = (v["measured"] or v["missing"]).replace("|", "\\|")
                lines.append(f"| {v['claim']} | {v['verdict']} | {figure} |")
    return "\n".join(lines) + "\n"


def picture(results: dict) -> str:
    """Time against M on the shapes of the sweep, as an SVG file of its own."""
    rows = [{"projection": "", "N": m["case"]["N"], "K": m["case"]["K"], "M": m["case"]["M"], "codes": "int8",
             "variant": m["variant"], "cache": "cold", "timing": Timing(m["value"], m["p10"], m["p90"], m["n"])}
            for m in _sweep(results, codes="int8")]
    return plots.standalone(plots.row_sweep(rows))


def update() -> bool:
    """Redraw the tables of PAGES, the picture and the table of `gemm_dispatch` from results/; whether that changed
    anything."""
    results = tables.load()
    changed = any([tables.update(tables.ROOT / page, results) for page in PAGES])
    for path, text in ((RESULTS / DEVICE / PICTURE, picture(results)), (gemm_dispatch.TABLE, choices(results))):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            records.write(path, text.encode())
            changed = True
    return changed


def choices(results: dict) -> str:
    """The text of gemm_dispatch.TABLE."""
    return gemm_dispatch.text(notebooks["1_grouped_gemm"] for notebooks in results.values()
                              if "1_grouped_gemm" in notebooks)
