"""MeBP's figures 1 and 3 on a real model and real text: next-token accuracy of exact LoRA gradients
beside zeroth order.

The model is SmolLM2-135M-Instruct (any causal model's folder will do), the text GSM8K's questions
with their solutions, or the articles of an encyclopedia (FOLDOC, as Debian's dict-foldoc has it),
every tenth of them held out. LoRA has rank 16 on every linear layer; AdamW updates with exact
gradients and in one row of MeZO, as the paper has both, the other estimators by their own rules,
the same batches for all. A forward pass is counted on one
batch: two for MeZO, with seeds from a pool as without, 2q for KZOO (MeZO of q directions), N + 1
for FZOO, 2q + 1 for HiZOO, four for exact gradients (the forward, its recomputation, and a backward
of twice a forward). Accuracy is the share of held-out tokens that the model ranks first, by
transformers and PEFT with the saved adapter. Seconds are those that the processor spent on the
steps.

Each method runs at each of its ``rates`` for ``--sweep-forwards``; the one with the lowest held-out
loss then runs for ``--forwards``, and where it ends above that loss, because so long a run
diverges, the next one does. Every run is written to ``--results`` when it ends, and one that is
there is not repeated.

    python benchmarks/mebp_converge.py --model FOLDER --train FILE.jsonl --heldout FILE.jsonl
    [--minutes 30]
    python benchmarks/mebp_converge.py --model FOLDER --articles foldoc.dict.dz
    --case "exact (MeBP)" "MeZO, AdamW" --results FILE.json
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.common import machine, parser
from benchmarks.zo_converge import Case
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from blockwalk import Walker, method
from blockwalk.plan.choices import LoraSettings
from blockwalk.report.html import Series, chart, standalone
from blockwalk.system import atomic_files

ROOT = Path(__file__).resolve().parents[1]


CASES = {
    "exact (MeBP)": Case("mebp", 4, (2e-4, 1e-3), {"optimizer.name": "adamw"}),
    "MeZO": Case("mezo", 2, (1e-3, 3e-3), {"zo.epsilon": 1e-2}),
    "MeZO, AdamW": Case("mezo", 2, (1e-4, 1e-3), {"zo.epsilon": 1e-2, "optimizer.name": "adamw"}),
    "MeZO, seeds of a pool": Case(
        "mezo", 2, (1e-3, 3e-3), {"zo.epsilon": 1e-2, "zo.seed_pool": 4096}
    ),
    "KZOO": Case("mezo", 8, (1e-3, 3e-3), {"zo.epsilon": 1e-2, "zo.queries": 4}),
    "FZOO": Case(
        "mezo",
        9,
        (3e-3, 1e-2),
        {"zo.kind": "fzoo", "zo.queries": 8, "zo.epsilon": 1e-2, "zo.noise": "rademacher"},
    ),
    "HiZOO": Case(
        "mezo", 3, (1e-3, 3e-3), {"zo.kind": "hizoo", "zo.epsilon": 1e-2, "zo.hessian_alpha": 1e-8}
    ),
}


@dataclass(frozen=True)
class Run:
    """One run, which is found again in the results by this."""

    case: str
    rate: float
    forwards: int
    batch: int
    length: int
    seed: int = 0

    @property
    def name(self) -> str:
        return (
            f"{self.case}, rate {self.rate:g}, {self.forwards} forwards of {self.batch} x"
            f" {self.length}, seed {self.seed}"
        )


def solutions(file: Path) -> list[str]:
    """Return questions with their solutions, of JSON lines."""
    records = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return [record["prompt"] + record["completion"] for record in records]


def articles(file: Path) -> list[str]:
    """Return the articles of an encyclopedia in the dictd format: a title begins a line, its text
    is indented. Lines of a paragraph are joined, and marks of references left out."""
    found: list[list[str]] = []
    for paragraph in gzip.decompress(file.read_bytes()).decode("utf-8", "ignore").split("\n\n"):
        begins = paragraph.lstrip("\n")[:1].strip()
        if begins or not found:
            found.append([])
        found[-1].append(" ".join(paragraph.translate(REFERENCES).split()))
    return ["\n".join(article) for article in found if len(article) > 1]


REFERENCES = str.maketrans("", "", "{}")
"""The marks around the title of another article."""
HELD_OUT = 10
"""Of so many articles the first is held out."""


def blocks_of(texts: Iterable[str], tokenizer: Any, length: int, most: int = 0) -> torch.Tensor:
    """Return texts one after the other, cut into rows of so many tokens: int64 [N, S]."""
    ids = [i for text in texts for i in tokenizer(text + "\n\n")["input_ids"]]
    rows = torch.tensor(ids[: len(ids) // length * length]).view(-1, length)
    return rows[: most or None]


class Judge:
    """What transformers and PEFT say of a saved adapter on held-out rows."""

    def __init__(self, model: str, held_out: torch.Tensor) -> None:
        self.base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.held_out = held_out

    @torch.no_grad()
    def __call__(self, adapter: Path | None) -> dict[str, float]:
        """The mean loss of a token, and the share of tokens that come first."""
        model = self.base if adapter is None else PeftModel.from_pretrained(self.base, str(adapter))
        model.eval()
        losses = []
        right = []
        for rows in self.held_out.split(4):
            logits = model(input_ids=rows).logits[:, :-1]
            labels = rows[:, 1:]
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), reduction="none"
                )
            )
            right.append(logits.argmax(-1).eq(labels).flatten())
        if adapter is not None:
            self.base = model.unload()
        return {
            "loss": float(torch.cat(losses).mean()),
            "accuracy": float(torch.cat(right).float().mean()),
        }


def train(
    run: Run, model: str, rows: torch.Tensor, judge: Judge, points: int
) -> dict[str, list[float]]:
    """A run's figures, before the first step and at so many places."""
    case = CASES[run.case]
    order = torch.Generator().manual_seed(run.seed)
    settings = {
        "seed": run.seed,
        "optimizer.learning_rate": run.rate,
        "optimizer.schedule": "constant",
        **case.settings,
    }
    plan = method(case.method, frozen="device", **settings)
    steps = run.forwards // case.forwards
    curve: dict[str, list[float]] = {"forwards": [], "seconds": [], "loss": [], "accuracy": []}

    def note(forwards: int, seconds: float, said: dict[str, float]) -> None:
        for name, value in {"forwards": forwards, "seconds": seconds, **said}.items():
            curve[name].append(value)

    note(0, 0.0, judge(None))
    seconds = 0.0
    record_order = torch.randperm(len(rows), generator=order).repeat(
        1 + steps * run.batch // len(rows)
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Walker(model, plan, lora=LoraSettings(rank=16, alpha=32)) as walker,
    ):
        for step in range(1, steps + 1):
            ids = rows[record_order[(step - 1) * run.batch : step * run.batch]]
            began = time.process_time()
            walker.step({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
            seconds += time.process_time() - began
            if step * points // steps > (step - 1) * points // steps:
                walker.save_pretrained(folder)
                note(step * case.forwards, seconds, judge(Path(folder)))
    return curve


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--train", type=Path, help="JSON lines with prompt and completion")
    options.add_argument("--heldout", type=Path)
    options.add_argument("--articles", type=Path, help="in place of both: an encyclopedia's")
    options.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    options.add_argument("--forwards", type=int, default=800)
    options.add_argument("--sweep-forwards", type=int, default=200)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--length", type=int, default=128)
    options.add_argument(
        "--held-out", type=int, default=64, help="held-out rows that are looked at"
    )
    options.add_argument("--points", type=int, default=8)
    options.add_argument(
        "--minutes", type=float, default=float("inf"), help="start no run after so many"
    )
    options.add_argument(
        "--results", type=Path, default=ROOT / "benchmarks/results/mebp_converge.json"
    )
    options.add_argument("--plot", type=Path, help="write the curves here as SVG")
    arguments = options.parse_args()
    if bool(arguments.articles) == bool(arguments.train and arguments.heldout):
        options.error("give --train and --heldout, or --articles")
    torch.set_num_threads(1)
    until = time.monotonic() + 60 * arguments.minutes
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    if arguments.articles:
        texts = articles(arguments.articles)
        held_out = texts[::HELD_OUT]
        del texts[::HELD_OUT]
    else:
        texts, held_out = solutions(arguments.train), solutions(arguments.heldout)
    rows = blocks_of(texts, tokenizer, arguments.length)
    judge = Judge(
        arguments.model, blocks_of(held_out, tokenizer, arguments.length, arguments.held_out)
    )
    kept: dict[str, Any] = (
        json.loads(arguments.results.read_text()) if arguments.results.is_file() else {"runs": {}}
    )

    def of(case: str, rate: float, forwards: int, points: int) -> dict[str, list[float]]:
        run = Run(case, rate, forwards, arguments.batch, arguments.length)
        if run.name not in kept["runs"]:
            if time.monotonic() > until:
                raise SystemExit("runs are left: run this again")
            kept["runs"][run.name] = train(run, arguments.model, rows, judge, points)
            kept["machine"] = machine()
            atomic_files.write_bytes(
                arguments.results, (json.dumps(kept, indent=1) + "\n").encode()
            )
        curve: dict[str, list[float]] = kept["runs"][run.name]
        loss = curve["loss"]
        accuracy = curve["accuracy"]
        print(
            f"{run.name}: loss {loss[0]:.4f} to {loss[-1]:.4f}, accuracy {accuracy[0]:.2%} to"
            f" {accuracy[-1]:.2%}, {curve['seconds'][-1]:.0f} s",
            flush=True,
        )
        return curve

    curves = {}
    for name in arguments.case:
        tried = {
            rate: of(name, rate, arguments.sweep_forwards, 1)["loss"][-1]
            for rate in CASES[name].rates
        }
        for rate in sorted(tried, key=tried.__getitem__):
            curves[name] = of(name, rate, arguments.forwards, arguments.points)
            if curves[name]["loss"][-1] <= tried[rate]:
                break
    if arguments.plot:
        series = [
            Series(n, tuple(zip(c["forwards"], c["accuracy"], strict=True)))
            for n, c in curves.items()
        ]
        drawn = chart("Next-token accuracy against forward passes", series, "range")
        picture = standalone(drawn).replace(">step 0<", ">0 forwards<")
        arguments.plot.write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
