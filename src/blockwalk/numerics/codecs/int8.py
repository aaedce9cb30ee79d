"""int8: whole numbers from −127 to 127 with one float32 scale a row."""

from __future__ import annotations

from blockwalk.numerics.codecs.scaled_rows import scaled_rows

CODEC = scaled_rows(127.0, lambda magnitude_RD: 1.0, native=1)
