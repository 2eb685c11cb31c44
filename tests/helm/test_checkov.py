"""Checkov finds nothing in the chart but what the docs explain."""

import json
import re
import shutil
import subprocess

import pytest
import yaml

from tests.support.helm_chart import FULL, ROOT, TLS, render


@pytest.mark.parametrize("values", [{}, FULL, TLS], ids=["defaults", "full", "tls"])
def test_every_finding_is_explained(values, tmp_path):
    if shutil.which("checkov") is None:
        pytest.skip("no checkov here (pipx install checkov)")
    rendered = tmp_path / "rendered.yaml"
    rendered.write_text(yaml.safe_dump_all(render(values)))
    command = ["checkov", "-f", rendered, "--framework", "kubernetes", "--quiet", "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    failed = json.loads(done.stdout)["results"]["failed_checks"]
    found = {(one["check_id"], one["check_name"]) for one in failed}
    text = (ROOT / "docs" / "security.md").read_text()
    explained = set(re.findall(r"^\| `(CKV\w+)` \|", text, re.MULTILINE))
    assert {check for check, _ in found} <= explained, found
    assert values or {check for check, _ in found} >= explained - {"CKV_K8S_25"}, found
