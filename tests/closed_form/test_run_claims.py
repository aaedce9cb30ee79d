"""Oracle: counting: how often each example comes, what a list of losses means, the rows of a table
of positions."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest

from blockwalk.cutting.skeleton import require_positions
from blockwalk.data.batching import Batches
from blockwalk.data.dataset import Encoded
from blockwalk.plan.run_config import DataSettings, RunConfig
from blockwalk.report import card
from blockwalk.system import atomic_files
from blockwalk.train.metrics_log import MetricsLog
from blockwalk.train.outcome import Outcome
from tests.support.messages import refused, says


def examples(count: int) -> Encoded:
    tokens = np.arange(3 * count, dtype=np.int32)
    return Encoded(
        tokens, np.ones(3 * count, bool), np.arange(0, 3 * count + 1, 3, dtype=np.int64), 0
    )


@pytest.mark.parametrize(
    ("count", "size", "epochs"),
    [
        (9, 8, 10),
        (3, 8, 5),
        (17, 16, 3),
        (1000, 16, 3),
        (1, 8, 1),
        (30, 1, 0.1),
        (10, 4, 2.5),
        (10, 5, 2),
    ],
)
def test_epochs_are_as_many_as_were_set(count: int, size: int, epochs: float) -> None:
    """The examples that come are those of the epochs, and fewer than one batch more."""
    batches = Batches(examples(count), size)
    steps = batches.steps(epochs)
    assert 0 <= steps * size - epochs * count < size
    seen = collections.Counter(row for _ in range(steps) for row in batches.next_rows())
    if size <= count:
        assert max(seen.values()) <= epochs + 1
        assert min(seen[row] for row in range(count)) >= int(epochs)


@pytest.mark.parametrize("epochs", [0, -1.0, float("nan"), float("inf")])
def test_epochs_that_are_no_number_of_times(epochs: float) -> None:
    with refused(ValueError, "epochs"):
        RunConfig(epochs=epochs)


def test_sources_with_commas(tmp_path: Path) -> None:
    assert DataSettings(eval="a,./b").eval == ("a", "./b")
    assert DataSettings(train="/x/a.jsonl, ../b.jsonl").train == ("/x/a.jsonl", "../b.jsonl")
    one = tmp_path / "a,b.jsonl"
    one.write_text("{}\n")
    assert DataSettings(train=str(one)).train == str(one)


def test_the_closing_line_says_what_it_compares() -> None:
    def closing(steps: int) -> str:
        outcome = Outcome(steps, 2.0, 1.0, None, None, 1, Path("out"))
        return next(line for line in outcome.lines() if line.startswith("training loss"))

    assert closing(10).endswith("2.0000 → 1.0000  (10 steps)")
    assert closing(95).endswith("(95 steps; means of the first and the last 10)")


def test_a_card_does_not_say_that_a_changed_run_is_repeatable(tmp_path: Path) -> None:
    assert "makes it again" in card._repeatable(tmp_path)
    log = MetricsLog(tmp_path / "changed.jsonl")
    log.write({"step": 3, "changes": ["optimizer.learning_rate: 0.1 → 0.2"]})
    log.close()
    told = card._repeatable(tmp_path)
    says(told, "3 optimizer.learning_rate 0.1 0.2")
    assert "does not repeat" in told


def test_a_card_has_no_folder_of_this_machine(tmp_path: Path) -> None:
    model = tmp_path / "model"
    file = tmp_path / "train.jsonl"
    atomic_files.make_folder(model)
    file.write_text("{}\n")
    run = RunConfig(
        str(model),
        data=DataSettings(str(file), (str(file), "owner/data")),
        output_dir=str(tmp_path),
    )
    shared = card.shareable(run.to_mapping())
    assert str(tmp_path) not in str(shared)
    assert (shared["model"], shared["data"]["eval"]) == ("model", ["train.jsonl", "owner/data"])
    assert card.shareable(RunConfig("owner/model@v1").to_mapping())["model"] == "owner/model@v1"


@pytest.mark.parametrize(
    ("kind", "positions"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")]
)
def test_positions_that_were_not_learnt_are_refused(
    kind: str, positions: str, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(kind, **{positions: 32}).save_pretrained(tmp_path)
    require_positions(tmp_path, 32)
    with refused(ValueError, "33 32 data.max_length"):
        require_positions(tmp_path, 33)


def test_turned_positions_go_on(tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model("llama", max_position_embeddings=32, num_hidden_layers=1).save_pretrained(
        tmp_path
    )
    require_positions(tmp_path, 4096)
