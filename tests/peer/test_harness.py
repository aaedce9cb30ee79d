"""Oracle: the evaluation harness's own class for Hugging Face models, on the same weights in
memory: every score, continuation and metric of a task of each kind, on a local data file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import TinyRun

lm_eval = pytest.importorskip("lm_eval")

KINDS: dict[str, dict[str, Any]] = {
    "multiple_choice": {
        "doc_to_text": "{{text}} It was",
        "doc_to_choice": ["good", "bad, very bad"],
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "loglikelihood_rolling": {
        "doc_to_text": "",
        "doc_to_target": "{{text}}" * 6,
        "metric_list": [{"metric": "word_perplexity"}],
    },
    "generate_until": {
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{label}}",
        "generation_kwargs": {"until": ["e", "zz top"], "max_gen_toks": 6},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def scores(model: Any, data: Path) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager

    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
    }
    tasks = [{"task": kind, "output_type": kind, **shared, **own} for kind, own in KINDS.items()]
    manager = TaskManager(include_defaults=False)
    found = lm_eval.simple_evaluate(
        model, tasks=tasks, bootstrap_iters=0, task_manager=manager, log_samples=True
    )
    return {
        kind: (found["results"][kind], [doc["resps"] for doc in found["samples"][kind]])
        for kind in KINDS
    }


def test_a_task_of_each_kind_scores_as_in_transformers(
    tiny_run: TinyRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts of unequal lengths, in batches of three whose rolling windows are cut at 48 tokens."""
    import datasets
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from blockwalk.integrations.harness import BlockwalkLM

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    lines = [json.loads(line) for line in tiny_run.train.read_text().splitlines()[:7]]
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(
            f"{json.dumps({'text': 'so ' * n + r['text'], 'label': n % 2})}\n"
            for n, r in enumerate(lines)
        )
    )
    ours = BlockwalkLM(
        str(tiny_run.model), batch_size=3, max_length=48, compute_dtype="float32", device="cpu"
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_run.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_run.model)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=48)
    found = scores(ours, data)
    expected = scores(theirs, data)
    ours.walker.close()
    assert found["generate_until"] == expected["generate_until"]
    for kind in KINDS:
        for name, value in expected[kind][0].items():
            assert found[kind][0][name] == (
                pytest.approx(value, rel=1e-5) if isinstance(value, float) else value
            ), name
    flat = [
        [resp for doc in each["multiple_choice"][1] for choice in doc for resp in choice]
        for each in (found, expected)
    ]
    assert [bool(greedy) for _, greedy in flat[0]] == [bool(greedy) for _, greedy in flat[1]]
    assert [float(total) for total, _ in flat[0]] == pytest.approx(
        [float(total) for total, _ in flat[1]], rel=1e-5
    )
