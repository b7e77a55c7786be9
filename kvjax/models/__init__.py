"""Decoder-only models: their configs, weights, forward pass and checkpoints."""

from kvjax.models.config import ModelConfig as ModelConfig
from kvjax.models.config import Rope as Rope
from kvjax.models.decoder import Weights as Weights
from kvjax.models.families import FAMILIES as FAMILIES
from kvjax.models.families import LoadError as LoadError
from kvjax.models.loading import load as load
from kvjax.models.model import Model as Model
from kvjax.models.weights import random_weights as random_weights
from kvjax.models.weights import weight_shapes as weight_shapes
