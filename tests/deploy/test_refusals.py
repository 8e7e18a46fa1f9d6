"""Values that cannot work are refused before anything is installed, by a message that names them and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from .chart import Helm, Object, RefusedError, merged


def nested(path: str, value: Any) -> Object:
    """{"a": {"b": value}} for a.b."""
    for key in reversed(path.split(".")):
        value = {key: value}
    result: Object = value
    return result


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("cache.hostCapcity", "1GiB", r"'/cache': additional properties 'hostCapcity' not allowed"),
        ("shap", "redis", r"additional properties 'shap' not allowed"),
        ("shape", "deamonset", r"'/shape': value must be one of 'sidecar', 'daemonset', 'redis'"),
        ("cache.hostCapacity", "64Gi", r"'/cache/hostCapacity': '64Gi' does not match .*KiB\|MiB\|GiB\|TiB\|KB"),
        ("cache.hostCapacity", "-4GiB", r"'/cache/hostCapacity': '-4GiB' does not match .*GiB"),
        ("cache.hostCapacity", 64, r"'/cache/hostCapacity': got number, want string"),
        ("cache.hostCapacity", "", r"'/cache/hostCapacity': '' does not match"),
        ("cache.hostCapacity", "0GiB", r'cache.hostCapacity = "0GiB" must be larger than 0, such as 64GiB'),
        ("cache.nvme.capacity", "1T", r"'/cache/nvme/capacity': '1T' does not match .*TiB"),
        ("engine.hostCapacity", "8 gigs", r"'/engine/hostCapacity': '8 gigs' does not match"),
        ("cache.drainSeconds", 0, r"'/cache/drainSeconds': minimum: got 0, want 1"),
        ("cache.http.port", 80, r"'/cache/http/port': minimum: got 80, want 1,024"),
        ("podSecurity.runAsUser", 0, r"'/podSecurity/runAsUser': minimum: got 0, want 1"),
        ("engine.replicas", -1, r"'/engine/replicas': minimum"),
        (
            "cache.image.digest",
            "sha256:1234",
            r"'/cache/image/digest': 'sha256:1234' does not match .*\[0-9a-f\]\{64\}",
        ),
        ("redis.url", "cache:6379", r"'/redis/url': 'cache:6379' does not match .*redis\|rediss"),
        ("networkPolicy.metricsFrom", [], r"'/networkPolicy/metricsFrom': minItems"),
        ("networkPolicy.engineFrom", [{}], r"'/networkPolicy/engineFrom/0': minProperties"),
        ("engine.service.type", "LoadBalancer", r'"LoadBalancer" with an empty networkPolicy.engineFrom.*ipBlock'),
        ("daemonset.socketDirectory", "/run/../etc", r"'/daemonset/socketDirectory': .*not"),
        (
            "cache.memory",
            "8GiB",
            r'cache.hostCapacity = "16GiB" does not fit into cache.memory = "8GiB".*lower the cap',
        ),
        ("cache.memory", "16GiB", r"with the index it takes 17084 MiB.*leave cache.memory out"),
        ("cache.maxValue", "32GiB", r'cache.maxValue = "32GiB" is more than cache.hostCapacity = "16GiB".*lower it'),
        ("cache.nvme.capacity", "1TiB", r'cache.nvme.capacity = "1TiB" has no volume.*set cache.nvme.volume.type'),
        ("cache.nvme.volume.type", "claim", r'"claim" without cache.nvme.capacity: say how much'),
        (
            "cache.nvme.volume.hostPaths",
            ["/mnt/a"],
            r"hostPaths with cache.nvme.volume.type = \"\": set it to hostPath",
        ),
        ("cache.tcp.tlsSecretName", "tls", r"without cache.tcp.enabled = true: set it"),
        ("cache.image.tag", "latest", r'cache.image.tag = "latest" names another image tomorrow: give a version'),
        ("engine.image.tag", "latest", r'engine.image.tag = "latest" names another image tomorrow: give a version'),
        ("engine.enabled", False, r"leaves nothing to deploy: set shape to daemonset, or engine.enabled to true"),
        ("engine.config.tiers", [], r"engine.config.tiers is written by this chart: leave it out"),
        ("engine.args", ["--api-key", "x"], r'engine.args holds "--api-key".*secretKeyRef'),
        ("engine.args", ["vllm serve M --hf-token=x"], r'engine.args holds "--hf-token".*secretKeyRef'),
        ("engine.env", [{"name": "HF_TOKEN", "value": "x"}], r"engine.env: HF_TOKEN holds a secret.*secretKeyRef"),
        ("cache.env", [{"name": "MY_PASSWORD", "value": "x"}], r"cache.env: MY_PASSWORD holds a secret.*secretKeyRef"),
        ("engine.env", [{"name": "HF_TOKEN_2", "value": "x"}], r"engine.env: HF_TOKEN_2 holds a secret"),
        ("cache.http.port", 30000, r"two of the ports of a pod \(30000, .*choose others"),
        ("cache.tcp", {"enabled": True, "port": 9404}, r"two of the ports of a pod"),
        ("engine", {"ranks": 8, "port": 9412, "httpPort": 9405}, r"two of the ports of a pod"),
        ("cache.cpu", {"request": "8", "limit": "4000m"}, r'cache.cpu: request = "8" is more than limit = "4000m"'),
        ("engine.cpu", {"request": "1500m", "limit": "1"}, r"engine.cpu: request"),
        ("fullnameOverride", "2024-kvtier", r'"2024-kvtier" cannot be the name of a Service.*set fullnameOverride'),
        ("cache.users", [{"name": "a", "passwordKey": "a"}] * 2, r"cache.users: two of a, a have the same name"),
        ("cache.users", [{"name": "default", "passwordKey": "a"}], r"give yours another name"),
        ("cache.image.repository", "kvtier/server:latest", r"'/cache/image/repository'.*does not match"),
        ("engine.podLabels", {"app.kubernetes.io/instance": "x"}, r"is the chart's own.*leave it out"),
        ("engine.httpPort", 9404, r"cache.http.port = 9404 is one of the ports from engine.httpPort.*choose another"),
        ("valkey.enabled", True, r'valkey.enabled = true with shape = "sidecar".*set shape to redis'),
    ],
)
def test_one_value_is_refused(helm: Helm, path: str, value: Any, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        helm.render(nested(path, value))


HOST_PATH = {"capacity": "1TiB", "volume": {"type": "hostPath"}}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shape": "redis"}, r'shape = "redis" needs redis.url.*or set valkey.enabled'),
        (
            {"shape": "redis", "redis": {"url": "redis://a:b@c:1"}},
            r"redis.url holds a password: put it into the Secret",
        ),
        ({"shape": "redis", "redis": {"url": "redis://a:b/c@d:1"}}, r"redis.url holds a password"),
        ({"shape": "redis", "redis": {"url": "redis://c:1", "tlsCaSecretName": "ca"}}, r"not TLS: write rediss://"),
        ({"shape": "redis", "redis": {"url": "redis://c:1", "mode": "sentinel"}}, r"needs redis.service"),
        (
            {"shape": "redis", "redis": {"url": "redis://c:1"}, "valkey": {"enabled": True}},
            r"exclude each other: leave one out",
        ),
        (
            {"shape": "redis", "valkey": {"enabled": True, "maxmemory": 1}},
            r"valkey:\n.*additional properties 'maxmemory' not allowed",
        ),
        ({"cache": {"nvme": HOST_PATH}}, r'"hostPath" with shape = "sidecar".*use claim'),
        ({"shape": "daemonset", "cache": {"nvme": HOST_PATH}}, r"needs cache.nvme.volume.hostPaths: name one"),
        (
            {"cache": {"nvme": {"capacity": "1TiB", "volume": {"type": "claim", "size": "900GiB"}}}},
            r'"1TiB" does not fit into cache.nvme.volume.size = "900GiB".* takes [0-9]+ MiB; lower the capacity',
        ),
    ],
)
def test_values_that_do_not_fit_together_are_refused(helm: Helm, values: Object, message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        helm.render(values)


def test_a_password_is_not_repeated(helm: Helm) -> None:
    with pytest.raises(RefusedError) as refused:
        helm.render({"shape": "redis", "redis": {"url": "rediss://user:hunter2@cache:6379"}})
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "values",
    [
        nested("engine.args", ["--tokenizer-path", "x", "--max-total-tokens", "5", "--kv-connector-config", "a"]),
        nested("engine.env", [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}]),
        nested("engine.env", [{"name": n, "value": "5"} for n in ("TOKENIZERS_PARALLELISM", "SGLANG_MAX_NEW_TOKENS")]),
        nested("cache.image.repository", "registry:5000/kvtier/server"),
        nested("engine.config", None),
        nested("cache.cpu", {"request": "500m", "limit": "1.5"}),
        nested("cache.memory", "17084MiB"),
        nested("cache.hostCapacity", "1.5GiB"),
        {"shape": "daemonset", "engine": {"enabled": False}, "cache": {"http": {"port": 9410}}},
        merged(
            nested("cache.nvme", HOST_PATH),
            {"shape": "daemonset", "cache": {"nvme": {"volume": {"hostPaths": ["/d"]}}}},
        ),
    ],
)
def test_what_looks_like_it_is_taken(helm: Helm, values: Object) -> None:
    assert helm.render(values)


def test_names_that_look_like_numbers_stay_names(helm: Helm) -> None:
    values = {"fullnameOverride": "kv", "nameOverride": "77", "secret": {"name": "123", "httpToken": "5"}}
    for found in helm.render(values, release="2024"):
        labels = found["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "2024" and labels["app.kubernetes.io/name"] == "77"
    rendered = helm.render(values, release="2024")
    (engine,) = [found for found in rendered if found["kind"] == "StatefulSet"]
    secrets = [v["secret"] for v in engine["spec"]["template"]["spec"]["volumes"] if "secret" in v]
    assert secrets
    assert all(secret["secretName"] == "123" for secret in secrets)
    trial: Object = {"shape": "redis", "fullnameOverride": "kv", "valkey": {"enabled": True}}
    with pytest.raises(RefusedError, match="choose another name of the release"):
        helm.render(trial, release="2024")
