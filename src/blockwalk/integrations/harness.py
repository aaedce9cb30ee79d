"""EleutherAI's evaluation harness over the walk: its tasks for models that do not fit in memory.

``python -m blockwalk.integrations.harness`` is ``lm_eval`` with one model more, ``--model
blockwalk``. Prompts, tasks, cuts and metrics are the harness's own, as its class for Hugging Face
models has them; scores and continuations are the walker's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.data.tokenizer import tokenizer_of
from blockwalk.plan.methods import method as plan_of
from blockwalk.plan.run_config import DataSettings
from blockwalk.walk.walker import Walker

Request = tuple[Any, list[int], list[int]]
"""Texts, and the tokens of a context and of its continuation."""


HARNESS_SETTINGS = (
    "max_length",
    "add_bos_token",
    "prefix_token_id",
    "enable_thinking",
    "think_end_token",
)
"""Settings of the harness's own class."""


@register_model("blockwalk")
class BlockwalkLM(HFLM):  # type: ignore[misc]
    """A model of the harness.

    Args:
        model: a folder, a hub name, or whatever else :class:`blockwalk.Walker` takes by name.
        adapter: the folder of an adapter to put on it.
        method: the row of the walk; weights are read raw from disk, with transformers' numbers,
            unless ``frozen`` says else.
        batch_size: sequences of a walk: blocks are fetched once for all of them, and computed one
            sequence after another.
        settings: further settings of the plan, and of the harness's own class (``max_length``,
            ``add_bos_token``, ...).
    """

    def __init__(
        self,
        model: str,
        adapter: str | None = None,
        method: str = "mebp",
        batch_size: int | str = 8,
        **settings: Any,
    ) -> None:
        of_harness = {name: settings.pop(name) for name in HARNESS_SETTINGS if name in settings}
        device = settings.pop("device", None)
        settings.pop("max_batch_size", None)
        plan = plan_of(method, **{"frozen": "disk", **settings})
        self.walker = Walker(
            model, plan, lora=adapter, device=device, training=False, objective=self._score
        )
        skeleton = build_skeleton(model)
        tokenizer = tokenizer_of(model, DataSettings(), adapter)
        super().__init__(
            pretrained=skeleton, tokenizer=tokenizer, batch_size=batch_size, **of_harness
        )
        self._device = torch.device("cpu")
        self._due: list[tuple[int, list[int]]] = []
        self._scores: list[tuple[float, bool]] = []

    def _score(self, logits_BSV: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        """Note the log-probability of one sequence's continuation, and whether each token of it was
        the likeliest."""
        end, continuation = self._due[len(self._scores)]
        chosen_NV = logits_BSV[0, end - len(continuation) : end].log_softmax(-1)
        targets_N = torch.tensor(continuation, device=chosen_NV.device)
        total = chosen_NV.gather(1, targets_N.unsqueeze(1)).sum()
        self._scores.append((float(total), bool((chosen_NV.argmax(1) == targets_N).all())))
        return total.new_zeros(())

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """Return log-probabilities of continuations, and whether they are greedy ones; long
        sequences are computed first."""
        lengths = [len(context) + len(continuation) for _, context, continuation in requests]
        order = sorted(range(len(requests)), key=lambda i: -lengths[i])
        scores: dict[int, tuple[float, bool]] = {}
        size = override_bs or int(self.batch_size)
        for start in range(0, len(order), size):
            part = order[start : start + size]
            rows = [[*requests[i][1], *requests[i][2]][-(self.max_length + 1) : -1] for i in part]
            self._due = [(len(row), requests[i][2]) for row, i in zip(rows, part, strict=True)]
            self._scores = []
            ids_BS = torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row) for row in rows], batch_first=True
            )
            lengths_B = torch.tensor([len(row) for row in rows])
            mask_BS = (torch.arange(ids_BS.shape[1]) < lengths_B.unsqueeze(1)).long()
            batch = {"input_ids": ids_BS, "attention_mask": mask_BS, "labels": ids_BS}
            self.walker.evaluate(batch, batches=len(part))
            scores.update(zip(part, self._scores, strict=True))
        return [scores[i] for i in range(len(requests))]

    def _model_generate(
        self, context: Tensor, max_length: int, stop: Sequence[str], **settings: Any
    ) -> Tensor:
        """Return prompts and their continuations: each token is a walk, which ends where a stop
        text is a token."""
        encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in stop]
        return self.walker.generate(
            context,
            max_length - context.shape[1],
            temperature=settings.get("temperature") or 0.0,
            stop_ids={self.eot_token_id, *(ids[0] for ids in encoded if len(ids) == 1)},
            attention_mask=settings.get("attention_mask"),
        )


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
