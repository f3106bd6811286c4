"""Keys from files, from the environment and from the command that makes them."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import zmq
from click.testing import CliRunner
from tests.helpers.links import key_pair

from statelink import Keys, LinkConfig
from statelink.cli import main
from statelink.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

PUBLIC, SECRET = key_pair(0)
OTHER, THIRD = key_pair(1)[0], key_pair(2)[0]


def run(*arguments: object, expect: int = 0) -> str:
    result = CliRunner().invoke(main, ["keys", *map(str, arguments)])
    assert result.exit_code == expect, result.output
    return result.output


def private(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def refused(**fields: object) -> str:
    with pytest.raises(ConfigError) as caught:
        LinkConfig.read({"role": "decode", "backend": "tcp", "keys": {k: str(v) for k, v in fields.items()}})
    assert caught.value.code == "config.keys"
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_a_new_key_is_private_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    made = tmp_path / "link.key"
    before = os.umask(umask)
    try:
        printed = run("new", made)
    finally:
        os.umask(before)
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "link.key.pub").stat().st_mode) == 0o644
    secret, public = made.read_text().strip(), (tmp_path / "link.key.pub").read_text().strip()
    assert zmq.curve_public(secret.encode()).decode() == public
    assert public in printed.splitlines()
    assert "allow_file" in printed
    assert secret not in printed
    assert run("show", made) == f"{public}\n"
    assert "holds a public key" in run("show", f"{made}.pub", expect=1)


@pytest.mark.parametrize("taken", ["link.key", "link.key.pub", "dangling"])
def test_nothing_is_overwritten(tmp_path: Path, taken: str) -> None:
    if taken == "dangling":
        (tmp_path / "link.key").symlink_to(tmp_path / "elsewhere")
    else:
        (tmp_path / taken).write_text("mine")
    assert "exists already" in run("new", tmp_path / "link.key", expect=1)
    left = {each.name for each in tmp_path.iterdir()}
    assert left == {"link.key" if taken == "dangling" else taken}
    assert taken == "dangling" or (tmp_path / taken).read_text() == "mine"


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert "cannot be written" in run("new", tmp_path / "no" / "link.key", expect=1)


def test_keys_from_files(tmp_path: Path) -> None:
    secret = private(tmp_path / "secret", f"# made on Monday\n\n{SECRET}\n")
    allowed = tmp_path / "allowed"
    allowed.write_text(f"#the fleet\n{OTHER}  prefill 7\n#\n\n  # {PUBLIC}\n{THIRD}\n{OTHER}\n")
    keys = Keys(secret_file=str(secret), allow_file=str(allowed), allow=(THIRD,))
    assert (keys.secret, keys.public, keys.allow) == (SECRET, PUBLIC, (THIRD, OTHER))
    assert SECRET not in repr(keys)


def test_an_allow_directory(tmp_path: Path) -> None:
    (tmp_path / "b.pub").write_text(OTHER)
    (tmp_path / "a.pub").write_text(PUBLIC)
    (tmp_path / "secret").write_text("not looked at")
    assert Keys(secret=SECRET, allow_file=str(tmp_path)).allow == (PUBLIC, OTHER)
    (tmp_path / "c.pub").write_text(f"{OTHER}\n\nrubbish\n")
    assert f"{tmp_path}/c.pub, line 3: no CURVE key" in refused(secret=SECRET, allow_file=tmp_path)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o620, 0o660, 0o666, 0o777])
def test_a_secret_that_others_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    secret = private(tmp_path / "secret", SECRET)
    secret.chmod(mode)
    assert f"{secret} is open to others: its mode is {mode:04o}\nhint: chmod 600" in refused(secret_file=secret)


@pytest.mark.parametrize("mode", [0o400, 0o600, 0o440])
def test_a_secret_as_containers_mount_it(tmp_path: Path, mode: int) -> None:
    secret = private(tmp_path / "secret", SECRET)
    secret.chmod(mode)
    (tmp_path / "link").symlink_to(secret)
    assert Keys(secret_file=str(tmp_path / "link")).secret == SECRET


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "it has 0 lines with a key"),
        (f"{SECRET}\n{SECRET}\n", "it has 2 lines with a key"),
        (f"\n{SECRET[:-1]}\n", "line 2: no CURVE key"),
        (f"{SECRET} mine\n", "line 1: no CURVE key"),
        (f"{SECRET}x", "line 1: no CURVE key"),
        ("\n\nschlüssel", "line 3: no CURVE key: it is not ASCII text"),
        ("# \n" * (2 << 20), "longer than"),
    ],
)
def test_malformed_secrets(tmp_path: Path, text: str, cause: str) -> None:
    assert cause in refused(secret_file=private(tmp_path / "secret", text))


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert "No such file" in refused(secret_file=tmp_path / "none")
    assert "statelink keys new" in refused(secret_file=tmp_path / "none")
    assert "it is not a file" in refused(secret_file=tmp_path / "pipe")
    assert "cannot be read" in refused(secret_file=tmp_path)
    assert "No such file" in refused(secret=SECRET, allow_file=tmp_path / "none")


def test_one_secret_and_no_more(tmp_path: Path) -> None:
    assert "both of 'secret' and 'secret_file'" in refused(secret=SECRET, secret_file=tmp_path)
    assert "neither of" in refused(allow_file=tmp_path)


def test_keys_from_the_environment(tmp_path: Path) -> None:
    secret = private(tmp_path / "secret", SECRET)
    allowed = tmp_path / "allowed"
    allowed.write_text(THIRD)
    assert Keys.from_environment({}) is None
    assert Keys.from_environment({"STATELINK_SECRET": ""}) is None
    keys = Keys.from_environment(
        {
            "STATELINK_SECRET_FILE": str(secret),
            "STATELINK_ALLOW_FILE": str(allowed),
            "STATELINK_ALLOW": f"{OTHER}, {PUBLIC}",
        }
    )
    assert keys == Keys(secret=SECRET, allow=(OTHER, PUBLIC, THIRD))
    assert Keys.from_environment({"STATELINK_SECRET": SECRET}) == Keys(secret=SECRET)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"STATELINK_ALLOW": OTHER}, "neither of 'secret' and 'secret_file' are given (set: STATELINK_ALLOW)"),
        ({"STATELINK_SECRET": SECRET, "STATELINK_ALLOW": "x"}, "keys.allow is not a CURVE key"),
        ({"STATELINK_SECRET": SECRET, "STATELINK_SECRET_FILE": "x"}, "(set: STATELINK_SECRET, STATELINK_SECRET_FILE)"),
    ],
)
def test_an_environment_that_is_wrong(variables: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match="the keys in the environment cannot be used") as caught:
        Keys.from_environment(variables)
    assert text in str(caught.value)
    assert SECRET not in str(caught.value)


OPEN = """
import numpy as np, statelink, statelink.wire
from statelink import state
pages = np.zeros((4, 16, 1, 8), np.uint8)
inventory = state.describe("p", [state.kv_pages({0: (pages, pages.copy())}, heads=1)])
config = {"role": "prefill", "backend": "tcp", "listen": "tcp://0.0.0.0:0", "advertise": "127.0.0.1"}
with statelink.open(config, inventory) as link:
    print(statelink.wire.parse_endpoint(link.address).key)
"""


def test_a_link_takes_them_from_the_environment(tmp_path: Path) -> None:
    """It listens beyond loopback, which needs keys."""
    secret = private(tmp_path / "secret", SECRET)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STATELINK_")}
    program = [sys.executable, "-c", OPEN]
    env = {**clean, "STATELINK_SECRET_FILE": str(secret), "STATELINK_ALLOW": OTHER}
    done = subprocess.run(program, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == f"{PUBLIC}\n"
    done = subprocess.run(program, env=clean, capture_output=True, text=True, timeout=60, check=False)
    assert "without keys" in done.stderr


def test_a_public_key_in_the_place_of_the_secret_one_is_refused(tmp_path: Path) -> None:
    run("new", tmp_path / "link")
    public = tmp_path / "link.pub"
    public.chmod(0o600)
    for said in (refused(secret_file=public), run("show", public, expect=1)):
        assert f"{public} holds a public key" in said
        assert f"hint: name {tmp_path / 'link'}" in said


def test_a_secret_key_in_the_place_of_the_allow_list_is_refused(tmp_path: Path) -> None:
    for name in ("link", "other"):
        run("new", tmp_path / name)
    for name in ("link", "other"):
        said = refused(secret_file=tmp_path / "link", allow_file=tmp_path / name)
        assert f"{tmp_path / name} holds a secret key" in said
        assert f"hint: name {tmp_path / name}.pub" in said
    allowed = Keys(secret_file=str(tmp_path / "link"), allow_file=str(tmp_path / "other.pub")).allow
    assert allowed == ((tmp_path / "other.pub").read_text().strip(),)
    assert "holds this link's secret key" in refused(secret=SECRET, allow_file=private(tmp_path / "list", SECRET))


@pytest.mark.parametrize("room", [0, 41])
def test_a_disk_that_is_full_leaves_no_half_made_key(tmp_path: Path, room: int) -> None:
    """With room for 41 bytes, the secret key fits, and a public key that is longer does not."""
    made = tmp_path / "link"

    def full() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))

    code = "from statelink.cli import main; main()"
    if room:
        code = f"import zmq; zmq.curve_keypair = lambda: (b'x' * 90, b'y' * 40); {code}"
    done = subprocess.run(
        [sys.executable, "-B", "-c", code, "keys", "new", str(made)],
        preexec_fn=full,
        stderr=subprocess.PIPE,
        check=False,
        text=True,
    )
    assert done.returncode == 1
    assert "cannot be written" in done.stderr
    assert list(tmp_path.iterdir()) == []
    run("new", made)
