"""An S3 store with one bucket, by moto, that can be told to misbehave."""

import threading
import urllib.request
from collections.abc import Callable, Iterable
from typing import Any


class S3Server:
    """Serves ``s3://bucket`` in `environment` until it is closed.

    Set `fault` to a function of (method, path) that returns an HTTP status to answer with, behind "done, " after the
    request was carried out; or None to have it answered as usual.
    """

    def __init__(self) -> None:
        # moto takes half a second to import, which most tests do without.
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        class SilentHandler(MotoRequestHandler):
            def log(self, *_: Any) -> None:
                pass

        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=SilentHandler)
        self.fault: Callable[[str, str], str | None] | None = None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        urllib.request.urlopen(urllib.request.Request(f"{url}/bucket", method="PUT")).close()

    def close(self) -> None:
        self._server.shutdown()

    def _answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        status = self.fault and self.fault(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if status:
            if status.startswith("done, ") and (status := status.removeprefix("done, ")):
                list(self._application(environ, lambda *_: None))
            else:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(status, [("Content-Length", "0")])
            return [b""]
        return self._application(environ, start_response)
