"""Logins that are written for Java's clients are translated; those that cannot work fail at the start."""

from __future__ import annotations

import importlib.util

import pytest

from kafka_eos_source.errors import InvalidOptionError
from kafka_eos_source.kafka.config import check_consumer, is_known
from kafka_eos_source.kafka.tokens import PROVIDER

SECRET = "hunter2-is-secret"
SASL = {"security.protocol": "sasl_ssl"}
MSK = "b-1.sales.a1b2c3.c2.kafka.eu-central-1.amazonaws.com:9098"
IAM = "software.amazon.msk.auth.iam"
AWS_HANDLER = f"{IAM}.IAMClientCallbackHandler"
OLD_OAUTH_HANDLER = "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler"
OAUTH_HANDLER = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler"
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
KERBEROS = "com.sun.security.auth.module.Krb5LoginModule"


@pytest.fixture(autouse=True)
def no_region(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


def is_installed(monkeypatch: pytest.MonkeyPatch, *, without: str = "") -> None:
    """Makes every optional package appear installed, except one."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: None if name == without else found("json" if name == "gssapi" else name, *more),
    )


@pytest.mark.parametrize(
    "handler", [OAUTH_HANDLER, OAUTH_HANDLER.replace("oauthbearer.O", "oauthbearer.secured.O")]
)
@pytest.mark.parametrize("package", ["", "kafkashaded."])  # Databricks has its own
def test_kip_768_becomes_client_credentials(handler: str, package: str) -> None:
    assert check_consumer(
        {
            **SASL,
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.login.callback.handler.class": package + handler,
            "sasl.oauthbearer.token.endpoint.url": "https://login.example.com/token",
            "sasl.jaas.config": f'{package}{OAUTH} required clientId="me" clientSecret="{SECRET}" '
            'scope="kafka" extension_logicalCluster="lkc-1" extension_identityPoolId="pool-2";',
        }
    ) == {
        **SASL,
        "sasl.mechanisms": "OAUTHBEARER",
        "sasl.oauthbearer.method": "oidc",
        "sasl.oauthbearer.token.endpoint.url": "https://login.example.com/token",
        "sasl.oauthbearer.client.id": "me",
        "sasl.oauthbearer.client.secret": SECRET,
        "sasl.oauthbearer.scope": "kafka",
        "sasl.oauthbearer.extensions": "logicalCluster=lkc-1,identityPoolId=pool-2",
    }


def test_unsecured_tokens_of_java_are_translated() -> None:
    assert check_consumer(
        {
            **SASL,
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f'{OAUTH} required unsecuredLoginStringClaim_sub="alice";',
        }
    ) == {
        **SASL,
        "sasl.mechanisms": "OAUTHBEARER",
        "enable.sasl.oauthbearer.unsecure.jwt": "true",
        "sasl.oauthbearer.config": "principal=alice lifeSeconds=3600",
    }


def test_kerberos_of_java_is_translated(monkeypatch: pytest.MonkeyPatch) -> None:
    is_installed(monkeypatch)
    assert check_consumer(
        {
            **SASL,
            "sasl.mechanism": "GSSAPI",
            "sasl.kerberos.service.name": "kafka",
            "sasl.jaas.config": f"{KERBEROS} required useKeyTab=true storeKey=true serviceName=kafka "
            'keyTab="/etc/me.keytab" principal="me@EXAMPLE.COM";',
        }
    ) == {
        **SASL,
        "sasl.mechanisms": "GSSAPI",
        "sasl.kerberos.service.name": "kafka",
        "sasl.kerberos.keytab": "/etc/me.keytab",
        "sasl.kerberos.principal": "me@EXAMPLE.COM",
    }


@pytest.mark.parametrize(
    "kafka",
    [
        {"sasl.mechanism": "AWS_MSK_IAM"},
        {
            "sasl.mechanisms": "aws_msk_iam",
            "sasl.jaas.config": f"{IAM}.IAMLoginModule required;",
        },
        {
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.jaas.config": "shadedmskiam.software.amazon.msk.auth.iam.IAMLoginModule required;",
            "sasl.client.callback.handler.class": "shadedmskiam." + AWS_HANDLER,
        },
        {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f"{OAUTH} required;",
            "sasl.login.callback.handler.class": f"{IAM}.IAMOAuthBearerLoginCallbackHandler",
            "sasl.client.callback.handler.class": "org.apache.kafka.common.security.oauthbearer.internals."
            "OAuthBearerSaslClientCallbackHandler",
        },
        {  # as in the README of aws-msk-iam-auth
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.jaas.config": f"{OAUTH} Required;",
            "sasl.login.callback.handler.class": f"{IAM}.IAMOAuthBearerLoginCallbackHandler",
            "sasl.client.callback.handler.class": f"{IAM}.IAMOAuthBearerLoginCallbackHandler",
        },
    ],
)
def test_each_form_of_aws_becomes_tokens_of_its_signer(kafka: dict[str, str]) -> None:
    assert check_consumer({**SASL, "bootstrap.servers": MSK, **kafka}) == {
        **SASL,
        "bootstrap.servers": MSK,
        "sasl.mechanisms": "OAUTHBEARER",
        PROVIDER: "kafka_eos_source.kafka.tokens:aws_token",
        "sasl.oauthbearer.config": "awsRegion=eu-central-1",
    }


@pytest.mark.parametrize("is_jaas", [True, False])
def test_profiles_and_roles_of_aws_are_kept(is_jaas: bool) -> None:
    options = {
        "awsProfileName": "prod",
        "awsRoleArn": "arn:aws:iam::123456789012:role/kafka",
        "awsRoleSessionName": "spark",
        "awsStsRegion": "eu-west-1",
    }
    line = " ".join(f'{name}="{value}"' if is_jaas else f"{name}={value}" for name, value in options.items())
    kafka = (
        {"sasl.jaas.config": f"{IAM}.IAMLoginModule required {line} awsDebugCreds=true;"}
        if is_jaas
        else {"sasl.oauthbearer.config": line}
    )
    found = check_consumer({**SASL, "bootstrap.servers": MSK, "sasl.mechanism": "AWS_MSK_IAM", **kafka})
    given = dict(each.split("=", 1) for each in found["sasl.oauthbearer.config"].split())
    assert given == {**options, "awsRegion": "eu-central-1"}


@pytest.mark.parametrize(
    ("servers", "environment", "config", "region"),
    [
        (MSK, {"AWS_REGION": "us-east-1"}, "", "eu-central-1"),
        ("boot-x1.c1.kafka-serverless.us-west-2.amazonaws.com:9098", {}, "", "us-west-2"),
        ("b-1.n.abc.c2.kafka.cn-north-1.amazonaws.com.cn:9098", {}, "", "cn-north-1"),
        (MSK, {}, "awsRegion=us-gov-west-1", "us-gov-west-1"),
        ("kafka.internal:9098", {"AWS_REGION": "us-east-1"}, "", "us-east-1"),
        ("kafka.internal:9098", {"AWS_DEFAULT_REGION": "us-east-2"}, "", "us-east-2"),
    ],
)
def test_the_region_is_that_of_the_cluster(
    servers: str, environment: dict[str, str], config: str, region: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    more = {"sasl.oauthbearer.config": config} if config else {}
    kafka = {**SASL, "bootstrap.servers": servers, "sasl.mechanism": "AWS_MSK_IAM", **more}
    assert check_consumer(kafka)["sasl.oauthbearer.config"] == f"awsRegion={region}"


_REFUSED: list[tuple[dict[str, str], str]] = [
    ({"sasl.mechanism": "CRAM-MD5"}, "'CRAM-MD5'"),
    ({}, "'kafka.sasl.mechanism' is missing"),
    ({"sasl.mechanism": "PLAIN", "sasl.username": "u"}, "'kafka.sasl.password' is missing"),
    ({"sasl.mechanism": "OAUTHBEARER"}, "where tokens come from"),
    ({"sasl.mechanism": "AWS_MSK_IAM", "bootstrap.servers": "k:9098"}, "region of the cluster is unknown"),
    ({"sasl.mechanism": "AWS_MSK_IAM", "sasl.oauthbearer.config": "region=x"}, "has no option 'region'"),
    (
        {"sasl.mechanism": "AWS_MSK_IAM", "sasl.jaas.config": f'{OAUTH} required clientSecret="{SECRET}";'},
        "names OAuthBearerLoginModule, but 'kafka.sasl.mechanism'",
    ),
    (
        {"sasl.mechanism": "PLAIN", "sasl.jaas.config": f"{IAM}.IAMLoginModule required;"},
        "has the value 'PLAIN', but 'kafka.sasl.jaas.config'",
    ),
    (
        {
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.jaas.config": "a.IAMLoginModule required awsProfileName=p;",
            "sasl.oauthbearer.config": "awsRegion=eu-west-1",
        },
        "are both set for a login at AWS",
    ),
    ({"sasl.mechanism": "AWS_MSK_IAM", PROVIDER: "a:b"}, "are both set"),
    (
        {"sasl.mechanism": "OAUTHBEARER", "sasl.login.callback.handler.class": "com.example.Handler"},
        "'com.example.Handler': only Java's clients",
    ),
    (
        {
            "sasl.mechanism": "AWS_MSK_IAM",
            "sasl.client.callback.handler.class": "com.example.Handler",
        },
        "'com.example.Handler'",
    ),
    (
        {
            "sasl.mechanism": "OAUTHBEARER",
            "sasl.oauthbearer.client.secret": "other",
            "sasl.jaas.config": f'{OAUTH} required clientId="me" clientSecret="{SECRET}";',
        },
        "'kafka.sasl.oauthbearer.client.secret' and 'kafka.sasl.jaas.config'",
    ),
    ({"sasl.jaas.config": f'{OAUTH} required clientSecret="{SECRET}"'}, "one entry"),
    ({"sasl.jaas.config": f'a.b.OtherLoginModule required p="{SECRET}";'}, "OtherLoginModule cannot"),
    ({"sasl.jaas.config": f"{KERBEROS} required useKeyTab=true;"}, "keyTab with useKeyTab"),
    (
        {"sasl.jaas.config": f'{OAUTH} required unsecuredLoginStringClaim_team="{SECRET}";'},
        "unsecuredLoginStringClaim_sub",
    ),
    ({"sasl.mechanism": "GSSAPI", "sasl.kerberos.kinit.cmd": "kinit me"}, "kinit.cmd' .* cannot be used"),
]  # fmt: skip


def test_a_handler_of_java_is_refused_with_each_way_to_get_tokens() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        check_consumer(
            {
                **SASL,
                "sasl.mechanism": "OAUTHBEARER",
                "sasl.login.callback.handler.class": "io.strimzi.kafka.oauth.client."
                "JaasClientOauthLoginCallbackHandler",
            }
        )
    assert "kafka.sasl.oauthbearer.token.endpoint.url" in caught.value.fix
    assert PROVIDER in caught.value.fix


@pytest.mark.parametrize(("kafka", "said"), _REFUSED)
def test_what_cannot_log_in_is_refused_before_a_query_starts(
    kafka: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_installed(monkeypatch)
    with pytest.raises(InvalidOptionError, match=said) as caught:
        check_consumer({**SASL, "bootstrap.servers": MSK, **kafka})
    assert caught.value.fix
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("package", "extra", "kafka"),
    [
        ("gssapi", "kerberos", {"sasl.mechanism": "GSSAPI"}),
        ("aws_msk_iam_sasl_signer", "aws", {"sasl.mechanism": "AWS_MSK_IAM", "bootstrap.servers": MSK}),
    ],
)
def test_a_missing_package_is_named_with_the_command(
    package: str, extra: str, kafka: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    is_installed(monkeypatch, without=package)
    with pytest.raises(InvalidOptionError, match="is not installed") as caught:
        check_consumer({**SASL, **kafka})
    assert f"pip install 'kafka-eos-source[{extra}]'" in caught.value.fix


def test_options_without_sasl_are_not_checked() -> None:
    assert check_consumer({"security.protocol": "SSL", "sasl.mechanism": "OAUTHBEARER"}) != {}


@pytest.mark.parametrize("name", [PROVIDER, "sasl.jaas.config", "sasl.client.callback.handler.class"])
def test_options_of_logins_are_known(name: str) -> None:
    assert is_known(name)
