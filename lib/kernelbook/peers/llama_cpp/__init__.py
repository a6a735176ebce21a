"""llama.cpp as a peer: a whole pass over a model of the article's shapes, in this process.

    path = write_gguf("model.gguf", shapes.QWEN3_5_27B)            # 15 GB of random Q4_0 weights
    with Session(path, tokens=512) as session:
        trace = buckets.profile(lambda: session.prefill(tokens))

`make llama.cpp` builds it, once; nothing of it is part of this collection. `missing()` says why it cannot run here.
"""

from kernelbook import peers
from kernelbook.peers.llama_cpp import library
from kernelbook.peers.llama_cpp.model_file import model_weights, random_weights, write_gguf
from kernelbook.peers.llama_cpp.session import Session

__all__ = ["Session", "missing", "model_weights", "random_weights", "write_gguf"]


def missing() -> str | None:
    """Why llama.cpp cannot be measured here, on one line; None where it can."""
    return peers.missing() or library.gpu_missing()
