"""Saved conversations: a directory with the ids of the text and the arrays of the cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.buffers import placed_like
from kvjax.inference.cache import Cache
from kvjax.utils.files import directory_aside, read_json, recover_directory, restore_arrays

SAVED = "conversation.json"
"""Name of the file with the parts of a saved conversation that are not arrays; it is written last."""
FORM = 2
"""Form of saved conversations; those of kvjax 0.2.0 name none."""
_ARRAYS = "state"


@dataclasses.dataclass(frozen=True)
class SavedConversation:
    """A saved conversation, of which only the file `SAVED` has been read.

    Args:
        directory: its directory.
        text: ids of the text.
        fits: hash of the model and the policy, see `Conversation`.
        leaves: shapes and dtypes of the cache's arrays.
        digest: hash of all the above and of the arrays; None for conversations of kvjax 0.2.0.
    """

    directory: Path
    text: list[int]
    fits: str
    leaves: list[jax.ShapeDtypeStruct]
    digest: str | None

    def damaged(self, reason: str) -> ValueError:
        """Return the error for a conversation that cannot be continued."""
        return ValueError(f"the conversation in {self.directory} is damaged: {reason}; load another one.")

    def matches(self, cache: Cache) -> bool:
        """Return whether the arrays have the dtypes and the numbers of axes of a cache."""
        return _kinds(self._layout(cache)) == _kinds(self.leaves)

    def restore(self, cache: Cache) -> Cache:
        """Read the arrays into the structure of a cache that `matches`."""
        damage = str(self.damaged("its arrays cannot be read ({reason})"))
        leaves: list[Any] = restore_arrays(self.directory / _ARRAYS, self.leaves, damage)
        if self.digest not in (None, _digest(self.fits, self.text, leaves)):
            raise self.damaged("its text or its arrays are not those that were saved")
        likes, structure = jax.tree.flatten(self._layout(cache))
        restored = jax.tree.unflatten(structure, map(placed_like, map(jnp.asarray, leaves), likes))
        if self.digest is None:
            restored = jax.tree.map(_as_words, _stored(cache), restored, is_leaf=_is_words)
        return restored.replace(key=jax.random.wrap_key_data(restored.key))

    def _layout(self, cache: Cache) -> Any:
        """Return a cache as it would have been saved by the version that saved this conversation."""
        stored = _stored(cache)
        return jax.tree.map(_joined_words, stored, is_leaf=_is_words) if self.digest is None else stored


def save_conversation(directory: Path, text: list[int], fits: str, cache: Cache) -> None:
    """Save a conversation in a directory, atomically."""
    import orbax.checkpoint as ocp

    recover_directory(directory)
    if directory.exists() and not (directory / SAVED).is_file():
        raise ValueError(f"{directory} exists and is not a saved conversation; give another name.")
    leaves = jax.tree.leaves(_stored(cache))
    shapes = [(leaf.shape, str(leaf.dtype)) for leaf in leaves]
    settings = {"form": FORM, "fits": fits, "text": text, "leaves": shapes, "digest": _digest(fits, text, leaves)}
    with directory_aside(directory) as aside:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(aside / _ARRAYS, leaves)
        (aside / SAVED).write_text(json.dumps(settings), encoding="utf-8")


def read_conversation(directory: Path) -> SavedConversation:
    """Read a saved conversation, except for its arrays."""
    recover_directory(directory)
    file = directory / SAVED
    if not file.is_file():
        raise ValueError(f"{directory} has no saved conversation.")
    try:
        settings = read_json(file)
        leaves = [jax.ShapeDtypeStruct(_shape(shape), jnp.dtype(dtype)) for shape, dtype in settings["leaves"]]
        text, fits = settings["text"], settings["fits"]
        digest = settings["digest"] if "form" in settings else None
        if {type(token) for token in text} != {int} or min(text) < 0 or settings.get("form", FORM) != FORM:
            raise ValueError("there is no text")
        if not isinstance(fits, str) or ("form" in settings and not isinstance(digest, str)):
            raise ValueError("there is no hash")
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(f"{file} is no saved conversation's; give another name.") from None
    return SavedConversation(directory, text, fits, leaves, digest)


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError("there is no shape")
    return tuple(shape)


def _digest(fits: str, text: list[int], leaves: Sequence[Any]) -> str:
    digest = hashlib.sha256(json.dumps([fits, text]).encode())
    for leaf in map(np.asarray, leaves):
        digest.update(f"{leaf.shape}{leaf.dtype}".encode())
        digest.update(leaf.tobytes())
    return digest.hexdigest()


def _stored(cache: Cache) -> Cache:
    """Return a cache as it is saved: with random keys as their data."""
    return cache.replace(key=jax.random.key_data(cache.key))


def _is_words(leaf: Any) -> bool:
    """Return whether a leaf is a tuple of LSH-E hash words, which kvjax 0.2.0 saved as one array [b h c words]."""
    return type(leaf) is tuple and len(leaf) > 0 and all(getattr(word, "dtype", None) == jnp.uint32 for word in leaf)


def _kinds(tree: Any) -> list[tuple[int, str]]:
    return [(leaf.ndim, str(leaf.dtype)) for leaf in jax.tree.leaves(tree)]


def _joined_words(leaf: Any) -> Any:
    return jnp.stack(leaf, -1) if _is_words(leaf) else leaf


def _as_words(now: Any, then: Any) -> Any:
    return tuple(jnp.moveaxis(then, -1, 0)) if _is_words(now) else then
