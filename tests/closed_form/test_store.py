"""Oracle: closed forms. What a store holds is a function of its input (or of the step in a unit's
header), byte by byte."""

from __future__ import annotations

import json
import os
import random
import signal
import struct
import time
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from blockwalk.cutting.skeleton import build_skeleton
from blockwalk.engine.pack import pack
from blockwalk.plan.model_spec import ModelSpec, ParamSpec, UnitSpec, encoded_nbytes
from blockwalk.plan.placement import Codec
from blockwalk.system import atomic_files
from blockwalk.tiers.block_store import writable as writable_store
from blockwalk.tiers.block_store.store import (
    DATA_START,
    HEADER_PAGE,
    BlockStore,
    UnitHeader,
    crc32,
    unpack_header,
)
from blockwalk.tiers.block_store.writable import WritableStore
from blockwalk.tiers.block_store.writer import write_store
from blockwalk.tiers.model_folder.folder import CheckpointFolder
from tests.support.dictionary import Dictionary
from tests.support.messages import refused
from tests.support.writable import writable_store as make_writable

BLOCK = "layer.0.weight"
FUSED = "layer.0.experts"
NORM = "layer.0.norm"
HEAD = "head.weight"


def toy(dtype: torch.dtype = torch.float32) -> tuple[Dictionary, ModelSpec]:
    torch.manual_seed(0)
    tensors = {
        "embed.weight": torch.randn(20, 40),
        BLOCK: torch.randn(9, 40),
        FUSED: torch.randn(3, 5, 40),
        NORM: torch.randn(40),
        HEAD: torch.randn(7, 33),
        "scale": torch.tensor(3.0),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    tensors["table"] = torch.arange(5)

    def spec(*names: str) -> tuple[ParamSpec, ...]:
        name_of = str(dtype).removeprefix("torch.")
        return tuple(
            ParamSpec(n, tuple(tensors[n].shape), name_of, quantizable=tensors[n].dim() > 1)
            for n in names
        )

    return Dictionary(tensors), ModelSpec(
        "toy",
        UnitSpec("prologue", "prologue", spec("embed.weight")),
        (UnitSpec("block 0", "block", spec(BLOCK, FUSED, NORM)),),
        UnitSpec("epilogue", "epilogue", spec(HEAD, "scale")),
        40,
        20,
        tied=(("alias.weight", "embed.weight"),),
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    source, spec = toy()
    write_store(tmp_path / "store", source, spec, Codec.INT8)
    return tmp_path / "store"


# ---- what is written is what was given -----------------------------------------------------------


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.FP32])
def test_lossless_codecs_give_the_same_bits(codec: Codec, tmp_path: Path) -> None:
    """Oracle: the tensors themselves."""
    source, spec = toy()
    write_store(tmp_path / "store", source, spec, codec)
    store = BlockStore(tmp_path / "store")
    assert store.names() == tuple(source.tensors)
    for name, tensor in source.tensors.items():
        ours = store.weights([name])[name]
        assert ours.dtype == tensor.dtype
        assert torch.equal(ours, tensor)
        assert store.shape(name) == tensor.shape
        assert store.prefetch([name]) == tensor.nbytes
    assert store.index.tied == (("alias.weight", "embed.weight"),)
    assert [unit.name for unit in store.index.units] == [
        "prologue",
        "block 0",
        "epilogue",
        "buffers",
    ]
    store.verify()


@pytest.mark.parametrize(
    ("codec", "bound"),
    [(Codec.INT4, 1 / 8), (Codec.INT8, 1 / 254), (Codec.FP8, 1 / 16), (Codec.BF16, 2**-8)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lossy_codecs_stay_within_half_a_step(
    codec: Codec, bound: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Oracle: the codec's largest error, relative to the largest element of the row. The vectors
    stay as they are."""
    source, spec = toy(dtype)
    write_store(tmp_path / "store", source, spec, codec, group_size=64)
    store = BlockStore(tmp_path / "store")
    for name in ("embed.weight", BLOCK, FUSED, HEAD):
        theirs = source.tensors[name].float()
        out = torch.empty(theirs.shape)
        store.read_into(name, out)
        largest = theirs.abs().amax(-1, keepdim=True)
        assert ((out - theirs).abs() <= bound * largest * 1.01).all(), name
        assert not torch.equal(out, theirs) or (codec, dtype) == (Codec.BF16, torch.bfloat16)

        weight = store.weights([name])[name]
        rows = weight if isinstance(weight, torch.Tensor) else weight.rows(0, len(theirs))
        assert weight.shape == theirs.shape
        assert rows.dtype == (torch.bfloat16 if codec is Codec.BF16 else dtype)
        assert torch.equal(rows.view(theirs.shape), out.to(rows.dtype))
        assert store.in_place(name)
    if codec is not Codec.BF16:
        assert torch.equal(store.weights([NORM])[NORM], source.tensors[NORM])


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.INT4, Codec.INT8, Codec.FP8, Codec.FP16])
def test_the_files_are_laid_out_as_documented(codec: Codec, tmp_path: Path) -> None:
    """Oracle: docs/block-store.md and ``encoded_nbytes``, read here with struct and json alone."""
    source, spec = toy()
    write_store(tmp_path / "store", source, spec, codec, group_size=32)
    index = json.loads((tmp_path / "store" / "store.json").read_text())
    assert (index["format"], index["version"], index["codec"], index["group_size"]) == (
        "blockwalk-store",
        2,
        codec,
        32,
    )
    for number, unit in enumerate(index["units"]):
        data = (tmp_path / "store" / unit["file"]).read_bytes()
        magic, version, who, generations, area, sequence, step, nbytes, crc = struct.unpack_from(
            "<8sIIIIQqQI", data
        )
        assert (magic, version, who, generations, area) == (b"BLKWUNIT", 2, number, 1, 0)
        assert (sequence, step, nbytes, crc) == (1, 0, unit["nbytes"], 0)
        assert len(data) == 8192 + -(-nbytes // 4096) * 4096
        end = 0
        for param in unit["params"]:
            assert param["offset"] % 64 == 0
            assert 0 <= param["offset"] - end < 64
            end = param["offset"] + param["nbytes"]
            own = Codec(param["codec"])
            assert param["nbytes"] == encoded_nbytes(tuple(param["shape"]), param["dtype"], own, 32)
            if own is Codec.RAW:
                theirs = source.tensors[param["name"]].numpy().tobytes()
                assert data[8192 + param["offset"] :].startswith(theirs)
        assert nbytes - end < 64


def test_a_packed_model_is_a_model_folder(tmp_path: Path) -> None:
    """Oracle: transformers loads its configuration; every raw tensor is the checkpoint's."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    (tmp_path / "model" / "pytorch_model.bin").write_text("")
    seen: list[tuple[int, int]] = []
    pack(
        tmp_path / "model",
        tmp_path / "store",
        Codec.RAW,
        progress=lambda done, total: seen.append((done, total)),
    )

    store = BlockStore(tmp_path / "store")
    for name, tensor in model.state_dict().items():
        assert torch.equal(store.weights([name])[name], tensor)
    assert AutoConfig.from_pretrained(
        tmp_path / "store"
    ).to_diff_dict() == config.to_diff_dict() | {"dtype": "bfloat16"}
    names = {path.name for path in (tmp_path / "store").iterdir()}
    assert names - {f"unit-{i:05d}.bin" for i in range(4)} == {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "store.json",
    }
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert (
        seen[-1][0]
        == sum(p.nbytes for unit in store.index.units for p in unit.params)
        <= seen[-1][1]
    )

    pack(tmp_path / "model", tmp_path / "int4", Codec.INT4)
    packed = BlockStore(tmp_path / "int4")
    assert isinstance(packed.weights(["model.norm.weight"])["model.norm.weight"], torch.Tensor)
    up = "model.layers.1.mlp.up_proj.weight"
    assert packed.weights([up])[up].dtype == torch.bfloat16
    assert packed.prefetch([up]) == 48 * 32 // 2 + 2 * 48


def test_repacking_a_store(tmp_path: Path) -> None:
    """Oracle: the first store's own decoding. A store is a source like any other."""
    source, spec = toy()
    write_store(tmp_path / "int8", source, spec, Codec.INT8)
    first = BlockStore(tmp_path / "int8")
    write_store(tmp_path / "fp32", first, spec, Codec.FP32)
    second = BlockStore(tmp_path / "fp32")
    for name in (BLOCK, FUSED, NORM):
        out = torch.empty(first.shape(name))
        first.read_into(name, out)
        assert torch.equal(second.weights([name])[name], out)


def test_pages_are_asked_for_and_given_back_by_name(store: Path) -> None:
    """Oracle: the bytes that store.json lists."""
    opened = BlockStore(store)
    assert opened.prefetch([BLOCK, NORM, HEAD]) == sum(
        opened.stored_as(name).nbytes for name in (BLOCK, NORM, HEAD)
    )
    before = opened.weights([NORM])[NORM].clone()
    opened.release([BLOCK, NORM])
    assert torch.equal(opened.weights([NORM])[NORM], before)
    with pytest.raises(KeyError):
        opened.weights(["absent"])
    with refused(ValueError, "40 41"):
        opened.read_into(NORM, torch.empty(41))


# ---- what is wrong is said -----------------------------------------------------------------------


def edit_index(store: Path, **changes: object) -> None:
    atomic_files.write_sealed(
        store / "store.json", {**atomic_files.read_sealed(store / "store.json"), **changes}
    )


def test_every_single_flipped_bit_is_found(store: Path) -> None:
    """Oracle: CRC-32 finds any single bit. Bits in padding belong to no parameter."""
    opened = BlockStore(store)
    opened.verify()
    unit = opened.index.units[1]
    rng = random.Random(0)
    for param in unit.params:
        position = unit.area_offset(0) + param.offset + rng.randrange(param.nbytes)
        with open(store / unit.file, "r+b") as file:
            file.seek(position)
            byte = file.read(1)[0]
            file.seek(position)
            file.write(bytes([byte ^ 1 << rng.randrange(8)]))
        for read in (BlockStore.verify, lambda store, name=param.name: store.weights([name])):
            with refused(atomic_files.Damaged, f"{param.name} unit-00001.bin"):
                read(BlockStore(store))
        with open(store / unit.file, "r+b") as file:
            file.seek(position)
            file.write(bytes([byte]))
    BlockStore(store).verify()


def test_damaged_stores_are_refused_with_the_reason(store: Path, tmp_path: Path) -> None:
    """Oracle: the damage that the test did."""
    unit = store / "unit-00001.bin"
    whole = unit.read_bytes()

    unit.write_bytes(whole[:-1])
    with refused(ValueError, "unit-00001.bin truncated"):
        BlockStore(store)
    unit.write_bytes(b"\x00" * len(whole))
    with refused(ValueError, "BLKWUNIT"):
        BlockStore(store)
    unit.write_bytes(whole[:30] + bytes([whole[30] ^ 1]) + whole[31:])
    with refused(ValueError, "headers"):
        BlockStore(store)
    other = unpack_header(whole)
    assert other is not None
    unit.write_bytes(replace(other, unit=2).pack() + whole[len(other.pack()) :])
    with refused(ValueError, "unit 1"):
        BlockStore(store)
    unit.unlink()
    with refused(ValueError, "unit-00001.bin 0 missing"):
        BlockStore(store)
    unit.write_bytes(whole)
    BlockStore(store).close()

    text = (store / "store.json").read_text()
    for damaged in (
        text[:-50],
        "[]",
        "",
        text.replace('"nbytes": 40', '"nbytes": 41', 1),
        text.replace("int8", "int9", 1),
    ):
        assert damaged != text
        (store / "store.json").write_text(damaged)
        with refused(atomic_files.Damaged, "store.json damaged"):
            BlockStore(store)
    (store / "store.json").write_text(text)
    value = atomic_files.read_sealed(store / "store.json")
    for changes, message in (
        ({"format": "zip"}, "block store's"),
        ({"version": 7}, "version 7"),
        ({"codec_version": 9}, "codec version 9"),
        ({"codec": "int3"}, "damaged ValueError"),
        ({"units": None}, "damaged TypeError"),
    ):
        atomic_files.write_sealed(store / "store.json", {**value, **changes})
        with refused(ValueError, message):
            BlockStore(store)
    with refused(ValueError, "store.json"):
        BlockStore(tmp_path)


def test_a_failed_pack_leaves_nothing(tmp_path: Path) -> None:
    """Oracle: the folder's listing."""
    source, spec = toy()
    source.tensors[HEAD][3, 3] = float("nan")
    with refused(ValueError, "head.weight row 3 finite"):
        write_store(tmp_path / "store", source, spec, Codec.INT4)
    assert list(tmp_path.iterdir()) == []

    (tmp_path / "store").mkdir()
    with refused(ValueError, "exists"):
        write_store(tmp_path / "store", *toy(), Codec.INT4)
    del source.tensors[BLOCK]
    with refused(ValueError, f"1 {BLOCK}"):
        write_store(tmp_path / "other", source, spec, Codec.INT4)
    huge = ParamSpec("huge", (1 << 30, 1 << 20), "float32")
    source, spec = toy()
    source.tensors["huge"] = torch.empty(1, device="meta").expand(huge.shape)
    spec = replace(spec, blocks=(UnitSpec("block 0", "block", (huge,)),))
    with refused(ValueError, "GB"):
        write_store(tmp_path / "other", source, spec, Codec.RAW)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


# ---- two generations -----------------------------------------------------------------------------


def contents(unit: int, step: int, nbytes: int) -> torch.Tensor:
    """What a unit holds after a step: no two steps agree in any byte within 250 steps."""
    values_P = (np.arange(nbytes, dtype=np.int64) * 7 + unit * 31 + step) % 251
    return torch.from_numpy(values_P.astype(np.uint8))


def aligned(data_P: torch.Tensor) -> torch.Tensor:
    """The same bytes where a page begins."""
    whole_P = torch.empty(len(data_P) + HEADER_PAGE, dtype=torch.uint8)
    return whole_P[-whole_P.data_ptr() % HEADER_PAGE :][: len(data_P)].copy_(data_P)


def writable(path: Path, **settings: object) -> WritableStore:
    source, spec = toy()
    return make_writable(path, source, spec, Codec.FP32, **settings)


def tensors(store: WritableStore, number: int, bytes_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """A unit's parameters in its bytes, by name."""
    found = {
        p.name: p.open(bytes_P[p.offset : p.offset + p.nbytes], 32)
        for p in store.units[number].params
    }
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, torch.Tensor)}


def test_a_fresh_copy_holds_the_model(tmp_path: Path) -> None:
    """Oracle: the tensors that it was made of."""
    source, _ = toy()
    with writable(tmp_path / "store") as store:
        for number, unit in enumerate(store.units):
            buffer_P = torch.empty(unit.nbytes, dtype=torch.uint8)
            assert store.read_unit(number, buffer_P) == store.step(number) == 0
            for name, tensor in tensors(store, number, buffer_P).items():
                assert torch.equal(tensor, source.tensors[name])
    BlockStore(tmp_path / "store").verify()


def test_the_last_write_is_what_is_read(tmp_path: Path) -> None:
    """Oracle: the closed form of the contents, over several steps, in this object, a new one and a
    read-only one."""
    with writable(tmp_path / "store") as store:
        sizes = [unit.nbytes for unit in store.units]
        for step in (1, 2, 3, 7):
            for unit in range(2):
                store.write_unit(unit, contents(unit, step, sizes[unit]), step)
                buffer_P = torch.empty(sizes[unit], dtype=torch.uint8)
                assert store.read_unit(unit, buffer_P) == step
                assert torch.equal(buffer_P, contents(unit, step, sizes[unit]))
    with WritableStore(tmp_path / "store") as store:
        assert [store.step(unit) for unit in range(len(sizes))] == [7, 7, 0, 0]
        buffer_P = torch.empty(sizes[1], dtype=torch.uint8)
        assert store.read_unit(1, buffer_P) == 7
        assert torch.equal(buffer_P, contents(1, 7, sizes[1]))
    reader = BlockStore(tmp_path / "store")
    assert reader.steps == [7, 7, 0, 0]
    expected = contents(1, 7, sizes[1])[: 9 * 40 * 4].view(torch.float32).view(9, 40)
    assert torch.equal(reader.weights([BLOCK])[BLOCK].view(torch.int32), expected.view(torch.int32))
    reader.verify()


def test_values_written_through_the_buffer(tmp_path: Path) -> None:
    """Oracle: the arithmetic. A unit is updated in its buffer of bytes and written back."""
    source, _ = toy()
    with writable(tmp_path / "store", sync=False) as store:
        buffer_P = torch.empty(store.units[1].nbytes, dtype=torch.uint8)
        store.read_unit(1, buffer_P)
        tensors(store, 1, buffer_P)[BLOCK].add_(1)
        store.write_unit(1, buffer_P, 5)
    reader = BlockStore(tmp_path / "store")
    assert torch.equal(reader.weights([BLOCK])[BLOCK], source.tensors[BLOCK] + 1)
    assert torch.equal(reader.weights([NORM])[NORM], source.tensors[NORM])


def test_a_damaged_generation_counts_as_not_written(tmp_path: Path) -> None:
    """Oracle: the contents before it; the step that they are of. One bit of the newest data, then
    of both."""
    file = tmp_path / "store" / "unit-00001.bin"
    with writable(tmp_path / "store") as store:
        unit = store.units[1]
        packed = file.read_bytes()
        for step in (1, 2):
            store.write_unit(1, contents(1, step, unit.nbytes), step)
    whole = bytearray(file.read_bytes())
    buffer_P = torch.empty(unit.nbytes, dtype=torch.uint8)
    newest = whole[:]
    newest[unit.area_offset(0) + unit.nbytes // 2] ^= 1
    for data, step in ((whole, 2), (newest, 1), (packed, 0)):
        file.write_bytes(data)
        with WritableStore(tmp_path / "store") as store:
            assert store.read_unit(1, buffer_P) == store.step(1) == step
            if step:
                assert torch.equal(buffer_P, contents(1, step, unit.nbytes))
        assert BlockStore(tmp_path / "store").steps[1] == step, "readers see the same generation"
    newest[unit.area_offset(1) + unit.nbytes // 2] ^= 1
    for data in (
        newest,
        bytes([*packed[: DATA_START + 9], packed[DATA_START + 9] ^ 1, *packed[DATA_START + 10 :]]),
    ):
        file.write_bytes(data)
        with refused(atomic_files.Damaged, "unit-00001.bin damaged ledger"):
            WritableStore(tmp_path / "store")


def test_a_crash_at_any_instant_leaves_a_whole_generation(tmp_path: Path) -> None:
    """Oracle: the closed form. Every state of the file between two writes is made by hand: the data
    written in part, the data written and the header not, the header torn after each of its bytes,
    the header written."""
    with writable(tmp_path / "store") as store:
        nbytes = store.units[1].nbytes
        file = tmp_path / "store" / store.units[1].file
        for step in (1, 2):
            store.write_unit(1, contents(1, step, nbytes), step)
        before = file.read_bytes()
        store.write_unit(1, contents(1, 3, nbytes), 3)
        after = file.read_bytes()
    header_at = next(at for at in (0, HEADER_PAGE) if before[at : at + 64] != after[at : at + 64])
    data_at = [i for i in range(DATA_START, len(before)) if before[i] != after[i]]
    length = len(UnitHeader(0, 0, 0, 0, 0, 0).pack())

    def image(data: int, header: int) -> bytes:
        """The first ``data`` changed bytes of data and the first ``header`` bytes of the header are
        new."""
        mixed = bytearray(before)
        for i in data_at[:data]:
            mixed[i] = after[i]
        mixed[header_at : header_at + header] = after[header_at : header_at + header]
        return bytes(mixed)

    states = [(n, 0) for n in (0, 1, len(data_at) // 2, len(data_at))]
    states += [(len(data_at), n) for n in range(1, length + 1)]
    found = []
    buffer_P = torch.empty(nbytes, dtype=torch.uint8)
    for data, header in states:
        file.write_bytes(image(data, header))
        with WritableStore(tmp_path / "store") as store:
            step = store.read_unit(1, buffer_P)
        assert torch.equal(buffer_P, contents(1, step, nbytes)), (data, header, step)
        found.append(step)
    assert found == sorted(found)
    assert found[:4] == [2, 2, 2, 2]
    assert found[-1] == 3

    file.write_bytes(image(len(data_at), length - 1))  # after such a crash the run goes on
    with WritableStore(tmp_path / "store") as store:
        store.write_unit(1, contents(1, 3, nbytes), 3)
        assert store.read_unit(1, buffer_P) == 3
    assert torch.equal(buffer_P, contents(1, 3, nbytes))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(
    ("sync", "direct"),
    [(True, False), (False, False), (True, True)],
    ids=["sync", "no sync", "direct"],
)
def test_killed_at_random_moments(
    sync: bool, direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the closed form. A child that writes in a loop is killed 30 times; each time every
    unit is whole, of a step that never goes back, and units differ by the one step in flight.
    ``direct``: written past the page cache."""
    monkeypatch.setattr(writable_store, "DIRECT_BYTES", 0 if direct else 1 << 40)
    tensors = {f"unit.{i}": torch.zeros(1 << 16) for i in range(3)}
    units = [
        UnitSpec(f"u{i}", "block", (ParamSpec(f"unit.{i}", (1 << 16,), "float32"),))
        for i in range(3)
    ]
    spec = ModelSpec("toy", units[0], (units[1],), units[2], 1, 1)
    path = tmp_path / "store"
    nbytes = 4 << 16
    with make_writable(path, Dictionary(tensors), spec, Codec.FP32) as store:
        began = time.perf_counter()
        for unit in range(3):
            store.write_unit(unit, contents(unit, 1, nbytes), 1)
        one_step = max(time.perf_counter() - began, 0.01)
    rng = random.Random(0)
    newest = [1, 1, 1]
    interrupted = 0
    for _ in range(30):
        begins, tell = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)  # the parent's OpenMP threads are not here
                store = WritableStore(path, sync=sync)
                os.write(tell, b"!")  # what was paged out of the parent, and the store, are there
                for step in range(store.step(2) + 1, 1000):
                    for unit in range(3):
                        store.write_unit(unit, aligned(contents(unit, step, nbytes)), step)
            finally:
                os._exit(1)
        os.read(begins, 1)
        time.sleep(rng.uniform(0.2, 2.5) * one_step)
        os.kill(child, signal.SIGKILL)
        os.close(begins)
        os.close(tell)
        assert os.WIFSIGNALED(os.waitpid(child, 0)[1]), (
            "the child was still writing when it was killed"
        )

        buffer_P = torch.empty(nbytes, dtype=torch.uint8)
        with WritableStore(path) as store:
            steps = [store.read_unit(unit, buffer_P) for unit in range(3)]
            for unit in range(3):
                store.read_unit(unit, buffer_P)
                assert torch.equal(buffer_P, contents(unit, steps[unit], nbytes)), (unit, steps)
        assert all(new >= old for new, old in zip(steps, newest, strict=True))
        assert steps == sorted(steps, reverse=True)
        assert steps[0] - steps[2] <= 1
        interrupted += steps[0] != steps[2]
        newest = steps
    assert newest[2] > 1, "the children never finished a step: nothing was tested"
    assert interrupted, "no child was killed between its units: nothing was tested"


def test_a_store_is_written_by_one_at_a_time(store: Path, tmp_path: Path) -> None:
    """Oracle: the lock, which goes with its holder."""
    with refused(ValueError, "reading"):
        WritableStore(store)
    first = writable(tmp_path / "writable")
    with refused(ValueError, "open|opened writing"):
        WritableStore(tmp_path / "writable")
    first.close()
    WritableStore(tmp_path / "writable").close()


def test_the_folder_it_is_copied_from_is_never_written(tmp_path: Path) -> None:
    """Oracle: the bytes of the checkpoint folder before and after training on the copy."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from blockwalk.cutting.verify import certified

    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    before = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    skeleton = build_skeleton(tmp_path / "model")
    source = CheckpointFolder(tmp_path / "model", skeleton)
    with make_writable(
        tmp_path / "store",
        source,
        certified(skeleton).spec(),
        Codec.BF16,
        copy_from=tmp_path / "model",
    ) as store:
        for number, unit in enumerate(store.units):
            store.write_unit(number, torch.zeros(unit.nbytes, dtype=torch.uint8), 1)
    assert {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()} == before
    assert (
        BlockStore(tmp_path / "store").weights(["lm_head.weight"])["lm_head.weight"].abs().sum()
        == 0
    )


@pytest.mark.parametrize("cut", [0, 1, 4097, 100_000])
def test_a_checksum_is_zlibs_whole_and_in_parts(cut: int) -> None:
    whole_P = torch.randint(
        0, 256, (100_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    expected = zlib.crc32(whole_P.numpy().data)
    assert crc32(whole_P) == expected
    assert crc32(whole_P[cut:], crc32(whole_P[:cut])) == expected
