"""The shape of a decoder-only model: what every family is described by."""

from __future__ import annotations

import dataclasses
from typing import Literal

from kvjax.rope import Rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Everything about a model that decides its computation, and nothing about its weights' values.

    Args:
        vocab_size: rows of the embedding table.
        width: size of the hidden state.
        layers: number of decoder blocks.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_width: size of one head.
        mlp_width: inner size of the MLP.
        max_positions: longest sequence the model was made for, in tokens.
        norm: `rms` or `layer` normalisation.
        norm_eps: added to the variance.
        activation: of the MLP.
        gated_mlp: whether the MLP multiplies by an activated gate (SwiGLU).
        parallel: attention and MLP read the same input and are added together (GPT-J, Falcon).
        position: how positions enter: `rope`, `learned` embeddings or `alibi` biases.
        rope: settings of the rotation when `position` is `rope`.
        position_offset: added to positions before the table of learned embeddings is read.
        norm_bias: whether norms add an offset.
        shared_norm: whether the MLP reads the norm of the attention (`parallel` blocks only).
        qkv_bias: whether queries, keys and values add a bias.
        output_bias: whether the attention's output projection adds a bias.
        mlp_bias: whether the MLP's projections add a bias.
        unembedding_bias: whether the logits add a bias.
        tied: whether the embedding table is also the unembedding.
        sliding_window: tokens a query sees, itself included; None for all of them (Mistral 7B v0.1: 4096).
        bos: id of the token that starts a text, if the model wants one.
        eos: ids that end a text.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    max_positions: int
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated_mlp: bool = True
    parallel: bool = False
    position: Literal["rope", "learned", "alibi"] = "rope"
    rope: Rope | None = None
    position_offset: int = 0
    norm_bias: bool = False
    shared_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    unembedding_bias: bool = False
    tied: bool = False
    sliding_window: int | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()

    @property
    def groups(self) -> int:
        """Query heads that share one key and value head."""
        return self.heads // self.kv_heads

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly.")
        if (self.position == "rope") != (self.rope is not None):
            raise ValueError(f"position={self.position!r} does not fit rope={self.rope}.")
        if self.shared_norm and not self.parallel:
            raise ValueError("shared_norm=True needs parallel=True: a sequential block normalises before its MLP.")
        if self.tied and self.unembedding_bias:
            raise ValueError("tied=True does not go with unembedding_bias=True: a tied unembedding has no bias.")
