"""The forward pass against transformers' own PyTorch models, and against itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Array
from safetensors.numpy import load_file, save_file

import kvjax
from kvjax.evaluation.perplexity import perplexity
from kvjax.evaluation.replay import masked_perplexity
from kvjax.evaluation.trace import trace
from kvjax.generation.generate import generate_ids
from kvjax.inference.state import held_positions
from kvjax.model import Model, load
from kvjax.models import ModelConfig, Rope, Weights
from kvjax.models.checkpoints.saving import write_checkpoint
from kvjax.models.decoder import forward
from kvjax.models.families import FAMILIES, TEXT_HALVES, LoadError, read_model_config
from kvjax.models.fingerprint import fingerprint
from kvjax.models.linear import in_blocks, product
from kvjax.rope import rotate
from kvjax.serving.scheduler import Device
from kvjax.training.less.record import collect
from pallas_kernels.op import platform_of
from tests.cases import slow
from tests.small_models import (
    CONVOLVED,
    GQA,
    HYBRID,
    LATENT,
    LEARNED,
    LLAMA4,
    MODELS,
    MQA,
    NORMS_AFTER_ROPE,
    SOURCES,
    random_checkpoint,
    random_model,
    small_config,
)

TOKENS = 300  # more than one block of queries
LENGTHS = (TOKENS, 77, 1)


ROUNDED = {"falcon-rw": 256}
"""Models whose ALiBi transformers rounds to bfloat16, and how many tokens that leaves exact."""


OVERLAPPING = ("cerebras-gpt", "falcon-11b", "ernie4_5-bias", "nanochat-bias", "qwen3_5_moe", "olmo_hybrid-rope")
OVERLAPPING += ("gemma4", "gemma4-layer-embeddings", "gemma4-shared-many")
"""Variants whose settings others try, too."""


def assert_parity(reference: Any, model: Model, most: int = TOKENS) -> None:
    torch = pytest.importorskip("torch")
    tokens = np.random.default_rng(0).integers(0, model.config.vocab_size, (len(LENGTHS), most))
    lengths_of_rows = np.minimum(LENGTHS, most)
    real = np.arange(most) < lengths_of_rows[:, None]
    for lengths, mask in ((None, np.ones_like(real)), (lengths_of_rows, real)):
        with torch.no_grad():
            theirs = reference(torch.tensor(tokens), attention_mask=torch.tensor(mask.astype(int))).logits
        ours = jax.nn.log_softmax(model.logits(np.where(mask, tokens, -1), lengths))
        difference = np.abs(np.asarray(ours) - torch.log_softmax(theirs, -1).numpy())
        assert difference[mask].max() < 1e-4


@pytest.mark.parametrize("name", [slow(name) if name in OVERLAPPING else name for name in MODELS])
def test_parity(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    reference = random_checkpoint(name, tmp_path)
    assert_parity(reference, load(tmp_path), ROUNDED.get(name, TOKENS))


NEEDED: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 6}}
NEEDED["lfm2_moe"] = {"layer_types": ["conv", "full_attention"] * 16}
"""Settings of families without which transformers' own config runs no model."""


@pytest.mark.parametrize("name", FAMILIES)
def test_an_empty_config_means_what_transformers_makes_of_it(name: str) -> None:
    from transformers import CONFIG_MAPPING

    needed = NEEDED.get(name, {})
    whole = CONFIG_MAPPING[name](**needed).to_dict()
    assert read_model_config({"model_type": name, **needed})[1] == read_model_config(whole)[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_each_omitted_setting_is_looked_up_in_transformers(name: str) -> None:
    from transformers import CONFIG_MAPPING

    family, whole = FAMILIES[name], CONFIG_MAPPING[name](**NEEDED.get(name, {})).to_dict()
    for omitted in family.looked_up:
        given = {key: value for key, value in whole.items() if omitted not in (key, family.aliases.get(key))}
        assert len(given) < len(whole) and read_model_config(given)[1] == read_model_config(whole)[1]


OTHER_NAMES = {"hidden_size": 1536, "num_attention_heads": 8, "num_hidden_layers": 3, "max_position_embeddings": 99}
OTHER_NAMES |= {"rms_norm_eps": 1e-3, "num_experts": 16, "num_local_experts": 16, "head_dim": 32, "num_mtp_layers": 2}


@pytest.mark.parametrize("name", FAMILIES)
def test_settings_have_the_other_names_that_transformers_takes(name: str) -> None:
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[name]
    for other in kind.attribute_map:
        given = {other: OTHER_NAMES[other], **NEEDED.get(name, {})}
        assert read_model_config({"model_type": name, **given})[1] == read_model_config(kind(**given).to_dict())[1]


def test_defaults_of_llama4_are_those_of_transformers() -> None:
    from transformers import Llama4TextConfig

    settings = Llama4TextConfig().to_dict()
    config = read_model_config(settings)[1]
    assert config.chunked and config.max_positions == 8192 and config.mixture is not None
    assert [rope is None for rope in config.ropes or ()] == [False, False, False, True] * 12
    needed = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    assert read_model_config({name: settings[name] for name in needed})[1] == config
    assert read_model_config(settings | {"attn_temperature_tuning": 4})[1] == config  # as many checkpoints have it
    longer = settings | {"layer_types": None, "attention_chunk_size": None}
    assert read_model_config(longer)[1] == dataclasses.replace(config, chunked=False, max_positions=131_072)


def test_gemma_3_is_read_from_the_few_settings_that_its_checkpoints_have() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    text = {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34, "sliding_window": 1024}
    whole = {"model_type": "gemma3", "eos_token_id": [1, 106], "text_config": text | {"rope_scaling": scaling}}
    config = read_model_config(whole)[1]
    assert (config.vocab_size, config.heads, config.kv_heads, config.head_width) == (262_208, 8, 4, 256)
    assert config.width == 2560 and config.eos == (1, 106) and config.tied
    assert config.ropes is not None
    assert config.ropes[4:6] == (Rope(256), Rope(256, 1e6, scaling="linear", factor=8.0))


@pytest.mark.parametrize("name", TEXT_HALVES)
def test_an_empty_text_half_means_what_transformers_makes_of_it(name: str) -> None:
    from transformers import CONFIG_MAPPING

    kind: Any = CONFIG_MAPPING[name]
    whole = kind(text_config={})
    made = {**whole.to_dict(), "text_config": whole.text_config.to_dict()}
    assert read_model_config({"model_type": name, "text_config": {}})[1] == read_model_config(made)[1]


@pytest.mark.parametrize("name", TEXT_HALVES)
def test_a_config_without_a_text_half_is_flat_where_transformers_reads_it_so(name: str) -> None:
    from transformers import CONFIG_MAPPING

    flat = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    flat |= {"bos_token_id": 1, "eos_token_id": 2}
    kind: Any = CONFIG_MAPPING[name]
    whole = kind(**flat)
    if whole.text_config.hidden_size == 32:
        made = {**whole.to_dict(), "text_config": whole.text_config.to_dict()}
        assert read_model_config({"model_type": name, **flat})[1] == read_model_config(made)[1]
    else:
        with pytest.raises(LoadError, match=f"text_config must be an object with .* of {name}, not None"):
            read_model_config({"model_type": name, **flat})


@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("name", TEXT_HALVES)
def test_a_text_half_is_tied_where_transformers_ties_it(name: str, outer: bool, inner: bool | None) -> None:
    from transformers import CONFIG_MAPPING

    text = {} if inner is None else {"tie_word_embeddings": inner}
    kind: Any = CONFIG_MAPPING[name]
    whole = kind(text_config=dict(text), tie_word_embeddings=outer)
    given = {"model_type": name, "text_config": text, "tie_word_embeddings": outer}
    assert read_model_config(given)[1].tied is whole.tie_word_embeddings


SCALED = ["llama-gqa", "qwen3", "gpt_neox", "falcon-7b", "ministral3", "gpt_oss", "olmo3", "gemma3", "phi3", "llama4"]
SCALED += ["glm4", "cohere2", "exaone4", "apertus", "hunyuan_v1_dense", "nanochat"]


@pytest.mark.parametrize("name", SCALED)
def test_rope_scaling_replaces_rope_parameters_as_in_transformers(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = MODELS[name]()
    written = {"rope_type": "linear", "factor": 3.0, "rope_theta": 123.0}
    if name in ("gpt_neox", "phi3", "glm4"):
        written["partial_rotary_factor"] = 0.5
    if name == "phi3":  # it has no other scaling
        factors = {f"{kind}_factor": [1.0 + i for i in range(4)] for kind in ("short", "long")}
        written |= {"rope_type": "longrope", "factor": 8.0, **factors}
    given = config.to_dict() | {"rope_scaling": written}
    (tmp_path / "config.json").write_text(json.dumps(given))
    theirs = AutoConfig.from_pretrained(tmp_path).to_dict()
    assert "rope_scaling" not in theirs
    found = read_model_config(given)[1]
    assert found == read_model_config(theirs)[1] != read_model_config(config.to_dict())[1]
    ropes = {rope for rope in (found.rope, *(found.ropes or ())) if rope is not None}
    assert 123.0 in {rope.theta for rope in ropes}


TIED = ("llama-tied", "qwen2-tied", "gpt2", "falcon-7b", "mpt", "gemma", "gemma2", "gemma3")


@pytest.mark.parametrize("name", [name if name in ("llama-tied", "gpt2", "gemma3") else slow(name) for name in TIED])
def test_an_unembedding_beside_tied_embeddings_is_what_transformers_takes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    import transformers

    reference = random_checkpoint(name, tmp_path)
    table = reference.get_input_embeddings().weight.detach().numpy()
    file = tmp_path / "model.safetensors"
    save_file(
        load_file(file) | {"lm_head.weight": np.random.default_rng(1).normal(0, 0.2, table.shape).astype("f4")}, file
    )
    other = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with pytest.warns(UserWarning, match="differs from them"):
        model = load(tmp_path)
    assert_parity(other, model)


BARE = ("llama-gqa", "gpt2", "gptj", "gpt_neox", "falcon-7b", "mpt", "phi3", "gemma3", "qwen3")


@pytest.mark.parametrize("name", [name if name in ("gpt2", "gemma3") else slow(name) for name in BARE])
def test_names_without_the_models_prefix(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    random_checkpoint(name, tmp_path)
    whole, file = load(tmp_path), tmp_path / "model.safetensors"
    prefixes = ("model.", "transformer.", "gpt_neox.")
    bare = {
        name.removeprefix(next((p for p in prefixes if name.startswith(p)), "")): t
        for name, t in load_file(file).items()
    }
    save_file(bare, file)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).weights, whole.weights)


def multimodal(name: str) -> Any:
    """A small config of a multimodal model, whose text half is one of ours; with scaled RoPE after a `+`."""
    import transformers

    name, _, scaling = name.partition("+")
    rope = {"rope_type": scaling or "default", "rope_theta": 1e4}
    rope |= {"factor": 4.0, "original_max_position_embeddings": 16} if scaling else {}

    text = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    if name == "gemma3":
        vision |= {"image_size": 28, "patch_size": 14}
        return transformers.Gemma3Config(
            text_config=text | {"sliding_window": 16}, vision_config=vision, mm_tokens_per_image=4
        )
    if name == "gemma4":
        text |= {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
        text |= {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
        vision |= {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}
        return transformers.Gemma4Config(
            text_config=text | {"sliding_window": 16, "global_head_dim": 16}, vision_config=vision
        )
    if name == "mistral3":
        return transformers.Mistral3Config(
            text_config=text | {"model_type": "mistral"},
            vision_config=vision | {"model_type": "pixtral", "head_dim": 8},
        )
    if name == "qwen3_vl":
        rope |= {"mrope_section": [2, 1, 1]}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        return transformers.Qwen3VLConfig(
            text_config=text | {"rope_parameters": rope}, vision_config=vision | {"deepstack_visual_indexes": [0]}
        )
    if name.startswith("qwen3_5"):
        rope |= {"mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
        text |= {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": rope}
        text |= {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        text |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        if name == "qwen3_5":
            return transformers.Qwen3_5Config(text_config=text, vision_config=vision)
        del text["intermediate_size"]
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return transformers.Qwen3_5MoeConfig(
            text_config=text | {"shared_expert_intermediate_size": 24}, vision_config=vision
        )
    if name == "llama4":
        text |= {"intermediate_size_mlp": 40, "num_local_experts": 2, "interleave_moe_layer_step": 2}
        return transformers.Llama4Config(
            text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14, "vision_output_dim": 16}
        )
    del text["head_dim"]
    return transformers.Qwen2_5_VLConfig(
        text_config=text | {"rope_parameters": rope | {"mrope_section": [1, 1, 2]}},
        vision_config={"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32},
    )


HALVES = ["gemma3", "gemma4", "llama4", "mistral3", "qwen2_5_vl", "qwen2_5_vl+yarn", "qwen3_vl", "qwen3_vl+yarn"]
HALVES += ["qwen3_5", slow("qwen3_5_moe")]


@pytest.mark.parametrize("name", HALVES)
def test_the_text_half_of_a_multimodal_model(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    import transformers

    torch.manual_seed(0)
    reference = transformers.AutoModelForImageTextToText.from_config(multimodal(name)).eval()
    reference.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=f"only the text half of {name.partition('+')[0]} is loaded"):
        model = load(tmp_path)
    ids = np.random.default_rng(3).integers(3, 100, (1, 24))
    if name == "llama4":  # a forward of the whole model without an image is an error in transformers
        reference = reference.language_model
    with torch.no_grad():
        theirs = torch.log_softmax(reference(input_ids=torch.tensor(ids)).logits, -1).numpy()
    np.testing.assert_allclose(jax.nn.log_softmax(model.logits(ids)), theirs, atol=1e-4)


def test_heads_that_predict_several_tokens_are_not_read(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    random_checkpoint("qwen3_5", tmp_path)
    expected, file = load(tmp_path).weights, tmp_path / "model.safetensors"
    save_file(load_file(file) | {"mtp.fc.weight": np.ones((2, 2), np.float32)}, file)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).weights, expected)


def test_checkpoint_of_the_model_without_its_head(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    reference = random_checkpoint("gpt2", tmp_path / "whole")
    reference.transformer.save_pretrained(tmp_path / "bare")
    file = tmp_path / "bare" / "model.safetensors"
    tensors = load_file(file)
    assert not any(name.startswith("transformer.") for name in tensors)
    save_file(tensors | {"h.0.attn.bias": np.tril(np.ones((1, 1, 8, 8), np.float32))}, file)  # as in OpenAI's
    whole, bare = load(tmp_path / "whole"), load(tmp_path / "bare")
    jax.tree.map(np.testing.assert_array_equal, bare.weights, whole.weights)


GREEDY = ("gemma3", "phi3", "gpt2", "mpt", "gpt_oss", "granite_swa", "exaone4", "cohere2", "glm", "glm4", "ernie4_5")
GREEDY += ("arcee", "seed_oss", "hunyuan_v1_dense", "apertus", "nanochat", "vaultgemma", "qwen3_next")
GREEDY += ("gemma4-shared-many",)
"""Models of which the default suite compares greedy text."""


@pytest.mark.parametrize("name", [name if name in GREEDY else slow(name) for name in MODELS])
def test_greedy_text_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    reference = random_checkpoint(name, tmp_path)
    model, lengths, new = load(tmp_path), np.array([80, 69]), 64
    text = np.random.default_rng(2).integers(3, 128, (2, 80 + new))
    state, logits = kvjax.prefill(model, "full", text[:, :80], lengths=lengths, max_new_tokens=new)
    for step in range(new):
        text[range(2), lengths + step] = np.argmax(logits, -1)
        state, logits = kvjax.decode_step(state, text[range(2), lengths + step])
    # One reading of the whole text tells what every step would have written.
    real = np.arange(80 + new) < (lengths + new)[:, None]
    with torch.no_grad():
        theirs = reference(torch.tensor(text), attention_mask=torch.tensor(real.astype(int))).logits
    written = theirs.argmax(-1).numpy()
    for row, length in enumerate(lengths):
        np.testing.assert_array_equal(written[row, length - 1 : length + new - 1], text[row, length : length + new])
    ours, last = jax.nn.log_softmax(logits), torch.log_softmax(theirs, -1).numpy()[range(2), lengths + new - 1]
    np.testing.assert_allclose(ours, last, atol=1e-4)


def test_parity_of_shards(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    reference = random_checkpoint("llama-gqa", tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_parity(reference, load(tmp_path))


def test_parity_of_bfloat16_checkpoint(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    random_checkpoint("llama-gqa", tmp_path / "wide").to(torch.bfloat16).save_pretrained(tmp_path / "narrow")
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype=torch.float32)
    assert_parity(reference, load(tmp_path / "narrow"))


VARIANTS = {
    "gqa": GQA,
    "sliding": small_config(4, 2, sliding_window=20),
    "alibi": small_config(6, 3, position="alibi", rope=None),
    "layers that differ": small_config(4, 2, windows=(20, None), ropes=(Rope(8), None), soft_cap=2.0, value_width=6),
    "learned": small_config(4, 4, position="learned", rope=None, norm="layer", norm_bias=True, gated_mlp=False),
    "parallel": small_config(4, 1, parallel=True, shared_norm=True, rope=Rope(width=4, interleaved=True), tied=True),
}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.compiled_well
def test_blocks_rows_and_padding_do_not_matter(config: ModelConfig) -> None:
    model = random_model(config)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, 600))
    long = model.logits(tokens)
    np.testing.assert_allclose(model.logits(tokens[:, :200]), long[:, :200], atol=2e-5)
    padded = np.where(np.arange(200) < np.array([[150], [31]]), tokens[:, :200], 10**6)
    ragged = model.logits(padded, [150, 31])
    assert np.isfinite(ragged).all()
    np.testing.assert_allclose(ragged[0, :150], long[0, :150], atol=2e-5)
    np.testing.assert_allclose(ragged[1, :31], long[1, :31], atol=2e-5)
    np.testing.assert_allclose(model.logits(tokens[1:])[0], long[1], atol=2e-5)


@pytest.mark.compiled_well
def test_no_matrix_of_all_pairs() -> None:
    model, tokens = random_model(MQA), jnp.zeros((1, 4096), jnp.int32)
    lowered = jax.jit(forward, static_argnames="config").lower(model.weights, MQA, tokens, jnp.array([4096]))
    memory = lowered.compile().memory_analysis()
    assert (
        memory is not None and memory.temp_size_in_bytes < 4 * 4096 * 4096
    )  # one float32 matrix for one of the four heads


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("rows", [1, 2, 32, 33])
def test_products_of_any_rows(rows: int, dtype: str) -> None:
    rng = np.random.default_rng(0)
    with jax.enable_x64(dtype == "float64"):
        x, weight = (jnp.asarray(rng.normal(size=size), dtype) for size in ((rows, 1, 24), (40, 24)))
        found = product(x, weight)
        assert found.dtype == dtype and found.shape == (rows, 1, 40)
        exact = np.einsum("...i,oi->...o", *(np.asarray(each, np.float64) for each in (x, weight)))
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, rtol=1e-2 if dtype == "bfloat16" else 1e-4)
        assert product(x, weight, jnp.float32).dtype == jnp.float32


@pytest.mark.parametrize("outputs", [400, 401])
def test_halves_of_the_outputs_are_the_whole_to_the_bit(outputs: int) -> None:
    x, weight = jax.random.normal(jax.random.key(0), (1, 1, 256)), jax.random.normal(jax.random.key(1), (outputs, 256))
    whole = jax.jit(lambda x, weight: jnp.einsum("...i,oi->...o", x, weight))
    np.testing.assert_array_equal(jax.jit(product)(x, weight), whole(x, weight))
    halved = platform_of(None) == "cpu" and outputs % 2 == 0
    assert ("f32[2,200] = dot_general" in str(jax.make_jaxpr(product)(x, weight))) is halved


def test_rows_of_long_texts_go_in_blocks() -> None:
    x, asked = jax.random.normal(jax.random.key(0), (2, 5, 3)), []

    def doubled(rows: Array) -> Array:
        asked.append(len(rows))
        return jnp.concatenate([rows, rows], axis=-1)

    np.testing.assert_array_equal(in_blocks(doubled, x, 4), np.concatenate([x, x], axis=-1))
    assert asked == [4, 2]  # two blocks by one trace, then what is left


def test_a_single_row_is_no_product_of_vectors_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvjax.models.linear.platform_of", lambda _: "tpu")
    x, weight = jax.random.normal(jax.random.key(0), (1, 1, 24)), jax.random.normal(jax.random.key(1), (40, 24))
    np.testing.assert_allclose(product(x, weight), x @ weight.T, rtol=1e-5, atol=1e-6)
    assert "f32[2,40] = dot_general" in str(jax.make_jaxpr(product)(x, weight))


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.compiled_well
def test_a_product_in_bfloat16_makes_no_wide_copy_of_the_weight(rows: int) -> None:
    x, weight = (jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in ((rows, 1, 512), (4096, 512)))
    memory = jax.jit(product).lower(x, weight).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4096 * 512


def test_bfloat16_is_close_and_finite() -> None:
    tokens = np.arange(40)[None]
    narrow = random_model(GQA, dtype=jnp.bfloat16).logits(tokens)
    assert narrow.dtype == jnp.float32 and np.isfinite(narrow).all()
    np.testing.assert_allclose(narrow, random_model(GQA).logits(tokens), atol=0.2)


def test_norms_without_scales_leave_the_dtype_to_embeddings() -> None:
    model = random_model(small_config(4, 2, norm_scales=False, embedding_norm=True), dtype=jnp.bfloat16)
    assert model.weights.norm.scale is None and model.weights.dtype == jnp.bfloat16
    assert np.isfinite(model.logits([[1, 2, 3]])).all()


def test_one_compilation_serves_other_weights_and_lengths() -> None:
    traces = []

    @jax.jit
    def logits(weights: Weights, tokens: Array, lengths: Array) -> Array:
        traces.append(tokens.shape)
        return forward(weights, GQA, tokens, lengths)

    for seed, lengths in enumerate([(24, 24), (3, 24)]):
        logits(random_model(GQA, seed).weights, jnp.ones((2, 24), jnp.int32), jnp.array(lengths))
    assert len(traces) == 1


def test_rotation_keeps_what_it_does_not_rotate() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 2, 5, 8))
    turned = rotate(Rope(width=4), x, jnp.arange(5))
    np.testing.assert_array_equal(turned[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(turned[..., 0, :], x[..., 0, :])
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x, axis=-1), rtol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "lengths", "sentence"),
    [
        ([1, 2], None, r"tokens must be integers of shape \[b, t\], not int64 of shape \[2\]"),
        ([[1.0]], None, r"tokens must be integers of shape \[b, t\], not float64"),
        ([[]], None, r"of shape \[1, 0\]"),
        ([[1, 64]], None, "Token id 64 is outside the vocabulary of 64 tokens"),
        ([[1, -1]], None, "Token id -1 is outside the vocabulary"),
        ([[1, 2]], [3], r"lengths must be 1 integers from 1 to 2, one per row, not \[3\]"),
        ([[1, 2]], [0], r"lengths must be 1 integers from 1 to 2, one per row, not \[0\]"),
        ([[1, 2]], [1, 1], "lengths must be 1 integers"),
    ],
)
def test_logits_refuses(tokens: list, lengths: list | None, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        random_model(GQA).logits(tokens, lengths)


def test_logits_refuses_more_tokens_than_learned_positions() -> None:
    model = random_model(small_config(4, 4, position="learned", rope=None, max_positions=8))
    with pytest.raises(ValueError, match=r"9 tokens do not fit the model's 8 positions\."):
        model.logits(np.zeros((1, 9), int))


LONG = np.ones((1, 33), int)
READ: dict[str, Callable[[Model, str, Path], Any]] = {
    "logits": lambda model, policy, out: model.logits(LONG),
    "prefill": lambda model, policy, out: kvjax.prefill(model, policy, LONG, 8),
    "extend": lambda model, policy, out: kvjax.extend(kvjax.prefill(model, policy, [[1] * 20], 8)[0], LONG[:, 20:]),
    "generate": lambda model, policy, out: generate_ids(model, [[1] * 20], policy=policy, budget=8, max_new_tokens=13),
    "perplexity": lambda model, policy, out: perplexity(model, policy, LONG, 8),
    "perplexity after a prefix": lambda model, policy, out: perplexity(model, policy, LONG, 8, prefix=20),
    "trace": lambda model, policy, out: trace(model, policy, [1] * 20, [1] * 13, 8),
    "masked": lambda model, policy, out: masked_perplexity(model, policy, LONG, 8),
    "training": lambda model, policy, out: collect(model, kvjax.policy(policy), 8, LONG, out),
    "serving": lambda model, policy, out: Device(model, policy, budget=8, rows=1, context=33, chunk=16, steps=1),
}
"""What is asked to read a text of 33 tokens."""


@pytest.mark.parametrize("policy", ["h2o", "streaming"])  # positions of the text, and those of the cache
def test_texts_of_more_than_one_chunk_are_refused(policy: str, tmp_path: Path) -> None:
    model = random_model(dataclasses.replace(LLAMA4, max_positions=32))
    for read in READ.values():
        with pytest.raises(
            ValueError, match=r"32 positions.* \(some of its layers attend within chunks, and kvjax reads"
        ):
            read(model, policy, tmp_path)
    state, _ = kvjax.prefill(model, policy, LONG[:, :31], 8)
    state, logits = kvjax.decode_step(state, [1])
    assert np.isfinite(logits).all() and np.isnan(kvjax.decode_step(state, [1])[1]).all()


CACHE_POSITIONS = kvjax.policy("h2o", positions="cache")


@pytest.mark.parametrize("policy", ["streaming", CACHE_POSITIONS])
@pytest.mark.parametrize(
    ("config", "reason"),
    [(LEARNED, "adds learned positions"), (NORMS_AFTER_ROPE, "normalizes keys after")],
    ids=("learned", "norms after RoPE"),
)
def test_some_keys_stay_at_their_original_positions(config: ModelConfig, reason: str, policy: Any) -> None:
    sentence = rf"positions='cache' does not go with model 'random', which {reason} .*='original'"
    with pytest.raises(ValueError, match=sentence):
        kvjax.prefill(random_model(config), policy, [[1, 2, 3]], 8)


@pytest.mark.parametrize("config", [LEARNED, NORMS_AFTER_ROPE], ids=("learned", "norms after RoPE"))
def test_a_text_beyond_the_positions_of_such_a_model_has_no_other_policy(config: ModelConfig) -> None:
    model = random_model(config)
    with pytest.raises(ValueError, match=r"do not fit the model's 4096 positions; ask for fewer\."):
        generate_ids(model, [[1] * 4095], max_new_tokens=2)


@pytest.mark.parametrize(
    ("policy", "after_rope"),
    [*((policy, False) for policy in ("full", "streaming", "h2o", CACHE_POSITIONS)), ("h2o", True)],
    ids=str,
)
def test_heads_out_of_norms_are_rotated_as_those_out_of_products(policy: Any, after_rope: bool) -> None:
    model = random_model(dataclasses.replace(NORMS_AFTER_ROPE, norms_after_rope=after_rope))
    tokens = np.random.default_rng(3).integers(0, 64, (2, 24))
    budget = 1.0 if policy == "full" else 32
    state, logits = kvjax.prefill(model, policy, tokens[:, :16], budget, max_new_tokens=8)
    whole = model.logits(tokens)
    for place in range(16, 24):
        np.testing.assert_allclose(logits, whole[:, place - 1], atol=2e-5)
        state, logits = kvjax.decode_step(state, tokens[:, place])


def test_a_llama_that_is_written_is_read_again(tmp_path: Path) -> None:
    model = random_model(GQA)
    write_checkpoint(model.weights, GQA, tmp_path)
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path).weights, model.weights)


@pytest.mark.parametrize("tied", [False, True])
def test_8_bit_weights_of_a_llama_are_written_in_floating_point(tied: bool, tmp_path: Path) -> None:
    config = dataclasses.replace(GQA, tied=tied, bos=3, eos=(5, 7))
    write_checkpoint(random_model(config).weights, config, tmp_path / "floats")
    rounded = load(tmp_path / "floats", weights="int8")
    write_checkpoint(rounded.weights, config, tmp_path / "rounded")
    written = load(tmp_path / "rounded")
    assert written.config == config
    np.testing.assert_allclose(written.logits([[1, 2, 3]]), rounded.logits([[1, 2, 3]]), atol=1e-3)


@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"gqa"}))
def test_what_is_no_llama_is_not_written_as_one(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only a Llama without biases and without scaled RoPE can be written"):
        write_checkpoint(random_model(VARIANTS[name]).weights, VARIANTS[name], tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_model_without_tokenizer() -> None:
    with pytest.raises(ValueError, match="Model 'random' has no tokenizer: it has no directory; pass token ids"):
        _ = random_model(GQA).tokenizer


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"kv_heads": 3}, "4 query heads cannot share 3 KV heads evenly"),
        ({"position": "alibi"}, "position='alibi' does not fit rope=Rope"),
        ({"shared_norm": True}, "shared_norm=True needs parallel=True"),
        ({"tied": True, "unembedding_bias": True}, "tied=True does not go with unembedding_bias=True"),
        ({"query_key_scales": False}, "query_key_scales=False goes with query_key_norms=True"),
        ({"norms_after_rope": True}, "norms_after_rope=True goes with query_key_norms=True over each head"),
        ({"norm_scales": False, "tied": True}, "norm_scales=False goes with .* tied=False only"),
        ({"activation": "xielu"}, "activation='xielu' goes with gated_mlp=False"),
    ],
)
def test_config_refuses(changes: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        small_config(4, changes.pop("kv_heads", 2), **changes)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(residual="attention_matching"), "changes values, but latent attention stores keys and values in one"),
        (dict(positions="cache"), "latent attention stores rotated ones as its values, too"),
    ],
)
def test_what_needs_keys_and_values_apart_is_refused_for_latents(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate_ids(random_model(LATENT), [[1, 2, 3]], policy=kvjax.policy("h2o", **settings), max_new_tokens=4)


@pytest.mark.parametrize("config", [GQA, LATENT, HYBRID, CONVOLVED, SOURCES])
def test_a_model_of_any_layers_is_told_from_another_one(config: ModelConfig) -> None:
    model, other = random_model(config), random_model(config, seed=1)
    assert fingerprint(model) == fingerprint(random_model(config)) != fingerprint(other)
    state, logits = kvjax.prefill(model, "criticalkv", [list(range(1, 50))], 40, max_new_tokens=4)
    assert np.isfinite(logits).all() and len(held_positions(state)) == len(config.storing)


def test_a_latent_is_stored_once() -> None:
    state, _ = kvjax.prefill(random_model(LATENT), "full", [[1, 2, 3]], max_new_tokens=61)
    slots, number = int(state.cache.allocated_slots), 4
    assert kvjax.cache_bytes(state) == LATENT.layers * (slots * (LATENT.head_width + 1) + 1) * number
    assert kvjax.full_cache_bytes(state) == kvjax.cache_bytes(state)
