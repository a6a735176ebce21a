"""What a bare machine is given: the pinned list, the conda file, the Makefile, CI."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest
import yaml

from kernelbook import ROOT

OPTIONAL = {"humming", "fa3_fwd_interface", "flashinfer", "sageattention", "fla"}
"""Peers that are measured where they import; kernelbook.peers says so."""


EXTRA = ("requirements-ray.txt", "requirements-browser.txt")
"""Lists of their own, which `make test` installs where it can."""


def requirements(*files):
    """Lines of requirements.txt, or of the files named, without comments."""
    lines = (line.partition("#")[0].strip() for file in files or ("requirements.txt",)
             for line in (ROOT / file).read_text().splitlines())
    return [line for line in lines if line]


def normal(name):
    return re.sub("[-_.]+", "-", name).lower()


def test_every_requirement_is_pinned_exactly():
    loose = [line for line in requirements("requirements.txt", *EXTRA)
             if not re.fullmatch(r"[\w.-]+==\d+(\.\d+)+(\.?\w+)?", line)]
    assert loose == []


def test_no_requirement_stands_twice():
    names = [normal(line.split("==")[0]) for line in requirements()]
    assert len(names) > 10 and sorted(names) == sorted(set(names))


def test_conda_takes_the_same_list():
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    packages = [d for d in content["dependencies"] if isinstance(d, str)]
    pip, = (d["pip"] for d in content["dependencies"] if isinstance(d, dict))
    assert {re.split("[=<>]", p)[0] for p in packages} == {"python", "pip"}, "all else could drift from the list"
    assert pip == ["-r requirements.txt", "-e ."]


def test_conda_takes_a_python_that_the_package_runs_on():
    content = yaml.safe_load((ROOT / "environment.yml").read_text())
    version, = (d.removeprefix("python=") for d in content["dependencies"] if str(d).startswith("python="))
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert tuple(map(int, version.split("."))) >= tuple(map(int, oldest.split(".")))


def imports(path):
    """First names of the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.split(".")[0]


def test_every_import_is_covered_by_the_list():
    pinned = {normal(line.split("==")[0]) for line in requirements("requirements.txt", "requirements-ray.txt")}
    owners = metadata.packages_distributions()
    missing = set()
    for path in sorted((ROOT / "lib").rglob("*.py")):
        for name in set(imports(path)) - set(sys.stdlib_module_names) - {"kernelbook"} - OPTIONAL:
            found = {normal(owner) for owner in owners.get(name, [name])}
            # CuPy comes as a package of its own for each major version of CUDA
            if not found & pinned and not (name in ("cupy", "cupyx") and any("cupy" in p for p in pinned)):
                missing.add(f"{path.relative_to(ROOT)} imports {name} of {', '.join(found)}")
    assert missing == set()


def test_optional_peers_are_imported_by_peers_alone_and_called_optional():
    peers = ROOT / "lib" / "kernelbook" / "peers"
    users = {path for path in (ROOT / "lib").rglob("*.py") if OPTIONAL & set(imports(path))}
    assert users == {peers / "attention.py", peers / "delta_net.py", peers / "gemm.py"}
    for path in users:
        assert "All are optional" in ast.get_docstring(ast.parse(path.read_text()))


def test_templates_belong_to_the_package():
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kernelbook"]
    package = ROOT / "lib" / "kernelbook"
    carried = {path for pattern in patterns for path in package.glob(pattern) if path.is_file()}
    there = {path for path in package.rglob("*")
             if path.is_file() and path.suffix not in (".py", ".pyc") and "__pycache__" not in path.parts}
    assert there and carried == there


# ---- make

def make(*arguments):
    # without what the make that may have started these tests hands down
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", "-C", str(ROOT), "--no-print-directory", *arguments], env=environment,
                          capture_output=True, text=True)


@pytest.mark.parametrize("target, does", [
    ("setup", ""), ("reproduce", "-m kernelbook reproduce"), ("test", "-m pytest"),
    ("lab", "-m jupyterlab --ip localhost"), ("report", "-m kernelbook report"),
    ("static", "-m kernelbook static"), ("clean", "rm -rf .venv")])
def test_make_has_the_target(target, does):
    planned = make("-n", target)
    assert planned.returncode == 0, planned.stderr
    assert does in planned.stdout


def test_make_test_checks_style_and_behaviour():
    planned = make("-n", "test").stdout
    assert re.search(r"ruff check lib tests notebooks$", planned, re.M) and re.search("-m pytest -n auto", planned)


def test_arguments_reach_the_command():
    assert "-m kernelbook reproduce --profile smoke" in make("-n", "reproduce", "ARGS=--profile smoke").stdout


def test_another_python_may_be_taken_as_it_is():
    planned = make("-n", "reproduce", "PY=python3").stdout
    assert "python3 -m kernelbook reproduce" in planned and "venv" not in planned, "nothing is set up"


def test_clean_keeps_what_was_measured():
    words = make("-n", "clean").stdout.split()
    assert not {"runs", "results"} & {word.strip("/") for word in words}


def test_make_alone_lists_the_targets():
    shown = make().stdout
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M)[1].split()
    assert {"reproduce", "test", "lab", "static", "clean", "setup"} <= set(phony)
    for target in set(phony) - {"help"}:
        assert re.search(rf"^make {target} +\w", shown, re.M), f"{target} is not explained"


# ---- CI

def test_the_tests_install_what_only_they_can_use():
    recipe = (ROOT / "Makefile").read_text()
    for file in EXTRA:
        assert f"-r {file} ||" in recipe, "and do without where it cannot be had"


def test_ci_runs_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "it can be executed"
    lines = [line for line in script.read_text().splitlines() if line.strip() and not line.startswith("#")]
    command = lines[-1].removeprefix("exec ")
    rest = [line for line in lines[:-1] if not line.startswith(("set -", "cd "))]
    assert all("chromium" in line for line in rest), "and besides only a browser, for the tests that open the report"
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md yet")
    commands = [line.partition("#")[0].strip() for line in readme.read_text().splitlines()]
    assert command in commands
