# optuna-dsat with torch and DeepSpeed, for the CPU or, with another base image, for NVIDIA GPUs:
#
#   docker build -t optuna-dsat .
#   docker build -t optuna-dsat --build-arg BASE=nvidia/cuda:13.0.2-devel-ubuntu24.04 --build-arg TORCH_INDEX= .
#   docker run --rm optuna-dsat doctor
#   docker run --rm --gpus all --shm-size 2g -v "$PWD:/work" optuna-dsat tune train.py ds_config.json
#
# The base needs apt and Python 3.11 or newer; a "devel" image of CUDA has the compiler for DeepSpeed's operators.
ARG BASE=debian:12-slim
FROM ${BASE}

RUN apt-get update \
    && apt-get install --yes --no-install-recommends build-essential git make python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

# torch goes first, so that packages that depend on it keep this build. The default index has the builds for the CPU.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt /opt/optuna-dsat/
RUN python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} \
       --constraint /opt/optuna-dsat/constraints.txt torch \
    && /opt/venv/bin/pip install --no-cache-dir --constraint /opt/optuna-dsat/constraints.txt numpy

COPY . /opt/optuna-dsat
RUN /opt/venv/bin/pip install --no-cache-dir --constraint /opt/optuna-dsat/constraints.txt \
    '/opt/optuna-dsat[here,postgres,ray]'

ENV PATH=/opt/venv/bin:$PATH
WORKDIR /work
ENTRYPOINT ["optuna-dsat"]
CMD ["--help"]
