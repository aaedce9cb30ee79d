"""Agreement between ranks: facts, files and values that they compare, or tell each other, before
they train."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from blockwalk.models.model_source import model_source
from blockwalk.plan.parsing import flat
from blockwalk.ranks.exchange import all_gather
from blockwalk.system.paths import StrPath
from blockwalk.system.versions import installed

_CHUNK = 16 << 20
"""Bytes of a file that a rank reads at a time."""


def versions() -> dict[str, str]:
    """Return versions, by package, that must be equal on all ranks whatever they compute."""
    return {
        "python": platform.python_version(),
        **installed(("blockwalk", "torch", "transformers", "peft")),
    }


def gather_json(value: Any, group: Any = None) -> list[Any]:
    """Return every rank's value, by rank; every rank calls this together. Values of other ranks are
    parsed, never unpickled: a pickle from another machine would run code here."""
    text = json.dumps(value).encode()
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    lengths = torch.empty(dist.get_world_size(group), dtype=torch.int64, device=device)
    all_gather(lengths, torch.tensor([len(text)], device=device), group=group)
    longest = int(lengths.max())
    out_WN = torch.empty(len(lengths), longest, dtype=torch.uint8, device=device)
    own_N = torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8).to(device)
    all_gather(out_WN.view(-1), own_N, group=group)
    return [json.loads(bytes(row_N.cpu().numpy())) for row_N in out_WN]


def first_json(value: Any) -> Any:
    """Return rank 0's value, on every rank, which call this together; what the others give is not
    looked at. See :func:`gather_json`."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    text = json.dumps(value).encode() if dist.get_rank() == 0 else b""
    length = torch.tensor([len(text)], device=device)
    dist.broadcast(length, src=0)
    text_N = torch.frombuffer(bytearray(text.ljust(int(length))), dtype=torch.uint8).to(device)
    dist.broadcast(text_N, src=0)
    return json.loads(bytes(text_N.cpu().numpy()))


def facts_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return nested settings as facts for :func:`require_agreement`, one for each dotted name."""
    return {name: str(value) for name, value in flat(settings).items()}


def require_agreement(facts: Mapping[str, str]) -> None:
    """Compare facts (plan, model, versions, ...) on all ranks; every rank calls this together.

    Raises:
        ValueError: on every rank, naming the ranks and what differs, with both values.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    everyone = gather_json(dict(facts))
    differences = []
    for key in sorted({key for rank_facts in everyone for key in rank_facts}):
        values = [rank_facts.get(key) for rank_facts in everyone]
        differing = [rank for rank, value in enumerate(values) if value != values[0]]
        if differing:
            ranks = ", ".join(map(str, differing))
            value = values[differing[0]]
            differences.append(f"{key}: rank 0 has {values[0]!r}, rank {ranks} has {value!r}")
    if differences:
        raise ValueError("the ranks were not started alike; " + "; ".join(differences))


def files_digest(folder: Path) -> str:
    """Return a digest of the files in a folder, which ranks may have on file systems of their own;
    every rank calls this together.

    Ranks that see the very same files (by number, size and times of inode, which no copy keeps)
    compare these alone. Where they do not, each of the copies is read once, split over the ranks
    that see it."""
    stats = {path: path.stat() for path in sorted(folder.iterdir()) if path.is_file()}
    facts = [
        (path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        for path, stat in stats.items()
    ]
    inodes = hashlib.blake2b(repr(facts).encode(), digest_size=8).hexdigest()
    everyone = gather_json(inodes)
    same = [rank for rank, digest in enumerate(everyone) if digest == inodes]
    total = 0
    if len(same) < len(everyone):
        chunks = [
            (path, start)
            for path, stat in stats.items()
            for start in range(0, stat.st_size or 1, _CHUNK)
        ]
        for path, start in chunks[same.index(dist.get_rank()) :: len(same)]:
            with path.open("rb") as file:
                file.seek(start)
                digest = hashlib.blake2b(
                    f"{path.name} {start} ".encode() + file.read(_CHUNK), digest_size=8
                )
            total += int.from_bytes(digest.digest(), "little")
        sums = gather_json(total)
        total = sum(sums[rank] for rank in same)
    names = [[path.name, stat.st_size] for path, stat in stats.items()]
    return hashlib.blake2b(repr((names, total)).encode(), digest_size=8).hexdigest()


def model_digest(model: StrPath | nn.Module) -> str:
    """Return a digest of a model's weights: of the files in its folder, or of a module's parameters
    and buffers. Every rank calls this together."""
    if not isinstance(model, nn.Module):
        return files_digest(model_source(model).weights_folder)
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in model.state_dict(keep_vars=True).items():
        digest.update(
            repr((name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)).encode()
        )
        if not tensor.is_meta:
            digest.update(
                tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            )
    return digest.hexdigest()
