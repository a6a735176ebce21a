"""llama.cpp's C interface by ctypes: the calls and structures that a pass needs, as llama.h of one version has them."""

import ctypes
import functools
import os
import re
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int8, c_int32, c_size_t, c_uint32, c_void_p
from pathlib import Path

from kernelbook import ROOT
from kernelbook.backends.source import BackendUnavailable

GGML_VERSION = "0.25.3"
"""Version of ggml, llama.cpp's library of tensors, whose llama.h the structures below follow."""

ONE_GPU = 0  # LLAMA_SPLIT_MODE_NONE
FLASH_ATTENTION = 1  # LLAMA_FLASH_ATTN_TYPE_ENABLED
GGML_LOG_WARN, GGML_LOG_ERROR, GGML_LOG_CONTINUES = 3, 4, 5


class ModelParams(ctypes.Structure):
    """llama_model_params"""

    _fields_ = [("devices", c_void_p), ("tensor_buft_overrides", c_void_p),
                ("n_gpu_layers", c_int32), ("split_mode", c_int32), ("load_mode", c_int32), ("lazy_mode", c_int32),
                ("main_gpu", c_int32), ("tensor_split", c_void_p),
                ("progress_callback", c_void_p), ("progress_callback_user_data", c_void_p), ("kv_overrides", c_void_p),
                *((name, c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts", "no_host", "no_alloc",
                                              "load_mtp"))]


class ContextParams(ctypes.Structure):
    """llama_context_params"""

    _fields_ = [*((name, c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq",
                                                "n_outputs_max", "n_outputs_max_per_seq")),
                *((name, c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type", "rope_scaling_type",
                                               "pooling_type", "attention_type", "flash_attn_type")),
                *((name, c_float) for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor",
                                               "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")),
                ("yarn_orig_ctx", c_uint32), ("defrag_thold", c_float),
                ("cb_eval", c_void_p), ("cb_eval_user_data", c_void_p), ("type_k", c_int32), ("type_v", c_int32),
                ("abort_callback", c_void_p), ("abort_callback_data", c_void_p),
                *((name, c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload", "swa_full",
                                              "kv_unified")),
                ("samplers", c_void_p), ("n_samplers", c_size_t), ("ctx_other", c_void_p)]


class Batch(ctypes.Structure):
    """llama_batch"""

    _fields_ = [("n_tokens", c_int32), ("token", POINTER(c_int32)), ("embd", POINTER(c_float)),
                ("pos", POINTER(c_int32)), ("n_seq_id", POINTER(c_int32)), ("seq_id", POINTER(POINTER(c_int32))),
                ("logits", POINTER(c_int8))]


LogCallback = ctypes.CFUNCTYPE(None, c_int32, c_char_p, c_void_p)

FUNCTIONS = {
    "llama_backend_init": (None, []),
    "llama_log_set": (None, [LogCallback, c_void_p]),
    "llama_supports_gpu_offload": (c_bool, []),
    "llama_print_system_info": (c_char_p, []),
    "llama_model_default_params": (ModelParams, []),
    "llama_model_load_from_file": (c_void_p, [c_char_p, ModelParams]),
    "llama_model_free": (None, [c_void_p]),
    "llama_model_get_vocab": (c_void_p, [c_void_p]),
    "llama_vocab_n_tokens": (c_int32, [c_void_p]),
    "llama_context_default_params": (ContextParams, []),
    "llama_init_from_model": (c_void_p, [c_void_p, ContextParams]),
    "llama_free": (None, [c_void_p]),
    "llama_get_memory": (c_void_p, [c_void_p]),
    "llama_memory_clear": (None, [c_void_p, c_bool]),
    "llama_batch_get_one": (Batch, [POINTER(c_int32), c_int32]),
    "llama_decode": (c_int32, [c_void_p, Batch]),
    "llama_synchronize": (None, [c_void_p]),
    "llama_get_logits_ith": (POINTER(c_float), [c_void_p, c_int32]),
}


def default_folder() -> Path:
    """Where `make llama.cpp` builds: .llama.cpp in the checkout."""
    return ROOT / ".llama.cpp"


def folder() -> Path:
    """Where libllama.so and the libraries it needs are looked for: $LLAMA_CPP_LIB_PATH, else those of
    `make llama.cpp`."""
    return Path(os.environ.get("LLAMA_CPP_LIB_PATH") or default_folder() / "lib")


def load() -> ctypes.CDLL:
    """llama.cpp's library, its functions declared. It stays in the process once it is loaded.

    Raises BackendUnavailable, naming the file and what to do, where it is not built, does not load, or is of another
    version than the calls are declared for.
    """
    return _load(folder().resolve())


@functools.cache
def _load(place):
    file = place / "libllama.so"
    if not file.is_file():
        raise BackendUnavailable(f"llama.cpp is not built: no {file}; `make llama.cpp` builds it, and "
                                 "LLAMA_CPP_LIB_PATH names a folder that has it")
    if (place / "libggml-cuda.so").is_file():
        _load_cuda_libraries()
    try:
        library = ctypes.CDLL(str(file))
        ggml = ctypes.CDLL(str(place / "libggml-base.so"))
        ggml.ggml_version.restype = c_char_p
        version = ggml.ggml_version().decode()
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"llama.cpp does not load: {error}") from error
    if version != GGML_VERSION:
        raise BackendUnavailable(f"{place} holds llama.cpp with ggml {version}; expected {GGML_VERSION}, for which its "
                                 "calls are declared: `make llama.cpp` builds that")
    library.llama_log_set(_keep_log, None)
    library.llama_backend_init()
    return library


def _load_cuda_libraries():
    """cuBLAS and the CUDA runtime from wherever they lie, a wheel or the toolkit: libggml-cuda.so names them only."""
    for name in ("cudart", "cublas"):
        try:
            from cuda.pathfinder import load_nvidia_dynamic_lib
            load_nvidia_dynamic_lib(name)
        except Exception as error:
            raise BackendUnavailable("llama.cpp is built for CUDA, and its CUDA library does not load here: "
                                     f"{name}: {error}".splitlines()[0]) from error


def gpu_missing() -> str | None:
    """Why llama.cpp cannot run on a GPU here, on one line; None where it can."""
    try:
        library = load()
    except BackendUnavailable as error:
        return str(error)
    if not (folder() / "libggml-cuda.so").is_file():
        return f"llama.cpp in {folder()} is built for the CPU only; `make llama.cpp` builds it for the GPU"
    if not library.llama_supports_gpu_offload():
        return f"llama.cpp finds no GPU: {complaints() or 'it does not say why'}"
    import torch
    major, minor = torch.cuda.get_device_capability(0)
    built = re.search(r"ARCHS = ([\d,]+)", library.llama_print_system_info().decode())[1].split(",")
    # code for 8.0 runs on 8.6, and on no other major version; llama.cpp would end the process where it finds none
    if not any(major == int(arch) // 100 and int(arch) // 10 <= 10 * major + minor for arch in built):
        versions = ", ".join(f"{int(arch) / 100:.1f}" for arch in built)
        return (f"llama.cpp in {folder()} is built for {versions}, and the GPU has compute capability {major}.{minor}; "
                "`make llama.cpp` builds it for that")
    return None


def complaints() -> str:
    """Warnings and errors that llama.cpp has logged since the last call, to say why something failed."""
    text = " ".join("".join(_log).split())
    _log.clear()
    return text


_log: list[str] = []
_complaining = False


@LogCallback
def _keep_log(level, text, _):
    """llama.cpp logs hundreds of lines on what it loads; what matters is what it complains of."""
    global _complaining
    if level != GGML_LOG_CONTINUES:
        _complaining = level in (GGML_LOG_WARN, GGML_LOG_ERROR)
    if _complaining and len(_log) < 100:
        _log.append(text.decode(errors="replace"))
