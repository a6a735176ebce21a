import json

import nbformat
import pytest

from kernelbook import notebooks

PARAMETERS = ('draws: int = 3  # how many\nscale: float = 1  # of the weights\nname: str = "a b"  # shown\n'
              'sizes: list[float] = [1, 2.5]  # of the sweep\nlimit: int | None = None  # none: all\n'
              'record: str = ""  # where the record goes')


def make(path, source=PARAMETERS, tags=("parameters",)):
    node = nbformat.v4.new_notebook(cells=[
        nbformat.v4.new_markdown_cell("# Small", id="head"),
        nbformat.v4.new_code_cell(source, id="parameters", metadata={"tags": list(tags)})])
    nbformat.write(node, path)
    return path


@pytest.fixture
def small(tmp_path):
    path = make(tmp_path / "1_small.ipynb")
    path.write_text(notebooks.clean(path), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", notebooks.find(), ids=lambda path: path.stem)
def test_committed_notebooks_are_in_clean_form(path):
    assert notebooks.check(path) == []


def test_parameters_have_names_types_defaults_and_meanings(small):
    found = notebooks.parameters(small)
    assert {name: (p.type, p.default, p.meaning) for name, p in found.items()} == {
        "draws": (int, 3, "how many"), "scale": (float, 1.0, "of the weights"), "name": (str, "a b", "shown"),
        "sizes": (list[float], [1.0, 2.5], "of the sweep"), "limit": (int | None, None, "none: all"),
        "record": (str, "", "where the record goes")}
    assert type(found["scale"].default) is float


@pytest.mark.parametrize("line, fault", [
    ("draws = 3", "expected `name: type = value"),
    ("draws: int = 3", "expected `name: type = value"),
    ("draws: int = 2 + 1  # sum", "2 . 1 is not a literal"),
    ("draws: int = '3'  # text", "expected int, got '3'"),
    ("draws: int = True  # flag", "expected int, got True"),
    ("scale: float = 1e999  # inf", "inf is not a finite number"),
    ("rows: dict = {}  # map", "type dict is none of"),
    ("import os", "expected `name: type = value"),
    ("record: str = ''  # again", "record is set twice"),
    ("", "expected `name: type = value"),
])
def test_a_parameters_cell_holds_parameters_only(tmp_path, line, fault):
    path = make(tmp_path / "n.ipynb", f"{PARAMETERS}\n{line}\na: int = 1  # end")
    with pytest.raises(ValueError, match=fault) as error:
        notebooks.parameters(path)
    assert "n.ipynb" in str(error.value) and repr(line) in str(error.value)


def test_fitting_values(small):
    p = notebooks.parameters(small)
    assert notebooks.fit(p["limit"], 4) == 4 and notebooks.fit(p["limit"], None) is None
    assert notebooks.fit(p["sizes"], [2]) == [2.0]
    assert type(notebooks.fit(p["scale"], 2)) is float
    for name, value, message in [
            ("draws", 2.0, r"draws: expected int, got 2.0 \(float\)"),
            ("draws", None, "draws: expected int, got None"),
            ("draws", True, "draws: expected int, got True"),
            ("scale", "1e-3", r"scale: expected float, got '1e-3' \(str\)$"),
            ("scale", float("nan"), "scale: nan is not a finite number"),
            ("sizes", [1, float("inf")], "sizes: inf is not a finite number"),
            ("sizes", 3, r"expected list\[float\], got 3"),
            ("name", 3, "expected str, got 3")]:
        with pytest.raises(ValueError, match=message):
            notebooks.fit(p[name], value)


def test_numbers_that_yaml_takes_for_strings(small):
    p = notebooks.parameters(small)
    assert notebooks.fit_yaml(p["scale"], 1e-3) == 1e-3 and notebooks.fit_yaml(p["name"], "1e-3") == "1e-3"
    with pytest.raises(ValueError, match="YAML takes 1e-3 for a string, write 0.001$"):
        notebooks.fit_yaml(p["scale"], "1e-3")
    for value in ("nan", "inf", "1e999", "x"):
        with pytest.raises(ValueError, match=rf"expected float, got '{value}' \(str\)$"):
            notebooks.fit_yaml(p["scale"], value)


def test_parsing_values_of_the_command_line(small):
    p = notebooks.parameters(small)
    assert notebooks.parse(p["scale"], "1e-3") == 1e-3
    assert notebooks.parse(p["draws"], "-4") == -4
    assert notebooks.parse(p["name"], "3") == "3"
    assert notebooks.parse(p["name"], "/a b/ü") == "/a b/ü"
    assert notebooks.parse(p["limit"], "None") is None and notebooks.parse(p["limit"], "null") is None
    assert notebooks.parse(p["sizes"], "[1, 2]") == [1.0, 2.0]
    for name, text in [("scale", "nan"), ("scale", "NaN"), ("scale", "Infinity"), ("draws", "3.5"),
                       ("draws", "x")]:
        with pytest.raises(ValueError, match=name):
            notebooks.parse(p[name], text)


def test_cleaning_strips_a_run_and_keeps_what_was_written(small):
    clean = small.read_text()
    node = nbformat.read(small, 4)
    node.metadata.papermill = {"duration": 3}
    node.metadata.kernelspec.display_name = "mine"
    cell = node.cells[1]
    cell.execution_count = 7
    cell.outputs = [nbformat.v4.new_output("stream", text="hello")]
    cell.metadata["collapsed"] = True
    nbformat.write(node, small)
    assert any("not in clean form" in fault for fault in notebooks.check(small))
    assert notebooks.clean(small) == clean
    assert json.loads(clean)["cells"][1]["id"] == "parameters"


def test_missing_ids_are_made_the_same_everywhere(small):
    content = json.loads(small.read_text())
    content["nbformat_minor"] = 4
    for cell in content["cells"]:
        del cell["id"]
    content["cells"].append(content["cells"][0])
    small.write_text(json.dumps(content))
    first = notebooks.clean(small)
    assert first == notebooks.clean(small)
    assert len({cell["id"] for cell in json.loads(first)["cells"]}) == 3
    small.write_text(first)
    assert notebooks.check(small) == []


def test_faults_are_named(small, tmp_path):
    content = json.loads(small.read_text())
    content["cells"][0]["id"] = "parameters"
    small.write_text(json.dumps(content))
    assert any("two cells have the id parameters" in fault for fault in notebooks.check(small))
    faults = notebooks.check(make(tmp_path / "untagged.ipynb", tags=()))
    assert faults == [f"{tmp_path}/untagged.ipynb: expected one code cell tagged 'parameters', found 0"]
    faults = notebooks.check(make(tmp_path / "no_record.ipynb", "draws: int = 3  # how many"))
    assert any("no parameter `record: str`" in fault for fault in faults)
    (tmp_path / "text.ipynb").write_text("hello")
    assert "is not a notebook" in notebooks.check(tmp_path / "text.ipynb")[0]


def test_finding_notebooks(small, monkeypatch):
    monkeypatch.setattr(notebooks, "FOLDER", small.parent)
    assert notebooks.find() == notebooks.find(["notebooks/1_small.ipynb"]) == [small]
    with pytest.raises(ValueError, match="no notebook '1_smal'.*did you mean '1_small'"):
        notebooks.find(["1_smal"])
