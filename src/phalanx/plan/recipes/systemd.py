"""Units for systemd."""

from __future__ import annotations

import shlex

from phalanx.plan.recipes.launch import FIRST_PORT, Launch, command
from phalanx.plan.recipes.words import title
from phalanx.version import __version__

_HOW = {
    "phalanx": (
        "# useradd --system phalanx; python3 -m venv /opt/phalanx",
        f"# /opt/phalanx/bin/pip install 'phalanx[serve] @ file:///root/phalanx-{__version__}-py3-none-any.whl'",
        "# To open it to a network, add: --host 0.0.0.0 --api-key-file /etc/phalanx/keys --tls-cert ... --tls-key ...",
    )
}
_OWN = {"phalanx": ("ExecReload=/bin/kill -HUP $MAINPID", "TimeoutStopSec=60")}

_DROP_CACHES = "ExecStartPre=+/bin/sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"
"""Where the GPU's memory is the system's, the engine cannot take what the page cache holds."""


def unit_files(launch: Launch) -> dict[str, str]:
    """A unit a replica. Phalanx reads its keys and certificate anew on `systemctl reload`."""
    files = {}
    for replica in range(launch.replicas):
        words = ["/usr/bin/env", *command(launch, port=FIRST_PORT + replica)]
        files[f"{launch.engine.name}-{replica}.service"] = "\n".join(
            [
                *_HOW.get(launch.engine.name, ()),
                "[Unit]",
                f"Description={title(launch)}, replica {replica}",
                "After=network-online.target",
                "Wants=network-online.target",
                "",
                "[Service]",
                f"User={launch.engine.name}",
                f"WorkingDirectory=/var/lib/{launch.engine.name}",
                f"StateDirectory={launch.engine.name}",
                f"Environment={launch.visible}={','.join(launch.devices(replica))}",
                f"Environment=HF_HOME=/var/lib/{launch.engine.name}",
                f"Environment=PATH=/opt/{launch.engine.name}/bin:/usr/local/bin:/usr/bin:/bin",
                *([_DROP_CACHES] if launch.one_gpu_machines else []),
                f"ExecStart={shlex.join(words)}",
                *_OWN.get(launch.engine.name, ()),
                "Restart=on-failure",
                "RestartSec=10",
                "LimitMEMLOCK=infinity",
                "NoNewPrivileges=true",
                "ProtectSystem=full",
                "",
                "[Install]",
                "WantedBy=multi-user.target",
                "",
            ]
        )
    return files
