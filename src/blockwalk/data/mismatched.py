"""Answers to other prompts: each row's prompt with the answer of the row before it, by which KTO
estimates how far a policy is from its reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from blockwalk.data.dataset import Encoded, RowWriter


def answers_to_others(dataset: Encoded, rows: Sequence[int]) -> Encoded:
    """Return so many rows: the prompt of each row named, and the answer of the row before it in the
    data set (the last one's before the first), cut to the length of the longest row.

    A prompt is what stands before a row's first learnt token."""
    longest = dataset.summary.longest
    writer = RowWriter()
    for row in rows:
        ids, in_loss = dataset[row]
        prompt = ids[: int(in_loss.argmax())]
        other_ids, other_in_loss = dataset[(row - 1) % len(dataset)]
        begin = int(other_in_loss.argmax())
        token_ids = np.concatenate([prompt, other_ids[begin:]])
        learnt = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), other_in_loss[begin:]])
        writer.add(token_ids[:longest], learnt[:longest])
    return writer.finish(dataset.pad_id, dataset.report)
