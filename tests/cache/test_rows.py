"""Rows that come and go: taken from one state, put into another, and left alone while others go on."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Array, Float, Int

import kvjax
from kvjax.inference.cache import ROWS
from kvjax.methods.adakv import AdaKV
from kvjax.policies import Policy
from kvjax.policies.allocation import Plan, Uniform
from kvjax.types import Heads, LayerTokens, PyTree, View, nothing
from tests.cases import PAIRS, POLICIES, slow
from tests.held import kept
from tests.methods.test_oracles import compare_with_oracle
from tests.oracles.decoder import Oracle
from tests.small_models import GQA, random_model

MODEL = random_model(GQA)
RNG = np.random.default_rng(8)
PROMPTS = [RNG.integers(0, GQA.vocab_size, length).tolist() for length in (41, 25, 33, 17, 38)]
TEXT = RNG.integers(0, GQA.vocab_size, (400,))
CASES = POLICIES | PAIRS
MIXED = [
    "h2o+adakv",
    "streaming+adakv",
    "less+snapkv+adakv",
    "h2o+adakv+int8",
    "less+fastgen-low+int8",
    "momentkv+h2o+adakv",
]
ROWS_OF = ["own", "full", "streaming", "keyformer", "tova", "scissorhands", "lightkv", "lsh_e", "less-performer"]
ROWS_OF += ["lightkv-offload", "fastgen", "h2o+int8", "h2o-cache-positions", "own+adakv", *MIXED]
"""Whatever differs in what heads and slots remember, and where."""
SOME = (
    "own",
    "lightkv-offload",
    "fastgen",
    "h2o+int8",
    "h2o-cache-positions",
    "less+snapkv+adakv",
)
every_kind = pytest.mark.parametrize("name", [name if name in SOME else slow(name) for name in ROWS_OF])


@struct.dataclass
class Usefulness(kvjax.Score):
    """A token's mean attention since it came: what slots and heads remember is more than one array each."""

    def init_head(self, shape: LayerTokens) -> dict[str, Int[Array, "b h"]]:
        return {"heard": jnp.zeros(shape.k.shape[:2], jnp.int32)}

    def init_slot(self, new: LayerTokens, state: PyTree) -> dict[str, Array]:
        born = state.score["heard"][..., None] + jnp.arange(new.k.shape[2], dtype=jnp.int32)
        return {"total": nothing(new), "born": jnp.broadcast_to(born, new.k.shape[:3])}

    def attention_stats(self, heads: Heads, new: LayerTokens) -> kvjax.AttentionSum:
        return kvjax.AttentionSum()

    def update_slot(self, stats: Float[Array, "b h c"], view: View, new: LayerTokens) -> dict[str, Array]:
        return view.slots.score | {"total": view.slots.score["total"] + stats}

    def update_head(self, heads: Heads, new: LayerTokens) -> dict[str, Int[Array, "b h"]]:
        return {"heard": heads.state.score["heard"] + new.valid.sum(1, dtype=jnp.int32)[:, None]}

    def score(self, view: View, new: LayerTokens) -> Float[Array, "b h c"]:
        found = view.slots.score
        return found["total"] / jnp.maximum(view.state.score["heard"][..., None] - found["born"], 1)


class UsefulnessOracle(Oracle):
    def read(self, prompt):
        for h, head in enumerate(self.heads):
            for i in range(prompt.prompt_length):
                head.notes[i] = [
                    prompt.probs[h][g][query, i] for query in range(i, prompt.prompt_length) for g in (0, 1)
                ]

    def note(self, h, new):
        return []

    def after(self, new, probs):
        for h, head in enumerate(self.heads):
            for i, note in enumerate(head.notes):
                note += [probs[h][g][i] for g in range(self.groups)]

    def scores(self, h, new):
        return [self.groups * sum(note) / len(note) for note in self.heads[h].notes]


def own(plan: Plan | None = None) -> Policy:
    """A policy that nobody registered."""
    return Policy(Usefulness(), kvjax.Protection(recent=4), plan or Uniform(), name="usefulness")


def made(name: str) -> Policy:
    """A policy of a case, or one of our own."""
    if name.startswith("own"):
        return own(AdaKV() if name == "own+adakv" else None)
    case = CASES[name]
    return case.make() if case.plan is None else case.make(plan=case.plan)


def read(
    name: str, rows: list[int], budget: int = 20, tokens: int = 60, dtype: Any = jnp.float32
) -> tuple[kvjax.State, Array]:
    """Some of `PROMPTS`, each with randomness of its own."""
    policy = made(name)
    model = MODEL if dtype == jnp.float32 else random_model(GQA, dtype=dtype)
    slots: Any = 1.0 if policy.plan.sizing.mode != "budget" else budget
    keys = jax.vmap(jax.random.key)(jnp.asarray(rows))
    return kvjax.prefill(model, policy, [PROMPTS[row] for row in rows], slots, max_new_tokens=tokens, key=keys)


def write(state: kvjax.State, steps: int) -> tuple[kvjax.State, np.ndarray]:
    """Each row's next tokens, which depend on its position alone: the last state and logits [steps, b, vocab]."""
    found = []
    for _ in range(steps):
        state, logits = kvjax.decode_step(state, jnp.asarray(TEXT[np.asarray(state.position)], jnp.int32))
        found.append(np.asarray(logits))
    return state, np.stack(found)


def leaves_of(state: kvjax.State, row: int) -> list[np.ndarray]:
    """All that a state knows of a row."""
    alone = kvjax.take_rows(state, [row])
    fields = [getattr(alone.cache, name) for name in ROWS if name not in ("key", "active")]
    memory = jax.tree.leaves(alone.cache.memory)
    return [np.asarray(leaf) for leaf in (*memory, *jax.tree.leaves(fields), jax.random.key_data(alone.key))]


def unchanged(before: kvjax.State, after: kvjax.State, row: int) -> None:
    for old, new in zip(leaves_of(before, row), leaves_of(after, row), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("plan", [None, "adakv"])
def test_a_policy_of_ones_own_equals_its_oracle(plan: str | None, x64: None) -> None:
    case = dataclasses.replace(POLICIES["h2o"], oracle=UsefulnessOracle, plan=plan)
    model = random_model(GQA, seed=1, dtype=jnp.float64)
    compare_with_oracle(case, model, (41, 9), 60, policy=own())


@every_kind
def test_an_inactive_row_never_changes_and_nobody_notices(name: str) -> None:
    state, _ = read(name, [0, 1, 2])
    state, _ = write(state, 2)
    resting = state.replace(active=jnp.array([True, False, True]))
    moved, found = write(resting, 3)
    unchanged(resting, moved, 1)
    everyone, expected = write(state, 3)
    np.testing.assert_allclose(found[:, [0, 2]], expected[:, [0, 2]], rtol=1e-5, atol=1e-5)
    turn = TEXT[:15].reshape(3, 5)
    turned, logits = kvjax.extend(moved, turn, lengths=[5, 4, 3])
    unchanged(resting, turned, 1)
    assert np.isnan(logits[1]).all()
    _, wanted = kvjax.extend(everyone, turn, lengths=[5, 4, 3])
    np.testing.assert_allclose(logits[np.array([0, 2])], wanted[np.array([0, 2])], rtol=1e-5, atol=1e-5)
    # Once it is active again, it goes on from where it was.
    woken, found = write(turned.replace(active=jnp.ones(3, bool)), 3)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], rtol=1e-5, atol=1e-5)
    assert kept(woken, 1) == kept(everyone, 1)


@every_kind
@pytest.mark.compiled_well
def test_rows_go_on_in_another_state_as_they_would_have(name: str, x64: None) -> None:
    # Another budget, another planned length: other buffers, pages of another size.
    host, _ = write(read(name, [0, 1, 2], budget=40, tokens=60, dtype=jnp.float64)[0], 3)
    guest, _ = write(read(name, [3, 4], budget=20, tokens=300, dtype=jnp.float64)[0], 5)
    if made(name).plan.sizing.mode == "unbounded":
        host, guest = guest, host
    if host.cache.pool is not None and guest.cache.pool is not None:
        assert host.cache.pool.page_size != guest.cache.pool.page_size
    into = [0, 1] if len(host.position) == 2 else [2, 0]
    guests = kvjax.take_rows(guest, [1, 0])
    mixed = kvjax.put_rows(host, into, guests)
    ends = [write(state, 12) for state in (host, guest, mixed)]
    (host, stayed), (guest, expected), (mixed, found) = ends
    for place, row in zip(into, [1, 0], strict=True):
        np.testing.assert_allclose(found[:, place], expected[:, row], rtol=1e-8, atol=1e-9)
        assert kept(mixed, place) == kept(guest, row)
    for row in set(range(len(host.position))) - set(into):
        np.testing.assert_allclose(found[:, row], stayed[:, row], rtol=1e-8, atol=1e-9)
        assert kept(mixed, row) == kept(host, row)


@settings(max_examples=12)
@given(
    name=st.sampled_from(["h2o", "streaming", "lightkv", "less-performer", "own", "own+adakv", "h2o+adakv+int8"]),
    taken=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    places=st.permutations([0, 1, 2]),
    steps=st.integers(1, 3),
)
def test_any_rows_in_any_order_keep_their_text(name: str, taken: list[int], places: list[int], steps: int) -> None:
    source, _ = write(read(name, [0, 1, 2])[0], steps)
    rows = kvjax.take_rows(source, taken)
    for place, row in enumerate(taken):
        unchanged_but_for_buffers(kvjax.take_rows(source, [row]), kvjax.take_rows(rows, [place]))
    into = places[: len(taken)]
    target = kvjax.put_rows(read(name, [3, 4, 1])[0], into, rows)
    _, expected = write(source, 2)
    _, found = write(target, 2)
    for place, row in zip(into, taken, strict=True):
        np.testing.assert_allclose(found[:, place], expected[:, row], rtol=1e-5, atol=1e-5)


def unchanged_but_for_buffers(one: kvjax.State, other: kvjax.State) -> None:
    assert kept(one, 0) == kept(other, 0)
    for name in ("position", "prompt_length", "horizon", "end", "seed"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    for layer, same in zip(one.cache.slots, other.cache.slots, strict=True):
        jax.tree.map(np.testing.assert_array_equal, layer.state, same.state)


def test_a_beam_is_a_row_taken_twice() -> None:
    state, _ = read("h2o+adakv", [0, 1])
    beams = kvjax.take_rows(state, [1, 1, 0])
    _, logits = write(beams, 4)
    np.testing.assert_array_equal(logits[:, 0], logits[:, 1])
    _, expected = write(state, 4)
    np.testing.assert_allclose(logits[:, 1:], expected[:, [1, 0]], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "budget", "new", "larger", "longer"),
    [
        ("h2o", 20, 60, 40, 60),
        ("lightkv", 20, 60, 40, 60),
        ("full", 1.0, 10, 1.0, 60),
        ("h2o", 0.5, 10, 0.5, 60),
    ],
)
def test_rows_of_more_slots_go_into_a_state_that_was_given_them(
    name: str, budget: Any, new: int, larger: Any, longer: int
) -> None:
    case = CASES[name]

    def prefilled(prompts: list[list[int]], budget: Any, new: int) -> kvjax.State:
        return kvjax.prefill(MODEL, case.make(), prompts, budget, plan=case.plan, max_new_tokens=new)[0]

    state, rows = prefilled(PROMPTS[1:3], budget, new), prefilled(PROMPTS[:1], larger, longer)
    with pytest.raises(ValueError, match=r"do not fit .*; read the state with a larger budget, or more max_new_tokens"):
        kvjax.put_rows(state, [1], rows)
    put = kvjax.put_rows(prefilled(PROMPTS[1:3], larger, 2 * longer), [1], rows)
    assert kept(put, 1) == kept(rows, 0)


def test_bad_rows_are_one_sentence() -> None:
    state, _ = read("h2o", [0, 1, 2])
    two = kvjax.take_rows(state, [0, 1])
    half = random_model(GQA, dtype=jnp.bfloat16)
    other = kvjax.prefill(half, made("h2o"), [PROMPTS[0]], 20, max_new_tokens=60)[0]
    deeper = random_model(dataclasses.replace(GQA, layers=3))
    another = kvjax.prefill(deeper, made("h2o"), [PROMPTS[0]], 20, max_new_tokens=60)[0]
    half_a_row: Any = [0.5]
    one = kvjax.take_rows(state, [1])
    recent = one.replace(policy=dataclasses.replace(one.policy, protection=kvjax.Protection(recent=3)))
    kvjax.put_rows(state, [0], one.replace(policy=jax.tree.map(jnp.asarray, one.policy)))
    refused = [
        (lambda: kvjax.take_rows(state, []), "does not name rows of a state with rows 0 to 2"),
        (lambda: kvjax.take_rows(state, [3]), r"index=\[3\] does not name rows"),
        (lambda: kvjax.take_rows(state, [-1]), r"index=\[-1\] does not name rows"),
        (lambda: kvjax.take_rows(state, half_a_row), "does not name rows"),
        (lambda: kvjax.put_rows(state, [1, 1], two), "a row of its own for each of 2 rows"),
        (lambda: kvjax.put_rows(state, [1], two), "a row of its own for each of 2 rows"),
        (lambda: kvjax.put_rows(state, [0], read("tova", [1])[0]), "policy 'tova' do not fit a state under 'h2o'"),
        (lambda: kvjax.put_rows(state, [0], read("h2o+adakv", [1])[0]), "do not fit a state under 'h2o'"),
        (lambda: kvjax.put_rows(state, [0], read("h2o", [1], budget=40)[0]), "48 slots per head in layer 0 do not fit"),
        (lambda: kvjax.put_rows(state, [0], recent), "with other settings"),
        (lambda: kvjax.put_rows(state, [0], other), "bfloat16"),
        (lambda: kvjax.put_rows(state, [0], another), "another model"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)
