"""Decorators that register methods and parts by name, each in the file of its method, and how most make a policy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from kvjax.policies import Codec, Plan, Policy, Protection, Residual, Score, Selection, Uniform
from kvjax.policies.quantizer import CODECS, Quantizer
from kvjax.types import setting_names
from kvjax.utils.suggest import choices

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Method = Callable[..., Policy]
Group = Literal[
    "nothing is evicted",
    "ranked by position",
    "ranked by keys, values or chance, without attention",
    "ranked by attention at every token",
    "ranked once for each prompt or turn",
    "ranked with arrays calibrated on a text",
    "over another policy",
]
"""Groups of methods by the data that rank tokens, in the order of all lists."""

REGISTRY: dict[str, Method] = {}
"""The functions that make policies, by name."""
PAPERS: dict[str, dict[str, str]] = {group: {} for group in get_args(Group)}
"""Sources of the policies, in groups by the data that rank tokens."""
PLANS: dict[str, type[Plan]] = {}
RESIDUALS: dict[str, type[Residual]] = {}
SELECTIONS: dict[str, type[Selection]] = {}
TABLES: dict[str, dict[str, Any]] = {"plan": PLANS, "residual": RESIDUALS, "codec": CODECS, "selection": SELECTIONS}
BASES: dict[str, type[Any]] = {"plan": Plan, "residual": Residual, "codec": Quantizer, "selection": Selection}

_M = TypeVar("_M", bound=Method)
_S = TypeVar("_S", bound="type[Score | Plan]")
_P = TypeVar("_P", bound="type[Plan | Residual | Quantizer | Selection]")


def combine(
    score: Score,
    *,
    sinks: int = 0,
    recent: int | float = 0,
    special: tuple[int, ...] = (),
    positions: str = "original",
    evict_every: int = 1,
    **parts: Any,
) -> Policy:
    """Return a policy with a score, a protection, and settings that nearly every policy has.

    Args:
        score: ranks the cached tokens; the lowest one is evicted first.
        sinks: first tokens of the text, which are never evicted.
        recent: newest tokens, which are never evicted, the one being read included: slots, or a fraction of the budget.
        special: token ids that are evicted only if no other token can be.
        positions: `original` to rotate keys by their positions in the text, or `cache` by their rank among the cached
            tokens.
        evict_every: number of tokens from one eviction to the next; in between a head grows beyond its budget.
        parts: further parts of the policy, as keywords of `Policy`.
    """
    policy = Policy(score, Protection(sinks, recent, special), codec=Codec(positions), evict_every=evict_every)
    return dataclasses.replace(policy, **parts)


def register(*, paper: str, group: Group) -> Callable[[_M], _M]:
    """Register a function that returns a policy, under the function's name.

    Args:
        paper: the source of the method, with the section, equation or algorithm.
        group: a key of `PAPERS`.

    Raises:
        ValueError: there is no such group, or another module has registered the name.

    Example:
        >>> from kvjax.methods.register import register
        >>> @register(paper="StreamingLLM, 3.2", group="ranked by position")  # doctest: +SKIP
        ... def streaming(*, sinks: int = 4, positions: str = "cache", **common: Any) -> Policy:
        ...     return combine(Recency(), sinks=sinks, positions=positions, **common)
    """
    if group not in PAPERS:
        raise ValueError(f"there is no group {group!r}; {choices(group, PAPERS)}")

    def registered(method: _M) -> _M:
        name = method.__name__
        _insert("policy", REGISTRY, name, method)
        for papers in PAPERS.values():
            papers.pop(name, None)
        PAPERS[group][name] = paper
        _sort(PAPERS[group])
        return method

    return registered


def register_score(
    name: str, *, paper: str, group: Group, make: Callable[..., Policy] = combine, **overrides: Any
) -> Callable[[_S], _S]:
    """Register a policy that consists of a class of scores and of what `combine` adds.

    Its settings are those of the score and those of `combine`. Settings of the same name, such as `recent`, are one.

    Args:
        name: name of the policy.
        paper: as in `register`.
        group: as in `register`.
        make: function that makes the policy from the score and the other settings; it may also take a plan.
        overrides: defaults of settings, where they differ from those of the score and of `combine`; or other parts.

    Example:
        >>> from kvjax.methods.register import register_score
        >>> @register_score("h2o", paper="H2O, Algorithm 1", group="...", recent=0.5)  # doctest: +SKIP
        ... class Accumulated(AccumulatedScore): ...
    """

    def registered(kind: _S) -> _S:
        score: Any = kind
        names = setting_names(score)
        fields = {field.name: field for field in dataclasses.fields(score) if field.name in names and not field.kw_only}
        common = {p.name: p for p in signature(combine).parameters.values() if p.kind is p.KEYWORD_ONLY}
        kinds = {name: p.annotation for name, p in common.items()} | {name: fields[name].type for name in fields}
        defaults: dict[str, Any] = {name: field.default for name, field in fields.items()}
        defaults |= {name: value for name, value in overrides.items() if name in kinds}

        def method(**settings: Any) -> Policy:
            arguments = overrides | defaults | settings
            of_make = {name: value for name, value in arguments.items() if name in common or name not in fields}
            return make(score(**{name: arguments[name] for name in fields}), **of_make)

        takes = [
            Parameter(setting, Parameter.KEYWORD_ONLY, default=value, annotation=kinds[setting])
            for setting, value in defaults.items()
        ]
        functools.update_wrapper(method, kind, ("__module__", "__doc__"), ())
        method.__name__ = name
        method.__signature__ = signature(method).replace(  # type: ignore[attr-defined]
            parameters=[*takes, Parameter("common", Parameter.VAR_KEYWORD)]
        )
        register(paper=paper, group=group)(method)
        return kind

    return registered


def register_part(name: str) -> Callable[[_P], _P]:
    """Register a class of plans, residuals, quantizers or selections.

    Args:
        name: its key in `PLANS`, `RESIDUALS`, `CODECS` or `SELECTIONS`.

    Raises:
        TypeError: the class is not a plan, residual, quantizer or selection.
        ValueError: another module has registered the name.
    """

    def registered(kind: _P) -> _P:
        for part, base in BASES.items():
            if issubclass(kind, base):
                _insert(part, TABLES[part], name, kind)
                kind._registered = name  # type: ignore[attr-defined]
                return kind
        kinds = "Plan, Residual, Quantizer or Selection"
        raise TypeError(f"{kind.__name__} is no {kinds}; derive it from one of these.")

    return registered


GROUP = "kvjax.policies"
"""Group of entry points in which packages name their own methods and parts."""


def installed() -> dict[str, EntryPoint]:
    """Return the entry points of installed packages by name; importing one registers a method or a part."""
    from importlib.metadata import entry_points  # slow to import

    return {point.name: point for point in entry_points(group=GROUP)}


def load_installed(name: str, *tables: Mapping[str, Any]) -> None:
    """Import what an installed package offers by a name that is in none of the tables.

    Raises:
        ValueError: it cannot be imported, or it does not register the name.
    """
    if any(name in table for table in tables) or not name.isidentifier() or (point := installed().get(name)) is None:
        return
    try:
        point.load()
    except Exception as error:
        raise ValueError(f"{name} of {point.value} cannot be imported ({type(error).__name__}: {error}).") from error
    if not any(name in table for table in (REGISTRY, *TABLES.values())):
        raise ValueError(f"{point.value} does not register {name!r}; decorate it with kvjax.methods.register there.")


def _insert(what: str, table: dict[str, Any], name: str, entry: Any) -> None:
    # The same module may register a name again, as a cell of a notebook that is run twice does.
    previous = table.get(name)
    if previous is not None and previous.__module__ != entry.__module__:
        raise ValueError(f"{what} {name!r} is already registered by {previous.__module__}; choose another name.")
    table[name] = entry
    _sort(table)


def _sort(table: dict[str, Any]) -> None:
    # The order of names must not depend on the order in which modules are imported.
    ordered = sorted(table.items())
    table.clear()
    table.update(ordered)


register_part("uniform")(Uniform)
