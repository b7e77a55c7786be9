"""Incompatible combinations of parts, each with a suggested fix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from kvjax.methods.attention_matching import Matching
from kvjax.methods.fastgen import OF_FREQUENT, Profiled, TokenClasses
from kvjax.methods.last_queries import WindowAttention
from kvjax.methods.lightkv import AfterLimit, LastQueries
from kvjax.policies import AgeScore, Policy, Protection, Sizing
from kvjax.policies.base import label_of


class Pair(NamedTuple):
    """Two incompatible parts: a test for them, the reason and the suggested fix."""

    clash: Callable[[Policy], bool]
    what: str
    remedy: str


PAIRS = (
    Pair(
        lambda policy: policy.plan.sizing.per_head and policy.score.requires.shared_slots != "none",
        "{score} needs the same slots in every head of a layer, which plan {plan} does not give",
        "choose another plan, or another policy such as h2o, snapkv or keyformer",
    ),
    Pair(
        lambda policy: policy.plan.sizing.per_head and policy.selection is not None,
        "selection {selection} reads the same slots in every head of a layer, which plan {plan} does not give",
        "choose plan uniform",
    ),
    Pair(
        lambda policy: policy.plan.sizing.per_head and policy.score.requires.host_memory,
        "offload=True moves scores of the same slots in every head of a layer, which plan {plan} does not give",
        "leave offload out, or choose another plan",
    ),
    Pair(
        lambda policy: policy.plan.sizing.per_head and isinstance(policy.score, LastQueries),
        "{score} sums the attention of kept queries anew over equally many slots in every head of a layer, which plan "
        "{plan} does not give",
        "use window='running', or choose another plan",
    ),
    Pair(
        lambda policy: policy.plan.sizing.per_head and isinstance(policy.score, WindowAttention),
        "{score} computes attention of its last queries anew over equally many slots in every head of a layer, which "
        "plan {plan} does not give",
        "choose another plan, or another policy such as h2o, snapkv or keyformer",
    ),
    Pair(
        lambda policy: policy.plan.sizing.host_memory and not _of_stored_pairs(policy),
        "plan {plan} copies prompts from host memory as they are stored, without scores of attention, a residual, a "
        "selection or positions='cache'",
        "use policy full with memory='host', and at most a codec",
    ),
    Pair(
        lambda policy: policy.evict_every > 1 and not _of_fixed_budgets(policy.plan.sizing),
        "evict_every lets heads grow beyond a budget between two evictions, which plan {plan} does not allow",
        "use evict_every=1, or a plan with fixed budgets, such as uniform, pyramid or adakv",
    ),
    Pair(
        lambda policy: isinstance(policy.protection, TokenClasses) and not isinstance(policy.plan, Profiled),
        "the classes of tokens in {protection} are what plan fastgen finds out, not plan {plan}",
        "use plan fastgen, or protection by sinks, recent and special",
    ),
    Pair(
        lambda policy: isinstance(policy.plan, Profiled) and not isinstance(policy.protection, TokenClasses),
        "plan fastgen counts on the protection of fastgen, not on {protection}",
        "use policy fastgen, and replace its other parts",
    ),
    Pair(
        lambda policy: (
            isinstance(policy.plan, Profiled)
            and isinstance(policy.protection, TokenClasses)
            and any(getattr(policy.plan, name) != getattr(policy.protection, name) for name in OF_FREQUENT)
        ),
        "plan fastgen and {protection} differ in frequent or frequent_among",
        "give both to policy fastgen",
    ),
    Pair(
        lambda policy: policy.codec.quantized and policy.codec.positions == "cache" and not _ranks_by_age(policy),
        "codec {codec} holds keys as they are seen, but positions='cache' turns all of them at every step under "
        "{score}",
        "use positions='original', or a policy that keeps a window, such as streaming",
    ),
    Pair(
        lambda policy: policy.codec.quantized and policy.codec.ordered,
        "codec {codec} holds keys as they are seen, but positions='cache' turns all of them at every step where "
        "tokens are protected for what they are or heads have slots of their own",
        "use positions='original', leave special out, or choose plan uniform",
    ),
    Pair(
        lambda policy: isinstance(policy.residual, Matching) and policy.codec.positions == "cache",
        "residual attention_matching matches queries at original positions, and positions='cache' moves the keys",
        "use positions='original'",
    ),
    Pair(
        lambda policy: (
            isinstance(policy.plan, AfterLimit)
            and policy.plan.middle == "mask"
            and policy.protection.one_in != policy.plan.mask.one_in
        ),
        "middle='mask' is as wide as the mask of lightkv, not as {protection}",
        "use policy lightkv, or middle='rest'",
    ),
)


def _ranks_by_age(policy: Policy) -> bool:
    return type(policy.score).score is AgeScore.score


def _of_stored_pairs(policy: Policy) -> bool:
    plain = policy.residual is None and policy.selection is None and policy.codec.positions == "original"
    return plain and _ranks_by_age(policy)


def _of_fixed_budgets(sizing: Sizing) -> bool:
    return sizing == Sizing(per_head=sizing.per_head, all_layers=sizing.all_layers)


def fitted(policy: Policy) -> Policy:
    """Return a copy of a policy whose codec is set up for the other parts, if all parts are compatible.

    Raises:
        ValueError: two parts are incompatible; the message names them and suggests a fix.
    """
    policy.check_kinds()
    guard = policy.protection
    plain = type(guard) is Protection
    simple = plain and not guard.special and guard.one_in is None
    slides = policy.codec.positions == "cache" and _ranks_by_age(policy) and simple and not policy.plan.sizing.per_head
    codec = dataclasses.replace(policy.codec, sliding=slides, sinks=guard.sinks if slides else 0)
    policy = dataclasses.replace(policy, codec=codec)
    for pair in PAIRS:
        if pair.clash(policy):
            selection = "" if policy.selection is None else label_of(policy.selection)
            names = dict(score=policy.label, plan=label_of(policy.plan), codec=policy.codec.name, selection=selection)
            protection = "protection by sinks, recent and special" if plain else f"the protection of {policy.label}"
            raise ValueError(f"{pair.what.format(**names, protection=protection)}; {pair.remedy}.")
    return policy
