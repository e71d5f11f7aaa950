"""As much of the Hugging Face hub's API as its client needs to download or upload a model, on loopback, with faults to
order.

Written from what huggingface_hub 2 asks for: model info at a revision, the tree at a commit, HEAD and GET of
/{repo}/resolve/{commit}/{file}. Large files (safetensors) are redirected to another host, as the hub does with LFS. An
upload is whoami, the new repository, the way of each file, LFS's batch and PUTs, and a commit in lines of JSON. Not
spoken: Xet, tokens of downloads, gated repositories, pages of the tree, compressed answers.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

Files = Mapping[str, bytes]
_PIECE = 1 << 16  # bytes


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as answered."""

    method: str
    path: str
    file: str | None  # in the repository; None where it is not about a file
    commit: str | None
    start: int  # first byte sent of the file
    sent: int  # bytes of body


class FakeHub:
    """Repositories in memory. `with FakeHub() as hub` serves at `hub.url`; all other methods are for the test.

    `cut[file] = n` drops the connection after n bytes of the file, each time. `stall[file] = n` sends n bytes, sets
    `stalled` and sends nothing more before `close`.
    """

    def __init__(self) -> None:
        self._commits: dict[str, dict[str, Files]] = {}  # repository -> commit -> files
        self._branch: dict[str, str] = {}  # repository -> commit that main is at
        self._blobs: dict[str, bytes] = {}  # SHA-256 -> content
        self.asked: list[Asked] = []
        self.cut: dict[str, int] = {}
        self.stall: dict[str, int] = {}
        self.stalled = threading.Event()
        self.token = "hf_right"  # which uploads need
        self.full = False  # uploads of large files are refused
        self.private: set[str] = set()  # repositories that were created so
        self._closing = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self  # type: ignore[attr-defined]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def push(self, repo: str, files: Files) -> str:
        """A new commit, which main then is at."""
        text = json.dumps([repo, len(self._commits.get(repo, {})), sorted(files)])
        commit = hashlib.sha1(text.encode()).hexdigest()
        self._commits.setdefault(repo, {})[commit] = dict(files)
        self._branch[repo] = commit
        self._blobs.update({hashlib.sha256(content).hexdigest(): content for content in files.values()})
        return commit

    def at(self, repo: str, revision: str) -> str | None:
        """The commit that a revision means."""
        if revision in self._commits.get(repo, {}):
            return revision
        return self._branch.get(repo) if revision == "main" else None

    def files(self, repo: str, commit: str) -> Files:
        return self._commits[repo][commit]

    def blob(self, sha256: str) -> bytes:
        return self._blobs[sha256]

    def knows(self, repo: str) -> bool:
        return repo in self._commits

    def create(self, repo: str, visibility: str) -> None:
        self._commits.setdefault(repo, {})
        self._branch.setdefault(repo, self.push(repo, {}))
        if visibility == "private":
            self.private.add(repo)

    def keep(self, sha256: str, content: bytes) -> None:
        self._blobs[sha256] = content

    def hold(self) -> None:
        """Until the end, in the thread of a request that stalls."""
        self.stalled.set()
        self._closing.wait(timeout=60)


def _large(name: str) -> bool:
    return name.endswith(".safetensors")


def _tree_entry(name: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _git_blob(content)}
    if _large(name):
        sha256 = hashlib.sha256(content).hexdigest()
        entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 134}
    return entry


def _git_blob(content: bytes) -> str:
    """The id that git gives to a file of this content: the hub's ETag of small files."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30  # s without a byte from the client

    @property
    def hub(self) -> FakeHub:
        return self.server.hub  # type: ignore[attr-defined, no-any-return]

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `FakeHub.asked` is the log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._take()

    def do_PUT(self) -> None:
        self._take()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        out = b""
        while size := int(self.rfile.readline(), 16):
            out += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return out

    def _take(self) -> None:
        """A part of an upload."""
        body, parts = (
            self._body(),
            [urllib.parse.unquote(p) for p in urllib.parse.urlsplit(self.path).path.split("/")[1:]],
        )
        if parts[0] == "put":
            if self.hub.full:
                return self._refuse(403, "", "the storage is full")
            self.hub.keep(parts[1], body)
            return self._json({})
        if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
            return self._refuse(401, "", "Invalid credentials in Authorization header")
        if parts == ["api", "repos", "create"]:
            asked = json.loads(body)
            repo = f"{asked['organization'] or 'me'}/{asked['name']}"
            if self.hub.knows(repo):
                return self._refuse(409, "", "You already created this model repo", url=f"{self.hub.url}/{repo}")
            self.hub.create(repo, asked.get("visibility", "public"))
            return self._json({"url": f"{self.hub.url}/{repo}", "name": repo})
        if parts[2:] == ["info", "lfs", "objects", "batch"]:
            found = [
                o | {"actions": {"upload": {"href": f"{self.hub.url}/put/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            return self._json({"objects": found})
        repo = "/".join(parts[2:4])
        if not self.hub.knows(repo):
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if parts[4] == "preupload":
            files = [f["path"] for f in json.loads(body)["files"]]
            modes = [
                {"path": f, "uploadMode": "lfs" if _large(f) else "regular", "shouldIgnore": False, "oid": None}
                for f in files
            ]
            return self._json({"files": modes})
        return self._commit(repo, [json.loads(line) for line in body.splitlines()])

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = dict(self.hub.files(repo, str(self.hub.at(repo, "main"))))
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blob(value["oid"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        commit = self.hub.push(repo, files)
        self._json({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{repo}/commit/{commit}"})

    def _answer(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        parts = [urllib.parse.unquote(p) for p in url.path.split("/")[1:]]
        if parts == ["api", "whoami-v2"]:
            if self.headers.get("Authorization") != f"Bearer {self.hub.token}":
                return self._refuse(401, "", "Invalid credentials in Authorization header")
            return self._json({"name": "me", "type": "user", "orgs": []})
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            self._api("/".join(parts[2:4]), parts[4:])
        elif parts[2:3] == ["resolve"] and len(parts) >= 5:
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts[0] == "lfs":  # /lfs/{sha256}/{repo}/{commit}/{file}
            self._send_file(self.hub.blob(parts[1]), parts[1], "/".join(parts[5:]), parts[4])
        else:
            self._refuse(404, "", f"no such page: {url.path}")
        return None

    def _api(self, repo: str, rest: list[str]) -> None:
        if not self.hub.knows(repo):
            return self._refuse(404, "RepoNotFound", "Repository not found")
        commit = self.hub.at(repo, rest[1] if len(rest) > 1 else "main")
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
        files = self.hub.files(repo, commit)
        if rest[:1] == ["tree"]:
            return self._json([_tree_entry(name, content) for name, content in files.items()])
        return self._json({"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]})

    def _resolve(self, repo: str, revision: str, name: str) -> None:
        if not self.hub.knows(repo):
            return self._refuse(404, "RepoNotFound", "Repository not found")
        commit = self.hub.at(repo, revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        content = self.hub.files(repo, commit).get(name)
        if content is None:
            return self._refuse(404, "EntryNotFound", f"Entry not found: {name}")
        if not _large(name):
            return self._send_file(content, _git_blob(content), name, commit)
        sha256 = hashlib.sha256(content).hexdigest()
        self.send_response(302)
        self.send_header("Location", f"http://localhost:{self.hub.port}/lfs/{sha256}/{repo}/{commit}/{name}")
        self.send_header("X-Repo-Commit", commit)
        self.send_header("X-Linked-Etag", f'"{sha256}"')
        self.send_header("X-Linked-Size", str(len(content)))
        self.send_header("Content-Length", "0")
        self.end_headers()
        return self._log(None, commit, 0, 0)

    def _send_file(self, content: bytes, etag: str, name: str, commit: str) -> None:
        start, total = 0, len(content)
        if wanted := self.headers.get("Range"):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.send_header("Content-Length", str(total - start))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "HEAD":
            return self._log(name, commit, start, 0)
        fault = self.hub.cut.get(name, self.hub.stall.get(name))
        stop = total if fault is None else min(fault, total)
        self._log(name, commit, start, max(0, stop - start))
        for a in range(start, stop, _PIECE):
            self.wfile.write(content[a : min(a + _PIECE, stop)])
        self.wfile.flush()
        if fault is not None:
            self.close_connection = True
            if name not in self.hub.cut:
                self.hub.hold()
        return None

    def _json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self._finish(body)

    def _refuse(self, status: int, code: str, message: str, **more: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("X-Error-Message", message)
        self._finish(json.dumps({"error": message} | more).encode())

    def _finish(self, body: bytes) -> None:
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self._log(None, None, 0, len(body))

    def _log(self, file: str | None, commit: str | None, start: int, sent: int) -> None:
        self.hub.asked.append(Asked(self.command, self.path, file, commit, start, sent))
