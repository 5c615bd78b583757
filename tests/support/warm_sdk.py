"""Lets the OpenAI SDK build its types before servers share an event loop with it.

The first response costs the SDK half a second, the first stream a second, and both more on a busy
machine. Within a loop that serves as well, deadlines would pass meanwhile.
"""

import http.server
import json
import threading
from typing import Any

import openai

_PART = {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}
_ITEM = {"id": "m", "type": "message", "status": "completed", "role": "assistant"}
_RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "m",
    "output": [_ITEM | {"content": [_PART]}],
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}


class _Answers(http.server.BaseHTTPRequestHandler):
    """Answers every request with the same response, whole or as a stream."""

    def do_POST(self) -> None:
        """Answer one request."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, body = "application/json", json.dumps(_RESPONSE).encode()
        if asked.get("stream"):
            kind, body = "text/event-stream", _events()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        """Write no log."""


def _events() -> bytes:
    written = list[bytes]()
    for number, name in enumerate(("response.created", "response.completed")):
        event = {"type": name, "sequence_number": number, "response": _RESPONSE}
        written.append(f"event: {name}\ndata: {json.dumps(event)}\n\n".encode())
    return b"".join(written)


def warm_sdk() -> None:
    """Ask a server in a thread for a response and for a stream."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with openai.OpenAI(api_key="x", base_url=url, max_retries=0) as sdk:
            sdk.responses.create(model="m", input="x")
            with sdk.responses.stream(model="m", input="x") as stream:
                stream.until_done()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
