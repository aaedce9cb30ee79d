#!/bin/sh
# First order sharded over several GPUs: zero3, zeropp, mics, fcdp and hzp against plain on one, one rank a GPU.
# Where there is one GPU, two ranks share it over gloo: the same losses are all that is looked at.
# Options go to benchmarks/gpu_dist.py, such as --model Qwen2.5-1.5B; --device cpu --tiny tries the script itself.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" benchmarks/gpu_dist.py --family sharded "$@"
