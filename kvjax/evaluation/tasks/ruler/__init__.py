"""Retrieval from contexts of a given length: RULER's families (Hsieh et al. 2024, arXiv 2404.06654), and two more.

Structure and counts are the published ones. Words and sentences are not, no worked example precedes the question, and
`length` does not include the answer. Compare scores with each other, not with published numbers.
"""

from kvjax.evaluation.tasks.ruler.drafts import HAYS as HAYS
from kvjax.evaluation.tasks.ruler.drafts import KINDS as KINDS
from kvjax.evaluation.tasks.ruler.drafts import NOISE as NOISE
from kvjax.evaluation.tasks.ruler.families import FAMILIES as FAMILIES
from kvjax.evaluation.tasks.ruler.fill import cases as cases
