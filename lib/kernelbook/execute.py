"""Runs one notebook in this process: `python -m kernelbook.execute JOB EVENTS`, as `launch` does for each.

JOB is a JSON object: notebook, output, folder (the working directory), parameters, cell_timeout_s.
EVENTS is the number of an open file descriptor that takes one JSON object a line: {"cell": 3, "cells": 20} before
a cell runs, {"failed": "..."} where one stops the notebook. All other output belongs to the log.
Standard input is a pipe: when its other end is closed, be it by a batch that stops or by one that was killed, the
notebook is saved as far as it came and all processes of the run end.
"""

import asyncio
import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

# ruff: noqa: E402
# jsonschema checks URI formats with it, if it is there, and nobody asks for that; it takes a second to import.
sys.modules["rfc3987_syntax"] = None

import papermill
from nbclient.exceptions import CellTimeoutError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import Engine, papermill_engines
from papermill.exceptions import PapermillExecutionError
from papermill.iorw import LocalHandler, papermill_io
from traitlets.config import Config

from kernelbook import processes, records

PRINTED = 100_000
"""Characters that a cell may print before the rest is dropped: a runaway loop must not fill the disk."""
SHOWN = 10_000_000
"""Bytes of pictures, tables and values that a cell may show."""
SAVE_EVERY_S = 1

log = logging.getLogger("kernelbook")


class Client(PapermillNotebookClient):
    """Keeps of a cell's output what a reader would read, and saves it even where no more follows."""

    save_is_due = False

    def process_message(self, *arguments, **options):
        output = super().process_message(*arguments, **options)
        self._save_later()
        return output

    def _save_later(self):
        """papermill saves with a message, if it has not just done so; the last one may wait for the next for hours."""
        if not self.save_is_due:
            self.save_is_due = True
            asyncio.get_running_loop().call_later(SAVE_EVERY_S, self._save)

    def _save(self):
        self.save_is_due = False
        before = self.nb_man.last_save_time
        self.nb_man.autosave_cell()
        if self.nb_man.last_save_time == before:
            self._save_later()

    def execute_cell(self, cell, cell_index, **options):
        self.printed = self.shown = 0
        return super().execute_cell(cell, cell_index, **options)

    def output(self, outs, msg, display_id, cell_index):
        content = msg["content"]
        if msg["msg_type"] == "error":
            content["evalue"] = _cut(content["evalue"])
            content["traceback"] = [_cut(line) for line in content["traceback"]]
        elif msg["msg_type"] != "stream":
            self.shown += sum(len(value if isinstance(value, str) else json.dumps(value))
                              for value in content["data"].values())
            if self.shown > SHOWN:
                content["data"] = {"text/plain": f"[more than {SHOWN} bytes; this output is not kept]"}
        if msg["msg_type"] != "stream":
            return super().output(outs, msg, display_id, cell_index)
        room, text = PRINTED - self.printed, content["text"]
        self.printed += len(text)
        if room <= 0:
            return None
        text = _cut(text, room)
        last = outs[-1] if outs and not self.clear_before_next_output else None
        if last and last.output_type == "stream" and last.name == msg["content"]["name"]:
            last.text += text  # not nbclient's coalesce_streams, whose regex is quadratic in a line's length
            return last
        content["text"] = text
        return super().output(outs, msg, display_id, cell_index)


def _cut(text: str, room: int = PRINTED) -> str:
    """As much of a text as there is room for."""
    if len(text) <= room:
        return text
    return f"{text[:room]}\n[more than {PRINTED} characters; the rest is not kept]\n"


class WholeFiles(LocalHandler):
    """papermill's way to files, but a notebook is replaced in one step: a full disk or a kill leaves the last one."""

    def write(self, buf, path):
        records.write(Path(path), buf.encode())


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


def end_with_parent() -> None:
    """Wait until the pipe at standard input is closed, then end the run: first asked, so that it saves, then killed."""
    while os.read(0, 1):
        pass
    # To the main thread itself, which may be waiting for the kernel, and would not notice one sent to the process.
    signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)
    time.sleep(processes.GRACE_S)
    processes.end(os.environ[processes.MARK])
    os._exit(1)


def main(job: str, events_fd: str) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    papermill_engines.register("reporting", ReportingEngine)
    papermill_io.register("/", WholeFiles())
    # papermill leaves SIGTERM alone, and dies of it with all that was printed since the last save.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    threading.Thread(target=end_with_parent, daemon=True).start()
    try:
        return run(json.loads(job), events_fd)
    except KeyboardInterrupt:
        log.error("told to end")
        return 1
    finally:
        processes.end(os.environ[processes.MARK])


def run(job: dict, events_fd: str) -> int:
    """Run a notebook; returns the exit code. Raises KeyboardInterrupt for SIGTERM."""
    with os.fdopen(int(events_fd), "w", encoding="utf-8") as events:
        try:
            papermill.execute_notebook(
                job["notebook"], job["output"], job["parameters"], engine_name="reporting", cwd=job["folder"],
                progress_bar=False, autosave_cell_every=SAVE_EVERY_S, events=events,
                cell_timeout_s=job["cell_timeout_s"])
        except PapermillExecutionError as error:
            tell(events, failed=f"{error.ename}: {error.evalue}"[:PRINTED])
            log.error("%s", error)
            return 1
        except CellTimeoutError as error:
            tell(events, failed=f"it ran for more than {job['cell_timeout_s']} s, the profile's cell_timeout_s")
            log.error("%s", error)
            return 1
        except Exception as error:
            tell(events, failed=f"{type(error).__name__}: {_cut(str(error).strip())}")
            log.exception("the notebook did not end")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
