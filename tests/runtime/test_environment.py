"""What of an environment reaches a rank on another machine."""

from __future__ import annotations

from phalanx.runtime import environment

ENGINE = {
    "NCCL_DEBUG": "INFO",
    "NCCL_SOCKET_IFNAME": "engine0",
    "GLOO_SOCKET_IFNAME": "engine0",
    "OMP_NUM_THREADS": "4",
    "HF_HOME": "/models",
    "HF_TOKEN": "secret",
    "HUGGING_FACE_HUB_TOKEN": "secret",
    "AWS_SECRET_ACCESS_KEY": "secret",
    "RAY_AUTH_TOKEN": "secret",
    "PATH": "/engine/bin",
    "CUDA_VISIBLE_DEVICES": "7",
    "LD_PRELOAD": "/tmp/evil.so",
}
NODE = {
    "PATH": "/node/bin",
    "HOME": "/home/node",
    "CUDA_VISIBLE_DEVICES": "2",
    "NCCL_SOCKET_IFNAME": "node0",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_TOKEN": "secret",
    "DATABASE_PASSWORD": "secret",
}


def test_only_what_tunes_libraries_leaves_the_engines_machine() -> None:
    assert environment.sent(ENGINE) == {
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "engine0",
        "GLOO_SOCKET_IFNAME": "engine0",
        "OMP_NUM_THREADS": "4",
        "HF_HOME": "/models",
    }


def test_a_rank_keeps_its_machines_paths_and_gpu_and_its_word_on_interfaces() -> None:
    assert environment.of_rank(NODE, environment.sent(ENGINE)) == {
        "PATH": "/node/bin",
        "HOME": "/home/node",
        "CUDA_VISIBLE_DEVICES": "2",
        "NCCL_DEBUG": "INFO",
        "NCCL_SOCKET_IFNAME": "node0",
        "GLOO_SOCKET_IFNAME": "engine0",
        "OMP_NUM_THREADS": "4",
        "HF_HOME": "/models",
    }


def test_a_rank_takes_nothing_else_even_if_it_is_sent() -> None:
    assert environment.of_rank({}, ENGINE) == environment.sent(ENGINE)
