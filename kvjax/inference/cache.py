"""Arguments of programs: caches of a batch of texts, and a model with a policy bound to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int, Key, UInt32

from kvjax.cache.buffers import allocated_bytes, replace_rows, select_rows
from kvjax.cache.layer import LayerCache
from kvjax.cache.paged.pages import LayerPages, Pool
from kvjax.cache.paged.table import gathered
from kvjax.cache.slots import Slots
from kvjax.models.config import ModelConfig
from kvjax.models.decoder import Layer, Weights, layers_of
from kvjax.models.sharding import on_device, on_mesh
from kvjax.policies.policy import Policy
from kvjax.types import OF_ROWS, Heads, Kernels, PyTree, TokenBatch, View, setting
from kvjax.utils.processes import on_host
from pallas_kernels.op import using

ROWS = ("position", "prompt_length", "horizon", "end", "key", "seed", "active", "rope_length")
"""Fields of a cache that have one entry for each row, or are None."""


class Cache(struct.PyTreeNode):
    """Everything that a step changes; branching from a cache copies nothing.

    Rows are independent: the results of one row depend on that row only.
    """

    layers: tuple[LayerCache, ...]
    """State of each layer, of the kind that its mixer has."""
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
    pool: Pool | None = None
    """Memory that the layers share, if each head has slots of its own; see `kvjax.cache.paged.pages`."""

    @staticmethod
    def empty(
        layers: tuple[LayerCache, ...],
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
        return Cache(layers, none, none + prompt_length, horizon, end, key, seed, active, rope_length)

    def reading(self, token: Int[Array, "b t"], position: Int[Array, "b t"], read: Int[Array, " b"]) -> TokenBatch:
        """Return generated tokens in the form that layers read; `read` counts each row's tokens, these included."""
        planned: dict[str, Any] = dict(
            prompt_length=self.prompt_length,
            horizon=self.horizon,
            end=self.end,
            seed=self.seed,
            rope_length=self.rope_length,
        )
        return TokenBatch(token=token, position=position, read=read, given=False, **planned)

    def following(self, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]) -> TokenBatch:
        """Return given texts, padded on the right, at the positions after the cache's own text, as layers read them."""
        place = jnp.arange(tokens.shape[1])
        position = jnp.where(place < lengths[:, None], self.position[:, None] + place, -1)
        return self.reading(tokens, position, self.position + lengths).replace(given=True)

    @property
    def newest(self) -> TokenBatch:
        """Newest token of each row without its contents, to rank the present slots."""
        at = (self.position - 1)[:, None]
        return self.reading(jnp.zeros_like(at), at, self.position).replace(given=True)

    def __repr__(self) -> str:
        return f"Cache({self.described()})"

    def described(self) -> str:
        """Return rows, slots and bytes in a few words, from shapes alone."""
        rows = len(self.active)
        slots = f"{rows} row{'' if rows == 1 else 's'}, {self.allocated_slots:.0f} slots per head"
        return f"{slots}, {allocated_bytes(self.memory):,} bytes"

    @property
    def caches(self) -> tuple[Cache, ...]:
        """Caches of the same texts that decoders read one by one; see `Decoder.decoders`."""
        return (self,)

    def with_caches(self, caches: Sequence[Cache]) -> Cache:
        """Return the same with other `caches`, which have read as many tokens as each other."""
        return caches[0]

    @property
    def specs(self) -> Self:
        """`PartitionSpec` of each array on a mesh, in place of the arrays."""
        rows = {name: OF_ROWS for name in ROWS if getattr(self, name) is not None}
        pool = None if self.pool is None else self.pool.specs
        return self.replace(layers=tuple(type(layer).specs for layer in self.layers), pool=pool, **rows)

    @property
    def memory(self) -> tuple[tuple[LayerCache, ...], Pool | None]:
        """Arrays of all layers, without those of rows."""
        return self.layers, self.pool

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of layers by the kinds of their caches, such as slots and recurrent states."""
        sizes = {layer.kind: 0 for layer in self.layers}
        for layer in self.layers:
            sizes[layer.kind] += allocated_bytes(layer)
        return sizes if self.pool is None else sizes | {"slots": sizes["slots"] + allocated_bytes(self.pool)}

    @property
    def attending(self) -> list[Heads]:
        """Layers that have slots."""
        return [layer for layer in self.layers if isinstance(layer, Heads)]

    @property
    def allocated_slots(self) -> float:
        """Slots per head, empty ones included, averaged over rows, layers with slots, and heads."""
        slots = sum(leaf.size for leaf in jax.tree.leaves(self.stored_positions()))
        return slots / max(sum(heads.limit.size for heads in self.attending), 1)

    def stored_positions(self) -> Any:
        """Return positions as stored, for collection inside a loop."""
        if self.pool is not None:
            return self.pool.position
        return tuple(layer.all_positions for layer in self.attending if isinstance(layer, View))

    def positions(self, stored: Any = None) -> list[np.ndarray]:
        """Return positions [b h c] by layer on the host, -1 in empty slots, of the layers with slots.

        `stored` are those of an earlier step; None for the cache's own.
        """
        if self.pool is not None:
            return self.pool.positions(self._pages, stored)
        return [on_host(position) for position in (self.stored_positions() if stored is None else stored)]

    @property
    def _pages(self) -> tuple[LayerPages, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, LayerPages))

    @property
    def _without_pages(self) -> list[LayerCache]:
        return [layer for layer in self.layers if not isinstance(layer, LayerPages)]

    def _in_order(self, pages: Sequence[LayerCache], others: Sequence[LayerCache]) -> tuple[LayerCache, ...]:
        # Layers with pages and the others, in the order of this cache.
        of_kind = {True: iter(pages), False: iter(others)}
        return tuple(next(of_kind[isinstance(layer, LayerPages)]) for layer in self.layers)

    @property
    def slots(self) -> tuple[Slots, ...]:
        """Slots of all layers that store anything, pages unpacked; refuse layers with other states."""
        slots = self.slots_by_layer
        for index, layer in enumerate(self.layers):
            if index not in slots and jax.tree.leaves(layer):
                raise ValueError(f"this needs attention in all layers, and layer {index} has a {type(layer).__name__}.")
        return tuple(slots.values())

    @property
    def slots_by_layer(self) -> dict[int, Slots]:
        """Slots of the layers that have some, pages unpacked, by the layers' indices."""
        slots = {index: layer for index, layer in enumerate(self.unpacked()) if isinstance(layer, Slots)}
        for index, layer in slots.items():
            if layer.all_positions.shape != layer.position.shape:
                raise ValueError(
                    f"the slots of a prompt are in host memory (layer {index}), where nothing ranks or moves them; "
                    "read the text with a policy that keeps them on the device."
                )
        return slots

    def with_layers(self, layers: Mapping[int, LayerCache]) -> tuple[LayerCache, ...]:
        """Return the caches of all layers, with others at some indices."""
        return tuple(layers.get(index, layer) for index, layer in enumerate(self.layers))

    def linked(self, index: int) -> LayerCache:
        """Return a layer with what it borrows of earlier ones and of the pool."""
        return self.layers[index].link(self.layers[:index], self.pool)

    def unpacked(self) -> tuple[LayerCache, ...]:
        """Return the layers with pages unpacked into buffers, of equally many slots for all heads of a layer."""
        return tuple(self.linked(index).unpacked() for index in range(len(self.layers)))

    def packed(self, layers: Sequence[LayerCache]) -> Self:
        """Return the cache with the contents of other layers, which were `unpacked`."""
        after, pool = list[LayerCache](), self.pool
        for index, contents in enumerate(layers):
            layer, pool = self.replace(pool=pool).linked(index).packed(contents).unlink(pool)
            after.append(layer)
        return self.replace(layers=tuple(after), pool=pool)

    def take(self, rows: Int[np.ndarray, " m"] | Int[Array, " m"]) -> Self:
        """Return a cache with some rows, in any order; the table of pages is read on the host."""
        fields = self._of_rows(lambda all: all[rows])
        if self.pool is None:
            return self.replace(layers=select_rows(self.layers, rows), **fields)
        pages, pool = gathered([(self._pages, self.pool)], [(0, int(row)) for row in rows])
        others = select_rows(self._without_pages, rows)
        return self.replace(layers=self._in_order(pages, others), pool=pool, **fields)

    def put(self, where: Int[np.ndarray, " m"], rows: Cache) -> Self:
        """Return a cache in which rows of another cache, with the same kinds of layers, replace some rows.

        Buffers may be larger than those of `rows`; a pool grows or shrinks with their number of pages.
        """
        fields = self._of_rows(lambda all, new: all.at[where].set(new), rows)
        if self.pool is None or rows.pool is None:
            pairs = enumerate(zip(self.layers, rows.layers, strict=True))
            layers = tuple(new.widened(layer, index) for index, (layer, new) in pairs)
            return self.replace(layers=replace_rows(self.layers, where, layers), **fields)
        size = min(self.pool.page_size, rows.pool.page_size)
        sources = [(_split(cache._pages, cache.pool, size)) for cache in (self, rows)]
        chosen = {int(row): (1, place) for place, row in enumerate(where)}
        pages, pool = gathered(sources, [chosen.get(row, (0, row)) for row in range(len(self.active))])
        others = replace_rows(self._without_pages, where, rows._without_pages)
        return self.replace(layers=self._in_order(pages, others), pool=pool, **fields)

    def with_own_rows(self) -> Self:
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
    beyond_window: int = setting(0)
    """Tokens before a layer's window that stay in its cache where no policy evicts, for `kvjax.inference.verify`."""
    mesh: Mesh | None = setting(None)
    """Devices that shard the arrays, from `kvjax.models.sharding.program_mesh`; None for one device."""

    def here(self, *, shares_slots: bool = False) -> Self:
        """Return the same for the program of one device; see `on_device`."""
        if self.mesh is None:
            return self
        return self.replace(config=on_device(self.config, self.mesh, shares_slots=shares_slots))

    def run(self, function: Callable[..., Any], *arguments: Any, specs: Callable[[], tuple[PyTree, PyTree]]) -> Any:
        """Call a function of one device's shards of this and of other arrays, on each device; call it under `jit`.

        Operations in it run with `kernels`, and ranks and dtypes are promoted under any of JAX's settings. `specs` are
        as for `on_mesh`.
        """
        on_devices = function if self.mesh is None else on_mesh(function, self.mesh, specs)
        with using(self.kernels), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return on_devices(self, *arguments)

    @property
    def layers(self) -> list[Layer]:
        """All layers, each with the policy as it uses it."""
        return layers_of(self.weights, self.config, self.policy)

    def init_caches(self, limits: Sequence[Int[Array, "b _"]], slots: Sequence[int]) -> tuple[LayerCache, ...]:
        """Return caches that have read nothing, for a policy `sized` before if its states depend on the slots."""
        layers = zip(self.layers, limits, slots, strict=True)
        return tuple(layer.init_cache(limit, count, self.weights.dtype) for layer, limit, count in layers)


def _split(layers: tuple[LayerPages, ...], pool: Pool | None, size: int) -> tuple[tuple[LayerPages, ...], Pool]:
    assert pool is not None
    parts = pool.page_size // size
    return tuple(layer.replace(pages=layer.pages * parts) for layer in layers), pool.split(size)
