"""llama.cpp on a GGUF file, from the package xllamacpp: tokens and the next token's distribution.
Not a test: no oracle.

The server has a process of its own, which is killed: within a test's process its end can wait for a
thread that has missed the request to stop, and nothing ends that wait."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Ask = Callable[[str, dict[str, Any]], Any]
"""A function (path, body) -> answer of llama.cpp's server."""

_SERVER = """
import json, sys
import xllamacpp
model, adapter, context = json.loads(sys.argv[1])
params = xllamacpp.CommonParams()
params.model.path = model
params.n_ctx = context
params.n_parallel = 1
params.cpuparams.n_threads = 1
params.warmup = False
params.verbosity = -1
if adapter:
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
try:
    server = xllamacpp.Server(params)
except Exception as error:
    print(json.dumps({"error": str(error)}), flush=True)
else:
    print(json.dumps({"address": server.listening_address}), flush=True)
    sys.stdin.read()
"""
"""The program of the server's process. It names its address, and lives as long as its standard
input."""


def serve(path: Path, *, adapter: Path | None = None, context: int = 128) -> Ask:
    """A server on a file, as a function; it ends with the last reference to it.

    Args:
        path: a GGUF model.
        adapter: a GGUF LoRA to apply.
        context: tokens of the context.

    Raises:
        RuntimeError: llama.cpp does not load the file.
    """
    arguments = json.dumps([str(path), "" if adapter is None else str(adapter), context])
    command = [sys.executable, "-c", _SERVER, arguments]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    lines = (line for line in process.stdout if line.startswith("{"))
    answer = json.loads(next(lines, '{"error": "llama.cpp ended"}'))
    if "error" in answer:
        _end(process)
        raise RuntimeError(answer["error"])
    address = answer["address"]

    def ask(where: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(
            address + where, data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.loads(response.read())

    weakref.finalize(ask, _end, process)
    return ask


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def log_probabilities(ask: Ask, ids: list[int], vocabulary: int) -> torch.Tensor:
    """The logarithms [V] of the next token's probabilities after ``ids``."""
    body = {
        "prompt": ids,
        "n_predict": 1,
        "n_probs": vocabulary,
        "temperature": 5.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    for seed in range(40):  # a sampled end has no probabilities in the answer
        answer = ask(
            "/completion",
            {**body, "seed": seed, "post_sampling_probs": False, "cache_prompt": False},
        )
        if answer.get("completion_probabilities"):
            out = torch.full((vocabulary,), torch.nan)
            for entry in answer["completion_probabilities"][0]["top_logprobs"]:
                out[entry["id"]] = entry["logprob"]
            return out
    raise AssertionError("forty ends were sampled one after another")


def tokens(ask: Ask, text: str) -> list[int]:
    """A text's tokens, with those that the file adds at its ends."""
    return list(
        ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"]
    )
