"""The pass of Qwen3.5: its sizes, its weights, and a tiny model of the same kinds of layer against float64, in every
design that runs here, whole and in parts."""

from dataclasses import replace

import numpy as np
import pytest

from kernelbook import measure, qwen3_5, shapes
from kernelbook.ops import layer, panel_gemm, prefill_gemm
from kernelbook.qwen3_5 import DESIGNS, TINY, Model, Pass, State
from kernelbook.stats import errors

TOKENS = 9
ARTICLE = replace(DESIGNS["article"], tile=4)  # the same with less to fill up
BOUNDS = {"float32": 2e-5, "bf16": 1e-2, "int8": 2e-2}
"""Of the relative error of each layer's stream and of the logits, by activations; GDN's two terms are 2e-5."""


def ids(tokens=TOKENS, seed=0):
    return np.random.default_rng(seed).integers(0, TINY.vocabulary, tokens)


def run(model, design, given, **how):
    """The pass's outcome on `given`."""
    call = Pass(model, design, len(given), keep_streams=True, **how)
    call.feed(given)
    call()
    return call.outcome()


def assert_close(outcome, ref, bound):
    grown = qwen3_5.growth(outcome, ref)
    assert max(grown) <= bound, grown
    assert errors(outcome.logits, ref.logits).relative_frobenius <= bound


def there(design):
    """A design's parameter of a test, skipped where its products are not."""
    known = design.tile is not None or design.in_panels or design.gemm in prefill_gemm.DESIGNS
    return pytest.param(design, id=design.name, marks=[] if known else pytest.mark.skip(f"no {design.gemm} yet"))


@pytest.fixture(scope="module")
def model(simulator):
    return Model.random(simulator, TINY)


@pytest.fixture(scope="module")
def ref(model):
    return qwen3_5.reference(model, ids())


ON_HOPPER = ("wgmma", "packed_wgmma")


@pytest.fixture(params=[there(design) for design in DESIGNS.values() if design.name not in ON_HOPPER])
def design(request):
    return request.param


# ---- sizes

def test_sizes_of_the_real_model():
    made = qwen3_5.inventory(name="Qwen3.5-27B", hidden=5120, layers=64, heads=24, kv_heads=4, head_dim=256, ffn=17408,
                             vocabulary=248320, key_heads=16, value_heads=48)
    assert made == shapes.QWEN3_5_27B
    assert qwen3_5.weight_bytes(made) == pytest.approx(15.1e9, rel=0.01)  # of a Q4_0 file of the same shapes


def test_fewer_layers_say_so():
    few = qwen3_5.first_layers(shapes.QWEN3_5_27B, 8)
    assert few.name == "Qwen3.5-27B, 8 of its 64 layers" and few.layers == 8
    assert few.weights * 8 == shapes.QWEN3_5_27B.weights and few["q"].count == 2 and few["gdn_a"].count == 6
    assert qwen3_5.first_layers(TINY, 4) is TINY
    for words, layers in (("layers = 6; expected a multiple of 4", 6), ("layers = 0; expected at least 1", 0),
                          ("layers = 68; Qwen3.5-27B has 64", 68)):
        with pytest.raises(ValueError, match=words):
            qwen3_5.first_layers(shapes.QWEN3_5_27B, layers)


def test_sizes_without_tiles_are_refused():
    sizes = dict(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=128, ffn=256, vocabulary=128, key_heads=2,
                 value_heads=4)
    for words, change in (("gdn_b is 6 x 128", dict(value_heads=6, key_heads=3)), ("down is 128 x 200", dict(ffn=200)),
                          ("gdn_qkv is 1024 x 100", dict(hidden=100)), ("layers = 5", dict(layers=5)),
                          ("lm_head is 130 x 128", dict(vocabulary=130))):
        with pytest.raises(ValueError, match=words):
            qwen3_5.inventory(**sizes | change)


def test_bytes_of_a_pass():
    """B12: 32 times the weights at 512 tokens in tiles of 16."""
    real = shapes.QWEN3_5_27B
    whole, tiled = (DESIGNS[name].bytes_read(real, 512) for name in ("tensor_cores", "article"))
    assert whole == 13_697_187_840 and tiled == 32 * whole
    assert DESIGNS["article"].reads(1) == 1 and DESIGNS["article"].reads(17) == 2


def test_bytes_of_panels(simulator, hopper_in_numpy):
    """4.5 bits a weight, but for what fills panels up; nothing of other designs, and where this one does not run."""
    real = shapes.QWEN3_5_27B
    weights = real.weights + real.lm_head.weights
    assert qwen3_5.panel_bytes(hopper_in_numpy, DESIGNS["packed_wgmma"], real) == weights * 9 // 16
    assert qwen3_5.panel_bytes(simulator, DESIGNS["packed_wgmma"], real) == 0
    assert qwen3_5.panel_bytes(hopper_in_numpy, DESIGNS["wgmma"], real) == 0
    Pass(Model.random(hopper_in_numpy, TINY), DESIGNS["packed_wgmma"], 1)
    assert qwen3_5.panel_bytes(hopper_in_numpy, DESIGNS["packed_wgmma"], TINY) == sum(
        call["data"].nbytes for call in hopper_in_numpy.launches)


# ---- weights

def test_activations_stay_near_one_through_64_layers(simulator):
    deep = replace(TINY, layers=64, projections=tuple(replace(p, count=16 * p.count) for p in TINY.projections))
    outcome = qwen3_5.reference(Model.random(simulator, deep), ids(8))
    sizes = outcome.streams.std(axis=(1, 2))
    assert 0.8 < sizes[0] < 1.2 and (sizes > 0.8).all() and (sizes < 8).all() and 0.5 < outcome.logits.std() < 2


def test_weights_follow_from_the_seed(simulator, model):
    same, other = (Model.random(simulator, TINY, seed=seed) for seed in (0, 1))
    for found, is_same in ((same, True), (other, False)):
        for one, right in zip(found.layers, model.layers, strict=True):
            for name, tiles in one.projections.items():
                assert np.array_equal(tiles, right.projections[name]) == is_same
            assert np.array_equal(one.norm, right.norm) == is_same
    matrices = [tiles[:1, :4].tobytes() for one in model.layers for tiles in one.projections.values()]
    assert len(set(matrices)) == len(matrices) == 16


def test_another_models_inventory_is_refused(simulator):
    with pytest.raises(ValueError, match="SmolLM2-135M has no projections of gdn, gdn_norm; it is no Qwen3.5"):
        Model.random(simulator, shapes.SMOLLM2_135M)


# ---- the pass against float64

def test_every_design_against_float64(model, design):
    given = ids(17)  # a tile of 16 and one more
    assert_close(run(model, design, given), qwen3_5.reference(model, given), BOUNDS[design.activations])


def test_in_panels(hopper_in_numpy):
    """With products by NumPy: the same weights, every one of them, and outputs in bf16 of gate and up alone."""
    model, given = Model.random(hopper_in_numpy, TINY), ids(17)
    found = run(model, DESIGNS["packed_wgmma"], given)
    assert_close(found, qwen3_5.reference(model, given), BOUNDS["bf16"])
    assert_close(found, run(model, DESIGNS["tensor_cores"], given), BOUNDS["bf16"])
    calls = hopper_in_numpy.launches
    assert len(calls) == sum(p.count for p in TINY.fused()) + 1
    assert [call["weights"].n for call in calls if call["out"].dtype == np.uint16] == [2 * TINY["gate"].n] * TINY.layers
    assert len({call["data"].ctypes.data for call in calls}) == len(calls)
    shared = {call["sums"].ctypes.data: call["sums"].size for call in calls if call["sums"] is not None}
    assert len(shared) == len(set(shared.values()))


def test_in_panels_of_projections_apart(hopper_in_numpy):
    """Rows of a weight that others follow are packed where they are."""
    model = Model.random(hopper_in_numpy, TINY)
    fused, apart = (run(model, replace(DESIGNS["packed_wgmma"], fused=fused), ids()) for fused in (True, False))
    assert_close(apart, fused, 1e-3)


def test_panels_need_hopper(model):
    with pytest.raises(ValueError, match="design 'packed_wgmma': it needs Hopper's warpgroup instructions"):
        Pass(model, DESIGNS["packed_wgmma"], 4)


def test_on_every_backend(backend):
    model = Model.random(backend, TINY)
    assert_close(run(model, ARTICLE, ids()), qwen3_5.reference(model, ids()), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("design", [there(design) for design in DESIGNS.values()])
def test_every_design_on_a_gpu(gpu, design):
    if design.name in ON_HOPPER and gpu.arch != "90a":
        pytest.skip("no warpgroup instructions here")
    model = Model.random(gpu, TINY)
    assert_close(run(model, design, ids(130)), qwen3_5.reference(model, ids(130)), BOUNDS[design.activations])


@pytest.mark.gpu
def test_a_graph_holds_a_pass(gpu):
    """The last thing that device_times does is to replay one."""
    call = Pass(Model.random(gpu, TINY), DESIGNS["tiled_fp32"], TOKENS)
    call.feed(ids())
    call()
    expected = call.outcome().logits
    timing = measure.device_times({"pass": [call]}, rounds=2)["pass"]
    assert timing.median > 0 and np.array_equal(call.outcome().logits, expected)


def test_chunks_of_the_recurrence_meet(model):
    given = ids(70)
    assert_close(run(model, DESIGNS["tiled_fp32"], given), qwen3_5.reference(model, given), BOUNDS["float32"])


def test_designs_agree(model):
    """Of one arithmetic to its error, of int8 to its own."""
    int8 = replace(DESIGNS["article_int8"], tile=4)
    article, int8, tiled = (run(model, design, ids()) for design in (ARTICLE, int8, DESIGNS["tiled_fp32"]))
    assert_close(article, tiled, BOUNDS["float32"])
    grown = qwen3_5.growth(int8, article)
    assert grown[0] == 0 and all(1e-3 < g < BOUNDS["int8"] for g in grown[1:]) and grown[-1] > grown[1]


def test_fused_products_are_the_products(model):
    """Whether projections are fused changes no bit: sums run over K alone."""
    fused, apart = (run(model, replace(DESIGNS["tiled_fp32"], fused=fused), ids()) for fused in (True, False))
    assert np.array_equal(fused.streams, apart.streams) and np.array_equal(fused.logits, apart.logits)


def test_one_token(model):
    given = ids(1)
    for design in (DESIGNS["article"], DESIGNS["tiled_fp32"]):
        assert_close(run(model, design, given), qwen3_5.reference(model, given), BOUNDS["float32"])


def test_a_call_repeats_and_reads_what_it_is_fed(model, ref):
    call = Pass(model, ARTICLE, TOKENS)
    call.feed(ids(seed=5))
    call()
    call.feed(ids())
    call()
    first = call.outcome()
    assert first.streams is None and errors(first.logits, ref.logits).relative_frobenius < 1e-6
    call()
    assert np.array_equal(call.outcome().logits, first.logits)
    with pytest.raises(ValueError, match="outcome has no streams; prepare its pass with keep_streams=True"):
        qwen3_5.growth(first, ref)


# ---- in parts

@pytest.mark.parametrize("design", [ARTICLE, DESIGNS["tiled_fp32"]], ids=lambda design: design.name)
@pytest.mark.parametrize("cuts", [(5,), (8,), (7, 8)])
def test_a_sequence_may_be_cut(model, ref, design, cuts):
    """Each part reads the state that those before it left: the convolution's, the recurrence's, keys and values."""
    given, edges = ids(), (0, *cuts, TOKENS)
    state = State.empty(model, design, TOKENS + 2)
    parts = [run(model, design, given[first:last], start=first, state=state)
             for first, last in zip(edges[:-1], edges[1:], strict=True)]
    whole = qwen3_5.Outcome(parts[-1].logits, np.concatenate([part.streams for part in parts], axis=1))
    assert_close(whole, ref, BOUNDS["float32"])


def test_a_pass_from_the_start_forgets_what_the_state_holds(model, ref):
    state = State.empty(model, ARTICLE, TOKENS)
    run(model, ARTICLE, ids(seed=7), state=state)
    assert_close(run(model, ARTICLE, ids(), state=state), ref, 1e-6)


# ---- launches

def test_launches_are_counted(model):
    def launches(design):
        call = Pass(model, design, 5)
        assert not call.launches
        call.feed(ids(5))
        call()
        once = call.launches
        call()
        assert call.launches == once
        return once

    article, tiled = launches(ARTICLE), launches(DESIGNS["tiled_fp32"])
    assert article["q4_explicit_fma"] == 2 * TINY.gemms + 1  # two tiles; lm_head on the last token only
    assert article["add_norm"] == 2 * TINY.layers + 1 and article["sequential"] == 3 and article["sdpa"] == 1
    assert tiled["prefill_tiled_fp32"] == sum(p.count for p in TINY.fused()) + 1 == 17
    assert tiled["conv_and_gates"] == tiled["chunk_scan"] == 3


def test_laying_out_weights_is_no_launch_of_a_call(hopper_in_numpy):
    call = Pass(Model.random(hopper_in_numpy, TINY), DESIGNS["packed_wgmma"], 5)
    assert not call.launches
    call.feed(ids(5))
    call()
    assert call.launches["packed_wgmma"] == 17 and not call.launches["q4_panels"]


@pytest.mark.parametrize("design", DESIGNS.values(), ids=lambda design: design.name)
def test_designs_name_their_kernel(design):
    if design.in_panels:
        assert design.kernel == panel_gemm.NAME
    else:
        assert design.kernel == f"{'q4' if design.tile else 'prefill'}_{design.gemm}"


# ---- attention

@pytest.mark.parametrize("form,bound", [("float32", 1e-6), ("bf16", 6e-3)])
@pytest.mark.parametrize("queries,length", [(1, 1), (1, 9), (5, 5), (5, 9)])
def test_attention_against_float64(backend, form, bound, queries, length):
    rng = np.random.default_rng((queries, length))
    shapes_ = (queries, 6, 128), (length, 2, 128), (length, 2, 128)
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes_)
    if form == "bf16":
        q, k, v = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (q, k, v))
    out = backend.empty(q.shape, q.dtype)
    qwen3_5.causal_attention(backend, *map(backend.array, (q, k, v)), out)()
    found, *given = (x if form == "float32" else (x.astype(np.uint32) << 16).view(np.float32)
                     for x in (backend.numpy(out), q, k, v))
    assert errors(found, qwen3_5.attention_reference(*given)).relative_frobenius <= bound


def test_attention_by_hand():
    """The first query sees one key, the last one all; equal keys weigh equally; query heads 0 and 1 share a KV head."""
    v = np.arange(12.0).reshape(3, 2, 2)
    out = qwen3_5.attention_reference(np.ones((2, 4, 2)), np.ones((3, 2, 2)), v)
    assert np.allclose(out[0, 0], v[:2, 0].mean(axis=0)) and np.allclose(out[1, 1], v[:, 0].mean(axis=0))
    assert np.allclose(out[1, 2], v[:, 1].mean(axis=0))


# ---- bad input

def test_bad_passes_are_refused(model):
    design, state = DESIGNS["article"], State.empty(model, DESIGNS["article"], 8)
    other = Model.random(model.backend, replace(TINY, layers=8, projections=tuple(
        replace(p, count=2 * p.count) for p in TINY.projections)))
    for kind, words, attempt in (
            (ValueError, "tokens = 0; expected at least 1", lambda: Pass(model, design, 0)),
            (TypeError, "tokens is 2.0", lambda: Pass(model, design, 2.0)),
            (ValueError, "start is -1; expected a whole number", lambda: Pass(model, design, 1, start=-1)),
            (ValueError, "start = 3, and no state", lambda: Pass(model, design, 1, start=3)),
            (ValueError, "room for 8 tokens; tokens 5 to 8 take 9",
             lambda: Pass(model, design, 4, start=5, state=state)),
            (ValueError, "4 layers with float32 attention; design 'wgmma' of Qwen3.5, tiny takes 4 and bf16",
             lambda: Pass(model, DESIGNS["wgmma"], 4, state=state)),
            (ValueError, "4 layers with .* takes 8 and float32", lambda: Pass(other, design, 4, state=state)),
            (ValueError, "design 'fp8'; expected", lambda: Pass(model, replace(design, gemm="fp8", tile=None), 4)),
            (ValueError, "capacity = 0", lambda: State.empty(model, design, 0))):
        with pytest.raises(kind, match=words):
            attempt()


def test_bad_designs_are_refused():
    design = DESIGNS["article"]
    for words, change in (("activations of design 'article' is 'fp8'; expected one of float32, bf16, int8",
                           dict(activations="fp8")),
                          ("attention of design 'article' is 'int8'; expected one of float32, bf16",
                           dict(attention="int8")),
                          ("ffn of design 'article' is 'int8'; expected one of float32, bf16", dict(ffn="int8")),
                          ("gdn of design 'article' is 'wy'; expected one of chunked, sequential", dict(gdn="wy")),
                          ("variant 'wgmma'; expected", dict(gemm="wgmma")), ("M = 5 rows", dict(tile=5)),
                          ("gives int8 activations to the probe 'explicit_fma', which takes float32",
                           dict(activations="int8")),
                          ("gives float32 activations to the probe 'int8_dot', which takes int8",
                           dict(gemm="int8_dot"))):
        with pytest.raises(ValueError, match=words):
            replace(design, **change)


def test_bad_tokens_are_refused(model):
    call = Pass(model, DESIGNS["article"], 3)
    for kind, words, given in ((ValueError, r"ids\[1\] is 128; expected 0 to 127", [0, 128, 0]),
                               (ValueError, r"ids\[2\] is -1", [0, 1, -1]),
                               (ValueError, r"ids have shape \(2,\); this pass was prepared for \(3,\)", [0, 1]),
                               (TypeError, "ids are of float64", [0.0, 1.0, 2.0])):
        with pytest.raises(kind, match=words):
            call.feed(given)


def test_the_embedding_is_as_the_reference_has_it(model, ref):
    out = model.backend.empty((TOKENS, TINY.hidden), np.float32)
    layer.embedding(model.backend, model.embedding, model.backend.array(ids().astype(np.int32)), out)()
    assert np.array_equal(out, ref.streams[0])
