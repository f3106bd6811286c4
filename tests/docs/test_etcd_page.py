"""The commands of docs/etcd.md that make a user, run as a reader would, at a fresh server."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.helpers.etcd import Etcd

from statelink.config import LinkConfig
from statelink.errors import PeerError
from statelink.rendezvous import list_instances

PAGE = (Path(__file__).parents[2] / "docs" / "etcd.md").read_text()


def test_the_steps_that_make_a_user(tmp_path: Path, etcd_program: None) -> None:
    if shutil.which("etcdctl") is None:
        pytest.skip("etcdctl is not installed: apt-get install etcd-client")
    (steps,) = re.findall(r"<!-- tested by tests/docs/test_etcd_page.py -->\n```sh\n(.*?)```", PAGE, re.DOTALL)
    # The command asks a terminal for the password of each user, which may also follow the name.
    steps = re.sub(r"^(etcdctl user add \S+)$", r"\1:good", steps, flags=re.MULTILINE)
    folder = tmp_path / "etcd"
    folder.mkdir()
    server = Etcd(folder)
    try:
        environment = {**os.environ, "ETCDCTL_ENDPOINTS": server.address.replace("etcd://", "http://")}
        done = subprocess.run(
            ["/bin/bash", "-e", "-c", steps], env=environment, capture_output=True, text=True, check=False, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert "Authentication Enabled" in done.stdout
        (password := tmp_path / "password").write_text("good")
        password.chmod(0o600)
        config = {
            "role": "decode",
            "backend": "tcp",
            "rendezvous_options": {"user": "fleet-a", "password_file": str(password)},
        }
        allowed = LinkConfig.read({**config, "rendezvous": f"{server.address}/fleet-a"})
        assert list_instances(allowed, keys=None) == []
        elsewhere = LinkConfig.read({**config, "rendezvous": f"{server.address}/fleet-b"})
        with pytest.raises(PeerError, match="permission denied"):
            list_instances(elsewhere, keys=None)
    finally:
        server.kill()
