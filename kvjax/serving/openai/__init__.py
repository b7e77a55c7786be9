"""OpenAI's API: request bodies become engine requests, and engine events become answers."""

from kvjax.serving.openai.answer import Answer as Answer
from kvjax.serving.openai.bodies import Asked as Asked
from kvjax.serving.openai.bodies import chat as chat
from kvjax.serving.openai.bodies import completion as completion
from kvjax.serving.openai.bodies import no_model as no_model
from kvjax.serving.openai.bodies import parse as parse
from kvjax.serving.openai.errors import Refused as Refused
from kvjax.serving.openai.fields import CHAT as CHAT
from kvjax.serving.openai.fields import COMMON as COMMON
from kvjax.serving.openai.fields import COMPLETION as COMPLETION
from kvjax.serving.openai.fields import LONGEST_STOP as LONGEST_STOP
from kvjax.serving.openai.fields import MOST_CHOICES as MOST_CHOICES
from kvjax.serving.openai.fields import MOST_STOPS as MOST_STOPS
from kvjax.serving.openai.fields import Check as Check
