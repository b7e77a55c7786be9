"""Small models for everybody's tests: random weights without torch, random checkpoints with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from kvjax.model import Model
from kvjax.models import ModelConfig, Rope, Weights, random_weights
from kvjax.models.attention import Attention
from kvjax.models.config import DeltaRule, Latent, LayerEmbeddings, Mixture, QueryGrowth, ShortConvolution
from kvjax.models.decoder import LayerWeights


def small_config(heads: int, kv_heads: int, **changes: Any) -> ModelConfig:
    """Two layers of width 32 over 64 tokens, like Llama unless changed."""
    settings: dict[str, Any] = {"vocab_size": 64, "width": 32, "layers": 2, "head_width": 8, "mlp_width": 48}
    settings |= {"max_positions": 4096, "rope": Rope(width=8), "heads": heads, "kv_heads": kv_heads}
    return ModelConfig(**(settings | changes))


MHA = small_config(4, 4)
GQA = small_config(4, 2)
MQA = small_config(4, 1)
PARTIAL = small_config(4, 2, rope=Rope(width=4, interleaved=True))
YARN = small_config(4, 2, rope=Rope(width=8, scaling="yarn", attention_factor=1.5))
"""The frequencies of plain RoPE, and rotated channels that are longer."""
SLOPED = small_config(4, 2, position="alibi", rope=None)
LEARNED = small_config(4, 2, position="learned", rope=None)
MIXED = small_config(4, 2, mixture=Mixture(count=8, used=3, width=24, dense_layers=(1,)))
SHARED = small_config(4, 2, mixture=Mixture(count=8, used=3, width=24, shared_width=16))
WIDE_NORMS = small_config(
    4, 2, query_key_norms=True, query_key_norm_over="heads", pre_norms=False, post_norms=True, residual_scale=0.5
)
GROWING = small_config(4, 2, query_growth=QueryGrowth(0.5, 16))
LLAMA4 = small_config(
    *(4, 2),
    mixture=Mixture(8, 2, 24, renormalised=False, probability="sigmoid", weighted_inputs=True, shared_width=16),
    rope=None,
    ropes=(Rope(width=8, interleaved=True), None),
    query_key_norms=True,
    query_key_scales=False,
    query_growth=QueryGrowth(0.5, 16, offset=1, unrotated=True),
    chunked=True,
)
LATENT = small_config(4, 1, head_width=24, latent=Latent(16, 6, 10, 8, 20), rope=Rope(width=8, interleaved=True))
SINKS = small_config(4, 2, sinks=True)
NORMS_AFTER_ROPE = small_config(4, 2, query_key_norms=True, norms_after_rope=True)
CONVOLVED = small_config(4, 2, layers=3, query_key_norms=True, short_conv=ShortConvolution((0, 2), bias=True))
HYBRID = small_config(
    *(4, 2),
    layers=3,
    query_key_norms=True,
    output_gate="feature",
    delta_rule=DeltaRule((0, 2), key_heads=2, value_heads=4, key_width=6, value_width=8),
)
"""A recurrent state in all layers but one."""
LOCAL = small_config(4, 2, windows=(12, None), ropes=(Rope(width=8, theta=100.0), Rope(width=8)))

_PROPORTIONAL = Rope(width=8, scaling="proportional", fraction=0.5)
SOURCES = small_config(
    *(4, 2),
    layers=5,
    windows=(12, None, 12, None, 12),
    ropes=(Rope(width=8, theta=100.0), Rope(width=8, scaling="proportional", fraction=0.5)) * 2
    + (Rope(8, theta=100.0),),
    sources=(None, None, 0, 1, 0),
    query_key_norms=True,
    value_norms=True,
    layer_embeddings=LayerEmbeddings(6, 64),
    layer_scales=True,
)

WIDTHS = small_config(
    *(4, 2),
    ropes=(Rope(8), Rope(16)),
    head_widths=(8, 16),
    layer_kv_heads=(2, 1),
    tied_values=(False, True),
    query_key_norms=True,
    value_norms=True,
    post_norms=True,
    mixture=Mixture(8, 3, 24, beside_mlp=True),
)


def random_model(config: ModelConfig, seed: int = 0, dtype: DTypeLike = jnp.float32) -> Model:
    """A model with random weights and no tokenizer."""
    return Model(random_weights(config, jax.random.key(seed), dtype), config, name="random")


def sharp_model(config: ModelConfig, dtype: DTypeLike = jnp.float64, longer: float = 30) -> Model:
    """Random weights, with queries so many times longer that attention is far from even."""
    model = random_model(config, dtype=dtype)
    return Model(with_attention(model.weights, lambda mixer: {"query": longer * mixer.query.weight}), config)


def with_attention(weights: Weights, change: Callable[[Attention], dict[str, Array]]) -> Weights:
    """The same weights, in which some projections of each layer's attention have other weights."""

    def changed(layer: LayerWeights) -> LayerWeights:
        projections = {
            name: dataclasses.replace(getattr(layer.mixer, name), weight=weight)
            for name, weight in change(layer.mixer).items()
        }
        return dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, **projections))

    return dataclasses.replace(weights, layers=tuple(map(changed, weights.layers)))


def _huggingface(name: str, **changes: Any) -> Any:
    import transformers

    settings = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    # Far above the usual 0.02, so that attention is sharp and a mistake shows.
    return getattr(transformers, name)(**(settings | {"initializer_range": 0.2} | changes))


def _older(name: str, **changes: Any) -> Any:
    import transformers

    settings = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    settings |= {"initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None}
    return getattr(transformers, name)(**(settings | changes))


_LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "original_max_position_embeddings": 64}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64}
_LONGROPE |= {"short_factor": [1.0] * 6, "long_factor": [1.0, 1.1, 1.3, 2.0, 4.0, 8.0]}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_TWO_TYPES = ["sliding_attention", "full_attention"]
_SPECIAL_IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_SPECIAL = {**_SPECIAL_IDS, "original_max_position_embeddings": 64}

_LLAMA4 = {"num_hidden_layers": 4, "head_dim": 24, "intermediate_size_mlp": 80, "num_local_experts": 4}
_LLAMA4 |= {"interleave_moe_layer_step": 2, "floor_scale": 16, "attention_chunk_size": 512}
_LLAMA4 |= {"rope_parameters": _LLAMA3 | {"high_freq_factor": 1.0}, "no_rope_layers": []}

_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 40, "qk_rope_head_dim": 8, "v_head_dim": 20}
_LATENT |= {"qk_nope_head_dim": 12, "pad_token_id": 0}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2, "moe_intermediate_size": 24}
_ROUTED |= {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2}
_DELTA: dict[str, Any] = {"head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 12, "linear_value_head_dim": 20}
_GEMMA4 = {"num_hidden_layers": 3, "head_dim": 16, "global_head_dim": 32, "sliding_window": 16}
_GEMMA4 |= {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_GEMMA4 |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128}


def _types(letters: str) -> list[str]:
    return [{"s": "sliding_attention", "f": "full_attention"}[letter] for letter in letters]


_SHARED = _GEMMA4 | {"num_hidden_layers": 8, "num_kv_shared_layers": 4, "layer_types": _types("ssfssfsf")}
_SHARED |= {"hidden_size_per_layer_input": 24, "use_double_wide_mlp": True}
_SHARED |= {"initializer_range": 0.06}  # at 0.2 transformers differs from itself in float64 by 4e-4

_CONV_FIRST = ["conv", "conv", "full_attention", "conv"]

MODELS: Mapping[str, Callable[[], Any]] = {
    "llama-mha": lambda: _huggingface("LlamaConfig", num_key_value_heads=4),
    "llama-gqa": lambda: _huggingface("LlamaConfig"),
    "llama-mqa": lambda: _huggingface("LlamaConfig", num_key_value_heads=1),
    "llama3-rope": lambda: _huggingface("LlamaConfig", rope_parameters=_LLAMA3),
    "linear-rope": lambda: _huggingface("LlamaConfig", rope_parameters=_LINEAR),
    "llama-theta": lambda: _huggingface("LlamaConfig", rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "llama-tied": lambda: _huggingface("LlamaConfig", tie_word_embeddings=True),
    "llama-bias": lambda: _huggingface("LlamaConfig", attention_bias=True, mlp_bias=True),
    "llama-head-dim": lambda: _huggingface("LlamaConfig", head_dim=24, hidden_act="gelu", rms_norm_eps=1e-2),
    "qwen2": lambda: _huggingface("Qwen2Config"),
    "qwen2-tied": lambda: _huggingface("Qwen2Config", tie_word_embeddings=True),
    "mistral": lambda: _huggingface("MistralConfig", sliding_window=None),
    "mistral-sliding": lambda: _huggingface("MistralConfig", sliding_window=16, head_dim=8),
    "gpt2": lambda: _older("GPT2Config"),
    "gpt2-scales": lambda: _older(
        "GPT2Config", scale_attn_by_inverse_layer_idx=True, n_inner=80, tie_word_embeddings=False
    ),
    "cerebras-gpt": lambda: _older("GPT2Config", activation_function="gelu", scale_attn_weights=False),
    "gptj": lambda: _older("GPTJConfig", rotary_dim=8),
    "gpt_neox": lambda: _older("GPTNeoXConfig", intermediate_size=96),
    "gpt_neox-sequential": lambda: _older(
        "GPTNeoXConfig", intermediate_size=96, use_parallel_residual=False, attention_bias=False, rotary_pct=1.0
    ),
    "falcon-7b": lambda: _older("FalconConfig"),
    "falcon-40b": lambda: _older("FalconConfig", new_decoder_architecture=True, num_kv_heads=2),
    "falcon-11b": lambda: _older(
        "FalconConfig", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, bias=True
    ),
    "falcon-rw": lambda: _older("FalconConfig", alibi=True, multi_query=False, parallel_attn=False, bias=True),
    "mpt": lambda: _older("MptConfig"),
    "mpt-clipped": lambda: _older(
        "MptConfig", n_heads=2, tie_word_embeddings=False, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.4}
    ),
    "qwen2-sliding": lambda: _huggingface(
        "Qwen2Config", use_sliding_window=True, sliding_window=16, max_window_layers=1
    ),
    "qwen3": lambda: _huggingface("Qwen3Config", head_dim=24),
    "qwen3_moe": lambda: _huggingface(
        "Qwen3MoeConfig",
        num_hidden_layers=3,
        head_dim=24,
        moe_intermediate_size=24,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_moe-sparse-step": lambda: _huggingface(
        "Qwen3MoeConfig", decoder_sparse_step=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24
    ),
    "mixtral": lambda: _huggingface("MixtralConfig", num_local_experts=4),
    "olmoe": lambda: _huggingface("OlmoeConfig", num_experts=8, num_experts_per_tok=3, clip_qkv=0.8, pad_token_id=0),
    "gpt_oss": lambda: _huggingface(
        "GptOssConfig",
        num_hidden_layers=3,
        head_dim=24,
        sliding_window=16,
        num_local_experts=8,
        num_experts_per_tok=3,
        swiglu_limit=1.5,
        rope_parameters=_YARN | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        pad_token_id=0,
    ),
    "llama4": lambda: _huggingface("Llama4TextConfig", **_LLAMA4),
    "llama4-plain": lambda: _huggingface(
        "Llama4TextConfig",
        **_LLAMA4 | {"num_experts_per_tok": 2, "moe_layers": [0, 1, 3], "attention_bias": True},
        **{"use_qk_norm": False, "attn_temperature_tuning": False, "initializer_range": 0.15},
        layer_types=["full_attention"] * 4,
    ),
    "ministral3": lambda: _huggingface(
        "Ministral3Config",
        initializer_range=0.15,  # at 0.2 angles in float32 alone make a difference of 2e-4
        pad_token_id=0,
        rope_parameters=_YARN | {"llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "smollm3": lambda: _huggingface("SmolLM3Config", num_hidden_layers=4, **_SPECIAL_IDS),
    "smollm3-sliding": lambda: _huggingface(
        "SmolLM3Config", no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=16, **_SPECIAL_IDS
    ),
    "olmo2": lambda: _huggingface("Olmo2Config", pad_token_id=0),
    "olmo3": lambda: _huggingface(
        "Olmo3Config",
        num_hidden_layers=4,
        sliding_window=16,
        rope_parameters={"full_attention": _YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}},
        pad_token_id=0,
    ),
    "youtu": lambda: _huggingface("YoutuConfig", **_LATENT),
    "minicpm3": lambda: _huggingface("MiniCPM3Config", **_LATENT | {"q_lora_rank": None, "scale_depth": 0.5}),
    "deepseek_v2": lambda: _huggingface(
        "DeepseekV2Config", **_LATENT | _ROUTED | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.5}
    ),
    "deepseek_v3": lambda: _huggingface(
        "DeepseekV3Config", **_LATENT | _ROUTED | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
    ),
    "glm4_moe_lite": lambda: _huggingface("Glm4MoeLiteConfig", **_LATENT | _ROUTED),
    "olmo_hybrid": lambda: _huggingface(
        "OlmoHybridConfig",
        num_hidden_layers=4,
        initializer_range=0.15,  # at 0.2 float32 alone makes a difference of 1.3e-4
        rope_parameters={"rope_type": "default", "rope_theta": None},
        # transformers saves taps in three tensors of one size, also where there are more values than keys
        **{"linear_key_head_dim": 12, "linear_value_head_dim": 12},
        pad_token_id=0,
    ),
    "olmo_hybrid-rope": lambda: _huggingface(
        "OlmoHybridConfig",
        layer_types=["full_attention", "linear_attention"],
        **{"linear_key_head_dim": 20, "linear_value_head_dim": 20, "linear_allow_neg_eigval": False},
        pad_token_id=0,
    ),
    "lfm2": lambda: _huggingface("Lfm2Config", num_hidden_layers=4, layer_types=_CONV_FIRST, block_multiple_of=16),
    "lfm2_moe": lambda: _huggingface(
        "Lfm2MoeConfig",
        num_hidden_layers=4,
        layer_types=_CONV_FIRST,
        conv_bias=True,
        **{"num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    ),
    "lfm3": lambda: _huggingface(
        "Lfm3Config",
        num_hidden_layers=5,
        head_dim=24,
        sliding_window=16,
        conv_L_cache=5,
        **_SPECIAL_IDS,
    ),
    "granite": lambda: _huggingface(
        "GraniteConfig",
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=2.0,
    ),
    "phi3": lambda: _huggingface(
        "Phi3Config", **_SPECIAL, sliding_window=16, rope_parameters=_LONGROPE | {"partial_rotary_factor": 0.75}
    ),
    "qwen3_next": lambda: _huggingface(
        "Qwen3NextConfig",
        **_DELTA,
        num_hidden_layers=4,
        mlp_only_layers=[1],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=32,
    ),
    "qwen3_5": lambda: _huggingface("Qwen3_5TextConfig", **_DELTA, num_hidden_layers=4),
    "qwen3_5_moe": lambda: _huggingface(
        "Qwen3_5MoeTextConfig",
        **_DELTA,
        layer_types=["linear_attention", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=32,
    ),
    "gemma": lambda: _huggingface("GemmaConfig", head_dim=24),
    "gemma2": lambda: _huggingface("Gemma2Config", head_dim=24, query_pre_attn_scalar=10, sliding_window=16),
    "gemma3": lambda: _huggingface(
        "Gemma3TextConfig",
        head_dim=24,
        num_hidden_layers=3,
        query_pre_attn_scalar=10,
        sliding_window=16,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": _LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}},
    ),
    "vaultgemma": lambda: _huggingface("VaultGemmaConfig", head_dim=24, query_pre_attn_scalar=10, sliding_window=16),
    "granite_swa": lambda: _huggingface(
        "GraniteSWAConfig",
        **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 2.0},
        num_hidden_layers=3,
        sliding_window=16,
        layer_rope_theta=[1e5, 1e3, 0],
    ),
    "exaone4": lambda: _huggingface(
        "Exaone4Config", layer_types=_TWO_TYPES, sliding_window=16, sliding_window_pattern="LG"
    ),
    "exaone4-full": lambda: _huggingface("Exaone4Config", layer_types=["full_attention"] * 2, sliding_window=None),
    "cohere2": lambda: _huggingface("Cohere2Config", layer_types=_TWO_TYPES, sliding_window=16, logit_scale=0.5),
    "glm": lambda: _huggingface("GlmConfig", head_dim=24, **_SPECIAL_IDS),
    "glm4": lambda: _huggingface("Glm4Config", head_dim=24, **_SPECIAL_IDS),
    "ernie4_5": lambda: _huggingface("Ernie4_5Config", head_dim=24),
    "ernie4_5-bias": lambda: _huggingface("Ernie4_5Config", use_bias=True),
    "arcee": lambda: _huggingface("ArceeConfig"),
    "seed_oss": lambda: _huggingface("SeedOssConfig", head_dim=24),
    "hunyuan_v1_dense": lambda: _huggingface(
        "HunYuanDenseV1Config",
        head_dim=24,
        attention_bias=True,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 1.0, "alpha": 1000.0},
    ),
    "apertus": lambda: _huggingface("ApertusConfig", rope_parameters=_LLAMA3, **_SPECIAL_IDS),
    "nanochat": lambda: _huggingface("NanoChatConfig"),
    "nanochat-bias": lambda: _huggingface("NanoChatConfig", attention_bias=True, final_logit_softcapping=None),
    "gemma3n": lambda: _huggingface(
        "Gemma3nTextConfig",
        num_hidden_layers=6,
        head_dim=16,
        sliding_window=16,
        layer_types=_types("ssfssf"),
        num_kv_shared_layers=3,
        intermediate_size=[96, 96, 96, 80, 80, 80],
        activation_sparsity_pattern=[0.9, 0.0, 0.6, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=24,
        vocab_size_per_layer_input=100,
        laurel_rank=12,
        altup_num_inputs=3,
        initializer_range=0.06,
    ),
    "gemma4": lambda: _huggingface("Gemma4TextConfig", **_GEMMA4),
    "gemma4-layer-embeddings": lambda: _huggingface(
        "Gemma4TextConfig", **_GEMMA4 | {"hidden_size_per_layer_input": 24, "vocab_size_per_layer_input": 128}
    ),
    "gemma4-shared": lambda: _huggingface("Gemma4TextConfig", **_SHARED),
    "gemma4-shared-many": lambda: _huggingface(
        "Gemma4TextConfig",
        **_SHARED | {"num_hidden_layers": 14, "num_kv_shared_layers": 9, "layer_types": _types("ssfsfssfsfssff")},
    ),
    "gemma4-experts": lambda: _huggingface(
        "Gemma4TextConfig",
        **_GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 5.0},
        **{"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
    ),
}
"""Hugging Face configs of every variant that kvjax reads."""


def random_checkpoint(name: str, directory: Path, vocab_size: int | None = None, **saving: Any) -> Any:
    """Save a random checkpoint of a variant and return transformers' own PyTorch model of it."""
    import torch
    import transformers

    torch.set_num_threads(1)  # on small models its threads wait for each other, a hundred times as long
    torch.manual_seed(0)
    # With attn_implementation="eager" transformers adds Falcon's ALiBi twice.
    config = MODELS[name]()
    config.vocab_size = vocab_size or config.vocab_size
    model, spread = transformers.AutoModelForCausalLM.from_config(config).eval(), 1.5 * config.initializer_range
    with torch.no_grad():
        for place, parameter in model.named_parameters():
            if parameter.ndim == 1 or place.endswith("bias"):  # biases and norm scales start as zeros and ones
                parameter.add_(spread * torch.randn_like(parameter))
            if place.endswith("A_log"):  # states would forget a token at once
                parameter.sub_(3)
        for place, buffer in model.named_buffers():
            if place.endswith("layer_scalar"):
                buffer.add_(spread * torch.randn_like(buffer))
    model.save_pretrained(directory, **saving)
    return model
