"""Reads and writes zip files (.pt, .npz) in memory, with a size limit against zip bombs."""

import io
import zipfile
import zlib
from collections.abc import Mapping

from equipoise.formats.errors import FormatError

MAX_BYTES = 2 * 1024**3
"""Limit for a file and its unpacked contents. A recorder's buffer of 1,000 steps has 125 MB."""

MAGIC = b"PK\x03\x04"

_METHODS = {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}
_ENCRYPTED = 0x1


def unpacked(data: bytes) -> dict[str, bytes]:
    """Return the members by name.

    Raises:
        FormatError: the zip file is damaged or unpacks to more than `MAX_BYTES`.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            size = sum(info.file_size for info in infos)
            if size > MAX_BYTES:
                raise FormatError(f"it unpacks to {size} bytes, more than {MAX_BYTES}")
            for info in infos:
                if info.compress_type not in _METHODS or info.flag_bits & _ENCRYPTED:
                    raise FormatError(
                        f"member {info.filename!r} is encrypted or uses an unknown compression"
                    )
            return {info.filename: archive.read(info) for info in infos}
    except (zipfile.BadZipFile, zlib.error, OSError, EOFError, ValueError, RuntimeError) as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(f"it is a damaged zip file: {error}") from None


def packed(members: Mapping[str, bytes]) -> bytes:
    """Write an uncompressed, reproducible zip file of these members."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
    return file.getvalue()
