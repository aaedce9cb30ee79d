"""Chat templates by name, for models that come without one: the formats of well-known families, in
Jinja.

Each writes what the family's own tokenizer writes of text turns, character for character. Tools are
left out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NamedTemplate:
    """A chat template and the marks that it is written with."""

    text: str
    end: str
    """The mark that ends a turn of the assistant; empty where that is the tokenizer's own end of
    text."""
    marks: tuple[str, ...] = ()
    """Marks that are one token each in the family's tokenizers."""


_ALTERNATE = """\
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{- raise_exception('turns of user and assistant must alternate, and the user begins') }}
{%- endif %}
"""
_WITHOUT_SYSTEM = """\
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if system else messages) %}
"""

_CHATML = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
_GEMMA = (
    "{{- bos_token }}\n"
    + _WITHOUT_SYSTEM
    + _ALTERNATE
    + """\
    {{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' }}
    {{- (system if loop.first else '') + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}
"""
)
_PHI3 = """\
{%- for message in messages %}
    {%- if message['role'] in ('system', 'user', 'assistant') %}
        {{- '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\\n' }}
{%- else %}
    {{- eos_token }}
{%- endif %}
"""
_MISTRAL = (
    "{{- bos_token }}\n"
    + _WITHOUT_SYSTEM
    + _ALTERNATE
    + """\
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + (system if loop.first else '') + message['content'] + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] }}{{- eos_token }}
    {%- endif %}
{%- endfor %}
"""
)

TEMPLATES = {
    "chatml": NamedTemplate(_CHATML, "<|im_end|>", ("<|im_start|>", "<|im_end|>")),
    "llama3": NamedTemplate(
        _LLAMA3, "<|eot_id|>", ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    ),
    "gemma": NamedTemplate(_GEMMA, "<end_of_turn>", ("<start_of_turn>", "<end_of_turn>")),
    "phi3": NamedTemplate(_PHI3, "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")),
    "mistral": NamedTemplate(_MISTRAL, ""),
}
"""The templates by the names that ``data.chat_template`` takes."""
