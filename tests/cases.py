"""The tables of policies: every contract test and every oracle test runs over them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import kvjax
from kvjax.methods import PLANS
from kvjax.methods.adakv import AdaKV
from kvjax.methods.compactor import Leverage
from kvjax.methods.fastgen import TokenClasses
from kvjax.methods.keyformer import GumbelSoftmax
from kvjax.methods.lightkv import AfterLimit, LastQueries
from kvjax.methods.lsh_e import Hamming, projections
from kvjax.models import ModelConfig
from kvjax.policies import Policy
from kvjax.policies.score import ScoreOver
from tests.oracles import (
    attention_matching,
    basic,
    codecs,
    criticalkv,
    cur,
    dropkv,
    duoattention,
    evict_every,
    fastgen,
    keydiff,
    keyformer,
    kvzip,
    l2,
    last_queries,
    less,
    lightkv,
    lsh_e,
    momentkv,
    plans,
    prompt_scores,
    scissorhands,
    simlayerkv,
    snapkv,
    topk_oracle,
    tova,
    vase,
)
from tests.oracles.decoder import Oracle

Inject = Callable[[Policy, ModelConfig, int, int, int], dict[str, Any]]
"""(policy, config, layer, seed of the row, tokens of the whole text) -> further attributes of the layer's oracle."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One variant of a policy.

    Args:
        policy: registered name.
        oracle: its literal twin.
        settings: of the policy.
        budget: slots per head, below the prompts' 41 to 57 tokens and at least 17; 1.0 where the policy decides itself.
        plan: how the budget is spread over the layers, by name.
        prefill_chunk: as in `prefill`; an oracle with `sequential = True` needs 1 here or as the policy's own.
        inject: random numbers and matrices for the oracle.
        equals_full: whether it is the full cache when there is room for everything.
        full: settings that make room, where the budget does not, or give all heads the same.
    """

    policy: str
    oracle: type[Oracle]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    budget: int | float = 20
    plan: str | None = None
    prefill_chunk: int | None = None
    inject: Inject | None = None
    equals_full: bool = True
    full: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, **changes: Any) -> Policy:
        return kvjax.policy(self.policy, **{**self.settings, **changes})

    def oracles(self, state: kvjax.State, row: int, tokens: int, evicts_first: bool = False) -> list[Oracle]:
        """The twins of a state's layers for one of its rows, whose whole text has so many tokens.

        They follow their papers' order and count as papers do: budget k and recent window w there are k + 1 and w + 1
        here, where the token being read has a slot. `evicts_first` is kvjax's order, with kvjax's numbers.
        """
        config, policy = state.config, state.policy
        oracles, outgrown = [], layers_outgrown(config, tokens)
        for layer, slots in enumerate(self.slots(policy, config, tokens)):
            injected = {} if self.inject is None else self.inject(policy, config, layer, int(state.seed[row]), tokens)
            shape: dict[str, Any] = {
                "layer": layer,
                "layers": config.layers,
                "kv_heads": config.kv_heads,
                "groups": config.groups,
            }
            kind, of_policy = self.oracle, settings_of(policy) | injected
            if policy.evict_every > 1:
                kind = evict_every.every(kind)
            read = 0 if evicts_first or kind.evicts_first else 1
            recent = max(0, plans.recent_window(of_policy["recent"], slots) - read)
            shape |= {"recents": [recent] * config.kv_heads, "evicts_first": not read}
            if isinstance(policy.plan, AdaKV):
                spread = plans.adakv if policy.plan.over == "layer" else plans.over_all_layers
                kind, shape["text"] = spread(kind), tokens
            if layer in outgrown:  # a window of its own, and nothing else
                kind = codecs.coded(basic.Window) if policy.codec.name != "plain" else basic.Window
                of_policy = {"sinks": 0, "special": (), "positions": "original", "codec": policy.codec.name}
                of_policy["sequential"] = self.oracle.sequential
                shape["recents"] = [0] * config.kv_heads
            oracle = kind([slots - read] * config.kv_heads, **(of_policy | shape))
            if self.prefill_chunk == 1:
                oracle.sequential = True
            oracles.append(oracle)
        return oracles

    def slots(self, policy: Policy, config: ModelConfig, tokens: int) -> list[int]:
        """Slots of an average head of each layer, by the formulas of `tests/oracles/plans.py`."""
        plan = policy.plan.plan if isinstance(policy.plan, AfterLimit) else policy.plan
        windows = [config.layer(layer).window or tokens for layer in range(config.layers)]
        if plan.sizing.mode != "budget":
            return [min(tokens, window) for window in windows]
        assert isinstance(self.budget, int)
        free = sorted({*range(config.layers)} - layers_outgrown(config, tokens))
        name = next(name for name, kind in PLANS.items() if type(plan) is kind)
        numbers = plain(plan)
        more, _, _ = numbers.pop("extra_slots"), numbers.pop("floor", None), numbers.pop("over", None)
        planned = dict(zip(free, plans.layer_budgets(name, self.budget, len(free), **numbers), strict=True))
        return [min(planned[layer] + more, w) if layer in planned else w for layer, w in enumerate(windows)]


def layers_outgrown(config: ModelConfig, tokens: int) -> set[int]:
    """Layers whose window a text outgrows, in a model that has layers which see farther."""
    windows = [config.layer(layer).window or math.inf for layer in range(config.layers)]
    return {layer for layer, window in enumerate(windows) if window < min(tokens, max(windows))}


def settings_of(policy: Policy) -> dict[str, Any]:
    """The settings of a policy's parts in one dictionary, by the names that oracles know."""

    memory = plain(policy.residual)
    inner = plain(getattr(policy.score, "base_score", None))  # of a score over another one
    known = plain(policy.plan) | inner | plain(policy.score) | plain(policy.protection) | plain(policy.selection)
    known |= {"evict_every": policy.evict_every, "positions": policy.codec.positions, "codec": policy.codec.name}
    known |= {"kernels": memory.get("kernels"), "parameters": memory.get("layers")}
    known |= {name: memory[name] for name in ("queries", "ridge", "bound") if name in memory}
    limited = policy.plan if isinstance(policy.plan, AfterLimit) else AfterLimit()
    known |= {"exact": isinstance(policy.score, LastQueries)}
    known |= {"context_limit": limited.context_limit, "middle": limited.middle, "omega": policy.protection.omega}
    return known


def plain(part: Any) -> dict[str, Any]:
    """The fields of a part; numbers that a state holds as arrays are numbers again."""
    fields = () if part is None else dataclasses.fields(part)
    known = {field.name: getattr(part, field.name) for field in fields}
    return {
        name: value.item() if isinstance(value, jax.Array) and value.ndim == 0 else value
        for name, value in known.items()
    }


def slow(*values: Any) -> Any:
    """Values of a parameter that only `-m slow` tries."""
    return pytest.param(*values, marks=pytest.mark.slow)


def in_turns(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Every combination of two parameters; all but one or more for each value are slow."""
    usual = {(i % len(first), i % len(second)) for i in range(max(len(first), len(second)))}
    return [
        pytest.param(x, y) if (i, j) in usual else slow(x, y) for i, x in enumerate(first) for j, y in enumerate(second)
    ]


def pairwise(*parameters: Sequence[Any]) -> list[Any]:
    """Every combination of several parameters; all but some that have every two values together are slow."""
    every = list(itertools.product(*(range(len(values)) for values in parameters)))
    pairs = {chosen: set(itertools.combinations(enumerate(chosen), 2)) for chosen in every}
    missing, usual = set[Any]().union(*pairs.values()), set[tuple[int, ...]]()
    while missing:
        usual.add(best := max(every, key=lambda chosen: len(pairs[chosen] & missing)))
        missing -= pairs[best]
    found = {chosen: [values[i] for values, i in zip(parameters, chosen, strict=True)] for chosen in every}
    return [pytest.param(*values) if chosen in usual else slow(*values) for chosen, values in found.items()]


def core(*values: Any) -> Any:
    """Values of a parameter that `-m core` tries, too."""
    return pytest.param(*values, marks=pytest.mark.core)


def hashed_uniform(config: ModelConfig, layer: int, seed: int, tokens: int, query: int | None = None) -> np.ndarray:
    """The numbers of `pallas_kernels.noise.uniform_at` [h, tokens], by the same integer hash in NumPy."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        return x ^ (x >> np.uint32(16))

    heads = np.arange(config.kv_heads, dtype=np.uint32)[:, None]
    positions = np.arange(tokens, dtype=np.uint32)[None]
    seeds = np.full((1, 1), seed, np.uint32)
    if query is not None:
        seeds = mix(seeds ^ mix(np.full((1, 1), query, np.uint32) + np.uint32(0x632BE5AB)))
    bits = mix(seeds ^ np.uint32(layer * 0x9E3779B9 & 0xFFFFFFFF))
    bits = mix(bits ^ (heads * np.uint32(0x7FEB352D) + np.uint32(1)))
    bits = mix(bits ^ (positions * np.uint32(0x846CA68B) + np.uint32(1)))
    return ((bits >> np.uint32(9)).astype(np.float32) + np.float32(0.5)) / np.float32(2**23)


def _uniform(policy: Policy, config: ModelConfig, layer: int, seed: int, tokens: int) -> dict[str, Any]:
    return {"uniform": hashed_uniform(config, layer, seed, tokens)}


def _noise(policy: Policy, config: ModelConfig, layer: int, seed: int, tokens: int) -> dict[str, Any]:
    fresh = isinstance(policy.score, GumbelSoftmax) and policy.score.fresh_noise
    draw = functools.cache(lambda query: hashed_uniform(config, layer, seed, tokens, query))
    return {"uniform": lambda query: draw(query if fresh else None)}


def _matrices(policy: Policy, config: ModelConfig, layer: int, seed: int, tokens: int) -> dict[str, Any]:
    inverse = np.vectorize(statistics.NormalDist().inv_cdf)

    @functools.cache
    def gaussian(columns: int, query: int | None = None) -> np.ndarray:
        uniform = hashed_uniform(config, layer, seed, config.head_width * columns, query)
        return inverse(uniform.astype(np.float64)).reshape(config.kv_heads, config.head_width, columns)

    draw = functools.cache(lambda query: hashed_uniform(config, layer, seed, tokens, query))
    return {"gaussian": gaussian, "uniform": draw}


def _planes(policy: Policy, config: ModelConfig, layer: int, seed: int, tokens: int) -> dict[str, Any]:
    assert isinstance(policy.score, Hamming)
    score = policy.score
    return {"planes": np.asarray(projections(score.seed, layer, config.kv_heads, score.bits, config.head_width))}


def _rope(policy: Policy, config: ModelConfig, layer: int, seed: int, tokens: int) -> dict[str, Any]:
    return {"rope": config.layer(layer).rope}


def _sketches(policy: Policy, config: ModelConfig, layer: int, seed: int, tokens: int) -> dict[str, Any]:
    score = policy.score.base_score if isinstance(policy.score, ScoreOver) else policy.score
    assert isinstance(score, Leverage) and score.projections is not None
    drawn = np.asarray(score.projections[layer], np.float64)
    assert abs(drawn.std() - score.sketch**-0.5) < 0.2 * score.sketch**-0.5
    return _rope(policy, config, layer, seed, tokens) | {"projections": drawn}


def _ids(policy: Policy, config: ModelConfig, layer: int, seed: int, tokens: int) -> dict[str, Any]:
    assert isinstance(policy.protection, TokenClasses)
    classes = np.asarray(policy.protection.classes)
    return {name: tuple(np.flatnonzero(classes & bit).tolist()) for name, bit in (("special", 1), ("punctuation", 2))}


def fastgen_case(threshold: float, **settings: Any) -> Case:
    """FastGen over a vocabulary of 64 tokens, with an instruction marker of two tokens."""
    ids = {"special": (7, 9), "punctuation": (11, 13, 20, 30), "markers": ((3, 4), (5,)), "spare_special": 1}
    settings = {"threshold": threshold, "spare_punctuation": 0.03} | ids | settings
    return Case("fastgen", fastgen.FastGen, settings, budget=1.0, inject=_ids, full={"threshold": 1.0})


def simlayerkv_case(threshold: float, **settings: Any) -> Case:
    """SimLayerKV with few tokens in lazy layers."""
    settings = {"threshold": threshold, "sinks": 1, "recent": 7} | settings
    return Case("simlayerkv", simlayerkv.SimLayerKV, settings, budget=1.0, full={"threshold": 1.0})


def duoattention_case(retrieval: float, **settings: Any) -> Case:
    """DuoAttention with few tokens in the heads that do not retrieve."""
    settings = {"retrieval": retrieval, "sinks": 2, "recent": 9, "length": 8} | settings
    return Case("duoattention", duoattention.DuoAttention, settings, budget=1.0, full={"retrieval": 1.0})


POLICIES: dict[str, Case] = {
    "full": Case("full", basic.Full, budget=1.0),
    "window": Case("window", basic.Window),
    "window-cache-positions": Case("window", basic.Window, {"positions": "cache", "special": (7,)}),
    "streaming": Case("streaming", basic.Window),
    "streaming-original": Case("streaming", basic.Window, {"positions": "original"}),
    "random": Case("random", basic.Random, {"recent": 4}, inject=_uniform),
    "random-sequential": Case("random", basic.Random, inject=_uniform, prefill_chunk=1),
    "h2o": Case("h2o", basic.H2O),
    "h2o-protected": Case("h2o", basic.H2O, {"recent": 3, "sinks": 2, "special": (7, 11)}),
    "h2o-cache-positions": Case("h2o", basic.H2O, {"recent": 0.25, "positions": "cache"}),
    "h2o-sequential": Case("h2o", basic.H2O, prefill_chunk=1),
    "less-performer": Case("less", less.less(basic.H2O), {"kernels": "performer"}),
    "baseline_plus": Case("baseline_plus", basic.H2O),
    "lambda_mask": Case("lambda_mask", basic.Window),
    "dilated_window": Case("dilated_window", basic.DilatedWindow),
    "l2": Case("l2", l2.L2),
    "l2-skipping": Case("l2", l2.L2, {"skip_layers": 1, "recent": 5}),
    "keydiff": Case("keydiff", keydiff.KeyDiff, {"block": None, "sinks": 2, "recent": 3}),
    "keydiff-cache-positions": Case("keydiff", keydiff.KeyDiff, {"block": None, "recent": 3, "positions": "cache"}),
    "keydiff-every-8": Case("keydiff", keydiff.KeyDiff, {"block": None, "evict_every": 8}),
    "cur": Case("cur", cur.CUR),
    "cur-random": Case("cur", cur.CUR, {"projections": 20, "neighbors": 7, "evict_every": 4}, inject=_matrices),
    "rkv": Case("rkv", last_queries.RKV, {"evict_every": 8}),
    "rkv-each": Case("rkv", last_queries.RKV, {"evict_every": 1, "recent": 4, "importance": 0.5, "threshold": 0.1}),
    "snapkv_decode": Case("snapkv_decode", last_queries.SnapKVDecode, {"recent": 8, "evict_every": 8}),
    "snapkv_decode-max": Case(
        "snapkv_decode", last_queries.SnapKVDecode, {"recent": 5, "evict_every": 1, "kernel": 3, "pooling": "max"}
    ),
    "dropkv": Case("dropkv", dropkv.DropKV, {"window": 8, "recent": 4}),
    "dropkv-every-8": Case("dropkv", dropkv.DropKV, {"window": 5, "recent": 4, "evict_every": 8}),
    "criticalkv": Case("criticalkv", criticalkv.critical(basic.H2O), {"recent": 4, "sinks": 1}),
    "criticalkv-snapkv": Case(
        "criticalkv", criticalkv.critical(snapkv.SnapKV), {"base": "snapkv", "recent": 8, "evict_every": 4}
    ),
    "vase": Case("vase", vase.VaSE, {"evict_every": 8, "recent": 8, "large": 0.25}, inject=_matrices),
    "vase-dkv": Case("vase", vase.VaSE, {"evict_every": 4, "recent": 4, "by": "dkv", "large": 6}, inject=_matrices),
    "lsh_e": Case("lsh_e", lsh_e.Sequential, inject=_planes),
    "lsh_e-one-shot": Case("lsh_e", lsh_e.LSHE, {"prompt": "one_shot", "bits": 40, "recent": 4}, inject=_planes),
    "keyformer": Case("keyformer", keyformer.Keyformer, inject=_noise),
    "keyformer-fresh": Case("keyformer", keyformer.Keyformer, {"fresh_noise": True, "damping": 0.9}, inject=_noise),
    "keyformer-gaussian": Case("keyformer", keyformer.Keyformer, {"noise": "gaussian", "damping": 0.97}, inject=_noise),
    "keyformer-shared": Case("keyformer", keyformer.Shared, {"shared": True, "damping": 0.95}, inject=_noise),
    "keyformer-cache-positions": Case(
        "keyformer", keyformer.Keyformer, {"positions": "cache", "tau_init": 1.5, "noise": "constant"}, inject=_noise
    ),
    "fastgen": fastgen_case(0.75),
    "fastgen-low": fastgen_case(0.3, recent=3, sinks=2),
    "fastgen-high": fastgen_case(0.85, local=0.5, frequent_among="others"),
    "fastgen-others": fastgen_case(0.75, frequent_among="others"),
    "fastgen-order": fastgen_case(0.7, order=("special", "frequent", "local", "punctuation")),
    "fastgen-local": fastgen_case(0.55, order=("local", "frequent")),
    "tova": Case("tova", tova.Tova),
    "scissorhands": Case("scissorhands", scissorhands.Scissorhands, {"history": 64}),
    "snapkv": Case("snapkv", snapkv.SnapKV, {"recent": 8}),
    "snapkv-max": Case("snapkv", snapkv.SnapKV, {"recent": 8, "pooling": "max", "group": "max", "kernel": 3}),
    "pyramidkv": Case("pyramidkv", snapkv.SnapKV, {"recent": 8}),
    "expected_attention": Case(
        "expected_attention", prompt_scores.ExpectedAttention, {"recent": 4, "future": 24}, inject=_rope
    ),
    "omp": Case("omp", prompt_scores.OMP, {"recent": 4, "queries": 24, "each": 1}),
    "omp-each-3": Case("omp", prompt_scores.OMP, {"recent": 4, "each": 3, "ridge": 0.1}),
    "lagkv": Case("lagkv", prompt_scores.LagKV, {"recent": 4, "lag": 8}),
    "leverage": Case("leverage", prompt_scores.Leverage, {"recent": 4, "sketch": 5}, inject=_sketches),
    "noncausal": Case("noncausal", prompt_scores.NonCausal, {"recent": 4, "chunk": 16}, inject=_rope),
    "compactor": Case(
        "compactor", prompt_scores.Compactor, {"recent": 0.2, "sinks": 2, "sketch": 20, "chunk": 7}, inject=_sketches
    ),
    "capkv": Case("capkv", prompt_scores.CapKV, {"recent": 4, "future": 24, "tau": 2.5}, inject=_rope),
    "chunkkv": Case("chunkkv", prompt_scores.chunked(snapkv.SnapKV), {"recent": 6, "length": 5}),
    "chunkkv-leverage": Case(
        "chunkkv",
        prompt_scores.chunked(prompt_scores.Leverage),
        {"base": "leverage", "recent": 3, "sinks": 2, "sketch": 5, "length": 7},
        inject=_sketches,
    ),
    "chunkkv-l2": Case("chunkkv", prompt_scores.chunked(l2.L2), {"base": "l2", "recent": 3, "length": 7}),
    "kvzip": Case(
        "kvzip",
        kvzip.KVzip,
        {"prompt": (3, 5, 8), "chunk": 16, "later": (6, 1), "overlap": 5, "recent": 4},
        full={"recent": 20},
    ),
    "kvzip-plus": Case(
        "kvzip",
        kvzip.KVzip,
        {"prompt": (9,), "chunk": 12, "later": (), "overlap": 20, "normalized": True, "recent": 0.2, "sinks": 1},
    ),
    "finch": Case("finch", snapkv.Finch, {"recent": 3, "delimiter": 34}),
    "duoattention": duoattention_case(0.5),
    "duoattention-special": duoattention_case(0.25, special=(2, 46, 54), seed=1),
    "simlayerkv": simlayerkv_case(0.02),
    "simlayerkv-mixed": simlayerkv_case(0.175),
    "simlayerkv-special": simlayerkv_case(0.1, special=(2, 46, 54)),
    "h2o-pyramid": Case("h2o", basic.H2O, plan="pyramid"),
    "h2o-interleaved": Case("h2o", basic.H2O, plan="interleaved"),
    "lightkv": Case("lightkv", lightkv.LightKV),
    "lightkv-mask": Case(
        "lightkv", lightkv.LightKV, {"middle": "mask", "alpha": 5, "omega": 3}, budget=32, equals_full=False
    ),
    "lightkv-running": Case("lightkv", lightkv.LightKV, {"window": "running", "alpha": 6}),
    "lightkv-context": Case("lightkv", lightkv.LightKV, {"context_limit": 100}),
    "lightkv-sequential": Case("lightkv", lightkv.LightKV, {"context_limit": 33, "alpha": 7}, prefill_chunk=1),
    "lightkv-offload": Case("lightkv", lightkv.LightKV, {"offload": True, "context_limit": 70, "positions": "cache"}),
    **{
        f"{name}-every-8": Case(name, kind, {"evict_every": 8}, inject=inject)
        for name, kind, inject in (
            ("h2o", basic.H2O, None),
            ("streaming", basic.Window, None),
            ("keyformer", keyformer.Keyformer, _noise),
            ("tova", tova.Tova, None),
            ("l2", l2.L2, None),
        )
    },
    "topk_oracle": Case("topk_oracle", topk_oracle.TopKOracle, equals_full=False),
    "topk_oracle-fraction": Case("topk_oracle", topk_oracle.TopKOracle, {"k": 0.25}, equals_full=False),
}

PROMPT_METHODS = (
    *("expected_attention", "lagkv", "leverage", "noncausal", "compactor", "capkv", "chunkkv", "finch"),
    *("kvzip", "omp"),
)
"""Methods that rank a prompt once, from keys, values and queries."""

RECENT = {
    *PROMPT_METHODS,
    *(
        "cur",
        "vase",
        "rkv",
        "dropkv",
        "criticalkv",
        "snapkv_decode",
        "triattention",
        "simlayerkv",
        "duoattention",
        "keydiff",
    ),
}
"""Methods beside those of the five papers: no part of the core tests, and compared over fewer steps."""

FIRST = list({case.policy: name for name, case in reversed(POLICIES.items())}.values())
"""One case of each policy, for promises that its settings cannot touch."""


class SelectingH2O(topk_oracle.Selecting, basic.H2O):
    """H2O of which every query reads only some."""


RESIDUAL_ORACLES: dict[str, Callable[[type[Oracle]], type[Oracle]]] = {
    "less": less.less,
    "momentkv": momentkv.momentkv,
    "attention_matching": attention_matching.attention_matching,
}


def pair(
    name: str,
    *,
    plan: str | None = None,
    residual: str | None = None,
    codec: str | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Case:
    """A case of `POLICIES` with some of its parts replaced, and its twin likewise."""
    case = POLICIES[name]
    oracle, parts = case.oracle, dict(settings or {})
    if residual is not None:
        oracle = evict_every.every(oracle) if "evict_every" in case.settings else oracle
        oracle = RESIDUAL_ORACLES[residual](oracle)
        parts |= {"residual": residual} | ({"residual.kernels": "performer"} if residual == "less" else {})
    if codec is not None:
        oracle = codecs.coded(oracle)
        parts |= {"codec": codec}
    changes = {"oracle": oracle, "settings": {**case.settings, **parts}, "plan": plan or case.plan}
    return dataclasses.replace(case, **changes, equals_full=case.equals_full and codec is None)


PAIRS: dict[str, Case] = {
    # A plan for each head, over every score that it means something to; keys by rank in heads of several sizes.
    **{
        f"{name}+adakv": pair(name, plan="adakv")
        for name in (
            *("h2o", "keyformer", "keyformer-fresh", "snapkv", "snapkv-max", "scissorhands", "lsh_e-one-shot"),
            *("l2", "random", "window", "dilated_window", "lightkv-running", "h2o-protected", "dropkv"),
            *("streaming", "h2o-cache-positions", "keyformer-cache-positions", "window-cache-positions"),
            *("h2o-every-8", "streaming-every-8"),
            # Scores that compare the slots of a head with each other.
            *("keydiff", "keydiff-every-8", "cur", "cur-random", "criticalkv", "vase"),
        )
    },
    "less+keydiff-every-8+adakv": pair("keydiff-every-8", residual="less", plan="adakv"),
    "criticalkv+adakv+int8": pair("criticalkv", plan="adakv", codec="int8"),
    "less+l2-every-8+adakv": pair("l2-every-8", residual="less", plan="adakv"),
    # LESS over every score, and over every kind of plan.
    **{
        f"less+{name}": pair(name, residual="less")
        for name in (
            *("keyformer", "snapkv", "scissorhands", "lsh_e", "l2", "random", "window", "streaming", "tova"),
            *("lightkv-context", "h2o-cache-positions", "pyramidkv", "fastgen-local"),
            *("cur", "vase", "rkv", "dropkv", "criticalkv"),
        )
    },
    **{f"less+{name}+adakv": pair(name, residual="less", plan="adakv") for name in ("h2o", "keyformer", "snapkv")},
    "less+streaming+adakv": pair("streaming", residual="less", plan="adakv"),
    # Methods that rank a prompt once.
    **{f"{name}+adakv": pair(name, plan="adakv") for name in PROMPT_METHODS if name != "omp"},
    **{f"less+{name}": pair(name, residual="less") for name in PROMPT_METHODS},
    **{f"{name}+int8": pair(name, codec="int8") for name in PROMPT_METHODS},
    # Codes under everything.
    **{
        f"{name}+int8": pair(name, codec="int8")
        for name in (
            *(
                "full",
                "window",
                "streaming",
                "random",
                "h2o",
                "h2o-sequential",
                "keyformer",
                "keyformer-shared",
                "tova",
            ),
            *("scissorhands", "snapkv", "pyramidkv", "lightkv-context", "l2", "lsh_e", "lsh_e-one-shot"),
            *("topk_oracle", "fastgen-low", "cur", "vase", "rkv", "dropkv", "criticalkv"),
        )
    },
    **{f"{name}+int4": pair(name, codec="int4") for name in ("h2o", "streaming", "snapkv", "tova", "fastgen")},
    **{f"{name}+adakv+int8": pair(name, plan="adakv", codec="int8") for name in ("h2o", "keyformer", "snapkv", "l2")},
    "h2o+adakv+int4": pair("h2o", plan="adakv", codec="int4"),
    **{f"{name}+fp8": pair(name, codec="fp8") for name in ("h2o", "streaming", "snapkv")},
    "h2o+adakv+fp8": pair("h2o", plan="adakv", codec="fp8"),
    "less+h2o+fp8": pair("h2o", residual="less", codec="fp8"),
    **{f"less+{name}+int8": pair(name, residual="less", codec="int8") for name in ("h2o", "streaming", "fastgen-low")},
    "fastgen-local+cache": pair("fastgen-local", settings={"positions": "cache"}),
    "less+h2o+int4": pair("h2o", residual="less", codec="int4"),
    "less+keyformer+adakv+int8": pair("keyformer", residual="less", plan="adakv", codec="int8"),
    # Moments of what has left, over every kind of score, plan and storage.
    **{
        f"momentkv+{name}": pair(name, residual="momentkv")
        for name in ("h2o", "streaming", "tova", "snapkv", "fastgen-low", "h2o-every-8", "h2o-sequential", "pyramidkv")
    },
    **{f"momentkv+{name}+adakv": pair(name, residual="momentkv", plan="adakv") for name in ("h2o", "keyformer")},
    **{f"momentkv+{name}+int8": pair(name, residual="momentkv", codec="int8") for name in ("h2o", "fastgen-low")},
    # Slots that stay get a bias and new values.
    **{
        f"attention_matching+{name}": pair(name, residual="attention_matching", settings={"residual.queries": 24})
        for name in ("h2o", "snapkv", "keyformer", "tova", "l2", "h2o-pyramid")
    },
    "attention_matching+omp": pair(
        "omp", residual="attention_matching", settings={"residual.queries": 24, "residual.bound": 7.0}
    ),
    "attention_matching+h2o+adakv": pair("h2o", residual="attention_matching", plan="adakv"),
    "attention_matching+h2o+int8": pair("h2o", residual="attention_matching", codec="int8"),
    # A selection reads only some of what the score keeps, and all that a residual remembers.
    **{
        name: dataclasses.replace(
            pair("h2o", residual=residual, settings={"selection": "topk", "selection.k": 6}),
            oracle=oracle,
            equals_full=False,
        )
        for name, residual, oracle in (
            ("h2o+topk", None, SelectingH2O),
            ("less+h2o+topk", "less", less.less(SelectingH2O)),
            ("momentkv+h2o+topk", "momentkv", momentkv.momentkv(SelectingH2O)),
        )
    },
}
"""Parts that are combined: what no paper has tried together still means what its parts mean."""

RARE = {
    *("less+cur", "vase+int8", "less+rkv", "less+dropkv", "rkv+int8", "less+criticalkv"),
    *("snapkv+adakv", "scissorhands+adakv", "l2+adakv", "random+adakv", "h2o-cache-positions+adakv"),
    *("less+h2o+adakv", "less+keyformer+adakv", "less+lsh_e", "less+scissorhands", "less+pyramidkv"),
    *("full+int8", "scissorhands+int8", "lsh_e+int8", "topk_oracle+int8", "h2o+adakv+int8", "l2+adakv+int8"),
    *("less+streaming+int8", "h2o+int4"),
    *("keyformer+adakv", "snapkv-max+adakv", "dilated_window+adakv", "window+adakv", "h2o-protected+adakv"),
    *("window-cache-positions+adakv", "keyformer-cache-positions+adakv"),
    *("less+random", "less+window", "less+l2"),
    *("window+int8", "random+int8", "h2o-sequential+int8", "keyformer-shared+int8", "pyramidkv+int8", "l2+int8"),
    "fastgen-local+cache",
    *("momentkv+fastgen-low+int8", "lightkv-context+int8", "less+lightkv-context", "momentkv+fastgen-low"),
    *("cur-random+adakv", "keydiff-every-8+adakv", "streaming-every-8+adakv", "fastgen-low+int8"),
    *(f"{name}+adakv" for name in PROMPT_METHODS if name not in ("expected_attention", "lagkv", "chunkkv")),
    *(f"{name}+int8" for name in PROMPT_METHODS),
    *(f"less+{name}" for name in PROMPT_METHODS),
    *("attention_matching+l2", "attention_matching+tova", "attention_matching+h2o-pyramid"),
    *("momentkv+pyramidkv", "momentkv+h2o-sequential", "momentkv+snapkv", "momentkv+keyformer+adakv"),
    *("tova+int8", "snapkv+int4", "tova+int4", "snapkv+adakv+int8", "keyformer+adakv+int8", "less+streaming+adakv"),
}
"""Pairs whose parts meet in others as well."""
