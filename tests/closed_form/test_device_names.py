"""Oracle: the rule that nothing names CUDA where torch's accelerator would do: the modules that do,
each with its reason."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "blockwalk"
DESCRIBED = "a description's word for any accelerator, in files that are kept"
NAMED = {
    "numerics/operators.py": "the devices that Triton compiles for",
    "numerics/device.py": "page registration",
    "ranks/agreement.py": "NCCL",
    "ranks/groups.py": "NCCL",
    "ranks/launch.py": "the cores beside a GPU, by NVIDIA's bus number",
    "numerics/lazy_parameter.py": "torch's own name of a property",
    "walk/fake_units.py": "whether this torch knows a GPU's attention on tensors without bytes",
    "cli/commands.py": "examples in a help text",
    "cli/main.py": "a variable of torch's allocator",
    "cli/machine.py": "torch's version of CUDA, for reports",
    "plan/sizes.py": DESCRIBED,
    "simulate/hardware.py": DESCRIBED,
    "simulate/axes.py": DESCRIBED,
    "simulate/bounds.py": DESCRIBED,
    "doctor/findings.py": DESCRIBED,
    "doctor/machine.py": DESCRIBED,
    "numerics/updates.py": "the kind of a device, as described: a processor or an accelerator",
    "plan/foreign_rows.py": "names of other tools' settings",
    "plan/foreign_values.py": "names of other tools' devices",
    "tiers/model_folder/quantiser_settings.py": "names of other tools' settings",
}


def names(path: Path) -> Iterator[str]:
    """Code that names CUDA: identifiers, attributes and strings that are no docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    words = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        named = (
            getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
        )
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in words:
            named = node.value
        if isinstance(named, str) and re.search("cuda", named, re.IGNORECASE):
            yield named


def test_nothing_names_cuda_without_a_reason() -> None:
    paths = [path.relative_to(SOURCE) for path in sorted(SOURCE.rglob("*.py"))]
    named = {
        path.as_posix(): list(names(SOURCE / path)) for path in paths if "kernels" not in path.parts
    }
    found = {path: words for path, words in named.items() if words}
    assert found.keys() == NAMED.keys(), {
        name: found.get(name) for name in found.keys() ^ NAMED.keys()
    }
