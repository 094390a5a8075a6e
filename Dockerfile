# dslc with torch for CPUs: `docker build -t dslc .`, then `docker run --rm -v "$PWD:/jobs" dslc check job.plt`.
# For GPUs build on an image that has torch with CUDA: `--build-arg BASE=pytorch/pytorch:…`.
ARG BASE=python:3.12-slim
FROM ${BASE}
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY . /src
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" -c /src/constraints.txt /src && rm -rf /src
WORKDIR /jobs
ENTRYPOINT ["dslc"]
