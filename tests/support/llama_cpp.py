"""llama.cpp on a GGUF file, from the package xllamacpp: tokens and the next token's distribution. Not a test: no oracle."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Ask = Callable[[str, dict[str, Any]], Any]
"""A function (path, body) -> answer of llama.cpp's server."""


def serve(path: Path, *, context: int = 128) -> Ask:
    """A server on a file, as a function; it ends with the last reference to it. Raises what llama.cpp raises of a file."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = context
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.warmup = False
    params.verbosity = -1
    server = xllamacpp.Server(params)

    def ask(where: str, body: dict[str, Any]) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(server.listening_address + where, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())

    return ask


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
        answer = ask("/completion", {**body, "seed": seed, "post_sampling_probs": False, "cache_prompt": False})
        if answer.get("completion_probabilities"):
            out = torch.full((vocabulary,), torch.nan)
            for entry in answer["completion_probabilities"][0]["top_logprobs"]:
                out[entry["id"]] = entry["logprob"]
            return out
    raise AssertionError("forty ends were sampled one after another")


def tokens(ask: Ask, text: str) -> list[int]:
    """A text's tokens, with those that the file adds at its ends."""
    return list(ask("/tokenize", {"content": text, "add_special": True, "parse_special": True})["tokens"])
