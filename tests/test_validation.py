"""The gate accepts right kernels of every form and refuses wrong ones, by the check that is made for the fault."""

import functools
import re
from dataclasses import replace

import numpy as np
import pytest

from kernelbook import pv_model
from kernelbook.fragments import INSTRUCTIONS, Tokens
from kernelbook.pv_model import decode
from kernelbook.validation import Check, Report, validate

MMAC = Tokens(INSTRUCTIONS["mmac_i32_16x16x32_i8"])
TOKENS = [pytest.param(Tokens(i, 16, operand), id=f"{i.name}-{operand}")
          for i in INSTRUCTIONS.values() for operand in "AB"
          if i.D.dtype is np.int32 and getattr(i, operand).dtype is np.int8]
FRAGMENT, MODEL, FLOAT64 = "scales belong to their fragment", "agrees with the model", "agrees with float64 attention"
TOKEN, ELSE, WRITES = "reads every token", "reads nothing else", "writes every output"


def kernel(tokens=MMAC, **form):
    return lambda q, cache: decode(q, cache, tokens, **form)


def detail(report, name):
    return next(check.detail for check in report.checks if check.name == name)


# ---- right kernels

@pytest.mark.parametrize("largest", [127, 255])
@pytest.mark.parametrize("tokens", TOKENS)
def test_the_model_of_every_map_is_accepted(tokens, largest):
    report = validate(kernel(tokens, largest=largest), tokens, largest=largest)
    assert report.passed, report


@pytest.mark.parametrize("shape,form", [
    ({"kv_heads": 1, "group": 8, "head_dim": 96, "block_size": 32}, {"partition": 128, "scale_tokens": 64}),
    ({"kv_heads": 4, "group": 1, "head_dim": 256, "block_size": 544}, {"partition": 512, "scale_tokens": 512}),
    ({"kv_heads": 3, "group": 3, "lengths": (5, 700)}, {"scale_tokens": 128}),
    ({"seed": 7}, {"scale_tokens": 256}),
])
def test_shapes_partitions_and_groups_that_are_declared_are_accepted(shape, form):
    report = validate(kernel(**form), MMAC, **shape, **form)
    assert report.passed, report


def another_rounding(q, cache):
    """Scores off by up to 2**-19, and so weights by 1.3e-6 of themselves, as a device's exp2 may have them."""
    rng = np.random.default_rng(3)
    out = np.zeros(q.shape, np.float32)
    for place, queries, k_codes, k_scales, v_codes, v_scales in pv_model.by_kv_head(q, cache):
        scores = pv_model.scores(queries[0], k_codes, k_scales)
        scores += 2.0 ** -19 * rng.uniform(-1, 1, scores.shape).astype(np.float32)
        parts = pv_model.partitions(scores, v_codes, v_scales, MMAC)
        merge = pv_model.merge_weights(parts)[:, :, None]
        out[place] = sum(w * part.trace.out for w, part in zip(merge, parts, strict=True))
    return out


def test_a_kernel_that_rounds_differently_is_accepted():
    """So many tokens that some codes are others; another softmax is that of prefill, whose weights are not
    normalized."""
    report = validate(another_rounding, MMAC, group=8, lengths=8 * (1300,))
    assert report.passed, report
    report = validate(lambda q, cache: pv_model.prefill(q, cache, MMAC, cache.lengths - 1), MMAC)
    assert report.passed, report


# ---- wrong kernels: functions on top of the right one

right = kernel()


@functools.cache
def report_on(name):
    return validate(WRONG[name][0], MMAC)


def with_tail_of(value):
    def attend(q, cache):
        out = right(q, cache)
        out[:, :, 4:] = value
        return out
    return attend


def with_lengths(change):
    """On a cache of other lengths, where what is stale is read as a device reads it: NaN gives NaN."""
    def attend(q, cache):
        lengths = np.where(cache.lengths > 0, change(cache.lengths), 0).astype(np.int32)
        longer = replace(cache, lengths=lengths, k_scales=np.nan_to_num(cache.k_scales),
                         v_scales=np.nan_to_num(cache.v_scales), k_codes=np.maximum(cache.k_codes, -127),
                         v_codes=np.maximum(cache.v_codes, -127))
        out = right(q, longer)
        for sequence, length in enumerate(lengths):
            page, offset = cache.slots(sequence, 0, int(length)).T
            if np.isnan(cache.v_scales[page, :, offset]).any():
                out[sequence] = np.nan
        return out
    return attend


def nan_swallowed(q, cache):
    """One token too many, in a kernel whose maxima and conversions make 0 of NaN."""
    cleaned = replace(cache, k_scales=np.nan_to_num(cache.k_scales), v_scales=np.nan_to_num(cache.v_scales))
    return with_lengths(lambda n: n + 1)(q, cleaned)


def without_merge_weights(q, cache):
    out = np.zeros(q.shape, np.float32)
    for place, queries, k_codes, k_scales, v_codes, v_scales in pv_model.by_kv_head(q, cache):
        if len(k_scales):
            parts = pv_model.partitions(pv_model.scores(queries[0], k_codes, k_scales), v_codes, v_scales, MMAC)
            out[place] = np.mean([part.trace.out for part in parts], axis=0)
    return out


def interleaved_heads(q, cache):
    """Query head h reads KV head h % kv_heads."""
    heads = np.arange(q.shape[2]).reshape(-1, cache.kv_heads).T.ravel()
    out = np.empty_like(q)
    out[:, :, heads] = right(q[:, :, heads], cache)
    return out


def keys_of_another_head(q, cache):
    return right(q, replace(cache, k_codes=cache.k_codes[:, ::-1].copy(), k_scales=cache.k_scales[:, ::-1].copy()))


def swapped_blocks_of_v(q, cache):
    """The first two pages of a sequence, of V only: swapped for both K and V they would be the same attention."""
    v_codes, v_scales = cache.v_codes.copy(), cache.v_scales.copy()
    for table, length in zip(cache.block_tables, cache.lengths, strict=True):
        if length >= 2 * cache.block_size:
            for v in (v_codes, v_scales):
                v[table[:2]] = v[table[1::-1]]
    return right(q, replace(cache, v_codes=v_codes, v_scales=v_scales))


def zeroed(q, cache):
    """Launched without its last sequence, into an output of zeros."""
    out = right(q, cache)
    out[-1] = 0
    return out


def garbage_for_nothing(q, cache):
    out = right(q, cache)
    out[cache.lengths == 0] = 3e-5
    return out


WRONG = {
    "logical grouping": (kernel(grouping="logical"), FRAGMENT, "with scales of logical tokens"),
    "8-byte load": (kernel(read=8), TOKEN, "357 of 717 tokens do not count: 8-15, 24-31, .* read 8 of the 16 bytes"),
    "common scale": (kernel(common_scale=True), "scale of every token", "all count alike, as with one common scale"),
    "groups of 64": (kernel(scale_tokens=64), FRAGMENT, "with a scale for 64 tokens"),
    "unsigned codes": (kernel(largest=255), MODEL, "with codes up to 255"),
    "unwritten rows": (with_tail_of(np.nan), WRITES, "768 of 2304 outputs are not finite.* head 4, dimension 0"),
    "rows of zeros": (with_tail_of(0), WRITES, "10 rows are all 0.* sequence 1 of length 1, head 4"),
    "sequence of zeros": (zeroed, WRITES, "6 rows are all 0.* sequence 5 of length 717, head 0"),
    "garbage for length 0": (garbage_for_nothing, WRITES, "length 0 gives 3e-05 instead of exactly 0"),
    "last partition ignored": (with_lengths(lambda n: np.where(n > 256, n // 256 * 256, n)), TOKEN,
                               "205 of 717 tokens do not count: 512-716"),
    "one token too few": (with_lengths(lambda n: n - 1), TOKEN, "1 of 717 tokens do not count: 716"),
    "one token too many": (with_lengths(lambda n: n + 1), ELSE, "NaN behind the lengths change .* huge numbers"),
    "one too many, NaN swallowed": (nan_swallowed, ELSE, "^huge numbers behind the lengths change"),
    "no merge weights": (without_merge_weights, TOKEN, "717 of 717 tokens count with another weight"),
    "interleaved heads": (interleaved_heads, "reads its own KV head",
                          "first head 1: K of KV head 1 and V of KV head 1 instead of 0"),
    "keys of another head": (keys_of_another_head, "reads its own KV head",
                             "6 of 6 .* head 0: K of KV head 1 and V of KV head 0 instead of 0"),
    "swapped blocks": (swapped_blocks_of_v, TOKEN, r"tokens count with another weight than theirs: [\d\-, ]*31?"),
    "softmax scale": (lambda q, cache: decode(q, cache, MMAC, softmax_scale=0.126), MODEL, "outputs beyond"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_kernel_is_caught_by_the_check_made_for_it(name):
    _, check, words = WRONG[name]
    report = report_on(name)
    assert not report.passed and check in report.caught_by, report
    assert re.search(words, detail(report, check)), report


def test_checks_without_a_bearing_on_the_fault_pass():
    """A check names a kind of fault only if others do not set it off."""
    for name, others in (("interleaved heads", {FRAGMENT, TOKEN, WRITES, ELSE}), ("logical grouping", {WRITES, ELSE}),
                         ("common scale", {WRITES, TOKEN, ELSE}), ("unwritten rows", {ELSE}),
                         ("groups of 64", {WRITES, TOKEN, ELSE, FLOAT64}), ("no merge weights", {WRITES, ELSE})):
        assert not others & set(report_on(name).caught_by), name


def test_faults_of_the_result_fail_both_comparisons():
    """Against the model and against float64, which know nothing of each other."""
    for name in ("logical grouping", "8-byte load", "common scale", "no merge weights", "interleaved heads",
                 "last partition ignored"):
        assert {MODEL, FLOAT64} <= set(report_on(name).caught_by), name


def test_a_loose_test_accepts_what_the_gate_refuses():
    for name in ("logical grouping", "8-byte load", "groups of 64"):
        report = report_on(name)
        assert "finite but wrong" in report.caught_by and "accepts this kernel" in detail(report, "finite but wrong")
    report = report_on("unwritten rows")
    assert "finite but wrong" not in report.caught_by and "refuses" in detail(report, "finite but wrong")


def test_logical_grouping_is_right_where_both_cuts_are_the_same():
    narrow = Tokens(MMAC.instruction, 8)
    assert validate(kernel(narrow, grouping="logical"), narrow).passed


def test_a_report_reads_as_a_table():
    report = Report((Check("one", True, "is fine"), Check("another", False, "is 3 off")))
    assert str(report) == "1 of 2 checks passed\npassed  one      is fine\nFAILED  another  is 3 off"
    assert report.caught_by == ["another"] and not report.passed


BAD = [
    (ValueError, "group = 0", {"group": 0}),
    (ValueError, "head_dim = 48", {"head_dim": 48}),
    (ValueError, "block_size = 24", {"block_size": 24}),
    (ValueError, "kv_heads = 65; expected at most head_dim, 64", {"kv_heads": 65}),
    (ValueError, r"lengths = \(3, 256\); .* beyond a partition of 256", {"lengths": (3, 256)}),
    (ValueError, r"lengths = \(-1, 300\)", {"lengths": (-1, 300)}),
    (ValueError, r"lengths = \(5000,\)", {"lengths": (5000,)}),
    (ValueError, "largest = 100", {"largest": 100}),
    (ValueError, "scale_tokens = 48", {"scale_tokens": 48}),
    (ValueError, "partition = 96", {"partition": 96}),
    (ValueError, "is not an INT8 instruction", {"tokens": Tokens(INSTRUCTIONS["mfma_f32_16x16x16_bf16"])}),
]


@pytest.mark.parametrize("kind,words,change", BAD, ids=[words for _, words, _ in BAD])
def test_bad_parameters_are_refused_before_the_kernel_runs(kind, words, change):
    def never(q, cache):
        raise AssertionError("the kernel ran")
    with pytest.raises(kind, match=words):
        validate(never, **({"tokens": MMAC} | change))


def test_outputs_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="attend returned float64"):
        validate(lambda q, cache: q.astype(float), MMAC)
    with pytest.raises(TypeError, match="attend returned NoneType"):
        validate(lambda q, cache: None, MMAC)
    with pytest.raises(ValueError, match=r"the shape \(6, 6, 64\); expected that of q, \(6, 1, 6, 64\)"):
        validate(lambda q, cache: q[:, 0], MMAC)
