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
    of_parts, settings = _by_part(settings)
    instance = _registered(name, settings) if isinstance(name, str) else name
    if not isinstance(instance, Policy):
        raise TypeError(f"a policy is a name or a kvjax.Policy, not {_described(instance)}.")
    if instance is name and settings:
        raise ValueError(f"{next(iter(settings))} cannot be set for a policy that is an instance; set it on its parts.")
    return replaced(instance, plan, residual, codec, selection, of_parts)


def _registered(name: str, settings: Mapping[str, Any]) -> Policy:
    if names_file(name):
        return _from_file(name, settings)
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
    takes = settings_of(name)
    for setting in settings:
        if setting not in takes and "base" not in takes:
            raise ValueError(f"policy {name!r} has no setting {setting!r}; {choices(setting, takes, lead='it takes')}")
    instance = REGISTRY[name](**_typed(settings, annotations_of(REGISTRY[name]) | annotations_of(combine)))
    # A policy over another one keeps the other's name.
    return instance if "base" in takes else dataclasses.replace(instance, name=name)


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
        names = [key for key, value in vars(module).items() if _defined_in(module.__name__, value)]
        raise ValueError(f"{file} has no {attribute!r}; {choices(attribute, names, lead='it has')}")
    return getattr(module, attribute)


def _defined_in(module: str, value: Any) -> bool:
    return isinstance(value, _NAMEABLE) or (callable(value) and getattr(value, "__module__", "") == module)


def _from_file(name: str, settings: Mapping[str, Any]) -> Policy:
    # A policy of somebody's own: made, or whatever makes one or its score from settings.
    source = from_file("policy", name)
    file, _, attribute = name.rpartition(":")
    file = expanded(file)
    # What every policy has is no setting of the score, unless it says so.
    takes = inspect.signature(source).parameters if callable(source) else {}
    all_of_them = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values())
    names = [] if all_of_them else [name for name in _keywords(combine) if name in settings and name not in takes]
    common = _typed({name: settings[name] for name in names}, annotations_of(combine))
    settings = {name: value for name, value in settings.items() if name not in common}
    for setting in settings if callable(source) and not all_of_them else ():
        if setting not in takes:
            allowed = dict.fromkeys([*takes, *_keywords(combine)])
            raise ValueError(
                f"{attribute} in {file} has no setting {setting!r}; {choices(setting, allowed, lead='it takes')}"
            )
    try:
        instance = source(**settings) if callable(source) else source
    except TypeError as error:
        raise ValueError(f"{file}: {attribute} cannot be constructed ({error}).") from error
    if instance is source and settings:
        raise ValueError(f"{next(iter(settings))} cannot be set: {attribute} in {file} is already an instance.")
    if isinstance(instance, Score):
        instance = combine(instance, **common)
        if not common.keys() & {"sinks", "recent", "special"}:
            warnings.warn(
                f"{attribute} protects no tokens, not even the newest ones; recent=0.5 keeps the "
                "newest half of the budget, as most policies here do, and recent=0 turns this note off.",
                stacklevel=4,
            )
    elif isinstance(instance, Policy) and common:
        codec = dataclasses.replace(instance.codec, positions=common.pop("positions", instance.codec.positions))
        evict_every = common.pop("evict_every", instance.evict_every)
        protection = dataclasses.replace(instance.protection, **common)
        instance = dataclasses.replace(instance, protection=protection, codec=codec, evict_every=evict_every)
    if not isinstance(instance, Policy):
        raise ValueError(f"{attribute} in {file} is not a kvjax.Policy or Score and does not return one: {instance!r}.")
    return instance


def replaced(
    policy: Policy,
    plan: str | Plan | None = None,
    residual: str | Residual | None = None,
    codec: str | Codec | Quantizer | None = None,
    selection: str | Selection | None = None,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
) -> Policy:
    """Return a policy with some of its parts replaced; see `policy`."""
    for part, choice in {"residual": residual, "codec": codec, "selection": selection, "plan": plan}.items():
        values = (settings or {}).get(part, {})
        if choice is None and values:
            if part not in _USUAL:
                raise ValueError(f"{part}.{next(iter(values))} is a setting of a {part}; name one.")
            choice = _USUAL[part]
        if choice is None:
            continue
        if part == "codec" and isinstance(choice, Codec):
            _none_left(part, values)
            policy = dataclasses.replace(policy, codec=choice)
        elif part == "codec":
            # A quantizer keeps the positions of keys, and a codec brings its own.
            quantizer = _build(part, choice, values)
            policy = dataclasses.replace(policy, codec=dataclasses.replace(policy.codec, quantizer=quantizer))
        elif part == "plan":
            policy = policy.spread(_build(part, choice, values))
        else:
            by_name = part == "residual" and isinstance(choice, str)
            if by_name and not isinstance(values.get("kernels", ""), str):  # arrays, not the name of some
                values = {"layers" if name == "kernels" else name: value for name, value in values.items()}
            chosen = _build(part, choice, values)
            if by_name and "base" in {field.name for field in dataclasses.fields(chosen)} - values.keys():
                chosen = dataclasses.replace(chosen, base=name_of(policy))
            policy = dataclasses.replace(policy, **{part: chosen})
    return fitted(policy)


def _build(part: str, choice: Any, settings: Mapping[str, Any]) -> Any:
    base, table, name = BASES[part], TABLES[part], choice
    if isinstance(name, str):
        load_installed(name, table)
        if not names_file(name) and name not in table:
            raise ValueError(f"there is no {part} {name!r}; {choices(name, table)}")
        choice = from_file(part, name) if names_file(name) else table[name]
        if isinstance(choice, type) and issubclass(choice, base):
            fields = {field.name: field.type for field in dataclasses.fields(choice)}
            for setting in settings:
                if setting not in fields:
                    hint = choices(setting, fields, lead="it takes")
                    raise ValueError(f"{part} {name!r} has no setting {setting!r}; {hint}")
            return choice(**_typed(settings, fields))
        if not isinstance(choice, base):
            raise ValueError(f"{name} is no {base.__name__}, neither a class nor an instance: {choice!r}.")
    _none_left(part, settings)
    if not isinstance(choice, base):
        raise TypeError(f"a {part} is a name or an instance of {base.__name__}, not {_described(choice)}.")
    return choice


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
    of_policy: dict[str, Any] = {}
    for name, value in settings.items():
        part, dot, setting = name.partition(".")
        if not dot:
            of_policy[name] = value
            continue
        if part not in BASES:
            raise ValueError(f"{name}={value!r} is no setting of a part; {choices(part, BASES)}")
        of_parts.setdefault(part, {})[setting] = value
    return of_parts, of_policy


def settings_of(name: str) -> dict[str, Any]:
    """Return a policy's settings and their defaults."""
    method = REGISTRY[name]
    defaults = _keywords(method)
    return defaults | _keywords(combine) | defaults if "common" in annotations_of(method) else defaults


def annotations_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotated types of a function's parameters."""
    return {p.name: p.annotation for p in inspect.signature(function).parameters.values()}


def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def settings_in(policy: Policy) -> dict[str, Any]:
    """Return the settings of a policy as keywords of its registered function, without those of a residual.

    Settings of a replaced part are omitted; a user's policy has the settings of its score. `evict_every` is omitted at
    its default, because older measurements and checkpoints do not have it.
    """
    fields = {field.name: None for field in dataclasses.fields(policy.score)}  # type: ignore[arg-type]
    names = settings_of(policy.name) if policy.name in REGISTRY else fields | _keywords(combine)
    base, inner = getattr(policy.score, "base_score", None), getattr(policy.plan, "plan", None)
    if base is not None and getattr(policy.score, "base", "") in REGISTRY:
        names = settings_of(policy.score.base) | names  # type: ignore[attr-defined]
    parts = (policy.score, base, policy.protection, policy.plan, inner, policy.selection, policy.codec)
    settings = {name: getattr(part, name) for name in names for part in reversed(parts) if hasattr(part, name)}
    settings.pop("evict_every", None)
    if policy.evict_every != names.get("evict_every", 1):
        settings["evict_every"] = policy.evict_every
    if policy.plan.extra_slots:
        return {"base": policy.name, "features": 2 * policy.plan.extra_slots} | settings
    return settings


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
