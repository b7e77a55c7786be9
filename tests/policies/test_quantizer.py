"""Storage formats of keys and values: kvjax's own against NumPy, and one in a user's file everywhere they may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import kvjax
from kvjax import generate
from kvjax.cli import options
from kvjax.evaluation.grid import describe
from kvjax.generation.chat import Conversation
from kvjax.inference.state import held_positions
from kvjax.methods import CODECS
from kvjax.methods.fp8 import Float8
from kvjax.policies.quantizer import SymmetricQuantizer
from kvjax.types import Kernels, number
from pallas_kernels import decode_attention, fused_decode, operands, paged_attention, prefill_attention
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.common import Unsupported
from pallas_kernels.operands import Encoded
from tests.cases import slow
from tests.kernels import TPU_WAYS
from tests.oracles.codecs import rounded
from tests.small_models import GQA, random_model

TEXT = np.random.default_rng(2).integers(0, GQA.vocab_size, (2, 80))

MINE = '''
import jax.numpy as jnp
from flax import struct

import kvjax
from kvjax.types import setting


@struct.dataclass
class Steps(kvjax.Quantizer):
    """Whole multiples of a step that is a share of the slot's largest number."""

    steps: int = setting(32000)

    def encode(self, x):
        step = jnp.maximum(jnp.abs(x).max(-1), 1e-30) / self.steps
        return {"codes": jnp.round(x / step[..., None]).astype(jnp.int16), "step": step.astype(jnp.float32)}

    def decode(self, stored, dtype):
        return stored["codes"].astype(dtype) * stored["step"][..., None].astype(dtype)


coarse = Steps(100)
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of somebody's own with a quantizer."""
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    return file


def quantizer(file: Path, steps: int = 32000) -> kvjax.Quantizer:
    settings: dict[str, Any] = {"codec.steps": steps}
    return kvjax.policy("h2o", codec=f"{file}:Steps", **settings).codec.quantizer


@pytest.mark.core
@pytest.mark.parametrize("name", CODECS)
def test_numbers_are_rounded_as_the_format_says(name: str, x64: None) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 40, 16)) * np.exp2(rng.integers(-12, 12, (2, 3, 40, 16)))
    form = CODECS[name]()
    found = form.decode(form.encode(jnp.asarray(x)), jnp.float64)
    expected = x if name == "plain" else np.apply_along_axis(rounded, -1, x, name)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_e4m3_saturates_rounds_to_even_and_has_small_numbers(dtype: Any) -> None:
    given = [448, 460, 1e9, -1e9, 17, 19, 2**-9, 1.5 * 2**-9, 2**-10, 1.5 * 2**-10, 0.0]
    wanted = [448, 448, 448, -448, 16, 20, 2**-9, 2**-8, 0, 2**-9, 0.0]
    stored = Float8().encode(jnp.asarray([given], dtype))
    assert stored.dtype == jnp.uint8
    np.testing.assert_array_equal(Float8().decode(stored, dtype)[0].astype(jnp.float32), wanted)
    assert np.isnan(Float8().decode(Float8().encode(jnp.asarray([[jnp.nan]], dtype)), dtype)).all()


@pytest.mark.parametrize("plan", [None, "adakv"])
def test_fp8_takes_half_of_the_bytes_of_16_bits(plan: str | None) -> None:
    model = random_model(GQA, dtype=jnp.bfloat16)
    taken = []
    for codec in ("plain", "fp8"):
        policy = kvjax.policy("h2o", codec=codec, plan=plan)
        state, _ = kvjax.prefill(model, policy, TEXT[:, :40], 16, max_new_tokens=4)
        cache = state.cache
        pairs = [layer.kv for layer in cache.slots] if cache.pool is None else cache.pool.kv
        states = [layer.state.codec for layer in cache.attending]
        scales = sum(state.factor.nbytes for state in states if state is not None)
        taken.append((sum(leaf.nbytes for leaf in jax.tree.leaves(pairs)), kvjax.cache_bytes(state) - scales))
    assert taken[1][0] == taken[0][0] / 2
    assert taken[0][1] - taken[1][1] == taken[1][0]


def follow(policy: kvjax.Policy, **arguments: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """Logits and held positions of a prompt, steps, a block of text, and steps after rows have changed places."""
    model = random_model(GQA)
    state, logits = kvjax.prefill(model, policy, TEXT[:, :40], 16, max_new_tokens=40, lengths=(40, 31), **arguments)
    seen = [logits]
    for step in range(6):
        state, logits = kvjax.decode_step(state, TEXT[:, 40 + step])
        seen.append(logits)
    state, logits = kvjax.extend(state, [TEXT[0, 46:53].tolist(), TEXT[1, 46:50].tolist()])
    state = kvjax.put_rows(state, [0], kvjax.take_rows(state, [1]))
    for step in range(3):
        state, logits = kvjax.decode_step(state, TEXT[:, 60 + step])
        seen.append(logits)
    return np.stack(seen), held_positions(state)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("h2o", {}),
        ("h2o", {"plan": "adakv"}),
        slow("streaming", {}),
        slow("less", {"kernels": "performer"}),
        slow("h2o", {"selection": "topk", "selection.k": 8}),
    ],
)
def test_a_format_of_ones_own_works_in_every_storage(mine: Path, name: str, arguments: dict[str, Any]) -> None:
    plain = follow(kvjax.policy(name, **arguments))
    own = follow(kvjax.policy(name, codec=quantizer(mine), **arguments))
    np.testing.assert_allclose(own[0], plain[0], rtol=2e-3, atol=2e-3)
    for one, other in zip(own[1], plain[1], strict=True):
        np.testing.assert_array_equal(np.sort(one), np.sort(other))


def test_a_prompt_in_chunks_reads_a_format_of_ones_own(mine: Path) -> None:
    codecs = ("plain", quantizer(mine), quantizer(mine, steps=50))
    plain, own, coarse = (follow(kvjax.policy("h2o", codec=codec), prefill_chunk=8)[0] for codec in codecs)
    np.testing.assert_allclose(own, plain, rtol=2e-3, atol=2e-3)
    assert np.abs(coarse - plain).max() > 2e-3


def test_a_conversation_is_saved_in_a_format_of_ones_own(mine: Path, tmp_path: Path) -> None:
    model = kvjax.load("tiny")
    for codec in (quantizer(mine), "fp8"):
        settings: dict[str, Any] = dict(policy=kvjax.policy("h2o", codec=codec), budget=16, max_new_tokens=8)
        settings |= {"temperature": 0.0}
        talk = Conversation(model, **settings)
        "".join(talk.reply("My name is Tom."))
        talk.save(tmp_path / "kept")
        answer = "".join(talk.reply("What is my name?"))
        again = Conversation(model, **settings)
        again.load(tmp_path / "kept")
        assert "".join(again.reply("What is my name?")) == answer
        settings |= {"policy": "h2o"}
        other = Conversation(model, **settings)
        with pytest.raises(ValueError, match="of another model, policy or dtype"):
            other.load(tmp_path / "kept")


def test_a_format_is_named_by_its_file(mine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def chosen(*words: str) -> Any:
        return options.policy_and_budget(generate.parser().parse_args(list(words)))[0].codec.quantizer

    assert chosen("--codec", f"{mine}:Steps").steps == 32000
    assert chosen("--codec", f"{mine}:Steps", "--set", "codec.steps=9").steps == 9
    assert chosen("--codec", f"{mine}:coarse").steps == 100
    assert chosen("--policy", "h2o+fp8") == Float8()
    for words, message in (
        ((f"{mine}:none",), "has no 'none'; it has Steps, coarse"),
        ((f"{mine}:kvjax",), "kvjax is no Quantizer, neither a class nor an instance: <module"),
        ((f"{mine.parent}/nowhere.py:Steps",), "there is no file .*nowhere.py to take codec 'Steps' from"),
        ((f"{mine}:Steps", "--set", "codec.bits=9"), "has no setting 'bits'; it takes steps"),
        ((f"{mine}:Steps", "--set", "codec.steps=0.5"), "steps=0.5 is not a whole number"),
        ((f"{mine}:coarse", "--set", "codec.steps=9"), "codec.steps cannot be set for a codec that is an instance"),
        (("fp9",), "there is no codec 'fp9'; did you mean fp8"),
    ):
        with pytest.raises(ValueError, match=message):
            chosen("--codec", *words)
    words = "--policy h2o --budget 8 --prompt Tom --max-new-tokens 3"
    assert generate.main(["--codec", f"{mine}:Steps", *words.split()]) == 0 and capsys.readouterr().out


def test_positions_are_a_setting_beside_the_format(mine: Path) -> None:
    assert kvjax.policy("streaming", codec=quantizer(mine)).codec.positions == "cache"
    assert kvjax.policy("streaming", codec=kvjax.Codec(quantizer=quantizer(mine))).codec.positions == "original"
    assert kvjax.policy("h2o", codec="fp8").codec == kvjax.Codec("original", quantizer=Float8())
    assert (kvjax.Codec("cache", 8).bits, kvjax.Codec(bits=4).name, kvjax.Codec().bits) == (8, "int4", None)
    with pytest.raises(ValueError, match=r"codec Steps holds keys as they are seen, but positions='cache' turns"):
        kvjax.policy("keyformer", positions="cache", codec=quantizer(mine))


def test_rows_of_measurements_name_the_format(mine: Path) -> None:
    known = {"kind": "Codec", "positions": "original", "sliding": False, "sinks": 0}
    assert describe(kvjax.policy("h2o", codec="int8"))["codec"] == known | {"bits": 8}
    assert describe(kvjax.policy("h2o", codec="fp8"))["codec"] == known | {"quantizer": {"kind": "Float8"}}
    own = describe(kvjax.policy("h2o", codec=quantizer(mine)))["codec"]
    assert own == known | {"quantizer": {"kind": "Steps", "steps": 32000}}


def encoding(self: Any, x: Any) -> Any:
    return operands.quantise(x, 8)


def decoding(self: Any, stored: Any, dtype: Any) -> Any:
    return stored.values(dtype)


def halving(self: Any, x: Any) -> Any:
    return operands.quantise(x / 2, 8)


def made(*bases: type, **members: Any) -> Any:
    return struct.dataclass(type("Theirs", bases, members))


def test_integer_codes_of_another_package_compile_to_the_same_programs() -> None:
    scales = SymmetricQuantizer.init_scales
    copied = made(kvjax.Quantizer, init_scales=scales, encode=encoding, decode=decoding)()
    programs = []
    for codec in ("int8", made(SymmetricQuantizer, bits=8)(), copied):
        policy = kvjax.policy("h2o", codec=codec)
        state, _ = kvjax.prefill(random_model(GQA), policy, TEXT[:, :40], 16, max_new_tokens=4)
        programs.append(str(jax.make_jaxpr(kvjax.decode_step)(state, jnp.asarray([1, 2]))))
    assert programs[0] == programs[1] == programs[2]


def test_no_kernel_encodes_in_another_way_than_the_format() -> None:
    # Values come out half as large, which a kernel that rounded by itself would not know.
    policy, found = kvjax.policy("h2o", codec=made(SymmetricQuantizer, bits=8, encode=halving)()), []
    for kernels in (Kernels("xla"), Kernels("pallas,xla", TPU_WAYS[0].interpret, TPU_WAYS[0].platform)):
        model = kvjax.load("tiny")
        state, _ = kvjax.prefill(model, policy, TEXT[:1, :40], 16, max_new_tokens=4, implementation=kernels)
        for token in (5, 6, 7):
            state, logits = kvjax.decode_step(state, [token])
        found.append(logits)
    np.testing.assert_allclose(found[1], found[0], rtol=0.02, atol=0.02)


def test_what_is_no_format_is_refused() -> None:
    untyped: Any = kvjax
    with pytest.raises(TypeError, match=r"quantizer='int8' is no instance of Quantizer; kvjax\.policy takes names"):
        untyped.Codec(quantizer="int8")
    with pytest.raises(TypeError, match=r"Theirs\(step=0\.5\) has settings that are traced; declare them with"):
        members = {"__annotations__": {"step": "float"}, "step": number(0.5)}
        kvjax.Codec(quantizer=made(kvjax.Quantizer, encode=encoding, decode=decoding, **members)())
    with pytest.raises(TypeError, match="abstract"):
        made(kvjax.Quantizer, encode=encoding)()
    with pytest.raises(TypeError, match=r"never calls Theirs.encodes \(did you mean encode\)"):
        made(kvjax.Quantizer, encode=encoding, decode=decoding, encodes=encoding)()
    with pytest.raises(ValueError, match=r"bits=8 is not None beside quantizer=Float8\(\)"):
        kvjax.Codec(bits=8, quantizer=Float8())


def stored(shape: tuple[int, ...]) -> Encoded:
    x = jax.random.normal(jax.random.key(len(shape)), shape)
    return Encoded(Float8().encode(x), Float8())


@pytest.mark.parametrize("form", ["pallas", "triton"])
def test_kernels_refuse_a_format_by_name_and_auto_takes_xla(form: str) -> None:
    q, position = jnp.ones((1, 2, 2, 64)), jnp.arange(16, dtype=jnp.int32)
    k, v, spec, here = stored((1, 2, 16, 64)), stored((1, 2, 16, 64)), AttentionSpec(0.125), jnp.asarray([15])
    at = jnp.broadcast_to(position, (1, 2, 16))
    platform = "tpu" if form == "pallas" else "gpu"

    def attend(implementation: str) -> Any:
        return decode_attention.decode_attention(
            q, k, v, at, here, spec, implementation=implementation, interpret=True, platform=platform
        )

    message = "keys and values are stored by Float8, which xla alone decodes; use 'xla' or 'auto'"
    needs = "it needs" if form == "triton" else message
    with pytest.raises(Unsupported, match=f"{message}|{needs}"):
        attend(form)
    keys, values = (x.values(jnp.float32) for x in (k, v))
    plain = decode_attention.decode_attention(q, keys, values, at, here, spec, implementation="xla")
    np.testing.assert_allclose(attend("auto").out, plain.out, rtol=1e-5, atol=1e-5)
    if form != "pallas":
        return
    assert not fused_decode.one_pass(fused_decode.Query(q, spec), k, v, interpret=True, platform="tpu")
    with pytest.raises(Unsupported, match=message):
        paged_attention.paged_attention(
            q, stored((2, 16, 64)), stored((2, 16, 64)), at[0], jnp.arange(2), jnp.asarray([0, 2]), here, spec,
            implementation="pallas", interpret=True, platform="tpu",
        )  # fmt: skip
    with pytest.raises(Unsupported, match="keys are Encoded, and it reads arrays only"):
        queries = jnp.ones((1, 2, 2, 16, 64))
        prefill_attention.prefill_attention(
            queries, k, v, position[None], at, spec, scores=False, implementation="pallas", interpret=True
        )


def test_a_policy_refuses_the_kernels_that_cannot_read_its_format() -> None:
    kernels = Kernels("pallas", TPU_WAYS[0].interpret, TPU_WAYS[0].platform)
    model, policy = kvjax.load("tiny"), kvjax.policy("h2o", codec="fp8")
    state, _ = kvjax.prefill(model, policy, TEXT[:1, :40], 16, max_new_tokens=4, implementation=kernels)
    with pytest.raises(Unsupported, match="'pallas': keys and values are stored by Float8, which xla alone decodes"):
        kvjax.decode_step(state, [1])
