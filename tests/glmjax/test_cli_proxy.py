"""``glmjax proxy``: URLs are checked, and engines are looked at before calls come."""

import contextlib
import http.server
import json
import logging
import threading

import pytest

from glmjax.cli_proxy import engine_url, warn_of_engines
from glmjax.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("http://127.0.0.1:8001", "http://127.0.0.1:8001"),
        ("https://engine.example/", "https://engine.example"),
        ("http://[::1]:8001/v1", "http://[::1]:8001"),
        ("http://gateway/prefill/v1/", "http://gateway/prefill"),
    ],
)
def test_a_url_is_taken_with_or_without_its_end(text, url):
    assert engine_url("PREFILL", text) == url


@pytest.mark.parametrize(
    "text",
    [
        *("", "127.0.0.1:8001", "localhost", "ftp://host", "http://", "http://:8001", "http://host:port"),
        *("http://host:99999", "http://host:0", "http://[::1", "http://a b", "http://host/ ", "http://host?x=1"),
        *("http://host#x", "http://me:secret@host", "http://xn--\xf1/"),
    ],
)
def test_what_is_no_url_of_an_engine_is_refused(text):
    with pytest.raises(ConfigError, match=r"PREFILL must be a URL such as http://127\.0\.0\.1:8001, got "):
        engine_url("PREFILL", text)


@contextlib.contextmanager
def answering(body, status=200):
    """A server that answers so, whatever it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def says(**values):
    return json.dumps(values).encode()


def test_engines_of_the_right_roles_give_no_warning(caplog):
    with answering(says(version="1", role="prefill")) as prefill, answering(says(version="1", role="decode")) as decode:
        warn_of_engines({"prefill": prefill, "decode": decode})
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("body", "status", "warning"),
    [
        (says(version="1", role="decode"), 200, "the engine at URL has the role decode: expected"),
        (says(version="1"), 200, "the engine at URL has no role: expected"),
        (says(version="1"), 404, "what answers at URL is no glmjax engine: expected"),
        (b"hello", 200, "what answers at URL is no glmjax engine: expected"),
        (b"[1]", 200, "what answers at URL is no glmjax engine: expected"),
    ],
)
def test_who_is_not_the_engine_that_is_meant_is_named(caplog, body, status, warning):
    with answering(body, status) as url:
        warn_of_engines({"prefill": url})
    assert caplog.messages == [f"{warning.replace('URL', url)} one served with --role prefill"]
    assert caplog.records[0].levelno == logging.WARNING


def test_an_engine_that_cannot_be_reached_is_named(caplog):
    with answering(b"") as url:
        pass
    warn_of_engines({"decode": url})
    (message,) = caplog.messages
    assert message.startswith(f"the decode engine at {url} cannot be reached")
