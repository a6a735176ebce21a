"""Passes of llama.cpp in this process, where torch.profiler sees its kernels like any others."""

import ctypes
import os
from pathlib import Path

import numpy as np

from kernelbook.backends.source import BackendUnavailable
from kernelbook.peers.llama_cpp import library as llama


class Session:
    """A model loaded by llama.cpp, whole on the first GPU, with room for passes of up to `tokens` tokens at once.

        with Session("model.gguf", tokens=512) as session:
            session.prefill(tokens)          # one pass over an empty memory, waited for
            session.logits                   # of the last token, float32 [vocabulary]

    path: a GGUF file, such as model_file.write_gguf writes.
    gpu: False runs on the CPU. threads: of the CPU, which looks embeddings up in either case (llama.cpp takes 4).
    One micro-batch is one batch, flash attention is on, keys and values are cached as float16.
    Raises BackendUnavailable where llama.cpp is not built, or not for a GPU when one is asked for; FileNotFoundError
    without such a file; ValueError below 1 token; RuntimeError, with what llama.cpp says, where it cannot load the
    model or has no memory for it.
    """

    def __init__(self, path: str | os.PathLike, tokens: int = 512, *, gpu: bool = True, threads: int | None = None):
        self._model = self._context = None
        if tokens < 1:
            raise ValueError(f"tokens = {tokens}; expected at least 1")
        if not Path(path).is_file():
            raise FileNotFoundError(f"no model file {path}")
        lib = self._lib = llama.load()
        if gpu and (reason := llama.gpu_missing()):
            raise BackendUnavailable(reason)
        llama.complaints()
        params = lib.llama_model_default_params()
        if gpu:
            params.n_gpu_layers, params.split_mode = -1, llama.ONE_GPU
        else:
            self._no_devices = (ctypes.c_void_p * 1)()  # a list that ends at once; none at all would mean every GPU
            params.n_gpu_layers, params.devices = 0, ctypes.addressof(self._no_devices)
        self._model = lib.llama_model_load_from_file(os.fsencode(path), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp does not load {path}: {llama.complaints() or 'it does not say why'}")
        self.vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

        params = lib.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self.tokens = tokens
        if threads:
            params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = llama.FLASH_ATTENTION
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            said = llama.complaints()
            self.close()
            raise RuntimeError(f"llama.cpp has no room for passes of {tokens} tokens: {said or 'it does not say why'}")
        self._memory = lib.llama_get_memory(self._context)
        self._decoded = False

    def prefill(self, tokens: np.ndarray) -> None:
        """One pass over token numbers [count] from an empty memory, at most the session's `tokens`; returns when the
        GPU is done. Raises ValueError for other tokens, RuntimeError where llama.cpp fails or the session is closed."""
        if not self._context:
            raise RuntimeError("this session is closed")
        given = np.asarray(tokens)
        if given.ndim != 1 or not 1 <= len(given) <= self.tokens or not np.issubdtype(given.dtype, np.integer):
            raise ValueError(f"tokens are {given.dtype} {list(given.shape)}; expected 1 to {self.tokens} whole numbers")
        if given.min() < 0 or given.max() >= self.vocabulary:
            raise ValueError(f"tokens lie in {given.min()}..{given.max()}; expected 0..{self.vocabulary - 1}")
        given = np.ascontiguousarray(given, np.int32)
        self._lib.llama_memory_clear(self._memory, False)  # forgets; the pass itself starts from a state of zeros
        batch = self._lib.llama_batch_get_one(given.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)), len(given))
        status = self._lib.llama_decode(self._context, batch)
        self._lib.llama_synchronize(self._context)
        if status:
            raise RuntimeError(f"llama_decode returned {status} for {len(given)} tokens: {llama.complaints()}")
        self._decoded = True

    @property
    def logits(self) -> np.ndarray:
        """float32 [vocabulary], those of the last token of the last pass. Raises RuntimeError before the first."""
        if not self._context or not self._decoded:
            raise RuntimeError("no logits: this session is closed, or has run no pass")
        pointer = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self.vocabulary,)).copy()

    def close(self) -> None:
        """Free the model and all its memory; a second call does nothing."""
        if self._context:
            self._lib.llama_free(self._context)
        if self._model:
            self._lib.llama_model_free(self._model)
        self._model = self._context = None

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_) -> None:
        self.close()
