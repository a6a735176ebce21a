"""Breakdowns and comparisons as plain aligned text."""

from collections.abc import Iterable, Sequence

from kernelbook.buckets.breakdown import Breakdown, Comparison
from kernelbook.buckets.predictions import Launches

LISTED = 12  # unbucketed kernels shown; JSON has them all


def text(breakdown: Breakdown) -> str:
    """One GPU's breakdown: what it rests on, a line a bucket, the closure, and the kernels that no rule took."""
    b = breakdown
    gpu = "GPUs together" if b.device is None else f"GPU {b.device}"
    if b.gpu:
        gpu += f" ({b.gpu.name}{f', {b.gpu.multiprocessors} multiprocessors' if b.gpu.multiprocessors else ''})"
    whole = b.wall_ms if b.wall_ms is not None else b.busy_ms

    def line(name: str, time: float, plain: float | None = None, launches: float | None = None) -> list[str]:
        return [name, f"{time:.3f}", f"{100 * time / whole:.1f}%" if whole else "",
                "" if plain is None else f"{plain:.3f}", "" if launches is None else f"{launches:g}"]

    rows = [line(x.name, x.time_ms, x.sum_ms, x.launches) for x in b.buckets]
    rows.append(line("unbucketed", b.unbucketed.time_ms, b.unbucketed.sum_ms, b.unbucketed.launches))
    if b.timeline:
        rows.append(line("overlap", 0 - b.overlap_ms))
    rows.append(["idle", "unknown", "", "", ""] if b.idle_ms is None else line("idle", b.idle_ms))
    rows.append(line("all kernels" if b.wall_ms is None else "wall", whole, b.sum_ms))
    lines = [f"{b.source}: {b.format}, {gpu}", f"passes: {b.passes.count}, {b.passes.how}", "",
             table(["bucket", "ms a pass", "share", "plain sum", "launches"], rows)]
    closure = {True: "closes", False: "DOES NOT CLOSE", None: "not checked: no timeline, idle is what kernels leave"}
    if b.wall_ms is not None:
        lines.append(f"parts - wall: {b.residual_ms:.3f} ms, {closure[b.closes]}")
    if b.unprofiled_ms is not None:
        lines.append(f"without the profiler a pass takes {b.unprofiled_ms:.3f} ms")
    if b.unbucketed.kernels:
        lines += ["", "unbucketed, ms a pass:"]
        lines += [f"  {k.sum_ms:9.3f}  {k.launches:g} x {k.name}" for k in b.unbucketed.kernels[:LISTED]]
        rest = b.unbucketed.kernels[LISTED:]
        if rest:
            lines.append(f"  {sum(kernel.sum_ms for kernel in rest):9.3f}  {len(rest)} more names")
    lines += [f"limit: {limit}" for limit in b.limits]
    return "\n".join(lines) + "\n"


def comparison_text(lines: Iterable[Comparison], a: str = "a", b: str = "b") -> str:
    """Two engines side by side."""
    return table(["ms a pass", a, b, "ratio", "share of the gap"],
                 [[c.name, f"{c.a:.3f}", f"{c.b:.3f}", "" if c.ratio is None else f"{c.ratio:.2f}",
                   "" if c.share is None else f"{100 * c.share:.1f}%"] for c in lines])


def launches_text(lines: Iterable[Launches]) -> str:
    """Predicted beside counted launches."""
    verdict = {True: "", False: "differs", None: "names lack arguments"}
    rows = [[x.expected.what, str(x.expected.launches), "" if x.counted is None else f"{x.counted:g}",
             verdict[x.agrees], x.expected.why] for x in lines]
    return table(["launches a pass", "predicted", "counted", "", "because"], rows, left=(0, 3, 4))


def table(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Rows under a header, in columns as wide as they need; those not in `left` end flush right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row):
        return "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])
