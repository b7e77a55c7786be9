"""LESS: a policy that evicts, and a low-rank memory of what it evicted."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from kvjax.policies.base import check
from kvjax.policies.wrapper import Wrapper
from kvjax.types import NewTokens, setting, wide
from pallas_kernels import less_kernels
from pallas_kernels.decode_attention.types import LowRank

TOKEN_BLOCK = 64
"""Evicted tokens of a prompt whose hidden features exist at once."""


class LessState(struct.PyTreeNode):
    """The sum over evicted pairs of psi(k)^T v and of psi(k) (equation 6), beside the base policy's state."""

    base: Any
    h: Float[Array, "b h R d"]
    z: Float[Array, "b h R"]


@struct.dataclass(kw_only=True)
class Less(Wrapper):
    r"""Any policy, whose evicted pairs stay in R x d + R numbers per KV head.

    .. math::
        H \leftarrow H + \psi(k)^\top v, \quad z \leftarrow z + \psi(k) \quad \text{(eq. 4, 5)}, \qquad
        a = \frac{\phi(q) H + \exp(q K^\top / \sqrt d) V}{\phi(q) z^\top + \exp(q K^\top / \sqrt d) 1} \quad
        \text{(eq. 3)}

    computed as one more part of the attention, of logarithmic mass log(phi z), so that nothing overflows. Kernels see
    keys and queries rotated by original positions.

    Args:
        base: the policy that evicts, by name or made; further settings are its own.
        checkpoint: directory of kernels from `python -m kvjax.train_less`, or the name of shipped ones; empty for those
            that are shipped for the base policy, trained at the budget nearest to the one in use.
        kernel: `learned`, or `performer` for untrained random features; the setting `kernels` of `kvjax.policy`.
        features: R; 0 for that of the checkpoint, 8 for `performer`.
        kernel_seed: of the random features.
        kernels: arrays of `kvjax.less.init_kernels` instead of a checkpoint.
    """

    paper = "LESS, arXiv 2402.09398, Algorithm 1"

    checkpoint: str = setting("")
    kernel: str = setting("learned")
    features: int = setting(0)
    kernel_seed: int = setting(0)
    kernels: Any = None
    trained: tuple[tuple[float, float, Any], ...] = ()
    # Once bound, by slots and fraction of the model's longest text: all kernels among which the budget chooses.

    def __post_init__(self):
        super().__post_init__()
        check(self.kernel in ("learned", "performer"), "kernels", self.kernel, "'learned' or 'performer'")
        check(isinstance(self.features, int) and self.features >= 0, "features", self.features, "a whole number from 0")
        seed = self.kernel_seed
        check(isinstance(seed, int) and 0 <= seed < 2**32, "kernel_seed", seed, "a whole number below 2^32")
        check(isinstance(self.checkpoint, str), "checkpoint", self.checkpoint, "the name of a directory")

    @classmethod
    def settings(cls):
        """By name, `kernels` says which kind they are."""
        named = super().settings()
        return named | {"kernels": named.pop("kernel")}

    @classmethod
    def build(cls, **settings):
        """`kernels` is a kind of kernels or their arrays."""
        if isinstance(settings.get("kernels"), str):
            own = super().build(**{name: value for name, value in settings.items() if name != "kernels"})
            return dataclasses.replace(own, kernel=settings["kernels"])
        return super().build(**settings)

    def bind(self, model):
        """With kernels for a model, in a tuple of layers."""
        # Linen, which the kernels are made of, is imported where they are used: it is slow to import.
        from kvjax.less import checkpoint as checkpoints
        from kvjax.less.kernels import performer_kernels, unstack

        bound = super().bind(model)
        kernels = self.kernels
        if kernels is None and self.kernel == "performer":
            kernels = performer_kernels(jax.random.key(self.kernel_seed), model.config, features=self.features or 8)
        elif kernels is None:
            from kvjax.policies import name_of

            name = name_of(self.base)
            options = []
            for found in checkpoints.find(self.checkpoint, name):
                stacked, settings = checkpoints.load(found, model, name)
                if self.features not in (0, settings.features):
                    raise ValueError(
                        f"the kernels in {found} have {settings.features} features, not features={self.features}; "
                        "leave it out or give another checkpoint."
                    )
                longest = model.config.max_positions
                slots = settings.budget if isinstance(settings.budget, int) else settings.budget * longest
                options.append((float(slots), slots / longest, unstack(stacked)))
            kernels = options[0][-1]
            bound = dataclasses.replace(bound, trained=tuple(options))
        kernels = unstack(kernels)
        self._check_shapes(kernels, model)
        return dataclasses.replace(bound, kernels=kernels)

    def budgeted(self, budget):
        """With the kernels that were trained nearest to a budget, where there are several."""
        bound = super().budgeted(budget)
        if not self.trained:
            return bound
        fraction = isinstance(budget, float)
        wanted = max(1e-9, float(np.mean(budget)))  # what is no budget is refused where slots are counted
        nearest = min(self.trained, key=lambda option: abs(math.log(option[fraction] / wanted)))
        return dataclasses.replace(bound, kernels=nearest[-1], trained=())

    def _check_shapes(self, kernels, model):
        config = model.config
        if len(kernels) != config.layers:
            raise ValueError(f"kernels of {len(kernels)} layers do not fit the {config.layers} layers of {model!r}.")
        if self.kernel == "learned":
            given = kernels[0]["phi"]["first"].shape[:3]
            wanted = (config.kv_heads, config.groups, config.head_width)
            if given != wanted:
                raise ValueError(
                    f"kernels for (KV heads, groups, head width) {given} do not fit {wanted} of {model!r}."
                )

    def phi(self, layer: int, q: Float[Array, "b h g t d"]) -> Float[Array, "b h g t R"]:
        """Features of rotated queries."""
        return self._apply("phi", layer, q)

    def psi(self, layer: int, k: Float[Array, "b h t d"]) -> Float[Array, "b h t R"]:
        """Features of rotated keys."""
        return self._apply("psi", layer, k)

    def _apply(self, which: str, layer: int, x: Array) -> Any:
        from kvjax.less.kernels import Performer, layer_params

        params = layer_params(self.kernels, layer)[which]
        if self.kernel == "performer":
            return Performer(params["planes"].shape[-2]).apply({"params": params}, x)
        return {"phi": less_kernels.phi, "psi": less_kernels.psi}[which](x, **params)

    def rank(self, new: NewTokens) -> int:
        """R."""
        one = jax.ShapeDtypeStruct((*new.k.shape[:2], 1, new.k.shape[-1]), new.k.dtype)
        return jax.eval_shape(lambda k: self.psi(new.layer, k), one).shape[-1]

    def inner(self, state):
        return state.base

    def outer(self, state, inner):
        return state.replace(base=inner)

    def init(self, new):
        """H_0 = 0, z_0 = 0."""
        if self.kernels is None:
            raise ValueError("LESS has no kernels yet: call bind(model), as prefill does.")
        features = self.rank(new)
        rows, heads, _, width = new.k.shape
        dtype = wide(new.k.dtype)
        return LessState(
            self.base.init(new),
            jnp.zeros((rows, heads, features, width), dtype),
            jnp.zeros((rows, heads, features), dtype),
        )

    def absorb(self, state, evicted):
        """Equations 4 and 5."""
        state = super().absorb(state, evicted)
        sums = (state.h, state.z)
        m = evicted.k.shape[2]
        if m <= TOKEN_BLOCK:
            h, z = self._fold(sums, evicted.k, evicted.v, evicted.leaving, evicted.layer)
            return state.replace(h=h, z=z)
        padding = -m % TOKEN_BLOCK

        def blocks(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3))
            return jnp.moveaxis(x.reshape(*x.shape[:2], -1, TOKEN_BLOCK, *x.shape[3:]), 2, 0)

        pairs = (blocks(evicted.k), blocks(evicted.v), blocks(evicted.leaving))
        (h, z), _ = jax.lax.scan(lambda sums, block: (self._fold(sums, *block, evicted.layer), None), sums, pairs)
        return state.replace(h=h, z=z)

    def _fold(self, sums, k, v, leaving, layer):
        h, z = sums
        features = jnp.where(leaving[..., None], self.psi(layer, k), 0.0)
        return h + jnp.einsum("bhmr,bhmd->bhrd", features, v.astype(h.dtype)), z + features.sum(2)

    def memory(self, state, new):
        """Equation 3's phi, H and z."""
        own, of_base = LowRank(self.phi(new.layer, new.q), state.h, state.z), super().memory(state, new)
        if of_base is None:
            return own
        pairs = zip(zip(own, of_base, strict=True), (-1, 2, 2), strict=True)
        return LowRank(*(jnp.concatenate(pair, axis) for pair, axis in pairs))
