"""Writes tests/golden/heads/*.json: the guesses of heads, computed with torch in float32. A head is a small network
that guesses further tokens. Its weights are random numbers from a seed.

The program needs the environment of ``tools/make_golden.py``:

    /tmp/oracle/bin/python tools/make_head_golden.py              # all heads
    /tmp/oracle/bin/python tools/make_head_golden.py mtp_qwen3_5  # one of them

transformers computes the model, and the decoder layer of an MTP head. This program computes all other parts of the
heads. For each position of a greedy text, a file has ``GUESSES`` guesses of the next tokens. It leaves out a guess
whose two best logits differ by less than ``MIN_MARGIN``, and the guesses after it. For these, float32 sums in another
order may choose another token.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from performance.models.folders import write_model  # noqa: E402
from performance.models.heads import (  # noqa: E402
    SPECULATORS_LAYERS,
    eagle_variant,
    hybrid_eagle_variant,
    mtp_variant,
    write_eagle_head,
    write_mtp_model,
    write_speculators_head,
)

NUM_TOKENS = 40
"""Number of greedy tokens that the main model generates after the prompt."""
PROMPT_LENGTH = 21
"""Number of tokens of the random prompt."""
GUESSES = 4
"""Maximum number of guesses of the head at each position."""
MIN_MARGIN = 2e-3
"""Minimum difference between the two best logits of a guess. The guesses from the first smaller one on are left out."""

MTP_MODELS = {
    "mtp": "deepseek_v3",
    "mtp_qwen3_next": "qwen3_next",
    "mtp_qwen3_5": "qwen3_5",
    "mtp_qwen3_5_moe": "qwen3_5_moe",
}
"""The names of the golden files of MTP layers, and the variants of their models."""
USUAL_LAYERS = (2, 4, 5)
"""Numbers of the layers that an EAGLE-3 head of a model with eight layers reads, if the head states none."""

Guess = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Type of functions that run a head. They take the hidden state and the next token of all positions, and return the
logits and the head's state of the last position.
"""


@dataclass(frozen=True)
class MtpNames:
    """The names of an MTP layer's tensors, without ``.weight``. Its norms multiply by ``offset`` + weight."""

    layer: str
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str
    offset: int


QWEN_MTP = MtpNames(
    "mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm", offset=1
)


def deepseek_mtp(number: int) -> MtpNames:
    layer = f"model.layers.{number}"
    own = (f"{layer}.{name}" for name in ("enorm", "hnorm", "eh_proj", "shared_head.norm"))
    return MtpNames(layer, *own, offset=0)


class Target:
    """A model in transformers: its greedy text and its hidden states."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def text(self, vocab_size: int) -> list[int]:
        """Returns a random prompt and the greedy tokens after it."""
        generator = np.random.Generator(np.random.PCG64(7))
        tokens = [int(each) for each in generator.integers(3, vocab_size, PROMPT_LENGTH)]
        for _ in range(NUM_TOKENS):
            tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens

    def states(self, tokens: list[int]) -> list[torch.Tensor]:
        """Returns the embedding and the hidden states after each layer, [tokens, hidden_size] each.

        The hidden states after the last layer are normalised.
        """
        output = self.model.model(torch.tensor([tokens]), output_hidden_states=True)
        return [each[0] for each in output.hidden_states]

    def streams(self, tokens: list[int]) -> list[torch.Tensor]:
        """Returns the same as ``states``, but the hidden states after the last layer are not normalised."""
        found: list[torch.Tensor] = []
        last = self.model.model.layers[-1]
        hook = last.register_forward_hook(
            lambda _, __, output: found.append((output[0] if isinstance(output, tuple) else output)[0])
        )
        before = self.states(tokens)[:-1]
        hook.remove()
        return [*before, found[0]]


def mtp_guess(folder: Path, target: Target) -> Guess:
    config = AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    names = QWEN_MTP if hasattr(config, "linear_num_key_heads") else deepseek_mtp(config.num_hidden_layers)
    index = config.num_hidden_layers if names.offset == 0 else config.layer_types.index("full_attention")
    weights = {name: each.float() for name, each in load_file(folder / "mtp.safetensors").items()}
    layer = type(target.model.model.layers[0])(config, index).eval()
    prefix = f"{names.layer}."
    of_layer = {name.removeprefix(prefix): each for name, each in weights.items() if name.startswith(prefix)}
    layer.load_state_dict(_as_modules(of_layer, layer))
    rotary = target.model.model.rotary_emb

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], names.offset + weights[f"{name}.weight"], config.rms_norm_eps)

    def guess(states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = norm(target.model.model.embed_tokens(tokens), names.embedding_norm)
        joined = torch.cat([embedded, norm(states, names.state_norm)], -1)
        x = linear(joined, weights[f"{names.projection}.weight"])[None]
        count = x.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        found = layer(
            x,
            attention_mask=mask,
            position_embeddings=rotary(x, torch.arange(count)[None]),
            position_ids=torch.arange(count)[None],
        )
        hidden = norm((found[0] if isinstance(found, tuple) else found)[0], names.norm)
        return target.model.lm_head(hidden[-1]), hidden[-1]

    return guess


def _as_modules(weights: dict[str, torch.Tensor], layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the weights of the decoder layer with the names and shapes of transformers, which stacks the experts."""
    wanted, found = layer.state_dict(), {}
    for name, tensor in wanted.items():
        if name in weights:
            found[name] = weights[name]
        elif name.endswith("experts.gate_up_proj"):
            pairs = [
                [weights[f"mlp.experts.{i}.{part}_proj.weight"] for part in ("gate", "up")]
                for i in range(tensor.shape[0])
            ]
            found[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif name.endswith("experts.down_proj"):
            found[name] = torch.stack([weights[f"mlp.experts.{i}.down_proj.weight"] for i in range(tensor.shape[0])])
        else:
            raise SystemExit(f"no tensor for {name}")
    return found


def eagle_guess(folder: Path, target: Target) -> Guess:
    whole = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = whole | whole.get("transformer_layer_config", {})
    layer = "layers.0" if "transformer_layer_config" in whole else "midlayer"
    begins_normed = whole.get("norm_before_residual", False)
    stored = load_file(folder / "model.safetensors")
    weights = {name: each.float() if each.is_floating_point() else each for name, each in stored.items()}
    dim, heads, kv_heads = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    frequencies = 1.0 / config["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])

    def of(x: torch.Tensor, name: str) -> torch.Tensor:
        return linear(x, weights[f"{layer}.{name}.weight"])

    def rotated(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * frequencies
        cos, sin = (torch.cat([each, each], -1) for each in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def guess(states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = norm(target.model.model.embed_tokens(tokens), f"{layer}.input_layernorm")
        normed = norm(states, f"{layer}.hidden_norm")
        x = torch.cat([embedded, normed], -1)
        query, key, value = (
            of(x, f"self_attn.{name}_proj").unflatten(-1, (-1, dim)).transpose(0, 1) for name in ("q", "k", "v")
        )
        key, value = (each.repeat_interleave(heads // kv_heads, 0) for each in (rotated(key), value))
        attended = scaled_dot_product_attention(rotated(query), key, value, is_causal=True)
        stream = normed if begins_normed else states
        residual = stream + of(attended.transpose(0, 1).flatten(1), "self_attn.o_proj")
        inner = norm(residual, f"{layer}.post_attention_layernorm")
        hidden = residual + of(silu(of(inner, "mlp.gate_proj")) * of(inner, "mlp.up_proj"), "mlp.down_proj")
        logits = torch.full((config["vocab_size"],), float("-inf"))
        places = weights["d2t"] + torch.arange(config["draft_vocab_size"])
        logits[places] = linear(norm(hidden[-1], "norm"), weights["lm_head.weight"])
        return logits, hidden[-1]

    return guess


def guesses(states: torch.Tensor, tokens: list[int], count: int, guess: Guess) -> list[int]:
    """Returns the head's guesses of the tokens that follow the first ``count`` tokens.

    ``states`` [tokens, width] are the hidden states of the main model.
    """
    known, following, found = states[: count - 1], tokens[1:count], []
    for _ in range(GUESSES):
        logits, own = guess(known, torch.tensor(following))
        best = logits.topk(2)
        found.append(int(best.indices[0]))
        if float(best.values[0] - best.values[1]) < MIN_MARGIN:
            return found[:-1]
        known, following = torch.cat([known, own[None]]), [*following, found[-1]]
    return found


def write(name: str, tokens: list[int], states: torch.Tensor, guess: Guess) -> None:
    counts = range(PROMPT_LENGTH + 1, len(tokens))
    found = {str(count): guesses(states, tokens, count, guess) for count in counts}
    path = ROOT / "tests" / "golden" / "heads" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"oracle": f"torch {torch.__version__}, float32", "prompt": tokens[:PROMPT_LENGTH],
                "tokens": tokens[PROMPT_LENGTH:], "guesses": found}  # fmt: skip
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")
    whole = sum(len(each) == GUESSES for each in found.values())
    print(f"{path}: {whole} of {len(found)} places have {GUESSES} guesses")


def write_mtp(name: str, variant: Any, folder: Path) -> None:
    write_mtp_model(folder, variant)
    target = Target(folder)
    tokens = target.text(variant.config["vocab_size"])
    write(name, tokens, target.states(tokens)[-1], mtp_guess(folder, target))


def write_eagle(variant: Any, folder: Path, heads: Mapping[str, tuple[Callable[..., None], Sequence[int]]]) -> None:
    """Writes the guesses of EAGLE-3 heads for one model.

    ``heads`` has, for each name of a file, the function that writes the head, and the numbers of the layers that the
    head reads.
    """
    write_model(variant, folder)
    target = Target(folder)
    tokens = target.text(variant.config["vocab_size"])
    after = target.streams(tokens)
    for name, (write_head, numbers) in heads.items():
        head = folder.with_name(name)
        write_head(head, variant)
        joined = torch.cat([after[each] for each in numbers], -1)
        fused = linear(joined, load_file(head / "model.safetensors")["fc.weight"].float())
        write(name, tokens, fused, eagle_guess(head, target))


@torch.no_grad()
def main() -> None:
    names = sys.argv[1:] or [*MTP_MODELS, "eagle", "eagle_hybrid"]
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            folder = Path(scratch) / f"model_{name}"
            if name in MTP_MODELS:
                write_mtp(name, mtp_variant(MTP_MODELS[name]), folder)
            elif name == "eagle":
                heads = {"eagle": (write_eagle_head, USUAL_LAYERS)}
                write_eagle(
                    eagle_variant(), folder, heads | {"speculators": (write_speculators_head, SPECULATORS_LAYERS)}
                )
            else:
                write_eagle(hybrid_eagle_variant(), folder, {name: (write_eagle_head, USUAL_LAYERS)})


if __name__ == "__main__":
    main()
