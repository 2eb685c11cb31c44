"""A worker's JSON log lines name its pool, phase and worker."""

import json
import logging

from equipoise.planning.phase import Phase
from equipoise.telemetry.logs import LogFormat
from equipoise.worker import __main__ as worker_main
from equipoise.worker.settings import WorkerSettings


def test_every_json_line_names_the_phase(monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(worker_main, "raise_open_files_limit", lambda: None)
    monkeypatch.setattr(worker_main, "single_threaded", lambda: None)
    monkeypatch.setattr(
        worker_main,
        "_serve_to_the_end",
        lambda *_, **__: logging.getLogger("equipoise").warning("hm"),
    )
    settings = WorkerSettings(
        pool="readers", worker="reader-1", phase=Phase.PREFILL, log_format=LogFormat.JSON
    )
    assert worker_main.run(settings) == 0
    line = json.loads(capsys.readouterr().err)
    assert (line["pool"], line["phase"], line["worker"]) == ("readers", "prefill", "reader-1")
