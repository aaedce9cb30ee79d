#!/bin/sh
# An hour on one accelerator, in parts by value, each under eight minutes; what is done is kept and not done again (--again).
# benchmarks/gpu.sh --minutes 12: what matters most, by a clock.
# Writes benchmarks/results/<device>/<part>.json. Without one, to try the script itself: benchmarks/gpu.sh --device cpu --tiny
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" benchmarks/gpu.py "$@"
