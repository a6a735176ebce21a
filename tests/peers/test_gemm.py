import sys
import types

import numpy as np
import pytest
import torch

from kernelbook.peers import gemm


@pytest.fixture
def known():
    return {peer.name: peer for peer in gemm.all_peers()}


def test_without_cuda_every_peer_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = gemm.all_peers()
    assert [p.name for p in found] == ["cublas_bf16", "tinygemm_int4", "humming_int8", "humming_int4"]
    assert all("no CUDA device" in p.missing for p in found)


def test_a_peer_that_does_not_import_is_missing_and_the_others_are_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "humming.layer", None)  # makes its import fail
    found = {p.name: p.missing for p in gemm.all_peers()}
    assert found["cublas_bf16"] is None and found["tinygemm_int4"] is None
    assert found["humming_int8"].startswith("humming.layer does not import: ModuleNotFoundError")
    assert "\n" not in found["humming_int4"]


def test_a_peer_may_fail_to_import_in_any_way(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "humming").mkdir()
    (tmp_path / "humming" / "__init__.py").write_text("")
    (tmp_path / "humming" / "layer.py").write_text("raise RuntimeError('needs a card\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("humming", "humming.layer"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = {p.name: p.missing for p in gemm.all_peers()}
    assert found["humming_int8"] == "humming.layer does not import: RuntimeError: needs a card"
    sys.modules.pop("humming", None)


def test_a_peer_that_imports_is_not_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "humming", types.ModuleType("humming"))
    monkeypatch.setitem(sys.modules, "humming.layer", types.ModuleType("humming.layer"))
    assert [p.missing for p in gemm.all_peers()] == [None] * 4


@pytest.mark.parametrize("name, expected", [
    ("cublas_bf16", 2048 * 1024 * 2),                                  # two bytes a weight, no scales
    ("humming_int8", 2048 * 1024 + 2048 * 1024 // 32 * 2),             # a byte and a 16-bit scale a group
    ("humming_int4", 2048 * 1024 // 2 + 2048 * 1024 // 32 * 2),
    ("tinygemm_int4", 2048 * 1024 // 2 + 2048 * 1024 // 32 * 4),       # a bf16 scale and a bf16 zero
])
def test_weight_bytes(known, name, expected):
    assert known[name].weight_bytes(2048, 1024, 32) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")
@pytest.mark.parametrize("name, bound", [("cublas_bf16", 0.01), ("tinygemm_int4", 0.15),
                                         ("humming_int8", 0.01), ("humming_int4", 0.15)])
def test_peers_compute_the_product(known, name, bound):
    peer = known[name]
    if peer.missing:
        pytest.skip(peer.missing)
    rng = np.random.default_rng(0)
    w, x = rng.standard_normal((1024, 2048), np.float32), rng.standard_normal((4, 2048), np.float32)
    calls = peer.prepare(w, 32, 2)
    given = gemm.activations(peer, x)
    assert len(calls) == 2 and str(given.dtype) == f"torch.{peer.dtype}"
    for call in calls:
        out = call(given).float().cpu().numpy()
        assert np.linalg.norm(out - x @ w.T) <= bound * np.linalg.norm(x @ w.T)
