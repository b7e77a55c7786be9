"""Decorators that register methods and parts by name, each in the file of its method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar, get_args

from kvjax.policies.allocation import Plan, Uniform
from kvjax.policies.policy import Policy
from kvjax.policies.quantizer import CODECS, Quantizer
from kvjax.policies.residual import Residual
from kvjax.policies.selection import Selection
from kvjax.utils.suggest import choices

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
PLANS: dict[str, type[Plan]] = {"uniform": Uniform}
RESIDUALS: dict[str, type[Residual]] = {}
SELECTIONS: dict[str, type[Selection]] = {}

_M = TypeVar("_M", bound=Method)
_P = TypeVar("_P", bound="type[Plan | Residual | Quantizer | Selection]")


def register(*, paper: str, group: Group) -> Callable[[_M], _M]:
    """Register a function that returns a policy, under the function's name.

    Args:
        paper: the source of the method, with the section, equation or algorithm.
        group: a key of `PAPERS`.

    Raises:
        ValueError: there is no such group, or another module has registered the name.

    Example:
        >>> from kvjax.methods.register import register
        >>> @register(paper="H2O, Algorithm 1", group="ranked by attention at every token")  # doctest: +SKIP
        ... def h2o(*, recent: int | float = 0.5, **common: Any) -> Policy:
        ...     return combine(Accumulated(), recent=recent, **common)
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


def register_part(name: str) -> Callable[[_P], _P]:
    """Register a class of plans, residuals, quantizers or selections.

    Args:
        name: its key in `PLANS`, `RESIDUALS`, `CODECS` or `SELECTIONS`.

    Raises:
        TypeError: the class is not a plan, residual, quantizer or selection.
        ValueError: another module has registered the name.
    """

    def registered(kind: _P) -> _P:
        if issubclass(kind, Plan):
            _insert("plan", PLANS, name, kind)
        elif issubclass(kind, Residual):
            _insert("residual", RESIDUALS, name, kind)
        elif issubclass(kind, Quantizer):
            _insert("codec", CODECS, name, kind)
        elif issubclass(kind, Selection):
            _insert("selection", SELECTIONS, name, kind)
        else:
            kinds = "Plan, Residual, Quantizer or Selection"
            raise TypeError(f"{kind.__name__} is no {kinds}; derive it from one of these.")
        return kind

    return registered


def _insert(what: str, table: dict[str, Any], name: str, made: Any) -> None:
    # The same module may register a name again, as a cell of a notebook that is run twice does.
    known = table.get(name)
    if known is not None and known.__module__ != made.__module__:
        raise ValueError(f"{what} {name!r} is already registered by {known.__module__}; choose another name.")
    table[name] = made
    _sort(table)


def _sort(table: dict[str, Any]) -> None:
    # The order of names must not depend on the order in which modules are imported.
    ordered = sorted(table.items())
    table.clear()
    table.update(ordered)
