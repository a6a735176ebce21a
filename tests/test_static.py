"""The record of `make static` and the report's section on it, from a kernel or two; no source is left out."""

import json

import pytest

from kernelbook import records, report, static, toolchain
from kernelbook.backends.source import KERNELS
from kernelbook.cli import main

targets = toolchain.targets()
compilers = pytest.mark.skipif(targets["gfx942"] is not None or targets["sm_90a"] is not None,
                               reason=str(targets["gfx942"] or targets["sm_90a"]))


def row(**changes):
    return {"source": "q4_probe/3_int8_dot.cu", "defines": {"BATCH": 16}, "target": "gfx942", "compiler": "a clang",
            "kernel": "q4_int8_dot", "registers": 60, "spill_bytes": 0, "stack_bytes": 0, "shared_bytes": 0, "fused": 8,
            "dots_per_mac": 0.25, "instructions": 300, "matrix": {}} | changes


ROWS = [row(), row(target="gfx936", registers=None, spill_bytes=None, stack_bytes=None, compiler="a clang <as text>"),
        row(source="int8_pv/2_decode.cu", defines={"PV": "INT8"}, kernel="decode", spill_bytes=20, dots_per_mac=None,
            matrix={"v_mfma_i32_16x16x32_i8": {"count": 32, "macs": 8192}})]


@pytest.fixture
def saved(tmp_path):
    found = static.record(ROWS, ["sm_90a", "gfx942", "gfx936"])
    return static.save(found, tmp_path / "static.json")


def test_every_kernel_is_compiled_or_a_header_of_one():
    sources = {source.path for source in static.sources()}
    assert sources == {str(file.relative_to(KERNELS)) for file in KERNELS.rglob("*.cu")}


def test_every_kernel_has_a_target_and_what_is_missing_has_a_reason():
    known = list(toolchain.targets())
    found = {path: (absent, reason) for path, absent, reason in static.absences(known)}
    assert {"prefill_gemm/5_wgmma.cu", "int8_pv/6_prefill_wgmma.cu", "grouped_gemm/5_panels.cu"} <= found.keys()
    for absent, reason in found.values():
        if "wgmma" in reason:
            assert set(known) - set(absent) == {"sm_90a"}
        else:
            assert set(absent) == {target for target in known if target.startswith("gfx")} and "mma.sync" in reason


def test_the_record_holds_every_figure_or_why_not(saved):
    document = records.load(saved)
    assert document["notebook"] == "static" and document["parameters"]["targets"] == ["sm_90a", "gfx942", "gfx936"]
    found = {(m["kernel"], m["case"]["target"], m["metric"]): m for m in document["measurements"]}
    assert found["q4_int8_dot", "gfx942", "registers"]["value"] == 60
    assert found["q4_int8_dot", "gfx942", "dots_per_mac"]["value"] == 0.25
    unknown = found["q4_int8_dot", "gfx936", "registers"]
    assert (unknown["value"], unknown["status"]) == (None, "skipped")
    assert unknown["reason"] == "not told by a clang <as text>"
    assert found["decode", "gfx942", "matrix_instructions"]["value"] == 32
    assert found["decode", "gfx942", "macs_of_a_matrix_instruction"]["value"] == 8192
    absent = found["5_wgmma", "gfx942", "registers"]
    assert absent["value"] is None and "sm_90a alone" in absent["reason"]
    assert ("5_wgmma", "sm_90a", "registers") not in found


def test_the_record_is_written_anew(saved):
    first = saved.read_bytes()
    static.save(static.record(ROWS[:1], ["gfx942"]), saved)
    assert saved.read_bytes() != first


def test_the_report_shows_each_family(saved, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"notebooks": {}}))
    index = report.build(tmp_path / "run", machine_code=saved).read_text(encoding="utf-8")
    words = " ".join(index.split())
    assert '<h2 id="machine-code">Machine code</h2>' in words and 'href="static.json"' in words
    assert (tmp_path / "run" / "static.json").read_bytes() == saved.read_bytes()
    assert "Compilers: a clang; a clang &lt;as text&gt;." in words
    assert "q4_probe: 1 kernel on gfx942, gfx936; no spills" in words
    assert "int8_pv: 1 kernel on gfx942; spills: decode on gfx942 20 B" in words
    assert "int8_pv/6_prefill_wgmma.cu is not for gfx942, gfx936: written for wgmma" in words
    assert "32 v_mfma_i32_16x16x32_i8" in words and "<td>8192</td>" in words
    assert "Machine code" not in report.build(tmp_path / "run").read_text(encoding="utf-8")
    assert "Machine code" not in report.build(tmp_path / "run", machine_code=tmp_path / "no").read_text("utf-8")


@compilers
def test_the_command_prints_and_records(monkeypatch, tmp_path, capsys):
    probe = [source for source in static.sources() if source.path == "q4_probe/3_int8_dot.cu"][:1]
    monkeypatch.setattr(static, "sources", lambda: probe)
    assert main(["static", "--target", "gfx942", "gfx936", "--out", str(tmp_path / "s.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("| kernel | target | registers |") and out.count("q4_int8_dot") == 2
    document = records.load(tmp_path / "s.json")
    section, = static.sections(document)
    assert (section["family"], section["kernels"], section["targets"]) == ("q4_probe", 1, ["gfx942", "gfx936"])
    gfx942, gfx936 = section["rows"]
    assert gfx942["registers"] > 0 and gfx936["registers"] is None and gfx942["dots_per_mac"] == 0.25
