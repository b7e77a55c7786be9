"""A policy of somebody's own that is written slightly wrong says so when it is first used."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import kvjax
from kvjax.inference.extend import lower_prefill
from kvjax.inference.state import slot_limits
from kvjax.methods.h2o import Accumulated
from kvjax.methods.lightkv import AfterLimit
from kvjax.methods.lsh_e import Hamming
from kvjax.methods.tova import LastAttention
from kvjax.methods.window import Recency
from kvjax.policies.allocation import Uniform
from kvjax.policies.protection import Quota
from kvjax.policies.rankings import as_numbers
from kvjax.types import number, setting
from kvjax.utils.compilation import temporary_bytes
from tests.small_models import GQA, random_model


def numbers(self: Any, view: Any, new: Any) -> Any:
    return view.position.astype(jnp.float32)


def decorated(*bases: type, **members: Any) -> Any:
    """A class as its author writes it."""
    return struct.dataclass(type("Mine", bases or (kvjax.Score,), members))


@pytest.mark.core
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: decorated(scores=numbers),
            r"kvjax never calls Mine.scores \(did you mean score\)",
        ),
        (lambda: decorated(score=numbers, attention_stat=numbers), "did you mean attention_stats"),
        (
            lambda: decorated(score=numbers, observe=numbers),
            r"never calls Mine.observe \(there are against_alibi, attention_stats, bind,",
        ),
        (lambda: decorated(score=numbers, require=True), "did you mean requires"),
        (lambda: decorated(Accumulated, update_slots=numbers), "did you mean update_slot"),
    ],
)
def test_a_class_that_is_not_what_it_seems_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()()


def test_a_part_is_a_pytree_with_or_without_the_decorator() -> None:
    class Mine(kvjax.Score):
        factor: float = number(2.0)
        power: int = setting(3)

        def score(self, view: Any, new: Any) -> Any:
            return view.position.astype(jnp.float32)

    made = Mine(4.0, power=5)
    assert struct.dataclass(Mine) is Mine and jax.tree.leaves(made) == [4.0] and made.replace(power=3) == Mine(4.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.power = 6  # type: ignore[misc]


def test_helpers_and_settings_have_any_name() -> None:
    members = {"__annotations__": {"score_scale": "int"}, "score_scale": setting(3), "_ask": numbers, "WORD": 32}
    made = decorated(score=numbers, **members)
    assert made(score_scale=4).score_scale == 4
    with pytest.raises(ValueError, match=r"score_scale=0\.5 is not a whole number"):
        made(score_scale=0.5)


@pytest.mark.parametrize(
    ("score", "message"),
    [
        (
            lambda self, view, new: view.position,
            r"Mine\.score gives int32 of shape \[5, 2, 16\], not floating-point numbers",
        ),
        (
            lambda self, view, new: view.position[..., 0].astype(float),
            r"shape \[5, 2\], not .* of shape \[5, 2, 16\] \[b h c\]",
        ),
        (lambda self, view, new: numbers(self, view, new) / 0 * 0, r"Mine\.score gives NaN for tokens of a prompt"),
    ],
)
def test_scores_that_are_no_scores_are_refused(score: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(random_model(GQA), kvjax.Policy(decorated(score=score)()), [[1, 2, 3, 4, 5, 6]], 4)


def test_a_fold_that_changes_what_a_slot_remembers_is_refused() -> None:
    mine = decorated(Accumulated, update_slot=lambda self, stats, view, new: stats[..., None])
    with pytest.raises(ValueError, match=r"Mine\.update_slot gives .*, not what its slot began with"):
        kvjax.prefill(random_model(GQA), kvjax.Policy(mine()), [[1, 2, 3, 4, 5, 6]], 4)


def test_a_score_over_one_that_orders_by_position_is_asked() -> None:
    oldest = decorated(Recency, score=lambda self, view, new: -view.position.astype(jnp.float32))
    model = random_model(GQA)
    for positions in ("original", "cache"):
        policy = kvjax.policy(kvjax.Policy(oldest()), codec=kvjax.Codec(positions))
        state, _ = kvjax.prefill(model, policy, [[1, 2, 3, 4, 5, 6]], 4)
        for token in (7, 8):
            state, _ = kvjax.decode_step(state, [token])
        held = kvjax.held_positions(state)[0][0, 0]
        assert sorted(position for position in held.tolist() if position >= 0)[:3] == [0, 1, 2]


UNTYPED: Any = kvjax  # type checkers refuse all of this, too


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNTYPED.Policy(Accumulated), r"score=Accumulated is a class; give an instance, Accumulated\(\)"),
        (
            lambda: kvjax.prefill(random_model(GQA), UNTYPED.Policy("h2o"), [[1, 2]], 4),
            "score='h2o' is no Score; kvjax.policy takes names",
        ),
        (lambda: UNTYPED.Policy(kvjax.methods.PLANS["adakv"]()), "is no Score"),
        (
            lambda: UNTYPED.policy(Accumulated()),
            r"a policy is a name or a kvjax.Policy, not a score; give kvjax.Policy\(",
        ),
        (lambda: UNTYPED.policy("h2o", plan=kvjax.methods.PLANS["adakv"]), "not the class AdaKV; give an instance"),
        (lambda: UNTYPED.policy("h2o", codec=5), "a codec is a name or an instance of Quantizer, not 5"),
        (lambda: UNTYPED.prefill(random_model(GQA), None, [[1, 2]], 4), "not None"),
    ],
)
def test_a_part_is_an_instance_of_its_kind(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def policies_of_other_classes() -> list[kvjax.Policy]:
    """In pairs that differ in nothing but classes."""
    plans = (AfterLimit(plan=plan) for plan in (Uniform(), decorated(Uniform)()))
    return [
        kvjax.Policy(Recency()),
        kvjax.Policy(LastAttention()),
        *(kvjax.Policy(decorated(score=numbers)()) for _ in range(2)),
        *(kvjax.Policy(Recency(), plan=plan) for plan in plans),
        struct.dataclass(type("Mine", (kvjax.Policy,), {}))(Recency()),
    ]


def test_policies_of_other_classes_share_no_program() -> None:
    """Of trees that differ in classes alone jax tells the hashes apart, but not the trees."""
    made = policies_of_other_classes()
    structures = [jax.tree.structure(policy) for policy in made]
    for i, one in enumerate(structures):
        assert [j for j, other in enumerate(structures) if one == other] == [i]
    changed = dataclasses.replace(made[0], score=made[1].score)
    assert jax.tree.structure(changed) == structures[1]
    for policy, structure in zip(made, structures, strict=True):
        assert jax.tree.structure(jax.tree.map(lambda leaf: object(), policy)) == structure


def test_codes_single_out_the_same_slot_as_scores_where_a_budget_shrinks() -> None:
    kernels = kvjax.policy("lsh_e", bits=8, sinks=1, recent=2)

    def nearness(self: Any, view: Any, new: Any) -> Any:
        return as_numbers(Hamming.score(self, view, new), view)

    mine = decorated(Hamming, score=nearness)(bits=8)
    held = []
    for score in (kernels.score, mine):
        policy = dataclasses.replace(kernels, score=score, plan=AfterLimit(context_limit=12))
        state, _ = kvjax.prefill(random_model(GQA), policy, [[1, 2, 3, 4, 5, 6, 7, 8]], 6, max_new_tokens=16)
        for token in range(9, 22):
            state, _ = kvjax.decode_step(state, [token])
        held.append(kvjax.held_positions(state))
    for one, other in zip(*held, strict=True):
        assert (one == other).all()


@pytest.mark.parametrize(
    ("old", "new"), [("shares", "layer_budgets"), ("room", "slots_at"), ("settle", "head_budgets")]
)
def test_old_names_of_a_plan_go_on_with_a_warning(old: str, new: str) -> None:
    def member(self: Any, *arguments: Any) -> Any:
        return getattr(super(Uniform, self), new)(*arguments) if new != "layer_budgets" else np.array([9.0, 3.0])

    with pytest.warns(DeprecationWarning, match=f"^Mine.{old} is now {new}\\.$"):
        plan = decorated(Uniform, **{old: member})()
    expected = [9, 3] if new == "layer_budgets" else [6, 6]
    state, _ = kvjax.prefill(random_model(GQA), "h2o", [list(range(1, 15))], 6, plan=plan)
    assert [int(limit.max()) for limit in slot_limits(state)] == expected


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("per_head", True, r"Mine.per_head is no longer a member of a plan; .* kvjax.Sizing\(per_head=True\)"),
        ("decides", True, r"Mine.decides .* kvjax.Sizing\(mode='profiled'\)"),
        ("bounded", False, r"Mine.bounded .* kvjax.Sizing\(mode='unbounded'\)"),
        ("ends", True, r"Mine.ends .* kvjax.Sizing\(fixed_length=True\)"),
        ("shrinks", property(lambda self: True), r"Mine.shrinks .* kvjax.Sizing\(may_shrink=True\)"),
        ("buffer_slots", numbers, "Mine.buffer_slots .* slots_at of the shortest prompt"),
        ("budgets", numbers, "Mine.budgets .* override layer_budgets"),
        ("competing", numbers, "Mine.competing .* Protected.quota"),
    ],
)
def test_a_member_that_a_plan_lost_is_refused_with_the_new_form(name: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        decorated(Uniform, **{name: value})


def test_a_quota_bounds_what_heads_keep_for_its_score() -> None:
    def guard(self: Any, view: Any, new: Any) -> Any:
        return kvjax.Protection.guard(self, view, new)._replace(quota=Quota(jnp.full_like(view.limit, 3), False))

    policy = dataclasses.replace(kvjax.policy("h2o"), protection=decorated(kvjax.Protection, guard=guard)(recent=2))
    text = [list(range(1, 15))]
    state, _ = kvjax.prefill(random_model(GQA), policy, text, 9, plan="adakv", max_new_tokens=8)
    for token in range(6):
        for positions in kvjax.held_positions(state):
            assert ((positions >= 0).sum(-1) == 5).all()
        state, _ = kvjax.decode_step(state, [token])
    state, _ = kvjax.prefill(random_model(GQA), policy, text, 9, max_new_tokens=8)
    with pytest.raises(ValueError, match=r"Mine has a quota, which plan uniform does not keep; .* such as adakv"):
        kvjax.decode_step(state, [1])


def test_attention_of_earlier_queries_again_takes_equal_slots_in_all_heads() -> None:
    def requests(self: Any, heads: Any, new: Any) -> kvjax.ReplayedQueries | None:
        if new.given:
            return None
        queries = jnp.moveaxis(new.raw_q, 3, 2)
        return kvjax.ReplayedQueries(queries, new.position, jnp.ones(queries.shape[:3]))

    score = decorated(
        init_slot=lambda self, new, state: jnp.zeros(new.k.shape[:3]),
        attention_stats=requests,
        update_slot=lambda self, stats, view, new: stats,
        score=lambda self, view, new: view.slots.score,
    )
    with pytest.raises(ValueError, match=r"^Mine computes attention of earlier queries again, .*; choose another plan"):
        kvjax.prefill(random_model(GQA), kvjax.Policy(score()), [[1, 2, 3]], 2, max_new_tokens=2, plan="adakv")


@pytest.mark.parametrize("over", ["layer", "device", "model"])
def test_attention_over_several_heads_takes_the_same_slots_in_all_of_them(over: str) -> None:
    def made(over: str) -> kvjax.Policy:
        score = decorated(
            kvjax.AccumulatedScore, attention_stats=lambda self, heads, new: kvjax.AttentionSum(over=over)
        )
        return kvjax.Policy(score())

    def read(policy: kvjax.Policy) -> kvjax.State:
        return kvjax.prefill(random_model(GQA), policy, [[1, 2, 3]], 2, max_new_tokens=2, plan="adakv")[0]

    with pytest.raises(ValueError, match=rf"Mine requests AttentionSum\(over='{over}'\), .* adakv .* use over='group'"):
        read(made(over))
    kvjax.decode_step(read(made("group")), [4])


def test_settle_of_a_score_is_refused_with_the_new_form() -> None:
    with pytest.raises(TypeError, match=r"Mine\.settle is now part of update_slot"):
        decorated(score=numbers, settle=numbers)


class Copied:
    """H2O's members, as another package writes them."""

    def init_slot(self, new, state):
        return jnp.zeros(new.k.shape[:3])

    def attention_stats(self, heads, new):
        return kvjax.AttentionSum()

    def update_slot(self, stats, view, new):
        return view.slots.score + stats

    def score(self, view, new):
        return view.slots.score


HELD = kvjax.Protection(recent=0.5)


@pytest.mark.core
@pytest.mark.parametrize(
    ("name", "file", "score", "budget"),
    [
        ("h2o", "h2o", "Accumulated", 18),
        ("keyformer", "keyformer", "GumbelSoftmax", 18),
        ("streaming", "window", "Recency", 18),
        ("lsh_e", "lsh_e", "Hamming", 18),
        ("keydiff", "keydiff", "KeyDifference", 18),
        ("cur", "cur", "LeverageProduct", 18),
        ("vase", "vase", "ValueSpread", 80),
    ],
)
def test_a_copy_in_another_package_compiles_to_the_same_programs(
    name: str, file: str, score: str, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = inspect.getsource(importlib.import_module(f"kvjax.methods.{file}"))
    foreign = types.ModuleType("somebody_elses")
    monkeypatch.setitem(sys.modules, foreign.__name__, foreign)
    exec(
        re.sub(r"@register_score\([^\n]*\n(?:    .*\n|\)\n)*", "", source.partition("\n@register(")[0]),
        foreign.__dict__,
    )
    deep = random_model(dataclasses.replace(GQA, layers=13))
    ours = kvjax.policy(name)
    copied = dataclasses.replace(ours, score=getattr(foreign, score)())
    assert type(copied.score).__module__ == "somebody_elses"
    steps, programs = [], []
    for policy in (ours, kvjax.policy(copied)):
        state, _ = kvjax.prefill(deep, policy, [[1, 2, 3, 4, 5, 6, 7, 8] * 3], budget, max_new_tokens=4)
        steps.append(str(jax.make_jaxpr(kvjax.decode_step)(state, jnp.asarray([9]))))
        programs.append(len(lower_prefill(deep, policy, [[1, 2, 3, 4, 5, 6, 7, 8] * 3], budget)))
    assert steps[0] == steps[1]
    assert programs[0] == programs[1] == (1 if name == "lsh_e" else 3)  # which reads prompts token by token


def test_a_prompt_takes_as_much_memory_as_that_of_the_same_built_in_policy() -> None:
    deep = random_model(dataclasses.replace(GQA, layers=13, max_positions=512))
    members = {name: value for name, value in vars(Copied).items() if not name.startswith("_")}
    own = kvjax.Policy(decorated(**members)(), HELD)
    text = np.zeros((1, 400), int)
    taken = [temporary_bytes(lower_prefill(deep, policy, text, 32)) for policy in ("h2o", own)]
    assert taken[0] == taken[1]
    states = [kvjax.prefill(deep, policy, text[:, :40], 16, max_new_tokens=4)[0] for policy in ("h2o", own)]
    for _ in range(3):
        states = [kvjax.decode_step(state, [1])[0] for state in states]
    for one, other in zip(*map(kvjax.held_positions, states), strict=True):
        assert (np.sort(one) == np.sort(other)).all()


def test_a_policy_in_a_file_takes_the_settings_of_every_policy(tmp_path: Path) -> None:
    file = tmp_path / "made_in_a_file.py"
    file.write_text("import kvjax\n\nmine = kvjax.policy('h2o')\n")
    made = kvjax.policy(f"{file}:mine", recent=3, positions="cache", evict_every=4)
    assert (made.protection.recent, made.codec.positions, made.evict_every) == (3, "cache", 4)
    assert kvjax.policy(f"{file}:mine", sinks=1).evict_every == 1


@struct.dataclass
class Prepared(Uniform):
    """As many slots for every layer, if it has been prepared for a model with so many layers."""

    layers: int = setting(0)

    def bind(self, model: Any) -> Any:
        return dataclasses.replace(self, layers=model.config.layers)

    def layer_budgets(self, budget: int, layers: int) -> np.ndarray:
        return np.full(layers, float(budget * self.layers / layers))


def test_a_plan_within_a_plan_is_prepared_for_the_model_too() -> None:
    state, _ = kvjax.prefill(random_model(GQA), kvjax.policy("lightkv", plan=Prepared()), [list(range(40))], 16)
    assert all((limits == 16).all() for limits in slot_limits(state))


@pytest.mark.parametrize("layers", [2, 13])
def test_a_score_that_takes_the_layer_for_a_number_says_so_or_is_told_to(layers: int) -> None:
    deep = random_model(dataclasses.replace(GQA, layers=layers))

    def early(self: Any, view: Any, new: Any) -> Any:
        return numbers(self, view, new) * (-1 if new.layer < 1 else 1)

    with pytest.raises(TypeError, match=r"Mine.* takes an array for a number of Python .* override layer\(index\)"):
        state, _ = kvjax.prefill(deep, kvjax.Policy(decorated(score=early)()), [[1, 2, 3, 4, 5, 6]], 4)
        kvjax.decode_step(state, [7])

    def layer(self: Any, index: int) -> Any:
        return dataclasses.replace(self, sign=-1 if index < 1 else 1)

    members = {"__annotations__": {"sign": "int"}, "sign": setting(1), "layer": layer}
    policy = kvjax.Policy(decorated(score=lambda self, view, new: self.sign * numbers(self, view, new), **members)())
    state, _ = kvjax.prefill(deep, policy, [[1, 2, 3, 4, 5, 6]], 4)
    state, _ = kvjax.decode_step(state, [7])
    first, *others = kvjax.held_positions(state)
    assert set(first[0, 0].tolist()) - {-1} == {0, 1, 2, 6}
    assert all(set(other[0, 0].tolist()) - {-1} == {3, 4, 5, 6} for other in others)


def pairs_of_the_only_layer(codec: str | None, positions: str, plan: str | None) -> dict[tuple[int, int], np.ndarray]:
    """Keys and values that a score sees, by head and position; in a first layer no policy changes them."""
    seen: dict[tuple[int, int], np.ndarray] = {}

    def collect(head: Any, position: Any, keys: Any, values: Any) -> None:
        for b, h, c in np.argwhere(position >= 0):
            seen[int(head[b, h]), int(position[b, h, c])] = np.concatenate([keys[b, h, c], values[b, h, c]])

    def watch(self: Any, view: Any, new: Any) -> Any:
        head = jnp.broadcast_to(jnp.arange(GQA.kv_heads), view.limit.shape) if new.head is None else new.head
        jax.debug.callback(collect, head, view.position, view.keys(new), view.values(new))
        assert new.hidden.shape == (*new.token.shape, GQA.width)
        return numbers(self, view, new)

    policy = kvjax.policy(kvjax.Policy(decorated(score=watch)(), HELD, codec=kvjax.Codec(positions)), codec=codec)
    # A block of pages may hold other layers' pages, too, whose ranks count for nothing: there is one layer.
    model = random_model(dataclasses.replace(GQA, layers=1))
    state, _ = kvjax.prefill(model, policy, [[1, 2, 3, 4, 5, 6, 7, 8]], 4, max_new_tokens=4, plan=plan)
    state, _ = kvjax.decode_step(state, [9])
    state, _ = kvjax.extend(state, [[10, 11]])
    kvjax.decode_step(state, [12])  # a token that nothing is compared with: the one that leaves is chosen before
    jax.effects_barrier()
    return seen


@pytest.mark.parametrize("plan", [None, "adakv"])
@pytest.mark.parametrize(
    ("codec", "positions", "tolerance"),
    [(None, "cache", 1e-5), ("int8", "original", 0.01), ("int4", "original", 0.2), ("fp8", "original", 1 / 16)],
)
def test_a_score_sees_keys_and_values_as_numbers(
    codec: str | None, positions: str, tolerance: float, plan: str | None
) -> None:
    wanted, found = pairs_of_the_only_layer(None, "original", plan), pairs_of_the_only_layer(codec, positions, plan)
    assert wanted.keys() == found.keys() and {position for _, position in found} == set(range(11))
    for place, pair in wanted.items():
        np.testing.assert_allclose(found[place], pair, atol=tolerance * np.abs(pair).max())


COUNTING = """
import flax
import jax.numpy as jnp

import kvjax
from kvjax.types import Partial, wide


@flax.struct.dataclass
class Counting(kvjax.Residual):
    def init_head(self, shape):
        return jnp.zeros(shape.k.shape[:2], wide(shape.k.dtype))

    def absorb(self, state, evicted):
        return state + evicted.leaving.sum(2)

    def share(self, state, new):
        lse = jnp.broadcast_to(jnp.log(state)[:, :, None, None], new.q.shape[:4])
        return Partial(jnp.zeros((*new.q.shape[:4], new.v.shape[-1]), lse.dtype), lse)
"""
"""Each evicted pair takes a little attention and gives nothing."""


@pytest.mark.parametrize("plan", [None, "adakv"])
def test_a_residual_in_a_file_goes_with_any_policy(tmp_path: Path, plan: str | None) -> None:
    file = tmp_path / "counting.py"
    file.write_text(COUNTING, encoding="utf-8")
    policy = kvjax.policy("h2o", residual=f"{file}:Counting", recent=2)
    model, text = random_model(GQA), [list(range(3, 33))]
    state, _ = kvjax.prefill(model, policy, text, 8, plan=plan, max_new_tokens=4)
    plain, _ = kvjax.prefill(model, kvjax.policy("h2o", recent=2), text, 8, plan=plan, max_new_tokens=4)
    (state, logits), (_, expected) = (kvjax.decode_step(each, [7]) for each in (state, plain))
    assert np.abs(np.asarray(logits) - np.asarray(expected)).max() > 1e-3
    for layer in range(GQA.layers):
        held = np.asarray(kvjax.held_positions(state)[layer]) >= 0
        counted = state.cache.slots[layer].state.residual
        np.testing.assert_array_equal(counted + held.sum(-1), np.full((1, GQA.kv_heads), 31))
