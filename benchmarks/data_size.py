"""A run on data larger than it likes to hold: memory, the first step of two starts, encoding beside
`datasets.map`, and kills.

    python benchmarks/data_size.py --model FOLDER --text FILE.jsonl [--size GB] [--check]

Records of prompt and completion are cut from the texts of a file, drawn with a seed, until they
have so many gigabytes. The kernel counts memory that it cannot drop (RssAnon), and processor
seconds; the first step is there when the run's log has its line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import Bound, finish, parser

SMALL = 10_000_000
"""Bytes of the data that a large run's memory is compared with."""
STEPS = 3


def write_records(text: Path, path: Path, nbytes: int) -> None:
    """Write records of 30 to 180 words, drawn with a seed, of at least so many bytes."""
    records = [json.loads(line) for line in text.read_text(encoding="utf-8").splitlines()]
    words = " ".join(value for record in records for value in record.values()).split()
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < nbytes:
            for _ in range(1000):
                begin = draw.randrange(len(words) - 200)
                middle = begin + draw.randint(20, 120)
                end = middle + draw.randint(10, 60)
                prompt = " ".join(words[begin:middle])
                completion = " " + " ".join(words[middle:end])
                file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


def started(model: str, data: Path, output_dir: Path, *settings: str) -> subprocess.Popen[bytes]:
    """Start a run of a few steps."""
    command = [
        *(sys.executable, "-m", "blockwalk", "train", "--model", model),
        *("--method", "mebp", "--data.train", str(data), "--output_dir", str(output_dir)),
        *("--max_steps", str(STEPS), "--batch_size", "4", "--data.max_length", "256"),
        *("--data.allow_truncation", "true", *settings),
    ]
    with (output_dir.with_suffix(".log")).open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)


def measured(model: str, data: Path, output_dir: Path) -> dict[str, float]:
    """Return a run's peak of private megabytes, and the seconds, of the clock and of its
    processors, until its first step is done."""
    shutil.rmtree(output_dir, ignore_errors=True)
    began = time.perf_counter()
    process = started(model, data, output_dir)
    status = Path(f"/proc/{process.pid}/status")
    metrics = output_dir / "metrics.jsonl"
    peak = 0
    first: dict[str, float] = {}
    while process.poll() is None:
        with contextlib.suppress(OSError, LookupError, ValueError):
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
            peak = max(peak, int(lines["RssAnon"].split()[0]))
            if not first and metrics.is_file() and b"\n" in metrics.read_bytes():
                ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                spent = sum(map(int, ticks[11:13])) / os.sysconf("SC_CLK_TCK")
                first = {"seconds": time.perf_counter() - began, "processor_seconds": spent}
        time.sleep(0.02)
    if process.returncode or not first:
        sys.exit(output_dir.with_suffix(".log").read_text()[-2000:])
    return {"peak_MB": peak * 1024 / 1e6, **first}


def encoding(model: str, data: Path) -> dict[str, float]:
    """Return tokens a second of the clock: of this package, and of `datasets.map` with the fast
    tokenizer in two processes."""
    import datasets

    from blockwalk.data.encode import encode
    from blockwalk.data.sources import read_records
    from blockwalk.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    began = time.perf_counter()
    rows = encode(read_records(data), tokenizer, max_length=None)
    ours = len(rows.token_ids) / (time.perf_counter() - began)
    datasets.disable_progress_bars()
    with_records = datasets.Dataset.from_list(
        [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    )

    def tokens(batch: dict[str, list[str]]) -> dict[str, Any]:
        pairs = zip(batch["prompt"], batch["completion"], strict=True)
        return {"input_ids": tokenizer([p + c for p, c in pairs])["input_ids"]}

    began = time.perf_counter()
    mapped = with_records.map(
        tokens, batched=True, num_proc=2, remove_columns=["prompt", "completion"]
    )
    seconds = time.perf_counter() - began
    peers = sum(map(len, mapped["input_ids"])) / seconds
    return {"tokens_per_second": ours, "datasets_tokens_per_second": peers}


def kills(model: str, data: Path, folder: Path, count: int) -> int:
    """Return how many of so many killed runs were gone on with to other weights than those of a run
    that nobody killed. Each is killed at a time drawn from its whole length, with its tokens to be
    encoded."""

    def weights(output_dir: Path) -> str:
        (adapter,) = output_dir.glob("adapter/*.safetensors")
        return hashlib.sha256(adapter.read_bytes()).hexdigest()

    tokens = Path(os.environ["BLOCKWALK_CACHE"]) / "tokens"
    settings = ("--save_every", "1", "--resume_from_checkpoint", "latest")
    whole = folder / "whole"
    began = time.perf_counter()
    started(model, data, whole, *settings).wait()
    length = time.perf_counter() - began
    wrong = 0
    draw = random.Random(0)
    for number in range(count):
        output_dir = folder / f"killed-{number}"
        shutil.rmtree(tokens, ignore_errors=True)
        process = started(model, data, output_dir, *settings)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(0.3, 1) * length)
        process.send_signal(signal.SIGKILL)
        process.wait()
        started(model, data, output_dir, *settings).wait()
        wrong += weights(output_dir) != weights(whole)
        shutil.rmtree(output_dir)
    return wrong


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", required=True)
    options.add_argument("--text", type=Path, required=True, help="JSON lines with texts")
    options.add_argument("--size", type=float, default=10.0, help="gigabytes of the large data")
    options.add_argument("--kills", type=int, default=200)
    options.add_argument("--folder", type=Path, default=Path("data-size"))
    arguments = options.parse_args()
    folder = arguments.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["BLOCKWALK_CACHE"] = str(folder / "cache")
    small = folder / "small.jsonl"
    large = folder / "large.jsonl"
    write_records(arguments.text, small, SMALL)
    write_records(arguments.text, large, int(arguments.size * 1e9))
    shutil.rmtree(folder / "cache" / "tokens", ignore_errors=True)
    figures: dict[str, Any] = {"GB": arguments.size}
    for name, data in (("small", small), ("first start", large), ("second start", large)):
        figures[name] = measured(arguments.model, data, folder / "run")
        print(f"{name}: {figures[name]}", flush=True)
    figures["encoding"] = encoding(arguments.model, small)
    print(f"encoding: {figures['encoding']}", flush=True)
    figures["wrong of killed"] = kills(arguments.model, small, folder, arguments.kills)
    more = figures["first start"]["peak_MB"] - figures["small"]["peak_MB"]
    rates = figures["encoding"]
    ratio = rates["tokens_per_second"] / rates["datasets_tokens_per_second"]
    bounds = [
        Bound("private memory over that of 10 MB of data, MB", more, 60),
        Bound("first start, seconds to the first step", figures["first start"]["seconds"], 20),
        Bound("second start, seconds to the first step", figures["second start"]["seconds"], 3),
        Bound("encoding over datasets.map in two processes", ratio, 0.9, at_most=False),
        Bound(f"wrong of {arguments.kills} killed runs", figures["wrong of killed"], 0),
    ]
    finish(arguments, figures, bounds)


if __name__ == "__main__":
    main()
