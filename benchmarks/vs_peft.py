"""The same LoRA step by Blockwalk (mebp, 4-bit weights on disk) and by plain transformers + PEFT (bf16 in memory, gradient
checkpointing), turn by turn: seconds and peak memory of two processes that take their steps alternately.

    python benchmarks/vs_peft.py [--model Qwen2.5-0.5B] [--seq 256] [--steps 7]
    python benchmarks/vs_peft.py --model FOLDER --data gsm8k_train.jsonl --batch 4 --seq 512 --steps 30

With ``--data`` the model is the one in a folder and both learn the same batches of its records, cut at ``--seq`` tokens and
padded to the longest; else weights and tokens are random, and both read a tokenizer of as many entries as the model has: ours
lets go of it before it opens the model, as a run does, transformers' Trainer keeps it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANK = 16
SECONDS_BOUND, MEMORY_BOUND = 1.0, 0.33
REAL_SECONDS_BOUND = 1 / 1.5


def batches(
    name: str, vocab: int, batch: int, sequence: int, data: Path | None = None
) -> Callable[[int], dict[str, Any]]:
    """The batch of each step: random tokens, or records of ``data`` in an order of their own, padded by the tokenizer."""
    from benchmarks.common import random_batch

    if data is None:
        return lambda step: random_batch(vocab, batch, sequence, seed=step)
    import random

    from benchmarks.curves import rows_of
    from transformers import AutoTokenizer, DataCollatorForLanguageModeling

    tokenizer = AutoTokenizer.from_pretrained(name)
    rows = rows_of(data, tokenizer, sequence)
    random.Random(0).shuffle(rows)
    padded = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    return lambda step: dict(padded(rows[step * batch : (step + 1) * batch]))


def ours(name: str, sequence: int, *, batch: int = 1, data: Path | None = None) -> Callable[[int], float]:
    """A function that takes one step and answers its loss."""
    from benchmarks.common import random_store, read_tokenizer

    from blockwalk import Walker, method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.placement import Codec

    model = Path(name) if data else random_store(name, Codec.INT4)
    read_tokenizer(model)
    walker = Walker(model, method("mebp", frozen="disk × int4a"), lora=LoraSettings(rank=RANK), device="cpu")
    given = batches(name, walker.spec.vocab_size, batch, sequence, data)
    return lambda step: walker.step(given(step)).loss


def theirs(
    name: str,
    sequence: int,
    *,
    device: str = "cpu",
    batch: int = 1,
    data: Path | None = None,
    holds_tokenizer: bool = True,
    four_bits: bool = False,
) -> Callable[[int], float]:
    """The control: everything in the device's memory in bfloat16, transformers' own forward, torch's AdamW. It holds the
    tokenizer in memory too, as Trainer does, unless memory is the device's alone. In ``four_bits`` its linear layers are
    bitsandbytes' nf4, as in QLoRA."""
    import torch
    from benchmarks.common import CACHE, MODELS, model_config
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    tokenizer = None
    if holds_tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(name if data else CACHE / f"tokenizer-{MODELS[name]['vocab_size']}")
    if data:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(model_config(name), dtype=torch.bfloat16)
    given = batches(name, model.config.vocab_size, batch, sequence, data)
    if four_bits:
        in_four_bits(model, device)
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=16, target_modules="all-linear"))
    for parameter in peft.parameters():
        if parameter.is_floating_point():  # bitsandbytes' codes are bytes
            parameter.data = parameter.data.to(device, torch.bfloat16)
    peft.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    peft.enable_input_require_grads()
    peft.train()
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-4)

    def step(number: int) -> float:
        inputs = {key: each.to(device) for key, each in given(number).items()}
        loss = peft(**inputs, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    step.tokenizer = tokenizer  # type: ignore[attr-defined]  # kept, as Trainer keeps it
    return step


def in_four_bits(model: Any, device: str) -> None:
    """Put bitsandbytes' nf4 in the place of every linear layer but the head."""
    import bitsandbytes as bnb
    import torch
    from torch import nn

    linears = [(name, each) for name, each in model.named_modules() if isinstance(each, nn.Linear)]
    for name, linear in linears:
        if linear is model.get_output_embeddings():
            continue
        sides = linear.in_features, linear.out_features
        coded = bnb.nn.Linear4bit(
            *sides, bias=linear.bias is not None, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta"
        )
        coded.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        coded.bias = linear.bias
        model.set_submodule(name, coded.to(device))
    model.is_loaded_in_4bit = True


def serve(side: str, arguments: argparse.Namespace) -> None:
    """Take a step for every line on standard input; answer its loss, seconds and the peak of the process's memory."""
    from blockwalk.system.process_memory import PeakMemory

    with PeakMemory(0.003) as memory:
        make = {"ours": ours, "theirs": theirs}[side]
        step = make(arguments.model, arguments.seq, batch=arguments.batch, data=arguments.data)
        for line in sys.stdin:
            began = time.perf_counter()
            loss = step(int(line))
            answer = {"loss": loss, "seconds": time.perf_counter() - began, "peak": memory.highest}
            print(json.dumps(answer), flush=True)


def main() -> None:
    from benchmarks.common import Bound, finish, median, parser, random_store, with_tokenizer

    from blockwalk.plan.placement import Codec

    made = parser(__doc__)
    made.add_argument("--model", default="Qwen2.5-0.5B")
    made.add_argument("--seq", type=int, default=256)
    made.add_argument("--batch", type=int, default=1)
    made.add_argument("--data", type=Path, help="JSON lines of a real model's data")
    made.add_argument("--steps", type=int, default=7)
    made.add_argument("--serve", choices=["ours", "theirs"], help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments)
        return
    if arguments.data is None:
        with_tokenizer(random_store(arguments.model, Codec.INT4), arguments.model)
    command = [sys.executable, __file__, *sys.argv[1:], "--serve"]
    sides = {
        side: subprocess.Popen([*command, side], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for side in ("ours", "theirs")
    }

    def turn(process: subprocess.Popen[str], step: int) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{step}\n")
        process.stdin.flush()
        answer: dict[str, Any] = json.loads(process.stdout.readline())
        return answer

    found: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    for step in range(arguments.steps + 1):  # the first warms up and does not count
        for side, process in sides.items():
            found[side].append(turn(process, step))
    for process in sides.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    counted = {side: rows[1:] for side, rows in found.items()}
    seconds = {side: median([row["seconds"] for row in rows]) for side, rows in counted.items()}
    peaks = {side: rows[-1]["peak"] / 1e6 for side, rows in counted.items()}
    pairs = zip(counted["ours"], counted["theirs"], strict=True)
    ratio = median([mine["seconds"] / other["seconds"] for mine, other in pairs])
    print(f"{arguments.model}, rank {RANK}, {arguments.batch} × {arguments.seq} tokens")
    print(f"{'':<28}{'s/step':>8}{'peak MB':>9}")
    print(f"{'transformers + PEFT, bf16':<28}{seconds['theirs']:>8.2f}{peaks['theirs']:>9.0f}")
    print(f"{'blockwalk mebp, 4 bits on disk':<28}{seconds['ours']:>8.2f}{peaks['ours']:>9.0f}")
    figures = {"seconds": seconds, "peak_MB": peaks, "seconds_ratio": ratio}
    bounds = [
        Bound("seconds, ours over PEFT's", ratio, REAL_SECONDS_BOUND if arguments.data else SECONDS_BOUND),
        Bound("peak memory, ours over PEFT's", peaks["ours"] / peaks["theirs"], MEMORY_BOUND),
    ]
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
