"""Scores: which cached token matters least, the one thing that the papers disagree on."""

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
    """How much each slot matters; everything else about eviction is shared.

    Per layer and step kvjax calls `score`, and gives the slot that ranks lowest to the new token (an empty one first,
    if there is any); `slot` of the new token, stored beside its key and value; and after attention, where the score
    `asks` for something, `fold` and `advance`. A prompt, a turn or a chunk is read as a whole: `slot`, attention,
    `fold`, `advance`, `settle`, then the slots that rank highest stay.

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
        """Checked: what it asks for is for `fold`, `advance` or `settle`."""
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
    """Where the method comes from, with its equation."""
    aligned: bool = False
    """Whether slots have to hold the same tokens in all heads of a layer."""
    aligned_layers: bool = False
    """Whether slots have to hold the same tokens in all layers."""
    slides: ClassVar[bool] = False
    """Whether what is live beyond sinks is always the newest tokens, without a gap: `score` orders by position.

    Of kvjax's own scores only: somebody's own is asked for its numbers.
    """
    adds: bool = False
    """Whether `score` is what a slot remembers, begins at 0, and `fold` adds the answer to it; kvjax's own only.

    A kernel that reads the score then adds to it on its way.
    """
    compares: ClassVar[bool] = False
    """Whether `score` looks at more of the token that wants a slot than its position."""
    offloads: bool = False
    """Whether what it remembers of slots waits in host memory from one token to the next."""
    spares_idle_rows: ClassVar[bool] = False
    """Whether `advance` leaves rows that read nothing as they are; if not, each step makes a copy to put them back."""
    prefill_chunk: int | None = None
    """Prompt tokens read between two compressions; None for the whole prompt, 1 for one decode step each."""

    def check_prompt(self, shortest: int) -> None:
        """Refuse prompts that are too short for the settings, given the tokens of the shortest.

        Raises:
            ValueError: a setting asks for more of the prompt than there is.
        """

    def fold(self, answers: PyTree, view: View, new: New) -> PyTree:
        """What the score remembers of each slot, `view.slots.score`, after attention; each slot for itself.

        Args:
            answers: of the same structure as what it `asks`.
            view: the slots, the new tokens in them.
            new: the tokens that attended.
        """
        return view.slots.score

    def advance(self, heads: Heads, new: New) -> PyTree:
        """What the score remembers of whole heads, `heads.state.score`, after `fold`."""
        return heads.state.score

    def settle(self, view: View, new: New) -> PyTree:
        """What the score remembers of each slot at the end of a block, where it may look across a head's slots."""
        return view.slots.score

    @abc.abstractmethod
    def score(self, view: View, new: New) -> Float[Array, "b h c"]:
        """How much each slot matters: the lowest leaves first, -inf at once, +inf never.

        Args:
            view: the slots; what an empty one scores is ignored. Of equal scores the oldest leaves.
            new: what is being read: the token that wants a slot, or a block that has them.
        """

    def hashing(self, new: New) -> Hashing | None:
        """What codes are made of, where `score` is minus the distance of the queries' from the keys'; else None.

        Slots remember the words of their keys' codes, and kernels then find the slot that leaves without scores; for
        kvjax's own only.
        """
        return None
