"""Other people's kernels for the gated delta rule. All are optional.

A peer takes 16-bit q, k, v and beta, converted before the clock starts, with q and k normalized and q scaled already:
the work of our `GatedDeltaNet.prepare_recurrence`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kernelbook.ops.gated_delta_net import Inputs
from kernelbook.peers import missing


@dataclass(frozen=True)
class DeltaNetPeer:
    """name: the variant's name in records. missing: None, or why it cannot run here.
    prepare: (Inputs, float32 in host memory) -> a callable that returns o [tokens, value_heads, 128] on the device.
    """

    name: str
    missing: str | None
    prepare: Callable


def _fla(inputs: Inputs) -> Callable:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def device(x, dtype):
        return torch.from_numpy(x[None]).cuda().to(dtype)

    q, k, v, beta = (device(x, torch.bfloat16) for x in (inputs.q, inputs.k, inputs.v, inputs.beta))
    g = device(inputs.g, torch.float32)

    def call():
        with torch.no_grad():
            o, _ = chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0, initial_state=None, output_final_state=True)
            return o[0]
    return call


def all_peers() -> list[DeltaNetPeer]:
    """Every peer this collection knows, with what is missing where it cannot run."""
    return [DeltaNetPeer("fla_chunk_bf16", missing("fla.ops.gated_delta_rule"), _fla)]
