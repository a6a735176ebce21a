"""What changed between two runs of one notebook: speeds beyond their noise, statuses, verdicts, parameters."""

import json
from dataclasses import dataclass, field

from kernelbook import records


@dataclass(frozen=True)
class Change:
    """A measurement of both runs. speedup: how many times as fast it became, above 1 for faster."""

    before: dict
    after: dict
    speedup: float


@dataclass(frozen=True)
class Comparison:
    """Two records of one notebook, set side by side.

    faster, slower: speeds whose ranges p10 .. p90 do not overlap, the largest change first. within: how many do.
    no_spread: how many cannot be judged, having no range. statuses: (before, after) of measurements that ended
    otherwise. verdicts: (before, after) where the verdict on a claim is another one. parameters: name to (before,
    after), None where a run did not have it. only_before, only_after: measurements that one run alone has.
    """

    faster: list[Change] = field(default_factory=list)
    slower: list[Change] = field(default_factory=list)
    within: int = 0
    no_spread: int = 0
    statuses: list[tuple[dict, dict]] = field(default_factory=list)
    verdicts: list[tuple[dict, dict]] = field(default_factory=list)
    parameters: dict[str, tuple] = field(default_factory=dict)
    only_before: int = 0
    only_after: int = 0


def compare(before: dict, after: dict) -> Comparison:
    """Compare two records. Of the figures that follow from one timing, only the time counts.

    Raises ValueError for records of two notebooks.
    """
    if before["notebook"] != after["notebook"]:
        raise ValueError(f"a run of {before['notebook']} cannot be compared with one of {after['notebook']}")
    old, new = ({_key(m): m for m in record["measurements"]} for record in (before, after))
    faster, slower, statuses = [], [], []
    within = no_spread = 0
    timed = {key[:-1] for key, m in old.items() if m["metric"] == "time_us"}
    for key in [key for key in old if key in new]:
        a, b = old[key], new[key]
        if a["status"] != b["status"]:
            statuses.append((a, b))
        derived = key[:-1] in timed and a["metric"] != "time_us"
        if derived or not records.is_performance(a["metric"]) or a["value"] is None or b["value"] is None:
            continue
        if None in (a["p10"], a["p90"], b["p10"], b["p90"]):
            no_spread += 1
        elif a["p10"] <= b["p90"] and b["p10"] <= a["p90"]:
            within += 1
        else:
            lower_is_faster = a["metric"].startswith("time")
            change = Change(a, b, _ratio(*((a, b) if lower_is_faster else (b, a))))
            (faster if change.speedup > 1 else slower).append(change)
    faster.sort(key=lambda change: -change.speedup)
    slower.sort(key=lambda change: change.speedup)
    judged = {v["claim"]: v for v in before["verdicts"]}
    names = [*before["parameters"], *(name for name in after["parameters"] if name not in before["parameters"])]
    values = {name: (before["parameters"].get(name), after["parameters"].get(name)) for name in names}
    return Comparison(
        faster, slower, within, no_spread, statuses,
        verdicts=[(judged[v["claim"]], v) for v in after["verdicts"]
                  if v["claim"] in judged and judged[v["claim"]]["verdict"] != v["verdict"]],
        parameters={name: (a, b) for name, (a, b) in values.items() if a != b},
        only_before=len(old.keys() - new.keys()), only_after=len(new.keys() - old.keys()))


def _key(m: dict) -> tuple:
    return m["kernel"], m["variant"], json.dumps(m["case"], sort_keys=True), m["cache"], m["metric"]


def _ratio(of: dict, to: dict) -> float:
    return of["value"] / to["value"] if to["value"] else float("inf")
