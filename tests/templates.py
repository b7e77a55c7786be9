"""Chat templates of the forms that models have, in words of our own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests import tokenizing

_CHATML = "{{ '<|im_start|>' + m.role + '\\n' }}"

TEXT = {
    "chatml": "{% for m in messages %}" + _CHATML + "{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "trim": "{{ bos_token }}{% for m in messages %}[{{ m['role'] | upper }}] {{ m['content'] | trim }}{% endfor %}",
    "json": "{{ messages | tojson(indent=2) }}",
    "blocks": """{{- bos_token }}
{%- set ns = namespace(system='', first=true) %}
{%- for m in messages %}
    {%- if m.role == 'system' %}
        {%- set ns.system = m.content ~ '\\n' %}
        {%- continue %}
    {%- endif %}
    {% generation %}{{ dict(user='U', assistant='A').get(m.role) }}{% endgeneration %}: {{ ns.system }}{{ m.content }}
    {% set ns.system = '' %}
{% endfor %}
{% if strftime_now('%Y') | int < 2000 %}{{ raise_exception('old') }}{% endif %}
{% if add_generation_prompt %}A:{% endif %}
""",
    "thoughts": "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text %}{% set text = text.split('</think>')[-1].lstrip() %}"
    "{% endif %}"
    + _CHATML
    + "{{ text + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}",
}
"""Templates that read texts."""
PARTS = {
    "llava": "{% for m in messages %}{{ m.role | upper + ': ' if m.role != 'system' else '' }}"
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.text + ' ' }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}",
    "smolvlm": "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}"
    "{% if m['content'][0]['type'] == 'image' %}:{% else %}: {% endif %}"
    "{% for line in m['content'] %}{% if line['type'] == 'text' %}{{ line['text'] }}{% elif line['type'] == 'image' %}"
    "{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
    "idefics": "{% for m in messages %}{{ m.role }}:{% for part in m.content %}{{ part['text'].strip() }} {% endfor %}"
    "{% endfor %}",
}
"""Templates that read lists of parts."""
BOTH = {
    "qwen2vl": "{% for m in messages %}" + _CHATML + "{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if 'text' in part %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
}
"""Templates that read either."""
SYSTEM_TEXT = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content + '\\n' }}{% else %}{{ m.role }}: "
    "{% for part in m.content %}{{ part.text }}{% endfor %};{% endif %}{% endfor %}"
)
"""A template that reads the system's turn as a text and others as lists of parts."""


def model_with(template: str, **changes: Any) -> Any:
    """What `render` needs of a model."""
    tokenizer = tokenizing.words(chat_template=template, bos_token="w3", eos_token="w4")
    return SimpleNamespace(**{"name": "small", "tokenizer": tokenizer, "directory": None} | changes)
