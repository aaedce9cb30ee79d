"""``blockwalk plan``, ``train``, ``eval`` and ``generate``: the subcommands that take a run's
configuration."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import textwrap
from pathlib import Path

from blockwalk.cli.adapters import opened_adapter, trained_by
from blockwalk.cli.reading import packed_model, plan_to_read
from blockwalk.models.model_source import model_source
from blockwalk.plan.row_settings import bare
from blockwalk.plan.run_config import RunConfig
from blockwalk.plan.settings import override
from blockwalk.plan.words import counted
from blockwalk.program.program import Shape
from blockwalk.ranks import launch, place
from blockwalk.report import advice, card, html
from blockwalk.report.capacity import check_budget
from blockwalk.report.disk_wear import wear
from blockwalk.report.forecast import DoesNotFit
from blockwalk.report.foresee import foresee
from blockwalk.report.summary import COLUMNS, memory_and_time, model_text, titled
from blockwalk.report.zeroth_order_advice import zeroth_order_advice
from blockwalk.simulate import hardware, planner, timeline
from blockwalk.system import own_text
from blockwalk.system.process_memory import process_bytes
from blockwalk.system.terminal import say
from blockwalk.train import config, preflight


def train(run: RunConfig, arguments: argparse.Namespace) -> int:
    """Train, and print the results. Answers 0, or 128 + the number of the signal that ended the run
    early."""
    from blockwalk.train import loop as training
    from blockwalk.train.opening import dry_run
    from blockwalk.train.stop_signals import Stopped

    rank_place = place.place()
    if arguments.join:
        from blockwalk.train.elastic import lend

        walks = counted(lend(run), "time")
        say(f"the run at {run.elastic} has ended; this rank walked {walks} for it")
        return 0
    if arguments.dry_run:
        say(*dry_run(run, verbose=arguments.verbose))
        return 0
    try:
        with launch.joined(rank_place, Path(run.output_dir), run.start_timeout, run.interface):
            outcome = training.train(run, trace=arguments.trace, verbose=arguments.verbose)
            say(*outcome.lines())  # of ranks other than 0 to their logs
            if outcome.stopped_by is not None:
                say(
                    f"stopped by {outcome.stopped_by.name}; go on with --resume_from_checkpoint"
                    " latest"
                )
    except Stopped as stopped:
        say(
            f"blockwalk: stopped by {stopped.signal.name} before the run began; nothing was"
            " changed",
            file=sys.stderr,
        )
        sys.stdout.flush()
        os._exit(128 + stopped.signal)  # a thread may wait for other ranks, or for the tokenizer
    return 0 if outcome.stopped_by is None else 128 + int(outcome.stopped_by)


def plan(run: RunConfig, arguments: argparse.Namespace) -> None:
    """Print the forecast of a training step, read off the model's configuration alone: no weight is
    touched. With ``--hardware`` every method is simulated and ranked instead."""
    if arguments.hardware:
        plan_for(run, arguments)
        return
    from blockwalk.train.frozen_codec import settled
    from blockwalk.walk.unit_costs import of_run

    run, lines = settled(run)
    steps = preflight.steps_of(run)
    shape = Shape(run.micro_batch_rows, run.data.max_length)
    forecast = foresee(run, shape, of_run(run), steps=steps or math.inf)
    on_processor = forecast.device == "cpu"
    process = forecast.process_bytes(process_bytes()) if on_processor else 0
    for line in (
        titled("model", model_text(run, forecast)),
        memory_and_time(forecast, process, steps),
        *wear(run, forecast, steps),
        *lines,
        *forecast.lines(),
        *zeroth_order_advice(run.plan, run.adapters),
        *preflight.notes(run, run.data.max_length),
    ):
        say(line)
    if arguments.program:
        for program in forecast.stages:
            say(program)
    check_budget(run, forecast)


def evaluate(run: RunConfig, arguments: argparse.Namespace) -> None:
    """Print loss, and for classification accuracy, on ``data.eval``: on all of its records, unless
    the command line itself has ``data.eval_limit``. The weights are those that the run has trained;
    before, its base's. Where the plan rounds the model's weights below an adapter, a second figure
    is over these as they are: what ``merge`` deploys."""
    from blockwalk.cutting.skeleton import vocabulary_rows
    from blockwalk.cutting.verify import require_borders
    from blockwalk.data.tokenizer import require_rows, tokenizer_of
    from blockwalk.train.evaluation import HeldOut
    from blockwalk.train.reference import of_held_out
    from blockwalk.walk.walker import Walker

    run, named = trained_by(run, arguments)
    limit = run.data.eval_limit if "data.eval_limit" in arguments.named else 0
    with opened_adapter(named, run.model) as adapter:
        own_template = "data.chat_template" in arguments.named
        tokenizer = tokenizer_of(run.model, run.data, None if own_template else adapter)
        held_out = HeldOut.of_run(run, tokenizer, limit=limit)
        held_out = of_held_out(held_out, Path(run.output_dir))
        if not held_out.has_numbers:
            say(
                f"note: {run.output_dir} has no reference of these records, which objective:"
                f" {bare(run.plan.objective)} compares with: the loss is the cross-entropy of all"
                " answers (data.eval_limit and data as in the run find it)",
                file=sys.stderr,
            )
        require_rows(
            held_out.encoded.report.largest, tokenizer, vocabulary_rows(run.model), "data.eval"
        )
        for note in held_out.notes():
            say(f"note: {note}", file=sys.stderr)
        if run.data.packing:
            require_borders(run.model)
        plans = [plan_to_read(run, adapter, arguments, as_trained=arguments.as_trained)]
        codec = plans[0].frozen.codec
        if codec.encoded and not model_source(run.model).packed:
            scope = " alone (--as-trained)"
            if not arguments.as_trained:
                scope = ", then over the model's own; --as-trained leaves these out"
                plans.append(override(plans[0], {"frozen": "disk"}))
            say(f"note: over weights in {codec}{scope}", file=sys.stderr)
        evaluations = []
        for plan in plans:
            with Walker(packed_model(run, plan), plan, lora=adapter, training=False) as walker:
                evaluations.append(held_out.evaluate(walker))
    rounded, *unrounded = evaluations
    if arguments.json:
        figures = dataclasses.asdict(rounded)
        if unrounded:
            figures["unrounded"] = dataclasses.asdict(unrounded[0])
        say(json.dumps(figures))
    elif unrounded:
        say(f"{rounded}   over weights in {codec}")
        say(f"{unrounded[0]}   over the model's own, as merge deploys them")
    else:
        say(rounded)


def plan_for(run: RunConfig, arguments: argparse.Namespace) -> None:
    """Print the ranking.

    Raises:
        DoesNotFit: no plan fits.
    """
    machine = hardware.load(arguments.hardware)
    shape = Shape(run.micro_batch_rows, run.data.max_length)
    steps = run.plan.gradient_accumulation_steps
    mark = "" if machine.measured else hardware.SIMULATED

    task = advice.task(
        run.model,
        run.adapters,
        machine,
        shape,
        budget=run.plan.budget,
        micro_batches=steps,
        tokens=arguments.tokens,
    )
    trained = "every parameter" if run.adapters is None else str(run.adapters)
    nodes = "one device"
    if machine.world > 1:
        nodes = f"{machine.nodes} × {machine.devices_per_node} devices"
    say(
        f"{run.model} on {machine.name} ({nodes}): {trained}, {shape.batch} × {shape.sequence}"
        " tokens a rank"
    )
    if not machine.measured:
        words = f"{mark} everything below, on a description: {machine.source}"
        say(*textwrap.wrap(words, COLUMNS, break_long_words=False))
    ranking = planner.rank(task)
    say(*ranking.lines())
    if arguments.explain:
        say(*ranking.explanation())
    if arguments.largest_batch:
        say("-- most sequences of a micro-batch that fit")
        for plan in (*ranking.ranked, *ranking.refused):
            say(f"{plan.label:<34} {planner.largest_batch(task, plan.plan):>8}")
    best = ranking.best
    if best is None or best.simulation is None:
        raise DoesNotFit(
            f"no plan of this model fits {machine.name}; the reasons stand beside each"
        )
    for role, candidate in (("best of them", best), ("larger step", ranking.larger)):
        if candidate is not None:
            file = config.as_yaml(advice.recommended(run, candidate.plan))
            say(f"\nthe {role} as a file (run.yaml):\n\n{file}", end="")
    if arguments.trace:
        timed = [(span.op, span.began, span.ended) for span in best.simulation.spans]
        events = timeline.events(
            best.simulation.program,
            [timed],
            process=f"simulated: {best.label}",
            host=best.simulation.host_times(),
        )
        timeline.write(arguments.trace, events)
        say(f"timeline of {best.label}: {arguments.trace}")


def report(arguments: argparse.Namespace) -> None:
    """Write ``report.html`` into a run's folder."""
    out = Path(arguments.run) / "report.html"
    curve = out.with_name("loss.svg")
    if arguments.card:
        card.trained_folder(arguments.run)  # refused before the page is written
    for path in (out, curve):
        own_text.refuse_foreign(path)
    own_text.write(out, html.report(arguments.run), card.COMMENT)
    own_text.write(curve, html.curves(arguments.run), card.COMMENT)
    say(f"written to {out}, and its first curve to {out.with_name('loss.svg').name} beside it")
    if arguments.card:
        trained = card.write(arguments.run)
        say(
            f"a model card in {trained}; upload both with: blockwalk push {arguments.run}"
            " OWNER/NAME"
        )


def push(arguments: argparse.Namespace) -> None:
    """Upload what a run trained, or its ledger."""
    say(f"uploaded to {card.push(arguments.run, arguments.repo, ledger=arguments.ledger)}")
