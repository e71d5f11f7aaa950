"""What a rank's process needs, imported once: the fork server loads this module and every rank is forked from it.

Nothing here may start a thread, draw a random number or open a process group: a fork keeps none of the first and
doubles the others.
"""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch and numpy read it
os.environ["OMP_WAIT_POLICY"] = "passive"  # two threads on a busy core spent seven eighths of their time spinning

import torch
import torch._dynamo  # the first optimizer and the first recomputed layer import it

import megatron_bridge.trainer  # noqa: F401
import rollout.embedded.server.service  # noqa: F401

torch.set_num_threads(1)
gc.collect()
gc.freeze()  # trainers collect garbage when they are closed: half a second, if it looks at all that was imported
