"""Arguments that mean nothing are refused by one sentence, at every entry point alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

import kvjax
from kvjax.generation.chat import Conversation
from kvjax.inference.state import held_positions, slot_limits
from tests.small_models import GQA, MHA, random_model

MODEL = random_model(GQA)
UNTYPED: Any = "gumbel"
IDS = [list(range(3, 23))]


def refused(do: Callable[[], Any], sentence: str, kind: type[Exception] = ValueError) -> None:
    with pytest.raises(kind, match=sentence) as caught:
        do()
    assert "\n" not in str(caught.value) and str(caught.value).endswith((".", "?"))


@pytest.mark.parametrize("budget", [4, 0.5, [4, 4]])
def test_a_budget_means_nothing_to_a_policy_that_keeps_everything(budget: Any) -> None:
    refused(
        lambda: kvjax.prefill(MODEL, "full", IDS, budget), "has no effect under policy full, which keeps everything"
    )


def test_the_same_of_texts_streams_and_conversations() -> None:
    tiny = kvjax.load("tiny")
    for do in (
        lambda: tiny.generate("Once", policy="full", budget=8),
        lambda: tiny.generate("Once", budget=8),
        lambda: list(tiny.stream("Once", budget=8)),
        lambda: Conversation(tiny, budget=8),
    ):
        refused(do, "budget=8 has no effect under policy full, which keeps everything; leave it out")


@pytest.mark.parametrize("plan", ["adakv", "pyramid"])
@pytest.mark.parametrize("policy", ["full", "topk_oracle"])
def test_a_plan_means_nothing_where_nothing_leaves(policy: str, plan: str) -> None:
    refused(lambda: kvjax.policy(policy, plan=plan), "this policy evicts nothing, so plan=")
    refused(lambda: kvjax.prefill(MODEL, policy, IDS, plan=plan), "this policy evicts nothing, so plan=")


@pytest.mark.parametrize("policy", ["duoattention", "fastgen", "simlayerkv"])
def test_a_plan_means_nothing_to_a_policy_that_decides_itself(policy: str) -> None:
    message = f"^{policy} decides itself how many slots each head gets, so budget and plan=adakv mean nothing to it"
    refused(lambda: kvjax.policy(policy, plan="adakv"), message)


@pytest.mark.parametrize(
    ("policy", "chunk", "sentence"),
    [
        ("keydiff", None, r"^policy keydiff, which reads prompts in chunks of 128, .* whole prompts \(block=None or"),
        ("lsh_e", None, r"^policy lsh_e, which reads prompts in chunks of 1, .* or prompt='one_shot'\)"),
        ("h2o", 8, r"^prefill_chunk=8 does not go with a budget for each head, .*; leave it out"),
    ],
)
def test_heads_with_budgets_of_their_own_need_the_whole_prompt(policy: str, chunk: int | None, sentence: str) -> None:
    refused(lambda: kvjax.prefill(MODEL, policy, IDS, 8, plan="adakv", prefill_chunk=chunk), sentence)


def test_a_question_at_the_end_of_a_prompt_needs_the_whole_prompt() -> None:
    for policy in (kvjax.policy("finch", delimiter=1), kvjax.policy("chunkkv", base="finch", delimiter=1)):
        refused(
            lambda policy=policy: kvjax.prefill(MODEL, policy, IDS, 8, prefill_chunk=8),
            rf"^prefill_chunk=8 does not go with policy {policy.name}, which only the whole prompt can tell; leave it",
        )


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: kvjax.AttentionSum(group="mean"), "group='mean' is not one of sum, max"),
        (lambda: kvjax.AttentionSum(over="heads"), "over='heads' is not one of group, layer, device, model"),
        (lambda: kvjax.Noise(kind="normal"), "kind='normal' is not one of gumbel, gaussian"),
        (lambda: kvjax.AttentionSum(tau=0.0), "tau=0.0 is not a temperature above 0"),
        (lambda: kvjax.AttentionSum(noise=UNTYPED), "noise='gumbel' is not a kvjax.Noise, or None"),
        (lambda: kvjax.LocalAttention(most=0), "most=0 is not a whole number from 1"),
        (lambda: kvjax.AttentionProbs(newest=0), "newest=0 is not a whole number from 1"),
    ],
)
def test_settings_of_statistics(make: Callable[[], Any], sentence: str) -> None:
    refused(make, sentence)


@struct.dataclass
class Deaf(kvjax.Score):
    def attention_stats(self, heads, new):
        return kvjax.AttentionSum()

    def score(self, view, new):
        return view.position.astype("float32")


@struct.dataclass
class Worded(kvjax.Score):
    def init_slot(self, new, state):
        return jnp.zeros(new.k.shape[:3])

    def attention_stats(self, heads, new):
        return "sums"

    def update_slot(self, stats, view, new):
        return stats

    def score(self, view, new):
        return view.slots.score


def test_statistics_that_nobody_takes() -> None:
    refused(Deaf, "Deaf requests attention statistics and never uses them; override update_slot", TypeError)
    policy = kvjax.Policy(Worded())
    refused(
        lambda: kvjax.prefill(MODEL, policy, IDS, 8),
        "attention_stats returned 'sums', no attention statistic",
        TypeError,
    )


@pytest.mark.parametrize(
    ("policy", "budget", "settings", "least"),
    [
        ("streaming", 4, {}, 5),
        ("h2o", 4, {"sinks": 4, "recent": 0}, 5),
        ("h2o", [9, 4], {"sinks": 4, "recent": 0}, 5),
        ("window", 3, {"sinks": 2, "recent": 2}, 4),
        ("l2", 6, {"sinks": 4, "recent": 0, "plan": "arithmetic"}, 10),
        ("h2o", 8, {"sinks": 4, "recent": 0.9}, 31),
        ("h2o", 0.1, {"sinks": 4, "recent": 0.9}, 31),
    ],
)
def test_sinks_leave_a_slot_for_the_token_being_read(policy: str, budget: Any, settings: Any, least: int) -> None:
    made = kvjax.policy(policy, **settings)
    refused(lambda: kvjax.prefill(MODEL, made, IDS, budget), f"at least {least} or protect")
    roomy: Any = [9, least] if isinstance(budget, list) else least
    state, _ = kvjax.prefill(MODEL, made, IDS, roomy)
    state, _ = kvjax.decode_step(state, [5])
    sinks = state.policy.protection.sinks
    assert all({*range(sinks)} <= {*held[0, 0].tolist()} for held in kvjax.held_positions(state))


def test_recent_tokens_and_sinks_that_fill_every_budget_have_no_budget_to_advise() -> None:
    made = kvjax.policy("h2o", sinks=1, recent=1.0)
    refused(lambda: kvjax.prefill(MODEL, made, IDS, 8), "budget of 8 slots per head; protect fewer tokens")


@pytest.mark.parametrize("floor", [0.0, 0.2])
def test_no_head_gets_fewer_slots_than_sinks_and_the_token_being_read(floor: float) -> None:
    wanted: dict[str, Any] = {"sinks": 4, "plan": "adakv", "plan.floor": floor}
    policy = kvjax.policy("random", **wanted)
    state, _ = kvjax.prefill(random_model(MHA), policy, IDS, 5, max_new_tokens=4)
    assert min(limit.min() for limit in slot_limits(state)) >= 5
    state, _ = kvjax.decode_step(state, [5])
    assert all({0, 1, 2, 3, 20} <= {*head} for layer in held_positions(state) for head in layer[0].tolist())


def test_arguments_of_functions() -> None:
    state, _ = kvjax.prefill(MODEL, "h2o", IDS, 8)
    wrong: Any = kvjax
    refused(lambda: wrong.decode_step(MODEL, state), "is a state, from kvjax.prefill, not Model", TypeError)
    refused(lambda: wrong.decode_step([3], state), "is a state, from kvjax.prefill, not list", TypeError)
    refused(lambda: wrong.decode_step(state, state), "is a token for each row, not a State", TypeError)
    refused(lambda: wrong.decode_step(state, [0.5]), "tokens of type float64 are no token ids", TypeError)
    refused(
        lambda: wrong.decode_step(state, [[1], [2, 3]]), r"tokens=\[\[1\], \[2, 3\]\] are not one for each of 1 rows"
    )
    for function in ("held_positions", "cache_bytes", "full_cache_bytes"):
        refused(lambda: getattr(wrong, function)(MODEL), "is a state, from kvjax.prefill, not Model", TypeError)  # noqa: B023
    for function in ("extend", "take_rows", "decode_step_in_place"):
        refused(lambda: getattr(wrong, function)(MODEL, [0]), "is a state, from kvjax.prefill, not Model", TypeError)  # noqa: B023
    refused(lambda: wrong.put_rows(state, [0], MODEL), "the third argument is a state", TypeError)
    for given in ("tiny", state):
        refused(lambda: wrong.prefill(given, "h2o", IDS, 8), "is a model, from kvjax.load, not", TypeError)  # noqa: B023


def test_what_plans_on_the_host_is_not_traced() -> None:
    state, _ = kvjax.prefill(MODEL, "h2o", IDS, 8)
    ids, sentence = np.array(IDS), "plans slots on the host and cannot be traced by jit, vmap or scan; call it outside"
    traced = jax.jit(lambda ids: kvjax.prefill(MODEL, "h2o", ids, 8)[1])
    refused(lambda: traced(ids), f"prefill {sentence}", TypeError)
    keyed = jax.jit(lambda key: kvjax.prefill(MODEL, "random", IDS, 8, key=key)[1])
    refused(lambda: keyed(jax.random.key(0)), f"prefill {sentence}", TypeError)
    refused(lambda: jax.jit(kvjax.extend)(state, ids), f"extend {sentence}", TypeError)
    refused(lambda: jax.jit(MODEL.logits)(ids), "cannot be traced", TypeError)


def test_random_keys_of_all_kinds() -> None:
    policy = kvjax.policy("random")
    wanted, _ = kvjax.prefill(MODEL, policy, IDS, 8, key=jax.random.key(3))
    old = jax.random.PRNGKey(3)
    keys: tuple[Any, ...] = (3, np.int64(3), old, np.asarray(old), jax.random.key(3)[None])
    for key in keys:
        found, _ = kvjax.prefill(MODEL, policy, IDS, 8, key=key)
        assert all(map(np.array_equal, kvjax.held_positions(found), kvjax.held_positions(wanted)))
    wrong: Any = "3"
    refused(lambda: kvjax.prefill(MODEL, policy, IDS, 8, key=wrong), "key='3' is no random key", TypeError)
    two = jax.random.split(jax.random.key(0))
    refused(lambda: kvjax.prefill(MODEL, policy, IDS, 8, key=two), r"key has shape \[2\]; give one random key")


def test_rows_of_unequal_lengths_have_the_logits_that_they_have_alone() -> None:
    together = MODEL.logits([[5, 6, 7], [8]])
    np.testing.assert_allclose(together[1, 0], MODEL.logits([[8]])[0, 0], rtol=1e-5, atol=1e-5)


MINE = """
import kvjax
from flax import struct


@struct.dataclass
class Bare(kvjax.Score):
    def score(self, view, new):
        return -view.position.astype("float32")


def bare():
    return Bare()


def made(recent=0.5):
    return kvjax.policy("h2o", recent=recent)


def passed(**settings):
    return kvjax.policy("h2o", **settings)


ready = kvjax.Policy(Bare(), kvjax.Protection(recent=3))
"""


@pytest.mark.parametrize(("name", "recent"), [("Bare", 0), ("bare", 0), ("made", 0.5), ("passed", 0.5), ("ready", 3)])
def test_a_policy_of_a_file_takes_what_is_protected(name: str, recent: int | float, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    settings: dict[str, Any] = {"recent": 4, "sinks": 2, "special": [7], "positions": "cache"}
    found = kvjax.policy(f"{file}:{name}", **settings)
    assert (found.protection, found.codec.positions) == (kvjax.Protection(2, 4, (7,)), "cache")
    assert kvjax.policy(f"{file}:{name}", sinks=1).protection == kvjax.Protection(1, recent)
    refused(lambda: kvjax.policy(f"{file}:{name}", rec=4), "rec")


def test_every_policy_takes_what_is_protected(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MINE)
    with pytest.warns(UserWarning, match="Bare protects no tokens"):
        kvjax.policy(f"{file}:Bare")
    mine = kvjax.policy(f"{file}:Bare", recent=4, sinks=2, special=(7,))
    assert mine.protection == kvjax.Protection(2, 4, (7,))
    state, _ = kvjax.prefill(MODEL, mine, IDS, 8)
    assert {0, 1, 4, 16, 17, 18, 19} <= {*kvjax.held_positions(state)[0][0, 0].tolist()}
    for name in kvjax.methods.REGISTRY:
        assert kvjax.policy(name, special=(7,)).protection.special == (7,), name


@pytest.mark.parametrize("policy", ["random", "keyformer", "h2o"])
def test_samples_are_those_of_their_seeds(policy: str) -> None:
    tiny, text = kvjax.load("tiny"), "Once upon a time there was a girl who went to the park and"
    settings: dict[str, Any] = dict(policy=policy, budget=12, max_new_tokens=10)
    together = tiny.generate([text, "The old man"], num_samples=2, seed=5, **settings)
    alone = [tiny.generate(each, seed=5 + i, **settings)[0] for each in (text, "The old man") for i in range(2)]
    assert together == alone
