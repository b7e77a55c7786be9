"""Configuration of a decoder-only model, the same class for every family."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import numpy as np
from jaxtyping import Int

from kvjax.models.components import DeltaRule as DeltaRule
from kvjax.models.components import Latent as Latent
from kvjax.models.components import Mixture as Mixture
from kvjax.models.components import QueryGrowth as QueryGrowth
from kvjax.models.components import ShortConvolution as ShortConvolution
from kvjax.models.token_states import LayerEmbeddings as LayerEmbeddings
from kvjax.models.token_states import Streams as Streams
from kvjax.rope import Rope, lengths_by_frequencies
from kvjax.types import ALONE, LayerConfig, Spread
from pallas_kernels.attention import alibi_slopes


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
        value_width: size of one head's values; None for that of its keys.
        latent: widths of multi-head latent attention, whose slots are those of one KV head of `Latent.slot_width`; None
            for keys and values of each head.
        head_widths: size of one head in each layer, replacing `head_width`; None for `head_width` in all layers.
        layer_kv_heads: key and value heads of each layer, replacing `kv_heads`; None for `kv_heads` in all layers.
        mlp_widths: inner size of the MLP of each layer, replacing `mlp_width`; None for `mlp_width` in all layers.
        sources: for each layer, the index of an earlier layer whose keys and values it reads, or None for its own
            (Gemma 3n and 4); None for their own in all layers.
        tied_values: True for each layer whose values are its projected keys, before norm and RoPE (Gemma 4); None for
            a projection of their own in all layers.
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
        layer_embeddings: embeddings of tokens of each layer; None for a model without them.
        position_offset: offset added to positions before they index the table of learned embeddings.
        norm_bias: True if norms add an offset.
        norm_scales: True if norms have learned scales (not in nanochat).
        norm_offset: True if norms multiply by 1 + scale (Gemma).
        embedding_norm: True if token embeddings are normalized, without a scale (nanochat).
        pre_norms: True if the inputs of attention and MLP are normalized (not in OLMo 2). Layers of `delta_rule`
            always normalize inputs, and no outputs.
        post_norms: True if the outputs of attention and MLP are also normalized before they are added (Gemma 2).
        query_key_norms: True if queries and keys are normalized (Qwen3).
        norms_after_rope: True if these norms follow RoPE instead of preceding it (Hunyuan). Stored keys then stay at
            their original positions.
        query_key_norm_over: what these norms take the mean square of: each head, or all `heads` together (OLMo 2).
        value_norms: True if each head of values is normalized, without a scale (Gemma 4).
        query_key_scales: True if these norms have learned scales. Without scales, only layers with RoPE have such norms
            (Llama 4).
        streams: hidden states of each token, if there are several (Gemma 3n); None for one.
        laurel_rank: rank of a learned map that is added to the residual connection of attention (Gemma 3n); None for
            none.
        sparsities: fraction of the MLP's gates that are 0 in each layer (Gemma 3n); None for no sparsity.
        residual_scale: factor of the outputs of attention and MLP where they are added (Granite); None for 1.
        layer_scales: True if the hidden states after each layer are multiplied by a learned number (Gemma 4).
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
        output_gate: what attention's output is multiplied by, the sigmoid of a projection of its input: a number for
            each `feature` (Qwen3.5) or each `head` (LFM3); None for nothing.
        sinks: True if the softmax of each query head has a learned logit in its denominator (gpt-oss).
        soft_cap: bound on attention logits, cap tanh(x / cap) (Gemma 2: 50); None for no bound.
        logit_soft_cap: the same bound on the final logits (Gemma 2: 30).
        logit_scale: factor of the final logits, applied before their bound; None for 1.
        sliding_window: tokens that a query attends to, itself included; None for all of them (Mistral 7B v0.1: 4096).
        windows: window of each layer (None for all tokens), replacing `sliding_window`; None for `sliding_window` in
            all layers.
        delta_rule: layers with the gated delta rule in place of attention; None for a model without them.
        short_conv: layers with a short convolution in place of attention; None for a model without them.
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
    head_widths: tuple[int, ...] | None = None
    layer_kv_heads: tuple[int, ...] | None = None
    mlp_widths: tuple[int, ...] | None = None
    sources: tuple[int | None, ...] | None = None
    tied_values: tuple[bool, ...] | None = None
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
    layer_embeddings: LayerEmbeddings | None = None
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
    value_norms: bool = False
    query_key_scales: bool = True
    streams: Streams | None = None
    laurel_rank: int | None = None
    sparsities: tuple[float, ...] | None = None
    residual_scale: float | None = None
    layer_scales: bool = False
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
    output_gate: Literal["feature", "head"] | None = None
    sinks: bool = False
    soft_cap: float | None = None
    logit_soft_cap: float | None = None
    logit_scale: float | None = None
    sliding_window: int | None = None
    windows: tuple[int | None, ...] | None = None
    delta_rule: DeltaRule | None = None
    short_conv: ShortConvolution | None = None
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
        return (*self.kv_heads_of_layers, *(() if self.delta_rule is None else (self.delta_rule.key_heads,)))

    @property
    def mixed_features(self) -> tuple[int, ...]:
        """Numbers of features that the output weights of attention and of recurrent layers take."""
        widths = self.widths_of_heads if self.value_width is None else (self.value_width,)
        of_rule = () if self.delta_rule is None else (self.delta_rule.value_heads * self.delta_rule.value_width,)
        return (*(self.heads * width for width in widths), *of_rule)

    @functools.cached_property
    def bounded(self) -> bool:
        """True if no text may have more than `max_positions` tokens, whatever the policy."""
        return self.chunked or self.position == "learned"

    def check_bound(self, tokens: int) -> None:
        """Refuse texts of more tokens than the model can read."""
        if self.bounded and tokens > self.max_positions:
            raise ValueError(f"{tokens} tokens do not fit the model's {self.max_positions} positions{self.remark}.")

    @functools.cached_property
    def storing(self) -> tuple[int, ...]:
        """Indices of the layers with keys and values of their own."""
        return tuple(index for index, shape in enumerate(self.layer_configs) if shape.stores)

    def check_all_store(self, what: str) -> None:
        """Refuse a model with layers that read others' keys and values, for `what` needs those of each layer."""
        for index, shape in enumerate(self.layer_configs):
            if shape.source is not None:
                raise ValueError(
                    f"{what} needs keys and values of each layer, but layer {index} of this model reads those of layer "
                    f"{shape.source}; use another policy or model."
                )

    def check_equal_heads(self, what: str) -> None:
        """Refuse a model whose layers differ in the number or width of their heads, for `what` needs equal ones."""
        heads = {(layer.kv_heads, layer.key_width, layer.value_width) for layer in self.layer_configs if layer.attends}
        if len(heads) > 1:
            raise ValueError(
                f"{what} needs equal heads in all layers, but those of this model differ in number or width; use "
                "another policy."
            )

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
        """Return lengths whose RoPE frequencies texts have, see `kvjax.rope.lengths_by_frequencies`."""
        return lengths_by_frequencies(self.ropes_of_layers, lengths)

    @functools.cached_property
    def layer_configs(self) -> tuple[LayerConfig, ...]:
        """Attention configuration of each layer."""
        slopes = None
        if self.position == "alibi":
            of_heads = alibi_slopes(self.heads) if self.slopes is None else np.array(self.slopes)
            slopes = tuple(map(tuple, of_heads.reshape(self.kv_heads, self.groups).tolist()))
        widths, kv_heads = self.widths_of_heads, self.kv_heads_of_layers
        scales = self.attention_scales
        if scales is None:
            scales = [width**-0.5 if self.attention_scale is None else self.attention_scale for width in widths]
        windows = (self.sliding_window,) * self.layers if self.windows is None else self.windows
        without = {layer for kind in (self.delta_rule, self.short_conv) if kind is not None for layer in kind.layers}
        bounded = [window for index, window in enumerate(windows) if index in without or window is not None]
        furthest = max((window for window in bounded if window is not None), default=None)
        furthest = furthest if len(bounded) == self.layers else None
        configs = tuple(
            LayerConfig(
                width=self.width,
                kv_heads=kv_heads[index] // self.spread.heads,
                groups=self.heads // kv_heads[index],
                key_width=widths[index],
                value_width=widths[index] if self.value_width is None else self.value_width,
                rope=None if self.norms_after_rope else rope,
                scale=scale,
                soft_cap=self.soft_cap,
                window=window,
                slopes=slopes,
                local=window is not None and window != furthest,
                spread=self.spread,
                normed=self.query_key_norms and (self.query_key_scales or rope is not None),
                keys_are_values=self.latent is not None,
                source=None if self.sources is None else self.sources[index],
            )
            for index, (scale, window, rope) in enumerate(zip(scales, windows, self.ropes_of_layers, strict=True))
        )
        none: dict[str, Any] = {"kv_heads": 0, "rope": None, "window": None, "local": False, "normed": False}
        return tuple(
            dataclasses.replace(config, **none) if index in without else config for index, config in enumerate(configs)
        )

    def layer(self, index: int) -> LayerConfig:
        """Return the attention configuration of one layer."""
        return self.layer_configs[index]

    @property
    def hidden_width(self) -> int:
        """Size of all hidden states of a token between layers."""
        return self.width * (1 if self.streams is None else self.streams.count)

    @property
    def widths_of_heads(self) -> tuple[int, ...]:
        """Size of one head of queries and keys in each layer."""
        return self.head_widths or (self.head_width,) * self.layers

    @property
    def kv_heads_of_layers(self) -> tuple[int, ...]:
        """Key and value heads of each layer, on all devices."""
        return self.layer_kv_heads or (self.kv_heads,) * self.layers

    @property
    def widths_of_mlps(self) -> tuple[int, ...]:
        """Inner size of the MLP of each layer, on all devices."""
        return self.mlp_widths or (self.mlp_width,) * self.layers

    @property
    def ropes_of_layers(self) -> tuple[Rope | None, ...]:
        """RoPE of each layer; None for a layer without."""
        return (self.rope,) * self.layers if self.ropes is None else self.ropes

    def __post_init__(self) -> None:
        by_layer = ("head_widths", "layer_kv_heads", "mlp_widths", "sources", "sparsities", "tied_values")
        for name in ("windows", "ropes", "attention_scales", *by_layer):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.layers:
                raise ValueError(f"{name} has {len(entries)} entries for {self.layers} layers; give one for each.")
        for kv_heads in self.kv_heads_of_layers:
            if self.heads % kv_heads:
                raise ValueError(f"{self.heads} query heads cannot share {kv_heads} KV heads evenly.")
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
        if (self.position == "rope") != any(rope is not None for rope in self.ropes_of_layers):
            ropes = f"rope={self.rope}" if self.ropes is None else f"ropes={self.ropes}"
            remedy = "give a Rope" if self.position == "rope" else "leave it None"
            raise ValueError(f"position={self.position!r} does not fit {ropes}; {remedy}.")
        for rope, width in zip(self.ropes_of_layers, self.widths_of_heads, strict=True):
            if rope is not None and rope.width > width:
                raise ValueError(f"RoPE of width {rope.width} does not fit heads of width {width}.")
        plain = self.norm == "rms" and self.norm_scales and not self.norm_offset
        if not any(layer.attends for layer in self.layer_configs):
            raise ValueError("a model without attention has no slots; give delta_rule and short_conv fewer layers.")
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
        if self.streams is not None and (self.parallel or self.layer_embeddings is None or self.layer_scales):
            raise ValueError("streams go with layer_embeddings, parallel=False and layer_scales=False only.")
        if self.parallel and self.laurel_rank is not None:
            raise ValueError("laurel_rank does not go with parallel=True, which adds attention and MLP at once.")
        self._check_sources()
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

    def _check_sources(self) -> None:
        """Refuse layers that read another layer than an earlier one of their own shape, which has its own keys."""
        if self.sources is None:
            return
        if self.query_key_norm_over == "heads":
            raise ValueError("sources do not go with query_key_norm_over='heads', whose norms join queries and keys.")
        shapes = [dataclasses.replace(shape, source=None) for shape in self.layer_configs]
        for index, source in enumerate(self.sources):
            if source is None:
                continue
            if not 0 <= source < index or self.sources[source] is not None or shapes[source] != shapes[index]:
                raise ValueError(
                    f"sources[{index}] must be an earlier layer of the same shape with its own keys, not {source}."
                )
