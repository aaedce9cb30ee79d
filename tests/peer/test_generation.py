"""Oracle: ``transformers`` itself: its greedy generation with its own cache, and its logits."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import blockwalk
from blockwalk.cli import main
from tests.conftest import TinyRun
from tests.models import tiny_model
from tests.support.messages import refused


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "opt"])
@pytest.mark.parametrize("method", ["plain", "mebp", "mezo"])
def test_greedy_generation_is_the_models_own(kind: str, method: str, tmp_path: Path) -> None:
    model = tiny_model(kind).eval()
    model.save_pretrained(tmp_path / "m")
    prompt_BS = torch.randint(3, 101, (2, 5), generator=torch.Generator().manual_seed(0))
    expected = model.generate(
        prompt_BS, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    settings = {"frozen": "disk × raw"} if method == "mebp" else {}
    with blockwalk.Walker(
        tmp_path / "m", blockwalk.method(method, **settings), training=False
    ) as walker:
        found = walker.generate(prompt_BS, 8)
        with torch.no_grad():
            logits = model(prompt_BS, use_cache=False).logits[:, -1]
        torch.testing.assert_close(
            walker.next_logits({"input_ids": prompt_BS}), logits, rtol=1e-5, atol=1e-6
        )
    assert found.tolist() == expected.tolist()


def test_stop_ids_and_sampling() -> None:
    model = tiny_model("llama").eval()
    prompt_BS = torch.tensor([[5, 6, 7]])
    with blockwalk.Walker(model, blockwalk.method("plain"), training=False) as walker:
        greedy = walker.generate(prompt_BS, 6)[0].tolist()
        stop = greedy[5]
        until = greedy.index(stop, 3) + 1
        assert walker.generate(prompt_BS, 6, stop_ids=[stop])[0].tolist() == greedy[:until]
        draws = [
            walker.generate(prompt_BS, 6, temperature=1.0, seed=seed)[0].tolist()
            for seed in (0, 0, 1)
        ]
        assert draws[0] == draws[1] != draws[2]
        assert walker.generate(prompt_BS, 6, temperature=1e-6)[0].tolist() == greedy, (
            "cold draws are greedy"
        )
        with refused(ValueError, "token"):
            walker.generate(prompt_BS[:, :0], 1)
        with refused(ValueError, "tensor"):
            walker.generate([[5, 6]], 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
def test_the_command_ends_where_the_models_own_generation_does(
    file: str, tiny_run: TinyRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder that names several tokens to end at, of which its tokenizer knows one (Gemma's end
    of a turn)."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "m"
    prompt = "fresh. It was"
    shutil.copytree(tiny_run.model, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")
    settings = json.loads((folder / file).read_text())
    whole = AutoModelForCausalLM.from_pretrained(folder).generate(
        **ids, max_new_tokens=9, do_sample=False
    )[0]
    if file == "config.json":
        (folder / "generation_config.json").unlink()
    (folder / file).write_text(json.dumps({**settings, "eos_token_id": [1, whole[-4].item()]}))
    own = AutoModelForCausalLM.from_pretrained(folder).generate(
        **ids, max_new_tokens=9, do_sample=False
    )[0]
    assert len(own) < len(whole)
    arguments = [
        "--model",
        str(folder),
        "--method",
        "plain",
        "--prompt",
        prompt,
        "--max_new_tokens",
        "9",
    ]
    assert main.main(["generate", *arguments]) == 0
    assert (
        capsys.readouterr().out
        == tokenizer.decode(own[ids["input_ids"].shape[1] :], skip_special_tokens=True) + "\n"
    )
