"""Prompts that are read once into two caches, under a policy that drafts and one that verifies."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kvjax.cache.layer import LayerCache, MixerInput
from kvjax.cache.pending import Pending
from kvjax.cache.slots import Slots
from kvjax.inference.cache import Bound
from kvjax.inference.prepare import Prompts
from kvjax.inference.press import reads_all_first
from kvjax.models.decoder import Layer
from kvjax.policies.policy import Policy
from kvjax.types import setting
from kvjax.utils.fields import values_of


class PairedSlots(LayerCache, kw_only=True):
    """Slots of one layer under two policies, of which neither evicts before all tokens of a prompt have attended."""

    draft: Any
    """Slots under the policy of the layer, which get the statistics of attention."""
    full: Any
    """Slots under the policy that verifies, which requests no statistics."""
    verifier: Policy
    full_slots: int = setting(0)
    """Slots per head of the full cache after the prompt."""

    def grow(self, slots: int | None = None) -> PairedSlots:
        return self.replace(draft=self.draft.grow(slots), full=self.full.grow(self.full_slots))

    def attend(
        self,
        tokens: MixerInput,
        q: Float[Array, "b h g t d"],
        k: Float[Array, "b h t d"],
        v: Float[Array, "b h t e"],
        sink_logits: Float[Array, "h g"] | None,
    ) -> tuple[Float[Array, "b h g t e"], PairedSlots]:
        """Append the tokens to both, and attend from them once; see `kvjax.cache.slots.GrowingSlots.attend`."""
        out, draft = self.draft.attend(tokens, q, k, v, sink_logits)
        new = tokens.attending(q, k, v, sink_logits).rotated(tokens.turns)
        none: dict[str, Any] = {"score": (), "plan": ()}
        full = self.full.appended(self.verifier, new).replace(pending=Pending(none, none, new))
        return out, self.replace(draft=draft, full=full)

    def sum_outputs(
        self, tokens: MixerInput, outputs: Float[Array, "b t width"]
    ) -> tuple[Float[Array, "b t width"], PairedSlots]:
        outputs, draft = self.draft.sum_outputs(tokens, outputs)
        return outputs, self.replace(draft=draft)

    def close(self, policy: Policy) -> PairedSlots:
        draft, full = self.draft.close(policy), self.full.close(self.verifier)
        none = {"undefined": None}
        return self.replace(draft=draft.replace(**none), full=full.replace(**none), undefined=draft.undefined)


class PairedLayer(Layer, kw_only=True):
    """A layer whose prompts fill two caches."""

    verifier: Policy
    full_limit: Int[Array, "b h"] | Int[np.ndarray, "b h"]
    full_slots: int = setting(0)

    def init_cache(self, limit: Int[Array, "b h"], slots: int, dtype: DTypeLike) -> LayerCache:
        if not self.shape.attends:  # a state that no policy changes
            return super().init_cache(limit, slots, dtype)
        of_full = Layer(self.weights, self.verifier, self.number, self.config, self.like)
        full = of_full.init_cache(jnp.asarray(self.full_limit), slots, dtype)
        draft = super().init_cache(limit, slots, dtype)
        return PairedSlots(draft=draft, full=full, verifier=self.verifier, full_slots=self.full_slots)


class PairedReader(Bound, kw_only=True):
    """A model with the policy of a draft, whose prompts also fill the full cache."""

    verifier: Policy
    full_limits: tuple[Int[Array, "b _"] | Int[np.ndarray, "b _"], ...]
    full_slots: tuple[int, ...] = setting(())

    @property
    def layers(self) -> list[Layer]:
        """All layers, each with both policies as it uses them."""
        planned = zip(super().layers, self.full_limits, self.full_slots, strict=True)
        return [
            PairedLayer(
                **values_of(Layer, layer),
                **{"verifier": self.verifier.layer(index), "full_limit": limit, "full_slots": slots},
            )
            for index, (layer, limit, slots) in enumerate(planned)
        ]


def paired_reader(reader: Bound, draft: Prompts, full: Prompts) -> PairedReader | None:
    """Return a reader of prompts into both caches; None if hidden states differ under the two policies, or on a mesh.

    Args:
        reader: the model with the policy of the draft, from `bound_prompts`.
        draft: prompts as planned for the draft.
        full: the same prompts as planned for the full cache.
    """
    policies = draft.policy, full.policy
    requires = draft.policy.score.requires
    attends_alike = draft.policy.selection is None and not any(policy.codec.quantized for policy in policies)
    whole = draft.chunk is None and full.chunk is None and not reads_all_first(draft.policy)
    apart = requires.shared_slots == "layers" or requires.host_memory or reader.mesh is not None
    layers = zip(reader.weights.layers, reader.config.layer_configs, strict=True)
    has_slots = all(layer.mixer.cache_kind is Slots or not shape.attends for layer, shape in layers)
    if not (attends_alike and whole) or apart or not has_slots:
        return None
    return PairedReader(
        **values_of(Bound, reader), verifier=full.policy, full_limits=full.limits, full_slots=full.capacities
    )
