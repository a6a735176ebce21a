"""Chrome traces of torch.profiler (Kineto): the events of its GPUs, and the spans that the program named."""

import json
from decimal import Decimal

from kernelbook.buckets.trace import COPY, KERNEL, SET, Activity, Gpu, Mark, Trace

FORMAT = "torch.profiler (Kineto) trace"
_KINDS = {"kernel": KERNEL, "gpu_memcpy": COPY, "memcpy": COPY, "gpu_memset": SET, "memset": SET}
_MARKS = {"user_annotation": False, "gpu_user_annotation": True}  # whether on a GPU


def read(text: str, source: str) -> Trace | None:
    """The trace in JSON `text`; None where it is JSON of another kind.

    Raises ValueError for JSON that is cut or damaged, a trace without GPU activity, and a GPU event without a name or
    with a start or duration that is no number or negative.
    """
    try:
        # Times are microseconds since long ago: as floats they would be off by a quarter of one.
        content = json.loads(text, parse_float=Decimal)
    except ValueError as error:
        raise ValueError(f"{source}: JSON that is cut or damaged: {error}") from None
    events = content.get("traceEvents") if isinstance(content, dict) else content
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        return None
    activities, marks = [], []
    for number, event in enumerate(events):
        category = str(event.get("cat", "")).lower()
        if event.get("ph") != "X" or category not in _KINDS and category not in _MARKS:
            continue
        where = f"{source}, event {number}"
        name = event.get("name")
        if not isinstance(name, str):
            raise ValueError(f"{where}: a {category} event without a name")
        start, duration = (_ns(event, key, where) for key in ("ts", "dur"))
        if duration < 0:
            raise ValueError(f"{where} ({name}): its duration is {event['dur']} us")
        arguments = event.get("args") or {}
        device = arguments.get("device", event.get("pid"))  # the process of an event on a GPU is the GPU
        if category in _KINDS:
            kind = _KINDS[category]
            activities.append(Activity("Memset" if kind == SET else name, duration, 1, start, device,
                                       arguments.get("stream", event.get("tid")), kind))
        else:
            marks.append(Mark(name, start, start + duration, device if _MARKS[category] else None))
    if not activities:
        categories = sorted({str(event["cat"]) for event in events if "cat" in event})
        raise ValueError(f"{source}: a Chrome trace of {len(events)} events, none of them a kernel or copy on a GPU "
                         f"(categories: {', '.join(categories) or 'none'}); profile with ProfilerActivity.CUDA")
    properties = content.get("deviceProperties", []) if isinstance(content, dict) else []
    gpus = {gpu["id"]: Gpu(gpu.get("name", "GPU"), gpu.get("numSms")) for gpu in properties if "id" in gpu}
    return Trace(source, FORMAT, tuple(activities), tuple(marks), gpus)


def _ns(event: dict, key: str, where: str) -> int:
    """A time of an event, in the trace's microseconds, as nanoseconds."""
    value = event.get(key)
    if isinstance(value, bool) or not isinstance(value, int | Decimal):  # NaN and Infinity come as floats
        raise ValueError(f"{where} ({event.get('name')}): {key!r} is {value!r}; expected microseconds")
    return round(value * 1000)
