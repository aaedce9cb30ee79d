"""Oracle: the state that went in; the safetensors library reads the tensors back."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from blockwalk.checkpoints import marks, run_checkpoint, run_start, sweeping
from blockwalk.checkpoints.changed_settings import changed_settings
from blockwalk.checkpoints.ledger import LedgerPosition
from blockwalk.plan.choices import PrefixSettings
from blockwalk.plan.parsing import plain_values
from blockwalk.system import atomic_files
from tests.support.messages import refused

STATE: dict[str, Any] = {
    "model.lora_A.weight": torch.arange(6, dtype=torch.float32),
    "optimizer.first": torch.randn(24, generator=torch.Generator().manual_seed(1))[
        ::2
    ],  # not contiguous
    "large": torch.arange(3 << 20, dtype=torch.int32),  # several checksums
    "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "count": torch.tensor([7]),
    "empty": torch.empty(0),
    "mask": torch.tensor([True, False]),
    "step": 12,
    "pending": [[1, 0.1 + 0.2]],
}


def write(folder: Path, step: int, ledger: LedgerPosition | None = None) -> Path:
    made = run_checkpoint.Checkpoint(step, STATE, {"position": step}, {"seed": 0}, ledger=ledger)
    return run_checkpoint.save(folder, made)


def assert_same(found: dict[str, Any]) -> None:
    assert found.keys() == STATE.keys()
    for name, value in STATE.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert found[name].shape == value.shape
            assert torch.equal(found[name].view(torch.uint8), value.contiguous().view(torch.uint8))
        else:
            assert found[name] == value


def test_round_trip(tmp_path: Path) -> None:
    loaded = run_checkpoint.load(write(tmp_path, 3, LedgerPosition(3, "0" * 16)))
    assert (loaded.step, loaded.data, loaded.config) == (3, {"position": 3}, {"seed": 0})
    assert loaded.ledger == LedgerPosition(3, "0" * 16)
    assert_same(loaded.walker)
    stored = load_file(tmp_path / "checkpoint-000003" / "rank-00000.safetensors")
    assert all(
        torch.equal(stored[f"{name}@0"], STATE[name])
        for name in ("large", "mask", "optimizer.first")
    )


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 999_999, 1_000_000):  # names that do not sort like numbers
        write(tmp_path, step)
    assert [p.name for p in run_checkpoint.whole(tmp_path)] == [
        "checkpoint-999999",
        "checkpoint-1000000",
    ]
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-999999", "checkpoint-1000000"}


def test_latest_sees_whole_checkpoints_only(tmp_path: Path) -> None:
    assert run_checkpoint.latest(tmp_path / "absent") is None
    good = write(tmp_path, 4)
    for name in ("checkpoint-000009", ".checkpoint-000010.0a1b2c3d.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-00000.safetensors").write_bytes(b"")
    (tmp_path / "checkpoint-old").mkdir()
    with sweeping.one_run(tmp_path):
        found = run_start.prepare(tmp_path, "latest", overwrite=False)
        assert found.checkpoint == str(good)
        (said,) = found.damaged
        assert said.endswith(
            "checkpoint-000009/state.json is missing; going on from checkpoint-000004"
        )
        assert list(tmp_path.glob(".*.partial")), "a run that may still be refused touches nothing"
        sweeping.sweep(tmp_path)
    assert not list(tmp_path.glob(".*")), "a killed writer's leftovers are swept"
    with refused(ValueError, "state.json missing"):
        run_checkpoint.load(tmp_path / "checkpoint-000009")


def test_an_error_while_writing_leaves_nothing(tmp_path: Path) -> None:
    with refused(TypeError, "JSON"):
        run_checkpoint.save(tmp_path, run_checkpoint.Checkpoint(1, {"bad": object()}, {}, {}))
    assert list(tmp_path.iterdir()) == []


def test_an_earlier_run_is_not_overwritten_unasked(tmp_path: Path) -> None:
    first = write(tmp_path, 5)
    second = write(tmp_path, 10)
    for resume in ("", str(first)):
        with refused(ValueError, "overwrite_output_dir: true"):
            run_start.prepare(tmp_path, resume, overwrite=False)

    def start(resume: str, overwrite: bool) -> str | None:
        found = run_start.prepare(tmp_path, resume, overwrite=overwrite)
        assert run_checkpoint.whole(tmp_path) == there, "nothing is touched before the run starts"
        found.clear()
        return found.checkpoint

    there = [first, second]
    assert start(str(second), False) == str(second)
    assert start(str(first), True) == str(first)
    assert run_checkpoint.whole(tmp_path) == [first], (
        "what came after the checkpoint is another run's future"
    )
    there = [first]
    assert start("", True) is None
    assert run_checkpoint.whole(tmp_path) == []
    assert run_checkpoint.whole(tmp_path / run_checkpoint.REPLACED) == [
        tmp_path / run_checkpoint.REPLACED / first.name
    ]
    third = write(tmp_path, 2)
    assert set(tmp_path.iterdir()) == {third, tmp_path / marks.MARK}, (
        "what it replaced goes when it is whole"
    )
    with refused(ValueError, "nowhere"):
        run_start.prepare(tmp_path, str(tmp_path / "nowhere"), overwrite=True)


def test_settings_that_give_the_state_its_meaning_must_agree() -> None:
    saved = {
        "model": "a",
        "max_steps": 5,
        "data": {"train": "x", "max_length": 8},
        "output_dir": "o",
    }
    assert not changed_settings(saved, {**saved, "prefix": plain_values(PrefixSettings())}), (
        "an older checkpoint"
    )
    older = {**saved, "lora": {"rank": 4}, "data": {"train": "x", "max_length": 8}}
    newer = {
        **older,
        "lora": {"rank": 4, "dropout": 0.0},
        "data": {**older["data"], "packing": False},
    }
    assert not changed_settings(older, newer), (
        "an older checkpoint knows fewer settings of a section"
    )
    with refused(ValueError, "data.packing False True"):
        changed_settings(older, {**newer, "data": {**newer["data"], "packing": True}})
    with refused(ValueError, "prefix.num_virtual_tokens 0 5"):
        changed_settings(saved, {**saved, "prefix": plain_values(PrefixSettings(5))})
    changed = changed_settings(saved, {**saved, "max_steps": 9, "output_dir": "p"})
    assert changed == ["max_steps: 5 → 9"]
    with refused(ValueError, "data.max_length 8 9"):
        changed_settings(saved, {**saved, "data": {"train": "x", "max_length": 9}})
    with refused(ValueError, "model a b"):
        changed_settings(saved, {**saved, "model": "b"})


def test_another_format_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    state = atomic_files.read_sealed(path / run_checkpoint.SCALARS)
    atomic_files.write_sealed(path / run_checkpoint.SCALARS, {**state, "format": 3})
    with refused(ValueError, "checkpoint-000001 3"):
        run_checkpoint.load(path)
    (path / ".metadata").touch()
    with refused(ValueError, "checkpoint-000001 1"):
        run_checkpoint.load(path)
