"""A Kerberos realm: a key distribution centre (KDC) of MIT Kerberos, with a database of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kafka_eos_source.embedded.cluster import free_ports
from kafka_eos_source.runtime.deadline import Deadline, Pauses

REALM = "KAFKA.TEST"
_PATH = f"/usr/sbin:/usr/local/sbin:{os.environ.get('PATH', '')}"
_START_SECONDS = 30.0


def is_installed() -> bool:
    """Whether a KDC can run here (Debian: krb5-kdc and krb5-admin-server)."""
    return all(shutil.which(name, path=_PATH) for name in ("krb5kdc", "kadmin.local", "kdb5_util", "kinit"))


class Realm:
    """A running KDC.

    Args:
        folder: for the database, keytabs, and configuration.
        port: of the KDC, on 127.0.0.1.

    Attributes:
        environment: variables with which Kerberos' programs and libraries use this realm.
        config: the file ``krb5.conf``, which Java reads too.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, port
        self.config = folder / "krb5.conf"
        self.config.write_text(
            f"[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n dns_lookup_realm = false\n"
            " dns_canonicalize_hostname = false\n rdns = false\n udp_preference_limit = 1\n"
            f"[realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{port}\n }}\n[domain_realm]\n localhost = {REALM}\n"
        )
        (folder / "kdc.conf").write_text(
            f"[kdcdefaults]\n kdc_ports = {port}\n kdc_tcp_ports = {port}\n[realms]\n {REALM} = {{\n"
            f"  database_name = {folder}/principal\n  key_stash_file = {folder}/stash\n"
            f"  acl_file = {folder}/acl\n  max_life = 10h\n }}\n"
        )
        self.environment = {
            "KRB5_CONFIG": str(self.config),
            "KRB5_KDC_PROFILE": str(folder / "kdc.conf"),
            "KRB5CCNAME": f"FILE:{folder}/no-tickets",
        }
        self._kdc: subprocess.Popen[bytes] | None = None
        self._run("kdb5_util", "create", "-s", "-P", "master-password", "-r", REALM)

    def keytab(self, principal: str, life: str = "10h") -> Path:
        """Creates a principal whose tickets last that long; returns a file with its keys."""
        path = self._folder / f"{principal.replace('/', '-')}.keytab"
        self._admin(f"addprinc -randkey -maxlife {life} {principal}")
        self._admin(f"ktadd -k {path} {principal}")
        return path

    def log_in(self, principal: str, keytab: Path) -> dict[str, str]:
        """Runs kinit; returns the variables with which a process uses the ticket."""
        cache = {"KRB5CCNAME": f"FILE:{self._folder}/tickets-of-{principal}"}
        subprocess.run(
            ["kinit", "-kt", keytab, principal],
            check=True,
            env={**os.environ, "PATH": _PATH, **self.environment, **cache},
            capture_output=True,
        )
        return cache

    def start(self) -> None:
        """Starts the KDC, and waits until it answers."""
        self._kdc = subprocess.Popen(
            ["krb5kdc", "-n", "-r", REALM, "-P", str(self._folder / "pid")],
            env={**os.environ, "PATH": _PATH, **self.environment},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        pauses = Pauses(Deadline.after_seconds(_START_SECONDS), 0.05)
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port), 1).close()
                return
            except OSError:
                assert self._kdc.poll() is None, "the KDC has ended"
                pauses.wait(lambda: AssertionError("the KDC does not answer"))

    def stop(self) -> None:
        """Stops the KDC; tickets that were given stay valid."""
        if self._kdc is not None:
            self._kdc.terminate()
            self._kdc.wait()
            self._kdc = None

    def _admin(self, command: str) -> None:
        self._run("kadmin.local", "-r", REALM, "-q", command)

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, env={**os.environ, "PATH": _PATH, **self.environment}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


@contextmanager
def realm(folder: Path) -> Iterator[Realm]:
    """Runs a realm."""
    (port,) = free_ports([0])
    made = Realm(folder, port)
    made.start()
    try:
        yield made
    finally:
        made.stop()
