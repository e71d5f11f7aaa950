"""A server of the Model Context Protocol by its official package, over standard input and output.

python mcp_server.py PATHS NOTES    PATHS: sys.path, joined by os.pathsep; NOTES: a file that gets a line a process
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(notes: Path) -> None:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("numbers")
    counted = [0]

    @server.tool()
    def multiply(a: int, b: int) -> int:
        """Multiplies two integers."""
        return a * b

    @server.tool()
    def count() -> str:
        """Counts its calls."""
        counted[0] += 1
        return f"call {counted[0]}"

    @server.tool()
    def broken() -> str:
        """Fails."""
        raise ValueError("it is broken")

    @server.tool()
    def leave() -> str:
        """Ends the server."""
        os._exit(3)

    with notes.open("a") as file:
        file.write(f"{os.getpid()}\n")
    server.run("stdio")


if __name__ == "__main__":
    sys.path[:] = sys.argv[1].split(os.pathsep)  # the client gives a server few variables of its environment
    main(Path(sys.argv[2]))
