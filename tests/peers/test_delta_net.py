"""What the peer is given: tried with a stand-in of its module, on the CPU."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kernelbook import peers
from kernelbook.ops import gated_delta_net as op
from kernelbook.peers import delta_net


def inputs(tokens=5, key_heads=2, value_heads=4):
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((tokens, key_heads, 128), np.float32) * np.float32(128 ** -0.5) for _ in range(2))
    v = rng.standard_normal((tokens, value_heads, 128), np.float32)
    gates = (rng.random((tokens, value_heads), np.float32) for _ in range(2))
    return op.Inputs(q, k, v, -next(gates), next(gates))


@pytest.fixture
def fla(monkeypatch):
    """Stands in for FLA: the recurrence in float64 on what it is given. Its calls."""
    calls = []

    def chunk_gated_delta_rule(q, k, v, g, beta, *, scale, initial_state, output_final_state):
        calls.append({"dtypes": [x.dtype for x in (q, k, v, g, beta)], "scale": scale})
        given = op.Inputs(*(x[0].double().numpy() for x in (scale * q, k, v, g, beta)))
        o, final = op.recurrence(given)
        return torch.from_numpy(o)[None], torch.from_numpy(final)[None] if output_final_state else None
    monkeypatch.setitem(sys.modules, "fla", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule",
                        SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule))
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    return calls


def test_fla_gets_our_recurrences_inputs(fla):
    peer, = delta_net.all_peers()
    call = peer.prepare(inputs())
    expected, _ = op.recurrence(inputs())
    for _ in range(2):
        out = call().float().numpy()
        assert out.shape == (5, 4, 128) and np.linalg.norm(out - expected) < 0.01 * np.linalg.norm(expected)
    bf16 = torch.bfloat16
    assert fla == 2 * [{"dtypes": [bf16, bf16, bf16, torch.float32, bf16], "scale": 1.0}]


def test_a_peer_that_is_missing_says_why(monkeypatch):
    peer, = delta_net.all_peers()
    assert peer.name == "fla_chunk_bf16"
    if not torch.cuda.is_available():
        assert peer.missing == "PyTorch sees no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", None)
    assert "fla.ops.gated_delta_rule does not import" in delta_net.all_peers()[0].missing
    assert peers.missing("math") is None
