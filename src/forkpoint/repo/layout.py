"""A repository on disk: where its parts lie, its settings, and the lock that says it is open.

<path>/.forkpoint/            mode 0700
    config.json               format, version, repository id, namespace; written last, so that a half-made one is none
    objects/                  the store
    catalog.db                the catalog; catalog.db.bak is the one that a rebuild replaced
    quarantine/               damaged objects that fsck moved aside
    lock                      held shared by everyone who has the repository open, alone by who makes it or replaces its catalog
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, final

from forkpoint.errors import Conflict, Corrupt, Incompatible, InvalidInput, NotFound, Unavailable
from forkpoint.ids import ObjectKind
from forkpoint.store.layout import Layout as StoreLayout

FOLDER: Final = ".forkpoint"
FORMAT: Final = "forkpoint.repository"
VERSION: Final = 1
MAX_NAMESPACE_BYTES: Final = 255
DEFAULT_NAMESPACE: Final = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Paths below the folder of a repository."""

    folder: Path

    @staticmethod
    def at(path: Path | str) -> Layout:
        """The layout of the repository in ``path``, which may also be the ``.forkpoint`` folder itself."""
        base = Path(path).absolute()
        return Layout(folder=base if base.name == FOLDER else base / FOLDER)

    @property
    def config(self) -> Path:
        return self.folder / "config.json"

    @property
    def objects(self) -> Path:
        return self.folder / "objects"

    @property
    def catalog(self) -> Path:
        return self.folder / "catalog.db"

    @property
    def quarantine(self) -> Path:
        return self.folder / "quarantine"

    @property
    def lock(self) -> Path:
        return self.folder / "lock"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What ``config.json`` says. ``repository_id`` is random and tells copies of one repository from others."""

    repository_id: str
    namespace: str


def discover(start: Path | str) -> Layout:
    """The repository in ``start`` or the nearest folder above it, also one that lost its settings and still holds objects.

    Raises:
        NotFound: ``not_found.repository``.
    """
    base = Path(start).absolute()
    for folder in (base, *base.parents):
        layout = Layout.at(folder)
        if layout.config.is_file() or holds_objects(layout):
            return layout
    raise NotFound(
        f"no repository in {base} or any folder above; run forkpoint init, or set FORKPOINT_DIR",
        code="repository", path=str(base),
    )  # fmt: skip


def claim_vacant(layout: Layout, namespace: str) -> Occupancy:
    """Make the folder and hold it alone, for a repository with this namespace to be made in it.

    Raises:
        Conflict: ``conflict.repository`` when there is a repository already, or somebody else is making one there.
        InvalidInput: ``invalid_input.namespace``.
        Unavailable: ``unavailable.repository`` when the folder cannot be made.
    """
    _check_namespace(namespace)
    _check_vacant(layout)
    try:
        layout.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        layout.folder.chmod(0o700)
    except OSError as error:
        raise _unavailable("make", layout.folder, error) from error
    occupancy = _claim(layout)
    try:
        _check_vacant(layout)  # somebody else may have made one before it could be claimed
    except Conflict:
        occupancy.end()
        raise
    return occupancy


def _check_vacant(layout: Layout) -> None:
    if layout.config.exists():
        raise Conflict(f"{layout.folder} is a repository already; open it", code="repository", path=str(layout.folder))


def holds_objects(layout: Layout) -> bool:
    """Whether the store there holds anything at all."""
    store = StoreLayout(layout.objects)
    try:
        return any(True for kind in ObjectKind for _ in store.scan(kind))
    except OSError as error:
        raise _unavailable("read", layout.objects, error) from error


def _claim(layout: Layout) -> Occupancy:
    try:
        return Occupancy.alone(layout.lock)
    except Unavailable as error:
        if error.code != "unavailable.repository_in_use":
            raise
        raise Conflict(
            f"somebody else is making a repository in {layout.folder}; open it when that is done",
            code="repository", path=str(layout.folder),
        ) from error  # fmt: skip


def write_settings(layout: Layout, namespace: str) -> None:
    """Write ``config.json`` with a new id, whole or not at all: last, when everything else stands.

    Raises:
        Unavailable: ``unavailable.repository``.
    """
    record = {
        "format": FORMAT, "namespace": namespace, "repository_id": secrets.token_hex(16), "version": VERSION,
    }  # fmt: skip
    draft = layout.config.with_suffix(".new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(json.dumps(record, indent=2, sort_keys=True) + "\n")
            file.flush()
            os.fsync(fd)
        draft.replace(layout.config)
        flush_folder(layout.folder)
        flush_folder(layout.folder.parent)
    except OSError as error:
        raise _unavailable("write", layout.config, error) from error


def read_settings(layout: Layout) -> Settings:
    """Read ``config.json``.

    Raises:
        NotFound: ``not_found.repository``, also when only the settings are lost: a rebuild of the catalog writes new ones.
        Incompatible: ``incompatible.repository_version`` when a newer Forkpoint made it.
        Corrupt: ``corrupt.repository`` when it is no settings file.
    """
    try:
        record = json.loads(layout.config.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise _absent(layout) from None
    except OSError as error:
        raise _unavailable("read", layout.config, error) from error
    except ValueError as error:
        raise _corrupt(layout, str(error)) from error
    if not isinstance(record, Mapping) or record.get("format") != FORMAT:
        raise _corrupt(layout, "it does not say that it is one")
    _check_version(layout, record.get("version"))
    repository_id, namespace = record.get("repository_id"), record.get("namespace")
    if not isinstance(repository_id, str) or not isinstance(namespace, str):
        raise _corrupt(layout, "its repository_id or namespace is missing")
    return Settings(repository_id=repository_id, namespace=namespace)


def settings_to_rebuild(layout: Layout) -> Settings | None:
    """What ``config.json`` says; None when it is lost and objects are left. Raises as :func:`read_settings` otherwise."""
    try:
        return read_settings(layout)
    except NotFound:
        if not holds_objects(layout):
            raise
        return None


@final
class Occupancy:
    """Says that a repository is open, by a lock on a file that the system drops when the process ends, however it ends."""

    def __init__(self, fd: int) -> None:
        """Use ``shared`` or ``alone``."""
        self._fd = fd

    @classmethod
    def shared(cls, path: Path) -> Self:
        """Hold it beside others. Raises Unavailable ``unavailable.repository_in_use`` while anybody holds it alone."""
        return cls(_locked(path, fcntl.LOCK_SH, "it is being made or rebuilt; try again when that is done"))

    @classmethod
    def alone(cls, path: Path) -> Self:
        """Hold it alone. Raises Unavailable ``unavailable.repository_in_use`` while anybody else holds it."""
        return cls(_locked(path, fcntl.LOCK_EX, "somebody else has it open; close that first"))

    def share(self) -> None:
        """Go on holding it, beside others. Waits for who came in between, which is never for long."""
        fcntl.flock(self._fd, fcntl.LOCK_SH)

    def end(self) -> None:
        """Give it up. Once only."""
        os.close(self._fd)


def _locked(path: Path, mode: int, why: str) -> int:
    """A descriptor of the lock file that holds the lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unavailable("lock", path, error) from error
    try:
        fcntl.flock(fd, mode | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise Unavailable(f"the repository is in use: {why}", code="repository_in_use") from error
    return fd


def flush_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _check_version(layout: Layout, version: object) -> None:
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _corrupt(layout, f"its version is {version!r}")
    if version > VERSION:
        raise Incompatible(
            f"{layout.folder} has version {version}, newer than {VERSION}, the newest this program reads; update forkpoint",
            code="repository_version", field="version", have=version, want=VERSION,
        )  # fmt: skip


def _check_namespace(namespace: str) -> None:
    is_sound = namespace.isprintable() and 0 < len(namespace.encode(errors="replace")) <= MAX_NAMESPACE_BYTES
    if not is_sound or namespace.encode(errors="replace").decode() != namespace:
        raise InvalidInput(
            f"{namespace!r} cannot be a namespace; use 1 to {MAX_NAMESPACE_BYTES} bytes of printable text",
            code="namespace",
        )


def _absent(layout: Layout) -> NotFound:
    if holds_objects(layout):
        why = f"{layout.config} is lost, the objects beside it are not; run forkpoint fsck --rebuild-catalog"
    else:
        why = f"no repository at {layout.folder}; run forkpoint init"
    return NotFound(why, code="repository", path=str(layout.folder))


def _unavailable(verb: str, path: Path, error: OSError) -> Unavailable:
    return Unavailable(f"cannot {verb} {path}: {error.strerror or error}", code="repository", path=str(path))


def _corrupt(layout: Layout, why: str) -> Corrupt:
    return Corrupt(
        f"{layout.config} is not the settings of a repository: {why}; restore it from a copy", code="repository",
        path=str(layout.config),
    )  # fmt: skip
