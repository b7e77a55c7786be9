"""Configuration of a decoder-only model, the same class for every family."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from kvjax.rope import Rope
from kvjax.types import ALONE, LayerConfig, Spread
from pallas_kernels.attention import alibi_slopes


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Experts in place of the MLP of some blocks.

    Args:
        count: number of experts in a block.
        used: number of experts that each token uses.
        width: inner size of one expert.
        renormalised: True if the weights of a token's experts sum to 1.
        dense_layers: numbers of the layers that keep one MLP.
        router_bias: True if the router adds a bias to its logits (gpt-oss).
        probability: function from the router's logits to the weights of experts.
        weighted_inputs: True if weights multiply the inputs of experts, and not their outputs (Llama 4).
        shared_width: inner size of an expert that every token uses; None for none.
        shared_gate: True if the weight of that expert is the sigmoid of a projection of the input (Qwen3-Next), and
            not 1.
        scale: factor of the weights of a token's experts (DeepSeek).
        selection_bias: True if a bias is added to the weights that rank experts, but not to those they get (DeepSeek
            V3).
        groups: groups of as many adjacent experts; a token uses experts of the best `used_groups` alone.
        used_groups: number of these.
        best_of_group: number of a group's best experts whose weights are summed to rank it.
    """

    count: int
    used: int
    width: int
    renormalised: bool = True
    dense_layers: tuple[int, ...] = ()
    router_bias: bool = False
    probability: Literal["softmax", "sigmoid"] = "softmax"
    weighted_inputs: bool = False
    shared_width: int | None = None
    shared_gate: bool = False
    scale: float = 1.0
    selection_bias: bool = False
    groups: int = 1
    used_groups: int = 1
    best_of_group: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.used <= self.count:
            raise ValueError(f"a token must use between 1 and {self.count} experts, not {self.used}.")
        if self.count % self.groups or not 0 < self.used_groups <= self.groups:
            raise ValueError(
                f"{self.count} experts cannot be {self.groups} groups of which {self.used_groups} are used."
            )
        if self.used > self.count // self.groups * self.used_groups:
            raise ValueError(f"{self.used_groups} of {self.groups} groups have fewer than {self.used} experts.")

    def divides(self, devices: int) -> bool:
        """Return whether each device can have as many experts, and as many columns of the shared one."""
        return self.count % devices == 0 and (self.shared_width or 0) % devices == 0


@dataclasses.dataclass(frozen=True)
class DeltaRule:
    """Layers with the gated delta rule in place of attention; see `kvjax.models.gated_delta`.

    Args:
        layers: numbers of these layers.
        key_heads: heads of queries and keys.
        value_heads: heads of values and of the state; a multiple of `key_heads`.
        key_width: size of one query or key.
        value_width: size of one value.
        taps: tokens that the convolution reads, the newest included.
        write_scale: factor of the sigmoid that says how much of a value is written; 2 allows negative eigenvalues.
        norm_eps: constant added to the variance of outputs.
    """

    layers: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_width: int
    value_width: int
    taps: int = 4
    write_scale: float = 1.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly.")

    @property
    def groups(self) -> int:
        """Number of value heads that share one key head."""
        return self.value_heads // self.key_heads


@dataclasses.dataclass(frozen=True)
class QueryGrowth:
    """Factor of the query of a token at position p, 1 + slope ln(1 + floor((p + offset) / length)).

    Args:
        slope: growth for each e-fold of the position.
        length: positions at the start of a text whose queries do not grow.
        offset: number added to positions (Llama 4 counts from 1).
        unrotated: True if queries grow only in layers without RoPE (Llama 4).
    """

    slope: float
    length: int
    offset: int = 0
    unrotated: bool = False


@dataclasses.dataclass(frozen=True)
class Latent:
    """Widths of multi-head latent attention (DeepSeek-V2, 2024, section 2.1): all heads share one stored vector.

    Args:
        width: elements of the latent, of which up-projections make all heads' keys and values.
        key_width: elements of a head's key that are not rotated, before the up-projection is absorbed into queries.
        value_width: elements of a head's value, which the up-projection makes of attention to latents.
        rotated: elements of the rotated key that all heads share; they precede the latent in a slot.
        query_width: elements of the queries' own latent; None if queries are projected at once.
        norm_eps: constant added to the variance of latents.
    """

    width: int
    key_width: int
    value_width: int
    rotated: int
    query_width: int | None = None
    norm_eps: float = 1e-6

    @property
    def slot_width(self) -> int:
        """Elements of a slot: the rotated key and the latent."""
        return self.rotated + self.width


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Configuration of a model: everything that defines its computation, except the values of its weights.

    Args:
        vocab_size: rows of the embedding table.
        width: size of the hidden state.
        layers: number of decoder blocks.
        heads: query heads.
        kv_heads: key and value heads; divides `heads`.
        head_width: size of one head.
        mlp_width: inner size of the MLP.
        max_positions: longest sequence that the model was trained for, in tokens.
        chunked: True if some layers attend within chunks of at least `max_positions` tokens (Llama 4). A text must fit
            into one chunk.
        value_width: size of one head's values; None for `head_width`.
        latent: widths of multi-head latent attention, whose slots are those of one KV head of `Latent.slot_width`; None
            for keys and values of each head.
        norm: `rms` or `layer` normalization.
        norm_eps: constant added to the variance.
        activation: activation function of the MLP; `xielu` has learned parameters and goes with gated_mlp=False.
        mixture: experts in place of MLPs; None for a model without them.
        gated_mlp: True if the MLP multiplies by an activated gate (SwiGLU).
        clamped_swiglu: slope and limit of a product g sigmoid(slope g) (u + 1) of gate g, bounded above, and u, bounded
            on both sides (gpt-oss: 1.702 and 7); None for activation(g) u.
        parallel: True if attention and MLP read the same input and their outputs are added (GPT-J, Falcon).
        position: encoding of positions: `rope`, `learned` embeddings, `alibi` biases, or `none`.
        rope: settings of RoPE if `position` is `rope`.
        ropes: RoPE of each layer (None for a layer without), replacing `rope`; None for `rope` in all layers.
        slopes: ALiBi slope of each query head; None for the slopes of Press et al. (2022).
        embedding_scale: factor of token embeddings, rounded to their dtype (Gemma: sqrt(width)); None for no scaling.
        position_offset: offset added to positions before they index the table of learned embeddings.
        norm_bias: True if norms add an offset.
        norm_scales: True if norms have learned scales (not in nanochat).
        norm_offset: True if norms multiply by 1 + scale (Gemma).
        embedding_norm: True if token embeddings are normalized, without a scale (nanochat).
        pre_norms: True if the inputs of attention and MLP are normalized (not in OLMo 2). Layers of `delta_rule` always
            normalize inputs, and no outputs.
        post_norms: True if the outputs of attention and MLP are also normalized before they are added (Gemma 2).
        query_key_norms: True if queries and keys are normalized (Qwen3).
        norms_after_rope: True if these norms follow RoPE instead of preceding it (Hunyuan). Stored keys then stay at
            their original positions.
        query_key_norm_over: what these norms take the mean square of: each head, or all `heads` together (OLMo 2).
        query_key_scales: True if these norms have learned scales. Without scales, only layers with RoPE have such norms
            (Llama 4).
        residual_scale: factor of the outputs of attention and MLP where they are added (Granite); None for 1.
        shared_norm: True if the MLP uses the norm of the attention (`parallel` blocks only).
        qkv_bias: True if the query, key and value projections add a bias.
        output_bias: True if the attention's output projection adds a bias.
        mlp_bias: True if the MLP's projections add a bias.
        unembedding_bias: True if the unembedding adds a bias to the logits.
        tied: True if the embedding table is also the unembedding.
        qkv_clip: bound that projected queries, keys and values are clipped to (MPT: 6); None for no bound.
        attention_scale: factor of the products of queries and keys; None for 1 / sqrt(head_width).
        attention_scales: factor of each layer, replacing `attention_scale`; None for the same in all layers.
        query_growth: factor of queries that grows with their positions (Ministral 3); None for 1.
        output_gate: True if the output of attention is multiplied by the sigmoid of a projection of its input
            (Qwen3.5).
        sinks: True if the softmax of each query head has a learned logit in its denominator (gpt-oss).
        soft_cap: bound on attention logits, cap tanh(x / cap) (Gemma 2: 50); None for no bound.
        logit_soft_cap: the same bound on the final logits (Gemma 2: 30).
        logit_scale: factor of the final logits, applied before their bound; None for 1.
        sliding_window: tokens that a query attends to, itself included; None for all of them (Mistral 7B v0.1: 4096).
        windows: window of each layer (None for all tokens), replacing `sliding_window`; None for `sliding_window` in
            all layers.
        delta_rule: layers with the gated delta rule in place of attention; None for a model without them.
        bos: id of the token that starts a text; None if the model uses none.
        eos: ids that end a text.
        spread: sharding over devices, for the program of one device. All other fields describe the whole model;
            `layer_configs` describe this device's shard.
    """

    vocab_size: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    mlp_width: int
    max_positions: int
    chunked: bool = False
    value_width: int | None = None
    latent: Latent | None = None
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    activation: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "xielu"] = "silu"
    mixture: Mixture | None = None
    gated_mlp: bool = True
    clamped_swiglu: tuple[float, float] | None = None
    parallel: bool = False
    position: Literal["rope", "learned", "alibi", "none"] = "rope"
    rope: Rope | None = None
    ropes: tuple[Rope | None, ...] | None = None
    slopes: tuple[float, ...] | None = None
    embedding_scale: float | None = None
    position_offset: int = 0
    norm_bias: bool = False
    norm_scales: bool = True
    norm_offset: bool = False
    embedding_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    query_key_norms: bool = False
    norms_after_rope: bool = False
    query_key_norm_over: Literal["head", "heads"] = "head"
    query_key_scales: bool = True
    residual_scale: float | None = None
    shared_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    unembedding_bias: bool = False
    tied: bool = False
    qkv_clip: float | None = None
    attention_scale: float | None = None
    attention_scales: tuple[float, ...] | None = None
    query_growth: QueryGrowth | None = None
    output_gate: bool = False
    sinks: bool = False
    soft_cap: float | None = None
    logit_soft_cap: float | None = None
    logit_scale: float | None = None
    sliding_window: int | None = None
    windows: tuple[int | None, ...] | None = None
    delta_rule: DeltaRule | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    spread: Spread = ALONE

    @property
    def groups(self) -> int:
        """Number of query heads that share one key and value head."""
        return self.heads // self.kv_heads

    @property
    def shared_heads(self) -> tuple[int, ...]:
        """Numbers of heads that devices share: those of keys and values, and in recurrent layers of keys."""
        return (self.kv_heads,) if self.delta_rule is None else (self.kv_heads, self.delta_rule.key_heads)

    @property
    def mixed_features(self) -> tuple[int, ...]:
        """Numbers of features that the output weights of attention and of recurrent layers take."""
        rule, attention = self.delta_rule, self.heads * (self.value_width or self.head_width)
        return (attention,) if rule is None else (attention, rule.value_heads * rule.value_width)

    @functools.cached_property
    def bounded(self) -> bool:
        """True if no text may have more than `max_positions` tokens, whatever the policy."""
        return self.chunked or self.position == "learned"

    def check_bound(self, tokens: int) -> None:
        """Refuse texts of more tokens than the model can read."""
        if self.bounded and tokens > self.max_positions:
            raise ValueError(f"{tokens} tokens do not fit the model's {self.max_positions} positions{self.remark}.")

    @property
    def fixed_positions(self) -> str | None:
        """Reason why stored keys stay at their original positions; None if they can move."""
        if self.position == "learned":
            return "adds learned positions to embeddings before there are keys"
        return "normalizes keys after it has rotated them" if self.norms_after_rope else None

    @property
    def remark(self) -> str:
        """Reason for a bound that kvjax sets, in parentheses for the end of a message; empty if there is none."""
        return " (some of its layers attend within chunks, and kvjax reads a single chunk)" if self.chunked else ""

    def rope_length(self, lengths: Int[np.ndarray, "*b"]) -> Int[np.ndarray, "*b"] | None:
        """Return lengths whose RoPE frequencies texts of these lengths have, or None if lengths do not matter.

        Texts with the same frequencies get the same length, except with RoPE layers of different original contexts.
        """
        ropes = [rope for rope in self._layer_ropes if rope is not None and rope.by_length]
        if not ropes:
            return None
        borders = [rope.original_max_positions for rope in ropes]
        longest = max(borders) + 1 if all(rope.scaling == "longrope" for rope in ropes) else None
        return np.clip(lengths, min(borders), longest).astype(np.int32)

    @functools.cached_property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """Attention configuration of each layer."""
        slopes = None
        if self.position == "alibi":
            of_heads = alibi_slopes(self.heads) if self.slopes is None else np.array(self.slopes)
            slopes = tuple(map(tuple, of_heads.reshape(self.kv_heads, self.groups).tolist()))
        scale = self.head_width**-0.5 if self.attention_scale is None else self.attention_scale
        scales = (scale,) * self.layers if self.attention_scales is None else self.attention_scales
        windows = (self.sliding_window,) * self.layers if self.windows is None else self.windows
        without = () if self.delta_rule is None else self.delta_rule.layers
        bounded = [window for index, window in enumerate(windows) if index in without or window is not None]
        furthest = max((window for window in bounded if window is not None), default=None)
        furthest = furthest if len(bounded) == self.layers else None
        configs = tuple(
            LayerConfig(
                width=self.width,
                kv_heads=self.kv_heads // self.spread.heads,
                groups=self.groups,
                key_width=self.head_width,
                value_width=self.head_width if self.value_width is None else self.value_width,
                rope=None if self.norms_after_rope else rope,
                scale=scale,
                soft_cap=self.soft_cap,
                window=window,
                slopes=slopes,
                local=window is not None and window != furthest,
                spread=self.spread,
                normed=self.query_key_norms and (self.query_key_scales or rope is not None),
                keys_are_values=self.latent is not None,
            )
            for scale, window, rope in zip(scales, windows, self._layer_ropes, strict=True)
        )
        none: dict[str, Any] = {"kv_heads": 0, "rope": None, "window": None, "local": False, "normed": False}
        return tuple(
            dataclasses.replace(config, **none) if index in without else config for index, config in enumerate(configs)
        )

    def layer(self, index: int) -> LayerConfig:
        """Return the attention configuration of one layer."""
        return self.layer_configs[index]

    @property
    def _layer_ropes(self) -> tuple[Rope | None, ...]:
        return (self.rope,) * self.layers if self.ropes is None else self.ropes

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads cannot share {self.kv_heads} KV heads evenly.")
        for name in ("windows", "ropes", "attention_scales"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.layers:
                raise ValueError(f"{name} has {len(entries)} entries for {self.layers} layers; give one for each.")
        positive = ("value_width", "embedding_scale", "qkv_clip", "attention_scale", "soft_cap", "logit_soft_cap")
        for name in (*positive, "logit_scale", "residual_scale", "sliding_window"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be above 0, not {value}; leave it None for models without it.")
        for index, window in enumerate(self.windows or ()):
            if window is not None and window <= 0:
                raise ValueError(f"windows[{index}] must be above 0, not {window}; None lets a layer see all tokens.")
        for index, scale in enumerate(self.attention_scales or ()):
            if scale <= 0:
                raise ValueError(f"attention_scales[{index}] must be above 0, not {scale}.")
        if self.latent is not None and (self.kv_heads, self.head_width) != (1, self.latent.slot_width):
            raise ValueError(
                f"latent attention has one KV head of width {self.latent.slot_width}, not {self.kv_heads} of "
                f"{self.head_width}; set kv_heads and head_width so."
            )
        if self.slopes is not None and (self.position != "alibi" or len(self.slopes) != self.heads):
            raise ValueError(
                f"{len(self.slopes)} slopes do not fit position={self.position!r} with {self.heads} query heads; "
                "give position='alibi' and one for each head, or leave them None."
            )
        if (self.position == "rope") != any(rope is not None for rope in self._layer_ropes):
            ropes = f"rope={self.rope}" if self.ropes is None else f"ropes={self.ropes}"
            remedy = "give a Rope" if self.position == "rope" else "leave it None"
            raise ValueError(f"position={self.position!r} does not fit {ropes}; {remedy}.")
        for rope in self._layer_ropes:
            if rope is not None and rope.width > self.head_width:
                raise ValueError(f"RoPE of width {rope.width} does not fit heads of width {self.head_width}.")
        plain = self.norm == "rms" and self.norm_scales and not self.norm_offset
        if self.delta_rule is not None and set(self.delta_rule.layers) >= set(range(self.layers)):
            raise ValueError("a model without attention has no slots; give delta_rule fewer layers.")
        if self.query_key_norm_over == "heads" and not (plain and self.query_key_norms):
            raise ValueError("query_key_norm_over='heads' goes with query_key_norms=True and plain RMS norms only.")
        if not self.query_key_scales and (self.query_key_norm_over == "heads" or not self.query_key_norms):
            raise ValueError("query_key_scales=False goes with query_key_norms=True and norms of each head only.")
        of_heads = self.query_key_norms and self.query_key_norm_over == "head"
        if self.norms_after_rope and not (of_heads and self.rope is not None):
            raise ValueError("norms_after_rope=True goes with query_key_norms=True over each head and one rope only.")
        if not self.norm_scales and (self.norm_bias or self.norm_offset or self.tied):
            raise ValueError("norm_scales=False goes with norm_bias=False, norm_offset=False and tied=False only.")
        if self.activation == "xielu" and (self.gated_mlp or self.mixture is not None):
            raise ValueError("activation='xielu' goes with gated_mlp=False and without a mixture only.")
        if self.norm_offset and (self.norm_bias or self.norm == "layer"):
            raise ValueError("norm_offset=True goes with norm='rms' and norm_bias=False only.")
        if self.post_norms and self.parallel:
            raise ValueError("post_norms=True does not go with parallel=True, which adds attention and MLP at once.")
        if not self.pre_norms and not self.post_norms:
            raise ValueError("pre_norms=False needs post_norms=True: a block without norms is not supported.")
        if self.shared_norm and not self.parallel:
            raise ValueError("shared_norm=True needs parallel=True: a sequential block normalises before its MLP.")
        if self.tied and self.unembedding_bias:
            raise ValueError("tied=True does not go with unembedding_bias=True: a tied unembedding has no bias.")
