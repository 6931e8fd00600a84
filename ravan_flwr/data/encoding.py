"""Find texts that are no UTF-8 when a file is opened, and not somewhere in a run."""

import datasets
import pyarrow as pa


def check_encoding(examples: datasets.Dataset, where: str) -> None:
    """Raise ValueError, with the column, if a text is no UTF-8; no value is copied."""
    table = examples.data.table
    for name in table.column_names:
        try:
            table.column(name).validate(full=True)
        except pa.ArrowInvalid:
            raise ValueError(
                f"{where}: column {name!r} has texts that are no UTF-8, expected all in UTF-8; "
                "write the files anew: iconv -f LATIN1 -t UTF-8 OLD > NEW, say, if they are in "
                "Latin-1"
            ) from None
