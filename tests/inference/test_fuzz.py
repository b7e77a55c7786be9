"""What kvjax promises of every configuration, of configurations that hypothesis draws: `nox -s fuzz` draws many."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import event, given, settings

import kvjax
from kvjax.inference.state import slot_limits
from kvjax.model import Model
from kvjax.models.sharding import mesh_of, weight_shardings
from kvjax.policies.protection import Protection
from tests.drawn import CASES, CHECKS, Drawn, drawn, model_of

Promise = Callable[[Drawn], None]
PROMISES: dict[str, Promise] = {}


def promise(check: Promise) -> Promise:
    """Register what has to hold of every configuration that is not refused."""
    PROMISES[check.__name__] = check
    return check


def close(found: Any, wanted: Any, of: Drawn) -> None:
    """Logits agree, as far as codes of keys that differ in their last digit let them."""
    rough = of.policy().codec.quantized
    scale = max(float(np.nanmax(np.abs(wanted), initial=0.0)), 1.0)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=(5e-2 if rough else 1e-6) * scale)


def held(state: kvjax.State, row: int) -> list[list[list[int]]]:
    """Positions that a row holds, sorted: [layer][KV head]."""
    return [
        [sorted(p for p in head if p >= 0) for head in layer[row].tolist()] for layer in kvjax.held_positions(state)
    ]


def same_tokens(found: kvjax.State, wanted: kvjax.State, rows: list[int], of: Drawn) -> None:
    """Rows of a state hold what those of another one do, row after row."""
    if not of.policy().codec.quantized:
        for row, other in zip(range(len(rows)), rows, strict=True):
            assert held(found, row) == held(wanted, other)


@promise
def a_row_is_what_it_is_alone(of: Drawn) -> None:
    state, logits = of.read()
    last, after = of.go_on(state)
    for row in range(len(of.lengths)):
        alone, first = of.read([row])
        close(first[0], logits[row], of)
        alone, following = of.go_on(alone, [row])
        mine = after if len(following) == len(after) else after[1:]  # without a turn of its own
        close([each[0] for each in following], [each[row] for each in mine], of)
        same_tokens(alone, last, [row], of)


@promise
def a_turn_is_its_tokens_where_there_is_room(of: Drawn) -> None:
    policy = of.policy()
    if policy.plan.sizing.mode == "profiled" or not any(of.turn):
        return
    state, _ = of.read(budget=1.0)
    turned, _ = kvjax.extend(state, of.turns)
    for row in range(len(of.lengths)):
        stepped = kvjax.take_rows(state, [row])
        for token in of.turns[row]:
            stepped, _ = kvjax.decode_step(stepped, [token])
        _, wanted = kvjax.decode_step(stepped, [5])
        _, found = kvjax.decode_step(kvjax.take_rows(turned, [row]), [5])
        close(found, wanted, of)


@promise
def a_whole_budget_is_the_full_cache(of: Drawn) -> None:
    case, policy = CASES[of.case], of.policy()
    if not case.equals_full or policy.codec.quantized or policy.selection is not None:
        return
    if policy.plan.sizing.mode == "profiled":
        policy = case.make(**{**case.full, **of.settings})
    elif of.budget != 1.0 and policy.plan.sizing.mode != "unbounded":
        policy = case.make(**{"plan": "uniform", **of.settings})
    state, logits = of.read(policy=policy, budget=1.0)
    full, wanted = of.read(policy=kvjax.policy("full"), prefill_chunk=None)
    close(logits, wanted, of)
    for found, expected in zip(of.go_on(state)[1], of.go_on(full)[1], strict=True):
        close(found, expected, of)


@functools.partial(jax.jit, static_argnames="steps")
def scanned(state: kvjax.State, tokens: Any, steps: int) -> tuple[kvjax.State, Any]:
    """Steps in one program."""
    return jax.lax.scan(kvjax.decode_step, state, tokens, length=steps)


@promise
def a_program_of_steps_is_its_steps(of: Drawn) -> None:
    state, _ = of.read()
    tokens = jnp.asarray(of.written)
    in_place, kept, wanted = jax.tree.map(jnp.copy, state), state, []
    for token in tokens:
        kept, logits = kvjax.decode_step(kept, token)
        in_place, same = kvjax.decode_step_in_place(in_place, token)
        wanted.append(np.asarray(logits))
        close(same, logits, of)
    _, logits = jax.jit(kvjax.decode_step)(state, tokens[0])
    close(logits, wanted[0], of)
    last, logits = scanned(state, tokens, len(tokens))
    close(logits, wanted, of)
    rows = list(range(len(of.lengths)))
    same_tokens(last, kept, rows, of)
    same_tokens(in_place, kept, rows, of)


@promise
def rows_come_and_go(of: Drawn) -> None:
    state, _ = of.read()
    rows = [*reversed(range(len(of.lengths))), 0]
    _, wanted = kvjax.decode_step(state, of.written[0])
    taken = kvjax.take_rows(state, rows)
    after, found = kvjax.decode_step(taken, of.written[0][rows])
    close(found, wanted[np.array(rows)], of)
    same_tokens(after, kvjax.decode_step(state, of.written[0])[0], rows, of)
    back = kvjax.put_rows(taken, [0], kvjax.take_rows(state, [0]))
    _, found = kvjax.decode_step(back, of.written[0][[0, *rows[1:]]])
    close(found[0], wanted[0], of)


@promise
def protected_tokens_stay(of: Drawn) -> None:
    state, _ = of.read()
    last, _ = of.go_on(state)
    protection = last.policy.protection
    if type(protection) is not Protection or last.policy.plan.sizing.mode == "unbounded":
        return
    parts = zip(of.prompts, of.turns, of.written.T.tolist(), strict=True)
    whole = [[*prompt, *turn, *written] for prompt, turn, written in parts]
    for layer, limits in enumerate(slot_limits(last)):
        if last.config.layer(layer).window is not None:
            continue
        recents = np.asarray(Protection.recent_slots(protection, jnp.asarray(limits)))
        for row, text in enumerate(whole):
            for head, limit in enumerate(limits[row].tolist()):
                newest = range(max(0, len(text) - int(np.broadcast_to(recents, limits.shape)[row, head])), len(text))
                wanted = {*range(min(protection.sinks, len(text))), *newest}
                wanted |= {position for position, token in enumerate(text) if token in protection.special}
                if len(wanted) <= limit:
                    missing = wanted - {*held(last, row)[layer][head]}
                    assert not missing, f"layer {layer}, row {row}, head {head} lost {sorted(missing)}"


@promise
def bytes_are_true(of: Drawn) -> None:
    state, _ = of.read()
    assert kvjax.cache_bytes(state) == sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache.memory))
    stepped, _ = kvjax.decode_step(state, of.written[0])
    assert kvjax.cache_bytes(stepped) == kvjax.cache_bytes(state)
    last, _ = of.go_on(state)
    for layer, limits in enumerate(slot_limits(last)):
        for row in range(len(of.lengths)):
            for head, positions in enumerate(held(last, row)[layer]):
                assert len(positions) <= limits[row, head]
                assert len({*positions}) == len(positions)


@promise
def pages_are_dense_slots(of: Drawn) -> None:
    policy = of.policy()
    try:
        if not policy.plan.sizing.per_head:
            policy = kvjax.policy(policy, plan="adakv")
        state, _ = of.read(policy=policy, prefill_chunk=None)
    except ValueError as error:
        assert is_sentence(str(error)), str(error)
        event("not on pages")
        return
    if policy.plan.sizing.mode == "profiled":  # a quota, which dense slots refuse
        return
    dense = state.replace(layers=state.cache.slots, pool=None)
    assert state.cache.pool is not None
    (paged, found), (dense, wanted) = of.go_on(state), of.go_on(dense)
    for logits, others in zip(found, wanted, strict=True):
        close(logits, others, of)
    same_tokens(paged, dense, list(range(len(of.lengths))), of)
    budget = 8 if isinstance(of.budget, float) else max(of.budget // 2, 6)
    try:
        pressed = kvjax.compress(dense, None, budget)
    except ValueError as error:
        assert is_sentence(str(error)), str(error)
        return
    same_tokens(kvjax.compress(paged, None, budget), pressed, list(range(len(of.lengths))), of)


MESHES = ((2, 1), (1, 2), (2, 2), (1, 4), (1, 1, 2), (2, 2, 2))


@promise
def a_mesh_is_one_device(of: Drawn) -> None:
    shape = MESHES[of.steps % len(MESHES)]
    if jax.device_count() < np.prod(shape):
        pytest.skip("needs eight devices: JAX_NUM_CPU_DEVICES=8, as nox -s fuzz sets")
    rows = [row % len(of.lengths) for row in range(2 * len(of.lengths))]
    plain = model_of(of.model)
    mesh = mesh_of(jax.devices(), shape)
    spread = Model(jax.device_put(plain.weights, weight_shardings(plain.config, mesh)), plain.config, mesh=mesh)
    one, wanted = of.read(rows)
    several, found = of.read(rows, model=spread)
    close(found, wanted, of)
    (one, wanted), (several, found) = of.go_on(one, rows), of.go_on(several, rows)
    for several_logits, logits in zip(found, wanted, strict=True):
        close(several_logits, logits, of)
    same_tokens(several, one, list(range(len(rows))), of)


def is_sentence(message: str) -> bool:
    """Whether an error says what is wrong in one line."""
    return "\n" not in message and message.endswith(".") and 10 < len(message) < 600


@pytest.fixture(autouse=True, scope="module")
def double() -> Iterator[None]:
    """Numbers of 64 bits."""
    with jax.enable_x64(True):
        yield


PLAIN = Drawn("gqa", "h2o", {"sinks": 2, "special": (7,)}, 17, (23, 9), None, (1, 5), 3)


@pytest.mark.parametrize("name", PROMISES)
def test_promises_hold_of_a_plain_configuration(name: str) -> None:
    PROMISES[name](PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROMISES)
@settings(suppress_health_check=CHECKS)
@given(of=drawn())
def test_promises_hold(name: str, of: Drawn) -> None:
    try:
        of.read()
    except (ValueError, TypeError) as error:
        assert is_sentence(str(error)), str(error)
        event("refused")
        return
    PROMISES[name](of)
