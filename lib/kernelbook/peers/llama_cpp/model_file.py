"""GGUF files of architecture qwen35, for llama.cpp to run: random weights of a model's shapes, or weights given.

What the file wants otherwise than transformers has it is done here: value heads of the gated delta net lie tiled (head
h reads key head h % 16) instead of grouped (h // 3), and the decay is stored as -exp(A_log).
"""

import math
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np

from kernelbook.formats import BLOCK, BLOCK_BYTES, TILE_ROWS, Tiles, blocks_from_tiles, open_gguf
from kernelbook.shapes import Inventory

ARCHITECTURE = "qwen35"
CONVOLUTION = 4  # taps of the depthwise convolution before a delta net
NORM_EPS = 1e-6
ROPE_BASE = 1e7
ROPE_FRACTION = 4  # a quarter of each head is rotated

ATTENTION, DELTA_NET, FFN = "attention", "delta net", "ffn"

Weights = Callable[[str, int | None], "Tiles | np.ndarray"]
"""(name, layer) -> a weight. Matrices are Tiles or Q4_0 blocks, uint8 [N, bytes]; the others float32. See `tensors`."""


@dataclass(frozen=True)
class Tensor:
    """name: what `weights` is asked for.  file_name: what the file calls it.  layer: None outside the layers.
    shape: [n, k] of a Q4_0 matrix, or that of float32 numbers.
    """

    name: str
    file_name: str
    layer: int | None
    shape: tuple[int, ...]
    quantized: bool

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * BLOCK_BYTES["Q4_0"] // BLOCK if self.quantized else 4 * math.prod(self.shape)


@dataclass(frozen=True)
class DeltaNet:
    """Heads of a gated delta net. head_dim: of keys and values."""

    key_heads: int
    value_heads: int
    head_dim: int

    @classmethod
    def of(cls, inventory: Inventory) -> "DeltaNet":
        """Read off the projections: z has the values' width, a one row a value head, qkv twice the keys' beside."""
        values, heads = inventory["gdn_z"].n, inventory["gdn_a"].n
        head_dim = values // heads
        return cls((inventory["gdn_qkv"].n - values) // (2 * head_dim), heads, head_dim)

    @property
    def tiled(self) -> np.ndarray:
        """For each value head of the file, the one of transformers' order that it is."""
        return np.arange(self.value_heads).reshape(self.key_heads, -1).T.reshape(-1)


MATRICES = {DELTA_NET: {"gdn_qkv": "attn_qkv", "gdn_z": "attn_gate", "gdn_b": "ssm_beta", "gdn_a": "ssm_alpha",
                        "gdn_out": "ssm_out"},
            ATTENTION: {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output"},
            FFN: {"gate": "ffn_gate", "up": "ffn_up", "down": "ffn_down"}}
"""Names of kernelbook.shapes to those of the file."""


def tensors(inventory: Inventory, layers: int | None = None) -> Iterator[Tensor]:
    """Every tensor of a file, in its order, the first `layers` layers of the model (default: all).

    Matrices are called as in `inventory`, and "token_embd" beside "lm_head". The others are "output_norm"; in each
    layer "attn_norm" and "ffn_norm" [hidden], as they multiply (transformers adds 1 to what it stores); in attention
    "q_norm" and "k_norm" [head_dim]; in a delta net "conv" [channels, 4], "dt_bias" and "A_log" [value heads], and
    "gdn_norm" [head_dim].
    """
    hidden, net = inventory.hidden, DeltaNet.of(inventory)
    embedding = (inventory.vocabulary, hidden)
    yield Tensor("token_embd", "token_embd.weight", None, embedding, True)
    yield Tensor("output_norm", "output_norm.weight", None, (hidden,), False)
    yield Tensor("lm_head", "output.weight", None, embedding, True)
    floats = {ATTENTION: {"q_norm": ("attn_q_norm.weight", (inventory.head_dim,)),
                          "k_norm": ("attn_k_norm.weight", (inventory.head_dim,))},
              DELTA_NET: {"conv": ("ssm_conv1d.weight", (inventory["gdn_qkv"].n, CONVOLUTION)),
                          "dt_bias": ("ssm_dt.bias", (net.value_heads,)),
                          "A_log": ("ssm_a", (net.value_heads,)),
                          "gdn_norm": ("ssm_norm.weight", (net.head_dim,))},
              FFN: {"attn_norm": ("attn_norm.weight", (hidden,)),
                    "ffn_norm": ("post_attention_norm.weight", (hidden,))}}
    for layer in range(_layers(inventory, layers)):
        mixer = ATTENTION if (layer + 1) % _interval(inventory) == 0 else DELTA_NET
        for part in (mixer, FFN):
            for name, file_name in MATRICES[part].items():
                projection = inventory[name]
                yield Tensor(name, f"blk.{layer}.{file_name}.weight", layer, (projection.n, projection.k), True)
            for name, (file_name, shape) in floats[part].items():
                yield Tensor(name, f"blk.{layer}.{file_name}", layer, shape, False)


def random_weights(inventory: Inventory, seed: int) -> Weights:
    """Valid random weights, each the same wherever and however often it is asked for.

    Scales lie within a factor of 2, about where a product has the size of what it multiplies; codes are uniform.
    """
    shapes = {tensor.name: tensor for tensor in tensors(inventory)}

    def weights(name, layer):
        tensor = shapes[name]
        place = 0 if layer is None else 1 + layer
        rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode()), place]))
        if tensor.quantized:
            return _random_blocks(rng, *tensor.shape)
        if name == "A_log":
            return np.log(rng.uniform(1, 16, tensor.shape)).astype(np.float32)
        if name == "dt_bias":  # softplus of it between 0.001 and 0.1, as such nets are initialized
            return np.log(np.expm1(np.exp(rng.uniform(np.log(1e-3), np.log(1e-1), tensor.shape)))).astype(np.float32)
        if name == "conv":
            return rng.normal(0, CONVOLUTION ** -0.5, tensor.shape).astype(np.float32)
        return rng.uniform(0.8, 1.2, tensor.shape).astype(np.float32)

    return weights


def model_weights(model) -> Weights:
    """The weights of a `kernelbook.qwen3_5.Model`, brought from its device as they are asked for: the file then holds
    the model that our own passes run, bit for bit, and logits can be compared."""
    host, rows = model.backend.numpy, {}
    for fused in model.inventory.fused():
        parts = [p for p in model.inventory.projections if p.source == fused.source]
        ends = np.cumsum([p.n for p in parts]) // TILE_ROWS
        for part, end in zip(parts, ends, strict=True):
            rows[part.name] = fused.name, slice(end - part.n // TILE_ROWS, end)

    def weights(name, layer):
        if layer is None:
            of = {"token_embd": model.embedding, "lm_head": model.lm_head, "output_norm": model.norm}
            return host(of[name]) if name == "output_norm" else Tiles(host(of[name]))
        at = model.layers[layer]
        if name in rows:
            fused, part = rows[name]
            return Tiles(host(at.projections[fused][part]))
        if at.gdn and name in (of := {"conv": at.gdn.conv, "dt_bias": at.gdn.dt_bias, "A_log": at.gdn.a_log,
                                      "gdn_norm": at.gdn.norm}):
            return of[name]
        return host({"attn_norm": at.norm, "ffn_norm": at.ffn_norm, "q_norm": at.q_norm, "k_norm": at.k_norm}[name])

    return weights


def write_gguf(path: str | os.PathLike, inventory: Inventory, weights: Weights | None = None, *,
               layers: int | None = None, seed: int = 0, origin: str | None = None) -> Path:
    """Write the model's first `layers` layers (default: all) as a GGUF file of Q4_0 matrices; returns its path.

    weights: (name, layer) -> Tiles, Q4_0 blocks or float32, in transformers' order of rows and heads; see `tensors`.
    By default `random_weights(inventory, seed)`; `model_weights` gives those of one of our own passes.
    origin: what the weights are, to tell files apart; to be given with `weights`.
    A file at `path` that says it holds the same is left as it is; a new one takes its name when it is whole.

    Raises FileExistsError for any other file there; ValueError for layers that the model has not, an inventory without
    delta nets, and weights of another shape; OSError where the disk has no room, before anything is written.
    """
    path = Path(path)
    layers = _layers(inventory, layers)
    if (weights is None) != (origin is None):
        raise ValueError("weights and origin go together: origin tells a file of these weights from others")
    origin = origin or f"random, seed {seed}"
    weights = weights or random_weights(inventory, seed)
    description = f"{inventory.name}, layers 0 to {layers - 1} of {inventory.layers}, Q4_0, {origin}"
    if path.exists():
        found = _description(path)
        if found != description:
            raise FileExistsError(f"{path} is there and holds {found or 'something else'}, not {description}; "
                                  "give another path or remove it")
        return path

    parts = list(tensors(inventory, layers))
    needed = sum(part.nbytes for part in parts)
    free = shutil.disk_usage(path.parent).free
    if free < needed + (64 << 20):
        raise OSError(f"{path} takes {needed / 1e9:.1f} GB, and {path.parent} has {free / 1e9:.1f} GB free; give a "
                      "path on another disk, or fewer layers")
    aside = path.with_name(path.name + ".partial")
    try:
        writer = _writer(aside, inventory, layers, description)
        for part in parts:
            if part.quantized:
                writer.add_tensor_info(part.file_name, (part.shape[0], part.nbytes // part.shape[0]), np.dtype("u1"),
                                       part.nbytes, gguf.GGMLQuantizationType.Q4_0)
            else:
                writer.add_tensor_info(part.file_name, part.shape, np.dtype("f4"), part.nbytes)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        net = DeltaNet.of(inventory)
        for part in parts:
            writer.write_tensor_data(_as_stored(part, weights(part.name, part.layer), net))
        writer.close()
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path


def _layers(inventory, layers):
    if any(name not in [p.name for p in inventory.projections] for name in MATRICES[DELTA_NET]):
        raise ValueError(f"{inventory.name} has no gated delta nets; files of architecture {ARCHITECTURE} have them")
    if layers is None:
        return inventory.layers
    if not 1 <= layers <= inventory.layers:
        raise ValueError(f"layers = {layers}; {inventory.name} has 1 to {inventory.layers}")
    return layers


def _interval(inventory):
    """Each so many-th layer is softmax attention."""
    return inventory.layers // inventory["o"].count


def _description(path):
    """What a file that `write_gguf` made says it holds; None for another."""
    try:
        field = open_gguf(path).get_field("general.description")
    except ValueError:
        return None
    return field.contents() if field else None


def _writer(path, inventory, layers, description):
    net = DeltaNet.of(inventory)
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_name(inventory.name)
    writer.add_description(description)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_context_length(262144)
    writer.add_vocab_size(inventory.vocabulary)
    writer.add_embedding_length(inventory.hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inventory.ffn)
    writer.add_head_count(inventory.heads)
    writer.add_head_count_kv(inventory.kv_heads)
    writer.add_key_length(inventory.head_dim)
    writer.add_value_length(inventory.head_dim)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_rope_freq_base(ROPE_BASE)
    rotated = inventory.head_dim // ROPE_FRACTION
    writer.add_rope_dimension_count(rotated)
    # pairs that turn with time, height and width: all by the same position in text. 11, 11, 10 for heads of 256
    writer.add_rope_dimension_sections([*((rotated // 2 + 2 - i) // 3 for i in range(3)), 0])
    writer.add_uint32(f"{ARCHITECTURE}.full_attention_interval", _interval(inventory))
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_inner_size(net.value_heads * net.head_dim)
    writer.add_ssm_state_size(net.head_dim)
    writer.add_ssm_time_step_rank(net.value_heads)
    writer.add_ssm_group_count(net.key_heads)
    writer.add_tokenizer_model("none")
    return writer


def _as_stored(tensor, weight, net):
    """A weight, checked, as the file has it."""
    place = tensor.name if tensor.layer is None else f"{tensor.name} of layer {tensor.layer}"
    if tensor.quantized:
        data = blocks_from_tiles(weight) if isinstance(weight, Tiles) else np.ascontiguousarray(weight)
        expected, dtype = (tensor.shape[0], tensor.nbytes // tensor.shape[0]), np.uint8
    else:
        data = np.ascontiguousarray(weight, np.float32)
        expected, dtype = tensor.shape, np.float32
    if data.shape != expected or data.dtype != dtype:
        raise ValueError(f"{place} is {data.dtype} {list(data.shape)}; expected {np.dtype(dtype)} {list(expected)}"
                         + (", the Q4_0 blocks of its rows, or Tiles" if tensor.quantized else ""))

    if tensor.name == "A_log":
        data = -np.exp(data)
    if tensor.name in ("gdn_z", "gdn_b", "gdn_a", "dt_bias", "A_log"):
        return _tiled_rows(data, net)
    if tensor.name in ("gdn_qkv", "conv"):
        keys = 2 * net.key_heads * net.head_dim
        return np.concatenate([data[:keys], _tiled_rows(data[keys:], net)])
    if tensor.name == "gdn_out":  # its columns are value heads, of whole blocks each
        return np.ascontiguousarray(data.reshape(len(data), net.value_heads, -1)[:, net.tiled]).reshape(data.shape)
    return data


def _tiled_rows(data, net):
    return np.ascontiguousarray(data.reshape(net.value_heads, -1)[net.tiled]).reshape(data.shape)


def _random_blocks(rng, n, k):
    """Q4_0 blocks of a random weight [n, k], uint8 [n, bytes]; its random bits fill memory 8 bytes at a time."""
    size = n * k // BLOCK * BLOCK_BYTES["Q4_0"]
    words = rng.integers(0, 2**64, math.ceil(size / 8), np.uint64)
    blocks = words.view(np.uint8)[:size].reshape(n, -1)
    scales = blocks.view("<u2").reshape(n, k // BLOCK, -1)[..., 0]
    # uniform codes have a root mean square of 4.6; float16 with this exponent is up to twice its power of 2
    exponent = math.floor(math.log2(1 / (4.6 * math.sqrt(k))))
    scales &= 0x03ff
    scales |= (exponent + 15) << 10
    return blocks
