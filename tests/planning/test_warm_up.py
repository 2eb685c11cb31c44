import subprocess
import sys


def test_the_cache_can_be_filled_by_a_program():
    done = subprocess.run(
        [sys.executable, "-m", "equipoise.planning.warm_up"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
