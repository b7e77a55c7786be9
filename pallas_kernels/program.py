"""An operation at one size, which runs on random inputs."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode_step import Query, Slots


@dataclasses.dataclass(frozen=True)
class Program:
    """An operation at one size."""

    op: str
    label: str
    run: Callable[..., Any]
    """Function of `shapes` by name, and of `implementation` and `platform`."""
    shapes: dict[str, Any]
    in_place: Mapping[str, Callable[[Any], Any]] = dataclasses.field(default_factory=dict)
    """Inputs that a call makes invalid, as in `Op.in_place`; the functions return those of the next call."""

    def __str__(self) -> str:
        return f"{self.op} {self.label}"

    def jit(self, implementation: str, platform: str | None = None) -> Any:
        """Return the compiled function of `shapes` by name; a call raises `Unsupported` if it cannot run."""
        run = functools.partial(self.run, implementation=implementation, platform=platform)
        return jax.jit(run, donate_argnames=tuple(self.in_place))

    def arrays(self) -> dict[str, Any]:
        """Return random inputs: every slot is live, and queries come after all slots."""
        rng, shapes = np.random.default_rng(0), dict(self.shapes)
        records = [name for name, shape in shapes.items() if isinstance(shape, Slots | Query)]
        for name in records:
            shapes |= shapes[name]._asdict()

        def fill(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> jax.Array:
            # The argument's name, or its field's if it is a record of arguments, and the name of the last field.
            names = [str(getattr(key, "key", getattr(key, "name", ""))) for key in path]
            name, field = names[names[0] in records], names[-1]
            if shape.dtype in (jnp.int8, jnp.uint8):
                info = jnp.iinfo(shape.dtype)
                return jnp.asarray(rng.integers(info.min + 1, info.max, size=shape.shape, dtype=shape.dtype))
            if jnp.issubdtype(shape.dtype, jnp.floating):
                key = jax.random.key(int(rng.integers(2**31)))
                made = jax.random.normal(key, shape.shape, shape.dtype)
                if field == "scale":  # decoded numbers are around one
                    return (jnp.abs(made) + 1) / (8 if getattr(shapes[name], "bits", 8) == 4 else 128)
                if (name == "layers" or field in ("first", "second", "third")) and made.ndim > 2:  # linear maps
                    return made * made.shape[-2] ** -0.5
                if name == "q":  # attention that peaks at a few slots shows errors best
                    return 3 * made
                return jnp.abs(made) + 1 if field == "tau" or name in ("weights", "low_rank", "memory") else made
            if shape.dtype == jnp.uint32:
                return jnp.asarray(rng.integers(2**32, size=shape.shape, dtype=np.uint32))
            if shape.dtype == jnp.bool_:  # slots to keep: one in eight
                return jnp.asarray(rng.random(shape.shape) < 1 / 8)
            if name in ("owner", "pages"):  # each head's pages are adjacent, and all pages are used
                pages = shapes["position"].shape[0]
                heads = math.prod(shapes["q"].shape[:2])
                return jnp.asarray([0, pages], jnp.int32) if name == "pages" else jnp.arange(pages) * heads // pages
            if name in ("position", "key_position"):
                return jnp.broadcast_to(jnp.arange(shape.shape[-1], dtype=shape.dtype), shape.shape)
            if "key_position" in shapes and name != "places":
                # A prompt's queries are its newest tokens; one of several readers has its first tokens.
                keys, queries = shapes["key_position"].shape[-1], shapes["q"].shape[3]
                first = 0 if "own" in shapes else keys - queries
                return jnp.broadcast_to(first + jnp.arange(queries, dtype=shape.dtype), shape.shape)
            if name in ("places", "scores"):  # places, which matter only with slopes; numbers of layers and heads
                return jnp.zeros(shape.shape, shape.dtype)
            # Queries come after every slot. A head may use all of its slots; half of them are recent tokens.
            share = {"sinks": 0, "recent": 2}.get(field, 1)
            return jnp.full(shape.shape, share and shapes["position"].shape[-1] // share, shape.dtype)

        return jax.tree_util.tree_map_with_path(fill, self.shapes)
