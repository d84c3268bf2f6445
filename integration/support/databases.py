"""Runs database servers that are installed on this machine, one process for each test session."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from integration.support.processes import await_condition
from kafka_eos_source.embedded.cluster import free_ports

_SECONDS = 60.0


def binary(name: str, package: str, folders: Sequence[str] = ()) -> str:
    """Returns the path of a server's program; if it is missing, skips the test and names the package."""
    found = shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", *folders]))
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install {package})")
    return found


class Server(ABC):
    """One database server with its data in a temporary folder.

    Attributes:
        url: SQLAlchemy URL of its only database.
    """

    def __init__(self) -> None:
        pytest.importorskip("sqlalchemy")
        self.folder = Path(tempfile.mkdtemp(prefix="kafka-eos-db-"))
        (self.port,) = free_ports([0])
        self._process: subprocess.Popen[bytes] | None = None
        self.log = self.folder / "server.log"
        self._prepare()
        self.start()

    @property
    @abstractmethod
    def url(self) -> str: ...

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _user(self) -> str | None: ...

    def start(self) -> None:
        with open(self.log, "ab") as out:
            self._process = subprocess.Popen(
                self._command(), stdout=out, stderr=out, stdin=subprocess.DEVNULL, user=self._user()
            )
        await_condition(self._answers, _SECONDS, f"{type(self).__name__} answers; see {self.log}")

    def kill(self) -> None:
        """Sends SIGKILL: the server loses everything it had only in memory."""
        self._end(signal.SIGKILL)

    def close(self) -> None:
        self._end(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, *statements: str) -> list[Any]:
        """Runs statements, commits each, and returns the rows of the last one."""
        import sqlalchemy as sa

        engine = sa.create_engine(self.url, poolclass=sa.pool.NullPool)
        found: list[Any] = []
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            for statement in statements:
                result = connection.exec_driver_sql(statement)
                found = list(result) if result.returns_rows else []
        return found

    def new_table(self) -> str:
        return f"t_{uuid.uuid4().hex[:8]}"

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Returns the rows a reader sees; an empty list if the table does not exist."""
        import sqlalchemy as sa

        engine = sa.create_engine(self.url, poolclass=sa.pool.NullPool)
        with engine.connect() as connection:
            if not sa.inspect(connection).has_table(table):
                return []
            found = connection.execute(sa.text(f"SELECT * FROM {table}"))
            return [dict(row) for row in found.mappings()]

    def tables(self) -> list[str]:
        """Returns the names of all tables."""
        import sqlalchemy as sa

        engine = sa.create_engine(self.url, poolclass=sa.pool.NullPool)
        return sorted(sa.inspect(engine).get_table_names())

    @abstractmethod
    def wrong_password(self) -> str:
        """Returns the URL of a user with the password "hunter2", which is not the right one."""

    def _answers(self) -> bool:
        import sqlalchemy as sa

        assert self._process is not None
        assert self._process.poll() is None, f"the server ended:\n{self.log.read_text()[-2000:]}"
        try:
            self.run("SELECT 1")
        except sa.exc.OperationalError:
            return False
        return True

    def _end(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait(_SECONDS)


class Postgres(Server):
    """PostgreSQL with prepared transactions enabled."""

    prepared = 50

    @property
    def url(self) -> str:
        return f"postgresql+psycopg://eos@127.0.0.1:{self.port}/postgres"

    def wrong_password(self) -> str:
        rules = self._data / "pg_hba.conf"
        if "guarded" not in rules.read_text():
            rules.write_text(f"host all guarded 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
            self.run("CREATE ROLE guarded LOGIN PASSWORD 'swordfish'", "SELECT pg_reload_conf()")
        return f"postgresql+psycopg://guarded:hunter2@127.0.0.1:{self.port}/postgres"

    def _prepare(self) -> None:
        pytest.importorskip("psycopg")
        folders = [str(each) for each in sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
        initdb = binary("initdb", "postgresql", folders)
        self._postgres = binary("postgres", "postgresql", folders)
        self._data = self.folder / "data"
        self._data.mkdir(mode=0o700)
        if self._user() is not None:
            owner = pwd.getpwnam(str(self._user()))
            for each in (self.folder, self._data):
                os.chown(each, owner.pw_uid, owner.pw_gid)
        _run([initdb, "-D", str(self._data), "-U", "eos", "-A", "trust", "-N", "-E", "UTF8"], self._user())

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "max_prepared_transactions": str(self.prepared),
            "fsync": "off",  # tests kill the server, never the machine
        }
        given = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return [self._postgres, "-D", str(self._data), "-p", str(self.port), *given]

    def _user(self) -> str | None:
        return "postgres" if os.getuid() == 0 else None

    def kill(self) -> None:
        """Shuts down immediately with all child processes, which PostgreSQL treats like a crash."""
        self._end(signal.SIGQUIT)

    def close(self) -> None:
        self._end(signal.SIGQUIT)
        shutil.rmtree(self.folder, ignore_errors=True)


class PostgresAlone(Postgres):
    """PostgreSQL with its default settings, where max_prepared_transactions is 0."""

    prepared = 0


class MariaDb(Server):
    @property
    def url(self) -> str:
        return f"mysql+pymysql://eos@127.0.0.1:{self.port}/test?charset=utf8mb4"

    def wrong_password(self) -> str:
        return f"mysql+pymysql://eos:hunter2@127.0.0.1:{self.port}/test"

    def _prepare(self) -> None:
        pytest.importorskip("pymysql")
        install = binary("mariadb-install-db", "mariadb-server")
        self._server = binary("mariadbd", "mariadb-server")
        self._data = self.folder / "data"
        user = pwd.getpwuid(os.getuid()).pw_name
        arguments = ["--auth-root-authentication-method=normal", "--skip-test-db", f"--user={user}"]
        _run([install, "--no-defaults", f"--datadir={self._data}", *arguments], None)
        (self.folder / "init.sql").write_text(
            "CREATE DATABASE IF NOT EXISTS test CHARACTER SET utf8mb4;\n"
            "CREATE USER IF NOT EXISTS eos@'127.0.0.1';\n"
            "GRANT ALL ON *.* TO eos@'127.0.0.1';\n"
        )

    def _command(self) -> list[str]:
        return [
            self._server,
            "--no-defaults",
            f"--datadir={self._data}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            f"--socket={self.folder / 's'}",
            f"--pid-file={self.folder / 'pid'}",
            f"--init-file={self.folder / 'init.sql'}",
            "--innodb-flush-log-at-trx-commit=2",
            "--skip-name-resolve",
            f"--user={pwd.getpwuid(os.getuid()).pw_name}",
        ]

    def _user(self) -> str | None:
        return None


def _run(command: Sequence[str], user: str | None) -> None:
    done = subprocess.run(command, user=user, capture_output=True, text=True, timeout=_SECONDS, cwd="/")
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-500:]}")
