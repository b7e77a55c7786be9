"""kvjax: language models on a KV cache that never outgrows a fixed budget."""

from kvjax import policies as policies
from kvjax.decode import State as State
from kvjax.decode import cache_bytes as cache_bytes
from kvjax.decode import decode_step as decode_step
from kvjax.decode import decode_step_in_place as decode_step_in_place
from kvjax.decode import full_cache_bytes as full_cache_bytes
from kvjax.decode import prefill as prefill
from kvjax.model import Model as Model
from kvjax.model import load as load
from kvjax.models import ModelConfig as ModelConfig
from kvjax.policies import policy as policy
from kvjax.policies.base import Policy as Policy
