"""Whether a plugin fits the release of its engine."""

import logging
import re
from importlib.metadata import version

from equipoise.engines.errors import UnsupportedEngineError

_log = logging.getLogger(__name__)


def check_release(engine: str, package: str, *, oldest: str, newest: str) -> str:
    """Return the release that is installed; warn of one later than `newest`, the latest tested.

    Raises:
        UnsupportedEngineError: it is older than `oldest`, or has no number.
    """
    try:
        release = version(package)
    except ImportError as error:
        raise UnsupportedEngineError(f"the version of {engine} is unknown: {error}") from error
    if not re.match(r"\d", release):
        raise UnsupportedEngineError(
            f"the version of {engine} is unknown: {release} is not a release"
        )
    if _numbers(release) < _numbers(oldest):
        raise UnsupportedEngineError(f"{engine} {release} is too old: install {oldest} or later")
    if _numbers(release) > _numbers(newest):
        _log.warning(
            "%s %s is later than %s, the latest that this plugin was tested with: look at what it "
            "would do with EQUIPOISE_MODE=observe first",
            engine,
            release,
            newest,
        )
    return release


def _numbers(release: str) -> tuple[int, ...]:
    """The release's numbers, without what makes it a candidate, a post-release or a build."""
    found = re.match(r"\d+(\.\d+)*", release)
    assert found is not None, release
    return tuple(int(number) for number in found[0].split("."))
