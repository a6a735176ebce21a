"""Notebooks as files: their parameters cell, and the one form in which they are committed."""

import ast
import builtins
import dataclasses
import difflib
import hashlib
import json
import math
import re
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat

from kernelbook import ROOT

FOLDER = ROOT / "notebooks"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"}}
RECORD = "record"
"""The parameter through which the runner says where a notebook's record goes."""

_LINE = re.compile(r"(?P<name>[a-z_]\w*): (?P<type>[\w\[\]| ]+) = (?P<value>.+?)  # (?P<meaning>\S.*)")


@dataclass(frozen=True)
class Parameter:
    """One line of a parameters cell, `name: type = value  # meaning`."""

    name: str
    type: Any  # int, float, str, bool, list[...] of those, or a union with |
    default: Any
    meaning: str


def find(names=None) -> list[Path]:
    """The notebooks called `names` (1_grouped_gemm, with or without .ipynb), or all, in reading order.

    Raises ValueError with the nearest name for one that does not exist.
    """
    known = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
    wanted = [Path(name).name.removesuffix(".ipynb") for name in names or known]
    for name in wanted:
        if name not in known:
            raise ValueError(f"no notebook {name!r} in {FOLDER}{nearest(name, known)}")
    return [known[name] for name in sorted(set(wanted))]


def nearest(name: str, known) -> str:
    """The end of an error message: what `name` may have meant, or what there is."""
    close = difflib.get_close_matches(name, known, 1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; there are: {', '.join(known)}" if known else "; there is none"


def read(path: Path) -> nbformat.NotebookNode:
    """The notebook as a node. Raises ValueError naming the file if it is none (of format 4)."""
    try:
        # Not nbformat.read: it invents cell ids, and a check must see what the file has.
        content = json.loads(path.read_text(encoding="utf-8"))
        if content.get("nbformat") != 4:
            raise ValueError(f"nbformat is {content.get('nbformat')}, expected 4")
        return nbformat.v4.to_notebook(content)
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a notebook: {error}") from None


def parameters(path: Path) -> dict[str, Parameter]:
    """The parameters of a notebook, from its one cell tagged `parameters`.

    Raises ValueError naming file and line where the cell is missing, doubled, or holds anything else than
    lines `name: type = value  # meaning` with literal values of their type.
    """
    cells = [cell for cell in read(path).cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1 or cells[0].cell_type != "code":
        raise ValueError(f"{path}: expected one code cell tagged 'parameters', found {len(cells)}")
    found: dict[str, Parameter] = {}
    for line in cells[0].source.splitlines():
        try:
            parameter = _parameter(line)
            if parameter.name in found:
                raise ValueError(f"{parameter.name} is set twice")
        except ValueError as error:
            raise ValueError(f"{path}: parameters cell, line {line!r}: {error}") from None
        found[parameter.name] = parameter
    return found


def fit(parameter: Parameter, value: Any) -> Any:
    """`value` as the notebook gets it: an int where a float is meant becomes one, the rest must fit as it is.

    Raises ValueError naming the parameter, the value and what was expected.
    """
    try:
        return _coerce(value, parameter.type)
    except TypeError:
        kind = parameter.type.__name__ if type(parameter.type) is type else parameter.type
        raise ValueError(f"parameter {parameter.name}: expected {kind}, got {value!r} "
                         f"({type(value).__name__})") from None
    except ValueError as error:
        raise ValueError(f"parameter {parameter.name}: {error}") from None


def fit_yaml(parameter: Parameter, value: Any) -> Any:
    """`fit` for a value out of a YAML file, with a hint where YAML has read a number such as 1e-3 as a string."""
    try:
        return fit(parameter, value)
    except ValueError as error:
        number = _number(value) if isinstance(value, str) and parameter.type is float else None
        if number is None:
            raise
        raise ValueError(f"{error}; YAML takes {value} for a string, write {number!r}") from None


def parse(parameter: Parameter, text: str) -> Any:
    """The value of `-p name=text`: text for a str, else a JSON or Python literal of the parameter's type."""
    if parameter.type is str:
        return text
    for reader in (json.loads, ast.literal_eval):
        try:
            value = reader(text)
        except (ValueError, SyntaxError):
            continue
        return fit(parameter, value)
    return fit(parameter, text)


def clean(path: Path) -> str:
    """The text of a notebook in its committed form: no outputs, counts or run metadata; tags and ids stay."""
    node = read(path)
    node.nbformat, node.nbformat_minor = 4, 5
    node.metadata = nbformat.from_dict(METADATA)
    taken = {cell.get("id") for cell in node.cells}
    for cell in node.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        if not cell.get("id"):
            # From the text, so that cleaning the same notebook twice, anywhere, gives the same file.
            digest = hashlib.sha256(cell.source.encode()).hexdigest()
            cell.id = next(digest[i:i + 8] for i in range(56) if digest[i:i + 8] not in taken)
            taken.add(cell.id)
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return nbformat.v4.writes(node) + "\n"


def check(path: Path) -> list[str]:
    """What keeps a notebook from its committed form; nothing if it is fine."""
    try:
        text = clean(path)
        ids = [cell.id for cell in read(path).cells if cell.get("id")]
        faults = [f"two cells have the id {name}" for name in sorted({i for i in ids if ids.count(i) > 1})]
        if path.read_text(encoding="utf-8") != text:
            faults.append("not in clean form (outputs, counts, metadata, missing ids or layout): "
                          "run `python -m kernelbook clean-notebooks`")
        if RECORD not in parameters(path):
            faults.append(f"no parameter `{RECORD}: str`, by which the runner says where the record goes")
        if not faults:
            nbformat.validate(json.loads(text))
        return faults
    except (ValueError, nbformat.ValidationError) as error:
        return [str(error)]


def _parameter(line: str) -> Parameter:
    match = _LINE.fullmatch(line)
    if not match:
        raise ValueError("expected `name: type = value  # meaning`")
    try:
        default = ast.literal_eval(match["value"])
    except (SyntaxError, ValueError):
        raise ValueError(f"{match['value']} is not a literal value") from None
    kind = _type(ast.parse(match["type"].strip(), mode="eval").body)
    parameter = Parameter(match["name"], kind, default, match["meaning"])
    return dataclasses.replace(parameter, default=fit(parameter, default))


def _type(node: ast.expr) -> Any:
    match node:
        case ast.Name(id="int" | "float" | "str" | "bool" as name):
            return getattr(builtins, name)
        case ast.Constant(value=None):
            return type(None)
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return list[_type(item)]
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return _type(left) | _type(right)
    raise ValueError(f"type {ast.unparse(node)} is none of int, float, str, bool, list[...], and unions by |")


def _coerce(value: Any, kind: Any) -> Any:
    """`value` as `kind`; TypeError where it has another type, ValueError where it is not finite."""
    if isinstance(kind, types.UnionType):
        for part in typing.get_args(kind):
            try:
                return _coerce(value, part)
            except TypeError:
                continue
    elif typing.get_origin(kind) is list and type(value) is list:
        return [_coerce(item, typing.get_args(kind)[0]) for item in value]
    elif kind is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        return float(value)
    elif type(value) is kind:  # not isinstance: True is an int, and no count
        return value
    raise TypeError


def _number(text: str) -> float | None:
    """The finite number that a text stands for."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
