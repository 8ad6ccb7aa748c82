# igcore with the embedded models on processors, for laptops and, by Apptainer, for clusters. The steps after the packages of
# Debian were run on a plain machine; the image itself was not built yet.
#
#   docker build --tag igcore .
#   docker run --rm --volume "$PWD/runs:/igcore/runs" igcore                     # make reproduce
#   docker run --rm --publish 8888:8888 igcore make lab                          # JupyterLab
FROM python:3.12-slim

RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /igcore
COPY . .

# torch for processors first, because the default build brings 4 GB for GPUs
RUN python3 -m venv .venv \
    && .venv/bin/pip install --no-cache-dir --constraint constraints.txt --index-url https://download.pytorch.org/whl/cpu torch \
    && PIP_NO_CACHE_DIR=1 make assets

CMD ["make", "reproduce"]
