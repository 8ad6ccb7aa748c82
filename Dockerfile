# igcore with the embedded models on processors. No host has built this image yet: outside of a container, `make assets` and
# `make reproduce` were run, with torch from another index.
#
#   docker build --tag igcore .
#   docker run --rm --volume "$PWD/runs:/igcore/runs" igcore                     # make reproduce
FROM python:3.11-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /igcore
COPY . .

# torch for processors first, because the default build brings 4 GB for GPUs
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --constraint constraints.txt --extra-index-url https://download.pytorch.org/whl/cpu torch \
    && PIP_NO_CACHE_DIR=1 make assets

CMD ["make", "reproduce"]
