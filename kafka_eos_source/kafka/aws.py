"""Tokens for clusters of Amazon MSK with IAM: a token provider that signs with AWS credentials.

AWS's signer makes the token without a request. Only credentials may need one: those of a role, of a machine
or of a container. They are looked up for each token, which lasts 15 minutes.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Mapping
from typing import Any

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.login import LoginRefusedError

#: The provider, as the value of ``sasl.oauthbearer.token.provider``.
PROVIDER_PATH = f"{__name__}:token"

#: What ``sasl.oauthbearer.config`` may contain. All but the first are options of AWS's ``IAMLoginModule``.
OPTIONS = (
    "awsRegion",
    "awsProfileName",
    "awsRoleArn",
    "awsRoleSessionName",
    "awsRoleExternalId",
    "awsStsRegion",
)

_SESSION_NAME = "kafka-eos"
_HOST_OF_REGION = re.compile(r"\.kafka(?:-serverless)?\.([a-z0-9-]+)\.(?:api\.)?(?:amazonaws\.com|api\.aws)")


def checked_aws(given: Mapping[str, str], bootstrap_servers: str) -> str:
    """Returns the text of ``sasl.oauthbearer.config`` for options, with the region of the cluster.

    Args:
        given: option → value, of `OPTIONS`.
        bootstrap_servers: addresses of the cluster, whose names contain the region.

    Raises:
        InvalidOptionError: if an option is unknown, the region is, or the package of the signer is missing.
    """
    if importlib.util.find_spec("aws_msk_iam_sasl_signer") is None:
        raise InvalidOptionError(
            "kafka.sasl.mechanism=AWS_MSK_IAM needs the Python package 'aws-msk-iam-sasl-signer-python', "
            "which is not installed.",
            fix="install it on the driver and on every executor: pip install 'kafka-eos-source[aws]'.",
        )
    for name, value in given.items():
        if name not in OPTIONS:
            raise InvalidOptionError(
                f"the login at AWS has no option {name!r}; expected {', '.join(OPTIONS)}.",
                fix="remove it from kafka.sasl.jaas.config or kafka.sasl.oauthbearer.config.",
            )
        if not value or re.search(r"\s", value):
            raise InvalidOptionError(
                f"the option {name!r} of the login at AWS has the value {value!r}.",
                fix="set it to a value without spaces, or remove it.",
            )
    found = _HOST_OF_REGION.search(bootstrap_servers)
    region = (
        given.get("awsRegion")
        or (found[1] if found else "")
        or os.environ.get("AWS_REGION", "")
        or os.environ.get("AWS_DEFAULT_REGION", "")
    )
    if not region:
        raise InvalidOptionError(
            f"the AWS region of the cluster is unknown: kafka.bootstrap.servers={bootstrap_servers!r} does "
            "not name it, as in b-1.name.xxxxxx.c2.kafka.eu-central-1.amazonaws.com:9098.",
            fix="set kafka.sasl.oauthbearer.config to awsRegion=…, or the environment variable AWS_REGION.",
        )
    return " ".join(f"{name}={value}" for name, value in sorted({**given, "awsRegion": region}.items()))


def aws_token(config: str) -> tuple[str, float]:
    """Returns a token and its expiry. A token provider; see ``docs/logins.md``.

    Args:
        config: from `checked`.

    Raises:
        LoginRefusedError: if there are no credentials, or AWS refuses them.
        ConnectionError: if AWS does not answer.
    """
    from aws_msk_iam_sasl_signer.MSKAuthTokenProvider import generate_auth_token_from_credentials_provider
    from botocore.credentials import CredentialProvider
    from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
    from botocore.exceptions import ConnectionError as NoConnection

    options = dict(each.split("=", 1) for each in config.split())

    class Found(CredentialProvider):  # type: ignore[misc]
        def load(self) -> Any:
            return _credentials(options)

    try:
        made, expires_ms = generate_auth_token_from_credentials_provider(options["awsRegion"], Found())
    except (HTTPClientError, NoConnection) as error:
        raise ConnectionError(f"no answer from AWS: {error}") from error
    except (BotoCoreError, ClientError) as error:
        raise LoginRefusedError(f"AWS: {error}") from error
    return made, expires_ms / 1000


def _credentials(options: Mapping[str, str]) -> Any:
    """Returns credentials of the environment, a profile, or a role."""
    import botocore.session
    from botocore.credentials import Credentials

    session = botocore.session.Session(profile=options.get("awsProfileName"))
    found = session.get_credentials()
    if found is None:
        raise LoginRefusedError(
            "AWS: no credentials were found: neither environment variables, nor a profile, nor the role of a "
            "machine or container"
        )
    if "awsRoleArn" not in options:
        return found.get_frozen_credentials()
    sts = session.create_client("sts", region_name=options.get("awsStsRegion", options["awsRegion"]))
    wanted = {
        "RoleArn": options["awsRoleArn"],
        "RoleSessionName": options.get("awsRoleSessionName", _SESSION_NAME),
    }
    if "awsRoleExternalId" in options:
        wanted["ExternalId"] = options["awsRoleExternalId"]
    given = sts.assume_role(**wanted)["Credentials"]
    return Credentials(given["AccessKeyId"], given["SecretAccessKey"], given["SessionToken"])
