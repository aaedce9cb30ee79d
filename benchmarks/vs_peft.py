"""The same LoRA step by Blockwalk (mebp, 4-bit weights on disk) and by plain transformers + PEFT
with the model in memory.

    python benchmarks/vs_peft.py [--model Qwen2.5-0.5B] [--seq 256] [--steps 7]
    python benchmarks/vs_peft.py --model FOLDER --data FILE.jsonl --batch 4 --seq 512 --steps 11

Each side is a process of its own, and they take turns of two steps, of which the second counts: it
follows another at once, as in a run, and not half a minute of other sides' steps, after which ours
makes its file maps anew. A ratio is the median of those of single rounds. PEFT runs in bfloat16 and
in float32, with gradient checkpointing and without; the bounds compare with its fastest setting.
``--peers`` names fewer of them.

With ``--data`` the model is the one in a folder, ours in int4a, and all learn the same batches of
its records, cut at ``--seq`` tokens and padded to the longest. Else weights (ours in int4) and
tokens are random, and all read a tokenizer of as many entries as the model has: ours lets go of it
before it opens the model, as a run does, transformers' Trainer keeps it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANK = 16
MEMORY_BOUND = 0.17
CHECKPOINTED_BOUND = {"random": 1.0, "real": 0.60}
"""Our seconds by those of PEFT with checkpointing in bfloat16, for random weights and for a real
model."""
FASTEST_BOUND = {"random": 0.90, "real": 0.95}
"""Our seconds by those of PEFT's fastest setting."""


@dataclass(frozen=True)
class Peer:
    """One way that an expert runs PEFT on a processor."""

    dtype: str
    checkpointing: bool
    offloads: bool = False
    """Whether transformers keeps the blocks' inputs in host memory."""


PEERS = {
    "bf16 checkpointed": Peer("bfloat16", checkpointing=True),
    "bf16": Peer("bfloat16", checkpointing=False),
    "fp32 checkpointed": Peer("float32", checkpointing=True),
    "fp32": Peer("float32", checkpointing=False),
}
OURS = "ours"


def batches(
    name: str, vocab: int, batch: int, sequence: int, data: Path | None = None
) -> Callable[[int], dict[str, Any]]:
    """The batch of each step: random tokens, or records of ``data`` in an order of their own,
    padded by the tokenizer."""
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


def ours(
    name: str, sequence: int, *, batch: int = 1, data: Path | None = None
) -> Callable[[int], float]:
    """A function that takes one step and answers its loss."""
    from benchmarks.common import random_store, read_tokenizer

    from blockwalk import Walker, method
    from blockwalk.plan.choices import LoraSettings
    from blockwalk.plan.placement import Codec

    codec = Codec.INT4A if data else Codec.INT4
    model = Path(name) if data else random_store(name, codec)
    read_tokenizer(model)
    walker = Walker(
        model, method("mebp", frozen=f"disk × {codec}"), lora=LoraSettings(rank=RANK), device="cpu"
    )
    batch_of = batches(name, walker.spec.vocab_size, batch, sequence, data)
    return lambda step: walker.step(batch_of(step)).loss


def theirs(
    name: str,
    sequence: int,
    *,
    peer: Peer = PEERS["bf16 checkpointed"],
    device: str = "cpu",
    batch: int = 1,
    data: Path | None = None,
    holds_tokenizer: bool = True,
    four_bits: bool = False,
) -> Callable[[int], float]:
    """The control: everything in the device's memory, transformers' own forward, torch's AdamW.

    It holds the tokenizer in memory too, as Trainer does, unless memory is the device's alone. In
    ``four_bits`` its linear layers are bitsandbytes' nf4, as in QLoRA."""
    import torch
    from benchmarks.common import CACHE, MODELS, model_config
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    dtype = getattr(torch, peer.dtype)
    tokenizer = None
    if holds_tokenizer:
        tokenizer = AutoTokenizer.from_pretrained(
            name if data else CACHE / f"tokenizer-{MODELS[name]['vocab_size']}"
        )
    if data:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    else:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(model_config(name), dtype=dtype)
    batch_of = batches(name, model.config.vocab_size, batch, sequence, data)
    if four_bits:
        in_four_bits(model, device)
    peft = get_peft_model(
        model, LoraConfig(task_type="CAUSAL_LM", r=RANK, lora_alpha=16, target_modules="all-linear")
    )
    for parameter in peft.parameters():
        if parameter.is_floating_point():  # bitsandbytes' codes are bytes
            parameter.data = parameter.data.to(device, dtype)
    if peer.checkpointing:
        offload = {"offload": True} if peer.offloads else {}
        peft.gradient_checkpointing_enable(
            gradient_checkpointing_kwargs={"use_reentrant": False}, **offload
        )
        peft.enable_input_require_grads()
    peft.train()
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-4)

    def step(number: int) -> float:
        inputs = {key: tensor.to(device) for key, tensor in batch_of(number).items()}
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

    linears = [
        (name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)
    ]
    for name, linear in linears:
        if linear is model.get_output_embeddings():
            continue
        coded = bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
            device="meta",
        )
        coded.weight = bnb.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
        coded.bias = linear.bias
        model.set_submodule(name, coded.to(device))
    model.is_loaded_in_4bit = True


def serve(side: str, arguments: argparse.Namespace) -> None:
    """Take a step for every line on standard input; answer its loss, seconds and the peak of the
    process's memory."""
    from blockwalk.system.process_memory import PeakMemory

    with PeakMemory(0.003) as memory:
        if side == OURS:
            step = ours(arguments.model, arguments.seq, batch=arguments.batch, data=arguments.data)
        else:
            step = theirs(
                arguments.model,
                arguments.seq,
                peer=PEERS[side],
                batch=arguments.batch,
                data=arguments.data,
            )
        take_steps(step, memory)


def take_steps(step: Callable[[int], float], memory: Any) -> None:
    """Take a step for every line on standard input; ``memory`` has watched the process since it
    began."""
    for line in sys.stdin:
        began = time.perf_counter()
        loss = step(int(line))
        answer = {"loss": loss, "seconds": time.perf_counter() - began, "peak": memory.highest}
        print(json.dumps(answer), flush=True)


def turn(process: subprocess.Popen[str], step: int) -> dict[str, Any]:
    """The answer of a side to one step."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{step}\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


def measure(
    names: Iterable[str], steps: int, script: str = __file__
) -> dict[str, list[dict[str, Any]]]:
    """The answers of each side to ``steps`` steps, taken in turn, each right after another step of
    the same side; a side is ``script`` with ``--serve`` and its name."""
    command = [sys.executable, script, *sys.argv[1:], "--serve"]
    sides = {
        name: subprocess.Popen(
            [*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name in names
    }
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for number in range(steps + 1):
        for name, process in sides.items():
            turn(process, 2 * number)
            answers[name].append(turn(process, 2 * number + 1))
    for process in sides.values():
        process.communicate()
    return {name: rows[1:] for name, rows in answers.items()}


def main() -> None:
    from benchmarks.common import Bound, finish, median, parser, random_store, with_tokenizer

    from blockwalk.plan.placement import Codec

    options = parser(__doc__)
    options.add_argument("--model", default="Qwen2.5-0.5B")
    options.add_argument("--seq", type=int, default=256)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--data", type=Path, help="JSON lines of a real model's data")
    options.add_argument("--steps", type=int, default=7)
    options.add_argument(
        "--peers", default=",".join(PEERS), help="settings of PEFT to compare with, by commas"
    )
    options.add_argument("--serve", choices=[OURS, *PEERS], help=argparse.SUPPRESS)
    arguments = options.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments)
        return
    if arguments.data is None:
        with_tokenizer(random_store(arguments.model, Codec.INT4), arguments.model)
    peers = arguments.peers.split(",")
    rows = measure([OURS, *peers], arguments.steps)
    seconds = {name: median([row["seconds"] for row in rows[name]]) for name in rows}
    peaks = {name: rows[name][-1]["peak"] / 1e6 for name in rows}

    def ratio(peer: str) -> float:
        pairs = zip(rows[OURS], rows[peer], strict=True)
        return median([mine["seconds"] / other["seconds"] for mine, other in pairs])

    ratios = {peer: ratio(peer) for peer in peers}
    fastest = min(peers, key=seconds.__getitem__)
    print(
        f"{arguments.model}, rank {RANK}, {arguments.batch} × {arguments.seq} tokens,"
        f" {arguments.steps} rounds"
    )
    print(f"{'':<38}{'s/step':>8}{'peak MB':>9}{'ours by it':>12}")
    for peer in peers:
        print(
            f"{'transformers + PEFT, ' + peer:<38}{seconds[peer]:>8.2f}{peaks[peer]:>9.0f}"
            f"{ratios[peer]:>12.2f}"
        )
    print(f"{'blockwalk mebp, 4 bits on disk':<38}{seconds[OURS]:>8.2f}{peaks[OURS]:>9.0f}")
    figures = {"seconds": seconds, "peak_MB": peaks, "seconds_ratio": ratios, "fastest": fastest}
    kind = "real" if arguments.data else "random"
    bounds = [
        Bound(
            f"seconds, ours over PEFT's fastest ({fastest})", ratios[fastest], FASTEST_BOUND[kind]
        ),
        Bound("peak memory, ours over that", peaks[OURS] / peaks[fastest], MEMORY_BOUND),
    ]
    checkpointed = "bf16 checkpointed"
    if checkpointed in peers and checkpointed != fastest:
        bounds.append(
            Bound(
                f"seconds, ours over PEFT's {checkpointed}",
                ratios[checkpointed],
                CHECKPOINTED_BOUND[kind],
            )
        )
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
