"""Checks of a policy on a small random model: what it computes must not depend on how a text is read."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax.cache.evict import foreseen
from kvjax.inference.decode import decode_step
from kvjax.inference.extend import extend, prefill
from kvjax.inference.press import ranking_inputs
from kvjax.inference.state import State, held_positions, slot_limits
from kvjax.methods.registry import name_of
from kvjax.methods.registry import policy as policy_by_name
from kvjax.model import Model
from kvjax.models.config import ModelConfig
from kvjax.models.sharding import mesh_of, weight_shardings
from kvjax.models.weights import random_weights
from kvjax.policies.policy import Policy
from kvjax.policies.rankings import as_numbers
from kvjax.policies.score import Score
from kvjax.rope import Rope

LENGTHS = (41, 25, 33)
"""Tokens of the three prompts, which are padded to the longest."""
BUDGET = 20
"""Slots of each head in checks in which tokens are evicted."""
STEPS = 24
"""Tokens that are read after a prompt."""
TOLERANCE = 2e-4
"""Largest difference of logits and scores in float32, absolute and relative."""
CONFIG = ModelConfig(
    vocab_size=64,
    width=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_width=8,
    mlp_width=48,
    max_positions=4096,
    rope=Rope(width=8),
)
TEXT = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (len(LENGTHS), max(LENGTHS) + STEPS))

ROOM = [max(LENGTHS) + STEPS] * CONFIG.layers
"""Budget with a slot for each token of the texts."""

Steps = tuple[Float[np.ndarray, "steps b vocab"], list[list[np.ndarray]]]
"""Logits of each step, and after each the positions [b h c] that each layer holds."""


@functools.cache
def _small_model(dtype: str = "float32") -> Model:
    """Return a model of two layers with random weights."""
    return Model(random_weights(CONFIG, jax.random.key(0), dtype), CONFIG, name="random")


class Texts:
    """How checks read texts, and what counts as equal; a subclass may read with other settings."""

    def read(
        self, policy: Policy, budget: Any = None, *, model: Model | None = None, rows: Any = None, **settings: Any
    ) -> tuple[State, Float[Array, "b vocab"]]:
        """Read the prompts; None as a budget is `BUDGET`, where the policy has one."""
        index = np.arange(len(LENGTHS)) if rows is None else np.asarray(rows)
        if policy.plan.sizing.mode != "budget":
            budget = 1.0
        arguments: dict[str, Any] = {"lengths": np.array(LENGTHS)[index], "max_new_tokens": STEPS + 1} | settings
        tokens = TEXT[index, : max(LENGTHS)]
        return prefill(model or _small_model(), policy, tokens, BUDGET if budget is None else budget, **arguments)

    def follow(self, state: State, rows: Any = None, steps: int = STEPS) -> Steps:
        """Read the same tokens after each prompt by decode steps."""
        index = np.arange(len(LENGTHS)) if rows is None else np.asarray(rows)
        logits, positions = list[np.ndarray](), list[list[np.ndarray]]()
        for step in range(steps):
            state, scores = decode_step(state, jnp.asarray(TEXT[index, max(LENGTHS) + step], jnp.int32))
            logits.append(np.asarray(scores, np.float32))
            positions.append(held_positions(state))
        return np.stack(logits), positions

    def close(self, actual: Any, expected: Any, what: str) -> None:
        """Raise an AssertionError unless arrays are equal up to `TOLERANCE`; `what` says when they were computed."""
        np.testing.assert_allclose(
            np.asarray(actual), np.asarray(expected), rtol=TOLERANCE, atol=TOLERANCE, err_msg=what, verbose=False
        )


def check_policy(policy: Policy | Score | str, *checks: str) -> None:
    """Run checks of a policy of your own, as tests of the methods of kvjax do.

    Each check reads texts of 25 to 41 tokens with a small random model in two ways that must agree, most of them with
    20 slots for each head, more than the policy may protect. Use it in a test of your package. It takes about a minute,
    most of it for compilation.

    Args:
        policy: a policy, the name of one, or a score, which then protects its newest tokens.
        checks: names of `CHECKS`; all of them if there are none.

    Raises:
        AssertionError: a check fails; the message names it and the rule that the policy breaks.
        ValueError: there is no check of that name.

    Example:
        >>> class Oldest(kvjax.Score):
        ...     def score(self, view, new):
        ...         return -view.position.astype("float32")
        >>> kvjax.testing.check_policy(Oldest(), "limits", "order of rows")
    """
    for name in checks:
        if name not in CHECKS:
            raise ValueError(f"{name!r} is no check; there are {', '.join(CHECKS)}.")
    if isinstance(policy, Score):
        policy = Policy(policy, policy_by_name("h2o").protection)
    chosen = policy_by_name(policy) if isinstance(policy, str) else policy
    for name in checks or CHECKS:
        check = CHECKS[name]
        try:
            check(chosen)
        except AssertionError as error:
            rule = (check.__doc__ or "").removeprefix("Check that ").rstrip(".")
            raise AssertionError(f"{name_of(chosen)} fails the check {name!r}, that {rule}. {error}") from error


TEXTS = Texts()
"""Those of `check_policy`."""


def _ranks_prompts_only(state: State) -> bool:
    """Return whether generated tokens leave scores as they are: then the end of a text may rank its tokens."""
    policies, slots, tokens = ranking_inputs(state.decoder, state.cache)
    return any(
        policy.score.attention_stats(view, new.replace(given=False)) is None
        for policy, view, new in zip(policies, slots.values(), tokens, strict=True)
    )


def _scores_by_position(state: State) -> list[Float[np.ndarray, "b h n"]]:
    """Return each layer's scores, in the order of positions; none if they depend on the token that needs a slot."""
    policies, slots, tokens = ranking_inputs(state.decoder, state.cache)
    if not foreseen(policies, list(slots.values()), tokens):
        return []
    scores = list[np.ndarray]()
    for policy, view, new in zip(policies, slots.values(), tokens, strict=True):
        position, score = np.asarray(view.position), np.asarray(as_numbers(policy.ranking(view, new), view))
        order = np.argsort(np.where(position < 0, np.iinfo(np.int32).max, position), axis=-1, kind="stable")
        live = np.take_along_axis(position, order, -1) >= 0
        scores.append(np.where(live, np.take_along_axis(score, order, -1), 0)[..., : max(LENGTHS)])
    return scores


def _check_room(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that logits equal those of the full cache if there is a slot for each token."""
    if policy.selection is not None or policy.plan.sizing.mode != "budget":
        return
    state, logits = texts.read(policy, ROOM, plan="uniform")
    full, expected = texts.read(policy_by_name("full"))
    texts.close(logits, expected, "after the prompts")
    texts.close(texts.follow(state)[0], texts.follow(full)[0], "after later tokens")


def _check_blocks(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that slots have the same scores whether a prompt is read at once or token by token."""
    requires, sizing = policy.score.requires, policy.plan.sizing
    if requires.whole_prompt or requires.replay is not None or sizing.per_head or sizing.mode != "budget":
        return
    state, stepped = (texts.read(policy, ROOM, plan="uniform", prefill_chunk=chunk)[0] for chunk in (None, 1))
    if _ranks_prompts_only(state):
        return
    rule = "`update_slot` of a block must return what it returns for one token after another"
    for layer, pair in enumerate(zip(_scores_by_position(state), _scores_by_position(stepped), strict=True)):
        texts.close(*pair, f"layer {layer}: {rule}")


def _check_turns(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that logits are the same for a prompt and for two turns if there is a slot for each token."""
    if policy.selection is not None or policy.plan.sizing.mode != "budget" or policy.score.requires.min_prompt > 12:
        return
    tokens = TEXT[:, : min(LENGTHS)]
    settings: dict[str, Any] = dict(plan=None if policy.plan.sizing.per_head else "uniform", max_new_tokens=STEPS + 1)
    _, expected = prefill(_small_model(), policy, tokens, ROOM, **settings)
    state, _ = prefill(_small_model(), policy, tokens[:, :12], ROOM, **settings)
    texts.close(extend(state, tokens[:, 12:])[1], expected, "after the second turn")


def _check_rows(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that rows in another order give the same results in that order."""
    order = np.array([2, 0, 1])
    (state, logits), (reordered, permuted) = texts.read(policy), texts.read(policy, rows=order)
    texts.close(permuted, logits[order], "after the prompts")
    texts.close(texts.follow(reordered, order)[0], texts.follow(state)[0][:, order], "after later tokens")


def _check_padding(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that a row gives the same results alone and beside longer ones, which it is padded to."""
    (state, logits), (single, expected) = texts.read(policy), texts.read(policy, rows=[1])
    texts.close(logits[1:2], expected, "after the prompt")
    texts.close(texts.follow(state)[0][:, 1:2], texts.follow(single, [1])[0], "after later tokens")


def _check_limits(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that no head holds more tokens than its limit, or a token twice."""
    state, _ = texts.read(policy)
    limits = slot_limits(state)
    if policy.may_shrink:
        limits = [np.full_like(limit, policy.buffer_slots(int(limit.max()), min(LENGTHS))) for limit in limits]
    for positions in [held_positions(state), *texts.follow(state)[1]]:
        for layer, (position, limit) in enumerate(zip(positions, limits, strict=True)):
            assert ((position >= 0).sum(-1) <= limit).all(), f"layer {layer} holds more than {limit.tolist()} tokens"
            for head in position.reshape(-1, position.shape[-1]):
                tokens = head[head >= 0]
                assert len(np.unique(tokens)) == len(tokens), f"layer {layer} holds a token twice: {sorted(tokens)}"


def _check_compiled(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that `jit`, `scan` and `vmap` over steps give the results of plain steps."""
    state, _ = texts.read(policy)
    tokens = jnp.asarray(TEXT[:, max(LENGTHS) : max(LENGTHS) + 3].T, jnp.int32)
    branches = jax.jit(jax.vmap(lambda tokens: jax.lax.scan(decode_step, state, tokens)[1]))(tokens[None])
    texts.close(branches[0], texts.follow(state, steps=3)[0], "after three tokens")


def _check_int8(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that logits are finite over 8-bit slots."""
    _check_finite(texts, *texts.read(policy_by_name(policy, codec="int8")))


def _check_bfloat16(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that logits are finite with a model in bfloat16."""
    _check_finite(texts, *texts.read(policy, model=_small_model("bfloat16")))


def _check_finite(texts: Texts, state: State, logits: Float[Array, "b vocab"]) -> None:
    assert np.isfinite(logits).all() and np.isfinite(texts.follow(state)[0]).all(), "logits are not finite"


def _check_mesh(policy: Policy, texts: Texts = TEXTS) -> None:
    """Check that two devices, which shard the heads, give the results of one; skip this if there is only one."""
    if len(jax.devices()) < 2:
        return
    mesh = mesh_of(jax.devices(), (1, 2))
    weights = jax.device_put(_small_model().weights, weight_shardings(CONFIG, mesh))
    state, logits = texts.read(policy)
    sharded, expected = texts.read(policy, model=Model(weights, CONFIG, mesh=mesh))
    texts.close(logits, expected, "after the prompts")
    texts.close(texts.follow(state)[0], texts.follow(sharded)[0], "after later tokens")


CHECKS: Mapping[str, Callable[..., None]] = {
    "room": _check_room,
    "blocks": _check_blocks,
    "turns": _check_turns,
    "order of rows": _check_rows,
    "padding": _check_padding,
    "limits": _check_limits,
    "jit, scan and vmap": _check_compiled,
    "int8": _check_int8,
    "bfloat16": _check_bfloat16,
    "mesh": _check_mesh,
}
"""Checks by name; each takes a policy and raises an AssertionError that says where it breaks the docstring's rule."""
