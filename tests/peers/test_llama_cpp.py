"""llama.cpp as a peer. What needs its library runs where LLAMA_CPP_LIB_PATH or .llama.cpp/lib has one that loads."""

import re
import types

import gguf
import numpy as np
import pytest
import torch

from kernelbook import buckets, peers, qwen3_5
from kernelbook.backends.source import BackendUnavailable
from kernelbook.buckets import predictions
from kernelbook.formats import blocks_from_tiles, open_gguf, random_tiles, strips_from_blocks, tiles_from_blocks
from kernelbook.peers import llama_cpp
from kernelbook.peers.llama_cpp import Session, build, library, model_file, model_weights, random_weights, write_gguf
from kernelbook.shapes import QWEN3_5_27B, SMOLLM2_135M, Inventory, Projection

KEY_HEADS, VALUE_HEADS, STATE = 2, 6, 32  # 3 value heads a key head, as in the model
KEYS, VALUES = KEY_HEADS * STATE, VALUE_HEADS * STATE

TINY = Inventory("tiny", hidden=128, layers=4, heads=6, kv_heads=2, head_dim=64, ffn=192, vocabulary=96, projections=(
    Projection("gdn_qkv", 2 * KEYS + VALUES, 128, 3, "gdn_norm"),
    Projection("gdn_z", VALUES, 128, 3, "gdn_norm"),
    Projection("gdn_b", VALUE_HEADS, 128, 3, "gdn_norm"),
    Projection("gdn_a", VALUE_HEADS, 128, 3, "gdn_norm"),
    Projection("gdn_out", 128, VALUES, 3, "gdn"),
    Projection("q", 2 * 6 * 64, 128, 1, "attn_norm"),
    Projection("k", 2 * 64, 128, 1, "attn_norm"),
    Projection("v", 2 * 64, 128, 1, "attn_norm"),
    Projection("o", 128, 6 * 64, 1, "attention"),
    Projection("gate", 192, 128, 4, "ffn_norm"),
    Projection("up", 192, 128, 4, "ffn_norm"),
    Projection("down", 128, 192, 4, "ffn"),
))


# ---------------------------------------------------------------- the file

@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", TINY, seed=3)


def stored(reader, name):
    return next(t.data for t in reader.tensors if t.name == name)


def test_the_27b_file_has_every_key_and_tensor_llama_cpp_wants():
    parts = {t.file_name: t for t in model_file.tensors(QWEN3_5_27B)}
    assert len(parts) == 3 + 48 * 14 + 16 * 11
    assert sum(t.nbytes for t in parts.values()) == pytest.approx(15.14e9, rel=1e-3)
    assert parts["blk.0.attn_qkv.weight"].shape == (10240, 5120) and "blk.0.attn_q.weight" not in parts
    assert parts["blk.3.attn_q.weight"].shape == (12288, 5120) and "blk.3.ssm_a" not in parts
    assert parts["blk.62.ssm_conv1d.weight"].shape == (10240, 4) and parts["blk.62.ssm_dt.bias"].shape == (48,)
    assert parts["output.weight"].shape == parts["token_embd.weight"].shape == (248320, 5120)
    weights = sum(np.prod(t.shape) for t in parts.values() if t.quantized and t.layer is not None)
    assert weights == QWEN3_5_27B.weights == 24_350_556_160


def test_keys_of_the_27b(tmp_path):
    writer = model_file._writer(tmp_path / "keys.gguf", QWEN3_5_27B, 64, "27B")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    fields = open_gguf(tmp_path / "keys.gguf").fields
    found = {name.removeprefix("qwen35."): f.contents() for name, f in fields.items() if name.startswith("qwen35.")}
    assert found == {
        "context_length": 262144, "vocab_size": 248320, "embedding_length": 5120, "block_count": 64,
        "feed_forward_length": 17408, "attention.head_count": 24, "attention.head_count_kv": 4,
        "attention.key_length": 256, "attention.value_length": 256,
        "attention.layer_norm_rms_epsilon": pytest.approx(1e-6), "rope.freq_base": 1e7, "rope.dimension_count": 64,
        "rope.dimension_sections": [11, 11, 10, 0], "full_attention_interval": 4, "ssm.conv_kernel": 4,
        "ssm.inner_size": 6144, "ssm.state_size": 128, "ssm.time_step_rank": 48, "ssm.group_count": 16}
    assert fields["general.architecture"].contents() == "qwen35"


def test_what_is_written_is_read_back_with_value_heads_tiled(tiny):
    weights, reader = random_weights(TINY, 3), open_gguf(tiny)
    assert [t.name for t in reader.tensors] == [t.file_name for t in model_file.tensors(TINY)]
    np.testing.assert_array_equal(stored(reader, "blk.3.attn_q.weight"), weights("q", 3))
    np.testing.assert_array_equal(stored(reader, "blk.0.post_attention_norm.weight"), weights("ffn_norm", 0))

    # the file's value head h reads key head h % 2, transformers' head h reads h // 3
    z, stored_z = weights("gdn_z", 1), stored(reader, "blk.1.attn_gate.weight")
    a, stored_a = weights("A_log", 1), stored(reader, "blk.1.ssm_a")
    qkv, stored_qkv = weights("gdn_qkv", 1), stored(reader, "blk.1.attn_qkv.weight")
    out, stored_out = (strips_from_blocks(b, "Q4_0").dequantize()
                       for b in (weights("gdn_out", 1), stored(reader, "blk.1.ssm_out.weight")))
    np.testing.assert_array_equal(stored_qkv[:2 * KEYS], qkv[:2 * KEYS])
    for theirs, ours in enumerate([0, 3, 1, 4, 2, 5]):
        assert theirs % KEY_HEADS == ours // (VALUE_HEADS // KEY_HEADS)
        there, here = (slice(h * STATE, (h + 1) * STATE) for h in (theirs, ours))
        np.testing.assert_array_equal(stored_z[there], z[here])
        np.testing.assert_array_equal(stored_qkv[2 * KEYS:][there], qkv[2 * KEYS:][here])
        np.testing.assert_array_equal(stored_out[:, there], out[:, here])
        assert stored_a[theirs] == -np.exp(a[ours])


def test_tiles_are_stored_as_the_blocks_they_came_from(tmp_path):
    base, rng = random_weights(TINY, 0), np.random.default_rng(1)
    tiles = {"down": random_tiles(rng, 128, 192)}
    reader = open_gguf(write_gguf(tmp_path / "t.gguf", TINY, lambda name, layer: tiles.get(name, base(name, layer)),
                                  origin="tiles"))
    np.testing.assert_array_equal(stored(reader, "blk.2.ffn_down.weight"), blocks_from_tiles(tiles["down"]))
    np.testing.assert_array_equal(
        gguf.quants.dequantize(stored(reader, "blk.2.ffn_down.weight"), gguf.GGMLQuantizationType.Q4_0),
        tiles["down"].dequantize())


def test_random_weights_are_valid_repeatable_and_all_different():
    weights = random_weights(TINY, 0)
    first = weights("gate", 0)
    np.testing.assert_array_equal(first, random_weights(TINY, 0)("gate", 0))
    for other in (weights("gate", 1), weights("up", 0), random_weights(TINY, 1)("gate", 0)):
        assert (first != other).mean() > 0.9
    tiles = tiles_from_blocks(first)
    assert tiles.nonfinite() == (0, 0)
    assert 0.5 < tiles.dequantize().std() * 128 ** 0.5 < 2, "a product keeps the size of what it multiplies"
    assert {*np.unique(tiles.codes)} == {*range(-8, 8)}
    assert (np.exp(weights("A_log", 0)) >= 1).all()


def test_fewer_layers_are_the_first_ones(tmp_path, tiny):
    short, whole = open_gguf(write_gguf(tmp_path / "2.gguf", TINY, layers=2, seed=3)), open_gguf(tiny)
    assert short.get_field("qwen35.block_count").contents() == 2
    assert max(int(t.name.split(".")[1]) for t in short.tensors if t.name.startswith("blk.")) == 1
    np.testing.assert_array_equal(stored(short, "blk.1.ffn_up.weight"), stored(whole, "blk.1.ffn_up.weight"))


def test_the_same_file_is_kept_and_another_is_not_overwritten(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", TINY, layers=1)
    before = path.stat().st_mtime_ns
    assert write_gguf(path, TINY, layers=1) == path and path.stat().st_mtime_ns == before
    for other in ({"layers": 2}, {"layers": 1, "seed": 1}):
        with pytest.raises(FileExistsError, match=r"holds tiny, layers 0 to 0 of 4, Q4_0, random, seed 0, not tiny"):
            write_gguf(path, TINY, **other)
    foreign = tmp_path / "notes.txt"
    foreign.write_text("mine")
    with pytest.raises(FileExistsError, match="something else"):
        write_gguf(foreign, TINY)
    assert foreign.read_text() == "mine"


def test_a_truncated_file_is_not_taken_for_the_same(tmp_path, tiny):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    with pytest.raises(FileExistsError, match="something else"):
        write_gguf(cut, TINY, seed=3)


def test_nothing_is_left_where_writing_fails(tmp_path):
    base = random_weights(TINY, 0)
    with pytest.raises(ValueError, match=r"up of layer 2 is uint8 \[4, 72\]; expected uint8 \[192, 72\]"):
        write_gguf(tmp_path / "m.gguf", TINY, lambda name, layer: base(name, layer)[:4] if (name, layer) == ("up", 2)
                   else base(name, layer), origin="broken")
    with pytest.raises(ValueError, match="the scale of row 0"):
        bad = random_tiles(np.random.default_rng(0), 192, 128)
        bad.data[0, 0, :2] = 0xFF  # NaN
        write_gguf(tmp_path / "m.gguf", TINY, lambda name, layer: bad if name == "up" else base(name, layer),
                   origin="NaN")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5 << 30))
    with pytest.raises(OSError, match=r"takes 15\.1 GB, and .* has 5\.4 GB free; give a path on another disk"):
        write_gguf(tmp_path / "m.gguf", QWEN3_5_27B)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ValueError, match="SmolLM2-135M has no gated delta nets"):
        write_gguf(tmp_path / "m.gguf", SMOLLM2_135M)
    with pytest.raises(ValueError, match="layers = 65; Qwen3.5-27B has 1 to 64"):
        write_gguf(tmp_path / "m.gguf", QWEN3_5_27B, layers=65)
    with pytest.raises(ValueError, match="weights and origin go together"):
        write_gguf(tmp_path / "m.gguf", TINY, random_weights(TINY, 0))


# ---------------------------------------------------------------- the build and the library

def test_every_missing_tool_is_named_before_anything_is_downloaded(tmp_path, monkeypatch):
    monkeypatch.setattr(build.shutil, "which", lambda tool, path=None: None if tool in ("nvcc", "ninja") else tool)
    with pytest.raises(BackendUnavailable, match=r"without ninja \(pip install ninja\), nvcc \(NVIDIA's CUDA toolkit"):
        build.build(tmp_path / "x", architectures="90")
    assert not (tmp_path / "x").exists()


def test_no_gpu_and_no_architecture_says_what_to_give(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(build, "find_tools", lambda cuda: {})
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["--folder", str(tmp_path / "x")]) == 1
    assert "--architectures 90" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["sm_90", "9.0", "", "90,120"])
def test_an_architecture_is_a_number(given):
    with pytest.raises(ValueError, match="'90' for Hopper"):
        build._real(given)


def test_only_instances_that_the_model_cannot_launch_are_left_out(tmp_path):
    instances = tmp_path / "template-instances"
    instances.mkdir()
    files = {"mmq-instance-q4_0.cu": '#include "../mmq.cuh"\n\nDECL_MMQ_CASE(GGML_TYPE_Q4_0);\n',
             "mmq-instance-mxfp4.cu": "DECL_MMQ_CASE(GGML_TYPE_MXFP4);\n\nDECL_MMQ_CASE_W4A4(GGML_TYPE_MXFP4);\n",
             "mmf-instance-ncols_1.cu": "DECL_MMF_CASE(1);\n",
             "fattn-vec-instance-f16-f16.cu": "DECL_FATTN_VEC_CASE(64, GGML_TYPE_F16, GGML_TYPE_F16);\n",
             "fattn-tile-instance-dkq64-dv64.cu": "DECL_FATTN_TILE_CASE(64, 64);\n",
             "fattn-mma-f16-instance-ncols1_8-ncols2_8.cu": '#include "../fattn-mma-f16.cuh"\n\n'
                "DECL_FATTN_MMA_F16_CASE(128, 128, 8, 8);\nDECL_FATTN_MMA_F16_CASE(256, 256, 8, 8);\n"}
    for name, text in files.items():
        (instances / name).write_text(text)
    build.leave_out(tmp_path)
    left = {file.name: file.read_text() for file in instances.iterdir()}
    del files["mmq-instance-mxfp4.cu"], files["fattn-tile-instance-dkq64-dv64.cu"]
    name = "fattn-mma-f16-instance-ncols1_8-ncols2_8.cu"
    files[name] = files[name].replace("DECL_FATTN_MMA_F16_CASE(128, 128, 8, 8);\n", "")
    assert left == files
    assert re.findall(r"^DECL.*", (tmp_path / "left-out.cu").read_text(), re.M) == [
        "DECL_FATTN_MMA_F16_CASE(128, 128, 8, 8);", "DECL_FATTN_TILE_CASE(64, 64);",
        "DECL_MMQ_CASE(GGML_TYPE_MXFP4);", "DECL_MMQ_CASE_W4A4(GGML_TYPE_MXFP4);"]


def test_cublas_that_the_toolkit_lacks_comes_from_the_wheel_of_its_version(tmp_path, monkeypatch):
    home, site, links = tmp_path / "toolkit", tmp_path / "site", tmp_path / "links"
    (home / "lib64" / "stubs").mkdir(parents=True)
    (home / "lib64" / "stubs" / "libcuda.so").touch()
    for folder, major in (("cublas", 12), ("cu13", 13)):
        (site / "nvidia" / folder / "lib").mkdir(parents=True)
        (site / "nvidia" / folder / "lib" / f"libcublas.so.{major}").touch()
    monkeypatch.setattr(build.sys, "path", [str(site)])
    options = build._what_the_toolkit_lacks(home, "13", "c++", links)
    assert options == {"CMAKE_CUDA_FLAGS": f"-I{site}/nvidia/cu13/include",
                       "CUDA_cublas_LIBRARY": links / "libcublas.so"}
    assert (links / "libcublas.so").resolve() == site / "nvidia" / "cu13" / "lib" / "libcublas.so.13"
    assert build._what_the_toolkit_lacks(home, "12", "c++", links)["CMAKE_CUDA_FLAGS"].endswith("/cublas/include")
    with pytest.raises(BackendUnavailable, match="CUDA 14 toolkit .* has no cuBLAS; pip install nvidia-cublas$"):
        build._what_the_toolkit_lacks(home, "14", "c++", links)
    (home / "include").mkdir()
    (home / "include" / "cublas_v2.h").touch()
    assert build._what_the_toolkit_lacks(home, "14", "c++", links) == {}


def test_without_a_library_the_peer_says_how_to_build_it(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert re.fullmatch(r"llama.cpp is not built: no .*libllama.so; `make llama.cpp` builds it, and .*",
                        llama_cpp.missing())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert llama_cpp.missing() == peers.missing() == "PyTorch sees no CUDA device"


def test_a_broken_library_is_a_reason_not_an_error(tmp_path, monkeypatch):
    (tmp_path / "libllama.so").write_text("not a library")
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "llama.cpp does not load" in llama_cpp.missing() and "\n" not in llama_cpp.missing()


class FakeLibrary:
    def __init__(self, archs, gpu=True):
        self.llama_print_system_info = lambda: f"CUDA : ARCHS = {archs} | USE_GRAPHS = 1 | CPU : AVX2 = 1 | ".encode()
        self.llama_supports_gpu_offload = lambda: gpu


@pytest.mark.parametrize("archs, capability, reason", [
    ("900", (9, 0), None), ("800", (8, 9), None), ("800,900", (9, 0), None),
    ("900", (10, 0), r"is built for 9\.0, and the GPU has compute capability 10\.0; `make llama.cpp`"),
    ("890", (8, 6), r"built for 8\.9, .* capability 8\.6"), ("800,1200", (9, 0), r"built for 8\.0, 12\.0, .* 9\.0")])
def test_a_build_for_another_gpu_is_a_reason(tmp_path, monkeypatch, archs, capability, reason):
    (tmp_path / "libggml-cuda.so").touch()
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.setattr(library, "load", lambda: FakeLibrary(archs))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    found = library.gpu_missing()
    assert found is None if reason is None else re.search(reason, found)


def test_a_build_for_the_cpu_or_a_driver_that_fails_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path))
    monkeypatch.setattr(library, "load", lambda: FakeLibrary("900", gpu=False))
    assert "is built for the CPU only" in library.gpu_missing()
    (tmp_path / "libggml-cuda.so").touch()
    library.complaints()
    for level, text in ((2, b"loading\n"), (4, b"driver too old\n"), (5, b"by far\n"), (2, b"more\n")):
        library._keep_log(level, text, None)
    assert library.gpu_missing() == "llama.cpp finds no GPU: driver too old by far"


def test_a_source_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "find_tools", lambda cuda: {"cmake": "false", "ninja": "false", "c++": "false"})
    lists = tmp_path / "source" / "ggml" / "CMakeLists.txt"
    lists.parent.mkdir(parents=True)
    lists.write_text("".join(f"set(GGML_VERSION_{part} {number})\n" for part, number in
                             zip(("MAJOR", "MINOR", "PATCH"), (0, 21, 0), strict=True)))
    with pytest.raises(ValueError, match=r"holds ggml 0\.21\.0; expected 0\.25\.3, .*: remove the folder"):
        build.build(tmp_path, cuda=False)


# ---------------------------------------------------------------- passes

@pytest.fixture(scope="module")
def loaded():
    try:
        return library.load()
    except BackendUnavailable as error:
        pytest.skip(str(error))


def test_structures_are_laid_out_as_in_the_header(loaded):
    """Defaults that llama.h documents, which another layout would show elsewhere."""
    model, context = loaded.llama_model_default_params(), loaded.llama_context_default_params()
    assert (model.n_gpu_layers, model.main_gpu, model.use_extra_bufts, model.vocab_only) == (-1, 0, True, False)
    assert (context.n_ctx, context.n_batch, context.n_ubatch, context.n_seq_max) == (512, 2048, 512, 1)
    assert (context.flash_attn_type, context.rope_scaling_type, context.pooling_type) == (-1, -1, -1)
    assert (context.type_k, context.type_v) == (1, 1)  # float16
    assert (context.yarn_ext_factor, context.yarn_beta_fast) == (-1, -1)
    assert (context.embeddings, context.offload_kqv, context.no_perf, context.op_offload) == (False, True, True, True)
    assert not context.samplers and context.n_samplers == 0 and not context.ctx_other


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rotated(x):
    """[tokens, heads, head_dim] with the first quarter of each head turned by the token's position."""
    half = x.shape[-1] // 8
    angle = np.arange(len(x))[:, None, None] * 1e7 ** -(np.arange(half) / half)
    a, b = x[..., :half], x[..., half:2 * half]
    turned = [a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle), x[..., 2 * half:]]
    return np.concatenate(turned, -1)


def attention(x, w):
    count = len(x)
    q, gate = np.split((x @ w("q").T).reshape(count, 6, 128), 2, -1)
    k, v = ((x @ w(name).T).reshape(count, 2, 64) for name in "kv")
    q, k = rotated(rms(q) * w("q_norm")), rotated(rms(k) * w("k_norm"))
    scores = np.einsum("qhd,thd->hqt", q, k.repeat(3, 1)) / 8
    scores[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
    out = np.einsum("hqt,thd->qhd", softmax(scores), v.repeat(3, 1)) * sigmoid(gate)
    return out.reshape(count, -1) @ w("o").T


def delta_net(x, w):
    """In transformers' order: value head h reads key head h // 3."""
    count = len(x)
    qkv = np.concatenate([np.zeros((3, 2 * KEYS + VALUES)), x @ w("gdn_qkv").T])
    qkv = silu(sum(qkv[tap:tap + count] * w("conv")[:, tap] for tap in range(4)))
    q, k = (part.reshape(count, KEY_HEADS, STATE) for part in (qkv[:, :KEYS], qkv[:, KEYS:2 * KEYS]))
    q, k = ((h / np.sqrt((h * h).sum(-1, keepdims=True) + 1e-6)).repeat(3, 1) for h in (q, k))
    v = qkv[:, 2 * KEYS:].reshape(count, VALUE_HEADS, STATE)
    beta = sigmoid(x @ w("gdn_b").T)
    decay = np.exp(-np.exp(w("A_log")) * np.log1p(np.exp(x @ w("gdn_a").T + w("dt_bias"))))
    state, out = np.zeros((VALUE_HEADS, STATE, STATE)), np.empty_like(v)
    for t in range(count):
        state *= decay[t, :, None, None]
        error = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += k[t, :, :, None] * error[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, q[t] / STATE ** 0.5)
    z = (x @ w("gdn_z").T).reshape(out.shape)
    return (rms(out) * w("gdn_norm") * silu(z)).reshape(count, -1) @ w("gdn_out").T


def forward(weights, tokens, layers=4):
    """float64 logits of the last token."""
    def weight(name, layer=None):
        w = weights(name, layer)
        return (strips_from_blocks(w, "Q4_0").dequantize() if w.dtype == np.uint8 else w).astype(np.float64)

    x = weight("token_embd")[tokens]
    for layer in range(layers):
        w = lambda name, layer=layer: weight(name, layer)  # noqa: E731
        x = x + (attention if layer % 4 == 3 else delta_net)(rms(x) * w("attn_norm"), w)
        h = rms(x) * w("ffn_norm")
        x = x + (silu(h @ w("gate").T) * (h @ w("up").T)) @ w("down").T
    return weight("lm_head") @ (rms(x[-1]) * weight("output_norm"))


def relative(found, reference):
    return np.linalg.norm(found - reference) / np.linalg.norm(reference)


TOKENS = np.random.default_rng(5).integers(0, TINY.vocabulary, 40)


def test_logits_are_those_of_a_float64_pass(loaded, tiny):
    with Session(tiny, tokens=64, gpu=False, threads=1) as session:
        session.prefill(TOKENS)
        logits = session.logits
        session.prefill(TOKENS[:7])
        short = session.logits
        session.prefill(TOKENS)  # from an empty memory again
        again = session.logits
    assert logits.shape == (96,) and logits.dtype == np.float32
    np.testing.assert_array_equal(logits, again)
    weights = random_weights(TINY, 3)
    # activations are rounded to 8 bits before each product, hence not closer
    assert relative(logits, forward(weights, TOKENS)) < 0.05
    assert relative(short, forward(weights, TOKENS[:7])) < 0.05
    assert relative(short, forward(weights, TOKENS)) > 0.5


def test_logits_are_those_of_our_own_model_on_the_same_weights(loaded, tmp_path, simulator):
    model = qwen3_5.Model.random(simulator, qwen3_5.TINY, seed=1)
    path = write_gguf(tmp_path / "ours.gguf", model.inventory, model_weights(model), origin="ours, seed 1")
    tokens = np.random.default_rng(0).integers(0, model.inventory.vocabulary, 20)
    with Session(path, tokens=32, gpu=False, threads=1) as session:
        session.prefill(tokens)
        logits = session.logits
    assert relative(logits, qwen3_5.reference(model, tokens).logits) < 0.05


@pytest.mark.parametrize("tokens, expected", [
    (np.arange(65) % 96, r"int64 \[65\]; expected 1 to 64 whole numbers"), ([], "expected 1 to 64"),
    ([[1, 2]], r"int64 \[1, 2\]"), ([1.5], "float64"),
    ([0, 96], r"lie in 0\.\.96; expected 0\.\.95"), ([-1], r"-1\.\.-1")])
def test_tokens_that_are_none_are_refused(loaded, tiny, tokens, expected):
    with Session(tiny, tokens=64, gpu=False, threads=1) as session, pytest.raises(ValueError, match=expected):
        session.prefill(tokens)


def test_a_session_that_is_closed_or_has_not_run_says_so(loaded, tiny):
    session = Session(tiny, tokens=64, gpu=False, threads=1)
    with pytest.raises(RuntimeError, match="has run no pass"):
        _ = session.logits
    session.close()
    session.close()
    for call in (lambda: session.prefill(TOKENS), lambda: session.logits):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_model_that_llama_cpp_refuses_is_an_error_with_its_words(loaded, tmp_path, tiny):
    with pytest.raises(FileNotFoundError, match="none.gguf"):
        Session(tmp_path / "none.gguf", gpu=False)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny.read_bytes()[:-1000])
    with pytest.raises(RuntimeError, match=r"does not load .*cut\.gguf: .*corrupted or incomplete"):
        Session(cut, gpu=False)


@pytest.fixture
def on_the_gpu():
    reason = llama_cpp.missing()
    if reason:
        pytest.skip(reason)


@pytest.mark.gpu
def test_logits_on_the_gpu_with_heads_of_the_model(on_the_gpu, tmp_path, simulator):
    """Six query heads of 256 numbers to a KV head, four value heads of 128 to a key head: what the build keeps."""
    sizes = qwen3_5.inventory(hidden=256, layers=4, heads=12, kv_heads=2, head_dim=256, ffn=512, vocabulary=256,
                              key_heads=2, value_heads=8)
    model = qwen3_5.Model.random(simulator, sizes, seed=1)
    path = write_gguf(tmp_path / "ours.gguf", sizes, model_weights(model), origin="ours, seed 1")
    tokens = np.random.default_rng(0).integers(0, sizes.vocabulary, 300)
    with Session(path, tokens=512) as session:
        for count in (300, 7, 1):  # products of tiles, products of a few rows, a single row
            session.prefill(tokens[:count])
            assert relative(session.logits, qwen3_5.reference(model, tokens[:count]).logits) < 0.05


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [512, 2048])
def test_a_profiled_pass_has_the_launches_predicted(on_the_gpu, tmp_path, tokens):
    path = write_gguf(tmp_path / "model.gguf", QWEN3_5_27B, layers=4)
    ids = np.random.default_rng(0).integers(0, QWEN3_5_27B.vocabulary, tokens)
    with Session(path, tokens=tokens) as session:
        part, = buckets.analyze(buckets.profile(lambda: session.prefill(ids)), buckets.rules())
        assert np.isfinite(session.logits).all() and session.logits.std() > 0.1
    assert part.passes.count == 3 and part.closes
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    expected = predictions.llama_cpp(qwen3_5.first_layers(QWEN3_5_27B, 4), multiprocessors, tokens)
    assert [(line.expected.what, line.expected.launches, line.counted)
            for line in predictions.beside(part, expected) if not line.agrees] == []
