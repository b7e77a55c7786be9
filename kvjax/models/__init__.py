"""Decoder-only models: their configs, weights, forward pass and checkpoints."""

from kvjax.models.checkpoints.loading import Checkpoint as Checkpoint
from kvjax.models.checkpoints.loading import read_checkpoint as read_checkpoint
from kvjax.models.config import ModelConfig as ModelConfig
from kvjax.models.decoder import Weights as Weights
from kvjax.models.families import FAMILIES as FAMILIES
from kvjax.models.families import LoadError as LoadError
from kvjax.models.weights import random_weights as random_weights
from kvjax.models.weights import weight_shapes as weight_shapes
from kvjax.rope import Rope as Rope
