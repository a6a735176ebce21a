"""Runs one notebook in this process: `python -m kernelbook.execute JOB EVENTS`, as the runner does for each.

JOB is a JSON object: notebook, output, folder (the working directory), parameters, cell_timeout_s.
EVENTS is the number of an open file descriptor that takes one JSON object a line: {"cell": 3, "cells": 20} before
a cell runs, {"failed": "..."} where one stops the notebook. All other output belongs to the log.
"""

import json
import logging
import os
import signal
import sys
import time

import papermill
from nbclient.exceptions import CellTimeoutError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from traitlets.config import Config

PRINTED = 100_000
"""Characters that a cell may print before the rest is dropped: a runaway loop must not fill the disk."""
SAVE_EVERY_S = 1

log = logging.getLogger("kernelbook")


class Client(PapermillNotebookClient):
    """Keeps of a cell's printed text what a reader would read."""

    def execute_cell(self, cell, cell_index, **options):
        self.printed = 0
        return super().execute_cell(cell, cell_index, **options)

    def output(self, outs, msg, display_id, cell_index):
        if msg["msg_type"] != "stream":
            return super().output(outs, msg, display_id, cell_index)
        room, text = PRINTED - self.printed, msg["content"]["text"]
        self.printed += len(text)
        if room <= 0:
            return None
        if len(text) > room:
            text = f"{text[:room]}\n[more than {PRINTED} characters; the rest is not kept]\n"
        last = outs[-1] if outs and not self.clear_before_next_output else None
        if last and last.output_type == "stream" and last.name == msg["content"]["name"]:
            last.text += text  # not nbclient's coalesce_streams, whose regex is quadratic in a line's length
            return last
        msg["content"]["text"] = text
        return super().output(outs, msg, display_id, cell_index)


class ReportingEngine(Engine):
    """papermill's engine, telling `events` which cell runs, with sockets in the file system instead of ports.

    Ports are taken by any process of the machine between the choice and the use; two batches at once met that.
    """

    @classmethod
    def execute_managed_notebook(cls, nb_man, kernel_name, *, events, cell_timeout_s, **_):
        cells = [cell for cell in nb_man.nb.cells if cell.cell_type == "code"]
        started = 0.0
        papermill_notes = nb_man.nb.metadata.papermill
        for name in ("input_path", "output_path"):  # a published notebook need not tell where it was made
            papermill_notes[name] = os.path.basename(papermill_notes[name])

        def on_start(cell, cell_index):
            nonlocal started
            started = time.monotonic()
            tell(events, cell=number(cell), cells=len(cells))

        def on_end(cell, cell_index, execute_reply):
            log.info("cell %d of %d: %s after %.1f s", number(cell), len(cells),
                     execute_reply["content"]["status"], time.monotonic() - started)

        def number(cell):
            return next(i for i, other in enumerate(cells, 1) if other is cell)

        Client(nb_man, kernel_name=kernel_name, timeout=cell_timeout_s, startup_timeout=120, log=log,
               on_cell_execute=on_start, on_cell_executed=on_end,
               config=Config(KernelManager={"transport": "ipc"})).execute()


def tell(events, **message) -> None:
    events.write(json.dumps(message) + "\n")
    events.flush()


def main(job: str, events_fd: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    job = json.loads(job)
    papermill_engines.register("reporting", ReportingEngine)
    # papermill leaves SIGTERM alone, and dies of it with all that was printed since the last save.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with os.fdopen(int(events_fd), "w", encoding="utf-8") as events:
        try:
            papermill.execute_notebook(
                job["notebook"], job["output"], job["parameters"], engine_name="reporting", cwd=job["folder"],
                progress_bar=False, autosave_cell_every=SAVE_EVERY_S, events=events,
                cell_timeout_s=job["cell_timeout_s"])
        except PapermillExecutionError as error:
            tell(events, failed=f"{error.ename}: {error.evalue}")
            log.error("%s", error)
            return 1
        except CellTimeoutError as error:
            tell(events, failed=f"it ran for more than {job['cell_timeout_s']} s, the profile's cell_timeout_s")
            log.error("%s", error)
            return 1
        except KeyboardInterrupt:
            log.error("told to end")
            return 1
        except Exception as error:
            tell(events, failed=f"{type(error).__name__}: {str(error).strip()}")
            log.exception("the notebook did not end")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
