"""Zeroth order on a real model and two real tasks: accuracy, forward passes, seconds and memory
beside exact LoRA.

The model is SmolLM2-135M-Instruct (any causal model's folder or GGUF file will do), the tasks the
seven intents of Snips and a pair of Banking77's (a question about a rate, or about a fee), posed as
prompts whose last word is ranked. Tasks of MeZO's may be named as well (``--task sst2 rte``):
records lie in DATA/TASK/train.jsonl and validation.jsonl, with the fields that the hub's have, and
1,000 are drawn for training. Every case trains on the same batches, in float32 and by one thread;
the first line of each task is the model as it came. A forward pass is counted on one batch: two for
each pair of two-point SPSA, N + 1 for FZOO; exact gradients count four (the forward, its
recomputation, and a backward of twice a forward). Seconds are those that the processor spent on the
steps (other work on the machine does not count), memory is the private memory of the process at its
peak.

Learning rates stand in the table below: MeZO's are, of those that were tried by ``--rate`` (1e-5,
3e-5 and, on one task, 1e-4; with LoRA 1e-4, 3e-4 and 1e-3), those whose run with seed 0 ended with
the lowest held-out loss; FZOO's and that of exact LoRA have not been searched for. Every run is
written to ``--results`` when it ends, and one that is there is not repeated.

    python benchmarks/zo_real.py --model FOLDER --data FOLDER [--case mezo ...] [--seeds 0 1]
    [--minutes 30]
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.common import machine, parser
from benchmarks.real_model import tree_bytes

from blockwalk.plan.run_config import DataSettings

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/zo_real.json"


@dataclass(frozen=True)
class Posed:
    """A task as prompts: the records' field that holds the class, and the word that stands for each
    of its values."""

    folder: str
    template: str
    words: dict[Any, str]
    field: str = "label"

    def write(self, data: Path, folder: Path) -> DataSettings:
        """The records of these classes, numbered in the order of the words, written to ``folder``
        as the settings name them."""
        numbers = {value: number for number, value in enumerate(self.words)}
        for part in ("train", "heldout"):
            records = map(
                json.loads, (data / self.folder / f"{part}.jsonl").read_text().splitlines()
            )
            kept = (
                (r["text"], numbers[r[self.field]]) for r in records if r[self.field] in numbers
            )
            lines = [json.dumps({"text": text, "label": label}) for text, label in kept]
            (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
        learnt = str(folder / "train.jsonl")
        held_out = str(folder / "heldout.jsonl")
        words = tuple(self.words.values())
        return DataSettings(
            learnt, held_out, template=self.template, label_words=words, max_length=96
        )


TASKS = {
    "snips": Posed("snips", "{text}\nThis is about: {label}", {
        0: "playlist", 1: "restaurant", 2: "weather", 3: "music", 4: "rating", 5: "search",
        6: "movie"}),
    "rate or fee": Posed("banking77", "{text}\nThis is about the {label}", {
        "exchange_rate": "rate", "exchange_charge": "fee"}, "category"),
}  # fmt: skip


def data_of(task: str, data: Path, folder: Path) -> DataSettings:
    """The settings of one of :data:`TASKS`, or of one of MeZO's, whose records lie in ``data``."""
    if task in TASKS:
        return TASKS[task].write(data, folder)
    files = (str(data / task / f"{part}.jsonl") for part in ("train", "validation"))
    return DataSettings(*files, task=task, task_eval=0, max_length=512)


@dataclass(frozen=True)
class Case:
    """One method: the forward passes of its steps, its settings, and the share of ``--forwards``
    that it runs."""

    method: str
    forwards: int
    rate: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    lora: bool = False
    share: float = 1.0
    rates: dict[str, float] = field(default_factory=dict)
    """Learning rates of tasks that want another one."""


FASTER = {"rate or fee": 3e-5}
CASES = {
    "zero-shot": Case("mezo", 2, share=0),
    "exact LoRA": Case("mebp", 4, 5e-4, {"optimizer": {"name": "adamw"}}, lora=True, share=0.75),
    "MeZO": Case("mezo", 2, 1e-5, rates=FASTER),
    "low rank": Case("mezo", 2, 1e-5, {"zo": {"noise": "lowrank"}}, rates=FASTER),
    "FZOO, LoRA": Case(
        "mezo", 9, 3e-3, {"zo": {"kind": "fzoo", "queries": 8, "epsilon": 1e-2}}, lora=True
    ),
    "MeZO, LoRA": Case("mezo", 2, 3e-4, {"zo": {"epsilon": 1e-2}}, lora=True),
}


@dataclass(frozen=True)
class Run:
    """One run, which is found again in the results by this."""

    task: str
    case: str
    rate: float
    seed: int
    forwards: int
    batch: int
    held_out: int

    @property
    def name(self) -> str:
        return ", ".join(f"{key} {value}" for key, value in asdict(self).items())


def train(run: Run, model: str, data: str) -> dict[str, float]:
    """One run in a process of its own: figures before and after."""
    import os

    import torch

    from blockwalk import Walker, method
    from blockwalk.data.batching import Batches
    from blockwalk.data.corpus import training_set
    from blockwalk.data.dataset import Encoded
    from blockwalk.data.tokenizer import load_tokenizer
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.train.evaluation import HeldOut

    torch.set_num_threads(1)
    case = CASES[run.case]
    with tempfile.TemporaryDirectory() as folder:
        settings = data_of(run.task, Path(data), Path(folder))
        tokenizer = load_tokenizer(Path(model))
        rows = training_set(settings, tokenizer)
        assert isinstance(rows, Encoded)
        held_out = HeldOut.read(settings, tokenizer, batch_size=32, limit=run.held_out)
    batches = Batches(rows, run.batch, seed=run.seed, padding_multiple=8)
    given = {key: value for key, value in case.settings.items() if key != "optimizer"}
    optimizer = {"learning_rate": run.rate, **case.settings.get("optimizer", {})}
    given = {"compute_dtype": "float32", "frozen": "device", "seed": run.seed, **given}
    plan = method(case.method, **given, optimizer=optimizer)
    peak = [0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            peak[0] = max(peak[0], tree_bytes(os.getpid()))

    steps = int(run.forwards * case.share) // case.forwards
    seconds = 0.0
    losses = []
    lora = LoraSettings(rank=8) if case.lora else None
    with (
        tempfile.TemporaryDirectory() as folder,
        Walker(model, plan, lora=lora, workdir=folder) as walker,
    ):
        if steps:
            threading.Thread(target=watch, daemon=True).start()
        for _ in range(steps):
            batch = next(batches)
            began = time.process_time()
            losses.append(walker.step(batch).loss)
            seconds += time.process_time() - began
        over.set()
        evaluation = held_out.evaluate(walker)
    tail = losses[-max(1, len(losses) // 5) :]
    assert evaluation.accuracy is not None
    return {
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "forwards": steps * case.forwards,
        "seconds": seconds,
        "memory": peak[0] / 1e6,
        "train loss": sum(tail) / len(tail) if tail else 0.0,
    }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True)
    options.add_argument(
        "--data", required=True, help="the folder of snips and banking77, sst2, rte ..."
    )
    options.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument(
        "--task", nargs="+", default=list(TASKS), help="of these two, or of MeZO's"
    )
    options.add_argument("--seeds", type=int, nargs="+", default=[0])
    options.add_argument("--forwards", type=int, default=160, help="forward passes of a run")
    options.add_argument("--batch", type=int, default=8)
    options.add_argument(
        "--held-out", type=int, default=80, help="held-out records that are looked at; 0: all"
    )
    options.add_argument(
        "--rate", type=float, help="instead of the case's own learning rate: to look for one"
    )
    options.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after so many"
    )
    options.add_argument("--results", type=Path, default=RESULTS, help="where runs are kept")
    given = options.parse_args()
    until = time.monotonic() + 60 * given.minutes
    found = json.loads(given.results.read_text())["runs"] if given.results.exists() else {}
    for task in given.task:
        for case in given.case:
            for seed in given.seeds if case != "zero-shot" else given.seeds[:1]:
                rate = given.rate or CASES[case].rates.get(task, CASES[case].rate)
                run = Run(
                    task,
                    case,
                    rate,
                    seed,
                    given.forwards if rate else 0,
                    given.batch,
                    given.held_out,
                )
                if run.name not in found and time.monotonic() < until:
                    with multiprocessing.get_context("spawn").Pool(
                        1
                    ) as pool:  # memory is a process's own
                        found[run.name] = pool.apply(train, (run, given.model, given.data))
                    given.results.parent.mkdir(parents=True, exist_ok=True)
                    given.results.write_text(
                        json.dumps({"machine": machine(), "runs": found}, indent=1) + "\n"
                    )
                if (each := found.get(run.name)) is None:
                    print(f"{run.name}: not run yet; run this again")
                    continue
                print(
                    f"{task:<12} {case:<12} rate {rate:<8g} seed {seed}  {each['forwards']:>4.0f}"
                    " forwards"
                    f" {each['seconds']:>6.1f} s {each['memory']:>6.0f} MB  accuracy"
                    f" {100 * each['accuracy']:.1f}%"
                    f"  loss {each['loss']:.3f}  training loss {each['train loss']:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
