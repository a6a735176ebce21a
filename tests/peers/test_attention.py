import sys
import types

import numpy as np
import pytest
import torch

from kernelbook.peers import attention

NAMES = ["sdpa_bf16", "fa3_bf16", "fa3_fp8", "flashinfer_bf16", "sage_int8"]
PACKAGES = {"fa3_bf16": "fa3_fwd_interface", "fa3_fp8": "fa3_fwd_interface", "flashinfer_bf16": "flashinfer",
            "sage_int8": "sageattention"}


@pytest.fixture
def known():
    return {peer.name: peer for peer in attention.all_peers()}


def inputs(batch=2, queries=5, heads=6, kv_heads=2, length=37, head_dim=64):
    rng = np.random.default_rng(0)
    q = torch.from_numpy(rng.standard_normal((batch, queries, heads, head_dim), np.float32)).to(torch.bfloat16)
    k, v = (rng.standard_normal((batch, length, kv_heads, head_dim), np.float32) for _ in range(2))
    return q, k * np.linspace(0.5, 2, kv_heads, dtype=np.float32)[:, None], v


def softmax_attention(q, k, v, causal):
    """float64 [batch, queries, heads, head_dim]; q, k, v as prepare takes them."""
    q, k, v = (np.asarray(torch.as_tensor(x).double()) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = np.einsum("bqhd,bthd->bhqt", q, k.repeat(group, 2)) / q.shape[3] ** 0.5
    if causal:
        queries, length = scores.shape[2:]
        scores[..., np.arange(length) > np.arange(length - queries, length)[:, None]] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqt,bthd->bqhd", p / p.sum(-1, keepdims=True), v.repeat(group, 2))


def relative(out, reference):
    return np.linalg.norm(out.double().numpy() - reference) / np.linalg.norm(reference)


def bfloat16(x):
    return torch.as_tensor(x).to(torch.bfloat16)


# ---- what is missing

def test_without_cuda_every_peer_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = attention.all_peers()
    assert [p.name for p in found] == NAMES
    assert all("no CUDA device" in p.missing for p in found)


@pytest.fixture
def hopper(monkeypatch):
    """A PyTorch that says it has an H200."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_a_peer_that_does_not_import_is_missing_and_the_others_are_not(hopper, monkeypatch):
    for module in PACKAGES.values():
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    assert [p.missing for p in attention.all_peers()] == [None] * 5
    for broken in set(PACKAGES.values()):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, broken, None)  # makes its import fail
            found = {p.name: p.missing for p in attention.all_peers()}
        for name, reason in found.items():
            if PACKAGES.get(name) == broken:
                assert reason.startswith(f"{broken} does not import: ModuleNotFoundError") and "\n" not in reason
            else:
                assert reason is None


@pytest.mark.parametrize("capability, bf16, fp8", [
    ((8, 0), True, False), ((9, 0), True, True), ((10, 0), False, False)])
def test_fa3_is_missing_where_it_has_no_machine_code(hopper, monkeypatch, capability, bf16, fp8):
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", types.ModuleType("fa3_fwd_interface"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    found = {p.name: p.missing for p in attention.all_peers()}
    for name, runs in (("fa3_bf16", bf16), ("fa3_fp8", fp8)):
        assert runs == (found[name] is None)
        assert runs or f"compute capability {capability[0]}.{capability[1]}" in found[name]


# ---- what a peer takes

@pytest.mark.parametrize("name, case, reason", [
    ("sdpa_bf16", (96, 1, True), None),
    ("fa3_bf16", (96, 512, True), None),
    ("fa3_bf16", (512, 1, False), "head_dim 512: it takes multiples of 8 up to 256"),
    ("fa3_fp8", (72, 1, False), "head_dim 72: it takes multiples of 16 up to 256"),
    ("flashinfer_bf16", (256, 1, True), None),
    ("flashinfer_bf16", (96, 1, True), "head_dim 96: its kernels for paged caches take 64, 128 and 256"),
    ("sage_int8", (96, 512, False), None),
    ("sage_int8", (256, 512, False), "head_dim 256: it takes 64, 96 and 128"),
    ("sage_int8", (128, 512, True), "causal: its mask is for as many queries as tokens"),
    ("sage_int8", (128, 1, False), "1 queries: a tile holds 128"),
])
def test_supports(known, name, case, reason):
    said = known[name].supports(*case)
    assert said is None if reason is None else said.startswith(reason)


@pytest.mark.parametrize("name, expected", [
    ("flashinfer_bf16", 2 * 3 * 4096 * 4 * 128 * 2), ("fa3_fp8", 2 * 3 * 4096 * 4 * 128),
    ("sage_int8", 2 * 3 * 4096 * 4 * 128 * 2)])  # it quantizes in every call
def test_cache_bytes(known, name, expected):
    assert known[name].cache_bytes(3, 4096, 4, 128) == expected
    assert [p.name for p in known.values() if p.paged] == ["flashinfer_bf16"]


@pytest.mark.parametrize("changes, error, match", [
    ({"q": lambda x: x.int()}, TypeError, "q is of torch.int32; expected floats"),
    ({"k": lambda x: x[0]}, ValueError, r"k has shape \[37, 2, 64\]; expected 4 axes"),
    ({"q": lambda x: x[:, :0]}, ValueError, r"q has shape \[2, 0, 6, 64\]; expected 4 axes, none of them empty"),
    ({"v": lambda x: x[:, :30]}, ValueError, r"\[2, 37, 2, 64\] and \[2, 30, 2, 64\]; expected both \[2, length"),
    ({"q": lambda x: x[:1]}, ValueError, r"expected both \[1, length, kv_heads, 64\] beside q \[1, 5, 6, 64\]"),
    ({"q": lambda x: x[:, :, :5]}, ValueError, "5 query heads cannot share 2 KV heads"),
    ({"q": lambda x: x.repeat(1, 8, 1, 1)}, ValueError, "40 causal queries are more than the sequence's 37 tokens"),
    ({"copies": 0}, ValueError, "copies = 0; expected at least one"),
])
def test_bad_input_is_refused(known, changes, error, match):
    given = dict(zip("qkv", inputs(), strict=True)) | {"causal": True, "copies": 1, "device": "cpu"}
    for name, change in changes.items():
        given[name] = change(given[name]) if callable(change) else change
    with pytest.raises(error, match=match):
        known["sdpa_bf16"].prepare(**given)


def test_what_a_peer_does_not_support_is_refused_with_its_reason(known):
    q, k, v = inputs(head_dim=96)
    with pytest.raises(ValueError, match="flashinfer_bf16: head_dim 96: its kernels"):
        known["flashinfer_bf16"].prepare(q, k, v, causal=False, copies=1, device="cpu")


# ---- what it computes

@pytest.mark.parametrize("queries, length", [(1, 37), (5, 37), (37, 37), (5, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_sdpa_attends(known, queries, length, causal):
    q, k, v = inputs(queries=queries, length=length)
    calls = known["sdpa_bf16"].prepare(q, k, v, causal=causal, copies=3, device="cpu")
    reference = softmax_attention(q, bfloat16(k), bfloat16(v), causal)
    assert len(calls) == 3
    for call in calls:
        assert call().shape == q.shape and call().dtype == torch.bfloat16
        assert relative(call(), reference) < 0.005


@pytest.fixture
def stand_ins(monkeypatch):
    """Modules in the peers' places, with their arguments' names and layouts, that compute attention in float64: what
    goes to a peer and what comes back can be checked without one. Yields what they were given."""
    seen = {"caches": []}

    def of(q, k, v, causal):
        seen["caches"].append((k, v))
        return torch.from_numpy(softmax_attention(q, k, v, causal))

    def flash_attn_with_kvcache(q, k_cache, v_cache, q_descale=None, k_descale=None, v_descale=None, causal=False):
        seen["dtype"] = {q.dtype, k_cache.dtype, v_cache.dtype}
        seen["caches"].append((k_cache, v_cache))
        scaled = []
        for x, descale in ((q, q_descale), (k_cache, k_descale), (v_cache, v_descale)):
            groups = k_cache.shape[2]
            factor = torch.ones(len(x), groups) if descale is None else descale
            assert factor.shape == (len(x), groups) and factor.dtype == torch.float32
            scaled.append(x.double() * factor.repeat_interleave(x.shape[2] // groups, 1)[:, None, :, None])
        return torch.from_numpy(softmax_attention(*scaled, causal)).to(torch.bfloat16)

    class Wrapper:
        def run(self, q, paged_kv_cache, *, out):
            seen["caches"].append(paged_kv_cache)
            seen["tables"] = self.indices
            k, v = (torch.stack([self.sequence(x, i) for i in range(len(self.last))]) for x in paged_kv_cache)
            q = q.reshape(len(self.last), -1, *q.shape[1:])
            return out.copy_(torch.from_numpy(softmax_attention(q, k, v, self.causal)).flatten(0, 1))

        def keep(self, indptr, indices, last, heads, kv_heads, head_dim, page, causal, q_data_type):
            assert {t.dtype for t in (indptr, indices, last)} == {torch.int32} and q_data_type == torch.bfloat16
            self.indptr, self.indices, self.last, self.causal, self.page = indptr, indices, last, causal, page

        def sequence(self, pages, i):
            mine = pages[self.indices[self.indptr[i]:self.indptr[i + 1]]]
            return mine.flatten(0, 1)[:(len(mine) - 1) * self.page + self.last[i]]

    class Decode(Wrapper):
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_tensor_cores=False):
            assert not float_workspace_buffer.any()

        def plan(self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type):
            self.keep(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, False,
                      q_data_type)

    class Prefill(Wrapper):
        def __init__(self, float_workspace_buffer, kv_layout="NHD"):
            pass

        def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
                 num_kv_heads, head_dim_qk, page_size, causal=False, q_data_type=None):
            seen["starts"] = qo_indptr.tolist()
            self.keep(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
                      head_dim_qk, page_size, causal, q_data_type)

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False):
        assert tensor_layout == "HND" and q.dtype == k.dtype == v.dtype == torch.float16
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        k -= k.mean(2, keepdim=True)
        return of(*(x.transpose(1, 2) for x in (q, k, v)), is_causal).transpose(1, 2).to(torch.float16)

    for module, content in {
            "fa3_fwd_interface": {"flash_attn_with_kvcache": flash_attn_with_kvcache},
            "flashinfer": {"BatchDecodeWithPagedKVCacheWrapper": Decode,
                           "BatchPrefillWithPagedKVCacheWrapper": Prefill},
            "sageattention": {"sageattn": sageattn}}.items():
        monkeypatch.setitem(sys.modules, module, types.SimpleNamespace(**content))
    return seen


@pytest.mark.parametrize("name, bound", [("fa3_bf16", 0.005), ("fa3_fp8", 0.1), ("flashinfer_bf16", 0.005)])
@pytest.mark.parametrize("queries, causal", [(1, True), (5, True), (5, False)])
def test_a_peer_gets_what_it_expects(known, stand_ins, name, bound, queries, causal):
    q, k, v = inputs(queries=queries)
    k[1], v[:, :, 1] = 1e3 * k[1], 1e-6 * v[:, :, 1]  # scales differ by sequence and by head
    q[1] *= 1e-3
    calls = known[name].prepare(q, k, v, causal=causal, copies=2, device="cpu")
    assert not stand_ins["caches"], "nothing is computed before a call"
    reference = softmax_attention(q, k, v, causal)
    for call in calls:
        out = call()
        assert out.shape == q.shape and out.dtype == torch.bfloat16
        for head in range(q.shape[2]):  # one by one: some are a millionth of the others
            assert relative(out[:, :, head], reference[:, :, head]) < bound
    (k0, v0), (k1, v1) = stand_ins["caches"]
    assert len({x.data_ptr() for x in (k0, v0, k1, v1)}) == 4, "every call reads a cache of its own"


def test_fa3_fp8_multiplies_float8(known, stand_ins):
    q, k, v = inputs()
    k[0, :, 1] = 0  # a head of zeros has no largest number to scale by
    out = known["fa3_fp8"].prepare(q, k, v, causal=True, copies=1, device="cpu")[0]()
    assert stand_ins["dtype"] == {torch.float8_e4m3fn} and out.isfinite().all()


def test_pages_lie_in_no_order(known, stand_ins):
    q, k, v = inputs(length=300)
    known["flashinfer_bf16"].prepare(q, k, v, causal=True, copies=1, device="cpu")[0]()
    tables = stand_ins["tables"].tolist()
    assert sorted(tables) == list(range(2 * 19)) and tables != sorted(tables)
    assert stand_ins["starts"] == [0, 5, 10]


def test_sage_may_be_called_again(known, stand_ins):
    q, k, v = inputs(queries=128, length=192)
    k += 3  # a mean to take off
    call = known["sage_int8"].prepare(q, k, v, causal=False, copies=1, device="cpu")[0]
    first, second = call(), call()
    assert first.shape == q.shape and relative(first, softmax_attention(q, k, v, False)) < 0.005
    assert relative(second, first.double().numpy()) < 0.001
    with pytest.raises(ValueError, match="sage_int8: 191 tokens; expected a multiple of 64"):
        known["sage_int8"].prepare(q, k[:, 1:], v[:, 1:], causal=False, copies=1, device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")
@pytest.mark.parametrize("head_dim, queries, causal", [(64, 1, True), (128, 1, True), (256, 1, True), (128, 128, True),
                                                       (96, 128, False), (128, 128, False)])
@pytest.mark.parametrize("name, bound", [("sdpa_bf16", 0.01), ("fa3_bf16", 0.01), ("fa3_fp8", 0.15),
                                         ("flashinfer_bf16", 0.01), ("sage_int8", 0.02)])
def test_peers_attend(known, name, bound, head_dim, queries, causal):
    peer = known[name]
    if peer.missing or peer.supports(head_dim, queries, causal):
        pytest.skip(peer.missing or peer.supports(head_dim, queries, causal))
    q, k, v = inputs(queries=queries, heads=24, kv_heads=4, length=1024, head_dim=head_dim)
    reference = softmax_attention(q, k, v, causal)
    for call in peer.prepare(q, k, v, causal=causal, copies=2):
        call()  # compiles and allocates
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        graph.replay()
        assert out.shape == q.shape and relative(out.cpu(), reference) <= bound
