"""Prompts and answers apart: a script a replica, and the one in front that sends a request to one of each."""

from __future__ import annotations

import json

from phalanx.errors import ConfigError
from phalanx.plan.recipes.launch import FIRST_PORT, TRTLLM_OPTIONS, Launch, command, trtllm_options
from phalanx.plan.recipes.words import title, wrapped

_PROMPT_PORT, _ANSWER_PORT, _MEETING_PORT, _SIDE_PORT = 8100, 8200, 9100, 5600
_NIXL = json.dumps({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
_PROMPTS, _ANSWERS = "prefill", "decode"


def scripts(launch: Launch, kind: str) -> dict[str, str]:
    """Files to run each on its box, or all on one; the router last."""
    if kind != "shell":
        raise ConfigError(
            "needs_other_recipe",
            f"Prompts and answers run on different replicas: there is no {kind} recipe for that.",
            "Use --recipe shell, or another --engine.",
        )
    files = {}
    for replica in range(launch.replicas):
        part = _PROMPTS if replica < launch.prompt_replicas else _ANSWERS
        number = replica if part == _PROMPTS else replica - launch.prompt_replicas
        files[f"{part}-{number}.sh"] = _server(launch, part, number, replica)
    if launch.engine.name == "trtllm":
        for part in (_PROMPTS, _ANSWERS):
            alone = "disable_overlap_scheduler: true\n" if part == _PROMPTS else ""
            sent = "cache_transceiver_config:\n  backend: DEFAULT\n"
            files[f"{part}.yaml"] = trtllm_options(launch) + alone + sent
    return files | _router(launch)


def _port(part: str, number: int) -> int:
    return (_PROMPT_PORT if part == _PROMPTS else _ANSWER_PORT) + number


def _server(launch: Launch, part: str, number: int, replica: int) -> str:
    in_a_box = max(1, launch.per_node // launch.gpus)
    devices = ",".join(launch.devices(replica % in_a_box))
    extra: tuple[str, ...] = ()
    before = ""
    if launch.engine.name == "vllm":
        extra = ("--kv-transfer-config", _NIXL)
        side = _SIDE_PORT + replica * launch.gpus
        before = f'export VLLM_NIXL_SIDE_CHANNEL_HOST="$HOST" VLLM_NIXL_SIDE_CHANNEL_PORT={side}\n'
    elif launch.engine.name == "sglang":
        meeting = ("--disaggregation-bootstrap-port", str(_MEETING_PORT + number)) if part == _PROMPTS else ()
        extra = ("--disaggregation-mode", part, "--disaggregation-transfer-backend", "nixl", *meeting)
    words = wrapped(command(launch, host="$HOST", port=_port(part, number), extra=extra)).replace("'$HOST'", '"$HOST"')
    words = words.replace(TRTLLM_OPTIONS, f"{part}.yaml")
    return f"""#!/usr/bin/env bash
# {title(launch)}: {part} {number}
# HOST is this box's address where the others are on other boxes; nobody else should reach it.
set -euo pipefail
: "${{HOST:=127.0.0.1}}"
{before}export {launch.visible}={devices}
exec {words}
"""


def _router(launch: Launch) -> dict[str, str]:
    """Where a request comes in. Addresses of other boxes replace 127.0.0.1."""
    prompts = [f"127.0.0.1:{_port(_PROMPTS, number)}" for number in range(launch.prompt_replicas)]
    answers = [f"127.0.0.1:{_port(_ANSWERS, number)}" for number in range(launch.replicas - launch.prompt_replicas)]
    head = f"#!/usr/bin/env bash\n# {title(launch)}: the router\nset -euo pipefail\nexec "
    if launch.engine.name == "trtllm":
        servers = {
            "hostname": "127.0.0.1",
            "port": FIRST_PORT,
            "backend": "pytorch",
            "context_servers": {"num_instances": len(prompts), "urls": prompts},
            "generation_servers": {"num_instances": len(answers), "urls": answers},
        }
        start = head + "trtllm-serve disaggregated -c router.yaml\n"
        return {"router.sh": start, "router.yaml": json.dumps(servers, indent=2) + "\n"}
    words = ["vllm-router", "--vllm-pd-disaggregation"]
    if launch.engine.name == "sglang":
        words = ["python3", "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    for number, address in enumerate(prompts):
        meeting = [str(_MEETING_PORT + number)] if launch.engine.name == "sglang" else []
        words += ["--prefill", f"http://{address}", *meeting]
    for address in answers:
        words += ["--decode", f"http://{address}"]
    return {"router.sh": head + wrapped([*words, "--host", "127.0.0.1", "--port", str(FIRST_PORT)]) + "\n"}
