"""One HTTP exchange with a bootstrap server. Blocks, so no scheduler's thread calls it."""

from __future__ import annotations

import http.client
import json
from typing import Any

from ._server import MAX_BODY, PATH, SCHEMA

__all__ = ["ask", "put"]


def put(address: str, row: dict[str, Any], timeout: float) -> None:
    """Tell the server at ``address`` (``host:port``) where a rank is.

    Raises:
        OSError: It does not answer.
        ValueError: It refuses.
    """
    status, content = _exchange(address, "PUT", json.dumps(row).encode(), timeout)
    if status != 200:
        raise ValueError(f"the bootstrap server at {address} answered {status}: {content.get('error', '')}")


def ask(address: str, timeout: float) -> dict[str, Any]:
    """What the server at ``address`` (``host:port``) knows of prefill's ranks.

    Raises:
        OSError: It does not answer.
        ValueError: It is another server, or not all ranks have told it where they are.
    """
    status, content = _exchange(address, "GET", None, timeout)
    if status == 503 and "missing" in content:
        raise ValueError(f"prefill at {address} is starting: {content['missing']} are missing")
    addresses = content.get("addresses")
    known = content.get("schema") == SCHEMA and isinstance(content.get("instance"), str)
    if status != 200 or not known or not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
        raise ValueError(
            f"no prefill server of the same statelink-sglang answers at {address} (HTTP status {status}); "
            "it must be started with --disaggregation-transfer-backend statelink, too"
        )
    return content


def _exchange(address: str, method: str, body: bytes | None, timeout: float) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(address, timeout=timeout)
    try:
        connection.request(method, PATH, body)
        answer = connection.getresponse()
        raw = answer.read(MAX_BODY)
    except http.client.HTTPException as error:
        raise ValueError(f"no bootstrap server answers at {address}: {type(error).__name__}") from error
    finally:
        connection.close()
    try:
        content = json.loads(raw)
    except ValueError:
        content = {}
    return answer.status, content if isinstance(content, dict) else {}
