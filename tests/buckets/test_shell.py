import json

import pytest

from kernelbook.cli import main

H200 = "h200_llama_cpp_kern_sum.csv"


def test_a_breakdown_as_text(data, capsys):
    assert main(["buckets", str(data / "two_streams.json")]) == 0
    out, errors = capsys.readouterr()
    assert "passes: 2, marks 'pass'" in out and "NVIDIA H200, 132 multiprocessors" in out and "0.000 ms, closes" in out
    assert out.split("somebody_elses_kernel")[0].endswith("1 x ") and "-0.020" in out
    assert "warning: " in errors and "lie in none of the marks" in errors
    lines = out.splitlines()
    top = next(i for i, line in enumerate(lines) if line.startswith("bucket "))
    assert {len(line) for line in lines[top:top + 6]} == {len(lines[top])}


def test_json_holds_every_kernel(data, capsys):
    assert main(["buckets", str(data / H200), "--passes", "3", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    part, = content["breakdowns"]
    assert sum(len(bucket["kernels"]) for bucket in part["buckets"]) == 22 and content["side_by_side"] == []


def test_launches_predicted_beside_counted(data, capsys):
    options = ["buckets", str(data / H200), "--passes", "kernel:mul_mat_vec_q", "--predict", "Qwen3.5-27B"]
    assert main([*options, "--multiprocessors", "132"]) == 0
    assert "differs" not in capsys.readouterr().out
    assert main([*options, "--multiprocessors", "170", "--json"]) == 0
    launches = json.loads(capsys.readouterr().out)["breakdowns"][0]["launches"]
    assert [(x["predicted"], x["counted"]) for x in launches if not x["agrees"]] == [(320, 480)]
    assert main(options) == 2 and "give --multiprocessors" in capsys.readouterr().err
    assert main([*options[:-1], "GPT-5"]) == 2 and "no model 'GPT-5'; there are: Qwen3.5-27B" in capsys.readouterr().err


def test_two_files_stand_side_by_side(data, capsys):
    assert main(["buckets", str(data / H200), str(data / "rocprof_stats.csv"), "--passes", "3", "--passes", "12"]) == 0
    assert "share of the gap" in capsys.readouterr().out


def test_two_gpus_do_not_stand_beside_one(data, database, capsys):
    assert main(["buckets", str(database()), str(data / H200), "--passes", "2", "--passes", "3"]) == 0
    out, errors = capsys.readouterr()
    assert "share of the gap" not in out and "not side by side" in errors and out.count("GPU 1") == 1


def test_what_does_not_close_exits_with_1(data, capsys):
    assert main(["buckets", str(data / H200), "--passes", "3", "--wall-ms", "123"]) == 1
    out, errors = capsys.readouterr()
    assert "DOES NOT CLOSE" in out and "52.06 ms, 42.3%, above the wall time of 123 ms" in errors


@pytest.mark.parametrize("arguments, message", [
    (["nowhere.csv"], "No such file"), ([H200, "--rules", "nowhere.yaml"], "No such file"),
    ([H200, "--passes", "x"], "passes 'x'"),
    ([H200, "two_streams.json", H200, "--passes", "1", "--passes", "2"], "2 times --passes for 3 files"),
    ([H200, "--wall-ms", "nan"], "expected one above 0"), (["two_gpus.sql"], "holds no trace of a known format"),
])
def test_errors_exit_with_2_and_print_nothing_else(data, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(data)
    assert main(["buckets", *arguments]) == 2
    out, errors = capsys.readouterr()
    assert out == "" and errors.startswith("error: ") and message in errors


def test_rules_of_ones_own(data, tmp_path, capsys):
    path = tmp_path / "my rules.yaml"
    path.write_text("- {bucket: everything, patterns: ['.']}\n")
    assert main(["buckets", str(data / H200), "--passes", "3", "--rules", str(path)]) == 0
    assert "everything" in capsys.readouterr().out
