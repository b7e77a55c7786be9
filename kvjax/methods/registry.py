"""Policies and their parts by name. This module imports every module of its folder, which registers its methods."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvjax.methods.compatibility import fitted
from kvjax.methods.register import BASES, REGISTRY, RESIDUALS, TABLES, combine, load_installed
from kvjax.policies import Codec, Plan, Policy, Quantizer, Residual, Score, Selection
from kvjax.types import check, check_kind
from kvjax.utils.files import expanded
from kvjax.utils.suggest import choices

_NAMEABLE = (Policy, Score, *BASES.values())
"""Types of the objects in a file that can be named."""
_USUAL = {"residual": "less", "selection": "topk"}
"""Parts that are meant if only their settings are given."""


def policy(
    name: str | Policy,
    *,
    plan: str | Plan | None = None,
    residual: str | Residual | None = None,
    codec: str | Codec | Quantizer | None = None,
    selection: str | Selection | None = None,
    **settings: Any,
) -> Policy:
    """Return a policy by name, with any of its parts replaced.

    Args:
        name: a key of `REGISTRY`; a `Policy`; or `FILE.py:NAME` for a policy, a score, or a function or class that
            returns one, in a file of your own, which is executed.
        plan: number of slots of each layer and head: a key of `PLANS`, or a `Plan`.
        residual: memory of evicted pairs: `less`, `momentkv`, `attention_matching`, or a `Residual`.
        codec: storage of a slot: `plain`, `int8`, `int4`, `fp8`, a `Quantizer`, or a `Codec`, which also sets the
            positions of keys.
        selection: cached tokens to which a query attends: `topk`, or a `Selection`.
        settings: settings of the policy, see its function; those of another part with the part's name and a dot in
            front, for example `**{"residual.kernels": "performer"}`.

    Parts may also be named as `FILE.py:NAME`.

    Raises:
        ValueError: a name or a setting is unknown, a value is out of range, or parts are incompatible.

    Example:
        >>> policy = kvjax.policy("keyformer", recent=0.25, plan="adakv", codec="int8", **{"plan.floor": 0.3})
        >>> policy.protection.recent, policy.plan
        (0.25, AdaKV(extra_slots=0, floor=0.3, over='layer'))
    """
    of_parts, own = _by_part(settings)
    made = _registered(name, own) if isinstance(name, str) else name
    if not isinstance(made, Policy):
        raise TypeError(f"a policy is a name or a kvjax.Policy, not {_described(made)}.")
    if made is name and own:
        raise ValueError(f"{next(iter(own))} cannot be set for a policy that is an instance; set it on its parts.")
    return replaced(made, plan, residual, codec, selection, of_parts)


def _registered(name: str, own: Mapping[str, Any]) -> Policy:
    if names_file(name):
        return _from_file(name, own)
    load_installed(name, REGISTRY)
    if name not in REGISTRY:
        head = name.partition("+")[0].partition("[")[0]
        if head in REGISTRY:
            raise ValueError(
                f"there is no policy {name!r}; commands take parts and settings in its name, and Python takes them as "
                f"arguments: kvjax.policy({head!r}, codec='int8', recent=16)."
            )
        raise ValueError(
            f"there is no policy {name!r}; {choices(name, REGISTRY, ', or one of your own as FILE.py:NAME')}"
        )
    known = settings_of(name)
    for setting in own:
        if setting not in known and "base" not in known:
            raise ValueError(f"policy {name!r} has no setting {setting!r}; {choices(setting, known, lead='it takes')}")
    made = REGISTRY[name](**_typed(own, annotations_of(REGISTRY[name]) | annotations_of(combine)))
    # A policy over another one keeps the other's name.
    return made if "base" in known else dataclasses.replace(made, name=name)


def base_policy(base: str | Policy, settings: Mapping[str, Any]) -> Policy:
    """Return the base of a policy over another one; raises ValueError if it is neither a name nor a policy."""
    check(isinstance(base, str | Policy), "base", base, "a policy name or a Policy instance")
    return policy(base, **settings)


def names_file(name: str) -> bool:
    """Return whether a name has the form `FILE.py:NAME`."""
    return name.rpartition(":")[0].endswith(".py")


def from_file(what: str, name: str) -> Any:
    """Return the object that `FILE.py:NAME` names; `what` it should be is for the error."""
    path, _, attribute = name.rpartition(":")
    file = expanded(path)
    if not file.is_file():
        raise ValueError(f"there is no file {file} to take {what} {attribute!r} from.")
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
    if not hasattr(module, attribute):
        own = [each for each, value in vars(module).items() if _defined_in(module.__name__, value)]
        raise ValueError(f"{file} has no {attribute!r}; {choices(attribute, own, lead='it has')}")
    return getattr(module, attribute)


def _defined_in(module: str, value: Any) -> bool:
    return isinstance(value, _NAMEABLE) or (callable(value) and getattr(value, "__module__", "") == module)


def _from_file(name: str, own: Mapping[str, Any]) -> Policy:
    # A policy of somebody's own: made, or whatever makes one or its score from settings.
    found = from_file("policy", name)
    file, _, attribute = name.rpartition(":")
    file = expanded(file)
    # What every policy has is no setting of the score, unless it says so.
    takes = inspect.signature(found).parameters if callable(found) else {}
    all_of_them = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    usual = [] if all_of_them else [name for name in _keywords(combine) if name in own and name not in takes]
    common = _typed({name: own[name] for name in usual}, annotations_of(combine))
    own = {name: value for name, value in own.items() if name not in common}
    for setting in own if callable(found) and not all_of_them else ():
        if setting not in takes:
            known = dict.fromkeys([*takes, *_keywords(combine)])
            raise ValueError(
                f"{attribute} in {file} has no setting {setting!r}; {choices(setting, known, lead='it takes')}"
            )
    try:
        made = found(**own) if callable(found) else found
    except TypeError as error:
        raise ValueError(f"{file}: {attribute} cannot be constructed ({error}).") from error
    if made is found and own:
        raise ValueError(f"{next(iter(own))} cannot be set: {attribute} in {file} is already an instance.")
    if isinstance(made, Score):
        made = combine(made, **common)
        if not common.keys() & {"sinks", "recent", "special"}:
            warnings.warn(
                f"{attribute} protects no tokens, not even the newest ones; recent=0.5 keeps the "
                "newest half of the budget, as most policies here do, and recent=0 turns this note off.",
                stacklevel=4,
            )
    elif isinstance(made, Policy) and common:
        codec = dataclasses.replace(made.codec, positions=common.pop("positions", made.codec.positions))
        every = common.pop("evict_every", made.evict_every)
        protection = dataclasses.replace(made.protection, **common)
        made = dataclasses.replace(made, protection=protection, codec=codec, evict_every=every)
    if not isinstance(made, Policy):
        raise ValueError(f"{attribute} in {file} is not a kvjax.Policy or Score and does not return one: {made!r}.")
    return made


def replaced(
    made: Policy,
    plan: str | Plan | None = None,
    residual: str | Residual | None = None,
    codec: str | Codec | Quantizer | None = None,
    selection: str | Selection | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Policy:
    """Return a policy with some of its parts replaced; see `policy`."""
    for part, given in {"residual": residual, "codec": codec, "selection": selection, "plan": plan}.items():
        own = (settings or {}).get(part, {})
        if given is None and own:
            if part not in _USUAL:
                raise ValueError(f"{part}.{next(iter(own))} is a setting of a {part}; name one.")
            given = _USUAL[part]
        if given is None:
            continue
        if part == "codec" and isinstance(given, Codec):
            _none_left(part, own)
            made = dataclasses.replace(made, codec=given)
        elif part == "codec":
            # A quantizer keeps the positions of keys, and a codec brings its own.
            made = dataclasses.replace(made, codec=dataclasses.replace(made.codec, quantizer=_made(part, given, own)))
        elif part == "plan":
            made = made.spread(_made(part, given, own))
        else:
            by_name = part == "residual" and isinstance(given, str)
            chosen: Any = residual_by_name(given, **own) if by_name else _made(part, given, own)
            if by_name and "base" in {field.name for field in dataclasses.fields(chosen)} - own.keys():
                chosen = dataclasses.replace(chosen, base=name_of(made))
            made = dataclasses.replace(made, **{part: chosen})
    return fitted(made)


def residual_by_name(name: str, **settings: Any) -> Residual:
    """Return a residual by name, with its settings.

    Raises:
        ValueError: the name or a setting is unknown.
    """
    if not isinstance(settings.get("kernels", ""), str):
        settings["layers"] = settings.pop("kernels")
    return _made("residual", name, settings)


def _made(part: str, given: Any, settings: Mapping[str, Any]) -> Any:
    base, table, name = BASES[part], TABLES[part], given
    if isinstance(name, str):
        load_installed(name, table)
        if not names_file(name) and name not in table:
            raise ValueError(f"there is no {part} {name!r}; {choices(name, table)}")
        given = from_file(part, name) if names_file(name) else table[name]
        if isinstance(given, type) and issubclass(given, base):
            known = {field.name: field.type for field in dataclasses.fields(given)}
            for setting in settings:
                if setting not in known:
                    hint = choices(setting, known, lead="it takes")
                    raise ValueError(f"{part} {name!r} has no setting {setting!r}; {hint}")
            return given(**_typed(settings, known))
        if not isinstance(given, base):
            raise ValueError(f"{name} is no {base.__name__}, neither a class nor an instance: {given!r}.")
    _none_left(part, settings)
    if not isinstance(given, base):
        raise TypeError(f"a {part} is a name or an instance of {base.__name__}, not {_described(given)}.")
    return given


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


def _described(value: object) -> str:
    # What stands where a part or a policy belongs, and what was meant.
    if isinstance(value, type):
        return f"the class {value.__name__}; give an instance, {value.__name__}()"
    if isinstance(value, Score):
        return f"a score; give kvjax.Policy({type(value).__name__}(...))"
    return repr(value)


def _none_left(part: str, settings: Mapping[str, Any]) -> None:
    for name in settings:
        raise ValueError(f"{part}.{name} cannot be set for a {part} that is an instance; set it on that {part}.")


def _by_part(settings: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    # Settings with a dot by part, and the rest.
    of_parts: dict[str, dict[str, Any]] = {}
    own: dict[str, Any] = {}
    for name, value in settings.items():
        part, dot, setting = name.partition(".")
        if not dot:
            own[name] = value
            continue
        if part not in BASES:
            raise ValueError(f"{name}={value!r} is no setting of a part; {choices(part, BASES)}")
        of_parts.setdefault(part, {})[setting] = value
    return of_parts, own


def settings_of(name: str) -> dict[str, Any]:
    """Return a policy's settings and their defaults."""
    method = REGISTRY[name]
    own = _keywords(method)
    return own | _keywords(combine) | own if "common" in annotations_of(method) else own


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of a function's parameters."""
    return {p.name: p.annotation for p in inspect.signature(function).parameters.values()}


def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def settings_in(made: Policy) -> dict[str, Any]:
    """Return the settings of a policy as keywords of its registered function, without those of a residual.

    Settings of a replaced part are omitted; a user's policy has the settings of its score. `evict_every` is omitted at
    its default, because older measurements and checkpoints do not have it.
    """
    own = {field.name: None for field in dataclasses.fields(made.score)}  # type: ignore[arg-type]
    names = settings_of(made.name) if made.name in REGISTRY else own | _keywords(combine)
    base, inner = getattr(made.score, "base_score", None), getattr(made.plan, "plan", None)
    if base is not None and getattr(made.score, "base", "") in REGISTRY:
        names = settings_of(made.score.base) | names  # type: ignore[attr-defined]
    parts = (made.score, base, made.protection, made.plan, inner, made.selection, made.codec)
    found = {name: getattr(part, name) for name in names for part in reversed(parts) if hasattr(part, name)}
    found.pop("evict_every", None)
    if made.evict_every != names.get("evict_every", 1):
        found["evict_every"] = made.evict_every
    if made.plan.extra_slots:
        return {"base": made.name, "features": 2 * made.plan.extra_slots} | found
    return found


def name_of(policy: Policy) -> str:
    """Return the registered name of a policy, or the class of its score for a user's policy."""
    for name, kind in RESIDUALS.items():
        if name in REGISTRY and isinstance(policy.residual, kind):
            return name
    if policy.plan.extra_slots:
        return "baseline_plus"
    return policy.label


# In alphabetical order, after everything above is defined: `less` makes its base by name.
for _module in pkgutil.iter_modules([str(Path(__file__).parent)], f"{__package__}."):
    importlib.import_module(_module.name)
