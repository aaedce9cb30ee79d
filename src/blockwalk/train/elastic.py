"""A process that joins an elastic run (``elastic``): it keeps its
weights at the ledger's end, and lends the run forwards, until the run ends or this process does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError

from blockwalk.checkpoints import marks
from blockwalk.checkpoints.ledger import differences
from blockwalk.checkpoints.run_checkpoint import JOINED, SCRATCH
from blockwalk.data.batch import Batch
from blockwalk.data.label_words import LabelWordBatch
from blockwalk.engine.frozen_codec import already_said, refuse_rounded
from blockwalk.numerics.device import chosen, is_cpu, model_of
from blockwalk.plan.run_config import RunConfig
from blockwalk.ranks.agreement import facts_of, versions
from blockwalk.ranks.forward_sharing import ChangingRanks, Lent, changing_ranks
from blockwalk.ranks.place import LostRank
from blockwalk.report.capacity import check_budget, check_memory
from blockwalk.system import atomic_files
from blockwalk.tiers.model_folder.identity import weights_digest
from blockwalk.train.beginning import Beginning
from blockwalk.train.prepared_run import PreparedRun, prepare
from blockwalk.walk.walker import Walker

ALIKE = (
    "batch_size",
    "gradient_accumulation_steps",
    "seed",
    "lora",
    "zo",
    "compute_dtype",
    "loss",
    "objective",
    "compile",
)
"""Settings that the bits of a loss depend on; where a rank keeps its weights is its own choice."""


def facts(run: RunConfig, prepared: PreparedRun) -> dict[str, str]:
    """Return facts that must be equal on all ranks of an elastic run, beside those in the header of
    its ledger."""
    settings = run.to_mapping()
    plan = prepared.plan
    device = chosen()
    name = torch.backends.cpu.get_cpu_capability()
    if not is_cpu(device):
        name = model_of(device)
    return {
        **facts_of({name: settings[name] for name in ALIKE}),
        "the codecs": f"{plan.frozen.codec}, {plan.trainable.codec}",
        "data.train": prepared.rows.fingerprint(),
        "data.appended": f"behind {prepared.batches.lengths_before}",
        "the model's weights": weights_digest(run.model),
        "the processor": f"{device.type} {name} × {torch.get_num_threads()} threads",
        **versions(),
    }


def let_ranks_join(beginning: Beginning, walker: Walker) -> None:
    """Let ranks join a run whose weights stand at its ledger's end."""
    if beginning.host is not None and walker.ledger is not None:
        run_facts = facts(beginning.config, beginning.prepared)
        header = {"facts": run_facts, "ledger": walker.ledger.header}
        beginning.host.open(header, walker.ledger.entries)


def compare(walker: Walker, ranks: ChangingRanks) -> None:
    """Compare a rank's weights with the host's, every ``mesh.check_every`` steps. Raises
    RuntimeError where they differ."""
    if walker.steps_done and walker.steps_done % walker.plan.mesh.check_every == 0:
        walker.flush()
        sums = {name: total for name, _, total in walker.engine.trained.sums()}
        ranks.compare(walker.steps_done, sums)


def lend(run: RunConfig) -> int:
    """Join the run at ``run.elastic``, and lend it forwards until it ends; the answer is the number
    of walks done for it.

    Raises:
        ValueError: this process has other settings, data, weights or versions than the run; nothing
            was computed.
        LostRank: the run's host does not answer.
    """
    if not run.elastic:
        raise ValueError(
            "elastic is missing; it takes the address of the run to join, such as 127.0.0.1:29600"
        )
    refuse_rounded(run.model, run.plan, run.adapters)
    prepared = prepare(run)
    check_budget(run, prepared.foreseen)
    check_memory(run, prepared.foreseen, prepared.held_bytes)
    ranks = changing_ranks(run.elastic, run.start_timeout, joins=True)
    scratch = Path(run.output_dir) / SCRATCH
    atomic_files.make_folder(scratch)
    try:
        header = ranks.header()
        _require_same(header["facts"], facts(run, prepared))
        with tempfile.TemporaryDirectory(prefix=JOINED, dir=scratch) as folder:
            # By this mark a later run knows what a killed rank left.
            marks.write(Path(folder), "joined")
            prepared = prepared.put_away(Path(folder))
            with already_said():
                walker = Walker(
                    run.model,
                    prepared.plan,
                    lora=run.adapters_at_start,
                    workdir=folder,
                    sharing=ranks,
                )
            with walker:
                local_header = walker.ledger_header(run.adapters_at_start)
                _require_same(header["ledger"], local_header)
                return follow(
                    walker, ranks, lambda at: prepared.batch_at(at[0], at[1], run.data.label_scores)
                )
    except DistError:
        raise LostRank(
            f"the run at {run.elastic} does not answer any more: its host has ended, or cannot be"
            " reached. Resume the run, and join it again"
        ) from None


def _require_same(host: dict[str, Any], local: dict[str, Any]) -> None:
    """Raise ValueError where facts of this rank differ from the host's."""
    if different := differences(host, local):
        raise ValueError(
            f"this rank cannot join, for it would compute other bits: {'; '.join(different)}"
        )


def follow(
    walker: Walker,
    ranks: ChangingRanks,
    batch_at: Callable[[Sequence[int]], Batch | LabelWordBatch],
) -> int:
    """Follow a run to its end, and answer the number of walks done for it; ``batch_at`` reads the
    batch at a place in the data (:attr:`ChangingRanks.position`)."""
    walks = 0
    while "ended" not in (turn := ranks.next_turn()):
        walker.follow(ranks.entries(walker.steps_done))
        compare(walker, ranks)
        share = turn["shares"].get(str(ranks.number))
        if share is None:  # it is new here, or was too late
            walker.flush()
            ranks.ask()
        elif share[0] < share[1]:
            with suppress(Lent):
                walker.step(batch_at(turn["position"]))
            walks += 1
    return walks
