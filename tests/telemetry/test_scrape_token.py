"""A metrics port that requires a bearer token."""

import asyncio
import urllib.error
import urllib.request

import pytest

from equipoise.telemetry.errors import TelemetryError
from equipoise.telemetry.exposition import metrics_at
from equipoise.telemetry.metrics_settings import MetricsPort

BOUND_S = 60.0


def port_of(token_file):
    return MetricsPort(metrics_listen="127.0.0.1:0", metrics_token_file=str(token_file))


async def status_of(address, authorization):
    request = urllib.request.Request(f"http://{address}/metrics")
    if authorization is not None:
        request.add_header("Authorization", authorization)

    def get():
        try:
            with urllib.request.urlopen(request, timeout=BOUND_S) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    return await asyncio.to_thread(get)


async def test_only_the_token_of_the_file_reads_the_metrics(tmp_path):
    file = tmp_path / "token"
    file.write_text("first\n")
    async with metrics_at(port_of(file)) as address:
        for refused in (None, "", "first", "Bearer", "Bearer ", "Bearer fir", "Basic first"):
            code, body = await status_of(address, refused)
            assert code == 401, refused
            assert b"equipoise_build_info" not in body
        code, body = await status_of(address, "bearer first")
        assert code == 200
        assert b"equipoise_build_info" in body
        file.write_text("second")
        assert (await status_of(address, "Bearer first"))[0] == 401
        assert (await status_of(address, "Bearer second"))[0] == 200
        file.unlink()
        assert (await status_of(address, "Bearer second"))[0] == 200, "the last one stays valid"
        assert (await status_of(address, "Bearer "))[0] == 401


async def test_a_token_file_that_is_missing_or_empty_is_an_error(tmp_path):
    with pytest.raises(TelemetryError, match="metrics_token_file cannot be read"):
        metrics_at(port_of(tmp_path / "missing"))
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(TelemetryError, match="is empty"):
        metrics_at(port_of(tmp_path / "empty"))
