"""hosts.toml: what is understood, and what is refused with which words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from phalanx.cluster.hosts import parse_hosts, read_hosts
from phalanx.errors import ConfigError

GOOD = """
[cluster]
interface = "enp1s0f1np1"
python = "/opt/phalanx/bin/python"
port = 6400
user = "op"
rdma = ["rocep1s0f1", "roceP2p1s0f1"]
token_file = "secret/token"
environment = { NCCL_DEBUG = "WARN", HF_HOME = "/data/hf" }

[[node]]
host = "b.example"
ip = "192.168.100.11"
gpus = 2
environment = { NCCL_DEBUG = "INFO" }

[[node]]
host = "local"
ip = "192.168.100.12"
head = true
gpus = 1
interface = "eth7"

[[node]]
host = "a"
ip = "192.168.100.9"
gpus = 3
python = "/home/op/.venv/bin/python"
rdma = ["mlx5_0"]
"""
PATH = Path("/etc/phalanx/hosts.toml")


def test_a_cluster_is_the_head_then_the_others_by_address() -> None:
    cluster = parse_hosts(GOOD, PATH)
    assert [(node.host, node.ip) for node in cluster.nodes] == [
        ("local", "192.168.100.12"),
        ("a", "192.168.100.9"),
        ("b.example", "192.168.100.11"),
    ]
    assert cluster.address == "192.168.100.12:6400"
    assert cluster.token_file == Path("/etc/phalanx/secret/token")
    assert cluster.ssh_config is None


def test_a_node_has_the_cluster_s_settings_unless_it_has_its_own() -> None:
    head, a, b = parse_hosts(GOOD, PATH).nodes
    assert (head.interface, a.interface) == ("eth7", "enp1s0f1np1")
    assert (head.python, a.python) == ("/opt/phalanx/bin/python", "/home/op/.venv/bin/python")
    assert (b.rdma, a.rdma) == (("rocep1s0f1", "roceP2p1s0f1"), ("mlx5_0",))
    assert a.environment == {"NCCL_DEBUG": "WARN", "HF_HOME": "/data/hf"}
    assert b.environment == {"NCCL_DEBUG": "INFO", "HF_HOME": "/data/hf"}
    assert (head.folder, head.is_local, b.is_local) == ("/tmp/phalanx-cluster/192.168.100.12", True, False)


def test_ranks_fill_the_head_first_and_stay_together() -> None:
    cluster = parse_hosts(GOOD, PATH)
    assert cluster.ranks() == {"192.168.100.12": [0], "192.168.100.9": [1, 2, 3], "192.168.100.11": [4, 5]}
    assert cluster.ranks(2) == {"192.168.100.12": [0], "192.168.100.9": [1], "192.168.100.11": []}


@pytest.mark.parametrize(
    ("old", "new", "found", "fix"),
    [
        ("head = true\n", "", "no node is the head", "head = true"),
        ("gpus = 2", "gpus = 2\nhead = true", "are both heads", "in one node"),
        ("192.168.100.9", "192.168.100.11", "2 nodes have the ip 192.168.100.11", "own address"),
        ("192.168.100.9", "192.168.101.9", "a (192.168.101.9) is not in 192.168.100.0/24", "one subnet"),
        ("192.168.100.9", "spark-2", "ip 'spark-2' is no IPv4", "such as 192.168.100.10"),
        ("192.168.100.9", "127.0.0.1", "Ray replaces 127.0.0.1", "127.0.0.2"),
        ('ip = "192.168.100.9"', "", "[[node]] 3 has no ip", "fast network"),
        ('host = "a"', 'hots = "a"', "[[node]] 3 has an unknown key 'hots'", "Did you mean host?"),
        ("port = 6400", "prot = 6400", "[cluster] has an unknown key 'prot'", "Did you mean port?"),
        ("[cluster]", "[clustr]", "the file has an unknown key 'clustr'", "Did you mean cluster?"),
        ("port = 6400", "port = 0", "port is 0", "1 to 65535"),
        ("port = 6400", 'port = "6400"', "port is wrong", "Correct port"),
        ("gpus = 2", "gpus = true", "gpus is wrong", "Correct gpus"),
        ('"eth7"', '"eth0/../x"', "'eth0/../x' is no interface name", "ip -br addr"),
        ('"eth7"', '"a-name-of-16-char"', "is no interface name", "ip -br addr"),
        ('interface = "enp1s0f1np1"\n', "", "has no interface", "Write interface"),
        ('["mlx5_0"]', '["mlx5 0"]', "'mlx5 0' is no interface name", "ip -br addr"),
        ('python = "/opt/phalanx/bin/python"\n', "", "has no python", '"/opt/phalanx/bin/python"'),
        ('"/opt/phalanx/bin/python"', '"bin/python"', "'bin/python' is no absolute path", "in full"),
        ("gpus = 3", "", "[[node]] 3 has room for no rank", "gpus = 1"),
        ("gpus = 3", "ranks = 0", "[[node]] 3 has room for no rank", "gpus = 1"),
        ("gpus = 3", "ranks = 3\ngpus = 1", "both gpus and ranks", "Write gpus, or ranks"),
        ("gpus = 3", "ranks = 3", "a (192.168.100.9) 3 ranks", "Write gpus everywhere"),
        ('host = "a"', 'host = "-oProxyCommand=reboot"', "is no host name", "that ssh knows"),
        ('host = "a"', 'host = "a b"', "is no host name", "that ssh knows"),
        ('host = "a"\n', "", "[[node]] 3 has no host", 'host = "local"'),
        ('host = "a"', 'host = "b.example"', "2 nodes have the host b.example", "once"),
        ('user = "op"', 'user = "-x"', "'-x' is no user name", "logs in as"),
        ("HF_HOME", "HF_TOKEN", "HF_TOKEN looks like a secret", "in a file"),
        ("HF_HOME", "AWS_SECRET_ACCESS_KEY", "looks like a secret", "in a file"),
        ("HF_HOME", '"A B"', "'A B' is no environment variable", "letters"),
        ("port = 6400", 'network = "192.168.100.0/33"', "is no subnet", "192.168.100.0/24"),
        ("port = 6400", 'folder = "/a/long/folder/for/sockets"', "45 characters long", "of 23 characters"),
        ("port = 6400", 'folder = "here"', "folder 'here' is no absolute path", "in full"),
        ("port = 6400", "port = ", "it is not TOML", "line 5"),
    ],
)
def test_a_mistake_is_named_with_what_to_write(old: str, new: str, found: str, fix: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError) as refused:
        parse_hosts(GOOD.replace(old, new), PATH)
    assert refused.value.code == "bad_hosts"
    assert found in refused.value.found
    assert fix in str(refused.value)
    assert str(PATH) in refused.value.found


def test_a_wider_subnet_can_be_told() -> None:
    text = GOOD.replace("192.168.100.9", "192.168.101.9").replace("port = 6400", 'network = "192.168.0.0/16"')
    assert parse_hosts(text, PATH).nodes[2].ip == "192.168.101.9"


def test_nodes_on_the_cpu_have_the_same_number_of_ranks() -> None:
    text = re.sub(r"gpus = \d", "ranks = 2", GOOD)
    assert [node.slots for node in parse_hosts(text, PATH).nodes] == [2, 2, 2]
    with pytest.raises(ConfigError, match="as many on each node"):
        parse_hosts(text.replace("ranks = 2", "ranks = 3", 1), PATH)


@pytest.mark.parametrize("text", ["", "[cluster]\n", "node = 3\n[cluster]\n", "[node]\nhost = 'a'\n"])
def test_a_file_without_nodes_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="names no node"):
        parse_hosts(text, PATH)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_hosts(tmp_path / "hosts.toml")
    (tmp_path / "hosts.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_hosts(tmp_path / "hosts.toml")
