"""Sends requests to brokers: retries temporary failures, and names the reason when it gives up."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException, libversion
from confluent_kafka.admin import AdminClient

from kafka_eos_source.errors import InvalidOptionError, KafkaEosError, UnavailableError
from kafka_eos_source.kafka.failure import (
    START_SECONDS,
    Login,
    classify,
    is_login,
    is_transient,
    kafka_error,
    mechanism,
    unreachable,
)
from kafka_eos_source.kafka.properties import for_librdkafka
from kafka_eos_source.runtime.client_log import ClientLog, with_log_level
from kafka_eos_source.runtime.deadline import Deadline
from kafka_eos_source.runtime.retry import Pauses, retry
from kafka_eos_source.secrets import Secrets

Answer = TypeVar("Answer")

#: How long to wait for an answer before checking whether the brokers refused the login.
_LOGIN_CHECK_SECONDS = 0.5

#: Time limit of one try of a request.
REQUEST_SECONDS = 10.0
#: Time limit of a try in the first seconds of a request that only reads. The other brokers replace one that
#: hangs within that time, so they are asked again and again.
SOON_SECONDS, REPLACED_SECONDS = 3.0, 15.0

#: Errors by which librdkafka says that no broker has answered.
_SILENT = frozenset(
    {KafkaError._TIMED_OUT, KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE}
)

_log = logging.getLogger(__name__)


class Complaints:
    """What a client reported through its error callback, apart from the answers to its calls.

    Args:
        config: librdkafka properties of the client.

    Attributes:
        last: the newest report, without secrets; "" = none. It is the likely reason of a time-out.
        secrets: of the client.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.last = ""
        self._config = config
        self.secrets = Secrets.of(config)
        self._explained = False
        self._login = Login(config)
        self._refused: KafkaError | None = None

    def on_error(self, error: KafkaError) -> None:
        """Records a report. The client's ``error_cb``."""
        self.last = self.secrets.hide(error.str())
        if is_login(error):
            # without secrets, because the error that quotes it has this one as its cause
            self._refused = KafkaError(error.code(), self.last)

    def answered(self) -> None:
        """Records that a broker answered a request, so the credentials work."""
        self._refused = None
        self._login.record_success()

    def login_error(self, doing: str) -> KafkaEosError | None:
        """Returns the error if a broker has refused the login since the last answer; else None.

        After a time-out, this is the reason.

        Args:
            doing: what was attempted.
        """
        return None if self._refused is None else self._login.error(self._refused, doing)

    def permanent_login_error(self, doing: str) -> KafkaEosError | None:
        """Returns `login_error` if these credentials have never worked in this process; else None.

        Credentials that worked before may be refused for a while; see `kafka.login`.
        """
        return None if self._login.has_worked else self.login_error(doing)

    def explanation(
        self, doing: str, failure: KafkaError | KafkaException, seconds: float = 0.0
    ) -> KafkaEosError | None:
        """Returns the error that says why no broker has answered, found out with the package's own client.

        Args:
            doing: what was attempted.
            failure: of the request.
            seconds: how long brokers may refuse connections; 0 = each is asked once.

        Returns:
            None if brokers have answered, or may answer later; `last` then names what is wrong with some.
        """
        if kafka_error(failure).code() not in _SILENT:
            return None
        # imported here, because it takes 0.1 s and few requests fail
        from kafka_eos_source.kafka.probe import check_reachable

        try:
            self.last = check_reachable(self._config, seconds, every=True) or self.last
        except UnavailableError as error:
            return UnavailableError(f"{doing}: {error.message}", fix=error.fix)
        except KafkaEosError as error:
            return error
        return None

    def start_error(self, doing: str, failure: KafkaException, deadline: Deadline) -> KafkaEosError | None:
        """Returns `explanation`, once, if no request of this process has ever succeeded; else None.

        A query that starts fails soon, so that a person sees the cause. One that runs waits for its brokers.

        Args:
            doing: what was attempted.
            failure: of the request.
            deadline: until which brokers may refuse connections.
        """
        if self._explained or self._login.has_worked or kafka_error(failure).code() not in _SILENT:
            return None
        self._explained = True
        return self.explanation(doing, failure, deadline.remaining_seconds())

    def forget(self) -> None:
        """Forgets the newest report, because brokers have since done all that they were asked to."""
        self.last = ""

    def await_answer(self, client: Any, future: Any, seconds: float | None = None) -> Any:
        """Returns the result of an admin call; stops waiting for it if the login was refused for good.

        Args:
            client: the client of the call.
            future: its result.
            seconds: longest time to wait; None = the call has a time limit of its own.

        Raises:
            KafkaException: if the call failed, or the login was refused for good; with _TIMED_OUT after
                ``seconds``.
        """
        waited = 0.0
        while True:
            wait = _LOGIN_CHECK_SECONDS if seconds is None else min(_LOGIN_CHECK_SECONDS, seconds - waited)
            try:
                return future.result(wait)
            except concurrent.futures.TimeoutError:
                client.poll(0)  # runs the error callback
                if self._refused is not None and not self._login.has_worked:
                    raise KafkaException(self._refused) from None
            waited += wait
            if seconds is not None and waited >= seconds:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


class TryLimit:
    """The time limit of each try of one request that only reads."""

    def __init__(self) -> None:
        self._replaced = Deadline.after_seconds(REPLACED_SECONDS)

    def seconds(self, deadline: Deadline | None = None) -> float:
        """Returns the limit of a try that begins now, and ends at ``deadline`` if that is earlier."""
        limit = REQUEST_SECONDS if self._replaced.expired else SOON_SECONDS
        return limit if deadline is None else max(0.5, deadline.remaining_seconds(limit))


def request(
    doing: str,
    send: Callable[[float], Answer],
    deadline: Deadline,
    complaints: Complaints,
    bootstrap_servers: str,
    *,
    poll: Callable[[float], object] | None = None,
    pause_seconds: float = 0.05,
    request_seconds: float = REQUEST_SECONDS,
    starts: bool = False,
) -> Answer:
    """Sends a request until it is answered, fails for good, or the deadline has passed.

    Args:
        doing: what the request does, for messages, such as "reading the offsets of group 'g'".
        send: sends the request; receives its time limit in seconds.
        deadline: of all tries together.
        complaints: of the client that sends.
        bootstrap_servers: for messages.
        poll: runs the client's error callback, so that a refused login ends the tries; None = ``send`` does.
        pause_seconds: between two tries.
        request_seconds: longest time limit of one try.
        starts: whether the request is the first of a query or command, and changes nothing. It then fails
            soon if brokers refuse connections (`Complaints.start_error`), and the first tries have less time
            (`TryLimit`).

    Raises:
        UnavailableError: if no broker answered before ``deadline``.
        AuthorizationError: if a broker refused the login, or the principal lacks a right.
        KafkaEosError: if the request failed for another reason that no retry mends; see `failure.classify`.
    """
    soon = Deadline.after_seconds(deadline.remaining_seconds(START_SECONDS))

    def permanent(failure: KafkaException) -> KafkaEosError | None:
        if is_login(failure):
            complaints.on_error(kafka_error(failure))
        elif not is_transient(failure):
            return classify(failure, doing, complaints.secrets)
        if poll is not None:
            poll(0)
        refused = complaints.permanent_login_error(doing)
        return refused or (complaints.start_error(doing, failure, soon) if starts else None)

    def timed_out(failure: KafkaException) -> KafkaEosError:
        refused = complaints.login_error(doing)
        if refused is not None:
            return refused
        explained = complaints.explanation(doing, failure)
        if explained is not None:
            return explained
        reason = f"{doing}: {complaints.last or complaints.secrets.hide(kafka_error(failure).str())}"
        return unreachable(bootstrap_servers, deadline.budget_seconds * 1000, reason)

    def report(failure: KafkaException, seconds: float) -> None:
        text = complaints.secrets.hide(kafka_error(failure).str())
        _log.debug("%s: %s; retrying in %.2f s", doing, text, seconds)

    limit = TryLimit()

    def send_once() -> Answer:
        if starts:
            return send(limit.seconds(deadline))
        return send(max(0.5, deadline.remaining_seconds(request_seconds)))

    answer = retry(
        send_once,
        KafkaException,
        Pauses(deadline, pause_seconds),
        permanent=permanent,
        timed_out=timed_out,
        report=report,
    )
    complaints.answered()
    return answer


# -- clients ------------------------------------------------------------------------------------
#
# Admin requests go through confluent-kafka, or the package's own client for some logins:
#
# - Kerberos: the wheels of confluent-kafka are built without it.
# - OAUTHBEARER: librdkafka asks for the first token of a client one second after the client was created, and
#   confluent-kafka waits for that. This package creates several clients while a query starts.

Made = TypeVar("Made")


def admin_client(config: Mapping[str, Any]) -> Any:
    """Creates a client for admin requests without contacting a broker; raises as `make`.

    Args:
        config: librdkafka properties and callbacks.
    """
    if mechanism(config) in ("GSSAPI", "OAUTHBEARER"):
        from kafka_eos_source.kafka.wire_admin import WireAdmin  # imports kafka-python

        return WireAdmin(config)
    return make(AdminClient, config)


def make(kind: Callable[..., Made], config: Mapping[str, Any]) -> Made:
    """Creates a client of confluent-kafka, whose errors reveal no secret, without contacting a broker.

    What the client logs appears when its ``poll`` is called.

    Args:
        kind: a client class of confluent-kafka.
        config: librdkafka properties and callbacks.

    Raises:
        InvalidOptionError: if librdkafka rejects a property, or a combination of properties.
    """
    secrets = Secrets.of(config)
    try:
        return kind(for_librdkafka(with_log_level(config)), logger=ClientLog(secrets.hide))
    except KafkaException as error:
        reason = secrets.hide(kafka_error(error).str())
    # raised outside the block: a cause or context would show librdkafka's unredacted text in the traceback
    newer = "; newer versions of confluent-kafka may have it" if "No such configuration" in reason else ""
    raise InvalidOptionError(
        f"librdkafka {librdkafka_version()} refuses the kafka.* options: {reason}.",
        fix=f"correct or remove the option that this message names{newer}.",
    )


def librdkafka_version() -> str:
    """Returns the version of the loaded librdkafka, such as ``2.13.0``."""
    return str(libversion()[0])
