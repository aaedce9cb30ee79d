"""The same bits after 20 zeroth-order steps, wherever the weights live and however rarely they are
written back.

Tiny random models of six architectures, tied and untied, full-parameter and LoRA. The control is
``mezo`` with everything resident in the same codec; that control is itself compared with the
reference loop (whole model in memory, the model's own loss), and ``noise: mezo`` with the
original's in-place arithmetic. Compared are every step's loss and projected gradient, the loss of a
held-out batch, and every trained weight.

    python benchmarks/zo_exact.py [--steps 20] [--architecture opt ...] [--json FILE] [--check]
"""

from __future__ import annotations

import copy
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from benchmarks.common import Bound, finish, parser
from torch import nn

from blockwalk import Walker, method
from blockwalk.plan.choices import LoraSettings
from blockwalk.reference.mezo import mezo_step
from blockwalk.reference.zeroth_order import masters_of, spsa_step

VOCABULARY = 101
SEED = 3
EPSILON = 1e-3
OPTIMIZER = {
    "name": "sgd",
    "learning_rate": 1e-2,
    "schedule": "linear",
    "warmup_steps": 3,
    "total_steps": 40,
}
COMMON = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "max_position_embeddings": 64,
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "opt": {"hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
            "word_embed_proj_dim": 32},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4},
    "llama": SIZES,
    "qwen2": {**SIZES, "num_key_value_heads": 2},
    "qwen3_moe": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 4,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gemma2": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What two runs are compared by."""

    steps: tuple[tuple[float, float | None], ...]
    """(loss, projected gradient) of each step."""
    held_out: float | None
    weights: dict[str, torch.Tensor]

    def differences(self, other: Run) -> list[str]:
        """What is not bitwise the same; a held-out loss is compared where both runs have one."""
        found = [
            f"step {i + 1}"
            for i, pair in enumerate(zip(self.steps, other.steps, strict=True))
            if pair[0] != pair[1]
        ]
        if None not in (self.held_out, other.held_out) and self.held_out != other.held_out:
            found.append("held-out loss")
        if self.weights.keys() != other.weights.keys():
            return [*found, "parameter names"]
        return found + [
            name
            for name, value in self.weights.items()
            if not torch.equal(value, other.weights[name])
        ]


def build(kind: str, *, tied: bool) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **COMMON, **ARCHITECTURES[kind], tie_word_embeddings=tied)
    model: nn.Module = AutoModelForCausalLM.from_config(config).float()
    return model


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[:, :3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}


def walk(
    name: str, model: nn.Module, steps: int, *, lora: LoraSettings | None, **settings: Any
) -> Run:
    """One run of the walker on its own copy of the model."""
    plan = method(name, optimizer=OPTIMIZER, seed=SEED, **settings)
    with (
        tempfile.TemporaryDirectory() as folder,
        Walker(copy.deepcopy(model), plan, lora=lora, workdir=folder, device="cpu") as walker,
    ):
        seeds = range(steps)
        results = [
            walker.step(batch(i), seed=i if plan.zo.noise == "mezo" else None) for i in seeds
        ]
        held_out = walker.evaluate(batch(steps)).loss
        stored = walker.engine.trained.weights()
        weights = {
            n: w.clone() if isinstance(w, torch.Tensor) else w.rows(0, w.shape[0]).clone()
            for n, w in stored.items()
        }
        return Run(tuple((r.loss, r.projected_grad) for r in results), held_out, weights)


def reference(model: nn.Module, steps: int) -> Run:
    """The readable loop with counter-based noise, and with the walker's schedule."""
    model = copy.deepcopy(model)
    masters = masters_of(model)
    done = []
    for i, rate in enumerate(rates(steps)):
        made = spsa_step(
            model, masters, batch(i), step=i + 1, seed=SEED, learning_rate=rate, epsilon=EPSILON
        )
        done.append((made.losses[0], made.projected_grads[0]))
    return Run(tuple(done), None, masters)


def original(model: nn.Module, steps: int) -> Run:
    """The original's lines: one generator over all parameters, perturbed where they lie."""
    model = copy.deepcopy(model)
    done = []
    for i, rate in enumerate(rates(steps)):
        made = mezo_step(model, batch(i), learning_rate=rate, epsilon=EPSILON, seed=i)
        done.append((made.losses[0], made.projected_grads[0]))
    return Run(tuple(done), None, {name: p.detach() for name, p in model.named_parameters()})


def rates(steps: int) -> list[float]:
    from blockwalk.plan.schedules import make_schedule

    schedule = make_schedule(OPTIMIZER["schedule"], OPTIMIZER["learning_rate"],
                             OPTIMIZER["warmup_steps"], OPTIMIZER["total_steps"], 0.0)  # fmt: skip
    return [schedule(step) for step in range(steps)]


def streamed() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every place and rhythm that must not change a bit."""
    for tier in ("host", "disk"):
        for flush_every in (1, 4, 16):
            yield (
                f"zo2-{tier} flush {flush_every}",
                {"frozen": tier, "trainable": tier, "update": {"flush_every": flush_every}},
            )
    yield "zo2-disk prefetch 0", {"frozen": "disk", "trainable": "disk", "prefetch": 0}
    yield "zo2-disk prefetch 3", {"frozen": "disk", "trainable": "disk", "prefetch": 3}
    yield (
        "zo2-disk update at step end",
        {"frozen": "disk", "trainable": "disk", "update": {"timing": "step"}},
    )
    yield "zo2-disk fp32 codec", {"frozen": "disk", "trainable": "disk × fp32"}


def coded() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Codecs that round: each against resident weights kept in the same codec."""
    for codec in ("bf16", "fp16", "fp8", "int8"):
        for tier, flush_every in (("host", 1), ("disk", 4)):
            yield codec, f"zo2-{tier} {codec} flush {flush_every}", {
                "trainable": f"{tier} × {codec}",
                "update": {"flush_every": flush_every}}  # fmt: skip


def compare(kind: str, steps: int) -> Iterator[dict[str, Any]]:
    """All comparisons of one architecture."""

    def row(
        tied: bool, lora: bool, case: str, control: str, found: Run, expected: Run
    ) -> dict[str, Any]:
        return {"architecture": kind, "tied": tied, "trained": "lora" if lora else "full",
                "case": case, "control": control,
                "differs": found.differences(expected)}  # fmt: skip

    for tied in (True, False):
        model = build(kind, tied=tied)
        own = walk("mezo", model, steps, lora=None, loss="model")
        yield row(
            tied,
            False,
            "mezo, the model's own loss",
            "reference loop",
            own,
            reference(model, steps),
        )
        drawn = walk("mezo", model, steps, lora=None, loss="model", zo={"noise": "mezo"})
        yield row(tied, False, "mezo, noise: mezo", "original MeZO", drawn, original(model, steps))
        for lora in (None, LoraSettings(rank=2)):
            control = walk("mezo", model, steps, lora=lora)
            for case, settings in streamed():
                yield row(
                    tied,
                    lora is not None,
                    case,
                    "mezo",
                    walk("zo2", model, steps, lora=lora, **settings),
                    control,
                )
        controls: dict[str, Run] = {}
        for codec, case, settings in coded():
            if codec not in controls:
                controls[codec] = walk(
                    "mezo", model, steps, lora=None, trainable=f"device × {codec}"
                )
            found = walk("zo2", model, steps, lora=None, **settings)
            yield row(tied, False, case, f"mezo {codec}", found, controls[codec])


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--steps", type=int, default=20)
    options.add_argument(
        "--architecture", nargs="+", choices=list(ARCHITECTURES), default=list(ARCHITECTURES)
    )
    arguments = options.parse_args()
    torch.set_num_threads(1)  # threads are no gain on matrices of 32 columns
    rows: list[dict[str, Any]] = []
    for kind in arguments.architecture:
        began = time.perf_counter()
        begin = len(rows)
        for row in compare(kind, arguments.steps):
            rows.append(row)
            if row["differs"]:
                shown = ", ".join(row["differs"][:4])
                tied = "tied" if row["tied"] else "untied"
                print(
                    f"  {kind} {tied} {row['trained']}: {row['case']} differs from"
                    f" {row['control']} in {len(row['differs'])}: {shown}",
                    flush=True,
                )
        case_rows = rows[begin:]
        same = sum(not row["differs"] for row in case_rows)
        print(f"{kind:<10} {same}/{len(case_rows)} the same bits after {arguments.steps} steps"
              f" ({time.perf_counter() - began:.0f} s)", flush=True)  # fmt: skip
    finish(
        arguments,
        rows,
        [Bound("comparisons that differ in any bit", sum(bool(row["differs"]) for row in rows), 0)],
    )


if __name__ == "__main__":
    main()
