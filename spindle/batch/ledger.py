"""Which custom_ids are done, and which line had one first: exact, and on the disk."""

from __future__ import annotations

import sqlite3


class Ledger:
    """A table of custom_ids, in a temporary database of SQLite, which nobody else sees.

    SQLite keeps 2 MB of it in memory, and the rest in a file without a name that is gone with the
    process, however that ends. A line costs about its custom_id and 50 bytes of disk.
    """

    def __init__(self) -> None:
        self._db = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA cache_size = -2000")  # in KiB
        self._db.execute("PRAGMA journal_mode = OFF")  # nothing is ever taken back
        columns = "custom_id TEXT PRIMARY KEY, result_id TEXT, line INTEGER"
        self._db.execute(f"CREATE TABLE ids ({columns}) WITHOUT ROWID")
        self._db.execute("BEGIN")

    def close(self) -> None:
        """Give the disk back."""
        self._db.close()

    def note_result(self, custom_id: str, result_id: str) -> bool:
        """This is done; whether it was not so before."""
        insert = "INSERT OR IGNORE INTO ids VALUES (?, ?, NULL)"
        return self._db.execute(insert, (custom_id, result_id)).rowcount == 1

    def find_line(self, custom_id: str, number: int) -> str | None:
        """The id of the result that waits for this line, if one does: it does so no more."""
        update = "UPDATE ids SET line = ? WHERE custom_id = ? AND line IS NULL RETURNING result_id"
        row = self._db.execute(update, (number, custom_id)).fetchone()
        return None if row is None else row[0]

    def without_line(self) -> str | None:
        """A custom_id that is done, and that no line was found for; None if there is none."""
        row = self._db.execute("SELECT custom_id FROM ids WHERE line IS NULL LIMIT 1").fetchone()
        return None if row is None else row[0]

    def first_line(self, custom_id: str, number: int) -> tuple[int, bool]:
        """The number of the line that has this custom_id first, maybe this one; if it is done."""
        insert = "INSERT OR IGNORE INTO ids VALUES (?, NULL, ?)"
        self._db.execute(insert, (custom_id, number))
        select = "SELECT line, result_id IS NOT NULL FROM ids WHERE custom_id = ?"
        line, done = self._db.execute(select, (custom_id,)).fetchone()
        return line, bool(done)
