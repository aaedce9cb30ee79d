"""Which causal model types of transformers are walked, and why the others are refused: the table
docs/model-types.md.

    python benchmarks/model_types.py [TYPE ...] [--out docs/model-types.md]

Each type's default configuration is shrunken and certified, as a run does once for its model. A
type that cannot even be built from its defaults is listed with transformers' own reason. With types
named, their rows are printed alone."""

from __future__ import annotations

import argparse
import sys
import warnings
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

TRIED = " (tried on a small instance of its configuration, with a layer of each kind)"
"""The end of a refusal that every row would have."""
LONGEST_REASON = 160
"""Characters of a reason that the table shows."""


def verdict(model_type: str) -> str:
    """The word "walks", or the reason for a refusal, on one line; with the default adapter, whose
    own refusal is told apart."""
    from transformers import AutoConfig

    from blockwalk.cutting.peft_models import add_adapter, lora_config
    from blockwalk.cutting.shrink import shrink
    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.cutting.verify import certified

    try:
        config = shrink(AutoConfig.for_model(model_type))
    except Exception as error:  # whatever a configuration class raises on its own defaults
        return f"not tried: its default configuration cannot be shrunken ({_line(error)})"
    try:
        certified(build_skeleton(config))
    except Exception as error:  # whatever a model raises is the reason to refuse it
        return f"refused: {_line(error)}"
    try:
        certified(add_adapter(build_skeleton(config), lora_config()))
    except Exception as error:  # and so is what PEFT raises
        return f"walks, and its default adapter is refused: {_line(error)}"
    return "walks"


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    reason = text.partition("cannot be walked block by block: ")[2] or text
    reason = reason.removesuffix(TRIED)
    short = reason if len(reason) <= LONGEST_REASON else f"{reason[:LONGEST_REASON]} ..."
    return short.replace("|", "\\|")


def page(rows: dict[str, str]) -> str:
    """The page with one row a type."""
    import torch
    import transformers

    walks = sum(row.startswith("walks") for row in rows.values())
    adapted = sum(row == "walks" for row in rows.values())
    text = "# Model types\n\n"
    text += (
        f"Of {len(rows)} causal model types of transformers {transformers.__version__}, {walks}"
        " are walked with their\n"
    )
    text += (
        "default configuration: loss, logits and every gradient of a small instance are the"
        f" model's own. {adapted} of\n"
        "these take the default adapter (LoRA, `lora.target_modules: all-linear`). The others are\n"
    )
    text += (
        "listed with the reason. Made by `benchmarks/model_types.py` with torch"
        f" {torch.__version__}, {date.today()}.\n\n"
    )
    text += "| type | verdict |\n|---|---|\n"
    return text + "".join(f"| `{name}` | {row} |\n" for name, row in rows.items())


def main() -> None:
    """Print a row a type, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent.parent / "docs" / "model-types.md"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    rows: dict[str, str] = {}
    for model_type in arguments.types or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        rows[model_type] = verdict(model_type)
        print(f"{model_type:28} {rows[model_type]}", flush=True)
    if not arguments.types:
        arguments.out.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
