#!/bin/sh
# DistZO2 on several GPUs: memory and tokens a second of mezo, zo2, perturb 2, data 2 and 2 × 2, as in the paper's table 1.
# Where there is one GPU, two ranks share it over gloo: the same ledger and weights are all that is looked at.
# Writes benchmarks/results/<gpu>-dist.json. Options go to benchmarks/gpu_dist.py, such as --model OPT-1.3B.
set -eu
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" benchmarks/gpu_dist.py "$@"
