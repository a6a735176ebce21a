"""The command line: `python -m kernelbook COMMAND`. One function a command, its help text its docstring."""

import argparse
import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from kernelbook import __doc__, notebooks

COMMANDS: dict[str, tuple[Callable, Callable]] = {}
"""Name of each command to its function and to the function that declares its arguments, in the order of --help."""


def command(arguments: Callable[[argparse.ArgumentParser], None] = lambda parser: None) -> Callable:
    """Make a function of the parsed arguments a command, called after the function with dashes for underscores."""

    def register(function):
        COMMANDS[function.__name__.replace("_", "-")] = function, arguments
        return function

    return register


def _reproduce_arguments(parser):
    parser.add_argument("--profile", help="a file in notebooks/profiles: smoke (every path once), cpu (minutes), "
                                          "gpu (everything timed); default: gpu if there is a device, else cpu")
    parser.add_argument("--notebook", nargs="+", metavar="NAME", default=[], dest="names",
                        help="run these only, such as 1_grouped_gemm")
    parser.add_argument("-p", action="append", metavar="NAME=VALUE", default=[], dest="parameters",
                        help="set a parameter of every chosen notebook that has it; may be repeated")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where the run's folder is made (default: runs); runs/latest links to the last one")


@command(_reproduce_arguments)
def reproduce(options) -> int:
    """Run the notebooks, record what they find, write the report."""
    from kernelbook import report, runner, static

    profile = options.profile or runner.default_profile()
    jobs = runner.plan(profile, options.names, options.parameters)
    folder = runner.run(jobs, profile, options.out)
    index = report.build(folder, machine_code=static.RECORD)
    failed = runner.failures(folder)
    for name, reason in failed.items():
        print(f"{name} did not pass: {reason}\n  log: {folder / name}.log")
    print(f"report: {index}")
    return 1 if failed else 0


def _kept_arguments(parser):
    """Arguments of the commands whose runs are kept by what they depend on."""
    parser.add_argument("-p", action="append", metavar="NAME=VALUE", default=[], dest="parameters",
                        help="set a parameter of every notebook that has it; may be repeated")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="the folder of the runs (default: below runs, named like the file of parameters)")
    parser.add_argument("--workers", type=int, metavar="N",
                        help="runs at a time (default: one on each GPU, or one where there is none)")
    parser.add_argument("--ray", metavar="ADDRESS",
                        help="run on the GPUs, or CPUs, of a Ray cluster: its address, auto for the one this host "
                             "belongs to, or local to start one")


def _run_arguments(parser):
    parser.add_argument("names", nargs="+", metavar="NAME", help="a notebook, such as 1_grouped_gemm")
    parser.add_argument("--profile", help="as for reproduce")
    _kept_arguments(parser)


@command(_run_arguments)
def run(options) -> int:
    """Run notebooks, but for those that have passed before with the same inputs."""
    from kernelbook import runner

    profile = options.profile or runner.default_profile()
    return _sweep(profile, options.names, options)


def _sweep_arguments(parser):
    parser.add_argument("grid", metavar="FILE",
                        help="a profile (its path, ending in .yaml) in which parameters may have several values, "
                             "{each: [1, 2]}, such as notebooks/sweeps/seeds.yaml, which says the rest")
    _kept_arguments(parser)


@command(_sweep_arguments)
def sweep(options) -> int:
    """Run every combination of a grid of parameters; a sweep that was stopped goes on where it was."""
    from kernelbook import runner

    return _sweep(options.grid, runner.listed(options.grid), options)


def _sweep(profile: str, names: list[str], options) -> int:
    from kernelbook import runner, sweep
    from kernelbook.scheduler import Local

    jobs = runner.plan(profile, names, options.parameters)
    folder = options.out or runner.RUNS / Path(profile).stem
    if options.ray:
        from kernelbook.ray_launcher import Ray
        launcher = Ray(options.ray, options.workers)
    else:
        launcher = Local.of(options.workers)
    skipped = []
    try:
        with launcher:
            skipped = sweep.sweep(jobs, profile, folder, launcher)
    finally:
        if (folder / "sweep.json").exists():
            print(sweep.summary(rows := sweep.standings(folder)), end="")
    for label in skipped:
        print(f"{label}: skipped, it had passed before")
    print(f"runs: {folder}")
    return 0 if all(row.status == "passed" for row in rows) else 1


def _status_arguments(parser):
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER",
                        help="of a sweep or a run (default: runs/latest)")


@command(_status_arguments)
def status(options) -> int:
    """Tell how each run of a batch stands, while it goes on or after; exit code 1 if not all have passed."""
    from kernelbook import runner, sweep

    rows = sweep.standings(options.folder or runner.RUNS / "latest")
    print(sweep.table(rows), end="")
    return 0 if all(row.status == "passed" for row in rows) else 1


def _report_arguments(parser):
    parser.add_argument("folders", nargs="*", type=Path, metavar="FOLDER",
                        help="run folders (runs/latest), sweeps, or folders of records (results/nvidia-h200), a column "
                             "each (default: all of results/, and the newest run of each device in runs/)")
    parser.add_argument("--against", metavar="DEVICE",
                        help="say what changed since another run: a folder, or the name of one in results/; the "
                             "newest run in runs/ is compared if no FOLDER is named")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where the pages go (default: runs/report; one run folder named gets its own)")


@command(_report_arguments)
def report(options) -> int:
    """Write the HTML report of runs that have ended, and of committed records."""
    from kernelbook import report, static

    print(f"report: {report.build(options.folders, options.out, static.RECORD, options.against)}")
    return 0


def _static_arguments(parser):
    parser.add_argument("--target", nargs="+", metavar="NAME", dest="targets",
                        help="such as sm_90a or gfx942 (default: all that can be compiled for here)")
    parser.add_argument("--out", type=Path, metavar="FILE",
                        help="where the record goes (default: runs/static.json, which reports have a section on)")


@command(_static_arguments)
def static(options) -> int:
    """Compile every kernel for every target, no GPU needed; print and record registers, spills and instructions."""
    from kernelbook import static, toolchain

    targets = options.targets or [name for name, missing in toolchain.targets().items() if missing is None]
    rows = toolchain.survey(static.sources(), targets)
    print(toolchain.table(rows), end="")
    for path, absent, reason in static.absences(targets):
        print(f"\n{path}, not on {', '.join(absent)}: {reason}")
    print(f"\nrecord: {static.save(static.record(rows, targets), options.out)}", file=sys.stderr)
    return 0


def _buckets_arguments(parser):
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE",
                        help="traces of Nsight Systems (cuda_gpu_kern_sum CSV, SQLite), torch.profiler (plain or "
                             "gzip), ncu (details CSV) or rocprof (stats CSV); two are also set side by side")
    parser.add_argument("--rules", type=Path, metavar="FILE",
                        help="kernel names to buckets (default: lib/kernelbook/buckets/rules.yaml, which says how to "
                             "write them)")
    parser.add_argument("--passes", action="append", metavar="HOW", default=[],
                        help="how to count passes: a number, mark:NAME, kernel:REGEX (one a launch), kernel*N:REGEX "
                             "(one for N launches); once for all files or once for each (default: marks that the "
                             "profiler set, else the greatest common divisor of launch counts, with a warning)")
    parser.add_argument("--wall-ms", action="append", type=float, metavar="MS", default=[],
                        help="wall time of a pass, measured without the profiler; once for all files or for each")
    parser.add_argument("--predict", metavar="MODEL",
                        help="show llama.cpp's launches predicted for a pass of a model, such as Qwen3.5-27B, beside "
                             "those counted")
    parser.add_argument("--tokens", type=int, default=512, metavar="N", help="of the predicted pass (default: 512)")
    parser.add_argument("--multiprocessors", type=int, metavar="N",
                        help="of the predicted pass's GPU (default: as the trace says)")
    parser.add_argument("--json", action="store_true", help="print JSON: every figure, every kernel")


@command(_buckets_arguments)
def buckets(options) -> int:
    """Take traces of GPU work apart: time a pass in buckets of kernels, which must add up to the wall time."""
    from kernelbook.buckets import shell

    return shell.run(options.files, rules=options.rules, passes=options.passes, walls_ms=options.wall_ms,
                     model=options.predict, tokens=options.tokens, multiprocessors=options.multiprocessors,
                     as_json=options.json)


@command()
def readme(options) -> int:
    """Redraw the README's tables and picture from the records in results/."""
    from kernelbook import readme

    print(f"README.md: {'redrawn' if readme.update() else 'already current'}")
    return 0


def _clean_arguments(parser):
    parser.add_argument("names", nargs="*", metavar="NAME", help="these only (default: all notebooks)")


@command(_clean_arguments)
def clean_notebooks(options) -> int:
    """Strip outputs and run metadata from the notebooks, as they are committed."""
    faulty = 0
    for path in notebooks.find(options.names):
        text = notebooks.clean(path)
        if path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(f"{path.name}: cleaned")
        for fault in notebooks.check(path):
            faulty += 1
            print(f"{path.name}: {fault}", file=sys.stderr)
    return 1 if faulty else 0


def parser() -> argparse.ArgumentParser:
    layout = functools.partial(argparse.HelpFormatter, max_help_position=20, width=100)
    top = argparse.ArgumentParser(prog="python -m kernelbook", description=__doc__, formatter_class=layout)
    top.add_argument("--debug", action="store_true", help="show where an error comes from")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", title="commands", required=True)
    for name, (function, arguments) in COMMANDS.items():
        entry = commands.add_parser(name, help=function.__doc__, description=function.__doc__,
                                    formatter_class=layout)
        entry.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        arguments(entry)
        entry.set_defaults(function=function)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Exit codes: 0 fine, 1 a notebook failed or a check found faults, 2 an error, 130 interrupted."""
    options = parser().parse_args(arguments)
    try:
        return options.function(options)
    except KeyboardInterrupt as stop:
        print(f"interrupted{f' by {stop}' if str(stop) else ''}; what had ended is kept", file=sys.stderr)
        return 130
    except Exception as error:
        if options.debug:
            traceback.print_exc()
        else:
            expected = isinstance(error, OSError | ValueError | RuntimeError)
            print(f"error: {'' if expected else type(error).__name__ + ': '}{error}"
                  f"{'' if expected else ' (--debug shows where)'}", file=sys.stderr)
        return 2
