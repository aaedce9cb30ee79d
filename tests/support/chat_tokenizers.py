"""Tokenizers with chat templates of known text."""

from __future__ import annotations

from typing import Any

END = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}" + END


def tokenizer(template: str, *, begin: bool = False, eos: str = "</s>") -> Any:
    """A tokenizer of bytes, with marks for turns."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    marks = [
        "<s>",
        "</s>",
        "<|end|>",
        "<|user|>",
        "<|assistant|>",
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
    ]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    settings: dict[str, Any] = {
        "initial_alphabet": alphabet,
        "special_tokens": marks,
        "show_progress": False,
    }
    backend.train_from_iterator(
        ["one two"], trainers.BpeTrainer(vocab_size=len(marks) + 256, **settings)
    )
    if begin:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    fast.chat_template = template
    return fast


def chat(*answers: Any, role: str = "user") -> dict[str, Any]:
    turns = []
    for answer in answers:
        turn = answer if isinstance(answer, dict) else {"content": answer}
        turns += [{"role": role, "content": "one"}, {"role": "assistant", **turn}]
    return {"messages": turns}
