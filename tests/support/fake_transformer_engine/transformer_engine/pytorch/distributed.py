class CudaRNGStatesTracker:
    def __init__(self) -> None:
        self.states_: dict[str, object] = {}

    def reset(self) -> None:
        self.states_ = {}


def _nothing(*args: object, **kwargs: object) -> None:
    raise AssertionError("this stand-in computes nothing")


activation_recompute_forward = checkpoint = _nothing


def is_fp8_activation_recompute_enabled() -> bool:
    return False
