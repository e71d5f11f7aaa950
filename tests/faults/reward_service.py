"""A reward service outside of a run: python -S -E reward_service.py RUN_DIR PORT CELL

A score follows from the response alone. Where the cell's role is `reward`, its kind is what the service does from the
moment on. A program of the standard library alone, which starts in a tenth of a second.
"""

import json
import os
import select
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

run_dir, port, cell = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
role, _, kind = cell.split(" / ") if cell else ("", "", "")
born_struck = (run_dir / "struck").exists()  # one that was started again is a healthy one


def struck() -> bool:
    return role == "reward" and not born_struck and (run_dir / "struck").exists()


class Handler(BaseHTTPRequestHandler):
    """One POST for a sample."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status, body = 200, json.dumps(sum(map(ord, asked["response"])) % 97 / 97).encode()
        if struck() and kind == "garbage":
            body = b"\x00\xff nonsense"
        if struck() and kind == "clock jump":
            os.environ["FAKETIME"] = "+1d"
        if struck() and kind == "out of memory":
            status, body = 500, b"MemoryError"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


def end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        select.select([], [], [], 1.0)
    os._exit(0)


threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
ThreadingHTTPServer.request_queue_size = 64
with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
    new = run_dir / "reward.pid.new"
    new.write_text(str(os.getpid()))
    new.rename(run_dir / "reward.pid")
    server.serve_forever()
