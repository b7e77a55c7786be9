"""nanochat: Llama whose norms have no scales, with norms of embeddings, queries and keys, and an MLP without a gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from kvjax.models.config import ModelConfig
from kvjax.models.families.family import SIZES, Family, LoadError, Settings, Source, Tensor, module_sources
from kvjax.models.families.llama import LLAMA_SOURCES, llama_config
from kvjax.models.families.settings import optional_number


def _config(settings: Settings) -> ModelConfig:
    # The model normalizes after RoPE. Without scales, norms before it give the same unless it changes lengths.
    config = llama_config(
        settings,
        norm_scales=False,
        embedding_norm=True,
        query_key_norms=True,
        query_key_scales=False,
        gated_mlp=False,
        logit_soft_cap=optional_number(settings, "final_logit_softcapping"),
    )
    if config.rope is not None and config.rope.magnitude != 1:
        raise LoadError(f"rope_type {config.rope.scaling!r} is not supported for nanochat.")
    return config


def _swapped(source: Source) -> Source:
    """Return the source of queries or keys with the halves of each head swapped, since nanochat rotates backwards."""

    def read(tensor: Tensor, config: ModelConfig) -> Tensor:
        halves = tensor.reshape(-1, 2, config.head_width // 2, *tensor.shape[1:])
        return halves[:, ::-1].reshape(tensor.shape)

    return dataclasses.replace(source, read=read)


_MAPS = {"layers.mlp.up": "mlp.fc1", "layers.mlp.down": "mlp.fc2"}
_ROTATED = [f"layers.mixer.{leaf}.{part}" for leaf in ("query", "key") for part in ("weight", "bias")]

FAMILIES: Mapping[str, Family] = {
    "nanochat": Family(
        _config,
        {
            **LLAMA_SOURCES,
            **{leaf: _swapped(LLAMA_SOURCES[leaf]) for leaf in _ROTATED},
            **module_sources("model.layers", _MAPS),
        },
        {"hidden_act": "relu2", "bos_token_id": 0, "eos_token_id": 1},
        {"tie_word_embeddings": (False,), "mlp_bias": (False,)},
        looked_up=(*SIZES, "final_logit_softcapping"),
    ),
}
