"""Reading files with one-line errors, and writing them as a whole or not at all.

A file is written beside its target under a temporary name and then renamed. So a reader never sees half of it, and an interrupted command
leaves the old file.
"""

from __future__ import annotations

import io
import os
import secrets
import sys
import zipfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from soap.errors import ModelError, SoapError
from soap.units import format_bytes

ARCHIVE_SPARE_BYTES = 2**26
"""Texts in archives may be compressed; they are small next to tensors, which torch stores as they are."""


def cache_folder() -> Path | None:
    """The folder of this program below the user's cache folder (XDG_CACHE_HOME, if set); None if the user has no home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):  # the XDG specification says to ignore relative paths
        return Path(chosen) / "soap"
    local = os.environ.get("LOCALAPPDATA", "") if sys.platform == "win32" else ""
    if local:
        return Path(local) / "soap"
    try:
        return Path.home() / ".cache" / "soap"
    except RuntimeError:
        return None


def read_text(path: str | Path, *, what: str = "file", error: type[SoapError] = SoapError, limit_bytes: int = 2**30) -> str:
    """The UTF-8 text of a file; ``error`` in one line if it is missing, unreadable, no text or longer than ``limit_bytes``."""
    path = Path(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(limit_bytes + 1)
    except OSError as cause:
        raise error(f"{what} {str(path)!r} cannot be read: {reason(cause)}; check the path") from None
    except ValueError as cause:  # a NUL byte in the path
        raise error(f"{what} {str(path)!r} cannot be read: {cause}; check the path") from None
    if len(data) > limit_bytes:
        raise error(f"{what} {str(path)!r} is longer than {limit_bytes} bytes; expected a smaller file: check the path")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise error(f"{what} {str(path)!r} is no UTF-8 text (byte {cause.start}); expected a text file: check the path") from None


def check_archive(source: Path | bytes) -> None:
    """Raise ValueError, which says so in words, if what an archive holds is more than twice as long as the archive. Nothing is read of it
    but its list of entries. What is no archive passes."""
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    try:
        with zipfile.ZipFile(source if isinstance(source, Path) else io.BytesIO(source)) as archive:
            held = sum(entry.file_size for entry in archive.infolist())
    except zipfile.BadZipFile:
        return
    if held > 2 * size + ARCHIVE_SPARE_BYTES:
        raise ValueError(f"its {format_bytes(size)} hold {format_bytes(held)}; expected an archive that is not compressed")


def check_writable(path: str | Path, *, error: type[SoapError] = SoapError) -> None:
    """Raise ``error`` if a file could not be written there. To be asked before long work. Leaves nothing behind."""
    path = Path(path)
    try:
        _refuse_non_files(path)
        if _is_nowhere(path):
            return
        temporary = _open_beside(path)
    except (OSError, ValueError) as cause:
        raise _unwritable(path, cause, error) from None
    os.close(temporary[0])
    os.unlink(temporary[1])


def write_text_atomically(path: str | Path, text: str, *, error: type[SoapError] = SoapError) -> None:
    """Write UTF-8 text (line ends as given) to ``path``. If that fails, raise ``error`` in one line; the old file stays."""
    data = text.encode("utf-8", "backslashreplace")  # names of files may have bytes that are no text
    write_bytes_atomically(path, data, error=error)


def write_bytes_atomically(path: str | Path, data: bytes, *, error: type[SoapError] = SoapError) -> None:
    """Write bytes to ``path``. If that fails, raise ``error`` in one line; the old file stays. The folder must exist."""
    write_parts_atomically(path, [data], error=error)


def write_parts_atomically(path: str | Path, parts: Iterable[bytes | memoryview], *, error: type[SoapError] = SoapError) -> None:
    """Write bytes that come in parts, as ``write_bytes_atomically`` does. What making the parts raises, other than an OSError or a
    ValueError, is passed on; the old file stays then, too."""
    path = Path(path)
    temporary = None
    try:
        _refuse_non_files(path)
        if _is_nowhere(path):
            return
        target = Path(os.path.realpath(path))  # follow links, as an ordinary write does
        descriptor, temporary = _open_beside(target)
        with os.fdopen(descriptor, "wb") as stream:
            stream.writelines(parts)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            os.chmod(temporary, target.stat().st_mode & 0o7777)
        os.replace(temporary, target)
        temporary = None
    except (OSError, ValueError) as cause:
        raise _unwritable(path, cause, error) from None
    finally:
        if temporary is not None:
            with suppress(OSError):
                os.unlink(temporary)


def synchronize_folder(folder: Path) -> None:
    """Flush the folder's entries to the disk, where the system offers it."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _open_beside(path: Path) -> tuple[int, str]:
    """Open a new temporary file in the folder of ``path``. Unlike tempfile's, it has the permissions of any new file of this user."""
    target = Path(os.path.realpath(path))
    temporary = str(target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}.tmp"))
    return os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), temporary


def _refuse_non_files(path: Path) -> None:
    if path.is_dir() or not path.name:
        raise IsADirectoryError(None, "it is a folder")
    if path.exists() and not _is_nowhere(path):
        if not path.is_file():
            raise OSError(None, "it is no ordinary file")
        if not os.access(path, os.W_OK):  # renaming would replace a file that its owner has protected
            raise PermissionError(None, "it is read-only")


def _is_nowhere(path: Path) -> bool:
    """Whether it is ``/dev/null``, to which anything may be written: then nothing is."""
    return os.path.exists(os.devnull) and path.exists() and path.samefile(os.devnull)


def _unwritable(path: Path, cause: Exception, error: type[SoapError]) -> SoapError:
    missing = isinstance(cause, FileNotFoundError)
    if missing and path.parent.is_dir() and not path.is_symlink():  # a file system of the kernel's, such as /proc
        missing, cause = False, OSError(None, f"no file can be made in folder {str(path.parent)!r}")
    what = f"folder {str(path.parent)!r} does not exist" if missing else reason(cause)
    remedy = "create the folder or choose another path" if missing else "choose another path"
    return error(f"cannot write {str(path)!r}: {what}; {remedy}")


def reason(cause: Exception) -> str:
    """The system's reason why a file operation failed, worded for our messages."""
    if isinstance(cause, IsADirectoryError):
        return "it is a folder"
    text = cause.strerror if isinstance(cause, OSError) and cause.strerror else str(cause)
    return text[:1].lower() + text[1:]


def check_model_file(path: Path) -> None:
    """ModelError in one line if there is no such file."""
    if not path.exists():
        raise ModelError(
            f"model file {str(path)!r} does not exist; expected a .pt2 file made by soap.export or torch.export.save, or zoo:NAME"
        )
