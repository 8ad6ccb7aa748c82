"""Settings shared by all tests: one thread, so that timings and float sums do not depend on the
machine's load.
"""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"  # a test that reaches for the network must fail, not wait

import torch

torch.set_num_threads(1)
