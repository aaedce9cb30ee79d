"""The notes on a run before its first step: how many steps it has, and settings and defaults that
do not do what one might expect."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from blockwalk.data.sources import read_records
from blockwalk.models.model_source import model_source
from blockwalk.plan.choices import OptimizerSettings
from blockwalk.plan.copied_rows import note_on_copies
from blockwalk.plan.data_source import listed, names_of
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.sizes import steps_of_epochs
from blockwalk.system.versions import untested


def steps_of(run: RunConfig) -> int:
    """Return optimizer steps of a whole run; 0 where they are not known without tokens or a
    network."""
    data = run.data
    files = names_of(data.train)
    readable = data.train and all(Path(file).exists() for file in files)
    if run.max_steps or not readable or data.packing or data.shares:
        return run.max_steps
    limit = data.max_samples or None
    records = sum(1 for file in files for _ in islice(read_records(file), limit))
    if data.eval_share:
        records -= max(1, round(data.eval_share * records))
    return steps_of_epochs(records, run.batch_size, run.epochs)


def notes(run: RunConfig, longest: int) -> Iterator[str]:
    """Yield sentences on settings that will not do what they seem to.

    Args:
        longest: tokens of the run's longest sequence, as far as they are known.
    """
    if newer := untested():
        yield newer
    if run.eval_every and not run.data.evaluates:
        yield f"note: eval_every is {run.eval_every}, and data.eval is empty: nothing is evaluated"
    if in_both := sorted(_origins(run, held_out=False) & _origins(run, held_out=True)):
        yield (
            f"note: data.train and data.eval both have {in_both[0][0]}: evaluations are of what is"
            " learnt; data.eval_share holds records out"
        )
    plan = run.plan
    if not plan.estimator.facts.shares_forwards and (
        copies := note_on_copies(run.batch_size, plan.cuts)
    ):
        yield f"note: {copies}"
    if plan.cache.keeps and plan.caches_nothing:
        ranks = "there is one rank"
        if plan.mesh.world > 1:
            ranks = f"the {plan.mesh.world} ranks are one node"
        yield (
            f"note: cache.tier is {plan.cache.tier}, and {ranks}: nothing is cached, parameters"
            " are gathered as under zero3; on several nodes each keeps its slices"
        )
    positions = model_source(run.model).positions
    prefix = run.prefix.num_virtual_tokens
    if positions and longest + prefix > positions:
        part = f", {prefix} of a prefix," if prefix else ""
        yield (
            f"note: sequences of {longest + prefix} tokens{part} are longer than the {positions}"
            " positions that the model was made for: lower data.max_length to"
            f" {positions - prefix}"
        )
    architecture = model_source(run.model).text_config
    width = architecture.get("hidden_size") or architecture.get("n_embd")
    if run.lora is not None and width and run.lora.rank > width:
        yield (
            f"note: lora.rank is {run.lora.rank}, above the model's width of {width}: adapters"
            " that wide gain nothing"
        )


def _origins(run: RunConfig, *, held_out: bool) -> set[tuple[str, ...]]:
    """Return where the records of a part come from: local paths, or a hub's name, subset and
    split."""
    data = run.data
    sources = listed(data.eval if held_out else data.train)
    split = data.eval_split if held_out else data.train_split
    return {
        (str(path.resolve()),)
        if (path := Path(source.path).expanduser()).exists()
        else (source.path, source.subset or data.subset, source.split or split)
        for source in sources
    }


def usual_elsewhere(run: RunConfig) -> Iterator[str]:
    """Return a line on the defaults of backpropagation that differ from those of other tools,
    unless the run names them."""
    rate = run.plan.optimizer
    named = run.named or frozenset()
    default = OptimizerSettings()
    parts = {
        "schedule": "constant learning rate",
        "warmup_steps": "no warm-up",
        "max_grad_norm": "no clipping",
    }
    standing = {
        name: text
        for name, text in parts.items()
        if getattr(rate, name) == getattr(default, name) and f"optimizer.{name}" not in named
    }
    if standing and run.plan.estimator.facts.walks_back:
        settings = ", ".join(f"optimizer.{name}" for name in standing)
        yield f"defaults: {', '.join(standing.values())}; other tools differ (set {settings})"
