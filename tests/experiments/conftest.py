"""What the tests of experiments share: a record's environment, and times that are made up."""

import pytest

from kernelbook import measure, records
from kernelbook.measure import Timing


@pytest.fixture(scope="module")
def environment(simulator):
    return records.environment(simulator)


@pytest.fixture
def pace():
    """Microseconds of contenders by name or, where names are tuples, by their first part; 10 for others; a list gives
    one after the other."""
    return {}


@pytest.fixture
def made_up_times(monkeypatch, pace):
    """measure.device_times runs every call and gives the times of `pace`, one percent either way."""
    def times(contenders, **_):
        found = {}
        for name, calls in contenders.items():
            for call in calls:
                call()
            median = pace.get(name, pace.get(name[0], 10))
            median = float(median.pop(0) if isinstance(median, list) else median)
            found[name] = Timing(median, median * 0.99, median * 1.01, 9)
        return found
    monkeypatch.setattr(measure, "device_times", times)
