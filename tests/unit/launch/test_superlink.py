"""A SuperLink that does not start: the error has its output, and nothing is left."""

import os

import pytest

from ravan_flwr.launch import superlink

WITHOUT_A_PACKAGE = """#!/bin/sh
echo "ModuleNotFoundError: No module named 'tomli'" >&2
exit 3
"""
SILENT = "#!/bin/sh\nexec sleep 60\n"


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (WITHOUT_A_PACKAGE, "ended with status 3; its output: ModuleNotFoundError: .*'tomli'"),
        (SILENT, r"did not answer within 0\.3 s on port \d+; its output: none"),
    ],
)
def test_an_error_says_why_flowers_superlink_did_not_start(script, reason, tmp_path, monkeypatch):
    command = tmp_path / "flower-superlink"
    command.write_text(script)
    command.chmod(0o755)
    monkeypatch.setattr(superlink, "search_path", lambda: f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(superlink, "START_TIMEOUT", 0.3 if script == SILENT else 30.0)
    link = superlink.LocalSuperLink()
    with pytest.raises(RuntimeError, match=f"Flower's SuperLink {reason}"), link:
        pass
    assert not link.home.exists()
    assert not superlink.list_processes(link.home)
