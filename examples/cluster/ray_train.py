"""Two workers under Ray Train: python examples/cluster/ray_train.py run.yaml --method fcdp

Paths are those of a folder that all nodes share. A run that loses a worker begins again, at its
newest checkpoint."""

import os
import subprocess
import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer


def work(settings):
    """One rank: Ray has set RANK, WORLD_SIZE and where the first worker is; the port beside Ray's
    own is taken."""
    environment = {**os.environ, "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)}
    command = [
        sys.executable,
        "-P",  # a file of the folder runs in no module's place
        "-m",
        "blockwalk",
        "train",
        *settings["arguments"],
        "--resume_from_checkpoint",
        "latest",
    ]
    subprocess.run(command, env=environment, cwd=settings["folder"], check=True)


if __name__ == "__main__":
    TorchTrainer(
        work,
        train_loop_config={"arguments": sys.argv[1:], "folder": os.getcwd()},
        scaling_config=ScalingConfig(num_workers=int(os.environ.get("WORKERS", "2"))),
        run_config=RunConfig(
            failure_config=FailureConfig(max_failures=3), storage_path=os.path.abspath("runs/ray")
        ),
    ).fit()
