"""Checkpoints written by hand: what is read, and one clear sentence for each that is not."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis.extra.numpy import arrays
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.model import Model, load
from kvjax.models import FAMILIES, LoadError, Rope, random_weights
from kvjax.models.checkpoints.saving import write_checkpoint
from kvjax.models.checkpoints.tensors import check_finite
from kvjax.models.families import read_model_config
from kvjax.models.fingerprint import fingerprint, fingerprints
from kvjax.models.integers import code_dtype
from kvjax.models.linear import Linear
from kvjax.models.mlp import DenseMlp
from kvjax.models.model import SamplingDefaults
from kvjax.models.weights import leaf_name, quantised, weight_shapes

SETTINGS = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "eos_token_id": 3,
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
QUERY = "model.layers.1.self_attn.q_proj.weight"


def write(directory: Path, dtype: Any = np.float32, **changes: Any) -> dict[str, np.ndarray]:
    """A checkpoint in one file; returns its tensors."""
    settings = SETTINGS | changes
    family, config = read_model_config(settings)
    leaves = jax.tree.leaves_with_path(random_weights(config, jax.random.key(0)))
    tensors = {family.source(leaf_name(path)).name: np.asarray(leaf, dtype) for path, leaf in leaves}
    (directory / "config.json").write_text(json.dumps(settings))
    save_file(tensors, directory / "model.safetensors")
    return tensors


def split(directory: Path) -> None:
    """Turn the one file into two and an index."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    place = {name: SHARDS[i % 2] for i, name in enumerate(sorted(tensors))}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in tensors if place[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))


def reindex(directory: Path, places: dict[str, str], swap: bool = False) -> None:
    """Change the index alone: tensors are said to be in other shards."""
    file = directory / "model.safetensors.index.json"
    known = json.loads(file.read_text())["weight_map"]
    if swap:
        places = {name: SHARDS[known[name] == SHARDS[0]] for name in places}
    file.write_text(json.dumps({"weight_map": known | places}))


def edit(directory: Path, change: Callable[[dict], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def truncate(file: Path, keep: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep)])


def refused(directory: Path, sentence: str) -> None:
    with pytest.raises(LoadError, match=sentence) as caught:
        load(directory)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
def test_numbers_that_are_none_are_refused(tmp_path: Path, value: float, dtype: Any) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensor = np.array(write(tmp_path)[name], dtype)
    assert check_finite(tensor) and check_finite(tensor[:0])
    tensor[1, 2] = value
    assert not check_finite(tensor)
    if dtype == np.float32:
        edit(tmp_path, lambda tensors: tensors.update({name: tensor}))
        refused(tmp_path, rf"model.safetensors: tensor {name} has numbers that are NaN or infinite: it is damaged")


def test_every_tensor_arrives_in_its_place(tmp_path: Path) -> None:
    tensors = write(tmp_path)
    model = load(tmp_path)
    np.testing.assert_array_equal(model.weights.layers[1].mixer.query.weight, tensors[QUERY])
    np.testing.assert_array_equal(model.weights.embedding, tensors["model.embed_tokens.weight"])
    one = model.logits([[1, 2, 3]])
    split(tmp_path)
    np.testing.assert_array_equal(load(str(tmp_path)).logits([[1, 2, 3]]), one)
    assert (model.name, model.directory, model.config.eos) == (str(tmp_path), tmp_path, (3,))


@pytest.mark.parametrize("extra", SHARDS)
def test_of_a_tensor_in_two_shards_the_index_takes_one(extra: str, tmp_path: Path) -> None:
    write(tmp_path)
    expected = load(tmp_path).logits([[1, 2, 3]])
    split(tmp_path)
    others = load_file(tmp_path / SHARDS[extra == SHARDS[0]])
    stale = {name: np.full_like(tensor, 7) for name, tensor in others.items()}
    save_file(load_file(tmp_path / extra) | stale, tmp_path / extra)
    np.testing.assert_array_equal(load(tmp_path).logits([[1, 2, 3]]), expected)


@pytest.mark.parametrize("stored", [np.float16, np.float64, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [None, "bfloat16", jnp.float32])
def test_dtypes(stored: Any, dtype: Any, tmp_path: Path) -> None:
    tensors = write(tmp_path, stored)
    weights = load(tmp_path, dtype).weights
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(dtype or "float32")}
    np.testing.assert_array_equal(weights.layers[1].mixer.query.weight, tensors[QUERY].astype(dtype or np.float32))


@hypothesis.given(
    weight=arrays(
        np.float32,
        st.tuples(st.integers(1, 5), st.integers(1, 7)),
        elements=st.floats(-(2.0**99), 2.0**99, width=32, allow_subnormal=False),
    )
)
def test_integers_are_within_half_a_step(weight: np.ndarray) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvjax.models.weights._AT_ONCE", 10)
        codes, scale = quantised(np.array_split(weight, 2), weight.shape)
        larger, same = quantised(np.array_split(weight, 2), weight.shape, np.uint8)
    np.testing.assert_array_equal(larger, codes.astype(int) + 128)
    np.testing.assert_array_equal(same, scale)
    error = np.abs(codes * scale[:, None].astype(float) - weight)
    assert (error <= scale[:, None] * (0.5 + 1e-5)).all()
    largest = np.abs(weight).max(1)
    assert (np.abs(codes).max(1)[largest > 1e-30] == 127).all()


def test_linear_maps_in_8_bits(tmp_path: Path) -> None:
    write(tmp_path, attention_bias=True)
    model, whole = load(tmp_path, weights="int8"), load(tmp_path)
    layer = model.weights.layers[1]
    assert isinstance(layer.mlp, DenseMlp) and layer.attention_norm is not None
    for made in (layer.mixer.query, layer.mlp.up):
        assert made.weight.dtype == code_dtype("cpu") and made.scale is not None and made.scale.dtype == np.float32
    assert model.weights.dtype == jax.tree.leaves(layer.attention_norm)[0].dtype == np.float32
    assert fingerprints(model)[0] == fingerprint(whole) != fingerprint(model)
    rounded = jax.tree.map(
        lambda node: Linear(node.matrix, node.bias) if isinstance(node, Linear) else node,
        model.weights,
        is_leaf=lambda node: isinstance(node, Linear),
    )
    tokens = np.arange(24)[None]
    _, logits = kvjax.prefill(model, kvjax.policy("full"), tokens, 1.0, max_new_tokens=1)
    np.testing.assert_allclose(logits, Model(rounded, model.config).logits(tokens)[:, -1], atol=5e-4)
    distance = np.abs(np.asarray(logits) - whole.logits(tokens)[:, -1]).max()
    assert 1e-3 < distance < 0.2
    half = load(tmp_path, "bfloat16", weights="int8").weights
    assert (
        half.dtype
        == half.layers[0].mixer.query(half.table.rows(jnp.arange(2)).astype(half.dtype)).dtype
        == jnp.bfloat16
    )


def test_bfloat16_on_a_cpu_brings_advice(capsys: pytest.CaptureFixture[str]) -> None:
    load("tiny", "bfloat16")
    said = capsys.readouterr().err
    assert said.startswith("kvjax: bfloat16 ") and said.endswith(".\n") and said.count("\n") == 1
    assert "int8" in said and "float32" in said
    load("tiny")
    load("tiny", "bfloat16", weights="int8")
    assert not capsys.readouterr().err


def test_auto_takes_8_bits_where_they_are_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path)
    assert load(tmp_path, weights="auto").weights.layers[0].mixer.query.weight.dtype == code_dtype("cpu")
    assert capsys.readouterr().err == "kvjax: weights in int8, which decode faster than float32 on a CPU.\n"
    with jax.enable_x64(True):
        assert load(tmp_path, "float64", weights="auto").weights.layers[0].mixer.query.weight.dtype == np.float64
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert load(tmp_path, weights="auto").weights.layers[0].mixer.query.weight.dtype == np.float32
    assert not capsys.readouterr().err


def test_other_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="weights='int4' is not supported: give int8, auto, or None"):
        load(tmp_path, weights="int4")  # type: ignore[arg-type]


def test_float64_needs_x64(tmp_path: Path) -> None:
    write(tmp_path, np.float64)
    with pytest.raises(ValueError, match="float64 needs 64-bit JAX: call jax"):
        load(tmp_path, "float64")
    with jax.enable_x64(True):
        assert load(tmp_path, "float64").weights.dtype == np.float64


@pytest.mark.parametrize("dtype", ["float16", "int8", "float31"])
def test_other_dtypes_are_refused(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{dtype}.*give one of float32, bfloat16, float64"):
        load(tmp_path, dtype)


def test_an_unembedding_that_differs_from_tied_embeddings_is_taken(tmp_path: Path) -> None:
    tensors = write(tmp_path, tie_word_embeddings=True)
    table = tensors["model.embed_tokens.weight"]
    edit(tmp_path, lambda stored: stored.update({"lm_head.weight": table}))
    same = load(tmp_path)
    assert same.config.tied and same.weights.unembedding is None
    edit(tmp_path, lambda stored: stored.update({"lm_head.weight": 2 * table}))
    with pytest.warns(UserWarning, match=r"ties the embeddings, but tensor lm_head\.weight differs"):
        other = load(tmp_path)
    assert not other.config.tied
    np.testing.assert_allclose(other.logits([[1, 2, 3]]), 2 * same.logits([[1, 2, 3]]), rtol=1e-5)


@pytest.mark.parametrize("inside", ["{base}language_model.{bare}", "language_model.{name}"])
def test_the_text_half_of_a_multimodal_checkpoint(inside: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    tensors = write(tmp_path / "text", model_type="qwen2", tie_word_embeddings=True, rope_theta=1e6, rms_norm_eps=1e-5)
    whole = tmp_path / "whole"
    whole.mkdir()
    named = {
        inside.format(name=name, base="model.", bare=name.removeprefix("model.")): tensor
        for name, tensor in tensors.items()
    }
    save_file(named | {"visual.blocks.0.weight": np.ones((2, 2), np.float32)}, whole / "model.safetensors")
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}
    settings = json.loads((tmp_path / "text" / "config.json").read_text())
    text = {**settings, "model_type": "qwen2_5_vl_text", "rope_scaling": rope}
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl", "text_config": text}))
    with pytest.warns(UserWarning, match="only the text half of qwen2_5_vl is loaded"):
        model = load(whole)
    np.testing.assert_array_equal(model.logits([[1, 2, 3]]), load(tmp_path / "text").logits([[1, 2, 3]]))


def test_a_mesh_is_one_or_a_text() -> None:
    wrong: Any = 2
    with pytest.raises(TypeError, match=r"mesh=2 is neither a jax\.sharding\.Mesh nor a text such as"):
        load("tiny", mesh=wrong)


def test_harmless_extras_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, tie_word_embeddings=True)

    def add(tensors: dict) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4)

    edit(tmp_path, add)
    assert load(tmp_path).weights.unembedding is None


@pytest.mark.parametrize(
    ("generation", "eos"), [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({}, (3,))]
)
def test_generation_config_names_the_end(generation: dict, eos: tuple, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load(tmp_path).config.eos == eos


def test_generation_config_names_sampling_defaults(tmp_path: Path) -> None:
    write(tmp_path)
    assert load(tmp_path).sampling_defaults == SamplingDefaults()
    settings = {"do_sample": True, "temperature": 0.6, "top_p": None, "top_k": 20, "min_p": "?", "typical_p": 0.9}
    (tmp_path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": 7}))
    defaults = load(tmp_path).sampling_defaults
    assert defaults.settings == {"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": "?"}
    assert defaults.source == str(tmp_path / "generation_config.json")


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing tensor": (
        lambda d: edit(d, lambda tensors: tensors.pop(QUERY)),
        rf"model\.safetensors: tensor {QUERY} of shape \[32, 32\] is missing",
    ),
    "missing from shards": (
        lambda d: (edit(d, lambda tensors: tensors.pop(QUERY)), split(d)),
        rf"model\.safetensors\.index\.json: tensor {QUERY} of shape \[32, 32\] is missing",
    ),
    "extra tensor": (
        lambda d: edit(d, lambda tensors: tensors.update(extra=np.zeros((2, 3)))),
        r"model\.safetensors: tensor extra of shape \[2, 3\] has no place in the model of config\.json",
    ),
    "bias without a place": (
        lambda d: edit(d, lambda t: t.update({QUERY.replace("weight", "bias"): np.zeros(32)})),
        r"tensor model\.layers\.1\.self_attn\.q_proj\.bias of shape \[32\] has no place",
    ),
    "wrong shape": (
        lambda d: edit(d, lambda tensors: tensors.update({QUERY: np.zeros((16, 32), np.float32)})),
        rf"model\.safetensors: tensor {QUERY} has shape \[16, 32\], but config\.json asks for \[32, 32\]",
    ),
    "integers": (
        lambda d: edit(d, lambda tensors: tensors.update({QUERY: np.zeros((32, 32), np.int8)})),
        rf"tensor {QUERY} is stored as I8; supported are F64, F32, F16, BF16",
    ),
    "truncated": (lambda d: truncate(d / "model.safetensors", 0.7), r"model\.safetensors is truncated or not a safe"),
    "truncated header": (lambda d: truncate(d / "model.safetensors", 0.01), "is truncated or not a safetensors file"),
    "empty": (lambda d: truncate(d / "model.safetensors", 0), "is truncated or not a safetensors file"),
    "text": (lambda d: (d / "model.safetensors").write_text("version https://x"), "is truncated or not a safetensors"),
    "truncated shard": (lambda d: (split(d), truncate(d / SHARDS[1], 0.5)), f"{SHARDS[1]} is truncated or not a safe"),
    "missing shard": (
        lambda d: (split(d), (d / SHARDS[1]).unlink()),
        rf"index\.json names the shard {SHARDS[1]}, which is missing from",
    ),
    "index and shard disagree": (
        lambda d: (split(d), reindex(d, {QUERY: SHARDS[0], "model.norm.weight": SHARDS[0]}, swap=True)),
        r"index\.json places tensor .* in .*, which does not hold it, but model-0000\d-of-00002\.safetensors does",
    ),
    "index names what nobody has": (
        lambda d: (split(d), reindex(d, {"nothing": SHARDS[0]})),
        rf"index\.json places tensor nothing in {SHARDS[0]}, which does not hold it; save",
    ),
    "tensor in two shards": (
        lambda d: (split(d), [save_file(load_file(d / shard) | {"x": np.ones(1)}, d / shard) for shard in SHARDS]),
        rf"tensor x is in two shards, {SHARDS[0]} and {SHARDS[1]}, and model.safetensors.index.json names neither",
    ),
    "LoRA": (
        lambda d: ((d / "config.json").unlink(), (d / "adapter_config.json").write_text("{}")),
        "is a LoRA adapter, which is no model: merge it into its base",
    ),
    "diffusion": (
        lambda d: ((d / "config.json").unlink(), (d / "model_index.json").write_text("{}")),
        "is a diffusion pipeline, not a language model",
    ),
    "shard elsewhere": (
        lambda d: (d / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../x"}}'),
        r"names the shard '\.\./x', which is not a file name",
    ),
    "index without map": (
        lambda d: (d / "model.safetensors.index.json").write_text("{}"),
        r"index\.json has no weight_map from tensor names to file names",
    ),
    "no weights": (
        lambda d: (d / "model.safetensors").unlink(),
        r"has neither model\.safetensors nor model\.safetensors\.index\.json",
    ),
    "no config": (lambda d: (d / "config.json").unlink(), r"config\.json is missing: a model directory needs it"),
    "broken config": (lambda d: truncate(d / "config.json", 0.5), r"config\.json is not valid JSON"),
    "numbers without end": (
        lambda d: (d / "config.json").write_text('{"vocab_size": ' + "9" * 5000 + "}"),
        r"config\.json is not valid JSON: Exceeds the limit .*; copy or download it again",
    ),
    "nested config": (
        lambda d: (d / "config.json").write_text("[" * 100_000),
        r"config\.json is not valid JSON: maximum recursion",
    ),
    "directory for a config": (
        lambda d: ((d / "config.json").unlink(), (d / "config.json").mkdir()),
        r"config\.json cannot be read: ",
    ),
    "config is a list": (
        lambda d: (d / "config.json").write_text("[]"),
        r"config\.json must hold a JSON object, not",
    ),
    "broken generation config": (
        lambda d: (d / "generation_config.json").write_text("{"),
        r"generation_config\.json is not valid JSON",
    ),
    "generation config with a word": (
        lambda d: (d / "generation_config.json").write_text('{"eos_token_id": "</s>"}'),
        r"generation_config\.json: eos_token_id must be a token id or a list of them, not '</s>'",
    ),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_damage_is_named(damage: str, tmp_path: Path) -> None:
    write(tmp_path)
    act, sentence = BROKEN[damage]
    act(tmp_path)
    refused(tmp_path, sentence)


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
LLAMA3 |= {"original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "short_factor": [1, 1, 2, 2], "long_factor": [1, 2, 3, 4]}
LONGROPE |= {"original_max_position_embeddings": 16}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"model_type": "bloom"},
            r"model_type\) 'bloom' is not supported; supported are llama, .*qwen2, .*falcon, .*gpt2",
        ),
        ({"model_type": "falcon_h1"}, "'falcon_h1' is not supported: most of its layers have a recurrent state"),
        (
            {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "layer_types": ["linear_attention", "mamba"]},
            "layer_types must be 2 of linear_attention, full_attention, not ",
        ),
        (
            {"model_type": "qwen3_5_text", "linear_num_value_heads": 5, "linear_num_key_heads": 2},
            "5 value heads cannot share 2 key heads evenly",
        ),
        (
            {"model_type": "qwen3_next", "layer_types": ["linear_attention"] * 2},
            "a model without attention has no slots; give delta_rule and short_conv fewer layers",
        ),
        ({"model_type": "longcat_flash"}, "'longcat_flash' is not supported: its layers store a latent vector"),
        (
            {"model_type": "gemma4_text", "num_hidden_layers": 4, "num_kv_shared_layers": 3},
            "num_kv_shared_layers 3 of 4 layers leaves no layer of type full_attention with keys and values of its own",
        ),
        (
            {"model_type": "gemma4_text", "num_hidden_layers": 4, "per_layer_config": {"4": {"head_dim": 8}}},
            "per_layer_config has '4', which is the number of none of 4 layers",
        ),
        (
            {"model_type": "gemma4_text", "use_bidirectional_attention": "all"},
            "='all' is not supported for gemma4_text",
        ),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "mamba2"}},
            "'mamba2' is not supported: most of its layers have a recurrent state",
        ),
        (
            {"model_type": "mistral3"},
            "text_config must be an object with the settings of the text half of mistral3, not N",
        ),
        ({"model_type": "qwen2_vl", "text_config": []}, r"text_config must be an object .* of qwen2_vl, not \[\]"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers must have a 0 or 1 for each of 2 layers"),
        ({"model_type": "llama4_text", "moe_layers": 1}, "moe_layers must be a list of layers' numbers, not 1"),
        (
            {"model_type": "llama4_text", "layer_types": ["full"]},
            "layer_types must be 2 of full_attention, chunked_att",
        ),
        (
            {"model_type": "llama4_text", "rope_scaling": YARN},
            "rope_type 'yarn' is not supported for llama4 with use_q",
        ),
        ({"model_type": None}, r"model_type\) None is not supported"),
        (
            {"rope_scaling": {"type": "axial", "factor": 2}},
            "rope_type 'axial' is not supported; supported are default, linear, dynamic, yarn, llama3, longrope, prop",
        ),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "factor must be a number above 0, not None"),
        ({"rope_scaling": LONGROPE | {"long_factor": 2}}, "long_factor must be a list of numbers above 0, not 2"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1]}}, r"short_factors=\(1\.0,\) does not .* give 4 numbers"),
        ({"rope_parameters": {"full_attention": {}}}, r"RoPE settings per type of layer \(full_attention\) are not"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, r"partial_rotary_factor 0\.5 is not supported"),
        ({"rope_parameters": [1]}, r"rope_scaling and rope_parameters must be objects, not \{\} and \[1\]"),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}},
            r"rope_scaling replaces rope_parameters, which has rope_theta=1000000\.0: add that to rope_scaling",
        ),
        (
            {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 2}},
            "an object for full_attention, not 2",
        ),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a number above 0, not None"),
        (
            {"rope_scaling": LLAMA3 | {"low_freq_factor": 5}},
            r"needs low_freq_factor up to high_freq_factor, not 5 and 4",
        ),
        ({"rope_theta": "1e4"}, "rope_theta must be a number above 0, not '1e4'"),
        ({"rope_theta": float("inf")}, "rope_theta must be a number above 0, not inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number above 0, not nan"),
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not supported; supported are silu"),
        ({"hidden_size": None}, "hidden_size must be an integer above 0, not None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer above 0, not 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, not 1000000000"),
        ({"vocab_size": True}, "vocab_size must be an integer above 0, not True"),
        ({"hidden_size": 34}, "hidden_size 34 is not a multiple of num_attention_heads 4, and there is no head_dim"),
        ({"head_dim": 7}, "width must be even, not 7"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads evenly"),
        ({"eos_token_id": "x"}, "eos_token_id must be a token id or a list of them, not 'x'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config with .* is not supported"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "layer_types": ["full"]},
            "layer_types must be 2 of full_",
        ),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
        ({"model_type": "gemma2", "sliding_window": None}, "sliding_window must be an integer above 0, not None"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, r"attn_logit_softcapping=5\.0 is not supported"),
        ({"model_type": "gemma3_text", "rope_parameters": {"factor": 2}}, "must have an object for each of full_att"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn"}}, "short_factor must be a list of numbers above 0"),
        (
            {"model_type": "qwen3", "use_sliding_window": True, "max_window_layers": "1"},
            "max_window_layers must be an integer from 0, not '1'",
        ),
        ({"model_type": "phi3", "partial_rotary_factor": 1.5}, r"partial_rotary_factor 1\.5 is not supported; only up"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias=True is not supported for mistral"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, not 'false'"),
        ({"model_type": "qwen2", "use_sliding_window": "no"}, "use_sliding_window must be true or false, not 'no'"),
        ({"model_type": "gpt2", "scale_attn_weights": 0}, "scale_attn_weights must be true or false, not 0"),
        ({"model_type": "falcon", "alibi": "false"}, "alibi must be true or false, not 'false'"),
        ({"model_type": "gpt_neox", "head_dim": 24}, "head_dim=24 is not supported for this family; only 8 is"),
        ({"is_causal": False}, "is_causal=False is not supported for llama; only True is"),
        ({"model_type": "gpt2", "add_cross_attention": True}, "add_cross_attention=True is not supported for gpt2"),
        (
            {"model_type": "gpt2", "hidden_size": 100, "num_attention_heads": 12},
            "n_embd 100 is not a multiple of n_head 12",
        ),
        ({"model_type": "gptj", "rotary_dim": None}, "rotary_dim must be an integer above 0, not None"),
        ({"model_type": "gptj", "tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for gptj"),
        ({"model_type": "gpt_neox", "rotary_pct": "all"}, "partial_rotary_factor must be a number above 0, not 'all'"),
        ({"model_type": "gpt_neox", "rope_parameters": [1]}, r"rope_parameters must be objects, not \{\} and \[1\]"),
        ({"model_type": "gpt_neox", "rope_scaling": {"type": "odd"}}, "rope_type 'odd' is not supported"),
        ({"model_type": "falcon", "num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn=2 are not supported with"),
        ({"model_type": "falcon", "new_decoder_architecture": True, "parallel_attn": False}, "parallel_attn=False and"),
        ({"model_type": "falcon", "activation": "swiglu"}, "activation 'swiglu' is not supported; supported are silu"),
        (
            {"model_type": "exaone4", "sliding_window": 8, "layer_types": ["full_attention"] * 2},
            "layer_types without a sliding_attention, and thus without RoPE, is not supported",
        ),
        (
            {"model_type": "granite_swa", "layer_rope_theta": [1e4, "high"]},
            r"layer_rope_theta must be a list of numbers from 0, not \[10000\.0, 'high'\]",
        ),
        ({"model_type": "granite_swa", "layer_rope_theta": [1e4]}, "ropes has 1 entries for 2 layers"),
        ({"model_type": "apertus", "hidden_act": "silu"}, "hidden_act='silu' is not supported for apertus"),
        ({"hidden_act": "xielu"}, "hidden_act 'xielu' is not supported; supported are silu"),
        ({"model_type": "nanochat", "tie_word_embeddings": True}, "tie_word_embeddings=True is not supported for nan"),
        ({"model_type": "nanochat", "rope_scaling": YARN}, "rope_type 'yarn' is not supported for nanochat"),
        ({"model_type": "mpt", "no_bias": False}, "no_bias=False is not supported for mpt; only True is"),
        ({"model_type": "mpt", "norm_type": "rmsnorm"}, "norm_type='rmsnorm' is not supported for mpt"),
        ({"model_type": "mpt", "expansion_ratio": 2}, "expansion_ratio=2 is not supported for mpt; only 4 is"),
        ({"model_type": "mpt", "attn_config": {"qk_ln": True}}, "qk_ln=True is not supported for mpt; only False is"),
        ({"model_type": "mpt", "attn_config": {"alibi": False}}, "alibi=False is not supported for mpt; only True is"),
        ({"model_type": "mpt", "attn_config": {"attn_type": "multiquery_attention"}}, "attn_type='multiquery_attent"),
        ({"model_type": "mpt", "attn_config": {"clip_qkv": -6}}, "clip_qkv must be a number above 0, not -6"),
        ({"model_type": "mpt", "attn_config": 3}, "attn_config must be an object, not 3"),
        ({"model_type": "mpt", "logit_scale": "sqrt"}, "logit_scale must be a number above 0, not 'sqrt'"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window must be an integer above 0, not 0"),
    ],
)
def test_config_is_refused_by_name(changes: dict, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS | changes))
    refused(tmp_path, rf"config\.json: .*{sentence}")


@pytest.mark.parametrize(("name", "layers"), [("gpt2", "n_layer"), ("mpt", "n_layers")])
def test_the_number_of_layers_is_bounded_by_every_name(name: str, layers: str) -> None:
    with pytest.raises(LoadError, match=f"{layers} must be at most 10000, not 1000000000"):
        read_model_config({"model_type": name, layers: 10**9})


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, Rope(8)),
        ({"rope_theta": 5e5}, Rope(8, 5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, Rope(8, 5e5)),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, Rope(8, 1e6)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, Rope(8, scaling="linear", factor=2.0)),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, Rope(8, scaling="linear", factor=2.0)),
        ({"rope_scaling": LLAMA3}, Rope(8, 1e4, False, "llama3", 8, 1, 4, 64)),
        (
            {"head_dim": 16, "rope_parameters": LLAMA3 | {"rope_theta": 2.0}},
            Rope(16, 2.0, False, "llama3", 8, 1, 4, 64),
        ),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            Rope(8, scaling="dynamic", factor=2.0, original_max_positions=2048),
        ),
        (
            {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            Rope(8, scaling="yarn", factor=4.0, original_max_positions=32),
        ),
        ({"rope_scaling": YARN}, Rope(8, scaling="yarn", factor=4.0, original_max_positions=32)),
        (
            {"rope_scaling": YARN | {"factor": None}, "max_position_embeddings": 256},
            Rope(8, scaling="yarn", factor=8.0, original_max_positions=32),
        ),
        (
            {"model_type": "phi3", "partial_rotary_factor": 0.5, "original_max_position_embeddings": 16},
            Rope(4),
        ),
    ],
)
def test_rope_of_old_and_new_configs(changes: dict, rope: Rope) -> None:
    assert read_model_config(SETTINGS | changes)[1].rope == rope


def test_missing_settings_mean_what_their_family_says() -> None:
    windows = {
        name: read_model_config(SETTINGS | {"model_type": name})[1].sliding_window for name in ("llama", "mistral")
    }
    assert windows == {"llama": None, "mistral": 4096}
    assert all(read_model_config(SETTINGS | {"model_type": name})[1].norm_eps == 1e-6 for name in ("llama", "qwen2"))
    assert {"llama", "mistral", "qwen2"} <= set(FAMILIES)


def test_rope_over_a_part_of_each_head() -> None:
    neox = {"model_type": "gpt_neox", "hidden_size": 64, "num_attention_heads": 4}
    assert read_model_config(neox)[1].rope == Rope(4)
    assert read_model_config(neox | {"rotary_pct": 0.5, "rotary_emb_base": 500})[1].rope == Rope(8, 500.0)
    assert read_model_config(neox | {"rope_parameters": {"partial_rotary_factor": 1.0}, "rotary_pct": 0.5})[
        1
    ].rope == Rope(16)
    longer = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_model_config(neox | longer)[1].rope == Rope(4, scaling="linear", factor=2.0)
    assert read_model_config({"model_type": "gptj", "rotary_dim": 32})[1].rope == Rope(32, interleaved=True)


def test_slopes_and_scales_of_mpt_and_falcon() -> None:
    mpt = {"model_type": "mpt", "n_heads": 4, "logit_scale": "inv_sqrt_d_model", "attn_config": {"alibi_bias_max": 16}}
    config = read_model_config(mpt)[1]
    assert config.slopes == (2**-4, 2**-8, 2**-12, 2**-16) and config.logit_scale == 2048**-0.5
    assert (
        read_model_config(mpt | {"n_heads": 2, "attn_config": {"clip_qkv": 6, "softmax_scale": 0.5}})[1].qkv_clip == 6
    )
    falcon = {"model_type": "falcon", "alibi": True, "hidden_size": 64, "num_attention_heads": 16}
    slopes = read_model_config(falcon)[1].slopes
    # 2^-0.5 to the eight bits of a bfloat16, over the root of the heads' width.
    assert slopes is not None and slopes[:2] == (181 / 256 / 2, 1 / 2 / 2)


def test_paths_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path / "absent", "absent does not exist: give a directory with config")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "file is a file: give a directory")
    with pytest.raises(LoadError, match=re.escape("a/b/c does not exist: give a directory")):
        load("a/b/c")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(LoadError, match=r"'nobody/nothing' is no directory here .* at revision 'v1' .*check the name"):
        load("nobody/nothing", revision="v1")


def test_a_mistyped_model_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.gguf").write_text("")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    for name, near in (
        ("tinny", "tiny"),
        ("smolm2", "smollm2"),
        ("lama", "llama"),
        ("smal.gguf", "small.gguf"),
        (f"{tmp_path}/lama/", f"{tmp_path}/llama"),
    ):
        with pytest.raises(LoadError, match=rf"did you mean {re.escape(near)}\?$"):
            load(name)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        ("GatedRepoError", r"'a/b' is gated: accept its terms on https://huggingface\.co/a/b and log in"),
        (
            "RepositoryNotFoundError",
            "'a/b' is neither a directory here nor a repository on the hub: check the name, or",
        ),
        ("RevisionNotFoundError", "'a/b' has no revision 'v1': give a branch, tag or commit of it"),
        (
            "LocalEntryNotFoundError",
            "'a/b' is no directory here and not in the hub's local cache at revision 'v1' either, and",
        ),
        ("HfHubHTTPError", r"'a/b' could not be downloaded from the hub at revision 'v1' \(HfHubHTTPError: "),
    ],
)
def test_what_the_hub_refuses(error: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import errors

    def refuse(*_: Any, **settings: Any) -> None:
        assert settings["revision"] == "v1"
        kind = getattr(errors, error)
        raise kind.__new__(kind)  # making one takes an answer of the hub

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(LoadError, match=sentence):
        load("a/b", revision="v1")


def test_large_checkpoints_show_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    write(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # which makes a terminal of whatever is written to
    load(tmp_path)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("kvjax.models.checkpoints.loading._LARGE", 0)
    load(tmp_path)
    out, err = capsys.readouterr()
    assert out == "" and "loading model.safetensors" in err and "100%" in err


PEAK = """
import resource, sys
import jax
from kvjax.model import load
def used(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
jax.device_put(1.0).block_until_ready()
before = used()
model = load(sys.argv[1], "bfloat16")
print(used() - before, sum(leaf.nbytes for leaf in jax.tree.leaves(model.weights)))
"""


@pytest.mark.slow
def test_loading_takes_little_more_memory_than_the_weights(tmp_path: Path) -> None:
    settings = SETTINGS | {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 16,
    }
    family, config = read_model_config(settings)
    shapes = jax.tree.leaves_with_path(weight_shapes(config))
    tensors = {family.source(leaf_name(path)).name: jnp.ones(leaf.shape, jnp.bfloat16) for path, leaf in shapes}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    names = sorted(tensors)
    place = {name: f"model-{i // 30}.safetensors" for i, name in enumerate(names)}
    for shard in set(place.values()):
        save_file({name: np.asarray(tensors[name]) for name in names if place[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    largest = max(shard.stat().st_size for shard in tmp_path.glob("*.safetensors"))
    made = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], check=True, capture_output=True, text=True)
    peak, held = map(int, made.stdout.split())
    for shard in tmp_path.glob("*.safetensors"):
        shard.unlink()
    assert largest > 5e7 and held > 4e8
    assert peak < 1.3 * largest + held


def test_revisions_are_of_the_hub(tmp_path: Path) -> None:
    for name in ("tiny", str(tmp_path)):
        with pytest.raises(LoadError, match="is not from the hub and has no revision 'v1': leave it out"):
            load(name, revision="v1")


def test_tokenizer_of_a_directory_without_one(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(ValueError, match=r"has no tokenizer: .* holds none of .*tokenizer\.json"):
        _ = load(tmp_path).tokenizer


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json must hold a JSON object, not list"),
        ("tokenizer_config.json", "", r"tokenizer_config\.json is not valid JSON: Expecting value"),
        ("tokenizer.json", '{"version": ', r"tokenizer\.json is not valid JSON: Expecting value"),
    ],
)
def test_broken_tokenizers_are_named(file: str, content: str, sentence: str, tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=rf"the tokenizer in .* cannot be read \(.*{sentence}.*\); it is damaged or"):
        _ = load(tmp_path).tokenizer


def test_tokenizer_comes_from_the_directory(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    write(tmp_path)
    words = Tokenizer(WordLevel({"<unk>": 0, "once": 1, "upon": 2}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(tmp_path)
    tokenizer = load(tmp_path).tokenizer
    assert tokenizer("once upon")["input_ids"] == [1, 2]
    assert tokenizer.decode([2, 1]) == "upon once"


def test_windows_of_upper_layers() -> None:
    qwen = {"model_type": "qwen3", "num_hidden_layers": 3, "sliding_window": 8, "max_window_layers": 1}
    assert read_model_config(SETTINGS | qwen)[1].windows is None
    assert read_model_config(SETTINGS | qwen | {"use_sliding_window": True})[1].windows == (None, 8, 8)
    types = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    assert read_model_config(SETTINGS | qwen | types)[1].windows == (8, None, None)
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8}}
    shape = read_model_config(SETTINGS | gemma)[1]
    assert shape.windows == (*(4096,) * 5, None, 4096)
    full = Rope(256, 1e6, scaling="linear", factor=8)
    assert shape.ropes == (*(Rope(256),) * 5, full, Rope(256))


def test_only_what_llama_has_is_written(tmp_path: Path) -> None:
    for changes in ({"model_type": "qwen2"}, {"model_type": "gemma"}, {"rope_scaling": LLAMA3}):
        config = read_model_config(SETTINGS | changes)[1]
        with pytest.raises(ValueError, match="only a Llama without biases and without scaled RoPE can be written"):
            write_checkpoint(random_weights(config, jax.random.key(0)), config, tmp_path)
