"""Pages of a file that this process has mapped, by the kernel. Not a test."""

from __future__ import annotations

from blockwalk.tiers.disk import PAGE, MappedFile


def mapped_pages(file: MappedFile) -> set[int]:
    """The pages of the map that are mapped into this process now: bit 63 of each entry in
    /proc/self/pagemap."""
    first = file.bytes_P.data_ptr() // PAGE
    count = -(-file.nbytes // PAGE)
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * first)
        entries = pagemap.read(8 * count)
    return {page for page in range(count) if entries[8 * page + 7] & 0x80}
