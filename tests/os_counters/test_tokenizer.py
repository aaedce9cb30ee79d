"""Oracle: the kernel's list of a process's threads, and the interpreter's count of the memory of
its objects. What the tokenizer's threads keep, they keep for the whole run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="threads are listed in Linux's /proc"
)

COUNT = """
import os, sys
from blockwalk.data.tokenizer import load_tokenizer
tokenizer = load_tokenizer(sys.argv[1])
before = len(os.listdir("/proc/self/task"))
tokenizer(["A hundred words, or some of them. " * 20] * 600)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_tokenising_leaves_no_thread_behind() -> None:
    folder = Path(__file__).parents[2] / "examples" / "tiny-llama"
    done = subprocess.run(
        [sys.executable, "-c", COUNT, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert int(done.stdout) == 0


READ = """
import json, sys, tracemalloc
from transformers import AutoTokenizer
from transformers import tokenization_utils_tokenizers as backend
from blockwalk.data.tokenizer import load_tokenizer

live = []
class Counted:
    @staticmethod
    def from_file(file):
        live.append(tracemalloc.get_traced_memory()[0])
        return original.from_file(file)

theirs = AutoTokenizer.from_pretrained(sys.argv[1])
original = backend.TokenizerFast
backend.TokenizerFast = Counted
tracemalloc.start()
ours = load_tokenizer(sys.argv[1])
text = "word7<mark>word19999 <end>"
print(json.dumps({"live": live, "ids": ours(text)["input_ids"],
                  "same": ours(text) == theirs(text) and ours.get_vocab() == theirs.get_vocab()
                  and ours.special_tokens_map == theirs.special_tokens_map
                  and ours.added_tokens_decoder == theirs.added_tokens_decoder}))
"""


def test_a_vocabulary_is_no_python_object_while_a_tokenizer_is_made(tmp_path: Path) -> None:
    """20,000 entries are 2 MB of them, which transformers keeps. The tokenizer is transformers' own
    in every other respect."""
    words = {f"word{n}": n for n in range(20_000)}
    made = Tokenizer(models.WordLevel(words, unk_token="word0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_tokens([AddedToken("<mark>", lstrip=True)])
    made.add_special_tokens(["<end>"])
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    command = [sys.executable, "-c", READ, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["same"]
    assert answer["ids"] == [7, 20_000, 19_999, 20_001]
    assert 0 < max(answer["live"]) < 1e6
