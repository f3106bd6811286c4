"""Real servers of etcd: one or several members, with TLS and users or without, that can be killed and started again."""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
import shutil
import signal
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 30.0
PROGRAM = shutil.which("etcd")


class Member:
    """One server. It comes back with its data, at the same ports."""

    def __init__(self, folder: Path, name: str, ports: tuple[int, int], flags: list[str], scheme: str) -> None:
        self.name = name
        self.client, self.peer = ports
        self._scheme = scheme
        self._log = folder / f"{name}.log"
        self._command = [
            str(PROGRAM),
            *("--name", name, "--data-dir", str(folder / name), "--logger", "zap", "--log-level", "error"),
            *("--listen-client-urls", f"{scheme}://127.0.0.1:{self.client}"),
            *("--advertise-client-urls", f"{scheme}://127.0.0.1:{self.client}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{self.peer}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{self.peer}"),
            *flags,
        ]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(PATIENCE)
            self.process = None

    def stop(self) -> None:
        """Let it stand still: it takes connections and says nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")[-2000:]


class Etcd:
    """A cluster.

    Args:
        folder: Where its data lies.
        members: How many.
        certificates: With TLS: the server's, and the authority of clients.
    """

    def __init__(self, folder: Path, members: int = 1, certificates: Certificates | None = None) -> None:
        scheme, flags = "http", []
        self._context: ssl.SSLContext | None = None
        if certificates is not None:
            scheme = "https"
            flags = ["--cert-file", str(certificates.server), "--key-file", str(certificates.server)]
            flags += ["--trusted-ca-file", str(certificates.authority), "--client-cert-auth"]
            self._context = ssl.create_default_context(cafile=str(certificates.authority))
            self._context.load_cert_chain(str(certificates.client))
        taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(2 * members)]
        ports = [each.getsockname()[1] for each in taken]
        for each in taken:
            each.close()
        pairs = list(zip(ports[::2], ports[1::2], strict=True))
        whole = ",".join(f"m{number}=http://127.0.0.1:{peer}" for number, (_, peer) in enumerate(pairs))
        # One member needs nobody's vote, and several need time for it beside everything else that runs.
        pace = ("20", "200") if members == 1 else ("100", "1000")
        flags += ["--initial-cluster", whole, "--heartbeat-interval", pace[0], "--election-timeout", pace[1]]
        self.members = [Member(folder, f"m{number}", pair, flags, scheme) for number, pair in enumerate(pairs)]
        self._scheme = scheme
        for member in self.members:
            member.start()
        self.wait()

    @property
    def address(self) -> str:
        """What a link is configured with, but for the prefix."""
        hosts = ",".join(f"127.0.0.1:{member.client}" for member in self.members)
        return f"{'etcds' if self._context else 'etcd'}://{hosts}"

    def wait(self) -> None:
        """Wait until it answers."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                self.ask("/v3/kv/range", {"key": pack("/")})
                return
            except (OSError, ssl.SSLError) as error:
                if isinstance(error, urllib.error.HTTPError) and error.code in (400, 401, 403):
                    return  # it wants a user
                assert time.monotonic() < end, [member.said for member in self.members]
                time.sleep(0.02)

    def ask(self, path: str, body: dict[str, Any], token: str = "", member: Member | None = None) -> dict[str, Any]:
        """Ask a member, by default the first that runs, without Statelink's help."""
        asked = member or next(each for each in self.members if each.process is not None)
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(
            f"{self._scheme}://127.0.0.1:{asked.client}{path}", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(request, timeout=10, context=self._context) as response:
            answer: dict[str, Any] = json.loads(response.read())
            return answer

    def leader(self) -> Member:
        """The member that leads."""
        for member in self.members:
            if member.process is not None:
                seen = self.ask("/v3/maintenance/status", {}, member=member)
                if seen["leader"] == seen["header"]["member_id"]:
                    return member
        raise AssertionError("nobody leads")

    def watchers(self) -> int:
        """How many watches the first member serves, as it counts them itself. Without TLS."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.members[0].client}/metrics", timeout=10) as response:
            return int(response.read().decode().partition("\netcd_debugging_mvcc_watcher_total ")[2].split()[0])

    def put(self, key: str, value: bytes) -> None:
        self.ask("/v3/kv/put", {"key": pack(key), "value": base64.b64encode(value).decode()})

    def keys(self, prefix: str) -> dict[str, bytes]:
        """Keys below a prefix and their values."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self.ask("/v3/kv/range", {"key": pack(prefix), "range_end": pack(end)})
        return {
            base64.b64decode(each["key"]).decode(): base64.b64decode(each["value"]) for each in found.get("kvs", ())
        }

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def start(self) -> None:
        """Start those that do not run."""
        for member in self.members:
            if member.process is None:
                member.start()
        self.wait()

    def add_user(self, name: str, password: str, prefix: str) -> None:
        """Add a user that may read and write below a prefix."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        self.ask("/v3/auth/role/add", {"name": name})
        perm = {"permType": "READWRITE", "key": pack(prefix), "range_end": pack(end)}
        self.ask("/v3/auth/role/grant", {"name": name, "perm": perm})
        self.ask("/v3/auth/user/add", {"name": name, "password": password})
        self.ask("/v3/auth/user/grant", {"user": name, "role": name})

    def lock(self, password: str) -> str:
        """Turn authentication on; a token of root's."""
        self.ask("/v3/auth/user/add", {"name": "root", "password": password})
        self.ask("/v3/auth/role/add", {"name": "root"})
        self.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        self.ask("/v3/auth/enable", {})
        return str(self.ask("/v3/auth/authenticate", {"name": "root", "password": password})["token"])


def pack(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


class Certificates:
    """An authority, and what it has signed: each a file in PEM with its key, but for the authority.

    Attributes:
        authority: The authority's certificate.
        server: The certificate of 127.0.0.1 and its key.
        client: A client's without a common name, and its key.
        named: The same with a common name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "authority")])
        self.authority = self._make("authority", self._key, authority=True)
        self.server = self._make("server", ec.generate_private_key(ec.SECP256R1()))
        self.client = self._make("", ec.generate_private_key(ec.SECP256R1()))
        self.named = self._make("client", ec.generate_private_key(ec.SECP256R1()))

    def _make(self, name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool = False) -> Path:
        begin = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=1)
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)] if name else []))
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(alternative, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        text = made.public_bytes(serialization.Encoding.PEM)
        if not authority:
            text += key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        path = self._folder / f"{name or 'nameless'}.pem"
        path.write_bytes(text)
        path.chmod(0o600)
        return path
