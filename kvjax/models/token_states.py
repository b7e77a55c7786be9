"""Parts of a configuration: states of a token besides the hidden state that most models have."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LayerEmbeddings:
    """Embeddings of tokens that each layer has for itself (Gemma 3n and 4).

    Args:
        width: size of an embedding.
        vocab_size: tokens in the table of each layer; later ones have the embedding of token 0.
    """

    width: int
    vocab_size: int


@dataclasses.dataclass(frozen=True)
class Streams:
    """Several hidden states of each token, of which a layer computes one and corrects all (AltUp; Gemma 3n).

    Args:
        count: hidden states of a token.
        active: index of the one that layers compute.
        scaled: True if that one has a learned scale where the gate of `LayerEmbeddings` reads it.
    """

    count: int
    active: int = 0
    scaled: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.active < self.count:
            raise ValueError(f"the active one of {self.count} hidden states cannot be {self.active}.")
