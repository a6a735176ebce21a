"""Where the time of a pass goes: a trace of any profiler, or a live one, taken apart into buckets of kernels.

    trace = buckets.read("report.sqlite")             # or buckets.profile(one_pass, passes=3), live
    for part in buckets.analyze(trace, buckets.rules()):
        print(buckets.text(part))

`read` takes what Nsight Systems, Nsight Compute, torch.profiler and rocprof write (`FORMATS`). `rules` are an ordered
list in a file that a user can edit. `analyze` counts passes and gives, for each GPU, a `Breakdown` whose parts add up
to the wall time; `side_by_side` compares two. `predictions` holds the launches that a model's shapes predict, `article`
the tables of the prefill_breakdown article. From the shell: `python -m kernelbook buckets FILE...`.
"""

from kernelbook.buckets.breakdown import Breakdown, Bucket, Comparison, amdahl, analyze, compare, side_by_side
from kernelbook.buckets.live import profile
from kernelbook.buckets.passes import Passes
from kernelbook.buckets.reading import FORMATS, read
from kernelbook.buckets.rendering import comparison_text, launches_text, text
from kernelbook.buckets.rules import Rules
from kernelbook.buckets.rules import load as rules
from kernelbook.buckets.trace import Activity, Gpu, Mark, Trace

__all__ = ["FORMATS", "Activity", "Breakdown", "Bucket", "Comparison", "Gpu", "Mark", "Passes", "Rules", "Trace",
           "amdahl", "analyze", "compare", "comparison_text", "launches_text", "profile", "read", "rules",
           "side_by_side", "text"]
