"""Records of a chat as one text with its learnt parts."""

from __future__ import annotations

from typing import Any

from blockwalk.data.encode import encode
from blockwalk.data.records import Record
from tests.support import data_files

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.tool_calls %}{{"
    " m.tool_calls[0].function.name }}{% endif %}"
    "{% if m.role == 'assistant' %}</s>{% endif %}{% endfor %}{% if add_generation_prompt"
    " %}<assistant>{% endif %}"
)


tokenizer = data_files.tokenizer


def said(fields: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """A record as text, and the part of it that is learnt."""
    ids, in_loss = encode([Record(fields, "f record 1")], tokenizer, max_length=400)[0]
    return tokenizer.decode(ids), tokenizer.decode(ids[in_loss])
