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
    parser.add_argument("--profile", help="a file in notebooks/profiles: smoke (seconds), cpu (minutes), gpu "
                                          "(everything timed); default: gpu if there is a device, else cpu")
    parser.add_argument("--notebook", nargs="+", metavar="NAME", default=[], dest="names",
                        help="run these only, such as 1_grouped_gemm")
    parser.add_argument("-p", action="append", metavar="NAME=VALUE", default=[], dest="parameters",
                        help="set a parameter of every chosen notebook that has it; may be repeated")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where the run's folder is made (default: runs); runs/latest links to the last one")


@command(_reproduce_arguments)
def reproduce(options) -> int:
    """Run the notebooks, record what they find, write the report."""
    from kernelbook import report, runner

    profile = options.profile or runner.default_profile()
    jobs = runner.plan(profile, options.names, options.parameters)
    folder = runner.run(jobs, profile, options.out)
    index = report.build(folder)
    failed = runner.failures(folder)
    for name, reason in failed.items():
        print(f"{name} did not pass: {reason}\n  log: {folder / name}.log")
    print(f"report: {index}")
    return 1 if failed else 0


def _report_arguments(parser):
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER",
                        help="run folders (runs/latest), or folders of records (results/nvidia-h200)")
    parser.add_argument("--out", type=Path, metavar="DIR",
                        help="where the pages go; may be left out for one run folder, which then gets them")


@command(_report_arguments)
def report(options) -> int:
    """Write the HTML report of runs that have ended, or of committed records."""
    from kernelbook import report

    print(f"report: {report.build(options.folders, options.out)}")
    return 0


def _static_arguments(parser):
    parser.add_argument("--target", nargs="+", metavar="NAME", dest="targets",
                        help="such as sm_90a or gfx942 (default: all that can be compiled for here)")


@command(_static_arguments)
def static(options) -> int:
    """Compile every kernel for every target, no GPU needed; print registers, spills and instructions per MAC."""
    from kernelbook import backends, toolchain
    from kernelbook.ops import gated_delta_net, grouped_gemm, int8_pv, layer, prefill_gemm, q4_probe

    families = (grouped_gemm, q4_probe, prefill_gemm, gated_delta_net, layer, int8_pv)
    sources = [*(source for family in families for source in family.sources()), backends.Source("ceilings/memory.cu")]
    print(toolchain.table(sources, options.targets), end="")
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
