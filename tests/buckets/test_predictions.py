import pytest

from kernelbook.buckets import Activity, Trace, analyze, article, predictions, read, rules
from kernelbook.shapes import QWEN3_5_27B, SMOLLM2_135M


def launches(expected):
    return {line.what: line.launches for line in expected}


@pytest.mark.parametrize("multiprocessors, fixups", [(170, 320), (132, 480)])
def test_llama_cpps_launches(multiprocessors, fixups):
    found = launches(predictions.llama_cpp(QWEN3_5_27B, multiprocessors))
    assert found["activations quantized"] == found["products"] == 496
    assert found["products, unchecked instance"] == 400 and found["products, checked instance"] == 96
    assert found["stream-k fixups"] == fixups
    # 64 layers, 48 of them delta nets and 16 attentions
    assert found["norms"] == 2 * 64 + 1 + 3 * 48 + 2 * 16 == 305 and found["joins of state and inputs"] == 48
    assert found["gated units"] == 128 and found["sums and products of elements"] == 224
    assert found["scalings"] == found["gates of step and decay"] == 96


def test_small_kernels_are_predicted_where_there_are_delta_nets():
    assert "norms" in launches(predictions.llama_cpp(QWEN3_5_27B, 132))
    assert not {"norms", "gated delta nets"} & launches(predictions.llama_cpp(SMOLLM2_135M, 132)).keys()


@pytest.mark.parametrize("multiprocessors, without", [(170, {"gdn_qkv", "gdn_out", "o", "down"}), (132, {"q"})])
def test_products_that_tiles_fill_the_gpu_with_need_no_fixup(multiprocessors, without):
    found = {p.name for p in QWEN3_5_27B.projections if not predictions.fixup_needed(p, 512, multiprocessors)}
    assert found == without


def test_a_number_of_tiles_that_divides_evenly_needs_no_fixup():
    down = QWEN3_5_27B["down"]  # 40 tiles of rows
    assert not predictions.fixup_needed(down, 128, 40) and predictions.fixup_needed(down, 128, 27)


def test_counted_beside_predicted(data):
    part, = analyze(read(data / "h200_llama_cpp_kern_sum.csv"), rules(), "3")
    lines = predictions.beside(part, predictions.llama_cpp(QWEN3_5_27B, 132))
    assert all(line.agrees for line in lines) and len(lines) == 16
    other = predictions.beside(part, predictions.llama_cpp(QWEN3_5_27B, 170))
    assert [line.expected.what for line in other if not line.agrees] == ["stream-k fixups"]


def test_bare_names_cannot_tell_template_instances():
    part, = analyze(Trace("t", "test", (Activity("mul_mat_q", 5, 496),)), rules(), "1")
    lines = {line.expected.what: line for line in predictions.beside(part, predictions.llama_cpp(QWEN3_5_27B, 132))}
    assert lines["products"].agrees and lines["products, unchecked instance"].agrees is None
    assert lines["stream-k fixups"].counted == 0 and lines["stream-k fixups"].agrees is False


@pytest.mark.parametrize("ending", ["(ggml_type)2, (int)128, (bool)0", "(ggml_type)2, 128, false"])
def test_profilers_print_template_arguments_in_two_ways(ending):
    part, = analyze(Trace("t", "test", (Activity(f"void mul_mat_q<{ending}>(char const*)", 5, 400),)), rules(), "1")
    expected = predictions.llama_cpp(QWEN3_5_27B, 132)
    lines = {line.expected.what: line.counted for line in predictions.beside(part, expected)}
    assert (lines["products, unchecked instance"], lines["products, checked instance"]) == (400, 0)


def test_the_articles_engine():
    apart, fused = (line.launches for line in predictions.tiled_engine(QWEN3_5_27B))
    counted = article.tables().engine.launches_a_pass
    assert (apart, fused) == (15872, 8192) and fused <= counted <= apart and abs(counted / fused - 1) < 0.1
    assert predictions.rereads(512, 16) == 32 and predictions.rereads(513, 16) == 33


def test_bytes_of_a_pass():
    tiled, whole = (predictions.traffic(QWEN3_5_27B, 512, tile, 4.5) for tile in (16, 512))
    assert whole.weights == 24_350_556_160 * 4.5 / 8 and tiled.weights == 32 * whole.weights
    assert tiled.activations == whole.activations and tiled.total == tiled.weights + tiled.activations


def test_bad_input():
    with pytest.raises(ValueError, match="tokens = 8; expected more than 8"):
        predictions.llama_cpp(QWEN3_5_27B, 132, tokens=8)
    with pytest.raises(ValueError, match="multiprocessors = 0"):
        predictions.llama_cpp(QWEN3_5_27B, 0)
    with pytest.raises(ValueError, match="tile = 0"):
        predictions.rereads(512, 0)
