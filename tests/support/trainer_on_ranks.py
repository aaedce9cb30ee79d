"""A Trainer's runs on however many ranks were started:
``python -m tests.support.trainer_on_ranks FOLDER,METHOD,ROWS[,CHECKPOINT[,TINY]] ...``. TINY is
the folder of a tiny run, whose label words are ranked."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import TrainingArguments

import blockwalk
from blockwalk.integrations import BlockwalkTrainer
from tests.models import tiny_model


def rows(count: int) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    drawn = [
        torch.randint(3, 101, (5 + 3 * (n % 3),), generator=generator).tolist()
        for n in range(count)
    ]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in drawn]


def padded(examples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    tensors = {}
    for name, filling in (("input_ids", 0), ("labels", -100)):
        lines = [torch.tensor(example[name]) for example in examples]
        tensors[name] = torch.nn.utils.rnn.pad_sequence(
            lines, batch_first=True, padding_value=filling
        )
    return {**tensors, "attention_mask": (tensors["input_ids"] != 0).long()}


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of tokens that are the likeliest, and a sum that every logit is part of."""
    counted = prediction.label_ids[:, 1:] != -100
    logits = prediction.predictions[:, :-1][counted]
    right = logits.argmax(-1) == prediction.label_ids[:, 1:][counted]
    return {"accuracy": float(right.mean()), "norm": float(np.linalg.norm(logits))}


def scored(prediction: Any) -> dict[str, float]:
    """Return the sum of all candidates' scores."""
    return {"norm": float(np.linalg.norm(prediction.predictions))}


def handed_in(tiny: str) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return model, data with its metrics, and settings of the plan: rows of tokens, or a tiny
    run's classes."""
    if not tiny:
        data = {"train_dataset": rows(24), "eval_dataset": rows(8), "data_collator": padded}
        return tiny_model("llama"), {**data, "compute_metrics": accuracy}, {"loss": "model"}
    files = {name: f"{tiny}/{name}.jsonl" for name in ("train", "eval")}
    words = {"template": "{text} It was {label}.", "label_words": ["good", "bad"]}
    data = {"data": {**files, **words}, "compute_metrics": scored}
    return f"{tiny}/m", data, {"zo": {"objective": "label_words"}}


def run(folder: Path, name: str, batch_rows: int, checkpoint: str = "", tiny: str = "") -> None:
    """Train four steps, evaluate, and leave the model and the log in a folder."""
    model, data, settings = handed_in(tiny)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    args = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=batch_rows,
        train_sampling_strategy="sequential",
        learning_rate=1e-3,
        max_grad_norm=0.0,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_steps=2,
        per_device_eval_batch_size=batch_rows,
    )
    trainer = BlockwalkTrainer(
        model,
        args,
        plan=blockwalk.method(name, mesh={"world": world}, **settings),
        **data,
    )
    trainer.train(resume_from_checkpoint=checkpoint or None)
    trainer.evaluate()
    trainer.save_model(str(folder / "model"))
    if trainer.is_world_process_zero():
        (folder / "log.json").write_text(json.dumps(trainer.state.log_history))
    trainer.walker.close()


if __name__ == "__main__":
    for words in sys.argv[1:]:
        where, method_name, count, *rest = words.split(",")
        run(Path(where), method_name, int(count), *rest)
