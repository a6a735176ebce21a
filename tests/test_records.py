import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from kernelbook import claims, records

ARTICLE = """title = "An article"
notebook = "1_small"
[[claim]]
id = "A01"
kind = "speed"
says = "x < y & z"
check = "time it"
[[claim]]
id = "A02"
kind = "error"
says = "exact"
check = "compare"
"""
CASE = {"kernel": "gemm", "variant": "1_plain", "case": {"M": 1, "codes": "int8"}}


@pytest.fixture(autouse=True)
def small_article(tmp_path, monkeypatch):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "small.toml").write_text(ARTICLE)
    monkeypatch.setattr(claims, "FOLDER", tmp_path / "claims")


@pytest.fixture(scope="module")
def environments():
    return {simulated: records.environment(SimpleNamespace(name="cpu", device="a test", simulated=simulated))
            for simulated in (True, False)}


@pytest.fixture
def record(environments):
    return records.Record("1_small", {"draws": np.int64(3)}, environments[False])


@pytest.fixture
def simulated(environments):
    return records.Record("1_small", {}, environments[True])


def finish(record):
    record.verdict("A01", "not testable here", "no device", missing="a GPU")
    record.verdict("A02", "reproduced", "0 of 64 differ", measured="0 of 64")
    return record


def test_a_saved_record_comes_back_as_it_was(record, tmp_path):
    record.measure(**CASE, metric="time_us", value=np.float32(2.5), unit="us", p10=2, p90=np.float64(3), n=12,
                   cache="cold")
    path = finish(record).save(tmp_path / "new folder" / "1_small.json")
    document = records.load(path)
    assert document["parameters"] == {"draws": 3}
    assert document["measurements"] == [{
        **CASE, "metric": "time_us", "value": 2.5, "unit": "us", "p10": 2, "p90": 3.0, "n": 12,
        "cache": "cold", "host": False, "status": "passed", "reason": None}]
    assert [(v["claim"], v["verdict"], v["missing"]) for v in document["verdicts"]] == [
        ("A01", "not testable here", "a GPU"), ("A02", "reproduced", None)]
    assert document["duration_s"] >= 0
    assert os.listdir(path.parent) == ["1_small.json"], "nothing is left beside the record"


def test_the_environment_names_what_a_run_depends_on(environments):
    environment = environments[True]
    assert environment["packages"]["numpy"] == np.__version__
    assert environment["cpu"]["cores"] >= 1
    hashes = environment["kernels"]
    assert all(len(value) == 64 and not name.startswith("/") for name, value in hashes.items())
    assert environment["driver"] is None and environment["clocks"] == {"before": None}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32("nan"), np.float64("-inf")])
def test_what_json_cannot_hold_is_refused_where_it_arises(record, value):
    with pytest.raises(ValueError, match=r"gemm / 1_plain \(M=1, codes=int8\) max_abs: value is -?(nan|inf)"):
        record.measure(**CASE, metric="max_abs", value=value)
    with pytest.raises(ValueError, match="parameters: scale is"):
        records.Record("1_small", {"scale": value}, record.environment)
    with pytest.raises(TypeError, match="parameters: x is a object"):
        records.Record("1_small", {"x": object()}, record.environment)
    assert record.measurements == []


@pytest.mark.parametrize("change, message", [
    ({"status": "skipped", "value": None}, "status 'skipped' needs a reason"),
    ({"status": "wrong_result", "reason": "off by 3"}, "wrong result"),
    ({"status": "runtime_error", "reason": "died", "metric": "max_abs"}, "only a run that ended"),
    ({"status": "fine"}, "status: 'fine' is not one of"),
    ({"cache": "lukewarm"}, "cache: 'lukewarm' is not one of"),
    ({"n": 0}, "n: 0 is less than"),
    ({"p10": 6.0}, "outside p10 6.0"),
    ({"value": None, "p90": 6.0}, "a spread without a value"),
    ({"value": "5"}, "value: '5' is not of type"),
    ({"case": {"shape": [1, 2]}}, r"case.shape: \[1, 2\] is not of type"),
])
def test_a_measurement_that_breaks_a_rule_is_refused(record, change, message):
    with pytest.raises(ValueError, match=message) as error:
        record.measure(**{**CASE, "metric": "time_us", "value": 5.0, **change})
    assert "gemm / 1_plain" in str(error.value)


def test_a_wrong_result_keeps_its_error_figures(record):
    record.measure(**CASE, metric="max_abs", value=4.0, status="wrong_result", reason="tail unwritten")
    record.measure(**CASE, metric="time_us", value=None, status="wrong_result", reason="tail unwritten")
    assert [m["value"] for m in record.measurements] == [4.0, None]


def test_a_cell_can_be_run_again(record):
    record.measure(**CASE, metric="max_abs", value=1.0)
    record.measure(**{**CASE, "case": {"M": 2}}, metric="max_abs", value=1.5)
    with pytest.warns(UserWarning, match="replaces"):
        record.measure(**CASE, metric="max_abs", value=2.0)
    assert [m["value"] for m in record.measurements] == [2.0, 1.5]
    record.verdict("A02", "contradicted", "2 of 64 differ")
    with pytest.warns(UserWarning, match="A02"):
        record.verdict("A02", "reproduced", "0 of 64 differ")
    assert [v["verdict"] for v in record.verdicts] == ["reproduced"]


@pytest.mark.parametrize("arguments, message", [
    (("Z01", "reproduced", "x"), "no claim 'Z01'; its claims are: A01, A02"),
    (("A02", "Reproduced", "x"), "'Reproduced' is not one of"),
    (("A02", "reproduced", ""), "evidence"),
    (("A02", "not testable here", "no GPU here"), "must name the part"),
    (("A02", "reproduced", "x", "", "a GPU"), "lacks a part"),
])
def test_a_verdict_that_breaks_a_rule_is_refused(record, arguments, message):
    with pytest.raises(ValueError, match=message):
        record.verdict(*arguments)
    assert record.verdicts == []


def test_no_speed_from_a_simulation(simulated):
    with pytest.raises(ValueError, match="simulated"):
        simulated.measure(**CASE, metric="time_us", value=5.0)
    with pytest.raises(ValueError, match="A01: 'reproduced' on a speed claim"):
        simulated.verdict("A01", "reproduced", "fast")
    with pytest.raises(ValueError, match="A01: 'reproduced' on a speed claim"):
        simulated.verdict("A01", "reproduced", "fast", host=True)  # said, but nothing was measured
    simulated.measure(kernel="gemm", variant="numpy", case={}, metric="time_us", value=5.0, host=True)
    with pytest.raises(ValueError, match="A01: 'reproduced' on a speed claim"):
        simulated.verdict("A01", "reproduced", "fast")
    simulated.verdict("A01", "reproduced", "NumPy on the CPU", host=True)
    simulated.verdict("A02", "reproduced", "an error counts in a simulation")
    simulated.save("")


def test_every_claim_needs_a_verdict(record, tmp_path):
    record.verdict("A02", "reproduced", "x")
    with pytest.raises(ValueError, match="no verdict on A01"):
        record.save(tmp_path / "r.json")
    assert not (tmp_path / "r.json").exists()


def test_a_record_overwrites_only_itself(record, environments, tmp_path):
    path = tmp_path / "r.json"
    finish(record).save(path)
    record.measure(**CASE, metric="max_abs", value=1.0)
    record.save(path)
    assert len(records.load(path)["measurements"]) == 1
    before = path.read_bytes()
    other = finish(records.Record("1_small", {"draws": 4}, environments[False]))
    with pytest.raises(FileExistsError, match="r.json holds another record"):
        other.save(path)
    assert path.read_bytes() == before
    assert other.save("") is None


def test_a_file_leaves_out_what_is_not_said_and_loading_gives_it_back(record, tmp_path):
    record.measure(**CASE, metric="max_abs", value=1.23456789e-7)
    record.measure(**CASE, metric="checksum", value=281474976710655)
    record.measure(**CASE, metric="rms", value=None, status="wrong_result", reason="nan")
    record.measure(**CASE, metric="cosine", value=0.99999949, p10=0.9999992, p90=0.99999951, n=9, cache="warm",
                   host=True)
    path = finish(record).save(tmp_path / "r.json")
    written = json.loads(path.read_text())["measurements"]
    assert [set(entry) - {*CASE, "metric", "value"} for entry in written] == [
        set(), set(), {"status", "reason"}, {"p10", "p90", "n", "cache", "host"}]
    assert [entry["value"] for entry in written] == [1.23457e-7, 281474976710655, None, 0.999999]
    back = records.load(path)["measurements"]
    assert [set(entry) for entry in back] == [set(record.measurements[0])] * 4
    assert back[2] == record.measurements[2]
    assert back[3]["p10"] <= back[3]["value"] <= back[3]["p90"] and (back[3]["n"], back[3]["host"]) == (9, True)


def test_loading_names_file_entry_and_fault(record, tmp_path):
    record.measure(**CASE, metric="max_abs", value=1.0)
    path = finish(record).save(tmp_path / "r.json")
    good = path.read_text()

    def fault(change):
        document = json.loads(good)
        change(document)
        path.write_text(json.dumps(document))
        with pytest.raises(ValueError) as error:
            records.load(path)
        assert str(path) in str(error.value)
        return str(error.value)

    assert "'duration_s' is a required" in fault(lambda d: d.pop("duration_s"))
    assert "measurements[0].status: 'ok'" in fault(lambda d: d["measurements"][0].update(status="ok"))
    assert "NaN is no JSON value" in fault(lambda d: d["measurements"][0].update(value=float("nan")))
    assert "more than one verdict on A01" in fault(lambda d: d["verdicts"].append(d["verdicts"][0]))
    assert "no claim 'A09'" in fault(lambda d: d["verdicts"][0].update(claim="A09"))
    assert "must name the part" in fault(lambda d: d["verdicts"][0].update(missing=None))
    assert "needs a reason" in fault(lambda d: d["measurements"][0].update(status="skipped", value=None))
    path.write_text(good[:100])
    with pytest.raises(ValueError, match="r.json"):
        records.load(path)


def test_a_verdict_shows_as_an_escaped_box_with_an_anchor(record):
    box = record.verdict("A01", "contradicted", "<script>alert(1)</script>", measured="2 < 3")
    html = box._repr_html_()
    assert 'id="A01"' in html and "x &lt; y &amp; z" in html and "2 &lt; 3" in html
    assert "<script>" not in html
    assert repr(box) == "A01 contradicted: <script>alert(1)</script>"


def test_until_it_is_saved_every_figure_is_a_line_of_a_file(environments, tmp_path):
    path = tmp_path / "not there yet" / "r.json"
    record = records.Record("1_small", {"seed": 3}, environments[False], path)
    record.measure(**CASE, metric="max_abs", value=1.5)
    finish(record)
    lines = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert lines[0]["notebook"] == "1_small" and lines[0]["parameters"] == {"seed": 3}
    assert lines[1] == {"measurement": CASE | {"metric": "max_abs", "value": 1.5}}
    assert [line["verdict"]["claim"] for line in lines[2:]] == [v["claim"] for v in record.verdicts]
    record.save(path)
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]


def test_what_another_run_has_left_stays(environments, tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("left\n")
    finish(records.Record("1_small", {}, environments[False], tmp_path / "r.json")).save(tmp_path / "r.json")
    assert path.read_text().startswith("left\n{")


def test_figures_stay_in_memory_where_the_file_cannot_be_written(environments, tmp_path):
    (tmp_path / "r.jsonl").mkdir()
    with pytest.warns(UserWarning, match="r.jsonl cannot be written"):
        record = records.Record("1_small", {}, environments[False], tmp_path / "r.json")
    record.measure(**CASE, metric="max_abs", value=1.5)
    assert len(record.measurements) == 1
