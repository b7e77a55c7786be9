"""Attention from known tokens, several of each row, to a layer's slots: without statistics or evicted pairs."""

from __future__ import annotations

from kvjax.policies.policy import Policy
from kvjax.types import LayerTokens, View
from pallas_kernels.attention import Partial, attend, merge
from pallas_kernels.decode_attention import decode_attention


def attend_known(policy: Policy, view: View, block: View, new: LayerTokens) -> Partial:
    """Attend from known tokens, which `block` has alone, to all slots of a layer, in which they have got a place."""
    spec = new.config.spec
    mask, bias = spec.mask(new.position, block.position), spec.bias(new.position[:, None], block.position)
    own, _ = attend(new.q, block.keys(new), block.values(new), mask, spec, bias)
    return merge(own, attend_earlier(policy, view, new))


def attend_earlier(policy: Policy, view: View, new: LayerTokens) -> Partial:
    """Attend from known tokens to the slots of tokens before all of them."""
    spec, (rows, heads, groups, tokens, width) = new.config.spec, new.q.shape
    if spec.window is not None or spec.slopes is not None or policy.codec.positions != "original":
        # These tell the queries of a head apart.
        mask = spec.mask(new.position, view.position) & (view.position < new.position[:, None, :1])[:, :, None]
        bias = spec.bias(new.position[:, None], view.position)
        return attend(new.q, view.keys(new), view.values(new), mask, spec, bias)[0]
    # All of a head's queries see the same earlier slots, like those of one token with more query heads.
    together = new.part(0, 1).replace(q=new.q.reshape(rows, heads, groups * tokens, 1, width))
    operands, last = policy.codec.operands(view, together), together.position[:, 0] - 1
    attention = decode_attention(operands.q[:, :, :, 0], *operands.stored_once, view.position, last, spec)
    shape = rows, heads, groups, tokens
    return Partial(*(leaf.reshape(*shape, *leaf.shape[3:]) for leaf in attention[:2]))
