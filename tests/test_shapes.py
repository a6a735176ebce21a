import pytest

from kernelbook import shapes


def test_flops_of_the_article():
    """grouped_gemm, 3.5: MFLOP of each projection of Qwen3-VL-2B at M=1."""
    model = shapes.QWEN3_VL_2B
    mflop = {p.name: p.flops(1) / 1e6 for p in model}
    assert [round(mflop[name], 1) for name in ("q", "o", "k", "v")] == [8.4, 8.4, 4.2, 4.2]
    assert [round(mflop[name]) for name in ("gate", "up", "down", "lm_head")] == [25, 25, 25, 622]
    assert [p.name for p in model if p.flops(1) >= 1e7] == ["gate", "up", "down", "lm_head"]
    assert model.lm_head.flops(32) == 32 * model.lm_head.flops(1)


def test_sums_of_qwen3_5_27b():
    model = shapes.QWEN3_5_27B
    assert model.gemms == 496
    assert model.weights == 24_350_556_160
    assert model.flops(512) / 1e12 == pytest.approx(24.93, abs=0.01)
    assert sum(p.count for p in model.projections if p.n == 48) == 96


def test_sums_of_the_dense_models():
    assert shapes.QWEN3_VL_2B.gemms == 7 * 28
    smol = shapes.SMOLLM2_135M
    norms = (2 * smol.layers + 1) * smol.hidden
    assert smol.weights + smol.lm_head.weights + norms == 134_515_008  # the model's published size


@pytest.mark.parametrize("model, fused", [
    (shapes.QWEN3_VL_2B, {"q+k+v": (4096, 2048, 28), "o": (2048, 2048, 28), "gate+up": (12288, 2048, 28),
                          "down": (2048, 6144, 28)}),
    (shapes.QWEN3_5_27B, {"gdn_qkv+gdn_z+gdn_b+gdn_a": (16480, 5120, 48), "gdn_out": (5120, 6144, 48),
                          "q+k+v": (14336, 5120, 16), "o": (5120, 6144, 16), "gate+up": (34816, 5120, 64),
                          "down": (5120, 17408, 64)}),
])
def test_projections_of_one_source_fuse(model, fused):
    assert {p.name: (p.n, p.k, p.count) for p in model.fused()} == fused
    assert sum(p.count * p.weights for p in model.fused()) == model.weights


def test_only_equal_projections_share_a_source():
    for model in (shapes.QWEN3_VL_2B, shapes.QWEN3_5_27B, shapes.SMOLLM2_135M):
        for p in model.projections:
            same = [(o.k, o.count) for o in model.projections if o.source == p.source]
            assert set(same) == {(p.k, p.count)}


def test_names():
    assert shapes.QWEN3_VL_2B["down"].k == 6144
    with pytest.raises(KeyError, match="Qwen3-VL-2B has no projection 'kv'; it has q, k, v, o"):
        shapes.QWEN3_VL_2B["kv"]


def test_distinct_takes_the_first_of_each_shape():
    assert [p.name for p in shapes.distinct(shapes.QWEN3_VL_2B)] == ["q", "k", "gate", "down", "lm_head"]
    assert [(p.n, p.k) for p in shapes.distinct(shapes.QWEN3_5_27B.projections)] == [
        (10240, 5120), (6144, 5120), (48, 5120), (5120, 6144), (12288, 5120), (1024, 5120), (17408, 5120),
        (5120, 17408)]
