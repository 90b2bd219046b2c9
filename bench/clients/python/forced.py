"""A proxy before the server that makes any model call a coding agent's tool, and keeps what the agent asked."""

import http.client
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from checks import URL

COMMAND = "cat notes.txt"
NOTES = "one two three"
HOP_BY_HOP = ("host", "connection", "content-length", "transfer-encoding")


class Forced:
    """The first request with tools gets `choice`, and each tool that `schemas` names its schema there."""

    def __init__(self, choice=None, schemas=None, schema_field="parameters"):
        self.asked = []
        """Bodies with tools, as the agent sent them."""
        forced = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if self.command == "POST" and '"tools"' in (text := body.decode()):
                    forced.asked.append(json.loads(text))
                    if choice is not None and len(forced.asked) == 1:
                        body = json.dumps(forced._force(json.loads(text), choice, schemas, schema_field)).encode()
                kept = {name: value for name, value in self.headers.items() if name.lower() not in HOP_BY_HOP}
                server = http.client.HTTPConnection(urlsplit(URL).netloc, timeout=600)
                server.request(self.command, self.path, body, {**kept, "Content-Length": str(len(body))})
                told = server.getresponse()
                self.send_response(told.status)
                for name, value in told.getheaders():
                    if name.lower() not in HOP_BY_HOP:
                        self.send_header(name, value)
                self.end_headers()
                while piece := told.read1(65536):
                    self.wfile.write(piece)
                    self.wfile.flush()
                server.close()

            do_GET = do_HEAD = do_POST = answer

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @staticmethod
    def _force(body, choice, schemas, schema_field):
        for tool in body["tools"]:
            if schemas and tool.get("name") in schemas:
                tool[schema_field] = schemas[tool["name"]]
        return {**body, "tool_choice": choice}

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()


def only(name, value):
    """A schema of one property with one value."""
    return {
        "type": "object",
        "properties": {name: {"type": "string", "enum": [value]}},
        "required": [name],
        "additionalProperties": False,
    }
