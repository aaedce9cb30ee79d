"""A server on this machine that answers what huggingface_hub's client asks of the hub: a
repository's commit, its files, and their bytes; and takes what it uploads, small files in a commit,
large ones by LFS before it. Not a test: no oracle."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMITS = {"main": "a" * 40, "other": "b" * 40}


@dataclass
class Hub:
    """Repositories by name, each a folder for every revision; the token that private ones ask for;
    what was asked."""

    repos: dict[str, dict[str, Path]]
    gated: tuple[str, ...] = ()
    token: str = ""
    asked: list[str] = field(default_factory=list)
    private: dict[str, bool] = field(default_factory=dict)
    """Repositories that were made, and whether they were asked to be private."""
    root: Path = Path()
    """The folder in which they lie."""
    url: str = ""


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    class Answer(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def give(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def give_json(self, found: object, status: int = 200) -> None:
            self.give(json.dumps(found).encode(), {"Content-Type": "application/json"}, status)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def do_PUT(self) -> None:
            (hub.root / self.path.rpartition("/")[2]).write_bytes(self.body())
            self.give(b"", {})

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path).removeprefix("/api")
            body = self.body()
            hub.asked.append(path)
            if path == "/validate-yaml":
                return self.give_json({"errors": [], "warnings": []})
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.refuse(401, "Invalid username or password.")
            if path == "/repos/create":
                asked = json.loads(body)
                repo = f"{asked['organization']}/{asked['name']}"
                if repo in hub.repos:
                    return self.give_json({"error": "it is there", "url": f"{hub.url}/{repo}"}, 409)
                (hub.root / repo).mkdir(parents=True)
                hub.repos[repo] = {"main": hub.root / repo}
                hub.private[repo] = asked.get("visibility") == "private" or asked.get(
                    "private", False
                )
                return self.give_json({"url": f"{hub.url}/{repo}"})
            repo = (
                path.removeprefix("/models")
                .strip("/")
                .partition("/preupload/")[0]
                .partition("/commit/")[0]
            )
            if path.endswith("/preupload/main"):
                files = [{**f, "shouldIgnore": False} for f in json.loads(body)["files"]]
                modes = ["lfs" if f["path"].endswith(".safetensors") else "regular" for f in files]
                return self.give_json(
                    {"files": [{**f, "uploadMode": m} for f, m in zip(files, modes, strict=True)]}
                )
            if path.endswith(".git/info/lfs/objects/batch"):
                objects = [
                    {**o, "actions": {"upload": {"href": f"{hub.url}/upload/{o['oid']}"}}}
                    for o in json.loads(body)["objects"]
                ]
                return self.give_json({"transfer": "basic", "objects": objects})
            assert path.endswith("/commit/main"), path
            folder = hub.repos[repo]["main"]
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
                elif line["key"] == "lfsFile":
                    (hub.root / value["oid"]).rename(folder / value["path"])
            return self.give_json(
                {"commitUrl": f"{hub.url}/{repo}/commit/main", "commitOid": COMMITS["main"]}
            )

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path).removeprefix("/api/models").strip("/")
            owner, name, verb, *rest = [
                *path.split("/"),
                *([] if path.count("/") > 1 else ["revision", "main"]),
            ]
            repo = f"{owner}/{name}"
            hub.asked.append(path)
            if repo not in hub.repos:
                return self.refuse(401, "RepoNotFound")
            if repo in hub.gated and self.headers.get("Authorization") != f"Bearer {hub.token}":
                return self.refuse(403, "GatedRepo")
            commits = {COMMITS.get(name, name): folder for name, folder in hub.repos[repo].items()}
            commit = COMMITS.get(rest[0], rest[0])
            if commit not in commits:
                return self.refuse(404, "RevisionNotFound")
            folder = commits[commit]
            if verb == "revision":
                return self.give(
                    json.dumps({"id": repo, "sha": commit}).encode(),
                    {"Content-Type": "application/json"},
                )
            if verb == "tree":
                files = [
                    {
                        "type": "file",
                        "path": str(p.relative_to(folder)),
                        "size": p.stat().st_size,
                        "oid": "c" * 40,
                    }
                    for p in sorted(folder.rglob("*"))
                    if p.is_file()
                ]
                return self.give(json.dumps(files).encode(), {"Content-Type": "application/json"})
            body = (folder / "/".join(rest[1:])).read_bytes()
            etag = hashlib.sha256(body).hexdigest()
            return self.give(body, {"ETag": f'"{etag}"', "X-Repo-Commit": commit})

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
