"""``blockwalk env``: versions and hardware, for bug reports; ``blockwalk doctor``: what this
machine can do."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from blockwalk.program.program import human_bytes
from blockwalk.ranks import place
from blockwalk.system.terminal import say
from blockwalk.system.versions import installed


def environment(arguments: argparse.Namespace) -> None:
    """Print the versions and the hardware, for a bug report."""
    facts = describe()
    if arguments.json:
        say(json.dumps(facts, indent=2))
    else:
        width = max(map(len, facts))
        say("\n".join(f"{name:<{width}}  {value}" for name, value in facts.items()))


def doctor(arguments: argparse.Namespace) -> None:
    """Measure this machine, and write what was found."""
    from blockwalk.doctor import machine as probe
    from blockwalk.simulate import hardware

    out = Path(arguments.out)
    rank_place = place.place()
    say("measuring this machine: a minute or a few, best while nothing else runs", file=sys.stderr)

    def tell(line: str) -> None:
        say(f"  {line}", file=sys.stderr)

    report = probe.measure(out.absolute().parent, name=platform.node() or "here", say=tell)
    if rank_place.rank == 0:
        hardware.save(report.hardware, out)
        say("\n".join(report.lines()))
        say(f"written to {out}; blockwalk plan --hardware {out} ranks every method on it")


def describe() -> dict[str, str]:
    """Return versions of the packages that matter, the processor, memory and GPUs."""
    import psutil
    import torch

    from blockwalk.numerics.device import model_of

    memory = psutil.virtual_memory()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    devices: list[str] = []
    if accelerator is not None:
        for index in range(torch.accelerator.device_count()):
            model = model_of(torch.device(accelerator.type, index))
            devices.append(model or str(accelerator))
    return {
        "python": sys.version.split()[0],
        **installed(),
        "torch": str(torch.__version__),  # with the build, which its metadata may lack
        "system": platform.platform(),
        "processor": _processor(),
        "cores": f"{os.cpu_count()}; torch uses {torch.get_num_threads()} threads",
        "memory": f"{human_bytes(memory.total)}, {human_bytes(memory.available)} available",
        "accelerator": f"{accelerator or 'none'}: {', '.join(devices) or 'no device'}"
        f" (CUDA: {torch.version.cuda or 'not built'})",
    }


def _processor() -> str:
    """Return the model name, and the instruction sets that decide how fast a step is."""
    from blockwalk.doctor.machine import processor

    if not (facts := processor()):
        return platform.processor() or platform.machine()
    flags = facts.get("flags", "").split()
    sets = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
    return f"{facts.get('model name', platform.machine())} ({', '.join(sets) or 'no AVX2'})"
