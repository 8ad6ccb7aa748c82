"""Tests of what the policy says of recorded answers: honest ones hold on any machine, and what
nobody sampled is refused, wherever it claims to come from.
"""

import json
import shutil

import pytest
import torch
from forgeries import DTYPES, METHODS, RUN, decode, forged, verdict_on
from igserve... 
