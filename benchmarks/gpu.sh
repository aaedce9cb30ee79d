#!/bin/sh
# Zeroth order on a GPU: naive resident MeZO, mezo, and zo2 with the blocks in host memory, with its ablations.
# Then first order: plain, and fcdp and hzp of one rank with optimizer states in host memory (alone: gpu.sh sharded [options]).
# Writes benchmarks/results/<gpu>.json and a profiler trace beside it. Options go to benchmarks/gpu.py, such as --model OPT-1.3B.
set -eu
cd "$(dirname "$0")/.."
if [ "${1:-}" = sharded ]; then
    shift
    exec "${PYTHON:-python}" benchmarks/gpu_sharded.py "$@"
fi
"${PYTHON:-python}" benchmarks/gpu.py "$@"
exec "${PYTHON:-python}" benchmarks/gpu_sharded.py
