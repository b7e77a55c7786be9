"""Parts of a user's own that return something else than their interface declares say so when they are bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.inference.contract import check_members
from kvjax.inference.prepare import bind
from kvjax.policies.allocation import Uniform
from kvjax.policies.protection import Protected, Quota
from kvjax.policies.residual import Rewritten, Selection, SlotResidual
from kvjax.types import HEADS, ROWS, SLOTS, Partial, number, setting
from pallas_kernels.attention import LowRank
from tests.cases import PAIRS, POLICIES
from tests.small_models import GQA, random_model

MESH: Any = jax.sharding.AbstractMesh((1, 2, 1), (ROWS, HEADS, SLOTS), axis_types=(jax.sharding.AxisType.Auto,) * 3)
"""Two devices that share the KV heads, to trace programs for."""


UNTYPED: Any = kvjax  # type checkers refuse some of this, too


def ranks(self: Any, view: Any, new: Any) -> Any:
    return view.position.astype(jnp.float32)


def of_score(**members: Any) -> kvjax.Policy:
    base = kvjax.AccumulatedScore if "attention_stats" in members else kvjax.Score
    return UNTYPED.Policy(type("Mine", (base,), {"score": ranks, **members})())


def of_protection(**members: Any) -> kvjax.Policy:
    return kvjax.Policy(Ranks(), type("Mine", (kvjax.Protection,), members)())


def guarded(**values: Any) -> kvjax.Policy:
    def guard(self: Any, view: Any, new: Any) -> Protected:
        return kvjax.Protection.guard(self, view, new)._replace(**values)

    return of_protection(guard=guard)


def of_plan(sizing: Any = None, **members: Any) -> kvjax.Policy:
    members |= {} if sizing is None else {"sizing": property(lambda self: sizing)}
    return kvjax.Policy(Ranks(), plan=type("Mine", (Uniform,), members)())


class Counting(kvjax.Residual):
    """Count of evicted pairs, to which nothing attends."""

    def init_head(self, shape: Any) -> Any:
        return jnp.zeros(shape.k.shape[:2], jnp.float32)

    def absorb(self, state: Any, evicted: Any) -> Any:
        return state + evicted.leaving.sum(2)

    def share(self, state: Any, new: Any) -> Any:
        return None


def of_residual(base: type = Counting, **members: Any) -> kvjax.Policy:
    return UNTYPED.Policy(Ranks(), residual=type("Mine", (base,), members)())


class Halves(kvjax.Quantizer):
    """Keys and values in 16 bits."""

    def encode(self, x: Any) -> Any:
        return x.astype(jnp.float16)

    def decode(self, stored: Any, kind: Any) -> Any:  # type: ignore[override]
        return stored.astype(kind)


def of_quantizer(**members: Any) -> kvjax.Policy:
    return kvjax.policy(kvjax.Policy(Ranks()), codec=type("Mine", (Halves,), members)())


class Ranks(kvjax.Score):
    """The newest tokens stay."""

    score = ranks


class Shared(kvjax.Score):
    """A score of every KV head's weight."""

    weights: Any = None

    def score(self, view: Any, new: Any) -> Any:
        return ranks(self, view, new) * self.weights[None, :, None]


class Declared(Shared):
    """The same, with its weights where each device's heads are."""

    of_heads = ("weights",)


MEMBERS: dict[str, tuple[Callable[[], kvjax.Policy], str]] = {
    "slot, axes": (
        lambda: of_score(init_slot=lambda self, new, state: jnp.zeros(new.k.shape[:2])),
        r"Mine\.init_slot gives float32 of shape \[5, 2\], not arrays .* begin with \[5, 2, 16\] \[b h t \.\.\.\]",
    ),
    "slot, text": (lambda: of_score(init_slot=lambda self, new, state: "x"), r"Mine\.init_slot gives 'x', not arrays"),
    "slot of a token": (
        lambda: of_score(init_slot=lambda self, new, state: jnp.zeros(new.k.shape[:3], float if new.given else int)),
        r"Mine\.init_slot gives int\d+ of shape \[5, 2, 1\], not as for 16 tokens: float\d+ of shape \[5, 2, 16\]",
    ),
    "init": (
        lambda: of_score(init_head=lambda self, shape: jnp.zeros(4)),
        r"Mine\.init_head gives .*begin with \[5\] \[b ",
    ),
    "init on pages": (
        lambda: kvjax.policy(of_score(init_head=lambda self, shape: jnp.zeros(shape.k.shape[0])), plan="adakv"),
        r"Mine\.init_head gives .*begin with \[5, 2\] \[b h \.\.\.\]",
    ),
    "fold, dtype": (
        lambda: of_score(
            attention_stats=lambda self, heads, new: kvjax.AttentionSum(),
            init_slot=lambda self, new, state: jnp.zeros(new.k.shape[:3], jnp.bfloat16),
        ),
        r"Mine\.update_slot gives float32 of shape \[5, 2, 16\], not what its slot began with: bfloat16",
    ),
    "advance": (
        lambda: of_score(
            init_head=lambda self, shape: jnp.zeros(shape.k.shape[:2]),
            init_slot=lambda self, new, state: jnp.zeros(new.k.shape[:3]),
            attention_stats=lambda self, heads, new: kvjax.AttentionSum(),
            update_head=lambda self, heads, new: heads.state.score[0],
        ),
        r"Mine\.update_head gives .* of shape \[2\], not what its state began with: .* of shape \[5, 2\]",
    ),
    "weights": (
        lambda: of_score(attention_stats=lambda self, heads, new: UNTYPED.AttentionSum("abc")),
        r"Mine\.attention_stats requests AttentionSum with weights='abc', not of shape .* or \[5, 2, 16\] \[b h t\]",
    ),
    "tau": (
        lambda: of_score(attention_stats=lambda self, heads, new: kvjax.AttentionSum(tau="hot")),
        r"Mine\.attention_stats requests AttentionSum with tau='hot', not of shape \[\] or \[5, 16\]",
    ),
    "width": (
        lambda: of_score(
            attention_stats=lambda self, heads, new: kvjax.LocalAttention(jnp.zeros(3)) if new.given else None
        ),
        r"Mine\.attention_stats requests LocalAttention with width=.* of shape \[3\], not of shape \[5, 16\]",
    ),
    "queries": (
        lambda: of_score(
            attention_stats=lambda self, heads, new: kvjax.ReplayedQueries(new.raw_q, new.position, jnp.ones((5, 2, 1)))
        ),
        r"Mine\.attention_stats requests ReplayedQueries with raw_q=.*, not of shape \[5, 2, 2, 2, \d+\] \[b h a g d\]",
    ),
    "score": (
        lambda: of_score(score=lambda self, view, new: view.position),
        r"Mine\.score gives int32 of shape \[5, 2, 16\], not floating-point numbers of shape \[5, 2, 16\] \[b h c\]",
    ),
    "between": (
        lambda: of_score(
            score=lambda self, view, new: kvjax.SplitRanking(ranks(self, view, new), ranks(self, view, new)[..., 0])
        ),
        r"Mine\.score gives float32 of shape \[5, 2\]",
    ),
    "score on pages": (
        lambda: kvjax.policy(kvjax.Policy(Shared(jnp.ones(2))), plan="adakv"),
        r"plan AdaKV stores slots in pages, each a row with one head, whose number is in new\.head: Shared\.sc",
    ),
    "layer": (lambda: of_score(layer=lambda self, index: None), r"Mine\.layer gives None; return a copy of the part"),
    "bind": (lambda: of_score(bind=lambda self, model: None), r"Mine\.bind gives None; return a copy of the part"),
    "requires": (
        lambda: of_score(requires=True),
        r"Mine\.requires is True; make it a property that returns a kvjax\.R",
    ),
    "of_heads": (
        lambda: kvjax.Policy(Declared(jnp.ones(3))),
        r"Declared\.weights has shape \[3\] in layer 0, not an entry for each of 2 KV heads",
    ),
    "guard": (
        lambda: of_protection(guard=lambda self, view, new: 3),
        r"Mine\.guard gives 3, not a kvjax\.policies\.",
    ),
    "mask": (
        lambda: guarded(keep=jnp.zeros((1, 1, 1))),
        r"Mine\.guard.*\.keep gives .*, not booleans of shape",
    ),
    "sinks": (lambda: guarded(sinks=jnp.ones(())), r"Mine\.guard\(\.\.\.\)\.sinks gives .*, not integers of shape"),
    "quota": (lambda: guarded(quota=3), r"quota gives 3, not a kvjax\.policies\.Quota, or None"),
    "limit of a quota": (
        lambda: guarded(quota=Quota(jnp.ones(2, int), True)),
        r"quota\.limit gives .*, not integers of shape \[5, 2\]",
    ),
    "mask of a slot": (
        lambda: of_protection(init_slot=lambda self, new, state: jnp.zeros(2)),
        r"Mine\.init_slot gives",
    ),
    "slots_at": (
        lambda: of_plan(slots_at=lambda self, limit, length: length),
        r"slots_at gives .* \[5, 2\] \[b h\]",
    ),
    "sizing": (lambda: of_plan(sizing=True), r"Mine\.sizing is True; make it a property that returns a kvjax\.S"),
    "head_budgets": (
        lambda: of_plan(kvjax.Sizing(per_head=True), head_budgets=lambda self, stats, view, ranks, new: view.limit),
        r"Mine\.head_budgets gives .*, not a pair of slots \[b h\] and the plan's state",
    ),
    "limits": (
        lambda: of_plan(
            kvjax.Sizing(per_head=True), head_budgets=lambda self, stats, view, ranks, new: (view.limit / 2, None)
        ),
        r"Mine\.head_budgets gives float32 of shape \[5, 2\], not integers",
    ),
    "absorb": (
        lambda: of_residual(absorb=lambda self, state, evicted: state.sum()),
        r"Mine\.absorb gives float32 of shape \[\], not what its state began with: float32 of shape \[5, 2\]",
    ),
    "share": (
        lambda: of_residual(share=lambda self, state, new: new.v),
        r"Mine\.share gives .*, not a kvjax\.types",
    ),
    "partial": (
        lambda: of_residual(share=lambda self, state, new: Partial(new.q, new.q)),
        r"Mine\.share\(\.\.\.\)\.lse gives .*, not floating-point numbers of shape \[5, 2, 2, 16\] \[b h g t\]",
    ),
    "low rank": (
        lambda: of_residual(share=lambda self, state, new: LowRank(new.q, state, state)),
        r"Mine\.share\(\.\.\.\)\.features gives .* \[b h g t R\]",
    ),
    "rewrite": (
        lambda: of_residual(SlotResidual, rewrite=lambda self, before, *rest: Rewritten(before.kv.v, before.position)),
        r"Mine\.rewrite\(\.\.\.\)\.values gives .* \[5, 2, 16, \d+\], not .* \[5, 2, 8, \d+\] \[b h c e\]",
    ),
    "encode": (lambda: of_quantizer(encode=lambda self, x: x.sum()), r"Mine\.encode gives float32 of shape \[\], not"),
    "decode": (
        lambda: of_quantizer(decode=lambda self, stored, dtype: stored),
        r"Mine\.decode gives float16 of shape (.*), not float32 of shape \1 \[b h c d\]",
    ),
    "init_scales": (
        lambda: of_quantizer(init_scales=lambda self, keys, valid: 1.0),
        r"Mine\.init_scales gives 1\.0, not floating-point numbers of shape \[5, 2, \d+\] \[b h d\]",
    ),
    "pick": (
        lambda: kvjax.Policy(Ranks(), selection=type("Mine", (Selection,), {"pick": lambda self, probs, new: probs})()),
        r"Mine\.pick gives float32 .*, not booleans of shape \[5, 2, 2, 16, 16\] \[b h g t c\]",
    ),
}
"""Policies with a member that breaks its contract, and the sentence."""


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_that_breaks_its_contract_is_named(member: str) -> None:
    make, message = MEMBERS[member]
    with pytest.raises((TypeError, ValueError), match=message) as refused:
        bind(random_model(GQA), make(), 8, None)
    assert "\n" not in str(refused.value) and str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        (
            [1.0, 2.0, 3.0],
            r"Mine\.layer_budgets gives \[1\.0, 2\.0, 3\.0\], not slots for each of 2 layers that sum",
        ),
        (8.0, r"gives 8\.0, not slots for each of 2 layers"),
        ([16.0, 16.0], "that sum to 16"),
        ([np.nan, 8.0], "that sum to 16"),
        (["a", "b"], "not slots for each"),
    ],
)
def test_slots_of_layers_sum_to_the_budget(shares: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kvjax.prefill(random_model(GQA), of_plan(layer_budgets=lambda self, budget, layers: shares), [[1, 2, 3]], 8)


def test_slots_of_layers_may_be_a_list() -> None:
    policy = of_plan(layer_budgets=lambda self, budget, layers: [budget + 2.0, budget - 2.0])
    state, _ = kvjax.prefill(random_model(GQA), policy, [[1, 2, 3] * 6], 8)
    assert [int(heads.limit.max()) for heads in state.cache.slots] == [10, 6]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNTYPED.Replay(chunk="x"), "chunk='x' is not a whole number"),
        (lambda: UNTYPED.Requirements(whole_heads="x"), "whole_heads='x' is not true or false"),
        (lambda: UNTYPED.Requirements(prompt_chunk=1.5), r"prompt_chunk=1\.5 is not a whole number or None"),
        (lambda: UNTYPED.Sizing(mode="x"), "mode='x' is not one of budget, unbounded, profiled"),
        (lambda: UNTYPED.Sizing(spare_slots="x"), "spare_slots='x' is not a whole number"),
    ],
)
def test_what_a_part_declares_is_of_its_type(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", [number, setting])
def test_a_traced_setting_that_counts_in_python_is_named(kind: Callable[..., Any]) -> None:
    def repeated(self: Any, view: Any, new: Any) -> Any:
        return sum(ranks(self, view, new) for _ in range(self.times))

    policy = of_score(__annotations__={"times": "int"}, times=kind(2), score=repeated)
    if kind is setting:
        bind(random_model(GQA), policy, 8, None)
        return
    message = r"Mine\.score takes an array for a number of Python .*; declare a setting \(times\) with kvjax"
    with pytest.raises(TypeError, match=message):
        bind(random_model(GQA), policy, 8, None)


def test_arrays_of_heads_on_a_mesh_belong_in_of_heads() -> None:
    spread = random_model(GQA)
    spread.mesh = MESH
    weights = jnp.arange(2.0)
    with pytest.raises(ValueError, match=r"2 devices, which share the KV heads .*; name Shared\.weights in of_heads"):
        bind(spread, kvjax.Policy(Shared(weights)), 8, None)
    bind(spread, kvjax.Policy(Declared(weights)), 8, None)
    bind(random_model(GQA), kvjax.Policy(Shared(weights)), 8, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: UNTYPED.Policy(Ranks(), codec="int8"), r"codec='int8' is no Codec; kvjax\.policy takes names"),
        (lambda: UNTYPED.Policy(Ranks(), plan="adakv"), r"plan='adakv' is no Plan; kvjax\.policy takes names"),
        (
            lambda: UNTYPED.Policy(Ranks(), codec=Halves()),
            r"codec=Halves\(\) is no Codec; give kvjax\.Codec\(quantizer=Halves\(\)\)",
        ),
    ],
)
def test_a_part_is_not_its_name(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, (None, MESH)[place % 2]) for place, name in enumerate(POLICIES)),
        *(pytest.param(name, mesh, marks=pytest.mark.slow) for name in POLICIES | PAIRS for mesh in (None, MESH)),
    ],
)
def test_parts_of_kvjax_keep_the_contract(name: str, mesh: Any) -> None:
    case, model = (POLICIES | PAIRS)[name], random_model(GQA)
    model.mesh = mesh
    policy = case.make() if case.plan is None else case.make(plan=case.plan)
    check_members(bind(model, policy, 1.0 if policy.plan.sizing.mode != "budget" else case.budget, None)[0], model)
