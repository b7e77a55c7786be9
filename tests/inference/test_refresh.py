"""Drafts whose slots are chosen anew after each verification: the same texts, by the attention of the full cache."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.generation.generate import generate_ids
from kvjax.inference.refresh import truncate_draft
from kvjax.models import ModelConfig
from tests.cases import POLICIES, slow
from tests.oracles.decoder import Decoder, Oracle, Prompt
from tests.small_models import GQA, LOCAL, MHA, SINKS, SLOPED, random_model

PROMPTS = [np.random.default_rng(row).integers(0, 64, size).tolist() for row, size in enumerate((41, 57, 48))]
MODELS = {"mha": MHA, "gqa": GQA, "windows": LOCAL, "sinks": SINKS, "alibi": SLOPED}

DRAFTS = {
    # name: policy and budget, and what is new about its ranking
    "h2o": ("h2o", 17),  # sums over the tokens of a verification
    "snapkv": (kvjax.policy("snapkv", recent=4), 17),  # pools over neighbors in the text
    "tova": ("tova", 17),  # one ranking for all heads
    "keyformer-shared": (kvjax.policy("keyformer", shared=True), 17),  # one ranking for all layers
    "dropkv": (kvjax.policy("dropkv", recent=4), 17),  # reads values
    "h2o-int8": (kvjax.policy("h2o", codec="int8"), 17),  # slots are encoded anew
    "h2o-every-8": (kvjax.policy("h2o", evict_every=8), 17),  # buffers larger than the budget
    "pyramidkv": (kvjax.policy("pyramidkv", recent=4), 17),  # other buffers in each layer
}


def texts_of(speculation: Any, count: int) -> tuple[list[list[int]], Any]:
    """Greedy texts of `PROMPTS`, and the caches after them."""
    cache, logits = speculation.prefill(PROMPTS, max_new_tokens=count + 6)
    texts = [[int(token)] for token in logits.argmax(-1)]
    while min(map(len, texts)) < count:
        token = jnp.asarray([text[-1] for text in texts])
        cache, tokens, counts = kvjax.speculate(speculation, cache, token)
        for text, ids, number in zip(texts, tokens.tolist(), counts.tolist(), strict=True):
            text += ids[:number]
    return [text[:count] for text in texts], cache


CASES = [("mha", "h2o"), ("windows", "snapkv"), *(("gqa", name) for name in ("tova", "keyformer-shared", "h2o-int8"))]
UNFIT = {("windows", "keyformer-shared")}  # one ranking for all layers needs the same tokens in all of them
SLOW = [(model, name) for model in MODELS for name in DRAFTS if (model, name) not in {*CASES, *UNFIT}]


@pytest.mark.parametrize(("config", "name"), [*CASES, *(slow(*case) for case in SLOW)])
def test_texts_of_fresh_drafts_are_those_of_the_full_cache(config: str, name: str, x64: None) -> None:
    model, (policy, budget) = random_model(MODELS[config], dtype=jnp.float64), DRAFTS[name]
    texts, cache = texts_of(kvjax.speculation(model, policy, budget, refresh=True), 24)
    assert texts == generate_ids(model, PROMPTS, max_new_tokens=24, temperature=0.0).tokens
    assert cache.lag.tolist() == [0, 0, 0], "the draft has read all tokens that stay"


def sees_last(oracle: Oracle, count: int) -> Oracle:
    """An oracle whose prompt has only been looked at by its last `count` tokens."""
    read = oracle.read

    def read_last(prompt: Prompt) -> None:
        for matrices in prompt.probs:
            for matrix in matrices:
                matrix[: len(matrix) - count] = 0.0
        read(prompt)

    oracle.read = read_last
    return oracle


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv", slow("vase"), slow("criticalkv"), slow("chunkkv")])
@pytest.mark.parametrize("config", [pytest.param(MHA, id="mha"), slow(GQA)])
def test_a_draft_holds_what_the_verified_queries_attend_to(config: ModelConfig, name: str, x64: None) -> None:
    model, case, rows = random_model(config, dtype=jnp.float64), POLICIES[name], jnp.arange(3)
    weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.weights)
    speculation = kvjax.speculation(model, case.make(), case.budget, plan=case.plan, refresh=True)
    cache, logits = speculation.prefill(PROMPTS, max_new_tokens=30)
    texts, token, accepted = [list(prompt) for prompt in PROMPTS], logits.argmax(-1), set[int]()
    for _ in range(2):
        cache, tokens, counts = kvjax.speculate(speculation, cache, token)
        accepted |= set(counts.tolist())
        draft = kvjax.State(speculation.draft, cache.draft.replace(key=cache.key))
        held = kvjax.held_positions(draft)
        for row, count in enumerate(counts.tolist()):
            texts[row] += [int(token[row]), *tokens[row, : count - 1].tolist()]
            oracles = case.oracles(draft, row, len(PROMPTS[row]) + 30, evicts_first=True)
            oracles = [sees_last(oracle, count) for oracle in oracles]
            Decoder(weights, config, oracles, horizon=30).prompt(texts[row])
            for layer, oracle in enumerate(oracles):
                for head, expected in enumerate(oracle.heads):
                    positions = held[layer][row, head]
                    assert sorted(positions[positions >= 0].tolist()) == sorted(expected.positions), (row, layer, head)
        token = tokens[rows, counts - 1]
    assert len(accepted) > 1, "rows accept different counts"


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("streaming", {}, "streaming ranks without attention; leave refresh out, or draft with a policy such as h2o"),
        ("kvzip", {}, "kvzip has a plan that gives each head another number of slots"),
        ("h2o", {"plan": "adakv"}, "h2o has a plan that gives each head another number of slots"),
        ("h2o", {"policy": {"residual": "momentkv"}}, "h2o has a residual"),
        ("h2o", {"policy": {"special": (1,)}}, "h2o needs token ids of the text"),
        ("scissorhands", {}, "scissorhands ranks by attention of other queries, too"),
        ("topk_oracle", {}, "topk_oracle holds all tokens"),
        ("duoattention", {}, "duoattention decides itself how many tokens a head holds"),
        ("h2o", {"policy": {"positions": "cache"}}, "h2o has keys with positions in its cache"),
    ],
)
def test_a_policy_that_needs_more_than_attention_is_refused(policy: str, settings: Any, message: str) -> None:
    made = kvjax.policy(policy, **settings.pop("policy", {}))
    budget = 1.0 if policy in ("topk_oracle", "duoattention") else 17
    with pytest.raises(ValueError, match=message):
        kvjax.speculation(kvjax.load("tiny"), made, budget, refresh=True, **settings)


def test_a_draft_gives_back_tokens_that_it_has_read() -> None:
    speculation = kvjax.speculation(kvjax.load("tiny"), "tova", 16, refresh=True)
    cache, logits = speculation.prefill(PROMPTS, max_new_tokens=8)
    cache, _, counts = kvjax.speculate(speculation, cache, logits.argmax(-1))
    length = cache.position - jnp.minimum(counts, 2)
    after = truncate_draft(cache.draft, length)
    assert after.position.tolist() == length.tolist()
    for before, layer in zip(cache.draft.positions(), after.positions(), strict=True):
        np.testing.assert_array_equal(layer, np.where(before < length[:, None, None], before, -1))
        assert (layer != before).any()
