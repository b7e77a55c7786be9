"""Positions that kvpress's prompt methods keep of each context, in its own environment, without kvjax."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import kvpress
import numpy as np
import torch
import transformers
from torch import Tensor, nn

EVERY = 64
"""Tokens between two evictions of `snapkv_decode`."""


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


class ChunksOfHeads(kvpress.ChunkKVPress):
    """ChunkKV with chunks of each head's own."""

    def compress(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that stay."""
        found: list[tuple[Tensor, Tensor]] = []
        for head in range(keys.shape[1]):
            own = slice(head, head + 1)
            found.append(super().compress(module, hidden_states, keys[:, own], values[:, own], *rest))
        return torch.cat([k for k, _ in found], 1), torch.cat([v for _, v in found], 1)


class OfInputs(kvpress.KVzipPress):
    """KVzip+ that divides by the norm of a layer's input, instead of by that of the normalized input."""

    def _compute_cross_attention(self, module: nn.Module, hidden_states: Tensor, *rest: Any) -> Tensor:
        found = super()._compute_cross_attention(module, hidden_states, *rest)
        norms = (x.norm(dim=-1)[:, None, None, :, None] for x in (hidden_states, module.layer_input))
        return found * next(norms) / next(norms)


def keep_input(layer: nn.Module, given: tuple[Tensor, ...], named: dict[str, Any]) -> None:
    """Store the input of a layer for `OfInputs`."""
    layer.self_attn.layer_input = given[0] if given else named["hidden_states"]


def finch(ratio: float) -> kvpress.FinchPress:
    """Return FINCH whose question is the last 32 tokens."""
    press = kvpress.FinchPress(ratio)
    press.window_size = 32
    return press


def chunked(ratio: float) -> dict[str, kvpress.ChunkKVPress]:
    """Return the methods that keep chunks, at a share to evict."""
    kinds = {"chunkkv": kvpress.ChunkKVPress, "chunkkv, corrected": ChunksOfHeads}
    return {name: kind(kvpress.KnormPress(ratio)) for name, kind in kinds.items()}


def replaying(ratio: float) -> dict[str, kvpress.KVzipPress]:
    """Return the methods that read a context again, at a share to evict."""
    return {
        "kvzip": kvpress.KVzipPress(ratio),
        "kvzip, normalized": kvpress.KVzipPress(ratio, kvzip_plus_normalization=True),
        "kvzip, normalized, corrected": OfInputs(ratio, kvzip_plus_normalization=True),
    }


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
        "finch": finch(ratio),
    }


class Together(kvpress.BasePress):
    """All methods at all ratios in one reading of a context."""

    def __init__(self, ratios: list[float]) -> None:
        self.presses = {f"{name}|{ratio}": press for ratio in ratios for name, press in methods(ratio).items()}
        self.chunked = {f"{name}|{ratio}": press for ratio in ratios for name, press in chunked(ratio).items()}
        self.kept: dict[str, list[np.ndarray]] = {name: [] for name in (*self.presses, *self.chunked)}

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
            self.kept[name].append(mask(scores[0].topk(count, dim=-1).indices, keys.shape[2]))
        for name, press in self.chunked.items():
            whole = slice(keys.shape[2] // press.chunk_length * press.chunk_length)
            places = torch.arange(whole.stop)[None, None, :, None].expand_as(keys[:, :, whole])
            _, places = press.compress(module, hidden_states, keys[:, :, whole], places, None, kwargs)
            self.kept[name].append(mask(places[0, :, :, 0], whole.stop))
        return keys, values


class Tracked(kvpress.SnapKVPress):
    """SnapKV that stores the positions of the text that each layer holds."""

    def __init__(self) -> None:
        super().__init__(window_size=32, kernel_size=7)
        self.held: dict[int, Tensor] = {}

    def order(self, best: Tensor) -> Tensor:
        """Return the places that stay in the order in which they are stored: as kvpress does, best first."""
        return best

    def compress(
        self, module: nn.Module, hidden_states: Tensor, keys: Tensor, values: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values that stay."""
        layer, length = module.layer_idx, keys.shape[2]
        held = self.held.get(layer, torch.empty(keys.shape[1], 0, dtype=torch.long))
        begin = int(held.max()) + 1 if held.numel() else 0
        new = torch.arange(begin, begin + length - held.shape[1]).expand(keys.shape[1], -1)
        count = int(length * (1 - self.compression_ratio))
        best = self.order(self.score(module, hidden_states, keys, values, *rest)[0].topk(count, dim=-1).indices)
        self.held[layer] = torch.cat([held, new], 1).gather(1, best)
        places = best[None, :, :, None].expand(1, -1, -1, keys.shape[-1])
        return keys.gather(2, places), values.gather(2, places)


class Rotated(Tracked):
    """SnapKV whose queries are rotated to their own positions, and whose keys stay in the order of the text."""

    def order(self, best: Tensor) -> Tensor:
        """Return the places in the order of the text, so that neighbors are pooled."""
        return best.sort(-1).values

    @staticmethod
    def compute_window_attention(
        module: nn.Module, hidden_states: Tensor, keys: Tensor, window: int, rotation: tuple[Tensor, Tensor]
    ) -> Tensor:
        """Return the attention of the last queries to the keys before them."""
        last = module.newest + torch.arange(-window + 1, 1)[None]
        rotation = module.rotation[0](hidden_states, last)
        return Tracked.compute_window_attention(module, hidden_states, keys, window, rotation)


def decoded(model: nn.Module, context: list[int], slots: int, press: Tracked) -> np.ndarray:
    """Return a mask of what is held of a context, [layers, heads, length].

    The first `slots` tokens are a prompt. The others follow one by one, and every `EVERY` of them are evicted.
    """
    cache, layers = transformers.DynamicCache(), model.model.layers
    whole = kvpress.DecodingPress(press, EVERY, slots, EVERY)
    for layer in layers:
        layer.self_attn.rotation = [model.model.rotary_emb]  # in a list, so that it is no part of the layer
    with whole(model):
        model.model(input_ids=torch.tensor([context[:slots]]), past_key_values=cache)
        for position, token in enumerate(context[slots:], slots):
            for layer in layers:
                layer.self_attn.newest = position
            model.model(
                input_ids=torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[position]])
            )
    return np.stack([mask(press.held[number], len(context)) for number in range(len(layers))])


def mask(places: Tensor, length: int) -> np.ndarray:
    """Return True at the given places of each head, as [heads, length]."""
    return torch.zeros(places.shape[0], length, dtype=torch.bool).scatter(1, places, True).numpy()


def reread(model: nn.Module, context: list[int], press: kvpress.KVzipPress) -> np.ndarray:
    """Return a mask of what KVzip keeps of a context, [layers, heads, length]."""
    with press(model):
        model.model(input_ids=torch.tensor([context]), past_key_values=transformers.DynamicCache())
    kept = np.ones((len(model.model.layers), model.config.num_key_value_heads, len(context)), bool)
    for layer, own in zip(model.model.layers, kept, strict=True):
        _, heads, places = layer.self_attn.masked_key_indices
        own[heads.numpy(), places.numpy()] = False
        layer.self_attn.masked_key_indices = None
    return kept


@torch.inference_mode()
def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="a Hugging Face directory")
    parser.add_argument("--cases", type=Path, required=True, help="from cases.py")
    parser.add_argument("--count", type=int, default=6, help="contexts to read")
    parser.add_argument("--out", type=Path, required=True, help="an .npz file")
    parser.add_argument("--decoding-only", action="store_true", help="leave out methods that rank a prompt once")
    given = parser.parse_args()
    plan, *cases = map(json.loads, given.cases.read_text().splitlines())
    model = transformers.AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).eval()
    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(given.model)
    tokenizer.chat_template = None  # contexts have none
    kvpress.presses.kvzip_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda name: tokenizer)
    for layer in model.model.layers:
        layer.register_forward_pre_hook(keep_input, with_kwargs=True)
    config, found = model.config, dict[str, np.ndarray]()
    shape = (1, config.num_key_value_heads, config.head_dim, 48)
    drawn = [torch.randn(shape, generator=torch.manual_seed(layer)) for layer in range(config.num_hidden_layers)]
    found["projections"] = np.stack([each[0].numpy() / math.sqrt(48) for each in drawn])
    for number, case in enumerate(cases[: given.count]):
        if not given.decoding_only:
            press = Together(plan["ratios"])
            with press(model):
                model.model(input_ids=torch.tensor([case["context"]]))
            found |= {f"{number}|{name}": np.stack(layers) for name, layers in press.kept.items()}
            again = {f"{name}|{ratio}": each for ratio in plan["ratios"] for name, each in replaying(ratio).items()}
            found |= {f"{number}|{name}": reread(model, case["context"], each) for name, each in again.items()}
        for ratio in plan["ratios"]:
            slots = int(len(case["context"]) * (1 - ratio))
            for name, each in (("snapkv_decode", Tracked()), ("snapkv_decode, corrected", Rotated())):
                found[f"{number}|{name}|{ratio}"] = decoded(model, case["context"], slots, each)
        print(number, case["family"], flush=True)
    np.savez_compressed(given.out, **found)


if __name__ == "__main__":
    main()
