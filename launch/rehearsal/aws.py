"""AWS on the loopback: a moto server that remembers the training jobs that were asked for."""

import io
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

from launch import environment


class _Silent(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:
        """A line a request would bury the rehearsal's own."""


class LoopbackAws:
    """The server: `endpoint` is where it listens, `requests` are the CreateTrainingJob bodies.

    Requests are kept as they arrived, because moto alters the job that it describes afterwards.
    """

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._serve, threaded=True, request_handler=_Silent
        )
        self._thread = threading.Thread(target=self._server.serve_forever, name="moto")

    @property
    def endpoint(self) -> str:
        """The address that stands for all of AWS."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, region: str) -> dict[str, str]:
        """The variables that make any AWS client talk to this server, and to nothing else."""
        return {
            **environment.NO_ACCOUNT,
            "AWS_ENDPOINT_URL": self.endpoint,
            "S3_ENDPOINT_URL": self.endpoint,  # read by the container's toolkit
            "AWS_REGION": region,
            "AWS_DEFAULT_REGION": region,
            "NO_PROXY": "*",
            "no_proxy": "*",
        }

    def _serve(self, environ: dict[str, Any], start_response: Any) -> Any:
        if environ.get("HTTP_X_AMZ_TARGET") == "SageMaker.CreateTrainingJob":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            self.requests.append(json.loads(body))
            environ["wsgi.input"] = io.BytesIO(body)
        return self._moto(environ, start_response)

    def __enter__(self) -> "LoopbackAws":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def loopback_aws(region: str) -> Iterator[LoopbackAws]:
    """Run the server, with this process's own AWS clients bound to it until the block ends."""
    with LoopbackAws() as aws, environment.replaced(aws.environment(region)):
        yield aws
