"""What the Hugging Face hub says of one model, by a server on this machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

NAME, COMMIT = "someone/tiny", "c0ffee" + "0" * 34


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve `folder` as NAME: the server's URL, and the names of files as they are fetched."""
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(False)

        def do_GET(self) -> None:
            self.answer(True)

        def answer(self, is_whole: bool) -> None:
            path, _, _ = self.path.partition("?")
            name = path.removeprefix(f"/{NAME}/resolve/main/").removeprefix(
                f"/{NAME}/resolve/{COMMIT}/"
            )
            if path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
                files = [{"rfilename": file.name} for file in folder.iterdir()]
                found = {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": files}
                self.give(json.dumps(found).encode(), is_whole)
            elif name != path and (folder / name).is_file():
                if is_whole:
                    fetched.append(name)
                self.give((folder / name).read_bytes(), is_whole)
            else:
                code = "EntryNotFound" if NAME in path else "RepoNotFound"
                self.send_response(404)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "0")
                self.end_headers()

        def give(self, content: bytes, is_whole: bool) -> None:
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if is_whole:
                self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """It says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        server.server_close()
