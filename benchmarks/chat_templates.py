"""Every chat template that TRL ships, with seven conversations: what is learnt, beside the
template's training twin.

    python benchmarks/chat_templates.py            # a line for each pair that differs from its twin
    python benchmarks/chat_templates.py qwen3      # of one template, with its texts

The twin is TRL's: the same template with its assistant's turns marked, which transformers turns
into a mask of tokens. Tokens and masks are compared, character for character. A difference is
known, and then counted under its reason in :data:`KNOWN`, or it is printed as BAD and the exit code
is 1."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import trl
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from blockwalk.data.dataset import Encoded
from blockwalk.data.encode import encode, first_example
from blockwalk.data.records import Record

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
MARK = re.compile(
    r"<\|[^<>\s'\"]{1,40}>|<｜[^<>\s'\"]{1,40}>|<(?:start|end)_of_\w+>|<turn\|>|<tool_response\|>|</?think>"
)
"""The special tokens in a template's text, each of which is a token of its model."""
IN_PARTS = ("idefics3", "llava_next", "smolvlm")
"""Templates that take content in parts alone; their twins are asked so."""

WITH_TEXT = ("deepseek_r1_distill", "deepseekv3")
"""Templates that take a call's arguments as JSON text alone; the twin of the second takes an
object."""

KNOWN = {
    "same": "the twin's tokens and mask",
    "blank": "a line's end behind the turn's end is learnt by the twin alone: generation has"
    " stopped",
    "prompt": "the twin also learns what the generation prompt holds already (a header, <think>)",
    "left out": "the twin learns a turn that the template writes differently later, or whose call"
    " it drops",
    "other text": "the twin writes another text (GLM-4 moves its stop; Qwen3 keeps earlier"
    " reasoning)",
    "no twin": "TRL has no twin of this template",
    "refused": "the template refuses the conversation, or no turn of it can be learnt",
}
"""The kinds of results that are as they should be, and what each means."""
OTHER_TEXT = (
    "glm4moe",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
    "deepseek_r1_distill",
)
"""Templates whose twins write another text for some conversations."""


def turns(*contents: str) -> list[dict[str, Any]]:
    """A conversation of alternating turns, the user's first."""
    return [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]


CALL = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": turns("one two", "three four"),
    "system": [
        {"role": "system", "content": "null"},
        *turns("one two", "three four", "five", "six seven"),
    ],
    "blanks": turns(" one two\n", "\n three four \n"),
    "think": turns(
        "one", "<think>\nfive\n</think>\n\nthree four", "five", "<think>\nsix\n</think>\n\nseven"
    ),
    "reason": [
        *turns("one"),
        {"role": "assistant", "content": "three four", "reasoning_content": "five six"},
    ],
    "empty": turns("one two", ""),
    "tool": [
        *turns("What is the weather in Paris?"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "name": "get_weather", "content": "21"},
        {"role": "assistant", "content": "It is sunny, 21 degrees."},
    ],
}


def byte_tokenizer(template: str) -> Any:
    """A tokenizer of bytes whose special tokens are those that a template writes."""
    marks = list(dict.fromkeys(["<pad>", "<s>", "<|im_end|>", *MARK.findall(template)]))
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=len(marks) + 256,
        special_tokens=marks,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(["one two"], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = template
    return tokenizer


def as_taken(conversation: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """A conversation in the shape that a template takes."""
    wanted = copy.deepcopy(conversation)
    for turn in wanted:
        if name in IN_PARTS:
            turn["content"] = [{"type": "text", "text": turn["content"]}]
        for call in turn.get("tool_calls", ()) if name in WITH_TEXT else ():
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return wanted


def shown(rows: Encoded, tokenizer: Any) -> str:
    """The first example, with what is learnt in brackets."""
    return "".join(
        f"⟦{text}⟧" if learnt else text for text, learnt in first_example(rows, tokenizer)
    )


def shared(a: str, b: str) -> int:
    """The characters that two texts begin with in common."""
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def prompts(
    whole: str, conversation: list[dict[str, Any]], tokenizer: Any
) -> list[tuple[int, int]]:
    """The characters that a generation prompt holds behind the content of the turn before, for each
    assistant's turn."""
    spans = []
    for i, turn in enumerate(conversation):
        if turn["role"] == "assistant":
            stop = shared(
                tokenizer.apply_chat_template(
                    conversation[:i], tokenize=False, add_generation_prompt=True
                ),
                whole,
            )
            content = conversation[i - 1]["content"]
            text = content if isinstance(content, str) else content[0]["text"]
            spans.append((whole.rfind(text.strip(), 0, stop) + len(text.strip()), stop))
    return spans


def compare(template: Path, conversation: list[dict[str, Any]]) -> tuple[str, str]:
    """The kind of result of one conversation, of :data:`KNOWN` or BAD, and the text of the
    difference."""
    tokenizer = byte_tokenizer(template.read_text())
    wanted = as_taken(conversation, template.stem)
    try:
        rows = encode([Record({"messages": conversation}, "record 1")], tokenizer, max_length=None)
    except ValueError as error:
        try:
            tokenizer.apply_chat_template(wanted, tokenize=False)
        except Exception:
            return "refused", "by the template"
        return "refused" if "not learnt" in str(error) else "BAD", str(error)
    twin = template.with_name(f"{template.stem}_training.jinja")
    if not twin.exists():
        return "no twin", shown(rows, tokenizer)
    whole = tokenizer.apply_chat_template(wanted, tokenize=False)
    asked = prompts(whole, wanted, tokenizer)
    places = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    tokenizer.chat_template = twin.read_text()
    if template.stem == "deepseekv3":
        wanted = conversation
    theirs = tokenizer.apply_chat_template(
        wanted, return_dict=True, return_assistant_tokens_mask=True
    )
    ids, in_loss = rows[0]
    if tokenizer(whole, add_special_tokens=False)["input_ids"] != ids.tolist():
        return "BAD", f"other tokens than the template's text: {shown(rows, tokenizer)}"
    if theirs["input_ids"] != ids.tolist():
        return "other text" if template.stem in OTHER_TEXT else "BAD", shown(rows, tokenizer)
    beyond = []
    less = []
    kinds = {"same"}
    for token, (begin, end), ours, other in zip(
        ids, places, in_loss, theirs["assistant_masks"], strict=True
    ):
        if ours and not other:
            beyond.append(token)
        elif other and not ours:
            inside = any(start <= begin and end <= stop for start, stop in asked)
            kinds.add(
                "blank" if not whole[begin:end].strip() else "prompt" if inside else "left out"
            )
            less.append(token)
    kind = max(kinds, key=list(KNOWN).index)
    if beyond or (kind == "left out" and not rows.report.turns_left_out):
        kind = "BAD"
    return (
        kind,
        f"learnt beyond {tokenizer.decode(beyond)!r}, not learnt {tokenizer.decode(less)!r}:"
        f" {shown(rows, tokenizer)}",
    )


def main(names: list[str]) -> int:
    """Print the differences and the count of each kind. Answers 1 where one is not as it should
    be."""
    counts: Counter[str] = Counter()
    for template in sorted(TEMPLATES.glob("*.jinja")):
        if template.stem.endswith("_training") or (names and template.stem not in names):
            continue
        for name, conversation in CONVERSATIONS.items():
            kind, text = compare(template, conversation)
            counts[kind] += 1
            if names or kind == "BAD":
                print(f"{kind:10} {template.stem:24} {name:7} {text if names else text[:400]!r}")
    for kind, meaning in KNOWN.items():
        print(f"{counts[kind]:4} {kind:10} {meaning}")
    print(f"{counts['BAD']:4} {'BAD':10} of {sum(counts.values())} conversations")
    return int(counts["BAD"] > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
