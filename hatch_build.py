"""The wheel's build hook. With a machine in BLOCKWALK_WHEEL the wheel is that machine's, with the
native kernels compiled for each level of it (BLOCKWALK_CC names a cross compiler); without, it is
one for all, whose kernels are compiled at their use.

BLOCKWALK_WHEEL=x86_64 python -m build --wheel
BLOCKWALK_WHEEL=aarch64 BLOCKWALK_CC=aarch64-linux-gnu-gcc python -m build --wheel
"""

from __future__ import annotations

import ast
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

MACHINES = {"x86_64": "x86-64", "aarch64": "armv8"}


class Kernels(BuildHookInterface):  # type: ignore[type-arg,misc]
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = os.environ.get("BLOCKWALK_WHEEL")
        if not machine or self.target_name != "wheel":
            return
        folder = Path(self.root, "src", "blockwalk", "numerics", "native")
        facts = {
            node.targets[0].id: ast.literal_eval(
                node.value
            )  # of a module that imports more than a build has
            for node in ast.parse((folder / "__init__.py").read_text(encoding="utf-8")).body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and node.targets[0].id in ("FLAGS", "LEVELS")
        }
        out = Path(tempfile.mkdtemp(prefix="blockwalk-kernels-"))
        for level in (level for level in facts["LEVELS"] if level.startswith(MACHINES[machine])):
            for source in sorted(folder.glob("*.c")):
                library = out / f"{source.stem}-{level}.so"
                flags = [flag for flag in facts["FLAGS"] if flag != "-march=native"]
                compiler = os.environ.get("BLOCKWALK_CC", "cc")
                subprocess.run(
                    [compiler, *flags, f"-march={level}", source, "-o", library, "-lm"], check=True
                )
                build_data["force_include"][str(library)] = (
                    f"blockwalk/numerics/native/{library.name}"
                )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_17_{machine}"
