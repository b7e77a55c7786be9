"""Scores: ranking of cached tokens by importance, the one choice in which the papers differ."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, ClassVar

from jaxtyping import Array, Float

from kvjax.policies.base import Part
from kvjax.types import Heads, New, PyTree, View
from pallas_kernels.hamming import Hashing

if TYPE_CHECKING:
    from typing import Self


class Score(Part):
    """Importance of each slot; all scores share the rest of eviction.

    A decode step makes these calls in each layer:

    - `score`; the new token takes the slot that ranks lowest, or an empty slot if there is one.
    - `slot` of the new token; the result is stored beside its key and value.
    - After attention `advance` and `fold`, if the score `asks` for attention statistics.

    A prompt, a turn or a chunk is read as a whole: `slot`, attention, `advance`, `fold` and `settle`. Then the slots
    that rank highest are kept.

    Example:
        >>> import flax
        >>> @flax.struct.dataclass
        ... class Oldest(kvjax.Score):
        ...     def score(self, view, new):
        ...         return -view.position.astype("float32")
        >>> model = kvjax.load("tiny")
        >>> state, _ = kvjax.prefill(model, kvjax.Policy(Oldest()), [range(5, 45)], budget=16)
        >>> sorted(kvjax.held_positions(state)[0][0, 0].tolist())[:8]
        [0, 1, 2, 3, 4, 5, 6, 7]
    """

    def __new__(cls, *values: Any, **named: Any) -> Self:
        """Check that statistics from `asks` have a method that uses them, and that `fold` gets statistics."""
        asks = cls.asks is not Part.asks
        folds = any(getattr(cls, name) is not getattr(Score, name) for name in ("fold", "advance", "settle"))
        if asks and not folds:
            raise TypeError(
                f"{cls.__name__} asks for statistics of attention and never takes them; override fold, which gets them."
            )
        if cls.fold is not Score.fold and not asks:
            raise TypeError(f"{cls.__name__}.fold would never be called; override asks, which says what fold gets.")
        return super().__new__(cls, *values, **named)

    paper: ClassVar[str] = ""
    """Source of the method, with its equation."""
    aligned: bool = False
    """True if slots must hold the same tokens in all heads of a layer."""
    aligned_layers: bool = False
    """True if slots must hold the same tokens in all layers."""
    slides: ClassVar[bool] = False
    """True if `score` orders by position, so that beyond sinks a head always holds the newest tokens without a gap.

    Only scores of kvjax may set it; kvjax always calls `score` of a user's own class.
    """
    adds: bool = False
    """True if `score` returns the state of each slot, which starts at 0 and to which `fold` adds the statistics.

    A kernel that reads the score then accumulates into it in the same pass. Only scores of kvjax may set it.
    """
    compares: ClassVar[bool] = False
    """True if `score` depends on more of the new token than its position."""
    offloads: bool = False
    """True if per-slot state is kept in host memory from one token to the next."""
    spares_idle_rows: ClassVar[bool] = False
    """True if `advance` leaves rows that read nothing unchanged; if not, each step copies state to restore them."""
    prefill_chunk: int | None = None
    """Prompt tokens read between two compressions; None for the whole prompt, 1 for one decode step each."""

    def check_prompt(self, shortest: int) -> None:
        """Refuse prompts that are too short for the settings.

        Args:
            shortest: tokens of the shortest prompt.

        Raises:
            ValueError: if a setting needs a longer prompt.
        """

    def fold(self, answers: PyTree, view: View, new: New) -> PyTree:
        """Return the new state of each slot, `view.slots.score`, after attention; each slot independently.

        Args:
            answers: attention statistics, in the structure of `asks`.
            view: the slots, those of the new tokens included.
            new: the tokens that attended.
        """
        return view.slots.score

    def advance(self, heads: Heads, new: New) -> PyTree:
        """Return the new state of whole heads, `heads.state.score`, after attention and before `fold`."""
        return heads.state.score

    def settle(self, view: View, new: New) -> PyTree:
        """Return the new state of each slot at the end of a block; it may depend on all slots of a head."""
        return view.slots.score

    @abc.abstractmethod
    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """Return the importance of each slot: the lowest is evicted first, -inf immediately, +inf never.

        Args:
            view: the slots; scores of empty slots are ignored. Of equal scores the oldest token is evicted.
            new: tokens being read: a token that needs a slot, or a block whose tokens have slots.
        """

    def hashing(self, new: New) -> Hashing | None:
        """Return the hashing if `score` is minus the Hamming distance between the codes of queries and keys, else None.

        The state of slots is then the words of their keys' codes, and kernels choose the evicted slot without scores.
        Only scores of kvjax may override it.
        """
        return None
