"""Commands that refuse their words."""

import pytest

from ravan_flwr.cli import main


def error_of(capsys, *words, status=2):
    """Return what a command writes that ends with this status."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, words)])
    assert end.value.code == status
    return capsys.readouterr().err
