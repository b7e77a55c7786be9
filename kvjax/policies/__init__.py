"""Policies: which tokens stay in a cache, as records of parts that combine."""

from kvjax.policies.plan import Plan as Plan
from kvjax.policies.policy import Policy as Policy
from kvjax.policies.protection import Protection as Protection
from kvjax.policies.registry import CODECS as CODECS
from kvjax.policies.registry import PAPERS as PAPERS
from kvjax.policies.registry import PLANS as PLANS
from kvjax.policies.registry import REGISTRY as REGISTRY
from kvjax.policies.registry import RESIDUALS as RESIDUALS
from kvjax.policies.registry import SELECTIONS as SELECTIONS
from kvjax.policies.registry import name_of as name_of
from kvjax.policies.registry import policy as policy
from kvjax.policies.registry import replaced as replaced
from kvjax.policies.registry import residual_by_name as residual_by_name
from kvjax.policies.registry import settings_in as settings_in
from kvjax.policies.registry import settings_of as settings_of
from kvjax.policies.residual import Residual as Residual
from kvjax.policies.score import Score as Score
from kvjax.policies.selection import Selection as Selection
