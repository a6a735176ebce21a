"""Runs on the GPUs or CPUs of a Ray cluster: several GPUs, several hosts. Ray is optional (requirements-ray.txt).

All hosts see the checkout, the Python environment and the runs' folder under the same paths.
"""

import os
import sys
from concurrent.futures import Future
from pathlib import Path

from kernelbook import launch
from kernelbook.launch import Run
from kernelbook.scheduler import LostRun


class Ray:
    """One run at a time on each GPU of a cluster, or on each CPU of one without GPUs.

    address: of a cluster that is up ("auto" finds the one this host belongs to), or "local" to start one for this
    machine. workers: at most so many runs at a time. Raises ValueError where Ray is not installed, and
    ConnectionError where there is no such cluster.
    """

    def __init__(self, address: str, workers: int | None = None):
        try:
            import ray
        except ImportError as error:
            raise ValueError(f"Ray does not import ({error}); pip install -r requirements-ray.txt") from error
        package = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # it would tell its makers
        options = {"include_dashboard": False, "num_cpus": workers} if address == "local" else {}
        ray.init(address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}}, **options)
        self._ray, self._workers = ray, workers
        self._resource = "GPU" if ray.cluster_resources().get("GPU") else "CPU"
        needs = {"num_gpus": 1} if self._resource == "GPU" else {}
        # Tries are counted, and outputs kept, by the schedule; Ray would repeat a run behind its back.
        self._options = {"num_cpus": 1, "max_retries": 0, **needs}
        self._threads = os.environ.get("OMP_NUM_THREADS")
        self._running: dict = {}

    def __enter__(self) -> "Ray":
        return self

    def __exit__(self, *_):
        self._ray.shutdown()

    def machine(self) -> dict:
        return self._ray.get(self._ray.remote(_machine).options(**self._options).remote())

    def slots(self) -> int:
        there = int(self._ray.cluster_resources().get(self._resource, 0))  # hosts come and go
        return min(there, self._workers or there)

    def submit(self, run: Run) -> Future:
        reference = self._ray.remote(_perform).options(**self._options).remote(run, self._threads)
        self._running[reference] = future = Future()

        def finish(ended: Future) -> None:
            self._running.pop(reference)
            error = ended.exception()
            if error is None:
                future.set_result(ended.result())
            elif isinstance(error, self._ray.exceptions.RayTaskError):
                future.set_exception(error.cause)
            else:
                future.set_exception(LostRun(f"its Ray worker was lost: {' '.join(str(error).split())[:300]}"))

        reference.future().add_done_callback(finish)
        return future

    def stop(self) -> None:
        for reference in list(self._running):
            self._ray.cancel(reference)  # raises KeyboardInterrupt there


def _machine() -> dict:
    _without_ray()
    return launch.machine()


def _perform(run: Run, threads: str | None) -> dict:
    """A run in a worker of Ray, which lets it see one GPU, if any."""
    _without_ray()
    if threads is None:
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, from the CPUs that a task reserves
    return launch.perform(run, next(iter(launch.devices()), None))


def _without_ray() -> None:
    """Take the packages that Ray brings along off this worker's path: the notebook's process will not have them."""
    sys.path[:] = [path for path in sys.path if "thirdparty_files" not in Path(path).parts]
