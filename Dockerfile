# Blockwalk in an image. CPU by default; for NVIDIA GPUs:
#   docker build --build-arg TORCH=https://download.pytorch.org/whl/cu130 -t blockwalk .
#   docker run --rm --gpus all --ipc=host --user "$(id -u):$(id -g)" -v "$PWD":/work blockwalk train run.yaml
# Without GPUs leave --gpus all out. Without --ipc=host ranks that share a container have 64 MB for what NCCL shares, and fail.
FROM python:3.12-slim
ARG TORCH=https://download.pytorch.org/whl/cpu
# gcc: noise and 4-bit decoding are compiled for the processor at their first use
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --no-cache-dir "torch>=2.11,<3" --index-url "$TORCH"
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
COPY examples /src/examples
RUN pip install --no-cache-dir "/src[data,track,gguf]" && rm -rf /src
# Files in /work are written by this user: --user "$(id -u):$(id -g)" makes them yours
RUN useradd --create-home blockwalk && install --directory --owner blockwalk --mode 1777 /cache /work
ENV BLOCKWALK_CACHE=/cache
USER blockwalk
WORKDIR /work
ENTRYPOINT ["blockwalk"]
