"""What the host does for a step: processor seconds where products take almost no time, width 16.

On an accelerator these are the seconds that the device waits for Python. Each row of ours is
measured in turn with its peer, on one thread, a step of each: the two forwards of transformers that
a zeroth-order step consists of, and a step of PEFT with gradient checkpointing. A ratio is the
median of the pairs; the run is repeated, and the median of its ratios counts.

Source of the first figures: one H200, where 55 to 90% of a step were such waits."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.common import Bound, finish, median, parser, random_batch
from transformers import OPTConfig, OPTForCausalLM, Qwen2Config, Qwen2ForCausalLM

from blockwalk import Walker, method
from blockwalk.plan.choices import LoraSettings

WIDTH = 16
VOCABULARY = 64
TOKENS = 8
RANK = 4
LIMITS = {"mezo": 5.0, "zo2": 6.0, "device × raw": 0.95, "host × int4a": 1.4}
"""The most that a step may take of its peer's processor seconds."""

Step = Callable[[], object]


def processor_seconds(step: Step) -> float:
    """Return the processor seconds of one step, those of all threads."""
    began = time.process_time()
    step()
    return time.process_time() - began


def ratio_in_turn(ours: Step, peer: Step, pairs: int) -> tuple[float, float, float]:
    """Return seconds of ours, of the peer, and their ratio: medians of pairs, each in turn."""
    for step in (ours, peer, ours, peer):
        step()
    seconds = [(processor_seconds(ours), processor_seconds(peer)) for _ in range(pairs)]
    ratio = median([a / b for a, b in seconds])
    return median([a for a, _ in seconds]), median([b for _, b in seconds]), ratio


def zeroth_order(rounds: int, pairs: int) -> dict[str, Any]:
    """Return the figures of ``mezo`` and ``zo2`` beside two forwards of transformers."""
    config = OPTConfig(
        hidden_size=WIDTH,
        ffn_dim=2 * WIDTH,
        num_hidden_layers=24,
        num_attention_heads=2,
        vocab_size=VOCABULARY,
        word_embed_proj_dim=WIDTH,
        max_position_embeddings=64,
    )
    model = OPTForCausalLM(config).eval()
    batch = random_batch(VOCABULARY, 1, TOKENS, seed=0)

    @torch.no_grad()
    def two_forwards() -> None:
        for _ in range(2):
            model(input_ids=batch["input_ids"])

    figures = {}
    for row in ("mezo", "zo2"):
        with Walker(copy.deepcopy(model), method(row)) as walker:
            figures[row] = repeated(lambda: walker.step(batch), two_forwards, rounds, pairs)
    return figures


def first_order(rounds: int, pairs: int) -> dict[str, Any]:
    """Return the figures of LoRA by ``mebp`` beside PEFT with gradient checkpointing."""
    from peft import LoraConfig, get_peft_model

    config = Qwen2Config(
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=28,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    batch = random_batch(VOCABULARY, 1, TOKENS, seed=0)
    adapted = get_peft_model(
        copy.deepcopy(model), LoraConfig(r=RANK, target_modules="all-linear")
    ).train()
    adapted.base_model.model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    adapted.enable_input_require_grads()
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)

    def peft_step() -> None:
        adapted(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    figures = {}
    for frozen, settings in (("device × raw", {}), ("host × int4a", {"activation": "host"})):
        plan = method("mebp", frozen=frozen, **settings)
        with Walker(copy.deepcopy(model), plan, lora=LoraSettings(rank=RANK)) as walker:
            figures[frozen] = repeated(lambda: walker.step(batch), peft_step, rounds, pairs)
    return figures


def repeated(ours: Step, peer: Step, rounds: int, pairs: int) -> dict[str, float]:
    """Return the run with the median ratio of several."""
    runs = sorted((ratio_in_turn(ours, peer, pairs) for _ in range(rounds)), key=lambda run: run[2])
    mine, theirs, ratio = runs[len(runs) // 2]
    return {"milliseconds": 1e3 * mine, "peer_milliseconds": 1e3 * theirs, "ratio": ratio}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--pairs", type=int, default=7)
    arguments = options.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = zeroth_order(arguments.rounds, arguments.pairs)
    figures |= first_order(arguments.rounds, arguments.pairs)
    bounds = []
    for row, limit in LIMITS.items():
        of_row = figures[row]
        print(
            f"{row:14s} {of_row['milliseconds']:7.1f} ms of a processor, the peer"
            f" {of_row['peer_milliseconds']:6.1f}: {of_row['ratio']:.2f}"
        )
        bounds.append(Bound(f"{row}: a step ÷ its peer's", of_row["ratio"], limit))
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
