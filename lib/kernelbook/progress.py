"""How far a batch is: bars on a terminal, a line for each step elsewhere, and the time that is left."""

import sys
import time
from statistics import mean

from tqdm import tqdm

from kernelbook import notebooks
from kernelbook.launch import Run


class Progress:
    """Shown while runs go on; knows of them what their folders say, wherever they run.

    runs: all that are to be done. durations: seconds that notebooks have taken before, by name.
    """

    def __init__(self, runs: list[Run], slots: int, durations: dict[str, list[float]] | None = None):
        self.total, self.slots = len(runs), slots
        self.waiting = list(runs)
        self.running: dict[Run, float] = {}  # with the time of its start
        self.durations = durations or {}
        self.cells = {path.stem: sum(cell.cell_type == "code" for cell in notebooks.read(path).cells)
                      for path in {run.job.notebook for run in runs}}
        self.bar = self._bar(self.total, "run", "{n_fmt} of {total_fmt} runs|{bar}| {elapsed}{postfix}")
        self.bars: dict[Run, tqdm] = {}

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_):
        for bar in (*self.bars.values(), self.bar):
            bar.close()

    def start(self, run: Run) -> None:
        self.waiting.remove(run)
        self.running[run] = time.monotonic()
        cells = self.cells[run.job.name]
        if self.bar.disable:
            self._say(f"{run.label}: started ({self.total - len(self.waiting)} of {self.total}, {cells} cells)")
        else:
            self.bars[run] = self._bar(cells, "cell", run.label.replace("{", "{{").replace("}", "}}")
                                       + " {percentage:3.0f}%|{bar}| {elapsed}{postfix}")
        self.update()

    def update(self) -> None:
        """Draw the bars anew, from the state of the folders."""
        for run, bar in self.bars.items():
            entry = run.entry()
            bar.n = min(self._done(entry), bar.total)
            left = self._expected(run, entry)
            bar.set_postfix_str(f"cell {entry['cell']} of {entry['cells']}{_about(left)}" if entry.get("cells")
                                else entry["status"])
        if self.bars:
            self.bar.set_postfix_str(_about(self.left()).removeprefix(", "))

    def end(self, run: Run, entry: dict, again: bool) -> None:
        """again: whether the run is tried once more."""
        del self.running[run]
        if run in self.bars:
            self.bars.pop(run).close()
        if entry["status"] == "passed":
            self.durations.setdefault(run.job.name, []).append(entry["seconds"])
        if again:
            self.waiting.append(run)
        else:
            self.bar.update()
        reason = f": {entry['reason']}" if entry.get("reason") else ""
        left = self.left()
        self._say(f"{run.label}: {entry['status']} after {entry.get('seconds', 0):.0f} s{reason}"
                  f"{'; tried again' if again else ''}{_about(left) if self.waiting else ''}")

    def left(self) -> float | None:
        """Seconds until all has ended, as far as earlier runs and cells let one guess; None where they do not."""
        left = [self._expected(run, run.entry()) for run in self.running]
        left += [self._usual(run) for run in self.waiting]
        if not left or None in left:
            return None
        return max(max(left), sum(left) / self.slots)

    def _expected(self, run: Run, entry: dict) -> float | None:
        """Seconds that a running run still takes."""
        elapsed, usual = time.monotonic() - self.running[run], self._usual(run)
        if usual is None and self._done(entry):
            usual = elapsed / self._done(entry) * entry["cells"]
        return None if usual is None else max(usual - elapsed, 0)

    def _usual(self, run: Run) -> float | None:
        """Seconds that such a run takes: as its notebook's others did, else by cells as other notebooks' did."""
        if seconds := self.durations.get(run.job.name):
            return mean(seconds)
        known = [mean(seconds) / self.cells[name] for name, seconds in self.durations.items()
                 if name in self.cells]
        return mean(known) * self.cells[run.job.name] if known else None

    @staticmethod
    def _done(entry: dict) -> int:
        return max(entry.get("cell", 1) - 1, 0)

    def _bar(self, total: int, unit: str, layout: str) -> tqdm:
        return tqdm(total=total, unit=unit, disable=not sys.stderr.isatty(), bar_format=layout, dynamic_ncols=True,
                    leave=unit == "run")

    def _say(self, line: str) -> None:
        if self.bar.disable:
            print(line, file=sys.stderr, flush=True)
        else:
            self.bar.write(line, file=sys.stderr)


def _about(seconds: float | None) -> str:
    """The time left, in the words of the bars."""
    if seconds is None:
        return ""
    minutes, seconds = divmod(round(seconds), 60)
    return f", about {f'{minutes // 60} h ' if minutes >= 60 else ''}{minutes % 60}:{seconds:02} left"
