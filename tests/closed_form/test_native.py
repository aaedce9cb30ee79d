"""Oracle: the contract of load: a broken kernel never an error, no compiler no kernel; the kernels
as compiled for this processor, which those of wheels are compared with, bit for bit."""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import warnings
from pathlib import Path

import pytest

from blockwalk.numerics import native
from blockwalk.numerics.noise.numpy_words import cubic_coefficients, gaussian_table
from tests.support.messages import warned


def test_a_broken_kernel_warns_once_and_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the contract of load."""
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.c").write_text("int answer(void) { return ; ")
    (tmp_path / "good.c").write_text("int answer(void) { return 42; }")
    if native._compiler() is None:
        pytest.skip("no C compiler")
    with warned(RuntimeWarning, "broken"):
        assert native.load("broken") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load("broken") is None
        good = native.load("good")
    assert good is not None
    assert good.answer() == 42
    assert [file.suffix for file in (tmp_path / "cache" / "native").iterdir()] == [".so"], (
        "no scratch is left"
    )
    monkeypatch.setenv("BLOCKWALK_NATIVE", "0")
    assert native.load("good") is None


def test_no_compiler_is_no_kernel_and_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: an empty PATH."""
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert native.load("noise") is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache's folder of libraries, and one kernel that can be compiled into it."""
    if native._compiler() is None:
        pytest.skip("no C compiler")
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "cache"))
    (tmp_path / "good.c").write_text("int answer(void) { return 42; }")
    return tmp_path / "cache" / "native"


def answer() -> int:
    library = native.load("good")
    assert library is not None
    native._loaded.clear()
    return int(library.answer())


def plant(library: Path) -> Path:
    """Put a library that answers something else, under a name with its digest, in the place of the
    one that was compiled."""
    source = library.with_name("other.c")
    source.write_text("int answer(void) { return 13; }")
    native._compile(native._compiler() or (), source, library)
    source.unlink()
    kernel, key, _ = library.stem.split("-")
    digest = hashlib.blake2b(library.read_bytes(), digest_size=8).hexdigest()
    return library.rename(library.with_name(f"{kernel}-{key}-{digest}.so"))


def test_a_library_that_another_user_planted_is_not_opened(cache: Path) -> None:
    """Oracle: what the library that was planted answers; a process of its own opens it, where its
    owner is trusted."""
    if os.geteuid() != 0:
        pytest.skip("giving a file to another user needs root")
    assert answer() == 42
    (library,) = cache.iterdir()
    library = plant(library)
    os.chown(library, 65534, -1)
    with warned(RuntimeWarning, f"{library.name} user|user's"):
        assert answer() == 42
    os.chown(library, 0, -1)
    os.chown(cache, 65534, -1)
    with warned(RuntimeWarning, "native user|user's"):
        assert answer() == 42
    assert [*cache.iterdir()] == [library], "what is compiled for one process is not left"


@pytest.mark.parametrize("mode", [0o775, 0o757, 0o1777])
@pytest.mark.parametrize("of", ["folder", "library"])
def test_a_library_that_others_may_write_is_not_opened(of: str, mode: int, cache: Path) -> None:
    """Oracle: as above; the folder's mode, then the library's."""
    assert answer() == 42
    (library,) = cache.iterdir()
    library = plant(library)
    (cache if of == "folder" else library).chmod(mode)
    with warned(RuntimeWarning, "write"):
        assert answer() == 42


@pytest.mark.parametrize("mode", [0o777, 0o757])
def test_a_cache_below_a_folder_of_others_is_not_opened(mode: int, cache: Path) -> None:
    """Oracle: as above; the mode of a folder around the cache. With the sticky bit nobody exchanges
    the folders of others."""
    assert answer() == 42
    (library,) = cache.iterdir()
    library = plant(library)
    above = cache.parent.parent
    above.chmod(mode)
    with warned(RuntimeWarning, f"{above} write"):
        assert answer() == 42
    above.chmod(mode | stat.S_ISVTX)
    assert answer() == 13


def test_a_link_on_the_way_to_the_cache_is_looked_behind(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: as above; the mode of the folder that holds a link to the cache."""
    cache.parent.mkdir()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "open" / "link").symlink_to(cache.parent)
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "open" / "link"))
    with warned(RuntimeWarning, f"{tmp_path / 'open'} write"):
        assert answer() == 42
    assert not cache.exists() or not [*cache.iterdir()]


def test_the_folder_that_was_checked_is_the_one_that_is_read(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what the library answers that takes the name of the checked one between the check and
    the opening."""
    assert answer() == 42
    (library,) = cache.iterdir()
    (tmp_path / "evil").mkdir()
    shutil.copy(library, tmp_path / "evil" / library.name)
    name = plant(tmp_path / "evil" / library.name)
    name.rename(tmp_path / "evil" / library.name)
    undamaged = native._undamaged

    def exchanged(folder: Path, descriptor: int, stem: str) -> str | None:
        checked = undamaged(folder, descriptor, stem)
        cache.rename(tmp_path / "checked")
        (tmp_path / "evil").rename(cache)
        return checked

    monkeypatch.setattr(native, "_undamaged", exchanged)
    assert answer() == 42


def test_a_flipped_bit_is_compiled_away(cache: Path) -> None:
    """Oracle: the bytes that were compiled."""
    assert answer() == 42
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    for place in range(0, len(whole), len(whole) // 8):
        (beside := library.with_name("beside")).write_bytes(
            whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
        )
        beside.replace(library)  # this process has mapped the one that was there
        assert answer() == 42
        assert library.read_bytes() == whole
    assert [*cache.iterdir()] == [library]


def test_a_cache_that_cannot_be_written_is_done_without(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: the kernel's answer where a file is in the cache folder's place."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BLOCKWALK_CACHE", str(tmp_path / "file" / "cache"))
    with warned(RuntimeWarning, "BLOCKWALK_CACHE"):
        assert answer() == 42


@pytest.mark.parametrize(
    ("umask", "mode"), [(0o022, 0o755), (0o002, 0o755), (0o027, 0o750), (0o077, 0o700)]
)
def test_who_may_enter_the_cache_may_read_the_library(umask: int, mode: int, cache: Path) -> None:
    """Oracle: the file system's modes. Under a umask that lets the group write, the cache is still
    its owner's."""
    before = os.umask(umask)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert answer() == answer() == 42
    finally:
        os.umask(before)
    (library,) = cache.iterdir()
    assert (stat.S_IMODE(cache.stat().st_mode), stat.S_IMODE(library.stat().st_mode)) == (
        mode,
        mode,
    )


KERNELS = Path(native.__file__).parent
ARM = ("aarch64-linux-gnu-gcc", "-static")


def checksums(folder: Path, march: str, *compiler: str) -> list[str]:
    """What a program with every kernel, compiled for one processor, prints."""
    program = folder / march
    tables = folder / "tables"
    tables.write_bytes(cubic_coefficients().tobytes() + gaussian_table().tobytes())
    flags = [flag for flag in native.FLAGS if flag not in ("-march=native", "-shared")]
    sources = [*KERNELS.glob("*.c"), Path(__file__).parents[1] / "support" / "kernels.c"]
    subprocess.run(
        [*compiler, *flags, f"-march={march}", *sources, "-o", program, "-lm"], check=True
    )
    emulator = ["qemu-aarch64"] if compiler == ARM else []
    return subprocess.run(
        [*emulator, program, tables], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def test_kernels_of_wheels_answer_as_those_compiled_here(tmp_path: Path) -> None:
    """Every level of this processor's kind that it has; ARM's under an emulator, where both are
    installed."""
    compiler = native._compiler()
    known = set(native.processor().split())
    if compiler is None:
        pytest.skip("no C compiler")
    expected = checksums(tmp_path, "native", *compiler)
    assert len(expected) == len({line.rpartition(" ")[0] for line in expected}) == 57
    there = [level for level, has in native.LEVELS.items() if known.issuperset(has.split())]
    for level in there:
        assert checksums(tmp_path, level, *compiler) == expected, level
    if shutil.which(ARM[0]) and shutil.which("qemu-aarch64"):
        assert checksums(tmp_path, "armv8-a", *ARM) == expected


def test_a_wheel_brings_kernels_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Oracle: what the library of this processor's best level answers; another level's lies beside
    it."""
    known = set(native.processor().split())
    compiler = native._compiler()
    there = [level for level, has in native.LEVELS.items() if known.issuperset(has.split())]
    if compiler is None or not there:
        pytest.skip("no C compiler, or no level")
    (tmp_path / "good.c").write_text("int answer(void) { return 13; }")
    for number, level in enumerate(there):
        source = tmp_path / "other.c"
        source.write_text(f"int answer(void) {{ return {42 + number}; }}")
        native._compile(compiler, source, tmp_path / f"good-{level}.so")
    monkeypatch.setattr(native, "_loaded", {})
    monkeypatch.setattr(native, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(native, "_compiler", lambda: None)
    found = native.load("good")
    assert found is not None
    assert found.answer() == 42
