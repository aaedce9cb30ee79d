#!/bin/sh
# Zeroth order on a GPU: naive resident MeZO, mezo, and zo2 with the blocks in host memory, with its ablations.
# Writes benchmarks/results/<gpu>.json and a profiler trace beside it. Options go to benchmarks/gpu.py, such as --model OPT-1.3B.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" benchmarks/gpu.py "$@"
