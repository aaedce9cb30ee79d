"""A file system in user space that logs everything that is done to it, and says what a disk may
hold after a loss of power.

The kernel's own protocol (linux/fuse.h, 7.31) is spoken over /dev/fuse: no library is needed, root
is. Files live in memory, as inodes. Without a write-back cache every write reaches the log in the
order in which the program made it; pages of a shared map when the kernel writes them back, at the
latest when they are synced.

    with recorded(folder) as disk:
        ...                           # work in folder
    for k in range(len(disk.log)):
        volume_of(disk.log[:k]).copy_to(somewhere)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import marshal
import os
import random
import stat
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Op = tuple[Any, ...]
"""What was done: its name, and numbers of inodes, names, places and bytes."""
ROOT = 1
CHANGES = ("make", "write", "truncate", "rename", "unlink", "link")
"""Names of operations that change something; others: ``sync`` (a file's bytes), ``sync_names`` (a
folder's entries)."""


@dataclass
class Inode:
    """A file's bytes, a folder's names, or a symbolic link's target."""

    mode: int
    data: bytearray = field(default_factory=bytearray)
    names: dict[str, int] = field(default_factory=dict)
    changed: float = field(default_factory=time.time)

    @property
    def is_folder(self) -> bool:
        return stat.S_ISDIR(self.mode)


class Volume:
    """Inodes by number."""

    def __init__(self) -> None:
        self.inodes = {ROOT: Inode(stat.S_IFDIR | 0o755)}

    def apply(self, op: Op) -> None:
        """Do an operation; one that an earlier one was lost for is none."""
        kind, *rest = op
        if kind == "make":
            parent, name, number, mode, data = rest
            self.inodes.setdefault(number, Inode(mode, bytearray(data)))
            self._enter(parent, name, number)
        elif kind == "write":
            number, offset, data = rest
            held = self._file(number)
            if len(held) < offset:
                held.extend(bytes(offset - len(held)))
            held[offset : offset + len(data)] = data
        elif kind == "truncate":
            number, size = rest
            held = self._file(number)
            del held[size:]
            held.extend(bytes(size - len(held)))
        elif kind == "rename":
            parent, name, new_parent, new_name, number = rest
            if self.names(parent).get(name) == number:
                del self.names(parent)[name]
            self._enter(new_parent, new_name, number)
        elif kind == "unlink":
            parent, name = rest
            self.names(parent).pop(name, None)
        elif kind == "link":
            self._enter(*rest)

    def names(self, number: int) -> dict[str, int]:
        return self.inodes.setdefault(number, Inode(stat.S_IFDIR | 0o755)).names

    def _file(self, number: int) -> bytearray:
        inode = self.inodes.setdefault(
            number, Inode(stat.S_IFREG | 0o644)
        )  # its bytes were synced, its name was not
        inode.changed = time.time()
        return inode.data

    def _enter(self, parent: int, name: str, number: int) -> None:
        self.names(parent)[name] = number

    def copy_to(self, folder: Path, number: int = ROOT) -> None:
        """Write what is below an inode to another file system."""
        folder.mkdir()
        for name, child in self.names(number).items():
            inode = self.inodes.get(child, Inode(stat.S_IFREG | 0o644))
            if inode.is_folder:
                self.copy_to(folder / name, child)
            elif stat.S_ISLNK(inode.mode):
                os.symlink(bytes(inode.data).decode(), folder / name)
            else:
                (folder / name).write_bytes(inode.data)


def volume_of(log: Sequence[Op]) -> Volume:
    """The volume on which these operations were done."""
    volume = Volume()
    for op in log:
        volume.apply(op)
    return volume


def survivors(log: Sequence[Op], draw: random.Random) -> list[Op]:
    """Operations that a loss of power leaves of a log: all that a sync made durable, and of the
    others any.

    A file's bytes are durable with the next sync of that file, an entry of a folder with the next
    sync of that folder (POSIX; no journal's order is taken for granted). An operation that is lost
    takes the later ones on the same bytes or name along half of the time, as journals do."""
    synced: dict[tuple[str, int], int] = {}
    for at, op in enumerate(log):
        if op[0] in ("sync", "sync_names"):
            synced[op[0], op[1]] = at
    share = draw.random()
    kept = []
    lost: set[int] = set()
    in_order = draw.random() < 0.5
    for at, op in enumerate(log):
        if op[0] not in CHANGES:
            continue
        of = op[1] if op[0] != "rename" else op[3]
        durable = (
            synced.get(("sync" if op[0] in ("write", "truncate") else "sync_names", of), -1) > at
        )
        if durable or (draw.random() < share and not (in_order and of in lost)):
            kept.append(op)
        else:
            lost.add(of)
    return kept


_IN = struct.Struct("<IIQQIIII")
_OUT = struct.Struct("<IiQ")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")
_LONG = 3600
"""Seconds for which the kernel may keep what it was told: nobody else changes anything."""


class _Server:
    """The answers to the kernel's questions about a volume, and the log."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.volume = Volume()
        self.log = list[Op]()
        self.next = ROOT + 1

    def serve(self) -> None:
        """Answer until the file system is unmounted."""
        while True:
            try:
                request = os.read(self.fd, (1 << 20) + 8192)
            except OSError as error:
                if error.errno == errno.ENODEV:
                    return
                if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                    continue
                raise
            _, opcode, unique, node, *_ = _IN.unpack_from(request)
            if opcode in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET
                continue
            answer = b""
            code = 0
            try:
                work = _WORK.get(opcode)
                if work is None:
                    raise OSError(errno.ENOSYS, "")
                answer = work(self, node, request[_IN.size :])
            except OSError as error:
                code = error.errno or errno.EIO
            with contextlib.suppress(FileNotFoundError):  # the question was interrupted
                os.write(self.fd, _OUT.pack(_OUT.size + len(answer), -code, unique) + answer)

    def do(self, *op: Any) -> None:
        self.log.append(op)
        self.volume.apply(op)

    def child(self, node: int, name: str) -> int:
        number = self.volume.names(node).get(name)
        if number is None:
            raise OSError(errno.ENOENT, name)
        return number

    def attributes(self, node: int) -> bytes:
        inode = self.volume.inodes[node]
        size = len(inode.data)
        seconds = int(inode.changed)
        part = int(inode.changed % 1 * 1e9)
        return _ATTR.pack(
            node,
            size,
            -(-size // 512),
            seconds,
            seconds,
            seconds,
            part,
            part,
            part,
            inode.mode,
            1,
            0,
            0,
            0,
            4096,
            0,
        )

    def entry(self, node: int) -> bytes:
        return _ENTRY.pack(node, 0, _LONG, _LONG, 0, 0) + self.attributes(node)

    # ---- one method for each question; ``data`` is what follows the header -----------------------

    def init(self, node: int, data: bytes) -> bytes:
        _, minor, readahead = struct.unpack_from("<III", data)
        return struct.pack(
            "<IIIIHHIIHHI28x", 7, min(minor, 31), readahead, 1 << 5, 12, 9, 1 << 17, 1, 32, 0, 0
        )  # BIG_WRITES

    def lookup(self, node: int, data: bytes) -> bytes:
        return self.entry(self.child(node, _text(data)))

    def getattr(self, node: int, data: bytes) -> bytes:
        return struct.pack("<QII", _LONG, 0, 0) + self.attributes(node)

    def setattr(self, node: int, data: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", data)
        inode = self.volume.inodes[node]
        if valid & 1:
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(
                struct.unpack_from("<I", data, 68)[0]
            )
        if valid & 8 and size != len(inode.data):
            self.do("truncate", node, size)
        return self.getattr(node, data)

    def make(self, node: int, name: str, mode: int, data: bytes = b"") -> int:
        if name in self.volume.names(node):
            raise OSError(errno.EEXIST, name)
        number = self.next
        self.next = self.next + 1
        self.do("make", node, name, number, mode, data)
        return number

    def mknod(self, node: int, data: bytes) -> bytes:
        return self.entry(self.make(node, _text(data[16:]), struct.unpack_from("<I", data)[0]))

    def mkdir(self, node: int, data: bytes) -> bytes:
        return self.entry(
            self.make(node, _text(data[8:]), stat.S_IFDIR | struct.unpack_from("<I", data)[0])
        )

    def symlink(self, node: int, data: bytes) -> bytes:
        name, target = data.split(b"\0")[:2]
        return self.entry(self.make(node, name.decode(), stat.S_IFLNK | 0o777, target))

    def readlink(self, node: int, data: bytes) -> bytes:
        return bytes(self.volume.inodes[node].data)

    def create(self, node: int, data: bytes) -> bytes:
        return self.entry(
            self.make(node, _text(data[16:]), struct.unpack_from("<II", data)[1])
        ) + self.open(node, data)

    def link(self, node: int, data: bytes) -> bytes:
        (number,) = struct.unpack_from("<Q", data)
        self.do("link", node, _text(data[8:]), number)
        return self.entry(number)

    def unlink(self, node: int, data: bytes) -> bytes:
        self.child(node, _text(data))
        self.do("unlink", node, _text(data))
        return b""

    def rmdir(self, node: int, data: bytes) -> bytes:
        if self.volume.names(self.child(node, _text(data))):
            raise OSError(errno.ENOTEMPTY, "")
        return self.unlink(node, data)

    def rename(self, node: int, data: bytes, skip: int = 8) -> bytes:
        (parent,) = struct.unpack_from("<Q", data)
        old, new = (name.decode() for name in data[skip:].split(b"\0")[:2])
        number = self.child(node, old)
        replaced = self.volume.names(parent).get(new)
        if replaced is not None and self.volume.names(replaced):
            raise OSError(errno.ENOTEMPTY, new)
        self.do("rename", node, old, parent, new, number)
        return b""

    def rename2(self, node: int, data: bytes) -> bytes:
        if struct.unpack_from("<I", data, 8)[0]:
            raise OSError(errno.EINVAL, "")
        return self.rename(node, data, 16)

    def open(self, node: int, data: bytes) -> bytes:
        return struct.pack("<QII", 0, 1 << 1, 0)  # KEEP_CACHE

    def read(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        return bytes(self.volume.inodes[node].data[offset : offset + size])

    def write(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        self.do("write", node, offset, data[40 : 40 + size])
        return struct.pack("<II", size, 0)

    def fallocate(self, node: int, data: bytes) -> bytes:
        _, offset, length, mode = struct.unpack_from("<QQQI", data)
        if mode:
            raise OSError(errno.EOPNOTSUPP, "")
        if offset + length > len(self.volume.inodes[node].data):
            self.do("truncate", node, offset + length)
        return b""

    def fsync(self, node: int, data: bytes) -> bytes:
        self.log.append(("sync", node))
        return b""

    def fsyncdir(self, node: int, data: bytes) -> bytes:
        self.log.append(("sync_names", node))
        return b""

    def statfs(self, node: int, data: bytes) -> bytes:
        return struct.pack(
            "<QQQQQIIII24x", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 4096, 255, 4096, 0
        )

    def readdir(self, node: int, data: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", data)
        out = b""
        for at, (name, number) in enumerate(
            list(self.volume.names(node).items())[offset:], offset + 1
        ):
            text = name.encode()
            kind = stat.S_IFMT(self.volume.inodes[number].mode) >> 12
            one = struct.pack("<QQII", number, at, len(text), kind) + text
            one += bytes(-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def nothing(self, node: int, data: bytes) -> bytes:
        return b""


def _text(data: bytes) -> str:
    return data.split(b"\0", 1)[0].decode()


_WORK: dict[int, Any] = {
    1: _Server.lookup, 3: _Server.getattr, 4: _Server.setattr, 5: _Server.readlink,
    6: _Server.symlink, 8: _Server.mknod, 9: _Server.mkdir, 10: _Server.unlink, 11: _Server.rmdir,
    12: _Server.rename, 13: _Server.link, 14: _Server.open, 15: _Server.read, 16: _Server.write,
    17: _Server.statfs, 18: _Server.nothing, 20: _Server.fsync, 25: _Server.nothing,
    26: _Server.init, 27: _Server.open, 28: _Server.readdir, 29: _Server.nothing,
    30: _Server.fsyncdir, 35: _Server.create, 38: _Server.nothing, 43: _Server.fallocate,
    45: _Server.rename2,
}  # fmt: skip


@dataclass
class Recorded:
    """A recorded file system; its log is there when it has been unmounted."""

    folder: Path
    log: list[Op] = field(default_factory=list)


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[Recorded]:
    """Mount an empty recorded file system at ``folder``; a process of its own serves it."""
    folder.mkdir(parents=True)
    kept = folder.with_name(f"{folder.name}.log")
    libc = ctypes.CDLL(None, use_errno=True)
    fd = os.open("/dev/fuse", os.O_RDWR)
    options = (
        f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other".encode()
    )
    if libc.mount(b"recorded", bytes(folder), b"fuse", 0, options):
        raise OSError(ctypes.get_errno(), f"fuse: {os.strerror(ctypes.get_errno())}", str(folder))
    if (server := os.fork()) == 0:
        code = 1
        try:
            serving = _Server(fd)
            serving.serve()
            kept.write_bytes(marshal.dumps(serving.log))
            code = 0
        finally:
            os._exit(code)
    os.close(fd)
    disk = Recorded(folder)
    try:
        yield disk
    finally:
        while libc.umount2(bytes(folder), 0) and ctypes.get_errno() == errno.EBUSY:
            time.sleep(0.05)
        os.waitpid(server, 0)
    disk.log = marshal.loads(kept.read_bytes())
