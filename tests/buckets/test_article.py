import pytest

from kernelbook.buckets import article
from kernelbook.shapes import QWEN3_5_27B


def test_buckets_exceed_or_miss_the_totals_that_they_are_parts_of():
    engine, peer = article.tables().engine, article.tables().peer
    assert (engine.bucket_sum_ms, engine.kernels_ms, engine.excess_ms) == (9213, 9093, 120)
    assert (peer.bucket_sum_ms, peer.kernels_ms, peer.excess_ms) == pytest.approx((106.5, 113.9, -7.4))
    assert sum(engine.shares.values()) == pytest.approx(101.3)


def test_shares_follow_from_the_times():
    for side in (article.tables().engine, article.tables().peer):
        assert side.recomputed_shares() == pytest.approx(dict(side.shares), abs=0.06)


def test_normalized_is_share_times_wall():
    for side in (article.tables().engine, article.tables().peer):
        for name, printed in side.normalized.items():
            assert side.share_of_wall_ms()[name] == pytest.approx(printed, abs=0.5)
    # six passes of 1576 ms would not fit into the time of that bucket in the trace
    assert article.tables().engine.per_pass_ms()["GEMM"] == pytest.approx(1273.2, abs=0.1)


def test_ratios_and_shares_of_the_gap():
    lines = {line.name: line for line in article.tables().comparison()}
    for name, printed in article.tables().ratios.items():
        assert lines[name].ratio == pytest.approx(printed, abs=0.06)
    assert lines["GEMM"].share == pytest.approx(0.851, abs=5e-4)
    assert lines["GDN"].share == pytest.approx(0.120, abs=5e-4)
    assert (lines["rest"].a, lines["rest"].b) == (69, 18)


def test_bits_per_weight():
    tables = article.tables()
    assert article.tile_bits_per_weight() == 4.5
    assert round(article.q4_0_file_bits_per_weight(QWEN3_5_27B), 2) == tables.peer.claimed_bits_per_weight == 4.60
    assert tables.engine.claimed_bits_per_weight == 4.25
    # the sizes in the article's own table are those of 4.5 bits
    assert all(bits == pytest.approx(4.5, abs=0.01) for bits in article.printed_bits_per_weight().values())
