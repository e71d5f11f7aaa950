"""The command line of a run that sends each tensor in a separate request, also those that SGLang fuses within one:

python tests/sglang_cpu/programs/parted_pairs.py train CONFIG ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from miles_like.run.setup.rollout_side import RolloutSide

if __name__ == "__main__":
    from miles_like.cli import main

    whole = RolloutSide.publisher

    def parted(self: RolloutSide, urls: Sequence[str], **how: Any) -> Any:
        recipe = whole(self, urls, **how)
        one = recipe.target.config.model_copy(update={"bucket_bytes": 1})
        return replace(recipe, target=replace(recipe.target, fused=(), config=one))

    RolloutSide.publisher = parted  # type: ignore[method-assign]
    main()
