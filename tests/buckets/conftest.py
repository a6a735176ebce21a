import sqlite3
from pathlib import Path

import pytest

DATA = Path(__file__).parents[1] / "data" / "buckets"


@pytest.fixture(scope="session")
def data():
    return DATA


@pytest.fixture
def database(tmp_path):
    """Makes an SQLite file of statements, by default those of two_gpus.sql and then these."""

    def make(*statements, base=DATA / "two_gpus.sql"):
        path = tmp_path / "report.sqlite"
        path.unlink(missing_ok=True)
        connection = sqlite3.connect(path)
        if base:
            connection.executescript(base.read_text())
        connection.executescript(";".join(statements))
        connection.commit()
        connection.close()
        return path

    return make
