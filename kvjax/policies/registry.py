"""The policies by name: combinations of parts with good defaults. The only place that knows names."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.cache.codec import CODECS as CODECS
from kvjax.cache.codec import Codec, codec
from kvjax.policies.fastgen import Profiled, TokenClasses
from kvjax.policies.lightkv import AfterLimit, LambdaMask
from kvjax.policies.pairs import fitted
from kvjax.policies.plan import AdaKV, Arithmetic, Interleaved, Plan, Pyramid, Unbounded, Uniform
from kvjax.policies.policy import Policy
from kvjax.policies.protection import Protection
from kvjax.policies.residual import Residual
from kvjax.policies.residuals.less import LowRankMemory
from kvjax.policies.score import Score
from kvjax.policies.scores.h2o import Accumulated
from kvjax.policies.scores.keyformer import GumbelSoftmax
from kvjax.policies.scores.l2 import KeyNorm
from kvjax.policies.scores.lightkv import LastQueries, RunningQueries
from kvjax.policies.scores.lsh_e import Hamming
from kvjax.policies.scores.random import Random
from kvjax.policies.scores.recency import Dilated, Recency
from kvjax.policies.scores.scissorhands import Persistence
from kvjax.policies.scores.snapkv import PromptWindow
from kvjax.policies.scores.tova import LastAttention
from kvjax.policies.selection import Selection, TopK
from kvjax.types import check, check_kind

PLANS: dict[str, type[Plan]] = {
    "uniform": Uniform,
    "arithmetic": Arithmetic,
    "pyramid": Pyramid,
    "interleaved": Interleaved,
    "adakv": AdaKV,
}
RESIDUALS: dict[str, type[Residual]] = {"less": LowRankMemory}
SELECTIONS: dict[str, type[Selection]] = {"topk": TopK}
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
        special: token ids that never leave.
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


def less(
    *,
    base: str | Policy = "h2o",
    checkpoint: str = LowRankMemory.checkpoint,
    kernels: Any = LowRankMemory.kernels,
    features: int = LowRankMemory.features,
    kernel_seed: int = LowRankMemory.kernel_seed,
    **settings: Any,
) -> Policy:
    """Any policy, whose evicted pairs stay in R x d + R numbers per KV head; further settings are the base's.

    When: with a small budget and kernels trained for the model: over `h2o` 23.8 in perplexity becomes 21.2 with 5% of
    the slots, 49.5 becomes 32.1 with 2% (SmolLM2 on WikiText-2); with half of them there is nothing left to gain.

    Args:
        base: the policy that evicts, by name or made.
    """
    chosen = _base(base, settings)
    memory = dict(checkpoint=checkpoint, kernels=kernels, features=features, kernel_seed=kernel_seed)
    return dataclasses.replace(chosen, residual=residual_by_name("less", base=name_of(chosen), **memory))


def baseline_plus(*, base: str | Policy = "h2o", features: int = 8, **settings: Any) -> Policy:
    r"""Any policy with R/2 more slots per head: R x d numbers are R/2 keys and as many values.

    .. math:: C^+ = C + R / 2

    When: as the control for `less` at equal memory. With 5 and 10% of the slots these close 2 to 8% of the distance
    to the full cache, LESS's kernels 32 to 59% (embedded model).

    Args:
        base: the policy that evicts, by name or made.
        features: R, an even number from 2.
    """
    even = isinstance(features, int) and features >= 2 and features % 2 == 0
    check(even, "features", features, "an even number from 2")
    chosen = _base(base, settings)
    return dataclasses.replace(chosen, plan=dataclasses.replace(chosen.plan, extra_slots=features // 2))


def _base(base: str | Policy, settings: Mapping[str, Any]) -> Policy:
    if isinstance(base, str):
        return policy(base, **settings)
    check(isinstance(base, Policy), "base", base, "the name of a policy, nor one that is made")
    for name in settings:
        raise ValueError(f"{name} is no setting beside a base that is made; set it on the base policy that you pass.")
    return base


Method = Callable[..., Policy]
METHODS: tuple[Method, ...] = (
    full,
    window,
    dilated_window,
    streaming,
    lambda_mask,
    random,
    h2o,
    keyformer,
    tova,
    scissorhands,
    snapkv,
    pyramidkv,
    lightkv,
    l2,
    lsh_e,
    topk_oracle,
    fastgen,
    less,
    baseline_plus,
)
REGISTRY: dict[str, Method] = {method.__name__: method for method in METHODS}
PAPERS: dict[str, dict[str, str]] = {
    "everything stays": {"full": "the reference", "topk_oracle": "LESS, Figure 3"},
    "what stays is a matter of position": {
        "window": "Longformer, 3.1",
        "dilated_window": "Longformer, 3.1; Keyformer, Figure 2c",
        "streaming": "StreamingLLM, 3.2",
        "lambda_mask": "LM-Infinite, 3",
    },
    "what stays is a matter of attention": {
        "h2o": "H2O, Algorithm 1",
        "keyformer": "Keyformer, eq. 9, 10",
        "tova": "TOVA, 4",
        "scissorhands": "Scissorhands, Algorithm 2",
        "snapkv": "SnapKV, Listing 1",
        "pyramidkv": "PyramidKV, 3.2",
        "lightkv": "LightKV, eq. 1-6",
        "fastgen": "FastGen, eq. 1, 2",
    },
    "what stays is a matter of keys, or of chance": {
        "lsh_e": "LSH-E, eq. 2, 5, 6",
        "l2": "Devoto et al. 2024",
        "random": "control",
    },
    "over another policy": {"less": "LESS, eq. 1-5", "baseline_plus": "LESS, 4"},
}
"""Where the policies come from, in groups by what they choose with."""


def policy(
    name: str | Policy,
    *,
    plan: str | Plan | None = None,
    residual: str | Residual | None = None,
    codec: str | Codec | None = None,
    selection: str | Selection | None = None,
    **settings: Any,
) -> Policy:
    """A policy by name, with any of its parts replaced.

    Args:
        name: a key of `REGISTRY`; `FILE.py:NAME` for a policy or a score, or a function or class that makes one, in a
            file of your own, which is run; or a policy that is made.
        plan: how many slots each layer and head may use: a key of `PLANS`, or one that is made.
        residual: what becomes of evicted pairs: `less`, or one that is made.
        codec: how a slot lies in memory: `plain`, `int8`, `int4`, or one that is made.
        selection: which of the held tokens a query reads: `topk`, or one that is made.
        settings: the policy's own, see its function; those of the other parts by the part's name and a dot, as
            `**{"residual.kernels": "performer"}`.

    Raises:
        ValueError: a name or a setting is unknown, a value is out of range, or parts mean nothing together.

    Example:
        >>> policy = kvjax.policy("keyformer", recent=0.25, plan="adakv", codec="int8", **{"plan.floor": 0.3})
        >>> policy.protection, policy.plan
        (Protection(sinks=0, recent=0.25, special=()), AdaKV(extra_slots=0, floor=0.3))
    """
    of_parts, own = _by_part(settings)
    made = _registered(name, own) if isinstance(name, str) else name
    if not isinstance(made, Policy):
        raise TypeError(f"a policy is a name or a kvjax.Policy, not {_described(made)}.")
    if made is name and own:
        raise ValueError(f"{next(iter(own))} is no setting beside a policy that is made; set it on the parts you pass.")
    return replaced(made, plan, residual, codec, selection, of_parts)


def _registered(name: str, own: Mapping[str, Any]) -> Policy:
    file, colon, attribute = name.rpartition(":")
    if colon and file.endswith(".py"):
        return _from_file(Path(file).expanduser(), attribute, own)
    if name not in REGISTRY:
        raise ValueError(
            f"there is no policy {name!r}; choose one of {', '.join(REGISTRY)}, or one of your own as FILE.py:NAME."
        )
    known = settings_of(name)
    for setting in own:
        if setting not in known and "base" not in known:
            raise ValueError(f"policy {name!r} has no setting {setting!r}; it takes {', '.join(known)}.")
    made = REGISTRY[name](**_typed(own, annotations_of(REGISTRY[name]) | annotations_of(combine)))
    return made if name in ("less", "baseline_plus") else dataclasses.replace(made, name=name)


def _from_file(file: Path, attribute: str, own: Mapping[str, Any]) -> Policy:
    # A policy of somebody's own: made, or whatever makes one or its score from settings.
    if not file.is_file():
        raise ValueError(f"there is no file {file} to take policy {attribute!r} from.")
    name = f"own_policies_{file.stem}"
    module = sys.modules.get(name)
    if module is None or module.__file__ != str(file.absolute()):
        spec = importlib.util.spec_from_file_location(name, file.absolute())
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            raise ValueError(f"{file} cannot be run ({type(error).__name__}: {error}).") from error
    found = getattr(module, attribute, None)
    try:
        made = found(**own) if callable(found) else found
    except TypeError as error:
        raise ValueError(f"{file}: {attribute} cannot be made ({error}).") from error
    if made is found and own:
        raise ValueError(f"{next(iter(own))} is no setting of {attribute} in {file}, which is made already.")
    if isinstance(made, Score):
        made = Policy(made)
    if not isinstance(made, Policy):
        raise ValueError(f"{attribute} in {file} is no kvjax.Policy or Score, nor does it make one: {made!r}.")
    return made


def replaced(
    made: Policy,
    plan: str | Plan | None = None,
    residual: str | Residual | None = None,
    codec: str | Codec | None = None,
    selection: str | Selection | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Policy:
    """A policy with some of its parts replaced; see `policy`."""
    of_parts = {part: dict(values) for part, values in (settings or {}).items()}
    if residual is not None or "residual" in of_parts:
        memory = of_parts.pop("residual", {})
        if residual is None or isinstance(residual, str):
            named = "less" if residual is None else residual
            chosen = residual_by_name(named, **({"base": name_of(made)} | memory))
        else:
            chosen = _made("residual", RESIDUALS, residual, memory)
        made = dataclasses.replace(made, residual=chosen)
    if codec is not None:
        made = dataclasses.replace(made, codec=_codec(codec, made.codec.positions))
    if selection is not None or "selection" in of_parts:
        chosen_one = _made(
            "selection", SELECTIONS, "topk" if selection is None else selection, of_parts.pop("selection", {})
        )
        made = dataclasses.replace(made, selection=chosen_one)
    if plan is not None or "plan" in of_parts:
        if plan is None:
            raise ValueError(f"plan.{next(iter(of_parts['plan']))} is a setting of a plan; name one.")
        made = made.spread(_made("plan", PLANS, plan, of_parts.pop("plan", {})))
    return fitted(made)


def residual_by_name(name: str, **settings: Any) -> Residual:
    """A residual by name; `kernels` of LESS may be arrays.

    Raises:
        ValueError: there is no such residual, or no such setting.
    """
    arrays = {}
    if "kernels" in settings and not isinstance(settings["kernels"], str):
        arrays = {"layers": settings.pop("kernels")}
    return _made("residual", RESIDUALS, name, settings | arrays)


def plan_by_name(plan: Plan | str | None) -> Plan | None:
    """A plan given by name or made.

    Raises:
        ValueError: there is no such plan.
    """
    return None if plan is None else _made("plan", PLANS, plan, {})


def _made(part: str, table: Mapping[str, Any], given: Any, settings: Mapping[str, Any]) -> Any:
    if not isinstance(given, str):
        _none_left(part, settings)
        if not isinstance(given, _BASES[part]):
            raise TypeError(f"a {part} is a name or an instance of {_BASES[part].__name__}, not {_described(given)}.")
        return given
    if given not in table:
        raise ValueError(f"there is no {part} {given!r}; choose one of {', '.join(table)}.")
    known = [field.name for field in dataclasses.fields(table[given])]
    for setting in settings:
        if setting not in known:
            raise ValueError(f"{part} {given!r} has no setting {setting!r}; it takes {', '.join(known)}.")
    return table[given](**_typed(settings, {field.name: field.type for field in dataclasses.fields(table[given])}))


def _typed(settings: Mapping[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    # Settings in the types that parts want, whether a program, a command line or a file gave them.
    typed: dict[str, Any] = {}
    for name, value in settings.items():
        if value is None and annotations.get(name) == "str":
            value = "none"  # a command line's `noise=none` is the word
        elif isinstance(value, list):
            value = tuple(value)
        elif isinstance(value, np.generic):
            value = value.item()
        check_kind(name, value, annotations.get(name, ""))
        typed[name] = value
    return typed


_BASES: dict[str, type[Any]] = {"plan": Plan, "residual": Residual, "selection": Selection}


def _described(value: object) -> str:
    # What stands where a part or a policy belongs, and what was meant.
    if isinstance(value, type):
        return f"the class {value.__name__}; give an instance, {value.__name__}()"
    if isinstance(value, Score):
        return f"a score; give kvjax.Policy({type(value).__name__}(...))"
    return repr(value)


def _none_left(part: str, settings: Mapping[str, Any]) -> None:
    for name in settings:
        raise ValueError(f"{part}.{name} is no setting beside a {part} that is made; set it on the {part} you pass.")


def _codec(given: str | Codec, positions: str) -> Codec:
    if not isinstance(given, (str, Codec)):
        raise TypeError(f"a codec is a name or an instance of Codec, not {_described(given)}.")
    return codec(given, positions) if isinstance(given, str) else given


def _by_part(settings: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    # Settings with a dot by part, and the rest.
    of_parts: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in settings.items():
        part, dot, setting = name.partition(".")
        if not dot:
            own[name] = value
            continue
        if part not in ("plan", "residual", "selection"):
            raise ValueError(
                f"{name}={value!r} is no setting of a part; parts with settings are plan, residual, selection."
            )
        of_parts.setdefault(part, {})[setting] = value
    return of_parts, own


def settings_of(name: str) -> dict[str, Any]:
    """A policy's settings and their defaults."""
    method = REGISTRY[name]
    takes = inspect.signature(method).parameters
    own = _keywords(method)
    return own | ({k: v for k, v in _keywords(combine).items() if k not in own} if "common" in takes else {})


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The types that a function's parameters say they have."""
    return {p.name: p.annotation for p in inspect.signature(function).parameters.values()}


def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def settings_in(made: Policy) -> dict[str, Any]:
    """A policy's settings as its function takes them, read off its parts; those of a residual are not among them.

    Settings of a part that has been replaced are left out, and somebody's own policy has those of its score.
    """
    own = [field.name for field in dataclasses.fields(made.score)]  # type: ignore[arg-type]
    names = settings_of(made.name) if made.name in REGISTRY else [*own, *_keywords(combine)]
    inner = getattr(made.plan, "plan", None)
    parts = (made.score, made.protection, made.plan, inner, made.selection, made.codec)
    found = {name: getattr(part, name) for name in names for part in reversed(parts) if hasattr(part, name)}
    if made.plan.extra_slots:
        return {"base": made.name, "features": 2 * made.plan.extra_slots} | found
    return found


def name_of(policy: Policy) -> str:
    """The registered name of a policy, or its score's class if it is somebody's own."""
    if isinstance(policy.residual, LowRankMemory):
        return "less"
    if policy.plan.extra_slots:
        return "baseline_plus"
    return policy.name or type(policy.score).__name__
