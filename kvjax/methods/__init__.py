"""Eviction methods, one file per paper, and the registry that builds policies by name."""

from kvjax.methods.register import PAPERS as PAPERS
from kvjax.methods.register import PLANS as PLANS
from kvjax.methods.register import REGISTRY as REGISTRY
from kvjax.methods.register import RESIDUALS as RESIDUALS
from kvjax.methods.register import SELECTIONS as SELECTIONS
from kvjax.methods.registry import name_of as name_of
from kvjax.methods.registry import policy as policy
from kvjax.methods.registry import replaced as replaced
from kvjax.methods.registry import settings_in as settings_in
from kvjax.methods.registry import settings_of as settings_of
from kvjax.policies.quantizer import CODECS as CODECS
