"""Tell trouble with the Hugging Face Hub as what it is, with what to do."""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import httpx
import pyarrow as pa
import transformers
from datasets.exceptions import DatasetsError
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)


class NotHereError(ValueError):
    """Say that something of the hub is not here, and what can be done about it."""

    def __init__(self, problem: str, advice: str) -> None:
        self.problem = problem
        super().__init__(f"{problem}; {advice}")


_UNREACHED = (
    LocalEntryNotFoundError, EntryNotFoundError, HfHubHTTPError, ConnectionError, httpx.HTTPError,
)  # fmt: skip


@contextmanager
def telling(what: str, name: str, revision: str = "") -> Iterator[None]:
    """Turn errors of the hub into a ValueError that says what to do; hide progress bars."""
    at = f"{what} {name}" + (f" at revision {revision}" if revision else "")
    try:
        with no_bars():
            yield
    except GatedRepoError as error:
        raise ValueError(
            f"{at}: the hub gives it only to those who accepted its terms; accept them on its "
            f"page, then log in with `hf auth login` or set HF_TOKEN ({_short(error)})"
        ) from None
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{at}: the hub has no such revision any more; name another one, "
            f"{what}={name}@REVISION ({_short(error)})"
        ) from None
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{at}: the hub has no such {what}, or it is private; correct the id, or log in with "
            f"`hf auth login` ({_short(error)})"
        ) from None
    except _UNREACHED as error:
        raise NotHereError(
            f"{at}: it is not in the cache, and the hub cannot be reached ({_short(error)})",
            _advice(what, name, revision),
        ) from None
    except StopIteration:  # of `datasets`, over JSON lines without a line
        raise ValueError(
            f"{at}: a file of it is empty, expected examples in each; fill it, or take it out"
        ) from None
    except (DatasetsError, FileNotFoundError, pa.ArrowInvalid, UnicodeDecodeError) as error:
        cause = error.__cause__ or error
        if Path(name).is_dir():
            raise ValueError(
                f"{at}: its files cannot be read ({_short(cause)}), expected CSV, JSON lines, "
                "parquet or images, with the same columns and types in each; correct the files"
            ) from None
        raise NotHereError(
            f"{at}: {_short(error)}",
            f"{_advice(what, name, revision)}; or correct the id or the revision, or accept its "
            "terms, if it has any, and log in with `hf auth login`",
        ) from None


def _advice(what: str, name: str, revision: str) -> str:
    """Write the command that downloads a model into the cache, or data into a folder."""
    kind = "" if what == "model" else " --repo-type dataset --local-dir /path"
    at = f" --revision {revision}" if revision else ""
    return (
        f"run `hf download {name}{kind}{at}` where there is a connection, or name a folder, "
        f"{what}=/path"
    )


def _short(error: BaseException, most: int = 300) -> str:
    """Return an error's first line, as far as its whole sentences fit."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    if len(text) <= most:
        return text.rstrip(".")
    end = max(text.rfind(". ", 0, most), text.rfind("! ", 0, most))
    return text[:end] if end > 0 else textwrap.shorten(text, most, placeholder=" ...")


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep the libraries' progress bars and load reports out of a run's lines."""
    logging_of = transformers.utils.logging
    shown, level = logging_of.is_progress_bar_enabled(), logging_of.get_verbosity()
    drawn = datasets.is_progress_bar_enabled()
    logging_of.disable_progress_bar()
    logging_of.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging_of.set_verbosity(level)
        if shown:
            logging_of.enable_progress_bar()
        if drawn:
            datasets.enable_progress_bars()
