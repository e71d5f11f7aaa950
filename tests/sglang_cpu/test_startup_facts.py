"""What the start of servers takes from SGLang 0.5.23, held to its source files and its own arithmetic of ports.

That a started server's log has the lines is in test_stock_sglang.py. Not covered: a server over several nodes.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from rollout.sglang.phases import STOCK
from rollout.sglang.ports import BLOCK, stock_ports
from tests.sglang_cpu.serve import ENVIRONMENT
from tests.sglang_cpu.served import PYTHON

SOURCES = {  # a mark -> the file that writes it
    "Init parallel begin": "distributed/bootstrap.py",
    "Load weight begin": "model_executor/model_runner.py",
    "Load weight end": "model_executor/model_runner.py",
    "Entering DeepGEMM JIT Pre-Compile session": "layers/deep_gemm_wrapper/compile_utils.py",
    "Try DeepGEMM JIT Compiling": "layers/deep_gemm_wrapper/compile_utils.py",
    "prefill CUDA graph begin": "model_executor/model_runner_components/cuda_graph_setup.py",
    "decode CUDA graph begin": "model_executor/model_runner_components/cuda_graph_setup.py",
    "Uvicorn running on": "entrypoints/http_server.py",
    "The server is fired up and ready to roll!": "entrypoints/http_server.py",
}
COMPOSED = {  # how the source spells those that it puts together
    "prefill CUDA graph begin": (r'capture_name = f"\{role\} prefill"', r"Capture \{capture_name\} CUDA graph begin"),
    "decode CUDA graph begin": (
        r'"cuda": "CUDA graph"',
        r'capture_name = f"\{role\} decode"',
        r"Capture \{capture_name\} \{graph_backend\[model_runner\.device\]\} begin",
    ),
}
PORTS = """
import json, sys
from types import SimpleNamespace
from sglang.srt import server_args as m
m.wait_port_available = lambda port, name, *a, **k: found.append((name, port))
m.resolving_view = lambda args: args
m.attn_dp_enabled_of = lambda args: True
m.ep_scale_joiner_of = m.ep_joiner_of = lambda args: False
out = []
for port, dist_init_addr, nnodes in json.loads(sys.argv[1]):
    found = []
    m.PortArgs.init_new(SimpleNamespace(port=port, dist_init_addr=dist_init_addr, nnodes=nnodes, nccl_port=7,
                                        tokenizer_worker_num=1, decoupled_spec_role="null"))
    out.append([p for name, p in found if name != "nccl_port"])
print(json.dumps([out, m.DP_ATTENTION_HANDSHAKE_PORT_DELTA]))
"""


def sources() -> Path:
    (found,) = PYTHON.parents[1].glob("lib/python3*/site-packages/sglang/srt")
    return found


def test_the_marks_of_phases_are_written_by_stock_sglang() -> None:
    """A mark that its source no longer writes would leave a start in the phase before, and its limit."""
    root = sources()
    assert {mark for phase in STOCK for mark in phase.marks} == SOURCES.keys()
    for mark, file in SOURCES.items():
        text = (root / file).read_text()
        for part in COMPOSED.get(mark, (re.escape(mark),)):
            assert re.search(part, text), (mark, file, part)


def test_the_ports_of_attention_data_parallelism_are_sglang_s() -> None:
    """SGLang's PortArgs.init_new itself, whose check of a port is replaced by a list."""
    sources()
    cases = [(30001, 20064, 2), (30001, 20064, 1), (30001, None, 1), (65500, None, 1)]
    asked = [(port, None if first is None else f"127.0.0.1:{first}", nnodes) for port, first, nnodes in cases]
    command = [str(PYTHON), "-c", PORTS, json.dumps(asked)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr[-2000:]
    stock, handshake = json.loads(done.stdout.splitlines()[-1])
    for (port, first, nnodes), theirs in zip(cases, stock, strict=True):
        ours = {p.number for p in stock_ports(port, first, attention_dp=True, nnodes=nnodes)}
        rendezvous = first or (port + 233 if port + 233 <= 65535 else port - 233)
        assert rendezvous in theirs and handshake < BLOCK
        # SGLang checks the sixth, of load figures, for several nodes only
        assert set(theirs) <= ours and ours - set(theirs) <= {port, rendezvous + handshake, rendezvous + 6}
        assert nnodes == 1 or ours - set(theirs) == {port, rendezvous + handshake}
