"""Oracle: ``blockwalk.train`` with the same data, rates and seed: its losses, evaluations and
weights; and scores that transformers' own logits give by the definition, from bytes."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaForCausalLM, TrainerCallback, TrainingArguments

import blockwalk
from blockwalk.integrations import BlockwalkTrainer
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support.messages import refused

logging.getLogger("transformers").setLevel(logging.ERROR)

STEPS = 6
RATE = 1e-2


def data_of(tiny_run: TinyRun, **more: Any) -> dict[str, Any]:
    words = {"template": "{text} It was {label}.", "label_words": ["good", "bad"]}
    files = {"train": str(tiny_run.train), "eval": str(tiny_run.eval)}
    return {**files, **words, "shuffle": False, **more}


def trainer(
    tiny_run: TinyRun, folder: Path, plan: Any, data: dict[str, Any], **more: Any
) -> BlockwalkTrainer:
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        train_sampling_strategy="sequential",
        lr_scheduler_type="constant",
        learning_rate=RATE,
        weight_decay=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=STEPS,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return BlockwalkTrainer(tiny_run.model, args, plan=plan, data=data, **more)


PLANS = {
    "label words": {"method": "mezo", "zo": {"objective": "label_words"}},
    "accuracy": {"method": "zo2", "zo": {"objective": "accuracy"}},
    "loss": {"method": "mezo"},
    "first order": {"method": "plain"},
}


@pytest.mark.parametrize("settings", PLANS.values(), ids=PLANS)
def test_a_trainer_with_data_is_blockwalk_train(
    settings: dict[str, Any], tiny_run: TinyRun, tmp_path: Path
) -> None:
    data = data_of(tiny_run)
    optimizer = {"learning_rate": RATE, "schedule": "constant", "weight_decay": 0.0}
    blockwalk.train(
        model=str(tiny_run.model),
        output_dir=str(tmp_path / "run"),
        data=data,
        max_steps=STEPS,
        batch_size=4,
        eval_every=STEPS,
        lora=False,
        seed=42,
        optimizer={**optimizer, "max_grad_norm": 0.0},
        **settings,
    )
    named = dict(settings)
    plan = blockwalk.method(named.pop("method"), **named)
    scores: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        scores.append(prediction)
        chosen = prediction.predictions.argmax(1)
        return {"by_hand": float((chosen == prediction.label_ids).mean())}

    done = trainer(tiny_run, tmp_path / "trainer", plan, data, compute_metrics=metrics)
    done.train()

    def lines(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "run" / name).read_text().splitlines()]

    expected = [line["loss"] for line in lines("metrics.jsonl")]
    logged = [line["loss"] for line in done.state.log_history if "loss" in line]
    assert logged == pytest.approx(expected, rel=1e-5)
    evaluation = lines("evaluations.jsonl")[-1]
    measured = [line for line in done.state.log_history if "eval_loss" in line][-1]
    for name in ("loss", "accuracy", "f1"):
        assert measured[f"eval_{name}"] == pytest.approx(evaluation[name], rel=1e-5), name
    assert measured["eval_by_hand"] == evaluation["accuracy"]
    assert scores[-1].predictions.shape == (10, 2)
    done.save_model(str(tmp_path / "saved"))
    weights = load_file(tmp_path / "run" / "model" / "model.safetensors")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    for name, value in weights.items():
        torch.testing.assert_close(saved[name], value, atol=1e-6, rtol=1e-5)


BYTES = sorted(ByteLevel.alphabet())
"""The characters that stand for bytes; the tiny model's tokens are these after bos and eos."""
FIRST_BYTE = 2


def tokens_of(text: str) -> list[int]:
    """The tiny model's tokens of a text, without a tokenizer: a byte is a token."""
    written = text.replace(" ", "Ġ")
    return [FIRST_BYTE + BYTES.index(character) for character in written]


def mean_log_probability(model: Any, prompt: str, word: str) -> float:
    """The mean of the log-probabilities of a word's tokens behind a prompt."""
    ids = [*tokens_of(prompt), *tokens_of(word)]  # the tokenizer puts no bos before them
    count = len(tokens_of(word))
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].double()
    log_probabilities = logits.log_softmax(-1)
    positions = range(len(ids) - count, len(ids))
    return sum(float(log_probabilities[at - 1, ids[at]]) for at in positions) / count


def test_scores_of_candidates_are_mean_log_probabilities(tiny_run: TinyRun, tmp_path: Path) -> None:
    predictions: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        predictions.append(prediction)
        return {}

    words = ["good", "bad"]  # of unequal length: no sum is a mean
    untrained = trainer(tiny_run, tmp_path, None, data_of(tiny_run), compute_metrics=metrics)
    figures = untrained.evaluate()
    model = LlamaForCausalLM.from_pretrained(tiny_run.model, dtype=torch.float32).eval()
    records = [json.loads(line) for line in tiny_run.eval.read_text().splitlines()]
    by_hand = [
        [mean_log_probability(model, f"{record['text']} It was", f" {word}") for word in words]
        for record in records
    ]
    (prediction,) = predictions
    assert prediction.predictions.tolist() == [pytest.approx(row, rel=1e-5) for row in by_hand]
    right = [words.index(record["label"]) for record in records]
    assert prediction.label_ids.tolist() == right
    chosen = [0 if good > bad else 1 for good, bad in by_hand]
    hits = sum(one == other for one, other in zip(chosen, right, strict=True))
    assert figures["eval_accuracy"] == pytest.approx(hits / len(records))


def test_a_task_by_name_is_trained_and_ranked(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: the counts of the records, and one event for each batch of candidates."""
    for name in ("train", "eval"):
        records = [
            {"sentence": f"{word} film .", "label": number % 2}
            for number, word in enumerate(["fresh", "stale", "kind", "rude"] * 3)
        ]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    data = {
        "task": "sst2",
        "task_dev": 0,
        "train": str(tmp_path / "train.jsonl"),
        "eval": str(tmp_path / "eval.jsonl"),
    }
    told: list[int] = []

    class Told(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            told.append(1)

    plan = blockwalk.method("mezo", zo={"objective": "label_words"})
    done = trainer(tiny_run, tmp_path / "run", plan, data, callbacks=[Told()])
    done.train()
    assert len(done.train_dataset) == 12
    assert len(told) == 24 / 4
    figures = done.evaluate()
    assert 0 <= figures["eval_accuracy"] <= 1
    assert done.state.global_step == STEPS


def test_held_out_texts_have_logits_for_metrics(tiny_run: TinyRun, tmp_path: Path) -> None:
    """Oracle: the model's own logits of the rows that were trained on."""
    data = {"train": str(tiny_run.train), "eval": str(tiny_run.eval), "format": "text"}
    given: list[Any] = []

    def metrics(prediction: Any) -> dict[str, float]:
        given.append(prediction)
        return {}

    done = trainer(tiny_run, tmp_path, None, data, compute_metrics=metrics)
    loss = done.evaluate()["eval_loss"]
    logits = torch.from_numpy(given[0].predictions)[:, :-1]
    labels = torch.from_numpy(given[0].label_ids)[:, 1:]
    by_token = torch.nn.functional.cross_entropy(
        logits.transpose(1, 2), labels, ignore_index=-100, reduction="none"
    )
    assert len(logits) == 10
    assert loss == pytest.approx(float(by_token.sum() / (labels != -100).sum()), rel=2e-2)


def test_data_is_refused_beside_data_sets_and_without_a_tokenizer(
    tiny_run: TinyRun, tmp_path: Path
) -> None:
    with refused(ValueError, "data train_dataset"):
        trainer(tiny_run, tmp_path, None, data_of(tiny_run), train_dataset=[1])
    with refused(ValueError, "processing_class"):
        BlockwalkTrainer(tiny_model("llama"), data=data_of(tiny_run))
    with refused(ValueError, "data.tran data.train"):
        trainer(tiny_run, tmp_path, None, {"tran": "a.jsonl"})
