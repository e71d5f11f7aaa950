"""What a rank reports of an error that its peers or a library caused. The exchange itself is in the laws of saving."""

from __future__ import annotations

import pytest

from megatron_bridge.device.collective_errors import first_line

LOST = "another rank's connection was lost"
GLOO = "[/src/third_party/gloo/gloo/transport/tcp/pair.cc:553]"


@pytest.mark.parametrize(
    "message",
    [
        f"{GLOO} Connection closed by peer [127.0.0.1]:4711. This is typically caused by a crash.",
        f"{GLOO} Read error [127.0.0.1]:4711: Connection reset by peer. This is typically caused by a crash.",
        f"{GLOO} writev [127.0.0.1]:4711: Broken pipe",
        "NCCL error in: /src/ProcessGroupNCCL.cpp:12, remote process exited or there was a network error",
    ],
)
def test_a_lost_peer_is_one_sentence_whatever_the_library_words(message: str) -> None:
    assert first_line(RuntimeError(message)).startswith(LOST)


def test_other_errors_keep_their_first_line_without_source_lines() -> None:
    assert first_line(RuntimeError(f"{GLOO} Timed out waiting 600000ms\nmore")) == "Timed out waiting 600000ms"
    assert first_line(OSError(27, "File too large")) == "[Errno 27] File too large"
    assert first_line(ValueError("connection closed: give another path")) == "connection closed: give another path"
    assert first_line(KeyError()) == "KeyError"
