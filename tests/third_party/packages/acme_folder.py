"""What a third party's package looks like that brings a directory: a folder that every machine of the fleet has."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from urllib.parse import quote, unquote

import msgspec

from statelink.errors import ConfigError
from statelink.rendezvous import Directory, DirectoryConfig, Endpoint, Instance, Rank, decode_json, parse_endpoint


class Options(msgspec.Struct, frozen=True):
    """What may stand in ``rendezvous_options``: seconds after which a silent rank expires."""

    lifetime: float = 15.0


class Entry(msgspec.Struct, frozen=True):
    """What a rank writes into its file."""

    link: str
    address: str
    ranks: int


class FolderDirectory(Directory):
    """A rank is a file, which its link touches again and again. An old file is of a process that was killed."""

    Options = Options

    def __init__(self, config: DirectoryConfig, *, link: str) -> None:
        self._config = config
        self._link = link
        self._trouble = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def check(cls, config: DirectoryConfig) -> None:
        if not folder(config).is_dir():
            raise ConfigError(f"{config.address} is no folder", hint="write folder:///path, and mount it here")

    @classmethod
    def instances(cls, config: DirectoryConfig) -> list[Instance]:
        found = {unquote(each.name): entries(config, each.name) for each in folder(config).iterdir()}
        return [seen(name, found[name]) for name in sorted(found) if found[name]]

    def register(self, instance: str, rank: int, ranks: int, address: str) -> None:
        path = folder(self._config) / quote(instance, safe="") / str(rank)
        raw = msgspec.json.encode(Entry(self._link, address, ranks))
        self._thread = threading.Thread(target=self._stay, args=(path, raw), name="acme-folder", daemon=True)
        self._thread.start()

    def resolve(self, instance: str) -> tuple[Endpoint, ...] | None:
        found = seen(instance, entries(self._config, quote(instance, safe="")))
        return tuple(parse_endpoint(each.address) for each in found.registered) if found.complete else None

    def explain(self, instance: str | None) -> tuple[str, str]:
        where = self._config.address
        if self._trouble:
            return f"{where} cannot be written: {self._trouble}", "is it mounted?"
        return ("", "") if instance is None else (f"not every rank has a file in {where}", "is prefill running?")

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _stay(self, path: Path, raw: bytes) -> None:
        """The directory's own thread: writes the file, and touches it until the directory is closed."""
        written = False
        while True:
            try:
                if not written or not path.exists():
                    path.parent.mkdir(exist_ok=True)
                    path.with_suffix(".new").write_bytes(raw)
                    path.with_suffix(".new").replace(path)  # nobody reads half of it
                    written = True
                elif path.read_bytes() == raw:  # otherwise a later process has taken the place
                    os.utime(path)
                self._trouble = ""
            except OSError as error:
                self._trouble = str(error)
            if self._closing.wait(self._config.options.lifetime / 3):
                break
        with contextlib.suppress(OSError):  # otherwise it expires
            if path.read_bytes() == raw:
                path.unlink()


def folder(config: DirectoryConfig) -> Path:
    return Path(config.address.removeprefix("folder://"))


def entries(config: DirectoryConfig, place: str) -> dict[int, Entry]:
    """The files of an instance that are fresh, by rank."""
    fresh = time.time() - config.options.lifetime
    found: dict[int, Entry] = {}
    for each in (folder(config) / place).glob("*"):
        with contextlib.suppress(OSError, ValueError):  # it has just gone, or somebody else wrote it
            if each.stat().st_mtime > fresh:
                found[int(each.name)] = decode_json(each.read_bytes(), Entry)
    return found


def seen(instance: str, found: dict[int, Entry]) -> Instance:
    ranks = {each.ranks for each in found.values()}
    registered = tuple(Rank(number, found[number].address, found[number].link) for number in sorted(found))
    return Instance(instance, max(ranks, default=0), registered, "its ranks disagree" if len(ranks) > 1 else "")
