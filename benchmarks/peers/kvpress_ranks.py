"""Positions that kvpress's prompt methods keep of each context, in its own environment, without kvjax."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import kvpress
import numpy as np
import torch
import transformers
from torch import Tensor, nn


class Leverage(kvpress.LeverageScorePress):
    """Leverage with known projections: those of each layer are drawn from its own seed."""

    def score(self, module: nn.Module, *arguments: Any, **named: Any) -> Tensor:
        """Return the z-scores of all heads together, as kvpress does."""
        torch.manual_seed(module.layer_idx)
        return super().score(module, *arguments, **named)


class NonCausal(kvpress.NonCausalAttnPress):
    """Non-causal attention with 1/sqrt(d) and without padding."""

    @staticmethod
    def non_causal_chunked_attn(q: Tensor, k: Tensor, chunk_size: int) -> Tensor:
        """Return the attention that each key gets in its chunk."""
        q, whole = q / math.sqrt(q.shape[-1]), kvpress.NonCausalAttnPress.non_causal_chunked_attn
        parts = [slice(begin, begin + chunk_size) for begin in range(0, q.shape[2], chunk_size)]
        return torch.cat([whole(q[:, :, part], k[:, :, part], k[:, :, part].shape[2]) for part in parts], dim=-1)


class PerHead(kvpress.CompactorPress):
    """Compactor with z-scores of each head alone, and `NonCausal`."""

    def score(self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> Tensor:
        """Return the sum of both z-scores."""
        cos, sin = rest[1]["position_embeddings"]
        part, n = slice(self.sink_size_start, -self.sink_size_end), keys.shape[2]
        kwargs = {"position_embeddings": (cos[:, part], sin[:, part])}
        given = (module, hidden_states[:, part], keys[:, :, part], values[:, :, part], None, kwargs)
        halves = [press.score(*given) for press in (Leverage(), NonCausal())]
        first, other = ((x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) for x in halves)
        found = torch.full((*keys.shape[:2], n), torch.inf)
        found[:, :, part] = self.compression_ratio * first + other
        return found


def methods(ratio: float) -> dict[str, kvpress.ScorerPress]:
    """Return the methods at a share to evict."""
    compactor = kvpress.CompactorPress(ratio)
    compactor._leverage_press = Leverage(ratio)
    return {
        "expected_attention": kvpress.ExpectedAttentionPress(ratio),
        "expected_attention, epsilon": kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2),
        "lagkv": kvpress.LagKVPress(ratio),
        "capkv": kvpress.CapPress(ratio),
        "leverage": Leverage(ratio),
        "noncausal": kvpress.NonCausalAttnPress(ratio),
        "noncausal, corrected": NonCausal(ratio),
        "compactor": compactor,
        "compactor, corrected": PerHead(ratio),
    }


class Together(kvpress.BasePress):
    """All methods at all ratios in one reading of a context."""

    def __init__(self, ratios: list[float]) -> None:
        self.presses = {f"{name}|{ratio}": press for ratio in ratios for name, press in methods(ratio).items()}
        self.kept: dict[str, list[np.ndarray]] = {name: [] for name in self.presses}

    def compress(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, attentions: Tensor, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the cache unchanged, and store the positions that each method would keep."""
        known: dict[str, Tensor] = {}
        for name, press in self.presses.items():
            method = name if name.startswith("compactor") else name.partition("|")[0]  # only Compactor's use the ratio
            if method not in known:
                known[method] = press.score(module, hidden_states, keys, values, attentions, kwargs)
            scores = known[method]
            count = int(keys.shape[2] * (1 - press.compression_ratio))
            self.kept[name].append(scores[0].topk(count, dim=-1).indices.sort(-1).values.numpy().astype(np.uint16))
        return keys, values


@torch.inference_mode()
def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--cases", type=Path, required=True, help="from cases.py")
    parser.add_argument("--count", type=int, default=6, help="contexts to read")
    parser.add_argument("--out", type=Path, required=True, help="an .npz file")
    given = parser.parse_args()
    plan, *cases = map(json.loads, given.cases.read_text().splitlines())
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    torch.set_num_threads(1)
    config, found = model.config, dict[str, np.ndarray]()
    shape = (1, config.num_key_value_heads, config.head_dim, 48)
    drawn = [torch.randn(shape, generator=torch.manual_seed(layer)) for layer in range(config.num_hidden_layers)]
    found["projections"] = np.stack([each[0].numpy() / math.sqrt(48) for each in drawn])
    for number, case in enumerate(cases[: given.count]):
        press = Together(plan["ratios"])
        with press(model):
            model.model(input_ids=torch.tensor([case["context"]]))
        found |= {f"{number}|{name}": np.stack(layers) for name, layers in press.kept.items()}
        print(number, case["family"], flush=True)
    np.savez_compressed(given.out, **found)


if __name__ == "__main__":
    main()
