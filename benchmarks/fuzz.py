"""Every reader of files that somebody may have been handed, on files that hypothesis changes: no
crash, no hang, little memory.

    python benchmarks/fuzz.py [--check] [--json FILE] [--seconds 600] [--readers
    safetensors,store,...]

A reader may refuse a file with ValueError (one line, exit code 2) or OSError; anything else is a
crash. Bytes are flipped, cut, inserted and repeated; in JSON values are replaced by odd ones, and
sealed again, so that checksums do not hide what lies behind them. Memory is Python's own, by
tracemalloc: at most 4 times the file and a megabyte."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.common import Bound, finish, parser
from benchmarks.fault_runs import Place, place, said, start
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from blockwalk.system import atomic_files

HANG = 10
"""Seconds for one file."""
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 63,
    1e308,
    "",
    "x",
    "../x",
    [],
    {},
    [[]],
    {"a": {}},
    float("nan"),
    "\0",
    "9" * 400,
]


@dataclass(frozen=True)
class Reader:
    """A file of a run or a model, how it is read, and whether it is lines or objects of JSON that
    are sealed."""

    file: Path
    read: Callable[[], Any]
    sealed: bool = False


class _TooSlow(Exception):
    pass


class _Over(Exception):
    pass


def readers(where: Place) -> dict[str, Reader]:
    """Readers with files that a small model and its runs have left."""
    from blockwalk.checkpoints import pieces, run_checkpoint
    from blockwalk.checkpoints.ledger import read_ledger
    from blockwalk.engine.pack import pack
    from blockwalk.models.model_source import model_source
    from blockwalk.plan.placement import Codec
    from blockwalk.report import html
    from blockwalk.simulate import hardware
    from blockwalk.tiers.block_store.store import BlockStore
    from blockwalk.tiers.model_folder import safetensors, torch_file
    from blockwalk.train import config

    run = where.folder / "run"
    store = where.folder / "store"
    model = where.folder / "model"
    assert start(where, "mezo", run).wait() == 0, said(run)
    shutil.copytree(where.tiny.model, model)
    pack(model, store, Codec.INT4)
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("model-1.safetensors", "model-2.safetensors"):
        (model / name).touch()
    shutil.copy(model / "model.safetensors", where.folder / "header.safetensors")
    (model / "model.safetensors").unlink()
    import torch

    torch.save(
        {"weight": torch.zeros(4, 4), "bias": torch.zeros(4)}, where.folder / "pytorch_model.bin"
    )
    shutil.copy(next(hardware.SHIPPED.glob("*.yaml")), where.folder / "machine.yaml")
    checkpoint = run / "checkpoint-000006"

    def read_store() -> None:
        opened = BlockStore(store)
        try:
            opened.verify()
            opened.weights(opened.names())
        finally:
            opened.close()

    def read_checkpoint() -> None:
        run_checkpoint.verify(checkpoint)
        run_checkpoint.load(checkpoint)

    assert pieces.FORMAT == run_checkpoint.FORMAT
    tensors = checkpoint / "rank-00000.safetensors"
    header = where.folder / "header.safetensors"
    return {
        **models_as_they_lie(where.folder / "quantised"),
        "safetensors": Reader(header, lambda: safetensors.read_header(header)),
        "store": Reader(store / "store.json", read_store, sealed=True),
        "unit": Reader(store / "unit-00001.bin", read_store),
        "ledger": Reader(
            run / "ledger.jsonl", lambda: read_ledger(run / "ledger.jsonl"), sealed=True
        ),
        "state": Reader(checkpoint / "state.json", read_checkpoint, sealed=True),
        "pieces": Reader(checkpoint / "rank-00000.json", read_checkpoint, sealed=True),
        "tensors": Reader(tensors, read_checkpoint),
        "bin": Reader(
            where.folder / "pytorch_model.bin",
            lambda: torch_file.read_header(where.folder / "pytorch_model.bin"),
        ),
        "index": Reader(
            model / "model.safetensors.index.json", lambda: model_source(model).checkpoint_files()
        ),
        "yaml": Reader(run / "config.yaml", lambda: config.load(run / "config.yaml")),
        "hardware": Reader(
            where.folder / "machine.yaml", lambda: hardware.load(where.folder / "machine.yaml")
        ),
        "metrics": Reader(run / "metrics.jsonl", lambda: html.report(run)),
        "forecast": Reader(run / "forecast.json", lambda: html.report(run)),
        "trace": Reader(run / "trace.json", lambda: html.report(run)),
    }


def models_as_they_lie(folder: Path) -> dict[str, Reader]:
    """Readers of quantised checkpoints and GGUF files, whose every weight is decoded."""
    import torch

    from blockwalk.cutting.skeleton import build_skeleton
    from blockwalk.models import gguf
    from blockwalk.models.model_source import model_source
    from blockwalk.tiers.model_folder.folder import CheckpointFolder
    from tests.support import gguf_files, quantised_files

    def reader(path: Path, model: Path, *before: Callable[[Path], Any]) -> Reader:
        skeleton = build_skeleton(model)

        def read() -> None:
            for look in before:
                look(model)
            source = CheckpointFolder(model, skeleton)
            for name in source.names():
                source.read_into(name, torch.empty(source.shape(name)))

        return Reader(path, read)

    found = {}
    for kind in ("bitsandbytes", "gptq", "awq", "compressed-tensors int4", "fp8", "mxfp4"):
        quantised_files.write(model := folder / kind.replace(" ", "-"), kind)
        for number, path in enumerate(sorted(model.glob("*.safetensors"))):
            found[f"{model.name} {number}"] = reader(path, model)
    config = folder / "awq" / "config.json"
    found["quantised config"] = reader(
        config, config.parent, lambda folder: model_source(folder).quantisation
    )
    for kind in ("Q4_0", "Q4_K"):
        path = gguf_files.write(folder / f"{kind}.gguf", gguf_files.tiny("llama", hidden=256), kind)
        found[f"gguf {kind}"] = reader(path, path, gguf.read_header)
    return found


def _replaced(value: Any, draw: Any) -> Any:
    """A JSON value with one place in it replaced, removed or repeated."""
    if isinstance(value, dict | list) and value and draw(st.integers(0, 5)):
        keys = list(value) if isinstance(value, dict) else list(range(len(value)))
        key = draw(st.sampled_from(keys))
        if draw(st.integers(0, 9)) == 0:
            changed: Any = value.copy()
            del changed[key]
            return changed
        changed = value.copy()
        changed[key] = _replaced(value[key], draw)
        return changed
    return draw(st.sampled_from(ODD))


@st.composite
def changed(draw: Any, data: bytes, sealed: bool) -> bytes:
    """The file's bytes, changed once to four times."""
    if draw(st.booleans()):
        try:
            return _json(data, draw, sealed)
        except ValueError:
            pass
    for _ in range(draw(st.integers(1, 4))):
        at = draw(
            st.integers(0, max(0, min(len(data) - 1, draw(st.sampled_from([64, 4096, len(data)])))))
        )
        kind = draw(st.sampled_from(["flip", "cut", "insert", "repeat", "remove"]))
        many = draw(st.integers(1, 64))
        if kind == "flip":
            data = (
                data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
                if data
                else data
            )
        elif kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + draw(st.binary(max_size=64)) + data[at:]
        else:
            data = (
                data[:at]
                + (data[at : at + many] * draw(st.integers(2, 8)) if kind == "repeat" else b"")
                + data[at + many :]
            )
    return data


def _json(data: bytes, draw: Any, sealed: bool) -> bytes:
    """Values of JSON, or of lines of it, replaced; with a header of safetensors, of the header."""
    if (
        len(data) > 8
        and data[8:9] == b"{"
        and (length := int.from_bytes(data[:8], "little")) < len(data)
    ):
        text = json.dumps(_replaced(json.loads(data[8 : 8 + length]), draw)).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + length :]
    lines = data.decode().splitlines() if data.count(b"\n{") else [data.decode()]
    values = [json.loads(line) for line in lines]
    at = draw(st.integers(0, len(values) - 1))
    for value in values:
        if sealed and isinstance(value, dict):
            value.pop("digest", None)
    values[at] = _replaced(values[at], draw)
    texts = []
    digest = ""
    for number, value in enumerate(values):
        text = json.dumps(value)
        if sealed and text.endswith("}"):
            text, digest = atomic_files.seal(text, digest if number > 1 else "")
        texts.append(text)
    return ("\n".join(texts) + "\n").encode()


def fuzz(reader: Reader, seconds: float) -> dict[str, Any]:
    """Read changed files for some seconds: how many were read and refused, and the first that did
    anything else."""
    before = reader.file.read_bytes()
    deadline = time.monotonic() + seconds
    found: dict[str, Any] = {
        "files": 0,
        "refused": 0,
        "crashes": 0,
        "hangs": 0,
        "heavy": 0,
        "told": [],
    }

    def late(*_: object) -> None:
        raise _TooSlow

    signal.signal(signal.SIGALRM, late)

    def tell(kind: str, data: bytes, error: object) -> None:
        found[kind] += 1
        if len(found["told"]) < 5:
            found["told"].append(
                f"{kind}: {type(error).__name__}: {error} ({len(data)} bytes: {data[:200]!r})"
            )

    @settings(
        max_examples=10**9,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(changed(before, reader.sealed))
    def one(data: bytes) -> None:
        if time.monotonic() > deadline:
            raise _Over
        reader.file.write_bytes(data)
        found["files"] += 1
        tracemalloc.reset_peak()
        held = tracemalloc.get_traced_memory()[0]
        signal.alarm(HANG)
        try:
            reader.read()
        except (ValueError, OSError):
            found["refused"] += 1
        except _TooSlow as error:
            tell("hangs", data, error)
        except Exception as error:
            tell("crashes", data, error)
        finally:
            signal.alarm(0)
        if (grew := tracemalloc.get_traced_memory()[1] - held) > 4 * len(data) + (1 << 20):
            tell("heavy", data, grew)

    tracemalloc.start()
    while time.monotonic() < deadline:
        try:
            one()
        except _Over:
            break
    return found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seconds", type=float, default=600.0)
    options.add_argument("--readers", default="")
    arguments = options.parse_args()
    figures: dict[str, Any] = {}
    with place() as where:
        for name, reader in readers(where).items():
            if arguments.readers and name not in arguments.readers.split(","):
                continue
            answer = Path(tempfile.mkstemp(dir=where.folder)[1])
            before = reader.file.read_bytes()
            if (process := os.fork()) == 0:
                code = 1
                try:
                    answer.write_text(json.dumps(fuzz(reader, arguments.seconds)))
                    code = 0
                finally:
                    os._exit(code)
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            figures[name] = (
                json.loads(answer.read_text())
                if code == 0
                else {"crashes": 1, "told": [f"exit {code}"]}
            )
            reader.file.write_bytes(before)
            print(f"{name:12} {json.dumps(figures[name])}", flush=True)
    bounds = [
        Bound(f"{name}: {kind}", found.get(kind, 0), 0)
        for name, found in figures.items()
        for kind in ("crashes", "hangs", "heavy")
    ]
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
