"""Base class of all parts of a policy."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import functools
from types import FunctionType
from typing import Any, ClassVar, Self

from flax import struct

from kvjax.types import Heads, LayerTokens, PyTree, check_kind, setting_names
from kvjax.utils.fields import CONCRETE, SIMPLE, check_limit

_RENAMED = {
    "asks": "attention_stats(heads, new)",
    "init": "init_head(shape)",
    "slot": "init_slot(new, state)",
    "advance": "update_head(heads, new)",
    "fold": "update_slot(stats, view, new)",
}


class Part(struct.PyTreeNode, abc.ABC):
    """A part of a policy: a pytree whose hyperparameters are static and whose arrays are leaves.

    Each subclass is a dataclass, as if `@flax.struct.dataclass` were above it.

    Inputs are batched over rows and heads, [b h ...], or [b h c ...] for slots. Never reduce or index across the axes b
    and h. With paged storage, b counts pages and h is 1.

    A base class that adds public methods of its own declares them: `class Mine(Score, interface=True)`. Without this
    declaration kvjax takes such a method for a misspelt one and raises an error.

    Raises:
        TypeError: the class has a public method that kvjax never calls.
        ValueError: a setting is not of its annotation's type.
    """

    _interface: ClassVar[bool] = True
    of_heads: ClassVar[tuple[str, ...]] = ()
    """Fields whose arrays lead with a layer's KV heads; on a mesh, each device gets the entries of its heads.

    A tuple in such a field has an entry for each layer.
    """

    against_alibi: ClassVar[str] = ""
    """Reason why the part refuses models with ALiBi, in which logits fall with distance; empty if it takes them."""

    def __init_subclass__(cls, *, interface: bool = False, **options: Any) -> None:
        for old in [name for name in _RENAMED if isinstance(vars(cls).get(name), FunctionType)]:
            raise TypeError(f"{cls.__name__}.{old} is now {_RENAMED[old]}; rename the method.")
        super().__init_subclass__(**options)  # which makes a dataclass of it
        cls._interface = interface

    def __new__(cls, *values: Any, **keywords: Any) -> Self:
        """Check the class and its settings before `__post_init__`, which may then compare numbers."""
        check_class(cls)
        in_order, fields = _hyperparameters(cls)
        for name, value in (dict(zip(in_order, values, strict=False)) | keywords).items():
            if name not in fields:
                continue
            if type(value) in SIMPLE:
                _check_once(cls, name, type(value), value)
            elif isinstance(value, tuple) and all(type(item) in SIMPLE for item in value):
                _check_once(cls, name, tuple(map(type, value)), value)
            # A placeholder for a number, in a program or another tree, has no kind to check.
            elif isinstance(value, CONCRETE) or not fields[name].metadata.get("pytree_node", True):
                _check_setting(cls, name, type(value), value)
        return super().__new__(cls)

    def bind(self, model: Any) -> Self:
        """Return a copy prepared for a model; `prefill` calls this first, outside of compilation.

        Raises:
            ValueError: the part was made for another model, or the model has ALiBi, which the part does not take.
        """
        if self.against_alibi and model.config.position == "alibi":
            raise ValueError(
                f"{self.against_alibi}, on which logits of {model!r} depend (ALiBi); use another policy or residual."
            )
        return self._with_inner("bind", model)

    def budgeted(self, budget: Any) -> Self:
        """Return a copy configured for the user's budget; override if the budget is not a number of slots."""
        return self._with_inner("budgeted", budget)

    def sized(self, slots: tuple[int, ...]) -> Self:
        """Return a copy for these numbers of slots per head in each layer; override if `init_head` depends on them."""
        return self._with_inner("sized", slots)

    def layer(self, index: int) -> Self:
        """Return the part for one layer; override if it holds settings for each layer, or arrays outside `of_heads`.

        Layers whose parts differ only in arrays share a compiled program; `new.layer` is then an array.
        """
        of_layer: dict[str, Any] = {}
        for name in self.of_heads:
            if isinstance(value := getattr(self, name), tuple):
                of_layer[name] = value[index]
        return self._with_inner("layer", index, **of_layer)

    def _with_inner(self, member: str, *arguments: Any, **values: Any) -> Self:
        # Returns a copy with other values of some fields, and with what a member of the parts in its fields returns.
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            if isinstance(part := getattr(self, field.name), Part):
                changed = getattr(part, member)(*arguments)
                if not isinstance(changed, Part):
                    raise TypeError(f"{type(part).__name__}.{member} gives {changed!r}; return a copy of the part.")
                if changed is not part:
                    values[field.name] = changed
        return self.replace(**values) if values else self

    def init_head(self, shape: LayerTokens) -> PyTree:
        """Return the part's initial state of a layer, with leaves [b ...]; `shape` holds no tokens."""
        return None

    def init_slot(self, new: LayerTokens, state: Any) -> PyTree:
        """Return the part's state of each new token, with leaves [b h t ...]; `state` is the `Parts` of the layer."""
        return None

    def attention_stats(self, heads: Heads, new: LayerTokens) -> PyTree:
        """Return the attention statistics that the part requests: a tree of values from `kvjax.policies.stats`.

        A score that returns None is not updated with the new tokens.
        """
        return ()


def label_of(part: Part) -> str:
    """Return the name of a part in messages: the registered one, or else the class."""
    return vars(type(part)).get("_registered", type(part).__name__)


@functools.cache
def _hyperparameters(kind: type[Part]) -> tuple[list[str], dict[str, dataclasses.Field[Any]]]:
    """Return the names of a class's fields in the order of its arguments, and the fields of its settings, no parts."""
    fields: dict[str, dataclasses.Field[Any]] = getattr(kind, "__dataclass_fields__", {})
    in_order = [name for name, field in fields.items() if field.init and not field.kw_only]
    settings = [name for name in setting_names(kind) if not isinstance(fields[name].default, Part)]
    return in_order, {name: fields[name] for name in settings}


def _check_setting(kind: type[Part], name: str, _: object, value: Any) -> None:
    field = _hyperparameters(kind)[1][name]
    check_kind(name, value, field.type)
    check_limit(name, value, field)


# Programs rebuild their policies many times, with the same settings.
_check_once = functools.cache(_check_setting)


@functools.cache
def check_class(kind: type[Part]) -> None:
    """Refuse a part with a public method that is no hook, so that kvjax would never call it."""
    offering = [base for base in kind.__mro__ if vars(base).get("_interface")]
    hooks = sorted({name for base in offering for name in vars(base) if not name.startswith("_")})
    fields = getattr(kind, "__dataclass_fields__", {})
    members = {
        name: value
        for base in kind.__mro__
        if issubclass(base, Part) and base not in offering
        for name, value in vars(base).items()
    }
    for name, value in members.items():
        if name.startswith("_") or name in hooks or name in fields or name == "replace":  # which flax adds
            continue
        near = difflib.get_close_matches(name, hooks, 1, 0.7)
        if near or isinstance(value, (FunctionType, staticmethod, classmethod)):
            meant = f"did you mean {near[0]}" if near else f"there are {', '.join(hooks)}"
            raise TypeError(
                f"kvjax never calls {kind.__name__}.{name} ({meant}); begin the names of your own helpers with an "
                "underscore."
            )
