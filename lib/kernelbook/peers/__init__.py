"""Other people's kernels, measured beside ours where they import. All are optional.

`gemm` has those for a product with weights, `attention` those for attention over a cache of keys and values,
`delta_net` those for the gated delta net, and `llama_cpp` runs a whole model.
"""

import importlib


def missing(module: str | None = None) -> str | None:
    """Why a peer that comes with `module` cannot run here, on one line; None where it can.

    Without a module: whether PyTorch has a CUDA device, all that a peer within PyTorch needs.
    """
    import torch
    if not torch.cuda.is_available():
        return "PyTorch sees no CUDA device"
    if module:
        try:
            importlib.import_module(module)
        except Exception as error:  # a peer may fail to import in any way it likes; the notebook goes on without it
            return f"{module} does not import: {type(error).__name__}: {error}".splitlines()[0]
    return None
