"""The policies of the papers: combinations of parts with good defaults."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvjax.methods.fastgen import Profiled, TokenClasses
from kvjax.methods.h2o import Accumulated
from kvjax.methods.keyformer import GumbelSoftmax
from kvjax.methods.l2 import KeyNorm
from kvjax.methods.lightkv import AfterLimit, LambdaMask
from kvjax.methods.lightkv_score import LastQueries, RunningQueries
from kvjax.methods.lsh_e import Hamming
from kvjax.methods.random import Random
from kvjax.methods.recency import Dilated, Recency
from kvjax.methods.scissorhands import Persistence
from kvjax.methods.snapkv import PromptWindow
from kvjax.methods.tova import LastAttention
from kvjax.policies.allocation import Arithmetic, Pyramid, Unbounded
from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protection
from kvjax.policies.quantizer import Codec
from kvjax.policies.score import Score
from kvjax.policies.selection import TopK
from kvjax.types import check

WINDOWS: dict[str, type[LastQueries | RunningQueries]] = {"exact": LastQueries, "running": RunningQueries}


def combine(
    score: Score,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    special: tuple[int, ...] = (),
    positions: str = "original",
    **parts: Any,
) -> Policy:
    """A policy of a score and what nearly every policy has.

    Args:
        score: which cached token matters least.
        sinks: first tokens of the text that never leave.
        recent: newest tokens that never leave, the one being read included: slots, or a fraction of the budget.
        special: token ids that leave only where no other token can.
        positions: `original`, or `cache` to let the model see a key's place in the cache as its position.
        parts: others, in place of the usual ones.
    """
    usual = Policy(score, Protection(sinks, recent, special), codec=Codec(positions))
    return dataclasses.replace(usual, **parts)


def full(**common: Any) -> Policy:
    """Keep every token of the prompt and of `max_new_tokens`; beyond that, logits are NaN.

    When: wherever it fits. With half of the slots most policies lose 5 to 10% in perplexity (SmolLM2 on WikiText-2).
    """
    return combine(Recency(), plan=Unbounded(), **common)


def window(**common: Any) -> Policy:
    """The most recent tokens: the oldest leaves first (Longformer's sliding window as a cache).

    When: as a control. SmolLM2 leans on its first tokens: at a quarter of the slots its perplexity is 36.8 here and
    17.3 under `lambda_mask`, which holds four of them besides.
    """
    return combine(Recency(), **common)


def dilated_window(*, dilation: int = Dilated.dilation, **common: Any) -> Policy:
    """A window with gaps: every (dilation + 1)-th token of the recent text and the newest one.

    When: as a control, beside `window`. SmolLM2 cannot do with gaps: its perplexity is 222 at a quarter of the slots
    (WikiText-2), where `window` has 36.8.
    """
    return combine(Dilated(dilation), **common)


def streaming(*, sinks: int = 4, positions: str = "cache", **common: Any) -> Policy:
    """The first tokens and the most recent ones, seen at their positions in the cache.

    When: where nothing may look at attention, or where text has no end: the embedded model, trained on 1,152
    positions, keeps its quality over 20,000 tokens on 256 slots.
    """
    return combine(Recency(), sinks=sinks, positions=positions, **common)


def lambda_mask(*, sinks: int = 4, **common: Any) -> Policy:
    """The first tokens and the most recent ones, seen at their positions in the text.

    When: as `streaming` within the trained length, where both have the same quality and its keys never have to be
    turned again; beyond it the embedded model loses up to 0.46 nats per token against `streaming`.
    """
    return combine(Recency(), sinks=sinks, **common)


def random(**common: Any) -> Policy:
    """A uniformly random subset of the text at every step: each token draws one priority, the lowest leaves.

    When: as the control that a method has to beat: with sinks and a recent half it has a perplexity of 17.0 at a
    quarter of the slots (SmolLM2 on WikiText-2), where `h2o` has 14.9.
    """
    return combine(Random(), **common)


def h2o(*, recent: int | float = 0.5, **common: Any) -> Policy:
    """Heavy hitters by accumulated attention.

    When: first, where text goes on. Among policies that only evict it is ahead on WikiText-2 at every budget
    (SmolLM2, perplexity 12.6 with the full cache): 13.2 with half of the slots, 14.9 with a quarter, 18.0 with a
    tenth.
    """
    return combine(Accumulated(), recent=recent, **common)


def keyformer(
    *,
    noise: str = GumbelSoftmax.noise,
    tau_init: float = GumbelSoftmax.tau_init,
    tau_end: float = GumbelSoftmax.tau_end,
    recent: int | float = 0.25,
    fresh_noise: bool = GumbelSoftmax.fresh_noise,
    shared: bool = GumbelSoftmax.shared,
    damping: float = GumbelSoftmax.damping,
    **common: Any,
) -> Policy:
    """Key tokens by accumulated Gumbel softmax.

    When: as an alternative to `h2o` at a quarter of the slots or more, where they are level (14.9 in perplexity,
    SmolLM2 on WikiText-2); with a tenth it is behind, 20.5 against 18.0.
    """
    return combine(GumbelSoftmax(noise, tau_init, tau_end, fresh_noise, shared, damping), recent=recent, **common)


def tova(*, recent: int | float = 1, **common: Any) -> Policy:
    """Last attention, one score for all heads of a layer.

    When: where a long prompt is going to be asked about: it finds a needle in the middle of 1,024 tokens with half (4
    of 4) and a quarter of the slots (2 of 4), where `h2o` finds none. For text that goes on `h2o` is ahead.
    """
    return combine(LastAttention(), recent=recent, **common)


def scissorhands(*, history: int = Persistence.history, recent: int | float = 0.25, **common: Any) -> Policy:
    """Persistence of importance over a history window.

    When: next to `h2o` with half of the slots (13.3 against 13.2 in perplexity, SmolLM2 on WikiText-2); with a
    quarter it lies between `h2o` and `streaming`.
    """
    return combine(Persistence(history), recent=recent, **common)


def snapkv(
    *,
    recent: int | float = PromptWindow.window,
    kernel: int = PromptWindow.kernel,
    pooling: str = PromptWindow.pooling,
    group: str = PromptWindow.group,
    **common: Any,
) -> Policy:
    """Attention of the last `recent` prompt queries, pooled over neighbours.

    When: where a long prompt is followed by little text. It ranks the prompt once: where half of the text is written
    afterwards it is behind `streaming`, 18.3 against 17.4 at a quarter of the slots (SmolLM2 on WikiText-2).
    """
    return combine(PromptWindow(recent, kernel, pooling, group), recent=recent, **common)


def pyramidkv(
    *,
    beta: float = Pyramid.beta,
    recent: int | float = PromptWindow.window,
    kernel: int = PromptWindow.kernel,
    pooling: str = PromptWindow.pooling,
    group: str = PromptWindow.group,
    **common: Any,
) -> Policy:
    """SnapKV with budgets that fall from the first layer to the last, which gets 1/beta beyond the window.

    When: to compare with `snapkv`, which is ahead of it at every budget here: 18.3 against 20.5 in perplexity at a
    quarter of the slots (SmolLM2 on WikiText-2).
    """
    plan = Pyramid(beta, recent if isinstance(recent, int) else 0)
    return combine(PromptWindow(recent, kernel, pooling, group), recent=recent, plan=plan, **common)


def lightkv(
    *,
    omega: float = LambdaMask.omega,
    alpha: int | None = LastQueries.alpha,
    window: str = "exact",
    middle: str = "rest",
    context_limit: int | None = AfterLimit.context_limit,
    ratio: float = Arithmetic.ratio,
    offload: bool = LastQueries.offload,
    sinks: int = 0,
    recent: int | float = 0,
    special: tuple[int, ...] = (),
    **common: Any,
) -> Policy:
    """Sinks and streaming tokens by a mask, the middle by attention of the last queries, fewer slots in higher layers.

    When: on text like books, where `window="running"` is level with `h2o` at a tenth of the slots; on WikiText-2
    `h2o` is ahead (15.9 against 14.9 in perplexity at a quarter). The exact window keeps queries and looks at them at
    every step.

    Args:
        window: `exact` for the last alpha queries, which are kept and count anew; `running` for two sums instead.
        middle: `rest` (eq. 6), or `mask` for as many middle tokens as there are sinks (the example of section 4).
        ratio: slots of the first layer over those of the last, at least 1.
    """
    check(window in WINDOWS, "window", window, "'exact' or 'running'")
    check(middle in ("rest", "mask"), "middle", middle, "'rest' or 'mask'")
    mask = LambdaMask(sinks, recent, special, omega)
    plan = AfterLimit(Arithmetic(ratio), context_limit, mask if middle == "mask" else None)
    return combine(WINDOWS[window](alpha, offload), protection=mask, plan=plan, **common)


def l2(*, skip_layers: int = KeyNorm.skip_layers, **common: Any) -> Policy:
    """The norm of the key, which rotary embeddings do not change: the largest leaves first.

    When: as a control. Alone it lets go of the recent tokens: 140 in perplexity at a quarter of the slots, 17.3 with
    `sinks=4 recent=0.5`, where `random` has 17.0 (SmolLM2 on WikiText-2).
    """
    return combine(KeyNorm(skip_layers), **common)


def lsh_e(
    *,
    bits: int = Hamming.bits,
    prompt: str = Hamming.prompt,
    seed: int = Hamming.seed,
    sinks: int = 4,
    recent: int | float = 10,
    **common: Any,
) -> Policy:
    """Hamming distance between hashes of the newest query and of the keys, at every step anew.

    When: where attention cannot be looked at and tokens shall be chosen by content: at a quarter of the slots it is
    level with `streaming` (17.5 against 17.4 in perplexity, SmolLM2 on WikiText-2), with fewer behind it.
    """
    return combine(Hamming(bits, prompt, seed), sinks=sinks, recent=recent, **common)


def topk_oracle(*, k: int | float | None = TopK.k, **common: Any) -> Policy:
    """The k strongest keys of every query, chosen with a full cache: it frees nothing and says so.

    When: to see how little of a cache attention needs: with the strongest tenth of what is held perplexity is 13.8,
    with all of it 12.6 (SmolLM2 on WikiText-2), where `h2o` with a tenth of the slots has 18.0.
    """
    return combine(Recency(), plan=Unbounded(), selection=TopK(k), **common)


def fastgen(
    *,
    threshold: float = Profiled.threshold,
    local: float = Profiled.local,
    frequent: float = Profiled.frequent,
    frequent_among: str = Profiled.frequent_among,
    order: tuple[str, ...] = Profiled.order,
    punctuation: tuple[int, ...] = TokenClasses.punctuation,
    markers: tuple[tuple[int, ...], ...] = TokenClasses.markers,
    spare_special: int = Profiled.spare_special,
    spare_punctuation: float = Profiled.spare_punctuation,
    sinks: int = 0,
    recent: int = 0,
    special: tuple[int, ...] = (),
    **common: Any,
) -> Policy:
    """A cache of its own for every head, the cheapest that recovers the prompt's attention.

    When: close to the full cache only: a threshold of 0.95 saves 15% of the bytes for 12% in perplexity, and below
    0.8 it collapses (SmolLM2 on WikiText-2).
    """
    kept = TokenClasses(sinks, recent, special, punctuation, markers)
    plan = Profiled(threshold, local, frequent, order, spare_special, spare_punctuation, recent, frequent_among)
    return combine(Accumulated(), protection=kept, plan=plan, **common)
