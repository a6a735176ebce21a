"""The tables of the ladder in the README pages, from records with and without one."""

import pytest

from kernelbook import readme


def measurement(variant, m, us, metric="time_us", **case):
    return {"kernel": "gemm_ladder", "variant": variant, "metric": metric, "value": us, "p10": us, "p90": us, "n": 9,
            "unit": "us", "cache": "cold", "case": {"M": m, "N": 17408, "K": 5120, "group": 32, "codes": "int8"} | case}


@pytest.fixture
def results():
    found = []
    for m, ours, peer in ((1, 25.0, 33.0), (512, 120.0, 118.0)):
        found += [measurement("6_ring", m, ours, accuracy="accurate"), measurement("humming_int8", m, peer)]
    found.append(measurement("6_ring", 1, 3780.0, "bandwidth_gbs", accuracy="accurate"))
    found.append(measurement("6_ring", 1, 5.0, accuracy="accurate", N=1024, K=2048))
    found.append(measurement("humming_int8", 1, 6.0, N=1024, K=2048))
    return {readme.DEVICE: {"1_grouped_gemm": {"measurements": found, "environment": {"device": "an H200"}}}}


def test_tables_of_a_ladder(results):
    assert readme.ladder(results) == ("| time, of the best peer's | M = 1 | M = 512 |\n| --- | ---: | ---: |\n"
                                      "| 17408 x 5120, int8 | 25 us, 0.76 | 120 us, 1.02 |\n")
    assert "| 1024 x 2048, int8 | 5 us, 0.83 |  |" in readme.ladder_all(results)
    assert "slower on 1: 17408 x 5120, int8, M = 512, 1.02 times humming int8." in readme.ladder_standing(results)
    rate = 2 * 512 * 17408 * 5120 / 120e6
    assert readme.rungs(results).splitlines()[2] == f"| 6 ring | 3.78 TB/s | {rate:.0f} TFLOP/s |"
    goals = readme.goals(results).splitlines()
    assert goals[0] == "| goal | worst case | where | all cases | met | with no overlap |"
    assert goals[2].endswith("| 3.78 TB/s | 17408 x 5120, int8, M = 1, 6 ring | 1 of 1; 3.78 to 3.78 | yes "
                             "| yes, 3.78 |")
    assert any("| NO | NO, " in line for line in goals)
    assert readme.choices(results).endswith("int8:\n    accurate:\n      17408 x 5120: {512: ring}\n"
                                            "      1024 x 2048: {1: ring}\n    f16:\n      17408 x 5120: {512: ring}\n"
                                            "      1024 x 2048: {1: ring}\n    bf16:\n      17408 x 5120: {512: ring}\n"
                                            "      1024 x 2048: {1: ring}\n")


def test_a_record_without_a_ladder_says_so():
    none = {readme.DEVICE: {"1_grouped_gemm": {"measurements": [], "environment": {"device": "an H200"}}}}
    for table in (readme.ladder, readme.ladder_all, readme.goals, readme.rungs):
        assert table(none) == readme.NO_RECORD
    assert readme.ladder_standing(none) == "" and readme.choices(none).count("\n") == 2
