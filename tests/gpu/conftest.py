"""Tests that need an NVIDIA GPU: `make gpu-test` runs them, and fails where there is none.

Elsewhere they are not collected, so that a run of all tests tells of none that did not run.
"""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
