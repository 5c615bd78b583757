"""In place of the object store: moto, with the bucket of the arguments and an answer at /healthz.

It keeps objects in memory and looks at no signature: who asks with a wrong key is served as well.
"""  # noqa: INP001 - a script of an image

import argparse
import signal
from collections.abc import Callable, Iterable
from threading import Event, Thread
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

_PORT = 8333
_REGION = "us-east-1"
_Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


def with_health(application: _Application, is_ready: Event) -> _Application:
    """Return the application with one path more."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") == "/healthz":
            status = "200 OK" if is_ready.is_set() else "503 Service Unavailable"
            start_response(status, [("content-length", "0")])
            return [b""]
        return application(environ, start_response)

    return answer


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser()
    parser.add_argument("-bucket", required=True)
    arguments, _ = parser.parse_known_args()
    is_ready, is_stopped = Event(), Event()

    def stop(_number: int, _frame: object) -> None:
        is_stopped.set()

    signal.signal(signal.SIGTERM, stop)
    application = with_health(DomainDispatcherApplication(create_backend_app), is_ready)
    server = make_server("0.0.0.0", _PORT, application, threaded=True)
    Thread(target=server.serve_forever, daemon=True).start()
    boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{_PORT}",
        region_name=_REGION,
        aws_access_key_id="any",
        aws_secret_access_key="any",  # noqa: S106 - nobody looks at it
    ).create_bucket(Bucket=arguments.bucket)
    is_ready.set()
    is_stopped.wait()


if __name__ == "__main__":
    main()
