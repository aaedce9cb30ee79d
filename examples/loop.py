"""A training loop of one's own: a DataLoader, a warm-up, a loss that ignores the easy tokens, early
stopping, the best adapter.

python examples/loop.py [MODEL [DATA.jsonl]]
"""

import itertools
import json
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

import blockwalk

HERE = Path(__file__).parent
MODEL = sys.argv[1] if len(sys.argv) > 1 else str(HERE / "tiny-llama")
DATA = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "data" / "cards_train.jsonl"
STEPS = 8
RATE = 5e-3

tokenizer = AutoTokenizer.from_pretrained(MODEL)
records = [
    json.loads(line)["messages"] for line in DATA.read_text(encoding="utf-8").splitlines()[:96]
]


def collate(some):
    """Questions and answers as one batch, padded; questions and padding are no labels (-100)."""
    rows = [[tokenizer(f"{turn['content']}\n").input_ids for turn in turns[:2]] for turns in some]
    longest = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    labels = torch.full((len(rows), longest), -100)
    for row, (prompt, answer) in enumerate(rows):
        ids[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def hard_tokens(logits, batch):
    """The mean loss of the tokens that the model does not know yet."""
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), batch["labels"][:, 1:], reduction="none"
    )
    return losses[losses > 0.05].mean() if (losses > 0.05).any() else losses.sum() * 0


train = records[:80]
held_out = collate(records[80:])
batches = torch.utils.data.DataLoader(train, batch_size=8, shuffle=True, collate_fn=collate)
plan = blockwalk.method("mebp", optimizer={"learning_rate": RATE})
with blockwalk.Walker(MODEL, plan, lora={"rank": 8}, objective=hard_tokens) as walker:
    best = walker.evaluate(held_out).loss
    kept = walker.state_dict()
    for batch in itertools.islice(itertools.chain.from_iterable(itertools.repeat(batches)), STEPS):
        result = walker.step(batch, learning_rate=RATE * min(1.0, (walker.steps_done + 1) / 4))
        if result.step % 4 == 0:
            loss = walker.evaluate(held_out).loss
            print(f"step {result.step}  loss {result.loss:.4f}  held out {loss:.4f}")
            if loss > best:
                break  # it gets worse
            best = loss
            kept = walker.state_dict()
    walker.load_state_dict(kept)
    walker.save_pretrained("loop-adapter")
