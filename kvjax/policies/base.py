"""What all parts of a policy have in common."""

from __future__ import annotations

import abc
import dataclasses
import difflib
import functools
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar

from kvjax.types import Heads, New, PyTree, check_kind, setting_names, written

if TYPE_CHECKING:
    from typing import Self

    from kvjax.models.model import LanguageModel


class Part(abc.ABC):  # noqa: B024 - no part has to do anything
    """A part of a policy: a pytree whose hyperparameters are static and whose arrays are leaves.

    It sees rows and heads as arrays whose axes it must not mix: [b h ...], [b h c ...] for slots. On pages, b counts
    pages and h is 1.

    Raises:
        TypeError: its class is not a `flax.struct.dataclass`, or has a public method that kvjax never calls.
        ValueError: a setting is not of its annotation's type.
    """

    numbers_layers: bool = False
    """Whether what it does to a layer is another program for each, since it looks something up by the layer's number.

    Layers of a deep model share one where no part does; `new.layer` is then an array.
    """
    of_heads: ClassVar[tuple[str, ...]] = ()
    """Fields whose arrays begin with the KV heads of a layer: on a mesh a program has those of its own heads."""

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Checked before `__post_init__`, which may then compare numbers as such."""
        check_class(cls)
        fields: dict[str, dataclasses.Field[Any]] = getattr(cls, "__dataclass_fields__", {})
        in_order = [name for name, field in fields.items() if field.init and not field.kw_only]
        given = dict(zip(in_order, values, strict=False)) | named
        for name in setting_names(cls) if fields else ():
            # In a program, or in a tree of something else, what stands for a number has no kind to check.
            if name in given and (fields[name].metadata.get("pytree_node") is False or written(given[name])):
                check_kind(name, given[name], fields[name].type)
        return super().__new__(cls)

    def bind(self, model: LanguageModel) -> Self:
        """The part with whatever it needs to know of a model; `prefill` calls it first, outside of compilation.

        Raises:
            ValueError: what it has was made for another model.
        """
        return self

    def budgeted(self, budget: Any) -> Self:
        """The part with the budget that the user gave, for those that mean something else by it than slots."""
        return self

    def sized(self, slots: tuple[int, ...]) -> Self:
        """The part whose `init` makes room for as many slots as heads of each layer may use, if it depends on them."""
        return self

    def init(self, shape: New) -> PyTree:
        """What the part remembers of a layer before anything is read: leaves [b ...]; `shape` holds no tokens."""
        return None

    def slot(self, new: New, state: Any) -> PyTree:
        """What the part remembers of each new token: leaves [b h t ...]; `state` is the `Parts` of the layer."""
        return None

    def asks(self, heads: Heads, new: New) -> PyTree:
        """What the part wants to know of the attention of new tokens: a tree of `kvjax.policies.stats`."""
        return ()


def of_kvjax(kind: type) -> bool:
    """Whether a class is one of kvjax's own, whose methods are the contract, and not somebody's."""
    return kind.__module__.partition(".")[0] == "kvjax"


@functools.cache
def check_class(kind: type[Part]) -> None:
    """Refuse a part of somebody's own that is not what it seems to be.

    Raises:
        TypeError: a public method is no hook of the part, so that nothing would call it; or the decorator is missing.
    """
    if of_kvjax(kind):
        return
    ours = [base for base in kind.__mro__ if of_kvjax(base)]
    hooks = sorted({name for base in ours for name in vars(base) if not name.startswith("_")})
    fields = getattr(kind, "__dataclass_fields__", {})
    own = {
        name: value
        for base in kind.__mro__
        if issubclass(base, Part) and base not in ours
        for name, value in vars(base).items()
    }
    for name, value in own.items():
        if name.startswith("_") or name in hooks or name in fields or name == "replace":  # which flax adds
            continue
        near = difflib.get_close_matches(name, hooks, 1, 0.7)
        if near or isinstance(value, (FunctionType, staticmethod, classmethod)):
            meant = f"did you mean {near[0]}" if near else f"there are {', '.join(hooks)}"
            raise TypeError(
                f"kvjax never asks for {kind.__name__}.{name} ({meant}); begin the names of your own helpers with an "
                "underscore."
            )
    if "_flax_dataclass" not in vars(kind):
        raise TypeError(f"{kind.__name__} is not a pytree; put @flax.struct.dataclass above `class {kind.__name__}`.")
