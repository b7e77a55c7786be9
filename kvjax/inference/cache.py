"""Arguments of programs: caches of a batch of texts, and a model with a policy bound to it, whole or by layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Key, UInt32

from kvjax.cache.buffers import allocated_bytes
from kvjax.cache.step import Storage
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import LayerWeights, Weights
from kvjax.models.sharding import on_device
from kvjax.policies.policy import Policy
from kvjax.types import Kernels, LayerConfig, Reading, setting

ROWS = ("position", "prompt_length", "horizon", "end", "key", "seed", "active", "rope_length")
"""Fields of a cache that have one entry for each row, or are None."""


class Cache(struct.PyTreeNode):
    """Everything that a step changes; branching from a cache copies nothing.

    Rows are independent: the results of one row depend on that row only.
    """

    storage: Storage
    position: Int[Array, " b"]
    """Position of the next token."""
    prompt_length: Int[Array, " b"]
    """Length of the text, in tokens, up to the last token that was given and not generated."""
    horizon: Int[Array, " b"]
    """Tokens planned to be generated."""
    end: Int[Array, " b"]
    """Planned length of the whole text in tokens, set when the prompt was read."""
    key: Key[Array, " b"]
    """None in programs on a mesh that return a cache: they give keys another sharding than they take."""
    seed: UInt32[Array, " b"]
    """Random seed of the policy for each row."""
    active: Bool[Array, " b"]
    """True for rows that read tokens; the other rows never change, and their logits are meaningless."""
    rope_length: Int[Array, " b"] | None = None
    """Length of each text that its RoPE frequencies are those of; see `ModelConfig.rope_length`."""

    @staticmethod
    def empty(
        storage: Storage,
        prompt_length: int,
        horizon: Int[Array, " b"],
        end: Int[Array, " b"],
        seed: UInt32[Array, " b"],
        key: Any = None,
        rope_length: Int[Array, " b"] | None = None,
    ) -> Cache:
        """Return a cache that has read nothing, with the planned lengths of the texts that it will read."""
        none = jnp.zeros(len(horizon), jnp.int32)
        active = jnp.ones(len(horizon), bool)
        return Cache(storage, none, none + prompt_length, horizon, end, key, seed, active, rope_length)

    def reading(self, token: Int[Array, "b t"], position: Int[Array, "b t"], read: Int[Array, " b"]) -> Reading:
        """Return generated tokens in the form that layers read; `read` counts each row's tokens, these included."""
        planned: dict[str, Any] = dict(
            prompt_length=self.prompt_length,
            horizon=self.horizon,
            end=self.end,
            seed=self.seed,
            rope_length=self.rope_length,
        )
        return Reading(token=token, position=position, read=read, given=False, **planned)

    def following(self, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]) -> Reading:
        """Return given texts, padded on the right, at the positions after the cache's own text, as layers read them."""
        place = jnp.arange(tokens.shape[1])
        position = jnp.where(place < lengths[:, None], self.position[:, None] + place, -1)
        return self.reading(tokens, position, self.position + lengths).replace(given=True)

    @property
    def newest(self) -> Reading:
        """Newest token of each row without its contents, to rank the present slots."""
        at = (self.position - 1)[:, None]
        return self.reading(jnp.zeros_like(at), at, self.position).replace(given=True)

    def __repr__(self) -> str:
        return f"Cache({self.described()})"

    def described(self) -> str:
        """Return rows, slots and bytes in a few words, from shapes alone."""
        rows = len(self.active)
        slots = f"{rows} row{'' if rows == 1 else 's'}, {self.allocated_slots:.0f} slots per head"
        return f"{slots}, {allocated_bytes(self.storage):,} bytes"

    @property
    def allocated_slots(self) -> float:
        """Slots per head, empty ones included, averaged over rows, layers and heads."""
        slots = sum(leaf.size for leaf in jax.tree.leaves(self.storage.stored_positions()))
        return slots / sum(heads.limit.size for heads in self.storage.layers)

    def take(self, rows: Int[np.ndarray, " m"]) -> Cache:
        """Return a cache with some rows, in any order."""
        return Cache(self.storage.take(rows), **self._of_rows(lambda all: all[rows]))

    def put(self, where: Int[np.ndarray, " m"], rows: Cache) -> Cache:
        """Return a cache in which rows of another cache, of the same kind of storage, replace some rows."""
        storage: Any = self.storage
        fields = self._of_rows(lambda all, new: all.at[where].set(new), rows)
        return Cache(storage.put(where, rows.storage), **fields)

    def with_own_rows(self) -> Cache:
        """Return a cache with copies of the per-row arrays, which stay valid after a step in place."""
        return self.replace(**self._of_rows(jnp.copy))

    def _of_rows(self, change: Callable[..., Array], *others: Cache) -> dict[str, Any]:
        # The fields of rows after `change`, which also gets those of other caches.
        fields = {name: [getattr(cache, name) for cache in (self, *others)] for name in ROWS}
        return {name: None if arrays[0] is None else change(*arrays) for name, arrays in fields.items()}


def policy_seeds(keys: Key[Array, " b"]) -> UInt32[Array, " b"]:
    """Derive the policy's random seed of each row from its key."""
    return jax.vmap(lambda key: jax.random.bits(jax.random.fold_in(key, 1), dtype=jnp.uint32))(keys)


class Bound(struct.PyTreeNode):
    """Weights, a policy bound to them, and static settings; no program changes them."""

    weights: Weights
    policy: Policy
    config: ModelConfig = setting(None)
    kernels: Kernels = setting(Kernels())
    mesh: Mesh | None = setting(None)
    """Devices that shard the arrays, from `kvjax.models.sharding.program_mesh`; None for one device."""

    def here(self, *, shares_slots: bool = False) -> Self:
        """Return the same for the program of one device; see `on_device`."""
        return self.replace(config=on_device(self.config, self.mesh, shares_slots=shares_slots))

    @property
    def layers(self) -> list[Layer]:
        """All layers, each with the policy as it uses it."""
        like = [self.config.layer_configs.index(shape) for shape in self.config.layer_configs]
        return [
            Layer(weights, self.policy.layer(number), number, self.config, like[number])
            for number, weights in enumerate(self.weights.layers)
        ]


class Layer(struct.PyTreeNode):
    """One layer of a model, and the policy as the layer uses it."""

    weights: LayerWeights
    policy: Policy
    number: int | Int[Array, ""]
    """Index in the model; an array in programs that equal layers share."""
    config: ModelConfig = setting(None)
    like: int = setting(0)
    """Index of the first layer of the same shape."""

    @property
    def shape(self) -> LayerConfig:
        """Attention of the layer."""
        return self.config.layer(self.like)
