"""The command `python -m kernelbook buckets`: its text or JSON on standard output, warnings on standard error."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from kernelbook import shapes
from kernelbook.buckets import predictions, rendering
from kernelbook.buckets.breakdown import Breakdown, analyze, side_by_side
from kernelbook.buckets.predictions import Launches
from kernelbook.buckets.reading import read
from kernelbook.buckets.rules import load

MODELS = {model.name: model for model in (shapes.QWEN3_5_27B, shapes.QWEN3_VL_2B, shapes.SMOLLM2_135M)}


def run(files: Sequence[Path], *, rules: Path | None = None, passes: Sequence[str] = (), walls_ms: Sequence[float] = (),
        model: str | None = None, tokens: int = 512, multiprocessors: int | None = None, as_json: bool = False) -> int:
    """Print the breakdown of every GPU of every file, two files also side by side. Returns 1 where one does not close.

    Everything is read and worked out before anything is printed. Raises what `read`, `load` and `analyze` raise, and
    ValueError where options are neither one for all files nor one for each.
    """
    known = load(rules)
    options = zip(files, _each("--passes", passes, files), _each("--wall-ms", walls_ms, files), strict=True)
    parts = [analyze(read(file), known, how, wall) for file, how, wall in options]
    every = [part for group in parts for part in group]
    launches = [_launches(part, model, tokens, multiprocessors) if model else [] for part in every]
    pair = side_by_side(parts[0][0], parts[1][0]) if [len(group) for group in parts] == [1, 1] else []
    if as_json:
        print(json.dumps({
            "breakdowns": [part.to_dict() | {"launches": [_plain(line) for line in lines]}
                           for part, lines in zip(every, launches, strict=True)],
            "side_by_side": [asdict(line) for line in pair],
        }, indent=1, allow_nan=False))
    else:
        shown = [rendering.text(part) + (f"\n{rendering.launches_text(lines)}\n" if lines else "")
                 for part, lines in zip(every, launches, strict=True)]
        if pair:
            shown.append(rendering.comparison_text(pair, *(file.name for file in files)) + "\n")
        print("\n".join(shown), end="")
    if len(files) == 2 and not pair:
        print("warning: not side by side, which takes one GPU in each file", file=sys.stderr)
    for part in every:
        gpu = "" if part.device is None else f", GPU {part.device}"
        for warning in part.warnings:
            print(f"warning: {part.source}{gpu}: {warning}", file=sys.stderr)
    return 1 if any(part.closes is False for part in every) else 0


def _each(option: str, values: Sequence, files: Sequence[Path]) -> list:
    """One value for each file, from none, one or as many."""
    if len(values) not in (0, 1, len(files)):
        raise ValueError(f"{len(values)} times {option} for {len(files)} files; give it once for all or once for each")
    return list(values) if len(values) == len(files) else [values[0] if values else None] * len(files)


def _launches(part: Breakdown, model: str, tokens: int, multiprocessors: int | None) -> list[Launches]:
    if model not in MODELS:
        raise ValueError(f"no model {model!r}; there are: {', '.join(MODELS)}")
    count = multiprocessors or (part.gpu and part.gpu.multiprocessors)
    if count is None:
        raise ValueError(f"{part.source} does not say how many multiprocessors the GPU has; give --multiprocessors")
    return predictions.beside(part, predictions.llama_cpp(MODELS[model], count, tokens))


def _plain(line: Launches) -> dict:
    return {"what": line.expected.what, "predicted": line.expected.launches, "counted": line.counted,
            "agrees": line.agrees, "because": line.expected.why}
