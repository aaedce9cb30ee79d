"""Objectives of log-probabilities beside TRL's own trainers: DPO on the same pairs in the same
order, and what it costs beside fine-tuning on as many rows.

    python benchmarks/objectives.py --model FOLDER --data dpo_en_demo.json --part curves --check
    python benchmarks/objectives.py --model FOLDER --data dpo_en_demo.json --part cost --check

The model was SmolLM2-135M-Instruct, the data LLaMA-Factory's demo pairs (ShareGPT). ``curves``:
the losses and margins of each step by DPOTrainer, the whole model in memory, and by
``blockwalk train`` with the frozen weights on disk; LoRA of rank 8 on every linear layer, AdamW,
everything in float32. ``cost``: processor seconds and private memory of DPO and of SFT on the
chosen and the rejected answers as rows, in turn, and of the reference pass; on an idle machine."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

from benchmarks.common import Bound, finish, parser

RATE = 2e-4
BETA = 0.1
RANK = 8
MARGIN_BOUND = 0.01
"""The margin of each step by TRL's, relative to the largest of the run."""
MEMORY_BOUND = 1.10
REFERENCE_BOUND = 0.45
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def pairs_of(data: Path, count: int, longest: int, model: Path) -> list[dict[str, Any]]:
    """The first records whose prompt and answers have at most so many tokens together."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    records = []
    for record in json.loads(data.read_text()):
        turns = [*record["conversations"], record["chosen"]]
        text = "".join(turn["value"] for turn in turns)
        both = (text, text.removesuffix(record["chosen"]["value"]) + record["rejected"]["value"])
        if max(len(tokenizer(part)["input_ids"]) for part in both) + 64 <= longest:
            records.append(record)
        if len(records) == count:
            break
    return records


def in_trls_form(record: dict[str, Any]) -> dict[str, Any]:
    def turns(values: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in values]

    return {
        "prompt": turns(record["conversations"]),
        "chosen": turns([record["chosen"]]),
        "rejected": turns([record["rejected"]]),
    }


def adapter_of(model: Path, folder: Path) -> Path:
    """An adapter whose B is 0, for both sides."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    get_peft_model(base, config).save_pretrained(folder)
    return folder


def trls_steps(
    model: Path, adapter: Path, records: list[dict[str, Any]], batch: int, folder: Path
) -> list[dict[str, float]]:
    """Loss and margin of each step of DPOTrainer."""
    import torch
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = DPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        num_train_epochs=1,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        weight_decay=0.0,
        beta=BETA,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        save_strategy="no",
        train_sampling_strategy="sequential",
    )
    trainer = DPOTrainer(
        model=PeftModel.from_pretrained(base, adapter, is_trainable=True),
        args=config,
        train_dataset=Dataset.from_list([in_trls_form(record) for record in records]),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    return [
        {
            "loss": line["loss"],
            "margin": line["rewards/margins"],
            "reward_accuracy": line["rewards/accuracies"],
        }
        for line in trainer.state.log_history
        if "rewards/margins" in line
    ]


def our_steps(
    model: Path, adapter: Path, records: list[dict[str, Any]], batch: int, folder: Path
) -> list[dict[str, float]]:
    """The same by ``blockwalk train``."""
    import blockwalk

    data = folder / "pairs.json"
    data.write_text(json.dumps(records))
    blockwalk.train(
        {
            "model": str(model),
            "objective": {"name": "dpo", "beta": BETA},
            "data": {
                "train": str(data),
                "shuffle": False,
                "show_first": False,
                "max_length": 1024,
            },
            "batch_size": batch,
            "lora": {"from": str(adapter)},
            "optimizer": {"learning_rate": RATE, "weight_decay": 0.0, "eps": 1e-8},
            "compute_dtype": "float32",
            "output_dir": str(folder / "run"),
        }
    )
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    names = ("loss", "margin", "reward_accuracy")
    return [{name: json.loads(line)[name] for name in names} for line in lines]


def curves(arguments: Any, folder: Path) -> dict[str, Any]:
    """Compare each step's loss and margin."""
    batch = arguments.batch
    records = pairs_of(arguments.data, arguments.steps * batch, arguments.seq, arguments.model)
    adapter = adapter_of(arguments.model, folder / "adapter")
    sides = {}
    for name, steps_of in (("ours", our_steps), ("TRL", trls_steps)):
        began = time.process_time()
        sides[name] = steps_of(arguments.model, adapter, records, batch, folder)
        print(f"{name}: {time.process_time() - began:.0f} processor seconds", flush=True)
    steps = list(zip(sides["ours"], sides["TRL"], strict=True))
    for number, (ours, trls) in enumerate(steps, 1):
        print(
            f"step {number:3}  loss {ours['loss']:.6f} {trls['loss']:.6f}"
            f"  margin {ours['margin']:+.6f} {trls['margin']:+.6f}",
            flush=True,
        )
    largest = max(abs(trls["margin"]) for _, trls in steps)
    margin = max(abs(ours["margin"] - trls["margin"]) for ours, trls in steps) / largest
    loss = max(abs(ours["loss"] - trls["loss"]) / abs(trls["loss"]) for ours, trls in steps)
    print(f"worst margin {margin:.2e} of the largest, worst loss {loss:.2e}", flush=True)
    return {"steps": sides, "worst_margin": margin, "worst_loss": loss}


def rows_for_sft(records: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for record in records:
        turns = in_trls_form(record)
        for name in ("chosen", "rejected"):
            yield {"prompt": turns["prompt"], "completion": turns[name]}


def cost(arguments: Any, folder: Path) -> dict[str, Any]:
    """Measure runs of DPO and SFT in processes of their own, in turn."""
    records = pairs_of(
        arguments.data, arguments.steps * arguments.batch, arguments.seq, arguments.model
    )
    (folder / "pairs.json").write_text(json.dumps(records))
    with (folder / "rows.jsonl").open("w") as file:
        for row in rows_for_sft(records):
            print(json.dumps(row), file=file)
    rounds: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        figures = {}
        for name in ("dpo", "sft") if number % 2 else ("sft", "dpo"):
            figures[name] = _run(arguments, folder, name, number)
        rounds.append(figures)
        print(figures, flush=True)
    memory = statistics.median(r["dpo"]["peak_bytes"] / r["sft"]["peak_bytes"] for r in rounds)
    reference = statistics.median(
        r["dpo"]["reference_seconds"] / r["dpo"]["step_seconds"] for r in rounds
    )
    print(f"memory {memory:.3f} of SFT's; reference pass {reference:.3f} of an epoch", flush=True)
    return {"rounds": rounds, "memory": memory, "reference": reference}


_CHILD = """
import json, sys, time
import blockwalk
from blockwalk.train import reference
marks = []
inner = reference.attached
def timed(*arguments):
    began = time.process_time()
    answer = inner(*arguments)
    marks.append(time.process_time() - began)
    marks.append(time.process_time())
    return answer
reference.attached = timed
outcome = blockwalk.train(json.loads(sys.argv[1]))
figures = {"peak_bytes": outcome.peak_bytes, "reference_seconds": marks[0],
           "step_seconds": time.process_time() - marks[1]}
print("FIGURES " + json.dumps(figures))
"""


def _run(arguments: Any, folder: Path, name: str, number: int) -> dict[str, float]:
    is_dpo = name == "dpo"
    settings = {
        "model": str(arguments.model),
        "objective": "dpo" if is_dpo else "sft",
        "data": {
            "train": str(folder / ("pairs.json" if is_dpo else "rows.jsonl")),
            "shuffle": False,
            "show_first": False,
            "max_length": 1024,
        },
        "batch_size": arguments.batch * (1 if is_dpo else 2),
        "lora": {"rank": RANK},
        "output_dir": str(folder / f"{name}-{number}"),
    }
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, json.dumps(settings)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    line = next(text for text in done.stdout.splitlines() if text.startswith("FIGURES "))
    figures: dict[str, float] = json.loads(line.removeprefix("FIGURES "))
    return figures


PARTS = {"curves": curves, "cost": cost}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", type=Path, required=True)
    options.add_argument("--data", type=Path, required=True)
    options.add_argument("--part", choices=list(PARTS), default="curves")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--batch", type=int, default=1, help="pairs a step")
    options.add_argument("--seq", type=int, default=512, help="tokens of a row at most")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--folder", type=Path, required=True)
    arguments = options.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    result = PARTS[arguments.part](arguments, arguments.folder)

    if arguments.part == "curves":
        bounds = [Bound("worst margin by the largest", result["worst_margin"], MARGIN_BOUND)]
    else:
        bounds = [
            Bound("memory of DPO by SFT's", result["memory"], MEMORY_BOUND),
            Bound("reference by an epoch", result["reference"], REFERENCE_BOUND),
        ]
    finish(arguments, result, bounds)


if __name__ == "__main__":
    main()
