"""Models in memory that the comparison at the start of a run refuses wrongly, and what it costs.

    python benchmarks/live_comparison.py [TYPE ...] [--model FOLDER] [--check]

Each type of docs/model-types.md that walks is made small, with random weights, and handed over as
it is, with a LoRA of PEFT's, and in bfloat16; resident (plain) and copied (mebp). None may be
refused. With a folder the comparison of that model in bfloat16 with LoRA is measured: processor
seconds, and the private memory that it adds, beside a block's bytes in float32."""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import re
import resource
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch

PAGE = Path(__file__).parent.parent / "docs" / "model-types.md"
PLANS = {"plain": {}, "mebp": {"frozen": "disk × raw"}}
MOST_SECONDS = 3.0
"""Processor seconds that the comparison of SmolLM2 may take."""


def walked_types() -> list[str]:
    """Return the model types that the page says are walked."""
    return re.findall(r"^\| `([^`]+)` \| walks", PAGE.read_text(encoding="utf-8"), re.M)


def small_model(model_type: str) -> Any:
    """Return a small model of a type, with random weights in float32."""
    from transformers import AutoConfig

    from blockwalk.cutting.shrink import shrink
    from blockwalk.cutting.skeleton import model_class, model_config
    from blockwalk.cutting.small_instance import small_instance

    config = shrink(AutoConfig.for_model(model_type))
    cls: Any = model_class(config)
    return small_instance(cls, model_config(config, cls))


def as_loaded(model: Any) -> Any:
    """Return the model itself."""
    return model


def with_lora(model: Any) -> Any:
    """Return the model with a LoRA whose two factors are random."""
    from blockwalk.cutting.lora_forward import unfuse
    from blockwalk.cutting.peft_models import add_adapter, lora_config

    adapted = add_adapter(model, lora_config())
    unfuse(adapted)  # PEFT's own forwards, as a user has them
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_B" in name:
                param.copy_(torch.randn(param.shape, generator=generator) * 0.05)
    return adapted


def in_bfloat16(model: Any) -> Any:
    """Return the model in bfloat16."""
    return model.to(torch.bfloat16)


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "as loaded": as_loaded,
    "PEFT LoRA": with_lora,
    "bfloat16": in_bfloat16,
}


def outcome(model: Any, plan_name: str, lora: Any = None) -> str:
    """Return what becomes of a model in memory: compared, not compared, or the refusal."""
    from blockwalk import method
    from blockwalk.engine.model_handle import opened

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("blockwalk.cutting.live_comparison")
    logger.addHandler(handler)
    try:
        with tempfile.TemporaryDirectory() as folder:
            handle = opened(
                model,
                method(plan_name, **PLANS[plan_name]),
                lora=lora,
                device=torch.device("cpu"),
                workdir=Path(folder),
                packs=Path(folder),
                training=True,
            )
            handle.close()
    # whatever opening raises: most of it is no comparison's
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        compared = "differs between the model in memory" in text or "on which a model" in text
        return f"{'REFUSED' if compared else 'not opened'}: {text[:300]}"
    finally:
        logger.removeHandler(handler)
    return f"NOT COMPARED: {messages[0][:300]}" if messages else "compared"


def private_bytes() -> int:
    """Return the anonymous memory of this process that is in use."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"RssAnon:\s+(\d+)", text)[1]) * 1024  # type: ignore[index]


def measured(folder: str) -> tuple[float, int, int]:
    """Return the comparison's processor seconds, the private bytes that it adds at their peak, and
    those of a block in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from blockwalk.cutting import live_comparison

    base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=targets, r=8))
    block = 4 * sum(p.numel() for p in base.model.layers[0].parameters())
    seconds = 0.0
    peak = 0

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal seconds, peak
            gc.collect()
            start = private_bytes()
            highest = [start]
            stop = threading.Event()

            def watch() -> None:
                while not stop.wait(0.002):
                    highest.append(private_bytes())

            watcher = threading.Thread(target=watch)
            watcher.start()
            begun = time.thread_time(), resource.getrusage(resource.RUSAGE_SELF)
            try:
                return function(*args, **kwargs)
            finally:
                ended = resource.getrusage(resource.RUSAGE_SELF)
                stop.set()
                watcher.join()
                seconds += ended.ru_utime + ended.ru_stime - begun[1].ru_utime - begun[1].ru_stime
                peak = max(peak, max(highest) - start)

        return call

    import blockwalk.engine.model_handle as model_handle

    model_handle.observed = timed(live_comparison.observed)  # type: ignore[attr-defined]
    model_handle.require_same = timed(live_comparison.require_same)  # type: ignore[attr-defined]
    print(outcome(model, "mebp"))
    return seconds, peak, block


def main() -> None:
    """Print a line a model, and the bounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--model", help="a folder, for the cost")
    parser.add_argument("--check", action="store_true", help="exit 1 where a bound is broken")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("blockwalk").setLevel(logging.WARNING)
    broken = []
    if arguments.model:
        seconds, peak, block = measured(arguments.model)
        print(
            f"processor seconds {seconds:.2f} (at most {MOST_SECONDS}), private memory"
            f" {peak / 1e6:.1f} MB (a block in float32 {block / 1e6:.1f} MB)"
        )
        broken += ["seconds"] if seconds > MOST_SECONDS else []
        broken += ["memory"] if peak > block else []
    counts: dict[str, int] = {}
    types = arguments.types or ([] if arguments.model else walked_types())
    for model_type in types:
        try:
            model = small_model(model_type)
        except Exception as error:  # a type that this version of transformers does not have
            print(f"{model_type:24} not made: {str(error)[:100]}", flush=True)
            continue
        for variant, change in VARIANTS.items():
            try:
                changed = change(copy.deepcopy(model))
            except Exception as error:  # what PEFT refuses
                print(f"{model_type:24} {variant:10} not made: {str(error)[:200]}", flush=True)
                continue
            for plan_name in PLANS:
                verdict = outcome(copy.deepcopy(changed), plan_name)
                kind = verdict.partition(":")[0]
                counts[kind] = counts.get(kind, 0) + 1
                if verdict != "compared":
                    print(f"{model_type:24} {variant:10} {plan_name:6} {verdict}", flush=True)
                if kind == "REFUSED":
                    broken.append(f"{model_type}, {variant}, {plan_name}")
        print(f"{model_type:24} {counts}", flush=True)
    print(f"{len(types)} types: {counts}; broken: {broken or 'none'}")
    if arguments.check and broken:
        sys.exit(1)


if __name__ == "__main__":
    main()
