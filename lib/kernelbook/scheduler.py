"""Many runs: where they run, how many at a time, and which are tried again."""

import contextlib
import signal
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from queue import SimpleQueue
from typing import Protocol

from kernelbook import launch, processes
from kernelbook.launch import Device, Run
from kernelbook.progress import Progress


class Launcher(Protocol):
    """Where runs run."""

    def machine(self) -> dict:
        """`launch.machine()` where runs run."""

    def slots(self) -> int:
        """How many may run at a time."""

    def submit(self, run: Run) -> Future:
        """Start a run; its future gives its entry, as `launch.perform` returns it.

        It raises LostRun where the run has lost its process without having failed by itself.
        """

    def stop(self) -> None:
        """Tell all that is running to end, keeping its output."""


LOST_TRIES = 3
"""How often a run is tried whose process is lost, which says nothing of the run."""


class LostRun(Exception):
    """The process that watched a run has ended before it; the message says why."""


class Local:
    """Runs on this machine: one at a time on each of the devices, None standing for the simulator."""

    @classmethod
    def of(cls, workers: int | None = None) -> "Local":
        """One run at a time on each GPU (on the first `workers` of them), or `workers` (one) in the simulator.

        GPUs of another model than the first are left alone, since a run's key names the model.
        Raises ValueError for more workers than GPUs, or none.
        """
        if workers is not None and workers < 1:
            raise ValueError(f"{workers} workers; expected 1 or more")
        devices = launch.devices()
        devices = [device for device in devices if device.model == devices[0].model]
        if devices and (workers or 1) > len(devices):
            raise ValueError(f"{workers} workers for {len(devices)} {devices[0].model}: timed runs never share a GPU")
        return cls(devices[:workers] if devices else [None] * (workers or 1))

    def __init__(self, devices: list[Device | None]):
        self._count = len(devices)
        self._free: SimpleQueue[Device | None] = SimpleQueue()
        for device in devices:
            self._free.put(device)
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(len(devices))  # threads only wait for processes

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, *_):
        self.stop()
        self._pool.shutdown()

    def machine(self) -> dict:
        return launch.machine()

    def slots(self) -> int:
        return self._count

    def submit(self, run: Run) -> Future:
        return self._pool.submit(self._perform, run)

    def stop(self) -> None:
        self._stop.set()

    def _perform(self, run: Run) -> dict:
        device = self._free.get()
        try:
            return launch.perform(run, device, self._stop)
        finally:
            self._free.put(device)


def schedule(runs: list[Run], launcher: Launcher, progress: Progress) -> None:
    """Run everything, as many at a time as the launcher has slots, failed runs again as often as their jobs say.

    KeyboardInterrupt, SIGTERM and an error that is not a run's own (such as a full disk) end the runs that are
    going on, their output kept, and are raised on.
    """
    waiting, running = list(runs), {}
    tries = dict.fromkeys(runs, 0)
    with _sigterm_interrupts():
        try:
            while waiting or running:
                while waiting and len(running) < launcher.slots():
                    run = waiting.pop(0)
                    tries[run] += 1
                    running[launcher.submit(run)] = run
                    progress.start(run)
                done, _ = wait(running, timeout=1, return_when=FIRST_COMPLETED)
                progress.update()
                for future in done:
                    run = running.pop(future)
                    try:
                        entry = future.result()
                        again = entry["status"] == "failed" and tries[run] <= run.job.retries
                        place = len(waiting)  # others first: what disturbed it may have ended by then
                    except LostRun as error:
                        entry = run.update(status="interrupted", reason=str(error))
                        again, place = tries[run] < max(LOST_TRIES, run.job.retries), 0
                    if again:
                        waiting.insert(place, run)
                    progress.end(run, entry, again)
        except BaseException:
            launcher.stop()
            wait(running, timeout=2 * processes.GRACE_S + 5)
            raise


@contextlib.contextmanager
def _sigterm_interrupts():
    """Let SIGTERM, which batch systems send before they kill, end a run as Ctrl-C does."""

    def interrupt(number, frame):
        raise KeyboardInterrupt(signal.Signals(number).name)

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
