"""Reinforcement-learning post-training of mixture-of-experts language models in low precision."""

from __future__ import annotations

__version__ = "0.1.0"
