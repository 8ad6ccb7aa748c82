"""Serve a GGUF file with llama.cpp's server, in the environment that has xllamacpp.

``python llama.py FILE NAME PORT SLOTS`` serves until it is ended. It imports nothing of igcore.
"""

import sys
import time

import xllamacpp

TOKENS = 1024  # of a slot


def main(file: str, name: str, port: str, slots: str) -> None:
    """Serve from the command line."""
    params = xllamacpp.CommonParams()
    params.model.path = file
    params.model_alias = {name}
    params.port = int(port)
    params.n_parallel = int(slots)
    params.n_ctx = TOKENS * params.n_parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
